"""training/checkpoint.py: complete or not there, every bit comes back, and what is found."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training import checkpoint
from training.checkpoint import FOLDER, all_checkpoints, find_checkpoint, load_checkpoint, save_checkpoint
from training.huggingface import find_weights
from training.optimizer import OptimizerConfig, build_optimizers

TINY = {"x": torch.zeros(2)}


def save(folder: Path, step: int, val_loss: float | None = None, keep_last: int = 9) -> Path:
    return save_checkpoint(folder, step, TINY, TINY, {"val_loss": val_loss}, "{}", keep_last)


def trained(kind: str, steps: int, seed: int, tie: bool = True):
    torch.manual_seed(seed)
    size = GPTConfig(n_layer=1, n_head=2, n_embd=8, context_length=8, vocab_size=11, tie_head=tie)
    model = GPT(size, AttentionConfig("naive"))
    optimizers = build_optimizers(model, OptimizerConfig(kind=kind, lr=1e-3))
    for _ in range(steps):
        model(*torch.randint(11, (2, 2, 8))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_bit_comes_back(tmp_path, kind, tie):
    model, optimizers = trained(kind, 3, seed=1, tie=tie)
    weights, state = checkpoint.tensors_of(model, optimizers)
    path = save_checkpoint(tmp_path, 3, weights, state, {"val_loss": 0.1, "list": [1]}, "{}", 2)
    following = torch.randn(5)
    other, others = trained(kind, 0, seed=2, tie=tie)
    loaded = load_checkpoint(path)
    checkpoint.restore(loaded, other, others)
    assert torch.equal(torch.randn(5), following)
    assert (loaded.step, loaded.state, loaded.tokenizer) == (3, {"val_loss": 0.1, "list": [1]}, "{}")
    for a, b in zip((weights, state), checkpoint.tensors_of(other, others), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a if not name.startswith("rng"))
    assert (other.head.weight is other.embedding.weight) == tie


def test_the_newest_and_the_best_are_kept_and_a_loss_that_is_not_finite_is_never_best(tmp_path):
    losses = [None, 3.0, 1.0, float("nan"), 2.0, 1.0, float("-inf"), 4.0]
    for step, loss in enumerate(losses, 1):
        save(tmp_path, step, keep_last=2)
        save(tmp_path, step, loss, keep_last=2)  # comes later, and stays
        path = save(tmp_path, step, keep_last=2)
    assert load_checkpoint(path).state["val_loss"] == 4.0
    assert [checkpoint.step_of(path) for path in all_checkpoints(tmp_path)] == [3, 7, 8]
    (tmp_path / "step_000007" / "state.json").write_text("")  # does not load
    save(tmp_path, 8, 4.0, keep_last=2)
    assert checkpoint.best_checkpoint(tmp_path).name == "step_000003"
    assert checkpoint.best_checkpoint(tmp_path / "none") is None


class Killed(BaseException):
    """No line of save_checkpoint() runs after it, as after kill -9."""


@pytest.mark.parametrize(("step", "operations"), [(4, 16), (3, 1)])
def test_a_kill_before_any_operation_on_files_leaves_only_whole_checkpoints(tmp_path, monkeypatch, step, operations):
    """And the next checkpoint is written as if nothing had been. Step 3 gets its validation loss later."""

    def counted(real):
        def operation(*arguments, **options):
            counts[0] += 1
            if counts[0] == at:
                raise Killed
            return real(*arguments, **options)

        return operation

    at, ended = 0, False
    while not ended:
        at, counts, folder = at + 1, [0], tmp_path / str(at)
        save(folder, 1, 0.5), save(folder, 2, 0.7), save(folder, 3)
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                save(folder, step, 1.0, keep_last=1)
                ended = True
            except Killed:
                pass
        assert all(load_checkpoint(path) for path in all_checkpoints(folder))
        assert (folder / "step_000001").exists()
        assert step == 4 or (folder / "step_000003").exists()
        save(folder, 5, 1.0, keep_last=1)
        assert {path.name for path in folder.iterdir()} == {"step_000001", "step_000005"}
    assert at > operations


@pytest.fixture
def runs(tmp_path) -> Path:
    """old and new, each with steps 1 and 2, the first the best; a broken one that saved last; and a user's copy."""
    for run in ("old", "sweep-1/new", "no-BROKEN-no_max"):
        for step in (1, 2):
            save(tmp_path / run / FOLDER, step, float(step))
    shutil.copytree(tmp_path / "old" / FOLDER / "step_000002", tmp_path / "old" / FOLDER / "step_000002_backup")
    return tmp_path


@pytest.mark.parametrize(
    ("named", "name", "expected"),
    [("auto", None, "sweep-1/new"), ("auto", "old", "old"), ("old", None, "old"), ("sweep-1/new", None, "sweep-1/new"),
     ("no-BROKEN-no_max", None, "no-BROKEN-no_max")],
)  # fmt: skip
def test_resume_finds(runs, named, name, expected):
    assert find_checkpoint(named, runs, name).path == runs / expected / FOLDER / "step_000002"
    assert find_checkpoint(named, runs, name, best=True).path == runs / expected / FOLDER / "step_000001"
    assert named == "auto" or find_weights(named, runs).step == 1
    path = runs / "old" / FOLDER / "step_000001"  # a step's folder may be named
    assert find_checkpoint(str(path), runs).step == 1


def test_the_newest_run_is_the_one_that_saved_last(tmp_path):
    """It began first. A run that has saved nothing yet is none."""
    (tmp_path / "empty" / FOLDER).mkdir(parents=True)
    for run, step in (("a", 1), ("b", 1), ("b", 2), ("a", 3)):
        save(tmp_path / run / FOLDER, step, 1.0)
        os.utime(tmp_path / run / FOLDER / f"step_{step:06}", times=(step, step))
    assert find_checkpoint("auto", tmp_path).path == tmp_path / "a" / FOLDER / "step_000003"


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "state.json", "tokenizer.json"])
def test_a_folder_that_does_not_load_is_named_and_the_one_before_it_taken(runs, capsys, file):
    path = runs / "old" / FOLDER / "step_000002"
    (path / file).unlink()
    assert find_checkpoint("old", runs).step == 1
    assert str(path) in capsys.readouterr().err
    with pytest.raises(ValueError, match="step_000002"):
        load_checkpoint(path)


@pytest.mark.parametrize(("named", "name"), [("auto", "nobody"), ("nobody", None)])
def test_nothing_to_resume_says_what_there_is(runs, named, name):
    with pytest.raises(ValueError, match=r"nobody.*old"):
        find_checkpoint(named, runs, name)


def test_a_run_is_held_by_one_at_a_time_and_not_begun_twice(runs):
    resumed = find_checkpoint("old", runs)
    lock = checkpoint.open_folder(runs / "old", resumed)
    with pytest.raises(ValueError, match="another process"):
        checkpoint.open_folder(runs / "old", resumed)
    lock.release()
    for other in (find_checkpoint("sweep-1/new", runs), None):
        with pytest.raises(ValueError, match="resume=auto name=old"):
            checkpoint.open_folder(runs / "old", other)
    shutil.rmtree(runs / "old" / FOLDER)
    checkpoint.open_folder(runs / "old", None).release()
