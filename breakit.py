"""Takes lines out of attention, one at a time, and shows what each is for.

    python breakit.py                                            every failure: predicted and found
    python breakit.py failure=no_max                             one, with two short trainings, whole and broken
    python breakit.py failure=no_max out=docs                    its section of docs/break-it.md, and its picture
    python breakit.py trace=true                                 a row of attention, tile by tile
    python breakit.py trace=true failure=no_rescale              the same without the rescaling
    python breakit.py look=true prompt='def f(x):'               what each head of your model reads, as a page
    python breakit.py replay=runs/NAME/faults/step_000123        the batch again that ended a run with NaN
    python breakit.py reveal=NAME                                what break_it=mystery took out of a run

docs/explorer.html shows attention and its failures tile by tile, in a browser; it needs no command.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from conf.keys import check, key
from lab import failures, page
from lab.look import look, replay
from lab.trace import trace, worked_example
from model.break_it import FAILURES, BreakIt
from training.checkpoint import find_checkpoint
from training.config import command
from training.machine import about


@dataclass
class Lab:
    failure: str = key("none", among=" | ".join(("none", *FAILURES)), note="none: all, but in a trace none")
    dtype: str = key("float32", "of the comparison", among="float32 | bf16 | fp16")
    out: str | None = key(None, "folder for break-it.md and pictures; look: the file", least=1)

    trace: bool = key(False, "print a row of attention, tile by tile")
    look: bool = key(False, "write a page of what each head of a run's model reads")
    replay: str | None = key(None, "a kept fault, runs/NAME/faults/step_N: run its batch again", least=1)
    reveal: str | None = key(None, "a run with break_it=mystery: what was taken out", least=1)

    run: str | None = key(None, "look: a run's name; null: the one that saved last and is not broken", least=1)
    runs: str = key("runs", "folder of all runs", least=1)
    prompt: str = key("", "look: the text")
    row: int = key(3, "trace: which query, from 0", least=0)
    block_m: int = key(2, "trace: query rows per tile", least=1)
    block_n: int = key(2, "trace: key rows per tile", least=1)
    causal: bool = key(False, "trace: with the causal mask")
    score_gain: float = key(1.0, "trace: multiplies the scores", above=0)

    def __post_init__(self):
        check(self)
        if self.look != bool(self.prompt):
            raise ValueError("look=true reads a text, and nothing else does: give both look=true and prompt=TEXT")
        if self.trace + self.look + (self.replay is not None) + (self.reveal is not None) > 1:
            raise ValueError("trace=, look=, replay= and reveal= are different things: give one of them")
        if self.failure != "none" and (self.look or self.replay or self.reveal):
            raise ValueError("look=, replay= and reveal= take a run as it is: leave out failure=")


def lab(cfg: Lab) -> None:
    if cfg.replay:
        replay(Path(cfg.replay))
    elif cfg.reveal:
        break_it = find_checkpoint(cfg.reveal, Path(cfg.runs)).options("break_it", BreakIt)
        if not break_it.removed:
            raise ValueError(f"reveal={cfg.reveal}: nothing is taken out of this run")
        for name in break_it.removed:
            print(f"{name}: without {FAILURES[name].removed}. It acts {FAILURES[name].acts}; docs/break-it.md#{name}")
    elif cfg.look:
        look(cfg.run, Path(cfg.runs), cfg.prompt, Path(cfg.out) if cfg.out else None)
    elif cfg.trace:
        tiles = cfg.block_m, cfg.block_n, cfg.causal or cfg.failure == "local_mask"
        print(*trace(worked_example(), cfg.row, *tiles, cfg.failure, cfg.score_gain), sep="\n")
    else:
        torch.set_num_threads(1)  # two are no faster on such small tiles, and slower on a busy machine
        names = list(FAILURES) if cfg.failure == "none" else [cfg.failure]
        lines, losses = failures.table(names, cfg.dtype), {}
        for name in names if len(names) == 1 or cfg.out else []:
            losses[name] = page.trainings(name)
            print(f"{name}, {FAILURES[name].wakes}: {page.in_words(losses[name])}", flush=True)
        if cfg.out:
            for name in names:
                page.picture(name, losses[name], Path(cfg.out) / "break" / f"{name}.png")
            print(page.write_page(Path(cfg.out), lines, losses, about(torch.device("cpu"))))


if __name__ == "__main__":
    command("breakit", Lab, lab)
