"""Weights & Biases: where a run goes if wandb can be reached, and how it goes on if wandb fails.

    runs/NAME/
        wandb_id.txt    so that a resumed run goes on in the same wandb run
        wandb/          wandb's own files; `wandb sync` sends the offline ones

Nothing here stops or holds up a run: choose_wandb_mode() takes at most 2 s, an online run that cannot begin within 5 s
is an offline one, and a later error of a wandb run ends that run and not the training. The price: wandb's curves end at
that error; those in the run's folder do not.
"""

import html
import http.client
import importlib.util
import netrc
import os
import secrets
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WANDB_PROBE_SECONDS = 2.0
WANDB_INIT_SECONDS = 5.0
WANDB_FINISH_SECONDS = 20.0
WANDB_SAMPLES = 50  # rows of the table of samples: a long run sends it hundreds of times, whole

TABLE_HEAD = (
    '<meta charset="utf-8">'
    "<style>td, th { border: 1px solid #ccc; padding: 4px 8px; text-align: left; vertical-align: top }"
    " table { border-collapse: collapse } pre { margin: 0; white-space: pre-wrap }</style>"
)


@dataclass
class WandbConfig:
    """mode: auto is online if a key is set and the host answers within 2 s, else offline.

    Where a key has its default, wandb's variable counts: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_TAGS.
    """

    mode: str = "auto"  # auto (online if a key is set and the host answers) | online | offline | disabled
    project: str = "tilegpt"  # the project that the run is filed under
    entity: str | None = None  # team or user; None: the key's own
    tags: list[str] = field(default_factory=list)  # the run's tags; a broken run has its fault besides


def choose_wandb_mode(config: WandbConfig) -> tuple[str, str]:
    """(online | offline | disabled, why, in one line), within 2 s and without importing wandb.

    Decided before the first wandb.init() because of what it does by itself: with no key and no terminal it raises, and
    with a key and no network it blocks for 100 s.

    Raises ValueError for a mode that does not exist, or that was asked for by name and cannot be had.
    """
    modes = ("auto", "online", "offline", "disabled")
    mode, asked = config.mode, f"wandb.mode={config.mode}"
    if mode == "auto" and os.environ.get("WANDB_MODE"):
        mode = os.environ["WANDB_MODE"]
        asked = f"WANDB_MODE={mode}"
    if mode not in modes:
        raise ValueError(f"{asked} is not known: use one of {', '.join(modes)}")
    if mode == "disabled":
        return mode, asked
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # no origin: a mere folder called wandb, as wandb itself leaves about
        if mode == "auto":
            return "disabled", "the wandb package is not installed"
        raise ValueError(f"{asked}, but the wandb package is not installed: pip install wandb, or wandb.mode=disabled")
    if mode == "offline":
        return mode, asked

    url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    host = urllib.parse.urlsplit(url).netloc
    if not _has_wandb_key(host):
        if mode == "auto":
            return "offline", f"no key for {host}"
        raise ValueError(
            f"{asked}, but there is no key for {host}: set WANDB_API_KEY, run `wandb login`, or use wandb.mode=offline"
        )
    if mode == "online":
        return mode, asked
    if _answers(f"{url.rstrip('/')}/graphql"):  # what wandb itself calls; the front page would only redirect
        return "online", f"{url} answers"
    return "offline", f"no answer from {url} within {WANDB_PROBE_SECONDS:.0f} s"


def _has_wandb_key(host: str) -> bool:
    """Where wandb looks: WANDB_API_KEY, an identity token, then the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [Path("~/.netrc"), Path("~/_netrc")]
    for path in files:
        try:
            login = netrc.netrc(path.expanduser()).authenticators(host)
        except (OSError, netrc.NetrcParseError):  # none there, or one that wandb could not read either
            continue
        return bool(login and login[2])
    return False


def _answers(url: str) -> bool:
    """Whether an HTTP server answers at `url`, with any status, within WANDB_PROBE_SECONDS.

    A whole request, because behind a dead proxy or firewall a bare connection opens and then nothing comes. In a daemon
    thread that is given up on, because name resolution obeys no timeout.
    """
    answered = threading.Event()

    def ask():
        try:
            urllib.request.urlopen(url, timeout=WANDB_PROBE_SECONDS).close()
        except urllib.error.HTTPError:  # 404 is an answer
            pass
        except (OSError, http.client.HTTPException, ValueError):  # no route or name, no HTTP, no URL
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WANDB_PROBE_SECONDS)  # sooner if refused, as with no network at all
    return answered.is_set()


def from_environment(config: WandbConfig) -> dict[str, str]:
    """wandb's variables that are set and take the place of what `config` has no key for, or its default."""
    usual = WandbConfig()
    counts = {
        "WANDB_PROJECT": config.project == usual.project,
        "WANDB_NAME": True,
        "WANDB_TAGS": config.tags == usual.tags,
        "WANDB_DIR": True,
    }
    return {key: os.environ[key] for key, free in counts.items() if free and os.environ.get(key)}


