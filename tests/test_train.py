"""train.py: one curve whatever the attention, one run however often it is stopped, one line for a mistake."""

import ast
import copy
import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from concurrent import futures
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
import torch
import yaml

import data.prepare
import sample
import train
import training.record
import training.step
from data.dataset import open_data, open_dataset
from data.loader import Loader, validation_batches
from model.abilities import resolve
from model.attention import AttentionConfig, attention
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from sampling.generate import Sampler
from tests.processes import HANGS
from tests.reference import assert_within_budget
from training import activities, checkpoint, config, context, metrics
from training.files import lock
from training.machine import about, is_out_of_memory
from training.metrics import Metrics, loss_figure, read_metrics
from training.optimizer import OptimizerConfig, learning_rate
from training.resume import changed, edits, make_room, refuse_another_model
from training.writer import Writer

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("model", "training", "data")


def records(run: Path, key: str = "loss") -> list[dict]:
    """The rows of metrics.jsonl that have `key`: the steps', or with val_loss the evaluations'."""
    return [record for record in read_metrics(run / "metrics.jsonl") if key in record]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def tiled(block: int) -> list[str]:
    return ["attention=tiled", f"attention.block_m={block}", f"attention.block_n={block}"]


# --- one curve, whatever the attention ------------------------------------------------------------------------------

NAIVE = ["attention=naive"]
# The rate stays at its peak, so that the first 50 steps of a run of 100 are the run of 50.
CURVE = ["model.context_length=128", "batch_size=2", "tokens_per_step=256"]
CURVE += ["attention.dropout_p=0.1", "optimizer.min_lr_ratio=1"]


@pytest.fixture(scope="module")
def curve(call, small, tmp_path_factory):
    """curve(steps, arguments, dtype): the losses as the run recorded them, in float32 whatever it computed in."""
    runs = tmp_path_factory.mktemp("curves")
    known = {}

    def curve(steps: int, arguments: list[str], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        key = (steps, *arguments, dtype)
        if key not in known:
            with pytest.MonkeyPatch.context() as patch:
                # There is no such switch, float64 is for tests. The initial weights are the float32 ones.
                patch.setattr("training.run.RecomputingGPT", lambda *options: RecomputingGPT(*options).to(dtype))
                name = f"name={len(known)}"
                assert call(train, *small, *CURVE, f"runs={runs}", f"steps={steps}", name, *arguments).code == 0
            (run,) = runs.glob(f"{len(known)}*")
            known[key] = torch.tensor(losses(run))
        return known[key][:steps]

    return curve


def assert_on_one_curve(found, curve):
    """Within the budget of tests/reference.py, where the oracle is the whole training in float64: training multiplies
    each rounding, so no bound on one step's would do, but what it makes of naive's own rounding can be measured."""
    reference = curve(100, NAIVE, torch.float64)[: len(found)].double()
    assert_within_budget({"loss": found}, {"loss": curve(100, NAIVE)[: len(found)]}, {"loss": reference})


@pytest.mark.slow
def test_naive_and_tiled_train_on_one_curve_for_100_steps_with_dropout(curve, record_property):
    """The largest difference between the two was 9e-6 nats, of a loss that falls from 5.8 to 3.2; naive itself strays
    1.6e-4 from the float64 run."""
    found = curve(100, tiled(64))
    record_property("largest_difference", float((found - curve(100, NAIVE)).abs().max()))
    assert_on_one_curve(found, curve)
    assert found[-1] < found[0] - 1  # it did learn: two flat lines would lie on each other as well


@pytest.mark.slow
def test_in_float64_naive_and_tiled_record_the_same_100_losses(curve):
    """What is left between the float32 curves is rounding and nothing else: in float64 it is 2**29 times smaller, too
    small for the float32 in which losses are recorded. A wrong term of relative size 1e-7 would show here."""
    assert torch.equal(curve(100, tiled(64), torch.float64), curve(100, NAIVE, torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("block", [16])  # 64 is the one above, and tests/test_attention.py has the others
def test_the_block_size_changes_nothing_beyond_rounding(curve, block):
    assert_on_one_curve(curve(50, tiled(block)), curve)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [NAIVE, tiled(64)], ids=["naive", "tiled"])
def test_without_the_maximum_small_scores_train_on_the_same_curve(curve, arguments):
    assert_on_one_curve(curve(50, [*arguments, "break_it=no_max"]), curve)


# --- stopped and resumed --------------------------------------------------------------------------------------------

DROPOUT = ["model.dropout_p=0.1", "attention.dropout_p=0.1"]
TWO_PASSES = [*tiled(16), *DROPOUT, "tokens_per_step=256"]
SIXTY = ["steps=60", "checkpoint_every=30", "eval_every=20"]

# kill -9 cannot be caught, so nothing of train.py can tell that it comes from within; but it comes at a known step.
KILLED_AT_37 = """
import os, signal
import train
from training import config, metrics

log = metrics.Metrics.log

def log_and_die(self, record):
    log(self, record)
    if record["step"] == 37:
        os.kill(os.getpid(), signal.SIGKILL)

metrics.Metrics.log = log_and_die
config.run(train.main, train.Config, "config")
"""


def assert_same_run(run: Path, other: Path) -> None:
    """All that was recorded but the time it took, and the last checkpoint."""
    timing = {"ms", "tokens_per_second", "eta_s", "memory_gib", "probe_ms", "context_ms"}
    rows = [[{k: v for k, v in record.items() if k not in timing} for record in read_metrics(r / "metrics.jsonl")]
            for r in (run, other)]  # fmt: skip
    assert repr(rows[0]) == repr(rows[1])  # NaN, the norm of a step that fp16's scaler left out, does not equal itself
    assert_same_end(run, other)


def assert_same_end(run: Path, other: Path) -> None:
    """Of the last step made: weights, optimizer, random numbers, data position."""
    a, b = (checkpoint.load(checkpoint.last(r / checkpoint.FOLDER)) for r in (run, other))
    assert a.step == b.step == records(run)[-1]["step"]
    assert a.state["loader"] == b.state["loader"]
    for x, y in ((a.model, b.model), (a.optimizer(), b.optimizer())):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x)


def test_a_run_killed_at_37_and_resumed_from_30_is_the_run_of_60_steps_bit_for_bit(start, call, small, tmp_path):
    common = [*small, *SIXTY, *TWO_PASSES]
    process = start("-c", KILLED_AT_37, *common, f"runs={tmp_path}", "name=killed")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGKILL, err
    assert checkpoint.last(tmp_path / "killed" / checkpoint.FOLDER).name == "step_000030"
    assert records(tmp_path / "killed")[-1]["step"] == 37
    resumed = call(train, *common, f"runs={tmp_path}", "name=killed", "resume=auto")
    assert resumed.code == 0, resumed.err
    assert "resumed from" in resumed.out
    assert call(train, *common, f"runs={tmp_path}", "name=whole").code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


# Without an end, and with a rate that does not depend on where the end is.
ENDLESS = [*tiled(16), *DROPOUT, "optimizer.min_lr_ratio=1", "eval_every=1000000", "checkpoint_every=1000000"]


@pytest.fixture(scope="module")
def signalled(start, small, tmp_path_factory):
    """{signal: (exit code, stdout, run folder)} of two runs of a hundred thousand steps, stopped once they run."""
    runs = tmp_path_factory.mktemp("signalled")
    started = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        name = f"name={number.name}"
        started[number] = start("train.py", *small, *ENDLESS, "steps=100000", f"runs={runs}", name)
    for number, process in started.items():
        lines = runs / number.name / "metrics.jsonl"
        until = time.monotonic() + HANGS
        while not (lines.exists() and lines.read_text().count("\n") >= 5) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
    ended = {}
    for number, process in started.items():
        out, err = process.communicate(timeout=HANGS)
        assert f"{number.name}: stopping after this step" in err
        ended[number] = (process.returncode, out, runs / number.name)
    return ended


SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


@SIGNALS
def test_a_signal_saves_the_step_that_was_reached_and_says_how_to_go_on(signalled, number):
    code, out, run = signalled[number]
    reached = records(run)[-1]["step"]
    assert code == 128 + number
    assert reached >= 5
    assert checkpoint.last(run / checkpoint.FOLDER) == run / checkpoint.FOLDER / f"step_{reached:06d}"
    line = out.splitlines()[-1]
    assert line.startswith(f"stopped at step {reached}, saved {run}")
    assert "to go on: python train.py " in line
    assert (run / "loss.png").stat().st_size > 0


@SIGNALS
def test_the_line_that_a_stopped_run_prints_goes_on_with_the_same_run(call, small, signalled, tmp_path, number):
    _, out, run = signalled[number]
    shutil.copytree(run, tmp_path / run.name)
    _python, _script, *printed = shlex.split(out.splitlines()[-1].partition("to go on: ")[2])
    there = [f"steps={records(run)[-1]['step'] + 10}", f"runs={tmp_path}"]
    resumed = call(train, *printed, *there)
    assert resumed.code == 0, resumed.err
    assert call(train, *small, *ENDLESS, *there, "name=unbroken").code == 0
    assert_same_run(tmp_path / run.name, tmp_path / "unbroken")


# What a run does between its steps, and a function that it calls there.
BETWEEN = {
    "evaluation": (training.step.TrainStep, "loss_of_windows"),
    "sample": (Sampler, "choose"),
    "context": (context, "each_token"),
    "look": (activities, "reading"),
    "failure": (activities, "record"),
}


def signal_within(patch: pytest.MonkeyPatch, place: str, step: int) -> list[str]:
    """SIGTERM comes at the end of the first call of the place's function after so many steps. Returns a list, which
    will have the places of all calls after the signal."""
    steps, signalled, after, send = [], [], [], train.enqueue
    patch.setattr(train, "enqueue", lambda run: send(run) or steps.append(run.step))

    def spied(name, function):
        def spy(*args, **rest):
            after.extend([name] * len(signalled))
            made = function(*args, **rest)
            if name == place and len(steps) == step and not signalled:
                signalled.append(name)
                os.kill(os.getpid(), signal.SIGTERM)
            return made

        return spy

    for name, (owner, function) in BETWEEN.items():
        patch.setattr(owner, function, spied(name, getattr(owner, function)))
    return after


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("context", 0),
        *((place, 2) for place in BETWEEN),
        *((place, 4) for place in ("evaluation", "sample", "context")),
    ],
)
def test_a_signal_ends_what_is_done_between_steps_and_the_resumed_run_does_it(
    call, small, tmp_path, monkeypatch, place, step
):
    """The run went on to the end of all that was due, minutes later, and only then saved."""
    common = [*small, *TWO_PASSES, f"runs={tmp_path}", "steps=4", "eval_every=2", "context_every=2", "probe.every=2"]
    common += ["sample_every=2", "sample_tokens=5", "checkpoint_every=3", "ema_decay=0.5"]
    if place == "failure":
        monkeypatch.setattr(activities.awake, "LOOKS", {2})
        common += ["break_it=no_max"]
    if step == 0:
        assert call(train, *common, "name=parent", "steps=1").code == 0
        common += [f"init_from={tmp_path}/parent/checkpoints/step_000001"]
        common = [argument for argument in common if not argument.startswith("model=")]
    with monkeypatch.context() as patch:
        after = signal_within(patch, place, step)
        ended = call(train, *common, "name=stopped")
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert f"stopped at step {step}, saved " in ended.out.splitlines()[-1]
    assert after == []
    if step == 2:  # of which the whole run has no checkpoint, so none can become its best
        assert checkpoint.best(next(tmp_path.glob("stopped*")) / checkpoint.FOLDER) is None
    again = shlex.split(ended.out.splitlines()[-1].partition("to go on: ")[2])[2:]
    resumed = call(train, *again)
    assert resumed.code == 0, resumed.err
    assert call(train, *common, "name=whole").code == 0
    stopped, whole = (next(tmp_path.glob(f"{name}*")) for name in ("stopped", "whole"))
    assert_same_run(stopped, whole)
    assert (stopped / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes()
    best = [checkpoint.best(run / checkpoint.FOLDER) for run in (stopped, whole)]
    assert best[0].name == best[1].name
    assert call(train, *again).code == 2  # nothing is left


def test_a_signal_in_the_preparation_of_data_ends_the_run_at_once(call, small, tmp_path, monkeypatch):
    """SIGTERM killed it without a word."""
    common = [*small, f"data.cache={tmp_path}/cache", "steps=1", f"runs={tmp_path}", "name=x"]
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare, "write", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        ended = call(train, *common)
    assert (ended.code, ended.out) == (128 + signal.SIGTERM, "")
    assert ended.err == (
        "\nSIGTERM: stopped before the first step, so nothing is lost: the same command starts again\n"
    )
    assert call(train, *common).code == 0


@pytest.fixture
def steady_clock(monkeypatch):
    """A second passes each time that train.py looks, which is once a step. The step itself takes half a second."""
    seconds, halves = count(1.0), count(0.0, 0.5)
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(seconds), strftime=time.strftime))
    monkeypatch.setattr(training.record, "time", SimpleNamespace(perf_counter=lambda: next(halves)))


