"""What the machine is asked for and told."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FAULTS = """
import ctypes, resource, sys, torch
from training.machine import keep_memory
# whether glibc lets go by itself depends on what lies above a block in the heap: it is told to
ctypes.CDLL(None).mallopt(-3, 1 << 17)
if sys.argv[1] == "keep":
    keep_memory()
def step():
    held = [torch.ones(1 << 21) for _ in range(8)]  # 8 MiB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_kept_for_the_next_step():
    """Page faults of ten steps that make the same eight tensors: none once their memory is kept."""

    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 200  # a tensor of them has 2,048 pages
    assert faults("let go") > 1000  # the instrument sees faults where there are any
