"""What a run leaves behind, and when two of them are the same run."""

import json
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from training import checkpoint
from training.config import CONF

TIMES = {"ms", "tokens_per_second", "eta_s", "memory_gib", "seconds", "mfu"}  # what depends on the clock


def composed(*typed: str) -> train.Config:
    """What train.py makes of its arguments."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("config", [*typed]))


def read_metrics(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def records(run: Path, key: str = "loss") -> list[dict]:
    """The rows of metrics.jsonl that have `key`: the steps', or with val_loss the evaluations'."""
    return [record for record in read_metrics(run / "metrics.jsonl") if key in record]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def last(run: Path) -> Path:
    return checkpoint.all_checkpoints(run / checkpoint.FOLDER)[-1]


def assert_same_run(run: Path, other: Path) -> None:
    """All that was recorded but the time it took, the samples, and the last checkpoint."""
    rows = [[{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(r / "metrics.jsonl")]
            for r in (run, other)]  # fmt: skip
    assert repr(rows[0]) == repr(rows[1])  # NaN, the norm of a step that fp16's scaler left out, does not equal itself
    samples = [file.read_bytes() if (file := r / "samples.txt").exists() else b"" for r in (run, other)]
    assert samples[0] == samples[1]
    a, b = (checkpoint.load_checkpoint(last(r)) for r in (run, other))
    assert a.step == b.step == records(run)[-1]["step"]
    assert all(a.state[part] == b.state[part] for part in ("loader", "scaler"))
    for x, y in ((a.weights, b.weights), (a.training, b.training)):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x)
