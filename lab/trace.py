"""One row of attention, tile by tile, as model/tiled.py computes it in float32, whole or broken.

Scores and m are natural logarithms here, as in the papers. T query rows, T_k keys, D head size.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from model import tiled
from model.attention import AttentionConfig, problem_of
from model.break_it import FAILURES, UNBROKEN, BreakIt
from model.tiled import INF, LOG2E, LOWEST, TINY

ROUNDING = 1e-6  # a smaller share of o is rounding


class Head(NamedTuple):
    labels: list[str]  # (T,): the tokens
    q: Tensor  # (T, D)
    k: Tensor  # (T_k, D)
    v: Tensor


class Tile(NamedTuple):
    """A row in one tile: what it sees there, and its state after it."""

    columns: range
    s: Tensor  # (keys,): -inf where hidden
    p: Tensor  # (keys,)
    m: float
    l: float
    acc: Tensor  # (D,)
    alpha: float  # what acc was multiplied by


def worked_example() -> Head:
    """The five tokens of docs/attention.md: "the cat sat on (the) mat", scores q k / 2."""
    q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
    k = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
    v = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]
    return Head(["The", "cat", "sat", "on", "mat"], torch.tensor(q).float(), torch.tensor(k), torch.tensor(v))


def tell(head: Head, row: int, M: int, N: int, causal: bool, break_it: BreakIt = UNBROKEN):
    """The tiles of a row, in the order of the visits; its o (D,) and lse."""
    found: list[Tile] = []

    def watch(rows, columns, s, p, m, l, acc, alpha, **others):
        if row in rows:
            r = row - rows.start
            m = -INF if m[0, r] == LOWEST else float(m[0, r]) / LOG2E
            state = m, float(l[0, r]), acc[0, r].clone(), float(alpha[0, r])
            found.append(Tile(columns, s[0, r] / LOG2E, p[0, r].clone(), *state))

    q, k, v = (x[None, None] for x in (head.q, head.k, head.v))
    problem = problem_of(q, k, v, AttentionConfig("tiled"), causal, break_it=break_it)
    o, lse, _ = tiled.forward(q, k, v, problem, M, N, watch)
    return found, o[0, 0, row], float(lse[0, 0, row])


def trace(head: Head, row: int, M: int, N: int, causal: bool, failure="none", score_gain=1.0) -> Iterator[str]:
    """A line for each tile of the row: m, l, alpha, the first four numbers of o = acc / l so far, what changed."""
    if row >= len(head.q):
        raise ValueError(f"row={row}: there are {len(head.q)} rows, counted from 0")
    break_it = BreakIt(failure, score_gain)
    tiles, o, lse = tell(head, row, M, N, causal, break_it)
    right = tell(head, row, M, N, causal, BreakIt("none", score_gain))[1]
    yield f"{' '.join(head.labels)}: row {row}, {head.labels[row]!r}"
    yield f"failure={failure}, score_gain={score_gain:g}, causal={causal}, tiles of {M} x {N}"
    yield f"{'keys':>7}{'m':>9}{'l':>9}{'alpha':>9}  {'o':>9}{'':27}  what changed"
    last = row + len(head.k) - len(head.q) if causal else len(head.k)  # the last key that the row may see
    m, l = -INF, 0.0
    for tile in tiles:
        alpha = math.exp(m - tile.m) if "no_rescale_output" in break_it.broken else tile.alpha
        m = round(tile.m + math.log(alpha), 5) if m == -INF and alpha > 0 else m  # where it began
        so_far = tile.acc / (tile.l if "unguarded_mask" in break_it.broken else max(tile.l, TINY))
        words = sees(tile, last) + sentence(tile, m, l, alpha, break_it.broken)
        keys = f"{tile.columns[0]}-{tile.columns[-1]}"
        yield line(keys, numbers([tile.m, tile.l, alpha]), so_far, words)
        m, l = tile.m, tile.l
    yield line("end", "", o, f"o, and lse = {lse:.4f}")
    if failure != "none":
        off = float((o - right).norm() / right.norm())
        far = f"{100 * off:.1f} % away" if off < INF else "not finite"
        yield line("", "", right, f"o of the whole algorithm; the one above is {far}")
        if off < ROUNDING:
            yield f"{failure} changes nothing in this row: it acts {FAILURES[failure].acts}."


def sees(tile: Tile, last: int) -> str:
    """Where the mask is wrong. last: the last key that the row may see."""
    seen, allowed = tile.s > -INF, torch.tensor(tile.columns) <= last
    leaks, misses = int((seen & ~allowed).sum()), int((allowed & ~seen).sum())
    words = f"Sees {leaks} of the future's keys. " if leaks else ""
    return words + (f"Misses {misses} that it may see. " if misses else "")


def sentence(tile: Tile, m: float, l: float, alpha: float, broken: tuple[str, ...]) -> str:
    """What the tile changed. m, l: before it."""
    top = float(tile.s.max())
    if l != l:
        return "It was NaN before and stays NaN."
    if top == -INF:
        unseen = "m is still -inf, and exp(-inf - -inf) is NaN" if tile.l != tile.l else "nothing changes"
        return f"It sees no key of this tile: {unseen}."
    if "no_max" in broken or ("zero_init_max" in broken and tile.m == 0 > top):
        why = "No maximum" if "no_max" in broken else "m began at 0 and stays there"
        return f"{why}: the largest weight is exp({top:.4g}) = {float(tile.p.max()):.4g}."
    if l == alpha == 0:
        return f"The first keys that it sees: m = {tile.m:.4g}, and nothing yet to rescale."
    if tile.m == m:
        return f"No score above m = {m:.4g}: alpha is 1, and the new weights are added as they are."
    left = [name for name, part in (("l", "no_rescale_sum"), ("acc", "no_rescale_output")) if part in broken]
    so = f"but {' and '.join(left)} {'are' if left[1:] else 'is'} not" if left else "so l and acc are"
    return f"A larger score: m grows from {m:.4g} to {tile.m:.4g}, {so} multiplied by alpha = {alpha:.4g}."


def line(keys: str, state: str, o: Tensor, words: str) -> str:
    """state: m, l and alpha."""
    return f"{keys:>7}{state:27}  {numbers(o[:4].tolist()):36}  {words}"


def numbers(some: list[float]) -> str:
    return "".join(f"{x:9.4f}" if abs(x) < 1e3 else f"{x:9.3g}" for x in some)
