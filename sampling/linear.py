"""A linear layer for a few rows in Triton, together with what stands before and after it.

    y = linear(x, layer, norm=norm, activation="gelu_tanh")      y = gelu(layer(norm(x)))
    x = linear(y, layer, add=x)                                  x = x + layer(y)
    model.next_logits(idx, cache.move(FUSED))                    a token of each sequence with these layers

Shapes: B rows, at most 16; K elements of a row, N elements of the result.
    x (B, K)    weight (N, K)    y (B, N); x and y may be (B, 1, K) and (B, 1, N)

In sampling a layer has one row for each sequence. Then reading the weights takes all of the time, and a kernel takes
1 to 3 us to begin and to end. So norm, bias, activation and residual have no kernels of their own.
A program reads some rows of the weight. Every program computes the norm of x again, which is little work. With one row
the product is a multiplication and a sum in float32. With more it is a matrix product, and x is rounded to the weight's
dtype, as torch does. Sums, norm, activation and residual are float32.

From Hopper on a program begins before the kernel ahead of it has ended. It loads what nobody writes (weights, biases,
and those of the norm), and then waits for x. So they are on their way while the GPU would stand still. Meanwhile the
programs of several kernels share a processor's registers. So with one row a program holds its weights in 16 bits, and
converts them after the wait.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from kernels import sizes
from kernels.flash import LOG2E, tanh
from kernels.launch import on, precision
from kernels.problem import order_keys
from model.layers import Layers
from model.norm import Norm

ROWS = 16  # B is at most this
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu2", "silu")
PROGRAMS = 264  # tile_for() lets at least so many run if it can: two for each processor of an H200
MOST = 528  # with one row no more programs than these: four for each processor, as many as run at a time
WIDE = 1024  # columns of ROWS rows for which a norm has the registers; of more it adds up a quarter of that at a time
SQRT_2_BY_PI, SQRT_HALF = tl.constexpr(math.sqrt(2 / math.pi)), tl.constexpr(math.sqrt(0.5))


def linear(
    x: Tensor,
    layer: nn.Linear,
    *,
    norm: nn.Module | None = None,
    activation: str = "none",
    gate: nn.Linear | None = None,
    add: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(layer(norm(x))); with gate, activation(gate(norm(x))) * layer(norm(x)); with add, that + add.

    x (B, K), contiguous, B at most ROWS, any float dtype. layer, gate: float32, float16 or bfloat16. norm: LayerNorm or
    RMSNorm. activation: of ACTIVATIONS. add (B, N), contiguous.
    Returns y (B, N) in `dtype`; None: that of the weights.
    """
    B, (N, K), weight = len(x), layer.weight.shape, layer.weight
    assert B <= ROWS, B
    assert activation in ACTIVATIONS, activation
    assert norm is None or isinstance(norm, (nn.LayerNorm, nn.RMSNorm)), norm
    y = x.new_empty(*x.shape[:-1], N, dtype=dtype or weight.dtype)
    BLOCK_N, BLOCK_K, num_warps = tile_for(B, K, N)
    tiles = triton.cdiv(N, BLOCK_N)
    programs = min(tiles, MOST) if B == 1 else tiles
    second = (None, None) if gate is None else (gate.weight, gate.bias)
    by = (None, None, 0.0) if norm is None else (norm.weight, getattr(norm, "bias", None), norm.eps)
    early = {"launch_pdl": True} if sizes.starts_early(x.device) else {}
    kind = "none" if norm is None else "rmsnorm" if isinstance(norm, nn.RMSNorm) else "layernorm"
    with on(x.device):
        linear_kernel[(programs,)](
            x, weight, layer.bias, *second, *by, add, y, B, N, K, kind, activation,
            triton.next_power_of_2(K) if B == 1 or K <= WIDE else WIDE // 4, BLOCK_N, BLOCK_K, 1 if B == 1 else ROWS,
            precision(weight.dtype), bool(early), programs < tiles,
            num_warps=num_warps, num_stages=2, **early,
        )  # fmt: skip
    return y


