"""Runs train.py in several processes, forked from this one: torchrun would take seconds to start each.

    python tests/ranks.py < jobs.json      a list of {"ranks": 2, "arguments": [...], "float64": false, "out": FILE}

Each process of a job has the environment that torchrun gives it, and writes what it prints into FILE.RANK. With float64
the model is in float64. Each process adds a last line: the bytes that its collectives were given in each step, how
many they were in the last one, and the bytes of the weights and the optimizer's state that it holds.
"""

import json
import os
import socket
import sys
import traceback
from collections import Counter
from importlib import import_module

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
import training.run
from model.recompute import RecomputingGPT
from parallel.shard import local
from training import config
from training.step import TrainStep

# All that a step uses, as torch names the ops, and which argument is the larger one.
COLLECTIVES = {"allreduce": 0, "all_to_all_single": 0, "allgather_base": 0, "reduce_scatter_base": 1}


class Sent(TorchDispatchMode):
    """Adds up the bytes that each collective gets."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _, _, name = func.name().partition("::")
        if (name := name.strip("_").removesuffix("_coalesced")) in COLLECTIVES:
            given = args[COLLECTIVES[name]]
            self.calls[name] += 1
            self.bytes[name] += sum(x.numel() * x.itemsize for x in (given if isinstance(given, list) else [given]))
        return func(*args, **(kwargs or {}))


def work(job: dict, rank: int, port: int) -> None:
    """One process of a job, until its end."""
    with open(f"{job['out']}.{rank}", "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)
    size = str(job["ranks"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if job["ranks"] > 1:
        os.environ |= dict(zip(names, (str(rank), str(rank), size, size, "127.0.0.1", str(port)), strict=True))
        os.environ |= {f"TORCHELASTIC_{name}": "0" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")}
    if job.get("float64"):
        training.run.RecomputingGPT = lambda *options: RecomputingGPT(*options).double()
    update, counts, last = TrainStep.update, [], {}

    def counted(step, batches):
        with Sent() as sent:
            update(step, batches)
        counts.append(dict(sent.bytes))
        states = [x for optimizer in step.optimizers for state in optimizer.state.values() for x in state.values()]
        held = sum(local(x).nbytes for x in (*step.model.parameters(), *states))
        last.update(calls=dict(sent.calls), held=held)

    TrainStep.update = counted
    sys.argv = ["train.py", *job["arguments"]]
    code = 0
    try:
        config.run(train.main, train.Config, "config", resumed=train.resumed_config, check=train.check)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    with open(f"{job['out']}.{rank}", "a") as file:
        file.write("\n" + json.dumps({"sent": counts} | last) + "\n")
    os._exit(code)  # what was inherited is the parent's to close


def main() -> None:
    for job in json.load(sys.stdin):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(job["ranks"]):
            if (child := os.fork()) == 0:
                work(job, rank, port)
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in ("matplotlib.pyplot", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        import_module(module)  # once for all
    main()
