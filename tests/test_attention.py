"""The properties of attention, each once, over all implementations that have it.

naive is the definition in float64, and the others are within twice naive's error. What only the kernels have is in
tests/test_flash.py, what only a GPU shows in tests/test_gpu.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from model import attention as attention_module
from model.attention import HOPPER_FROM, AttentionConfig, alibi_slopes, attention, flash_attention, resolve
from model.break_it import BreakIt
from model.dropout import keep_mask
from model.mask import spans_of
from tests.implementations import CUDA, DEVICE, HALVES, NAIVE, ROWS, SDPA, TILED, over, param, sized
from tests.reference import CASES, DTYPES, FOR_SDPA, SEED, Case, case_name, oracle, run

# isort: split
from tests.reference import assert_float64_right, assert_within_budget

__all__ = ["sized"]  # a fixture
# NumPy's warning in Triton's interpreter about log(0) of a row that sees nothing, which is -inf on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
OURS = over("naive", "tiled", "triton")
EVERY = over("naive", "tiled", "triton", "sdpa")
FLASH = over("tiled", "triton")


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


# --- exactness -------------------------------------------------------------------------------------------------------

SIZES = [(32, 32), (16, 48), (96, 96), (50, 7)]
OF_KERNELS = [(64, 64), (128, 128), (32, 128), (128, 32)]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_naive_and_tiled_are_the_definition_in_float64(case, sized):
    inputs = case.inputs(torch.float64)
    right = oracle(inputs, case)
    for config in (NAIVE, *(sized(TILED, *size) for size in SIZES)):
        assert_float64_right(run(inputs, case, config), right, terms=case.keys + case.D)


def draws(case: Case, dtype: torch.dtype, device: str) -> list[dict[str, Tensor]]:
    """Several draws of the inputs: in one draw of float32 the error of a few rows may happen to be small, and which
    draw that is depends on the processor."""
    return [case.inputs(dtype, device, seed) for seed in range(8 if dtype == torch.float32 else 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_is_within_twice_naives_error_at_any_tile_size(case, dtype, sized):
    number, inputs = CASES.index(case) + DTYPES.index(dtype), draws(case, dtype, "cpu")
    sizes = SIZES[number % 4], SIZES[(number + 1) % 4]
    found = [run(x, case, sized(TILED, *sizes[i % 2])) for i, x in enumerate(inputs)]
    assert_within_budget(found, [run(x, case, NAIVE) for x in inputs], [oracle(x, case) for x in inputs])


@pytest.mark.parametrize("case", FOR_SDPA, ids=case_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_naive_is_as_exact_as_torchs_own_and_means_the_same(dtype, case):
    """What naive rounds more than torch would be in every other budget. (Torch's own may round more than naive, and in
    float32 does on some processors.)"""
    inputs = draws(case, dtype, DEVICE)
    for x in inputs:
        x["dlse"].zero_()  # sdpa has no lse
    by_torch, naive = ([run(x, case, config) for x in inputs] for config in (SDPA, NAIVE))
    right = [oracle(x, case) for x in inputs]
    assert_within_budget([{name: x[name] for name in by_torch[0]} for x in naive], by_torch, right)
    if dtype != torch.float32:
        assert_within_budget(by_torch, naive, right)
    for x, r in zip(by_torch, right, strict=True):
        assert_float64_right(x, {name: r[name] for name in x}, terms=case.keys + case.D)


@FLASH
@pytest.mark.parametrize("alone", ["o", "lse"])
def test_the_gradient_of_o_or_of_lse_alone_is_right(row, alone):
    """Then no gradient of the other one comes at all."""
    case = Case(70, 90, B=1, H_kv=1)
    inputs = case.inputs(row.dtypes[0], row.device)
    inputs["do" if alone == "lse" else "dlse"].zero_()
    q, k = (inputs[name].detach().requires_grad_() for name in "qk")
    output = attention(q, k, inputs["v"], row.config, return_lse=True)[alone == "lse"]
    gradient = inputs["dlse" if alone == "lse" else "do"]
    found = dict(zip(("dq", "dk"), torch.autograd.grad(output, (q, k), gradient), strict=True))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


@OURS
def test_rows_that_see_no_key_give_zero_and_no_gradient(row):
    case = Case(40, 24, B=1)  # the first 16 rows are before the first key
    found = run(case.inputs(row.dtypes[0], row.device), case, row.config)
    for name, nothing in (("o", 0.0), ("lse", -torch.inf), ("dq", 0.0)):
        assert (found[name][:, :, :16] == nothing).all(), name
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [Case(1, B=3), Case(70, window=1)], ids=case_name)
def test_a_row_that_sees_one_key_copies_its_value_and_moves_no_score(case, dtype):
    """Its weight is 1, so o = v and dv = do. dq and dk are differences of two equal sums of D products, so only the
    rounding of float32 sums is left: D eps sum |do v|, times the key. (A budget by max |reference| would be 0.)"""
    inputs = case.inputs(dtype) | {"dlse": torch.zeros(case.B, case.H, case.T)}
    found = run(inputs, case, replace(TILED, block_m=16, block_n=16))
    assert torch.equal(found["o"], inputs["v"])
    eps = torch.finfo(torch.float32).eps
    # The backward's weight is exp2(s - lse2). lse2 is off by half its eps, which moves the weight by |lse| eps / 2, and
    # exp2 by one eps at most. The rest is the rounding of dv to its dtype.
    off = 2 * found["lse"].abs().clamp(min=1)[..., None] * eps + torch.finfo(dtype).eps
    assert ((found["dv"] - inputs["do"]).abs() <= inputs["do"].abs() * off).all()
    ds = case.D**0.5 * eps * (inputs["do"].double() * inputs["v"].double()).abs().sum(-1, keepdim=True)
    assert (found["dq"].double().abs() <= ds * inputs["k"].double().abs()).all()
    assert (found["dk"].double().abs() <= ds * inputs["q"].double().abs()).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("zero", "name"), [("q", "dq"), ("k", "dk")])
def test_tileds_gradients_in_16_bits_are_rounded_once_however_many_tiles_add_to_them(zero, name, dtype):
    """All scores and v are 0, so p = 1 / 256 and ds = p dlse are exact in 16 bits."""
    case = Case(256, causal=False)
    inputs = case.inputs(dtype)
    inputs["v"].zero_(), inputs[zero].zero_(), inputs["dlse"].fill_(1.0)
    found, right = run(inputs, case, replace(TILED, block_m=16, block_n=16)), oracle(inputs, case)
    for gradient in (name, "dv"):
        once = torch.finfo(dtype).eps / 2 * right[gradient].abs()
        sums = case.T * torch.finfo(torch.float32).eps * right[gradient].abs().max()
        assert ((found[gradient].double() - right[gradient]).abs() <= once + sums).all(), gradient


@pytest.mark.parametrize("sign", [-1, 1])
@OURS
def test_products_of_q_and_k_may_leave_fp16_where_their_scores_do_not(row, sign):
    """q k^T is 102,400 here and the score 12,800; fp16 ends at 65,504."""
    q, v, found = torch.full((1, 1, 8, 64), 40.0), torch.randn(1, 1, 8, 64).half(), []
    for config, dtype in ((row.config, torch.float16), (NAIVE, torch.float32), (NAIVE, torch.float64)):
        o, lse = attention(*(x.to(row.device, dtype) for x in (q, sign * q, v)), config, return_lse=True)
        found.append({"o": o, "lse": lse})
    assert_within_budget(*found)


@pytest.mark.parametrize(
    ("places", "same_values"), [([70], False), ([70, 71], True), ([5, 140], False), ([140, 5], True)], ids=str
)
@FLASH
def test_keys_that_dominate_are_weighed_exactly(row, places, same_values, sized):
    """Keys at `places` with scores far above the others, in one tile or two, the later ones in earlier tiles."""
    case = Case(200, B=1, softmax_scale=1.0)
    config, dtype = sized(row.config, 64, 64), HALVES[same_values]
    for above in (8.0, 16.0, 30.0):
        inputs = case.inputs(dtype)
        inputs["q"], inputs["k"] = inputs["q"] * 0.05, inputs["k"] * 0.05
        inputs["q"][..., 0], inputs["k"][..., 0] = 1, 0
        for number, place in enumerate(places):
            inputs["k"][..., place, 0] = above + number / 8
            if same_values:
                inputs["v"][..., place, :] = inputs["v"][..., places[0], :]
        inputs = {name: x.to(row.device) for name, x in inputs.items()}
        # o, lse and dv: for dq and dk it is the rounding of o, in delta, that decides.
        found = {name: x for name, x in run(inputs, case, config).items() if name in ("o", "lse", "dv")}
        assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))
    if same_values:  # the others have a weight of 1e-13
        rows = found["o"][:, :, max(places) :]
        assert torch.equal(rows, inputs["v"][:, :, places[:1]].expand_as(rows))


# --- the same bits ---------------------------------------------------------------------------------------------------


@OURS
def test_two_runs_give_the_same_bits_whatever_torchs_default_dtype_is(row):
    case, found = Case(40, B=1, H=16, H_kv=1, D=16, window=30, dropout_p=0.1, alibi=True), []
    inputs = case.inputs(row.dtypes[0], row.device)
    for default in (torch.bfloat16, torch.float64):
        alibi_slopes.cache_clear()
        torch.set_default_dtype(default)
        try:
            found.append(run(inputs, case, row.config))
        finally:
            torch.set_default_dtype(torch.float32)
    assert same_bits(*found)


LAYOUTS = {
    "odd offset": lambda x: pad(x.flatten(), (1, 0))[1:].view(x.shape),  # rows do not begin at multiples of 16 bytes
    "odd rows": lambda x: pad(x, (0, 1))[..., :-1],
    "columns first": lambda x: x.mT.contiguous().mT,
    "interleaved": lambda x: pad(x.transpose(1, 2), (0, 0, 0, 2)).transpose(1, 2)[:, :-2],  # as a projection has them
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),  # the gradient of out.sum()
}


def assert_the_same(inputs: dict[str, Tensor], plain: dict[str, Tensor], case: Case, config: AttentionConfig) -> None:
    """The results of equal numbers in two layouts. Kernels give the same bits; torch's products add up in another
    order, and in float64 that is far less than any other number would change."""
    found, right = run(inputs, case, config), run(plain, case, config)
    assert config.impl != "triton" or same_bits(found, right)
    assert_float64_right(found, right, terms=case.keys + case.D)


def of_layouts(row) -> tuple[Case, dict[str, Tensor]]:
    case = Case(50, 70, H_kv=1, D=24)
    return case, case.inputs(row.dtypes[0 if row.name == "triton" else -1], row.device)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@OURS
def test_any_strides_give_the_same(row, layout):
    case, inputs = of_layouts(row)
    inputs = {name: layout(x) if x.ndim == 4 else x for name, x in inputs.items()}
    plain = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
    assert_the_same(inputs, plain, case, row.config)


@OURS
def test_what_lies_around_the_tensors_does_not_leak_in(row):
    """Rows before and after, and the columns between D and its power of two, are full of NaN; 0 * NaN is NaN."""
    case, inputs = of_layouts(row)
    guarded = dict(inputs)
    for name in ("q", "k", "v", "do"):
        x = inputs[name]
        around = x.new_full((*x.shape[:2], x.shape[2] + 128, case.D + 8), torch.nan)
        guarded[name] = around[:, :, 64:-64, : case.D]
        guarded[name].copy_(x)
    assert_the_same(guarded, inputs, case, row.config)


@EVERY
def test_autocast_does_not_reach_inside(row):
    """Sums in bf16 would lose small tiles."""
    q = torch.randn(1, 2, 40, 64).to(row.device).requires_grad_()
    with torch.autocast(row.device, torch.bfloat16):
        inside = attention(q, q, q, row.config)
        found = torch.autograd.grad(inside, q, q, retain_graph=True)[0]
    assert torch.equal(inside, attention(q, q, q, row.config))
    if row.name != "naive":  # torch's own products, whose backward is not ours
        assert torch.equal(found, torch.autograd.grad(inside, q, q)[0])


# --- dropout ---------------------------------------------------------------------------------------------------------


def masks(config: AttentionConfig, T: int, dropout_p: float, device: str) -> dict[str, Tensor]:
    """The keep masks, bool (2, T, T), as the forward, dv and dq have them, for two heads.

    All scores are 0, so every weight is 1 / T. With the identity for v and do, o and dv show Z p. With ones for v do^T
    and the identity for k, dq shows ds = p (Z - delta). delta, the mean of Z over the row, lies between 0 and the Z of
    a kept weight, so ds is negative for a dropped one.
    """
    eye, zero = (x.to(device, torch.bfloat16).expand(1, 2, T, T) for x in (torch.eye(T), torch.zeros(T, T)))
    one = pad(zero[..., 1:], (1, 0), value=1.0)
    config = replace(config, dropout_p=dropout_p, softmax_scale=1.0)
    options = {"causal": False, "seed": torch.tensor(SEED, device=device)}
    q, v = zero.clone().requires_grad_(), eye.clone().requires_grad_()
    o = attention(zero, zero, v, config, **options)
    (dv,) = torch.autograd.grad(o, v, eye)
    (dq,) = torch.autograd.grad(attention(q, eye, one, config, **options), q, one)
    return {"o": o != 0, "dv": dv.mT != 0, "dq": dq >= 0}


DRAWN = [(row, size) for row in ROWS if row.name in ("tiled", "triton") for size in OF_KERNELS[:3]]
DRAWN += [(row, (16, 48)) for row in ROWS if row.name in ("naive", "tiled")]


@pytest.mark.parametrize(("row", "size"), [param(*drawn) for drawn in DRAWN])
def test_dropout_has_the_bits_of_the_definition_forward_and_backward_at_any_tile_size(row, size, sized):
    T = 100
    definition = keep_mask(torch.tensor(SEED), 2, range(T), range(T), 0.3)
    found = masks(sized(row.config, *size), T, 0.3, row.device)
    assert [name for name, mask in found.items() if not torch.equal(mask[0].cpu(), definition)] == []


@EVERY
def test_no_seed_means_no_dropout(row):
    q = torch.randn(1, 2, 40, 64).to(row.device)
    assert torch.equal(attention(q, q, q, replace(row.config, dropout_p=0.5)), attention(q, q, q, row.config))


# --- autograd and torch.compile --------------------------------------------------------------------------------------


@EVERY
def test_a_compiled_function_gives_the_same_bits_forward_and_backward(row):
    qkv = torch.randn(3, 2, 40, 2, 64).transpose(2, 3)
    inputs = [x.to(row.device).requires_grad_() for x in qkv.unbind()]
    seed = torch.tensor(SEED, device=row.device)
    config = row.config if row.name == "sdpa" else replace(row.config, window=30, dropout_p=0.2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, config, seed=seed)

    torch.compiler.reset()
    inductor = CUDA and row.name != "naive"  # which adds up naive's rows in another order
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if inductor else "aot_eager")
    o, found = attend(*inputs), compiled(*inputs)
    assert torch.equal(found, o)
    grads, again = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, found))
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


@pytest.mark.parametrize("D", [16, 20])  # rows of 20 numbers in 16 bits are no multiple of 16 bytes
@FLASH
def test_the_op_is_registered_as_torch_wants_it(row, D, monkeypatch):
    """Its schema, and that its fake has the shapes and strides of what it returns."""
    q = torch.randn(1, 2, 40, D, device=row.device, dtype=torch.bfloat16, requires_grad=True)
    spans, given = spans_of(torch.arange(40, device=row.device)[None] // 15), []
    monkeypatch.setattr(attention_module, "flash_attention", lambda *args: given.append(args) or flash_attention(*args))
    config, seed = replace(row.config, dropout_p=0.3, alibi=True), torch.tensor(SEED, device=row.device)
    attention(q, q, q, config, seed=seed, spans=spans)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(flash_attention, given[0], test_utils=tests)


@FLASH
def test_a_second_derivative_is_refused(row):
    """It would be wrong without a word otherwise: the backward is no function that autograd can differentiate."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=row.device, requires_grad=True) for _ in "qkv")
    for power in (1, 2):
        with pytest.raises(RuntimeError, match="naive"):
            torch.autograd.grad(attention(q, k, v, row.config).pow(power).sum(), q, create_graph=True)


