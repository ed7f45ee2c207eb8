"""Resume: what a run that goes on from a checkpoint does, and a new run does not.

    resumed_config(cfg)           the checkpoint's configuration takes the place of the defaults, before anything starts
    open_checkpoint(cfg)          finds and reads the checkpoint, refuses one of another model
    restore(resumed, ...)         weights, average, optimizers, loader, random numbers and scaler go on where they were
    changed(theirs, ours)         which keys differ from the checkpoint's, for the first lines
    edits(file, theirs, ours)     what someone has written into the run's config.yaml, which nothing reads
    again(cfg)                    the command line that a stopped run prints
    make_room(folder)             moves a run that ended before its first checkpoint out of a new run's way

cfg is train.py's Config. A resumed run is the same run bit for bit, unless something that matters was changed.
"""

import shlex
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml

from data.loader import Loader
from model.gpt import GPT
from training import checkpoint, config
from training.help import typed

# What a resumed run may have otherwise than its checkpoint: it changes neither the weights' shapes nor what the model
# computes from them (dropout does so in training only). Every other key of these groups has to be the same.
MAY_DIFFER = {
    "model": {"vocab_size", "dropout_p", "activation_checkpointing"},
    "tokenizer": set(),
    "attention": {"impl", "block_m", "block_n", "order", "autotune", "dropout_p"},
}

NOT_READ = "Resume reads the checkpoint's configuration; type a key on the command line to change it"

# All that a run writes into its folder.
RUNS_FILES = {"config.yaml", "metrics.jsonl", "loss.png", "samples.txt", "wandb_id.txt", "wandb", "faults"}
RUNS_FILES |= {checkpoint.FOLDER}


def resumed_config(cfg: Any) -> dict | None:
    """What a resumed run has instead of the defaults: its checkpoint's configuration, and the checkpoint's own path
    for resume=. None for a new run. ValueError where there is nothing to resume."""
    if cfg.resume is None:
        return None
    path = checkpoint.find_resume(cfg.resume, Path(cfg.runs), cfg.name)
    # Which run this is, and where it lies, is what was asked for now: a run may have been renamed or moved.
    theirs = {key: value for key, value in checkpoint.load_state(path)["config"].items() if key not in ("name", "runs")}
    return theirs | {"resume": str(path)}


def open_checkpoint(cfg: Any) -> checkpoint.Checkpoint | None:
    """The checkpoint that cfg.resume means; None for a new run. Sets cfg.name, if it is None, to the name of the run
    that the checkpoint lies in. Raises ValueError for one that cannot be read or is of another model."""
    if cfg.resume is None:
        return None
    path = checkpoint.find_resume(cfg.resume, Path(cfg.runs), cfg.name)
    resumed = checkpoint.load(path)
    if path.resolve().parent.name == checkpoint.FOLDER:  # of a run, and not a copy that lies somewhere else
        cfg.name = cfg.name or path.resolve().parents[1].name
    refuse_another_model(resumed, cfg)
    return resumed


def config_of(resumed: checkpoint.Checkpoint, schema: type) -> dict:
    """The checkpoint's configuration, by train.py's Config; a key that did not exist when it was written has its
    default."""
    # Without the name, which an older version may have allowed and which is asked for anew.
    return asdict(config.from_dict(schema, resumed.state["config"] | {"name": None}))


def refuse_another_model(resumed: checkpoint.Checkpoint, cfg: Any) -> None:
    """ValueError when the checkpoint's model, tokenizer, optimizer, attention or faults are not this run's."""
    theirs, ours, broken = config_of(resumed, type(cfg)), asdict(cfg), cfg.break_it.label
    different = {
        group: [key for key in ours[group] if key not in free and ours[group][key] != theirs[group][key]]
        for group, free in MAY_DIFFER.items()
    }
    for group in ("model", "tokenizer"):
        for key in different[group]:
            other = theirs[group][key]
            raise ValueError(
                f"{resumed.path} is of another model: {group}.{key} is {other} there and {ours[group][key]} here; "
                f"use {group}.{key}={other}, or start a new run without resume="
            )
    kind = theirs["optimizer"]["kind"]
    if kind != cfg.optimizer.kind:
        raise ValueError(
            f"{resumed.path} has the state of optimizer.kind={kind}, this run has {cfg.optimizer.kind}; "
            f"use optimizer={kind}, or start a new run without resume="
        )
    for key in different["attention"]:
        raise ValueError(
            f"{resumed.path} was trained with attention.{key}={theirs['attention'][key]}, this run has "
            f"{ours['attention'][key]}; resume with the same, or start a new run without resume="
        )
    if resumed.state["broken"] != broken:
        raise ValueError(
            f"{resumed.path} was trained with break_it: {resumed.state['broken'] or 'none'}, this run has "
            f"{broken or 'none'}; resume with the same, or start a new run without resume="
        )


