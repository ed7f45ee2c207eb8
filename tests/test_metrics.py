"""training/metrics.py: lines that grep, files that survive, and a wandb that never stops or slows a run."""

import errno
import json
import logging
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from concurrent import futures
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

import train
from tests.processes import HANGS, shown_on_a_terminal
from training import machine, metrics, wandb_run
from training.metrics import Metrics, log_line, loss_figure, read_metrics, read_samples, show
from training.resume import edits
from training.wandb_run import WandbConfig, WandbRun, wandb_mode

ROOT = Path(__file__).parent.parent
STEP = {
    "loss": 2.1234,
    "bits_per_byte": 3.063,
    "lr": 1e-3,
    "grad_norm": 0.87,
    "ms": 245.3,
    "tokens_per_second": 16700.0,
    "mfu": None,
    "memory_gib": 0.4123,
    "eta_s": 133.2,
}


@pytest.fixture
def open_metrics():
    """open_metrics(folder): a Metrics whose file does not outlive the test."""
    opened = []

    def open_metrics(folder, **kwargs) -> Metrics:
        opened.append(Metrics(folder, 600, config={}, wandb_config=WandbConfig(mode="disabled"), **kwargs))
        return opened[-1]

    yield open_metrics
    for run in opened:
        run.file.close()


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- the line -------------------------------------------------------------------------------------------------------


def test_a_step_is_one_line():
    assert log_line({"step": 30, **STEP}, 600) == (
        "step    30/600 | loss 2.1234 | bpb 3.0630 | lr 1.00e-03 | norm 0.87 | 245 ms | 16.7k tok/s | mfu n/a | "
        "mem 0.41 GiB | eta 2:13"
    )


def test_what_is_not_finite_or_not_known_still_makes_a_line():
    line = log_line(
        {
            "step": 7,
            **STEP,
            "loss": math.nan,
            "grad_norm": math.inf,
            "mfu": 0.4137,
            "memory_gib": None,
            "tokens_per_second": 12.3,
            "eta_s": 7384,
        },
        100,
    )
    assert line == (
        "step     7/100 | loss nan | bpb 3.0630 | lr 1.00e-03 | norm inf | 245 ms | 12 tok/s | mfu 41.4% | "
        "mem n/a | eta 2:03:04"
    )


def test_an_evaluation_is_one_line():
    record = {"step": 100, "val_loss": 1.9, "val_bits_per_byte": 2.7}
    assert log_line(record, 600) == "eval step 100/600 | val loss 1.9000 | val bpb 2.7000"
    assert log_line({**record, "best": (1.8, 50)}, 600).endswith(" | best 1.8000 at 50")


# --- the files ------------------------------------------------------------------------------------------------------


def test_every_row_is_valid_json_and_nan_comes_back(open_metrics, tmp_path):
    run = open_metrics(tmp_path)
    run.log({"step": 1, **STEP, "loss": math.nan, "grad_norm": -math.inf, "lr": 0.1 + 0.2})
    run.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] == "nan"
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == -math.inf
    assert record["lr"] == 0.1 + 0.2
    assert record["mfu"] is None


def test_a_resumed_run_has_one_row_a_step(open_metrics, tmp_path):
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
    samples = (tmp_path / "samples.txt").read_text()
    assert re.findall(r"^===== sample at step (\d+) =====$", samples, re.MULTILINE) == ["10", "20", "30", "60"]
    assert re.findall(r"text of (\d+)", samples) == ["10", "20", "30", "60"]
    assert not list(tmp_path.glob(".tmp*"))


def test_a_new_run_starts_empty(open_metrics, tmp_path):
    for _ in range(2):
        run = open_metrics(tmp_path)
        run.log({"step": 1, **STEP})
        run.sample(1, "x")
        run.close()
    assert len(rows(tmp_path)) == 1
    assert (tmp_path / "samples.txt").read_text().count("sample at step") == 1


def test_a_row_is_on_disk_before_it_is_shown(open_metrics, tmp_path, monkeypatch):
    run = open_metrics(tmp_path)
    seen = []
    monkeypatch.setattr(run, "say", lambda text: seen.append(len(rows(tmp_path))))
    run.log({"step": 1, **STEP})
    assert seen == [1]


