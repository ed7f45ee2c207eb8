"""The mask says the same of elements and of tiles, and no tile that it empties is computed."""

from dataclasses import replace

import pytest
import torch

from kernels.problem import Problem
from model import tiled
from model.attention import AttentionConfig, attention
from model.mask import EMPTY, PART, WHOLE, Tiling, tiles
from tests.implementations import NAIVE
from tests.reference import BLOCK, PICTURE, Case, assert_float64_right, case_name, oracle, run, table
from tests.reference import visible as seen_by_hand
from tests.test_attention import all_at_once, pack

MASKS = [
    Case(50, B=1),
    Case(30, 90, B=1),
    Case(90, 30, B=1),
    Case(50, B=1, causal=False),
    Case(50, B=1, window=20),
    Case(30, 90, B=1, window=7),
    Case(90, 30, B=1, window=20, causal=False),
    Case(130, documents=(1, 40, 0, 57, 32)),
    Case(97, documents=(20, 77), causal=False),
    Case(60, 130, documents=(33, 64, 33), window=12),
    Case(128, B=1, blocks=PICTURE),
    Case(96, 224, B=1, blocks=PICTURE, causal=False),
    Case(128, documents=(17, 47, 64), blocks=PICTURE, window=70),
]


def problem_of(case: Case) -> Problem:
    T_k = case.T_k or case.T
    found = {"causal": case.causal, "window": case.window, "block_size": BLOCK}
    if case.documents is not None:
        of_keys = table(case.B, T_k, case.document)
        found |= {"documents_q": of_keys[:, T_k - case.T :], "documents_k": of_keys}
    if case.blocks is not None:
        found["blocks"] = torch.tensor([[c == "x" for c in row] for row in case.blocks])
    return Problem.of(case.T, T_k, **found)


def looked(problem: Problem, block_m: int, block_n: int, kind: type = Tiling) -> dict[tuple[range, range], int]:
    """What is said of each tile; asked by rows and by columns, which must agree. EMPTY where it is not visited."""
    tiling = kind(problem, block_m, block_n)
    by_rows = {(rows, tile.columns): tile.seen for rows, visits in tiling.by_rows() for tile in visits}
    by_columns = {(tile.rows, columns): tile.seen for columns, visits in tiling.by_columns() for tile in visits}
    assert by_rows == by_columns
    return {(r, c): by_rows.get((r, c), EMPTY) for r in tiling.row_tiles for c in tiling.column_tiles}


@pytest.mark.parametrize("tile", [(16, 8), (7, 13), (33, 50), (100, 9)], ids=str)
@pytest.mark.parametrize("case", MASKS, ids=case_name)
def test_a_tile_is_never_skipped_with_something_seen_nor_called_whole_with_something_hidden(case, tile):
    """And always otherwise where tiles of 16 rows and 8 keys cross no edge between blocks of 32; documents are in order
    here."""
    problem, seen = problem_of(case), seen_by_hand(case)
    for (rows, columns), found in looked(problem, *tile).items():
        part = seen[:, rows.start : rows.stop, columns.start : columns.stop]
        right = WHOLE if part.all() else PART if part.any() else EMPTY
        assert found == right or (tile != (16, 8) and found == PART), (rows, columns)


def test_documents_in_no_order_are_told_apart_all_the_same():
    """Numbers that come back: only the tiles' skipping is cruder then."""
    inputs = Case(96, B=1).inputs(torch.float64)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    documents = torch.tensor([[5, 1, 5, 2, 9, 1] * 16])
    config = AttentionConfig("tiled", 16, 16)
    found, right = ({"o": attention(q, k, v, config, documents=documents)} for config in (config, NAIVE))
    assert_float64_right(found, right, terms=96)


# --- counted, not believed -------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """How many tiles of scores were computed: calls of the function that computes them."""
    calls = []
    scores = tiled.scores
    monkeypatch.setattr(tiled, "scores", lambda *given: calls.append(1) or scores(*given))
    return calls


@pytest.mark.parametrize("order", ["queries_outside", "keys_outside"])
@pytest.mark.parametrize("case", MASKS, ids=case_name)
def test_tiles_that_the_mask_empties_are_not_computed(case, order, products):
    seen = seen_by_hand(case)
    full = sum(
        bool(seen[:, r.start : r.stop, c.start : c.stop].any())
        for r in tiles(case.T, 16)
        for c in tiles(case.T_k or case.T, 16)
    )
    run(case.inputs(torch.float32), case, AttentionConfig("tiled", 16, 16, order=order))
    # Blocks shifted against the tiles (T != T_k by no multiple of 16) would make it "at least".
    assert len(products) == 2 * full  # once in the forward, once again in the backward


def test_tiles_between_sequences_of_a_pack_are_not_computed(products):
    all_at_once(*pack([(64, 64)] * 4, torch.float32), AttentionConfig("tiled", 32, 32))
    assert len(products) == 2 * 4 * 3  # 2 x 2 tiles a sequence, one of them beyond the diagonal


def test_far_tiles_of_a_window_are_not_even_asked_for():
    """Else a long context would cost time in the square of its tiles whatever the window."""
    asked = []

    class Counted(Tiling):
        def look(self, rows, columns):
            asked.append(1)
            return super().look(rows, columns)

    looked(Problem.of(1024, 1024, window=8), 8, 8, Counted)
    assert len(asked) == 2 * (2 * 128 - 1)  # by rows and by columns: the diagonal and the tile before it


# --- the rest --------------------------------------------------------------------------------------------------------


def test_a_picture_too_small_for_the_text_is_refused():
    q = torch.zeros(1, 1, 130, 4)
    config = AttentionConfig("naive", block_mask=["x.", "xx"])
    with pytest.raises(ValueError, match=r"128 tokens of 130.*block_mask_size=65"):
        attention(q, q, q, config)
    attention(q, q, q, replace(config, block_mask_size=65))


def test_the_scale_comes_from_the_call_then_the_configuration_then_the_head_size():
    case = Case(40, D=16)
    inputs = case.inputs(torch.float64)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    usual, other = attention(q, k, v, NAIVE), attention(q, k, v, replace(NAIVE, softmax_scale=0.6))
    assert torch.equal(usual, attention(q, k, v, replace(NAIVE, softmax_scale=0.6), softmax_scale=0.25))
    assert torch.equal(other, attention(q, k, v, NAIVE, softmax_scale=0.6))
    assert_float64_right({"o": other}, {"o": oracle(inputs, replace(case, softmax_scale=0.6))["o"]}, terms=40)
