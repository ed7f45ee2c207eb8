"""The backward of FlashAttention for Hopper GPUs (sm_90), in Gluon. Read forward.py first, for its machinery.

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, G = H / H_kv, D head size. n = b*H + h;
key_head counts b*H_kv + h_kv from the first of a launch.
    q, o, do, dq (B, H, T, D)    k, v, dk, dv (B, H_kv, T_k, D)    lse2: see launch_backward; terms: row_terms_kernel

The steps have the numbers of model/attention.py. kernels/flash.py computes each score twice, once for dq and once for
dk and dv. This file computes it once, in five matrix products for each tile instead of seven. A program has 2 * KEYS
rows of keys and values, and visits the tiles of queries that see them:

    a tile, transposed                 8: s = k q^T, p        10: dp = v do^T     11: ds
    sums over the tiles of queries     9: dv += p do          12: dk += ds q
    added to a sum in memory          12: dq += ds^T k

Its jobs:

    producer    one warp: takes the next tile of keys; copies k and v, then tiles of q and do, with the `terms`
    consumer    two, of four warps each: s, p, dp and ds of KEYS keys, whose dk and dv stay in registers; then half of
                the tile's dq, over the keys of both consumers
    adder       two, of one warp each: adds a consumer's half to dq in memory (float32)

- The tiles of keys add to a tile of dq in a fixed order, that of adder(): then two runs give the same bits.
  `counters[1:]` has, for each half of a tile of dq, how many have been added. An adder waits for its turn.
- ds goes through shared memory, because dq sums over the keys of both consumers. So do the parts of dq.

Limits: float16 and bfloat16, D 64 or 128, the causal mask or none, dropout. docs/hopper.md tells more.
Sources: Shah et al. 2024 (FlashAttention-3, arXiv 2407.08608) for the jobs and the tiles.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.forward import as_matrix, as_operand, barriers, in_sections, in_tiles, pass_turn, philox, wait_turn
from kernels.hopper.versions import all_threads, async_atomic_add, async_load, async_store, reinterpret
from kernels.problem import Problem, processors

KEYS = 64  # of one consumer
# Head size -> BLOCK_M. A consumer's scores, and what it needs beside them, fill its registers.
BLOCK_M = {64: 128, 128: 64}
# Head size -> whether step() computes dq of the tile before, so that no consumer waits for the other's ds of this tile.
LATE = {64: True, 128: False}
SECTION = gl.constexpr(256)  # tiles of keys of the heads that are computed at the same time, if G > 1. Measured
LONG = 2**15  # keys from which on there are waves with the causal mask, G = 1 and D = 128. Measured
SUMS_BYTES = 2**29  # of float32 sums at a time, or what one key head needs: of a million tokens not all heads at once


@dataclass(frozen=True, eq=False)
class How:
    """What the kernel is compiled for: every field is a constexpr."""

    KEYS: gl.constexpr  # of one consumer
    BLOCK_M: gl.constexpr  # queries of a tile
    D: gl.constexpr
    G: gl.constexpr  # query heads of a key head
    LATE: gl.constexpr
    WAVE: gl.constexpr  # tiles of keys of a wave, one for each program: item_at(). 0: there are no waves
    DQ_FIRST: gl.constexpr  # a step starts dq before dk, and hands it over while dk is computed. Always, if LATE
    TURNS: gl.constexpr  # 2: the consumers start their tiles in turn, so one computes while the other multiplies; or 0
    CAUSAL: gl.constexpr
    DROPOUT: gl.constexpr


# What to compute, in the words of kernels/flash.py. seed: None without dropout.
#     begin, heads    the first key head of this launch, as b * H_kv + h_kv, and their number
#     dk_scale        what the sums of dk are multiplied by; dv_scale: those of dv, 1 / (share kept)
Task = namedtuple("Task", "begin heads H T T_k scale2 dk_scale dv_scale seed threshold")

# What lies in shared memory. Places for tiles:
#     k, v     (2, 1, 1, KEYS, D): one of each consumer; in the end dk and dv, too
#     q, do    (2, 1, 1, BLOCK_M, D)
#     terms    (2, 1, 1, 1, 2 * BLOCK_M): -lse2, then -delta * delta_scale; with q's barriers
#     ds       (4, KEYS, BLOCK_M): of two tiles by two consumers
#     dq       (4, 1, 1, 16, 256): halves of two tiles, by two consumers: hand_over()
#     taken    (2, 32): the number of the tile of keys, and of the next
# and barriers, as in the forward: one for k and v, one for a tile's two ds (if LATE), else one for each place.
Shared = namedtuple("Shared", "k v q do terms ds dq kv_full q_full do_full ds_full dq_full kv_free q_free do_free "
                    "ds_free dq_free taken taken_full taken_free")  # fmt: skip


# --- The launch -------------------------------------------------------------------------------------------------------
def launch_backward(q, k, v, o, lse2, do, dlse, dq, dk, dv, problem: Problem) -> None:
    """Writes dq, dk and dv. lse2 (B, H, T) is in base 2, as launch_forward writes it; dlse (B, H, T) is contiguous."""
    (B, H, T, D), (H_kv, T_k) = q.shape, k.shape[1:3]
    rows, G, dropout, threshold = BLOCK_M[D], H // H_kv, problem.seed is not None, problem.threshold
    keep_scale, doubled = problem.keep_scale, 2.0 if dropout else 1.0  # doubled: step() has p + |p|, so 2 p
    scale = problem.scale * keep_scale / doubled  # of dq and dk: step() computes ds * doubled / keep_scale
    tiles = -(-T // rows)
    terms = lse2.new_empty(B, H, tiles, 2 * rows)
    row_terms_kernel[(B * H * tiles,)](
        o, do, dlse, lse2, terms, *o.stride()[:3], *do.stride()[:3], H, T, doubled / keep_scale, rows, D, num_warps=4
    )
    inputs = *(in_tiles(x, rows) for x in (q, do)), *(in_tiles(x, KEYS) for x in (k, v, dk, dv)), in_tiles(terms, 1)
    blind_rows = max(T - T_k, 0) if problem.causal else 0  # the first rows see no key, and may have no sums
    of_one = 4 * G * tiles * rows * D  # bytes for one key head: the sums of dq of its G query heads
    at_once = min(B * H_kv, max(1, SUMS_BYTES // of_one))
    sums = lse2.new_empty(1, at_once * G * tiles * 2, 16, 256)  # of dq: halves of tiles
    wave = processors(q.device) if problem.causal and D == 128 and G == 1 and T_k >= LONG else 0
    for begin in range(0, B * H_kv, at_once):
        heads = min(at_once, B * H_kv - begin)
        items = -(-T_k // (2 * KEYS)) * heads  # those that have keys
        counters = torch.zeros(1 + heads * G * tiles * 2, dtype=torch.int32, device=q.device)  # items taken; added
        backward_kernel[(min(items, processors(q.device)),)](
            *inputs, in_tiles(sums, 16), counters, begin, heads, H, T, T_k,
            problem.scale * math.log2(math.e), scale, keep_scale, problem.seed, threshold,
            how(D, G, wave, problem.causal, dropout), num_warps=4, maxnreg=168,
        )  # fmt: skip
        scaled_kernel[(heads * G * tiles * 2,)](
            sums, dq, *dq.stride()[:3], begin * G, H, T, blind_rows, scale, rows, D, num_warps=4
        )


@cache  # Triton looks up the compiled kernel by identity
def how(D: int, G: int, wave: int, causal: bool, dropout: bool) -> How:
    dq_first = LATE[D] or (G == 1 and not wave)  # where it was faster; so were turns below
    turns = 2 if LATE[D] and not dropout else 0
    return How(*map(gl.constexpr, (KEYS, BLOCK_M[D], D, G, LATE[D], wave, dq_first, turns, causal, dropout)))


@triton.jit(do_not_specialize=["H", "T"])
def row_terms_kernel(
    o, do, dlse, lse2, terms, o_b, o_h, o_t, do_b, do_h, do_t, H, T, delta_scale, ROWS: tl.constexpr, D: tl.constexpr
):
    """For each row -lse2, and -delta * delta_scale (step 7). A row that sees no key, or is past the last, gets -inf for
    -lse2. Then its weights are 0."""
    tiles = tl.cdiv(T, ROWS)
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    b, h, row, inside = (n // H).to(tl.int64), (n % H).to(tl.int64), i.to(tl.int64)[:, None], i < T
    o_i = tl.load(o + b * o_b + h * o_h + row * o_t + d, mask=inside[:, None], other=0.0)
    do_i = tl.load(do + b * do_b + h * do_h + row * do_t + d, mask=inside[:, None], other=0.0)
    minus_delta = -tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
    at = n.to(tl.int64) * T + i
    if dlse is not None:
        minus_delta += tl.load(dlse + at, mask=inside, other=0.0)
    minus_lse2 = -tl.load(lse2 + at, mask=inside, other=float("inf"))
    minus_lse2 = tl.where(minus_lse2 == float("inf"), -float("inf"), minus_lse2)
    at = tl.program_id(0).to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(terms + at, minus_lse2)
    tl.store(terms + at + ROWS, minus_delta * delta_scale)


@triton.jit(do_not_specialize=["begin", "H", "T", "blind_rows"])
def scaled_kernel(sums, dq, dq_b, dq_h, dq_t, begin, H, T, blind_rows, scale, ROWS: tl.constexpr, D: tl.constexpr):
    """dq = sums * scale, rounded to its dtype; 0 in the first `blind_rows` rows. The sums are those of the heads from
    n = begin on. A program computes half of a tile, (64, 64): half of its rows at D = 64, of its columns at D = 128."""
    per_head = 2 * tl.cdiv(T, ROWS)
    n, half = tl.program_id(0) // per_head, tl.program_id(0) % per_head  # half: of all halves of a head
    x = tl.load(sums + tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096))
    x = x.reshape((8, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, 64))  # undoes hand_over()
    i, d = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    i, d = i + half // (D // 64) * 64, d + half % (D // 64) * 64
    b, h, row = ((begin + n) // H).to(tl.int64), ((begin + n) % H).to(tl.int64), i.to(tl.int64)
    x = tl.where(i >= blind_rows, x * scale, 0.0)
    tl.store(dq + b * dq_b + h * dq_h + row * dq_t + d, x.to(dq.dtype.element_ty), mask=i < T)


# --- The kernel -------------------------------------------------------------------------------------------------------
# 16-bit tensors q, do, k, v, dk and dv come as descriptors of tiles (1, 1, rows, D).


@gluon.jit(do_not_specialize=["begin", "heads", "H", "T", "T_k", "threshold"])  # only how.WAVE depends on lengths
def backward_kernel(q, do, k, v, dk, dv, terms, sums, counters, begin, heads, H, T, T_k, scale2, dk_scale,
                    dv_scale, seed, threshold, how: gl.constexpr):  # fmt: skip
    """Makes the buffers and barriers, and gives the warps their jobs."""
    task = Task(begin, heads, H, T, T_k, scale2, dk_scale, dv_scale, seed, threshold)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([how.KEYS, how.BLOCK_M], q.dtype)
    shared = Shared(
        gl.allocate_shared_memory(k.dtype, [2, 1, 1, how.KEYS, how.D], k.layout),
        gl.allocate_shared_memory(k.dtype, [2, 1, 1, how.KEYS, how.D], k.layout),
        gl.allocate_shared_memory(q.dtype, [2, 1, 1, how.BLOCK_M, how.D], q.layout),
        gl.allocate_shared_memory(q.dtype, [2, 1, 1, how.BLOCK_M, how.D], q.layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, 2 * how.BLOCK_M], terms.layout),
        gl.allocate_shared_memory(q.dtype, [4, how.KEYS, how.BLOCK_M], ds_layout),
        gl.allocate_shared_memory(gl.float32, [4, 1, 1, 16, 256], sums.layout),
        # Full, then free: kv, q, do, ds, dq. No barrier that nobody waits for: Triton puts other data in its place, and
        # it can be lost when the GPU switches to another process.
        barriers(1, 1), barriers(2, 1), barriers(2, 1), barriers(2, 2) if how.LATE else None, barriers(4, 1),
        barriers(1, 2), barriers(2, 2), barriers(2, 2), barriers(2, 2) if how.LATE else None, barriers(4, 1),
        gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1), barriers(2, 4),  # taken: full, and free when four jobs have read it
    )  # fmt: skip
    # Gluon wants the list of jobs as a literal. The first job runs on the program's own warps.
    gl.warp_specialize([
        (consumer, (shared, dk, dv, task, how, 0)),
        (consumer, (shared, dk, dv, task, how, 1)),
        (producer, (shared, q, do, k, v, terms, counters, task, how)),
        (adder, (shared, sums, counters, task, how, 0)),
        (adder, (shared, sums, counters, task, how, 1)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


@gluon.jit
def items_of(task, how: gl.constexpr):
    """How many tiles of 2 * KEYS keys there are. Waves are whole: a head's last tiles may have no keys."""
    per_head = gl.cdiv(task.T_k, 2 * how.KEYS)
    return task.heads * (gl.cdiv(per_head, how.WAVE) * how.WAVE if how.WAVE else per_head)


