"""A run, and what it does between its steps: it evaluates, samples, looks at attention, draws and saves.

    while needs_all(run, signals): ...         train.py hears of every update that was sent, and then calls
    between_steps(run, signals)                what is due after this step

A signal interrupts an evaluation, a sample or a measurement. The run saves at once, and a resumed run begins with what
was left.

train.py makes the Run and its steps. Nothing here changes what is learned, nor training's random numbers.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from data.dataset import Dataset
from data.loader import Batch, Prefetch, fingerprint, validation_batches
from data.tokenizer import END_OF_TEXT, TextStream, to_json
from model.gpt import GPT
from parallel.processes import Ranks
from parallel.shard import copy_of
from sampling.generate import Kept, NotFinite, Sampler, generate
from training import awake, checkpoint, context
from training.machine import DTYPES, Signals, Stopping
from training.metrics import Metrics, read_metrics, read_samples, stamp
from training.probe import reading, record, search
from training.record import Report
from training.step import TrainStep

T = TypeVar("T")


class Sent(NamedTuple):
    """An update that was enqueued, and what is kept until its numbers arrive."""

    step: int
    batches: Batch  # on the CPU, with an axis in front: the passes
    rng: dict[str, torch.Tensor]  # the random state before it, for the probe and for looks at a failure; else {}
    lr: float
    report: Report
    text_bytes: int | None = None  # of all ranks' targets; None: to be counted, in a single process


@dataclass
class Run:
    """All that belongs to a run. set_up() makes it, and the functions below use it."""

    cfg: Any  # train.Config, with name, model.vocab_size and optimizer.lr filled in
    folder: Path  # runs/NAME
    facts: dict[str, str | int]  # machine, versions, dtype, attention
    device: torch.device
    autocast: AbstractContextManager
    dataset: Dataset
    batches: Prefetch  # of the training text
    accumulation: int  # forward and backward passes per step, of all ranks
    model: GPT  # the model that is trained
    averaged: GPT  # the model that is evaluated, sampled and saved: a moving average of `model`, or `model` itself
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # scales the loss in fp16; does nothing for other dtypes
    train_step: TrainStep  # makes one update
    metrics: Metrics
    ranks: Ranks  # the processes that train together
    step: int  # updates enqueued so far
    saved: Path | None  # the last checkpoint; complete after writer.wait()
    caught: Signals  # the signals that this process has received
    unfinished: bool  # whether something is left to do that was due after this step
    writer: checkpoint.Writer = field(default_factory=checkpoint.Writer)
    ending: bool = False  # this step is the last one: it is number `steps`, or max_minutes are over
    val_loss: float = math.inf  # validation loss after this step; inf if the step was not evaluated
    sent: deque["Sent"] = field(default_factory=deque)  # updates enqueued and not yet heard of, oldest first
    pace: float | None = None  # seconds a step, smoothed
    left: float = math.inf  # seconds until max_minutes are over
    context: dict[str, float] | None = None  # what the context was worth before the first step, if it was measured
    acts: bool | None = None  # whether what break_it has taken out changes anything; None: not looked yet
    writing: "Writing | None" = None  # what writes samples, if it is kept
    code: int = 1  # exit code; loop() sets it when it returns

    @cached_property
    def tokens_per_step(self) -> int:
        """Number of tokens per update."""
        return self.accumulation * self.cfg.batch_size * self.cfg.model.context_length

    def flops_per_step(self, length: int) -> float:
        """Floating-point operations of one update of sequences of `length` tokens, forward and backward."""
        return self.model.flops_per_token(length) * self.tokens_per_step


def between_steps(run: Run, signals: list[int]) -> list[int]:
    """Looks at attention, evaluates, samples and saves, each if it is due. Returns the signals that any rank received.

    After a signal it only saves. The resumed run does what is still due.
    """
    made = run.ranks.same(recorded(run)) if run.unfinished else {}
    run.val_loss = made.get("val_loss", math.inf)
    left = [activity for key, activity in activities(run).items() if key not in made]
    with suppress(Stopping):
        while left and not signals:
            left[0](run)
            left.pop(0)
    run.unfinished = run.ranks.same(bool(left))
    signals = list(run.ranks.hear(signals or run.caught, 0, 0).signals)  # one that comes now is for the next step
    if signals or due(run, run.cfg.checkpoint_every):
        run.saved = save(run)
    if run.val_loss < math.inf and (run.ending or run.metrics.time_to_draw()):
        run.metrics.draw_later()
    run.ranks.wait()  # for the first, which samples and saves: a GPU that waits for another gives up after some minutes
    return signals


def activities(run: Run) -> dict[str, Callable[[Run], None]]:
    """What is due after this step besides a checkpoint, in its order, each by a key of what it records."""
    cfg = run.cfg
    if run.step == 0:  # of weights as they come, to compare with
        return {"context_ms": measure_the_context} if cfg.context_every and cfg.init_from else {}
    table: tuple[tuple[str, Callable[[Run], None], bool], ...] = (
        ("probe_ms", look, cfg.probe.every > 0 and run.step % cfg.probe.every == 0),
        ("probe_ms", look_at_the_failure, failure_is_looked_at(run)),
        ("val_loss", evaluate, due(run, cfg.eval_every)),
        ("sample", sample, cfg.sample_tokens > 0 and due(run, cfg.sample_every)),
        ("context_ms", measure_the_context, due(run, cfg.context_every)),
    )
    return {key: activity for key, activity, is_due in table if is_due}


def recorded(run: Run) -> dict[str, Any]:
    """What the run recorded after this step before it was stopped: the values by their keys, "sample" if it has one."""
    lines, samples = run.folder / "metrics.jsonl", run.folder / "samples.txt"
    found: dict[str, Any] = {}
    if run.ranks.first:
        for record in read_metrics(lines):
            found |= record if record["step"] == run.step else {}
        if any(step == run.step for step, _ in read_samples(samples)):
            found["sample"] = True
    return found


def together(run: Run, items: Iterable[T], turns: int = 1) -> Iterator[T]:
    """The items, until any rank has received a signal. All ranks hear of it before the same item, and raise Stopping:
    one that stopped alone would leave the others waiting. turns: so many items, of which each rank computes one, come
    between two such messages. A message within them would make the ranks wait for each other's item."""
    for i, item in enumerate(items):
        if i % turns == 0 and (signals := run.ranks.hear(run.caught, 0, 0).signals):
            raise Stopping(signals[0])
        yield item


