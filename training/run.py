"""What a run is made of: data, model, step, folder. train.py makes it with these parts, in this order.

accumulation = passes(cfg)                            forward and backward passes of a step
dataset, loader = data_of(cfg, begun, parent, ...)    the text, prepared and cached at first use
train_step, way, chosen = trainer_of(cfg, ...)        model, optimizers, and the step that trains them
metrics = folder_of(cfg, folder, ...)                 the locked folder runs/NAME, and what writes into it
"""

import copy
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from data.dataset import Dataset, open_data
from data.loader import Batch, Loader, Prefetch, validation_batches
from data.made import SHORTEST
from data.tokenizer import from_json, same
from model.attention import AttentionConfig
from model.gpt import GPT, without_values
from model.recompute import RecomputingGPT
from parallel.part import UNDIVIDED
from parallel.processes import Ranks, sends_from_python
from parallel.shard import shard
from sampling.generate import Session
from training import ahead, checkpoint
from training.checkpoint import Checkpoint
from training.files import lock
from training.machine import Signals, memory_gib, peak_flops, set_precision
from training.memory import GIB, memory_of_machine, settle, step_on_cpu
from training.metrics import Metrics, NoMetrics, broken_name, show
from training.optimizer import base_rate, build_optimizers
from training.record import Numbers, Report
from training.resume import delete_later, make_room, refuse_newer
from training.settings import Config
from training.step import TrainStep, choose_way
from training.wandb_run import wandb_mode
from training.writer import Writer


class Update(NamedTuple):
    """An update that was enqueued, and what is kept until its numbers arrive."""

    step: int
    batches: Batch  # on the CPU, with an axis in front: the passes
    rng: dict[str, torch.Tensor]  # the random state before it, for the probe and for looks at a failure; else {}
    lr: float
    report: Report
    text_bytes: int | None = None  # of all ranks' targets; None: to be counted, in a single process


@dataclass
class Run:
    """All that belongs to a run. set_up() makes it; the loop and training/activities.py use it."""

    cfg: Config  # with name, model.vocab_size and optimizer.lr filled in
    folder: Path  # runs/NAME
    facts: dict[str, str | int]  # machine, versions, dtype, attention
    dataset: Dataset
    batches: Prefetch  # of the training text
    train_step: TrainStep  # makes one update
    metrics: Metrics
    step: int  # updates enqueued so far
    saved: Path | None  # the last checkpoint; complete after writer.wait()
    caught: Signals  # the signals that this process has received
    unfinished: bool  # whether something is left to do that was due after this step
    writer: Writer = field(default_factory=Writer)
    val_loss: float = math.inf  # validation loss after this step; inf if the step was not evaluated
    enqueued: deque[Update] = field(default_factory=deque)  # updates whose numbers have not arrived, oldest first
    ended: bool = True  # whether nothing is left to train, if no steps or minutes have been added
    place: float = 0.0  # of the last update in the learning rate's schedule; its number, unless max_minutes is set
    spent: float = 0.0  # seconds of training, those before a resume included; the same on all ranks
    began: float = 0.0  # when that time was 0, by time.perf_counter()
    times: deque[float] = field(default_factory=partial(deque, maxlen=20))  # seconds of the last steps, on the device
    pace: float = 0.0  # seconds a step, their median, the slowest rank's; 0 in the first steps of a new run
    started: float = field(default_factory=time.perf_counter)  # when the script, or this run of a sweep, began
    took: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds, by what took them
    cold: int = 0  # steps in which kernels were compiled
    compiled: bool = False  # whether such steps are over
    acts: bool | None = None  # whether what break_it has taken out changes anything; None: not looked yet
    session: Session | None = None  # what writes samples, if it stays from sample to sample
    code: int = 1  # exit code; loop() sets it when it returns
    insisted: bool = False  # whether a second signal ended the run

    def __post_init__(self) -> None:
        step = self.train_step
        self.model: GPT = step.model  # the model that is trained
        self.averaged: GPT = step.averaged  # evaluated, sampled, saved: a moving average of `model`, or `model` itself
        self.device, self.ranks = step.device, step.ranks

    @property
    def ending(self) -> bool:
        """Whether this step is the last one: it is number `steps`, or max_minutes are over."""
        return self.step == self.cfg.steps or self.left <= 0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time inside to what this took."""
        began = time.perf_counter()
        yield
        self.took[what] += time.perf_counter() - began

    @property
    def left(self) -> float:
        """Seconds until max_minutes are over."""
        return 60 * (self.cfg.max_minutes or math.inf) - self.spent

    def median(self) -> float:
        """Seconds a step on this rank: a median, so that one compilation does not count. Until the second step what a
        run before it had, or 0."""
        return statistics.median_low(self.times) if len(self.times) > 1 else self.pace

    def seconds(self) -> float:
        """Seconds since the run's first step, by this rank's clock."""
        return time.perf_counter() - self.began

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per update."""
        return self.cfg.tokens_per_step or self.cfg.batch_size * self.cfg.model.context_length

    def text_bytes(self, targets: torch.Tensor) -> int:
        """Number of bytes in the text of the tokens, which are on the CPU."""
        return int(self.dataset.token_bytes[targets.numpy()].sum())

    def record_of(self, done: Update, numbers: Numbers, seconds: float) -> dict:
        """The record of a step for metrics.jsonl. seconds: the step's time."""
        peak = None if self.facts["dtype"] == "float32" else peak_flops(self.device)  # the table has bf16's peaks only
        length = done.batches.x.shape[-1]
        flops = self.model.flops_per_token(length) * self.tokens_per_step
        size = self.text_bytes(done.batches.y) if done.text_bytes is None else done.text_bytes
        return {
            "step": done.step,
            "loss": numbers.loss,
            "bits_per_byte": numbers.loss * self.tokens_per_step / (math.log(2) * max(1, size)),
            "lr": done.lr,
            "grad_norm": numbers.norm,
            "ms": seconds * 1e3,
            "tokens_per_second": self.tokens_per_step / seconds,
            "mfu": flops / seconds / (peak * self.ranks.size) if peak else None,
            "memory_gib": memory_gib(self.device),
            "eta_s": max(0.0, min(self.left, (self.pace or seconds) * (self.cfg.steps - done.step))),
            **({"sequence_length": length} if self.cfg.length_warmup_steps else {}),
            **({"loss_scale": numbers.scale} if self.train_step.scaler.is_enabled() else {}),
        }


