"""kernels/hopper/backward.py on a CPU, by tests/gluon_backward_on_cpu.py: what it computes, in many orders of its jobs
and copies."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels.problem import Problem
from model.abilities import wanted, why_not
from model.attention import AttentionConfig
from model.dropout import drop_threshold
from tests.gluon_backward_on_cpu import backward_on_cpu, launch_backward
from tests.reference import SEED, Case, assert_within_budget, case_name, run_forward
from tests.test_hopper import PLACES, dominated
from training.messages import kernels_of

NAIVE = AttentionConfig("naive")
WHOLE = backward_on_cpu()
NAMES = "dq", "dk", "dv"


def gradients(
    module, case: Case, seed: int, dtype=torch.bfloat16, inputs: dict | None = None, numbers: Tensor | None = None
) -> dict[str, Tensor]:
    """dq, dk and dv by hopper_backward. seed: of the order of its jobs, which run on one to four processors. o and lse
    are naive's in float64, rounded. numbers: of the masks of dropout, which o does not follow."""
    inputs = inputs or case.inputs(dtype)
    q, k, v, do, dlse = (inputs[name] for name in ("q", "k", "v", "do", "dlse"))
    o, lse = naive_forward(inputs, case, torch.float64)
    found = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    dropout = {"seed": torch.tensor(SEED), "drop_threshold": drop_threshold(case.dropout_p), "numbers": numbers}
    scale = case.softmax_scale or case.D**-0.5
    problem = Problem.of(q.shape[2], k.shape[2], scale, case.causal, **(dropout if case.dropout_p else {}))
    lse2 = (lse / math.log(2)).float()
    args = q, k, v, o.to(dtype), lse2, do, dlse.contiguous(), found, problem
    launch_backward(module, seed, *args, programs=1 + seed % 4)
    return dict(zip(NAMES, found, strict=True))


def naive_forward(inputs: dict, case: Case, of: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, v = (inputs[name].to(of) for name in "qkv")
    return run_forward(q, k, v, case, NAIVE)


def naive(case: Case, of: torch.dtype, dtype=torch.bfloat16, inputs: dict | None = None) -> dict[str, Tensor]:
    inputs = inputs or case.inputs(dtype)
    leaves = {name: inputs[name].to(of).detach().requires_grad_() for name in "qkv"}
    o, lse = naive_forward(leaves, case, of)
    seen = lse.isfinite()
    total = (o * inputs["do"].to(of)).sum() + (lse[seen] * inputs["dlse"].to(lse.dtype)[seen]).sum()
    return dict(zip(NAMES, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, D=64, B=1),
        Case(1, D=128, B=1),
        Case(200, D=64, H=4, H_kv=2, B=1),
        Case(70, 300, D=128, B=1),  # the mask cuts two tiles of queries for some keys
        Case(97, 260, D=64, B=1),
        Case(300, 77, D=64, B=1),  # rows that see no key
        Case(300, 77, D=128, B=1),
        Case(140, 200, D=128, B=1, causal=False),
        Case(150, D=128, B=1, sigma=4.0),
        Case(150, D=64, B=1, softmax_scale=0.5),
        Case(200, D=64, H=4, H_kv=2, B=1, dropout_p=0.1),
        Case(97, 260, D=128, B=2, dropout_p=0.5),
        Case(300, 77, D=64, B=1, dropout_p=0.7),
        Case(140, 200, D=128, B=1, causal=False, dropout_p=0.1),
    ],
    ids=case_name,
)
def test_it_is_within_twice_naives_error(case, dtype):
    assert_within_budget(gradients(WHOLE, case, 0, dtype), naive(case, dtype, dtype), naive(case, torch.float64, dtype))


def test_the_mask_of_a_head_is_that_of_its_number():
    """dv of two heads that have each other's numbers."""
    case = Case(97, D=64, B=1, dropout_p=0.5)
    inputs = case.inputs(torch.bfloat16)
    swapped = {name: x.flip(1) for name, x in inputs.items()}
    found = gradients(WHOLE, case, 0, inputs=inputs, numbers=torch.tensor([1, 0]))
    assert torch.equal(found["dv"], gradients(WHOLE, case, 0, inputs=swapped)["dv"].flip(1))
    assert not torch.equal(found["dv"], gradients(WHOLE, case, 0, inputs=inputs)["dv"])


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("places", PLACES[:3], ids=str)
def test_keys_that_dominate_are_weighed_exactly(places, D):
    """dv. For dq and dk delta of a 16-bit o decides; tests/test_gpu_hopper_backward.py compares those with PyTorch."""
    case = Case(310, B=1, D=D, softmax_scale=1.0)
    inputs = dominated(D, torch.bfloat16, 16.0, 0.125, places, False, case.T)
    right, budget = (naive(case, of, inputs=inputs)["dv"] for of in (torch.float64, torch.bfloat16))
    found = gradients(WHOLE, case, 0, inputs=inputs)["dv"]
    assert_within_budget({"dv": found}, {"dv": budget}, {"dv": right})


