"""One training step: forward, backward, clip, guard and update, without a wait for the device.

    way, reason = choose_way(cfg.compile, device, attention, cfg.model)
    train_step = TrainStep(model, averaged, optimizers, scaler, autocast, way, cfg)
    report = train_step(batches, lr, average_weight)    enqueues the update with these batches
    report.numbers()                                    waits for it: loss, gradient norm, ...

update() is the step. It runs eager, compiled or recorded (training/record.py).

A bad update is never made, and no step waits to find out. The device itself looks at the loss and the gradient, and
leaves the update out. Its numbers arrive on the host some steps later. Until then every further update is left out too.

Shapes: B batch size, T context length. A step's batches are one Batch of (passes, B, T) tensors.
"""

import math
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from data.loader import Batch
from model.abilities import wanted as options_of
from model.abilities import why_not
from model.attention import AttentionConfig
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, GPTConfig
from parallel.processes import ALONE, Ranks
from parallel.shard import local
from training.optimizer import average
from training.record import Graphs, Instant, Numbers, Report, compiled
from training.settings import Config

# Devices whose fused AdamW reads found_inf. On Apple's GPUs torch 2.11 ignores it (pytorch/pytorch#186360).
READS_FOUND_INF = ("cpu", "cuda")
AHEAD = {"cuda": 4}  # how many updates may be enqueued before the host waits for the oldest; elsewhere none
WARM_UP = 3  # compiled steps before the recording: in them kernels are compiled and the optimizers' state is made


def choose_way(
    wanted: str,
    device: torch.device,
    attention: AttentionConfig,
    model: GPTConfig,
    break_it: BreakIt = UNBROKEN,
    sends: str = "",
) -> tuple[str, str]:
    """How the steps of a run are made: eager, compiled or recorded; and why they are not recorded, or "".

    wanted: train.py's compile=, auto | true | false | graph. attention: resolved. sends: what Python sends between
    processes in the middle of a step (sends_from_python() of parallel/processes.py), or "". ValueError for graph where
    a step cannot be recorded, and for a checkpoint that attention does not have.
    """
    options = options_of(attention, break_it, **({"sends": sends} if sends else {}))
    form = f"model.activation_checkpointing={model.activation_checkpointing}"
    if model.activation_checkpointing == "selective" and (why := why_not("selective", options)):
        raise ValueError(f"{form}: {why}; use true, or another attention")
    if model.activation_checkpointing == "true":
        options["recomputed"] = form
    obstacle = why_not("recorded", options, device)
    if wanted == "graph" and obstacle:
        raise ValueError(f"compile=graph: {obstacle}; use compile=auto")
    if wanted in ("true", "false"):
        return ("compiled" if wanted == "true" else "eager"), f"compile={wanted}"
    if not obstacle:
        return "recorded", ""
    return ("eager" if device.type != "cuda" or attention.impl == "tiled" else "compiled"), obstacle


