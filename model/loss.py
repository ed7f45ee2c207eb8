"""Next-token loss that never holds an N x V table of logits.

Shapes: N tokens (B*T), C model width, V vocabulary.

With GPT-2's vocabulary the float32 logits of 65,536 tokens take 13 GB, and softmax and its gradient need as much again.
That is more than the rest of a small model. So the head and the cross-entropy run together over chunks of tokens. Each
chunk's gradient is computed in the forward, while its logits are still in memory. This takes no extra time (there are
the same three products), and the largest table is CHUNK x V. Keeping each chunk's logits for the backward would bring
the whole table back. Computing them again there would cost a fourth product.

In fp16 the gradient of a mean over 65,536 tokens has entries of 1/65,536 and less, which would be rounded away. A
gradient scaler would come too late: its scale arrives with the backward. So the forward keeps the gradient of the sum,
with entries up to 1, and the backward multiplies it by scale / count in float32.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 8192  # tokens; 4,096 to 16,384 are equally fast on an H200
IGNORE = -1  # tokens with this target do not count


def next_token_loss(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the tokens with a target other than IGNORE.

    x (N, C), weight (V, C), both float; targets int64 (N,). Products run in autocast's dtype if it is on, softmax and
    sums in float32 (float64 for float64 inputs). Returns a scalar in nats; NaN if no target counts, as in torch.

    z_loss: PaLM's coefficient (arXiv 2204.02311, section 5; 1e-4 there) of the mean of lse^2. It pulls the logits'
    log-sum-exp to 0, so that the logits do not drift to values where bf16 is coarse. Only the gradient includes this
    term. The returned value is the cross-entropy alone, so logged losses of different runs can be compared.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if not torch.is_grad_enabled():  # checked here: inside the Function grad mode is always off
        x, weight = x.detach(), weight.detach()
    with torch.autocast(device, enabled=False):
        return NextTokenLoss.apply(x.to(dtype), weight.to(dtype), targets, z_loss)


class NextTokenLoss(torch.autograd.Function):
    """next_token_loss() without autocast: x and weight already have the dtype of the products."""

    @staticmethod
    def forward(ctx, x, weight, targets, z_loss):
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        # dweight sums over a chunk of 8,192 tokens, which exceeds fp16's 65,504 if x is above 8. So in fp16 x is made
        # smaller by a power of two, which rounds nothing. The other dtypes have the range.
        unit = 2.0**-7 if x.dtype == torch.float16 else 1.0
        small_x = x if unit == 1.0 else x * unit
        want_x, want_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if want_x else None
        dweight = torch.zeros(weight.shape, dtype=sum_dtype, device=x.device) if want_weight else None
        total = torch.zeros((), dtype=sum_dtype, device=x.device)
        counted = targets != IGNORE
        count = counted.sum()

        for i in range(0, x.shape[0], CHUNK):
            x_i, small_x_i, counted_i = (part[i : i + CHUNK] for part in (x, small_x, counted[:, None]))
            target_i = targets[i : i + CHUNK, None].clamp(min=0)  # IGNORE is no index
            logits = (x_i @ weight.T).to(sum_dtype)  # (CHUNK, V)
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(-1, target_i)) * counted_i).sum()
            if not (want_x or want_weight):
                continue
            # d sum / d logits = softmax (1 + 2 z_loss lse) - 1 at the target
            dlogits = logits.sub_(lse).exp_()
            if z_loss:
                dlogits.mul_(1 + 2 * z_loss * lse)
            dlogits.scatter_add_(-1, target_i, -torch.ones_like(lse))
            dlogits = dlogits.mul_(counted_i).to(x.dtype)
            if dx is not None:
                dx[i : i + CHUNK] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.T @ small_x_i

        # dweight stays in sum_dtype until the backward divides it: the sum over all tokens may exceed fp16 too.
        ctx.save_for_backward(dx, dweight, count)
        ctx.unit, ctx.dtype = unit, x.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dweight, count = ctx.saved_tensors
        # factor has two dimensions, because torch rounds a scalar to dx's dtype first, and a scale of 65,536 is inf in
        # fp16. out= rounds the float32 product as it is written, without a float32 copy of dx.
        factor = (dloss / count).view(1, 1)
        if dx is not None:
            dx = torch.mul(dx, factor, out=torch.empty_like(dx))
        if dweight is not None:
            dweight = (dweight * (factor / ctx.unit)).to(ctx.dtype)
        return dx, dweight, None, None
