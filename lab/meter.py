"""Measures a call: its time, its peak memory, and the numbers it moves to and from memory."""

import statistics
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# PyTorch's guide "Extending PyTorch" points to this module. There is no other way to see every operation of a backward.
from torch.utils._python_dispatch import TorchDispatchMode

from model import attention

OURS = {
    torch.ops.tilegpt.attention.default: attention.forward,
    torch.ops.tilegpt.attention_backward.default: attention.backward,
}
CLEARED = 2**28  # bytes that are written before each run, to clear the L2 cache: five times an H100's


def is_out_of_memory(error: BaseException) -> bool:
    """On a CPU torch raises a RuntimeError that only its text tells from others."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error) for text in ("DefaultCPUAllocator", "out of memory"))


def ms_of(action: Callable[[], object], device: torch.device) -> float:
    """The time of action() in ms, from an idle device to an idle device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    action()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3


def median_ms(action: Callable, device: torch.device, prepare: Callable[[], Any] | None = None) -> float:
    """The median time of action() in ms, after a warm-up: of 3 to 100 runs, about 0.1 s. With prepare: of
    action(prepare()), without the time of prepare()."""
    make = (lambda: (prepare(),)) if prepare else tuple
    if device.type == "cuda":
        return statistics.median(gpu_times(action, device, make))
    action(*make())
    times: list[float] = []
    while len(times) < 3 or sum(times) < 100:
        times.append(ms_of(partial(action, *make()), device))
    return statistics.median(times)


def gpu_times(action: Callable, device: torch.device, make: Callable[[], tuple]) -> list[float]:
    """The times of runs of action(*make()) by the GPU's own clock, in ms. Each run finds the L2 cache cleared.

    A small kernel takes the GPU less time than its launch takes Python, and an idle GPU would count that. So the GPU
    clears the cache several times before each run, for at least as long as the launch takes.
    """
    cache = torch.empty(CLEARED, dtype=torch.int8, device=device)

    def run(clears: int) -> tuple[torch.cuda.Event, torch.cuda.Event, float]:
        made = make()
        for _ in range(clears):
            cache.zero_()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        started = time.perf_counter()
        action(*made)
        launch = (time.perf_counter() - started) * 1e3
        ended.record()
        return began, ended, launch

    for _ in range(2):  # the first one compiles
        began, ended, launch = run(1)
        torch.cuda.synchronize(device)
    clear = ms_of(lambda: [cache.zero_() for _ in range(10)], device) / 10
    clears = 1 + min(100, int(1.5 * launch / clear))  # a launch of more than about 5 ms is not hidden wholly
    count = min(100, max(3, int(100 / max(1e-3, began.elapsed_time(ended)))))
    events = [run(clears)[:2] for _ in range(count)]
    torch.cuda.synchronize(device)
    return [began.elapsed_time(ended) for began, ended in events]


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """The peak memory of action() in bytes, beyond what was allocated before."""
    if device.type != "cuda":
        with PeakBytes() as counted:
            action()
        return counted.peak
    action()  # compiles, and allocates workspaces that stay
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


class PeakBytes(TorchDispatchMode):
    """The peak number of bytes in tensors that were made inside this context: exact, repeatable, on any device.

    The peak of the process would include the allocator's slack and whatever the process did before.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.made: set[int] = set()  # addresses of the storages that were made inside and are still alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in OURS:  # our op is one call from outside
            with self:
                return OURS[function](*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors_in(args, kwargs)}
        result = function(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tensors_in(result)):
            key, size = storage.data_ptr(), storage.nbytes()
            if size and key not in given and key not in self.made:
                weakref.finalize(storage, self.freed, key, size)
                self.made.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
        return result

    def freed(self, key: int, size: int) -> None:
        self.made.remove(key)
        self.alive -= size


class Operations(TorchDispatchMode):
    """Counts the words (numbers) that operations move: each reads its inputs from slow memory and writes its result
    there. Views move nothing."""

    def __init__(self):
        super().__init__()
        self.words = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:  # a view as well
            self.words += sum(x.numel() for x in tensors_in(args, kwargs, result))
        return result


def tensors_in(*values) -> list[Tensor]:
    """The tensors among an operation's arguments or results, also inside tuples, lists and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
