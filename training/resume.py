"""Resume a run from a checkpoint, or begin one with the weights of another.

A resumed run is the same as an uninterrupted one, bit for bit, unless the command line
changes something, or attention=auto takes another implementation on this device, which it says. A run with init_from=
is a new run: it takes the weights, the model's and attention's options, the tokenizer and break_it from its parent, and
nothing else.
"""

import shlex
import shutil
from collections.abc import Container
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml

from conf.keys import one_line
from data.loader import Loader
from data.prepare import READS, DataConfig, cache_of
from model.break_it import of_older
from parallel.processes import launcher, restarted
from parallel.shard import as_in
from training import checkpoint, config, exchange
from training.files import FILES, FOLDERS, LOCK, lock, own, read_text
from training.help import typed
from training.settings import Config
from training.state import load_optimizer_tensors, set_rng_state
from training.step import TrainStep

# The keys of model, tokenizer and attention that a resumed run may change. They change neither the weights' shapes nor
# what the model computes from them (dropout does, but only in training). All others of these groups stay the same.
MAY_DIFFER = {f"model.{key}" for key in ("vocab_size", "dropout_p", "activation_checkpointing", "chunk")} | {
    f"attention.{key}" for key in ("impl", "block_m", "block_n", "order", "autotune", "kernel", "dropout_p")
}
# What a run that begins with other weights may change too: of learned positions the first ones stay, and rope can be
# stretched over a longer context.
MAY_DIFFER_FROM_A_PARENT = MAY_DIFFER | {"model.context_length", "attention.documents"}
MAY_DIFFER_FROM_A_PARENT |= {f"model.{k}" for k in ("rope_base", "rope_base_local", "yarn_factor", "yarn_original")}

OF_A_RUN = ("name", "runs", "resume")  # each run has its own

NOT_READ = "resume= reads the checkpoint's configuration; to change a key, type it on the command line"

LARGEST_CONFIG = 1 << 16  # bytes of a config.yaml that are read, in about 2 s; a run writes about 2,000


def resumed_config(cfg: Any) -> dict | None:
    """The checkpoint's configuration, with the checkpoint's path as resume=. A resumed run has it instead of the
    defaults. With init_from=, the composed configuration with the parent's model, attention, tokenizer and break_it.
    None for a new run without a parent. ValueError if there is nothing to resume or no parent. cfg: Hydra's.

    A run that torchrun starts again resumes its own last checkpoint, if it has one."""
    if (
        restarted()
        and cfg.name
        and checkpoint.last(checkpoint.folder_of(Path(cfg.runs) / cfg.name) / checkpoint.FOLDER)
    ):
        cfg.resume, cfg.init_from = "auto", None
    if cfg.init_from is not None and cfg.resume is not None:
        raise ValueError(
            f"init_from={cfg.init_from} begins a new run, and resume={cfg.resume} goes on with one: leave one out"
        )
    if cfg.init_from is not None:
        parent = exchange.describe(place_of(cfg))
        for group, key in (name.split(".") for name in sorted(MAY_DIFFER)):
            parent[group][key] = cfg[group][key]
        parent["model"]["vocab_size"] = None  # the tokenizer's
        if cfg.model.yarn_factor > 1 and parent["model"].get("yarn_original") is None:
            parent["model"]["yarn_original"] = parent["model"]["context_length"]
        return {**cfg, **parent, "tokenizer": {"kind": "kept", "vocab_size": None}}
    if cfg.resume is None:
        return None
    path = find(cfg)
    # name and runs come from the command line and not from the checkpoint: the run may have been renamed or moved.
    theirs = {key: value for key, value in checkpoint.load_state(path)["config"].items() if key not in ("name", "runs")}
    match theirs.get("data"):
        case {"cache": str(cache), **rest}:
            theirs["data"] = {**rest, "cache": cache_of(rest.get("source"), cache, cfg.data.cache)}
    return theirs | {"resume": str(path)}


