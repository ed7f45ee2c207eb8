"""Attention taken apart: what each tile changes, whole or with a line of the algorithm taken out.

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
from dataclasses import dataclass, fields
from itertools import product
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

EXPLORER_READS = ("explorer", "real", "out")
RUN_ONLY = ("runs", "layer", "head", "tokens")  # keys that mean nothing without run=


@dataclass
class Config:
    trace: bool = False  # tell one row's story
    explorer: bool = False  # make the page
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
    real: str = "docs/head.json"  # explorer: the trace of a trained head
    out: str | None = None  # trace: a file for it, PATH.json; explorer: the page, None for docs/explorer.html

    def __post_init__(self):
        if self.trace == self.explorer:
            raise ValueError("say what to do, one of two: trace=true or explorer=true")
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
            typed = f"{key.name}={getattr(self, key.name)}"
            if getattr(self, key.name) == key.default:
                continue
            if self.explorer and key.name not in EXPLORER_READS:
                raise ValueError(f"{typed}: explorer=true does not read it; it shows a trace kept with out=, real=PATH")
            if self.trace and key.name == "real":
                raise ValueError(f"{typed}: trace=true does not read it; it is for explorer=true")
            if self.trace and self.run is None and key.name in RUN_ONLY:
                raise ValueError(f"{typed}: the worked example has no such choice; add run=NAME")
        ending = ".html" if self.explorer else ".json"
        if self.out is not None and not self.out.endswith(ending):
            raise ValueError(f"out={self.out}: name a file that ends in {ending}")


def main(cfg: Config) -> None:
    match cfg:
        case Config(trace=True):
            trace(cfg)
        case Config(explorer=True):
            explorer(cfg)


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
    run = path.resolve().parents[1].name
    about = f"{stamp(found.state['broken'])}run {run}, {path.name}, layer {cfg.layer}, head {cfg.head}"
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
        kept = head._asdict() | options | {"tiles": [tile._asdict() for tile in told], "o": o, "lse": lse}
        write(Path(cfg.out), json.dumps(plain(kept)) + "\n")
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
    rest = {"causal": [False, True], "sizes": [1, 2, 3, 4, 5], "failures": list(FAILURES), "row": 3}
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
