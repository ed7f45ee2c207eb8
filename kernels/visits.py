"""Which tiles of scores have to be visited, from the rules of model/mask.py: for tiled, and as a table for the kernels
if there is a block mask. Without one they compute it: between() and in_documents() of kernels/flash.py.
"""

import torch
from torch import Tensor

from kernels.problem import Problem


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
    if problem.spans is not None:  # from the documents of a tile's first row and of its last
        (top_first, top_last), (bottom_first, bottom_last) = (problem.spans[:, i].unbind(-1) for i in (top, bottom))
        visited = visited & (right >= top_first) & (left <= bottom_last)
        whole = whole & (left >= bottom_first) & (right <= top_last)
    return visited, whole


def visit_lists(problem: Problem, block_m: int, block_n: int, form: str, device: torch.device) -> Tensor:
    """tile_table() as kernels/flash.py reads it: int32 (tiles, 2 + others), one line per tile of rows (form="rows") or
    of columns (form="columns"): how many tiles it visits, how many of these the mask cuts, then their numbers, the cut
    ones first. 4 (T / block_m) (T_k / block_n) bytes: 1 MiB for 64k tokens and tiles of 128."""
    visited, whole = (x[0] for x in tile_table(problem._replace(spans=None), block_m, block_n, device))
    whole = whole & (problem.spans is None)  # the table is for all sequences, and a document may end in any tile
    if form == "columns":  # rows past the last have the weight 0
        visited, whole = visited.mT, whole.mT
    else:  # columns past the last have to be masked
        whole[:, problem.T_k // block_n :] = False
    order = torch.argsort(torch.where(visited, whole.int(), 2), dim=-1, stable=True)  # cut tiles, whole, not visited
    counts = torch.stack((visited.sum(-1), (visited & ~whole).sum(-1)), -1)
    return torch.cat((counts, order), -1).int().contiguous()
