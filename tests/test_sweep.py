"""training/sweep.py: every job is a row, and a job knows nothing of the ones before it."""

import csv
import gc
import os
import signal
import weakref

import pytest

import train
from tests.test_train import assert_same_run
from training import checkpoint
from training.metrics import Metrics
from training.sweep import free_memory, losses_figure, result


def table(folder) -> list[dict]:
    with open(folder / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


STEPS = ["steps=4", "eval_every=2", "optimizer.warmup_steps=0", "attention.dropout_p=0.1"]


@pytest.fixture(scope="module")
def swept(call, small, tmp_path_factory):
    """(what ended, the runs): one rate spoils the loss, one share leaves too little text for validation."""
    runs = tmp_path_factory.mktemp("swept")
    shares, rates = "data.val_fraction=0.05,1e-9", "optimizer.lr=1e38,1e-3"
    return call(train, "-m", shares, *small, *STEPS, f"runs={runs}", rates, "name=s"), runs


def test_a_job_that_fails_or_goes_nan_stops_no_other_and_is_a_row_with_its_reason(swept):
    ended, runs = swept
    found = table(runs / "s")
    assert [row["job"] for row in found] == ["s-1", "s-2", "s-3", "s-4"]
    assert [row["data.val_fraction"] for row in found] == ["0.05", "0.05", "1e-09", "1e-09"]
    assert [row["optimizer.lr"] for row in found] == ["1e+38", "0.001"] * 2
    assert found[0]["status"] == "stopped at step 2, loss nan"
    assert found[1]["status"] == "done"
    assert found[2]["status"] == found[3]["status"]
    assert found[2]["status"].startswith("failed: the validation text has 0 tokens")
    assert ended.code == 1


def test_a_row_has_the_best_evaluation_and_the_time_of_a_step(swept):
    row = table(swept[1] / "s")[1]
    best = checkpoint.best(swept[1] / "s-2" / checkpoint.FOLDER)
    assert float(row["val_loss"]) == checkpoint.load_state(best)["val_loss"]
    assert int(row["step"]) == 4
    assert float(row["bits_per_byte"]) > float(row["val_loss"])  # of bytes: a nat is 1.44 bits
    assert float(row["ms"]) > 0


def test_the_table_is_printed_and_the_picture_drawn(swept):
    ended, runs = swept
    lines = ended.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("job  "))
    assert lines[header].split() == ["job", "data.val_fraction", *list(table(runs / "s")[0])[2:]]
    assert [line.split()[0] for line in lines[header + 1 : header + 5]] == ["s-1", "s-2", "s-3", "s-4"]
    assert lines[-1] == f"sweep: 4 of 4 jobs, 3 of them failed or stopped: {runs / 's'}"
    assert (runs / "s" / "losses.png").stat().st_size > 0


def test_the_second_job_is_the_same_run_alone_bit_for_bit(call, small, swept, tmp_path):
    alone = [*STEPS, "optimizer.lr=1e-3", f"runs={tmp_path}", "name=alone"]
    assert call(train, *small, *alone).code == 0
    assert_same_run(swept[1] / "s-2", tmp_path / "alone")


def test_control_c_ends_the_sweep_with_a_table_of_what_there_is(call, small, tmp_path, monkeypatch):
    log = Metrics.log

    def log_and_stop(self, record):
        log(self, record)
        if self.folder.name == "s-2" and record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Metrics, "log", log_and_stop)
    ended = call(train, *small, "steps=4", f"runs={tmp_path}", "name=s", "-m", "seed=1,2,3")
    assert ended.code == 130
    found = table(tmp_path / "s")
    assert [row["status"].split(",")[0] for row in found] == ["done", "interrupted at step 2"]
    assert (tmp_path / "s" / "losses.png").exists()


def test_a_bug_in_one_job_keeps_its_traceback_and_the_table(call, small, tmp_path, monkeypatch):
    log = Metrics.log

    def log_or_die(self, record):
        if self.folder.name == "s-2":
            raise KeyError("a bug")
        log(self, record)

    monkeypatch.setattr(Metrics, "log", log_or_die)
    with pytest.raises(KeyError, match="a bug"):
        call(train, *small, "steps=1", f"runs={tmp_path}", "name=s", "-m", "seed=1,2,3")
    assert [row["job"] for row in table(tmp_path / "s")] == ["s-1", "s-2"]


def test_without_a_name_the_sweep_is_named_by_the_time_and_names_of_ones_own_are_kept(call, small, tmp_path):
    one_step = [*small, "steps=1"]
    assert call(train, *one_step, f"runs={tmp_path / 'time'}", "-m", "seed=1,2").code == 0
    sweep, *jobs = sorted(path.name for path in (tmp_path / "time").iterdir())
    assert sweep.endswith("-sweep")
    assert jobs == [f"{sweep}-1", f"{sweep}-2"]
    assert call(train, *one_step, f"runs={tmp_path / 'own'}", "-m", "name=a,b").code == 0
    assert {"a", "b"} < {path.name for path in (tmp_path / "own").iterdir()}


