"""docs/explorer.html: the page is what its stories make it, and a browser shows what they say."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import breakit
from lab.explorer import DROPOUT
from lab.files import plain
from lab.story import ORDERS, STORY_FAILURES, THE_CAT, backward, sentence, story
from lab.trace import worked_example
from lab.traffic import words_of
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.dropout import keep_mask
from tests.browser import MISSING, browser
from tests.processes import HANGS
from tests.test_attention import CAT_OUTPUT
from tests.test_story import the_cat

ROOT = Path(__file__).parents[1]
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


def test_the_committed_page_is_what_breakit_writes(call, committed, tmp_path):
    ended = call(breakit, "explorer=true", f"out={tmp_path}/explorer.html")
    assert ended.code == 0, ended.err
    around, told = split((tmp_path / "explorer.html").read_text(encoding="utf-8"))
    again = "python breakit.py explorer=true writes it anew"
    same_around = around == committed[0]  # pytest would print both pages
    assert same_around, again
    found = difference(told, committed[1])
    assert found is None, f"{found}: {again}"


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        (0.123456, 0.123457, True),
        (0.123456, 0.123458, False),
        (1.0, 0.999999, True),
        (1.0, 0.99999, False),
        (0, 1e-17, False),  # what rounding leaves of 0 is not written
        (8.19401e-40, 8.19399e-40, True),  # neighbours in float32
        ("inf", "nan", False),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_only_the_sixth_digit_may_differ(a, b, alike):
    assert (difference(a, b) is None) == alike
    assert (difference({"x": [0, a]}, {"x": [0, b]}) or "alike").startswith("alike" if alike else "it['x'][1]")


def test_what_rounding_leaves_of_a_sum_is_written_as_0(committed):
    """Its digits are another CPU's other digits. Each row's ds add up to 0 after its last tile, without a failure."""
    fields = committed[1]["backward_fields"]
    sums = [
        number
        for one in committed[1]["backward"]["stories"].values()
        for tile in one["tiles"]
        for number in tile[fields.index("ds_sum")]
    ]
    assert 0 in sums
    assert min(abs(number) for number in sums if number) > 1e-3


def test_the_page_is_small_and_plain():
    assert PAGE.stat().st_size < 3 * 2**20
    assert PAGE.read_bytes().isascii()


def test_every_view_of_the_worked_example_has_its_story(committed):
    example = committed[1]["inputs"][0]
    views = {f"{c}/{n}/{f}" for c in (0, 1) for n in range(1, 6) for f in STORY_FAILURES if c or f != "local_mask"}
    assert example["stories"].keys() == views
    assert all(list(one["visits"]) == list(ORDERS) for one in example["stories"].values())


def test_the_numbers_of_a_tile_are_those_of_the_story(committed):
    """The third of the worked example's tiles of 2, no_rescale, straight from lab/story.py."""
    example, fields, sentences = (committed[1]["inputs"][0], committed[1]["fields"], committed[1]["sentences"])
    broken = BreakIt("no_rescale")
    tile = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=broken)[0][4]
    kept = dict(zip(fields, example["stories"]["0/2/no_rescale"]["tiles"][4], strict=True))
    assert [sentences[i] for i in kept.pop("says")] == [sentence(tile, row, 0, broken) for row in (2, 3)]
    assert difference(list(kept.values()), plain(tile[:-1])) is None


def test_the_numbers_of_dropout_and_of_the_backward_are_those_of_the_story(committed):
    """A causal tile of 2 with dropout: straight from lab/story.py."""
    q, k, v = the_cat()
    options = {"block_m": 2, "block_n": 2, "causal": True, "softmax_scale": 0.5} | DROPOUT
    told = committed[1]["dropout"]
    tile = story(q, k, v, break_it=BreakIt("none"), **options)[0][4]
    assert difference(told["stories"]["1/2"]["tiles"][4][:-1], plain(tile[:-1])) is None
    do = np.array(THE_CAT["do"], np.float64)
    for kind, changed in (
        ("dropout", {}),
        ("stale_seed", {"break_it": BreakIt("stale_seed")}),
        ("none", {"dropout_p": 0.0}),
    ):
        found = backward(q, k, v, do, **options | changed)
        told = committed[1]["backward"]["stories"][f"1/2/{kind}"]
        assert difference(told["tiles"][4][:-1], plain(found.tiles[4][:-1])) is None, kind
        assert difference(told["delta"], plain(found.delta)) is None, kind


