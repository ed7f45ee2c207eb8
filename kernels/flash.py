"""FlashAttention in Triton: the forward, and a backward that computes the weights again. Needs Ampere or a newer GPU.

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size, n = b*H + h.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)
A tile of queries has BLOCK_M rows, a tile of keys BLOCK_N rows. BLOCK_D is D rounded up to a power of two, at least 16.

The steps have the numbers of model/attention.py, which has the definition (naive); docs/attention.md derives them.
kernels/launch.py launches, in this order:

    forward_kernel     one program per tile of queries                      steps 1 to 6
    dq_kernel          one program per tile of queries: dq and delta        steps 7, 8 and 10 to 12
    dkdv_kernel        one program per tile of keys: dk and dv              steps 8 to 12, transposed

Sources: Dao 2023 (arXiv 2307.08691) for the order of the loops; Triton's fused-attention tutorial for the split of the
backward; Salmon et al. 2011 for Philox.

Difference from the paper: the backward makes two passes, so it computes the scores twice, in seven products instead of
five. But no two programs add to the same number, so a second run gives the same bits.

m and the scores are in base 2, because the hardware has exp2: log2(e) is in s or in its factor. From Hopper on this
file loads tiles through tensor descriptors, which handle strides and edges.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@dataclass(frozen=True, eq=False)
class How:
    """What a kernel is compiled for. how() of kernels/launch.py makes each once: Triton compares them by identity."""

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    PRECISION: tl.constexpr  # of matrix products: ieee | tf32
    START: tl.constexpr  # initial value of m
    NO_MAX: tl.constexpr  # these four: failures, by their names
    NO_RESCALE_SUM: tl.constexpr
    NO_RESCALE_OUTPUT: tl.constexpr
    UNGUARDED_MASK: tl.constexpr


class Task(NamedTuple):
    """What a kernel computes: kernels/problem.py's Problem, as a kernel reads it. None: there is no such rule."""

    H: int
    G: int  # H / H_kv: query heads that share a key head
    T: int
    T_k: int
    at_least: int | None  # the lowest (column - position) of a visible key: 1 - window
    at_most: int | None  # the highest: 0 if causal, else window - 1
    local_m: int | None  # break_it=local_mask: the causal mask counts from the corner of a tile of local_m x local_n
    local_n: int | None
    spans: Tensor | None  # int32 (B, T_k, 2): the first and the last place of each token's document
    blocks: Tensor | None  # bool (rows, columns)
    block_size: int
    block_columns: int
    visits: Tensor | None  # visit_lists() of kernels/problem.py; None: arithmetic is enough
    visits_n: int  # numbers in a line of the table
    scale: float
    scale2: float  # scale * log2(e), rounded to float32 once, not twice
    softcap: float | None
    slopes: Tensor | None
    seed: Tensor | None
    threshold: int  # 0 to 255: a weight is dropped if its random byte is below this
    zero: float  # 0.0, as an argument: with a constant the compiler rounds before it selects, which is slower
    keep_scale: float  # 1 / (share kept)


# --- The kernels, each above its loop over tiles ----------------------------------------------------------------------
@triton.jit
def forward_kernel(q, k, v, o, lse, lse2, task, how: tl.constexpr):
    """Writes o, and lse twice: as a natural logarithm, and in base 2 for the backward."""
    # Inside a loop Triton 3.6 turns fields of a tuple argument that equal 1 into None, but not of a tuple made here.
    task = Task(*task)
    n, b, h, row0, tiles = tile_of_queries(task, how)  # tiles: which to visit, by listed()

    q_i = load(q, b, h, row0, how.BLOCK_M, how)
    acc = tl.zeros([how.BLOCK_M, how.BLOCK_D], tl.float32)
    m, l = tl.full([how.BLOCK_M], how.START, tl.float32), tl.zeros([how.BLOCK_M], tl.float32)
    acc, m, l = forward_tiles(acc, m, l, q_i, k, v, b, h, row0, tiles, task, False, how)
    acc, m, l = forward_tiles(acc, m, l, q_i, k, v, b, h, row0, tiles, task, True, how)

    # 6: a row that sees no key has o = 0 / 1 = 0, and lse = log 0 = -inf
    divisor = l if how.UNGUARDED_MASK else tl.where(l == 0, 1.0, l)
    acc = acc * (task.keep_scale / divisor)[:, None]  # drop() leaves keep_scale out
    store(o, b, h, row0, acc, how.BLOCK_M, how)
    i = row0 + tl.arange(0, how.BLOCK_M)
    at = n.to(tl.int64) * task.T + i
    tl.store(lse + at, m * LN2 + tl.log(l), mask=i < task.T)
    tl.store(lse2 + at, m + tl.log2(l), mask=i < task.T)