def test_a_run_whose_minutes_are_over_ends_as_one_that_has_made_its_steps(call, small, tmp_path, steady_clock):
    rare = ["eval_every=1000", "sample_every=1000", "sample_tokens=5", "checkpoint_every=1000", "log_every=1000"]
    ended = call(train, *small, *rare, "steps=10", "max_minutes=0.05", f"runs={tmp_path}", "name=x")
    run = tmp_path / "x"
    assert ended.code == 0
    (last,) = records(run)  # though 1000 steps were to pass between two lines
    assert last["step"] == 3  # which ended after 3 seconds
    assert [record["step"] for record in records(run, "val_loss")] == [3]
    assert "sample at step 3 " in (run / "samples.txt").read_text()
    assert checkpoint.last(run / checkpoint.FOLDER).name == "step_000003"
    told = ended.out.splitlines()
    assert "stopped by max_minutes=0.05 at step 3 of 10: the learning rate is not at its minimum" in told
    again = f"python train.py resume=auto name=x runs={tmp_path}"
    assert told[-1] == f"  {again}  # with max_minutes=0.05 again; max_minutes=null trains to step 10"


def test_the_time_left_is_that_of_the_steps_or_of_the_minutes_whichever_is_less(call, small, tmp_path, steady_clock):
    for steps, left in ((10, [2, 1, 0]), (4, [1.5, 1, 0]), (3, [1, 0.5, 0])):
        name = f"of-{steps}"
        ended = call(train, *small, f"steps={steps}", "max_minutes=0.05", f"runs={tmp_path}", f"name={name}")
        assert [record["eta_s"] for record in records(tmp_path / name)] == left
        assert ("stopped by max_minutes" in ended.out) == (steps > 3)


def test_a_run_that_time_has_stopped_twice_is_the_unbroken_run_bit_for_bit(call, small, tmp_path, steady_clock):
    """Evaluated, sampled from and saved where the unbroken run is not. Resumed, it has its minutes again."""
    arguments = [*small, *DROPOUT, "steps=10", "sample_every=1000", "sample_tokens=5", f"runs={tmp_path}"]
    for resume in ([], ["resume=auto"]):
        assert call(train, *arguments, "max_minutes=0.05", "name=stopped", *resume).code == 0
    assert records(tmp_path / "stopped")[-1]["step"] == 6
    to_the_end = call(train, "resume=auto", "name=stopped", f"runs={tmp_path}", "max_minutes=null")
    assert "max_minutes 0.05 -> None" in to_the_end.out
    assert call(train, *arguments, "name=whole").code == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")


# --- the recipes' parts ------------------------------------------------------------------------------------------

# A rate that does not depend on where the end is: after the warm-up the peak, as min_lr_ratio=1 has it.
RECIPES = {
    "fp16": ["dtype=fp16", "model.dropout_p=0.1"],
    "lengths": ["length_warmup_steps=8", "length_warmup_from=8", "attention.documents=true", *DROPOUT],
    "average": ["optimizer=muon", "optimizer.schedule=wsd", "ema_decay=0.9", "tokens_per_step=256"],
    "all": ["optimizer=muon", "dtype=fp16", "ema_decay=0.9", "z_loss=1e-3", "tokens_per_step=256", *DROPOUT],
}
TEN = ["optimizer.min_lr_ratio=1", "optimizer.warmup_steps=3", "eval_every=5", "checkpoint_every=1", "keep_last=100"]


