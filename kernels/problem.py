"""What attention computes from q, k and v, and which tiles it visits: what model/ and the kernels share."""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min  # where the running maximum m starts; model/tiled.py says why not at -inf


class Problem(NamedTuple):
    """A call of attention() without q, k and v. B batch, T query rows, T_k key rows, H query heads. None: no such rule.
    Row i is at position i + T_k - T among the keys, so the last row is at the last key."""

    T: int
    T_k: int
    causal: bool  # a query sees the keys up to its position
    window: int | None  # a query sees the keys with |position - column| < window
    spans: Tensor | None  # int32 (B, T_k, 2): spans_of() of model/mask.py; the queries are the last T tokens
    blocks: Tensor | None  # bool (rows, columns): which blocks of block_size x block_size scores are computed
    block_size: int
    scale: float  # multiplies q k^T
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    slopes: Tensor | None  # float32 (H,), ALiBi: scores become score - slope * distance
    seed: Tensor | None  # int64 scalar, of the mask of model/dropout.py; None: no dropout
    dropout_p: float  # the mask rounds it to a step of 1/256; 0 without dropout
    broken: tuple[str, ...]  # the failures of model/break_it.py

    @property
    def at_least(self) -> int | None:
        """The lowest (column - position) of a key that a query may see. None: no bound."""
        return None if self.window is None else 1 - self.window

    @property
    def at_most(self) -> int | None:
        """The highest (column - position)."""
        return 0 if self.causal else None if self.window is None else self.window - 1

    @property
    def threshold(self) -> int:
        """A weight is dropped if its random byte is below this."""
        return round(256 * self.dropout_p)

    @property
    def keep_scale(self) -> float:
        """1 / (share kept): what the kept weights are multiplied by."""
        return 256 / (256 - self.threshold)


# The fields of Problem, in their order, as the arguments of a custom op.
FIELDS = (
    "SymInt T, SymInt T_k, bool causal, int? window, Tensor? spans, Tensor? blocks, int block_size, float scale, "
    "float? softcap, Tensor? slopes, Tensor? seed, float dropout_p, str[] broken"
)


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed (it is made for Linux only), and the device is an NVIDIA GPU from Ampere on."""
    if device.type != "cuda" or torch.version.hip or not find_spec("triton"):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


@cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors. Without a GPU those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def empty_heads(x: Tensor, heads: int | None = None) -> Tensor:
    """An empty (B, H, T, D), like x or with other heads, that lies in memory as (B, T, H, D), so that the projection
    after it needs no copy. Rows are padded to a multiple of 16 bytes, as descriptors require."""
    B, H, T, D = x.shape[0], heads or x.shape[1], *x.shape[2:]
    step = 16 // x.itemsize
    width = -(-D // step) * step
    return x.new_empty_strided((B, H, T, D), (T * H * width, width, H * width, 1))


def empty_gradients(q: Tensor, k: Tensor) -> list[Tensor]:
    """Memory for dq, dk and dv: three tensors, or where T = T_k one (B, T, H + 2 H_kv, D), as the projection's
    output held q, k and v: then a compiled model need not copy them together. An op may not return views of one memory,
    so it returns the whole, and its caller takes in_parts()."""
    if q.shape[2] == k.shape[2]:
        return [empty_heads(q, q.shape[1] + 2 * k.shape[1]).transpose(1, 2)]
    return [empty_heads(x) for x in (q, k, k)]


def in_parts(found: list[Tensor], q: Tensor, k: Tensor) -> list[Tensor]:
    """dq, dk and dv, each (B, H or H_kv, T, D), of empty_gradients()."""
    if len(found) == 3:
        return found
    return [x.transpose(1, 2) for x in found[0].split([q.shape[1], k.shape[1], k.shape[1]], dim=2)]


# --- Which tiles are visited ------------------------------------------------------------------------------------------
# From the rules of a Problem: for tiled, and as a table for the kernels if there is a block mask. Without one they
# compute it: between() and in_documents() of kernels/flash.py.
def tile_table(problem: Problem, block_m: int, block_n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each tile of block_m rows and block_n columns, whether any score may be visible and whether all are: bool
    (1 or B, row tiles, column tiles) each. From the tiles' edges alone; a needless visit changes no bit."""
    top = torch.arange(problem.T_k - problem.T, problem.T_k, block_m, device=device)[:, None]
    left = torch.arange(0, problem.T_k, block_n, device=device)
    bottom, right = (x.clamp(max=problem.T_k - 1) for x in (top + block_m - 1, left + block_n - 1))
    # top and bottom are positions, (row tiles, 1); left and right columns, (column tiles,)
    visited = whole = torch.ones(len(top), len(left), dtype=torch.bool, device=device)
    if "local_mask" in problem.broken:
        whole = ~visited
    elif problem.causal:
        visited, whole = left <= bottom, right <= top
    if problem.window is not None:
        visited = visited & (right > top - problem.window) & (left < bottom + problem.window)
        whole = whole & (left > bottom - problem.window) & (right < top + problem.window)
    if problem.blocks is not None:  # how many blocks of a tile are on, by a summed-area table
        on_before = torch.nn.functional.pad(problem.blocks.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
        i0, i1, j0, j1 = (x.clamp(min=0) // problem.block_size for x in (top, bottom, left, right))
        on = on_before[i1 + 1, j1 + 1] - on_before[i0, j1 + 1] - on_before[i1 + 1, j0] + on_before[i0, j0]
        visited, whole = visited & (on > 0), whole & (on == (i1 + 1 - i0) * (j1 + 1 - j0))
    visited, whole = visited[None], whole[None]
    if problem.spans is not None:  # neither end of a row's document falls along T: two rows of a tile suffice
        (top_first, top_last), (bottom_first, bottom_last) = (problem.spans[:, i].unbind(-1) for i in (top, bottom))
        visited = visited & (right >= top_first) & (left <= bottom_last)
        whole = whole & (left >= bottom_first) & (right <= top_last)
    return visited, whole


def visit_lists(problem: Problem, block_m: int, block_n: int, form: str, device: torch.device) -> Tensor:
    """tile_table() as kernels/flash.py reads it: int32 (tiles, 2 + tiles of the other side), a line per tile of rows
    (form="rows") or of columns (form="columns"): how many tiles it visits, how many of these the mask cuts, then their
    numbers, the cut ones first. 4 (T / block_m) (T_k / block_n) bytes: 1 MiB for 64k tokens and tiles of 128."""
    visited, whole = (x[0] for x in tile_table(problem._replace(spans=None), block_m, block_n, device))
    whole = whole & (problem.spans is None)  # the table is for all sequences, and a document may end in any tile
    if form == "columns":  # rows past the last have the weight 0
        visited, whole = visited.mT, whole.mT
    else:  # columns past the last have to be masked
        whole[:, problem.T_k // block_n :] = False
    order = torch.argsort(torch.where(visited, whole.int(), 2), dim=-1, stable=True)  # cut tiles, whole, not visited
    counts = torch.stack((visited.sum(-1), (visited & ~whole).sum(-1)), -1)
    return torch.cat((counts, order), -1).int().contiguous()
