"""Weights & Biases (wandb): sends a run there if wandb can be reached, and keeps training if wandb fails.

    runs/NAME/
        wandb_id.txt    the id of the wandb run, so that a resumed run continues it
        wandb/          wandb's own files; `wandb sync` sends the offline ones

wandb never stops the training or delays it: a thread of training/metrics.py makes and calls the WandbRun. The price:
after an error wandb's curves end. Those in the run's folder are complete.
"""

import html
import importlib.util
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.keys import check, either, key
from training.files import own, replacing

WANDB_INIT_SECONDS = 5.0
WANDB_FINISH_SECONDS = 20.0
WANDB_SAMPLES = 50  # rows in the table of samples; a long run sends the whole table hundreds of times

TABLE_HEAD = (
    '<meta charset="utf-8">'
    "<style>td, th { border: 1px solid #ccc; padding: 4px 8px; text-align: left; vertical-align: top }"
    " table { border-collapse: collapse } pre { margin: 0; white-space: pre-wrap }</style>"
)


@dataclass
class WandbConfig:
    """mode: auto and online are offline without an API key, or if the run cannot begin online within 5 s. auto is
    disabled if the wandb package is not installed.

    wandb's environment variables override settings that have their defaults: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY
    and WANDB_TAGS.
    """

    mode: str = key(
        "auto", among="auto (online if there is an API key and the host answers) | online | offline | disabled"
    )
    project: str = key("tilegpt", "wandb project of the run")
    entity: str | None = key(None, "wandb team or user; null: the default of the API key")
    tags: list[str] = key([], "tags of the wandb run; a broken run also gets broken:FAILURE")

    def __post_init__(self):
        check(self, "wandb.")


def wandb_mode(config: WandbConfig) -> str:
    """auto | online | offline | disabled: config's, or WANDB_MODE where that is auto. Does not import wandb.

    Raises ValueError for an unknown mode, and if online or offline was asked for and wandb is not installed.
    """
    mode, asked = config.mode, f"wandb.mode={config.mode}"
    if mode == "auto" and os.environ.get("WANDB_MODE"):
        mode = os.environ["WANDB_MODE"]
        asked = f"WANDB_MODE={mode}"
        if mode not in (modes := ("auto", "online", "offline", "disabled")):
            raise ValueError(f"{asked} is not known; choose {either(modes)}")
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # no origin: only a folder called wandb, which wandb makes for its files
        if mode in ("online", "offline"):
            raise ValueError(
                f"{asked}, but the wandb package is not installed: pip install wandb, or wandb.mode=disabled"
            )
        return "disabled"
    return mode


def from_environment(config: WandbConfig) -> dict[str, str]:
    """wandb's environment variables that we use: those that are set and that no key of `config` overrides."""
    usual = WandbConfig()
    free = {"WANDB_PROJECT": config.project == usual.project, "WANDB_TAGS": config.tags == usual.tags}
    names = ("WANDB_PROJECT", "WANDB_NAME", "WANDB_TAGS", "WANDB_DIR")
    return {name: os.environ[name] for name in names if free.get(name, True) and os.environ.get(name)}


