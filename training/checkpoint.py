"""Checkpoints: one folder per step, complete or absent. A resumed run is the same as an uninterrupted one, bit for bit.

    runs/NAME/checkpoints/step_000030/
        model.safetensors       the weights for validation and sampling, by the model's own names; a tied weight once
        optimizer.safetensors   what only training needs: NAME.exp_avg, NAME.exp_avg_sq and NAME.step of AdamW;
                                NAME.momentum_buffer of Muon; with ema_decay, NAME.trained: the weights being trained,
                                since model.safetensors then has their average; rng.cpu, rng.cuda
        tokenizer.json          the tokenizer, so that a checkpoint can be sampled without the training data
        state.json              {"step", "state": given by train.py, "alias": tied weights, "sha256" of all the rest}

Why not torch.save? It is pickle, and loading it runs code. Safetensors and JSON hold only numbers and text. Also, it is
not atomic: a kill -9 while it overwrites a file destroys the only checkpoint. Here a step is hashed, written under a
temporary name, flushed to the disk and then renamed. So a visible checkpoint is complete, and the hashes detect a file
that the disk has damaged later.

The price: copies of the tensors in host memory, one from the first save on and one while loading, and about a second
per GB for SHA-256. (Where weights are shared, the first rank has a second copy while it saves.) Training waits for the
first copy only (training/writer.py). Only one process writes; others may read at any time.
"""

import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.prepare import sync_and_hash
from model.abilities import resolve, why_not
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from parallel.shard import is_shared
from training import config, contents, files
from training.files import printable, remove, sync_folder
from training.machine import device_type

FOLDER = "checkpoints"  # inside runs/NAME
FILES = ("model.safetensors", "optimizer.safetensors", "tokenizer.json")
MOST = {"state.json": 1 << 24, "tokenizer.json": 1 << 27}  # bytes that are read; of tensors, what their header says
NAMED = 5  # a message lists at most so many runs or checkpoints


@dataclass
class Checkpoint:
    """A loaded checkpoint. The optimizer's state, twice the size of the model, is read only by optimizer()."""

    path: Path
    step: int
    model: dict[str, Tensor]  # the saved state dict, on the CPU; tied weights are one tensor again
    state: dict
    tokenizer: str
    there: tuple[int, ...] = ()  # the steps of the checkpoints beside it when it was read, its own too

    def optimizer(self) -> dict[str, Tensor]:
        """The tensors that `save` got as optimizer, on the CPU. Raises ValueError as `load` does for a damaged file."""
        return safetensors.torch.load(_read(self.path, ["optimizer.safetensors"])["optimizer.safetensors"])

    def network(self, attention: AttentionConfig, device: torch.device, context_length: int | None = None) -> GPT:
        """The model on `device`, with the break_it settings of its training. attention: state["config"]["attention"],
        perhaps changed by the caller; see attention_on(). context_length: another than in training, for a model without
        learned positions. Raises ValueError as resolve() does if that attention cannot run."""
        trained = self.state["config"]
        break_it = config.from_dict(BreakIt, trained["break_it"])
        attention = self.attention_on(device, attention, break_it)
        sizes = trained["model"] | ({"context_length": context_length} if context_length else {})
        network = RecomputingGPT(config.from_dict(GPTConfig, sizes), attention, break_it)
        network.load_state_dict(self.model)
        return network.to(device)

    def attention_on(self, device: torch.device, attention: AttentionConfig, break_it: BreakIt) -> AttentionConfig:
        """attention, resolved. auto is triton where it can run, if the run had triton: whether triton or sdpa is faster
        in a training step is known in training alone. So the numbers measured after a training are those measured in
        it, and options of triton's are not refused."""
        had_triton = self.state.get("about", {}).get("attention") == "triton"
        on_gpu = device.type == "cuda" and not why_not("triton", {}, device)
        if attention.impl == "auto" and had_triton and on_gpu and attention.order == AttentionConfig.order:
            attention = replace(attention, impl="triton")
        return resolve(attention, device.type, break_it)

    def other_attention(self, asked: AttentionConfig, model: GPT) -> str | None:
        """A line for the user if attention=auto, as asked, takes another implementation here than the run had. model:
        with the attention taken. In evaluation mode it drops nothing."""
        about, taken = self.state.get("about", {}), model.attention_config
        had = about.get("attention")  # weights from elsewhere do not say
        if asked.impl != "auto" or had in (None, taken.impl):
            return None
        # sdpa draws masks of its own. The others draw them from a seed, which a GPU draws otherwise than a CPU.
        moved = device_type(about["device"]) != model.embedding.weight.device.type
        other_masks = taken.dropout_p > 0 and (moved or "sdpa" in (had, taken.impl))
        other_masks |= model.config.dropout_p > 0 and moved
        numbers = "the numbers differ by rounding"
        if self.state["broken"]:
            numbers = "the tiles may have other sizes, and then broken attention computes other numbers"
        elif model.training and other_masks:
            numbers = "the dropout masks differ, so the numbers differ by more than rounding"
        return f"attention=auto takes {taken.impl} here, and the run had {config.one_line(had)}: {numbers}"

    def other_text(self, validation: str) -> str | None:
        """A line for the user if the run had another validation text. validation: the fingerprint() of this one."""
        if self.state.get("validation", validation) == validation:  # older checkpoints do not have it
            return None
        return "the validation text has changed since the checkpoint: do not compare the losses before and after"


