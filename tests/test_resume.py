"""One run however often it is stopped: killed, by a signal, by its time limit; and what a checkpoint brings."""

import os
import shlex
import shutil
import signal
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import breakit
import data.prepare
import sample
import train
import training.record
import training.step
from model.attention import AttentionConfig
from model.gpt import GPTConfig
from sampling.generate import Sampler
from tests.processes import HANGS
from tests.runs import assert_same_run, last, losses, records, tiled
from tests.test_contents import forge
from training import activities, checkpoint, config, context
from training.resume import changed, edits, refuse_another_model

DROPOUT = ["model.dropout_p=0.1", "attention.dropout_p=0.1"]
TWO_PASSES = [*tiled(16), *DROPOUT, "tokens_per_step=256"]

# --- stopped and resumed --------------------------------------------------------------------------------------------

# kill -9 cannot be caught, so nothing of train.py can tell that it comes from within; but it comes at a known step.
KILLED_AT_7 = """
import os, signal, time
import train
from training import config, metrics

log = metrics.Metrics.log

def log_and_die(self, record):
    log(self, record)
    if record["step"] == 7:
        while not (self.folder / "checkpoints/step_000006").exists():  # a thread writes it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

metrics.Metrics.log = log_and_die
config.run(train.main, train.Config, "config")
"""


@pytest.mark.slow
def test_a_run_killed_at_7_and_resumed_from_6_is_the_run_of_12_steps_bit_for_bit(start, call, small, tmp_path):
    common = [*small, *TWO_PASSES, "steps=12", "checkpoint_every=6", "eval_every=4", f"runs={tmp_path}"]
    process = start("-c", KILLED_AT_7, *common, "name=killed")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGKILL, err
    assert last(tmp_path / "killed").name == "step_000006"
    assert records(tmp_path / "killed")[-1]["step"] == 7
    resumed = call(train, *common, "name=killed", "resume=auto")
    assert resumed.code == 0, resumed.err
    assert call(train, *common, "name=whole").code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_resumed_run_deletes_later_steps_before_its_first_but_none_that_is_damaged(small_run, tmp_path, monkeypatch):
    """A run that went back, and was killed before its first checkpoint, had weights of steps without a record."""
    run = tmp_path / "x"
    small_run("checkpoint_every=2 steps=6 keep_last=3")
    saved = shutil.copytree(run / "checkpoints", tmp_path / "saved")
    newest = last(run)
    shutil.copytree(newest, newest.with_name(f".old-{newest.name}"))  # as a kill in a save leaves it
    monkeypatch.setattr(train, "introduce", Mock(side_effect=SystemExit(9)))  # before the first step
    small_run(f"resume={run}/checkpoints/step_000002 steps=6", code=9)
    assert last(run).name == "step_000002"
    assert records(run)[-1]["step"] == 2
    shutil.copytree(saved, run / "checkpoints", dirs_exist_ok=True)
    (newest / "tokenizer.json").write_text("")
    small_run("resume=auto steps=8", code=9)
    assert last(run) == newest


# Without an end, and with a rate that does not depend on where the end is.
ENDLESS = [*tiled(16), *DROPOUT, "optimizer.min_lr_ratio=1", "eval_every=1000000", "checkpoint_every=1000000"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_the_step_that_was_reached_and_the_line_that_is_printed_goes_on(
    start, call, small, tmp_path, number
):
    run = tmp_path / "x"
    process = start("train.py", *small, *ENDLESS, "steps=100000", f"runs={tmp_path}", "name=x")
    until, lines = time.monotonic() + HANGS, run / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 5) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS)
    reached = records(run)[-1]["step"]
    assert f"{number.name}: stopping after this step" in err
    assert process.returncode == 128 + number
    assert last(run).name == f"step_{reached:06d}"
    assert (run / "loss.png").stat().st_size > 0
    there = [f"steps={reached + 10}", f"runs={tmp_path}"]
    assert call(train, *said_to_go_on(out), *there).code == 0
    assert call(train, *small, *ENDLESS, *there, "name=unbroken").code == 0
    assert_same_run(run, tmp_path / "unbroken")


