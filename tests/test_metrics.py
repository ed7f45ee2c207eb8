"""training/metrics.py: lines that grep, files that survive, and a wandb that never stops or slows a run."""

import errno
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent import futures
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from tests.processes import HANGS
from tests.runs import full
from training import metrics, wandb_run
from training.files import FILES, FOLDERS
from training.metrics import Metrics, log_line, loss_figure, read_metrics, read_samples, show
from training.resume import edits
from training.wandb_run import WandbConfig, WandbRun, wandb_mode

ROOT = Path(__file__).parent.parent
STEP = {
    "loss": 2.1234, "bits_per_byte": 3.063, "lr": 1e-3, "grad_norm": 0.87, "ms": 245.3, "tokens_per_second": 16700.0,
    "mfu": None, "memory_gib": 0.4123, "eta_s": 133.2,
}  # fmt: skip
EVALUATED = {"val_loss": 1.9, "val_bits_per_byte": 2.7}
UNUSUAL = {"loss": math.nan, "grad_norm": math.inf, "mfu": 0.4137, "memory_gib": None, "tokens_per_second": 12.3}


@pytest.fixture
def open_metrics():
    """open_metrics(folder): a Metrics whose file does not outlive the test."""
    opened = []

    def open_metrics(folder, **options) -> Metrics:
        opened.append(Metrics(folder, 600, config={}, wandb_config=WandbConfig(mode="disabled"), **options))
        return opened[-1]

    yield open_metrics
    for run in opened:
        run.file.close()


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def too_long(*, id, **_):
    raise OSError(errno.ENAMETOOLONG, "File name too long", id)


class Terminal(StringIO):
    def isatty(self):
        return True


# --- the line -------------------------------------------------------------------------------------------------------


LINES = [
    ({"step": 30, **STEP},
     "step    30/600 | loss 2.1234 | bpb 3.0630 | lr 1.00e-03 | norm 0.87 | 245 ms | 16.7k tok/s | mfu n/a | "
     "mem 0.41 GiB | eta 2:13"),
    ({"step": 7, **STEP, **UNUSUAL, "eta_s": 7384},
     "step     7/600 | loss nan | bpb 3.0630 | lr 1.00e-03 | norm inf | 245 ms | 12 tok/s | mfu 41.4% | "
     "mem n/a | eta 2:03:04"),
    ({"step": 100, **EVALUATED}, "eval step 100/600 | val loss 1.9000 | val bpb 2.7000"),
    ({"step": 100, **EVALUATED, "best": (1.8, 50)},
     "eval step 100/600 | val loss 1.9000 | val bpb 2.7000 | best 1.8000 at 50"),
    ({"step": 100, "weight_norm": 13.25286, "best": None}, "step 100/600 | weight_norm 13.25"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "line"), LINES)
def test_a_record_is_one_line_also_of_what_is_not_finite_or_not_known(record, line):
    assert log_line(record, 600) == line


@pytest.mark.parametrize("way", ["sample", "say", "show"])
def test_nothing_that_is_shown_can_command_the_terminal(open_metrics, tmp_path, capsys, way):
    """Samples, and names of files, which may be anybody's. samples.txt is shown on a terminal too, by cat."""
    text, harmless = "a\x1b[2Jb\r\x9b2J\tc\u00e9\n[bold]d", "a\ufffd[2Jb\ufffd\ufffd2J\tc\u00e9\n[bold]d"
    run = open_metrics(tmp_path)
    {"sample": partial(run.sample, 5), "say": run.say, "show": show}[way](text)
    assert harmless in capsys.readouterr().out
    if way == "sample":
        assert read_samples(tmp_path / "samples.txt") == [(5, harmless)]


def test_a_screen_that_knows_only_ascii_stops_nothing(open_metrics, tmp_path, monkeypatch):
    with open(tmp_path / "screen", "w", encoding="ascii") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        open_metrics(tmp_path).sample(5, "caf\u00e9")
    assert "caf?" in (tmp_path / "screen").read_text()


