"""Train a GPT. This file is the whole run, from top to bottom: configuration, set up, loop, finish.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER tokenizer=bpe   your own text
    python train.py model=gpt2 tokenizer=gpt2 data=text data.path=...  GPT-2's size, for one GPU
    python train.py attention=naive                                    the same run through another attention
    python train.py break_it=no_max break_it.score_gain=100            remove one line of attention and see what happens
    python train.py experiment=shakespeare                             a recipe with a known result
    python train.py -m optimizer.lr=1e-3,2e-3 optimizer=adamw,muon     every combination, in one table and one picture
    python train.py resume=auto                                        continue the last unbroken run
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
from dataclasses import asdict
from pathlib import Path

import torch

from data.loader import Prefetch
from model.abilities import resolve
from model.attention import AttentionConfig
from model.gpt import without_values
from parallel.processes import (
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
from training import ahead, checkpoint, config, context, start
from training.activities import ACTIVITIES, between_steps, find_the_fault, look_at_the_failure, session_of
from training.machine import (
    DTYPES,
    Signals,
    Stopping,
    about,
    begin_collecting,
    keep_memory,
    out_of_memory_as,
    pick_device,
    pick_dtype,
    stop_signals,
)
from training.messages import introduce, less_memory, say_what_is_there, what_to_try
from training.metrics import broken_name, rewrite, stamp
from training.optimizer import learning_rate, next_place
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
from training.run import Run, Update, data_of, folder_of, make_model, new_name, passes, refuse_too_large, trainer_of
from training.settings import Config
from training.state import rng_state, set_rng_state
from training.step import choose_way
from training.sweep import sweep

PREFETCH = 3  # batches of a step that are drawn ahead


def main(cfg: Config) -> int:
    """Trains and returns the exit code: 0; 1 if a NaN or infinity stopped the run; 128 + the signal if a signal did.

    Raises ValueError for a mistake that the user can correct. Does not change cfg.
    """
    if cfg.eval_only:
        begin_collecting()
        refuse_several("eval_only=true measures in one process")
        return context.evaluate(copy.deepcopy(cfg))
    started = start.BEGAN.pop() if start.BEGAN else time.perf_counter()
    with ExitStack() as stack:
        ranks = stack.enter_context(join(cfg))
        caught = stack.enter_context(stop_signals())
        try:
            with caught.at_once("stopped before the first step: the same command starts again"):
                run = set_up(copy.deepcopy(cfg), ranks, stack, caught)
        except Stopping:
            return 128 + caught[0]
        begin_collecting()
        run.started, run.took["starting"] = started, time.perf_counter() - started
        try:
            with out_of_memory_as(lambda: ValueError(less_memory(run))):
                run.code = loop(run)
        except KeyboardInterrupt:
            run.insisted = True
            raise
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
    keep_memory()
    device, dtype, attention, way, accumulation = choices(cfg)
    if way != "eager" and device.type == "cuda":
        ahead.import_compiler()
    ranks, rows, own_passes = divide(ranks, cfg, accumulation)
    refuse_what_is_for_one(cfg, attention)

    # The checkpoint, if the run resumes one. The name of a broken run says what is broken.
    cfg.name = cfg.name and broken_name(cfg.name, cfg.break_it.label)
    resumed, parent = open_checkpoint(cfg), open_parent(cfg)

    # Data, model and optimizer, and the random state.
    dataset, loader = data_of(cfg, resumed, parent, ranks, rows)
    refuse_too_large(cfg, attention, dtype, device, ranks, rows, own_passes)
    train_step, way, chosen = trainer_of(cfg, attention, dtype, device, ranks, rows, parent)
    step = restore(resumed, cfg, train_step, loader) if resumed else 0
    state = resumed.state if resumed else {}
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
    metrics = folder_of(cfg, folder, facts, ranks, stack, resumed if same_run else None)
    ranks.wait()  # until the first has the folder
    begin()
    run = Run(
        cfg, folder, facts, dataset, batches, train_step, metrics, step=step, saved=resumed.path if resumed else None,
        caught=caught, unfinished=state.get("due", False) if resumed else True,  # a new run may measure init_from
        place=state.get("place", step), spent=state.get("seconds", 0.0), pace=state.get("pace", 0.0),
        ended=state.get("ended", True),
    )  # fmt: skip
    stack.callback(close, run)
    if resumed and same_run and (unread := edits(folder / "config.yaml", config_of(resumed), asdict(cfg))):
        metrics.say(unread)
    if ranks.first:
        rewrite(folder / "config.yaml", config.to_yaml(cfg))
    introduce(run, resumed, parent, way)
    if chosen:
        metrics.say(chosen)
    return run


def choices(cfg: Config) -> tuple[torch.device, str, AttentionConfig, str, int]:
    """Device, dtype, resolved attention, how a step is run, and passes of a step. ValueError for what does not work."""
    device = pick_device(own_device(cfg.device))
    dtype = pick_dtype(cfg.dtype, device)
    attention = resolve(cfg.attention, device.type, cfg.break_it, in_a_ring(cfg), cfg.model, DTYPES[dtype])
    way, _ = choose_way(cfg.compile, device, attention, cfg.model, cfg.break_it, sends_from_python(cfg))
    refuse_another_parent(cfg)
    return device, dtype, attention, way, passes(cfg)


def check(cfg: Config) -> None:
    """Raises ValueError for a device, an attention or sizes that do not work. These are the checks of set_up() that
    need no data and no memory. A sweep makes them for every job before the first one starts."""
    if cfg.eval_only:
        raise ValueError("eval_only=true measures one run: leave out -m, and type the command once for each run")
    refuse_several("-m makes one run after the other")
    _, _, attention, _, _ = choices(cfg)
    cfg = copy.deepcopy(cfg)
    cfg.model.vocab_size = cfg.model.vocab_size or 1
    with without_values():
        make_model(cfg, attention, torch.device("meta"))


# ---------------------------------------------------------------------------------------------------------------------
# The loop.


def loop(run: Run) -> int:
    """Trains until the last step, the time limit, a signal or a NaN, and returns the exit code.

    On a GPU the host is some steps ahead: it enqueues an update, and then logs those that the device has finished. When
    an activity is due, it first waits until all of them are finished.
    """
    run.began = time.perf_counter() - run.spent
    if run.unfinished and (signals := between_steps(run, [])):
        return stop_at_signal(run, signals[0])
    run.model.train()
    if ahead.MARKERS and run.ranks.first and run.cfg.sample_every and run.cfg.sample_tokens:
        ahead.begin_sampling(session_of(run))
    run.train_step.restart_clock()
    run.ended = run.ended and run.ending  # a resumed run may have more steps or minutes
    while not run.ended:
        enqueue(run)
        signals = agree(run)
        run.ended = run.ending  # before an evaluation: if that passes the limit, one more update has the lowest rate
        due = any(activity.due(run) for activity in ACTIVITIES)
        while run.enqueued and (due or signals or oldest_is_done(run)):  # signals may be run.caught, which grows
            if bad := log_oldest(run):
                return stop_at_nan(run, *bad)
        if (due or signals) and not run.enqueued:
            with run.timed("between steps"):
                signals = between_steps(run, signals)
            if signals and (run.unfinished or not run.ended):
                return stop_at_signal(run, signals[0])
            run.spent = run.ranks.agree([], run.seconds()).spent
            run.train_step.restart_clock()
        run.writer.raise_error()
    run.writer.wait()
    return 0


def enqueue(run: Run) -> None:
    """Enqueues the next update."""
    cfg = run.cfg
    batches = run.batches.next()
    length = cfg.length_at(run.step + 1)
    if length < cfg.model.context_length:  # (passes, B, T) to (passes, B * T / length, length)
        batches = batches.each(lambda part: part.view(len(part), -1, length))
    rng = rng_state() if cfg.probe.every or cfg.break_it.broken else {}
    left = run.left / run.pace if run.pace else math.inf  # how many more updates fit into the time limit
    run.place = next_place(run.place, run.step, left, cfg.steps, cfg.optimizer.warmup_steps)
    lr = learning_rate(run.place, cfg.steps, cfg.optimizer)
    # The average's decay is lower at first. With 0.999 from the start, half of the average at step 700 would still be
    # the random initial weights.
    decay = min(cfg.ema_decay, (1 + run.step) / (10 + run.step))
    report = run.train_step(batches, lr, 1 - decay)
    run.step += 1
    run.enqueued.append(Update(run.step, batches, rng, lr, report))


def agree(run: Run) -> list[int]:
    """Sets run.spent and run.pace, and returns the signals received. Ranks gather the times and the signals from all of
    them, so that they have the same learning rate and stop at the same step, and the size of their text."""
    run.spent, run.pace = run.seconds(), run.median()
    if run.ranks.size == 1:
        return run.caught
    last = run.enqueued.pop()
    size = run.text_bytes(last.batches.y) if run.ranks.part.rank == 0 else 0  # once for ranks that share sequences
    signals, run.spent, size, run.pace = run.ranks.agree(run.caught, run.spent, size, run.pace)
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
    if done.report.warm and done.step > run.cfg.length_warmup_steps and not run.compiled:
        run.compiled = True
        ahead.end()
    run.times.append(seconds)
    run.took["steps" if done.report.warm else "cold steps"] += seconds
    run.cold += not done.report.warm
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
    say_stopped(run)
    return 128 + signal


def say_stopped(run: Run) -> None:
    run.metrics.say(f"stopped at step {run.step}, saved {run.saved}; to go on: {again(run.cfg)}")


def stop_at_nan(run: Run, done: Update, numbers: Numbers) -> int:
    """Ends a run at an update that the device left out because of a NaN or infinity. Returns the exit code.

    The updates enqueued after it were left out too, so the weights and all else are those of the step before.
    """
    cfg = run.cfg
    run.step, run.val_loss = done.step, math.inf
    if run.enqueued and (rng := run.enqueued[0].rng):  # as if the later updates had drawn nothing
        set_rng_state(rng)
    run.enqueued.clear()
    try:
        run.writer.wait()
    except OSError as error:  # the run says the NaN all the same
        run.metrics.say(str(error))
        run.saved = checkpoint.last(run.folder / checkpoint.FOLDER)
    run.ranks.wait()  # for the first one's file
    if cfg.break_it.broken:
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
        if run.step:
            with suppress(OSError) if run.code else nullcontext():  # after an error, which is the one to say
                run.metrics.picture()
    finally:
        try:
            run.writer.close()
            if run.code and run.began:
                say_what_is_left(run)
        except OSError as error:  # another error ended the run, and is said too
            run.metrics.say(str(error))
        finally:
            run.metrics.close(run.code)


def say_what_is_left(run: Run) -> None:
    """After an end that was not the plan: that nothing was saved, or, after a second signal, the last checkpoint."""
    run.saved = checkpoint.last(run.folder / checkpoint.FOLDER)
    if not run.saved:
        run.metrics.say("no checkpoint was saved, so there is nothing to resume: the same command starts again")
    elif run.insisted:
        say_stopped(run)


if __name__ == "__main__":
    config.run(main, Config, "config", resumed=resumed_config, check=check, jobs_of=sweep)
