"""FlashAttention in Triton: forward, and a backward that computes the weights again. Any GPU from Ampere on.

    o, lse = flash_attention(q, k, v, softmax_scale=D**-0.5, at_most=0)

Shapes: B batch, T query rows, T_k key rows, H query heads, H_kv key heads, D head size, n = b*H + h.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)
    a tile of queries has BLOCK_M rows, a tile of keys BLOCK_N; BLOCK_D is D rounded up to a power of two

The steps have the numbers of model/attention.py, where naive and tiled stand; docs/attention.md derives them. In the
order in which they run:

    flash_attention    the door: checks; then the op that torch.compile knows or, where nobody traces, Eager around it
    forward_kernel     a program for each tile of queries                     steps 1 to 6
    dq_kernel          a program for each tile of queries: its dq, delta       steps 7, 8 and 10 to 12
    dkdv_kernel        a program for each tile of keys: its dk and dv         steps 8 to 12, transposed

Sources: Dao 2023 (arXiv 2307.08691) for the order of the loops, Triton's fused-attention tutorial for the split of the
backward, Salmon et al. 2011 for Philox. How this differs from the paper: two passes in the backward instead of one with
atomic additions. Scores are computed twice, seven products instead of five, but no two programs add to one number, so
that a second run gives the same bits.

What is special: s and m are in base 2 (log2(e) goes into the scale, exp2 is the instruction there is); tiles that the
mask leaves whole run in a loop without a mask; in bfloat16, on Hopper, a row's m is learnt from few tiles, and as long
as in_vain finds nothing wrong nobody asks the others (every_tile); the heaviest tiles of a head start first; from
Hopper on the hardware loads tiles by itself, strides, edges and all, through tensor descriptors.
"""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.tiles import edges, listed

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where the running maximum starts: from the lowest float32 a row whose first tile is hidden has exp(-inf - LOWEST) = 0;
# from -inf it would have NaN.
LOWEST = -torch.finfo(torch.float32).max


class Mask(NamedTuple):
    """What a query sees. A row stands at a position among the keys, row i at i + T_k - T; None: that rule is off."""

    T: int
    T_k: int
    at_least: int | None  # of column - position: 1 - window
    at_most: int | None  # 0 when causal
    documents_q: Tensor | None  # (B, T) integers: a query sees keys of its own document
    documents_k: Tensor | None  # (B, T_k)
    positions: Tensor | None  # (T,) integers, for packs whose sequences have other lengths as queries than as keys
    blocks: Tensor | None  # bool: the blocks of block_size x block_size elements that are computed
    block_size: int
    block_columns: int
    local_m: int | None  # without global_mask: the causal mask compares places within tiles of local_m x local_n
    local_n: int | None


class Matrix(NamedTuple):
    """A (B, H, T, D) tensor where the hardware has no descriptors (before sm_90)."""

    pointer: Tensor
    stride_b: int
    stride_h: int
    stride_t: int
    rows: int
    width: int  # D


class Bend(NamedTuple):
    """What becomes of q k^T before the softmax."""

    scale: float
    scale2: float  # scale * log2(e), rounded once, and not as a product of two rounded numbers
    softcap: float | None
    slopes: Tensor | None  # (H,) float32, of alibi


class Dropout(NamedTuple):
    seed: Tensor | None  # int64 scalar; None: no dropout
    threshold: int  # of 256: bytes below it drop their element
    zero: float  # 0.0, handed in: with a constant the compiler rounds first and selects 16-bit halves (LOG.md)


class Visits(NamedTuple):
    """What kernels/tiles.py says of the tiles, where data decides which are visited; None where arithmetic on the mask
    is enough. The first three are pairs: the lowest and the highest number in every tile."""

    positions: tuple[Tensor, Tensor] | None  # of row tiles
    of_rows: tuple[Tensor, Tensor] | None  # (B, row tiles): documents
    of_keys: tuple[Tensor, Tensor] | None  # (B, key tiles)
    bounds: Tensor | None  # (tiles, 4), of a picture of blocks: between()'s answers, but of places in `tiles`
    tiles: Tensor | None  # (tiles, others)


# ---------------------------------------------------------------------------------------------------------------------
# The door.


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    at_least: int | None = None,
    at_most: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 64,
    seed: Tensor | None = None,
    drop_threshold: int = 0,
    without: str = "",
    autotune: bool = False,
) -> tuple[Tensor, Tensor]:
    """o = dropout(softmax(q k^T * softmax_scale + mask)) v, and the log-sum-exp of the scores; both have gradients.

    q (B, H, T, D); k, v (B, H_kv, T_k, D), float32, float16 or bfloat16, H a multiple of H_kv, D at most 256, any
    strides. (Where a row does not begin at a multiple of 16 bytes, or its numbers lie apart, a copy is made.) float32
    products are true float32 ones unless torch.set_float32_matmul_precision allows TF32.
    The fields of Mask say what a query sees, with documents = (those of the rows, those of the keys). softcap bends the
    scores, slopes (H,) float32 are alibi's. seed: int64 scalar tensor; with drop_threshold of 256 it drops weights by
    the mask of model/dropout.py.
    without: what to leave out of the algorithm, for those who want to see it fail, with + between: of subtract_max,
    start_low, rescale_sum, rescale_output, wide_output, global_mask, guard_empty_rows, same_seed (BreakIt in
    model/attention.py).
    autotune: time some tile sizes at the first call of a kind, and keep the fastest. Which that is may differ between
    two runs, and with it the last bits of the results.
    Returns o (B, H, T, D) like q, (B, T, H, D) in memory, and lse float32 (B, H, T), natural logarithm. A row with
    nothing to see gives o = 0, lse = -inf and gradients 0.
    Raises ValueError for dtypes, head sizes and GPUs that it lacks. It trusts attention(), in model/attention.py, to
    have compared shapes and devices.
    """
    if (refused := refusal(q.dtype, q.shape[-1], q.device)) is not None:
        raise ValueError(refused)
    if autotune and "global_mask" in without:
        raise ValueError("attention.autotune=true: break_it=local_mask means the tiles of the table; leave one out")
    of_rows, of_keys = documents or (None, None)
    # The op's way through PyTorch takes as long as all the rest of a call: whom nobody traces goes around it.
    traced = torch.compiler.is_compiling() or type(q) not in (Tensor, Parameter) or _get_current_dispatch_mode()
    o, lse, _ = (torch.ops.tilegpt.flash_forward if traced else Eager.apply)(
        q, k, v, softmax_scale, at_least, at_most, softcap, slopes, of_rows, of_keys, positions, blocks, block_size,
        seed, 0 if seed is None else drop_threshold, without, autotune)  # fmt: skip
    return o, lse


