"""What runs where: what each implementation of attention, each way to run a step and each layout of processes lacks,
and why, in one table.

    why_not("sdpa", wanted(config), device)      "attention.window=8: sdpa has nothing of the kind; use attention=tiled"

An option is named by its key, without `attention.`; a failure of break_it by its name; attention=naive and the like
stand for the implementation. Rows of ABILITIES say what is lacking, so an option that no row names runs everywhere.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernels.hopper import NARROW, lacks
from kernels.problem import HAS_TRITON
from model.break_it import FAILURES, UNBROKEN, BreakIt

if TYPE_CHECKING:
    from model.attention import AttentionConfig

OF_MASK = ("window", "windows", "documents", "block_mask")
OF_SCORE = ("softcap", "alibi")
# Head size: the context from which, on a Hopper GPU, a training step is faster with triton than with sdpa
# (docs/results.md).
HOPPER_FROM = {64: 1024, 128: 8192}


@dataclass(frozen=True)
class Ability:
    """lacks: {option: why}; {} in it stands for the option as it is typed, which otherwise comes first. where: why it
    cannot run with these options on this device, for this dtype and head size; empty if it can."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    where: Callable[[Mapping[str, str], torch.device, torch.dtype, int], str] = lambda *_: ""


def of_triton(options: Mapping[str, str], device: torch.device, dtype: torch.dtype, D: int) -> str:
    """An unsupported head size or dtype is refused at the first call too."""
    try:
        from kernels.op import refusal
    except ModuleNotFoundError as error:  # triton exists for Linux only
        return f"attention.impl=triton: {error}; pip install triton (Linux), or use attention=tiled or attention=sdpa"
    return refusal(dtype, D, device) or ""


def of_decode(options: Mapping[str, str], device: torch.device, dtype: torch.dtype, D: int) -> str:
    """The kernel computes a token's attention with triton, and with sdpa on a GPU."""
    if "attention=triton" not in options and ("attention=sdpa" not in options or device.type != "cuda"):
        return f"it is for attention=triton, and for attention=sdpa on a GPU, not on {device.type}"
    return of_triton(options, device, dtype, D) if HAS_TRITON else "triton is not installed"


def of_graph(options: Mapping[str, str], device: torch.device, dtype: torch.dtype, D: int) -> str:
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA GPU, not {device.type}"
    # PyTorch keeps the random state for any sdpa that is computed again, also for one that drops nothing.
    drawn = options.get("unrestored_seed") or options.get("attention=sdpa")
    if drawn and "recomputed" in options:
        return f"{drawn} with {options['recomputed']} reads the random state in Python"
    return ""


IMPLEMENTATIONS = ("naive", "tiled", "triton", "sdpa")
LOOPS = {"order": "{impl} has no such loops"}
TRITONS = {"autotune": "{impl} has nothing to tune", "kernel": "{impl} has no such kernel"}
NOT_NAIVE = {name: failure.not_in_naive for name, failure in FAILURES.items() if failure.not_in_naive}
UNBROKEN_SDPA = dict.fromkeys(FAILURES.keys() - {"no_scale", "unrestored_seed"}, "torch's sdpa cannot be broken")
NOT_SDPA = dict.fromkeys((*OF_MASK, *OF_SCORE), "sdpa has nothing of the kind")
ABILITIES = {
    # implementations
    "naive": Ability(LOOPS | TRITONS | NOT_NAIVE),
    "tiled": Ability(TRITONS),
    "triton": Ability(LOOPS, of_triton),
    "sdpa": Ability(NOT_SDPA | LOOPS | TRITONS | UNBROKEN_SDPA | {"lse": "sdpa returns none"}),
    "hopper forward": Ability(where=partial(lacks, "forward")),  # kernels/hopper/ has their limits
    "hopper backward": Ability(where=partial(lacks, "backward")),
    "decode": Ability(where=of_decode),
    "cache": Ability(
        {"block_mask": "the cache has no block masks"}
        | dict.fromkeys((*FAILURES, "score_gain"), "a cache would compute whole attention, not the broken one")
    ),
    # ways to run a step, and what a checkpoint keeps
    "recorded": Ability({"sends": "{}", "attention=tiled": "{} chooses its tiles in Python"}, of_graph),
    "selective": Ability({"attention=naive": "from o and lse {} cannot compute its gradients"}),
    # layouts of processes
    "ring": Ability({
        "attention=sdpa": "{}, which returns no lse",
        "dropout_p": "{}",  # both count rows and columns of the whole sequence, and two parts count their own
        "block_mask": "{}",
        "positions": "{} with positions, which a window needs here",
    }),
    "several": Ability({
        "probe": "{} looks at the batches of one process",
        "sdpa dropout": "{} draws PyTorch's dropout, the same on all; attention=tiled and triton have ours",
        **dict.fromkeys((*FAILURES, "score_gain"), "{} is looked at in one process"),
    }),
    "shard": Ability({
        "muon": "{}: Muon needs whole matrices, and a process has some of their rows; use optimizer=adamw, or "
        "parallel.shard=false",
        "fp16": "{} does not scale the loss, as dtype=fp16 needs; use dtype=bf16 or float32",
        "context_every": "{} measures in one process, and parallel.shard=true leaves none with all weights; use "
        "context_every=0, and eval_only=true without torchrun later",
    }),
}  # fmt: skip


