"""Times whole training steps.

    python bench.py mode=train      ours and a plain GPT-2's, in turn in one process
    python bench.py mode=length     ours at several lengths, with each of our implementations of attention

Shapes: B sequences, T tokens in each, C model width, H heads, V vocabulary.

Both sides of a pair have the same model, batches, optimizer settings and precision. They differ only in how a step is
made.
"""

import gc
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.loader import Batch
from lab.meter import PeakBytes, profiled, where
from lab.peer import LR, PlainGPT, load, plain, theirs
from lab.race import append, results_in
from model.attention import AttentionConfig, resolve
from model.gpt import GPT, GPTConfig
from training.machine import about, is_out_of_memory, keep_memory, pick_dtype
from training.optimizer import OptimizerConfig, build_optimizers
from training.record import Report
from training.step import TrainStep, choose_way

# A row is a whole step of one side (part: step) or a part of ours. speed: of our step relative to the other side's, the
# median of the turns; slowest and fastest: in the worst and the best turn.
COLUMNS = ["commit", "device", "torch", "triton", "dtype", "case", "n_layer", "C", "H", "V", "T", "B", "bias"]
COLUMNS += ["dropout_p", "name", "how", "part", "ms", "tokens_per_s", "peak_gib", "speed", "slowest", "fastest"]
# A row of mode=length. ms, tokens_per_s and peak_gib are empty if memory ran out.
OF_LENGTHS = [name for name in COLUMNS if name not in ("part", "speed", "slowest", "fastest")]
WARM_UP = 5  # steps before the first turn; the first one compiles
ROUNDS = 5  # turns of each side
TURN = 0.5  # seconds of a turn of the slower side, about
LOOKS = 3  # steps of ours that are profiled


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    model: GPTConfig
    B: int
    attention_p: float = 0.0  # probability of dropping an attention weight

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.B * self.model.context_length

    def cells(self) -> dict[str, Any]:
        """The case as cells of a row."""
        config = self.model
        sizes = {"n_layer": config.n_layer, "C": config.n_embd, "H": config.n_head, "V": config.vocab_size}
        return sizes | {"T": config.context_length, "B": self.B, "bias": config.bias, "dropout_p": config.dropout_p}


def gpt2(T: int) -> Case:
    """GPT-2 small with 65,536 tokens a step."""
    return Case(GPTConfig(context_length=T, vocab_size=50_257, vocab_multiple=64), 65_536 // T)


NANO = GPTConfig(n_layer=4, n_head=4, n_embd=128, context_length=256, vocab_size=257, mlp="gelu")
SHAKESPEARE = replace(NANO, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, bias=False, dropout_p=0.2, vocab_multiple=64)
CASES = {
    "laptop": Case(NANO, 16),  # for two CPU cores
    "nano": Case(NANO, 64),
    "shakespeare": Case(SHAKESPEARE, 64, 0.2),  # the model of experiment=shakespeare_gpu
    "gpt2-1k": gpt2(1024),
    "gpt2-8k": gpt2(8192),
    "gpt2-32k": gpt2(32_768),
    "gpt2-64k": gpt2(65_536),
}
# The models of mode=length: those of experiment=long_laptop and, without its windows, of experiment=long_16k. Their
# length is set later.
LLAMA = GPTConfig(vocab_size=257, position="rope", norm="rmsnorm", mlp="swiglu", bias=False)
LONG = {
    "long_laptop": replace(LLAMA, n_layer=4, n_head=4, n_kv_head=2, n_embd=128),
    "long_16k": replace(LLAMA, n_layer=8, n_head=8, n_kv_head=8, n_embd=512, dropout_p=0.2),
}

Step = Callable[[Batch], None]  # makes one update; may return before the GPU has made it


class Side(NamedTuple):
    """One side of a pair, after its first steps."""

    name: str
    how: str  # how its steps run, in words
    step: Step
    peak: float  # bytes


def train(
    cases: list[str] | None, *, impl: str, bias: bool | None, peer: str | None, device: torch.device, out: Path
) -> None:
    """Times each case's pair, prints it with the parts of ours, and appends the rows to steps.csv in the folder `out`.

    cases: names from CASES; None: all on a GPU, "laptop" elsewhere. impl: our attention. bias: None for the case's own.
    peer: path of nanoGPT's model.py, to time instead of PlainGPT.
    Raises ValueError for an attention that cannot run, a file that is not nanoGPT's, or a steps.csv of other columns.
    """
    names = cases or ([name for name in CASES if name != "laptop"] if device.type == "cuda" else ["laptop"])
    for name in names:  # refused before anything is measured
        resolve(AttentionConfig(impl, dropout_p=CASES[name].attention_p), device.type)
    module = None if peer is None else load(Path(peer))
    results = results_in(out, "steps.csv", COLUMNS)
    facts, autocast = begin(device)

    rows = []
    for name in names:
        case = CASES[name] if bias is None else replace(CASES[name], model=replace(CASES[name].model, bias=bias))
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in case.cells().items()), flush=True)
        for measured in pair(case, impl, module, autocast, device):
            row = facts | {"case": name} | case.cells() | measured
            show(row)
            append(results, [row], COLUMNS)
            rows.append(row)
    print(json.dumps({"results": str(results), "rows": rows}))


