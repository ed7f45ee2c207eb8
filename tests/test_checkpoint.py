"""training/checkpoint.py: whole or absent, found again, and everything comes back bit for bit."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import pytest
import safetensors.torch
import torch

from model.attention import AttentionConfig
from model.break_it import UNBROKEN
from training import checkpoint, contents
from training.files import lock
from training.state import load_optimizer_tensors, optimizer_tensors, rng_state, set_rng_state
from training.writer import Writer

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def any_contents(monkeypatch):
    """The tensors and states below are no run's; tests/test_contents.py has those that a run writes."""
    for name in ("check_header", "check_tensors", "check_tokenizer"):
        monkeypatch.setattr(contents, name, lambda *_: None)


def save(folder, step, model=None, optimizer=None, keep_last=2, **state):
    model, optimizer = model or {"w": torch.full((3,), float(step))}, optimizer or rng_state()
    return checkpoint.save(
        folder, step, model=model, optimizer=optimizer, state=state, tokenizer='{"kind": "byte"}', keep_last=keep_last
    )


def steps(folder):
    return [int(path.name[-6:]) for path in checkpoint.all_checkpoints(folder)]


def damage(path, name="model.safetensors"):
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
    )


# --- what is written ------------------------------------------------------------------------------------------------


def test_every_bit_comes_back(tmp_path):
    model = {
        "f32": torch.tensor([0.1, -0.0, float("nan"), float("inf"), 1e-45]),
        "bf16": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    optimizer = {"f32.exp_avg": torch.randn(5), "f32.step": torch.tensor(30.0)} | rng_state()
    state = {"val_loss": float("nan"), "lr": 0.1 + 0.2, "config": {"T": [1, 2], "name": "\u00e9"}, "none": None}
    path = save(tmp_path, 30, model, optimizer, **state)
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.path, loaded.tokenizer) == (30, path, '{"kind": "byte"}')
    assert repr(loaded.state) == repr(state)
    for was, now in ((model, loaded.model), (optimizer, loaded.optimizer())):
        assert was.keys() == now.keys()
        assert all(same_bits(was[name], now[name]) for name in was)


def test_state_that_json_changes_is_not_taken_for_damage(tmp_path):
    loaded = checkpoint.load(save(tmp_path, 1, betas=(0.9, 0.95), counts={2: "b", 10: "a"}))
    assert loaded.state == {"betas": [0.9, 0.95], "counts": {"2": "b", "10": "a"}}


def test_a_checkpoint_holds_only_safetensors_and_json(tmp_path):
    path = save(tmp_path, 30)
    assert path.name == "step_000030"
    assert sorted(p.name for p in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tokenizer.json",
    ]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # and nothing is left lying beside it


DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


def test_the_files_are_safetensors_own_but_for_the_copy_that_stops_training(tmp_path, monkeypatch):
    """Its save() copies every tensor and meanwhile no other thread of Python runs."""
    tensors = {f"{name}.w": torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {"step": torch.tensor(3.0), "empty": torch.zeros(0, 4), "\u00e9": torch.ones(5, dtype=torch.float16)}
    wanted, own, copied = safetensors.torch.save(tensors), safetensors.torch.save, []
    monkeypatch.setattr(safetensors.torch, "save", lambda given: copied.extend(given.values()) or own(given))
    for name in ("model", "optimizer"):
        path = save(tmp_path, 1, **{name: tensors})
        assert (path / f"{name}.safetensors").read_bytes() == wanted
    assert not sum(t.numel() for t in copied)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    table = torch.randn(100, 8)
    loaded = checkpoint.load(path := save(tmp_path, 1, {"wte": table, "head": table.detach()}))
    assert (path / "model.safetensors").stat().st_size < 2 * table.nbytes
    assert loaded.model["head"] is loaded.model["wte"]
    assert torch.equal(loaded.model["head"], table)


def test_a_compiled_models_names_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="plain model"):
        save(tmp_path, 1, {"_orig_mod.w": torch.zeros(1)})


# --- written in a thread ----------------------------------------------------------------------------------------------


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.thread.shutdown()


def write(writer, folder, step, weight, **more):
    model = {"w": weight, "tied": weight.view(3)} | more
    return writer.save(folder, step, model=model, optimizer=rng_state(), state={}, tokenizer="{}", keep_last=9)


