"""Check, then race and weigh: the speed and memory of each attention. `python bench.py`

Shapes: q, o and do (B, H, T, D), k and v (B, H_kv, T, D).
"""

import csv
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.problem import Problem
from lab.charts import memory_picture, speed_picture
from lab.meter import median_ms, peak_bytes
from lab.traffic import redraw
from model.attention import AttentionConfig, attention, blocks_of, resolve
from model.mask import WHOLE, Tiling, visible
from training.machine import about, peak_flops

# H_kv is empty where it is H, and window, documents and block_mask where there is none.
COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "H_kv", "T", "D"]
COLUMNS += ["causal", "window", "documents", "block_mask", "share", "dropout_p", "tile"]
MEASURED = ("ms", "tflops", "peak_mib")
COLUMNS += ["pass", *MEASURED]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # in FLOPs of a forward
OURS = ("naive", "tiled", "triton")
# One backend each: left to choose, torch may run another than the one whose name the figure would carry.
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLS = (*OURS, *SDPA, "flex", "flash4")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One problem of the race: q (B, H, T, D), k and v (B, H_kv, T, D)."""

    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float
    H_kv: int | None = None  # None: H
    window: int | None = None
    documents: int | None = None  # tokens that a document has in the mean; None: one document
    block_mask: tuple[str, ...] | None = None  # a picture as AttentionConfig has it, stretched over T x T

    def flops(self, which: str) -> float:
        """A forward is two products, q k^T and p v, of 2 D for every visible pair of query and key in every head."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * self.share

    @cached_property
    def share(self) -> float:
        """How many of the T x T pairs of query and key the mask leaves visible: 0 to 1, the mean over the batch.

        Half of them where the mask is causal and nothing else: everybody counts the diagonal like that.
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
        """Its mask."""
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
        """Tokens a block of the picture is wide and high: it covers all of T x T."""
        across = 1 if self.block_mask is None else min(len(self.block_mask), len(self.block_mask[0]))
        return -(-self.T // across)

    def title(self) -> str:
        """What all lengths of a series share."""
        words = [f"head size {self.D}", f"{self.H} heads" + (f" on {self.H_kv} of keys" if self.H_kv else "")]
        words.append("causal" if self.causal else "not causal")
        words += [f"window {self.window}"] * (self.window is not None)
        words += [f"documents of {self.documents} tokens"] * (self.documents is not None)
        words += [f"block mask {'/'.join(self.block_mask or ())}"] * (self.block_mask is not None)
        return ", ".join([*words, f"dropout {self.dropout_p:g}"])


def documents_of(case: Case) -> Tensor | None:
    """int64 (B, T): which document each token is in, or None. A new one begins at each token with the same probability,
    so lengths differ as much as they do in a text. The same at every call."""
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
    """Checks, races and draws: rows to results.csv in the folder `out`, below those that are there, and pictures.

    series: cases that differ in their length alone, shortest first; each list is a table on the screen. impls: of
    IMPLS, or None for all that run here. block: of tiled. patience: seconds that a forward and backward may take, as
    the length before it predicts.
    Raises ValueError where one of ours that was named cannot run, where nobody can, and where results.csv has other
    columns; RuntimeError where one of ours is wrong.
    """
    facts = {key: value for key, value in about(device).items() if key in COLUMNS}
    names, results = entrants(impls, device), results_in(out)
    told: list[str] = []  # what peers cannot do; each is printed once
    names = check(names, checked(series), block, device, DTYPES[dtype], told)
    if not names:
        raise ValueError(f"impls={impls}: none of them runs here; {'; '.join(told)}")

    peak = None if dtype == "float32" else peak_flops(device)  # that of the 16-bit formats is known
    print(f"{facts['device']}, {dtype}, torch {facts['torch']}, triton {facts['triton']}", flush=True)
    rows = []
    for cases in series:
        show_head(cases[0], device, peak)
        ended: dict[str, str] = {}  # which implementations go no further in this series, and the word that says why
        pace: dict[str, float] = {}  # seconds a FLOP, at the length before
        for case in cases:
            x = inputs(case, device, DTYPES[dtype])
            fresh = []  # rows
            weighed: dict[str, list[dict] | str] = {}
            for name in names:
                if pace.get(name, 0.0) * case.flops("forward+backward") > patience:
                    ended.setdefault(name, "slow")
                found = ended.get(name) or attempt(told, weigh, name, case, block, x)
                if isinstance(found, str):
                    ended[name] = found
                else:
                    pace[name] = found[-1]["ms"] / 1e3 / case.flops("forward+backward")
                weighed[name] = found
                shape = cells_in(case) | {"share": case.share, "tile": block if name == "tiled" else None}
                fresh += [facts | {"impl": name, "dtype": dtype} | shape | passed for passed in numbers(found)]
            show(case, weighed, device, peak)
            append(results, fresh)  # now: a race that is cut short has not been run in vain
            rows += fresh

    if not rows:
        raise ValueError(f"impls={impls}: none of them can do any of these cases; {'; '.join(told)}")
    print(json.dumps({"results": str(results), "pictures": draw(rows, out), "rows": rows}))


def draw(rows: list[dict], out: Path) -> list[str]:
    """The pictures of these rows in the folder `out`: their paths."""
    pictures = [str(speed_picture(rows, out / "speed.png"))]
    if len({row["B"] for row in rows}) == 1:  # a smaller batch at a greater length would hide what the length takes
        pictures.append(str(memory_picture(rows, out / "memory.png")))
    return pictures


def pictures(series: list[list[Case]], *, impls: list[str] | None, dtype: str, out: Path) -> None:
    """Draws these cases again, from the rows that results.csv in the folder `out` has of them; and traffic.png.

    Of several rows of one case the last one counts, and only the device of the last of all.
    Raises ValueError where results.csv is missing, has other columns, or has no row of these cases.
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
    """A case as columns of a row."""
    return asdict(case) | {"block_mask": None if case.block_mask is None else "/".join(case.block_mask)}


