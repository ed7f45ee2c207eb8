"""Checkpoints. A resumed run is the run that was never stopped, bit for bit.

    runs/NAME/checkpoints/step_000030/
        model.safetensors      the weights, by the model's own names; a tied weight once
        training.safetensors   the optimizers' state by the weights' names (NAME.exp_avg, ...), and the random state
        tokenizer.json         so that a checkpoint can be sampled without its data
        state.json             step, configuration, loader's position, validation loss, ...

Not torch.save, which is pickle: loading that runs code. A folder is written under another name, flushed to the disk and
renamed: a kill at any moment leaves the checkpoint before it, or the new one, complete.
"""

import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training.machine import rng_state, set_rng_state
from training.metrics import replace
from training.parallel import ALONE, Ranks, shard_like

Tensors = dict[str, Tensor]
FOLDER = "checkpoints"  # inside runs/NAME


@dataclass
class Checkpoint:
    """A loaded checkpoint, on the CPU."""

    path: Path
    step: int
    weights: Tensors
    training: Tensors
    state: dict
    tokenizer: str

    def options(self, group: str, schema: type, **changes: Any) -> Any:
        """A group of its configuration as a dataclass. ValueError for a key that this version does not have."""
        try:
            return schema(**self.state["config"][group] | changes)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is of another version of this program ({error})") from error


def open_folder(folder: Path, resumed: Checkpoint | None, ranks: Ranks = ALONE) -> FileLock:
    """Makes runs/NAME and locks it, on rank 0, until release() or the process ends. ValueError if it has a run."""
    lock = FileLock(folder / ".lock")
    if not ranks.is_main:
        return lock
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is writing {folder}: use another name=") from None
    for path in all_checkpoints(folder / FOLDER):
        if resumed is None or resumed.path.parents[1].resolve() != folder.resolve():
            raise ValueError(f"{folder} has a run: go on with resume=auto name={folder.name}, or use another name=")
        if step_of(path) > resumed.step:  # else resume=auto would go on from there, with records of other steps
            later = path.with_name(f"later-{path.name}")
            shutil.rmtree(later, ignore_errors=True)
            path.rename(later)
    return lock


