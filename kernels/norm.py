"""The backward of layer norm and RMS norm in Triton, with the residual stream around it. Needs Ampere or a newer GPU.

Shapes: N tokens, C model width, P programs.

    x = x + keep * scale * add          the residual stream (model/norm.py)
    y = norm(x)                         what the next layer reads

dres is the gradient of the new x along the stream, dy that of y. norm_backward() returns

    dx = dres + the gradient of y = norm(x), with respect to the new x
    dadd = keep * scale * dx, in the dtype of `add`
    dweight, dbias

torch.compile makes several passes of this: dx, the sums over the rows, and the sums of those sums. Here each number is
read once and written once. A program does every P-th block of rows and keeps its sums in registers. At the end it
writes them as its row of a table. A second kernel adds up the table's rows, always in the same order. So two runs have
the same bits; with atomic additions they would not.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import on
from kernels.problem import order_keys

COLUMNS = 8  # of the table of sums, in a program: one sector of memory


def norm_backward(
    dy: Tensor, dres: Tensor | None, saved: Sequence[Any], scale: float, add_dtype: torch.dtype | None, bias: bool,
    tiles: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx like x; dadd like x in add_dtype, empty for None; and the gradients of weight and bias, (2, C) like weight,
    (1, C) without bias.

    dy and dres (..., C), float32, float16 or bfloat16. saved: x like them; mean and rstd float32, one a row; mean is
    None in an RMS norm; weight (C,); keep, bool like x, or None. tiles: as tiles_for().
    """
    x, mean, rstd, weight, keep = saved
    dx, dadd, dweight = empty_gradients(saved, add_dtype, bias)
    C = x.shape[-1]
    N = x.numel() // C
    if N == 0:
        return dx, dadd, dweight.zero_()
    ROWS, WIDTH, num_warps, each = tiles or tiles_for(C)
    P = min(-(-N // ROWS), each * processors(x.device))
    sums = x.new_empty((P, 1 + bias, C), dtype=torch.float32)
    dy, x = dy.contiguous(), x.contiguous()
    dres = None if dres is None else dres.contiguous()
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    with on(x.device):
        norm_kernel[(P,)](
            dy, dres, x, mean, rstd, weight, keep, dx,
            None if add_dtype is None else dadd, sums, N, scale, C, bias, ROWS, WIDTH, num_warps=num_warps,
        )  # fmt: skip
        width = (1 + bias) * C
        sum_kernel[(-(-width // COLUMNS),)](sums, dweight, P, width, COLUMNS, num_warps=8)
    return dx, dadd, dweight


def empty_gradients(saved: Sequence[Any], add_dtype: torch.dtype | None, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What norm_backward returns, uninitialised."""
    x, _, _, weight, _ = saved
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dadd = x.new_empty(0) if add_dtype is None else torch.empty_like(dx, dtype=add_dtype)
    return dx, dadd, weight.new_empty(1 + bias, x.shape[-1])


def tiles_for(C: int) -> tuple[int, int, int, int]:
    """Rows of a block, the block's width, warps of a program, and programs on each of the GPU's processors.

    Up to C = 1024 the fastest of what was tried at C = 128, 384 and 768 on an H200, to 2 %: one to 16 warps, up to 16
    programs. Wider ones were not measured: a thread has 16 columns and takes 128 registers, so 16 warps share a
    processor. The programs are no more than run at a time, because each goes over all of the rows.
    """
    WIDTH = max(32, triton.next_power_of_2(C))
    if WIDTH <= 1024:
        return 1024 // WIDTH, WIDTH, *((2, 8) if WIDTH < 1024 else (4, 7))
    num_warps = WIDTH // 512
    return 1, WIDTH, num_warps, max(1, 16 // num_warps)


@cache
def processors(device: torch.device) -> int:
    """How many the GPU has. Triton's interpreter on a CPU: two, to have more than one row of sums."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def norm_kernel(dy, dres, x, mean, rstd, weight, keep, dx, dadd, sums, N, scale,
                C: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Every P-th block of ROWS rows. A row past N and a column past C are 0 in dy, so they add nothing to a sum."""
    p, column = tl.program_id(0), tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    dweight, dbias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(p * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        # A thread has four neighbours, of float32 and of 16 bits alike. With eight of 16 bits, which are also 16 bytes,
        # the others would have to change threads on their way.
        at = tl.max_contiguous(row[:, None].to(tl.int64) * C + column[None, :], [1, 4])
        inside = (row < N)[:, None] & (column < C)[None, :]
        dy_i = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        x_i = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.zeros([ROWS, WIDTH], tl.float32)
        if dres is not None:
            gradient = tl.load(dres + at, mask=inside, other=0.0).to(tl.float32)
        if keep is not None:
            kept = tl.load(keep + at, mask=inside, other=0)
        rstd_i = tl.load(rstd + row, mask=row < N, other=0.0)[:, None]
        if mean is not None:
            x_i -= tl.load(mean + row, mask=row < N, other=0.0)[:, None]
        x_i *= rstd_i  # the normed row
        dweight += tl.sum(dy_i * x_i, 0)
        if BIAS:
            dbias += tl.sum(dy_i, 0)

        dy_i *= w
        if mean is None:
            dy_i -= x_i * (tl.sum(dy_i * x_i, 1) / C)[:, None]
        else:
            both = tl.sum(tl.join(dy_i * x_i, dy_i), 1) / C  # (ROWS, 2): one sum across the warps, not two
            of_rstd, of_mean = tl.split(both)
            dy_i -= of_mean[:, None] + x_i * of_rstd[:, None]
        gradient += dy_i * rstd_i
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
        if dadd is not None:  # rounded as autograd rounds it, so that a block that is computed again has the same bits
            gradient = gradient.to(dx.dtype.element_ty).to(dadd.dtype.element_ty)
            if keep is not None:
                gradient = tl.where(kept != 0, gradient.to(tl.float32) * scale, 0.0)
            tl.store(dadd + at, gradient.to(dadd.dtype.element_ty), mask=inside)

    sums += p * (1 + BIAS) * C + column
    tl.store(sums, dweight, mask=column < C)
    if BIAS:
        tl.store(sums + C, dbias, mask=column < C)


@triton.jit
def sum_kernel(sums, total, P, width, COLUMNS: tl.constexpr):
    """total[column]: the sum of the P rows of the table, of `width` columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums_i = tl.zeros([256, COLUMNS], tl.float32)
    for first in range(0, P, 256):
        row = first + tl.arange(0, 256)
        inside = (row < P)[:, None] & (column < width)[None, :]
        sums_i += tl.load(sums + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(total + column, tl.sum(sums_i, 0).to(total.dtype.element_ty), mask=column < width)


order_keys(globals())
