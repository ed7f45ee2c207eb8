"""Times whole training steps: `python bench.py mode=train` and mode=length. lab/ranks.py times several processes.

Both sides of a pair have the same model, batches, optimizer settings and precision. They differ only in how a step is
made.

Shapes: B sequences, T tokens in each, C model width, H heads, V vocabulary.
"""

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from data.loader import Batch
from data.text import counted
from lab.files import Results
from lab.meter import gpu_peak, memory_for, ms_of, peak_of, profiled, wait, where
from lab.peer import LR, PlainGPT, load, plain, theirs
from model.abilities import resolve
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from parallel.processes import ALONE, Ranks
from training.machine import is_out_of_memory, keep_memory, pick_device, pick_dtype, set_precision
from training.optimizer import build_optimizers
from training.record import Report
from training.settings import Config
from training.step import TrainStep, choose_way

FACTS = ["commit", "device", "torch", "triton", "dtype", "case"]
SIZES = ["n_layer", "C", "H", "V", "T", "B"]
# A row of mode=length. ms, tokens_per_s and peak_gib are empty if memory ran out.
OF_LENGTHS = [*FACTS, *SIZES, "bias", "dropout_p", "name", "how", "ms", "tokens_per_s", "peak_gib"]
# A row of mode=train is a whole step of one side (part: step) or a part of ours. speed: of our step relative to the
# other side's, the median of the turns; slowest and fastest: in the worst and the best turn.
COLUMNS = [*OF_LENGTHS[:-3], "part", *OF_LENGTHS[-3:], "speed", "slowest", "fastest"]
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
        """Tokens of a step of one pass."""
        return self.B * self.model.context_length

    def cells(self) -> dict[str, Any]:
        """The case as cells of a row."""
        config = self.model
        numbers = (config.n_layer, config.n_embd, config.n_head, config.vocab_size, config.context_length, self.B)
        return dict(zip(SIZES, numbers, strict=True)) | {"bias": config.bias, "dropout_p": config.dropout_p}


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
Step = Callable[[Batch], None]  # makes one update


@dataclass
class Side:
    """One side of a comparison."""

    name: str
    how: str  # how its steps run, in words
    step: Callable[[], None]  # makes one update with its next batch; may return before the GPU has made it
    peak: float  # bytes in its first steps and its turns, beyond what was there before
    alive: float = 0.0  # bytes that stay between its steps
    ranks: Ranks = ALONE  # that make the step together
    everyone: Ranks = ALONE  # who wait for them

    @property
    def here(self) -> bool:
        """Whether this process has a part in it. A step of one process is made by the first one."""
        return self.ranks.size > 1 or self.everyone.first


# --- one process -----------------------------------------------------------------------------------------------------


def train(cfg: Any) -> None:
    """Times each case's pair, prints it with the parts of ours, and appends the rows to steps.csv in the folder out.

    cfg: lab/settings.py's Bench, which imports this file.
    Raises ValueError for an attention that cannot run, a file that is not nanoGPT's, or a steps.csv of other columns.
    """
    device, bias, impl = pick_device(cfg.device), cfg.bias, cfg.impl
    names = cfg.cases or ([name for name in CASES if name != "laptop"] if device.type == "cuda" else ["laptop"])
    for name in names:  # refused before anything is measured
        resolve(AttentionConfig(impl, dropout_p=CASES[name].attention_p), device.type)
    module = None if cfg.peer is None else load(Path(cfg.peer))
    results, autocast = begin(device, Path(cfg.out), "steps.csv", COLUMNS)
    for name in names:
        case = CASES[name] if bias is None else replace(CASES[name], model=replace(CASES[name].model, bias=bias))
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in case.cells().items()), flush=True)
        for measured in pair(case, impl, module, autocast, device):
            show(measured)
            results.append([{"case": name} | case.cells() | measured])
    results.end()


