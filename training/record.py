"""How a step is run: compiled, or recorded as a CUDA graph; and what it reports to the host.

    eager      Python launches every operation
    compiled   torch.compile has fused the model's operations into fewer kernels
    recorded   the compiled step is captured once for each shape, as a CUDA graph. The host then launches the whole
               step at once.

Recorded and compiled steps compute the same bits. An eager one drops the same elements, but rounds elsewhere.
A small model's operations take less time on a GPU than their launches from Python. Recorded, the GPU never waits.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.loader import Batch
from model.gpt import GPT, Block, Stages
from training.ahead import digest_of
from training.machine import is_out_of_memory

# Where kernels/norm.py does not compute the backward of norms, Inductor by default computes both of its sums in one
# kernel. Two kernels are faster: a step of experiment=shakespeare_gpu took 5.00 ms instead of 5.34 (H200).
COMPILE = partial(torch.compile, dynamic=False, options={"triton.mix_order_reduction": False})
# torch warns of operations in place, which a selective checkpoint would repeat; there are none.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def compiled(model: GPT, compile: Callable[..., Any] = COMPILE) -> Callable[..., Tensor]:
    """The model, compiled in parts: the embedding, a block, the loss. Blocks that are alike are compiled once, so this
    takes a fraction of the time for the whole model. No fusion is lost: a block leaves its last addition to the next
    norm, whose kernel does it."""
    # There are as many kinds of blocks as windows, at most; beyond 8 torch would run them uncompiled.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 + model.config.n_layer)
    keep_graphs()
    stages = (model.embed, model.layer or Block.forward, model.loss)
    return partial(model, stages=Stages(*map(compile, stages)))


def keep_graphs() -> None:
    """Makes torch keep graphs with our own autograd functions on the disk, too: the next run's first step takes half of
    the time. Torch finds a graph by the code that it has traced. That has no backward of an op of torch.library, whose
    edit it would not notice, so the key gets our sources as well."""
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = tag + digest_of("model", "kernels", "parallel")


class Graphs:
    """The CUDA graphs of a run. Those of evaluations are in the memory of the step's: no two run together, and none
    keeps anything there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: torch.cuda.CUDAGraph | None = None
        # Of evaluations, by the shape of their batch: the graph, where it reads, where it writes.
        self.losses: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}

    def clear(self) -> None:
        """Drops all graphs, and with them their memory."""
        self.step = None
        self.losses.clear()

    def capture(self, what: str, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures run() as a CUDA graph. Computes nothing: the first replay does. ValueError if something in it cannot
        be captured, such as a number that Python reads from the device."""
        try:
            graph, pool = torch.cuda.CUDAGraph(), None
            if self.step is None:
                # A stream of its own: torch's default one is of the first device that captured a graph in this process.
                self.stream = torch.cuda.Stream(self.device)
            else:
                pool = self.step.pool()
            # NCCL's watchdog thread queries its events during the capture; thread_local allows that.
            mode = "thread_local" if torch.distributed.is_initialized() else "global"
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode=mode):
                run()
            # torch sets the generator's offset to 0 on that stream, and on this one to where the first replay draws.
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = str(error).splitlines()[0]
            raise ValueError(f"{what} cannot be recorded as a CUDA graph ({why}); use compile=true") from error
        return graph

    def loss(self, batch: Batch, forward: Callable[[Batch], Tensor]) -> Tensor:
        """forward(batch), a scalar. Captured for the first batch of each shape, replayed for the others."""
        if batch.x.shape in self.losses:
            graph, place, loss = self.losses[batch.x.shape]
            place.copy_(batch)
            graph.replay()
        else:
            loss = forward(batch)  # which compiles its kernels
            graph = self.capture("an evaluation", lambda: loss.copy_(forward(batch)))
            self.losses[batch.x.shape] = graph, batch, loss
        return loss.clone()


class Numbers(NamedTuple):
    """The measurements of one update."""

    loss: float  # nats per token, mean over all passes
    norm: float  # norm of the whole gradient, before clipping
    scale: float  # loss scale in fp16; 1 for other dtypes
    stopped: bool  # this update or one before it was left out because loss or gradient was not finite


class Instant:
    """A moment in the device's work: when all that was enqueued before has been done."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.time = time.perf_counter()  # without an event the device has kept pace with the host

    def seconds_since(self, before: "Instant") -> float:
        """The time between two moments that have passed."""
        if self.event is not None and before.event is not None:
            return before.event.elapsed_time(self.event) / 1e3
        return self.time - before.time


class Report(NamedTuple):
    """An update's numbers, on their way to the host."""

    arrival: Tensor
    begin: Instant
    end: Instant
    warm: bool = True  # whether the step was not one of the first, in which kernels are compiled and steps recorded

    def arrived(self) -> bool:
        """Whether numbers() need not wait."""
        return self.end.event is None or self.end.event.query()

    def numbers(self) -> Numbers:
        """Waits for the update and returns its measurements. At most `ahead` further steps may be enqueued before."""
        if self.end.event is not None:
            self.end.event.synchronize()
        loss, norm, scale, stopped = self.arrival.tolist()
        return Numbers(loss, norm, scale, bool(stopped))

    def seconds(self) -> float:
        """The update's time, from the end of the one before. To be called after numbers()."""
        return self.end.seconds_since(self.begin)
