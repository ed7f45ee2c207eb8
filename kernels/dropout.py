"""The dropout mask of model/dropout.py as a table in memory, for dropout of the residual stream. Written in Triton.

Shapes: N masks of T rows and C columns.

The attention kernels draw the mask in registers, where they use it. The residual stream is added up by kernels that
torch.compile writes, which cannot share one Philox call between 16 elements. So they read a table instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash import philox
from kernels.launch import on
from kernels.problem import order_keys

PIECES = 128  # of 4 rows x 32 columns, in a program: a thread's


def keep_table(seed: Tensor, numbers: Tensor, rows: Tensor, C: int, threshold: int) -> Tensor:
    """bool (N, T, C), True where an element is kept. seed: int64 scalar on the GPU. numbers: of the masks, int64 (N,).
    rows: int64 (T,), in runs of 32 as model/dropout.py has them. threshold: of drop_threshold()."""
    N, T = len(numbers), len(rows)
    keep = torch.empty(N, T, C, dtype=torch.bool, device=seed.device)
    pieces = N * -(-T // 32) * 8 * -(-C // 32)
    with on(seed.device):
        keep_kernel[(-(-pieces // PIECES),)](
            seed, keep.view(torch.uint8), numbers.contiguous(), rows.contiguous(), N, T, C, threshold, PIECES
        )
    return keep


@triton.jit
def keep_kernel(seed, keep, numbers, rows, N, T, C, threshold, PIECES: tl.constexpr):
    """Rows 8 apart of a 32 x 32 square are one piece, of (4, 32): eight Philox calls, one for each low column."""
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)  # in 32 bits up to 2**38 elements
    squares, low_rows = tl.cdiv(C, 32), tl.cdiv(T, 32) * 8  # columns without bits 3 and 4, over 8; rows without them
    square, c0 = piece % squares, piece // squares % low_rows
    n = piece // squares // low_rows

    seed = tl.load(seed)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c1 = square[:, None] * 8 + tl.arange(0, 8)[None, :]
    number = tl.load(numbers + n, mask=n < N, other=0)
    first = tl.load(rows + (c0 >> 3 << 5), mask=n < N, other=0)  # of the square
    c0, c1, c2 = c0.to(tl.uint32)[:, None], c1.to(tl.uint32), number.to(tl.uint32)[:, None]
    high = (first >> 5 << 3).to(tl.uint32)[:, None] | (c0 & 7)  # the row in the whole sequence, without bits 3 and 4
    words = philox(high, c1, c2, tl.zeros_like(c2), k0, k1)  # four of (PIECES, 8)

    row = ((c0 >> 3 << 5) | (c0 & 7)).to(tl.int32)
    column = square[:, None] * 32 + tl.arange(0, 32)[None, :]
    for word in tl.static_range(4):  # bits 3 and 4 of the row
        i = row + 8 * word
        kept = bytes_of(words[word]) >= threshold  # (PIECES, 32)
        at = (n[:, None].to(tl.int64) * T + i) * C + column
        tl.store(keep + at, kept.to(tl.uint8), mask=(n[:, None] < N) & (i < T) & (column < C))


@triton.jit
def bytes_of(word):
    """uint32 (P, 8) to (P, 32): byte b of word j at column 8 b + j."""
    even, odd = tl.join(word & 255, word >> 16 & 255), tl.join(word >> 8 & 255, word >> 24)  # (P, 8, 2)
    return tl.join(even, odd).reshape(word.shape[0], 8, 4).permute(0, 2, 1).reshape(word.shape[0], 32)


order_keys(globals())
