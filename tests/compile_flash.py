"""Compiles the Triton kernels for a GPU that need not be there.

    python tests/compile_flash.py ARCH SHARED CASES [SOURCE]

ARCH: 90 for sm_90. SHARED: bytes of shared memory that a program may have there. CASES: [[dtype, D, dropout], ..] in
JSON; [dtype, V, "loss"] is the kernel of the loss, [dtype, D, "decode"] that of one new token's attention, [dtype,
D, "pages"] the same with keys in pages, [dtype, D, "early"] with the stages that few programs have, [dtype, G,
"heads"] those without and with rope for G query heads a key head, of size 64, [dtype, B, "linear768"] that of a linear
layer with B rows of 768, [dtype, C, "token"] those of one of GPT-2's layers of width C, ["bool", C, "table"] that of
whole dropout masks, [dtype, C, "norm"] that of a norm's backward, [dtype, D, "hopper"] those of
kernels/hopper/forward.py, [dtype, D, "hopper_backward"] that of kernels/hopper/backward.py. SOURCE: a text to take for
kernels/flash.py instead.
Prints a JSON list: for each kernel what came out of it.

tests/test_flash_compile.py runs it, in a process of its own, as Triton's interpreter must not be on. Launches go
through the ordinary door with tensors of the CPU, and end where a kernel would start.
"""

import hashlib
import importlib.util
import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

ARCH, SHARED, CASES = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
SOURCE = sys.argv[4] if len(sys.argv) > 4 else ROOT / "kernels" / "flash.py"


