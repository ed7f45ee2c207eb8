"""The story of the tiles: the published example, the same answers as naive and tiled, and failures as predicted."""

import itertools

import numpy as np
import pytest
import torch

from lab.story import (
    STORY_FAILURES,
    THE_CAT,
    as_head,
    backward,
    backward_sentence,
    dropout_sentence,
    sentence,
    story,
)
from lab.traffic import Tiles, words_of
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.mask import tiles
from tests.reference import SEED, Case, assert_float64_right, error, oracle
from tests.test_attention import CAT, CAT_L, CAT_M, CAT_OUTPUT, CAT_WEIGHTS, NAIVE

ORDERS = ["queries_outside", "keys_outside"]
# (T, T_k, block_m, block_n): one tile, ragged ones, more keys than queries, and rows that see nothing.
SIZES = [(5, 5, 5, 5), (7, 7, 2, 3), (6, 11, 4, 3), (11, 6, 3, 4), (1, 9, 2, 2), (9, 1, 4, 1)]


def the_cat(dtype=np.float64) -> list[np.ndarray]:
    return [np.array(THE_CAT[name], dtype) for name in "qkv"]


def random_head(T: int, T_k: int, D: int = 3, sigma: float = 1.0, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((n, D)) * s for n, s in ((T, sigma), (T_k, sigma), (T_k, 1.0))]


WHOLE = UNBROKEN


# --- the worked example ----------------------------------------------------------------------------------------------


def test_the_example_is_the_published_one():
    assert {name: THE_CAT[name] for name in "qkv"} == CAT


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_the_published_maximum_sum_and_output_stand_in_each_rows_last_tile(block, order):
    told, o, lse = story(*the_cat(), block_m=block, block_n=block, causal=False, order=order, break_it=WHOLE)
    last = {row: (tile, row - tile.rows.start) for tile in told for row in tile.rows}
    assert [round(last[i][0].m[last[i][1]], 4) for i in range(5)] == CAT_M
    assert [round(last[i][0].l[last[i][1]], 4) for i in range(5)] == CAT_L
    assert np.round(o, 4).tolist() == CAT_OUTPUT
    assert np.array_equal(o, [last[i][0].o[last[i][1]] for i in range(5)])
    by_tiles = torch.tensor([last[i][0].m[last[i][1]] + np.log(last[i][0].l[last[i][1]]) for i in range(5)])
    assert_float64_right({"lse": torch.tensor(lse)}, {"lse": by_tiles}, terms=5)


def test_the_published_weights_are_the_output_where_the_values_are_the_identity():
    q, k, _ = the_cat()
    q, k = (np.pad(x, ((0, 0), (0, 1))) for x in (q, k))
    options = {"causal": False, "softmax_scale": 0.5, "break_it": WHOLE}
    assert np.round(story(q, k, np.eye(5), block_m=2, block_n=2, **options)[1], 4).tolist() == CAT_WEIGHTS


def test_both_orders_tell_the_same_tiles_in_another_order():
    by_order = []
    for order in ORDERS:
        told = story(*random_head(7, 7), block_m=2, block_n=3, order=order, break_it=WHOLE)[0]
        by_order.append({(tile.rows.start, tile.columns.start): tile for tile in told})
    queries, keys = by_order
    assert list(queries) != list(keys)
    assert sorted(queries) == sorted(keys)
    for place, tile in queries.items():
        assert all(np.array_equal(a, b) for a, b in zip(tile[:-1], keys[place][:-1], strict=True))


