"""Next-token loss that never holds an N x V table of logits.

Shapes: N tokens (B*T), C model width, V vocabulary.

With GPT-2's vocabulary the float32 logits of 65,536 tokens take 13 GB, and softmax and its gradient need as much again.
That is more than the rest of a small model. So the head and the cross-entropy run together over chunks of tokens. Each
chunk's gradient is computed in the forward, while its logits are still in memory. This takes no extra time (there are
the same three products), and the largest table is CHUNK x V. Keeping each chunk's logits for the backward would bring
the whole table back. Computing them again there would cost a fourth product.

by_torch is the definition of what happens to a chunk's logits. On a GPU with Triton the kernel of kernels/loss.py does
the same without a float32 copy of them: it writes their gradient over them.

In fp16 the gradient of a mean over 65,536 tokens has entries of 1/65,536 and less, which would be rounded away. A
gradient scaler would come too late: its scale arrives with the backward. So the forward keeps the gradient of the sum,
with entries up to 1, and the backward multiplies it by scale / count in float32.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.problem import runs_kernels

CHUNK = 8192  # tokens; 4,096 to 16,384 are equally fast on an H200
KERNEL_CHUNK = 16_384  # tokens; the fastest on an H200, and in bf16 its logits take no more than CHUNK's in float32
IGNORE = -1  # tokens with this target do not count


def next_token_loss(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, symbols: int | None = None
) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the tokens with a target other than IGNORE.

    x (N, C), weight (V, C), both float; targets int64 (N,). Products run in autocast's dtype if it is on, softmax and
    sums in float32 (float64 for float64 inputs). Returns a scalar in nats; NaN if no target counts, as in torch.

    symbols: only the first so many rows of weight are tokens; None: all. The others are padding: the softmax is over
    the tokens alone, and their gradient is 0. The product has them, because it is faster with a round size.

    z_loss: PaLM's coefficient (arXiv 2204.02311, section 5; 1e-4 there) of the mean of lse^2. It pulls the logits'
    log-sum-exp to 0, so that the logits do not drift to values where bf16 is coarse. Only the gradient includes this
    term. The returned value is the cross-entropy alone, so logged losses of different runs can be compared.
    """
    dtype = product_dtype(x)
    if not torch.is_grad_enabled():  # checked here: inside the Function grad mode is always off
        x, weight = x.detach(), weight.detach()
    with torch.autocast(x.device.type, enabled=False):
        return NextTokenLoss.apply(x.to(dtype), weight.to(dtype), targets, z_loss, symbols or len(weight))


@torch.no_grad()
def loss_of_each(x: Tensor, weight: Tensor, targets: Tensor, symbols: int | None = None) -> tuple[Tensor, Tensor]:
    """-log softmax(x weight^T)[target] of every token, (N,), and whether its target has the largest logit, bool (N,).

    The arguments and dtypes are those of next_token_loss(), and so is the loss, in nats. A token with the target IGNORE
    has 0 and False. No gradient; at most CHUNK x V logits are held.
    """
    dtype = product_dtype(x)
    losses, right = [], []
    with torch.autocast(x.device.type, enabled=False):
        x, weight = x.to(dtype), weight.to(dtype)
        for x_i, targets_i in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            losses_i, logits = by_torch(x_i, weight, targets_i[:, None], 0.0, False, symbols or len(weight))
            losses.append(losses_i[:, 0])
            right.append(logits.argmax(-1) == targets_i)
    return torch.cat(losses), torch.cat(right)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the head's products: autocast's if it is on, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class NextTokenLoss(torch.autograd.Function):
    """next_token_loss() without autocast: x and weight already have the dtype of the products."""

    @staticmethod
    def forward(ctx, x, weight, targets, z_loss, symbols):
        want_x, want_weight = ctx.needs_input_grad[:2]
        kernel = has_loss_kernel(x)
        # torch.compile cannot look into the kernel, so it gets an op. Elsewhere the op would only cost its dispatch.
        sums = torch.ops.tilegpt.loss_sums if kernel and torch.compiler.is_compiling() else sums_in_chunks
        total, dx, dweight = sums(x, weight, targets, z_loss, want_x, want_weight, kernel, symbols)
        count = (targets != IGNORE).sum()
        # dweight stays in float32 until the backward divides it: the sum over all tokens may exceed fp16 too.
        ctx.save_for_backward(dx if want_x else None, dweight if want_weight else None, count)
        ctx.dtype = x.dtype
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
            dweight = (dweight * (factor / unit_of(ctx.dtype))).to(ctx.dtype)
        return dx, dweight, None, None, None