def test_a_checkpoint_has_the_weights_of_its_step_though_training_goes_on(writer, tmp_path, monkeypatch):
    go_on, save_now = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args, **kwargs: go_on.wait(60) and save_now(*args, **kwargs))
    weight = torch.zeros(3)
    path = write(writer, tmp_path, 1, weight)
    weight += 1
    go_on.set()
    writer.wait()
    assert checkpoint.load(path).model["w"].tolist() == [0, 0, 0]


def test_a_checkpoint_has_the_parts_of_its_step_though_they_are_sent_later(writer, tmp_path, monkeypatch):
    """A tied weight is sent once."""
    go_on, sent = threading.Event(), []
    monkeypatch.setattr("training.writer.gathered", lambda part, *_: sent.append(part) or (go_on.wait(60) and part))
    weight = torch.zeros(3)
    path = write(writer, tmp_path, 1, weight, other=torch.ones(2))
    weight += 1
    go_on.set()
    writer.wait()
    assert checkpoint.load(path).model["w"].tolist() == [0, 0, 0]
    assert [part.tolist() for part in sent[:2]] == [[0, 0, 0], [1, 1]]


def test_a_writer_copies_into_the_same_memory_again(writer, tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr("training.writer.gathered", lambda part, *_: places.append(part.data_ptr()) or part)
    for step, weight in enumerate((torch.zeros(3), torch.ones(3), torch.ones(3).double()), start=1):
        path = write(writer, tmp_path, step, weight)
        writer.wait()
        found = checkpoint.load(path).model["w"]
        assert found.dtype == weight.dtype
        assert torch.equal(found, weight)
    of_w = places[:: len(places) // 3]
    assert of_w[0] == of_w[1]


def test_a_copied_checkpoint_has_a_tied_weight_once(writer, tmp_path):
    path = write(writer, tmp_path, 1, torch.zeros(3))
    writer.wait()
    assert json.loads((path / "state.json").read_text())["alias"] == {"tied": "w"}


def test_a_checkpoint_waits_for_the_one_before(writer, tmp_path, monkeypatch):
    begun, save_now = [], checkpoint.save

    def slow(folder, step, **kwargs):
        begun.append(step)
        time.sleep(0.05)
        assert steps(folder) == begun[:-1]
        return save_now(folder, step, **kwargs)

    monkeypatch.setattr(checkpoint, "save", slow)
    for step in (1, 2, 3):
        write(writer, tmp_path, step, torch.zeros(3))
    writer.close()
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("ask", ["raise_error", "wait", "close", "save"])
def test_a_checkpoint_that_could_not_be_written_is_told_once(writer, tmp_path, ask):
    (tmp_path / "file").touch()
    write(writer, tmp_path / "file", 1, torch.zeros(3))
    futures.wait([writer.written])
    with pytest.raises(OSError, match="checkpoint of step 1 could not be written"):
        write(writer, tmp_path, 2, torch.zeros(3)) if ask == "save" else getattr(writer, ask)()
    writer.raise_error()
    writer.close()


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in ((10, 3.0), (20, 1.0), (30, float("nan")), (40, 2.0), (50, 1.5), (60, None)):
        save(tmp_path, step, val_loss=loss)
    assert steps(tmp_path) == [20, 50, 60]
    assert checkpoint.best(tmp_path).name == "step_000020"
    assert checkpoint.last(tmp_path).name == "step_000060"


def test_a_damaged_checkpoint_is_kept(tmp_path):
    """It may be the best, and was deleted without a word."""
    damage(save(tmp_path, 10, val_loss=1.0, keep_last=1), "state.json")
    for step in (20, 30):
        save(tmp_path, step, val_loss=2.0, keep_last=1)
    assert steps(tmp_path) == [10, 20, 30]


def test_a_loss_that_is_not_finite_is_never_best(tmp_path):
    for step, loss in ((10, float("nan")), (20, float("-inf")), (30, None)):
        save(tmp_path, step, val_loss=loss, keep_last=3)
    save(tmp_path, 40, keep_last=4)
    assert checkpoint.best(tmp_path) is None


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, {"w": torch.zeros(2)})
    save(tmp_path, 10, {"w": torch.ones(2)})
    assert [p.name for p in tmp_path.iterdir()] == ["step_000010"]
    assert torch.equal(checkpoint.load(tmp_path / "step_000010").model["w"], torch.ones(2))


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    """Replacing a directory takes two renames; the old one, moved aside, must count until the new one is in place."""
    save(tmp_path, 10).rename(tmp_path / ".old-step_000010")
    assert checkpoint.load(checkpoint.last(tmp_path)).step == 10
    new = save(tmp_path, 10, {"w": torch.ones(1)})
    assert list(tmp_path.iterdir()) == [new]


def test_steps_of_a_future_that_was_left_go(tmp_path):
    """Resumed from step 10 of a run that had reached 30: were 30 kept, resume=auto would go back to the old line, and
    with keep_last=1 the new step 20 would be pruned the moment it was written."""
    for step in (10, 30):
        save(tmp_path, step)
    save(tmp_path, 20, keep_last=1)
    assert steps(tmp_path) == [20]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0"):
        save(tmp_path, 1, keep_last=0)


# --- kills, full disks, rot -----------------------------------------------------------------------------------------

SAVE_FOREVER = """
import itertools, sys, torch
from pathlib import Path
from training import checkpoint, contents
for step in itertools.count(int(sys.argv[2])):
    weights = {"w": torch.full((200_000,), float(step))}
    for _ in range(2):   # the second replaces the first
        checkpoint.save(Path(sys.argv[1]), step, model=weights, optimizer={"w.step": torch.tensor(float(step))},
                        state={"val_loss": 1 / step}, tokenizer="{}", keep_last=2)
    print("saved", flush=True)
"""


def test_kill_9_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    rng, reached = random.Random(0), 0
    for _ in range(4):
        run = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, tmp_path, str(reached + 1)], cwd=ROOT, stdout=subprocess.PIPE
        )
        run.stdout.readline()  # imports are over, and the first step is saved: a disk may take its time for that
        time.sleep(rng.uniform(0.05, 0.4))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        for path in checkpoint.all_checkpoints(tmp_path):
            loaded = checkpoint.load(path)
            assert torch.equal(loaded.model["w"], torch.full((200_000,), float(loaded.step)))
            assert loaded.optimizer()["w.step"] == loaded.step
        if newest := checkpoint.last(tmp_path):
            assert checkpoint.load(newest).step >= reached
            reached = checkpoint.load(newest).step
    assert reached > 0
    save(tmp_path, reached + 1)
    assert not list(tmp_path.glob(".*"))  # what the kills left is swept up


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    old = save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the write past it fails as on a full disk
    try:
        with pytest.raises(OSError, match="step 20 could not be written") as error:
            save(tmp_path, 20, {"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("free some space and resume=auto; earlier checkpoints are untouched")
    assert list(tmp_path.iterdir()) == [old]
    assert checkpoint.load(old).step == 10


def test_a_full_disk_at_the_first_checkpoint_does_not_advise_to_resume(tmp_path):
    (tmp_path / "full").write_text("a file, so that no folder can be made there")
    with pytest.raises(OSError, match=r"free some space and run again; no earlier one was saved$"):
        save(tmp_path / "full", 10)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "state.json"])
