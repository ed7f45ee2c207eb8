"""What a run does between its steps: it looks at attention, evaluates, samples, measures the context, and saves.

    if any(activity.due(run) for activity in ACTIVITIES): ...     train.py waits for all updates, and then calls
    between_steps(run, signals)                                   what is due after this step

A signal interrupts an activity. The run saves at once, and a resumed run begins with what was left. Nothing here
changes what is learned, nor training's random numbers.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.loader import Batch, fingerprint
from data.tokenizer import END_OF_TEXT, TextStream, to_json
from model.gpt import GPT
from parallel.shard import copy_of
from sampling.generate import NotFinite, Sampler, Session
from training import awake, checkpoint, context
from training.film import SIZE, draw, keep, shares
from training.machine import DTYPES, Stopping
from training.metrics import read_metrics, read_samples, stamp
from training.probe import reading, record, search
from training.run import Run, validation
from training.state import optimizer_tensors, rng_state, set_rng_state
from training.weights import read

T = TypeVar("T")


@dataclass(frozen=True)
class Activity:
    """What is done between steps. At one step, the last activity of several with the same key is done."""

    key: str  # of what it records, by which a resumed run knows that it is done
    run: Callable[[Run], object]
    every: Callable[[Run], int]  # steps between two; 0: never
    at_end: bool = True  # the last step has it too
    at_start: bool = False  # weights that come from elsewhere have it before the first step, to compare with

    def due(self, run: Run) -> bool:
        """Whether it is due after this step."""
        every = self.every(run)
        if every == 0 or run.step == 0:
            return every > 0 and self.at_start and bool(run.cfg.init_from)
        return run.step % every == 0 or (self.at_end and run.ending)


def between_steps(run: Run, signals: list[int]) -> list[int]:
    """Does what is due after this step. Returns the signals that any rank has received; after one it only saves."""
    done = run.ranks.same(recorded(run, run.step)) if run.unfinished else {}
    run.val_loss = done.get("val_loss", math.inf)
    *others, saving = ACTIVITIES
    by_key = {activity.key: activity for activity in others if activity.due(run) and activity.key not in done}
    left = list(by_key.values())
    with suppress(Stopping):
        while left and not signals:
            left[0].run(run)
            left.pop(0)
    run.unfinished = run.ranks.same(bool(left))
    signals = list(run.ranks.agree(signals or run.caught).signals)  # one that comes now is for the next step
    if signals or saving.due(run):
        saving.run(run)
    if run.val_loss < math.inf and (run.ending or run.metrics.time_to_draw()):
        run.metrics.draw_later()
    run.ranks.wait()  # for the first, which samples and saves: a GPU that waits for another gives up after some minutes
    return signals


def recorded(run: Run, step: int) -> dict[str, Any]:
    """What the run has recorded after this step: the values by their keys, "sample" if it has one."""
    found: dict[str, Any] = {}
    if run.ranks.first:
        for record in read_metrics(run.folder / "metrics.jsonl"):
            found |= record if record["step"] == step else {}
        if any(of == step for of, _ in read_samples(run.folder / "samples.txt")):
            found["sample"] = True
    return found


def together(run: Run, items: Iterable[T], turns: int = 1) -> Iterator[T]:
    """The items, until any rank has received a signal. All ranks know of it before the same item, and raise Stopping:
    one that stopped alone would leave the others waiting. turns: so many items, of which each rank computes one, come
    between two such messages. A message within them would make the ranks wait for each other's item."""
    for i, item in enumerate(items):
        if i % turns == 0 and (signals := run.ranks.agree(run.caught).signals):
            raise Stopping(signals[0])
        yield item


@contextmanager
def evaluation_mode(model: GPT) -> Iterator[GPT]:
    """The model without dropout; back in training mode afterwards."""
    model.eval()
    try:
        yield model
    finally:
        model.train()


def first_window(run: Run) -> Batch:
    """The first validation sequence, (1, T)."""
    return next(validation(run.cfg, run.dataset)).each(lambda part: part[:1])


# --- look ------------------------------------------------------------------------------------------------------------


