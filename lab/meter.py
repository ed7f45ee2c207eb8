"""Measures a call: its time, its peak memory, and the numbers it moves to and from memory."""

import time
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the only way to see every operation of a backward
from torch.utils._pytree import tree_leaves

from model import op

OURS: dict[Callable, Callable] = {op.flash_attention.default: op.forward, op.flash_backward.default: op.backward}


def ms_of(action: Callable[[], object], device: torch.device) -> float:
    """The time of action() in ms, from an idle device to an idle device."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return (time.perf_counter() - started) * 1e3


def gpu_ms_of(action: Callable[[], object], device: torch.device) -> float:
    """The same by the GPU's own clock, with an L2 cache that is cleared. Clearing it 32 times keeps an H100 busy for
    2.8 ms, in which Python launches the kernels; the time of a short kernel would be that of its launch otherwise."""
    cache = torch.empty(2**28, dtype=torch.int8, device=device)  # five times the L2 cache of an H100
    for _ in range(32):
        cache.zero_()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    action()
    ended.record()
    torch.cuda.synchronize(device)
    return began.elapsed_time(ended)


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """The peak memory of action() in bytes, beyond what was allocated before."""
    if device.type != "cuda":
        with PeakBytes() as counted:
            action()
        return counted.peak
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


class PeakBytes(TorchDispatchMode):
    """The peak number of bytes in tensors made inside this context: exact and repeatable, without allocators' slack."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.made: WeakSet[torch.UntypedStorage] = WeakSet()  # inside, and still alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in OURS:  # our op is one call from outside
            with self:
                return OURS[function](*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tensors_in([args, kwargs])}
        result = function(*args, **(kwargs or {}))
        self.made |= {x.untyped_storage() for x in tensors_in(result)} - given
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.made))
        return result


class Operations(TorchDispatchMode):
    """Counts the words (numbers) that operations read from slow memory and write there. Views move nothing."""

    words = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:  # a view as well
            self.words += sum(x.numel() for x in tensors_in([args, kwargs, result]))
        return result


def tensors_in(value) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