def test_a_second_signal_in_the_save_of_the_first_does_not_hide_the_way_on(call, small, tmp_path, monkeypatch):
    save, enqueue = checkpoint.save, train.enqueue

    def interrupted(*given, **more):
        time.sleep(0.2)  # until the main thread waits for this one
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return save(*given, **more)

    def signalled(run):
        enqueue(run)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint, "save", interrupted)
    monkeypatch.setattr(train, "enqueue", signalled)
    ended = call(train, *small, "steps=9", "checkpoint_every=100", f"runs={tmp_path}", "name=x")
    assert ended.code == 128 + signal.SIGTERM
    assert last(tmp_path / "x").name == "step_000002"
    assert said_to_go_on(ended.out)[:2] == ["resume=auto", "name=x"]


def said_to_go_on(out: str) -> list[str]:
    """The arguments of the command that a stopped run prints at its end."""
    python, script, *arguments = shlex.split(out.splitlines()[-1].partition("to go on: ")[2])
    assert (python, script) == ("python", "train.py")
    return arguments


# What a run does between its steps, and a function that it calls there.
BETWEEN = {
    "evaluation": (training.step.TrainStep, "loss_of_windows"),
    "sample": (Sampler, "choose"),
    "context": (context, "each_token"),
    "look": (activities, "reading"),
    "failure": (activities, "record"),
}
EACH = ["steps=4", "eval_every=2", "context_every=2", "probe.every=2", "sample_every=2", "sample_tokens=5"]
EACH += ["checkpoint_every=3", "ema_decay=0.5"]


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


@pytest.fixture(scope="module")
def wholes(call, small, tmp_path_factory):
    """wholes(place, step): what is typed where a signal is to come there, and the run that has none."""
    parent = tmp_path_factory.mktemp("parent")
    assert call(train, *small, *TWO_PASSES, f"runs={parent}", "name=x", "steps=1").code == 0
    common = [*(argument for argument in small if not argument.startswith("model=")), *TWO_PASSES, *EACH]

    @cache
    def run(*more: str) -> tuple[list[str], Path]:
        runs = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activities.awake, "LOOKS", {2})
            assert call(train, *more, *common, f"runs={runs}").code == 0
        return [*more, *common], next(runs.iterdir())

    def whole(place: str, step: int) -> tuple[list[str], Path]:
        if step == 0:
            return run(f"init_from={last(parent / 'x')}")
        return run("model=gpt2", "break_it=no_max") if place == "failure" else run("model=gpt2")

    return whole


@pytest.mark.parametrize(
    ("place", "step"),
    [
        *[("context", 0), ("evaluation", 2), ("failure", 2), ("sample", 4)],
        *[pytest.param(place, 2, marks=pytest.mark.slow) for place in ("sample", "context", "look")],
        *[pytest.param(place, 4, marks=pytest.mark.slow) for place in ("evaluation", "context")],
    ],
)
def test_a_signal_ends_what_is_done_between_steps_and_the_resumed_run_does_it(
    call, wholes, tmp_path, monkeypatch, place, step
):
    """The run went on to the end of all that was due, minutes later, and only then saved. And the line that it printed
    left steps= out, which then was the default."""
    typed, whole = wholes(place, step)
    monkeypatch.setattr(activities.awake, "LOOKS", {2})
    with monkeypatch.context() as patch:
        after = signal_within(patch, place, step)
        ended = call(train, *typed, f"runs={tmp_path}", "name=x")
    (stopped,) = tmp_path.glob("x*")
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert f"stopped at step {step}, saved " in ended.out.splitlines()[-1]
    assert after == []
    if step == 2:  # of which the whole run has no checkpoint, so none can become its best
        assert checkpoint.best(stopped / checkpoint.FOLDER) is None
    again = said_to_go_on(ended.out)
    resumed = call(train, *again)
    assert resumed.code == 0, resumed.err
    assert_same_run(stopped, whole)
    assert checkpoint.best(stopped / checkpoint.FOLDER).name == checkpoint.best(whole / checkpoint.FOLDER).name
    assert call(train, *again).code == 2  # nothing is left