def wanted(config: "AttentionConfig", break_it: BreakIt = UNBROKEN, **more: str) -> dict[str, str]:
    """What is asked for beyond plain attention: {option: as it is typed}. more: other options."""
    found = {name: f"attention.{name}={getattr(config, name)}" for name in (*OF_MASK, *OF_SCORE)
             if getattr(config, name)}  # fmt: skip
    if config.dropout_p > 0:
        found["dropout_p"] = f"attention.dropout_p={config.dropout_p}"
        if any(window is not None and window < NARROW for window in (config.window, *(config.windows or ()))):
            found["narrow"] = "dropout in a narrow window"
    if config.order != "queries_outside":
        found["order"] = f"attention.order={config.order}"
    if config.autotune:
        found["autotune"] = "attention.autotune=true"
    if config.kernel != "auto":
        found["kernel"] = found[config.kernel] = f"attention.kernel={config.kernel}"
    found |= dict.fromkeys(break_it.broken, f"break_it={break_it.label}")
    if break_it.score_gain != 1:
        found["score_gain"] = f"break_it={break_it.label}"
    return found | {f"attention={config.impl}": f"attention={config.impl}"} | more


def why_not(
    thing: str, options: Mapping[str, str], device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    D: int = 128,
) -> str:  # fmt: skip
    """Why a row of ABILITIES cannot do what is wanted, in one line with the value; empty if it can. Of an
    implementation also the way out. dtype, D: of q, k and v."""
    able, device = ABILITIES[thing], torch.device(device)
    if here := able.where(options, device, dtype, D):
        return here
    for option, typed in options.items():
        if (why := able.lacks.get(option)) is None:
            continue
        line = why.replace("{}", typed) if "{}" in why else f"{typed}: {why}"
        if thing not in IMPLEMENTATIONS:
            return line
        others = ["tiled", "triton"] if device.type == "cuda" else ["tiled"]
        others = [f"attention={impl}" for impl in others if option not in ABILITIES[impl].lacks]
        out = ["leave it out"] * (option in TRITONS) + [f"use {' or '.join(others)}"] * bool(others)
        return f"{line.replace('{impl}', thing)}; {' or '.join(out)}"
    return ""


def resolve(
    config: "AttentionConfig",
    device: str,
    break_it: BreakIt = UNBROKEN,
    lse: bool = False,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
) -> "AttentionConfig":
    """Turns impl=auto into the implementation that will run, and refuses one that cannot run, before any work is done.

    auto is the first of these that can do what is wanted:
    - without a GPU tiled, so that the code to read is the code that runs (sdpa is faster there: docs/training.md);
    - on a GPU triton, then tiled, for dropout or a failure, and on a Hopper GPU where it was measured to be
      faster in training: HOPPER_FROM;
    - on a GPU else sdpa, then triton, then tiled. sdpa has no windows, documents, block masks, softcap and ALiBi, and
      returns no lse (lse=True).

    model: GPTConfig of a training run; None where one does not train. dtype: of q, k and v.

    triton refuses head sizes above 256 and float64 only at its first call, and kernel=hopper those that it lacks.
    Raises ValueError with the reason and the way out.
    """
    options = wanted(config, break_it)
    if config.impl == "auto":
        order = ["tiled"]
        if device.startswith("cuda"):
            order = ["sdpa", "triton", "tiled"]
            if config.dropout_p > 0 or break_it.broken or hopper_is_faster(config, device, model, dtype):
                order = ["triton", "tiled"]
        asked = options | ({"lse": "lse"} if lse else {})
        able = (impl for impl in order if not why_not(impl, asked, device))
        config = replace(config, impl=next(able, order[0]))
        options = wanted(config, break_it)
    if why := why_not(config.impl, options, device):
        raise ValueError(why)
    check_switches(config, break_it)
    if config.kernel == "hopper" and (why := why_not("hopper forward", options, device)):
        raise ValueError(f"attention.kernel=hopper: {why}; use attention.kernel=auto")
    return config


def hopper_is_faster(config: "AttentionConfig", device: str, model: Any, dtype: torch.dtype) -> bool:
    """Whether a step of this model (GPTConfig or None) is faster with triton's kernels for Hopper than with sdpa."""
    if (
        model is None
        or model.context_length < HOPPER_FROM.get(model.head_size, math.inf)
        or why_not("triton", {}, device)
    ):
        return False
    return not why_not("hopper forward", wanted(config), device, dtype, model.head_size)


def check_switches(
    config: "AttentionConfig",
    break_it: BreakIt,
    causal: bool = True,
    documents: bool = False,
    softmax_scale: float | None = None,
) -> None:
    """Raises ValueError for a failure that has nothing to remove from this implementation or problem."""
    if not break_it.broken:
        return
    scale = config.softmax_scale if softmax_scale is None else softmax_scale
    elsewhere = config.window or config.windows or config.documents or config.block_mask or documents
    idle = {
        "no_scale": scale is not None and f"softmax_scale={scale} is no 1 / sqrt(D); leave it out",
        "local_mask": (not causal and "there is no causal mask to break; use causal=True")
        or (elsewhere and "only the causal mask can be broken; leave out window, windows, documents and block_mask"),
        **{
            name: config.dropout_p == 0 and f"there is no dropout to draw; use {FAILURES[name].wakes}"
            for name in ("stale_seed", "unrestored_seed")
        },
    }
    lacks = ABILITIES[config.impl].lacks if config.impl in ABILITIES else {}
    for name in break_it.broken:
        typed = f"break_it={break_it.label}"
        if name in lacks:
            raise ValueError(why_not(config.impl, {name: typed}))
        if idle.get(name):
            raise ValueError(f"{typed}: {idle[name]}")
