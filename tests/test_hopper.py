"""What only the kernels for Hopper GPUs have, on a CPU: no order of their jobs and copies changes a bit, and some calls
are left to the portable kernels. What they compute is in tests/test_attention.py."""

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels import hopper, launch
from kernels.problem import Given
from model.abilities import resolve, wanted, why_not
from model.attention import AttentionConfig, attention, problem_of
from model.break_it import UNBROKEN, BreakIt
from tests import implementations
from tests.gluon_on_cpu import hopper_on_cpu, on_cpu, unchanged
from tests.implementations import CUDA, HOPPER, NAIVE, exact
from tests.reference import SEED, Case, assert_within_budget, case_name, configured, run, run_forward
from training.messages import kernels_of

pytestmark = pytest.mark.skipif(CUDA, reason="runs in the interpreter; tests/test_gpu.py has the kernels themselves")
sized = implementations.sized
BF16 = torch.bfloat16


def forward(case: Case, seed: int = 0, **options) -> dict[str, Tensor]:
    """o and lse. options: of attention(), or a changed module. The backward is tested by itself: it takes as long."""
    inputs = case.inputs(BF16)
    changed = {"forward": options.pop("forward")} if "forward" in options else {}
    with hopper_on_cpu(seed, **changed):
        found = run_forward(*(inputs[name] for name in "qkv"), case, HOPPER, **options)
    return dict(zip(("o", "lse"), found, strict=True))


@cache
def saved(case: Case) -> tuple:
    """What a backward is given: the arguments of launch.gradients()."""
    inputs = case.inputs(BF16)
    q, k, v, do, dlse = (inputs[name] for name in ("q", "k", "v", "do", "dlse"))
    problem = problem_of(q, k, configured(HOPPER, case), Given(seed=torch.tensor(SEED)), case.causal)
    o, _, lse2 = launch.forward(q, k, v, problem, False, "portable")
    return q, k, v, o, lse2, do, dlse, problem._replace(cache=None), False, "hopper"


def gradients(case: Case, seed: int = 0, **changed) -> dict[str, Tensor]:
    with hopper_on_cpu(seed, **changed):
        return dict(zip(("dq", "dk", "dv"), launch.gradients(*saved(case)), strict=True))


def assert_forward_is_right(case: Case, **options) -> None:
    inputs = case.inputs(BF16)
    naive, right = run(inputs, case, NAIVE, **options), exact(inputs, case, **options)
    found = forward(case, **options)
    assert_within_budget(found, naive, {name: right[name] for name in found})


