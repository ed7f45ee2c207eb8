"""Each failure of break_it fails in the way and by the amount that lab/failures.py predicts, and only where it acts."""

import math
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import breakit
from lab import failures, page, prediction
from lab.failures import DTYPES, compare
from lab.prediction import Inputs, Prediction
from model import tiled
from model.attention import AttentionConfig, attention
from model.break_it import FAILURES, PARTS, BreakIt, Failure
from tests.reference import SEED, Case, error, largest, oracle
from training.config import CONF

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of Triton's interpreter
TILED, EPS = AttentionConfig("tiled", 32, 32), torch.finfo(torch.float32).eps
CASES = [(impl, dtype) for impl in ("naive", "tiled") for dtype in DTYPES]
WANTED = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux")
CASES += [pytest.param("triton", dtype, marks=[WANTED, pytest.mark.slow]) for dtype in DTYPES]


# --- predicted and found


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"dropout_p": 0.3}, {"H_kv": 1}, {"T_k": 44}, {"T_k": 31}])
def test_with_nothing_broken_the_prediction_is_the_oracles(options):
    """So what is predicted of a failure differs from the right result by the overridden step alone."""
    case = Case(40, B=1, **options)
    x = case.inputs(torch.float64) | {"dlse": torch.zeros(1, 2, 40, dtype=torch.float64)}
    kept = {name: options[name] for name in ("window", "dropout_p") if name in options}
    inputs = Inputs(*(x[name] for name in ("q", "k", "v", "do")), kept, SEED if "dropout_p" in options else None)
    right = oracle(x, case)
    for name, found in Prediction(inputs, "tiled", torch.float64).results().items():
        assert error(found, right[name]) < EPS * largest(right[name])  # l and acc are float32: half an EPS each


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize("failure", FAILURES)
def test_what_is_found_is_what_was_predicted(failure, impl, dtype):
    if impl == "naive" and any(FAILURES[part].not_in_naive for part in BreakIt(failure).broken):
        with pytest.raises(ValueError, match=f"^break_it={failure}: naive"):
            list(compare(failure, impl, dtype))
        return
    lines = list(compare(failure, impl, dtype))
    assert [line for line in lines if not line.difference <= 1] == []
    assert len(lines) == len(failures.FAILURES[failure].acts | failures.FAILURES[failure].sleeps)


