"""The kernels of Hopper GPUs (sm_90): forward.py and backward.py. What they lack is here, because only Hopper GPUs need
Gluon, which the two import."""

from functools import cache

import torch
import triton
from torch import Tensor

from kernels.problem import Problem

NARROW = 512  # keys in a window


def forward_lacks(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> str:
    """Why the forward is left to flash.py, as the end of a message; empty if forward.py computes it."""
    if autotune:
        return "attention.autotune=true tunes the portable kernels"
    wanted = problem.softcap, problem.slopes, problem.mask.positions, problem.mask.blocks
    if any(x is not None for x in wanted) or problem.without:
        return "it has no softcap, alibi, positions, block mask or break_it"
    window = problem.mask.at_least
    narrow = problem.seed is not None and window is not None and 1 - window < NARROW
    return lacks(q.dtype, q.shape[-1], q.device, kernel, narrow)


def backward_lacks(q: Tensor, problem: Problem, autotune: bool, kernel: str) -> str:
    """Why the backward is left to flash.py; empty if backward.py computes it."""
    if autotune:
        return "attention.autotune=true tunes the portable kernels"
    mask = problem.mask
    others = mask.at_least, mask.documents_q, mask.positions, mask.blocks, problem.softcap, problem.slopes
    if any(x is not None for x in others) or problem.without:
        return "it has no window, documents, positions, block mask, softcap, alibi or break_it"
    return lacks(q.dtype, q.shape[-1], q.device, kernel)


@cache
def lacks(dtype: torch.dtype, D: int, device: torch.device, kernel: str, narrow_dropout: bool = False) -> str:
    """Why forward.py and backward.py do not compute attention of this dtype, head size and GPU; empty if they do.
    narrow_dropout: whether there is dropout in a window of fewer than NARROW keys."""
    if kernel == "portable":
        return "attention.kernel=portable"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"it runs on Hopper GPUs (sm_90), not on {name}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16, not {dtype}"
    if D not in (64, 128):
        return f"it has head sizes 64 and 128, not {D}"
    if kernel == "auto" and narrow_dropout:
        return f"it is slower with dropout in a window of fewer than {NARROW} keys; attention.kernel=hopper takes it"
    try:
        import kernels.hopper.backward  # noqa: F401  (Gluon's names change from one Triton to the next)
    except (ImportError, AttributeError) as error:
        return f"it wants Triton 3.6 to 3.9, not {triton.__version__} ({error})"
    return ""
