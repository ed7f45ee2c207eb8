"""What only a CUDA GPU shows: pytest -m gpu. That also runs the tests of other files that have a GPU's implementations
among their rows. With -n 8 the kernels are compiled side by side."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

pytest.importorskip("triton", reason="triton is made for Linux only")

import train
from data.loader import Batch
from kernels import launch
from kernels.decode import decode
from kernels.loss import loss_in_place
from model import generate as generate_module
from model import loss as loss_module
from model.attention import AttentionConfig, attention
from model.cache import KVCache
from model.dropout import keep_mask
from model.generate import Sampler, generate
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE, next_token_loss
from tests.implementations import CUDA, HALVES, NAIVE, TRITON
from tests.reference import CASES, DTYPES, SEED, Case, assert_within_budget, case_name, oracle, run
from tests.runs import assert_same_run
from tests.test_loss import of, problem
from training.optimizer import OptimizerConfig, build_optimizers
from training.step import TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def peak_bytes(action) -> int:
    """Peak memory of action() beyond what was allocated before. The first call compiles."""
    action()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(params=["hopper", "portable"])
def kernels(request, monkeypatch) -> str:
    """Which kernels triton runs, where those for Hopper can run at all."""
    if request.param == "portable":
        monkeypatch.setattr(launch, "is_hopper", lambda device: False)
    elif not launch.is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    return request.param


@pytest.fixture
def alone() -> Iterator[None]:
    """Tests that take up to 40 GiB run one at a time, also with -n, and give the memory back."""
    with FileLock(Path(tempfile.gettempdir(), "tilegpt-large-tests.lock")):
        yield
        torch.cuda.empty_cache()


LARGE = pytest.mark.usefixtures("alone")


@pytest.fixture
def repeatable():
    """torch's own operations add in a fixed order. On a GPU, those of an embedding's gradient otherwise do not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def late(monkeypatch) -> None:
    """A recording begins late, as on a GPU with other work. torch sets the generator's offset to 0 on the stream that
    records. The first replay once drew the first step's numbers again, because it did not wait for that."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(self, *args, **kwargs):
        torch.cuda._sleep(2 * 10**8)  # clock cycles, on the stream that records
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)


# --- attention: values ------------------------------------------------------------------------------------------------

# Each case with one dtype; the other two are slow, because each has three kernels to compile. tests/test_flash.py has
# the same cases in tiles of other sizes.
IN_TIME = [(case, DTYPES[(i + 1) % 3]) for i, case in enumerate(CASES)]
LATER = [pytest.param(*given, marks=pytest.mark.slow) for given in product(CASES, DTYPES) if given not in IN_TIME]


@pytest.mark.parametrize(("case", "dtype"), IN_TIME + LATER, ids=str)
def test_in_the_gpus_own_tiles_all_cases_are_within_twice_naives_error(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), oracle(inputs, case))


WIDE = [
    Case(1100, B=1, H=4, H_kv=2, D=64), Case(1100, B=1, H=4, H_kv=2, D=128), Case(300, 2500, B=1, D=64),
    Case(300, 2500, B=1, D=128, causal=False), Case(400, 250, D=64, sigma=3.0), Case(400, 250, D=128, sigma=3.0),
    Case(700, 900, H=4, H_kv=1, D=64, dropout_p=0.2), Case(700, 900, H=4, H_kv=1, D=128, dropout_p=0.2),
    Case(900, D=64, window=300), Case(900, D=128, window=300), Case(900, 1300, D=64, window=600, dropout_p=0.1),
    Case(900, D=128, documents=(100, 0, 513, 287), dropout_p=0.1),
    Case(600, 700, H=4, H_kv=2, D=64, documents="shuffled"), Case(900, 33000, B=1, H=3, D=128),
    Case(600, 33000, B=1, H=3, D=128, dropout_p=0.1),  # tiles of keys in waves
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", WIDE, ids=case_name)
def test_what_the_hopper_kernels_compute_is_within_twice_naives_error(case, dtype, kernels):
    """Against naive in float64: the oracle would take a minute."""
    inputs = case.inputs(dtype, "cuda")
    right = run({name: x.double() for name, x in inputs.items()}, case, NAIVE)
    assert_within_budget(run(inputs, case, TRITON), run(inputs, case, NAIVE), right)


@pytest.mark.parametrize("D", [64, 128])
def test_forward_dv_dq_and_dk_have_the_dropout_mask_of_the_definition_bit_for_bit(D, kernels):
    """With q = k = 0 every weight is 1 / T_k. A one-hot v, do, k or q picks D columns or rows of the mask at a time. In
    dq and dk, ds = p (Z - delta) is positive where the weight is kept."""
    B, H, T, T_k, config, seed = 2, 3, 3 * D, 5 * D, replace(TRITON, dropout_p=0.3), torch.tensor(SEED, device="cuda")
    keep = keep_mask(seed, B * H, range(T), range(T_k), 0.3).view(B, H, T, T_k)
    zero_q, zero_k = randn(B, H, T, D).zero_(), randn(B, H, T_k, D).zero_()
    first = torch.eye(D, device="cuda")[0].bfloat16()

    def results(q, k, v, do) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o = attention(q, k, v, config, causal=False, seed=seed)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    for start in range(0, T_k, D):
        hot, part = torch.zeros_like(zero_k), keep[..., start : start + D]
        hot[:, :, start : start + D] = torch.eye(D, device="cuda")
        assert torch.equal(results(zero_q, zero_k, hot, zero_q)[0] > 0, part)
        assert torch.equal(results(zero_q, hot, zero_k + first, zero_q + first)[1] > 0, part)
    for start in range(0, T, D):
        hot, part = torch.zeros_like(zero_q), keep[:, :, start : start + D].mT
        hot[:, :, start : start + D] = torch.eye(D, device="cuda")
        assert torch.equal(results(zero_q, zero_k, zero_k, hot)[3] > 0, part)
        assert torch.equal(results(hot, zero_k, zero_k + first, zero_q + first)[2] > 0, part)


# --- attention: memory, order and streams -----------------------------------------------------------------------------


@LARGE
def test_memory_is_that_of_inputs_and_gradients(kernels):
    """At T = 65,536 one head's weights would take 8 GiB. The backward for Hopper sums dq in float32."""
    q, k, v, do = (randn(1, 12, 65_536, 64).requires_grad_() for _ in range(4))
    taken = peak_bytes(lambda: torch.autograd.grad(attention(q, k, v, TRITON), (q, k, v), do))
    sums = 4 * q.numel() if kernels == "hopper" else 0
    assert taken <= (4 + 0.8) * q.nbytes + sums  # o and three gradients; a tenth of q, k, v, do and these for the rest


