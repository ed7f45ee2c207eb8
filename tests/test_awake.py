"""What a broken run says of itself: each failure sleeps where its line has nothing to do, and acts where it has."""

from dataclasses import asdict
from functools import reduce

import pytest
import torch
import yaml

import train
from model.break_it import FAILURES, BreakIt
from model.gpt import GPTConfig
from model.recompute import RecomputingGPT
from tests.runs import assert_same_end, records
from training import activities, awake
from training.probe import record

T = 64
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": T, "vocab_size": 50, "position": "rope"}
SEEDS = ("stale_seed", "unrestored_seed")
# Where there is nothing for the line to do. (The seeds have none in evaluation: a run without dropout is refused.)
SLEEPS = dict.fromkeys(FAILURES, ()) | {
    **dict.fromkeys(("no_rescale", "no_rescale_sum", "no_rescale_output"), (f"attention.block_n={T}",)),
    "local_mask": (f"attention.block_m={T}", f"attention.block_n={T}"),
    "no_scale": ("model.n_head=32", "model.position=none"),  # 1 / sqrt(1)
    **{name: tuple(FAILURES[name].wakes.split()) for name in SEEDS},
}


def looked(name: str, arguments: tuple[str, ...], training: bool = True, growth: float = 1.0):
    """The effects that a fresh model's look finds, and the line. growth: of the weights that make q and k."""
    cfg = train.Config(model=GPTConfig(**SIZE))
    cfg.break_it = BreakIt(name)
    cfg.attention.impl, cfg.attention.block_m, cfg.attention.block_n = "tiled", 16, 16
    for key, value in (argument.split("=") for argument in arguments):
        *path, last = key.split(".")
        setattr(reduce(getattr, path, cfg), last, yaml.safe_load(value))
    cfg.model = GPTConfig(**asdict(cfg.model) | {"n_kv_head": None})
    torch.manual_seed(0)
    model = RecomputingGPT(cfg.model, cfg.attention, cfg.break_it).train(training)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * cfg.model.n_embd] *= growth
    tokens = torch.randint(50, (1, T + 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bf16"):
        found = awake.effects(record(model, tokens[:, :-1], tokens[:, 1:]))
    assert len(found) >= 2 or not found[0].broken < 1
    return awake.acts(found, cfg.break_it), awake.in_words(found, cfg, 1, 70.0)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_whose_line_has_nothing_to_do_sleeps_and_names_the_command_that_wakes_it(name):
    acts, said = looked(name, SLEEPS[name], training=name not in SEEDS)
    assert not acts
    assert said.startswith(f"{name} has no effect yet at step 1: o is right (error ")
    assert ("rise by 70.0 nats" in said) == (name == "no_max")
    if name not in SEEDS:  # they have the arguments
        assert said.endswith(f"to see an effect: python train.py break_it={name} {FAILURES[name].wakes}")


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_acts_under_the_arguments_that_wake_it(name):
    acts, said = looked(name, tuple(FAILURES[name].wakes.split()), growth=20.0)
    assert acts
    assert said.startswith(f"{name} takes effect at step 1: o is ")
    if name in SEEDS:  # a wrong mask in the backward
        assert "o is right" in said
        assert "dq, dk and dv are off by" in said
    assert said.endswith(FAILURES[name].seen)


@pytest.mark.parametrize("gain", ["100", "200"])
def test_a_failure_that_needs_time_beside_its_arguments_says_so(gain):
    acts, said = looked("no_max", (f"break_it.score_gain={gain}",))
    assert not acts
    assert said.endswith("these arguments need more steps; the next look is at step 10")


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_a_failure_between_tiles_is_woken_by_smaller_tiles_where_the_context_is_one(impl):
    """It said more steps: break_it=unguarded_mask attention.window=8 experiment=smoke."""
    one = ("attention.window=8", f"attention.impl={impl}", f"attention.block_m={T}", f"attention.block_n={T}")
    acts, said = looked("unguarded_mask", one)
    assert not acts
    tiles = said.rpartition(": ")[2].replace("attention=", "attention.impl=").split()
    assert looked("unguarded_mask", (*one, *tiles))[0]


# --- in a run --------------------------------------------------------------------------------------------------------


def test_the_look_changes_no_bit_of_the_run_its_gauges_are_kept_and_its_line_comes_once(small_run, tmp_path):
    """A broken run with dropout, with the look at steps 1, 2 and 3 and without any."""
    typed, said = "break_it=stale_seed attention.dropout_p=0.2 model.dropout_p=0.1 steps=4", []
    for name in ("looked", "plain"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(awake, "LOOKS", (2, 3))
            if name == "plain":
                patch.setattr(activities, "looks_at_the_failure", lambda run: False)
            said.append(small_run(f"{typed} name={name}").out)
    looked, plain = (tmp_path / f"{name}-BROKEN-stale_seed" for name in ("looked", "plain"))
    for key in ("loss", "grad_norm", "val_loss"):
        found = [[row[key] for row in records(run, key)] for run in (looked, plain)]
        assert found[0] == found[1]
    assert_same_end(looked, plain)
    gauges = records(looked, "o_error")
    assert [r["step"] for r in gauges] == [1, 2, 3]
    assert all(r["gradient_error"] > 0.01 > 1e-5 > r["whole_gradient_error"] for r in gauges)
    assert said[0].count("stale_seed takes effect at step") == 1


def test_the_line_comes_again_when_the_answer_changes(small_run, monkeypatch):
    monkeypatch.setattr(awake, "LOOKS", (2, 3, 4))
    answers = iter((False, False, True, True))
    monkeypatch.setattr(awake, "acts", lambda *_: next(answers))
    monkeypatch.setattr(awake, "in_words", lambda found, cfg, step, *rest, **more: f"a line of step {step}")
    ended = small_run("break_it=no_max steps=4")
    assert [line for line in ended.out.splitlines() if "a line" in line] == [
        "BROKEN[no_max] a line of step 1", "BROKEN[no_max] a line of step 3"
    ]  # fmt: skip


def test_a_step_at_which_the_probe_is_due_too_is_looked_at_once(small_run, tmp_path):
    """The probe's line stood twice, with the same gauges."""
    small_run("break_it=no_max steps=3 probe.every=1")
    assert [row["step"] for row in records(tmp_path / "x-BROKEN-no_max", "max_score")] == [1, 2, 3]


def test_a_run_that_its_failure_stops_is_told_that_it_acts(small_run, monkeypatch):
    """On the batch that stopped it: another sequence may have smaller scores."""
    looked_at, steps = [], []
    send = train.enqueue
    monkeypatch.setattr(activities, "record", lambda model, x, *rest: looked_at.append(x) or record(model, x, *rest))
    monkeypatch.setattr(train, "enqueue", lambda run: send(run) or steps.append(run.enqueued[-1]))
    ended = small_run("break_it=no_max break_it.score_gain=1e6", code=1)
    (line,) = [line for line in ended.out.splitlines() if "no_max takes effect at step 1" in line]
    assert "o is not finite in layer 0" in line
    (sequence,), (stopped,) = looked_at, steps
    assert torch.equal(sequence, stopped.batches.x[0, :1])


def test_a_whole_run_takes_no_look(small_run, monkeypatch):
    monkeypatch.setattr(activities, "record", None)
    small_run("break_it.score_gain=2 steps=1")