def refusal(dtype: torch.dtype, D: int, device: torch.device) -> str | None:
    """Why these kernels cannot run, in a line with a way out; None when they can."""
    if device.type != "cuda" and not INTERPRETED:
        return (
            f"attention.impl=triton: its kernels run on a GPU, not on {device.type}; use attention=tiled, or set "
            "TRITON_INTERPRET=1 to step through them, slowly, on a CPU"
        )
    if torch.version.hip:
        return "attention.impl=triton: made and tested for NVIDIA's GPUs, not for AMD's; use attention=sdpa or tiled"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        name = torch.cuda.get_device_name(device)
        return f"attention.impl=triton: wants Ampere or newer, not {name}; use attention=sdpa or attention=tiled"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"attention.impl=triton: has float32, float16 and bfloat16, not {dtype}; use attention=tiled"
    if D > 256:
        return f"attention.impl=triton: has heads of 256 at most, not {D}; use attention=tiled or more heads"
    if dtype == torch.float32 and D > 128 and shared_memory(device) < ROOMY:
        return (
            f"attention.impl=triton: float32 heads of {D} need more shared memory than this GPU has; use bf16 or tiled"
        )
    return None


class Tiles(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread, at most


# (kernel, BLOCK_D up to, dropout) -> the tiles that were the fastest for 16-bit numbers on an H200 (LOG.md). The mask
# takes registers from the products: with dropout the tiles of the forward are smaller, up to heads of 128.
MEASURED = {
    ("forward", 64, False): Tiles(128, 64, 8, 3, 128),
    ("forward", 64, True): Tiles(64, 64, 4, 3),
    ("forward", 128, False): Tiles(128, 64, 8, 2, 128),
    ("forward", 128, True): Tiles(64, 64, 4, 3),
    ("dq", 64, False): Tiles(64, 64, 4, 2),
    ("dq", 64, True): Tiles(64, 64, 4, 2),
    ("dq", 128, False): Tiles(128, 64, 8, 3),
    ("dq", 128, True): Tiles(128, 64, 8, 3),
    ("dkdv", 64, False): Tiles(64, 64, 4, 3),
    ("dkdv", 64, True): Tiles(64, 64, 4, 3),
    ("dkdv", 128, False): Tiles(64, 64, 4, 2),
    ("dkdv", 128, True): Tiles(64, 64, 4, 2),
    # the forward's were the fastest that were tried; the others not measured: those that spill the least
    ("forward", 256, False): Tiles(128, 64, 8, 2),
    ("forward", 256, True): Tiles(128, 64, 8, 2),
    ("dq", 256, False): Tiles(64, 32, 8, 2),
    ("dq", 256, True): Tiles(64, 32, 8, 2),
    ("dkdv", 256, False): Tiles(32, 64, 8, 1),
    ("dkdv", 256, True): Tiles(32, 64, 8, 1),
}
# (kernel, BLOCK_D up to) -> not measured either, for GPUs where a program has less shared memory than 160 KiB (sm_86,
# sm_89, sm_120) and, before Hopper, for the forward of heads of 256, which would spill.
LEAN = {
    ("forward", 64): Tiles(64, 64, 4, 2),
    ("forward", 128): Tiles(64, 64, 4, 2),
    ("forward", 256): Tiles(64, 32, 8, 2),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(64, 64, 4, 2),
    ("dq", 256): Tiles(32, 64, 8, 1),
    ("dkdv", 64): Tiles(64, 64, 4, 2),
    ("dkdv", 128): Tiles(32, 64, 4, 2),
    ("dkdv", 256): Tiles(32, 32, 8, 1),
}
ROOMY = 160 * 1024
FLOAT32 = Tiles(32, 32, 8, 1)  # without TF32 its products run on plain cores, and spill: to check with, not to race
# What attention.autotune tries, besides the tiles that there would have been.
CANDIDATES = [
    Tiles(32, 64, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2),
    Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2),
]  # fmt: skip
TUNED: dict[tuple, Tiles] = {}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads it when it meets @triton.jit, that is, here


def tiles_for(kernel: str, q: Tensor, dropout: bool) -> Tiles:
    BLOCK_D = max(64, block_d(q.shape[3]))
    if q.dtype == torch.float32:
        return FLOAT32
    spills = kernel == "forward" and BLOCK_D == 256 and not has_descriptors(q.device)
    if shared_memory(q.device) < ROOMY or spills:
        return LEAN[kernel, BLOCK_D]
    tile = MEASURED[kernel, BLOCK_D, dropout]
    return tile if is_hopper(q.device) else tile._replace(maxnreg=None)


