"""Generating text: choose the next token from the logits, append it, repeat.

Shapes: B sequences at a time, T tokens so far, V vocabulary.

There is no cache of keys and values: every new token runs the whole context through the model again. generate() is an
iterator of tokens, so a cache can be added without changing its callers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model.gpt import GPT


class NotFinite(ValueError):
    """The logits are NaN, so no token can be chosen."""


@dataclass
class Sampler:
    """How the next token is chosen. The temperature applies first, then top_k, then top_p."""

    temperature: float = 0.8  # below 1: more predictable; 0: always the likeliest token
    top_k: int | None = None  # only the k likeliest tokens; None: all
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability; 1: all (arXiv 1904.09751)

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; null looks at every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]; 1 looks at every token")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits float (B, V) to token ids int64 (B,). generator: on their device. Raises NotFinite for NaN logits."""
        logits = logits.float()
        if logits.isnan().any():
            raise NotFinite("the logits are NaN: the weights of this checkpoint are spoilt; use an earlier one")
        if self.temperature == 0:
            return logits.argmax(-1)
        # Shifts the largest logit to 0 first. Then a tiny temperature sends the others to -inf and none to inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)  # so it is never 0
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            p, order = logits.softmax(-1).sort(descending=True, dim=-1)
            # A token is removed if the likelier ones reach top_p without it. So the likeliest token always stays.
            enough = p.cumsum(-1) - p >= self.top_p
            logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor, max_new_tokens: int, sampler: Sampler, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yields the next token of each sequence, int64 (B,), max_new_tokens times, each as soon as it is chosen.

    idx int64 (B, T), T >= 1: the prompt, of any length; the model sees its last context_length tokens. The caller puts
    the model in eval mode: an iterator that is abandoned half-way could not restore it.
    """
    assert not model.training, "call model.eval() first: dropout would garble the text"
    for _ in range(max_new_tokens):
        idx = idx[:, -model.config.context_length :]
        logits = model.next_logits(idx)  # (B, V)
        token = sampler.choose(logits, generator)
        yield token
        idx = torch.cat((idx, token[:, None]), dim=1)
