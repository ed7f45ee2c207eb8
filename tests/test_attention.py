"""Each property of attention once, over all implementations that have it. naive is the definition in float64, and what
the others compute is within twice naive's error.

What only one has is elsewhere: of the kernels in tests/test_flash.py, of those for Hopper GPUs in tests/test_hopper.py,
what only a GPU shows in tests/test_gpu.py. What is broken on purpose is in tests/test_breakit.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lab.meter import PeakBytes
from model.attention import AttentionConfig, alibi_slopes, attention, attention_varlen, blocks_of
from model.break_it import BreakIt
from model.dropout import keep_mask
from tests import implementations, second
from tests.implementations import CUDA, DEVICE, HALVES, IN_TORCH, NAIVE, ROWS, SDPA, TILED, Row, exact, over, param
from tests.reference import (
    CASES,
    DTYPES,
    FOR_SDPA,
    PICTURE,
    PLACES,
    SEED,
    Case,
    assert_float64_right,
    assert_within_budget,
    case_name,
    dominated,
    drawn,
    oracle,
    run,
    run_forward,
    table,
)
from tests.second import SECOND, as_heads, inside_a_graph

sized = implementations.sized
# the interpreter's log(0) of a row that sees nothing, which is -inf and meant to be
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
EVERY = over("naive", "tiled", "keys_outside", "triton", "hopper")
IN_TILES = over("tiled", "keys_outside", "triton", "hopper")
WITH_BACKWARD = over("tiled", "triton")
IN_FLOAT64 = over("naive", "tiled", "keys_outside")
RESULTS = ("o", "lse", "dq", "dk", "dv")


def same_bits(found: dict, expected: dict) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in RESULTS)


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_it_is_the_definition_in_float64(case):
    """All at once: the oracle draws its masks element by element."""
    inputs = case.inputs(torch.float64)
    right = oracle(inputs, case)
    for row in ROWS:
        if torch.float64 in row.dtypes and row.device == "cpu":
            assert_float64_right(row.run(inputs, case), right, terms=case.T_k or case.T)


# Around the tiles of Hopper's kernels: 64 rows of a consumer, 64 or 128 keys, groups of 128 to 256 rows.
FOR_HOPPER = [
    Case(1, D=64),
    Case(333, D=64, H=4, H_kv=2, B=1),
    Case(100, 150, D=64, B=1),  # the mask cuts two tiles of some rows
    Case(70, 300, D=128, B=1),  # the mask cuts two tiles of queries for some keys
    Case(300, 77, D=128, B=1),  # rows that see no key
    Case(200, 333, D=128, B=1, causal=False),
    Case(150, D=128, B=1, sigma=4.0),
    Case(150, D=64, B=1, softmax_scale=0.5),
    Case(264, 2120, D=64, B=1),  # three consumers
    Case(300, 400, D=128, B=1, window=1),
    Case(333, 200, D=64, B=1, causal=False, window=40),  # rows that see no key, and a tile without any
    Case(200, 333, D=128, B=1, causal=False, documents=(133, 200)),
    Case(200, D=64, B=1, H=4, H_kv=2, dropout_p=0.1),
    Case(97, 260, D=128, B=1, dropout_p=0.5),
    Case(300, D=64, documents=(50, 100, 150), window=60, dropout_p=0.2),
]
FOR_HOPPER_TOO = [
    Case(300, 77, D=64, B=1),
    Case(264, 328, D=128, B=1, dropout_p=0.2),
    Case(100, 2100, D=64, B=1, causal=False),
    Case(400, D=64, B=1, window=130),
    Case(333, D=64, documents=(33, 100, 0, 200)),
    Case(300, 77, D=64, B=1, dropout_p=0.7),
]
# On a GPU: single numbers that Triton 3.6 made None of, long rows, more heads than a grid's second axis has places.
LONG = [
    *(Case(1, H=4, H_kv=2), Case(1, 50, H=4, H_kv=1), Case(50, 1, H=4, H_kv=2), Case(50, window=2, causal=False)),
    *(Case(1024, D=16, H=4), Case(1500, D=40, H=4, H_kv=1), Case(2048, D=64, dropout_p=0.1)),
    *(Case(4096, D=64, B=1, H=4, H_kv=2), Case(4096, D=128, B=1), Case(2000, D=128, sigma=3.0, dropout_p=0.1)),
    *(Case(1024, 3000, D=80, dropout_p=0.3), Case(2049, D=256, B=1), Case(2048, D=256, B=1, H_kv=1, dropout_p=0.1)),
    *(Case(3001, D=128, window=700, H=4, H_kv=2), Case(2500, 1700, D=64, causal=False, window=300)),
    *(Case(4000, D=80, documents=(1000, 1, 1500, 1499), dropout_p=0.1), Case(5, B=33_000, D=16)),
    # Hopper's tiles, and heads with more groups than there are processors
    *(Case(T, D=D) for T in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000) for D in (64, 128)),
    *(Case(700, B=8, H=12, H_kv=4, D=64), Case(520, H=8, H_kv=1, D=128), Case(2113, B=1, H=4, H_kv=2, D=64)),
    *(Case(9000, B=1, H=2, H_kv=1, D=64), Case(300, 9000, B=1, D=128, causal=False, dropout_p=0.1)),
]
SIZES = {
    "tiled": [(16, 16), (32, 64), (64, 32), (128, 128)],
    "keys_outside": [(32, 64)],
    "triton": [(64, 64), (128, 128), (32, 128), (128, 32, 64)],
}


def pairs() -> Iterator:
    """Cases, rows, dtypes and tile sizes: each case with each row, each dtype and size with each row. More is slow."""
    for i, case in enumerate([*CASES, *FOR_HOPPER, *FOR_HOPPER_TOO, *(LONG if CUDA else [])]):
        for row in ROWS:
            if row.name == "naive" or row.lacks(case):
                continue
            if not CUDA and (i >= len(CASES)) != (row.name == "hopper"):
                continue
            if i >= len(CASES) and row.config.impl != "triton":
                continue
            sizes = SIZES.get(row.name, [()])
            if row.device == "cuda":
                sizes = [()] if row.config.impl == "triton" else [(32, 64)]
            elif row.name == "triton":  # whose dropout bits the interpreter draws in half a hundred steps a tile
                sizes = [(128, 128)] if case.dropout_p else [sizes[i // 3 % 4]]
            # In float32 a window of one key is twice as far from 0 as naive, whose dp - delta is exactly 0.
            dtypes = HALVES[:1] if case in LONG else HALVES if i >= len(CASES) else row.dtypes[:3]
            for (j, size), dtype in product(enumerate(sizes), dtypes):
                usual = row.dtypes.index(dtype) == (i + j) % len(row.dtypes[:3]) and (i + j) % len(sizes) < 2
                usual &= case not in FOR_HOPPER_TOO
                yield param(row, case, dtype, size, marks=[] if usual or CUDA else [pytest.mark.slow])


@lru_cache(4)
def given(case: Case, dtype: torch.dtype, device: str) -> tuple[dict, dict, dict]:
    """Inputs, naive's results and the right ones."""
    inputs = case.inputs(dtype, device)
    return inputs, run(inputs, case, NAIVE), exact(inputs, case)


