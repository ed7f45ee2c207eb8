"""The Triton kernels compiled for GPUs that are not here, as Triton and its ptxas would compile them at the first call:
what they take of registers and shared memory, and from what."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels.norm import tiles_for
from sampling.decode import DEEP

slow = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
# Bytes of shared memory that a program may have, which the compiler does not check.
SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
# float32 only to PTX, for its shared memory: the widest there is, which takes the most. Each architecture has each head
# size, and both entries of each table are compiled somewhere. ptxas takes seconds for each kernel of D=256, and
# dropout, which takes registers, is the harder case.
D64, D64_DROPOUT, D128, D128_DROPOUT, D256, D256_DROPOUT = (
    ["bfloat16", D, dropout] for D in (64, 128, 256) for dropout in (False, True)
)
CASES = {
    80: [D64, D64_DROPOUT, D128_DROPOUT, D256_DROPOUT, ["float32", 256, True]],
    86: [D64_DROPOUT, D128_DROPOUT, D256_DROPOUT, ["float32", 128, True]],  # the same tiles with dropout and without
    90: [D64, D64_DROPOUT, D128, D128_DROPOUT, D256_DROPOUT, ["float32", 64, True]],
    100: [D64, D128_DROPOUT, D256],
}
LOSS = [["bfloat16", 50_304, "loss"], ["bfloat16", 257, "loss"]]  # GPT-2's vocabulary as it is padded; bytes
# Attention of one row by head size, and a linear layer by rows and their width.
TOKEN = [["bfloat16", D, "decode"] for D in (64, 128, 256)] + [["bfloat16", 64, "pages"]]
TOKEN += [["bfloat16", B, f"linear{K}"] for B, K in ((1, 768), (16, 768), (8, 1600), (8, 4096))]
TOKEN += [["float32", 256, "decode"], ["float32", 16, "linear768"]]
TABLE = [["bool", 384, "table"]]
NORM = [["bfloat16", C, "norm"] for C in (384, 768, 8192)]  # experiment=shakespeare_gpu, GPT-2, the widest
OTHERS = LOSS + NORM + TOKEN + TABLE
CHOICE = [["bfloat16", 50_257, "choice"]]
ONCE = {"sum_kernel", "row_terms_kernel", "scaled_kernel", "visits_kernel"}  # compiled, and not reported
WHOLE_LAYER = [["bfloat16", 768, "token"]]
HEADS = [["bfloat16", G, "heads"] for G in (1, 4, 8)]
EARLY = [["bfloat16", D, "early"] for D in DEEP]
HOPPER = [[dtype, D, "hopper"] for D in (64, 128) for dtype in ("bfloat16", "float16")]
HOPPER_BACKWARD = [["bfloat16", 64, "hopper_backward"], ["float16", 128, "hopper_backward"]]
COMPILED = {arch: cases + OTHERS for arch, cases in CASES.items()}
COMPILED |= {90: COMPILED[90] + WHOLE_LAYER + HEADS + EARLY + HOPPER + HOPPER_BACKWARD}


def start(arch: int, cases: list, cache: Path, *source: str, **also: str) -> subprocess.Popen:
    """A process without the interpreter, which the other tests have switched on, and with nothing compiled yet. also:
    of its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "tests/compile_flash.py", str(arch), str(SHARED[arch]), json.dumps(cases), *source],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)} | also,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> list[dict]:
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[int, list[dict]]:
    """All of COMPILED, once. The architectures side by side."""
    processes = {arch: start(arch, cases, tmp_path_factory.mktemp("cache")) for arch, cases in COMPILED.items()}
    return {arch: result(process) for arch, process in processes.items()}


@pytest.fixture
def kernels(compiled):
    """kernels(arch, cases): what came out of the kernels of these cases."""

    def kernels(arch: int, cases: list) -> list[dict]:
        return [kernel for kernel in compiled[arch] if [kernel["dtype"], kernel["D"], kernel["dropout"]] in cases]

    return kernels


def beyond(kernels: list[dict], limit) -> list[dict]:
    assert kernels
    return [kernel for kernel in kernels if not limit(kernel)]


def clean(kernel: dict) -> bool:
    return kernel["spills"] == 0 and not kernel["warnings"]


def test_kernels_compile_without_a_gpu(tmp_path):
    """Small ones. The others, which take minutes, are slow."""
    for kernel in result(start(90, [*TABLE, LOSS[1]], tmp_path)):
        assert clean(kernel)
        assert kernel["shared"] <= SHARED[90]