def large_scale(monkeypatch) -> None:
    """A scaler that begins at 2**28: the first steps overflow, as they do for hours in a model that has outgrown it."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, init_scale=2.0**28, **k))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_at_5_and_resumed_is_the_run_of_10_steps_bit_for_bit(call, small, tmp_path, monkeypatch, recipe):
    """In fp16 the scaler is still looking for its scale at step 5, and the resumed run's begins at another one."""
    arguments = [*small, *TEN, *RECIPES[recipe]]
    with monkeypatch.context() as patch:
        large_scale(patch)
        assert call(train, *arguments, f"runs={tmp_path}", "steps=5", "name=stopped").code == 0
        assert call(train, *arguments, f"runs={tmp_path}", "steps=10", "name=whole").code == 0
    resumed = call(train, f"runs={tmp_path}", "resume=stopped", "steps=10")
    assert resumed.code == 0, resumed.err
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_length_warmup_trains_on_shorter_sequences_from_anywhere(call, small, tmp_path, monkeypatch):
    """Of 8 tokens for three steps, of 16 for three, and then whole ones. Each step has as many tokens as without the
    warm-up, and each piece is a sequence that begins at position 0. They were the pieces of whole windows, so alike
    that a model learned half as fast."""
    seen: dict[str, list] = {"whole": [], "warmed": []}
    for name, more in {"whole": [], "warmed": ["length_warmup_steps=6", "length_warmup_from=8"]}.items():
        kept = training.step.TrainStep.__call__

        def look(self, batches, *rest, into=seen[name], kept=kept):
            into.append(batches.each(torch.clone))
            return kept(self, batches, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(training.step.TrainStep, "__call__", look)
            ended = call(train, *small, "steps=8", f"runs={tmp_path}", f"name={name}", *TWO_PASSES, *more)
        assert ended.code == 0, ended.err
    assert "\nlength warm-up: sequences of 8 tokens, 16 from step 4, 32 from step 7\n" in ended.out
    lengths = [8] * 3 + [16] * 3 + [32] * 2
    assert [row["sequence_length"] for row in records(tmp_path / "warmed") if "loss" in row] == lengths
    for whole, warmed, length in zip(seen["whole"], seen["warmed"], lengths, strict=True):
        assert warmed.x.shape == (2, 4 * 32 // length, length)
        assert torch.equal(warmed.x[..., 1:], warmed.y[..., :-1])
        joined = (warmed.x.flatten(0, 1)[1:, 0] == warmed.y.flatten(0, 1)[:-1, -1]).float().mean()
        assert joined < 0.5  # one that goes on where the other ended
        if length == 32:
            assert torch.equal(warmed.x, whole.x)
    states = [checkpoint.load(checkpoint.last(tmp_path / name / checkpoint.FOLDER)).state["loader"] for name in seen]
    assert states[0] == states[1]


def test_a_length_warmup_that_the_run_does_not_end_is_told(call, small, tmp_path):
    warm = ["length_warmup_steps=7", "length_warmup_from=8"]
    for steps, told in (7, 1), (8, 0):
        ended = call(train, *small, f"steps={steps}", f"runs={tmp_path}", f"name=s{steps}", *warm)
        assert ended.code == 0
        assert "\nlength warm-up: sequences of 8 tokens, 16 from step 5, 32 from step 8\n" in ended.out
        never = f"\nthe sequences never reach model.context_length=32: steps={steps} is not more than length_warmup"
        assert ended.out.count(never) == told


def test_a_length_warmup_may_grow_by_another_factor():
    warm = {"length_warmup_steps": 6, "model": GPTConfig(context_length=512)}
    for by, lengths in {2: [64, 64, 128, 128, 256, 256, 512], 8: [64] * 6 + [512]}.items():
        cfg = train.Config(length_warmup_from=64, length_warmup_by=by, **warm)
        assert [cfg.length_at(step) for step in range(1, 8)] == lengths


def test_a_step_that_the_scaler_leaves_out_is_no_nan_and_changes_no_weight(call, small, tmp_path, monkeypatch):
    large_scale(monkeypatch)
    ended = call(train, *small, *TEN, "dtype=fp16", "steps=20", f"runs={tmp_path}", "name=x")
    assert ended.code == 0
    rows = records(tmp_path / "x")
    skipped = [row["step"] for row in rows if not math.isfinite(row["grad_norm"])]
    assert skipped == list(range(1, len(skipped) + 1))  # the first ones, until the scale is right
    assert 1 < len(skipped) < 18
    assert [row["loss_scale"] for row in rows[: len(skipped) + 1]] == [2.0 ** (28 - i) for i in range(len(skipped) + 1)]
    weights = {
        step: checkpoint.load(tmp_path / f"x/checkpoints/step_{step:06d}").model["embedding.weight"]
        for step in (1, len(skipped), len(skipped) + 1)
    }
    assert torch.equal(weights[1], weights[len(skipped)])
    assert not torch.equal(weights[1], weights[len(skipped) + 1])
    optimizer = checkpoint.load(checkpoint.last(tmp_path / "x/checkpoints")).optimizer()
    assert optimizer["embedding.weight.step"] == 20 - len(skipped)  # what AdamW corrects its bias by
    assert "scale 2.68435e+08 | norm nan" in ended.out


def test_the_norm_that_is_logged_is_the_gradients_and_not_the_scaled_ones(call, small, tmp_path, monkeypatch):
    """Multiplying by another power of two moves no bit, but where fp16 ends."""
    norms = []
    for scale in (2.0**10, 2.0**14):
        with monkeypatch.context() as patch:
            scaler = torch.amp.GradScaler
            patch.setattr(torch.amp, "GradScaler", lambda *a, f=scaler, s=scale, **k: f(*a, init_scale=s, **k))
            assert call(train, *small, "dtype=fp16", "steps=1", f"runs={tmp_path}", f"name={scale}").code == 0
        norms.append(records(tmp_path / f"{scale}")[0]["grad_norm"])
    assert call(train, *small, "steps=1", f"runs={tmp_path}", "name=float32").code == 0
    exact = records(tmp_path / "float32")[0]["grad_norm"]
    assert max(norms) < 2 * exact
    assert min(norms) > exact / 2


def test_an_infinite_gradient_stops_the_run_once_no_scale_is_left_to_blame(call, small, tmp_path, monkeypatch):
    def with_an_infinite_gradient(*options):
        model = RecomputingGPT(*options)
        model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
        return model

    monkeypatch.setattr("training.run.RecomputingGPT", with_an_infinite_gradient)
    ended = call(train, *small, "dtype=fp16", "steps=30", f"runs={tmp_path}", "name=x")
    assert ended.code == 1
    assert [row["loss_scale"] for row in records(tmp_path / "x")] == [2.0 ** (16 - i) for i in range(17)]
    assert "stopped before the update" in ended.out


def test_a_loss_of_nan_stops_an_fp16_run_at_once(call, small, tmp_path):
    rate = ["optimizer.lr=1e38", "optimizer.warmup_steps=0"]
    ended = call(train, *small, *rate, "dtype=fp16", "steps=30", f"runs={tmp_path}", "name=x")
    assert ended.code == 1
    assert records(tmp_path / "x")[-1]["step"] == 2


def test_the_smoke_recipe_runs_and_learns(call, text, tmp_path):
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path}/cache", "device=cpu"]
    ended = call(train, "experiment=smoke", *data, f"runs={tmp_path}", "name=x")
    assert ended.code == 0
    assert losses(tmp_path / "x")[-1] < losses(tmp_path / "x")[0]
    assert checkpoint.last(tmp_path / "x" / checkpoint.FOLDER).name == "step_000020"
    assert call(sample, f"runs={tmp_path}", "max_new_tokens=5", "device=cpu").code == 0


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import sample, train
from training import config
runs = sys.argv[1]
config.run(train.main, train.Config, "config")
sys.argv[1:] = ["max_new_tokens=3", "device=cpu", runs]
config.run(sample.main, sample.Config, "sample")
"""


def test_where_there_is_no_triton_a_run_trains_and_samples(start, small, tmp_path):
    """As on Windows and on Apple's machines, for which triton is not made."""
    process = start("-c", WITHOUT_TRITON, f"runs={tmp_path}", *small, "steps=3", "name=x")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert f"{tmp_path}/x/checkpoints/step_000003" in err  # sample.py names what it speaks from


def test_nothing_that_only_some_systems_have_is_imported_before_it_is_needed():
    """At the top of a file such an import ends train.py on Windows or without a GPU's packages, whatever it was for."""
    for file in [ROOT / "train.py", ROOT / "sample.py", *(p for d in LIBRARIES for p in (ROOT / d).glob("*.py"))]:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.name for node in top if isinstance(node, ast.Import) for name in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & {"triton", "resource", "fcntl"}, file


def test_a_run_whose_reader_has_left_goes_on_to_its_end(start, small, tmp_path):
    """`python train.py | head` ended a training of hours with exit code 141 and no checkpoint."""
    process = start("train.py", *small, "steps=30", "sample_every=10", "sample_tokens=5", f"runs={tmp_path}", "name=x")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(HANGS) == 0, err
    assert len(losses(tmp_path / "x")) == 30
    assert checkpoint.last(tmp_path / "x" / checkpoint.FOLDER).name == "step_000030"


# --- what a checkpoint brings ---------------------------------------------------------------------------------------


def test_resume_alone_goes_on_with_the_run_as_it_was(call, small, tmp_path):
    """Every other option had to be typed again, or was the default's."""
    theirs = [*TEN, *RECIPES["all"], "seed=5", "optimizer.lr=2e-3", "sample_tokens=7"]
    assert call(train, *small, *theirs, f"runs={tmp_path}", "steps=2", "name=x").code == 0
    assert call(train, f"runs={tmp_path}", "resume=auto", "steps=3").code == 0
    before, after = (checkpoint.load(tmp_path / f"x/checkpoints/step_{step:06d}").state["config"] for step in (2, 3))
    assert changed(before, after) == ["steps 2 -> 3"]


def test_of_a_group_that_is_typed_on_resume_its_file_goes_over_the_checkpoints(call, small, tmp_path):
    """attention=tiled says how, and leaves the window that the model was trained with."""
    assert call(train, *small, "attention.window=8", "steps=2", f"runs={tmp_path}", "name=x").code == 0
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=3", "attention=naive")
    assert ended.code == 0, ended.err
    assert "changed since the checkpoint: attention.impl auto -> naive, steps 2 -> 3" in ended.out.splitlines()


def test_where_auto_takes_another_implementation_than_the_run_had_it_is_said(call, small, tmp_path):
    """A run of a GPU went on, and was measured, with other sums on a CPU without a word."""
    where = [f"runs={tmp_path}", "device=cpu"]
    assert call(train, *small, *where, "name=x", "attention=naive", "steps=2").code == 0
    line = "attention=auto takes tiled here, and the run had naive: the numbers differ by rounding"
    assert line in call(train, *where, "eval_only=true", "resume=x", "attention=auto").out.splitlines()
    assert line in call(sample, *where, "run=x", "max_new_tokens=1", "impl=auto").err.splitlines()
    assert line in call(train, *where, "resume=auto", "steps=3", "attention=auto").out.splitlines()
    same = [call(train, *where, "resume=auto", "steps=4"), call(train, *where, "eval_only=true", "resume=x")]
    same.append(call(sample, *where, "run=x", "checkpoint=last", "max_new_tokens=1"))
    for ended in same:
        assert ended.code == 0, ended.err
        assert "attention=auto takes" not in ended.out + ended.err


OTHER_MASKS = "the dropout masks differ, so the numbers differ by more than rounding"


def test_a_run_that_goes_on_with_sdpa_has_other_dropout_masks():
    """A GPU may take sdpa; a CPU does not, so no command shows it there."""
    state = {"about": {"attention": "tiled", "device": "cpu x86_64"}, "broken": []}
    model = SimpleNamespace(
        attention_config=AttentionConfig("sdpa", dropout_p=0.1), config=SimpleNamespace(dropout_p=0.0), training=True,
        embedding=torch.nn.Embedding(1, 1),
    )  # fmt: skip
    said = checkpoint.Checkpoint.other_attention(SimpleNamespace(state=state), AttentionConfig("auto"), model)
    assert said == f"attention=auto takes sdpa here, and the run had tiled: {OTHER_MASKS}"


@pytest.mark.parametrize(
    ("had", "dropout", "on_gpu", "differ"),
    [
        ("naive", ["attention.dropout_p=0.1", "model.dropout_p=0.1"], False, "the numbers differ by rounding"),
        ("sdpa", ["model.dropout_p=0.1"], False, "the numbers differ by rounding"),
        ("sdpa", ["attention.dropout_p=0.1"], False, OTHER_MASKS),
        ("naive", ["attention.dropout_p=0.1"], True, OTHER_MASKS),
        ("naive", ["model.dropout_p=0.1"], True, OTHER_MASKS),
        ("sdpa", [], True, "the numbers differ by rounding"),
    ],
)
def test_where_dropout_draws_other_masks_more_than_rounding_differs(
    had, dropout, on_gpu, differ, call, small, tmp_path, monkeypatch
):
    """A run with sdpa and dropout, or one that a GPU had begun, was said to go on with the same numbers up to rounding.
    Where nothing is trained, nothing is dropped."""
    where = [f"runs={tmp_path}", "device=cpu"]
    with monkeypatch.context() as patch:
        if on_gpu:
            patch.setattr(train, "about", lambda device: about(device) | {"device": "NVIDIA H100 80GB HBM3"})
        assert call(train, *small, *where, *dropout, "name=x", f"attention={had}", "steps=1").code == 0
    begins = f"attention=auto takes tiled here, and the run had {had}: "
    evaluated = call(train, *where, "eval_only=true", "resume=x", "attention=auto")
    assert begins + "the numbers differ by rounding" in evaluated.out.splitlines()
    sampled = call(sample, *where, "run=x", "max_new_tokens=1", "impl=auto")
    assert begins + "the numbers differ by rounding" in sampled.err.splitlines()
    assert begins + differ in call(train, *where, "resume=x", "steps=2", "attention=auto").out.splitlines()


def test_a_broken_runs_other_attention_promises_no_like_numbers(call, small, tmp_path):
    """Where a tile begins decides what is broken, so naive and tiled differ by more than rounding."""
    where = [f"runs={tmp_path}", "device=cpu"]
    broken = ["break_it=no_scale", "stop_on_nan=false"]
    assert call(train, *small, *where, *broken, "name=x", "attention=naive", "steps=1").code == 0
    said = call(train, *where, "eval_only=true", "resume=x-BROKEN-no_scale", "attention=auto").out
    assert "the run had naive: the tiles may have other sizes, and then broken attention computes other numbers" in said
    assert "by rounding" not in said


def test_a_value_that_is_typed_on_resume_wins_also_where_it_is_the_default(call, small, tmp_path):
    theirs = ["optimizer.weight_decay=0.5", "optimizer=muon", "optimizer.momentum=0.9"]
    assert call(train, *small, *theirs, "steps=2", f"runs={tmp_path}", "name=x").code == 0
    typed = ["optimizer.weight_decay=0.1", "optimizer.momentum=null"]
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=3", *typed)
    said = (
        "changed since the checkpoint: optimizer.weight_decay 0.5 -> 0.1, optimizer.momentum 0.9 -> None, steps 2 -> 3"
    )
    assert said in ended.out.splitlines()


def test_a_resumed_run_may_begin_to_compute_its_blocks_again_and_stays_the_same_bit_for_bit(call, small, tmp_path):
    dropout = ["attention.dropout_p=0.1", "model.dropout_p=0.1"]
    whole = [*dropout, "steps=4", "checkpoint_every=2", f"runs={tmp_path}", "name=whole"]
    assert call(train, *small, *whole).code == 0
    half = f"resume={tmp_path}/whole/checkpoints/step_000002"
    ended = call(train, half, f"runs={tmp_path}", "name=again", "model.activation_checkpointing=true")
    assert "changed since the checkpoint: model.activation_checkpointing false -> true" in ended.out
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")[2:]


def test_another_optimizer_has_another_state(call, small, tmp_path):
    assert call(train, *small, "steps=2", f"runs={tmp_path}", "name=x").code == 0
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=4", "optimizer=muon")
    assert ended.code == 2
    assert "has the state of optimizer.kind=adamw, this run has muon; use optimizer=adamw" in ended.err


def test_a_whole_model_is_not_taken_from_a_broken_runs_checkpoint(call, small, tmp_path):
    """break_it=none has to say that nothing is broken, or typing it would change nothing and be taken for done."""
    assert call(train, *small, "break_it=no_max", "steps=2", f"runs={tmp_path}", "name=x").code == 0
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=4", "break_it=none")
    assert ended.code == 2
    assert "was trained with break_it: no_max, this run has none" in ended.err


def test_text_of_any_kind_survives_the_checkpoint(call, small, tmp_path):
    tags = ["wandb.project='${seed} ,=[x]'", "wandb.tags=[a,b]"]
    assert call(train, *small, *tags, "steps=2", f"runs={tmp_path}", "name=x").code == 0
    assert call(train, f"runs={tmp_path}", "resume=auto", "steps=3").code == 0
    before, after = (checkpoint.load(tmp_path / f"x/checkpoints/step_{step:06d}").state["config"] for step in (2, 3))
    assert after["wandb"] == before["wandb"]


def test_a_line_that_an_editor_left_in_the_metrics_does_not_end_the_run(call, small, tmp_path):
    """It was a JSONDecodeError at every resume, or a TypeError in the picture."""
    assert call(train, *small, "steps=2", f"runs={tmp_path}", "name=x").code == 0
    with open(tmp_path / "x" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, oops\n[]\n\n{"step": "2"}\n{"loss": 1}\n{"step": 1, "loss": null}\n\xff\n7\n')
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=3")
    assert ended.code == 0, ended.err
    assert ended.err.endswith("metrics.jsonl: left out 8 lines without a record\n")
    assert [record["step"] for record in records(tmp_path / "x")] == [1, 2, 3]


# --- broken on purpose ----------------------------------------------------------------------------------------------

# The largest score is about 30 before the first step, grows at this rate, and passes 88.7 at about the tenth.
OVERFLOW = [*tiled(16), "break_it=no_max", "break_it.score_gain=500", "optimizer.lr=1e-2", "checkpoint_every=1"]
OVERFLOW_NAME = "x-BROKEN-no_max+gain_500"


def test_nan_stops_the_run_before_the_optimizer_step(call, small, tmp_path):
    ended = call(train, *small, *OVERFLOW, "steps=30", f"runs={tmp_path}", "name=x")
    run = tmp_path / OVERFLOW_NAME
    spoilt = records(run)[-1]["step"]  # the step that met NaN is in the record too
    reached = spoilt - 1
    assert ended.code == 1
    assert 1 < reached < 30
    assert all(map(math.isfinite, losses(run)[:-1]))
    assert math.isnan(losses(run)[-1])
    good = checkpoint.load(checkpoint.last(run / checkpoint.FOLDER))
    assert good.step == reached
    assert all(tensor.isfinite().all() for tensor in good.model.values())
    assert f"step {reached + 1}: loss nan" in ended.out
    assert f"stopped before the update; last checkpoint {good.path.name}; try break_it=none or stop_on" in ended.out


def test_nan_in_a_sound_run_names_rate_warm_up_and_naive(call, small, tmp_path):
    """A rate near the largest float32: the first step is finite, what its weights compute is not."""
    ended = call(train, *small, "optimizer.lr=1e38", "optimizer.warmup_steps=0", f"runs={tmp_path}", "name=x")
    assert ended.code == 1
    assert "no checkpoint was saved" in ended.out
    assert "try: a lower optimizer.lr (it is 1e+38); a longer optimizer.warmup_steps; attention=naive" in ended.out


def test_a_run_that_ended_before_its_first_checkpoint_does_not_block_its_name(call, small, tmp_path):
    """name=x said to go on by resume=auto, and resume=auto said that there is no checkpoint."""
    command = [*small, f"runs={tmp_path}", "name=x", "steps=2", "eval_every=2"]
    ended = call(train, *command, "optimizer.lr=1e38", "optimizer.warmup_steps=0")
    assert ended.code == 1
    assert ended.out.endswith("no checkpoint was saved, so there is nothing to resume: the same command starts again\n")
    dead = (tmp_path / "x/metrics.jsonl").read_bytes()
    ended = call(train, *command)
    assert ended.code == 0, ended.err
    assert (
        f"an earlier run {tmp_path}/x ended before its first checkpoint: its files are now in {tmp_path}/x-unsaved-1\n"
        in ended.out
    )
    assert (tmp_path / "x-unsaved-1/metrics.jsonl").read_bytes() == dead
    assert "no checkpoint was saved" not in ended.out


def test_only_what_a_run_has_made_is_moved_out_of_the_way(tmp_path):
    def room(name: str) -> Path | None:
        with ExitStack() as held:
            return make_room(tmp_path / name, held)

    assert room("none") is None
    (tmp_path / "x/checkpoints/.tmp-step_000010-1").mkdir(parents=True)  # killed in its first save
    (tmp_path / "x/.tmp-loss.png").touch()
    (tmp_path / "x-unsaved-1").mkdir()
    with lock(tmp_path / "x"), pytest.raises(ValueError, match="by another process"):
        room("x")
    assert (tmp_path / "x/.tmp-loss.png").exists(), "not moved away under the process that trains there"
    assert room("x") == tmp_path / "x-unsaved-2"
    assert room("x") is None
    (tmp_path / "x/thesis.tex").touch()
    with pytest.raises(ValueError, match=r"has thesis\.tex, which no run writes: use another name="):
        room("x")
    (tmp_path / "x-unsaved-2/checkpoints/step_000010").mkdir()
    with pytest.raises(ValueError, match="exists already: continue it with resume=auto, or use another name="):
        room("x-unsaved-2")


def test_with_stop_on_nan_false_a_broken_run_goes_on_to_its_end(call, small, tmp_path):
    arguments = [*small, *OVERFLOW, "stop_on_nan=false", "steps=30", f"runs={tmp_path}", "name=x"]
    assert call(train, *arguments).code == 0
    found = losses(tmp_path / OVERFLOW_NAME)
    assert len(found) == 30
    assert math.isnan(found[-1])
    assert checkpoint.last(tmp_path / OVERFLOW_NAME / checkpoint.FOLDER).name == "step_000030"


def test_without_the_rescaling_a_run_is_finite_and_another_unless_one_tile_holds_all_keys(call, small, tmp_path):
    found = {}
    gain = "break_it.score_gain=100"  # scores of an untrained model are so small that alpha is nearly 1
    for block, broken in ((8, "none"), (8, "no_rescale"), (32, "none"), (32, "no_rescale")):
        runs = tmp_path / f"{block}-{broken}"
        ended = call(train, *small, *tiled(block), f"break_it={broken}", gain, "steps=20", f"runs={runs}")
        assert ended.code == 0
        (run,) = runs.iterdir()
        found[block, broken] = losses(run)
    assert all(map(math.isfinite, found[8, "no_rescale"]))
    assert all(whole != broken for whole, broken in zip(found[8, "none"], found[8, "no_rescale"], strict=True))
    assert found[32, "none"] == found[32, "no_rescale"]


def test_a_broken_run_says_so_everywhere(call, small, tmp_path, monkeypatch):
    figures = []

    def keep_figure(*arguments):
        figures.append(loss_figure(*arguments))
        return figures[-1]

    monkeypatch.setattr(metrics, "loss_figure", keep_figure)
    arguments = [*tiled(8), "break_it=no_rescale", "eval_every=2", "sample_every=2", "sample_tokens=5", "steps=4"]
    ended = call(train, *small, *arguments, f"runs={tmp_path}", "name=mine")
    run = tmp_path / "mine-BROKEN-no_rescale"
    assert [folder.name for folder in tmp_path.iterdir()] == [run.name]

    stamp = "BROKEN[no_rescale] "
    assert f"{stamp}attention is broken on purpose" in ended.out
    lines = [line for line in ended.out.splitlines() if re.search(r"(step|sample at step|eval step) +\d|done:", line)]
    assert len(lines) == 4 + 2 + 2 + 1 + 2  # steps, evaluations, samples, the end, and of the first look its two
    assert all(line.removeprefix("===== ").startswith(stamp) for line in lines)
    assert (run / "samples.txt").read_text().count(f"===== {stamp}sample at step") == 2
    assert all(record["broken"] == "no_rescale" for record in read_metrics(run / "metrics.jsonl"))
    assert figures
    assert all(figure.axes[0].get_title() == f"{run.name} - BROKEN: no_rescale" for figure in figures)
    assert checkpoint.load(run / "checkpoints/step_000004").state["broken"] == "no_rescale"

    sampled = call(sample, f"runs={tmp_path}", f"run={run.name}", "max_new_tokens=5", "num_samples=2")
    assert sampled.code == 0
    assert all(line.startswith(stamp) for line in sampled.err.splitlines())
    assert f"{stamp}--- sample 2 of 2" in sampled.out


def test_a_broken_run_without_a_name_is_named_after_its_fault(call, small, tmp_path):
    assert call(train, *small, "break_it=no_max", "steps=1", f"runs={tmp_path}").code == 0
    (run,) = tmp_path.iterdir()
    assert run.name.endswith("-BROKEN-no_max")


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_a_name_that_has_the_faults_word_in_it_is_stamped_all_the_same():
    """name=b-local_mask with break_it=local_mask was not."""
    assert metrics.broken_name("b-local_mask", "local_mask") == "b-local_mask-BROKEN-local_mask"
    assert metrics.broken_name("b-BROKEN-local_mask", "local_mask") == "b-BROKEN-local_mask"
    assert metrics.broken_name("b", "") == "b"


def test_only_what_there_is_is_said_at_the_end_and_a_warm_up_without_end_at_the_beginning(call, small, tmp_path):
    """samples.txt with sample_every=0, and a prompt of Python for a text of any kind."""
    ended = call(train, *small, "steps=2", f"runs={tmp_path}", "name=x")
    assert "samples.txt" not in ended.out
    assert "prompt=" not in ended.out
    assert " in 1 pass, " in ended.out
    slow = "the learning rate never reaches optimizer.lr=0.001: steps=2 is less than optimizer.warmup_steps=10\n"
    assert slow in ended.out
    ended = call(train, *small, "steps=2", "optimizer.warmup_steps=2", "sample_every=2", f"runs={tmp_path}", "name=y")
    assert f"  samples      {tmp_path}/y/samples.txt\n" in ended.out
    assert "never reaches" not in ended.out


@pytest.mark.parametrize("tokenizer", [["tokenizer=byte"], ["tokenizer=bpe", "tokenizer.vocab_size=300"]])
def test_bits_per_byte_are_the_bits_of_the_loss_over_the_bytes_of_the_text_that_was_predicted(
    call, small, tmp_path, tokenizer
):
    """The bytes counted by decoding: end of text stands for none, a merged token for several."""
    ended = call(train, *small, *tokenizer, "steps=8", "tokens_per_step=256", f"runs={tmp_path}", "name=x")
    assert ended.code == 0
    dataset = open_dataset(Path(re.search(r"^data: (\S+),", ended.out, re.MULTILINE)[1]))
    end = dataset.encoding.eot_token

    def size(y: torch.Tensor) -> int:
        return len(dataset.encoding.decode_bytes([token for token in y.flatten().tolist() if token != end]))

    loader = Loader(dataset.train, dataset.train_documents, batch_size=4, context_length=32, seed=1337)
    sizes = [size(loader.next().y) + size(loader.next().y) for _ in range(8)]  # two passes a step
    assert min(sizes) != 256  # otherwise nothing would be tested: bits per byte and per token would be the same
    for record, text_bytes in zip(records(tmp_path / "x"), sizes, strict=True):
        assert record["bits_per_byte"] == record["loss"] * 256 / (math.log(2) * text_bytes)

    (evaluation,) = records(tmp_path / "x", "val_loss")
    batches = [batch.y for batch in validation_batches(dataset.val, dataset.val_documents, 4, 32, 512)]
    bits = evaluation["val_loss"] * sum(y.numel() for y in batches) / math.log(2)
    # The loss was a quotient before it was multiplied again here: that may cost the last bit or two of 53.
    assert abs(evaluation["val_bits_per_byte"] * sum(map(size, batches)) - bits) <= 2**-51 * bits


def test_the_rate_rises_in_a_line_falls_to_its_floor_and_never_passes_the_peak():
    rates = OptimizerConfig(lr=0.5, min_lr_ratio=0.25, warmup_steps=8)
    found = [learning_rate(step, 40, rates) for step in range(1, 41)]
    assert found[:8] == [0.5 * step / 8 for step in range(1, 9)]
    assert all(a > b for a, b in pairwise(found[7:]))
    assert found[-1] == 0.25 * 0.5
    assert max(found) == 0.5


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_rate_needs_no_warm_up(warmup_steps):
    found = [learning_rate(step, 10, OptimizerConfig(lr=0.5, warmup_steps=warmup_steps)) for step in range(1, 11)]
    assert 0.4 < found[0] <= 0.5
    assert found[-1] == 0.05


def test_a_run_uses_the_schedule_step_by_step(call, small, tmp_path):
    ended = call(train, *small, "steps=20", "optimizer.warmup_steps=5", f"runs={tmp_path}", "name=x")
    assert ended.code == 0
    expected = [learning_rate(step, 20, OptimizerConfig(lr=1e-3, warmup_steps=5)) for step in range(1, 21)]
    assert [record["lr"] for record in records(tmp_path / "x")] == expected


# --- configuration --------------------------------------------------------------------------------------------------

OPTIONS = [f"{file.parent.name}={file.stem}" for file in sorted((ROOT / "conf").glob("*/*.yaml"))]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes(option):
    ((cfg, _overrides),) = config.compose([option], train.Config, "config", ROOT / "conf", "train")
    assert type(cfg) is train.Config
    assert config.from_dict(train.Config, asdict(cfg)) == cfg  # as a checkpoint keeps it


@pytest.mark.parametrize("preset", [option for option in OPTIONS if option.startswith("model=")])
def test_each_preset_made_small_knows_nothing_at_first(preset):
    """The loss of random tokens is ln V and what the logits' own spread adds. Of a normed row (length sqrt(C)) and
    weights of deviation 0.02 they are normal with variance C 0.02**2, which adds half of it; the logit of the row's own
    token, whose embedding the row contains where the head is tied, is at most C 0.02 larger; and the mean over the
    targets is a sample, here within five deviations."""
    small = ["model.n_layer=2", "model.n_head=4", "model.n_embd=64", "model.context_length=64", "model.vocab_size=512"]
    ((cfg, _overrides),) = config.compose([preset, *small], train.Config, "config", ROOT / "conf", "train")
    torch.manual_seed(0)
    model = GPT(cfg.model, resolve(cfg.attention, "cpu"))
    idx, targets = torch.randint(512, (2, 32, 64))
    variance = 64 * 0.02**2
    sampling = 5 * math.sqrt(variance / targets.numel())
    difference = float(model(idx, targets).detach()) - math.log(512)
    assert variance / 2 - sampling < difference < variance / 2 + math.expm1(64 * 0.02) / 512 + sampling


# --- refused: what tests/test_bad_input.py has not -------------------------------------------------------------------


def test_a_text_that_is_too_short_or_another_than_the_checkpoints_is_refused(call, small, tmp_path):
    given = [argument for argument in small if not argument.startswith("data.path=")]
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "other.txt").write_text("another text\n" * 1000)
    ended = call(train, *given, f"data.path={tmp_path}/short.txt", f"runs={tmp_path}/runs", "name=x")
    assert ended.code == 2
    assert "use more text or a smaller model.context_length" in ended.err
    assert not (tmp_path / "runs").exists()
    assert call(train, *small, "steps=2", f"runs={tmp_path}/runs", "name=x").code == 0
    other = [f"data.path={tmp_path}/other.txt", f"data.cache={tmp_path}/cache", "resume=auto", "steps=4"]
    ended = call(train, *given, *other, f"runs={tmp_path}/runs")
    assert ended.code == 2
    assert "trained on another text, or on this one before it was edited" in ended.err
    assert "use the same data and tokenizer" in ended.err


def test_gpt2s_tokenizer_without_a_network_is_one_line(call, small, tmp_path, monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    line = call(train, *small, "tokenizer=gpt2", f"runs={tmp_path}/runs").err
    assert line.startswith("train: tokenizer=gpt2 has to download its vocabulary and could not (ConnectionError)")
    assert line.endswith("into a folder and set TIKTOKEN_CACHE_DIR to it, or use tokenizer=bpe\n")


def test_damaged_token_files_are_made_again_once_deleted(call, small, tmp_path):
    arguments = [*small, f"data.cache={tmp_path}/cache", "steps=1"]
    assert call(train, *arguments, f"runs={tmp_path}/runs", "name=before").code == 0
    (file,) = (tmp_path / "cache").glob("*/train.bin")
    os.truncate(file, file.stat().st_size - 10)
    ended = call(train, *arguments, f"runs={tmp_path}/refused")
    assert ended.code == 2
    assert f"delete {file.parent} and run again" in ended.err
    shutil.rmtree(file.parent)
    assert call(train, *arguments, f"runs={tmp_path}/runs", "name=after").code == 0
    assert losses(tmp_path / "runs/before") == losses(tmp_path / "runs/after")


def test_the_command_line_itself_answers_a_mistake_with_one_line_and_no_traceback(start, tmp_path):
    commands = {
        ("train.py", "--lr=1"): "train: --lr=1: options are written key=value here, without dashes; "
        "did you mean optimizer.lr=1?\n",
        ("sample.py", f"runs={tmp_path}"): f"sample: run=latest: no checkpoint in {tmp_path}/*; "
        "train one first: python train.py\n",
    }
    started = {command: start(*command) for command in commands}
    for command, process in started.items():
        out, err = process.communicate(timeout=HANGS)
        assert (process.returncode, out, err) == (2, "", commands[command])


def test_a_broken_run_that_goes_on_past_nan_still_writes_its_samples(call, small, tmp_path):
    """multinomial raises RuntimeError for NaN, so a run with stop_on_nan=false died at its first sample."""
    arguments = ["stop_on_nan=false", "steps=30", "sample_every=10", "sample_tokens=5", f"runs={tmp_path}", "name=x"]
    assert call(train, *small, *OVERFLOW, *arguments).code == 0


def test_the_line_of_a_stopped_run_goes_on_to_the_same_number_of_steps(call, small, tmp_path, monkeypatch):
    """It left steps= out, which then was the default: a run of 5000 steps would have ended at 700."""
    log = Metrics.log

    def log_and_stop(self, record):
        log(self, record)
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "log", log_and_stop)
    ended = call(train, *small, "steps=5000", f"runs={tmp_path}", "name=x")
    _python, _script, *printed = shlex.split(ended.out.splitlines()[-1].partition("to go on: ")[2])
    ((cfg, _),) = config.compose(printed, train.Config, "config", ROOT / "conf", "train", train.resumed_config)
    assert cfg.steps == 5000


@pytest.mark.parametrize("place", ["favourite", "folder/favourite"])
def test_a_checkpoint_under_a_name_of_ones_own_is_resumed_as_a_new_run(call, small, tmp_path, monkeypatch, place):
    """favourite: IndexError of parents[1]. folder/favourite: name '' and "the run runs exists already"."""
    arguments = [*small, f"runs={tmp_path}/runs"]
    assert call(train, *arguments, "steps=2", "name=x").code == 0
    monkeypatch.chdir(tmp_path)
    shutil.copytree("runs/x/checkpoints/step_000002", place)
    ended = call(train, *arguments, "steps=4", f"resume={place}")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(("key", "value"), [("dtype", "BF16"), ("dtype", "Float32")])
def test_a_value_is_taken_as_written_or_refused(call, small, tmp_path, key, value):
    """dtype=BF16 passed the check, which lowers the case, and trained in float32 under the name BF16."""
    ended = call(train, *small, "steps=1", f"{key}={value}", f"runs={tmp_path}", "name=x")
    assert ended.code == 2 or f"{key} {value.lower()} " in ended.out


@pytest.mark.parametrize("size", sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml")))
def test_every_preset_makes_whole_steps_by_default(size):
    """model=gpt2 alone was refused: 4,096 tokens a step are no multiple of 16 * 1024."""
    ((cfg, _),) = config.compose([f"model={size}"], train.Config, "config", ROOT / "conf", "train")
    per_pass = cfg.batch_size * cfg.model.context_length
    assert (cfg.tokens_per_step or per_pass) % per_pass == 0


def test_a_broken_runs_own_sample_does_not_end_it(call, small, tmp_path):
    """The weights may turn NaN in the very step that is sampled: the loss was finite, what it left behind is not. The
    sampler's error used to end the run, without a stamp and without what to try."""
    there = [f"runs={tmp_path}", "name=x", "steps=30", "sample_every=1", "sample_tokens=5"]
    ended = call(train, *small, *OVERFLOW, *there)
    assert ended.code == 1
    assert "stopped before the update" in ended.out


@pytest.mark.parametrize("where", ["to_yaml", "run:"])
def test_what_fails_before_the_first_step_lets_go_of_the_folder_and_of_the_metrics(
    call, small, tmp_path, monkeypatch, where
):
    """The lock was held, and wandb and the progress bar left open, by a run that could not write its config.yaml or
    print its first line."""
    closed = []
    monkeypatch.setattr(Metrics, "close", lambda self, code: closed.append(code))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "to_yaml":
        monkeypatch.setattr(config, "to_yaml", full)
    else:
        say = Metrics.say
        monkeypatch.setattr(Metrics, "say", lambda self, text: full() if text.startswith(where) else say(self, text))
    ((cfg, _),) = config.compose(
        [*small, "steps=1", f"runs={tmp_path}", "name=x"], train.Config, "config", ROOT / "conf", "train"
    )
    with pytest.raises(OSError, match="No space left") as error:  # whose traceback keeps what main() had
        train.main(cfg)
    assert error
    assert closed == [1]
    lock(tmp_path / "x").close()


@pytest.mark.parametrize(
    ("keys", "way_out"),
    [
        (["batch_size=4"], "batch_size=2 tokens_per_step=256"),
        (["batch_size=1"], "model.activation_checkpointing=selective"),
        (["batch_size=1", "attention=naive"], "model.activation_checkpointing=true"),
        (["batch_size=1", "model.activation_checkpointing=selective"], "model.chunk=32"),
    ],
)
def test_out_of_memory_is_one_line_with_what_fits_and_learns_the_same(
    call, small, tmp_path, monkeypatch, keys, way_out
):
    """On a CPU it was a traceback: torch's error there is a RuntimeError like any other."""
    monkeypatch.setattr(train, "enqueue", lambda run: torch.empty(2**60))
    ended = call(train, *small, "tokens_per_step=256", *keys, f"runs={tmp_path}", "name=x")
    assert ended.code == 2
    said = f"train: out of memory with {keys[0]} sequences of 32 tokens; use {way_out}, "
    assert ended.err.endswith(f"{said}which learns the same\n")


@pytest.mark.parametrize("batch_size", [10**12, 10**17, 10**20])
def test_a_batch_that_no_memory_holds_is_one_line(call, small, tmp_path, batch_size):
    """The memory of the batches is made once, and was made where no one caught the error."""
    ended = call(train, *small, "tokens_per_step=null", f"batch_size={batch_size}", f"runs={tmp_path}")
    assert ended.code == 2
    assert f"train: out of memory with batch_size={batch_size} sequences of 32 tokens; use batch_size=" in ended.err


def test_only_memory_that_is_missing_is_called_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))  # pinned memory
    assert not is_out_of_memory(RuntimeError("a bug"))