def open_checkpoint(cfg: Config) -> checkpoint.Checkpoint | None:
    """The checkpoint that cfg.resume names; None for a new run. Sets cfg.name, if it is None, to the name of the
    checkpoint's run. Raises ValueError if the checkpoint cannot be read or belongs to another model."""
    if cfg.resume is None:
        return None
    path = find(cfg)
    goes_on_there = path.parent.name == checkpoint.FOLDER and cfg.name in (None, path.parent.parent.name)
    linked = [part for part in (path, path.parent) if part.is_symlink()]
    if goes_on_there and not cfg.eval_only and linked:  # perhaps into another run, whose checkpoints would be deleted
        raise ValueError(f"{linked[0]} is a link: put the folder itself there, or make {path.parent.parent} the link")
    resumed = checkpoint.load(path)
    if path.resolve().parent.name == checkpoint.FOLDER:  # in a run's folder; a copy elsewhere gives no name
        cfg.name = cfg.name or path.resolve().parents[1].name
    refuse_another_model(resumed, cfg)
    # With data=OTHER typed, the checkpoint has brought keys that the other data does not read, and would be refused.
    theirs = config_of(resumed)["data"]
    for key in set().union(*READS.values()) - {*READS[cfg.data.source]}:
        if getattr(cfg.data, key) == theirs[key]:
            setattr(cfg.data, key, getattr(DataConfig, key))
    return resumed


def find(cfg: Any) -> Path:
    """The checkpoint that cfg.resume names: its path, or a run's last one, with eval_only the run's best one."""
    which = "best" if cfg.eval_only else "last"
    return checkpoint.find(cfg.resume, Path(cfg.runs), option="resume", name=cfg.name, which=which)


def config_of(resumed: checkpoint.Checkpoint) -> dict:
    """The checkpoint's configuration with all keys. Keys that it lacks have their defaults."""
    # Without the name: the resumed run has its own, and an older version may have allowed names that are refused now.
    return asdict(config.from_dict(Config, resumed.state["config"] | {"name": None}))


def refuse_another_model(resumed: checkpoint.Checkpoint, cfg: Config) -> None:
    """ValueError if the checkpoint's model, tokenizer, optimizer, attention or break_it differ from this run's.
    eval_only may give a model without learned positions another context."""
    free = set(MAY_DIFFER)
    if cfg.eval_only and cfg.model.position != "learned":
        free.add("model.context_length")
    begun_anew = "or start a new run without resume="
    ours = {group: asdict(getattr(cfg, group)) for group in ("model", "tokenizer", "attention")}
    ours["optimizer"] = {"kind": cfg.optimizer.kind}  # the rest may change
    for key, there, here in diff(config_of(resumed), ours, free):
        raise ValueError(
            f"{resumed.path} was trained with {key}={there}, this run has {here}; "
            f"use {key.removesuffix('.kind')}={typed(there)}, {begun_anew}"
        )
    there, here = resumed.state["broken"], cfg.break_it.label
    if {*there.split("+")} != {*here.split("+")}:  # an older version had another order
        raise ValueError(
            f"{resumed.path} was trained with break_it: {there or 'none'}, this run has {here or 'none'}; resume with "
            f"the same, {begun_anew}"
        )


def place_of(cfg: Any) -> Path:
    """The folder of the weights that cfg.init_from names."""
    return exchange.find(cfg.init_from, Path(cfg.runs), Path(cfg.data.cache))


def open_parent(cfg: Config) -> checkpoint.Checkpoint | None:
    """The weights that a new run begins with; None without init_from=, or if the run is resumed.

    Sets cfg.model.vocab_multiple to the parent's, and cfg.init_from, if it names a run of ours, to the checkpoint's
    path. Raises ValueError for what cannot be read.
    """
    if cfg.init_from is None or cfg.resume is not None:
        return None
    place = place_of(cfg)
    parent = exchange.read(place, cfg.init_from)
    cfg.model.vocab_multiple = parent.state["config"]["model"]["vocab_multiple"]
    if cfg.model.position == "learned":
        parent.model["positions.weight"] = parent.model["positions.weight"][: cfg.model.context_length]
    if parent.step:
        cfg.init_from = str(place)
    return parent