def by_length(lengths: list[int], impls: list[str] | None, *, tokens: int, device: torch.device, out: Path) -> None:
    """Times our step with each attention at each length, prints it, and appends the rows to lengths.csv in `out`.

    impls: of our implementations; None: all that run on the device. tokens: of a step, at least one sequence.
    On a GPU the model is that of experiment=long_16k, elsewhere that of experiment=long_laptop.
    Raises ValueError for an attention that cannot run, or a lengths.csv of other columns.
    """
    for impl in impls or []:
        resolve(AttentionConfig(impl), device.type)
    impls = impls or ["naive", "tiled", "sdpa", *(["triton"] if device.type == "cuda" else [])]
    results = results_in(out, "lengths.csv", OF_LENGTHS)
    facts, autocast = begin(device)
    name = "long_16k" if device.type == "cuda" else "long_laptop"
    rows = []
    for T, impl in itertools.product(lengths, impls):
        if device.type == "cuda":
            torch._dynamo.reset()
        case = Case(replace(LONG[name], context_length=T), max(1, tokens // T))
        batches = itertools.cycle(some_batches(case, device))
        side = enter(impl, partial(ours, case, impl, autocast, device), batches, device)
        row = facts | {"case": name} | case.cells() | {"name": impl, "how": "out of memory"}
        if side is not None:
            ms = statistics.median(in_turn([side], batches, device)[0])
            row |= {"how": side.how, "ms": ms, "tokens_per_s": round(case.tokens / ms * 1e3)}
            row |= {"peak_gib": round(side.peak / 2**30, 3)}
            print(f"  T={T:<8}", end="")
            show(row | {"part": "step"})
        append(results, [row], OF_LENGTHS)
        rows.append(row)
        del side  # its memory is free before the next one is made
    print(json.dumps({"results": str(results), "rows": rows}))


def begin(device: torch.device) -> tuple[dict[str, Any], AbstractContextManager]:
    """Prints what is measured on. Returns it as cells of a row, and the context in which models compute."""
    keep_memory()
    dtype = pick_dtype("auto", device)
    torch.set_float32_matmul_precision("high" if dtype == "bf16" else "highest")
    facts = {key: value for key, value in about(device).items() if key in COLUMNS} | {"dtype": dtype}
    print(f"{facts['device']}, {dtype}, torch {facts['torch']}, triton {facts['triton']}", flush=True)
    return facts, torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()


def pair(
    case: Case, impl: str, module: ModuleType | None, autocast: AbstractContextManager, device: torch.device
) -> Iterator[dict]:
    """The rows of a case: the other side's step, ours, then the parts of ours."""
    if device.type == "cuda":
        torch._dynamo.reset()  # a model of another length would be compiled for variable lengths
    batches = itertools.cycle(some_batches(case, device))

    def other() -> tuple[Step, str]:
        model = theirs(module, case.model) if module else PlainGPT(case.model, case.attention_p)
        return plain(model, autocast, device)

    makers = {"nanoGPT" if module else "plain": other, "ours": lambda: ours(case, impl, autocast, device)}
    sides = [side for name, make in makers.items() if (side := enter(name, make, batches, device))]
    times = in_turn(sides, batches, device)
    for side, ms in zip(sides, times, strict=True):
        median = statistics.median(ms)
        row: dict[str, Any] = {"name": side.name, "how": side.how, "part": "step", "ms": median}
        row |= {"tokens_per_s": round(case.tokens / median * 1e3), "peak_gib": round(side.peak / 2**30, 3)}
        if side.name != "ours":
            yield row
            continue
        if len(sides) == 2:
            speeds = [their_ms / our_ms for their_ms, our_ms in zip(*times, strict=True)]
            found = {"speed": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
            row |= {key: round(speed, 4) for key, speed in found.items()}
        yield row
        yield from parts(side, median, batches, device)


def parts(side: Side, ms: float, batches: Iterator[Batch], device: torch.device) -> Iterator[dict]:
    """The rows that say on what a step spends its ms."""
    spent = profiled(lambda: side.step(next(batches)), LOOKS, device)
    for part, part_ms in where(spent, ms).items():
        yield {"name": side.name, "how": side.how, "part": part, "ms": part_ms}


def show(row: dict) -> None:
    """Prints a row: a side's step, or a part of ours."""
    if row["part"] != "step":
        print(f"    {row['part']:20}{row['ms']:10.3f} ms", flush=True)
        return
    speed = f"  {row['speed']:.3f} ({row['slowest']:.3f} to {row['fastest']:.3f})" if "speed" in row else ""
    said = f"  {row['name']:8}{row['ms']:10.3f} ms{row['tokens_per_s']:12,} tok/s{row['peak_gib']:8.2f} GiB{speed}"
    print(f"{said}  {row['how']}", flush=True)


def ours(case: Case, impl: str, autocast: AbstractContextManager, device: torch.device) -> tuple[Step, str]:
    """The step of train.py, waited for as there, and how it runs."""
    dtype = getattr(autocast, "fast_dtype", torch.float32)  # of the products
    asked = AttentionConfig(impl, dropout_p=case.attention_p)
    config = resolve(asked, device.type, model=case.model, dtype=dtype)
    way, _ = choose_way("auto", device, config, case.model)
    model = GPT(case.model, config).to(device)
    settings = OptimizerConfig()
    train_step = TrainStep(
        model, model, build_optimizers(model, settings), torch.amp.GradScaler(device.type, enabled=False), autocast,
        way=way, grad_clip=settings.grad_clip, z_loss=0.0, stop_on_nan=True,
    )  # fmt: skip
    sent: deque[Report] = deque()

    def step(batch: Batch) -> None:
        sent.append(train_step(batch.each(lambda part: part[None]), LR, 0.0))  # a step of one pass
        while sent and (len(sent) > train_step.ahead or sent[0].arrived()):
            assert not sent.popleft().numbers().stopped

    return step, f"{way}, {config.impl}"


def enter(
    name: str, make: Callable[[], tuple[Step, str]], batches: Iterator[Batch], device: torch.device
) -> Side | None:
    """Makes one side and takes its first steps; None if memory runs out.

    Its peak counts from before it is made until after its first steps: a recorded step takes its memory when it is
    recorded. What was there before, such as the other side's weights, does not count.
    """
    gc.collect()
    cuda, started = device.type == "cuda", time.perf_counter()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    counted = PeakBytes()
    try:
        with nullcontext() if cuda else counted:
            step, how = make()
            for batch in itertools.islice(batches, WARM_UP):
                step(batch)
            wait(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"  {name:8} out of memory", flush=True)
        return None
    print(f"  {name:8} made, with {WARM_UP} steps, in {time.perf_counter() - started:.0f} s", flush=True)
    return Side(name, how, step, torch.cuda.max_memory_allocated(device) - before if cuda else counted.peak)


def in_turn(sides: list[Side], batches: Iterator[Batch], device: torch.device) -> list[list[float]]:
    """ms a step of each side, in each of its turns: A B A B. All turns have the same number of steps."""
    slower = max((turn(side.step, 2, batches, device) for side in sides), default=1.0)
    steps = max(2, round(TURN * 1e3 / slower))
    rounds = [[turn(side.step, steps, batches, device) for side in sides] for _ in range(ROUNDS)]
    return [list(ms) for ms in zip(*rounds, strict=True)]


def turn(step: Step, steps: int, batches: Iterator[Batch], device: torch.device) -> float:
    """ms a step over `steps` steps, from an idle device to an idle device; on a GPU by the GPU's clock."""
    wait(device)
    cuda, started = device.type == "cuda", time.perf_counter()
    if cuda:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    for batch in itertools.islice(batches, steps):
        step(batch)
    if cuda:
        last.record()
    wait(device)
    ms = first.elapsed_time(last) if cuda else (time.perf_counter() - started) * 1e3
    return ms / steps


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def some_batches(case: Case, device: torch.device) -> list[Batch]:
    """Eight batches of random tokens on the host, for a GPU in pinned memory: no side waits for its data."""
    generator = torch.Generator().manual_seed(0)
    size = (case.B, case.model.context_length + 1)
    windows = [torch.randint(case.model.vocab_size or 1, size, generator=generator) for _ in range(8)]
    batches = [Batch(w[:, :-1].contiguous(), w[:, 1:].contiguous(), None) for w in windows]
    return [batch.each(Tensor.pin_memory) for batch in batches] if device.type == "cuda" else batches
