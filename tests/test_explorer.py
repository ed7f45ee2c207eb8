"""The explorer's page computes what model/tiled.py computes, in a headless Chromium."""

import json
import math
import random
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from model import tiled
from model.attention import AttentionConfig, problem_of
from model.break_it import BreakIt
from tests.browser import MISSING, browser
from tests.reference import largest

PAGE = Path(__file__).parents[1] / "docs" / "explorer.html"
FORWARD = ("s", "p", "m", "l", "alpha", "acc")
BACKWARD = ("s", "p", "dp", "ds", "dq", "dk", "dv")
# What the page has for the current settings. JSON has no NaN and no infinity.
STORY = """change(arguments[0]);
const story = storyOf(state.failure), x = input();
return JSON.stringify([x, story], (key, y) => typeof y === "number" && !Number.isFinite(y) ? String(y) : y)"""


def in_a_browser(test):
    return pytest.mark.slow(pytest.mark.skipif(bool(MISSING), reason=MISSING)(test))


def test_the_page_is_one_small_file():
    text = PAGE.read_text()
    assert len(text) < 66_000
    assert not re.search('https?://|src="', text)


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        page.window(1280, 800)
        page.open(PAGE.as_uri())
        yield page


def settings() -> list[dict]:
    """Two dozen: every failure on both pages, and whole; the rest at random."""
    rng, found = random.Random(3), []
    failures = ["none", "no_max", "no_rescale", "no_rescale_sum", "no_rescale_output", "zero_init_max", "local_mask"]
    for page, failure in product(("forward", "backward"), [*failures, "no_scale", "unguarded_mask", "stale_seed"]):
        if (page, failure) == ("forward", "stale_seed"):
            continue
        data = {"no_max": "large", "zero_init_max": "low", "unguarded_mask": "few"}.get(failure, "random")
        one = {"page": page, "failure": failure, "data": data, "step": 1}
        ranges = {"causal": (0, 1), "seed": (0, 2**31), "T": (5, 8), "D": (1, 4), "M": (1, 5), "N": (1, 5)}
        ranges |= {"dropout": (0, 1), "draw": (1, 99)}
        one |= {name: rng.randint(*limits) for name, limits in ranges.items()}
        found.append(one | {"causal": 1} if failure in ("local_mask", "unguarded_mask") else one)
    found = [one | {"dropout": 1} if one["failure"] == "stale_seed" else one for one in found]
    low = {"failure": "zero_init_max", "data": "own", "own": "9!-1!1!1", "dropout": 0}  # l is exp(-9)
    return [*found, *found[:4], found[0] | low]


def numbers(x) -> torch.Tensor:
    """Nested lists with "NaN" and "Infinity" as numbers."""
    if isinstance(x, list):
        return torch.stack([numbers(y) for y in x]) if x else torch.zeros(0)
    return torch.tensor(float(x))


def of_tiled(given: dict, x: dict) -> tuple[list[dict], dict]:
    """The tiles and the results of model/tiled.py, in the page's units: natural logarithms."""
    q, k, v, do = (numbers(x[name])[None, None] for name in ("q", "k", "v", "grad"))
    config = AttentionConfig("tiled", dropout_p=0.25 if given["dropout"] else 0.0)
    if given["failure"] != "no_scale":
        config.softmax_scale = x.get("scale", q.shape[-1] ** -0.5)
    failure, seed = BreakIt(given["failure"], x["gain"]), torch.tensor(given["seed"])
    problem = problem_of(q, k, v, config, bool(given["causal"]), seed, None, failure)
    tiles: list[dict] = []

    def watch(rows, columns, **values):
        found = {"rows": [rows.start, rows.stop], "columns": [columns.start, columns.stop]}
        found |= {name: None if y is None else y[0].clone() for name, y in values.items()}
        found["s"] = found["s"] / tiled.LOG2E
        for name in ("m", "l", "alpha", "delta"):
            if name in found:
                found[name] = found[name][:, 0]
        if "m" in found:
            found["m"] = torch.where(found["m"] == tiled.LOWEST, -math.inf, found["m"] / tiled.LOG2E)
        tiles.append(found)

    M, N, backward = given["M"], given["N"], given["page"] == "backward"
    o, lse, lse2 = tiled.forward(q, k, v, problem, M, N, None if backward else watch)
    results = {"o": o[0, 0], "lse": lse[0, 0]}
    if backward:
        gradients = tiled.backward(q, k, v, o, lse2, do, None, problem, M, N, watch)
        results |= dict(zip(("dq", "dk", "dv"), (y[0, 0] for y in gradients), strict=True))
    for tile in tiles:
        for name in ("dq", "dk"):  # scaled at the end
            if name in tile:
                tile[name] = tile[name] * problem.scale
    return tiles, results


