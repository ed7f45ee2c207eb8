"""The entry point of the triton implementation: checks a call, and makes its result a part of autograd's graph, alone
or as an op of torch.library.

    o, lse = flash_attention(q, k, v, Problem.of(T, T_k, scale=D**-0.5))

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)    qkv (B, T, (H + 2 H_kv) D)

A call goes through Flash. Where something must see an op (is_traced), it goes through the op, with the same forward and
backward, which call those of kernels/launch.py. A Problem is passed to an op as its fields. (Flash with an op inside it
would not do: with torch.compile, a checkpoint does not compute it again.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kernels import hopper, launch, sizes
from kernels.problem import FIELDS, NOTHING, Problem, refuse_tangents


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, autotune: bool = False, kernel: str = "auto",
    qkv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o = dropout(softmax(q k^T * scale + mask)) v, and the log-sum-exp of the scores; both have gradients.

    q (B, H, T, D); k, v (B, H_kv, T_k, D), float32, float16 or bfloat16, H a multiple of H_kv, D at most 256, any
    strides. A tensor is copied if its rows are not contiguous or do not begin at multiples of 16 bytes. float32
    products have full precision unless torch.set_float32_matmul_precision allows TF32.
    problem: what to compute.
    autotune: time several tile sizes at the first call of a kind, and keep the fastest. Two runs may choose different
    tiles, and then the last bits of their results differ.
    kernel: portable: those of kernels/flash.py; hopper: the forward of kernels/hopper/, and its backward where it can;
    auto: those of kernels/hopper/ where they can and are faster (hopper.lacks), else those of kernels/flash.py.
    qkv: of which q, k and v are views, side by side. The kernels then write its gradient, as one tensor. Those of q, k
    and v would have to be put together by a copy.
    Returns o (B, H, T, D) like q, (B, T, H, D) in memory, and lse float32 (B, H, T), natural logarithm. A row that sees
    no key gives o = 0, lse = -inf and gradients 0.
    Raises ValueError for an unsupported dtype, head size or GPU, and for kernel="hopper" where that cannot compute it.
    Shapes and devices are not checked here; attention() in model/attention.py does that.
    """
    if problem.cache is None or ("checked", autotune, kernel) not in problem.cache:
        check(q, problem, autotune, kernel)
    one = qkv is not None and qkv.is_contiguous() and q.shape[-1] * q.itemsize % 16 == 0  # a descriptor can write it
    inputs, heads = [qkv] if one else [q, k, v], (q.shape[1], k.shape[1])
    if is_traced(q):
        o, lse, _ = flash_forward(inputs, heads, *problem.fields, autotune, kernel)
    else:
        o, lse, _ = Flash.apply(problem, autotune, kernel, heads, *inputs)
    return o, lse