def test_a_signal_in_the_preparation_of_data_ends_the_run_at_once(call, small, tmp_path, monkeypatch):
    """SIGTERM killed it without a word."""
    common = [*small, f"data.cache={tmp_path}/cache", "steps=1", f"runs={tmp_path}", "name=x"]
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare, "write", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        ended = call(train, *common)
    assert (ended.code, ended.out) == (128 + signal.SIGTERM, "")
    assert ended.err.startswith("\nSIGTERM: stopped before the first step")
    assert call(train, *common).code == 0


# A rate that does not depend on where the end is: after the warm-up the peak, as min_lr_ratio=1 has it.
RECIPES = {
    "float32": ["length_warmup_steps=8", "length_warmup_from=8", "attention.documents=true", "optimizer=muon",
                "optimizer.schedule=wsd", "ema_decay=0.9", "tokens_per_step=256", *DROPOUT],
    "fp16": ["dtype=fp16", "z_loss=1e-3", *DROPOUT],  # of whose first ten updates few or none are made
}  # fmt: skip
TEN = ["optimizer.min_lr_ratio=1", "optimizer.warmup_steps=3", "eval_every=5", "checkpoint_every=1", "keep_last=100"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_at_5_and_resumed_is_the_run_of_10_steps_bit_for_bit(call, small, tmp_path, monkeypatch, recipe):
    """In fp16 the scaler is still looking for its scale at step 5, and the resumed run's begins at another one."""
    arguments, scaler = [*small, *TEN, *RECIPES[recipe]], torch.amp.GradScaler
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, init_scale=2.0**28, **k))
        assert call(train, *arguments, f"runs={tmp_path}", "steps=5", "name=stopped").code == 0
        assert call(train, *arguments, f"runs={tmp_path}", "steps=10", "name=whole").code == 0
    resumed = call(train, f"runs={tmp_path}", "resume=stopped", "steps=10")
    assert resumed.code == 0, resumed.err
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_resumed_run_may_begin_to_compute_its_blocks_again_and_stays_the_same_bit_for_bit(call, small_run, tmp_path):
    small_run(f"steps=4 checkpoint_every=2 {' '.join(DROPOUT)}")
    half = f"resume={tmp_path}/x/checkpoints/step_000002"
    ended = call(train, half, f"runs={tmp_path}", "name=again", "model.activation_checkpointing=true")
    assert "changed since the checkpoint: model.activation_checkpointing false -> true" in ended.out
    assert losses(tmp_path / "again") == losses(tmp_path / "x")[2:]


# --- what a checkpoint brings ---------------------------------------------------------------------------------------

PARENT = ["steps=2", "seed=5", "optimizer=muon", "optimizer.momentum=0.9", "optimizer.weight_decay=0.5"]
PARENT += ["ema_decay=0.1", "attention=naive", "attention.window=8", *DROPOUT]
PARENT += ["wandb.project='${seed} ,=[x]'", "wandb.tags=[a,b]"]


@pytest.fixture(scope="module")
def made(call, small, tmp_path_factory):
    runs = tmp_path_factory.mktemp("made")
    assert call(train, *small, *PARENT, f"runs={runs}", "name=x").code == 0
    return runs / "x"


@pytest.fixture
def resumed(made, call, tmp_path):
    """resumed(arguments...): how a copy of the run, runs/x of the test's folder, went on."""
    shutil.copytree(made, tmp_path / "runs/x")
    return lambda *typed: call(train, f"runs={tmp_path}/runs", *({"resume=auto"} - {*typed}), *typed)


