"""python breakit.py: what is predicted is what is seen, and what is seen is what the pictures and files show."""

import json
import math
import os
import re
import signal
from itertools import combinations

import pytest
import torch
from matplotlib.colors import to_rgb

import breakit
import train
from data.loader import validation_batches
from lab import draw, measure, trainings, trials
from lab.runs import model_of_run
from model.break_it import FAILURES, LACKS
from tests.reference import Case
from tests.test_breakit import first_tiles_that_hide_all
from tests.test_readme import README, ROOT
from training.probe import record

CPU = torch.device("cpu")


pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of Triton's interpreter


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`: a layer of two heads over 64 tokens, two tiles of triton's in float32, trained
    for long enough that the heads look for something."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.n_layer=1", "model.context_length=64", "model.position=rope", "optimizer.lr=1e-2"]
    training = ["batch_size=8", "tokens_per_step=512", "steps=300", "eval_every=300", "checkpoint_every=300"]
    ended = call(train, *small, *model, *training, f"runs={folder}", "name=taught")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def calls(runs):
    model = model_of_run("taught", runs, CPU)
    batch = next(validation_batches(model.dataset.val, model.dataset.val_documents, 2, 64, 128))
    return record(model.net, batch.x, batch.y)


@pytest.fixture(scope="module")
def measured(calls):
    """The rows of every failure, implementation and dtype; and the views."""
    return measure.measure(calls, ["none", *FAILURES], trials.available(CPU))


@pytest.fixture
def rows(measured):
    def rows(**wanted) -> list[dict]:
        found = [row for row in measured[0] if wanted.items() <= row.items()]
        assert found, wanted
        return found

    return rows


@pytest.mark.parametrize("dtype", trials.DTYPES)
@pytest.mark.parametrize("impl", ["naive", "tiled", "triton"])
def test_what_is_seen_is_what_was_predicted(rows, impl, dtype):
    differ = [row for row in rows(impl=impl, dtype=dtype) if row["observed"] != row["predicted"]]
    assert differ == []
    assert all(row["agrees"] for row in rows(impl=impl, dtype=dtype))


def test_every_symptom_and_every_verdict_is_there(rows):
    symptoms = {trials.NAN, trials.OVERFLOW, trials.SILENT, trials.LEAK, trials.GRADIENT, trials.NONE}
    assert {row["observed"] for row in rows()} == symptoms
    assert {row["verdict"] for row in rows()} == {"loud", "silent", "harmless"}


def test_a_failure_that_does_not_come_is_told_from_its_prediction(calls, monkeypatch):
    """With nothing taken out, whatever the failure is called, the rows that should show it do not agree."""
    whole = trials.broken("none", 1.0)
    monkeypatch.setattr(trials, "broken", lambda failure, gain: whole)
    for row in measure.measure(calls, ["no_rescale", "local_mask", "no_scale", "stale_seed"], ["tiled"])[0]:
        assert (row["observed"], row["verdict"]) == (trials.NONE, "harmless")
        assert row["agrees"] == row["where"].startswith("one tile")


def test_every_failure_is_seen_in_every_implementation_that_has_it(rows):
    for name, failure in FAILURES.items():
        if name == "bf16_ties":  # below the budget; the next test
            continue
        for impl in ("naive", "tiled", "triton"):
            if not set(failure.switches) & LACKS.get(impl, {}).keys():
                harms = {row["verdict"] for row in rows(failure=name, impl=impl, dtype="float32")} != {"harmless"}
                assert harms, (name, impl)
            else:
                assert impl == "naive"
                assert not [row for row in rows(failure=name) if row["impl"] == impl]


def test_sums_of_16_bits_stay_below_the_budget_and_change_nothing_in_float32(rows):
    for dtype, same in (("float32", True), ("bf16", False), ("fp16", False)):
        (whole,) = rows(failure="none", where="real scores", impl="tiled", dtype=dtype)
        (ties,) = rows(failure="bf16_ties", impl="tiled", dtype=dtype)
        assert ties["verdict"] == "harmless"
        assert (ties["error_o"] == whole["error_o"]) == same


def test_a_verdict_is_what_the_errors_are(rows):
    """What is broken is off by a part in 300, and more; what is harmless, by rounding."""
    for row in rows():
        errors = [row[f"error_{name}"] for name in measure.RESULTS]
        assert all(map(math.isfinite, errors)) == (row["verdict"] != "loud")
        if row["verdict"] == "silent":
            assert max(errors) > 1 / 300
        if (row["verdict"], row["dtype"]) == ("harmless", "float32"):
            assert max(errors) < 1 / 30_000


def test_the_maximum_is_missed_only_past_the_limit(rows):
    for row in rows(failure="no_max", dtype="float32"):
        assert (row["observed"] == trials.NAN) == (row["max_score"] > 88.73)
        assert (row["observed"] == trials.NONE) == (row["headroom"] > 0)
    for row in rows(failure="no_max", dtype="float32", where="flat rows, scores below the limit"):
        assert (row["observed"], row["error_o"] > 0.1) == (trials.SILENT, True)
    for row in rows(failure="no_max", dtype="fp16", where="a score past the limit"):
        # naive divides before it rounds
        assert row["observed"] == (trials.NONE if row["impl"] == "naive" else trials.OVERFLOW)


def test_a_failure_begins_at_the_tile_that_theory_names(rows):
    """Nothing to rescale in the first tile; another's future in the second; a hidden first tile in the second row of
    tiles."""

    def place(failure: str) -> tuple[int, int]:
        row = rows(failure=failure, impl="tiled", dtype="float32")[-1]
        return row["query_tile"], row["key_tile"]

    for failure in ("no_rescale", "no_rescale_sum", "no_rescale_output"):
        query_tile, key_tile = place(failure)
        assert query_tile >= key_tile >= 1
    assert place("local_mask")[1] >= 1
    assert place("unguarded_mask") == (1, 0)
    assert place("stale_seed")[1] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
def test_the_interpreter_is_asked_whether_it_computes_as_a_gpu_does(monkeypatch):
    """Mended (tests/interpreter.py) it does; as triton ships it, it cuts bf16 off and exp2 keeps subnormal numbers."""
    interpreter = pytest.importorskip("tests.interpreter", reason="triton is made for Linux")
    assert (trials.computes_bf16(CPU), trials.keeps_subnormals(CPU)) == (True, False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", interpreter.as_it_was)
    assert not trials.computes_bf16(CPU)
    handle, exp2 = interpreter.TensorHandle, interpreter.np.exp2
    shipped = lambda self, x: handle(exp2(x.data), x.dtype.scalar)  # noqa: E731
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", shipped)
    assert trials.keeps_subnormals(CPU)


@pytest.mark.parametrize(("T", "tile", "window"), [(96, (32, 8), 8), (96, (16, 16), 8), (64, (64, 64), 5)])
def test_which_windows_hide_a_first_tile(T, tile, window):
    case = Case(T, B=1, window=window)
    assert trials.hidden_first_tile(T, *tile, window) == bool(first_tiles_that_hide_all(case, tile).any())


def test_a_state_without_the_maximum_has_m_at_0_and_a_sum_that_overflows(measured):
    shown = measured[1]["no_max"]
    assert {m for _, m, _ in shown.states["broken"]} == {0.0}
    assert shown.states["broken"][-1][2] == math.inf
    assert all(1 <= l < math.inf for _, _, l in shown.states["whole"])
    assert shown.errors.isinf().any()


def test_what_dropouts_seed_does_is_shown_in_the_gradient(measured):
    for name in ("stale_seed", "unrestored_seed"):
        shown = measured[1][name]
        assert shown.of == "dq"
        assert shown.states["whole"] == shown.states["broken"]
        assert bool((shown.errors > 0.01).any())


def short(runs, steps: int) -> train.Config:
    """The short training, on the run's text."""
    model = model_of_run("taught", runs, CPU)
    cfg = trainings.short_training(train.Config, steps, 1337, "cpu")
    cfg.data, cfg.tokenizer, cfg.model.context_length = model.data, model.tokenizer, 32
    return cfg


def test_a_broken_run_begins_as_the_whole_one_and_ends_where_it_is_nan(runs, tmp_path):
    cfg = short(runs, 3)
    cfg.runs = str(tmp_path)
    names = ["no_rescale", "unguarded_mask", "stale_seed"]
    curves = {name: of for of in trainings.compare(train.main, cfg, names) for name in of.broken}
    assert list(curves) == sorted(names, key=lambda name: trainings.SETTINGS[name])
    assert all(len(of.whole) == 3 and all(map(math.isfinite, of.whole)) for of in curves.values())
    stale, nan = curves["stale_seed"], curves["unguarded_mask"].broken["unguarded_mask"]
    assert stale.broken["stale_seed"][0] == stale.whole[0]
    assert stale.broken["stale_seed"][1:] != stale.whole[1:]
    assert len(nan) == 1
    assert math.isnan(nan[0])


def test_a_curve_ends_in_a_cross_where_its_loss_is_not_finite():
    curves = trainings.Curves("", [3.0, 2.0, 1.0], {"no_max": [3.0, math.nan], "no_scale": [3.0, 2.5, 2.0]})
    lines = draw.losses_figure([curves]).axes[0].lines
    crosses = [line for line in lines if line.get_marker() == "x"]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in crosses] == [([2], [3.0])]
    assert crosses[0].get_color() == draw.colour("no_max")


def test_a_failure_has_its_own_colour_however_many_there_are(monkeypatch):
    """A twelfth raised IndexError."""
    for i in range(20):
        monkeypatch.setitem(draw.FAILURES, f"another_{i}", FAILURES["no_max"])
    colours = [to_rgb(draw.colour(name)) for name in draw.FAILURES]
    assert min(math.dist(a, b) for a, b in combinations(colours, 2)) > 0.05


@pytest.fixture(scope="module")
def one(call, runs, tmp_path_factory):
    """The whole of it, for one failure: what was said, and the folder."""
    out = tmp_path_factory.mktemp("out") / "new"
    ended = call(breakit, "failure=no_max", "run=taught", f"runs={runs}", "steps=2", "device=cpu", f"out={out}")
    assert ended.code == 0, ended.err
    return ended.out, out


def test_one_failure_is_told_in_words_lines_and_pictures(one):
    said, out = one
    assert all(words in said for words in FAILURES["no_max"][1:4])
    assert {path.name for path in out.iterdir()} == {
        "table.json", "errors.png", "states.png", "losses.png", "no_max.png"
    }  # fmt: skip
    assert all(path.stat().st_size < 60_000 for path in out.glob("*.png"))
    assert "run taught, step_" in said
    assert re.search(r"^no_max +a score past the limit +[\d.]+ tiled +float32 8 x 8 +NaN +NaN +0/", said, re.M)


def test_the_file_has_the_lines_and_who_made_them(one):
    said, out = one
    kept = json.loads((out / "table.json").read_text())
    assert {"commit", "torch", "triton", "device"} <= kept["about"].keys()
    assert {row["failure"] for row in kept["rows"]} == {"none", "no_max"}
    columns = "failure where impl dtype gain tiles predicted observed agrees layer head query_tile key_tile max_score"
    columns += " headroom max_weight error_o error_dq error_dk error_dv verdict"
    assert all(set(row) == set(columns.split()) for row in kept["rows"])
    lines = [line for line in said.splitlines() if line.startswith(("none ", "no_max "))]
    assert len(lines) == len(kept["rows"])
    assert "nan" in {row["error_o"] for row in kept["rows"]}
    assert len(kept["losses"][0]["whole"]) == 2


def test_without_a_run_the_lab_trains_its_own_model(call, tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "FRESH_STEPS", 2)
    monkeypatch.setattr(trials, "available", lambda device: ["tiled"])
    monkeypatch.chdir(tmp_path)
    ended = call(breakit, "failure=no_scale", "steps=1", "device=cpu")
    assert ended.code == 0, ended.err
    assert "a fresh small model" in ended.out
    assert (tmp_path / "runs/breakit/no_scale.png").exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["breakit"]  # its own runs are gone


def test_a_lab_that_is_interrupted_while_it_trains_says_that_nothing_is_kept(call, tmp_path, monkeypatch):
    """train.py inside it said "saving after this step", into a folder that was then deleted."""

    def interrupted(*step):
        os.kill(os.getpid(), signal.SIGINT)
        return 1e-3

    monkeypatch.setattr(train, "learning_rate", interrupted)
    monkeypatch.chdir(tmp_path)
    ended = call(breakit, "failure=no_scale", "device=cpu")
    assert ended.code == 128 + signal.SIGINT
    assert ended.err.endswith(
        "\nSIGINT: stopping after this step; a second one stops at once\n"
        "stopped: table and pictures are made at the end, so nothing is kept\n"
    )
    assert list((tmp_path / "runs/breakit").iterdir()) == []


def test_what_an_implementation_lacks_is_said_once(calls):
    said = measure.left_out(calls, list(FAILURES), ["naive", "tiled"])
    wanted = [failure for failure in FAILURES.values() if set(failure.switches) & LACKS["naive"].keys()]
    assert len(said) == len(set(said)) == len(wanted)
    assert all("naive" in line for line in said)


def test_what_a_run_has_not_cannot_be_taken_out(call, small, tmp_path):
    given = ["attention.softmax_scale=0.5", "steps=1", f"runs={tmp_path}", "name=scaled"]
    assert call(train, *small, *given).code == 0
    lab_of = ["run=scaled", f"runs={tmp_path}", "steps=1", "device=cpu", f"out={tmp_path}/out"]
    ended = call(breakit, *lab_of, "failure=no_scale")
    assert ended.code == 2
    assert "softmax_scale=0.5 is no 1 / sqrt(D); leave it out; left out" in ended.out
    assert ended.err == ("breakit: failure=no_scale: nothing of the kind can be taken out of run scaled, step_000001\n")


@pytest.mark.parametrize("name", FAILURES)
def test_the_gallery_has_the_words_the_picture_and_the_command_of_each_failure(name):
    failure = FAILURES[name]
    (line,) = [line for line in README.splitlines() if line.startswith(f"| **{name}**")]
    assert f"without {failure.removed}.<br>Seen: {failure.seen}.<br>Because: {failure.why}.<br>" in line
    assert f"`python breakit.py failure={name}`" in line
    assert f"(docs/break/{name}.png)" in line
    assert (ROOT / f"docs/break/{name}.png").stat().st_size < 60_000
