"""Calls the kernels of flash.py, hopper.py and hopper_backward.py: checks inputs, launches, registers the op for
torch.compile and its autograd.

    o, lse = flash_attention(q, k, v, Problem(T, T_k, scale=D**-0.5))

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The file reads top down. flash_attention checks its inputs, and calls either the op or Eager, which skips the op.
forward launches the forward_kernel of flash.py or, where it can, that of hopper.py. gradients launches dq_kernel and
then dkdv_kernel or, where it can, the kernels of hopper_backward.py. kernels/task.py turns a Problem
(kernels/problem.py) into the Task that the kernels of flash.py take.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kernels import sizes
from kernels.flash import dkdv_kernel, dq_kernel, forward_kernel
from kernels.problem import FIELDS, Problem, refuse_tangents
from kernels.sizes import Tiles, launch_with
from kernels.task import how_for, in_tiles, mask_of, task_for

# ---------------------------------------------------------------------------------------------------------------------
# The entry point.


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, autotune: bool = False, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """o = dropout(softmax(q k^T * scale + mask)) v, and the log-sum-exp of the scores; both have gradients.

    q (B, H, T, D); k, v (B, H_kv, T_k, D), float32, float16 or bfloat16, H a multiple of H_kv, D at most 256, any
    strides. A tensor is copied if its rows are not contiguous or do not begin at multiples of 16 bytes. float32
    products have full precision unless torch.set_float32_matmul_precision allows TF32.
    problem: what to compute.
    autotune: time several tile sizes at the first call of a kind, and keep the fastest. Two runs may choose different
    tiles, and then the last bits of their results differ.
    kernel: portable: flash.py's; hopper: hopper.py's forward, and hopper_backward.py's backward where it can; auto:
    hopper's where they can and are faster (hopper_lacks), else flash.py's.
    Returns o (B, H, T, D) like q, (B, T, H, D) in memory, and lse float32 (B, H, T), natural logarithm. A row that sees
    no key gives o = 0, lse = -inf and gradients 0.
    Raises ValueError for an unsupported dtype, head size or GPU, and for kernel="hopper" where that cannot compute it.
    Shapes and devices are not checked here; attention() in model/attention.py does that.
    """
    check(q, problem, autotune, kernel)
    o, lse, _ = (torch.ops.tilegpt.flash_forward if is_traced(q) else Eager.apply)(q, k, v, *problem, autotune, kernel)
    return o, lse


def flash_attention_of(
    qkv: Tensor, H: int, H_kv: int, problem: Problem, autotune: bool = False, kernel: str = "auto"
) -> Tensor:
    """o of flash_attention() for q, k and v that lie side by side: qkv (B, T, (H + 2 H_kv) D).

    The kernels write the gradient as one tensor, too. Those of q, k and v would have to be put together by a copy.
    """
    q, k, v = heads_of(qkv, H, H_kv)
    if not qkv.is_contiguous() or q.shape[-1] * q.itemsize % 16:  # a descriptor could not write it
        return flash_attention(q, k, v, problem, autotune, kernel)[0]
    check(q, problem, autotune, kernel)
    return SideBySide.apply(qkv, H, H_kv, is_traced(qkv), *problem, autotune, kernel)


def check(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> None:
    """Raises the ValueError of flash_attention()."""
    if (refused := refusal(q.dtype, q.shape[-1], q.device)) is not None:
        raise ValueError(refused)
    if autotune and "global_mask" in problem.without:
        raise ValueError("attention.autotune=true: break_it=local_mask means the tiles of the table; leave one out")
    if kernel == "hopper" and (refused := not_by_hopper(q, problem, autotune, kernel)):
        raise ValueError(f"attention.kernel=hopper: {refused}; use attention.kernel=auto")


def is_traced(x: Tensor) -> bool:
    """Whether the op must be called. That raises the host time of a forward and backward from 1.0 to 1.6 ms (LOG.md).

    So it is called only where something must see it: torch.compile, subclasses of Tensor, and dispatch modes such as
    FlopCounterMode. torch has no public function that tells whether a mode is active.
    """
    if torch.compiler.is_compiling():
        return True
    return type(x) not in (Tensor, Parameter) or _get_current_dispatch_mode() is not None


def heads_of(qkv: Tensor, H: int, H_kv: int) -> tuple[Tensor, ...]:
    """q (B, H, T, D); k, v (B, H_kv, T, D), views of qkv (B, T, (H + 2 H_kv) D)."""
    return qkv.unflatten(-1, (H + 2 * H_kv, -1)).transpose(1, 2).split((H, H_kv, H_kv), dim=1)


class Eager(torch.autograd.Function):
    """Skips the op: a forward and backward take 1.0 ms of host time instead of 1.6 (LOG.md)."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        keep_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        return output

    @staticmethod
    def backward(ctx, do, dlse, _):
        # With create_graph=True the gradients come from the op, which raises if they are differentiated.
        return backward(ctx, do, dlse, None, flash_backward if torch.is_grad_enabled() else gradients)


