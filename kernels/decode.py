"""Attention of one new token to the keys and values in a cache, in Triton (Flash-Decoding).

B sequences, H query heads, H_kv key heads, G = H / H_kv query heads a key head, D head size, S places in the cache.
    q, o (B, H, 1, D)    k, v (B, H_kv, 1, D)    keys, values (B, H_kv, S, D)

The kernel reads many keys and values and computes little, so the memory's speed is its limit. With few sequences one
program a key head would leave most of the GPU idle. So each split of the keys has a program: split s takes the tiles s,
s + splits, ..., and at one time all read neighbouring tiles. All G query heads of a key head are rows of one matrix, so
that each key is read once. A second kernel merges the splits, each with its own m, l and acc, by step 3 once more. The
position is read from device memory, so one CUDA graph serves all tokens. The steps have the numbers of
model/attention.py.

Source: Dao et al. 2023, https://pytorch.org/blog/flash-decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash import LOG2E, online_softmax, tanh
from kernels.launch import check_supported, shared_memory
from kernels.problem import LOWEST, processors

START = tl.constexpr(LOWEST)
STAGES = 3  # tiles of a program in flight; 2 if those of PROGRAMS programs do not fit the shared memory
PROGRAMS = 2  # programs for each of the GPU's processors, so that all run at once; more with many sequences


def decode(q, k, v, keys, values, at, scale: float, softcap: float | None, slopes, window: int | None) -> Tensor:
    """o (B, H, 1, D): attention of the new token to itself and the places before `at`. Writes k and v to place `at`.

    float32, float16 or bfloat16; keys and values contiguous. at: int64 (1,), the position of the new token, below S.
    scale, softcap, slopes, window: as in kernels/problem.py."""
    (B, H, _, D), (H_kv, S) = q.shape, keys.shape[1:3]
    check_supported(q.dtype, D, q.device)
    N, G, BLOCK_D = B * H_kv, H // H_kv, max(16, triton.next_power_of_2(D))
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    rows = max(16, triton.next_power_of_2(G))  # a matrix product has at least 16
    BLOCK_N = (32 if q.dtype == torch.float32 else 64) // (2 if BLOCK_D > 128 else 1)
    splits = min(max(1, PROGRAMS * processors(q.device) // N), triton.cdiv(S, BLOCK_N))
    tile_bytes = 2 * BLOCK_N * BLOCK_D * q.itemsize  # keys and values
    stages = STAGES if PROGRAMS * STAGES * tile_bytes <= shared_memory(q.device) else 2
    acc, o = q.new_empty(B * H, splits, D, dtype=torch.float32), q.new_empty(q.shape)
    m, l = q.new_empty(2, B * H, splits, dtype=torch.float32)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with torch.cuda.device_of(q):
        decode_kernel[(N, splits)](
            q, k, v, keys, values, at, acc, m, l, slopes, S, H_kv, window,
            scale, scale * LOG2E.value, softcap, G, D, rows, BLOCK_D, BLOCK_N, "tf32" if tf32 else "ieee",
            num_warps=4, num_stages=stages,
        )  # fmt: skip
        merge_kernel[(B * H,)](acc, m, l, o, splits, D, BLOCK_D, triton.next_power_of_2(splits))
    return o


@triton.jit
def decode_kernel(
    q, k, v, keys, values, at, acc_of, m_of, l_of, slopes, S, H_kv, window, scale, scale2, softcap,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 5 for a key head and every splits-th tile from tile `split` of the window on. m is in base 2."""
    key_head, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    row = key_head * G + g  # of q and o: b * H + h
    inside = (g < G)[:, None] & (d < D)[None, :]
    q_i = tl.load(q + row[:, None] * D + d[None, :], mask=inside, other=0.0)
    position = tl.load(at).to(tl.int32)
    first = 0
    if window is not None:
        first = tl.maximum(position + 1 - window, 0)
    if slopes is not None:
        slope = tl.load(slopes + key_head % H_kv * G + g, mask=g < G, other=0.0)[:, None]
    keys += key_head * S * D
    values += key_head * S * D
    k_new = tl.load(k + key_head * D + d, mask=d < D, other=0.0)
    v_new = tl.load(v + key_head * D + d, mask=d < D, other=0.0)
    if split == 0:
        tl.store(keys + position.to(tl.int64) * D + d, k_new, mask=d < D)
        tl.store(values + position.to(tl.int64) * D + d, v_new, mask=d < D)
    # The first split begins with the new token; the tiles have the keys before it.
    s_new = tl.sum(q_i.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    if softcap is not None:
        s_new = softcap * tanh(s_new / softcap)
    m = tl.where(split == 0, s_new * LOG2E, START)
    l = tl.full([ROWS], 1.0, tl.float32) * (split == 0)
    acc = l[:, None] * v_new.to(tl.float32)[None, :]
    for tile in tl.range(first // BLOCK_N + split, tl.cdiv(position, BLOCK_N), splits):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (j < position) & (j >= first)
        place, known = j[:, None] * D + d[None, :], seen[:, None] & (d < D)[None, :]
        k_j = tl.load(keys + place, mask=known, other=0.0)
        v_j = tl.load(values + place, mask=known, other=0.0)
        s = tl.dot(q_i, k_j.T, input_precision=PRECISION)  # 1: (ROWS, BLOCK_N)
        factor = scale2
        if (softcap is not None) or (slopes is not None):
            s = s * scale
            if softcap is not None:
                s = softcap * tanh(s / softcap)
            if slopes is not None:
                s -= slope * (position - j).to(tl.float32)[None, :]
            factor = LOG2E
        s = tl.where(seen[None, :], s, -float("inf"))  # 2
        p, m, l, alpha = online_softmax(s, factor, m, l)  # 3
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision=PRECISION)  # 5
    tl.store(m_of + row * splits + split, m, mask=g < G)
    tl.store(l_of + row * splits + split, l, mask=g < G)
    tl.store(acc_of + (row * splits + split)[:, None] * D + d[None, :], acc, mask=inside)


@triton.jit
def merge_kernel(acc_of, m_of, l_of, o, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """Step 3 over the splits of a row, then step 6. A split without keys has m = START and l = 0."""
    row, i, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    m = tl.load(m_of + row * splits + i, mask=i < splits, other=START)
    m_all = tl.max(m, 0)
    alpha = tl.exp2(m - m_all)
    l = tl.sum(alpha * tl.load(l_of + row * splits + i, mask=i < splits, other=0.0), 0)
    inside = (i < splits)[:, None] & (d < D)[None, :]
    acc = tl.load(acc_of + (row * splits + i)[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.store(o + row * D + d, (tl.sum(acc * alpha[:, None], 0) / l).to(o.dtype.element_ty), mask=d < D)