def test_on_a_terminal_lines_stay_whole_above_the_bar(open_metrics, tmp_path, monkeypatch):
    """A window of 80 columns: a line broken there would not grep, and [x] must not be taken for markup."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    run = open_metrics(tmp_path, broken="no_max")
    run.log({"step": 30, **STEP})
    run.say("[bold]plain[/bold]")
    run.close()
    assert f"BROKEN[no_max] {log_line({'step': 30, **STEP}, 600)}\n" in screen.getvalue()
    assert "30/600" in screen.getvalue().split("[bold]plain[/bold]\n")[1]  # the bar, below


# --- the files ------------------------------------------------------------------------------------------------------


def test_every_row_is_valid_json_and_nan_comes_back_but_no_number_that_cannot_be_drawn(tmp_path, open_metrics, capsys):
    """A number that no float holds was a traceback, and 1e308 ended the run, both while the picture was drawn."""
    record = {"step": 1, **STEP, "loss": math.nan, "grad_norm": -math.inf, "lr": 0.1 + 0.2}
    file = tmp_path / "metrics.jsonl"
    open_metrics(tmp_path).log(record)
    row = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row == record | {"loss": "nan", "grad_norm": "-inf"}
    for key in ("step", "loss", "val_loss"):
        for huge in (10**400, -1e308):
            metrics.append(file, {"step": 1, "loss": 1.0} | {key: huge})
    for key in ("loss_at_", "loss_given_x", f"loss_at_{10**400}", "passkey_9", "passkey_depth"):  # context.png's ticks
        metrics.append(file, {"step": 1, key: 1.0})
    assert repr(read_metrics(file)) == repr([record])
    assert "left out 11 lines" in capsys.readouterr().err


def test_a_line_of_a_sample_that_looks_like_a_sample_begins_none(open_metrics, tmp_path):
    run = open_metrics(tmp_path)
    run.sample(20, "before\n===== sample at step 99 =====\nafter")
    run.sample(40, "second")
    open_metrics(tmp_path, resume_step=40)
    assert [step for step, _ in read_samples(tmp_path / "samples.txt")] == [20, 40]


def test_a_resumed_run_has_one_row_a_step_and_a_new_one_none(open_metrics, tmp_path):
    """Killed at step 42 in the middle of a write; resumed from the checkpoint of step 30, it makes 31 to 60 again."""
    run = open_metrics(tmp_path)
    for step in range(1, 43):
        run.log({"step": step, **STEP})
        if step % 10 == 0:
            run.log({"step": step, "val_loss": 5 - step / 10, "val_bits_per_byte": 1.0})
            run.sample(step, f"text of {step}")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 43, "lo')
    with open(tmp_path / "samples.txt", "ab") as file:
        file.write("===== sample at step 43 =====\nna\u00ef".encode()[:-1])

    run = open_metrics(tmp_path, resume_step=30)
    assert run.best == (2.0, 30)
    for step in range(31, 61):
        run.log({"step": step, **STEP})
    run.sample(60, "text of 60")
    run.close()
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == list(range(1, 61))
    assert [row["step"] for row in rows(tmp_path) if "val_loss" in row] == [10, 20, 30]
    assert read_samples(tmp_path / "samples.txt") == [(step, f"text of {step}") for step in (10, 20, 30, 60)]
    assert not list(tmp_path.glob(".tmp*"))

    open_metrics(tmp_path)
    assert rows(tmp_path) == read_samples(tmp_path / "samples.txt") == []


@pytest.mark.parametrize(("content", "said"), [(b"\0" * 99, "left out 1 line"), (b"", "no record")])
def test_records_that_are_lost_are_said_when_a_run_is_resumed(open_metrics, tmp_path, capsys, content, said):
    """A file of zero bytes was passed over without a word."""
    run = open_metrics(tmp_path)
    run.log({"step": 1, **STEP})
    run.close()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    open_metrics(tmp_path, resume_step=1)
    assert said in capsys.readouterr().err


def test_what_is_no_utf8_in_samples_stays_as_it_is_when_a_run_is_resumed(open_metrics, tmp_path):
    """Each such byte became three, so a file grew with each resume until it was too large to be read."""
    run = open_metrics(tmp_path)
    run.sample(1, "text")
    run.close()
    file = tmp_path / "samples.txt"
    file.write_bytes(content := file.read_bytes() + b"\xff" * 9)
    open_metrics(tmp_path, resume_step=1)
    assert file.read_bytes() == content


def test_a_row_is_on_disk_before_it_is_shown(open_metrics, tmp_path):
    run, seen = open_metrics(tmp_path), []
    run.say = lambda text: seen.append(len(rows(tmp_path)))
    run.log({"step": 1, **STEP})
    assert seen == [1]


def test_the_best_validation_loss_is_never_nan(open_metrics, tmp_path, capsys):
    run = open_metrics(tmp_path)
    for step, loss in ((10, math.nan), (20, 2.0), (30, -math.inf), (40, 3.0)):
        run.log({"step": step, "val_loss": loss, "val_bits_per_byte": loss})
    assert run.best == (2.0, 20)
    assert capsys.readouterr().out.splitlines()[-1].endswith("best 2.0000 at 20")


def test_the_stamped_sample_of_a_broken_run_is_found_again(open_metrics, tmp_path):
    """What else is stamped is in tests/test_train.py."""
    open_metrics(tmp_path, broken="no_max").sample(1, "x")
    open_metrics(tmp_path, broken="no_max", resume_step=1)
    assert (tmp_path / "samples.txt").read_text().startswith("===== BROKEN[no_max] sample at step 1 =====\n")
    open_metrics(tmp_path, broken="no_max", resume_step=0)
    assert (tmp_path / "samples.txt").read_text() == ""


def test_a_record_is_not_written_into_the_other_name_of_a_file(tmp_path):
    theirs, file = tmp_path / "theirs", tmp_path / "metrics.jsonl"
    theirs.write_text("{}\n")
    os.link(theirs, file)
    metrics.append(file, {"step": 1})
    assert (theirs.read_text(), file.read_text()) == ("{}\n", '{}\n{"step": 1}\n')


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_nothing_is_written_through_what_lies_in_place_of_a_runs_file(tmp_path, name, kind):
    """A link in a run's folder was followed: `resume=auto` replaced ~/.bashrc. A pipe was waited for."""
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    folder.mkdir()
    if kind == "link":
        theirs.mkdir() if name in FOLDERS else theirs.write_text("theirs")
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to(theirs)
    with pytest.raises(ValueError, match=re.escape(str(folder / name))):
        Metrics(folder, 3, config={}, wandb_config=WandbConfig(mode="disabled"), resume_step=1)
    assert [path.name for path in folder.iterdir()] == [name]
    assert theirs.exists() == (kind == "link")
    assert not theirs.is_file() or theirs.read_text() == "theirs"


