"""Words that attention moves between slow memory and the chip, in both loop orders. `python bench.py mode=traffic`

N tokens, D head size, M words on chip.
"""

import csv
import json
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # as in lab/meter.py

from lab.meter import tensors_in
from model.attention import AttentionConfig, attention
from training.machine import about


class Tiles(TorchFunctionMode):
    """Counts the words of tiled's forward. Slow memory is what has length T, and a tile of it is cut out by
    x[:, :, start:stop] to be loaded or stored, once for each: so those cuts are counted."""

    def __init__(self):
        super().__init__()
        self.words = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is Tensor.__getitem__ and args[0].ndim == 4:
            self.words += result.numel()
        return result


class Operations(TorchDispatchMode):
    """Counts the words of naive, which has no tiles: each of its operations reads its inputs from slow memory and
    writes its result there. Views move nothing."""

    def __init__(self):
        super().__init__()
        self.words = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:  # a view too, under the hood
            self.words += sum(x.numel() for x in tensors_in(args, kwargs, result))
        return result


def words_of(config: AttentionConfig, N: int, D: int) -> int:
    """Words moved by one forward of one head over N tokens, none of them masked. config: naive or tiled."""
    q, k, v = torch.randn(3, 1, 1, N, D)
    with torch.no_grad(), Operations() if config.impl == "naive" else Tiles() as counted:
        attention(q, k, v, config, causal=False)
    return counted.words


def predicted(name: str, N: int, D: int, M: int) -> float:
    """What the papers' arithmetic gives for large N, in words (derived in docs/attention.md).

    naive: its operations read and write 20 tables of N x N. keys_outside: q and o in, o out, 3 N D, for each of the
    4 N D / M tiles of keys. queries_outside: k and v in, 2 N D, for each of the N / min(M / 4D, D) tiles of rows.
    """
    block = M // (4 * D)
    passes = {"keys_outside": N / block, "queries_outside": N / min(block, D)}
    return 20.0 * N * N if name == "naive" else passes[name] * N * D * {"keys_outside": 3, "queries_outside": 2}[name]


def traffic(lengths: list[int], D: int, on_chip: list[int], out: Path) -> None:
    """Counts and predicts, for N in lengths and M in on_chip: to traffic.csv and traffic.png in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)  # now: where it cannot be written, nothing has been measured in vain
    rows = []
    for N in sorted(lengths):
        for M in sorted(on_chip):
            block = M // (4 * D)
            configs = {"naive": AttentionConfig("naive")}
            for order in ("keys_outside", "queries_outside"):
                configs[order] = AttentionConfig("tiled", min(block, D), block, order)
            for name, config in configs.items():
                words, expected = words_of(config, N, D), predicted(name, N, D, M)
                row = {"commit": about(torch.device("cpu"))["commit"], "order": name, "N": N, "D": D, "M": M}
                rows.append(row | {"words": words, "predicted": expected})
                print(
                    f"N {N:>6}  D {D:>4}  M {M:>7}  {name:16} {words / 1e6:>10.2f} M words  predicted "
                    f"{expected / 1e6:>10.2f}  words / (N N D D / M) {words / (N * N * D * D / M):>8.2f}",
                    flush=True,
                )
    with open(out / "traffic.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    traffic_picture(rows, out / "traffic.png")
    print(json.dumps({"results": str(out / "traffic.csv"), "picture": str(out / "traffic.png"), "rows": rows}))


def traffic_picture(rows: list[dict], path: Path) -> None:
    """Words over length at the largest M, and over M at the greatest length; predictions dashed."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    longest, largest = max(row["N"] for row in rows), max(row["M"] for row in rows)
    panels = {("N", "context length N (tokens)"): ("M", largest), ("M", "words on chip M"): ("N", longest)}
    for axes, ((x, label), (fixed, value)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name in dict.fromkeys(row["order"] for row in rows):
            mine = [row for row in rows if row["order"] == name and row[fixed] == value]
            (line,) = axes.plot([r[x] for r in mine], [r["words"] for r in mine], marker="o", label=name)
            axes.plot([r[x] for r in mine], [r["predicted"] for r in mine], ls="--", color=line.get_color())
        axes.set(xlabel=label, ylabel="words moved in one forward")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set_title(f"{fixed} = {value:,}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"traffic between slow memory and chip, one head, D={rows[0]['D']}; dashed: predicted", fontsize=11)
    figure.savefig(path, dpi=130)
