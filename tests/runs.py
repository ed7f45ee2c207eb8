"""What a run leaves behind, and when two of them are the same run."""

import csv
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import train
from training import checkpoint, config
from training.metrics import read_metrics

# What depends on the clock.
TIMES = {"ms", "tokens_per_second", "eta_s", "memory_gib", "probe_ms", "context_ms", "seconds"}


def composed(*typed: str) -> train.Config:
    """What train.py makes of its arguments."""
    ((cfg, _),) = config.compose([*typed], train.Config, "config", Path(train.__file__).parent / "conf", "train")
    return cfg


def full(*_, **__):
    """In the place of what writes."""
    raise OSError(errno.ENOSPC, "No space left on device")


def flip(file: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def below(folder: Path) -> dict[str, int | None]:
    """Everything in `folder` but the locks, and when a file was written."""
    found = {}
    for path, folders, files in os.walk(folder):
        found |= dict.fromkeys(f"{path}/{name}" for name in folders)
        found |= {f"{path}/{name}": os.stat(f"{path}/{name}").st_mtime_ns for name in files if name != ".lock"}
    return found


@contextmanager
def little_room() -> Iterator[None]:
    """What is written past 100,000 bytes of a file fails as on a full disk."""
    import resource  # which Windows lacks

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def records(run: Path, key: str = "loss") -> list[dict]:
    """The rows of metrics.jsonl that have `key`: the steps', or with val_loss the evaluations'."""
    return [record for record in read_metrics(run / "metrics.jsonl") if key in record]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def table_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tiled(block: int) -> list[str]:
    return ["attention=tiled", f"attention.block_m={block}", f"attention.block_n={block}"]


def last(run: Path) -> Path:
    return checkpoint.last(run / checkpoint.FOLDER)


def assert_same_run(run: Path, other: Path) -> None:
    """All that was recorded but the time it took, the samples, and the last checkpoint."""
    rows = [[{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(r / "metrics.jsonl")]
            for r in (run, other)]  # fmt: skip
    assert repr(rows[0]) == repr(rows[1])  # NaN, the norm of a step that fp16's scaler left out, does not equal itself
    samples = [file.read_bytes() if (file := r / "samples.txt").exists() else b"" for r in (run, other)]
    assert samples[0] == samples[1]
    assert_same_end(run, other)


def assert_same_end(run: Path, other: Path) -> None:
    """Of the last step made: weights, optimizer, random numbers, data position."""
    a, b = (checkpoint.load(last(r)) for r in (run, other))
    assert a.step == b.step == records(run)[-1]["step"]
    assert a.state["loader"] == b.state["loader"]
    for x, y in ((a.model, b.model), (a.optimizer(), b.optimizer())):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x)
