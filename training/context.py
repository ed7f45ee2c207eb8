"""What is a longer context worth to a run's model? Does its loss fall when it sees more?

    python sample.py run=NAME context=true

The same tokens of the validation text are predicted given at most 32, 64, ..., T tokens, so differences are due to the
context alone. For that each window of T tokens is cut into pieces of N tokens that overlap by half, and the second half
of each piece is measured: its tokens see N / 2 + 1 to N tokens. With data=recall also the share of the second string
that is right. With data=passkey the share of keys found, and passkey.png beside the run.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from tiktoken import Encoding
from torch import Tensor

from data.dataset import open_data
from data.loader import Batch, Loader, validation_batches
from data.made import MADE, answer, passkey, second_half
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig, encode, from_json
from model.gpt import GPT
from model.loss import next_token_loss
from training.checkpoint import Checkpoint
from training.machine import autocast, pick_dtype, set_precision

POWERS = [2**i for i in range(5, 31)]  # contexts given, as far as the model's goes; its own too
WINDOWS = 32  # at least so many, if the text has them: the standard error is over windows
DEPTHS = (0, 25, 50, 75, 100)  # percent of a text before its pass key
TEXTS = 100  # pass keys asked for at each depth and length


def report(model: GPT, trained: Checkpoint) -> str:
    """The measurement as lines to print."""
    config, T, device = trained.state["config"], model.config.context_length, model.embedding.weight.device
    if "data" not in config:
        raise ValueError(f"{trained.path} is of no run, so there is no validation text to measure on")
    data, encoding = trained.options("data", DataConfig), from_json(trained.tokenizer)
    dataset = open_data(data, trained.options("tokenizer", TokenizerConfig), encoding, T, config["runs"])
    size = config["batch_size"], T, max(config["eval_tokens"], WINDOWS * T)
    own = Loader(dataset.train, None, batch_size=1, context_length=T, seed=trained.state["loader"]["seed"])
    own.load_state_dict(trained.state["loader"])  # ValueError if the training text was edited
    stride = T if data.source in MADE else most(T) // 2  # so a token is measured once; a made document is a window
    batches = validation_batches(dataset.val, dataset.val_documents, *size, stride)
    set_precision(dtype := pick_dtype(config["dtype"], device))
    low = autocast(dtype, device)
    measured = [dataset.token_bytes[batch.y[:, T - most(T) // 2 :].numpy()] for batch in batches]
    lines = table(given(model, batches, low), T, sum(int(x.sum()) for x in measured))
    if data.source == "recall":
        shares = [right(model, batch, second_half(T), low).float().mean() for batch in batches]
        lines.append(f"recall: {float(torch.stack(shares).mean()):.1%} of the second string right")
    if data.source == "passkey":
        lengths = [n for n in POWERS if 512 <= n < T] + [T]
        found = np.array([[retrieved(model, encoding, n, depth, low) for n in lengths] for depth in DEPTHS])
        lines.append(f"share of pass keys found, of {TEXTS} texts each, by depth (down) and length (across)")
        lines.append("     " + "".join(f"{n:>8}" for n in lengths))
        for depth, row in zip(DEPTHS, found, strict=True):
            lines.append(f"{depth:>3} %" + "".join(f"{x:>8.0%}" for x in row))
        draw(found, lengths, trained)
    return "\n".join(lines)


def given(model: GPT, batches: Iterable[Batch], low: AbstractContextManager) -> dict[int, Tensor]:
    """{N: the mean loss of each window's last tokens given at most N tokens, float64 (windows,)}."""
    T = model.config.context_length
    losses: dict[int, list[Tensor]] = {n: [] for n in sorted({T} | {n for n in POWERS if n < T})}
    for batch in batches:
        for n, found in losses.items():
            cut = batch.each(partial(pieces, n=n)) if n < T else batch
            x, y, documents = cut.to(model.embedding.weight.device)
            B, last = len(batch.x), slice(n // 2 if n < T else T - most(T) // 2, None)
            with torch.no_grad(), low:
                hidden = model.hidden(x, documents)[:, last].unflatten(0, (B, -1)).flatten(1, 2)  # (B, M, C)
                targets = y[:, last].reshape(B, -1)  # (B, M): M tokens of each window are measured
                found += [next_token_loss(h, model.head.weight, t) for h, t in zip(hidden, targets, strict=True)]
    return {n: torch.stack(found).cpu().double() for n, found in losses.items()}


def most(T: int) -> int:
    """The largest power of two that is at most T."""
    return 1 << (T.bit_length() - 1)


def pieces(windows: Tensor, n: int) -> Tensor:
    """(B, T) to the pieces (B * most(T) / n, n) whose second halves, together, are the last most(T) / 2 tokens."""
    begin = windows.shape[1] - most(windows.shape[1]) // 2 - n // 2
    return windows[:, begin:].unfold(1, n, n // 2).flatten(0, 1)


def table(losses: dict[int, Tensor], T: int, size: int) -> list[str]:
    """A line for each context: its loss, that in bits a byte (of `size` bytes), and what it gained in nats over the
    line before, with the standard error over windows."""
    before, windows = losses[min(losses)], len(losses[T])
    tokens = windows * (most(T) // 2)
    head = f"loss of the same {tokens:,} tokens of {windows} windows, in nats a token and in bits a byte"
    lines = [head, "given   nats     bits     gained over the line before"]
    for n, loss in losses.items():
        gain, before = before - loss, loss
        error = float(gain.std()) / math.sqrt(windows) if windows > 1 else math.nan
        bits = float(loss.mean()) * tokens / size / math.log(2)
        lines.append(f"{n:<7} {float(loss.mean()):.4f}   {bits:.4f}   {float(gain.mean()):.4f} +- {error:.4f}")
    return lines


@torch.no_grad()
def right(model: GPT, batch: Batch, where: slice, low: AbstractContextManager) -> Tensor:
    """Whether the largest logit is the target's, for the n targets of each window that are in `where`: bool (B, n)."""
    x, y, documents = batch.to(model.embedding.weight.device)
    with low:
        return model.head(model.hidden(x, documents)[:, where]).argmax(-1) == y[:, where]


def retrieved(model: GPT, encoding: Encoding, length: int, depth: int, low: AbstractContextManager) -> float:
    """The share of TEXTS pass keys that the model finds, told at this depth of a text of `length` tokens."""
    drawn = (np.random.default_rng([length, depth, i]) for i in range(TEXTS))  # not the numbers of the training text
    texts = np.stack([encode(encoding, passkey(length, depth / 100, each)) for each in drawn]).astype(np.int64)
    tokens = torch.nn.functional.pad(torch.from_numpy(texts), (1, 0), value=encoding.eot_token)
    batches = (Batch(some[:, :-1], some[:, 1:], None) for some in tokens.split(max(1, 2**17 // length)))
    return sum(int(right(model, batch, answer(length), low).all(1).sum()) for batch in batches) / TEXTS


def draw(found: np.ndarray, lengths: list[int], trained: Checkpoint) -> None:
    """passkey.png beside the run. found: shares, (depths, lengths)."""
    from matplotlib.figure import Figure  # here, because the import takes half a second

    figure = Figure(figsize=(2.2 + 0.8 * len(lengths), 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens of the text", ylabel="where the key was told, %")
    figure.colorbar(axes.imshow(found, "RdYlGn", aspect="auto", vmin=0, vmax=1, alpha=0.7), label="share found")
    for (down, across), share in np.ndenumerate(found):
        axes.text(across, down, f"{share:.0%}", ha="center", va="center")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(DEPTHS)), [str(depth) for depth in DEPTHS])
    axes.set_title(f"{trained.state['broken']} {trained.path.parents[1].name}, step {trained.step}".strip())
    figure.savefig(trained.path.parents[1] / "passkey.png", dpi=120)