def with_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, TRITON)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


@LARGE
def test_rows_that_begin_past_two_to_the_31_numbers_are_found(kernels):
    """A packed projection's row stride of 2,304 passes 32 bits at 932,067 tokens; here 2**21 does at 1,024."""
    wide = torch.empty(1, 1100, 2**21, dtype=BF16, device="cuda")[..., : 4 * 2 * 64].normal_()
    far = wide.unflatten(-1, (8, 64)).transpose(1, 2).split(2, dim=1)
    assert far[0].stride(2) * 1100 > 2**31
    near = [x.contiguous() for x in far]
    for found, right in zip(with_gradients(*far), with_gradients(*near), strict=True):
        assert torch.equal(found, right)


@LARGE
def test_sequences_past_two_to_the_31_numbers_have_the_bits_of_one_alone(kernels):
    x = randn(2800, 12, 1024, 64)
    assert x.numel() > 2**31
    whole, alone = with_gradients(x, x, x, x), with_gradients(*[x[-1:]] * 4)
    for found, right in zip(whole, alone, strict=True):
        assert torch.equal(found[-1:], right)


SAME = [Case(300, 33000, B=1, H=3, D=128), *(Case(T, B=2, H=12, H_kv=4, D=D, dropout_p=p) for T, D, p in
        ((1500, 64, 0.0), (1500, 128, 0.0), (2500, 64, 0.0), (1500, 64, 0.1), (1500, 128, 0.1)))]  # fmt: skip


