"""Who races: ours (naive, tiled, triton) and the peers, each as a function of q, k and v for one case.

B batch, T tokens, D head size, H query heads, H_kv key/value heads: q, o (B, H, T, D); k, v (B, H_kv, T, D).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention import AttentionConfig, attention

PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # FLOPs, in those of a forward


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float
    H_kv: int | None = None  # None: H
    window: int | None = None  # keys that a query sees, itself included

    @property
    def share(self) -> float:
        """The visible share of the T x T pairs of query and key. A causal mask alone counts as a half, as is usual."""
        if self.window is None:
            return 0.5 if self.causal else 1.0
        W = min(self.window, self.T)
        causal = W * self.T - W * (W - 1) // 2  # row i sees min(i + 1, W) keys
        return (causal if self.causal else 2 * causal - self.T) / self.T**2

    def flops(self, which: str) -> float:
        """FLOPs of a pass, as FlashAttention's benchmark counts them: 4 D in a forward for a visible pair of a head."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * self.share


def attention_of(name: str, case: Case, device: torch.device) -> Callable[..., Any]:
    """f in o = f(q, k, v). The mask, the seed and the compiled function are made here, so they are not timed. Raises
    ValueError for what the implementation lacks; f raises other errors where it cannot run."""
    if name in OURS:
        block = 512 if device.type == "cuda" else 128  # of tiled
        config = AttentionConfig(name, block, block, window=case.window, dropout_p=case.dropout_p)
        seed = torch.tensor(case.T, device=device) if case.dropout_p else None
        return partial(attention, config=config, causal=case.causal, seed=seed)
    peer, lacks = PEERS[name]
    if missing := [what for what in lacks if getattr(case, what)]:
        raise ValueError(f"it has no {missing[0]}")
    return flex(case, device) if name == "flex" else partial(peer, case)


def sdpa(backend: SDPBackend, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One of torch's kernels. If torch could choose, it might run another one than the table names."""
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": k.shape[1] != q.shape[1]}
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=case.dropout_p, **options)


def flex(case: Case, device: torch.device) -> Callable[..., Any]:
    """FlexAttention, compiled for the case."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    rules: list[Callable] = [lambda b, h, i, j: i >= j] if case.causal else []
    if (window := case.window) is not None:
        rules.append(lambda b, h, i, j: (j > i - window) & (j < i + window))
    mask = create_block_mask(and_masks(*rules), None, None, case.T, case.T, device=device) if rules else None
    # Static shapes are fastest. reset(): after eight of them torch would run it uncompiled, with a table of T x T.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def flash4(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4, which takes (B, T, H, D)."""
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # some versions also return lse


OURS = ("naive", "tiled", "triton")
PEERS: dict[str, tuple[Callable, tuple[str, ...]]] = {  # and what each lacks
    "sdpa_flash": (partial(sdpa, SDPBackend.FLASH_ATTENTION), ("window",)),
    "sdpa_cudnn": (partial(sdpa, SDPBackend.CUDNN_ATTENTION), ("window",)),
    "sdpa_efficient": (partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), ("window",)),
    "flex": (flex, ("dropout_p",)),
    "flash4": (flash4, ("window", "dropout_p")),
}
IMPLS = (*OURS, *PEERS)