READ = [(read, kind) for kind in ("link", "pipe", "huge file") for read in (read_metrics, read_samples, edits)][:-1]


@pytest.mark.parametrize(("read", "kind"), READ)
def test_a_runs_file_is_not_read_through_what_lies_in_its_place_nor_beyond_the_memory(tmp_path, read, kind):
    """A pipe was waited for, and of a link to /dev/zero everything was read."""
    file = tmp_path / "file"
    match kind:
        case "link":
            file.symlink_to("/dev/null")
        case "pipe":
            os.mkfifo(file)
        case _:
            file.touch()
            os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        read(file, *[{}, {}] * (read is edits))


# --- the picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("broken", "color"), [("no_max", "red"), (None, "black")])
def test_the_picture_shows_every_record_and_is_titled_in_red_of_a_broken_run(broken, color):
    records = [{"step": i, "loss": loss} for i, loss in ((1, 2.0), (2, math.nan), (3, math.inf))]
    (axes,) = loss_figure([*records, {"step": 3, "val_loss": 1.5}], "run", broken).axes
    assert axes.get_title() == ("run - BROKEN: no_max" if broken else "run")
    assert axes.title.get_color() == color
    train_loss, val, bad = axes.lines
    assert list(train_loss.get_xdata()) == [1, 2, 3]
    assert (list(val.get_xdata()), list(val.get_ydata())) == ([3], [1.5])
    assert bad.get_xdata()[0] == 2
    for few in (records[:0], records[:1], records[1:]):
        loss_figure(few, "run", broken).savefig(BytesIO())


