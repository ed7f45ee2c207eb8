"""naive is the definition, and tiled is naive. (What is broken on purpose is in test_breakit.py.)"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from model.abilities import HOPPER_FROM, resolve
from model.attention import AttentionConfig, alibi_slopes, attention, sdpa_kernel
from model.break_it import BreakIt
from model.dropout import keep_mask
from model.gpt import GPTConfig
from model.mask import tiles
from model.tiled import LOG2E, online_softmax
from tests import second
from tests.reference import (
    CASES,
    DTYPES,
    FOR_SDPA,
    SEED,
    Case,
    assert_float64_right,
    assert_within_budget,
    case_name,
    drawn,
    oracle,
    run,
)
from tests.second import FUNC, SECOND, as_heads, by_func, inside_a_graph

NAIVE, SDPA = AttentionConfig("naive"), AttentionConfig("sdpa")
TILES = [(16, 16), (32, 64), (64, 32), (128, 128)]


def tiled(block_m: int = 32, block_n: int = 32, **options) -> AttentionConfig:
    return AttentionConfig("tiled", block_m, block_n, **options)


@pytest.fixture(scope="module")
def oracles():
    """The oracle's answer to each case and dtype, computed once: its mask is drawn element by element."""
    known = {}

    def answer(case: Case, dtype: torch.dtype):
        if (case, dtype) not in known:
            inputs = case.inputs(dtype)
            known[case, dtype] = inputs, oracle(inputs, case)
        return known[case, dtype]

    return answer


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_naive_is_the_definition_in_float64(case, oracles):
    inputs, reference = oracles(case, torch.float64)
    assert_float64_right(run(inputs, case, NAIVE), reference, terms=case.T_k or case.T)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_is_the_definition_in_float64(case, oracles):
    inputs, reference = oracles(case, torch.float64)
    assert_float64_right(run(inputs, case, tiled()), reference, terms=case.T_k or case.T)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_with_keys_outside_is_the_definition_in_float64(case, oracles):
    inputs, reference = oracles(case, torch.float64)
    found = run(inputs, case, tiled(order="keys_outside"))
    assert_float64_right(found, reference, terms=case.T_k or case.T)


WAYS = [*(tiled(*tile) for tile in TILES), tiled(32, 64, order="keys_outside")]
# Pairwise: every case goes every way, every case has every dtype, and every way has every dtype.
PAIRWISE = [(case, way, DTYPES[(i + j) % 3]) for i, case in enumerate(CASES) for j, way in enumerate(WAYS)]


@pytest.mark.parametrize(
    ("case", "way", "dtype"),
    PAIRWISE,
    ids=[f"{case_name(case)}-{way.block_m}x{way.block_n}-{way.order}-{dtype}" for case, way, dtype in PAIRWISE],
)
def test_tiled_is_within_twice_naives_error_at_any_tile_size(case, way, dtype, oracles):
    inputs, reference = oracles(case, dtype)
    assert_within_budget(run(inputs, case, way), run(inputs, case, NAIVE), reference)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("order", ["queries_outside", "keys_outside"])
@pytest.mark.parametrize("case", [Case(339, 1, causal=False), Case(211, H=4, H_kv=2)], ids=case_name)
def test_gradients_in_16_bits_are_rounded_once_however_many_tiles_add_to_them(case, order, dtype):
    """Each tile's part of dv and dk, or of dq, was rounded before it was added. v = 0 makes o and delta exact."""
    inputs = case.inputs(dtype)
    inputs["v"].zero_()
    found, right = run(inputs, case, tiled(16, 16, order=order)), oracle(inputs, case)
    for name in ("dq", "dk", "dv"):
        once = torch.finfo(dtype).eps / 2 * right[name].abs()
        sums = case.T * torch.finfo(torch.float32).eps * right[name].abs().max()
        assert ((found[name].double() - right[name]).abs() <= once + sums).all(), name


@pytest.mark.parametrize("case", FOR_SDPA, ids=case_name)
def test_sdpa_means_the_same_masks_and_scale(case, oracles):
    inputs, reference = oracles(case, torch.float32)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    o = attention(q, k, v, SDPA, causal=case.causal, softmax_scale=case.softmax_scale)
    naive = run(inputs, case, NAIVE)
    assert_within_budget({"o": o}, {"o": naive["o"]}, {"o": reference["o"]})


