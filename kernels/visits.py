"""Which tiles of scores have to be visited: one definition for tiled and the kernels, from the rules of model/mask.py.
For causal masks and windows the kernels compute it themselves; for documents and block masks they read a table.
"""

import torch
from torch import Tensor

from kernels.problem import Problem


def tile_table(problem: Problem, block_m: int, block_n: int, device, cut_last=False) -> tuple[Tensor, Tensor]:
    """Of each tile of block_m rows and block_n columns, whether any score may be visible and whether all are: bool
    (1 or B, row tiles, column tiles) each. From the tiles' edges alone; a needless visit changes no bit. cut_last: for
    a kernel that masks the columns past T_k, so a tile that has such columns is not whole."""
    top = torch.arange(problem.T_k - problem.T, problem.T_k, block_m, device=device)[:, None]
    left = torch.arange(0, problem.T_k, block_n, device=device)
    bottom, right = (x.clamp(max=problem.T_k - 1) for x in (top + block_m - 1, left + block_n - 1))
    visited = torch.ones(len(top), len(left), dtype=torch.bool, device=device)
    whole = visited.clone()
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
    if cut_last:
        whole = whole & (left + block_n <= problem.T_k)
    visited, whole = visited[None], whole[None]
    if problem.documents is not None:  # the lowest and the highest document of each tile
        r0, r1 = (x[:, :, None] for x in ends(problem.documents[:, problem.T_k - problem.T :], block_m))
        k0, k1 = (x[:, None] for x in ends(problem.documents, block_n))
        visited, whole = visited & (k0 <= r1) & (r0 <= k1), whole & (r0 == r1) & (r0 == k0) & (k0 == k1)
    return visited, whole


def ends(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The lowest and the highest document in each tile of `size` tokens: (B, tiles) each."""
    T = documents.shape[1]
    index = torch.arange(-(-T // size) * size, device=documents.device).clamp(max=T - 1)  # the last tile is filled up
    return documents[:, index].view(len(documents), -1, size).aminmax(dim=-1)


def visit_lists(problem: Problem, block_m: int, block_n: int, form: str, device: torch.device) -> Tensor:
    """tile_table() as kernels/flash.py reads it: int32 (1 or B, tiles, ...), a line for each tile of rows (form="rows")
    or of columns (form="columns"): how many tiles it visits, how many of these the mask cuts, then their numbers, the
    cut ones first. 4 (T / block_m) (T_k / block_n) bytes a sequence: 1 MiB for 64k tokens and tiles of 128."""
    # With columns the kernel goes through rows, and gives those past the last the weight 0, so they need no mask.
    visited, whole = tile_table(problem, block_m, block_n, device, cut_last=form == "rows")
    if form == "columns":
        visited, whole = visited.mT, whole.mT
    order = torch.argsort(torch.where(visited, whole.int(), 2), dim=-1, stable=True)  # cut tiles, whole, not visited
    counts = torch.stack((visited.sum(-1), (visited & ~whole).sum(-1)), -1)
    return torch.cat((counts, order), -1).int().contiguous()


def visit_ranges(problem: Problem, block_m: int, block_n: int, device: torch.device) -> Tensor:
    """The same for kernels/hopper/, int32 (1 or B, tiles of rows, 4): start, whole_start, whole_stop, stop. A tile of
    rows visits tiles start to stop - 1, and the mask cuts none of those from whole_start to whole_stop - 1."""
    visited, whole = tile_table(problem, block_m, block_n, device, cut_last=True)
    n, t = visited.shape[-1], torch.arange(visited.shape[-1], device=device)
    stop = torch.where(visited, t + 1, 0).amax(-1, keepdim=True)
    start = torch.where(visited, t, n).amin(-1, keepdim=True).minimum(stop)
    whole_start = torch.where(whole, t, n).amin(-1, keepdim=True).minimum(stop)
    whole_stop = torch.where(~whole & (t > whole_start), t, n).amin(-1, keepdim=True).minimum(stop)
    return torch.cat((start, whole_start, whole_stop, stop), -1).int().contiguous()
