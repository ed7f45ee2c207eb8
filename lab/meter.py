"""Measures a call: its time, its peak memory, and on what it spends the time."""

import re
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# A private name, but PyTorch's guide "Extending PyTorch" points to it, and there is no public one.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.machine import out_of_memory_as

# What the kernels of a step (on a CPU: torch's ops) are for, by words in their names. The first that matches counts: a
# kernel that a compiler has fused is named after all of its ops. So the softmax of a naive attention counts as loss.
PARTS = {
    "attention": r"attention|flash|fmha|sdpa|cudnn|bmm|exp2"
    r"|^(forward|dq|dkdv|visits|row_terms|backward|scaled)_kernel",
    "products": r"gemm|cutlass|nvjet|cublas|xmma|splitk|triton_tem|::(add)?mm_?$",
    "loss": r"loss|softmax|logsumexp|entropy|scatter|gather|(::|_)exp_?(_|$)",
    "clip and optimizer": r"adam|muon|multi_tensor|foreach|vector_norm|normtwo|lerp",
    "norm": r"layer_?norm|rms_?norm|gammabeta|^(norm|sum)_kernel$",
    "activation": r"gelu|silu|tanh",
    "copies and casts": r"copy|memcpy|memset|clone|catarray|(::|_)cat(_|$)|fill|zero",
}


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def ms_of(action: Callable[[], object], device: torch.device) -> float:
    """The time of action() in ms, from an idle device to an idle device."""
    wait(device)
    started = time.perf_counter()
    action()
    wait(device)
    return (time.perf_counter() - started) * 1e3


def median_ms(action: Callable[[], object], device: torch.device) -> float:
    """The median time of action() in ms, after a warm-up. On a GPU: of 5 to 100 runs, about 0.1 s. Elsewhere: of at
    least three runs and 0.1 s."""
    if device.type == "cuda":
        return statistics.median(gpu_times(action, device))
    action()
    times: list[float] = []
    while len(times) < 3 or sum(times) < 100:
        times.append(ms_of(action, device))
    return statistics.median(times)


def gpu_times(action: Callable, device: torch.device) -> list[float]:
    """The times of runs of action() on a GPU, by its own clock, in ms. Each finds the L2 cache cleared.

    The GPU waits, for a second at most, while the host launches the runs. Else a host that is late would count: at
    T=1,024 a forward takes the GPU about as long as its launch takes the host.
    """
    emptied = torch.empty(2**28, dtype=torch.int8, device=device)

    def runs(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for began, ended in events:
            emptied.zero_()
            began.record()
            action()
            ended.record()
        return events

    runs(3)  # compile, and warm up
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    events = runs(5)
    on_host = (time.perf_counter() - started) / 5  # seconds of a launch
    torch.cuda.synchronize(device)
    ms = statistics.median(began.elapsed_time(ended) for began, ended in events)
    count = min(100, max(5, int(100 / ms)))
    torch.cuda._sleep(int(3e9 * min(1.0, on_host * count)))  # clock cycles, of which a GPU has 1.7e9 to 3e9 a second
    events = runs(count)
    torch.cuda.synchronize(device)
    return [began.elapsed_time(ended) for began, ended in events]


def profiled(action: Callable[[], object], times: int, device: torch.device) -> list[tuple[str, float]]:
    """Name and ms of each kernel of a GPU, or else of each of torch's ops on the CPU, over `times` calls of action();
    the ms are those of one call. An op's time is without that of the ops that it calls."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(times):
            action()
        wait(device)
    if cuda:  # a range that torch has named is no kernel
        kernels = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        return [(e.key, e.self_device_time_total / 1e3 / times) for e in kernels]
    ops = [e for e in seen.key_averages() if "::" in e.key and not e.key.startswith("autograd::")]
    return [(e.key, e.self_cpu_time_total / 1e3 / times) for e in ops]


def where(spent: Iterable[tuple[str, float]], ms: float) -> dict[str, float]:
    """On what a call spends its ms: those of each of PARTS, of the rest, and idle, in which none of `spent` ran.

    spent: from profiled(). Kernels that ran at the same time count twice, so idle may be larger than it says.
    """
    parts = dict.fromkeys([*PARTS, "rest"], 0.0)
    for name, part_ms in spent:
        parts[next((part for part, words in PARTS.items() if re.search(words, name.lower())), "rest")] += part_ms
    return parts | {"idle": max(0.0, ms - sum(parts.values()))}


class OutOfMemory(ValueError):
    """Memory ran out."""


def memory_for(what: str, way_out: str) -> AbstractContextManager:
    """OutOfMemory, in one line, if memory runs out inside this context."""
    return out_of_memory_as(lambda: OutOfMemory(f"out of memory with {what}; {way_out}"))


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """The peak memory of action() in bytes, beyond what was allocated before."""
    if device.type == "cuda":
        action()  # compiles, and allocates workspaces that stay
    with peak_of(device) as counted:
        action()
    return counted.peak


def peak_of(device: torch.device) -> "AbstractContextManager[PeakBytes | SimpleNamespace]":
    """A context that counts the peak memory of what is made inside it: its `peak`, in bytes, beyond what was there."""
    return gpu_peak(device) if device.type == "cuda" else PeakBytes()


@contextmanager
def gpu_peak(device: torch.device) -> Iterator[SimpleNamespace]:
    """Counts by the allocator of a CUDA device. On another device it counts nothing. Its `alive`: bytes at the end."""
    found, cuda = SimpleNamespace(peak=0, alive=0), device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield found
    if cuda:
        found.alive = torch.cuda.memory_allocated(device) - before
        found.peak = torch.cuda.max_memory_allocated(device) - before


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


class Operations(TorchDispatchMode):
    """Counts the words of an algorithm without tiles: each operation reads its inputs from slow memory and writes its
    result there. Views move nothing. seen: called with each operation, its arguments, its bytes, and a repetition."""

    def __init__(self, seen: Callable[..., object] = lambda *_: None):
        super().__init__()
        self.seen, self.words = seen, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        again = partial(function, *args, **(kwargs or {}))
        result = again()
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:  # a view as well
            tensors = tensors_in(args, kwargs, result)
            self.words += sum(x.numel() for x in tensors)
            self.seen(function, args, sum(x.nbytes for x in tensors), again)
        return result


def tensors_in(*values) -> list[Tensor]:
    """The tensors among an operation's arguments or results, also inside tuples, lists and dicts."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
