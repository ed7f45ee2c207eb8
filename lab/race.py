"""Checks each attention, then measures its speed and memory. `python bench.py`

B batch, T tokens, D head size, H query heads, H_kv key/value heads: q, o, do (B, H, T, D); k, v (B, H_kv, T, D).
"""

import csv
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lab.meter import is_out_of_memory, median_ms, peak_bytes
from lab.peers import IMPLS, OURS, PASSES, Attention, Case, attention_of
from training.machine import DTYPES, about

COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D", "causal", "window"]
COLUMNS += ["share", "dropout_p", "pass", "ms", "tflops", "peak_mib"]
BOTH = "forward+backward"


def race(
    series: list[list[Case]], impls: list[str], device: torch.device, dtype: str, patience: float, out: Path
) -> None:
    """Checks, races and draws. Appends a row for each measurement to out/results.csv, draws speed.png and memory.png.

    series: lists of cases that differ in T and B alone, shortest first. patience: seconds.
    Raises ValueError if nobody can run; RuntimeError if one of ours is wrong."""
    facts, raced = about(device) | {"dtype": dtype}, list[dict]()
    print("{device}, {dtype}, torch {torch}, triton {triton}, commit {commit}".format(**facts), flush=True)
    names = check(impls, small_cases(series), device, DTYPES[dtype])
    if not names:
        raise ValueError(f"impls={impls}: none of them can run here")
    unit, scale = ("TFLOP/s", 1) if device.type == "cuda" else ("GFLOP/s", 1000)
    for cases in series:
        shared = ", ".join(f"{name}={x}" for name, x in asdict(cases[0]).items() if name not in "BT")
        print(f"\n{shared}\n{'':27}" + "".join(f"{which:>18}" for which in PASSES))
        print(f"{'T':>7}{'B':>4}  {'':14}" + f"{'ms':>9}{unit:>9}" * 3 + f"{'x fastest':>10}{'MiB':>8}", flush=True)
        found: dict[str, list[dict]] = {}  # of each implementation: the rows of the longest case so far
        for case in cases:
            x = attempt("inputs", inputs, case, device, DTYPES[dtype])
            for name in names:
                last = found[name][-1] if name in found else dict[str, Any](word="", tflops=None)
                slow = last["tflops"] and case.flops(BOTH) / last["tflops"] / 1e12 > patience
                word = last["word"] or ("slow" if slow else x if isinstance(x, str) else "")
                found[name] = rows_of(case, name, word or attempt(name, weigh, name, case, x))
            show(found, scale)
            made = [facts | row for rows in found.values() for row in rows if row["word"] in ("", "memory")]
            append(made, out / "results.csv")  # after each case: a race that is cut short keeps what it has
            raced += made
    if any(row["ms"] for row in raced):
        picture(raced, "tflops", ["forward", "backward"], "linear", out / "speed.png")
        picture(raced, "peak_mib", [BOTH], "log", out / "memory.png")
    print(f"\nresults and pictures are in {out}")


def append(rows: list[dict], table: Path) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows)


def rows_of(case: Case, name: str, measured: tuple[dict[str, float], float] | str) -> list[dict]:
    """A row for each pass; without numbers if there is a word in their place: -, memory, slow."""
    ms, peak = (dict.fromkeys(PASSES), None) if isinstance(measured, str) else measured
    shape = asdict(case) | {"impl": name, "share": case.share, "word": measured if isinstance(measured, str) else ""}
    rows = [{"pass": which, "ms": x, "tflops": x and case.flops(which) / x / 1e9} for which, x in ms.items()]
    return [shape | row | {"peak_mib": peak if row["pass"] == BOTH else None} for row in rows]


def show(found: dict[str, list[dict]], scale: float) -> None:
    """Prints a line for each implementation: for each pass ms and FLOP/s; then the time of both passes relative to the
    fastest, and their memory. Or a word instead of the numbers."""
    fastest = min((rows[-1]["ms"] for rows in found.values() if rows[-1]["ms"]), default=0.0)
    for name, rows in found.items():
        last = rows[-1]
        line = f"{last['T']:>7}{last['B']:>4}  {name:14}" + f"{last['word']:>9}" * bool(last["word"])
        if last["ms"]:
            line += "".join(f"{short(row['ms']):>9}{short(scale * row['tflops']):>9}" for row in rows)
            line += f"{last['ms'] / fastest:>10.2f}{short(last['peak_mib']):>8}"
        print(line, flush=True)