def refuse_another_parent(cfg: Config) -> None:
    """ValueError for a model or attention that differs from that of the weights which init_from= names. The context
    may: of learned positions the first ones stay, and rope can be stretched over a longer one. So may documents. Reads
    no weights. ValueError also for YaRN without weights to extend."""
    if cfg.init_from is None and cfg.resume is None and cfg.model.yarn_factor > 1:
        raise ValueError(
            f"model.yarn_factor={cfg.model.yarn_factor:g} extends weights that were trained with a shorter context; "
            "name their run with init_from="
        )
    if cfg.init_from is None or cfg.resume is not None:
        return
    parent, ours = exchange.describe(place_of(cfg)), asdict(cfg)
    theirs = {key: asdict(getattr(cfg, key)) | parent[key] for key in ("model", "attention")}
    if cfg.model.position == "learned" and cfg.model.context_length > (most := theirs["model"]["context_length"]):
        raise ValueError(
            f"model.context_length={cfg.model.context_length}: {cfg.init_from} has learned {most} positions, and none "
            f"for later tokens; only a model trained with model.position=rope can be extended; use "
            f"model.context_length={most} or less"
        )
    for key, there, here in diff(theirs, {group: ours[group] for group in theirs}, MAY_DIFFER_FROM_A_PARENT):
        raise ValueError(
            f"{key}={here} contradicts the weights of {cfg.init_from}, which have {there}: leave it out, and "
            f"{key.split('.')[0]}= too if that sets it"
        )
    if cfg.tokenizer.kind == "bpe":
        raise ValueError(f"tokenizer=bpe learns another tokenizer than that of {cfg.init_from}: leave it out")


def restore(resumed: checkpoint.Checkpoint, cfg: Config, train_step: TrainStep, loader: Loader) -> int:
    """Restores the weights and all else that training changes: the step's objects, the loader, and the states of
    torch's random generators. Returns the checkpoint's step.

    Raises ValueError for a checkpoint at the last step or whose max_minutes are over, unless something is due there,
    for one at a later step, without training state, or trained on other data.
    """
    model, scaler = train_step.model, train_step.scaler
    tensors = resumed.optimizer()
    if "batch.x" in tensors:
        raise ValueError(
            f"{resumed.path} was saved at a NaN or infinity, without the state that training needs: look into it with "
            f"python breakit.py replay={resumed.path}, or resume a checkpoint"
        )
    for network in {model, train_step.averaged}:
        shape = network.state_dict()
        network.load_state_dict({name: as_in(x, shape.get(name, x)) for name, x in resumed.model.items()})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f"{name}.trained" in tensors:  # the weights in resumed.model are then the moving average
                p.copy_(as_in(tensors[f"{name}.trained"], p))
    load_optimizer_tensors(train_step.optimizers, model.named_parameters(), tensors)
    set_rng_state(tensors)
    loader.load_state_dict(resumed.state["loader"])
    if resumed.state.get("scaler"):  # empty if the checkpoint was trained in another dtype
        scaler.load_state_dict(resumed.state["scaler"])
    state, minutes = resumed.state, resumed.state.get("seconds", 0.0) / 60  # older ones have none of these
    due = state.get("due", False)
    if resumed.step >= cfg.steps + due:
        raise ValueError(
            f"{resumed.path} is at step {resumed.step} of steps={cfg.steps}; give a larger steps= to go on"
        )
    if cfg.max_minutes and minutes >= cfg.max_minutes and state.get("ended", True) and not due:
        raise ValueError(
            f"{resumed.path} has used {minutes:.3g} minutes of max_minutes={cfg.max_minutes:g}; give a larger "
            "max_minutes= to go on"
        )
    return resumed.step


def leaves(tree: Any, key: str = "") -> dict[str, Any]:
    """Nested dictionaries as one: {dotted key: value}."""
    if not isinstance(tree, dict):
        return {key: list(tree) if isinstance(tree, tuple) else tree}
    return {k: v for name, inner in tree.items() for k, v in leaves(inner, f"{key}.{name}".lstrip(".")).items()}


def diff(theirs: dict, ours: dict, free: Container[str] = OF_A_RUN) -> list[tuple[str, Any, Any]]:
    """(dotted key, their value, ours) for each key of ours that differs and is not in `free`; ... for a missing one."""
    known = leaves(theirs)
    found = ((key, known.get(key, ...), value) for key, value in leaves(ours).items() if key not in free)
    return [(key, there, here) for key, there, here in found if there != here]


def changed(theirs: dict, ours: dict) -> list[str]:
    """The keys that differ from the checkpoint's, as "key old -> new"."""
    return [f"{key} {there} -> {here}" for key, there, here in diff(theirs, ours)]


# ValueError: a date that is none; not UTF-8; a number of 5,000 digits. LookupError, AttributeError and TypeError are
# yaml's own, for "!!int ''" and the like, and come of what is no table.
NO_CONFIGURATION: tuple[type[Exception], ...] = (yaml.YAMLError, ValueError, ArithmeticError, RecursionError, OSError)
NO_CONFIGURATION += (LookupError, AttributeError, TypeError)


