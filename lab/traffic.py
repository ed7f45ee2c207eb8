"""Counts the words that attention moves between slow memory and the chip. `python bench.py mode=traffic`

N tokens, D head size, M words (numbers) that the chip holds. docs/attention.md derives the predictions.
"""

from itertools import product
from statistics import fmean

import torch

from lab.meter import Operations
from model import tiled
from model.attention import AttentionConfig, attention, problem_of


def traffic(lengths: list[int], D: int, on_chip: list[int], causal: bool, window: int | None) -> None:
    """Prints the words that one forward and one backward of one head move, counted and predicted, for each N and M."""
    mask = ("causal" if causal else "not causal") + (f", window {window}" if window else "")
    print(f"one head of size {D}, {mask}; in brackets what is predicted for large N\n")
    print(f"{'N':>8}{'M':>9}  {'':7}{'words of a forward':>30}{'of a backward':>30}", flush=True)
    for N, M, impl in product(sorted(lengths), sorted(on_chip), ("naive", "tiled")):
        line = f"{N:>8}{M:>9}  {impl:7}"
        for backward in (False, True):
            words = count(impl, N, D, M, causal, window, backward)
            expected = predicted(impl, N, D, M, causal, window, backward)
            line += f"{words:>15,}{f'({expected:,.0f})':>15}"
        print(line, flush=True)


def tile_of(D: int, M: int) -> tuple[int, int]:
    """block_m and block_n as in the first paper: q, k, v and o may each take a quarter of the chip."""
    block_n = M // (4 * D)
    return min(block_n, D), block_n


def count(impl: str, N: int, D: int, M: int, causal: bool, window: int | None, backward: bool) -> int:
    """Words moved by one forward, or one backward, of one head.

    naive has no tiles: each operation reads its inputs and writes its result. tiled moves each row's q, o and lse once
    (in a backward its q, do, dq, lse and delta), and for each tile of scores that it visits the tile's k and v (in a
    backward also dk and dv, in and out).
    """
    q, k, v, do = (x.requires_grad_(backward) for x in torch.randn(4, 1, 1, N, D))
    config = AttentionConfig(impl, *tile_of(D, M), window=window)
    if impl == "naive":
        with Operations() as forward:
            o = attention(q, k, v, config, causal=causal)
        if not backward:
            return forward.words
        with Operations() as counted:
            torch.autograd.grad(o, (q, k, v), do)
        return counted.words
    keys: list[int] = []  # of each visit

    def watch(rows: range, columns: range, **_) -> None:
        keys.append(len(columns))

    problem = problem_of(q, k, v, config, causal)
    with torch.no_grad():
        o, _, lse2 = tiled.forward(q, k, v, problem, *tile_of(D, M), watch)
        if not backward:
            return N * (2 * D + 1) + 2 * D * sum(keys)
        keys.clear()
        tiled.backward(q, k, v, o, lse2, do, None, problem, *tile_of(D, M), watch)
    return N * (3 * D + 2) + 6 * D * sum(keys)


def predicted(impl: str, N: int, D: int, M: int, causal: bool, window: int | None, backward: bool) -> float:
    """The words for large N.

    naive: the forward reads or writes a table of N x N 18 times, the backward 27 times. A mask saves none: making it
    takes another 4 in the forward if it is causal, and 8 with a window.
    tiled: has N / block_m tiles of rows. For each of them and each key the forward loads k and v, 2 D words; the
    backward loads k, v, dk and dv and stores dk and dv, 6 D words. A causal mask halves the keys. A window leaves the
    tiles that overlap it.
    """
    if impl == "naive":
        return (27.0 if backward else 18.0 + 4 * causal + 8 * (window is not None)) * N * N
    block_m, block_n = tile_of(D, M)
    keys = N / 2 if causal else float(N)  # that a tile of rows visits
    if window is not None:
        starts = range(0, block_n, block_m)  # the first rows of the tiles; the pattern repeats every block_n keys
        ends = [(row - window + 1, row + block_m - 1 + (0 if causal else window - 1)) for row in starts]
        keys = min(keys, block_n * fmean(last // block_n - first // block_n + 1 for first, last in ends))
    return N / block_m * keys * D * (6 if backward else 2)
