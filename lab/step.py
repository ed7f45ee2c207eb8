"""One whole training step of ours beside nanoGPT's. `python bench.py mode=step peer=PATH_OF_ITS_MODEL_PY`

Both sides have the same model (GPT-2 without biases, as nanoGPT trains it), batches, optimizer settings and, on a GPU,
bf16 autocast. nanoGPT's model is compiled, and stepped as in its train.py; its loss is read every 10 steps. Our step is
that of train.py, recorded as a CUDA graph. B sequences, T tokens in each.
"""

import gc
import importlib.util
import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import ModuleType

import torch

from data.loader import Batch
from lab.meter import is_out_of_memory, ms_of
from model.attention import AttentionConfig, resolve
from model.gpt import GPT, GPTConfig
from training.machine import about, set_precision
from training.optimizer import OptimizerConfig, build_optimizers
from training.step import TrainStep

GPT2 = GPTConfig(vocab_size=50_304, bias=False)
NANO = GPTConfig(n_layer=4, n_head=4, n_embd=128, vocab_size=256, mlp="gelu", bias=False)  # for two CPU cores
TOKENS = {"cuda": 65_536, "cpu": 4096}  # of a step
LR, OPTIMIZER = 6e-4, OptimizerConfig()
WARM_UP, TURNS, STEPS = 5, 5, 4  # steps before the first turn; turns of each side; steps of a turn
Step = Callable[[Batch], None]  # makes one update; may return before the GPU has made it


def compare_steps(lengths: list[int], peer: str | None, device: torch.device) -> None:
    """Prints for each context length: ms a step of both sides (medians of turns in one process), their ratio, and the
    peak memory of each. peer: path of nanoGPT's model.py; None: our step alone. Raises ValueError for another file."""
    cuda, tokens = device.type == "cuda", TOKENS.get(device.type, 4096)
    module, autocast = load(Path(peer)) if peer else None, set_precision("bf16" if cuda else "float32", device)
    print("{device}, torch {torch}, triton {triton}, commit {commit}".format(**about(device)))
    print(f"{tokens:,} tokens a step; the ratio is nanoGPT's ms / ours, with the slowest and the fastest turn\n")
    print(f"{'T':>7}  residual_dtype   ours ms  nanoGPT ms{'ratio':>25}  ours GiB  nanoGPT GiB", flush=True)
    for T in lengths:
        torch.compiler.reset()  # or a model of another length would be compiled for variable lengths
        config = replace(GPT2 if cuda else NANO, context_length=T)
        batches = some_batches(config, max(1, tokens // T), device)
        theirs = make(partial(their_step, module, config, autocast, device), batches, device) if module else (None, 0)
        for residual_dtype in ("float32", "autocast") if cuda else ("float32",):
            config.residual_dtype = residual_dtype
            ours = make(partial(our_step, config, autocast, device), batches, device)
            (our_ms, their_ms), ratio = in_turn([ours[0], theirs[0]], batches, device)
            gib = f"{ours[1]:>10.1f}{theirs[1]:>13.1f}"
            print(f"{T:>7}  {residual_dtype:14}{our_ms:>10.1f}{their_ms:>12.1f}{ratio:>25}{gib}", flush=True)
            del ours  # its memory is free before the next one is made
        del theirs


def make(build: Callable[[], Step], batches: list[Batch], device: torch.device) -> tuple[Step | None, float]:
    """Builds one side and makes its first steps. Returns its step, None if memory runs out, and its peak memory in GiB,
    on a GPU, beyond what was there before. (A recorded step takes its memory when it is recorded, in these steps.)"""
    gc.collect()
    before, cuda = 0, device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    step: Step | None = None
    try:
        made = build()
        for batch in batches:
            made(batch)
        step = made
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return step, (torch.cuda.max_memory_allocated(device) - before) / 2**30 if cuda else 0.0


def in_turn(steps: list[Step | None], batches: list[Batch], device: torch.device) -> tuple[list[float], str]:
    """The median ms of a step of each side, over turns A B A B, NaN for None; and the second's over the first's."""

    def turn(step: Step | None) -> float:
        if step is None:
            return math.nan
        return ms_of(lambda: [step(batch) for batch in batches[:STEPS]], device) / STEPS

    turns = [[turn(step) for step in steps] for _ in range(TURNS)]
    ratios = [theirs / ours for ours, theirs in turns]
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    return [statistics.median(ms) for ms in zip(*turns, strict=True)], ratio


def our_step(config: GPTConfig, autocast: AbstractContextManager, device: torch.device) -> Step:
    """The step of train.py."""
    model = GPT(config, resolve(AttentionConfig(), str(device), config.head_size, config.context_length)).to(device)
    scaler, way = torch.amp.GradScaler(device.type, enabled=False), "recorded" if device.type == "cuda" else "eager"
    train_step = TrainStep(model, build_optimizers(model, OPTIMIZER), scaler, autocast, way)
    sent: deque = deque()

    def step(batch: Batch) -> None:
        sent.append(train_step(batch, LR))
        if len(sent) > train_step.ahead:
            assert not sent.popleft().numbers().stopped, "the loss is NaN"

    return step


def their_step(module: ModuleType, config: GPTConfig, autocast: AbstractContextManager, device: torch.device) -> Step:
    """nanoGPT's step: its model, compiled on a GPU; its optimizer, fused AdamW; its loop."""
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "bias", "vocab_size")}
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    with redirect_stdout(StringIO()):  # it prints what it does
        model = module.GPT(module.GPTConfig(block_size=config.context_length, dropout=0.0, **sizes)).to(device)
        optimizer = model.configure_optimizers(OPTIMIZER.weight_decay, LR, betas, device.type)
    loss_of = torch.compile(model) if device.type == "cuda" else model
    steps = itertools.count(1)

    def step(batch: Batch) -> None:
        x, y = (part[0].to(device, non_blocking=True) for part in (batch.x, batch.y))
        with autocast:
            _, loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if next(steps) % 10 == 0:
            loss.item()

    return step


def load(path: Path) -> ModuleType:
    """nanoGPT's model.py as a module. ValueError if it is not there or is something else."""
    spec = importlib.util.spec_from_file_location("peer_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"peer={path} is no Python file; give the path of nanoGPT's model.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # a dataclass looks its module up
    spec.loader.exec_module(module)
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ValueError(f"peer={path} has no GPT and GPTConfig; give the path of nanoGPT's model.py")
    return module


def some_batches(config: GPTConfig, B: int, device: torch.device) -> list[Batch]:
    """Batches of random tokens, (1, B, T) as TrainStep takes them, on the host: no side waits for its data."""
    size = (WARM_UP, 1, B, config.context_length + 1)
    windows = torch.randint(config.vocab_size or 1, size, generator=torch.Generator().manual_seed(0))
    batches = [Batch(w[..., :-1].contiguous(), w[..., 1:].contiguous(), None) for w in windows]
    return [batch.each(torch.Tensor.pin_memory) for batch in batches] if device.type == "cuda" else batches
