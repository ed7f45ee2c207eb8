"""FlashAttention, tiled or triton, as one op: autograd, a selective checkpoint and torch.compile each see one call.

    o, lse, lse2 = flash_attention(q, k, v, impl, block_m, block_n, *problem)

It saves q, k, v, o, lse2 and Problem's tensors for the backward. An op takes no Problem, so it takes the fields of one.
"""

import torch
from torch import Tensor

from kernels.problem import FIELDS, Problem, empty_gradients, empty_heads, in_parts
from model import tiled


def without_autocast(x: Tensor) -> torch.autocast:
    """Autocast would round float32 sums to bf16, and q, k and v have their dtype already."""
    return torch.autocast(x.device.type, enabled=False)


def forward(q, k, v, impl, block_m, block_n, *problem) -> tuple[Tensor, ...]:
    """o; lse; lse in base 2 for the backward, because converting it there would round it once more."""
    if impl == "tiled":
        with without_autocast(q):
            return tiled.forward(q, k, v, Problem(*problem), block_m, block_n)
    from kernels import launch  # here, because triton is made for Linux only

    return launch.forward(q, k, v, Problem(*problem))


def backward(q, k, v, o, lse2, do, dlse, impl, block_m, block_n, *problem) -> list[Tensor]:
    """dq, dk and dv; or (triton, if T = T_k) one tensor of all three, laid out as the model's qkv() returns them: then
    a compiled model does not concatenate them. in_parts() cuts it: an op may not return views. dlse: None if the loss
    does not use lse."""
    if impl == "tiled":
        with without_autocast(q):
            return tiled.backward(q, k, v, o, lse2, do, dlse, Problem(*problem), block_m, block_n)
    from kernels import launch

    return launch.backward(q, k, v, o, lse2, do, dlse, Problem(*problem))


OPTIONS = f"str impl, SymInt block_m, SymInt block_n, {FIELDS}"
# Not by custom_op(), whose first call imports torch._dynamo: 1.5 s.
torch.library.define("tilegpt::attention", f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor)")
OF_BACKWARD = "Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, Tensor do, Tensor? dlse"
torch.library.define("tilegpt::attention_backward", f"({OF_BACKWARD}, {OPTIONS}) -> Tensor[]")
torch.library.impl("tilegpt::attention", "default", forward)
torch.library.impl("tilegpt::attention_backward", "default", backward)
flash_attention, flash_backward = torch.ops.tilegpt.attention, torch.ops.tilegpt.attention_backward


@torch.library.register_fake("tilegpt::attention")
def fake_forward(q, k, v, *options):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return empty_heads(q), lse, torch.empty_like(lse)  # o (B, H, T, D), which lies in memory as (B, T, H, D)


@torch.library.register_fake("tilegpt::attention_backward")
def fake_backward(q, k, v, o, lse2, do, dlse, impl, *options):
    return empty_gradients(q, k) if impl == "triton" else [x.new_empty(x.shape) for x in (q, k, v)]


def keep_for_backward(ctx, inputs, output):
    q, k, v, *options = inputs
    o, _, lse2 = output
    ctx.mark_non_differentiable(lse2)
    ctx.set_materialize_grads(False)
    # Of Problem's fields spans, blocks, slopes and seed are tensors, which are saved as such.
    ctx.options = [None if isinstance(x, Tensor) else x for x in options]
    ctx.save_for_backward(q, k, v, o, lse2, *(x if isinstance(x, Tensor) else None for x in options))


def backward_of_op(ctx, do, dlse, _):
    if torch.is_grad_enabled():  # create_graph=True, in which dq, dk and dv would count as constants
        raise RuntimeError("tiled and triton have no second derivative; use attention=naive")
    q, k, v, o, lse2, *tensors = ctx.saved_tensors
    options = [x if saved is None else saved for x, saved in zip(ctx.options, tensors, strict=True)]
    do = torch.zeros_like(o) if do is None else do
    return *in_parts(flash_backward(q, k, v, o, lse2, do, dlse, *options), q, k), *[None] * len(options)


torch.library.register_autograd("tilegpt::attention", backward_of_op, setup_context=keep_for_backward)
