"""Short trainings of each failure, its picture, and its section in docs/break-it.md.

A section is: what is taken out (from model/break_it.py), prose, the commands, the measurements. A page that is written
again keeps its prose, and the sections of failures that were not measured.
"""

import math
import os
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch import Tensor

from lab.failures import FAILURES, HEAD, Line, tried
from lab.prediction import TILE
from model import break_it
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig

RECIPE = "model=nano-llama tokenizer=byte optimizer=adamw steps=700"  # of the trainings that the prose tells of
PAGE = Path(__file__).parents[1] / "docs" / "break-it.md"
STEPS, T, BATCH = 100, 128, 4
SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=64, context_length=T, vocab_size=256, position="rope")
Losses = dict[str, list[float]]  # of each step of a whole and of a broken training, in nats per byte


def losses_of(failure: str, wakes: str) -> list[float]:
    """The losses of a short training on Python's standard library, in nats per byte, up to one that is not finite."""
    defaults = {"model": vars(SMALL), "attention": {"impl": "tiled", "block_m": 64, "block_n": 32}, "break_it": {}}
    given = OmegaConf.merge(defaults, OmegaConf.from_dotlist(wakes.split()))
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(1)
    model = GPT(GPTConfig(**given.model), AttentionConfig(**given.attention), BreakIt(failure, **given.break_it))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses: list[float] = []
    while len(losses) < STEPS and (not losses or math.isfinite(losses[-1])):
        windows = data[torch.randint(len(data) - T, (BATCH, 1)) + torch.arange(T + 1)]
        loss = model(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trainings(failure: str) -> Losses:
    """The losses of the whole algorithm and of the broken one, with the arguments that wake the failure."""
    wakes = break_it.FAILURES[failure].wakes
    return {"whole": losses_of("none", wakes), "broken": losses_of(failure, wakes)}


def in_words(losses: Losses) -> str:
    whole, broken = losses["whole"], losses["broken"]
    right = f"{fmean(whole[-10:]):.3f} nats with the whole algorithm"
    if not math.isfinite(broken[-1]):
        return f"at step {len(broken)} the loss is not finite; at step {len(whole)} it is {right}"
    return f"at step {len(whole)} the loss is {fmean(broken[-10:]):.3f} nats, and {right}"


def by_tile(found: Tensor, right: Tensor) -> list[float]:
    """|found - right| / |right| of each tile of rows. found, right (B, H, T, D)."""
    tiles = zip(found.split(TILE, 2), right.split(TILE, 2), strict=True)
    return [float((x - y).norm() / y.norm().clamp(min=1e-300)) for x, y in tiles]


def picture(failure: str, losses: Losses, path: Path) -> None:
    """The error of each result in each tile, found (bars) and predicted (crosses), on the first input of the failure;
    and the losses of the short trainings. A tile that is not finite has a red bar of full height."""
    name, inputs = next(iter(FAILURES[failure].acts.items()))
    predicted, found, right, _ = tried(failure, inputs, "tiled", "float32")
    figure = Figure(figsize=(13, 4), dpi=100, layout="constrained")
    figure.suptitle(f"{failure}: without {break_it.FAILURES[failure].removed}", fontsize=16)
    axes, training = figure.subplots(1, 2, width_ratios=[3, 2])
    axes.set_title(f"error by tile: {name}", fontsize=13)
    errors = {name: by_tile(found[name], right[name]) for name in ("o", "dq", "dk", "dv")}
    top = 1.1 * max([0.1, *(x for some in errors.values() for x in some if math.isfinite(x))])
    for n, (name, some) in enumerate(errors.items()):
        places, colour = [tile + 0.2 * (n - 1.5) for tile in range(len(some))], f"C{'0152'[n]}"
        colours = [colour if math.isfinite(x) else "red" for x in some]
        axes.bar(places, [x if math.isfinite(x) else top for x in some], 0.2, color=colours)
        for place in (place for place, x in zip(places, some, strict=True) if not math.isfinite(x)):
            axes.text(place, top / 2, f"{name}: NaN", rotation=90, ha="center", va="center", color="white")
        axes.bar(0, 0, color=colour, label=f"{name}, found")
        if name in predicted:
            axes.plot(places, by_tile(predicted[name], right[name]), "kx", label=None if n else "predicted")
    for name, look in (("broken", "r-"), ("whole", "k--")):
        mean = [fmean(losses[name][max(0, i - 9) : i + 1]) for i in range(len(losses[name]))]
        end = "" if math.isfinite(mean[-1]) else f": NaN at step {len(mean)}"
        training.plot(range(1, 1 + len(mean)), mean, look, label=name + end)
        if end:
            training.axvline(len(mean), color="red", ls=":")
    training.set_title(f"short training: {SMALL.n_layer} layers, {SMALL.n_embd} channels, bytes", fontsize=13)
    axes.set(ylim=(0, 1.15 * top), xlabel=f"tile of {TILE} rows (red: not finite)", ylabel="|x - right| / |right|")
    training.set(xlabel="step", ylabel="loss (nats), mean of 10 steps")
    for each in (axes, training):
        each.legend(fontsize=10, loc="upper center", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def write_page(out: Path, lines: list[Line], losses: dict[str, Losses], facts: dict) -> Path:
    """Writes the failures of `lines` into out/break-it.md, which begins as docs/break-it.md. losses: by failure."""
    path = out / PAGE.name
    text = (path if path.exists() else PAGE).read_text(encoding="utf-8")
    for name in dict.fromkeys(line.failure for line in lines):
        before, _, rest = text.partition(f"\n## {name}\n")
        old, mark, after = rest.partition("\n## ")
        prose = old.strip().partition("\n\n")[2].partition("```\npython train.py")[0]  # after the first paragraph
        new = section(name, prose, [line for line in lines if line.failure == name], losses[name], facts)
        text = f"{before}\n## {name}\n\n{new}{mark}{after}"
    rows = "".join(f"| [{name}](#{name}) | {x.removed} | {x.acts} |\n" for name, x in break_it.FAILURES.items())
    head, sections = text.split("| failure |")[0], text[text.index("\n## ") :]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}| failure | taken out | it acts |\n|---|---|---|\n{rows}{sections}", encoding="utf-8")
    return path


def section(name: str, prose: str, lines: list[Line], losses: Losses, facts: dict) -> str:
    failure, rows = break_it.FAILURES[name], "\n".join(map(str, lines))
    return f"""**Taken out:** {failure.removed}. It acts {failure.acts}.

{prose}```
python train.py {RECIPE} break_it={name} {failure.wakes}
python breakit.py failure={name}
```

{HEAD}
{rows}

Short trainings with `{failure.wakes}`: {in_words(losses)}.

Measured with torch {facts["torch"]} on {facts["device"]}, commit {facts["commit"]}.

![{name}: error of o and of the gradients by tile, predicted and found, and short trainings](break/{name}.png)
"""
