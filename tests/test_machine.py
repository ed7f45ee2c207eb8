"""What the machine is asked for and told."""

import ast
import gc
import importlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import HANGS
from training import machine, waiting
from training.machine import Stopping, stop_signals

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["train.py", "sample.py", "breakit.py", "bench.py"]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165.2),
        # Not to be taken for their bigger brothers:
        ("NVIDIA A10G", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("Tesla V100-SXM2-16GB", None),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_gpu_or_unknown(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine.peak_flops(torch.device("cuda")) == (teraflops and teraflops * 1e12)
    assert machine.peak_flops(torch.device("cpu")) is None


def test_a_cpus_memory_is_the_processs():
    before = machine.memory_gib(torch.device("cpu"))
    torch.ones(2**26)  # 0.25 GiB
    assert 0.05 < before <= machine.memory_gib(torch.device("cpu")) < 64


FAULTS = """
import ctypes, resource, torch
from training.machine import keep_memory
libc = ctypes.CDLL(None)
# whether glibc lets go by itself depends on what lies above a block in the heap: it is told to
libc.mallopt(-3, 1 << 17)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, or one fault would bring in 512 pages where the kernel likes to
def step():
    held = [torch.ones(1 << 21) for _ in range(8)]  # 8 MiB each
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))  # the kernel takes a page away now and then, too
keep_memory()
print(min(faults() for _ in range(5)))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_kept_for_the_next_step():
    """Page faults of ten steps that make the same eight tensors: none once their memory is kept."""
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    without, kept = map(int, done.stdout.split())
    assert kept < 200  # a tensor of them has 2,048 pages
    assert without > 1000  # the instrument sees faults where there are any


def test_only_what_a_run_makes_is_looked_through_for_garbage(small_run, monkeypatch):
    """train.py switches the collector off for its imports. One that is on stays as it is: of two runs in one process,
    the second would keep the garbage of the first, and its memory on a GPU."""
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(gc.isenabled()))
    gc.disable()
    try:
        for name in ("first", "second"):
            small_run(f"steps=1 name={name}")
            assert gc.isenabled()
    finally:
        gc.enable()
    assert frozen == [False]


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


def test_a_lost_connection_stops_a_run_as_sigterm_does(tmp_path):
    """SIGHUP ended it at once, without saving; and what it prints after that has no terminal to go to."""
    ours, its = os.openpty()

    def begin() -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a test run under nohup hands on as ignored

    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its, preexec_fn=begin)
    os.close(its)
    shown = b""
    while b"eval step 1/6" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)  # the kernel sends SIGHUP, and writing to the terminal is an error from now on
    assert process.wait(HANGS) == 0
    assert (tmp_path / "saved").read_text() == f"[{int(signal.SIGHUP)}]"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_second_signal_is_named_and_under_nohup_a_lost_connection_stops_nothing():
    """A second SIGTERM ended a run with 130, as if someone had typed Ctrl-C."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals == []
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt) as raised:
                os.kill(os.getpid(), signal.SIGTERM)
        assert (signals, raised.value.args) == ([signal.SIGINT], (signal.SIGTERM,))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("signals", "wait"), [(1, HANGS), (2, HANGS), (1, 0), (2, 0), (3, HANGS)])
def test_two_signals_in_an_import_wait_for_its_end_and_a_third_does_not(signals, wait, tmp_path, monkeypatch):
    """Python kept the lock of imports, and a thread that imported matplotlib waited for it: the run never ended."""
    kill = "import os, signal\n" + signals * "os.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "signalled.py").write_text(kill + "ended = True\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def wait_for_it() -> None:
        importlib.import_module("signalled")
        time.sleep(wait)

    with stop_signals() as received, pytest.raises(KeyboardInterrupt) as raised, received.at_once():
        wait_for_it()
    assert isinstance(raised.value, Stopping) == (signals == 1)
    assert ("signalled" in sys.modules) == (signals < 3)
    assert signals == 3 or sys.modules.pop("signalled").ended


