"""The mask says the same of elements and of tiles, and no tile that it empties is computed."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels.problem import Problem
from model import tiled
from model.attention import AttentionConfig, attention, attention_varlen
from model.mask import EMPTY, PART, WHOLE, Tiling, packed, tiles, visible
from tests.reference import (
    BLOCK,
    DTYPES,
    PICTURE,
    SEED,
    Case,
    assert_float64_right,
    assert_within_budget,
    case_name,
    oracle,
    run,
    sees,
    table,
)

NAIVE = AttentionConfig("naive")
CPU = torch.device("cpu")

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


def seen_by_hand(case: Case) -> torch.Tensor:
    T_k = case.T_k or case.T
    return torch.stack([table(case.T, T_k, lambda i, j, b=b: sees(i, j, case, b)) for b in range(case.B)])


@pytest.mark.parametrize("case", MASKS, ids=case_name)
def test_an_element_is_visible_where_every_rule_says_so(case):
    problem = problem_of(case)
    found = visible(problem, range(problem.T), range(problem.T_k), CPU)
    assert torch.equal(found.expand(case.B, -1, -1), seen_by_hand(case))


@pytest.mark.parametrize("case", MASKS, ids=case_name)
def test_a_tile_is_skipped_only_and_always_where_nothing_in_it_is_seen(case):
    """Always: documents here are in order, and tiles of 16 rows and 8 keys cross no edge between blocks of 32."""
    problem, seen = problem_of(case), seen_by_hand(case)
    for (rows, columns), found in looked(problem, 16, 8).items():
        tile = seen[:, rows.start : rows.stop, columns.start : columns.stop]
        assert found == (WHOLE if tile.all() else PART if tile.any() else EMPTY), (rows, columns)


@pytest.mark.parametrize("tile", [(7, 13), (33, 50), (100, 9)], ids=str)
@pytest.mark.parametrize("case", MASKS, ids=case_name)
def test_a_tile_of_any_size_is_never_skipped_with_something_seen_nor_called_whole_with_something_hidden(case, tile):
    problem, seen = problem_of(case), seen_by_hand(case)
    for (rows, columns), found in looked(problem, *tile).items():
        part = seen[:, rows.start : rows.stop, columns.start : columns.stop]
        assert not (found == EMPTY and part.any())
        assert not (found == WHOLE and not part.all())


def test_tiles_visited_under_the_usual_masks():
    T, block = 1024, 64
    n = T // block

    def visited(causal, window):
        return sum(
            found != EMPTY for found in looked(Problem.of(T, T, causal=causal, window=window), block, block).values()
        )

    assert visited(causal=False, window=None) == n * n
    assert visited(causal=True, window=None) == n * (n + 1) // 2
    assert visited(causal=True, window=block + 1) == 2 * n - 1  # the diagonal tile and the one before it
    assert visited(causal=True, window=1) == n


def test_documents_in_no_order_are_told_apart_all_the_same():
    """Numbers that come back: only the tiles' skipping is cruder then."""
    inputs = Case(96, B=1).inputs(torch.float64)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    documents = torch.tensor([[5, 1, 5, 2, 9, 1] * 16])
    config = AttentionConfig("tiled", 16, 16)
    assert_float64_right(
        {"o": attention(q, k, v, config, documents=documents)},
        {"o": attention(q, k, v, NAIVE, documents=documents)},
        terms=96,
    )


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
    inputs = case.inputs(torch.float32)
    run(inputs, replace(case, dropout_p=0.0), AttentionConfig("tiled", 16, 16, order=order))
    # Blocks shifted against the tiles (T != T_k by no multiple of 16) would make it "at least".
    assert len(products) == 2 * full  # once in the forward, once again in the backward


# --- packed sequences, as flash-attention's users have them ----------------------------------------------------------

LENGTHS = [(17, 17), (1, 1), (0, 0), (50, 50), (30, 30)]
OTHER_LENGTHS = [(17, 30), (1, 64), (40, 9), (0, 12), (5, 0), (30, 30)]  # more keys, more queries, none of either


def pack(lengths, dtype, H=4, H_kv=2, D=24):
    generator = torch.Generator().manual_seed(1)
    ends = [[0, *itertools.accumulate(x)] for x in zip(*lengths, strict=True)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ends)
    shapes = ((int(cu_q[-1]), H, D), (int(cu_k[-1]), H_kv, D), (int(cu_k[-1]), H_kv, D), (int(cu_q[-1]), H, D))
    q, k, v, do = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in (q, k, v)], do, cu_q, cu_k


