"""What a run measures, and where it writes it: log lines, metrics.jsonl, samples.txt, loss.png, wandb.

    runs/NAME/
        metrics.jsonl   one JSON object per line, written and flushed first; loss.png is drawn from it
        samples.txt     the model's samples, each under a line with its step
        loss.png        training loss (line) and validation loss (points)
        wandb/          see training/wandb_run.py

A record is a plain dict of Python numbers with its "step". Each kind has a line on the screen (LINES).

Losses are in nats per token; ms, eta_s and seconds (of the run so far) are wall-clock times. mfu (model FLOPs
utilization) is a fraction of the device's peak, memory_gib the peak so far; both may be None. A broken run's records
also have "broken": its label.

JSON has no NaN, and broken runs have many. A float that is not finite is written as the string "nan", "inf" or "-inf",
and `read_metrics` turns it into a float again.

A thread draws loss.png and calls wandb, because importing matplotlib and wandb takes seconds. It begins at the first
record: before that torch.compile keeps Python busy, and later a GPU's steps leave it time.
"""

import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.text import counted
from training.files import FILES, FOLDERS, appending, harmless, own, printable, read, replacing
from training.machine import reader_may_leave
from training.wandb_run import WandbConfig, WandbRun, wandb_mode

# --- one line -------------------------------------------------------------------------------------------------------


# What only one kind of record has: the parts of its line, in their order. A part whose field is missing is left out.
LINES = {
    "val_loss": "eval step {step}/{total} | val loss {val_loss:.4f} | val bpb {val_bits_per_byte:.4f} | "
    "best {best[0]:.4f} at {best[1]}",
    "context_gain": "context step {step}/{total} | {given} | context worth {worth} | {context_ms:.0f} ms",
    "film_ms": "film step {step}/{total} | {patterns} | {film_ms:.0f} ms",
    "max_score": "probe step {step}/{total} | score {max_score:.2f} | headroom {headroom:.2f} nats to overflow | "
    "error {attention_error:.1e} | entropy {entropies} | {probe_ms:.0f} ms",
    # In fp16 a step with norm inf or nan was skipped, and the scale is then halved.
    "loss": "step {step:>5}/{total} | loss {loss:.4f} | bpb {bits_per_byte:.4f} | lr {lr:.2e} | scale {loss_scale:g} | "
    "norm {grad_norm:.2f} | {ms:.0f} ms | {speed} tok/s | mfu {mfu} | mem {memory} | eta {eta}",
}


def log_line(record: dict, total_steps: int) -> str:
    """One record as one line of ASCII for grep: the fields of its kind in LINES, always in the same order.

    A record of another kind has its numbers behind their keys. An evaluation record may have "best": (val_loss, step).
    The probe line shows the lowest entropy with its layer.head, and the highest.
    """
    kind = next((kind for kind in LINES if kind in record), "")
    if not kind:
        plain = (f"{key} {x:.4g}" for key, x in record.items() if isinstance(x, float))
        return stamp(record.get("broken")) + " | ".join((f"step {record['step']}/{total_steps}", *plain))
    shown = {key: x for key, x in record.items() if x is not None} | {"total": total_steps}
    if kind == "loss":
        mfu, memory = record["mfu"], record["memory_gib"]
        speed, eta = record["tokens_per_second"], round(record["eta_s"])
        shown |= {
            "speed": f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}",
            "mfu": "n/a" if mfu is None else f"{mfu:.1%}",
            "memory": "n/a" if memory is None else f"{memory:.2f} GiB",
            "eta": f"{eta // 60}:{eta % 60:02}" if eta < 3600 else f"{eta // 3600}:{eta // 60 % 60:02}:{eta % 60:02}",
        }
    elif kind == "film_ms":
        shares = {key.removeprefix("film."): x for key, x in record.items() if key.startswith("film.")}
        shown["patterns"] = " | ".join(f"{pattern} {share:.2f}" for pattern, share in shares.items())
    elif kind == "max_score":
        entropy = {key.removeprefix("entropy."): x for key, x in record.items() if key.startswith("entropy.")}
        least = min(entropy, key=entropy.__getitem__)
        shown["entropies"] = f"{entropy[least]:.2f} ({least}) to {max(entropy.values()):.2f}"
    elif kind == "context_gain":
        given = sorted(key.removeprefix("loss_given_") for key in record if key.startswith("loss_given_"))
        ends = [f"given {tokens} {record[f'loss_given_{tokens}']:.4f}" for tokens in sorted({given[0], given[-1]})]
        shown |= {"given": " | ".join(ends), "worth": worth_of(record)}
    parts = [part for part in LINES[kind].split(" | ") if re.findall(r"{(\w+)", part)[0] in shown]
    return stamp(record.get("broken")) + " | ".join(parts).format(**shown)