# --- writing --------------------------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    return f"step_{step:06d}"


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
    """Writes folder/step_000030, completely or not at all, and deletes old checkpoints.

    Keeps the newest `keep_last` checkpoints and the one with the lowest finite state["val_loss"], and none of later
    steps: `resume=auto` must not continue from them.

    model: a state dict of any dtypes on any device, with the plain model's names. optimizer: `optimizer_tensors(...) |
    rng_state()`. state: JSON's types only; Python's json has NaN and infinity too. keep_last: 1 or more.

    Returns the new folder. Raises OSError with one clear line if the disk is full or cannot be written, or if the run's
    folder was deleted. In that case the earlier checkpoints are unchanged.
    """
    # A compiled model adds a prefix to every name, and only another compiled model could load them.
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in model), "save the plain model's state dict"
    clear(folder)

    weights, alias = _drop_aliases(model)
    final = folder / folder_name(step)
    temp = folder / f".tmp-{final.name}-{os.getpid()}"
    try:
        if folder.is_symlink():
            files.own(folder, folder=True)
        folder.mkdir(exist_ok=True)
        _write(temp, {"step": step, "state": state, "alias": alias}, weights, optimizer, tokenizer)
    except (OSError, SafetensorError) as error:  # SafetensorError: a full disk, for example
        shutil.rmtree(temp, ignore_errors=True)
        there = all_checkpoints(folder)
        way_out = "resume=auto; earlier checkpoints are untouched" if there else "run again; no earlier one was saved"
        code = _errno(error)
        why = f"checkpoint of step {step} could not be written to {folder} ({os.strerror(code)})"
        raise OSError(code, f"{why}: free some space and {way_out}") from error

    # Python has no call that swaps two folders. We first rename the old one to .old-step_... all_checkpoints() accepts
    # this name while the new folder is missing, so the step always has a checkpoint.
    aside = folder / f".old-{final.name}"
    if os.path.lexists(final):  # a link too, wherever it leads
        os.rename(final, aside)
    os.rename(temp, final)
    sync_folder(folder)  # before anything older is deleted
    if os.path.lexists(aside):
        delete(aside)
    _prune(folder, step, keep_last)
    return final


def clear(folder: Path) -> None:
    """Deletes what a killed run left: folders half written, half deleted or replaced. No other process uses them."""
    for stale in [*folder.glob(".tmp-*"), *folder.glob(".old-*")]:
        if stale.name.startswith(".tmp-") or (folder / stale.name.removeprefix(".old-")).exists():
            remove(stale)


