"""What attention computes from q, k and v: the one description that every implementation takes, kernels included.

Shapes: B batch, T query rows, T_k key rows, H query heads. None switches a rule off.
"""

import math
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

HAS_TRITON = find_spec("triton") is not None  # it is made for Linux only; importing it takes a while


class Mask(NamedTuple):
    """Which keys a query sees. Row i is at position i + T_k - T among the keys, unless `positions` says otherwise.
    Every rule compares that position with the key's column."""

    T: int
    T_k: int
    at_least: int | None  # the lowest column - position: 1 - window
    at_most: int | None  # the highest column - position: 0 if causal, else window - 1
    documents_q: Tensor | None  # (B, T) integers: a query sees only keys of its own document
    documents_k: Tensor | None  # (B, T_k)
    positions: Tensor | None  # (T,) integers: each query's position among the keys
    blocks: Tensor | None  # bool: which blocks of block_size x block_size elements are computed
    block_size: int
    block_columns: int  # columns of `blocks`
    # Of kernels, for break_it=local_mask: the causal mask counts from the corner of a tile of local_m x local_n.
    local_m: int | None = None
    local_n: int | None = None


class Score(NamedTuple):
    """How q k^T becomes a score."""

    scale: float  # multiplies q k^T: softmax_scale * break_it.score_gain
    scale2: float  # scale * log2(e), rounded to float32 once, not twice
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    slopes: Tensor | None  # (H,) float32, float64 for float64 inputs: alibi makes it score - slope * distance


class Dropout(NamedTuple):
    """Step 4: the mask of model/dropout.py, drawn from its seed."""

    seed: Tensor | None  # int64 scalar; None: no dropout
    threshold: int  # 0 to 255: a weight is dropped if its random byte is below this
    zero: float  # 0.0, as an argument: with a constant the compiler rounds before it selects, which is slower (LOG.md)
    numbers: Tensor | None = None  # (B * H,) integers: each batch-head's number in the dropout mask; None: b*H + h


class Given(NamedTuple):
    """The tensors of a Problem, each as above; they may change from call to call."""

    documents_q: Tensor | None = None
    documents_k: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None
    slopes: Tensor | None = None
    seed: Tensor | None = None
    numbers: Tensor | None = None


NOTHING = Given()


class Visits(NamedTuple):
    """Which tiles a kernel visits, where that depends on data; made by kernels/sizes.py. None where arithmetic on the
    mask is enough. The first three are pairs: the lowest and the highest number in every tile."""

    positions: tuple[Tensor, Tensor] | None  # (1, row tiles)
    row_documents: tuple[Tensor, Tensor] | None  # (B, row tiles)
    key_documents: tuple[Tensor, Tensor] | None  # (B, key tiles)
    bounds: Tensor | None  # (tiles, 4), for a block mask: between()'s four numbers, as places in `tiles`
    tiles: Tensor | None  # (tiles, others): for each tile, the list of those that it visits


class Task(NamedTuple):
    """What one of the kernels of kernels/flash.py computes: a Problem, with the tiles to visit."""

    mask: Mask
    score: Score
    dropout: Dropout
    visits: Visits
    keep_scale: float  # 1 / (share kept)
    H: int
    G: int  # H / H_kv: query heads that share a key head


