"""Train a GPT. This file is the whole run, from top to bottom: set up, loop, evaluate, sample, save.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER                 your own text
    python train.py break_it=no_max break_it.score_gain=100            remove one line of attention and see what happens
    python train.py experiment=shakespeare                             a recipe with a known result
    python train.py -m optimizer.lr=1e-3,2e-3 optimizer=adamw,muon     every combination, one after the other
    python train.py resume=auto                                        go on with the last run
    torchrun --nproc-per-node 2 train.py                               on two GPUs
    python train.py --help                                             every key, with its meaning

A run writes everything into runs/NAME: config.yaml, metrics.jsonl, loss.png, samples.txt, checkpoints, wandb.
"""

import os

# Before torch is loaded. On a busy machine idle OpenMP threads must not spin: they take the cores from others.
if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import math
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import hydra
import torch
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from data.dataset import Dataset, open_data
from data.loader import Batch, Loader, validation_batches
from data.made import SHORTEST
from data.tokenizer import END_OF_TEXT, TextStream, from_json, to_json
from model.attention import resolve
from model.generate import Sampler, generate
from model.gpt import GPT
from training import awake, config, machine, probe
from training.checkpoint import find_checkpoint, open_folder, restore, save_checkpoint, take_weights, tensors_of
from training.config import Config, configuration, fill_in, name_of, refuse_attention
from training.huggingface import find_weights
from training.metrics import Metrics
from training.optimizer import build_optimizers, learning_rate
from training.parallel import Ranks, join
from training.step import Numbers, Report, TrainStep, choose_way

STOP: list[int] = []  # signals received: Ctrl-C (SIGINT), SIGTERM


@dataclass
class Run:
    """What the loop needs."""

    cfg: Config  # with name, model.vocab_size, optimizer.lr and tokens_per_step filled in
    folder: Path  # runs/NAME
    lock: FileLock
    facts: dict  # commit, versions, device, dtype, attention
    ranks: Ranks
    dataset: Dataset
    loader: Loader
    train_step: TrainStep
    metrics: Metrics
    step: int = 0  # updates enqueued
    began: float = 0.0  # when the run's time was 0, by time.perf_counter(); time before a resume counts
    seconds: float = 0.0  # of the run, as all ranks have agreed
    signal: int = 0  # that ends the run; 0: none
    ended: bool = False  # the last step is made: number `steps`, or max_minutes are over
    unfinished: bool = False  # a signal has cut the evaluation of this step short
    val_loss: float | None = None  # after this step; None if it was not evaluated
    clock: float = 0.0  # when the last update's numbers arrived
    pace: float = 0.0  # seconds a step, a moving average

    def look_at_signals(self) -> int:
        """The signal that ends the run, the same on all ranks; 0 for none. Also sets the time."""
        elapsed = time.perf_counter() - self.began
        self.signal, self.seconds = self.ranks.agree(STOP[0] if STOP else 0, elapsed)
        return self.signal

    def asks_awake(self) -> bool:
        """Whether this is a broken run's step at which it looks whether the failure acts."""
        return bool(self.cfg.break_it.broken) and self.step in awake.LOOKS


config.register(Config, "config_schema")  # the schema and --help, before Hydra looks for them


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One run. Returns its best validation loss, which a sweeper such as Optuna's minimises. Exits with 1 for a mistake
    of the user's or a NaN (a sweep goes on with the next job), and with 128 + n after signal n."""
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        run = set_up(cfg)
    except (ValueError, OSError) as error:  # a mistake: one line. A program error keeps its traceback
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        print(f"train: {error}", file=sys.stderr, flush=True)
        if in_sweep:
            raise CompactHydraException(str(error)) from None
        sys.exit(1)
    code = 1
    try:
        code = train(run)
    except torch.OutOfMemoryError as error:
        less = f"batch_size={max(1, run.cfg.batch_size // 2)} tokens_per_step={run.cfg.tokens_per_step}"
        raise CompactHydraException(f"out of memory: {less} learns the same ({error})") from None
    finally:
        run.metrics.close(code)
        run.lock.release()
    run.ranks.leave()
    if code and not (code == 1 and in_sweep):
        sys.exit(code)
    return run.metrics.best[0]