def test_a_name_that_the_font_lacks_or_that_looks_like_mathematics_is_drawn_without_a_warning(recwarn):
    """A Chinese name warned of a glyph a character; one of bytes that are no text, or of no TeX, ended the run."""
    (axes,) = loss_figure([{"step": 1, "loss": 2.0}], "\u957f gr\u00fc\u00dfe \udc80 a$^^bad{$b", None).axes
    assert axes.get_title() == "? gr\u00fc\u00dfe ? a$^^bad{$b"
    axes.figure.savefig(BytesIO())
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []


def test_drawing_takes_a_small_share_of_a_run(open_metrics, tmp_path, monkeypatch):
    now = [100.0]
    run = open_metrics(tmp_path)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(metrics, "loss_figure", lambda *_: now.insert(0, now[0] + 2) or Figure())
    assert run.time_to_draw()
    run.picture()
    for later, due in ((99, False), (100, True)):  # 2 seconds are a fiftieth of 100
        now[0] = 102.0 + later
        assert run.time_to_draw() == due


@pytest.mark.parametrize("then", [lambda run: run.log({"step": 2, **STEP}), Metrics.picture, Metrics.close])
def test_a_picture_that_cannot_be_written_is_told(open_metrics, tmp_path, monkeypatch, then):
    monkeypatch.setattr(Figure, "savefig", full)
    run = open_metrics(tmp_path)
    run.log({"step": 1, **STEP})
    run.draw_later()
    futures.wait(run.jobs)
    with pytest.raises(OSError, match=r"loss\.png"):
        then(run)


def test_a_full_disk_is_told_with_the_file_and_the_run_still_ends(open_metrics, tmp_path):
    """The line was "No space left on device" alone. And Metrics.close() broke off, so wandb's run never ended."""
    run, ended = open_metrics(tmp_path), []
    run.begin_wandb = lambda: SimpleNamespace(finish=ended.append)
    (tmp_path / "samples.txt").unlink()
    (tmp_path / "samples.txt").mkdir()
    with pytest.raises(OSError, match=r"samples\.txt"):
        run.sample(1, "text")
    with open(os.devnull) as refuses:
        os.dup2(refuses.fileno(), run.file.fileno())  # what is written stays in memory, as on a full disk
    for fails in (lambda: run.log({"step": 2, **STEP}), lambda: run.close(2)):
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            fails()
    assert ended == [2]


# --- wandb ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_env(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    return monkeypatch


class StandInForWandb:
    """Keeps what it is told. online: what an online init raises. key: whether there is an API key."""

    Settings, Html, Image = dict, str, str
    Error = RuntimeError
    __spec__ = SimpleNamespace(origin="here")

    def __init__(self, patch, online: Exception | None = None, key: bool = True):
        self.online, self.key, self.begun, self.told, self.axes = online, key, [], [], {}
        for name in ("wandb.sdk.lib.service.service_token", "wandb.sdk.mailbox"):
            errors = ("WandbServiceConnectionError", "HandleAbandonedError", "MailboxClosedError")
            patch.setitem(sys.modules, name, SimpleNamespace(**dict.fromkeys(errors, KeyError)))
        patch.setitem(sys.modules, "wandb", self)
        self.setup, self.teardown = (lambda settings: None), (lambda: self.begun.append({"mode": "teardown"}))

    def login(self, *, prompt, verify):
        assert (prompt, verify) == (False, False), "it would wait for an answer, or for the host"
        return self.key

    def init(self, **wanted):
        self.begun.append(wanted)
        if self.online and wanted["mode"] == "online":
            raise self.online
        return SimpleNamespace(
            define_metric=lambda name, step_metric=None: self.axes.update({name: step_metric}),
            log=lambda row: self.told.append(row), finish=lambda exit_code: self.told.append({"exit": exit_code}),
        )  # fmt: skip


