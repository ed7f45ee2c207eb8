"""What train.py uses: configuration, one update, optimizers, checkpoints, metrics, instruments, several GPUs."""

import os
from pathlib import Path

# Scripts import this before torch: on a busy machine idle OpenMP threads must not spin, but leave the cores to others.
# Linux says how many threads want a core now, this one included. (The load average would count a run that has ended.)
load = Path("/proc/loadavg")
if load.exists() and 2 * (int(load.read_text().split()[3].split("/")[0]) - 1) >= (os.cpu_count() or 1):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
