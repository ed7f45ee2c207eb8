"""What python breakit.py does: its keys, and the four modes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from conf.keys import check, key
from data.tokenizer import from_json
from lab import failures, page
from lab.look import look, replay, text_of
from lab.trace import Head, head_of, made, trace, worked_example
from model.break_it import FAILURES
from training.machine import about, pick_device
from training.probe import record
from training.trained import find_trained, network


@dataclass
class Lab:
    """breakit.py's keys."""

    failure: str | None = key(None, f"one of {', '.join(FAILURES)}; null: all, and in a trace none")
    dtypes: list[str] = key(["float32"], f"of the comparison: {', '.join(failures.DTYPES)}")
    trainings: bool = key(False, "also two short trainings of each failure, whole and broken: some seconds each")
    out: str | None = key(None, "folder for break-it.md and its pictures; look: the file", least=1)

    trace: bool = key(False, "print a row of attention, tile by tile")
    look: bool = key(False, "write a page of what each head of a run's model reads")
    replay: str | None = key(None, "a kept fault, runs/NAME/faults/step_N: run its batch again", least=1)

    run: str | None = key(None, "trace, look: a run's name or latest; null: trace the worked example", least=1)
    runs: str = key("runs", "folder of all runs", least=1)
    prompt: str | None = key(None, "trace, look: the text; null: the run's validation text", least=1)
    tokens: int | None = key(None, "trace, look: how many of the validation text; without a run: random ones", least=1)
    layer: int = key(0, "trace: of the run's model, counted from 0", least=0)
    head: int = key(0, "trace: of the layer, counted from 0", least=0)
    row: int | None = key(None, "trace: which query, from 0; null: 3 of the worked example, else the last", least=0)
    block_m: int | None = key(None, "trace: query rows per tile; null: 2 in the worked example, else 8", least=1)
    block_n: int | None = key(None, "trace: key rows per tile; null: likewise", least=1)
    causal: bool | None = key(None, "trace: the causal mask; null: not in the worked example")
    score_gain: float = key(1.0, "trace: multiplies the scores", above=0)
    device: str = key("auto", "replay: auto | cpu | cuda | mps")

    def __post_init__(self):
        check(self)
        if self.failure not in (None, *FAILURES):
            raise ValueError(f"failure={self.failure} is not known; choose {', '.join(FAILURES)}")
        if unknown := set(self.dtypes) - set(failures.DTYPES):
            raise ValueError(f"dtypes={sorted(unknown)} are not known; choose {', '.join(failures.DTYPES)}")


def run(cfg: Lab) -> None:
    """Raises ValueError for a user's mistake."""
    named = None if cfg.run == "latest" else cfg.run
    if cfg.replay:
        replay(Path(cfg.replay), pick_device(cfg.device))
    elif cfg.look:
        look(named, Path(cfg.runs), cfg.prompt, cfg.tokens, Path(cfg.out) if cfg.out else None)
    elif cfg.trace:
        example = cfg.run is None and cfg.tokens is None
        head = worked_example() if example else head_of_run(cfg, named) if cfg.run else made(cfg.tokens or 8)
        row = cfg.row if cfg.row is not None else 3 if example else len(head.q) - 1
        causal = not example if cfg.causal is None else cfg.causal
        M, N = (size or (2 if example else 8) for size in (cfg.block_m, cfg.block_n))
        for line in trace(head, row, M, N, causal, cfg.failure or "none", cfg.score_gain):
            print(line)
    else:
        predict_and_find(cfg)


def predict_and_find(cfg: Lab) -> None:
    """The table; with trainings= the trainings, and with out= the page."""
    torch.set_num_threads(1)  # two are no faster on such small tiles, and slower on a busy machine
    names = [cfg.failure] if cfg.failure else list(FAILURES)
    lines, losses = failures.table(names, cfg.dtypes), {}
    for name in names if cfg.trainings else []:
        losses[name] = page.trainings(name)
        print(f"{name}, {FAILURES[name].wakes}: {page.in_words(losses[name])}", flush=True)
    if cfg.out:
        for name in names:
            page.picture(name, losses.get(name), Path(cfg.out) / "break" / f"{name}.png")
        print(page.write_page(Path(cfg.out), lines, losses, about(torch.device("cpu"))))


def head_of_run(cfg: Lab, named: str | None) -> Head:
    """A head of a run's best checkpoint on the prompt, or on the first tokens of its validation text."""
    trained = find_trained(named, "best", Path(cfg.runs))
    net = network(trained, "tiled", torch.device("cpu"))
    for name, value, most in (("layer", cfg.layer, net.config.n_layer), ("head", cfg.head, net.config.n_head)):
        if value >= most:
            raise ValueError(f"{name}={value}: {trained.path} has {most}, counted from 0")
    idx, documents = text_of(trained, cfg.prompt, cfg.tokens or min(32, net.config.context_length))
    call = record(net, idx, documents)[cfg.layer]
    labels = [from_json(trained.tokenizer).decode([token]) for token in idx[0].tolist()]
    return head_of(call, cfg.head, labels, f"{trained.path.parents[1].name}, {trained.path.name}")
