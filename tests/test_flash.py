"""kernels/flash.py: values, which tiles the kernels visit, what they read, and how they fail when broken.

On a GPU, or in Triton's interpreter, where a tile takes a few milliseconds whatever its size. Properties that all
implementations share are in tests/test_attention.py.
"""

import subprocess
import sys
from dataclasses import replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import pytest
import torch

from kernels.problem import Problem
from model.attention import AttentionConfig, alibi_slopes, attention, blocks_of, problem_of
from model.break_it import FAILURES, BreakIt
from model.dropout import keep_mask
from tests.implementations import CUDA, DEVICE, NAIVE, ON_GPU, TILED, TRITON, sized
from tests.reference import CASES, DTYPES, SEED, Case, assert_within_budget, case_name, oracle, run, visible
from tests.test_attention import LAYOUTS, OF_KERNELS, same_bits
from tests.test_mask import of_tiles

triton = pytest.importorskip("triton", reason="triton is made for Linux only")
from triton import language as tl  # noqa: E402

from kernels import flash, launch  # noqa: E402

__all__ = ["sized"]  # a fixture
# NumPy's warning about log(0) of a row that sees nothing, which is -inf on purpose.
pytestmark = [*ON_GPU, pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")]
INTERPRETED = pytest.mark.skipif(CUDA, reason="needs Triton's interpreter, which runs without a GPU")


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_kernels_are_within_twice_naives_error(case, sized):
    """Each case with one dtype and one tile size."""
    number = CASES.index(case)
    # The interpreter draws dropout bits in fifty steps a tile.
    size = (128, 128) if case.dropout_p else OF_KERNELS[number // 3 % 4]
    inputs = case.inputs(DTYPES[number % 3], DEVICE)
    found = run(inputs, case, sized(TRITON, *size))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize("T", [224, 100], ids=["whole", "cut"])
def test_tiles_of_a_picture_are_right_whether_whole_or_cut_by_the_first_query(T, sized):
    """In whole ones the kernel does not look at the blocks."""
    picture = ("xxxxxxx", "xxxx..x", "xxxxxxx", "x.xxxxx", "xxx.xxx", "xxxxx.x", "xx.xxxx")
    case = Case(T, 224, B=1, H=1, D=16, causal=False, blocks=picture)
    inputs = case.inputs(torch.bfloat16, DEVICE)
    found = run(inputs, case, sized(TRITON, 32, 32))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


def problem_for(case: Case) -> tuple[torch.Tensor, Problem]:
    inputs = case.inputs(torch.float16, DEVICE)
    q, k, v = (inputs[name] for name in "qkv")
    seed = torch.tensor(SEED, device=DEVICE)
    return q, problem_of(q, k, v, case.configure(TRITON), case.causal, seed, case.spans(DEVICE))


@triton.jit
def bits_kernel(out, task, n, row0, column0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    ones = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    tl.store(out + i * COLUMNS + j, flash.drop(ones, n, row0, column0, i, j, task) != 0)


@INTERPRETED
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_rows_and_columns_past_two_to_the_twenty_have_the_bits_of_the_definition(seed):
    q, problem = problem_for(Case(8, dropout_p=0.3))
    task = launch.task_of(q, q, problem._replace(seed=torch.tensor(seed)), None, "rows")
    for n, row0, column0 in ((0, 0, 0), (3, 2**20 + 32, 64), (1, 96, 2**20 + 32), (700, 2**21, 2**30)):
        out = torch.empty(64, 128, dtype=torch.bool)
        bits_kernel[(1,)](out, task, n, row0, column0, 64, 128)
        right = keep_mask(torch.tensor(seed), n + 1, range(row0, row0 + 64), range(column0, column0 + 128), 0.3)[n]
        assert torch.equal(out, right)


# --- which tiles are visited -----------------------------------------------------------------------------------------


@triton.jit
def tiles_kernel(out, task, OF_KEYS: tl.constexpr, how: tl.constexpr):
    tile = tl.program_id(0)
    found = flash.query_tiles(task, tile * 0, tile, how) if OF_KEYS else flash.key_tiles(task, tile * 0, tile, how)
    for i in tl.static_range(4):
        tl.store(out + tile * 4 + i, found[i])


@INTERPRETED
@pytest.mark.parametrize("of_keys", [False, True], ids=["of queries", "of keys"])
def test_by_arithmetic_no_score_is_missed_no_tile_visited_for_nothing_and_none_called_whole_that_hides_one(of_keys):
    """For causal masks, windows and documents. For block masks the kernels read a table: tests/test_mask.py."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        T, T_k, window = (int(torch.randint(1, most, (), generator=draw)) for most in (300, 300, 150))
        causal, local, packed = (torch.rand(3, generator=draw) < 0.6).tolist()
        T_k = max(T, T_k) if packed else T_k
        lengths = (T_k // 3, 0, T_k // 4, T_k - T_k // 3 - T_k // 4) if packed else None
        case = Case(T, T_k, B=1, H=1, D=16, causal=causal, window=window if local else None, documents=lengths)
        M, N = (2 ** torch.randint(4, 8, (2,), generator=draw)).tolist()
        q, problem = problem_for(case)
        seen, mine, others = visible(case), -(-case.T // M), -(-case.keys // N)
        mine, others = (others, mine) if of_keys else (mine, others)
        out = torch.empty(mine, 4, dtype=torch.int64)
        kind, form = launch.how(M, N, 16, "ieee", ()), "columns" if of_keys else "rows"
        tiles_kernel[(mine,)](out, launch.task_of(q, q, problem, None, form), of_keys, kind)
        place, (start, whole_start, whole_stop, stop) = torch.arange(others), out[:, :, None].unbind(1)
        visited, whole = (start <= place) & (place < stop), (whole_start <= place) & (place < whole_stop)
        visited, whole = (visited.mT, whole.mT) if of_keys else (visited, whole)
        wanted = of_tiles(seen, M, N, False).any(-1)[0]
        assert not (wanted & ~visited).any()
        inner = slice(case.T // M), slice(case.keys // N)  # a tile that is cut off may be visited for what is cut off
        assert (packed and local) or torch.equal(visited[inner], wanted[inner])
        all_visible = of_tiles(seen, M, N, True).all(-1)[0]
        assert not (~all_visible & whole).any()
        assert torch.equal(whole[inner], all_visible[inner])
        assert of_keys or not whole[:, case.keys // N :].any()  # columns past the last one have to be masked


# --- what the kernels read -------------------------------------------------------------------------------------------


def test_an_interleaved_view_is_read_where_it_lies():
    """Also rows with others before and after them, and with a gap between them."""
    q, k, v = torch.empty(2, 70, 3 * 2 * 24, dtype=torch.float16).unflatten(-1, (6, 24)).transpose(1, 2).split(2, dim=1)
    for x in (q, k, v, torch.empty(2, 2, 198, 32, dtype=torch.float16)[:, :, 64:-64, :24]):
        assert launch.aligned(x).data_ptr() == x.data_ptr()
    one = torch.empty(40).as_strided((1, 2, 1, 8), (3, 8, 5, 1))  # an axis of size 1 may have any stride
    assert (launch.aligned(one).stride(), launch.aligned(one).data_ptr()) == ((16, 8, 16, 1), one.data_ptr())


@INTERPRETED
def test_without_descriptors_any_strides_give_the_same_bits(monkeypatch):
    """As on GPUs before Hopper, where tiles are read through pointers."""
    case = Case(50, 70, H_kv=1, D=24)
    inputs = case.inputs(torch.float32)
    right = run(inputs, case, TRITON)
    monkeypatch.setattr(launch, "has_descriptors", lambda device: False)
    inputs = {name: LAYOUTS["odd rows"](x) if x.ndim == 4 else x for name, x in inputs.items()}
    assert same_bits(run(inputs, case, TRITON), right)


@INTERPRETED
@pytest.mark.parametrize("descriptors", [True, False])
def test_rows_that_begin_past_two_to_the_31_numbers_are_found(descriptors, monkeypatch):
    """A packed projection's row stride of 2,304 passes 32 bits at 932,067 tokens; here 2**25 does at 64.

    Pages are mapped as they are touched, so the 9 GB take next to no memory. The rows begin 2**31 numbers into them: an
    offset that overflows then reads zeros, and fails the comparison instead of ending the process.
    """
    monkeypatch.setattr(launch, "has_descriptors", lambda device: descriptors)
    noreserve = 0x4000  # mmap has its name from Python 3.13 on
    case = Case(70, B=1, H=1, D=16)
    inputs = case.inputs(torch.float16)
    far = dict(inputs)
    for name in ("q", "k", "v", "do"):
        held = mmap(-1, 2 * (2**31 + 70 * 2**25), MAP_PRIVATE | MAP_ANONYMOUS | noreserve)
        far[name] = torch.frombuffer(held, dtype=torch.float16).as_strided((1, 1, 70, 16), (16, 16, 2**25, 1), 2**31)
        far[name].copy_(inputs[name])
        assert launch.aligned(far[name]).data_ptr() == far[name].data_ptr()
    assert same_bits(run(far, case, TRITON), run(inputs, case, TRITON))


@pytest.mark.parametrize("impl", ["tiled", "triton"])
def test_a_picture_and_slopes_first_used_in_inference_mode_can_be_trained_with(impl):
    config = AttentionConfig(impl, block_mask=["x.", "xx"], block_mask_size=37, alibi=True)
    q = torch.randn(1, 2, 50, 16, device=DEVICE, requires_grad=True)
    blocks_of.cache_clear(), alibi_slopes.cache_clear()
    with torch.inference_mode():
        attention(q, q, q, config)
    attention(q, q, q, config).sum().backward()
    assert q.grad.isfinite().all()


@INTERPRETED
def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch.check_supported.cache_clear()
    with pytest.raises(ValueError, match="cpu"):
        attention(*torch.zeros(3, 1, 1, 8, 16), TRITON)


@INTERPRETED
def test_the_interpreter_itself_is_refused_bfloat16_which_it_multiplies_wrongly():
    code = "import torch; from model.attention import *; x = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)"
    command = [sys.executable, "-c", f"{code}; attention(x, x, x, AttentionConfig('triton'))"]
    assert "[torch.float32, torch.float16] here" in subprocess.run(command, capture_output=True, text=True).stderr


# --- broken on purpose -----------------------------------------------------------------------------------------------

BROKEN = {
    "no_max": Case(150, B=1, sigma=6.0, D=64),  # scores of some rows pass 88.7
    "no_rescale_output": Case(150, B=1, sigma=2.0, D=64),
    "no_rescale_sum": Case(150, B=1, sigma=2.0, D=64),
    "zero_init_max": Case(90, B=1, D=16),
    "local_mask": Case(100, 170, B=1, H_kv=1, D=16),
    "no_scale": Case(90, B=1, D=16),
    "unguarded_mask": Case(200, B=1, H=1, window=20),
    "stale_seed": Case(90, B=1, H=4, D=16, dropout_p=0.3),  # with one head the largest error is a matter of luck
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", sorted({*FAILURES, *BROKEN} - {"no_rescale"}))  # which is two of the others
def test_what_is_broken_fails_as_tiled_does_in_the_same_tiles(name, sized):
    """tests/test_breakit.py has the predictions for tiled."""
    case, broken, size = BROKEN[name], BreakIt(name), 32 if CUDA or name == "stale_seed" else 64
    same, config = sized(TILED, size, size), sized(TRITON, size, size)
    inputs = case.inputs(torch.float32, DEVICE)
    if name == "zero_init_max":
        inputs["q"][..., 0], inputs["k"][..., 0] = 20.0, -40.0  # every score is near -200
    found, whole = (run(inputs, case, config, break_it=b) for b in (broken, BreakIt()))
    of_tiled = run(inputs, case, same, break_it=broken)
    wide = {key: x.double() for key, x in inputs.items()}
    assert torch.equal(found["o"], whole["o"]) == torch.equal(of_tiled["o"], run(inputs, case, same)["o"])
    assert not torch.equal(found["dq"], whole["dq"])
    for key, x in found.items():
        assert torch.equal(x.isnan(), of_tiled[key].isnan()), key
    if name in ("no_max", "unguarded_mask"):
        assert 0 < int(found["o"].isnan().sum()) < found["o"].numel()
    else:
        assert_within_budget(found, of_tiled, run(wide, case, same, break_it=broken))


def test_a_backward_in_other_tiles_breaks_the_mask_of_the_forward(monkeypatch):
    case, broken, same = Case(150, B=1, H=1, D=16), BreakIt("local_mask"), replace(TILED, block_m=64, block_n=64)
    inputs = case.inputs(torch.float32, DEVICE)
    sizes = {"dkdv": launch.Tiles(32, 64, 4, 1)}
    monkeypatch.setattr(launch, "tiles_for", lambda kernel, *_: sizes.get(kernel, launch.Tiles(64, 64, 4, 1)))
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (TRITON, same))
    wide = {key: x.double() for key, x in inputs.items()}
    assert_within_budget(found, of_tiled, run(wide, case, same, break_it=broken))


def test_the_gradient_of_lse_may_have_any_strides():
    inputs = Case(70, D=16).inputs(torch.float32, DEVICE)
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    lse, dlse = attention(q, k, v, TRITON, return_lse=True)[1], inputs["dlse"]
    layouts = dlse, dlse.mT.contiguous().mT
    right, found = (torch.autograd.grad(lse, (q, k), layout, retain_graph=True) for layout in layouts)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