def by_length(cfg: Any) -> None:
    """Times our step with each attention at each length, prints it, and appends the rows to lengths.csv in out.
    Raises ValueError for an attention that cannot run, or a lengths.csv of other columns."""
    device, lengths = pick_device(cfg.device), sorted(set(cfg.lengths))
    cuda = device.type == "cuda"
    for impl in cfg.impls or []:
        resolve(AttentionConfig(impl), device.type)
    impls = cfg.impls or ["naive", "tiled", "sdpa", *(["triton"] if cuda else [])]
    results, autocast = begin(device, Path(cfg.out), "lengths.csv", OF_LENGTHS)
    name = "long_16k" if cuda else "long_laptop"
    for T, impl in itertools.product(lengths, impls):
        if cuda:
            torch._dynamo.reset()
        case = Case(replace(LONG[name], context_length=T), max(1, cfg.tokens // T))
        few = "use shorter lengths= or fewer tokens="
        with memory_for(f"steps of {max(T, cfg.tokens)} tokens", few):  # out of memory in a step is a line
            batches = itertools.cycle(some_batches(case, device))
        side = enter(impl, partial(ours, case, impl, autocast, device), batches, device)
        row = {"case": name} | case.cells() | {"name": impl, "how": "out of memory"}
        if side is not None:
            row |= {"how": side.how} | measured(in_turn([side], device)[0], case.tokens, side.peak)
            print(f"  T={T:<8}", end="")
            show(row | {"part": "step"})
        results.append([row])
        del side  # its memory is free before the next one is made
    results.end()


def begin(device: torch.device, out: Path, name: str, columns: list[str]) -> tuple[Results, AbstractContextManager]:
    """Prints what is measured on. Returns the table, and the context in which models compute."""
    results = Results(out, name, columns)
    keep_memory()
    dtype = pick_dtype("auto", device)
    results.begin(device, dtype)
    return results, set_precision(dtype, device)


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
    times = in_turn(sides, device)
    for side, ms in zip(sides, times, strict=True):
        row = {"name": side.name, "how": side.how, "part": "step"} | measured(ms, case.tokens, side.peak)
        if side.name == "ours" and len(sides) == 2:
            speeds = [their_ms / our_ms for their_ms, our_ms in zip(*times, strict=True)]
            found = {"speed": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
            row |= {key: round(speed, 4) for key, speed in found.items()}
        yield row
        if side.name == "ours":
            for part, part_ms in where(profiled(side.step, LOOKS, device), row["ms"]).items():
                yield {"name": side.name, "how": side.how, "part": part, "ms": part_ms}


def measured(ms: list[float], tokens: int, peak: float) -> dict[str, Any]:
    """The cells of a side's step. ms: in each turn. peak: in bytes."""
    median = statistics.median(ms)
    return {"ms": median, "tokens_per_s": round(tokens / median * 1e3), "peak_gib": round(peak / 2**30, 3)}


def show(row: dict) -> None:
    """Prints a row: a side's step, or a part of ours."""
    if row["part"] != "step":
        print(f"    {row['part']:20}{row['ms']:10.3f} ms", flush=True)
        return
    speed = f"  {row['speed']:.3f} ({row['slowest']:.3f} to {row['fastest']:.3f})" if "speed" in row else ""
    said = f"  {row['name']:8}{row['ms']:10.3f} ms{row['tokens_per_s']:12,} tok/s{row['peak_gib']:8.2f} GiB{speed}"
    print(f"{said}  {row['how']}", flush=True)


# --- a side ----------------------------------------------------------------------------------------------------------


def ours(case: Case, impl: str, autocast: AbstractContextManager, device: torch.device) -> tuple[Step, str]:
    """The step of train.py, of one pass, and how it runs."""
    dtype = getattr(autocast, "fast_dtype", torch.float32)  # of the products
    asked = AttentionConfig(impl, dropout_p=case.attention_p)
    config = resolve(asked, device.type, model=case.model, dtype=dtype)
    step, way = step_of(RecomputingGPT(case.model, config).to(device), "auto", autocast, device)
    return lambda batch: step(batch.each(lambda part: part[None])), f"{way}, {config.impl}"


def step_of(
    model: GPT, compile: str, autocast: AbstractContextManager, device: torch.device, ranks: Ranks = ALONE
) -> tuple[Step, str]:
    """The step of train.py, waited for as there, and whether it is compiled or recorded. A batch is (passes, B, T)."""
    way, _ = choose_way(compile, device, model.attention_config, model.config)
    cfg, scaler = Config(), torch.amp.GradScaler(device.type, enabled=False)
    train_step = TrainStep(model, model, build_optimizers(model, cfg.optimizer), scaler, autocast, way, cfg, ranks)
    sent: deque[Report] = deque()

    def step(batch: Batch) -> None:
        sent.append(train_step(batch, LR, 0.0))
        ranks.agree([])
        while sent and (len(sent) > train_step.ahead or (ranks.size == 1 and sent[0].arrived())):
            assert not sent.popleft().numbers().stopped

    return step, way


def enter(
    name: str, make: Callable[[], tuple[Step, str]], batches: Iterator[Batch], device: torch.device,
    first: list[Batch] | None = None, ranks: Ranks = ALONE, everyone: Ranks = ALONE,
) -> Side | None:  # fmt: skip
    """Makes one side and takes its first steps; None if memory runs out and there is one process.

    first: the batches of these steps, if not the first of `batches`. The peak counts from before the side is made until
    after these steps: a recorded step takes its memory when it is recorded. What was there before does not count.
    """
    side = Side(name, "", lambda: step(next(batches)), 0.0, ranks=ranks, everyone=everyone)
    first = ([*itertools.islice(batches, WARM_UP)] if first is None else first) if side.here else []
    gc.collect()
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        # PeakBytes cannot look into messages between processes.
        with peak_of(device) if everyone.size == 1 else gpu_peak(device) as memory:
            step, side.how = make()
            for batch in first:
                step(batch)
            wait(device)
    except (RuntimeError, MemoryError) as error:
        if everyone.size > 1 or not is_out_of_memory(error):
            raise
        print(f"  {name:8} out of memory", flush=True)
        return None
    everyone.wait()
    said = f"made, with {counted(len(first), 'step')}, in {time.perf_counter() - started:.0f} s"
    print(f"  {name:8} {said}", flush=True)
    side.peak, side.alive = memory.peak, memory.alive
    return side


def in_turn(
    sides: list[Side], device: torch.device, steps: int | None = None, rounds: int = ROUNDS
) -> list[list[float]]:
    """ms a step of each side, in each of its turns: A B A B. steps: of each turn; None: TURN seconds of the slower."""
    if steps is None:
        slower = max((turn(side, 2, device) for side in sides), default=1.0)
        steps = max(2, round(TURN * 1e3 / slower))
    found = [[turn(side, steps, device) for side in sides] for _ in range(rounds)]
    return [list(ms) for ms in zip(*found, strict=True)]


def turn(side: Side, steps: int, device: torch.device) -> float:
    """ms a step over `steps` steps; 0 on a process that has no part in them."""

    def take() -> None:
        for _ in range(steps):
            side.step()

    side.everyone.wait()
    ms = 0.0
    if side.here:
        with gpu_peak(device) as memory:
            ms = ms_of(take, device) / steps
        side.peak = max(side.peak, side.alive + memory.peak)
    side.everyone.wait()
    return ms


def some_batches(case: Case, device: torch.device) -> list[Batch]:
    """Eight batches of random tokens: no side waits for its data."""
    generator = torch.Generator().manual_seed(0)
    return [random_batch(case, (case.B,), generator, device) for _ in range(8)]


def random_batch(case: Case, size: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Batch:
    """Random tokens (*size, T) and the next ones, on the host, for a GPU in pinned memory."""
    size = (*size, case.model.context_length + 1)
    window = torch.randint(case.model.vocab_size or 1, size, generator=generator)
    batch = Batch(window[..., :-1].contiguous(), window[..., 1:].contiguous(), None)
    return batch.each(Tensor.pin_memory) if device.type == "cuda" else batch
