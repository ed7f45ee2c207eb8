"""What a run measures and where it goes: the screen, metrics.jsonl, samples.txt, loss.png, wandb.

A record is a dict of numbers with its "step". Losses are in nats per token, ms is the wall-clock time of a step, mfu
(model FLOPs utilization) a fraction of the GPU's peak. metrics.jsonl comes first: it is flushed before anything else
can fail. (JSON has no NaN; Python writes and reads NaN all the same.)
"""

import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.keys import key

DRAWING = 0.02  # share of a run's time that may go into loss.png; a GPU waits for each picture
# What wandb does if its environment variables do not say otherwise. With error reporting wandb 0.31 sends its own
# telemetry at exit, and waits ten seconds for a host that does not answer.
WANDB = {"WANDB_PROJECT": "tilegpt", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_INIT_TIMEOUT": "5",
         "WANDB_FINISH_TIMEOUT": "7", "WANDB_ERROR_REPORTING": "false"}  # fmt: skip


@dataclass
class WandbConfig:
    """wandb's own environment variables hold too: WANDB_API_KEY, WANDB_MODE, WANDB_NAME, ..."""

    mode: str = key("auto", among="auto (online if there is an API key, else disabled) | online | offline | disabled")
    project: str | None = key(None, "wandb project; null: WANDB_PROJECT, else tilegpt")
    tags: list[str] = key([], "tags of the wandb run; a broken run also gets broken:FAILURE")


