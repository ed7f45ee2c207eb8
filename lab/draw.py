"""Pictures of failures. Each failure has one colour in all of them; the whole algorithm is black and dashed.

    pictures(views, curves)      every picture of the gallery, by name

errors_figure, states_figure and losses_figure have a panel a failure; failure_figure has all three of one failure.
"""

import math
from io import BytesIO
from pathlib import Path

from lab.measure import View
from lab.trainings import Curves
from lab.trials import TILES_A_SIDE
from model.break_it import FAILURES


def pictures(views: dict[str, View], curves: list[Curves]) -> dict:
    """The figures by name: errors, states, losses, and one of each failure in views. curves: of these failures."""
    found = {"errors": errors_figure(views), "states": states_figure(views), "losses": losses_figure(curves)}
    for name, shown in views.items():
        found[name] = failure_figure(shown, next(c for c in curves if name in c.broken))
    return found


def colour(failure: str):
    """A failure's own colour, however many there are: eleven that are easy to tell apart, then hues between them."""
    from matplotlib import colormaps

    first = (*colormaps["tab10"].colors, "darkgoldenrod")
    place = list(FAILURES).index(failure)
    # A step of the golden ratio round the circle of hues comes nowhere near the hues that it has met.
    return first[place] if place < len(first) else colormaps["hsv"](place * (math.sqrt(5) - 1) / 2 % 1)


def errors_figure(views: dict[str, View]):
    """The relative error of o over query tiles and heads, a panel a failure."""
    figure, panels = grid(
        len(views), "error of attention's output per query tile and head, whole algorithm in float64 = 0"
    )
    for axes, shown in zip(panels, views.values(), strict=False):
        image = draw_errors(axes, shown)
        axes.set_title(f"{shown.failure}: error of {shown.of}\n{shown.about}", color=colour(shown.failure), fontsize=9)
    with_scale(figure, image, panels)
    return figure