def test_resume_alone_goes_on_with_the_run_as_it_was(resumed, tmp_path):
    """Every other option had to be typed again, or was the default's. Text of any kind survives."""
    assert "config.yaml" not in resumed("steps=3").out
    before, after = (checkpoint.load_state(tmp_path / f"runs/x/checkpoints/step_00000{i}")["config"] for i in (2, 3))
    assert changed(before, after) == ["steps 2 -> 3"]


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/step_000002"])
def test_a_run_whose_checkpoints_are_a_link_into_another_run_is_not_gone_on_with_there(resumed, tmp_path, linked):
    """It trained on in the other run, and deleted its checkpoints."""
    (tmp_path / "runs/other/checkpoints").mkdir(parents=True)
    theirs = (tmp_path / "runs/x" / linked).rename(tmp_path / "runs/other" / linked)
    (tmp_path / "runs/x" / linked).symlink_to(theirs)
    before = sorted((tmp_path / "runs/other").rglob("*"))
    ended = resumed("steps=9", "name=x")
    assert ended.code == 2
    assert f"{tmp_path}/runs/x/{linked} is a link" in ended.err
    assert sorted((tmp_path / "runs/other").rglob("*")) == before


def test_what_is_typed_on_resume_wins_also_where_it_is_the_default_and_is_said(resumed):
    """Of a group, its file goes over the checkpoint: attention=tiled leaves the window."""
    typed = ["optimizer.weight_decay=0.1", "optimizer.momentum=null", "attention=tiled", "attention.dropout_p=0"]
    ended = resumed("steps=3", *typed)
    (line,) = [line for line in ended.out.splitlines() if line.startswith("changed since the checkpoint: ")]
    assert set(line.partition(": ")[2].split(", ")) == {
        "attention.impl naive -> tiled", "attention.dropout_p 0.1 -> 0.0", "optimizer.weight_decay 0.5 -> 0.1",
        "optimizer.momentum 0.9 -> None", "steps 2 -> 3",
    }  # fmt: skip


def test_a_key_that_an_old_checkpoint_lacks_has_its_default(resumed, tmp_path):
    """Compared with itself, whatever is typed now would pass for what the run was trained with."""
    for key in ("attention.alibi", "z_loss"):
        forge(tmp_path / "runs/x/checkpoints/step_000002", f"state.config.{key}", ...)
    ended = resumed("steps=3", "attention.alibi=true")
    assert ended.code == 2
    assert "attention.alibi=False, this run has True" in ended.err
    ended = resumed("steps=3", "z_loss=0.5", "optimizer.lr=null")
    assert "z_loss 0.0 -> 0.5" in ended.out
    assert "optimizer.lr 0.001 -> 0.0144" in ended.out


def test_a_run_goes_on_with_its_context_and_is_measured_with_any():
    cfg = train.Config(model=GPTConfig(position="rope", context_length=32))
    made = checkpoint.Checkpoint(Path("step_000001"), 1, {}, {"config": asdict(cfg), "broken": ""}, "")
    cfg.model.context_length = 64
    refuse_another_model(made, replace(cfg, eval_only=True, resume="x"))
    with pytest.raises(ValueError, match=r"model\.context_length"):
        refuse_another_model(made, cfg)


