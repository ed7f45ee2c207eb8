"""Checks each attention, then measures its speed and memory. `python bench.py`

B batch, T tokens, D head size, H query heads, H_kv key/value heads: q, o, do (B, H, T, D); k, v (B, H_kv, T, D).
"""

import csv
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.charts import memory_picture, speed_picture
from lab.meter import is_out_of_memory, median_ms, peak_bytes
from lab.peers import OURS, PASSES, Attention, Case, attention_of
from training.machine import DTYPES, about

ROUNDED = ("ms", "tflops", "peak_mib")  # to four digits in the table
COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D", "causal", "window"]
COLUMNS += ["documents", "block_mask", "share", "dropout_p", "tile", "pass", *ROUNDED]  # two are empty: no such masks
Found = list[dict] | str  # a row for each pass, or the word in their place: -, memory, slow


def race(
    series: list[list[Case]], impls: list[str], block: int, device: torch.device, dtype: str, patience: float, out: Path
) -> None:
    """Checks, races and draws. Appends a row for each measurement to out/results.csv, draws speed.png and memory.png.

    series: lists of cases that differ in T and B alone, shortest first. block: tile size of tiled. patience: seconds.
    Raises ValueError if nobody can run, or results.csv has other columns; RuntimeError if one of ours is wrong.
    """
    facts, table, rows = about(device) | {"dtype": dtype}, out / "results.csv", list[dict]()
    print("{device}, {dtype}, torch {torch}, triton {triton}, commit {commit}".format(**facts), flush=True)
    append(table, [])  # another header is refused before anything is measured
    told: set[str] = set()  # why peers cannot run, each printed once
    names = check(impls, small_cases(series), block, device, DTYPES[dtype], told)
    if not names:
        raise ValueError(f"impls={impls}: none of them can run here")
    for cases in series:
        unit = "TFLOP/s" if device.type == "cuda" else "GFLOP/s"
        print(f"\n{cases[0].title()}\n{'':27}" + "".join(f"{which:>18}" for which in PASSES))
        print(f"{'T':>7}{'B':>4}  {'':14}" + f"{'ms':>9}{unit:>9}" * 3 + f"{'x fastest':>10}{'MiB':>8}", flush=True)
        found: dict[str, Found] = {}
        for case in cases:
            x = attempt(told, "inputs", inputs, case, device, DTYPES[dtype])
            for name in names:
                last = found.get(name, [])  # at the length before
                if isinstance(last, str):
                    continue
                seconds = case.flops("forward+backward") / (last[-1]["tflops"] * 1e12) if last else 0.0
                word = "slow" if seconds > patience else x if isinstance(x, str) else ""
                found[name] = word or attempt(told, name, weigh, name, case, block, x)
            show(case, found, unit)
            rows += (made := [facts | row for row in rows_of(case, found, block)])
            append(table, made)
    if any(row["ms"] for row in rows):
        print(f"\n{table}, {speed_picture(rows, out / 'speed.png')}, {memory_picture(rows, out / 'memory.png')}")


def append(table: Path, rows: list[dict]) -> None:
    """Appends rows at once, so that a race that is cut short keeps what it has. ValueError for another header."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        if (header := next(csv.reader(file), None)) not in (None, COLUMNS):
            raise ValueError(f"{table} has other columns than this race writes; move it away or use another out=")
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        if header is None:
            writer.writeheader()
        writer.writerows(row | {key: f"{row[key]:.4g}" for key in ROUNDED if row[key] is not None} for row in rows)


def rows_of(case: Case, found: dict[str, Found], block: int) -> list[dict]:
    """The rows of a case. Running out of memory is a result too: rows without numbers."""
    nothing = [{"pass": which} | dict.fromkeys(ROUNDED) for which in PASSES]
    rows = []
    for name, passes in found.items():
        shape = asdict(case) | {"impl": name, "share": case.share, "tile": block if name == "tiled" else None}
        passes = passes if isinstance(passes, list) else nothing if passes == "memory" else []
        rows += [shape | passed for passed in passes]
    return rows


def show(case: Case, found: dict[str, Found], unit: str) -> None:
    """Prints a line for each implementation: for each pass ms and FLOP/s; then the time of both passes relative to the
    fastest, and their memory. Or a word instead of the numbers."""
    fastest = min((passes[-1]["ms"] for passes in found.values() if isinstance(passes, list)), default=0.0)
    for name, passes in found.items():
        line = f"{case.T:>7}{case.B:>4}  {name:14}"
        if isinstance(passes, list):
            for passed in passes:
                line += f"{short(passed['ms']):>9}{short(passed['tflops'] * (1 if unit[0] == 'T' else 1e3)):>9}"
            line += f"{passes[-1]['ms'] / fastest:>10.2f}{short(passes[-1]['peak_mib']):>8}"
        print(line if isinstance(passes, list) else f"{line}{passes:>9}", flush=True)


def short(x: float) -> str:
    """x with three digits, or as an integer if that has more."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.3g}"


