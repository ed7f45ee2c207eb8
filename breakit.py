"""Takes lines out of attention, one at a time, and shows what each is for.

    python breakit.py                                            every failure beside the unbroken algorithm
    python breakit.py failure=no_max                             one failure, with its explanation
    python breakit.py run=NAME                                   on the attention of your own run

The lab takes q, k, v and do from a model on real text: a run's model, or a small one that it trains first. It tries
each failure in every implementation and dtype, on inputs where the failure sleeps and on inputs where it acts. For each
trial it prints a line: what theory predicts, what was observed, where the failure begins, and how far the results are
from float64. Then it trains small models, unbroken and broken, from one seed. It writes a page of all failures,
runs/breakit/break-it.md, with its figures and pictures in runs/breakit/break.

    python breakit.py out=docs                                   docs/break-it.md, and docs/break

    python breakit.py replay=runs/NAME/faults/step_000123        runs the batch again that ended a run

A run with probe.every=N keeps the batch and the weights that gave NaN or infinity. replay= runs them through the model
again and prints the gauges of every layer and the first bad tile.

    python breakit.py trace=true                                 one row of the worked example, tile by tile
    python breakit.py trace=true failure=no_rescale              the same without the rescaling
    python breakit.py trace=true failure=no_max score_gain=120 dtype=float32
    python breakit.py trace=true run=latest layer=3 head=1 row=20    a row of a trained model's head

The worked example is that of docs/attention.md: five tokens, no mask, tiles of two. For a run, the trace shows a head
on the first tokens of the validation text. out=PATH.json keeps the trace: q, k and v of the head, and every tile.

    python breakit.py explorer=true                              docs/explorer.html, the same to click through

The explorer is one page that loads no other file. It shows the worked example with each failure, tile size and mask,
with dropout and its backward; three more inputs that wake failures; and one head of a trained model. That head comes
from a trace: explorer=true real=PATH.json out=PATH.html makes a page of your own. docs/head.json was made by
`python train.py name=default` and `python breakit.py trace=true run=default layer=2 head=2 out=docs/head.json`.
"""

if __name__ == "__main__":  # before the imports, which load torch
    from training import start

    start.begin()

from dataclasses import dataclass, fields
from pathlib import Path

import train
from lab.explorer import PAGE, explorer
from lab.gallery import gallery
from lab.runs import replay
from lab.story import ORDERS, STORY_FAILURES
from lab.trace import head_of_run, trace, worked_example
from lab.trainings import short_training
from model.break_it import FAILURES
from training import config
from training.machine import pick_device

# The keys that each mode reads. An error about a key names the first mode that reads it.
READS = {
    "the lab": ("failure", "run", "runs", "steps", "seed", "device", "out"),
    "trace=true": ("trace", "failure", "score_gain", "dtype", "causal", "block_m", "block_n", "order", "row", "run",
                   "runs", "layer", "head", "tokens", "out"),
    "explorer=true": ("explorer", "real", "out"),
    "replay=PATH": ("replay", "device"),
}  # fmt: skip
INSTEAD = {  # why the mode does not read other keys
    "explorer=true": "it shows a trace that was kept with out=; give that as real=PATH",
    "replay=PATH": "the configuration comes with the fault",
}
NEEDS_RUN = {  # keys that mean nothing without run=, and why
    "the lab": (("runs",), "the lab trains its own model; add run=NAME to take another"),
    "trace=true": (("runs", "layer", "head", "tokens"), "the worked example has no such choice; add run=NAME"),
}
LEAST = {"block_m": 1, "block_n": 1, "tokens": 1, "steps": 1, "layer": 0, "head": 0, "row": 0}