def restore(
    resumed: checkpoint.Checkpoint,
    steps: int,
    model: GPT,
    averaged: GPT,
    optimizers: list[torch.optim.Optimizer],
    loader: Loader,
    scaler: torch.amp.GradScaler,
) -> int:
    """Puts the checkpoint's state back into all of them and into torch's generators; returns the step it was saved at.

    steps: where the run is to end. averaged: the moving average of the weights, or `model` itself without one.
    Raises ValueError for a checkpoint that ends there or later, that has no state to train with, or that was trained on
    other data.
    """
    tensors = resumed.optimizer()
    if "batch.x" in tensors:
        raise ValueError(
            f"{resumed.path} is a fault that was kept, without what training needs: look into it by "
            f"python breakit.py replay={resumed.path}, or resume a checkpoint"
        )
    for network in {model, averaged}:
        network.load_state_dict(resumed.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f"{name}.trained" in tensors:  # the checkpoint's own weights are an average of these
                p.copy_(tensors[f"{name}.trained"])
    checkpoint.load_optimizer_tensors(optimizers, model.named_parameters(), tensors)
    checkpoint.set_rng_state(tensors)
    loader.load_state_dict(resumed.state["loader"])
    if resumed.state.get("scaler"):  # not there in a checkpoint that was trained in another dtype
        scaler.load_state_dict(resumed.state["scaler"])
    if resumed.step >= steps:
        raise ValueError(f"{resumed.path} is at step {resumed.step} of steps={steps}; give a larger steps= to go on")
    return resumed.step


def changed(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    """What of the configuration differs from the checkpoint's, as "key old -> new"; not where the run lies."""
    changes = []
    for key, value in ours.items():
        old, path = theirs[key], prefix + key
        if isinstance(value, dict):
            changes += changed(old, value, f"{path}.")
        elif value != old and path not in ("name", "runs", "resume"):
            changes.append(f"{path} {old} -> {value}")
    return changes


def edits(file: Path, theirs: dict, ours: dict) -> str | None:
    """Says which keys of a run's config.yaml have been edited: those whose value is neither the checkpoint's nor the
    resumed run's. None where none has. The file is about to be written anew."""
    if not file.exists():
        return None
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        written = None
    if not isinstance(written, dict):
        return f"{file} is no configuration any more: it is written anew. {NOT_READ}"
    known, now = leaves(theirs), leaves(ours)
    found = [
        f"{key}={typed(value)}"
        for key, value in leaves(written).items()
        if key not in ("name", "runs", "resume") and value not in (known.get(key), now.get(key))
    ]
    return f"{file} has been edited, {' '.join(found)}: it is written anew without that. {NOT_READ}" if found else None


def leaves(tree: Any, key: str = "") -> dict[str, Any]:
    """{dotted key: value} of dictionaries in one another."""
    if not isinstance(tree, dict):
        return {key: tree}
    return {k: v for name, inner in tree.items() for k, v in leaves(inner, f"{key}.{name}".lstrip(".")).items()}


def make_room(folder: Path) -> Path | None:
    """Moves what a run left that ended before its first checkpoint to folder-unsaved-1, -2, ..., and returns that
    path; None where there is nothing to move. The name is free then, and nothing is lost.

    folder: runs/NAME of a run that is about to begin. Raises ValueError where a checkpoint lies in it, or anything that
    no run makes.
    """
    found = [path.name for path in folder.iterdir()] if folder.exists() else []
    if checkpoint.all_checkpoints(folder / checkpoint.FOLDER):
        raise ValueError(f"the run {folder} exists already: go on with it by resume=auto, or use another name=")
    if foreign := sorted(name for name in found if name not in RUNS_FILES and not name.startswith(".tmp-")):
        raise ValueError(f"the folder {folder} exists already and has {foreign[0]}, not of a run: use another name=")
    if not found:
        return None
    aside = (folder.with_name(f"{folder.name}-unsaved-{number}") for number in count(1))
    return folder.rename(next(path for path in aside if not path.exists()))


def again(cfg: Any) -> str:
    """The command line that goes on with this run; the checkpoint has the rest of its configuration."""
    where = [] if cfg.runs == "runs" else [f"runs={cfg.runs}"]
    return shlex.join(["python", "train.py", "resume=auto", f"name={cfg.name}", *where])
