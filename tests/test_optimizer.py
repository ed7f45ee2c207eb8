"""training/optimizer.py: who takes which weight, how far a step goes, and how the rate rises and falls."""

import pytest

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training.optimizer import OptimizerConfig, build_optimizers, learning_rate


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