def _write(temp: Path, header: dict, weights: dict[str, Tensor], optimizer: dict[str, Tensor], tokenizer: str) -> None:
    """Writes a new folder, and flushes it to the disk."""
    # Through JSON and back, so that we hash what will be read: JSON turns tuples into lists and integer keys into text.
    header = json.loads(json.dumps(header))
    temp.mkdir()
    save_file(weights, temp / "model.safetensors")
    save_file({name: t.contiguous() for name, t in optimizer.items()}, temp / "optimizer.safetensors")
    (temp / "tokenizer.json").write_bytes(tokenizer.encode())
    header["sha256"] = {name: sync_and_hash(temp / name) for name in FILES} | {"state.json": _header_hash(header)}
    (temp / "state.json").write_text(json.dumps(header, indent=1), encoding="utf-8")
    sync_and_hash(temp / "state.json")
    sync_folder(temp)


def _errno(error: OSError | SafetensorError) -> int:
    """The system's number of an error. Safetensors has it in its text: "os error 28", in older versions "code: 28"."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    found = re.search(r"(?:os error|code:) (\d+)", str(error))
    return int(found[1]) if found else errno.EIO


def place(tensor: Tensor) -> tuple:
    """The same for two tensors if they are the same numbers in memory. All empty tensors have address 0."""
    if is_shared(tensor):  # a rank's part may be empty
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _drop_aliases(model: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Stores a tensor with two names (a tied head) once. Returns ({name: contiguous tensor}, {alias: name})."""
    weights, alias = {}, {}
    owner: dict[tuple, str] = {}  # {place: the first name}
    for name, tensor in model.items():
        first = owner.setdefault(place(tensor), name) if tensor.numel() else name
        if first == name:
            weights[name] = tensor.contiguous()
        else:
            alias[name] = first
    return weights, alias


def _prune(folder: Path, step: int, keep_last: int) -> None:
    """Delete the checkpoints that save() does not keep after writing `step`."""
    found = all_checkpoints(folder)
    past = [path for path in found if step_of(path) <= step]
    # A checkpoint with a damaged state.json may be the best, so it is kept for repair.
    damaged = (path for path in past if (path / "model.safetensors").is_file() and _loss(path) == -math.inf)
    keep = {*past[-keep_last:], best(folder, step), *damaged}
    for path in found:
        if path not in keep:
            delete(path)


def delete(path: Path) -> None:
    """Deletes a checkpoint. Renames it first: what a kill leaves of the folder must not look like a checkpoint."""
    temp = path.with_name(f".tmp-{path.name}")
    os.rename(path, temp)
    remove(temp)


# --- reading --------------------------------------------------------------------------------------------------------


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint folder. No code from it is run.

    Raises ValueError, one line, if the checkpoint is missing, damaged or not what a run writes. The line then names the
    newest complete checkpoint before it.
    """
    _refuse_missing(path)
    there = tuple(map(step_of, all_checkpoints(path.parent)))
    found = _read(path, ["model.safetensors", "tokenizer.json"])
    header = found["state.json"]
    model = safetensors.torch.load(found["model.safetensors"])
    for name, first in header["alias"].items():
        model[name] = model[first]
    return Checkpoint(path, header["step"], model, header["state"], found["tokenizer.json"].decode(), there)


def load_state(path: Path) -> dict:
    """The state that `save` got, without reading the weights. ValueError as in `load`."""
    _refuse_missing(path)
    return _read(path, [])["state.json"]["state"]


def _refuse_missing(path: Path) -> None:
    """ValueError if there is no checkpoint. It names those of the same run."""
    if not path.is_dir() or (step_of(path) < 0 and not (path / "state.json").exists()):
        there = [found.name for found in reversed(all_checkpoints(path.parent))]
        way_out = f"its run has {_first(there)}" if there else "give the path of a step_... folder of a run"
        raise ValueError(f"there is no checkpoint {path}: {way_out}")


def _first(names: list[str]) -> str:
    """The first NAMED of these names, the newest, and how many older ones there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} older ones" if len(names) > NAMED else "")