def test_what_a_trained_head_leaves_out_has_a_reason_that_is_so(committed):
    head = committed[1]["inputs"][-1]
    assert set(head["why_not"]) == set(STORY_FAILURES) - set(head["failures"])
    q, k, v = (np.array(head[name]) for name in "qkv")
    options = {"block_m": 8, "block_n": 8, "softmax_scale": head["scale"]}
    right = story(q, k, v, break_it=BreakIt("none"), **options)[1]
    for failure, why in head["why_not"].items():
        same = np.allclose(story(q, k, v, break_it=BreakIt(failure), **options)[1], right)
        assert same == (why == "changes nothing in this data"), failure


def test_each_failure_goes_wrong_somewhere_on_the_page(committed):
    """Each switch has data with which it shows: in the final output of some view."""
    for failure in set(STORY_FAILURES) - {"none"}:
        outputs = [
            (one["o"], entry["stories"][key.replace(failure, "none")]["o"])
            for entry in committed[1]["inputs"]
            for key, one in entry["stories"].items()
            if key.endswith(f"/{failure}")
        ]
        assert any(difference(broken, right) for broken, right in outputs), failure


def test_a_page_of_ones_own_trace_has_it(call, tmp_path):
    """Any trace will do, that of the worked example too; and what its tokens say cannot end the script."""
    trace = tmp_path / "trace.json"
    assert call(breakit, "trace=true", f"out={trace}").code == 0
    kept = json.loads(trace.read_text())
    kept["labels"][0] = "</script>"
    trace.write_text(json.dumps(kept))
    ended = call(breakit, "explorer=true", f"real={trace}", f"out={tmp_path}/mine.html")
    assert ended.code == 0, ended.err
    _, told = split((tmp_path / "mine.html").read_text())
    assert told["inputs"][-1]["labels"] == ["</script>", "cat", "sat", "on", "mat"]


def test_a_trace_too_long_for_a_page_is_refused(call, tmp_path):
    head = worked_example()
    long = head._replace(**{name: np.ones((65, 4)) for name in "qkv"}, labels=["x"] * 65)
    (tmp_path / "long.json").write_text(json.dumps(plain(long._asdict())))
    ended = call(breakit, "explorer=true", f"real={tmp_path}/long.json", f"out={tmp_path}/long.html")
    assert "65 tokens are more than a page can show; keep a trace with tokens=64" in ended.err
    assert not (tmp_path / "long.html").exists()


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["explorer=true", "trace=true"], "trace=true explorer=true: choose one of them, or none for the lab"),
        (["explorer=true", "failure=no_max"], "failure=no_max: explorer=true does not read it"),
        (["trace=true", "real=x.json"], "real=x.json: trace=true does not read it"),
        (["explorer=true", "out=x.json"], "out=x.json: name a file that ends in .html"),
        (["explorer=true", "real=nowhere.json"], "real=nowhere.json: No such file .*trace=true run=NAME out="),
        (["explorer=true", f"real={ROOT}/README.md"], "README.md is no trace; trace=true run=NAME out=PATH.json"),
    ],
)
def test_a_page_that_cannot_be_made_is_refused_in_one_line(call, typed, answer):
    ended = call(breakit, *typed)
    assert ended.code == 2
    assert re.fullmatch(f"breakit: .*{answer}.*\n", ended.err)


# --- in a browser ---------------------------------------------------------------------------------------------------

INPUTS = ("cat", "large", "low", "few", "head")
in_a_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
OUTPUT = """return [...document.querySelectorAll("#rows tbody tr")].map(row =>
    [...row.querySelectorAll("td")].slice(3).map(cell => cell.firstElementChild?.textContent ?? ""))"""


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        page.window(1280)
        yield page


@pytest.fixture
def view(page):
    """view("step=3&tile=2") opens the page there."""

    def view(address: str = ""):
        page.open(f"{PAGE.as_uri()}#{address}")
        return page

    return view