def test_the_best_validation_loss_is_never_nan(open_metrics, tmp_path, capsys):
    run = open_metrics(tmp_path)
    for step, loss in ((10, math.nan), (20, 2.0), (30, -math.inf), (40, 3.0)):
        run.log({"step": step, "val_loss": loss, "val_bits_per_byte": loss})
    assert run.best == (2.0, 20)
    assert capsys.readouterr().out.splitlines()[-1].endswith("best 2.0000 at 20")


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


def test_on_a_terminal_lines_stay_whole_above_the_bar(tmp_path):
    """A window of 80 columns: a line broken there would not grep, and [x] must not be taken for markup."""
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from training.metrics import Metrics
from training.wandb_run import WandbConfig
run = Metrics(Path({str(tmp_path)!r}), 600, config={{}}, wandb_config=WandbConfig(mode="disabled"), broken="no_max")
run.log({ ({"step": 30, **STEP})!r})
run.say("[bold]plain[/bold]")
run.close()
"""
    screen = shown_on_a_terminal([sys.executable, "-c", code], "stdout", columns=80)
    assert "BROKEN[no_max] " + log_line({"step": 30, **STEP}, 600) in screen
    assert "[bold]plain[/bold]" in screen
    assert "30/600" in screen.split("plain[/bold]")[1]  # the bar, below


# --- broken runs say so ---------------------------------------------------------------------------------------------


def test_a_broken_run_is_stamped_on_line_row_and_sample(open_metrics, tmp_path, capsys):
    run = open_metrics(tmp_path, broken="no_max")
    run.log({"step": 1, **STEP})
    run.log({"step": 1, "val_loss": 1.0, "val_bits_per_byte": 1.0})
    run.sample(1, "x")
    run = open_metrics(tmp_path, broken="no_max", resume_step=1)  # its stamped sample header is found again
    lines = [line for line in capsys.readouterr().out.splitlines() if "step 1" in line or "step     1" in line]
    assert [line[:19] for line in lines] == ["BROKEN[no_max] step", "BROKEN[no_max] eval", "===== BROKEN[no_max"]
    assert [row["broken"] for row in rows(tmp_path)] == ["no_max", "no_max"]
    assert "===== BROKEN[no_max] sample at step 1 =====" in (tmp_path / "samples.txt").read_text()
    open_metrics(tmp_path, broken="no_max", resume_step=0)
    assert (tmp_path / "samples.txt").read_text() == ""


def test_a_broken_runs_picture_is_titled_in_red():
    records = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": math.nan},
        {"step": 3, "loss": math.inf},
        {"step": 3, "val_loss": 1.5},
    ]
    (axes,) = loss_figure(records, "run", "no_max").axes
    assert axes.get_title() == "run - BROKEN: no_max"
    assert axes.title.get_color() == "red"
    assert "not finite from step 2" in [line.get_label() for line in axes.lines]
    (axes,) = loss_figure(records[:1], "run", None).axes
    assert (axes.get_title(), axes.title.get_color()) == ("run", "black")


def test_the_picture_shows_every_record(open_metrics, tmp_path):
    run = open_metrics(tmp_path)
    run.log({"step": 1, **STEP})
    run.log({"step": 2, **STEP, "loss": math.nan})
    run.log({"step": 2, "val_loss": 1.5, "val_bits_per_byte": 1.0})
    assert run.picture().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = loss_figure(read_metrics(tmp_path / "metrics.jsonl"), "run", None).axes
    train, val = axes.lines[:2]
    assert list(train.get_xdata()) == [1, 2]
    assert list(val.get_ydata()) == [1.5]


def test_drawing_takes_a_small_share_of_a_run(open_metrics, tmp_path, monkeypatch):
    now = 100.0
    run = open_metrics(tmp_path)
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def draw(*args):
        nonlocal now
        now += 2
        return Figure()

    monkeypatch.setattr("training.metrics.loss_figure", draw)
    assert run.time_to_draw()
    run.picture()
    now += 99  # 2 seconds are a fiftieth of 100
    assert not run.time_to_draw()
    now += 1
    assert run.time_to_draw()


def test_the_last_picture_is_begun_before_the_last_checkpoint_whenever_the_one_before_was(
    call, small, tmp_path, monkeypatch
):
    """So that the two go on side by side. close() would begin it after the checkpoint."""
    begun: list[str] = []
    monkeypatch.setattr("training.metrics.Metrics.time_to_draw", lambda self: False)
    monkeypatch.setattr("training.metrics.Metrics.draw_later", lambda self: begun.append("picture"))
    monkeypatch.setattr("train.close", lambda run: begun.append("close"))
    assert call(train, *small, "steps=2", "sample_every=0", f"runs={tmp_path}", "name=x").code == 0
    assert begun == ["picture", "close"]


def test_a_name_that_the_font_lacks_is_drawn_without_a_warning(recwarn):
    """A Chinese name warned of a glyph a character; one of bytes that are no text could not be drawn at all."""
    (axes,) = loss_figure([{"step": 1, "loss": 2.0}], "\u957f gr\u00fc\u00dfe \udc80", None).axes
    assert axes.get_title() == "? gr\u00fc\u00dfe ?"
    axes.figure.savefig(BytesIO())
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []


def test_a_run_of_nothing_but_nan_has_a_picture(open_metrics, tmp_path):
    run = open_metrics(tmp_path)
    assert run.picture().exists()  # no record at all
    run.log({"step": 1, **STEP, "loss": math.nan})
    assert run.picture().exists()


# --- the machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        # Not to be taken for their bigger brothers:
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_or_unknown(monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine.peak_flops(torch.device("cuda")) == flops


def test_a_cpu_has_no_peak_but_memory():
    assert machine.peak_flops(torch.device("cpu")) is None
    before = machine.memory_gib(torch.device("cpu"))
    torch.ones(2**26)  # 0.25 GiB
    assert 0.05 < before <= machine.memory_gib(torch.device("cpu")) < 64


# --- wandb: the choice ----------------------------------------------------------------------------------------------


@pytest.fixture
def clean_env(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("WANDB")]:
        monkeypatch.delenv(key)
    for key in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_mode_in_the_environment_rules_auto_only(clean_env, mode):
    clean_env.setenv("WANDB_MODE", mode)
    assert wandb_mode(WandbConfig()) == mode
    clean_env.setenv("WANDB_MODE", "online")
    assert wandb_mode(WandbConfig(mode=mode)) == mode


def test_an_unknown_mode_is_named(clean_env):
    clean_env.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ValueError, match="WANDB_MODE=dryrun"):
        wandb_mode(WandbConfig())


def test_without_the_package_auto_is_disabled_and_offline_an_error(clean_env, tmp_path):
    (tmp_path / "wandb").mkdir()  # what an earlier run of anything may have left; Python takes it for a package
    clean_env.setattr(sys, "path", [str(tmp_path)])
    clean_env.delitem(sys.modules, "wandb", raising=False)
    assert wandb_mode(WandbConfig()) == "disabled"
    with pytest.raises(ValueError, match=r"wandb\.mode=offline, but the wandb package is not installed: pip install"):
        wandb_mode(WandbConfig(mode="offline"))


class StandInForWandb:
    """Keeps what it is told. online: what an online init raises. key: whether there is an API key."""

    class Error(Exception):
        pass

    class Settings(dict):
        pass

    def __init__(self, online: Exception | None = None, key: bool = True):
        self.online, self.key, self.wanted = online, key, []

    def setup(self, settings):
        pass

    def login(self, *, prompt, verify):
        assert not prompt, "it would wait for an answer"
        assert not verify, "it would wait for the host"
        return self.key

    def init(self, **wanted):
        self.wanted.append(wanted)
        if self.online and wanted["mode"] == "online":
            raise self.online
        return SimpleNamespace(url="URL", define_metric=lambda *_, **__: None)

    def teardown(self):
        self.wanted.append("teardown")


def begun(monkeypatch, stand_in, folder, config=None, mode="offline", broken=None):
    """(WandbRun, its lines), with `stand_in` for the package."""
    for name in ("wandb.sdk.lib.service.service_token", "wandb.sdk.mailbox"):
        errors = ("WandbServiceConnectionError", "HandleAbandonedError", "MailboxClosedError")
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**dict.fromkeys(errors, KeyError)))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    folder.mkdir()
    said = []
    return wandb_run.WandbRun(mode, config or WandbConfig(), folder, {}, broken, said.append), said


VARIABLES = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_TAGS": "a, b", "WANDB_DIR": "/tmp/d"}


def test_wandbs_variables_count_where_the_configuration_has_its_default(clean_env, tmp_path):
    """They were ignored without a word."""
    for key, value in VARIABLES.items():
        clean_env.setenv(key, value)
    stand_in = StandInForWandb()
    _, said = begun(clean_env, stand_in, tmp_path / "run", broken="no_max")
    ((wanted),) = stand_in.wanted
    assert [wanted[key] for key in ("project", "name", "dir")] == ["p", "n-BROKEN-no_max", "/tmp/d"]
    assert wanted["tags"] == ["a", "b", "broken:no_max"]
    all_four = "WANDB_PROJECT=p, WANDB_NAME=n, WANDB_TAGS=a, b, WANDB_DIR=/tmp/d"
    assert said == [f"wandb: from the environment: {all_four}"]


def test_what_is_configured_goes_before_wandbs_variables(clean_env, tmp_path):
    clean_env.setenv("WANDB_PROJECT", "p")
    clean_env.setenv("WANDB_TAGS", "a")
    stand_in = StandInForWandb()
    _, said = begun(clean_env, stand_in, tmp_path / "run", WandbConfig(project="mine", tags=["t"]))
    ((wanted),) = stand_in.wanted
    assert [wanted[key] for key in ("project", "name", "dir", "tags")] == ["mine", "run", tmp_path / "run", ["t"]]
    assert said == []


def test_wandbs_log_on_a_full_disk_prints_no_traceback(clean_env, tmp_path, capsys):
    """wandb logs into its folder. A dozen tracebacks came after the line that said why the run had ended."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    clean_env.setattr(logging, "raiseExceptions", True)
    begun(clean_env, StandInForWandb(), tmp_path / "run")
    logging.StreamHandler(SimpleNamespace(write=full, flush=full)).handle(logging.makeLogRecord({"msg": "a line"}))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("code", ["import nowhere.at.all", "raise TypeError('Descriptors cannot be created')"])
