"""The lab: compares each failure with the whole algorithm in a table, short trainings, pictures and a page.
`python breakit.py`"""

import json
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from data.loader import validation_batches
from data.text import counted
from lab import draw, measure, panels, trainings, trials
from lab.files import plain, write
from lab.page import FIGURES, write_page
from lab.runs import model_of_run
from model.break_it import FAILURES
from training.machine import about
from training.metrics import show
from training.probe import record


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
    failures = [failure] if failure else list(FAILURES)
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
    cells = [*heads, "headroom", "weight", *measure.RESULTS, "verdict"]
    if row is not None:
        place = [row[key] for key in ("layer", "head", "query_tile", "key_tile")]
        cells = [row["failure"], row["where"], f"{row['gain']:.3g}", row["impl"], row["dtype"], row["tiles"]]
        cells += [row["predicted"], row["observed"]]
        cells += ["" if place[0] is None else "/".join("-" if x is None else str(x) for x in place)]
        cells += [f"{row['max_score']:.1f}", f"{row['headroom']:.1f}", f"{row['max_weight']:.3f}"]
        cells += [f"{row[f'error_{name}']:.1e}" for name in measure.RESULTS]
        cells += [row["verdict"] + ("" if row["agrees"] else ", NOT AS PREDICTED")]
    widths = (17, 27, -5, 6, 7, 9, 13, 13, 9, -5, -8, -6, -8, -8, -8, -8, 8)  # below 0: aligned right
    shown = (f"{cell:>{-width}}" if width < 0 else f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    show(" ".join(shown).rstrip())