@pytest.mark.parametrize("config", [NAIVE, tiled()], ids=["naive", "tiled"])
def test_gradients_are_the_derivatives_of_the_output(config):
    """By finite differences, which know nothing of any formula: dropout, window, grouped heads and lse included."""
    case = Case(9, 13, B=1, H=2, H_kv=1, D=4, window=6)
    inputs = [case.inputs(torch.float64)[name].requires_grad_() for name in ("q", "k", "v")]
    config = replace(config, block_m=4, block_n=4, window=6, dropout_p=0.3)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, config, seed=torch.tensor(SEED), return_lse=True), inputs
    )


@pytest.mark.parametrize("config", [NAIVE, tiled()], ids=["naive", "tiled"])
def test_rows_with_nothing_to_see_give_zero_and_no_gradient(config):
    case = Case(40, 24, B=1)  # the first 16 rows lie before the first key
    inputs = case.inputs(torch.float32)
    found = run(inputs, case, config)
    assert torch.equal(found["o"][:, :, :16], torch.zeros(1, 2, 16, 32))
    assert torch.equal(found["lse"][:, :, :16], torch.full((1, 2, 16), -torch.inf))
    assert torch.equal(found["dq"][:, :, :16], torch.zeros(1, 2, 16, 32))
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("config", [NAIVE, tiled()], ids=["naive", "tiled"])
def test_any_strides_give_the_same_bits(config):
    """Views of one interleaved projection, a broadcast gradient (stride 0, as out.sum().backward() makes it), expanded
    keys: layouts that other projects' kernels read past the end of, or copied wrongly."""
    B, T, H, D = 2, 50, 3, 16
    qkv = torch.randn(B, T, 3 * H * D + 1)[..., 1:].detach().requires_grad_()  # an odd storage offset too
    q, k, v = (x.unflatten(-1, (H, D)).transpose(1, 2) for x in qkv.split(H * D, dim=-1))
    k = k[:, :1].expand(B, H, T, D)
    plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    views = attention(q, k, v, config)
    copies = attention(*plain, config)
    assert torch.equal(views, copies)
    from_views = torch.autograd.grad(views.sum(), (q, v))
    from_copies = torch.autograd.grad(copies, (plain[0], plain[2]), torch.ones_like(copies))
    assert all(torch.equal(a, b) for a, b in zip(from_views, from_copies, strict=True))


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


def test_grouped_heads_equal_repeated_key_heads():
    case = Case(70, H=6, H_kv=2, B=1)
    inputs = case.inputs(torch.float64)
    repeated = inputs | {name: inputs[name].repeat_interleave(3, dim=1) for name in ("k", "v")}
    shared, single = run(inputs, case, tiled()), run(repeated, replace(case, H_kv=6), tiled())
    single |= {name: single[name].unflatten(1, (2, 3)).sum(2) for name in ("dk", "dv")}
    assert_float64_right(shared, single, terms=70)