def test_a_wandb_whose_import_fails_costs_one_line_and_not_the_run(clean_env, tmp_path, code):
    """The ImportError of a half-installed wandb was a traceback."""
    (tmp_path / "wandb.py").write_text(code)
    clean_env.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        clean_env.delitem(sys.modules, name)
    said = []
    run = wandb_run.WandbRun("offline", WandbConfig(), tmp_path, {}, None, said.append)
    run.log({"loss": 1.0})
    run.samples(1, [(1, "text")], "")
    run.picture(1, tmp_path / "loss.png")
    run.finish(0)
    assert len(said) == 1
    assert re.fullmatch(r"wandb: gave up, the run goes on without it \(.*(nowhere|Descriptors).*\)", said[0])


def test_where_an_online_run_cannot_begin_an_offline_one_does(clean_env, tmp_path):
    """A host that answered, and then refused the key, left nothing logged at all."""
    stand_in = StandInForWandb(StandInForWandb.Error("HTTP 401"))
    run, said = begun(clean_env, stand_in, tmp_path / "run", mode="online")
    first, between, second = stand_in.wanted
    assert (first.pop("mode"), between, second.pop("mode")) == ("online", "teardown", "offline")
    assert first == second
    assert run.run
    assert run.mode == "offline"
    assert said == ["wandb: offline, because the online run could not begin (HTTP 401)"]


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_a_run_without_a_key_is_offline_and_asks_nobody(clean_env, tmp_path, mode):
    stand_in = StandInForWandb(key=False)
    run, said = begun(clean_env, stand_in, tmp_path / "run", mode=mode)
    assert [wanted["mode"] for wanted in stand_in.wanted] == ["offline"]
    assert run.run
    assert [line.partition(":")[0] for line in said] == ["wandb"]
    assert "WANDB_API_KEY" in said[0]


