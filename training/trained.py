"""A trained model: the checkpoint that was named, and the model with its weights."""

from pathlib import Path

import torch

from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training.checkpoint import Checkpoint, best_checkpoint, find_checkpoint, load_checkpoint
from training.huggingface import find_weights


def find_trained(run: str | None, checkpoint: str, runs: Path) -> Checkpoint:
    """checkpoint: best (lowest validation loss) or last of the run `run` (None: of the one that saved last and is not
    broken), or what find_weights() takes. ValueError, one line, if there is none."""
    if checkpoint not in ("best", "last"):
        return find_weights(checkpoint, runs)
    last = find_checkpoint(run or "auto", runs)
    best = best_checkpoint(last.path.parent) if checkpoint == "best" else None
    return load_checkpoint(best) if best else last


def network(trained: Checkpoint, impl: str, device: torch.device) -> GPT:
    """The model with its weights, float32, in evaluation mode. impl: of attention; auto: what resolve() chooses."""
    groups = trained.state["config"]
    config, break_it = GPTConfig(**groups["model"]), BreakIt(**groups["break_it"])
    attention = AttentionConfig(**{**groups["attention"], "impl": impl})
    model = GPT(config, resolve(attention, device.type, config.head_size, break_it=break_it), break_it)
    model.load_state_dict(trained.weights, strict=False)  # a tied head is in the file once
    return model.to(device).eval()