def stamp(broken: str | None) -> str:
    """ "BROKEN[no_max] " for a run without that step of the algorithm, "" for a normal run."""
    return f"BROKEN[{broken}] " if broken else ""


def worth_of(record: dict) -> str:
    """What the context is worth, with its standard error. Records of older versions have none."""
    gain, error = record["context_gain"], record.get("context_gain_error", math.nan)
    within = "" if abs(gain) > 2 * error else ", not measurable" if error >= 0 else ", standard error unknown"
    return f"{gain:.4f}" + (f" +- {error:.4f}" if error >= 0 else "") + f" nats per token{within}"


def broken_name(name: str, broken: str) -> str:
    """The name of a broken run, like "mine-BROKEN-no_max". `name` itself if it has that already, or if broken is ""."""
    fault = f"-BROKEN-{broken}"
    return f"{name}{fault}" if broken and fault not in name else name


def show(text: str) -> None:
    """Print a line, made printable(). If nobody reads the output any more, drop this line and all later ones: the run
    goes on, and its files have the measurements."""
    with reader_may_leave():
        print(f"{printable(text)}\n", end="", flush=True)  # in one piece, because a thread may print too


# --- files ----------------------------------------------------------------------------------------------------------

DRAWING = 1 / 50  # how much of a run's time may go into drawing pictures, about; a GPU's steps wait for them
PICTURES = 20  # number of pictures that a run sends to wandb; wandb keeps all of them
CURVES = ("loss_at_", "loss_given_", "passkey_")  # of training/context.py, whose pictures take numbers out of the keys
CURVE = re.compile(r"loss_(at|given)(_\d{1,12})+|passkey_(accuracy|\d{1,12}_depth_\d{1,12})")
SAMPLE_HEADER = re.compile(r"^===== (?:BROKEN\[.*\] )?sample at step (\d{1,18}) =====$", re.MULTILINE)


def read_samples(path: Path) -> list[tuple[int, str]]:
    """The samples in a samples.txt as (step, text), in order. ValueError as read() raises."""
    _, *parts = SAMPLE_HEADER.split(read(path))
    return [(int(step), text.strip("\n")) for step, text in zip(parts[::2], parts[1::2], strict=True)]


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl, with "nan", "inf" and "-inf" as floats again.

    Skips lines that are not records, and says on stderr how many: a kill may have cut the last one short, and someone
    may have edited the file. That should not end a run. ValueError as read() raises.
    """
    *lines, cut = read(path).split("\n")
    records = [record for record in map(_record, lines) if record is not None]
    if len(records) < len(lines) or cut:
        left = counted(len(lines) + bool(cut) - len(records), "line")
        print(printable(f"{path}: left out {left} without a record"), file=sys.stderr)
    return records


def frames(folder: Path, last: float = math.inf) -> dict[int, Path]:
    """{step: file} of the film's frames up to a step."""
    files = [file for file in (folder / "film").glob("step_*.png") if file.stem[5:].isdecimal() and file.is_file()]
    return {step: file for step, file in sorted((int(file.stem[5:]), file) for file in files) if step <= last}


def _record(line: str) -> dict | None:
    """The record in a line: a step and numbers. None if the line has anything else."""
    try:
        record = json.loads(line) if line else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    record = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()}
    other = {k: v for k, v in record.items() if not isinstance(v, int | float)}
    named = all(CURVE.fullmatch(key) for key in record if key.startswith(CURVES))
    known = all(k == "broken" or (v is None and k in ("mfu", "memory_gib")) for k, v in other.items())
    numbers = [v for v in record.values() if isinstance(v, int | float)]  # matplotlib cannot draw huge ones
    huge = any((isinstance(v, int) and abs(v) > 1 << 53) or 1e300 < abs(v) < math.inf for v in numbers)
    return record if known and named and not huge else None


