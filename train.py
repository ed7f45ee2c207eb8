"""Train a GPT. This file is the whole run, from top to bottom: set up, loop, evaluate, sample, save.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER                 your own text
    python train.py break_it=no_max break_it.score_gain=100            remove one line of attention and see what happens
    python train.py experiment=shakespeare                             a recipe with a known result
    python train.py -m optimizer.lr=1e-3,2e-3 optimizer=adamw,muon     every combination, one after the other
    python train.py resume=auto                                        go on with the last run
    torchrun --nproc-per-node 2 train.py                               on two GPUs
    python train.py --help                                             every key, with its meaning

A run writes into runs/NAME: config.yaml, typed.txt, metrics.jsonl, loss.png, samples.txt, checkpoints.
"""

import training  # noqa: F401 (before torch, because it sets how OpenMP's idle threads wait)

# isort: split
import gc
import math
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from data.dataset import Dataset, open_data
from data.loader import Batch, Loader, stacked, validation_batches
from data.made import MADE
from data.tokenizer import beginning, from_json, to_json, to_text
from model.attention import resolve
from model.generate import Sampler, generate
from model.gpt import GPT
from training import machine, probe
from training.checkpoint import FOLDER, find_checkpoint, open_folder, restore, save_checkpoint, take_weights, tensors_of
from training.config import Config, as_text, configuration, fill_in, name_of, read_arguments, refuse_attention, to_type
from training.huggingface import find_weights
from training.metrics import Metrics
from training.optimizer import build_optimizers, learning_rate
from training.parallel import Ranks, join
from training.step import Pending, StepStats, TrainStep, choose_mode

SIGNALS: list[int] = []  # received: Ctrl-C (SIGINT), SIGTERM


@dataclass
class Clock:
    """A run's time, and the signal that ends it. Both are the same on all ranks."""

    ranks: Ranks
    seconds: float  # at the last sync(); the time before a resume counts
    signal: int = 0  # 0: none
    zero: float = 0.0  # when `seconds` was 0, by time.perf_counter()

    def start(self) -> None:
        self.zero = time.perf_counter() - self.seconds

    def sync(self) -> int:
        """Sets both, on the hosts: no GPU waits. Returns the signal."""
        self.signal, self.seconds = self.ranks.agree(SIGNALS[0] if SIGNALS else 0, time.perf_counter() - self.zero)
        return self.signal


@dataclass
class Run:
    """What the loop needs."""

    cfg: Config  # name and what fill_in() sets are no longer None
    lock: FileLock
    facts: dict  # commit, versions, device, dtype, attention, mode
    ranks: Ranks
    dataset: Dataset
    loader: Loader
    validation: list[Batch]  # what an evaluation measures, always the same batches
    train_step: TrainStep
    metrics: Metrics
    tokens_per_step: int
    clock: Clock
    step: int  # updates enqueued
    unfinished: bool  # a signal has cut the evaluation of this step short

    def is_over(self) -> bool:
        """Whether the last step is made: number `steps`, or max_minutes are over."""
        return self.step >= self.cfg.steps or self.clock.seconds >= 60 * (self.cfg.max_minutes or math.inf)

    def due(self) -> set[str]:
        """What is to be done after this step: keys of 0 never, others also after the last. "failure": probe.STEPS."""
        cfg, step, over = self.cfg, self.step, self.is_over()
        every = {"probe": cfg.probe.every, "evaluate": cfg.eval_every, "sample": cfg.sample_every,
                 "save": cfg.checkpoint_every}  # fmt: skip
        due = {what for what, n in every.items() if n and (over or step % n == 0)}
        due |= {"failure"} if cfg.break_it.broken and step in probe.STEPS else set()  # does what is removed matter?
        return due | ({"save"} if "evaluate" in due or self.clock.signal else set())  # to keep the best, or go on later


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One run. Returns its best validation loss, which a sweeper such as Optuna's minimises. Exits with 1 for a mistake
    of the user's or a NaN (a sweep goes on with the next job), and with 128 + n after signal n."""
    code, best, why = one_run(cfg)
    gc.collect()  # otherwise the next job of a sweep has this one's model beside its own
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if why:
        print(f"train: {why}", file=sys.stderr, flush=True)
    if why and in_sweep:
        raise CompactHydraException(why)  # here: Hydra keeps the traceback, which in one_run() would hold the model
    if code and not (code == 1 and in_sweep):  # after a NaN a sweep goes on with its next job
        sys.exit(code)
    return best


