"""kernels/decode.py: attention of one new token to a cache, on a GPU or in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from model.attention import problem_of
from tests.implementations import DEVICE, NAIVE, ON_GPU
from tests.reference import DTYPES, Case, assert_within_budget, case_name, oracle, run

pytest.importorskip("triton", reason="triton is made for Linux only")

from kernels import decode as decode_module

pytestmark = ON_GPU
# Odd on purpose, as in tests/reference.py. With few keys most splits have none.
DECODED = [
    Case(1, 1, B=4), Case(1, 2, B=4), Case(1, 97, B=4), Case(1, 203, D=64, B=1, H=8),
    Case(1, 130, B=1, H=20, H_kv=1, D=16), Case(1, 97, H=6, H_kv=2, D=24), Case(1, 150, H=6, H_kv=2, D=16, alibi=True),
    Case(1, 113, softcap=0.7, softmax_scale=0.5, D=40, H_kv=1), Case(1, 150, sigma=4.0, B=4), Case(1, 150, window=40),
    Case(1, 30, window=40, H=4, H_kv=2),
]  # fmt: skip


@pytest.mark.parametrize("case", DECODED, ids=case_name)
def test_a_new_token_is_within_twice_naives_error_however_the_keys_are_split(case, monkeypatch):
    """Each case with one dtype, and one split or one for each tile. The new token's place and 40 more hold NaN."""
    number = DECODED.index(case)
    monkeypatch.setattr(decode_module, "processors", lambda device: (0, 1000)[number % 2])
    inputs = case.inputs(DTYPES[number % 3], DEVICE)
    q, k, v = (inputs[name] for name in "qkv")
    keys, values = (F.pad(x[:, :, :-1], (0, 0, 0, 41), value=float("nan")) for x in (k, v))
    problem, at = problem_of(q, k, v, case.configure(NAIVE)), torch.tensor([case.keys - 1], device=q.device)
    rules = problem.scale, problem.softcap, problem.slopes, problem.window
    o = decode_module.decode(q, k[:, :, -1:], v[:, :, -1:], keys, values, at, *rules)
    assert torch.equal(keys[:, :, : case.keys], k)
    assert torch.equal(values[:, :, : case.keys], v)
    assert keys[:, :, case.keys :].isnan().all()
    assert o.dtype == q.dtype
    assert_within_budget({"o": o}, run(inputs, case, NAIVE), oracle(inputs, case))
