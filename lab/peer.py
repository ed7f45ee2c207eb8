"""The other side of a pair: a plain GPT-2 in torch with its own loop, or nanoGPT's model.py. lab/steps.py times it.

Shapes: B sequences, T tokens in each, C model width, H heads, D = C / H, V rows of the embedding.

PlainGPT is what one writes from GPT-2's paper and torch's documentation. With the same weights it computes the same
function as our GPT.
"""

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import Batch
from model.gpt import GPTConfig
from training.optimizer import OptimizerConfig

LR = 6e-4  # of both sides
LOOK_EVERY = 10  # steps after which the loop reads its loss, as nanoGPT's does


class PlainGPT(nn.Module):
    """GPT-2 by the book: learned positions, pre-norm blocks, a head tied to the embedding, all logits at once."""

    def __init__(self, config: GPTConfig, attention_p: float):
        super().__init__()
        V = rows_of(config)
        self.embedding = nn.Embedding(V, config.n_embd)
        self.positions = nn.Embedding(config.context_length, config.n_embd)
        self.dropout = nn.Dropout(config.dropout_p)
        self.blocks = nn.ModuleList(PlainBlock(config, attention_p) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.n_embd, V, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """int64 (B, T) and (B, T) to the logits (B, T, V) and the mean loss in nats per token."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.embedding(idx) + self.positions(positions))  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(
        self, weight_decay: float, lr: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.Optimizer:
        """AdamW in one pass over the weights; nanoGPT's name and arguments. Biases and norms do not decay."""
        tables, vectors = ([p for p in self.parameters() if (p.dim() >= 2) == wide] for wide in (True, False))
        groups = [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


class PlainBlock(nn.Module):
    """Attention and an MLP, each added to the stream (B, T, C)."""

    def __init__(self, config: GPTConfig, attention_p: float):
        super().__init__()
        C, bias = config.n_embd, config.bias
        self.n_head, self.attention_p = config.n_head, attention_p
        self.attention_norm = nn.LayerNorm(C, config.norm_eps, bias=bias)
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.out = nn.Linear(C, C, bias=bias)
        self.mlp_norm = nn.LayerNorm(C, config.norm_eps, bias=bias)
        self.up = nn.Linear(C, 4 * C, bias=bias)
        self.gelu = nn.GELU("tanh" if config.mlp == "gelu_tanh" else "none")
        self.down = nn.Linear(4 * C, C, bias=bias)
        self.dropout = nn.Dropout(config.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        qkv = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)  # each (B, T, C)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in qkv)  # (B, H, T, D)
        p = self.attention_p if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)  # (B, H, T, D)
        x = x + self.dropout(self.out(o.transpose(1, 2).flatten(2)))  # (B, T, C)
        return x + self.dropout(self.down(self.gelu(self.up(self.mlp_norm(x)))))


def plain(
    model: Any, autocast: AbstractContextManager, device: torch.device, settings: OptimizerConfig | None = None
) -> tuple[Callable[..., None], str]:
    """The step of a plain loop, and how it runs. model: a PlainGPT or nanoGPT's GPT. A step takes a batch, and may take
    a learning rate; the first one is settings.lr.

    The model is compiled on a GPU. The loop waits for the GPU only where it reads its loss.
    """
    model = model.to(device).train()
    settings = settings or OptimizerConfig(lr=LR)
    betas = (settings.beta1, settings.beta2)
    with redirect_stdout(StringIO()):  # nanoGPT's prints what it does
        optimizer = model.configure_optimizers(settings.weight_decay, settings.lr, betas, device.type)
    compiled = device.type == "cuda"
    loss_of = torch.compile(model) if compiled else model
    steps = itertools.count(1)

    def step(batch: Batch, lr: Any = settings.lr) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = (part.to(device, non_blocking=True) for part in (batch.x, batch.y))
        with autocast:
            _, loss = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if next(steps) % LOOK_EVERY == 0:
            float(loss.detach())

    return step, "compiled, sdpa" if compiled else "eager, sdpa"


def load(path: Path) -> ModuleType:
    """nanoGPT's model.py as a module. ValueError if it is not there or is something else."""
    spec = importlib.util.spec_from_file_location("peer_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"peer={path} is no Python file; give the path of nanoGPT's model.py, or leave it out")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ValueError(f"peer={path} cannot be loaded: {error}") from error
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ValueError(f"peer={path} has no GPT and GPTConfig; give the path of nanoGPT's model.py, or leave it out")
    return module


def theirs(module: ModuleType, config: GPTConfig) -> nn.Module:
    """nanoGPT's model of the same size. It has one dropout_p for all, and the exact GELU."""
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "bias")}
    sizes |= {"block_size": config.context_length, "vocab_size": rows_of(config), "dropout": config.dropout_p}
    with redirect_stdout(StringIO()):
        return module.GPT(module.GPTConfig(**sizes))


def rows_of(config: GPTConfig) -> int:
    """Rows of the embedding: the vocabulary, rounded up as in our GPT."""
    assert config.vocab_size is not None
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
