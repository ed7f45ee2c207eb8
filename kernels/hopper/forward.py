"""The forward of FlashAttention for Hopper GPUs (sm_90), in Gluon, Triton's language that shows the machine.

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size, n = b*H + h.
    q, o (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The steps have the numbers of model/attention.py; kernels/flash.py has the same forward without this page's machinery,
which docs/hopper.md explains. A group is CONSUMERS tiles of ROWS query rows each. Each processor runs one program,
which computes one group after the other. Its warps have different jobs:

    producer    one warp: takes the groups; copies q, then tiles of k and v, to shared memory, ahead of their use (TMA)
    consumer    four warps (a warpgroup) for each tile of queries of a group: steps 1 to 6

Tiles of keys are visited from the last to the first. So the one that the causal mask cuts comes before the loop
(it may cut one more if T_k - T is no multiple of ROWS).
Limits: float16 and bfloat16, D 64 or 128; causal masks, windows, documents and dropout.

Sources: Shah et al. 2024 (FlashAttention-3, arXiv 2407.08608) for the jobs and the overlap; Triton's Gluon tutorials.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import flash  # three of its functions are compiled as Gluon, too
from kernels.hopper.versions import all_threads, async_load, async_store
from kernels.problem import LOWEST, Problem, processors

START = gl.constexpr(LOWEST)
LN2 = gl.constexpr(math.log(2))
philox, between, in_documents = (gluon.jit(x.fn) for x in (flash.philox, flash.between, flash.in_documents))
NAMES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True, eq=False)
class How:
    """What the kernel is compiled for: every field is a constexpr."""

    ROWS: gl.constexpr  # of queries, of one consumer
    D: gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    TURNS: gl.constexpr  # how many consumers start their products in turn: wait_turn(); 0: they do not
    REGISTERS: gl.constexpr  # of a consumer's thread
    STAGES: gl.constexpr  # tiles of k, and as many of v, in shared memory
    CUT_ONCE: gl.constexpr  # the mask cuts at most the first tile that a consumer visits
    DROPOUT: gl.constexpr


# What to compute, in the words of kernels/flash.py. None: there is no such rule.
#     heads      B * H
#     section    heads that are computed at the same time: in_sections()
Task = namedtuple("Task", "heads section H T T_k at_least at_most spans scale2 seed threshold keep_scale")

# What lies in shared memory. Places for tiles:
#     q, o     (CONSUMERS, 1, 1, ROWS, D)
#     k, v     (STAGES, 1, 1, BLOCK_N, D)
#     taken    (2, 32): the number of the next group, and of the one after
# and barriers, with one entry for each place: NAME_full says that NAME has arrived, NAME_free that it has been read.
Shared = namedtuple("Shared", "q k v o q_full k_full v_full q_free k_free v_free taken taken_full")


# --- The launch -------------------------------------------------------------------------------------------------------

ROWS = 64  # of a consumer's tile
SECTION_BYTES = 32 * 2**20  # of the keys and values of a section of heads, which stay in the GPU's L2 cache
# Consumers -> registers per thread at the start, and of a consumer after the other warps gave it most of theirs.
REGISTERS = {2: (168, 240), 3: (128, 160), 4: (96, 112)}


def launch_forward(q, k, v, o, lse, lse2, problem: Problem) -> None:
    """Writes o, lse, and lse in base 2 for the backward."""
    (B, H, T, D), (H_kv, T_k) = q.shape, k.shape[1:3]
    spans, dropout = problem.spans, problem.seed is not None
    # 64 rows' last keys lie in one tile of keys if T_k - T is a multiple of 64
    cut_once = problem.window is None and spans is None and (not problem.causal or (T_k - T) % ROWS == 0)
    block_n, consumers, stages = 128, 2, 3 if D == 64 else 2  # the fastest tried on an H200
    if D == 64 and cut_once and not dropout:  # otherwise three or four consumers have too few registers
        block_n, consumers, stages = (64, 4, 6) if T_k <= 2048 else (128, 3, 2)
    groups = -(-T // (ROWS * consumers)) * B * H  # of CONSUMERS tiles of queries
    section = min(max(1, SECTION_BYTES * H // (H_kv * 2 * k[0, 0].nbytes)), B * H)
    forward_kernel[(min(groups, processors(q.device)),)](
        in_tiles(q, ROWS), in_tiles(k, block_n), in_tiles(v, block_n), in_tiles(o, ROWS),
        lse, lse2, torch.zeros(1, dtype=torch.int32, device=q.device), H // H_kv,  # the last two: counter, G
        B * H, section, H, T, T_k, problem.at_least, problem.at_most, None if spans is None else spans.contiguous(),
        problem.scale * math.log2(math.e), problem.seed, problem.threshold, problem.keep_scale,
        how(D, block_n, consumers, stages, cut_once, dropout), num_warps=4, maxnreg=REGISTERS[consumers][0],
    )  # fmt: skip


@cache  # Triton looks up the compiled kernel by identity
def how(D: int, block_n: int, consumers: int, stages: int, cut_once: bool, dropout: bool) -> How:
    turns = consumers if consumers == 3 or (consumers == 2 and D == 128) else 0  # where they were faster
    registers = REGISTERS[consumers][1]
    return How(*map(gl.constexpr, (ROWS, D, block_n, consumers, turns, registers, stages, cut_once, dropout)))


def in_tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x (B, H, T, D) in tiles (1, 1, rows, D)."""
    return TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[3]], shared_layout(rows, x.shape[3], x.dtype))


