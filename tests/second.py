"""Ways of asking attention for a second derivative: of each, the gradient of a gradient of q, k or v (B, H, T, D)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional, grad
from torch.utils.checkpoint import checkpoint

from model.attention import AttentionConfig, attention

# Before 2.13 PyTorch lost a second derivative through any compiled function without a word, if the function saved no
# input that needs a gradient (pytorch/pytorch#181581).
REFUSED_BY_PYTORCH = torch.__version__ >= (2, 13)
# The second where the compiled backward writes into what it was handed, which depends on what was compiled before.
PYTORCH_REFUSES = "does not currently support double backward|donated buffers which requires create_graph=False"


def first(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, loss=Tensor.sum) -> tuple[Tensor, ...]:
    """dq, dk and dv that were asked for with a graph."""
    return grad(loss(attention(q, k, v, config)), (q, k, v), create_graph=True)


def of_a_sum(config: AttentionConfig, *qkv: Tensor) -> None:
    grad(first(config, *qkv)[0].sum(), qkv[0])


def by_backward(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    attention(q, k, v, config).sum().backward(create_graph=True)
    q.grad.sum().backward()


def by_lse(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    (dk,) = grad(attention(q, k, v, config, return_lse=True)[1].sum(), k, create_graph=True)
    grad(dk.sum(), q)


def with_respect_to_do(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    do = torch.ones_like(q, requires_grad=True)
    (dk,) = grad(attention(q.detach(), k, v.detach(), config), k, do, create_graph=True)
    grad(dk.sum(), do)


def checkpointed(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    o = checkpoint(lambda q: attention(q * 2, k, v, config), q, use_reentrant=False)
    grad(grad(o.sum(), q, create_graph=True)[0].sum(), q)


def with_saved_tensors_copied(config: AttentionConfig, *qkv: Tensor) -> None:
    """The loss has a way to q of its own, so that torch.autograd.grad misses no tensor when the penalty's is lost."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = attention(*qkv, config).square().sum()
        grad(loss + grad(loss, qkv[0], create_graph=True)[0].square().sum(), qkv[0])


def under_autocast(config: AttentionConfig, *qkv: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        of_a_sum(config, *qkv)


def forward_over_reverse(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, of_lse: bool = False) -> None:
    """do carries a tangent: triton's kernels wrote gradients without one."""
    with forward_ad.dual_level():
        output = attention(q, k, v, config, return_lse=True)[of_lse]
        grad(output, q, forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output)))


def inside_a_graph(computed: Callable[[Tensor], Tensor]) -> None:
    """A penalty on the gradient of a weight. What `computed` gets, a vector, is made inside of the compiled graph."""
    torch._dynamo.reset()  # so that each function is compiled afresh
    x, weight = torch.randn(128), torch.ones(128, requires_grad=True)
    loss = torch.compile(lambda x, weight: computed(x + weight), backend="aot_eager")(x, weight)
    (found,) = grad(loss, weight, create_graph=True)
    (loss + found.square().sum()).backward()


def as_heads(config: AttentionConfig) -> Callable[[Tensor], Tensor]:
    """For inside_a_graph: attention on q = k = v (1, 2, 8, 8), strided as a model's."""

    def attend(x: Tensor) -> Tensor:
        q = x.view(1, 8, 2, 8).transpose(1, 2)
        return attention(q, q, q, config).sum()

    return attend


SECOND = {
    "penalty": lambda c, *qkv: (attention(*qkv, c).sum() + first(c, *qkv)[0].norm()).backward(),
    "grad of a sum": of_a_sum,
    # Here do depends on q, and once_differentiable refuses in backward() alone.
    "grad of a square": lambda c, *qkv: grad(first(c, *qkv, loss=lambda o: o.square().sum())[2].sum(), qkv[1]),
    "backward": by_backward,
    "of lse": by_lse,
    "with respect to do": with_respect_to_do,
    "checkpointed": checkpointed,
    "Hessian times vector": lambda c, q, k, v: functional.hvp(lambda q: attention(q, k, v, c).sum(), q, q.detach()),
    # PyTorch takes the gradient of a gradient with respect to do for it.
    "Jacobian times vector": lambda c, q, k, v: functional.jvp(lambda q: attention(q, k, v, c), q, torch.ones_like(q)),
    "under autocast": under_autocast,
    "with saved tensors copied": with_saved_tensors_copied,
    "forward over reverse": forward_over_reverse,
    "forward over reverse, of lse": lambda *c_and_qkv: forward_over_reverse(*c_and_qkv, of_lse=True),
}
