"""Times the training step of several processes beside that of one.

    torchrun --nproc-per-node 2 -m lab.ranks gpt2-1k gpt2-1k-4 gpt2-256k [--out docs]

Each case has one model. All processes make a step together, and the first one makes the same step alone, in turn. With
data parallel the first one also makes a step with as many passes as each of them had. Rows go to ranks.csv.

    gpt2-1k           GPT-2 124M, T=1,024: a pass of 64 sequences on each; gpt2-1k-4: four passes
    gpt2-256k         GPT-2's sizes, one sequence of 262,144 tokens on all (parallel.context)
    gpt2-256k-triton  the same with attention=triton; gpt2-256k-ring: keys and values go round, though the heads divide
    gpt2-1m           one sequence of 1,048,576 tokens; gpt2-1m-2: two layers of the twelve
    laptop            a small model on CPUs; laptop-context: each sequence on all; laptop-ring

Shapes: B sequences of a pass, T tokens in each.
"""

import gc
import json
import os
import statistics
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.loader import Batch
from data.text import counted
from lab.peer import LR
from lab.race import append, results_in
from lab.steps import begin, gpt2, wait
from model.attention import AttentionConfig, resolve
from model.gpt import GPT, GPTConfig
from parallel.processes import ALONE, ParallelConfig, Ranks, bytes_sent, divide, join, launched, own_device
from training.machine import pick_device
from training.optimizer import OptimizerConfig, build_optimizers
from training.record import Report
from training.step import TrainStep, choose_way

# A row is a side: as many ranks as share the step, each with so many passes. linear: the time of one process for the
# same step, divided by the ranks and by the time of this side; own: the same beside one process with the passes of one
# rank. Medians of the turns. sent_mb: what a rank sends in a step, by parallel/processes.py's formula.
COLUMNS = ["commit", "device", "torch", "triton", "dtype", "case", "attention", "n_layer", "C", "H", "V", "T", "B"]
COLUMNS += ["ranks", "context", "passes", "how", "ms", "fastest", "slowest", "tokens_per_s"]
COLUMNS += ["peak_gib", "sent_mb", "linear", "own"]


@dataclass(frozen=True)
class Shared:
    """A model and how ranks share its steps."""

    model: GPTConfig
    B: int
    passes: int = 1  # of each rank
    context: bool = False  # whether all ranks share each sequence
    compile: str = "auto"
    impl: str = "auto"  # of attention
    ring: bool = False  # whether keys and values go round instead of heads
    warm_up: int = 5  # steps before the first turn
    warm_up_T: int | None = None  # the tokens of their sequences, if fewer
    rounds: int = 5  # turns of each side
    steps: int = 8  # of a turn


# The model of experiment=million; with fewer tokens its activations fit without pieces.
LONG = GPTConfig(
    vocab_size=257, vocab_multiple=64, position="rope", bias=False, residual_dtype="autocast",
    activation_checkpointing="selective",
)  # fmt: skip
K256 = Shared(replace(LONG, context_length=2**18), 1, context=True, compile="false", warm_up=1, rounds=1, steps=1)
M1 = replace(K256, model=replace(LONG, context_length=2**20, chunk=2**16), warm_up_T=2**17)
LAPTOP = Shared(GPTConfig(2, 2, n_embd=32, context_length=64, vocab_size=257), 4, rounds=3, steps=4)
CASES = {
    "gpt2-1k": Shared(gpt2(1024).model, 64, rounds=4),
    "gpt2-1k-4": Shared(gpt2(1024).model, 64, passes=4, rounds=3, steps=2),
    "gpt2-256k": K256,
    "gpt2-256k-triton": replace(K256, impl="triton"),
    "gpt2-256k-ring": replace(K256, impl="triton", ring=True),
    "gpt2-1m": M1,
    "gpt2-1m-2": replace(M1, model=replace(M1.model, n_layer=2)),
    "laptop": LAPTOP,
    "laptop-context": replace(LAPTOP, context=True, steps=8),
    "laptop-ring": replace(LAPTOP, model=replace(LAPTOP.model, context_length=128), context=True, ring=True),
}


