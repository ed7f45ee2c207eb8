"""Check, then race and weigh: each attention's speed and memory, side by side in one run; or the words that it moves.

    python bench.py                                    on this machine, small enough for two CPU cores: under a minute
    python bench.py impls=[naive,tiled] lengths=[512,1024,2048,4096,8192] patience=10
    python bench.py lengths=[1024,4096,16384,65536] head_sizes=[64,128] heads=[12,16] tokens=32768 dtype=bf16 block=512
    python bench.py mode=traffic                       words between slow memory and chip, in both loop orders

mode=race. Ours (naive, tiled, triton) and the peers that are there (torch's kernels one by one, FlexAttention,
FlashAttention-4), with and without a causal mask and dropout. Each is compared with naive in float64 first: one of ours
that is wrong ends the bench, a peer that is wrong does not start. Forward and backward are timed apart (medians). Their
FLOPs are counted as everybody does, 4 B H T T D and 2.5 times that, half of it if causal, whatever was really computed.
MiB are the peak of one forward and backward above its inputs. In the table "-" is what an implementation cannot do
(why, is said once), "memory" what did not fit, and "slow" what would have taken longer than patience.

Rows go to results.csv; speed.png has TFLOP/s over length, memory.png the peaks of the first series, drawn where the
batch is the same at every length (tokens=1). All of it in runs/bench (docs/ has those of out=docs).

mode=traffic. One forward of one head, not causal, its loads and stores counted tile by tile as they happen, beside what
the papers predict; to traffic.csv and traffic.png. M, the words that the chip holds, sets the tiles as the first paper
does: block_n = M / 4D and block_m = min(block_n, D).
"""

import csv
import itertools
import json
import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import tiled
from model.attention import AttentionConfig, attention, resolve
from model.dropout import drop_threshold
from training import config
from training.machine import about, pick_device

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
TRAFFIC_READS = ("mode", "lengths", "head_sizes", "on_chip", "out")


@dataclass
class Config:
    mode: str = "race"  # race | traffic
    impls: list[str] | None = None  # of IMPLS; None: all that run here
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    head_sizes: list[int] = field(default_factory=lambda: [32])
    heads: list[int] = field(default_factory=lambda: [2])  # of each head size, or one number for all
    tokens: int = 1  # of a batch: B = max(1, tokens // T). A GPU is not filled by one short sequence; 32768 is usual
    causal: list[bool] = field(default_factory=lambda: [True, False])
    dropout_p: list[float] = field(default_factory=lambda: [0.0, 0.1])
    dtype: str = "float32"  # float32 | bf16 | fp16
    block: int = 128  # block_m and block_n of tiled
    patience: float = 1.0  # seconds that a forward and backward may take, as the length before it predicts
    on_chip: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768])  # traffic: M, in words
    device: str = "auto"
    out: str = "runs/bench"  # folder of tables and pictures

    def __post_init__(self):
        if self.mode not in ("race", "traffic"):
            raise ValueError(f"mode={self.mode} is not known; choose race or traffic")
        if not self.out:
            raise ValueError("out= is empty; give a folder or leave it out")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is not known; choose {', '.join(DTYPES)}")
        for key in fields(self):
            usual = key.default if key.default is not MISSING else key.default_factory()
            read = key.name in TRAFFIC_READS if self.mode == "traffic" else key.name != "on_chip"
            if not read and getattr(self, key.name) != usual:
                raise ValueError(
                    f"{key.name}={getattr(self, key.name)}: mode={self.mode} does not read it; leave it out"
                )
        for name in ("impls", "lengths", "head_sizes", "heads", "causal", "dropout_p", "on_chip"):
            if getattr(self, name) == []:
                raise ValueError(f"{name}=[]: nothing to measure; give at least one")
        for name in self.impls or []:
            if name not in IMPLS:
                raise ValueError(f"impls={self.impls}: {name} is not known; choose {', '.join(IMPLS)}")
        numbers = {"tokens": self.tokens, "block": self.block}
        for name in ("lengths", "head_sizes", "heads"):
            numbers |= {f"{name}[{i}]": value for i, value in enumerate(getattr(self, name))}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if len(self.heads) not in (1, len(self.head_sizes)):
            raise ValueError(
                f"heads={self.heads} for head_sizes={self.head_sizes}: give one for each head size, or one for all"
            )
        if not self.patience > 0:
            raise ValueError(f"patience={self.patience} must be above 0 seconds")
        for p in self.dropout_p:
            drop_threshold(p)
        if self.mode == "traffic":
            if len(self.head_sizes) > 1:
                raise ValueError(f"head_sizes={self.head_sizes}: mode=traffic counts for one; give one")
            for words in self.on_chip:
                if words < 4 * self.head_sizes[0]:
                    raise ValueError(
                        f"on_chip={words} holds no row of q, k, v and o: use {4 * self.head_sizes[0]} or more"
                    )