def text(page, id: str) -> str:
    return page.run("return document.getElementById(arguments[0]).textContent", id)


def output(page) -> list[list[float]]:
    return [[float(x.replace("\u2212", "-")) for x in row] for row in page.run(OUTPUT)]


@in_a_browser
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", [1, 2, 3, 4, 5])
def test_stepping_to_the_end_shows_the_published_output(view, tile, order):
    page = view(f"step=1&tile={tile}&order={order}")
    steps = int(text(page, "count").split("/")[1])
    assert steps == (-(-5 // tile)) ** 2
    page.press(*["ArrowRight"] * (steps - 1))
    assert text(page, "count") == f"{steps} / {steps}"
    assert output(page) == CAT_OUTPUT


@in_a_browser
def test_without_the_rescaling_the_end_shows_the_wrong_output_and_the_right_one_below_it(view):
    page = view("step=end&failure=no_rescale")
    wrong = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt("no_rescale"))[1]
    assert output(page) == np.round(wrong, 4).tolist()
    below = page.run('return [...document.querySelectorAll("#rows td.wrong small")].map(x => x.textContent)')
    assert [float(x) for x in below if float(x) < 1] == CAT_OUTPUT[3] + CAT_OUTPUT[4]  # and l, which is above 1
    assert "At the end it is wrong in rows on, mat." in text(page, "wrong")


@in_a_browser
def test_a_screenshot_of_the_end_has_the_colour_of_what_is_wrong_where_it_is_wrong_alone(view):
    """The rows The, cat and sat see their largest score first, and need no rescaling; on and mat do."""
    pictures = {}
    for failure in ("none", "no_rescale"):
        page = view(f"step=end&failure={failure}")
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        pictures[failure] = page.picture("rows").astype(int)
    tops = page.run("""const card = document.getElementById("rows"), top = x => x.getBoundingClientRect().top;
        return [...card.querySelectorAll("tbody tr")].map(row => Math.round(top(row) - top(card)))""")
    wrong = {name: abs(x - (192, 28, 75)).sum(-1) < 30 for name, x in pictures.items()}  # --wrong, #c01c4b
    assert not wrong["none"].any()
    assert not wrong["no_rescale"][: tops[3]].any()
    assert all(wrong["no_rescale"][top : top + 20].sum() > 50 for top in tops[3:])


@in_a_browser
def test_the_sentence_is_the_storys(view):
    page = view("step=5&row=3")
    assert text(page, "says") == (
        "Tile 5 of 9, row on: A larger score: m grows from 0.5 to 1, so l and acc are multiplied by alpha = 0.6065."
    )
    assert page.run('return document.getElementById("says").getAttribute("aria-live")') == "polite"


@in_a_browser
def test_what_is_right_is_not_marked(view):
    """With infinities among it, and a failure that changes nothing here."""
    page = view("step=end&causal=1&tile=3&failure=unguarded_mask")
    assert "\u2212\u221e" in text(page, "matrix")
    assert page.run('return document.querySelectorAll(".wrong").length') == 0
    assert text(page, "wrong").startswith("The output is right so far. At the end it is right in every row.")


@in_a_browser
def test_infinities_and_nan_are_shown_as_such_and_marked(view):
    page = view("data=large&failure=no_max&step=end")
    cells = page.run('return [...document.querySelectorAll("#rows tbody tr:nth-child(4) td")].map(x => [x.className, '
                     'x.firstElementChild.textContent])')  # fmt: skip
    assert cells[0] == ["wrong", "0.0000"]  # m; alpha is left as it is
    assert cells[2:] == [["wrong", "\u221e"], *[["out wrong", "NaN"]] * 4]


@in_a_browser
def test_the_arrow_keys_home_and_end_step(view):
    page = view("step=5")
    counts = []
    for key in ("ArrowRight", "ArrowLeft", "ArrowLeft", "Home", "ArrowLeft", "End", "ArrowRight"):
        page.press(key)
        counts.append(int(text(page, "count").split()[0]))
    assert counts == [6, 5, 4, 1, 1, 9, 9]


@in_a_browser
def test_the_keyboard_alone_reaches_and_works_every_control(view):
    page = view("step=5")
    reached = []
    for _ in range(60):
        page.press("Tab")
        tag, id, outline = page.run("""const x = document.activeElement;
            return [x.tagName, x.id || x.textContent, getComputedStyle(x).outlineStyle]""")
        if tag == "BODY":
            break
        reached.append(id)
        assert outline == "solid", f"the focus on {id} is not to be seen"
    wanted = {"data", "row", "causal-0", "causal-1", "order-keys_outside", "first", "back", "forward", "last", "slider"}
    wanted |= {"play", "page-dropout", "page-backward"}
    assert wanted | {f"failure-{name}" for name in STORY_FAILURES} | {f"tile-{n}" for n in range(1, 6)} <= set(reached)

    page = view("step=5")
    page.press(*["Tab"] * (1 + reached.index("failure-no_rescale")), "Enter")
    assert "failure=no_rescale" in page.run("return location.hash")
    assert page.run("return document.activeElement.id") == "failure-no_rescale"  # drawn anew, and focused again
    page.press("ArrowRight")
    assert text(page, "count") == "6 / 9"


@in_a_browser
def test_the_address_holds_the_view(view):
    page = view("data=few&causal=1&tile=3&order=keys_outside&failure=unguarded_mask&step=2&row=1")
    assert text(page, "count") == "2 / 2"
    page.press("Home")
    address = page.run("return location.hash")
    wanted = "page=forward&data=few&causal=1&tile=3&order=keys_outside&failure=unguarded_mask&dropout=0&step=1&row=1"
    assert address == f"#{wanted}"
    shown = page.run("return document.body.innerText")
    assert view(address[1:]).run("return document.body.innerText") == shown


@in_a_browser
@pytest.mark.parametrize(
    "address",
    ["data=none&tile=9&step=99", "page=toString&dropout=7", "failure=luck&order=up&step=x&row=-3", "%%%&=&step"],
)
def test_an_address_that_means_nothing_shows_something_whole(view, address):
    page = view(address)
    assert re.fullmatch(r"\d / 9", text(page, "count"))
    assert text(page, "says").startswith(("Tile ", "Start here"))


@in_a_browser
def test_a_failure_that_shows_nothing_here_leads_to_where_it_does(view):
    page = view("failure=no_max&step=end")
    assert "At the end it is right in every row." in text(page, "wrong")
    page.run('document.getElementById("elsewhere").click()')
    assert "data=large" in page.run("return location.hash")
    assert "At the end it is wrong in" in text(page, "wrong")


WIDTHS = """return arguments[0].map(address => {
    location.hash = address; fromAddress();
    const over = [...document.querySelectorAll(".card")].filter(card => card.scrollWidth > card.clientWidth);
    return [address, Math.max(document.documentElement.scrollWidth, innerWidth), innerWidth, over.map(card => card.id)];
})"""


@in_a_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_no_view_is_wider_than_its_window_nor_a_part_of_it_than_its_card(page, view, width):
    page.window(width)
    view()
    try:
        views = [f"page=forward&data={data}&failure={failure}" for data in INPUTS for failure in STORY_FAILURES]
        views += ["page=dropout", "page=backward&failure=none", "page=backward&failure=stale_seed"]
        every = [f"{one}&causal=1&tile=5&step=end" for one in views]
        # a phone's window grows with what is too wide
        assert page.run(WIDTHS, every) == [[address, width, width, []] for address in every]
    finally:
        page.window(1280)


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


@in_a_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (844, 390)])
def test_what_a_step_changes_is_in_view(page, view, width, height):
    forward = ["failure=none", "failure=none&data=head&tile=8", "failure=none&data=head&tile=16"]
    broken = ["failure=no_rescale", "failure=local_mask&causal=0", "failure=no_max&data=large"]
    kinds = ["failure=none&dropout=0", "failure=none&dropout=1", "failure=stale_seed&dropout=0"]
    views = [*forward, *broken, "page=dropout", *(f"page=backward&{kind}" for kind in kinds)]
    every = [f"page=forward&data=cat&causal=0&tile=2&{one}&step={step}" for one in views for step in ("1", "2", "end")]
    page.window(width, height)
    try:
        assert view().run(UNSEEN, every) == [[address, 0, True, []] for address in every]
    finally:
        page.window(1280)


