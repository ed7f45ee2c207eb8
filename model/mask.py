"""Which keys a query sees: one definition for every implementation, and which tiles have to be computed.

Shapes: B batch, T query rows, T_k keys, R rows and S columns of a tile.

Each query row has a position among the keys. Row i is at i + T_k - T, so the last row is at the last key, as in
flash-attention. Every rule compares this position with the key's column. A key is visible if all rules allow it:

    causal       column <= position
    window       |position - column| < window: the key at the position, and window - 1 keys on each side
    documents    query and key are in the same document (several texts may be packed into one sequence)
    blocks       the pair's block of block_size x block_size elements is switched on

The rules are those of a Problem's mask (kernels/problem.py), where causal and window are one: at_least <= column -
position <= at_most. naive calls visible() once, for the whole matrix. tiled loops
over the tiles of a Tiling. It skips the EMPTY ones, and calls visible() only for those that are PART.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.problem import Given, Mask, Problem

EMPTY, PART, WHOLE = 0, 1, 2  # a tile is fully hidden, partly visible, fully visible


def position(mask: Mask, rows: range, device: torch.device) -> Tensor:
    """The positions of the rows among the keys, int64 (R,)."""
    if mask.positions is not None:
        return mask.positions[rows.start : rows.stop]
    return torch.arange(rows.start, rows.stop, device=device) + (mask.T_k - mask.T)


def visible(problem: Problem, rows: range, columns: range, device: torch.device) -> Tensor:
    """Whether each row sees each column: bool (1, R, S), or (B, R, S) with documents."""
    mask = problem.mask
    i = position(mask, rows, device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=device)
    seen = torch.ones(len(rows), len(columns), dtype=torch.bool, device=device)
    if mask.at_most is not None:
        # With break_it=local_mask row and column are counted within the tile.
        seen = j - columns.start <= i - i[0] if "local_mask" in problem.broken else j <= i + mask.at_most
    if mask.at_least is not None:
        seen &= j >= i + mask.at_least
    if mask.blocks is not None:  # a row before the first key (T > T_k) counts as in the first block
        seen &= mask.blocks[i.clamp(min=0) // mask.block_size, j // mask.block_size]
    seen = seen.unsqueeze(0)
    if mask.documents_q is not None and mask.documents_k is not None:
        of_rows = mask.documents_q[:, rows.start : rows.stop]
        of_keys = mask.documents_k[:, columns.start : columns.stop]
        seen = seen & (of_rows[:, :, None] == of_keys[:, None, :])
    return seen


def distance(problem: Problem, rows: range, columns: range, device: torch.device) -> Tensor:
    """|position - column|, int64 (R, S)."""
    j = torch.arange(columns.start, columns.stop, device=device)
    return (position(problem.mask, rows, device)[:, None] - j).abs()


class Tile(NamedTuple):
    """A tile of scores: a range of rows and a range of columns. seen: PART or WHOLE."""

    rows: range
    columns: range
    seen: int


class Tiling:
    """A problem cut into tiles of block_m rows and block_n columns, and which of them have to be computed."""

    def __init__(self, problem: Problem, block_m: int, block_n: int):
        self.mask = mask = problem.mask
        self.row_tiles, self.column_tiles = tiles(mask.T, block_m), tiles(mask.T_k, block_n)
        # break_it=local_mask breaks the causal mask: then no tile is EMPTY, and none is WHOLE.
        self.local = "local_mask" in problem.broken
        self.at_least, self.at_most = mask.at_least, None if self.local else mask.at_most
        self.blocks = None if mask.blocks is None else mask.blocks.cpu().numpy()
        self.edges = self.read_edges()

    def by_rows(self) -> Iterator[tuple[range, Iterator[Tile]]]:
        """Queries outside: each tile of rows, with the tiles of scores to compute for it."""
        for rows in self.row_tiles:
            yield rows, (Tile(rows, columns, seen) for columns, seen in self.columns_for(rows))

    def by_columns(self) -> Iterator[tuple[range, Iterator[Tile]]]:
        """Keys outside: each tile of columns, with the tiles of scores to compute for it."""
        for columns in self.column_tiles:
            yield columns, (Tile(rows, columns, seen) for rows, seen in self.rows_for(columns))

    def columns_for(self, rows: range) -> Iterator[tuple[range, int]]:
        """The tiles of keys that a tile of rows visits, each with PART or WHOLE."""
        first, last = self.span(rows)
        start, stop = 0, self.mask.T_k
        if self.at_most is not None:
            stop = min(stop, last + self.at_most + 1)
        if self.at_least is not None:
            start = max(start, first + self.at_least)
        for columns in overlapping(self.column_tiles, start, stop):
            if seen := self.look(rows, columns):
                yield columns, seen

    def rows_for(self, columns: range) -> Iterator[tuple[range, int]]:
        """The tiles of rows that visit a tile of keys, each with PART or WHOLE."""
        start, stop = 0, self.mask.T
        if self.mask.positions is None:  # in packed sequences positions rise only within each
            offset = self.mask.T_k - self.mask.T
            if self.at_most is not None:
                start = max(start, columns[0] - self.at_most - offset)
            if self.at_least is not None:
                stop = min(stop, columns[-1] - self.at_least + 1 - offset)
        for rows in overlapping(self.row_tiles, start, stop):
            if seen := self.look(rows, columns):
                yield rows, seen

    def look(self, rows: range, columns: range) -> int:
        """EMPTY, PART or WHOLE, by integer arithmetic on the tile's edges, without looking at its elements.

        Never EMPTY if an element is visible, and never WHOLE if one is hidden. A tile without visible elements is
        EMPTY, with three exceptions: documents that are not numbered in order, a tile that crosses an edge between
        blocks, and a window that meets two packed sequences. Computing such a tile takes time and changes no bit.
        """
        first, last = self.span(rows)
        left, right = columns[0], columns[-1]
        whole = not self.local
        if self.at_most is not None:
            if left > last + self.at_most:
                return EMPTY
            whole &= right <= first + self.at_most
        if self.at_least is not None:
            if right < first + self.at_least:
                return EMPTY
            whole &= left >= last + self.at_least
        if self.mask.documents_q is not None:
            pairs = list(zip(self.edges["rows", rows.start], self.edges["keys", columns.start], strict=True))
            if not any(low <= top and bottom <= high for (low, high), (bottom, top) in pairs):
                return EMPTY
            whole &= all(low == high == bottom == top for (low, high), (bottom, top) in pairs)
        if self.blocks is not None:
            n = self.mask.block_size
            under = self.blocks[max(first, 0) // n : max(last, 0) // n + 1, left // n : right // n + 1]
            if not under.any():
                return EMPTY
            whole &= bool(under.all())
        return WHOLE if whole else PART

    def span(self, rows: range) -> tuple[int, int]:
        """The lowest and the highest position in a tile of rows."""
        if self.mask.positions is not None:
            return self.edges["positions", rows.start][0]
        return rows[0] + self.mask.T_k - self.mask.T, rows[-1] + self.mask.T_k - self.mask.T

    def read_edges(self) -> dict[tuple[str, int], list]:
        """The lowest and the highest document (or position) of each tile: one pair per sequence of the batch, by name
        and start of the tile. All are copied from the device at once, so that look() never waits for it."""
        mask, B = self.mask, 1
        wanted: list[tuple[str, Tensor, list[range]]] = []
        if mask.documents_q is not None and mask.documents_k is not None:
            B = len(mask.documents_k)
            wanted += [("rows", mask.documents_q, self.row_tiles), ("keys", mask.documents_k, self.column_tiles)]
        if mask.positions is not None:
            wanted += [("positions", mask.positions[None], self.row_tiles)]
        names, ends = [], []
        for name, x, some_tiles in wanted:
            for tile in some_tiles:
                part = x[:, tile.start : tile.stop]
                names.append((name, tile.start))
                ends.append(torch.stack((part.amin(-1), part.amax(-1)), -1).expand(B, 2))
        return dict(zip(names, torch.stack(ends).tolist() if ends else [], strict=True))


def tiles(length: int, block: int) -> list[range]:
    """range(length) cut into ranges of `block`; the last one may be shorter."""
    return [range(i, min(i + block, length)) for i in range(0, length, block)]


def overlapping(some_tiles: list[range], start: int, stop: int) -> list[range]:
    """The tiles that contain an index from start to stop - 1. All are equally long, but the last may be shorter."""
    block = len(some_tiles[0]) if some_tiles else 1
    return some_tiles[start // block : max(0, -(-stop // block))]


def packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, T: int, T_k: int) -> Given:
    """A Mask's documents_q, documents_k and positions for sequences laid end to end.

    cu_seqlens_q, cu_seqlens_k: as in flash-attention's varlen functions, integers (sequences + 1,): where each sequence
    begins, and at the end the total length. A sequence may have different numbers of queries and keys; its last query
    is then aligned with its last key. It may also be empty. Raises ValueError for numbers that do not add up.
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
    # right=True: an empty sequence begins where the next one does, and the token belongs to the next
    of_rows, of_keys = (torch.searchsorted(cu, x, right=True) - 1 for cu, x in ((cu_q, row), (cu_k, key)))
    positions = row - cu_q[of_rows + 1] + cu_k[of_rows + 1]
    return Given(of_rows[None], of_keys[None], positions)