def run(kernel: str, launch: Callable[[Tiles], None], q: Tensor, dropout: bool, autotune: bool, rows: int = 128) -> int:
    """Launches a kernel with the tiles of the table or, with autotune, the fastest of CANDIDATES, timed at the first
    call of a kind: head size, dtype, device, dropout, and a length up to the next power of two. rows: what BLOCK_M must
    divide. Returns BLOCK_M."""
    tile = tiles_for(kernel, q, dropout)
    if autotune and not INTERPRETED and not torch.cuda.is_current_stream_capturing():
        kind = kernel, triton.next_power_of_2(q.shape[2]), q.shape[3], q.dtype, q.device, dropout, rows

        def milliseconds(tile: Tiles) -> float:
            try:
                return triton.testing.do_bench(lambda: launch(tile), return_mode="median")
            except triton.runtime.errors.OutOfResources:  # more shared memory than this GPU has
                return math.inf

        if kind not in TUNED:
            TUNED[kind] = min((t for t in [tile, *CANDIDATES] if rows % t.BLOCK_M == 0), key=milliseconds)
        tile = TUNED[kind]
    assert rows % tile.BLOCK_M == tile.BLOCK_M % 32 == tile.BLOCK_N % 32 == 0, "of_rows and keep_mask lean on it"
    launch(tile)
    return tile.BLOCK_M


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, at_least: int | None, at_most: int | None,
    softcap: float | None, slopes: Tensor | None, documents_q: Tensor | None, documents_k: Tensor | None,
    positions: Tensor | None, blocks: Tensor | None, block_size: int, seed: Tensor | None, drop_threshold: int,
    without: str, autotune: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, lse, and lse in base 2 for the backward: what is lost on the way to base e and back would put the same factor
    on all weights of a row."""
    o, lse, lse2 = empty_results(q)
    if q.numel() == 0:
        return o, lse, lse2
    q, k, v = aligned(q), aligned(k), aligned(v)
    B, H, T, D = q.shape
    mask = mask_of(T, k.shape[2], at_least, at_most, documents_q, documents_k, positions, blocks, block_size)
    mask = local(mask, q, seed) if "global_mask" in without else mask
    bend = Bend(softmax_scale, softmax_scale * math.log2(math.e), softcap, slopes)
    guard = "guard_empty_rows" not in without
    switches = {
        "START": 0.0 if "start_low" in without or "subtract_max" in without else LOWEST if guard else -math.inf,
        "SUBTRACT_MAX": "subtract_max" not in without,
        "RESCALE_SUM": "rescale_sum" not in without,
        "RESCALE_OUTPUT": "rescale_output" not in without,
        "WIDE_OUTPUT": "wide_output" not in without or q.dtype == torch.float32,
        "GUARD": guard,
    }
    # Not with alibi: without a causal mask the tiles that are asked may be the farthest away.
    trust = is_hopper(q.device) and q.dtype == torch.bfloat16 and slopes is None
    switches["TRUST_MAX"] = trust and all(switches.values()) and mask.local_m is None

    def launch(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        forward_kernel[(-(-T // M) * B * H,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), lse, lse2, inside_tiles(mask, M, N), bend,
            Dropout(seed, drop_threshold, 0.0), visits(mask, M, N, False), 256 / (256 - drop_threshold), H,
            H // k.shape[1], BLOCK_D=block_d(D), PRECISION=precision(q.dtype), **switches, **tile._asdict(),
        )  # fmt: skip

    with on(q.device):
        run("forward", launch, q, seed is not None, autotune)
    return o, lse, lse2


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor, dlse: Tensor | None, softmax_scale: float,
    at_least: int | None, at_most: int | None, softcap: float | None, slopes: Tensor | None,
    documents_q: Tensor | None, documents_k: Tensor | None, positions: Tensor | None, blocks: Tensor | None,
    block_size: int, seed: Tensor | None, drop_threshold: int, without: str, autotune: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = like_heads(q), like_heads(k), like_heads(v)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    q, k, v, o, do = (aligned(x) for x in (q, k, v, o, do))
    (B, H, T, D), H_kv, T_k = q.shape, k.shape[1], k.shape[2]
    mask = mask_of(T, T_k, at_least, at_most, documents_q, documents_k, positions, blocks, block_size)
    mask = local(mask, q, seed) if "global_mask" in without else mask
    seed = seed + 1 if seed is not None and "same_seed" in without else seed
    bend = Bend(softmax_scale, softmax_scale * math.log2(math.e), softcap, slopes)
    same = bend, Dropout(seed, drop_threshold, 0.0)
    keep_scale = 256 / (256 - drop_threshold)
    dlse = None if dlse is None else dlse.contiguous()
    # Of every row, and of those from the last to the end of its tile: minus lse2 and delta, side by side for one load.
    padded = -(-T // 128) * 128
    of_rows = lse2.new_empty(B, H, padded, 2)

    def launch_dq(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        dq_kernel[(-(-T // M) * B * H,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(o, M), in_tiles(do, M), dlse, lse2, of_rows,
            in_tiles(dq, M), inside_tiles(mask, M, N), *same, visits(mask, M, N, False), keep_scale, H, H // H_kv,
            padded, BLOCK_D=block_d(D), PRECISION=precision(q.dtype), GUARD="guard_empty_rows" not in without,
            **tile._asdict(),
        )  # fmt: skip

    def launch_dkdv(tile: Tiles) -> None:
        M, N = tile.BLOCK_M, tile.BLOCK_N
        dkdv_kernel[(-(-T_k // N) * B * H_kv,)](
            in_tiles(q, M), in_tiles(k, N), in_tiles(v, N), in_tiles(do, M), of_rows, in_tiles(dk, N), in_tiles(dv, N),
            inside_tiles(mask, M, N), *same, visits(mask, M, N, True), keep_scale, H, H // H_kv, padded,
            BLOCK_D=block_d(D), PRECISION=precision(q.dtype), **tile._asdict(),
        )  # fmt: skip

    with on(q.device):
        rows = run("dq", launch_dq, q, seed is not None, autotune)
        # dq_kernel has filled of_rows for whole tiles of its own, and no further
        run("dkdv", launch_dkdv, q, seed is not None, autotune, rows)
    return dq, dk, dv


flash_forward = torch.library.custom_op("tilegpt::flash_forward", forward, mutates_args=())
flash_backward = torch.library.custom_op("tilegpt::flash_backward", gradients, mutates_args=())


@flash_forward.register_fake
def _(q, k, v, *options):
    return empty_results(q)


@flash_backward.register_fake
def _(q, k, v, *options):
    return like_heads(q), like_heads(k), like_heads(v)


def keep_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    q, k, v, ctx.scale, ctx.at_least, ctx.at_most, ctx.softcap, *more = inputs
    *masks, ctx.block_size, seed, ctx.threshold, ctx.without, ctx.autotune = more
    o, _, lse2 = output
    ctx.save_for_backward(q, k, v, o, lse2, *masks, seed)


def backward(ctx, do, dlse, _, gradients=flash_backward):
    q, k, v, o, lse2, slopes, documents_q, documents_k, positions, blocks, seed = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = gradients(
        q, k, v, o, lse2, do, dlse, ctx.scale, ctx.at_least, ctx.at_most, ctx.softcap, slopes, documents_q, documents_k,
        positions, blocks, ctx.block_size, seed, ctx.threshold, ctx.without, ctx.autotune)  # fmt: skip
    return *grads, *[None] * 14


flash_forward.register_autograd(backward, setup_context=keep_for_backward)


class Eager(torch.autograd.Function):
    """The same without the op, whose way through PyTorch takes as long as the kernel of a short sequence (LOG.md)."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        keep_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return backward(ctx, *grads, gradients=gradients)


def mask_of(T, T_k, at_least, at_most, documents_q, documents_k, positions, blocks, block_size) -> Mask:
    # A window wider than everything hides nothing, and its sum with a row's number might not fit into 32 bits.
    at_least = None if at_least is None or at_least <= -T - T_k else at_least
    at_most = None if at_most is None or at_most >= T + T_k else at_most
    contiguous = (None if x is None else x.contiguous() for x in (documents_q, documents_k, positions, blocks))
    columns = 0 if blocks is None else blocks.shape[1]
    return Mask(T, T_k, at_least, at_most, *contiguous, block_size, columns, local_m=None, local_n=None)


