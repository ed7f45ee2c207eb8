"""Tiled attention of one head in NumPy, written like the paper. Keeps every intermediate value of every tile.

It is slow and not for training. It repeats what model/tiled.py does, with the same step numbers and names, so that
`python breakit.py` can print the steps and the explorer can show them. story() does the forward, backward() the
backward. Both use the natural base, as the papers do.

Shapes: T query rows, T_k keys, D head size; of a tile, R query rows and S keys.

Sources: Dao 2023 (arXiv 2307.08691), algorithm 1; Dao et al. 2022 (arXiv 2205.14135) for order=keys_outside.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from model.break_it import FAILURES
from model.dropout import keep_mask, keep_scale
from model.mask import tiles
from model.tiled import TINY

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
ORDERS = ("queries_outside", "keys_outside")
# The failures that story() has, and their switches. It has no 16-bit sums; only backward() has a seed to break.
STORY_FAILURES = {"none": ()} | {
    name: failure.switches
    for name, failure in FAILURES.items()
    if not {"same_seed", "restore_seed", "wide_output"} & set(failure.switches)
}


def switches(failure: str, score_gain: float = 1.0) -> SimpleNamespace:
    """The switches of BreakIt for a failure; True is whole."""
    if failure not in STORY_FAILURES:
        raise ValueError(f"failure={failure} is not known; choose {', '.join(STORY_FAILURES)}")
    names = [name for off in STORY_FAILURES.values() for name in off]
    return SimpleNamespace(score_gain=score_gain, **{name: name not in STORY_FAILURES[failure] for name in names})


class Tile(NamedTuple):
    """The values of one tile of the forward, and the state after it. o is the output if no more tiles came."""

    rows: range  # of queries
    columns: range  # of keys
    scores: np.ndarray  # (R, S): step 1
    s: np.ndarray  # (R, S): step 2, -inf where hidden
    p: np.ndarray  # (R, S): step 3
    m_old: np.ndarray  # (R,): before the tile
    l_old: np.ndarray  # (R,)
    m: np.ndarray  # (R,): after it
    l: np.ndarray  # (R,)
    alpha: np.ndarray  # (R,): exp(m_old - m), even if a broken step leaves it out
    acc: np.ndarray  # (R, D): step 5
    o: np.ndarray  # (R, D): acc / l
    z: np.ndarray | None = None  # (R, S): step 4, 0 where dropped; None without dropout


class BackwardTile(NamedTuple):
    """The values of one tile of the backward, and the sums so far: dq of its rows, dk and dv of its keys."""

    rows: range  # of queries
    columns: range  # of keys
    s: np.ndarray  # (R, S): steps 1 and 2 again, -inf where hidden
    p: np.ndarray  # (R, S): step 8
    z: np.ndarray | None  # (R, S): step 4 again; None without dropout
    dp: np.ndarray  # (R, S): step 10
    ds: np.ndarray  # (R, S): step 11
    ds_sum: np.ndarray  # (R,): the sum of each row's ds so far, which is 0 after all keys; below ROUNDING it is 0
    dq: np.ndarray  # (R, D): step 12
    dk: np.ndarray  # (S, D)
    dv: np.ndarray  # (S, D): step 9


class Backward(NamedTuple):
    """The whole backward: its tiles in the order of the visits, o and lse of the forward, and the gradients."""

    tiles: list[BackwardTile]
    o: np.ndarray  # (T, D)
    lse: np.ndarray  # (T,)
    delta: np.ndarray  # (T,): step 7
    dq: np.ndarray  # (T, D)
    dk: np.ndarray  # (T_k, D)
    dv: np.ndarray  # (T_k, D)


def story(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_m: int,
    block_n: int,
    break_it,
    causal: bool = True,
    softmax_scale: float | None = None,
    order: str = "queries_outside",
    dropout_p: float = 0.0,
    seed: int = 0,
) -> tuple[list[Tile], np.ndarray, np.ndarray]:
    """The forward: every tile in the order of the visits, o (T, D) and lse (T,), a natural logarithm.

    q (T, D); k, v (T_k, D), all in one float dtype, which is also used to compute: float64 for exact numbers, float32
    to see what overflows. causal: row i sees key j if j <= i + T_k - T. softmax_scale: None for 1 / sqrt(D). break_it:
    the switches of BreakIt in model/break_it.py. seed: gives the dropout mask of head 0 of sequence 0. A row that sees
    no key has o = 0 and lse = -inf. Raises ValueError for shapes that do not fit together, and if break_it breaks the
    causal mask but causal is False.
    """
    (T, D), T_k = q.shape, len(k)
    if k.shape != v.shape or k.shape[1] != D or not T_k:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: want q (T, D) and k, v both (T_k, D)")
    if not causal and not break_it.global_mask:
        raise ValueError("failure=local_mask breaks the causal mask, and there is none: use causal=true")
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    scale = (scale if break_it.scale_scores else 1.0) * break_it.score_gain

    m = np.full((T, 1), -np.inf if break_it.start_low else 0.0, q.dtype)
    l = np.zeros((T, 1), q.dtype)
    acc = np.zeros((T, D), q.dtype)
    told = []
    with np.errstate(all="ignore"):  # a broken story overflows and computes inf - inf on purpose
        for rows, columns in visits(tiles(T, block_m), tiles(T_k, block_n), order):
            seen = visible(rows, columns, T_k - T, causal, break_it)
            if break_it.global_mask and not seen.any():
                continue
            i, j = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
            scores = q[i] @ k[j].T * scale  # 1
            s = np.where(seen, scores, -np.inf)  # 2
            p, m_i, l_i, alpha = online_softmax(s, m[i], l[i], break_it)  # 3
            z = dropout_factor(rows, columns, dropout_p, seed, q.dtype) if dropout_p else None  # 4
            acc_i = (alpha * acc[i] if break_it.rescale_output else acc[i]) + (p if z is None else z * p) @ v[j]  # 5
            before = m[i][:, 0].copy(), l[i][:, 0].copy()
            after = m_i[:, 0].copy(), l_i[:, 0].copy(), alpha[:, 0].copy()
            told.append(Tile(rows, columns, scores, s, p, *before, *after, acc_i, divided(acc_i, l_i, break_it), z))
            m[i], l[i], acc[i] = m_i, l_i, acc_i
        return told, divided(acc, l, break_it), (m + np.log(l))[:, 0]  # 6


def online_softmax(s, m, l, break_it) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Step 3 for one more tile of scores. s: (R, S). m, l: (R, 1), of the tiles so far. Returns p, and the new m, l and
    alpha."""
    m_new = np.maximum(m, s.max(-1, keepdims=True)) if break_it.subtract_max else np.zeros_like(m)
    # A row that has seen no key yet subtracts 0 instead of m, because exp(-inf - -inf) is NaN.
    shift = np.where(m_new == -np.inf, 0.0, m_new) if break_it.guard_empty_rows else m_new
    p = np.exp(s - shift)
    alpha = np.exp(m - shift)  # brings l and acc of the earlier tiles onto the new scale
    l_new = (alpha * l if break_it.rescale_sum else l) + p.sum(-1, keepdims=True)
    return p, m_new, l_new, alpha


