"""What attention computes from q, k and v: the one description that model/ and the kernels share."""

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
        """The lowest (column - position) of a key that a query may see."""
        return None if self.window is None else 1 - self.window

    @property
    def at_most(self) -> int | None:
        """The highest."""
        return 0 if self.causal else None if self.window is None else self.window - 1

    @property
    def threshold(self) -> int:
        """A weight is dropped if its random byte is below this."""
        return round(256 * self.dropout_p)

    @property
    def keep_scale(self) -> float:
        """1 / (share kept)."""
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
    """The number of streaming multiprocessors. Without a GPU: as on the one that the kernels were measured on."""
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
    so in_parts() comes after it."""
    if q.shape[2] == k.shape[2]:
        return [empty_heads(q, q.shape[1] + 2 * k.shape[1]).transpose(1, 2)]
    return [empty_heads(x) for x in (q, k, k)]


def in_parts(found: list[Tensor], q: Tensor, k: Tensor) -> list[Tensor]:
    """dq, dk and dv, each (B, H or H_kv, T, D), of empty_gradients()."""
    if len(found) == 3:
        return found
    return [x.transpose(1, 2) for x in found[0].split([q.shape[1], k.shape[1], k.shape[1]], dim=2)]
