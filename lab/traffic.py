"""Counts the words that attention moves between slow memory and the chip. `python bench.py mode=traffic`

N tokens, D head size, M words (numbers) that the chip holds. docs/attention.md derives the predictions.
"""

from itertools import product

import torch

from lab.meter import Operations
from model import tiled
from model.attention import AttentionConfig, attention, problem_of


def traffic(lengths: list[int], D: int, on_chip: list[int], causal: bool) -> None:
    """Prints the words that one forward and one backward of one head move, counted and predicted, for each N and M."""
    print(f"one head of size {D}, {'causal' if causal else 'not causal'}; in brackets what is predicted for large N\n")
    print(f"{'N':>8}{'M':>9}  {'':7}{'words of a forward':>30}{'of a backward':>30}", flush=True)
    for N, M, impl in product(lengths, on_chip, ("naive", "tiled")):
        cells = zip(count(impl, N, D, M, causal), predicted(impl, N, D, M, causal), strict=True)
        line = "".join(f"{words:>15,}{f'({expected:,.0f})':>15}" for words, expected in cells)
        print(f"{N:>8}{M:>9}  {impl:7}{line}", flush=True)


def tile_of(D: int, M: int) -> tuple[int, int]:
    """block_m and block_n as in the first paper: q, k, v and o may each take a quarter of the chip."""
    block_n = M // (4 * D)
    return min(block_n, D), block_n


def count(impl: str, N: int, D: int, M: int, causal: bool) -> tuple[int, int]:
    """Words moved by one forward, and by one backward, of one head. naive: each operation reads its inputs and writes
    its result. tiled: q, o and lse of each row once (in a backward q, do, dq, lse and delta), and k and v for each tile
    that it visits (in a backward also dk and dv, in and out)."""
    q, k, v, do = torch.randn(4, 1, 1, N, D, requires_grad=True)  # each (1, 1, N, D)
    config = AttentionConfig(impl, *tile_of(D, M))
    if impl == "naive":
        with Operations() as forward:
            o = attention(q, k, v, config, causal=causal)
        with Operations() as backward:
            torch.autograd.grad(o, (q, k, v), do)
        return forward.words, backward.words
    tiles = tiled.tiles_of(problem_of(q, k, v, config, causal), *tile_of(D, M), q.device)  # of the loops of both passes
    visited = sum(len(columns) for _, row_of_tiles in tiles for columns, _ in row_of_tiles)
    return N * (2 * D + 1) + 2 * D * visited, N * (3 * D + 2) + 6 * D * visited


def predicted(impl: str, N: int, D: int, M: int, causal: bool) -> tuple[float, float]:
    """The same for large N. naive: the forward reads or writes a table of N x N 18 times (22 with a causal mask), the
    backward 27 times. tiled: for each of its N / block_m tiles of rows and each key 2 D words, in the backward 6 D."""
    if impl == "naive":
        return (18.0 + 4 * causal) * N * N, 27.0 * N * N
    visited = N / tile_of(D, M)[0] * N * (0.5 if causal else 1)
    return 2 * D * visited, 6 * D * visited
