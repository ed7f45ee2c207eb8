"""Each failure of break_it fails in the way and by the amount that theory predicts, and only where it does."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from lab.panels import tied_errors
from model.abilities import ABILITIES, check_switches
from model.attention import AttentionConfig, attention, attention_varlen
from model.break_it import FAILURES, PARTS, SWITCHES, UNBROKEN, BreakIt, of_older
from model.gpt import GPTConfig
from model.recompute import RecomputingGPT
from tests.reference import (
    FLAT_ROWS,
    SEED,
    Case,
    assert_flat_row,
    assert_float64_right,
    assert_within_budget,
    error,
    largest,
    oracle,
    run,
    sees,
    table,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of Triton's interpreter
NAIVE, NO_MAX, NO_SCALE, LOCAL = AttentionConfig("naive"), BreakIt("no_max"), BreakIt("no_scale"), BreakIt("local_mask")
TILED = AttentionConfig("tiled", 32, 32)
LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72
WANTS_INTERPRETER = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="wants the interpreter; test_gpu.py has a GPU's"
)
TRITON = pytest.param("triton", marks=WANTS_INTERPRETER)
Made = Callable[..., AttentionConfig]
ORDERS = {"naive": [{}], "tiled": [{}, {"order": "keys_outside"}], "triton": [{}], "sdpa": [{}]}


@pytest.fixture
def made(monkeypatch) -> Made:
    """made(impl, M, N): the implementation in tiles of M x N. Triton, too, in tiles of 32 and more."""

    def made(impl: str, M: int = 32, N: int = 32, **options) -> AttentionConfig:
        if impl == "triton":
            from kernels import sizes

            M, N = max(32, M), max(32, N)
            monkeypatch.setattr(sizes, "tiles_for", lambda *_: sizes.Tiles(M, N, 4, 1))
        return AttentionConfig(impl, M, N, **options)

    return made


def qkv(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[name] for name in "qkv"]


def assert_predicted(config: AttentionConfig, case: Case, failure: str, predict: Callable) -> None:
    """o is predict(inputs). Of triton, which has no float64, within twice the error of tiled with the same failure."""
    inputs = case.inputs(torch.float32 if config.impl == "triton" else torch.float64)
    o, of_tiled = (
        attention(*qkv(inputs), replace(config, impl=impl), break_it=BreakIt(failure))
        for impl in (config.impl, "tiled")
    )
    predicted = predict({name: x.double() for name, x in inputs.items()})
    if config.impl == "triton":
        assert_within_budget({"o": o}, {"o": of_tiled}, {"o": predicted})
    else:
        assert_float64_right({"o": o}, {"o": predicted}, terms=case.T_k or case.T)
    assert error(o, oracle(inputs, case)["o"]) > 0.1 * largest(o)


# --- each failure ----------------------------------------------------------------------------------------------------


def one_big_score(score: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v (1, 1, 64, 16) with softmax_scale 1: every score is 0 but that of row 63 and key 40, which is `score`."""
    q, k = torch.zeros(2, 1, 1, 64, 16)
    q[0, 0, 63, 0], k[0, 0, 40, 0] = 1.0, score
    # Values of at most 1: the weights overflow at the limit, their product with a larger value a little before it.
    return [q.to(dtype), k.to(dtype), torch.empty(1, 1, 64, 16).uniform_(-1, 1).to(dtype)]


def without_the_maximum(impl: str, made: Made) -> None:
    """NaN comes once a score passes the limit, and not before; sums and 16-bit weights overflow earlier."""
    for score, finite in ((LIMIT - 0.01, True), (LIMIT + 0.01, False), (200.0, False)):
        q, k, v = one_big_score(score)
        o = attention(q, k, v, made(impl), softmax_scale=1.0, break_it=NO_MAX)[0, 0]
        assert o[:63].isfinite().all()  # these rows never see the score
        if finite:  # its weight is 1: e^88.7 stands against 63 ones. To multiply by e^88.7 and divide rounds twice. The
            # kernels multiply by 1 / l, a subnormal number: it is a multiple of 2**-149, so off by half of that.
            error = torch.finfo(v.dtype).eps + (2**-150 * math.exp(score) if impl == "triton" else 0.0)
            assert ((o[63] - v[0, 0, 40]).abs() <= error * v[0, 0, 40].abs()).all()
        else:
            assert o[63].isnan().all()
    for keys, score, v, of_naive, of_others in FLAT_ROWS:
        assert_flat_row(impl, keys, score, v, of_naive if impl == "naive" else of_others)
    for score in (11.0, 11.2):  # log of 65,504 is 11.09. naive divides before it rounds.
        o = attention(*one_big_score(score, torch.float16), made(impl), softmax_scale=1.0, break_it=NO_MAX)
        assert o[0, 0, 63].isfinite().all() == (impl == "naive" or score < 11.1)