def test_a_broken_job_has_its_fault_in_its_name_and_its_records_in_its_row(call, small, tmp_path):
    faults = "break_it=none,no_max"
    ended = call(train, *small, "steps=1", f"runs={tmp_path}", "name=s", "-m", faults)
    assert ended.code == 0
    assert ended.out.endswith(f"sweep: 2 of 2 jobs: {tmp_path}/s\n")
    assert [(row["job"], row["status"]) for row in table(tmp_path / "s")] == [
        ("s-1", "done"),
        ("s-2-BROKEN-no_max", "BROKEN[no_max] done"),
    ]
    assert all(float(row["val_loss"]) > 0 for row in table(tmp_path / "s"))


@pytest.mark.parametrize("there", ["s", "s-2"])
def test_a_sweep_over_a_run_that_exists_does_not_begin(call, small, tmp_path, there):
    (tmp_path / there).mkdir()
    ended = call(train, *small, "steps=1", f"runs={tmp_path}", "name=s", "-m", "seed=1,2")
    assert ended.code == 2
    assert ended.err == f"train: the run {tmp_path / there} exists already: use another name= for the sweep\n"
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(
    ("varied", "second", "why"),
    [
        (["attention=naive,sdpa", "attention.window=8"], "attention=sdpa", "attention.window=8: sdpa has nothing"),
        (["tokens_per_step=128,100"], "tokens_per_step=100", "tokens_per_step=100 is no multiple of"),
        (
            ["break_it=none,unrestored_seed", "attention.dropout_p=0.1"],
            "break_it=unrestored_seed",
            "break_it=unrestored_seed: no block is computed",
        ),
        (["compile=false,graph"], "compile=graph", "compile=graph: CUDA graphs need a CUDA GPU"),
        (["model.n_embd=32,10000000000000"], "model.n_embd=10000000000000", "a model of model.n_embd=10000000000000"),
    ],
)
def test_a_job_that_cannot_run_is_named_before_the_first_one_starts(call, small, tmp_path, varied, second, why):
    """naive had trained for hours when triton was refused on a CPU."""
    ended = call(train, *small, "steps=1", f"runs={tmp_path}", "name=s", "-m", *varied)
    assert ended.code == 2
    assert ended.err.startswith(f"train: job 2/2, {second}: {why}")
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_begin_from_one_checkpoint_are_runs_of_their_own(call, small, tmp_path):
    """Going on in the checkpoint's run, the second job would begin where the first one ended."""
    there = [f"runs={tmp_path}"]
    assert call(train, *small, *there, "steps=2", "name=x").code == 0
    assert call(train, *there, "resume=x", "steps=4", "name=y", "-m", "optimizer.lr=1e-3,2e-3").code == 0
    for job in ("y-1", "y-2"):
        run = tmp_path / job
        assert checkpoint.last(run / checkpoint.FOLDER).name == "step_000004"
    assert checkpoint.last(tmp_path / "x" / checkpoint.FOLDER).name == "step_000002"


def test_the_picture_has_a_curve_a_job_named_after_what_varies():
    records = [{"step": 1, "loss": 2.0}, {"step": 1, "val_loss": 1.9}]
    spoilt = [{"step": 1, "loss": float("nan"), "broken": "no_max"}, {"step": 1, "val_loss": 2.0, "broken": "no_max"}]
    (axes,) = losses_figure({"lr=$1": records, "lr=2": spoilt}, "s").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr=$1", "BROKEN[no_max] lr=2"]
    assert len(axes.lines) == 4


@pytest.mark.parametrize(("times", "median"), [([9.0], "9.0"), ([9.0, 1.0, 3.0], "2.0")])
def test_a_job_of_one_record_has_a_time_in_the_table_and_a_point_in_the_picture(times, median):
    """Of several records the first does not count: its step may have compiled."""
    records = [{"step": step, "loss": 2.0, "ms": ms} for step, ms in enumerate(times, start=4)]
    assert result(records, "done")["ms"] == median
    (line,) = losses_figure({"lr=1": records}, "s").axes[0].lines
    assert (line.get_marker() == "None") == (len(times) > 1)


def test_what_the_first_job_froze_is_freed_for_the_second():
    """A model and its optimizer refer to each other, and the collector looks at nothing that was frozen."""

    class Model:
        pass

    model = Model()
    model.itself = model
    seen = weakref.ref(model)
    gc.freeze()
    del model
    free_memory()
    assert seen() is None
