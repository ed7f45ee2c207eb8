"""AdamW or Muon, their learning rate, and the moving average of the weights."""

import math
from dataclasses import dataclass

import torch

from model.gpt import GPT

# Defaults of the keys that only one optimizer or one schedule has. With the other one the key must be None.
MOMENTUM = 0.95  # of Muon, as in Keller Jordan's post and in torch
DECAY_FRACTION = 0.2  # of the steps, as in arXiv 2405.18392


@dataclass
class OptimizerConfig:
    """GPT-3's published settings (arXiv 2005.14165, appendix B). By default lr depends on the model's width."""

    kind: str = "adamw"  # adamw | muon (Muon for the blocks' matrices, AdamW for the other weights)
    lr: float | None = None  # peak learning rate; None: 6e-4 * 768 / model.n_embd
    schedule: str = "cosine"  # learning rate schedule: cosine | wsd (warm-up, stable, then linear decay)
    decay_fraction: float | None = None  # fraction of the steps in wsd's decay; None: 0.2
    min_lr_ratio: float = 0.1  # final learning rate, as a fraction of the peak
    warmup_steps: int = 100  # number of steps over which the learning rate rises to its peak
    weight_decay: float = 0.1  # weight decay of matrices and embeddings, for Muon and AdamW
    beta1: float = 0.9  # AdamW's decay rate for the mean of the gradient
    beta2: float = 0.95  # AdamW's decay rate for the mean of the squared gradient
    momentum: float | None = None  # Muon's momentum (optimizer=muon only); None: 0.95
    grad_clip: float = 1.0  # maximum norm of the gradient over all weights; 0: no clipping

    def __post_init__(self):
        for name, known in {"kind": ("adamw", "muon"), "schedule": ("cosine", "wsd")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not known; choose {' or '.join(known)}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer.lr={self.lr} must be finite and above 0; null chooses it by the model's width")
        for name in ("min_lr_ratio", "weight_decay", "warmup_steps", "grad_clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        if self.weight_decay == math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be finite; 0.1 is usual")
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio} must be at most 1; 1 keeps the rate constant")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is outside [0, 1); 0.9 and 0.95 are usual")
        if self.momentum is not None and self.kind != "muon":
            raise ValueError(f"optimizer.momentum={self.momentum} is Muon's: use optimizer=muon or optimizer.beta1")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum={self.momentum} is outside [0, 1); {MOMENTUM} is usual")
        if self.decay_fraction is not None and self.schedule != "wsd":
            raise ValueError(f"optimizer.decay_fraction={self.decay_fraction} is wsd's: use optimizer.schedule=wsd")
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            raise ValueError(f"optimizer.decay_fraction={self.decay_fraction} is outside (0, 1]; 0.2 is usual")


def base_rate(n_embd: int) -> float:
    """Peak learning rate for a width: GPT-3's 6e-4 at 768, scaled by 1 / width (arXiv 2203.03466); 3.6e-3 at 128."""
    return 6e-4 * 768 / n_embd


def build_optimizers(model: GPT, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers for the model's weights: [AdamW] or [Muon, AdamW]. Each weight belongs to exactly one.

    Matrices and embeddings have weight decay. Biases and norms (one-dimensional) do not.

    Muon (arXiv 2502.16982) takes a matrix's momentum, sets its singular values to about 1 and uses the result as the
    update. So the weak directions learn as fast as the strong ones. This is meant for matrices inside the blocks. The
    embedding and the head have one row per token and stay with AdamW, as do biases and norms.

    adjust_lr_fn="match_rms_adamw" gives Muon's updates the size of AdamW's: 0.2 per entry, for every matrix shape. So
    both use the same lr, weight decay and schedule. torch's other choice, "original", needs a learning rate of its own.

    The price of Muon is fifteen matrix products per matrix and step. With width C, that is 3.75 C / tokens_per_step of
    the step's arithmetic: 0.6 % for GPT-2 at half a million tokens, 12 % for nano. q, k and v are one matrix and are
    orthogonalised together; torch's Muon cannot split them.

    Fused AdamW makes one pass over the parameters instead of a dozen, on every device that torch 2.11 supports.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = []
    if config.kind == "muon":
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        optimizers.append(
            torch.optim.Muon(
                matrices,
                weight_decay=config.weight_decay,
                momentum=MOMENTUM if config.momentum is None else config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        taken = set(matrices)  # a Parameter's hash is its identity
        parameters = [p for p in parameters if p not in taken]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [*optimizers, torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of update `step`, from 1 to steps. config.lr must not be None.

        cosine   /```-.._        rises linearly over warmup_steps, then falls as half a cosine to min_lr_ratio * lr
        wsd      /```````\\       rises in the same way, stays at the peak, falls linearly in the last decay_fraction

    wsd reaches as low a loss as cosine (arXiv 2405.18392). It does not need to know the number of steps before its
    decay begins: a checkpoint from the stable part can be trained on to any number of steps.
    """
    assert config.lr is not None, "set_up() in train.py fills it in"
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = steps * (config.decay_fraction or DECAY_FRACTION)
        height = min(1.0, (steps - step) / decay_steps)
    else:
        progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    floor = config.min_lr_ratio * config.lr
    return floor + (config.lr - floor) * height


@torch.no_grad()
def average(averaged: GPT, model: GPT, decay: float) -> None:
    """averaged = decay * averaged + (1 - decay) * model, for every weight, in one pass.

    We do not use torch's AveragedModel: it has its own update counter and names, which we would have to save.
    """
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