@pytest.mark.parametrize("case", SAME, ids=case_name)
def test_the_same_bits_two_hundred_times_beside_other_work(case, kernels):
    """A race between copies and products would show as other bits, and so would tiles of keys that add to dq in another
    order. A second stream takes processors and memory, so programs begin late."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    first, beside, x = run(inputs, case, TRITON), torch.cuda.Stream(), randn(4096, 4096)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for i in range(200):
        if i % 10 == 0:
            with torch.cuda.stream(beside):
                x = (x @ x).clamp(-1, 1)
        held = torch.empty(i % 7 * 2**20, device="cuda").fill_(torch.nan)  # so that results and sums lie elsewhere
        again = run(inputs, case, TRITON)
        for name in first:
            same &= (again[name] == first[name]).all()
        del held, again
    assert same


def test_a_replayed_cuda_graph_draws_a_new_mask_when_the_seed_changes(kernels):
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
    assert torch.equal(o, attention(q, k, v, config, seed=torch.tensor(2, device="cuda")))


def test_triton_runs_on_the_current_stream(kernels):
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


# --- the loss ---------------------------------------------------------------------------------------------------------


@LARGE
def test_the_loss_needs_no_more_memory_than_a_chunks_logits_beside_its_gradients():
    x, weight, targets = problem(2 * loss_module.KERNEL_CHUNK + 100, torch.bfloat16, 50_304, 64)
    taken = peak_bytes(lambda: of(next_token_loss(x, weight, targets), x, weight))
    assert taken <= 1.05 * loss_module.KERNEL_CHUNK * 50_304 * 2


@LARGE
def test_rows_of_logits_past_two_to_the_31_numbers_are_found():
    N, V = 16_400, 131_072
    logits = torch.zeros(N, V, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 20
    losses = loss_in_place(logits, torch.full((N,), 5, device="cuda"), IGNORE, True)
    assert (losses[:-1] == losses[0]).all()
    assert losses[-1] < 1e-3 < losses[0]
    assert (logits[:, 5] < 0).all()
    assert (logits[:, 6] > 0).all()


# --- training ---------------------------------------------------------------------------------------------------------

SIZE = GPTConfig(n_layer=2, n_head=2, n_embd=128, context_length=128, vocab_size=257)
BF16, DROPPING = torch.bfloat16, AttentionConfig("triton", dropout_p=0.1)
MODERN = {"position": "rope", "n_kv_head": 1, "norm": "rmsnorm", "mlp": "swiglu", "bigram_rows": 99, "mix_x0": True}
BLOCKS = AttentionConfig("triton", block_mask=["x.", "xx"], block_mask_size=64, softcap=20.0)
RECIPES = {
    "dropout": (DROPPING, {"dropout_p": 0.1}, "adamw", BF16),
    "documents-window-muon": (replace(DROPPING, documents=True, window=40), MODERN, "muon", BF16),
    "blocks-softcap-fp16": (BLOCKS, {}, "adamw", torch.float16),
    "sdpa-selective": (AttentionConfig("sdpa"), {"recompute": "selective"}, "adamw", BF16),
    "naive-bf16-stream": (AttentionConfig("naive", dropout_p=0.1), {"residual_dtype": "autocast"}, "adamw", BF16),
}


def step_of(mode: str, config: AttentionConfig, of_model: dict, kind: str, dtype: torch.dtype = BF16) -> TrainStep:
    torch.manual_seed(0)
    torch.compiler.reset()  # the steps of earlier tests count to the limit of recompilations
    model = GPT(replace(SIZE, **of_model), config).cuda()
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    optimizers = build_optimizers(model, OptimizerConfig(kind=kind))
    return TrainStep(model, optimizers, scaler, torch.autocast("cuda", dtype), mode)


def batches(count: int, documents: bool = False) -> Iterator[Batch]:
    """Of two passes with four windows each, in pinned memory."""
    generator = torch.Generator().manual_seed(1)
    numbers = (torch.arange(128) // 50).int().expand(2, 4, 128).contiguous().pin_memory() if documents else None
    for _ in range(count):
        x, y = torch.randint(257, (2, 2, 4, 128), generator=generator)
        yield Batch(x.pin_memory(), y.pin_memory(), numbers)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recorded_step_has_the_bits_of_the_eager_one(recipe, repeatable, late):
    """Loss, norm and scale of ten steps, and all weights. Its blocks are not compiled here."""
    found = []
    for mode in ("eager", "graph"):
        step = step_of("eager", *recipe)
        step.mode = mode
        numbers = [step(batch, 1e-3).wait() for batch in batches(10, recipe[0].documents)]
        assert (step.graph is None) == (mode == "eager")
        found.append((repr(numbers), list(step.model.parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
def test_a_compiled_step_learns_as_the_eager_one_and_recorded_it_has_the_same_bits(impl, repeatable):
    losses: dict[str, Tensor] = {}
    for mode in ("eager", "compiled", "graph"):
        step = step_of(mode, AttentionConfig(impl), {}, "adamw")
        losses[mode] = torch.tensor([step(batch, 1e-3).wait().loss for batch in list(batches(1)) * 6])
    assert losses["eager"][-1] < losses["eager"][0] - 0.05
    assert (losses["eager"] - losses["compiled"]).abs().max() <= torch.finfo(torch.bfloat16).eps * losses["eager"][0]
    assert torch.equal(losses["compiled"], losses["graph"])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_step_waits_for_the_device(mode, kind):
    """torch raises an error at anything for which the host waits: a number read, memory copied that is not pinned."""
    step = step_of("eager", DROPPING, {"dropout_p": 0.1}, kind, torch.float16)
    step.mode, (batch,) = mode, batches(1)
    first, *_ = (step(batch, 1e-3).wait().loss for _ in range(5))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            report = step(batch, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.wait().loss < first


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(small_run, call, tmp_path, repeatable):
    """The CUDA generator's state and the fused optimizer's are in the checkpoint. The step is recorded in both."""
    typed = "device=cuda compile=graph dtype=bf16 attention=triton attention.dropout_p=0.1 model.dropout_p=0.1"
    typed += " optimizer=muon eval_every=5 checkpoint_every=5 optimizer.min_lr_ratio=1"
    for name in ("name=whole steps=10", "name=parts steps=5"):
        torch.compiler.reset()
        small_run(f"{name} {typed}")
    torch.compiler.reset()
    ended = call(train, "resume=auto", "name=parts", f"runs={tmp_path}", "steps=10")
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLED = {
    "learned": ({}, {}),
    "rope-grouped": (MODERN | {"n_kv_head": 2, "bias": False}, {}),
    "windows-alibi-softcap": ({"position": "none"}, {"windows": [100, None], "alibi": True, "softcap": 5.0}),
}
MODELS = pytest.mark.parametrize("changes", SAMPLED.values(), ids=SAMPLED)


def sampled(changes: tuple[dict, dict], dtype: torch.dtype, impl: str = "triton") -> GPT:
    """A model whose weights are large enough that every token and position counts."""
    torch.manual_seed(0)
    of_model, options = changes
    size = GPTConfig(n_layer=2, n_head=4, n_embd=256, context_length=256, vocab_size=1000, **of_model)
    model = GPT(size, AttentionConfig(impl, **options)).cuda().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1) if weight.any() else weight.normal_(std=0.01)
    return model.to(dtype)


def written(model: GPT, idx: Tensor, count: int, sampler: Sampler, cache: bool = True) -> Tensor:
    return torch.cat(list(generate(model, idx, count, sampler, torch.Generator("cuda").manual_seed(5), cache)), dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@MODELS
@torch.no_grad()
def test_logits_of_single_tokens_are_within_twice_naives_error(changes, dtype):
    text, model = torch.randint(1000, (3, 120), device="cuda"), sampled(changes, dtype)
    naive, right = (sampled(changes, x, "naive")(text) for x in (dtype, torch.float64))
    cache = KVCache(model, 3)
    for T in (100, *[1] * 20):
        last = cache.length + T - 1
        found = model(text[:, cache.length : last + 1], sequence=cache)[:, -1]
        assert_within_budget({"logits": found}, {"logits": naive[:, last]}, {"logits": right[:, last]})
        cache.advance(T)


@MODELS
def test_the_likeliest_text_is_the_same_with_and_without_the_cache(changes):
    """In float32, and past the context of 256."""
    model, prompts = sampled(changes, torch.float32), torch.randint(1000, (3, 60), device="cuda")
    found = [written(model, prompts, 400, Sampler(0), cache) for cache in (True, False)]
    assert torch.equal(*found)
    assert len(found[0].unique()) > 10


@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(1.0, top_k=50, top_p=0.9)], ids=["likeliest", "drawn"])
@MODELS
def test_recorded_tokens_are_the_unrecorded_ones_bit_for_bit(changes, sampler, monkeypatch, late):
    model, prompts, found = sampled(changes, torch.bfloat16), torch.randint(1000, (3, 60), device="cuda"), []
    for warm_up in (generate_module.WARM_UP, 1000):
        monkeypatch.setattr(generate_module, "WARM_UP", warm_up)
        found.append(written(model, prompts, 300, sampler))
    assert torch.equal(*found)


@LARGE
def test_cached_keys_past_two_to_the_31_numbers_are_found():
    """The last key head of a cache of more than 2**31 numbers has one key with all the weight."""
    N, S, D = 9, 2**21, 128
    keys, values = (torch.zeros(1, N, S, D, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    q, k, v = torch.zeros(3, 1, N, 1, D, dtype=torch.bfloat16, device="cuda")
    q[..., 0], keys[0, -1, S - 2, 0], values[0, -1, S - 2, 3] = 1, 100, 7
    v[:, -1, :, 5] = 3
    o = decode(q, k, v, keys, values, torch.tensor([S - 1], device="cuda"), 1.0, None, None, None)
    assert (o[0, -1, 0, 3], values[0, -1, S - 1, 5]) == (7, 3)
