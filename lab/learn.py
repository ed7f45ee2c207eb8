"""How fast a model learns: validation bits per byte against seconds. `python bench.py mode=learn`

bench.py says which recipes it trains. They have the same text, machine and seconds. Tokenizers differ, so bits per byte
are compared. Evaluations count: each recipe has them as often as takes a similar share of its time.

A row is an evaluation of one run.
"""

import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch
from torch import nn

from data.dataset import Dataset
from lab.charts import new_figure
from lab.meter import wait
from lab.peer import load, plain, theirs
from lab.settings import Bench
from lab.steps import begin
from parallel.processes import ALONE
from training import config
from training.machine import pick_device
from training.metrics import read_metrics
from training.optimizer import learning_rate, next_place
from training.run import data_of, validation
from training.settings import Config

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["commit", "device", "torch", "triton", "dtype", "text", "tokenizer", "name", "how", "seed", "budget"]
COLUMNS += ["step", "seconds", "bits_per_byte"]
STEPS = 10**9  # more than any run makes: the time ends it
COMMON = [f"steps={STEPS}", "eval_tokens=65536", "sample_every=0", f"checkpoint_every={STEPS}", "wandb.mode=disabled"]
TEXT = {False: "pystdlib", True: "pypackages"}  # by whether there is a GPU, as in RECIPES
RECIPES = {
    "nanoGPT": {
        False: ["experiment=shakespeare", "eval_every=500"],
        True: ["experiment=shakespeare_gpu", "eval_every=1000"],
    },
    "default": {False: ["eval_every=100"]},
    "laptop": {False: ["experiment=laptop", "eval_every=100"]},
    "gpu_minute": {True: ["experiment=gpu_minute", "eval_every=1000"]},
    "gpu_ten_minutes": {True: ["experiment=gpu_ten_minutes", "eval_every=1000"]},
}
LONG = 300  # seconds from which gpu_ten_minutes is trained in the place of gpu_minute


def learn(cfg: Bench) -> None:
    """Trains each with each seed, prints where each run ended, and writes learn.csv and learn.png into the folder out.
    Raises ValueError for a run that train.py refuses, a file that is not nanoGPT's, or a learn.csv of other columns."""
    module, device = None if cfg.peer is None else load(Path(cfg.peer)), pick_device(cfg.device)
    on_gpu = device.type == "cuda"
    of_all = [*COMMON, f"data={TEXT[on_gpu]}", *shlex.split(cfg.also)]
    of_all += [f"max_minutes={cfg.seconds / 60!r}", f"device={cfg.device}"]
    jobs = []
    for seed, (name, recipe) in product(cfg.seeds, recipes(on_gpu, cfg.seconds).items()):
        typed = [*recipe, *of_all, f"seed={seed}"]
        ((own, _),) = config.compose(typed, Config, "config", ROOT / "conf", "train")  # refused before any training
        jobs.append((name, typed, own))
    results, autocast = begin(device, Path(cfg.out), "learn.csv", COLUMNS)
    for name, typed, own in jobs:
        peer = module if name == "nanoGPT" else None
        rows = train_peer(peer, own, device, autocast) if peer else train_ours(typed)
        how = "model.py in a plain loop" if peer else "its recipe in train.py" if name == "nanoGPT" else "train.py"
        facts = {"text": own.data.source, "tokenizer": own.tokenizer.kind, "name": name, "how": how, "seed": own.seed}
        results.append([facts | {"budget": cfg.seconds} | row for row in rows])
        last = results.rows[-1]
        print(f"  {name:10} seed {own.seed}: {last['bits_per_byte']:.4f} bits per byte after {last['seconds']:.1f} s, "
              f"{last['step']} steps ({how})", flush=True)  # fmt: skip
    draw(results.rows, Path(cfg.out) / "learn.png")
    results.end()


def recipes(on_gpu: bool, seconds: float) -> dict[str, list[str]]:
    """Arguments of train.py by the recipe's name, for this budget of time."""
    other = "gpu_minute" if seconds >= LONG else "gpu_ten_minutes"
    return {name: of[on_gpu] for name, of in RECIPES.items() if on_gpu in of and name != other}


def train_ours(typed: list[str]) -> list[dict[str, Any]]:
    """The evaluations of a run of train.py, whose folder is not kept."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(ROOT / "train.py"), *typed, f"runs={runs}", "name=x"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{shlex.join(command)} failed: {(done.stderr.strip() or 'a NaN').splitlines()[-1]}")
        found = [record for record in read_metrics(Path(runs) / "x/metrics.jsonl") if "val_loss" in record]
    return [{"bits_per_byte": r["val_bits_per_byte"]} | {key: r[key] for key in ("step", "seconds")} for r in found]


def train_peer(module: ModuleType, cfg: Config, device: torch.device, autocast: Any) -> Iterator[dict[str, Any]]:
    """Trains nanoGPT's model by this recipe, and gives its evaluations. The rate falls by the clock, as in train.py."""
    dataset, loader = data_of(cfg, None, None, ALONE, cfg.batch_size)
    torch.manual_seed(cfg.seed)
    model, rates, limit = theirs(module, cfg.model).to(device), cfg.optimizer, 60 * (cfg.max_minutes or math.inf)
    step, _ = plain(model, autocast, device, rates)
    place, made, first, now, began, over = 0.0, 0, 0.0, 0.0, time.perf_counter(), False
    while not over:
        left = (limit - now) * (made - 1) / (now - first) if made > 1 else math.inf  # the first may have compiled
        place = next_place(place, made, left, cfg.steps, rates.warmup_steps)
        step(loader.next(), learning_rate(place, cfg.steps, rates))
        made, now = made + 1, time.perf_counter() - began
        first, over = first or now, now >= limit
        if over or made % cfg.eval_every == 0:
            wait(device)
            row = {"step": made, "seconds": time.perf_counter() - began}
            with torch.no_grad(), autocast:
                row["bits_per_byte"] = bits_per_byte(model.eval(), cfg, dataset, device)
            model.train()
            yield row
            now = time.perf_counter() - began


def bits_per_byte(model: nn.Module, cfg: Config, dataset: Dataset, device: torch.device) -> float:
    """Of nanoGPT's model on the validation windows of train.py."""
    nats = size = 0.0
    for batch in validation(cfg, dataset):
        nats += float(model(batch.x.to(device), batch.y.to(device))[1]) * batch.y.numel()
        size += float(dataset.token_bytes[batch.y.numpy()].sum())
    return nats / (math.log(2) * size)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line for each run, a colour for each recipe, whose label has the mean of what its runs ended with."""
    about = "{text}, {budget:g} s a run".format(**rows[0])
    figure = new_figure(rows, 8, 4.8, f"learning: {about}")
    axes = figure.add_subplot(xlabel="seconds", ylabel="validation bits per byte")
    for number, name in enumerate(RECIPES):
        runs: dict[int, list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["name"] == name):
            runs.setdefault(row["seed"], []).append((row["seconds"], row["bits_per_byte"]))
            how = f"{row['how']}, {row['tokenizer']} tokens"
        if not runs:
            continue
        label = f"{name} ({how}): {mean(points[-1][1] for points in runs.values()):.3f}"
        for points in runs.values():
            axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=1, color=f"C{number}", label=label)
            label = "_"  # one line of the legend for all seeds
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)
