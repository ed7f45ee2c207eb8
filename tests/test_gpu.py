"""The same cases on a CUDA GPU: pytest -m gpu. Where there is none, every test here says so and is skipped."""

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.problem import Problem
from lab.meter import median_ms
from model import loss as loss_module
from model import norm as norm_module
from model.attention import AttentionConfig, attention
from model.break_it import BreakIt
from model.dropout import keep_mask, keep_table
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE, next_token_loss
from model.mask import Tiling
from model.recompute import RecomputingGPT
from sampling.cache import KVCache
from tests.reference import (
    CASES,
    DTYPES,
    FLAT_ROWS,
    FOR_SDPA,
    SEED,
    Case,
    assert_flat_row,
    assert_within_budget,
    case_name,
    drawn,
    oracle,
    run,
)
from tests.test_norm import assert_kernel_is_right
from tests.test_norm import inputs as norm_inputs
from tests.test_norm import results as norm_results
from training.optimizer import OptimizerConfig
from training.record import compiled as in_stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NAIVE, TILED, TRITON = AttentionConfig("naive"), AttentionConfig("tiled", 32, 64), AttentionConfig("triton")
PORTABLE = replace(TRITON, kernel="portable")


@pytest.mark.parametrize("config", [TILED, TRITON], ids=["tiled", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_and_triton_are_within_twice_naives_error(case, dtype, config):
    inputs = case.inputs(dtype, "cuda")
    reference = oracle(inputs, case)
    assert_within_budget(run(inputs, case, config), run(inputs, case, NAIVE), reference)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_with_keys_outside_is_within_twice_naives_error(case):
    inputs = case.inputs(torch.bfloat16, "cuda")
    found = run(inputs, case, replace(TILED, order="keys_outside"))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize(
    "case",
    [Case(1, H=4, H_kv=2), Case(1, 50, H=4, H_kv=1), Case(50, 1, H=4, H_kv=2), Case(50, window=2, causal=False)],
    ids=case_name,
)
def test_numbers_that_are_one_reach_the_loops_of_a_kernel(case):
    """Triton 3.6 made None of them: T = 1 with grouped heads, which is how a sample begins, did not compile."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


@pytest.mark.parametrize("impl", ["naive", "tiled", "triton"])
@pytest.mark.parametrize(("keys", "score", "v", "naive", "tiled"), FLAT_ROWS)
def test_without_the_maximum_a_flat_row_overflows_as_its_sums_do(impl, keys, score, v, naive, tiled):
    assert_flat_row(impl, keys, score, v, naive if impl == "naive" else tiled, "cuda")


@pytest.mark.parametrize("case", FOR_SDPA, ids=case_name)
def test_sdpa_means_the_same_masks_and_scale(case):
    inputs = case.inputs(torch.float32, "cuda")
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    o = attention(inputs["q"], inputs["k"], inputs["v"], AttentionConfig("sdpa"), **options)
    naive, reference = run(inputs, case, NAIVE), oracle(inputs, case)
    assert_within_budget({"o": o}, {"o": naive["o"]}, {"o": reference["o"]})


def test_the_dropout_mask_has_the_bits_it_has_on_a_cpu():
    tile = (3, range(100, 300), range(2**20, 2**20 + 100), 0.1)
    assert torch.equal(
        keep_mask(torch.tensor(11, device="cuda"), *tile).cpu(),
        keep_mask(torch.tensor(11), *tile),
    )


@pytest.mark.parametrize(("N", "rows", "C"), [(1, range(1), 1), (3, range(33), 70), (128, range(64, 256), 384)])
def test_the_kernel_of_whole_rows_writes_the_bits_of_a_cpu(N, rows, C):
    seed = torch.tensor(-(2**62) - 12345)
    definition = keep_mask(seed, N, rows, range(C), 0.2)

    def table(seed):
        return keep_table(seed, torch.arange(N, device="cuda"), torch.tensor(rows, device="cuda"), C, 0.2)

    assert torch.equal(table(seed.cuda()).cpu(), definition)
    assert torch.equal(torch.compile(table, fullgraph=True, dynamic=False)(seed.cuda()).cpu(), definition)


def test_whole_masks_past_two_to_the_31_elements_are_found():
    seed = torch.tensor(7)
    keep = keep_table(seed.cuda(), *(torch.arange(n, device="cuda") for n in (2, 2**15 + 64)), 2**15 + 64, 0.2)
    for n, i, j in ((0, 0, 0), (0, 2**15, 2**15), (1, 0, 2**15), (1, 2**15, 2**15)):
        tile = keep_mask(seed, 2, range(i, i + 64), range(j, j + 64), 0.2)[n]
        assert torch.equal(keep[n, i : i + 64, j : j + 64].cpu(), tile)


def test_a_compiled_mask_has_the_same_bits():
    """torch.compile once multiplied its counters as it does indices, in 32 bits."""
    tile = (6, range(3, 100), range(2**20, 2**20 + 130), 0.3)
    compiled = torch.compile(keep_mask, fullgraph=True)(torch.tensor(11, device="cuda"), *tile)
    assert torch.equal(compiled.cpu(), keep_mask(torch.tensor(11), *tile))


def test_tiled_memory_is_linear_and_naives_is_not():
    def peak(impl: str, T: int) -> int:
        q, k, v = (torch.randn(1, 4, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, AttentionConfig(impl, 256, 256)).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak("naive", 8192) > 3.5 * peak("naive", 4096)
    assert peak("tiled", 8192) < 2.1 * peak("tiled", 4096)


# --- triton ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sizes():
    return pytest.importorskip("kernels.sizes", reason="triton is made for Linux")


def in_float64(inputs: dict) -> dict:
    return {name: x.double() for name, x in inputs.items()}


@pytest.mark.parametrize(
    "case",
    [
        Case(1024, D=16, H=4),
        Case(1500, D=40, H=4, H_kv=1),
        Case(2048, D=64, dropout_p=0.1),
        Case(4096, D=64, B=1, H=4, H_kv=2),
        Case(4096, D=128, B=1),
        Case(2048, D=64, sigma=4.0),
        Case(2000, D=128, sigma=3.0, dropout_p=0.1),
        Case(1024, 3000, D=80, dropout_p=0.3),
        Case(2049, D=256, B=1),
        Case(2048, D=256, B=1, H_kv=1, dropout_p=0.1),
        Case(3001, D=128, window=700, H=4, H_kv=2),
        Case(2500, 1700, D=64, causal=False, window=300),
        Case(4000, D=80, documents=(1000, 1, 1500, 1499), dropout_p=0.1),
    ],
    ids=case_name,
)
def test_triton_is_within_twice_naives_error_at_length(case):
    """The oracle draws masks element by element, too slowly for this. tests/test_attention.py has naive equal to it."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    reference = {name: x.cpu() for name, x in run(in_float64(inputs), case, NAIVE).items()}
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), reference)


def test_more_heads_than_a_grids_second_axis_has_places():
    """65,535: where others put batch and heads on that axis, they fail."""
    case = Case(5, B=33_000, D=16)
    inputs = case.inputs(torch.bfloat16, "cuda")
    reference = {name: x.cpu() for name, x in run(in_float64(inputs), case, NAIVE).items()}
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), reference)


