"""Check, then race and weigh: the speed and memory of each attention. `python bench.py`

Shapes: q, k, v, o and do (B, H, T, D).
"""

import csv
import itertools
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.meter import median_ms, peak_bytes
from model.attention import AttentionConfig, attention, resolve
from training.machine import about

COLUMNS = ["commit", "device", "torch", "triton", "impl", "dtype", "B", "H", "T", "D"]
COLUMNS += ["causal", "dropout_p", "tile", "pass", "ms", "tflops", "peak_mib"]
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


@dataclass(frozen=True)
class Case:
    """One problem of the race: q, k, v (B, H, T, D)."""

    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float

    def flops(self, which: str) -> float:
        """A forward is two products, q k^T and p v, of 2 T T D for every head; causal, half of them are needed."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * (0.5 if self.causal else 1.0)


def race(
    *,
    impls: list[str] | None,
    lengths: list[int],
    sizes: list[tuple[int, int]],
    tokens: int,
    causal: list[bool],
    dropout_p: list[float],
    dtype: str,
    block: int,
    patience: float,
    device: torch.device,
    out: Path,
) -> None:
    """Checks, races and draws: rows to results.csv in the folder `out`, below those that are there, and pictures.

    impls: of IMPLS, or None for all that run here. sizes: D and H. tokens: of a batch. block: of tiled. patience:
    seconds that a forward and backward may take, as the length before it predicts. Each series, the lengths of one
    size, dropout and mask, is a table on the screen.
    Raises ValueError where one of ours that was named cannot run, where nobody can, and where results.csv has other
    columns; RuntimeError where one of ours is wrong.
    """
    facts = {key: value for key, value in about(device).items() if key in COLUMNS}
    names, results = entrants(impls, device), results_in(out)
    told: list[str] = []  # what peers cannot do; each is printed once
    cases = [
        Case(1, 2, 333, D, masked, p)  # a length that no tile divides
        for (D, _), p, masked in itertools.product(sizes, dict.fromkeys([0.0, *dropout_p]), causal)
    ]
    names = check(names, cases, block, device, DTYPES[dtype], told)
    if not names:
        raise ValueError(f"impls={impls}: none of them runs here; {'; '.join(told)}")

    print(f"TFLOP/s on {facts['device']}, {dtype}, torch {facts['torch']}, triton {facts['triton']}")
    rows = []
    for (D, H), p, masked in itertools.product(sizes, dropout_p, causal):
        show(f"D {D}, H {H}, {'causal' if masked else 'not causal'}, dropout_p {p:g}", {name: name for name in names})
        ended: dict[str, str] = {}  # which implementations go no further in this series, and the word that says why
        pace: dict[str, float] = {}  # seconds a FLOP, at the length before
        for T in sorted(set(lengths)):
            case = Case(max(1, tokens // T), H, T, D, masked, p)
            x = inputs(case, device, DTYPES[dtype])
            fresh = []  # rows
            cells = {}  # name -> what the table says of each pass, and of memory
            for name in names:
                if pace.get(name, 0.0) * case.flops("forward+backward") > patience:
                    ended.setdefault(name, "slow")
                found = ended.get(name) or attempt(told, weigh, name, case, block, x)
                if isinstance(found, str):
                    ended[name] = found
                else:
                    pace[name] = found[-1]["ms"] / 1e3 / case.flops("forward+backward")
                numbers, cells[name] = told_of(found)
                shape = asdict(case) | {"tile": block if name == "tiled" else ""}
                fresh += [facts | {"impl": name, "dtype": dtype} | shape | passed for passed in numbers]
            for i, which in enumerate((*PASSES, "MiB")):
                show(f"T {T:>7}  B {case.B:>3}  {which}", {name: cells[name][i] for name in names})
            append(results, fresh)  # now: a race that is cut short has not been run in vain
            rows += fresh

    if not rows:
        raise ValueError(f"impls={impls}: none of them can do any of these cases; {'; '.join(told)}")
    pictures = [str(speed_picture(rows, out / "speed.png"))]
    if len({row["B"] for row in rows}) == 1:  # a smaller batch at a greater length would hide what the length takes
        pictures.append(str(memory_picture(rows, out / "memory.png")))
    print(json.dumps({"results": str(results), "pictures": pictures, "rows": rows}))


def told_of(found: list[dict] | str) -> tuple[list[dict], list[str]]:
    """The rows of the file and the cells of the table, for what weigh() found or for the word that stands for it."""
    if isinstance(found, list):
        return found, [f"{passed['tflops']:.3g}" for passed in found] + [f"{found[-1]['peak_mib']:.4g}"]
    empty = dict.fromkeys(("ms", "tflops", "peak_mib"))  # what does not fit is a result too
    return [{"pass": which} | empty for which in PASSES] if found == "memory" else [], [found] * 4


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
            writer.writerow(row | {k: f"{row[k]:.4g}" if row[k] else "" for k in ("ms", "tflops", "peak_mib")})


def show(title: str, cells: dict[str, str]) -> None:
    """A line of the table, a column an implementation."""
    print(f"{title:40}" + "".join(f"{cell:>{max(9, len(name) + 2)}}" for name, cell in cells.items()), flush=True)


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

    Raises ImportError for a peer that is not installed, ValueError for dropout that it does not have.
    """
    causal, p = case.causal, case.dropout_p
    if name in OURS:
        config = AttentionConfig(name, dropout_p=p)
        if name == "tiled":
            config = replace(config, block_m=block, block_n=block)
        impl = resolve(config, device.type)
        seed = torch.tensor(case.T, device=device) if p else None
        return lambda q, k, v: attention(q, k, v, impl, causal=causal, seed=seed)
    if name in SDPA:

        def sdpa(q, k, v):
            with sdpa_kernel(SDPA[name]):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)

        return sdpa
    if p:
        raise ValueError("has no dropout")
    if name == "flex":
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Static shapes are its fastest, and a compilation each. After eight of them torch would run it uncompiled, with
        # a table of T x T; reset() begins the count anew. A donated buffer is one that the backward writes over, which
        # a backward that is timed over and over cannot have.
        # Compiled in this process: a pool of others that wake up meanwhile would take cores from what starts kernels.
        torch._dynamo.reset()
        functorch.donated_buffer = False
        inductor.compile_threads = 1
        compiled = torch.compile(flex_attention, dynamic=False)
        T = case.T
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device) if causal else None
        return lambda q, k, v: compiled(q, k, v, block_mask=mask)
    assert name == "flash4"
    from flash_attn.cute import flash_attn_func

    def flash4(q, k, v):
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)  # (B, T, H, D)
        o = found[0] if isinstance(found, tuple) else found  # some versions hand out lse as well
        return o.transpose(1, 2)

    return flash4


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
    """q, k, v and do of a case, (B, H, T, D) each, the same at every call. Random, because a matrix product is
    faster on zeros, and a kernel that reads do is faster on the expanded scalar that o.sum() would give it."""
    generator = torch.Generator(device).manual_seed(case.T)
    shape = case.B, case.H, case.T, case.D
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True) for _ in range(4)]


