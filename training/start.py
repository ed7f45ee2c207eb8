"""What every script sets before its imports: how threads wait, where compiled kernels are kept, what Ctrl-C does.

    if __name__ == "__main__":
        from training import start

        start.begin()

Imports neither torch nor triton, whose libraries read the environment once, when they are loaded.
"""

import os
import signal
import time
from pathlib import Path

# An OpenMP thread that has finished its share of an operation spins until the others have. On a machine that runs
# another program too, the one it waits for may have no core: then spinning takes the core that the other thread needs,
# and a step takes 4 to 40 times as long. So threads spin for a moment and then sleep. LOG.md has the measurements.
SPINS = {
    "GOMP_SPINCOUNT": "1000",  # GNU's runtime, in torch's packages for Linux: rounds of its loop, a few microseconds
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's, on a Mac and in conda: milliseconds
}
BEGAN: list[float] = []  # when the script began, by time.perf_counter(), until a run counts it as its own beginning


def begin() -> None:
    """Sets the environment of this process and of those that it starts. What the user has set stays."""
    BEGAN.append(time.perf_counter())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SPINS.items():
            os.environ.setdefault(name, value)
    # Triton's own default. Inductor sets another folder, but only in a run in which it compiles something itself. Then
    # the next run, which finds Inductor's kernels in their cache, would look for ours in the wrong folder.
    home = os.environ.get("TRITON_HOME") or Path.home()
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home, ".triton", "cache")))
