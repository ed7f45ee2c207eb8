"""python breakit.py: what is predicted is what is seen, and what is seen is what the pictures and files show."""

import json
import math
import os
import re
import shlex
import signal
from itertools import pairwise

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

import breakit
import train
from data.loader import validation_batches
from lab import draw, measure, page, panels, trainings, trials
from lab.runs import model_of_run
from model.break_it import FAILURES, LACKS, PARTS, UNBROKEN, BreakIt
from tests.reference import Case
from tests.test_breakit import first_tiles_that_hide_all
from tests.test_readme import ROOT
from training import config as configuration
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
    """The rows of every failure, implementation and dtype; and the trials that the pictures show."""
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
    monkeypatch.setattr(trials, "BreakIt", lambda *failure, **gain: UNBROKEN)
    for row in measure.measure(calls, ["no_rescale", "local_mask", "no_scale", "stale_seed"], ["tiled"])[0]:
        assert (row["observed"], row["verdict"]) == (trials.NONE, "harmless")
        assert row["agrees"] == row["where"].startswith("one tile")


def test_every_failure_is_seen_in_every_implementation_that_has_it(rows):
    for name in FAILURES:
        if name == "bf16_ties":  # below the budget; the next test
            continue
        for impl in ("naive", "tiled", "triton"):
            if not set(PARTS.get(name, (name,))) & LACKS.get(impl, {}).keys():
                harms = {row["verdict"] for row in rows(failure=name, impl=impl, dtype="float32")} != {"harmless"}
                assert harms, (name, impl)
            else:
                assert impl == "naive"
                assert not [row for row in rows(failure=name) if row["impl"] == impl]


def test_sums_of_16_bits_stay_below_the_budget_and_change_nothing_in_float32(rows):
    for dtype, same in (("float32", True), ("bf16", False), ("fp16", False)):
        (whole,) = rows(failure="none", where="the model's own scores", impl="tiled", dtype=dtype)
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
    for row in rows(failure="no_max", dtype="float32", where="equal scores: l overflows"):
        assert (row["observed"], row["error_o"] > 0.1) == (trials.SILENT, True)
    for row in rows(failure="no_max", dtype="fp16", where="one weight overflows"):
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


# --- what the pictures show ------------------------------------------------------------------------------------------


@pytest.fixture
def shown(measured):
    """The panels of a failure by the beginning of their title, each as its curves by name."""

    def shown(failure: str, title: str) -> dict[str, list[float]]:
        (panel,) = [x for x in panels.panels(measured[1][failure], None) if x.title.startswith(title)]
        return {curve.name: list(curve.y) for curve in panel.curves}

    return shown


def test_flat_rows_go_silent_at_88_7_less_ln_n_and_nan_at_88_7():
    for curve in panels.flat_rows().curves:
        n = 1024 if curve.name == "unbroken" else int(curve.name.split()[0])
        for score, o in zip(curve.x, curve.y, strict=True):
            if curve.name == "unbroken" or score < 88.72 - math.log(n):
                assert abs(o - 1) < 1e-5
            elif score < 88.72:
                assert o == 0
            else:
                assert math.isnan(o)
    theory, silent, loud = (curve.y for curve in panels.where_it_breaks().curves)
    assert all(0 <= found - right <= 0.051 for found, right in zip(silent, theory, strict=True))  # steps of 0.05
    assert all(abs(found - 88.72) < 0.051 for found in loud[:5])


@pytest.mark.parametrize(
    ("failure", "right", "grows"), [("no_rescale_sum", "acc", "l"), ("no_rescale_output", "l", "acc")]
)
def test_what_is_not_rescaled_grows_past_the_wholes_and_the_other_does_not(shown, failure, right, grows):
    curves = shown(failure, "sum l")
    assert curves[grows][0] == 1  # nothing to rescale in the first tile
    assert max(curves[grows]) > 1.1
    # acc comes here as o times l, so it has been divided and multiplied
    assert all(abs(ratio - 1) < 1e-6 for ratio in curves[right])


def test_a_wrong_seed_is_shown_in_dq_and_its_direction_with_o_right(shown):
    for failure in ("stale_seed", "unrestored_seed"):
        errors = shown(failure, "error of dq")
        assert max(errors["broken o"] + errors["unbroken dq"]) < 1e-5
        assert min(errors["broken dq"]) > 0.01
        angles = shown(failure, "the gradients point")
        assert all(min(angles[name]) < 0.95 for name in ("dq", "dk"))


def test_a_maximum_that_starts_at_0_is_right_above_87_and_gives_nothing_below_104():
    for panel in (panels.low_rows(), panels.low_gradients()):
        for curve in panel.curves:
            for score, ratio in zip(curve.x, curve.y, strict=True):
                if curve.name == "unbroken" or score > (-9 if curve.name == "fp16" else -87):
                    assert abs(ratio - 1) < 0.002  # fp16's rounding of a weight
                if curve.name != "unbroken" and score < -104:
                    assert ratio == 0


