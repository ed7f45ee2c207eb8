"""Prints one row of attention tile by tile, and writes all rows to a file. `python breakit.py trace=true`

Shapes: q (T, D), k and v (T_k, D), float64; o (T, D), lse (T,).
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.loader import validation_batches
from data.text import counted
from lab.files import plain, write
from lab.runs import ids_of, model_of_run
from lab.story import THE_CAT, Tile, sentence, story
from model.break_it import FAILURES, BreakIt
from training.awake import BEYOND_ROUNDING, EXACT
from training.metrics import printable
from training.probe import record


class Head(NamedTuple):
    """The input of a story: one head of one sequence."""

    about: str
    labels: list[str]  # (T,): the tokens
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float


def worked_example() -> Head:
    """The five tokens of docs/attention.md."""
    q, k, v = (np.array(THE_CAT[name], np.float64) for name in "qkv")
    return Head("the cat sat on (the) mat", THE_CAT["tokens"], q, k, v, 0.5)


def head_of_run(run: str, runs: Path, layer: int, head: int, tokens: int, prompt: str | None = None) -> Head:
    """A head of a run's best checkpoint: q, k and v on the prompt, or on the first tokens of its validation text.

    Raises ValueError for a run, layer or head that does not exist, and for more tokens than the model's context.
    """
    model = model_of_run(run, runs, torch.device("cpu"))
    size = model.net.config
    for name, value, most in (("layer", layer, size.n_layer), ("head", head, size.n_head)):
        if value >= most:
            raise ValueError(f"{name}={value}: {model.path} has {most}, counted from 0")
    ids = None if prompt is None else ids_of(model.dataset.encoding, model.begin, prompt)
    tokens = tokens if ids is None else ids.shape[1]
    if tokens > size.context_length:
        raise ValueError(f"tokens={tokens}: the model's context is {size.context_length}")
    if ids is None:
        ids = next(validation_batches(model.dataset.val, model.dataset.val_documents, 1, tokens, tokens)).x
    call = record(model.net, ids)[layer]
    q, k, v = (x[0].double().numpy() for x in (call.q, call.k, call.v))  # q (H, T, D); k, v (H_kv, T, D)
    key_head = head * len(k) // len(q)
    labels = [model.dataset.encoding.decode([token]) for token in ids[0].tolist()]
    scale = model.attention.softmax_scale or size.head_size**-0.5
    return Head(f"{model.name}, layer {layer}, head {head}", labels, q[head], k[key_head], v[key_head], scale)


def trace(head: Head, row: int, out: Path | None, **options) -> None:
    """Prints a line for each tile of a row: m, l, alpha, the first four numbers of o, and what changed. Writes all rows
    to the file `out`, if there is one. options: those of tell(). Raises ValueError for a row that is not there."""
    if row >= len(head.q):
        raise ValueError(f"row={row}: there are {len(head.q)} rows, counted from 0")
    told, o, lse = tell(head, **options)
    if out is not None:
        kept = head._asdict() | options | {"tiles": [tile._asdict() for tile in told], "o": o, "lse": lse}
        write(out, json.dumps(plain(kept)) + "\n")
        print(printable(f"{out}: {counted(len(told), 'tile')} of {counted(len(o), 'row')}"))
    failure, break_it = options["failure"], BreakIt(options["failure"], options["score_gain"])
    D, offset = o.shape[1], len(head.k) - len(head.q)
    more = " ..." if D > 4 else ""

    def numbers(values) -> str:
        return "".join(f"{x:9.4f}" if abs(x) < 1e3 else f"{x:9.3g}" for x in values)

    def line(tile: str, keys: str, state: str, o: str, words: str) -> None:
        print(printable(f"{tile:>4}  {keys:>5}{state:>27}  {o:{9 * min(4, D) + len(more)}}  {words}"), flush=True)

    print(printable(f"{head.about}, row {row}, {head.labels[row]!r}"))
    print(", ".join(f"{name}={value}" for name, value in options.items()))
    line("tile", "keys", f"{'m':>9}{'l':>9}{'alpha':>9}", f"{'o':>9}", "what changed")
    for number, tile in enumerate(told, start=1):
        if row in tile.rows:
            r = row - tile.rows.start
            keys = f"{tile.columns[0]}-{tile.columns[-1]}"
            state = numbers((tile.m[r], tile.l[r], tile.alpha[r]))
            line(f"{number}", keys, state, numbers(tile.o[r, :4]) + more, sentence(tile, row, offset, break_it))
    line("end", "", "", numbers(o[row, :4]) + more, f"o, and lse = {lse[row]:.4f}")
    if failure != "none":
        right = tell(head, **options | {"failure": "none"})[1][row]
        with np.errstate(all="ignore"):
            off = np.linalg.norm(o[row] - right) / np.linalg.norm(right)
        far = f"{100 * off:.1f} % away" if np.isfinite(off) else "not finite"
        line("", "", "", numbers(right[:4]) + more, f"o of the unbroken algorithm; the one above is {far}")
        if off <= BEYOND_ROUNDING * EXACT:
            print(f"{failure} changes nothing in this row: it acts {FAILURES[failure].acts}.")
            print(
                f"Inputs that wake it: tile by tile in docs/explorer.html, and in python breakit.py failure={failure}"
            )


def tell(
    head: Head, failure: str, score_gain: float, dtype: str, **options
) -> tuple[list[Tile], np.ndarray, np.ndarray]:
    """story() of a head, computed in dtype, float64 or float32: its tiles, o (T, D) and lse (T,). failure: a name in
    STORY_FAILURES. options: causal, block_m, block_n and order, as in story()."""
    q, k, v = (x.astype(dtype) for x in (head.q, head.k, head.v))
    return story(q, k, v, softmax_scale=head.softmax_scale, break_it=BreakIt(failure, score_gain), **options)
