"""The Triton kernels in the interpreter: their values, their dropout bits, and what they read and may not read.

A few milliseconds a tile, whatever its size: so there are few of them, and heads and batches are few as well.
"""

from dataclasses import replace
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from model.attention import KINDS as KINDS_OF_CALLS
from model.attention import AttentionConfig, alibi_slopes, attention, attention_varlen, blocks_of
from model.break_it import BreakIt
from model.dropout import keep_mask
from model.mask import packed
from model.recompute import store_attention
from tests.reference import (
    BLOCK,
    CASES,
    PICTURE,
    PLACES,
    SEED,
    Case,
    assert_within_budget,
    case_name,
    dominated,
    drawn,
    error,
    largest,
    oracle,
    run,
    run_forward,
    table,
)
from tests.second import FUNC, PYTORCH_REFUSES, REFUSED_BY_PYTORCH, SECOND, as_heads, by_func, inside_a_graph
from tests.test_breakit import LIMIT, NO_MAX, broken_rescale, one_big_score

triton = pytest.importorskip("triton", reason="triton is made for Linux")
from triton import language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from kernels import flash, hopper, launch, op, sizes  # noqa: E402
from kernels.launch import how, in_tiles  # noqa: E402
from kernels.problem import Dropout, Mask, Problem, Task  # noqa: E402
from kernels.sizes import lists, visits_of  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs the kernels themselves"),
    # the interpreter's log(0) of a row that sees nothing, which is -inf and meant to be
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
]
NAIVE, TRITON, TILED = AttentionConfig("naive"), AttentionConfig("triton"), AttentionConfig("tiled", 64, 64)
RESULTS = ("o", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """tiles(M, N, M of dkdv) sets the tiles of every kernel. Before it is called: 64 x 64, for the price of one tile of
    32 x 32, of which float32 would have four."""

    def tiles(M: int, N: int, of_dkdv: int | None = None) -> None:
        chosen = {"dkdv": sizes.Tiles(of_dkdv or M, N, 4, 1)}
        monkeypatch.setattr(sizes, "tiles_for", lambda kernel, *_: chosen.get(kernel, sizes.Tiles(M, N, 4, 1)))

    tiles(64, 64)
    return tiles


def same_bits(found: dict, expected: dict) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in RESULTS)


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_float32_is_within_twice_naives_error(case, tiles):
    if case.dropout_p:  # whose bits the interpreter draws in half a hundred steps a tile
        tiles(128, 128)
    inputs = case.inputs(torch.float32)
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES[1::3]] + [(case, torch.float16) for case in CASES[2::6]],
    ids=lambda x: case_name(x) if isinstance(x, Case) else str(x),
)
def test_16_bits_are_within_twice_naives_error(case, dtype, tiles):
    if case.dropout_p:
        tiles(128, 128)
    inputs = case.inputs(dtype)
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize("tile", [(32, 32, 32), (32, 128, 32), (128, 32, 64)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(203, 150, B=1, H=2, H_kv=1, D=24, window=90),
        Case(113, 170, B=1, H=1, D=16, dropout_p=0.3),
        Case(150, H=1, D=16, documents=(17, 100, 33), blocks=PICTURE),
    ],
    ids=case_name,
)
def test_the_answer_is_right_at_any_tile_size(case, tile, tiles):
    tiles(*tile)
    inputs = case.inputs(torch.float32)
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