def test_the_weights_of_a_local_mask_lie_on_the_future_too(measured, shown):
    (call,) = measured[1]["local_mask"].tried
    assert torch.allclose(panels.weights_of(call).sum(-1), torch.ones(1))
    curves = shown("local_mask", "weight on keys")
    assert set(curves["unbroken"]) == {0.0}
    assert max(curves["broken"]) > 10  # percent
    assert curves["broken"][-1] == 0


def test_the_rows_marked_nan_are_those_whose_first_tile_is_hidden(measured, shown):
    found = measured[1]["unguarded_mask"]
    (call,) = found.tried
    M, T = call.config.block_m, call.q.shape[2]
    hidden = first_tiles_that_hide_all(Case(T, B=1, window=call.config.window), (M, M))
    assert torch.equal(panels.hidden_rows(found).marked.any(1), hidden[: 3 * M])
    share = [100 * float(part.double().mean()) for part in hidden.split(M)]
    assert shown("unguarded_mask", "rows that are NaN")["o"] == share


def test_without_the_scale_scores_lie_further_apart_and_heads_look_at_fewer_keys(measured, shown):
    found = measured[1]["no_scale"]
    (whole,), (call,) = panels.unbroken_and_broken(found).values()
    right = panels.scores_of(whole)
    assert torch.allclose(panels.scores_of(call), right * call.q.shape[-1] ** 0.5)
    entropy = shown("no_scale", "entropy")
    assert all(broken < whole for whole, broken in zip(entropy["unbroken"], entropy["broken"], strict=True))


def test_errors_of_16_bit_sums_have_a_sign_that_adds_up():
    spread, bias, sums = (
        {curve.name: list(curve.y) for curve in panel.curves}
        for panel in (panels.signed_errors(), panels.bias_by_ties(), panels.added_up())
    )
    below, above = sum(spread["broken"][:3]), sum(spread["broken"][4:])
    assert below > above + 5  # percent
    assert abs(sum(spread["unbroken"][:3]) - sum(spread["unbroken"][4:])) < 3
    assert abs(bias["broken"][0]) < 0.001  # one key has nothing to tie with
    assert all(x < -0.05 for x in bias["broken"][1:])
    assert all(abs(x) < 0.02 for x in bias["unbroken"])
    assert sums["broken"][-1] < 10 * -abs(sums["unbroken"][-1])


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
    assert set(curves) == set(names)
    assert all(curves[name].setting == FAILURES[name].wakes for name in names)
    assert all(len(of.whole) == 3 and all(map(math.isfinite, of.whole)) for of in curves.values())
    stale, nan = curves["stale_seed"], curves["unguarded_mask"].broken["unguarded_mask"]
    assert stale.broken["stale_seed"][0] == stale.whole[0]
    assert stale.broken["stale_seed"][1:] != stale.whole[1:]
    assert len(nan) == 1
    assert math.isnan(nan[0])


def drawn(*curves: panels.Curve, **options):
    """The axes of one panel with these curves."""
    return draw.picture("no_max", [panels.Panel("", "", "", curves, **options)]).axes[0]


def test_what_is_not_finite_is_a_cross_and_names_stand_at_the_ends():
    axes = drawn(
        panels.Curve("unbroken", range(3), [3.0, 2.0, 1.0]), panels.Curve("broken", range(3), [3.0, 2.0, math.nan])
    )
    crosses = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[], [2]]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights.keys() == {"unbroken", "broken"}
    to_frame = axes.transData + axes.transAxes.inverted()
    assert heights["unbroken"] == pytest.approx(to_frame.transform((2, 1.0))[1])
    assert 0.8 < heights["broken"] < 1


def test_names_of_curves_that_end_together_do_not_touch():
    ends = [panels.Curve(name, [0.0, 1.0], [0.0, 1.0]) for name in ("unbroken", "a", "b", "c")]
    heights = sorted(text.get_position()[1] for text in drawn(*ends).texts)
    assert min(b - a for a, b in pairwise(heights)) > 0.069
    assert heights[-1] <= 1


def test_a_picture_reads_well():
    """Panels of one size; every colour of a text has a contrast to white of 4.5 (WCAG 2); the whole is black and
    dashed, and what is broken has markers."""
    curve = panels.Curve("a", [0.0, 1.0], [0.0, 1.0])
    panel = panels.Panel("", "", "", [curve._replace(name="unbroken"), curve, curve, curve])
    figure = draw.picture("no_max", [panel] * 3)
    assert len({round(axes.get_position().width, 9) for axes in figure.axes}) == 1

    def luminance(colour) -> float:
        parts = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour))
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert all(1.05 / (luminance(text.get_color()) + 0.05) >= 4.5 for text in texts)
    whole, *broken = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    assert (whole.get_color(), whole.get_linestyle(), whole.get_marker()) == ("black", "--", "None")
    assert len({line.get_marker() for line in broken} - {"", "None"}) == 3


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
    assert [path.name for path in out.parent.iterdir()] == ["new"]  # nothing is written outside of out=
    assert {path.name for path in out.iterdir()} == {"break-it.md", "break"}
    assert {path.name for path in (out / "break").iterdir()} == {"table.json", "no_max.png"}
    assert (out / "break-it.md").read_text() == page.page(json.loads((out / "break/table.json").read_text()))
    assert "run taught, step_" in said
    assert re.search(r"^no_max +one weight overflows +[\d.]+ tiled +float32 8 x 8 +NaN +NaN +0/", said, re.M)