def edits(file: Path, theirs: dict, ours: dict) -> str | None:
    """A warning about edited keys in a run's config.yaml, or None. The resumed run overwrites this file.

    A key counts as edited if its value is neither the checkpoint's (theirs) nor the resumed run's (ours). A file with
    aliases or very many brackets, which no run writes, is not read: nine lines of aliases can expand to billions of
    values, and the time that brackets take grows with their square. ValueError as own() raises.
    """
    if not own(file):
        return None
    try:
        text = read_text(file.parent, file.name, LARGEST_CONFIG)
        if max(map(text.count, "[{")) > 1000:
            return f"{file} has more than 1,000 brackets and is not read: it is overwritten. {NOT_READ}"
        aliases = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        written: Any = None if aliases else yaml.safe_load(text)
        now, written["break_it"] = leaves(ours), of_older(written.get("break_it", {}))
        found = [f"{key}={typed(value)}" for key, _, value in diff(theirs, written) if value != now.get(key, ...)]
    except NO_CONFIGURATION:
        return f"{file} is not a configuration any more: it is overwritten. {NOT_READ}"
    edited = one_line(f"{file} has been edited, {' '.join(found)}: it is overwritten without that. {NOT_READ}")
    return edited if found else None


def make_room(folder: Path, held: ExitStack) -> Path | None:
    """Locks runs/NAME of a run that is about to begin, until `held` is closed. If an earlier run ended there before its
    first checkpoint, moves its files to folder-unsaved-1, -2, ... The folder stays, because its lock is in it.

    Returns the new path, or None if there was nothing to move. Raises ValueError if the folder has a checkpoint, or a
    file that no run writes, or if another process holds the lock.
    """
    own(folder / checkpoint.FOLDER, folder=True)
    found = [path.name for path in folder.iterdir()] if folder.exists() else []
    foreign = sorted(name for name in found if name not in (*FILES, *FOLDERS, LOCK) and not name.startswith(".tmp-"))
    if foreign and not checkpoint.all_checkpoints(folder / checkpoint.FOLDER):  # no lock is left in a foreign folder
        raise ValueError(f"the folder {folder} has {foreign[0]}, which no run writes: use another name=")
    held.enter_context(lock(folder))
    if checkpoint.all_checkpoints(folder / checkpoint.FOLDER):  # after the lock: it may have been saved just now
        raise ValueError(f"the run {folder} exists already: continue it with resume=auto, or use another name=")
    left = [path for path in folder.iterdir() if path.name != LOCK]
    if not left:
        return None
    numbered = (folder.with_name(f"{folder.name}-unsaved-{number}") for number in count(1))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    for path in left:
        shutil.move(path, aside / path.name)  # the folder may be a link to another disk
    return aside


def refuse_newer(folder: Path, resumed: checkpoint.Checkpoint) -> None:
    """ValueError if the run has a checkpoint that another process saved after load() of ours began. Called with the
    lock."""
    steps = map(checkpoint.step_of, checkpoint.all_checkpoints(folder / checkpoint.FOLDER))
    new = [step for step in steps if step not in resumed.there]
    # Of a copy elsewhere, `there` has other checkpoints.
    if new and resumed.path.parent.resolve() == (folder / checkpoint.FOLDER).resolve():
        raise ValueError(f"another process has saved step {new[-1]} of {folder} meanwhile: run again")


def delete_later(folder: Path, step: int) -> list[str]:
    """Deletes the checkpoints of later steps and returns their names. The run makes these steps again, and Metrics has
    deleted their records: after a kill, resume=auto would continue from weights that the records do not describe.
    Damaged ones, which resume=auto passes over, stay until the next save."""
    checkpoint.clear(folder)
    deleted = []
    for path in checkpoint.all_checkpoints(folder):
        if checkpoint.step_of(path) > step:
            with suppress(ValueError):
                checkpoint.load(path)
                checkpoint.delete(path)
                deleted.append(path.name)
    return deleted


def again(cfg: Config) -> str:
    """The command that resumes this run. The rest of the configuration is in the checkpoint."""
    where = [] if cfg.runs == "runs" else [f"runs={cfg.runs}"]
    return shlex.join([*launcher(), "train.py", "resume=auto", f"name={cfg.name}", *where])