def test_a_damaged_file_is_named_with_the_checkpoint_to_use(tmp_path, name):
    save(tmp_path, 10)
    older, newest = save(tmp_path, 20), save(tmp_path, 30, keep_last=3)
    damage(newest, name)
    with pytest.raises(ValueError, match=name) as error:
        checkpoint.load(newest)
    assert str(newest) in str(error.value)
    assert str(error.value).endswith(f"use the one before it, {older}")
    assert "\n" not in str(error.value)


def test_a_damaged_optimizer_stops_a_resume_but_not_a_sample(tmp_path):
    path = save(tmp_path, 10)
    damage(path, "optimizer.safetensors")
    loaded = checkpoint.load(path)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors.*no older one is left"):
        loaded.optimizer()


def test_an_edited_state_is_noticed(tmp_path):
    """The weights' hashes stand in state.json; the step and the data position beside them need one too."""
    path = save(tmp_path, 10, position=1)
    header = json.loads((path / "state.json").read_text())
    header["state"]["position"] = 2
    (path / "state.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match="not as it was written"):
        checkpoint.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00"])
def test_a_state_that_is_no_state_is_damage(tmp_path, text):
    path = save(tmp_path, 10)
    (path / "state.json").write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load(path)


# --- resume= --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    for age, (name, reached) in enumerate((("new", 20), ("old", 40))):
        for step in (10, reached):
            path = save(tmp_path / name / checkpoint.FOLDER, step)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("resume", "name", "expected"),
    [
        ("auto", None, "new/checkpoints/step_000020"),
        ("auto", "old", "old/checkpoints/step_000040"),
        ("old", None, "old/checkpoints/step_000040"),
        ("{runs}/old", "new", "old/checkpoints/step_000040"),
        ("{runs}/old/checkpoints", None, "old/checkpoints/step_000040"),
        ("{runs}/old/checkpoints/step_000010", None, "old/checkpoints/step_000010"),
    ],
)
def test_resume_finds(runs, resume, name, expected):
    assert checkpoint.find(resume.format(runs=runs), runs, option="resume", name=name) == runs / expected


