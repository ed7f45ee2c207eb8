"""A sweep: runs the jobs of `python train.py -m ...` one after the other, and makes one table and one picture of them.

    runs/SWEEP/table.csv     one row per job: the varied keys, best validation loss, bits per byte, step, ms per step,
                             status
    runs/SWEEP/losses.png    all loss curves, labelled with the varied keys
    runs/SWEEP-1, -2, ...    the runs, like any other run

SWEEP is name=, or the time. If a job fails, its row has the reason, and the next job starts. Ctrl-C ends the job and
the sweep. Table and picture then show the jobs so far.
"""

import csv
import gc
import io
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data.text import counted
from training.help import aligned
from training.metrics import broken_name, drawable, printable, read_metrics, rewrite, show, stamp


def sweep(script: Callable[[Any], int], jobs: list[tuple[Any, list[str]]]) -> int:
    """Run the jobs. Returns 0 if all of them reached their end, 1 if one did not, 128 + the signal if a signal came.

    script: trains; writes its files into runs/NAME; returns 0, 1 if a NaN or infinity stopped it, or 128 + a signal.
    jobs: (configuration, overrides). A configuration has `name`, `runs` and `break_it`; its `name` is set here.
    Raises ValueError if a run of one of the names exists already.
    """
    folder = name_jobs([config for config, _ in jobs])
    typed = [dict(override.partition("=")[::2] for override in overrides) for _, overrides in jobs]
    varying = [key for key in typed[0] if len({values.get(key) for values in typed}) > 1]
    rows, curves, code = [], {}, 0
    try:
        for number, ((config, overrides), values) in enumerate(zip(jobs, typed, strict=True), start=1):
            show(f"job {number}/{len(jobs)}: {' '.join(overrides)}")
            varied = {key: values.get(key, "") for key in varying}
            status, ended = "interrupted", 130
            try:
                ended = script(config)
                status = {0: "done", 1: "stopped"}.get(ended, status)
            except (ValueError, OSError) as error:
                status, ended = f"failed: {error}", 2
                print(f"job {number}/{len(jobs)} failed: {printable(str(error))}", file=sys.stderr)
            finally:
                metrics = Path(config.runs) / config.name / "metrics.jsonl"
                records = read_metrics(metrics) if metrics.exists() else []  # it may have ended before the first
                rows.append({"job": config.name, **varied, **result(records, status)})
                if records:
                    curves[", ".join(f"{key}={value}" for key, value in varied.items()) or config.name] = records
            if ended >= 128:
                return ended
            code = 1 if ended else code
            free_memory()
        return code
    finally:
        # Also after a bug in the script: the table of the finished jobs is still useful.
        write_table(folder / "table.csv", rows)
        if curves:
            rewrite(folder / "losses.png", losses_figure(curves, folder.name))
        failed = sum(not row["status"].endswith("done") for row in rows)  # a broken run's status begins with its stamp
        trouble = f", {failed} of them failed or stopped" if failed else ""
        show(f"sweep: {len(rows)} of {counted(len(jobs), 'job')}{trouble}: {folder}")


def name_jobs(configs: list[Any]) -> Path:
    """Gives each job its own name: adds a number to a shared name, and the fault to a broken run's name.
    Makes the sweep's folder and returns it.

    A job that resumes a checkpoint gets a new run too. In the checkpoint's own run, it would continue from where the
    previous job ended.
    """
    shared = {config.name for config in configs}
    title = shared.pop() if len(shared) == 1 and None not in shared else time.strftime("%Y%m%d-%H%M%S-sweep")
    times = Counter(config.name for config in configs)
    for number, config in enumerate(configs, start=1):
        if times[config.name] > 1 or config.name is None:
            config.name = f"{config.name or title}-{number}"
        config.name = broken_name(config.name, config.break_it.label)
    folder = Path(configs[0].runs) / title
    for path in (folder, *(Path(config.runs) / config.name for config in configs)):
        if path.exists():
            raise ValueError(f"the run {path} exists already: use another name= for the sweep")
    folder.mkdir(parents=True)
    return folder


def result(records: list[dict], status: str) -> dict:
    """A run's row: its best evaluation, and the median time of a step. The first record's step may have compiled: its
    time counts only if there is no other."""
    evaluated = [r for r in records if math.isfinite(r.get("val_loss", math.nan))]
    best = min(evaluated, key=lambda r: r["val_loss"], default={})
    steps = [r for r in records if "loss" in r]
    times = [r["ms"] for r in steps if "ms" in r]
    if status in ("stopped", "interrupted") and steps:
        status = f"{status} at step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}"
    return {
        "val_loss": best.get("val_loss"),
        "bits_per_byte": best.get("val_bits_per_byte"),
        "step": best.get("step"),
        "ms": f"{statistics.median(times[1:] or times):.1f}" if times else None,
        "status": stamp(steps[-1].get("broken") if steps else None) + status,
    }


def write_table(path: Path, rows: list[dict]) -> None:
    """Writes the rows as CSV with all digits, and prints them in columns."""
    if not rows:
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    rewrite(path, text.getvalue())
    cells = [list(rows[0])]
    for row in rows:
        cells.append(["" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()])
    for line in aligned(cells):
        show(line)


def losses_figure(curves: dict[str, list[dict]], title: str):
    """{label: records} as a matplotlib Figure. Each run has a colour and a marker; its training loss is a line, its
    validation losses are markers. A line of one point is a dot."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for number, (label, records) in enumerate(curves.items()):
        # The colour follows the job's number, so that a value that rises from job to job shows as a change of colour.
        # The map's last quarter is yellow, which white paper swallows.
        colour = colormaps["viridis"](0.75 * number / max(1, len(curves) - 1))
        broken = next((r["broken"] for r in records if r.get("broken")), None)
        # With two or three curves, earlier lines are wider, so that they can be seen under later ones.
        few = len(curves) <= 3
        thin = {"lw": 0.8 + 2 * (len(curves) - 1 - number), "alpha": 0.8} if few else {"lw": 0.5, "alpha": 0.4}
        for key, style in (("loss", thin), ("val_loss", {"marker": "os^Dvx"[number % 6], "ms": 5, "ls": ":"})):
            points = [(r["step"], r[key] if math.isfinite(r[key]) else math.nan) for r in records if key in r]
            name = stamp(broken) + label if key == "val_loss" else None
            dot = {"marker": "."} if sum(math.isfinite(y) for _, y in points) == 1 else {}
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=name and drawable(name), **{**dot, **style})
    axes.set_title(drawable(f"{title}: loss in training (lines) and validation (markers)"), parse_math=False)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize="small").get_texts():
            text.set_parse_math(False)
    return figure


def free_memory() -> None:
    """Frees a job's memory, so that the next job has as much. (On a CPU, memory_gib keeps the peak of the earlier jobs:
    the system counts one peak per process.)"""
    gc.unfreeze()  # the first job's are among what begin_collecting() froze
    gc.collect()  # a model and its optimizer refer to each other
    if "torch._dynamo" in sys.modules:  # it compiles at most eight versions of a function, unless it is reset
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
