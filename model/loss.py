"""Next-token loss that never holds an N x V table of logits.

Shapes: N tokens (B*T), C model width, V vocabulary.

With GPT-2's vocabulary the float32 logits of 65,536 tokens take 13 GB, and softmax and its gradient need as much again.
So the head and the cross-entropy run together over chunks of tokens, and each chunk's gradient is computed in the
forward, while its logits are still in memory. This takes no extra time: there are the same three products.

by_torch is the definition of what happens to a chunk's logits. On a GPU the kernel of kernels/loss.py does it in place.

In fp16 the gradient of a mean over 65,536 tokens has entries of 1/65,536 and less, which would be rounded away. A
gradient scaler would come too late: its scale arrives with the backward. So the forward keeps the gradient of the sum,
with entries up to 1, and the backward multiplies it by scale / count in float32.
"""

import torch
from torch import Tensor

from kernels.problem import runs_kernels

CHUNK = 8192  # tokens at most
LOGITS = 2**22  # on a CPU a chunk of over 1,024 tokens has no more: larger ones are slower (docs/findings.md, 62)
KERNEL_CHUNK = 16_384  # tokens; the fastest on an H200, and in bf16 its logits take no more than CHUNK's in float32
IGNORE = -1  # tokens with this target do not count


def next_token_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the tokens with a target other than IGNORE.

    x (N, C), weight (V, C), both float; targets int64 (N,). Products run in autocast's dtype if it is on, softmax and
    sums in float32 (float64 for float64 inputs). Returns a scalar in nats; NaN if no target counts, as in torch."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if not torch.is_grad_enabled():  # checked here: inside the Function grad mode is always off
        x, weight = x.detach(), weight.detach()
    with torch.autocast(device, enabled=False):
        return NextTokenLoss.apply(x.to(dtype), weight.to(dtype), targets)


class NextTokenLoss(torch.autograd.Function):
    """next_token_loss() without autocast: x and weight already have the dtype of the products."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        want_x, want_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        # dweight sums over a chunk of up to 16,384 tokens, which exceeds fp16's 65,504 if x is above 4. So in fp16 x is
        # made smaller by this power of two, which rounds nothing. The other dtypes have the range.
        unit = 2.0**-7 if x.dtype == torch.float16 else 1.0
        total = x.new_zeros((), dtype=wide)
        dx = torch.empty_like(x) if want_x else None
        dweight = x.new_zeros(weight.shape, dtype=wide) if want_weight else None
        kernel = runs_kernels(x.device) and x.dtype != torch.float64
        if kernel:
            from kernels.loss import loss_in_place  # imported here: triton is not installed everywhere
        few = max(1024, LOGITS // len(weight)) if x.device.type == "cpu" else CHUNK
        chunk = KERNEL_CHUNK if kernel else min(CHUNK, few)
        for i in range(0, len(x), chunk):
            x_i, targets_i = x[i : i + chunk], targets[i : i + chunk]
            dlogits = x_i @ weight.T  # (chunk, V), the logits still
            if kernel:
                losses = loss_in_place(dlogits, targets_i, IGNORE, want_x or want_weight)
            else:
                losses, dlogits = by_torch(dlogits, targets_i[:, None], want_x or want_weight)
            total += losses.sum()
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[i : i + chunk])
            small_x_i = x_i if unit == 1.0 else x_i * unit
            if dweight is not None and x.is_cuda and x.dtype != wide:  # adds before the product would be rounded
                torch.addmm(dweight, dlogits.T, small_x_i, out_dtype=wide, out=dweight)
            elif dweight is not None:
                dweight += dlogits.T @ small_x_i
            del dlogits  # or it would be in memory beside the next chunk's
        count = (targets != IGNORE).sum()
        # dweight stays in float32 until the backward divides it: the sum over all tokens may exceed fp16 too.
        ctx.save_for_backward(dx, dweight, count)
        ctx.dtype, ctx.unit = x.dtype, unit
        return total / count

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():  # create_graph=True, in which dx and dweight would count as constants
            raise RuntimeError("next_token_loss has no second derivative; use F.cross_entropy")
        dx, dweight, count = ctx.saved_tensors
        # factor has two dimensions, because torch rounds a scalar to dx's dtype first, and a scale of 65,536 is inf in
        # fp16. out= rounds the float32 product as it is written, without a float32 copy of dx.
        factor = (dloss / count).view(1, 1)
        if dx is not None:
            dx = torch.mul(dx, factor, out=torch.empty_like(dx))
        if dweight is not None:
            dweight = (dweight * (factor / ctx.unit)).to(ctx.dtype)
        return dx, dweight, None


def by_torch(logits: Tensor, target: Tensor, want_gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses (n, 1) of a chunk of n tokens, float32 (float64 with the logits), and the gradient of their sum for the
    logits (n, V), in their dtype; without want_gradient the logits. target (n, 1)."""
    dtype, counted = logits.dtype, target != IGNORE
    target = target.clamp(min=0)  # IGNORE is no index
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(dtype, torch.float32))
    losses = -log_p.gather(-1, target) * counted
    if not want_gradient:
        return losses, logits
    dlogits = log_p.exp_()  # d sum / d logits = softmax - 1 at the target
    dlogits.scatter_add_(-1, target, -torch.ones_like(losses))
    return losses, dlogits.mul_(counted).to(dtype)
