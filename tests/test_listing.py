"""list_runs=true: a line for each run with what its newest checkpoint says."""

import json
import shutil

import pytest

import sample
import train
from training import checkpoint
from training.help import aligned
from training.listing import in_short


@pytest.fixture(scope="module")
def runs(small, call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, broken in (("first", "none"), ("second", "no_rescale")):
        every = ["steps=4", "eval_every=2", "checkpoint_every=2", "attention=tiled", "attention.block_n=8"]
        done = call(train, *small, f"runs={folder}", f"name={name}", f"break_it={broken}", *every)
        assert done.code == 0, done.err
    return folder


def test_a_run_is_a_line_with_what_its_checkpoint_says(runs, call):
    done = call(sample, "list_runs=true", f"runs={runs}")
    assert done.code == 0, done.err
    _, newest, oldest = done.out.splitlines()
    assert "second-BROKEN-no_rescale" in newest
    assert newest.split()[-2:] == ["tiled", "no_rescale"]
    path = checkpoint.best(runs / "first" / "checkpoints")
    cells = oldest.split()
    weights = sum(x.numel() for name, x in checkpoint.load(path).model.items() if name != "head.weight")  # tied
    assert cells[2:6] == ["first", in_short(weights), "4", "512"]
    assert cells[6] == f"{checkpoint.load_state(path)['val_loss']:.4f}"


def test_a_damaged_run_is_passed_over(runs, call, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    for state in (tmp_path / "runs" / "first" / "checkpoints").glob("*/state.json"):
        state.write_text(json.dumps({"step": 4}))
    (tmp_path / "runs/second-BROKEN-no_rescale").rename(tmp_path / "runs/second\nline")
    done = call(sample, "list_runs=true", f"runs={tmp_path / 'runs'}")
    assert [line.split()[2] for line in done.out.splitlines()[1:]] == ["second\\nline"]
    assert done.err.count("first/checkpoints/step_") == 2


def test_columns_are_aligned_and_numbers_at_their_ends():
    assert aligned([("a", "b", "c"), ("10", "xy", "200")], right=[0, 2]) == [" a  b     c", "10  xy  200"]


@pytest.mark.parametrize(("number", "words"), [(512, "512"), (41_216, "41.2k"), (2_870_000, "2.87M"), (1.5e9, "1.5B")])
def test_numbers_are_short(number, words):
    assert in_short(number) == words