def check(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> None:
    """Raises the ValueError of flash_attention(), and notes the kinds of calls for which there is none."""
    if refused := refusal(q.dtype, q.shape[-1], q.device):
        raise ValueError(refused)
    if autotune and "local_mask" in problem.broken:
        raise ValueError("attention.autotune=true: break_it=local_mask means the tiles of the table; leave one out")
    if kernel == "hopper" and (refused := hopper.why_not("forward", q, problem, autotune, kernel)):
        raise ValueError(f"attention.kernel=hopper: {refused}; use attention.kernel=auto")
    if problem.cache is not None:
        problem.cache["checked", autotune, kernel] = True


class Flash(torch.autograd.Function):
    """launch.forward() and backward() below, called directly. The ops have the same autograd. inputs: q, k and v, or
    qkv alone."""

    @staticmethod
    def forward(ctx, problem, autotune, kernel, heads, *inputs):
        o, lse, lse2 = launch.forward(*heads_of(inputs, heads), problem, autotune, kernel)
        ctx.mark_non_differentiable(lse2)
        keep_for_backward(ctx, inputs, o, lse2, problem, (autotune, kernel, heads))
        return o, lse, lse2

    @staticmethod
    def backward(ctx, do, dlse, _):
        return None, None, None, None, *backward(ctx, do, dlse)


def keep_for_backward(ctx, inputs: Sequence[Tensor], o: Tensor, lse2: Tensor, problem: Problem, others: tuple) -> None:
    """Saves the tensors, also those of the problem: then autograd notices in-place changes and frees them."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(o, lse2, *problem.tensors, *inputs)
    ctx.description = problem.having(), *others


def backward(ctx, do: Tensor | None, dlse: Tensor | None) -> list[Tensor]:
    """The gradients of `inputs`, which computes the weights again. do or dlse is None if the loss does not use it."""
    refuse_tangents("triton", do, dlse)
    saved = ctx.saved_tensors  # read once: with activation checkpointing a second read fails
    o, lse2, *rest = saved
    tensors, inputs = rest[: len(NOTHING)], rest[len(NOTHING) :]
    problem, autotune, kernel, heads = ctx.description
    problem = problem.having(tensors)
    do = torch.zeros_like(o) if do is None else do
    if is_traced(do) or torch.is_grad_enabled():  # with create_graph=True the op raises if they are differentiated
        return flash_backward(inputs, heads, o, lse2, do, dlse, *problem.fields, autotune, kernel)
    return gradients(inputs, heads, o, lse2, do, dlse, problem, autotune, kernel)


def is_traced(x: Tensor) -> bool:
    """Whether the op must be called. That raises the host time of a forward and backward from 1.0 to 1.6 ms (LOG.md).

    So it is called only where something must see it: torch.compile, subclasses of Tensor, and dispatch modes such as
    FlopCounterMode. torch has no public function that tells whether a mode is active.
    """
    if torch.compiler.is_compiling():
        return True
    return type(x) not in (Tensor, Parameter) or _get_current_dispatch_mode() is not None


def heads_of(inputs: Sequence[Tensor], heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D); k, v (B, H_kv, T, D), which are the inputs or views of the only one, (B, T, (H + 2 H_kv) D)."""
    H, H_kv = heads
    if len(inputs) == 1:
        inputs = inputs[0].unflatten(-1, (H + 2 * H_kv, -1)).transpose(1, 2).split((H, H_kv, H_kv), dim=1)
    q, k, v = inputs
    return q, k, v


def gradients(
    inputs: Sequence[Tensor], heads: Sequence[int], o: Tensor, lse2: Tensor, do: Tensor, dlse: Tensor | None,
    problem: Problem, autotune: bool, kernel: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k and v, or of qkv."""
    found = [torch.empty_like(inputs[0])] if len(inputs) == 1 else []
    into = heads_of(found, heads) if found else ()
    made = launch.gradients(*heads_of(inputs, heads), o, lse2, do, dlse, problem, autotune, kernel, into)
    return found or list(made)


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


# ---------------------------------------------------------------------------------------------------------------------
# The ops.


def of_op(*description) -> tuple[Problem, bool, str]:
    """What an op gets: the fields of a Problem, autotune and kernel."""
    *fields, autotune, kernel = description
    return Problem.from_fields(*fields), autotune, kernel


INPUTS = f"{FIELDS}, bool autotune, str kernel"
flash_forward = torch.library.custom_op(
    "tilegpt::flash_forward",
    lambda inputs, heads, *description: launch.forward(*heads_of(inputs, heads), *of_op(*description)),
    mutates_args=(),
    schema=f"(Tensor[] inputs, SymInt[] heads, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)
flash_backward = torch.library.custom_op(
    "tilegpt::flash_backward",
    lambda inputs, heads, o, lse2, do, dlse, *description: gradients(
        inputs, heads, o, lse2, do, dlse, *of_op(*description)
    ),
    mutates_args=(),
    schema=f"(Tensor[] inputs, SymInt[] heads, Tensor o, Tensor lse2, Tensor do, Tensor? dlse, {INPUTS}) -> Tensor[]",
)


@flash_forward.register_fake
def _(inputs, heads, *description):
    q = heads_of(inputs, heads)[0]
    return launch.like_heads(q), *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))


@flash_backward.register_fake
def _(inputs, *others):
    return [launch.like_heads(x) for x in inputs] if len(inputs) == 3 else [torch.empty_like(inputs[0])]


@flash_backward.register_autograd
def refuse(ctx, *_):
    """There is no second derivative."""
    raise RuntimeError("attention=triton has no second derivative (create_graph=True); use attention=naive")


def save(ctx, inputs, output):
    """keep_for_backward(), for the op."""
    tensors, heads, *description = inputs
    problem, *others = of_op(*description)
    keep_for_backward(ctx, tensors, output[0], output[2], problem, (*others, heads))
    ctx.nones = [[] if x == [] else None for x in inputs[1:]]  # torch takes an empty list for one of tensors


def of_inputs(ctx, do, dlse, _):
    """backward(), for the op: None for all its arguments but the first."""
    return backward(ctx, do, dlse), *ctx.nones


flash_forward.register_autograd(of_inputs, setup_context=save)
