"""A resumed run is the run that was never stopped, bit for bit."""

import json
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import train
from tests.processes import HANGS
from tests.runs import assert_same_run, last, read_metrics, records
from training.checkpoint import FOLDER, all_checkpoints, load_checkpoint
from training.step import TrainStep

DROPOUT = "model.dropout_p=0.1 attention.dropout_p=0.1"
RECIPES = [f"{DROPOUT} sample_every=5", "dtype=fp16",
           "optimizer=muon tokens_per_step=256 model.bigram_rows=50 model.mix_x0=true",
           "dtype=bf16 attention=naive attention.documents=true", f"model.recompute=true {DROPOUT}",
           "data.source=recall data.path=null"]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_at_5_and_resumed_is_the_run_of_10_steps_bit_for_bit(small_run, call, tmp_path, recipe):
    """Typed steps alone differ: the rates of both runs are those of 10 steps, because the schedule is constant."""
    every = "eval_every=5 checkpoint_every=5 optimizer.min_lr_ratio=1"
    small_run(f"name=whole steps=10 {every} {recipe}")
    small_run(f"name=parts steps=5 {every} {recipe}")
    ended = call(train, "resume=auto", "name=parts", f"runs={tmp_path}", "steps=10")
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(call, small, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run of 60 steps that nothing has stopped, and its arguments."""
    runs = tmp_path_factory.mktemp("whole")
    typed = f"steps=60 eval_every=9 sample_every=12 sample_tokens=20 checkpoint_every=7 {DROPOUT}".split()
    ended = call(train, *small, *typed, f"runs={runs}", "name=whole")
    assert ended.code == 0, ended.err
    return runs / "whole", [*small, *typed]


def wait_for(folder: Path, step: int) -> None:
    """Until a run has recorded a step."""
    end, file = time.monotonic() + HANGS, folder / "metrics.jsonl"
    while time.monotonic() < end and (not file.exists() or f'"step": {step},' not in file.read_text()):
        time.sleep(0.005)


def resumed_until_the_end(start, folder: Path, steps: int = 60) -> None:
    process = start("train.py", "resume=auto", f"name={folder.name}", f"runs={folder.parent}")
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert records(folder)[-1]["step"] == steps, out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_a_random_moment_goes_on_as_if_nothing_had_been(start, whole, tmp_path, seed):
    draw = random.Random(seed)
    other, typed = whole
    process = start("train.py", *typed, f"runs={tmp_path}", "name=x")
    wait_for(tmp_path / "x", draw.randrange(8, 55))
    time.sleep(draw.random() * 0.05)
    process.kill()
    process.wait(HANGS)
    resumed_until_the_end(start, tmp_path / "x")
    assert_same_run(tmp_path / "x", other)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_the_step_that_was_reached_and_the_exit_code_names_it(start, whole, tmp_path, number):
    other, typed = whole
    process = start("train.py", *typed, f"runs={tmp_path}", "name=x")
    wait_for(tmp_path / "x", 18)  # where it evaluates
    for _ in range(2):  # as `timeout` does
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 128 + number, err
    assert load_checkpoint(last(tmp_path / "x")).step == records(tmp_path / "x")[-1]["step"]
    assert f"resume=auto name=x runs={tmp_path}" in out
    resumed_until_the_end(start, tmp_path / "x")
    assert_same_run(tmp_path / "x", other)


@pytest.mark.slow
def test_a_second_signal_kills(start, whole, tmp_path):
    """An update of 20,000 micro-batches is long, and no signal ends it: the second one has to."""
    process = start("train.py", *whole[1], "tokens_per_step=2560000", f"runs={tmp_path}", "name=x")
    next(line for line in process.stdout if line.startswith("trains from"))
    time.sleep(1)  # until train() listens to signals
    process.send_signal(signal.SIGINT)
    next(line for line in process.stderr if "a second signal" in line)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANGS) == -signal.SIGINT


def test_a_signal_during_an_evaluation_saves_the_step_and_the_evaluation_comes_later(small_run, tmp_path, monkeypatch):
    """What was probed before it is not probed again."""
    once, loss_of = iter([signal.SIGINT]), TrainStep.loss_of
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "loss_of", lambda *args: (*map(signal.raise_signal, once), loss_of(*args))[-1])
        small_run("steps=8 eval_every=4 checkpoint_every=100 probe.every=4", code=130)
    assert load_checkpoint(last(tmp_path / "x")).step == 4
    small_run("resume=auto steps=8 eval_every=4 probe.every=4")
    for key in ("val_loss", "max_score"):
        assert [record["step"] for record in records(tmp_path / "x", key)] == [4, 8], key


def test_from_an_earlier_checkpoint_later_ones_are_set_aside_and_later_records_deleted(small_run, tmp_path):
    small_run("steps=6 checkpoint_every=2 keep_last=9")
    x = tmp_path / "x"
    small_run(f"resume={x}/../x/checkpoints/step_000002 name=x steps=4")
    assert [path.name for path in all_checkpoints(x / FOLDER)] == ["step_000002", "step_000004"]
    assert {path.name for path in (x / FOLDER).glob("later-*")} == {"later-step_000004", "later-step_000006"}
    assert [record["step"] for record in records(x)] == [1, 2, 3, 4]


def test_a_nan_leaves_the_weights_before_it_to_go_on_from(small_run, tmp_path):
    """And no checkpoint of step 0, so that the name is free."""
    rate = "optimizer.lr=1e30 optimizer.warmup_steps=0 optimizer.min_lr_ratio=1"
    said = small_run(f"steps=5 name=nan probe.every=1 {rate}", code=1).out
    small_run(f"steps=1 name=one {rate}")
    (nan,), (one,) = (all_checkpoints(tmp_path / name / FOLDER) for name in ("nan", "one"))
    a, b = map(load_checkpoint, (nan, one))
    assert a.step == b.step == 1
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in b.weights)
    assert f"resume=auto name=nan runs={tmp_path} optimizer.lr=5e+29" in said
    fault = next((tmp_path / "nan" / "faults").iterdir())  # which has no optimizer
    assert "optimizer" in small_run(f"resume={fault} name=nan", code=1).err
    batch = load_checkpoint(fault).training["batch.x"].clone()
    small_run("resume=auto name=nan optimizer.lr=1e29", code=1)  # NaN at step 2 again, with another batch
    assert not torch.equal(load_checkpoint(fault).training["batch.x"], batch)
    assert "resume=" not in small_run("steps=5 attention.softmax_scale=1e30", code=1).out  # there is no checkpoint
    small_run("steps=1 seed=5")
    assert "seed=5" in (tmp_path / "x" / "typed.txt").read_text()


def test_a_text_in_a_checkpoint_is_text_and_an_unknown_key_one_line(small_run, tmp_path):
    small_run("steps=1")
    state = last(tmp_path / "x") / "state.json"
    state.write_text(state.read_text().replace('"project": null', '"project": "${oc.env:HOME}"'))
    small_run("resume=auto steps=2", "data.field=${x}")
    assert OmegaConf.load(tmp_path / "x" / "config.yaml").wandb.project == "${oc.env:HOME}"
    state = last(tmp_path / "x") / "state.json"
    state.write_text(state.read_text().replace('"n_layer"', '"n_layers"'))
    for err in small_run("resume=auto steps=3", code=1).err, small_run("init_from=x name=y", code=1).err:
        assert "n_layers" in err
        assert "Traceback" not in err


def test_a_full_disk_is_one_line_and_what_was_saved_is_there(small_run, tmp_path):
    small_run("steps=2")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # less than the weights
        err = small_run("resume=auto steps=4", code=1).err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "too large" in err
    assert "Traceback" not in err
    assert load_checkpoint(last(tmp_path / "x")).step == 2
    small_run("resume=auto steps=4")


def test_what_was_typed_for_a_run_holds_after_a_resume_and_what_is_typed_then_wins(small_run, call, tmp_path):
    small_run("steps=2 seed=7 attention.dropout_p=0.5 checkpoint_every=2")
    resume = train, "resume=auto", "name=x", f"runs={tmp_path}", "steps=3", "attention=naive"
    assert "nothing to train" not in (said := call(*resume).out)
    assert f"rate {records(tmp_path / 'x')[2]['lr']:.2e}" in said  # that of the next step
    assert "nothing to train" in call(*resume).out
    kept = load_checkpoint(last(tmp_path / "x")).state["config"]
    assert (kept["seed"], kept["steps"], kept["model"]["n_embd"]) == (7, 3, 32)
    assert (kept["attention"]["impl"], kept["attention"]["dropout_p"]) == ("naive", 0.5)


@pytest.mark.parametrize("typed", ["model.n_embd=64", "optimizer=muon", "experiment=smoke", "tokenizer=bpe", "seed=3",
                                   "init_from=x"])  # fmt: skip
def test_what_contradicts_a_resumed_run_is_refused(small_run, call, tmp_path, typed):
    small_run("steps=2")
    before = read_metrics(tmp_path / "x" / "metrics.jsonl")
    ended = call(train, "resume=auto", "name=x", f"runs={tmp_path}", typed)
    assert (ended.code, "Traceback" in ended.err) == (1, False)
    assert typed.split("=")[0].split(".")[0] in ended.err
    assert read_metrics(tmp_path / "x" / "metrics.jsonl") == before


def test_a_resumed_run_goes_on_with_its_minutes(small_run, tmp_path):
    small_run("steps=2 max_minutes=5 optimizer.warmup_steps=1")
    state = last(tmp_path / "x") / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"seconds": 180.0}))
    small_run("resume=auto steps=4 max_minutes=7")
    assert records(tmp_path / "x", "val_loss")[-1]["seconds"] > 180


def test_more_minutes_lift_a_limit_of_steps(small_run, tmp_path):
    """It said "nothing to train"."""
    small_run("steps=2")
    small_run("resume=auto max_minutes=0.01")
    assert records(tmp_path / "x")[-1]["step"] > 2


def test_init_from_takes_the_weights_and_the_model_and_begins_at_step_0(small_run, call, tmp_path, small):
    small_run("steps=3")
    data = [argument for argument in small if not argument.startswith(("model", "tokenizer"))]
    ended = call(train, *data, "init_from=x", f"runs={tmp_path}", "name=child", "steps=1", "optimizer.lr=1e-30")
    assert ended.code == 0, ended.err
    a, b = (load_checkpoint(last(tmp_path / name)) for name in ("x", "child"))
    assert b.step == 1
    assert all(torch.equal(weight, b.weights[name]) for name, weight in a.weights.items())
    no_text = [argument for argument in data if not argument.startswith("data")]
    ended = call(train, *no_text, "init_from=x", f"runs={tmp_path}", "name=same", "steps=1")
    assert ended.code == 0, ended.err
    assert load_checkpoint(last(tmp_path / "same")).state["config"]["data"] == a.state["config"]["data"]
    wrong = {"model.n_embd=64": "embedding.weight", "model.n_layer=1": "blocks.1.", "data.val_fraction=0.3": "0.05",
             "data=pystdlib device=cuda:77": "cuda:77", "data.path=nowhere data.val_fraction=0.3": "nowhere",
             "experiment=gpu_minute data.path=nowhere": "data=pypackages"}  # fmt: skip
    for typed, why in wrong.items():
        ended = call(train, *no_text, "init_from=x", f"runs={tmp_path}", "name=other", "steps=1", *typed.split())
        assert (ended.code, why in ended.err) == (1, True)