@cache
def shared_layout(rows: int, D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: 16 bits as copies and matrix products both read it, float32 row after row."""
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], NAMES[dtype])


# --- The kernel -------------------------------------------------------------------------------------------------------
# 16-bit tensors q, k, v and o come as descriptors of tiles (1, 1, rows, D).


@gluon.jit(do_not_specialize=["heads", "section", "H", "T", "T_k", "G", "at_least", "at_most", "threshold"])
def forward_kernel(q, k, v, o, lse, lse2, counter, G, heads, section, H, T, T_k, at_least, at_most, spans, scale2, seed,
                   threshold, keep_scale, how: gl.constexpr):  # fmt: skip
    """Makes the buffers and barriers, and gives the warps their jobs. Compiled for each How, dtype and set of Nones."""
    task = Task(heads, section, H, T, T_k, at_least, at_most, spans, scale2, seed, threshold, keep_scale)
    shared = Shared(
        gl.allocate_shared_memory(q.dtype, [how.CONSUMERS, 1, 1, how.ROWS, how.D], q.layout),
        gl.allocate_shared_memory(k.dtype, [how.STAGES, 1, 1, how.BLOCK_N, how.D], k.layout),
        gl.allocate_shared_memory(v.dtype, [how.STAGES, 1, 1, how.BLOCK_N, how.D], v.layout),
        gl.allocate_shared_memory(o.dtype, [how.CONSUMERS, 1, 1, how.ROWS, how.D], o.layout),
        barriers(how.CONSUMERS, 1), barriers(how.STAGES, 1), barriers(how.STAGES, 1),  # full
        barriers(how.CONSUMERS, 1), barriers(how.STAGES, how.CONSUMERS), barriers(how.STAGES, how.CONSUMERS),  # free
        gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1),
    )  # fmt: skip
    gl.warp_specialize(
        [  # the consumers, then the producer. Gluon wants a literal. The first runs on the program's own warps
            (consumer, (shared, o, lse, lse2, task, how, c))
            if c < how.CONSUMERS
            else (producer, (shared, q, k, v, counter, G, task, how))
            for c in (0, 1, 2, 3, 4)[: how.CONSUMERS + 1]
        ],
        [4] * (how.CONSUMERS - 1) + [1],  # warps of the other jobs, and their registers
        [how.REGISTERS] * (how.CONSUMERS - 1) + [24],
    )


@gluon.jit
def barriers(PLACES: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each place, whose phase ends after COUNT arrivals. Phases are numbered 0, 1, 0, 1, ... Tile x,
    counted from 0, lies in place x % PLACES (q in its consumer's): the reader waits for phase x // PLACES & 1 of
    NAME_full, the writer for the other phase of NAME_free. Of 2 places, tile 5 lies in place 1, with phase 0. A new
    barrier is past a phase 1, so its place is free."""
    found = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit
def groups_of(task, how: gl.constexpr):
    """How many groups of CONSUMERS tiles of queries there are."""
    return task.heads * gl.cdiv(task.T, how.CONSUMERS * how.ROWS)


@gluon.jit
def in_sections(item, per_head, section, all_heads):
    """The head of an item, and its place among the per_head items of that head. Items come in sections of heads, and in
    a section the first of each head come first, then the second ones."""
    begin = item // (per_head * section) * section
    heads = gl.minimum(section, all_heads - begin)  # the last section may have fewer
    item -= begin * per_head
    return begin + item % heads, item // heads


@gluon.jit
def group_at(group, task, how: gl.constexpr):
    """b, h, n and the first row of a group, and which tiles of keys it visits: start to stop - 1. Groups come in
    sections of heads. In a section the last rows of each head come first, because they see the most keys: while a
    program computed a long group at the end, the others would have nothing left to do."""
    per_head = gl.cdiv(task.T, how.CONSUMERS * how.ROWS)
    n, place = in_sections(group, per_head, task.section, task.heads)
    row0 = (per_head - 1 - place) * (how.CONSUMERS * how.ROWS)
    b, h = n // task.H, n % task.H
    start = key_tiles(b, row0, task, how)[0]
    stop = key_tiles(b, row0 + (how.CONSUMERS - 1) * how.ROWS, task, how)[3]
    return b, h, n, row0, start, stop


@gluon.jit
def key_tiles(b, row0, task, how: gl.constexpr):
    """For the ROWS rows from row0 on: tiles start to stop - 1 are visited, and the mask cuts none of those from
    whole_start to whole_stop - 1. At least one is visited, so that a row that sees no key is as any other, with weights
    of 0. Returns start, whole_start, whole_stop, stop."""
    low = gl.minimum(row0 + task.T_k - task.T, task.T_k - 1)  # the first row's position; rows past T have no spans
    high = low + how.ROWS - 1  # the last row's
    n_tiles, n_whole = gl.cdiv(task.T_k, how.BLOCK_N), task.T_k // how.BLOCK_N
    found = between(low, high, task.at_least, task.at_most, n_tiles, n_whole, how.BLOCK_N)
    start, whole_start, whole_stop, stop = in_documents(found, b, low, high, 0, task, how.BLOCK_N)
    stop = gl.maximum(stop, start + 1)
    if row0 >= task.T:  # rows past the last: one tile, because every consumer visits some
        start = stop - 1
    return start, whole_start, whole_stop, stop


@gluon.jit
def producer(shared, q, k, v, counter, G, task, how: gl.constexpr):
    """Takes one group after the other until there are no more, tells the consumers, and copies the tiles of q, k and v
    as they free the places. So the next group's tiles are there before this one ends."""
    count = 0  # of tiles of keys, over all groups
    nth = 0  # of the groups that this program takes
    group = gl.program_id(0)
    while group < groups_of(task, how):
        b, h, _, row0, start, stop = group_at(group, task, how)
        for c in gl.static_range(how.CONSUMERS):
            mbarrier.wait(shared.q_free.index(c), nth & 1 ^ 1)
            copy(q, b, h, row0 + c * how.ROWS, shared.q_full.index(c), shared.q.index(c))
        for visited in range(stop - start):
            place, phase = count % how.STAGES, count // how.STAGES & 1
            column0 = (stop - 1 - visited) * how.BLOCK_N
            mbarrier.wait(shared.k_free.index(place), phase ^ 1)
            copy(k, b, h // G, column0, shared.k_full.index(place), shared.k.index(place))
            mbarrier.wait(shared.v_free.index(place), phase ^ 1)
            copy(v, b, h // G, column0, shared.v_full.index(place), shared.v.index(place))
            count += 1
        # Only now, when the consumers have at most STAGES tiles left: one taken early would wait while others idle.
        group = gl.num_programs(0) + gl.atomic_add(counter, 1)
        # The place was written two groups ago, with the number of the group before the one just copied. All consumers
        # have read it, because they have freed that group's q. Each thread writes to its own place; the first is read.
        shared.taken.index(nth & 1).store(gl.full([32], group, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(shared.taken_full.index(nth & 1), count=1)
        nth += 1


@gluon.jit
def copy(x, b, h, row, full, tile):
    """Starts to copy a tile of x. `full` completes its phase when the bytes are there. Rows outside x become 0."""
    mbarrier.expect(full, x.block_type.nbytes)
    async_load(x, [b, h, row, 0], full, tile)


@gluon.jit
def consumer(shared, o, lse, lse2, task, how: gl.constexpr, C: gl.constexpr):
    """Steps 1 to 6 for the C-th tile of queries of each group that the producer takes."""
    count = 0  # of tiles of keys, over all groups
    nth = 0  # of the groups that this program takes
    group = gl.program_id(0)
    if C == how.CONSUMERS - 1:
        pass_turn(C, how)  # the first turn is consumer 0's
    while group < groups_of(task, how):
        count = attend(count, group, nth & 1, shared, o, lse, lse2, task, how, C)
        mbarrier.wait(shared.taken_full.index(nth & 1), nth // 2 & 1)
        group = gl.max(shared.taken.index(nth & 1).slice(0, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        nth += 1
    if C == 0:
        wait_turn(C, how)  # the last turn: else its barrier is left half full
    tma.store_wait(0)


@gluon.jit
def attend(count, group, phase, shared, o, lse, lse2, task, how: gl.constexpr, C: gl.constexpr):
    """Steps 1 to 6 for one tile of queries. A pass of the loop starts step 1 of a tile, then step 5 of the one before.
    phase: of the barrier of q. Returns the new count."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.D, 16])
    b, h, n, row0, group_start, group_stop = group_at(group, task, how)
    row0 += C * how.ROWS
    i = row0 + gl.arange(0, how.ROWS, gl.SliceLayout(1, s_layout))
    start, whole_start, whole_stop, stop = key_tiles(b, row0, task, how)
    count = skip(shared, count, group_stop - stop, how, C)  # the last rows of a group see more keys

    q_i = as_matrix(shared.q.index(C), how.ROWS, how)
    acc = gl.zeros([how.ROWS, how.D], gl.float32, o_layout)
    m = gl.full([how.ROWS], START, gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.full([how.ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    mbarrier.wait(shared.q_full.index(C), phase)
    wait_turn(C, how)
    s = scores(q_i, shared, count, s_layout, how)
    pass_turn(C, how)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(shared.k_free.index(count % how.STAGES), count=1)
    s = hide(s, b, i, stop - 1, task, how)  # 2
    p, m, l, alpha = online_softmax(s, m, l, task.scale2)  # 3
    # Dropout of a tile is drawn before its products begin (early) or after its softmax, whichever was faster.
    # With more to mask, early has too few registers.
    early: gl.constexpr = how.D == 128 and how.CUT_ONCE
    seed = gl.load(task.seed) if how.DROPOUT else 0
    p, keep = p.to(q_i.dtype), drawn(n, row0, stop - 1, seed, task, s_layout, how)
    for back in range(2, stop - start + 1):  # stop - 1 is done above
        tile = stop - back
        count += 1
        p = as_operand(drop(p, keep, how), o_layout)  # 4
        if early:
            keep = drawn(n, row0, tile, seed, task, s_layout, how)
        wait_turn(C, how)
        s = scores(q_i, shared, count, s_layout, how)
        acc = add_values(acc, p, shared, count - 1, how)  # 5
        pass_turn(C, how)
        s = warpgroup_mma_wait(1, [s])  # until one product still runs: that of add_values
        mbarrier.arrive(shared.k_free.index(count % how.STAGES), count=1)
        if not how.CUT_ONCE and (tile >= whole_stop or tile < whole_start):
            s = hide(s, b, i, tile, task, how)
        p_new, m, l, alpha = online_softmax(s, m, l, task.scale2)
        if not early:
            keep = drawn(n, row0, tile, seed, task, s_layout, how)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.v_free.index((count - 1) % how.STAGES), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o_layout)), 1)  # 5
        p = p_new.to(q_i.dtype)
    mbarrier.arrive(shared.q_free.index(C), count=1)
    acc = add_values(acc, as_operand(drop(p, keep, how), o_layout), shared, count, how)
    # 6: a row that sees no key has o = 0 / 1 = 0, and lse = log 0 = -inf
    at = n.to(gl.int64) * task.T + i
    gl.store(lse + at, m * LN2 + gl.log(l), mask=i < task.T)
    gl.store(lse2 + at, m + gl.log2(l), mask=i < task.T)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(shared.v_free.index(count % how.STAGES), count=1)
    count = skip(shared, count + 1, start - group_start, how, C)  # the first rows of a group may see earlier keys

    factor = gl.convert_layout(task.keep_scale / gl.where(l == 0, 1.0, l), gl.SliceLayout(1, o_layout))
    tma.store_wait(0)  # until the previous o has left its place
    as_matrix(shared.o.index(C), how.ROWS, how).store((acc * gl.expand_dims(factor, 1)).to(o.dtype))
    fence_async_shared()
    async_store(o, [b, h, row0, 0], shared.o.index(C))  # writes no rows past T
    return count


@gluon.jit
def wait_turn(C: gl.constexpr, how: gl.constexpr):
    """Consumers start their products in turn, one tile each. Otherwise they get into step: all wait for products, then
    all compute exponentials. The hardware's barriers from 9 on are theirs; Triton uses those below. 256: the threads of
    two consumers, of which one waits. Triton requires a result of assembly."""
    if how.TURNS:
        wait: gl.constexpr = f"bar.sync {9 + C}, 256; mov.b32 $0, $1;"
        gl.inline_asm_elementwise(wait, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(C: gl.constexpr, how: gl.constexpr):
    if how.TURNS:
        arrive: gl.constexpr = f"bar.arrive {9 + (C + 1) % how.TURNS}, 256; mov.b32 $0, $1;"
        gl.inline_asm_elementwise(arrive, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def skip(shared, count, tiles, how: gl.constexpr, C: gl.constexpr):
    """Frees tiles unread, which only the rows of other consumers see. Returns the new count. It waits until each
    has come: an earlier arrival would count for the tile before in that place, which another consumer may read."""
    for _ in range(tiles):
        wait_turn(C, how)  # all consumers have as many turns
        pass_turn(C, how)
        place, phase = count % how.STAGES, count // how.STAGES & 1
        mbarrier.wait(shared.k_full.index(place), phase)
        mbarrier.wait(shared.v_full.index(place), phase)
        all_threads()  # wait for each other: one that looks later might wait for the next tile
        mbarrier.arrive(shared.k_free.index(place), count=1)
        mbarrier.arrive(shared.v_free.index(place), count=1)
        count += 1
    return count


# --- The steps of a tile ----------------------------------------------------------------------------------------------
@gluon.jit
def scores(q_i, shared, count, layout: gl.constexpr, how: gl.constexpr):
    """Step 1: starts q k^T, (ROWS, BLOCK_N)."""
    place = count % how.STAGES
    mbarrier.wait(shared.k_full.index(place), count // how.STAGES & 1)
    k_j = as_matrix(shared.k.index(place), how.BLOCK_N, how)
    s = gl.zeros([how.ROWS, how.BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q_i, k_j.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc, p, shared, count, how: gl.constexpr):
    """Step 5: starts acc + p v, (ROWS, D)."""
    place = count % how.STAGES
    mbarrier.wait(shared.v_full.index(place), count // how.STAGES & 1)
    return warpgroup_mma(p, as_matrix(shared.v.index(place), how.BLOCK_N, how), acc, is_async=True)


@gluon.jit
def hide(s, b, i, tile, task, how: gl.constexpr):
    """Step 2: -inf for keys past the last, and for those that the mask hides from rows i."""
    j = tile * how.BLOCK_N + gl.arange(0, how.BLOCK_N, gl.SliceLayout(0, s.type.layout))
    position = i + (task.T_k - task.T)
    first, last = 0, gl.full([how.ROWS], task.T_k - 1, gl.int32, i.type.layout)
    if task.at_least is not None:
        first = position + task.at_least
    if task.at_most is not None:
        last = gl.minimum(position + task.at_most, last)
    if task.spans is not None:
        span = task.spans + (b.to(gl.int64) * task.T_k + position) * 2
        first = gl.maximum(gl.load(span, mask=i < task.T, other=0), first)
        last = gl.minimum(gl.load(span + 1, mask=i < task.T, other=0), last)
    if how.D == 128 and how.CUT_ONCE:
        # By arithmetic: three instructions for each weight, where ptxas takes five for a condition. At D = 64 it was
        # no faster, and where the mask cuts more it needs too many registers. 0.5, because 0 * inf is NaN.
        reach = (last - tile * how.BLOCK_N).to(gl.float32) + 0.5
        column = gl.arange(0, how.BLOCK_N, gl.SliceLayout(0, s.type.layout)).to(gl.float32)
        return gl.minimum(s, (gl.expand_dims(reach, 1) - gl.expand_dims(column, 0)) * float("inf"))
    seen = gl.expand_dims(j, 0) <= gl.expand_dims(last, 1)
    if (task.at_least is not None) or (task.spans is not None):
        seen = seen & (gl.expand_dims(j, 0) >= gl.expand_dims(first, 1))
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def online_softmax(s, m, l, scale2):
    """Step 3: returns p, and the new m, l and alpha. m is in base 2."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale2)
    p = gl.exp2(gl.fma(s, scale2, -gl.expand_dims(m_new, 1)))
    alpha = gl.exp2(m - m_new)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


# $1: two elements, neighbours in a row. $2, $3: their keep, of which byte $4 (or $5, which is equal) counts. `pick` has
# a nibble for each byte of `mask`: 8 + b fills it with the sign of byte b of $2, 12 + b with that of $3. If $4 is 1, it
# is 0xdd99. (prmt: 8 stands for the sign, and of its bytes 0 to 7 the last four are of $3.)
KEPT = gl.constexpr("""{
    .reg .b32 mask, pick;
    mad.lo.u32 pick, $4, 0x1111, 0xcc88;
    prmt.b32 mask, $2, $3, pick;
    and.b32 $0, $1, mask;
}""")


# The layout (16, 32) of a tile's Philox calls: what each bit of the number of a register, a lane and a warp adds to
# (i, j). i and j lack bits 3 and 4: [8, 0] is bit 5 of i, [0, 8] and [0, 16] bits 5 and 6 of j. Threads as in a
# product's result, where the number of a warp is bits 4 and 5 of i. Bit 4 is not here: bit 6 of j takes its place.
LANES = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
CALLED_ONCE = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8]], LANES, [[0, 16], [8, 0]], [], [16, 32]))
# The layout (16, 32, 2, 2) of words: each thread has those of its own elements. Bit 3 of i is a register, bit 4 a warp.
OWN, LANES4 = [[0, 1, 0, 0], [0, 8, 0, 0], [0, 16, 0, 0], [0, 0, 1, 0]], [[*lane, 0, 0] for lane in LANES]
OWN_WORDS = gl.constexpr(gl.DistributedLinearLayout(OWN, LANES4, [[0, 0, 0, 1], [8, 0, 0, 0]], [], [16, 32, 2, 2]))


@gluon.jit
def drawn(n, row0, tile, seed, task, layout: gl.constexpr, how: gl.constexpr):
    """Step 4: which weights of a tile are kept, by the bits of model/dropout.py. uint32 (ROWS, BLOCK_N):
    byte j // 8 % 4 of element (i, j) is negative if that is kept. Without dropout 0, for nothing.

    A Philox call decides for 16 elements, of which a thread has eight. So each call is made once, and the threads
    exchange the results."""
    keep = 0
    if how.DROPOUT:
        gl.static_assert(how.BLOCK_N == 128, "the layouts are of 64 x 128 elements")
        k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
        i = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, CALLED_ONCE)), 1)  # without bits 3 and 4
        j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, CALLED_ONCE)), 0)
        c0 = (row0 >> 5 << 3).to(gl.uint32) + i.to(gl.uint32)
        c1 = (tile * how.BLOCK_N >> 5 << 3).to(gl.uint32) + j.to(gl.uint32)
        w0, w1, w2, w3 = philox(c0, c1, n.to(gl.uint32), 0, k0, k1)
        word = gl.join(gl.join(w0, w1), gl.join(w2, w3))  # the last axes: bits 3 and 4 of i
        # Four bytes at a time; their upper bits are the result. A byte is at least the threshold if two of three are
        # true: its upper bit is 1; its other bits are at least those of the threshold; the threshold's upper bit is 0.
        others = (word | 0x80808080) - (task.threshold & 127).to(gl.uint32) * 0x01010101
        upper_is_0 = (task.threshold >> 7).to(gl.uint32) - 1
        word = gl.convert_layout((word & others) | (upper_is_0 & (word | others)), OWN_WORDS)
        word = gl.join(gl.join(word, word), gl.join(word, word))  # bits 3 and 4 of j
        # Axes: bits 5, 0-2 of i; 5-6, 0-2 of j; 3, 4 of i; 3, 4 of j. Along the last two all are equal.
        word = word.reshape((2, 8, 4, 8, 2, 2, 2, 2)).permute((0, 5, 4, 1, 2, 7, 6, 3))
        keep = gl.convert_layout(word.reshape((how.ROWS, how.BLOCK_N)), layout)
    return keep


@gluon.jit
def drop(p, keep, how: gl.constexpr):
    """Step 4 without the factor 1 / (share kept): p, which has 16 bits, where it is kept, else 0. keep: of drawn()."""
    if how.DROPOUT:
        j = gl.expand_dims(gl.arange(0, how.BLOCK_N, gl.SliceLayout(0, p.type.layout)), 0)
        byte = (j >> 3 & 3).to(gl.uint32)
        p = gl.inline_asm_elementwise(KEPT, "=r,r,r,r,r,r", [p, keep, byte], dtype=p.dtype, is_pure=False, pack=2)
    return p


@gluon.jit
def as_operand(p, layout: gl.constexpr):
    """p, of 16 bits, as the first operand of a product with this layout. Each thread already holds its part."""
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def as_matrix(tile, ROWS: gl.constexpr, how: gl.constexpr):
    """A tile (1, 1, ROWS, D) in shared memory as (ROWS, D)."""
    return tile.reshape((ROWS, how.D))
