"""The dropout mask: the bits of its definition from any tile, at any place, with the right frequency."""

import math
import shutil
from itertools import product

import pytest
import torch

from kernels.problem import Problem
from model.attention import AttentionConfig
from model.dropout import draw_seeds, drop_threshold, keep_mask, philox
from tests import reference
from tests.implementations import CUDA

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else [])]
COMPILES = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize(("counter", "key", "words"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
])  # fmt: skip
def test_philox_gives_random123s_known_answers(counter, key, words):
    assert tuple(int(w) for w in philox(tuple(torch.tensor(c) for c in counter), key, rounds=10)) == words


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345, -(2**63), 2**32 + 1])
@pytest.mark.parametrize(("row", "column", "R", "S"), [(29, 5, 42, 39), (2**20, 0, 9, 9), (0, 2**31, 9, 9)])
def test_the_mask_of_any_tile_is_its_definition_weight_by_weight(row, column, R, S, seed, device):
    """(n*T + row)*T + column in 32 bits would repeat the mask from T = 18,919 on with 12 heads."""
    mask = keep_mask(torch.tensor(seed, device=device), 3, range(row, row + R), range(column, column + S), 0.3)
    places = product(range(3), range(row, row + R), range(column, column + S))
    right = torch.tensor([reference.keep(seed, *place, 0.3) for place in places])
    assert torch.equal(mask.cpu(), right.view(3, R, S))


@pytest.mark.parametrize("dropout_p", [0.002, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_binomially_right_overall_and_in_each_of_the_sixteen_places(dropout_p):
    p = drop_threshold(dropout_p) / 256
    dropped = ~keep_mask(torch.tensor(3), 8, range(512), range(512), dropout_p)
    deviation = math.sqrt(p * (1 - p))
    assert abs(dropped.float().mean() - p) < 5 * deviation / math.sqrt(dropped.numel())
    place = dropped.view(8, 16, 4, 8, 16, 4, 8).float().mean((0, 1, 3, 4, 6))  # (row bits 3-4, column bits 3-4)
    assert (place - p).abs().max() < 5 * deviation / math.sqrt(dropped.numel() / 16)


def test_what_is_kept_is_scaled_by_the_share_actually_kept():
    for dropout_p in (0.0, 0.1, 0.25, 0.5):
        kept = 1 - drop_threshold(dropout_p) / 256
        assert Problem(*[None] * 11, dropout_p, ()).keep_scale * kept == pytest.approx(1.0, abs=2**-52)
    assert drop_threshold(0.1) == 26
    assert keep_mask(torch.tensor(0), 1, range(40), range(40), 0.0).all()


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan"), 0.001, 0.999])
def test_a_probability_that_cannot_be_had_is_refused_by_name(dropout_p):
    with pytest.raises(ValueError, match=f"dropout_p={dropout_p}"):
        AttentionConfig(dropout_p=dropout_p)


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_mask_has_the_same_bits(device):
    """Products past 2**63 are undefined in C++. On a GPU a compiler multiplies counters in 32 bits, as indices."""
    seed, tile = torch.tensor(0x123456789ABCDEF), (6, range(3, 100), range(2**20, 2**20 + 130), 0.3)
    found = torch.compile(keep_mask, fullgraph=True)(seed.to(device), *tile)
    assert torch.equal(found.cpu(), keep_mask(seed, *tile))


def test_each_seed_is_another_and_begins_at_a_multiple_of_16_bytes():
    """Triton would compile every kernel twice otherwise."""
    seeds = draw_seeds(5, torch.device("cpu"))
    assert len({int(seed) for seed in seeds}) == 5
    assert all(seed.data_ptr() % 16 == 0 for seed in seeds)
