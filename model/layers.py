"""The layers around attention, as functions of their modules: what computes them is chosen from outside.

Shapes: B batch, T sequence length, C model width.

Layers() has torch's. FUSED of sampling/linear.py has a kernel for each call, for one token of a few sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from model.norm import Added, Norm, add_and_norm, last_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda y: F.relu(y).square(),  # So et al. 2021, arXiv 2109.08668
    "swiglu": F.silu,  # of the gate
}


def embed(embedding: nn.Embedding, positions: nn.Embedding | None, idx: Tensor, at: slice | Tensor) -> Tensor:
    """The embeddings (B, T, C) of the tokens idx (B, T), with those of their positions `at` where these are learned."""
    x = embedding(idx)
    return x if positions is None else x + positions.weight[at]


def read(
    norm: Norm, x: Tensor, added: Added | None, layer: nn.Linear, gate: nn.Linear | None = None, act: str = "none"
) -> tuple[Tensor, Tensor]:
    """The stream x + added, (B, T, C), and of its norm y: act(layer(y)), or act(gate(y)) * layer(y)."""
    x, y = add_and_norm(norm, x, added)
    if gate is None:
        return x, ACTIVATIONS[act](layer(y))
    return x, ACTIVATIONS[act](gate(y)) * layer(y)


def write(x: Tensor, layer: nn.Linear, y: Tensor, keep: Tensor | None, dropout_p: float) -> tuple[Tensor, Added | None]:
    """layer(y) as what is to be added to the stream x. The next norm does that: one kernel makes their backward."""
    return x, Added(layer(y), keep, dropout_p)


def logits(norm: Norm, x: Tensor, added: Added | None, head: nn.Linear) -> Tensor:
    """The stream after the blocks, x + added, to logits in the dtype of the products."""
    return head(last_norm(norm, x, added))


class Layers(NamedTuple):
    """What computes the layers around attention. Their arguments are the modules, so sampling/linear.py can have other
    ones for a few rows, with a kernel for each call."""

    embed: Callable[..., Tensor] = embed
    read: Callable[..., tuple[Tensor, Tensor]] = read
    write: Callable[..., tuple[Tensor, Added | None]] = write
    logits: Callable[..., Tensor] = logits


LAYERS = Layers()
