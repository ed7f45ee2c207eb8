"""The story of the tiles, told by tiled's own loop: the published numbers, the state of each tile, and its words; and
python breakit.py trace=true, which tells the story of a row, of the worked example or of a run, in lines."""

import json
import re

import numpy as np
import pytest
import torch

import breakit
import train
from lab.story import (
    ORDERS,
    STORY_FAILURES,
    THE_CAT,
    as_head,
    backward,
    backward_sentence,
    dropout_sentence,
    head_of_run,
    sentence,
    story,
    tell,
)
from lab.traffic import Tiles, words_of
from model import gpt
from model.attention import AttentionConfig, attention
from model.break_it import BreakIt
from tests.reference import SEED, Case, assert_float64_right, assert_within_budget, oracle
from tests.runs import last
from tests.test_attention import CAT, CAT_L, CAT_M, CAT_OUTPUT
from training import checkpoint

# (T, T_k, block_m, block_n): one tile, ragged ones, more keys than queries, and rows that see nothing.
SIZES = [(5, 5, 5, 5), (7, 7, 2, 3), (6, 11, 4, 3), (11, 6, 3, 4), (1, 9, 2, 2), (9, 1, 4, 1)]
# Every size in both orders, with and without the causal mask, with and without dropout: pairwise.
PAIRWISE = [(size, ORDERS[(i + j) % 2], j % 2 == 0, 0.25 * (j > 1)) for i, size in enumerate(SIZES) for j in range(4)]


def the_cat(*names: str) -> list[np.ndarray]:
    return [np.array(THE_CAT[name], np.float64) for name in names or "qkv"]