def one_run(cfg: DictConfig) -> tuple[int, float, str]:
    """The exit code, the best validation loss, and one line on what ended the run (a program error has a traceback)."""
    run, code, why, best = None, 1, "", math.inf
    try:
        run = set_up(cfg)
        code = train(run)
    except KeyboardInterrupt:  # in a process's first set_up(): once it has begun to train(), a signal sets a flag
        code = 130
    except torch.OutOfMemoryError as error:
        less = run and f"a divisor of batch_size={run.cfg.batch_size} with tokens_per_step={run.tokens_per_step}"
        why = f"out of memory: use {less or 'a smaller model'}, or model.recompute=true ({error})"
    except (ValueError, OSError, SafetensorError) as error:  # a user's mistake, or a full disk
        if run and isinstance(error, ValueError):  # after set_up() it is a program error
            raise
        why = f"{error}; earlier checkpoints, if any, are in {run.metrics.folder}" if run else str(error)
    finally:
        if run:
            best = run.metrics.best[0]
            run.metrics.close(code)
            run.lock.release()
    if run and not why:  # why may be of this rank alone, and leave() waits for all
        run.train_step.graph = None  # or NCCL would wait for it for ever (pytorch/pytorch#115388)
        run.ranks.leave()
    return code, best, why


# --- set up: the quick checks come first, and the folder is made after all of them
def set_up(composed: DictConfig) -> Run:
    """Configuration, data, model, optimizer, folder. ValueError for what cannot run."""
    resumed = find_checkpoint(composed.resume, Path(composed.runs), composed.name) if composed.resume else None
    parent = find_weights(composed.init_from, Path(composed.runs)) if composed.init_from and not resumed else None
    cfg, source = configuration(composed, resumed, parent), resumed or parent
    ranks = join(cfg.parallel, cfg.device)
    device = machine.pick_device(ranks.device)
    dtype = machine.pick_dtype(cfg.dtype, device)
    T = cfg.model.context_length
    attention_config = resolve(cfg.attention, device.type, cfg.model.head_size, T, cfg.break_it)
    ranks.check(cfg, attention_config)
    refuse_attention(cfg, attention_config, dtype, device)
    mode = choose_mode(cfg.compile, device, attention_config, cfg.model, cfg.parallel.shard)
    facts = {**machine.about(device), "dtype": dtype, "attention": attention_config.impl, "mode": mode}

    kept = from_json(source.tokenizer) if source else None  # for tokenizer=kept
    with ranks.main_process_first():  # rank 0 prepares the data, the others open it
        dataset = open_data(cfg.data, cfg.tokenizer, kept, T, cfg.runs)
    tokens_per_step = fill_in(cfg, dataset.encoding.n_vocab, len(dataset.train), ranks.data_size, device)  # fills cfg
    step, state = (resumed.step, resumed.state) if resumed else (0, {})
    documents = (dataset.train_documents, dataset.val_documents) if cfg.attention.documents else (None, None)
    validation = validation_batches(dataset.val, documents[1], cfg.batch_size, T, cfg.eval_tokens)
    loader = Loader(dataset.train, documents[0], batch_size=cfg.batch_size, context_length=T, seed=cfg.seed,
                    random_offset=cfg.data.source not in MADE,  # a made document is one window
                    rank=ranks.data_rank, world_size=ranks.data_size)  # fmt: skip
    torch.manual_seed(cfg.seed)
    model = ranks.prepare(GPT(cfg.model, attention_config, cfg.break_it), device)  # GPT() is alike on all ranks
    optimizers = build_optimizers(model, cfg.optimizer)
    # Many gradients are below 6e-8, the smallest number in fp16, so the loss is multiplied by a power of two.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
    machine.set_precision(dtype)
    train_step = TrainStep(model, optimizers, scaler, machine.autocast(dtype, device), mode,
                           cfg.optimizer.grad_clip, cfg.stop_on_nan, ranks)  # fmt: skip
    if parent:
        take_weights(parent, model)
    if resumed:
        loader.load_state_dict(state["loader"])
        scaler.load_state_dict(state["scaler"])
        restore(resumed, model, optimizers, ranks)  # also the random state, so nothing may draw after it

    cfg.name = name_of(cfg, resumed)
    folder = Path(cfg.runs) / cfg.name
    lock = open_folder(folder, resumed, ranks)
    metrics = Metrics(folder, 0 if cfg.max_minutes else cfg.steps, cfg.break_it.label, step, ranks.is_main)
    run = Run(cfg, lock, facts, ranks, dataset, loader, validation, train_step, metrics, tokens_per_step,
              Clock(ranks, state.get("seconds", 0.0)), step, state.get("unfinished", False))  # fmt: skip
    introduce(run, source.path if source else None)
    metrics.begin_wandb(cfg.wandb, {**asdict(cfg), "about": facts})
    return run