class Problem(NamedTuple):
    """Everything about a call except q, k and v."""

    mask: Mask
    score: Score
    dropout: Dropout
    broken: tuple[str, ...]  # the failures of model/break_it.py that are in it
    # Of all calls of one kind: what op.py has checked, kernels/hopper/ has refused and launch.py has compiled for them.
    cache: dict[Any, Any] | None = None

    @staticmethod
    def of(
        T: int, T_k: int, scale: float = 1.0, causal: bool = True, window: int | None = None,
        softcap: float | None = None, slopes: Tensor | None = None, documents_q: Tensor | None = None,
        documents_k: Tensor | None = None, positions: Tensor | None = None, blocks: Tensor | None = None,
        block_size: int = 64, seed: Tensor | None = None, drop_threshold: int = 0, numbers: Tensor | None = None,
        broken: tuple[str, ...] = (),
    ) -> "Problem":  # fmt: skip
        """The problem of these rules. causal: column <= position. window: |position - column| < window."""
        at_least = at_most = None
        if window is not None and (positions is not None or window <= T + T_k):
            window = min(window, 2**30)  # a wider one hides nothing; positions may reach further than the lengths
            at_least, at_most = 1 - window, window - 1
        at_most = 0 if causal else at_most
        documents_q, documents_k, positions, blocks = (
            None if x is None else x.contiguous() for x in (documents_q, documents_k, positions, blocks)
        )
        columns = 0 if blocks is None else blocks.shape[1]
        return Problem(
            Mask(T, T_k, at_least, at_most, documents_q, documents_k, positions, blocks, block_size, columns),
            Score(scale, scale * math.log2(math.e), softcap, slopes),
            Dropout(seed, drop_threshold, 0.0, numbers),
            broken,
        )

    @property
    def dropout_p(self) -> float:
        """The share of weights that is dropped: attention.dropout_p rounded to steps of 1/256."""
        return self.dropout.threshold / 256

    @property
    def keep_scale(self) -> float:
        """1 / (share kept)."""
        return 256 / (256 - self.dropout.threshold)

    @property
    def tensors(self) -> Given:
        """All of the problem's tensors."""
        return Given(*self.mask[4:8], self.score.slopes, self.dropout.seed, self.dropout.numbers)

    def having(self, tensors: Iterable[Tensor | None] = NOTHING) -> "Problem":
        """The problem with these tensors, in the order of Given."""
        documents_q, documents_k, positions, blocks, slopes, seed, numbers = tensors
        mask, score, dropout = self.mask, self.score, self.dropout
        return Problem(  # not by _replace(): this is called three times in a layer, and that would take 8 us longer
            Mask(*mask[:4], documents_q, documents_k, positions, blocks, *mask[8:]),
            Score(*score[:3], slopes, *score[4:]),
            Dropout(seed, dropout.threshold, dropout.zero, numbers),
            self.broken,
            self.cache,
        )

    def in_backward(self) -> "Problem":
        """The problem as the backward computes it: the same, but with break_it=stale_seed another dropout mask."""
        if self.dropout.seed is None or "stale_seed" not in self.broken:
            return self
        return self._replace(dropout=self.dropout._replace(seed=self.dropout.seed + 1))

    @property
    def fields(self) -> tuple:
        """The problem as the arguments of an op, whose schema is FIELDS."""
        return *self.mask, *self.score, *self.dropout, self.broken

    @staticmethod
    def from_fields(*fields) -> "Problem":
        """The inverse of `fields`. An op of torch.library turns the tuple `broken` into a list, which would make
        Problems unequal that are equal."""
        left = iter(fields)
        parts: Any = (part(*islice(left, len(part._fields))) for part in (Mask, Score, Dropout))
        mask, score, dropout = parts
        return Problem(mask, score, dropout, tuple(next(left)))


# The schema of an op takes only tensors, numbers and strings.
SCHEMA_TYPES: dict[Any, str] = {int: "SymInt", int | None: "SymInt?", float: "float", float | None: "float?"}
SCHEMA_TYPES |= {Tensor | None: "Tensor?"}
FIELDS = ", ".join(
    f"{SCHEMA_TYPES[kind]} {name}" for part in (Mask, Score, Dropout) for name, kind in get_type_hints(part).items()
)
FIELDS += ", str[] broken"


def order_keys(module: dict[str, Any]) -> None:
    """Computes the cache keys of a module's kernels in the order of the file: reading cache_key computes it. Triton
    does so at the first launch, and its key then depends on earlier launches. So another script, or another rank, would
    not find the compiled kernel."""
    for kernel in list(module.values()):
        getattr(kernel, "cache_key", None)


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: Triton is installed, and it is an NVIDIA GPU from Ampere on."""
    if device.type != "cuda" or torch.version.hip or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def refuse_tangents(impl: str, *gradients: Tensor | None) -> None:
    """Raises RuntimeError if a gradient of the output carries a forward-mode tangent.

    PyTorch cannot differentiate this backward, so dq, dk and dv would lose their tangents.
    """
    for x in gradients:
        if x is not None and unpack_dual(x).tangent is not None:
            raise RuntimeError(f"attention={impl} has no forward-mode derivative of its backward; use attention=naive")
