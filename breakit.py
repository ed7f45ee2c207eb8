"""Attention taken apart: what each line of the algorithm is for, seen by taking it out.

    python breakit.py                                            every failure beside the whole algorithm
    python breakit.py failure=no_max                             one of them, and what is behind it
    python breakit.py run=NAME                                   on the attention of your own run

The lab takes q, k, v and do of real text from a model, a small one that it trains first or a run's, and runs each
failure on them, in every implementation and dtype, where it sleeps and where it wakes: a line each with what theory
predicts, what is seen, where it begins, and how far the results are from float64. Then short trainings, whole and
broken, from one seed. In runs/breakit: table.json, errors.png, states.png, losses.png, and NAME.png for each failure.

    python breakit.py replay=runs/NAME/faults/step_000123        the batch that ended a run, once more

A run with probe.every=N keeps the batch and the weights with which it met NaN or infinity. Here they go through the
model again: every layer's gauges, and the tile where it begins.

    python breakit.py trace=true                                 a row of the worked example, a line a tile
    python breakit.py trace=true failure=no_rescale              the same without the rescaling
    python breakit.py trace=true failure=no_max score_gain=120 dtype=float32
    python breakit.py trace=true run=latest layer=3 head=1 row=20    a row of a trained model's head

The worked example is that of docs/attention.md: five tokens, no mask, tiles of two. Of a run it takes the first tokens
of its validation text, which, causal as the model is, know nothing of those after them. out=PATH.json keeps the trace:
the head's q, k and v, and every tile.

    python breakit.py explorer=true                              docs/explorer.html, the same to click through

The explorer is one page that asks for nothing: docs/explorer.template.html with the stories of the worked example (each
failure, tile size and mask, and three other inputs that bring failures out) and of one trained head, `real`, which is a
trace that out= has kept: explorer=true real=PATH.json out=PATH.html makes a page of your own. docs/head.json is of
`python train.py name=default`: trace=true run=default layer=2 head=2 out=docs/head.json.
"""

import json
import math
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from io import StringIO
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train
from data.loader import Batch, Dataset, open_data, validation_batches
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model.attention import AttentionConfig, beyond_sdpa, triton_refusal
from model.failures import FAILURES
from model.gpt import GPT
from model.story import ORDERS, STORY_FAILURES, THE_CAT, Tile, sentence, story, switches
from training import checkpoint, config, lab
from training.machine import about, pick_device
from training.metrics import broken_name, encodable, read_metrics, show, stamp
from training.probe import find, gauges, record

FRESH_STEPS = 200  # of the lab's own model: 15 s, and scores up to 15
LAB_READS = ("failure", "run", "runs", "steps", "seed", "device", "out")
EXPLORER_READS = ("explorer", "real", "out")
REPLAY_READS = ("replay", "device")
RUN_ONLY = ("runs", "layer", "head", "tokens")  # keys that mean nothing without run=


