"""Records every intermediate value of every tile of one head, as model/tiled.py computes it, and says what changed.

For `python breakit.py trace=true` and the explorer. trace() prints one row, story() records the forward, backward() the
backward. Scores, m and lse are natural logarithms here, as in the papers.

Shapes: T query rows, T_k keys, D head size; of a tile, R query rows and S keys.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.loader import validation_batches
from data.text import counted
from kernels.problem import Given, Problem
from lab.files import plain, write
from lab.runs import ids_of, model_of_run
from lab.traffic import Tiles
from model.attention import AttentionConfig, problem_of
from model.break_it import FAILURES, UNBROKEN, BreakIt
from model.tiled import LOG2E, LOWEST, Loops, backward_tiles, finish, forward_tiles, store
from training.awake import BEYOND_ROUNDING, EXACT
from training.metrics import printable
from training.probe import record

# A published example, small enough to follow by hand: "the cat sat on (the) mat", scores q k^T / 2. do is ours: the
# gradient of a loss that adds and subtracts some elements of o.
THE_CAT: dict[str, Any] = {
    "tokens": ["The", "cat", "sat", "on", "mat"],
    "q": [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
    "k": [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]],
    "v": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]],
    "do": [[1, 0, 0, -1], [0, 1, -1, 0], [1, 0, 1, 0], [0, -1, 0, 1], [1, 1, 0, -1]],
}

# A row's ds add up to 0. What rounding leaves of them, 1e-17 in the worked example, is not the same on every CPU.
ROUNDING = 1e-12
Array = np.ndarray
ORDERS = ("queries_outside", "keys_outside")
# The failures that story() has. It has no 16-bit sums, and only backward() has a seed to break.
STORY_FAILURES = ("none", *(name for name, failure in FAILURES.items() if failure.drawn))


class Head(NamedTuple):
    """The input of a story: one head of one sequence."""

    about: str
    labels: list[str]  # (T,): the tokens
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float


class Tile(NamedTuple):
    """The values of one tile of the forward, and the state after it. o is the output if no more tiles came."""

    rows: range  # of queries
    columns: range  # of keys
    scores: Array  # (R, S): step 1
    s: Array  # (R, S): step 2, -inf where hidden
    p: Array  # (R, S): step 3
    m_old: Array  # (R,): before the tile
    l_old: Array  # (R,)
    m: Array  # (R,): after it
    l: Array  # (R,)
    alpha: Array  # (R,): exp(m_old - m), even if a broken step leaves it out
    acc: Array  # (R, D): step 5
    o: Array  # (R, D): acc / l
    z: Array | None  # (R, S): step 4, 0 where dropped; None without dropout
    words: int  # moved between slow memory and the chip up to here, with a store that comes before the next tile


class BackwardTile(NamedTuple):
    """The values of one tile of the backward, and the sums so far: dq of its rows, dk and dv of its keys."""

    rows: range  # of queries
    columns: range  # of keys
    s: Array  # (R, S): steps 1 and 2 again, -inf where hidden
    p: Array  # (R, S): step 8
    z: Array | None  # (R, S): step 4 again; None without dropout
    dp: Array  # (R, S): step 10
    ds: Array  # (R, S): step 11
    ds_sum: Array  # (R,): the sum of each row's ds so far, which is 0 after all keys; below ROUNDING it is 0
    dq: Array  # (R, D): step 12
    dk: Array  # (S, D)
    dv: Array  # (S, D): step 9
    words: int  # as in Tile. Without step 7, and the zeros in dq, dk and dv at the start


class Backward(NamedTuple):
    """The whole backward: its tiles in the order of the visits, o and lse of the forward, and the gradients."""

    tiles: list[BackwardTile]
    o: Array  # (T, D)
    lse: Array  # (T,)
    delta: Array  # (T,): step 7
    dq: Array  # (T, D)
    dk: Array  # (T_k, D)
    dv: Array  # (T_k, D)


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


def tell(
    head: Head, failure: str, score_gain: float, dtype: str, **options
) -> tuple[list[Tile], np.ndarray, np.ndarray]:
    """story() of a head, computed in dtype, float64 or float32: its tiles, o (T, D) and lse (T,). failure: a name in
    STORY_FAILURES. options: causal, block_m, block_n and order, as in story()."""
    q, k, v = (x.astype(dtype) for x in (head.q, head.k, head.v))
    return story(q, k, v, softmax_scale=head.softmax_scale, break_it=BreakIt(failure, score_gain), **options)


def story(
    q: Array, k: Array, v: Array, *, block_m: int, block_n: int, order: str = ORDERS[0], **options
) -> tuple[list[Tile], Array, Array]:
    """The forward: every tile in the order of the visits, o (T, D) and lse (T,), a natural logarithm.

    q (T, D); k, v (T_k, D), all in one float dtype, which is also used to compute: float64 for exact numbers, float32
    to see what overflows. options: those of problem(). A row that sees no key has o = 0 and lse = -inf.
    """
    told: list[Tile] = []
    watch: dict[str, Tensor] = {}
    x, what = problem(q, k, v, **options)
    o, lse, guarded = torch.empty_like(x[0]), x[0].new_empty(1, 1, len(q), 1), "unguarded_mask" not in what.broken
    m, l = np.full(len(q), 0.0 if "zero_init_max" in what.broken else -np.inf, q.dtype), np.zeros(len(q), q.dtype)
    with Tiles() as counted, np.errstate(invalid="ignore"):  # a broken story computes inf - inf on purpose
        for rows, tile, state in forward_tiles(*x, what, Loops(block_m, block_n, order), watch):
            if tile is None:
                store(o, rows, state[0])
                store(lse, rows, state[1])
                told[-1:] = [last._replace(words=counted.words) for last in told[-1:]]
                continue
            i = slice(rows.start, rows.stop)
            scores, s, p, z = (of_head(watch[name]) for name in ("scores", "s", "p", "z"))
            m_i, l_i, acc = map(of_head, state)
            m_i, l_i = np.where(m_i == LOWEST, -np.inf, m_i / LOG2E)[:, 0], l_i[:, 0]
            alpha = np.exp(m[i] - np.where(np.isneginf(m_i) & guarded, 0.0, m_i))
            o_i = of_head(finish((state[0], state[1], state[2].clone()), what.broken)[0])
            values = scores / LOG2E, s / LOG2E, p, m[i].copy(), l[i].copy(), m_i, l_i, alpha, acc, o_i, z
            told.append(Tile(rows, tile.columns, *values, counted.words))
            m[i], l[i] = m_i, l_i
    return told, of_head(o[0]), of_head(lse[0])[:, 0]


def backward(
    q: Array, k: Array, v: Array, do: Array, *, block_m: int, block_n: int, order: str = ORDERS[0], **options
) -> Backward:
    """Steps 7 to 12. do (T, D): the gradient of o. options: those of problem(). Only stale_seed breaks it."""
    _, o, lse = story(q, k, v, block_m=block_m, block_n=block_n, **options)
    told: list[BackwardTile] = []
    watch: dict[str, Tensor] = {}
    x, what = problem(q, k, v, **options)
    saved, loops, ds_sum = (*x, as_head(o), as_head(lse)), Loops(block_m, block_n, order), np.zeros_like(lse)
    with Tiles() as counted:
        for tile, sums in backward_tiles(saved, as_head(do), None, what, loops, watch):
            if tile is None:
                told[-1:] = [last._replace(words=counted.words) for last in told[-1:]]
                continue
            i, j = (slice(side.start, side.stop) for side in tile[:2])
            s, p, z, dp, ds = (of_head(watch[name]) for name in ("s", "p", "z", "dp", "ds"))
            ds_sum[i] += ds.sum(-1)
            ds_so_far = np.where(abs(ds_sum[i]) < ROUNDING, 0.0, ds_sum[i])
            parts = zip(sums, (i, j, j), strict=True)
            so_far = [of_head(x) if x.ndim == 3 else x.numpy()[0, 0, part].copy() for x, part in parts]
            values = s / LOG2E, p, z, dp, ds, ds_so_far, *so_far
            told.append(BackwardTile._make((*tile[:2], *values, counted.words)))
    return Backward(told, o, lse, of_head(watch["delta"][0])[:, 0], *(of_head(x[0]) for x in sums))


def problem(
    q: Array, k: Array, v: Array, *, break_it: BreakIt = UNBROKEN, causal: bool = True,
    softmax_scale: float | None = None, dropout_p: float = 0.0, seed: int = 0,
) -> tuple[tuple[Tensor, Tensor, Tensor], Problem]:  # fmt: skip
    """q, k and v as one head of one sequence, (1, 1, T or T_k, D), and what is computed from them.

    causal: row i sees key j if j <= i + T_k - T. softmax_scale: None for 1 / sqrt(D). seed: of the dropout mask. Raises
    ValueError for shapes that do not fit together, and if break_it breaks the causal mask but causal is False.
    """
    if k.shape != v.shape or k.shape[1:] != q.shape[1:] or not len(k):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: want q (T, D) and k, v both (T_k, D)")
    if not causal and "local_mask" in break_it.broken:
        raise ValueError("failure=local_mask breaks the causal mask, and there is none: use causal=true")
    x, drawn = (as_head(q), as_head(k), as_head(v)), torch.tensor(seed) if dropout_p else None
    if "no_scale" in break_it.broken:  # even if the data have a scale of their own
        others = [name for name in break_it.broken if name != "no_scale"]
        softmax_scale, break_it = 1.0, BreakIt(others, break_it.score_gain)
    config = AttentionConfig("tiled", dropout_p=dropout_p)
    return x, problem_of(x[0], x[1], config, Given(seed=drawn), causal, softmax_scale, break_it)


def as_head(x: Array) -> Tensor:
    """(T, ...) as one head of one sequence, (1, 1, T, ...)."""
    return torch.from_numpy(x)[None, None]


def of_head(x: Tensor | None) -> Any:
    """The only matrix of x, copied: (1, R, ...) to (R, ...)."""
    return None if x is None else x[0].numpy().copy()


def sentence(tile: Tile, row: int, offset: int, break_it) -> str:
    """A sentence on what the tile changed for one of its rows. offset: T_k - T."""
    r = row - tile.rows.start
    s, p, m_old, l_old, m, l, alpha = (
        x[r] for x in (tile.s, tile.p, tile.m_old, tile.l_old, tile.m, tile.l, tile.alpha)
    )
    seen, top = s > -np.inf, s.max()
    leaks, misses = keys_wrongly_seen(tile, r, offset) if "local_mask" in break_it.broken else (0, 0)
    words = f"Sees {leaks} of the future's keys. " if leaks else ""
    words += f"Misses {misses} that it may see. " if misses else ""
    if np.isnan(l_old):
        return words + "It was NaN before and stays NaN."
    if not seen.any():
        if np.isnan(l):
            return words + "It has seen no key yet: m is still -inf, and exp(-inf - -inf) is NaN."
        return words + "It sees no key of this tile: nothing changes."
    if "no_max" in break_it.broken:
        words += f"No maximum is subtracted: the largest weight is exp({top:.4g}) = {p.max():.4g}"
        words += f", past the largest {p.dtype}" if np.isinf(p.max()) else ""
        return words + ("; acc / l is NaN." if np.isnan(tile.o[r]).any() else ".")
    if m > top and "zero_init_max" in break_it.broken and m == 0:
        return (
            words
            + f"m began at 0 and stays there, above every score: the largest weight is exp({top:.4g}) = {p.max():.4g}."
        )
    if l_old == 0:
        return words + f"The first keys that it sees: m = {m:.4g}, and nothing yet to rescale."
    if m == m_old:
        return words + f"No score above m = {m:.4g}: alpha is 1, and the new weights are added as they are."
    words += f"A larger score: m grows from {m_old:.4g} to {m:.4g}, "
    parts = ("l", "no_rescale_sum"), ("acc", "no_rescale_output")
    left_out = [name for name, failure in parts if failure in break_it.broken]
    if not left_out:
        return words + f"so l and acc are multiplied by alpha = {alpha:.4g}."
    are = "is" if len(left_out) == 1 else "are"
    return words + f"but {' and '.join(left_out)} {are} not multiplied by alpha = {alpha:.4g}."


def dropout_sentence(tile: Tile, row: int) -> str:
    """A sentence on what step 4 changed for one row of a tile; empty if no weight was dropped."""
    if tile.z is None:
        return ""
    seen = tile.s[row - tile.rows.start] > -np.inf
    dropped = int((seen & (tile.z[row - tile.rows.start] == 0)).sum())
    if not dropped:
        return ""
    return f"Dropout takes out {some(dropped, seen)}: l counts them, acc does not. "


def some(n: int, seen: Array) -> str:
    """n of a row's weights, in words. seen: which keys it sees, (S,)."""
    return f"{n} of its {seen.sum()} weights" if seen.sum() > 1 else "its one weight"


