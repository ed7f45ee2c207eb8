"""One whole training step of ours beside nanoGPT's. `python bench.py mode=step peer=PATH_OF_ITS_MODEL_PY`

Both sides have the same model (GPT-2 without biases, as nanoGPT trains it), batches, optimizer settings and, on a GPU,
bf16 autocast. nanoGPT's model is compiled, and stepped as in its train.py; its loss is read every 10 steps. Our step is
that of train.py, recorded as a CUDA graph. B sequences, T tokens in each.
"""

import gc
import importlib.util
import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from data.loader import Batch
from lab.meter import ms_of, peak_bytes
from model.attention import AttentionConfig, resolve
from model.gpt import GPT, GPTConfig
from training.machine import about, autocast, set_precision
from training.optimizer import OptimizerConfig, build_optimizers
from training.step import TrainStep

GPT2 = GPTConfig(vocab_size=50_304, bias=False)
NANO = GPTConfig(n_layer=4, n_head=4, n_embd=128, vocab_size=256, mlp="gelu", bias=False)  # for two CPU cores
LR, OPTIMIZER = 6e-4, OptimizerConfig()
STEPS, TURNS = 5, 5  # steps before the first turn, and in each turn; turns of each side
Step = Callable[[Batch], None]  # makes one update; may return before the GPU has made it


def compare_steps(lengths: list[int], peer: str, device: torch.device) -> None:
    """Prints for each context length: ms a step of both sides (medians of turns A B A B in one process), their ratio,
    and the peak memory of each in GiB. peer: path of nanoGPT's model.py."""
    spec: Any = importlib.util.spec_from_file_location("peer_model", peer)
    sys.modules["peer_model"] = module = importlib.util.module_from_spec(spec)  # a dataclass looks its module up
    spec.loader.exec_module(module)
    cuda = device.type == "cuda"
    tokens = 65_536 if cuda else 4096  # of a step
    set_precision(dtype := "bf16" if cuda else "float32")
    low = autocast(dtype, device)
    print("{device}, torch {torch}, triton {triton}, commit {commit}".format(**about(device)))
    print(f"{tokens:,} tokens a step; the ratio is nanoGPT's ms / ours, with the slowest and the fastest turn\n")
    print(f"{'T':>7}  residual_dtype   ours ms  nanoGPT ms{'ratio':>25}  ours GiB  nanoGPT GiB", flush=True)
    for T, residual_dtype in itertools.product(lengths, ("float32", "autocast") if cuda else ("float32",)):
        torch.compiler.reset()  # or a model of another length would be compiled for variable lengths
        config = replace(GPT2 if cuda else NANO, context_length=T, residual_dtype=residual_dtype)
        windows = torch.randint(config.vocab_size or 1, (STEPS, 1, max(1, tokens // T), T + 1))
        batches = [Batch(w[..., :-1].contiguous(), w[..., 1:].contiguous(), None) for w in windows]
        if cuda:  # no side waits for its data
            batches = [batch.each(torch.Tensor.pin_memory) for batch in batches]
        builds = partial(our_step, config, low, device), partial(their_step, module, config, low, device)
        sides, gib = list[Step](), list[float]()  # frees the sides of the length before
        for build in builds:
            gc.collect()
            torch.cuda.empty_cache()
            gib.append(peak_bytes(partial(begin, build, batches, sides), device) / 2**30)
        turns = [[ms_of(partial(list, map(step, batches)), device) / STEPS for step in sides] for _ in range(TURNS)]
        ratios = [theirs / ours for ours, theirs in turns]
        ratio = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        ms = "".join(f"{median(side):>12.1f}" for side in zip(*turns, strict=True))
        print(f"{T:>7}  {residual_dtype:12}{ms}{ratio:>25}{gib[0]:>10.2f}{gib[1]:>13.2f}", flush=True)


def begin(build: Callable[[], Step], batches: list[Batch], sides: list[Step]) -> None:
    """Builds a side and makes its first steps. A recorded step takes its memory when it is recorded, in these steps."""
    sides.append(build())
    for batch in batches:
        sides[-1](batch)


def our_step(config: GPTConfig, low, device: torch.device) -> Step:
    """The step of train.py. low: a context manager, autocast()."""
    model = GPT(config, resolve(AttentionConfig(), device.type, config.head_size, config.context_length)).to(device)
    scaler, mode = torch.amp.GradScaler(device.type, enabled=False), "graph" if device.type == "cuda" else "eager"
    train_step = TrainStep(model, build_optimizers(model, OPTIMIZER), scaler, low, mode)
    pending: deque = deque()

    def step(batch: Batch) -> None:
        pending.append(train_step(batch, LR))
        if len(pending) > train_step.ahead:
            assert not pending.popleft().wait().stopped, "the loss is NaN"

    return step


def their_step(module, config: GPTConfig, low, device: torch.device) -> Step:
    """nanoGPT's step: the model of its module, compiled on a GPU; its optimizer, fused AdamW; its loop."""
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "bias", "vocab_size")}
    model = module.GPT(module.GPTConfig(block_size=config.context_length, dropout=0.0, **sizes)).to(device)
    optimizer = model.configure_optimizers(OPTIMIZER.weight_decay, LR, (OPTIMIZER.beta1, OPTIMIZER.beta2), device.type)
    loss_of, steps = torch.compile(model) if device.type == "cuda" else model, itertools.count(1)

    def step(batch: Batch) -> None:
        x, y = (part[0].to(device, non_blocking=True) for part in (batch.x, batch.y))
        with low:
            _, loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if next(steps) % 10 == 0:
            loss.item()

    return step