class Metrics:
    """Takes a run's measurements. close() belongs in a finally.

    total_steps: 0 if the clock ends the run. broken: what break_it has taken out, "" for nothing. resume_step: later
    records and samples are deleted, because a resumed run makes these steps again. writes: False on other ranks."""

    def __init__(self, folder: Path, total_steps: int, broken: str = "", resume_step: int = 0, writes: bool = True):
        self.folder, self.total_steps, self.broken, self.writes = folder, total_steps, broken, writes
        self.stamp = f"BROKEN[{broken}] " if broken else ""
        self.wandb: Any = None
        self.wandb_id = folder / "wandb_id.txt"  # a resumed run continues its wandb run
        self.drawn_at, self.draw_seconds = time.perf_counter(), 1.0  # a guess: the first picture comes after 50 s
        self.curves: dict[str, list[tuple[int, float]]] = {"loss": [], "val_loss": []}
        self.lr: float | None = None  # of the last step
        if writes:
            self.forget_after(resume_step)
        self.file = open(folder / "metrics.jsonl" if writes else os.devnull, "a")  # noqa: SIM115 (until close)

    def forget_after(self, step: int) -> None:
        """Keeps the records and samples up to a step. wandb cannot forget: it gets a new run if any are dropped."""
        path, samples = self.folder / "metrics.jsonl", self.folder / "samples.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}\n")]  # a kill may have cut the last one short
        kept = [record for record in records if record["step"] <= step]
        if (step == 0 or len(kept) < len(records)) and self.wandb_id.exists():
            self.wandb_id.unlink()
            self.say("wandb: a new run" + f", because the steps after {step} are made again" * (step > 0))
        replace(path, "".join(json.dumps(record) + "\n" for record in kept))
        for record in kept:
            self.note(record)
        if samples.exists():
            parts = samples.read_bytes().decode().split("=====\n")[1:]  # read_text() would change a sample's \r
            replace(samples, "".join(f"=====\n{part}" for part in parts if int(part.split("\n")[0]) <= step))

    @property
    def best(self) -> tuple[float, int]:
        """The lowest validation loss and its step; (inf, 0) before the first."""
        return min(((loss, step) for step, loss in self.curves["val_loss"] if loss == loss), default=(math.inf, 0))

    def note(self, record: dict) -> None:
        self.lr = record.get("lr", self.lr)
        for name, curve in self.curves.items():
            if name in record:
                curve.append((record["step"], record[name]))

    def log(self, record: dict) -> None:
        """Writes a record to the file, then to the screen, then to wandb."""
        record |= {"broken": self.broken} if self.broken else {}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()  # flushed lines survive kill -9
        self.note(record)
        self.say(self.line(record))
        self.to_wandb("log", {name: x for name, x in record.items() if x is not None})

    def line(self, record: dict) -> str:
        """A record as one line for the eye and for grep."""
        head = f"step {record['step']:>5}" + (f"/{self.total_steps}" if self.total_steps else "")
        if "val_loss" in record:
            loss, step = self.best
            bits = record["val_bits_per_byte"]
            return f"{head} | val loss {record['val_loss']:.4f} | bits per byte {bits:.4f} | best {loss:.4f} at {step}"
        if "loss" not in record:
            shown = (f"{name} {x:.3g}" for name, x in record.items() if isinstance(x, float) and "." not in name)
            return " | ".join([head, *shown])  # without the entropy of each head
        eta, mfu = record["eta_s"], record["mfu"]
        parts = [head, f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"norm {record['grad_norm']:.2f}",
                 f"{record['ms']:.1f} ms", f"{record['tokens_per_second'] / 1e3:.1f}k tok/s",
                 f"mfu {mfu:.1%}" if mfu else "", f"mem {record['memory_gib']:.2f} GiB",
                 f"eta {int(eta) // 60}:{int(eta) % 60:02}" if eta is not None else ""]  # fmt: skip
        return " | ".join(filter(None, parts))

    def say(self, text: str) -> None:
        try:
            print(self.stamp + text, flush=True)
        except OSError:  # as in `| tee log`, where Ctrl-C ends tee first: the run goes on, and saves
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def sample(self, step: int, text: str) -> None:
        """Adds a text to samples.txt."""
        text = text.replace("=====", "= = = = =")  # which separates samples
        if self.writes:
            with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
                file.write(f"=====\n{step}\n{self.stamp}{text}\n")
        self.say(f"sample at step {step}: {text}")

    def draw(self, last: bool = False) -> None:
        """loss.png, if the last picture took less than DRAWING of the time since then; in any case at the end."""
        began = time.perf_counter()
        if not self.writes or (not last and self.draw_seconds > DRAWING * (began - self.drawn_at)):
            return
        from matplotlib.figure import Figure  # here, because the import takes half a second

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
        (steps, loss), (val_steps, val_loss) = (np.reshape(curve, (-1, 2)).T for curve in self.curves.values())
        n = max(1, len(loss) // 30)
        axes.plot(steps, loss, "C0.", ms=2, alpha=0.4)
        mean = np.convolve(loss, np.full(n, 1 / n), "valid") if len(loss) else loss
        axes.plot(steps[n // 2 :][: len(mean)], mean, "C0", label=f"training, mean of {n} steps")
        axes.plot(val_steps, val_loss, "C1o-", label="validation")
        for step in steps[~np.isfinite(loss)][:1]:
            axes.axvline(step, color="red", label=f"NaN at step {step:.0f}")
        axes.set_title(self.folder.name, color="red" if self.broken else "black", parse_math=False)
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)
        self.drawn_at = time.perf_counter()
        self.draw_seconds = self.drawn_at - began

    def begin_wandb(self, wanted: WandbConfig, config: dict) -> None:
        """Begins a wandb run; offline if it cannot begin online within 5 s. It costs a training ten seconds at most."""
        mode = os.environ.get("WANDB_MODE", "auto") if wanted.mode == "auto" else wanted.mode
        if not self.writes or mode == "disabled":
            return
        for name, value in WANDB.items():
            os.environ.setdefault(name, value)
        tags = [*wanted.tags, *(f"broken:{failure}" for failure in self.broken.split("+") if failure)]
        number = self.wandb_id.read_text() if self.wandb_id.exists() else os.urandom(4).hex()
        own = [("WANDB_NAME", "name", self.folder.name), ("WANDB_DIR", "dir", self.folder),
               ("WANDB_RUN_ID", "id", number), ("WANDB_RESUME", "resume", "allow")]  # fmt: skip
        arguments: dict[str, Any] = {name: value for variable, name, value in own if variable not in os.environ}
        arguments |= {"project": wanted.project, "tags": tags or None, "config": config}
        for attempt in dict.fromkeys(("online" if mode == "auto" else mode, "offline")):
            try:
                import wandb  # here, because it takes half a second

                wandb.teardown()  # ends the helper process of an earlier attempt or run, which still has its settings
                if wanted.mode == "online":
                    wandb.setup(wandb.Settings(mode=attempt))  # or login() would obey WANDB_MODE
                if attempt not in ("offline", "dryrun") and not wandb.login(prompt=False, verify=False):
                    self.say("wandb: not online, because there is no API key: `wandb login`, or wandb.mode=offline")
                    if mode == "auto":
                        return
                    continue
                self.wandb = wandb.init(mode=attempt, **arguments)
                self.wandb.define_metric("*", step_metric="step")  # wandb's own step counts calls
                self.wandb_id.write_text(self.wandb.id)
                later = f"offline; wandb sync {shlex.quote(str(Path(self.wandb.dir).parent))} sends this run later"
                self.say(f"wandb: {later if self.wandb.offline else self.wandb.url}")
                return
            except Exception as error:  # whatever it is: it cannot be imported, no network, a wrong key
                self.say(f"wandb: cannot begin {attempt} ({' '.join(str(error).split())})")

    def to_wandb(self, call: str, *arguments: Any, **options: Any) -> None:
        """A call of the wandb run. After an error the training goes on without wandb."""
        try:
            if self.wandb is not None:
                getattr(self.wandb, call)(*arguments, **options)
        except Exception as error:  # whatever it is: a dead helper process, a full disk
            self.say(f"wandb: gave up, the run goes on without it ({error or type(error).__name__})")
            self.wandb = None

    def close(self, exit_code: int = 0) -> None:
        try:
            self.file.close()
            self.draw(last=True)
        except OSError as error:  # of a full disk, which may have ended the run
            self.say(f"no loss.png ({error})")
        self.to_wandb("finish", exit_code=exit_code)


def replace(path: Path, text: str) -> None:
    """Overwrites a file by renaming a new one, so that a kill loses nothing."""
    new = path.with_name(f".tmp-{path.name}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