def assert_close(found, wanted: torch.Tensor, what: str) -> None:
    """Equal but for the order of float32 sums, of at most 8 terms. Numbers are about 1; below 1e-3 terms cancel."""
    found, size = numbers(found), max(1e-3, largest(wanted.nan_to_num(0.0, 0.0, 0.0)))
    assert found.shape == wanted.shape, what
    allowed = 8 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(found, wanted, rtol=0, atol=allowed, equal_nan=True, msg=what)


@in_a_browser
@pytest.mark.parametrize("given", settings(), ids=lambda x: f"{x['page']}-{x['failure']}-{x['M']}x{x['N']}")
def test_the_page_computes_what_tiled_computes_in_every_tile(page, given):
    x, story = json.loads(page.run(STORY, given))
    given = given | {"M": min(given["M"], len(x["q"])), "N": min(given["N"], len(x["k"]))}
    tiles, results = of_tiled(given, x)
    assert [[t["rows"], t["columns"]] for t in story["tiles"]] == [[t["rows"], t["columns"]] for t in tiles]
    for told, tile in zip(story["tiles"], tiles, strict=True):
        for name in FORWARD if given["page"] == "forward" else BACKWARD:
            if name in tile and not (name == "alpha" and "no_rescale" in given["failure"]):
                assert_close(told[name], tile[name], f"{name} of {tile['rows']} x {tile['columns']}")
        assert (told["z"] is None) == (tile["z"] is None)
        if tile["z"] is not None:
            assert_close(told["z"], tile["z"], "Z")
    for name, wanted in results.items():
        assert_close(story[name], wanted, name)


# What is pressed, by the ids of what is clicked, and what is shown then; # is the address.
SHOWN = [
    ("", ["forward"], {"says": r"^Tile 2 of 9, row "}),
    ("step=5&row=3", [], {"says": r"m grows from 0\.5 to 1, so l and acc are multiplied by alpha = 0\.6065\.$"}),
    ("step=end&failure=no_rescale", [], {"wrong": "wrong in rows on, mat", "count": "9 / 9"}),
    ("failure=no_max&step=end", ["elsewhere"], {"#": "data=large", "wrong": "wrong in"}),
    ("step=end", [], {"words": "^165$"}),
    ("step=end&page=backward", [], {"words": "^430$"}),  # as lab/traffic.py counts
    ("causal=0", ["failure-local_mask"], {"#": "causal=1"}),
    ("causal=0", ["failure-local_mask", "failure-none"], {"#": "causal=0"}),  # what a failure switches on, it puts back
    ("page=backward", ["failure-stale_seed"], {"#": "dropout=1", "wrong": "Wrong so far|Right so far"}),
    ("data=nothing&M=99&step=-1&failure=luck&own=1;x", [], {"count": "1 / 3", "#": "data=cat"}),
    ("data=own&own=1;2!3!4!5;6&M=1&N=1&step=end", [], {"count": "2 / 2", "rows": "4.0000"}),
]


@in_a_browser
@pytest.mark.parametrize(("address", "clicks", "shown"), SHOWN)
def test_what_is_pressed_is_shown(page, address, clicks, shown):
    page.open(f"{PAGE.as_uri()}#{address}")
    for id in clicks:
        page.run("document.getElementById(arguments[0]).click()", id)
    for id, words in shown.items():
        script = "return location.hash" if id == "#" else "return document.getElementById(arguments[0]).textContent"
        assert re.search(words, page.run(script, id)), id


@in_a_browser
def test_numbers_that_are_typed_are_computed_and_a_mistake_is_explained(page):
    page.open(PAGE.as_uri())
    page.run("document.getElementById('edit').click()")
    typed = "const x = document.getElementById('own-q'); x.value = arguments[0]; x.dispatchEvent(new Event('input'))"
    page.run(typed, "1 0 1 0\n0 2 0 1\n1 1 1 0\n0 0 1 1\n9 0 0 1")
    assert "data=own" in page.run("return location.hash")
    page.run("document.getElementById('last').click()")
    assert "4.54.5" in page.run("return document.getElementById('matrix').textContent")  # 9 * 1 / 2, twice in a row
    page.run(typed, "1 0 1 0\n0 2 0")
    assert "every row has to have 4 numbers" in page.run("return document.getElementById('own-said').textContent")


@in_a_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (844, 390)])
def test_no_view_is_wider_than_its_window_and_nothing_is_asked_of_the_network(page, width, height):
    page.window(width, height)
    page.open(PAGE.as_uri())
    page.log("performance")
    wide = """return arguments[0].filter(given => { change(given);
        const over = [...document.querySelectorAll(".card")].some(card => card.scrollWidth > card.clientWidth);
        return over || document.documentElement.scrollWidth > arguments[1]; })"""
    views = [one | {"step": 1000} for one in settings()]
    assert page.run(wide, views, width) == []
    asked = [entry for entry in page.log("performance") if "Network.requestWillBeSent" in entry["message"]]
    assert [entry for entry in asked if '"url":"http' in entry["message"]] == []
    assert page.log("browser") == []