def divided(acc: np.ndarray, l: np.ndarray, break_it) -> np.ndarray:
    """o = acc / l (R, D). A row that saw no key has 0 / TINY = 0, or 0 / 0 = NaN without the guard."""
    return acc / (np.maximum(l, TINY) if break_it.guard_empty_rows else l)


def dropout_factor(rows: range, columns: range, dropout_p: float, seed: int, dtype) -> np.ndarray:
    """Z of one tile (R, S): 0 where dropped, 1 / (share that is kept) elsewhere."""
    keep = keep_mask(torch.tensor(seed), 1, rows, columns, dropout_p)[0].numpy()
    return keep.astype(dtype) * dtype.type(keep_scale(dropout_p))


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    block_m: int,
    block_n: int,
    causal: bool = True,
    softmax_scale: float | None = None,
    order: str = "queries_outside",
    dropout_p: float = 0.0,
    seed: int = 0,
    same_seed: bool = True,
) -> Backward:
    """Steps 7 to 12. do (T, D): the gradient of o. same_seed=False draws another dropout mask than the forward did, as
    break_it=stale_seed does. The other arguments are as in story()."""
    whole = switches("none")
    options: dict[str, Any] = {"block_m": block_m, "block_n": block_n, "causal": causal, "softmax_scale": softmax_scale}
    _, o, lse = story(q, k, v, break_it=whole, dropout_p=dropout_p, seed=seed, **options)
    (T, D), T_k = q.shape, len(k)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    backward_seed = seed if same_seed else seed + 1

    delta = (do * o).sum(-1)  # 7
    # A row that saw no key has lse = -inf. Here it gets +inf, which makes its weights exp(-inf) = 0.
    shift = np.where(lse == -np.inf, np.inf, lse)
    dq, dk, dv, ds_sum = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(lse)
    told = []
    for rows, columns in visits(tiles(T, block_m), tiles(T_k, block_n), order):
        seen = visible(rows, columns, T_k - T, causal, whole)
        if not seen.any():
            continue
        i, j = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        s = np.where(seen, q[i] @ k[j].T * scale, -np.inf)  # 1 and 2 again
        p = np.exp(s - shift[i, None])  # 8
        z = dropout_factor(rows, columns, dropout_p, backward_seed, q.dtype) if dropout_p else None  # 4 again
        dv[j] += (p if z is None else z * p).T @ do[i]  # 9
        dp = do[i] @ v[j].T if z is None else z * (do[i] @ v[j].T)  # 10
        ds = p * (dp - delta[i, None])  # 11
        ds_sum[i] += ds.sum(-1)
        dq[i] += ds @ k[j] * scale  # 12
        dk[j] += ds.T @ q[i] * scale
        ds_so_far = np.where(abs(ds_sum[i]) < ROUNDING, 0.0, ds_sum[i])
        sums = ds_so_far, dq[i].copy(), dk[j].copy(), dv[j].copy()
        told.append(BackwardTile(rows, columns, s, p, z, dp, ds, *sums))
    return Backward(told, o, lse, delta, dq, dk, dv)


