"""The tile sizes of the kernels, by head size, dtype and GPU, and how attention.autotune chooses them.

launch_with("forward", launch, q, dropout=False, autotune=False)      calls launch(Tiles(...))
"""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads this when kernels/flash.py is imported


class Tiles(NamedTuple):
    """The tile sizes of a kernel, and Triton's options to compile and launch it."""

    BLOCK_M: int  # query rows
    BLOCK_N: int  # key rows
    num_warps: int
    num_stages: int

    def options(self) -> dict:
        """The keyword arguments of a launch."""
        return {name: getattr(self, name) for name in ("num_warps", "num_stages")}


# (kernel, BLOCK_D up to, dropout) -> the fastest tiles for 16-bit inputs on an H200 (LOG.md). Dropout needs registers,
# so with dropout the forward of head size 64 has smaller tiles.
MEASURED = {
    ("forward", 64, False): Tiles(64, 128, 4, 2),
    ("forward", 64, True): Tiles(64, 64, 4, 3),
    ("forward", 128, False): Tiles(64, 64, 4, 3),
    ("forward", 128, True): Tiles(64, 64, 4, 3),
    ("dq", 64, False): Tiles(64, 64, 4, 2),
    ("dq", 64, True): Tiles(64, 64, 4, 2),
    ("dq", 128, False): Tiles(128, 64, 8, 3),
    ("dq", 128, True): Tiles(128, 64, 8, 3),
    ("dkdv", 64, False): Tiles(64, 64, 4, 3),
    ("dkdv", 64, True): Tiles(64, 64, 4, 3),
    ("dkdv", 128, False): Tiles(64, 64, 4, 2),
    ("dkdv", 128, True): Tiles(64, 64, 4, 2),
    # Head size 256. Forward: the fastest tried. dq and dkdv: not measured, they spill the fewest registers.
    ("forward", 256, False): Tiles(128, 64, 8, 2),
    ("forward", 256, True): Tiles(128, 64, 8, 2),
    ("dq", 256, False): Tiles(64, 32, 8, 2),
    ("dq", 256, True): Tiles(64, 32, 8, 2),
    ("dkdv", 256, False): Tiles(32, 64, 8, 1),
    ("dkdv", 256, True): Tiles(32, 64, 8, 1),
}
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
    return MEASURED[kernel, BLOCK_D, dropout]


def launch_with(
    kernel: str, launch: Callable[[Tiles], None], q: Tensor, dropout: bool, autotune: bool, rows: int = 128
) -> int:
    """Launches a kernel with the tiles of the table or, with autotune, with the fastest of CANDIDATES.

    Autotune times them at the first call of a kind. A kind is a kernel, head size, dtype, device, use of dropout, and
    length rounded up to a power of two. rows: BLOCK_M must divide it. Returns BLOCK_M.
    """
    tile = tiles_for(kernel, q, dropout)
    if autotune and not INTERPRETED and not torch.cuda.is_current_stream_capturing():
        kind = kernel, triton.next_power_of_2(q.shape[2]), q.shape[3], q.dtype, q.device, dropout, rows

        def milliseconds(tile: Tiles) -> float:
            try:
                return triton.testing.do_bench(lambda: launch(tile), return_mode="median")
            except triton.runtime.errors.OutOfResources:  # these tiles need more shared memory than the GPU has
                return math.inf

        if kind not in TUNED:
            TUNED[kind] = min((t for t in [tile, *CANDIDATES] if rows % t.BLOCK_M == 0), key=milliseconds)
        tile = TUNED[kind]
    assert rows % tile.BLOCK_M == tile.BLOCK_M % 32 == tile.BLOCK_N % 32 == 0, "row_terms and keep_mask rely on it"
    launch(tile)
    return tile.BLOCK_M


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
