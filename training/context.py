"""What the context is worth to a model: does its loss fall when it sees more?

    python train.py eval_only=true resume=NAME      measures a run's best checkpoint
    python train.py context_every=500               measures every 500 steps of a training, and at its end

    loss_at_LO_HI      the loss of the tokens that see LO to HI tokens: 1, 2, 3 to 4, 5 to 8, ..., T (each its own too)
    loss_given_N       the loss of the last tokens of each window, given at most N tokens: 32, 64, ..., T
    context_gain       the second: the loss given the fewest minus that given all
    context_gain_error its standard error, over the windows: each has both losses
    recall_accuracy    data=recall: the share of the second string that the model gets right; recall_loss: its loss
    passkey_L_depth_D  data=passkey: the share of pass keys that it finds, in texts of L tokens, given at D % of them

loss_at compares different tokens. loss_given compares the same ones, so its differences are due to the context alone.
For that, each window is cut into pieces of N tokens that overlap by half. The second half of each piece is measured:
its tokens see N / 2 + 1 to N tokens. So every N takes as many tokens, and a measurement as many as log2(T / 32) + 1
evaluations. Losses are in nats a token; bpb_at and bpb_given are the same in bits a byte.

    runs/NAME/context.png, passkey.png    the pictures of the last measurement

T context length, B windows in a batch.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset, open_data
from data.loader import Batch, fingerprint
from data.made import SHORTEST, answer, passkey, second_half
from data.tokenizer import encode, from_json, same
from model.gpt import GPT
from model.loss import loss_of_each
from training import checkpoint
from training.machine import out_of_memory_as, pick_device, pick_dtype, set_precision
from training.metrics import append, drawable, rewrite, show, stamp, worth_of
from training.resume import open_checkpoint
from training.run import validation
from training.settings import FEWEST, Config

DEPTHS = (0, 25, 50, 75, 100)  # percent of the filler that is before the pass key
PROMPTS = 20  # texts of each length and depth


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def measure(
    model: GPT, batches: Iterable[Batch], dataset: Dataset, source: str, autocast: AbstractContextManager
) -> dict:
    """The record of a measurement, as in this file's docstring, with the numbers of tokens and the time it took.

    model: in evaluation mode. batches: validation windows of T tokens, on the CPU. source: data.source.
    """
    started = time.perf_counter()
    record = worth(model, batches, dataset.token_bytes, autocast, second_half if source == "recall" else None)
    if source == "passkey":
        record |= retrieval(model, dataset, autocast)
    return record | {"context_ms": (time.perf_counter() - started) * 1e3}


def worth(
    model: GPT,
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    autocast: AbstractContextManager,
    part: Callable[[int], slice] | None = None,
) -> dict[str, float]:
    """The losses by position and by context given, over all batches. part(T): the targets of recall's second string."""
    T = model.config.context_length
    tail = slice(T - most(T) // 2, T)  # the last tokens of a window, which every context given predicts
    nats, sizes, right = (torch.zeros(T, dtype=torch.float64) for _ in range(3))  # of each position, over all windows
    of_windows: dict[int, list[Tensor]] = {n: [] for n in contexts(T)}  # (B,) nats of the last tokens, by context given
    for batch in batches:
        losses, hits = each_token(model, batch, autocast)
        nats += losses.sum(0)
        right += hits.sum(0)
        sizes += torch.from_numpy(token_bytes[batch.y.numpy()]).sum(0)
        for n, found in of_windows.items():
            cut = losses[:, tail]
            if n < T:
                cut = each_token(model, batch.each(partial(pieces, n=n)), autocast)[0][:, n // 2 :]
            found.append(cut.reshape(len(losses), -1).sum(1))
    given = {n: sum(float(part.sum()) for part in found) for n, found in of_windows.items()}
    # Per window, what the longest context gains over the shortest, nats per token.
    gain = (torch.cat(of_windows[min(given)]) - torch.cat(of_windows[T])) / (tail.stop - tail.start)
    windows = len(gain)
    same_tokens = windows * (tail.stop - tail.start)
    record: dict[str, float] = {"context_tokens": windows * T, "context_same_tokens": same_tokens}
    digits = max(4, len(str(T)))
    for low, high in buckets(T):
        span, name = slice(low - 1, high), f"at_{low:0{digits}}_{high:0{digits}}"
        record |= losses_of(name, float(nats[span].sum()), windows * (high - low + 1), float(sizes[span].sum()))
    for n, total in given.items():
        record |= losses_of(f"given_{n:0{digits}}", total, same_tokens, float(sizes[tail].sum()))
    record["context_gain"] = record[f"loss_given_{min(given):0{digits}}"] - record[f"loss_given_{T:0{digits}}"]
    # The standard error of the mean over the windows; NaN of a single window.
    record["context_gain_error"] = float(gain.std() / math.sqrt(windows)) if windows > 1 else math.nan
    if part is not None:
        span = part(T)
        count = windows * (span.stop - span.start)
        record["recall_loss"] = float(nats[span].sum()) / count
        record["recall_accuracy"] = float(right[span].sum()) / count
    return record


@torch.no_grad()
def each_token(model: GPT, batch: Batch, autocast: AbstractContextManager) -> tuple[Tensor, Tensor]:
    """The loss of every target, float64 (B, n), and whether its logit is the largest, bool (B, n); on the CPU."""
    x, y, documents = batch.to(next(model.parameters()).device)
    with autocast:
        losses, right = loss_of_each(
            model.hidden(x, documents).flatten(0, 1), model.head.weight, y.flatten(), model.config.vocab_size
        )
    return losses.cpu().double().view(y.shape), right.cpu().view(y.shape)


def most(T: int) -> int:
    """The largest power of two that is at most T."""
    return 1 << (T.bit_length() - 1)


def contexts(T: int) -> list[int]:
    """The contexts given, shortest first: 32, 64, ..., and T."""
    return sorted({T} | {1 << i for i in range(FEWEST.bit_length() - 1, T.bit_length())})


def buckets(T: int) -> list[tuple[int, int]]:
    """(first, last) position of each bucket: 1, 2, 3 to 4, 5 to 8, ..., T. Position p sees p tokens."""
    ends = [*(1 << i for i in range(T.bit_length())), T]
    return [(low + 1, high) for low, high in zip([0, *ends], ends, strict=False) if high > low]


def pieces(windows: Tensor, n: int) -> Tensor:
    """(B, T) to the pieces (B * most(T) / n, n) whose second halves, together, are the last most(T) / 2 tokens."""
    begin = windows.shape[1] - most(windows.shape[1]) // 2 - n // 2
    return windows[:, begin:].unfold(1, n, n // 2).flatten(0, 1)


def losses_of(name: str, nats: float, tokens: int, size: float) -> dict[str, float]:
    """{"loss_NAME": nats a token, "bpb_NAME": bits a byte}"""
    return {f"loss_{name}": nats / tokens, f"bpb_{name}": nats / (math.log(2) * max(1.0, size))}


def retrieval(model: GPT, dataset: Dataset, autocast: AbstractContextManager) -> dict[str, float]:
    """The share of pass keys that the model finds, by length and depth. It finds one if every digit has the largest
    logit, given the right digits before it: sampling at temperature 0 would write it."""
    T, end = model.config.context_length, dataset.encoding.eot_token
    record, lengths = {}, [T >> i for i in range(T.bit_length()) if T >> i >= SHORTEST["passkey"]]
    digits = max(4, len(str(T)))
    for length in sorted(lengths):
        for depth in DEPTHS:
            generator = np.random.default_rng([length, depth])  # other numbers than those of the training text
            texts = [passkey(length, depth / 100, generator) for _ in range(PROMPTS)]
            tokens = np.stack([[end, *encode(dataset.encoding, text)] for text in texts])  # (PROMPTS, length)
            x, y = (torch.from_numpy(part.astype(np.int64)) for part in (tokens[:, :-1], tokens[:, 1:]))
            found = 0
            for i in range(0, PROMPTS, rows := max(1, T * PROMPTS // (4 * length))):
                numbers = torch.zeros_like(x[i : i + rows], dtype=torch.int32)  # one document
                _, right = each_token(model, Batch(x[i : i + rows], y[i : i + rows], numbers), autocast)
                found += int(right[:, answer(length)].all(1).sum())
            record[f"passkey_{length:0{digits}}_depth_{depth:03}"] = found / PROMPTS
    return record | {"passkey_accuracy": float(np.mean(list(record.values())))}


# ---------------------------------------------------------------------------------------------------------------------
# Showing it.


def table(record: dict[str, float]) -> str:
    """The record as the lines that are printed."""
    same = record["context_same_tokens"]
    lines = ["loss by position", "tokens seen      nats a token   bits a byte", *rows(record, "at_")]
    lines += [
        f"loss of the same {same:,} tokens",
        "tokens given     nats a token   bits a byte",
        *rows(record, "given_"),
    ]
    lines.append(f"the context is worth {worth_of(record)}")
    if "recall_accuracy" in record:
        lines.append(
            f"recall: {record['recall_accuracy']:.2%} of the second string right, {record['recall_loss']:.4f} nats"
        )
    lengths, shares = heat(record)
    if lengths:
        lines.append("pass keys found, by length of the text and depth of the key")
        lines.append("tokens  " + "".join(f"{depth:>6} %" for depth in DEPTHS))
        lines += [
            f"{n:>6}  " + "".join(f"{100 * x:>8.0f}" for x in row) for n, row in zip(lengths, shares, strict=True)
        ]
    return "\n".join(lines)


def rows(record: dict[str, float], kind: str) -> list[str]:
    """The table's lines for the keys loss_KIND..."""
    found = [(spans(key), x, record[f"bpb_{key[5:]}"]) for key, x in record.items() if key.startswith(f"loss_{kind}")]
    named = [("-".join(map(str, dict.fromkeys(span))), x, bits) for span, x, bits in found]
    return [f"{name:<15}{x:14.4f}{bits:14.4f}" for name, x, bits in named]


def spans(key: str) -> tuple[int, ...]:
    """The numbers in a key: (33, 64) for loss_at_0033_0064."""
    return tuple(int(part) for part in key.split("_") if part.isdigit())


def heat(record: dict[str, float]) -> tuple[list[int], list[list[float]]]:
    """The lengths of passkey's texts, and for each length the shares by depth."""
    found = {spans(key): share for key, share in record.items() if key.startswith("passkey_") and "depth" in key}
    lengths = sorted({length for length, _ in found})
    return lengths, [[found[length, depth] for depth in DEPTHS] for length in lengths]


def draw(
    record: dict[str, float], folder: Path, title: str, broken: str, before: dict[str, float] | None = None
) -> list[Path]:
    """Draws context.png, and passkey.png if pass keys were asked for, into the folder. Returns the paths."""
    title = drawable(f"{title} - BROKEN: {broken}" if broken else title)
    figures = {"context.png": curves(record, before)}
    if heat(record)[0]:
        figures["passkey.png"] = heat_map(record)
    for name, figure in figures.items():
        figure.suptitle(title, color="red" if broken else "black", parse_math=False)
        rewrite(folder / name, figure)
    return [folder / name for name in figures]


def curves(record: dict[str, float], before: dict[str, float] | None = None):
    """The loss by position and the loss by context given, side by side, each on its own scale. before: the same, before
    the first step of a run that began with trained weights."""
    from matplotlib.figure import Figure  # imported late, as in training/metrics.py

    figure = Figure(figsize=(8, 4), layout="constrained")
    titles = {"at_": "loss by position", "given_": "the same tokens, context cut short"}
    labels = {"at_": "tokens seen", "given_": "tokens given at most"}
    for axes, kind in zip(figure.subplots(1, 2), titles, strict=True):
        points, earlier = (
            [(spans(key)[-1], x) for key, x in measured.items() if key.startswith(f"loss_{kind}")]
            for measured in (record, before or {})
        )
        if earlier:
            axes.plot(*zip(*earlier, strict=True), marker="o", ls="--", color="#666666", label="before the first step")
        axes.plot(*zip(*points, strict=True), marker="o", lw=2, color="#005ab5", label="now")
        axes.set_xscale("log", base=2)
        ticks = [n for n, _ in points][:: -2 if len(points) > 6 else -1]
        axes.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks], fontsize=11)
        axes.set_xlabel(labels[kind], fontsize=12)
        axes.set_title(titles[kind], fontsize=13)
        axes.grid(alpha=0.3)
        axes.margins(x=0.1)
        low, high = (pick(x for _, x in points + earlier) for pick in (min, max))
        if math.isfinite(low + high):  # a flat curve looks flat, and numbers have room above the points
            middle, half = (low + high) / 2, max(high - low, 0.1) / 2
            axes.set_ylim(middle - 1.2 * half, middle + 1.35 * half)
        for n, x in (points[0], points[-1]):
            words = {"ha": "center", "fontsize": 11, "bbox": {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.5}}
            axes.annotate(f"{x:.3f}", (n, x), (0, 8), textcoords="offset points", **words)
        axes.set_ylabel("nats a token", fontsize=12)
        if earlier:
            axes.legend(fontsize=11)
    return figure


def heat_map(record: dict[str, float]):
    """The share of pass keys found, by length (columns) and depth (rows), with the number in each cell."""
    from matplotlib.figure import Figure

    lengths, shares = heat(record)
    image = np.array(shares).T  # (depths, lengths)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens in the text", ylabel="depth of the pass key (%)")
    axes.imshow(image, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=11)
    axes.set_yticks(range(len(DEPTHS)), map(str, DEPTHS), fontsize=11)
    for (row, column), share in np.ndenumerate(image):
        ink = "white" if share > 0.6 else "black"
        axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=12)
    axes.set_title(f"pass keys found, of {PROMPTS} in each cell", fontsize=13)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# A run that has been trained: eval_only=true.


def evaluate(cfg: Config) -> int:
    """Measures the checkpoint that cfg.resume names and returns 0. cfg is train.py's Config.

    Adds a line to metrics.jsonl in the run's folder, and the pictures; changes nothing else. The run may be in training
    meanwhile: a line of a few KB is written at once. wandb gets nothing. ValueError for a user's mistake.
    """
    device = pick_device(cfg.device)
    autocast = set_precision(pick_dtype(cfg.dtype, device), device)
    name, trained = cfg.name, open_checkpoint(cfg)
    assert trained is not None, "Config refuses eval_only=true without resume="
    folder = trained.path.parent.parent
    if name and not f"{folder.name}-BROKEN-".startswith(f"{name}-BROKEN-"):  # resume=auto finds a broken run, too
        raise ValueError(f"name={name}: eval_only=true measures {folder}, which resume= names; leave name= out")
    if trained.path.parent.name != checkpoint.FOLDER:
        raise ValueError(
            f"resume={trained.path} lies in no run's folder, and the measurement is written there; name a run"
        )
    theirs = from_json(trained.tokenizer)
    dataset = open_data(cfg.data, cfg.tokenizer, theirs, cfg.model.context_length)
    if not same(dataset.encoding, theirs):
        raise ValueError(
            f"{dataset.folder} has tokens of another tokenizer than {trained.path}: name a text of the same"
        )
    batches = validation(cfg, dataset, overlap=True)
    model = trained.network(cfg.attention, device, cfg.model.context_length).eval()

    broken = trained.state["broken"]
    show(f"{stamp(broken)}{trained.path} on the validation text of {dataset.folder}")
    if other := trained.other_attention(cfg.attention, model):
        show(other)
    if other := trained.other_text(fingerprint(dataset.val, dataset.val_documents)):
        show(other)
    advice = (
        f"out of memory with batch_size={cfg.batch_size} sequences of {cfg.model.context_length} tokens; "
        "use a smaller batch_size"
    )
    with out_of_memory_as(lambda: ValueError(advice)):
        record = {"step": trained.step, **measure(model, batches, dataset, cfg.data.source, autocast)}
    append(folder / "metrics.jsonl", record | ({"broken": broken} if broken else {}))
    show(f"{stamp(broken)}{record['context_tokens']:,} tokens in {record['context_ms'] / 1e3:.1f} s\n{table(record)}")
    for path in draw(record, folder, f"{folder.name}, step {trained.step}, data={cfg.data.source}", broken):
        show(f"  picture      {path}")
    show(f"  metrics      {folder / 'metrics.jsonl'}")
    return 0
