"""Which tiles a tile has to visit, where data decides: documents, positions of packs, a picture of blocks.

What causal masks and windows leave is arithmetic, done inside the kernels (between() in flash.py). For documents and
packs the kernels look it up (looked_up() there) in the lowest and highest number of every tile, which are made here, in
O(T) memory, by one reduction. A picture of blocks takes lists, (T / BLOCK)**2 numbers; they are made once and kept.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def edges(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest number in each tile of `block`: integers (n, T) to two of (n, tiles)."""
    short = -x.shape[-1] % block
    x = pad(x, (0, short), mode="replicate") if short else x  # the last one again: it moves no edge
    return torch.aminmax(x.unflatten(-1, (-1, block)), dim=-1)


def listed(blocks: Tensor, *of_mask) -> tuple[Tensor, Tensor]:
    """lists(), kept until the picture is written to: torch counts the writes to a tensor in _version, and has no public
    name for it. A tensor of inference mode has no such count, and its lists are made anew."""
    return lists.__wrapped__(blocks, 0, *of_mask) if blocks.is_inference() else lists(blocks, blocks._version, *of_mask)


@lru_cache(64)  # pictures with their lists
def lists(
    blocks: Tensor, version: int, block_size: int, T: int, T_k: int, at_least: int | None, at_most: int | None,
    block_m: int, block_n: int, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """For each tile of queries (transposed: of keys) the others that it visits, those in part seen before the whole
    ones.

    blocks: bool, on the kernels' device; the rest is as in flash.py's Mask. Made on the CPU, so that they are there
    whichever stream reads them next. Returns int32 bounds (tiles, 4), which are between()'s four answers but places in
    the list, and the lists, int32 (tiles, others).
    """
    top = torch.arange(T_k - T, T_k, block_m)
    left = torch.arange(0, T_k, block_n)
    bottom, right = (top + block_m - 1).clamp(max=T_k - 1), (left + block_n - 1).clamp(max=T_k - 1)
    seen, whole = under_tiles(blocks.cpu(), block_size, (top, bottom), (left, right))
    nearest, farthest = left - bottom[:, None], right - top[:, None]  # of column - position
    if at_least is not None:
        seen, whole = seen & (farthest >= at_least), whole & (nearest >= at_least)
    if at_most is not None:
        seen, whole = seen & (nearest <= at_most), whole & (farthest <= at_most)
    if transposed:
        seen, whole = seen.mT, whole.mT
    else:  # columns past the last are hidden one by one; rows past the last weigh nothing anyway
        whole[:, T_k // block_n :] = False
    tiles = torch.argsort(2 - 2 * seen.int() + whole.int(), dim=-1, stable=True)  # in part 0, whole 1, unseen 2
    stop = seen.sum(-1)
    bounds = torch.stack((torch.zeros_like(stop), stop - whole.sum(-1), stop, stop), -1)
    return bounds.int().to(blocks.device), tiles.int().contiguous().to(blocks.device)


def under_tiles(
    blocks: Tensor, block_size: int, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of the blocks that a tile of queries and one of keys meet in: is any switched on, are all? bool (tiles, tiles).

    By sums over rectangles, so that blocks and tiles may be of any size. Rows before the first key are in block 0.
    """
    sums = pad(blocks.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
    (top, bottom), (left, right) = ([x.clamp(min=0) // block_size for x in ends] for ends in (rows, keys))
    top, bottom, left, right = top[:, None], bottom[:, None] + 1, left[None], right[None] + 1
    on = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return on > 0, on == (bottom - top) * (right - left)
