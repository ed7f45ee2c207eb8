"""What attention is to compute from q, k and v: one description, from the door in model/attention.py to the kernels.

Shapes: B batch, T query rows, T_k key rows, H query heads.
"""

from typing import NamedTuple

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


class Problem(NamedTuple):
    """Everything but q, k and v themselves. None switches a rule off.

    A query row stands at a position among the keys, row i at i + T_k - T unless `positions` says otherwise, and every
    rule compares that position with the key's column.
    """

    T: int
    T_k: int
    scale: float = 1.0  # of q k^T: softmax_scale, and break_it.score_gain with it
    causal: bool = True  # column <= position
    window: int | None = None  # |position - column| < window
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes: Tensor | None = None  # (H,) float32, float64 for float64 inputs: alibi takes slope * distance off a score
    documents_q: Tensor | None = None  # (B, T) integers: a query sees keys of its own document
    documents_k: Tensor | None = None  # (B, T_k)
    positions: Tensor | None = None  # (T,) integers: each query's position among the keys; None: i + T_k - T
    blocks: Tensor | None = None  # bool: which blocks of block_size x block_size elements are computed
    block_size: int = 64
    seed: Tensor | None = None  # int64 scalar; None: no dropout
    drop_threshold: int = 0  # of 256: how many values of a random byte drop a weight
    without: tuple[str, ...] = ()  # the switches of model/break_it.py that are off

    @property
    def dropout_p(self) -> float:
        """The share of weights that is dropped: attention.dropout_p in steps of 1/256."""
        return self.drop_threshold / 256


def refuse_tangents(impl: str, *gradients: Tensor | None) -> None:
    """Raises RuntimeError where a gradient of the output carries a tangent of forward-mode differentiation.

    The backward is no function that PyTorch knows, so dq, dk and dv would come out without their tangents.
    """
    if any(x is not None and unpack_dual(x).tangent is not None for x in gradients):
        raise RuntimeError(f"attention={impl} has no forward-mode derivative of its backward; use attention=naive")