def needs_all(run: Run, signals: list[int]) -> bool:
    """Whether something is due after this step, so that all updates sent have to be heard of first."""
    return bool(signals) or due(run, run.cfg.checkpoint_every) or bool(activities(run))


def due(run: Run, every: int, step: int | None = None) -> bool:
    """Whether `step`, by default the current one, is a multiple of `every` or the last step. False if either is 0."""
    step = run.step if step is None else step
    return every > 0 and step > 0 and (step % every == 0 or (run.ending and step == run.step))


def failure_is_looked_at(run: Run) -> bool:
    """Whether a broken run looks after this step if its failure acts."""
    return bool(run.cfg.break_it.without) and (run.acts is None or run.step in awake.LOOKS)


def validation(cfg: Any, dataset: Dataset) -> Iterator[Batch]:
    """The validation windows, always the same ones. ValueError if the text is shorter than one window."""
    size = (cfg.batch_size, cfg.model.context_length, cfg.eval_tokens)
    return validation_batches(dataset.val, dataset.val_documents, *size, with_documents=cfg.attention.documents)


@contextmanager
def evaluation_mode(model: GPT) -> Iterator[GPT]:
    """The model without dropout; back in training mode afterwards."""
    model.eval()
    try:
        yield model
    finally:
        model.train()


def evaluate(run: Run) -> None:
    """Logs the mean loss over the validation windows, in nats per token and in bits per byte. Ranks share the
    batches."""
    losses: list[float | torch.Tensor] = []  # of each batch, nats per token; 0 for another rank's
    sizes: list[int] = []  # tokens of each batch
    size = 0
    with evaluation_mode(run.averaged):
        for i, batch in enumerate(together(run, validation(run.cfg, run.dataset), run.ranks.data_size)):
            losses.append(0.0)
            sizes.append(batch.y.numel())
            size += text_bytes(run, batch.y)
            if i % run.ranks.data_size == run.ranks.data_rank:
                losses[-1] = run.train_step.loss_of_windows(batch)
        if run.ranks.shards > 1 and (len(losses) - 1) % run.ranks.data_size < run.ranks.data_rank:
            run.train_step.loss_of_windows(batch)  # dummy forward: FSDP gathers weights on all ranks together
    # Of ranks that share sequences, each has the mean over its own tokens. float() waits for the device.
    found = [float(loss) * tokens / run.ranks.part.ranks for loss, tokens in zip(losses, sizes, strict=True)]
    nats, tokens = 0.0, sum(sizes)
    for of_a_batch in run.ranks.sum(found):  # in their order, whoever has computed them; sum() adds in another way
        nats += of_a_batch
    run.val_loss, bits = nats / tokens, nats / (math.log(2) * max(1, size))
    run.metrics.log({"step": run.step, "val_loss": run.val_loss, "val_bits_per_byte": bits})