def _read(path: Path, names: Iterable[str]) -> dict:
    """{name: verified bytes} of these files, with "state.json" parsed. The ValueError names an older checkpoint."""
    try:
        return _verified(path, names)
    except ValueError as error:
        if not path.is_dir():  # it was there: load() has looked
            raise ValueError(
                f"checkpoint {path} was deleted by the run that wrote it, which goes on: run again"
            ) from error
        before = (p for p in reversed(all_checkpoints(path.parent)) if step_of(p) < step_of(path))
        older = next((p for p in before if not _wrong(p)), None)
        way_out = f"use the one before it, {older}" if older else "no older one is left, so train again"
        raise ValueError(f"checkpoint {path} is damaged ({error}): {way_out}") from error


def _verified(path: Path, names: Iterable[str]) -> dict:
    """As _read(), but the ValueError says only what is wrong."""
    found: dict[str, Any] = {}
    try:
        header = files.read_json(path, "state.json", MOST["state.json"])
        expected = header.pop("sha256", None)
        if not isinstance(expected, dict) or _header_hash(header) != expected.get("state.json"):
            raise ValueError("state.json is not as it was written")
        contents.rename_older(header)
        contents.check_header(header)
        if step_of(path) not in (-1, header["step"]):
            raise ValueError(f"the folder's name says step {step_of(path)}, its state.json step {header['step']}")
        found["state.json"] = header
        for name in names:
            if name != "tokenizer.json":
                size = files.inside(path, name).stat().st_size
                contents.check_tensors(name, header, files.described(path, name), size)
            found[name] = files.read_bytes(path, name, MOST.get(name, sys.maxsize))
            if hashlib.sha256(found[name]).hexdigest() != expected.get(name):
                raise ValueError(f"{name} is not as it was written")
            if name == "tokenizer.json":
                contents.check_tokenizer(header, found[name].decode())
    except OSError as error:
        raise ValueError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except ValueError as error:  # the caller's message names the folder
        raise ValueError(str(error).replace(f"{path}{os.sep}", "").replace(f"{path} has", "it has")) from error
    return found


def _wrong(path: Path, names: Iterable[str] = FILES) -> str:
    """What is wrong with a checkpoint; "" if these files are complete."""
    try:
        _verified(path, names)
    except ValueError as error:
        return str(error)
    return ""


def _header_hash(header: dict) -> str:
    # We hash the values and not the file's bytes, because the file contains this hash.
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


# --- finding --------------------------------------------------------------------------------------------------------


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in runs/NAME/checkpoints, by step; [] if there is no such folder."""
    found = {}
    # sorted() puts ".old-step_..." before "step_...", so it is used only if a kill left no "step_..." (see save).
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if re.fullmatch(r"(\.old-)?step_\d{1,19}", path.name):
            found[step_of(path)] = path
    return [found[step] for step in sorted(found)]


def last(folder: Path) -> Path | None:
    """The checkpoint with the highest step, not verified; None if there is none."""
    return next(reversed(all_checkpoints(folder)), None)


def best(folder: Path, until: float = math.inf) -> Path | None:
    """The checkpoint with the lowest finite state["val_loss"], of those up to a step; the earliest if several are
    equal, None without any."""
    past = [path for path in all_checkpoints(folder) if step_of(path) <= until]
    losses = {path: loss for path in past if math.isfinite(loss := _loss(path))}
    return min(losses, key=losses.__getitem__, default=None)


def _loss(path: Path) -> float:
    """A checkpoint's validation loss; inf if it has none, -inf if its state is damaged."""
    try:
        loss = _verified(path, [])["state.json"]["state"].get("val_loss")
    except ValueError:
        return -math.inf
    return loss if loss is not None and math.isfinite(loss) else math.inf


