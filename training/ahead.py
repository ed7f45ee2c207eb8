"""Compiles what a run launches before it is needed, several kernels at a time.

    import_compiler()              begins to import torch.compile
    begin(model, ...)              begins to compile what a step and an evaluation launch
    begin_sampling(session)        the same for a sample
    end()                          after the first steps: notes that the kernels are there

All return soon. Triton compiles a kernel when it is first launched, for up to 5 seconds, and the run waits: one kernel
after the other, while the other cores are idle. Here the model computes once what it will compute, with kernels that
are not launched but only compiled, each in a process of its own. Their results come through Triton's cache on disk.
When a kernel is launched in earnest, its process has ended, or is waited for. What this misses is compiled as before.
A later run of the same model finds a note in the cache, and skips all this.
"""

import hashlib
import multiprocessing
import signal
from collections import defaultdict
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
PROCESSES: dict[int, list[Any]] = defaultdict(list)  # that compile a kernel, by its id()
NOTES: list[Path] = []  # files to be made when the run's kernels are in the cache


def import_compiler() -> None:
    """Begins to import torch.compile, which is spread over many files."""
    Thread(target=import_module, args=("torch._inductor.compile_fx",), daemon=True).start()


def begin(model: GPT, autocast: AbstractContextManager, z_loss: float, shape: tuple[int, int]) -> None:
    """Begins to compile what a step and an evaluation launch. shape: (B, T) of their sequences."""
    NOTES.clear()
    device = model.embedding.weight.device
    if not runs_kernels(device) or model.attention_config.autotune:
        return
    if (note := note_of(model, shape, z_loss, getattr(autocast, "fast_dtype", None))).exists():
        return
    NOTES.append(note)
    idx = torch.zeros(shape, dtype=torch.int64, device=device)
    with autocast:
        compile_aside(lambda: one_of_each(model, idx, z_loss))
        with torch.no_grad():
            compile_aside(lambda: one_of_each(model.eval(), idx))
    model.train()


def begin_sampling(session: Session) -> None:
    """Begins to compile what the session launches for its first tokens."""
    if session.recorded is not None:
        prompt = torch.zeros((1, 1), dtype=torch.int64, device=session.model.embedding.weight.device)
        compile_aside(lambda: list(session.enqueued(prompt, 3)))


def end() -> None:
    """Notes that the kernels of the run have been compiled, and ends Inductor's processes: that takes seconds, for
    which the run would wait at its end. If they are needed again, Inductor starts others."""
    while NOTES:
        NOTES.pop().touch()
    from torch._inductor.async_compile import shutdown_compile_workers

    Thread(target=shutdown_compile_workers, daemon=True).start()


def note_of(model: GPT, *others: Any) -> Path:
    """The file in Triton's cache that says that the kernels of such a run are there."""
    from triton import knobs  # triton is not installed everywhere

    device = torch.cuda.get_device_name(model.embedding.weight.device)
    kernels = [path.read_bytes() for path in sorted(ROOT.glob("kernels/**/*.py"))]
    versions = torch.__version__, version("triton"), kernels
    described = model.config, model.attention_config, model.break_it, others, device, versions
    digest = hashlib.sha256(repr(described).encode())
    return Path(knobs.cache.dir, f"tilegpt-{digest.hexdigest()[:16]}")


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
    """Calls compute(), whose kernels are compiled aside and not launched: its results are whatever is in memory. Draws
    no random numbers."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch = getattr(JITFunction.run, "launch", JITFunction.run)  # Triton's own
    jobs, no_driver, rng = defaultdict(list), NoDriver(driver.active), rng_state()

    def note(kernel: Any, *args, grid, warmup, **options) -> None:
        jobs[id(kernel)].append(partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    def launch_when_compiled(kernel: Any, *args, **options) -> Any:
        for process in PROCESSES.pop(id(kernel), ()):
            process.join(PATIENCE)
            process.kill()
        return launch(kernel, *args, **options)

    def compile(kernel: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # without the run's handlers
            signal.signal(number, signal.SIG_DFL)
        driver.set_active(no_driver)
        with suppress(Exception):  # which comes again from the launch
            for job in jobs[kernel]:
                compiled = job()
                no_driver.launcher_cls(compiled.src, compiled.metadata)  # which Triton compiles as well, with gcc

    launch_when_compiled.launch = launch  # type: ignore[attr-defined]
    JITFunction.run = note
    try:
        compute()
    except RuntimeError as error:
        if not is_out_of_memory(error):  # a compiled step may need less memory
            raise
    finally:
        JITFunction.run = launch_when_compiled
        set_rng_state(rng)
    for kernel in jobs:
        process = multiprocessing.get_context("fork").Process(target=compile, args=(kernel,), daemon=True)
        process.start()
        PROCESSES[kernel].append(process)


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
