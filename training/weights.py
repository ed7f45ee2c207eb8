"""The attention weights of a recorded call, a tile of rows at a time, and what each head does with them.

    call = record(model, x)[layer]             training/probe.py
    for rows, p in by_rows(call): ...          (H, R, T_k), the weights of a tile of rows
    reading = read(call, tokens, size=64)      pictures of at most 64 x 64 points, entropies, and known patterns

The weights are those of tiled's loop with the call's own break_it: each key's share of the output, after all rescaling
and the division by l. So a broken run shows what it really multiplies v by. Memory is O(T), never T x T.

Shapes: B = 1 sequence, T tokens, H query heads, R rows of a tile, N points along a side of a picture.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.mask import Tiling
from model.tiled import TINY, forward_tiles
from training.probe import Call

# What a head may do with its weights, and the words for it. See places_of().
PATTERNS = {
    "previous": "reads the token before",
    "itself": "reads the token itself",
    "first": "reads the first token",
    "induction": "copies: reads what came after this token earlier",
    "same": "reads this token where it stood earlier",
}
NAMED = 0.4  # the least mean weight for which a pattern is named
FEWEST = 8  # rows that a pattern must have for it


class Reading(NamedTuple):
    """What read() finds of a call. Means are over the rows that see more than one key."""

    maps: Tensor  # (H, N, N) float32: the mean over a block of rows of the weight of a block of keys
    entropy: Tensor  # (H,): in nats; 0 for one key, log(n) for n equal weights
    distance: Tensor  # (H,): tokens from a row back to its largest weight, as it is most often
    often: Tensor  # (H,): the share of the rows that have this distance
    shares: dict[str, Tensor]  # of PATTERNS, those with FEWEST rows: the mean weight on their keys, (H,)

    def pattern(self, head: int) -> str:
        """The pattern with the largest share, if that is at least NAMED; else ""."""
        best = max(self.shares, key=lambda name: float(self.shares[name][head].nan_to_num(0.0)), default="")
        return best if best and float(self.shares[best][head]) >= NAMED else ""


def by_rows(call: Call) -> Iterator[tuple[range, Tensor]]:
    """Each tile of rows with its weights, (H, R, T_k) float32, 0 where nothing is seen. The call has one sequence."""
    problem, watch = call.problem(), dict[str, Any]()
    (_, H_kv, T_k, _), guarded = call.k.shape, "unguarded_mask" not in problem.broken
    assert len(call.q) == 1
    p = l = None
    for rows, tile, state in forward_tiles(call.q, call.k, call.v, problem, call.loops, watch):
        if tile is None:
            if p is None or l is None:
                p = call.q.new_zeros(call.q.shape[1], len(rows), T_k)
            else:
                p = (p / (l.clamp(min=TINY) if guarded else l)).view(-1, len(rows), T_k)
            yield rows, p.float()
            p = None
            continue
        if p is None:
            p = torch.zeros(H_kv, state[0].shape[1], T_k, dtype=state[0].dtype, device=call.q.device)
        p.mul_(watch["alpha"])
        p[..., tile.columns.start : tile.columns.stop] = watch["p"] if watch["z"] is None else watch["p"] * watch["z"]
        l = state[1]


def places_of(tokens: Tensor, rows: range) -> dict[str, Tensor]:
    """{pattern: bool (R, T)}: the keys on which a row with that pattern has its weight. tokens: ids (T,)."""
    i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(len(tokens))
    now = tokens[rows.start : rows.stop, None]
    return {
        "previous": j == i - 1,
        "itself": j == i,
        "first": (j == 0) & (i > 1),  # row 1 would count twice
        "induction": (tokens.roll(1) == now) & (j > 0) & (j <= i) & (j != i),
        "same": (tokens == now) & (j < i),
    }


@torch.no_grad()
def read(call: Call, tokens: Tensor, size: int) -> Reading:
    """The reading of a call on these tokens, ids (T,) on the CPU. size: the most points along a side of a picture."""
    T, H = len(tokens), call.q.shape[1]
    block = -(-T // size)
    N = -(-T // block)
    maps, entropy = torch.zeros(H, N, N), torch.zeros(H)
    back = torch.zeros(H, 2 * T - 1)  # of each distance, from 1 - T on, how many rows have it
    sums = {name: torch.zeros(H) for name in PATTERNS}
    counts = dict.fromkeys(PATTERNS, 0)
    for rows, weights in by_rows(call):
        p = weights.cpu()  # (H, R, T)
        blocks = torch.nn.functional.pad(p, (0, N * block - T)).view(H, len(rows), N, block).sum(-1)
        i = torch.arange(rows.start, rows.stop)
        maps.index_add_(1, i // block, blocks)
        entropy -= torch.xlogy(p, p).sum(-1)[:, i > 0].sum(-1)  # row 0 sees itself alone
        distances = (i - p.argmax(-1))[:, i > 0]
        back.scatter_add_(1, distances + T - 1, torch.ones(distances.shape))
        for name, keys in places_of(tokens, rows).items():
            has = keys.any(-1)
            counts[name] += int(has.sum())
            sums[name] += torch.where(keys, p, 0.0).sum(-1)[:, has].sum(-1)
    maps /= (torch.arange(T) // block).bincount()[:, None]
    shares = {name: sums[name] / counts[name] for name in PATTERNS if counts[name] >= FEWEST}
    most = back.max(-1)
    return Reading(maps, entropy / max(1, T - 1), most.indices - (T - 1), most.values / max(1, T - 1), shares)


def visited(call: Call) -> list[tuple[int, int]]:
    """The numbers (row tile, key tile) of the tiles that are computed; the others are skipped."""
    loops = call.loops
    found = Tiling(call.problem(), loops.block_m, loops.block_n).by_rows()
    return [(rows.start // loops.block_m, tile.columns.start // loops.block_n) for rows, to in found for tile in to]