def test_a_run_leaves_the_configuration_that_it_was_given_as_it_was(small, tmp_path):
    """It wrote its name, the size of the vocabulary and the rate into it, and callers came to rely on that."""
    typed = [*small, "steps=1", "break_it=no_max", "optimizer.lr=null", f"runs={tmp_path}", "name=x"]
    ((cfg, _),) = config.compose(typed, train.Config, "config", ROOT / "conf", "train")
    given = copy.deepcopy(cfg)
    assert train.main(cfg) == 0
    assert cfg == given


@dataclass
class LaterAttention(AttentionConfig):
    sinks: int = 0  # an option that this version does not have


@dataclass
class LaterConfig(train.Config):
    attention: LaterAttention = field(default_factory=LaterAttention)


def test_an_option_of_attention_that_comes_later_is_compared_on_resume():
    """Options were compared by a list: what was not added to it was ignored, and the run went on as another model."""
    state = {"config": asdict(LaterConfig()), "broken": ""}
    resumed = checkpoint.Checkpoint(Path("step_000001"), 1, {}, state, "")
    refuse_another_model(resumed, LaterConfig(attention=LaterAttention(block_m=32, dropout_p=0.5)))
    with pytest.raises(ValueError, match=r"step_000001 was trained with attention\.sinks=0, this run has 4"):
        refuse_another_model(resumed, LaterConfig(attention=LaterAttention(sinks=4)))


