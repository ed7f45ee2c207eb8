"""Short trainings, whole and broken, from one seed. They show what a failure does to the loss.

Config and main() of train.py are passed in, because nothing here imports a script.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from data.text import counted
from model.break_it import FAILURES, BreakIt
from training import config
from training.metrics import broken_name, read_metrics, show

CONF = Path(__file__).parents[1] / "conf"
FRESH_STEPS = 200  # training steps of the model that gives q, k and v: takes 15 s, scores reach 15
NOT_SEEN = {"bf16_ties"}  # failures that a training of some hundred steps does not show


class Curves(NamedTuple):
    """Short trainings in one setting: the loss of each step, in nats per token."""

    setting: str
    whole: list[float]
    broken: dict[str, list[float]]  # by failure; a loss that is not finite ends its list


def short_training(schema: type, steps: int, seed: int, device: str, typed: Sequence[str] = ()) -> Any:
    """The configuration of a short training of a small, whole model. schema: train.Config. typed: more arguments."""
    small = ["model.n_layer=2", "model.n_embd=64", "model.context_length=128", "batch_size=8", f"steps={steps}"]
    small += ["optimizer.lr=5e-3", "optimizer.warmup_steps=20", "eval_tokens=2048", "sample_every=0"]
    small += ["attention=tiled", "attention.block_m=64", "attention.block_n=16", "dtype=float32", "wandb.mode=disabled"]
    ((short, _),) = config.compose([*small, *typed], schema, "config", CONF, "train")
    short.eval_every = short.checkpoint_every = steps
    short.seed, short.device = seed, device
    return short


def fresh_training(short: Any) -> Any:
    """The configuration of the model that gives q, k and v. Its sequences are longer, for more tiles."""
    fresh = deepcopy(short)
    fresh.name, fresh.steps, fresh.batch_size, fresh.model.context_length = "fresh", FRESH_STEPS, 4, 256
    fresh.eval_every = fresh.checkpoint_every = FRESH_STEPS
    return fresh


def train_quietly(script: Callable[[Any], int], cfg: Any) -> list[float]:
    """Trains without printing. Returns the loss of each step in nats per token; a NaN ends the run and the list. If a
    signal ends the run, it leaves through sys.exit. script: train.main."""
    with redirect_stdout(StringIO()):
        code = script(cfg)
    if code >= 128:  # a signal; what train.py has saved is in a temporary folder
        print("stopped: table and pictures are made at the end, so nothing is kept", file=sys.stderr)
        sys.exit(code)
    records = read_metrics(Path(cfg.runs) / cfg.name / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def compare(script: Callable[[Any], int], short: Any, failures: list[str]) -> list[Curves]:
    """Trains each failure with the arguments that wake it, and one whole run for each set of arguments, all from one
    seed. short: from short_training()."""
    found: list[Curves] = []
    wakes = {name: FAILURES[name].wakes for name in failures if name not in NOT_SEEN}
    for setting, together in groupby(sorted(wakes, key=wakes.__getitem__), key=wakes.__getitem__):
        losses = {}
        for name in ("whole", *together):
            cfg = short_training(type(short), short.steps, short.seed, short.device, setting.split())
            cfg.runs, cfg.data, cfg.tokenizer, cfg.model.context_length = (
                short.runs, short.data, short.tokenizer, short.model.context_length
            )  # fmt: skip
            cfg.break_it = BreakIt("none" if name == "whole" else name, cfg.break_it.score_gain)
            cfg.name = broken_name(f"{len(found)}-{name}", cfg.break_it.label)
            started = time.perf_counter()
            losses[name] = train_quietly(script, cfg)
            said = f"{losses[name][-1]:.3f} after {counted(len(losses[name]), 'step')}"
            show(f"training {name:18}{setting:57} loss {said:24}{time.perf_counter() - started:4.0f} s")
        found.append(Curves(setting, losses.pop("whole"), losses))
    return found