def save_checkpoint(
    folder: Path, step: int, weights: Tensors, training: Tensors, state: dict, tokenizer: str, keep_last: int
) -> Path:
    """Writes folder/step_000030, completely or not at all. Keeps the newest `keep_last` and the one with the lowest
    state["val_loss"]. Of a step that was saved before only the state changes, and only to add that loss.
    OSError or SafetensorError for a full disk: earlier checkpoints are as they were."""
    final, described = folder / f"step_{step:06d}", json.dumps({"step": step, **state}, indent=1)
    temporary = folder / f".tmp-{final.name}"
    for left_by_a_kill in folder.glob(".tmp-*"):
        shutil.rmtree(left_by_a_kill)
    if folder.name == "faults":
        shutil.rmtree(final, ignore_errors=True)  # of a run that came to a NaN at this step before
    elif final.exists():
        if state["val_loss"] is not None:  # the evaluation that a signal had cut short
            replace(final / "state.json", described)
        return final
    temporary.mkdir(parents=True)
    save_file(weights, temporary / "model.safetensors")
    save_file(training, temporary / "training.safetensors")
    (temporary / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (temporary / "state.json").write_text(described, encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        flush(path)
    os.rename(temporary, final)
    flush(folder)  # before anything older is deleted
    keep = {*all_checkpoints(folder)[-keep_last:], best_checkpoint(folder)}
    for path in {*all_checkpoints(folder)} - keep:
        gone = path.rename(path.with_name(f".tmp-deleted-{path.name}"))  # a kill leaves no half under the right name
        shutil.rmtree(gone)
    return final


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk: a power cut may otherwise keep the new name and lose the bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_checkpoint(path: Path) -> Checkpoint:
    """ValueError, one line, for a folder that does not load."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        weights, training = (load_file(path / f"{name}.safetensors") for name in ("model", "training"))
        tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
        return Checkpoint(path, state.pop("step"), weights, training, state, tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} cannot be loaded ({str(error).splitlines()[0]})") from error


def find_checkpoint(named: str, runs: Path, name: str | None = None, best: bool = False) -> Checkpoint:
    """The checkpoint that is named: by auto (of the run `name`, else of the run that saved last and is not broken), by
    a run, or by a step's folder. Of a run it is the last one, or the best. Passes over one that does not load, and says
    so. One rule for all keys: what goes on with a run (resume=) takes the last, what uses its weights the best."""
    if (Path(named) / "state.json").exists():
        return load_checkpoint(Path(named))
    run = name if named == "auto" else named
    if run:
        found = all_checkpoints(runs / run / FOLDER) or all_checkpoints(Path(run) / FOLDER)
    else:
        every = (all_checkpoints(folder) for folder in runs.glob(f"**/{FOLDER}") if "BROKEN" not in str(folder))
        found = max(filter(None, every), key=lambda paths: max(path.stat().st_mtime for path in paths), default=[])
    if best and found and (lowest := best_checkpoint(found[0].parent)):
        found.append(lowest)
    for path in reversed(found):
        try:
            return load_checkpoint(path)
        except ValueError as error:
            print(f"{error}; looking for the one before it", file=sys.stderr)
    have = ", ".join(sorted(path.parent.name for path in runs.glob(f"*/{FOLDER}"))) or "none"
    raise ValueError(f"{runs} has no checkpoint of {run or 'an unbroken run'} that loads; runs that have one: {have}")


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in runs/NAME/checkpoints, by step. What has another name (a user's copy) is none."""
    return sorted((path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss; the earliest of several. None if none was evaluated."""
    losses = {}
    for path in all_checkpoints(folder):
        with suppress(OSError, ValueError, KeyError):  # of one that does not load
            losses[path] = json.loads((path / "state.json").read_text(encoding="utf-8"))["val_loss"]
    losses = {path: loss for path, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(losses, key=losses.__getitem__, default=None)


def tensors_of(model: nn.Module, optimizers: list[Optimizer], ranks: Ranks = ALONE) -> tuple[Tensors, Tensors]:
    """The weights by name, a tied one once; the optimizers' state by the weights' names, with each rank's random state.
    All ranks call this together: each may have a part. (torch's state_dict() numbers them: a new one shifts all.)"""
    states = states_of(optimizers)
    weights = {name: ranks.gather(p.detach()) for name, p in model.named_parameters()}
    training = {
        f"{name}.{key}": ranks.gather(x).contiguous()
        for name, p in model.named_parameters()
        for key, x in sorted(states[p].items())
    }
    return weights, training | {name: ranks.stack(x) for name, x in rng_state().items()}


def states_of(optimizers: list[Optimizer]) -> dict[Tensor, dict[str, Tensor]]:
    """{weight: its state}, of all optimizers."""
    return {p: each.state[p] for each in optimizers for group in each.param_groups for p in group["params"]}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizers: list[Optimizer], ranks: Ranks = ALONE) -> None:
    """Sets weights, optimizers and random state to those of the checkpoint. Last, because building draws numbers.
    With another number of processes the random state stays as it is: they draw other dropout."""
    take_weights(checkpoint, model)
    states = states_of(optimizers)
    for name, p in model.named_parameters():
        of_this = {key: x for key, x in checkpoint.training.items() if key.rpartition(".")[0] == name}
        if not of_this:  # a fault's folder has a batch in its place
            raise ValueError(f"{checkpoint.path} has no optimizer state of {name}: resume another checkpoint")
        # Copied, because the loaded tensors are views of a file. All are where the weight is: the optimizers are fused.
        for key, x in of_this.items():
            states[p][key.rpartition(".")[2]] = shard_like(x.to(p.device, copy=True), p)
    rng = {name: x for name, x in checkpoint.training.items() if name.startswith("rng.")}
    if len(rng["rng.cpu"]) == ranks.size:
        set_rng_state({name: x[ranks.rank] for name, x in rng.items()})


@torch.no_grad()
def take_weights(parent: Checkpoint, model: nn.Module) -> None:
    """The weights of a checkpoint: the one way to load them. ValueError for other names or shapes than the model's."""
    ours, theirs = dict(model.named_parameters()), parent.weights
    for name in ours | theirs:
        shapes = [tuple(of[name].shape) if name in of else "missing" for of in (theirs, ours)]
        if shapes[0] != shapes[1]:
            why = f"{name} is {shapes[0]} there and {shapes[1]} in the model"
            raise ValueError(f"{parent.path} does not fit: {why}; use another, or leave out what changes the model")
    for name, p in ours.items():
        p.copy_(shard_like(theirs[name].to(p.device), p))


def network(trained: Checkpoint, impl: str, device: torch.device) -> GPT:
    """The model with its weights, float32, in evaluation mode. impl: of attention; auto: what resolve() chooses."""
    config, break_it = trained.options("model", GPTConfig), trained.options("break_it", BreakIt)
    attention = trained.options("attention", AttentionConfig, impl=impl)
    model = GPT(config, resolve(attention, device.type, config.head_size, break_it=break_it), break_it)
    take_weights(trained, model)
    return model.to(device).eval()
