"""Who races: ours (naive, tiled, triton) and the peers, each as a function of q, k and v for one case.

Shapes: q and o (B, H, T, D), k and v (B, H_kv, T, D).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.text import counted
from kernels.problem import Problem
from model.abilities import resolve
from model.attention import AttentionConfig, attention, blocks_of
from model.mask import WHOLE, Tiling, visible

PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # FLOPs, in those of a forward
OURS = ("naive", "tiled", "triton")
# One backend at a time. If torch could choose, it might run another backend than the figure names.
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLS = (*OURS, *SDPA, "flex", "flash4")
CPU = torch.device("cpu")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One problem of the race, for q (B, H, T, D), k and v (B, H_kv, T, D)."""

    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float
    H_kv: int | None = None  # None: H
    window: int | None = None
    documents: int | None = None  # mean length of a document in tokens; None: one document
    block_mask: tuple[str, ...] | None = None  # as in AttentionConfig, stretched over T x T

    def flops(self, which: str) -> float:
        """FLOPs of a pass. A forward has two products, q k^T and p v. Each takes 2 D FLOPs for each visible pair of
        query and key in each head."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * self.share

    @cached_property
    def share(self) -> float:
        """The share of the T x T pairs of query and key that is visible: 0 to 1, averaged over the batch.

        A causal mask alone counts as one half, as is usual, though the diagonal makes it slightly more.
        """
        if self.window is None and self.documents is None and self.block_mask is None:
            return 0.5 if self.causal else 1.0
        documents, pairs = documents_of(self), 0.0
        blocks = None if self.block_mask is None else blocks_of(self.block_mask, CPU)
        problem = Problem.of(
            self.T, self.T, causal=self.causal, window=self.window, documents_q=documents, documents_k=documents,
            blocks=blocks, block_size=self.block_size,
        )  # fmt: skip
        for rows, visits in Tiling(problem, 512, 512).by_rows():
            for tile in visits:
                if tile.seen == WHOLE:
                    pairs += len(rows) * len(tile.columns)
                else:
                    seen = visible(problem, rows, tile.columns, CPU)  # (1 or B, R, S)
                    pairs += int(seen.sum()) / len(seen)
        return pairs / self.T**2

    @property
    def block_size(self) -> int:
        """Width and height of a block in tokens, such that the block mask covers T x T."""
        across = 1 if self.block_mask is None else min(len(self.block_mask), len(self.block_mask[0]))
        return -(-self.T // across)

    def title(self) -> str:
        """What all lengths of a series have in common, in words."""
        words = [f"head size {self.D}", counted(self.H, "head") + (f" on {self.H_kv} of keys" if self.H_kv else "")]
        words.append("causal" if self.causal else "not causal")
        words += [f"window {self.window}"] * (self.window is not None)
        words += [f"documents of {counted(self.documents or 0, 'token')}"] * (self.documents is not None)
        words += [f"block mask {'/'.join(self.block_mask or ())}"] * (self.block_mask is not None)
        return ", ".join([*words, f"dropout {self.dropout_p:g}"])


def documents_of(case: Case, device: torch.device = CPU) -> Tensor | None:
    """The document number of each token, int64 (B, T), or None. Each token begins a new document with the same
    probability, so lengths vary as in real text. The same at every call."""
    if case.documents is None:
        return None
    generator = torch.Generator().manual_seed(case.T)
    return (torch.rand(case.B, case.T, generator=generator) < 1 / case.documents).cumsum(1).to(device)


def entrants(impls: list[str] | None, device: torch.device) -> list[str]:
    """impls, or all, without those of ours that cannot run on this device. ValueError if such a name was given."""
    names = []
    for name in dict.fromkeys(impls or IMPLS):
        try:
            if name in OURS:
                resolve(AttentionConfig(name), device.type)
            names.append(name)
        except ValueError as error:
            if impls:
                raise
            print(f"{name}: {error}", flush=True)
    return names


def attention_of(name: str, case: Case, block: int, device: torch.device) -> Attention:
    """f in o = f(q, k, v), for one case. Masks and seeds are made here, so they are not timed.

    Raises ImportError for a peer that is not installed, ValueError for dropout or a mask that the peer does not have.
    """
    documents = documents_of(case, device)
    if name in OURS:
        config = AttentionConfig(name, window=case.window, dropout_p=case.dropout_p)
        if case.block_mask is not None:
            config = replace(config, block_mask=list(case.block_mask), block_mask_size=case.block_size)
        if name == "tiled":
            config = replace(config, block_m=block, block_n=block)
        impl = resolve(config, device.type)
        seed = torch.tensor(case.T, device=device) if case.dropout_p else None
        return lambda q, k, v: attention(q, k, v, impl, causal=case.causal, seed=seed, documents=documents)
    rules = [rule for rule in ("window", "documents", "block_mask") if getattr(case, rule) is not None]
    if rules and name != "flex":
        raise ValueError(f"{', '.join(rules)}: only ours and FlexAttention can do that without a mask of T x T")
    if case.dropout_p and name not in SDPA:
        raise ValueError("has no dropout")
    return flex(case, documents, device) if name == "flex" else flash4(case) if name == "flash4" else sdpa(case, name)


def sdpa(case: Case, name: str) -> Attention:
    """One of torch's kernels."""
    attend = partial(
        F.scaled_dot_product_attention,
        dropout_p=case.dropout_p, is_causal=case.causal, enable_gqa=case.H_kv is not None,
    )  # fmt: skip
    return sdpa_kernel(SDPA[name])(attend)


def flex(case: Case, documents: Tensor | None, device: torch.device) -> Attention:
    """FlexAttention, compiled for the case. documents: from documents_of()."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.nn.attention.flex_attention import flex_attention

    # Static shapes are fastest, but each shape is compiled anew. After eight compilations torch would run it
    # uncompiled, with a table of T x T; reset() resets that count. The backward overwrites donated buffers, so it could
    # not be timed several times with them. One compile thread stays in this process: a pool of processes would take CPU
    # time from the launches of kernels.
    torch._dynamo.reset()
    functorch.donated_buffer = False
    inductor.compile_threads = 1
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = flex_mask(case, documents, device)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=case.H_kv is not None)


def flash4(case: Case) -> Attention:
    """FlashAttention-4, which takes (B, T, H, D)."""
    from flash_attn.cute import flash_attn_func

    def run(q, k, v):
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
        o = found[0] if isinstance(found, tuple) else found  # some versions also return lse
        return o.transpose(1, 2)

    return run


def flex_mask(case: Case, documents: Tensor | None, device: torch.device) -> Any:
    """FlexAttention's BlockMask of a case, or None if nothing is hidden. documents: from documents_of()."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    rules: list[Callable] = []
    if case.causal:
        rules.append(lambda b, h, i, j: i >= j)
    if (window := case.window) is not None:
        rules.append(lambda b, h, i, j: (j > i - window) & (j < i + window))
    if documents is not None:
        rules.append(lambda b, h, i, j: documents[b, i] == documents[b, j])
    if case.block_mask is not None:
        blocks, size = blocks_of(case.block_mask, device), case.block_size
        rules.append(lambda b, h, i, j: blocks[i // size, j // size])
    B = None if documents is None else case.B
    return create_block_mask(and_masks(*rules), B, None, case.T, case.T, device=device) if rules else None