def short(x: float) -> str:
    """x with three digits, or as an integer if that has more."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.3g}"


def small_cases(series: list[list[Case]]) -> list[Case]:
    """Cases to check: one for each mask, head size and dropout of the race, and the same without dropout."""
    T = 333  # no tile size divides it; a window is cut so that it hides keys
    found: dict[Case, None] = {}
    for case, *_ in series:
        window = None if case.window is None else min(T // 3, case.window)
        small = replace(case, B=2, H=2, T=T, H_kv=None if case.H_kv is None else 1, window=window)
        found |= {replace(small, dropout_p=0.0): None, small: None}
    return list(found)


def check(impls: list[str], cases: list[Case], device: torch.device, dtype: torch.dtype) -> list[str]:
    """The implementations that are right: in every case that they can do, o, dq, dk and dv are each within
    2 * (naive's error + eps * max |reference|) of naive in float64. Peers drop other weights than ours do, so they are
    compared without dropout. Raises RuntimeError if one of ours is wrong."""
    problems = [(case, *allowance(case, device, dtype)) for case in cases]
    right = []
    for name in impls:
        shares: list[float] = []  # of the allowed errors
        for case, x, reference, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(name, results, name, case, x)
            if not isinstance(found, str):
                shares += [float((f - r).abs().max()) / a for f, r, a in zip(found, reference, allowed, strict=True)]
        wrong = not all(share <= 1 for share in shares)  # NaN is wrong
        if wrong and name in OURS:
            raise RuntimeError(f"{name} is wrong, {max(shares):.3g} times the allowed error: nothing is timed")
        if shares:
            print(f"check {name:14} {'WRONG, left out' if wrong else 'right'}: {max(shares):.2f} of the allowed error")
            right += [name] * (not wrong)
    return right


def allowance(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """A case's inputs, its o, dq, dk and dv in float64, and the error that is allowed in each of them."""
    x = inputs(case, device, dtype)
    reference = results("naive", case, [t.detach().double().requires_grad_() for t in x])
    # A result that is 0 throughout, as dq of rows that see one key is, is rounded at the scale of the others.
    largest, eps = [float(r.abs().max()) for r in reference], torch.finfo(dtype).eps
    errors = [float((f - r).abs().max()) for f, r in zip(results("naive", case, x), reference, strict=True)]
    allowed = [2 * (error + eps * (scale or max(largest))) for error, scale in zip(errors, largest, strict=True)]
    return x, reference, allowed


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do, the same at every call. They are random, because matrix products are faster on zeros. do is a
    full tensor, because kernels are faster on the expanded scalar that o.sum() would give."""
    generator = torch.Generator(device).manual_seed(case.T)
    heads = case.H, case.H_kv or case.H, case.H_kv or case.H, case.H  # of q, k, v, do
    shapes = [(case.B, H, case.T, case.D) for H in heads]
    return [torch.randn(s, generator=generator, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def results(name: str, case: Case, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk and dv of the implementation `name`. x: q, k, v and do."""
    return forward_and_backward(attention_of(name, case, x[0].device), x)


def forward_and_backward(f: Attention, x: list[Tensor]) -> list[Tensor]:
    o = f(*x[:3])
    return [o.detach(), *torch.autograd.grad(o, x[:3], x[3])]


def weigh(name: str, case: Case, x: list[Tensor]) -> tuple[dict[str, float], float]:
    """The ms of each pass, and the peak memory of both together in MiB."""
    f, device = attention_of(name, case, x[0].device), x[0].device
    peak = peak_bytes(partial(forward_and_backward, f, x), device)
    forward = median_ms(lambda: f(*x[:3]), device)
    backward = median_ms(lambda o: torch.autograd.grad(o, x[:3], x[3]), device, lambda: (f(*x[:3]),))
    return {"forward": forward, "backward": backward, BOTH: forward + backward}, peak / 2**20


def attempt(name: str, action: Callable, *arguments):
    """Returns action(*arguments), or a word: "memory" if it ran out of memory, "-" if the implementation cannot do it.
    Prints why, once. Other errors of ours are bugs and are raised."""
    try:
        # torch says in a warning why it has no kernel, then raises an error without the reason.
        with warnings.catch_warnings(record=True) as said:
            return action(*arguments)
    except (ImportError, RuntimeError, AssertionError, ValueError, MemoryError) as error:
        if is_out_of_memory(error):
            return "memory"
        if name in OURS and not isinstance(error, ValueError | ImportError):
            raise
        why = str(said[-1].message) if said and isinstance(error, RuntimeError) else str(error)
        say(f"{name}: {why.partition(' (Triggered')[0].strip().partition(chr(10))[0]}")
        return "-"


@cache
def say(line: str) -> None:
    """Prints a line, once."""
    print(line, flush=True)


def picture(rows: list[dict], value: str, passes: list[str], scale: str, path: Path) -> None:
    """Draws row[value] over length: a row of panels for each series, a column for each pass. scale: of the vertical
    axis, linear or log."""
    keys = ("D", "H", "H_kv", "causal", "window", "dropout_p")
    series = list({tuple(row[key] for key in keys): None for row in rows})
    figure = Figure(figsize=(11, 3.2 * len(series) + 1.5), layout="constrained")
    where = "{device}, {dtype}, torch {torch}, triton {triton}, commit {commit}".format(**rows[0])
    figure.suptitle(f"attention: {value}\n{where}", fontsize=11)
    grid = figure.subplots(len(series), len(passes), squeeze=False)
    for one, line in zip(series, grid, strict=True):
        for which, axes in zip(passes, line, strict=True):
            wanted = dict(zip(keys, one, strict=True)) | {"pass": which}
            plot(axes, [row for row in rows if wanted.items() <= row.items()], value)
            shown = ", ".join(f"{key} {x}" for key, x in wanted.items() if x is not None and key != "pass")
            axes.set_title(f"{which}: {shown}", fontsize=9)
            axes.set_yscale("log") if scale == "log" else axes.set_ylim(0)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=100)


def plot(axes: Axes, rows: list[dict], value: str) -> None:
    """A line for each implementation, solid for ours. Its label says where it ran out of memory."""
    for n, impl in enumerate(IMPLS):
        found = {row["T"]: row[value] for row in rows if row["impl"] == impl}
        died = [T for T, y in found.items() if not y]
        ended = {T: y for T, y in found.items() if y}
        if found:
            label = impl + (f" (out of memory at {died[0]:,})" if died else "")
            axes.plot([*ended], [*ended.values()], f"C{n}{'osD^vPX*'[n]}{'-' if impl in OURS else '--'}", label=label)
    lengths = sorted({row["T"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths], minor=False)
    axes.set_xlabel("context length T (tokens)")
    axes.grid(alpha=0.3)
