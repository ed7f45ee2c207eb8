"""The mask says the same of scores and of tiles: tiled, and the kernels by their tables, leave out no visible score and
treat no tile as whole where a score is hidden."""

import pytest
import torch
from torch import Tensor

from kernels.problem import Problem, tile_table, visit_lists
from model import tiled
from model.attention import problem_of
from model.mask import spans_of, visible
from tests import reference
from tests.implementations import NAIVE
from tests.reference import CASES, PICTURE, Case, case_name

CPU = torch.device("cpu")
MASKS = [
    Case(50, B=1), Case(30, 90, B=1), Case(90, 30, B=1), Case(50, B=1, causal=False), Case(1, 90, B=1),
    Case(50, B=1, window=20), Case(30, 90, B=1, window=7), Case(90, 30, B=1, window=20, causal=False),
    Case(30, 90, B=1, window=20, causal=False), Case(50, B=1, window=49), Case(130, documents=(1, 40, 0, 57, 32)),
    Case(97, documents=(20, 77), causal=False), Case(60, 130, documents=(33, 64, 33), window=12),
    Case(130, documents="shuffled"), Case(60, 130, documents="shuffled", window=40), Case(128, B=1, blocks=PICTURE),
    Case(96, 224, B=1, blocks=PICTURE, causal=False), Case(203, 113, B=1, blocks=PICTURE, causal=False),
    Case(128, documents=(17, 47, 64), blocks=PICTURE, window=70),
]  # fmt: skip
TILES = [(16, 8), (7, 13), (33, 50), (100, 9), (64, 128)]
every_mask = pytest.mark.parametrize("case", MASKS, ids=case_name)
every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


def problem_for(case: Case) -> Problem:
    q, k = (torch.zeros(case.B, case.H, T, 1) for T in (case.T, case.keys))
    return problem_of(q, k, k, case.configure(NAIVE), case.causal, None, case.spans(CPU))


def of_tiles(seen: Tensor, M: int, N: int, beyond: bool) -> Tensor:
    """bool (B, T, T_k) to (B, row tiles, column tiles, M * N). beyond: what stands past the last row and column."""
    T, T_k = seen.shape[1:]
    padded = torch.nn.functional.pad(seen, (0, -T_k % N, 0, -T % M), value=beyond)
    return padded.unflatten(1, (-1, M)).unflatten(3, (-1, N)).transpose(2, 3).flatten(3)


def truth(case: Case, M: int, N: int) -> tuple[Tensor, Tensor]:
    """Of each tile, whether any score is visible, and whether all are: bool (B, row tiles, column tiles)."""
    seen = reference.visible(case)
    return of_tiles(seen, M, N, False).any(-1), of_tiles(seen, M, N, True).all(-1)


@pytest.mark.parametrize("case", [*MASKS, *CASES], ids=case_name)
def test_the_scores_that_are_visible_are_those_of_the_definition(case):
    """Also in a tile from the middle."""
    right = reference.visible(case)
    assert torch.equal(visible(problem_for(case), range(case.T), range(case.keys), CPU).expand_as(right), right)
    rows, columns = range(case.T // 3, case.T - case.T // 4), range(case.keys // 4, case.keys // 2 + 1)
    part = right[:, rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(visible(problem_for(case), rows, columns, CPU).expand_as(part), part)


@every_tile
@every_mask
def test_no_visible_score_is_left_out_and_no_tile_called_whole_that_hides_one(case, tile):
    some, all_ = tile_table(problem_for(case), *tile, CPU)
    any_visible, all_visible = truth(case, *tile)
    assert not (any_visible & ~some).any()
    assert not (~all_visible & all_).any()


@every_mask
def test_no_tile_is_visited_or_masked_for_nothing_where_it_crosses_no_edge_of_a_block(case):
    """In tiles of 16 x 8. A tile in which a window's edge meets a document's may have a score for each of the two rules
    and none for both."""
    some, all_ = tile_table(problem_for(case), 16, 8, CPU)
    any_visible, all_visible = truth(case, 16, 8)
    if case.documents is None or case.window is None:
        assert torch.equal(some.expand_as(any_visible), any_visible)
    assert torch.equal(all_.expand_as(all_visible), all_visible)


@every_tile
@every_mask
def test_lists_of_tiles_have_those_of_the_table_each_once_and_the_cut_ones_first(case, tile):
    """A kernel's tile of keys may reach past the last key, so it counts as cut. Rows past the last have no weight."""
    problem = problem_for(case)
    (some,), (all_,) = tile_table(problem._replace(spans=None), *tile, CPU)
    all_ = all_ & (case.documents is None)  # a table for all sequences
    whole_keys = torch.arange(some.shape[1]) < case.keys // tile[1]
    for form, some_of, all_of in (("rows", some, all_ & whole_keys), ("columns", some.mT, all_.mT)):
        for line, visited, whole in zip(visit_lists(problem, *tile, form, CPU), some_of, all_of, strict=True):
            count, cut, *order = line.tolist()
            assert sorted(order) == list(range(len(order)))
            assert set(order[:count]) == set(visited.nonzero().flatten().tolist())
            assert set(order[:cut]) == set((visited & ~whole).nonzero().flatten().tolist())


@pytest.mark.parametrize("case", [c for c in MASKS if c.B == 1], ids=case_name)
def test_tiled_visits_the_tiles_that_have_a_visible_score_once_in_each_pass(case):
    inputs, problem, visited = case.inputs(torch.float32), problem_for(case), []
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))

    def watch(rows: range, columns: range, **values: Tensor) -> None:
        visited.append((rows.start // 16, columns.start // 8))

    o, _, lse2 = tiled.forward(q, k, v, problem, 16, 8, watch)
    wanted = truth(case, 16, 8)[0][0].nonzero().tolist()
    assert sorted(visited) == [tuple(place) for place in wanted]
    tiled.backward(q, k, v, o, lse2, do, None, problem, 16, 8, watch)
    assert sorted(visited) == sorted(2 * [tuple(place) for place in wanted])


def test_documents_of_the_largest_numbers_are_told_apart():
    """Numbers that are hashes: the difference of two overflows. A number that comes again is another document."""
    numbers = torch.tensor([-(2**63), 5, 2**63 - 1, 5]).repeat_interleave(torch.tensor([3, 1, 2, 1]))[None]
    assert spans_of(numbers).tolist() == [[[0, 2], [0, 2], [0, 2], [3, 3], [4, 5], [4, 5], [6, 6]]]