def samples_table(samples: list[tuple[int, str]], note: str) -> str:
    """The last WANDB_SAMPLES samples, (step, text), as a table in HTML, the last one first. note: stands above it."""
    rows = "".join(
        f"<tr><td>{step}</td><td><pre>{html.escape(text)}</pre></td></tr>"
        for step, text in reversed(samples[-WANDB_SAMPLES:])
    )
    return f"{TABLE_HEAD}<p>{html.escape(note)}</p><table><tr><th>step</th><th>sample</th></tr>{rows}</table>"


def first_line(error: Exception) -> str:
    """What an error says in one line; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines and lines[0] != "<no message>" else type(error).__name__


class WandbRun:
    """A run of wandb's. An online run that cannot begin becomes an offline one. Any other error ends it, with one line
    through `say`, and the training goes on.

    mode: online | offline | disabled. folder: runs/NAME. run_config: what wandb shows as the configuration.
    WANDB_NAME names it instead of the folder, and WANDB_DIR takes wandb's files instead of it.
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
        # wandb also reports on itself, to the same host, and at exit waits for that: 10 s where nothing answers, in an
        # offline run too. Set before the import, which reads it; whoever wants it can set it to true.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb  # only now: a disabled run need not pay its half second
            from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
            from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
        # What an installation whose parts do not fit raises: protobuf a TypeError, NumPy an AttributeError, ...
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, SyntaxError, OSError) as error:
            self.give_up(error)
            return

        # What a call can raise: wandb's own errors; OSError (TimeoutError is one) when the helper process that wandb
        # talks to through a socket has died; the other three when it cannot be reached or dies while an answer is
        # awaited, which wandb does not derive from wandb.Error. Not listed: TypeError and its kind, our own mistakes.
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
        if self.run and self.mode == "online":
            say(f"wandb: {self.run.url}")

    def begin(self, wanted: dict) -> Any:
        """wandb.init() in self.mode, and offline where online fails; None where that fails too. wanted: its other
        arguments."""
        id_file = self.folder / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n")
        try:
            run = self.wandb.init(
                **wanted,
                mode=self.mode,
                id=id_file.read_text().strip(),
                resume="allow",
                # console="off": wandb would otherwise stand between us and the terminal to copy what we print.
                settings=self.wandb.Settings(
                    silent=True, console="off", init_timeout=WANDB_INIT_SECONDS, finish_timeout=WANDB_FINISH_SECONDS
                ),
            )
            # Our own step: wandb's counter counts calls, and runs ahead when a killed run repeats steps.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except (*self.errors, ValueError) as error:  # ValueError: a WANDB_* variable that wandb's settings refuse
            if self.mode == "offline":
                self.give_up(error)
                return None
            self.say(f"wandb: offline, because the online run could not begin ({first_line(error)})")
            self.mode = "offline"
            self.wandb.teardown()  # its helper process keeps what it was told of the online run
            return self.begin(wanted)

    def give_up(self, error: Exception) -> None:
        """Ends wandb's run for good, and says so."""
        self.run = None
        self.say(f"wandb: gave up, the run goes on without it ({first_line(error)})")

    def attempt(self, call: Callable[[Any], object]) -> None:
        """Calls `call` with wandb's run unless it has been given up; gives it up if that fails."""
        if self.run:
            try:
                call(self.run)
            except self.errors as error:
                self.give_up(error)

    def log(self, record: dict) -> None:
        """Hand over a record; returns at once, the sending is another process's business."""
        # None (no MFU on this machine) would be a chart of nothing.
        self.attempt(lambda run: run.log({k: v for k, v in record.items() if v is not None}))

    def samples(self, step: int, samples: list[tuple[int, str]], note: str) -> None:
        """Hand over the samples so far, as samples_table draws them.

        A page and no wandb.Table: that would be an artifact, about which an online run asks the host before it logs it,
        and waits (19 s for a host that never answers, with wandb 0.31).
        """
        self.attempt(lambda run: run.log({"step": step, "samples": self.wandb.Html(samples_table(samples, note))}))

    def picture(self, step: int, path: Path) -> None:
        """Hand over loss.png as it is after `step`; wandb takes a copy."""
        self.attempt(lambda run: run.log({"step": step, "loss_picture": self.wandb.Image(str(path))}))

    def finish(self, exit_code: int) -> None:
        """Send the exit code, in at most WANDB_FINISH_SECONDS."""
        self.attempt(lambda run: run.finish(exit_code=exit_code))
        if self.run and self.mode == "offline":
            # The folder of the run that ends; in runs/NAME all those of earlier resumptions are this run's too.
            elsewhere = Path(self.run.dir).parent if os.environ.get("WANDB_DIR") else None
            self.say(
                f"wandb: to send this run later: wandb sync {elsewhere or self.folder / 'wandb' / 'offline-run-*'}"
            )