def cells_of(case: Case) -> dict[str, str]:
    """The same as results.csv has them."""
    return {name: "" if value is None else str(value) for name, value in cells_in(case).items()}


def checked(series: list[list[Case]]) -> list[Case]:
    """Small cases, one for each mask, head size and dropout of the race, and for each without dropout too."""
    T = 333  # a length that no tile divides; a mask's rules are short enough to hide keys of it
    found: dict[Case, None] = {}
    for case in (cases[0] for cases in series):
        rules = {key: min(T // 3, value) for key in ("window", "documents") if (value := getattr(case, key))}
        small = replace(case, B=2, H=2, T=T, H_kv=None if case.H_kv is None else 1, **rules)
        found |= {replace(small, dropout_p=0.0): None, small: None}
    return list(found)


def numbers(found: list[dict] | str) -> list[dict]:
    """The rows of the file, for what weigh() found or for the word that stands for it."""
    if isinstance(found, list):
        return found
    empty = dict.fromkeys(MEASURED)  # what does not fit is a result too
    return [{"pass": which} | empty for which in PASSES] if found == "memory" else []


def results_in(out: Path) -> Path:
    """results.csv in the folder `out`, which is made now: where it cannot be, nothing has been measured in vain."""
    results = out / "results.csv"
    out.mkdir(parents=True, exist_ok=True)
    if results.exists():
        with open(results, newline="", encoding="utf-8") as file:
            if next(csv.reader(file), COLUMNS) != COLUMNS:  # of another version; rows below would be misread
                raise ValueError(
                    f"{results} has other columns than this bench writes; move it away or use another out="
                )
    return results


def append(results: Path, rows: list[dict]) -> None:
    """Adds rows to results.csv, under a header where the file is new."""
    with open(results, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        for row in rows:
            writer.writerow(row | {k: f"{row[k]:.4g}" if row[k] else "" for k in MEASURED})


def show_head(case: Case, device: torch.device, peak: float | None) -> None:
    """The lines above a series' table: what it has in common, and the columns."""
    print(f"\n{case.title()}" + (f"; peak {peak / 1e12:.0f} TFLOP/s" if peak else ""))
    share = f"{'% peak':>7}" if peak else ""
    each = f"{'ms':>9}{'TFLOP/s' if device.type == 'cuda' else 'GFLOP/s':>9}{share}"
    print(" " * 27 + "".join(f"{which:>{len(each)}}" for which in PASSES))
    print(f"{'T':>7}{'B':>4}  {'':14}{each * 3}{'x fastest':>10}{'MiB':>8}", flush=True)


def show(case: Case, weighed: dict[str, list[dict] | str], device: torch.device, peak: float | None) -> None:
    """A line for each implementation at one length: of each pass ms, FLOP/s and the share of the peak, how many times
    as long as the fastest both passes take, and their memory. Or the word that stands for all of it."""
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
    """Three digits, or all of those before the point."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.3g}"


def entrants(impls: list[str] | None, device: torch.device) -> list[str]:
    """impls, or all, without those of ours that have no place on this device; ValueError where one was named."""
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


def attention_of(name: str, case: Case, block: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """o = f(q, k, v) for one case; what can be made beforehand (a mask, a seed) has been, so that it is not timed.

    Raises ImportError for a peer that is not installed, ValueError for dropout or a mask that it does not have.
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

        # Static shapes are its fastest, and a compilation each. After eight of them torch would run it uncompiled, with
        # a table of T x T; reset() begins the count anew. A donated buffer is one that the backward writes over, which
        # a backward that is timed over and over cannot have.
        # Compiled in this process: a pool of others that wake up meanwhile would take cores from what starts kernels.
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
        o = found[0] if isinstance(found, tuple) else found  # some versions hand out lse as well
        return o.transpose(1, 2)

    return flash4


def flex_mask(case: Case, documents: Tensor | None, device: torch.device) -> Any:
    """FlexAttention's BlockMask of a case, or None where nothing is hidden. documents: as documents_of() gives them."""
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
    """action(name, *arguments), or a word: "memory" where that ran out, "-" where a peer cannot do it.

    The peer's reason is printed, once. What goes wrong in ours is a bug, and is raised.
    """
    try:
        # torch says as a warning why it has no kernel, and then raises an error that does not say it.
        with warnings.catch_warnings(record=name in SDPA) as said:
            return action(name, *arguments)
    except (ImportError, RuntimeError, AssertionError, ValueError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):  # a CPU's allocator has no type of error
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
    """q, k, v and do of a case, the same at every call. Random, because a matrix product is faster on zeros, and a
    kernel that reads do is faster on the expanded scalar that o.sum() would give it."""
    generator = torch.Generator(device).manual_seed(case.T)
    heads = case.H, case.H_kv or case.H, case.H_kv or case.H, case.H  # of q, k, v, do
    shapes = [(case.B, H, case.T, case.D) for H in heads]
    return [torch.randn(s, generator=generator, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def forward_and_backward(f: Callable, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv of f at x = q, k, v, do."""
    q, k, v, do = x
    o = f(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def gradients(name: str, case: Case, block: int, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv of the attention called name."""
    return forward_and_backward(attention_of(name, case, block, x[0].device), x)


def check(
    names: list[str], cases: list[Case], block: int, device: torch.device, dtype: torch.dtype, told: list[str]
) -> list[str]:
    """The names of those that are right: each of o, dq, dk, dv within 2 * (naive's error + eps * max |reference|) of
    float64, in every case. A peer drops other weights than ours do, so it is compared without dropout only.

    Raises RuntimeError for one of ours that is wrong.
    """
    problems = []
    for case in cases:
        x = inputs(case, device, dtype)
        right = gradients("naive", case, block, [t.detach().double().requires_grad_() for t in x])
        allowed = [
            2 * (float((found - r).abs().max()) + torch.finfo(found.dtype).eps * float(r.abs().max()))
            for found, r in zip(gradients("naive", case, block, x), right, strict=True)
        ]
        problems.append((case, x, right, allowed))

    kept = []
    for name in names:
        worst = None  # of error / allowed, over whatever the implementation can do
        for case, x, right, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(told, gradients, name, case, block, x)
            if isinstance(found, str):
                continue  # the race asks again, and leaves the cell empty
            errors = [float((f - r).abs().max()) for f, r in zip(found, right, strict=True)]
            worst = max([worst or 0.0, *(e / a for e, a in zip(errors, allowed, strict=True))])
            if not all(e <= a for e, a in zip(errors, allowed, strict=True)):  # NaN is not
                wrong = f"{name} is further from float64 than {allowed} in o, dq, dk, dv: {errors}, {case}"
                if name in OURS:
                    raise RuntimeError(f"{wrong}: nothing is timed")
                print(f"{wrong}: left out", flush=True)
                worst = None
                break
        if worst is not None:
            kept.append(name)
            print(f"check {name:14} right: {worst:.2f} of the allowed error, at most", flush=True)
    return kept


def weigh(name: str, case: Case, block: int, x: list[Tensor]) -> list[dict]:
    """Of each pass: its name, ms, tflops and, for both together, peak_mib."""
    q, k, v, do = x
    f = attention_of(name, case, block, q.device)
    peak = peak_bytes(lambda: forward_and_backward(f, x), q.device)
    forward = median_ms(lambda: f(q, k, v), q.device)
    o = f(q, k, v)
    backward = median_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), q.device)
    ms = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    rows = [{"pass": which, "ms": ms[which], "tflops": case.flops(which) / ms[which] / 1e9} for which in PASSES]
    return [row | {"peak_mib": peak / 2**20 if row["pass"] == "forward+backward" else None} for row in rows]
