"""The Triton kernels compiled for GPUs that are not here, as Triton and its ptxas compile them at the first call: what
they take of registers and shared memory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is made for Linux only")

slow = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
# Bytes of shared memory that a program may have, which the compiler does not check.
SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
# Each architecture has each head size, and dropout, which takes registers. float32 only to PTX, for its shared memory.
D64, D128, D256 = (["attention", "bfloat16", D] for D in (64, 128, 256))
D64_DROPOUT, D128_DROPOUT, D256_DROPOUT = (["dropout", "bfloat16", D] for D in (64, 128, 256))
ATTENTION = {
    80: [D64, D64_DROPOUT, D128_DROPOUT, D256_DROPOUT, ["blocks", "bfloat16", 64], ["dropout", "float32", 256]],
    86: [D64_DROPOUT, D128_DROPOUT, D256_DROPOUT, ["dropout", "float32", 128]],
    90: [D64, D64_DROPOUT, D128, D128_DROPOUT, D256_DROPOUT, ["dropout", "float32", 64]],
    100: [D64, D128_DROPOUT, D256],
}
# GPT-2's vocabulary, padded; bytes. Attention of one token, by head size.
OTHERS = [["loss", "bfloat16", 50_304], ["loss", "bfloat16", 257], *(["decode", "bfloat16", D] for D in (64, 128, 256))]
HOPPER_FORWARD = [["hopper forward", dtype, D] for D in (64, 128) for dtype in ("bfloat16", "float16")]
HOPPER_BACKWARD = [["hopper backward", "bfloat16", 64], ["hopper backward", "float16", 128]]
COMPILED = {arch: [*cases, *OTHERS] for arch, cases in ATTENTION.items()}
COMPILED[90] += HOPPER_FORWARD + HOPPER_BACKWARD


def start(arch: int, cases: list, cache: Path, root: Path = ROOT, **also: str) -> subprocess.Popen:
    """A process without the interpreter, which the other tests have switched on, and with nothing compiled yet. root:
    where kernels/ is. also: of its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compile_flash", str(arch), str(SHARED[arch]), json.dumps(cases)],
        cwd=root,
        env=environment | {"TRITON_CACHE_DIR": str(cache)} | also,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> list[dict]:
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(arch, cases): what came out of the kernels of these cases. All of COMPILED is compiled once, the
    architectures side by side."""
    processes = {arch: start(arch, cases, tmp_path_factory.mktemp("cache")) for arch, cases in COMPILED.items()}
    compiled = {arch: result(process) for arch, process in processes.items()}
    return lambda arch, cases: [kernel for kernel in compiled[arch] if kernel["case"] in cases]


def beyond(kernels: list[dict], limit) -> list[dict]:
    assert kernels
    return [kernel for kernel in kernels if not limit(kernel)]


def clean(kernel: dict) -> bool:
    return kernel["spills"] == 0 and not kernel["warnings"]


def test_a_small_kernel_compiles_without_a_gpu(tmp_path):
    (kernel,) = result(start(90, [OTHERS[1]], tmp_path))
    assert clean(kernel)


@slow
@pytest.mark.parametrize("arch", ATTENTION)
def test_all_kernels_fit_into_shared_memory(kernels, arch):
    assert not beyond(kernels(arch, COMPILED[arch]), lambda kernel: kernel["shared"] <= SHARED[arch])


@slow
@pytest.mark.parametrize("arch", ATTENTION)
def test_attention_hardly_spills_and_its_products_need_not_wait(kernels, arch):
    """Warnings C7510 and its like say that asynchronous products were made to wait for each other, at half the speed.
    float32 spills: its products run on plain cores."""
    halves = [case for case in ATTENTION[arch] if case[1] != "float32"]
    found = kernels(arch, halves)
    names = [(name, case) for case in halves for name in ("forward_kernel", "dq_kernel", "dkdv_kernel")]
    assert [(kernel["kernel"], kernel["case"]) for kernel in found] == names
    assert not beyond(found, lambda kernel: not kernel["warnings"])
    assert not beyond(found, lambda kernel: kernel["spills"] <= (0 if arch == 90 and kernel["case"][2] == 64 else 512))
    assert arch != 90 or not beyond(found, lambda kernel: kernel["wgmma"])  # Hopper's asynchronous products


@slow
@pytest.mark.parametrize("arch", ATTENTION)
def test_the_loss_and_a_tokens_attention_spill_nothing(kernels, arch):
    """Two programs of decode share a processor (not of sm_86): one cannot keep enough keys on their way to it."""
    found = kernels(arch, OTHERS)
    assert not beyond(found, clean)
    assert arch == 86 or not beyond(found[2:], lambda kernel: 2 * kernel["shared"] <= SHARED[arch])


@slow
def test_the_forward_for_hopper_computes_in_registers_and_nothing_waits_for_its_products(kernels):
    """C7508 says that ptxas did not give the warps their registers."""
    # The mask cuts one tile of every row; more; all that there is. Head size 64: and one tile of many keys.
    of_64, of_128 = [(4, 64), (2, 128), (2, 128), (3, 128)], [(2, 128)] * 3  # consumers, and keys of a tile
    sizes = [(i == 2, *size) for of_head in (of_64, of_64, of_128, of_128) for i, size in enumerate(of_head)]
    for kernel, (all_there_is, C, N) in zip(kernels(90, HOPPER_FORWARD), sizes, strict=True):
        assert not kernel["warnings"]
        assert kernel["spills"] <= (128 if all_there_is else 0)  # window, documents and dropout together
        # For each consumer, a tile's scores and values: before and in the loop, in the loop and after it.
        assert kernel["wgmma"] == C * 2 * (kernel["case"][2] // 16 + N // 16)


@slow
def test_the_backward_for_hopper_keeps_its_tiles_in_registers_and_nothing_waits_for_its_products(kernels):
    """Some integers are spilled: a tile of 64 x 128 numbers would be 32 KiB."""
    found = kernels(90, HOPPER_BACKWARD)
    for kernel, loops in zip(found, [2] * 4 + [2] * 4 + [1] * 2, strict=True):
        assert not kernel["warnings"]
        assert kernel["spills"] <= (448 if kernel["case"][2] == 64 else 320)
        # For each of two consumers, in the loop over tiles that the mask cuts and in that over whole ones (with waves
        # in one over all): s, dp, dv, dk and dq, of D / 16, BLOCK_M / 16 or 2 * KEYS / 16 instructions. Head size 64:
        # and dq of the last tile.
        D = kernel["case"][2]
        step = 2 * D // 16 + 2 * (128 * 64 // D) // 16 + 8
        assert kernel["wgmma"] == 2 * (loops * step + 8 * (D == 64))


@slow
@pytest.mark.parametrize("folder", sorted((ROOT / ".venv").glob("triton-*")), ids=lambda path: path.name)
def test_another_triton_that_make_installs_compiles_each_kernel_too(kernels, folder, tmp_path):
    """For Hopper. No version's ptxas serialises the products of warpgroups (warnings C7510 and the like)."""
    cases = [D64_DROPOUT, OTHERS[1], OTHERS[2], HOPPER_FORWARD[0], HOPPER_BACKWARD[0]]
    found, now = result(start(90, cases, tmp_path, PYTHONPATH=str(folder))), kernels(90, cases)
    sources = (path.read_text(encoding="utf-8") for path in ROOT.glob("kernels/**/*.py"))
    known = {name for source in sources for name in re.findall(r"@[\w.]*jit[^\n]*\ndef (\w+_kernel)\(", source)}
    assert {kernel["kernel"] for kernel in found} | {"row_terms_kernel", "scaled_kernel"} == known
    assert {kernel["triton"] for kernel in found} == {folder.name.removeprefix("triton-")}
    assert not beyond(found, lambda kernel: kernel["shared"] <= SHARED[90] and not kernel["warnings"])
    assert [kernel["wgmma"] for kernel in found] == [kernel["wgmma"] for kernel in now]


