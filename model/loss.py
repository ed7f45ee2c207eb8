"""Next-token loss that never holds a T x V table of logits.

Shapes: N tokens (B*T), C model width, V vocabulary.

With GPT-2's vocabulary the logits of 65,536 tokens are 13 GB in float32, and softmax and its gradient want as much
again: more than the rest of a small model. So the head and the cross-entropy run together over chunks of tokens, and
each chunk's gradient is taken in the forward, while its logits are still there. That costs nothing in time (the
products are the same three) and leaves CHUNK x V as the largest table. Keeping the chunk's logits for the backward
would bring the table back; computing them again there would cost a fourth product.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 8192  # tokens; 4,096 to 16,384 run at one speed on an H200
IGNORE = -1  # a target that does not count


def next_token_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the tokens whose target is not IGNORE.

    x (N, C), weight (V, C), both float; targets int64 (N,). Products run in autocast's dtype where it is on, softmax
    and sums in float32 (float64 for float64 inputs). Returns a scalar in nats; NaN where no target counts, as torch's.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if not torch.is_grad_enabled():  # inside the Function grad mode is always off, so it has to be asked here
        x, weight = x.detach(), weight.detach()
    with torch.autocast(device, enabled=False):
        return NextTokenLoss.apply(x.to(dtype), weight.to(dtype), targets)


class NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        want_x, want_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if want_x else None
        dweight = torch.zeros(weight.shape, dtype=sum_dtype, device=x.device) if want_weight else None
        total = torch.zeros((), dtype=sum_dtype, device=x.device)
        counted = targets != IGNORE
        count = counted.sum()

        for i in range(0, x.shape[0], CHUNK):
            x_i, counted_i = x[i : i + CHUNK], counted[i : i + CHUNK, None]
            target_i = targets[i : i + CHUNK, None].clamp(min=0)  # IGNORE may not be gathered with
            logits = (x_i @ weight.T).to(sum_dtype)  # (CHUNK, V)
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(-1, target_i)) * counted_i).sum()
            if not (want_x or want_weight):
                continue
            # d loss / d logits = (softmax - one at the target) / count
            dlogits = logits.sub_(lse).exp_()
            dlogits.scatter_add_(-1, target_i, -torch.ones_like(lse))
            dlogits = dlogits.mul_(counted_i.to(sum_dtype) / count).to(x.dtype)
            if want_x:
                dx[i : i + CHUNK] = dlogits @ weight
            if want_weight:
                dweight += dlogits.T @ x_i

        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dweight = ctx.saved_tensors
        return *(None if d is None else d * dloss.to(d.dtype) for d in (dx, dweight)), None
