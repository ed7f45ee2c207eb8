"""Counts the words that attention moves between slow memory and the chip. `python bench.py mode=traffic`

It counts both loop orders and both passes, with causal masks and windows. N tokens, D head size, M words on chip.
"""

import csv
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab.charts import LOOKS, label_ends, over_length
from lab.files import Results
from lab.meter import Operations
from model.attention import AttentionConfig, attention, problem_of
from model.tiled import Loops, gradients
from training.machine import about


class Tiles(TorchFunctionMode):
    """Counts the words of tiled. Tensors of length T are in slow memory. tiled slices x[:, :, start:stop] once for each
    load or store of a tile, so this counts the slices. An addition to a tile is a load and a store."""

    def __init__(self):
        super().__init__()
        self.words = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (Tensor.__getitem__, Tensor.add_) and args[0].ndim == 4:
            self.words += result.numel()
        return result


def words_of(config: AttentionConfig, N: int, D: int, causal: bool = False, backward: bool = False) -> int:
    """Words moved by one forward, or one backward, of one head over N tokens. config: naive or tiled.

    The count for tiled's backward leaves out step 7 and the zeros at the start of dk, dv or dq: 5 N D + N words, once.
    """
    q, k, v, do = torch.randn(4, 1, 1, N, D)
    if config.impl == "naive" and backward:
        o = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), config, causal=causal)
        with Operations() as counted:
            torch.autograd.grad(o, (q, k, v), do)
        return counted.words
    with torch.no_grad():
        with Operations() if config.impl == "naive" else Tiles() as counted:
            o, lse = attention(q, k, v, config, causal=causal, return_lse=True)
        if backward:  # called directly, because the mode does not see calls from autograd
            problem = problem_of(q, k, config, causal=causal)
            saved: Any = (q, k, v, o, lse, *problem.tensors)
            with Tiles() as counted:
                gradients(saved, do, None, problem, Loops(config.block_m, config.block_n, config.order))
    return counted.words