def test_rows_past_two_to_the_31_numbers_are_found():
    """A million tokens of a packed projection with GPT-2's row stride of 2,304. For the window's sake the last rows can
    be checked by themselves."""
    T, last, window = 2**20 + 100, 256, 128
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(1, T, 2304, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    do = torch.randn(1, 12, last, 64, device="cuda", dtype=torch.bfloat16, generator=generator)

    def results(qkv, config) -> dict:
        q, k, v = (x.unflatten(-1, (12, 64)).transpose(1, 2) for x in qkv.split(768, dim=-1))
        o = attention(q, k, v, replace(config, window=window))[:, :, -last:]
        (gradient,) = torch.autograd.grad(o, qkv, do.to(o.dtype))
        return {"o": o.detach(), "dqkv": gradient[:, -last:]}

    end = qkv.detach()[:, -last - window :].requires_grad_()
    reference = {name: x.cpu() for name, x in results(end.double(), NAIVE).items()}
    assert_within_budget(results(qkv, TRITON), results(end, NAIVE), reference)


def test_triton_gives_the_same_bits_two_hundred_times():
    case = Case(1024, D=64, H=4, H_kv=2, dropout_p=0.1)
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = run(inputs, case, TRITON)
    for _ in range(200):
        again = run(inputs, case, TRITON)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("tile", [None, (64, 64, 4, 2), (128, 32, 4, 2), (32, 128, 4, 1)], ids=str)
def test_every_triton_kernel_draws_the_bits_of_the_definition(tile, sizes, monkeypatch):
    if tile is not None:
        monkeypatch.setattr(sizes, "tiles_for", lambda *_: sizes.Tiles(*tile))
    found = drawn(TRITON, 2048, 0.1, D=64, dtype=torch.bfloat16, device="cuda")
    definition = keep_mask(torch.tensor(SEED), 2, range(2048), range(2048), 0.1)
    assert all(torch.equal(mask.cpu(), definition) for mask in found.values())


def test_triton_drops_the_share_that_was_asked_for_everywhere():
    """Kept weights are counted over 4,096 heads and 64 seeds: overall, and at each place, within five deviations of
    what coins of 230 in 256 give."""
    T, seeds = 64, 64
    q = torch.zeros(64, 64, T, T, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(T, device="cuda", dtype=torch.bfloat16).expand_as(q)
    kept = torch.zeros(T, T, device="cuda", dtype=torch.int64)
    for seed in range(seeds):
        options = {"causal": False, "seed": torch.tensor(seed, device="cuda")}
        kept += (attention(q, q, v, replace(TRITON, dropout_p=0.1), **options) != 0).sum((0, 1))
    draws, share = seeds * 64 * 64, 230 / 256
    for counted, n in ((kept, draws), (kept.sum(), draws * T * T)):
        assert ((counted - n * share).abs() <= 5 * math.sqrt(n * share * (1 - share))).all()


def test_the_triton_op_is_registered_as_torch_wants_it(sizes):
    q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor(SEED, device="cuda")
    problem = Problem.of(100, 100, scale=0.125, window=51, seed=seed, drop_threshold=26)
    torch.library.opcheck(
        torch.ops.tilegpt.flash_forward.default, ([q, k, v], [q.shape[1], k.shape[1]], *problem.fields, False, "auto")
    )


def test_gradients_side_by_side_have_the_bits_of_those_put_together():
    from kernels.op import heads_of

    qkv = torch.randn(2, 300, 8 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    config, seed = AttentionConfig("triton", dropout_p=0.2), torch.tensor(7, device="cuda")

    def attend(qkv, whole):
        q, k, v = heads_of(qkv, (4, 2))
        return attention(q, k, v, config, seed=seed, qkv=qkv if whole else None)

    def both(function, whole):
        o = function(qkv, whole)
        return o, torch.autograd.grad(o.square().sum(), qkv)[0]

    apart = both(attend, False)
    for function in (attend, torch.compile(attend, fullgraph=True)):
        assert all(torch.equal(a, b) for a, b in zip(both(function, True), apart, strict=True))


def test_compiled_triton_is_one_graph_and_gives_the_same_bits():
    case = Case(300, D=64, H=4, H_kv=2, window=200, dropout_p=0.1)
    inputs = case.inputs(torch.bfloat16, "cuda")
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    config, seed = replace(TRITON, window=200, dropout_p=0.1), torch.tensor(SEED, device="cuda")

    def plain(q, k, v):
        return attention(q, k, v, config, seed=seed)

    found = [f(q, k, v) for f in (plain, torch.compile(plain, fullgraph=True))]
    gradients = [torch.autograd.grad(o, (q, k, v), inputs["do"]) for o in found]
    assert torch.equal(*found)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


FAILED = ["no_max", "no_rescale_sum", "no_rescale_output", "local_mask", "stale_seed"]


@pytest.mark.parametrize("failure", FAILED)
def test_triton_breaks_as_tiled_does_in_the_same_tiles(failure, sizes):
    case = Case(150, D=64, sigma=2.0, B=1, dropout_p=0.2)
    inputs, broken = case.inputs(torch.float32, "cuda"), BreakIt(failure)
    same = AttentionConfig("tiled", sizes.FLOAT32.BLOCK_M, sizes.FLOAT32.BLOCK_N)
    found, of_tiled, whole = (
        run(inputs, case, config, break_it=b) for config, b in ((TRITON, broken), (same, broken), (TRITON, BreakIt()))
    )
    reference = run(in_float64(inputs), case, same, break_it=broken)
    assert_within_budget(found, of_tiled, {name: x.cpu() for name, x in reference.items()})
    if failure != "no_max":  # which no score is large enough for
        assert any(not torch.equal(found[name], whole[name]) for name in found)


def test_without_guards_triton_has_nan_where_tiled_has():
    case = Case(40, 24, B=1)
    inputs, broken = case.inputs(torch.float32, "cuda"), BreakIt("unguarded_mask")
    found, of_tiled = (run(inputs, case, config, break_it=broken) for config in (TRITON, TILED))
    assert found["o"].isnan().any()
    assert all(torch.equal(found[name].isnan(), of_tiled[name].isnan()) for name in ("o", "dq", "dk", "dv"))


def test_a_replayed_cuda_graph_draws_a_new_mask_when_the_seed_changes():
    q, k, v = torch.randn(3, 2, 2, 256, 64, device="cuda", dtype=torch.bfloat16).unbind()
    config, seed = replace(TRITON, dropout_p=0.1), torch.tensor(1, device="cuda")
    first = attention(q, k, v, config, seed=seed)  # compiled by now: a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, config, seed=seed)
    graph.replay()
    assert torch.equal(o, first)
    seed.fill_(2)
    graph.replay()
    assert not torch.equal(o, first)
    assert torch.equal(o, attention(q, k, v, config, seed=torch.tensor(2, device="cuda")))


def test_triton_runs_on_the_current_stream():
    """On another it would read q before the copy that waits in front of it has been made."""
    q, new = torch.randn(2, 1, 2, 256, 64, device="cuda", dtype=torch.bfloat16).unbind()
    expected = attention(new, new, new, TRITON)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # clock cycles
        q.copy_(new)
        o = attention(q, q, q, TRITON)
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_triton_runs_where_its_tensors_are_whatever_the_current_device():
    case = Case(200, D=64, dropout_p=0.1)
    here, there = (run(case.inputs(torch.bfloat16, f"cuda:{i}"), case, TRITON) for i in range(2))
    assert all(torch.equal(here[name].cpu(), there[name].cpu()) for name in here)


def test_autocast_does_not_reach_into_triton():
    q = torch.randn(1, 2, 100, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        inside = attention(q, q, q, TRITON)
    assert torch.equal(inside, attention(q, q, q, TRITON))


@pytest.mark.parametrize("config", [PORTABLE, TRITON], ids=["portable", "auto"])
def test_triton_needs_next_to_no_memory_beside_its_inputs_outputs_and_gradients(config):
    """The backward for Hopper sums dq in float32."""
    shape = (1, 12, 65_536, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o = attention(*(x.requires_grad_() for x in (q, k, v)), config)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    held = sum(x.nbytes for x in (q, k, v, do, o, *gradients))
    sums = 0 if config is PORTABLE else 4 * q.numel()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * held + sums


def tiles_kept(config: AttentionConfig, documents: torch.Tensor | None, T: int) -> int:
    """How many tiles of 64 x 64 the mask leaves to compute."""
    blocks = config.block_mask and torch.tensor([[block == "x" for block in row] for row in config.block_mask])
    tokens = {} if documents is None else {"documents_q": documents.cpu(), "documents_k": documents.cpu()}
    problem = Problem.of(T, T, window=config.window, blocks=blocks, block_size=config.block_mask_size, **tokens)
    return sum(1 for _, visits in Tiling(problem, 64, 64).by_rows() for _ in visits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "documents", "block_mask"])
def test_masks_cost_triton_in_proportion_to_the_tiles_they_keep(kind, sizes):
    """Half of the tiles, at most 60 % of the time, forward and backward together, at T = 16,384 (two sequences, as the
    race has of that length: one takes hardly longer than starting its kernels). The portable kernels, which have all
    masks: the backward for Hopper has none, and would make the whole faster than its half."""
    T = 16_384
    documents, config = None, PORTABLE
    if kind == "window":
        window = round(T * (1 - 0.5**0.5))  # what it leaves out is a triangle of half the area
        config = replace(PORTABLE, window=window)
    elif kind == "documents":
        documents = (torch.arange(T, device="cuda") // (T // 2)).expand(2, T)
    else:  # a chessboard: the diagonal, and every second block below it
        picture = ["".join("x" if (i - j) % 2 == 0 else "." for j in range(16)) for i in range(16)]
        config = replace(PORTABLE, block_mask=picture, block_mask_size=1024)
    assert round(tiles_kept(config, documents, T) / tiles_kept(PORTABLE, None, T), 2) == 0.5
    q, k, v, do = torch.randn(4, 2, 12, T, 64, device="cuda", dtype=torch.bfloat16).unbind()

    def milliseconds(config, documents) -> float:
        def step():
            o = attention(*(x.detach().requires_grad_() for x in (q, k, v)), config, documents=documents)
            o.backward(do)

        return sizes.triton.testing.do_bench(step, return_mode="min")  # other tests may use the GPU at the same time

    assert milliseconds(config, documents) <= 0.6 * milliseconds(PORTABLE, None)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_a_host_that_is_late_does_not_count():
    x = torch.zeros(1, device="cuda")

    def slow():
        x.add_(1)
        time.sleep(0.002)
        x.add_(1)

    assert median_ms(slow, x.device) < 0.5


# --- the loss --------------------------------------------------------------------------------------------------------


def of_loss(x, weight, targets) -> dict[str, torch.Tensor]:
    loss = next_token_loss(x, weight, targets, z_loss=1e-3)
    dx, dweight = torch.autograd.grad(loss * 1024, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def loss_inputs(n: int, V: int, C: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(rows, C, device="cuda", generator=generator).to(dtype) for rows in (n, V))
    targets = torch.randint(V, (n,), device="cuda", generator=generator)
    targets[::7] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("V", [65, 257, 4096, 50_257, 50_304])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_of_the_loss_is_within_twice_torchs_error(dtype, V, monkeypatch):
    x, weight, targets = loss_inputs(700, V, 64, dtype)
    assert loss_module.has_loss_kernel(x)
    assert not loss_module.has_loss_kernel(x.double())
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 512)
    found = of_loss(x, weight, targets)
    monkeypatch.setattr(loss_module, "has_loss_kernel", lambda x: False)
    reference = of_loss(*(t.detach().double().requires_grad_() for t in (x, weight)), targets)
    assert_within_budget(
        found, of_loss(x, weight, targets), {name: right.cpu().double() for name, right in reference.items()}
    )


def test_a_compiled_loss_differs_by_the_rounding_of_its_divisions(monkeypatch):
    """Compiled, the sum over the tokens and the gradients are divided by the number of tokens less exactly."""
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 512)
    x, weight, targets = loss_inputs(700, 4096, 64, torch.bfloat16)
    eager = of_loss(x, weight, targets)
    loss = torch.compile(next_token_loss, fullgraph=True)(x, weight, targets, z_loss=1e-3)
    compiled = loss.detach(), *torch.autograd.grad(loss * 1024, (x, weight))
    for name, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(other, eager[name], rtol=2 * torch.finfo(other.dtype).eps, atol=0.0)


def test_a_replayed_loss_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 512)
    x, weight, targets = loss_inputs(700, 4096, 64, torch.bfloat16)
    eager = of_loss(x, weight, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = of_loss(x, weight, targets)
    graph.replay()
    assert not [name for name, other in eager.items() if not torch.equal(other, captured[name])]


def test_the_loss_needs_no_more_memory_than_a_chunks_logits_beside_its_gradients():
    x, weight, targets = loss_inputs(2 * loss_module.KERNEL_CHUNK + 100, 50_304, 64, torch.bfloat16)
    of_loss(*loss_inputs(10, 50_304, 64, torch.bfloat16))  # the workspaces of its products stay
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    of_loss(x, weight, targets)
    logits = loss_module.KERNEL_CHUNK * 50_304 * 2
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * logits


def test_rows_of_logits_past_two_to_the_31_numbers_are_found(sizes):
    from kernels.loss import loss_in_place

    N, V = 16_400, 131_072
    logits = torch.zeros(N, V, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 20
    losses = loss_in_place(logits, torch.full((N,), 5, device="cuda"), IGNORE, 0.0, True)
    assert (losses[:-1] == losses[0]).all()
    assert losses[-1] < 1e-3 < losses[0]
    assert (logits[:, 5] < 0).all()
    assert (logits[:, 6] > 0).all()


# --- norms -----------------------------------------------------------------------------------------------------------

NORM_TOKENS = 5003  # each program has several blocks of rows, and the last block is not whole


@pytest.mark.parametrize("kind", ["layernorm", "layernorm without bias", "rmsnorm"])
@pytest.mark.parametrize("keep", [False, True], ids=["whole", "dropped"])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16")], ids=str)
@pytest.mark.parametrize("C", [70, 128, 384, 768, 1600, 2048, 4096, 8192])
def test_the_kernel_of_norms_is_within_twice_autograds_error(C, dtypes, keep, kind, monkeypatch):
    stream, next_dtype = (getattr(torch, name) for name in dtypes)
    assert_kernel_is_right(norm_inputs(C, kind, stream, next_dtype, keep, "cuda", NORM_TOKENS), monkeypatch)


def test_norms_have_the_kernel_where_there_will_be_a_backward():
    norm, x, *_ = norm_inputs(768, "layernorm", torch.float32, torch.bfloat16, False, "cuda")
    assert norm_module.runs_kernel(norm, x)
    assert not norm_module.runs_kernel(norm, x.double())
    assert not norm_module.runs_kernel(norm, x.repeat(1, 11))
    with torch.no_grad():
        assert not norm_module.runs_kernel(norm, x)


@pytest.mark.parametrize("C", [384, 768])
def test_a_recorded_norm_has_the_bits_of_the_compiled_one_a_hundred_times(C, monkeypatch):
    given = norm_inputs(C, "layernorm", torch.float32, torch.bfloat16, True, "cuda", NORM_TOKENS)
    torch._dynamo.reset()
    monkeypatch.setattr("tests.test_norm.add_and_norm", torch.compile(norm_module.add_and_norm, fullgraph=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a backward runs on the stream of its forward
        first = {name: x.clone() for name, x in norm_results(*given).items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            recorded = norm_results(*given)
        for _ in range(100):
            graph.replay()
            assert not [name for name, x in first.items() if not torch.equal(recorded[name], x)]


def test_rows_of_a_norm_past_two_to_the_31_numbers_are_found(sizes):
    from kernels.norm import norm_backward

    N, C = 2**31 // 4096 + 100, 4096
    dy = torch.zeros(N, C, device="cuda", dtype=torch.bfloat16)
    x = torch.ones_like(dy)
    dy[-1, 5] = 1
    mean, rstd = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")
    dx, _, dweight = norm_backward(dy, None, x, mean, rstd, torch.ones(C, device="cuda"), None, 1.0, None, True)
    assert not dx[:-1].any()
    assert dx[-1, 5] > 0.99
    for row in dweight:
        assert row.nonzero().tolist() == [[5]]


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "dropout_p"), [("naive", 0.0), ("naive", 0.2), ("sdpa", 0.0), ("triton", 0.0), ("triton", 0.2)]
)
def test_a_compiled_model_learns_as_the_plain_one_does(impl, dropout_p):
    """Same weights, same batch, same dropout, bf16: the losses of five updates agree to bf16's rounding."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        config = GPTConfig(n_layer=2, n_head=4, n_embd=128, context_length=256, vocab_size=257)
        model = GPT(config, AttentionConfig(impl, dropout_p=dropout_p)).cuda()
        step = in_stages(model, torch.compile) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        idx = torch.randint(257, (8, 257), device="cuda")
        losses.append([])
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    plain, other = torch.tensor(losses)
    assert plain[-1] < plain[0]
    assert (plain - other).abs().max() <= torch.finfo(torch.bfloat16).eps * plain.max()


@pytest.mark.slow
def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path):
    """On one GPU, dropout on: the CUDA generator's state and the fused optimizer's are in the checkpoint."""
    from safetensors.torch import load_file

    import train
    from training.metrics import read_metrics

    cfg = train.Config(
        model=GPTConfig(n_layer=2, n_head=2, n_embd=64, context_length=128, mlp="gelu", dropout_p=0.1),
        attention=replace(TILED, dropout_p=0.1),
        name="whole",
        runs=str(tmp_path),
        steps=20,
        tokens_per_step=2048,
        eval_every=10,
        eval_tokens=1024,
        checkpoint_every=10,
        sample_every=0,
        device="cuda",
    )
    cfg.data.cache, cfg.wandb.mode = str(tmp_path / "cache"), "disabled"
    # Embedding's gradient adds atomically on a GPU unless told not to; the rest here is repeatable as it is.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert train.main(replace(cfg)) == 0
        first_half = tmp_path / "whole" / "checkpoints" / "step_000010"
        assert train.main(replace(cfg, name="again", resume=str(first_half))) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    whole, again = (
        load_file(tmp_path / run / "checkpoints/step_000020/model.safetensors") for run in ("whole", "again")
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in record][-10:]
        for run in ("whole", "again")
    ]
    assert losses[0] == losses[1]


# --- a step without the host ------------------------------------------------------------------------------------------

RECIPES = {
    "sdpa-adamw": {"impl": "sdpa", "model_dropout": 0.1},
    "sdpa-lengths": {"impl": "sdpa", "length_warmup_steps": 40, "length_warmup_from": 32},
    "sdpa-muon-average-passes": {"impl": "sdpa", "kind": "muon", "ema_decay": 0.9, "tokens_per_step": 4096},
    "triton-fp16": {"impl": "triton", "dropout_p": 0.1, "dtype": "fp16", "z_loss": 1e-3},
    "triton-documents-muon-all": {
        "impl": "triton", "dropout_p": 0.1, "documents": True, "window": 100, "kind": "muon", "ema_decay": 0.9,
        "tokens_per_step": 4096, "z_loss": 1e-3,
    },
    "triton-recomputed": {"impl": "triton", "dropout_p": 0.1, "model_dropout": 0.1, "recomputed": True},
    "triton-selective": {"impl": "triton", "dropout_p": 0.1, "model_dropout": 0.1, "recomputed": "selective"},
    "triton-selective-in-pieces": {
        "impl": "triton", "dropout_p": 0.1, "model_dropout": 0.1, "recomputed": "selective", "chunk": 64,
    },
    "sdpa-selective": {"impl": "sdpa", "recomputed": "selective"},
    "naive-muon-fp16": {"impl": "naive", "dropout_p": 0.1, "kind": "muon", "dtype": "fp16"},
}  # fmt: skip


@pytest.fixture
def repeatable():
    """torch's own operations add in one order, as those of an embedding's gradient otherwise do not on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def small_run(tmp_path: Path, name: str, way: str, steps: int, recipe: dict, **keys):
    """The configuration of a small run: batches of 2,048 tokens."""
    import train

    recipe = {"impl": "sdpa", "dropout_p": 0.0, "documents": False, "window": None, "kind": "adamw"} | recipe
    of_attention = {key: recipe.pop(key) for key in ("impl", "dropout_p", "documents", "window")}
    size = {"n_layer": 2, "n_head": 2, "n_embd": 128, "context_length": 128}
    cfg = train.Config(
        model=GPTConfig(
            **size,
            dropout_p=recipe.pop("model_dropout", 0.0),
            activation_checkpointing=recipe.pop("recomputed", "false"),
            chunk=recipe.pop("chunk", None),
        ),
        attention=AttentionConfig(**of_attention),
        optimizer=OptimizerConfig(kind=recipe.pop("kind"), warmup_steps=10),
        name=name,
        runs=str(tmp_path),
        steps=steps,
        eval_every=1000,
        eval_tokens=1024,
        checkpoint_every=1000,
        sample_every=0,
        device="cuda",
        compile=way,
        **recipe,
    )
    for key, value in keys.items():
        setattr(cfg, key, value)
    cfg.data.cache, cfg.wandb.mode = str(tmp_path / "cache"), "disabled"
    return cfg


def what_it_was(run: Path) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    """Loss, norm and scale of each step, all validation losses, and all tensors of the last checkpoint."""
    from training import checkpoint
    from training.metrics import read_metrics

    names = ("step", "loss", "grad_norm", "loss_scale", "val_loss")
    steps = [tuple(row.get(name) for name in names) for row in read_metrics(run / "metrics.jsonl")]
    last = checkpoint.load(checkpoint.last(run / checkpoint.FOLDER))
    return steps, last.model | last.optimizer()


def assert_same_run(a: Path, b: Path) -> None:
    (steps_a, tensors_a), (steps_b, tensors_b) = what_it_was(a), what_it_was(b)
    assert len(steps_a) >= len(steps_b)
    assert steps_a[-len(steps_b) :] == steps_b
    assert tensors_a.keys() == tensors_b.keys()
    assert not [name for name in tensors_a if not torch.equal(tensors_a[name], tensors_b[name])]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recorded_run_is_the_compiled_one_bit_for_bit(tmp_path, repeatable, recipe):
    """Its evaluations too, which are recorded beside the step, and replayed from the second one on."""
    import train

    for way in ("true", "graph"):
        assert train.main(small_run(tmp_path, way, way, 200, dict(RECIPES[recipe]), eval_every=25)) == 0
    assert_same_run(tmp_path / "true", tmp_path / "graph")


@pytest.mark.slow
def test_a_step_whose_recording_takes_long_draws_the_same(tmp_path, repeatable, monkeypatch):
    """torch clears the generator's offset on the stream that records. Where that came late, as on a GPU with other
    work, the first replay drew the first step's dropout again."""
    import train

    recipe, begin = RECIPES["triton-documents-muon-all"], torch.cuda.CUDAGraph.capture_begin

    def late(self, *args, **kwargs):
        torch.cuda._sleep(2 * 10**9)  # cycles, on the stream that records
        return begin(self, *args, **kwargs)

    assert train.main(small_run(tmp_path, "soon", "graph", 20, dict(recipe))) == 0
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    assert train.main(small_run(tmp_path, "late", "graph", 20, dict(recipe))) == 0
    assert_same_run(tmp_path / "soon", tmp_path / "late")


@pytest.mark.slow
def test_a_recorded_run_resumed_in_its_middle_is_the_unbroken_one(tmp_path, repeatable):
    import train

    recipe = RECIPES["triton-documents-muon-all"]
    assert train.main(small_run(tmp_path, "whole", "graph", 60, dict(recipe), checkpoint_every=31)) == 0
    there = str(tmp_path / "whole/checkpoints/step_000031")
    assert train.main(small_run(tmp_path, "again", "graph", 60, dict(recipe), resume=there)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "again")


KILLED_AT_45 = """
import os, signal, sys
from pathlib import Path
import torch, train
from tests.test_gpu import RECIPES, small_run
torch.use_deterministic_algorithms(True, warn_only=True)
log_oldest = train.log_oldest
def killed(run):
    if run.enqueued[0].step == 45:
        run.writer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return log_oldest(run)
train.log_oldest = killed
train.main(small_run(Path(sys.argv[1]), "killed", "graph", 60, dict(RECIPES[sys.argv[2]]), checkpoint_every=31))
"""


@pytest.mark.slow
def test_a_recorded_run_that_is_killed_and_resumed_is_the_unbroken_one(tmp_path, repeatable):
    import train

    name = "triton-documents-muon-all"
    there = Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", KILLED_AT_45, str(tmp_path), name], cwd=there, check=False)
    assert ended.returncode == -signal.SIGKILL
    keys = {"checkpoint_every": 31}
    again = small_run(tmp_path, "killed", "graph", 60, dict(RECIPES[name]), resume=str(tmp_path / "killed"), **keys)
    assert train.main(again) == 0
    assert train.main(small_run(tmp_path, "whole", "graph", 60, dict(RECIPES[name]), **keys)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("impl", ["triton", "sdpa"])
def test_a_selective_checkpoint_changes_no_bit_and_runs_attention_once(impl, compiled, repeatable):
    """With dropout, of attention too where its mask does not depend on how the step is made."""
    found = []
    for form in ("false", "true", "selective"):
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "context_length": 512, "vocab_size": 64}
        config = GPTConfig(**size, position="rope", dropout_p=0.1, activation_checkpointing=form)
        model = RecomputingGPT(config, AttentionConfig(impl, dropout_p=0.1 if impl == "triton" else 0.0)).cuda()
        step = torch.compile(model) if compiled else model
        idx = torch.randint(64, (2, 2, 512), device="cuda")
        torch.manual_seed(7)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(*idx)
        with torch.profiler.profile() as seen:
            loss.backward()
        # On the device: forward kernels of attention in the backward
        names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        again = [name for name in names if "forward_kernel" in name or "fprop" in name or "flash_fwd" in name]
        assert len(again) == (2 if form == "true" else 0), again
        found.append([loss, *(p.grad for p in model.parameters())])
    if not compiled:  # a compiler fuses each form in its own way, and so rounds in other places
        assert all(torch.equal(a, b) for form in found[1:] for a, b in zip(found[0], form, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("form", "chunk"), [("false", None), ("selective", None), ("selective", 16384), ("true", None), ("true", 16384)]
)
def test_a_step_takes_no_more_memory_than_is_counted(form, chunk, compiled):
    """Three layers of GPT-2, 131,072 tokens. Eager within 15 %, in pieces it may take a quarter less. Compiled, what is
    computed again may take COMPILED times as much."""
    from training.memory import COMPILED, bytes_of

    config = GPTConfig(
        n_layer=3, context_length=2**17, vocab_size=50304, position="rope", residual_dtype="autocast",
        activation_checkpointing=form, chunk=chunk,
    )  # fmt: skip
    attention = AttentionConfig("triton", window=1024)
    before = torch.cuda.memory_allocated()
    model = RecomputingGPT(config, attention).cuda()
    step = torch.compile(model) if compiled else model
    idx = torch.randint(50257, (2, 1, 2**17), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(*idx)
        loss.backward()
    adamw = 8 * model.parameter_count()
    taken = torch.cuda.max_memory_allocated() - before + adamw
    counted = bytes_of(config, attention, 1, "bf16", ema=False)
    print(f"{form} {chunk} compiled={compiled}: {taken / 2**30:.2f} GiB, counted {counted / 2**30:.2f}")
    assert taken <= (COMPILED if compiled and form != "false" else 1.15) * counted
    assert compiled or taken >= (0.75 if chunk else 0.85) * counted


@pytest.mark.slow
def test_a_model_of_a_million_tokens_is_right_at_its_end():
    """Hidden states at the last tokens of 2**20, in pieces, against the same tokens alone: with a window they see no
    others. Projections have more than 2**31 numbers; no offset may wrap. Its gradient is finite."""
    T, last, window = 2**20, 512, 128
    size = {"n_layer": 2, "context_length": T, "vocab_size": 256, "position": "rope", "residual_dtype": "autocast"}
    found = {}
    for chunk in (None, 2**16):
        torch.manual_seed(0)
        config = GPTConfig(**size, activation_checkpointing="selective", chunk=chunk)
        model = RecomputingGPT(config, AttentionConfig("triton", window=window)).cuda()
        idx = torch.randint(256, (1, T), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        with torch.autocast("cuda", torch.bfloat16):
            x = model.hidden(idx)
        x[:, -last:].square().mean().backward()
        found[chunk] = [x.detach()[:, -last:], model.blocks[0].attention.qkv.weight.grad]
        # Two layers see 2 * 127 tokens back. Rotations by absolute positions keep scores, up to their rounding.
        if chunk is None:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                alone = model.eval().hidden(idx[:, -last - 2 * window :])[:, -last:]
            assert (x.detach()[:, -last:] - alone).norm() <= 0.05 * alone.norm()
        del x, model
    for whole, pieces in zip(*found.values(), strict=True):
        assert whole.isfinite().all()
        assert (whole - pieces).norm() <= 0.01 * whole.norm()


def plant_on_device(monkeypatch, at: int, *, loss: bool) -> None:
    """The loss of update number `at` is NaN, or its gradient is infinite. The device counts, so a graph has it too."""
    from training.step import TrainStep

    update = TrainStep.update

    def planted(self, batches):
        if not hasattr(self, "count"):
            self.count, model = torch.zeros((), device="cuda"), self.loss_of

            def loss_of(*arguments, **options):
                right = model(*arguments, **options)
                now = self.count == at
                if loss:
                    return torch.where(now, math.nan, 1.0) * right
                return right.detach() + (right - right.detach()) * torch.where(now, 1e38, 1.0)

            self.loss_of = loss_of
        self.count += 1
        update(self, batches)

    monkeypatch.setattr(TrainStep, "update", planted)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [True, False], ids=["loss", "norm"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_recorded_run_stops_before_the_update_that_is_bad(tmp_path, monkeypatch, capsys, kind, loss):
    import train
    from training import checkpoint
    from training.state import optimizer_tensors

    plant_on_device(monkeypatch, 37, loss=loss)
    stopped, stop = [], train.stop_at_nan
    monkeypatch.setattr(train, "stop_at_nan", lambda run, *rest: stopped.append(run) or stop(run, *rest))
    cfg = small_run(tmp_path, "x", "graph", 100, {"kind": kind, "ema_decay": 0.9}, checkpoint_every=36)
    assert train.main(cfg) == 1
    assert "step 37: loss" in capsys.readouterr().out
    before = checkpoint.load(tmp_path / "x/checkpoints/step_000036")
    (run,) = stopped
    tensors = {f"{name}.trained": p for name, p in run.model.named_parameters()}
    tensors |= optimizer_tensors(run.train_step.optimizers, run.model.named_parameters())
    kept = before.optimizer()
    assert not [name for name, x in tensors.items() if not torch.equal(x.detach().cpu(), kept[name])]
    averages = run.averaged.state_dict()
    assert not [name for name, x in before.model.items() if not torch.equal(averages[name].cpu(), x)]


@pytest.mark.slow
def test_a_recorded_run_keeps_the_batch_that_stopped_it(tmp_path, capsys):
    """Without the maximum a weight becomes infinite, after the recording and between two looks."""
    import breakit
    import train

    cfg = small_run(tmp_path, "x", "graph", 200, {"impl": "triton"})
    cfg.break_it, cfg.probe.every = BreakIt("no_max", 100.0), 1000
    cfg.optimizer.lr = 1e-2
    assert train.main(cfg) == 1
    (run,) = (path for path in tmp_path.iterdir() if path.name.startswith("x-"))
    (kept,) = (run / "faults").iterdir()
    said = capsys.readouterr().out
    assert f"step {int(kept.name[-6:])}: loss" in said
    assert int(kept.name[-6:]) > 4
    breakit.main(breakit.Config(replay=str(kept), device="cuda"))
    assert "not finite" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled", "recorded"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_step_waits_for_the_device(way, kind):
    """torch raises an error at anything that would: a number read, memory copied that is not pinned."""
    from data.loader import Batch
    from training.optimizer import OptimizerConfig, build_optimizers
    from training.step import TrainStep

    torch.manual_seed(0)
    size = GPTConfig(n_layer=2, n_head=2, n_embd=64, context_length=64, vocab_size=257)
    model = GPT(size, AttentionConfig("triton", dropout_p=0.1)).cuda()
    averaged = GPT(size, AttentionConfig("triton")).cuda()
    step = TrainStep(
        model, averaged, build_optimizers(model, OptimizerConfig(kind=kind)), torch.amp.GradScaler("cuda"),
        torch.autocast("cuda", torch.float16), way=way, grad_clip=1.0, z_loss=1e-4, stop_on_nan=True,
    )  # fmt: skip
    x, y = torch.randint(257, (2, 2, 4, 64)).pin_memory()
    losses = [step(Batch(x, y, None), 1e-3, 0.1).numbers().loss for _ in range(5)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            report = step(Batch(x, y, None), 1e-3, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.numbers().loss < losses[0]
    assert report.seconds() > 0


EVALUATED = {
    "documents-window": ({"bias": False}, {"impl": "triton", "dropout_p": 0.1, "documents": True, "window": 40}),
    "rope-grouped": (
        {
            "position": "rope",
            "yarn_factor": 2.0,
            "yarn_original": 64,
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "n_kv_head": 1,
        },
        {"impl": "sdpa"},
    ),
    "local-rope": ({"position": "rope", "rope_base_local": 1e3}, {"impl": "triton", "windows": (32, None)}),
    "alibi-softcap": ({"position": "none"}, {"impl": "triton", "alibi": True, "softcap": 20.0}),
    "blocks": ({}, {"impl": "triton", "block_mask": ("x.", "xx"), "block_mask_size": 64}),
    "naive-bf16-stream": ({"residual_dtype": "autocast"}, {"impl": "naive", "dropout_p": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATED)
def test_a_recorded_evaluation_has_the_bits_of_one_from_python_and_changes_no_step(name, repeatable):
    """Its memory is that of the recorded step. Neither may find there what it needs."""
    from data.loader import Batch
    from training.optimizer import OptimizerConfig, build_optimizers
    from training.step import TrainStep

    changes, attention = EVALUATED[name]
    documents = (torch.arange(128) // 50).int() if "documents" in attention else None

    def draw(generator: torch.Generator, *shape: int) -> Batch:
        x, y = torch.randint(257, (2, *shape, 128), generator=generator).pin_memory()
        return Batch(x, y, None if documents is None else documents.expand(x.shape).contiguous().pin_memory())

    losses: list[list[float]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_head": 2, "n_embd": 128, "context_length": 128, "vocab_size": 257, "dropout_p": 0.1}
        model = GPT(GPTConfig(**size, **changes), AttentionConfig(**attention)).cuda()
        step = TrainStep(
            model, model, build_optimizers(model, OptimizerConfig()), torch.amp.GradScaler("cuda", enabled=False),
            torch.autocast("cuda", torch.bfloat16), way="eager", grad_clip=1.0, z_loss=0.0, stop_on_nan=True,
        )  # fmt: skip
        step.way = "recorded"  # as it is: compiling takes long
        trained, evaluated = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        losses.append([])
        for _ in range(10):
            losses[-1].append(step(draw(trained, 1, 8), 1e-3, 0.0).numbers().loss)
            for B in (8, 3) if evaluates else ():
                batch = draw(evaluated, B)
                model.eval()
                with torch.no_grad():
                    right = step.forward(batch.to(step.device))
                assert step.loss_of_windows(batch) == right
                model.train()
    assert len(step.graphs.losses) == 2
    assert losses[0] == losses[1]


# --- sampling --------------------------------------------------------------------------------------------------------

# One query row; windows are buffers that are as long as the window, in tests/test_decode.py and below.
DECODED = {
    "plain": Case(1, 1500, H=3, D=64),
    "one": Case(1, 1, B=16),
    "two": Case(1, 2, B=16),
    "grouped": Case(1, 1300, H=8, H_kv=2, D=128),
    "71-heads-one-key-head": Case(1, 900, B=1, H=71, H_kv=1, D=64),
    "alibi": Case(1, 700, H=6, H_kv=2, D=32, alibi=True),
    "softcap": Case(1, 700, H=4, D=64, softcap=0.7, softmax_scale=0.5),
    "large-scores": Case(1, 2000, H=4, D=64, sigma=4.0),
    **{f"D={D}": Case(1, 777, H=4, H_kv=2, D=D) for D in (16, 24, 80, 96, 160, 256)},
}


@pytest.mark.parametrize("splits", [None, 1, 2, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODED.values(), ids=DECODED)
def test_one_row_of_the_kernel_is_within_twice_naives_error(case, dtype, splits):
    """As in tests/test_decode.py: buffers that are longer than the keys, of which what lies past them is NaN."""
    from tests.test_decode import decoded

    inputs = case.inputs(dtype, "cuda")
    right, naive = oracle(inputs, case), run(inputs, case, NAIVE)
    for _ in range(3):  # tickets are drawn again, and the last program is another one
        found = decoded(inputs, case, splits=splits)
        assert_within_budget({"o": found}, {"o": naive["o"]}, {"o": right["o"]})


def test_the_decode_kernel_gives_the_same_bits_two_hundred_times():
    from tests.test_decode import decoded

    case = Case(1, 5000, B=3, H=8, H_kv=2, D=128)
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = decoded(inputs, case, splits=40)
    assert all(torch.equal(decoded(inputs, case, splits=40), first) for _ in range(200))


def test_keys_past_two_to_the_31_numbers_are_found():
    """The last key head of a buffer of 2**31 numbers and more has one key that has all the weight."""
    from sampling.decode import decode

    N, S, D = 9, 2**21, 128
    keys, values = torch.zeros(2, N, S, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = torch.zeros(3, 1, N, 1, D, device="cuda", dtype=torch.bfloat16)
    q[..., 0], keys[-1, S - 2, 0], values[-1, S - 2, 3] = 1, 100, 7
    v[:, -1, :, 5] = 3
    tickets = torch.zeros(N, dtype=torch.int32, device="cuda")
    o = decode(q, k, v, keys, values, torch.tensor([S - 1], device="cuda"), Problem.of(1, S), tickets)
    assert (o[0, -1, 0, 3], values[-1, S - 1, 5]) == (7, 3)


SAMPLED = {
    "learned": {},
    "rope-grouped": {"position": "rope", "n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    "windows-alibi-softcap": {"windows": [100, None], "position": "none", "alibi": True, "softcap": 5.0},
}
SAMPLE_SIZE = GPTConfig(n_layer=2, n_head=4, n_embd=256, context_length=256, vocab_size=1000)


def sampled_model(changes: dict, dtype: torch.dtype = torch.bfloat16) -> GPT:
    torch.manual_seed(0)
    of_model = {name: value for name, value in changes.items() if hasattr(SAMPLE_SIZE, name)}
    attention = replace(TRITON, **{name: value for name, value in changes.items() if name not in of_model})
    model = GPT(replace(SAMPLE_SIZE, **of_model), attention).cuda().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    return model.to(dtype)


def sampled(model: GPT, prompts, sampler, count=200, past_context="slide") -> torch.Tensor:
    from sampling.generate import generate

    generator = torch.Generator("cuda").manual_seed(3)
    return torch.stack(list(generate(model, prompts, count, sampler, generator, past_context=past_context)))


@pytest.mark.parametrize("sampler", [{"temperature": 0}, {}, {"top_k": 50, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("lengths", [(20,), (3, 50, 20), (5,) * 20], ids=["one", "three", "twenty"])
@pytest.mark.parametrize("changes", SAMPLED.values(), ids=SAMPLED)
def test_recorded_tokens_are_the_unrecorded_ones_bit_for_bit(changes, lengths, sampler, monkeypatch):
    """The likeliest ones and those that a seed draws; the context of 256 fills up, and its last half runs again."""
    from sampling import token
    from sampling.generate import Sampler

    model = sampled_model(changes)
    prompts = [torch.randint(1000, (length,), device="cuda") for length in lengths]
    recordings, record = [], token.NextToken.record
    monkeypatch.setattr(token.NextToken, "record", lambda self: recordings.append(self) or record(self))
    found = sampled(model, prompts, Sampler(**sampler), 400, "half")
    assert len(recordings) == 1
    monkeypatch.setattr(token, "WARM_UP", 1000)
    assert torch.equal(sampled(model, prompts, Sampler(**sampler), 400, "half"), found)
    assert len(recordings) == 1
    assert len(found.unique()) > (2 if sampler.get("temperature") == 0 else 20)


@pytest.mark.parametrize("sampler", [{"temperature": 0}, {}], ids=str)
@pytest.mark.parametrize("lengths", [(20,), (3, 50, 90), (70,) * 20], ids=["one", "three", "twenty"])
@pytest.mark.parametrize("changes", SAMPLED.values(), ids=SAMPLED)
def test_recorded_tokens_in_pages_are_those_in_buffers_bit_for_bit(changes, lengths, sampler, monkeypatch):
    """Pages come while the recorded token runs, and when their memory moves it is recorded again. Twenty samples share
    a prompt, whose last page is copied. The context of 256 fills up, and its last half runs again."""
    from sampling import token
    from sampling.generate import Sampler, generate

    model = sampled_model(changes)
    prompts = [torch.randint(1000, (length,), device="cuda") for length in lengths]
    if len(lengths) == 20:
        prompts = prompts[:1] * 20
    recordings, record, found = [], token.NextToken.record, []
    monkeypatch.setattr(token.NextToken, "record", lambda self: recordings.append(self) or record(self))
    for page in (None, 64):
        generators = [torch.Generator("cuda").manual_seed(seed) for seed in range(len(lengths))]
        cache = KVCache(model, len(lengths), page=page)
        tokens = generate(model, prompts, 400, Sampler(**sampler), generators, cache=cache, past_context="half")
        found.append(torch.stack(list(tokens)))
    assert torch.equal(*found)
    assert 3 <= len(recordings) <= 8  # of the buffers one


def test_pages_that_come_do_not_wait_for_the_device():
    from sampling.generate import Sampler, generate

    model = sampled_model({})
    prompt = torch.randint(1000, (1, 60), device="cuda").expand(4, -1)
    cache = KVCache(model, 4, page=64)
    tokens = generate(model, prompt, 190, Sampler(), torch.Generator("cuda").manual_seed(0), cache=cache)
    for _ in range(10):
        next(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [next(tokens) for _ in range(170)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == 170
    assert [len(held) for held in cache.pages.held] == [4] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 20])
@pytest.mark.parametrize("changes", SAMPLED.values(), ids=SAMPLED)
def test_logits_of_single_tokens_are_within_twice_the_models_error(changes, rows, dtype):
    """Of the fused kernels (up to 16 sequences) and of the modules with the decode kernel."""
    from sampling.generate import run_prompts
    from sampling.token import layers_for

    text = torch.randint(1000, (rows, 120), device="cuda")
    with torch.no_grad():
        naive = sampled_model({**changes, "impl": "naive"}, dtype).next_logits(text)
        right = sampled_model({**changes, "impl": "naive"}, torch.float64).next_logits(text)
        model = sampled_model(changes, dtype)
        cache = KVCache(model, rows)
        run_prompts(model, list(text[:, :100]), cache)
        for t in range(100, 120):
            cache.grow()
            token = text[:, t : t + 1]
            found = model.next_logits(token, cache.move(layers_for(token)))
    right = right.cpu()
    difference, allowed = ((x.cpu().double() - right).abs().max() for x in (found, naive))
    assert difference <= 2 * (allowed + torch.finfo(dtype).eps * right.abs().max())


@pytest.mark.parametrize("sampler", [{"temperature": 0}, {}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_no_recorded_token_waits_for_the_device(sampler):
    """torch raises an error at anything that would. What is read of a token has arrived with an event."""
    from sampling.generate import Sampler, generate

    model = sampled_model({})
    tokens = generate(model, torch.randint(1000, (2, 20), device="cuda"), 100, Sampler(**sampler))
    for _ in range(10):
        next(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [next(tokens) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(token.device.type == "cpu" and token.shape == (2,) for token in found)


@pytest.mark.parametrize("sampler", [{"temperature": 0}, {}], ids=str)
def test_logits_that_become_nan_in_a_recorded_token_end_the_sample(sampler):
    from sampling.generate import NotFinite, Sampler, generate

    model = sampled_model({})
    tokens = generate(model, torch.randint(1000, (1, 20), device="cuda"), 100, Sampler(**sampler))
    for _ in range(10):
        next(tokens)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    next(tokens)  # chosen before
    with pytest.raises(NotFinite, match="the logits are NaN"):
        next(tokens)


def test_a_draw_without_a_wait_is_multinomials():
    from sampling.generate import Sampler

    logits = torch.randn(5, 1000, device="cuda") * 3
    found = Sampler(1.0).choose(logits, torch.Generator("cuda").manual_seed(5))
    assert torch.equal(
        found, torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator("cuda").manual_seed(5))[:, 0]
    )


@pytest.mark.parametrize("temperature", [0, 1e-30, 0.8, 2.0])
def test_the_kernel_chooses_as_plain_pytorch(temperature):
    """choose_unseen() takes the kernel on a GPU, choose() does not."""
    from sampling.generate import Sampler

    logits, sampler = torch.randn(3, 50_257, device="cuda") * 2, Sampler(temperature)
    for seed in range(100):
        one, other = (torch.Generator("cuda").manual_seed(seed) for _ in "ab")
        found = sampler.choose_unseen(logits, one)
        assert torch.equal(found[:-1], sampler.choose(logits, other))
        assert found[-1] == 0
    for where in (slice(None), slice(5000, 5001), slice(50_256, 50_257)):
        spoilt = logits.clone()
        spoilt[1, where] = math.nan
        found = sampler.choose_unseen(spoilt)
        assert found[-1] == 1
        assert ((found >= 0) & (found < 50_257)).all()  # the next token runs before the host knows


def test_a_recording_that_takes_long_does_not_set_the_draws_back(monkeypatch):
    """torch clears a generator's offset on the stream that records. The first replay drew the first token's draws again
    where that came late, as on a GPU with other work."""
    from sampling import token
    from sampling.generate import Sampler

    model, prompts = sampled_model({}), [torch.randint(1000, (20,), device="cuda")]
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(self, *args, **kwargs):
        torch.cuda._sleep(2 * 10**8)  # cycles, on the stream that records
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    found = sampled(model, prompts, Sampler(), 30)
    monkeypatch.setattr(token, "WARM_UP", 1000)
    assert torch.equal(sampled(model, prompts, Sampler(), 30), found)


def test_recorded_rows_draw_from_their_own_generators(monkeypatch):
    """With what a penalty remembers, too: the same bits as without recording."""
    from sampling import token
    from sampling.generate import Sampler, generate

    model, found = sampled_model({}), []
    prompt = torch.randint(1000, (1, 20), device="cuda").expand(3, -1)
    sampler = Sampler(1.0, min_p=0.01, repetition_penalty=1.3)
    for warm_up in (token.WARM_UP, 1000):
        monkeypatch.setattr(token, "WARM_UP", warm_up)
        generators = [torch.Generator("cuda").manual_seed(seed) for seed in (1, 2, 3)]
        found.append(torch.stack(list(generate(model, prompt, 200, sampler, generators))))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].T.tolist()}) == 3


@pytest.mark.parametrize("past_context", ["slide", "half"])
def test_a_session_answers_as_without_a_cache(past_context, monkeypatch):
    """One token is recorded for all turns. Answers are cut short, when the GPU is a token ahead; past the context."""
    from itertools import islice

    from sampling import token
    from sampling.generate import Sampler, Session

    recordings, record = [], token.NextToken.record
    monkeypatch.setattr(token.NextToken, "record", lambda self: recordings.append(self) or record(self))
    model, answers = sampled_model(SAMPLED["rope-grouped"], torch.float32), []
    for cache in (True, False):
        generator = torch.Generator("cuda").manual_seed(1)
        session = Session(model, Sampler(0), generator, cache=cache, past_context=past_context)
        text, said = list(range(30)), []
        for count in (5, 40, 1, 90, 60, 90, 30):
            answer = list(islice(session.answer(text, 100), count))
            said.append(answer)
            text += [*answer[: count - count // 3], 7, 8, 9]
        answers.append(said)
    assert answers[0] == answers[1]
    assert len(recordings) == 1


def test_a_talk_that_is_recorded_once_draws_and_penalizes_as_an_unrecorded_one(monkeypatch):
    """What the graph reads and writes stays at its place: the generator, and what a penalty counts."""
    from sampling import token
    from sampling.generate import Sampler, Session

    model, sampler, answers = sampled_model({}), Sampler(1.0, repetition_penalty=1.3), []
    for warm_up in (token.WARM_UP, 1000):
        monkeypatch.setattr(token, "WARM_UP", warm_up)
        session, text = Session(model, sampler, torch.Generator("cuda").manual_seed(2), past_context="half"), [1]
        for turn in range(8):
            text += [turn, *session.answer([*text, turn], 40)]
        answers.append(text)
    assert answers[0] == answers[1]
    assert len(set(text)) > 100