def one_by_one(qkv, do, cu_q, cu_k, config, **options):
    """The definition: each sequence by itself, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    outputs, lses = [], []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if cu_k[i] == cu_k[i + 1]:  # nothing to see
            outputs.append(torch.zeros_like(q[rows]))
            lses.append(torch.full((q.shape[1], len(q[rows])), -torch.inf, dtype=torch.float64))
            continue
        one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        o, lse = attention(*one, replace(config, impl="naive"), return_lse=True, **options)
        outputs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    o = torch.cat(outputs)
    grads = torch.autograd.grad(o, (q, k, v), do.double())
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o.detach(), torch.cat(lses, 1).detach(), *grads), strict=True))


def all_at_once(qkv, do, cu_q, cu_k, config, **options):
    o, lse = attention_varlen(*qkv, cu_q, cu_k, config, return_lse=True, **options)
    grads = torch.autograd.grad(o, qkv, do)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o.detach(), lse.detach(), *grads), strict=True))


OPTIONS = [{}, {"window": 9}, {"alibi": True, "softcap": 5.0}]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, OTHER_LENGTHS], ids=["same", "other"])
def test_a_pack_is_its_sequences_one_by_one(lengths, options, causal):
    problem = pack(lengths, torch.float64)
    reference = one_by_one(*problem, AttentionConfig("naive", **options), causal=causal)
    for config in (AttentionConfig("naive", **options), AttentionConfig("tiled", 16, 16, **options)):
        assert_float64_right(all_at_once(*problem, config, causal=causal), reference, terms=128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["queries_outside", "keys_outside"])
def test_tiled_is_within_twice_naives_error_on_a_pack(dtype, order):
    problem = pack(OTHER_LENGTHS, dtype)
    naive, tiled = (all_at_once(*problem, config) for config in (NAIVE, AttentionConfig("tiled", 32, 16, order=order)))
    assert_within_budget(tiled, naive, one_by_one(*problem, NAIVE))


@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_a_pack_without_any_key_gives_zeros(impl):
    found = all_at_once(*pack([(3, 0), (0, 0), (5, 0)], torch.float32), AttentionConfig(impl))
    assert len(found["o"]) == len(found["dq"]) == 8
    assert not any(found[name].any() for name in ("o", "dq", "dk", "dv"))
    assert (found["lse"] == -torch.inf).all()


def test_tiles_between_sequences_of_a_pack_are_not_computed(products):
    qkv, do, cu_q, cu_k = pack([(64, 64)] * 4, torch.float32)
    all_at_once(qkv, do, cu_q, cu_k, AttentionConfig("tiled", 32, 32))
    assert len(products) == 2 * 4 * 3  # 2 x 2 tiles a sequence, one of them beyond the diagonal


def test_a_pack_draws_the_same_dropout_whatever_the_tiles():
    qkv, do, cu_q, cu_k = pack(OTHER_LENGTHS, torch.float64)
    naive, tiled = (
        all_at_once(qkv, do, cu_q, cu_k, replace(config, dropout_p=0.3), seed=torch.tensor(SEED))
        for config in (NAIVE, AttentionConfig("tiled", 16, 32))
    )
    assert_float64_right(tiled, naive, terms=128)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 8], [0, 8], "3 entries and cu_seqlens_k 2"),
        ([0, 3, 7], [0, 3, 8], r"cu_seqlens_q \[0, 3, 7\] must rise from 0 to 8"),
        ([0, 5, 3, 8], [0, 3, 5, 8], "cu_seqlens_q"),
        ([1, 8], [0, 8], "cu_seqlens_q"),
        ([0, 8], [0, 9], "cu_seqlens_k"),
        ([[0, 8]], [0, 8], "want integers"),
        ([0.0, 8.0], [0, 8], "want integers"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(cu_q, cu_k, message):
    x = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match=message):
        attention_varlen(x, x, x, torch.tensor(cu_q), torch.tensor(cu_k), NAIVE)
    with pytest.raises(ValueError, match="want"):
        attention_varlen(x[None], x[None], x[None], torch.tensor([0, 8]), torch.tensor([0, 8]), NAIVE)


def test_a_picture_of_blocks_is_refused_for_a_pack():
    x = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match="block_mask is a picture of one sequence"):
        attention_varlen(x, x, x, torch.tensor([0, 8]), torch.tensor([0, 8]), replace(NAIVE, block_mask=["x"]))


def test_far_tiles_of_a_window_are_not_even_asked_for():
    """Else a long context would cost time in the square of its tiles whatever the window."""
    asked = []

    class Counted(Tiling):
        def look(self, rows, columns):
            asked.append(1)
            return super().look(rows, columns)

    looked(Problem.of(1024, 1024, window=8), 8, 8, Counted)
    assert len(asked) == 2 * (2 * 128 - 1)  # by rows and by columns: the diagonal and the tile before it


def test_an_empty_sequence_owns_no_token():
    rows, keys, positions = packed(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 4, 6]), 3, 6).values()
    assert rows.tolist() == [[0, 0, 2]]
    assert keys.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert positions.tolist() == [-1, 0, 5]  # the last query of each stands at its last key


# --- the rest --------------------------------------------------------------------------------------------------------


def test_a_window_over_documents_equals_each_document_by_itself():
    """What packing is for: nothing of another document comes through, window and distance included."""
    config = AttentionConfig("tiled", 16, 16, window=20, alibi=True)
    inputs = Case(96, B=1).inputs(torch.float64)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    documents = torch.tensor([[0] * 37 + [1] * 59])
    o = attention(q, k, v, config, documents=documents)
    alone = [attention(q[:, :, part], k[:, :, part], v[:, :, part], config) for part in (slice(37), slice(37, 96))]
    assert_float64_right({"o": o}, {"o": torch.cat(alone, 2)}, terms=96)


@pytest.mark.parametrize(
    ("documents", "T_k"), [(torch.zeros(1, 8).int(), 9), (torch.zeros(2, 8).int(), 8), (torch.zeros(1, 7).int(), 7)]
)
def test_documents_of_another_shape_are_refused(documents, T_k):
    q, k = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, T_k, 4)
    with pytest.raises(ValueError, match="want \\(B, T_k\\)"):
        attention(q, k, k, NAIVE, documents=documents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16], ids=str)
def test_documents_that_are_no_integers_torch_can_compare_are_refused(dtype):
    """Fractions were rounded by triton alone, which then took two documents for one."""
    q = torch.zeros(1, 1, 8, 4)
    with pytest.raises(ValueError, match=f"documents are {dtype}: want integers"):
        attention(q, q, q, NAIVE, documents=torch.zeros(1, 8).to(dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": []}, "at least one"),
        ({"windows": [4, 0]}, r"windows\[1\]=0"),
        ({"windows": [4], "window": 4}, "give one window"),
        ({"block_mask": []}, "no picture"),
        ({"block_mask": ["x", "xx"]}, "no picture"),
        ({"block_mask": ["xy"]}, "no picture"),
        ({"block_mask": [""]}, "no picture"),
        ({"block_mask_size": 0}, "block_mask_size=0"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


def test_a_picture_too_small_for_the_text_is_refused():
    q = torch.zeros(1, 1, 130, 4)
    config = AttentionConfig("naive", block_mask=["x.", "xx"])
    with pytest.raises(ValueError, match=r"covers 128 tokens of 130.*block_mask_size=65"):
        attention(q, q, q, config)
    attention(q, q, q, replace(config, block_mask_size=65))


def test_windows_go_round_the_layers():
    config = AttentionConfig("tiled", windows=[8, None])
    assert [config.layer(i).window for i in range(5)] == [8, None, 8, None, 8]
    assert AttentionConfig("tiled", window=3).layer(4).window == 3


def test_the_scale_comes_from_the_call_then_the_configuration_then_the_head_size():
    case = Case(40, D=16)
    inputs = case.inputs(torch.float64)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    usual, other = attention(q, k, v, NAIVE), attention(q, k, v, replace(NAIVE, softmax_scale=0.6))
    assert torch.equal(usual, attention(q, k, v, replace(NAIVE, softmax_scale=0.6), softmax_scale=0.25))
    assert torch.equal(other, attention(q, k, v, NAIVE, softmax_scale=0.6))
    assert_float64_right({"o": other}, {"o": oracle(inputs, replace(case, softmax_scale=0.6))["o"]}, terms=40)
