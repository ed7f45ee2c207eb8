"""Attention of one new token against the keys and values of past ones, in Triton (Flash-Decoding).

    o = decode(q, k, v, keys, values, position, problem, tickets, splits)

Shapes: B sequences, H query heads, H_kv key heads, G = H / H_kv query heads a key head, D head size, S slots,
n = b * H_kv + h_kv the number of a key head.
    q, o (B, H, 1, D)    k, v (B, H_kv, 1, D), the new token's    keys, values (B * H_kv, S, D)
    in pages of P tokens: keys, values (pages, H_kv, P, D), and a table (B, S / P) of page numbers

The kernel reads many keys and values and computes little, so the memory's speed is its limit. One program a key head
would leave most processors idle. So each split of the keys has a program. All G query heads of a key head are rows of
one matrix, so that each key is read once. The steps have the numbers of model/attention.py; decode() of cache.py is the
same in plain PyTorch, and docs/attention.md has the formulas under "The cache, and decoding in splits".

    decode_kernel   one program per key head and split
        1-5   m, l and acc over its own keys
        0     the program that has the new token's slot takes in its key and value, and keeps them
        6     the last program of a key head merges all splits

The kernel reads the position of each sequence from device memory, so one CUDA graph serves while the sequences grow.
The programs of a key head take its tiles of keys in turn, as cards are dealt: what they read at one time lies together
in memory, which is a little faster (LOG.md). A program without a tile ends at once. A page is a whole number of tiles,
so a tile needs one number from the table, and computes the same bits as in a buffer.

From Hopper on a program begins before the kernel ahead of it has ended. It asks for its first tiles, which past tokens
have written, and then waits for q. So its start takes no time of its own. The new token's key and value come from the
kernel ahead, so no tile has them.

Source: Dao et al. 2023, https://pytorch.org/blog/flash-decoding. There a second kernel merges. Here the programs of a
key head draw tickets, and the one with the last ticket merges. That saves a launch, which at short lengths takes as
long as the rest.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sizes
from kernels.flash import LOG2E, tanh
from kernels.launch import on, precision
from kernels.problem import Problem, order_keys
from kernels.sizes import block_d

LOWEST = tl.constexpr(-torch.finfo(torch.float32).max)  # finite: -inf - -inf is NaN


class DecodeTiles(NamedTuple):
    """BLOCK_N keys in a tile, and Triton's options."""

    BLOCK_N: int
    num_warps: int
    num_stages: int


