"""max_minutes=: a time limit is a schedule of the learning rate. The tests' clock moves by what a step is to take."""

import math
import os
import re
import signal
import statistics
import time
from collections import defaultdict, deque
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import train
from parallel import processes
from parallel.processes import Ranks
from tests.runs import assert_same_end, last, losses, records
from training import activities, checkpoint
from training.messages import where_time_went
from training.optimizer import OptimizerConfig, learning_rate, next_place
from training.record import Report
from training.run import Run
from training.settings import Config
from training.step import AHEAD, TrainStep

RARE = ["eval_every=1000", "sample_every=1000", "sample_tokens=5", "checkpoint_every=1000"]
LOWEST = 1e-4  # of the rate: a tenth of 1e-3, the peak, which warmup_steps=10 reaches


@pytest.fixture
def clock(monkeypatch):
    """A step takes clock.step(number) seconds, an evaluation clock.evaluation. In step clock.stop a signal comes."""
    clock = SimpleNamespace(now=50.0, step=lambda step: 1.0, evaluation=0.0, stop=None)
    send, windows = train.enqueue, activities.validation

    def enqueue(run):
        clock.now += clock.step(run.step + 1)
        if run.step + 1 == clock.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        send(run)

    def validation(*given):
        clock.now += clock.evaluation
        return windows(*given)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(train, "enqueue", enqueue)
    monkeypatch.setattr(activities, "validation", validation)
    return clock


@pytest.fixture
def idle(monkeypatch):
    """Steps that compute nothing: of these runs only the rate counts."""
    monkeypatch.setattr(TrainStep, "update", lambda self, batches: None)


@pytest.fixture
def timed(call, small, tmp_path, clock):
    """timed("max_minutes=1", ...) is a run; timed.out what it printed, timed.rates each step's learning rate."""

    def timed(*typed: str, name: str = "x", code: int = 0) -> SimpleNamespace:
        ended = call(train, *small, *RARE, f"runs={tmp_path}", f"name={name}", *typed)
        assert ended.code == code, ended.err
        folder = tmp_path / name
        return SimpleNamespace(out=ended.out, err=ended.err, folder=folder, rates=[r["lr"] for r in records(folder)])

    return timed


def falls(rates: list[float]) -> bool:
    """Whether it never rises again once it has been highest."""
    after = rates[rates.index(max(rates)) :]
    return after == sorted(after, reverse=True)


def by_steps(steps: int) -> list[float]:
    rates = OptimizerConfig(lr=1e-3, warmup_steps=10)
    return [learning_rate(step, steps, rates) for step in range(1, steps + 1)]


def test_a_run_whose_minutes_are_over_ends_as_one_that_has_made_its_steps(timed, tmp_path):
    run = timed("steps=10", "max_minutes=0.05", "log_every=1000")
    assert [record["step"] for record in records(run.folder)] == [3]  # which ended after 3 seconds; 1000 were to pass
    assert [(record["step"], record["seconds"]) for record in records(run.folder, "val_loss")] == [(3, 3.0)]
    assert "sample at step 3 " in (run.folder / "samples.txt").read_text()
    assert last(run.folder).name == "step_000003"
    assert "stopped by max_minutes=0.05 at step 3 of 10; steps=3 max_minutes=null makes" in run.out
    onwards = f"  python train.py resume=auto name=x runs={tmp_path} steps=20 max_minutes=0.1"
    assert run.out.splitlines()[-1].split("  #")[0] == onwards


def test_the_time_left_is_that_of_the_steps_or_of_the_minutes_whichever_is_less(timed, idle):
    for steps, left in ((4, [2, 1, 0]), (3, [2, 1, 0]), (2, [1, 0])):
        run = timed(f"steps={steps}", "max_minutes=0.05", name=f"of-{steps}")
        assert [record["eta_s"] for record in records(run.folder)] == left
        assert ("stopped by max_minutes" in run.out) == (steps > 3)
        assert ("would use the rest" in run.out) == (steps <= 3)


@pytest.mark.parametrize("every", [5, 1000])
def test_the_pace_is_the_devices_where_the_host_waits_for_it_now_and_then(every, timed, clock, idle, monkeypatch):
    """Between two waits the host enqueues four steps in no time. Their median was taken for the pace."""
    numbers = Report.numbers

    def wait(report):
        clock.now += 1.0
        return numbers(report)

    monkeypatch.setitem(AHEAD, "cpu", 4)
    monkeypatch.setattr(Report, "arrived", lambda report: False)
    monkeypatch.setattr(Report, "numbers", wait)
    monkeypatch.setattr(Report, "seconds", lambda report: 1.0)
    clock.step = lambda step: 0.0
    rates = timed("steps=100000", "max_minutes=1", f"checkpoint_every={every}").rates
    assert rates == pytest.approx(by_steps(len(rates)), abs=1e-4)