def local(mask: Mask, q: Tensor, seed: Tensor | None) -> Mask:
    """The causal mask broken: in the forward's tiles, in the backward as well."""
    tile = tiles_for("forward", q, seed is not None)
    return mask._replace(at_most=None, local_m=tile.BLOCK_M, local_n=tile.BLOCK_N)


def visits(mask: Mask, M: int, N: int, transposed: bool) -> Visits:
    """For tiles of M queries and N keys; transposed: of a tile of keys, which visits tiles of queries."""
    positions = of_rows = of_keys = bounds = tiles = None
    if mask.blocks is not None:
        bounds, tiles = listed(
            mask.blocks, mask.block_size, mask.T, mask.T_k, mask.at_least, mask.at_most, M, N, transposed
        )
    else:
        positions = None if mask.positions is None else edges(mask.positions[None], M)
        if mask.documents_q is not None:
            of_rows, of_keys = edges(mask.documents_q, M), edges(mask.documents_k, N)
    return Visits(positions, of_rows, of_keys, bounds, tiles)


def inside_tiles(mask: Mask, M: int, N: int) -> Mask:
    """What is left of the mask to look at within a tile: of a picture nothing where each tile lies in one block."""
    in_one = mask.block_size % M == mask.block_size % N == (mask.T_k - mask.T) % M == 0
    return mask._replace(blocks=None) if in_one else mask


def empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like_heads(q), *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))


def block_d(D: int) -> int:
    return max(16, 1 << (D - 1).bit_length())  # triton.next_power_of_2 takes 8 us


def precision(dtype: torch.dtype) -> str:
    """Of the products: that of the numbers but for float32, which has TF32 where torch is allowed it."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; where there is no GPU, as on the one that the kernels were measured on."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 232_448


def on(device: torch.device):
    """Triton launches on the current device, wherever its tensors are."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if there else torch.cuda.device(device)


def like_heads(x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D), which the projection after it reads without a copy;
    with rows of a multiple of 16 bytes, which descriptors want."""
    B, H, T, D = x.shape
    step = 16 // x.itemsize
    width = -(-D // step) * step
    return x.new_empty_strided((B, H, T, D), (T * H * width, width, H * width, 1))


def aligned(x: Tensor) -> Tensor:
    """x, if a descriptor can read it as it lies: neighbours in a row, rows that begin at multiples of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 and in_steps(x.shape, x.stride(), x.itemsize) else like_heads(x).copy_(x)


@lru_cache(1024)
def in_steps(shape: torch.Size, stride: tuple[int, ...], itemsize: int) -> bool:
    apart = [step for step, size in zip(stride[:3], shape[:3], strict=True) if size > 1]
    return stride[3] == 1 and all(step > 0 and step * itemsize % 16 == 0 for step in apart)


def in_tiles(x: Tensor, rows: int) -> TensorDescriptor | Matrix:
    """x in tiles of rows x BLOCK_D."""
    if not has_descriptors(x.device):
        return Matrix(x, *steps(x.shape, x.stride()), x.shape[2], x.shape[3])
    # A new one takes 7 us, most of them to check itself. Of a kind that has been checked, only the tensor is new.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__ |= description(x.shape, x.stride(), x.dtype, rows)
    descriptor.base = x
    return descriptor


@lru_cache(1024)
def description(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict:
    block = [1, 1, rows, block_d(shape[3])]
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*steps(shape, stride), 1], block))