def words_moved(told: list, T: int, T_k: int, D: int, block_m: int, block_n: int, order: str) -> list[int]:
    """Words moved between slow memory and the chip, summed up to each tile of a forward or a backward. told: the tiles
    in the order of their visits. order: the loop order of that forward or backward.

    Counts as docs/attention.md and lab/traffic.py do: an addition in slow memory is a load and a store. A store at the
    end counts with the last tile before it. Leaves out step 7, and the zeros in dq, dk and dv at the start.
    """
    # comes, goes: words for each row of an outer tile, before and after its inner loop (for each key, with
    # keys_outside). visit: words for each key (or row) of an inner tile. after: words for each row after all tiles.
    comes, visit, goes, after = {
        (Tile, "queries_outside"): (D, 2 * D, D + 1, 0),  # q; k, v; o, lse
        (Tile, "keys_outside"): (2 * D, D + 2 * (D + 2), 0, D + 2 + D + 1),  # k, v; q, m, l, acc; m, l, acc, o, lse
        (BackwardTile, "queries_outside"): (2 * D + 2, 6 * D, D, 0),  # q, do, lse, delta; k, v, dk, dv; dq
        (BackwardTile, "keys_outside"): (2 * D, 4 * D + 2, 2 * D, 0),  # k, v; q, do, lse, delta, dq; dk, dv
    }[type(told[0]), order]
    counts, words = [], 0
    rows_outside = order == "queries_outside"
    for outer in tiles(T, block_m) if rows_outside else tiles(T_k, block_n):
        words += comes * len(outer)
        for tile in told:
            own, other = (tile.rows, tile.columns) if rows_outside else (tile.columns, tile.rows)
            if own == outer:
                words += visit * len(other)
                counts.append(words)
        words += goes * len(outer)
        counts[-1:] = [words] if counts else []  # empty if the first rows see no key
    counts[-1] += after * T
    return counts