def step_of(path: Path) -> int:
    """The step in the folder's name; -1 for a copy under another name."""
    digits = re.search(r"step_(\d+)$", path.name)
    return int(digits[1]) if digits else -1


def folder_of(inside: Path) -> Path:
    """runs/NAME; if it has no checkpoint, its broken run: train.py adds -BROKEN-FAILURE to the name. runs/NAME also if
    there are several, because the name does not say which."""
    if all_checkpoints(inside / FOLDER):
        return inside
    broken = [path for path in inside.parent.glob(f"{glob.escape(inside.name)}-BROKEN-*") if last(path / FOLDER)]
    return broken[0] if len(broken) == 1 else inside


def find(named: str, runs: Path, *, option: str, name: str | None = None, which: str = "last") -> Path:
    """The checkpoint that resume=, run= or init_from= (the option) names. ValueError, one line, if there is none.

    named: the path of a checkpoint or of a run, the name of a run in `runs`, or "auto" ("latest" for run=): the run
    `name`; if that is None, the run that saved last, and for resume= no broken one, if there is another. which: of its
    checkpoints the last one; the best one, or the last one if none has a loss; or step_000010. Passes over a damaged
    checkpoint, and names it on stderr. One given by path or step is returned, for load() to say.
    """
    have = {}  # run name: when it last saved
    for run in sorted(runs.iterdir()) if runs.is_dir() else []:
        with suppress(OSError):  # a folder that may not be read
            if newest := last(run / FOLDER):
                have[run.name] = newest.lstat().st_mtime
    if (option, named) in (("resume", "auto"), ("run", "latest")):
        if name is None and have:
            sound = [run for run in have if "-BROKEN-" not in run or option == "run"]
            name, newest_run = (max(them or have, key=have.__getitem__) for them in (sound, have))
            if name != newest_run:
                print(printable(f"passing over {newest_run}, which is broken (resume={newest_run})"), file=sys.stderr)
        looked = folder_of(runs / (name or "*"))
    elif (Path(named) / "state.json").is_file() or re.fullmatch(r"step_\d+", Path(named).name):
        looked = Path(named)
        if looked.is_dir() or all_checkpoints(looked.parent):
            return looked
    else:
        inside = folder_of(runs / named)  # first: the working directory may have a folder of that name too
        looked = inside if inside.is_dir() or not Path(named).is_dir() else Path(named)
    folder = looked if looked.name == FOLDER else looked / FOLDER
    found = all_checkpoints(folder)
    if found and which not in ("last", "best"):
        return folder / which
    # One whose state is damaged may be the best, so it comes first.
    losses = {path: _loss(path) if which == "best" else math.inf for path in found}
    order = sorted(
        found, key=lambda path: (losses[path], step_of(path) if math.isfinite(losses[path]) else -step_of(path))
    )
    damaged, whole = [], None
    for path in order:
        if not (wrong := _wrong(path, FILES if option == "resume" else ("model.safetensors", "tokenizer.json"))):
            whole = path
            break
        damaged.append(config.one_line(f"checkpoint {path} is damaged ({wrong})"))
    instead = f": resuming from {whole} instead" if whole and option == "resume" and which == "last" else ""
    for line in damaged:
        print(printable(f"{line}{instead}"), file=sys.stderr)
    if whole:
        return whole
    problem = "no complete checkpoint among those" if found else "no checkpoint"
    if looked.parent == runs:
        have.pop(looked.name, None)  # it has no complete one
    others = sorted(have, key=have.__getitem__, reverse=True)
    way_out = f"runs that have one: {_first(others)}" if have else "train one first: python train.py"
    if option == "resume" and not found and looked.is_dir() and looked.parent == runs:
        way_out = f"name={looked.name} without resume= begins it again; {way_out}"
    raise ValueError(f"{option}={named}: {problem} in {looked}; {way_out}")