def test_a_broken_run_is_found_by_the_name_that_was_typed(runs):
    (runs / "old").rename(runs / "old-BROKEN-local_mask")
    for resume, name in (("auto", "old"), ("old", None), (str(runs / "old"), None)):
        found = checkpoint.find(resume, runs, option="resume", name=name)
        assert found == runs / "old-BROKEN-local_mask/checkpoints/step_000040"


@pytest.mark.parametrize(
    ("resume", "name"),
    [("auto", "empty"), ("auto", "neww"), ("neww", None), ("{runs}/old/checkpoints/step_000099", None)],
)
def test_nothing_to_resume_says_what_was_looked_for_and_what_there_is(runs, resume, name):
    resume = resume.format(runs=runs)
    with pytest.raises(ValueError, match=r"runs that have one: new, old$") as error:
        checkpoint.find(resume, runs, option="resume", name=name)
    assert str(error.value).startswith(f"resume={resume}: no checkpoint")
    assert (name or resume) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_without_a_checkpoint_is_begun_again_by_its_name(runs):
    """name= said to use resume=auto, and resume=auto said that there is no checkpoint."""
    with pytest.raises(ValueError, match=r"; name=empty without resume= begins it again; runs that have"):
        checkpoint.find("auto", runs, option="resume", name="empty")


def test_of_many_runs_only_the_newest_few_are_named(tmp_path):
    for age in range(7):
        path = save(tmp_path / f"run{age}" / checkpoint.FOLDER, 1)
        os.utime(path, (1e9 - age, 1e9 - age))
    with pytest.raises(ValueError, match=r"runs that have one: run0, run1, run2, run3, run4 and 2 older ones$"):
        checkpoint.find("nowhere", tmp_path, option="resume")


