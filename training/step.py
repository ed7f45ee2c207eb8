"""One update: forward, backward, clip, guard, optimizer. On a CUDA GPU only attention=tiled waits for the device.

    stats = train_step(batch, lr)       enqueues the update
    stats.wait()                        waits for its loss, gradient norm, ...

update() is the step, and it is the same code in all three modes: eager; compiled (each block by torch.compile); graph
(the compiled step is one CUDA graph, so that a small model does not wait for Python).

The guard is on the device, because asking it "is the loss finite?" before each update would stop the GPU. If
stop_on_nan, the device itself skips a bad update and all after it (in fp16, if only a gradient overflows, that update
alone). When the host learns of it, up to two steps later, the weights are still those before the NaN.

B batch size, T sequence length. A step's batch has an axis in front: (micro-batches, B, T).
"""

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from data.loader import Batch
from kernels.problem import Problem
from model import op
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig, draws_from_torch
from training.parallel import ALONE, Ranks, full_tensor

AHEAD = {"cuda": 2}  # updates that may be enqueued beside the one that the host waits for; elsewhere none
WARM_UP = 3  # steps before the capture: kernels are compiled and the optimizers' state is made


class StepStats(NamedTuple):
    loss: float  # nats per token, mean over all micro-batches
    grad_norm: float  # of the whole gradient, before clipping
    loss_scale: float  # in fp16; 1 in other dtypes
    stopped: bool  # the guard skipped this update or one before it, and not for an overflow in fp16 alone


class PendingStats(NamedTuple):
    """An update's numbers, on their way to the host."""

    numbers: Tensor
    event: torch.cuda.Event | None  # after the copy; None: it has arrived

    def wait(self) -> StepStats:
        if self.event is not None:
            self.event.synchronize()
        loss, norm, scale, stopped = self.numbers.tolist()
        return StepStats(loss, norm, scale, bool(stopped))


class Pending(NamedTuple):
    """An update that is enqueued, and what is needed to look at it again."""

    step: int
    lr: float
    stats: PendingStats
    batch: Batch
    rng: dict[str, Tensor]  # the random state before it


def choose_mode(
    wanted: str, device: torch.device, attention_config: AttentionConfig, config: GPTConfig, sharded: bool
) -> str:
    """eager, compiled or graph. wanted: compile=auto | false | true | graph. attention_config: resolved, not auto."""
    compiles = device.type == "cuda" and attention_config.impl != "tiled"  # tiled waits for a list of tiles
    saves_rng = config.recompute != "false" and draws_from_torch(config, attention_config)  # reads random state
    captures = compiles and not saves_rng and not sharded  # a graph may not read that, nor run FSDP2's hooks
    if wanted == "graph" and not captures:
        why = "a CUDA GPU, and no attention=tiled, no parallel.shard=true, no model.recompute with torch's dropout"
        raise ValueError(f"compile=graph needs {why}: use compile=auto")
    if wanted == "auto":
        return "graph" if captures else "compiled" if compiles else "eager"
    return {"false": "eager", "true": "compiled", "graph": "graph"}[wanted]