@pytest.mark.parametrize(("row", "case", "dtype", "size"), [*pairs()])
def test_it_is_within_twice_naives_error_at_any_tile_size(row, case, dtype, size, sized):
    inputs, naive, right = given(case, dtype, row.device)
    assert_within_budget(run(inputs, case, sized(row.config, *size)), naive, right)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("row", [param(row) for row in IN_TORCH if row.name != "naive"])
@pytest.mark.parametrize("case", [Case(339, 1, causal=False), Case(211, H=4, H_kv=2)], ids=case_name)
def test_gradients_in_16_bits_are_rounded_once_however_many_tiles_add_to_them(case, row, dtype):
    """Each tile's part of dv and dk, or of dq, was rounded before it was added. v = 0 makes o and delta exact. Not on a
    GPU, which multiplies p and ds in 16 bits."""
    inputs = row.inputs(case, dtype)
    inputs["v"].zero_()
    found, right = run(inputs, case, replace(row.config, block_m=16, block_n=16)), oracle(inputs, case)
    for name in ("dq", "dk", "dv"):
        once = torch.finfo(dtype).eps / 2 * right[name].abs()
        sums = case.T * torch.finfo(torch.float32).eps * right[name].abs().max()
        assert ((found[name].cpu().double() - right[name]).abs() <= once + sums).all(), name


@pytest.mark.parametrize("case", FOR_SDPA, ids=case_name)
def test_sdpa_means_the_same_masks_and_scale(case):
    inputs, naive, right = given(case, torch.float32, DEVICE)
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    o = attention(*(inputs[name] for name in "qkv"), SDPA, **options)
    assert_within_budget({"o": o}, {"o": naive["o"]}, {"o": right["o"]})


@IN_TILES
def test_the_gradient_of_lse_alone_is_right(row):
    """What a z-loss on attention would ask for: no gradient of o comes at all."""
    case = Case(70, 90, B=1, H_kv=1, D=64)
    inputs = row.inputs(case)
    inputs["do"].zero_()
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
    lse = run_forward(q, k, v, case, row.config)[1]
    found = dict(zip(("dq", "dk"), torch.autograd.grad(lse, (q, k), inputs["dlse"], allow_unused=True), strict=True))
    naive, right = (of(inputs, case) for of in (partial(run, config=NAIVE), exact))
    assert_within_budget(found, naive, {name: right[name] for name in found})


@EVERY
def test_rows_with_nothing_to_see_give_zero_and_no_gradient(row):
    case = Case(40, 24, B=1, D=64)  # the first 16 rows lie before the first key
    found = row.run(row.inputs(case), case)
    for name, nothing in (("o", 0.0), ("lse", -torch.inf), ("dq", 0.0)):
        assert (found[name][:, :, :16] == nothing).all(), name
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