def test_nothing_to_resume_at_all(tmp_path):
    with pytest.raises(ValueError, match=r"resume=auto: no checkpoint in .*; train one first: python train.py"):
        checkpoint.find("auto", tmp_path / "runs", option="resume")


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_resume_passes_over_a_damaged_newest_checkpoint_and_says_so(runs, capsys, name):
    damage(runs / "new/checkpoints/step_000020", name)
    assert checkpoint.find("auto", runs, option="resume") == runs / "new/checkpoints/step_000010"
    older, newest = (runs / f"new/checkpoints/step_{step:06d}" for step in (10, 20))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {newest} is damaged ({name} ")
    assert line.endswith(f": resuming from {older} instead")


def test_eval_only_passes_over_a_damaged_newest_checkpoint_and_resumes_nothing(runs, capsys):
    """It said "resuming from" the newest that was left, and then measured the best."""
    newest = runs / "new/checkpoints/step_000020"
    damage(newest, "model.safetensors")
    assert checkpoint.find("auto", runs, option="resume", which="best") == newest.with_name("step_000010")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {newest} is damaged (")
    assert "resuming" not in line


@pytest.mark.parametrize(("resume", "name"), [("auto", "new"), ("new", None)])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_named_as_a_way_out(runs, resume, name):
    for step in (10, 20):
        damage(runs / f"new/checkpoints/step_0000{step}", "model.safetensors")
    with pytest.raises(ValueError, match=r": no complete checkpoint among those in .*/new; runs that have one: old$"):
        checkpoint.find(resume, runs, option="resume", name=name)


def test_a_damaged_state_of_the_best_checkpoint_is_named(tmp_path, capsys):
    """Its loss could not be read, so another was taken as the best without a word."""
    best, newest = (save(tmp_path / "a/checkpoints", step, val_loss=float(step)) for step in (10, 20))
    damage(best, "state.json")
    assert checkpoint.find("a", tmp_path, option="run", which="best") == newest
    (line,) = capsys.readouterr().err.splitlines()
    assert str(best) in line


def test_a_checkpoint_that_its_run_has_deleted_meanwhile_is_not_called_damaged(runs, monkeypatch):
    path = runs / "old/checkpoints/step_000010"
    check = contents.check_header
    monkeypatch.setattr(contents, "check_header", lambda header: (shutil.rmtree(path), check(header)))
    with pytest.raises(ValueError, match=f"{path} was deleted by the run"):
        checkpoint.load(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(runs):
    """It was resumed as that step, and the steps between were never made."""
    renamed = (runs / "old/checkpoints/step_000040").rename(runs / "old/checkpoints/step_000050")
    with pytest.raises(ValueError, match=r"step 50, .* step 40\b"):
        checkpoint.load(renamed)


def test_a_copy_under_a_name_of_ones_own_loads(runs, tmp_path):
    copy = (runs / "old/checkpoints/step_000040").rename(tmp_path / "favourite")
    assert checkpoint.load(checkpoint.find(str(copy), runs, option="resume")).step == 40


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("name", [".tmp-step_000005", "step_000005", ".old-step_000005"])
def test_what_lies_in_place_of_an_old_checkpoint_is_removed_and_not_followed(tmp_path, name, kind):
    """A pipe was opened, and the run waited for ever."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").touch()
    save(tmp_path / "checkpoints", 10)
    for taken in {name, name.removeprefix(".old-")}:
        if kind == "pipe":
            os.mkfifo(tmp_path / "checkpoints" / taken)
        else:
            (tmp_path / "checkpoints" / taken).symlink_to(tmp_path / "theirs")
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    save(tmp_path / "checkpoints", 20, keep_last=1)
    signal.alarm(0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000020"]
    assert (tmp_path / "theirs/file").exists()


# --- optimizer and random numbers -----------------------------------------------------------------------------------


def train(model, optimizer, count):
    for _ in range(count):
        loss = torch.nn.functional.dropout(model(torch.randn(4, 6)), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def make(fused, order=1):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups[::order], lr=0.01, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path, fused):
    """Six steps against three, a checkpoint, and three more in a new optimizer whose groups stand in another order."""
    model, optimizer = make(fused)
    train(model, optimizer, 3)
    tensors = optimizer_tensors([optimizer], model.named_parameters())
    assert {"0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.step", "2.bias.step"} <= tensors.keys()
    path = save(tmp_path, 3, model.state_dict(), tensors | rng_state())
    train(model, optimizer, 3)

    torch.manual_seed(99)
    again, optimizer_again = make(fused, order=-1)
    loaded = checkpoint.load(path)
    again.load_state_dict(loaded.model)
    load_optimizer_tensors([optimizer_again], again.named_parameters(), loaded.optimizer())
    set_rng_state(loaded.optimizer())
    train(again, optimizer_again, 3)
    for was, now in (
        (model.state_dict(), again.state_dict()),
        (
            optimizer_tensors([optimizer], model.named_parameters()),
            optimizer_tensors([optimizer_again], again.named_parameters()),
        ),
    ):
        assert was.keys() == now.keys()
        assert all(same_bits(was[name], now[name]) for name in was)


def test_the_order_of_an_optimizers_tensors_is_not_that_in_which_they_were_loaded():
    """Processes that share weights gather them one by one, in this order. Each has loaded its own in any order."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = optimizer_tensors([optimizer], model.named_parameters())
    again = torch.optim.AdamW(model.parameters())
    load_optimizer_tensors([again], model.named_parameters(), dict(reversed(tensors.items())))
    assert [*optimizer_tensors([again], model.named_parameters())] == [*tensors]


def test_the_optimizer_of_another_model_is_refused():
    model, optimizer = make(fused=False)
    train(model, optimizer, 1)
    tensors = optimizer_tensors([optimizer], model.named_parameters())
    other = torch.nn.Sequential(torch.nn.Linear(6, 7))
    theirs = torch.optim.AdamW(other.parameters())
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"0\.weight\.exp_avg .*float64.*float32"):
        load_optimizer_tensors([optimizer], model.named_parameters(), doubles)
    with pytest.raises(ValueError, match=r"0\.weight\.exp_avg \(5, 6\).*\(7, 6\)"):
        load_optimizer_tensors([theirs], other.named_parameters(), tensors)
    with pytest.raises(ValueError, match=r"2\.weight\.\w+ .*has no such weight"):
        load_optimizer_tensors(
            [theirs], other.named_parameters(), {n: t for n, t in tensors.items() if n.startswith("2")}
        )


def test_a_run_is_held_by_one_at_a_time_and_let_go(tmp_path):
    """Two in one run mixed their metrics and deleted each other's temporary checkpoints."""
    held = lock(tmp_path / "x")
    lock(tmp_path / "y").close()
    with pytest.raises(ValueError, match=r"the run .*x is being trained by another process; use another name="):
        lock(tmp_path / "x")
    held.close()
    lock(tmp_path / "x").close()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"\.lock is a link and not a plain file"):
        lock(tmp_path)
    assert not (tmp_path / "mine").exists()


def test_a_run_is_let_go_when_its_holder_is_killed(tmp_path):
    """The holder has another temporary folder, as a job of Slurm's has. The lock was there, so both trained."""
    temporary, run = tmp_path / "tmp", tmp_path / "x"
    temporary.mkdir()
    code = "import sys; from pathlib import Path; from training.files import lock; held = lock(Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{code}; print(flush=True); input()", run]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="is being trained by another process"):
            lock(run)
        holder.kill()
    lock(run).close()
    assert list(temporary.iterdir()) == []