def test_naive_has_a_second_derivative():
    inputs = [torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    assert torch.autograd.gradgradcheck(lambda *inputs: attention(*inputs, NAIVE), inputs)


@pytest.mark.parametrize("changed", ["q", "k", "v", "spans", "seed"])
@FLASH
def test_what_changes_in_place_before_the_backward_is_noticed(row, changed):
    one = torch.ones((), device=row.device, requires_grad=True)
    inputs = {name: one * torch.randn(1, 2, 8, 16, device=row.device) for name in "qkv"}
    inputs |= {"spans": spans_of(torch.arange(8, device=row.device)[None] // 4)}
    inputs |= {"seed": torch.tensor(SEED, device=row.device)}
    o = attention(**inputs, config=replace(row.config, dropout_p=0.1))
    with torch.no_grad():
        inputs[changed] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# --- what runs where, and what is refused ----------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


X = zeros(1, 2, 8, 4)
REFUSED = {  # inputs, options of the configuration, arguments of attention(), what the message names
    "no batch": ((zeros(8, 4),) * 3, {}, {}, "(8, 4)"),
    "k and v": ((X, X, zeros(1, 2, 9, 4)), {}, {}, "(1, 2, 9, 4)"),
    "batches": ((X, zeros(2, 2, 8, 4), zeros(2, 2, 8, 4)), {}, {}, "(2, 2, 8, 4)"),
    "head sizes": ((X, zeros(1, 2, 8, 8), zeros(1, 2, 8, 8)), {}, {}, "(1, 2, 8, 8)"),
    "heads": ((zeros(1, 3, 8, 4), X, X), {}, {}, "3"),
    "no queries": ((zeros(1, 2, 0, 4), X, X), {}, {}, "(1, 2, 0, 4)"),
    "dtypes": ((X, X.bfloat16(), X), {}, {}, "bfloat16"),
    "documents of another length": ((X, X, X), {}, {"spans": zeros(1, 7, 2).int()}, "(1, 7, 2)"),
    "documents with fewer keys": ((zeros(1, 2, 9, 4), X, X), {}, {"spans": zeros(1, 8, 2).int()}, "(1, 8, 2)"),
    "documents of floats": ((X, X, X), {}, {"spans": zeros(1, 8, 2)}, "float32"),
    "documents by number": ((X, X, X), {}, {"spans": zeros(1, 8).int()}, "spans_of"),
    "a number as seed": ((X, X, X), {}, {"seed": 5}, "seed=5"),
    "a seed of 32 bits": ((X, X, X), {}, {"seed": zeros(dtype=torch.int32)}, "int32"),
    "a seed of floats": ((X, X, X), {}, {"seed": zeros()}, "seed=tensor(0.)"),
    "a row of seeds": ((X, X, X), {}, {"seed": zeros(1, dtype=torch.int64)}, "seed=tensor([0])"),
    "a seed elsewhere": ((X, X, X), {}, {"seed": torch.zeros((), dtype=torch.int64, device="meta")}, "cpu"),
    "a small picture": ((X, X, X), {"block_mask": ["x"], "block_mask_size": 7}, {}, "7 tokens of 8"),
    "auto": ((X, X, X), {"impl": "auto"}, {}, "auto"),
    "lse of sdpa": ((X, X, X), {"impl": "sdpa"}, {"return_lse": True}, "lse"),
    "triton in float64": ((X.double(),) * 3, {"impl": "triton"}, {}, "float64"),
    "triton with wide heads": ((zeros(1, 1, 8, 257),) * 3, {"impl": "triton"}, {}, "257"),
}


@pytest.mark.parametrize(("inputs", "config", "options", "value"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_the_value(inputs, config, options, value):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (its value is looked at below)
        attention(*inputs, AttentionConfig(**{"impl": "naive"} | config), **options)
    assert value in str(refused.value)


OF_MASK_AND_SCORE = {
    "window": 4, "documents": True, "block_mask": ["x"], "softcap": 5.0, "alibi": True, "windows": [4, None]
}  # fmt: skip


@pytest.mark.parametrize("option", OF_MASK_AND_SCORE)
def test_sdpa_refuses_what_it_lacks_and_auto_takes_another(option, monkeypatch):
    config = replace(SDPA, **{option: OF_MASK_AND_SCORE[option]})
    spans = zeros(1, 8, 2).int() if option == "documents" else None
    with pytest.raises(ValueError, match=option):
        attention(X, X, X, config.layer(0), spans=spans)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for runs, ours in ((True, "triton"), (False, "tiled")):
        monkeypatch.setattr(attention_module, "runs_kernels", lambda device, runs=runs: runs)
        assert resolve(replace(config, impl="auto"), "cuda", 64).impl == ours


def test_auto_takes_the_fastest_implementation_that_has_all_options(monkeypatch):
    """tiled on a CPU, for reading. On a GPU sdpa; but triton for sampling (T is None), dropout and failures, and for
    training from a measured length on."""
    auto, capability, kernels = AttentionConfig("auto"), [(9, 0)], [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(attention_module, "runs_kernels", lambda device: kernels[0])
    assert resolve(NAIVE, "cuda", 64, 10**6).impl == "naive"
    assert resolve(auto, "cpu", 64, 10**6).impl == "tiled"
    assert resolve(auto, "cuda", 64).impl == "triton"
    assert resolve(replace(auto, dropout_p=0.1), "cuda", 64, 8).impl == "triton"
    assert resolve(auto, "cuda", 64, 8, BreakIt("no_max")).impl == "triton"
    for D, T in HOPPER_FROM.items():
        assert [resolve(auto, "cuda", D, length).impl for length in (T - 1, T)] == ["sdpa", "triton"]
    assert resolve(auto, "cuda", 80, 10**6).impl == "sdpa"
    capability[0] = (8, 0)
    assert resolve(auto, "cuda", 64, 10**6).impl == "sdpa"
    capability[0], kernels[0] = (9, 0), False
    assert [resolve(auto, "cuda", 64, T).impl for T in (None, 10**6)] == ["sdpa", "sdpa"]