class SideBySide(torch.autograd.Function):
    """flash_attention_of(), with and without the ops."""

    @staticmethod
    def forward(ctx, qkv, H, H_kv, traced, *description):
        o, _, lse2 = (flash_forward if traced else forward)(*heads_of(qkv, H, H_kv), *description)
        ctx.heads, ctx.traced = (H, H_kv), traced
        keep(ctx, (qkv, o, lse2), description)
        return o

    @staticmethod
    def backward(ctx, do):
        refuse_tangents("triton", do)
        (qkv, o, lse2), description = kept(ctx, 3)
        # As in Eager: with create_graph=True the op, which raises if its result is differentiated.
        compute = backward_of if ctx.traced or torch.is_grad_enabled() else gradient_of
        return compute(qkv, o, lse2, do, *ctx.heads, *description), None, None, None, *[None] * len(description)


def refusal(dtype: torch.dtype, D: int, device: torch.device) -> str | None:
    """Why these kernels cannot run, in one line with a way out; None if they can."""
    if device.type != "cuda" and not sizes.INTERPRETED:
        return (
            f"attention.impl=triton: its kernels run on a GPU, not on {device.type}; use attention=tiled, or set "
            "TRITON_INTERPRET=1 to step through them, slowly, on a CPU"
        )
    if torch.version.hip:
        return "attention.impl=triton: made and tested for NVIDIA's GPUs, not for AMD's; use attention=sdpa or tiled"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        name = torch.cuda.get_device_name(device)
        return f"attention.impl=triton: wants Ampere or newer, not {name}; use attention=sdpa or attention=tiled"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"attention.impl=triton: has float32, float16 and bfloat16, not {dtype}; use attention=tiled"
    if D > 256:
        return f"attention.impl=triton: has head sizes of 256 at most, not {D}; use attention=tiled or more heads"
    if dtype == torch.float32 and D > 128 and sizes.shared_memory(device) < sizes.ROOMY:
        return (
            f"attention.impl=triton: float32 with head size {D} needs more shared memory than this GPU has; "
            "use dtype=bf16 or attention=tiled"
        )
    return None