@triton.jit
def forward_tiles(acc, m, l, q_i, k, v, b, h, row0, tiles, task, CUT: tl.constexpr, how: tl.constexpr):
    """Steps 1 to 5 for the whole tiles of keys or, with CUT, for the tiles that the mask cuts."""
    row, column = tl.arange(0, how.BLOCK_M)[:, None], tl.arange(0, how.BLOCK_N)[None, :]
    i = row0 + row
    start, stop, next_tile = loop_over(tiles, task, CUT)
    for t in tl.range(start, stop, num_stages=stages(CUT, how.BLOCK_D)):
        tile, next_tile = tile_at(t, stop, next_tile, tiles, task, CUT)
        column0 = tile * how.BLOCK_N
        j = column0 + column
        k_j = load(k, b, h // task.G, column0, how.BLOCK_N, how)
        s = tl.dot(q_i, k_j.T, input_precision=how.PRECISION)  # 1: (BLOCK_M, BLOCK_N)
        s, factor, _ = cap_and_alibi(s, task, h, i, j)
        if CUT:
            s = tl.where(visible(task, b, i, j), s, -float("inf"))  # 2
        p, m, l, alpha = online_softmax(s, factor, m, l, how.NO_MAX, how.NO_RESCALE_SUM)  # 3
        p = drop(p, b * task.H + h, row0, column0, row, column, task)  # 4
        if not how.NO_RESCALE_OUTPUT:
            acc = acc * alpha[:, None]  # 5: rescale the sum of the earlier tiles
        v_j = load(v, b, h // task.G, column0, how.BLOCK_N, how)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc, input_precision=how.PRECISION)  # 5
    return acc, m, l


@triton.jit
def online_softmax(s, factor, m, l, NO_MAX: tl.constexpr = False, NO_RESCALE_SUM: tl.constexpr = False):
    """Step 3 for one tile: returns p, and the new m, l and alpha."""
    m_new = m if NO_MAX else tl.maximum(m, tl.max(s, 1) * factor)
    p = tl.exp2(tl.fma(s, factor, -m_new[:, None]))
    alpha = tl.exp2(m - m_new)
    l = (l if NO_RESCALE_SUM else l * alpha) + tl.sum(p, 1)  # rescale
    return p, m_new, l, alpha


@triton.jit
def dq_kernel(q, k, v, o, do, dlse, lse2, row_terms, dq, task, padded, how: tl.constexpr):
    """Writes dq, and to row_terms (B, H, padded, 2), for dkdv_kernel, each row's -lse2 and delta / keep_scale, as
    weights_again() and score_gradient() want them."""
    task = Task(*task)  # as in forward_kernel
    n, b, h, row0, tiles = tile_of_queries(task, how)

    do_i = load(do, b, h, row0, how.BLOCK_M, how)
    o_i = load(o, b, h, row0, how.BLOCK_M, how)
    i = row0 + tl.arange(0, how.BLOCK_M)
    at = n.to(tl.int64) * task.T + i
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)  # 7
    if dlse is not None:
        delta_i -= tl.load(dlse + at, mask=i < task.T, other=0.0)
    delta_i = delta_i / task.keep_scale
    # A row that sees no key has lse2 = -inf. It gets -inf here instead of inf, because 2**-inf makes its weights 0.
    # Rows past the last also get -inf, to the end of the tile, so that dkdv_kernel need not mask them.
    minus_lse2_i = -tl.load(lse2 + at, mask=i < task.T, other=float("inf"))
    if not how.UNGUARDED_MASK:
        minus_lse2_i = tl.where(minus_lse2_i == float("inf"), -float("inf"), minus_lse2_i)
    at = (n.to(tl.int64) * padded + i[:, None]) * 2 + tl.arange(0, 2)[None, :]
    tl.store(row_terms + at, tl.join(minus_lse2_i, delta_i))

    q_i = load(q, b, h, row0, how.BLOCK_M, how)
    dq_i = tl.zeros([how.BLOCK_M, how.BLOCK_D], tl.float32)
    dq_i = dq_tiles(dq_i, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, row0, tiles, task, False, how)
    dq_i = dq_tiles(dq_i, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, row0, tiles, task, True, how)
    dq_i *= task.scale * task.keep_scale
    store(dq, b, h, row0, dq_i, how.BLOCK_M, how)


@triton.jit
def dq_tiles(dq, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, row0, tiles, task,
             CUT: tl.constexpr, how: tl.constexpr):  # fmt: skip
    """Steps 8 and 10 to 12 for the whole tiles of keys or, with CUT, for the tiles that the mask cuts."""
    row, column = tl.arange(0, how.BLOCK_M)[:, None], tl.arange(0, how.BLOCK_N)[None, :]
    i = row0 + row
    start, stop, next_tile = loop_over(tiles, task, CUT)
    for t in tl.range(start, stop, num_stages=stages(CUT, how.BLOCK_D)):
        tile, next_tile = tile_at(t, stop, next_tile, tiles, task, CUT)
        column0 = tile * how.BLOCK_N
        j = column0 + column
        k_j = load(k, b, h // task.G, column0, how.BLOCK_N, how)
        s = tl.dot(q_i, k_j.T, input_precision=how.PRECISION)  # (BLOCK_M, BLOCK_N)
        v_j = load(v, b, h // task.G, column0, how.BLOCK_N, how)
        dp = tl.dot(do_i, v_j.T, input_precision=how.PRECISION)  # 10, without Z: score_gradient()
        p, softcap_grad = weights_again(s, minus_lse2_i[:, None], b, h, i, j, task, CUT)  # 8
        zp = drop(p, b * task.H + h, row0, column0, row, column, task)
        ds = score_gradient(p, zp, dp, delta_i[:, None], softcap_grad, task)  # 11
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision=how.PRECISION)  # 12
    return dq


@triton.jit
def dkdv_kernel(q, k, v, do, row_terms, dk, dv, task, padded, how: tl.constexpr):
    """Writes dk and dv. row_terms comes from dq_kernel."""
    task = Task(*task)  # as in forward_kernel
    n_tiles = tl.cdiv(task.T_k, how.BLOCK_N)
    tile = tl.program_id(0) % n_tiles  # a head's most work first: if causal, the most rows see its first keys
    n = tl.program_id(0) // n_tiles
    H_kv = task.H // task.G
    b, h_kv = n // H_kv, n % H_kv
    column0 = tile * how.BLOCK_N
    tiles = query_tiles(task, b, tile, how)

    k_j = load(k, b, h_kv, column0, how.BLOCK_N, how)
    v_j = load(v, b, h_kv, column0, how.BLOCK_N, how)
    dk_j = tl.zeros([how.BLOCK_N, how.BLOCK_D], tl.float32)
    dv_j = tl.zeros([how.BLOCK_N, how.BLOCK_D], tl.float32)
    # Sum over the query heads that share this key head. The cut tiles come first: if causal, they are the first rows.
    for h in range(h_kv * task.G, (h_kv + 1) * task.G):
        dk_j, dv_j = dkdv_tiles(dk_j, dv_j, k_j, v_j, q, do, row_terms, b, h, column0, tiles, task, padded, True, how)
        dk_j, dv_j = dkdv_tiles(dk_j, dv_j, k_j, v_j, q, do, row_terms, b, h, column0, tiles, task, padded, False, how)
    dk_j *= task.scale * task.keep_scale
    dv_j *= task.keep_scale
    store(dk, b, h_kv, column0, dk_j, how.BLOCK_N, how)
    store(dv, b, h_kv, column0, dv_j, how.BLOCK_N, how)


@triton.jit
def dkdv_tiles(dk, dv, k_j, v_j, q, do, row_terms, b, h, column0, tiles, task, padded,
               CUT: tl.constexpr, how: tl.constexpr):  # fmt: skip
    """Steps 8 to 12 for the whole tiles of queries or, with CUT, for the tiles that the mask cuts."""
    n = b * task.H + h
    row, column = tl.arange(0, how.BLOCK_M)[None, :], tl.arange(0, how.BLOCK_N)[:, None]
    j = column0 + column
    row_terms += n.to(tl.int64) * padded * 2
    start, stop, next_tile = loop_over(tiles, task, CUT)
    for t in tl.range(start, stop, num_stages=stages(CUT, how.BLOCK_D)):
        tile, next_tile = tile_at(t, stop, next_tile, tiles, task, CUT)
        row0 = tile * how.BLOCK_M
        i = row0 + row
        q_i = load(q, b, h, row0, how.BLOCK_M, how)
        s = tl.dot(k_j, q_i.T, input_precision=how.PRECISION)  # (BLOCK_N, BLOCK_M): already transposed for step 9
        do_i = load(do, b, h, row0, how.BLOCK_M, how)
        dp = tl.dot(v_j, do_i.T, input_precision=how.PRECISION)  # 10, without Z: score_gradient()
        at = row0 + tl.arange(0, how.BLOCK_M)[:, None]
        minus_lse2_i, delta_i = tl.split(tl.load(row_terms + at * 2 + tl.arange(0, 2)[None, :]))
        p, softcap_grad = weights_again(s, minus_lse2_i[None, :], b, h, i, j, task, CUT)  # 8
        zp = drop(p, n, row0, column0, row, column, task)
        dv = tl.dot(zp.to(do_i.dtype), do_i, dv, input_precision=how.PRECISION)  # 9
        ds = score_gradient(p, zp, dp, delta_i[None, :], softcap_grad, task)  # 11
        dk = tl.dot(ds.to(q_i.dtype), q_i, dk, input_precision=how.PRECISION)  # 12
    return dk, dv


@triton.jit
def weights_again(s, minus_lse2, b, h, i, j, task, CUT: tl.constexpr):
    """Step 8 for one tile, transposed or not: p, and d score / d (q k^T scale)."""
    s, factor, softcap_grad = cap_and_alibi(s, task, h, i, j)
    if CUT:
        s = tl.where(visible(task, b, i, j), s, -float("inf"))
    return tl.exp2(tl.fma(s, factor, minus_lse2)), softcap_grad


@triton.jit
def score_gradient(p, zp, dp, delta, softcap_grad, task):
    """Step 11: ds / keep_scale = zp (do v^T) - p delta / keep_scale. zp comes from drop(), without keep_scale; delta
    comes divided, and dp is do v^T without Z. In the end the sums are multiplied by keep_scale (docs/hopper.md)."""
    if task.seed is not None:
        ds = tl.fma(zp, dp, -(p * delta))
    else:
        ds = p * (dp - delta)
    if task.softcap is not None:
        ds *= softcap_grad
    return ds


# --- Steps 1, 2 and 4 of a tile: scores, mask and dropout -------------------------------------------------------------
@triton.jit
def cap_and_alibi(s, task, h, i, j):
    """The rest of step 1. Returns s, the factor that makes it scores in base 2, and d score / d (q k^T scale)."""
    factor, softcap_grad = task.scale2, 1.0
    if (task.softcap is not None) or (task.slopes is not None):
        s = s * task.scale
        if task.softcap is not None:
            t = tanh(s / task.softcap)
            softcap_grad = 1 - t * t
            s = task.softcap * t
        if task.slopes is not None:
            s = s - tl.load(task.slopes + h) * tl.abs(i + (task.T_k - task.T) - j).to(tl.float32)
        s, factor = s * LOG2E, 1.0
    return s, factor, softcap_grad


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|). That cancels for small x; below 0.25 a series is exact to 1e-8."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, e - 1, 1 - e) / (1 + e))


@triton.jit
def visible(task, b, i, j):
    """Step 2: whether row i sees column j. i and j are tensors that broadcast, in either order: tiles or transposed."""
    position = i + (task.T_k - task.T)
    first, last = 0, task.T_k - 1  # of the keys that row i sees
    if task.at_least is not None:
        first = position + task.at_least
    if task.at_most is not None:
        last = tl.minimum(position + task.at_most, last)
    if task.spans is not None:
        span = task.spans + (b.to(tl.int64) * task.T_k + position) * 2
        first = tl.maximum(tl.load(span, mask=i < task.T, other=0), first)
        last = tl.minimum(tl.load(span + 1, mask=i < task.T, other=0), last)
    seen = j <= last
    if (task.at_least is not None) or (task.spans is not None):
        seen = seen & (j >= first)
    if task.local_m is not None:
        seen = seen & (j % task.local_n <= i % task.local_m)
    if task.blocks is not None:
        block = tl.maximum(position, 0) // task.block_size * task.block_columns + j // task.block_size
        seen = seen & tl.load(task.blocks + block, mask=(i < task.T) & (j < task.T_k), other=0).to(tl.int1)
    return seen


@triton.jit
def drop(p, n, row0, column0, row, column, task):
    """Step 4 without keep_scale: p where it is kept, else 0. So zp here is Z p / keep_scale. The bits are those of
    model/dropout.py; each kernel draws them again. row and column count from the corner of the tile, row0 and column0,
    which are multiples of 32.

    Elements that are 8 apart in rows and columns share a Philox call, and a thread holds 8 or 16 such elements of a
    tensor core's result. The compiler makes that call once if it can prove that their counters are equal. So
    row and column count from the corner, and `row & 7` is written `row & 6 | row & 1`."""
    if task.seed is not None:
        seed = tl.load(task.seed)
        k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        c0 = (row0 >> 5 << 3).to(tl.uint32) + ((row >> 5 << 3) | (row & 6) | (row & 1)).to(tl.uint32)
        c1 = (column0 >> 5 << 3).to(tl.uint32) + ((column >> 5 << 3) | (column & 6) | (column & 1)).to(tl.uint32)
        w0, w1, w2, w3 = philox(c0, c1, n.to(tl.uint32), 0, k0, k1)
        bit4, bit3 = (row & 16) != 0, (row & 8) != 0
        word = tl.where(bit4, tl.where(bit3, w3, w2), tl.where(bit3, w1, w0))
        # column & 24: 8 times the number of its byte. With it at the top, the bits below cannot change the comparison.
        keep = (word << (24 - (column & 24)).to(tl.uint32)) >= tl.cast(task.threshold << 24, tl.uint32)
        p = tl.where(keep, p, task.zero)
    return p


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Seven rounds of Philox 4x32; all words are uint32. A word that is constant along rows or columns keeps that small
    shape until it is combined with a word of the other kind. So the first two rounds cost next to nothing."""
    for _ in tl.static_range(7):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57  # one instruction gives both halves
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


# --- Which tiles are visited ------------------------------------------------------------------------------------------
@triton.jit
def tile_of_queries(task, how: tl.constexpr):
    """This program's n, b, h, first row and key_tiles(). A head's most work first: if causal, its last rows."""
    n_tiles = tl.cdiv(task.T, how.BLOCK_M)
    tile = n_tiles - 1 - tl.program_id(0) % n_tiles
    n = tl.program_id(0) // n_tiles
    b = n // task.H
    return n, b, n % task.H, tile * how.BLOCK_M, key_tiles(task, b, tile, how)


@triton.jit
def between(low, high, at_least, at_most, n_tiles, n_whole, BLOCK: tl.constexpr):
    """Which of n_tiles tiles of keys a tile of queries visits, or the other way round, and which of them are whole.

    Each of the tiles holds BLOCK consecutive numbers x; the other tile holds the numbers y from low to high. A tile
    is visited if at_least <= x - y <= at_most for some x and y, and whole if that holds for all x and y and the tile is
    among the first n_whole. Returns start, whole_start, whole_stop, stop: tiles start to stop - 1 are visited, and
    tiles whole_start to whole_stop - 1 are whole. If causal, rows 256 to 383 and tiles of 64 keys have 0, 0, 4, 6."""
    start, whole_start, whole_stop, stop = 0, 0, n_whole, n_tiles
    if at_least is not None:
        start = tl.maximum(low + at_least, 0) // BLOCK
        whole_start = tl.cdiv(tl.maximum(high + at_least, 0), BLOCK)
    if at_most is not None:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(high + at_most + 1, 0), BLOCK))
        whole_stop = tl.minimum(whole_stop, tl.maximum(low + at_most + 1, 0) // BLOCK)
    return start, whole_start, whole_stop, stop


@triton.jit
def key_tiles(task, b, tile, how: tl.constexpr):
    """Which tiles of keys a tile of queries visits: the five numbers of listed()."""
    n_tiles = tl.cdiv(task.T_k, how.BLOCK_N)
    low = tile * how.BLOCK_M + task.T_k - task.T
    high = low + how.BLOCK_M - 1
    found = between(low, high, task.at_least, task.at_most, n_tiles, task.T_k // how.BLOCK_N, how.BLOCK_N)
    found = in_documents(found, b, low, high, 0, task, how.BLOCK_N)
    return listed(found, tile, n_tiles, task)


@triton.jit
def query_tiles(task, b, tile, how: tl.constexpr):
    """Which tiles of queries a tile of keys visits. The last can be whole, because rows past the end have weight 0."""
    n_tiles = tl.cdiv(task.T, how.BLOCK_M)
    at_least = None if task.at_most is None else -task.at_most  # seen from a key the signs change
    at_most = None if task.at_least is None else -task.at_least
    offset = task.T_k - task.T  # the position of row 0
    low, high = tile * how.BLOCK_N, tile * how.BLOCK_N + how.BLOCK_N - 1
    found = between(low - offset, high - offset, at_least, at_most, n_tiles, n_tiles, how.BLOCK_M)
    found = in_documents(found, b, low, high, offset, task, how.BLOCK_M)
    return listed(found, tile, n_tiles, task)


@triton.jit
def in_documents(found, b, low, high, offset, task, BLOCK: tl.constexpr):
    """`found` by between(), narrowed. Visited: from the start of low's document to the end of high's. Whole: from the
    start of high's to the end of low's, so none unless they are one document. offset: the position of row 0 if
    tiles of queries, else 0."""
    if task.spans is not None:
        start, whole_start, whole_stop, stop = found
        span = task.spans + b.to(tl.int64) * task.T_k * 2
        of_low, of_high = span + low * 2, span + tl.minimum(high, task.T_k - 1) * 2
        start = tl.maximum(start, tl.maximum(tl.load(of_low) - offset, 0) // BLOCK)
        whole_start = tl.maximum(whole_start, tl.cdiv(tl.maximum(tl.load(of_high) - offset, 0), BLOCK))
        whole_stop = tl.minimum(whole_stop, tl.maximum(tl.load(of_low + 1) + 1 - offset, 0) // BLOCK)
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(tl.load(of_high + 1) + 1 - offset, 0), BLOCK))
        found = start, whole_start, whole_stop, stop
    return found


@triton.jit
def listed(found, tile, n_tiles, task):
    """start <= whole_start <= whole_stop <= stop, and line. Without a table the four are `found`, and `line` is
    unused. With one they are places in this tile's list, which begins at `line` and has the cut tiles first."""
    if task.local_m is not None:
        found = 0, n_tiles, n_tiles, n_tiles
    start, whole_start, whole_stop, stop = found
    stop = tl.maximum(stop, start)  # in order where no tile is whole; Hopper's forward leaves this out, for speed
    whole_start = tl.minimum(tl.maximum(whole_start, start), stop)
    whole_stop = tl.maximum(tl.minimum(whole_stop, stop), whole_start)
    line = tile.to(tl.int64) * task.visits_n + 2
    if task.visits is not None:
        stop = tl.load(task.visits + line - 2)
        start, whole_start, whole_stop = 0, tl.load(task.visits + line - 1), stop
    return start, whole_start, whole_stop, stop, line


@triton.jit
def loop_over(tiles, task, CUT: tl.constexpr):
    """The loop's range: the whole tiles or, with CUT, those around them. And the first `next_tile` of tile_at()."""
    start, whole_start, whole_stop, stop, line = tiles
    if CUT:
        stop = stop - (whole_stop - whole_start)  # tile_at() skips the whole ones
    else:
        start, stop = whole_start, whole_stop
    next_tile = start
    if task.visits is not None:
        next_tile = tl.load(task.visits + line + start, mask=start < stop, other=0)
    return start, stop, next_tile


@triton.constexpr_function
def stages(CUT, BLOCK_D):
    """num_stages of the loop's software pipeline; None: that of launch.py's Tiles. The mask cuts few tiles: a third
    stage for them is not worth registers of the whole kernel. At head size 256 that of Tiles is kept."""
    return 2 if CUT and BLOCK_D < 256 else None


@triton.jit
def tile_at(t, stop, next_tile, tiles, task, CUT: tl.constexpr):
    """The number of the t-th tile, and the new `next_tile`. Without a table the number is t, past the whole tiles if
    CUT. With one it was read a turn earlier, because the tile's loads wait for it."""
    _, whole_start, whole_stop, _, line = tiles
    if task.visits is not None:
        return next_tile, tl.load(task.visits + line + (t + 1), mask=t + 1 < stop, other=0)
    if CUT:
        t += tl.where(t >= whole_start, whole_stop - whole_start, 0)
    return t, next_tile


# --- Loading and storing tiles ----------------------------------------------------------------------------------------
@triton.jit
def load(x, b, h, row, ROWS: tl.constexpr, how: tl.constexpr):
    """Loads a tile (ROWS, BLOCK_D) of x, a descriptor or a Strided. Elements outside x are 0."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([b, h, row, 0]).reshape(ROWS, how.BLOCK_D)
    else:
        at, inside = places(x, b, h, row, ROWS, how.BLOCK_D)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store(x, b, h, row, values, ROWS: tl.constexpr, how: tl.constexpr):
    """Writes values (ROWS, BLOCK_D) to a tile of x. Elements outside x are not written."""
    if isinstance(x, tl.tensor_descriptor):
        x.store([b, h, row, 0], values.to(x.dtype).reshape(1, 1, ROWS, how.BLOCK_D))
    else:
        at, inside = places(x, b, h, row, ROWS, how.BLOCK_D)
        tl.store(at, values.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def places(x, b, h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to a tile of a Strided, and whether each is inside the tensor; both (ROWS, BLOCK_D)."""
    i, d = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    head = x.pointer + tl.cast(b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_h
    return head + (i.to(tl.int64) * x.stride_t + d), (i < x.rows) & (d < x.width)
