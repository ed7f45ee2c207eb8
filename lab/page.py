"""Short trainings of each failure, its picture, and its section in docs/break-it.md.

    write_page(Path("docs"), ["no_max"], lines, losses, facts)

The page has prose that people write, and measurements that this file writes. A section is: what is taken out (from
model/break_it.py), prose, the commands, the measurements. Only the prose is kept when the page is written again, and so
are the sections of failures that were not measured.
"""

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch import Tensor

from lab.failures import FAILURES, Line, error, percent, tried
from lab.whole import TILE, Results, Whole
from model import break_it
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig

PAGE = Path(__file__).parents[1] / "docs" / "break-it.md"
STEPS, T, BATCH = 100, 128, 4
SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=64, context_length=T, vocab_size=256, position="rope")


# ----------------------------------------------------------------------------------------------------------------------
# Short trainings.


def losses_of(failure: str, wakes: str, steps: int = STEPS) -> list[float]:
    """The loss of each step of a short training on Python's standard library, in nats per byte. A loss that is not
    finite ends it. failure: a name, or none. wakes: arguments of train.py."""
    given = OmegaConf.merge({"attention": {}, "break_it": {}, "model": {}}, OmegaConf.from_dotlist(wakes.split()))
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(1)
    fixed: dict[str, Any] = {"impl": "tiled", "block_m": 64, "block_n": 32}
    attention = AttentionConfig(**fixed | dict(given.attention))
    model = GPT(GPTConfig(**vars(SMALL) | dict(given.model)), attention, BreakIt(failure, **given.break_it))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses: list[float] = []
    while len(losses) < steps and (not losses or math.isfinite(losses[-1])):
        at = torch.randint(len(data) - T, (BATCH, 1)) + torch.arange(T + 1)
        windows = data[at]
        loss = model(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trainings(failure: str) -> dict[str, list[float]]:
    """The losses of the whole algorithm and of the broken one, with the arguments that wake the failure."""
    wakes = break_it.FAILURES[failure].wakes
    return {"whole": losses_of("none", wakes), "broken": losses_of(failure, wakes)}


def in_words(losses: dict[str, list[float]]) -> str:
    whole, broken = losses["whole"], losses["broken"]
    right = f"{fmean(whole[-10:]):.3f} nats with the whole algorithm"
    if not math.isfinite(broken[-1]):
        return f"at step {len(broken)} the loss is not finite; at step {len(whole)} it is {right}"
    return f"at step {len(whole)} the loss is {fmean(broken[-10:]):.3f} nats, and {right}"


# ----------------------------------------------------------------------------------------------------------------------
# The picture.


def by_tile(found: Tensor, right: Tensor) -> list[float]:
    """|found - right| / |right| of each tile of rows. found, right (B, H, T, D)."""
    tiles = zip(found.split(TILE, 2), right.split(TILE, 2), strict=True)
    return [float((x - y).norm() / y.norm().clamp(min=1e-300)) for x, y in tiles]


def picture(failure: str, losses: dict[str, list[float]] | None, path: Path) -> None:
    """The error of each result in each tile, found (bars) and predicted (crosses), on the first input of the failure;
    and the losses of the short trainings."""
    name, inputs = next(iter(FAILURES[failure].acts.items()))
    predicted, found, right, _ = tried(FAILURES[failure], failure, inputs, "tiled", "float32")
    figure = Figure(figsize=(13, 4), dpi=100, layout="constrained")
    figure.suptitle(f"{failure}: without {break_it.FAILURES[failure].removed}", fontsize=16)
    errors, *rest = figure.subplots(1, 2 if losses else 1, squeeze=False, width_ratios=[3, 2] if losses else [1])[0]
    draw_errors(errors, predicted, found, right)
    errors.set_title(f"error by tile: {name}", fontsize=13)
    if losses:
        draw_losses(rest[0], losses)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_errors(axes: Axes, predicted: Results, found: Results, right: Results) -> None:
    """A tile that is not finite has a red bar of full height."""
    colours = {"o": "#1f5fa8", "dq": "#c98a1b", "dk": "#7a4b00", "dv": "#3c7d3c"}
    errors = {name: by_tile(found[name], right[name]) for name in colours}
    top = 1.1 * max([0.1, *(x for some in errors.values() for x in some if math.isfinite(x))])
    for n, (name, colour) in enumerate(colours.items()):
        places = [tile + 0.2 * (n - 1.5) for tile in range(len(errors[name]))]
        heights = [x if math.isfinite(x) else top for x in errors[name]]
        axes.bar(places, heights, 0.2, color=["#b2182b" if y == top else colour for y in heights])
        axes.bar(0, 0, color=colour, label=f"{name}, found")
        if name in predicted:
            axes.plot(places, by_tile(predicted[name], right[name]), "kx", label=None if n else "predicted")
    axes.set_xlabel(f"tile of {TILE} rows (red: not finite)", fontsize=13)
    axes.set_ylabel("|x - right| / |right|", fontsize=13)
    axes.set_ylim(0, 1.15 * top)
    axes.legend(fontsize=10, loc="upper center", ncols=5, handlelength=1, columnspacing=1)


def draw_losses(axes: Axes, losses: dict[str, list[float]]) -> None:
    for name, look in (("broken", {"color": "#b2182b"}), ("whole", {"color": "black", "ls": "--"})):
        mean = [fmean(losses[name][max(0, i - 9) : i + 1]) for i in range(len(losses[name]))]
        end = "" if math.isfinite(mean[-1]) else f": NaN at step {len(mean)}"
        axes.plot(range(1, 1 + len(mean)), mean, label=name + end, **look)
    axes.set_title("short training", fontsize=13)
    axes.set_xlabel("step", fontsize=13)
    axes.set_ylabel("loss (nats), mean of 10 steps", fontsize=13)
    axes.legend(fontsize=11)


# ----------------------------------------------------------------------------------------------------------------------
# The page.


def how_it_shows(failure: str) -> str:
    """In words, from the predictions for tiled in float32."""
    entry, kinds = FAILURES[failure], []
    for inputs in entry.acts.values():
        prediction = entry.prediction(inputs, "tiled")
        whole = Whole(replace(inputs, seed=prediction.seed), "tiled")
        off = error(prediction.results(), whole.results(), "o")
        finite = "leak" if (prediction.seen() & ~whole.seen()).any() else "silent"
        kinds.append("NaN or infinity" if math.isnan(off) else "wrong gradients only" if off < 1e-6 else finite)
    return ", ".join(dict.fromkeys(kinds))


def write_page(out: Path, lines: list[Line], losses: dict[str, dict[str, list[float]]], facts: dict) -> Path:
    """Writes the failures of `lines` into out/break-it.md; keeps all others, and all prose. A page that does not exist
    yet starts as docs/break-it.md. losses: of trainings(), by failure. facts: of training/machine.py's about()."""
    path = out / PAGE.name
    head, *sections = re.split(r"^## ", (path if path.exists() else PAGE).read_text(encoding="utf-8"), flags=re.M)
    known = {name: text for name, _, text in (section.partition("\n\n") for section in sections)}
    for name in dict.fromkeys(line.failure for line in lines):
        measured = [line for line in lines if line.failure == name]
        known[name] = section(name, prose(known.get(name, "")), measured, losses.get(name), facts)
    table = "| failure | taken out | how it shows | it acts |\n|---|---|---|---|\n"
    for name, failure in break_it.FAILURES.items():
        table += f"| [{name}](#{name}) | {failure.removed} | {how_it_shows(name)} | {failure.acts} |\n"
    order = [*(name for name in break_it.FAILURES if name in known), *(set(known) - set(break_it.FAILURES))]
    texts = [head.split("| failure |")[0] + table, *(f"## {name}\n\n{known[name]}" for name in order)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text.rstrip("\n") + "\n" for text in texts), encoding="utf-8")
    return path


def prose(text: str) -> str:
    """What people wrote in a section: after its first paragraph, up to its commands."""
    return text.partition("\n\n")[2].partition("```\npython train.py")[0]


def section(name: str, prose: str, lines: list[Line], losses: dict[str, list[float]] | None, facts: dict) -> str:
    failure = break_it.FAILURES[name]
    cells = [[x.inputs, f"{x.impl}, {x.dtype}", *map(percent, x.o + x.gradients), f"{x.difference:.2f}"] for x in lines]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    said = f"\nShort trainings with `{failure.wakes}`: {in_words(losses)}.\n" if losses else ""
    return f"""**Taken out:** {failure.removed}. It acts {failure.acts}.

{prose}```
python train.py break_it={name} {failure.wakes}
python breakit.py failure={name}
```

| inputs | | o: predicted | o: found | dq, dk, dv: predicted | dq, dk, dv: found | difference |
|---|---|---|---|---|---|---|
{rows}
{said}
Measured with torch {facts["torch"]} on {facts["device"]}, commit {facts["commit"]}.

![{name}: error of o and of the gradients by tile, predicted and found, and short trainings](break/{name}.png)
"""