def test_the_gradient_of_lse_alone_is_right():
    """What a z-loss on attention would ask for: no gradient of o comes at all."""
    case = Case(70, 90, B=1, H=2, H_kv=1)
    inputs = case.inputs(torch.float32)
    inputs["do"] = torch.zeros_like(inputs["do"])
    expected = oracle(inputs, case)
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    found, naive = (
        dict(zip(("dq", "dk"), torch.autograd.grad(lse, (q, k), inputs["dlse"], allow_unused=True), strict=True))
        for _, lse in (attention(q, k, v, config, return_lse=True) for config in (TRITON, NAIVE))
    )
    assert_within_budget(found, naive, {name: expected[name] for name in ("dq", "dk")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("same_values", [False, True], ids=["values", "same_values"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_keys_that_dominate_are_weighed_exactly(places, same_values, dtype):
    case = Case(340, B=1, D=16, softmax_scale=1.0)
    for above, apart in ((8.0, 0.0), (16.0, 0.125), (30.0, 0.0)):
        inputs = dominated(16, dtype, above, apart, places, same_values, case.T)
        found, naive, right = (
            dict(
                zip(
                    ("o", "lse"),
                    run_forward(*(x.to(of) for x in (inputs[name] for name in "qkv")), case, config),
                    strict=True,
                )
            )
            for of, config in ((dtype, TRITON), (dtype, NAIVE), (torch.float64, NAIVE))
        )
        assert_within_budget(found, naive, right)
    if same_values:  # the others have a weight of 1e-13
        rows = found["o"][:, :, max(places) :]
        assert torch.equal(rows, inputs["v"][:, :, places[:1]].expand_as(rows))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_weight_that_has_all_of_its_row_is_exactly_1(dropout_p, tiles):
    tiles(32, 32)
    q, k, v = (torch.zeros(1, 1, 200, 16, dtype=torch.bfloat16) for _ in "qkv")
    q[..., 0], k[..., 70, 0] = 1, 1
    v.uniform_(1, 2, generator=torch.Generator().manual_seed(0))
    config = AttentionConfig("triton", dropout_p=dropout_p)
    o = attention(q, k, v, config, softmax_scale=17.3, seed=torch.tensor(3))[0, 0, 70:]  # a score that rounds
    kept = o[:, 0] > 0.5  # the others have their small weights left
    assert kept.any()
    assert kept.all() == (dropout_p == 0)
    assert torch.equal(o[kept], v[0, 0, 70:71].expand(130, 16)[kept] / (1 - dropout_p))


def test_a_picture_of_whole_tiles_is_right_in_bfloat16(tiles):
    tiles(32, 32)
    case = Case(224, B=1, H=1, D=16, causal=False, blocks=("xxxxxxx", "xxxx..x", *["xxxxxxx"] * 5))
    inputs = case.inputs(torch.bfloat16)
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


def test_rows_with_nothing_to_see_give_zero_and_no_gradient():
    case = Case(40, 24, B=1)  # the first 16 rows lie before the first key
    found = run(case.inputs(torch.float32), case, TRITON)
    assert torch.equal(found["o"][:, :, :16], torch.zeros(1, 2, 16, 32))
    assert torch.equal(found["lse"][:, :, :16], torch.full((1, 2, 16), -torch.inf))
    assert torch.equal(found["dq"][:, :, :16], torch.zeros(1, 2, 16, 32))
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize(
    ("B", "T", "T_k"), [(0, 8, 8), (2, 0, 8), (2, 8, 0)], ids=["no batch", "no queries", "no keys"]
)
def test_nothing_to_compute_passes_through(B, T, T_k):
    q, k = (torch.randn(B, 2, length, 16, requires_grad=True) for length in (T, T_k))
    o, lse = attention(q, k, k, TRITON, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    assert dq.shape == q.shape
    assert not dk.any()


def packed_run(inputs: dict, cu_q, cu_k, config: AttentionConfig, **options) -> dict:
    """run() for attention_varlen; inputs as of a batch of one."""
    q, k, v, do = (inputs[name][0].transpose(0, 1).detach().requires_grad_() for name in ("q", "k", "v", "do"))
    o, lse = attention_varlen(q, k, v, cu_q, cu_k, config, return_lse=True, **options)
    dlse = inputs["dlse"][0].masked_fill(lse == -torch.inf, 0.0)
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize(
    ("of_queries", "of_keys"),
    [([30, 0, 41, 1, 58], [30, 0, 41, 1, 58]), ([30, 20, 1, 79], [70, 0, 33, 50])],
    ids=["empty sequences", "other lengths as keys"],
)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}], ids=["causal", "full"])
def test_packed_sequences_are_right(of_queries, of_keys, options):
    """A sequence of no tokens, one whose queries have no keys, ones longer as queries than as keys."""
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (of_queries, of_keys))
    case = Case(sum(of_queries), sum(of_keys), B=1, H=2, H_kv=1, D=16)
    inputs = case.inputs(torch.float32)
    double = {name: x.double() for name, x in inputs.items()}
    found, naive, reference = (
        packed_run(x, cu_q, cu_k, replace(config, window=25), **options)
        for x, config in ((inputs, TRITON), (inputs, NAIVE), (double, NAIVE))
    )
    assert_within_budget(found, naive, reference)


@pytest.mark.parametrize("config", [NAIVE, TILED, TRITON], ids=lambda config: config.impl)
@pytest.mark.parametrize(
    "case",
    [Case(60, blocks=PICTURE), Case(60, documents=(17, 43)), Case(60, alibi=True, window=9, dropout_p=0.3)],
    ids=case_name,
)
def test_torchs_default_device_changes_nothing(case, config):
    """A block mask's lists of tiles were made there."""
    inputs, documents = case.inputs(torch.float32), None if case.documents is None else table(2, 60, case.document)
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    config = replace(config, window=case.window, dropout_p=case.dropout_p, alibi=case.alibi, block_mask_size=BLOCK)
    config, seed = replace(config, block_mask=case.blocks and list(case.blocks)), torch.tensor(SEED)

    def attend() -> tuple:
        for cached in (alibi_slopes, blocks_of, lists):
            cached.cache_clear()
        o = attention(q, k, v, config, seed=seed, documents=documents)
        return o, *torch.autograd.grad(o, (q, k, v), inputs["do"])

    right = attend()
    with torch.device("meta"):
        found = attend()
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def test_two_runs_give_the_same_bits():
    case = Case(70, B=1, H=2, H_kv=1, window=50, dropout_p=0.1)
    inputs = case.inputs(torch.float32)
    assert same_bits(run(inputs, case, TRITON), run(inputs, case, TRITON))


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(32, 32, 32), (128, 64, 64)], ids=str)
def test_every_kernel_draws_the_bits_of_the_definition(tile, tiles):
    tiles(*tile)
    found = drawn(TRITON, 90, 0.3, D=96)
    definition = keep_mask(torch.tensor(SEED), 2, range(90), range(90), 0.3)
    assert all(torch.equal(mask, definition) for mask in found.values())


