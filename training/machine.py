"""The machine of a run: device, dtype, peak speed, memory and versions."""

import importlib.metadata
import platform
import re
import resource
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # name in the configuration: torch's

# Dense bf16 FLOP/s with float32 accumulation, by a part of torch.cuda.get_device_name(); the first match counts.
# Sources: NVIDIA's data sheets (half of the figure "with sparsity") and GeForce's white papers. Others have none here.
PEAK_FLOPS = {
    r"Laptop|MIG|Max-Q|NVL|H100 PCIe": None,
    r"\bB200\b": 2250e12,
    r"\b(GH200|H200|H100)\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL4\b": 121e12,
    r"\bRTX 4090$": 165.2e12,
}


def peak_flops(name: str) -> float | None:
    """The dense bf16 peak in FLOP/s of the device that about() names so, or None where it is not known."""
    return next((flops for pattern, flops in PEAK_FLOPS.items() if re.search(pattern, name)), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: of tensors on a CUDA device, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


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
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)  # of a sweep's job before
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> str:
    """auto: bf16 on a GPU that supports it, else float32. Any other name is returned unchanged."""
    if dtype != "auto":
        return dtype
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "float32"


def set_precision(dtype: str) -> None:
    """Sets how float32 products round, for the whole process: with TF32 only where the rest is in bf16 or fp16."""
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")


def autocast(dtype: str, device: torch.device) -> AbstractContextManager:
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, DTYPES[dtype])


def rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators. CUDA's only if it is in use: reading it would take GPU memory."""
    cuda = {"rng.cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    mps = {"rng.mps": torch.mps.get_rng_state()} if torch.backends.mps.is_available() else {}
    return {"rng.cpu": torch.get_rng_state(), **cuda, **mps}


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["rng.cpu"].clone())
    if "rng.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng.cuda"].clone())
    if "rng.mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["rng.mps"].clone())


def about(device: torch.device) -> dict[str, str | int]:
    """What a reader needs to reproduce a figure: commit, versions, device."""
    return {
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if find_spec("triton") else "none",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str:
    """The commit of this repository, with a + if files were edited since."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