@pytest.mark.parametrize("heads", [0, 1, 2, 3, 5])
def test_each_row_is_computed_however_many_heads_a_section_has(heads, monkeypatch):
    """Of five heads, two on each key head but the last: rows that nobody computes are NaN."""
    monkeypatch.setattr(unchanged("forward"), "SECTION_BYTES", heads * 2 * 300 * 64 * 2 // 5)
    assert_forward_is_right(Case(300, B=1, H=5, H_kv=1, D=64))


def test_a_section_begins_with_the_rows_that_see_the_most_keys():
    """Of three heads of 600 rows, in sections of two heads, by consumers of 64 rows: 256 in a group."""
    module = unchanged("forward")
    how = module.how(64, 64, 4, 4, False, True, False, False, False, False)
    task = SimpleNamespace(N=3, section=2, H=3, T=600, T_k=600, at_most=0)
    found = [module.group_at(group, task, how)[2:4] for group in range(9)]
    assert found == [(0, 512), (1, 512), (0, 256), (1, 256), (0, 0), (1, 0), (2, 512), (2, 256), (2, 0)]


def test_a_later_tile_of_a_group_may_see_earlier_keys():
    """Rows 128 to 191 see the second document, rows 192 to 255 the first, which goes on after it."""
    documents = torch.tensor([[7] * 128 + [3] * 64 + [7] * 168])
    assert_forward_is_right(Case(360, D=64, B=1), documents=documents)


def test_the_mask_of_a_head_is_that_of_its_number():
    """Two heads that have each other's numbers."""
    case = Case(97, D=64, B=1, dropout_p=0.5)
    inputs = case.inputs(BF16)
    swapped = {name: x.flip(1) for name, x in inputs.items()}
    found = run(inputs, case, HOPPER, numbers=torch.tensor([1, 0]))
    right, other = run(swapped, case, HOPPER), run(inputs, case, HOPPER)
    assert all(torch.equal(found[name], right[name].flip(1)) for name in found)
    assert not torch.equal(found["dv"], other["dv"])


def test_heads_whose_sums_do_not_fit_at_once_take_turns(monkeypatch):
    case, module = Case(70, B=2, H=6, H_kv=3, D=64), unchanged("backward")
    whole = gradients(case)
    monkeypatch.setattr(module, "SUMS_BYTES", 4 * (4 * 2 * 128 * 64))  # of four of the six key heads, in tiles of 128
    assert module.key_heads_at_once(2, 6, 3, 70, 64) == (4, 4 * 2 * 128 * 64)
    parts = gradients(case)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


# --- the order of jobs and copies ------------------------------------------------------------------------------------

FORWARD = [
    Case(400, D=64, B=1, H_kv=1),
    Case(456, 2120, D=64, B=1, H=1),
    Case(260, D=128, B=1),
    Case(500, D=64, B=1, H=1, window=70),
]
BACKWARD = [Case(200, 330, D=64, B=1, H=2, H_kv=1), Case(150, 330, D=128, B=1, H=2)]
BACKWARD += [replace(case, dropout_p=0.1) for case in BACKWARD]


@pytest.mark.parametrize(
    ("compute", "case"),
    [
        *((forward, case) for case in FORWARD),
        *((gradients, case) for case in BACKWARD[:2]),
        *(pytest.param(gradients, case, marks=pytest.mark.slow) for case in BACKWARD[2:]),
    ],
    ids=lambda x: case_name(x) if isinstance(x, Case) else x.__name__,
)
def test_no_order_of_jobs_and_copies_changes_a_bit(compute, case):
    """In the backward the tiles of keys add to dq in one order, on any number of processors."""
    first = compute(case)
    for seed in range(1, 10 if compute is forward else 8):
        again = compute(case, seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


FREES = Case(640, D=64, B=1, H_kv=1)
# The case that shows that a wait is missing, the wait, and what stands in its place then.
WAITS = {
    # A consumer that frees a tile without waiting for it takes the next one for there while it still comes.
    "tile": (FREES, "mbarrier.wait(shared.v_full.index(place), phase)", "pass"),
    "q": (FREES, "mbarrier.wait(shared.q_free.index(c), turn & 1 ^ 1)", "pass"),
    "group": (FREES, "mbarrier.wait(shared.group_full.index(turn & 1), turn // 2 & 1)", "pass"),
    "o": (FREES, "tma.store_wait(0)  # until the previous o has left its place", "pass"),
    "product": (FREES, "s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(2, [s])"),
    # An adder that does not wait for its turn, or that passes it on before its sums are in memory.
    "turn": (BACKWARD[0], "while acquired(added) != last - tile:", "while False:"),
    "written": (BACKWARD[0], "wait_written()\n", "pass\n"),
    "kv": (BACKWARD[0], "mbarrier.wait(shared.kv_free.index(0), turn & 1 ^ 1)", "pass"),
    "ds": (BACKWARD[0], "if how.LATE and not how.DROPOUT:\n        mbarrier", "if False:\n        mbarrier"),
    "drawn": (BACKWARD[2], "if how.LATE:\n            mbarrier.wait(", "if False:\n            mbarrier.wait("),
    "ds_full": (BACKWARD[0], "mbarrier.wait(shared.ds_full.index(count & 1), count >> 1 & 1)", "pass"),
    "dq": (BACKWARD[0], "mbarrier.wait(shared.dq_free.index((count & 1) * 2 + C), count >> 1 & 1 ^ 1)", "pass"),
    "k": (BACKWARD[0], "mbarrier.wait(shared.ds_free.index(count - 1 & 1), count - 1 >> 1 & 1)", "pass"),
    "dp": (BACKWARD[0], "dp = warpgroup_mma_wait(1, [dp])", "dp = warpgroup_mma_wait(2, [dp])"),
    "both_k": (BACKWARD[1], "both_consumers()  # have read k", "pass"),
    "both_ds": (BACKWARD[1], "both_consumers()  # have stored", "pass  # have stored"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_some_order_shows_a_wait_that_is_missing(wait):
    """Else the test above would show nothing."""
    case, line, instead = WAITS[wait]

    def change(source: str) -> str:
        assert source.count(line) == 1
        return source.replace(line, instead)

    name, compute = ("forward", forward) if case is FREES else ("backward", gradients)
    broken, right = {name: on_cpu(name, change)}, compute(case)
    for seed in range(200):
        try:
            found = compute(case, seed, **broken)
        except AssertionError:  # deadlock, an arrival too many, NaN in lse
            return
        if not all(torch.equal(found[name], right[name]) for name in right):
            return
    raise AssertionError("no order showed it")


# --- which calls they take -------------------------------------------------------------------------------------------

CHANGES = [
    {},
    {"kernel": "portable"},
    {"autotune": True},
    {"window": 8},
    {"documents": True},
    {"block_mask": ["x"], "block_mask_size": 300},
    {"softcap": 2.0},
    {"alibi": True},
    {"dropout_p": 0.1},
    {"dropout_p": 0.1, "window": 8},
    {"dropout_p": 0.1, "window": 512},
    {"dropout_p": 0.1, "documents": True},
    {"dropout_p": 0.1, "kernel": "hopper", "window": 8},
    {"break_it": BreakIt("no_rescale_sum")},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_the_start_of_a_run_names_the_kernels_that_run(changed):
    """model/abilities.py tells from a configuration which kernels run, and kernels/launch.py decides from a problem.
    kernel=hopper refuses what its forward lacks, with what that is."""
    break_it = changed.get("break_it", UNBROKEN)
    config = AttentionConfig("triton", **{key: value for key, value in changed.items() if key != "break_it"})
    words = torch.zeros(1, 300, dtype=torch.int64)
    given = Given(*(words, words) if config.documents else (), seed=words[0, 0])
    for D, dtype in product((64, 80, 128), (torch.bfloat16, torch.float32)):
        q, why = torch.zeros(1, 2, 300, D, dtype=dtype), {}
        problem = problem_of(q, q, config, given, break_it=break_it)
        for which in ("forward", "backward"):
            taken = hopper.why_not(which, q, problem._replace(cache=None), config.autotune, config.kernel)
            why[which] = why_not(f"hopper {which}", wanted(config, break_it), q.device, dtype, D)
            assert bool(taken) == bool(why[which])
        assert all(reason in kernels_of(**why) for reason in why.values())
        asked = replace(config, kernel="hopper")
        if config.kernel != "portable" and why_not("hopper forward", wanted(asked, break_it), q.device, dtype, D):
            with pytest.raises(ValueError, match=r"attention\.kernel=hopper: .*; use attention\.kernel=auto"):
                attention(q, q, q, asked, break_it=break_it)


def test_a_run_that_asks_for_hopper_in_vain_does_not_start():
    with pytest.raises(ValueError, match=r"kernel=hopper: .*softcap=2\.0; use "):
        resolve(AttentionConfig("triton", kernel="hopper", softcap=2.0), "cpu")


@pytest.mark.parametrize(
    ("changed", "slower"),
    [
        ({}, False),
        ({"window": 100}, False),
        ({"dropout_p": 0.1}, False),
        ({"dropout_p": 0.1, "window": 511}, True),
        ({"dropout_p": 0.1, "window": 512}, False),
        ({"dropout_p": 0.1, "windows": [None, 1024]}, False),
        ({"dropout_p": 0.1, "windows": [None, 100]}, True),
    ],
    ids=str,
)
def test_auto_leaves_to_the_portable_kernels_what_they_compute_faster(changed, slower):
    """As it was timed (LOG.md)."""
    config = AttentionConfig("triton", **changed)
    assert bool(why_not("hopper forward", wanted(config))) == slower
    assert not why_not("hopper forward", wanted(replace(config, kernel="hopper")))
