"""What attention computes from q, k and v: the one description that every implementation takes.

Shapes: B batch, T query rows, T_k key rows, H query heads.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

HAS_TRITON = find_spec("triton") is not None  # it is made for Linux only; importing it takes a while


class Problem(NamedTuple):
    """Everything about a call except q, k and v. None switches a rule off.

    Each query row has a position among the keys: row i is at i + T_k - T unless `positions` says otherwise. Every rule
    compares that position with the key's column.
    """

    T: int
    T_k: int
    scale: float = 1.0  # multiplies q k^T: softmax_scale * break_it.score_gain
    causal: bool = True  # column <= position
    window: int | None = None  # |position - column| < window
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes: Tensor | None = None  # (H,) float32, float64 for float64 inputs: alibi makes it score - slope * distance
    documents_q: Tensor | None = None  # (B, T) integers: a query sees only keys of its own document
    documents_k: Tensor | None = None  # (B, T_k)
    positions: Tensor | None = None  # (T,) integers: each query's position among the keys; None: i + T_k - T
    blocks: Tensor | None = None  # bool: which blocks of block_size x block_size elements are computed
    block_size: int = 64
    seed: Tensor | None = None  # int64 scalar; None: no dropout
    drop_threshold: int = 0  # 0 to 255: a weight is dropped if its random byte is below this
    numbers: Tensor | None = None  # (B * H,) integers: each batch-head's number in the dropout mask; None: b*H + h
    without: tuple[str, ...] = ()  # the switches of model/break_it.py that are off

    @property
    def dropout_p(self) -> float:
        """The share of weights that is dropped: attention.dropout_p rounded to steps of 1/256."""
        return self.drop_threshold / 256


# The fields of a Problem in the schema of an op, which takes only tensors, numbers and strings.
KINDS: dict[Any, str] = {int: "SymInt", int | None: "SymInt?", float: "float", float | None: "float?", bool: "bool"}
KINDS |= {Tensor | None: "Tensor?", tuple[str, ...]: "str[]"}
FIELDS = ", ".join(f"{KINDS[kind]} {name}" for name, kind in get_type_hints(Problem).items())


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: Triton is installed, and it is an NVIDIA GPU from Ampere on."""
    if device.type != "cuda" or torch.version.hip or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def refuse_tangents(impl: str, *gradients: Tensor | None) -> None:
    """Raises RuntimeError if a gradient of the output carries a forward-mode tangent.

    PyTorch cannot differentiate this backward, so dq, dk and dv would lose their tangents.
    """
    if any(x is not None and unpack_dual(x).tangent is not None for x in gradients):
        raise RuntimeError(f"attention={impl} has no forward-mode derivative of its backward; use attention=naive")
