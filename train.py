"""Train a GPT. This file is the whole run, from top to bottom: configuration, set up, loop, finish.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER tokenizer=bpe   your own text
    python train.py model=gpt2 tokenizer=gpt2 data=text data.path=...  GPT-2's size, for one GPU
    python train.py attention=naive                                    the same run through another attention
    python train.py break_it=no_max break_it.score_gain=100            remove one line of attention and see what happens
    python train.py experiment=shakespeare                             a recipe with a known result
    python train.py -m optimizer.lr=1e-3,2e-3 optimizer=adamw,muon     every combination, in one table and one picture
    python train.py resume=auto                                        continue the last run
    python train.py eval_only=true resume=NAME                         what a longer context is worth to its model
    python train.py init_from=gpt2 data=text data.path=FILE            begin with the weights of GPT-2, or of a run
    python train.py --help                                             the usual keys; --help all: every key

A run writes everything into runs/NAME: config.yaml, metrics.jsonl, loss.png, samples.txt, checkpoints, wandb.
"""

if __name__ == "__main__":  # before the imports, which load torch
    import gc

    from training import start

    start.begin()
    gc.disable()  # until begin_collecting()

import copy
import math
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from data.loader import Prefetch
from data.made import SHORTEST
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.gpt import GPTConfig, without_numbers
from parallel.processes import (
    ParallelConfig,
    Ranks,
    begin,
    divide,
    in_a_ring,
    join,
    own_device,
    refuse_several,
    refuse_what_is_for_one,
    sends_from_python,
)
from training import checkpoint, config, context
from training.activities import ACTIVITIES, between_steps, find_the_fault, look_at_the_failure
from training.files import replacing
from training.machine import (
    DTYPES,
    Signals,
    Stopping,
    about,
    begin_collecting,
    is_out_of_memory,
    keep_memory,
    pick_device,
    pick_dtype,
    stop_signals,
)
from training.messages import introduce, less_memory, say_what_is_there, what_to_try
from training.metrics import broken_name, stamp, writing
from training.optimizer import OptimizerConfig, learning_rate
from training.probe import ProbeConfig
from training.record import Numbers
from training.resume import (
    again,
    config_of,
    edits,
    open_checkpoint,
    open_parent,
    refuse_another_parent,
    restore,
    resumed_config,
)
from training.run import Run, Update, data_of, folder_of, make_model, new_name, passes, trainer_of
from training.step import choose_way
from training.sweep import sweep
from training.wandb_run import WandbConfig

PREFETCH = 3  # batches of a step that are drawn ahead

# ---------------------------------------------------------------------------------------------------------------------
# Configuration. Each group's dataclass is beside the code that it configures. The files in conf/ override its defaults.