# --- wandb: whole runs, in processes of their own -------------------------------------------------------------------

RUN = """
import os, signal, sys, time
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from training.metrics import Metrics
from training.wandb_run import WandbConfig
step = {"loss": 2.0, "bits_per_byte": 3.0, "lr": 1e-3, "grad_norm": 1.0, "ms": 1.0, "tokens_per_second": 1.0,
        "mfu": None, "memory_gib": 1.0, "eta_s": 1.0}
folder, first, kill_wandb = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
run = Metrics(folder, 6, config={"model": {"n_layer": 4}}, wandb_config=WandbConfig(tags=["mine"]), broken="no_max",
              resume_step=first - 1 or None)
for i in range(first, first + 3):
    if kill_wandb and i == first + 1:
        run.wait()
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # of a process that has ended meanwhile
                pid, _, state_and_parent = file.read_text().partition(" (wandb-core) ")
                if state_and_parent and int(state_and_parent.split()[1]) == os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.3)
    run.log({"step": i, **step, "loss": float("nan") if i == 2 else 2.0})
run.sample(i, "once <upon>")
run.picture()
run.close(exit_code=3)
print("closed", flush=True)
"""


def run_with_wandb(folder, first=1, *extra, **env):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and "proxy" not in k.lower()}
    own = {"NETRC": f"{folder}.netrc", "WANDB_CONFIG_DIR": f"{folder}.config"}  # not the settings of whoever runs this
    own["WANDB__SERVICE_WAIT"] = str(HANGS)  # for its helper process to start; on a busy machine 30 s may pass
    done = subprocess.run(
        [sys.executable, "-c", RUN, folder, str(first), *extra],
        cwd=ROOT,
        env={**keep, **own, **env},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wandb_records(path):
    """The records of a .wandb file, as `wandb sync` reads them: protobuf messages in LevelDB's log format.

    7 bytes of file header, then blocks of 32 KiB of chunks: crc (4), length (2), kind (1: whole, 2: first, 3: middle,
    4: last), data.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, message, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too little for a chunk's header: padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return records


def requests_to(server: socket.socket) -> list[bytes]:
    """What was sent to a server that takes connections and never answers, by those who have left since."""
    server.setblocking(False)
    found = []
    with suppress(BlockingIOError):
        while True:
            with server.accept()[0] as client:
                found.append(client.recv(65536))
    return found


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """Three steps, then three more of the same run resumed; a key is set and the network cut. The folder, what the runs
    printed, their records, and what the network was asked."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("runs") / "broken-run"
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        cut = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        out = [run_with_wandb(folder, 1, **cut), run_with_wandb(folder, 4, WANDB_MODE="offline")]
        asked = requests_to(server)
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return folder, out, [wandb_records(path) for path in files], asked


def test_with_a_key_and_the_network_cut_a_run_is_offline(offline_run):
    _, (out, _), _, _ = offline_run
    assert re.search(r"^wandb: offline, because the online run could not begin \(.+\)$", out, re.MULTILINE)


def test_a_cut_network_holds_up_neither_the_beginning_nor_the_end(offline_run):
    """wandb.init() waited 100 s for the host that never answers; and wandb's reports on itself waited 10 s for it at
    exit, in an offline run too."""
    *_, asked = offline_run
    assert {request.split()[1] for request in asked} <= {b"/graphql"}, "the run itself, until its time is up"


def test_an_offline_run_holds_what_wandb_sync_sends(offline_run):
    _, _, (records, _), _ = offline_run
    run = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, sorted(run.tags)) == ("tilegpt", "broken-run", ["broken:no_max", "mine"])
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["model"] == {"n_layer": 4}

    history = [
        {(item.key or ".".join(item.nested_key)): item.value_json for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [row["step"] for row in history if "loss" in row] == ["1", "2", "3"]
    assert [row["loss"] for row in history if "loss" in row] == ["2", "NaN", "2"]
    assert not any(row.get("mfu") for row in history)
    for key, kind in (("samples", '"html-file"'), ("loss_picture", '"image-file"')):
        assert [(row[f"{key}._type"], row["step"]) for row in history if f"{key}._type" in row] == [(kind, "3")]
    steps = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert ("*", "step") in [(m.glob_name, m.step_metric) for m in steps]
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [3]


def test_the_table_of_a_resumed_run_has_the_earlier_samples_too(offline_run):
    folder, *_ = offline_run
    pages = sorted(folder.glob("wandb/offline-run-*/files/media/html/samples*.html"), key=os.path.getmtime)
    rows = [re.findall(r"<td>(\d+)</td><td><pre>(.+?)</pre>", page.read_text()) for page in pages]
    third, sixth = (("3", "once &lt;upon&gt;"), ("6", "once &lt;upon&gt;"))
    assert rows == [[third], [sixth, third]]
    assert all("BROKEN[no_max]" in page.read_text() for page in pages)


def test_the_table_has_the_newest_samples():
    page = wandb_run.samples_table([(step, f"text {step}") for step in range(100)], "")
    assert re.findall(r"text (\d+)", page) == [str(step) for step in range(99, 49, -1)]


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
    run = Metrics(tmp_path / "run", 600, config={}, wandb_config=WandbConfig(mode="offline"))
    run.log({"step": 1, **STEP})
    run.draw_later()
    run.log({"step": 2, **STEP})
    drawing, drawn = not run.time_to_draw(), (tmp_path / "run/loss.png").exists()
    went_on.set()
    run.close(3)
    assert drawing
    assert not drawn
    assert [told["step"] if isinstance(told, dict) else told for told in heard] == [1, 2, "picture", 3]
    assert (tmp_path / "run/loss.png").exists()


@pytest.mark.parametrize("then", [lambda run: run.log({"step": 2, **STEP}), Metrics.picture, Metrics.close])
def test_a_picture_that_cannot_be_written_is_told(open_metrics, tmp_path, monkeypatch, then):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    run = open_metrics(tmp_path)
    run.log({"step": 1, **STEP})
    run.draw_later()
    futures.wait(run.jobs)
    with pytest.raises(OSError, match=r"loss.png could not be written \(No space left on device\): free some space"):
        then(run)


def test_a_full_disk_is_told_with_the_file_and_the_run_still_ends(open_metrics, tmp_path):
    """The line was "No space left on device" alone. And Metrics.close() broke off, so wandb's run never ended."""
    run, ended = open_metrics(tmp_path), []
    run.begin_wandb = lambda: SimpleNamespace(finish=ended.append)
    (tmp_path / "samples.txt").unlink()
    (tmp_path / "samples.txt").mkdir()
    with pytest.raises(OSError, match=r"samples.txt could not be written \(Is a directory\): "):
        run.sample(1, "text")
    with open(os.devnull) as refuses:
        os.dup2(refuses.fileno(), run.file.fileno())  # what is written stays in memory, as on a full disk
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written \(Bad file descriptor\): free some space"):
        run.log({"step": 2, **STEP})
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written \(Bad file descriptor\): free some space"):
        run.close(2)
    assert ended == [2]


def test_a_resumed_run_goes_on_in_the_same_wandb_run(offline_run):
    folder, _, files, _ = offline_run
    ids = [next(r.run.run_id for r in records if r.WhichOneof("record_type") == "run") for records in files]
    assert ids == [(folder / "wandb_id.txt").read_text().strip()] * 2
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]


def test_wandb_sync_would_take_the_runs(offline_run):
    folder, *_ = offline_run
    runs = sorted(str(path) for path in folder.glob("wandb/offline-run-*"))
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--dry-run", *runs],
        capture_output=True,
        text=True,
        timeout=HANGS,
        cwd=folder,
    )
    assert done.returncode == 0
    assert all(Path(run).name in done.stdout + done.stderr for run in runs)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds wandb's process in /proc")
