"""AdamW and its learning rate: what is decayed, and how the rate rises and falls."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class OptimizerConfig:
    """GPT-3's published settings (arXiv 2005.14165, appendix B); the rate follows the model's width."""

    lr: float | None = None  # the peak; None: base_rate() of the model's width
    min_lr_ratio: float = 0.1  # the rate ends at this share of the peak
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # largest norm of the gradient; 0 does not clip

    def __post_init__(self):
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer.lr={self.lr} must be finite and above 0; null takes the model's width's")
        for name in ("min_lr_ratio", "weight_decay", "warmup_steps", "grad_clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio} must be at most 1: the rate falls to its end")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is outside [0, 1); 0.9 and 0.95 are usual")


def base_rate(n_embd: int) -> float:
    """GPT-3's rate for GPT-2's width, 6e-4 at 768, scaled as one over the width (arXiv 2203.03466): 3.6e-3 at 128."""
    return 6e-4 * 768 / n_embd


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters; matrices and embeddings decay, biases and norms (one-dimensional) do not.

    Fused: one pass over the parameters instead of a dozen, on every device that torch 2.11 knows.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step`, 1 to steps: linear up over warmup_steps, then a cosine down to min_lr_ratio * lr.

    config.lr must be a number by now.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    floor = config.min_lr_ratio * config.lr
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