def of_the_cat(failure: str = "none", **options):
    """The story of the worked example in tiles of 2, without a mask."""
    options = {"block_m": 2, "block_n": 2, "causal": False} | options
    return story(*the_cat(), break_it=BreakIt(failure), **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_the_published_maximum_sum_and_output_stand_in_each_rows_last_tile(block, order):
    assert {name: THE_CAT[name] for name in "qkv"} == CAT
    told, o, lse = of_the_cat(block_m=block, block_n=block, order=order)
    last = {row: (tile, row - tile.rows.start) for tile in told for row in tile.rows}
    assert [round(last[i][0].m[last[i][1]], 4) for i in range(5)] == CAT_M
    assert [round(last[i][0].l[last[i][1]], 4) for i in range(5)] == CAT_L
    assert np.round(o, 4).tolist() == CAT_OUTPUT
    assert np.array_equal(o, [last[i][0].o[last[i][1]] for i in range(5)])
    by_tiles = torch.tensor([last[i][0].m[last[i][1]] + np.log(last[i][0].l[last[i][1]]) for i in range(5)])
    assert_float64_right({"lse": torch.tensor(lse)}, {"lse": by_tiles}, terms=5)


@pytest.mark.parametrize(("size", "order", "causal", "dropout_p"), PAIRWISE)
def test_results_are_the_oracles_and_words_those_counted_in_tiled(size, order, causal, dropout_p):
    """And the last tile of a row, or of a key, has its gradient."""
    T, T_k, block_m, block_n = size
    case = Case(T, T_k, B=1, H=1, D=3, causal=causal, dropout_p=dropout_p)
    inputs = case.inputs(torch.float64)
    inputs["dlse"].zero_()
    q, k, v, do = (inputs[name][0, 0].numpy() for name in ("q", "k", "v", "do"))
    options = {"block_m": block_m, "block_n": block_n, "causal": causal, "order": order}
    found = backward(q, k, v, do, dropout_p=dropout_p, seed=SEED, **options)
    right = oracle(inputs, case)
    assert_float64_right({name: as_head(getattr(found, name)) for name in right}, right, terms=max(T, T_k))
    for side, names in (("rows", ["dq"]), ("columns", ["dk", "dv"])):
        last = {i: (tile, i - getattr(tile, side).start) for tile in found.tiles for i in getattr(tile, side)}
        for name in names:
            of_all = getattr(found, name)
            assert all(np.array_equal(getattr(tile, name)[r], of_all[i]) for i, (tile, r) in last.items())
    counts = [tile.words for tile in story(q, k, v, **options)[0]]
    with torch.no_grad(), Tiles() as counted:
        config = AttentionConfig("tiled", block_m, block_n, order)
        attention(*(inputs[name] for name in "qkv"), config, causal=causal)
    assert counts == sorted(counts)
    assert counts[-1] == counted.words


@pytest.mark.parametrize(
    ("order", "forward", "back"),
    [  # D = 4. Tiles of 3 and 2: of q, do or dq 12 and 8 words, of lse or delta 3 and 2, of k and v 24 and 16
        ("queries_outside", [12 + 24, 36 + 16 + 15, 67 + 8 + 24, 99 + 16 + 10],
         [30 + 72, 102 + 48 + 12, 162 + 20 + 72, 254 + 48 + 8]),
        # m, l and acc are 18 and 12, and once more at the end, with o and lse: 55
        ("keys_outside", [24 + 48, 72 + 32, 104 + 16 + 48, 168 + 32 + 55],
         [24 + 54, 78 + 36 + 24, 138 + 16 + 54, 208 + 36 + 16]),
    ],
)  # fmt: skip
def test_the_words_moved_grow_by_what_each_tile_loads_and_stores(order, forward, back):
    options = {"block_m": 3, "block_n": 3, "causal": False, "order": order}
    assert [tile.words for tile in of_the_cat(**options)[0]] == forward
    assert forward[-1] == words_of(AttentionConfig("tiled", 3, 3, order), 5, 4)
    assert [tile.words for tile in backward(*the_cat(), the_cat()[2], **options).tiles] == back


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("failure", [name for name in STORY_FAILURES if name != "none"])
def test_a_broken_story_is_what_broken_tiled_computes(failure, order):
    """Rows without a key, scores past the largest float32 and scores far below 0: each failure shows in one of them."""
    differ = False
    for gain, keys in ((1.0, slice(2, 5)), (120.0, slice(5)), (-300.0, slice(5))):
        q, k, v = (x.astype(np.float32) for x in the_cat())
        q, k, v, broken = q * np.sign(gain, dtype=np.float32), k[keys], v[keys], BreakIt(failure, abs(gain))
        options = {"block_m": 2, "block_n": 2, "order": order}
        found = story(q, k, v, break_it=broken, **options)[1:]
        x = [as_head(part) for part in (q, k, v)]
        other = attention(*x, AttentionConfig("tiled", **options), break_it=broken, return_lse=True)
        for mine, theirs in zip(found, other, strict=True):
            assert np.array_equal(mine, theirs[0, 0].numpy(), equal_nan=True)
        whole = attention(*x, AttentionConfig("tiled", **options), break_it=broken.mended)
        differ |= not torch.equal(whole, other[0])
    assert differ


def test_a_local_mask_visits_every_tile_and_its_wrong_keys_are_counted():
    broken = BreakIt("local_mask")
    told = of_the_cat("local_mask", causal=True)[0]
    assert len(told) == 9
    # "The" against "sat on": as the first row of its tile it sees the first column of any
    assert sentence(told[1], 0, 0, broken).startswith("Sees 1 ")
    # "sat" against "The cat": it may see both and sees one
    assert sentence(told[3], 2, 0, broken).startswith("Misses 1 ")


# --- the sentences, and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("none", ["m = 0.5", "m grows from 0.5 to 1, so l and acc are multiplied by alpha = 0.6065", "alpha is 1"]),
        ("no_rescale", ["m = 0.5", "but l and acc are not multiplied by alpha = 0.6065", "alpha is 1"]),
        ("no_rescale_sum", ["m = 0.5", "but l is not multiplied by alpha = 0.6065", "alpha is 1"]),
        ("no_rescale_output", ["m = 0.5", "but acc is not multiplied by alpha = 0.6065", "alpha is 1"]),
        ("no_max", ["exp(0.5) = 1.649", "exp(1) = 2.718", "exp(0.5) = 1.649"]),
    ],
)
def test_the_worked_row_is_told_with_its_numbers(failure, told):
    tiles = [tile for tile in of_the_cat(failure)[0] if 3 in tile.rows]
    for tile, words in zip(tiles, told, strict=True):
        assert words in sentence(tile, 3, 0, BreakIt(failure))


