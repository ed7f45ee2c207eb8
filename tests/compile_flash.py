"""Compiles the Triton kernels for a GPU that need not be there.

    python -m tests.compile_flash ARCH SHARED CASES

ARCH: 90 for sm_90. SHARED: bytes of shared memory that a program may have there. CASES: [[what, dtype, D], ..] in JSON;
what is a name of CALLS below. Prints a JSON list: for each kernel what came out of it.

tests/test_flash_compile.py runs it, in a process of its own, as Triton's interpreter must not be on. Launches have
tensors of the CPU, and end where a kernel would start.
"""

import hashlib
import json
import re
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from itertools import product
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import decode, launch
from kernels.hopper.backward import launch_backward
from kernels.hopper.forward import launch_forward
from kernels.loss import loss_in_place
from kernels.problem import Problem

ARCH, SHARED, CASES = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
# As much of a driver as compiling asks for.
DRIVER = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0,
                         get_current_target=lambda: GPUTarget("cuda", ARCH, 32))  # fmt: skip


def compile_only(self, *args, grid, warmup, **options):
    with redirect_stdout(StringIO()) as log:
        kernel = launch_as_it_was(self, *args, grid=grid, warmup=True, **options)
    if self.__name__ in ("row_terms_kernel", "scaled_kernel"):  # small: not reported
        return kernel
    ptx = kernel.asm["ptx"]
    log = logs.setdefault(ptx, log.getvalue())  # of a kernel that two cases have, ptxas reports once
    found.append({
        "kernel": self.__name__, "case": case, "shared": kernel.metadata.shared, "triton": triton.__version__,
        "spills": 0 if case[1] == "float32" else int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "warnings": [line for line in log.splitlines() if "warning" in line.lower() or "C75" in line],
        "wgmma": ptx.count("wgmma.mma_async"), "ptx": hashlib.sha256(ptx.encode()).hexdigest(),
    })  # fmt: skip
    return kernel


def without_ptxas(*given):
    """float32 ends at PTX: ptxas takes seconds for each such kernel, and no test reads what it makes. Triton calls this
    with the stages of a compilation, and with nothing for a key and a hash of what it does to them."""
    if not given:
        return case[1], case[1]
    if case[1] == "float32":
        given[1]["cubin"] = lambda src, metadata: b"none"
    return None


triton.runtime.driver.set_active(DRIVER)
triton.knobs.runtime.add_stages_inspection_hook = without_ptxas
triton.knobs.nvidia.dump_ptxas_log = True  # to stdout: spills and warnings, with the options that Triton gives
triton.knobs.compilation.disable_line_info = True  # PTX without the lines that it came from
launch_as_it_was, JITFunction.run = JITFunction.run, compile_only
launch.has_descriptors = lambda device: ARCH >= 90
launch.INTERPRETED = True  # or it refuses tensors of the CPU
launch.shared_memory = decode.shared_memory = lambda device: SHARED
decode.processors = lambda device: 3  # for 3 splits; the merge of 64 spills 68 bytes at head size 256

PLAIN = Problem(500, 500, True, None, None, None, 64, 0.125, None, None, None, 0.0, ())
DROPOUT = {"seed": torch.tensor(1), "dropout_p": 0.1}


def empty(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def attention(dtype: str, D: int, **more) -> None:
    q, lse = empty(1, 2, 256, D, dtype=dtype), empty(1, 2, 256)
    problem = PLAIN._replace(T=256, T_k=256, **more)
    launch.forward(q, q, q, problem)
    launch.backward(q, q, q, q, lse, q, None, problem)


def hopper_forward(dtype: str, D: int) -> None:
    """The mask cuts one tile of every row; more; all that there is; with D = 64, other tiles for many keys."""
    everything = {"window": 100, "spans": torch.zeros(1, 500, 2, dtype=torch.int32), **DROPOUT}
    for T, T_k, more in ((500, 500, {}), (97, 500, {}), (500, 500, everything), (500, 2548, {}))[: 4 if D == 64 else 3]:
        q, k, lse = empty(1, 4, T, D, dtype=dtype), empty(1, 2, T_k, D, dtype=dtype), empty(1, 4, T)
        launch_forward(q, k, k, q, lse, lse, PLAIN._replace(T=T, T_k=T_k, **more))


def hopper_backward(dtype: str, D: int) -> None:
    """With two query heads a key head and with one, also of a long context; without dropout and with it."""
    q, lse = empty(1, 4, 500, D, dtype=dtype), empty(1, 4, 500)
    for (H_kv, T_k), more in product(((2, 500), (4, 500), (4, 2**15))[: 3 if D == 128 else 2], ({}, DROPOUT)):
        k = empty(1, H_kv, T_k, D, dtype=dtype)
        launch_backward(q, k, k, q, lse, q, lse, q, k, k, PLAIN._replace(T_k=T_k, **more))


def a_token(dtype: str, D: int) -> None:
    """Four query heads a key head, and all that the scores can have."""
    q, k, v = (empty(1, H, 1, D, dtype=dtype) for H in (8, 2, 2))
    cache = empty(2, 1, 2, 4096, D, dtype=dtype)
    decode.decode(q, k, v, *cache, torch.zeros(1, dtype=torch.int64), 0.125, 2.0, torch.ones(8), 100)


CALLS = {
    "attention": attention, "dropout": partial(attention, **DROPOUT), "decode": a_token,
    "blocks": partial(attention, blocks=torch.ones(4, 4, dtype=torch.bool)),
    "loss": lambda dtype, V: loss_in_place(empty(2, V, dtype=dtype), torch.zeros(2, dtype=torch.int64), -1, True),
    "hopper forward": hopper_forward, "hopper backward": hopper_backward,
}  # fmt: skip
logs, found = dict[str, str](), list[dict]()
for case in CASES:
    CALLS[case[0]](*case[1:])
print(json.dumps(found))
