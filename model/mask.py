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

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
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
    local: bool = False  # causal, as break_it.global_mask=False has it: row and column each counted within their tile
    edges: dict[tuple[str, int], list] = field(default_factory=dict)  # read_edges()
    blocks_here: np.ndarray | None = None  # blocks, on the host

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
        if self.local:
            seen &= j - columns.start <= i - i[0]
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

    def columns_for(self, rows: range, column_tiles: list[range]) -> Iterator[tuple[range, int]]:
        """The tiles of keys that a tile of rows has to visit, each with PART or WHOLE."""
        first, last = self.span(rows)
        start, stop = 0, self.T_k
        if self.causal:
            stop = min(stop, last + 1)
        if self.window is not None:
            start, stop = max(start, first - self.window + 1), min(stop, last + self.window)
        for columns in within(column_tiles, start, stop):
            if seen := self.look(rows, columns):
                yield columns, seen

    def rows_for(self, columns: range, row_tiles: list[range]) -> Iterator[tuple[range, int]]:
        """The tiles of rows that have to visit a tile of keys, each with PART or WHOLE."""
        start, stop = 0, self.T
        if self.positions is None:  # those of a pack rise within a sequence only
            offset = self.T_k - self.T
            if self.causal:
                start = max(start, columns[0] - offset)
            if self.window is not None:
                start = max(start, columns[0] - self.window + 1 - offset)
                stop = min(stop, columns[-1] + self.window - offset)
        for rows in within(row_tiles, start, stop):
            if seen := self.look(rows, columns):
                yield rows, seen

    def look(self, rows: range, columns: range) -> int:
        """EMPTY, PART or WHOLE, without looking at the elements: integer arithmetic on the tile's edges.

        Never EMPTY where something is seen, never WHOLE where something is hidden. EMPTY wherever nothing is seen too,
        but where documents are not numbered in order, a tile crosses an edge between blocks, or a window meets two
        sequences of a pack: then a few tiles of nothing are computed, which costs time and changes no bit.
        """
        first, last = self.span(rows)
        left, right = columns[0], columns[-1]
        whole = not self.local
        if self.causal:
            if left > last:
                return EMPTY
            whole &= right <= first
        if self.window is not None:
            if right <= first - self.window or left >= last + self.window:
                return EMPTY
            whole &= last - left < self.window and right - first < self.window
        if self.documents is not None:
            pairs = list(zip(self.edges["rows", rows.start], self.edges["keys", columns.start], strict=True))
            if not any(low <= top and bottom <= high for (low, high), (bottom, top) in pairs):
                return EMPTY
            whole &= all(low == high == bottom == top for (low, high), (bottom, top) in pairs)
        if self.blocks is not None:
            n = self.block_size
            under = self.blocks_here[max(first, 0) // n : max(last, 0) // n + 1, left // n : right // n + 1]
            if not under.any():
                return EMPTY
            whole &= bool(under.all())
        return WHOLE if whole else PART

    def span(self, rows: range) -> tuple[int, int]:
        """Lowest and highest position of a tile of rows."""
        if self.positions is not None:
            return self.edges["positions", rows.start][0]
        return rows[0] + self.T_k - self.T, rows[-1] + self.T_k - self.T

    def read_edges(self, row_tiles: list[range], column_tiles: list[range]) -> "Mask":
        """Takes from the device, at one go, what look() has to know of these tiles, before it is asked of them."""
        if self.blocks is not None:
            self.blocks_here = self.blocks.cpu().numpy()
        wanted = []
        if self.documents is not None:
            wanted += [("rows", self.documents[0], row_tiles), ("keys", self.documents[1], column_tiles)]
        if self.positions is not None:
            wanted += [("positions", self.positions[None], row_tiles)]
        keys, ends = [], []
        for name, x, some_tiles in wanted:
            for tile in some_tiles:
                part = x[:, tile.start : tile.stop]
                keys.append((name, tile.start))
                ends.append(torch.stack((part.amin(-1), part.amax(-1)), -1).expand(len(self.documents[1]), 2))
        # by name and tile: the lowest and highest position (document) in it, a pair for each sequence of the batch
        self.edges = dict(zip(keys, torch.stack(ends).tolist() if ends else [], strict=True))
        return self


def within(tiles: list[range], start: int, stop: int) -> list[range]:
    """Those of the tiles, equally long but for the last, that have an index in start .. stop."""
    block = len(tiles[0]) if tiles else 1
    return tiles[start // block : max(0, -(-stop // block))]


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