def steps(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    """Of all axes but the last. One of a single element may have any stride; a descriptor may not."""
    return [step if size > 1 else 16 for step, size in zip(stride[:3], shape[:3], strict=True)]


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_descriptors(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


# ---------------------------------------------------------------------------------------------------------------------
# The kernels, and first what they share.


@triton.jit
def visible(mask, b, i, j):
    """May row i see column j? Index tensors that broadcast, in either order: it serves transposed tiles as well."""
    position = i + (mask.T_k - mask.T)
    if mask.positions is not None:
        position = tl.load(mask.positions + i, mask=i < mask.T, other=0).to(tl.int32)
    last = mask.T_k - 1
    if mask.at_most is not None:
        last = tl.minimum(position + mask.at_most, last)
    seen = j <= last
    if mask.at_least is not None:
        seen = seen & (j >= position + mask.at_least)
    if mask.local_m is not None:
        seen = seen & (j % mask.local_n <= i % mask.local_m)
    if mask.documents_q is not None:
        of_row = tl.load(mask.documents_q + b.to(tl.int64) * mask.T + i, mask=i < mask.T, other=0)
        of_key = tl.load(mask.documents_k + b.to(tl.int64) * mask.T_k + j, mask=j < mask.T_k, other=0)
        seen = seen & (of_row == of_key)
    if mask.blocks is not None:
        block = tl.maximum(position, 0) // mask.block_size * mask.block_columns + j // mask.block_size
        seen = seen & tl.load(mask.blocks + block, mask=(i < mask.T) & (j < mask.T_k), other=0).to(tl.int1)
    return seen


@triton.jit
def tanh(x):
    """2 / (1 + exp(-2x)) - 1 loses the small ones to cancellation; below 0.25 the series is exact to 1e-8."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, e - 1, 1 - e) / (1 + e))


@triton.jit
def bent(s, bend, mask, h, i, j):
    """The rest of step 1, softcap and alibi: q k^T to scores in base 2, and d score / d (q k^T scale)."""
    s = s * bend.scale
    slope = 1.0
    if bend.softcap is not None:
        t = tanh(s / bend.softcap)
        slope = 1 - t * t
        s = bend.softcap * t
    if bend.slopes is not None:
        position = i + (mask.T_k - mask.T)
        if mask.positions is not None:
            position = tl.load(mask.positions + i, mask=i < mask.T, other=0).to(tl.int32)
        s = s - tl.load(bend.slopes + h) * tl.abs(position - j).to(tl.float32)
    return s * LOG2E, slope


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Seven rounds of Philox 4x32, uint32 all. Words that are the same for a row or a column stay that small: of what
    broadcasts late, the first three rounds cost next to nothing."""
    for _ in tl.static_range(7):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57  # one instruction for both halves
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keep_mask(dropout, n, row0, column0, i, j):
    """Step 4: the bits of model/dropout.py for rows i and columns j, drawn again by whoever needs them.

    i and j count from row0 and column0, the corner of the tile, which are multiples of 32. Elements 8 apart in rows and
    columns share a call, as they share a thread in the result of a matrix product, and the compiler makes it once for
    all of them where it can prove their counters equal. Hence the local numbers, and `i & 6 | i & 1` for `i & 7`: with
    that the proof fails for odd columns, and the transposed tiles take 126 instructions more (LOG.md).
    """
    seed = tl.load(dropout.seed)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = (row0 >> 5 << 3).to(tl.uint32) + ((i >> 5 << 3) | (i & 6) | (i & 1)).to(tl.uint32)
    c1 = (column0 >> 5 << 3).to(tl.uint32) + ((j >> 5 << 3) | (j & 6) | (j & 1)).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, n.to(tl.uint32), tl.zeros_like(n).to(tl.uint32), k0, k1)
    word = tl.where((i & 16) != 0, tl.where((i & 8) != 0, w3, w2), tl.where((i & 8) != 0, w1, w0))
    # the byte to the top, and the compare needs no mask
    return (word << (24 - (j & 24)).to(tl.uint32)) >= tl.cast(dropout.threshold << 24, tl.uint32)


@triton.jit
def dropped(p, n, row0, column0, i, j, dropout):
    """Step 4: Z p without the factor in Z, which comes last; in the backward the same bits again."""
    if dropout.seed is not None:
        return tl.where(keep_mask(dropout, n, row0, column0, i, j), p, dropout.zero)
    return p


@triton.jit
def online_softmax(s, factor, m, l, SUBTRACT_MAX: tl.constexpr, RESCALE_SUM: tl.constexpr):
    """Step 3 for one more tile: p, and the new m, l (in eighths) and alpha. factor brings s into base 2, in passing."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor) if SUBTRACT_MAX else m
    p = tl.exp2(tl.fma(s, factor, -m_new[:, None]))
    alpha = tl.exp2(m - m_new)
    l = (l * alpha[:, None] if RESCALE_SUM else l) + eighths(p)  # (BLOCK_M, 8)
    return p, m_new, l, alpha


@triton.jit
def eighths(p):
    """The sum of each row in eight parts, of columns 0, 8, 16, ..., of 1, 9, 17, ... and so on: each of the four
    threads that have a row of a product between them has two. They are added up once, after the last tile."""
    return tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 8), 1)


@triton.jit
def between(low, high, at_least, at_most, n, n_whole, BLOCK: tl.constexpr):
    """Which of n tiles of BLOCK numbers x have at_least <= x - y <= at_most for some y in low .. high, and which for
    all: the first, the first such whole one, past the last whole one, past the last."""
    start, whole_start, whole_stop, stop = 0, 0, n_whole, n
    if at_least is not None:
        start = tl.maximum(low + at_least, 0) // BLOCK
        whole_start = tl.cdiv(tl.maximum(high + at_least, 0), BLOCK)
    if at_most is not None:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(high + at_most + 1, 0), BLOCK))
        whole_stop = tl.minimum(whole_stop, tl.maximum(low + at_most + 1, 0) // BLOCK)
    return in_order(start, whole_start, whole_stop, stop)


@triton.jit
def looked_up(edges, at, low, high, at_least, at_most, n):
    """The same for any n tiles, whose lowest and highest numbers stand in edges from `at` on. Where those are in no
    order, tiles between the first and the last may be visited in vain. (Never by x - y, which wraps for documents that
    are numbered by hashes.)"""
    CHUNK: tl.constexpr = 512  # tiles at once: those of 32,768 tokens, or of 64 times that in as many turns
    start, whole_start, whole_stop, stop = n, n, n, 0
    for first in range(0, n, CHUNK):
        t = first + tl.arange(0, CHUNK)
        x_low = tl.load(edges[0] + at + t, mask=t < n, other=0).to(tl.int64)
        x_high = tl.load(edges[1] + at + t, mask=t < n, other=0).to(tl.int64)
        some = t < n
        whole = some
        if at_least is not None:
            some = some & (x_high >= low + at_least)
            whole = whole & (x_low >= high + at_least)
        if at_most is not None:
            some = some & (x_low <= high + at_most)
            whole = whole & (x_high <= low + at_most)
        start = tl.minimum(start, tl.min(tl.where(some, t, n), 0))
        stop = tl.maximum(stop, tl.max(tl.where(some, t + 1, 0), 0))
        whole_start = tl.minimum(whole_start, tl.min(tl.where(whole, t, n), 0))
        whole_stop = tl.minimum(whole_stop, tl.min(tl.where((t > whole_start) & (whole == 0), t, n), 0))
    return start, whole_start, whole_stop, stop


@triton.jit
def in_order(start, whole_start, whole_stop, stop):
    stop = tl.maximum(stop, start)
    whole_start = tl.minimum(tl.maximum(whole_start, start), stop)
    whole_stop = tl.maximum(tl.minimum(whole_stop, stop), whole_start)
    return start, whole_start, whole_stop, stop


@triton.jit
def within(found, mine, others, b, tile, n_mine, n):
    """found, less the tiles that hold none of my tile's documents."""
    at = b.to(tl.int64) * n_mine + tile
    low, high = tl.load(mine[0] + at).to(tl.int64), tl.load(mine[1] + at).to(tl.int64)
    more = looked_up(others, b.to(tl.int64) * n, low, high, 0, 0, n)
    return in_order(
        tl.maximum(found[0], more[0]), tl.maximum(found[1], more[1]),
        tl.minimum(found[2], more[2]), tl.minimum(found[3], more[3]))  # fmt: skip


@triton.jit
def key_tiles(mask, visits, b, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of keys that a tile of queries visits: between()'s four answers, and where its list begins."""
    n = tl.cdiv(mask.T_k, BLOCK_N)
    if visits.tiles is not None:
        found = of_list(mask, visits, tile)
    else:
        low = tile * BLOCK_M + mask.T_k - mask.T
        high = low + BLOCK_M - 1
        if visits.positions is not None:
            low = tl.load(visits.positions[0] + tile).to(tl.int32)
            high = tl.load(visits.positions[1] + tile).to(tl.int32)
        found = between(low, high, mask.at_least, mask.at_most, n, mask.T_k // BLOCK_N, BLOCK_N)
        if visits.of_rows is not None:
            found = within(found, visits.of_rows, visits.of_keys, b, tile, tl.cdiv(mask.T, BLOCK_M), n)
        if mask.local_m is not None:
            found = in_order(0, n, n, n)
    return found[0], found[1], found[2], found[3], tile.to(tl.int64) * n


@triton.jit
def query_tiles(mask, visits, b, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of queries that a tile of keys visits. Rows past the last weigh nothing, so their tile may be whole."""
    n = tl.cdiv(mask.T, BLOCK_M)
    at_least = None if mask.at_most is None else -mask.at_most
    at_most = None if mask.at_least is None else -mask.at_least
    left = tile * BLOCK_N
    if visits.tiles is not None:
        found = of_list(mask, visits, tile)
    else:
        if visits.positions is not None:
            found = looked_up(visits.positions, 0, left, left + BLOCK_N - 1, at_least, at_most, n)
        else:
            left += mask.T - mask.T_k
            found = between(left, left + BLOCK_N - 1, at_least, at_most, n, n, BLOCK_M)
        if visits.of_rows is not None:
            found = within(found, visits.of_keys, visits.of_rows, b, tile, tl.cdiv(mask.T_k, BLOCK_N), n)
        if mask.local_m is not None:
            found = in_order(0, n, n, n)
    return found[0], found[1], found[2], found[3], tile.to(tl.int64) * n


@triton.jit
def of_list(mask, visits, tile):
    start, whole_start = tl.load(visits.bounds + tile * 4), tl.load(visits.bounds + tile * 4 + 1)
    whole_stop, stop = tl.load(visits.bounds + tile * 4 + 2), tl.load(visits.bounds + tile * 4 + 3)
    if mask.documents_q is not None:  # which may cut any tile, and are not in the list
        whole_start = whole_stop
    return start, whole_start, whole_stop, stop


@triton.jit
def loop_over(where, PART: tl.constexpr):
    """The counter's range over the tiles that are whole or, with PART, over those before and after them."""
    if PART:
        start, stop = where[0], where[3] - (where[2] - where[1])
    else:
        start, stop = where[1], where[2]
    return start, stop


@triton.constexpr_function
def stages(PART, BLOCK_D):
    """The tiles that the mask cuts are few, and a third stage for them would cost registers everywhere. Heads of 256
    keep what their tables say, two or one; float32, which has one, gets its second here."""
    return 2 if PART and BLOCK_D < 256 else None


@triton.jit
def read_list(t, stop, where, visits):
    if visits.tiles is not None:
        t = tl.load(visits.tiles + where[4] + t, mask=t < stop, other=0)
    return t


@triton.jit
def tile_at(t, stop, ahead, where, visits, PART: tl.constexpr):
    """The number of the t-th tile: t itself with a gap where the whole ones are, or the t-th of those listed, which was
    read a turn of the loop ahead, as loads wait for it; and the next."""
    if visits.tiles is not None:
        tile, ahead = ahead, read_list(t + 1, stop, where, visits)
    elif PART:
        tile = t + tl.where(t >= where[1], where[2] - where[1], 0)
    else:
        tile = t
    return tile, ahead


@triton.jit
def load(x, b, h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile (ROWS, BLOCK_D) of a Matrix, 0 where it reaches beyond."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        at, inside = places(x, b, h, row, ROWS, BLOCK_D)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store(x, b, h, row, values, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    if isinstance(x, tl.tensor_descriptor):
        x.store([b, h, row, 0], values.to(x.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        at, inside = places(x, b, h, row, ROWS, BLOCK_D)
        tl.store(at, values.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def places(x, b, h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    i, d = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    head = x.pointer + tl.cast(b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_h
    return head + (i.to(tl.int64) * x.stride_t + d), (i < x.rows) & (d < x.width)


@triton.jit
def forward_tiles(seen, q_i, k, v, b, h, h_kv, row0, start, stop, where, visits, mask, bend, dropout, H,
                  PART: tl.constexpr, TRUSTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, SUBTRACT_MAX: tl.constexpr,
                  RESCALE_SUM: tl.constexpr, RESCALE_OUTPUT: tl.constexpr, WIDE_OUTPUT: tl.constexpr):  # fmt: skip
    row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    i = row0 + row
    acc, m, l, most = seen
    ahead = read_list(start, stop, where, visits)
    for t in tl.range(start, stop, num_stages=stages(PART, BLOCK_D)):
        tile, ahead = tile_at(t, stop, ahead, where, visits, PART)
        column0 = tile * BLOCK_N
        j = column0 + column
        k_j = load(k, b, h_kv, column0, BLOCK_N, BLOCK_D)
        s = tl.dot(q_i, k_j.T, input_precision=PRECISION)  # 1: (BLOCK_M, BLOCK_N)
        factor = bend.scale2
        if (bend.softcap is not None) or (bend.slopes is not None):
            s, _ = bent(s, bend, mask, h, i, j)
            factor = 1.0
        if PART:
            s = tl.where(visible(mask, b, i, j), s, -float("inf"))  # 2
        p, m, l, alpha = online_softmax(s, factor, m, l, SUBTRACT_MAX, RESCALE_SUM)  # 3
        if TRUSTED:
            most = tl.maximum(most, eighths(p))
        p = dropped(p, b * H + h, row0, column0, row, column, dropout)  # 4
        if RESCALE_OUTPUT:
            acc = acc * alpha[:, None]
        v_j = load(v, b, h_kv, column0, BLOCK_N, BLOCK_D)
        if WIDE_OUTPUT:
            acc = tl.dot(p.to(v_j.dtype), v_j, acc, input_precision=PRECISION)  # 5
        else:
            acc += tl.dot(p.to(v_j.dtype), v_j, input_precision=PRECISION).to(v_j.dtype).to(tl.float32)
    return acc, m, l, most


@triton.jit
def nothing_seen(START: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """acc, m, l in eighths and most, before the first tile. most: each eighth's largest sum in one trusted tile."""
    zeros = tl.zeros([BLOCK_M, 8], tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], START, tl.float32), zeros, zeros


@triton.jit
def every_tile(q_i, k, v, b, h, h_kv, row0, asked, where, visits, mask, bend, dropout, H,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
               START: tl.constexpr, SUBTRACT_MAX: tl.constexpr, RESCALE_SUM: tl.constexpr, RESCALE_OUTPUT: tl.constexpr,
               WIDE_OUTPUT: tl.constexpr, TRUST_MAX: tl.constexpr):  # fmt: skip
    """Steps 1 to 5 for a tile of queries. TRUST_MAX: the whole tiles from `asked` on are not asked for their maximum;
    what is subtracted there is the m of those before, and nothing is rescaled. They come last: a rescaling after them
    would be lost where alpha is below 2**-126, which exp2 makes 0, and l may be 2**127 by then. Without it whole tiles
    come first, as they do in tiled under a causal mask: broken kernels are compared with it."""
    seen = nothing_seen(START, BLOCK_M, BLOCK_D)
    if TRUST_MAX:
        start, stop = loop_over(where, True)
        seen = forward_tiles(
            seen, q_i, k, v, b, h, h_kv, row0, start, stop, where, visits, mask, bend, dropout, H, True, False,
            BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, SUBTRACT_MAX, RESCALE_SUM, RESCALE_OUTPUT, WIDE_OUTPUT)  # fmt: skip
    start, stop = loop_over(where, False)
    seen = forward_tiles(
        seen, q_i, k, v, b, h, h_kv, row0, start, asked, where, visits, mask, bend, dropout, H, False, False,
        BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, SUBTRACT_MAX, RESCALE_SUM, RESCALE_OUTPUT, WIDE_OUTPUT)  # fmt: skip
    if TRUST_MAX:
        seen = forward_tiles(
            seen, q_i, k, v, b, h, h_kv, row0, asked, stop, where, visits, mask, bend, dropout, H, False, True,
            BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, False, False, False, WIDE_OUTPUT)  # fmt: skip
    else:
        start, stop = loop_over(where, True)
        seen = forward_tiles(
            seen, q_i, k, v, b, h, h_kv, row0, start, stop, where, visits, mask, bend, dropout, H, True, False,
            BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, SUBTRACT_MAX, RESCALE_SUM, RESCALE_OUTPUT, WIDE_OUTPUT)  # fmt: skip
    return seen


@triton.jit
def in_vain(acc, l, most):
    """Was m trusted in vain? Where a score was 128 above it, in base 2, there is inf or NaN. And where eight columns of
    a trusted tile have all of a row but 1 / 256 there may be a single weight that should be exactly 1, as it is where m
    is asked for; what it is rounded by would be all the error, in o and more so in dp - delta."""
    l = tl.sum(l, 1)
    right = (tl.abs(acc) < float("inf")) & ((l < float("inf")) & (tl.max(most, 1) < l * (255 / 256)))[:, None]
    return tl.min(tl.min(right.to(tl.int32), 1), 0) == 0


@triton.jit
def forward_kernel(q, k, v, o, lse, lse2, mask, bend, dropout, visits, keep_scale, H, G,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
                   START: tl.constexpr, SUBTRACT_MAX: tl.constexpr, RESCALE_SUM: tl.constexpr,
                   RESCALE_OUTPUT: tl.constexpr, WIDE_OUTPUT: tl.constexpr, GUARD: tl.constexpr,
                   TRUST_MAX: tl.constexpr):  # fmt: skip
    n_tiles = tl.cdiv(mask.T, BLOCK_M)
    tile = n_tiles - 1 - tl.program_id(0) % n_tiles  # under a causal mask the last rows have the most to do
    n = tl.program_id(0) // n_tiles
    b, h = n // H, n % H
    row0 = tile * BLOCK_M
    where = key_tiles(mask, visits, b, tile, BLOCK_M, BLOCK_N)

    q_i = load(q, b, h, row0, BLOCK_M, BLOCK_D)
    # Any m that keeps exp2 in range gives the same o. So the tiles that the mask cuts and two whole ones, the first and
    # the last, are asked for it, and where the others were trusted in vain all is done again, asking every tile. The
    # last one goes with those that the mask cuts. (In a list of tiles it is not beside them, and stays where it is.)
    if TRUST_MAX:
        seen = nothing_seen(START, BLOCK_M, BLOCK_D)  # Triton wants what a loop carries defined before it
        if visits.tiles is None:
            where = where[0], where[1], tl.maximum(where[1], where[2] - 1), where[3], where[4]
        asked = tl.minimum(where[1] + 1, where[2])
        again = True
        while again:
            seen = every_tile(
                q_i, k, v, b, h, h // G, row0, asked, where, visits, mask, bend, dropout, H, BLOCK_M, BLOCK_N, BLOCK_D,
                PRECISION, START, SUBTRACT_MAX, RESCALE_SUM, RESCALE_OUTPUT, WIDE_OUTPUT, True)  # fmt: skip
            acc, m, l, most = seen
            again = (asked < where[2]) & in_vain(acc, l, most)
            asked = where[2]
    else:
        seen = every_tile(
            q_i, k, v, b, h, h // G, row0, where[2], where, visits, mask, bend, dropout, H, BLOCK_M, BLOCK_N, BLOCK_D,
            PRECISION, START, SUBTRACT_MAX, RESCALE_SUM, RESCALE_OUTPUT, WIDE_OUTPUT, False)  # fmt: skip

    acc, m, l, _ = seen
    l = tl.sum(l, 1)
    # 6: a row that saw nothing has 0 / 1 = 0, and log 0 = -inf
    divisor = tl.where(l == 0, 1.0, l) if GUARD else l
    acc = acc * (keep_scale / divisor)[:, None]
    store(o, b, h, row0, acc, BLOCK_M, BLOCK_D)
    i = row0 + tl.arange(0, BLOCK_M)
    at = n.to(tl.int64) * mask.T + i
    tl.store(lse + at, m * LN2 + tl.log(l), mask=i < mask.T)
    tl.store(lse2 + at, m + tl.log2(l), mask=i < mask.T)


@triton.jit
def weights_again(s, minus_lse2, b, h, i, j, mask, bend, PART: tl.constexpr):
    """Step 8 of a tile in either orientation: p, and d score / d (q k^T scale)."""
    slope = 1.0
    factor = bend.scale2
    if (bend.softcap is not None) or (bend.slopes is not None):
        s, slope = bent(s, bend, mask, h, i, j)
        factor = 1.0
    if PART:
        s = tl.where(visible(mask, b, i, j), s, -float("inf"))
    return tl.exp2(tl.fma(s, factor, minus_lse2)), slope


@triton.jit
def score_gradient(p, zp, dp, delta, slope, bend, dropout):
    """Step 11, without the factor in Z, which delta comes divided by: (Z p) dp - p delta needs no second mask."""
    if dropout.seed is not None:
        ds = tl.fma(zp, dp, -(p * delta))
    else:
        ds = p * (dp - delta)
    if bend.softcap is not None:
        ds *= slope
    return ds


@triton.jit
def dq_tiles(dq, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, h_kv, row0, where, visits, mask, bend, dropout, H,
             PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    i = row0 + row
    start, stop = loop_over(where, PART)
    ahead = read_list(start, stop, where, visits)
    for t in tl.range(start, stop, num_stages=stages(PART, BLOCK_D)):
        tile, ahead = tile_at(t, stop, ahead, where, visits, PART)
        column0 = tile * BLOCK_N
        j = column0 + column
        k_j = load(k, b, h_kv, column0, BLOCK_N, BLOCK_D)
        s = tl.dot(q_i, k_j.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        v_j = load(v, b, h_kv, column0, BLOCK_N, BLOCK_D)
        dp = tl.dot(do_i, v_j.T, input_precision=PRECISION)  # 10
        p, slope = weights_again(s, minus_lse2_i[:, None], b, h, i, j, mask, bend, PART)  # 8
        zp = dropped(p, b * H + h, row0, column0, row, column, dropout)
        ds = score_gradient(p, zp, dp, delta_i[:, None], slope, bend, dropout)  # 11
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision=PRECISION)  # 12
    return dq


@triton.jit
def dq_kernel(q, k, v, o, do, dlse, lse2, of_rows, dq, mask, bend, dropout, visits, keep_scale, H, G, padded,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
              PRECISION: tl.constexpr, GUARD: tl.constexpr):  # fmt: skip
    n_tiles = tl.cdiv(mask.T, BLOCK_M)
    tile = n_tiles - 1 - tl.program_id(0) % n_tiles
    n = tl.program_id(0) // n_tiles
    b, h = n // H, n % H
    row0 = tile * BLOCK_M
    where = key_tiles(mask, visits, b, tile, BLOCK_M, BLOCK_N)

    do_i = load(do, b, h, row0, BLOCK_M, BLOCK_D)
    o_i = load(o, b, h, row0, BLOCK_M, BLOCK_D)
    i = row0 + tl.arange(0, BLOCK_M)
    at = n.to(tl.int64) * mask.T + i
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)  # 7
    if dlse is not None:
        delta_i -= tl.load(dlse + at, mask=i < mask.T, other=0.0)
    delta_i = delta_i / keep_scale
    # A row that saw nothing gets -inf, not inf: all its weights are then 2**-inf = 0. So do the rows past the last, to
    # the end of the tile, which dkdv_kernel then need not mask.
    minus_lse2_i = -tl.load(lse2 + at, mask=i < mask.T, other=float("inf"))
    if GUARD:
        minus_lse2_i = tl.where(minus_lse2_i == float("inf"), -float("inf"), minus_lse2_i)
    at = (n.to(tl.int64) * padded + i[:, None]) * 2 + tl.arange(0, 2)[None, :]
    tl.store(of_rows + at, tl.join(minus_lse2_i, delta_i))

    q_i = load(q, b, h, row0, BLOCK_M, BLOCK_D)
    dq_i = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_i = dq_tiles(
        dq_i, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, h // G, row0, where, visits, mask, bend,
        dropout, H, False, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip
    dq_i = dq_tiles(
        dq_i, q_i, do_i, minus_lse2_i, delta_i, k, v, b, h, h // G, row0, where, visits, mask, bend,
        dropout, H, True, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip
    dq_i *= bend.scale * keep_scale
    store(dq, b, h, row0, dq_i, BLOCK_M, BLOCK_D)


@triton.jit
def dkdv_tiles(dk, dv, k_j, v_j, q, do, of_rows, b, h, column0, where, visits, mask, bend, dropout, H, padded,
               PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    n = b * H + h
    row, column = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
    j = column0 + column
    of_rows += n.to(tl.int64) * padded * 2
    start, stop = loop_over(where, PART)
    ahead = read_list(start, stop, where, visits)
    for t in tl.range(start, stop, num_stages=stages(PART, BLOCK_D)):
        tile, ahead = tile_at(t, stop, ahead, where, visits, PART)
        row0 = tile * BLOCK_M
        i = row0 + row
        q_i = load(q, b, h, row0, BLOCK_M, BLOCK_D)
        s = tl.dot(k_j, q_i.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M): s transposed, so that p needs not be
        do_i = load(do, b, h, row0, BLOCK_M, BLOCK_D)
        dp = tl.dot(v_j, do_i.T, input_precision=PRECISION)  # 10
        at = row0 + tl.arange(0, BLOCK_M)[:, None]
        minus_lse2_i, delta_i = tl.split(tl.load(of_rows + at * 2 + tl.arange(0, 2)[None, :]))
        p, slope = weights_again(s, minus_lse2_i[None, :], b, h, i, j, mask, bend, PART)  # 8
        zp = dropped(p, n, row0, column0, row, column, dropout)
        dv = tl.dot(zp.to(do_i.dtype), do_i, dv, input_precision=PRECISION)  # 9
        ds = score_gradient(p, zp, dp, delta_i[None, :], slope, bend, dropout)  # 11
        dk = tl.dot(ds.to(q_i.dtype), q_i, dk, input_precision=PRECISION)  # 12
    return dk, dv


@triton.jit
def dkdv_kernel(q, k, v, do, of_rows, dk, dv, mask, bend, dropout, visits, keep_scale, H, G, padded,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    n_tiles = tl.cdiv(mask.T_k, BLOCK_N)
    tile = tl.program_id(0) % n_tiles  # under a causal mask the first keys are seen by most
    n = tl.program_id(0) // n_tiles
    b, h_kv = n // (H // G), n % (H // G)
    column0 = tile * BLOCK_N
    where = query_tiles(mask, visits, b, tile, BLOCK_M, BLOCK_N)

    k_j = load(k, b, h_kv, column0, BLOCK_N, BLOCK_D)
    v_j = load(v, b, h_kv, column0, BLOCK_N, BLOCK_D)
    dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for h in range(h_kv * G, h_kv * G + G):  # the query heads that share this key head add up
        dk_j, dv_j = dkdv_tiles(
            dk_j, dv_j, k_j, v_j, q, do, of_rows, b, h, column0, where, visits, mask, bend, dropout, H,
            padded, True, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip
        dk_j, dv_j = dkdv_tiles(
            dk_j, dv_j, k_j, v_j, q, do, of_rows, b, h, column0, where, visits, mask, bend, dropout, H,
            padded, False, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip
    dk_j *= bend.scale * keep_scale
    dv_j *= keep_scale
    store(dk, b, h_kv, column0, dk_j, BLOCK_N, BLOCK_D)
    store(dv, b, h_kv, column0, dv_j, BLOCK_N, BLOCK_D)
