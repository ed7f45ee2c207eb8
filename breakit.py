"""Attention taken apart: what each tile changes, whole or with a line of the algorithm taken out.

    python breakit.py trace=true                                 a row of the worked example, a line a tile
    python breakit.py trace=true failure=no_rescale              the same without the rescaling
    python breakit.py trace=true failure=no_max score_gain=120 dtype=float32
    python breakit.py trace=true run=latest layer=3 head=1 row=20    a row of a trained model's head

The worked example is that of docs/attention.md: five tokens, no mask, tiles of two. Of a run it takes the first tokens
of its validation text, which, causal as the model is, know nothing of those after them. out=PATH.json keeps the trace:
the head's q, k and v, and every tile.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.loader import open_data, validation_batches
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model import gpt
from model.attention import AttentionConfig, BreakIt, beyond_sdpa, resolve
from model.story import FAILURES, ORDERS, THE_CAT, Tile, sentence, story, switches
from training import checkpoint, config
from training.metrics import encodable, stamp

RUN_ONLY = ("runs", "layer", "head", "tokens")  # keys that mean nothing without run=


@dataclass
class Config:
    trace: bool = False  # tell one row's story
    failure: str = "none"  # of FAILURES in model/story.py
    score_gain: float = 1.0  # multiplies the scores
    dtype: str = "float64"  # float64 | float32, where exp overflows from 88.7 on
    causal: bool | None = None  # None: no mask in the worked example, causal in a run
    block_m: int | None = None  # query rows of a tile; None: 2 in the worked example, 8 in a run
    block_n: int | None = None  # key rows of a tile
    order: str = "queries_outside"  # queries_outside | keys_outside
    row: int | None = None  # None: "on" in the worked example, the last one in a run
    run: str | None = None  # a run's name or folder, or latest; None: the worked example
    runs: str = "runs"
    layer: int = 0
    head: int = 0
    tokens: int = 32  # of the run's validation text
    out: str | None = None  # a file for the trace, PATH.json

    def __post_init__(self):
        if not self.trace:
            raise ValueError("nothing to do: say trace=true")
        for name, known in (("failure", FAILURES), ("dtype", ("float64", "float32")), ("order", ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")
        if not 0 < self.score_gain < math.inf:
            raise ValueError(f"score_gain={self.score_gain} must be above 0 and finite; 1 changes nothing")
        for name, least in (("block_m", 1), ("block_n", 1), ("tokens", 1), ("layer", 0), ("head", 0), ("row", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        for key in fields(self):
            if self.run is None and key.name in RUN_ONLY and getattr(self, key.name) != key.default:
                raise ValueError(
                    f"{key.name}={getattr(self, key.name)}: the worked example has no such choice; add run=NAME"
                )
        if self.out is not None and not self.out.endswith(".json"):
            raise ValueError(f"out={self.out}: the trace is JSON; name a file that ends in .json")


def main(cfg: Config) -> None:
    match cfg:
        case Config(trace=True):
            trace(cfg)


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
    last = checkpoint.find_resume("auto" if cfg.run == "latest" else cfg.run, Path(cfg.runs), None, option="run")
    path = checkpoint.best(last.parent) or last
    found = checkpoint.load(path)
    trained = found.state["config"]
    attention = config.from_dict(AttentionConfig, trained["attention"])
    break_it = config.from_dict(BreakIt, trained["break_it"])
    size = config.from_dict(gpt.GPTConfig, trained["model"])
    if beyond_sdpa(attention):
        raise ValueError(f"run={cfg.run} has {beyond_sdpa(attention)}: the trace knows the causal mask alone")
    for name, value, most in (("layer", cfg.layer, size.n_layer), ("head", cfg.head, size.n_head)):
        if value >= most:
            raise ValueError(f"{name}={value}: {path} has {most}, counted from 0")
    if cfg.tokens > size.context_length:
        raise ValueError(f"tokens={cfg.tokens}: the model's context is {size.context_length}")

    attention = AttentionConfig("auto", softmax_scale=attention.softmax_scale)  # of a GPU's run, on any machine
    net = gpt.GPT(size, resolve(attention, "cpu", break_it), break_it).eval()
    net.load_state_dict(found.model)
    tokenizer = config.from_dict(TokenizerConfig, trained["tokenizer"])
    dataset = open_data(config.from_dict(DataConfig, trained["data"]), tokenizer)
    batch = next(validation_batches(dataset.val, dataset.val_documents, 1, cfg.tokens, cfg.tokens))

    q, k, v = (x[0].double().numpy() for x in recorded(net, batch.x)[cfg.layer])  # (H, T, D), (H_kv, T, D) twice
    key_head = cfg.head * len(k) // len(q)
    labels = [dataset.encoding.decode([token]) for token in batch.x[0].tolist()]
    scale = attention.softmax_scale or size.head_size**-0.5
    about = f"{stamp(found.state['broken'])}{path}, layer {cfg.layer}, head {cfg.head}"
    return Head(about, labels, q[cfg.head], k[key_head], v[key_head], scale)


@torch.no_grad()
def recorded(net: gpt.GPT, idx: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q (B, H, T, D), k and v (B, H_kv, T, D) of every layer, as they reach the door."""
    taken, door = [], gpt.attention

    def recording(q, k, v, *rest, **options):
        taken.append((q, k, v))
        return door(q, k, v, *rest, **options)

    gpt.attention = recording
    try:
        net.hidden(idx)
    finally:
        gpt.attention = door
    return taken


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
        "failure": cfg.failure,
        "score_gain": cfg.score_gain,
        "dtype": cfg.dtype,
        "causal": cfg.run is not None if cfg.causal is None else cfg.causal,
        "block_m": cfg.block_m or usual,
        "block_n": cfg.block_n or usual,
        "order": cfg.order,
    }
    told, o, lse = tell(head, **options)
    if cfg.out is not None:
        keep(Path(cfg.out), head._asdict() | options | {"tiles": told, "o": o, "lse": lse})
        print(f"{cfg.out}: {len(told)} tiles of {len(o)} rows")
    right = tell(head, **options | {"failure": "none"})[1]
    print_trace(head, row, told, o, lse, right, switches(cfg.failure, cfg.score_gain), options)


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


def keep(path: Path, value) -> None:
    """JSON of numbers to six digits; those that are not finite, for which JSON has no word, as text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain(value)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"out={path} cannot be written: {error.strerror}") from error


def plain(value):
    """value as JSON has it: arrays as lists, ranges as [start, stop], tuples with names as dictionaries."""
    match value:
        case np.ndarray():
            return plain(value.tolist())
        case float():
            number = float(f"{value:.6g}")
            return number if math.isfinite(number) else f"{number}"
        case range():
            return [value.start, value.stop]
        case Tile():
            return plain(value._asdict())
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list():
            return [plain(inner) for inner in value]
    return value


if __name__ == "__main__":
    config.run(main, Config, "breakit")
