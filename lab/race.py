"""Checks each attention, then measures its speed and memory. `python bench.py`

Shapes: q, o and do (B, H, T, D), k and v (B, H_kv, T, D).
"""

import csv
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.text import counted
from kernels.problem import Problem
from lab.charts import memory_picture, speed_picture
from lab.meter import median_ms, peak_bytes
from lab.traffic import redraw
from model.attention import AttentionConfig, attention, blocks_of, resolve
from model.mask import WHOLE, Tiling, visible
from training.machine import DTYPES, about, is_out_of_memory, peak_flops

# H_kv is empty if it equals H; window, documents and block_mask are empty if there is none.
COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D"]
COLUMNS += ["causal", "window", "documents", "block_mask", "share", "dropout_p", "tile"]
MEASURED = ("ms", "tflops", "peak_mib")
COLUMNS += ["pass", *MEASURED]
PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # FLOPs, in those of a forward
OURS = ("naive", "tiled", "triton")
# One backend at a time. If torch could choose, it might run another backend than the figure names.
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLS = (*OURS, *SDPA, "flex", "flash4")
TURNS = {"cuda": 3}  # of each implementation at each case: single turns differ by up to 9 % (LOG.md)
CPU = torch.device("cpu")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One problem of the race, for q (B, H, T, D), k and v (B, H_kv, T, D)."""

    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float
    H_kv: int | None = None  # None: H
    window: int | None = None
    documents: int | None = None  # mean length of a document in tokens; None: one document
    block_mask: tuple[str, ...] | None = None  # as in AttentionConfig, stretched over T x T

    def flops(self, which: str) -> float:
        """FLOPs of a pass. A forward has two products, q k^T and p v. Each takes 2 D FLOPs for each visible pair of
        query and key in each head."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * self.share

    @cached_property
    def share(self) -> float:
        """The share of the T x T pairs of query and key that is visible: 0 to 1, averaged over the batch.

        A causal mask alone counts as one half, as is usual, though the diagonal makes it slightly more.
        """
        if self.window is None and self.documents is None and self.block_mask is None:
            return 0.5 if self.causal else 1.0
        problem, pairs = self.problem(), 0.0
        for rows, visits in Tiling(problem, 512, 512).by_rows():
            for tile in visits:
                if tile.seen == WHOLE:
                    pairs += len(rows) * len(tile.columns)
                else:
                    seen = visible(problem, rows, tile.columns, CPU)  # (1 or B, R, S)
                    pairs += int(seen.sum()) / len(seen)
        return pairs / self.T**2

    def problem(self) -> Problem:
        """The Problem of the case, which holds its mask."""
        documents = documents_of(self)
        blocks = None if self.block_mask is None else blocks_of(self.block_mask, CPU)
        return Problem(
            self.T,
            self.T,
            causal=self.causal,
            window=self.window,
            documents_q=documents,
            documents_k=documents,
            blocks=blocks,
            block_size=self.block_size,
        )

    @property
    def block_size(self) -> int:
        """Width and height of a block in tokens, such that the block mask covers T x T."""
        across = 1 if self.block_mask is None else min(len(self.block_mask), len(self.block_mask[0]))
        return -(-self.T // across)

    def title(self) -> str:
        """What all lengths of a series have in common, in words."""
        words = [f"head size {self.D}", counted(self.H, "head") + (f" on {self.H_kv} of keys" if self.H_kv else "")]
        words.append("causal" if self.causal else "not causal")
        words += [f"window {self.window}"] * (self.window is not None)
        words += [f"documents of {counted(self.documents or 0, 'token')}"] * (self.documents is not None)
        words += [f"block mask {'/'.join(self.block_mask or ())}"] * (self.block_mask is not None)
        return ", ".join([*words, f"dropout {self.dropout_p:g}"])


def documents_of(case: Case) -> Tensor | None:
    """The document number of each token, int64 (B, T), or None. Each token begins a new document with the same
    probability, so lengths vary as in real text. The same at every call."""
    if case.documents is None:
        return None
    generator = torch.Generator().manual_seed(case.T)
    return (torch.rand(case.B, case.T, generator=generator) < 1 / case.documents).cumsum(1)


def race(
    series: list[list[Case]],
    *,
    impls: list[str] | None,
    dtype: str,
    block: int,
    patience: float,
    device: torch.device,
    out: Path,
) -> None:
    """Checks, races and draws. Appends the rows to results.csv in the folder `out` and draws the pictures there.

    series: lists of cases that differ only in length, shortest first; each list becomes a table on the screen. impls:
    names from IMPLS, or None for all that run here. block: tile size of tiled. patience: in seconds; a case is skipped
    if the length before it predicts that its forward and backward take longer.
    Raises ValueError if one of ours was named and cannot run, if nothing could be timed, or if results.csv has other
    columns; RuntimeError if one of ours is wrong.
    """
    facts = {key: value for key, value in about(device).items() if key in COLUMNS}
    names, results = entrants(impls, device), results_in(out)
    told: list[str] = []  # reasons why peers cannot run, each printed once
    names = check(names, checked(series), block, device, DTYPES[dtype], told)
    if not names:
        raise ValueError(f"impls={impls}: none of them runs here; {'; '.join(told)}")

    peak = None if dtype == "float32" else peak_flops(device)  # only the peak in 16 bits is known
    print(f"{facts['device']}, {dtype}, torch {facts['torch']}, triton {facts['triton']}", flush=True)
    rows, too_large = [], ""
    for cases in series:
        show_head(cases[0], device, peak)
        ended: dict[str, str] = {}  # implementations that have dropped out of this series, and the word that says why
        pace: dict[str, float] = {}  # seconds per FLOP, at the length before
        for case in cases:
            try:
                x = inputs(case, device, DTYPES[dtype])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size, few = counted(case.B, "sequence"), "use fewer tokens= or shorter lengths="
                too_large = f"out of memory with q, k, v and do of {size} of {case.T} tokens; {few}"
                print(too_large, flush=True)
                break  # nor do greater lengths fit
            turns: dict[str, list[list[dict]]] = {name: [] for name in names}
            made: dict[str, Attention] = {}
            for _ in range(TURNS.get(device.type, 1)):
                for name in names:
                    if pace.get(name, 0.0) * case.flops("forward+backward") > patience:
                        ended.setdefault(name, "slow")
                    found = ended.get(name) or attempt(told, weigh, name, case, block, x, made)
                    if isinstance(found, str):
                        ended[name] = found
                    else:
                        turns[name].append(found)
            fresh = []  # the rows of this case
            weighed = {name: middle(turns[name]) if turns[name] else ended[name] for name in names}
            for name, found in weighed.items():
                if not isinstance(found, str):
                    pace[name] = found[-1]["ms"] / 1e3 / case.flops("forward+backward")
                shape = cells_in(case) | {"share": case.share, "tile": block if name == "tiled" else None}
                fresh += [facts | {"impl": name, "dtype": dtype} | shape | passed for passed in numbers(found)]
            show(case, weighed, device, peak)
            append(results, fresh)  # now, so that a race that is cut short keeps its rows
            rows += fresh

    if not rows:
        raise ValueError(f"nothing could be timed: {too_large or '; '.join(told)}")
    print(json.dumps({"results": str(results), "pictures": draw(rows, out), "rows": rows}))


def draw(rows: list[dict], out: Path) -> list[str]:
    """Draws the pictures of these rows in the folder `out`. Returns their paths."""
    pictures = [str(speed_picture(rows, out / "speed.png"))]
    if len({row["B"] for row in rows}) == 1:  # a smaller batch at a greater length would hide the effect of length
        pictures.append(str(memory_picture(rows, out / "memory.png")))
    return pictures


def pictures(series: list[list[Case]], *, impls: list[str] | None, dtype: str, out: Path) -> None:
    """Draws the pictures of these cases again, from results.csv in the folder `out`; and traffic.png.

    If a case has several rows, it takes the last one. It shows only the device of the very last row.
    Raises ValueError if results.csv is missing, has other columns, or has no row of these cases.
    """
    results = results_in(out)
    if not results.exists():
        raise ValueError(f"{results} is not there; race first, or use another out")
    wanted = {tuple(cells_of(case).items()): case for cases in series for case in cases}
    found: dict[tuple, dict] = {}
    with open(results, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple((name, row[name]) for name in cells_of(series[0][0]))
            if key in wanted and row["dtype"] == dtype and row["impl"] in (impls or IMPLS):
                measured = {name: float(row[name]) if row[name] else None for name in MEASURED}
                place = row["device"], row["impl"], row["pass"], key
                found.pop(place, None)
                found[place] = row | cells_in(wanted[key]) | measured
    rows = [row for row in found.values() if row["device"] == list(found.values())[-1]["device"]]
    if not rows:
        raise ValueError(f"{results} has no row of these cases in {dtype}; give the keys with which they were raced")
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


def numbers(found: list[dict] | str) -> list[dict]:
    """The rows for results.csv. found: the rows from weigh(), or the word in their place."""
    if isinstance(found, list):
        return found
    empty = dict.fromkeys(MEASURED)  # running out of memory is a result too
    return [{"pass": which} | empty for which in PASSES] if found == "memory" else []


def results_in(out: Path, name: str = "results.csv", columns: Sequence[str] = COLUMNS) -> Path:
    """The path of a table in the folder `out`. Makes the folder, so that it fails before anything is measured."""
    results = out / name
    out.mkdir(parents=True, exist_ok=True)
    if results.exists():
        with open(results, newline="", encoding="utf-8") as file:
            if next(csv.reader(file), columns) != columns:  # from another version; new rows would not fit its header
                raise ValueError(
                    f"{results} has other columns than this bench writes; move it away or use another out="
                )
    return results


def append(results: Path, rows: list[dict], columns: Sequence[str] = COLUMNS) -> None:
    """Appends rows to a table. Writes a header if the file is new."""
    with open(results, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if not file.tell():
            writer.writeheader()
        for row in rows:
            writer.writerow(row | {k: "" if row[k] is None else f"{row[k]:.4g}" for k in MEASURED if k in row})


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


def entrants(impls: list[str] | None, device: torch.device) -> list[str]:
    """impls, or all, without those of ours that cannot run on this device. ValueError if such a name was given."""
    names = []
    for name in dict.fromkeys(impls or IMPLS):
        try:
            if name in OURS:
                resolve(AttentionConfig(name), device.type)
            names.append(name)
        except ValueError as error:
            if impls:
                raise
            print(f"{name}: {error}", flush=True)
    return names


def attention_of(name: str, case: Case, block: int, device: torch.device) -> Attention:
    """f in o = f(q, k, v), for one case. Masks and seeds are made here, so they are not timed.

    Raises ImportError for a peer that is not installed, ValueError for dropout or a mask that the peer does not have.
    """
    causal, p = case.causal, case.dropout_p
    documents = documents_of(case)
    documents = None if documents is None else documents.to(device)
    if name in OURS:
        config = AttentionConfig(name, window=case.window, dropout_p=p)
        if case.block_mask is not None:
            config = replace(config, block_mask=list(case.block_mask), block_mask_size=case.block_size)
        if name == "tiled":
            config = replace(config, block_m=block, block_n=block)
        impl = resolve(config, device.type)
        seed = torch.tensor(case.T, device=device) if p else None
        return lambda q, k, v: attention(q, k, v, impl, causal=causal, seed=seed, documents=documents)
    rules = [rule for rule in ("window", "documents", "block_mask") if getattr(case, rule) is not None]
    if rules and name != "flex":
        raise ValueError(f"{', '.join(rules)}: only ours and FlexAttention can do that without a mask of T x T")
    if name in SDPA:

        def sdpa(q, k, v):
            with sdpa_kernel(SDPA[name]):
                return F.scaled_dot_product_attention(
                    q, k, v, dropout_p=p, is_causal=causal, enable_gqa=case.H_kv is not None
                )

        return sdpa
    if p:
        raise ValueError("has no dropout")
    if name == "flex":
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
        from torch.nn.attention.flex_attention import flex_attention

        # Static shapes are fastest, but each shape is compiled anew. After eight compilations torch would run it
        # uncompiled, with a table of T x T; reset() resets that count. The backward overwrites donated buffers, so it
        # could not be timed several times with them. One compile thread stays in this process: a pool of processes
        # would take CPU time from the launches of kernels.
        torch._dynamo.reset()
        functorch.donated_buffer = False
        inductor.compile_threads = 1
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = flex_mask(case, documents, device)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=case.H_kv is not None)
    assert name == "flash4"
    from flash_attn.cute import flash_attn_func

    def flash4(q, k, v):
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)  # (B, T, H, D)
        o = found[0] if isinstance(found, tuple) else found  # some versions also return lse
        return o.transpose(1, 2)

    return flash4


def flex_mask(case: Case, documents: Tensor | None, device: torch.device) -> Any:
    """FlexAttention's BlockMask of a case, or None if nothing is hidden. documents: from documents_of()."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    rules: list[Callable] = []
    if case.causal:
        rules.append(lambda b, h, i, j: i >= j)
    if (window := case.window) is not None:
        rules.append(lambda b, h, i, j: (j > i - window) & (j < i + window))
    if documents is not None:
        rules.append(lambda b, h, i, j: documents[b, i] == documents[b, j])
    if case.block_mask is not None:
        blocks, size = blocks_of(case.block_mask, device), case.block_size
        rules.append(lambda b, h, i, j: blocks[i // size, j // size])
    B = None if documents is None else case.B
    return create_block_mask(and_masks(*rules), B, None, case.T, case.T, device=device) if rules else None


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
    problems = []
    for case in cases:
        x = inputs(case, device, dtype)
        right = gradients("naive", case, block, [t.detach().double().requires_grad_() for t in x])
        # A result that is 0 throughout, as dq is of rows that see one key, is rounded at the scale of the others.
        largest = [float(r.abs().max()) for r in right]
        scales = [scale or max(largest) for scale in largest]
        allowed = [
            2 * (float((found - r).abs().max()) + torch.finfo(found.dtype).eps * scale)
            for found, r, scale in zip(gradients("naive", case, block, x), right, scales, strict=True)
        ]
        problems.append((case, x, right, allowed))

    kept = []
    for name in names:
        worst = None  # the largest error / allowed, over the cases that the implementation can do
        for case, x, right, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(told, gradients, name, case, block, x)
            if isinstance(found, str):
                continue  # the race tries again, and prints the word
            errors = [float((f - r).abs().max()) for f, r in zip(found, right, strict=True)]
            if not all(e <= a for e, a in zip(errors, allowed, strict=True)):  # "not <=", so that NaN counts as wrong
                wrong = f"{name} is further from float64 than {allowed} in o, dq, dk, dv: {errors}, {case}"
                if name in OURS:
                    raise RuntimeError(f"{wrong}: nothing is timed")
                print(f"{wrong}: left out", flush=True)
                worst = None
                break
            # allowed is 0 where nothing is visible
            worst = max([worst or 0.0, *(e / a for e, a in zip(errors, allowed, strict=True) if a)])
        if worst is not None:
            kept.append(name)
            print(f"check {name:14} right: {worst:.2f} of the allowed error, at most", flush=True)
    return kept


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
