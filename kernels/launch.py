"""The host path of the forward and the backward: what is refused, which kernels run (those of kernels/hopper/ where
they can, else those of kernels/flash.py), and the tiles and launches of the latter.

Shapes: as in kernels/flash.py; lse2 and dlse are like lse.
"""

import math
import os
from collections import namedtuple
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.flash import How, Task, dkdv_kernel, dq_kernel, forward_kernel
from kernels.problem import LOWEST, Problem, empty_gradients, empty_heads, in_parts, runs_kernels, visit_lists

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads this when kernels/flash.py is imported
# The interpreter multiplies the bits of bfloat16 as integers (tests/interpreter.py has a repair).
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
# A (B, H, T, D) tensor for GPUs without descriptors (before sm_90). rows: T; width: D.
Strided = namedtuple("Strided", "pointer stride_b stride_h stride_t rows width")


def forward(q, k, v, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """o (B, H, T, D), lse, and lse in base 2 for the backward, float32. A row that sees no key: o = 0, lse = -inf."""
    B, H, T, D = q.shape
    check_supported(q.dtype, D, q.device)
    o, lse, lse2 = empty_heads(q), *(q.new_empty((B, H, T), dtype=torch.float32) for _ in range(2))
    q, k, v = aligned(q), aligned(k), aligned(v)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if runs_on_hopper(q, problem):
            from kernels.hopper.forward import launch_forward  # here, because other GPUs need no Gluon

            launch_forward(q, k, v, o, lse, lse2, problem)
            return o, lse, lse2
        M, N, *_ = sizes = tiles_for("forward", q, problem)
        task = task_of(q, k, problem, sizes, "rows")
        args: tuple = in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), lse, lse2, task
        launch(forward_kernel, -(-T // M) * B * H, args, q, problem, sizes)
    return o, lse, lse2


def backward(q, k, v, o, lse2, do, dlse, problem: Problem) -> list[Tensor]:
    """dq, dk and dv, as empty_gradients() has them. dlse: None if the loss does not use lse."""
    (B, H, T, _), (H_kv, T_k) = q.shape, k.shape[1:3]
    found = empty_gradients(q, k)
    dq, dk, dv = in_parts(found, q, k)
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    dlse = None if dlse is None else dlse.contiguous()
    if "stale_seed" in problem.broken and problem.seed is not None:
        problem = problem._replace(seed=problem.seed + 1)
    with torch.cuda.device_of(q):
        if runs_on_hopper(q, problem, ON_HOPPER - {"window", "spans"}):  # the forward has these
            from kernels.hopper.backward import launch_backward

            launch_backward(q, k, v, o, lse2, do, dlse, dq, dk, dv, problem)
            return found
        M, N, *_ = sizes = tiles_for("dq", q, problem)
        padded = -(-T // M) * M
        row_terms = lse2.new_empty(B, H, padded, 2)  # side by side, so that one load reads both
        task = task_of(q, k, problem, sizes, "rows")
        tensors: tuple = in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), in_tiles(do, M)
        args: tuple = *tensors, dlse, lse2, row_terms, in_tiles(dq, M), task, padded
        launch(dq_kernel, -(-T // M) * B * H, args, q, problem, sizes)

        M, N, *_ = sizes = tiles_for("dkdv", q, problem)
        assert padded % M == 0, "dkdv_kernel reads whole tiles of row_terms"
        task = task_of(q, k, problem, sizes, "columns")
        tensors = in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(do, M)
        args = *tensors, row_terms, in_tiles(dk, N), in_tiles(dv, N), task, padded
        launch(dkdv_kernel, -(-T_k // N) * B * H_kv, args, q, problem, sizes)
    return found


@cache
def check_supported(dtype: torch.dtype, D: int, device: torch.device) -> None:
    """Raises ValueError where these kernels cannot run."""
    if not (runs_kernels(device) or INTERPRETED):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(f"attention=triton wants an NVIDIA GPU from Ampere on, not {name}; use sdpa or tiled")
    if dtype not in DTYPES:
        raise ValueError(f"attention=triton has {DTYPES} here, not {dtype}; use one of these, or attention=tiled")
    if D > 256:
        raise ValueError(f"attention=triton has head sizes of 256 at most, not {D}; use attention=tiled or more heads")


# --- Tile sizes -------------------------------------------------------------------------------------------------------
class Tiles(NamedTuple):
    """The tile sizes of a kernel, and Triton's options to compile and launch it."""

    BLOCK_M: int  # query rows
    BLOCK_N: int  # key rows
    num_warps: int
    num_stages: int


# kernel -> tiles for head sizes up to 64, 128 and 256: the fastest for 16-bit inputs on an H200. For head
# size 256 dq's and dkdv's are not measured: they spill the fewest registers.
MEASURED = {
    "forward": (Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 2)),
    "dq": (Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
    "dkdv": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 1)),
}
SMALL = MEASURED | {"forward": (Tiles(64, 64, 4, 3), *MEASURED["forward"][1:])}  # for dropout and block masks
# Tiles for GPUs with less than 160 KiB of shared memory per program (sm_86, sm_89, sm_120), not measured. Before Hopper
# the forward of head size 256 uses them too; it would spill otherwise.
LEAN = {
    "forward": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 2)),
    "dq": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 1)),
    "dkdv": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 8, 1)),
}
FLOAT32 = Tiles(32, 32, 8, 1)  # without TF32 float32 runs on plain cores and spills: for checks, not for speed


