"""What only a CUDA GPU shows: pytest -m gpu. What the kernels compute is in tests/test_attention.py, tests/test_loss.py
and tests/test_norm.py, which run there too."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton", reason="triton is made for Linux")

from triton.testing import do_bench

import breakit
import train
from data.loader import Batch
from kernels.loss import loss_in_place
from kernels.norm import norm_backward
from kernels.problem import Problem
from lab.meter import median_ms, peak_bytes
from model import loss as loss_module
from model import norm as norm_module
from model.attention import AttentionConfig, attention
from model.break_it import BreakIt
from model.dropout import keep_mask, keep_table
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE, next_token_loss
from model.recompute import RecomputingGPT
from sampling import token
from sampling.cache import KVCache
from sampling.decode import decode
from sampling.generate import NotFinite, Sampler, Session, generate, run_prompts
from sampling.token import layers_for
from tests.implementations import HALVES, HOPPER, NAIVE, ON_HOPPER, over
from tests.implementations import TRITON as PORTABLE
from tests.reference import (
    DTYPES,
    FLAT_ROWS,
    PLACES,
    Case,
    assert_flat_row,
    assert_within_budget,
    case_name,
    dominated,
    oracle,
    run,
)
from tests.test_decode import decoded
from tests.test_loss import of, problem
from tests.test_norm import inputs as norm_inputs
from tests.test_norm import results as norm_results
from training import checkpoint
from training.memory import COMPILED, bytes_of
from training.metrics import read_metrics
from training.optimizer import OptimizerConfig, build_optimizers
from training.probe import ProbeConfig
from training.record import compiled as in_stages
from training.settings import Config
from training.state import optimizer_tensors
from training.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TRITON = AttentionConfig("triton")
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "tiled", "triton"])
@pytest.mark.parametrize(("keys", "score", "v", "naive", "tiled"), FLAT_ROWS)
def test_without_the_maximum_a_flat_row_overflows_as_its_sums_do(impl, keys, score, v, naive, tiled):
    assert_flat_row(impl, keys, score, v, naive if impl == "naive" else tiled, "cuda")


def test_whole_masks_past_two_to_the_31_elements_are_found():
    seed = torch.tensor(7)
    keep = keep_table(seed.cuda(), *(torch.arange(n, device="cuda") for n in (2, 2**15 + 64)), 2**15 + 64, 0.2)
    for n, i, j in ((0, 0, 0), (0, 2**15, 2**15), (1, 0, 2**15), (1, 2**15, 2**15)):
        tile = keep_mask(seed, 2, range(i, i + 64), range(j, j + 64), 0.2)[n]
        assert torch.equal(keep[n, i : i + 64, j : j + 64].cpu(), tile)


@pytest.mark.parametrize("config", [PORTABLE, TRITON], ids=["portable", "auto"])
def test_triton_needs_next_to_no_memory_beside_its_inputs_outputs_and_gradients(config):
    """The backward for Hopper sums dq in float32."""
    q, k, v, do = (randn(1, 12, 65_536, 64).requires_grad_() for _ in range(4))
    taken = peak_bytes(lambda: torch.autograd.grad(attention(q, k, v, config), (q, k, v), do), q.device)
    sums = 0 if config is PORTABLE else 4 * q.numel()
    assert taken <= (4 + 0.1 * 8) * q.nbytes + sums  # o and three gradients, beside q, k, v and do


def test_rows_past_two_to_the_31_numbers_are_found():
    """A million tokens of a packed projection with GPT-2's row stride of 2,304. For the window's sake the last rows can
    be checked by themselves."""
    T, last, window = 2**20 + 100, 256, 128
    qkv, do = randn(1, T, 2304).requires_grad_(), randn(1, 12, last, 64)

    def results(qkv, config) -> dict:
        q, k, v = (x.unflatten(-1, (12, 64)).transpose(1, 2) for x in qkv.split(768, dim=-1))
        o = attention(q, k, v, replace(config, window=window))[:, :, -last:]
        (gradient,) = torch.autograd.grad(o, qkv, do.to(o.dtype))
        return {"o": o.detach(), "dqkv": gradient[:, -last:]}

    end = qkv.detach()[:, -last - window :].requires_grad_()
    reference = {name: x.cpu() for name, x in results(end.double(), NAIVE).items()}
    assert_within_budget(results(qkv, TRITON), results(end, NAIVE), reference)


@pytest.mark.parametrize(
    "case",
    [Case(T, B=2, H=12, H_kv=4, D=D, dropout_p=p) for T, D, p in
     ((1500, 64, 0.0), (1500, 128, 0.0), (2500, 64, 0.0), (1500, 64, 0.1), (1500, 128, 0.1))],
    ids=case_name,
)  # fmt: skip
@over("triton", "hopper")
def test_the_same_bits_five_hundred_times_beside_other_work(row, case):
    """A race between copies and products would show as other bits, and so would tiles of keys that add to dq in
    another order. A second stream takes processors and memory, so programs begin late."""
    inputs = row.inputs(case, torch.bfloat16)
    first, beside, x = row.run(inputs, case), torch.cuda.Stream(), randn(4096, 4096)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for i in range(500):
        if i % 10 == 0:
            with torch.cuda.stream(beside):
                x = (x @ x).clamp(-1, 1)
        held = torch.empty(i % 7 * 2**20, device="cuda").fill_(torch.nan)  # so that results and sums lie elsewhere
        again = row.run(inputs, case)
        for name in first:
            same &= (again[name] == first[name]).all()
        del held, again
    assert same


@on_hopper
@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (Case(300, D=64), HOPPER, HOPPER),
        (Case(300, D=128, causal=False), HOPPER, HOPPER),
        (Case(300, D=64, dropout_p=0.1), HOPPER, HOPPER),
        (Case(300, D=128, window=100), HOPPER, PORTABLE),
        (Case(300, D=64, documents=(100, 200)), HOPPER, PORTABLE),
        (Case(300, D=128, dropout_p=0.1, window=100), PORTABLE, PORTABLE),
        (Case(300, D=64, softcap=2.0), PORTABLE, PORTABLE),
        (Case(300, D=80), PORTABLE, PORTABLE),
    ],
    ids=lambda x: case_name(x) if isinstance(x, Case) else x.kernel,
)
def test_auto_takes_the_faster_kernels_that_can(case, forward, backward):
    inputs = case.inputs(torch.bfloat16, "cuda")
    auto, found = run(inputs, case, TRITON), run(inputs, case, forward)
    assert all(torch.equal(auto[name], found[name]) for name in auto)
    portable = run(inputs, case, PORTABLE)
    assert torch.equal(auto["lse"], portable["lse"]) == (forward is PORTABLE)
    assert torch.equal(auto["dq"], portable["dq"]) == (backward is PORTABLE is forward)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("same_values", [False, True], ids=["values", "same_values"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_gradients_of_keys_that_dominate_are_as_exact_as_flash_attentions(places, same_values, D, dtype):
    """At most 1.1 times the error of PyTorch's FlashAttention: the norm of a head's error, and the largest, both as
    means over 1,024 heads. The error of one head is chance: where o lies between two 16-bit numbers, the order of
    summing may decide which it becomes, and such roundings of o are most of what is wrong in dq and dk. The means of
    two right kernels differ by less than 2.5 % (standard deviation, on a CPU).

    Which p is rounded depends on the order of the keys: it is 1, and exact, for the largest score that was visited.
    PyTorch's FlashAttention and hopper visit the last keys first, portable the first. So FlashAttention's errors for
    portable are the larger ones of two problems: the same, and that with the dominant keys in the opposite order."""
    for above in (8.0, 16.0, 30.0):
        for apart in (0.0, 0.125):
            here = gradient_errors(D, dtype, above, apart, places, same_values, [HOPPER, PORTABLE])
            turned = gradient_errors(D, dtype, above, apart, places[::-1], same_values, [])["flash"]
            for name, flash in here["flash"].items():
                assert (here["hopper"][name] <= 1.1 * flash).all(), (name, above, apart)
                assert (here["portable"][name] <= 1.1 * torch.maximum(flash, turned[name])).all(), (name, above, apart)


def gradient_errors(
    D: int, dtype: torch.dtype, above: float, apart: float, places: list[int], same_values: bool, configs: list
) -> dict[str, dict[str, Tensor]]:
    """By kernel (flash, and those of configs) and name of a gradient: the norm and the largest error of a head, float64
    (2,), means over 1,024 heads."""
    case = Case(340, D=D, softmax_scale=1.0)
    sums: dict[str, dict[str, Tensor]] = {}
    for seed in range(4):  # at a time, for the memory of naive in float64
        inputs = dominated(D, dtype, above, apart, places, same_values, case.T, "cuda", B=128, seed=seed)
        right = run({key: x.double() for key, x in inputs.items()}, case, NAIVE)
        q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        flash = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), inputs["do"]), strict=True))
        for kernel, found in [("flash", flash), *((x.kernel, run(inputs, case, x)) for x in configs)]:
            errors = {name: norm_and_largest(found[name], right[name]) / 4 for name in flash}
            sums[kernel] = {name: errors[name] + sums.get(kernel, {}).get(name, 0.0) for name in errors}
    return sums


def norm_and_largest(found: Tensor, right: Tensor) -> Tensor:
    """The norm of a head's error and its largest, (2,), means over the heads."""
    errors = (found.double() - right).flatten(0, 1).flatten(1)  # (heads, T * D)
    return torch.stack([errors.norm(dim=1).mean(), errors.abs().amax(1).mean()])