# --- set up: the quick checks come first, and the folder is made after all of them


def set_up(typed: DictConfig) -> Run:
    """Configuration, data, model, optimizer, folder. ValueError for what cannot run."""
    resumed = find_checkpoint(typed.resume, Path(typed.runs), typed.name) if typed.resume else None
    parent = find_weights(typed.init_from, Path(typed.runs)) if typed.init_from and not resumed else None
    cfg = configuration(typed, resumed, parent)
    ranks = join(cfg.parallel, cfg.device)
    device = machine.pick_device(ranks.device)
    dtype = machine.pick_dtype(cfg.dtype, device)
    attention = resolve(cfg.attention, device.type, cfg.model.head_size, cfg.model.context_length, cfg.break_it)
    ranks.check(cfg, attention)
    refuse_attention(cfg, attention, device)
    way = choose_way(cfg.compile, device, attention, cfg.model, cfg.parallel.shard)
    facts = {**machine.about(device), "dtype": dtype, "attention": attention.impl, "step": way}

    begun = resumed or parent
    with ranks.first_goes_first():  # rank 0 prepares the data, the others open it
        dataset = open_data(cfg.data, cfg.tokenizer, from_json(begun.tokenizer) if begun else None,
                            cfg.model.context_length, cfg.runs)  # fmt: skip
    fill_in(cfg, dataset.encoding.n_vocab, ranks.data_size, device)
    loader = make_loader(cfg, dataset, ranks, cfg.length(resumed.step if resumed else 1))
    validation(cfg, dataset)  # ValueError for a text that is too short
    torch.manual_seed(cfg.seed)
    model = ranks.prepare(GPT(cfg.model, attention, cfg.break_it), device)
    optimizers = build_optimizers(model, cfg.optimizer)
    # Many gradients are below 6e-8, the smallest number in fp16, so the loss is multiplied by a power of two.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
    autocast = machine.set_precision(dtype, device)
    train_step = TrainStep(model, optimizers, scaler, autocast, way, cfg.optimizer.grad_clip, cfg.stop_on_nan, ranks)
    if parent:
        take_weights(parent, model, ranks)
    if ranks.size > 1:
        torch.manual_seed(cfg.seed + ranks.rank)  # each draws its own dropout
    if resumed:
        loader.load_state_dict(resumed.state["loader"])
        scaler.load_state_dict(resumed.state["scaler"])
        restore(resumed, model, optimizers, ranks)  # also the random state, so nothing may draw after it

    cfg.name = name_of(cfg, resumed)
    folder, step, state = Path(cfg.runs) / cfg.name, resumed.step if resumed else 0, resumed.state if resumed else {}
    lock = open_folder(folder, resumed, ranks)
    if ranks.first:
        OmegaConf.save(OmegaConf.create(asdict(cfg)), folder / "config.yaml")
    metrics = Metrics(folder, cfg.steps, cfg.break_it.label, step, ranks.first)
    run = Run(cfg, folder, lock, facts, ranks, dataset, loader, train_step, metrics, step)
    run.unfinished, run.began = state.get("unfinished", False), time.perf_counter() - state.get("seconds", 0.0)
    run.look_at_signals()
    introduce(run, begun.path if begun else None)
    metrics.begin_wandb(cfg.wandb, {**asdict(cfg), "about": facts})
    return run


def make_loader(cfg: Config, dataset: Dataset, ranks: Ranks, length: int) -> Loader:
    """The loader of the training text, in sequences of `length` tokens. A pass has as many tokens for any length."""
    return Loader(
        dataset.train, dataset.train_documents, batch_size=cfg.batch_size * cfg.model.context_length // length,
        context_length=length, seed=cfg.seed, with_documents=cfg.attention.documents,
        random_offset=cfg.data.source not in SHORTEST, rank=ranks.data_rank, world_size=ranks.data_size,
    )  # fmt: skip


