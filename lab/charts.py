"""The pictures of a race: speed.png and memory.png. `python bench.py mode=pictures`

A row is what lab/race.py measured for one implementation, case and pass: a dict with COLUMNS as its keys.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.text import counted
from training.machine import peak_of

# Colour, marker and line of each implementation, the same in every picture. Ours have solid lines, peers dashed ones.
# The colours are dark enough for text on white (a contrast of 4.5). Ours do not need red told from green.
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
    """Draws TFLOP/s over length. Forward and backward are side by side; each row of panels is a head size and dropout.
    Causal, if causal rows are there. The y axis ends at the peak of the device, if that is known."""
    causal = any(row["causal"] for row in rows)
    rows = [row for row in rows if row["causal"] == causal]
    lengths = sorted({row["T"] for row in rows})
    down = sorted({(row["dropout_p"], row["D"], row["H"]) for row in rows})
    unit, factor = ("TFLOP/s", 1.0) if rows[0]["device"].startswith("NVIDIA") else ("GFLOP/s", 1e3)
    peak = None if rows[0]["dtype"] == "float32" else peak_of(rows[0]["device"])
    batch = sorted({row["B"] * row["T"] for row in rows})
    tokens = f"{batch[0]:,}" + (f" to {batch[-1]:,}" if len(batch) > 1 else "")
    figure = new_figure(
        rows, 10, 3.1 * len(down) + 1, f"speed of attention: {mask_of(rows[0])}, {tokens} tokens a batch"
    )
    grid = figure.subplots(len(down), 2, squeeze=False, sharey="row")
    for (p, D, H), pair in zip(down, grid, strict=True):
        for which, axes in zip(("forward", "backward"), pair, strict=True):
            wanted = {"dropout_p": p, "D": D, "H": H, "pass": which}
            here = [row for row in rows if wanted.items() <= row.items()]
            over_length(axes, lengths)
            for impl in dict.fromkeys(row["impl"] for row in here):
                mine = [(row["T"], row["tflops"] * factor) for row in here if row["impl"] == impl and row["ms"]]
                if mine:
                    axes.plot(*zip(*sorted(mine), strict=True), **look(impl))
            if peak:
                axes.axhline(peak / 1e12, color="black", ls=":", lw=1)
                axes.text(lengths[0], peak / 1e12, f"peak, dense bf16: {peak / 1e12:.0f}", size=9, va="bottom")
            dropout = f", dropout {p:g}" if p else ""
            axes.set_title(f"{which}, head size {D}, {counted(H, 'head')}{dropout}", fontsize=10)
            axes.tick_params(labelleft=True)
        pair[0].set_ylim(0, 1.1 * peak / 1e12 if peak else None)
        pair[0].set_ylabel(unit)
        for axes in pair:  # only now: both panels share the height, which is final here
            label_ends(axes)
    figure.savefig(path, dpi=100)
    return path


def memory_picture(rows: list[dict], path: Path) -> Path:
    """Draws peak memory over length on linear axes, where the quadratic curve stands out, and on logarithmic ones."""
    series = {key: rows[0][key] for key in ("D", "H", "causal", "dropout_p")} | {"pass": "forward+backward"}
    rows = [row for row in rows if series.items() <= row.items()]
    title = f"memory of attention: {mask_of(rows[0])}, head size {rows[0]['D']}, {counted(rows[0]['H'], 'head')}, "
    title += f"{counted(rows[0]['B'], 'sequence')}, dropout {series['dropout_p']:g}"
    figure = new_figure(rows, 12, 5, title)
    lengths = sorted({row["T"] for row in rows})
    for axes, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
        if scale == "log":
            over_length(axes, lengths)
            axes.set_yscale("log", base=10)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_title("the same on logarithmic axes", fontsize=10)
        else:
            apart = [T for T in lengths if T >= lengths[-1] / 8]  # the ticks of shorter lengths would overlap
            axes.set_xticks(apart, [short_length(T) for T in apart])
            axes.set_xlim(0, 1.2 * lengths[-1])
            axes.set_xlabel("context length T (tokens)")
            axes.grid(alpha=0.3)
            axes.set_title("naive holds T x T weights, the others a tile of them", fontsize=10)
        for impl in dict.fromkeys(row["impl"] for row in rows):
            mine = {row["T"]: row["peak_mib"] for row in rows if row["impl"] == impl}
            points = sorted((T, mib / 1024) for T, mib in mine.items() if mib)
            if points:
                axes.plot(*zip(*points, strict=True), **look(impl, *(T for T in mine if not mine[T])))
        axes.margins(y=0.1)
        axes.autoscale_view()
        axes.set_ylabel("peak of forward + backward (GiB)")
        label_ends(axes)
    figure.savefig(path, dpi=110)
    return path


def new_figure(rows: list[dict], width: float, height: float, title: str) -> Figure:
    """An empty figure with a title and, below it, where the rows were measured. width, height: in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    row = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    where = f"{row['device']}, {row['dtype']}, torch {row['torch']}, triton {row['triton']}, commit {commits}"
    figure.suptitle(f"{title}\n{where}", fontsize=11)
    return figure