@slow
@pytest.mark.parametrize("arch", CASES)
def test_attentions_kernels_fit_into_shared_memory_and_registers(kernels, arch):
    """float32 spills: its products run on the plain cores, whose operands fill the registers and more.

    Warnings C7510 and its like say that asynchronous products were made to wait for each other, at half the speed. But
    for one kernel: with so few registers that two programs share a processor, one computes while the other waits, which
    was measured to be faster than one that need not wait (LOG.md)."""
    found = kernels(arch, CASES[arch])
    names = [(name, *case) for case in CASES[arch] for name in ("forward_kernel", "dq_kernel", "dkdv_kernel")]
    assert [(kernel["kernel"], kernel["dtype"], kernel["D"], kernel["dropout"]) for kernel in found] == names
    assert not beyond(found, lambda kernel: kernel["shared"] <= SHARED[arch])
    halves = [kernel for kernel in found if kernel["dtype"] != "float32"]
    assert not beyond(halves, lambda kernel: kernel["spills"] <= (0 if (arch, kernel["D"]) == (90, 64) else 512))
    assert arch != 90 or not beyond(halves, lambda kernel: kernel["wgmma"])  # Hopper's asynchronous products
    waits = [kernel for kernel in halves if kernel["warnings"]]
    measured = ("forward_kernel", 128, [128, 64, 8, 2, 128])
    assert [(kernel["kernel"], kernel["D"], kernel["tiles"]) for kernel in waits] in ([], [measured])


@slow
@pytest.mark.parametrize("arch", CASES)
def test_the_other_kernels_share_a_processor_as_their_tiles_reckon_with(kernels, arch):
    """Two programs of the loss: 16 warps with 64 registers a thread are half of the registers. Of a token's attention
    at least two, because one cannot keep enough keys on their way to it. Four of whole masks. All of a norm's."""
    large, small = kernels(arch, LOSS)
    assert large["registers"] <= 64
    assert large["spills"] == small["spills"] == 0
    assert large["shared"] <= SHARED[arch] // 2

    token = kernels(arch, TOKEN)
    assert len(token) == len(TOKEN)
    assert not beyond(token, lambda kernel: kernel["shared"] <= SHARED[arch])
    assert token[3]["shared"] == token[0]["shared"]  # as many tiles of keys are on their way from pages
    assert not beyond(token[:8], clean)
    assert not beyond(token[:3], lambda kernel: 2 * kernel["shared"] <= SHARED[90])

    (table,) = kernels(arch, TABLE)
    assert clean(table)
    assert table["registers"] <= 128
    norms = kernels(arch, NORM)
    assert len(norms) == len(NORM)
    for kernel in norms:
        *_, num_warps, programs = tiles_for(kernel["D"])
        assert programs * 32 * num_warps * rounded(kernel["registers"]) <= 65_536
        assert clean(kernel)
        assert "ld.global.v4.b32" in kernel["loads"]  # 16 bytes


