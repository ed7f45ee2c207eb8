"""Which tiles a tile visits, where that depends on data: documents, positions of packed sequences, block masks.

For causal masks and windows the kernels compute it themselves (between() in flash.py). For documents and packed
sequences they compare the lowest and highest number of every tile (looked_up() there). edges() finds those by one
reduction, in O(T) memory. A block mask needs lists of tiles, (T / BLOCK)**2 numbers, which are made once and cached.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def edges(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest number in each tile of `block`: integers (n, T) to two tensors (n, tiles)."""
    short = -x.shape[-1] % block
    x = pad(x, (0, short), mode="replicate") if short else x  # repeats the last number, which changes no edge
    return torch.aminmax(x.unflatten(-1, (-1, block)), dim=-1)


def listed(blocks: Tensor, *of_mask) -> tuple[Tensor, Tensor]:
    """lists(), cached until the block mask changes. torch counts the writes to a tensor in _version, which has no
    public name. A tensor made in inference mode has no such count, so its lists are made every time."""
    return lists.__wrapped__(blocks, 0, *of_mask) if blocks.is_inference() else lists(blocks, blocks._version, *of_mask)


@lru_cache(64)  # block masks with their lists
def lists(
    blocks: Tensor, version: int, block_size: int, T: int, T_k: int, at_least: int | None, at_most: int | None,
    block_m: int, block_n: int, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tiles that each tile of queries (transposed: of keys) visits: first those that the mask cuts, then the whole.

    blocks: bool, on the kernels' device. The other arguments are as in kernels/task.py's Mask. The lists are made on
    the CPU, so that they are complete whichever stream reads them. Returns int32 bounds (tiles, 4), which are
    between()'s four numbers as places in the list, and the lists, int32 (tiles, others).
    """
    # device="cpu", because torch.set_default_device() may have named another
    top, left = torch.arange(T_k - T, T_k, block_m, device="cpu"), torch.arange(0, T_k, block_n, device="cpu")
    bottom, right = (top + block_m - 1).clamp(max=T_k - 1), (left + block_n - 1).clamp(max=T_k - 1)
    seen, whole = under_tiles(blocks.cpu(), block_size, (top, bottom), (left, right))
    nearest, farthest = left - bottom[:, None], right - top[:, None]  # the least and the greatest column - position
    if at_least is not None:
        seen, whole = seen & (farthest >= at_least), whole & (nearest >= at_least)
    if at_most is not None:
        seen, whole = seen & (nearest <= at_most), whole & (farthest <= at_most)
    if transposed:
        seen, whole = seen.mT, whole.mT
    else:  # a tile with columns past the last needs the mask; rows past the last need none, their weights are 0
        whole[:, T_k // block_n :] = False
    tiles = torch.argsort(2 - 2 * seen.int() + whole.int(), dim=-1, stable=True)  # cut by the mask 0, whole 1, hidden 2
    stop = seen.sum(-1)
    bounds = torch.stack((torch.zeros_like(stop), stop - whole.sum(-1), stop, stop), -1)
    return bounds.int().to(blocks.device), tiles.int().contiguous().to(blocks.device)


def under_tiles(
    blocks: Tensor, block_size: int, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """For each tile of queries and each tile of keys: is any of the blocks under it switched on, and are all? Two bool
    tensors (tiles, tiles).

    Blocks and tiles may have any size, because blocks are counted by sums over rectangles. Rows before the first key
    count as in block 0.
    """
    sums = pad(blocks.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
    (top, bottom), (left, right) = ([x.clamp(min=0) // block_size for x in ends] for ends in (rows, keys))
    top, bottom, left, right = top[:, None], bottom[:, None] + 1, left[None], right[None] + 1
    on = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return on > 0, on == (bottom - top) * (right - left)