# BLOCK_D up to -> tiles for 16-bit inputs.
TILES = {128: DecodeTiles(64, 4, 3), 256: DecodeTiles(32, 4, 3)}
FLOAT32 = {128: DecodeTiles(32, 8, 2), 256: DecodeTiles(16, 8, 2)}  # wider tiles round the sums less often
# BLOCK_D up to -> stages where a processor has PROGRAMS programs, which then share its memory: the more tiles are on
# their way when a program waits for the kernel ahead, the better. And no third program fits beside them, so the early
# ones cannot gather on the few processors that are free.
DEEP = {64: 6, 128: 3, 256: 4}
# BLOCK_D -> registers of a thread then, without rope and with it. So the next kernels have registers beside two
# programs. It is what attention needs without softcap and slopes, with up to FEW_HEADS query heads a key head. With
# more heads it would have to keep numbers in memory.
REGISTERS = {64: (112, 120)}
FEW_HEADS = 4
# Other kernels begin early up to so many bytes of keys, which saves 1 to 2 us. With more keys it costs time.
SHORT = 8 << 20
PROGRAMS = 2  # programs for each of the GPU's processors, few enough for all to run at once


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    problem: Problem,
    tickets: Tensor,
    splits: int | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    table: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Keeps k and v in slot position % S of keys and values. Returns o (B, H, 1, D) in q's dtype, (B, 1, H, D) in
    memory: attention to all slots that are filled.

    q (B, H, 1, D), k, v (B, H_kv, 1, D): float32, float16 or bfloat16, rows contiguous. keys, values (B * H_kv, S, D),
    contiguous. position: int64 (B,), the new token's; the tokens before it are in the slots of their positions % S.
    problem: its scale, softcap and slopes count. tickets: int32 (B * H_kv,), zeros, and zeros again after the call.
    splits: into how many parts the keys are cut, at most; None: as many as fill the GPU. It changes o by rounding.
    rope: cos and sin, float32 (positions, D / 2), by which q and k are rotated first; None: they stay as they are.
    table: int32 (B, at least S / P), and S, if keys and values are pages (pages, H_kv, P, D). Token p of sequence b is
    in page table[b, p // P], and p < S. P is a power of 2, and no less than a tile. None: keys and values are buffers.
    The last kernel that was launched before may write q, k, v and tickets. It must not write the rest, which is read
    before that kernel has ended. In a token, embed_kernel comes between the position and the first attention.
    """
    (B, H, _, D), H_kv = q.shape, k.shape[1]
    pages, S = table or (None, keys.shape[1])
    N, G, BLOCK_D, P = B * H_kv, H // H_kv, block_d(D), keys.shape[2] if table else 0
    tile = (FLOAT32 if q.dtype == torch.float32 else TILES)[max(128, BLOCK_D)]
    rows = max(16, triton.next_power_of_2(G))  # a matrix product has at least 16
    splits = min(splits or splits_for(N, q.device), -(-S // tile.BLOCK_N))
    overlap = sizes.starts_early(q.device)
    together = N * splits <= splits_for(1, q.device)  # a processor has at most PROGRAMS programs
    roomy = q.dtype != torch.float32 and sizes.shared_memory(q.device) >= sizes.ROOMY  # has the memory for DEEP
    deep = overlap and rows == 16 and together and roomy
    if rows > 16:  # more rows take more shared memory
        tile = tile._replace(num_stages=2)
    elif deep:
        tile = tile._replace(num_stages=DEEP[max(64, BLOCK_D)])
    early = {"launch_pdl": True} if deep or (overlap and N * S * D * keys.element_size() <= SHORT) else {}
    plain = G <= FEW_HEADS and problem.score.softcap is None and problem.score.slopes is None
    few = {"maxnreg": REGISTERS[BLOCK_D][rope is not None]} if deep and plain and BLOCK_D in REGISTERS else {}
    assert P % tile.BLOCK_N == 0, f"pages of {P} tokens, tiles of {tile.BLOCK_N}"
    apart = tile.num_warps if rows == 16 and q.dtype != torch.float32 and BLOCK_D <= 128 else 1
    o = q.new_empty(B, 1, H, D).transpose(1, 2)
    acc, sums = q.new_empty(N, splits, G, D, dtype=torch.float32), q.new_empty(2, N, splits, G, dtype=torch.float32)
    cos, sin = rope or (None, None)
    with on(q.device):
        decode_kernel[(N, splits)](
            q, k, v, keys, values, position, o, acc, sums[0], sums[1], tickets, problem.score.slopes, cos, sin, pages,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), S, H_kv,
            0 if pages is None else pages.stride(0),
            problem.score.scale, problem.score.scale2, problem.score.softcap,
            P, G, D, rows, BLOCK_D, tile.BLOCK_N, apart, max(1, 8192 // (triton.next_power_of_2(G) * BLOCK_D)),
            triton.next_power_of_2(G), precision(q.dtype), tile.num_stages, bool(early), overlap,
            num_warps=tile.num_warps, **early, **few,
        )  # fmt: skip
    return o


@cache
def splits_for(N: int, device: torch.device) -> int:
    """As many splits as give each of the GPU's processors PROGRAMS programs. In the interpreter: a few."""
    if sizes.INTERPRETED:
        return 3
    return max(1, round(PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count / N))


@triton.jit
def decode_kernel(
    q, k, v, keys, values, position, o, acc_of, m_of, l_of, tickets, slopes, cos, sin, table,
    q_b, q_h, k_b, k_h, v_b, v_h, S, H_kv, table_b, scale, scale2, softcap,
    P: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, APART: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (n, split). acc_of (N, splits, G, D), m_of and l_of (N, splits, G), float32: the state of each split."""
    n, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h_kv = n // H_kv, n % H_kv
    at = tl.load(position + b)
    T_k = tl.minimum(at + 1, S).to(tl.int32)
    parts = tl.minimum(splits, tl.cdiv(T_k, BLOCK_N))  # splits that have keys
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel may begin; it waits for the results of this one
    if split < parts:
        slot = (at % S).to(tl.int32)
        if table is not None:
            table += b * table_b
        g, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        h = h_kv * G + g
        inside = (g < G)[:, None] & (d < D)[None, :]
        rows = q + (b * q_b + h * q_h)[:, None]
        m, l, acc = one_split(rows, inside, keys, values, n, h_kv, split, splits, T_k, h, g < G, at, slot, S, H_kv,
                              table, slopes, cos, sin, scale, scale2, softcap, D, P, BLOCK_N, APART, PRECISION,
                              STAGES, EARLY)  # fmt: skip
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()  # at the latest now
        if slot // BLOCK_N % splits == split:  # 0
            k_i = head(k + b * k_b + h_kv * k_h, d, d < D, at, cos, sin, D)
            v_i = tl.load(v + b * v_b + h_kv * v_h + d, mask=d < D, other=0.0)
            row = place(slot, page_of(slot, table, P), n, h_kv, S, H_kv, P) * D + d
            tl.store(keys + row, k_i, mask=d < D)
            tl.store(values + row, v_i, mask=d < D)
            q_i = head(rows, d[None, :], inside, at, cos, sin, D)
            m, l, acc = one_more(m, l, acc, q_i, k_i, v_i, scale, scale2, softcap)
        if parts == 1:
            write(o + n * G * D, acc, l, G, D)
        else:
            mine = (n * splits + split) * G + g
            tl.store(m_of + mine, m, mask=g < G)
            tl.store(l_of + mine, l, mask=g < G)
            tl.store(acc_of + mine[:, None] * D + d[None, :], acc, mask=inside)
            tl.debug_barrier()  # one thread draws the ticket, and all have stored before
            if tl.atomic_add(tickets + n, 1, sem="acq_rel") == parts - 1:
                tl.store(tickets + n, 0)
                first = n * splits * G
                states = acc_of + first * D, m_of + first, l_of + first
                merge(o + n * G * D, states, parts, G, D, GROUP, BLOCK_D, BLOCK_S)


@triton.jit
def head(x, d, inside, at, cos, sin, D: tl.constexpr):
    """The elements d of rows of q or k, rotated as rotate() of model/rope.py does."""
    row = tl.load(x + d, mask=inside, other=0.0)
    if cos is not None:
        half: tl.constexpr = D // 2
        other = tl.load(x + (d + half) % D, mask=inside, other=0.0)
        angle = at * half + d % half
        c = tl.load(cos + angle, mask=d < D, other=0.0)
        s = tl.load(sin + angle, mask=d < D, other=0.0)
        row = (row.to(tl.float32) * c + other.to(tl.float32) * tl.where(d < half, -s, s)).to(row.dtype)
    return row


@triton.jit
def page_of(slot, table, P: tl.constexpr):
    """The page that has a slot. table: of the sequence; None: there are no pages."""
    page = slot
    if table is not None:
        page = tl.load(table + slot // P)
    return page


@triton.jit
def place(slot, page, n, h_kv, S, H_kv, P: tl.constexpr):
    """The row of a slot in keys and values; P is 0 without pages."""
    row = n * S + slot
    if P > 0:
        row = (page.to(tl.int64) * H_kv + h_kv) * P + slot % P
    return row


@triton.jit
def one_split(rows, inside, keys, values, n, h_kv, split, splits, T_k, h, is_head, at, slot, S, H_kv, table, slopes,
              cos, sin, scale, scale2, softcap, D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
              APART: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Steps 1 to 5 over the tiles split, split + splits, split + 2 splits, .., without the new token's key: m in base
    2, l (ROWS,) and acc (ROWS, BLOCK_D).

    rows, inside (ROWS, BLOCK_D): where q is. With APART above 1 all tensors have one more dimension, APART parts of a
    tile. Each warp has one, and a state of its own until the end. So no warp waits for another.
    """
    within = tl.arange(0, BLOCK_N)
    if APART > 1:
        width: tl.constexpr = BLOCK_N // APART
        within = tl.arange(0, APART)[:, None] * width + tl.arange(0, width)
        part = tl.zeros([APART, 1, 1], tl.int32)
        rows, inside = rows[None, :, :] + part, inside[None, :, :] & (part == 0)
    d = tl.arange(0, inside.shape[-1])
    q_i = tl.zeros(inside.shape, rows.dtype.element_ty)
    acc = tl.zeros(inside.shape, tl.float32)
    m = tl.full(inside.shape[:-1], LOWEST, tl.float32)
    l = tl.zeros(inside.shape[:-1], tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + h, mask=is_head, other=0.0)[:, None]
    start, step = split * BLOCK_N, splits * BLOCK_N
    page = page_of(start, table, P)
    for first in tl.range(start, T_k, step, num_stages=STAGES):
        # In the first turn, because Triton asks for the first tiles ahead of the loop: they are on their way by now.
        if first == start:
            if EARLY:
                tl.extra.cuda.gdc_wait()  # for all that the kernels ahead write
            q_i = head(rows, d, inside, at, cos, sin, D)
        j = first + within
        tile = place(first, page, n, h_kv, S, H_kv, P) * D + tl.expand_dims(within * D, -1) + d
        # Of the next tile. If a tile loaded its own number, Triton would have fewer tiles on their way.
        page = page_of(tl.minimum(first + step, T_k - 1), table, P)
        seen = (j < T_k) & (j != slot)
        known = tl.expand_dims(seen, -1) & (d < D)
        k_j = tl.load(keys + tile, mask=known, other=0.0)
        s = tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION)  # 1: (ROWS, BLOCK_N)
        factor = scale2
        if (softcap is not None) or (slopes is not None):
            s = s * scale
            if softcap is not None:
                s = softcap * tanh(s / softcap)
            if slopes is not None:
                s -= slope * tl.expand_dims(((slot - j + S) % S).to(tl.float32), -2)
            factor = LOG2E
        s = tl.where(tl.expand_dims(seen, -2), s, -float("inf"))  # 2
        m_new = tl.maximum(m, tl.max(s, -1) * factor)  # 3
        p = tl.exp2(tl.fma(s, factor, -tl.expand_dims(m_new, -1)))
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, -1)
        m = m_new
        v_j = tl.load(values + tile, mask=known, other=0.0)
        if v_j.dtype == tl.float32:  # the sum of a tile first; fma, because Triton would turn a sum into the line below
            acc = tl.fma(acc, tl.expand_dims(alpha, -1), tl.dot(p, v_j, input_precision=PRECISION))  # 5
        else:
            acc = tl.dot(p.to(v_j.dtype), v_j, acc * tl.expand_dims(alpha, -1))  # 5
    if APART > 1:  # 3 once more
        m_new = tl.max(m, 0)
        alpha = tl.exp2(m - m_new[None, :])
        m, l, acc = m_new, tl.sum(l * alpha, 0), summed(acc * alpha[:, :, None])
    return m, l, acc