def backward_sentence(tile: BackwardTile, row: int, right: BackwardTile, delta: float, last: bool) -> str:
    """A sentence on what a tile of the backward computed for one of its rows. right: the tile with the dropout mask of
    the forward. delta: of the row. last: whether it is the row's last tile."""
    r = row - tile.rows.start
    seen = tile.s[r] > -np.inf
    if not seen.any():
        return "It sees no key of this tile: p is 0, and nothing is added."
    words = ""
    if tile.z is not None and right.z is not None:
        other = int((seen & (tile.z[r] != right.z[r])).sum())
        dropped = int((seen & (tile.z[r] == 0)).sum())
        if other:
            words += f"The forward had the other decision for {some(other, seen)}. "
        elif dropped:
            words += f"The same mask as in the forward drops {some(dropped, seen)}. "
    above = int((seen & (tile.dp[r] > delta)).sum())
    if above:
        where = f"for {above} of its {seen.sum()} keys: there" if above < seen.sum() else "here:"
        words += f"dp is above delta = {delta:.4g} {where} ds > 0, and a larger score would raise the loss."
    else:
        words += f"dp is not above delta = {delta:.4g} for any key: no ds is above 0."
    if not last:
        return words
    if not tile.ds_sum[r]:
        return words + " Its last tile: the row's ds add up to 0, and dq is complete."
    return words + f" Its last tile: the row's ds add up to {tile.ds_sum[r]:.4g}, where 0 is right."


def keys_wrongly_seen(tile: Tile, r: int, offset: int) -> tuple[int, int]:
    """For row r of a causal tile: how many hidden keys it wrongly sees, and how many visible keys it misses."""
    may = np.array(tile.columns) <= tile.rows[r] + offset
    seen = tile.s[r] > -np.inf
    return int((seen & ~may).sum()), int((may & ~seen).sum())
