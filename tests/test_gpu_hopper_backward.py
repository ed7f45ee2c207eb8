"""kernels/hopper/backward.py on a Hopper GPU: pytest -m gpu. tests/test_gpu_hopper.py has its gradients in all shapes,
and beside dominant keys: attention.kernel=hopper takes it there."""

from dataclasses import replace

import pytest
import torch

from kernels import hopper
from kernels.launch import forward, gradients
from kernels.problem import Problem
from model.abilities import wanted, why_not
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.dropout import drop_threshold
from tests.reference import SEED, Case, assert_within_budget, case_name, drawn, run

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")]

NAIVE = AttentionConfig("naive")
HOPPER, PORTABLE, AUTO = (AttentionConfig("triton", kernel=kernel) for kernel in ("hopper", "portable", "auto"))


def problem_for(case: Case) -> Problem:
    dropout = {"seed": torch.tensor(SEED, device="cuda"), "drop_threshold": drop_threshold(case.dropout_p)}
    of = case.T, case.T, case.D**-0.5, case.causal, case.window
    return Problem.of(*of, **(dropout if case.dropout_p else {}))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_a_thousand_times_beside_other_work(D, dropout_p):
    """Tiles of keys add to dq in one order. A second stream takes processors and memory, so programs begin late."""
    case = Case(1500, B=2, H=12, H_kv=4, D=D)
    inputs = case.inputs(torch.bfloat16, "cuda")
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    problem = problem_for(Case(1500, D=D, dropout_p=dropout_p))
    o, _, lse2 = forward(q, k, v, problem, False, "portable")
    first = gradients(q, k, v, o, lse2, do, None, problem, False, "hopper")
    beside, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(beside):
                x = (x @ x).clamp(-1, 1)
        held = torch.empty(i % 7 * 2**20, device="cuda").fill_(torch.nan)  # so that the sums lie elsewhere
        again = gradients(q, k, v, o, lse2, do, None, problem, False, "hopper")
        for a, b in zip(first, again, strict=True):
            same &= (a == b).all()
        del held, again
    assert same


@pytest.mark.parametrize("D", [64, 128])
def test_many_tiles_of_keys_add_to_one_tile_of_queries(D):
    """More programs than the GPU has processors wait for each other, with a causal mask and without."""
    cases = Case(9000, B=1, H=2, H_kv=1, D=D), Case(300, 9000, B=1, D=D, causal=False)
    for case in (*cases, replace(cases[1], dropout_p=0.1)):
        inputs = case.inputs(torch.bfloat16, "cuda")
        float64 = run({name: x.double() for name, x in inputs.items()}, case, NAIVE)
        reference = {name: x.cpu() for name, x in float64.items()}
        assert_within_budget(run(inputs, case, HOPPER), run(inputs, case, NAIVE), reference)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.75])
def test_forward_and_backward_drop_the_same_weights_as_the_portable_kernels(dropout_p, D):
    """Bytes are compared four at a time, in one of two ways: below a threshold of 128 and from there on."""
    hopper, portable = (
        drawn(config, 333, dropout_p, D=D, dtype=torch.bfloat16, device="cuda") for config in (HOPPER, PORTABLE)
    )
    for name in hopper:
        assert torch.equal(hopper[name], portable["o"]), name


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (Case(300, D=64), "hopper"),
        (Case(300, D=128, causal=False), "hopper"),
        (Case(300, D=64, dropout_p=0.1), "hopper"),
        (Case(300, D=128, window=100), "portable"),
        (Case(300, D=80), "portable"),
    ],
    ids=lambda x: case_name(x) if isinstance(x, Case) else x,
)
def test_auto_takes_the_backward_for_hopper_where_it_can(case, taken):
    inputs = case.inputs(torch.bfloat16, "cuda")
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    problem = problem_for(case)
    o, _, lse2 = forward(q, k, v, problem, False, "portable")
    auto, found = (gradients(q, k, v, o, lse2, do, None, problem, False, kernel) for kernel in ("auto", taken))
    assert all(torch.equal(a, b) for a, b in zip(auto, found, strict=True))
    reason = hopper.left_to_portable("backward", q, problem, False, "auto")
    assert bool(reason) == (taken == "portable")


def test_the_start_of_a_run_names_the_backward():
    device = torch.device("cuda")

    def lacks(config, *more, **others):
        return why_not("hopper backward", wanted(config, *more), device, **others)

    assert lacks(HOPPER) == lacks(replace(AUTO, dropout_p=0.1)) == ""
    assert lacks(replace(HOPPER, window=8)) == "it has no attention.window=8"
    assert "break_it" in lacks(AUTO, BreakIt("no_rescale_sum"))
    assert "head sizes" in lacks(HOPPER, D=80)
    assert lacks(PORTABLE) == "attention.kernel=portable"