@dataclass
class Config:
    trace: bool = False  # tell one row's story, instead of the lab
    explorer: bool = False  # make the page, instead of the lab
    replay: str | None = None  # show this fault again, instead of the lab
    failure: str | None = None  # of FAILURES in model/failures.py; None: all in the lab, none in a trace
    steps: int = 100  # lab: of each short training
    seed: int = 1337  # lab: of all trainings
    device: str = "auto"  # lab, replay
    score_gain: float = 1.0  # multiplies the scores
    dtype: str = "float64"  # float64 | float32, where exp overflows from 88.7 on
    causal: bool | None = None  # None: no mask in the worked example, causal in a run
    block_m: int | None = None  # query rows of a tile; None: 2 in the worked example, 8 in a run
    block_n: int | None = None  # key rows of a tile
    order: str = "queries_outside"  # queries_outside | keys_outside
    row: int | None = None  # None: "on" in the worked example, the last one in a run
    run: str | None = None  # a name or folder, or latest; None: a fresh small one, in a trace the worked example
    runs: str = "runs"
    layer: int = 0
    head: int = 0
    tokens: int = 32  # of the run's validation text
    real: str = "docs/head.json"  # explorer: the trace of a trained head
    out: str | None = None  # lab: folder, None for runs/breakit; trace: a file for it, PATH.json; explorer: the page,
    # None for docs/explorer.html

    def __post_init__(self):
        modes = {
            "trace=true": self.trace,
            "explorer=true": self.explorer,
            f"replay={self.replay}": self.replay is not None,
        }
        chosen = [mode for mode, on in modes.items() if on]
        if len(chosen) > 1:
            raise ValueError(f"{' '.join(chosen)}: choose one of them, or none for the lab")
        mode = chosen[0] if chosen else "the lab"
        if self.trace and self.failure in FAILURES.keys() - STORY_FAILURES.keys():
            raise ValueError(f"failure={self.failure}: not in a trace; python breakit.py failure={self.failure} has it")
        failures = FAILURES if mode == "the lab" else STORY_FAILURES
        for name, known in (("failure", failures), ("dtype", ("float64", "float32")), ("order", ORDERS)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")
        if not 0 < self.score_gain <= 1e30:  # as in break_it; the scores themselves would leave float32
            raise ValueError(f"score_gain={self.score_gain} is outside (0, 1e30]; 1 changes nothing")
        for name, least in (
            ("block_m", 1),
            ("block_n", 1),
            ("tokens", 1),
            ("steps", 1),
            ("layer", 0),
            ("head", 0),
            ("row", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        for key in fields(self):
            typed = f"{key.name}={getattr(self, key.name)}"
            if getattr(self, key.name) == key.default:
                continue
            if mode == "the lab" and key.name not in LAB_READS:
                wanted = "explorer=true" if key.name == "real" else "trace=true"
                raise ValueError(f"{typed}: the lab does not read it; it is for {wanted}")
            if self.replay is not None and key.name not in REPLAY_READS:
                raise ValueError(f"{typed}: replay=PATH does not read it; the fault brings its own configuration")
            if self.explorer and key.name not in EXPLORER_READS:
                raise ValueError(f"{typed}: explorer=true does not read it; it shows a trace kept with out=, real=PATH")
            if self.trace and key.name in ("real", "steps", "seed", "device"):
                wanted = "explorer=true" if key.name == "real" else "the lab"
                raise ValueError(f"{typed}: trace=true does not read it; it is for {wanted}")
            if mode == "the lab" and self.run is None and key.name == "runs":
                raise ValueError(f"{typed}: the lab trains a model of its own; add run=NAME for one that is there")
            if self.trace and self.run is None and key.name in RUN_ONLY:
                raise ValueError(f"{typed}: the worked example has no such choice; add run=NAME")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        ending = {"trace=true": ".json", "explorer=true": ".html"}.get(mode)
        if ending and self.out is not None and not self.out.endswith(ending):
            raise ValueError(f"out={self.out}: name a file that ends in {ending}")
        if mode == "the lab" and self.out is not None and (not self.out or Path(self.out).is_file()):
            raise ValueError(f"out={self.out}: the lab wants a folder for its pictures")


def main(cfg: Config) -> None:
    match cfg:
        case Config(trace=True):
            trace(cfg)
        case Config(explorer=True):
            explorer(cfg)
        case Config(replay=str()):
            replay(cfg)
        case _:
            laboratory(cfg)


# ---------------------------------------------------------------------------------------------------------------------
# The lab: what is measured and drawn is in training/lab.py.


def laboratory(cfg: Config) -> None:
    """The table, the short trainings and the pictures."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # tiles so small take as long on two, and twice as long where another process wants a core
    out, device = Path(cfg.out or "runs/breakit"), pick_device(cfg.device)
    facts, device = about(device), device if device.type == "cuda" else torch.device("cpu")  # mps has no float64
    model = None if cfg.run is None else model_of_run(cfg.run, Path(cfg.runs), device)
    out.mkdir(parents=True, exist_ok=True)  # now: where it cannot be written, nothing has been measured in vain
    failures = [cfg.failure] if cfg.failure else list(FAILURES)
    if cfg.failure:
        words = FAILURES[cfg.failure]
        show(f"{cfg.failure}: without {words.removed}\n  you will see: {words.seen}\n  because: {words.why}\n")

    with tempfile.TemporaryDirectory() as scratch:
        short = short_training(cfg, scratch)
        if model is None:
            show(f"training a small model to take q, k and v from: {FRESH_STEPS} steps")
            trained_quietly(fresh_model(short))
            model = model_of_run("fresh", Path(scratch), device)._replace(name="a fresh small model")
        else:
            short.data, short.tokenizer = model.data, model.tokenizer
        T = min(256, model.net.config.context_length)
        batch = next(validation_batches(model.dataset.val, model.dataset.val_documents, 2, T, 2 * T))
        calls = record(model.net, batch.x.to(device), batch.y.to(device))
        show(f"{model.name}: {len(calls)} layers of {model.net.config.n_head} heads, {T} tokens of its validation text")

        wanted, impls = ["none", *failures], lab.available(device)
        for line in lab.left_out(calls, wanted, impls):
            show(line)
        show("first bad: layer/head/query tile/key tile; score, weight: the largest; o to dv: |error| / |right|\n")
        print_row()
        rows, views = lab.measure(calls, wanted, impls, print_row)
        show("")
        if not views:
            raise ValueError(f"failure={cfg.failure}: nothing of the kind can be taken out of {model.name}")
        curves = trainings(short, failures)

    show(f"drawing, after {time.perf_counter() - started:.0f} s")
    kept = {"about": facts, "model": model.name, "rows": rows, "losses": [c._asdict() for c in curves]}
    write(out / "table.json", json.dumps(plain(kept)).replace("}, {", "},\n{") + "\n")
    shown = {name: views[name] for name in failures if name in views}
    pictures = {
        "errors": lab.errors_figure(shown),
        "states": lab.states_figure(shown),
        "losses": lab.losses_figure(curves),
    }
    for name in shown:
        pictures[name] = lab.failure_figure(shown[name], next(c for c in curves if name in c.broken))
    for name, figure in pictures.items():
        lab.save(figure, out / f"{name}.png")
    differ = sum(not row["agrees"] for row in rows)
    show(f"{len(rows)} lines, {differ} of them not as predicted; {time.perf_counter() - started:.0f} s")
    show(f"{out}: table.json, {', '.join(f'{name}.png' for name in pictures)}")


def print_row(row: dict | None = None) -> None:
    """A line of the table; None: its head."""
    heads = ("failure", "where", "gain", "impl", "dtype", "tiles", "predicted", "observed", "first bad", "score")
    cells = [*heads, "headroom", "weight", *lab.RESULTS, "verdict"]
    if row is not None:
        place = [row[key] for key in ("layer", "head", "query_tile", "key_tile")]
        cells = [row["failure"], row["where"], f"{row['gain']:.3g}", row["impl"], row["dtype"], row["tiles"]]
        cells += [row["predicted"], row["observed"]]
        cells += ["" if place[0] is None else "/".join("-" if x is None else str(x) for x in place)]
        cells += [f"{row['max_score']:.1f}", f"{row['headroom']:.1f}", f"{row['max_weight']:.3f}"]
        cells += [f"{row[f'error_{name}']:.1e}" for name in lab.RESULTS]
        cells += [row["verdict"] + ("" if row["agrees"] else ", NOT AS PREDICTED")]
    widths = (17, 23, -5, 6, 7, 9, 13, 13, 9, -5, -8, -6, -8, -8, -8, -8, 8)  # below 0: flush right
    shown = (f"{cell:>{-width}}" if width < 0 else f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    show(" ".join(shown).rstrip())


class Model(NamedTuple):
    """A run's model as its best checkpoint has it, and its text."""

    name: str
    path: Path
    net: GPT
    dataset: Dataset
    data: DataConfig
    tokenizer: TokenizerConfig
    attention: AttentionConfig


def model_of_run(run: str, runs: Path, device: torch.device) -> Model:
    """ValueError where there is no such run, and where its attention has more than the causal mask."""
    last = checkpoint.find_resume("auto" if run == "latest" else run, runs, None, option="run")
    path = checkpoint.best(last.parent) or last
    found = checkpoint.load(path)
    trained = found.state["config"]
    attention = config.from_dict(AttentionConfig, trained["attention"])
    if beyond_sdpa(attention):
        raise ValueError(f"run={run} has {beyond_sdpa(attention)}: breakit.py knows the causal mask alone")
    attention = AttentionConfig("auto", softmax_scale=attention.softmax_scale)  # of a GPU's run, on any machine
    net = found.network(attention, device).eval()
    data, tokenizer = (config.from_dict(schema, trained[key]) for key, schema in TEXT.items())
    name = f"{stamp(found.state['broken'])}run {path.resolve().parents[1].name}, {path.name}"
    return Model(name, path, net, open_data(data, tokenizer), data, tokenizer, attention)


TEXT = {"data": DataConfig, "tokenizer": TokenizerConfig}


class Setting(NamedTuple):
    """What a short training takes, besides the failure, to bring it on."""

    words: str
    score_gain: float = 1.0
    dropout_p: float = 0.0
    window: int | None = None
    dtype: str = "float32"


PLAIN, DROPOUT = Setting("nothing else changed"), Setting("attention.dropout_p=0.5", dropout_p=0.5)
GAIN = Setting("break_it.score_gain=40", score_gain=40.0)
SETTINGS = dict.fromkeys(FAILURES, PLAIN) | {
    "no_max": GAIN,
    "zero_init_max": Setting("break_it.score_gain=400", score_gain=400.0),
    "unguarded_mask": Setting("attention.window=8", window=8),
    "stale_seed": DROPOUT,
    "unrestored_seed": DROPOUT,
    "bf16_ties": Setting("dtype=bf16", dtype="bf16"),
}


def short_training(cfg: Config, runs: str) -> train.Config:
    """The whole run that the broken ones are compared with: a model that is trained in seconds."""
    typed = ["model.n_layer=2", "model.n_embd=64", "model.context_length=128", "batch_size=8", f"steps={cfg.steps}"]
    typed += ["optimizer.lr=5e-3", "optimizer.warmup_steps=20", "eval_tokens=2048", "sample_every=0"]
    typed += ["attention=tiled", "attention.block_m=64", "attention.block_n=16", "dtype=float32", "wandb.mode=disabled"]
    ((short, _),) = config.compose(typed, train.Config, "config", Path(__file__).parent / "conf", "train")
    short.eval_every = short.checkpoint_every = cfg.steps
    short.runs, short.seed, short.device = runs, cfg.seed, cfg.device
    return short


def fresh_model(short: train.Config) -> train.Config:
    """The one that q, k and v are taken from: of longer sequences, for more tiles."""
    fresh = deepcopy(short)
    fresh.name, fresh.steps, fresh.batch_size, fresh.model.context_length = "fresh", FRESH_STEPS, 4, 256
    fresh.eval_every = fresh.checkpoint_every = FRESH_STEPS
    return fresh


def trained_quietly(cfg: train.Config) -> list[float]:
    """The loss of each step; a NaN ends the run, and the list."""
    with redirect_stdout(StringIO()):
        code = train.main(cfg)
    if code >= 128:  # of a signal; what train.py has saved goes with its folder
        print("stopped: table and pictures are made at the end, so nothing is kept", file=sys.stderr)
        sys.exit(code)
    records = read_metrics(Path(cfg.runs) / cfg.name / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def trainings(short: train.Config, failures: list[str]) -> list[lab.Curves]:
    """Each failure from one seed, and for each setting the whole run that goes with it."""
    found = []
    for setting, together in groupby(sorted(failures, key=lambda name: SETTINGS[name]), key=SETTINGS.get):
        losses = {}
        for name in ("whole", *together):
            cfg = deepcopy(short)
            cfg.break_it = lab.broken(name, setting.score_gain)
            cfg.attention.dropout_p, cfg.attention.window = setting.dropout_p, setting.window
            cfg.model.activation_checkpointing = not cfg.break_it.restore_seed
            cfg.name, cfg.dtype = broken_name(f"{len(found)}-{name}", cfg.break_it.label), setting.dtype
            started = time.perf_counter()
            losses[name] = trained_quietly(cfg)
            said = f"{losses[name][-1]:.3f} after {len(losses[name])} steps"
            show(f"training {name:18}{setting.words:26}loss {said:24}{time.perf_counter() - started:4.0f} s")
        found.append(lab.Curves(setting.words, losses.pop("whole"), losses))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A fault of a run, again.


def replay(cfg: Config) -> None:
    """The gauges of every attention call of the batch that was kept, and the first tile that is not finite."""
    path, device = Path(cfg.replay), pick_device(cfg.device)
    kept = checkpoint.load(path)
    tensors, dtype = kept.optimizer(), kept.state["about"]["dtype"]
    if "batch.x" not in tensors:
        raise ValueError(
            f"replay={path} holds no batch: name a folder under runs/NAME/faults, as probe.every= keeps them"
        )
    attention = config.from_dict(AttentionConfig, kept.state["config"]["attention"])
    impl = kept.state["about"]["attention"]
    if impl == "triton" and (why := triton_refusal(device.type)):
        show(f"{why}: tiled stands in for it")
        impl = "tiled"
    attention = replace(attention, impl=impl, autotune=attention.autotune and impl == "triton")
    net = kept.network(attention, device).train()
    checkpoint.set_rng_state(tensors)  # dropout as it was
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    with torch.autocast(device.type, low) if low else nullcontext():
        calls = record(net, *Batch(*(tensors.get(f"batch.{name}") for name in Batch._fields)).to(device))
    show(f"{stamp(kept.state['broken'])}{path}: {len(tensors['batch.x'])} sequences, {impl}, {dtype}, on {device}")
    show("layer     score  headroom   weight         l     error   o        dq, dk, dv")
    for call in calls:
        g = gauges(call)
        sound = (all(x.isfinite().all() for x in group) for group in ((call.o,), (call.dq, call.dk, call.dv)))
        o, gradients = ("finite" if finite else "NOT" for finite in sound)
        show(f"{call.layer:5}{g.max_score:10.2f}{g.headroom:10.2f}{g.max_weight:9.4f}{g.min_l:10.3g}{g.error:10.1e}   "
             f"{o:9}{gradients}")  # fmt: skip
    place = find(calls)
    show(f"first: {place}" if place else "attention is not where it begins, as far as this batch tells by itself")


# ---------------------------------------------------------------------------------------------------------------------
# What there is to tell of. Shapes: q (T, D), k and v (T_k, D), float64.


class Head(NamedTuple):
    about: str
    labels: list[str]  # (T,): the tokens
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float


def worked_example() -> Head:
    q, k, v = (np.array(THE_CAT[name], np.float64) for name in "qkv")
    return Head("the cat sat on (the) mat", THE_CAT["tokens"], q, k, v, 0.5)


def head_of_run(cfg: Config) -> Head:
    """One head's q, k and v over the first tokens of a run's validation text, as its best checkpoint computes them."""
    model = model_of_run(cfg.run, Path(cfg.runs), torch.device("cpu"))
    path, net, dataset, size = model.path, model.net, model.dataset, model.net.config
    for name, value, most in (("layer", cfg.layer, size.n_layer), ("head", cfg.head, size.n_head)):
        if value >= most:
            raise ValueError(f"{name}={value}: {path} has {most}, counted from 0")
    if cfg.tokens > size.context_length:
        raise ValueError(f"tokens={cfg.tokens}: the model's context is {size.context_length}")

    batch = next(validation_batches(dataset.val, dataset.val_documents, 1, cfg.tokens, cfg.tokens))

    call = record(net, batch.x)[cfg.layer]
    q, k, v = (x[0].double().numpy() for x in (call.q, call.k, call.v))  # (H, T, D), (H_kv, T, D) twice
    key_head = cfg.head * len(k) // len(q)
    labels = [dataset.encoding.decode([token]) for token in batch.x[0].tolist()]
    scale = model.attention.softmax_scale or size.head_size**-0.5
    return Head(
        f"{model.name}, layer {cfg.layer}, head {cfg.head}", labels, q[cfg.head], k[key_head], v[key_head], scale
    )


# ---------------------------------------------------------------------------------------------------------------------
# The trace.


def trace(cfg: Config) -> None:
    """One row's m, l, alpha and output after every tile, and what changed; and the file of it, where one is wanted."""
    head = worked_example() if cfg.run is None else head_of_run(cfg)
    row = cfg.row if cfg.row is not None else 3 if cfg.run is None else len(head.q) - 1
    if row >= len(head.q):
        raise ValueError(f"row={row}: there are {len(head.q)} rows, counted from 0")
    usual = 2 if cfg.run is None else 8
    options = {
        "failure": cfg.failure or "none",
        "score_gain": cfg.score_gain,
        "dtype": cfg.dtype,
        "causal": cfg.run is not None if cfg.causal is None else cfg.causal,
        "block_m": cfg.block_m or usual,
        "block_n": cfg.block_n or usual,
        "order": cfg.order,
    }
    told, o, lse = tell(head, **options)
    if cfg.out is not None:
        kept = head._asdict() | options | {"tiles": [tile._asdict() for tile in told], "o": o, "lse": lse}
        write(Path(cfg.out), json.dumps(plain(kept)) + "\n")
        print(f"{cfg.out}: {len(told)} tiles of {len(o)} rows")
    right = tell(head, **options | {"failure": "none"})[1]
    print_trace(head, row, told, o, lse, right, switches(options["failure"], cfg.score_gain), options)


def tell(
    head: Head, failure: str, score_gain: float, dtype: str, **options
) -> tuple[list[Tile], np.ndarray, np.ndarray]:
    """story() of a head, computed in dtype."""
    q, k, v = (x.astype(dtype) for x in (head.q, head.k, head.v))
    return story(q, k, v, softmax_scale=head.softmax_scale, break_it=switches(failure, score_gain), **options)


def print_trace(head, row, told, o, lse, right, break_it, options) -> None:
    """A line a tile: m, l, alpha and o of one row, the first four numbers of it, and what changed."""
    some, more = slice(0, 4), " ..." if o.shape[1] > 4 else ""

    def numbers(*values: float) -> str:
        return "".join(f"{x:9.4f}" if abs(x) < 1e3 else f"{x:9.3g}" for x in values)

    def line(tile: str, keys: str, state: str, o: str, words: str) -> None:
        print(encodable(f"{tile:>4}  {keys:>5}{state:>27}  {o:{9 * min(4, D) + len(more)}}  {words}"), flush=True)

    D, offset = o.shape[1], len(head.k) - len(head.q)
    print(encodable(f"{head.about}, row {row}, {head.labels[row]!r}"))
    print(", ".join(f"{name}={value}" for name, value in options.items()))
    line("tile", "keys", f"{'m':>9}{'l':>9}{'alpha':>9}", f"{'o':>9}", "what changed")
    for number, tile in enumerate(told, start=1):
        if row in tile.rows:
            r = row - tile.rows.start
            keys = f"{tile.columns[0]}-{tile.columns[-1]}"
            state = numbers(tile.m[r], tile.l[r], tile.alpha[r])
            line(f"{number}", keys, state, numbers(*tile.o[r, some]) + more, sentence(tile, row, offset, break_it))
    line("end", "", "", numbers(*o[row, some]) + more, f"o, and lse = {lse[row]:.4f}")
    if options["failure"] != "none":
        with np.errstate(all="ignore"):
            off = np.linalg.norm(o[row] - right[row]) / np.linalg.norm(right[row])
        far = f"{100 * off:.1f} % away" if np.isfinite(off) else "beyond comparison"
        line("", "", "", numbers(*right[row, some]) + more, f"o of the whole algorithm; the one above is {far}")


def write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"out={path} cannot be written: {error.strerror}") from error


def plain(value):
    """value as JSON has it: arrays as lists, ranges as [start, stop], numbers to six digits, and those that are not
    finite, for which JSON has no word, as "nan", "inf" and "-inf"."""
    match value:
        case np.ndarray():
            return plain(value.tolist())
        case float():
            number = float(f"{value:.6g}")
            if not math.isfinite(number):
                return f"{number}"
            return int(number) if number == round(number) and abs(number) < 1e6 else number
        case range():
            return [value.start, value.stop]
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The explorer: the stories, in a page.

TEMPLATE = Path(__file__).parent / "docs" / "explorer.template.html"
STORIES = "{{stories}}"  # where the template wants them


class Input(NamedTuple):
    """One entry of the page's list of data, and which stories of it there are."""

    name: str
    title: str
    about: str
    head: Head
    key_labels: list[str]
    causal: list[bool]
    sizes: list[int]  # block_m and block_n
    failures: list[str]
    row: int  # to follow
    score_gain: float = 1.0
    dtype: str = "float64"


def explorer(cfg: Config) -> None:
    """Writes the page: the template with all stories as JSON."""
    sentences: dict[str, int] = {}  # each is kept once: the same words come back all over the stories
    told = [stories(entry, sentences) for entry in [*small_inputs(), real_input(Path(cfg.real))]]
    found = {"fields": [*Tile._fields, "says"], "inputs": told, "sentences": list(sentences)}
    text = json.dumps(plain(found), separators=(",", ":")).replace("</", "<\\/")  # no </script> of the data's
    path = Path(cfg.out or TEMPLATE.parent / "explorer.html")
    page = TEMPLATE.read_text(encoding="utf-8").replace(STORIES, text)
    write(path, page)
    print(f"{path}: {len(page) / 2**20:.1f} MiB")


def small_inputs() -> list[Input]:
    """The worked example, and what it takes to bring on failures that it is too tame for."""
    head = worked_example()
    few = head._replace(k=head.k[2:], v=head.v[2:])
    rest = {"causal": [False, True], "sizes": [1, 2, 3, 4, 5], "failures": list(STORY_FAILURES), "row": 3}
    return [
        Input("cat", "the cat sat on the mat", "Five tokens, D = 4, scores q k / 2.", head, head.labels, **rest),
        Input("large", "scores times 120", "The same five tokens, their scores times 120, in float32.", head,
              head.labels, score_gain=120.0, dtype="float32", **rest),
        Input("low", "scores times -300", "The same five tokens, their scores times -300, in float32.",
              head._replace(q=-head.q), head.labels, score_gain=300.0, dtype="float32", **rest | {"row": 2}),
        Input("few", "keys of sat, on, mat only", "All five queries, but the keys of sat, on and mat alone.", few,
              head.labels[2:], **rest | {"row": 0}),
    ]  # fmt: skip


def real_input(path: Path) -> Input:
    """The head of a trace that trace=true has kept; ValueError where it is none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        head = Head(**{name: kept[name] for name in Head._fields})
    except OSError as error:
        raise ValueError(f"real={path}: {error.strerror}; trace=true run=NAME out={path} makes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"real={path} is no trace; trace=true run=NAME out=PATH.json makes one") from error
    if len(head.q) > 64:
        raise ValueError(
            f"real={path}: {len(head.q)} tokens are more than a page can show; keep a trace with tokens=64"
        )
    head = head._replace(**{name: np.array(getattr(head, name), np.float64) for name in "qkv"})
    sizes = sorted({-(-len(head.q) // 4), -(-len(head.q) // 2)})
    failures = ["none", "no_rescale", "local_mask", "no_scale"]
    about = f"{len(head.q)} tokens, D = {head.q.shape[1]}: {head.about}."
    return Input("head", "a trained model's head", about, head, head.labels, [True], sizes, failures, len(head.q) - 1)


def stories(entry: Input, sentences: dict[str, int]) -> dict:
    """entry as the page reads it; every story under "causal/size/failure", its tiles once, and two orders of them."""
    head, told = entry.head, {}
    offset = len(head.k) - len(head.q)
    for causal, size, failure in product(entry.causal, entry.sizes, entry.failures):
        if failure == "local_mask" and not causal:
            continue
        options = {"causal": causal, "block_m": size, "block_n": size}
        break_it = switches(failure, entry.score_gain)
        by_order = [tell(head, failure, entry.score_gain, entry.dtype, order=order, **options) for order in ORDERS]
        tiles, o, lse = by_order[0]
        number = {(tile.rows.start, tile.columns.start): i for i, tile in enumerate(tiles)}
        visits = [[number[tile.rows.start, tile.columns.start] for tile in order[0]] for order in by_order]
        said = [[sentence(tile, row, offset, break_it) for row in tile.rows] for tile in tiles]
        says = [[sentences.setdefault(words, len(sentences)) for words in row] for row in said]
        told[f"{causal:d}/{size}/{failure}"] = {
            "tiles": [[*tile, numbers] for tile, numbers in zip(tiles, says, strict=True)],
            "visits": dict(zip(ORDERS, visits, strict=True)),
            "o": o,
            "lse": lse,
        }
    shown = {"causal": [int(causal) for causal in entry.causal], "labels": head.labels, "stories": told}
    qkv = {name: getattr(head, name) for name in "qkv"}
    scale = {"scale": head.softmax_scale, "score_gain": entry.score_gain, "dtype": entry.dtype}
    own = {name: getattr(entry, name) for name in ("name", "title", "about", "key_labels", "sizes", "failures", "row")}
    return own | qkv | scale | shown


if __name__ == "__main__":
    config.run(main, Config, "breakit")
