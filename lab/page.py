"""The lab: compares each failure with the whole algorithm in a table, short trainings, pictures and a page.

    python breakit.py out=docs   docs/break-it.md, and docs/break with its figures (table.json) and pictures

The words of the page come from model/break_it.py, the figures from table.json. If only words have changed, the lab need
not run again: python -c "from lab.page import *; write_page(Path('docs'))"
"""

import json
import math
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from data.loader import validation_batches
from data.text import counted
from lab import draw, measure, panels, trainings, trials
from lab.files import plain, write
from lab.measure import RESULTS, SHOWN
from lab.runs import model_of_run
from lab.trials import GRADIENT, LEAK, NAN, NONE, OVERFLOW, SILENT
from model.break_it import FAILURES
from training.machine import about
from training.metrics import show
from training.probe import record

FIGURES = "break"  # the folder of table.json and the pictures, next to the page
KINDS = {
    SILENT: "silent",
    LEAK: "leak",
    GRADIENT: "gradient only",
    OVERFLOW: "loud (infinity)",
    NAN: "loud (NaN)",
    NONE: "silent, but tiny",
}
HEAD = """# Break it

Each failure on this page is attention with one line taken out. For each failure the page says what is seen, why, and
how large the errors are. [attention.md](attention.md) derives what the lines are for.

Most lines matter only under a condition. The rescaling, for example, matters only where a row's maximum grows from one
tile of keys to the next. Where the condition does not hold, taking the line out changes nothing: the failure *sleeps*.
Where the condition holds, the failure *acts*.

Few failures are loud. Most compute finite numbers that are wrong, and often the loss falls at first as if nothing had
happened.

| how it shows | meaning |
|---|---|
| silent | the results are finite, and wrong |
| silent, but tiny | the results are off by no more than rounding errors |
| loud | a result is infinity or NaN |
| leak | the results are finite, and tokens see the future |
| gradient only | o is right; dq, dk and dv are wrong |

In all formulas s is a score, and m the largest score of a row so far. l is the sum of the row's weights, acc is the sum
of the weights times v, and the output is o = acc / l. The log-sum-exp of a row is the logarithm of the sum of exp(s).

{table}

no_max shows in three ways, depending on the scores and on the dtype.

Each failure has two commands below:

- The first command trains the default model with arguments that *wake* the failure: they make its condition hold.
  **Seen** says what the first 100 steps of this training show. Some commands set `break_it.score_gain=N`. It multiplies
  the scores by N, so that the failure shows in a short run.
- The second command, `python breakit.py`, is the lab. It measures the failure on small models, and its figures are
  under **Measured**. The lab also wrote this page (commit {commit}, torch {torch}, {device}).

Under **Measured**:

- The table takes q, k, v and gradients from {model}. "Scores x 24.7" means that the lab
  multiplied the scores by 24.7. An error is |found - right| / |right|, where right is computed in float64.
- The line below the table compares two short trainings, with and without the failure: 2 layers, 64 channels, a context
  of 128 tokens. A loss is the mean of the last ten steps.
- In the pictures the unbroken algorithm is black and dashed. The broken one is in colour. A cross is a value that is
  not finite.
"""
# What a reader asks about the figures of a failure.
NOTES = {
    "no_max": "For equal scores the lab gave all queries and keys of a head nearly the same vector, and made v small. "
    "No weight overflows there, but their sum l does.",
    "zero_init_max": "Few rows of this model have such low scores, so the errors of all rows together are small. "
    "The middle picture has the gradients of one such row.",
    "no_scale": "The errors of dq and dk are above 1, because the broken dq and dk are larger than the right ones.",
    "bf16_ties": "Hardly any of the model's own scores are equal, so nothing is seen in the table, and there is no "
    "short training. For the picture the lab made equal scores.",
}


