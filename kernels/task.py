"""Turns a Problem into a kernel's arguments: a Task (what to compute) and a How (what the kernel is compiled for).

Shapes: B batch, T query rows, T_k key rows, H query heads, D head size.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import sizes
from kernels.problem import Problem
from kernels.sizes import Tiles, block_d
from kernels.tiles import edges, listed

# Where the running maximum starts. From the lowest float32, a row with a hidden first tile has exp(-inf - LOWEST) = 0.
# From -inf it would have exp(-inf - -inf), which is NaN.
LOWEST = -torch.finfo(torch.float32).max


class Mask(NamedTuple):
    """Which keys a query sees. None switches a rule off. Row i is at position i + T_k - T among the keys, unless
    positions says otherwise."""

    T: int
    T_k: int
    at_least: int | None  # the lowest column - position: 1 - window
    at_most: int | None  # the highest column - position: 0 when causal
    documents_q: Tensor | None  # (B, T)
    documents_k: Tensor | None  # (B, T_k)
    positions: Tensor | None  # (T,)
    blocks: Tensor | None
    block_size: int
    block_columns: int
    local_m: int | None  # if global_mask is off: the causal mask counts from the corner of local_m x local_n tiles
    local_n: int | None


class Scoring(NamedTuple):
    """How q k^T becomes a score."""

    scale: float
    scale2: float  # scale * log2(e), rounded to float32 once, not twice
    softcap: float | None
    slopes: Tensor | None  # (H,) float32, for alibi


class Dropout(NamedTuple):
    """Step 4: the mask of model/dropout.py, drawn from its seed."""

    seed: Tensor | None  # int64 scalar; None: no dropout
    threshold: int  # 0 to 255: an element is dropped if its random byte is below this
    zero: float  # 0.0. A constant would make the compiler round first and select 16-bit halves (LOG.md)
    numbers: Tensor | None = None  # (B * H,) integers: which mask a batch-head has; None: its own number


class Visits(NamedTuple):
    """Which tiles are visited, where that depends on data; made by kernels/tiles.py. None where arithmetic on the mask
    is enough. The first three are pairs: the lowest and the highest number in every tile."""

    positions: tuple[Tensor, Tensor] | None  # (1, row tiles)
    row_documents: tuple[Tensor, Tensor] | None  # (B, row tiles)
    key_documents: tuple[Tensor, Tensor] | None  # (B, key tiles)
    bounds: Tensor | None  # (tiles, 4), for a block mask: between()'s four numbers, as places in `tiles`
    tiles: Tensor | None  # (tiles, others): for each tile, the list of those that it visits


class Task(NamedTuple):
    """A Problem in the form that a kernel takes."""

    mask: Mask
    scoring: Scoring
    dropout: Dropout
    visits: Visits
    keep_scale: float  # 1 / (share kept)
    H: int
    G: int  # H / H_kv: query heads that share a key head


@dataclass(frozen=True, eq=False)
class How:
    """What a kernel is compiled for: every field is a constexpr.

    At every launch Triton looks up the compiled kernel by its How. how() makes each one once, so that they compare by
    identity; comparing the fields would take longer (LOG.md).
    """

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    PRECISION: tl.constexpr  # of matrix products: ieee | tf32
    START: tl.constexpr  # initial value of m
    SUBTRACT_MAX: tl.constexpr
    RESCALE_SUM: tl.constexpr
    RESCALE_OUTPUT: tl.constexpr
    WIDE_OUTPUT: tl.constexpr
    GUARD: tl.constexpr


def mask_of(problem: Problem, local_tile: tuple[int | None, int | None] = (None, None)) -> Mask:
    """The mask of a problem. local_tile: rows and columns of the forward's tile, used when global_mask is off."""
    local, reach = "global_mask" in problem.without, problem.T + problem.T_k
    at_least = at_most = None
    if problem.window is not None and (problem.window <= reach or problem.positions is not None):
        window = min(problem.window, 2**30)  # a wider one hides nothing; positions may reach further than the lengths
        at_least, at_most = 1 - window, window - 1
    if problem.causal:
        at_most = None if local else 0
    tensors = (problem.documents_q, problem.documents_k, problem.positions, problem.blocks)
    documents_q, documents_k, positions, blocks = (None if x is None else x.contiguous() for x in tensors)
    columns = 0 if problem.blocks is None else problem.blocks.shape[1]
    local_m, local_n = local_tile if local else (None, None)
    return Mask(
        problem.T, problem.T_k, at_least, at_most, documents_q, documents_k, positions, blocks, problem.block_size,
        columns, local_m, local_n,
    )  # fmt: skip


