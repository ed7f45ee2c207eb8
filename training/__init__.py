"""What train.py uses: configuration, one update, optimizers, checkpoints, metrics, instruments, several GPUs."""

import os

# Scripts import this before torch: on a busy machine idle OpenMP threads must not spin, but leave the cores to others.
if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