def passes(cfg: Config) -> int:
    """Number of forward and backward passes per step. ValueError if tokens_per_step is not a multiple of one pass."""
    per_pass = cfg.batch_size * cfg.model.context_length  # tokens
    tokens_per_step = per_pass if cfg.tokens_per_step is None else cfg.tokens_per_step
    accumulation, rest = divmod(tokens_per_step, per_pass)
    if rest or not accumulation:
        raise ValueError(
            f"tokens_per_step={tokens_per_step} is no multiple of batch_size * model.context_length = {per_pass}; "
            f"use tokens_per_step={max(1, round(tokens_per_step / per_pass)) * per_pass} or another batch_size"
        )
    return accumulation


def data_of(
    cfg: Config, resumed: Checkpoint | None, parent: Checkpoint | None, ranks: Ranks, rows: int
) -> tuple[Dataset, Loader]:
    """The data, which is prepared at first use and cached, and the loader of its training text, with `rows` sequences a
    batch for this rank. Fills in cfg.model.vocab_size. ValueError for data or a tokenizer that does not fit."""
    begun = resumed or parent
    kept = from_json(begun.tokenizer) if begun else None
    dataset = open_data(cfg.data, cfg.tokenizer, kept, cfg.model.context_length)
    if parent and not same(dataset.encoding, from_json(parent.tokenizer)):
        raise ValueError(
            f"tokenizer={cfg.tokenizer.kind} of data={cfg.data.source} is another tokenizer than that of "
            f"{cfg.init_from}: leave tokenizer= out" + ", and use data=text" * (cfg.data.source == "bin")
        )
    if cfg.data.source == "text" and cfg.data.path == "-":
        cfg.data.path = str(dataset.folder)  # a resumed run cannot read the same standard input again
    n_vocab = dataset.encoding.n_vocab
    if cfg.model.vocab_size not in (None, n_vocab):
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size}, the tokenizer has {n_vocab}; leave it out")
    cfg.model.vocab_size = n_vocab
    loader = Loader(
        dataset.train,
        dataset.train_documents,
        batch_size=rows,
        context_length=cfg.model.context_length,
        seed=cfg.seed,
        rank=ranks.data_rank,
        world_size=ranks.data_size,
        with_documents=cfg.attention.documents,
        random_offset=cfg.data.source not in SHORTEST,  # documents that are made fill a window
        packed=cfg.pack,
    )
    validation(cfg, dataset)  # raises ValueError for a text that is too short, before the first step
    return dataset, loader


def validation(cfg: Config, dataset: Dataset, overlap: bool = False) -> Iterator[Batch]:
    """The validation windows, always the same ones. ValueError if the text is shorter than one window.

    overlap: they overlap if the text has fewer tokens than eval_tokens. Each token is then at several positions, and
    losses by position are of nearly the same tokens. A text that is made has one document in each window.
    """
    size = (cfg.batch_size, cfg.model.context_length, cfg.eval_tokens)
    numbered, overlap = cfg.attention.documents, overlap and cfg.data.source not in SHORTEST
    return validation_batches(dataset.val, dataset.val_documents, *size, with_documents=numbered, overlap=overlap)