def validation(cfg: Config, dataset: Dataset) -> Iterator[Batch]:
    """The validation batches, always the same ones."""
    size = cfg.batch_size, cfg.model.context_length, cfg.eval_tokens, cfg.attention.documents
    return validation_batches(dataset.val, dataset.val_documents, *size)


def introduce(run: Run, begun: Path | None) -> None:
    """The first lines: a run explains itself."""
    cfg, data, say, stamp = run.cfg, run.dataset, run.metrics.say, run.metrics.stamp
    say(f"{stamp}run: {run.folder}" + (f", from {begun}" if begun else ""))
    say(" | ".join(f"{name} {value}" for name, value in run.facts.items()))
    say(
        f"model: {run.train_step.model.parameter_count():,} parameters | data: {data.folder}, {len(data.train):,} "
        f"training tokens, {len(data.val):,} for validation | {cfg.tokens_per_step:,} tokens a step"
    )
    limit = f"{cfg.steps:,} steps" + (f" or {cfg.max_minutes:g} minutes" if cfg.max_minutes else "")
    if run.step:
        lr = learning_rate(cfg.place(run.step, run.seconds), cfg.steps, cfg.optimizer)
        limit += f", of which {run.step:,} steps and {run.seconds / 60:.1f} minutes are over; learning rate {lr:.2e}"
    will = "has made its" if is_last(run) else "trains for"
    say(f"{will} {limit}; at the end the learning rate is {cfg.optimizer.min_lr_ratio:g} of its peak")
    if stamp:
        say(f"{stamp}broken on purpose: this run's numbers and text are worth nothing")


# --- the loop


def on_signal(number: int, frame) -> None:
    """The first signal sets a flag, which the loop and evaluate() look at. A second one kills."""
    if STOP:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    STOP.append(number)
    os.write(2, b"\nstopping after this step; a second signal stops at once, without saving\n")  # print() may be busy


def train(run: Run) -> int:
    """Trains to the last step, the time limit, a signal or a NaN. Returns the exit code. The host is up to two updates
    ahead of a GPU: it enqueues one, then logs the one before. So the GPU never waits."""
    cfg, train_step = run.cfg, run.train_step
    pending: deque[tuple[int, float, Report, Batch, dict]] = deque()  # numbers have not arrived yet
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    train_step.model.train()
    run.ended = is_last(run)
    stopped = run.unfinished and finish_step(run)
    run.clock = time.perf_counter()
    while not run.ended and not stopped:
        batch = next_batch(run)
        run.step += 1
        lr = learning_rate(cfg.place(run.step, run.seconds), cfg.steps, cfg.optimizer)
        rng = machine.rng_state() if cfg.probe.every else {}  # before the step: dropout is then that of the step
        pending.append((run.step, lr, train_step(batch, lr), batch, rng))
        run.look_at_signals()
        run.ended = is_last(run)
        every = (cfg.eval_every, cfg.sample_every, cfg.checkpoint_every, cfg.probe.every)
        due = run.signal or run.ended or run.asks_awake() or any(n and run.step % n == 0 for n in every)
        while pending and (due or len(pending) > train_step.ahead):
            step, lr, report, batch, rng = pending.popleft()
            if (numbers := log(run, step, lr, report)).stopped:
                return stop_at_nan(run, step, numbers, batch, rng)
        if due:
            stopped = finish_step(run)
            run.clock = time.perf_counter()
    run.metrics.draw(last=True)
    again = f"python train.py resume=auto name={cfg.name}" + f" runs={cfg.runs}" * (cfg.runs != "runs")
    if stopped:
        run.metrics.say(f"stopped at step {run.step}, saved; to go on: {again}")
        return 128 + run.signal
    best = "best validation loss {:.4f} at step {}".format(*run.metrics.best)
    more = f"max_minutes={2 * cfg.max_minutes:g}" if cfg.max_minutes else f"steps={2 * cfg.steps}"
    run.metrics.say(f"{run.metrics.stamp}done: {best}; all in {run.folder}\nnext: {again} {more}")
    return 0