def test_what_changed_since_the_checkpoint_is_said(call, small, tmp_path):
    there = [f"runs={tmp_path}", "name=x"]
    assert call(train, *small, *there, "steps=2", "optimizer.lr=1e-2", "attention.dropout_p=0.1").code == 0
    typed = ["steps=4", "resume=auto", "optimizer.lr=2e-2", "attention.dropout_p=0"]
    ended = call(train, *small, *there, *typed)
    said = "changed since the checkpoint: attention.dropout_p 0.1 -> 0.0, optimizer.lr 0.01 -> 0.02, steps 2 -> 4"
    assert said in ended.out.splitlines()


# Five lines that stand for 9**4 numbers; with nine of them, printing what was edited took a minute.
ALIASES = "".join(f"x{i}: &x{i} [{','.join([f'*x{i - 1}'] * 9) if i else 9}]\n" for i in range(5))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", None),
        ("steps: 700", "steps: 9", None),  # as it is typed
        ("name: null", "name: x", None),  # of a run that was renamed
        ("lr: null\n", "lr: 0.5\n", "has been edited, optimizer.lr=0.5: "),
        ("batch_size: 16", "batch_sizes: [4]", "has been edited, batch_sizes=[4]: "),
        ("n_layer: 12", "n_layer: [", "is not a configuration any more: "),
        ("n_layer: 12", "n_layer: 2020-13-45", "is not a configuration any more: "),
        ("n_layer: 12", f"n_layer: [{'9,' * 2**15}]", "is not a configuration any more: "),  # larger than is read
        ("name: null\n", ALIASES, "is not a configuration any more: "),
        *[
            ("steps: 700", f"steps: !!{tag}", "is not a configuration any more: ")
            for tag in ("int ''", "bool x", "float ''")
        ],
        ("steps: 700", "other: null", "has been edited, other=null: "),
    ],
)
def test_what_someone_wrote_into_the_configuration_is_found(tmp_path, old, new, said):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(train.Config()).replace(old, new, 1))
    found = edits(file, asdict(train.Config()), asdict(train.Config(steps=9)))
    assert (found or "").startswith(f"{file} {said}" if said else "")
    assert (found is None) == (said is None)


