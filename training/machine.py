"""The machine under a run: which device, what it can do at best, and the versions that a figure has to name."""

import ctypes
import errno
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

# Dense bf16 FLOP/s with float32 accumulation, by what torch.cuda.get_device_name() says. NVIDIA's data sheets (half of
# the figure "with sparsity") and, for GeForce, the architecture white papers. First match wins. A wrong peak is worse
# than none (nanoGPT's A100 constant prints 104 % on an H100), so laptop parts, slices of a GPU and whatever is not in
# the list have none.
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
    """The same for a device's name."""
    return next((flops for pattern, flops in PEAK_FLOPS if re.search(pattern, name)), None)


def memory_gib(device: torch.device) -> float | None:
    """The most memory used so far, in GiB: of tensors on a CUDA device, else of the whole process (None on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if os.name == "nt":
        return None
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def keep_memory() -> None:
    """Lets a Linux process keep the memory of freed tensors for the next step instead of handing it back.

    glibc returns every block of some size to the kernel at its free, and the next tensor of that size is zeroed page by
    page again: 4 to 7 % of a small model's step on a CPU (LOG.md). Blocks above 32 MiB, which is as far as glibc lets
    this be set, still go back. Does nothing where the C library is another one.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks come from the heap,
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: whose end is never given back


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch's or Python's means that there was no memory left. On a CPU torch has no type for it,
    only a text (and the system may end the process instead, without a word)."""
    of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return of_memory or "DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error)


def pick_device(device: str) -> torch.device:
    """auto: a GPU if there is one, then Apple's, else the CPU. ValueError for one that is not there."""
    if device == "auto":
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        device = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        torch.empty(1, device=device).item()  # device=meta has tensors without values
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        reason = str(error).splitlines()[0].split(". ")[0]  # torch goes on with a list of all that it could do instead
        raise ValueError(f"device={device} cannot be used here ({reason}); use device=auto or device=cpu") from error
    if device.startswith("cuda:"):  # the generator that is saved, and every kernel launched, are the current device's
        torch.cuda.set_device(device)
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> str:
    """auto: bf16 on a GPU that computes in it, else float32. Any other name is returned as it is."""
    if dtype != "auto":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "float32"


@contextmanager
def reader_may_leave(stream: TextIO | None = None) -> Iterator[None]:
    """Lets the run go on where nobody reads `stream` (sys.stdout) any more: the pipe's reader has left, as `| head`
    does, or the terminal is gone. From then on what is written to it is dropped."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C (SIGINT), SIGTERM or SIGHUP (the connection is lost) appends its number, so that a
    run can end its step and save.

    A second one raises KeyboardInterrupt at once. SIGHUP stays ignored under nohup. Main thread only, as
    signal.signal() is.
    """
    received: list[int] = []

    def on_signal(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)
        with reader_may_leave(sys.stderr):  # a lost connection takes the terminal along
            name = signal.Signals(number).name
            print(f"\n{name}: stopping after this step; once more leaves at once", file=sys.stderr, flush=True)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def about(device: torch.device) -> dict[str, str | int]:
    """What a reader of the figures needs to have them again: commit, versions, device."""
    return {
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def version(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def git_commit() -> str:
    """The commit of this repository, with + where the tree was edited since.

    The variable GIT_COMMIT names it where the tree has travelled without its .git, or with an older one.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if named := os.environ.get("GIT_COMMIT"):
        return named
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
