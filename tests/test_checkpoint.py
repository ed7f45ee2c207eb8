"""training/checkpoint.py: whole or absent, found again, and everything comes back bit for bit.

Damaged files are in tests/test_bad_input.py, what another program writes in test_contents.py."""

import os
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

import training.writer
from model.attention import AttentionConfig
from model.break_it import UNBROKEN
from tests.runs import flip, little_room
from training import checkpoint, contents
from training.files import lock
from training.state import load_optimizer_tensors, optimizer_tensors, rng_state
from training.writer import Writer

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def any_contents(monkeypatch):
    """The tensors and states below are no run's."""
    for name in ("check_header", "check_tensors", "check_tokenizer"):
        monkeypatch.setattr(contents, name, lambda *_: None)


def save(folder, step, model=None, optimizer=None, keep_last=2, **state):
    model, optimizer = model or {"w": torch.full((3,), float(step))}, optimizer or rng_state()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return checkpoint.save(
        folder, step, model=model, optimizer=optimizer, state=state, tokenizer='{"kind": "byte"}', keep_last=keep_last
    )


def steps(folder):
    return [int(path.name[-6:]) for path in checkpoint.all_checkpoints(folder)]


def assert_same_bits(was, now):
    assert was.keys() == now.keys()
    for a, b in ((was[name], now[name]) for name in was):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


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
    path = save(tmp_path, 30, model, optimizer, **state, betas=(0.9, 0.95), counts={2: "b", 10: "a"})
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.path, loaded.tokenizer) == (30, path, '{"kind": "byte"}')
    # what JSON changes is not taken for damage
    assert repr(loaded.state) == repr(state | {"betas": [0.9, 0.95], "counts": {"2": "b", "10": "a"}})
    assert_same_bits(model, loaded.model)
    assert_same_bits(optimizer, loaded.optimizer())


def test_a_checkpoint_holds_only_safetensors_and_json(tmp_path):
    path = save(tmp_path, 30)
    assert {p.name for p in path.iterdir()} == {*checkpoint.FILES, "state.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["step_000030"]  # and nothing is left lying beside it


def test_the_files_are_safetensors_own_but_for_the_copy_that_stops_training(tmp_path, monkeypatch):
    """Its save() copies every tensor and meanwhile no other thread of Python runs."""
    dtypes = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
    tensors = {f"{name}.w": torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in dtypes}
    tensors |= {"step": torch.tensor(3.0), "empty": torch.zeros(0, 4), "\u00e9": torch.ones(5, dtype=torch.float16)}
    wanted, own, copied = safetensors.torch.save(tensors), safetensors.torch.save, []
    monkeypatch.setattr(safetensors.torch, "save", lambda given: copied.extend(given.values()) or own(given))
    for name in ("model", "optimizer"):
        path = save(tmp_path, 1, **{name: tensors})
        assert (path / f"{name}.safetensors").read_bytes() == wanted
    assert not sum(t.numel() for t in copied)


def test_tied_weights_are_stored_once_and_tied_again(writer, tmp_path):
    """Also where they are copied first."""
    table = torch.randn(100, 8)
    model = {"wte": table, "head": table.detach()}
    for path in (save(tmp_path, 1, model), write(writer, tmp_path, 2, **model)):
        writer.wait()
        loaded = checkpoint.load(path)
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


def write(writer, folder, step, **model):
    return writer.save(folder, step, model=model, optimizer=rng_state(), state={}, tokenizer="{}", keep_last=9)


@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "save"), (training.writer, "gathered")])
def test_a_checkpoint_has_the_weights_of_its_step_though_they_are_written_or_sent_later(
    writer, tmp_path, monkeypatch, owner, name
):
    """A tied weight is sent once."""
    go_on, given, now = threading.Event(), [], getattr(owner, name)

    def later(*args, **rest):
        given.append(args[0])
        go_on.wait(60)
        return now(*args, **rest)

    monkeypatch.setattr(owner, name, later)
    weight = torch.zeros(3)
    path = write(writer, tmp_path, 1, w=weight, tied=weight.view(3), other=torch.ones(2))
    weight += 1
    go_on.set()
    writer.wait()
    assert checkpoint.load(path).model["w"].tolist() == [0, 0, 0]
    if owner is not checkpoint:
        assert [part.tolist() for part in given[:2]] == [[0, 0, 0], [1, 1]]


