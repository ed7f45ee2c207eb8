"""What a broken run says of itself: each failure sleeps where its line has nothing to do, and acts where it has."""

import re
from dataclasses import asdict
from functools import reduce

import pytest
import torch
import yaml

import train
from model.attention import AttentionConfig
from model.break_it import FAILURES, BreakIt
from model.gpt import GPT, GPTConfig
from tests.runs import records
from training import probe
from training.config import CONF

T = 64
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": T, "vocab_size": 50, "position": "rope"}
# Where there is nothing for the line to do. (stale_seed has none in evaluation: a run without dropout is refused.)
SLEEPS = dict.fromkeys(FAILURES, ()) | {
    **dict.fromkeys(("no_rescale", "no_rescale_sum", "no_rescale_output"), (f"attention.block_n={T}",)),
    "local_mask": (f"attention.block_m={T}", f"attention.block_n={T}"),
    "no_scale": ("model.n_head=32", "model.position=none"),  # 1 / sqrt(1)
    "stale_seed": tuple(FAILURES["stale_seed"].wakes.split()),
}


def looked(name: str, arguments: tuple[str, ...], training: bool = True, growth: float = 1.0, seed: int = 1):
    """The effects that a fresh model's look finds, and the line. growth: of the weights that make q and k."""
    cfg = train.Config(model=GPTConfig(**SIZE))
    cfg.break_it = BreakIt(name, seed=seed)
    cfg.attention.impl, cfg.attention.block_m, cfg.attention.block_n = "tiled", 16, 16
    for key, value in (argument.split("=") for argument in arguments):
        *path, last = key.split(".")
        setattr(reduce(getattr, path, cfg), last, yaml.safe_load(value))
    cfg.model = GPTConfig(**asdict(cfg.model))
    torch.manual_seed(0)
    model = GPT(cfg.model, cfg.attention, cfg.break_it).train(training)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * cfg.model.n_embd] *= growth
    tokens = torch.randint(50, (1, T + 1))
    found = probe.effects(probe.record(model, tokens[:, :-1], targets=tokens[:, 1:]))
    return any(effect.more_than_rounding for effect in found), probe.in_words(found, cfg.break_it, 1)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_whose_line_has_nothing_to_do_sleeps_and_names_the_command_that_wakes_it(name):
    acts, said = looked(name, SLEEPS[name], training=name != "stale_seed")
    assert not acts
    assert f"{name} at step 1 sleeps" in said
    assert said.endswith(f"python train.py break_it={name} {FAILURES[name].wakes}")


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_acts_under_the_arguments_that_wake_it(name):
    acts, said = looked(name, tuple(FAILURES[name].wakes.split()), growth=20.0)
    assert acts
    assert f"{name} at step 1 acts" in said


@pytest.mark.parametrize("seed", range(8))
def test_a_mystery_acts_and_does_not_say_which_failure_it_is(seed):
    keys = yaml.safe_load((CONF / "break_it" / "mystery.yaml").read_text())["attention"]
    arguments = tuple(f"attention.{name}={x}" for name, x in keys.items())
    acts, said = looked("mystery", arguments, growth=20.0, seed=seed)
    assert acts
    assert said.startswith("mystery at step 1 acts")
    assert not {*FAILURES} & {*re.findall(r"\w+", said)}
    assert {*BreakIt("mystery", seed=seed).removed} < {*FAILURES}


def test_a_wrong_seed_spoils_the_gradients_alone():
    attention = AttentionConfig("tiled", 16, 16, dropout_p=0.5)
    model = GPT(GPTConfig(**SIZE, recompute="true"), attention, BreakIt("stale_seed"))
    tokens = torch.randint(50, (1, T + 1))
    found = probe.effects(probe.record(model, tokens[:, :-1], targets=tokens[:, 1:]))
    assert not probe.worst(found)["o"].more_than_rounding
    assert probe.worst(found)["gradient"].more_than_rounding


def test_a_broken_run_looks_at_steps_1_10_and_100_and_a_whole_run_does_not(small_run, tmp_path):
    said = small_run("break_it=no_rescale attention.block_n=8 attention.block_m=8 steps=11").out
    found = records(tmp_path / "x-BROKEN-no_rescale", "o_error")
    assert [record["step"] for record in found] == [1, 10]
    assert said.count("no_rescale at step ") == 2
    small_run("steps=2 name=whole")
    assert not records(tmp_path / "whole", "o_error")
