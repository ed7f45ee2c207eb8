"""Check, then weigh: the memory that each attention needs and the words that it moves, side by side in one run.

    python bench.py                                              on this machine: naive and tiled up to 8,192 tokens
    python bench.py lengths=[1024,4096,16384,65536] heads=12 head_size=64 dtype=bf16 block=1024   on a GPU
    python bench.py mode=traffic                                 words between slow memory and chip, in both loop orders

mode=memory. Each implementation is compared with float64 first; one that is wrong is not weighed. Then, for every
length, one forward and backward: time (median) and peak memory above the inputs. Rows go to results.csv and the
picture to memory.png, in runs/bench (docs/ has those of out=docs).

mode=traffic. One forward of one head, not causal, its loads and stores counted tile by tile as they happen, beside what
the papers predict; to traffic.csv and traffic.png. M, the words that the chip holds, sets the tiles as the first paper
does: block_n = M / 4D and block_m = min(block_n, D).
"""

import csv
import json
import statistics
import time
import weakref
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model.attention
from model.attention import AttentionConfig, attention, resolve
from training import config
from training.machine import about, pick_device

COLUMNS = [
    "commit",
    "device",
    "torch",
    "triton",
    "impl",
    "dtype",
    "B",
    "H",
    "T",
    "D",
    "tile",
    "pass",
    "ms",
    "tflops",
    "peak_mib",
]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Config:
    mode: str = "memory"  # memory | traffic
    impls: list[str] = field(default_factory=lambda: ["naive", "tiled"])
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192])
    heads: int = 4
    head_size: int = 32
    dtype: str = "float32"  # float32 | bf16 | fp16
    block: int = 128  # block_m and block_n of tiled
    repeats: int = 3  # timed passes after one that is not
    on_chip: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768])  # traffic: M, in words
    device: str = "auto"
    out: str = "runs/bench"  # folder of results.csv and memory.png

    def __post_init__(self):
        if self.mode not in ("memory", "traffic"):
            raise ValueError(f"mode={self.mode} is not known; choose memory or traffic")
        if not self.out:
            raise ValueError("out= is empty; give a folder or leave it out")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is not known; choose {', '.join(DTYPES)}")
        unread = {"memory": ("on_chip",), "traffic": ("impls", "heads", "dtype", "block", "repeats", "device")}[
            self.mode
        ]
        for key in fields(self):
            usual = key.default if key.default is not MISSING else key.default_factory()
            if key.name in unread and getattr(self, key.name) != usual:
                raise ValueError(
                    f"{key.name}={getattr(self, key.name)}: mode={self.mode} does not read it; leave it out"
                )
        if not (self.lengths and self.impls and self.on_chip):
            raise ValueError(
                f"lengths={self.lengths} impls={self.impls} on_chip={self.on_chip}: nothing to weigh; "
                "give at least one of each"
            )
        numbers = {"heads": self.heads, "head_size": self.head_size, "block": self.block, "repeats": self.repeats}
        numbers |= {f"lengths[{i}]": length for i, length in enumerate(self.lengths)}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for words in self.on_chip:
            if self.mode == "traffic" and words < 4 * self.head_size:
                raise ValueError(f"on_chip={words} holds no row of q, k, v and o: use {4 * self.head_size} or more")


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