def look(run: Run) -> None:
    """Measures attention on one validation sequence (training/probe.py), and logs it with the time that this takes."""
    started = time.perf_counter()
    x, _, documents = first_window(run).to(run.device)
    with run.caught.at_once(), evaluation_mode(run.averaged) as model, run.train_step.autocast:
        gauges = reading(record(model, x, documents=documents))
    run.metrics.log({"step": run.step, **gauges, "probe_ms": (time.perf_counter() - started) * 1e3})


def film(run: Run) -> None:
    """Adds a frame to the film (training/film.py), of the sequence of look(), and logs the patterns of the heads."""
    started = time.perf_counter()
    x, _, documents = first_window(run).to(run.device)
    with run.caught.at_once(), evaluation_mode(run.averaged) as model, run.train_step.autocast:
        found = [read(call, x[0].cpu(), SIZE) for call in record(model, x, documents=documents)]
    if run.ranks.first:
        keep(run.folder, run.step, found)
    run.metrics.log({"step": run.step, **shares(found), "film_ms": (time.perf_counter() - started) * 1e3})
    name, broken = f"{run.cfg.name}: layer.head, step by step", run.cfg.break_it.label
    run.metrics.picture_later(run.step, partial(draw, run.folder, run.step, found, name, broken))


def looks_at_the_failure(run: Run) -> bool:
    """Whether a broken run looks after this step if its failure acts."""
    return bool(run.cfg.break_it.broken) and (run.acts is None or run.step in awake.LOOKS)


def look_at_the_failure(run: Run, batches: Sequence[Batch] = ()) -> None:
    """Finds whether what is broken on purpose acts: on the batches' first sequence in which it does, or, with no
    batches, on that of look(). Says so if that has changed, and keeps the gauges. Changes nothing else."""
    started, rng = time.perf_counter(), rng_state()
    one_by_one = (batch.each(itemgetter(slice(i, i + 1))) for batch in batches for i in range(len(batch.x)))
    try:
        with nullcontext() if batches else run.caught.at_once():
            for sequence in one_by_one if batches else [first_window(run)]:
                with run.train_step.autocast:
                    calls = record(run.model, *sequence.to(run.device))  # in training mode, for dropout
                found = awake.effects(calls)
                if acts := awake.acts(found, run.cfg.break_it):
                    break
            gauges = reading(calls) | awake.record_of(found)
    finally:
        set_rng_state(rng)
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
    fault = search(run.model, batches, rng, run.device, run.train_step.autocast)
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
        written = write_checkpoint(run, into, tensors)
        run.writer.wait()
        say(f"  to see it again, with every layer's measurements: python breakit.py replay={written}")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        say(
            f"  batch not kept: {run.folder / into} cannot be written ({why}); "
            "make room and run it again: it stops here again"
        )


# --- evaluate, measure -----------------------------------------------------------------------------------------------


def evaluate(run: Run) -> None:
    """Logs the mean loss over the validation windows, in nats per token and in bits per byte. Ranks share the
    batches."""
    seconds = run.seconds()
    losses: list[float | torch.Tensor] = []  # of each batch, nats per token; 0 for another rank's
    sizes: list[int] = []  # tokens of each batch
    size = 0
    with evaluation_mode(run.averaged):
        for i, batch in enumerate(together(run, validation(run.cfg, run.dataset), run.ranks.data_size)):
            losses.append(0.0)
            sizes.append(batch.y.numel())
            size += run.text_bytes(batch.y)
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
    record = {"val_loss": run.val_loss, "val_bits_per_byte": bits, "seconds": seconds}
    run.metrics.log({"step": run.step} | record)


def measure_the_context(run: Run) -> None:
    """Measures what the context is worth on the validation windows (training/context.py): logs, prints and draws it."""
    if not run.ranks.first:
        return
    with run.caught.at_once(), evaluation_mode(run.averaged) as model:
        windows = validation(run.cfg, run.dataset, overlap=True)
        found = context.measure(model, windows, run.dataset, run.cfg.data.source, run.train_step.autocast)
    before = recorded(run, 0) if run.step and run.cfg.init_from else None
    run.metrics.log({"step": run.step, **found})
    run.metrics.say(context.table(found))
    title = f"{run.cfg.name}, step {run.step}"
    run.metrics.later(partial(context.draw, found, run.folder, title, run.cfg.break_it.label, before or None))