def first_line(error: Exception) -> str:
    """The first line of an error's text, cut: it may have a stranger's id in it. Its type if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines and lines[0] != "<no message>" else type(error).__name__


class WandbRun:
    """A wandb run. If it cannot begin online, it becomes an offline run. Any other error ends it with one line through
    `say`, and the training continues.

    mode: as wandb_mode() returns it. folder: runs/NAME. run_config: the configuration that wandb shows.
    By default the wandb run has the folder's name and puts its files there. WANDB_NAME and WANDB_DIR change that.
    """

    def __init__(
        self,
        mode: str,
        config: WandbConfig,
        folder: Path,
        run_config: dict,
        broken: str | None,
        say: Callable[[str], None],
    ):
        self.run: Any = None  # wandb's
        self.mode, self.folder, self.say = mode, folder, say
        if mode == "disabled":
            return
        # wandb reports its own errors to the same host and waits for that at exit: 10 s without a network, also in an
        # offline run. We turn this off before the import, which reads the variable. Users may set it to true.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # wandb logs into its folder. On a full disk Python would print a traceback for each line of that.
        logging.raiseExceptions = False
        try:
            import wandb  # here, because a disabled run need not wait half a second for the import
            from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
            from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
        # An installation with parts that do not fit raises any of these: protobuf a TypeError, NumPy an AttributeError.
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, SyntaxError, OSError) as error:
            self.give_up(error)
            return

        # What a call can raise. OSError: wandb's helper process, which it reaches through a socket, has died. The last
        # three, which are not wandb.Errors: if the helper cannot be reached or dies before it answers.
        self.errors = (wandb.Error, OSError, WandbServiceConnectionError, HandleAbandonedError, MailboxClosedError)
        self.wandb = wandb
        environment = from_environment(config)
        if environment:
            say(f"wandb: from the environment: {', '.join(f'{key}={value}' for key, value in environment.items())}")
        tags = [tag.strip() for tag in environment.get("WANDB_TAGS", "").split(",") if tag.strip()] or config.tags
        named = environment.get("WANDB_NAME")
        wanted = {
            "project": environment.get("WANDB_PROJECT", config.project),
            "entity": config.entity,
            "name": named + (f"-BROKEN-{broken}" if broken else "") if named else folder.name,
            "dir": environment.get("WANDB_DIR", folder),
            "config": run_config,
            "tags": [*tags, *([f"broken:{broken}"] if broken else [])],
        }
        self.run = self.begin(wanted)
        if self.run and self.mode != "offline":
            say(f"wandb: {self.run.url}")

    def begin(self, wanted: dict) -> Any:
        """wandb.init(), offline if it fails online; None if that fails too. wanted: the other arguments."""
        id_file = self.folder / "wandb_id.txt"
        try:
            if not own(id_file):
                with replacing(id_file) as file:
                    file.write(f"{secrets.token_hex(4)}\n".encode())
            self.wandb.setup(self.wandb.Settings(silent=True))
            # init() would ask for a missing key, if there is a terminal, and wait.
            if self.mode != "offline" and not self.wandb.login(prompt=False, verify=False):
                self.mode = "offline"
                self.say("wandb: offline, because there is no API key: set WANDB_API_KEY or run `wandb login`")
            run = self.wandb.init(
                **wanted,
                mode="offline" if self.mode == "offline" else "online",
                id=id_file.read_text().strip(),
                resume="allow",
                # console="off": otherwise wandb intercepts what we print to copy it.
                settings=self.wandb.Settings(
                    silent=True, console="off", init_timeout=WANDB_INIT_SECONDS, finish_timeout=WANDB_FINISH_SECONDS
                ),
            )
            # We use our own step. wandb's counts calls, so it would be too high when a killed run repeats steps.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except (*self.errors, ValueError) as error:  # ValueError: own(), or a WANDB_* variable that wandb refuses
            if self.mode == "offline":
                self.give_up(error)
                return None
            self.say(f"wandb: offline, because the online run could not begin ({first_line(error)})")
            self.mode = "offline"
            self.wandb.teardown()  # ends the helper process, which still has the online run's settings
            return self.begin(wanted)

    def give_up(self, error: Exception) -> None:
        """Ends the wandb run for good and prints a line."""
        self.run = None
        self.say(f"wandb: gave up, the run goes on without it ({first_line(error)})")

    def attempt(self, call: Callable[[Any], object]) -> None:
        """Calls `call` with the wandb run, if there is still one. Gives it up if the call fails."""
        if self.run:
            try:
                call(self.run)
            except self.errors as error:
                self.give_up(error)

    def log(self, record: dict) -> None:
        """Give a record to wandb. Returns at once: another process sends it."""
        # Without None values (such as MFU on a CPU), which would make empty charts.
        self.attempt(lambda run: run.log({k: v for k, v in record.items() if v is not None}))

    def samples(self, step: int, samples: list[tuple[int, str]], note: str) -> None:
        """Give the last WANDB_SAMPLES samples, (step, text), to wandb, as an HTML table, newest first. note: text above
        the table.

        We do not use wandb.Table. It is an artifact, and before logging one an online run asks the host and waits for
        the answer (19 s for a host that never answers, with wandb 0.31).
        """
        rows = "".join(
            f"<tr><td>{of}</td><td><pre>{html.escape(text)}</pre></td></tr>"
            for of, text in reversed(samples[-WANDB_SAMPLES:])
        )
        page = f"{TABLE_HEAD}<p>{html.escape(note)}</p><table><tr><th>step</th><th>sample</th></tr>{rows}</table>"
        self.attempt(lambda run: run.log({"step": step, "samples": self.wandb.Html(page)}))

    def picture(self, step: int, path: Path) -> None:
        """Give a picture of `step` to wandb, which copies it: loss.png as loss_picture."""
        self.attempt(lambda run: run.log({"step": step, f"{path.stem}_picture": self.wandb.Image(str(path))}))

    def finish(self, exit_code: int) -> None:
        """Send the exit code, in at most WANDB_FINISH_SECONDS."""
        self.attempt(lambda run: run.finish(exit_code=exit_code))
        if self.run and self.mode == "offline":
            # With WANDB_DIR, only the folder that just ended. In runs/NAME, all offline folders belong to this run.
            elsewhere = Path(self.run.dir).parent if os.environ.get("WANDB_DIR") else None
            self.say(
                f"wandb: to send this run later: wandb sync {elsewhere or self.folder / 'wandb' / 'offline-run-*'}"
            )
