"""What every script sets before its imports: how threads wait, where compiled kernels are kept, what Ctrl-C does.

    if __name__ == "__main__":
        from training import start

        start.begin()

Imports neither torch nor triton, whose libraries read the environment once, when they are loaded.
"""

import os
import signal
import threading
import time
from pathlib import Path

from training import waiting

# How long a thread of OpenMP spins until it sleeps, where nothing watches whether it may (training/waiting.py).
SPINS = {
    "GOMP_SPINCOUNT": "1000",  # GNU's runtime: rounds of its loop, a few microseconds
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's, on a Mac and in conda: milliseconds
}
BEGAN: list[float] = []  # when the script began, by time.perf_counter(), until a run counts it as its own beginning


def begin() -> None:
    """Sets the environment of this process and of those that it starts. What the user has set stays."""
    BEGAN.append(time.perf_counter())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback
    if "OMP_WAIT_POLICY" not in os.environ:
        if "GOMP_SPINCOUNT" not in os.environ and waiting.can_watch():
            threading.Thread(target=waiting.watch, daemon=True).start()
            spins = {"KMP_BLOCKTIME": SPINS["KMP_BLOCKTIME"]}
        else:
            spins = SPINS
        for name, value in spins.items():
            os.environ.setdefault(name, value)
    # Triton's own default. Inductor sets another folder, but only in a run in which it compiles something itself. Then
    # the next run, which finds Inductor's kernels in their cache, would look for ours in the wrong folder.
    home = os.environ.get("TRITON_HOME") or Path.home()
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home, ".triton", "cache")))
