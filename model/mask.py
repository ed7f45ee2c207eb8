"""Which keys a query sees: those that all rules of a Problem allow. kernels/problem.py says what each rule is, and
kernels/visits.py says from the same rules which tiles of scores have a visible one.
"""

import torch
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
    if problem.documents is None:
        return seen[None]
    d, first = problem.documents, problem.T_k - problem.T
    of_rows, of_keys = d[:, first + rows.start : first + rows.stop], d[:, columns.start : columns.stop]
    return seen & (of_rows[:, :, None] == of_keys[:, None])