@pytest.mark.parametrize("place", ["favourite", "folder/favourite"])
def test_a_checkpoint_under_a_name_of_ones_own_is_resumed_as_a_new_run(resumed, tmp_path, monkeypatch, place):
    """favourite: IndexError of parents[1]. folder/favourite: name '' and "the run runs exists already"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x/checkpoints/step_000002").rename(tmp_path / "favourite")
    (tmp_path / "folder").mkdir()
    (tmp_path / "favourite").rename(place)
    ended = resumed("steps=4", f"resume={place}")
    assert ended.code == 0, ended.err
    (new,) = {run.name for run in (tmp_path / "runs").iterdir()} - {"x"}
    # It is another run's, though the same weights.
    assert "exists already" in resumed("steps=6", f"resume={place}", f"name={new}").err


@pytest.mark.parametrize("typed", ["data.path={}/other.txt", "data=recall"])
def test_a_text_that_is_another_than_the_checkpoints_is_refused(resumed, tmp_path, typed):
    """Of data=OTHER it refused data.path=, which the checkpoint had brought and nobody had typed."""
    (tmp_path / "other.txt").write_text("another text\n" * 1000)
    ended = resumed("steps=4", typed.format(tmp_path), f"data.cache={tmp_path}/cache")
    assert ended.code == 2
    assert "trained on another text" in ended.err


def test_a_run_is_measured_on_data_that_reads_other_keys(resumed, tmp_path):
    ended = resumed("eval_only=true", "data=recall", f"data.cache={tmp_path}/cache", "eval_tokens=512")
    assert ended.code == 0, ended.err


def test_what_another_process_has_saved_since_the_checkpoint_was_read_stays(resumed, tmp_path, monkeypatch):
    """It was deleted as a later step, though its process had trained the run on while ours prepared the text."""
    folder, data_of = tmp_path / "runs/x/checkpoints", train.data_of

    def meanwhile(*arguments):
        shutil.copytree(folder / "step_000002", folder / "step_000004")
        return data_of(*arguments)

    monkeypatch.setattr(train, "data_of", meanwhile)
    ended = resumed("steps=3")
    assert ended.code == 2
    assert "another process has saved step 4 of " in ended.err
    assert last(tmp_path / "runs/x") == folder / "step_000004"
    monkeypatch.setattr(train, "data_of", data_of)
    shutil.copytree(folder / "step_000002", tmp_path / "runs/x/copy")  # beside which no checkpoint was when it was read
    assert resumed("steps=3", f"resume={tmp_path}/runs/x/copy", "name=x").code == 0


def test_an_edited_configuration_is_not_read_and_that_is_said(resumed, tmp_path):
    """runs/NAME/config.yaml was written anew on resume without a word about what had been changed in it."""
    file = tmp_path / "runs/x/config.yaml"
    file.write_text(file.read_text().replace("lr: 0.001", "lr: 0.5"))
    assert f"{file} has been edited, optimizer.lr=0.5: " in resumed("steps=3").out
    assert "lr: 0.001" in file.read_text()


# Five lines that stand for 9**4 numbers; with nine of them, printing what was edited took a minute.
ALIASES = "".join(f"x{i}: &x{i} [{','.join([f'*x{i - 1}'] * 9) if i else 9}]\n" for i in range(5))
UNREADABLE = ["[", "2020-13-45", f"[{'9,' * 2**15}]", "!!int ''", "!!bool x", "!!float ''"]  # the third: too large
UNREADABLE += ["0x" + 5000 * "f", "1:59:" + 400 * "59:" + "59.5"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", None),
        ("steps: 700", "steps: 9", None),  # as it is typed
        ("name: null", "name: x", None),  # of a run that was renamed
        ("lr: null\n", "lr: 0.5\n", "has been edited, optimizer.lr=0.5: "),
        ("steps: 700", 'steps: "a\\nb"', "has been edited, steps="),
        ("batch_size: 16", "batch_sizes: [4]", "has been edited, batch_sizes=[4]: "),
        ("steps: 700", "other: null", "has been edited, other=null: "),
        ("name: null\n", ALIASES, "is not a configuration any more: "),
        *[("steps: 700", f"steps: {value}", "is not a configuration any more: ") for value in UNREADABLE],
    ],
)
def test_what_someone_wrote_into_the_configuration_is_found(tmp_path, old, new, said):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(train.Config()).replace(old, new, 1))
    found = edits(file, asdict(train.Config()), asdict(train.Config(steps=9)))
    assert (found or "").startswith(f"{file} {said}" if said else "")
    assert (found is None) == (said is None)
    assert "\n" not in (found or "")


def test_a_configuration_of_brackets_is_given_up_at_once(tmp_path):
    """It took 43 s."""
    (tmp_path / "config.yaml").write_text("[" * 2**15)
    started = time.thread_time()
    assert edits(tmp_path / "config.yaml", asdict(train.Config()), asdict(train.Config()))
    assert time.thread_time() - started < 1


def test_a_resumed_run_writes_into_no_cache_that_only_its_checkpoint_names(call, small, tmp_path, monkeypatch):
    """A checkpoint of a stranger's had its data prepared in any folder that it named."""
    monkeypatch.chdir(tmp_path)
    run = [f"runs={tmp_path}/runs", "name=x"]
    assert call(train, *small, "data.cache=there", "steps=1", *run).code == 0
    shutil.rmtree("there")
    Path("there").mkdir()
    assert call(breakit, "trace=true", "run=x", f"runs={tmp_path}/runs").code == 0
    ended = call(train, "resume=auto", *run, "steps=2")
    assert ended.code == 0, ended.err
    assert [*Path("there").iterdir()] == []
    assert "data.cache there -> data/cache" in ended.out