EMPTY = {"batch": (0, 2, 8, 8), "heads": (2, 0, 8, 8), "queries": (2, 2, 0, 8), "keys": (2, 2, 8, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@EVERY
def test_what_is_empty_passes_through_with_gradients_of_zero(row, shape):
    """Dropout without queries raised, and so did a call without keys."""
    B, H, T, T_k = shape
    for dropout_p in (0.0, 0.5):
        case = Case(T, T_k, B=B, H=H, H_kv=2, D=64, dropout_p=dropout_p)
        inputs = row.inputs(case)
        found = row.run(inputs, case)
        assert not any(found[name].any() for name in ("o", "dq", "dk", "dv"))
        assert torch.equal(found["lse"].cpu(), torch.full((B, H, T), -torch.inf))
        assert [found[name].shape for name in ("o", "dq", "dk")] == [inputs[name].shape for name in "qqk"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [Case(1), Case(1, B=3, D=64), Case(70, window=1)], ids=case_name)
def test_a_row_that_sees_one_key_copies_its_value_and_moves_no_score(case, dtype):
    """Its weight is 1 whatever the score: o = v, lse = s, dv = do, and dq = dk = 0 but for the dlse given here as 0.

    o is v bit for bit. The backward's weight is exp(s - lse), and lse was rounded on its way: 1 to |lse| eps.
    dq and dk are differences of two equal sums of D products, so what is left is their rounding: gamma_D of the usual
    analysis, D eps sum |do v|, times the key. (A budget by max |reference| would be 0 here.) Both sums are float32 ones
    in every dtype: rounded to 16 bits, dp alone would move the scores.
    """
    inputs = case.inputs(dtype)
    inputs["dlse"] = torch.zeros_like(inputs["dlse"])
    found = run(inputs, case, replace(TILED, block_m=16, block_n=16))
    assert torch.equal(found["o"], inputs["v"])
    off = 4 * found["lse"].abs().clamp(min=1).unsqueeze(-1) * torch.finfo(torch.float32).eps
    assert ((found["dv"] - inputs["do"]).abs() <= inputs["do"].abs() * (off + torch.finfo(dtype).eps)).all()
    terms = (inputs["do"].double() * inputs["v"].double()).abs().sum(-1, keepdim=True)
    ds = case.D * torch.finfo(torch.float32).eps * terms * case.D**-0.5
    assert (found["dq"].double().abs() <= ds * inputs["k"].double().abs()).all()
    assert (found["dk"].double().abs() <= ds * inputs["q"].double().abs()).all()


@pytest.mark.parametrize("sign", [-1, 1])
@EVERY
def test_products_of_q_and_k_may_leave_fp16_where_their_scores_do_not(row, sign):
    """q k^T is 102,400 here and the score 12,800: o was 0 where all products of a row were below -65,504, else NaN."""
    q, v = torch.full((1, 1, 8, 64), 40.0), torch.randn(1, 1, 8, 64).half().float()
    right, lse = attention(q, sign * q, v, NAIVE, return_lse=True)
    halves = [x.half().to(row.device) for x in (q, sign * q, v)]
    o, found = (x.cpu() for x in attention(*halves, row.config, return_lse=True))
    assert (o - right).abs().max() <= 2 * torch.finfo(torch.float16).eps * v.abs().max()
    assert torch.allclose(found, lse)


def dominant() -> Iterator:
    """Pairwise; the rest is slow."""
    few = [(False, 0, 64), (True, 1, 128), (False, 1, 64), (True, 0, 128), (True, 1, 64)]  # one for each of PLACES
    for row, same_values, n, D in product(ROWS, (False, True), range(2), (64, 128)):
        for places, usual in zip(PLACES, few, strict=True) if row.name in ("tiled", "triton", "hopper") else ():
            if row.name == "hopper" or D == 64 or CUDA:
                slow = [] if usual == (same_values, n, D) or CUDA else [pytest.mark.slow]
                yield param(row, places, same_values, HALVES[n], D, marks=slow)


@pytest.mark.parametrize(("row", "places", "same_values", "dtype", "D"), [*dominant()])
def test_keys_that_dominate_are_weighed_exactly(row, places, same_values, dtype, D, sized):
    """o, lse and dv. For dq and dk the rounding of o decides, which delta is made of; tests/test_gpu.py compares
    those with PyTorch's FlashAttention."""
    case, config = Case(340, B=1, D=D, softmax_scale=1.0), row.config
    config = config if CUDA or row.name != "triton" else sized(config, 128, 128)
    for above, apart in ((8.0, 0.0), (16.0, 0.125), (30.0, 0.0)):
        inputs = dominated(D, dtype, above, apart, places, same_values, case.T, row.device)
        found, naive, right = run(inputs, case, config), run(inputs, case, NAIVE), exact(inputs, case)
        assert_within_budget(*({name: x[name] for name in ("o", "lse", "dv")} for x in (found, naive, right)))
    if same_values:  # the others have a weight of 1e-13
        rows = found["o"][:, :, max(places) :]
        assert torch.equal(rows, inputs["v"][:, :, places[:1]].expand_as(rows))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@IN_TILES
def test_a_weight_that_has_all_of_its_row_is_exactly_1(row, dropout_p):
    q, k, v = (torch.zeros(1, 1, 200, 64, dtype=torch.bfloat16) for _ in "qkv")
    q[..., 0], k[..., 70, 0] = 1, 1
    v.uniform_(1, 2, generator=torch.Generator().manual_seed(0))
    config, seed = replace(row.config, dropout_p=dropout_p), torch.tensor(3, device=row.device)
    qkv = (x.to(row.device) for x in (q, k, v))
    o = attention(*qkv, config, softmax_scale=17.3, seed=seed)[0, 0, 70:].cpu()  # a score that rounds
    kept = o[:, 0] > 0.5  # the others have their small weights left
    assert kept.any()
    assert kept.all() == (dropout_p == 0)
    assert torch.equal(o[kept], v[0, 0, 70:71].expand(130, 64)[kept] / (1 - dropout_p))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("nats", [12, 16])
def test_tiled_is_as_exact_as_torchs_flash_where_one_key_has_nearly_all_the_weight(nats, dtype):
    """There dp and delta are nearly alike, and dq is what is left of them: dp in 16 bits had 60 times torch's error."""
    case = Case(128, D=64)
    inputs = case.inputs(dtype)
    inputs["k"][..., 0] = 0.0
    inputs["k"][:, :, 0] = 0.0
    inputs["k"][:, :, 0, 0] = nats
    inputs["q"][..., 0] = 8.0  # sqrt(D): the score of key 0 is nats
    inputs["dlse"].zero_()
    right = exact(inputs, case)
    qkv = [inputs[name].requires_grad_() for name in "qkv"]

    def errors(o: Tensor) -> list[float]:
        grads = torch.autograd.grad(o, qkv, inputs["do"])
        return [float((x - right[name]).abs().max()) for name, x in zip(("dq", "dk"), grads, strict=False)]

    flash = errors(scaled_dot_product_attention(*qkv, is_causal=True))
    found = errors(attention(*qkv, replace(TILED, block_m=64)))
    assert all(x <= 2 * torchs for x, torchs in zip(found, flash, strict=True))


def test_alibis_slopes_are_float32_whatever_the_default():
    """The first call of a process decided for all that came after."""
    alibi_slopes.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        slopes = alibi_slopes(16, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
        alibi_slopes.cache_clear()
    assert slopes.dtype == torch.float32
    assert slopes[1] == 0.5


# --- packed sequences, as flash-attention's users have them ----------------------------------------------------------

LENGTHS = [(17, 17), (1, 1), (0, 0), (50, 50), (30, 30)]
OTHER_LENGTHS = [(17, 30), (1, 64), (40, 9), (0, 12), (5, 0), (30, 30)]  # more keys, more queries, none of either
NO_KEYS = [(3, 0), (0, 0), (5, 0)]


def pack(lengths, dtype, H=4, H_kv=2, D=24, device="cpu") -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """q, k and v, do, and where each sequence begins, of queries and of keys."""
    generator = torch.Generator().manual_seed(1)
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in zip(*lengths, strict=True))
    shapes = ((int(cu_q[-1]), H, D), (int(cu_k[-1]), H_kv, D), (int(cu_k[-1]), H_kv, D), (int(cu_q[-1]), H, D))
    made = (torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes)
    *qkv, do = made
    return [x.requires_grad_() for x in qkv], do, cu_q.to(device), cu_k.to(device)


def one_by_one(qkv, do, cu_q, cu_k, config, dtype=torch.float64, **options) -> dict[str, Tensor]:
    """The definition: each sequence by itself."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv)
    outputs, lses = [], []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        o, lse = attention(*one, config, return_lse=True, **options)
        outputs.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    o = torch.cat(outputs)
    grads = torch.autograd.grad(o, (q, k, v), do.to(dtype))
    return dict(zip(RESULTS, (o.detach(), torch.cat(lses, 1).detach(), *grads), strict=True))


def all_at_once(qkv, do, cu_q, cu_k, config, **options) -> dict[str, Tensor]:
    o, lse = attention_varlen(*qkv, cu_q, cu_k, config, return_lse=True, **options)
    grads = torch.autograd.grad(o, qkv, do)
    return dict(zip(RESULTS, (o.detach(), lse.detach(), *grads), strict=True))


@pytest.mark.parametrize(
    ("lengths", "options", "causal"),
    [
        (LENGTHS, {}, True),
        (LENGTHS, {"window": 9}, False),
        (OTHER_LENGTHS, {}, False),
        (OTHER_LENGTHS, {"window": 9}, True),
        (OTHER_LENGTHS, {"alibi": True, "softcap": 5.0}, True),
        (NO_KEYS, {"window": 9}, True),
    ],
    ids=str,
)
@over("naive", "tiled", "keys_outside", "triton")
def test_a_pack_is_its_sequences_one_by_one(row, lengths, options, causal):
    config, naive = (replace(config, **options) for config in (row.config, NAIVE))
    wide = torch.float64 in row.dtypes
    problem = pack(lengths, torch.float64 if wide else row.dtype, device=row.device)
    found = all_at_once(*problem, config, causal=causal)
    right = {name: x.cpu() for name, x in one_by_one(*problem, naive, causal=causal).items()}
    if wide:
        assert_float64_right(found, right, terms=128)
    else:
        assert_within_budget(found, one_by_one(*problem, naive, row.dtype, causal=causal), right)


@over("tiled", "keys_outside")
def test_a_pack_draws_the_same_dropout_whatever_the_tiles(row):
    *qkv, cu_q, cu_k = pack(OTHER_LENGTHS, torch.float64, device=row.device)
    options = {"seed": torch.tensor(SEED, device=row.device)}
    naive, found = (
        all_at_once(*qkv, cu_q, cu_k, replace(config, dropout_p=0.3), **options) for config in (NAIVE, row.config)
    )
    assert_float64_right(found, {name: x.cpu() for name, x in naive.items()}, terms=128)


# --- the same bits ---------------------------------------------------------------------------------------------------


@EVERY
def test_two_runs_give_the_same_bits(row):
    case = Case(97, B=1, H_kv=1, D=64, window=64, dropout_p=0.1)
    inputs = row.inputs(case)
    first, second = (row.run(inputs, case) for _ in range(2))
    assert same_bits(first, second)


LAYOUTS = {
    "odd offset": lambda x: pad(x.flatten(), (1, 0))[1:].view(x.shape),  # rows off their 16 bytes
    "odd rows": lambda x: pad(x, (0, 1))[..., :-1],
    "columns first": lambda x: x.mT.contiguous().mT,  # neighbours that lie apart
    "interleaved": lambda x: pad(x.transpose(1, 2), (0, 0, 0, 2)).transpose(1, 2)[:, :-2],  # as a projection has them
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),  # every row the same
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),  # the gradient of out.sum()
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@EVERY
def test_any_strides_give_the_same_bits(row, layout, monkeypatch):
    """Other projects' kernels read such tensors past their end, or copied them wrongly. Both ways to a tile: Hopper's
    descriptors, and the pointers of older GPUs."""
    case = Case(50, 70, H_kv=1, D=64 if row.name == "hopper" else 24)
    inputs = {name: layout(x) if x.ndim == 4 else x for name, x in row.inputs(case).items()}
    plain = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
    if row.config.impl == "tiled" and layout is LAYOUTS["columns first"]:
        inputs["do"] = plain["do"]  # delta would sum its columns in another order
    right = row.run(plain, case)
    assert same_bits(row.run(inputs, case), right)
    if row.name == "triton" and not CUDA:
        monkeypatch.setattr("kernels.sizes.has_descriptors", lambda device: False)
        assert same_bits(row.run(inputs, case), right)


@EVERY
def test_what_lies_around_the_tensors_does_not_leak_in(row):
    """Rows before and after, and the columns between D and its power of two, are full of NaN; 0 * NaN is NaN."""
    case = Case(70, 50, H_kv=1, D=64 if row.name == "hopper" else 24)
    inputs = row.inputs(case)
    guarded = dict(inputs)
    for name in ("q", "k", "v", "do"):
        x = inputs[name]
        around = x.new_full((*x.shape[:2], x.shape[2] + 128, case.D + 8), torch.nan)
        guarded[name] = around[:, :, 64:-64, : case.D]
        guarded[name].copy_(x)
    assert same_bits(row.run(guarded, case), row.run(inputs, case))


@pytest.mark.parametrize(
    "case",
    [Case(60, blocks=PICTURE), Case(60, documents=(17, 43)), Case(60, alibi=True, window=9, dropout_p=0.3)],
    ids=case_name,
)
@over("naive", "tiled", "triton")
def test_torchs_default_device_changes_nothing(case, row):
    """A block mask's lists of tiles were made there."""
    caches = [alibi_slopes, blocks_of]
    if row.name == "triton":
        from kernels.sizes import lists

        caches.append(lists)
    inputs, documents = row.inputs(case), None
    if case.documents:
        case, documents = replace(case, documents=None), table(2, 60, case.document).to(row.device)

    def results(device: str) -> dict:
        for cached in caches:
            cached.cache_clear()
        with torch.device(device):
            return row.run(inputs, case, documents=documents)

    assert same_bits(results("meta"), results("cpu"))


@EVERY
def test_autocast_does_not_reach_inside(row):
    """Float32 inputs stay float32: the caller chose their dtype, and running sums in bf16 would lose small tiles."""
    q = torch.randn(1, 2, 40, 64).to(row.device, row.dtype)
    with torch.autocast(row.device, torch.bfloat16):
        inside = attention(q, q, q, row.config)
    assert torch.equal(inside, attention(q, q, q, row.config))


@pytest.mark.parametrize(
    ("row", "contiguous"),
    [param(row, False) for row in (*ROWS, Row("sdpa", SDPA, DTYPES)) if row.name != "hopper"]
    + [param(row, True) for row in ROWS if row.name == "tiled"],
)
def test_a_compiled_function_gives_the_same_bits_forward_and_backward(row, contiguous):
    """tiled saved a view of a contiguous input, which PyTorch's tracing of a gradient refuses. Now it stays outside of
    the graph, as its loops would be unrolled."""
    qkv = torch.randn(3, 2, 2, 40, 64) if contiguous else torch.randn(3, 2, 40, 2, 64).transpose(2, 3)
    inputs = [x.to(row.device, row.dtype).requires_grad_() for x in qkv.unbind()]
    config, seed = row.config, torch.tensor(SEED, device=row.device)
    config = config if config.impl == "sdpa" else replace(config, window=30, dropout_p=0.2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, config, seed=seed)

    torch.compiler.reset()
    backend = "inductor" if CUDA and row.name == "triton" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=config.impl != "tiled", backend=backend)
    o, found = attend(*inputs), compiled(*inputs)
    assert torch.equal(found, o)
    grads, again = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, found))
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