def rounded(registers: int) -> int:
    """A thread has a multiple of 8."""
    return -(-registers // 8) * 8


@slow
def test_a_tokens_next_kernels_have_registers_beside_its_attention(kernels):
    """Of the H200's 65,536 for each of 132 processors: two programs of attention leave them for all of the next two
    linear layers of GPT-2. Then the third may begin, so that the next attention is there before its token is."""
    qkv, attention, out, up, down = found = kernels(90, WHOLE_LAYER)
    linear = {"qkv": (qkv, 2304 // 8), "out": (out, 768 // 2), "up": (up, 3072 // 8), "down": (down, 768 // 2)}
    programs = {name: -(-n // 132) * 128 * rounded(kernel["registers"]) for name, (kernel, n) in linear.items()}
    assert 2 * 128 * rounded(attention["registers"]) + programs["out"] + programs["up"] <= 65_536
    assert programs["out"] + programs["up"] + programs["down"] <= 65_536
    assert not beyond(found, lambda kernel: kernel["spills"] == 0)


@slow
def test_a_tokens_attention_has_the_registers_that_it_needs(kernels):
    """It had GPT-2's 112 with more heads and with rope too. Triton 3.7 needs four or five more with rope than 3.6."""
    found = kernels(90, HEADS)
    assert len(found) == 2 * len(HEADS)
    assert not beyond(found[::2], lambda kernel: kernel["spills"] == 0)
    assert not beyond(found[1::2], lambda kernel: kernel["spills"] <= (20 if kernel["D"] <= 4 else 0))


@slow
def test_a_tokens_keys_are_asked_for_before_the_kernel_ahead_has_ended(kernels):
    """Those of all stages but one, at least. Two programs fit on a processor and no third one."""
    found = kernels(90, EARLY)
    assert not beyond(found, lambda kernel: kernel["ahead"] >= 2 * (DEEP[kernel["D"]] - 1))  # keys and values
    assert not beyond(found, lambda kernel: 2 * kernel["shared"] <= SHARED[90] < 3 * kernel["shared"])
    assert not beyond(found, lambda kernel: kernel["spills"] <= 16 and not kernel["warnings"])


@slow
def test_the_triton_that_gpus_ran_compiles_each_kernel_too(tmp_path):
    """For Hopper. Neither version's ptxas serialises the products of warpgroups (warnings C7510 and the like)."""
    older = next((ROOT / ".venv").glob("triton-*"), None)
    if older is None:
        pytest.skip("make test-all installs an older Triton")
    cases = [*TABLE, *CHOICE, LOSS[1], NORM[0], TOKEN[0], *TOKEN[3:5], D64_DROPOUT, HOPPER[0], HOPPER_BACKWARD[0]]
    both = [start(90, cases, tmp_path / path.name, PYTHONPATH=str(path)) for path in (older, ROOT)]
    found, now = map(result, both)
    sources = (
        path.read_text(encoding="utf-8") for room in ("kernels", "sampling") for path in ROOT.glob(f"{room}/**/*.py")
    )
    known = {name for source in sources for name in re.findall(r"@[\w.]*jit[^\n]*\ndef (\w+_kernel)\(", source)}
    assert {kernel["kernel"] for kernel in found} | ONCE == known
    assert {kernel["triton"] for kernel in found} == {older.name.removeprefix("triton-")}
    assert {kernel["triton"] for kernel in now} == {version("triton")}
    assert [kernel["kernel"] for kernel in found] == [kernel["kernel"] for kernel in now]
    assert not beyond(found, lambda kernel: kernel["shared"] <= SHARED[90] and not kernel["warnings"])
    assert [kernel["wgmma"] for kernel in found] == [kernel["wgmma"] for kernel in now]


# The lines of kernels/flash.py with a switch, how they would be without one, and how often they stand there.
SWITCHES = [
    ("        if not how.BF16_TIES:\n            acc = tl", "        acc = tl", 1),
    ("[how.BLOCK_M], how.START,", "[how.BLOCK_M], -3.4028234663852886e38,", 1),
    ("    divisor = l if how.UNGUARDED_MASK else tl.where(l == 0, 1.0, l)\n", "", 1),
    ("task.keep_scale / divisor", "task.keep_scale / tl.where(l == 0, 1.0, l)", 1),
    ("    if not how.UNGUARDED_MASK:\n        minus_lse2_i =", "    minus_lse2_i =", 1),
    ("m if how.NO_MAX else ", "", 1),
    ("(l if how.NO_RESCALE_SUM else l * alpha)", "l * alpha", 1),
    ("        if not how.NO_RESCALE_OUTPUT:\n            acc = acc", "        acc = acc", 1),
    ("    if mask.local_m is not None:\n        seen = seen & (j % mask.local_n <= i % mask.local_m)\n", "", 1),
    ("        if mask.local_m is not None:\n            found = in_order(0, n, n, n)\n", "", 2),
]


@slow
def test_the_switches_of_break_it_cost_nothing(kernels, tmp_path):
    """The default path is the same code, instruction for instruction, as if they had never been written."""
    source = (ROOT / "kernels" / "flash.py").read_text(encoding="utf-8")
    narrow = source[source.index("        else:\n            acc += tl.dot(") :].split("\n    return")[0] + "\n"
    for with_switch, without, times in [(narrow, "", 1), *SWITCHES]:
        assert source.count(with_switch) == times
        source = source.replace(with_switch, without)
    for arch, case in ((90, D64_DROPOUT), (80, D64)):
        (tmp_path / f"{arch}.py").write_text(source, encoding="utf-8")
        assert result(start(arch, [case], tmp_path, str(tmp_path / f"{arch}.py"))) == kernels(arch, [case])


@slow
def test_the_forward_for_hopper_computes_in_registers_and_nothing_waits_for_its_products(kernels):
    """C7508 says that ptxas did not give the warps their registers."""
    found = [kernel for kernel in kernels(90, HOPPER) if kernel["kernel"] == "forward_kernel"]
    # The mask cuts one tile of every row; more; all that there is. Head size 64: and one tile of many keys.
    of_64, of_128 = [(4, 64), (2, 128), (2, 128), (3, 128)], [(2, 128)] * 3  # consumers, and keys of a tile
    sizes = [(i == 2, *size) for of_head in (of_64, of_64, of_128, of_128) for i, size in enumerate(of_head)]
    for kernel, all_there_is, C, N in ((kernel, *size) for kernel, size in zip(found, sizes, strict=True)):
        assert not kernel["warnings"]
        assert kernel["shared"] <= SHARED[90]
        assert kernel["spills"] <= (256 if all_there_is else 0)  # of document numbers, which have 64 bits
        # For each consumer, a tile's scores and values: before and in the loop, in the loop and after it.
        assert kernel["wgmma"] == C * 2 * (kernel["D"] // 16 + N // 16)


@slow
def test_the_backward_for_hopper_keeps_its_tiles_in_registers_and_nothing_waits_for_its_products(kernels):
    """Some integers are spilled: a tile of 64 x 128 numbers would be 32 KiB."""
    found = kernels(90, HOPPER_BACKWARD)
    assert len(found) == 2 * len(HOPPER_BACKWARD)  # without dropout and with it
    for i, kernel in enumerate(found):
        assert not kernel["warnings"]
        assert kernel["shared"] <= SHARED[90]
        assert kernel["spills"] <= (768 if i % 2 else 512)
        # For each of two consumers, in the loop over tiles that the mask cuts and in that over whole ones: s, dp, dv,
        # dk and dq, of D / 16, BLOCK_M / 16 or 2 * KEYS / 16 instructions. Head size 64: and dq of the last tile.
        step = 2 * kernel["D"] // 16 + 2 * (128 * 64 // kernel["D"]) // 16 + 8
        assert kernel["wgmma"] == 2 * (2 * step + 8 * (kernel["D"] == 64))