@gluon.jit
def item_at(item, task, how: gl.constexpr):
    """key_head, tile, down, first, whole, stop: a tile of keys of a key head. It visits the tiles of queries from first
    to stop - 1, or if `down` from stop - 1 to first. The mask cuts none from `whole` on. stop is 0 past the last key.
    An item waits for earlier ones only."""
    per_head = gl.cdiv(task.T_k, 2 * how.KEYS)
    stop = gl.cdiv(task.T, how.BLOCK_M)
    down = how.G > 1
    # The last keys of a head come first, and visit the queries upwards. With the causal mask each tile of keys begins
    # at its own diagonal, so it seldom waits for its turn.
    key_head, tile = item // per_head, per_head - 1 - item % per_head
    if how.G > 1:
        # In that order q and do would not fit the L2 cache. So all visit the same queries at the same time, downwards.
        # The first keys come first: if causal, they visit the most.
        key_head, tile = in_sections(item, per_head, gl.maximum(SECTION // per_head, 1), task.heads)
    if how.WAVE:
        # Two heads alternate: one upwards, where each item takes longer than the one before, so that the programs move
        # apart, and one downwards, where each takes less time and they meet again.
        waves = gl.cdiv(per_head, how.WAVE)
        key_head, wave = in_sections(item // how.WAVE, waves, 2, task.heads)
        tile = wave * how.WAVE + item % how.WAVE
        down = key_head % 2 == 1
        tile = gl.where(down, tile, waves * how.WAVE - 1 - tile)
        stop = gl.where(tile < per_head, stop, 0)
    first, whole = 0, 0
    if how.CAUSAL:
        low = tile * (2 * how.KEYS) + task.T - task.T_k
        first = gl.maximum(low, 0) // how.BLOCK_M
        whole = gl.minimum(gl.cdiv(gl.maximum(low + 2 * how.KEYS - 1, 0), how.BLOCK_M), stop)
    whole = gl.where((tile + 1) * (2 * how.KEYS) > task.T_k, stop, whole)  # those past the last key are masked
    return key_head, tile, down, first, whole, stop


@gluon.jit
def nth_tile(x, first, stop, down):
    """The tile of queries, of first to stop - 1, that is visited after x others."""
    return gl.where(down, stop - 1 - x, first + x)


@gluon.jit
def head_at(key_head, task, how: gl.constexpr):
    """b and h_kv of a key head."""
    H_kv = task.H // how.G
    return (task.begin + key_head) // H_kv, (task.begin + key_head) % H_kv


@gluon.jit
def producer(shared, q, do, k, v, terms, counters, task, how: gl.constexpr):
    """Takes one tile of keys after the other until there are no more, tells the other jobs, and copies the tiles of k,
    v, q and do as they free the places."""
    count = 0  # of tiles of queries, over all tiles of keys
    nth = 0  # of the tiles of keys that this program takes
    item = gl.atomic_add(counters, 1)  # not program_id: the items that it waits for have begun
    tell(shared, nth, item)
    while item < items_of(task, how):
        key_head, tile, down, first, _, stop = item_at(item, task, how)
        b, h_kv = head_at(key_head, task, how)
        mbarrier.wait(shared.kv_free.index(0), nth & 1 ^ 1)
        mbarrier.expect(shared.kv_full.index(0), 4 * k.block_type.nbytes)
        for c in gl.static_range(2):
            row = (2 * tile + c) * how.KEYS
            async_load(k, [b, h_kv, row, 0], shared.kv_full.index(0), shared.k.index(c))
            async_load(v, [b, h_kv, row, 0], shared.kv_full.index(0), shared.v.index(c))
        for x in range(stop - first):
            t = nth_tile(x, first, stop, down)
            for g in range(how.G):
                h, place, phase = h_kv * how.G + g, count & 1, count >> 1 & 1
                full = shared.q_full.index(place)
                mbarrier.wait(shared.q_free.index(place), phase ^ 1)
                mbarrier.expect(full, q.block_type.nbytes + terms.block_type.nbytes)
                async_load(terms, [b, h, t, 0], full, shared.terms.index(place))
                async_load(q, [b, h, t * how.BLOCK_M, 0], full, shared.q.index(place))
                full = shared.do_full.index(place)
                mbarrier.wait(shared.do_free.index(place), phase ^ 1)
                mbarrier.expect(full, do.block_type.nbytes)
                async_load(do, [b, h, t * how.BLOCK_M, 0], full, shared.do.index(place))
                count += 1
        # Not earlier: others, with later items, may wait for the sums of the one taken here.
        item = gl.atomic_add(counters, 1)
        nth += 1
        tell(shared, nth, item)


@gluon.jit
def tell(shared, nth, item):
    """The producer writes the number of the nth tile of keys: each thread to its own place. The first is read."""
    mbarrier.wait(shared.taken_free.index(nth & 1), nth >> 1 & 1 ^ 1)
    shared.taken.index(nth & 1).store(gl.full([32], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(shared.taken_full.index(nth & 1), count=1)


@gluon.jit
def told(shared, nth, WARPS: gl.constexpr):
    """Another job, of WARPS warps, reads that number."""
    mbarrier.wait(shared.taken_full.index(nth & 1), nth >> 1 & 1)
    item = gl.max(shared.taken.index(nth & 1).slice(0, 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    all_threads()  # have read it
    mbarrier.arrive(shared.taken_free.index(nth & 1), count=1)
    return item


@gluon.jit
def adder(shared, sums, counters, task, how: gl.constexpr, C: gl.constexpr):
    """Adds the C-th consumer's halves of dq to the sums. Tiles of keys add to a tile of dq in the order of items."""
    count = 0
    nth = 0  # of the tiles of keys that this program takes
    item = told(shared, nth, 1)
    while item < items_of(task, how):
        key_head, tile, down, first, _, stop = item_at(item, task, how)
        for x in range(stop - first):
            t = nth_tile(x, first, stop, down)
            last = gl.cdiv(task.T_k, 2 * how.KEYS) - 1  # the last tile of keys that tile t sees
            if how.CAUSAL:
                last = gl.minimum(last, ((t + 1) * how.BLOCK_M - 1 + task.T_k - task.T) // (2 * how.KEYS))
            before = gl.where(down, tile, last - tile)  # how many add earlier: 0 to tile - 1, or tile + 1 to last
            for g in range(how.G):
                half = ((key_head * how.G + g) * stop + t) * 2 + C
                added = counters + (1 + half)
                place = (count & 1) * 2 + C
                while acquired(added) != before:
                    pass
                mbarrier.wait(shared.dq_full.index(place), count >> 1 & 1)
                if before == 0:
                    async_store(sums, [0, half, 0, 0], shared.dq.index(place))
                else:
                    async_atomic_add(sums, [0, half, 0, 0], shared.dq.index(place))
                tma.store_wait(0)  # until it is read
                mbarrier.arrive(shared.dq_free.index(place), count=1)
                wait_written()
                all_threads()  # the one that copied need not be the one that counts
                gl.atomic_add(added, 1, sem="release")
                count += 1
        nth += 1
        item = told(shared, nth, 1)


@gluon.jit
def consumer(shared, dk, dv, task, how: gl.constexpr, C: gl.constexpr):
    """Steps 8 to 12 for the C-th half of each tile of keys that the producer takes."""
    count = 0  # of tiles of queries, over all tiles of keys
    nth = 0  # of the tiles of keys that this program takes
    seed = gl.load(task.seed) if how.DROPOUT else 0
    item = told(shared, nth, 4)
    if C == 1:
        pass_turn(C, how)  # the first turn is consumer 0's
    while item < items_of(task, how):
        count = gradients(count, item, nth & 1, shared, dk, dv, task, seed, how, C)
        nth += 1
        item = told(shared, nth, 4)
    if C == 0:
        wait_turn(C, how)  # as in the forward


@gluon.jit
def gradients(count, item, phase, shared, dk, dv, task, seed, how: gl.constexpr, C: gl.constexpr):
    """Writes dk and dv of KEYS keys; hands over half of each tile of dq. phase: of kv_full. Returns the new count."""
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.D, 16])
    key_head, tile, down, first, whole, stop = item_at(item, task, how)
    column0 = (2 * tile + C) * how.KEYS
    dk_c = gl.zeros([how.KEYS, how.D], gl.float32, d_layout)
    dv_c = gl.zeros([how.KEYS, how.D], gl.float32, d_layout)
    mbarrier.wait(shared.kv_full.index(0), phase)
    first_count = count
    head = (task.begin + key_head) * how.G
    for part in gl.static_range(1 if how.WAVE else 2):  # masked tiles are part 0 or, if G > 1 (downwards), part 1
        low, high = (first, whole) if part == (how.G > 1) else (whole, stop)
        if how.WAVE:  # all masked: those that are cut come first or last, and three loops would need more registers
            low, high = first, stop
        for x in range(high - low):
            t = nth_tile(x, low, high, down)
            for g in range(how.G):
                dk_c, dv_c = step(dk_c, dv_c, count, first_count, head + g, t, column0, shared, task, seed,
                                  part == (how.G > 1), how, C)  # fmt: skip
                count += 1
    if how.LATE:
        dq_c = warpgroup_mma_wait(0, [start_dq(count - 1, shared, how, C)])
        hand_over(dq_c, count - 1, shared, how, C)
        mbarrier.wait(shared.ds_free.index(count - 1 & 1), count - 1 >> 1 & 1)  # the other consumer has read ds and k
    else:
        both_consumers()  # have read k
    as_matrix(shared.k.index(C), how.KEYS, how).store((dk_c * task.dk_scale).to(dk.dtype))
    as_matrix(shared.v.index(C), how.KEYS, how).store((dv_c * task.dv_scale).to(dv.dtype))
    fence_async_shared()
    b, h_kv = head_at(key_head, task, how)
    async_store(dk, [b, h_kv, column0, 0], shared.k.index(C))  # writes no rows past T_k
    async_store(dv, [b, h_kv, column0, 0], shared.v.index(C))
    tma.store_wait(0)
    mbarrier.arrive(shared.kv_free.index(0), count=1)
    return count


@gluon.jit
def step(dk_c, dv_c, count, first_count, n, t, column0, shared, task, seed,
         MASKED: gl.constexpr, how: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Steps 8 to 12 for one tile of queries; if how.LATE, dq is that of the tile before. first_count: count at
    the first tile, before which there is none. Three orders: LATE (D = 64); DQ_FIRST alone; neither."""
    d_layout: gl.constexpr = dk_c.type.layout
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.BLOCK_M, 16])
    place, phase = count & 1, count >> 1 & 1
    q_i, do_i = as_matrix(shared.q.index(place), how.BLOCK_M, how), as_matrix(shared.do.index(place), how.BLOCK_M, how)
    terms = shared.terms.index(place).reshape((2, how.BLOCK_M))
    ds_place = shared.ds.index(place * 2 + C)
    k_c, v_c = as_matrix(shared.k.index(opaque(C)), how.KEYS, how), as_matrix(shared.v.index(C), how.KEYS, how)
    wait_turn(C, how)
    mbarrier.wait(shared.q_full.index(place), phase)
    s = gl.zeros([how.KEYS, how.BLOCK_M], gl.float32, s_layout)
    s = warpgroup_mma(k_c, q_i.permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(shared.do_full.index(place), phase)
    dp = gl.zeros([how.KEYS, how.BLOCK_M], gl.float32, s_layout)
    dp = warpgroup_mma(v_c, do_i.permute((1, 0)), dp, use_acc=False, is_async=True)  # 10
    if how.DROPOUT:
        if how.LATE:  # draw() writes to the place of ds. (Else both_consumers() has waited)
            mbarrier.wait(shared.ds_free.index(place), phase ^ 1)
        bits = draw(n, t * how.BLOCK_M, column0, seed, task.threshold, ds_place, s_layout, how)
    s = warpgroup_mma_wait(1, [s])
    s = s * task.scale2 + terms.slice(0, 1).load(s_layout)
    if MASKED:
        s = hide(s, t, column0, task, how)
    p = gl.exp2(s)  # 8
    if how.DROPOUT:
        p = signed(p, bits)
        dv_c = warpgroup_mma(as_kept_operand(p, d_layout, q_i.dtype), do_i, dv_c, is_async=True)  # 9
    else:
        dv_c = warpgroup_mma(as_operand(p.to(q_i.dtype), d_layout), do_i, dv_c, is_async=True)  # 9
    pass_turn(C, how)
    dp = warpgroup_mma_wait(1, [dp])  # until one product still runs
    minus_delta = terms.slice(1, 1).load(s_layout)
    if how.DROPOUT:  # 11: 2 ds / keep_scale, because p + |p| is 2 p or 0; the terms have -2 delta / keep_scale
        ds = gl.fma(p + gl.abs(p), dp, gl.abs(p) * minus_delta).to(q_i.dtype)
    else:
        ds = (p * (dp + minus_delta)).to(q_i.dtype)
    if how.LATE and not how.DROPOUT:
        mbarrier.wait(shared.ds_free.index(place), phase ^ 1)
    ds_place.store(ds)
    fence_async_shared()
    ds = as_operand(ds, d_layout)
    if how.LATE:
        all_threads()
        mbarrier.arrive(shared.ds_full.index(place), count=1)
    else:
        if not how.DQ_FIRST:
            dk_c = warpgroup_mma(ds, q_i, dk_c, is_async=True)
        both_consumers()  # have stored ds, and have read ds of the tile before, whose place the next tile takes
    if how.DQ_FIRST:
        of_dq = count - 1 if how.LATE else count  # at the first tile a product that nobody uses: its ds is there
        dq_c = start_dq(of_dq, shared, how, C)
        dk_c = warpgroup_mma(ds, q_i, dk_c, is_async=True)
        dv_c, dq_c = warpgroup_mma_wait(1, [dv_c, dq_c])
        mbarrier.arrive(shared.do_free.index(place), count=1)
        if of_dq >= first_count:
            hand_over(dq_c, of_dq, shared, how, C)
        dk_c = warpgroup_mma_wait(0, [dk_c])
        mbarrier.arrive(shared.q_free.index(place), count=1)
    else:
        dq_c = start_dq(count, shared, how, C)
        await_dq_place(count, shared, C)  # while products run
        dk_c, dv_c, dq_c = warpgroup_mma_wait(0, [dk_c, dv_c, dq_c])
        mbarrier.arrive(shared.q_free.index(place), count=1)
        mbarrier.arrive(shared.do_free.index(place), count=1)
        hand_over(dq_c, count, shared, how, C)
    return dk_c, dv_c


@gluon.jit
def opaque(x: gl.constexpr):
    """x, but the compiler does not know that it is the same in each step. Else it keeps what it computes from x, the
    addresses of k's slices, in 32 registers all the time, and has to move others to memory."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_dq_place(count, shared, C: gl.constexpr):
    """Waits until the adder has read the half of a tile of dq whose place the next one takes."""
    mbarrier.wait(shared.dq_free.index((count & 1) * 2 + C), count >> 1 & 1 ^ 1)


@gluon.jit
def hand_over(dq_c, count, shared, how: gl.constexpr, C: gl.constexpr):
    """Gives half of a tile of dq to the adder. If how.LATE, first frees the ds that it was computed from: the other
    consumer may wait for it. If how.DQ_FIRST, waits for the place; else step() has."""
    if how.LATE:
        mbarrier.arrive(shared.ds_free.index(count & 1), count=1)
    if how.DQ_FIRST:
        await_dq_place(count, shared, C)
    place = (count & 1) * 2 + C
    # (64, 64) as (16, 256), with four numbers of a thread, two of row r and two of r + 8, side by side. Then it stores
    # all four at once, and the threads of a warp write to different banks of shared memory. The axes are: warp, r or
    # r + 8, r; eight columns, a pair of them, one of it. In memory: eight columns, warp, r, pair; then the four.
    dq_c = dq_c.reshape((4, 2, 8, 8, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((16, 256))
    shared.dq.index(place).reshape((16, 256)).store(dq_c)
    fence_async_shared()
    all_threads()
    mbarrier.arrive(shared.dq_full.index(place), count=1)


@gluon.jit
def start_dq(count, shared, how: gl.constexpr, C: gl.constexpr):
    """Starts ds^T k over the keys of both consumers, for half of the tile of dq, (64, 64): half of its columns at
    D = 128, of its rows at D = 64."""
    if how.LATE:
        mbarrier.wait(shared.ds_full.index(count & 1), count >> 1 & 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_c = gl.zeros([64, 64], gl.float32, layout)
    for c in gl.static_range(2):
        ds, k_c = shared.ds.index((count & 1) * 2 + c), shared.k.index(opaque(c))
        # A tile of 128 columns lies in shared memory as two of 64.
        if how.D == 128:
            k_c = halves(k_c).index(C)
        else:
            ds, k_c = halves(ds).index(C), as_matrix(k_c, how.KEYS, how)
        dq_c = warpgroup_mma(ds.permute((1, 0)), k_c, dq_c, use_acc=c != 0, is_async=True)
    return dq_c


@gluon.jit
def hide(s, t, column0, task, how: gl.constexpr):
    """-inf for keys past the last, and for those that the causal mask hides."""
    i = gl.arange(0, how.BLOCK_M, gl.SliceLayout(0, s.type.layout))
    j = gl.arange(0, how.KEYS, gl.SliceLayout(1, s.type.layout))
    first = 0  # the first query of the tile that sees key j
    if how.CAUSAL:
        first = j + (column0 + task.T - task.T_k - t * how.BLOCK_M)
    first = gl.where(j < task.T_k - column0, first, how.BLOCK_M)
    return gl.where(gl.expand_dims(first, 1) <= gl.expand_dims(i, 0), s, -float("inf"))


@gluon.jit
def draw(n, row0, column0, seed, threshold, place, layout: gl.constexpr, how: gl.constexpr):
    """The bits of model/dropout.py for a tile: int32 (KEYS, BLOCK_M), for signed(). A Philox call decides for 16
    weights, of which a thread has eight. So each call is made once, and the threads exchange the results through
    `place`, where ds comes later."""
    SQUARES: gl.constexpr = how.BLOCK_M // 32
    # Bits of `call`: 0-2 of the query, 3-5 of the key, 6 the square of keys, 7 on that of queries
    call = gl.arange(0, SQUARES * 128, gl.BlockedLayout([1], [32], [4], [0]))
    c0 = (row0 >> 5 << 3).to(gl.uint32) + ((call >> 7 << 3) | (call & 7)).to(gl.uint32)  # without bits 3 and 4
    c1 = (column0 >> 5 << 3).to(gl.uint32) + (call >> 3 & 15).to(gl.uint32)
    words = philox(c0, c1, n.to(gl.uint32), 0, seed.to(gl.uint32), (seed >> 32).to(gl.uint32))
    # Bit 7 of each byte of `dropped`: whether it is below the threshold, by the rule of drawn() in forward.py.
    # In `bits` that of word w is bit 4 + w.
    to_add = ((128 - (threshold & 127)) * 0x01010101).to(gl.uint32)
    upper_is_0 = ((threshold >> 7) - 1).to(gl.uint32)
    bits = c0 & 0  # zeros
    for word in gl.static_range(4):
        w = words[word]
        others = (w & 0x7F7F7F7F) + to_add
        dropped = ~((others & w) | ((others | w) & upper_is_0))
        bits = (dropped & 0x80808080) | (bits >> 1 & 0x7F7F7F7F)
    # An int32 for each call: bits 3-4 of the key choose its byte, and those of the query, w, the bit 4 + w in it
    table = as_table(place, SQUARES)
    table.store(bits.to(gl.int32).reshape((SQUARES, 2, 8, 8)))
    # Axes: bits 5 on, 3-4, 0-2 of the key, then of the query. So the table has no axes 1 and 4.
    split: gl.constexpr = (
        gl.zeros([how.KEYS, how.BLOCK_M], gl.int32, layout).reshape((2, 4, 8, SQUARES, 4, 8)).type.layout
    )
    mine = table.permute((1, 2, 0, 3)).load(gl.SliceLayout(3, gl.SliceLayout(1, split)))  # without axis 1, then 4
    mine = gl.expand_dims(gl.expand_dims(mine, 3), 1) + gl.zeros([2, 4, 8, SQUARES, 4, 8], gl.int32, split)
    mine = gl.convert_layout(mine.reshape((how.KEYS, how.BLOCK_M)), layout)
    key = gl.expand_dims(gl.arange(0, how.KEYS, gl.SliceLayout(1, layout)), 1)
    return mine >> (key & 16)  # bit 4 of the key, the same for a warp; signed() takes bit 3


@gluon.jit
def signed(p, bits):
    """p where it is kept, else -p: few registers are left, and a sign takes none. bits: of draw()."""
    key = gl.expand_dims(gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout)), 1)
    query = gl.expand_dims(gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout)), 0)
    sign = bits << (27 - (key & 8) - (query >> 3 & 3)) & -0x80000000
    return (p.to(gl.int32, bitcast=True) ^ sign).to(gl.float32, bitcast=True)


@gluon.jit
def as_kept_operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    """as_operand() of what signed() returns, with 0 for what is not kept."""
    two: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    convert: gl.constexpr = f"cvt.rn.relu.{two}.f32 $0, $2, $1;"
    p = gl.inline_asm_elementwise(convert, "=r,r,r", [p], dtype=dtype.value, is_pure=True, pack=2)
    return as_operand(p, layout)


@gluon.jit
def as_table(x, SQUARES: gl.constexpr):
    """The first eighth of shared memory of (KEYS, BLOCK_M), as int32 (SQUARES, 2, 8, 8)."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    return reinterpret(x, gl.int32, [8, SQUARES, 2, 8, 8], layout).index(0)


@gluon.jit
def halves(x):
    """Shared memory of a tile whose rows have 128 columns of 16 bits, as (2, 64, 64)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], x.dtype)
    return reinterpret(x, x.dtype, [2, 64, 64], layout)


@gluon.jit
def both_consumers():
    """Waits until the threads of both consumers are here. Barriers 9 and 10 are those of wait_turn()."""
    wait: gl.constexpr = "bar.sync 11, 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(wait, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def acquired(x):
    """Loads the number at x. What others wrote before that number is then visible; with the fence, to copies, too."""
    load: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1]; fence.proxy.async;"
    return gl.inline_asm_elementwise(load, "=r,l", [x.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_written():
    """Waits until what this thread copied or added is in memory, for all programs."""
    wait: gl.constexpr = "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(wait, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
