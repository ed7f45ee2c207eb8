"""Writes checkpoints (training/checkpoint.py) in a thread, while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.shard import gathered, is_shared, local
from training import checkpoint
from training.checkpoint import place
from training.machine import out_of_memory_as


class Writer:
    """Writes checkpoints in a thread, one at a time. Where weights are shared among ranks, each copies its parts, and
    its thread sends them to the first one's.

    Every method raises OSError as save() does, and where memory runs out, once for a checkpoint that could not be
    written.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.written: Future[None] | None = None  # the last one
        self.group: Any = None  # of all ranks' threads, where weights are shared
        self.copies: dict[str, Tensor] = {}  # kept: new memory takes many times as long to fill

    def save(self, folder: Path, step: int, *, model: dict[str, Tensor], optimizer: dict[str, Tensor], **rest) -> Path:
        """Copies the tensors, and returns the folder that save() will have written when wait() returns. The arguments
        are those of save()."""
        self._begin(model, optimizer, partial(checkpoint.save, folder, step, **rest))
        return folder / checkpoint.folder_name(step)

    def give(self, model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Copies this rank's parts of shared tensors, for the first one, which saves the same names."""
        self._begin(model, optimizer, None)

    def _begin(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], write: Callable[..., Any] | None) -> None:
        self.wait()
        groups = (model, optimizer)
        if self.group is None and any(is_shared(x) for x in model.values()):
            self.group = torch.distributed.new_group(backend="gloo")  # beside that of the steps; all ranks call this
        with memory_enough():
            copies = [on_host(tensors, self.copies) for tensors in groups]
        shapes = [{name: x.shape for name, x in tensors.items()} for tensors in groups]
        self.written = self.thread.submit(gather_and_write, copies, shapes, self.group, write)

    def raise_error(self) -> None:
        """Raises the error of a checkpoint that could not be written, if that is known already."""
        if self.written and self.written.done():
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is complete."""
        written, self.written = self.written, None
        if written:
            with memory_enough():
                written.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.thread.shutdown()
        self.wait()


def memory_enough() -> AbstractContextManager:
    """Turns an error of missing memory into an OSError. Else train.py would advise a smaller batch, as for a step."""
    return out_of_memory_as(
        lambda: OSError(
            "the machine's memory ran out while a checkpoint was written, which copies the weights and the optimizer's "
            "state; free some memory, and resume the run or start it again"
        )
    )


def on_host(tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, of shared ones this rank's parts, in the CPU's memory. A tensor with two names stays one.
    kept: earlier copies by name, which are overwritten; the new ones are added."""
    copies: dict[tuple, Tensor] = {}
    for name, tensor in tensors.items():
        if place(tensor) not in copies:
            x = local(tensor.detach())
            if name not in kept or (kept[name].shape, kept[name].dtype) != (x.shape, x.dtype):
                kept[name] = torch.empty(x.shape, dtype=x.dtype)
            copies[place(tensor)] = kept[name].copy_(x)
    return {name: copies[place(tensor)] for name, tensor in tensors.items()}


def gather_and_write(
    copies: list[dict[str, Tensor]], shapes: list[dict[str, torch.Size]], group: Any, write: Callable[..., Any] | None
) -> None:
    """What a Writer's thread does. write: save() with all arguments but the tensors; None if another rank writes."""
    for parts, whole_shapes in zip(copies, shapes, strict=True):
        wholes: dict[int, Tensor] = {}  # by the identity of the part
        for name, part in parts.items():
            if id(part) not in wholes:
                wholes[id(part)] = gathered(part, whole_shapes[name], group)
        parts.update({name: wholes[id(part)] for name, part in parts.items()})
    if write is not None:
        model, optimizer = copies
        write(model=model, optimizer=optimizer)
