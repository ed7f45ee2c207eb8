"""docs/explorer.html: the page is what its stories make it, and a browser shows what they say."""

import json
import re
import time

import numpy as np
import pytest

import breakit
from lab.explorer import DROPOUT
from lab.files import plain
from lab.story import ORDERS, STORY_FAILURES, backward, sentence, story, worked_example
from lab.traffic import words_of
from model.attention import AttentionConfig
from model.break_it import BreakIt
from tests.browser import KEYS, MISSING, browser
from tests.processes import HANGS
from tests.test_attention import CAT_OUTPUT
from tests.test_readme import ROOT
from tests.test_story import the_cat

PAGE = ROOT / "docs" / "explorer.html"


def split(page: str) -> tuple[str, dict]:
    """What stands around the stories, and the stories."""
    begin, rest = page.split('<script type="application/json" id="stories">')
    told, end = rest.split("</script>", 1)
    return begin + end, json.loads(told)


@pytest.fixture(scope="module")
def committed() -> tuple[str, dict]:
    return split(PAGE.read_text(encoding="utf-8"))


def difference(a, b, at: str = "it") -> str | None:
    """The first place where a and b differ, and what they say there; None if they are alike.

    Numbers are alike if they differ by one unit in the last of the six digits: exp is not the same to the last bit on
    every CPU. Below 1e-38 float32 has fewer digits, and its last bit is more than such a unit.
    """
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((found for key in a if (found := difference(a[key], b[key], f"{at}[{key!r}]"))), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next((found for i, (x, y) in pairs if (found := difference(x, y, f"{at}[{i}]"))), None)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b:
        smaller = min(abs(a), abs(b)) or 1e-300
        unit = 10.0 ** (np.floor(np.log10(smaller)) - 5)
        if abs(a - b) <= 1.001 * (unit + np.finfo(np.float32).smallest_subnormal):
            return None
    return None if a == b else f"{at} is {str(a)[:200]}, not {str(b)[:200]}"


@pytest.mark.slow
def test_the_committed_page_is_what_breakit_writes(call, committed, tmp_path):
    call(breakit, "explorer=true", f"out={tmp_path}/explorer.html").succeeded()
    around, told = split((tmp_path / "explorer.html").read_text(encoding="utf-8"))
    again = "python breakit.py explorer=true writes it anew"
    same_around = around == committed[0]  # pytest would print both pages
    assert same_around, again
    found = difference(told, committed[1])
    assert found is None, f"{found}: {again}"
    assert PAGE.stat().st_size < 3 * 2**20
    assert PAGE.read_bytes().isascii()


def test_only_the_sixth_digit_may_differ():
    for a, b in ((0.123456, 0.123457), (1.0, 0.999999), (8.19401e-40, 8.19399e-40)):  # the last in float32
        assert difference({"x": [0, a]}, {"x": [0, b]}) is None
    for a, b in ((0.123456, 0.123458), (1.0, 0.99999), (0, 1e-17), ("inf", "nan"), ([1], [1, 2]), ({"a": 1}, {})):
        assert difference({"x": [0, a]}, {"x": [0, b]}).startswith("it['x'][1]")


def test_the_numbers_of_a_tile_are_those_of_the_story(committed):
    """Of the worked example in tiles of 2: straight from lab/story.py, without a mask and no_rescale, with dropout and
    a causal mask, and in the backward."""
    page, options = committed[1], {"block_m": 2, "block_n": 2}
    views = {f"{c}/{n}/{f}" for c in (0, 1) for n in range(1, 6) for f in STORY_FAILURES if c or f != "local_mask"}
    assert page["inputs"][0]["stories"].keys() == views
    broken = BreakIt("no_rescale")
    tile = story(*the_cat(), **options, causal=False, break_it=broken)[0][4]
    kept = dict(zip(page["fields"], page["inputs"][0]["stories"]["0/2/no_rescale"]["tiles"][4], strict=True))
    assert [page["sentences"][i] for i in kept.pop("says")] == [sentence(tile, row, 0, broken) for row in (2, 3)]
    assert difference(list(kept.values()), plain(tile[:-1])) is None

    options |= {"causal": True, "softmax_scale": 0.5} | DROPOUT
    tile = story(*the_cat(), break_it=BreakIt("none"), **options)[0][4]
    assert difference(page["dropout"]["stories"]["1/2"]["tiles"][4][:-1], plain(tile[:-1])) is None
    changes = {"dropout": {}, "stale_seed": {"break_it": BreakIt("stale_seed")}, "none": {"dropout_p": 0.0}}
    for kind, changed in changes.items():
        found = backward(*the_cat(*"qkv", "do"), **options | changed)
        told = page["backward"]["stories"][f"1/2/{kind}"]
        assert difference(told["tiles"][4][:-1], plain(found.tiles[4][:-1])) is None, kind
        assert difference(told["delta"], plain(found.delta)) is None, kind


def test_each_failure_goes_wrong_somewhere_and_what_the_head_leaves_out_has_a_reason_that_is_so(committed):
    for failure in set(STORY_FAILURES) - {"none"}:
        outputs = [
            (one["o"], entry["stories"][key.replace(failure, "none")]["o"])
            for entry in committed[1]["inputs"]
            for key, one in entry["stories"].items()
            if key.endswith(f"/{failure}")
        ]
        assert any(difference(broken, right) for broken, right in outputs), failure
    head = committed[1]["inputs"][-1]
    assert set(head["why_not"]) == set(STORY_FAILURES) - set(head["failures"])
    q, k, v = (np.array(head[name]) for name in "qkv")
    options = {"block_m": 8, "block_n": 8, "softmax_scale": head["scale"]}
    right = story(q, k, v, break_it=BreakIt("none"), **options)[1]
    for failure, why in head["why_not"].items():
        same = np.allclose(story(q, k, v, break_it=BreakIt(failure), **options)[1], right)
        assert same == (why == "changes nothing in this data"), failure


def test_a_page_of_ones_own_trace_has_it_unless_it_is_too_long(call, tmp_path, monkeypatch):
    """What its tokens say cannot end the script. (The rest of the page would take seconds.)"""
    monkeypatch.setattr("lab.explorer.small_inputs", list)
    for rest in ("dropout_stories", "backward_stories"):
        monkeypatch.setattr(f"lab.explorer.{rest}", lambda sentences: {})
    given = ["explorer=true", f"real={tmp_path}/head.json", f"out={tmp_path}/mine.html"]
    head = worked_example()
    long = head._replace(**{name: np.ones((65, 4)) for name in "qkv"}, labels=["x"] * 65)
    (tmp_path / "head.json").write_text(json.dumps(plain(long._asdict())))
    ended = call(breakit, *given)
    assert (ended.code, ended.err.count("\n"), "65 tokens" in ended.err) == (2, 1, True)
    assert not (tmp_path / "mine.html").exists()
    (tmp_path / "head.json").write_text(json.dumps(plain(head._replace(labels=["</script>", *"abcd"])._asdict())))
    call(breakit, *given).succeeded()
    assert split((tmp_path / "mine.html").read_text())[1]["inputs"][-1]["labels"] == ["</script>", *"abcd"]


# --- in a browser ---------------------------------------------------------------------------------------------------

INPUTS = ("cat", "large", "low", "few", "head")
OUTPUT = """return [...document.querySelectorAll("#rows tbody tr")].map(row =>
    [...row.querySelectorAll("td")].slice(3).map(cell => cell.firstElementChild?.textContent ?? ""))"""
EVERY_VIEW = [f"page=forward&data={data}&failure={failure}" for data in INPUTS for failure in STORY_FAILURES]
EVERY_VIEW += ["page=dropout", "page=backward&failure=none", "page=backward&failure=stale_seed"]
in_a_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def slowly(test):
    """A test of the page in Chromium that takes longer than the short walk."""
    return pytest.mark.slow(in_a_browser(test))


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        yield page


@pytest.fixture
def view(page):
    """view("step=3&tile=2") opens the page there, in a window of the usual size."""

    def view(address: str = "", width: int = 1280, height: int = 800):
        page.window(width, height)
        page.open(f"{PAGE.as_uri()}#{address}")
        return page

    return view


def text(page, id: str) -> str:
    return page.run("return document.getElementById(arguments[0]).textContent", id)


def click(page, *ids: str) -> None:
    for id in ids:
        page.run("document.getElementById(arguments[0]).click()", id)


def address(page) -> str:
    return page.run("return location.hash")


def output(page) -> list[list[float]]:
    return [[float(x.replace("\u2212", "-")) for x in row] for row in page.run(OUTPUT)]


WALKS = [pytest.param(n, o, marks=[pytest.mark.slow] * (n != 2)) for n in range(1, 6) for o in ORDERS]


@in_a_browser
@pytest.mark.parametrize(("tile", "order"), WALKS)
def test_stepping_to_the_end_shows_the_published_output_and_the_words_that_tiled_moves(view, tile, order):
    page = view(f"step=1&tile={tile}&order={order}")
    begun, steps = int(text(page, f"words-{order}").split()[0]), int(text(page, "count").split("/")[1])
    assert steps == (-(-5 // tile)) ** 2
    page.press(*["ArrowRight"] * (steps - 1))
    assert text(page, "count") == f"{steps} / {steps}"
    assert output(page) == CAT_OUTPUT
    total = {each: words_of(AttentionConfig("tiled", tile, tile, each), 5, 4) for each in ORDERS}
    assert {each: text(page, f"words-{each}") for each in ORDERS} == {o: f"{n} of {n}" for o, n in total.items()}
    assert (begun < total[order]) == (tile < 5)


@in_a_browser
def test_without_the_rescaling_the_end_shows_the_wrong_output_and_the_right_one_below_it(view):
    page = view("step=end&failure=no_rescale")
    wrong = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt("no_rescale"))[1]
    assert output(page) == np.round(wrong, 4).tolist()
    below = page.run('return [...document.querySelectorAll("#rows td.wrong small")].map(x => x.textContent)')
    assert [float(x) for x in below if float(x) < 1] == CAT_OUTPUT[3] + CAT_OUTPUT[4]  # and l, which is above 1
    assert "wrong in rows on, mat." in text(page, "wrong")


# An address, what is pressed and clicked there, and a text that is shown then, by its id; "#" is the address itself.
SHOWN = [
    ("", [], {"count": "1 / 9", "says": "^Start here"}),
    ("", ["forward"], {"says": "^Tile 2 of 9, row "}),
    ("", ["page-backward"], {"count": "1 / 9", "says": "^Start here"}),
    ("step=5&row=3", [], {"says": r"^Tile 5 of 9, row on: A larger score: m grows .* alpha = 0\.6065\.$"}),
    ("step=5", ["ArrowRight"], {"count": "6 / 9"}),
    ("step=5", ["ArrowRight", "ArrowLeft", "ArrowLeft"], {"count": "4 / 9"}),
    ("step=5", ["Home", "ArrowLeft"], {"count": "1 / 9"}),
    ("step=5", ["End", "ArrowRight"], {"count": "9 / 9"}),
    # an address that means nothing shows something whole
    *((at, [], {"count": r"\d / 9", "says": "^(Tile|Start here)"})
      for at in ("data=none&tile=9&step=99", "page=toString&dropout=7", "failure=luck&step=x&row=-3", "%%%&=&step")),
    # a failure that shows nothing here leads to where it does
    ("failure=no_max&step=end", [], {"wrong": "right in every row"}),
    ("failure=no_max&step=end", ["elsewhere"], {"#": "data=large", "wrong": "wrong in"}),
    ("step=end&causal=1&tile=3&failure=unguarded_mask", [], {"wrong": "right in every row", "matrix": "\u2212\u221e"}),
    # what a failure has switched on, it puts back; what was chosen stays
    ("causal=0", ["failure-local_mask"], {"#": "causal=1"}),
    ("causal=0", ["failure-local_mask", "failure-none"], {"#": "causal=0"}),
    ("causal=0", ["causal-1", "failure-local_mask", "failure-none"], {"#": "causal=1"}),
    ("page=backward&dropout=0", ["failure-stale_seed"], {"#": "dropout=1"}),
    ("page=backward&dropout=0", ["failure-stale_seed", "failure-none"], {"#": "dropout=0"}),
    # what is greyed does nothing
    ("data=head&failure=no_rescale", ["causal-0", "failure-no_max"], {"#": "causal=1.*failure=no_rescale"}),
]  # fmt: skip


@slowly
@pytest.mark.parametrize(("begin", "actions", "shown"), SHOWN)
def test_what_is_pressed_is_shown(view, begin, actions, shown):
    page = view(begin)
    for action in actions:
        page.press(action) if action in KEYS else click(page, action)
    for id, words in shown.items():
        assert re.search(words, address(page) if id == "#" else text(page, id)), id


@slowly
def test_what_is_right_is_not_marked_and_infinities_and_nan_are(view):
    page = view("step=end&causal=1&tile=3&failure=unguarded_mask")
    assert page.run('return document.querySelectorAll(".wrong").length') == 0
    page = view("data=large&failure=no_max&step=end")
    cells = page.run('return [...document.querySelectorAll("#rows tbody tr:nth-child(4) td")].map(x => [x.className, '
                     'x.firstElementChild.textContent])')  # fmt: skip
    assert cells[0] == ["wrong", "0.0000"]  # m; alpha is left as it is
    assert cells[2:] == [["wrong", "\u221e"], *[["out wrong", "NaN"]] * 4]
    over = page.run('return [...document.querySelectorAll(".scores .cell.over")].map(x => Number(x.textContent))')
    assert set(over) == {90, 120, 180}  # whose weights are past float32


@slowly
def test_the_keyboard_alone_reaches_and_works_every_control(view):
    page, reached = view("step=5"), []
    for _ in range(60):
        page.press("Tab")
        tag, id, outline = page.run("""const x = document.activeElement;
            return [x.tagName, x.id || x.textContent, getComputedStyle(x).outlineStyle]""")
        if tag == "BODY":
            break
        reached.append(id)
        assert outline == "solid", f"the focus on {id} is not to be seen"
    wanted = {"data", "row", "causal-0", "causal-1", "order-keys_outside", "first", "back", "forward", "last", "slider"}
    wanted |= {"play", "page-dropout", "page-backward", *(f"tile-{n}" for n in range(1, 6))}
    assert wanted | {f"failure-{name}" for name in STORY_FAILURES} <= set(reached)
    page = view("step=5")
    page.press(*["Tab"] * (1 + reached.index("failure-no_rescale")), "Enter")
    assert "failure=no_rescale" in address(page)
    assert page.run("return document.activeElement.id") == "failure-no_rescale"  # drawn anew, and focused again


# Of each view: what a step changes and is not seen, because it is outside the window, under the bar or under another.
UNSEEN = """return arguments[0].map(address => {
    location.hash = address; fromAddress();
    const bar = document.getElementById("bar").getBoundingClientRect();
    const parts = [...document.querySelectorAll(".scores .cell, #rows tr.now, #rows .matrices table, #words, #bar")];
    const unseen = parts.filter(part => {
        const box = part.getBoundingClientRect(), [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
        const inside = box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
        const hit = document.elementFromPoint(x, y);
        return !inside || part.id !== "bar" && box.bottom > bar.top || !(part.contains(hit) || hit.contains(part));
    });
    return [address, scrollY, parts.length > 25, unseen.map(part => part.className || part.id || part.tagName)];
})"""
WIDE = """return arguments[0].map(address => {
    location.hash = address; fromAddress();
    const over = [...document.querySelectorAll(".card")].filter(card => card.scrollWidth > card.clientWidth);
    return [address, Math.max(document.documentElement.scrollWidth, innerWidth), over.map(card => card.id)];
})"""


@slowly
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (844, 390), (360, 800)])
def test_what_a_step_changes_is_in_view_and_no_view_is_wider_than_its_window(view, width, height):
    views = ["failure=none", "failure=none&data=head&tile=8", "failure=none&data=head&tile=16", "page=dropout"]
    views += ["failure=no_rescale", "failure=local_mask&causal=0", "failure=no_max&data=large"]
    views += [f"page=backward&failure={x}" for x in ("none&dropout=0", "none&dropout=1", "stale_seed&dropout=0")]
    every = [f"page=forward&data=cat&causal=0&tile=2&{one}&step={step}" for one in views for step in ("1", "2", "end")]
    if width != 360:
        assert view("", width, height).run(UNSEEN, every) == [[one, 0, True, []] for one in every]
    every = [f"{one}&causal=1&tile=5&step=end" for one in EVERY_VIEW]
    # a phone's window grows with what is too wide
    assert view("", width, height).run(WIDE, every) == [[one, width, []] for one in every]


