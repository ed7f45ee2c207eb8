"""Calls functions in several processes with torchrun's environment. torchrun itself would take seconds to start each.

    python -m tests.ranks < jobs.json     a list of [processes, "train", "gradients" or "wait", arguments]

The processes are forked from one that has imported everything.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from importlib import import_module

import torch
from torch.multiprocessing import start_processes

import train as script
from data.loader import Batch
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training.parallel import ParallelConfig, Ranks, full_tensor, join


def train(*arguments: str) -> None:
    """python train.py ARGUMENTS"""
    sys.argv = [script.__file__, *arguments]
    script.main()


def gradients(file: str, parallel: dict, model: dict, attention: dict, compile: bool = False) -> None:
    """Saves into `file` loss, norm and whole gradients of two passes of two sequences, and how many weights it has."""
    ranks = join(ParallelConfig(**parallel), "cpu")
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, context_length=64, vocab_size=50, **model)
    gpt = ranks.prepare(GPT(config, AttentionConfig(**attention)).double(), torch.device("cpu"))
    for block in gpt.blocks if compile else ():
        block.compile(dynamic=False, backend="aot_eager")
    torch.manual_seed(0)  # prepare() has given each rank another seed
    x, y = torch.randint(50, (2, 2, 2, 64))
    documents = torch.arange(64).div(20, rounding_mode="floor").expand(2, 2, 64)
    passes = range(ranks.data_rank, 2, ranks.data_size)
    loss = torch.zeros(())
    for i in passes:
        part = gpt(*ranks.cut(Batch(x[i], y[i], documents[i]))) / (len(passes) * ranks.size)
        part.backward()
        loss = loss + part.detach()
    loss = ranks.all_reduce(loss, gpt.parameters())
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters()]))
    found = {name: ranks.gather(p.grad) for name, p in gpt.named_parameters()}
    held = sum((p.to_local() if ranks.config.shard else p).numel() for p in gpt.parameters())
    if ranks.is_main:
        torch.save({"loss": loss, "norm": norm, "held": held, **found}, file)
    ranks.leave()


def wait() -> None:
    """Rank 0 prepares for longer than collectives wait."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=1))
    rank, new = torch.distributed.get_rank(), torch.distributed.new_group
    torch.distributed.new_group = lambda timeout=timedelta(seconds=1), **more: new(timeout=timeout, **more)
    with Ranks(rank=rank, size=2, is_main=rank == 0).main_process_first():
        time.sleep(2 - 2 * rank)


def work(rank: int, size: int, port: int, call: str, arguments: list) -> None:
    if size > 1:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in (values | {"TORCHELASTIC_RUN_ID": "test"}).items()}
    {"train": train, "gradients": gradients, "wait": wait}[call](*arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in ("matplotlib.pyplot", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        import_module(module)  # once for all
    for size, call, arguments in json.load(sys.stdin):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start_processes(work, (size, port, call, arguments), nprocs=size, start_method="fork")  # raises what they raise
