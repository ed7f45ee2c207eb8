"""Cross-entropy of a table of logits in Triton; the gradient is written over the logits. Needs Ampere or a newer GPU.

model/loss.py has the same in plain PyTorch (by_torch), which makes a float32 copy of the logits and passes over it
several times. Here one program does one row, in two passes:

    1. m, the running maximum, and l, the running sum of exp(logit - m)
    2. the row again: its gradient, rounded once, at the place of each logit

The second pass is meant to read from the L2 cache, which depends on how many programs run at a time. It goes backwards,
because what pass 1 read last is the most likely to be still there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash import LOG2E

LARGE = tl.constexpr(2.0**126)  # beyond any logit of a training, and still finite times LOG2E


def loss_in_place(logits: Tensor, targets: Tensor, ignore: int, want_gradient: bool) -> Tensor:
    """-log softmax(logits)[target] of each row, float32 (N,); 0 where the target is `ignore`, NaN if it is no column.

    N tokens, V vocabulary. logits (N, V), contiguous, float32, float16 or bfloat16; targets int64 (N,). With
    want_gradient, logits is overwritten by the gradient of the losses' sum, which is 0 in rows to ignore."""
    assert logits.is_contiguous()
    N, V = logits.shape
    losses = logits.new_empty(N, dtype=torch.float32)
    # A thread has 16 logits: in 16 bits two loads of 16 bytes. Where 16 divides V a thread takes at most 64 registers,
    # so two programs of 16 warps share a processor. On an H200 these have 264 rows at a time, 27 MB with GPT-2's
    # padded vocabulary, and L2 has 50. Other blocks and warps were at most 2 % faster.
    BLOCK = min(8192, max(32, triton.next_power_of_2(V)))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        loss_kernel[(N,)](logits, targets, losses, V, ignore, want_gradient, BLOCK, num_warps=max(1, BLOCK // 512))
    return losses


@triton.jit
def loss_kernel(logits, targets, losses, V, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One row: losses[row], and with GRADIENT the row's gradient in place of its logits."""
    row = tl.program_id(0).to(tl.int64)  # row * V may exceed 2**31
    logits += row * V
    target = tl.load(targets + row)
    counted = (target != IGNORE).to(tl.float32)
    target = tl.where(target == IGNORE, 0, target)
    # Read before pass 2 writes over it. A target that is no column must not read another row's memory.
    at_target = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)

    # m stays finite. So a logit of -inf has weight exp2(-inf) = 0, and one of inf makes the loss inf or NaN.
    m = -LARGE
    l = tl.zeros([BLOCK], tl.float32)  # a sum for each place of a block: they are added up once, at the end
    column = tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK, num_stages=3):  # two blocks are on their way while one is summed
        x = tl.load(logits + start + column, mask=start + column < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.minimum(tl.max(x, 0), LARGE))
        l = l * tl.exp2((m - m_new) * LOG2E) + tl.exp2((x - m_new) * LOG2E)
        m = m_new
    l = tl.sum(l, 0)
    # lse - at_target, with lse = m + log(l). at_target - m is exact where it matters; lse of large logits is rounded.
    tl.store(losses + row, (tl.log(l) + (m - at_target)) * counted)

    if GRADIENT:
        factor = counted / l
        blocks = tl.cdiv(V, BLOCK)
        for i in range(blocks):
            j = (blocks - 1 - i) * BLOCK + column
            x = tl.load(logits + j, mask=j < V, other=-float("inf")).to(tl.float32)
            gradient = tl.exp2((x - m) * LOG2E) * factor - tl.where(j == target, counted, 0.0)  # softmax, less 1 there
            # The gradient is read only after the whole table is written. So L2 is left to logits of pass 1.
            tl.store(logits + j, gradient.to(logits.dtype.element_ty), mask=j < V, eviction_policy="evict_first")
