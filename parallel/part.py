"""The part of a batch that one process computes, when several train one model.

Shapes: B batch, T sequence length, H heads, D head size, N processes that share the sequences.

A process has some of the sequences. Or N processes share each sequence: every one has T / N of its tokens. Everything
but attention treats each token by itself. For attention they exchange tokens against heads, and each computes H / N
heads of the whole sequence (Ulysses: Jacobs et al. 2023, arXiv 2309.14509). So attention itself is what it is in one
process, kernels and masks included. It costs four exchanges a layer in the forward: of q, k, v and o.

Where N does not divide the heads, a process keeps its tokens in attention too, and the keys and values go round
(parallel/ring.py). The part is then two pieces of the sequence, so that all have the same work.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention import AttentionConfig, alibi_slopes, attention


class Part(NamedTuple):
    """Dropout, positions and ALiBi count in the whole batch. These numbers say which part of it this is."""

    share: int = 0  # which of the equal shares of the batch's sequences
    shares: int = 1
    rank: int = 0  # which part of the tokens, and of the heads in attention
    ranks: int = 1  # N
    group: str = ""  # name of the process group that shares the sequences
    ring: bool = False  # the part is two of 2 N equal pieces of the tokens: the one of its rank, from each end

    def cut(self, x: Tensor) -> Tensor:
        """The part's tokens of whole sequences, (B, T) to (B, T / N)."""
        if self.ranks == 1:
            return x
        if not self.ring:
            return x.chunk(self.ranks, dim=1)[self.rank]
        pieces = x.chunk(2 * self.ranks, dim=1)
        return torch.cat((pieces[self.rank], pieces[-1 - self.rank]), dim=1)

    def positions(self, n: int, device: torch.device) -> slice | Tensor:
        """Where the part's n tokens are in the whole sequence, an index of a table of positions."""
        if not self.ring:
            return slice(self.rank * n, (self.rank + 1) * n)
        return self.cut(torch.arange(self.ranks * n, device=device)[None])[0]

    def numbers(self, B: int, H: int, device: torch.device) -> Tensor | None:
        """b*H + h in the whole batch, of the part's B sequences and H heads, int64 (B * H,); None: 0, 1, ..."""
        if self.share == 0 and self.ranks == 1:
            return None
        b = torch.arange(self.share * B, (self.share + 1) * B, device=device)
        h = torch.arange(self.rank * H, (self.rank + 1) * H, device=device)
        return (b[:, None] * (H * self.ranks) + h).flatten()

    def slopes(self, H: int, device: torch.device) -> Tensor | None:
        """ALiBi's slopes of the part's H heads, float32 (H,); None: they are all heads."""
        if self.ranks == 1 or self.ring:
            return None
        return alibi_slopes(H * self.ranks, device)[self.rank * H : (self.rank + 1) * H]


UNDIVIDED = Part()


def exchanged(part: Part, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **options: Any) -> Tensor:
    """attention() of the part's tokens, q, k, v and o (B, H or H_kv, T / N, D), over the whole sequences."""
    if part.ranks > 1:
        q, k, v = (to_heads(y.transpose(1, 2), part).transpose(1, 2) for y in (q, k, v))  # (B, H / N, T, D)
        options["qkv"] = None  # it has the heads of before
    H, device = q.shape[1], q.device
    numbers = None if options["seed"] is None else part.numbers(len(q), H, device)
    o = attention(
        q, k, v, config, numbers=numbers, slopes=part.slopes(H, device) if config.alibi else None, **options
    )  # fmt: skip
    return to_tokens(o.transpose(1, 2), part).transpose(1, 2) if part.ranks > 1 else o


def to_heads(x: Tensor, part: Part) -> Tensor:
    """All heads of the part's tokens, (B, T / N, H, D), to its share of the heads of all tokens, (B, T, H / N, D)."""
    B, n, H, D = x.shape
    x = x.reshape(B, n, part.ranks, H // part.ranks, D).permute(2, 0, 1, 3, 4)  # to whom: (N, B, T / N, H / N, D)
    x = exchange(x, part)  # from whom
    return x.transpose(0, 1).reshape(B, part.ranks * n, H // part.ranks, D)


def to_tokens(x: Tensor, part: Part) -> Tensor:
    """The inverse of to_heads(): (B, T, H / N, D) to (B, T / N, H, D)."""
    B, T, h, D = x.shape
    x = x.reshape(B, part.ranks, T // part.ranks, h, D).transpose(0, 1)  # to whom: (N, B, T / N, H / N, D)
    x = exchange(x, part)  # from whom
    return x.permute(1, 2, 0, 3, 4).reshape(B, T // part.ranks, part.ranks * h, D)


def exchange(x: Tensor, part: Part) -> Tensor:
    """Sends x[i] to process i, and returns what the processes have sent, in their order. x (N, ...)."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    shape = x.shape
    return all_to_all_single_autograd(x.contiguous().flatten(0, 1), None, None, part.group).view(shape)
