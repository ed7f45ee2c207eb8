"""Checkpoints: one directory a step, complete or absent, and a resumed run that is the same run, bit for bit.

    runs/NAME/checkpoints/step_000030/
        model.safetensors       the weights to validate and sample from, by the model's own names; a tied weight once
        optimizer.safetensors   what only training needs: NAME.exp_avg, NAME.exp_avg_sq and NAME.step of AdamW or
                                NAME.momentum_buffer of Muon; NAME.trained, where the weights above are an average of
                                the ones being trained (ema_decay); rng.cpu, rng.cuda
        tokenizer.json          the tokenizer, so that a checkpoint can be sampled from without its data
        state.json              {"step", "state": what train.py gave, "alias", "sha256" of all the rest}

Why it is made so. torch.save is pickle: loading it runs code, and a stray Path or DictConfig inside stops
weights_only=True from loading it. Safetensors and JSON hold numbers and text only. torch.save to the final name is not
atomic either: one kill -9 at the wrong moment and the only checkpoint is gone. Here a step is hashed, written aside,
flushed to the disk and renamed, so a directory that can be seen is a whole one, and a disk that rots later is noticed
when it is read.

Price: one extra copy of the tensors in host memory while saving or loading, which buys that the bytes hashed are the
bytes written and the bytes verified are the bytes loaded; a second or so a GB for SHA-256.

One run writes into one folder, from one process. Readers (sample.py) may look on at any moment.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training import config

FOLDER = "checkpoints"  # inside runs/NAME
FILES = ("model.safetensors", "optimizer.safetensors", "tokenizer.json")
NAMED = 5  # runs at most that a message lists


@dataclass
class Checkpoint:
    """A loaded checkpoint. The optimizer is twice the size of the model and is read only when asked for: sampling
    never does."""

    path: Path
    step: int
    model: dict[str, Tensor]  # on the CPU, every name of the state dict that was saved, tied weights tied again
    state: dict
    tokenizer: str

    def optimizer(self) -> dict[str, Tensor]:
        """What `save` was given as optimizer, on the CPU. Raises ValueError as `load` does when the file is damaged."""
        return safetensors.torch.load(_read(self.path, ["optimizer.safetensors"])["optimizer.safetensors"])

    def network(self, attention: AttentionConfig, device: torch.device) -> GPT:
        """The model itself, on `device`, as broken as it was trained. attention: what the caller has made of
        state["config"]["attention"]. Raises ValueError as resolve() does, where that cannot run."""
        trained = self.state["config"]
        break_it = config.from_dict(BreakIt, trained["break_it"])
        attention = resolve(attention, device.type, break_it)
        network = GPT(config.from_dict(GPTConfig, trained["model"]), attention, break_it)
        network.load_state_dict(self.model)
        return network.to(device)


# --- writing --------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    step: int,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    state: dict,
    tokenizer: str,
    keep_last: int,
) -> Path:
    """Write folder/step_000030 whole or not at all, then prune.

    Kept afterwards: the newest `keep_last` and the one with the lowest finite state["val_loss"]. Checkpoints of later
    steps are deleted. They are there when a run was resumed from an earlier step, and `resume=auto` would go on from
    them instead of from this one.

    model: a state dict of any dtypes on any device, with the plain model's names (not the compiled or wrapped one's).
    optimizer: `optimizer_tensors(...) | rng_state()`.
    state: JSON's types only. NaN and infinities are written as Python's json does, so that they come back as they were.
    keep_last: at least 1.

    Returns the new directory. Raises ValueError for keep_last < 1, OSError with one clear line if the disk is full or
    cannot be written; what was there before is then untouched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would delete the checkpoint just written: give 1 or more")
    # A compiled model's names load into nothing but another compiled model.
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in model), "save the plain model's state dict"
    # What a killed run left half written, half deleted or already replaced. Nobody else writes here.
    replaced = [old for old in folder.glob(".old-*") if (folder / old.name.removeprefix(".old-")).exists()]
    for stale in [*folder.glob(".tmp-*"), *replaced]:
        shutil.rmtree(stale)

    weights, alias = _drop_aliases(model)
    files = {
        "model.safetensors": safetensors.torch.save(weights),
        "optimizer.safetensors": safetensors.torch.save({name: t.contiguous() for name, t in optimizer.items()}),
        "tokenizer.json": tokenizer.encode(),
    }
    # Through JSON and back, so that what is hashed is what will be read (a tuple is a list then, an integer key text).
    header = json.loads(json.dumps({"step": step, "state": state, "alias": alias}))
    header["sha256"] = {name: _sha256(data) for name, data in files.items()} | {"state.json": _header_hash(header)}
    files["state.json"] = json.dumps(header, indent=1).encode()

    final = folder / f"step_{step:06d}"
    temp = folder / f".tmp-{final.name}-{os.getpid()}"
    try:
        temp.mkdir(parents=True)
        for name, data in files.items():
            with open(temp / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _fsync_folder(temp)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        there = all_checkpoints(folder)
        way_out = "resume=auto; earlier checkpoints are untouched" if there else "run again; no earlier one was saved"
        raise OSError(
            error.errno,
            f"checkpoint of step {step} could not be written to {folder} ({error.strerror}): free some space and "
            f"{way_out}",
        ) from error

    # No system call that Python has swaps two directories. The old one goes to a name that all_checkpoints() still
    # takes for this step while the new one is not there, so no moment is without a checkpoint.
    aside = folder / f".old-{final.name}"
    if final.exists():
        os.rename(final, aside)
    os.rename(temp, final)
    _fsync_folder(folder)  # before anything older is deleted
    if aside.exists():
        _delete(aside)
    _prune(folder, step, keep_last)
    return final


def _drop_aliases(model: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Memory that has two names (a tied head) is stored once: ({name: contiguous tensor}, {alias: name})."""
    weights, alias = {}, {}
    owner: dict[tuple, str] = {}  # by where in memory, shape, stride, dtype and device
    for name, tensor in model.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        first = owner.setdefault(place, name) if tensor.numel() else name  # empty tensors all sit at address 0
        if first == name:
            weights[name] = tensor.contiguous()
        else:
            alias[name] = first
    return weights, alias


def _prune(folder: Path, step: int, keep_last: int) -> None:
    """Delete what save() does not keep after writing `step`."""
    found = all_checkpoints(folder)
    past = [path for path in found if _step(path) <= step]
    keep = {*past[-keep_last:], _lowest_loss(past)}
    for path in found:
        if path not in keep:
            _delete(path)


def _delete(path: Path) -> None:
    # Renamed first: a kill halfway through rmtree must not leave a directory that looks like a checkpoint.
    temp = path.with_name(f".tmp-{path.name}")
    os.rename(path, temp)
    shutil.rmtree(temp)


def _fsync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a directory; its renames are journalled
        return
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# --- reading --------------------------------------------------------------------------------------------------------


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint directory; no code from it is run.

    Raises ValueError, one line, if it is not there or damaged; for the latter the line names the next older complete
    checkpoint to use instead.
    """
    if not path.is_dir() or (_step(path) < 0 and not (path / "state.json").exists()):
        raise ValueError(f"there is no checkpoint {path}: give the path of a step_... folder of a run")
    found = _read(path, ["model.safetensors", "tokenizer.json"])
    header = found["state.json"]
    model = safetensors.torch.load(found["model.safetensors"])
    for name, first in header["alias"].items():
        model[name] = model[first]
    return Checkpoint(path, header["step"], model, header["state"], found["tokenizer.json"].decode())


def load_state(path: Path) -> dict:
    """What `save` was given as state, without reading the weights. ValueError as in `load`."""
    return _read(path, [])["state.json"]["state"]


def _read(path: Path, names: Iterable[str]) -> dict:
    """{name: verified bytes} for the files asked for, with "state.json" parsed; ValueError that names an older one."""
    try:
        return _verified(path, names)
    except ValueError as error:
        older = [p for p in all_checkpoints(path.parent) if _step(p) < _step(path) and _complete(p)]
        way_out = f"use the one before it, {older[-1]}" if older else "no older one is left, so train again"
        raise ValueError(f"checkpoint {path} is damaged ({error}): {way_out}") from error


def _verified(path: Path, names: Iterable[str]) -> dict:
    """As _read(), but the ValueError says only what is wrong with the checkpoint."""
    found = {}
    try:
        header = json.loads((path / "state.json").read_bytes())
        expected = header.pop("sha256")
        if _header_hash(header) != expected["state.json"]:
            raise ValueError("state.json is not as it was written")
        found["state.json"] = header
        for name in names:
            found[name] = (path / name).read_bytes()
            if _sha256(found[name]) != expected[name]:
                raise ValueError(f"{name} is not as it was written")
    except OSError as error:
        raise ValueError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        # Whatever a flipped bit can make of JSON: no JSON, a list, another key.
        raise ValueError("state.json cannot be read") from error
    return found


def _complete(path: Path, names: Iterable[str] = FILES) -> bool:
    try:
        _verified(path, names)
    except ValueError:
        return False
    return True


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _header_hash(header: dict) -> str:
    # Of the values, not the bytes, because the hash has to stand in the file that it protects.
    return _sha256(json.dumps(header, sort_keys=True).encode())


def lock(run: Path) -> ExitStack:
    """Hold the folder `run` until the returned object is closed: two processes in one run would delete each other's
    checkpoints and mix their metrics. The system releases the lock when its holder dies, however it dies. The lock is
    a file in the system's temporary folder, so processes on other machines do not see it.

    Raises ValueError when another process holds it.
    """
    user = os.getuid() if hasattr(os, "getuid") else ""  # Windows: a user has temporary files of their own
    key = _sha256(f"{user} {run.resolve()}".encode())[:16]
    held = ExitStack()
    try:
        held.enter_context(FileLock(Path(tempfile.gettempdir()) / f"tilegpt-{key}.lock", timeout=0))
    except Timeout as error:
        raise ValueError(f"the run {run} is being trained by another process; use another name=") from error
    return held


# --- finding --------------------------------------------------------------------------------------------------------


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in runs/NAME/checkpoints in the order of their steps; [] if there is no such folder."""
    found = {}
    # sorted(): ".old-step_..." comes before "step_...", so it counts only where a kill left it alone (see save).
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if re.fullmatch(r"(\.old-)?step_\d+", path.name):
            found[_step(path)] = path
    return [found[step] for step in sorted(found)]


def last(folder: Path) -> Path | None:
    """The checkpoint of the highest step, unverified; None if there is none."""
    return next(reversed(all_checkpoints(folder)), None)


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest finite state["val_loss"], the earliest of equals; None if none has one."""
    return _lowest_loss(all_checkpoints(folder))


def _lowest_loss(paths: list[Path]) -> Path | None:
    losses = {}
    for path in paths:
        try:
            loss = _verified(path, [])["state.json"]["state"].get("val_loss")
        except ValueError:  # damaged: whatever it was, it is not the best any more
            continue
        if loss is not None and math.isfinite(loss):
            losses[path] = loss
    return min(losses, key=losses.__getitem__, default=None)


def _step(path: Path) -> int:
    """The step that the directory's name ends in; -1 for a copy under a name of the user's own."""
    digits = re.search(r"step_(\d+)$", path.name)
    return int(digits[1]) if digits else -1


def find_resume(resume: str, runs: Path, name: str | None, option: str = "resume") -> Path:
    """The checkpoint directory that `resume=` means, or sample.py's `run=`, which is then the option to name.

    resume: "auto", or with run= "latest", is the last checkpoint of the run `name`, or with name None of the run that
        saved last; otherwise the path of a checkpoint or of a run, or the name of a run under `runs`.
    A run whose newest checkpoint is damaged gives the next complete one and says so on stderr; a checkpoint asked for
    by its own path is never exchanged for another (`load` says that it is damaged).

    Raises ValueError, one line, if there is nothing to resume.
    """
    have = {}  # run name: when it last saved
    for run in sorted(runs.iterdir()) if runs.is_dir() else []:
        if newest := last(run / FOLDER):
            have[run.name] = newest.stat().st_mtime
    if resume == ("auto" if option == "resume" else "latest"):
        if name is None and have:
            name = max(have, key=have.__getitem__)
        looked = runs / (name or "*")
    elif (Path(resume) / "state.json").is_file() or re.fullmatch(r"step_\d+", Path(resume).name):
        looked = Path(resume)
        if looked.is_dir():
            return looked
    else:
        inside = runs / resume  # the run of that name first: a folder beside it may be called the same
        looked = inside if inside.is_dir() or not Path(resume).is_dir() else Path(resume)

    folder = looked if looked.name == FOLDER else looked / FOLDER
    found = all_checkpoints(folder)
    for path in reversed(found):
        if _complete(path):
            if path != found[-1]:
                instead = f": resuming from {path} instead" if option == "resume" else ""
                print(f"checkpoint {found[-1]} is damaged{instead}", file=sys.stderr)
            return path
    problem = "no complete checkpoint among those" if found else "no checkpoint"
    newest_runs = sorted(have, key=have.__getitem__, reverse=True)[:NAMED]
    more = f" and {len(have) - NAMED} older ones" if len(have) > NAMED else ""
    way_out = f"runs that have one: {', '.join(newest_runs)}{more}" if have else "train one first: python train.py"
    if option == "resume" and not found and looked.is_dir() and looked.parent == runs:
        way_out = f"name={looked.name} without resume= begins it again; {way_out}"
    raise ValueError(f"{option}={resume}: {problem} in {looked}; {way_out}")


def find_best(run: str, runs: Path) -> Path:
    """The checkpoint of a run to look at: the one with the lowest validation loss whose weights are undamaged, or the
    last one where none has a loss. Names on stderr those that it passes over.

    run: as resume in `find_resume`, with "latest" for the run that saved last. ValueError as there.
    """
    last = find_resume(run, runs, None, option="run")
    left = all_checkpoints(last.parent)
    while path := _lowest_loss(left):
        if _complete(path, ["model.safetensors", "tokenizer.json"]):
            return path
        if _step(path) < _step(last):  # or find_resume() has said it
            print(f"checkpoint {path} is damaged", file=sys.stderr)
        left.remove(path)
    return last


# --- what goes into optimizer.safetensors ---------------------------------------------------------------------------


def optimizer_tensors(
    optimizers: list[torch.optim.Optimizer], named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """The optimizers' state as {"NAME.exp_avg": tensor, ...}, not copied; each parameter is one optimizer's.

    By name, where torch's own state_dict() counts parameters: a parameter that is added, or groups that are split in
    another way, would shift everything after it in silence. Learning rates and the like are not state: they are a
    function of the step and of the configuration.
    """
    return {
        f"{name}.{key}": value
        for name, parameter in named_parameters
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizers: list[torch.optim.Optimizer],
    named_parameters: Iterable[tuple[str, Tensor]],
    tensors: dict[str, Tensor],
) -> None:
    """Put back what optimizer_tensors took out, bit for bit; skips the entries of rng_state() and NAME.trained.

    Raises ValueError if a tensor belongs to no parameter or has another shape: a checkpoint of another model.
    """
    owner = {p: (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters = dict(named_parameters)
    for optimizer in optimizers:
        optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name == "rng" or key == "trained":
            continue
        p = parameters.get(name)
        if p is None or (key != "step" and tensor.shape != p.shape):
            ours = "has no such weight" if p is None else f"has {tuple(p.shape)} there"
            raise ValueError(
                f"the checkpoint's optimizer has {full_name} {tuple(tensor.shape)}, this model {ours}: "
                "resume with the configuration that the checkpoint was made with"
            )
        optimizer, group = owner[p]
        # The step count lives on the host, except where one fused kernel reads it: on a GPU it would cost a
        # synchronisation a parameter. A clone, because safetensors' tensors are views into one buffer of any alignment.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        optimizer.state[p][key] = tensor.to("cpu" if on_host else p.device).clone()


def rng_state() -> dict[str, Tensor]:
    """torch's default generators as {"rng.cpu": uint8 (5056,), "rng.cuda": uint8 (16,)}; the second only if CUDA is in
    use (of the current device; asking a CPU run for it would take GPU memory)."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["rng.mps"] = torch.mps.get_rng_state()
    return states


def set_rng_state(tensors: dict[str, Tensor]) -> None:
    """Put back what rng_state gave. Skips other names, and CUDA's state where there is no CUDA."""
    torch.set_rng_state(tensors["rng.cpu"].clone())
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"].clone())
    if "rng.mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["rng.mps"].clone())