# --- derivatives of the gradients ------------------------------------------------------------------------------------


def heads(row: Row, grad: bool = True) -> list[Tensor]:
    return [torch.randn(1, 2, 8, 16, device=row.device, requires_grad=grad) for _ in "qkv"]


@pytest.mark.parametrize("way", SECOND.values(), ids=SECOND)
@WITH_BACKWARD
def test_a_second_derivative_is_refused(row, way):
    """It was silently 0 where do needs no gradient, and where torch.autograd.grad asked for it alone."""
    with pytest.raises(RuntimeError, match=f"attention={row.name} has no (second|forward-mode) derivative"):
        way(row.config, *heads(row))


@WITH_BACKWARD
def test_a_transform_of_torch_func_is_refused(row):
    q, k, v = heads(row, grad=False)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda q: attention(q, k, v, row.config).sum())(q)


@pytest.mark.parametrize("way", ["penalty", "grad of a sum", "Hessian times vector"])
def test_a_second_derivative_through_a_compiled_function_is_refused_too(way, monkeypatch):
    """Inside of the graph a penalty on the gradient of o.sum() was lost without a word."""
    monkeypatch.setattr(second, "attention", torch.compile(attention, backend="aot_eager"))
    with pytest.raises(RuntimeError, match="attention=tiled has no second derivative"):
        SECOND[way](TILED, *(torch.randn(1, 2, 40, 8, requires_grad=True) for _ in "qkv"))


