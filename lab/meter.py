"""The instruments of the race: the time that a call takes, and the most memory that is alive in it."""

import statistics
import time
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# It has no public name; PyTorch's own guide, "Extending PyTorch", points to this one.
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(action: Callable, device: torch.device) -> int:
    """The most memory that action() takes above what was taken before."""
    if device.type != "cuda":
        with PeakBytes() as counted:
            action()
        return counted.peak
    action()  # compiles, and takes the workspaces that stay
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


def median_ms(action: Callable, device: torch.device) -> float:
    """Milliseconds: the median of three runs or of as many as 0.1 s hold, after some that do not count."""
    if device.type == "cuda":
        from triton.testing import do_bench  # by the GPU's clock; empties the second-level cache before each run

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
    """The most bytes that were alive at once in tensors made inside: exact, repeatable, and on any device.

    The process's own peak would count the allocator's slack and whatever else the process has done before.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.made: set[int] = set()  # addresses of the storages that were made inside and still are

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
    """The tensors among an operation's arguments or results, which stand alone or in tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        elif isinstance(value, tuple | list):
            yield from tensors_in(*value)
