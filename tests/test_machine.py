"""What the machine is asked for and told."""

import ast
import gc
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from tests.processes import HANGS
from training import start
from training.machine import pick_device, stop_signals

ROOT = Path(__file__).resolve().parents[1]

FAULTS = """
import ctypes, resource, sys, torch
from training.machine import keep_memory
libc = ctypes.CDLL(None)
# whether glibc lets go by itself depends on what lies above a block in the heap: it is told to
libc.mallopt(-3, 1 << 17)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, or one fault would bring in 512 pages where the kernel likes to
if sys.argv[1] == "keep":
    keep_memory()
def step():
    held = [torch.ones(1 << 21) for _ in range(8)]  # 8 MiB each
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))  # the kernel takes a page away now and then, too
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_kept_for_the_next_step():
    """Page faults of ten steps that make the same eight tensors: none once their memory is kept."""

    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 200  # a tensor of them has 2,048 pages
    assert faults("let go") > 1000  # the instrument sees faults where there are any


# In a terminal, with the bar that is there then: two lines, and once the signal has come two more and a file.
IN_A_TERMINAL = """
import fcntl, sys, termios, time
from pathlib import Path
fcntl.ioctl(0, termios.TIOCSCTTY)
from training.machine import stop_signals
from training.metrics import Metrics, show
from training.wandb_run import WandbConfig
run = Metrics(Path(sys.argv[1]), 6, config={}, wandb_config=WandbConfig(mode="disabled"))
evaluated = {"val_loss": 2.0, "val_bits_per_byte": 3.0}
with stop_signals() as signals:
    run.log({"step": 1, **evaluated})
    while not signals:
        time.sleep(0.01)
    run.log({"step": 2, **evaluated})
    run.close(128 + signals[0])
show("a last line")
Path(sys.argv[1], "saved").write_text(str(signals))
"""


def test_only_what_a_run_makes_is_looked_through_for_garbage(call, small, tmp_path, monkeypatch):
    """train.py switches the collector off for its imports. One that is on stays as it is: of two runs in one process,
    the second would keep the garbage of the first, and its memory on a GPU."""
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(gc.isenabled()))
    gc.disable()
    try:
        for name in ("first", "second"):
            assert call(train, *small, "steps=1", f"runs={tmp_path}", f"name={name}").code == 0
            assert gc.isenabled()
    finally:
        gc.enable()
    assert frozen == [False]


def test_a_lost_connection_stops_a_run_as_sigterm_does(tmp_path):
    """SIGHUP ended it at once, without saving; and what it prints after that has no terminal to go to."""
    ours, its = os.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path)]

    def begin() -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a test run under nohup hands on as ignored

    process = subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its, preexec_fn=begin)
    os.close(its)
    shown = b""
    while b"eval step 1/6" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)  # the kernel sends SIGHUP, and writing to the terminal is an error from now on
    assert process.wait(HANGS) == 0
    assert (tmp_path / "saved").read_text() == f"[{int(signal.SIGHUP)}]"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_second_signal_is_named():
    """A second SIGTERM ended a run with 130, as if someone had typed Ctrl-C."""
    with stop_signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
    assert (signals, raised.value.args) == ([signal.SIGINT], (signal.SIGTERM,))


def test_under_nohup_a_lost_connection_stops_nothing(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("script", ["train", "sample", "breakit", "bench"])
def test_control_c_during_the_imports_leaves_without_a_traceback(script):
    command = [sys.executable, "-X", "importtime", f"{script}.py"]
    # Through a pipe of a page the imports cannot run ahead of what is read, however late this process comes to read.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    imported = (line.rpartition("|")[2].strip() for line in iter(process.stderr.readline, ""))
    assert next(name for name in imported if name in ("dataclasses", "torch")) == "dataclasses"
    process.send_signal(signal.SIGINT)  # the script has begun, and torch is yet to come
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGINT
    assert "| torch\n" not in err
    assert "Traceback" not in err


def test_a_device_that_is_not_there_is_refused_without_torchs_list_of_what_is(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("Could not run this with the 'MPS' backend. This could be because ... CPU: registered at")

    monkeypatch.setattr(torch, "empty", missing)
    said = "device=mps cannot be used here (Could not run this with the 'MPS' backend); use device=auto or device=cpu"
    with pytest.raises(ValueError, match=re.escape(said)):
        pick_device("mps")


@pytest.mark.parametrize("script", ["train.py", "sample.py", "breakit.py", "bench.py"])
def test_a_script_sets_how_threads_wait_and_where_kernels_are_kept_before_torch_but_not_over_the_user(script):
    """One other busy program made a step 4 to 40 times slower, as the threads of OpenMP spun. The second run of every
    recipe on a GPU compiled the kernels again, as their folder had moved."""
    first = next(node for node in ast.parse((ROOT / script).read_text()).body if isinstance(node, ast.If))
    begun = "\n".join(map(ast.unparse, first.body))
    show = "import sys, os; print('torch' in sys.modules, [os.environ.get(n) for n in sys.argv[1:]])"
    names = ["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "TRITON_CACHE_DIR"]

    def found(**users: str) -> str:
        kept = {key: value for key, value in os.environ.items() if key not in [*names, "OMP_WAIT_POLICY"]}
        command = [sys.executable, "-c", f"{begun}\n{show}", *names]
        return subprocess.run(command, cwd=ROOT, env=kept | users, capture_output=True, text=True, check=True).stdout

    cache = str(Path.home() / ".triton" / "cache")
    assert found().strip() == f"False {[*start.SPINS.values(), cache]}"
    own = dict(zip(names, ["7", "8", "/elsewhere"], strict=True))
    assert found(**own).strip() == f"False {list(own.values())}"
    assert found(OMP_WAIT_POLICY="active").strip() == f"False {[None, None, cache]}"
