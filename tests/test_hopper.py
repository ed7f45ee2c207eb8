"""The kernels for Hopper GPUs on a CPU: what they compute, that no order of their jobs and copies changes a bit, and
which calls they take."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is made for Linux only")

from kernels import launch
from model.attention import problem_of
from model.break_it import UNBROKEN, BreakIt
from tests.gluon_on_cpu import hopper_on_cpu, on_cpu
from tests.implementations import CUDA, NAIVE, TRITON
from tests.reference import PICTURE, SEED, Case, assert_within_budget, case_name, oracle, run

pytestmark = [
    pytest.mark.skipif(CUDA, reason="runs in the interpreter; tests/test_gpu.py has the kernels themselves"),
    # NumPy's: scaled_kernel multiplies the sums of rows that see no key, which nobody has written, and drops them.
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]
BF16 = torch.bfloat16


@cache
def given(case: Case) -> tuple:
    """The arguments of launch.backward(), with o and lse2 by the portable kernels."""
    inputs = case.inputs(BF16)
    q, k, v, do, dlse = (inputs[name] for name in ("q", "k", "v", "do", "dlse"))
    problem = problem_of(q, k, v, case.configure(TRITON), case.causal, torch.tensor(SEED))
    o, _, lse2 = launch.forward(q, k, v, problem)
    return q, k, v, o, lse2, do, dlse, problem


def forward(case: Case, seed: int = 0, **changed) -> list[Tensor]:
    """o and lse. The backward is tested by itself: it takes as long."""
    q, k, v, *_, problem = given(case)
    with hopper_on_cpu(seed, **changed):
        return list(launch.forward(q, k, v, problem)[:2])


def backward(case: Case, seed: int = 0, **changed) -> list[Tensor]:
    with hopper_on_cpu(seed, **changed):
        return launch.in_parts(launch.backward(*given(case)), *given(case)[:2])


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


# --- values -----------------------------------------------------------------------------------------------------------

VALUES = [
    Case(300, B=1, H=2, H_kv=1, D=64), Case(203, 113, B=1, D=128), Case(140, 250, B=1, D=128, dropout_p=0.1),
    Case(97, 150, B=1, D=64, causal=False, dropout_p=0.3), Case(300, B=1, H=1, D=64, window=70),
    Case(200, B=2, H=1, D=128, documents=(140, 0, 60)), Case(150, 300, B=1, D=64, documents=(230, 70), causal=False),
    Case(150, 300, B=2, H=2, H_kv=1, D=64, documents=(100, 1, 199), window=70),
    Case(128, 129, B=1, H=1, D=64, window=2),  # only the last row sees a key of the last tile
    Case(130, 200, B=1, H=1, D=128, window=40, causal=False), Case(150, 360, B=1, H=3, D=128),  # the last in waves
    Case(70, B=2, H=6, H_kv=3, D=64, dropout_p=0.2), Case(264, 200, B=1, D=128),  # rows see no key, the mask cuts once
]  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=case_name)
def test_values_and_gradients_are_within_twice_naives_error(case):
    """Of the backward with window and documents, the portable kernels compute it."""
    inputs = case.inputs(BF16)
    with hopper_on_cpu(1):
        found = run(inputs, case, TRITON)
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize("heads", [0, 1, 2, 3])
def test_each_row_is_computed_however_many_heads_a_section_has(heads, monkeypatch):
    """Of five heads: rows that nobody computes are NaN."""
    case = Case(300, B=1, H=5, H_kv=1, D=64)
    whole = forward(case)
    monkeypatch.setattr(on_cpu("forward"), "SECTION_BYTES", heads * 2 * 300 * 64 * 2 // 5)
    assert same(forward(case), whole)


def test_a_section_begins_with_the_rows_that_see_the_most_keys():
    """Of three heads of 600 rows, in sections of two heads, by consumers of 64 rows: 256 in a group."""
    module = on_cpu("forward")
    how = module.how(64, 64, 4, 4, True, False)
    task = SimpleNamespace(heads=3, section=2, H=3, T=600, T_k=600, at_least=None, at_most=0, spans=None)
    found = [module.group_at(group, task, how)[2:4] for group in range(9)]
    assert found == [(0, 512), (1, 512), (0, 256), (1, 256), (0, 0), (1, 0), (2, 512), (2, 256), (2, 0)]


@pytest.mark.parametrize(("limit", "value"), [("SUMS_BYTES", 4 * (4 * 2 * 256 * 64)), ("SECTION", 8), ("SECTION", 1)])
def test_heads_that_are_not_computed_at_once_take_turns(limit, value, monkeypatch):
    """Four key heads, then two; or one by one. Each has two tiles of keys, and 2 * 256 * 64 sums of two query heads."""
    case = Case(200, B=2, H=6, H_kv=3, D=64, dropout_p=0.2)
    whole = backward(case)
    monkeypatch.setattr(on_cpu("backward"), limit, value)
    assert same(backward(case), whole)


# --- the order of jobs and copies ------------------------------------------------------------------------------------

FORWARD = [Case(400, D=64, B=1, H_kv=1), Case(456, 2120, D=64, B=1, H=1), Case(260, D=128, B=1)]
FORWARD += [Case(500, D=64, B=1, H=1, window=70)]
BACKWARD = [Case(200, 330, D=64, B=1, H=2, H_kv=1), Case(150, 330, D=128, B=1, H=2), Case(150, 360, D=128, B=1)]
BACKWARD += [replace(case, dropout_p=0.1) for case in BACKWARD] + [Case(150, 330, D=128, B=1, H=2, H_kv=1)]
ORDERS = [(forward, case) for case in FORWARD] + [(backward, case) for case in BACKWARD]


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "case"), ORDERS, ids=lambda x: case_name(x) if isinstance(x, Case) else x.__name__)
def test_no_order_of_jobs_and_copies_changes_a_bit(compute, case):
    """In the backward the tiles of keys add to dq in one order, on any number of processors."""
    first = compute(case)
    for seed in range(1, 8):
        assert same(compute(case, seed), first)


FREES = Case(640, D=64, B=1, H_kv=1)
# The case that shows that a wait is missing, the wait, and what stands in its place then.
WAITS = {
    # A consumer that frees a tile without waiting for it takes the next one for there while it still comes.
    "tile": (FREES, "mbarrier.wait(shared.v_full.index(place), phase)", "pass"),
    "q": (FREES, "mbarrier.wait(shared.q_free.index(c), nth & 1 ^ 1)", "pass"),
    "group": (FREES, "mbarrier.wait(shared.taken_full.index(nth & 1), nth // 2 & 1)", "pass"),
    "o": (FREES, "tma.store_wait(0)  # until the previous o has left its place", "pass"),
    "product": (FREES, "s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(2, [s])"),
    # An adder that does not wait for its turn, or that passes it on before its sums are in memory.
    "turn": (BACKWARD[0], "while acquired(added) != before:", "while False:"),
    "written": (BACKWARD[0], "wait_written()\n", "pass\n"),
    "kv": (BACKWARD[0], "mbarrier.wait(shared.kv_free.index(0), nth & 1 ^ 1)", "pass"),
    "ds": (BACKWARD[0], "if how.LATE and not how.DROPOUT:\n        mbarrier", "if False:\n        mbarrier"),
    "drawn": (BACKWARD[3], "if how.LATE:  # draw()", "if False:  # draw()"),
    "ds_full": (BACKWARD[0], "mbarrier.wait(shared.ds_full.index(count & 1), count >> 1 & 1)", "pass"),
    "dq": (BACKWARD[0], "mbarrier.wait(shared.dq_free.index((count & 1) * 2 + C), count >> 1 & 1 ^ 1)", "pass"),
    "k": (BACKWARD[0], "mbarrier.wait(shared.ds_free.index(count - 1 & 1), count - 1 >> 1 & 1)", "pass"),
    "dp": (BACKWARD[0], "dp = warpgroup_mma_wait(1, [dp])", "dp = warpgroup_mma_wait(2, [dp])"),
    "both_k": (BACKWARD[1], "both_consumers()  # have read k", "pass"),
    "both_ds": (BACKWARD[1], "both_consumers()  # have stored", "pass  # have stored"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_some_order_shows_a_wait_that_is_missing(wait):
    """Else the test above would show nothing."""
    case, line, instead = WAITS[wait]
    name, compute = ("forward", forward) if case is FREES else ("backward", backward)
    broken, right = {name: on_cpu(name, line, instead)}, compute(case)
    for seed in range(200):
        try:
            if not same(compute(case, seed, **broken), right):
                return
        except AssertionError:  # deadlock, an arrival too many
            return
    raise AssertionError("no order showed it")


# --- which calls they take -------------------------------------------------------------------------------------------

BOTH, FIRST, NONE = ("hopper", "hopper"), ("hopper", "portable"), ("portable", "portable")
CALLS = [
    (Case(600, D=64), BF16, UNBROKEN, BOTH), (Case(600, D=128, causal=False), torch.float16, UNBROKEN, BOTH),
    (Case(600, D=64, dropout_p=0.1), BF16, UNBROKEN, BOTH), (Case(600, D=64, window=8), BF16, UNBROKEN, FIRST),
    (Case(600, D=64, documents=(600,)), BF16, UNBROKEN, FIRST),
    (Case(600, D=64, dropout_p=0.1, window=512), BF16, UNBROKEN, FIRST),
    (Case(600, D=64, dropout_p=0.1, window=511), BF16, UNBROKEN, NONE),  # slower
    (Case(600, D=64), torch.float32, UNBROKEN, NONE), (Case(600, D=80), BF16, UNBROKEN, NONE),
    (Case(600, D=64, softcap=2.0), BF16, UNBROKEN, NONE), (Case(600, D=64, alibi=True), BF16, UNBROKEN, NONE),
    (Case(200, D=64, blocks=PICTURE), BF16, UNBROKEN, NONE), (Case(600, D=64), BF16, BreakIt("no_rescale_sum"), NONE),
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype", "break_it", "taken"), CALLS, ids=str)
def test_which_kernels_compute_what(case, dtype, break_it, taken, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr("kernels.hopper.forward.launch_forward", lambda *_: calls.append("hopper"))
    monkeypatch.setattr("kernels.hopper.backward.launch_backward", lambda *_: calls.append("hopper"))
    monkeypatch.setattr(launch, "launch", lambda *_: calls.append("portable"))
    run(case.inputs(dtype), case, TRITON, break_it=break_it)
    assert tuple(calls[:2]) == taken