def mask_of(row: dict) -> str:
    """The row's mask in words, and the number of key heads if the heads are grouped."""
    words = ["causal" if row["causal"] else "not causal"]
    words += [f"{key} {row[key]}" for key in ("window", "documents", "block_mask") if row[key]]
    words += [counted(row["H_kv"] or 0, "head") + " of keys"] * bool(row["H_kv"])
    return ", ".join(words)


def look(impl: str, *died: int) -> dict:
    """Options of matplotlib's plot() for an implementation. label_ends() writes the label. died: the lengths at which
    it ran out of memory."""
    color, marker, line = LOOKS[impl]
    label = impl + (f"\n(out of memory at {short_length(min(died))})" if died else "")
    ours = {"lw": 2.0, "ms": 7, "zorder": 3} if line == "-" else {"lw": 1.4, "ms": 6}
    if impl == "naive":  # thin and on top, because it often covers the line of tiled
        ours = {"lw": 1.0, "ms": 4, "zorder": 4}
    return {"label": label, "color": color, "marker": marker, "ls": line, "mec": "white", "mew": 0.6} | ours


def over_length(axes: Axes, lengths: list[int]) -> None:
    """Makes x a logarithmic axis of context length, with a tick at each length and room for labels on the right."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_length(T) for T in lengths], minor=False)
    span = max(lengths[-1] / lengths[0], 2.0)
    axes.set_xlim(lengths[0] / span**0.06, lengths[-1] * span**0.35)
    axes.set_xlabel("context length T (tokens)")
    axes.grid(alpha=0.3)


def short_length(T: int) -> str:
    """1k for 1024."""
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


def label_ends(axes: Axes) -> None:
    """Writes each line's label at its last point, in its colour. If the line ends early and low, the label is above the
    point, otherwise beside it. Labels that would touch are moved apart."""
    height = axes.bbox.height * 72 / axes.figure.dpi  # points
    needed = 11 / height  # the height of a line of text, as a part of the axes
    to_axes = axes.transData + axes.transAxes.inverted()
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    longest = max((line.get_xdata()[-1] for line in lines), default=0)
    ends = [(float(to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1]))[1]), line) for line in lines]
    lowest = 0.0
    for y, line in sorted(ends, key=lambda end: end[0]):
        x, words = line.get_xdata()[-1], {"color": line.get_color(), "size": 9, "textcoords": "offset points"}
        words["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.5}
        words["xycoords"] = axes.get_xaxis_transform()  # x in tokens, y as a part of the height
        above = x < longest and y < 0.7
        if x == longest:
            y = max(y, lowest)
            lowest = y + needed
        place = {"ha": "center", "va": "bottom"} if above else {"va": "center"}
        axes.annotate(line.get_label(), (x, y), (0, 7) if above else (8, 0), **place, **words)
