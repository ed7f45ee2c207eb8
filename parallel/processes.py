"""Several processes that train one model, each on its own GPU. torchrun starts them, torch.distributed connects them.

    torchrun --nproc-per-node 2 train.py ...     the same run as python train.py ..., on two GPUs

    with join(cfg) as ranks: ...                         this process among the others; in a single one nothing happens
    ranks, rows, passes = divide(ranks, cfg, passes)     what this rank computes of each step
    loss = ranks.add_up(loss, parameters)                sums over the ranks: the gradients and the losses

Every rank has all weights, and makes the same update with the same gradient. So a step sends each gradient once.
(parallel.shard=true shards weights, gradients and the optimizer's state instead: parallel/shard.py.) The passes of a
step (gradient accumulation) are shared among the ranks. If there are too few, the sequences of every pass are. Batches,
their order and the dropout masks are those of one process: a rank draws the seeds of all passes, and a mask counts
sequences and heads in the whole batch. Only sums over ranks may round in another order.

parallel.context=N gives each sequence to N ranks, which exchange tokens against heads in attention (parallel/part.py).
Where N does not divide the heads, keys and values rotate between them instead: ring attention (parallel/ring.py).

Rank 0 alone prints, writes and samples; sharded ranks compute a sample and gather a checkpoint with it. A rank that
fails ends the others: torchrun sees to it.
"""

import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from conf.keys import check, key
from data.text import counted
from model.abilities import wanted, why_not
from model.attention import AttentionConfig
from model.gpt import GPT, Setting
from parallel.part import UNDIVIDED, Part, exchanged
from parallel.ring import ring_attention


@dataclass
class ParallelConfig:
    """How the processes that torchrun has started share the work. Each sequence goes to `context` of them."""

    context: int = key(1, "processes that share each sequence, for contexts that are too long for one GPU", least=1)
    shard: bool = key(False, "each process keeps a part of the weights and AdamW's state, for models too large for one")

    def __post_init__(self):
        check(self, "parallel.")