def broken_rescale(inputs, case: Case, block_n: int, failure: str) -> torch.Tensor:
    """What the theory says comes out: each tile's weights against the maximum of the tiles up to it, never corrected
    (or only the sum, or only the output). Float64, without any running quantity."""
    q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
    s = (q @ k.mT * case.D**-0.5).masked_fill(torch.ones(case.T, case.T).triu(1).bool(), -torch.inf)
    final = s.amax(-1, keepdim=True)
    top = bottom = 0.0
    for j in range(0, case.T, block_n):
        s_j = s[..., j : j + block_n]
        m_j = s[..., : j + block_n].amax(-1, keepdim=True)
        top = top + torch.exp(s_j - (final if failure == "no_rescale_sum" else m_j)) @ v[..., j : j + block_n, :]
        bottom = bottom + torch.exp(s_j - (final if failure == "no_rescale_output" else m_j)).sum(-1, keepdim=True)
    return top / bottom


def without_the_rescaling(failure: str, impl: str, made: Made) -> None:
    """o is finite and wrong by just what was left out."""
    case = Case(128, D=32, sigma=2.0, B=1)
    assert_predicted(made(impl), case, failure, lambda inputs: broken_rescale(inputs, case, 32, failure))


def from_zero(impl: str, made: Made) -> None:
    """Rows whose scores underflow are lost, and not before. exp(-87.3) is the smallest normal float32, and exp(-103.98)
    half of the smallest of all. lse = -86 is rounded, and both take their weights from it: so tiled without the failure
    stands in for naive. Between the two, a row is divided by the smallest normal number."""
    case, broken = Case(50, D=16, B=1, softmax_scale=1.0), BreakIt("zero_init_max")
    for score, order in product((-86.0, -104.0, -200.0), ORDERS[impl]):
        inputs = case.inputs(torch.float32)
        inputs["q"].zero_()[..., 0] = 1.0
        inputs["k"][..., 0] = score  # all of them
        config = made(impl, **order)
        found = run(inputs, case, config, break_it=broken)
        if score == -86.0:
            assert_within_budget(found, run(inputs, case, config), oracle(inputs, case))
        else:
            assert not any(found[name].any() for name in ("o", "dq", "dk", "dv"))
            assert bool((found["lse"] == -torch.inf).all())
    q, k, v = (torch.full((1, 1, 1, 1), x) for x in (1.0, -90.0, 1.0))
    o = attention(q, k, v, TILED, causal=False, softmax_scale=1.0, break_it=broken)
    assert o.item() == pytest.approx(math.exp(-90) / torch.finfo(torch.float32).tiny, rel=1e-3)


