"""The kernels of one new token, in Triton's interpreter: attention of one row (kernels/decode.py), linear layers with
few rows (kernels/linear.py), and the model's token made of them (model/token.py). tests/test_gpu.py has more of them."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels.decode import decode
from kernels.linear import linear
from kernels.problem import Problem
from model.attention import AttentionConfig, alibi_slopes
from model.cache import runs_kernel
from model.generate import run_prompts
from model.gpt import rope_table, rotate
from model.token import next_logits
from tests.reference import DTYPES, Case, assert_within_budget, case_name, error, largest, oracle, run
from tests.test_cache import CONTEXT, OPTIONS, logits_of, made, texts

NAIVE = AttentionConfig("naive")


def decoded(inputs: dict, case: Case, splits: int | None = None, room: int = 40, rope=None) -> torch.Tensor:
    """o of the case's last token through the kernel. The buffers have `room` more slots, with NaN in them, and the new
    token's slot is empty."""
    q, k, v = (inputs[name] for name in "qkv")
    B, H_kv, T_k, D = k.shape
    keys, values = (F.pad(x[:, :, :-1], (0, 0, 0, room + 1), value=float("nan")).flatten(0, 1) for x in (k, v))
    slopes = alibi_slopes(case.H, q.device) if case.alibi else None
    scale = D**-0.5 if case.softmax_scale is None else case.softmax_scale
    problem = Problem(1, T_k, scale, softcap=case.softcap, slopes=slopes)
    tickets = torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)
    position = torch.full((B,), T_k - 1, device=q.device)
    o = decode(q, k[:, :, -1:], v[:, :, -1:], keys, values, position, problem, tickets, splits, rope)
    assert o.dtype == q.dtype
    assert not tickets.any()
    if rope is None:
        assert torch.equal(keys.view(B, H_kv, -1, D)[:, :, :T_k], k)
    assert torch.equal(values.view(B, H_kv, -1, D)[:, :, :T_k], v)
    assert keys[:, T_k:].isnan().all()
    return o