@pytest.mark.slow
@pytest.mark.skipif(not second.REFUSED_BY_PYTORCH, reason="PyTorch before 2.13 lost it without a word")
@pytest.mark.parametrize(
    "computed",
    [
        lambda x: x.exp().sum(),
        *(as_heads(row.config) for row in ROWS if row.device == "cpu" and row.name in ("tiled", "triton")),
    ],
)
def test_a_second_derivative_is_refused_where_q_is_made_inside_of_a_compiled_graph(computed):
    """Of whatever function: the error is PyTorch's, and docs/attention.md says so."""
    with pytest.raises(RuntimeError, match=second.PYTORCH_REFUSES):
        inside_a_graph(computed)


def test_naive_has_a_second_derivative():
    inputs = [torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    assert torch.autograd.gradgradcheck(lambda *inputs: attention(*inputs, NAIVE), inputs)


@WITH_BACKWARD
def test_a_graph_of_the_backward_changes_no_gradient(row):
    q, *_ = heads(row)
    found = [torch.autograd.grad(attention(q, q, q, row.config).sum(), q, create_graph=graph)[0] for graph in (0, 1)]
    assert torch.equal(*found)


@pytest.mark.parametrize("changed", ["q", "k", "v", "documents", "seed"])
@WITH_BACKWARD
def test_what_changes_in_place_before_the_backward_is_noticed(row, changed):
    """New documents were taken for the forward's, and the gradients were of neither."""
    x = torch.ones((), device=row.device, requires_grad=True)
    inputs = dict(zip("qkv", (x * y for y in heads(row)), strict=True))
    inputs |= {"documents": torch.arange(8, device=row.device)[None] // 4}
    inputs |= {"seed": torch.tensor(SEED, device=row.device)}
    o = attention(**inputs, config=replace(row.config, dropout_p=0.1))
    with torch.no_grad():
        inputs[changed] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# --- dropout ---------------------------------------------------------------------------------------------------------


DRAWN = [param(row, size) for row in ROWS for size in SIZES.get(row.name, [()])]


@pytest.mark.parametrize(("row", "size"), DRAWN)
def test_dropout_draws_the_bits_of_the_definition_forward_and_backward_at_any_tile_size(row, size, sized):
    of_gpu = row.config.impl == "triton" and CUDA  # in float32 these tiles need more shared memory than there is
    dtype, T, D = (torch.bfloat16, 2048, 64) if of_gpu else (row.dtype, 100, 128)
    config = sized(row.config, *size)
    for dropout_p in (0.3, 0.75) if row.name == "hopper" else (0.3,):  # it compares bytes in two ways, from 128 on
        found = drawn(config, T, dropout_p, D=D, dtype=dtype, device=row.device)
        definition = keep_mask(torch.tensor(SEED), 2, range(T), range(T), dropout_p)
        assert [name for name, mask in found.items() if not torch.equal(mask.cpu(), definition)] == []


@EVERY
def test_no_seed_means_no_dropout(row):
    q = torch.randn(1, 2, 40, 64).to(row.device, row.dtype)
    assert torch.equal(attention(q, q, q, replace(row.config, dropout_p=0.5)), attention(q, q, q, row.config))


# --- broken on purpose: tests/test_breakit.py has naive and tiled, of which the kernels' faults are those ------------

BROKEN = {
    "no_max": Case(150, B=1, sigma=6.0, D=64),  # scores of some rows pass 88.7
    "no_rescale": Case(150, B=1, sigma=2.0, D=64),
    "no_rescale_output": Case(150, B=1, sigma=2.0, D=64),
    "no_rescale_sum": Case(150, B=1, sigma=2.0, D=64),
    "zero_init_max": Case(90, B=1, D=16),
    "local_mask": Case(100, 170, B=1, H_kv=1, D=16),
    "unguarded_mask": Case(200, B=1, H=1, window=20),
    "stale_seed": Case(90, B=1, H=1, D=16, dropout_p=0.3),
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("failure", BROKEN)
@over("triton")
def test_what_is_broken_fails_as_tiled_does_in_the_same_tiles(row, failure, sized):
    case, broken, size = BROKEN[failure], BreakIt(failure), 32 if CUDA or failure == "stale_seed" else 64
    same = sized(TILED, size, size)
    sized(row.config, size, size)
    inputs = row.inputs(case, torch.float32)
    if failure == "zero_init_max":
        inputs["q"][..., 0], inputs["k"][..., 0] = 20.0, -40.0  # every score is near -200
    found, whole = (row.run(inputs, case, break_it=b) for b in (broken, BreakIt()))
    of_tiled, right = run(inputs, case, same, break_it=broken), exact(inputs, case, same, break_it=broken)
    wrong = [name for name in RESULTS if not torch.equal(found[name], whole[name])]
    assert ("o" in wrong) == (failure != "stale_seed")
    assert "dq" in wrong
    for name in RESULTS:
        assert torch.equal(found[name].isnan(), of_tiled[name].isnan()), name
    if failure in ("no_max", "unguarded_mask"):
        assert 0 < int(found["o"].isnan().sum()) < found["o"].numel()
    else:
        assert_within_budget(found, of_tiled, right)


@over("triton")
def test_a_backward_in_other_tiles_breaks_the_mask_of_the_forward(row, sized):
    case, broken, same = Case(150, B=1, H=1, D=16), BreakIt("local_mask"), sized(TILED, 64, 64)
    inputs, config = row.inputs(case, torch.float32), sized(row.config, 64, 64, 32)
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (config, same))
    assert_within_budget(found, of_tiled, exact(inputs, case, same, break_it=broken))


# --- memory ----------------------------------------------------------------------------------------------------------


def test_tiled_never_holds_as_much_as_a_tensor_of_t_by_t():
    D = 16

    def peak(config: AttentionConfig, T: int) -> int:
        q, k, v = torch.randn(3, 1, 1, T, D).requires_grad_().unbind()
        with PeakBytes() as counted:
            attention(q, k, v, replace(config, dropout_p=0.1), seed=torch.tensor(1)).sum().backward()
        return counted.peak

    half, whole = peak(TILED, 256), peak(TILED, 512)
    assert whole <= 2 * half  # linear
    assert peak(NAIVE, 512) >= 512 * 512 * 4 > 3 * whole  # the instrument sees such a tensor where there is one


# --- the worked example ----------------------------------------------------------------------------------------------

# "the cat sat on the mat": five tokens, D = 4, no mask, tiles of two keys.
CAT = {
    "q": [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
    "k": [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]],
    "v": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]],
}
CAT_M = [1.0, 1.5, 1.0, 1.0, 0.75]
CAT_L = [3.3597, 2.4840, 3.9919, 3.1875, 4.1152]
CAT_WEIGHTS = [
    [0.1095, 0.2976, 0.1805, 0.1805, 0.2318],
    [0.4026, 0.0898, 0.2442, 0.1481, 0.1153],
    [0.1519, 0.2505, 0.2505, 0.1519, 0.1951],
    [0.1903, 0.1903, 0.1154, 0.3137, 0.1903],
    [0.1892, 0.1892, 0.1892, 0.1892, 0.2430],
]
CAT_OUTPUT = [
    [0.2254, 0.4135, 0.2964, 0.2964],
    [0.4602, 0.1475, 0.3018, 0.2058],
    [0.2495, 0.3481, 0.3481, 0.2495],
    [0.2854, 0.2854, 0.2106, 0.4089],
    [0.3108, 0.3108, 0.3108, 0.3108],
]


