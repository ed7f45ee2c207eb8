"""Runs kernels/hopper/ on a CPU, one step at a time, in an order that a seed decides.

    with hopper_on_cpu(seed):                                       its kernels with a Gluon that is made here
        attention(q, k, v, AttentionConfig("triton", kernel="hopper"))

Triton's interpreter knows no Gluon. Here every job of every program is a thread, and only one of them runs at a time.
Whenever one does something that others can see, the seed picks who goes on: another job, or a copy or matrix product
that was started before. A place in shared memory holds NaN from the start of a copy to its end. So a job that does not
wait, or that frees a place too early, gives other results in some order, or breaks a barrier. A job counts as one
thread: what its own 32 or 128 threads do to each other is not seen. The small kernels in plain Triton run in Triton's
interpreter.
"""

import math
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import hopper
from model.attention import KINDS
from model.dropout import philox as philox_of_model

LOW = 0xFFFFFFFF
UNCACHED = hopper.lacks_here.__wrapped__
FOLDER = Path(__file__).resolve().parents[1] / "kernels" / "hopper"


class Orders:
    """Who runs next. Each job, copy and product has a speed of its own, from 1 to 100,000. So it may be late by far."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.main = threading.Semaphore(0)
        self.hardware: dict[tuple, Barrier] = {}
        self.speeds: dict[Any, float] = {}  # of the jobs that have not ended, and the copies and products in flight

    def run(self) -> None:
        while self.speeds:
            able = {one: speed for one, speed in self.speeds.items() if not isinstance(one, Job) or one.ready()}
            assert able, "deadlock: " + ", ".join(sorted(job.name for job in self.speeds))
            (chosen,) = self.random.choices(list(able), list(able.values()))
            if isinstance(chosen, Job):
                chosen.turn.release()
                self.main.acquire()
                if chosen.error:
                    raise chosen.error
            else:
                del self.speeds[chosen]
                chosen()

    def add(self, one: Any) -> None:
        self.speeds[one] = 10 ** self.random.uniform(0, 5)


class Job(threading.Thread):
    """A job of a program. until: what it waits for."""

    def __init__(self, orders: Orders, program: int, programs: int, do: Callable, *args):
        super().__init__(daemon=True, name=getattr(do, "__name__", "?"))
        self.orders, self.do, self.args = orders, do, args
        self.program, self.programs = Number(program), Number(programs)
        self.turn, self.error = threading.Semaphore(0), None
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Product] = []  # in flight, the oldest first
        self.leaving = 0  # copies to memory that have not read their place
        self.landing = 0  # those that have not written to memory
        orders.add(self)
        self.start()

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.do(*self.args)
        except Exception as error:  # goes to the thread of the test
            self.error = error
        del self.orders.speeds[self]
        self.orders.main.release()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, until `until` holds."""
        self.ready = until
        self.orders.main.release()
        self.turn.acquire()


def job() -> Job:
    found = threading.current_thread()
    assert isinstance(found, Job)
    return found


class Number(int):
    """An integer as a kernel has it."""

    def to(self, dtype: Any) -> "Number":
        return Number(self & LOW) if dtype == torch.uint32 else self


for operation in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor", "lshift", "rshift"):
    plain = getattr(int, f"__{operation}__")
    setattr(Number, f"__{operation}__", lambda a, b, plain=plain: Number(plain(a, b)) if isinstance(b, int) else
            getattr(torch.as_tensor(int(a)), plain.__name__)(b))  # fmt: skip


class Tile(Tensor):
    """A tensor in registers. torch has no arithmetic for uint32, so such a tile is int64."""

    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype: Any, bitcast: bool = False) -> "Tile":
        return self.view(dtype) if bitcast else self.long() & LOW if dtype == torch.uint32 else super().to(dtype)

    def __lshift__(self, by: Any) -> "Tile":
        return super().__lshift__(by) & LOW if self.dtype == torch.int64 else super().__lshift__(by)


def tile(x: Tensor) -> Tile:
    return x.as_subclass(Tile)


class Place:
    """Shared memory."""

    def __init__(self, x: Tensor):
        self.x, self.dtype = x, x.dtype

    def index(self, i: int) -> "Place":
        return Place(self.x[int(i)])

    def slice(self, start: int, length: int) -> "Place":
        return Place(self.x[start : start + length])

    def reshape(self, shape: tuple) -> "Place":
        return Place(self.x.view(shape))

    def permute(self, order: tuple) -> "Place":
        return Place(self.x.permute(order))

    def store(self, x: Tensor) -> None:
        job().pause()
        self.x.copy_(x)

    def load(self, layout: Any) -> Tensor:
        job().pause()
        return tile(self.x.clone())