def gallery(
    script: Callable[[Any], int], short: Any, *, failure: str | None, run: str | None, runs: Path,
    device: torch.device, out: Path,
) -> None:  # fmt: skip
    """Writes break-it.md to the folder `out`, and table.json and a NAME.png for each failure to out/break.

    script: train.main. short: the configuration from short_training(). failure: a name, or None for all. run: the run
    that gives q, k and v, found in the folder `runs` as in model_of_run(); None trains a small model first.
    Raises ValueError if there is no such run, and if its attention does not have what the failure takes out.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)  # two are no faster on such small tiles, and half as fast if another process wants a core
    facts = about(device)
    device = device if device.type == "cuda" else torch.device("cpu")  # mps has no float64
    model = None if run is None else model_of_run(run, runs, device)
    figures = out / FIGURES
    figures.mkdir(parents=True, exist_ok=True)  # fails now, before anything is measured, if it cannot be written
    failures = trials.with_a_trial([failure] if failure else list(FAILURES))
    if failure:
        words = FAILURES[failure]
        show(f"{failure}: without {words.removed}\n  you will see: {words.seen}\n  because: {words.why}\n")

    short = deepcopy(short)
    with tempfile.TemporaryDirectory() as scratch:
        short.runs = scratch
        if model is None:
            fresh = f"a small model, trained for {trainings.FRESH_STEPS} steps"
            show(f"training a small model to take q, k and v from: {trainings.FRESH_STEPS} steps")
            trainings.train_quietly(script, trainings.fresh_training(short))
            model = model_of_run("fresh", Path(scratch), device)._replace(name=fresh)
        else:
            short.data, short.tokenizer = model.data, model.tokenizer
        T = min(256, model.net.config.context_length)
        batch = next(validation_batches(model.dataset.val, model.dataset.val_documents, 2, T, 2 * T))
        calls = record(model.net, batch.x.to(device), batch.y.to(device))
        sizes = f"{counted(len(calls), 'layer')} of {counted(model.net.config.n_head, 'head')}"
        show(f"{model.name}: {sizes}, {T} tokens of its validation text")
        wanted, impls = ["none", *failures], trials.available(device)
        for line in measure.left_out(calls, wanted, impls):
            show(line)
        show("first bad: layer/head/query tile/key tile; score, weight: the largest; o to dv: |error| / |right|\n")
        print_row()
        rows, shown = measure.measure(calls, wanted, impls, print_row)
        show("")
        if not shown:
            raise ValueError(f"failure={failure}: there is nothing that it could take out of {model.name}")
        curves = trainings.compare(script, short, failures)

    show(f"drawing, after {time.perf_counter() - started:.0f} s")
    pictures = {}
    for name in (name for name in failures if name in shown):
        found = panels.panels(shown[name], next((c for c in curves if name in c.broken), None))
        draw.save(draw.picture(name, found), figures / f"{name}.png")
        pictures[name] = [panel.title for panel in found]
    losses = [c._asdict() for c in curves]
    kept = {"about": facts, "model": model.name, "rows": rows, "losses": losses, "pictures": pictures}
    write(figures / "table.json", json.dumps(plain(kept)).replace("}, {", "},\n{") + "\n")
    differ = sum(not row["agrees"] for row in rows)
    show(f"{len(rows)} lines, {differ} of them not as predicted; {time.perf_counter() - started:.0f} s")
    show(f"{figures}: table.json, {', '.join(f'{name}.png' for name in pictures)}; and {write_page(out)}")


def print_row(row: dict | None = None) -> None:
    """Prints a line of the table; for None, its head."""
    heads = ("failure", "where", "gain", "impl", "dtype", "tiles", "predicted", "observed", "first bad", "score")
    cells = [*heads, "headroom", "weight", *RESULTS, "verdict"]
    if row is not None:
        place = [row[key] for key in ("layer", "head", "query_tile", "key_tile")]
        cells = [row["failure"], row["where"], f"{row['gain']:.3g}", row["impl"], row["dtype"], row["tiles"]]
        cells += [row["predicted"], row["observed"]]
        cells += ["" if place[0] is None else "/".join("-" if x is None else str(x) for x in place)]
        cells += [f"{row['max_score']:.1f}", f"{row['headroom']:.1f}", f"{row['max_weight']:.3f}"]
        cells += [f"{row[f'error_{name}']:.1e}" for name in RESULTS]
        cells += [row["verdict"] + ("" if row["agrees"] else ", NOT AS PREDICTED")]
    widths = (17, 27, -5, 6, 7, 9, 13, 13, 9, -5, -8, -6, -8, -8, -8, -8, 8)  # below 0: aligned right
    shown = (f"{cell:>{-width}}" if width < 0 else f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    show(" ".join(shown).rstrip())


def write_page(out: Path) -> Path:
    """Writes break-it.md to the folder `out`, from table.json in its folder FIGURES. Returns the page's path."""
    path = out / "break-it.md"
    write(path, page(json.loads((out / FIGURES / "table.json").read_text(encoding="utf-8"))))
    return path