# --- sample ----------------------------------------------------------------------------------------------------------


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
    session = session_of(run)
    assert isinstance(session.generator, torch.Generator)
    session.generator.manual_seed(run.cfg.seed)
    made = session.generate(idx, run.cfg.sample_tokens)
    tokens = map(int, together(run, made) if run.ranks.shards > 1 else made)
    # Stops at the end of the document: with attention.documents, the model has not learned to write past it.
    return "".join(stream.feed(token) for token in takewhile(end.__ne__, tokens)) + stream.flush()


@torch.no_grad()
def session_of(run: Run) -> Session:
    """What writes samples: the averaged model, with the weights of today in the dtype of the products, which no token
    has to cast. Its generator is its own: training's random numbers stay as they are. In a run whose steps are recorded
    it stays from sample to sample, because it takes most of a sample's time. It takes no memory from such steps: theirs
    is never given back."""
    if run.session is not None:
        torch._foreach_copy_(list(run.session.model.parameters()), list(run.averaged.parameters()))
        return run.session
    model, generator = copy_of(run.averaged, DTYPES[str(run.facts["dtype"])]).eval(), torch.Generator(run.device)
    session = Session(model, Sampler(), generator)
    if run.train_step.way == "recorded":
        run.session = session
    return session


# --- save ------------------------------------------------------------------------------------------------------------


def save(run: Run) -> None:
    """Has a checkpoint written, which run.saved names."""
    run.saved = write_checkpoint(run)


def write_checkpoint(run: Run, into: str = checkpoint.FOLDER, fault: dict[str, torch.Tensor] | None = None) -> Path:
    """Has a checkpoint written, which may take until run.writer.wait(), and returns its folder.

    fault: the batch at which the run stopped, with its random state. If given, it is saved with the weights of that
    step, and without the optimizer: such a checkpoint cannot be resumed.
    """
    folder = run.folder / into
    if not run.ranks.first and run.ranks.shards == 1:
        return folder / checkpoint.folder_name(run.step)
    run.metrics.still_there()  # else checkpoint.save() would make a deleted folder again
    model, tensors = run.model, fault
    if tensors is None:
        parameters, model = dict(run.model.named_parameters()), run.averaged
        tensors = optimizer_tensors(run.train_step.optimizers, parameters.items())
        if run.averaged is not run.model:
            tensors |= {f"{name}.trained": p for name, p in parameters.items()}
        tensors |= rng_state()
    weights = model.state_dict(keep_vars=True)
    if not run.ranks.first:
        run.writer.give(weights, tensors)
        return folder / checkpoint.folder_name(run.step)
    state = {
        "config": asdict(run.cfg),
        "about": run.facts,
        "broken": run.cfg.break_it.label,
        "loader": run.batches.state,
        "validation": fingerprint(run.dataset.val, run.dataset.val_documents),
        "scaler": run.train_step.scaler.state_dict(),
        # Only of a checkpoint that a run without stops has too: its best one is then the same.
        "val_loss": run.val_loss if math.isfinite(run.val_loss) and ACTIVITIES[-1].due(run) else None,
        "due": run.unfinished,
        "place": run.place,
        "seconds": run.seconds(),
        "pace": run.pace,
        "ended": run.ended,
    }
    text, keep_last = to_json(run.dataset.encoding), run.cfg.keep_last
    return run.writer.save(
        folder, run.step, model=weights, optimizer=tensors, state=state, tokenizer=text, keep_last=keep_last
    )


ACTIVITIES = (  # in their order; save is the last
    Activity("probe_ms", look, lambda run: run.cfg.probe.every, at_end=False),
    Activity("probe_ms", look_at_the_failure, lambda run: int(looks_at_the_failure(run))),
    Activity("film_ms", film, lambda run: run.cfg.probe.film),
    Activity("val_loss", evaluate, lambda run: run.cfg.eval_every),
    Activity("sample", sample, lambda run: run.cfg.sample_every if run.cfg.sample_tokens else 0),
    Activity("context_ms", measure_the_context, lambda run: run.cfg.context_every, at_start=True),
    Activity("checkpoint", save, lambda run: run.cfg.checkpoint_every),
)
