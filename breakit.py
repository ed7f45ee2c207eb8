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

    python breakit.py look=true run=NAME prompt='def f(x):'      every head's weights on a text, as a page to click on

look= draws the attention weights of all layers and heads, names heads with a known pattern (reads the token before, or
copies), and lets you follow each token. It writes look.html into the run's folder, or out=PATH.html. Without a prompt
the text is the first 256 tokens of the validation text. A broken run is shown as it is, and beside that with the whole
algorithm.

    python breakit.py explorer=true                              docs/explorer.html, the same to click through

The explorer is one page that loads no other file. It shows the worked example with each failure, tile size and mask,
with dropout and its backward; three more inputs that wake failures; and one head of a trained model. That head comes
from a trace: explorer=true real=PATH.json out=PATH.html makes a page of your own. docs/head.json was made by
`python train.py name=default` and `python breakit.py trace=true run=default layer=2 head=2 out=docs/head.json`.
"""

if __name__ == "__main__":  # before the imports, which load torch
    from training import start

    start.begin()

from pathlib import Path

import train
from lab.explorer import PAGE, explorer
from lab.look import look
from lab.page import gallery
from lab.runs import replay
from lab.settings import BreakIt as Config
from lab.story import head_of_run, trace, worked_example
from lab.trainings import short_training
from training import config
from training.machine import pick_device


def main(cfg: Config) -> None:
    """Runs the lab or one of the four other modes. Raises ValueError for mistakes that the user can correct."""
    match cfg.modes():
        case ["trace"]:
            trace_of(cfg)
        case ["look"]:
            look(cfg.run or "latest", Path(cfg.runs), cfg.prompt, cfg.tokens, Path(cfg.out) if cfg.out else None)
        case ["explorer"]:
            explorer(Path(cfg.real), Path(cfg.out or PAGE))
        case ["replay"]:
            replay(Path(str(cfg.replay)), pick_device(cfg.device))
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
        head = head_of_run(cfg.run, Path(cfg.runs), cfg.layer, cfg.head, cfg.tokens or 32, cfg.prompt)
        row, block, causal = len(head.q) - 1, 8, True
    trace(
        head, row if cfg.row is None else cfg.row, None if cfg.out is None else Path(cfg.out),
        failure=cfg.failure or "none", score_gain=cfg.score_gain, dtype=cfg.dtype, order=cfg.order,
        causal=causal if cfg.causal is None else cfg.causal,
        block_m=cfg.block_m or block, block_n=cfg.block_n or block,
    )  # fmt: skip


if __name__ == "__main__":
    config.run(main, Config, "breakit")