def predicted(
    name: str, N: int, D: int, M: int, causal: bool = False, window: int | None = None, backward: bool = False
) -> float:
    """The words that the papers predict for large N. docs/attention.md derives those of the forward.

    naive: the forward reads and writes 20 tables of N x N, the backward 31. A mask saves none. Making the mask takes
    one more table in the forward if it is causal, and 8 with a window.
    keys_outside: has 4 N D / M tiles of keys. For each of them and each row, the forward loads q and o and stores o,
    3 D words; the backward loads q, do and dq and stores dq, 4 D words.
    queries_outside: has N / min(M / 4D, D) tiles of rows. For each of them and each key, the forward loads k and v, 2 D
    words; the backward loads k, v, dk and dv and stores dk and dv, 6 D words.
    A causal mask halves the number of rows or keys. A window leaves the tiles that overlap it.
    """
    if name == "naive":
        return (31.0 if backward else 20.0 + causal + 8 * (window is not None)) * N * N
    block_n = M // (4 * D)
    block_m = min(block_n, D)
    left = N / 2 if causal else float(N)
    if window is not None:
        starts = range(0, block_n, block_m)  # the first rows of the tiles; the pattern repeats every block_n keys
        ends = [(row - window + 1, row + block_m - 1 + (0 if causal else window - 1)) for row in starts]
        left = min(left, block_n * fmean(last // block_n - first // block_n + 1 for first, last in ends))
    outside, words = {
        "keys_outside": (N / block_n, 4 if backward else 3),
        "queries_outside": (N / block_m, 6 if backward else 2),
    }[name]
    return outside * left * D * words


def traffic(cfg: Any) -> None:
    """Counts and predicts for each length N and each M of on_chip, and writes traffic.csv and traffic.png to the folder
    out: of the forward, with backward=true also of the backward, for each value in causal, all with one window."""
    out, D, window = Path(cfg.out), cfg.head_sizes[0], cfg.window
    out.mkdir(parents=True, exist_ok=True)  # fails now, before anything is measured, if it cannot be written
    commit = about(torch.device("cpu"))["commit"]
    rows = []
    for which, masked in product(("forward", "backward") if cfg.backward else ("forward",), cfg.causal or [False]):
        what = f"{which}, {'causal' if masked else 'not causal'}" + (f", window {window}" if window else "")
        print(f"\n{what}, one head of size {D}\n{'N':>8}{'M':>9}  {'':16}{'M words':>10}{'predicted':>11}", flush=True)
        for N, M in product(sorted(cfg.lengths), sorted(cfg.on_chip)):
            block = M // (4 * D)
            configs = {"naive": AttentionConfig("naive", window=window)}
            for order in ("keys_outside", "queries_outside"):
                configs[order] = AttentionConfig("tiled", min(block, D), block, order, window=window)
            for name, config in configs.items():
                words = words_of(config, N, D, masked, which == "backward")
                expected = predicted(name, N, D, M, masked, window, which == "backward")
                row = {"commit": commit, "pass": which, "causal": masked, "window": window, "order": name}
                rows.append(row | {"N": N, "D": D, "M": M, "words": words, "predicted": expected})
                print(f"{N:>8}{M:>9}  {name:16}{words / 1e6:>10.2f}{expected / 1e6:>11.2f}", flush=True)
    (out / "traffic.csv").unlink(missing_ok=True)
    results = Results(out, "traffic.csv", list(rows[0]))
    results.append(rows)
    traffic_picture(rows, out / "traffic.png")
    results.end(picture=str(out / "traffic.png"))


def redraw(out: Path) -> Path:
    """Draws traffic.png again, from traffic.csv in the folder `out`. Returns its path."""
    with open(out / "traffic.csv", newline="", encoding="utf-8") as file:
        rows = [row | {key: int(row[key]) for key in ("N", "D", "M", "words")} for row in csv.DictReader(file)]
    traffic_picture([row | {"predicted": float(row["predicted"])} for row in rows], out / "traffic.png")
    return out / "traffic.png"


def traffic_picture(rows: list[dict], path: Path) -> None:
    """Draws words over length at the largest M, and over M at the greatest length; predictions dashed. Shows only the
    first pass and mask in rows."""
    first = {key: rows[0][key] for key in ("pass", "causal", "window")}
    rows = [row for row in rows if first.items() <= row.items()]
    D = rows[0]["D"]
    mask = "causal" if str(first["causal"]) == "True" else "not causal"
    mask += f", window {first['window']}" if first["window"] else ""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    longest, largest = max(row["N"] for row in rows), max(row["M"] for row in rows)
    left, right = figure.subplots(1, 2, sharey=True)
    panels = [(left, "N", "context length N (tokens)", "M", largest), (right, "M", "M, words on chip", "N", longest)]
    looks = {"naive": LOOKS["naive"], "keys_outside": LOOKS["tiled"], "queries_outside": LOOKS["triton"]}
    for axes, x, label, fixed, value in panels:
        for name, (colour, marker, _) in looks.items():
            mine = [row for row in rows if row["order"] == name and row[fixed] == value]
            axes.plot([r[x] for r in mine], [r["words"] for r in mine], color=colour, marker=marker, label=name)
            axes.plot([r[x] for r in mine], [r["predicted"] for r in mine], ls="--", color=colour, lw=1)
        axes.set_yscale("log", base=10)
        over_length(axes, sorted({row[x] for row in rows}))
        axes.set_xlabel(label)
        axes.yaxis.set_major_formatter(lambda words, _: f"{words / 1e6:g} M")
        axes.tick_params(labelleft=True)
        axes.set_title(f"{fixed} = {value:,}" + (" words" if fixed == "M" else " tokens"), fontsize=10)
        label_ends(axes)
    left.set_ylabel(f"words moved in one {first['pass']}")
    flat = [row for row in rows if row["order"] == "queries_outside" and row["N"] == longest and row["M"] > 4 * D * D]
    if flat:  # because of the first paper's block_m = min(block_n, D)
        words = f"no fewer: a tile of queries has\nblock_m = min(M / 4D, D) rows,\nat most {D}, however much fits"
        place = {"ha": "center", "size": 9, "textcoords": "offset points", "arrowprops": {"arrowstyle": "->"}}
        right.annotate(words, (flat[-1]["M"], flat[-1]["words"]), (0, -75), **place)
    figure.suptitle(
        f"words moved between slow memory and chip, {mask}, one head of size {D}; dashed: predicted", size=11
    )
    figure.savefig(path, dpi=100)
