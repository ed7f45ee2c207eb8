"""Measures a call for the race: its time and its peak memory."""

import statistics
import time
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# A private name, but PyTorch's guide "Extending PyTorch" points to it, and there is no public one.
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(action: Callable, device: torch.device) -> int:
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


def median_ms(action: Callable, device: torch.device) -> float:
    """The median time of action() in ms, after a warm-up. Takes at least three runs and at least 0.1 s."""
    if device.type == "cuda":
        from triton.testing import do_bench  # uses the GPU's clock and clears the L2 cache before each run

        return do_bench(action, return_mode="median")
    action()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < 0.1:
        started = time.perf_counter()
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


class PeakBytes(TorchDispatchMode):
    """The peak number of bytes in tensors that were made inside this context: exact, repeatable, on any device.

    The peak of the process would include the allocator's slack and whatever the process did before.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.made: set[int] = set()  # addresses of the storages that were made inside and are still alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
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


def tensors_in(*values) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, also inside tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        elif isinstance(value, tuple | list):
            yield from tensors_in(*value)
