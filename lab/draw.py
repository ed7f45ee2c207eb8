"""Draws the picture of a failure: two or three panels of lab/panels.py side by side.

    save(picture("no_max", panels), Path("no_max.png"))

The unbroken algorithm is black and dashed, the broken one in colour with markers. A cross is a value that is not
finite. Text is large enough for a page that shows the 1,400 pixels in 830.
"""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from PIL import Image

from lab.panels import Panel
from model.break_it import FAILURES

WIDTH, HEIGHT, DPI = 1400, 450, 100  # pixels
LEFT, RIGHT, BOTTOM, TOP = 88, 112, 64, 84  # pixels around each panel: for numbers, curve names, the x axis and titles
TITLE, TEXT, SMALL = 15, 14, 13  # points: 11 to 12 pixels on a page that shows the 1,400 pixels in 830
# Dark enough for text on white (a contrast of at least 4.5). The markers tell them apart without colour.
LOOKS = [("#b2182b", "o"), ("#1f5fa8", "s"), ("#7a4b00", "^")]
RIGHT_LOOK: dict[str, Any] = {"color": "black", "ls": "--", "lw": 1.8, "zorder": 3}
THEORY_LOOK: dict[str, Any] = {"color": "#555555", "ls": ":", "lw": 2.5, "zorder": 4}


def picture(failure: str, panels: list[Panel]) -> Figure:
    """The figure of a failure: its panels side by side, all of one size."""
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
    figure.suptitle(f"{failure}: without {FAILURES[failure].removed}", fontsize=TITLE + 2, y=0.985)
    slot = WIDTH / len(panels)
    for number, panel in enumerate(panels):
        place = (number * slot + LEFT, BOTTOM, slot - LEFT - RIGHT, HEIGHT - BOTTOM - TOP)
        axes = figure.add_axes([part / (WIDTH, HEIGHT)[i % 2] for i, part in enumerate(place)])
        axes.tick_params(labelsize=SMALL)
        draw_image(axes, panel) if panel.image is not None else draw_curves(axes, panel)
        axes.set_title(panel.title, fontsize=TITLE)
        axes.set_xlabel(panel.x, fontsize=TEXT)
        axes.set_ylabel(panel.y, fontsize=TEXT)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of 256 colours, which are enough and take half of the bytes."""
    figure.savefig(memory := BytesIO(), dpi=DPI)
    image = Image.open(memory).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_image(axes: Axes, panel: Panel) -> None:
    """Draws the image in shades of grey, and in shades of colour where it is marked."""
    assert panel.image is not None
    assert panel.marked is not None
    shade = panel.image.cpu().double().clamp(0, 1).numpy()[..., None]  # (rows, columns, 1)
    ink = np.where(panel.marked.cpu().numpy()[..., None], to_rgb(LOOKS[0][0]), (0.0, 0.0, 0.0))
    axes.imshow(1 - shade * (1 - ink), aspect="auto", interpolation="nearest")
    axes.text(0.98, 0.96, panel.legend, fontsize=SMALL, ha="right", va="top", transform=axes.transAxes)


def draw_curves(axes: Axes, panel: Panel) -> None:
    """Draws every curve, with its name at its end. A value that is not finite is a cross near the upper edge."""
    ends: list[tuple[str, str, Any]] = []
    looks = iter(LOOKS)
    for curve in panel.curves:
        known = {"unbroken": RIGHT_LOOK, "theory": THEORY_LOOK}.get(curve.name.split()[0])
        colour, marker = (known["color"], "") if known else next(looks)
        points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
        lost = [x for x, y in zip(curve.x, curve.y, strict=True) if not math.isfinite(y)]
        style = {"color": colour, "lw": 2.2, "marker": marker, "ms": 6, "markevery": max(1, len(points) // 12)}
        axes.plot(*zip(*points, strict=True) if points else ([], []), **known or style)
        level = 0.95 - 0.06 * len(ends)
        above = axes.get_xaxis_transform()  # x as in the data, y as a part of the height
        axes.plot(lost, [level] * len(lost), "x", color=colour, transform=above, ms=9, mew=2.5)
        ends.append((curve.name, colour, level if lost and lost[-1] == curve.x[-1] else points[-1]))
    set_scales(axes, panel)
    label_ends(axes, ends)


def set_scales(axes: Axes, panel: Panel) -> None:
    """Sets limits, ticks and logarithmic axes: y in powers of 2 if the values span less than a factor of 100."""
    if isinstance(panel.curves[0].x, range):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    shown = [y for curve in panel.curves for y in curve.y if math.isfinite(y) and y > 0]
    if panel.log_x:
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        near = max(shown) < 100 * min(shown)
        axes.set_yscale("log", base=2 if near else 10)
        if near:
            axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if any(not math.isfinite(y) for curve in panel.curves for y in curve.y):
        high += 0.25 * (high - low)  # room for crosses
    axes.set_ylim(low if panel.bottom is None else panel.bottom, high)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    axes.grid(alpha=0.3)


def label_ends(axes: Axes, ends: list[tuple[str, str, Any]]) -> None:
    """Writes the names right of the axes, at the height where each curve ends. Names that would touch are moved apart.
    ends: for each curve its name, colour and last point, or the height of its cross as a part of the frame."""
    to_frame = axes.transData + axes.transAxes.inverted()
    gap = 0.07  # as a part of the height of the axes
    placed: list[float] = []
    wanted = sorted((e if isinstance(e, float) else float(to_frame.transform(e)[1]), n, c) for n, c, e in ends)
    for height, _, _ in wanted:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    down = max(0.0, placed[-1] - 0.96)
    for height, (_, name, colour) in zip(placed, wanted, strict=True):
        axes.text(1.02, height - down, name, color=colour, fontsize=SMALL, va="center", transform=axes.transAxes)
