"""Several processes train one model, each on its own GPU. torchrun starts them, torch.distributed connects them:
torchrun --nproc-per-node 2 train.py ... Every rank runs all of train.py; only rank 0 prints and writes.

Data parallel: each rank has all weights and its own sequences. One all-reduce per step sums the gradients.
FSDP2 (parallel.shard=true; torch's fully_shard): each rank keeps some rows of every weight, its gradient and AdamW's
state. A block's weights are all-gathered before it computes and dropped after it. Its gradient is reduce-scattered.
Ulysses (parallel.context=N; Jacobs et al. 2023, arXiv 2309.14509): N ranks share each sequence, T / N tokens each.
For attention an all-to-all exchanges tokens for heads: each rank then has H / N heads of the whole sequence.

B batch, T sequence length, H heads (query or key/value), D head size, N ranks that share a sequence.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import vector_to_parameters

from conf.keys import key
from data.loader import Batch
from model.attention import AttentionConfig, attention
from model.gpt import GPT, place


@dataclass
class ParallelConfig:
    """How the processes that torchrun has started share the work."""

    context: int = key(1, "processes that share each sequence (Ulysses), for contexts too long for one GPU", least=1)
    shard: bool = key(False, "each process keeps a part of the weights (FSDP2), for models too large for one GPU")


@dataclass(eq=False)
class Ranks:
    """The processes of a run. All call the same methods in the same order: a collective waits for every rank."""

    device: str = "auto"  # of this rank, as pick_device() takes it
    rank: int = 0
    size: int = 1
    is_main: bool = True  # whether this is rank 0, which prints and writes
    data_rank: int = 0  # which of data_size shares of the sequences this rank has
    data_size: int = 1
    config: ParallelConfig = field(default_factory=ParallelConfig)
    sequence: "Ulysses | None" = None

    def check(self, cfg: Any, attention: AttentionConfig) -> None:
        """ValueError for what the ranks cannot share. cfg: the whole configuration."""
        N, model, T = self.config.context, cfg.model, cfg.model.context_length
        if model.n_head % N or model.kv_heads % N or T % N:
            sizes = f"model.n_head={model.n_head}, n_kv_head={model.kv_heads} and {T} tokens"
            raise ValueError(f"parallel.context={N} has to divide {sizes}: use another parallel.context")
        if N > 1 and attention.alibi:
            raise ValueError(f"parallel.context={N} has no attention.alibi: use model.position=rope")
        if N > 1 and cfg.break_it.broken:  # the check whether the failure acts takes a whole sequence on each GPU
            raise ValueError(f"parallel.context={N} has no break_it: break a run without parallel.context")
        if self.config.shard and cfg.dtype == "fp16":
            raise ValueError("parallel.shard=true has no dtype=fp16: use bf16 or float32")
        if self.size > 1 and cfg.probe.every:
            raise ValueError(f"probe.every={cfg.probe.every} with {self.size} processes: probe a run of one process")

    def prepare(self, model: GPT, device: torch.device) -> GPT:
        """The model on the device. Gives each rank a seed of its own, for dropout. With parallel.shard blocks are cut
        and moved one by one, so the model may be larger than the memory."""
        if self.size > 1:
            torch.manual_seed(torch.initial_seed() + self.rank)
        if self.config.context > 1:
            self.sequence = Ulysses(self.config.context, device)
        if not self.config.shard:
            return model.to(device)
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        mesh = init_device_mesh(device.type, (self.size,))
        for module in (*model.blocks, model):
            # By default the embedding and the head would stay whole after an evaluation, and be saved so.
            unit = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            unit.set_gradient_divide_factor(1.0)  # a sum, as in all_reduce()
            unit.set_force_sum_reduction_for_comms(True)  # not a scaled sum, which gloo does not have
        return model

    def cut(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, "Ulysses | None"]:
        """The model's arguments for this rank: x, y (B, T / N), documents (B, T), sequence."""
        N = self.config.context
        x, y = (tokens.chunk(N, dim=1)[self.rank % N] for tokens in (batch.x, batch.y))
        return x, y, batch.documents, self.sequence

    def all_reduce(self, loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """Replaces every p.grad by its sum over the ranks, and returns the sum of the losses. (FSDP2 has summed the
        gradients.) One all-reduce, which a CUDA graph can record. Several during the backward were no faster."""
        if self.size == 1:
            return loss
        gradients = [] if self.config.shard else [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([*(x.flatten() for x in gradients), loss.detach().view(1)])
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)  # makes them views of it
        return flat[-1]

    def sum(self, numbers: list[float], op: Any = dist.ReduceOp.SUM, group: Any = None) -> list[float]:
        """The sums over the ranks, on the host."""
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total, op, group)
        return total.tolist()

    def agree(self, signal: int, seconds: float) -> tuple[int, float]:
        """The largest of each. So all ranks stop at the same step and have the same learning rate."""
        largest = self.sum([signal, seconds], dist.ReduceOp.MAX)
        return int(largest[0]), largest[1]

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the body, then the others do: they read what it has written, or fail as it does."""
        # A download may take longer than the half hour after which a collective fails.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self.size > 1 else None
        if not self.is_main:
            self.sum([0.0], group=group)  # a barrier on the host; dist.barrier() would be one on the GPUs
        try:
            yield
        finally:
            if self.is_main:
                self.sum([0.0], group=group)

    def shares(self, batches: list[Batch]) -> Iterator[tuple[Batch, bool]]:
        """This rank's batches, and whether each counts; the others are dummy forwards: FSDP gathers on all ranks."""
        for mine in range(self.data_rank, len(batches) + self.data_rank, self.data_size):
            yield batches[min(mine, len(batches) - 1)], mine < len(batches)

    def gather(self, x: Tensor) -> Tensor:
        """All of x for a checkpoint. If FSDP2 has cut it, on the CPU of rank 0: no GPU has to hold all weights."""
        if not self.config.shard:
            return x
        x = full_tensor(x)
        return x.cpu() if self.is_main else x.new_empty(0)

    def stack(self, x: Tensor) -> Tensor:
        """Every rank's x, on the CPU: (size, *x.shape)."""
        every = [x.clone() for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(every, x)
        return torch.stack(every)

    def leave(self) -> None:
        """Waits for all: torchrun kills the others when one ends with an error code."""
        self.sum([0.0])
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def full_tensor(x: Any) -> Tensor:
    """All of x, if FSDP2 has cut it; all ranks call this together."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def to_local(x: Any) -> Tensor:
    """This rank's part of x, in the same memory."""
    return x.to_local() if hasattr(x, "full_tensor") else x


def as_part(x: Tensor, p: Any) -> Tensor:
    """x, this rank's part of a tensor, as a DTensor that FSDP2 has cut as p; x itself, if it has not cut p."""
    if not hasattr(p, "full_tensor"):
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def shard_like(x: Tensor, p: Any) -> Tensor:
    """This rank's part of x, as FSDP2 has cut p; all of x, if it has not, or if x is a scalar."""
    if not hasattr(p, "full_tensor") or x.ndim == 0:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def join(config: ParallelConfig, device: str) -> Ranks:
    """Connects this process with the others that torchrun has started. From here on only rank 0 prints."""
    size, N = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1, config.context
    least = max(N, 1 + config.shard)
    if size < least or size % N:
        name = "parallel.shard=true" if config.shard else f"parallel.context={N}"
        raise ValueError(f"{name} with {size} processes: start them with torchrun --nproc-per-node {least} train.py")
    if size == 1:
        return Ranks(device)
    if {"-m", "--multirun"} & {*sys.argv}:  # for a second job torchrun's store has the first one's addresses
        sys.exit(f"train: a sweep (-m) with {size} processes: start each of its runs with a torchrun of its own")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    if device not in ("cpu", "cuda") or (device == "cuda" and local >= gpus):
        raise ValueError(f"device={device}: each process needs a GPU of its own, and there are {gpus}; use device=auto")
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return Ranks(device, rank, size, rank == 0, rank // N, size // N, config)


class Ulysses:
    """model(x, y, documents, sequence=ulysses): x and y (B, T / N) are this rank's tokens of each sequence, documents
    (B, T). Each rank draws its own dropout masks, so they are not those of one process."""

    def __init__(self, N: int, device: torch.device):
        # The ranks of a sequence are neighbours: GPUs of one machine have the fastest links.
        mesh = init_device_mesh(device.type, (dist.get_world_size() // N, N), mesh_dim_names=("data", "context"))
        self.N, self.group, self.rank, self.device = N, mesh.get_group("context"), dist.get_rank() % N, device
        # Compiled by torch 2.11, AllToAll gives zero gradients (as in deepspeedai/DeepSpeed#8491).
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    def place(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of this rank's tokens (B, n) in the sequence, int64 (n,), and the token before each."""
        at, before = place(idx)
        lasts = [torch.empty_like(before[:, 0]) for _ in range(self.N)]
        dist.all_gather(lasts, idx[:, -1].contiguous(), group=self.group)
        if self.rank:
            before[:, 0] = lasts[self.rank - 1]
        return at + self.rank * len(at), before

    def attends(self, n_layer: int) -> list[Callable[..., Tensor]]:
        return [self.attend] * n_layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **options: Any) -> Tensor:
        """attention() over the whole sequences. q, o (B, H, T / N, D); k, v (B, H_kv, T / N, D)."""
        q, k, v = (self.exchange(x.transpose(1, 2), 2, 1).transpose(1, 2) for x in (q, k, v))  # (B, H / N, T, D)
        o: Any = attention(q, k, v, config, **options)
        return self.exchange(o.transpose(1, 2), 1, 2).transpose(1, 2)

    def exchange(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Cuts x into a part for each rank along one axis, and joins what the ranks have sent along another one. Axes
        1, 2: (B, T, H / N, D) to (B, T / N, H, D); 2, 1: the inverse."""
        x = x.unflatten(cut, (self.N, -1)).movedim(cut, 0)  # by receiver: (N, B, T / N, H / N, D)
        return AllToAll.apply(x, self.group).movedim(0, join).flatten(join, join + 1)


class AllToAll(torch.autograd.Function):  # x[i] goes to rank i, and what rank i sends becomes received[i]
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(gradient, ctx.group), None