def make_model(cfg: Config, attention: AttentionConfig, device: torch.device) -> GPT:
    """The model with its initial weights, which depend on the seed. ValueError if it is too large."""
    torch.manual_seed(cfg.seed)
    try:
        return RecomputingGPT(cfg.model, attention, cfg.break_it).to(device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size above 2**63; torch's other errors are RuntimeErrors
        raise ValueError(
            f"a model of model.n_embd={cfg.model.n_embd}, n_layer={cfg.model.n_layer}, "
            f"{cfg.model.vocab_size} symbols cannot be made here ({str(error).splitlines()[0]}); use smaller ones"
        ) from error


def refuse_too_large(
    cfg: Config,
    attention: AttentionConfig,
    dtype: str,
    device: torch.device,
    ranks: Ranks,
    rows: int,
    passes: int,
) -> None:
    """On a CPU ValueError for a size that no tensor can have, and for a step that the memory cannot hold: the system
    would kill this process, or another one, without a word. rows: sequences of a pass, and passes of a step, on this
    rank."""
    if device.type != "cpu":
        return
    with without_values():
        make_model(cfg, attention, torch.device("meta"))
    own = replace(cfg.model, context_length=cfg.model.context_length // ranks.part.ranks)
    least = step_on_cpu(own, attention, rows, passes, dtype, cfg.ema_decay > 0, ranks.shards)
    if least > (there := memory_of_machine()):
        length, size = cfg.model.context_length, cfg.batch_size
        use = f"batch_size={size // 2} tokens_per_step={cfg.tokens_per_step or size * length}, which learns the same"
        raise ValueError(
            f"out of memory with batch_size={size} sequences of {length} tokens: a step takes {least / GIB:,.0f} GiB "
            f"or more, and this machine has {there / GIB:.0f}; use {use if size > 1 else 'a shorter context'}, or a "
            "smaller tokens_per_step= or model"
        )


def trainer_of(
    cfg: Config,
    attention: AttentionConfig,
    dtype: str,
    device: torch.device,
    ranks: Ranks,
    rows: int,
    parent: Checkpoint | None,
) -> tuple[TrainStep, str, str]:
    """The step that trains a new model, which begins with the parent's weights; how it is run; and what was chosen for
    its memory. Fills in cfg.optimizer.lr. attention: resolved. rows: sequences of a pass on this rank."""
    autocast = set_precision(dtype, device)
    if cfg.optimizer.lr is None:
        cfg.optimizer.lr = base_rate(cfg.model.n_embd)
    size = replace(cfg.model, context_length=cfg.model.context_length // ranks.part.ranks)  # a rank's tokens
    settled, chosen = ranks.same(settle(size, attention, rows, dtype, device, cfg.ema_decay > 0, ranks.shards))
    settled = replace(settled, context_length=cfg.model.context_length)
    way, why = choose_way(cfg.compile, device, attention, settled, cfg.break_it, sends_from_python(cfg))
    model = make_model(replace(cfg, model=settled), attention, torch.device("cpu") if cfg.parallel.shard else device)
    if parent:
        model.load_state_dict(parent.model)
    averaged = copy.deepcopy(model) if cfg.ema_decay else model
    if ranks.part == UNDIVIDED and not cfg.parallel.shard:
        T = cfg.length_at(1)
        ahead.begin(model, autocast, cfg.z_loss, (rows * cfg.model.context_length // T, T))
    if cfg.parallel.shard:
        for network in dict.fromkeys((model, averaged)):
            shard(network, ranks.size, device)
    optimizers = build_optimizers(model, cfg.optimizer)
    # Many gradients are smaller than 6e-8, the smallest number in fp16. The scaler therefore multiplies the loss by a
    # power of two, which it doubles after many good steps, and halves after an infinite gradient (training/step.py).
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
    train_step = TrainStep(model, averaged, optimizers, scaler, autocast, way, cfg, ranks)
    return train_step, way if way == "recorded" else f"{way} ({why})", chosen


def new_name(cfg: Config, model: GPT, impl: str) -> str:
    """Date, size and attention. A number is added if that run exists: two runs may start within a second."""
    size = f"{model.parameter_count() / 1e6:.3g}M"
    first = broken_name(time.strftime("%Y%m%d-%H%M%S") + f"-{size}-{impl}", cfg.break_it.label)
    names = [first, *(f"{first}-{number}" for number in range(2, 100))]
    return next(name for name in names if not (Path(cfg.runs) / name).exists())


def folder_of(
    cfg: Config, folder: Path, facts: dict[str, str | int], ranks: Ranks, stack: ExitStack, resumed: Checkpoint | None
) -> Metrics:
    """Locks the run's folder until the stack is closed, and opens its files; on rank 0 alone. resumed: the checkpoint
    of the run that is there; None for a new one. ValueError if another process has saved there since that was read."""
    if not ranks.first:
        return NoMetrics()  # type: ignore[return-value]
    wandb_mode(cfg.wandb)  # may raise, so it comes before the folder
    if resumed:
        stack.enter_context(lock(folder))
        refuse_newer(folder, resumed)
    elif unsaved := make_room(folder, stack):
        show(f"an earlier run {folder} ended before its first checkpoint: its files are now in {unsaved}")
    broken, config = cfg.break_it.label, {**asdict(cfg), "about": facts}
    step = resumed.step if resumed else 0
    metrics = Metrics(folder, cfg.steps, config=config, wandb_config=cfg.wandb, broken=broken, resume_step=step)
    if resumed and (later := delete_later(folder / checkpoint.FOLDER, step)):
        metrics.say(f"deleted the checkpoints after step {step}, whose steps are made again: {', '.join(later)}")
    return metrics