@in_a_browser
def test_it_opens_at_the_first_tile_and_says_where_to_start(view):
    page = view()
    assert text(page, "count") == "1 / 9"
    assert text(page, "says").startswith("Start here: press Next, or the right arrow key")
    page.run('document.getElementById("forward").click()')
    assert text(page, "says").startswith("Tile 2 of 9, row ")
    page.run('document.getElementById("page-backward").click()')
    assert (text(page, "count"), text(page, "says")[:11]) == ("1 / 9", "Start here:")
    assert page.run('return document.querySelector("header a").getAttribute("href")') == "attention.md"


@in_a_browser
def test_play_goes_to_the_last_tile_and_stops_and_a_key_stops_it(view):
    page = view("step=1&tile=3")
    shown = page.run("""const real = setInterval; window.setInterval = (step, ms) => real(step, ms / 100);
        document.getElementById("play").click(); return document.getElementById("play").textContent""")
    assert "Pause" in shown
    deadline = time.monotonic() + HANGS
    while text(page, "count") != "4 / 4" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (text(page, "count"), "Play" in text(page, "play")) == ("4 / 4", True)
    page.run("window.setInterval = () => 7; document.getElementById('play').click()")
    assert (text(page, "count"), "Pause" in text(page, "play")) == ("1 / 4", True)
    page.press("ArrowRight")
    assert (text(page, "count"), "Play" in text(page, "play")) == ("2 / 4", True)