def test_wandb_dying_costs_one_line_and_not_the_run(tmp_path):
    pytest.importorskip("wandb")
    out = run_with_wandb(tmp_path / "run", 1, "kill", WANDB_MODE="offline")
    assert len(re.findall(r"^wandb: gave up, the run goes on without it \(.+\)$", out, re.MULTILINE)) == 1
    assert "closed" in out
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "samples.txt", "loss.png", "wandb_id.txt", "checkpoints", "faults"]
)
def test_nothing_is_written_through_what_lies_in_place_of_a_runs_file(tmp_path, name, kind):
    """A link in a run's folder was followed: `resume=auto` replaced ~/.bashrc. A pipe was waited for."""
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    folder.mkdir()
    if kind == "link":
        theirs.mkdir() if "." not in name else theirs.write_text("theirs")
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(theirs)
    with pytest.raises(ValueError, match=re.escape(str(folder / name))):
        Metrics(folder, 3, config={}, wandb_config=WandbConfig(mode="disabled"), resume_step=1)
    assert [path.name for path in folder.iterdir()] == [name]
    assert theirs.exists() == (kind == "link")
    assert not theirs.is_file() or theirs.read_text() == "theirs"


@pytest.mark.parametrize("key", ["step", "loss", "val_loss"])
@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_that_no_float_holds_is_no_record(tmp_path, capsys, key, number):
    """It was a traceback, while the picture was drawn."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0} | {key: number}) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert "left out 1 line" in capsys.readouterr().err


@pytest.mark.parametrize("read", [read_metrics, read_samples])
def test_a_file_that_is_too_large_for_the_memory_is_refused(tmp_path, read):
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes"):
        read(tmp_path / "file")


def test_a_record_is_not_written_into_the_other_name_of_a_file(tmp_path):
    (tmp_path / "theirs").write_text("{}\n")
    os.link(tmp_path / "theirs", tmp_path / "metrics.jsonl")
    metrics.append(tmp_path / "metrics.jsonl", {"step": 1})
    assert (tmp_path / "theirs").read_text() == "{}\n"
    assert (tmp_path / "metrics.jsonl").read_text() == '{}\n{"step": 1}\n'


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "read",
    [read_metrics, read_samples, lambda path: edits(path, {}, {})],
    ids=["metrics.jsonl", "samples.txt", "config.yaml"],
)
def test_a_runs_file_is_not_read_through_what_lies_in_its_place(tmp_path, read, kind):
    """A pipe was waited for, and of a link to /dev/zero everything was read."""
    file = tmp_path / "file"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/null")
    with pytest.raises(ValueError, match=re.escape(f"{file} is a {kind}")):
        read(file)


@pytest.mark.parametrize("kind", ["link", "full"])
def test_wandbs_id_goes_through_no_link_and_stops_no_run(tmp_path, monkeypatch, kind):
    pytest.importorskip("wandb")
    theirs, said = tmp_path / "theirs", []
    (tmp_path / "run").mkdir()
    if kind == "link":
        (tmp_path / "run/wandb_id.txt").symlink_to(theirs)
    else:
        monkeypatch.setattr(wandb_run, "replacing", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    WandbRun("offline", WandbConfig(), tmp_path / "run", {}, None, said.append)
    assert [line.partition("(")[0] for line in said] == ["wandb: gave up, the run goes on without it "]
    assert not theirs.exists()


@pytest.mark.parametrize("name", ["loss.png", "metrics.jsonl", "samples.txt", "context.png"])
def test_a_link_under_a_temporary_name_is_not_followed(open_metrics, tmp_path, name):
    theirs, folder = tmp_path / "theirs", tmp_path / "run"
    folder.mkdir()
    theirs.write_text("theirs")
    (folder / f".tmp-{name}").symlink_to(theirs)
    run = Metrics(folder, 3, config={}, wandb_config=WandbConfig(mode="disabled"))
    run.log({"step": 1, **STEP})
    run.picture()
    run.close()
    assert theirs.read_text() == "theirs"