def test_dropout_and_the_backward_are_told_by_what_is_dropped_and_by_the_sign_and_sum_of_ds():
    options = {"block_m": 5, "block_n": 5, "causal": False, "dropout_p": 0.25, "seed": 6}
    (tile,) = story(*the_cat(), **options)[0]
    assert f"{(tile.z == 0).sum(-1)[1]} of its 5 weights" in dropout_sentence(tile, 1)
    assert dropout_sentence(tile._replace(z=np.full((5, 5), 4 / 3)), 1) == ""

    right = backward(*the_cat(*"qkv", "do"), **options)
    stale = backward(*the_cat(*"qkv", "do"), break_it=BreakIt("stale_seed"), **options)
    assert np.array_equal(right.o, stale.o)
    told = backward_sentence(right.tiles[0], 3, right.tiles[0], right.delta[3], True)
    assert f"for {(right.tiles[0].ds[3] > 0).sum()} of its 5 keys" in told
    assert "add up to 0" in told
    told = backward_sentence(stale.tiles[0], 3, right.tiles[0], stale.delta[3], True)
    assert f"for {(stale.tiles[0].z[3] != right.tiles[0].z[3]).sum()} of its 5 weights" in told
    assert f"add up to {stale.tiles[0].ds_sum[3]:.4g}" in told


def test_a_local_mask_without_a_causal_one_and_shapes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"local_mask.*causal=true"):
        of_the_cat("local_mask")
    q, k, v = the_cat()
    with pytest.raises(ValueError, match=r"v \(3, 4\)"):
        story(q, k, v[:3], block_m=2, block_n=2)


# --- the lines of trace=true -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`, whose three layers of heads share key heads."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.n_layer=3", "model.n_head=4", "model.n_kv_head=2", "model.position=rope"]
    call(train, *small, *model, "steps=20", f"runs={folder}", "name=taught").succeeded()
    return folder


@pytest.fixture
def told(call):
    """told(arguments): the lines; the table's begin with the fourth."""

    def told(*arguments: str) -> list[str]:
        ended = call(breakit, "trace=true", *arguments).succeeded()
        return ended.out.splitlines()

    return told


def numbers(line: str) -> list[str]:
    """Of a line's columns; what numbers the words after them have come last."""
    return re.findall(r"-?\d+\.\d{4}|nan|inf", line)


def test_the_worked_row_has_the_numbers_of_its_story(told):
    lines = told()[3:]
    tiles = [tile for tile in story(*the_cat(), block_m=2, block_n=2, causal=False)[0] if 3 in tile.rows]
    for line, tile in zip(lines[:3], tiles, strict=True):
        assert numbers(line)[:3] == [f"{x[1]:.4f}" for x in (tile.m, tile.l, tile.alpha)]
    assert [float(x) for x in numbers(lines[3])[:4]] == CAT_OUTPUT[3]
    assert len(lines) == 4
    assert [float(x) for x in numbers(told("row=0")[-1])[:4]] == CAT_OUTPUT[0]


def test_a_broken_row_is_shown_beside_the_right_one(told):
    """In columns that are below each other."""
    lines = told("failure=no_rescale")
    found, wanted = (np.array([float(x) for x in numbers(line)[:4]]) for line in lines[-2:])
    assert wanted.tolist() == CAT_OUTPUT[3]
    off = 100 * np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert abs(float(re.search(r"is ([\d.]+) % away", lines[-1])[1]) - off) < 0.1
    begins = lines[2].index("what changed")
    assert all(line[begins - 2 : begins] == "  " and line[begins] != " " for line in lines[2:])