class NoDriver:
    """As much of a driver as compiling asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)


def compile_only(self, *args, grid, warmup, **options):
    how = args[-1]  # every kernel's last argument
    with redirect_stdout(StringIO()) as log:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
    if self.__name__ in ("sum_kernel", "row_terms_kernel", "scaled_kernel", "visits_kernel"):  # compiled once for all
        return kernel
    ptx, log = kernel.asm["ptx"], log.getvalue()
    assembled, of_flash = dtype != "float32", not isinstance(dropout, str)
    found.append(
        {
            "kernel": self.__name__,
            "dtype": dtype,
            "D": D,
            "dropout": dropout,
            "tiles": [how.BLOCK_M.value, how.BLOCK_N.value, *map(options.get, TILES)] if of_flash else [],
            "shared": kernel.metadata.shared,
            "loads": sorted(set(re.findall(r"ld\.global\.v\d\.b\d+", ptx))),
            "registers": int(re.search(r"Used (\d+) registers", log)[1]) if assembled else None,
            "spills": int(re.search(r"(\d+) bytes spill stores", log)[1]) if assembled else None,
            "wgmma": ptx.count("wgmma.mma_async"),
            "ahead": ptx.partition("griddepcontrol.wait")[0].count("cp.async.commit_group"),
            "warnings": [line for line in log.splitlines() if "warning" in line.lower() or "C75" in line],
            "ptx": hashlib.sha256(ptx.encode()).hexdigest(),
        }
    )
    return kernel


def without_ptxas(*given):
    """float32 ends at PTX: ptxas takes seconds for each such kernel, and no test reads what it makes. Triton calls this
    with the stages of a compilation, and with nothing for a key and a hash of what it does to them."""
    if not given:
        return dtype, dtype
    stages = given[1]
    if dtype == "float32":
        stages["cubin"] = lambda src, metadata: b"none"
    return None


triton.runtime.driver.set_active(NoDriver())
triton.knobs.runtime.add_stages_inspection_hook = without_ptxas
triton.knobs.nvidia.dump_ptxas_log = True  # to stdout: registers, spills, warnings, with the options that Triton gives
triton.knobs.compilation.disable_line_info = True  # PTX without the lines that it came from
launch, JITFunction.run = JITFunction.run, compile_only
spec = importlib.util.spec_from_file_location("kernels.flash", SOURCE)
flash = importlib.util.module_from_spec(spec)
sys.modules["kernels.flash"] = flash
spec.loader.exec_module(flash)
from kernels import op, sizes  # noqa: E402  (now, that the kernels are those of SOURCE)
from kernels.dropout import keep_table  # noqa: E402
from kernels.loss import loss_in_place  # noqa: E402
from kernels.norm import norm_backward  # noqa: E402
from kernels.problem import Problem  # noqa: E402
from sampling.decode import decode  # noqa: E402
from sampling.linear import linear  # noqa: E402

sizes.INTERPRETED = True  # or it refuses tensors of the CPU
sizes.has_descriptors = lambda device: ARCH >= 90
sizes.starts_early = lambda device: ARCH >= 90
sizes.shared_memory = lambda device: SHARED
TILES = sizes.Tiles._fields[2:]

found = []
for dtype, D, dropout in CASES:
    if dropout == "loss":
        loss_in_place(torch.empty(2, D, dtype=getattr(torch, dtype)), torch.zeros(2, dtype=torch.int64), -1, 0.0, True)
        continue
    if dropout in ("decode", "pages", "early"):  # four query heads a key head, and all that the scores can have
        heads = (torch.empty(1, H, 1, D, dtype=getattr(torch, dtype)) for H in (8, 2, 2))
        kept = torch.empty(2, 2, 4096, D, dtype=getattr(torch, dtype))
        zeros, problem = torch.zeros(2, dtype=torch.int64), Problem.of(1, 4096, softcap=2.0, slopes=torch.ones(8))
        rope, table = torch.zeros(2, 4096, D // 2).unbind(), None
        if dropout == "pages":
            kept, table = kept.view(2, 64, 2, 64, D), (torch.zeros(1, 64, dtype=torch.int32), 4096)
        splits = 1 if dropout == "early" else 8  # few programs may have DEEP
        decode(*heads, *kept, zeros[:1], problem, zeros.int(), splits, rope, table)
        continue
    if dropout == "heads":
        half = getattr(torch, dtype)
        heads, kept = [torch.empty(1, H, 1, 64, dtype=half) for H in (D, 1, 1)], torch.empty(2, 1, 4096, 64, dtype=half)
        zeros = torch.zeros(1, dtype=torch.int64)
        for rope in (None, torch.zeros(2, 4096, 32).unbind()):
            decode(*heads, *kept, zeros, Problem.of(1, 4096, 0.125), zeros.int(), 1, rope)
        continue
    if dropout == "token":  # qkv, attention, out, up, down
        half = getattr(torch, dtype)
        heads, kept = torch.empty(3, 1, 2, 1, 64, dtype=half), torch.empty(2, 2, 4096, 64, dtype=half)
        zeros = torch.zeros(2, dtype=torch.int64)
        norm, x, o = torch.nn.LayerNorm(D).to(half), torch.empty(1, D), torch.empty(1, D, dtype=half)
        qkv, out, up, down = (torch.nn.Linear(K * D, N * D).to(half) for K, N in ((1, 3), (1, 1), (1, 4), (4, 1)))
        linear(x, qkv, norm=norm)
        decode(*heads, *kept, zeros[:1], Problem.of(1, 4096, 0.125), zeros.int(), 1)  # few programs may have DEEP
        linear(o, out, add=x, dtype=x.dtype)
        linear(x, up, norm=norm, activation="gelu_tanh")
        linear(o.repeat(1, 4), down, add=x, dtype=x.dtype)
        continue
    if str(dropout).startswith("linear"):  # all that may stand before and after it
        width = int(dropout.removeprefix("linear"))
        layer, norm = torch.nn.Linear(width, 3072), torch.nn.LayerNorm(width)
        for module in (layer, norm):
            module.to(getattr(torch, dtype))
        linear(torch.empty(D, width), layer, norm=norm, gate=layer, activation="silu", add=torch.empty(D, 3072))
        continue
    if dropout == "table":
        keep_table(torch.tensor(1), torch.arange(128), torch.arange(256), D, 51)
        continue
    if dropout == "norm":  # all that one can have
        dy, x, weight, stats = torch.empty(2, D, dtype=getattr(torch, dtype)), torch.empty(2, D), *torch.empty(2, D)
        keep = torch.empty(2, D, dtype=torch.bool)
        norm_backward(dy, x, x, stats, stats, weight, keep, 1.25, dy.dtype, True)
        continue
    if dropout == "hopper":
        from kernels.hopper.forward import launch_forward

        k = torch.empty(1, 2, 500, D, dtype=getattr(torch, dtype))
        words = torch.zeros(1, 500, dtype=torch.int64)
        others = {"window": 100, "documents_q": words, "documents_k": words, "seed": words[0, 0], "drop_threshold": 26}
        for T, more in ((500, {}), (97, {}), (500, others)):  # the mask cuts one tile of every row; more; all there is
            q, lse = torch.empty(1, 4, T, D, dtype=k.dtype), torch.empty(1, 4, T)
            launch_forward(q, k, k, q, lse, lse, Problem.of(T, 500, **more))
        if D == 64:  # other tiles for many keys
            k = torch.empty(1, 2, 2548, D, dtype=k.dtype)
            launch_forward(q, k, k, q, lse, lse, Problem.of(500, 2548))
        continue
    if dropout == "hopper_backward":
        from kernels.hopper.backward import launch_backward

        q, k = (torch.empty(1, H, 500, D, dtype=getattr(torch, dtype)) for H in (4, 2))
        lse = torch.empty(1, 4, 500)
        for more in ({}, {"seed": torch.tensor(1), "drop_threshold": 26, "numbers": torch.arange(4)}):
            launch_backward(q, k, k, q, lse, q, lse, (q, k, k), Problem.of(500, 500, **more))
        continue
    q, k, v = (torch.randn(1, 2, 256, D, dtype=getattr(torch, dtype)).requires_grad_() for _ in "qkv")
    seed = torch.tensor(1) if dropout else None
    o, _ = op.flash_attention(q, k, v, Problem.of(256, 256, scale=0.125, seed=seed, drop_threshold=26 * dropout))
    torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
print(json.dumps(found))
