"""What train.py uses: configuration, one update, optimizers, checkpoints, metrics, instruments, several GPUs."""

import os
import time
from pathlib import Path

RUNNABLE = Path("/proc/loadavg")  # Linux: its fourth field begins with how many threads want a core now


def others() -> int:
    """How many other threads have wanted a core for 20 ms."""
    counts = []
    for _ in range(5):
        counts.append(int(RUNNABLE.read_text().split()[3].partition("/")[0]) - 1)
        time.sleep(0.005)
    return min(counts)


# Scripts import this before torch. On a busy machine idle OpenMP threads must not spin, but leave the cores to others;
# on an idle one a step is a quarter slower without it. (Not the load average, which is that of the last minute.)
if RUNNABLE.exists() and 2 * others() >= (os.cpu_count() or 1):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
