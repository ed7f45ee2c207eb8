"""The machine of a run: device, peak speed, memory, signals and versions."""

import ctypes
import errno
import gc
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # name in the configuration: torch's

# Dense bf16 FLOP/s with float32 accumulation, by the name from torch.cuda.get_device_name(). The first match counts.
# Sources: NVIDIA's data sheets (half of the figure "with sparsity"); for GeForce, the architecture white papers.
# Laptop GPUs, slices of a GPU and GPUs that are not in the list have no peak. A wrong peak would be worse: nanoGPT uses
# the A100's peak everywhere and prints 104 % on an H100.
PEAK_FLOPS = (
    (r"Laptop|MIG|Max-Q", None),
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835e12),
    (r"\bG?H200\b", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10\b", 125e12),
    (r"\bRTX 5090$", 209.5e12),
    (r"\bRTX 4090$", 165.2e12),
    (r"\bRTX 3090$", 71e12),
)


def peak_flops(device: torch.device) -> float | None:
    """The dense bf16 peak of `device` in FLOP/s, or None where it is not known (MFU is then printed as n/a)."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    return next((flops for pattern, flops in PEAK_FLOPS if re.search(pattern, name)), None)


def memory_gib(device: torch.device) -> float | None:
    """Peak memory so far in GiB: of tensors on a CUDA device, else of the whole process (None on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if os.name == "nt":
        return None
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def keep_memory() -> None:
    """Makes a Linux process keep the memory of freed tensors for the next step.

    By default glibc returns large freed blocks to the kernel. The kernel then zeroes every page again for the next
    tensor of that size. That takes 4 to 7 % of a small model's step on a CPU (LOG.md). Blocks above 32 MiB, glibc's
    limit for this setting, are still returned. Does nothing with another C library.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: take smaller blocks from the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the end of the heap


def begin_collecting() -> None:
    """Switches Python's garbage collector on, if train.py has switched it off, for all that is made from now on.

    What a run imports and sets up stays until its end. Looking for garbage in it takes a fifth of the imports' time,
    and delays steps.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch or Python means that memory ran out. On a CPU, and for pinned memory, torch raises a
    RuntimeError, and only the text tells. (The system may also kill the process without a message.)"""
    texts = ("DefaultCPUAllocator", "can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


@contextmanager
def out_of_memory_as(answer: Callable[[], Exception]) -> Iterator[None]:
    """Raises answer() instead of an error that means that memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise answer() from error


@contextmanager
def without_stderr() -> Iterator[None]:
    """What libraries write to standard error past Python, as Rust does its panics, is not shown."""
    if sys.stderr is None:  # closed: another file may have its number
        yield
        return
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def pick_device(device: str) -> torch.device:
    """auto: a CUDA GPU if there is one, else Apple's GPU (mps), else the CPU. ValueError for a missing device."""
    if device == "auto":
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        device = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        torch.empty(1, device=device).item()  # .item() fails for device=meta, where tensors have no values
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        reason = str(error).splitlines()[0].split(". ")[0]  # torch's text continues with a list of all its devices
        raise ValueError(f"device={device} cannot be used here ({reason}); use device=auto or device=cpu") from error
    if device.startswith("cuda:"):  # kernels and the saved random generator use the current device
        torch.cuda.set_device(device)
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> str:
    """auto: bf16 on a GPU that supports it, else float32. Any other name is returned unchanged."""
    if dtype != "auto":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "float32"


def set_precision(dtype: str, device: torch.device) -> AbstractContextManager:
    """Sets how float32 products round, and returns autocast for bf16 and fp16, nothing for float32."""
    low = dtype != "float32"
    torch.set_float32_matmul_precision("high" if low else "highest")
    return torch.autocast(device.type, DTYPES[dtype]) if low else nullcontext()


@contextmanager
def reader_may_leave(stream: TextIO | None = None) -> Iterator[None]:
    """Keeps the run going when nobody reads `stream` (default: sys.stdout) any more: the pipe's reader has ended, as
    `| head` does, or the terminal is closed. All later output to the stream is dropped."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


class Stopping(KeyboardInterrupt):
    """A signal interrupted work that a resumed run repeats."""


class Signals(list[int]):
    """The signals that a process has received."""

    answer = ""  # inside at_once(): what is said of a signal
    due: KeyboardInterrupt | None = None  # to be raised, as soon as nothing is being imported

    def raise_due(self) -> None:
        if self.due:
            error, self.due = self.due, None
            raise error

    @contextmanager
    def at_once(self, answer: str = "stopping now; a second one stops without saving") -> Iterator[None]:
        """The first signal raises Stopping, with its number, at any line inside, or at its beginning if it came
        before."""
        self.answer = answer
        try:
            if self:
                raise Stopping(self[0])
            yield
            self.raise_due()
        finally:
            self.answer = ""
            if isinstance(self.due, Stopping):
                self.due = None


@contextmanager
def stop_signals(silent: bool = False) -> Iterator[Signals]:
    """Yields a list. Ctrl-C (SIGINT), SIGTERM and SIGHUP (connection lost) append their number to it. A run can then
    finish its step and save. silent: only Ctrl-C is caught, and nothing is printed.

    A second signal raises KeyboardInterrupt, with its number, at once. Under nohup, SIGHUP stays ignored. Works in the
    main thread only, as signal.signal() does. In an import both wait for its end, unless a third signal comes: Python
    would never release the lock of imports, and every thread that imports would wait for ever.
    """
    received = Signals()

    def on_signal(number, frame):
        if received.due and not isinstance(received.due, Stopping):
            received.raise_due()  # the third: whatever is being imported
        if received:
            received.due = KeyboardInterrupt(number)
        else:
            received.append(number)
            if silent:
                return
            with reader_may_leave(sys.stderr):  # with a lost connection the terminal is gone too
                answer = received.answer or "stopping after this step; a second one stops at once"
                print(f"\n{signal.Signals(number).name}: {answer}", file=sys.stderr, flush=True)
            received.due = Stopping(number) if received.answer else None
        raise_or_wait(number, frame)

    def raise_or_wait(number, frame):
        if received.due and alarms and in_import(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # seconds until SIGALRM
        else:
            received.raise_due()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, on_signal) for number in numbers[: 1 if silent else None]}
    if alarms := hasattr(signal, "setitimer"):  # Windows has none
        handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, raise_or_wait)
    try:
        yield received
        received.raise_due()
    finally:
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def in_import(frame: FrameType | None) -> bool:
    """Whether the frame, or one that called it, belongs to Python's import."""
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def about(device: torch.device) -> dict[str, str | int]:
    """What a reader needs to reproduce a figure: commit, versions, device."""
    return {
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def device_type(name: str) -> str:
    """The type of the device that about() names so: cpu, mps or cuda."""
    return next((kind for kind in ("cpu", "mps") if name.startswith(kind)), "cuda")


def version(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def git_commit() -> str:
    """The commit of this repository, with a + if files were edited since; or the environment variable GIT_COMMIT, for
    a copy of the files without its .git folder."""
    if named := os.environ.get("GIT_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
