"""AdamW or Muon, their learning rate, and the moving average of the weights."""

import math
from dataclasses import dataclass

import torch

from model.gpt import GPT

# What None stands for where a key has a meaning for one choice only; with the other choice a value is refused.
MOMENTUM = 0.95  # Muon's, as Keller Jordan's post and torch have it
DECAY_FRACTION = 0.2  # of the steps, as in arXiv 2405.18392


@dataclass
class OptimizerConfig:
    """GPT-3's published settings (arXiv 2005.14165, appendix B); the rate follows the model's width."""

    kind: str = "adamw"  # adamw | muon (for the blocks' matrices, and AdamW for the rest)
    lr: float | None = None  # the peak rate; None: 6e-4 * 768 / model.n_embd, base_rate()
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, decay: the peak, then over decay_fraction a line down)
    decay_fraction: float | None = None  # wsd: share of the steps over which the rate falls; None: 0.2
    min_lr_ratio: float = 0.1  # the rate ends at this share of the peak
    warmup_steps: int = 100  # the rate rises to its peak over these
    weight_decay: float = 0.1  # pulls matrices and embeddings towards 0, under Muon and AdamW alike
    beta1: float = 0.9  # decay of AdamW's mean gradient; with muon, for what Muon does not take
    beta2: float = 0.95  # decay of AdamW's mean squared gradient
    momentum: float | None = None  # of Muon, which alone has it; None: 0.95
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0 does not clip

    def __post_init__(self):
        for name, known in {"kind": ("adamw", "muon"), "schedule": ("cosine", "wsd")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is not known; choose {' or '.join(known)}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer.lr={self.lr} must be finite and above 0; null takes the model's width's")
        for name in ("min_lr_ratio", "weight_decay", "warmup_steps", "grad_clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        if self.weight_decay == math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be finite; 0.1 is usual")
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio} must be at most 1: the rate falls to its end")
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
    """GPT-3's rate for GPT-2's width, 6e-4 at 768, scaled as one over the width (arXiv 2203.03466): 3.6e-3 at 128."""
    return 6e-4 * 768 / n_embd


def build_optimizers(model: GPT, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers that together take every weight of the model once: [AdamW], or [Muon, AdamW].

    Matrices and embeddings decay, biases and norms (one-dimensional) do not.

    Muon (arXiv 2502.16982) moves a matrix by its momentum with all singular values set to about 1, so that the weak
    directions learn as fast as the strong ones. That is meant for matrices that multiply a stream: the embedding and
    the head, whose rows are words, stay with AdamW, and so does what is no matrix. match_rms_adamw gives Muon's updates
    the size of AdamW's, 0.2 an entry whatever the matrix's shape, so that one lr, one weight decay and one schedule do
    for both; torch's other choice, "original", wants a rate of its own. The price is fifteen products of each matrix
    with itself a step: 3.75 C / tokens_per_step of the step's own arithmetic, 0.6 % of GPT-2's at half a million tokens
    and 12 % of nano's. q, k and v lie in one matrix and are orthogonalised as one (to split them takes our own Muon).

    Fused AdamW: one pass over the parameters instead of a dozen, on every device that torch 2.11 knows.
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
        taken = set(matrices)  # by identity: a Parameter hashes as the object that it is
        parameters = [p for p in parameters if p not in taken]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [*optimizers, torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step`, 1 to steps; config.lr must be a number by now.

        cosine   /```-.._        linear up over warmup_steps, then half a cosine down to min_lr_ratio * lr at the end
        wsd      /```````\\       the same rise, the peak, and over the last decay_fraction of the steps a line down

    wsd ends as low as cosine does (arXiv 2405.18392) and need not know its end before it decays: a checkpoint from the
    stable part can be taken on to any number of steps.
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
    """averaged = decay * averaged + (1 - decay) * model, weight by weight, in one pass over them.

    By hand, because torch's AveragedModel has a count of updates and names of its own, which would have to be saved.
    """
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