def text_bytes(run: Run, targets: torch.Tensor) -> int:
    """Number of bytes in the text of the tokens, which are on the CPU."""
    return int(run.dataset.token_bytes[targets.numpy()].sum())


def measure_the_context(run: Run) -> None:
    """Measures what the context is worth on the validation windows (training/context.py): logs, prints and draws it."""
    if not run.ranks.first:
        return
    with run.caught.at_once(), evaluation_mode(run.averaged) as model:
        windows = context.windows_of(run.cfg, run.dataset)
        found = context.measure(model, windows, run.dataset, run.cfg.data.source, run.autocast)
    run.metrics.log({"step": run.step, **found})
    run.metrics.say(context.table(found))
    title = f"{run.cfg.name}, step {run.step}"
    run.metrics.later(partial(context.draw, found, run.folder, title, run.cfg.break_it.label, run.context))
    if run.step == 0:
        run.context = found


class Writing(NamedTuple):
    """What writes samples: the averaged model with weights in the dtype of the products, which no token has to cast."""

    model: GPT
    generator: torch.Generator  # of its own: training's random numbers stay as they are
    keep: Kept  # on a GPU the recorded token


def sample(run: Run) -> None:
    """Writes a sample into samples.txt, or says why there is none."""
    if not run.ranks.first and run.ranks.shards == 1:
        return
    try:
        with nullcontext() if run.ranks.shards > 1 else run.caught.at_once():
            text = write_sample(run)
    except NotFinite:  # this step's update made them NaN; the next step's loss will be NaN too
        run.metrics.say(f"{stamp(run.cfg.break_it.label)}no sample at step {run.step}: the logits are NaN")
    else:
        run.metrics.sample(run.step, text)


def write_sample(run: Run) -> str:
    """A sample: the model's text after an end-of-text token, where documents begin. NotFinite as Sampler.choose()."""
    encoding = run.dataset.encoding
    end = encoding.encode_single_token(END_OF_TEXT)
    idx = torch.tensor([[end]], device=run.device)
    stream = TextStream(encoding)
    model, generator, keep = writing_of(run)
    generator.manual_seed(run.cfg.seed)
    made = generate(model, idx, run.cfg.sample_tokens, keep.sampler, generator, cache=keep)
    tokens = map(int, together(run, made) if run.ranks.shards > 1 else made)
    # Stops at the end of the document: with attention.documents, the model has not learned to write past it.
    return "".join(stream.feed(token) for token in takewhile(end.__ne__, tokens)) + stream.flush()


@torch.no_grad()
def writing_of(run: Run) -> Writing:
    """What writes samples, with the weights of today. In a run whose steps are recorded it stays from sample to sample,
    because it takes most of a sample's time. It takes no memory from such steps: theirs is never given back."""
    if run.writing is not None:
        torch._foreach_copy_(list(run.writing.model.parameters()), list(run.averaged.parameters()))
        return run.writing
    model, generator = copy_of(run.averaged, DTYPES[str(run.facts["dtype"])]).eval(), torch.Generator(run.device)
    writing = Writing(model, generator, Kept(model, 1, Sampler(), generator, cache=True))
    if run.train_step.way == "recorded":
        run.writing = writing
    return writing


def look(run: Run) -> None:
    """Measures attention on one validation sequence (training/probe.py), and logs it with the time that this takes."""
    started = time.perf_counter()
    first = next(validation(run.cfg, run.dataset)).each(lambda part: part[:1])
    x, _, documents = first.to(run.device)
    with run.caught.at_once(), evaluation_mode(run.averaged) as model, run.autocast:
        gauges = reading(record(model, x, documents=documents))
    run.metrics.log({"step": run.step, **gauges, "probe_ms": (time.perf_counter() - started) * 1e3})


