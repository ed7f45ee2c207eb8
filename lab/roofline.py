"""On what naive attention spends its time, beside a fused kernel. `python bench.py mode=roofline`

A device has two limits: FLOPs per second, and bytes per second between its memory and the chip. An operation that does
fewer FLOPs per byte than the ratio of the two waits for the memory. Both limits are measured here, by a matrix product
and by a copy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from data.text import counted
from lab.charts import LOOKS
from lab.entrants import Case
from lab.files import Results
from lab.meter import Operations, median_ms, memory_for
from lab.settings import Bench
from model.abilities import why_not
from model.attention import AttentionConfig, attention
from training.machine import DTYPES, pick_device

# A row is one operation of naive in the order of its calls, or a whole: a copy, a product, naive, tiled, triton, sdpa.
COLUMNS = ["commit", "device", "torch", "triton", "dtype", "causal", "B", "H", "T", "D", "name", "part", "gflop"]
COLUMNS += ["mb", "ms", "gb_per_s", "tflop_per_s"]
PRODUCTS = ("bmm", "mm")
WHOLES = ("naive", "triton", "tiled", "sdpa")
PART = {"bmm": "products", "exp2": "exp", "masked_fill": "mask", "amax": "maximum", "sum": "sum", "div": "divide"}
PART |= {"mul": "scale", "sub": "subtract", "_to_copy": "casts"}
SIDE = {"cuda": 8192}  # rows and columns of the product that measures the limit; elsewhere 1,024


def row_of(name: str, part: str, flops: float, moved: int, ms: float) -> dict[str, Any]:
    """flops are those of products, 2 per multiplication with its addition. moved: bytes."""
    speeds = {"gb_per_s": moved / ms / 1e6, "tflop_per_s": flops / ms / 1e9}
    return {"name": name, "part": part, "gflop": flops / 1e9, "mb": moved / 1e6, "ms": ms} | speeds


def rooflines(cfg: Bench) -> None:
    """roofline() of each length. ValueError where memory runs out."""
    for case in cfg.series()[0]:
        few = "use shorter lengths=, fewer heads= or fewer tokens="
        with memory_for(f"{counted(case.B, 'sequence')} of {case.T} tokens", few):
            roofline(case, dtype=cfg.dtype, device=pick_device(cfg.device), out=Path(cfg.out))


def roofline(case: Case, *, dtype: str, device: torch.device, out: Path) -> None:
    """Prints a table, writes roofline.csv and roofline.png into the folder `out`. One forward of naive, its operations
    one by one, then the others in one piece. Raises ValueError for a roofline.csv with other columns."""
    results = Results(out, "roofline.csv", COLUMNS)
    results.begin(device, dtype)
    results.facts |= {"causal": case.causal, "B": case.B, "H": case.H, "T": case.T, "D": case.D}
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, case.B, case.H, case.T, case.D, dtype=DTYPES[dtype], device=device, generator=generator)
    with torch.no_grad():
        rows = [limit(name, DTYPES[dtype], device) for name in ("copy", "product")]
        operations: list[dict[str, Any]] = []

        def timed(function, args, moved: int, again: Callable[[], object]) -> None:
            name = function.overloadpacket.__name__
            flops = 2 * args[0].numel() * args[1].shape[-1] if name in PRODUCTS else 0
            operations.append(row_of(name, PART.get(name, "rest"), flops, moved, median_ms(again, device)))

        with Operations(timed):
            attention(q, k, v, AttentionConfig("naive"), causal=case.causal)
        rows += operations
        moved = {"naive": sum(round(1e6 * row["mb"]) for row in operations)}
        ours = "tiled" if why_not("triton", {}, device) else "triton"
        for impl in WHOLES:
            if impl in ("naive", ours, "sdpa"):
                ms = median_ms(lambda: attention(q, k, v, AttentionConfig(impl), causal=case.causal), device)  # noqa: B023
                once = 4 * q.nbytes  # q, k and v in, o out: what has to move at least
                rows.append(row_of(impl, "whole", case.flops("forward"), moved.get(impl, once), ms))
    print(f"{'':16}{'part':10}" + "".join(f"{name:>10}" for name in ("GFLOP", "MB", "ms", "GB/s", "TFLOP/s")))
    for row in rows:
        if row["mb"] > max(row["mb"] for row in operations) / 100:  # the others are about rows, not tables
            numbers = "".join(f"{row[key]:10.3g}" for key in ("gflop", "mb", "ms", "gb_per_s", "tflop_per_s"))
            print(f"{row['name']:16}{row['part']:10}{numbers}", flush=True)
    results.append([{key: float(f"{x:.6g}") if isinstance(x, float) else x for key, x in row.items()} for row in rows])
    draw(results.rows, out / "roofline.png")
    results.end()


def limit(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The row of a copy, which moves bytes as fast as the device can, or of a matrix product, for its FLOPs."""
    side = SIDE.get(device.type, 1024)
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    if name == "product":
        return row_of(name, "limit", 2 * side**3, 3 * a.nbytes, median_ms(lambda: a @ b, device))
    source = torch.randn(64 << 20 if device.type == "cuda" else 4 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return row_of(name, "limit", 0, 2 * source.nbytes, median_ms(lambda: target.copy_(source), device))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: where the time goes, a bar for naive by operation and one for each of the others. Right: the roofline."""
    facts = rows[0]
    named = {row["name"]: row for row in rows if row["part"] in ("limit", "whole")}
    operations = [row for row in rows if row["part"] not in ("limit", "whole")]
    figure = Figure(figsize=(11, 5), layout="constrained")
    bars, roof = figure.subplots(1, 2, width_ratios=(3, 2))
    wholes = [impl for impl in WHOLES if impl in named]
    spent: dict[str, float] = {}
    for row in operations:
        spent[row["part"]] = spent.get(row["part"], 0.0) + row["ms"]
    start = 0.0
    for i, (part, ms) in enumerate(sorted(spent.items(), key=lambda item: -item[1])):
        bars.barh(0, ms, left=start, color=f"C{i}", edgecolor="white", label=f"{part}: {ms:.3g} ms")
        start += ms
    for place, impl in enumerate((impl for impl in wholes if impl != "naive"), start=1):
        bars.barh(place, named[impl]["ms"], color=LOOKS.get(impl, ("#5b3a9e",))[0])
        bars.text(named[impl]["ms"], place, f" {named[impl]['ms']:.3g} ms", va="center", fontsize=11)
    names = ["naive, by\noperation", *(impl for impl in wholes if impl != "naive")]
    bars.set_yticks(range(len(names)), names, fontsize=11)
    bars.invert_yaxis()
    bars.set_xlabel("ms of one forward", fontsize=11)
    bars.margins(x=0.12)
    bars.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)

    bandwidth, peak = named["copy"]["gb_per_s"] / 1e3, named["product"]["tflop_per_s"]  # TB/s, TFLOP/s
    points = [(impl, named[impl]["gflop"] / named[impl]["mb"] * 1e3, named[impl]["tflop_per_s"]) for impl in wholes]
    gflop, mb, ms = (sum(row[key] for row in operations if row["gflop"]) for key in ("gflop", "mb", "ms"))
    points.append(("naive's products", 1e3 * gflop / mb, gflop / ms))
    ridge = peak / bandwidth  # FLOPs per byte from which on the FLOPs are the limit
    line = [min(ridge, *(x for _, x, _ in points)) / 2, ridge, max(ridge, *(x for _, x, _ in points)) * 4]
    roof.plot(line, [min(x * bandwidth, peak) for x in line], color="black", lw=1.5)
    for name, x, y in points:
        roof.plot(x, y, "o", color=LOOKS.get(name, ("#5b3a9e",))[0])
        roof.annotate(name, (x, y), (4, 4 if name == "triton" else -12), textcoords="offset points", fontsize=10)
    roof.margins(0.1)
    roof.set_xscale("log")
    roof.set_yscale("log")
    roof.set_xlabel("FLOPs per byte moved", fontsize=11)
    roof.set_ylabel("TFLOP/s", fontsize=11)
    roof.set_title(f"limits: {bandwidth:.3g} TB/s, {peak:.3g} TFLOP/s", fontsize=11)
    mask = "causal" if facts["causal"] else "no mask"
    shape = f"B={facts['B']}, H={facts['H']}, T={facts['T']:,}, D={facts['D']}, {facts['dtype']}, {mask}"
    figure.suptitle(f"one forward of attention: {shape}, {facts['device']}", fontsize=12)
    figure.savefig(path, dpi=100)