@triton.jit
def bits_kernel(out, seed, n, row0, column0, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = flash.keep_mask(Dropout(seed, threshold, 0.0), n, row0, column0, i, j)
    tl.store(out + i * COLUMNS + j, mask)


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_rows_and_columns_past_two_to_the_twenty_have_the_bits_of_the_definition(seed):
    seed = torch.tensor(seed)
    for n, row0, column0 in ((0, 0, 0), (3, 2**20 + 32, 64), (1, 96, 2**20 + 32), (700, 2**21, 2**30)):
        out = torch.empty(64, 128, dtype=torch.bool)
        bits_kernel[(1,)](out, seed, n, row0, column0, 77, 64, 128)
        right = keep_mask(seed, n + 1, range(row0, row0 + 64), range(column0, column0 + 128), 77 / 256)[n]
        assert torch.equal(out, right)


def test_no_seed_means_no_dropout():
    q = torch.randn(1, 1, 40, 16)
    assert torch.equal(attention(q, q, q, replace(TRITON, dropout_p=0.5)), attention(q, q, q, TRITON))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["descriptors", "pointers"])
def reading(request, monkeypatch):
    """Both ways to a tile: Hopper's descriptors, and the pointers of older GPUs."""
    monkeypatch.setattr(sizes, "has_descriptors", lambda device: request.param == "descriptors")


@pytest.mark.parametrize("D", [16, 24])
def test_pointers_and_descriptors_give_the_same_bits(D, monkeypatch):
    case = Case(97, 130, B=1, H=2, H_kv=1, D=D)
    inputs = case.inputs(torch.bfloat16)
    through_descriptors = run(inputs, case, TRITON)
    monkeypatch.setattr(sizes, "has_descriptors", lambda device: False)
    assert same_bits(run(inputs, case, TRITON), through_descriptors)


def interleaved(shape: tuple[int, ...], inputs: dict) -> list[torch.Tensor]:
    """q, k, v as views of one projection (B, T, 3 H D)."""
    B, H, T, D = shape
    qkv = torch.stack([inputs[name] for name in "qkv"], 2).permute(0, 3, 2, 1, 4).reshape(B, T, 3 * H * D)
    return [x.unflatten(-1, (H, D)).transpose(1, 2) for x in qkv.split(H * D, dim=-1)]


def test_an_interleaved_view_is_read_where_it_lies_and_gives_the_same_bits(reading):
    case = Case(70, D=24)
    inputs = case.inputs(torch.float16)
    views = dict(zip("qkv", interleaved((2, 2, 70, 24), inputs), strict=True))
    assert all(launch.aligned(x) is x for x in views.values())
    assert same_bits(run(inputs | views, case, TRITON), run(inputs, case, TRITON))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),  # rows off their 16 bytes
        lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],  # rows of an odd length
        lambda x: x.mT.contiguous().mT,  # neighbours that lie apart
        lambda x: x[:, :, :1].expand(x.shape),  # every row the same
        lambda x: x[:, :1].expand(x.shape),  # every head the same
    ],
    ids=["odd offset", "odd rows", "columns first", "expanded rows", "expanded heads"],
)
def test_any_strides_give_the_same_bits(layout, reading):
    case = Case(50, B=1, H=2, D=16)
    inputs = {name: layout(x) if x.ndim == 4 else x for name, x in case.inputs(torch.float16).items()}
    plain = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
    assert same_bits(run(inputs, case, TRITON), run(plain, case, TRITON))


def test_a_gradient_that_is_one_number_everywhere_is_right():
    """out.sum().backward() hands in a gradient of stride 0, which other projects' kernels read past the end of."""
    case = Case(50, B=1, H=2, D=16)
    q, k, v = (case.inputs(torch.float32)[name].requires_grad_() for name in "qkv")
    summed = torch.autograd.grad(attention(q, k, v, TRITON).sum(), (q, k, v))
    plain = torch.autograd.grad(attention(q, k, v, TRITON), (q, k, v), torch.ones_like(q))
    assert all(torch.equal(a, b) for a, b in zip(summed, plain, strict=True))