def test_the_file_has_the_lines_and_who_made_them(one):
    said, out = one
    kept = json.loads((out / "break/table.json").read_text())
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
    assert "a small model, trained for" in ended.out
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
    assert ended.err.endswith(
        "\nSIGINT: stopping after this step; a second one stops at once\n"
        "stopped: table and pictures are made at the end, so nothing is kept\n"
    )
    assert list((tmp_path / "runs/breakit/break").iterdir()) == []


def test_what_an_implementation_lacks_is_said_once(calls):
    said = measure.left_out(calls, list(FAILURES), ["naive", "tiled"])
    wanted = [name for name in FAILURES if set(PARTS.get(name, (name,))) & LACKS["naive"].keys()]
    assert len(said) == len(set(said)) == len(wanted)
    assert all("naive" in line for line in said)


def test_what_a_run_has_not_cannot_be_taken_out(call, small, tmp_path):
    given = ["attention.softmax_scale=0.5", "steps=1", f"runs={tmp_path}", "name=scaled"]
    assert call(train, *small, *given).code == 0
    lab_of = ["run=scaled", f"runs={tmp_path}", "steps=1", "device=cpu", f"out={tmp_path}/out"]
    ended = call(breakit, *lab_of, "failure=no_scale")
    assert ended.code == 2
    assert "softmax_scale=0.5 is no 1 / sqrt(D); leave it out; left out" in ended.out
    assert ended.err == (
        "breakit: failure=no_scale: there is nothing that it could take out of run scaled, step_000001\n"
    )


# --- docs/break-it.md ------------------------------------------------------------------------------------------------

KEPT = json.loads((ROOT / "docs/break/table.json").read_text())
PAGE = (ROOT / "docs/break-it.md").read_text()


def test_the_page_is_what_the_lab_writes_of_its_figures_and_of_the_words_of_today():
    """It fails when words change: lab/page.py says how to write the page again without another run."""
    assert page.page(KEPT) == PAGE
    assert list(KEPT["pictures"]) == list(FAILURES)
    assert all(row["agrees"] for row in KEPT["rows"])


@pytest.mark.parametrize("name", FAILURES)
def test_the_page_has_the_words_the_commands_and_the_picture_of_each_failure(name):
    failure, section = FAILURES[name], PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert all(words in section for words in (failure.removed, failure.seen, failure.why, failure.acts))
    assert f"](break/{name}.png)" in section
    assert f"| [{name}](#{name}) |" in PAGE
    assert f"\npython breakit.py failure={name}\n" in section
    (typed,) = re.findall(r"^python train.py (.*)$", section, re.M)
    ((cfg, _),) = configuration.compose(shlex.split(typed), train.Config, "config", ROOT / "conf", "train")
    assert cfg.break_it.broken == BreakIt(name).broken


def test_the_limits_in_the_words_are_those_of_the_dtypes():
    """Of l and acc without the maximum, of a weight in fp16, and of l and a weight in fp16 with a maximum from 0."""
    wide, fp16 = torch.finfo(torch.float32), torch.finfo(torch.float16)
    assert f"l or acc of a row passes exp({math.log(wide.max):.1f})" in FAILURES["no_max"].acts
    assert f"in fp16 also once a score passes {math.log(fp16.max):.1f})" in FAILURES["no_max"].acts
    assert f"log-sum-exp of a row is below {math.log(wide.tiny):.1f} " in FAILURES["zero_init_max"].acts
    assert f"all its scores are below {math.log(fp16.tiny):.1f})" in FAILURES["zero_init_max"].acts


@pytest.mark.parametrize("name", FAILURES)
def test_a_picture_of_the_page_is_wide_and_small(name):
    path = ROOT / f"docs/break/{name}.png"
    assert path.stat().st_size < 120_000
    with Image.open(path) as image:
        assert image.size == (draw.WIDTH, draw.HEIGHT)


def test_a_failure_is_said_to_be_as_the_rows_have_it():
    assert page.kind(KEPT, "unguarded_mask") == "loud (NaN)"
    assert page.kind(KEPT, "local_mask") == "leak"
    assert page.kind(KEPT, "stale_seed") == "gradient only"
    assert page.kind(KEPT, "bf16_ties") == "silent, but tiny"
    assert page.kind(KEPT, "no_max") == "silent, loud (infinity), loud (NaN)"


def test_a_failure_without_a_trial_is_refused_with_the_place_to_add_one(monkeypatch):
    """It said that there is nothing to take out, of a failure that had just been added."""
    monkeypatch.setattr(measure, "TRIALS", [trial for trial in trials.TRIALS if trial.failure != "no_scale"])
    with pytest.raises(ValueError, match=r"failure=no_scale has no trial.*lab/trials\.py"):
        measure.measure([], ["no_scale"], ["tiled"])