def is_last(run: Run) -> bool:
    """Whether the run's last step is made."""
    return run.step >= run.cfg.steps or run.seconds >= 60 * (run.cfg.max_minutes or math.inf)


def next_batch(run: Run) -> Batch:
    """The batch of the next step, (passes, B, T). No thread draws ahead: it takes a millisecond."""
    cfg, length = run.cfg, run.cfg.length(run.step + 1)
    if length != run.loader.context_length:  # the warm-up of the length is over
        run.loader = make_loader(cfg, run.dataset, run.ranks, length)
    assert cfg.tokens_per_step is not None, "fill_in() has set it"
    count = cfg.tokens_per_step // (cfg.batch_size * cfg.model.context_length * run.ranks.data_size)
    x, y, documents = zip(*(run.loader.next() for _ in range(count)), strict=True)
    return Batch(torch.stack(x), torch.stack(y), None if documents[0] is None else torch.stack(documents))


def log(run: Run, step: int, lr: float, report: Report) -> Numbers:
    """Waits for an update and logs it."""
    cfg, model, device = run.cfg, run.train_step.model, run.train_step.device
    numbers, now = report.numbers(), time.perf_counter()
    seconds, run.clock = now - run.clock, now
    run.pace = seconds if run.train_step.steps <= 4 else 0.9 * run.pace + 0.1 * seconds  # the first ones compile
    left = min(run.pace * (cfg.steps - step), 60 * (cfg.max_minutes or math.inf) - run.seconds)
    peak = machine.peak_flops(device) if run.facts["dtype"] != "float32" else None
    speed = (cfg.tokens_per_step or 0) / seconds
    record = {"step": step, "loss": numbers.loss, "lr": lr, "grad_norm": numbers.grad_norm, "ms": seconds * 1e3,
              "tokens_per_second": speed, "memory_gib": machine.memory_gib(device), "eta_s": max(0.0, left),
              "mfu": model.flops_per_token(cfg.length(step)) * speed / peak / run.ranks.size if peak else None
              }  # fmt: skip
    if run.train_step.scaler.is_enabled():
        record["loss_scale"] = numbers.loss_scale
    if step % cfg.log_every == 0 or step == cfg.steps or numbers.stopped:
        run.metrics.log(record)
    return numbers


def stop_at_nan(run: Run, step: int, numbers: Numbers, batch: Batch, rng: dict) -> int:
    """Says what to try, and with probe.every the first tile with a NaN. The weights are those before the update."""
    say, one, run.step = run.metrics.say, run.train_step, step  # later updates were left out
    say(f"{run.metrics.stamp}step {step}: loss {numbers.loss}, norm {numbers.grad_norm}: stopped before the update")
    say(f"try: a lower optimizer.lr (it is {run.cfg.optimizer.lr:g}); dtype=float32; probe.every=100, to find the tile")
    if run.cfg.probe.every:
        with one.uncompiled():
            found = probe.search(one.model, list(batch.parts()), rng, one.device, one.autocast)
        say(f"  probe: {found[0]}" if found else "  probe: the NaN does not begin in attention")
        if found:
            say(f"  to see it again: python breakit.py replay={save(run, 'faults', found[1])}")
    run.metrics.draw(last=True)
    return 1


# --- between two steps: evaluate, sample, save


def finish_step(run: Run) -> bool:
    """Evaluates, samples and saves, as far as it is due after this step. Returns whether a signal ends the run. An
    evaluation that a signal cuts short is left for the resumed run, which begins with it."""
    cfg, due = run.cfg, lambda every: bool(every) and (run.ended or run.step % every == 0)
    if run.asks_awake() or (cfg.probe.every and run.step % cfg.probe.every == 0):
        look(run)
    run.val_loss = evaluate(run) if due(cfg.eval_every) else None
    run.unfinished = due(cfg.eval_every) and run.val_loss is None
    if due(cfg.sample_every) and not run.unfinished:
        sample(run)
    if run.signal or due(cfg.checkpoint_every):
        save(run)
    run.metrics.draw()
    return bool(run.signal)