def test_wandb_is_told_every_record_and_goes_on_in_the_same_run(clean_env, tmp_path):
    stand_in, config = StandInForWandb(clean_env), WandbConfig(mode="offline", tags=["mine"])
    for resumed in (0, 3):
        run = Metrics(tmp_path, 6, config={}, wandb_config=config, broken="no_max", resume_step=resumed)
        for step in range(resumed + 1, resumed + 4):
            run.log({"step": step, **STEP})
        run.sample(step, "once <upon>")
        run.close(3)
    known = {key: x for key, x in STEP.items() if x is not None} | {"broken": "no_max"}
    assert [told for told in stand_in.told if "loss" in told] == [{"step": step, **known} for step in range(1, 7)]
    pages = [told["samples"] for told in stand_in.told if "samples" in told]
    third, sixth = ("3", "once &lt;upon&gt;"), ("6", "once &lt;upon&gt;")
    assert [re.findall(r"<td>(\d+)</td><td><pre>(.+?)</pre>", page) for page in pages] == [[third], [sixth, third]]
    assert all("BROKEN[no_max]" in page for page in pages)
    assert [told["exit"] for told in stand_in.told if "exit" in told] == [3, 3]
    assert [wanted["tags"] for wanted in stand_in.begun] == [["mine", "broken:no_max"]] * 2
    assert [wanted["id"] for wanted in stand_in.begun] == [(tmp_path / "wandb_id.txt").read_text().strip()] * 2
    assert stand_in.axes == {"step": None, "*": "step"}


def test_wandbs_mode_is_the_configurations_or_else_that_of_the_environment(clean_env, tmp_path):
    for mode in ("offline", "disabled"):
        clean_env.setenv("WANDB_MODE", mode)
        assert wandb_mode(WandbConfig()) == mode
        clean_env.setenv("WANDB_MODE", "online")
        assert wandb_mode(WandbConfig(mode=mode)) == mode
    clean_env.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ValueError, match="WANDB_MODE=dryrun"):
        wandb_mode(WandbConfig())
    clean_env.delenv("WANDB_MODE")  # and now without the package
    (tmp_path / "wandb").mkdir()  # what an earlier run of anything may have left; Python takes it for a package
    clean_env.setattr(sys, "path", [str(tmp_path)])
    clean_env.delitem(sys.modules, "wandb", raising=False)
    assert wandb_mode(WandbConfig()) == "disabled"
    with pytest.raises(ValueError, match=r"wandb\.mode=offline"):
        wandb_mode(WandbConfig(mode="offline"))


@pytest.mark.parametrize("fails", ["import", "link", "disk", "call", "id"])
def test_a_wandb_that_fails_costs_one_line_and_not_the_run(clean_env, tmp_path, fails):
    """The ImportError of a half-installed wandb was a traceback."""
    stand_in, said = StandInForWandb(clean_env), []
    clean_env.setattr(logging, "raiseExceptions", True)
    match fails:
        case "import":
            clean_env.setitem(sys.modules, "wandb", None)
        case "link":
            (tmp_path / "wandb_id.txt").symlink_to(tmp_path / "theirs")
        case "disk":
            clean_env.setattr(wandb_run, "replacing", full)
        case "call":
            stand_in.told = SimpleNamespace(append=full)
        case "id":  # of a stranger's run
            (tmp_path / "wandb_id.txt").write_text("x" * 10**6)
            clean_env.setattr(stand_in, "init", too_long)
    run = WandbRun("offline", WandbConfig(), tmp_path, {}, None, said.append)
    run.log({"loss": 1.0})
    run.samples(1, [(1, "text")], "")
    run.picture(1, tmp_path / "loss.png")
    run.finish(0)
    assert [line.partition(",")[0] for line in said] == ["wandb: gave up"]
    assert len(said[0]) < 300
    assert not (tmp_path / "theirs").exists()
    assert not logging.raiseExceptions  # or wandb's own log would print tracebacks on a full disk
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"  # for which it would wait at exit, without a network


REFUSED = {"online": RuntimeError("HTTP 401")}, ["online", "teardown", "offline"], "HTTP 401"
NO_KEY = {"key": False}, ["offline"], "WANDB_API_KEY"