class Side(NamedTuple):
    """How a step is made, and by whom."""

    ranks: Ranks
    passes: int  # of each rank
    step: Callable[[], None]  # may return before the GPU has made it
    how: str
    held: float  # bytes that stay between its steps
    peaks: list[float]  # bytes, of its first steps and of each turn


def race_ranks(names: list[str], ranks: Ranks, *, alone: bool, device: torch.device, out: Path) -> None:
    """Times each case's sides, prints them, and appends the rows to ranks.csv in the folder `out`.

    names: from CASES. ranks: as join() gives them. alone: whether the first process makes the step by itself too.
    """
    results = results_in(out, "ranks.csv", COLUMNS)
    facts, autocast = begin(device)
    model: GPT | None = None  # the last case's, if this one has it too: to compile one takes longer than to time it
    for name in names:
        case = CASES[name]
        ring = case.ring or (case.context and case.model.n_head % ranks.size > 0)  # which wants the scores' log-sum-exp
        dtype = getattr(autocast, "fast_dtype", torch.float32)  # of the products
        attention = resolve(AttentionConfig(case.impl), device.type, lse=ring, model=case.model, dtype=dtype)
        if model is None or (model.config, model.attention_config) != (case.model, attention):
            model = None
            torch.manual_seed(0)
            model = GPT(case.model, attention).to(device)
        for row in rows_of(case, model, ranks, alone, autocast, device):
            row = facts | {"case": name} | row
            print(json.dumps(row), flush=True)
            append(results, [{key: row.get(key) for key in COLUMNS}], COLUMNS)


def rows_of(
    case: Shared, model: GPT, ranks: Ranks, alone: bool, autocast: AbstractContextManager, device: torch.device
) -> list[dict[str, Any]]:
    """The rows of a case."""
    config, size = case.model, ranks.size
    shared = SimpleNamespace(
        batch_size=case.B, device=str(device.type), model=replace(config, n_kv_head=config.n_kv_head or config.n_head),
        parallel=ParallelConfig(context=size if case.context else 1), length_at=lambda step: config.context_length,
        attention=model.attention_config,
    )  # fmt: skip
    passes = case.passes * (1 if case.context else size)
    divided, rows, own = divide(ranks, shared, passes)
    assert rows == case.B, "each rank has passes of its own"
    divided = replace(divided, part=divided.part._replace(ring=divided.part.ring or case.ring))
    layouts = [(divided, own)]
    if alone:
        layouts += [(ALONE, passes)] + ([] if case.context else [(ALONE, own)])
    sides = [enter(case, model, layout, n, ranks, autocast, device) for layout, n in layouts]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(case.rounds):
        for side, ms in zip(sides, times, strict=True):
            ms.append(turn(side, case.steps, ranks, device))
    if not ranks.first:
        return []
    medians = [statistics.median(ms) for ms in times]
    found = [row_of(case, model, side, ms, device) for side, ms in zip(sides, times, strict=True)]
    for key, one, divisor in zip(("linear", "own"), medians[1:], (size, 1), strict=False):
        found[0][key] = round(one / divisor / medians[0], 4)
    return found


def row_of(case: Shared, model: GPT, side: Side, ms: list[float], device: torch.device) -> dict[str, Any]:
    """The row of a side. ms: a step, in each turn."""
    config, ranks, median = case.model, side.ranks, statistics.median(ms)
    tokens = side.passes * case.B * config.context_length * ranks.size // ranks.part.ranks
    row: dict[str, Any] = {"attention": model.attention_config.impl, "n_layer": config.n_layer}
    row |= {"C": config.n_embd, "H": config.n_head, "V": config.vocab_size}
    row |= {"T": config.context_length, "B": case.B, "ranks": ranks.size, "context": ranks.part.ranks}
    row |= {"passes": side.passes, "how": side.how, "tokens_per_s": round(tokens / median * 1e3)}
    times = {"ms": median, "fastest": min(ms), "slowest": max(ms), "peak_gib": max(side.peaks) / 2**30}
    if ranks.size > 1:
        width = 2 if device.type == "cuda" else 4
        times["sent_mb"] = sum(bytes_sent(ranks, model, tokens, width, side.passes)) / 1e6
    return row | {key: round(x, 3) for key, x in times.items()}