def visits(row_tiles: list[range], column_tiles: list[range], order: str) -> list[tuple[range, range]]:
    """Every pair of a row tile and a column tile, in loop order."""
    match order:
        case "queries_outside":
            return [(rows, columns) for rows in row_tiles for columns in column_tiles]
        case "keys_outside":
            return [(rows, columns) for columns in column_tiles for rows in row_tiles]
    raise ValueError(f"order={order} is not known; choose queries_outside or keys_outside")


def visible(rows: range, columns: range, offset: int, causal: bool, break_it) -> np.ndarray:
    """Which keys the rows may see, bool (R, S). offset: T_k - T."""
    position, column = np.array(rows)[:, None] + offset, np.array(columns)
    if not break_it.global_mask:  # numbers within the tile, without the tile's place
        position, column = np.arange(len(rows))[:, None], np.arange(len(columns))
    return column <= position if causal else np.ones((len(rows), len(columns)), bool)


def sentence(tile: Tile, row: int, offset: int, break_it) -> str:
    """A sentence on what the tile changed for one of its rows. offset: T_k - T."""
    r = row - tile.rows.start
    s, p, m_old, l_old, m, l, alpha = (
        x[r] for x in (tile.s, tile.p, tile.m_old, tile.l_old, tile.m, tile.l, tile.alpha)
    )
    seen, top = s > -np.inf, s.max()
    leaks, misses = keys_wrongly_seen(tile, r, offset) if not break_it.global_mask else (0, 0)
    words = f"Sees {leaks} of the future's keys. " if leaks else ""
    words += f"Misses {misses} that it may see. " if misses else ""
    if np.isnan(l_old):
        return words + "It was NaN before and stays NaN."
    if not seen.any():
        if np.isnan(l):
            return words + "It has seen no key yet: m is still -inf, and exp(-inf - -inf) is NaN."
        return words + "It sees no key of this tile: nothing changes."
    if not break_it.subtract_max:
        words += f"No maximum is subtracted: the largest weight is exp({top:.4g}) = {p.max():.4g}"
        words += f", past the largest {p.dtype}" if np.isinf(p.max()) else ""
        return words + ("; acc / l is NaN." if np.isnan(tile.o[r]).any() else ".")
    if m > top and not break_it.start_low and m == 0:
        return (
            words
            + f"m began at 0 and stays there, above every score: the largest weight is exp({top:.4g}) = {p.max():.4g}."
        )
    if l_old == 0:
        return words + f"The first keys that it sees: m = {m:.4g}, and nothing yet to rescale."
    if m == m_old:
        return words + f"No score above m = {m:.4g}: alpha is 1, and the new weights are added as they are."
    words += f"A larger score: m grows from {m_old:.4g} to {m:.4g}, "
    left_out = [name for name, kept in (("l", break_it.rescale_sum), ("acc", break_it.rescale_output)) if not kept]
    if not left_out:
        return words + f"so l and acc are multiplied by alpha = {alpha:.4g}."
    are = "is" if len(left_out) == 1 else "are"
    return words + f"but {' and '.join(left_out)} {are} not multiplied by alpha = {alpha:.4g}."


def dropout_sentence(tile: Tile, row: int) -> str:
    """A sentence on what step 4 changed for one row of a tile; empty if no weight was dropped."""
    assert tile.z is not None
    seen = tile.s[row - tile.rows.start] > -np.inf
    dropped = int((seen & (tile.z[row - tile.rows.start] == 0)).sum())
    if not dropped:
        return ""
    return f"Dropout takes out {some(dropped, seen)}: l counts them, acc does not. "


def some(n: int, seen: np.ndarray) -> str:
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