def within_its_tile(impl: str, made: Made) -> None:
    """The mask compares a row and a column as they are numbered within their tile."""
    sizes = [(64, 64, (32, 32)), (64, 64, (32, 16)), (50, 70, (16, 32)), (70, 50, (16, 32))]
    for T, T_k, tile in sizes if impl == "tiled" else sizes[:1]:
        seen = table(T, T_k, lambda i, j, tile=tile: j % tile[1] <= i % tile[0])

        def predict(inputs, seen=seen):
            q, k, v = qkv(inputs)
            return (q @ k.mT * 32**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v

        for order in ORDERS[impl]:
            assert_predicted(made(impl, *tile, **order), Case(T, T_k, B=1), "local_mask", predict)


def without_the_scale(impl: str, made: Made) -> None:
    """The scores are the bare products, and score_gain multiplies them."""
    q, k, v = qkv(Case(50, B=1).inputs(torch.float32))
    of = partial(attention, q, k, v, made(impl))
    assert torch.equal(of(break_it=NO_SCALE), of(softmax_scale=1.0))
    assert torch.equal(of(break_it=replace(NO_SCALE, score_gain=32**-0.5)), of())
    assert torch.equal(of(break_it=BreakIt(score_gain=3.0)), of(softmax_scale=3.0 * 32**-0.5))


def first_tiles_that_hide_all(case: Case, tile: tuple[int, int]) -> torch.Tensor:
    """bool (T,): rows that see no key, or none of the first tile that is computed for their tile of rows."""
    T_k = case.T_k or case.T
    seen = table(case.T, T_k, lambda i, j: sees(i, j, case))
    found = torch.ones(case.T, dtype=torch.bool)
    for i in range(0, case.T, tile[0]):
        of_tile = seen[i : i + tile[0]]
        for j in range(0, T_k, tile[1]):
            if of_tile[:, j : j + tile[1]].any():
                found[i : i + tile[0]] = ~of_tile[:, j : j + tile[1]].any(-1)
                break
    return found


def without_the_guard(impl: str, made: Made) -> None:
    """Rows whose first tile is hidden are NaN, and no others are touched. naive has a row and all keys in a tile."""
    cases = [
        (Case(40, 24, B=1), (16, 16)),  # rows before the first key, their tile not computed
        (Case(40, 24, B=1), (32, 16)),  # the same, their tile computed for the sake of others
        (Case(96, B=1, window=8), (32, 16)),
        (Case(96, B=1, window=40), (32, 16)),
    ]
    for (case, tile), order in product(cases[: 2 if impl == "naive" else 4], ORDERS[impl]):
        inputs, config = case.inputs(torch.float32), made(impl, *tile, **order)
        broken, whole = (run(inputs, case, config, break_it=b) for b in (BreakIt("unguarded_mask"), UNBROKEN))
        expected = first_tiles_that_hide_all(case, (1, 24) if impl == "naive" else (config.block_m, config.block_n))
        assert 0 < int(expected.sum()) < case.T
        assert bool(broken["o"][:, :, expected].isnan().all())
        for name in ("o", "lse", "dq"):
            assert torch.equal(broken[name][:, :, ~expected], whole[name][:, :, ~expected]), name


def with_a_stale_seed(impl: str, made: Made) -> None:
    """o is right, and the backward has the next seed's mask."""
    inputs = Case(70, B=1).inputs(torch.float32)

    def results(config, seed, broken):
        q, k, v = (x.clone().requires_grad_() for x in qkv(inputs))
        o = attention(q, k, v, config, seed=torch.tensor(seed), break_it=broken)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs["do"])

    for order in ORDERS[impl]:
        config, broken = made(impl, dropout_p=0.3, **order), BreakIt("stale_seed")
        stale, whole, following = results(config, 7, broken), *(results(config, seed, UNBROKEN) for seed in (7, 8))
        assert torch.equal(stale[0], whole[0])
        assert torch.equal(stale[3], following[3])  # dv = (Z p)^T do, and p knows no dropout
        # ds = p (Z do v^T - delta): Z of the one seed, delta of the other
        assert not any(torch.equal(stale[i], right[i]) for right in (whole, following) for i in (1, 2))
        assert all(x.isfinite().all() for x in stale)