def enter(
    case: Shared, model: GPT, ranks: Ranks, passes: int, everyone: Ranks,
    autocast: AbstractContextManager, device: torch.device,
) -> Side:  # fmt: skip
    """Makes a side and its first steps. A step of one process is made by the first one; the others wait."""
    way, _ = choose_way(case.compile, device, model.attention_config, case.model)
    settings = OptimizerConfig()
    started = time.perf_counter()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before, _ = memory(device, reset=True)  # what other sides hold does not count, but for the weights
    weights = sum(p.nbytes for p in model.parameters())
    train_step = TrainStep(
        model, model, build_optimizers(model, settings), torch.amp.GradScaler(device.type, enabled=False), autocast,
        way=way, grad_clip=settings.grad_clip, z_loss=0.0, stop_on_nan=True, ranks=ranks,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1 + ranks.turn)
    window = torch.randint(
        case.model.vocab_size or 1, (passes, case.B, case.model.context_length + 1), generator=generator
    )
    batch = Batch(window[..., :-1].contiguous(), window[..., 1:].contiguous(), None)
    if device.type == "cuda":
        batch = batch.each(Tensor.pin_memory)
    sent: deque[Report] = deque()

    def step(batch: Batch = batch) -> None:
        sent.append(train_step(batch, LR, 0.0))
        ranks.hear([], 0.0, 0)  # as train.py's loop
        while sent and (len(sent) > train_step.ahead or (ranks.size == 1 and sent[0].arrived())):
            assert not sent.popleft().numbers().stopped

    if ranks.size > 1 or everyone.first:
        for _ in range(case.warm_up):
            step(batch.each(lambda x: x[..., : case.warm_up_T].contiguous()))
        wait(device)
    everyone.wait()
    held, peak = (x - before + weights for x in memory(device))
    said = f"{counted(ranks.size, 'rank')}, {counted(passes, 'pass', 'passes')}"
    print(f"  {said}: ready in {time.perf_counter() - started:.0f} s", flush=True)
    return Side(ranks, passes, step, way, held, [peak])


def memory(device: torch.device, reset: bool = False) -> tuple[int, int]:
    """The bytes of GPU memory that tensors take, and their peak since the last reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def turn(side: Side, steps: int, everyone: Ranks, device: torch.device) -> float:
    """ms a step over `steps` steps, from an idle device to an idle device; on a GPU by the GPU's clock."""
    everyone.wait()
    ms = 0.0
    if side.ranks.size > 1 or everyone.first:
        wait(device)
        before, _ = memory(device, reset=True)
        cuda, started = device.type == "cuda", time.perf_counter()
        if cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        for _ in range(steps):
            side.step()
        if cuda:
            last.record()
        wait(device)
        ms = (first.elapsed_time(last) if cuda else (time.perf_counter() - started) * 1e3) / steps
        side.peaks.append(memory(device)[1] - before + side.held)
    everyone.wait()
    return ms


def main(names: list[str], alone: bool, out: Path) -> None:
    """As race_ranks(). ValueError without torchrun, and for a model that is too large for a CPU."""
    if launched() == 1:
        raise ValueError(
            "it times several processes, and there is 1: start them with torchrun --nproc-per-node 2 -m lab.ranks "
            + " ".join(names)
        )
    large = [name for name in names if not name.startswith("laptop")]
    if large and not torch.cuda.is_available():
        raise ValueError(f"{large[0]} takes hours without a GPU, and there is none: use laptop")
    with join(SimpleNamespace(device="auto", name=None)) as ranks:
        race_ranks(names, ranks, alone=alone, device=pick_device(own_device("auto")), out=out)


if __name__ == "__main__":
    asked = ArgumentParser(prog="lab.ranks")
    asked.add_argument("cases", nargs="+", choices=CASES)
    asked.add_argument("--together", action="store_true", help="leave out the steps of one process")
    asked.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of ranks.csv")
    chosen = asked.parse_args()
    try:
        main(chosen.cases, not chosen.together, chosen.out)
    except ValueError as error:
        sys.exit(f"lab.ranks: {error}" if os.environ.get("RANK", "0") == "0" else 2)  # one line, of all processes
