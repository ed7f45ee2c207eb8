"""Checks each attention, then measures its speed and memory. `python bench.py` Shapes: lab/peers.py; do is like o."""

import csv
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lab.meter import gpu_ms_of, ms_of, peak_bytes
from lab.peers import IMPLS, OURS, PASSES, Case, attention_of
from training.machine import DTYPES, about

COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D", "causal", "window"]
COLUMNS += ["share", "dropout_p", "pass", "ms", "tflops", "peak_mib"]
BOTH, MEMORY = "forward+backward", "out of memory"
SECONDS = 2  # of rounds for each case; but at least four rounds


def race(cases: list[Case], impls: list[str], device: torch.device, dtype: str, out: Path):
    """Appends a row for each measurement to out/results.csv; draws speed.png and memory.png. cases: series, one after
    the other, of cases that differ in T and B alone, shortest first. RuntimeError if one of ours is wrong."""
    facts, number = about(device) | {"dtype": dtype}, DTYPES[dtype]
    unit, per_tflops = ("GFLOP/s", 1000) if device.type == "cpu" else ("TFLOP/s", 1)
    out.mkdir(parents=True, exist_ok=True)
    where = "{device}, {dtype}, torch {torch}, triton {triton}, commit {commit}".format(**facts)
    print(where, flush=True)
    names = check(impls, cases, device, number)
    raced: dict[str, list[dict]] = {}  # what the cases of a series share: its rows
    for case in cases:
        shared = ", ".join(f"{name}={x}" for name, x in asdict(case).items() if name not in "BT" and x is not None)
        if shared not in raced:
            raced[shared], ended = [], dict[str, str]()  # ended: who cannot run longer ones either, and why
            print(f"\n{shared}\n{'':27}" + "".join(f"{which:>20}" for which in PASSES))
            print(f"{'T':>7}{'B':>4}  {'':14}" + f"{'ms':>10}{unit:>10}" * 3 + f"{'MiB':>11}")
        start = f"{case.T:>7}{case.B:>4}  "
        print(start, end="", flush=True)  # now, because a long case takes a while
        found = {name: ended.get(name) or attempt(name, case, device, number, warm_up) for name in names}
        ended |= {name: why for name, why in found.items() if isinstance(why, str)}
        timed = take_turns(case, {name: f for name, f in found.items() if name not in ended}, device, number)
        for name in names:
            rows, numbers = timed.get(name, []), f"  {ended.get(name)}"
            if rows:
                numbers = "".join(f"{row['ms']:>10.4g}{row['tflops'] * per_tflops:>10.4g}" for row in rows)
                numbers += f"{rows[-1]['peak_mib']:>11.3f}"
            elif ended[name] == MEMORY:
                rows = [{"pass": which} for which in PASSES]
            print(f"{start if name != names[0] else ''}{name:14}{numbers}", flush=True)
            raced[shared] += [facts | asdict(case) | {"impl": name, "share": case.share} | row for row in rows]
        append([row for row in raced[shared] if row["T"] == case.T], out / "results.csv")
    picture(raced, "tflops", ["forward", "backward"], "TFLOP/s (higher is better)", where, out / "speed.png")
    picture(raced, "peak_mib", [BOTH], "peak memory, MiB (lower is better)", where, out / "memory.png")
    print(f"results and pictures are in {out}")


def append(rows: list[dict], table: Path) -> None:
    with open(table, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows)