def test_what_lies_around_the_tensors_does_not_leak_in(reading):
    """Rows before and after, and the columns between D and its power of two, are full of NaN; 0 * NaN is NaN."""
    case = Case(70, 50, B=2, H=2, H_kv=1, D=24)
    inputs = case.inputs(torch.bfloat16)
    guarded = dict(inputs)
    for name in ("q", "k", "v", "do"):
        x = inputs[name]
        around = torch.full((*x.shape[:2], x.shape[2] + 128, 32), torch.nan, dtype=x.dtype)
        guarded[name] = around[:, :, 64:-64, :24]
        guarded[name].copy_(x)
        assert launch.aligned(guarded[name]) is guarded[name]
    assert same_bits(run(guarded, case, TRITON), run(inputs, case, TRITON))


def test_rows_that_begin_past_two_to_the_31_numbers_are_found(reading):
    """A packed projection's row stride of 2,304 passes 32 bits at 932,067 tokens; here 2**25 does at 64.

    Pages are mapped as they are touched, so the 9 GB cost next to nothing; without MAP_NORESERVE a machine of less
    memory would refuse them. The rows begin 2**31 numbers into them: an offset that wraps then reads zeros, and fails
    the comparison instead of ending the process.
    """
    noreserve = 0x4000  # mmap has its name from Python 3.13 on
    case = Case(70, B=1, H=1, D=16)
    inputs = case.inputs(torch.float16)
    far = dict(inputs)
    for name in ("q", "k", "v", "do"):
        held = mmap(-1, 2 * (2**31 + 70 * 2**25), MAP_PRIVATE | MAP_ANONYMOUS | noreserve)
        lazily = torch.frombuffer(held, dtype=torch.float16)
        far[name] = lazily.as_strided((1, 1, 70, 16), (16, 16, 2**25, 1), 2**31)
        far[name].copy_(inputs[name])
        assert launch.aligned(far[name]) is far[name]
    assert same_bits(run(far, case, TRITON), run(inputs, case, TRITON))


def test_a_picture_painted_over_is_read_again():
    q = Case(128, B=1, H=1, D=16).inputs(torch.float32)["q"]

    def seen_through(blocks: torch.Tensor) -> torch.Tensor:
        return op.flash_attention(q, q, q, Problem.of(128, 128, scale=0.25, blocks=blocks, block_size=64))[0]

    for inference in (False, True):
        with torch.inference_mode(inference):
            blocks = torch.eye(2, dtype=torch.bool)
            seen_through(blocks)
            blocks.fill_(True)
            assert torch.equal(seen_through(blocks), seen_through(blocks.clone()))


def test_a_picture_and_slopes_first_used_in_inference_mode_can_be_trained_with():
    config = AttentionConfig("triton", block_mask=["x.", "xx"], block_mask_size=37, alibi=True)
    q = torch.randn(1, 2, 50, 16, requires_grad=True)
    blocks_of.cache_clear(), alibi_slopes.cache_clear()
    with torch.inference_mode():
        attention(q, q, q, config)
    attention(q, q, q, config).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 3, 70, 64), (1, 1, 1, 24), (2, 2, 130, 256)], ids=str)
def test_a_descriptor_that_goes_around_the_checks_is_one_as_triton_makes_it(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    found, width = in_tiles(x, 64), max(16, 1 << (shape[3] - 1).bit_length())
    strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:3], shape[:3], strict=True)]
    assert type(found) is TensorDescriptor
    assert vars(found) == vars(TensorDescriptor(x, list(shape), [*strides, 1], [1, 1, 64, width]))


# --- autograd, torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", SECOND.values(), ids=SECOND)
def test_a_second_derivative_is_refused(way):
    with pytest.raises(RuntimeError, match=r"attention=triton has no (second|forward-mode) derivative"):
        way(TRITON, *(torch.randn(1, 2, 8, 16, requires_grad=True) for _ in "qkv"))


@pytest.mark.parametrize("way", FUNC.values(), ids=FUNC)
def test_a_transform_of_torch_func_is_refused(way):
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        by_func(TRITON, way, *(torch.randn(1, 1, 8, 16) for _ in "qkv"))


def test_a_second_derivative_through_the_op_is_refused():
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    with FlopCounterMode(display=False):
        (dq,) = torch.autograd.grad(attention(q, q, q, TRITON).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="attention=triton has no second derivative"):
            torch.autograd.grad(dq.sum(), q)