def page(kept: dict) -> str:
    """The page as Markdown. kept: the content of table.json."""
    names = list(kept["pictures"])
    table = ["| failure | taken out | how it shows | it acts |", "|---|---|---|---|"]
    table += [f"| [{name}](#{name}) | {FAILURES[name].removed} | {kind(kept, name)} | {FAILURES[name].acts} |"
              for name in names]  # fmt: skip
    facts = {name: kept["about"][name] for name in ("commit", "torch", "device")}
    head = HEAD.format(table="\n".join(table), model=kept["model"], **facts)
    return "\n".join([head, *(section(kept, name) for name in names)])


def kind(kept: dict, name: str) -> str:
    """How the failure shows in tiled, in words: all symptoms, over all dtypes."""
    found = [row["observed"] for row in kept["rows"] if (row["failure"], row["impl"]) == (name, "tiled")]
    seen = [symptom for symptom in KINDS if symptom in found and symptom != NONE]
    return ", ".join(KINDS[symptom] for symptom in seen or [NONE])


def section(kept: dict, name: str) -> str:
    """The section of a failure: words, commands, measurements, picture."""
    words = FAILURES[name]
    return f"""## {name}

**Taken out:** {words.removed}. The failure acts {words.acts}.

**Seen:** {words.seen}.

**Because:** {words.why}.

```
python train.py break_it={name} {words.wakes}
python breakit.py failure={name}
```

**Measured:**

{measured(kept, name)}

![{name}: {"; ".join(kept["pictures"][name])}]({FIGURES}/{name}.png)
"""


def measured(kept: dict, name: str) -> str:
    """The trials of tiled in the dtype of the picture, and the short training if there is one."""
    dtype = SHOWN.get(name, "float32")
    lines = [f"| tiled, {dtype} | seen | {' | '.join(f'error of {result}' for result in RESULTS)} |"]
    lines.append("|---" * (2 + len(RESULTS)) + "|")
    for row in kept["rows"]:
        if (row["failure"], row["impl"], row["dtype"]) == (name, "tiled", dtype):
            gain = "" if row["gain"] == 1 else f", scores x {row['gain']:.3g}"
            gain = f", largest score {row['max_score']:.1f}" if name == "no_max" else gain
            seen = "nothing" if row["observed"] == NONE else row["observed"]
            errors = " | ".join(f"{float(row[f'error_{result}']):.1e}" for result in RESULTS)
            lines.append(f"| {row['where']}{gain} | {seen} | {errors} |")
    if name in NOTES:
        lines.append("\n" + NOTES[name])
    for curves in kept["losses"]:
        if name in curves["broken"]:
            whole, broken = ([float(x) for x in losses] for losses in (curves["whole"], curves["broken"][name]))
            setting, steps = f"\nShort trainings of the lab's model with `{curves['setting']}`:", len(whole)
            if math.isnan(broken[-1]):
                lines.append(f"{setting} at step {len(broken)} the loss of the broken run is not finite. The unbroken "
                             f"run has {fmean(whole[-10:]):.3f} nats at step {steps}.")  # fmt: skip
            else:
                lines.append(f"{setting} at step {steps} the loss is {fmean(broken[-10:]):.3f} nats in the broken run "
                             f"and {fmean(whole[-10:]):.3f} nats in the unbroken run.")  # fmt: skip
    return "\n".join(lines)