def check(impls: list[str], cases: list[Case], device: torch.device, dtype: torch.dtype) -> list[str]:
    """The implementations that are right: in the small cases that they can run, o, dq, dk and dv are each within
    2 * (naive's error + eps * max |reference|) of naive in float64. Raises RuntimeError if one of ours is wrong."""
    T = 333  # no tile size divides it; a window is cut so that it hides keys
    small = [replace(c, B=2, H=2, T=T, H_kv=c.H_kv and 1, window=c.window and min(T // 3, c.window)) for c in cases]
    unique = dict.fromkeys(replace(case, dropout_p=p) for case in small for p in (0.0, case.dropout_p))
    problems = [(case, *allowance(case, device, dtype)) for case in unique]
    right = []
    for name in impls:
        shares: list[float] = []  # of the allowed errors
        for case, reference, allowed in problems:
            if case.dropout_p and name not in OURS:
                continue  # peers drop other weights than ours do
            found = attempt(name, case, device, dtype, forward_and_backward)
            if not isinstance(found, str):
                shares += [float((f - r).abs().max()) / a for f, r, a in zip(found, reference, allowed, strict=True)]
        wrong = not all(share <= 1 for share in shares)  # NaN is wrong
        if wrong and name in OURS:
            raise RuntimeError(f"{name} is wrong, {max(shares):.3g} times the allowed error: nothing is timed")
        if shares:
            print(f"check {name:14} {'WRONG, left out' if wrong else 'right'}: {max(shares):.2f} of the allowed error")
            right += [name] * (not wrong)
        else:
            print(f"check {name:14} left out: {found}")
    return right


def allowance(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """A case's o, dq, dk and dv in float64, and the error that is allowed in each of them."""
    x, naive = inputs(case, device, dtype), attention_of("naive", case, device)
    reference = forward_and_backward(naive, [t.detach().double().requires_grad_() for t in x])
    both, eps = zip(forward_and_backward(naive, x), reference, strict=True), torch.finfo(dtype).eps
    return reference, [2 * float((f - r).abs().max() + eps * r.abs().max()) for f, r in both]


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do, the same at every call. They are random, because matrix products are faster on zeros. do is a
    full tensor, because kernels are faster on the expanded scalar that o.sum() would give."""
    generator = torch.Generator(device).manual_seed(case.T)
    heads = case.H, case.H_kv or case.H, case.H_kv or case.H, case.H  # of q, k, v, do
    shapes = [(case.B, H, case.T, case.D) for H in heads]
    return [torch.randn(s, generator=generator, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def forward_and_backward(f: Callable, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk and dv of an implementation. x: q, k, v and do."""
    o = f(*x[:3])
    return [o.detach(), *torch.autograd.grad(o, x[:3], x[3])]


def warm_up(f: Callable, x: list[Tensor]) -> tuple[Callable, int]:
    """f, compiled, and the peak memory of a forward and a backward in bytes, beyond the inputs."""
    forward_and_backward(f, x)  # compiles, and allocates workspaces that stay
    return f, peak_bytes(partial(forward_and_backward, f, x), x[0].device)


def take_turns(case: Case, entrants: dict, device: torch.device, dtype: torch.dtype) -> dict[str, list[dict]]:
    """For each entrant (what warm_up() returns) and pass: pass, ms (the median), tflops (TFLOP/s); for both passes
    together also peak_mib (MiB). In a round each runs once, so all meet the same clock of a GPU, which rises after a
    rest and falls at the limit of power. The first third of the rounds does not count."""
    x, clock = inputs(case, device, dtype), partial(gpu_ms_of if device.type == "cuda" else ms_of, device=device)
    rounds, began = list[list[float]](), time.perf_counter()
    while len(rounds) < 4 or time.perf_counter() - began < SECONDS:
        rounds.append([])
        for f, _ in entrants.values():
            rounds[-1].append(clock(partial(f, *x[:3])))
            o = f(*x[:3])
            rounds[-1].append(clock(partial(torch.autograd.grad, o, x[:3], x[3])))
    times, found = map(median, zip(*rounds[len(rounds) // 3 :], strict=True)), {}
    for name, (_, peak) in entrants.items():
        forward, backward = next(times), next(times)
        ms = zip(PASSES, (forward, backward, forward + backward), strict=True)
        found[name] = [{"pass": which, "ms": t, "tflops": case.flops(which) / t / 1e9} for which, t in ms]
        found[name][-1]["peak_mib"] = peak / 2**20
    return found


def attempt(name: str, case: Case, device: torch.device, dtype: torch.dtype, action: Callable):
    """Returns action(f, x) for o = f(*x[:3]), or why the implementation cannot run it: MEMORY, or a sentence."""
    try:
        # torch says in a warning why it has no kernel, then raises an error without the reason.
        with warnings.catch_warnings(record=True) as said:
            return action(attention_of(name, case, device), inputs(case, device, dtype))
    except (ImportError, RuntimeError, AssertionError, ValueError) as error:
        if any(text in str(error) for text in ("out of memory", "DefaultCPUAllocator")):
            return MEMORY
        if name in OURS and not isinstance(error, ValueError | ImportError):
            raise  # a bug of ours
        why = str(said[-1].message if said and isinstance(error, RuntimeError) else error)
        return why.partition("\n")[0].partition(". ")[0].removesuffix(".")  # its first sentence


def picture(raced: dict[str, list[dict]], value: str, passes: list[str], what: str, where: str, path: Path) -> None:
    """Draws row[value] over length: a row of panels for each series, a column for each pass. what: `value` in words."""
    figure = Figure(figsize=(11, 3.2 * len(raced) + 1.5), layout="constrained")
    figure.suptitle(where, fontsize=11)
    grid = figure.subplots(len(raced), len(passes), squeeze=False)
    for (shared, which), axes in zip(product(raced, passes), grid.flat, strict=True):
        for n, impl in enumerate(IMPLS):
            found = {row["T"]: row.get(value) for row in raced[shared] if (row["impl"], row["pass"]) == (impl, which)}
            died = [f" (out of memory at {T:,})" for T, y in found.items() if y is None]
            style = f"C{n}{'osD^vPX*'[n]}{'-' if impl in OURS else '--'}"
            if found:
                axes.plot([*found], [y or math.nan for y in found.values()], style, label="".join([impl, *died[:1]]))
        axes.set_title(f"attention {which}: {what}\n{shared}", fontsize=9)
        axes.set_yscale("log") if value == "peak_mib" else axes.set_ylim(0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="context length T (tokens)", ylabel=what)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=100)