def introduce(run: Run, source: Path | None) -> None:
    """The first lines and files: a run explains itself."""
    cfg, data, say, folder = run.cfg, run.dataset, run.metrics.say, run.metrics.folder
    if run.ranks.is_main:
        OmegaConf.save(OmegaConf.create(as_text(asdict(cfg))), folder / "config.yaml")
        if run.step == 0 or not (folder / "typed.txt").exists():  # else it is resumed
            (folder / "typed.txt").write_text(shlex.join(HydraConfig.get().overrides.task), encoding="utf-8")
    say(f"run: {folder}" + (f", from {source}" if source else ""))
    say(" | ".join(f"{name} {value}" for name, value in run.facts.items()))
    epoch = f"{run.tokens_per_step:,} tokens a step, {len(data.train) / run.tokens_per_step:,.1f} steps an epoch"
    say(f"{run.train_step.model.parameter_count():,} parameters | {data.folder}: {len(data.train):,} tokens | {epoch}")
    lr = learning_rate(cfg.schedule_step(min(run.step + 1, cfg.steps), run.clock.seconds), cfg.steps, cfg.optimizer)
    end = f"step {cfg.steps:,}" + (f" or minute {cfg.max_minutes:g}" if cfg.max_minutes else "")
    before = run.metrics.lr or lr  # of the last step before a resume
    rate = f"{lr:.2e}" if math.isclose(lr, before, rel_tol=0.5) else f"{lr:.2e} where it was {before:.2e}"
    say(f"trains from step {run.step:,} (minute {run.clock.seconds / 60:.1f}, rate {rate}) to {end}")


# --- the loop
def on_signal(number: int, frame) -> None:
    """The first signal sets a flag, which the loop and evaluate() look at. A later one kills, as is the default."""
    SIGNALS.append(number)
    time.sleep(0.5)  # `timeout` sends a signal twice at once: the second comes meanwhile and kills nothing
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    with suppress(OSError):  # Ctrl-C has ended tee in `2>&1 | tee log`. Not print(), which may be busy
        os.write(2, b"\nstopping after this step; a second signal stops at once, without saving\n")


def train(run: Run) -> int:
    """Returns the exit code. On a GPU up to train_step.ahead updates are enqueued behind the one that the host logs."""
    cfg, train_step, clock, say = run.cfg, run.train_step, run.clock, run.metrics.say
    pending: list[Pending] = []
    micro_batches = run.tokens_per_step // (cfg.batch_size * cfg.model.context_length * run.ranks.data_size)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    train_step.model.train()
    clock.start()
    if run.is_over() and not run.unfinished:
        say(f"nothing to train: it has made {run.step} steps in {clock.seconds / 60:.1f} minutes")
    if run.unfinished:
        finish_step(run)
    logged_at, first = time.perf_counter(), run.step + 1
    while not (clock.signal or run.is_over()):
        batch = stacked(run.loader.next() for _ in range(micro_batches))
        run.step += 1
        lr = learning_rate(cfg.schedule_step(run.step, clock.seconds), cfg.steps, cfg.optimizer)  # by step or clock
        rng = machine.rng_state() if cfg.probe.every else {}  # a search for this step's NaN drops the same weights
        pending.append(Pending(run.step, lr, train_step(batch, lr), batch, rng))  # train_step() enqueues the update
        if run.step == first:  # not counted, as it may compile: the clock goes back
            clock.start()
        clock.sync()
        due = run.due()
        while pending and (due or len(pending) > train_step.ahead):  # after the last step or a signal none stays
            update = pending.pop(0)
            stats, now = update.stats.wait(), time.perf_counter()
            log(run, update, stats, now - logged_at)
            logged_at = now
            if stats.stopped:
                return stop_at_nan(run, update, stats)
        if due:
            finish_step(run)
            logged_at = time.perf_counter()
    loss, at = run.metrics.best
    again = to_type("train.py", "resume=auto", f"name={cfg.name}", f"runs={cfg.runs}")
    if clock.signal:
        say(f"stopped at step {run.step}, saved; to go on: {again}")
        return 128 + clock.signal
    more = f"max_minutes={2 * cfg.max_minutes:g}" if cfg.max_minutes else f"steps={2 * max(cfg.steps, run.step)}"
    say(f"done: best validation loss {loss:.4f} at step {at}; all in {run.metrics.folder}")
    fewer = (at + min(at + cfg.eval_every, run.step)) // 2  # between the best evaluation and the next
    say(f"next: {again} {more}" if at in (0, run.step) else f"next: a new run, steps={fewer}: the loss rose later")
    return 0


