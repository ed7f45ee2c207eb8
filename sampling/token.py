"""One token of every sequence, recorded as a CUDA graph.

    next_token = NextToken(model, cache, choose, generator)
    made = next_token(token)                 enqueues the next token of every sequence; nothing waits for the device

Shapes: B sequences, V vocabulary.

A token is little work for a GPU: it reads GPT-2's weights in 60 us. Launching a token's operations from Python takes
ten times as long. Recorded once, they are launched all together. After that the number of kernels matters, because each
takes 1 to 3 us to begin and to end. With the layers of sampling/linear.py a block has five, with torch's 13.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.gpt import GPT
from model.layers import LAYERS, Layers
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
        token = self.made[:-1, None]
        logits = self.model.next_logits(token, self.cache.move(layers_for(token)))
        self.choose(logits, draws=draws, made=self.made)  # nobody reads the last token any more


def layers_for(token: Tensor) -> Layers:
    """The layers of sampling/linear.py, if there are few enough rows for them. Not under autocast: they do not cast."""
    from sampling.linear import FUSED, ROWS  # imported here: triton is not installed everywhere

    return LAYERS if len(token) > ROWS or torch.is_autocast_enabled(token.device.type) else FUSED