@pytest.mark.skipif(not REFUSED_BY_PYTORCH, reason="PyTorch before 2.13 lost it without a word")
def test_a_second_derivative_is_refused_where_q_is_made_inside_of_a_compiled_graph():
    """By PyTorch, as of any function."""
    with pytest.raises(RuntimeError, match=PYTORCH_REFUSES):
        inside_a_graph(as_heads(TRITON))


def test_autocast_does_not_reach_inside():
    q = torch.randn(1, 1, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, q, q, TRITON)
    assert torch.equal(inside, attention(q, q, q, TRITON))


def of_the_op(dtype: torch.dtype) -> tuple:
    """Arguments of the op in its own order: causal, a window, dropout."""
    inputs = Case(8, B=1, H=1, D=16).inputs(dtype)
    problem = Problem.of(8, 8, scale=0.25, window=21, seed=torch.tensor(SEED), drop_threshold=77)
    return *(inputs[name] for name in "qkv"), *problem.fields, False, "auto"


def test_the_op_is_registered_as_torch_wants_it():
    """Its schema, its fake (shapes and strides), and both traced with symbolic shapes."""
    q, k, v, *description = of_the_op(torch.float32)
    torch.library.opcheck(torch.ops.tilegpt.flash_forward.default, ([q, k, v], [q.shape[1], k.shape[1]], *description))
    saved, qkv = (q, torch.zeros(1, 1, 8), q, torch.zeros(1, 1, 8)), torch.randn(1, 8, 3 * 16)
    for inputs in ([q, k, v], [qkv]):
        given = inputs, [1, 1], *saved, *description
        torch.library.opcheck(torch.ops.tilegpt.flash_backward.default, given)