@slowly
def test_play_goes_to_the_last_tile_and_stops_and_a_key_stops_it(view):
    page = view("step=1&tile=3")
    page.run("const real = setInterval; window.setInterval = (step, ms) => real(step, ms / 100)")
    click(page, "play")
    deadline = time.monotonic() + HANGS
    while text(page, "count") != "4 / 4" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (text(page, "count"), "Play" in text(page, "play")) == ("4 / 4", True)
    page.run("window.setInterval = () => 7")
    click(page, "play")
    assert (text(page, "count"), "Pause" in text(page, "play")) == ("1 / 4", True)
    page.press("ArrowRight")
    assert (text(page, "count"), "Play" in text(page, "play")) == ("2 / 4", True)


GRADIENTS = """return [...document.querySelectorAll("#rows table")].map(table => [table.getAttribute("aria-label"),
    [...table.tBodies[0].rows].map(row => [...row.querySelectorAll("td")].map(
        cell => cell.firstElementChild?.textContent.replace("\u2212", "-")))])"""


@slowly
@pytest.mark.parametrize("kind", ["none", "dropout", "stale_seed"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_backward_page_ends_at_the_gradients(view, order, kind):
    page = view(f"page=backward&causal=1&order={order}&failure={kind.replace('dropout', 'none')}&dropout=1&step=1")
    click(page, *["dropout-0"] * (kind == "none"))
    page.press("End")
    changed = {"none": {}, "dropout": DROPOUT, "stale_seed": DROPOUT | {"break_it": BreakIt("stale_seed")}}[kind]
    found = backward(*the_cat(*"qkv", "do"), block_m=2, block_n=2, order=order, **changed)
    words = found.tiles[-1].words
    assert text(page, f"words-{order}") == f"{words} of {words}"
    shown = {name: [[float(x) for x in row] for row in rows] for name, rows in page.run(GRADIENTS)}
    for name in ("dq", "dk", "dv"):
        assert np.abs(np.array(shown[name]) - getattr(found, name)).max() <= 0.5001e-3, name
    assert (page.run('return document.querySelectorAll("#rows td.wrong").length') > 0) == (kind == "stale_seed")


@slowly
def test_it_is_light_or_dark_as_the_system_asks_nothing_of_the_network_and_nothing_goes_wrong(page, view):
    seen = []
    for scheme in ("light", "dark"):
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        paper = view().run("return getComputedStyle(document.body).backgroundColor")
        seen.append(sum(map(int, re.findall(r"\d+", paper))))
    page.command("Emulation.setEmulatedMedia", features=[])
    assert seen[0] > 3 * 220 > 3 * 60 > seen[1]
    page.log("performance")
    page.log("browser")
    visit = "for (const address of arguments[0]) { location.hash = address; fromAddress(); }"
    view().run(visit, [f"{one}&causal=1&step=end" for one in EVERY_VIEW])
    events = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert PAGE.as_uri() in {url.split("#")[0] for url in asked}
    assert [url for url in asked if not url.startswith((PAGE.as_uri(), "data:", "about:"))] == []
    assert page.log("browser") == []
