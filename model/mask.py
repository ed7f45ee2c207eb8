"""Which keys a query sees: those that all rules of a Problem allow. kernels/problem.py says what each rule is, and
which tiles may have a visible score.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.problem import Problem


def positions(problem: Problem, rows: range, columns: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the rows, (R, 1), and the columns, (S,)."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + (problem.T_k - problem.T)
    return i, torch.arange(columns.start, columns.stop, device=device)


def visible(problem: Problem, rows: range, columns: range, device: torch.device) -> Tensor:
    """Whether each row sees each column: bool (1, R, S), or (B, R, S) with documents."""
    i, j = positions(problem, rows, columns, device)
    seen = torch.ones(len(rows), len(columns), dtype=torch.bool, device=device)
    if "local_mask" in problem.broken:  # rows and columns are counted from the corner of the tile
        seen &= j - columns.start <= i - i[0]
    elif problem.causal:
        seen &= j <= i
    if problem.window is not None:
        seen &= (i - j).abs() < problem.window
    if problem.blocks is not None:  # a row before the first key (T > T_k) counts as in the first block
        seen &= problem.blocks[i.clamp(min=0) // problem.block_size, j // problem.block_size]
    if problem.spans is None:
        return seen[None]
    first, last = problem.spans[:, i].unbind(-1)  # (B, R, 1) each
    return seen & (first <= j) & (j <= last)


def spans_of(documents: Tensor) -> Tensor:
    """The first and the last place of each token's document, int32 (B, T, 2), from document numbers (B, T). A document
    is a run of equal numbers."""
    T = documents.shape[1]
    at = torch.arange(T, device=documents.device)
    new = documents[:, 1:] != documents[:, :-1]
    first = torch.where(F.pad(new, (1, 0)), at, 0).cummax(1).values  # the last start so far
    last = torch.where(F.pad(new, (0, 1)), at, T - 1).flip(1).cummin(1).values.flip(1)  # the next end
    return torch.stack((first, last), -1).int()
