"""The Triton kernels compiled for GPUs that are not here: what they take of registers and shared memory, and from what.

Every tile size of kernels/flash.py's tables, as Triton and its ptxas would compile it at the first call; the kernels of
the loss and of a norm's backward; and those of a new token.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is made for Linux")

from kernels.norm import tiles_for
from sampling.decode import DEEP

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
# Bytes of shared memory that a program may have, which the compiler does not check.
SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
ALL = [["bfloat16", D, dropout] for D in (64, 128, 256) for dropout in (False, True)]
# float32 only to PTX, for its shared memory: the widest there is, which takes the most. The rest are chosen so that
# each architecture has each head size, and both entries of each table are compiled somewhere. ptxas takes seconds for
# each kernel of D=256, and dropout, which takes registers, is the harder case.
D64, D64_DROPOUT, D128, D128_DROPOUT, D256, D256_DROPOUT = ALL
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
HOPPER = [[dtype, D, "hopper"] for D in (64, 128) for dtype in ("bfloat16", "float16")]
HOPPER_BACKWARD = [[dtype, D, "hopper_backward"] for D, dtype in ((64, "bfloat16"), (128, "float16"))]


def start(arch: int, cases: list, cache: Path, *source: str) -> subprocess.Popen:
    """A process without the interpreter, which the other tests have switched on, and with nothing compiled yet."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "tests/compile_flash.py", str(arch), str(SHARED[arch]), json.dumps(cases), *source],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> list[dict]:
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def all_compiled(tmp_path_factory):
    """What came out of every kernel, by architecture; they are compiled side by side."""
    processes = {arch: start(arch, cases + OTHERS, tmp_path_factory.mktemp("cache")) for arch, cases in CASES.items()}
    return {arch: result(process) for arch, process in processes.items()}


@pytest.fixture(scope="module")
def compiled(all_compiled):
    """The kernels of attention."""
    return {arch: kernels[: -len(OTHERS)] for arch, kernels in all_compiled.items()}


def beyond(kernels: list[dict], limit) -> list[dict]:
    return [kernel for kernel in kernels if not limit(kernel)]


@pytest.mark.parametrize("arch", CASES)
def test_every_kernel_compiles_for_the_door_that_asks_for_it(compiled, arch):
    names = ("forward_kernel", "dq_kernel", "dkdv_kernel")
    expected = [(name, *case) for case in CASES[arch] for name in names]
    assert [(found["kernel"], found["dtype"], found["D"], found["dropout"]) for found in compiled[arch]] == expected


@pytest.mark.parametrize("arch", CASES)
def test_every_kernel_fits_into_shared_memory(compiled, arch):
    assert not beyond(compiled[arch], lambda found: found["shared"] <= SHARED[arch])


@pytest.mark.parametrize("arch", CASES)
def test_16_bit_kernels_keep_next_to_everything_in_registers(compiled, arch):
    """float32 is left out: its products run on the plain cores, whose operands fill the registers and more."""
    kernels = [found for found in compiled[arch] if found["dtype"] != "float32"]
    assert not beyond(kernels, lambda found: found["registers"] <= 255 and found["spills"] <= 512)


@pytest.mark.parametrize("arch", CASES)
def test_two_programs_of_the_loss_share_a_processor(all_compiled, arch):
    """What tiles_for of kernels/loss.py reckons with: 16 warps with 64 registers a thread are half of the registers."""
    large, small = all_compiled[arch][-len(OTHERS) :][: len(LOSS)]
    assert [(found["kernel"], found["dropout"], found["D"]) for found in (large, small)] == [
        ("loss_kernel", "loss", V) for _, V, _ in LOSS
    ]
    assert large["registers"] <= 64
    assert large["spills"] == small["spills"] == 0
    assert large["shared"] <= SHARED[arch] // 2


@pytest.mark.parametrize("arch", CASES)
def test_a_tokens_kernels_fit_and_two_programs_share_a_processor(all_compiled, arch):
    """Of attention at least two, because one cannot keep enough keys on their way to it."""
    found = all_compiled[arch][-len(TOKEN + TABLE) : -len(TABLE)]
    names = [("linear" if "linear" in name else "decode", number) for _, number, name in TOKEN]
    assert [(kernel["kernel"].removesuffix("_kernel"), kernel["D"]) for kernel in found] == names
    assert not beyond(found, lambda kernel: kernel["shared"] <= SHARED[arch])
    assert found[3]["shared"] == found[0]["shared"]  # as many tiles of keys are on their way from pages
    assert not beyond(found[:8], lambda kernel: kernel["spills"] == 0 and not kernel["warnings"])
    assert not beyond(found[:3], lambda kernel: 2 * kernel["shared"] <= SHARED[90] and kernel["registers"] <= 255)