def problem(cfg: Config, T: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and do, (1, H, T, D), random: on zeros a matrix product runs faster than on data."""
    generator = torch.Generator().manual_seed(T)
    shape = (1, cfg.heads, T, cfg.head_size)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(4)]


def forward_and_backward(x: list[torch.Tensor], impl: AttentionConfig) -> list[torch.Tensor]:
    q, k, v, do = x
    o = attention(q, k, v, impl)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def check(cfg: Config, impls: dict[str, AttentionConfig], device: torch.device, dtype: torch.dtype) -> None:
    """Each of o, dq, dk, dv within 2 * (naive's error + eps * max |reference|) of float64, or the bench ends here."""
    x = problem(cfg, 333, device, dtype)
    naive = AttentionConfig("naive")
    right = forward_and_backward([t.detach().double().requires_grad_() for t in x], naive)
    allowed = [
        2 * (float((found - r).abs().max()) + torch.finfo(dtype).eps * float(r.abs().max()))
        for found, r in zip(forward_and_backward(x, naive), right, strict=True)
    ]
    for name, impl in impls.items():
        errors = [float((f - r).abs().max()) for f, r in zip(forward_and_backward(x, impl), right, strict=True)]
        verdict = all(e <= a for e, a in zip(errors, allowed, strict=True))
        print(f"check {name:6} o dq dk dv: {'  '.join(f'{e:.1e}' for e in errors)}  {'right' if verdict else 'WRONG'}")
        if not verdict:
            raise RuntimeError(f"{name} is further from float64 than {allowed}: not weighed")


def weigh(x: list[torch.Tensor], impl: AttentionConfig, repeats: int) -> tuple[float, int]:
    """(median seconds, peak bytes above the inputs) of one forward and backward."""
    device = x[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        forward_and_backward(x, impl)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with PeakBytes() as counted:
            forward_and_backward(x, impl)
        peak = counted.peak
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        forward_and_backward(x, impl)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), peak


def picture(rows: list[dict], path: Path) -> None:
    """Peak memory over length, once on plain axes, where the square bends away, and once on logarithmic ones."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
        for impl in dict.fromkeys(row["impl"] for row in rows):
            mine = [(row["T"], row["peak_mib"] / 1024) for row in rows if row["impl"] == impl]
            points = [p for p in mine if p[1]]
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=impl)
            if len(points) < len(mine):  # it died at the next length
                dead, colour = mine[len(points)][0], line.get_color()
                axes.axvline(dead, color=colour, ls=":")
                middle = axes.get_xaxis_transform()  # x in tokens, y in parts of the frame
                axes.text(dead, 0.72, f"{impl}: out of memory ", color=colour, rotation=90, ha="right", va="center",
                          transform=middle)  # fmt: skip
        axes.set(xlabel="context length T (tokens)", ylabel="peak memory of forward + backward (GiB)")
        axes.grid(alpha=0.3)
        if scale == "log":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=10)
            axes.set_title("the same on logarithmic axes", fontsize=10)
        else:
            axes.set_title("naive holds T x T weights, tiled one tile of them", fontsize=10)
        axes.legend()
    row = rows[0]
    figure.suptitle(
        f"one attention, H={row['H']}, D={row['D']}, {row['dtype']}, causal, on {row['device']}", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


class Traffic(TorchDispatchMode):
    """Words that one forward moves between slow memory and chip.

    tiled touches what has length T through load() and store() of model/attention.py and nowhere else, so those are
    counted (adding to a tile reads it too). naive has no tiles: each of its operations reads its inputs from slow
    memory and writes its result there; views move nothing.
    """

    def __init__(self):
        super().__init__()
        self.words = 0
        self.load, self.store = model.attention.load, model.attention.store

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
            model.attention.load, model.attention.store = counter.counted_load, counter.counted_store
            try:
                attention(q, k, v, impl, causal=False)
            finally:
                model.attention.load, model.attention.store = counter.load, counter.store
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
    D = cfg.head_size
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


def main(cfg: Config) -> None:
    if cfg.mode == "traffic":
        measure_traffic(cfg)
    else:
        measure_memory(cfg)


def measure_memory(cfg: Config) -> None:
    device = pick_device(cfg.device)
    dtype = DTYPES[cfg.dtype]
    impls = {name: resolve(AttentionConfig(name, cfg.block, cfg.block), device.type) for name in cfg.impls}
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)  # now: where it cannot be written, nothing has been measured in vain
    check(cfg, impls, device, dtype)

    facts = {key: value for key, value in about(device).items() if key in COLUMNS}
    rows = []
    dead = set()
    for T in sorted(cfg.lengths):
        x = problem(cfg, T, device, dtype)
        for impl, chosen in impls.items():
            row = {**facts, "impl": impl, "dtype": cfg.dtype, "B": 1, "H": cfg.heads, "T": T, "D": cfg.head_size}
            row |= {"tile": cfg.block if impl == "tiled" else "", "pass": "forward+backward"}
            try:
                if impl in dead:
                    raise MemoryError
                seconds, peak = weigh(x, chosen, cfg.repeats)
                # Causal: 2 B H T T D forward (two products over half of the square), 2.5 times that backward.
                flops = 3.5 * 2 * cfg.heads * T * T * cfg.head_size
                row |= {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12, "peak_mib": peak / 2**20}
                print(f"T {T:>7}  {impl:6} {seconds * 1e3:>10.1f} ms {peak / 2**20:>10.1f} MiB", flush=True)
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error):  # a CPU's allocator has no type
                    raise
                dead.add(impl)  # longer contexts need more still
                row |= {"ms": None, "tflops": None, "peak_mib": 0}
                print(f"T {T:>7}  {impl:6} out of memory", flush=True)
            rows.append(row)

    results = out / "results.csv"
    fresh = not results.exists()
    with open(results, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for row in rows:
            numbers = {k: f"{row[k]:.4g}" if row[k] else "" for k in ("ms", "tflops", "peak_mib")}
            writer.writerow({**row, **numbers})
    picture(rows, out / "memory.png")
    print(json.dumps({"results": str(results), "picture": str(out / "memory.png"), "rows": rows}))


if __name__ == "__main__":
    config.run(main, Config, "bench")
