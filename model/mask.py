"""Which keys a query may see: one definition for every implementation, and the tiles that it leaves to compute.

Shapes: B batch, T query rows, T_k keys, R rows and S columns of a tile.

A query row stands at a position among the keys, row i at i + T_k - T (the last row at the last key, as flash-attention
aligns them), and every rule compares that position with the key's column. A key is seen where all rules say so:

    causal       column <= position
    window       |position - column| < window: itself and the nearest window - 1 keys
    documents    both in the same document (several texts packed into one sequence)
    blocks       the block of block_size x block_size elements that holds the pair is not switched off

Two questions are asked of it. naive asks visible() once, for everything; tiled asks look() of every tile, computes
nothing where the answer is EMPTY, and asks visible() only where it is PART.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

EMPTY, PART, WHOLE = 0, 1, 2  # what look() says of a tile: nothing in it is seen, some of it, all of it


@dataclass
class Mask:
    """documents: (B, T) of the rows and (B, T_k) of the keys, integers. blocks: bool, one element a block.
    positions: (T,) int64, only where documents have other lengths as queries than as keys (see packed())."""

    T: int
    T_k: int
    causal: bool = True
    window: int | None = None
    documents: tuple[Tensor, Tensor] | None = None
    blocks: Tensor | None = None
    block_size: int = 64
    positions: Tensor | None = None
    known: dict = field(default_factory=dict)  # look()'s facts about whole tiles, read off the device once

    def position(self, rows: range, device: torch.device) -> Tensor:
        """Where the rows stand among the keys, int64 (R,)."""
        if self.positions is not None:
            return self.positions[rows.start : rows.stop]
        return torch.arange(rows.start, rows.stop, device=device) + (self.T_k - self.T)

    def visible(self, rows: range, columns: range, device: torch.device) -> Tensor:
        """May each row see each column? bool (1, R, S), or (B, R, S) with documents."""
        i = self.position(rows, device)[:, None]
        j = torch.arange(columns.start, columns.stop, device=device)
        seen = j <= i if self.causal else torch.ones(len(rows), len(columns), dtype=torch.bool, device=device)
        if self.window is not None:
            seen &= (j > i - self.window) & (j < i + self.window)
        if self.blocks is not None:  # a row before the first key (T > T_k) stands in the first block
            seen &= self.blocks[i.clamp(min=0) // self.block_size, j // self.block_size]
        seen = seen.unsqueeze(0)
        if self.documents is not None:
            of_rows, of_keys = (x[:, t.start : t.stop] for x, t in zip(self.documents, (rows, columns), strict=True))
            seen = seen & (of_rows[:, :, None] == of_keys[:, None, :])
        return seen

    def distance(self, rows: range, columns: range, device: torch.device) -> Tensor:
        """|position - column|, int64 (R, S)."""
        return (self.position(rows, device)[:, None] - torch.arange(columns.start, columns.stop, device=device)).abs()

    def look(self, rows: range, columns: range) -> int:
        """EMPTY, PART or WHOLE, without looking at the elements: integer arithmetic on the tile's edges.

        Never EMPTY where something is seen, never WHOLE where something is hidden. EMPTY wherever nothing is seen
        too, provided that documents are numbered in order and that no tile crosses an edge between blocks; else a few
        tiles of nothing are computed, which costs time and changes no bit of the result.
        """
        offset = self.T_k - self.T
        first, last = rows[0] + offset, rows[-1] + offset  # the rows' positions
        if self.positions is not None:
            ((first, last),) = self.edges("positions", self.positions[None], rows)
        left, right = columns[0], columns[-1]
        whole = True
        if self.causal:
            if left > last:
                return EMPTY
            whole &= right <= first
        if self.window is not None:
            if right <= first - self.window or left >= last + self.window:
                return EMPTY
            whole &= last - left < self.window and right - first < self.window
        if self.documents is not None:
            ours = self.edges("rows", self.documents[0], rows)
            theirs = self.edges("keys", self.documents[1], columns)
            pairs = list(zip(ours, theirs, strict=True))  # one of each sequence of the batch
            if not any(low <= top and bottom <= high for (low, high), (bottom, top) in pairs):
                return EMPTY
            whole &= all(low == high == bottom == top for (low, high), (bottom, top) in pairs)
        if self.blocks is not None:
            if "blocks" not in self.known:
                self.known["blocks"] = self.blocks.cpu().numpy()
            n = self.block_size
            under = self.known["blocks"][max(first, 0) // n : max(last, 0) // n + 1, left // n : right // n + 1]
            if not under.any():
                return EMPTY
            whole &= bool(under.all())
        return WHOLE if whole else PART

    def edges(self, name: str, x: Tensor, tile: range) -> list[tuple[int, int]]:
        """Lowest and highest of x (B, length) within a tile, a pair for each of the batch; read off the device once."""
        key = name, tile.start, tile.stop
        if key not in self.known:
            part = x[:, tile.start : tile.stop]
            self.known[key] = torch.stack((part.amin(-1), part.amax(-1)), -1).tolist()
        return self.known[key]


def packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, T: int, T_k: int) -> dict[str, object]:
    """Mask's documents and positions for sequences laid end to end, given as flash-attention's varlen functions take
    them: where each sequence begins, and at the end the total length, integers (sequences + 1,).

    A sequence may have other lengths as queries than as keys; its last query then stands at its last key. It may also
    be empty. Raises ValueError for numbers that do not add up.
    """
    for name, cu, total in (("q", cu_seqlens_q, T), ("k", cu_seqlens_k, T_k)):
        if cu.ndim != 1 or len(cu) < 2 or cu.is_floating_point():
            raise ValueError(f"cu_seqlens_{name}: {cu.dtype} {tuple(cu.shape)}, want integers (sequences + 1,)")
        if int(cu[0]) != 0 or int(cu[-1]) != total or bool((cu.long().diff() < 0).any()):
            raise ValueError(f"cu_seqlens_{name} {cu.tolist()[:9]} must rise from 0 to {total}, the number of tokens")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} entries and cu_seqlens_k {len(cu_seqlens_k)}")
    cu_q, cu_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    row, key = (torch.arange(n, device=cu_q.device) for n in (T, T_k))
    # right: a sequence of no tokens begins where the next one does, and the token belongs to the next
    of_rows, of_keys = (torch.searchsorted(cu, x, right=True) - 1 for cu, x in ((cu_q, row), (cu_k, key)))
    positions = row - cu_q[of_rows + 1] + cu_k[of_rows + 1]
    return {"documents": (of_rows[None], of_keys[None]), "positions": positions}