def small_cases(series: list[list[Case]]) -> list[Case]:
    """Cases to check: one for each mask, head size and dropout of the race, and the same without dropout."""
    T = 333  # no tile size divides it; a window is cut so that it hides keys
    found: dict[Case, None] = {}
    for case in (cases[0] for cases in series):
        window = None if case.window is None else min(T // 3, case.window)
        small = replace(case, B=2, H=2, T=T, H_kv=None if case.H_kv is None else 1, window=window)
        found |= {replace(small, dropout_p=0.0): None, small: None}
    return list(found)


def check(
    impls: list[str], cases: list[Case], block: int, device: torch.device, dtype: torch.dtype, told: set[str]
) -> list[str]:
    """The implementations that are right: in every case that they can do, o, dq, dk and dv are each within
    2 * (naive's error + eps * max |reference|) of naive in float64. Peers drop other weights than ours do, so they are
    compared without dropout. Raises RuntimeError if one of ours is wrong.
    """
    problems = [(case, *allowance(case, device, dtype)) for case in cases]
    right = []
    for name in impls:
        worst = -1.0  # the largest share of the allowed error
        for case, x, reference, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(told, name, results, name, case, block, x)
            if not isinstance(found, str):
                errors = [float((f - r).abs().max()) for f, r in zip(found, reference, strict=True)]
                worst = max(worst, *map(share_of, errors, allowed))
        if worst > 1 and name in OURS:
            raise RuntimeError(f"{name} is wrong, {worst:.3g} times the allowed error: nothing is timed")
        if worst >= 0:
            print(f"check {name:14} {'WRONG, left out' if worst > 1 else 'right'}: {worst:.2f} of the allowed error")
            right += [name] * (worst <= 1)
    return right


def share_of(error: float, allowed: float) -> float:
    """error / allowed; infinite for NaN, 0 for 0 of 0."""
    return error / allowed if allowed and not math.isnan(error) else math.inf if error else 0.0


def allowance(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """A case's inputs, its o, dq, dk and dv in float64, and the error that is allowed in each of them."""
    x = inputs(case, device, dtype)
    reference = results("naive", case, 1, [t.detach().double().requires_grad_() for t in x])
    # A result that is 0 throughout, as dq of rows that see one key is, is rounded at the scale of the others.
    largest, eps = [float(r.abs().max()) for r in reference], torch.finfo(dtype).eps
    allowed = [
        2 * (float((found - r).abs().max()) + eps * (scale or max(largest)))
        for found, r, scale in zip(results("naive", case, 1, x), reference, largest, strict=True)
    ]
    return x, reference, allowed


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do, the same at every call. They are random, because matrix products are faster on zeros. do is a
    full tensor, because kernels are faster on the expanded scalar that o.sum() would give."""
    generator = torch.Generator(device).manual_seed(case.T)
    heads = case.H, case.H_kv or case.H, case.H_kv or case.H, case.H  # of q, k, v, do
    shapes = [(case.B, H, case.T, case.D) for H in heads]
    return [torch.randn(s, generator=generator, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def results(name: str, case: Case, block: int, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk and dv of the implementation `name`. x: q, k, v and do."""
    return forward_and_backward(attention_of(name, case, block, x[0].device), x)


def forward_and_backward(f: Attention, x: list[Tensor]) -> list[Tensor]:
    q, k, v, do = x
    o = f(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def attempt(told: set[str], name: str, action: Callable, *arguments):
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
        line = f"{name}: {why.partition(' (Triggered')[0].strip().partition(chr(10))[0]}"
        if line not in told:
            print(line, flush=True)
            told.add(line)
        return "-"


def weigh(name: str, case: Case, block: int, x: list[Tensor]) -> list[dict]:
    """Measures one implementation: a row for each pass with its ms, tflops and peak_mib (for both passes together)."""
    q, k, v, do = x
    f = attention_of(name, case, block, q.device)
    peak = peak_bytes(partial(forward_and_backward, f, x), q.device)
    forward = median_ms(lambda: f(q, k, v), q.device)
    backward = median_ms(lambda o: torch.autograd.grad(o, (q, k, v), do), q.device, prepare=lambda: f(q, k, v))
    ms = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    rows = [{"pass": which, "ms": ms[which], "tflops": case.flops(which) / ms[which] / 1e9} for which in PASSES]
    return [row | {"peak_mib": peak / 2**20 if row["pass"] == "forward+backward" else None} for row in rows]
