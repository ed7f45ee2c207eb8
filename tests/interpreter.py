"""Triton's interpreter, corrected where it computes otherwise than a GPU does.

It keeps bfloat16 as unsigned integers: its matrix product multiplies those integers, and its conversion to bfloat16
truncates. It rounds a fused multiply-add twice, keeps denormal powers of two that a GPU flushes to 0, and its products
depend on the shape of the tile. Import this before kernels/: triton looks at TRITON_INTERPRET at each @triton.jit.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang


def wide(x: TensorHandle) -> np.ndarray:
    """The numbers of a handle, bfloat16 ones as float32."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """On a GPU an element of a product has the same bits in a tile of any shape; BLAS orders its sums by the shape."""
    product = np.matmul(wide(a).astype(np.float64), wide(b).astype(np.float64))
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def fma(self, x, y, z):
    """The product of two float32 is exact in float64, so that only the sum is rounded."""
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def exp2(self, x):
    """The GPU's instruction, ex2.approx.ftz, gives 0 for what is below the smallest normal number."""
    p = np.exp2(x.data)
    return TensorHandle(np.where(p < np.finfo(p.dtype).tiny, p.dtype.type(0), p), x.dtype.scalar)


def cast(self, x, dtype):
    """Between float32 and bfloat16: exact one way, rounded to even the other."""
    if x.dtype.scalar == tl.bfloat16 and dtype.scalar == tl.float32:
        return TensorHandle(wide(x), tl.float32)
    if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    return as_it_was(self, x, dtype)


def call(self, *args, **kwargs):
    """A function that a kernel calls. At each call Triton replaces the compiler's operations by the interpreter's: a
    third of all the time. The launch has done it for our own modules, and for Triton's once is enough."""
    if self.fn.__module__.startswith("triton.") and self.fn.__module__ not in in_place:
        _patch_lang(self.fn)
        in_place.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


in_place: set[str] = set()
InterpretedFunction.__call__ = call
as_it_was = InterpreterBuilder.cast_impl
InterpreterBuilder.cast_impl = cast
InterpreterBuilder.create_dot = dot
InterpreterBuilder.create_exp2 = exp2
InterpreterBuilder.create_fma = fma

from kernels import launch  # noqa: E402 (what it refuses is repaired here)

launch.DTYPES.append(torch.bfloat16)
