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

import itertools
import json
import os
import sys
from argparse import ArgumentParser
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from data.text import counted
from lab.steps import FACTS, SIZES, Case, Side, begin, enter, gpt2, in_turn, measured, random_batch, step_of
from model.abilities import resolve
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from parallel.processes import ALONE, ParallelConfig, Ranks, bytes_sent, divide, join, launched, own_device
from training.machine import pick_device

# A row is a side: as many ranks as share the step, each with so many passes. linear: the time of one process for the
# same step, divided by the ranks and by the time of this side; own: the same beside one process with the passes of one
# rank. Medians of the turns. sent_mb: what a rank sends in a step, by bytes_sent().
COLUMNS = [*FACTS, "attention", *SIZES, "ranks", "context", "passes", "how", "ms", "fastest", "slowest"]
COLUMNS += ["tokens_per_s", "peak_gib", "sent_mb", "linear", "own"]


@dataclass(frozen=True)
class Shared(Case):
    """A model and how ranks share its steps."""

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


def main(names: list[str], alone: bool, out: Path) -> None:
    """Times the sides of these CASES, prints them, and appends the rows to ranks.csv in the folder `out`.

    alone: whether the first process makes the step by itself too. Raises ValueError without torchrun, for a model that
    is too large for a CPU, and for a ranks.csv of other columns.
    """
    if launched() == 1:
        raise ValueError(
            "it times several processes, and there is 1: start them with torchrun --nproc-per-node 2 -m lab.ranks "
            + " ".join(names)
        )
    large = [name for name in names if not name.startswith("laptop")]
    if large and not torch.cuda.is_available():
        raise ValueError(f"{large[0]} takes hours without a GPU, and there is none: use laptop")
    with join(SimpleNamespace(device="auto", name=None)) as ranks:
        device = pick_device(own_device("auto"))
        results, autocast = begin(device, out, "ranks.csv", COLUMNS)
        model: GPT | None = None  # the last case's, if this one has it too: to compile one takes longer than to time it
        for name in names:
            case = CASES[name]
            ring = case.ring or (case.context and case.model.n_head % ranks.size > 0)
            dtype = getattr(autocast, "fast_dtype", torch.float32)  # of the products
            attention = resolve(AttentionConfig(case.impl), device.type, lse=ring, model=case.model, dtype=dtype)
            if model is None or (model.config, model.attention_config) != (case.model, attention):
                model = None
                torch.manual_seed(0)
                model = RecomputingGPT(case.model, attention).to(device)
            for row in rows_of(case, model, ranks, alone, autocast, device):
                results.append([{"case": name} | row])
                print(json.dumps(results.rows[-1]), flush=True)


def rows_of(
    case: Shared, model: GPT, everyone: Ranks, alone: bool, autocast: AbstractContextManager, device: torch.device
) -> list[dict[str, Any]]:
    """The rows of a case."""
    config, size = case.model, everyone.size
    shared = SimpleNamespace(
        batch_size=case.B, device=device.type, model=replace(config, n_kv_head=config.n_kv_head or config.n_head),
        parallel=ParallelConfig(context=size if case.context else 1), length_at=lambda step: config.context_length,
        attention=model.attention_config,
    )  # fmt: skip
    passes = case.passes * (1 if case.context else size)
    divided, rows, own = divide(everyone, shared, passes)
    assert rows == case.B, "each rank has passes of its own"
    divided = replace(divided, part=divided.part._replace(ring=divided.part.ring or case.ring))
    layouts = [(divided, own)]
    if alone:
        layouts += [(ALONE, passes)] + ([] if case.context else [(ALONE, own)])
    sides = [side_of(case, model, *layout, everyone, autocast, device) for layout in layouts]
    times = in_turn(sides, device, case.steps, case.rounds)
    if not everyone.first:
        return []
    found = [row_of(case, model, *of_side, device) for of_side in zip(sides, layouts, times, strict=True)]
    for key, one, divisor in zip(("linear", "own"), found[1:], (size, 1), strict=False):
        found[0][key] = round(one["ms"] / divisor / found[0]["ms"], 4)
    return found


def side_of(
    case: Shared, model: GPT, ranks: Ranks, passes: int, everyone: Ranks,
    autocast: AbstractContextManager, device: torch.device,
) -> Side:  # fmt: skip
    """A side after its first steps. Its memory is beyond that of other sides; the weights, which all share, count."""
    batch = random_batch(case, (passes, case.B), torch.Generator().manual_seed(1 + ranks.turn), device)
    first = [batch.each(lambda x: x[..., : case.warm_up_T].contiguous())] * case.warm_up
    name = f"{counted(ranks.size, 'rank')}, {counted(passes, 'pass', 'passes')}:"
    make = partial(step_of, model, case.compile, autocast, device, ranks)
    side = enter(name, make, itertools.repeat(batch), device, first, ranks, everyone)
    assert side is not None
    weights = sum(p.nbytes for p in model.parameters())
    side.peak, side.alive = side.peak + weights, side.alive + weights
    return side


def row_of(
    case: Shared, model: GPT, side: Side, layout: tuple[Ranks, int], ms: list[float], device: torch.device
) -> dict[str, Any]:
    """The row of a side. layout: its ranks and the passes of each. ms: a step, in each turn."""
    ranks, passes = layout
    tokens = passes * case.tokens * ranks.size // ranks.part.ranks
    row = {"attention": model.attention_config.impl, "ranks": ranks.size, "context": ranks.part.ranks}
    row |= case.cells() | {"passes": passes, "how": side.how} | measured(ms, tokens, side.peak)
    row |= {"fastest": round(min(ms), 3), "slowest": round(max(ms), 3)}
    if ranks.size > 1:
        width = 2 if device.type == "cuda" else 4
        row["sent_mb"] = round(sum(bytes_sent(ranks, model, tokens, width, passes)) / 1e6, 3)
    return row


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