@dataclass
class Config:
    """Every key of the command line, with its default. Raises ValueError for a value that is not allowed."""

    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    break_it: BreakIt = field(default_factory=BreakIt)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    name: str | None = None  # name of the run and its folder; None: made from the date, the size and the attention
    runs: str = "runs"  # folder of all runs
    # resume from: auto (last checkpoint of run name=, or of the newest run) | a run's name | a path. The run takes its
    # configuration from the checkpoint. Keys on the command line override it.
    resume: str | None = None
    eval_only: bool = False  # only measure what the context is worth to the best checkpoint of the run in resume=
    # weights to begin a new run with: a Hugging Face name (gpt2), a folder, or a run. The model and the tokenizer are
    # then those of the weights.
    init_from: str | None = None
    seed: int = 1337  # random seed for the initial weights, the order of the data, dropout and samples

    steps: int = 700  # number of training steps (updates of the weights)
    # time limit in minutes; None: no limit. At the limit the run evaluates, saves and ends. The time starts at the
    # first step of this process, so a resumed run has the whole limit again. The learning rate schedule follows steps,
    # so at the limit the rate has not reached its minimum.
    max_minutes: float | None = None
    batch_size: int = 16  # sequences per pass; torchrun's processes share a step's; lower it if memory runs out
    tokens_per_step: int | None = None  # tokens per update, by gradient accumulation over passes; None: one pass
    # steps of the sequence-length warm-up, 0: off. The sequences begin with length_warmup_from tokens and grow to
    # model.context_length, each length for as many steps. A step has more of them, so that it has as many tokens.
    length_warmup_steps: int = 0
    length_warmup_from: int = 128  # tokens of the first sequences in a length warm-up
    length_warmup_by: int = 2  # how many times as long the next sequences are; they reach model.context_length exactly
    pack: bool = False  # pack documents into windows (best fit), so that none is cut that is not longer than a window
    z_loss: float = 0.0  # weight of the z-loss, mean(logsumexp(logits)^2), added to the loss; 1e-4 is usual, 0: off
    # decay of a moving average of the weights (EMA), which is evaluated, sampled and saved; 0: off. It averages over
    # about the last 1 / (1 - ema_decay) steps; early in training, over the last ninth of the steps so far.
    ema_decay: float = 0.0
    eval_every: int = 100  # steps between evaluations
    eval_tokens: int = 65536  # approximate number of validation tokens per evaluation; always the same tokens
    # steps between measurements of what the context is worth; 0: none. With init_from= the first is before any step.
    context_every: int = 0
    sample_every: int = 200  # steps between samples; 0: no samples
    sample_tokens: int = 200  # maximum length of a sample in tokens; it ends earlier if the model ends the document
    checkpoint_every: int = 100  # steps between checkpoints; the best is chosen among those that were evaluated
    keep_last: int = 2  # number of newest checkpoints to keep; the best one is kept too
    log_every: int = 1  # steps between log lines

    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps
    dtype: str = "auto"  # auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16 (with loss scaling)
    # auto | false (plain PyTorch) | true (torch.compile) | graph (compiled, as one CUDA graph). graph records the whole
    # step once and replays it, so that a small model does not wait for Python. auto: on a CUDA GPU graph where that is
    # possible, else true; false with attention=tiled and on any other device.
    compile: str = "auto"
    stop_on_nan: bool = True  # stop before an update with NaN or infinity; false: train on and see what happens

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "eval_tokens", "checkpoint_every", "keep_last", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("name", "runs", "resume", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}= is empty; give it a value or leave it out")
        # Windows and wandb refuse these characters, and Unix refuses /. Windows drops a dot or a space at the end. A
        # run may be moved or sent there later.
        refused = self.name and (set(self.name) & set('/\\:*?"<>|') or not self.name.isprintable())
        if refused or self.name in ("latest", "auto") or (self.name and self.name != self.name.strip(" .")):
            raise ValueError(
                f"name={self.name!r} cannot name a run; use letters, digits and - (runs= chooses the folder)"
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} must be at least 1; null takes one pass")
        if self.max_minutes is not None and not 0 < self.max_minutes < math.inf:
            raise ValueError(f"max_minutes={self.max_minutes} must be finite and above 0; null sets no limit")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        if self.eval_only and self.resume is None:
            raise ValueError("eval_only=true has no run to measure; name one with resume=NAME, or resume=auto")
        if (self.eval_only or self.context_every) and self.model.context_length < context.FEWEST:
            raise ValueError(
                f"model.context_length={self.model.context_length} is too short for context_every= and eval_only=, "
                f"which measure contexts of {context.FEWEST} tokens and more; leave them out"
            )
        for name in ("context_every", "sample_every", "sample_tokens", "length_warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        self.check_length_warmup()
        if self.pack and self.data.source in SHORTEST and not self.eval_only:
            raise ValueError(
                f"pack=true with data={self.data.source}: its documents fill windows already; leave it out"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} must be finite and at least 0; 1e-4 is usual, 0 leaves it out")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay} is outside [0, 1); 0.999 is usual, 0 averages nothing")
        self.compile = self.compile.lower()  # this key is a string, and people type True
        choices = {"dtype": ("auto", "bf16", "fp16", "float32"), "compile": ("auto", "true", "false", "graph")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")

    def check_length_warmup(self) -> None:
        """Raises ValueError for a length warm-up that cannot be."""
        steps, short, by, T = (
            self.length_warmup_steps, self.length_warmup_from, self.length_warmup_by, self.model.context_length
        )  # fmt: skip
        if not steps or self.eval_only:  # which trains nothing, and may have another context
            return
        if by < 2:
            raise ValueError(f"length_warmup_by={by} must be at least 2; 2 doubles the sequences")
        if not 0 < short < T or self.lengths[-1] != T:
            grows = "double" if by == 2 else f"grow {by}-fold"
            divided = ", ".join(str(by**i) for i in (1, 2, 3))
            way_out = (
                f"model.context_length divided by {divided}, ..."
                if T % by == 0
                else "a length_warmup_by that divides it"
            )
            raise ValueError(f"length_warmup_from={short} does not {grows} to model.context_length={T}; use {way_out}")
        if steps < len(self.lengths) - 1:
            raise ValueError(
                f"length_warmup_steps={steps} must be at least {len(self.lengths) - 1}, the number of lengths that are "
                f"shorter than model.context_length={T}; 0 leaves the warm-up out"
            )
        if self.data.source == "recall":
            raise ValueError(
                f"length_warmup_steps={steps} with data=recall: its strings are repeated after half a window, and no "
                "shorter sequence has both; leave the warm-up out"
            )

    @property
    def lengths(self) -> list[int]:
        """The tokens of a sequence, from the first of a length warm-up on; the last is model.context_length."""
        found = [self.length_warmup_from if self.length_warmup_steps else self.model.context_length]
        while found[-1] < self.model.context_length:
            found.append(found[-1] * self.length_warmup_by)
        return found

    def length_at(self, step: int) -> int:
        """The tokens of a sequence in update number `step`, which counts from 1."""
        if step > self.length_warmup_steps:
            return self.model.context_length
        return self.lengths[(step - 1) * (len(self.lengths) - 1) // self.length_warmup_steps]


def main(cfg: Config) -> int:
    """Trains and returns the exit code: 0; 1 if a NaN or infinity stopped the run; 128 + the signal if a signal did.

    Raises ValueError for a mistake that the user can correct. Does not change cfg.
    """
    if cfg.eval_only:
        begin_collecting()
        refuse_several("eval_only=true", "measures in one process")
        return context.evaluate(copy.deepcopy(cfg))
    with ExitStack() as stack:
        ranks = stack.enter_context(join(cfg))
        caught = stack.enter_context(stop_signals())
        try:
            with caught.at_once("stopped before the first step, so nothing is lost: the same command starts again"):
                run = set_up(copy.deepcopy(cfg), ranks, stack, caught)
        except Stopping:
            return 128 + caught[0]
        begin_collecting()
        try:
            run.code = loop(run)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            where = "out of memory" if run.device.type == "cpu" else "out of GPU memory"
            raise ValueError(
                f"{where} with batch_size={cfg.batch_size} sequences of {cfg.model.context_length} tokens; "
                f"use {less_memory(run)}, which learns the same"
            ) from error
        except OSError:
            run.metrics.still_there()  # says so if the folder is gone
            raise
    if run.code == 0:
        say_what_is_there(run)
    return run.code


# ---------------------------------------------------------------------------------------------------------------------
# Set up: device, checkpoint, data, model, folder. The quick checks come first.


def set_up(cfg: Config, ranks: Ranks, stack: ExitStack, caught: Signals) -> Run:
    """Makes the run and prints its first lines. Fills in cfg.name, cfg.model.vocab_size and cfg.optimizer.lr.

    stack: closes the lock and the metrics when the run ends, also after an error. The run's folder is made only after
    all checks have passed.
    """
    # Device and precision.
    keep_memory()
    device = pick_device(own_device(cfg.device))
    dtype = pick_dtype(cfg.dtype, device)
    attention = resolve(cfg.attention, device.type, cfg.break_it, in_a_ring(cfg), cfg.model, DTYPES[dtype])
    choose_way(cfg.compile, device, attention, cfg.model, cfg.break_it, sends_from_python(cfg))
    refuse_another_parent(cfg)
    ranks, rows, own_passes = divide(ranks, cfg, passes(cfg))
    refuse_what_is_for_one(cfg, attention)

    # The checkpoint, if the run resumes one. The name of a broken run says what is broken.
    cfg.name = cfg.name and broken_name(cfg.name, cfg.break_it.label)
    resumed, parent = open_checkpoint(cfg), open_parent(cfg)

    # Data, model and optimizer, and the random state.
    dataset, loader = data_of(cfg, resumed, parent, ranks, rows)
    train_step, way, chosen = trainer_of(cfg, attention, dtype, device, ranks, rows, parent)
    step = restore(resumed, cfg.steps, train_step, loader) if resumed else 0
    slots, pinned = train_step.ahead + PREFETCH, device.type == "cuda"
    batches = Prefetch(loader, own_passes, slots, pinned, cfg.length_at, step)
    stack.callback(batches.close)

    # The run's folder, locked for other processes.
    cfg.name = ranks.same(cfg.name or new_name(cfg, train_step.model, attention.impl))
    folder = Path(cfg.runs) / cfg.name
    same_run = resumed is not None and resumed.path.resolve().is_relative_to(os.path.realpath(folder))
    run_before = None if resumed is None else resumed.path.parent.parent.name
    ranks.refuse_difference(text=loader.dataset, run=run_before, step=step)
    facts = {**about(device), "dtype": dtype, "attention": attention.impl}
    if ranks.size > 1:
        facts["ranks"] = ranks.size
    metrics = folder_of(cfg, folder, facts, ranks, stack, step if same_run else None)
    ranks.wait()  # until the first has the folder
    begin()
    run = Run(
        cfg, folder, facts, dataset, batches, train_step, metrics, step=step, saved=resumed.path if resumed else None,
        caught=caught, unfinished=resumed.state.get("due", False) if resumed else True,
    )  # fmt: skip
    stack.callback(close, run)
    if resumed and same_run and (unread := edits(folder / "config.yaml", config_of(resumed, Config), asdict(cfg))):
        metrics.say(unread)
    if ranks.first:
        with writing(folder / "config.yaml"), replacing(folder / "config.yaml") as file:
            file.write(config.to_yaml(cfg).encode())
    introduce(run, resumed, parent, way)
    if chosen:
        metrics.say(chosen)
    return run


def check(cfg: Config) -> None:
    """Raises ValueError for a device, an attention or sizes that do not work. These are the checks of set_up() that
    need no data and no memory. A sweep makes them for every job before the first one starts."""
    if cfg.eval_only:
        raise ValueError("eval_only=true measures one run: leave out -m, and type the command once for each run")
    refuse_several("-m", "makes one run after the other")
    device = pick_device(cfg.device)
    dtype = DTYPES[pick_dtype(cfg.dtype, device)]
    attention = resolve(cfg.attention, device.type, cfg.break_it, model=cfg.model, dtype=dtype)
    choose_way(cfg.compile, device, attention, cfg.model, cfg.break_it, sends_from_python(cfg))
    refuse_another_parent(cfg)
    passes(cfg)
    cfg = copy.deepcopy(cfg)
    cfg.model.vocab_size = cfg.model.vocab_size or 1
    with without_numbers():
        make_model(cfg, attention, torch.device("meta"))


# ---------------------------------------------------------------------------------------------------------------------
# The loop.


def loop(run: Run) -> int:
    """Trains until the last step, the time limit, a signal or a NaN, and returns the exit code.

    On a GPU the host is some steps ahead: it enqueues an update, and then logs those that the device has finished. When
    an activity is due, it first waits until all of them are finished.
    """
    cfg = run.cfg
    if run.unfinished and (signals := between_steps(run, [])):
        return stop_at_signal(run, signals[0])
    until = time.perf_counter() + 60 * (cfg.max_minutes or math.inf)
    run.model.train()
    run.train_step.restart_clock()
    while not run.ending:
        enqueue(run)
        signals = agree(run, until - time.perf_counter())
        pause = bool(signals) or any(activity.due(run) for activity in ACTIVITIES)
        while run.enqueued and (pause or oldest_is_done(run)):
            if bad := log_oldest(run):
                return stop_at_nan(run, *bad)
        if pause:
            signals = between_steps(run, signals)
            if signals and (run.unfinished or run.step < cfg.steps):
                return stop_at_signal(run, signals[0])
            run.train_step.restart_clock()
        run.writer.look()
    run.writer.wait()
    return 0


def enqueue(run: Run) -> None:
    """Enqueues the next update."""
    cfg = run.cfg
    batches = run.batches.next()
    length = cfg.length_at(run.step + 1)
    if length < cfg.model.context_length:  # (passes, B, T) to (passes, B * T / length, length)
        batches = batches.each(lambda part: part.view(len(part), -1, length))
    rng = checkpoint.rng_state() if cfg.probe.every or cfg.break_it.without else {}
    lr = learning_rate(run.step + 1, cfg.steps, cfg.optimizer)
    # The average's decay is lower at first. With 0.999 from the start, half of the average at step 700 would still be
    # the random initial weights.
    decay = min(cfg.ema_decay, (1 + run.step) / (10 + run.step))
    report = run.train_step(batches, lr, 1 - decay)
    run.step += 1
    run.enqueued.append(Update(run.step, batches, rng, lr, report))


def agree(run: Run, left: float) -> list[int]:
    """Sets run.left, the seconds that are left, and returns the signals received. Ranks gather both from all of them,
    so that they stop at the same step, and the size of their text."""
    run.left = left
    if run.ranks.size == 1:
        return run.caught
    last = run.enqueued.pop()
    size = run.text_bytes(last.batches.y) if run.ranks.part.rank == 0 else 0  # once for ranks that share sequences
    signals, run.left, size = run.ranks.agree(run.caught, left, size)
    run.enqueued.append(last._replace(text_bytes=size))
    return signals


def oldest_is_done(run: Run) -> bool:
    """Whether the oldest update is done, or the host is too far ahead of it. Ranks log the same updates between two
    steps, so that a NaN stops them at the same one."""
    return len(run.enqueued) > run.train_step.ahead or (run.ranks.size == 1 and run.enqueued[0].report.arrived())


def log_oldest(run: Run) -> tuple[Update, Numbers] | None:
    """Waits for the oldest update, and logs it. Returns it if the run stops there, else None."""
    done = run.enqueued.popleft()
    numbers = done.report.numbers()
    seconds = done.report.seconds()
    if run.pace is None or seconds < run.pace / 2:  # a compilation has ended: the steps to come are like this one
        run.pace = seconds
    run.pace = 0.9 * run.pace + 0.1 * seconds
    last = run.ending and done.step == run.step
    if done.step % run.cfg.log_every == 0 or last or numbers.stopped:
        run.metrics.log(run.record_of(done, numbers, seconds))
    if numbers.stopped:
        return done, numbers
    run.batches.give_back(done.batches)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Finish.


def stop_at_signal(run: Run, signal: int) -> int:
    """Ends a run that has saved after a signal. Returns the exit code."""
    run.writer.wait()
    run.ranks.wait()  # for the file: torchrun ends all ranks when one has ended with an exit code
    run.metrics.say(f"stopped at step {run.step}, saved {run.saved}; to go on: {again(run.cfg)}")
    return 128 + signal


def stop_at_nan(run: Run, done: Update, numbers: Numbers) -> int:
    """Ends a run at an update that the device left out because of a NaN or infinity. Returns the exit code.

    The updates enqueued after it were left out too, so the weights and all else are those of the step before.
    """
    cfg = run.cfg
    run.step, run.val_loss = done.step, math.inf
    if run.enqueued and (rng := run.enqueued[0].rng):  # as if the later updates had drawn nothing
        checkpoint.set_rng_state(rng)
    run.enqueued.clear()
    try:
        run.writer.wait()
    except OSError as error:  # the run says the NaN all the same
        run.metrics.say(str(error))
        run.saved = checkpoint.last(run.folder / checkpoint.FOLDER)
    run.ranks.wait()  # for the first one's file
    if cfg.break_it.without:
        look_at_the_failure(run, list(done.batches.parts()))
    run.metrics.say(stamp(cfg.break_it.label) + what_to_try(run, numbers))
    if cfg.probe.every:
        find_the_fault(run, list(done.batches.parts()), done.rng)
    return 1


def close(run: Run) -> None:
    """Draws the last picture, and closes the writer and the metrics. Called at the end of every run, also after an
    error."""
    run.train_step.graphs.clear()  # before the connections that a recorded step uses
    try:
        if run.code and not run.saved:
            run.metrics.say("no checkpoint was saved, so there is nothing to resume: the same command starts again")
        if run.step:
            with suppress(OSError) if run.code else nullcontext():  # after an error, which is the one to say
                run.metrics.picture()
    finally:
        try:
            run.writer.close()
        except OSError as error:  # another error ended the run, and is said too
            run.metrics.say(str(error))
        finally:
            run.metrics.close(run.code)


if __name__ == "__main__":
    config.run(main, Config, "config", resumed=resumed_config, check=check, jobs_of=sweep)
