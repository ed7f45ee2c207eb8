"""Ways of asking attention for a second derivative: of each, the gradient of a gradient of q, k or v (B, H, T, D)."""

import torch
from torch import Tensor
from torch.autograd.functional import hvp
from torch.utils.checkpoint import checkpoint

from model.attention import AttentionConfig, attention


def first(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, loss=Tensor.sum) -> list[Tensor]:
    """dq, dk and dv that were asked for with a graph."""
    return list(torch.autograd.grad(loss(attention(q, k, v, config)), (q, k, v), create_graph=True))


def penalty(config: AttentionConfig, *qkv: Tensor) -> None:
    (attention(*qkv, config).sum() + first(config, *qkv)[0].norm()).backward()


def of_a_sum(config: AttentionConfig, *qkv: Tensor) -> None:
    torch.autograd.grad(first(config, *qkv)[0].sum(), qkv[0])


def of_a_square(config: AttentionConfig, *qkv: Tensor) -> None:
    """Here do depends on q, and once_differentiable refuses in backward() alone."""
    torch.autograd.grad(first(config, *qkv, loss=lambda o: o.square().sum())[2].sum(), qkv[1])


def of_strided_heads(config: AttentionConfig, *qkv: Tensor) -> None:
    torch.autograd.grad(
        first(config, *(x.mT.clone(memory_format=torch.contiguous_format).mT for x in qkv))[0].sum(), qkv[0]
    )


def by_backward(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    attention(q, k, v, config).sum().backward(create_graph=True)
    q.grad.sum().backward()


def by_lse(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    lse = attention(q, k, v, config, return_lse=True)[1]
    (dk,) = torch.autograd.grad(lse.sum(), k, create_graph=True)
    torch.autograd.grad(dk.sum(), q)


def with_respect_to_do(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    do = torch.ones_like(q, requires_grad=True)
    (dk,) = torch.autograd.grad(attention(q.detach(), k, v.detach(), config), k, do, create_graph=True)
    torch.autograd.grad(dk.sum(), do)


def checkpointed(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    o = checkpoint(lambda q: attention(q * 2, k, v, config), q, use_reentrant=False)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    torch.autograd.grad(dq.sum(), q)


def hessian_times_vector(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> None:
    hvp(lambda q: attention(q, k, v, config).sum(), q, q.detach())


SECOND = {
    "penalty": penalty,
    "grad of a sum": of_a_sum,
    "grad of a square": of_a_square,
    "grad of strided heads": of_strided_heads,
    "backward": by_backward,
    "of lse": by_lse,
    "with respect to do": with_respect_to_do,
    "checkpointed": checkpointed,
    "Hessian times vector": hessian_times_vector,
}
