"""Checks each attention, then measures its speed and memory. `python bench.py`

Shapes: q, o and do (B, H, T, D), k and v (B, H_kv, T, D).
"""

import csv
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from data.text import counted
from lab.charts import memory_picture, speed_picture
from lab.entrants import IMPLS, OURS, PASSES, SDPA, Attention, Case, attention_of, entrants
from lab.files import ROUNDED, Results
from lab.meter import OutOfMemory, median_ms, memory_for, peak_bytes
from lab.settings import Bench
from lab.traffic import redraw
from training.machine import DTYPES, peak_flops, pick_device

# H_kv is empty if it equals H; window, documents and block_mask are empty if there is none.
COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D"]
COLUMNS += ["causal", "window", "documents", "block_mask", "share", "dropout_p", "tile", "pass", *ROUNDED]
TURNS = {"cuda": 3}  # of each implementation at each case: single turns differ by up to 9 % (LOG.md)


def race(cfg: Bench) -> None:
    """Checks, races and draws. Appends the rows to results.csv in the folder out and draws the pictures there.

    Raises ValueError if one of ours was named and cannot run, if nothing could be timed, or if results.csv has other
    columns; RuntimeError if one of ours is wrong.
    """
    device, dtype, out = pick_device(cfg.device), cfg.dtype, Path(cfg.out)
    names, results = entrants(cfg.impls, device), Results(out, "results.csv", COLUMNS)
    told: list[str] = []  # reasons why peers cannot run, each printed once
    names = check(names, checked(cfg.series()), cfg.block, device, DTYPES[dtype], told)
    if not names:
        raise ValueError(f"impls={cfg.impls}: none of them runs here; {'; '.join(told)}")

    peak = None if dtype == "float32" else peak_flops(device)  # only the peak in 16 bits is known
    results.begin(device, dtype)
    too_large = ""
    for cases in cfg.series():
        show_head(cases[0], device, peak)
        ended: dict[str, str] = {}  # implementations that have dropped out of this series, and the word that says why
        pace: dict[str, float] = {}  # seconds per FLOP, at the length before
        for case in cases:
            few = "use fewer tokens= or shorter lengths="
            try:
                with memory_for(f"q, k, v and do of {counted(case.B, 'sequence')} of {case.T} tokens", few):
                    x = inputs(case, device, DTYPES[dtype])
            except OutOfMemory as error:
                too_large = str(error)
                print(too_large, flush=True)
                break  # nor do greater lengths fit
            # The length before predicts how long this one takes.
            slow = [name for name in names if pace.get(name, 0.0) * case.flops("forward+backward") > cfg.patience]
            ended = dict.fromkeys(slow, "slow") | ended
            weighed = weigh_in_turns(names, case, cfg.block, x, told, ended)
            for name, found in weighed.items():
                if not isinstance(found, str):
                    pace[name] = found[-1]["ms"] / 1e3 / case.flops("forward+backward")
            show(case, weighed, device, peak)
            results.append(rows_of(case, weighed, cfg.block))
    if not results.rows:
        raise ValueError(f"nothing could be timed: {too_large or '; '.join(told)}")
    results.end(pictures=draw(results.rows, out))


def weigh_in_turns(
    names: list[str], case: Case, block: int, x: list[Tensor], told: list[str], ended: dict[str, str]
) -> dict[str, list[dict] | str]:
    """For each implementation the rows of weigh(), of each pass that of its median turn; or the word in their place.
    Enters into `ended` who drops out here."""
    turns: dict[str, list[list[dict]]] = {name: [] for name in names}
    made: dict[str, Attention] = {}
    for _, name in product(range(TURNS.get(x[0].device.type, 1)), names):
        found = ended.get(name) or attempt(told, weigh, name, case, block, x, made)
        if isinstance(found, str):
            ended[name] = found
        else:
            turns[name].append(found)
    return {name: middle(turns[name]) if turns[name] else ended[name] for name in names}


def rows_of(case: Case, weighed: dict[str, list[dict] | str], block: int) -> list[dict]:
    """The rows of a case. Running out of memory is a result too: rows without numbers."""
    rows = []
    for name, found in weighed.items():
        if isinstance(found, str):
            found = [{"pass": which} | dict.fromkeys(ROUNDED) for which in PASSES] if found == "memory" else []
        shape = {"impl": name} | cells_in(case) | {"share": case.share, "tile": block if name == "tiled" else None}
        rows += [shape | passed for passed in found]
    return rows


def draw(rows: list[dict], out: Path) -> list[str]:
    """Draws the pictures of these rows in the folder `out`. Returns their paths."""
    pictures = [str(speed_picture(rows, out / "speed.png"))]
    if len({row["B"] for row in rows}) == 1:  # a smaller batch at a greater length would hide the effect of length
        pictures.append(str(memory_picture(rows, out / "memory.png")))
    return pictures