def cat() -> list[Tensor]:
    return [torch.tensor(CAT[name], dtype=torch.float64).view(1, 1, 5, 4) for name in ("q", "k", "v")]


@pytest.mark.parametrize("config", [NAIVE, replace(TILED, block_m=2, block_n=2)], ids=["naive", "tiled"])
def test_the_worked_example_has_its_output_weights_and_lse(config):
    q, k, v = cat()
    o, lse = attention(q, k, v, config, causal=False, return_lse=True)
    to_four_places = partial(torch.testing.assert_close, rtol=0, atol=5e-5)
    to_four_places(o[0, 0], torch.tensor(CAT_OUTPUT).double())
    # with the identity for v the output is the weights; D must agree, so q and k get a fifth column of zeros
    identity = torch.eye(5, dtype=torch.float64).view(1, 1, 5, 5)
    weights = attention(pad(q, (0, 1)), pad(k, (0, 1)), identity, config, causal=False, softmax_scale=0.5)
    to_four_places(weights[0, 0], torch.tensor(CAT_WEIGHTS).double())
    for found, m, l in zip(lse.flatten().tolist(), CAT_M, CAT_L, strict=True):
        # l is known to half of its last place
        assert math.log(l - 5e-5) <= found - m <= math.log(l + 5e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


def zeros(*shape: int, **options) -> Tensor:
    return torch.zeros(shape, **options)


X = zeros(1, 2, 8, 4)
REFUSED = {
    "no batch": ((zeros(8, 4),) * 3, {}, "(8, 4)"),
    "k and v": ((X, X, zeros(1, 2, 9, 4)), {}, "(1, 2, 9, 4)"),
    "batches": ((X, zeros(2, 2, 8, 4), zeros(2, 2, 8, 4)), {}, "(2, 2, 8, 4)"),
    "head sizes": ((X, zeros(1, 2, 8, 8), zeros(1, 2, 8, 8)), {}, "(1, 2, 8, 8)"),
    "heads": ((zeros(1, 3, 8, 4), X, X), {}, "H = 3"),
    "dtypes": ((X, X.bfloat16(), X), {}, "bfloat16"),
    "integers": ((X.int(),) * 3, {}, "int32"),
    "a kind of call": ((X, X, X), {"seed": 7}, "seed=7"),
    "scale": ((X, X, X), {"softmax_scale": -1.0}, "softmax_scale=-1.0"),
    "documents of another length": ((X, X, X), {"documents": zeros(1, 7).int()}, "(1, 7)"),
    "documents of another batch": ((X, X, X), {"documents": zeros(2, 8).int()}, "(2, 8)"),
    "documents with fewer keys": ((zeros(1, 2, 9, 4), X, X), {"documents": zeros(1, 8).int()}, "T_k=8"),
    # Fractions were rounded by triton alone, which then took two documents for one.
    **{f"documents of {x}": ((X, X, X), {"documents": zeros(1, 8).to(getattr(torch, x))}, x)
       for x in ("float32", "bool", "uint16")},
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "value"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_do_not_go_together_are_refused_with_the_value(inputs, options, value):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (its value is looked at below)
        attention(*inputs, NAIVE, **options)
    assert value in str(refused.value)
    assert "\n" not in str(refused.value)


PACK, ENDS = zeros(8, 2, 4), [0, 8]


@pytest.mark.parametrize(
    ("x", "cu_q", "cu_k", "options"),
    [
        (PACK, [0, 3, 8], ENDS, {}),
        (PACK, [0, 3, 7], [0, 3, 8], {}),
        (PACK, [0, 5, 3, 8], [0, 3, 5, 8], {}),
        (PACK, [1, 8], ENDS, {}),
        (PACK, ENDS, [0, 9], {}),
        (PACK, [ENDS], ENDS, {}),
        (PACK, [0.0, 8.0], ENDS, {}),
        (PACK[None], ENDS, ENDS, {}),
        (PACK, ENDS, ENDS, {"block_mask": ["x"]}),
    ],
)
def test_a_pack_that_does_not_add_up_is_refused(x, cu_q, cu_k, options):
    with pytest.raises(ValueError, match=r"cu_seqlens|want|block_mask"):
        attention_varlen(x, x, x, torch.tensor(cu_q), torch.tensor(cu_k), replace(NAIVE, **options))