def _json_line(record: dict) -> str:
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def append(path: Path, record: dict) -> None:
    """Adds a record to a metrics.jsonl, in one write, whether a run has it open or not."""
    with writing(path), appending(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read(1) not in (b"", b"\n")  # the last line, when a run was killed
        file.write(b"\n" * cut + _json_line(record).encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in an OSError which file it is about, and the way out. Of a full disk Python gives neither."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise OSError(
            f"{path} could not be written ({why}): free some space or make it writable, and run again or resume"
        ) from error


def rewrite(path: Path, content: Any) -> None:
    """Writes a new file of text, or of a matplotlib Figure, and renames it: a kill must lose nothing."""
    with writing(path), replacing(path) as file:
        if isinstance(content, str):
            file.write(content.encode(errors="surrogateescape"))
        else:
            content.savefig(file, dpi=120, format="png")


def drawable(text: str) -> str:
    """text with "?" for characters that matplotlib's font lacks, for example Chinese ones in a run's name. matplotlib
    would draw a box for them and print a warning."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return "".join(c if font.get_char_index(ord(c)) else "?" for c in text)


def loss_figure(records: list[dict], title: str, broken: str | None):
    """The records as a matplotlib Figure: training loss as a thin line, validation loss as points, linear axes.

    The title is red for a broken run. A dashed line marks the first step whose loss is not finite.
    """
    # We use Figure and not pyplot, which looks for a window system and keeps every figure in a global list. It is
    # imported late, so that step 1 need not wait: the import takes half a second, and minutes once, to index the fonts.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for key, style, label in (("loss", {"lw": 0.8}, "train"), ("val_loss", {"ls": "", "marker": "o", "ms": 4}, "val")):
        points = [(r["step"], r[key] if math.isfinite(r[key]) else math.nan) for r in records if key in r]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    bad = [r["step"] for r in records if not math.isfinite(r.get("loss", 0.0))]
    if bad:
        axes.axvline(bad[0], color="red", ls="--", lw=0.8, label=f"not finite from step {bad[0]}")
    title = drawable(f"{title} - BROKEN: {broken}" if broken else title)
    axes.set_title(title, color="red" if broken else "black", parse_math=False)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure


# --- metrics -------------------------------------------------------------------------------------------------


class Metrics:
    """Takes a run's measurements. Call `close` at the end of the run, also after an error.

    folder: runs/NAME. NAME is the title of the picture and the name of the wandb run.
    broken: the label of the run's break_it settings. It is added to every record, line, sample, title and tag.
    resume_step: the step of the resumed checkpoint; 0 for a new run, whose folder is empty. Later records, samples and
        frames of the film are deleted, because the run makes these steps again and each step has one record.
    Raises ValueError as wandb_mode() and own() do, before any file is changed.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        *,
        config: dict,
        wandb_config: WandbConfig,
        broken: str | None = None,
        resume_step: int = 0,
    ):
        self.folder, self.total_steps, self.broken = folder, total_steps, broken
        self.drawn = False  # whether loss.png shows everything in metrics.jsonl
        self.draw_again = 0.0  # time_to_draw() is False before this time, in seconds of time.perf_counter()
        self.step = self.sent = resume_step  # steps of the last record and of the last picture sent to wandb
        self.best: tuple[float, int] | None = None  # (val_loss, step) of the lowest finite validation loss
        self.thread = ThreadPoolExecutor(1, "metrics")
        self.jobs: deque[Future] = deque()  # of the thread, oldest first
        self.mode = wandb_mode(wandb_config)
        for name in (*FILES, *FOLDERS):
            own(folder / name, folder=name in FOLDERS)  # before anything is written
        self._keep_until(resume_step)
        self.file = appending(folder / "metrics.jsonl")

        self.progress = None
        if sys.stdout.isatty():
            # The bar is drawn again with each line, and does not change in between.
            self.progress = tqdm(
                desc=f"{stamp(broken)}step", total=total_steps, initial=resume_step, file=sys.stdout,
                dynamic_ncols=True, bar_format="{desc} {n}/{total} {bar} {elapsed}",
            )  # fmt: skip
        self.begin_wandb = partial(WandbRun, self.mode, wandb_config, folder, config, broken, self.say)

    @cached_property
    def wandb(self) -> WandbRun:
        """wandb's run, which begins when it is first asked for. Only the thread asks."""
        return self.begin_wandb()

    def _keep_until(self, step: int) -> None:
        """Delete the records, samples and frames of the film after `step`."""
        for at, frame in frames(self.folder).items():
            if at > step:
                frame.unlink()
        path, samples = self.folder / "metrics.jsonl", self.folder / "samples.txt"
        records = [record for record in (read_metrics(path) if path.exists() else []) if record["step"] <= step]
        if not records and step > 0 and path.exists():  # a run under another name has none yet
            print(printable(f"{path} has no record of the steps up to {step:,}"), file=sys.stderr)
        for record in records:
            self._note_best(record)
        rewrite(path, "".join(map(_json_line, records)))
        text = read(samples, "surrogateescape") if samples.exists() else ""  # what is no UTF-8 stays as it is
        past = [match.start() for match in SAMPLE_HEADER.finditer(text) if int(match[1]) > step]
        rewrite(samples, text[: past[0]] if past else text)

    def _note_best(self, record: dict) -> None:
        loss = record.get("val_loss", math.nan)
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            self.best = (loss, record["step"])

    def say(self, text: str) -> None:
        """Print plain text, made printable(), above the progress bar if there is one."""
        if self.progress:
            with reader_may_leave():
                self.progress.write(printable(text))
        else:
            show(text)

    def still_there(self) -> None:
        """ValueError if the run's folder or metrics.jsonl was deleted or moved: what we write now would be lost."""
        file = self.folder / "metrics.jsonl"
        if file.exists():
            return
        if any(self.folder.glob("checkpoints/step_*")):
            raise ValueError(
                f"{file} was deleted or moved while the run went on, with the measurements so far; the checkpoints "
                "are there: move it back if you can, and use resume=auto"
            )
        raise ValueError(
            f"the folder {self.folder} was deleted or moved while the run went on, with its metrics, samples and "
            "checkpoints, and the steps since the last one are lost; run again, or move it back and use resume=auto"
        )

    def later(self, job: Callable[[], object]) -> None:
        """Have the thread do a job after those before it. raise_errors() raises its error later."""
        self.jobs.append(self.thread.submit(job))

    def raise_errors(self, wait: bool = False) -> None:
        """Raise the error of a job that has failed, such as the OSError of a picture that cannot be written. wait: for
        all jobs."""
        while self.jobs and (wait or self.jobs[0].done()):
            self.jobs.popleft().result()

    def log(self, record: dict) -> None:
        """Write a record to the file, then to the screen, then to wandb. Raises as raise_errors() does, and ValueError
        if the run's folder is gone."""
        self.still_there()
        self.raise_errors()
        if self.broken:
            record = {**record, "broken": self.broken}
        self.drawn = False
        self.step = record["step"]
        with writing(self.folder / "metrics.jsonl"):
            self.file.write(_json_line(record).encode())
            self.file.flush()  # flushed lines survive kill -9; only a power cut could lose them
        self._note_best(record)
        if self.progress:
            self.progress.n = record["step"]  # say() draws the bar again
        self.say(log_line({**record, "best": self.best}, self.total_steps))
        if self.mode != "disabled":
            self.later(lambda: self.wandb.log(record))

    def sample(self, step: int, text: str) -> None:
        """Append a sample, without control characters, to samples.txt and print it."""
        self.still_there()
        header = f"===== {stamp(self.broken)}sample at step {step} ====="
        path = self.folder / "samples.txt"
        body = SAMPLE_HEADER.sub(lambda line: f" {line[0]}", harmless(text))  # no line of it begins another sample
        with writing(path), appending(path) as file:
            file.write(f"{header}\n{body}\n\n".encode())
        self.say(f"{header}\n{text}\n")
        if self.mode != "disabled":
            samples, note = read_samples(path), f"{stamp(self.broken)}newest sample first"
            self.later(lambda: self.wandb.samples(step, samples, note))

    def picture_later(self, step: int, draw: Callable[[], Path]) -> None:
        """Have the thread draw a picture and give it to wandb."""
        self.later(lambda: self.wandb.picture(step, draw()) if self.mode != "disabled" else draw())

    def time_to_draw(self) -> bool:
        """Whether the last picture is drawn, and took at most DRAWING of the time that has passed since then."""
        return time.perf_counter() >= self.draw_again

    def picture(self) -> None:
        """draw_later(), and wait for the picture."""
        self.draw_later()
        self.raise_errors(wait=True)

    def draw_later(self) -> None:
        """Have the thread draw loss.png from metrics.jsonl if there are new records.

        The picture goes to wandb too, at most PICTURES times in total_steps and once more at the end.
        """
        if self.drawn:
            return
        self.still_there()
        self.drawn, self.draw_again = True, math.inf  # not again before _draw() has ended
        self.later(partial(self._draw, self.step))

    def _draw(self, step: int) -> None:
        started = time.perf_counter()
        figure = loss_figure(read_metrics(self.folder / "metrics.jsonl"), self.folder.name, self.broken)
        rewrite(self.folder / "loss.png", figure)
        now = time.perf_counter()
        self.draw_again = now + (now - started) / DRAWING
        if step - self.sent >= self.total_steps / PICTURES:
            self._send(step)

    def _send(self, step: int) -> None:
        """Gives the picture of this step to wandb."""
        self.wandb.picture(step, self.folder / "loss.png")
        self.sent = step

    def close(self, exit_code: int = 0) -> None:
        """Close the progress bar, the file, the wandb run, which first gets the last picture, and the thread."""
        if self.progress:
            with reader_may_leave():
                self.progress.close()
        try:
            with writing(self.folder / "metrics.jsonl"):
                self.file.close()  # which writes what a full disk has refused so far
            self.raise_errors(wait=True)
        finally:
            if self.sent < self.step and (self.folder / "loss.png").exists():
                self.later(partial(self._send, self.step))
            self.later(lambda: self.wandb.finish(exit_code))
            self.thread.shutdown()
            self.raise_errors(wait=True)


class NoMetrics:
    """The Metrics of every rank but the first: takes everything, and does nothing."""

    best = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