class Agreed(NamedTuple):
    """What all ranks know together after a step."""

    signals: list[int]  # that any of them has received
    spent: float  # seconds of the run, on the rank with the most
    text_bytes: int  # of all ranks' batches
    pace: float  # seconds a step, on the slowest rank


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. All methods but `first` are to be called by all of them."""

    rank: int = 0
    size: int = 1
    turns: int = 1  # so many ranks take turns with the passes of a step
    turn: int = 0  # this rank's; in the other turns it computes nothing
    part: Part = UNDIVIDED  # what of a pass's batch this rank computes
    shards: int = 1  # into so many parts the weights are cut, one for each rank (parallel/shard.py)

    @property
    def data_size(self) -> int:
        """How many ranks have different sequences."""
        return self.size // self.part.ranks

    @property
    def data_rank(self) -> int:
        """Number of this rank's sequences among them. Ranks that share sequences are neighbours, on one machine."""
        return self.rank // self.part.ranks

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def same(self, value: Any) -> Any:
        """Rank 0's value, on every rank. value: what pickle can copy."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def setting(self, idx: Tensor) -> Setting | None:
        """Of a forward of this rank's tokens, (B, T / N). None: the batch is whole."""
        part, (B, n) = self.part, idx.shape
        if part == UNDIVIDED:
            return None
        attend = repeat(partial(ring_attention if part.ring else exchanged, part))
        positions = part.positions(n, idx.device)
        return Setting(n * part.ranks, positions, attend, first=part.share * B, batch=part.shares * B)

    def refuse_difference(self, **values: Any) -> None:
        """ValueError, the same on all ranks, if one has other values than rank 0."""
        if self.size == 1:
            return
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, values)
        for rank, theirs in enumerate(every):
            for name, value in theirs.items():
                if value != every[0][name]:
                    raise ValueError(
                        f"rank {rank} has {name} {value}, rank 0 has {every[0][name]}: "
                        "give all machines the same files, for example on a shared disk"
                    )

    def agree(self, signals: list[int], spent: float = 0.0, text_bytes: int = 0, pace: float = 0.0) -> Agreed:
        """Gathers these from all ranks after a step. They stop at the same step because they know the same."""
        if self.size == 1:
            return Agreed(signals, spent, text_bytes, pace)
        mine = torch.tensor([signals[0] if signals else 0, spent, text_bytes, pace], dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        numbers, times, sizes, paces = torch.stack(every).unbind(1)
        signals = [int(number) for number in numbers if number][:1]
        return Agreed(signals, float(times.max()), int(sizes.sum()), float(paces.max()))

    def sum(self, values: list[float]) -> list[float]:
        """The sums over the ranks, of float64 numbers."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))  # on the host; dist.barrier() would wait on the GPUs

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together, of which this rank has these or these parts."""
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.shards == 1:
            return norm
        squares = norm.square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def add_up(self, loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """Replaces every gradient by its sum over the ranks, and returns the sum of the losses (a scalar). Where
        weights are sharded, the backward has summed the gradients, and only the losses are left.

        All go in one message, in place: copies into one tensor and back would take a tenth of a sum's time. Does not
        wait for the device, so that a step can be recorded. Sums during the backward were no faster (LOG.md).
        """
        if self.size == 1:
            return loss
        weights = [] if self.shards > 1 else list(parameters)
        sent = [p.grad for p in weights if p.grad is not None]
        assert len(sent) == len(weights), "every weight takes part in every pass"
        loss = loss.to(sent[0].dtype if sent else loss.dtype)  # a message has one dtype
        with _coalescing_manager(async_ops=True) as message:
            for x in (*sent, loss):
                dist.all_reduce(x)
        message.wait()  # on a GPU its stream waits, not the host
        return loss


ALONE = Ranks()


def divide(ranks: Ranks, cfg: Any, passes: int) -> tuple[Ranks, int, int]:
    """Returns the ranks with their parts of a step, this rank's sequences of a pass, and its passes.

    cfg: train.Config. passes: of the whole step, of cfg.batch_size sequences each. ValueError if the ranks cannot share
    them equally.
    """
    N, batch_size = cfg.parallel.context, cfg.batch_size
    if ranks.size % N:
        raise ValueError(
            f"parallel.context={N} wants {N} processes for each sequence, and there "
            f"{'is 1' if ranks.size == 1 else f'are {ranks.size}'}: start them with torchrun --nproc-per-node {N}, or "
            "use parallel.context=1"
        )
    if cfg.parallel.shard:
        check_shard(ranks, cfg)
    ring = in_a_ring(cfg)
    if ring:
        check_ring(cfg)
    pieces = 2 * N if ring else N
    if N > 1 and (short := cfg.length_at(1)) % (32 * pieces):
        key = "model.context_length" if short == cfg.model.context_length else "length_warmup_from"
        raise ValueError(
            f"parallel.context={N} cuts sequences of {key}={short} tokens into {pieces} parts, which have to be "
            f"multiples of 32: use a {key} that is divisible by {32 * pieces}"
        )
    group, data = "", ranks.size // N
    if N > 1:
        device = "cuda" if own_device(cfg.device).startswith("cuda") else "cpu"
        mesh = init_device_mesh(device, (data, N), mesh_dim_names=("data", "context"))
        group = mesh.get_group("context").group_name
    part = Part(rank=ranks.rank % N, ranks=N, group=group, ring=ring)
    ranks = replace(ranks, part=part, shards=ranks.size if cfg.parallel.shard else 1)
    if passes % data == 0:
        return replace(ranks, turns=data, turn=ranks.data_rank), batch_size, passes // data
    if batch_size % data == 0:
        rows = batch_size // data
        return replace(ranks, part=part._replace(share=ranks.data_rank, shares=data)), rows, passes
    raise ValueError(
        f"{data} processes cannot share a step of {counted(passes, 'pass', 'passes')} of batch_size="
        f"{batch_size} equally: use a batch_size= that is divisible by {data}, or tokens_per_step= for a number of "
        "passes that is"
    )


def in_a_ring(cfg: Any) -> bool:
    """Whether keys and values rotate: the processes of a sequence do not divide the heads. cfg: train.Config."""
    return bool(cfg.model.n_head % cfg.parallel.context or cfg.model.n_kv_head % cfg.parallel.context)


def sends_from_python(cfg: Any) -> str:
    """What Python sends between processes in the middle of a step, which therefore cannot be recorded; or "". cfg:
    train.Config."""
    if cfg.parallel.shard:
        return "parallel.shard=true gathers weights between the blocks, from Python"
    if in_a_ring(cfg):
        return f"parallel.context={cfg.parallel.context} does not divide the heads: Python sends keys and values round"
    return ""


def check_ring(cfg: Any) -> None:
    """ValueError for attention that a ring does not have. cfg: train.Config."""
    attention = cfg.attention
    options = wanted(attention)
    if attention.kernel == "hopper" and (attention.window or attention.windows or attention.alibi):
        options["positions"] = "attention.kernel=hopper"
    if lacks := why_not("ring", options):
        raise ValueError(
            f"parallel.context={cfg.parallel.context} does not divide both model.n_head={cfg.model.n_head} and "
            f"model.n_kv_head={cfg.model.n_kv_head}, so keys and values go round the processes; that has no {lacks}: "
            "leave it out, or use a parallel.context that divides both"
        )


def check_shard(ranks: Ranks, cfg: Any) -> None:
    """ValueError for what a run with parallel.shard=true does not have. cfg: train.Config."""
    if ranks.size == 1:
        raise ValueError(
            "parallel.shard=true cuts the weights into a part for each process, and there is 1 process: start "
            "several with torchrun, or use parallel.shard=false"
        )
    shard, options = "parallel.shard=true", {}
    if cfg.optimizer.kind == "muon":
        options["muon"] = shard
    if cfg.dtype == "fp16":
        options["fp16"] = shard
    if cfg.context_every:
        options["context_every"] = f"context_every={cfg.context_every}"
    if why := why_not("shard", options):
        raise ValueError(why)


def bytes_sent(ranks: Ranks, model: GPT, tokens: int, width: int, passes: int) -> tuple[int, int]:
    """The bytes that each rank sends in a step: of weights and gradients, and for exchanges in attention.

    tokens: of the step, of all ranks. width: bytes of an element in products. passes: of this rank. A sum over n ranks
    in a ring sends 2 (n - 1) / n times its data: once to add up, once to hand out. With parallel.shard each pass hands
    out the weights, in the forward and in the backward, and adds up the gradients. An exchange of n ranks keeps 1 / n.
    Activation checkpointing repeats the exchanges of the forward, which is not counted. In a ring, keys and values go
    n - 1 times to the next rank, in the forward and in the backward; so do their gradients, in the dtype of sums.
    """
    N, config = ranks.part.ranks, model.config
    gradients = 2 * 4 * (model.parameter_count() + 1)  # float32, and the loss
    if ranks.shards > 1:
        gradients = passes * 3 * 4 * model.parameter_count()
    gradients = gradients * (ranks.size - 1) // ranks.size
    kv_heads, elements = config.n_kv_head or config.n_head, config.n_layer * config.head_size * (tokens // ranks.size)
    if ranks.part.ring:
        return gradients, (N - 1) * 2 * kv_heads * elements * (2 * width + max(4, width))  # k and v
    exchanged = 2 * (2 * config.n_head + 2 * kv_heads) * elements * width  # forward and backward; q and o, k and v
    return gradients, exchanged * (N - 1) // N


def refuse_what_is_for_one(cfg: Any, attention: AttentionConfig) -> None:
    """ValueError for options of a run that several processes do not have. cfg: train.Config. attention: resolved."""
    options = wanted(attention, cfg.break_it)
    if cfg.probe.every:
        options["probe"] = f"probe.every={cfg.probe.every}"
    if attention.impl == "sdpa" and attention.dropout_p:
        options["sdpa dropout"] = "attention=sdpa"
    if cfg.data.path == "-":
        refuse_several("data.path=- is read by one process")
    if why := why_not("several", options):
        refuse_several(why)


def refuse_several(why: str) -> None:
    """ValueError if torchrun has started several processes."""
    if launched() > 1:
        raise ValueError(f"{why}: leave it out with torchrun, or use python train.py")


# ---------------------------------------------------------------------------------------------------------------------
# torchrun: joining, failing and starting again.


def launched() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if by_torchrun() else 1


def by_torchrun() -> bool:
    """Whether torchrun has started this process. Other launchers set WORLD_SIZE too."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def join(cfg: Any) -> Iterator[Ranks]:
    """Connects this process with the others that torchrun has started. On all but rank 0 nothing is printed from here
    on but errors.

    cfg: train.Config. ValueError for a device that not every rank can have, and for torchrun --max-restarts without a
    name, by which the restarted run finds its checkpoints. An error of the connection, as when another rank has ended,
    becomes a ValueError too.
    """
    if by_torchrun() and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0 and cfg.name is None:
        raise ValueError(
            "torchrun --max-restarts starts the run again, which has to find its checkpoints: give it name="
        )
    if launched() == 1:
        yield ALONE
        return
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    device = own_device(cfg.device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(name_this_start(store, rank, size), store)
    # By default torch makes no connection between the hosts where there are GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield Ranks(rank, size)
    except RuntimeError as error:  # gloo raises a plain one with its file
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):
            raise
        why = str(error).splitlines()[0]
        raise ValueError(
            f"rank {rank} has lost another one, which ended before it ({why}): what that one said tells why; "
            "resume=auto goes on from the last checkpoint"
        ) from error
    dist.destroy_process_group()


def name_this_start(store: dist.Store, rank: int, size: int) -> str:
    """A name that all processes have agreed on, and that no earlier start of theirs has had.

    torchrun keeps its store when it starts the processes again, with the addresses of those that ended. A connection to
    them would wait for minutes. And it counts the starts on each machine by itself. So every process sends a nonce of
    this start, and rank 0 answers them until all have acknowledged its own.
    """
    nonce = uuid.uuid4().hex
    if rank > 0:
        store.set(f"nonce of {rank}", nonce)
        name = store.get(f"answer to {nonce}").decode()  # waits for it
        store.set(f"{rank} has {name}", "")
        return name
    missing = [*range(1, size)]
    while missing:
        for other in missing:
            if store.check([f"nonce of {other}"]):  # may be left over from an earlier start
                store.set(f"answer to {store.get(f'nonce of {other}').decode()}", nonce)
        missing = [other for other in missing if not store.check([f"{other} has {nonce}"])]
        time.sleep(0.02)
    return nonce


def own_device(device: str) -> str:
    """The device of this rank. auto is its own CUDA GPU, or else the CPU. ValueError if there are too few GPUs."""
    if launched() == 1:
        return device
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and here > (there := torch.cuda.device_count()):
        raise ValueError(
            f"{here} processes on this machine want a GPU each, and it has {there}: "
            f"use torchrun --nproc-per-node {there}"
        )
    if device.startswith(("cuda:", "mps")):
        raise ValueError(f"device={device} is one device, and {here} processes want one each: use device=auto")
    return f"cuda:{local}" if device == "cuda" else device


def launcher() -> list[str]:
    """The beginning of a command that starts as many processes on this machine again."""
    return ["python"] if launched() == 1 else ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]


def begun() -> Path | None:
    """A file that all starts of this torchrun on this machine share, there once the run has its folder. None if
    torchrun cannot start them again, or has no folder for it (--log-dir=/dev/null)."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/LOCAL_RANK/error.json
    again = by_torchrun() and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0
    return Path(error_file).parents[2] / "begun" if again and error_file else None


def begin() -> None:
    """Lets torchrun's later starts go on with this run. To be called when all ranks know that its folder is theirs."""
    if file := begun():
        file.touch()


def restarted() -> bool:
    """Whether torchrun has started the processes again, after one has failed, and had begun their run before. If not,
    a run of that name is another one, which the first start has refused to touch."""
    if not by_torchrun() or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
        return False
    file = begun()
    return file is None or file.exists()
