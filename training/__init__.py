"""What train.py uses: configuration, one update, optimizers, checkpoints, metrics, instruments, several GPUs."""

import ctypes
import os
from pathlib import Path

# Scripts import this before torch: on a busy machine idle OpenMP threads must not spin, but leave the cores to others.
# Linux says how many threads want a core now, this one included. (The load average would count a run that has ended.)
load = Path("/proc/loadavg")
if load.exists() and 2 * (int(load.read_text().split()[3].split("/")[0]) - 1) >= (os.cpu_count() or 1):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# glibc gives freed memory back to the system, and a step's tensors then come from it again, page by page: a sixth of
# a step of the default on a CPU. Keep a gigabyte. (A Mac has no mallopt.)
libc = ctypes.CDLL(None)
if hasattr(libc, "mallopt"):
    libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: smaller tensors come from the heap; older versions take no more
    libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: so much free memory stays there
