"""The pictures of a race: speed.png and memory.png.

A row is what lab/race.py measured for one implementation, case and pass: a dict with its COLUMNS as keys.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colour, marker and line of each implementation. Ours have solid lines, peers dashed ones. Ours do not need red told
# from green.
LOOKS = {
    "naive": ("#333333", "o", "-"),
    "tiled": ("#b34700", "s", "-"),
    "triton": ("#005ab5", "^", "-"),
    "sdpa_flash": ("#b3005e", "D", "--"),
    "sdpa_cudnn": ("#5b3a9e", "v", "--"),
    "sdpa_efficient": ("#7a5200", "P", "--"),
    "flex": ("#00705a", "X", "--"),
    "flash4": ("#8b1a1a", "*", "--"),
}


def speed_picture(rows: list[dict], path: Path) -> Path:
    """Draws FLOP/s over length, forward and backward side by side. Returns the path."""
    unit, factor = ("TFLOP/s", 1.0) if rows[0]["device"].startswith("NVIDIA") else ("GFLOP/s", 1e3)
    rows = [row | {"y": row["tflops"] and row["tflops"] * factor} for row in rows]
    return picture(rows, f"speed of attention ({unit})", [("forward", "linear"), ("backward", "linear")], path)


def memory_picture(rows: list[dict], path: Path) -> Path:
    """Draws the peak memory of a sequence over length, of the first series: on linear axes, where naive stands out, and
    on logarithmic ones. Returns the path."""
    measured = next(row for row in rows if row["peak_mib"])
    first = {key: measured[key] for key in ("dropout_p", "D", "H", "causal")}
    rows = [row | {"y": row["peak_mib"] and row["peak_mib"] / row["B"]} for row in rows if first.items() <= row.items()]
    columns = [("forward+backward", "linear"), ("forward+backward", "log")]
    return picture(rows, "peak memory of attention (MiB a sequence)", columns, path)


def picture(rows: list[dict], what: str, columns: list[tuple[str, str]], path: Path) -> Path:
    """A row of panels for each head size and dropout, and a column for each (pass, scale of the y axis): row["y"] over
    length. Shows the causal rows, if there are any."""
    rows = [row for row in rows if row["causal"] == any(row["causal"] for row in rows)]
    series = sorted({(row["dropout_p"], row["D"], row["H"]) for row in rows})
    figure, first = Figure(figsize=(11, 3.2 * len(series) + 1.5), layout="constrained"), rows[0]
    words = ["causal" if first["causal"] else "not causal"] + [f"window {first['window']}"] * bool(first["window"])
    words += [f"{first['H_kv']} heads of keys"] * bool(first["H_kv"])
    batch = sorted({row["B"] * row["T"] for row in rows})
    words += [f"{batch[0]:,}" + (f" to {batch[-1]:,}" if len(batch) > 1 else "") + " tokens a batch"]
    where = "{device}, {dtype}, torch {torch}, triton {triton}, commit {commit}".format(**first)
    figure.suptitle(f"{what}: {', '.join(words)}\n{where}", fontsize=11)
    grid = figure.subplots(len(series), len(columns), squeeze=False)
    for (p, D, H), line in zip(series, grid, strict=True):
        for (which, scale), axes in zip(columns, line, strict=True):
            wanted = {"dropout_p": p, "D": D, "H": H, "pass": which}
            plot(axes, [row for row in rows if wanted.items() <= row.items()])
            axes.set_title(f"{which}, head size {D}, {H} heads" + (f", dropout {p:g}" if p else ""), fontsize=10)
            axes.set_yscale(scale) if scale == "log" else axes.set_ylim(0)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=100)
    return path


def plot(axes: Axes, rows: list[dict]) -> None:
    """A line for each implementation. Its label says where it ran out of memory."""
    short = {T: f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in sorted({row["T"] for row in rows})}
    for impl, (color, marker, line) in LOOKS.items():
        mine = {row["T"]: row["y"] for row in rows if row["impl"] == impl}
        died = [T for T in mine if not mine[T]]
        label = impl + (f" (out of memory at {short[died[0]]})" if died else "")
        ended = {T: y for T, y in mine.items() if y}
        look = {"lw": 2.0, "ms": 7, "zorder": 3} if line == "-" else {"lw": 1.4, "ms": 6}
        if mine:
            axes.plot([*ended], [*ended.values()], color=color, marker=marker, ls=line, label=label, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*short], [*short.values()], minor=False)
    axes.set_xlabel("context length T (tokens)")
    axes.grid(alpha=0.3)