# The lines of kernels/flash.py with a switch, and how they would be without one.
SWITCHES = [
    ("[how.BLOCK_M], how.START,", "[how.BLOCK_M], -3.4028234663852886e38,"),
    ("l if how.UNGUARDED_MASK else tl.where(", "tl.where("),
    ("    if not how.UNGUARDED_MASK:\n        minus_lse2_i =", "    minus_lse2_i ="),
    ("m if NO_MAX else ", ""),
    ("(l if NO_RESCALE_SUM else l * alpha)", "l * alpha"),
    ("        if not how.NO_RESCALE_OUTPUT:\n            acc = acc", "        acc = acc"),
    ("    if task.local_m is not None:\n        seen = seen & (j % task.local_n <= i % task.local_m)\n", ""),
    ("    if task.local_m is not None:\n        found = 0, n_tiles, n_tiles, n_tiles\n", ""),
]


@slow
def test_the_switches_of_break_it_cost_nothing(kernels, tmp_path):
    """The default path is the same code, instruction for instruction, as if they had never been written."""
    path = shutil.copytree(ROOT / "kernels", tmp_path / "kernels") / "flash.py"
    source = path.read_text(encoding="utf-8")
    for with_switch, without in SWITCHES:
        assert source.count(with_switch) == 1
        source = source.replace(with_switch, without)
    path.write_text(source, encoding="utf-8")
    found = result(start(90, [D64_DROPOUT], tmp_path / "cache", tmp_path, PYTHONPATH=str(ROOT)))
    assert found == kernels(90, [D64_DROPOUT])