def evaluate(run: Run) -> float | None:
    """Logs the mean loss over the validation windows and returns it; None if a signal has come meanwhile."""
    losses, counts, sizes = [], [], []  # nats a token, tokens, bytes of this rank's batches
    run.train_step.model.eval()
    for batch, mine in run.ranks.shares(validation(run.cfg, run.dataset)):
        if run.look_at_signals():
            break
        loss, y = run.train_step.loss_of(batch), run.ranks.cut(batch)[1]
        losses.append(loss)
        counts.append(y.numel() * mine)
        sizes.append(int(run.dataset.token_bytes[y.numpy()].sum()) * mine)
    run.train_step.model.train()
    if run.signal:
        return None
    summed = sum(float(loss) * n for loss, n in zip(losses, counts, strict=True))
    nats, tokens, size = run.ranks.sum([summed, sum(counts), sum(sizes)])
    record = {"val_loss": nats / tokens, "val_bits_per_byte": nats / math.log(2) / size, "seconds": run.seconds}
    run.metrics.log({"step": run.step, **record})
    return nats / tokens


def look(run: Run) -> None:
    """Logs the probe's gauges of attention on the first validation sequence; of a broken run also whether it acts."""
    step, rng = run.train_step, machine.rng_state()
    x, y, documents = next(validation(run.cfg, run.dataset)).each(lambda part: part[:1]).to(step.device)
    with step.autocast, step.uncompiled():  # in training mode, for dropout
        calls = probe.record(step.model, x, documents, y)
        found = awake.effects(calls) if run.asks_awake() else []
    machine.set_rng_state(rng)  # training's random numbers stay as they are
    run.metrics.log({"step": run.step, **probe.reading(calls), **(awake.record_of(found) if found else {})})
    if run.asks_awake():
        run.metrics.say(run.metrics.stamp + awake.in_words(found, run.cfg, run.step))


def sample(run: Run) -> None:
    """Writes the model's text after an end-of-text token, where documents begin."""
    model, encoding, device = run.train_step.model.eval(), run.dataset.encoding, run.train_step.device
    stream, end = TextStream(encoding), encoding.encode_single_token(END_OF_TEXT)
    generator = torch.Generator(device).manual_seed(run.cfg.seed)  # its own: training's random numbers stay as they are
    try:
        with run.train_step.autocast, run.train_step.uncompiled():
            # FSDP2 gathers weights on all ranks together: all make all tokens, without a cache, which has a CUDA graph.
            made = [*generate(model, torch.tensor([[end]], device=device), run.cfg.sample_tokens, Sampler(), generator,
                              cache=not run.cfg.parallel.shard)]  # fmt: skip
            ids = (token for token in takewhile(end.__ne__, map(int, made)) if token < encoding.n_vocab)
            text = "".join(map(stream.feed, ids)) + stream.flush()
        run.metrics.sample(run.step, text)
    except ValueError as error:  # the logits are NaN
        run.metrics.say(f"{run.metrics.stamp}no sample at step {run.step}: {error}")
    model.train()


def save(run: Run, into: str = "checkpoints", fault: dict | None = None) -> Path:
    """Saves a checkpoint: all that a resumed run needs to be the same run. fault: saved in place of the optimizer."""
    step, cfg = run.train_step, run.cfg
    state = {"config": asdict(cfg), "about": run.facts, "broken": cfg.break_it.label, "val_loss": run.val_loss,
             "loader": run.loader.state_dict(), "scaler": step.scaler.state_dict(), "unfinished": run.unfinished,
             "seconds": run.seconds}  # fmt: skip
    weights, training = tensors_of(step.model, step.optimizers, run.ranks)
    if not run.ranks.first:
        return run.folder
    text, folder = to_json(run.dataset.encoding), run.folder / into
    return save_checkpoint(folder, run.step, weights, fault or training, state, text, cfg.keep_last)


if __name__ == "__main__":
    config.refuse_unknown(sys.argv[1:], Config, "train")
    main()