@triton.jit
def summed(x):
    """The sum of x (APART, ROWS, BLOCK_D) over its parts. tl.sum() takes ten times as long from warp to warp."""
    parts: tl.constexpr = x.shape[0]
    x = tl.permute(x, (1, 2, 0))
    if parts == 4:
        one, other = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
        x = one + other
    one, other = tl.split(x)
    return one + other


@triton.jit
def one_more(m, l, acc, q_i, k_i, v_i, scale, scale2, softcap):
    """Steps 1 to 5 for the new token's key and value (BLOCK_D,). No slope counts: it is at distance 0."""
    s = tl.sum(q_i.to(tl.float32) * k_i.to(tl.float32)[None, :], 1)
    if softcap is not None:
        s = softcap * tanh(s * scale / softcap) * LOG2E
    else:
        s = s * scale2
    m_new = tl.maximum(m, s)
    p, alpha = tl.exp2(s - m_new), tl.exp2(m - m_new)
    return m_new, l * alpha + p, acc * alpha[:, None] + p[:, None] * v_i.to(tl.float32)[None, :]


@triton.jit
def merge(o, states, parts, G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_S: tl.constexpr):  # fmt: skip
    """Step 3 once more, over the states of all splits, BLOCK_S at a time; then step 6."""
    m = tl.full([GROUP], LOWEST, tl.float32)
    l = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_D], tl.float32)
    g, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    acc_of, m_of, l_of = states
    for first in range(0, parts, BLOCK_S):
        i = first + tl.arange(0, BLOCK_S)
        seen = (i < parts)[:, None] & (g < G)[None, :]
        at = i[:, None] * G + g[None, :]
        # .cg reads from L2, where the other programs' results are. This processor's L1 may have older ones.
        m_i = tl.load(m_of + at, mask=seen, other=-float("inf"), cache_modifier=".cg")
        l_i = tl.load(l_of + at, mask=seen, other=0.0, cache_modifier=".cg")
        inside = seen[:, :, None] & (d < D)[None, None, :]
        acc_i = tl.load(acc_of + at[:, :, None] * D + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_i, 0))
        alpha, alpha_i = tl.exp2(m - m_new), tl.exp2(m_i - m_new[None, :])
        l = l * alpha + tl.sum(alpha_i * l_i, 0)
        acc = acc * alpha[:, None] + tl.sum(alpha_i[:, :, None] * acc_i, 0)
        m = m_new
    write(o, acc, l, G, D)


@triton.jit
def write(o, acc, l, G: tl.constexpr, D: tl.constexpr):
    """Step 6: the G rows of o that share a key head."""
    g, d = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    tl.store(o + g * D + d, tl.div_rn(acc, l[:, None]).to(o.dtype.element_ty), mask=(g < G) & (d < D))


order_keys(globals())
