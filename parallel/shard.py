"""The weights of a model shared among the ranks (parallel.shard=true), by torch's FSDP2 (fully_shard).

Each of N ranks keeps an N-th of every weight, its gradient and AdamW's state: some of its rows (the first axis). Before
a block computes, all ranks get its whole weights, and drop them after it: once in the forward, and again in the
backward. Then the gradients are added up, each row for the rank that has it. Embedding, positions, last norm and head
are one more such group, whole until the loss is computed.

A tensor that is not shared goes through local(), whole() and as_in() as it is.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from model.gpt import GPT, without_values


def shard(model: GPT, size: int, device: torch.device) -> None:
    """Shares the weights among all `size` ranks, in place. They move to `device` block by block, so that the model may
    be larger than that has memory for. Gradients become sums over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # The stream, which blocks hand on, is never changed in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (size,))
    for unit in (*model.blocks, model):
        # By default the last group's weights stay after a forward. Then an average's would be old ones the next time.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # else gloo would be asked for a scaled sum


def is_shared(x: Any) -> bool:
    """Whether a tensor is one of torch's DTensor. Their class takes half a second to import."""
    return hasattr(x, "full_tensor")


def local(x: Any) -> Tensor:
    """This rank's part of x, in the same memory."""
    return x.to_local() if is_shared(x) else x


def whole(x: Any) -> Tensor:
    """All of x, on every rank. All ranks call this together."""
    return x.full_tensor() if is_shared(x) else x


def as_in(x: Tensor, p: Any) -> Tensor:
    """The whole tensor x shared as p is, of which only this rank's part is kept. Nothing is sent."""
    if not is_shared(p):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def gathered(part: Tensor, shape: torch.Size, group: Any) -> Tensor:
    """The whole tensor of this shape on the first rank of the group; the others send it their rows, and keep them. For
    threads. part: this rank's rows, contiguous and on the CPU. A tensor that is whole already is returned as it is."""
    if part.shape == shape:
        return part
    if rank := torch.distributed.get_rank(group):
        if part.numel():
            torch.distributed.send(part, 0, group)
        return part
    found = part.new_empty(shape)
    for rank, rows in enumerate(found.chunk(torch.distributed.get_world_size(group))):  # as fully_shard cuts them
        if rank == 0:
            rows.copy_(part)
        else:
            torch.distributed.recv(rows, rank, group)
    return found


def copy_of(model: GPT, dtype: torch.dtype) -> GPT:
    """A model with all weights in `dtype`, on every rank. Draws no random numbers."""
    weights: dict[int, nn.Parameter] = {}  # by identity, so that a tied head stays one
    for p in model.parameters():
        weights[id(p)] = nn.Parameter(whole(p.detach()).to(dtype))
    with without_values():
        found = GPT(model.config, model.attention_config, model.break_it)
    named = model.named_parameters(remove_duplicate=False)
    found.load_state_dict({name: weights[id(p)] for name, p in named}, assign=True)
    return found
