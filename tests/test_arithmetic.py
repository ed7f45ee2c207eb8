"""The arithmetic of training, step by step, against formulas written out here.

`plain` computes the same updates in a few lines of torch: no accumulation, no fused optimizer, no chunked loss, no
gradient scaler, and attention by naive.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import Batch
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.reference import assert_float64_right, assert_within_budget
from training.optimizer import OptimizerConfig, build_optimizers, learning_rate
from training.step import TrainStep

T, V = 32, 61
MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 1, "tie_head": False}


@dataclass
class Run:
    """A training of a small model on random tokens with a lr of 1e-2. A key's bias has no gradient but rounding, which
    AdamW would make as large as any other; so there are no biases."""

    steps: int = 4
    passes: int = 2
    dropout_p: float = 0.0
    of_model: dict = field(default_factory=dict)
    of_optimizer: dict = field(default_factory=dict)

    @property
    def rate(self) -> OptimizerConfig:
        return OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 2} | self.of_optimizer)

    def model(self, impl: str) -> GPT:
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": T, "vocab_size": V, "bias": False}
        return GPT(GPTConfig(**size | self.of_model), AttentionConfig(impl, 16, 16, dropout_p=self.dropout_p))

    def batches(self) -> list[Tensor]:
        """Tokens (passes, 2, T + 1) of each step: the next one is the last one, or one more, so that a model learns."""
        draw = torch.Generator().manual_seed(1)
        start = torch.randint(V, (self.steps, self.passes, 2, 1), generator=draw)
        return list((start + torch.randint(2, (self.steps, self.passes, 2, T + 1), generator=draw).cumsum(-1)) % V)

    def by_steps(self, impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Losses and norms, which TrainStep measures in float32, and the last weights in dtype."""
        model, rate = self.model(impl).to(dtype), self.rate
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step = TrainStep(model, build_optimizers(model, rate), scaler, nullcontext(), "eager", rate.grad_clip)
        torch.manual_seed(3)
        numbers = []
        for t, tokens in enumerate(self.batches(), 1):
            batch = Batch(tokens[..., :-1], tokens[..., 1:], None)
            numbers.append(step(batch, learning_rate(t, self.steps, rate)).wait()[:2])
        losses, norms = torch.tensor(numbers).T
        return {"losses": losses, "norms": norms, **{name: p.detach() for name, p in model.named_parameters()}}

    def plain(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The same by the formulas. In passes only where dropout draws a mask for each."""
        model, rate = self.model("naive").to(dtype), self.rate
        weights = dict(model.named_parameters())
        m, v = ({name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(2))
        losses, norms = [], []
        torch.manual_seed(3)
        for t, tokens in enumerate(self.batches(), 1):
            parts = list(tokens) if self.dropout_p else [tokens.flatten(0, 1)]
            logits = torch.cat([model(part[:, :-1]).flatten(0, 1) for part in parts])
            loss = F.cross_entropy(logits, tokens[..., 1:].flatten())
            gradients = torch.autograd.grad(loss, list(weights.values()))
            length = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scale = min(1.0, rate.grad_clip / (float(length) + 1e-6)) if rate.grad_clip else 1.0
            done = (t - rate.warmup_steps) / (self.steps - rate.warmup_steps)
            fallen = rate.min_lr_ratio + (1 - rate.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2
            lr = rate.lr * (t / rate.warmup_steps if t <= rate.warmup_steps else fallen)
            with torch.no_grad():
                for (name, p), g in zip(weights.items(), gradients, strict=True):
                    m[name] = rate.beta1 * m[name] + (1 - rate.beta1) * scale * g
                    v[name] = rate.beta2 * v[name] + (1 - rate.beta2) * (scale * g) ** 2
                    direction = m[name] / (1 - rate.beta1**t) / ((v[name] / (1 - rate.beta2**t)).sqrt() + 1e-8)
                    p.copy_(p - lr * (rate.weight_decay if p.dim() == 2 else 0.0) * p - lr * direction)
            losses.append(loss.detach())
            norms.append(length)
        last = {name: p.detach() for name, p in weights.items()}
        return {"losses": torch.stack(losses), "norms": torch.stack(norms), **last}


PROPERTIES = {
    "the gradient is clipped": Run(of_optimizer={"grad_clip": 0.1}),
    "a clip of 0 clips nothing": Run(of_optimizer={"grad_clip": 0}),
    "betas": Run(of_optimizer={"beta1": 0.6, "beta2": 0.8}),
    "matrices decay and norms do not": Run(of_optimizer={"weight_decay": 5}),
    "epsilon is 1e-8": Run(of_optimizer={"grad_clip": 1e-6}),  # entries of about 1e-8
    "the loss is divided by the passes": Run(passes=4, of_optimizer={"grad_clip": 0}),
    "the rate falls to its floor": Run(of_optimizer={"min_lr_ratio": 0.5}),
    "dropout": Run(dropout_p=0.5),
    "modern": Run(of_model=MODERN | {"position": "learned"}, dropout_p=0.2),  # rope rounds q and k to float32
}


@pytest.mark.parametrize("run", PROPERTIES.values(), ids=PROPERTIES)
def test_a_training_is_its_formulas(run):
    """Losses, norms and every weight after four steps, in float64. A weight comes from sums over 4 steps of up to 256
    tokens, of C terms each."""
    found, right = run.by_steps("tiled", torch.float64), run.plain()
    for names, terms in ((["losses", "norms"], 2 * run.passes), (found.keys() - {"losses", "norms"}, 4 * 256 * 32)):
        assert_float64_right({name: found[name] for name in names}, {name: right[name] for name in names}, terms)


RECORDED = {
    "gpt2": [3.95936955, 3.88202769, 3.80072793, 3.72681902, 3.57935396,
             3.57891226, 3.52589914, 3.50330254, 3.46955952, 3.44749855],
    "modern": [4.11485821, 4.0642278, 3.9651628, 3.86807972, 3.76653792,
               3.66640739, 3.68287515, 3.6539947, 3.6109666, 3.58494205],
}  # fmt: skip


@pytest.mark.parametrize("family", RECORDED)
def test_the_first_ten_losses_are_those_on_record(family):
    """plain() in float64 gave them from the float32 first weights. It has the model's own forward pass, first weights
    and dropout bits, so only a record notices that one of these has changed.

    Processors round differently, and ten steps of AdamW magnify that. So the rounding is measured here, as the
    difference between plain() in float32 and in float64.
    """
    run = Run(10, dropout_p=0.25, of_model=MODERN if family == "modern" else {}, of_optimizer={"lr": 5e-3})
    recorded = torch.tensor(RECORDED[family], dtype=torch.float64)
    rounding = run.plain(torch.float32)["losses"] - run.plain()["losses"]
    found = run.by_steps("tiled", torch.float32)["losses"]
    assert_within_budget(*({"losses": losses} for losses in (found, recorded + rounding, recorded)))