# --- the same as the other implementations ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_o_and_lse_are_those_of_the_oracle_and_of_tiled(size, causal, order):
    T, T_k, block_m, block_n = size
    case = Case(T, T_k, B=1, H=1, D=3, causal=causal)
    inputs = case.inputs(torch.float64)
    q, k, v = (inputs[name][0, 0].numpy() for name in "qkv")
    _, o, lse = story(q, k, v, block_m=block_m, block_n=block_n, causal=causal, order=order, break_it=WHOLE)
    found = {"o": as_head(o), "lse": as_head(lse)}
    right = oracle(inputs, case)
    assert_float64_right(found, {name: right[name] for name in found}, terms=T_k)
    for config in (NAIVE, AttentionConfig("tiled", block_m, block_n, order)):
        other = attention(*(inputs[name] for name in "qkv"), config, causal=causal, return_lse=True)
        assert_float64_right(found, dict(zip(found, other, strict=True)), terms=T_k)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("size", SIZES)
def test_the_backwards_gradients_are_those_of_the_oracle(size, dropout_p, causal, order):
    T, T_k, block_m, block_n = size
    case = Case(T, T_k, B=1, H=1, D=3, causal=causal, dropout_p=dropout_p)
    inputs = case.inputs(torch.float64)
    inputs["dlse"].zero_()
    q, k, v, do = (inputs[name][0, 0].numpy() for name in ("q", "k", "v", "do"))
    options = {"block_m": block_m, "block_n": block_n, "causal": causal, "order": order}
    found = backward(q, k, v, do, dropout_p=dropout_p, seed=SEED, **options)
    right = oracle(inputs, case)
    assert_float64_right({name: as_head(getattr(found, name)) for name in right}, right, terms=max(T, T_k))
    last = {row: (tile, row - tile.rows.start) for tile in found.tiles for row in tile.rows}
    assert all(np.array_equal(tile.dq[r], found.dq[row]) for row, (tile, r) in last.items())
    last = {key: (tile, key - tile.columns.start) for tile in found.tiles for key in tile.columns}
    assert all(np.array_equal(tile.dk[j], found.dk[key]) for key, (tile, j) in last.items())
    assert all(np.array_equal(tile.dv[j], found.dv[key]) for key, (tile, j) in last.items())


@pytest.mark.parametrize("size", SIZES)
def test_the_forward_with_dropout_is_the_oracles(size):
    T, T_k, block_m, block_n = size
    case = Case(T, T_k, B=1, H=1, D=3, dropout_p=0.25)
    inputs = case.inputs(torch.float64)
    q, k, v = (inputs[name][0, 0].numpy() for name in "qkv")
    options = {"block_m": block_m, "block_n": block_n, "dropout_p": 0.25, "seed": SEED, "break_it": WHOLE}
    _, o, lse = story(q, k, v, **options)
    right = oracle(inputs, case)
    assert_float64_right({"o": as_head(o), "lse": as_head(lse)}, {name: right[name] for name in ("o", "lse")}, T_k)


# --- words moved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_words_moved_in_the_end_are_those_counted_in_tiled(size, causal, order):
    T, T_k, block_m, block_n = size
    q, k, v = random_head(T, T_k)
    told = story(q, k, v, block_m=block_m, block_n=block_n, causal=causal, order=order, break_it=WHOLE)[0]
    counts = [tile.words for tile in told]
    with torch.no_grad(), Tiles() as counted:
        config = AttentionConfig("tiled", block_m, block_n, order)
        attention(*(as_head(x) for x in (q, k, v)), config, causal=causal)
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
    told = story(*the_cat(), break_it=WHOLE, **options)[0]
    assert [tile.words for tile in told] == forward
    assert forward[-1] == words_of(AttentionConfig("tiled", 3, 3, order), 5, 4)
    assert [tile.words for tile in backward(*the_cat(), the_cat()[2], **options).tiles] == back