def tiles_for(kernel: str, q: Tensor, problem: Problem) -> Tiles:
    """The tiles of kernel "forward", "dq" or "dkdv" for q (B, H, T, D), on q's device."""
    if q.dtype == torch.float32:
        return FLOAT32
    size = (q.shape[3] > 64) + (q.shape[3] > 128)  # the column of the tables
    spills = kernel == "forward" and size == 2 and not has_descriptors(q.device)
    if shared_memory(q.device) < 160 * 1024 or spills:
        return LEAN[kernel][size]
    return (MEASURED if problem.seed is None and problem.blocks is None else SMALL)[kernel][size]


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use. Without a GPU: as on the one that the kernels were measured on."""
    if device.type != "cuda":
        return 232_448
    properties: Any = torch.cuda.get_device_properties(device)  # not all of them have types before torch 2.15
    return properties.shared_memory_per_block_optin


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether the hardware loads tiles through tensor descriptors: sm_90 and later. The interpreter on a CPU does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


# Fields of a Problem that may be set where the forward of kernels/hopper/ runs (`broken` is looked at by itself). If
# any other is set, kernels/flash.py runs.
ON_HOPPER = {"T", "T_k", "causal", "window", "spans", "block_size", "scale", "seed", "dropout_p", "broken"}


def runs_on_hopper(q: Tensor, problem: Problem, computed: set[str] = ON_HOPPER) -> bool:
    """Whether kernels/hopper/ computes it: 16 bits, head size 64 or 128, and the fields of `computed` alone."""
    if not is_hopper(q.device) or q.dtype == torch.float32 or q.shape[3] not in (64, 128):
        return False
    # With dropout and a narrow window kernels/flash.py is faster.
    narrow = problem.seed is not None and problem.window is not None and problem.window < 512
    others = (value for name, value in problem._asdict().items() if name not in computed)
    return all(value is None for value in others) and not problem.broken and not narrow


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


# --- The arguments of a kernel ----------------------------------------------------------------------------------------
def launch(kernel: Any, programs: int, args: tuple, q: Tensor, problem: Problem, sizes: Tiles) -> None:
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    compiled_for = how(sizes.BLOCK_M, sizes.BLOCK_N, q.shape[3], "tf32" if tf32 else "ieee", tuple(problem.broken))
    kernel[(programs,)](*args, compiled_for, num_warps=sizes.num_warps, num_stages=sizes.num_stages)


@cache
def how(M: int, N: int, D: int, precision: str, broken: tuple[str, ...]) -> How:
    """What a kernel is compiled for, made once."""
    low = -math.inf if "unguarded_mask" in broken else LOWEST
    start = 0.0 if "zero_init_max" in broken or "no_max" in broken else low
    flags = (name in broken for name in ("no_max", "no_rescale_sum", "no_rescale_output", "unguarded_mask"))
    return How(*map(tl.constexpr, (M, N, max(16, triton.next_power_of_2(D)), precision, start, *flags)))


def task_of(q: Tensor, k: Tensor, problem: Problem, sizes: Tiles, form: str) -> Task:
    """The Task of a kernel of kernels/flash.py. form: of visit_lists()."""
    table, spans, blocks = None, problem.spans, problem.blocks
    if blocks is not None:  # otherwise the kernel computes which tiles it visits
        table = visit_lists(problem, sizes.BLOCK_M, sizes.BLOCK_N, form, q.device)
    at_most, local_m, local_n = problem.at_most, None, None
    if "local_mask" in problem.broken:  # all kernels count from the corner of the forward's tile
        at_most, (local_m, local_n) = None, tiles_for("forward", q, problem)[:2]
    values = problem._asdict() | {
        "H": q.shape[1], "G": q.shape[1] // k.shape[1], "at_least": problem.at_least, "at_most": at_most,
        "local_m": local_m, "local_n": local_n, "spans": None if spans is None else spans.contiguous(),
        "block_columns": 0 if blocks is None else blocks.shape[1], "scale2": problem.scale * math.log2(math.e),
        "visits": table, "visits_n": 0 if table is None else table.shape[1], "zero": 0.0,
        "threshold": problem.threshold, "keep_scale": problem.keep_scale,
    }  # fmt: skip
    return Task(*(values[name] for name in Task._fields))


def in_tiles(x: Tensor, rows: int) -> TensorDescriptor | Strided:
    """x (B, H, T, D) in the form in which a kernel loads and stores tiles of rows x BLOCK_D."""
    if not has_descriptors(x.device):
        return Strided(x, *x.stride()[:3], *x.shape[2:])
    return TensorDescriptor.from_tensor(x, [1, 1, rows, max(16, triton.next_power_of_2(x.shape[3]))])


def aligned(x: Tensor) -> Tensor:
    """x as a descriptor can read it: rows are contiguous and begin at multiples of 16 bytes. A view, or else a copy. An
    axis of size 1 may have any stride in torch; it gets 16."""
    strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    reads = x.stride(3) == 1 and all(step > 0 and step * x.itemsize % 16 == 0 for step in strides)
    return x.as_strided(x.shape, (*strides, 1)) if reads and x.data_ptr() % 16 == 0 else empty_heads(x).copy_(x)
