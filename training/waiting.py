"""How the threads of an operation on a CPU wait for each other: awake while the cores are theirs, asleep beside others.

A thread of OpenMP that has finished its share of an operation spins until the others have. On a machine that runs
another program too, the one it waits for may have no core: then spinning takes the core that the other thread needs,
and a step takes 4 to 40 times as long. But to sleep and to be woken takes 8 % of a step on an idle machine. LOG.md has
the figures.

GNU's runtime, in torch's packages for Linux, spins 300,000 rounds, or 100 while a process has more of its threads than
there are cores (do_spin in libgomp/config/linux/wait.h). So a few idle threads more make all of them sleep soon.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")  # Linux has a folder for each thread here
PERIOD = 0.1  # seconds from one look to the next
NEWEST = 0.25  # share of the newest look in the average
CROWDED, FREE = 0.3, 0.1  # seconds without a core a second, of all threads together: above they sleep, below they spin


def without_core() -> float:
    """Seconds that the threads of this process were ready to run and had no core, all together."""
    nanoseconds = 0
    for thread in THREADS.iterdir():
        with suppress(OSError):  # it has ended
            nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def can_watch() -> bool:
    """Whether this system says how long threads were without a core."""
    return Path("/proc/self/schedstat").exists()


def watch() -> None:
    """Looks ten times a second whether this process's threads have the cores for themselves, and lets them spin or
    sleep. For a thread of its own. Ends if torch has one thread, or as soon as it uses a GPU."""
    while "torch" not in sys.modules:
        time.sleep(PERIOD)
    import torch  # waits for the thread that imports it

    spinning, share, before, then = threading.Event(), 0.0, without_core(), time.perf_counter()
    spinning.set()
    while torch.get_num_threads() > 1 and not torch.cuda.is_initialized():
        time.sleep(PERIOD)
        lost, now = without_core(), time.perf_counter()
        share += NEWEST * (max(lost - before, 0) / (now - then) - share)  # what an ended thread lost is not counted
        before, then = lost, now
        if share > CROWDED and spinning.is_set():
            spinning = threading.Event()
            sleep_until(spinning)
        elif share < FREE:
            spinning.set()
    spinning.set()


def sleep_until(spinning: threading.Event) -> None:
    """Starts idle threads of OpenMP, so many that all others sleep. They end when `spinning` is set."""
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))

    def idle() -> None:
        torch.ones(threads << 16)  # an operation that has a share for each thread: these are the new ones
        spinning.wait()

    for _ in range((cores - threads) // (threads - 1) + 1):
        threading.Thread(target=idle, daemon=True).start()
