"""Norms of the residual stream, together with what a layer adds to it.

Shapes: B batch, T sequence length, C model width.

    x, y = add_and_norm(norm, x, added)      x + added, and its norm

On a CPU this is an addition and a norm, and autograd makes the backward. On a GPU with Triton the backward is one
kernel (kernels/norm.py). The gradient of the sum arrives in two parts: along the stream, and through the norm. It goes
to x and, in another dtype, to the layer that was added. The kernel reads and writes each of these once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.problem import runs_kernels
from model.dropout import dropped, keep_scale

WIDEST = 8192  # C that the kernel can do


class RMSNorm(nn.RMSNorm):
    """Computes and returns in the weight's dtype, also where the residual stream has another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LayerNorm(nn.LayerNorm):
    """Computes and returns in the weight's dtype, also where the residual stream has another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


Norm = RMSNorm | LayerNorm


class Added(NamedTuple):
    """What a layer adds to the residual stream."""

    value: Tensor  # (B, T, C)
    keep: Tensor | None  # bool like value: what dropout keeps; None: no dropout
    dropout_p: float

    def to(self, x: Tensor) -> Tensor:
        """The stream x (B, T, C) with it."""
        return x + dropped(self.value, self.keep, self.dropout_p)


def add_and_norm(norm: Norm, x: Tensor, added: Added | None) -> tuple[Tensor, Tensor]:
    """The stream x + added, and its norm, both (B, T, C).

    The norm has its weight's dtype. Before the kernel's backward it has autocast's dtype, if autocast is on: the next
    layer would round it to that.
    """
    if not runs_kernel(norm, x):
        x = x if added is None else added.to(x)
        return x, norm(x)
    return by_function(norm, x, added, True)


def last_norm(norm: Norm, x: Tensor, added: Added | None) -> Tensor:
    """The second result of add_and_norm(), where nothing reads the stream any more."""
    if not runs_kernel(norm, x):
        return add_and_norm(norm, x, added)[1]
    return by_function(norm, x, added, False)


def runs_kernel(norm: Norm, x: Tensor) -> bool:
    """Whether kernels/norm.py can make the backward, and there will be one."""
    fits = x.shape[-1] <= WIDEST and torch.float64 not in (x.dtype, norm.weight.dtype)
    return runs_kernels(x.device) and torch.is_grad_enabled() and fits


def by_function(norm: Norm, x: Tensor, added: Added | None, stream: bool):
    """add_and_norm() with the kernel's backward; without `stream`, only the norm."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else norm.weight.dtype
    value, keep, dropout_p = (None, None, 0.0) if added is None else added
    layer = isinstance(norm, LayerNorm)
    with torch.autocast(device, enabled=False):
        return StreamNorm.apply(
            x, value, keep, dropout_p, norm.weight, norm.bias if layer else None, Form(layer, norm.eps, dtype), stream
        )


class Form(NamedTuple):
    """What a norm computes: layer norm or RMS norm, with this epsilon, rounded to this dtype."""

    layer: bool
    eps: float | None  # None is torch.nn.RMSNorm's own default; model.norm_eps is always a number
    dtype: torch.dtype


class StreamNorm(torch.autograd.Function):
    """The forward is plain torch, so that torch.compile makes one kernel of it and of what is around it. It also stores
    less: for autograd's backward the compiled one writes the normed rows too, and this one their mean and rstd."""

    @staticmethod
    def forward(ctx, x, value, keep, dropout_p, weight, bias, form, stream):
        x = x.view_as(x) if value is None else x + dropped(value, keep, dropout_p)
        # In float32, as torch's kernels compute it for weights of any dtype.
        wide, shape = cast(x, torch.float32), weight.shape
        if form.layer:
            wide_bias = None if bias is None else cast(bias, torch.float32)
            y, mean, rstd = torch.native_layer_norm(wide, shape, cast(weight, torch.float32), wide_bias, form.eps)
        else:
            y, mean = F.rms_norm(wide, shape, cast(weight, torch.float32), form.eps), None
            rstd = (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt()
        ctx.save_for_backward(x, mean, rstd, weight, keep)
        ctx.scale, ctx.bias, ctx.added = keep_scale(dropout_p), bias is not None, value is not None
        same = value is None or (keep is None and value.dtype == x.dtype)
        ctx.add_dtype = None if same else value.dtype  # None: dadd is dx, or not wanted
        y = cast(y, form.dtype)
        return (x, y) if stream else y

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        *dres, dy = gradients
        # torch.compile cannot look into the kernel, so it gets an op. Elsewhere the op would only cost its dispatch.
        compute = norm_op if torch.compiler.is_compiling() else by_kernel
        along = dres[0] if dres else None
        dx, dadd, dweight = compute(dy, along, ctx.saved_tensors, ctx.scale, ctx.add_dtype, ctx.bias)
        if ctx.add_dtype is None:
            dadd = dx if ctx.added else None
        return dx, dadd, None, None, dweight[0], dweight[1] if ctx.bias else None, None, None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), but not called where it would return x: torch.compile of PyTorch 2.11 loses the gradient of a result
    that has a second name in the forward."""
    return x if x.dtype == dtype else x.to(dtype)


def by_kernel(
    dy: Tensor, dres: Tensor | None, saved: Sequence[Tensor | None],
    scale: float, add_dtype: torch.dtype | None, bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from kernels.norm import norm_backward  # imported here: triton is not installed everywhere

    return norm_backward(dy, dres, saved, scale, add_dtype, bias)


def empty_results(dy, dres, saved, scale, add_dtype, bias):
    from kernels.norm import empty_gradients

    return empty_gradients(saved, add_dtype, bias)


norm_op = torch.library.custom_op("tilegpt::norm_backward", by_kernel, mutates_args=())
norm_op.register_fake(empty_results)
