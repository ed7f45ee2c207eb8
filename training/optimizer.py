"""AdamW or Muon, and their learning rate."""

import math
from dataclasses import dataclass
from inspect import unwrap

import torch
from torch import Tensor
from torch.optim import Optimizer

from conf.keys import key
from model.gpt import GPT
from training.parallel import as_part, full_tensor, shard_like, to_local

TOGETHER = 2**24  # elements of the matrices that Muon updates together


@dataclass
class OptimizerConfig:
    """GPT-3's published settings (arXiv 2005.14165, appendix B). By default lr depends on the model's width."""

    kind: str = key("adamw", among="adamw | muon (Muon for the blocks' matrices, AdamW for the other weights)")
    lr: float | None = key(None, "peak learning rate", above=0, note="null: by width; adamw 6e-4, muon 1.2e-3 at 768")
    schedule: str = key("cosine", "learning rate schedule", among="cosine | wsd (warm-up, stable, then linear decay)")
    decay_fraction: float = key(0.2, "fraction of the steps in wsd's decay (arXiv 2405.18392)", above=0, most=1)
    min_lr_ratio: float = key(0.1, "final learning rate as a fraction of the peak; 1: a constant rate", least=0, most=1)
    warmup_steps: int | None = key(None, "steps over which the learning rate rises to its peak", least=0,
                                   note="null: 100, at most a fifth of all")  # fmt: skip
    weight_decay: float = key(0.1, "weight decay of matrices and embeddings, for Muon and AdamW", least=0)
    beta1: float = key(0.9, "AdamW's decay rate for the mean of the gradient", least=0, below=1)
    beta2: float = key(0.95, "AdamW's decay rate for the mean of the squared gradient", least=0, below=1)
    momentum: float = key(0.95, "Muon's momentum", least=0, below=1)
    grad_clip: float = key(1.0, "maximum norm of the gradient over all weights; 0: no clipping", least=0)


def base_rate(n_embd: int, kind: str) -> float:
    """By 1 / width (arXiv 2203.03466). AdamW: GPT-3's 6e-4 at 768. Muon: 7e-3 at 128, the best tried for that model."""
    return (7e-3 * 128 if kind == "muon" else 6e-4 * 768) / n_embd


def build_optimizers(model: GPT, config: OptimizerConfig) -> list[Optimizer]:
    """[AdamW] or [Muon, AdamW]. Muon takes the matrices of the blocks (q, k and v are one). It is not meant for the
    embedding and the head, which have one row per token. Biases and norms have no weight decay."""
    on_gpu = model.embedding.weight.is_cuda  # then the rate is a tensor there, so that a recorded step reads it anew
    lr = torch.zeros((), device=model.embedding.weight.device) if on_gpu else 0.0
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if config.kind == "muon" else []
    taken = set(matrices)  # a Parameter's hash is its identity
    others = [p for p in model.parameters() if p not in taken]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=lr, betas=(config.beta1, config.beta2), fused=True, capturable=on_gpu)
    muon = {"lr": lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    return [Muon(matrices, muon), adamw] if matrices else [adamw]


class NotCompiled(Optimizer):
    """Adds parameters without torch's guard against compiling that, which imports torch._dynamo for a second or two."""

    add_param_group = unwrap(Optimizer.add_param_group)


class AdamW(NotCompiled, torch.optim.AdamW):
    """torch's, whose step is without the guard too. unwrap() takes its no_grad() as well, so that is added again."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class Muon(NotCompiled):
    """Muon (arXiv 2502.16982) takes a matrix's momentum, sets its singular values to about 1 and uses the result as the
    update. So the weak directions learn as fast as the strong ones. Its updates have the size of AdamW's, 0.2 per
    entry, so both use the same lr, weight decay and schedule.

    Bit for bit as torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), which reads the learning rate on the host and has
    no found_inf. A step here never waits for the device: lr may be a tensor there, and so may found_inf, which leaves
    the step out if it is 1 (as in torch's fused AdamW). Matrices of one shape are updated together, because launching
    the products of one small matrix on a GPU takes longer than computing them. TOGETHER bounds the memory. With FSDP2
    all ranks gather each matrix and compute all of its update."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            matrices: dict[torch.Size, list[Tensor]] = {}  # of a shape
            for p in (p for p in group["params"] if p.grad is not None):
                matrices.setdefault(p.shape, []).append(p)
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            for shape, ps in matrices.items():
                most = max(1, TOGETHER // shape.numel())
                for i in range(0, len(ps), most):
                    self.update(ps[i : i + most], **{key: group[key] for key in ("lr", "weight_decay", "momentum")})

    def update(self, ps: list[Tensor], lr: float | Tensor, weight_decay: float, momentum: float) -> None:
        """One update of matrices of one shape."""
        weights, grads = [to_local(p) for p in ps], [to_local(p.grad) for p in ps]
        old_buffers = [to_local(self.state[p]["momentum_buffer"]) for p in ps]
        buffers = torch._foreach_lerp(old_buffers, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's momentum: one step ahead
        rate = lr * (0.2 * math.sqrt(max(ps[0].shape)))
        whole = torch.stack([full_tensor(as_part(x, p)) for x, p in zip(ahead, ps, strict=True)])
        made = orthogonal(whole).to(whole.dtype)
        made, alpha = (made * rate, -1.0) if isinstance(rate, Tensor) else (made, -rate)
        new = torch._foreach_mul(weights, 1 - lr * weight_decay)
        torch._foreach_add_(new, [to_local(shard_like(x, p)) for x, p in zip(made, ps, strict=True)], alpha=alpha)
        skip = made.new_zeros((), dtype=torch.bool) if self.found_inf is None else self.found_inf == 1
        for old, now in zip([*old_buffers, *weights], [*buffers, *new], strict=True):
            torch.where(skip, old, now, out=old)


def orthogonal(x: Tensor) -> Tensor:
    """The matrices x (number, rows, columns) with singular values set to about 1 (0.5 to 1.5), in bfloat16 or float32.

    Five Newton-Schulz iterations s -> a s + b s^3 + c s^5 on all singular values s at once (Keller Jordan's post on
    Muon, 2024, which found the coefficients). They need only matrix products."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16() if x.is_cuda else x.float()  # many CPUs multiply bfloat16 ten times as slowly (docs/findings.md)
    tall = x.shape[1] > x.shape[2]
    y = y.mT if tall else y  # the smaller Gram matrix
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def learning_rate(step: float, steps: int, config: OptimizerConfig) -> float:
    """The learning rate at `step` of the schedule, from 1 to steps. config has no None.

        cosine   /```-.._        rises linearly over warmup_steps, then falls as half a cosine to min_lr_ratio * lr
        wsd      /```````\\       rises in the same way, stays at the peak, falls linearly in the last decay_fraction

    wsd does not need to know the number of steps before its decay begins (arXiv 2405.18392): a checkpoint from the
    stable part can be trained on to any step. If the decay begins within the warm-up, the lower rate counts."""
    assert config.lr is not None, "fill_in() sets it"
    assert config.warmup_steps is not None, "fill_in() sets it"
    end = steps if config.min_lr_ratio else steps + 1  # the last step would learn nothing at a rate of 0
    if config.schedule == "wsd":
        height = min(1.0, (end - step) / (steps * config.decay_fraction))
    else:
        progress = (step - config.warmup_steps) / max(1, end - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * max(0.0, progress)))
    floor = config.min_lr_ratio * config.lr
    decayed = floor + (config.lr - floor) * height
    return min(decayed, config.lr * step / config.warmup_steps) if step < config.warmup_steps else decayed