def test_an_edited_configuration_is_not_read_and_that_is_said(call, small, tmp_path):
    """runs/NAME/config.yaml was written anew on resume without a word about what had been changed in it."""
    there, file = [f"runs={tmp_path}", "name=x"], tmp_path / "x" / "config.yaml"
    for steps, resume in ((1, []), (2, ["resume=auto"])):
        ended = call(train, *(small if not resume else []), *there, *resume, f"steps={steps}")
        assert ended.code == 0
        assert str(file) not in ended.out
    file.write_text(file.read_text().replace("lr: 0.001", "lr: 0.5"))
    ended = call(train, *there, "resume=auto", "steps=3")
    assert f"{file} has been edited, optimizer.lr=0.5: " in ended.out
    assert yaml.safe_load(file.read_text())["optimizer"]["lr"] == 0.001


def test_another_window_is_another_model(call, small, tmp_path):
    there = [f"runs={tmp_path}", "name=x"]
    assert call(train, *small, *there, "steps=2", "attention.window=4").code == 0
    ended = call(train, *small, *there, "steps=4", "resume=auto", "attention.window=null")
    assert ended.code == 2
    assert "was trained with attention.window=4, this run has None" in ended.err


def test_a_name_of_two_lines_is_refused(call, small, tmp_path):
    ended = call(train, *small, f"runs={tmp_path / 'runs'}", "name=a\nb")
    assert ended.code == 2
    assert "name=" in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_looks_like_mathematics_is_drawn_as_it_is(call, small, tmp_path):
    """Matplotlib read the title as TeX, and its error ended the run before the first checkpoint."""
    assert call(train, *small, "steps=2", f"runs={tmp_path}", "name=a$^^bad{$b").code == 0
    assert (tmp_path / "a$^^bad{$b" / "loss.png").exists()