def log(run: Run, update: Pending, stats: StepStats, seconds: float) -> None:
    """Logs an update that took so many seconds."""
    cfg, step, train_step, device = run.cfg, update.step, run.train_step, run.train_step.device
    speed = run.tokens_per_step / seconds
    limit = 60 * (cfg.max_minutes or math.inf)
    pace = run.clock.seconds / max(1, step - 1)  # the clock begins after the first step
    left = max(0.0, min(pace * (cfg.steps - step), limit - run.clock.seconds))
    peak = machine.peak_flops(run.facts["device"]) if run.facts["dtype"] != "float32" else None
    flops = train_step.model.flops_per_token(cfg.model.context_length) * speed / run.ranks.size
    record = {"step": step, "loss": stats.loss, "lr": update.lr, "grad_norm": stats.grad_norm, "ms": seconds * 1e3,
              "tokens_per_second": speed, "memory_gib": machine.memory_gib(device),
              "eta_s": left if step > 1 else None, "mfu": flops / peak if peak else None,
              "loss_scale": stats.loss_scale}  # fmt: skip
    if step % cfg.log_every == 0 or stats.stopped:
        run.metrics.log(record)
    if step == 3 and limit < 50 * seconds:  # the first two are slower
        few = f"max_minutes={cfg.max_minutes:g}: only some {limit / seconds:.0f} steps fit"
        run.metrics.say(f"{few}: raise it, or lower tokens_per_step, batch_size or model.context_length")


def stop_at_nan(run: Run, update: Pending, stats: StepStats) -> int:
    """Saves the weights before the update, and says what to try; with probe.every also the first tile with a NaN."""
    cfg, say, step = run.cfg, run.metrics.say, update.step
    say(f"step {step}: loss {stats.loss}, norm {stats.grad_norm}: stopped before the update")
    run.step = step - 1  # later updates were skipped, too; the loader is past their batches and this one
    if run.step > 0:
        save(run)
    lower = f"optimizer.lr={(cfg.optimizer.lr or 0) / 2:g}"
    again = to_type("train.py", "resume=auto", f"name={cfg.name}", f"runs={cfg.runs}", lower)
    other = "" if run.facts["dtype"] == "float32" else "dtype=float32 or "
    advice = f"try {other}a lower rate: {again if run.step else lower}"
    say("docs/break-it.md says which failures end in NaN, and when" if cfg.break_it.broken else advice)
    if not cfg.probe.every:
        say("probe.every=100 finds the tile with the first NaN")
    elif found := probe.search(run.train_step, update.batch, update.rng):  # where, and what replays it
        say(f"  probe: {found[0]}")
        run.step = step
        folder = save(run, into="faults", fault=found[1])
        say(f"  to see it again: {to_type('breakit.py', f'replay={folder}')}")
    else:
        say("  probe: the NaN does not begin in attention")
    return 1