def test_a_failure_that_changes_nothing_in_a_row_is_said_to_sleep_there(told):
    """A trace with failure=unguarded_mask looked like one without it, and said no more than "0.0 % away"."""
    asleep = "unguarded_mask changes nothing in this row: it acts where a row sees no key"
    lines = told("failure=unguarded_mask")
    assert lines[-2].startswith(asleep)
    assert "docs/explorer.html" in lines[-1]
    assert "changes nothing" in "".join(told("failure=no_rescale", "block_n=5"))  # one tile of keys
    assert "changes nothing" not in "".join(told("failure=no_rescale"))


def test_without_the_maximum_the_line_of_the_overflow_is_nan(told):
    lines = told("failure=no_max", "score_gain=120", "dtype=float32")[3:]
    assert ["nan" in numbers(line) for line in lines] == [False, True, True, True, False]


def test_the_order_of_the_loops_decides_which_tiles_are_a_rows(told):
    by_order = [[line.split()[0] for line in told(f"order={order}")[3:6]] for order in ORDERS]
    assert by_order == [["4", "5", "6"], ["2", "5", "8"]]
    assert [float(x) for x in numbers(told("row=0")[-1])[:4]] == CAT_OUTPUT[0]


def test_the_file_has_what_was_told(told, tmp_path):
    lines = told(f"out={tmp_path}/sub/trace.json", "block_n=3")
    kept = json.loads((tmp_path / "sub/trace.json").read_text())
    assert {name: kept[name] for name in "qkv"} == {name: THE_CAT[name] for name in "qkv"}
    assert (kept["block_m"], kept["block_n"], kept["causal"]) == (2, 3, False)
    places = [([0, 2], [0, 3]), ([0, 2], [3, 5]), ([2, 4], [0, 3])]
    assert [(tile["rows"], tile["columns"]) for tile in kept["tiles"][:3]] == places
    last = [tile for tile in kept["tiles"] if tile["rows"] == [2, 4]][-1]
    assert [f"{x:.4f}" for x in last["o"][1]] == numbers(lines[-1])[:4]


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1), (2, 3)])
def test_a_runs_head_gives_what_the_model_computes_there(runs, layer, head):
    """What goes into the model's last projection is the output of the story of the q, k and v that were taken."""
    taken = head_of_run("taught", runs, layer, head, 20)
    assert gpt.attention is attention  # as before the recording
    net = checkpoint.load(last(runs / "taught")).network(AttentionConfig("naive"), torch.device("cpu")).eval()
    outputs = []
    net.blocks[layer].attention.out.register_forward_hook(lambda _, inputs, __: outputs.append(inputs[0]))
    tokens = [256 if label == "<|endoftext|>" else ord(label) for label in taken.labels]
    with torch.no_grad():
        net(torch.tensor([tokens]))
    o = outputs[0][0].unflatten(-1, (4, -1))[:, head]  # (T, D)

    options = {"causal": True, "block_m": 8, "block_n": 8, "order": "queries_outside"}
    reference = torch.from_numpy(tell(taken, "none", 1.0, "float64", **options)[1])
    q, k, v = (torch.from_numpy(x)[None, None].float() for x in (taken.q, taken.k, taken.v))
    naive = attention(q, k, v, AttentionConfig("naive"), softmax_scale=taken.softmax_scale)[0, 0]
    assert_within_budget({"o": o}, {"o": naive}, {"o": reference})


def test_a_run_with_a_window_has_no_story(call, small, tmp_path):
    call(train, *small, "attention.window=8", "steps=1", f"runs={tmp_path}", "name=near").succeeded()
    ended = call(breakit, "trace=true", "run=near", f"runs={tmp_path}")
    assert ended.code == 2
    assert re.fullmatch("breakit: .*run=near.*\n", ended.err)
