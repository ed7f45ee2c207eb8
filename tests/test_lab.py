"""python breakit.py: what is predicted is what is seen, and what is seen is what the pictures and files show."""

import json
import math
import os
import re
import signal
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text

import breakit
import train
from data.loader import validation_batches
from lab import charts, draw, measure, page, panels, trainings, trials
from lab.entrants import IMPLS as IMPLS_OF_RACE
from lab.runs import model_of_run
from model.abilities import ABILITIES
from model.break_it import FAILURES, UNBROKEN, BreakIt
from training.probe import gauges, record

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of Triton's interpreter


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`: a layer of two heads over 64 tokens, two tiles of triton's in float32, trained
    for long enough that the heads look for something."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.n_layer=1", "model.context_length=64", "model.position=rope", "optimizer.lr=1e-2"]
    training = ["batch_size=8", "tokens_per_step=512", "steps=300", "eval_every=300", "checkpoint_every=300"]
    call(train, *small, *model, *training, f"runs={folder}", "name=taught").succeeded()
    return folder


@pytest.fixture(scope="module")
def calls(runs):
    model = model_of_run("taught", runs, CPU)
    batch = next(validation_batches(model.dataset.val, model.dataset.val_documents, 2, 64, 128))
    return record(model.net, batch.x, batch.y)


@pytest.fixture(scope="module")
def measured(calls):
    """Of naive and tiled, the rows of every failure and dtype; and the trials that the pictures show."""
    return measure.measure(calls, ["none", *trials.with_a_trial([*FAILURES])], ["naive", "tiled"])


@pytest.fixture
def rows(measured, request):
    """rows(**wanted): the rows that have these cells; those of triton are measured by slow tests alone."""

    def rows(**wanted) -> list[dict]:
        of = request.getfixturevalue("by_triton") if wanted.get("impl") == "triton" else measured[0]
        found = [row for row in of if wanted.items() <= row.items()]
        assert found, wanted
        return found

    return rows


@pytest.fixture(scope="module")
def by_triton(calls):
    if "triton" not in trials.available(CPU):
        pytest.skip("triton is made for Linux")
    return measure.measure(calls, ["none", *FAILURES], ["triton"])[0]


IMPLS = ["naive", "tiled", pytest.param("triton", marks=pytest.mark.slow)]


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_seen_is_what_was_predicted_of_every_failure_that_the_implementation_has(rows, impl):
    assert [row for row in rows(impl=impl) if row["observed"] != row["predicted"] or not row["agrees"]] == []
    seen = defaultdict(set)
    for row in rows(impl=impl, dtype="float32"):
        seen[row["failure"]].add(row["verdict"])
    lacking = {name for name in FAILURES if set(BreakIt(name).broken) & ABILITIES[impl].lacks.keys()}
    assert seen.keys() == {"none", *FAILURES} - lacking
    assert {name for name in seen if seen[name] == {"harmless"}} == {"none", "bf16_ties"} - lacking
    symptoms = {trials.NAN, trials.OVERFLOW, trials.SILENT, trials.LEAK, trials.GRADIENT, trials.NONE}
    assert impl != "tiled" or {row["observed"] for row in rows(impl=impl)} == symptoms


@pytest.mark.parametrize("impl", IMPLS)
def test_a_verdict_is_what_the_errors_are(rows, impl):
    """What is broken is off by a part in 300, and more; what is harmless, by rounding."""
    for row in rows(impl=impl):
        errors = [row[f"error_{name}"] for name in measure.RESULTS]
        assert all(map(math.isfinite, errors)) == (row["verdict"] != "loud")
        if row["verdict"] == "silent":
            assert max(errors) > 1 / 300
        if (row["verdict"], row["dtype"]) == ("harmless", "float32"):
            assert max(errors) < 1 / 30_000


def test_a_failure_that_does_not_come_is_told_from_its_prediction(calls, monkeypatch):
    """With nothing taken out, whatever the failure is called, the rows that should show it do not agree."""
    monkeypatch.setattr(trials, "BreakIt", lambda *failure, **gain: UNBROKEN)
    for row in measure.measure(calls, ["no_rescale", "local_mask", "no_scale", "stale_seed"], ["tiled"])[0]:
        assert (row["observed"], row["verdict"]) == (trials.NONE, "harmless")
        assert row["agrees"] == row["where"].startswith("one tile")


def test_the_maximum_is_missed_only_past_the_limit(rows):
    for row in rows(failure="no_max", dtype="float32"):
        assert (row["observed"] == trials.NAN) == (row["max_score"] > 88.73)
        assert (row["observed"] == trials.NONE) == (row["headroom"] > 0)
    for row in rows(failure="no_max", dtype="float32", where="equal scores: l overflows"):
        assert (row["observed"], row["error_o"] > 0.1) == (trials.SILENT, True)


def test_a_row_of_the_table_is_of_its_worst_layer(calls):
    louder = replace(calls[0], layer=1, q=1.5 * calls[0].q)
    for both in ([*calls, louder], [louder, *calls]):
        row, *_ = measure.measure(both, ["none"], ["naive"])[0]
        for name, worst in (("max_score", max), ("max_weight", max), ("headroom", min)):
            assert row[name] == worst(getattr(gauges(call), name) for call in both)


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
    """Mended (tests/interpreter.py) it does; as triton ships it, it cuts bf16 off."""
    interpreter = pytest.importorskip("tests.interpreter", reason="triton is made for Linux")
    assert trials.as_a_gpu(CPU)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", interpreter.as_it_was)
    assert not trials.as_a_gpu(CPU)


# --- what the pictures show ------------------------------------------------------------------------------------------


def by_name(panel: panels.Panel) -> dict[str, list[float]]:
    return {curve.name: list(curve.y) for curve in panel.curves}


@pytest.mark.parametrize("failure", [pytest.param(x, marks=[pytest.mark.slow] * (x == "bf16_ties")) for x in FAILURES])
def test_every_panel_shows_what_is_unbroken_beside_what_is_not(measured, failure):
    for panel in panels.panels(measured[1][failure], None):
        if panel.image is None:
            curves = by_name(panel)
            right = curves.pop(next(name for name in curves if name.startswith(("unbroken", "theory"))))
            assert all(map(math.isfinite, right)), panel.title
            assert any(curve != right for curve in curves.values()), panel.title
        else:
            assert panel.marked.any(), panel.title


def test_flat_rows_go_silent_at_88_7_less_ln_n_and_nan_at_88_7():
    for curve in panels.flat_rows().curves:
        n = 1024 if curve.name == "unbroken" else int(curve.name.split()[0])
        for score, o in zip(curve.x, curve.y, strict=True):
            if curve.name == "unbroken" or score < 88.72 - math.log(n):
                assert abs(o - 1) < 1e-5
            else:
                assert o == 0 if score < 88.72 else math.isnan(o)


def test_what_is_not_finite_is_a_cross_and_names_stand_apart_at_the_ends():
    lines = [("unbroken", 1.0), ("a", 1.0), ("b", 1.0), ("lost", math.nan)]
    curves = [panels.Curve(name, range(3), [3.0, 2.0, end]) for name, end in lines]
    axes = draw.picture("no_max", [panels.Panel("", "", "", curves)]).axes[0]
    crosses = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[], [], [], [2]]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    to_frame = axes.transData + axes.transAxes.inverted()
    assert heights["a"] == pytest.approx(to_frame.transform((2, 1.0))[1])
    assert 0.7 < heights["lost"] < 1
    assert min(abs(heights[x] - heights[y]) for x in heights for y in heights if x != y) > 0.069


def test_pictures_read_well():
    """Panels of one size; every colour of a text or of a line that is told by it has a contrast to white of 4.5 (WCAG
    2); the whole is black and dashed, and what is broken has markers."""
    curve = panels.Curve("a", [0.0, 1.0], [0.0, 1.0])
    panel = panels.Panel("", "", "", [curve._replace(name="unbroken"), curve, curve, curve])
    figure = draw.picture("no_max", [panel] * 3)
    assert len({round(axes.get_position().width, 9) for axes in figure.axes}) == 1

    def luminance(colour) -> float:
        parts = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour))
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    colours = [text.get_color() for text in figure.findobj(Text) if text.get_text()]
    assert list(charts.LOOKS) == list(IMPLS_OF_RACE)
    colours += [colour for colour, *_ in charts.LOOKS.values()]
    assert all(1.05 / (luminance(colour) + 0.05) >= 4.5 for colour in colours)
    whole, *broken = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    assert (whole.get_color(), whole.get_linestyle(), whole.get_marker()) == ("black", "--", "None")
    assert len({line.get_marker() for line in broken} - {"", "None"}) == 3


# --- the whole of it -------------------------------------------------------------------------------------------------


def test_a_broken_run_begins_as_the_whole_one_and_ends_where_it_is_nan(runs, tmp_path):
    model, cfg = model_of_run("taught", runs, CPU), trainings.short_training(train.Config, 3, 1337, "cpu")
    cfg.data, cfg.tokenizer, cfg.model.context_length = model.data, model.tokenizer, 32
    cfg.runs = str(tmp_path)
    names = ["unguarded_mask", "stale_seed"]
    curves = {name: of for of in trainings.compare(train.main, cfg, names) for name in of.broken}
    assert {name: of.setting for name, of in curves.items()} == {name: FAILURES[name].wakes for name in names}
    assert all(len(of.whole) == 3 and all(map(math.isfinite, of.whole)) for of in curves.values())
    stale, nan = curves["stale_seed"], curves["unguarded_mask"].broken["unguarded_mask"]
    assert stale.broken["stale_seed"][0] == stale.whole[0]
    assert stale.broken["stale_seed"][1:] != stale.whole[1:]
    assert [math.isnan(loss) for loss in nan] == [True]


def test_one_failure_is_told_in_words_lines_and_pictures(call, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "available", lambda device: ["naive", "tiled"])
    out = tmp_path / "new"
    given = ["failure=no_max", "run=taught", f"runs={runs}", "steps=2", "device=cpu", f"out={out}"]
    ended = call(breakit, *given).succeeded()
    assert all(words in ended.out for words in FAILURES["no_max"][1:4])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]  # nothing is written outside of out=
    assert {path.name for path in out.iterdir()} == {"break-it.md", "break"}
    assert {path.name for path in (out / "break").iterdir()} == {"table.json", "no_max.png"}
    kept = json.loads((out / "break/table.json").read_text())
    assert (out / "break-it.md").read_text() == page.page(kept)
    assert kept["model"].startswith("run taught, step_")
    assert {"commit", "torch", "triton", "device"} <= kept["about"].keys()
    columns = "failure where impl dtype gain tiles predicted observed agrees layer head query_tile key_tile max_score"
    columns += " headroom max_weight error_o error_dq error_dk error_dv verdict"
    assert all(set(row) == set(columns.split()) for row in kept["rows"])
    lines = [line.split()[0] for line in ended.out.splitlines() if line.startswith(("none ", "no_max "))]
    assert lines == [row["failure"] for row in kept["rows"]]
    assert "nan" in {row["error_o"] for row in kept["rows"]}
    assert len(kept["losses"][0]["whole"]) == 2


@pytest.mark.slow
def test_without_a_run_the_lab_trains_its_own_model(call, tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "FRESH_STEPS", 2)
    monkeypatch.setattr(trials, "available", lambda device: ["tiled"])
    monkeypatch.chdir(tmp_path)
    call(breakit, "failure=no_scale", "steps=1", "device=cpu").succeeded()
    assert (tmp_path / "runs/breakit/break/no_scale.png").exists()
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
    assert "nothing is kept" in ended.err
    assert "saving" not in ended.err
    assert list((tmp_path / "runs/breakit/break").iterdir()) == []


def test_what_an_implementation_lacks_is_said_once_and_what_a_run_has_not_cannot_be_taken_out(
    calls, call, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(trials, "available", lambda device: ["tiled"])
    said = measure.left_out(calls, list(FAILURES), ["naive", "tiled"])
    wanted = [name for name in FAILURES if set(BreakIt(name).broken) & ABILITIES["naive"].lacks.keys()]
    assert len(said) == len(set(said)) == len(wanted)
    assert all("naive" in line for line in said)
    given = ["attention.softmax_scale=0.5", "steps=1", f"runs={tmp_path}", "name=scaled"]
    call(train, *small, *given).succeeded()
    ended = call(breakit, "run=scaled", f"runs={tmp_path}", "steps=1", f"out={tmp_path}/out", "failure=no_scale")
    assert ended.code == 2
    assert "softmax_scale=0.5" in ended.out
    assert re.fullmatch(r"breakit: failure=no_scale: .*run scaled, step_000001\n", ended.err)


def test_a_failure_without_a_trial_is_refused_at_once_with_the_place_to_add_one(tmp_path, monkeypatch):
    """It said that there is nothing to take out, of a failure that had just been added."""
    monkeypatch.setattr(trials, "TRIALS", [trial for trial in trials.TRIALS if trial.failure != "no_scale"])
    device = torch.device("cpu")
    with pytest.raises(ValueError, match=r"failure=no_scale .*lab/trials\.py"):
        page.gallery(train.main, None, failure="no_scale", run=None, runs=tmp_path, device=device, out=tmp_path)