@in_a_browser
def test_what_is_greyed_says_why_and_does_nothing(view):
    page = view("data=head&failure=no_rescale&step=1")
    greyed = page.run("""return [...document.querySelectorAll('#controls [aria-disabled="true"]')].map(
        button => [button.id, button.title])""")
    assert [id for id, _ in greyed][:2] == ["causal-0", "failure-no_max"]
    assert len(greyed) == 6
    for id, title in greyed:
        why = title.removeprefix("Not here: ")
        assert why in text(page, "greyed")
        before = page.run("return location.hash")
        page.run("document.getElementById(arguments[0]).click()", id)
        assert page.run("return location.hash") == before
    assert page.run('return getComputedStyle(document.getElementById("greyed")).display') != "none"
    assert view().run('return document.getElementById("greyed").hidden')  # nothing is greyed in the worked example


@in_a_browser
@pytest.mark.parametrize(
    ("address", "failure", "needs"),
    [("causal=0&step=1", "local_mask", "causal"), ("page=backward&dropout=0&step=1", "stale_seed", "dropout")],
)
def test_a_failure_puts_back_what_it_has_switched_on(view, address, failure, needs):
    page = view(address)
    click = "document.getElementById(arguments[0]).click()"
    page.run(click, f"failure-{failure}")
    assert f"{needs}=1" in page.run("return location.hash")
    assert "is on while this is out" in text(page, "verdict")
    page.run(click, "failure-none")
    assert f"{needs}=0" in page.run("return location.hash")
    page.run(click, f"{needs}-1")  # chosen, not switched on by the failure: it stays
    page.run(click, f"failure-{failure}")
    page.run(click, "failure-none")
    assert f"{needs}=1" in page.run("return location.hash")


@in_a_browser
@pytest.mark.parametrize("tile", [2, 5])
def test_the_words_moved_are_shown_for_both_orders(view, tile):
    """At the end they are what lab/traffic.py counts in tiled."""
    page = view(f"step=1&tile={tile}")
    first = [text(page, f"words-{order}") for order in ORDERS]
    page.press("End")
    for order, begun in zip(ORDERS, first, strict=True):
        total = words_of(AttentionConfig("tiled", tile, tile, order), 5, 4)
        assert text(page, f"words-{order}") == f"{total} of {total}"
        assert begun.endswith(f" of {total}")
        assert (int(begun.split()[0]) < total) == (tile < 5)