def test_a_full_disk_is_told_by_the_checkpoint_and_not_by_the_last_picture(call, small, tmp_path, monkeypatch):
    """The picture that a run draws at its end failed too, and its bare error took the place of the first."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    full_too = OSError("free some space and run again")
    monkeypatch.setattr(activities, "write_checkpoint", lambda run: (_ for _ in ()).throw(full_too))
    monkeypatch.setattr(Metrics, "picture", full)
    ended = call(train, *small, "steps=1", "eval_every=1", f"runs={tmp_path}", "name=x")
    assert (ended.code, ended.err.splitlines()[-1]) == (2, "train: free some space and run again")


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError("no memory")], ids=str)
def test_a_run_that_failed_closes_its_metrics_whatever_became_of_its_last_checkpoint(
    call, small, tmp_path, monkeypatch, error
):
    """The last checkpoint fails in its thread after another error has ended the run."""
    codes, close = [], Metrics.close

    def fails(folder, step, **kwargs):
        time.sleep(0.1)
        raise error

    def spy(metrics, code):
        codes.append(code)
        close(metrics, code)

    monkeypatch.setattr(checkpoint, "save", fails)
    monkeypatch.setattr(Writer, "raise_error", lambda writer: 1 / 0)
    monkeypatch.setattr(Metrics, "close", spy)
    with pytest.raises(Exception, match=r"division by zero|no memory"):
        call(train, *small, "steps=3", "checkpoint_every=1", f"runs={tmp_path}", "name=x")
    assert codes == [1]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_sample_is_written_with_weights_in_the_dtype_of_the_products(call, small, tmp_path, monkeypatch, dtype):
    """Each made once: a tied head stays tied, and in float32 they are the model's own."""
    runs, models, session_of = [], [], activities.session_of

    def spy(run):
        session = session_of(run)
        runs.append(run)
        models.append(session.model)
        return session

    monkeypatch.setattr(activities, "session_of", spy)
    arguments = ["steps=2", "sample_every=1", "sample_tokens=3", f"dtype={dtype}", "compile=false", "ema_decay=0.5"]
    assert call(train, *small, *arguments, f"runs={tmp_path}", "name=x").code == 0
    wanted = {"float32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for run, model in zip(runs, models, strict=True):
        assert {p.dtype for p in model.parameters()} == {wanted}
        assert (model.head.weight is model.embedding.weight) == run.cfg.model.tie_head
        own = model.norm.weight.data_ptr() == run.averaged.norm.weight.data_ptr()
        assert own == (dtype == "float32")
        assert run.averaged.training


def test_a_sample_by_what_is_kept_from_the_last_one_is_that_of_todays_weights(call, small, tmp_path, monkeypatch):
    texts, write = [], activities.write_sample

    def twice(run):
        """By what is kept, as where steps are recorded, and by what is made anew."""
        kept, run.train_step.way = run.session, "recorded"
        text, run.session, kept = write(run), None, kept or run.session
        texts.append((text, write(run)))
        run.session, run.train_step.way = kept, "eager"
        return text

    monkeypatch.setattr(activities, "write_sample", twice)
    arguments = ["steps=3", "sample_every=1", "sample_tokens=20", "dtype=bf16", "compile=false", "optimizer.lr=0.1"]
    assert call(train, *small, *arguments, "optimizer.warmup_steps=0", f"runs={tmp_path}", "name=x").code == 0
    assert len(texts) == 3
    assert len(set(texts)) > 1
    assert all(kept == anew for kept, anew in texts)


def test_a_checkpoint_that_its_thread_cannot_write_ends_the_run(call, small, tmp_path, monkeypatch):
    save = Writer.save

    def fails(writer, *args, **kwargs):
        path = save(writer, *args, **kwargs)
        futures.wait([writer.written])
        return path

    def full(folder, step, **kwargs):
        raise OSError(f"checkpoint of step {step} could not be written")

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(Writer, "save", fails)
    ended = call(train, *small, "steps=9", "checkpoint_every=3", f"runs={tmp_path}", "name=x")
    assert (ended.code, ended.err.splitlines()[-1]) == (2, "train: checkpoint of step 3 could not be written")
    assert read_metrics(tmp_path / "x/metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("where", ["training.writer.on_host", "training.checkpoint.save"])
def test_memory_that_a_checkpoint_lacks_is_not_the_batchs(call, small, tmp_path, monkeypatch, where):
    """The advice was a smaller batch_size."""
    monkeypatch.setattr(where, lambda *_, **__: torch.empty(2**60))
    ended = call(train, *small, "steps=1", f"runs={tmp_path}", "name=x")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("train: the machine's memory ran out while a checkpoint was written")


def test_a_nan_is_told_though_the_last_checkpoint_could_not_be_written(call, small, tmp_path, monkeypatch):
    save = checkpoint.save

    def full(folder, step, **kwargs):
        if step == 2:
            time.sleep(0.2)  # so that the run hears of it at its stop
            raise OSError("checkpoint of step 2 could not be written")
        return save(folder, step, **kwargs)

    monkeypatch.setattr(checkpoint, "save", full)
    update, made = training.step.TrainStep.update, count(1)

    def third_is_bad(step, batches):
        if next(made) == 3:
            next(step.model.parameters()).data.fill_(math.nan)
        update(step, batches)

    monkeypatch.setattr(training.step.TrainStep, "update", third_is_bad)
    ended = call(train, *small, "steps=9", "checkpoint_every=1", f"runs={tmp_path}", "name=x")
    assert ended.code == 1
    assert "checkpoint of step 2 could not be written" in ended.out
    assert "step 3: loss nan" in ended.out
    assert f"last good checkpoint: {tmp_path / 'x/checkpoints/step_000001'}" in ended.out


@pytest.mark.parametrize("end", ["signal", "nan"])
def test_a_checkpoint_is_complete_when_the_run_names_it(call, small, tmp_path, monkeypatch, end):
    save, say, named = checkpoint.save, Metrics.say, []

    def slow(folder, step, **kwargs):
        if end == "signal" and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return save(folder, step, **kwargs)

    def spy(metrics, text):
        named.extend(Path(path).is_dir() for path in re.findall(r"\S*step_\d{6}", text))
        say(metrics, text)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(Metrics, "say", spy)
    bad = ["optimizer.lr=1e30", "optimizer.warmup_steps=1"] if end == "nan" else []
    call(train, *small, "steps=9", "checkpoint_every=1", f"runs={tmp_path}", "name=x", *bad)
    assert named
    assert all(named)


# --- attention's options, all the way through ------------------------------------------------------------------------

ATTENTION = {
    "documents": ["attention.documents=true"],
    "window": ["attention.window=9"],
    "windows": ["attention.windows=[5,null]"],
    "alibi": ["attention.alibi=true"],
    "softcap": ["attention.softcap=0.05"],
    "scale": ["attention.softmax_scale=3"],
    "blocks": ["attention.block_mask=[x...,.x..,..x.,x..x]", "attention.block_mask_size=16"],
    "order": ["attention.order=keys_outside"],
    "together": ["attention.documents=true", "attention.window=9", "attention.alibi=true", "attention.dropout_p=0.1"],
}


@pytest.mark.parametrize("option", ATTENTION)
def test_attentions_options_reach_every_layer_in_training_and_validation(call, small, tmp_path, monkeypatch, option):
    """What the layers hand to attention(); what that makes of it is tests/test_attention.py's and test_mask.py's."""
    seen = []

    def spy(q, k, v, given, **options):
        seen.append((given, options["documents"]))
        return attention(q, k, v, given, **options)

    monkeypatch.setattr("model.gpt.attention", spy)
    there = [f"runs={tmp_path}", "name=a", "steps=1", "batch_size=8", "tokens_per_step=null", "model.context_length=64"]
    ended = call(train, *small, *there, "attention=tiled", *ATTENTION[option])
    assert ended.code == 0, ended.err
    cfg = config.from_dict(train.Config, checkpoint.load(tmp_path / "a/checkpoints/step_000001").state["config"])
    assert cfg.attention != AttentionConfig("tiled")
    assert [given for given, _ in seen] == [cfg.attention.layer(i) for i in range(2)] * (len(seen) // 2)
    dataset = open_data(cfg.data, cfg.tokenizer)
    loader = Loader(dataset.train, dataset.train_documents, batch_size=8, context_length=64, seed=cfg.seed)
    batches = validation_batches(dataset.val, dataset.val_documents, 8, 64, cfg.eval_tokens)
    for number, batch in enumerate([loader.next(), *batches]):
        for _, documents in seen[2 * number : 2 * number + 2]:
            assert torch.equal(documents, batch.documents) if cfg.attention.documents else documents is None
    assert len(seen) == 2 * (number + 1)


@pytest.mark.parametrize("wanted", [False, True])
def test_documents_are_numbered_only_for_an_attention_that_looks_at_them(call, small, tmp_path, monkeypatch, wanted):
    """Numbering took half of the loader's time in every run, to be thrown away in most."""
    handed = []

    class Spy(GPT):
        def forward(self, idx, targets=None, documents=None, **rest):
            handed.append(documents is not None)
            return super().forward(idx, targets, documents, **rest)

    monkeypatch.setattr("training.run.RecomputingGPT", Spy)
    there = ["steps=2", f"attention.documents={wanted}", f"runs={tmp_path}", "name=x"]
    assert call(train, *small, *there).code == 0
    assert handed == [wanted] * (2 + 4)  # two steps, and 512 tokens of validation


SHORT = ["steps=1", "model.context_length=64", "tokens_per_step=null"]


def test_a_run_with_attentions_options_is_sampled_from(call, small, tmp_path):
    for option in ("documents", "windows", "alibi", "blocks", "order"):
        where = [f"runs={tmp_path}", f"name={option}"]
        assert call(train, *small, *where, *SHORT, *ATTENTION[option]).code == 0
        ended = call(sample, f"run={option}", f"runs={tmp_path}", "max_new_tokens=80", "device=cpu")  # past the context
        assert ended.code == 0, ended.err
        assert call(sample, f"run={option}", f"runs={tmp_path}", "max_new_tokens=5", "impl=naive").code == 0


def test_a_key_that_an_old_checkpoint_lacks_has_its_default(call, small, tmp_path):
    """Compared with itself, whatever is typed now would pass for what the run was trained with."""
    where = [f"runs={tmp_path}", "name=a"]
    assert call(train, *small, *where, "steps=1").code == 0
    header = tmp_path / "a/checkpoints/step_000001/state.json"
    content = json.loads(header.read_text())
    del content["state"]["config"]["attention"]["alibi"], content["state"]["config"]["ema_decay"]
    del content["sha256"]["state.json"]
    sha256 = content.pop("sha256")
    content["sha256"] = sha256 | {"state.json": checkpoint._header_hash(content)}
    header.write_text(json.dumps(content))
    ended = call(train, *small, *where, "resume=auto", "steps=2", "attention.alibi=true")
    assert ended.code == 2
    assert "attention.alibi=False, this run has True" in ended.err
    ended = call(train, *small, *where, "resume=auto", "steps=2", "ema_decay=0.5", "optimizer.lr=null")
    assert "ema_decay 0.0 -> 0.5" in ended.out
    assert "optimizer.lr 0.001 -> 0.0144" in ended.out


@pytest.mark.parametrize("writes", ["log_every=1", "sample_every=3", "eval_every=3", "checkpoint_every=3"])
def test_a_run_whose_folder_is_deleted_ends_with_one_line_and_makes_no_other(
    call, small, tmp_path, monkeypatch, writes
):
    """It went on to a bare [Errno 2], after a checkpoint in a new folder of the same name."""
    send = train.enqueue

    def send_and_delete(run):
        if run.step == 2:
            shutil.rmtree(run.folder)
        send(run)

    monkeypatch.setattr(train, "enqueue", send_and_delete)
    seldom = [f"{key}=100" for key in ("log_every", "sample_every", "eval_every", "checkpoint_every")]
    ended = call(train, *small, *seldom, writes, "steps=4", f"runs={tmp_path}", "name=x")
    assert ended.code == 2
    assert ended.err.startswith(f"train: the folder {tmp_path / 'x'} was deleted or moved while the run went on")
    assert ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_its_metrics_ends_with_one_line_and_goes_on_from_its_checkpoint(
    call, small, tmp_path, monkeypatch
):
    """It said that the checkpoints were gone too."""
    send = train.enqueue

    def send_and_delete(run):
        if run.step == 3:
            run.writer.wait()  # for the checkpoint, which a thread writes
            (run.folder / "metrics.jsonl").unlink()
        send(run)

    given = ["steps=4", "checkpoint_every=2", f"runs={tmp_path}", "name=x"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "enqueue", send_and_delete)
        ended = call(train, *small, *given)
    (line,) = [line for line in ended.err.splitlines() if not line.startswith("data: ")]  # which prepares the text
    assert ended.code == 2
    assert line.startswith(f"train: {tmp_path / 'x/metrics.jsonl'} was deleted or moved")
    ended = call(train, *given, "resume=auto")
    assert ended.code == 0
    assert "resumed from" in ended.out
