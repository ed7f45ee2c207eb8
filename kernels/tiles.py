"""Which tiles a tile has to visit, where data decides: documents, positions of packs, a picture of blocks.

What causal masks and windows leave is arithmetic, done inside the kernels (between() in flash.py). Here it is the same
arithmetic on the lowest and highest number in every tile, in O(T) memory, with the same four answers: the first tile to
visit, the first that the mask leaves whole, past the last whole one, past the last. A picture of blocks takes lists as
well, (T / BLOCK)**2 numbers, as the picture itself does. All of it is a dozen small launches a kernel, in every layer.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def edges(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest number in each tile of `block`: integers (.., T) to two of (.., tiles)."""
    short = -x.shape[-1] % block
    x = pad(x, (0, short), mode="replicate") if short else x  # the last one again: it moves no edge
    x = x.unflatten(-1, (-1, block))
    return x.amin(-1), x.amax(-1)


def between(mine: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], at_least: int | None, at_most: int | None):
    """For each of my intervals: which of the others hold a pair with at_least <= other - mine <= at_most, and which
    hold nothing else.

    The others need not be sorted: the highest number so far and the lowest from here on are. Where they are not, a few
    tiles too many are visited and fewer called whole, which costs time and changes no bit.
    Returns int64 (B, mine) four times.
    """
    low, high = (x.contiguous() for x in mine)
    n = others[0].shape[-1]
    so_far = others[1].cummax(-1).values
    from_here = others[0].flip(-1).cummin(-1).values.flip(-1).contiguous()
    start = whole_start = torch.zeros_like(low)
    stop = whole_stop = torch.full_like(low, n)
    if at_least is not None:
        start = torch.searchsorted(so_far, low + at_least)
        whole_start = torch.searchsorted(from_here, high + at_least)
    if at_most is not None:
        stop = torch.searchsorted(from_here, high + at_most, right=True)
        whole_stop = torch.searchsorted(so_far, low + at_most, right=True)
    return start, whole_start, whole_stop, stop


def visits(mask, block_m: int, block_n: int, transposed: bool) -> tuple[Tensor | None, Tensor | None, int]:
    """Where a tile of queries (transposed: of keys) has to go: `bounds`, `tiles` and `batch` for the kernels.

    mask: flash.py's. bounds: int32 (B or 1, my tiles, 4), None where the kernels' own arithmetic does. tiles: int32
    (B or 1, my tiles, the others), with blocks only: the numbers of the tiles, those in part seen and then the whole
    ones, to which bounds then point. batch: 1 where each sequence has its own, else 0.
    """
    if mask.documents_q is None and mask.positions is None and mask.blocks is None:
        return None, None, 0
    device = next(x for x in (mask.documents_q, mask.positions, mask.blocks) if x is not None).device
    keys = torch.arange(mask.T_k, device=device)[None]
    rows = torch.arange(mask.T_k - mask.T, mask.T_k, device=device)[None]
    rows = rows if mask.positions is None else mask.positions[None]
    pairs = [(edges(rows, block_m), edges(keys, block_n), mask.at_least, mask.at_most)]
    if mask.documents_q is not None:
        pairs.append((edges(mask.documents_q, block_m), edges(mask.documents_k, block_n), 0, 0))
    found = []
    for of_rows, of_keys, at_least, at_most in pairs:
        if transposed:  # row - column instead of column - row
            at_least, at_most = (None if x is None else -x for x in (at_most, at_least))
            found.append(between(of_keys, of_rows, at_least, at_most))
        else:
            found.append(between(of_rows, of_keys, at_least, at_most))
    start, whole_start, whole_stop, stop = zip(*found, strict=True)
    start, whole_start = (torch.stack(torch.broadcast_tensors(*x)).amax(0) for x in (start, whole_start))
    stop, whole_stop = (torch.stack(torch.broadcast_tensors(*x)).amin(0) for x in (stop, whole_stop))
    if not transposed:  # columns past the last are hidden one by one; rows past the last weigh nothing anyway
        whole_stop = whole_stop.clamp(max=mask.T_k // block_n)
    stop = stop.maximum(start)
    whole_start = whole_start.maximum(start).minimum(stop)
    whole_stop = whole_stop.minimum(stop).maximum(whole_start)
    tiles = None
    if mask.blocks is not None:
        others = -(-mask.T // block_m) if transposed else -(-mask.T_k // block_n)
        seen, whole = under_tiles(mask, *pairs[0][:2])
        if transposed:
            seen, whole = seen.mT, whole.mT
        t = torch.arange(others, device=device)
        seen = seen & (t >= start[..., None]) & (t < stop[..., None])
        whole = whole & seen & (t >= whole_start[..., None]) & (t < whole_stop[..., None])
        order = 2 - 2 * seen.int() + whole.int()  # in part 0, whole 1, unseen 2
        tiles = torch.argsort(order, dim=-1, stable=True).int().contiguous()
        stop = seen.sum(-1)
        start, whole_start, whole_stop = torch.zeros_like(stop), stop - whole.sum(-1), stop
    bounds = torch.stack((start, whole_start, whole_stop, stop), -1).int().contiguous()
    return bounds, tiles, int(len(bounds) > 1)


def under_tiles(mask, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the blocks that a tile of queries and one of keys meet in: is any switched on, are all? bool (tiles, tiles).

    By sums over rectangles, so that blocks and tiles may be of any size. Rows before the first key are in block 0.
    """
    sums = pad(mask.blocks.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
    (top, bottom), (left, right) = ([x[0].clamp(min=0) // mask.block_size for x in ends] for ends in (rows, keys))
    top, bottom, left, right = top[:, None], bottom[:, None] + 1, left[None], right[None] + 1
    on = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return on > 0, on == (bottom - top) * (right - left)
