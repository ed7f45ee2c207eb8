"""Kernels that are compiled before the run needs them (training/ahead.py)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training import ahead

ROOT = Path(__file__).resolve().parents[1]
# In a process without Triton's interpreter, for a GPU that need not be there.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, ".")
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:
    launcher_cls = utils = staticmethod(lambda *given: None)
    get_current_device = get_current_stream = lambda self, *given: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

found, loaded = [], []
triton.runtime.driver.set_active(Driver())
triton.knobs.compilation.listener = lambda *, metadata, cache_hit, **others: found.append((metadata["name"], cache_hit))
from kernels.dropout import keep_table
from kernels.loss import loss_in_place
from training import ahead
ahead.rng_state, ahead.set_rng_state = torch.get_rng_state, torch.set_rng_state

def step():
    rows = torch.arange(64)
    keep_table(torch.tensor(1), rows[:2], rows, 64, 26)
    loss_in_place(torch.empty(16, 64), rows[:16], -1, 0.0, True)

before = torch.get_rng_state()
ahead.compile_aside(lambda: (step(), torch.randn(3)))
assert torch.equal(before, torch.get_rng_state())
assert found == []  # nothing was compiled in this process
if sys.argv[1] == "killed":
    for processes in ahead.PROCESSES.values():
        os.kill(next(iter(processes)).pid, signal.SIGKILL)
launch = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: launch(self, *args, grid=grid, warmup=True, **options)
step()
print(found)
"""


def begun_then_launched(how: str, cache: Path) -> list[tuple[str, bool]]:
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_a_launch_finds_what_was_compiled_aside(tmp_path):
    assert begun_then_launched("whole", tmp_path) == [("keep_kernel", True), ("loss_kernel", True)]


@pytest.mark.slow
def test_a_launch_compiles_by_itself_what_a_process_did_not(tmp_path):
    assert [name for name, _ in begun_then_launched("killed", tmp_path)] == ["keep_kernel", "loss_kernel"]


def test_every_kind_of_block_is_computed_once_and_nothing_is_kept():
    """With windows [8, 8, null] twice: of each window the first block, which has nothing to add, and a later one."""
    config = GPTConfig(vocab_size=11, n_layer=6, n_head=2, n_embd=8, context_length=16)
    model = GPT(config, AttentionConfig("naive", windows=[8, 8, None]))
    calls = []
    model.layer = lambda block, x, added, context: (
        calls.append((list(model.blocks).index(block), added is None)) or block.forward(x, added, context)
    )
    before = {name: x.clone() for name, x in model.state_dict().items()}
    ahead.one_of_each(model, torch.zeros(2, 16, dtype=torch.int64))
    assert calls == [(0, True), (1, False), (2, False)]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_triton_finds_a_kernel_whichever_was_asked_for_first():
    """A process that compiled dq alone made another key of it than the run, which had compiled the forward before."""
    keys = []
    for names in (["dq_kernel"], ["forward_kernel", "dq_kernel"]):
        code = f"from kernels import flash; print([getattr(flash, name).cache_key for name in {names}][-1])"
        keys.append(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}))
    assert keys[0] == keys[1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile wants a C++ compiler")
def test_the_next_run_finds_a_graph_with_an_autograd_function_unless_a_source_was_edited(tmp_path):
    """A graph holds only the name of an op, so torch would take the backward that the op had before."""
    code = """
import torch
from torch._dynamo.utils import counters
from training.record import keep_graphs

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, do):
        return 2 * do

keep_graphs()
torch.compile(lambda x: Double.apply(x).sum())(torch.ones(3, requires_grad=True)).backward()
print(*(counters["aot_autograd"]["autograd_cache_" + found] for found in ("hit", "miss", "bypass")))
"""
    for room in ("model", "kernels", "training", "data", "parallel", "sampling", "conf"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("cache", "__pycache__"))
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}

    def counts() -> list[int]:
        environment = kept | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=600)
        return list(map(int, done.split()))

    assert [counts(), counts()] == [[0, 1, 0], [1, 0, 0]]
    with open(tmp_path / "kernels/op.py", "a") as file:
        file.write("# edited\n")
    assert counts() == [0, 1, 0]


@pytest.mark.slow
def test_what_is_compiled_right_after_the_end_gets_processes_of_its_own(tmp_path):
    """An evaluation may be the first to compile its graph, soon after Inductor's processes were told to end."""
    code = """
from torch._inductor.async_compile import AsyncCompile
from training import ahead
assert AsyncCompile.process_pool().submit(abs, -1).result() == 1
first = AsyncCompile.process_pool()
ahead.end()
assert AsyncCompile.process_pool().submit(abs, -2).result() == 2
assert first.process.wait(60) == 0
"""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    others = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    others["TORCHINDUCTOR_WORKER_START"] = "subprocess"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept | others, check=True, timeout=300)