def test_neither_data_nor_checkpoints_need_what_only_unix_has(tmp_path):
    code = "import os, sys; sys.modules['fcntl'] = None; del os.getuid; import data.loader, training.checkpoint"
    code += "; from pathlib import Path; training.files.lock(Path(sys.argv[1])).close()"
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_writer_does_not_make_a_deleted_run_again(tmp_path):
    run, writer = tmp_path / "run", Writer()
    what = {"model": {"w": torch.zeros(1)}, "optimizer": {}, "state": {}, "tokenizer": "", "keep_last": 1}
    run.mkdir()
    writer.save(run / "checkpoints", 1, **what)
    writer.wait()
    gate = threading.Event()
    writer.thread.submit(gate.wait)
    writer.save(run / "checkpoints", 2, **what)  # waits for its turn in the thread
    shutil.rmtree(run)
    gate.set()
    with pytest.raises(OSError, match="checkpoint of step 2 could not be written"):
        writer.close()
    assert not run.exists()


# --- the attention of a network -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "able"), [((9, 0), "triton"), ((7, 5), "sdpa")])
def test_a_run_is_measured_with_the_attention_that_it_was_trained_with(monkeypatch, capability, able):
    """attention=auto trained with triton and was measured with sdpa, because the choice knew no training then."""
    pytest.importorskip("triton", reason="triton is made for Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def taken(had: str, device: str, **asked) -> str:
        trained = checkpoint.Checkpoint(Path("step_000001"), 1, {}, {"about": {"attention": had}}, "")
        return trained.attention_on(torch.device(device), AttentionConfig(**asked), UNBROKEN).impl

    assert taken("triton", "cuda") == able
    assert taken("sdpa", "cuda") == "sdpa"
    assert taken("tiled", "cuda") == "sdpa"  # trained on a CPU
    assert taken("triton", "cpu") == "tiled"
    assert taken("triton", "cuda", impl="naive") == "naive"
    assert taken("triton", "cuda", order="keys_outside") == "tiled"
    if able == "triton":  # attention=auto attention.kernel=hopper trained, and then could not be measured
        assert taken("triton", "cuda", kernel="hopper") == "triton"