class Barrier:
    """An mbarrier: a phase completes when `count` have arrived and all bytes that were announced have come."""

    def __init__(self, count: int = 0):
        self.phases, self.bytes, self.count, self.missing = 0, 0, count, count

    def index(self, i: int) -> "Barrier":
        return self.each[int(i)]

    def arrive(self, bytes: int = 0) -> None:
        assert self.missing > 0, "one more arrival than the phase has: hardware stops the program here"
        self.missing -= 1
        self.bytes += bytes
        self.complete()

    def complete(self) -> None:
        if self.missing == self.bytes == 0:
            self.phases, self.missing = self.phases + 1, self.count


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count
    barrier.bytes = 0


def wait(barrier: Barrier, phase: int) -> None:
    job().pause(lambda: barrier.phases & 1 != phase)


def hardware_barrier(asm: str) -> None:
    """bar.sync N, 256 or bar.arrive N, 256: a program's barrier N completes a phase when two jobs have come."""
    mine, (what, number) = job(), asm.split(",")[0].split()
    mine.pause()
    barrier = mine.orders.hardware.setdefault((mine.program, number), Barrier(2))
    phases = barrier.phases
    barrier.arrive()
    if what == "bar.sync":
        mine.pause(lambda: barrier.phases > phases)


def assembly(asm: str, constraints: str, args: list, **_: Any) -> Any:
    """What inline assembly computes."""
    if asm.startswith("bar."):
        return hardware_barrier(asm)
    p, keep, byte = args  # dropped(), for one element after the other
    return torch.where((keep >> 8 * byte + 7 & 1).bool(), p, torch.zeros_like(p))


def arrive(barrier: Barrier, bytes: int = 0, count: int = 1) -> None:
    job().pause()
    barrier.arrive(bytes)


def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        found = Barrier()
        found.each = [Barrier() for _ in range(shape[0])]
        return found
    return Place(torch.full(shape, -1 if dtype == torch.int32 else math.nan, dtype=dtype))


class Descriptor:
    """A tensor (B, H, T, D) and the shape of its tiles."""

    def __init__(self, x: Tensor, rows: int):
        self.x, self.rows, self.dtype, self.layout = x, rows, x.dtype, None
        self.block_type = SimpleNamespace(nbytes=rows * x.shape[3] * x.itemsize)

    def at(self, b: int, h: int, row: int) -> Tensor:
        return self.x[int(b), int(h), int(row) : int(row) + self.rows]


def copy_in(x: Descriptor, at: list, full: Barrier, place: Place) -> None:
    job().pause()
    place.x.fill_(math.nan)

    def come():
        found = x.at(*at[:3])
        place.x.zero_()
        place.x.view(x.rows, -1)[: len(found)] = found
        full.bytes -= x.block_type.nbytes
        full.complete()

    job().orders.add(come)


def copy_out(x: Descriptor, at: list, place: Place, add: bool = False) -> None:
    mine = job()
    mine.pause()
    mine.leaving += 1
    mine.landing += 1

    def leave():
        tile = place.x.clone().view(x.rows, -1)
        mine.leaving -= 1

        def land():
            found = x.at(*at[:3])
            found.copy_(found + tile[: len(found)] if add else tile[: len(found)])
            mine.landing -= 1

        mine.orders.add(land)

    mine.orders.add(leave)


def wait_copies(left: int) -> None:
    mine = job()
    mine.pause(lambda: mine.leaving <= left)