def test_two_runs_give_the_same_bits():
    case = Case(130, H=4, H_kv=2, window=64, dropout_p=0.1)
    inputs = case.inputs(torch.float32)
    first, second = (run(inputs, case, tiled()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


EMPTY = {"batch": (0, 2, 8, 8), "heads": (2, 0, 8, 8), "queries": (2, 2, 0, 8), "keys": (2, 2, 8, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize(
    "config", [NAIVE, tiled(), tiled(order="keys_outside")], ids=["naive", "tiled", "keys_outside"]
)
def test_what_is_empty_passes_through_with_gradients_of_zero(config, dropout_p, shape):
    """Dropout without queries raised, and so did a call without keys."""
    B, H, T, T_k = shape
    case = Case(T, T_k, B=B, H=H, H_kv=2, D=16, dropout_p=dropout_p)
    inputs = case.inputs(torch.float32)
    found = run(inputs, case, config)
    assert not any(found[name].any() for name in ("o", "dq", "dk", "dv"))
    assert torch.equal(found["lse"], torch.full((B, H, T), -torch.inf))
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
    found = run(inputs, case, tiled(16, 16))
    assert torch.equal(found["o"], inputs["v"])
    off = 4 * found["lse"].abs().clamp(min=1).unsqueeze(-1) * torch.finfo(torch.float32).eps
    assert ((found["dv"] - inputs["do"]).abs() <= inputs["do"].abs() * (off + torch.finfo(dtype).eps)).all()
    terms = (inputs["do"].double() * inputs["v"].double()).abs().sum(-1, keepdim=True)
    ds = case.D * torch.finfo(torch.float32).eps * terms * case.D**-0.5
    assert (found["dq"].double().abs() <= ds * inputs["k"].double().abs()).all()
    assert (found["dk"].double().abs() <= ds * inputs["q"].double().abs()).all()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("config", [NAIVE, tiled(4, 4)], ids=["naive", "tiled"])
def test_products_of_q_and_k_may_leave_fp16_where_their_scores_do_not(config, sign):
    """q k^T is 102,400 here and the score 12,800: o was 0 where all products of a row were below -65,504, else NaN."""
    q, v = torch.full((1, 1, 8, 64), 40.0), torch.randn(1, 1, 8, 64).half().float()
    right, lse = attention(q, sign * q, v, NAIVE, return_lse=True)
    o, found = attention(q.half(), sign * q.half(), v.half(), config, return_lse=True)
    assert (o - right).abs().max() <= 2 * torch.finfo(torch.float16).eps * v.abs().max()
    assert torch.allclose(found, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nats", [12, 16])
def test_tiled_is_as_exact_as_torchs_flash_where_one_key_has_nearly_all_the_weight(nats, dtype):
    """There dp and delta are nearly alike, and dq is what is left of them: dp in 16 bits had 60 times torch's error."""
    inputs = Case(128, D=64).inputs(dtype)
    inputs["k"][..., 0] = 0.0
    inputs["k"][:, :, 0] = 0.0
    inputs["k"][:, :, 0, 0] = nats
    inputs["q"][..., 0] = 8.0  # sqrt(D): the score of key 0 is nats
    inputs["dlse"].zero_()
    right = oracle(inputs, Case(128, D=64))
    qkv = [inputs[name].requires_grad_() for name in "qkv"]

    def errors(o: torch.Tensor) -> list[float]:
        grads = torch.autograd.grad(o, qkv, inputs["do"])
        return [float((x - right[name]).abs().max()) for name, x in zip(("dq", "dk"), grads, strict=False)]

    flash = errors(scaled_dot_product_attention(*qkv, is_causal=True))
    found = errors(attention(*qkv, tiled(64, 64)))
    assert all(x <= 2 * torchs for x, torchs in zip(found, flash, strict=True))


@pytest.mark.parametrize("way", SECOND.values(), ids=SECOND)
def test_a_second_derivative_is_refused(way):
    """It was silently 0 where do needs no gradient, and where torch.autograd.grad asked for it alone."""
    with pytest.raises(RuntimeError, match=r"attention=tiled has no (second|forward-mode) derivative"):
        way(tiled(), *(torch.randn(1, 2, 40, 8, requires_grad=True) for _ in "qkv"))


@pytest.mark.parametrize("way", FUNC.values(), ids=FUNC)
def test_a_transform_of_torch_func_is_refused(way):
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        by_func(tiled(), way, *(torch.randn(1, 1, 8, 8) for _ in "qkv"))


@pytest.mark.parametrize("way", ["penalty", "grad of a sum", "Hessian times vector"])
def test_a_second_derivative_through_a_compiled_function_is_refused_too(way, monkeypatch):
    """Inside of the graph a penalty on the gradient of o.sum() was lost without a word."""
    monkeypatch.setattr(second, "attention", torch.compile(attention, backend="aot_eager"))
    with pytest.raises(RuntimeError, match="attention=tiled has no second derivative"):
        SECOND[way](tiled(), *(torch.randn(1, 2, 40, 8, requires_grad=True) for _ in "qkv"))


@pytest.mark.skipif(not second.REFUSED_BY_PYTORCH, reason="PyTorch before 2.13 lost it without a word")
@pytest.mark.parametrize(
    "computed", [lambda x: x.exp().sum(), as_heads(NAIVE), as_heads(tiled())], ids=["exp", "naive", "tiled"]
)
def test_a_second_derivative_is_refused_where_q_is_made_inside_of_a_compiled_graph(computed):
    """Of whatever function: the error is PyTorch's, and docs/attention.md says so."""
    with pytest.raises(RuntimeError, match=second.PYTORCH_REFUSES):
        inside_a_graph(computed)


def test_naive_has_a_second_derivative():
    inputs = [torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    assert torch.autograd.gradgradcheck(lambda *inputs: attention(*inputs, NAIVE), inputs)


def test_a_graph_of_the_backward_changes_no_gradient():
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    found = [torch.autograd.grad(attention(q, q, q, tiled()).sum(), q, create_graph=graph)[0] for graph in (0, 1)]
    assert torch.equal(*found)


@pytest.mark.parametrize("changed", ["q", "k", "v", "documents", "seed"])
def test_what_changes_in_place_before_the_backward_is_noticed(changed):
    """New documents were taken for the forward's, and the gradients were of neither."""
    inputs = {name: torch.randn(1, 2, 40, 8) for name in "qkv"}
    inputs |= {"documents": torch.arange(40)[None] // 16, "seed": torch.tensor(SEED)}
    x = torch.ones((), requires_grad=True)
    q, k, v = (x * inputs[name] for name in "qkv")
    inputs |= {"q": q, "k": k, "v": v}
    o = attention(q, k, v, tiled(dropout_p=0.1), seed=inputs["seed"], documents=inputs["documents"])
    with torch.no_grad():
        inputs[changed] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_autocast_does_not_reach_inside():
    """Float32 inputs stay float32: the caller chose their dtype, and running sums in bf16 would lose small tiles."""
    q = torch.randn(1, 2, 40, 16)
    for config in (NAIVE, tiled()):
        with torch.autocast("cpu", torch.bfloat16):
            inside = attention(q, q, q, config)
        assert torch.equal(inside, attention(q, q, q, config))


@pytest.mark.parametrize("impl", ["naive", "tiled", "sdpa"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_a_compiled_function_gives_the_same_bits_forward_and_backward(impl, contiguous):
    """tiled saved a view of a contiguous input, which PyTorch's tracing of a gradient refuses. Now it stays outside of
    the graph, as its loops would be unrolled."""
    qkv = torch.randn(3, 2, 2, 40, 16) if contiguous else torch.randn(3, 2, 40, 2, 16).transpose(2, 3)
    inputs = [x.requires_grad_() for x in qkv.unbind()]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, AttentionConfig(impl, 16, 16))

    o, found = attend(*inputs), torch.compile(attend, fullgraph=impl != "tiled", backend="aot_eager")(*inputs)
    assert torch.equal(found, o)
    grads, again = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, found))
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_dropout_draws_the_same_bits_forward_and_backward_at_any_tile_size(tile):
    definition = keep_mask(torch.tensor(SEED), 2, range(100), range(100), 0.3)
    for config in (NAIVE, tiled(*tile)):
        found = drawn(config, 100, 0.3)
        assert all(torch.equal(mask, definition) for mask in found.values())


def test_no_seed_means_no_dropout():
    q = torch.randn(1, 2, 40, 16)
    for config in (NAIVE, tiled()):
        assert torch.equal(attention(q, q, q, replace(config, dropout_p=0.5)), attention(q, q, q, config))


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, the backward's included."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                # of the storage: a broadcast view of a small tensor has T x T elements and costs nothing
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest_tensor(config: AttentionConfig, T: int, D: int) -> int:
    q, k, v = torch.randn(3, 1, 1, T, D).requires_grad_().unbind()
    with Largest() as seen:
        attention(q, k, v, config, seed=torch.tensor(1)).sum().backward()
    return seen.elements


def test_tiled_never_allocates_a_tensor_of_t_by_t():
    T, D = 1024, 16
    inputs = 3 * T * D  # q, k and v lie in one tensor here, and so do their gradients
    assert largest_tensor(tiled(64, 64, dropout_p=0.1), T, D) <= inputs < T * T
    assert largest_tensor(replace(NAIVE, dropout_p=0.1), T, D) >= T * T  # the instrument sees one where there is one


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


def cat() -> list[torch.Tensor]:
    return [torch.tensor(CAT[name], dtype=torch.float64).view(1, 1, 5, 4) for name in ("q", "k", "v")]


def to_four_places(x: torch.Tensor) -> list:
    return (
        [[round(value, 4) for value in row] for row in x.tolist()] if x.ndim == 2 else [round(v, 4) for v in x.tolist()]
    )


@pytest.mark.parametrize("config", [NAIVE, tiled(2, 2)], ids=["naive", "tiled"])
def test_worked_example_output(config):
    q, k, v = cat()
    assert to_four_places(attention(q, k, v, config, causal=False)[0, 0]) == CAT_OUTPUT


@pytest.mark.parametrize("config", [NAIVE, tiled(2, 2)], ids=["naive", "tiled"])
def test_worked_example_weights(config):
    q, k, _ = cat()
    # with the identity for v the output is the weights; D must agree, so q and k get a fifth column of zeros
    q, k = (torch.nn.functional.pad(x, (0, 1)) for x in (q, k))
    identity = torch.eye(5, dtype=torch.float64).view(1, 1, 5, 5)
    weights = attention(q, k, identity, config, causal=False, softmax_scale=0.5)
    assert to_four_places(weights[0, 0]) == CAT_WEIGHTS


def test_worked_example_running_maximum_and_sum():
    q, k, _ = (x[0] for x in cat())
    m, l = torch.full((1, 5, 1), -torch.inf, dtype=torch.float64), torch.zeros(1, 5, 1, dtype=torch.float64)
    for columns in tiles(5, 2):
        s = q @ k[:, columns.start : columns.stop].mT * 0.5 * LOG2E
        _, m, l, _ = online_softmax(s, m, l)
    assert to_four_places(m.flatten() / LOG2E) == CAT_M  # inside, maxima are in base 2
    assert to_four_places(l.flatten()) == CAT_L


@pytest.mark.parametrize("config", [NAIVE, tiled(2, 2)], ids=["naive", "tiled"])
def test_worked_example_lse(config):
    lse = attention(*cat(), config, causal=False, return_lse=True)[1].flatten()
    for found, m, l in zip(lse.tolist(), CAT_M, CAT_L, strict=True):
        # l is known to half of its last place
        assert math.log(l - 5e-5) <= found - m <= math.log(l + 5e-5)


def test_worked_example_score_matrix_bytes():
    """8,192 tokens in float32: 268,435,456 bytes for one head's scores. Counted on tensors without storage."""
    with FakeTensorMode(), Largest() as seen:
        q = torch.empty(1, 1, 8192, 64)
        attention(q, q, q, NAIVE)
    assert seen.elements * 4 == 268_435_456


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((8, 4), (8, 4), (8, 4)), "want q"),
        (((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 9, 4)), "k, v both"),
        (((1, 2, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)), "batch and head size"),
        (((1, 2, 8, 4), (1, 2, 8, 8), (1, 2, 8, 8)), "batch and head size"),
        (((1, 3, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "H = 3 .* H_kv = 2"),
    ],
)
def test_shapes_that_do_not_go_together_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes), NAIVE)


def test_dtypes_that_do_not_go_together_are_named():
    q = torch.zeros(1, 1, 8, 4)
    with pytest.raises(ValueError, match=r"float32, k torch.bfloat16"):
        attention(q, q.bfloat16(), q, NAIVE)
    with pytest.raises(ValueError, match="one floating-point dtype"):
        attention(q.int(), q.int(), q.int(), NAIVE)


def test_what_sdpa_lacks_is_refused():
    q = torch.zeros(1, 1, 8, 4)
    with pytest.raises(ValueError, match="window"):
        attention(q, q, q, replace(SDPA, window=4))
    with pytest.raises(ValueError, match="lse"):
        attention(q, q, q, SDPA, return_lse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "flash"}, "impl=flash.*auto, naive, tiled"),
        ({"block_m": 0}, "block_m=0"),
        ({"block_n": -1}, "block_n=-1"),
        ({"window": 0}, "window=0.*at least 1"),
        ({"dropout_p": 1.0}, "dropout_p=1.0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


@pytest.mark.parametrize(("capability", "special"), [((9, 0), "triton"), ((7, 5), "tiled")])
def test_auto_is_resolved_once_and_never_to_what_lacks_something(monkeypatch, capability, special):
    pytest.importorskip("triton", reason="triton is made for Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    auto = AttentionConfig("auto")
    assert resolve(auto, "cuda").impl == "sdpa"
    assert resolve(auto, "cpu").impl == "tiled"
    assert resolve(replace(auto, window=8), "cuda").impl == special
    assert resolve(auto, "cuda", lse=True).impl == special
    assert resolve(replace(auto, dropout_p=0.1), "cuda").impl == special
    assert resolve(auto, "cuda", BreakIt("no_max")).impl == special
    assert resolve(replace(auto, order="keys_outside"), "cuda").impl == "tiled"


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({}, "triton"),
        ({"context_length": min(HOPPER_FROM.values()) // 2}, "sdpa"),
        ({"n_head": 1, "n_kv_head": 1}, "triton"),
        ({"n_head": 1, "n_kv_head": 1, "context_length": 4096}, "sdpa"),
        ({"n_head": 4, "n_kv_head": 4}, "sdpa"),  # a head size that these kernels lack
        ({"dtype": torch.float32}, "sdpa"),
        ({"capability": (8, 0)}, "sdpa"),
        ({"kernel": "portable"}, "triton"),
    ],
    ids=str,
)
def test_auto_takes_hoppers_kernels_where_they_were_measured_to_be_faster(changed, chosen, monkeypatch):
    hopper = pytest.importorskip("kernels.hopper", reason="triton is made for Linux")
    monkeypatch.setattr(hopper, "lacks_here", hopper.lacks_here.__wrapped__)  # not the cache, which other tests read
    given = {"context_length": 65_536, "n_head": 2, "n_kv_head": 2, "dtype": torch.bfloat16, "capability": (9, 0)}
    given |= changed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    sizes = {name: given[name] for name in ("context_length", "n_head", "n_kv_head")}
    auto, model = AttentionConfig("auto", kernel=given.get("kernel", "auto")), GPTConfig(n_embd=128, **sizes)
    try:
        found = resolve(auto, "cuda", model=model, dtype=given["dtype"]).impl
    except ValueError as error:
        found = str(error)
    assert found.startswith(chosen)


def test_triton_where_it_cannot_run_is_refused(monkeypatch):
    sizes = pytest.importorskip("kernels.sizes", reason="triton is made for Linux")
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"attention\.impl=triton: its kernels run on a GPU, not on cpu; use .*tiled"):
        resolve(AttentionConfig("triton"), "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"attention\.impl=triton: wants Ampere or newer, not Tesla T4"):
        resolve(AttentionConfig("triton"), "cuda")
    monkeypatch.setitem(sys.modules, "kernels.op", None)
    with pytest.raises(ValueError, match=r"attention\.impl=triton: .*kernels.op.*use attention=tiled"):
        resolve(AttentionConfig("triton"), "cuda")


def test_impl_auto_at_the_door_and_what_sdpa_lacks_are_refused():
    auto = AttentionConfig("auto")
    with pytest.raises(ValueError, match=r"attention\.impl=auto"):
        attention(*torch.zeros(3, 1, 1, 8, 4), auto)
    with pytest.raises(ValueError, match=r"window=8: sdpa has nothing of the kind.*tiled"):
        resolve(AttentionConfig("sdpa", window=8), "cuda")


@pytest.mark.parametrize(("dropout_p", "kernel"), [(0.0, "flash"), (0.1, "math")])
def test_the_kernel_that_torch_picks_has_a_name(dropout_p, kernel):
    model = GPTConfig(n_head=4, n_kv_head=2, n_embd=128, context_length=64)
    assert sdpa_kernel(model, torch.float32, torch.device("cpu"), dropout_p) == kernel
