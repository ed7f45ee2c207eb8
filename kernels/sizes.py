"""The tile sizes of the kernels, by head size, dtype and GPU, and how attention.autotune chooses them. Which tiles a
tile visits, where that depends on data: documents, positions of packed sequences, block masks.

For causal masks and windows the kernels compute the latter themselves (between() in flash.py). For documents and packed
sequences they compare the lowest and highest number of every tile (looked_up() there). edges() finds those by one
reduction, in O(T) memory. A block mask needs lists of tiles, (T / BLOCK)**2 numbers, which are made once and cached.
"""

import math
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from kernels.problem import Mask, Visits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads this when kernels/flash.py is imported


class Tiles(NamedTuple):
    """The tile sizes of a kernel, and Triton's options to compile and launch it."""

    BLOCK_M: int  # query rows
    BLOCK_N: int  # key rows
    num_warps: int
    num_stages: int


# (kernel, BLOCK_D up to) -> the fastest tiles for 16-bit inputs on an H200 (LOG.md).
MEASURED = {
    ("forward", 64): Tiles(64, 128, 4, 2),
    ("forward", 128): Tiles(64, 64, 4, 3),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(128, 64, 8, 3),
    ("dkdv", 64): Tiles(64, 64, 4, 3),
    ("dkdv", 128): Tiles(64, 64, 4, 2),
    # Head size 256. Forward: the fastest tried. dq and dkdv: not measured, they spill the fewest registers.
    ("forward", 256): Tiles(128, 64, 8, 2),
    ("dq", 256): Tiles(64, 32, 8, 2),
    ("dkdv", 256): Tiles(32, 64, 8, 1),
}
DROPPING = MEASURED | {("forward", 64): Tiles(64, 64, 4, 3)}  # dropout needs registers
# (kernel, BLOCK_D up to) -> tiles for GPUs with less than 160 KiB of shared memory per program (sm_86, sm_89, sm_120),
# not measured. Before Hopper the forward of head size 256 uses them too; it would spill otherwise.
LEAN = {
    ("forward", 64): Tiles(64, 64, 4, 2),
    ("forward", 128): Tiles(64, 64, 4, 2),
    ("forward", 256): Tiles(64, 32, 8, 2),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(64, 64, 4, 2),
    ("dq", 256): Tiles(32, 64, 8, 1),
    ("dkdv", 64): Tiles(64, 64, 4, 2),
    ("dkdv", 128): Tiles(32, 64, 4, 2),
    ("dkdv", 256): Tiles(32, 32, 8, 1),
}
ROOMY = 160 * 1024
FLOAT32 = Tiles(32, 32, 8, 1)  # without TF32 float32 runs on plain cores and spills: for checks, not for speed
# What attention.autotune tries besides the tiles of the table.
CANDIDATES = [
    Tiles(32, 64, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2),
    Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2),
]  # fmt: skip
TUNED: dict[tuple, Tiles] = {}


def tiles_for(kernel: str, q: Tensor, dropout: bool) -> Tiles:
    """The table's tiles for kernel "forward", "dq" or "dkdv" and q (B, H, T, D), on q's device."""
    BLOCK_D = max(64, block_d(q.shape[3]))
    if q.dtype == torch.float32:
        return FLOAT32
    spills = kernel == "forward" and BLOCK_D == 256 and not has_descriptors(q.device)
    if shared_memory(q.device) < ROOMY or spills:
        return LEAN[kernel, BLOCK_D]
    return (DROPPING if dropout else MEASURED)[kernel, BLOCK_D]


def tuned(kernel: str, launch: Callable[[Tiles], object], q: Tensor, dropout: bool, rows: int, usual: Tiles) -> Tiles:
    """The fastest of `usual` and CANDIDATES, timed by launch() at the first call of a kind. A kind is a kernel, head
    size, dtype, device, use of dropout, and length rounded up to a power of two. rows: BLOCK_M must divide it."""
    if INTERPRETED or torch.cuda.is_current_stream_capturing():
        return usual
    kind = kernel, triton.next_power_of_2(q.shape[2]), q.shape[3], q.dtype, q.device, dropout, rows

    def milliseconds(tile: Tiles) -> float:
        try:
            return triton.testing.do_bench(lambda: launch(tile), return_mode="median")
        except triton.runtime.errors.OutOfResources:  # these tiles need more shared memory than the GPU has
            return math.inf

    if kind not in TUNED:
        TUNED[kind] = min((t for t in [usual, *CANDIDATES] if rows % t.BLOCK_M == 0), key=milliseconds)
    return TUNED[kind]


def block_d(D: int) -> int:
    """The width of a tile: D rounded up to a power of two, at least 16."""
    return max(16, 1 << (D - 1).bit_length())  # triton.next_power_of_2 takes 8 us


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use. Without a GPU: as on the one that the kernels were measured on."""
    if device.type != "cuda":
        return 232_448
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's type stub lacks it


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can begin before the one ahead of it ends (programmatic dependent launch): from sm_90 on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether the hardware loads tiles through tensor descriptors: sm_90 and later. The interpreter on a CPU does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


# ---------------------------------------------------------------------------------------------------------------------
# Which tiles are visited.


def visits_of(mask: Mask, M: int, N: int, transposed: bool) -> Visits:
    """The visits of tiles of M queries and N keys. transposed: a tile of keys visits tiles of queries."""
    if mask.blocks is not None:
        of_mask = mask.block_size, mask.T, mask.T_k, mask.at_least, mask.at_most
        return Visits(None, None, None, *listed(mask.blocks, *of_mask, M, N, transposed))
    positions = row_documents = key_documents = None
    if mask.positions is not None:
        positions = edges(mask.positions[None], M)
    if mask.documents_q is not None and mask.documents_k is not None:
        row_documents, key_documents = edges(mask.documents_q, M), edges(mask.documents_k, N)
    return Visits(positions, row_documents, key_documents, None, None)


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

    blocks: bool, on the kernels' device. The other arguments are as in Mask. The lists are made on
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