def wrong(prediction: Prediction, right: Prediction) -> float:
    """How far the prediction is from right, in the worst result; NaN counts as infinite."""
    found, wanted = prediction.results(), right.results()
    return max(math.inf if name not in found else failures.distance(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_wrong_by_more_than_rounding_where_it_acts_and_not_where_it_sleeps(failure):
    entry = failures.FAILURES[failure]
    for inputs in entry.acts.values():
        prediction = Prediction(inputs, "tiled", broken=BreakIt(failure).broken)
        assert wrong(prediction, Prediction(inputs, "tiled")) > 0.05
    for inputs in entry.sleeps.values():  # weights, l and acc are float32 on both sides: six times half an EPS
        assert wrong(Prediction(inputs, "tiled", broken=BreakIt(failure).broken), Prediction(inputs, "tiled")) < 3 * EPS


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_that_does_not_come_is_noticed(failure, monkeypatch):
    """With nothing taken out, whatever the failure is called, inputs on which it should act are not as predicted."""
    monkeypatch.setattr(failures, "attend", lambda inputs, impl, number, *_: prediction.attend(inputs, impl, number))
    lines = {line.inputs: line.difference for line in compare(failure, "tiled", "float32")}
    for where in failures.FAILURES[failure].acts:
        assert lines[where] > 100  # times what rounding allows
    for where in failures.FAILURES[failure].sleeps:
        assert lines[where] <= 1


# --- one entry makes a failure: a failure of the backward alone, added here


@pytest.fixture
def no_delta(monkeypatch):
    """Takes delta out of tiled's backward, as somebody would who adds a failure."""

    def gradients(self, o, p, real=Prediction.gradients):
        return real(self, o * ("no_delta" not in self.broken), p)

    monkeypatch.setattr(Prediction, "gradients", gradients)

    def backward(q, k, v, o, lse2, do, dlse, problem, *rest, real=tiled.backward):
        return real(q, k, v, o * ("no_delta" not in problem.broken), lse2, do, dlse, problem, *rest)

    monkeypatch.setattr(tiled, "backward", backward)
    monkeypatch.setitem(FAILURES, "no_delta", Failure("delta", "always", "attention.block_n=32", "naive has no delta"))
    monkeypatch.setitem(failures.FAILURES, "no_delta", failures.Entry(failures.USUAL, {}))
    return "no_delta"


def test_a_failure_of_the_backward_needs_no_more_than_its_prediction(no_delta, tmp_path):
    (line,) = compare(no_delta, "tiled", "float32")
    assert line.difference <= 1
    assert line.o[0] == 0
    assert line.gradients[0] > 0.1
    with pytest.raises(ValueError, match="naive has no delta"):
        next(compare(no_delta, "naive", "float32"))
    page.picture(no_delta, {"whole": [2.0, 1.0], "broken": [2.0, math.nan]}, tmp_path / "no_delta.png")
    assert (tmp_path / "no_delta.png").stat().st_size > 10_000
    before = page.PAGE.read_text()
    facts = {"torch": "2", "device": "cpu", "commit": "abc"}
    text = page.write_page(tmp_path, [line], {no_delta: {"whole": [2.0], "broken": [3.0]}}, facts).read_text()
    assert "## no_delta\n\n**Taken out:** delta. It acts always.\n" in text
    assert "| [no_delta](#no_delta) | delta | always |" in text
    for section in before.split("\n## ")[1:]:  # no other failure changes
        assert f"\n## {section.rstrip()}" in text


def test_a_page_that_is_written_again_keeps_the_prose_and_has_the_new_numbers(tmp_path):
    facts = {"torch": "2", "device": "cpu", "commit": "abc"}
    lines, losses = list(compare("no_scale", "tiled", "float32")), {"no_scale": {"whole": [2.0], "broken": [3.0]}}
    first = page.write_page(tmp_path, lines, losses, facts).read_text()
    (tmp_path / "break-it.md").write_text(first.replace("**Seen:**", "**Seen by me:**"))
    lines = [line._replace(difference=0.77) for line in lines]
    again = page.write_page(tmp_path, lines, losses, facts).read_text()
    assert again.count("**Seen by me:**") == len(FAILURES)
    assert again.count("| 0.77 |") == len(lines)
    assert page.write_page(tmp_path, lines, losses, facts).read_text() == again


@pytest.mark.parametrize("name", FAILURES)
def test_the_page_of_this_repository_has_a_section_a_command_and_a_picture_for_each_failure(name):
    section = page.PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"python train.py {page.RECIPE} break_it={name} {FAILURES[name].wakes}\n" in section
    assert (page.PAGE.parent / f"break/{name}.png").exists()
    assert "**Seen:**" in section
    assert "**Because:**" in section
    assert all(float(number) <= 1 for number in re.findall(r"\| ([\d.]+|inf|nan) \|$", section, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["no_rescale_output", "local_mask", "unguarded_mask"])
def test_short_trainings_show_the_failure(failure):
    """At each of the last ten steps, by half the smallest difference that was measured: 0.40 and -0.52 nats."""
    losses = page.trainings(failure)
    off = [broken - whole for whole, broken in zip(losses["whole"], losses["broken"], strict=False)][-10:]
    shown = {"no_rescale_output": min(off) > 0.2, "local_mask": max(off) < -0.3, "unguarded_mask": math.isnan(off[-1])}
    assert shown[failure]


def test_the_script_prints_the_table_and_the_trainings_and_refuses_in_one_line(call, monkeypatch):
    monkeypatch.setattr(page, "STEPS", 2)
    ended = call(breakit, "failure=no_scale")
    assert ended.code == 0
    assert ended.out.count("| tiled, float32 |") == 2
    assert ": 0 not as predicted" in ended.out
    assert "no_scale, break_it.score_gain=10: at step 2 the loss is " in ended.out
    for typed, said in ("failure=no_mx", "choose none"), ("dtype=fp8", "choose float32"), ("falure=x", "failure"):
        ended = call(breakit, typed)
        assert ended.code != 0
        assert said in ended.err


# --- names and refusals


def test_each_failure_can_be_typed_as_a_group():
    assert {path.stem for path in (CONF / "break_it").glob("*.yaml")} == {"none", "mystery", *FAILURES}


@pytest.mark.parametrize(("broken", "label"), [
    *((BreakIt(name), name) for name in FAILURES), (BreakIt(), ""), (BreakIt("none"), ""),
    (BreakIt("no_max", 8.0), "no_max+gain_8"), (BreakIt(["stale_seed", "local_mask"]), "local_mask+stale_seed"),
    (BreakIt(["none", *PARTS["no_rescale"]]), "no_rescale"),
])  # fmt: skip
def test_what_is_broken_has_a_name(broken, label):
    assert broken.label == label
    assert broken == BreakIt(broken.broken, broken.score_gain)


@pytest.mark.parametrize(("config", "failure", "options"), [
    (replace(TILED, softmax_scale=0.5), "no_scale", {}), (TILED, "local_mask", {"causal": False}),
    (replace(TILED, window=4), "local_mask", {}), (replace(TILED, block_mask=["x"]), "local_mask", {}),
    (TILED, "local_mask", {"spans": torch.zeros(1, 8, 2, dtype=torch.int32)}), (TILED, "stale_seed", {}),
    *((AttentionConfig("sdpa", dropout_p=0.5), name, {}) for name in FAILURES if name != "no_scale"),
])  # fmt: skip
def test_a_failure_is_refused_where_it_has_nothing_to_remove(config, failure, options):
    with pytest.raises(ValueError, match=f"^break_it={failure}: "):
        attention(*torch.zeros(3, 1, 1, 8, 4), config, break_it=BreakIt(failure), **options)
    attention(*torch.zeros(3, 1, 1, 8, 4), AttentionConfig("sdpa"), break_it=BreakIt("no_scale"))  # is around attention
