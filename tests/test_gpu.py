"""The same cases on a CUDA GPU: pytest -m gpu. Where there is none, every test here says so and is skipped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.attention import AttentionConfig, attention
from model.dropout import keep_mask
from model.gpt import GPT, GPTConfig
from tests.reference import CASES, DTYPES, FOR_SDPA, assert_within_budget, case_name, oracle, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NAIVE, TILED = AttentionConfig("naive"), AttentionConfig("tiled", 32, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_is_within_twice_naives_error(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    reference = oracle(inputs, case)
    assert_within_budget(run(inputs, case, TILED), run(inputs, case, NAIVE), reference)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_tiled_with_keys_outside_is_within_twice_naives_error(case):
    inputs = case.inputs(torch.bfloat16, "cuda")
    found = run(inputs, case, replace(TILED, order="keys_outside"))
    assert_within_budget(found, run(inputs, case, NAIVE), oracle(inputs, case))


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


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "dropout_p"), [("naive", 0.0), ("naive", 0.2), ("sdpa", 0.0)])
def test_a_compiled_model_learns_as_the_plain_one_does(impl, dropout_p):
    """Same weights, same batch, same dropout, bf16: the losses of five updates agree to bf16's rounding."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        config = GPTConfig(n_layer=2, n_head=4, n_embd=128, context_length=256, vocab_size=257)
        model = GPT(config, AttentionConfig(impl, dropout_p=dropout_p)).cuda()
        step = torch.compile(model) if compiled else model
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