def states_figure(views: dict[str, View]):
    """The running maximum m and the running sum l of one row over the tiles of keys, whole beside broken; of those
    failures that change them, if any does."""
    from matplotlib.figure import Figure

    views = {name: shown for name, shown in views.items() if shown.states["whole"] != shown.states["broken"]} or views
    columns = min(4, len(views))
    lines = -(-len(views) // columns)
    figure = Figure(figsize=(max(5, 3.2 * columns), 4.0 * lines + 0.5), layout="constrained")
    figure.suptitle("m and l of the worst row, tile by tile", fontsize=11)
    axes = figure.subplots(2 * lines, columns, squeeze=False)
    for i in range(lines * columns):
        pair = axes[i // columns * 2 : i // columns * 2 + 2, i % columns]
        if i < len(views):
            shown = list(views.values())[i]
            draw_states(pair, shown)
            pair[0].set_title(f"{shown.failure}\n{shown.about}\n{shown.place}", color=colour(shown.failure), fontsize=8)
        else:
            [one.remove() for one in pair]
    return figure


def losses_figure(settings: list[Curves]):
    """The loss of short trainings, a panel for those that share their setting and their whole run."""
    figure, panels = grid(len(settings), "loss of short trainings from one seed; x: not finite from here on", 3, 3.2)
    for axes, curves in zip(panels, settings, strict=True):
        draw_losses(axes, curves)
        axes.set_title(curves.setting, fontsize=9)
    return figure


def failure_figure(shown: View, curves: Curves):
    """All three of one failure, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.3), layout="constrained")
    title = f"{shown.failure}: without {FAILURES[shown.failure].removed}"
    figure.suptitle(title, color=colour(shown.failure), fontsize=12)
    cells = figure.add_gridspec(2, 3, width_ratios=[1.2, 1, 1.1])
    axes = figure.add_subplot(cells[:, 0])
    with_scale(figure, draw_errors(axes, shown), [axes])
    axes.set_title(f"error of {shown.of}: {shown.about}", fontsize=9)
    pair = [figure.add_subplot(cells[i, 1]) for i in range(2)]
    draw_states(pair, shown)
    pair[0].set_title(shown.place, fontsize=8)
    axes = figure.add_subplot(cells[:, 2])
    draw_losses(axes, curves._replace(broken={shown.failure: curves.broken[shown.failure]}))
    axes.set_title(f"training, {curves.setting}", fontsize=9)
    return figure


def save(figure, path: Path) -> None:
    """As PNG of 256 colours, which are enough, and half of the bytes."""
    from PIL import Image

    figure.savefig(memory := BytesIO(), dpi=80)
    image = Image.open(memory).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def grid(panels: int, title: str, columns: int = 4, height: float = 2.6):
    """A figure with so many axes, the rest of its last row empty."""
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(max(6.5, 3.4 * columns), height * lines + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    found = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for axes in found[panels:]:
        axes.remove()
    return figure, found[:panels]


def draw_errors(axes, shown: View):
    """A heat map of relative errors on a logarithmic scale; what is not finite is blue. Returns the image."""
    from matplotlib import colormaps

    colours = colormaps["magma_r"].with_extremes(bad="deepskyblue")
    errors = shown.errors.cpu().double().clamp(min=1e-9).log10()
    errors[~errors.isfinite()] = math.nan
    image = axes.imshow(errors.numpy(), cmap=colours, vmin=-7, vmax=1, aspect="auto", interpolation="nearest")
    names = [f"{i // shown.heads}.{i % shown.heads}" for i in range(len(errors))]
    every = -(-len(names) // 12)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.set(xlabel="query tile", ylabel="layer.head")
    return image


def with_scale(figure, image, panels) -> None:
    """Adds the colour scale of draw_errors() beside the panels."""
    bar = figure.colorbar(image, ax=panels, ticks=range(-7, 2, 2), extend="both")
    bar.ax.set_yticklabels(["1e-7", "1e-5", "0.1 %", "10 %", "1000 %"], fontsize=8)
    bar.set_label("error of the worst row / largest |right|\nblue: not finite", fontsize=8)


def draw_states(pair, shown: View) -> None:
    """m on the first axes, l on the second; a cross where a number is not finite."""
    looks = {
        "broken": {"color": colour(shown.failure), "marker": "o", "ms": 5, "lw": 2.5, "alpha": 0.8},
        "whole": {"color": "black", "ls": "--", "lw": 1, "marker": ".", "ms": 4},
    }
    for which, (axes, symbol) in enumerate(zip(pair, "ml", strict=True), start=1):
        values = []
        for name, style in looks.items():
            # The lowest float32 stands for a row that has seen no key yet, and so does l = 0.
            points = [(s[0], s[which]) for s in shown.states[name] if math.isfinite(s[which]) and s[1] > -1e30]
            values += [value for _, value in points if value > 0]
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
            lost = [s[0] for s in shown.states[name] if not math.isfinite(s[which])]
            above = axes.get_xaxis_transform()  # x in tiles, y in parts of the frame
            axes.plot(lost, [0.9] * len(lost), "x", color=style["color"], transform=above, ms=8, mew=2)
        if symbol == "l" and values and max(values) > 100 * min(values):
            axes.set_yscale("log")
        axes.set_ylabel("m, running max" if symbol == "m" else "l, running sum", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlim(-0.5, TILES_A_SIDE - 0.5)
        axes.grid(alpha=0.3)
    pair[1].set_xlabel("tile of keys; x: not finite", fontsize=9)
    pair[0].legend(fontsize=7)


def draw_losses(axes, curves: Curves) -> None:
    """Means of five steps, because batches differ in difficulty; single steps are faint. x: not finite from here on."""
    looks = {name: {"color": colour(name), "lw": 1.8} for name in curves.broken}
    looks["whole"] = {"color": "black", "ls": "--", "lw": 1.2}
    for name, losses in (curves.broken | {"whole": curves.whole}).items():
        sound = [x for x in losses if math.isfinite(x)]
        means = [sum(sound[max(0, i - 4) : i + 1]) / len(sound[max(0, i - 4) : i + 1]) for i in range(len(sound))]
        axes.plot(range(1, len(sound) + 1), means, label=name, **looks[name])
        axes.plot(range(1, len(sound) + 1), sound, color=looks[name]["color"], lw=0.5, alpha=0.25)
        if len(sound) < len(losses):
            last = means[-1] if means else curves.whole[0]
            axes.plot(len(sound) + 1, last, "x", color=looks[name]["color"], ms=11, mew=3, zorder=5)
    axes.set(xlabel="step", ylabel="loss (nats), mean of 5 steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
