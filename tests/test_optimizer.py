"""training/optimizer.py: who takes which weight, how far a step goes, and how the rate rises and falls."""

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training.optimizer import OptimizerConfig, build_optimizers, learning_rate

KINDS = ["adamw", "muon"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    torch.manual_seed(0)
    size = GPTConfig(n_layer=2, n_head=2, n_embd=16, context_length=8, vocab_size=31, tie_head=request.param)
    return GPT(size, AttentionConfig("naive"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_taken_once(model, kind):
    groups = [group for o in build_optimizers(model, OptimizerConfig(kind=kind)) for group in o.param_groups]
    taken = [id(p) for group in groups for p in group["params"]]
    assert sorted(taken) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_two_dimensions_decays_and_nothing_else(model, kind):
    for optimizer in build_optimizers(model, OptimizerConfig(kind=kind, weight_decay=0.25)):
        for group in optimizer.param_groups:
            assert {p.dim() >= 2 for p in group["params"]} <= {group["weight_decay"] == 0.25}
            assert group["weight_decay"] in (0.0, 0.25)


def test_muon_takes_the_blocks_matrices_and_leaves_embeddings_and_head(model):
    muon, adamw = build_optimizers(model, OptimizerConfig(kind="muon", momentum=0.5, beta1=0.8))
    names = {p: name for name, p in model.named_parameters()}
    taken = {names[p] for group in muon.param_groups for p in group["params"]}
    per_block = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert taken == {f"blocks.{i}.{name}.weight" for i in range(2) for name in per_block}
    assert muon.param_groups[0]["momentum"] == 0.5
    assert adamw.param_groups[0]["betas"] == (0.8, 0.95)


def test_muons_step_is_of_adamws_size_whatever_the_matrixs_shape(model):
    """AdamW's steps have about 0.2 lr an entry (arXiv 2502.16982, section 2.2). Of a matrix whose singular values are 1
    Muon's have exactly that; torch's iteration, as its source says, leaves them between 0.5 and 1.5."""
    muon, _ = build_optimizers(model, OptimizerConfig(kind="muon", weight_decay=0.0))
    generator = torch.Generator().manual_seed(0)
    (group,) = muon.param_groups
    group["lr"] = 0.5
    before = [p.detach().clone() for p in group["params"]]
    for p in group["params"]:
        p.grad = torch.randn(p.shape, generator=generator)
    muon.step()
    for p, old in zip(group["params"], before, strict=True):
        size = float((p.detach() - old).square().mean().sqrt())
        assert 0.5 * 0.2 * 0.5 < size < 1.5 * 0.2 * 0.5
        p.grad = None
        p.data.copy_(old)


# --- the rate -------------------------------------------------------------------------------------------------------


def test_wsd_rises_stays_and_falls_in_a_line():
    config = OptimizerConfig(lr=0.5, schedule="wsd", decay_fraction=0.25, min_lr_ratio=0.5, warmup_steps=8)
    found = [learning_rate(step, 40, config) for step in range(1, 41)]
    assert found[:8] == [0.5 * step / 8 for step in range(1, 9)]
    assert found[8:30] == [0.5] * 22
    assert found[30:] == [0.25 + 0.25 * (10 - i) / 10 for i in range(1, 11)]


def test_wsd_decays_over_the_last_fifth_by_default():
    found = [learning_rate(step, 100, OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=0)) for step in (80, 81)]
    assert found[0] == 1.0 > found[1]


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"momentum": 0.9}, "optimizer.momentum=0.9 is Muon's: use optimizer=muon or optimizer.beta1"),
        ({"decay_fraction": 0.1}, "optimizer.decay_fraction=0.1 is wsd's: use optimizer.schedule=wsd"),
    ],
)
def test_a_key_that_would_mean_nothing_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**keys)
