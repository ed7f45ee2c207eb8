"""One token of every sequence: the model in few calls, on a GPU in few kernels and recorded as a CUDA graph.

    next_token = NextToken(model, cache, choose, generator)
    made = next_token(token)                 enqueues the next token of every sequence; nothing waits for the device
    logits = next_logits(model, token, cache)             the model's part of it; on a CPU all of it

Shapes: B sequences, C model width, V vocabulary, H query heads, H_kv key/value heads, D head size.

A token is little work for a GPU: it reads GPT-2's weights in 60 us. Launching a token's operations from Python takes
ten times as long. Recorded once, they are launched all together. After that the number of kernels matters, because each
takes 1 to 3 us to begin and to end. next_logits() has five kernels a block; the modules of model/gpt.py have 13.
On a CPU a small model's token is little work, too: calls from Python take most of its time. next_logits() makes fewer
than the modules, with the same bits and 14 to 25 % more tokens a second (LOG.md).

So a block's forward is written twice, in Block of model/gpt.py and here. tests/test_decode.py compares them with
kernels, tests/test_cache.py without.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.gpt import GPT, Block
from model.rope import rotate
from sampling.cache import KVCache

Generators = torch.Generator | Sequence[torch.Generator] | None  # one for all rows, or one for each; None: torch's own
WARM_UP = 2  # tokens before the recording: in them kernels are compiled


class NextToken:
    """Each call makes the next token of every sequence. The first WARM_UP calls launch every kernel from Python. The
    call after them records a CUDA graph. It and all later calls replay the graph. Both ways compute the same bits.
    If the cache's memory has moved, because it has more pages now, a call records once more."""

    def __init__(
        self,
        model: GPT,
        cache: KVCache,
        choose: Callable[..., Tensor],
        generator: Generators,
        draw: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """choose: Sampler.choose_unseen(), logits (B, V) to int64 (B + 1,). draw: Sampler.draw_ahead(). What it returns
        goes to `choose` as draws; if it is None, `choose` draws. Both draw from `generator`."""
        assert cache.at is not None
        self.model, self.cache, self.choose, self.generator, self.draw = model, cache, choose, generator, draw
        # What a token reads and writes stays at one place in memory, because a recorded token has its address.
        self.made = torch.zeros(len(cache.lengths) + 1, dtype=torch.int64, device=cache.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0

    def __call__(self, token: Tensor) -> Tensor:
        """Enqueues the model's run on `token`, int64 (B,), which may be what the last call made. Returns what `choose`
        makes of the logits; the next call overwrites it."""
        if token.data_ptr() != self.made.data_ptr():
            self.made[:-1].copy_(token)
        self.cache.grow()
        if self.graph is not None and self.moved != self.cache.moved:
            torch.cuda.synchronize(self.cache.device)  # the graph may be running
            self.graph = None
        # Not under autocast: a graph would cast the weights again in each replay, or read casts that are gone by then.
        if self.graph is None and self.count >= WARM_UP and not torch.is_autocast_enabled("cuda"):
            self.record()
        self.count += 1
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return self.made

    def record(self) -> None:
        """Records run(). It computes nothing: the first replay is the token."""
        self.graph, self.moved = torch.cuda.CUDAGraph(), self.cache.moved
        for generator in [self.generator] if isinstance(self.generator, torch.Generator) else self.generator or []:
            self.graph.register_generator_state(generator)
        # A stream of its own: torch's default one is of the first device that recorded a graph in this process.
        # Thread-local: what another thread of the process does on a GPU meanwhile is no error.
        stream = torch.cuda.Stream(self.cache.device)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.run()
        # torch sets the generators' offsets to 0 on that stream, and on this one to what the first replay draws from.
        torch.cuda.current_stream(self.cache.device).wait_stream(stream)

    def run(self) -> None:
        """Everything that the device does for a token, after cache.grow()."""
        draws = self.draw()  # first, because choose() then begins while the logits are computed
        self.cache.step_on()
        # Nobody reads the last token any more when the next one is written.
        self.choose(next_logits(self.model, self.made[:-1], self.cache), draws=draws, made=self.made)


def next_logits(model: GPT, token: Tensor, cache: KVCache) -> Tensor:
    """What model.next_logits() computes after cache.advance(), in few kernels where sampling/linear.py can: the logits
    (B, V) after the tokens int64 (B,).

    With kernels and in 16 bits it is more exact than the modules: the residual stream and the logits are float32.
    Without kernels it has the modules' bits.
    """
    if torch.is_autocast_enabled(token.device.type):
        return model.next_logits(token[:, None], cache)
    weight = model.embedding.weight
    positions = model.positions.weight if model.config.position == "learned" else None
    if cache.at is None:
        x, linear = plain_embed(token, weight, positions, cache.positions), plain_linear  # x (B, C)
        at = cache.positions
        ropes = {local: (cos[at].unsqueeze(-3), sin[at].unsqueeze(-3)) for local, (cos, sin) in cache.ropes.items()}
    else:
        from sampling.linear import ROWS, embed, linear  # imported here: triton is not installed everywhere

        if len(token) > ROWS:
            return model.next_logits(token[:, None], cache)
        x, ropes = embed(token, weight, positions, cache.at), cache.ropes
    for block, local, past in zip(model.blocks, model.local_ropes, cache.layers, strict=True):
        assert isinstance(block, Block)
        attention, mlp, rope = block.attention, block.mlp, ropes.get(local)
        qkv = linear(x, attention.qkv, norm=block.attention_norm).split(attention.widths, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 1, attention.head_size)) for y in qkv)  # (B, heads, 1, D)
        if rope is not None and cache.at is None:
            q, k, rope = rotate(q, *rope), rotate(k, *rope), None
        x = linear(past.attend(q, k, v, rope).flatten(1), attention.out, add=x, dtype=x.dtype)
        if mlp.gated:
            y = linear(x, mlp.up, norm=block.mlp_norm, gate=mlp.gate, activation="silu")
        else:
            y = linear(x, mlp.up, norm=block.mlp_norm, activation=model.config.mlp)
        x = linear(y, mlp.down, add=x, dtype=x.dtype)
    return linear(x, model.head, norm=model.norm, outputs=model.config.vocab_size, dtype=x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def plain_linear(
    x: Tensor,
    layer: nn.Linear,
    *,
    norm: nn.Module | None = None,
    activation: str = "none",
    gate: nn.Linear | None = None,
    add: Tensor | None = None,
    outputs: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """linear() of sampling/linear.py in plain PyTorch, for any number of rows."""
    if norm is not None:
        x = norm.forward(x)
    y = F.linear(x, layer.weight, layer.bias)
    if gate is None:
        y = ACTIVATIONS[activation](y)
    else:
        y = ACTIVATIONS[activation](F.linear(x, gate.weight, gate.bias)) * y
    if add is not None:
        y = add + y
    return y[:, :outputs].to(dtype or y.dtype)


def plain_embed(token: Tensor, weight: Tensor, positions: Tensor | None, at: slice | Tensor) -> Tensor:
    """embed() of sampling/linear.py in plain PyTorch. at: cache.positions."""
    x = weight[token]
    return x if positions is None else x + positions[at].view(-1, x.shape[1])