@dataclass(eq=False)
class TrainStep:
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager
    mode: str  # eager, compiled or graph
    grad_clip: float = 1.0
    stop_on_nan: bool = True
    ranks: Ranks = ALONE

    def __post_init__(self):
        self.device = device = next(self.model.parameters()).device
        if self.mode != "eager":
            # torch.compile's cache on the disk knows an op by its name, so the key gets the files that tell it shapes.
            source = b"".join(Path(getfile(what)).read_bytes() for what in (op, Problem))
            torch.compiler.config.cache_key_tag = hashlib.sha256(source).hexdigest()
            # When torch.compile compiles, it sets TRITON_CACHE_DIR to its own folder. A second run, which finds all
            # compiled, would look for our kernels in Triton's folder and compile them again: 9 s.
            os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
            for block in self.model.blocks:  # once for each attention.window; the whole model takes ten times as long
                # One kernel for both sums of a norm's backward is slower (docs/findings.md, 25)
                block.compile(dynamic=False, options={"triton.mix_order_reduction": False})
        self.ahead = AHEAD.get(device.type, 0)
        self.steps = 0  # enqueued
        self.graph: torch.cuda.CUDAGraph | None = None
        # A CUDA graph has the addresses of what it reads and writes, so these tensors stay where they are.
        self.batch: Batch | None = None
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.skip_update = torch.zeros((), device=device)  # 1: skip it
        for optimizer in self.optimizers:  # torch's fused AdamW and our Muon read found_inf; scaler.step() would set it
            optimizer.found_inf = self.skip_update  # type: ignore[attr-defined]
        self.stats = torch.zeros(4, device=device)

    def __call__(self, batch: Batch, lr: float) -> PendingStats:
        """Enqueues one update. batch: (micro-batches, B, T), on the CPU."""
        cuda = self.device.type == "cuda"
        if self.batch is None:
            self.batch = batch.each(lambda part: torch.empty_like(part, device=self.device))
        self.batch.copy_(batch.each(Tensor.pin_memory) if cuda else batch)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # on a GPU, where a graph would keep a number as it was
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        if self.mode == "graph" and self.steps == WARM_UP:
            self.graph = self.capture(self.batch)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.update(self.batch)
        numbers = self.stats.to("cpu", non_blocking=cuda, copy=True)  # non_blocking: to pinned memory
        event = torch.cuda.current_stream(self.device).record_event() if cuda else None
        self.steps += 1
        return PendingStats(numbers, event)

    def update(self, batch: Batch) -> None:
        """The step: everything that the device does with a batch."""
        # Forward and backward. The gradient is that of the mean loss over all micro-batches, scaled in fp16.
        loss = torch.zeros((), device=self.device)
        for part in batch.micro_batches():
            # This rank's share of the mean loss. cut(): x, y (with Ulysses T / N tokens), documents, sequence
            with self.autocast:
                share = self.model(*self.ranks.cut(part)) / (len(batch.x) * self.ranks.size)
            self.scaler.scale(share).backward()
            loss += share.detach()
        # All-reduce: sums gradients in place, returns the summed loss.
        loss = self.ranks.all_reduce(loss, self.model.parameters())

        # Clip. In two calls: the guard needs the norm also where grad_clip is 0, and FSDP2 has it in parts.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = full_tensor(get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        if self.grad_clip:
            clip_grads_with_norm_(self.model.parameters(), self.grad_clip, norm)

        # The guard. In fp16 with a scale above 1 an infinite gradient is normal: this update alone is skipped, and the
        # scaler lowers its scale. Otherwise the model diverged, and NaN in weights cannot be repaired.
        scale = self.scaler.scale(torch.ones((), device=self.device))  # get_scale() would wait for the device
        overflow = ~norm.isfinite()
        if self.stop_on_nan:
            self.stopped |= ~loss.isfinite() | (overflow & (scale <= 1))
        self.skip_update.copy_((self.stopped | overflow) if self.scaler.is_enabled() else self.stopped)

        # The update. scaler.step() would skip, of two optimizers, only the one with an infinite gradient. On Apple's
        # GPUs torch's AdamW ignores found_inf (pytorch/pytorch#186360), so there the host waits and looks.
        if self.device.type != "mps" or not self.skip_update:
            for optimizer in self.optimizers:
                optimizer.step()
        self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        self.stats.copy_(torch.stack((loss, norm, scale, self.stopped.float())))

    def capture(self, batch: Batch) -> torch.cuda.CUDAGraph:
        """Captures update() as a CUDA graph. Computes nothing: the first replay does."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        # thread_local: with several GPUs NCCL's watchdog thread queries events meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.update(batch)
        # torch prepared the generator on `stream`, and the first replay is on the current one: it waits.
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    @torch.no_grad()
    def loss_of(self, batch: Batch) -> Tensor:
        """Mean loss of a batch (B, T), a scalar on the device, in nats. The model is to be in evaluation mode."""
        with self.autocast:
            return self.model(*self.ranks.cut(batch.to(self.device)))

    def uncompiled(self) -> AbstractContextManager:
        """Inside, compiled blocks run eagerly: for inputs of other shapes, which would be compiled again and again."""
        return nullcontext() if self.mode == "eager" else torch.compiler.set_stance("force_eager")