PACES = {  # seconds of a step, and of an evaluation after each 20
    "compiles": (lambda step: 60.0 if step == 1 else 1.0, 0.0),
    "compiles again": (lambda step: 30.0 if step == 40 else 1.0, 0.0),
    "slows down": (lambda step: 1.0 if step < 40 else 3.0, 0.0),
    "speeds up": (lambda step: 2.0 if step < 20 else 1.0, 0.0),
    "uneven": (lambda step: (0.5, 1.7, 0.9, 0.4)[step % 4], 0.0),
    "evaluates": (lambda step: 1.0, 7.0),
    "evaluates at the end": (lambda step: 2.0, 22.0),  # which goes past the limit
}


@pytest.mark.parametrize("pace", PACES)
def test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace(pace, timed, clock, idle):
    clock.step, clock.evaluation = PACES[pace]
    run = timed("steps=100000", "max_minutes=2", "eval_every=20")
    rates, steps = run.rates, len(run.rates)
    assert rates[:10] == by_steps(steps)[:10]
    assert falls(rates)
    # A last step that is slower than usual was not expected to be the last.
    assert rates[-1] == pytest.approx(LOWEST, rel=0.02 if pace == "uneven" else 1e-12)
    assert rates[-3] > LOWEST  # it is not there long before
    ended = clock.now - 50 - clock.evaluation  # of which the last comes after it
    assert records(run.folder, "val_loss")[-1]["seconds"] == ended
    assert 120 <= ended < 120 + clock.step(steps) + ("end" in pace) * clock.evaluation
    assert last(run.folder).name == f"step_{steps:06}"
    # No step takes more of the schedule than it takes of the time: a compilation counts, and is no pace.
    assert max(a - b for a, b in pairwise(rates)) < 0.15 * (max(rates) - LOWEST)
    if pace == "compiles":
        assert rates == pytest.approx(by_steps(61))


def test_minutes_that_the_steps_do_not_need_change_no_bit(timed):
    for more in ([], ["optimizer.schedule=wsd", "optimizer.warmup_steps=12"]):
        limited, free = (timed("steps=15", *more, minutes, name=f"{minutes}-{len(more and more[0])}".replace("=", "-"))
                         for minutes in ("max_minutes=1", "max_minutes=null"))  # fmt: skip
        assert limited.rates == free.rates
        assert_same_end(limited.folder, free.folder)


def test_a_warm_up_takes_a_fifth_of_the_updates_that_there_is_time_for(timed, idle):
    rates = timed("steps=1000", "optimizer.warmup_steps=100", "max_minutes=1").rates
    assert len(rates) == 60
    assert rates.index(max(rates)) == 11  # the twelfth of sixty
    assert max(rates) == pytest.approx(1e-3)
    assert rates[:12] == sorted(rates[:12])
    assert falls(rates)
    assert rates[-1] == pytest.approx(LOWEST)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_place_reaches_the_end_with_the_last_update_and_never_moves_back(schedule):
    """Whatever is said of the time that is left, and also where a resumed run has fewer steps."""
    generator = torch.Generator().manual_seed(0)
    rates = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=5)
    for steps in (6, 40):
        place, found = 0.0, []
        for step in range(steps):
            left = 50 * float(torch.rand((), generator=generator)) ** 3 - 1  # an evaluation may go past the limit
            before, place = place, next_place(place, step, left, steps, rates.warmup_steps)
            assert before <= place <= steps
            found.append(learning_rate(place, steps, rates))
        assert falls(found)
        assert found[-1] == pytest.approx(0.1)
    assert next_place(700.0, 20, math.inf, 30, 5) == 30


# --- stopped and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [6, 33])
def test_a_resumed_run_has_what_is_left_of_the_time_and_goes_on_with_its_rate(timed, clock, idle, at):
    whole = timed("steps=1000", "max_minutes=1").rates
    clock.stop = at
    timed("steps=1000", "max_minutes=1", name="stopped", code=128 + signal.SIGTERM)
    clock.now = 7.0  # another process, whose clock began elsewhere
    resumed = timed("resume=auto", name="stopped")
    assert resumed.rates[:at] == whole[:at]
    two_steps = 2 * max(a - b for a, b in pairwise(whole))  # the first two after a resume do not know the pace
    assert resumed.rates == pytest.approx(whole, abs=two_steps)
    assert falls(resumed.rates)
    assert records(resumed.folder, "val_loss")[-1]["seconds"] == 60.0


