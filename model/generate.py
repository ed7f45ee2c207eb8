"""Generating text: choose the next token from the logits, append it, repeat.

Shapes: B sequences at a time, T tokens so far, V vocabulary.

With a cache (model/cache.py) the prompt runs once, and then each token alone. Without one every new token runs the
whole context through the model again. Both compute the same logits, up to rounding.

On a CUDA GPU a token with a cache is recorded (model/token.py), and the caller reads each token while the GPU already
makes the next one.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.cache import KVCache
from model.gpt import GPT
from model.token import NextToken

PAST_CONTEXT = ("slide", "half", "stop")  # what generate() does with a text longer than the context


SPOILT = "the logits are NaN: the weights of this checkpoint are spoilt; use an earlier one"


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
            raise NotFinite(SPOILT)
        return self.draw(logits, generator)[1]

    def choose_unseen(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """choose() that does not wait for the device: int64 (B + 1,), the token ids, and 1 after them if the logits are
        not finite, else 0."""
        largest, token = self.draw(logits.float(), generator)
        return torch.cat((token, largest.isnan().any()[None]))

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Logits float32 (B, V) to token ids int64 (B,), and before them numbers (B,), NaN where the logits are not
        finite."""
        if self.temperature == 0:
            return logits.max(-1)
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
        p = logits.softmax(-1)
        if p.is_cuda:  # as multinomial draws, but that waits for the device to check p
            return (p / torch.empty_like(p).exponential_(generator=generator)).max(-1)
        return p[:, 0], torch.multinomial(p, 1, generator=generator).squeeze(-1)


def generate(
    model: GPT,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    sampler: Sampler,
    generator: torch.Generator | None = None,
    *,
    cache: bool = True,
    past_context: str = "slide",
) -> Iterator[Tensor]:
    """Yields the next token of each sequence, int64 (B,), max_new_tokens times, each as soon as it is chosen. On a CUDA
    GPU the tensors are on the host, and each comes when the GPU has begun the next one.

    prompts: int64 (B, T), or B tensors (T,) of different lengths, at least 1. The model sees the last context_length
    tokens of a prompt. The caller puts the model in eval mode: an iterator that is abandoned half-way could not restore
    it.
    cache: keep keys and values, where model.cache_refusal() is None. It changes the time, and logits by rounding.
    past_context: what the model sees of a text longer than its context.
        slide   the last context_length tokens. Each then has another position, so all of them run again at every token.
        half    when the context is full, its last half. That runs again as a new prompt, and the context fills up.
        stop    nothing is yielded after the first sequence has filled its context.
    """
    assert not model.training, "call model.eval() first: dropout would garble the text"
    assert past_context in PAST_CONTEXT
    made = each_token(model, prompts, max_new_tokens, sampler, generator, cache, past_context)
    return to_host(made) if model.embedding.weight.is_cuda else made


@torch.inference_mode()
def each_token(
    model: GPT,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    sampler: Sampler,
    generator: torch.Generator | None,
    cache: bool,
    past_context: str,
) -> Iterator[Tensor]:
    """generate(), as the device makes the tokens. On a CUDA GPU it yields what choose_unseen() returns."""
    context = model.config.context_length
    texts = [prompt[-context:] for prompt in prompts]  # what the model may see: never more than the context
    lengths = [len(text) for text in texts]
    if past_context == "stop":
        max_new_tokens = min(max_new_tokens, context - max(lengths) + 1)
    kept = model.new_cache(len(texts)) if cache and model.cache_refusal() is None else None
    cuda = model.embedding.weight.is_cuda
    choose = partial(sampler.choose_unseen if cuda else sampler.choose, generator=generator)
    recorded = NextToken(model, kept, choose, generator) if cuda and kept is not None and kept.at is not None else None
    tokens: list[Tensor] = []  # of all sequences, those that are not in `texts` yet
    found: Tensor | None = None
    for made in range(max_new_tokens):
        sees = [tokens_seen(length + made, context, past_context) for length in lengths]
        if kept is None or found is None or sees != [length + 1 for length in kept.lengths]:
            if tokens:
                new = torch.stack(tokens, dim=1)  # (B, T)
                texts = [torch.cat((text, row))[-context:] for text, row in zip(texts, new, strict=True)]
                tokens.clear()
            found = choose(run_prompts(model, [text[-n:] for text, n in zip(texts, sees, strict=True)], kept))
        elif recorded is not None:
            found = recorded(found[: len(texts)])
        else:
            kept.advance()
            found = choose(model.next_logits(found[: len(texts), None], kept))
        yield found
        if kept is None or max(lengths) + max_new_tokens > context:  # or the texts are not needed again
            tokens.append(found[: len(texts)].clone())  # cloned, because a recorded token is always at the same place


def to_host(made: Iterator[Tensor]) -> Iterator[Tensor]:
    """The tokens on the host, each when the next one has been enqueued. So the GPU has work while the host reads."""
    sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for found in made:
        arrival = torch.empty_like(found, device="cpu", pin_memory=True)
        arrival.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        sent.append((arrival, event))
        if len(sent) > 1:
            yield arrived(*sent.popleft())
    while sent:
        yield arrived(*sent.popleft())


def arrived(made: Tensor, event: torch.cuda.Event) -> Tensor:
    """Waits for the tokens int64 (B,). Raises NotFinite if choose_unseen() found that the logits were not finite."""
    event.synchronize()
    if made[-1]:
        raise NotFinite(SPOILT)
    return made[:-1].clone()  # pageable, so that the pinned memory is used again


def tokens_seen(length: int, context: int, past_context: str) -> int:
    """How many of a text's `length` tokens the model sees: its last ones."""
    if length <= context or past_context == "slide":
        return min(length, context)
    return context - (context - length) % (context - context // 2)  # half of it, and what has come since


def run_prompts(model: GPT, texts: list[Tensor], cache: KVCache | None) -> Tensor:
    """The logits (B, V) of the token after each text. Texts of different lengths run one by one, so that each gives
    what it gives alone."""
    together = len({len(text) for text in texts}) == 1
    logits = []
    for start, stop in [(0, len(texts))] if together else [(b, b + 1) for b in range(len(texts))]:
        idx = torch.stack(texts[start:stop])  # (B or 1, T)
        if cache is not None:
            cache.begin(idx.shape[1], slice(start, stop))
        logits.append(model.next_logits(idx, cache))
    return torch.cat(logits)
