"""kernels/hopper/forward.py on a CPU, by tests/gluon_on_cpu.py: its results, in many orders of its jobs and copies."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels import hopper, op
from kernels.problem import Problem
from model.abilities import resolve, wanted, why_not
from model.attention import AttentionConfig, problem_of
from model.break_it import UNBROKEN, BreakIt
from tests.gluon_on_cpu import launch, on_cpu
from tests.reference import PLACES, Case, assert_within_budget, case_name, dominated, run_forward

NAIVE = AttentionConfig("naive")
WHOLE = on_cpu()


def forward(
    module, case: Case, seed: int, dtype=torch.bfloat16, inputs: dict | None = None, **options
) -> dict[str, Tensor]:
    """o and lse by module. seed: of the order of its jobs, which run on one to three processors."""

    def on_hopper(q, k, v, problem, *_):
        o, lse, lse2 = torch.full_like(q, torch.nan), *torch.full((2, *q.shape[:3]), torch.nan).unbind()
        launch(module, seed, q, k, v, o, lse, lse2, problem, programs=1 + seed % 3)
        torch.testing.assert_close(lse2 * torch.tensor(2.0).log(), lse)
        return o, lse

    inputs = inputs or case.inputs(dtype)
    with patch.object(op, "flash_attention", on_hopper):
        o, lse = run_forward(*(inputs[name] for name in "qkv"), case, AttentionConfig("triton"), **options)
    return {"o": o, "lse": lse}


def naive(
    case: Case, of: torch.dtype, dtype=torch.bfloat16, inputs: dict | None = None, **options
) -> dict[str, Tensor]:
    inputs = inputs or case.inputs(dtype)
    o, lse = run_forward(*(inputs[name].to(of) for name in "qkv"), case, NAIVE, **options)
    return {"o": o, "lse": lse}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, D=64),
        Case(333, D=64, H=4, H_kv=2, B=1),
        Case(100, 150, D=64, B=1),  # the mask cuts two tiles of some rows
        Case(97, 500, D=128, B=1),
        Case(300, 77, D=64, B=1),  # rows that see no key
        Case(200, 333, D=128, B=1, causal=False),
        Case(150, D=128, B=1, sigma=4.0),
        Case(300, 108, D=128, B=1),  # rows that see no key
        Case(264, 328, D=128, B=1, dropout_p=0.2),
        Case(150, D=64, B=1, softmax_scale=0.5),
        Case(264, 2120, D=64, B=1),  # three consumers
        Case(100, 2100, D=64, B=1, causal=False),
        Case(400, D=64, B=1, window=130),
        Case(300, 400, D=128, B=1, window=1),
        Case(200, 333, D=64, B=1, causal=False, window=40),
        Case(333, 200, D=64, B=1, window=100),  # rows that see no key, and a tile without any
        Case(333, D=64, documents=(33, 100, 0, 200)),
        Case(200, 333, D=128, B=1, causal=False, documents=(133, 200)),
        Case(333, D=64, B=1, H=4, H_kv=2, dropout_p=0.1),
        Case(100, 300, D=128, B=1, dropout_p=0.5),
        Case(300, D=64, documents=(50, 100, 150), window=60, dropout_p=0.2),
    ],
    ids=case_name,
)
def test_it_is_within_twice_naives_error(case, dtype):
    found = forward(WHOLE, case, 0, dtype)
    assert_within_budget(found, naive(case, dtype, dtype), naive(case, torch.float64, dtype))


@pytest.mark.parametrize("heads", [0, 1, 2, 3, 5])
def test_each_row_is_computed_however_many_heads_a_section_has(heads, monkeypatch):
    """Of five heads, two on each key head but the last: rows that nobody computes are NaN."""
    case = Case(300, B=1, H=5, H_kv=1, D=64)
    monkeypatch.setattr(WHOLE, "SECTION_BYTES", heads * 2 * 300 * 64 * 2 // 5)
    assert_within_budget(forward(WHOLE, case, 0), naive(case, torch.bfloat16), naive(case, torch.float64))


def test_a_section_begins_with_the_rows_that_see_the_most_keys():
    """Of three heads of 600 rows, in sections of two heads, by consumers of 64 rows: 256 in a group."""
    how = WHOLE.how(64, 64, 4, 4, False, True, False, False, False, False)
    task = SimpleNamespace(N=3, section=2, H=3, T=600, T_k=600, at_most=0)
    found = [WHOLE.group_at(group, task, how)[2:4] for group in range(9)]
    assert found == [(0, 512), (1, 512), (0, 256), (1, 256), (0, 0), (1, 0), (2, 512), (2, 256), (2, 0)]


def test_a_later_tile_of_a_group_may_see_earlier_keys():
    """Rows 128 to 191 see the second document, rows 192 to 255 the first, which goes on after it."""
    case, documents = Case(360, D=64, B=1), torch.tensor([[7] * 128 + [3] * 64 + [7] * 168])
    of_naive = (naive(case, dtype, documents=documents) for dtype in (torch.bfloat16, torch.float64))
    assert_within_budget(forward(WHOLE, case, 0, documents=documents), *of_naive)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("same_values", [False, True], ids=["values", "same_values"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_keys_that_dominate_are_weighed_exactly(places, same_values, D, dtype):
    """tests/test_gpu_hopper.py has the gradients too."""
    case = Case(340, B=1, D=D, softmax_scale=1.0)
    for above, apart in ((8.0, 0.0), (16.0, 0.125), (30.0, 0.0)):
        inputs = dominated(D, dtype, above, apart, places, same_values, case.T)
        found = forward(WHOLE, case, 0, dtype, inputs)
        assert_within_budget(found, naive(case, dtype, dtype, inputs), naive(case, torch.float64, dtype, inputs))
    if same_values:  # the others have a weight of 1e-13
        rows = found["o"][:, :, max(places) :]
        assert torch.equal(rows, inputs["v"][:, :, places[:1]].expand_as(rows))


@pytest.mark.parametrize(
    "case",
    [
        Case(400, D=64, B=1, H_kv=1),
        Case(456, 2120, D=64, B=1, H=1),
        Case(260, D=128, B=1),
        Case(500, D=64, B=1, H=1, window=70),
    ],
    ids=case_name,
)
def test_no_order_of_jobs_and_copies_changes_a_bit(case):
    first = forward(WHOLE, case, 0)
    for seed in range(1, 10):
        again = forward(WHOLE, case, seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        # A consumer that frees a tile without waiting for it takes the next one for there while it still comes.
        ("        mbarrier.wait(shared.v_full.index(place), phase)\n        all_threads()", "        all_threads()"),
        ("            mbarrier.wait(shared.q_free.index(c), turn & 1 ^ 1)\n", ""),
        ("    mbarrier.wait(shared.group_full.index(turn & 1), turn // 2 & 1)\n", ""),
        ("    tma.store_wait(0)  # until the previous o has left its place\n", ""),
        ("s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(2, [s])"),
    ],
    ids=["tile", "q", "group", "o", "product"],
)
def test_some_order_shows_a_wait_that_is_missing(line, instead):
    """Else the test above would show nothing."""

    def change(source: str) -> str:
        assert source.count(line) == 1
        return source.replace(line, instead)

    broken, case = on_cpu(change), Case(640, D=64, B=1, H_kv=1)
    right = forward(WHOLE, case, 0)
    for seed in range(200):
        try:
            found = forward(broken, case, seed)
        except AssertionError:  # deadlock, an arrival too many, NaN in lse
            return
        if not all(torch.equal(found[name], right[name]) for name in right):
            return
    raise AssertionError("no order showed it")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, "it runs on Hopper GPUs (sm_90), not on cpu"),
        ({"kernel": "portable"}, "attention.kernel=portable"),
        ({"softcap": 2.0}, "it has no attention.softcap=2.0"),
        ({"alibi": True, "window": 8}, "it has no attention.alibi=True"),
        ({"autotune": True}, "attention.autotune=true tunes the portable kernels"),
    ],
    ids=str,
)
def test_a_run_says_why_it_has_the_portable_forward(changed, why):
    config = AttentionConfig(**{"impl": "triton", **changed})
    assert why_not("hopper forward", wanted(config)) == why


def test_a_run_that_asks_for_hopper_in_vain_does_not_start():
    with pytest.raises(ValueError, match=r"kernel=hopper: it has no attention\.softcap=2.0; use "):
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
def test_auto_leaves_to_the_portable_kernels_what_they_compute_faster(changed, slower, monkeypatch):
    """As it was timed (LOG.md)."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hopper, "lacks_here", hopper.lacks_here.__wrapped__)  # not the cache, which other tests read
    config = AttentionConfig("triton", **changed)
    assert bool(why_not("hopper forward", wanted(config), torch.device("cuda"))) == slower
    assert not why_not("hopper forward", wanted(replace(config, kernel="hopper")), torch.device("cuda"))