BROKEN = [*map(BreakIt, ("no_max", "no_rescale_sum", "no_rescale_output", "no_rescale")), BreakIt(score_gain=3.0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.label)
def test_a_broken_story_is_what_broken_tiled_computes(broken, causal, order):
    q, k, v = random_head(11, 11, sigma=1.5)
    options = {"block_m": 4, "block_n": 3, "order": order}
    found = story(q, k, v, causal=causal, break_it=broken, **options)[1:]
    other = attention(
        *map(as_head, (q, k, v)),
        AttentionConfig("tiled", **options),
        causal=causal,
        break_it=broken,
        return_lse=True,
    )
    found, other = (dict(zip(("o", "lse"), pair, strict=True)) for pair in ([as_head(x) for x in found], other))
    assert_float64_right(found, other, terms=11)
    if "no_rescale" in broken.label:
        whole = story(q, k, v, causal=causal, break_it=WHOLE, **options)[1]
        assert error(found["o"], as_head(whole)) > 0.01


# --- failures, as predicted ------------------------------------------------------------------------------------------


def test_without_the_maximum_a_float32_row_is_nan_from_the_tile_whose_score_passes_88():
    """Scores of "on" times 120: 60, 60, 0, 120 and 60. The tile of 120 is the second."""
    broken = BreakIt("no_max", 120.0)
    told, o, _ = story(*the_cat(np.float32), block_m=2, block_n=2, causal=False, break_it=broken)
    first, second, third = (tile for tile in told if 3 in tile.rows)
    assert np.isfinite(first.o[1]).all()
    assert np.isnan([second.o[1], third.o[1], o[3]]).all()
    assert "exp(120) = inf, past the largest float32" in sentence(second, 3, 0, broken)


def test_without_the_maximum_small_scores_give_the_right_output_from_other_sums():
    told, o, lse = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt("no_max"))
    assert np.round(o, 4).tolist() == CAT_OUTPUT
    assert_float64_right({"l": torch.tensor(told[-1].l)}, {"l": torch.tensor(np.exp(lse[4:]))}, terms=5)


@pytest.mark.parametrize(("failure", "direction"), [("no_rescale_sum", -1), ("no_rescale_output", 1)])
def test_what_is_not_rescaled_weighs_too_much(failure, direction):
    """Values are at least 0 here: a sum too large makes o smaller, an output too large makes it larger."""
    o = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt(failure))[1]
    right = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=WHOLE)[1]
    grows, others = [3, 4], [0, 1, 2]  # only the maxima of "on" and "mat" grow after their first tile
    assert (direction * (o - right)[grows].sum(-1) > 0.1).all()
    assert np.array_equal(o[others], right[others])


def test_without_the_rescaling_the_tiles_of_a_smaller_maximum_weigh_too_much():
    """ "on": alpha = e**-0.5 left out of the first tile's two keys leaves their weights e**0.5 times too large."""
    o = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt("no_rescale"))[1]
    p = np.exp(np.array([0.5, 0.5, 0.0, 1.0, 0.5]) - 1) * [np.exp(0.5), np.exp(0.5), 1, 1, 1]
    predicted = p @ the_cat()[2] / p.sum()
    assert_float64_right({"o": torch.tensor(o[3])}, {"o": torch.tensor(predicted)}, terms=5)


@pytest.mark.parametrize("failure", ["no_rescale", "no_rescale_sum", "no_rescale_output"])
def test_one_tile_has_nothing_to_rescale(failure):
    o = story(*the_cat(), block_m=2, block_n=5, causal=False, break_it=BreakIt(failure))[1]
    assert np.round(o, 4).tolist() == CAT_OUTPUT


def test_a_maximum_that_starts_at_0_harms_only_rows_whose_scores_are_all_far_below_0():
    q, k, v = the_cat(np.float32)
    options = {"block_m": 2, "block_n": 2, "causal": False, "break_it": BreakIt("zero_init_max", 300.0)}
    # q negated, scores of "sat" are -150, -300, -300, -150, -225: exp gives 0 in float32 for all. "on" has a 0.
    o, lse = story(-q, k, v, **options)[1:]
    right = story(-q, k, v, **options | {"break_it": BreakIt(score_gain=300.0)})[1]
    assert (o[2] == 0).all()
    assert lse[2] == -np.inf
    assert np.array_equal(o[3], right[3])
    assert np.array_equal(
        story(q, k, v, **options)[1], story(q, k, v, **options | {"break_it": BreakIt(score_gain=300.0)})[1]
    )