def test_a_dispatch_mode_sees_the_op_and_nobody_else_waits_for_it():
    """FLOP counters and selective checkpointing know attention by its op; without them a call goes around it."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    with Seen():
        seen = attention(q, q, q, TRITON)
    assert "tilegpt.flash_forward.default" in Seen.names
    around = attention(q, q, q, TRITON)
    assert Seen.names.count("tilegpt.flash_forward.default") == 1
    assert torch.equal(seen, around)


def test_a_compiled_graph_gives_the_bits_of_the_eager_one():
    case = Case(40, B=1, H=2, H_kv=1, D=16)
    q, k, v = (case.inputs(torch.float32)[name].requires_grad_() for name in "qkv")
    config, seed = replace(TRITON, window=30, dropout_p=0.2), torch.tensor(SEED)

    def both(q, k, v):
        o, lse = attention(q, k, v, config, seed=seed, return_lse=True)
        return o.sin().sum() + lse.sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    plain, traced = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (both, compiled))
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_activation_checkpointing_draws_the_same_mask_again():
    case = Case(40, B=1, H=1, D=16)
    q, k, v = (case.inputs(torch.float32)[name].requires_grad_() for name in "qkv")
    config, seed = replace(TRITON, dropout_p=0.3), torch.tensor(SEED)
    plain = attention(q, k, v, config, seed=seed)
    again = checkpoint(lambda q, k, v: attention(q, k, v, config, seed=seed), q, k, v, use_reentrant=False)
    assert torch.equal(plain, again)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (plain, again)), strict=True):
        assert torch.equal(a, b)


def side_by_side(D: int, whole: bool, through=lambda f: f) -> tuple[torch.Tensor, torch.Tensor]:
    """o of q, k and v that are views of one tensor, with grouped heads, and that tensor's gradient. through: wraps the
    function."""
    qkv = torch.randn(2, 40, 4 * D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    config, seed = replace(TRITON, window=30, dropout_p=0.2), torch.tensor(SEED)

    def attend(qkv):
        q, k, v = op.heads_of(qkv, (2, 1))
        return attention(q, k, v, config, seed=seed, qkv=qkv if whole else None)

    o = through(attend)(qkv)
    return o.detach(), *torch.autograd.grad(o.sin().sum(), qkv)


KEEP = partial(create_selective_checkpoint_contexts, store_attention)
THROUGH = {
    "eager": lambda f: f,
    "compiled": partial(torch.compile, fullgraph=True, backend="aot_eager"),
    "again": lambda f: partial(checkpoint, f, use_reentrant=False),
    "selective": lambda f: partial(checkpoint, f, use_reentrant=False, context_fn=KEEP),
}


@pytest.mark.parametrize(("through", "D"), [(way, 16) for way in THROUGH] + [("eager", 18)])
def test_gradients_side_by_side_have_the_bits_of_those_put_together(through, D):
    for found, right in zip(side_by_side(D, True, THROUGH[through]), side_by_side(D, False), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("through", THROUGH)
def test_the_kernels_are_chosen_by_the_same_problem(through, monkeypatch):
    """An op turns tuples into lists, and then a compiled step had the portable backward where eager had Hopper's. Here
    the GPU is all that either lacks."""
    reasons = []
    decide = hopper.left_to_portable
    monkeypatch.setattr(hopper, "left_to_portable", lambda *args: reasons.append(decide(*args)) or reasons[-1])
    q = torch.randn(1, 1, 8, 64, requires_grad=True, dtype=torch.float16)
    THROUGH[through](lambda q: attention(q, q, q, TRITON))(q).sum().backward()
    assert set(reasons) == {"it runs on Hopper GPUs (sm_90), not on cpu"}
    assert len(reasons) >= 2


def test_nothing_puts_gradients_together_that_lie_side_by_side():
    """The kernels write into the one tensor that the projection reads. A head size of 18 has no such rows."""

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Copies.count += any(word in str(function) for word in ("cat", "copy", "clone", "slice_backward", "add"))
            return function(*args, **(kwargs or {}))

    counts = []
    for D, whole in ((16, True), (16, False), (18, True)):
        Copies.count = 0
        with Copies():
            side_by_side(D, whole)
        counts.append(Copies.count)
    assert counts[0] == 0 < min(counts[1:])


def test_a_selective_checkpoint_keeps_o_and_lse_and_changes_no_bit():
    """The kernels run once in the forward and once in the backward."""
    case = Case(40, B=1, H=1, D=16)
    q, k, v = (case.inputs(torch.float32)[name].requires_grad_() for name in "qkv")
    config, seed = replace(TRITON, dropout_p=0.3), torch.tensor(SEED)
    plain = attention(q, k, v, config, seed=seed)
    keep = partial(create_selective_checkpoint_contexts, store_attention)
    with patch.object(launch, "forward", wraps=launch.forward) as forwards:
        again = checkpoint(
            lambda q, k, v: attention(2 * q - q, k, v, config, seed=seed), q, k, v, use_reentrant=False, context_fn=keep
        )
        found = torch.autograd.grad(again.sin().sum(), (q, k, v))
    assert forwards.call_count == 1
    assert torch.equal(plain, again)
    expected = torch.autograd.grad(plain.sin().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- broken on purpose -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("score", "finite"), [(LIMIT - 0.01, True), (LIMIT + 0.01, False), (200.0, False)])
def test_without_the_maximum_nan_comes_once_a_score_passes_the_limit_and_not_before(score, finite):
    q, k, v = one_big_score(score)
    o = attention(q, k, v, TRITON, softmax_scale=1.0, break_it=NO_MAX)
    assert o[0, 0, 63].isfinite().all() == finite
    assert o[0, 0, 63].isnan().all() != finite
    assert o[0, 0, :63].isfinite().all()  # the other rows never see the score


@pytest.mark.parametrize("failure", ["no_rescale", "no_rescale_output", "no_rescale_sum"])
def test_without_the_rescaling_the_output_is_wrong_by_just_what_was_left_out(failure, tiles):
    """Within the usual budget of what the theory predicts, where tiled with the same fault stands in for naive."""
    case = Case(256, D=64, sigma=2.0, B=1)
    inputs = case.inputs(torch.float32)
    o, of_tiled = (
        attention(inputs["q"], inputs["k"], inputs["v"], config, break_it=BreakIt(failure))
        for config in (TRITON, AttentionConfig("tiled", 64, 64))
    )
    predicted = broken_rescale(inputs, case, 64, failure)
    assert_within_budget({"o": o}, {"o": of_tiled}, {"o": predicted})
    assert error(o, oracle(inputs, case)["o"]) > 0.1 * largest(o)


def test_without_the_rescaling_one_tile_of_all_keys_is_right():
    inputs = Case(60, B=1, sigma=4.0).inputs(torch.float32)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    broken = BreakIt("no_rescale")
    assert torch.equal(attention(q, k, v, TRITON, break_it=broken), attention(q, k, v, TRITON))


def tiled_in_float64(inputs: dict, case: Case, broken: BreakIt) -> dict:
    return run({name: x.double() for name, x in inputs.items()}, case, TILED, break_it=broken)


@pytest.mark.parametrize("case", [Case(150, B=1, H=2, H_kv=1, D=16), Case(100, 170, B=1, D=16)], ids=case_name)
def test_a_local_mask_is_that_of_tiled_in_the_backward_too(case):
    inputs, broken = case.inputs(torch.float32), BreakIt("local_mask")
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (TRITON, TILED))
    assert_within_budget(found, of_tiled, tiled_in_float64(inputs, case, broken))


def test_a_local_mask_is_the_forwards_in_other_tiles_of_the_backward(tiles):
    tiles(64, 64, 32)
    case = Case(150, B=1, H=1, D=16)
    inputs, broken = case.inputs(torch.float32), BreakIt("local_mask")
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (TRITON, TILED))
    assert_within_budget(found, of_tiled, tiled_in_float64(inputs, case, broken))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stale_seed_leaves_the_forward_alone_and_spoils_its_gradients_as_in_tiled(dtype, tiles):
    tiles(32, 32)
    case = Case(130, B=1, H=1, D=16, dropout_p=0.3)
    inputs, broken = case.inputs(dtype), BreakIt("stale_seed")
    found, whole = run(inputs, case, TRITON, break_it=broken), run(inputs, case, TRITON)
    assert torch.equal(found["o"], whole["o"])
    assert not torch.equal(found["dv"], whole["dv"])
    assert_within_budget(found, run(inputs, case, TILED, break_it=broken), tiled_in_float64(inputs, case, broken))


@pytest.mark.parametrize("case", [Case(40, 24, B=1), Case(200, B=1, H=1, window=20)], ids=case_name)
def test_without_guards_the_rows_are_nan_that_are_in_tiled(case):
    inputs, broken = case.inputs(torch.float32), BreakIt("unguarded_mask")
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (TRITON, TILED))
    assert found["o"].isnan().any()
    assert not found["o"].isnan().all()
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(found[name].isnan(), of_tiled[name].isnan()), name


def test_a_maximum_that_starts_at_zero_loses_the_rows_whose_scores_underflow():
    q, k, v = (Case(90, B=1, H=1, D=16).inputs(torch.float32)[name] for name in "qkv")
    q[..., 0], k[..., 0] = 20.0, -40.0  # every score is near -200
    o, whole = (attention(q, k, v, TRITON, break_it=broken) for broken in (BreakIt("zero_init_max"), BreakIt()))
    assert not o.any()
    assert whole.any(-1).all()


def test_a_maximum_that_starts_at_zero_is_harmless_for_usual_scores():
    case = Case(90, B=1, H=1, D=16)
    inputs = case.inputs(torch.float32)
    found = run(inputs, case, TRITON, break_it=BreakIt("zero_init_max"))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 1, 8, 16), torch.float64, r"has float32, float16 and bfloat16, not torch.float64; use attention=tiled"),
        ((1, 1, 8, 257), torch.float32, r"has head sizes of 256 at most, not 257; use attention=tiled"),
    ],
)
def test_what_the_kernels_lack_is_refused_in_one_line(shape, dtype, message):
    q = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message) as refused:
        attention(q, q, q, TRITON)
    assert "\n" not in str(refused.value)


def test_a_cpu_without_the_interpreter_is_refused_in_one_line():
    KINDS_OF_CALLS.clear()  # a kind is checked once
    with patch.object(sizes, "INTERPRETED", False), pytest.raises(ValueError, match="on a GPU, not on cpu") as refused:
        attention(*torch.zeros(3, 1, 1, 8, 16), TRITON)
    assert "\n" not in str(refused.value)


# --- which tiles are visited -----------------------------------------------------------------------------------------


def seen_pairs(mask: Mask) -> torch.Tensor:
    """Which pairs a mask lets see each other, bool (B, T, T_k), one by one."""
    position = torch.arange(mask.T) + mask.T_k - mask.T if mask.positions is None else mask.positions
    far = torch.arange(mask.T_k) - position[:, None]
    seen = torch.ones(1, mask.T, mask.T_k, dtype=torch.bool)
    if mask.at_least is not None:
        seen = seen & (far >= mask.at_least)
    if mask.at_most is not None:
        seen = seen & (far <= mask.at_most)
    if mask.documents_q is not None:
        seen = seen & (mask.documents_q[:, :, None] == mask.documents_k[:, None])
    if mask.blocks is not None:
        rows, columns = position.clamp(min=0) // mask.block_size, torch.arange(mask.T_k) // mask.block_size
        seen = seen & mask.blocks[rows[:, None], columns]
    return seen


@triton.jit
def tiles_kernel(out, task, n_mine, TRANSPOSED: tl.constexpr, how: tl.constexpr):
    b, tile = tl.program_id(0) // n_mine, tl.program_id(0) % n_mine
    found = flash.query_tiles(task, b, tile, how) if TRANSPOSED else flash.key_tiles(task, b, tile, how)
    for i in tl.static_range(5):
        tl.store(out + tl.program_id(0) * 5 + i, found[i])


def answers(mask: Mask, M: int, N: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the kernels: which tiles are visited, which of them are called whole. bool (B, row tiles, key tiles)."""
    B = 1 if mask.documents_q is None else len(mask.documents_q)
    mine, others = -(-mask.T // M), -(-mask.T_k // N)
    mine, others = (others, mine) if transposed else (mine, others)
    visits, out = visits_of(mask, M, N, transposed), torch.empty(B, mine, 5, dtype=torch.int64)
    task, kind = Task(mask, None, None, visits, 1.0, 1, 1), how(M, N, 16, "ieee", (), False)
    tiles_kernel[(B * mine,)](out, task, mine, transposed, kind)
    visited, whole = (torch.zeros(B, mine, others, dtype=torch.bool) for _ in range(2))
    for at in torch.cartesian_prod(torch.arange(B), torch.arange(mine)).tolist():
        start, whole_start, whole_stop, stop, first = out[tuple(at)].tolist()
        order = torch.arange(others) if visits.tiles is None else visits.tiles.flatten()[first : first + others].long()
        visited[(*at, order[start:stop])] = True
        whole[(*at, order[whole_start:whole_stop])] = True
    return (visited.mT, whole.mT) if transposed else (visited, whole)


def tiles_of(seen: torch.Tensor, M: int, N: int, beyond: bool) -> torch.Tensor:
    """bool (B, T, T_k) to (B, row tiles, key tiles, M, N), `beyond` where a tile reaches past the end."""
    T, T_k = seen.shape[1:]
    padded = torch.nn.functional.pad(seen, (0, -T_k % N, 0, -T % M), value=beyond)
    return padded.unflatten(1, (-1, M)).unflatten(3, (-1, N)).transpose(2, 3)


def random_mask(draw: torch.Generator, kind: str) -> Mask:
    T, T_k = torch.randint(40, 300, (2,), generator=draw).tolist()
    if kind == "sorted documents" and torch.rand((), generator=draw) < 0.5:
        T_k = T
    window = int(torch.randint(1, 150, (), generator=draw))
    rules = [{}, {"window": window}, {"window": window, "causal": False}, {"causal": False}]
    found = dict(rules[int(torch.randint(4, (), generator=draw))])
    if "documents" in kind:
        numbers = torch.randint(6, (2, max(T, T_k)), generator=draw)
        numbers = numbers.sort(-1).values if "sorted" in kind else numbers
        found |= {"documents_q": numbers[:, -T:], "documents_k": numbers[:, -T_k:]}
    if kind == "pack":
        cu_q, cu_k = (torch.randint(n + 1, (3,), generator=draw).sort().values.tolist() for n in (T, T_k))
        found |= packed(torch.tensor([0, *cu_q, T]), torch.tensor([0, *cu_k, T_k]), T, T_k)
    if "blocks" in kind:
        found |= {"blocks": torch.rand(12, 12, generator=draw) < 0.4, "block_size": 32}
    return Problem.of(T, T_k, **found).mask


KINDS = ["no data", "sorted documents", "unsorted documents", "pack", "blocks", "blocks and documents"]


@pytest.mark.parametrize("transposed", [False, True], ids=["of queries", "of keys"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_pair_is_missed_and_no_tile_called_whole_that_hides_one(kind, transposed):
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask, (M, N) = random_mask(draw, kind), 2 ** torch.randint(4, 8, (2,), generator=draw)
        visited, whole = answers(mask, int(M), int(N), transposed)
        seen = seen_pairs(mask)
        assert not (tiles_of(seen, M, N, False).any(-1).any(-1) & ~visited).any()
        # Columns past the last must be hidden one by one; rows past the last weigh nothing, and need not be.
        real = tiles_of(torch.ones_like(seen), M, N, False).any(3, keepdim=True)
        hides = ~tiles_of(seen, M, N, True) & real if transposed else ~(tiles_of(seen, M, N, True))
        assert not (hides.any(-1).any(-1) & whole).any()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["rising", "unsorted"])
def test_documents_of_the_largest_numbers_are_those_of_small_ones(order, tiles):
    """Ids that are hashes: the difference of two wrapped in 64 bits, and the tiles of both were passed over."""
    tiles(32, 32)
    q, k, v = (Case(100, B=1, H=1, D=16).inputs(torch.float32)[name] for name in "qkv")
    small = torch.tensor(order).repeat_interleave(torch.tensor([20, 50, 30]))[None]
    large = torch.tensor([-(2**63), 5, 2**63 - 1])[small]
    found, expected = (attention(q, k, v, TRITON, documents=documents) for documents in (large, small))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["of queries", "of keys"])
def test_documents_in_order_cost_no_tile_too_many(transposed):
    """Without a window: where one meets the documents' edges, a tile may hold a pair for each and none for both."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask, (M, N) = random_mask(draw, "sorted documents"), 2 ** torch.randint(4, 8, (2,), generator=draw)
        mask = mask._replace(at_least=None)
        visited, _ = answers(mask, int(M), int(N), transposed)
        assert torch.equal(visited, tiles_of(seen_pairs(mask), M, N, False).any(-1).any(-1))