CASES = [Case(200, 330, D=64, B=1, H=2, H_kv=1), Case(150, 330, D=128, B=1, H=2)]
CASES += [replace(case, dropout_p=0.1) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_no_order_of_jobs_and_copies_changes_a_bit(case):
    """The tiles of keys add to dq in one order, on any number of processors."""
    first = gradients(WHOLE, case, 0)
    for seed in range(1, 8):
        again = gradients(WHOLE, case, seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_heads_whose_sums_do_not_fit_at_once_take_turns(monkeypatch):
    case = Case(70, B=2, H=6, H_kv=3, D=64)
    whole = gradients(WHOLE, case, 0)
    monkeypatch.setattr(WHOLE, "SUMS_BYTES", 4 * (4 * 2 * 128 * 64))  # of four of the six key heads, in tiles of 128
    assert WHOLE.key_heads_at_once(2, 6, 3, 70, 64) == (4, 4 * 2 * 128 * 64)
    parts = gradients(WHOLE, case, 0)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("number", "line", "instead"),
    [
        # An adder that does not wait for its turn, or that passes it on before its sums are in memory.
        (0, "                while acquired(added) != last - tile:\n                    pass\n", ""),
        (0, "                wait_written()\n", ""),
        (0, "        mbarrier.wait(shared.kv_free.index(0), turn & 1 ^ 1)\n", ""),
        (0, "    if how.LATE and not how.DROPOUT:\n        mbarrier.wait(", "    if False:\n        mbarrier.wait("),
        (2, "        if how.LATE:\n            mbarrier.wait(", "        if False:\n            mbarrier.wait("),
        (0, "        mbarrier.wait(shared.ds_full.index(count & 1), count >> 1 & 1)\n", "        pass\n"),
        (0, "    mbarrier.wait(shared.dq_free.index((count & 1) * 2 + C), count >> 1 & 1 ^ 1)\n", "    pass\n"),
        (0, "        mbarrier.wait(shared.ds_free.index(count - 1 & 1), count - 1 >> 1 & 1)  # un", "        # un"),
        (0, "dp = warpgroup_mma_wait(1, [dp])", "dp = warpgroup_mma_wait(2, [dp])"),
        (1, "        both_consumers()  # have read k\n", "        pass\n"),
        (1, "        both_consumers()  # have stored", "        # have stored"),
    ],
    ids=["turn", "written", "kv", "ds", "drawn", "ds_full", "dq", "k", "product", "both_k", "both_ds"],
)
def test_some_order_shows_a_wait_that_is_missing(number, line, instead):
    """Else the test above would show nothing. number: of the case."""

    def change(source: str) -> str:
        assert source.count(line) == 1
        return source.replace(line, instead)

    broken, case = backward_on_cpu(change), CASES[number]
    right = gradients(WHOLE, case, 0)
    for seed in range(100):
        try:
            found = gradients(broken, case, seed)
        except AssertionError:  # deadlock, an arrival too many
            return
        if not all(torch.equal(found[name], right[name]) for name in right):
            return
    raise AssertionError("no order showed it")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, "it runs on Hopper GPUs (sm_90), not on cpu"),
        ({"kernel": "portable"}, "attention.kernel=portable"),
        ({"window": 8}, "it has no attention.window=8"),
        ({"dropout_p": 0.1}, "it runs on Hopper GPUs (sm_90), not on cpu"),
        ({"autotune": True}, "attention.autotune=true tunes the portable kernels"),
    ],
    ids=str,
)
def test_a_run_says_why_it_has_the_portable_backward(changed, why):
    config = AttentionConfig(**{"impl": "triton", **changed})
    assert why_not("hopper backward", wanted(config)) == why


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        ("", "", ", forward of hopper/forward.py, backward of hopper/backward.py"),
        ("a", "a", ", portable kernels (not hopper/forward.py: a)"),
        ("", "b", ", forward of hopper/forward.py, portable backward (not hopper/backward.py: b)"),
        ("a", "", ", portable forward (not hopper/forward.py: a), backward of hopper/backward.py"),
    ],
)
def test_the_start_of_a_run_names_the_kernels(forward, backward, said):
    assert kernels_of(forward, backward) == said
