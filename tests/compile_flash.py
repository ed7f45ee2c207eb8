"""Compiles the Triton kernels for a GPU that need not be there.

    python tests/compile_flash.py ARCH SHARED CASES [SOURCE]

ARCH: 90 for sm_90. SHARED: bytes of shared memory that a program may have there. CASES: [[dtype, D, dropout], ..] in
JSON; instead of dropout a name of OTHERS below, for its kernel, where D is another number. SOURCE: a text to take for
kernels/flash.py instead. Prints a JSON list: for each kernel what came out of it.

tests/test_flash_compile.py runs it, in a process of its own, as Triton's interpreter must not be on. Launches go
through the ordinary door with tensors of the CPU, and end where a kernel would start.
"""

import hashlib
import importlib.util
import json
import re
import sys
from contextlib import redirect_stdout
from functools import partial
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
    ptx = kernel.asm["ptx"]
    log = logs.setdefault(ptx, log.getvalue())  # of a kernel that two cases have, ptxas reports once
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
            "triton": triton.__version__,
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
from sampling.choose import choose  # noqa: E402
from sampling.decode import decode  # noqa: E402
from sampling.linear import embed, linear  # noqa: E402

sizes.INTERPRETED = True  # or it refuses tensors of the CPU
sizes.has_descriptors = lambda device: ARCH >= 90
sizes.starts_early = lambda device: ARCH >= 90
sizes.shared_memory = lambda device: SHARED
TILES = sizes.Tiles._fields[2:]


def empty(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


ZEROS = torch.zeros(2, dtype=torch.int64)


def attention(dtype: str, D: int, dropout: bool) -> None:
    q, k, v = (empty(1, 2, 256, D, dtype=dtype).requires_grad_() for _ in "qkv")
    seed = torch.tensor(1) if dropout else None
    o, _ = op.flash_attention(q, k, v, Problem.of(256, 256, scale=0.125, seed=seed, drop_threshold=26 * dropout))
    torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))


def a_token(dtype: str, D: int, pages: bool = False, splits: int = 8) -> None:
    """The attention of one: four query heads a key head, and all that the scores can have."""
    heads = (empty(1, H, 1, D, dtype=dtype) for H in (8, 2, 2))
    kept, table = empty(2, 2, 4096, D, dtype=dtype), None
    problem, rope = Problem.of(1, 4096, softcap=2.0, slopes=torch.ones(8)), empty(2, 4096, D // 2).unbind()
    if pages:
        kept, table = kept.view(2, 64, 2, 64, D), (torch.zeros(1, 64, dtype=torch.int32), 4096)
    decode(*heads, *kept, ZEROS[:1], problem, ZEROS.int(), splits, rope, table)


def with_heads(dtype: str, G: int) -> None:
    """One key head of size 64 for G query heads, without rope and with it."""
    heads, kept = [empty(1, H, 1, 64, dtype=dtype) for H in (G, 1, 1)], empty(2, 1, 4096, 64, dtype=dtype)
    for rope in (None, empty(2, 4096, 32).unbind()):
        decode(*heads, *kept, ZEROS[:1], Problem.of(1, 4096, 0.125), ZEROS.int(), 1, rope)


def a_layer(dtype: str, C: int) -> None:
    """A token's kernels in one of GPT-2's layers of width C: qkv, attention, out, up, down."""
    half = getattr(torch, dtype)
    norm, x, o = torch.nn.LayerNorm(C).to(half), empty(1, C), empty(1, C, dtype=dtype)
    qkv, out, up, down = (torch.nn.Linear(K * C, N * C).to(half) for K, N in ((1, 3), (1, 1), (1, 4), (4, 1)))
    linear(x, qkv, norm=norm)
    heads, kept = empty(3, 1, 2, 1, 64, dtype=dtype), empty(2, 2, 4096, 64, dtype=dtype)
    decode(*heads, *kept, ZEROS[:1], Problem.of(1, 4096, 0.125), ZEROS.int(), 1)  # few programs may have DEEP
    linear(o, out, add=x, dtype=x.dtype)
    linear(x, up, norm=norm, activation="gelu_tanh")
    linear(o.repeat(1, 4), down, add=x, dtype=x.dtype)


def a_linear(dtype: str, B: int, K: int) -> None:
    """A layer of width K for B rows, and all that may stand before and after it."""
    layer, norm = (module.to(getattr(torch, dtype)) for module in (torch.nn.Linear(K, 3072), torch.nn.LayerNorm(K)))
    linear(empty(B, K), layer, norm=norm, gate=layer, activation="silu", add=empty(B, 3072))


def a_choice(dtype: str, V: int) -> None:
    """Of the next token, drawn and not, and its embedding, with a position's and without."""
    for draws in (empty(2, V), None):
        choose(empty(2, V), draws, 0.5)
    table = torch.nn.Embedding(V, 64).to(getattr(torch, dtype))
    for positions in (table, None):
        embed(table, positions, ZEROS[:, None], ZEROS[:, None])


def a_norm(dtype: str, C: int) -> None:
    """The backward of one, with all that one can have."""
    dy, x, weight, stats = empty(2, C, dtype=dtype), empty(2, C), *empty(2, C)
    norm_backward(dy, x, (x, stats, stats, weight, torch.empty(2, C, dtype=torch.bool)), 1.25, dy.dtype, True)


def of_hopper(dtype: str, D: int) -> None:
    """The mask cuts one tile of every row; more; all that there is; of D = 64 with other tiles for many keys."""
    from kernels.hopper.forward import launch_forward

    words = torch.zeros(1, 500, dtype=torch.int64)
    others = {"window": 100, "documents_q": words, "documents_k": words, "seed": words[0, 0], "drop_threshold": 26}
    for T, T_k, more in ((500, 500, {}), (97, 500, {}), (500, 500, others), (500, 2548, {}))[: 4 if D == 64 else 3]:
        q, k = empty(1, 4, T, D, dtype=dtype), empty(1, 2, T_k, D, dtype=dtype)
        launch_forward(q, k, k, q, empty(1, 4, T), empty(1, 4, T), Problem.of(T, T_k, **more))


def of_hopper_backward(dtype: str, D: int) -> None:
    """Without dropout and with it."""
    from kernels.hopper.backward import launch_backward

    q, k = (empty(1, H, 500, D, dtype=dtype) for H in (4, 2))
    for more in ({}, {"seed": torch.tensor(1), "drop_threshold": 26, "numbers": torch.arange(4)}):
        problem = Problem.of(500, 500, **more)
        launch_backward(q, k, k, q, empty(1, 4, 500), q, empty(1, 4, 500), (q, k, k), problem)


logs: dict[str, str] = {}
OTHERS = {
    "loss": lambda dtype, V: loss_in_place(empty(2, V, dtype=dtype), ZEROS, -1, 0.0, True),
    "table": lambda dtype, C: keep_table(torch.tensor(1), torch.arange(128), torch.arange(256), C, 51),
    "norm": a_norm,
    "choice": a_choice,
    "decode": a_token,
    "pages": partial(a_token, pages=True),
    "early": partial(a_token, splits=1),  # few programs may have DEEP
    "heads": with_heads,
    "token": a_layer,
    **{f"linear{K}": partial(a_linear, K=K) for K in (768, 1600, 4096)},
    "hopper": of_hopper,
    "hopper_backward": of_hopper_backward,
}
found: list[dict] = []
for dtype, D, dropout in CASES:
    if isinstance(dropout, bool):
        attention(dtype, D, dropout)
    else:
        OTHERS[dropout](dtype, D)
print(json.dumps(found))