@in_a_browser
def test_weights_past_the_largest_number_are_told_from_those_below_it(view):
    page = view("data=large&failure=no_max&step=end")
    shades = page.run("""return [...document.querySelectorAll(".scores .cell")].map(
        cell => [Number(cell.textContent), cell.classList.contains("over"), getComputedStyle(cell).backgroundColor])""")
    assert {score for score, over, _ in shades if over} == {90, 120, 180}
    assert {score for score, over, _ in shades if not over} == {0, 30, 60}
    assert len({shade for _, _, shade in shades}) == 4
    assert "weight past float32" in text(page, "matrix")


@in_a_browser
def test_the_dropout_page_marks_what_the_mask_drops_whatever_the_tiles(view):
    keep = keep_mask(torch.tensor(DROPOUT["seed"]), 1, range(5), range(5), DROPOUT["dropout_p"])[0]
    options = {"causal": False, "break_it": BreakIt("none")} | DROPOUT
    for tile in (2, 5):
        page = view(f"page=dropout&step=end&tile={tile}")
        dropped = page.run("""return [...document.querySelectorAll(".scores .cell")].map(
            cell => cell.classList.contains("dropped"))""")
        assert dropped == (~keep).flatten().tolist()
        o = story(*the_cat(), block_m=tile, block_n=tile, **options)[1]
        assert output(page) == np.round(o, 4).tolist()
    assert "4 Z = keep" in text(page, "chip").replace("4Z", "4 Z")


GRADIENTS = """return [...document.querySelectorAll("#rows table")].map(table => [table.getAttribute("aria-label"),
    [...table.tBodies[0].rows].map(row => [...row.querySelectorAll("td")].map(
        cell => cell.firstElementChild?.textContent.replace("\u2212", "-")))])"""


@in_a_browser
@pytest.mark.parametrize("kind", ["none", "dropout", "stale_seed"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_backward_page_ends_at_the_gradients(view, order, kind):
    page = view(f"page=backward&causal=1&order={order}&failure={kind.replace('dropout', 'none')}&dropout=1&step=1")
    if kind == "none":
        page.run('document.getElementById("dropout-0").click()')
    page.press("End")
    changed = {"none": {}, "dropout": DROPOUT, "stale_seed": DROPOUT | {"break_it": BreakIt("stale_seed")}}[kind]
    found = backward(*the_cat(), np.array(THE_CAT["do"], np.float64), block_m=2, block_n=2, order=order, **changed)
    words = found.tiles[-1].words
    assert text(page, f"words-{order}") == f"{words} of {words}"
    shown = {name: [[float(x) for x in row] for row in rows] for name, rows in page.run(GRADIENTS)}
    for name in ("dq", "dk", "dv"):
        assert np.abs(np.array(shown[name]) - getattr(found, name)).max() <= 0.5001e-3, name
    wrong = page.run('return document.querySelectorAll("#rows td.wrong").length')
    assert (wrong > 0) == (kind == "stale_seed")
    steps = page.run('return [...document.querySelectorAll("#chip .formula b")].map(step => Number(step.textContent))')
    assert sorted(steps) == [4, 7, 8, 9, 10, 11, 12]


@in_a_browser
def test_it_follows_the_systems_light_and_dark(page, view):
    seen = []
    for scheme in ("light", "dark"):
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page = view()
        seen.append(page.run("const x = getComputedStyle(document.body); return [x.backgroundColor, x.color]"))
    page.command("Emulation.setEmulatedMedia", features=[])
    (paper, ink), (dark_paper, dark_ink) = ([sum(map(int, re.findall(r"\d+", c))) for c in pair] for pair in seen)
    assert paper > 3 * 220 > 3 * 60 > dark_paper
    assert ink < 3 * 80 < 3 * 200 < dark_ink


@in_a_browser
def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(page, view):
    page.log("performance")
    page.log("browser")
    view()
    views = [f"page=forward&data={data}&failure={failure}" for data in INPUTS for failure in STORY_FAILURES]
    views += ["page=dropout", "page=backward&failure=none", "page=backward&failure=stale_seed"]
    page.run(
        "for (const address of arguments[0]) { location.hash = address; fromAddress(); }",
        [f"{one}&causal=1&step=end" for one in views],
    )
    events = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert PAGE.as_uri() in {url.split("#")[0] for url in asked}
    assert [url for url in asked if not url.startswith((PAGE.as_uri(), "data:", "about:"))] == []
    assert page.log("browser") == []
