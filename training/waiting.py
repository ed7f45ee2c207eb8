"""How the threads of an operation on a CPU wait for each other: awake while the cores are theirs, asleep beside others.

A thread of OpenMP that has finished its share of an operation spins until the others have. On a machine that runs
another program too, the one it waits for may have no core: then spinning takes the core that the other thread needs,
and a step takes 4 to 40 times as long. But to sleep and to be woken takes 8 % of a step on an idle machine. LOG.md has
the figures.

GNU's runtime, in torch's packages for Linux, spins 300,000 rounds, or 100 while a process has more of its threads than
there are cores (do_spin in libgomp/config/linux/wait.h). So while a few more threads are there, which do nothing, all
of them sleep soon.
"""

import atexit
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
TEAMS = 3  # of idle threads at most; where more would be needed, enough cores are free
STARTING = threading.Lock()  # held while a team starts: Python's end would abort the process then


def without_core() -> float:
    """Seconds that the threads of this process were ready to run and had no core, all together."""
    nanoseconds = 0
    with suppress(OSError):
        for thread in THREADS.iterdir():
            with suppress(OSError):  # it has ended
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def can_watch() -> bool:
    """Whether this system says how long threads were without a core. Some have zeros only."""
    with suppress(OSError, ValueError):
        return any(map(int, Path("/proc/self/schedstat").read_text().split()[:2]))
    return False


def watch() -> None:
    """Looks ten times a second whether this process's threads have the cores for themselves, and lets them spin or
    sleep. For a thread of its own. Ends at once if torch has one thread or leaves many cores free, and as soon as it
    uses a GPU, whose runs compute little on the CPU."""
    while "torch" not in sys.modules:
        time.sleep(PERIOD)
    import torch  # waits for the thread that imports it

    if not 0 < teams(torch.get_num_threads()) <= TEAMS:
        return
    atexit.register(STARTING.acquire)
    spinning, share, before, then = threading.Event(), 0.0, without_core(), time.perf_counter()
    spinning.set()
    while not torch.cuda.is_initialized():
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


def teams(threads: int) -> int:
    """How many idle teams of so many threads make more threads than there are cores. A team has a thread of Python's,
    which libgomp does not count. 0 for one thread, which waits for none."""
    return 0 if threads == 1 else (len(os.sched_getaffinity(0)) - threads) // (threads - 1) + 1


def sleep_until(spinning: threading.Event) -> None:
    """Starts idle threads of OpenMP, so many that all others sleep. They end when `spinning` is set."""
    import torch

    def idle() -> None:
        with STARTING:
            torch.ones(torch.get_num_threads() << 16)  # a share for each thread: these are the new ones
        spinning.wait()

    for _ in range(teams(torch.get_num_threads())):
        threading.Thread(target=idle, daemon=True).start()
