"""Sums over the ranks of the gradients, which are sent while the backward computes the next ones.

    sums = Sums(ranks, model)               for one step
    sums.backward(share, last=...)          once a pass; during the last one each block's gradients are sent
    loss = sums.finish(loss)                sends the rest and waits for all; returns the sum of the losses

The backward goes from the last block to the first. As soon as a block's gradients are complete, a hook on the weights
sends them in one message. NCCL adds them up on its own stream, so the backward goes on meanwhile. What belongs to no
block goes last, with the loss: embedding, positions, last norm and head. The embedding's gradient is complete at the
very end. Nothing waits for the host, so a step can be recorded with its messages. Two numbers have one order of adding
up; that of more depends on their place in a message.

torch's DistributedDataParallel works the same way. But before a step can be recorded, it wants eleven steps on a stream
of their own. And it wraps one forward(), while ours is compiled and called in parts (GPT.compiled).

Where weights are sharded, FSDP's own hooks add up the gradients, and only the losses are left (training/shard.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from model.gpt import GPT
from training.parallel import Ranks


class Sums:
    """The messages of one step. All ranks make the same ones in the same order, because they run the same program."""

    def __init__(self, ranks: Ranks, model: GPT) -> None:
        self.ranks, self.begun = ranks, list[Message]()
        sends = ranks.size > 1 and ranks.shards == 1
        self.blocks = [list(block.parameters()) for block in model.blocks] if sends else []
        in_blocks = {p for block in self.blocks for p in block}
        self.rest = [p for p in model.parameters() if p not in in_blocks]

    def backward(self, share: Tensor, last: bool) -> None:
        """The backward of this rank's share of a pass's loss, a scalar. Gradients are added to p.grad. last: of the
        step's passes on this rank; then they are sent, each block's as soon as it is complete."""
        hooks = [hook for block in self.blocks if last for hook in when_complete(block, partial(self.send, block))]
        share.backward()
        for hook in hooks:
            hook.remove()

    def finish(self, loss: Tensor) -> Tensor:
        """Every gradient becomes its sum over the ranks. Returns the sum of the losses, which are scalars."""
        if self.ranks.size == 1:
            return loss
        assert len(self.begun) == len(self.blocks), "every weight takes part in every pass"
        loss = loss.to(self.rest[0].dtype)  # a message has one dtype
        self.send(self.rest if self.ranks.shards == 1 else [], loss)
        for message in self.begun:
            message.wait()  # on a GPU its stream waits, not the host
        return loss

    def send(self, parameters: Sequence[Tensor], *more: Tensor) -> None:
        """Begins to add up the gradients of some weights, and more tensors, over the ranks, in one message."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.begun.append(begin_sum([*gradients, *more]))


class Message(Protocol):
    """A sum on its way."""

    def wait(self) -> object: ...


def begin_sum(tensors: list[Tensor]) -> Message:
    """Begins to replace each tensor by its sum over the ranks, and copies none."""
    with _coalescing_manager(async_ops=True) as message:
        for x in tensors:
            dist.all_reduce(x)
    return message


def when_complete(parameters: Sequence[Tensor], then: Callable[[], object]) -> list[torch.utils.hooks.RemovableHandle]:
    """Calls then() in the next backward, when all of these weights have their gradients. Returns hooks to remove."""
    missing = {*parameters}

    def complete(p: Tensor) -> None:
        missing.remove(p)
        if not missing:
            then()

    return [p.register_post_accumulate_grad_hook(complete) for p in parameters]