def pictures(cfg: Bench) -> None:
    """Draws the pictures of these cases again, from results.csv in the folder out; and traffic.png.

    If a case has several rows, it takes the last one. It shows only the device of the very last row.
    Raises ValueError if results.csv is missing, has other columns, or has no row of these cases.
    """
    series, out = cfg.series(), Path(cfg.out)
    results = Results(out, "results.csv", COLUMNS).path
    if not results.exists():
        raise ValueError(f"{results} is not there; race first, or use another out")
    wanted = {tuple(cells_of(case).items()): case for cases in series for case in cases}
    found: dict[tuple, dict] = {}
    with open(results, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple((name, row[name]) for name in cells_of(series[0][0]))
            if key in wanted and row["dtype"] == cfg.dtype and row["impl"] in (cfg.impls or IMPLS):
                measured = {name: float(row[name]) if row[name] else None for name in ROUNDED}
                place = row["device"], row["impl"], row["pass"], key
                found.pop(place, None)
                found[place] = row | cells_in(wanted[key]) | measured
    rows = [row for row in found.values() if row["device"] == list(found.values())[-1]["device"]]
    if not rows:
        raise ValueError(f"{results} has no row of these cases in {cfg.dtype}; give the keys of their race")
    drawn = draw(rows, out)
    if (out / "traffic.csv").exists():
        drawn.append(str(redraw(out)))
    print(json.dumps({"results": str(results), "pictures": drawn}))


def cells_in(case: Case) -> dict:
    """A case as cells of a row."""
    return asdict(case) | {"block_mask": None if case.block_mask is None else "/".join(case.block_mask)}


def cells_of(case: Case) -> dict[str, str]:
    """The same as text, as in results.csv."""
    return {name: "" if value is None else str(value) for name, value in cells_in(case).items()}


def checked(series: list[list[Case]]) -> list[Case]:
    """Small cases to check: one for each mask, head size and dropout of the race, and the same without dropout."""
    T = 333  # no tile size divides it; windows and documents are cut so that they hide keys
    found: dict[Case, None] = {}
    for case in (cases[0] for cases in series):
        rules = {key: min(T // 3, value) for key in ("window", "documents") if (value := getattr(case, key))}
        small = replace(case, B=2, H=2, T=T, H_kv=None if case.H_kv is None else 1, **rules)
        found |= {replace(small, dropout_p=0.0): None, small: None}
    return list(found)


def show_head(case: Case, device: torch.device, peak: float | None) -> None:
    """Prints the lines above the table of a series: what its cases have in common, and the columns."""
    print(f"\n{case.title()}" + (f"; peak {peak / 1e12:.0f} TFLOP/s" if peak else ""))
    share = f"{'% peak':>7}" if peak else ""
    each = f"{'ms':>9}{'TFLOP/s' if device.type == 'cuda' else 'GFLOP/s':>9}{share}"
    print(" " * 27 + "".join(f"{which:>{len(each)}}" for which in PASSES))
    print(f"{'T':>7}{'B':>4}  {'':14}{each * 3}{'x fastest':>10}{'MiB':>8}", flush=True)


def show(case: Case, weighed: dict[str, list[dict] | str], device: torch.device, peak: float | None) -> None:
    """Prints a line for each implementation at one length: for each pass ms, FLOP/s and the share of the peak; then the
    time of both passes relative to the fastest, and their memory. Or a word instead of the numbers."""
    fastest = min((found[-1]["ms"] for found in weighed.values() if isinstance(found, list)), default=0.0)
    for name, found in weighed.items():
        line = f"{case.T:>7}{case.B:>4}  {name:14}"
        if isinstance(found, str):
            print(f"{line}{found:>9}", flush=True)
            continue
        for passed in found:
            line += f"{short(passed['ms']):>9}{short(passed['tflops'] * (1 if device.type == 'cuda' else 1e3)):>9}"
            line += f"{passed['tflops'] * 1e12 / peak:>7.0%}" if peak else ""
        print(f"{line}{found[-1]['ms'] / fastest:>10.2f}{short(found[-1]['peak_mib']):>8}", flush=True)


def short(x: float) -> str:
    """x with three digits, or as an integer if that has more."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.3g}"


def attempt(told: list[str], action: Callable, name: str, *arguments):
    """Returns action(name, *arguments), or a word: "memory" if it ran out of memory, "-" if a peer cannot do it.

    Prints the reason of the peer once. An error in one of ours is a bug and is raised.
    """
    try:
        # torch gives the reason why it has no kernel in a warning, then raises an error without it.
        with warnings.catch_warnings(record=name in SDPA) as said:
            return action(name, *arguments)
    except (ImportError, RuntimeError, AssertionError, ValueError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):  # the CPU's allocator has no own error type
            return "memory"
        if name in OURS:
            raise
        words = str(said[-1].message) if said else str(error)
        reason = f"{name}: {words.partition(' (Triggered')[0].partition(chr(10))[0]}"
        if reason not in told:
            print(reason, flush=True)
            told.append(reason)
        return "-"


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do of a case, the same at every call. They are random, because matrix products are faster on zeros.
    do is a full tensor, because kernels are faster on the expanded scalar that o.sum() would give."""
    generator = torch.Generator(device).manual_seed(case.T)
    heads = case.H, case.H_kv or case.H, case.H_kv or case.H, case.H  # of q, k, v, do
    shapes = [(case.B, H, case.T, case.D) for H in heads]
    return [torch.randn(s, generator=generator, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def forward_and_backward(f: Callable, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk and dv of f. x: q, k, v and do."""
    q, k, v, do = x
    o = f(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def gradients(name: str, case: Case, block: int, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk and dv of the implementation `name`."""
    return forward_and_backward(attention_of(name, case, block, x[0].device), x)


def check(
    names: list[str], cases: list[Case], block: int, device: torch.device, dtype: torch.dtype, told: list[str]
) -> list[str]:
    """The names of the implementations that are right: in every case each of o, dq, dk, dv is within
    2 * (naive's error + eps * max |reference|) of float64. Peers are compared without dropout only, because they drop
    other weights than ours do.

    Raises RuntimeError if one of ours is wrong.
    """
    problems = [(case, *allowance(case, block, device, dtype)) for case in cases]
    kept = []
    for name in names:
        worst: list[float] = []  # error / allowed, over the cases that the implementation can do
        wrong = ""
        for case, x, right, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(told, gradients, name, case, block, x)
            if isinstance(found, str):
                continue  # the race tries again, and prints the word
            errors = [float((f - r).abs().max()) for f, r in zip(found, right, strict=True)]
            if not all(e <= a for e, a in zip(errors, allowed, strict=True)):  # "not <=", so that NaN counts as wrong
                wrong = f"{name} is further from float64 than {allowed} in o, dq, dk, dv: {errors}, {case}"
                break
            worst += [0.0, *(e / a for e, a in zip(errors, allowed, strict=True) if a)]  # a is 0: nothing is visible
        if wrong and name in OURS:
            raise RuntimeError(f"{wrong}: nothing is timed")
        if wrong:
            print(f"{wrong}: left out", flush=True)
        elif worst:
            kept.append(name)
            print(f"check {name:14} right: {max(worst):.2f} of the allowed error, at most", flush=True)
    return kept


def allowance(
    case: Case, block: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """A case's inputs, its o, dq, dk and dv in float64, and the error that is allowed in each of them."""
    x = inputs(case, device, dtype)
    right = gradients("naive", case, block, [t.detach().double().requires_grad_() for t in x])
    # A result that is 0 throughout, as dq is of rows that see one key, is rounded at the scale of the others.
    largest = [float(r.abs().max()) for r in right]
    allowed = [
        2 * (float((found - r).abs().max()) + torch.finfo(found.dtype).eps * (scale or max(largest)))
        for found, r, scale in zip(gradients("naive", case, block, x), right, largest, strict=True)
    ]
    return x, right, allowed


def middle(turns: list[list[dict]]) -> list[dict]:
    """Of the rows that weigh() returned in several turns, for each pass the one with the median time."""
    return [sorted(rows, key=lambda row: row["ms"])[len(rows) // 2] for rows in zip(*turns, strict=True)]


def weigh(name: str, case: Case, block: int, x: list[Tensor], made: dict[str, Attention]) -> list[dict]:
    """Measures one implementation: a row for each pass with its name, ms, tflops and peak_mib (for both passes
    together). made: what attention_of() has made for this case, so that FlexAttention is compiled once."""
    q, k, v, do = x
    f = made.get(name) or made.setdefault(name, attention_of(name, case, block, q.device))
    peak = peak_bytes(lambda: forward_and_backward(f, x), q.device)
    forward = median_ms(lambda: f(q, k, v), q.device)
    o = f(q, k, v)
    backward = median_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), q.device)
    ms = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    rows = [{"pass": which, "ms": ms[which], "tflops": case.flops(which) / ms[which] / 1e9} for which in PASSES]
    return [row | {"peak_mib": peak / 2**20 if row["pass"] == "forward+backward" else None} for row in rows]
