"""Runs kernels/hopper/ on a CPU, one step at a time, in an order that a seed decides.

    with hopper_on_cpu(seed):                                  its kernels, with a Gluon that is made here
        attention(q, k, v, AttentionConfig("triton"))

Triton's interpreter knows no Gluon. Here every job of every program is a thread, and tests/orders.py lets one at a time
go on. A place in shared memory holds NaN from the start of a copy to its end. So a job that does not wait, or that
frees a place too early, gives other results in some order, or breaks a barrier. A job counts as one thread: what its
own 32 or 128 threads do to each other is not seen. The small kernels in plain Triton run in Triton's interpreter.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import flash, launch
from kernels.hopper import backward, forward  # with the real Gluon, of which not all is made here
from model.dropout import philox as philox_of_model
from tests.orders import Job, Orders, job

LOW = 0xFFFFFFFF


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


def philox(*words: Any) -> tuple[Tensor, ...]:
    """The bits of model/dropout.py."""
    c0, c1, c2, c3, k0, k1 = (word if isinstance(word, Tensor) else int(word) for word in words)
    return tuple(map(tile, torch.broadcast_tensors(*philox_of_model((c0, c1, c2, c3), (k0, k1)))))


def least_or_greatest(of_ints: Callable, of_tensors: Callable) -> Callable:
    def found(a: Any, b: Any) -> Any:
        tensors = isinstance(a, Tensor) or isinstance(b, Tensor)
        return tile(of_tensors(torch.as_tensor(a), torch.as_tensor(b))) if tensors else Number(of_ints(a, b))

    return found


def warp_specialize(jobs: list, warps: list[int], registers: list[int]) -> None:
    mine = job()
    begun = [Job(mine.orders, mine.program, mine.programs, do, *args) for do, args in jobs]
    mine.pause(lambda: mine.orders.speeds.keys().isdisjoint(begun))


class Place:
    """Shared memory."""

    def __init__(self, x: Tensor):
        self.x, self.dtype = x, x.dtype
        self.index = lambda i: Place(x[int(i)])
        self.slice = lambda start, length: Place(x[start : start + length])
        self.reshape = lambda shape: Place(x.view(shape))
        self.permute = lambda order: Place(x.permute(order))

    def store(self, x: Tensor) -> None:
        job().pause()
        self.x.copy_(x)

    def load(self, layout: Any) -> Tensor:
        job().pause()
        return tile(self.x.clone())


class Barrier:
    """An mbarrier: a phase completes when `count` have arrived and all bytes that were announced have come."""

    def __init__(self, count: int = 0):
        self.init(count)

    def init(self, count: int) -> None:
        self.phases, self.bytes, self.count, self.missing, self.waited = 0, 0, count, count, False

    def wait(self, phase: int) -> None:
        self.waited = True
        job().pause(lambda: self.phases & 1 != phase)

    def arrive(self, bytes: int = 0, count: int = 1) -> None:
        job().pause()
        assert self.missing > 0, "one more arrival than the phase has: hardware stops the program here"
        self.missing -= 1
        self.come(-bytes)

    def come(self, bytes: int) -> None:
        self.bytes -= bytes
        if self.missing == self.bytes == 0:
            self.phases, self.missing = self.phases + 1, self.count


def assembly(asm: str, constraints: str, args: list, **_: Any) -> Any:
    """What inline assembly computes. bar.sync N, 256 or bar.arrive N, 256: a phase ends when two jobs have come."""
    if asm.startswith("mov."):
        return args[0]
    if not asm.startswith("bar."):
        p, keep, byte = args  # drop(), for one element after the other
        return torch.where((keep >> 8 * byte + 7 & 1).bool(), p, torch.zeros_like(p))
    mine, (what, number) = job(), asm.split(",")[0].split()
    barrier = mine.orders.hardware.setdefault((mine.program, number), Barrier(2))
    barrier.arrive()
    phases = barrier.phases - (barrier.missing == 2)  # before this arrival
    if what == "bar.sync":
        mine.pause(lambda: barrier.phases > phases)
    return None


def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        made = job().orders.barriers.setdefault(job().program, [])
        made.append([Barrier() for _ in range(shape[0])])
        return SimpleNamespace(index=made[-1].__getitem__)
    return Place(torch.full(shape, -1 if dtype == torch.int32 else math.nan, dtype=dtype))


class Descriptor:
    """A tensor (B, H, T, D) and the shape of its tiles."""

    def __init__(self, x: Tensor, rows: int):
        self.x, self.rows, self.dtype, self.layout = x, rows, x.dtype, None
        self.block_type = SimpleNamespace(nbytes=rows * x.shape[3] * x.itemsize)

    def at(self, b: int, h: int, row: int, _: int) -> Tensor:
        return self.x[int(b), int(h), int(row) : int(row) + self.rows]

    def copy_in(self, at: list, full: Barrier, place: Place) -> None:
        job().pause()
        place.x.fill_(math.nan)

        def come():
            found = self.at(*at)
            place.x.zero_()
            place.x.view(self.rows, -1)[: len(found)] = found
            full.come(self.block_type.nbytes)

        job().orders.add(come)

    def copy_out(self, at: list, place: Place, add: bool = False) -> None:
        mine = job()
        mine.pause()
        mine.leaving += 1
        mine.landing += 1

        def leave():
            tile = place.x.clone().view(self.rows, -1)
            mine.leaving -= 1

            def land():
                found = self.at(*at)
                found.copy_(found + tile[: len(found)] if add else tile[: len(found)])
                mine.landing -= 1

            mine.orders.add(land)

        mine.orders.add(leave)


class Pointer:
    def __init__(self, x: Tensor, at: Any = 0):
        self.x, self.at = x.view(-1), at

    def __add__(self, at: Any) -> "Pointer":
        return Pointer(self.x, self.at + at)

    @property
    def number(self) -> Tensor:
        return self.x[int(self.at) :][:1]

    def store(self, values: Tensor, mask: Tensor) -> None:
        self.x[self.at[mask]] = values[mask].as_subclass(Tensor)

    def load(self, mask: Tensor | None = None, other: int = 0) -> Any:
        if mask is None:
            return Number(self.number)
        return tile(torch.where(mask, self.x[torch.where(mask, self.at, 0)], other))

    def acquired(self) -> Number:
        """A number that other programs change. A job that asks again waits for another one."""
        mine, place = job(), self.number
        mine.pause(lambda: mine.seen != (place.data_ptr(), int(place)))
        mine.seen = place.data_ptr(), int(place)
        return Number(place)

    def atomic_add(self, by: int, sem: str = "") -> Number:
        job().pause()
        found = Number(self.number)
        self.number.add_(by)
        return found


class Product:
    """A matrix product in flight. Those of a job end in the order in which they began."""

    def __init__(self, a: Any, b: Place, acc: Any, use_acc: bool = True, is_async: bool = False):
        job().pause()
        self.a, self.b, self.acc, self.use_acc, self.job = a, b, acc, use_acc, job()
        self.job.products.append(self)
        self.job.orders.add(self)

    def __call__(self) -> None:
        for product in self.job.products[: self.job.products.index(self) + 1]:
            a = product.a.x if isinstance(product.a, Place) else product.a
            found = a.float() @ product.b.x.float()
            acc = product.acc.result if isinstance(product.acc, Product) else product.acc
            product.result = tile(found + acc if product.use_acc else found)
            self.job.products.remove(product)
            if product is not self:
                del self.job.orders.speeds[product]


def wait_products(left: int, products: list[Product]) -> Any:
    mine = job()
    mine.pause(lambda: len(mine.products) <= left)
    assert all(hasattr(product, "result") for product in products), "a result is read before its product has ended"
    return products[0].result if len(products) == 1 else tuple(product.result for product in products)


# How a tile lies in shared memory or in registers, which is nothing here.
Layout = type("Layout", (), {"__init__": lambda *_, **__: None, "get_default_for": lambda *_: None})
LAYOUTS = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout",
           "NVMMASharedLayout", "DistributedLinearLayout")  # fmt: skip
AS_IN_TORCH = ("float16", "bfloat16", "float32", "int32", "uint32", "int64", "full_like", "zeros_like", "abs", "exp2",
               "log", "log2", "sum")  # fmt: skip
LANGUAGE: dict[str, Any] = {
    "constexpr": lambda x: x,
    "static_range": range,
    "static_assert": lambda holds, why: None,
    "program_id": lambda axis: Number(job().program),
    "num_programs": lambda axis: Number(job().programs),
    "warp_specialize": warp_specialize,
    "inline_asm_elementwise": assembly,
    "allocate_shared_memory": allocate,
    "store": Pointer.store,
    "load": Pointer.load,
    "atomic_add": Pointer.atomic_add,
    "cdiv": lambda a, b: Number(-(-a // b)),
    "minimum": least_or_greatest(min, torch.minimum),
    "maximum": least_or_greatest(max, torch.maximum),
    "where": lambda if_, a, b: torch.where(if_, a, b) if isinstance(if_, Tensor) else a if if_ else b,
    "arange": lambda start, stop, layout: tile(torch.arange(start, stop, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
    "full": lambda shape, value, dtype, layout: tile(torch.full(shape, value, dtype=dtype)),
    "expand_dims": torch.unsqueeze,
    "convert_layout": lambda x, layout: x,
    "join": lambda a, b: torch.stack((a, b), -1),
    "fma": lambda a, b, c: (a.double() * b + c).float(),
    "max": lambda x, axis: x.amax(axis) if x.ndim > 1 else Number(x.amax()),
    **dict.fromkeys(LAYOUTS, Layout),
    **{name: getattr(torch, name) for name in AS_IN_TORCH},
}
PARTS: dict[str, Any] = {
    "jit": lambda f=None, **_: f or (lambda f: f),
    "language": SimpleNamespace(**LANGUAGE), "fence_async_shared": lambda: None,
    "mbarrier": SimpleNamespace(init=Barrier.init, wait=Barrier.wait, arrive=Barrier.arrive, expect=Barrier.arrive,
                                MBarrierLayout=lambda: "barriers"),
    "tma": SimpleNamespace(store_wait=lambda left: job().wait_copies(left)),
    "warpgroup_mma": Product, "warpgroup_mma_wait": wait_products,
    # kernels/hopper/versions.py:
    "all_threads": lambda: job().pause(), "reinterpret": None, "async_load": Descriptor.copy_in,
    "async_store": Descriptor.copy_out, "async_atomic_add": partial(Descriptor.copy_out, add=True),
}  # fmt: skip
# What the kernels have in assembly, or by reading shared memory in another layout.
OF_BACKWARD: dict[str, Any] = {
    "wait_written": lambda: job().wait_written(),
    "acquired": Pointer.acquired,
    "both_consumers": lambda: job().meet(),
    "as_table": lambda place, n: Place(place.x.view(torch.int32).view(-1)[: n * 128].view(n, 2, 8, 8)),
    "as_kept_operand": lambda p, layout, dtype: p.relu().to(dtype),
    "halves": lambda place: Place(place.x.view(64, 2, 64).transpose(0, 1)),
}


@cache
def on_cpu(name: str, line: str = "", instead: str = "") -> ModuleType:
    """kernels/hopper/ `name`.py with the Gluon of this file. instead: what stands there in place of `line`, a fault."""
    fakes: dict[str, Any] = {"triton.experimental": SimpleNamespace(gluon=SimpleNamespace(**PARTS))}
    for part in ("", ".language", ".language.nvidia", ".language.nvidia.hopper"):
        fakes[f"triton.experimental.gluon{part}"] = SimpleNamespace(**PARTS)
    fakes["kernels.hopper.versions"] = SimpleNamespace(**PARTS)
    if name == "backward":  # it takes functions of the forward
        fakes["kernels.hopper.forward"] = on_cpu("forward")
    module = sys.modules[f"{name}_on_cpu"] = ModuleType(f"{name}_on_cpu")  # where dataclasses look it up
    module.range = lambda *ends: map(Number, range(*ends))
    path = Path(launch.__file__).parent / "hopper" / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    assert not line or source.count(line) == 1
    with patch.dict(sys.modules, fakes):
        exec(compile(source.replace(line, instead), path, "exec"), module.__dict__)
    module.philox, module.in_tiles = philox, Descriptor
    theirs: dict[str, Any] = {"tl": SimpleNamespace(**LANGUAGE)}  # functions of kernels/flash.py, with the Gluon above
    for shared in (flash.between, flash.in_documents):
        theirs[shared.fn.__name__] = FunctionType(shared.fn.__code__, theirs)
    module.between, module.in_documents = theirs["between"], theirs["in_documents"]
    module.__dict__.update(OF_BACKWARD | {"LONG": 350} if name == "backward" else {})  # waves in short ones
    return module


def launched(module: ModuleType, name: str, seed: int, *args: Any) -> None:
    """launch_forward() or launch_backward() of a module, on one to four processors. What nothing writes is NaN."""
    kernel = getattr(module, f"{name}_kernel")

    def run(programs, *args, num_warps, maxnreg):
        orders = Orders(seed)
        args = [Pointer(x) if isinstance(x, Tensor) else Number(x) if type(x) is int else x for x in args]
        for program in range(programs):
            Job(orders, program, programs, kernel, *args)
        orders.run()
        for alike in zip(*orders.barriers.values(), strict=True):  # of all programs
            assert any(one.waited for some in alike for one in some), "a barrier without a wait (docs/findings.md, 65)"

    grids = {(programs,): partial(run, programs) for programs in range(1, 5)}
    given = [x.detach() if isinstance(x, Tensor) else x for x in args]  # the threads of jobs record gradients
    for x in given[3:6] if name == "forward" else given[7:10]:
        x.fill_(math.nan)
    parts = {f"{name}_kernel": grids, "processors": lambda device: 1 + seed % 4}
    with patch.multiple(module, **parts), torch.autocast("cpu", enabled=False):
        getattr(module, f"launch_{name}")(*given)


@contextmanager
def hopper_on_cpu(seed: int = 0, **changed: ModuleType) -> Iterator[None]:
    """Here triton runs the kernels for Hopper, in the order of `seed`. changed: modules of on_cpu(), with faults."""
    of = {name: partial(launched, changed.get(name) or on_cpu(name), name, seed) for name in ("forward", "backward")}
    with (
        patch.object(launch, "is_hopper", lambda device: True),
        patch.object(forward, "launch_forward", of["forward"]),
        patch.object(backward, "launch_backward", of["backward"]),
    ):
        yield