def not_by_hopper(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> str:
    """Why the forward is left to flash.py, as the end of a message; empty if hopper.py computes it."""
    if autotune:
        return "attention.autotune=true tunes the portable kernels"
    wanted = problem.softcap, problem.slopes, problem.positions, problem.blocks
    if any(x is not None for x in wanted) or problem.without:
        return "it has no softcap, alibi, positions, block mask or break_it"
    narrow = problem.window is not None and problem.window < NARROW
    return hopper_lacks(q.dtype, q.shape[-1], q.device, kernel, problem.seed is not None and narrow)


def backward_not_by_hopper(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> str:
    """Why the backward is left to flash.py; empty if hopper_backward.py computes it."""
    if autotune:
        return "attention.autotune=true tunes the portable kernels"
    # Everything that is neither a length, the scale, the causal mask nor dropout.
    plain = problem._replace(T=0, T_k=0, scale=1.0, causal=True, block_size=64)
    if plain._replace(seed=None, drop_threshold=0, numbers=None) != Problem(0, 0):
        return "it has no window, documents, positions, block mask, softcap, alibi or break_it"
    return hopper_lacks(q.dtype, q.shape[-1], q.device, kernel)


NARROW = 512  # keys in a window


@cache
def hopper_lacks(dtype: torch.dtype, D: int, device: torch.device, kernel: str, narrow_dropout: bool = False) -> str:
    """Why hopper.py and hopper_backward.py do not compute attention of this dtype, head size and GPU; empty if they
    do. narrow_dropout: whether there is dropout in a window of fewer than NARROW keys."""
    if kernel == "portable":
        return "attention.kernel=portable"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"it runs on Hopper GPUs (sm_90), not on {name}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16, not {dtype}"
    if D not in (64, 128):
        return f"it has head sizes 64 and 128, not {D}"
    if kernel == "auto" and narrow_dropout:
        return f"it is slower with dropout in a window of fewer than {NARROW} keys; attention.kernel=hopper takes it"
    try:
        import kernels.hopper_backward  # noqa: F401  (Gluon's names change from one Triton to the next)
    except (ImportError, AttributeError) as error:
        return f"it wants Triton 3.6 to 3.9, not {triton.__version__} ({error})"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Launches.


def as_problem(description: Sequence[Any]) -> tuple[Problem, bool, str]:
    """The Problem, autotune and kernel of a call. An op of torch.library turns the tuple `without` into a list, which
    would make Problems unequal that are equal."""
    *fields, autotune, kernel = description
    problem = Problem(*fields)
    return problem._replace(without=tuple(problem.without)), autotune, kernel


def forward(q: Tensor, k: Tensor, v: Tensor, *description) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, lse, and lse in base 2 for the backward. Converting lse to base 2 there would round it, and that would
    scale all weights of a row by the same wrong factor. description: the fields of a Problem, autotune, kernel."""
    problem, autotune, kernel = as_problem(description)
    o, lse, lse2 = empty_results(q)
    if q.numel() == 0:
        return o, lse, lse2
    q, k, v = aligned(q), aligned(k), aligned(v)
    if not not_by_hopper(q, problem, autotune, kernel):
        from kernels.hopper import launch_forward  # imported here: other GPUs need no Gluon

        with on(q.device):
            launch_forward(q, k, v, o, lse, lse2, problem)
        return o, lse, lse2
    B, H, T, _ = q.shape
    mask = mask_of(problem, sizes.tiles_for("forward", q, problem.seed is not None)[:2])

    def launch(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        forward_kernel[(-(-T // M) * B * H,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), lse, lse2,
            task_for(problem, mask, q, k, tile), how_for(q, problem, tile), **tile.options(),
        )  # fmt: skip

    with on(q.device):
        launch_with("forward", launch, q, problem.seed is not None, autotune)
    return o, lse, lse2


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor, dlse: Tensor | None, *description
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. description: as in forward()."""
    found = like_heads(q), like_heads(k), like_heads(v)
    write_gradients(found, q, k, v, o, lse2, do, dlse, *description)
    return found


def gradient_of(qkv: Tensor, o: Tensor, lse2: Tensor, do: Tensor, H: int, H_kv: int, *description) -> Tensor:
    """gradients() side by side, like qkv (B, T, (H + 2 H_kv) D). description: as in forward()."""
    found = torch.empty_like(qkv)
    write_gradients(heads_of(found, H, H_kv), *heads_of(qkv, H, H_kv), o, lse2, do, None, *description)
    return found


def write_gradients(
    found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor,
    dlse: Tensor | None, *description,
) -> None:  # fmt: skip
    """Writes gradients() into the tensors `found`: dq, dk and dv, which a descriptor can write."""
    problem, autotune, kernel = as_problem(description)
    dq, dk, dv = found
    if q.numel() == 0:
        dk.zero_()
        dv.zero_()
        return
    q, k, v, o, do = (aligned(x) for x in (q, k, v, o, do))
    dlse = None if dlse is None else dlse.contiguous()
    if not backward_not_by_hopper(q, problem, autotune, kernel):
        from kernels.hopper_backward import launch_backward

        with on(q.device):
            launch_backward(q, k, v, o, lse2, do, dlse, found, problem)
        return
    (B, H, T, _), H_kv, T_k = q.shape, k.shape[1], k.shape[2]
    dropout = problem.seed is not None
    mask = mask_of(problem, sizes.tiles_for("forward", q, dropout)[:2])
    if problem.seed is not None and "same_seed" in problem.without:
        problem = problem._replace(seed=problem.seed + 1)
    # Each row's -lse2 and delta / keep_scale, next to each other so that one load reads both. Padded to whole tiles.
    padded = -(-T // 128) * 128
    row_terms = lse2.new_empty(B, H, padded, 2)

    def launch_dq(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        dq_kernel[(-(-T // M) * B * H,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), in_tiles(do, M), dlse, lse2, row_terms,
            in_tiles(dq, M), task_for(problem, mask, q, k, tile), padded, how_for(q, problem, tile), **tile.options(),
        )  # fmt: skip

    def launch_dkdv(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        dkdv_kernel[(-(-T_k // N) * B * H_kv,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(do, M), row_terms,
            in_tiles(dk, N), in_tiles(dv, N), task_for(problem, mask, q, k, tile, transposed=True), padded,
            how_for(q, problem, tile), **tile.options(),
        )  # fmt: skip

    with on(q.device):
        rows = launch_with("dq", launch_dq, q, dropout, autotune)
        # dq_kernel fills row_terms up to a multiple of its BLOCK_M, so dkdv_kernel's BLOCK_M must divide that
        launch_with("dkdv", launch_dkdv, q, dropout, autotune, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The op and its autograd. A Problem is passed as its fields.

INPUTS = f"{FIELDS}, bool autotune, str kernel"
RESULTS = "(Tensor, Tensor, Tensor)"
flash_forward = torch.library.custom_op(
    "tilegpt::flash_forward", forward, mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {INPUTS}) -> {RESULTS}"
)
flash_backward = torch.library.custom_op(
    "tilegpt::flash_backward",
    gradients,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, Tensor do, Tensor? dlse, "
    + f"{INPUTS}) -> {RESULTS}",
)
backward_of = torch.library.custom_op(
    "tilegpt::flash_backward_of",
    gradient_of,
    mutates_args=(),
    schema=f"(Tensor qkv, Tensor o, Tensor lse2, Tensor do, SymInt H, SymInt H_kv, {INPUTS}) -> Tensor",
)


@flash_forward.register_fake
def _(q, k, v, *description):
    return empty_results(q)


@flash_backward.register_fake
def _(q, k, v, *others):
    return like_heads(q), like_heads(k), like_heads(v)


backward_of.register_fake(lambda qkv, *others: torch.empty_like(qkv))


def keep_for_backward(ctx, inputs, output):
    """Saves q, k, v, o, lse2 and the description."""
    ctx.set_materialize_grads(False)
    q, k, v, *description = inputs
    o, _, lse2 = output
    keep(ctx, (q, k, v, o, lse2), description)


def keep(ctx, tensors, description):
    """Saves them for kept(). Tensors go through save_for_backward, so that autograd notices in-place changes and frees
    them."""
    ctx.description = [None if isinstance(x, Tensor) else x for x in description]
    ctx.save_for_backward(*tensors, *(x if isinstance(x, Tensor) else None for x in description))


def kept(ctx, n: int):
    """The n tensors and the description that keep() has saved."""
    saved = ctx.saved_tensors
    return saved[:n], [x if tensor is None else tensor for x, tensor in zip(ctx.description, saved[n:], strict=True)]


def backward(ctx, do, dlse, _, compute=flash_backward):
    """The gradients of forward()'s inputs, None for all but q, k and v. do or dlse is None if the loss does not use it.
    compute: the op, or the function that it calls."""
    refuse_tangents("triton", do, dlse)
    (q, k, v, o, lse2), description = kept(ctx, 5)
    do = torch.zeros_like(o) if do is None else do
    return *compute(q, k, v, o, lse2, do, dlse, *description), *[None] * len(description)


def refuse(ctx, *_):
    """The backward of the backwards. There is no second derivative, so it raises."""
    raise RuntimeError("attention=triton has no second derivative (create_graph=True); use attention=naive")


flash_forward.register_autograd(backward, setup_context=keep_for_backward)
flash_backward.register_autograd(refuse)
backward_of.register_autograd(refuse)


# ---------------------------------------------------------------------------------------------------------------------
# Memory and devices.


def empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """o like q, and lse and lse2 float32 (B, H, T), all uninitialised."""
    lse, lse2 = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return like_heads(q), lse, lse2


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