def forward_and_backward(f: Callable, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv of f at x = q, k, v, do: all (B, H, T, D)."""
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


def new_figure(row: dict, width: float, height: float, title: str) -> Figure:
    """An empty figure, in inches, that says under its title where the row was measured."""
    figure = Figure(figsize=(width, height), layout="constrained")
    where = f"{row['device']}, {row['dtype']}, torch {row['torch']}, triton {row['triton']}, commit {row['commit']}"
    figure.suptitle(f"{title}\n{where}", fontsize=11)
    return figure


def look(impl: str) -> dict:
    """The same colour for an implementation in every picture; ours are drawn through, peers dashed."""
    ours = {"marker": "o", "linewidth": 2.0, "zorder": 3} if impl in OURS else {"marker": "s", "ls": "--", "ms": 4}
    return {"label": impl, "color": f"C{IMPLS.index(impl)}"} | ours


def over_length(axes, lengths: list[int]) -> None:
    """A logarithmic axis of context length, with a tick at each length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_xlabel("context length T (tokens)")
    axes.grid(alpha=0.3)


def speed_picture(rows: list[dict], path: Path) -> Path:
    """TFLOP/s over length: a panel for each head size and pass, a row of them for each dropout. Causal, if that ran."""
    causal = rows[0]["causal"]
    lengths = sorted({row["T"] for row in rows})
    across = list(itertools.product(sorted({row["D"] for row in rows}), ("forward", "backward")))
    down = sorted({row["dropout_p"] for row in rows})
    title = f"speed of attention, {'causal' if causal else 'not causal'}"
    figure = new_figure(rows[0], max(10.0, 3.4 * len(across)), 3.1 * len(down) + 1.2, title)
    grid = figure.subplots(len(down), len(across), squeeze=False)
    lines = {}  # one of each implementation, for the legend
    for p, line_of_axes in zip(down, grid, strict=True):
        for (D, which), axes in zip(across, line_of_axes, strict=True):
            wanted = {"causal": causal, "dropout_p": p, "D": D, "pass": which}
            here = [row for row in rows if wanted.items() <= row.items() and row["ms"]]
            for impl in dict.fromkeys(row["impl"] for row in here):
                mine = [(row["T"], row["tflops"]) for row in here if row["impl"] == impl]
                (lines[impl],) = axes.plot(*zip(*mine, strict=True), **look(impl))
            over_length(axes, lengths)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{which}, D = {D}" + (f", dropout {p:g}" if p else ""), fontsize=10)
        line_of_axes[0].set_ylabel("TFLOP/s")
    figure.legend(handles=[lines[impl] for impl in IMPLS if impl in lines], loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=110)
    return path


def memory_picture(rows: list[dict], path: Path) -> Path:
    """Peak memory over length, once on plain axes, where the square bends away, and once on logarithmic ones."""
    series = {key: rows[0][key] for key in ("D", "causal", "dropout_p")} | {"pass": "forward+backward"}
    rows = [row for row in rows if series.items() <= row.items()]
    title = f"memory of attention, B={rows[0]['B']}, H={rows[0]['H']}, D={rows[0]['D']}"
    title += f", {'causal' if series['causal'] else 'not causal'}, dropout {series['dropout_p']:g}"
    figure = new_figure(rows[0], 10, 5, title)
    died: dict[int, list[str]] = {}  # length -> who was out of memory there first
    for impl in dict.fromkeys(row["impl"] for row in rows):
        too_long = [row["T"] for row in rows if row["impl"] == impl and not row["peak_mib"]]
        if too_long:
            died.setdefault(min(too_long), []).append(impl)
    for axes, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
        for impl in dict.fromkeys(row["impl"] for row in rows):
            points = [(row["T"], row["peak_mib"] / 1024) for row in rows if row["impl"] == impl and row["peak_mib"]]
            if points:
                axes.plot(*zip(*points, strict=True), **look(impl))
        for T, impls in died.items():
            colour = look(impls[0])["color"]
            axes.axvline(T, color=colour, ls=":")
            middle = axes.get_xaxis_transform()  # x in tokens, y in parts of the frame
            died_here = f"{', '.join(impls)}: out of memory "
            axes.text(T, 0.97, died_here, color=colour, rotation=90, ha="right", va="top", transform=middle, size=9)
        axes.set_ylabel("peak of forward + backward (GiB)")
        if scale == "log":
            over_length(axes, sorted({row["T"] for row in rows}))
            axes.set_yscale("log", base=10)
            axes.set_title("the same on logarithmic axes", fontsize=10)
        else:
            axes.set_xlabel("context length T (tokens)")
            axes.grid(alpha=0.3)
            axes.set_title("naive holds T x T weights, the others a tile of them", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=130)
    return path