@pytest.mark.parametrize("size", [(9, 9, 3, 3), (9, 9, 2, 4), (7, 9, 3, 3)])
def test_a_mask_of_tile_relative_numbers_shows_just_those_keys(size):
    T, T_k, block_m, block_n = size
    q, k, v = random_head(T, T_k)
    told, o, _ = story(q, k, v, block_m=block_m, block_n=block_n, break_it=BreakIt("local_mask"))
    s = q @ k.T * 3**-0.5
    for i, j in itertools.product(range(T), range(T_k)):
        if j % block_n > i % block_m:
            s[i, j] = -np.inf
    p = np.exp(s)
    predicted = p @ v / p.sum(-1, keepdims=True)
    assert_float64_right({"o": torch.tensor(o)}, {"o": torch.tensor(predicted)}, terms=T_k)
    assert len(told) == -(-T // block_m) * -(-T_k // block_n)  # every tile is visited


@pytest.mark.parametrize("block", [2, 3])
def test_a_mask_of_tile_relative_numbers_is_right_in_the_first_tile_only(block):
    q, k, v = random_head(9, 9)
    options = {"block_m": block, "block_n": block}
    told, right = (story(q, k, v, break_it=BreakIt(name), **options)[0] for name in ("local_mask", "none"))
    assert all(np.array_equal(a, b) for a, b in zip(told[0][:-1], right[0][:-1], strict=True))
    masks = {(tile.rows.start, tile.columns.start): np.isfinite(tile.s) for tile in right}
    # On the diagonal both kinds of number give one mask, but the state there has been wrong since before.
    alike = [t for t in told if np.array_equal(masks.get((t.rows.start, t.columns.start), False), np.isfinite(t.s))]
    assert [(tile.rows, tile.columns) for tile in alike] == [(rows, rows) for rows in tiles(9, block)]


def test_without_the_scale_the_scores_are_the_bare_products():
    q, k, v = random_head(5, 5)
    bare = story(q, k, v, block_m=2, block_n=2, break_it=BreakIt("no_scale"))
    assert np.array_equal(bare[1], story(q, k, v, block_m=2, block_n=2, softmax_scale=1.0, break_it=WHOLE)[1])


def test_an_unguarded_row_is_nan_where_the_first_tile_that_it_is_in_is_hidden_altogether():
    """Five rows and three keys: the first two rows see nothing. In tiles of 3 they share a tile with one that does."""
    q, k, v = the_cat()
    told, o, lse = story(q, k[:3], v[:3], block_m=3, block_n=3, break_it=BreakIt("unguarded_mask"))
    assert np.isnan(o[:2]).all()
    assert np.isnan(lse[:2]).all()
    assert "exp(-inf - -inf) is NaN" in sentence(told[0], 0, -2, BreakIt("unguarded_mask"))
    o_right, lse_right = story(q, k[:3], v[:3], block_m=3, block_n=3, break_it=WHOLE)[1:]
    assert np.array_equal(o[2:], o_right[2:])
    assert (o_right[:2] == 0).all()
    assert (lse_right[:2] == -np.inf).all()


def test_an_unguarded_row_that_no_tile_visits_is_0_by_0():
    q, k, v = the_cat()
    told, o, lse = story(q, k[:3], v[:3], block_m=2, block_n=2, break_it=BreakIt("unguarded_mask"))
    assert told[0].rows.start == 2
    assert np.isnan(o).all(-1).tolist() == [True, True, False, False, False]
    assert (lse[:2] == -np.inf).all()


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_unguarded_rows_of_a_square_causal_mask_come_to_no_harm(block):
    options = {"block_m": block, "block_n": block}
    o = story(*the_cat(), break_it=BreakIt("unguarded_mask"), **options)[1]
    assert np.array_equal(o, story(*the_cat(), break_it=WHOLE, **options)[1])


# --- the sentences, and what is refused ------------------------------------------------------------------------------


def test_the_worked_row_in_words():
    told = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=WHOLE)[0]
    assert [sentence(tile, 3, 0, WHOLE) for tile in told if 3 in tile.rows] == [
        "The first keys that it sees: m = 0.5, and nothing yet to rescale.",
        "A larger score: m grows from 0.5 to 1, so l and acc are multiplied by alpha = 0.6065.",
        "No score above m = 1: alpha is 1, and the new weights are added as they are.",
    ]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("no_rescale", "but l and acc are not multiplied by alpha = 0.6065."),
        ("no_rescale_sum", "but l is not multiplied by alpha = 0.6065."),
        ("no_rescale_output", "but acc is not multiplied by alpha = 0.6065."),
        ("no_max", "exp(1) = 2.718"),
    ],
)
def test_a_failure_is_told_in_the_tile_that_it_changes(failure, words):
    told = story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt(failure))[0]
    assert words in sentence([tile for tile in told if 3 in tile.rows][1], 3, 0, BreakIt(failure))


