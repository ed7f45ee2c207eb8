"""Runs kernels/hopper/backward.py on a CPU, as tests/gluon_on_cpu.py runs kernels/hopper/forward.py.

    backward = backward_on_cpu()
    launch_backward(backward, seed, q, k, v, o, lse2, do, dlse, found, problem)

Here is what only that file calls. Its two small kernels in plain Triton run in Triton's interpreter.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import gluon_on_cpu
from tests.gluon_on_cpu import Descriptor, Job, Number, Orders, Place, Pointer, copy_out, job, on_cpu

Number.__rshift__ = lambda a, b: Number(int(a) >> b)


def load(pointer: Pointer) -> Number:
    return Number(number_at(pointer))


def acquired(pointer: Pointer) -> Number:
    """A number that other programs change. A job that asks again waits for another one."""
    mine, place = job(), number_at(pointer)
    seen = getattr(mine, "seen", None)
    mine.pause(lambda: seen != (place.data_ptr(), int(place)))
    mine.seen = place.data_ptr(), int(place)
    return Number(place)


def atomic_add(pointer: Pointer, by: int, sem: str = "") -> Number:
    job().pause()
    place = number_at(pointer)
    found = Number(place)
    place += by
    return found


def number_at(pointer: Pointer) -> Tensor:
    return pointer.x.view(-1)[int(pointer.places) :][:1]


def wait_written() -> None:
    mine = job()
    mine.pause(lambda: mine.landing == 0)


def both_consumers() -> None:
    """They meet once for each of their calls."""
    mine = job()
    mine.meetings = getattr(mine, "meetings", 0) + 1
    came = mine.orders.__dict__.setdefault("came", Counter())  # by program
    came[mine.program] += 1
    mine.pause(lambda: came[mine.program] >= 2 * mine.meetings)


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


class Layout:
    """How a tile lies in shared memory, which is nothing here."""

    def __init__(self, **_: Any): ...

    @staticmethod
    def get_default_for(*_: Any) -> None: ...


def backward_on_cpu(change: Callable[[str], str] = lambda source: source) -> ModuleType:
    """kernels/hopper/backward.py, with what it takes from kernels/hopper/forward.py. change: as in on_cpu()."""
    more = {
        "builtin": lambda f: f,
        "load": load,
        "atomic_add": atomic_add,
        "where": where,
        "NVMMASharedLayout": Layout,
        "tma": SimpleNamespace(
            async_load=gluon_on_cpu.copy_in,
            async_store=copy_out,
            async_atomic_add=lambda x, at, place: copy_out(x, at, place, add=True),
            store_wait=gluon_on_cpu.wait_copies,
        ),
    }
    kept = sys.modules.get("kernels.hopper.forward")
    sys.modules["kernels.hopper.forward"] = on_cpu()
    try:
        module = on_cpu(change, gluon_on_cpu.SOURCE.with_name("backward.py"), more)
    finally:
        del sys.modules["kernels.hopper.forward"]
        if kept is not None:
            sys.modules["kernels.hopper.forward"] = kept
    module.wait_written = wait_written
    module.acquired = acquired
    module.as_table = lambda place, n: Place(place.x.view(torch.int32).view(-1)[: n * 128].view(n, 2, 8, 8))
    module.as_kept_operand = lambda p, layout, dtype: p.relu().to(dtype)
    module.both_consumers = both_consumers
    module.halves = lambda place: Place(place.x.view(64, 2, 64).transpose(0, 1))
    return module


def launch_backward(module: ModuleType, seed: int, *args: Any, programs: int = 2) -> None:
    """launch_backward() of kernels/hopper/backward.py, on as many processors as `programs`."""
    orders = Orders(seed)

    class Kernel:
        def __getitem__(self, grid):
            def run(*args, num_warps, maxnreg):
                args = [Pointer(x) if isinstance(x, Tensor) else Number(x) if type(x) is int else x for x in args]
                for program in range(grid[0]):
                    Job(orders, program, grid[0], kernel, *args)
                orders.run()

            return run

    kernel, module.backward_kernel = module.backward_kernel, Kernel()
    module.processors = lambda device: programs
    module.in_tiles = lambda x, rows, layout: Descriptor(x, rows)
    module.shared_layout = lambda *_: None
    try:
        module.launch_backward(*args)
    finally:
        module.backward_kernel = kernel