def main(cfg: Config) -> None:
    if cfg.mode == "traffic":
        measure_traffic(cfg)
    else:
        race(cfg)


# ---------------------------------------------------------------------------------------------------------------------
# Race. Shapes: q, k, v, o and do (B, H, T, D).


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    T: int
    D: int
    causal: bool
    dropout_p: float

    def flops(self, which: str) -> float:
        """A forward is two products, q k^T and p v, of 2 T T D for every head; causal, half of them are needed."""
        return PASSES[which] * 4 * self.B * self.H * self.T * self.T * self.D * (0.5 if self.causal else 1.0)


def race(cfg: Config) -> None:
    device = pick_device(cfg.device)
    facts = {key: value for key, value in about(device).items() if key in COLUMNS}
    names = entrants(cfg, device)
    out = Path(cfg.out)
    results = out / "results.csv"
    out.mkdir(parents=True, exist_ok=True)  # now: where it cannot be written, nothing has been measured in vain
    if results.exists():
        with open(results, newline="", encoding="utf-8") as file:
            if next(csv.reader(file), COLUMNS) != COLUMNS:  # of another version; rows below would be misread
                raise ValueError(
                    f"{results} has other columns than this bench writes; move it away or use another out="
                )
    told: list[str] = []  # what peers cannot do; each is printed once
    names = check(cfg, names, device, told)

    print(f"TFLOP/s on {facts['device']}, {cfg.dtype}, torch {facts['torch']}, triton {facts['triton']}")
    rows = []
    heads = cfg.heads * len(cfg.head_sizes) if len(cfg.heads) == 1 else cfg.heads
    sizes = zip(cfg.head_sizes, heads, strict=True)
    for (D, H), p, causal in itertools.product(sizes, cfg.dropout_p, cfg.causal):
        show(f"D {D}, H {H}, {'causal' if causal else 'not causal'}, dropout_p {p:g}", {name: name for name in names})
        ended: dict[str, str] = {}  # which implementations go no further in this series, and the word that says why
        pace: dict[str, float] = {}  # seconds a FLOP, at the length before
        for T in sorted(set(cfg.lengths)):
            case = Case(max(1, cfg.tokens // T), H, T, D, causal, p)
            x = problem(case, device, DTYPES[cfg.dtype])
            fresh = []  # rows
            cells = {}  # name -> what the table says of each pass, and of memory
            for name in names:
                if pace.get(name, 0.0) * case.flops("forward+backward") > cfg.patience:
                    ended.setdefault(name, "slow")
                found = ended.get(name) or attempt(told, weigh, name, case, cfg.block, x)
                if isinstance(found, str):
                    ended[name] = found
                    cells[name] = [found] * 4
                    empty = dict.fromkeys(("ms", "tflops", "peak_mib"))  # what does not fit is a result too
                    found = [{"pass": which} | empty for which in PASSES] if found == "memory" else []
                else:
                    pace[name] = found[-1]["ms"] / 1e3 / case.flops("forward+backward")
                    cells[name] = [f"{n['tflops']:.3g}" for n in found] + [f"{found[-1]['peak_mib']:.4g}"]
                shape = asdict(case) | {"tile": cfg.block if name == "tiled" else ""}
                fresh += [facts | {"impl": name, "dtype": cfg.dtype} | shape | numbers for numbers in found]
            for i, which in enumerate((*PASSES, "MiB")):
                show(f"T {T:>7}  B {case.B:>3}  {which}", {name: cells[name][i] for name in names})
            append(results, fresh)  # now: a race that is cut short has not been run in vain
            rows += fresh

    if not rows:
        raise ValueError(f"impls={cfg.impls}: none of them can do any of these cases; {'; '.join(told)}")
    pictures = [str(speed_picture(rows, out / "speed.png"))]
    if len({row["B"] for row in rows}) == 1:  # a smaller batch at a greater length would hide what the length takes
        pictures.append(str(memory_picture(rows, out / "memory.png")))
    print(json.dumps({"results": str(results), "pictures": pictures, "rows": rows}))


def append(results: Path, rows: list[dict]) -> None:
    with open(results, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        for row in rows:
            writer.writerow(row | {k: f"{row[k]:.4g}" if row[k] else "" for k in ("ms", "tflops", "peak_mib")})


def show(title: str, cells: dict[str, str]) -> None:
    """A line of the table, a column an implementation."""
    print(f"{title:40}" + "".join(f"{cell:>{max(9, len(name) + 2)}}" for name, cell in cells.items()), flush=True)


def entrants(cfg: Config, device: torch.device) -> list[str]:
    """cfg.impls, or all, without those of ours that have no place on this device; ValueError where one was named."""
    names = []
    for name in dict.fromkeys(cfg.impls or IMPLS):
        try:
            if name in OURS:
                resolve(AttentionConfig(name), device.type)
            names.append(name)
        except ValueError as error:
            if cfg.impls:
                raise
            print(f"{name}: {error}", flush=True)
    return names


def attention_of(name: str, case: Case, block: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """o = f(q, k, v) for one case; what can be made beforehand (a mask, a seed) has been, so that it is not timed.

    Raises ImportError for a peer that is not installed, ValueError for dropout that it does not have.
    """
    causal, p = case.causal, case.dropout_p
    if name in OURS:
        tile = (block, block) if name == "tiled" else ()
        impl = resolve(AttentionConfig(name, *tile, dropout_p=p), device.type)
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
        seen = (lambda b, h, i, j: i >= j) if causal else None
        mask = create_block_mask(seen, None, None, case.T, case.T, device=device) if causal else None
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


def problem(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and do, random: a matrix product is faster on zeros than on data, and a kernel that reads do is faster
    on the expanded scalar that o.sum() would give it."""
    generator = torch.Generator(device).manual_seed(case.T)
    made = {"generator": generator, "device": device, "dtype": dtype, "requires_grad": True}
    return [torch.randn(case.B, case.H, case.T, case.D, **made) for _ in range(4)]


def forward_and_backward(f: Callable, x: list[Tensor]) -> list[Tensor]:
    """o, dq, dk, dv."""
    q, k, v, do = x
    o = f(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def gradients(name: str, case: Case, block: int, x: list[Tensor]) -> list[Tensor]:
    return forward_and_backward(attention_of(name, case, block, x[0].device), x)


def check(cfg: Config, names: list[str], device: torch.device, told: list[str]) -> list[str]:
    """The names of those that are right: each of o, dq, dk, dv within 2 * (naive's error + eps * max |reference|) of
    float64, in every series. A peer drops other weights than ours do, so it is compared without dropout only.

    Raises RuntimeError for one of ours that is wrong, ValueError when nobody is left.
    """
    problems = []
    for D, p, causal in itertools.product(cfg.head_sizes, dict.fromkeys([0.0, *cfg.dropout_p]), cfg.causal):
        case = Case(1, 2, 333, D, causal, p)  # a length that no tile divides
        x = problem(case, device, DTYPES[cfg.dtype])
        right = gradients("naive", case, cfg.block, [t.detach().double().requires_grad_() for t in x])
        allowed = [
            2 * (float((found - r).abs().max()) + torch.finfo(found.dtype).eps * float(r.abs().max()))
            for found, r in zip(gradients("naive", case, cfg.block, x), right, strict=True)
        ]
        problems.append((case, x, right, allowed))

    kept = []
    for name in names:
        worst = None  # of error / allowed, over whatever the implementation can do
        for case, x, right, allowed in problems:
            found = "-" if case.dropout_p and name not in OURS else attempt(told, gradients, name, case, cfg.block, x)
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
    if not kept:
        raise ValueError(f"impls={cfg.impls}: none of them runs here; {'; '.join(told)}")
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


def peak_bytes(run: Callable, device: torch.device) -> int:
    """The most memory that one run takes above what was taken before."""
    if device.type != "cuda":
        with PeakBytes() as counted:
            run()
        return counted.peak
    run()  # compiles, and takes the workspaces that stay
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def median_ms(run: Callable, device: torch.device) -> float:
    """Milliseconds: the median of three runs or of as many as 0.1 s hold, after some that do not count."""
    if device.type == "cuda":
        from triton.testing import do_bench  # by the GPU's clock; empties the second-level cache before each run

        return do_bench(run, return_mode="median")
    run()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < 0.1:
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


class PeakBytes(TorchDispatchMode):
    """The most bytes that were alive at once in tensors made inside: exact, repeatable, and on any device.

    The process's own peak would count the allocator's slack and whatever else the process has done before.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.storages = {}  # id -> reference, of what was made inside and still is

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.storages:
                    self.storages[storage._cdata] = weakref.finalize(
                        storage, self.freed, storage._cdata, storage.nbytes()
                    )
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
        return out

    def freed(self, key: int, size: int) -> None:
        del self.storages[key]
        self.alive -= size


def new_figure(row: dict, width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    where = f"{row['device']}, {row['dtype']}, torch {row['torch']}, triton {row['triton']}, commit {row['commit']}"
    figure.suptitle(f"{title}\n{where}", fontsize=11)
    return figure


def look(impl: str) -> dict:
    """The same colour for an implementation in every picture; ours are drawn through, peers dashed."""
    ours = {"marker": "o", "linewidth": 2.0, "zorder": 3} if impl in OURS else {"marker": "s", "ls": "--", "ms": 4}
    return {"label": impl, "color": f"C{IMPLS.index(impl)}"} | ours


def over_length(axes, lengths: list[int]) -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Traffic.


class Traffic(TorchDispatchMode):
    """Words that one forward moves between slow memory and chip.

    tiled touches what has length T through load() and store() of model/tiled.py and nowhere else, so those are
    counted (adding to a tile reads it too). naive has no tiles: each of its operations reads its inputs from slow
    memory and writes its result there; views move nothing.
    """

    def __init__(self):
        super().__init__()
        self.words = 0
        self.load, self.store = tiled.load, tiled.store

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:  # a view too, under the hood
            self.words += sum(x.numel() for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out

    def counted_load(self, x, tile):
        tile = self.load(x, tile)
        self.words += tile.numel()
        return tile

    def counted_store(self, x, tile, values, add=None):
        self.words += values.numel() * (1 if add is None else 2)
        self.store(x, tile, values, add)


def traffic(impl: AttentionConfig, N: int, D: int) -> int:
    """Words moved by one forward of one head over N tokens, none of them masked."""
    q, k, v = torch.randn(3, 1, 1, N, D)
    counter = Traffic()
    with torch.no_grad():
        if impl.impl == "naive":
            with counter:
                attention(q, k, v, impl, causal=False)
        else:
            tiled.load, tiled.store = counter.counted_load, counter.counted_store
            try:
                attention(q, k, v, impl, causal=False)
            finally:
                tiled.load, tiled.store = counter.load, counter.store
    return counter.words


def predicted(name: str, N: int, D: int, M: int) -> float:
    """What the papers' arithmetic gives for large N, in words (derived in docs/attention.md).

    naive: its operations read and write 20 tables of N x N. keys_outside: q and o in, o out, 3 N D, for each of the
    4 N D / M tiles of keys. queries_outside: k and v in, 2 N D, for each of the N / min(M / 4D, D) tiles of rows.
    """
    block = M // (4 * D)
    passes = {"keys_outside": N / block, "queries_outside": N / min(block, D)}
    return 20.0 * N * N if name == "naive" else passes[name] * N * D * {"keys_outside": 3, "queries_outside": 2}[name]


def measure_traffic(cfg: Config) -> None:
    (D,) = cfg.head_sizes
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)  # now: where it cannot be written, nothing has been measured in vain
    rows = []
    for N in sorted(cfg.lengths):
        for M in sorted(cfg.on_chip):
            block = M // (4 * D)
            impls = {"naive": AttentionConfig("naive")}
            for order in ("keys_outside", "queries_outside"):
                impls[order] = AttentionConfig("tiled", min(block, D), block, order)
            for name, impl in impls.items():
                words = traffic(impl, N, D)
                row = {"commit": about(torch.device("cpu"))["commit"], "order": name, "N": N, "D": D, "M": M}
                rows.append(row | {"words": words, "predicted": predicted(name, N, D, M)})
                print(
                    f"N {N:>6}  D {D:>4}  M {M:>7}  {name:16} {words / 1e6:>10.2f} M words  predicted "
                    f"{rows[-1]['predicted'] / 1e6:>10.2f}  words / (N N D D / M) {words / (N * N * D * D / M):>8.2f}",
                    flush=True,
                )
    with open(out / "traffic.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    traffic_picture(rows, out / "traffic.png")
    print(json.dumps({"results": str(out / "traffic.csv"), "picture": str(out / "traffic.png"), "rows": rows}))


def traffic_picture(rows: list[dict], path: Path) -> None:
    """Words over length at the largest M, and over M at the greatest length; predictions dashed."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    longest, largest = max(row["N"] for row in rows), max(row["M"] for row in rows)
    panels = {("N", "context length N (tokens)"): ("M", largest), ("M", "words on chip M"): ("N", longest)}
    for axes, ((x, label), (fixed, value)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name in dict.fromkeys(row["order"] for row in rows):
            mine = [row for row in rows if row["order"] == name and row[fixed] == value]
            (line,) = axes.plot([r[x] for r in mine], [r["words"] for r in mine], marker="o", label=name)
            axes.plot([r[x] for r in mine], [r["predicted"] for r in mine], ls="--", color=line.get_color())
        axes.set(xlabel=label, ylabel="words moved in one forward")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set_title(f"{fixed} = {value:,}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"traffic between slow memory and chip, one head, D={rows[0]['D']}; dashed: predicted", fontsize=11)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    config.run(main, Config, "bench")
