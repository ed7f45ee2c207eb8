"""training/machine.py and training/runs.py."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from tests.conftest import ROOT
from training import machine


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", None), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312),
     ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40S", None),
     ("NVIDIA L4", 121), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("Tesla T4", None)],
)  # fmt: skip
def test_the_peak_is_that_of_the_gpu_or_unknown(name, teraflops):
    assert machine.peak_flops(name) == (teraflops and teraflops * 1e12)


def test_a_cpus_memory_is_the_processs():
    before = machine.memory_gib(torch.device("cpu"))
    held = torch.ones(2**28)  # 1 GiB
    assert machine.memory_gib(torch.device("cpu")) >= max(before, held.nbytes / 2**30)


def test_a_cpu_trains_in_float32_and_16_bits_are_by_autocast():
    cpu = torch.device("cpu")
    assert machine.pick_dtype("auto", cpu) == "float32"
    assert isinstance(machine.autocast("float32", cpu), nullcontext)
    with machine.autocast("bf16", cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_table_of_runs_has_the_best_first_and_what_was_typed(call, small, tmp_path):
    import train

    folder = tmp_path / "sweep-1"
    for name, lr in (("0", "1e-9"), ("1", "1e-2")):
        call(train, *small, f"runs={folder}", f"name={name}", "steps=4", f"optimizer.lr={lr}")
    call(train, "resume=0", f"runs={folder}", "name=2", "steps=5")
    (folder / "3").mkdir()  # stopped before its first evaluation
    (folder / "3" / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "3" / "typed.txt").write_text("")
    command = [sys.executable, "-m", "training.runs", str(folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in said[1:]] == ["1", "0", "2", "3"]
    assert said[1].endswith("optimizer.lr=1e-2")