@cache
def tile_for(B: int, K: int, N: int) -> tuple[int, int, int]:
    """BLOCK_N, the outputs of a program; BLOCK_K, the elements of x that it takes in one step; and its warps.

    BLOCK_N is a power of 2 from 2 to 8, the largest that gives PROGRAMS programs. With several rows it is 16.
    """
    least, elements = (2, 16_384) if B == 1 else (16, 4096)  # a matrix product has at least 16
    BLOCK_N = min(8 if B == 1 else 16, max(least, triton.next_power_of_2(N // PROGRAMS + 1) // 2))
    BLOCK_K = min(elements // BLOCK_N, max(16, triton.next_power_of_2(K)))
    return BLOCK_N, BLOCK_K, 8 if BLOCK_N * BLOCK_K > 8192 else 4


# The functions of model.gpt.Layers, for one token of each sequence. The residual stream and the logits are float32.


def embed(embedding: nn.Embedding, positions: nn.Embedding | None, token: Tensor, at: Tensor) -> Tensor:
    """The embeddings of the tokens int64 (B, 1), with those of their positions at, int64 (B, 1), added: float32 (B, 1,
    C). Weights of any float dtype."""
    weight, of_position = embedding.weight, None if positions is None else positions.weight
    B, C = len(token), weight.shape[1]
    x = weight.new_empty(B, 1, C, dtype=torch.float32)
    with on(weight.device):
        embed_kernel[(B,)](token.contiguous(), weight, of_position, at, x, C, triton.next_power_of_2(C))
    return x


def read(
    norm: Norm, x: Tensor, added: None, layer: nn.Linear, gate: nn.Linear | None = None, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    return x, linear(x, layer, norm=norm, gate=gate, activation="silu" if gate is not None else activation)


def write(x: Tensor, layer: nn.Linear, y: Tensor, keep: None, dropout_p: float) -> tuple[Tensor, None]:
    return linear(y, layer, add=x, dtype=x.dtype), None


def logits(norm: Norm, x: Tensor, added: None, head: nn.Linear) -> Tensor:
    return linear(x, head, norm=norm, dtype=x.dtype)


FUSED = Layers(embed, read, write, logits)


@triton.jit
def embed_kernel(token, weight, positions, at, x, C, WIDTH: tl.constexpr):
    """One program: one sequence."""
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    row = tl.load(weight + tl.load(token + b) * C + i, mask=i < C, other=0.0).to(tl.float32)
    if positions is not None:
        row += tl.load(positions + tl.load(at + b) * C + i, mask=i < C, other=0.0).to(tl.float32)
    tl.store(x + b.to(tl.int64) * C + i, row, mask=i < C)


@triton.jit
def linear_kernel(
    x, weight, bias, gate, gate_bias, norm_weight, norm_bias, eps, add, y, B, N, K: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of every row, and then others if MORE. x (B, K), y and add (B, N)."""
    row, step = tl.arange(0, ROWS), tl.num_programs(0) * BLOCK_N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A thread has as many neighbours of a weight as of x. With twice as many, which are 16 bytes too, the weights would
    # have to change threads after the wait.
    LATE: tl.constexpr = EARLY and ROWS == 1
    NEAR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth if ROWS == 1 else BLOCK_K
    w = weights(weight, n, 0, N, K, BLOCK_K, NEAR)
    w_gate = w if gate is None else weights(gate, n, 0, N, K, BLOCK_K, NEAR)
    b, b_gate = of_columns(bias, n, N), of_columns(gate_bias, n, N)
    scale, shift = of_norm(norm_weight, norm_bias, 0, K, BLOCK_K, NEAR, LATE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel may begin
        tl.extra.cuda.gdc_wait()  # for all that the kernels ahead write

    mean, rstd = tl.zeros([ROWS], tl.float32), tl.full([ROWS], 1.0, tl.float32)
    if NORM != "none":
        squares = tl.zeros([ROWS], tl.float32)
        if NORM == "layernorm":
            for first in range(0, K, STEP):
                mean += tl.sum(columns(x, row, first, B, K, STEP), 1)
            mean /= K
        for first in range(0, K, STEP):
            known = (first + tl.arange(0, STEP) < K)[None, :]
            part = tl.where(known, columns(x, row, first, B, K, STEP) - mean[:, None], 0.0)
            squares += tl.sum(part * part, 1)
        rstd = 1 / tl.sqrt_rn(squares / K + eps)

    # Without MORE a single turn, and no loop: the compiler would move the weights' conversion to float32 out of a loop.
    for _ in range(tl.cdiv(N - tl.program_id(0) * BLOCK_N, step) if MORE else 1):
        at = row[:, None] * N + n[None, :]
        inside = (row < B)[:, None] & (n < N)[None, :]
        residual = tl.zeros([ROWS, BLOCK_N], tl.float32)
        if add is not None:  # asked for before the product, so that the product does not wait for it
            residual = tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
        acc, acc_gate = tl.zeros([ROWS, BLOCK_N], tl.float32), tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            x_k = columns(x, row, first, B, K, BLOCK_K)
            if NORM != "none":
                x_k = (x_k - mean[:, None]) * rstd[:, None] * wide(scale, LATE)[None, :] + wide(shift, LATE)[None, :]
            # The weights of the next step. After the last one those of the next outputs.
            last = first + BLOCK_K >= K
            of, k = tl.where(last, n + step, n), tl.where(last, 0, first + BLOCK_K)
            acc = add_product(acc, x_k, w, ROWS, PRECISION, LATE)
            if gate is not None:
                acc_gate = add_product(acc_gate, x_k, w_gate, ROWS, PRECISION, LATE)
            if MORE or K > BLOCK_K:
                w = weights(weight, of, k, N, K, BLOCK_K, NEAR)
                scale, shift = of_norm(norm_weight, norm_bias, k, K, BLOCK_K, NEAR, LATE)
                if gate is not None:
                    w_gate = weights(gate, of, k, N, K, BLOCK_K, NEAR)

        value = acc + b[None, :]
        if gate is not None:
            value *= activated(acc_gate + b_gate[None, :], ACTIVATION)
        else:
            value = activated(value, ACTIVATION)
        tl.store(y + at, (value + residual).to(y.dtype.element_ty), mask=inside)
        if MORE:
            n += step
            b, b_gate = of_columns(bias, n, N), of_columns(gate_bias, n, N)


@triton.jit
def columns(x, row, first, B, K: tl.constexpr, COUNT: tl.constexpr):
    """COUNT columns of x from `first` on, float32 (ROWS, COUNT). Zeros past its ends."""
    k = first + tl.arange(0, COUNT)[None, :]
    return tl.load(x + row[:, None] * K + k, mask=(row < B)[:, None] & (k < K), other=0.0).to(tl.float32)


@triton.jit
def weights(weight, n, first, N, K: tl.constexpr, BLOCK_K: tl.constexpr, NEAR: tl.constexpr):
    """The rows n of a weight from column `first` on, (BLOCK_N, BLOCK_K), NEAR neighbours in a thread. Zeros past its
    end."""
    k = first + tl.arange(0, BLOCK_K)
    at = tl.max_contiguous(n.to(tl.int64)[:, None] * K + k[None, :], [1, NEAR])
    return tl.load(weight + at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def add_product(acc, x, w, ROWS: tl.constexpr, PRECISION: tl.constexpr, LATE: tl.constexpr):
    """acc + x w^T, for x float32 (ROWS, BLOCK_K) and w (BLOCK_N, BLOCK_K)."""
    if ROWS == 1:
        acc += tl.sum(x * wide(w, LATE), 1)[None, :]
    else:
        acc = tl.dot(x.to(w.dtype), w.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def of_columns(vector, n, N):
    """The numbers n of a bias, float32. Zeros past its end, and without one."""
    found = tl.zeros(n.shape, tl.float32)
    if vector is not None:
        found = tl.load(vector + n, mask=n < N, other=0.0).to(tl.float32)
    return found


@triton.jit
def of_norm(weight, bias, first, K: tl.constexpr, BLOCK_K: tl.constexpr, NEAR: tl.constexpr, LATE: tl.constexpr):
    """A norm's weight and bias for BLOCK_K columns, (BLOCK_K,), in float32 if not LATE. Zeros for what it lacks."""
    k = first + tl.max_contiguous(tl.arange(0, BLOCK_K), NEAR)
    scale, shift = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32)
    if weight is not None:
        scale = tl.load(weight + k, mask=k < K, other=0.0)
        scale = scale if LATE else scale.to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + k, mask=k < K, other=0.0)
        shift = shift if LATE else shift.to(tl.float32)
    return scale, shift


@triton.jit
def wide(x, LATE: tl.constexpr):
    """x in float32. With LATE it is converted here and not before. The compiler would convert what is loaded before the
    wait there too, because it can, and then the weights take twice the registers. So x goes through an instruction that
    stays here."""
    if LATE:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=PACK)
    return x.to(tl.float32)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation, elementwise, float32."""
    if ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1 + tanh((x + 0.044715 * x * x * x) * SQRT_2_BY_PI))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * x
    elif ACTIVATION == "silu":
        x = x / (1 + tl.exp2(-x * LOG2E))
    return x


order_keys(globals())