@pytest.mark.parametrize("script", SCRIPTS)
def test_control_c_during_the_imports_leaves_without_a_traceback(script):
    # Through a pipe of a page the imports cannot run ahead of what is read, however late this process comes to read.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    process = subprocess.Popen([sys.executable, "-X", "importtime", script], cwd=ROOT, text=True, **pipes)
    imported = (line.rpartition("|")[2].strip() for line in iter(process.stderr.readline, ""))
    assert next(name for name in imported if name in ("dataclasses", "torch")) == "dataclasses"
    process.send_signal(signal.SIGINT)  # the script has begun, and torch is yet to come
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGINT
    assert not re.search(r"\| +torch$", err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_sets_how_threads_wait_and_where_kernels_are_kept_before_torch_but_not_over_the_user(script):
    """One other busy program made a step 4 to 40 times slower, as the threads of OpenMP spun. The second run of every
    recipe on a GPU compiled the kernels again, as their folder had moved."""
    first = next(node for node in ast.parse((ROOT / script).read_text()).body if isinstance(node, ast.If))
    begun = "\n".join(map(ast.unparse, first.body))
    show = "import sys, os, threading; print('torch' in sys.modules, [os.environ.get(n) for n in sys.argv[1:]], "
    show += "'watch' in [thread.name for thread in threading.enumerate()])"
    names = ["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "TRITON_CACHE_DIR"]

    def found(**users: str) -> str:
        kept = {key: value for key, value in os.environ.items() if key not in [*names, "OMP_WAIT_POLICY"]}
        command = [sys.executable, "-c", f"{begun}\n{show}", *names]
        done = subprocess.run(command, cwd=ROOT, env=kept | users, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    cache = str(Path.home() / ".triton" / "cache")
    own = dict(zip(names, ["7", "8", "/elsewhere"], strict=True))
    watched = waiting.can_watch()
    assert found() == f"False {[None if watched else '1000', '0', cache]} {watched}"
    assert found(**own) == f"False {list(own.values())} False"
    assert found(OMP_WAIT_POLICY="active") == f"False {[None, None, cache]} False"


@pytest.mark.skipif(not waiting.can_watch(), reason="needs Linux")
def test_the_time_without_a_core_is_that_in_which_others_have_it():
    """Three programs that never rest share a core: two thirds of the time are the others'."""
    pinned = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    others = [subprocess.Popen([sys.executable, "-c", f"{pinned}while True: pass"]) for _ in range(2)]
    measure = "import time; from training.waiting import without_core as lost\na = lost()\n"
    measure += "while time.process_time() < 0.5: pass\nprint(lost() - a)"
    try:
        command = [sys.executable, "-c", pinned + measure]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=HANGS, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert float(done.stdout) > 0.7  # of 0.5 s with the core


SPINNING = """
import os, threading, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from training import waiting
rate, at, lost = 0.0, time.perf_counter(), 0.0
def without_core():
    global at, lost
    now = time.perf_counter()
    at, lost = now, lost + rate * (now - at)
    return lost
waiting.without_core, waiting.PERIOD = without_core, 0.01
threading.Thread(target=waiting.watch, daemon=True).start()
def spun():
    time.sleep(0.2)
    began = time.process_time()
    for _ in range(12):
        torch.ones(1 << 17)
        time.sleep(0.015)  # the other thread has done its share and waits for the next
    return time.process_time() - began
for rate in (0.0, 1.0, 0.0):
    print(spun())
"""


@pytest.mark.skipif(not waiting.can_watch() or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores")
def test_threads_spin_alone_and_sleep_while_they_wait_for_cores():
    """Beside a busy program a step takes 4 to 40 times as long if they spin, alone 8 % longer if they sleep."""
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, "-c", SPINNING]
    spun = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True).stdout.split()
    alone, beside, again = map(float, spun)
    assert beside < min(alone, again) / 3
