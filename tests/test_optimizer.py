"""training/optimizer.py: who takes which weight, how far a step goes, and how the rate rises and falls."""

import math
from itertools import pairwise, product

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.reference import assert_float64_right
from training.optimizer import Muon, OptimizerConfig, base_rate, build_optimizers, learning_rate


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    size = GPTConfig(n_layer=2, n_head=2, n_embd=16, context_length=8, vocab_size=200, tie_head=request.param)
    return GPT(size, AttentionConfig("naive"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_weight_is_taken_once_and_decays_if_it_has_two_dimensions(model, kind):
    groups = [g for o in build_optimizers(model, OptimizerConfig(kind=kind, weight_decay=0.25)) for g in o.param_groups]
    taken = [(id(p), group["weight_decay"]) for group in groups for p in group["params"]]
    assert sorted(taken) == sorted((id(p), 0.25 if p.dim() >= 2 else 0.0) for p in model.parameters())


def test_muon_takes_the_blocks_matrices_and_leaves_embeddings_and_head(model):
    muon, adamw = build_optimizers(model, OptimizerConfig(kind="muon", momentum=0.5, beta1=0.8))
    names = {p: name for name, p in model.named_parameters()}
    taken = {names[p] for group in muon.param_groups for p in group["params"]}
    per_block = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert taken == {f"blocks.{i}.{name}.weight" for i in range(2) for name in per_block}
    assert muon.param_groups[0]["momentum"] == 0.5
    assert adamw.param_groups[0]["betas"] == (0.8, 0.95)
    assert build_optimizers(model, OptimizerConfig(kind="muon"))[0].param_groups[0]["momentum"] == 0.95


def test_wsd_rises_stays_and_falls_in_a_line_over_the_last_fifth_by_default():
    config = OptimizerConfig(lr=0.5, schedule="wsd", decay_fraction=0.25, min_lr_ratio=0.5, warmup_steps=8)
    found = [learning_rate(step, 40, config) for step in range(1, 41)]
    assert found[:8] == [0.5 * step / 8 for step in range(1, 9)]
    assert found[8:30] == [0.5] * 22
    assert found[30:] == [0.25 + 0.25 * (10 - i) / 10 for i in range(1, 11)]
    usual = OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=0)
    assert learning_rate(80, 100, usual) == 1.0 > learning_rate(81, 100, usual)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_a_rate_it_is_by_the_width(kind):
    at_128, at_768 = base_rate(128, kind), base_rate(768, kind)
    assert at_128 == {"adamw": 3.6e-3, "muon": 7e-3}[kind]
    assert at_768 == pytest.approx(at_128 / 6)


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_no_step_has_a_rate_of_0_and_none_jumps(schedule, min_lr_ratio):
    """With min_lr_ratio=0 the last step learned nothing. Where the decay began before the warm-up had ended, the rate
    halved from one step to the next. Now a step changes it by no more than the steeper of both slopes."""
    for steps, warmup, fraction in product([*range(1, 51), 110, 200], [0, 1, 10, 100], [0.2, 1.0]):
        config = OptimizerConfig("adamw", 1.0, schedule, fraction, min_lr_ratio, warmup)
        found = [learning_rate(step, steps, config) for step in range(1, steps + 1)]
        assert min(found) > 0, (steps, config)
        decay = 1 / (fraction * steps) if schedule == "wsd" else math.pi / 2 / max(1, steps - warmup)
        steepest = max(decay, 1 / warmup if warmup else 0.0) * (1 + 1e-12)  # slopes are rounded, too
        assert all(abs(b - a) <= steepest for a, b in pairwise(found)), (steps, config)


SHAPES = [(48, 16), (16, 64), (16, 16)]


def after_steps(made: list[torch.optim.Optimizer], shape: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    """Weights and momentum of each optimizer, which has two matrices, after three steps with the same gradients."""
    generator = torch.Generator().manual_seed(2)
    first, *gradients = torch.randn(4, 2, *shape, generator=generator, dtype=torch.float64)
    found = []
    for optimizer in made:
        ps = optimizer.param_groups[0]["params"]
        for p, x in zip(ps, first, strict=True):
            p.data = x.to(p.dtype, copy=True)
        for gradient in gradients:
            for p, g in zip(ps, gradient, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"] for p in ps]
        found.append({"weights": torch.stack(list(ps)).detach(), "momenta": torch.stack(momenta)})
    return found


def two(shape: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("together", [1, 2**24])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_is_torchs(shape, together, monkeypatch):
    """In float64, where torch's has bfloat16. Its rate may be a number or, as on a GPU, a tensor."""
    monkeypatch.setattr("training.optimizer.TOGETHER", together)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # until torch 2.14
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torchs = torch.optim.Muon(two(shape), lr=0.01, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    rates = (0.01, torch.tensor(0.01, dtype=torch.float64))
    ours = [Muon(two(shape), {"lr": rate, "weight_decay": 0.3, "momentum": 0.9}) for rate in rates]
    right, found, by_tensor = after_steps([torchs, *ours], shape)
    assert_float64_right(found, right, terms=5 * sum(shape))
    assert_float64_right(by_tensor, found, terms=10)