class Product:
    """A matrix product in flight. Those of a job end in the order in which they began."""

    def __init__(self, a: Any, b: Place, acc: Any, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc, self.job = a, b, acc, use_acc, job()

    def __call__(self) -> None:
        for product in self.job.products[: self.job.products.index(self) + 1]:
            a = product.a.x if isinstance(product.a, Place) else product.a
            found = a.float() @ product.b.x.float()
            acc = product.acc.result if isinstance(product.acc, Product) else product.acc
            product.result = tile(found + acc if product.use_acc else found)
            self.job.products.remove(product)
            if product is not self:
                del self.job.orders.speeds[product]


def start_product(a: Any, b: Place, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    job().pause()
    found = Product(a, b, acc, use_acc)
    found.job.products.append(found)
    found.job.orders.add(found)
    return found


def wait_products(left: int, products: list[Product]) -> Any:
    mine = job()
    mine.pause(lambda: len(mine.products) <= left)
    assert all(hasattr(product, "result") for product in products), "a result is read before its product has ended"
    return products[0].result if len(products) == 1 else tuple(product.result for product in products)


def warp_specialize(jobs: list, warps: list[int], registers: list[int]) -> None:
    mine = job()
    begun = [Job(mine.orders, mine.program, mine.programs, do, *args) for do, args in jobs]
    mine.pause(lambda: mine.orders.speeds.keys().isdisjoint(begun))


class Pointer:
    def __init__(self, x: Tensor, at: Any = 0):
        self.x, self.places = x, at

    def __add__(self, at: Any) -> "Pointer":
        return Pointer(self.x, self.places + at)


def store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    pointer.x.view(-1)[pointer.places[mask]] = values[mask].as_subclass(Tensor)


def number_at(pointer: Pointer) -> Tensor:
    return pointer.x.view(-1)[int(pointer.places) :][:1]


def load(pointer: Pointer, mask: Tensor | None = None, other: int = 0) -> Any:
    if mask is None:
        return Number(number_at(pointer))
    return tile(torch.where(mask, pointer.x.view(-1)[torch.where(mask, pointer.places, 0)], other))


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


def philox(*words: Any) -> tuple[Tensor, ...]:
    """The bits of model/dropout.py."""
    c0, c1, c2, c3, k0, k1 = (word if isinstance(word, Tensor) else int(word) for word in words)
    return tuple(map(tile, torch.broadcast_tensors(*philox_of_model((c0, c1, c2, c3), (k0, k1)))))


def least_or_greatest(of_ints: Callable, of_tensors: Callable) -> Callable:
    def found(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return tile(of_tensors(torch.as_tensor(a), torch.as_tensor(b)))
        return Number(of_ints(a, b))

    return found


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


class Layout:
    """How a tile lies in shared memory, which is nothing here."""

    def __init__(self, *_: Any, **__: Any): ...

    @staticmethod
    def get_default_for(*_: Any) -> None: ...


def language() -> dict[str, Any]:
    """Gluon's functions, as far as kernels/hopper/ calls them."""
    return {
        "constexpr": lambda x: x,
        "shared_memory_descriptor": Place,
        "static_range": range,
        "program_id": lambda axis: job().program,
        "num_programs": lambda axis: job().programs,
        "cdiv": lambda a, b: Number(-(-a // b)),
        "minimum": least_or_greatest(min, torch.minimum),
        "maximum": least_or_greatest(max, torch.maximum),
        "where": where,
        "arange": lambda start, stop, layout: tile(torch.arange(start, stop, dtype=torch.int32)),
        "zeros": lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
        "full": lambda shape, value, dtype, layout: tile(torch.full(shape, value, dtype=dtype)),
        "full_like": torch.full_like,
        "zeros_like": torch.zeros_like,
        "expand_dims": torch.unsqueeze,
        "convert_layout": lambda x, layout: x,
        "fma": lambda a, b, c: (a.double() * b + c).float(),
        "abs": torch.abs,
        "exp2": torch.exp2,
        "log": torch.log,
        "log2": torch.log2,
        "max": lambda x, axis: x.amax(axis) if x.ndim > 1 else Number(x.amax()),
        "sum": torch.sum,
        "store": store,
        "load": load,
        "atomic_add": atomic_add,
        "barrier": lambda: job().pause(),
        "inline_asm_elementwise": assembly,
        "join": lambda a, b: torch.stack((a, b), -1),
        "static_assert": lambda holds, why: None,
        "allocate_shared_memory": allocate,
        "warp_specialize": warp_specialize,
        **dict.fromkeys(
            ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout",
             "NVMMASharedLayout", "DistributedLinearLayout"), Layout),
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int32", "uint32", "int64")},
    }  # fmt: skip


Change = Callable[[str], str]


@contextmanager
def modules(found: dict[str, Any]) -> Iterator[None]:
    """sys.modules with these; afterwards as it was, without what came meanwhile under their names."""
    kept = {name: sys.modules.get(name) for name in found}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name, module in kept.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def on_cpu(name: str, change: Change = lambda source: source) -> ModuleType:
    """kernels/hopper/ `name`.py with the Gluon of this file. change: of its text, to plant a fault."""
    parts = {
        "jit": lambda f=None, **_: f or (lambda f: f),
        "builtin": lambda f: f,
        "language": SimpleNamespace(**language()),
        "fence_async_shared": lambda: None,
        "mbarrier": SimpleNamespace(init=init, wait=wait, arrive=arrive, expect=arrive,
                                    MBarrierLayout=lambda: "barriers"),
        "tma": SimpleNamespace(async_load=copy_in, async_store=copy_out, store_wait=wait_copies,
                               async_atomic_add=lambda x, at, place: copy_out(x, at, place, add=True)),
        "warpgroup_mma": start_product,
        "warpgroup_mma_wait": wait_products,
    }  # fmt: skip
    fakes: dict[str, Any] = {"triton.experimental": SimpleNamespace(gluon=SimpleNamespace(**parts))}
    for part in ("", ".language", ".language._core", ".language.nvidia", ".language.nvidia.hopper"):
        fakes[f"triton.experimental.gluon{part}"] = SimpleNamespace(**parts)
    if name == "backward":  # it takes functions of the forward
        fakes["kernels.hopper.forward"] = unchanged("forward")
    module = ModuleType(f"{name}_on_cpu")
    module.range = lambda *ends: map(Number, range(*ends))
    sys.modules[module.__name__] = module  # dataclasses look it up
    path = FOLDER / f"{name}.py"
    with modules(fakes):
        exec(compile(change(path.read_text(encoding="utf-8")), path, "exec"), module.__dict__)
    module.philox = philox
    module.in_tiles = lambda x, rows, layout: Descriptor(x, rows)
    module.shared_layout = lambda *_: None
    if name == "backward":
        module.wait_written, module.acquired, module.both_consumers = wait_written, acquired, both_consumers
        module.as_table = lambda place, n: Place(place.x.view(torch.int32).view(-1)[: n * 128].view(n, 2, 8, 8))
        module.as_kept_operand = lambda p, layout, dtype: p.relu().to(dtype)
        module.halves = lambda place: Place(place.x.view(64, 2, 64).transpose(0, 1))
    return module


unchanged = cache(on_cpu)


def launched(module: ModuleType, name: str, seed: int, programs: int, *args: Any) -> None:
    """launch_forward() or launch_backward() of a module, on as many processors as `programs`. Results that nothing
    writes are NaN."""
    orders = Orders(seed)
    kernel = getattr(module, f"{name}_kernel")

    class Kernel:
        def __getitem__(self, grid):
            def run(*args, num_warps, maxnreg):
                args = [Pointer(x) if isinstance(x, Tensor) else Number(x) if type(x) is int else x for x in args]
                for program in range(grid[0]):
                    Job(orders, program, grid[0], kernel, *args)
                orders.run()

            return run

    given = [x.detach() if isinstance(x, Tensor) else x for x in args]  # the threads of jobs record gradients
    for x in given[3:6] if name == "forward" else args[7]:
        x.fill_(math.nan)
    parts = {f"{name}_kernel": Kernel(), "processors": lambda device: programs}
    with patch.multiple(module, **parts), torch.autocast("cpu", enabled=False):
        getattr(module, f"launch_{name}")(*given)


@contextmanager
def hopper_on_cpu(seed: int = 0, **changed: ModuleType) -> Iterator[None]:
    """attention.kernel=hopper runs on a CPU, in the order that `seed` decides, on one to four processors. changed:
    forward or backward, a module of on_cpu() with a fault."""
    from kernels.hopper import backward, forward

    def of_module(name: str, programs: int) -> Callable:
        module = changed.get(name) or unchanged(name)
        return lambda *args: launched(module, name, seed, programs, *args)

    def lacks(dtype: torch.dtype, D: int, device: torch.device) -> str:
        with patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)):
            return UNCACHED(dtype, D, torch.device("cuda"))

    KINDS.clear()  # which know where a kind of call is computed
    with (
        patch.object(hopper, "lacks_here", lacks),
        patch.object(forward, "launch_forward", of_module("forward", 1 + seed % 3)),
        patch.object(backward, "launch_backward", of_module("backward", 1 + seed % 4)),
    ):
        yield
    KINDS.clear()
