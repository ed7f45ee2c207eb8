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

BEGAN: list[float] = []  # when the script began, by time.perf_counter(), until a run counts it as its own beginning


def begin() -> None:
    """Sets the environment of this process and of those that it starts. What the user has set stays."""
    BEGAN.append(time.perf_counter())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback
    if "OMP_WAIT_POLICY" not in os.environ:
        if "GOMP_SPINCOUNT" not in os.environ and waiting.can_watch():
            threading.Thread(target=waiting.watch, name="watch", daemon=True).start()
        else:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # rounds of GNU's runtime, a few microseconds
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # ms of Intel's and LLVM's, on a Mac and in conda
    # Triton's own default. Inductor sets another folder, but only in a run in which it compiles something itself. Then
    # the next run, which finds Inductor's kernels in their cache, would look for ours in the wrong folder.
    home = os.environ.get("TRITON_HOME") or Path.home()
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home, ".triton", "cache")))
