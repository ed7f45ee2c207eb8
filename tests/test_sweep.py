"""training/sweep.py: every job is a row, and a job knows nothing of the ones before it."""

import gc
import os
import re
import signal
import weakref
from types import SimpleNamespace

import pytest

import train
from model.break_it import UNBROKEN, BreakIt
from tests.runs import assert_same_run, last, table_of
from training import checkpoint
from training.metrics import Metrics
from training.sweep import free_memory, losses_figure, name_jobs, result, sweep


@pytest.mark.slow
def test_a_job_that_fails_or_goes_nan_stops_no_other_and_each_is_a_row_and_the_run_that_it_is_alone(
    call, small, tmp_path
):
    """One rate spoils the loss, one share leaves too little text for validation, one job is broken on purpose."""
    steps = ["steps=4", "eval_every=2", "optimizer.warmup_steps=0", "attention.dropout_p=0.1", f"runs={tmp_path}"]
    jobs = ["data.val_fraction=0.05,1e-9", "optimizer.lr=1e38,1e-3", "break_it=none,no_max"]
    ended = call(train, "-m", *jobs[:1], *small, *steps, *jobs[1:], "name=s")
    found = table_of(tmp_path / "s" / "table.csv")
    assert ended.code == 1
    assert [row["job"] for row in found] == [f"s-{i}{'-BROKEN-no_max' * (i % 2 == 0)}" for i in range(1, 9)]
    assert [row["data.val_fraction"] for row in found] == ["0.05"] * 4 + ["1e-09"] * 4
    assert [row["optimizer.lr"] for row in found] == ["1e+38", "1e+38", "0.001", "0.001"] * 2
    assert [row["status"] for row in found[:4:2]] == ["stopped at step 2, loss nan", "done"]
    assert all(row["status"].startswith("failed: the validation text has 0 tokens") for row in found[4:])
    assert found[3]["status"] == "BROKEN[no_max] done"

    best = checkpoint.load_state(checkpoint.best(tmp_path / "s-3" / checkpoint.FOLDER))
    assert (float(found[2]["val_loss"]), int(found[2]["step"])) == (best["val_loss"], 4)
    assert float(found[2]["bits_per_byte"]) > best["val_loss"]  # of bytes: a nat is 1.44 bits
    assert float(found[2]["ms"]) > 0

    lines = ended.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("job  "))
    assert lines[header].split() == list(found[0])
    assert [line.split()[0] for line in lines[header + 1 : header + 9]] == [row["job"] for row in found]
    assert re.fullmatch(rf"sweep: 8 of 8 jobs, \d of them failed or stopped: {tmp_path / 's'}", lines[-1])
    assert (tmp_path / "s/losses.png").stat().st_size > 0

    assert call(train, *small, *steps, "optimizer.lr=1e-3", "name=alone").code == 0
    assert_same_run(tmp_path / "s-3", tmp_path / "alone")


def test_a_sweep_fails_whichever_of_its_jobs_does(tmp_path):
    codes = iter([1, 0])
    jobs = [(SimpleNamespace(name="s", runs=str(tmp_path), break_it=UNBROKEN), [f"seed={i}"]) for i in (1, 2)]
    assert sweep(lambda _: next(codes), jobs) == 1


@pytest.mark.parametrize("end", ["Ctrl-C", "bug"])
def test_what_ends_a_sweep_leaves_a_table_of_what_there_is(call, small, tmp_path, monkeypatch, end):
    log = Metrics.log

    def log_and_stop(self, record):
        log(self, record)
        if self.folder.name == "s-2" and record["step"] == 2:
            if end == "bug":
                raise KeyError("a bug")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Metrics, "log", log_and_stop)
    typed = [*small, "steps=4", f"runs={tmp_path}", "name=s", "-m", "seed=1,2,3"]
    if end == "bug":
        with pytest.raises(KeyError, match="a bug"):  # with its traceback
            call(train, *typed)
    else:
        assert call(train, *typed).code == 130
    found = table_of(tmp_path / "s" / "table.csv")
    assert [row["job"] for row in found] == ["s-1", "s-2"]
    assert [row["status"].split(",")[0] for row in found] == ["done", "interrupted at step 2"]
    assert (tmp_path / "s" / "losses.png").exists()


@pytest.mark.parametrize(
    ("names", "broken", "sweep", "jobs"),
    [
        (["s", "s"], ["", "no_max"], "s", ["s-1", "s-2-BROKEN-no_max"]),
        (["a", "b"], ["", ""], r"[\d-]+-sweep", ["a", "b"]),
        ([None, None], ["", ""], r"[\d-]+-sweep", [r"[\d-]+-sweep-1", r"[\d-]+-sweep-2"]),
    ],
)
def test_a_sweep_is_named_by_name_or_by_time_and_no_run_that_exists_is_touched(tmp_path, names, broken, sweep, jobs):
    def configs():
        return [
            SimpleNamespace(name=name, runs=str(tmp_path), break_it=BreakIt(fault) if fault else UNBROKEN)
            for name, fault in zip(names, broken, strict=True)
        ]

    named = configs()
    assert re.fullmatch(sweep, name_jobs(named).name)
    assert all(re.fullmatch(name, config.name) for name, config in zip(jobs, named, strict=True))
    for there in {sweep, *jobs} - {name for name in {sweep, *jobs} if "sweep" in name}:
        for path in tmp_path.iterdir():
            path.rmdir()
        (tmp_path / there).mkdir()
        with pytest.raises(ValueError, match=rf"/{there} exists already: .*name="):
            name_jobs(configs())
        assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(
    ("varied", "second"),
    [
        ("attention=naive,sdpa attention.window=8", "attention=sdpa: attention.window=8"),
        ("tokens_per_step=128,100", "tokens_per_step=100: tokens_per_step=100"),
        ("break_it=none,unrestored_seed attention.dropout_p=0.1", "break_it=unrestored_seed: break_it="),
        ("compile=false,graph", "compile=graph: compile=graph"),
        ("model.n_embd=32,10000000000000", "model.n_embd=10000000000000: "),
        ("seed=1,-1", "seed=-1 is outside"),
    ],
)
def test_a_job_that_cannot_run_is_named_before_the_first_one_starts(small_run, tmp_path, varied, second):
    """naive had trained for hours when triton was refused on a CPU."""
    ended = small_run(f"steps=1 -m {varied}", code=2)
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert re.match(rf"train: (job 2/2, )?{second}", ended.err)
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_begin_from_one_checkpoint_are_runs_of_their_own(call, small_run, tmp_path):
    """Going on in the checkpoint's run, the second job would begin where the first one ended."""
    small_run("steps=2")
    typed = ["resume=x", "steps=4", "name=y", "-m", "optimizer.lr=1e-3,2e-3"]
    assert call(train, f"runs={tmp_path}", *typed).code == 0
    assert [last(tmp_path / job).name[-1] for job in ("x", "y-1", "y-2")] == ["2", "4", "4"]


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
