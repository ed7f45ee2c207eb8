"""Processes that tests start: for how long they may hang, and what they show a terminal."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Seconds. It only ends what would hang for ever: on a machine that does much besides, imports alone may take a minute.
HANGS = 600


def shown_on_a_terminal(command: list[str], stream: str, columns: int) -> str:
    """All that a process writes to its stdout or stderr, which is a terminal of so many columns.

    It is read while the process runs: a terminal holds a few kB, and once it is full the writer waits.
    """
    import termios  # which Windows lacks

    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, columns))
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **{stream: its})
    os.close(its)
    shown = b""
    with suppress(OSError):  # the process has left
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(HANGS) == 0
    return shown.decode()