def task_for(problem: Problem, mask: Mask, q: Tensor, k: Tensor, tile: Tiles, transposed: bool = False) -> Task:
    """The Task of a kernel with one program per tile of queries or, transposed, per tile of keys."""
    M, N = tile.BLOCK_M, tile.BLOCK_N
    # If every tile lies inside one block, the list of tiles is enough, and the kernel need not look at the blocks.
    in_one = mask.block_size % M == mask.block_size % N == (mask.T_k - mask.T) % M == 0
    return Task(
        mask._replace(blocks=None) if in_one else mask,
        Scoring(problem.scale, problem.scale * math.log2(math.e), problem.softcap, problem.slopes),
        Dropout(problem.seed, problem.drop_threshold, 0.0, problem.numbers),
        visits_of(mask, M, N, transposed),
        256 / (256 - problem.drop_threshold),
        q.shape[1],
        q.shape[1] // k.shape[1],
    )


def visits_of(mask: Mask, M: int, N: int, transposed: bool) -> Visits:
    """The visits of tiles of M queries and N keys. transposed: a tile of keys visits tiles of queries."""
    positions = row_documents = key_documents = bounds = tiles = None
    if mask.blocks is not None:
        bounds, tiles = listed(
            mask.blocks, mask.block_size, mask.T, mask.T_k, mask.at_least, mask.at_most, M, N, transposed
        )
    else:
        positions = None if mask.positions is None else edges(mask.positions[None], M)
        if mask.documents_q is not None and mask.documents_k is not None:
            row_documents, key_documents = edges(mask.documents_q, M), edges(mask.documents_k, N)
    return Visits(positions, row_documents, key_documents, bounds, tiles)


def how_for(q: Tensor, problem: Problem, tile: Tiles) -> How:
    """What a kernel is compiled for: tile, precision and switches."""
    return how(
        tile.BLOCK_M, tile.BLOCK_N, block_d(q.shape[3]), precision(q.dtype), tuple(problem.without),
        q.dtype == torch.float32,
    )  # fmt: skip


@cache
def how(M: int, N: int, BLOCK_D: int, precision: str, without: tuple[str, ...], float32: bool) -> How:
    """Makes the How of these arguments, once."""
    guard = "guard_empty_rows" not in without
    zero = "start_low" in without or "subtract_max" in without
    fields = {
        "BLOCK_M": M,
        "BLOCK_N": N,
        "BLOCK_D": BLOCK_D,
        "PRECISION": precision,
        "START": 0.0 if zero else LOWEST if guard else -math.inf,
        "SUBTRACT_MAX": "subtract_max" not in without,
        "RESCALE_SUM": "rescale_sum" not in without,
        "RESCALE_OUTPUT": "rescale_output" not in without,
        "WIDE_OUTPUT": "wide_output" not in without or float32,
        "GUARD": guard,
    }
    return How(**{name: tl.constexpr(value) for name, value in fields.items()})


def precision(dtype: torch.dtype) -> str:
    """The precision of products: tf32 for float32 inputs if torch allows it, else ieee."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


class Strided(NamedTuple):
    """A (B, H, T, D) tensor for GPUs without descriptors (before sm_90)."""

    pointer: Tensor
    stride_b: int
    stride_h: int
    stride_t: int
    rows: int
    width: int  # D


def in_tiles(x: Tensor, rows: int, layout: Any = None) -> TensorDescriptor | Strided:
    """x (B, H, T, D) in the form in which a kernel loads and stores tiles of rows x BLOCK_D. layout: of such a tile in
    shared memory, for kernels/hopper.py, which says it itself."""
    if not sizes.has_descriptors(x.device):
        b, h, t = strides_of(x.shape, x.stride())
        return Strided(x, b, h, t, x.shape[2], x.shape[3])
    # This skips __init__ and its checks: checked() has run them for this kind of tensor. It takes 0.8 us instead of
    # 3.0. A forward and backward make 16 descriptors, so their host time is a sixth shorter (LOG.md).
    kind, attributes = checked(x.shape, x.stride(), x.dtype, rows, layout)
    descriptor: Any = object.__new__(kind)
    vars(descriptor).update(attributes)
    descriptor.base = x
    return descriptor


@lru_cache(1024)
def checked(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, rows: int, layout: Any
) -> tuple[type, dict]:
    """The class and the attributes of a descriptor that Triton made and checked."""
    block = [1, 1, rows, block_d(shape[3])]
    tensor = torch.empty(0, dtype=dtype), list(shape), [*strides_of(shape, stride), 1], block
    if layout is None:
        descriptor = TensorDescriptor(*tensor)
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as WithLayout  # only Hopper needs Gluon

        descriptor = WithLayout(*tensor, layout)
    return type(descriptor), vars(descriptor)


def strides_of(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    """The strides of all axes but the last. An axis of size 1 may have any stride in torch; a descriptor gets 16."""
    return [step if size > 1 else 16 for step, size in zip(stride[:3], shape[:3], strict=True)]
