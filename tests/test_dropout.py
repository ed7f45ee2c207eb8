"""The dropout mask: right bits, the same from any tile, at any place, with the right frequency."""

import math
import shutil

import pytest
import torch

from model import dropout
from model.dropout import draw_seeds, drop_threshold, dropped, keep_mask, keep_scale, keep_table, philox
from tests import reference
from tests.implementations import CUDA, DEVICE

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else [])]
COMPILES = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile wants a C++ compiler")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_random123s_known_answers(counter, key, words):
    assert tuple(int(w) for w in philox(tuple(torch.tensor(c) for c in counter), key, rounds=10)) == words


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345, -(2**63), 2**32 + 1])
@pytest.mark.parametrize(("row", "column", "R", "S"), [(29, 5, 42, 39), (2**20, 0, 9, 9), (0, 2**31, 9, 9)])
def test_the_mask_is_its_definition_element_by_element(row, column, R, S, seed, device):
    """(n*T + row)*T + column in 32 bits repeats the mask from T = 18,918 on with 12 heads; here nothing multiplies."""
    mask = keep_mask(torch.tensor(seed, device=device), 3, range(row, row + R), range(column, column + S), 0.3).cpu()
    for n in range(3):
        expected = reference.table(R, S, lambda i, j, n=n: reference.keep(seed, n, row + i, column + j, 0.3))
        assert torch.equal(mask[n], expected)


@pytest.mark.parametrize("dropout_p", [0.002, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_binomially_right_overall_and_in_each_of_the_sixteen_places(dropout_p):
    p = drop_threshold(dropout_p) / 256
    dropped = ~keep_mask(torch.tensor(3), 8, range(512), range(512), dropout_p)
    deviation = math.sqrt(p * (1 - p))
    assert abs(dropped.float().mean() - p) < 5 * deviation / math.sqrt(dropped.numel())
    place = dropped.view(8, 16, 4, 8, 16, 4, 8).float().mean((0, 1, 3, 4, 6))  # (row bits 3-4, column bits 3-4)
    assert (place - p).abs().max() < 5 * deviation / math.sqrt(dropped.numel() / 16)


def test_the_survivors_are_scaled_by_the_share_actually_kept():
    for dropout_p in (0.1, 0.25, 0.5):
        kept = 1 - drop_threshold(dropout_p) / 256
        assert keep_scale(dropout_p) * kept == pytest.approx(1.0, abs=2**-52)
    assert keep_scale(0.0) == 1.0
    assert keep_mask(torch.tensor(0), 1, range(40), range(40), 0.0).all()


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan"), 0.001, 0.999])
def test_a_probability_that_cannot_be_had_is_refused_by_name(dropout_p):
    with pytest.raises(ValueError, match=f"dropout_p={dropout_p}"):
        drop_threshold(dropout_p)


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_mask_has_the_same_bits(device):
    """Products past 2**63 are undefined in C++, and a compiled mask once had other bits than the plain one. On a GPU it
    once multiplied its counters as it does indices, in 32 bits."""
    seed, tile = torch.tensor(0x123456789ABCDEF), (6, range(3, 100), range(2**20, 2**20 + 130), 0.3)
    found = torch.compile(keep_mask, fullgraph=True)(seed.to(device), *tile)
    assert torch.equal(found.cpu(), keep_mask(seed, *tile))


# --- whole masks, of the residual stream -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "rows", "C"),
    [(1, range(1), 1), (2, range(64), 96), (3, range(33), 70), (40, range(8), 5), (2, range(96, 150), 40)]
    + [(128, range(64, 256), 384)] * CUDA,
)
def test_the_kernel_writes_the_definition(N, rows, C, monkeypatch):
    """40 masks are more than one program."""
    pytest.importorskip("triton", reason="triton is made for Linux")
    seed = torch.tensor(-(2**62) - 12345)
    definition = keep_mask(seed, N, rows, range(C), 0.3)
    monkeypatch.setattr(dropout, "runs_kernels", lambda device: True)
    given = torch.arange(N, device=DEVICE), torch.tensor(rows, device=DEVICE), C, 0.3
    assert torch.equal(keep_table(seed.to(DEVICE), *given).cpu(), definition)
    if CUDA:
        compiled = torch.compile(keep_table, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(seed.to(DEVICE), *given).cpu(), definition)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, COMPILES])])
def test_a_compiled_model_draws_the_seeds_and_masks_of_a_plain_one(backend):
    """torch.compile drew other seeds from the same random state, so a compiled step could not be looked at again."""

    def draw():
        seeds = draw_seeds(3, torch.device("cpu"))
        return seeds + 0, keep_table(seeds[1], torch.arange(2), torch.arange(40), 70, 0.3), torch.rand(2)

    found = []
    for run in (draw, torch.compile(draw, fullgraph=True, backend=backend)):
        torch.manual_seed(5)
        found.append((*run()[:2], torch.get_rng_state()))
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*found, strict=True))


def test_each_seed_begins_at_a_multiple_of_16_bytes():
    """Triton compiled every kernel twice, because every other seed did not."""
    drawn = torch.ops.tilegpt.draw_seeds(5, torch.device("cpu")), draw_seeds(5, torch.device("cpu"))
    assert all(seed.data_ptr() % 16 == 0 for seeds in drawn for seed in seeds.unbind())


def test_the_ops_are_registered_as_torch_wants_them():
    for op, arguments in (
        (dropout.seeds_op, (3, torch.device("cpu"))),
        (dropout.table_op, (torch.tensor(1), torch.arange(1, 3), torch.arange(32, 70), 70, 0.3)),
    ):
        checks = ["test_schema", "test_faketensor"] if op is dropout.seeds_op else None
        torch.library.opcheck(op, arguments, **({"test_utils": checks} if checks else {}))


def test_what_is_dropped_is_0_and_has_no_gradient_whatever_it_was():
    x = torch.tensor([1.0, 2.0, float("nan"), float("inf")], requires_grad=True)
    y = dropped(x, torch.tensor([True, False, False, False]), 0.5)
    assert y.tolist() == [2, 0, 0, 0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 0, 0, 0]
    assert dropped(x, None, 0.5) is x