def test_a_writer_copies_into_the_same_memory_again(writer, tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr("training.writer.gathered", lambda part, *_: places.append(part.data_ptr()) or part)
    for step, weight in enumerate((torch.zeros(3), torch.ones(3), torch.ones(3).double()), start=1):
        path = write(writer, tmp_path, step, w=weight)
        writer.wait()
        assert_same_bits({"w": weight}, checkpoint.load(path).model)
    of_w = places[:: len(places) // 3]
    assert of_w[0] == of_w[1]


def test_a_checkpoint_waits_for_the_one_before(writer, tmp_path, monkeypatch):
    begun, save_now = [], checkpoint.save

    def slow(folder, step, **kwargs):
        begun.append(step)
        time.sleep(0.05)
        assert steps(folder) == begun[:-1]
        return save_now(folder, step, **kwargs)

    monkeypatch.setattr(checkpoint, "save", slow)
    for step in (1, 2, 3):
        write(writer, tmp_path, step, w=torch.zeros(3))
    writer.close()
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("ask", ["raise_error", "wait", "close", "save"])
def test_a_checkpoint_that_could_not_be_written_is_told_once(writer, tmp_path, ask):
    (tmp_path / "file").touch()
    write(writer, tmp_path / "file", 1, w=torch.zeros(3))
    futures.wait([writer.written])
    with pytest.raises(OSError, match="step 1 could not be written"):
        write(writer, tmp_path, 2, w=torch.zeros(3)) if ask == "save" else getattr(writer, ask)()
    writer.raise_error()
    writer.close()


def test_a_writer_does_not_make_a_deleted_run_again(writer, tmp_path):
    run, gate = tmp_path / "run", threading.Event()
    run.mkdir()
    write(writer, run / "checkpoints", 1, w=torch.zeros(1))
    writer.wait()
    writer.thread.submit(gate.wait)
    write(writer, run / "checkpoints", 2, w=torch.zeros(1))  # waits for its turn in the thread
    shutil.rmtree(run)
    gate.set()
    with pytest.raises(OSError, match="step 2 could not be written"):
        writer.close()
    assert not run.exists()


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept_and_a_loss_that_is_not_finite_is_never_best(tmp_path):
    losses = [3.0, 1.0, float("nan"), float("-inf"), 2.0, 1.5, None]
    for number, loss in enumerate(losses, start=1):
        save(tmp_path, 10 * number, val_loss=loss)
    assert steps(tmp_path) == [20, 60, 70]
    assert checkpoint.best(tmp_path).name == "step_000020"
    assert checkpoint.last(tmp_path).name == "step_000070"
    save(tmp_path / "without", 10, val_loss=float("nan"))
    assert checkpoint.best(tmp_path / "without") is None


def test_a_damaged_checkpoint_is_kept(tmp_path):
    """It may be the best, and was deleted without a word."""
    (save(tmp_path, 10, val_loss=1.0, keep_last=1) / "state.json").write_text("{")
    for step in (20, 30):
        save(tmp_path, step, val_loss=2.0, keep_last=1)
    assert steps(tmp_path) == [10, 20, 30]


def test_steps_of_a_future_that_was_left_go(tmp_path):
    """Resumed from step 10 of a run that had reached 30: were 30 kept, resume=auto would go back to the old line, and
    with keep_last=1 the new step 20 would be pruned the moment it was written."""
    for step in (10, 30):
        save(tmp_path, step)
    save(tmp_path, 20, keep_last=1)
    assert steps(tmp_path) == [20]


# --- kills, full disks ----------------------------------------------------------------------------------------------

SAVE_AND_KILL = """
import os, shutil, signal, sys
from itertools import count
from pathlib import Path
import torch
from training import checkpoint, contents
contents.check_header = contents.check_tensors = lambda *_: None
contents.check_tokenizer = contents.check_tensors
os.fsync = lambda file: None  # which a kill does not need, and a power cut would
folder = Path(sys.argv[1])

def save(step, line):
    weights = {"w": torch.full((1000,), float(step + line))}
    checkpoint.save(folder, step, model=weights, optimizer=weights, state={"line": line}, tokenizer="{}", keep_last=1)

def kill_before(number):
    left = count(number, -1)
    watched = ("open", "os.", "shutil.")
    sys.addaudithook(lambda event, _: event.startswith(watched) and next(left) == 0 and os.kill(os.getpid(), 9))

for killed in count():
    shutil.rmtree(folder, ignore_errors=True)
    save(10, 0), save(20, 0)
    if (child := os.fork()) == 0:
        kill_before(killed)
        save(20, 1), save(30, 1)  # the first replaces one, the second deletes it
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    for path in checkpoint.all_checkpoints(folder):
        found = checkpoint.load(path)
        assert (found.model["w"] == found.step + found.state["line"]).all(), path
        assert torch.equal(found.optimizer()["w"], found.model["w"])
    assert found.step >= 20, killed
    save(40, 1)
    assert [path.name for path in folder.iterdir()] == ["step_000040"], killed  # what the kill left is swept up
    if ended == 0:
        break
print(killed)
"""


def test_a_kill_before_any_operation_on_files_leaves_only_whole_checkpoints(tmp_path):
    """Replacing a folder takes two renames; the old one, moved aside, must count until the new one is in place."""
    command = [sys.executable, "-c", SAVE_AND_KILL, tmp_path / "run"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 20


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    old = save(tmp_path, 10)
    with little_room(), pytest.raises(OSError, match=r"\A.*step 20 could not be written.*resume=auto.*\Z"):
        save(tmp_path, 20, {"w": torch.zeros(100_000)})
    assert list(tmp_path.iterdir()) == [old]
    assert checkpoint.load(old).step == 10
    (tmp_path / "full").write_text("a file, so that no folder can be made there")
    with pytest.raises(OSError, match=r"\A(?!.*resume=auto).*no earlier one was saved\Z"):
        save(tmp_path / "full", 10)


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


def test_a_link_that_leads_nowhere_does_not_keep_a_checkpoint_from_being_saved(tmp_path):
    """A run ended at its save, and had saved nothing."""
    (tmp_path / "step_000010").symlink_to("nowhere")
    assert checkpoint.load(save(tmp_path, 10)).step == 10


def test_nothing_is_written_through_a_link_in_place_of_the_folder(tmp_path):
    """faults/later led out of the run."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "later").symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="later is a link"):
        save(tmp_path / "later", 10)
    assert not any((tmp_path / "theirs").iterdir())


# --- resume= --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    for age, (name, reached) in enumerate((("new", 20), ("old", 40), ("bad-BROKEN-local_mask", 30))):
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
        # a broken run, by the name that was typed
        ("auto", "bad", "bad-BROKEN-local_mask/checkpoints/step_000030"),
        ("bad", None, "bad-BROKEN-local_mask/checkpoints/step_000030"),
        ("{runs}/bad", None, "bad-BROKEN-local_mask/checkpoints/step_000030"),
    ],
)
def test_resume_finds(runs, resume, name, expected):
    assert checkpoint.find(resume.format(runs=runs), runs, option="resume", name=name) == runs / expected


def test_a_broken_run_is_resumed_by_its_name_and_passed_over_else(runs, capsys):
    """resume=auto trained an exercise on in place of the run before it."""
    save(runs / "later-BROKEN-no_max" / checkpoint.FOLDER, 5)
    assert checkpoint.find("auto", runs, option="resume") == runs / "new/checkpoints/step_000020"
    assert "later-BROKEN-no_max" in capsys.readouterr().err
    assert checkpoint.find("latest", runs, option="run") == runs / "later-BROKEN-no_max/checkpoints/step_000005"


@pytest.mark.parametrize(
    ("resume", "name"),
    [("auto", "empty"), ("auto", "neww"), ("neww", None), ("{runs}/other/checkpoints/step_000099", None)],
)
def test_nothing_to_resume_says_what_was_looked_for_and_what_there_is(runs, resume, name):
    """Of a run that ended before its first checkpoint, name= said to use resume=auto, and resume=auto this."""
    resume = resume.format(runs=runs)
    with pytest.raises(ValueError, match=r"\A.*runs that have one: new, old, bad-BROKEN-local_mask\Z") as error:
        checkpoint.find(resume, runs, option="resume", name=name)
    assert str(error.value).startswith(f"resume={resume}: ")
    assert (name or resume) in str(error.value)
    assert ("name=empty without resume=" in str(error.value)) == (name == "empty")


@pytest.mark.parametrize("read", [checkpoint.load, checkpoint.load_state])
def test_a_step_that_a_run_does_not_have_is_answered_with_those_that_it_has(runs, read):
    """The runs were named, and not the checkpoints of the run that was typed."""
    path = runs / "old/checkpoints/step_000099"
    with pytest.raises(ValueError, match=f"no checkpoint {path}: its run has step_000040, step_000010$"):
        read(checkpoint.find(str(path), runs, option="run"))


def test_of_many_runs_only_the_newest_few_are_named_and_of_none_what_makes_one(tmp_path):
    with pytest.raises(ValueError, match=r"python train\.py$"):
        checkpoint.find("auto", tmp_path / "runs", option="resume")
    for age in range(7):
        path = save(tmp_path / f"run{age}" / checkpoint.FOLDER, 1)
        os.utime(path, (1e9 - age, 1e9 - age))
    with pytest.raises(ValueError, match=r": run0, run1, run2, run3, run4 and 2 older ones$"):
        checkpoint.find("nowhere", tmp_path, option="resume")


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize("name", checkpoint.FILES)
def test_resume_passes_over_a_damaged_newest_checkpoint_and_says_so(runs, capsys, name, which):
    """With eval_only, which measures the best and resumes nothing, it said "resuming from" the newest that was left."""
    older, newest = (runs / f"new/checkpoints/step_{step:06d}" for step in (10, 20))
    flip(newest / name)
    assert checkpoint.find("auto", runs, option="resume", which=which) == older
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {newest} is damaged ({name} ")
    assert line.endswith(f": resuming from {older} instead") == (which == "last")
    flip(older / "model.safetensors")
    for resume, asked in (("auto", "new"), ("new", None)):
        with pytest.raises(ValueError, match=r"/new; runs that have one: old, bad-BROKEN-local_mask$"):
            checkpoint.find(resume, runs, option="resume", name=asked)


def test_a_damaged_state_of_the_best_checkpoint_is_named(tmp_path, capsys):
    """Its loss could not be read, so another was taken as the best without a word."""
    best, newest = (save(tmp_path / "a/checkpoints", step, val_loss=float(step)) for step in (10, 20))
    (best / "state.json").write_text("{")
    assert checkpoint.find("a", tmp_path, option="run", which="best") == newest
    (line,) = capsys.readouterr().err.splitlines()
    assert str(best) in line


def test_a_checkpoint_that_its_run_has_deleted_meanwhile_is_not_called_damaged(runs, monkeypatch):
    path = runs / "old/checkpoints/step_000010"
    check = contents.check_header
    monkeypatch.setattr(contents, "check_header", lambda header: (shutil.rmtree(path), check(header)))
    with pytest.raises(ValueError, match=f"{path} was deleted by the run"):
        checkpoint.load(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_under_a_name_of_ones_own_loads(runs, tmp_path):
    """It was resumed as that step, and the steps between were never made."""
    renamed = (runs / "old/checkpoints/step_000040").rename(runs / "old/checkpoints/step_000050")
    with pytest.raises(ValueError, match=r"step 50, .* step 40\b"):
        checkpoint.load(renamed)
    copy = renamed.rename(tmp_path / "favourite")
    assert checkpoint.load(checkpoint.find(str(copy), runs, option="resume")).step == 40


# --- optimizer and random numbers -----------------------------------------------------------------------------------


def train(model, optimizer, count):
    for _ in range(count):
        loss = torch.nn.functional.dropout(model(torch.randn(4, 6)), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def make(order=1):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups[::order], lr=0.01, fused=True)


def test_an_optimizers_tensors_have_one_order_however_they_were_loaded():
    """Processes that share weights gather them one by one, in this order."""
    (model, optimizer), (other, again) = make(), make(order=-1)
    train(model, optimizer, 1)
    tensors = optimizer_tensors([optimizer], model.named_parameters())
    load_optimizer_tensors([again], other.named_parameters(), dict(reversed(tensors.items())))
    found = optimizer_tensors([again], other.named_parameters())
    assert [*found] == [*tensors]
    assert_same_bits(tensors, found)


def test_the_optimizer_of_another_model_is_refused():
    model, optimizer = make()
    train(model, optimizer, 1)
    tensors = optimizer_tensors([optimizer], model.named_parameters())
    other = torch.nn.Sequential(torch.nn.Linear(6, 7))
    theirs = torch.optim.AdamW(other.parameters())
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    second = {name: tensor for name, tensor in tensors.items() if name.startswith("2")}
    for into, of, given, named in (
        (optimizer, model, doubles, r"0\.weight\.exp_avg .*float64.*float32"),
        (theirs, other, tensors, r"0\.weight\.exp_avg \(5, 6\).*\(7, 6\)"),
        (theirs, other, second, r"2\.weight\.\w+ "),
    ):
        with pytest.raises(ValueError, match=named):
            load_optimizer_tensors([into], of.named_parameters(), given)


# --- one at a time --------------------------------------------------------------------------------------------------


def test_a_run_is_held_by_one_at_a_time_and_let_go(tmp_path):
    """Two in one run mixed their metrics and deleted each other's temporary checkpoints."""
    held = lock(tmp_path / "x")
    lock(tmp_path / "y").close()
    with pytest.raises(ValueError, match=r"/x is being trained by another process; .*name="):
        lock(tmp_path / "x")
    held.close()
    lock(tmp_path / "x").close()
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"\.lock is a link"):
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
        with pytest.raises(ValueError, match="by another process"):
            lock(run)
        holder.kill()
    lock(run).close()
    assert list(temporary.iterdir()) == []


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