def look_at_the_failure(run: Run, batches: Sequence[Batch] = ()) -> None:
    """Finds whether what is broken on purpose acts: on the batches' first sequence in which it does, or, with no
    batches, on that of look(). Says so if that has changed, and keeps the gauges. Changes nothing else."""
    started, rng = time.perf_counter(), checkpoint.rng_state()
    one_by_one = (batch.each(itemgetter(slice(i, i + 1))) for batch in batches for i in range(len(batch.x)))
    sequences = one_by_one if batches else [next(validation(run.cfg, run.dataset)).each(lambda part: part[:1])]
    try:
        with nullcontext() if batches else run.caught.at_once():
            for sequence in sequences:
                with run.autocast:
                    calls = record(run.model, *sequence.to(run.device))  # in training mode, for dropout
                found = awake.effects(calls)
                if acts := awake.acts(found, run.cfg.break_it):
                    break
            gauges = reading(calls) | awake.record_of(found)
    finally:
        checkpoint.set_rng_state(rng)
    run.metrics.log({"step": run.step, **gauges, "probe_ms": (time.perf_counter() - started) * 1e3})
    if acts != run.acts:
        said = awake.in_words(found, run.cfg, run.step, gauges["headroom"], stopped=bool(batches))
        run.metrics.say(stamp(run.cfg.break_it.label) + said)
    run.acts = acts


def find_the_fault(run: Run, batches: list[Batch], rng: dict[str, torch.Tensor]) -> None:
    """Prints the first tile in which the stopped step has NaN or infinity, and saves that step's batch.

    rng: the random state before the step.
    """
    say = run.metrics.say
    fault = search(run.model, batches, rng, run.device, run.autocast)
    if fault is None:
        say(
            "  probe: the NaN or infinity does not begin in attention, "
            "as far as a second, uncompiled run of the same batch shows"
        )
        return
    place, tensors = fault
    say(f"  probe: {place}")
    # The first fault of a run is never deleted. Faults after a resume go to faults/later, where old ones are pruned.
    into = "faults/later" if checkpoint.last(run.folder / "faults") else "faults"
    try:
        kept = save(run, into, tensors)
        run.writer.wait()
        say(f"  to see it again, with every layer's measurements: python breakit.py replay={kept}")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        say(
            f"  batch not kept: {run.folder / into} cannot be written ({why}); "
            "make room and run it again: it stops here again"
        )


def save(run: Run, into: str = checkpoint.FOLDER, fault: dict[str, torch.Tensor] | None = None) -> Path:
    """Has a checkpoint written, which may take until run.writer.wait(), and returns its folder.

    fault: the batch at which the run stopped, with its random state. If given, it is saved with the weights of that
    step, and without the optimizer: such a checkpoint cannot be resumed.
    """
    if not run.ranks.first and run.ranks.shards == 1:
        return run.folder / into / checkpoint.folder_name(run.step)
    run.metrics.still_there()  # else checkpoint.save() would make a deleted folder again
    if fault is not None:
        tensors, model = fault, run.model
    else:
        parameters, model = dict(run.model.named_parameters()), run.averaged
        tensors = checkpoint.optimizer_tensors(run.optimizers, parameters.items())
        if run.averaged is not run.model:
            tensors |= {f"{name}.trained": p for name, p in parameters.items()}
        tensors |= checkpoint.rng_state()
    weights = model.state_dict(keep_vars=True)
    if not run.ranks.first:
        run.writer.give(weights, tensors)
        return run.folder / into / checkpoint.folder_name(run.step)
    return run.writer.save(
        run.folder / into,
        run.step,
        model=weights,
        optimizer=tensors,
        state={
            "config": asdict(run.cfg),
            "about": run.facts,
            "broken": run.cfg.break_it.label,
            "loader": run.batches.state_dict(),
            "validation": fingerprint(run.dataset.val, run.dataset.val_documents),
            "scaler": run.scaler.state_dict(),
            # The best checkpoint is then that of a run without stops.
            "val_loss": run.val_loss if math.isfinite(run.val_loss) and due(run, run.cfg.checkpoint_every) else None,
            "due": run.unfinished,
        },
        tokenizer=to_json(run.dataset.encoding),
        keep_last=run.cfg.keep_last,
    )