def test_a_leak_is_counted():
    broken = BreakIt("local_mask")
    told = story(*the_cat(), block_m=2, block_n=2, break_it=broken)[0]
    # "The" against "sat on": as the first row of its tile it sees the first column of any
    assert sentence(told[1], 0, 0, broken).startswith("Sees 1 of the future's keys. ")
    # "sat" against "The cat": it may see both and sees one
    assert sentence(told[3], 2, 0, broken).startswith("Misses 1 that it may see. ")


def test_a_local_mask_without_a_causal_one_is_refused():
    with pytest.raises(ValueError, match=r"local_mask breaks the causal mask.*causal=true"):
        story(*the_cat(), block_m=2, block_n=2, causal=False, break_it=BreakIt("local_mask"))


def test_shapes_that_cannot_be_are_refused():
    q, k, v = the_cat()
    with pytest.raises(ValueError, match=r"want q \(T, D\) and k, v both \(T_k, D\)"):
        story(q, k, v[:3], block_m=2, block_n=2, break_it=WHOLE)


def test_each_failure_takes_out_something_of_its_own():
    assert len({BreakIt(name).broken for name in STORY_FAILURES}) == len(STORY_FAILURES)


def test_dropout_is_told_where_it_drops():
    options = {"causal": False, "break_it": WHOLE, "dropout_p": 0.25, "seed": 6}
    (tile,) = story(*the_cat(), block_m=5, block_n=5, **options)[0]
    dropped = (tile.z == 0).sum(-1)
    assert dropout_sentence(tile, 1).startswith(f"Dropout takes out {dropped[1]} of its 5 weights: l counts")
    kept = tile._replace(z=np.full((5, 5), 4 / 3))
    assert dropout_sentence(kept, 1) == ""


def test_the_backward_is_told_by_the_sign_of_ds_and_by_its_sum():
    q, k, v = the_cat()
    options = {"block_m": 5, "block_n": 5, "causal": False, "dropout_p": 0.25, "seed": 6}
    right = backward(q, k, v, np.array(THE_CAT["do"], float), **options)
    stale = backward(q, k, v, np.array(THE_CAT["do"], float), break_it=BreakIt("stale_seed"), **options)
    assert np.array_equal(right.o, stale.o)
    told = backward_sentence(right.tiles[0], 3, right.tiles[0], right.delta[3], True)
    positive = (right.tiles[0].ds[3] > 0).sum()
    assert f"for {positive} of its 5 keys: there ds > 0" in told
    assert told.endswith("the row's ds add up to 0, and dq is complete.")
    told = backward_sentence(stale.tiles[0], 3, right.tiles[0], stale.delta[3], True)
    others = (stale.tiles[0].z[3] != right.tiles[0].z[3]).sum()
    assert told.startswith(f"The forward had the other decision for {others} of its 5 weights. ")
    assert "where 0 is right" in told