def has_loss_kernel(x: Tensor) -> bool:
    """Whether kernels/loss.py can do this."""
    return runs_kernels(x.device) and x.dtype != torch.float64


def unit_of(dtype: torch.dtype) -> float:
    """dweight sums over a chunk of up to 16,384 tokens, which exceeds fp16's 65,504 if x is above 4. So in fp16 x is
    made smaller by this power of two, which rounds nothing. The other dtypes have the range."""
    return 2.0**-7 if dtype == torch.float16 else 1.0


def sums_in_chunks(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    want_x: bool,
    want_weight: bool,
    kernel: bool,
    symbols: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, scalar; its gradients dx (N, C) like x and dweight (V, C), times unit_of(x.dtype).

    The sum and dweight are float32, or float64 with x. A gradient that is not wanted is empty.
    """
    total, dx, dweight = empty_sums(x, weight, targets, z_loss, want_x, want_weight, kernel, symbols)
    total.zero_()
    dweight.zero_()
    unit = unit_of(x.dtype)
    small_x = x if unit == 1.0 else x * unit
    chunk = KERNEL_CHUNK if kernel else CHUNK
    want_gradient = want_x or want_weight
    if kernel:
        from kernels.loss import loss_in_place  # imported here: triton is not installed everywhere

    for i in range(0, x.shape[0], chunk):
        x_i, small_x_i, targets_i = (part[i : i + chunk] for part in (x, small_x, targets))
        if kernel:
            dlogits = x_i @ weight.T  # (chunk, V), the logits still
            hide_padding(dlogits, symbols)
            losses = loss_in_place(dlogits, targets_i, IGNORE, z_loss, want_gradient)
        else:
            losses, dlogits = by_torch(x_i, weight, targets_i[:, None], z_loss, want_gradient, symbols)
        total += losses.sum()
        if want_x:
            torch.mm(dlogits, weight, out=dx[i : i + chunk])
        if want_weight and kernel and x.is_cuda:  # adds the product before it would be rounded to x's dtype
            torch.addmm(dweight, dlogits.T, small_x_i, out_dtype=dweight.dtype, out=dweight)
        elif want_weight:
            dweight += dlogits.T @ small_x_i
        del dlogits  # or it would be in memory beside the next chunk's
    return total, dx, dweight


def empty_sums(x, weight, targets, z_loss, want_x, want_weight, kernel, symbols) -> tuple[Tensor, Tensor, Tensor]:
    """What sums_in_chunks returns, uninitialised."""
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    dx = torch.empty_like(x) if want_x else x.new_empty(0)
    dweight = x.new_empty(weight.shape if want_weight else 0, dtype=sum_dtype)
    return x.new_empty((), dtype=sum_dtype), dx, dweight


sums_op = torch.library.custom_op("tilegpt::loss_sums", sums_in_chunks, mutates_args=())
sums_op.register_fake(empty_sums)


def hide_padding(logits: Tensor, symbols: int) -> None:
    """Sets the logits (n, V) of rows that are no tokens to -inf: their weight and their gradient are then exactly 0.
    Masking inside the kernel was slower (LOG.md)."""
    if symbols < logits.shape[-1]:
        logits[:, symbols:] = -torch.inf


def by_torch(
    x: Tensor, weight: Tensor, target: Tensor, z_loss: float, want_gradient: bool, symbols: int
) -> tuple[Tensor, Tensor]:
    """Losses (n, 1) of a chunk of n tokens, float32 (float64 with x), and the gradient of their sum with respect to the
    logits, (n, V) in x's dtype; without want_gradient the logits. target (n, 1)."""
    counted = target != IGNORE
    target = target.clamp(min=0)  # IGNORE is no index
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))  # (n, V)
    hide_padding(logits, symbols)
    lse = logits.logsumexp(-1, keepdim=True)
    losses = (lse - logits.gather(-1, target)) * counted
    if not want_gradient:
        return losses, logits
    # d sum / d logits = softmax (1 + 2 z_loss lse) - 1 at the target
    dlogits = logits.sub_(lse).exp_()
    if z_loss:
        dlogits.mul_(1 + 2 * z_loss * lse)
    if torch.compiler.is_compiling():  # a compiler makes one pass of this and the lines around it
        dlogits -= (torch.arange(weight.shape[0], device=x.device) == target).to(dlogits.dtype)
    else:  # without one, this writes one number a row and not all
        dlogits.scatter_add_(-1, target, -torch.ones_like(lse))
    return losses, dlogits.mul_(counted).to(x.dtype)