class TrainStep:
    """Makes updates of a model's weights. way: as choose_way() has it. cfg: of it optimizer.grad_clip, z_loss and
    stop_on_nan. The batches may change their shape a few times: each shape is compiled and recorded anew."""

    def __init__(
        self,
        model: GPT,
        averaged: GPT,
        optimizers: list[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler,
        autocast: AbstractContextManager,
        way: str,
        cfg: Config,
        ranks: Ranks = ALONE,
    ) -> None:
        self.way, self.cfg, self.ranks = way, cfg, ranks
        self.model, self.averaged, self.optimizers, self.scaler, self.autocast = (
            model, averaged, optimizers, scaler, autocast
        )  # fmt: skip
        self.loss_of = model if way == "eager" else compiled(model)
        weight = next(model.parameters())
        self.device = device = weight.device
        self.ahead = AHEAD.get(device.type, 0)
        self.steps = 0  # enqueued
        self.graphs = Graphs(device)
        self.record_at = 0  # the step that is recorded
        # What a step reads and writes stays at one place in memory, because a recorded step has its addresses.
        self.batches: Batch | None = None  # on the device; made for the first step of each shape
        self.average_weight = torch.zeros((), dtype=weight.dtype, device=device)
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.left_out = torch.zeros((), dtype=torch.float32, device=device)  # 1: leave this update out
        for optimizer in optimizers:
            optimizer.found_inf = self.left_out  # type: ignore[attr-defined]
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.measured = torch.zeros(len(Numbers._fields), dtype=wide, device=device)
        self.arrivals = [
            torch.empty(len(Numbers._fields), dtype=wide, pin_memory=device.type == "cuda")
            for _ in range(self.ahead + 1)
        ]
        self.clock = Instant(device)  # when the next step begins

    def __call__(self, batches: Batch, lr: float, average_weight: float) -> Report:
        """Enqueues one update.

        batches: int64 (passes, B, T), and documents int32, in pinned memory for a GPU, and kept until the report has
        arrived. average_weight: how far averaged moves towards model. At most `ahead` reports may be on their way.
        """
        if self.batches is None or self.batches.x.shape != batches.x.shape:
            if self.batches is not None and self.way != "eager":
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # what is dropped here may still be running
                torch.compiler.reset()  # torch keeps at most 8 shapes of a model; then it would run eagerly
            self.graphs.clear()
            self.record_at = self.steps + WARM_UP
            self.batches = batches.each(lambda part: torch.empty_like(part, device=self.device, pin_memory=False))
        self.batches.copy_(batches)
        self.average_weight.fill_(average_weight)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], Tensor):  # a number would be recorded, and stay as it was
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self.way == "recorded" and self.graphs.step is None and self.steps >= self.record_at:
            self.graphs.step = self.graphs.capture("the step", partial(self.update, self.batches))
        if self.graphs.step is None:
            self.update(self.batches)
        else:
            self.graphs.step.replay()
        arrival = self.arrivals[self.steps % len(self.arrivals)]
        self.steps += 1
        arrival.copy_(self.measured, non_blocking=self.device.type == "cuda")
        report = Report(arrival, self.clock, Instant(self.device), warm=self.steps > self.record_at + 1)
        self.clock = report.end
        return report

    def update(self, batches: Batch) -> None:
        """The step: everything that the device does with the batches."""
        # Forward and backward. The gradient becomes that of the mean loss over all passes, scaled in fp16.
        ranks, loss = self.ranks, torch.zeros((), device=self.device)
        for x, y, documents in batches.parts():
            x, y = ranks.part.cut(x), ranks.part.cut(y)
            for turn in range(ranks.turns):  # ranks share the passes: of every ranks.turns passes each computes one
                if turn != ranks.turn:
                    self.model.seeds(self.device)  # drawn and not used: then dropout is that of one process
                    continue
                with self.autocast:
                    share = self.loss_of(x, y, documents, z_loss=self.cfg.z_loss, setting=ranks.setting(x))
                    share = share / (len(batches.x) * ranks.size)
                self.scaler.scale(share).backward()
                loss += share.detach()
        loss = ranks.add_up(loss, self.model.parameters())

        # Clip.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = ranks.norm([local(p.grad) for p in self.model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.optimizer.grad_clip or math.inf, norm)

        # The guard. With a scale above 1, an infinite gradient is normal: this update alone is left out, and the scaler
        # answers with a smaller scale. With a scale of 1 (always, for dtypes other than fp16) the model itself made the
        # infinity. Then this update and all later ones are left out, because NaN in the weights cannot be repaired.
        scale = self.scaler.scale(torch.ones((), device=self.device))
        if self.cfg.stop_on_nan:
            self.stopped |= ~(loss.isfinite() & (norm.isfinite() | (scale > 1)))
        self.left_out.copy_(self.stopped | ~norm.isfinite() if self.scaler.is_enabled() else self.stopped)

        # The update. The optimizers read left_out on the device; where they cannot, the host does, and waits for it.
        # We do not use scaler.step(): it always waits, and of two optimizers it would skip only the one with an
        # infinite gradient.
        if self.device.type in READS_FOUND_INF or not self.left_out:
            for optimizer in self.optimizers:
                optimizer.step()
        if self.averaged is not self.model:
            average(self.averaged, self.model, self.average_weight * (1 - self.left_out))
        self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        for number, value in zip(self.measured.unbind(), (loss, norm, scale, self.stopped), strict=True):  # Numbers
            number.copy_(value)

    @torch.no_grad()
    def loss_of_windows(self, batch: Batch) -> Tensor:
        """The averaged model's loss, mean over the tokens of the batch, which is (B, T) and on the CPU: a scalar on the
        device, in nats. Nothing waits for it. The model is to be in evaluation mode.

        Where steps are recorded, this is recorded too, once for each shape, and has the same bits.
        """
        batch = batch.to(self.device)
        if self.graphs.step is None or self.ranks.size > 1:
            return self.forward(batch)
        return self.graphs.loss(batch, self.forward)

    def forward(self, batch: Batch) -> Tensor:
        """loss_of_windows() of a batch on the device, from Python."""
        x, y = self.ranks.part.cut(batch.x), self.ranks.part.cut(batch.y)
        with self.autocast:
            return self.averaged(x, y, batch.documents, setting=self.ranks.setting(x))

    def restart_clock(self) -> None:
        """The time of the next step begins now, and not at the end of the last one."""
        self.clock = Instant(self.device)