# --- another implementation than the run had ------------------------------------------------------------------------


def test_where_auto_takes_another_implementation_than_the_run_had_it_is_said(resumed, call, tmp_path):
    """A run of a GPU went on, and was measured, with other sums on a CPU without a word."""
    line = "attention=auto takes tiled here, and the run had naive: the numbers differ by rounding"
    written = ["run=x", f"runs={tmp_path}/runs", "max_new_tokens=1", "device=cpu"]
    for asked in ("auto", "naive"):
        assert (line in resumed("eval_only=true", f"attention.impl={asked}").out.splitlines()) == (asked == "auto")
        assert (line in call(sample, *written, f"impl={asked}").err.splitlines()) == (asked == "auto")
    assert line in resumed("steps=3", "attention=auto").out.splitlines()


GPU = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("had", "taken", "device", "attention_p", "model_p", "state", "differ"),
    [
        ("naive", "tiled", "cpu x86_64", 0.1, 0.1, "trained", "by rounding"),
        ("sdpa", "tiled", "cpu x86_64", 0.0, 0.1, "trained", "by rounding"),
        ("sdpa", "tiled", "cpu x86_64", 0.1, 0.0, "trained", "dropout masks"),
        ("tiled", "sdpa", "cpu x86_64", 0.1, 0.0, "trained", "dropout masks"),
        ("naive", "tiled", GPU, 0.1, 0.0, "trained", "dropout masks"),
        ("naive", "tiled", GPU, 0.0, 0.1, "trained", "dropout masks"),
        ("naive", "tiled", GPU, 0.1, 0.1, "measured", "by rounding"),
        ("sdpa", "tiled", GPU, 0.0, 0.0, "trained", "by rounding"),
        ("naive", "tiled", "cpu x86_64", 0.0, 0.0, "broken", "tiles"),  # where one begins decides what is broken
        ("tiled", "tiled", GPU, 0.1, 0.1, "trained", ""),
    ],
)
def test_where_dropout_draws_other_masks_more_than_rounding_differs(
    had, taken, device, attention_p, model_p, state, differ
):
    """A run with sdpa and dropout, or one that a GPU had begun, was said to go on with the same numbers up to rounding.
    Where nothing is trained, nothing is dropped."""
    kept = {"about": {"attention": had, "device": device}, "broken": "no_scale" if state == "broken" else ""}
    model = SimpleNamespace(
        attention_config=AttentionConfig(taken, dropout_p=attention_p), config=SimpleNamespace(dropout_p=model_p),
        training=state == "trained", embedding=torch.nn.Embedding(1, 1),
    )  # fmt: skip
    said = checkpoint.Checkpoint.other_attention(SimpleNamespace(state=kept), AttentionConfig("auto"), model) or ""
    assert differ in said
    assert bool(said) == bool(differ)
    assert ("rounding" in said) == (differ in ("by rounding", "dropout masks"))
