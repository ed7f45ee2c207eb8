"""Compiles what a run launches before it is needed, several kernels at a time.

    import_compiler()              begins to import torch.compile
    begin(model, ...)              begins to compile what a step and an evaluation launch
    begin_sampling(session)        the same for a sample
    end()                          after the first steps

All return soon. Triton compiles a kernel at its first launch, one after the other, up to 5 seconds each. So a dry run
of the model records every launch instead of making it. The recorded kernels are compiled in forked processes, which
fill Triton's cache on the disk. The first real launch of a kernel waits for its process. Kernels that the dry run did
not meet are compiled at their first launch. Then a marker file is written into the cache, and later runs of the same
model skip this.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from kernels.problem import runs_kernels
from model.gpt import GPT, Block, Context, Stages
from sampling.generate import Session
from training.machine import is_out_of_memory, version
from training.state import rng_state, set_rng_state

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60  # seconds that a launch waits; then it compiles the kernel itself
PROCESSES: dict[int, set[Any]] = {}  # that compile a kernel, by its id()
MARKERS: list[Path] = []  # to be written when the run's kernels are in the cache


def import_compiler() -> None:
    """Begins to import torch.compile, which is spread over many files, and to hash the files of torch and Triton,
    which the keys of their caches hold."""

    def load() -> None:
        import_module("torch._inductor.compile_fx")
        cache: Any = import_module("torch._inductor.codecache")
        with suppress(Exception):  # its own names, which may change
            cache.torch_key()
            cache.CacheBase.get_system()

    Thread(target=load, daemon=True).start()


def begin(model: GPT, autocast: AbstractContextManager, z_loss: float, shape: tuple[int, int]) -> None:
    """Begins to compile what a step and an evaluation launch. shape: (B, T) of their sequences."""
    MARKERS.clear()
    device = model.embedding.weight.device
    if not runs_kernels(device) or not hasattr(os, "fork") or model.attention_config.autotune:
        return
    if (marker := marker_of(model, shape, z_loss, getattr(autocast, "fast_dtype", None))).exists():
        return
    MARKERS.append(marker)
    idx = torch.zeros(shape, dtype=torch.int64, device=device)
    with autocast:
        compile_aside(lambda: one_of_each(model, idx, z_loss))
        with torch.no_grad():
            compile_aside(lambda: one_of_each(model.eval(), idx))
    model.train()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # a step may need less


def begin_sampling(session: Session) -> None:
    """Begins to compile what the session launches for its first tokens."""
    if session.recorded is not None:
        prompt = torch.zeros((1, 1), dtype=torch.int64, device=session.model.embedding.weight.device)
        compile_aside(lambda: list(session.enqueued(prompt, 3, False)))
        session.recorded.count = 0  # nothing was launched


def end() -> None:
    """Writes the marker, and ends Inductor's processes: that takes seconds, for which the run would wait at its end.
    Inductor forgets them first, so what is compiled from here on starts others."""
    while MARKERS:
        with suppress(OSError):
            MARKERS.pop().touch()
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if hasattr(inductor, "_pool_set") and hasattr(inductor, "after_fork"):  # its own names, which may change
        pools = list(inductor._pool_set)
        inductor.after_fork()
        for pool in pools:
            Thread(target=pool.shutdown, daemon=True).start()


def marker_of(model: GPT, *others: Any) -> Path:
    """The file in Triton's cache that says that the kernels of such a run are there."""
    from triton import knobs  # triton is not installed everywhere

    device = torch.cuda.get_device_name(model.embedding.weight.device)
    versions = torch.__version__, version("triton"), digest_of("kernels", "sampling")
    described = model.config, model.attention_config, model.break_it, others, device, versions
    digest = hashlib.sha256(repr(described).encode())
    return Path(knobs.cache.dir, f"tilegpt-{digest.hexdigest()[:16]}")


def digest_of(*rooms: str) -> str:
    """The SHA-256 of the sources in these folders."""
    files = [path for room in rooms for path in sorted(ROOT.glob(f"{room}/**/*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def one_of_each(model: GPT, idx: Tensor, z_loss: float = 0.0) -> None:
    """The model's forward, and the backward if it is in training mode, through one block of each kind. idx: int64
    (B, T)."""
    kinds = set()

    def layer(block: Block, x: Tensor, added: Any, context: Context) -> tuple[Tensor, Any]:
        kind = block.attention_config.window, added is None
        if kind in kinds:
            return x, added
        kinds.add(kind)
        return (model.layer or Block.forward)(block, x, added, context)

    documents = idx.int() if model.attention_config.documents else None
    loss = model(idx, idx, documents, z_loss=z_loss, stages=Stages(model.embed, layer, model.loss))
    if model.training:
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def compile_aside(compute: Callable[[], object]) -> None:
    """Calls compute() and has the kernels that it launches compiled in other processes. Its results are whatever is in
    memory. Draws no random numbers."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import_module("triton.compiler.code_generator")  # here, and not in every process
    launch = getattr(JITFunction.run, "launch", JITFunction.run)  # Triton's own
    launches: dict[int, dict[str, Callable]] = {}  # by kernel, one of each kind
    no_driver, rng = NoDriver(driver.active), rng_state()

    def record_launch(kernel: Any, *args, grid, warmup, **options) -> None:
        of_kernel = launches.setdefault(id(kernel), {})
        kind = [x if i in kernel.constexprs else kind_of(x) for i, x in enumerate(args)]
        kind += options.items()
        of_kernel.setdefault(repr(kind), partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    def launch_when_compiled(kernel: Any, *args, **options) -> Any:
        for process in PROCESSES.pop(id(kernel), ()):
            process.join(PATIENCE)
        return launch(kernel, *args, **options)

    def compile_launches(kernels: list[int]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):  # without the run's handlers
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(PATIENCE)  # it ends by itself, also if the run has been killed
        driver.set_active(no_driver)
        for compile in (compile for kernel in kernels for compile in launches[kernel].values()):
            with suppress(Exception):  # which comes again from the launch
                compiled = compile()
                no_driver.launcher_cls(compiled.src, compiled.metadata)  # which Triton compiles as well, with gcc

    launch_when_compiled.launch = launch  # type: ignore[attr-defined]
    JITFunction.run = record_launch
    try:
        compute()
    except RuntimeError as error:
        if not is_out_of_memory(error):  # a compiled step may need less memory
            raise
    finally:
        JITFunction.run = launch_when_compiled
        set_rng_state(rng)
    kernels, most = list(launches), len(os.sched_getaffinity(0))
    for some in (kernels[i::most] for i in range(min(most, len(kernels)))):
        process = multiprocessing.get_context("fork").Process(target=compile_launches, args=(some,), daemon=True)
        with suppress(OSError):  # no more processes: then the launches compile
            process.start()
            for kernel in some:
                PROCESSES.setdefault(kernel, set()).add(process)


def kind_of(x: Any) -> Any:
    """What Triton compiles a kernel for of an argument, roughly: equal for launches that need no kernel of their
    own."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, tuple):
        return tuple(map(kind_of, x))
    if isinstance(x, int | float):
        return type(x), x == 1, x % 16 == 0
    return (kind_of(x.base), tuple(x.block_shape)) if hasattr(x, "block_shape") else x


class NoDriver:
    """What Triton asks of a GPU to compile for it. A forked process must not call CUDA."""

    def __init__(self, driver: Any) -> None:
        self.device, self.target = driver.get_current_device(), driver.get_current_target()
        self.launcher_cls, self.utils = driver.launcher_cls, driver.utils

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target