@pytest.mark.parametrize("at", [1, 2])
def test_a_run_stopped_where_an_evaluation_passes_the_limit_makes_its_last_update(at, timed, clock, idle, monkeypatch):
    """Stopped in the evaluation (1), which is then made again, or in the sample after it (2)."""
    clock.evaluation = 45.0
    often = ["steps=1000", "max_minutes=1", "eval_every=20", "sample_every=20"]
    whole = timed(*often).rates
    assert len(whole) == 21
    stop = SimpleNamespace(name=["validation", "write_sample"][at - 1])
    made = getattr(activities, stop.name)

    def stopping(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return made(*given)

    with monkeypatch.context() as patch:
        patch.setattr(activities, stop.name, stopping)
        timed(*often, name="stopped", code=128 + signal.SIGTERM)
    assert timed("resume=auto", "eval_every=20", "sample_every=20", name="stopped").rates == pytest.approx(whole)


@pytest.mark.parametrize("change", ["max_minutes=2", "max_minutes=null", "max_minutes=0.7"])
def test_a_resumed_run_with_another_limit_does_not_raise_its_rate(change, timed, clock, idle):
    clock.stop = 30
    timed("steps=80", "max_minutes=1", code=128 + signal.SIGTERM)
    rates = timed("resume=auto", change).rates
    assert len(rates) == (42 if "0.7" in change else 80)
    assert falls(rates)
    assert rates[-1] == pytest.approx(LOWEST)


def test_a_run_that_has_used_its_minutes_is_resumed_with_more_only(timed, idle):
    timed("steps=100", "max_minutes=0.5")
    refused = timed("resume=auto", code=2)
    assert "has used 0.5 minutes of max_minutes=0.5; give a larger max_minutes= to go on" in refused.err
    assert len(refused.err.splitlines()) == 1
    more = timed("resume=auto", "max_minutes=0.6").rates
    assert more[30:] == pytest.approx([LOWEST] * 6)


def test_a_run_that_time_has_stopped_twice_is_the_unbroken_run_bit_for_bit(timed):
    """Evaluated, sampled from and saved where the unbroken run is not, with a rate that does not fall."""
    constant = ["steps=10", "optimizer.min_lr_ratio=1", "optimizer.warmup_steps=0", "model.dropout_p=0.1"]
    timed(*constant, "max_minutes=0.05", name="stopped")
    timed("resume=auto", "optimizer.warmup_steps=0", "max_minutes=0.1", name="stopped")
    to_the_end = timed("resume=auto", "optimizer.warmup_steps=0", "max_minutes=null", name="stopped")
    assert "max_minutes 0.1 -> None" in to_the_end.out
    whole = timed(*constant, name="whole")
    assert losses(to_the_end.folder) == losses(whole.folder)
    assert_same_end(to_the_end.folder, whole.folder)


def test_a_checkpoint_of_an_older_version_is_at_the_place_of_its_step(timed, idle, monkeypatch):
    whole, load = timed("steps=30", name="whole"), checkpoint.load

    def older(path):
        found = load(path)
        del found.state["place"], found.state["seconds"]
        return found

    monkeypatch.setattr(checkpoint, "load", older)
    timed("steps=15")
    # Made for 15 steps, its own rates differ; those to come are the whole run's.
    assert timed("resume=auto", "steps=30").rates[15:] == whole.rates[15:] == by_steps(30)[15:]


# --- several processes ------------------------------------------------------------------------------------------------


def test_ranks_have_the_same_time_and_pace_whatever_their_clocks_say(monkeypatch):
    """One that had another pace would have another learning rate, and so other weights."""
    clocks = ([0.0, 1.0, 2.5, 3.0, 9.0], [0.0, 1.5, 2.0, 4.0, 8.0])
    runs = []
    for mine, other in (clocks, clocks[::-1]):
        run = object.__new__(Run)
        run.cfg, run.ranks, run.caught = Config(max_minutes=1), Ranks(size=2), []
        run.times, theirs = deque(mine), statistics.median_low(other)
        for here, there in zip(mine, other, strict=True):

            def all_gather(every, numbers, there=there, theirs=theirs):
                every[0].copy_(numbers)
                every[1].copy_(torch.tensor([0.0, there, 0.0, theirs]))

            monkeypatch.setattr(processes.dist, "all_gather", all_gather)
            run.seconds, run.text_bytes = partial(float, here), lambda y: 0
            run.enqueued = deque([train.Update(1, SimpleNamespace(y=None), {}, 0.0, None)])
            assert train.agree(run) == []
        runs.append(run)
    assert {(run.left, run.pace) for run in runs} == {(51.0, 2.5)}


@pytest.mark.parametrize("way", ["eager", "compiled", "recorded"])
def test_the_five_parts_of_a_runs_time_are_all_of_it(clock, way):
    """Four cold steps of 11, 3, 3 and 3 seconds, of which 2 each would do: 12 were for compiling, or in an eager run
    for what the first steps set up. That was called compiling, too."""
    took = {"starting": 5.0, "cold steps": 20.0, "steps": 30.0, "between steps": 4.0}
    run = SimpleNamespace(started=clock.now - 60.0, took=defaultdict(float, took), cold=4, pace=2.0)
    run.train_step = SimpleNamespace(way=way)
    said = where_time_went(run)
    assert [float(number) for number in re.findall(r"\d+\.\d", said)] == [60.0, 5.0, 12.0, 38.0, 4.0, 1.0]
    assert ("compiling" in said) == (way != "eager")