def test_a_tokens_next_kernels_have_registers_beside_its_attention(tmp_path):
    """Of the H200's 65,536 for each of 132 processors: two programs of attention leave them for all of the next two
    linear layers of GPT-2. Then the third may begin, so that the next attention is there before its token is."""
    qkv, attention, out, up, down = result(start(90, [["bfloat16", 768, "token"]], tmp_path))
    linear = {"qkv": (qkv, 2304 // 8), "out": (out, 768 // 2), "up": (up, 3072 // 8), "down": (down, 768 // 2)}
    taken = {name: -(-programs // 132) * registers_of(kernel) for name, (kernel, programs) in linear.items()}
    assert 2 * registers_of(attention) + taken["out"] + taken["up"] <= 65_536
    assert taken["out"] + taken["up"] + taken["down"] <= 65_536
    assert not beyond([qkv, attention, out, up, down], lambda kernel: kernel["spills"] == 0)


@pytest.mark.parametrize("G", [1, 4, 8])
def test_a_tokens_attention_has_the_registers_that_it_needs(G, tmp_path):
    """It had GPT-2's 112 with more heads and with rope too. Triton 3.7 needs four or five more with rope than 3.6."""
    plain, rotated = result(start(90, [["bfloat16", G, "heads"]], tmp_path))
    assert plain["spills"] == 0
    assert rotated["spills"] <= (20 if G <= 4 else 0)


def registers_of(kernel: dict) -> int:
    """Of a program of 4 warps; a thread has a multiple of 8."""
    return 128 * (-(-kernel["registers"] // 8) * 8)


def test_a_tokens_keys_are_asked_for_before_the_kernel_ahead_has_ended(tmp_path):
    """Those of all stages but one, at least. Two programs fit on a processor and no third one."""
    for kernel in result(start(90, [["bfloat16", D, "early"] for D in DEEP], tmp_path)):
        assert kernel["ahead"] >= 2 * (DEEP[kernel["D"]] - 1)  # keys and values
        assert 2 * kernel["shared"] <= SHARED[90] < 3 * kernel["shared"]
        assert kernel["spills"] <= 16
        assert not kernel["warnings"]


@pytest.mark.parametrize("arch", CASES)
def test_whole_masks_are_written_from_registers(all_compiled, arch):
    found = all_compiled[arch][-1]
    assert (found["kernel"], found["spills"], found["warnings"]) == ("keep_kernel", 0, [])
    assert found["registers"] <= 128  # four programs of 128 threads share a processor


@pytest.mark.parametrize("arch", CASES)
def test_a_norms_programs_all_run_at_a_time(all_compiled, arch):
    """What tiles_for of kernels/norm.py reckons with: those started on a processor share its 65,536 registers."""
    found = all_compiled[arch][-len(OTHERS) :][len(LOSS) : len(LOSS + NORM)]
    assert [(kernel["kernel"], kernel["D"]) for kernel in found] == [("norm_kernel", C) for _, C, _ in NORM]
    for kernel in found:
        *_, num_warps, programs = tiles_for(kernel["D"])
        registers = -(-kernel["registers"] // 8) * 8 * 32 * num_warps
        assert programs * registers <= 65_536
        assert (kernel["spills"], kernel["warnings"]) == (0, [])
        assert "ld.global.v4.b32" in kernel["loads"]  # 16 bytes


def test_heads_of_64_spill_nothing_on_hopper(compiled):
    kernels = [found for found in compiled[90] if found["dtype"] != "float32" and found["D"] == 64]
    assert kernels
    assert not beyond(kernels, lambda found: found["spills"] == 0)


def test_16_bit_products_are_hoppers_asynchronous_ones(compiled):
    kernels = [found for found in compiled[90] if found["dtype"] != "float32"]
    assert kernels
    assert not beyond(kernels, lambda found: found["wgmma"])


@pytest.mark.parametrize("arch", CASES)
def test_ptxas_has_nothing_to_complain_of(compiled, arch):
    """C7510 and its like say that asynchronous products were made to wait for each other, at half the speed. But for
    one kernel: with so few registers that two programs share a processor, one computes while the other waits, which was
    measured to be faster than one that need not wait (LOG.md)."""
    shared = ("forward_kernel", 128, [128, 64, 8, 2, 128])
    assembled = [found for found in compiled[arch] if found["dtype"] != "float32"]
    kernels = [found for found in assembled if (found["kernel"], found["D"], found["tiles"]) != shared]
    assert len(kernels) >= len(assembled) - 1
    assert not beyond(kernels, lambda found: not found["warnings"])


def test_the_switches_of_break_it_cost_nothing(compiled, tmp_path):
    """The default path is the same code, instruction for instruction, as if they had never been written."""
    source = (ROOT / "kernels" / "flash.py").read_text(encoding="utf-8")
    narrow = source[source.index("        else:\n            acc += tl.dot(") :].split("\n    return")[0] + "\n"
    for with_switch, without, times in (
        ("        if not how.BF16_TIES:\n            acc = tl", "        acc = tl", 1),
        (narrow, "", 1),
        ("[how.BLOCK_M], how.START,", "[how.BLOCK_M], -3.4028234663852886e38,", 1),
        ("    divisor = l if how.UNGUARDED_MASK else tl.where(l == 0, 1.0, l)\n", "", 1),
        ("task.keep_scale / divisor", "task.keep_scale / tl.where(l == 0, 1.0, l)", 1),
        ("    if not how.UNGUARDED_MASK:\n        minus_lse2_i =", "    minus_lse2_i =", 1),
        ("m if how.NO_MAX else ", "", 1),
        ("(l if how.NO_RESCALE_SUM else l * alpha)", "l * alpha", 1),
        ("        if not how.NO_RESCALE_OUTPUT:\n            acc = acc", "        acc = acc", 1),
        ("    if mask.local_m is not None:\n        seen = seen & (j % mask.local_n <= i % mask.local_m)\n", "", 1),
        ("        if mask.local_m is not None:\n            found = in_order(0, n, n, n)\n", "", 2),
    ):
        assert source.count(with_switch) == times
        source = source.replace(with_switch, without)
    for arch, case in ((90, 1), (80, 0)):  # with dropout, and without
        (tmp_path / f"{arch}.py").write_text(source, encoding="utf-8")
        plain = result(start(arch, [ALL[case]], tmp_path / "cache", str(tmp_path / f"{arch}.py")))
        assert plain == compiled[arch][3 * case : 3 * case + 3]


def test_the_forward_for_hopper_computes_in_registers_and_nothing_waits_for_its_products(tmp_path):
    """A warning, C7510 and its like, says that ptxas made asynchronous products wait for each other. C7508 says that it
    did not give the warps their registers."""
    kernels = [found for found in result(start(90, HOPPER, tmp_path)) if found["kernel"] == "forward_kernel"]
    # The mask cuts one tile of every row; more; all that there is. Head size 64: and one tile of many keys.
    consumers, keys = [4, 2, 2, 3] * 2 + [2] * 6, [64, 128, 128, 128] * 2 + [128] * 6
    everything = [False, False, True, False] * 2 + [False, False, True] * 2
    for found, C, N, has_all in zip(kernels, consumers, keys, everything, strict=True):
        assert not found["warnings"]
        assert found["shared"] <= SHARED[90]
        assert found["spills"] <= (256 if has_all else 0)  # of document numbers, which have 64 bits
        # For each consumer, a tile's scores and values: before and in the loop, in the loop and after it.
        assert found["wgmma"] == C * 2 * (found["D"] // 16 + N // 16)


def test_the_backward_for_hopper_keeps_its_tiles_in_registers_and_nothing_waits_for_its_products(tmp_path):
    """As above. Some integers are spilled: a tile of 64 x 128 numbers would be 32 KiB."""
    kernels = result(start(90, HOPPER_BACKWARD, tmp_path))
    assert len(kernels) == 2 * len(HOPPER_BACKWARD)  # without dropout and with it
    for number, found in enumerate(kernels):
        assert not found["warnings"]
        assert found["shared"] <= SHARED[90]
        assert found["spills"] <= (768 if number % 2 else 512)
        # For each of two consumers, in the loop over tiles that the mask cuts and in that over whole ones: s, dp, dv,
        # dk and dq, of D / 16, BLOCK_M / 16 or 2 * KEYS / 16 instructions. Head size 64: and dq of the last tile.
        step = 2 * found["D"] // 16 + 2 * (128 * 64 // found["D"]) // 16 + 8
        assert found["wgmma"] == 2 * (2 * step + 8 * (found["D"] == 64))
