"""The list of runs: `python sample.py list_runs=true`."""

import math
import sys
import time
from pathlib import Path

from training import checkpoint, config
from training.files import described
from training.help import aligned
from training.metrics import printable
from training.settings import Config

HEAD = ("saved", "name", "weights", "step", "tokens", "val loss", "at", "text", "context", "attention", "broken")


def table(runs: Path) -> str:
    """A line for each run in the folder, the one that saved last first. Damaged checkpoints are passed over, and named
    on stderr. ValueError if there is no run."""
    rows = {}
    for run in sorted(runs.iterdir()) if runs.is_dir() else []:
        for path in reversed(checkpoint.all_checkpoints(run / checkpoint.FOLDER)):
            try:
                rows[run.name] = (path.stat().st_mtime, row(run, path))
                break
            except (OSError, ValueError) as error:
                print(printable(config.one_line(str(error))), file=sys.stderr)
    if not rows:
        raise ValueError(f"runs={runs}: no run has a checkpoint there; train one first: python train.py")
    lines = [HEAD, *(cells for _, cells in sorted(rows.values(), reverse=True))]
    right = [i for i, name in enumerate(HEAD) if name in ("weights", "step", "tokens", "val loss", "at", "context")]
    return "\n".join(map(printable, aligned(lines, right)))


def row(run: Path, path: Path) -> tuple[str, ...]:
    """A run's line: its newest checkpoint, and the lowest validation loss that a checkpoint has. ValueError as
    checkpoint.load_state()."""
    state = checkpoint.load_state(path)
    cfg = config.from_dict(Config, {**state["config"], "resume": None})
    step, best = checkpoint.step_of(path), checkpoint.best(run / checkpoint.FOLDER)
    loss = math.nan if best is None else checkpoint.load_state(best)["val_loss"]
    weights = sum(math.prod(shape) for _, shape in described(path, "model.safetensors").values())
    return (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime)),
        config.one_line(run.name),
        in_short(weights),
        f"{step:,}",
        in_short(step * (cfg.tokens_per_step or cfg.batch_size * cfg.model.context_length)),
        f"{loss:.4f}" if math.isfinite(loss) else "",
        f"{checkpoint.step_of(best):,}" if best else "",
        config.one_line(str(cfg.data.path or cfg.data.source)),
        f"{cfg.model.context_length:,}",
        config.one_line(str(state.get("about", {}).get("attention", cfg.attention.impl))),
        state["broken"],
    )


def in_short(number: int) -> str:
    """12,345,678 as 12.3M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