def gpt(impl: str, checkpointing: bool, broken: BreakIt = UNBROKEN, backend: str | None = None):
    """One step's loss with attention.dropout_p=0.3, and the gradient of every weight, by name."""
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 1, "n_embd": 32, "context_length": 40, "vocab_size": 50, "tie_head": False}
    config = GPTConfig(**fields, activation_checkpointing=checkpointing)
    model = RecomputingGPT(config, AttentionConfig(impl, 16, 16, dropout_p=0.3), broken)
    idx, targets = torch.randint(50, (2, 1, 40))
    loss = (torch.compile(model, backend=backend) if backend else model)(idx, targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def with_an_unrestored_seed(impl: str, made: Made, backend: str | None = None) -> None:
    """The loss is right, and the gradients of the blocks are not. (Torch's own dropout has another mask at once: it
    draws from the state that a seed has moved.)"""
    if impl == "sdpa":
        return
    whole, broken = gpt(impl, True), gpt(impl, True, BreakIt("unrestored_seed"), backend)
    same = {name for name in whole if torch.equal(whole[name], broken[name])}
    # what lies after the blocks is not computed again, and the last bias asks for nothing in its block
    assert same == {"loss", "blocks.1.mlp.down.bias", "norm.weight", "norm.bias", "head.weight"}


def with_sums_of_16_bits(impl: str, made: Made) -> None:
    """They are biased where scores tie, and wide ones are not. Predicted of three ties in one tile: an eighth of the
    last digit and less, as sums of three values of 8 bits lie halfway between two numbers in some cases; measured for
    tiled 0.10, and 0.00 with wide sums (LOG.md)."""
    of = partial(tied_errors, 3, config=made(impl, 64, 64), heads=400 if impl == "tiled" else 40)
    broken, whole = (float(of(break_it=broken).mean()) for broken in (BreakIt("bf16_ties"), UNBROKEN))
    assert 0.05 < abs(broken) < 0.2
    assert abs(whole) < 0.3 * abs(broken)


BREAKS: dict[str, Callable[[str, Made], None]] = {
    "no_max": without_the_maximum,
    **{name: partial(without_the_rescaling, name) for name in FAILURES if name.startswith("no_rescale")},
    "zero_init_max": from_zero,
    "local_mask": within_its_tile,
    "no_scale": without_the_scale,
    "unguarded_mask": without_the_guard,
    "stale_seed": with_a_stale_seed,
    "unrestored_seed": with_an_unrestored_seed,
    "bf16_ties": with_sums_of_16_bits,
}


@pytest.mark.parametrize("impl", ["naive", "tiled", TRITON, "sdpa"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_breaks_what_it_says_and_is_refused_where_it_has_nothing_to_remove(failure, impl, made):
    assert failure in BREAKS, "BREAKS lacks it: add what its missing line does"
    if not set(BreakIt(failure).broken) & ABILITIES[impl].lacks.keys():
        BREAKS[failure](impl, made)
        return
    assert failure not in ("no_scale", "unrestored_seed")  # which are around attention, so they break it in any form
    config = AttentionConfig(impl, dropout_p=0.0 if impl == "sdpa" else 0.5)
    with pytest.raises(ValueError, match=rf"^break_it={failure}: .*; use attention=tiled") as refused:
        attention(*torch.zeros(3, 1, 1, 8, 4), config, break_it=BreakIt(failure))
    for way in re.findall(r"attention=(\w+)", str(refused.value)):
        check_switches(AttentionConfig(way, dropout_p=0.5), BreakIt(failure))


@pytest.mark.slow
def test_an_unrestored_seed_is_not_mended_by_torch_compile(made):
    """It would see to it that both passes have one seed."""
    with_an_unrestored_seed("naive", made, "aot_eager")


SLEEPS = {  # where a failure changes nothing: its case, and tiles
    "no_max": (Case(97), (16, 16)),
    **dict.fromkeys((name for name in FAILURES if name.startswith("no_rescale")), (Case(100, sigma=4.0), (16, 128))),
    "zero_init_max": (Case(97), (32, 32)),
    "local_mask": (Case(60), (64, 64)),
    "unguarded_mask": (Case(97), (16, 16)),
    "bf16_ties": (Case(97), (32, 32)),  # in float32
}


@pytest.mark.parametrize("impl", ["naive", "tiled", TRITON])
@pytest.mark.parametrize("failure", SLEEPS)
def test_a_failure_changes_nothing_where_it_sleeps(failure, impl, made):
    if set(BreakIt(failure).broken) & ABILITIES[impl].lacks.keys():
        return
    (case, tile), maximum = SLEEPS[failure], failure in ("no_max", "zero_init_max")
    case = replace(case, B=1, H=1, D=16) if impl == "triton" else case
    inputs = case.inputs(torch.float32)
    broken, whole = (run(inputs, case, made(impl, *tile), break_it=b) for b in (BreakIt(failure), UNBROKEN))
    if maximum:  # other sums, rounded otherwise
        assert_within_budget(broken, run(inputs, case, NAIVE), oracle(inputs, case))
    else:
        assert all(torch.equal(broken[name], whole[name]) for name in whole)


@pytest.mark.parametrize("impl", ["naive", "tiled"])
@pytest.mark.parametrize("failure", ["no_max", "zero_init_max", "no_scale", "local_mask", "unguarded_mask"])
def test_where_a_broken_output_is_finite_its_gradients_are_its_derivatives(failure, impl):
    """By finite differences. (no_rescale is not here: its backward belongs to an lse that its output does not have.)"""
    if failure in ABILITIES[impl].lacks:
        return
    inputs = Case(5, 7, B=1, H=2, H_kv=1, D=2).inputs(torch.float64)
    ways = [{}, {"order": "keys_outside"}, {"dropout_p": 0.3}]
    for options in ways if failure == "local_mask" else ways[:1]:
        config, seed = AttentionConfig(impl, 4, 3, **options), torch.tensor(SEED) if "dropout_p" in options else None
        broken = partial(attention, config=config, break_it=BreakIt(failure), return_lse=True, seed=seed)
        assert torch.autograd.gradcheck(broken, [x.requires_grad_() for x in qkv(inputs)])


# --- names and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "label"),
    [
        *((BreakIt(name), name) for name in FAILURES),
        (BreakIt(), ""),
        (BreakIt("none"), ""),
        (BreakIt("no_max", 8.0), "no_max+gain_8"),
        (BreakIt(score_gain=0.5), "gain_0.5"),
        (BreakIt(["stale_seed", "local_mask"]), "local_mask+stale_seed"),
        (BreakIt(["none", *PARTS["no_rescale"]]), "no_rescale"),
    ],
)
def test_what_is_broken_has_a_name(broken, label):
    assert broken.label == label
    assert broken == BreakIt(broken.broken, broken.score_gain)


def test_an_unknown_failure_is_answered_with_its_name():
    for name in ("no_mx", None, 5, ["x"], {"no_max": 1}):
        with pytest.raises(ValueError, match=rf"^break_it={re.escape(str(name))} is not known"):
            BreakIt([name])


def test_what_older_versions_wrote_is_read_by_the_names_of_today():
    """They had a switch for each failure, and a checkpoint could be older than one of them."""
    old = {"subtract_max": False, "rescale_sum": True, "rescale_output": True, "score_gain": 2.0}
    assert BreakIt(**of_older(old)) == BreakIt("no_max", 2.0)
    assert BreakIt(**of_older(dict.fromkeys(SWITCHES, True))) == UNBROKEN
    assert set(SWITCHES.values()) <= FAILURES.keys() - PARTS.keys()
    assert len(SWITCHES) == 10  # a newer failure has none
    for today in ({"broken": ["no_max"], "score_gain": 1.0}, {}, None, {"subtract_max": "x"}, {"subtract_max": [1]}):
        assert of_older(today) == today


@pytest.mark.parametrize(
    ("config", "failure", "options"),
    [
        (NAIVE, "no_scale", {"softmax_scale": 0.3}),
        (replace(TILED, softmax_scale=0.5), "no_scale", {}),
        (TILED, "local_mask", {"causal": False}),
        (replace(TILED, window=4), "local_mask", {}),
        (replace(TILED, block_mask=["x"]), "local_mask", {}),
        (replace(TILED, documents=True), "local_mask", {}),
        (TILED, "local_mask", {"documents": torch.zeros(1, 8, dtype=torch.int64)}),
        (TILED, "stale_seed", {}),
        (TILED, "unrestored_seed", {}),
    ],
)
def test_a_failure_is_refused_where_the_options_leave_it_nothing_to_remove(config, failure, options):
    with pytest.raises(ValueError, match=rf"^break_it={failure}: .*; (use|leave) "):
        attention(*torch.zeros(3, 1, 1, 8, 4), config, break_it=BreakIt(failure), **options)


def test_a_local_mask_of_a_pack_and_an_unrestored_seed_of_a_model_that_computes_once_are_refused():
    ends = torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match=r"^break_it=local_mask"):
        attention_varlen(*torch.zeros(3, 8, 1, 4), ends, ends, TILED, break_it=LOCAL)
    with pytest.raises(ValueError, match=r"break_it=unrestored_seed: .*use model\.activation_checkpointing=true"):
        gpt("naive", False, BreakIt("unrestored_seed"))
