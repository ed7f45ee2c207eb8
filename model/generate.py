"""Generating text: choose the next token from the logits, append it, repeat.

With a cache the prompt runs once, and then each token alone. A prompt that is longer than the context loses its
beginning. A text that outgrows the context goes on from its last half, with and without a cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.keys import check, key
from model.cache import KVCache
from model.gpt import GPT

WARM_UP = 2  # tokens before the CUDA graph is recorded: in them kernels are compiled


@dataclass
class Sampler:
    temperature: float = key(0.8, "divides the logits; low: less random", least=0, most=1e30, note="0: the likeliest")
    top_k: int | None = key(None, "sample from the k most likely tokens only", least=1, note="null: from all")
    top_p: float = key(1.0, "sample from the most likely tokens that add up to this probability", above=0, most=1)

    def __post_init__(self):
        check(self)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits (B, V) to token ids (B, 1). The host does not wait for a GPU, as it would in torch.multinomial."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        beta = 1 / max(self.temperature, 1e-30)  # 1 / 1e-320 is infinite
        if self.top_p < 1:
            ordered, order = (logits.float() * beta).softmax(-1).sort(descending=True, dim=-1)
            surplus = ordered.cumsum(-1) - ordered >= self.top_p  # the likelier suffice; the likeliest always stays
            logits = logits.masked_fill(surplus.scatter(-1, order, surplus), -torch.inf)  # in the vocabulary's order
        # A draw from softmax(beta * logits) by Gumbel-max: the index of the least log E - beta * logits, E exponential.
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).log_()
        return torch.sub(noise, logits, alpha=beta).argmin(-1, keepdim=True)


@torch.inference_mode()
def generate(model: GPT, idx: Tensor, count: int, sampler: Sampler, generator=None, cache=True) -> Iterator[Tensor]:
    """Yields the next tokens (B, 1), `count` times. idx: prompts (B, T), T >= 1. ValueError if next() finds NaN."""
    assert not model.training, "call model.eval() first: dropout would garble the text"
    context = model.config.context_length
    # A cache computes unbroken attention, and a block mask is a picture of a whole sequence.
    cache = cache and not model.break_it.label and model.attention_config.block_mask is None
    kv_cache = KVCache(model, len(idx), min(context, idx.shape[1] + count)) if cache else None
    decoder, text = Decoder(model, kv_cache, sampler, generator), idx[:, -context:]
    held = False  # whether the cache has all of the text but its last token
    for _ in range(count):
        if text.shape[1] > context:
            text, held = text[:, -max(1, context // 2) :], False
        token = decoder.decode() if held else decoder.prefill(text)
        text, held = torch.cat((text, token), dim=1), kv_cache is not None
        yield token


class Decoder:
    """The next token of each sequence, (B, 1): after a text by prefill(), then one after the other by decode(). With
    attention=triton decode() is recorded as a CUDA graph, because its launches from Python take ten times as long. The
    model writes keys from place cache.length on, then advance() raises it. With triton cache.position is the length."""

    def __init__(self, model: GPT, cache: KVCache | None, sampler: Sampler, generator: torch.Generator | None):
        self.model, self.cache, self.sampler, self.generator = model, cache, sampler, generator
        self.token: Any = None  # the last one, (B, 1); stays where it is, because the graph has its address
        self.graph: torch.cuda.CUDAGraph | None = None
        self.decoded = 0

    def prefill(self, text: Tensor) -> Tensor:
        """The token after a text (B, T). The cache, if there is one, then holds the text."""
        if self.cache is not None:
            self.cache.advance(-self.cache.length)  # empties it
        token = self.next(text, prefill=True)
        if self.cache is not None:
            self.cache.advance(text.shape[1])
        self.token = token.clone() if self.token is None else self.token.copy_(token)
        return token

    def decode(self) -> Tensor:
        """The token after the last one."""
        assert self.cache is not None, "decode() needs a cache"
        may_record = self.token.is_cuda and self.cache.position is not None  # a tensor with attention=triton
        if may_record and self.decoded == WARM_UP:
            self.graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                self.graph.register_generator_state(self.generator)
            stream = torch.cuda.Stream()
            # thread_local: in a run of several processes NCCL's watchdog thread queries events meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.token.copy_(self.next(self.token))
            torch.cuda.current_stream().wait_stream(stream)  # on which torch prepares the generator for the replay
        if self.graph is None:
            self.token.copy_(self.next(self.token))
        else:
            self.graph.replay()
        self.decoded += 1
        self.cache.advance(1)
        return self.token.clone()

    def next(self, idx: Tensor, prefill: bool = False) -> Tensor:
        logits = self.model(idx, sequence=self.cache, last=True)[:, -1]
        checked = prefill or not logits.is_cuda  # after the prompt the host does not wait for a GPU
        if checked and not self.model.break_it.label and logits.isnan().any():  # a broken model may show them
            raise ValueError("the model's logits are NaN; use dtype=float32, or an earlier checkpoint")
        return self.sampler.choose(logits, self.generator)
