"""The choice of each sequence's next token from its logits, in Triton.

    made = choose(logits, draws, temperature)

Shapes: B sequences, V vocabulary, P parts of a vocabulary.
    logits, draws (B, V)    made (B + 1,)

Of the tokens with probabilities p and exponential draws d, the one with the largest p / d is a draw from p. In
logarithms that is the largest logit / temperature - ln(d), so no sum over the vocabulary is needed. PyTorch launches
ten kernels for it, and each takes longer to begin and to end than to read its numbers. Here are two: the best token of
each part of the vocabulary, and the best of these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sizes
from kernels.launch import on
from kernels.problem import order_keys

BLOCK = 1024  # tokens of a part


def choose(logits: Tensor, draws: Tensor | None, temperature: float, made: Tensor | None = None) -> Tensor:
    """The tokens of B sequences, int64, and after them 1 where one of them has no choice, else 0: (B + 1,).

    logits: float32 (B, V), contiguous. draws: exponential, float32 (B, V); None: the likeliest tokens are taken.
    temperature: above 0; without draws it does not matter. made: to be overwritten and returned.
    There is no choice from logits with NaN and, with draws, from those with inf or with -inf alone.
    """
    B, V = logits.shape
    P = triton.cdiv(V, BLOCK)
    parts = logits.new_empty(2, B, P)
    token = logits.new_empty(B, P, dtype=torch.int32)
    if made is None:
        made = logits.new_empty(B + 1, dtype=torch.int64)
    temperature = max(temperature, 1e-30)
    early = {"launch_pdl": True} if sizes.starts_early(logits.device) else {}
    with on(logits.device):
        best_kernel[(P, B)](logits, draws, *parts, token, V, temperature, BLOCK, bool(early), **early)
        merge_kernel[(1,)](
            *parts, token, made, B, P, temperature, triton.next_power_of_2(P), draws is not None, bool(early),
            num_warps=1, **early,
        )  # fmt: skip
    return made


@triton.jit
def best_kernel(logits, draws, most_of, best_of, token_of, V, temperature, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (part, b). most_of (B, P): the largest logit, NaN if there is one. best_of (B, P): the largest of
    (logit - most) / temperature - ln(draw), and token_of (B, P) its token."""
    part, b = tl.program_id(0), tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = part * BLOCK + tl.arange(0, BLOCK)
    at = b.to(tl.int64) * V + i
    x = tl.load(logits + at, mask=i < V, other=-float("inf"))
    most = tl.max(x, 0)
    # Less the largest: a tiny temperature sends the others to -inf and none to inf.
    z = tl.where(x == most, 0.0, (x - most) / temperature)
    if draws is not None:
        z -= tl.log(tl.load(draws + at, mask=i < V, other=1.0))
    # max() over NaN returns an arbitrary index. The next token runs before the host knows of the NaN.
    best, token = tl.max(tl.where((i < V) & (z == z), z, -float("inf")), 0, return_indices=True)
    mine = b * tl.num_programs(0) + part
    spoilt = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(most_of + mine, tl.where(spoilt, float("nan"), most))
    tl.store(best_of + mine, best)
    tl.store(token_of + mine, part * BLOCK + token)


@triton.jit
def merge_kernel(most_of, best_of, token_of, made, B, P, temperature, WIDTH: tl.constexpr, DRAWN: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    """made (B + 1,) as choose() returns it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, WIDTH)
    spoilt = 0
    for b in range(B):
        most_i = tl.load(most_of + b * P + i, mask=i < P, other=-float("inf"))
        z = tl.load(best_of + b * P + i, mask=i < P, other=-float("inf"))
        most = tl.max(most_i, 0)
        z += tl.where(most_i == most, 0.0, (most_i - most) / temperature)
        _, part = tl.max(tl.where((i < P) & (z == z), z, -float("inf")), 0, return_indices=True)
        tl.store(made + b, tl.load(token_of + b * P + part))
        none = tl.max((most_i != most_i).to(tl.int32), 0) > 0
        if DRAWN:
            none |= (most == float("inf")) | (most == -float("inf"))
        spoilt |= none.to(tl.int32)
    tl.store(made + B, spoilt)


order_keys(globals())
