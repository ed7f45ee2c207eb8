"""The kernels of Hopper GPUs (sm_90): forward.py and backward.py. What they lack is here, because only Hopper GPUs need
Gluon, which the two import."""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from kernels.problem import Problem

# The options of model/abilities.py, but for those that choose a kernel.
TAKES = {"forward": ("window", "windows", "documents", "dropout_p"), "backward": ("dropout_p",)}
NARROW = 512  # keys in a window


def why_not(which: str, q: Tensor, problem: Problem, autotune: bool, kernel: str) -> str:
    """Why the forward or the backward of a problem is left to flash.py; empty if it is computed here."""
    asked, known = (which, autotune, kernel), problem.cache
    if known is not None and asked in known:
        return known[asked]
    why = lacks(which, options_of(problem, autotune, kernel), q.device, q.dtype, q.shape[-1])
    if known is not None:
        known[asked] = why
    return why


def options_of(problem: Problem, autotune: bool, kernel: str) -> dict[str, str]:
    """What a problem has, in the names of model/abilities.py."""
    mask, score = problem.mask, problem.score
    found = {
        "window": mask.at_least, "documents": mask.documents_q, "positions": mask.positions, "block_mask": mask.blocks,
        "dropout_p": problem.dropout.seed, "break_it": problem.broken or None, "autotune": autotune or None,
        kernel: kernel, **dict(zip(score._fields[2:], score[2:], strict=True)),
    }  # fmt: skip
    if problem.dropout.seed is not None and mask.at_least is not None and 1 - mask.at_least < NARROW:
        found["narrow"] = True
    return {name: name for name, value in found.items() if value is not None}


def lacks(which: str, options: Mapping[str, str], device: torch.device, dtype: torch.dtype, D: int) -> str:
    """Why forward.py or backward.py does not compute what `options` of model/abilities.py ask for, as the end of a
    message; empty if it does."""
    if "autotune" in options:
        return "attention.autotune=true tunes the portable kernels"
    known = ("auto", "hopper", "portable", "kernel", "narrow", *TAKES[which])
    if missing := dict.fromkeys(typed for name, typed in options.items() if name not in known and "=" not in name):
        return f"it has no {', '.join(missing)}"
    if "portable" in options:
        return "attention.kernel=portable"
    if here := lacks_here(dtype, D, device):
        return here
    if which == "forward" and "narrow" in options and "hopper" not in options:
        return f"it is slower with dropout in a window of fewer than {NARROW} keys; attention.kernel=hopper takes it"
    return ""


@cache
def lacks_here(dtype: torch.dtype, D: int, device: torch.device) -> str:
    """lacks() for a dtype, head size and GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"it runs on Hopper GPUs (sm_90), not on {name}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16, not {dtype}"
    if D not in (64, 128):
        return f"it has head sizes 64 and 128, not {D}"
    try:
        import kernels.hopper.backward  # noqa: F401  (Gluon's names change from one Triton to the next)
    except (ImportError, AttributeError) as error:
        import triton

        return f"it wants Triton 3.6 to 3.9, not {triton.__version__} ({error})"
    return ""