@pytest.mark.parametrize(
    ("mode", "trouble", "modes", "why"), [("online", *REFUSED), ("online", *NO_KEY), ("auto", *NO_KEY)]
)
def test_where_an_online_run_cannot_begin_an_offline_one_does(clean_env, tmp_path, mode, trouble, modes, why):
    """A host that answered, and then refused the key, left nothing logged at all."""
    stand_in, said = StandInForWandb(clean_env, **trouble), []
    for name, value in (("PROJECT", "theirs"), ("NAME", "n"), ("TAGS", "a, b")):
        clean_env.setenv(f"WANDB_{name}", value)
    run = WandbRun(mode, WandbConfig(), tmp_path, {}, "no_max", said.append)
    assert run.run
    assert [wanted.pop("mode") for wanted in stand_in.begun] == modes
    assert stand_in.begun[0] == stand_in.begun[-1]
    # What the environment says counts where the configuration has its default, and hides no fault.
    assert [stand_in.begun[0][key] for key in ("project", "name")] == ["theirs", "n-BROKEN-no_max"]
    assert stand_in.begun[0]["tags"] == ["a", "b", "broken:no_max"]
    assert why in said[-1]


def test_wandb_gets_so_many_pictures_and_the_last_one(open_metrics, tmp_path, monkeypatch):
    """However often it is drawn: 600 steps and 20 pictures are one in 30 steps."""
    drawn = SimpleNamespace(savefig=lambda file, **_: file.write(b""))
    monkeypatch.setattr(metrics, "loss_figure", lambda *_: drawn)
    run = open_metrics(tmp_path)
    sent = []
    monkeypatch.setattr(run.wandb, "picture", lambda step, path: sent.append(step))
    for step in (10, 29, 30, 40, 60, 70):
        run.log({"step": step, **STEP})
        run.picture()
    run.close()
    assert sent == [30, 60, 70]


def test_a_run_goes_on_while_wandb_begins_and_its_picture_is_drawn(tmp_path, monkeypatch):
    """Every run waited for seconds, until wandb and matplotlib were imported."""
    went_on, heard = threading.Event(), []

    def begin(*_):
        assert went_on.wait(HANGS)
        return SimpleNamespace(log=heard.append, finish=heard.append, picture=lambda step, _: heard.append("picture"))

    monkeypatch.setattr(metrics, "WandbRun", begin)
    run = Metrics(tmp_path, 600, config={}, wandb_config=WandbConfig(mode="offline"))
    run.log(first := {"step": 1, **EVALUATED})
    run.draw_later()
    run.log(second := {"step": 2, **EVALUATED})
    meanwhile = run.time_to_draw(), (tmp_path / "loss.png").exists()
    went_on.set()
    run.close(3)
    assert meanwhile == (False, False)
    assert heard == [first, second, "picture", 3]
    assert (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_with_the_network_cut_a_run_is_kept_whole_for_wandb_sync_and_goes_on_when_resumed(small, tmp_path):
    """wandb.init() waited 100 s for a host that never answers."""
    pytest.importorskip("wandb")
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and "proxy" not in k.lower()}
    keep |= {"NETRC": f"{tmp_path}/netrc", "WANDB_CONFIG_DIR": f"{tmp_path}/config"}  # not those of whoever runs this
    keep["WANDB__SERVICE_WAIT"] = str(HANGS)  # for its helper process to start; on a busy machine 30 s may pass

    def run(*command, **env) -> str:
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=ROOT, env=keep | env, capture_output=True, text=True, timeout=HANGS)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    new = [*small, f"runs={tmp_path}", "name=x", "steps=3", "wandb.mode=auto", "wandb.tags=[mine]"]
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        cut = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        assert "wandb: offline" in run("train.py", *new, **cut)
    run("train.py", f"runs={tmp_path}", "resume=auto", "steps=6", WANDB_MODE="offline")
    assert [row["step"] for row in rows(tmp_path / "x") if "loss" in row] == [1, 2, 3, 4, 5, 6]
    files = [*tmp_path.glob("x/wandb/offline-run-*/run-*.wandb")]
    assert len(files) == 2
    for file in files:
        assert (tmp_path / "x/wandb_id.txt").read_bytes().strip() in file.read_bytes()
        assert b"mine" in file.read_bytes()
    said = run("-m", "wandb", "sync", "--dry-run", *(str(file.parent) for file in files))
    assert all(file.parent.name in said for file in files)