@pytest.mark.parametrize(
    "changed",
    [
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
    ],
    ids=str,
)
def test_the_start_of_a_run_names_the_kernels_that_run(changed, monkeypatch):
    """model/abilities.py tells from a configuration which kernels run, and kernels/launch.py decides from a problem."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    lacks = hopper.lacks_here.__wrapped__
    monkeypatch.setattr(hopper, "lacks_here", lambda dtype, D, device: lacks(dtype, D, torch.device("cuda")))
    break_it = changed.get("break_it", UNBROKEN)
    config = AttentionConfig("triton", **{key: value for key, value in changed.items() if key != "break_it"})
    words = torch.zeros(1, 300, dtype=torch.int64)
    tokens = {"documents_q": words, "documents_k": words} if config.documents else {}
    for D, dtype in product((64, 80, 128), (torch.bfloat16, torch.float32)):
        q = torch.zeros(1, 2, 300, D, dtype=dtype)
        problem = problem_of(q, q, config, tokens, seed=words[0, 0], break_it=break_it)
        for which in ("forward", "backward"):
            taken = hopper.left_to_portable(which, q, problem._replace(kind=None), config.autotune, config.kernel)
            assert bool(taken) == bool(why_not(f"hopper {which}", wanted(config, break_it), q.device, dtype, D))


def test_the_op_has_the_kernels_of_a_direct_call(monkeypatch):
    """Compiled steps had the portable backward: through the op `without` was [], and [] != ()."""
    seen, q, lse = [], torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64)

    def stop(which, q, problem, autotune, kernel):
        seen.append(problem)
        raise KeyboardInterrupt

    monkeypatch.setattr(hopper, "left_to_portable", stop)
    description = *Problem.of(64, 64).fields, False, "auto"
    with pytest.raises(KeyboardInterrupt):
        op.flash_forward([q, q, q], [q.shape[1]] * 2, *description)
    with pytest.raises(KeyboardInterrupt):
        op.flash_backward([q, q, q], [2, 2], q, lse, q, None, *description)
    assert seen == [Problem.of(64, 64)] * 2
