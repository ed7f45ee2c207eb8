"""A trained model: the checkpoint that was named, and the model with its weights."""

from dataclasses import replace
from pathlib import Path

import torch

from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training.checkpoint import Checkpoint, find_checkpoint, take_weights
from training.huggingface import find_weights


def find_trained(run: str | None, checkpoint: str, runs: Path) -> Checkpoint:
    """checkpoint: best or last, of the run `run` (None: find_checkpoint()'s auto), or what find_weights() takes."""
    if checkpoint in ("best", "last"):
        return find_checkpoint(run or "auto", runs, best=checkpoint == "best")
    return find_weights(checkpoint, runs)


def network(trained: Checkpoint, impl: str, device: torch.device) -> GPT:
    """The model with its weights, float32, in evaluation mode. impl: of attention; auto: what resolve() chooses."""
    config, break_it = trained.options("model", GPTConfig), trained.options("break_it", BreakIt)
    attention = replace(trained.options("attention", AttentionConfig), impl=impl)
    model = GPT(config, resolve(attention, device.type, config.head_size, break_it=break_it), break_it)
    take_weights(trained, model)
    return model.to(device).eval()