def test_a_replayed_cuda_graph_draws_a_new_mask_when_the_seed_changes():
    q, k, v = randn(3, 2, 2, 256, 64).unbind()
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
    q, new = randn(2, 1, 2, 256, 64).unbind()
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


HALF = {
    "window": {"window": round(16_384 * (1 - 0.5**0.5))},  # what it leaves out is a triangle of half the area
    "documents": {},
    "block_mask": {  # a chessboard: the diagonal, and every second block below it
        "block_mask": ["".join("x" if (i - j) % 2 == 0 else "." for j in range(16)) for i in range(16)],
        "block_mask_size": 1024,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
def test_masks_cost_triton_in_proportion_to_the_tiles_they_keep(kind):
    """Half of the tiles, at most 60 % of the time, forward and backward together, at T = 16,384 (two sequences, as the
    race has of that length: one takes hardly longer than starting its kernels). The portable kernels, which have all
    masks: the backward for Hopper has none, and would make the whole faster than its half."""
    T, config = 16_384, replace(PORTABLE, **HALF[kind])
    documents = (torch.arange(T, device="cuda") // (T // 2)).expand(2, T) if kind == "documents" else None
    q, k, v, do = randn(4, 2, 12, T, 64).unbind()

    def milliseconds(config, documents) -> float:
        def step():
            o = attention(*(x.detach().requires_grad_() for x in (q, k, v)), config, documents=documents)
            o.backward(do)

        return do_bench(step, return_mode="min")

    # Other tests may use the GPU at the same time, so both are measured in turn, and the best of each counts.
    turns = [(milliseconds(config, documents), milliseconds(PORTABLE, None)) for _ in range(5)]
    half, whole = map(min, zip(*turns, strict=True))
    assert half <= 0.6 * whole


def test_a_host_that_is_late_does_not_count():
    x = torch.zeros(1, device="cuda")

    def slow():
        x.add_(1)
        time.sleep(0.002)
        x.add_(1)

    assert median_ms(slow, x.device) < 0.5


# --- the loss and norms ----------------------------------------------------------------------------------------------


def loss_inputs(n: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, targets = problem(n, torch.bfloat16, V, 64)
    targets[::7] = IGNORE
    return x, weight, targets


def of_loss(x, weight, targets, compute=next_token_loss) -> dict[str, Tensor]:
    return of(compute(x, weight, targets, z_loss=1e-3), x, weight)


def test_a_compiled_loss_differs_by_the_rounding_of_its_divisions_and_a_replayed_one_by_nothing(monkeypatch):
    """Compiled, the sum over the tokens and the gradients are divided by the number of tokens less exactly."""
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 512)
    inputs = loss_inputs(700, 4096)
    eager = of_loss(*inputs)
    for name, other in of_loss(*inputs, torch.compile(next_token_loss, fullgraph=True)).items():
        torch.testing.assert_close(other, eager[name], rtol=2 * torch.finfo(other.dtype).eps, atol=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = of_loss(*inputs)
    graph.replay()
    assert not [name for name, other in eager.items() if not torch.equal(other, captured[name])]


def test_the_loss_needs_no_more_memory_than_a_chunks_logits_beside_its_gradients():
    inputs = loss_inputs(2 * loss_module.KERNEL_CHUNK + 100, 50_304)
    assert peak_bytes(lambda: of_loss(*inputs), inputs[0].device) <= 1.05 * loss_module.KERNEL_CHUNK * 50_304 * 2


def test_rows_of_logits_past_two_to_the_31_numbers_are_found():
    N, V = 16_400, 131_072
    logits = torch.zeros(N, V, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 20
    losses = loss_in_place(logits, torch.full((N,), 5, device="cuda"), IGNORE, 0.0, True)
    assert (losses[:-1] == losses[0]).all()
    assert losses[-1] < 1e-3 < losses[0]
    assert (logits[:, 5] < 0).all()
    assert (logits[:, 6] > 0).all()


@pytest.mark.parametrize("C", [384, 768])
def test_a_recorded_norm_has_the_bits_of_the_compiled_one_a_hundred_times(C, monkeypatch):
    given = norm_inputs(C, "layernorm", torch.float32, torch.bfloat16, True)
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


def test_rows_of_a_norm_past_two_to_the_31_numbers_are_found():
    N, C = 2**31 // 4096 + 100, 4096
    dy = torch.zeros(N, C, device="cuda", dtype=torch.bfloat16)
    x = torch.ones_like(dy)
    dy[-1, 5] = 1
    mean, rstd = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")
    dx, _, dweight = norm_backward(dy, None, (x, mean, rstd, torch.ones(C, device="cuda"), None), 1.0, None, True)
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


ALL = {"impl": "triton", "dropout_p": 0.1, "documents": True, "window": 100, "kind": "muon", "ema_decay": 0.9,
       "tokens_per_step": 4096, "z_loss": 1e-3}  # fmt: skip
TWICE = {"impl": "triton", "dropout_p": 0.1, "model_dropout": 0.1}
RECIPES = {
    "sdpa-adamw": {"impl": "sdpa", "model_dropout": 0.1},
    "sdpa-lengths": {"impl": "sdpa", "length_warmup_steps": 40, "length_warmup_from": 32},
    "sdpa-muon-average-passes": {"impl": "sdpa", "kind": "muon", "ema_decay": 0.9, "tokens_per_step": 4096},
    "triton-fp16": {"impl": "triton", "dropout_p": 0.1, "dtype": "fp16", "z_loss": 1e-3},
    "triton-documents-muon-all": ALL,
    "triton-recomputed": TWICE | {"recomputed": "true"},
    "triton-selective": TWICE | {"recomputed": "selective"},
    "triton-selective-in-pieces": TWICE | {"recomputed": "selective", "chunk": 64},
    "sdpa-selective": {"impl": "sdpa", "recomputed": "selective"},
    "naive-muon-fp16": {"impl": "naive", "dropout_p": 0.1, "kind": "muon", "dtype": "fp16"},
}


@pytest.fixture
def repeatable():
    """torch's own operations add in one order, as those of an embedding's gradient otherwise do not on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def late(monkeypatch):
    """late(cycles): from now on a recording begins late, as on a GPU with other work. torch clears the generator's
    offset on the stream that records; the first replay drew the first step's numbers again."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(cycles: int) -> None:
        def capture_begin(self, *args, **kwargs):
            torch.cuda._sleep(cycles)  # on the stream that records
            return begin(self, *args, **kwargs)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)

    return late


def train_small(tmp_path: Path, name: str, way: str, steps: int, recipe: dict, ends: int = 0, **keys) -> Path:
    """A small run of batches of 2,048 tokens: its folder. ends: what train.main() returns."""
    recipe = {"impl": "sdpa", "dropout_p": 0.0, "documents": False, "window": None, "kind": "adamw"} | recipe
    attention = AttentionConfig(**{key: recipe.pop(key) for key in ("impl", "dropout_p", "documents", "window")})
    of_model = {"model_dropout": "dropout_p", "recomputed": "activation_checkpointing", "chunk": "chunk"}
    of_model = {field: recipe.pop(key) for key, field in of_model.items() if key in recipe}
    model = GPTConfig(n_layer=2, n_head=2, n_embd=128, context_length=128, **of_model)
    optimizer = OptimizerConfig(kind=recipe.pop("kind"), warmup_steps=10)
    never = {"eval_every": 1000, "eval_tokens": 1024, "checkpoint_every": 1000, "sample_every": 0}
    where = {"runs": str(tmp_path), "device": "cuda", "compile": way}
    cfg = train.Config(model, attention=attention, optimizer=optimizer, name=name, steps=steps, **where)
    for key, value in {**never, **recipe, **keys}.items():
        setattr(cfg, key, value)
    cfg.data.cache, cfg.wandb.mode = str(tmp_path / "cache"), "disabled"
    assert train.main(cfg) == ends
    return tmp_path / name


def what_it_was(run: Path) -> tuple[list[tuple], dict[str, Tensor]]:
    """Loss, norm and scale of each step, all validation losses, and all tensors of the last checkpoint."""
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
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recorded_run_is_the_compiled_one_bit_for_bit(tmp_path, repeatable, recipe):
    """Its evaluations too, which are recorded beside the step, and replayed from the second one on."""
    assert_same_run(*(train_small(tmp_path, way, way, 200, recipe, eval_every=25) for way in ("true", "graph")))


@pytest.mark.slow
def test_a_step_whose_recording_takes_long_draws_the_same(tmp_path, repeatable, late):
    soon = train_small(tmp_path, "soon", "graph", 20, ALL)
    late(2 * 10**9)
    assert_same_run(soon, train_small(tmp_path, "late", "graph", 20, ALL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "recipe"), [("graph", ALL), ("false", {"impl": "tiled", "dropout_p": 0.1, "model_dropout": 0.1})]
)
def test_a_run_resumed_in_its_middle_is_the_unbroken_one(tmp_path, repeatable, way, recipe):
    """The CUDA generator's state and the fused optimizer's are in the checkpoint."""
    whole = train_small(tmp_path, "whole", way, 60, recipe, checkpoint_every=31)
    there = str(whole / "checkpoints/step_000031")
    assert_same_run(whole, train_small(tmp_path, "again", way, 60, recipe, resume=there))


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
    plant_on_device(monkeypatch, 37, loss=loss)
    stopped, stop = [], train.stop_at_nan
    monkeypatch.setattr(train, "stop_at_nan", lambda run, *rest: stopped.append(run) or stop(run, *rest))
    train_small(tmp_path, "x", "graph", 100, {"kind": kind, "ema_decay": 0.9}, ends=1, checkpoint_every=36)
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
    keys = {"break_it": BreakIt("no_max", 100.0), "probe": ProbeConfig(every=1000)}
    keys["optimizer"] = OptimizerConfig(lr=1e-2, warmup_steps=10)
    train_small(tmp_path, "x", "graph", 200, {"impl": "triton"}, ends=1, **keys)
    (run,) = (path for path in tmp_path.iterdir() if path.name.startswith("x-"))
    (kept,) = (run / "faults").iterdir()
    said = capsys.readouterr().out
    assert f"step {int(kept.name[-6:])}: loss" in said
    assert int(kept.name[-6:]) > 4
    breakit.main(breakit.Config(replay=str(kept), device="cuda"))
    assert "not finite" in capsys.readouterr().out


def step_of(model: GPT, averaged: GPT, kind: str, dtype: torch.dtype, way: str, **options) -> TrainStep:
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    optimizers = build_optimizers(model, OptimizerConfig(kind=kind))
    return TrainStep(model, averaged, optimizers, scaler, torch.autocast("cuda", dtype), way, Config(**options))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled", "recorded"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_step_waits_for_the_device(way, kind):
    """torch raises an error at anything that would: a number read, memory copied that is not pinned."""
    torch.manual_seed(0)
    size = GPTConfig(n_layer=2, n_head=2, n_embd=64, context_length=64, vocab_size=257)
    model, averaged = (GPT(size, AttentionConfig("triton", dropout_p=p)).cuda() for p in (0.1, 0.0))
    step = step_of(model, averaged, kind, torch.float16, way, z_loss=1e-4)
    x, y = torch.randint(257, (2, 2, 4, 64)).pin_memory()
    losses = [step(Batch(x, y, None), 1e-3, 0.1).numbers().loss for _ in range(5)]
    torch.cuda.synchronize()
    with without_waiting():
        for _ in range(20):
            report = step(Batch(x, y, None), 1e-3, 0.1)
    assert report.numbers().loss < losses[0]
    assert report.seconds() > 0


YARN = {"position": "rope", "yarn_factor": 2.0, "yarn_original": 64, "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 1}
RECORDED = {
    "documents-window": ({"bias": False}, {"impl": "triton", "dropout_p": 0.1, "documents": True, "window": 40}),
    "rope-grouped": (YARN, {"impl": "sdpa"}),
    "local-rope": ({"position": "rope", "rope_base_local": 1e3}, {"impl": "triton", "windows": (32, None)}),
    "alibi-softcap": ({"position": "none"}, {"impl": "triton", "alibi": True, "softcap": 20.0}),
    "blocks": ({}, {"impl": "triton", "block_mask": ("x.", "xx"), "block_mask_size": 64}),
    "naive-bf16-stream": ({"residual_dtype": "autocast"}, {"impl": "naive", "dropout_p": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "attention"), RECORDED.values(), ids=RECORDED)
def test_a_recorded_evaluation_has_the_bits_of_one_from_python_and_changes_no_step(changes, attention, repeatable):
    """Its memory is that of the recorded step. Neither may find there what it needs."""
    documents = (torch.arange(128) // 50).int() if "documents" in attention else None

    def draw(generator: torch.Generator, *shape: int) -> Batch:
        x, y = torch.randint(257, (2, *shape, 128), generator=generator).pin_memory()
        return Batch(x, y, None if documents is None else documents.expand(x.shape).contiguous().pin_memory())

    losses: list[list[float]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_head": 2, "n_embd": 128, "context_length": 128, "vocab_size": 257, "dropout_p": 0.1}
        model = GPT(GPTConfig(**size, **changes), AttentionConfig(**attention)).cuda()
        step = step_of(model, model, "adamw", torch.bfloat16, "eager")
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
DECODED = [
    *(Case(1, 1500, H=3, D=64), Case(1, 1, B=16), Case(1, 2, B=16), Case(1, 1300, H=8, H_kv=2, D=128)),
    Case(1, 900, B=1, H=71, H_kv=1, D=64),
    Case(1, 700, H=6, H_kv=2, D=32, alibi=True),
    Case(1, 700, H=4, D=64, softcap=0.7, softmax_scale=0.5),
    Case(1, 2000, H=4, D=64, sigma=4.0),
    *(Case(1, 777, H=4, H_kv=2, D=D) for D in (16, 24, 80, 96, 160, 256)),
]


@pytest.mark.parametrize("splits", [None, 1, 2, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODED, ids=case_name)
def test_one_row_of_the_kernel_is_within_twice_naives_error(case, dtype, splits):
    """As in tests/test_decode.py: buffers that are longer than the keys, of which what lies past them is NaN."""
    inputs = case.inputs(dtype, "cuda")
    right, naive = oracle(inputs, case), run(inputs, case, NAIVE)
    for _ in range(3):  # tickets are drawn again, and the last program is another one
        found = decoded(inputs, case, splits=splits)
        assert_within_budget({"o": found}, {"o": naive["o"]}, {"o": right["o"]})


def test_the_decode_kernel_gives_the_same_bits_two_hundred_times():
    case = Case(1, 5000, B=3, H=8, H_kv=2, D=128)
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = decoded(inputs, case, splits=40)
    assert all(torch.equal(decoded(inputs, case, splits=40), first) for _ in range(200))


def test_keys_past_two_to_the_31_numbers_are_found():
    """The last key head of a buffer of 2**31 numbers and more has one key that has all the weight."""
    N, S, D = 9, 2**21, 128
    keys, values = randn(2, 1, 1, 1).expand(2, N, S, D).clone().zero_()
    q, k, v = randn(3, 1, N, 1, D).zero_()
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
LENGTHS = pytest.mark.parametrize("lengths", [(20,), (3, 50, 90), (70,) * 20], ids=["one", "three", "twenty"])
MODELS = pytest.mark.parametrize("changes", SAMPLED.values(), ids=SAMPLED)
SAMPLERS = {
    "likeliest": {"temperature": 0},
    "any": {},
    "top": {"top_k": 50, "top_p": 0.9},
    "penalized": {"min_p": 0.01, "repetition_penalty": 1.3},
}
DRAWN = pytest.mark.parametrize("sampler", [Sampler(**options) for options in SAMPLERS.values()], ids=SAMPLERS)


def sampled_model(changes: dict, dtype: torch.dtype = torch.bfloat16) -> GPT:
    torch.manual_seed(0)
    of_model = {name: value for name, value in changes.items() if hasattr(SAMPLE_SIZE, name)}
    attention = replace(TRITON, **{name: value for name, value in changes.items() if name not in of_model})
    model = GPT(replace(SAMPLE_SIZE, **of_model), attention).cuda().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    return model.to(dtype)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(1000, shape, device="cuda")


@contextmanager
def without_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def recordings(monkeypatch) -> list:
    """The recordings of a token's graph."""
    found, record = [], token.NextToken.record
    monkeypatch.setattr(token.NextToken, "record", lambda self: found.append(self) or record(self))
    return found


@DRAWN
@LENGTHS
@MODELS
def test_recorded_tokens_are_the_unrecorded_ones_bit_for_bit(changes, lengths, sampler, monkeypatch, recordings):
    """The likeliest ones and those that seeds draw, one for each row; the context of 256 fills up, and its last half
    runs again. With pages as without: those come while the recorded token runs, and when their memory moves it is
    recorded again. Twenty samples share a prompt, whose last page is copied."""
    model = sampled_model(changes)
    prompts = [some_tokens(length) for length in lengths]
    prompts = prompts[:1] * 20 if len(lengths) == 20 else prompts

    def tokens(page: int | None = None) -> Tensor:
        generators = [seeded(i) for i in range(len(lengths))]
        cache = KVCache(model, len(lengths), page=page)
        options = {"cache": cache, "past_context": "half"}
        return torch.stack(list(generate(model, prompts, 400, sampler, generators, **options)))

    found = tokens()
    assert len(recordings) == 1
    assert torch.equal(tokens(page=64), found)
    assert 3 <= len(recordings) <= 8
    recordings.clear()
    monkeypatch.setattr(token, "WARM_UP", 1000)
    assert torch.equal(tokens(), found)
    assert not recordings
    assert len(found.unique()) > (2 if sampler.temperature == 0 else 20)
    if len(lengths) == 20 and sampler.temperature > 0:
        assert len({tuple(row) for row in found.T.tolist()}) == 20


@DRAWN
@pytest.mark.parametrize("page", [None, 64])
def test_no_recorded_token_waits_for_the_device(page, sampler):
    """torch raises an error at anything that would, pages that come included. What is read has come with an event."""
    model = sampled_model({})
    cache, prompt = KVCache(model, 4, page=page), some_tokens(1, 60).expand(4, -1)
    tokens = generate(model, prompt, 190, sampler, seeded(0), cache=cache)
    list(islice(tokens, 10))
    with without_waiting():
        found = list(islice(tokens, 170))
    assert all(token.device.type == "cpu" and token.shape == (4,) for token in found)
    assert page is None or [len(held) for held in cache.pages.held] == [4] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 20])
@MODELS
def test_logits_of_single_tokens_are_within_twice_the_models_error(changes, rows, dtype):
    """Of the fused kernels (up to 16 sequences) and of the modules with the decode kernel."""
    text = some_tokens(rows, 120)
    with torch.no_grad():
        naive = sampled_model({**changes, "impl": "naive"}, dtype).next_logits(text)
        right = sampled_model({**changes, "impl": "naive"}, torch.float64).next_logits(text)
        model = sampled_model(changes, dtype)
        cache = KVCache(model, rows)
        run_prompts(model, list(text[:, :100]), cache)
        for t in range(100, 120):
            cache.grow()
            column = text[:, t : t + 1]
            found = model.next_logits(column, cache.move(layers_for(column)))
    right = right.cpu()
    difference, allowed = ((x.cpu().double() - right).abs().max() for x in (found, naive))
    assert difference <= 2 * (allowed + torch.finfo(dtype).eps * right.abs().max())


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_become_nan_in_a_recorded_token_end_the_sample(temperature):
    model = sampled_model({})
    tokens = generate(model, some_tokens(1, 20), 100, Sampler(temperature))
    list(islice(tokens, 10))
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    next(tokens)  # chosen before
    with pytest.raises(NotFinite):
        next(tokens)


def test_a_draw_without_a_wait_is_multinomials():
    logits = randn(5, 1000, dtype=torch.float32) * 3
    found = Sampler(1.0).choose(logits, seeded(5))
    assert torch.equal(found, torch.multinomial(logits.softmax(-1), 1, generator=seeded(5))[:, 0])


@pytest.mark.parametrize("temperature", [0, 1e-30, 0.8, 2.0])
def test_the_kernel_chooses_as_plain_pytorch(temperature):
    """choose_unseen() takes the kernel on a GPU, choose() does not."""
    logits, sampler = randn(3, 50_257, dtype=torch.float32) * 2, Sampler(temperature)
    for seed in range(100):
        found = sampler.choose_unseen(logits, seeded(seed))
        assert torch.equal(found[:-1], sampler.choose(logits, seeded(seed)))
        assert found[-1] == 0
    for where in (slice(None), slice(5000, 5001), slice(50_256, 50_257)):
        spoilt = logits.clone()
        spoilt[1, where] = math.nan
        found = sampler.choose_unseen(spoilt)
        assert found[-1] == 1
        assert ((found >= 0) & (found < 50_257)).all()  # the next token runs before the host knows


def test_a_recording_that_takes_long_does_not_set_the_draws_back(monkeypatch, late):
    model, prompts, found = sampled_model({}), [some_tokens(20)], []
    late(2 * 10**8)
    for warm_up in (token.WARM_UP, 1000):
        monkeypatch.setattr(token, "WARM_UP", warm_up)
        found.append(torch.stack(list(generate(model, prompts, 30, Sampler(), seeded(3)))))
    assert torch.equal(*found)


@pytest.mark.parametrize("past_context", ["slide", "half"])
def test_a_session_answers_as_without_a_cache(past_context, recordings):
    """One token is recorded for all turns. Answers are cut short, when the GPU is a token ahead; past the context."""
    model, answers = sampled_model(SAMPLED["rope-grouped"], torch.float32), []
    for cache in (True, False):
        session = Session(model, Sampler(0), seeded(1), cache=cache, past_context=past_context)
        text, said = list(range(30)), []
        for count in (5, 40, 1, 90, 60, 90, 30):
            said.append(list(islice(session.answer(text, 100), count)))
            text += [*said[-1][: count - count // 3], 7, 8, 9]
        answers.append(said)
    assert answers[0] == answers[1]
    assert len(recordings) == 1


def test_a_talk_that_is_recorded_once_draws_and_penalizes_as_an_unrecorded_one(monkeypatch):
    """What the graph reads and writes stays at its place: the generator, and what a penalty counts."""
    model, sampler, answers = sampled_model({}), Sampler(1.0, repetition_penalty=1.3), []
    for warm_up in (token.WARM_UP, 1000):
        monkeypatch.setattr(token, "WARM_UP", warm_up)
        session, text = Session(model, sampler, seeded(2), past_context="half"), [1]
        for turn in range(8):
            text += [turn, *session.answer([*text, turn], 40)]
        answers.append(text)
    assert answers[0] == answers[1]
    assert len(set(text)) > 100