@dataclass
class Config:
    """Every key of the command line. Raises ValueError for invalid values, and for keys that the mode does not
    read."""

    trace: bool = False  # print one row of attention tile by tile, instead of the lab
    explorer: bool = False  # make the page docs/explorer.html, instead of the lab
    replay: str | None = None  # PATH in runs/NAME/faults: run the batch that gave NaN again, instead of the lab
    failure: str | None = None  # a name as in train.py's break_it=; None: all failures in the lab, none in a trace
    steps: int = 200  # lab: updates of each short training of a failure
    seed: int = 1337  # lab: the seed of all its trainings
    device: str = "auto"  # lab, replay: auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps
    score_gain: float = 1.0  # trace: multiplies the scores
    dtype: str = "float64"  # trace: float64 | float32, which overflows at a log-sum-exp of 88.7
    causal: bool | None = None  # trace: causal mask; None: false in the worked example, true in a run
    block_m: int | None = None  # trace: query rows of a tile; None: 2 in the worked example, 8 in a run
    block_n: int | None = None  # trace: keys of a tile; None: 2 in the worked example, 8 in a run
    order: str = "queries_outside"  # trace: the outer loop, queries_outside | keys_outside
    row: int | None = None  # trace: the query row; None: "on" in the worked example, the last one in a run
    # name or folder of a run, or latest; None: a new small model; in a trace, the worked example
    run: str | None = None
    runs: str = "runs"  # the folder of all runs
    layer: int = 0  # trace of a run: which layer, from 0
    head: int = 0  # trace of a run: which head, from 0
    tokens: int = 32  # trace of a run: how many tokens of its validation text
    real: str = "docs/head.json"  # explorer: the trace of a trained head
    out: str | None = None  # lab: folder; None: runs/breakit | trace: PATH.json | explorer: PATH.html

    def __post_init__(self):
        on = {"trace=true": self.trace, "explorer=true": self.explorer, "replay=PATH": self.replay is not None}
        chosen = [mode.replace("PATH", str(self.replay)) for mode in on if on[mode]]
        if len(chosen) > 1:
            raise ValueError(f"{' '.join(chosen)}: choose one of them, or none for the lab")
        mode = next((mode for mode in on if on[mode]), "the lab")
        if self.trace and self.failure in FAILURES.keys() - STORY_FAILURES.keys():
            raise ValueError(f"failure={self.failure}: no trace of it; python breakit.py failure={self.failure} has it")
        failures = FAILURES if mode == "the lab" else STORY_FAILURES
        for name, known in (("failure", failures), ("dtype", ("float64", "float32")), ("order", ORDERS)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")
        if not 0 < self.score_gain <= 1e30:  # as in break_it; the scores themselves would leave float32
            raise ValueError(f"score_gain={self.score_gain} is outside (0, 1e30]; 1 changes nothing")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self.check_read(mode)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        ending = {"trace=true": ".json", "explorer=true": ".html"}.get(mode)
        if ending and self.out is not None and not self.out.endswith(ending):
            raise ValueError(f"out={self.out}: name a file that ends in {ending}")
        if mode == "the lab" and self.out is not None and (not self.out or Path(self.out).is_file()):
            raise ValueError(f"out={self.out}: the lab wants a folder for its pictures")

    def check_read(self, mode: str) -> None:
        """Raises ValueError for a key that was given but that the mode does not read."""
        keys, why = NEEDS_RUN.get(mode, ((), ""))
        for key in fields(self):
            typed = f"{key.name}={getattr(self, key.name)}"
            if getattr(self, key.name) == key.default:
                continue
            if key.name not in READS[mode]:
                reader = next(other for other, read in READS.items() if key.name in read)
                raise ValueError(f"{typed}: {mode} does not read it; {INSTEAD.get(mode, f'it is for {reader}')}")
            if self.run is None and key.name in keys:
                raise ValueError(f"{typed}: {why}")


def main(cfg: Config) -> None:
    """Runs the lab or one of the three other modes. Raises ValueError for mistakes that the user can correct."""
    match cfg:
        case Config(trace=True):
            trace_of(cfg)
        case Config(explorer=True):
            explorer(Path(cfg.real), Path(cfg.out or PAGE))
        case Config(replay=str(path)):
            replay(Path(path), pick_device(cfg.device))
        case _:
            device, out = pick_device(cfg.device), Path(cfg.out or "runs/breakit")
            short = short_training(train.Config, cfg.steps, cfg.seed, cfg.device)
            gallery(train.main, short, failure=cfg.failure, run=cfg.run, runs=Path(cfg.runs), device=device, out=out)


def trace_of(cfg: Config) -> None:
    """Prints the trace. Fills in the defaults, which the worked example and a run do not share."""
    if cfg.run is None:
        head = worked_example()
        row, block, causal = 3, 2, False
    else:
        head = head_of_run(cfg.run, Path(cfg.runs), cfg.layer, cfg.head, cfg.tokens)
        row, block, causal = len(head.q) - 1, 8, True
    trace(
        head,
        row if cfg.row is None else cfg.row,
        None if cfg.out is None else Path(cfg.out),
        failure=cfg.failure or "none",
        score_gain=cfg.score_gain,
        dtype=cfg.dtype,
        causal=causal if cfg.causal is None else cfg.causal,
        block_m=cfg.block_m or block,
        block_n=cfg.block_n or block,
        order=cfg.order,
    )


if __name__ == "__main__":
    config.run(main, Config, "breakit")