# --- between two steps: evaluate, sample, save
def finish_step(run: Run) -> None:
    """Does what is due. A signal in evaluate() leaves the step unfinished: a resumed run begins with evaluate()."""
    due = run.due()
    if due & {"probe", "failure"} and not run.unfinished:  # else it was done before the resume
        probe_attention(run, "failure" in due)
    val_loss = evaluate(run) if "evaluate" in due else None
    run.unfinished = "evaluate" in due and val_loss is None
    due = run.due()  # evaluate() takes time, in which the run may come to its end: then more is due
    if "sample" in due and not run.unfinished:
        sample(run)
    if "save" in due:
        save(run, val_loss)
    run.metrics.draw()


def evaluate(run: Run) -> float | None:
    """Logs the mean loss over the validation windows and returns it; None if a signal has come meanwhile."""
    nats, tokens, size = 0.0, 0.0, 0.0  # of this rank's batches; size in bytes
    run.train_step.model.eval()
    for batch, real in run.ranks.shares(run.validation):
        if run.clock.sync():
            break
        loss, y = float(run.train_step.loss_of(batch)), run.ranks.cut(batch)[1]  # y: the targets of this rank
        if real:  # else a dummy, so that all ranks make as many forwards
            nats += loss * y.numel()
            tokens += y.numel()
            size += int(run.dataset.token_bytes[y.numpy()].sum())
    run.train_step.model.train()
    if run.clock.signal:
        return None
    nats, tokens, size = run.ranks.sum([nats, tokens, size])
    record = {"val_loss": nats / tokens, "val_bits_per_byte": nats / math.log(2) / size, "seconds": run.clock.seconds}
    run.metrics.log({"step": run.step, **record})
    return nats / tokens


def probe_attention(run: Run, failure: bool) -> None:
    """Logs the probe's gauges of attention on the first validation sequence. failure: also whether the failure acts."""
    train_step, rng = run.train_step, machine.rng_state()
    x, y, documents = run.validation[0].each(lambda part: part[:1]).to(train_step.device)
    with train_step.autocast, train_step.uncompiled():  # in training mode, for dropout
        calls = probe.record(train_step.model, x, documents, y)
        found = probe.effects(calls) if failure else []
    machine.set_rng_state(rng)  # training's random numbers stay as they are
    errors = {f"{of}_error": effect.error for of, effect in probe.worst(found).items()}
    run.metrics.log({"step": run.step, **probe.reading(calls), **errors})
    if failure:
        run.metrics.say(probe.in_words(found, run.cfg.break_it, run.step))


def sample(run: Run) -> None:
    """Writes a document of the model's."""
    model, encoding, device = run.train_step.model.eval(), run.dataset.encoding, run.train_step.device
    generator = torch.Generator(device).manual_seed(run.cfg.seed)  # its own: training's random numbers stay as they are
    begin, text = torch.tensor([beginning(encoding)], device=device), ""
    cache = not run.cfg.parallel.shard  # decoding with one may be a CUDA graph, which cannot have FSDP2's hooks
    on_nan = nullcontext() if run.cfg.stop_on_nan else suppress(ValueError)  # NaN in logits: no text
    with run.train_step.autocast, run.train_step.uncompiled(), on_nan:
        made = map(int, generate(model, begin, run.cfg.sample_tokens, Sampler(), generator, cache))
        text = "".join(to_text(encoding, made))
    run.metrics.sample(run.step, text)
    model.train()


def save(run: Run, val_loss: float | None = None, into: str = FOLDER, fault: dict | None = None) -> Path:
    """Saves all that a resumed run needs to be the same run. fault: a batch in place of the optimizer."""
    train_step, cfg = run.train_step, run.cfg
    state = {"config": asdict(cfg), "about": run.facts, "broken": cfg.break_it.label, "val_loss": val_loss,
             "loader": run.loader.state_dict(), "scaler": train_step.scaler.state_dict(), "unfinished": run.unfinished,
             "seconds": run.clock.seconds}  # fmt: skip
    weights, optimizer = tensors_of(train_step.model, train_step.optimizers, run.ranks)
    folder, tokenizer = run.metrics.folder / into, to_json(run.dataset.encoding)
    if not run.ranks.is_main:
        return folder
    return save_checkpoint(folder, run.step, weights, fault or optimizer, state, tokenizer, cfg.keep_last)


if __name__ == "__main__":
    read_arguments(Config, "train")
    main()
