"""Launches the kernels of kernels/flash.py or, on Hopper GPUs, those of kernels/hopper/.

    o, lse, lse2 = forward(q, k, v, Problem.of(T, T_k, scale=D**-0.5))
    dq, dk, dv = gradients(q, k, v, o, lse2, do, dlse, problem)

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse, lse2, dlse (B, H, T)

What a call launches depends on its kind alone: shapes, strides, dtypes, device and problem. attention() gives each kind
a dictionary, Problem.cache. From the second call of a kind on, launch() and run() find there what Triton has compiled.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import hopper, sizes
from kernels.flash import How, dkdv_kernel, dq_kernel, forward_kernel
from kernels.problem import Mask, Problem, Task, Visits
from kernels.sizes import Tiles, block_d, visits_of

# Where the running maximum starts. From the lowest float32, a row with a hidden first tile has exp(-inf - LOWEST) = 0.
# From -inf it would have exp(-inf - -inf), which is NaN.
LOWEST = -torch.finfo(torch.float32).max
NO_DATA = Visits(None, None, None, None, None)
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, autotune: bool = False, kernel: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, lse, and lse in base 2 for the backward. Converting lse to base 2 there would round it, and that would
    scale all weights of a row by the same wrong factor. autotune, kernel: as in flash_attention() of kernels/op.py."""
    B, H, T, _ = q.shape
    o = like_heads(q)
    lse, lse2 = q.new_empty((B, H, T), dtype=torch.float32), q.new_empty((B, H, T), dtype=torch.float32)
    if q.numel() == 0:
        return o, lse, lse2
    q, k, v = aligned(q), aligned(k), aligned(v)
    if not hopper.why_not("forward", q, problem, autotune, kernel):
        from kernels.hopper.forward import launch_forward  # imported here: other GPUs need no Gluon

        with on(q.device):
            launch_forward(q, k, v, o, lse, lse2, problem)
        return o, lse, lse2

    mask = problem.mask if "local_mask" not in problem.broken else local_mask(problem, q)

    def work(tile: Tiles) -> tuple:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        task = task_of(problem, mask, q, k, tile)
        return -(-T // M) * B * H, in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), lse, lse2, task

    with on(q.device):
        launch("forward", work, q, problem, autotune, (q.stride(), k.stride(), v.stride()))
    return o, lse, lse2


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor, dlse: Tensor | None, problem: Problem,
    autotune: bool = False, kernel: str = "auto", found: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk and dv. dlse: None if the loss does not use lse. found: tensors to write them into, which a descriptor can
    write."""
    (B, H, T, _), H_kv, T_k = q.shape, k.shape[1], k.shape[2]
    dq, dk, dv = found = found or (like_heads(q), like_heads(k), like_heads(v))
    if q.numel() == 0:
        dk.zero_()
        dv.zero_()
        return found
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    dlse = None if dlse is None else dlse.contiguous()
    if not hopper.why_not("backward", q, problem, autotune, kernel):
        from kernels.hopper.backward import launch_backward

        with on(q.device):
            launch_backward(q, k, v, o, lse2, do, dlse, found, problem)
        return found

    mask = problem.mask
    if problem.broken:
        mask = mask if "local_mask" not in problem.broken else local_mask(problem, q)
        problem = problem.in_backward()
    # Each row's -lse2 and delta / keep_scale, next to each other so that one load reads both. Padded to whole tiles.
    padded = -(-T // 128) * 128
    row_terms = lse2.new_empty(B, H, padded, 2)

    def work_of_dq(tile: Tiles) -> tuple:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        task = task_of(problem, mask, q, k, tile)
        return (-(-T // M) * B * H, in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), in_tiles(do, M),
                dlse, lse2, row_terms, in_tiles(dq, M), task, padded)  # fmt: skip

    def work_of_dkdv(tile: Tiles) -> tuple:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        task = task_of(problem, mask, q, k, tile, transposed=True)
        return (-(-T_k // N) * B * H_kv, in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(do, M), row_terms,
                in_tiles(dk, N), in_tiles(dv, N), task, padded)  # fmt: skip

    strides = q.stride(), k.stride(), v.stride(), o.stride(), do.stride(), dq.stride(), marks(dlse)
    with on(q.device):
        rows = launch("dq", work_of_dq, q, problem, autotune, strides)
        # dq_kernel fills row_terms up to a multiple of its BLOCK_M, so dkdv_kernel's BLOCK_M must divide that
        launch("dkdv", work_of_dkdv, q, problem, autotune, strides, rows)
    return found


def launch(
    name: str, work: Callable[[Tiles], tuple], q: Tensor, problem: Problem, autotune: bool, strides: tuple,
    rows: int = 128,
) -> int:  # fmt: skip
    """Launches the kernel of kernels/flash.py for "forward", "dq" or "dkdv", and returns its BLOCK_M. At the first call
    of a kind Triton compiles it, and what it has compiled goes into problem.cache. Later calls launch that, and Triton
    does not look at the arguments again. work(tile): the number of programs, and the kernel's arguments. rows: BLOCK_M
    must divide it."""
    place = name, strides, marks(*problem.tensors), precision(q.dtype), rows
    if problem.cache is not None and not autotune and place in problem.cache:
        tile, how, launched = problem.cache[place]
        launched(*work(tile)[1:], how)
        return tile.BLOCK_M
    dropout = problem.dropout.seed is not None
    tile = usual = sizes.tiles_for(name, q, dropout)
    if autotune:
        tile = sizes.tuned(name, lambda tile: launch_once(name, work, q, problem, tile), q, dropout, rows, usual)
    assert rows % tile.BLOCK_M == tile.BLOCK_M % 32 == tile.BLOCK_N % 32 == 0, "row_terms and keep_mask rely on it"
    programs, how, compiled = launch_once(name, work, q, problem, tile)
    if problem.cache is not None and not autotune and isinstance(compiled, CompiledKernel):
        problem.cache[place] = tile, how, compiled[programs, 1, 1]
    return tile.BLOCK_M


def launch_once(name: str, work: Callable[[Tiles], tuple], q: Tensor, problem: Problem, tile: Tiles) -> tuple:
    """Launches with this tile. Returns the number of programs, the How and what Triton has compiled."""
    (programs, *args), how = work(tile), how_for(q, problem, tile)
    return programs, how, KERNELS[name][(programs,)](*args, how, num_warps=tile.num_warps, num_stages=tile.num_stages)


def run(
    kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, int], problem: Problem, key: Any
) -> None:  # fmt: skip
    """kernel[grid](*args, **options). Triton looks at every argument of a launch to find what it has compiled for
    such arguments. Here calls of one kind whose `key` is the same share that. key: all that the kind does not know, but
    for the tensors of the problem."""
    if problem.cache is None:
        kernel[grid](*args, **options)
        return
    place = kernel, key, marks(*problem.tensors)
    found = problem.cache.get(place)
    if found is not None:
        found(*args)
        return
    compiled = kernel[grid](*args, **options)
    if isinstance(compiled, CompiledKernel):  # in Triton's interpreter it is None
        problem.cache[place] = compiled[(*grid, 1, 1)[:3]]


def marks(*tensors: Tensor | None) -> tuple:
    """What Triton compiles a kernel for of these tensors: a pointer's type, and whether it is a multiple of 16."""
    found: tuple = ()
    for x in tensors:
        found += (None if x is None else (x.dtype, x.data_ptr() % 16 == 0),)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The arguments of a kernel.


def how_for(q: Tensor, problem: Problem, tile: Tiles) -> How:
    """What a kernel is compiled for: tile, precision and failures."""
    float32 = q.dtype == torch.float32
    return how(tile.BLOCK_M, tile.BLOCK_N, block_d(q.shape[3]), precision(q.dtype), problem.broken, float32)


@cache
def how(M: int, N: int, BLOCK_D: int, precision: str, broken: tuple[str, ...], float32: bool) -> How:
    """Makes the How of these arguments, once."""
    low = -math.inf if "unguarded_mask" in broken else LOWEST
    start = 0.0 if "zero_init_max" in broken or "no_max" in broken else low
    values = [M, N, BLOCK_D, precision, start]
    for failure in fields(How)[len(values) :]:
        values.append(failure.name.lower() in broken and not (failure.name == "BF16_TIES" and float32))
    return How(*map(tl.constexpr, values))


def precision(dtype: torch.dtype) -> str:
    """The precision of products: tf32 for float32 inputs if torch allows it, else ieee."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def local_mask(problem: Problem, q: Tensor) -> Mask:
    """The problem's mask with break_it=local_mask: it counts from the corner of the forward's tile."""
    tile = sizes.tiles_for("forward", q, problem.dropout.seed is not None)
    return problem.mask._replace(at_most=None, local_m=tile.BLOCK_M, local_n=tile.BLOCK_N)


def task_of(problem: Problem, mask: Mask, q: Tensor, k: Tensor, tile: Tiles, transposed: bool = False) -> Task:
    """The Task of a kernel with one program per tile of queries or, transposed, per tile of keys."""
    M, N = tile.BLOCK_M, tile.BLOCK_N
    visits = NO_DATA
    if mask.documents_q is not None or mask.positions is not None or mask.blocks is not None:
        visits = visits_of(mask, M, N, transposed)
    # If every tile lies inside one block, the list of tiles is enough, and the kernel need not look at the blocks.
    if mask.blocks is not None and mask.block_size % M == mask.block_size % N == (mask.T_k - mask.T) % M == 0:
        mask = mask._replace(blocks=None)
    H = q.shape[1]
    return Task(mask, problem.score, problem.dropout, visits, problem.keep_scale, H, H // k.shape[1])


class Strided(NamedTuple):
    """A (B, H, T, D) tensor for GPUs without descriptors (before sm_90)."""

    pointer: Tensor
    stride_b: int
    stride_h: int
    stride_t: int
    rows: int
    width: int  # D


def in_tiles(x: Tensor, rows: int, layout: Any = None) -> TensorDescriptor | Strided:
    """x (B, H, T, D) in the form in which a kernel loads and stores tiles of rows x BLOCK_D. layout: of such a tile in
    shared memory, for kernels/hopper/, which says it itself."""
    if not sizes.has_descriptors(x.device):
        b, h, t = strides_of(x.shape, x.stride())
        return Strided(x, b, h, t, x.shape[2], x.shape[3])
    # This skips __init__ and its checks: checked() has run them for this kind of tensor. It takes 0.8 us instead of
    # 3.0. A forward and backward make 16 descriptors, so their host time is a sixth shorter (LOG.md).
    kind, attributes = checked(x.shape, x.stride(), x.dtype, rows, layout)
    descriptor: Any = object.__new__(kind)
    vars(descriptor).update(attributes)
    descriptor.base = x
    return descriptor


@lru_cache(1024)
def checked(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, rows: int, layout: Any
) -> tuple[type, dict]:
    """The class and the attributes of a descriptor that Triton made and checked."""
    block = [1, 1, rows, block_d(shape[3])]
    tensor = torch.empty(0, dtype=dtype), list(shape), [*strides_of(shape, stride), 1], block
    if layout is None:
        descriptor = TensorDescriptor(*tensor)
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as WithLayout  # only Hopper needs Gluon

        descriptor = WithLayout(*tensor, layout)
    return type(descriptor), vars(descriptor)


def strides_of(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    """The strides of all axes but the last. An axis of size 1 may have any stride in torch; a descriptor gets 16."""
    return [step if size > 1 else 16 for step, size in zip(stride[:3], shape[:3], strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Memory and devices.


def on(device: torch.device):
    """Makes `device` the current one. Triton launches on the current device, even if the tensors are on another."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if there else torch.cuda.device(device)


def like_heads(x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D), so that the projection after it needs no copy. Rows
    are padded to a multiple of 16 bytes, as descriptors require."""
    B, H, T, D = x.shape
    step = 16 // x.itemsize
    width = -(-D // step) * step
    return x.new_empty_strided((B, H, T, D), (T * H * width, width, H * width, 1))


def aligned(x: Tensor) -> Tensor:
    """x if a descriptor can read it: rows are contiguous and begin at multiples of 16 bytes. Otherwise a copy."""
    return x if x.data_ptr() % 16 == 0 and in_steps(x.shape, x.stride(), x.itemsize) else like_heads(x).copy_(x)


@lru_cache(1024)
def in_steps(shape: torch.Size, stride: tuple[int, ...], itemsize: int) -> bool:
    """Whether rows (of the last axis) are contiguous and begin at multiples of 16 bytes from the first."""
    apart = [step for step, size in zip(stride[:3], shape[:3], strict=True) if size > 1]
    return stride[3] == 1 and all(step > 0 and step * itemsize % 16 == 0 for step in apart)
