"""Generating text: choose the next token from the logits, append it, repeat.

With a cache the prompt runs once, and then each token alone. Of a prompt that is longer than the context, the end is
read. A text that outgrows the context goes on from its last half, with and without a cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.keys import check, key
from model.cache import KVCache
from model.gpt import GPT

WARM_UP = 2  # tokens before the CUDA graph is recorded: in them kernels are compiled


@dataclass
class Sampler:
    temperature: float = key(0.8, "divides the logits; low: less random", least=0, most=1e30, usual="0: the likeliest")
    top_k: int | None = key(None, "sample from the k most likely tokens only", least=1, usual="null: from all")
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
        beta = 1 / max(self.temperature, 1e-30)
        if self.top_p < 1:
            ordered, order = (logits.float() * beta).softmax(-1).sort(descending=True, dim=-1)
            enough = ordered.cumsum(-1) - ordered >= self.top_p  # the likelier ones suffice; the likeliest always stays
            logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
        # A draw from softmax(beta * logits): the index of the least log E - beta * logits, E exponentially distributed.
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).log_()
        return torch.sub(noise, logits, alpha=beta).argmin(-1, keepdim=True)


@torch.inference_mode()
def generate(
    model: GPT, idx: Tensor, count: int, sampler: Sampler, generator: torch.Generator | None = None, cache: bool = True
) -> Iterator[Tensor]:
    """Yields the next tokens (B, 1), `count` times. idx: prompts (B, T), T at least 1. ValueError for logits of NaN."""
    assert not model.training, "call model.eval() first: dropout would garble the text"
    context, kv_cache, step = model.config.context_length, None, None
    # A cache computes unbroken attention, and a block mask is a picture of a whole sequence.
    if cache and not model.break_it.label and model.attention_config.block_mask is None:
        kv_cache = KVCache(model, len(idx), min(context, idx.shape[1] + count))
        if kv_cache.position is not None:
            step = Step(model, kv_cache, sampler, generator)
    text = idx[:, -context:]
    for made in range(count):
        if text.shape[1] > context:
            text = text[:, -max(1, context // 2) :]
            if kv_cache is not None:
                kv_cache.advance(-kv_cache.length)
        new = text if kv_cache is None else text[:, kv_cache.length :]
        if made > 0 and step is not None and new.shape[1] == 1:
            token = step()
        else:
            logits = model(new, sequence=kv_cache)[:, -1]
            # A broken model may show it. After the prompt the host would wait for a GPU.
            if (made == 0 or not logits.is_cuda) and not model.break_it.label and logits.isnan().any():
                raise ValueError("the model's logits are NaN; use dtype=float32, or an earlier checkpoint")
            token = sampler.choose(logits, generator)
            if kv_cache is not None:
                kv_cache.advance(new.shape[1])
            if step is not None:
                step.token.copy_(token)
        text = torch.cat((text, token), dim=1)
        yield token


class Step:
    """From the last token of each sequence, `token` (B, 1), to the next one. On a CUDA GPU it is recorded as a graph,
    because its launches from Python take ten times as long."""

    def __init__(self, model: GPT, cache: KVCache, sampler: Sampler, generator: torch.Generator | None):
        self.model, self.cache, self.sampler, self.generator = model, cache, sampler, generator
        B, device = len(cache.layers[0].k), cache.position.device
        self.token = torch.zeros(B, 1, dtype=torch.int64, device=device)  # stays where it is: the graph has its address
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0

    def run(self) -> None:
        self.token.copy_(self.sampler.choose(self.model(self.token, sequence=self.cache)[:, -1], self.generator))
        self.cache.position.add_(1)

    def __call__(self) -> Tensor:
        """The next token ids, (B, 1)."""
        if self.count == WARM_UP and self.token.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                self.graph.register_generator_state(self.generator)
            stream = torch.cuda.Stream()
            # thread_local: in a run of several processes NCCL's watchdog thread queries events meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.run()
            torch.cuda.current_stream().wait_stream(stream)  # where torch sets what the first replay draws
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        self.count += 1
        self.cache.length += 1  # with run()'s position: cache.advance(1)
        return self.token.clone()
