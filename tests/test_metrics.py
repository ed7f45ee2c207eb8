"""training/metrics.py: what is written, shown and drawn, and a wandb that never stops a run."""

import math
import os
import signal
import socket
import sys
import time
from unittest.mock import Mock

import pytest

from tests.processes import HANGS
from tests.runs import last, read_metrics, records
from training import metrics
from training.checkpoint import step_of
from training.metrics import Metrics, WandbConfig

STEP = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "ms": 12.0, "tokens_per_second": 5e4, "memory_gib": 0.5, "eta_s": 75}


def log_step(run: Metrics, step: int, **more) -> None:
    run.log({"step": step, **STEP, "mfu": None, **more})


def test_a_record_is_one_line_that_has_its_numbers(tmp_path, capsys):
    run = Metrics(tmp_path, 100)
    log_step(run, 7, mfu=0.5, grad_norm=math.nan)
    run.log({"step": 7, "val_loss": 2.25, "val_bits_per_byte": 1.5, "seconds": 3.0})
    run.log({"step": 7, "headroom": math.inf})
    step, val, probe = capsys.readouterr().out.splitlines()
    for part in ("7/100", "2.5000", "1.00e-03", "nan", "12.0 ms", "50.0k", "mfu 50.0%", "0.50 GiB", "1:15"):
        assert part in step
    assert "2.2500" in val
    assert "1.5000" in val
    assert "headroom inf" in probe
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [7, 7, 7]
    log_step(run, 8)  # on a CPU, whose peak is not known
    assert "mfu" not in capsys.readouterr().out


def test_a_resumed_run_has_no_row_and_no_sample_of_later_steps_nor_half_a_line(tmp_path):
    run = Metrics(tmp_path, 100, resume_step=0)
    for step in range(1, 6):
        log_step(run, step)
        run.sample(step, f"{step} =====\r\nend")
    assert run.best == (math.inf, 0)
    for step, loss in enumerate((math.nan, 3.0, 1.25, 1.25, math.nan), 1):
        run.log({"step": step, "val_loss": loss, "val_bits_per_byte": 1.0, "seconds": 1.0})
    run.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    again = Metrics(tmp_path, 100, resume_step=3)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 1, 2, 3]
    assert run.best == again.best == (1.25, 3)  # never NaN, and the earliest of several
    text = (tmp_path / "samples.txt").read_bytes()
    assert b"3 = = = = =\r\nend" in text
    assert text.count(b"end") == 3
    log_step(again, 4)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 7
    Metrics(tmp_path, 100)
    assert not read_metrics(tmp_path / "metrics.jsonl")


def test_a_rank_that_does_not_write_writes_nothing(tmp_path):
    run = Metrics(tmp_path, 100, writes=False)
    log_step(run, 1)
    run.sample(1, "text")
    run.draw(last=True)
    run.begin_wandb(WandbConfig("offline"), {})
    assert not list(tmp_path.iterdir())


def test_the_picture_is_drawn_at_the_end_and_before_only_within_its_share_of_the_time(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    run = Metrics(tmp_path, 100)
    log_step(run, 1)
    run.draw()
    picture = tmp_path / "loss.png"
    assert not picture.exists()
    run.draw(last=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    run.draw_seconds = 2 * metrics.DRAWING
    for seconds, drawn in (1, False), (2, True):
        clock[0] += seconds
        run.draw()
        assert picture.exists() == drawn


@pytest.mark.slow
def test_where_ctrl_c_ends_tee_first_the_run_saves_all_the_same(start, small, tmp_path):
    """In `python train.py | tee log` the terminal sends the signal to both."""
    process = start("train.py", *small, "steps=100000", "eval_every=100000", f"runs={tmp_path}", "name=x")
    next(line for line in process.stdout if line.startswith("step"))
    process.stdout.close(), process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(HANGS) == 128 + signal.SIGINT
    assert step_of(last(tmp_path / "x")) == records(tmp_path / "x")[-1]["step"]


def test_a_full_disk_is_an_error_of_log_and_not_once_more_of_close(fake, tmp_path):
    wandb, run = fake(), begun(tmp_path, WandbConfig())
    run.file = open("/dev/full", "a")  # noqa: SIM115 (close() closes it)
    with pytest.raises(OSError, match="No space left"):
        log_step(run, 1)
    run.close(1)
    assert wandb.finished == [1]
    (tmp_path / "loss.png").symlink_to("/dev/full")
    Metrics(tmp_path, 100).close()


# --- wandb -----------------------------------------------------------------------------------------------------------


class Fake:
    """A wandb that remembers. fails: the modes in which init() raises."""

    def __init__(self, fails: tuple[str, ...] = ()):
        self.fails, self.inits, self.logged, self.finished = fails, [], [], []
        self.define_metric, self.teardown, self.setup, self.Settings = Mock(), Mock(), Mock(), dict

    def login(self, **_):
        return os.environ["WANDB_API_KEY"] and (self.setup.called or os.environ.get("WANDB_MODE") != "offline")

    def init(self, mode, **arguments):
        self.inits.append((mode, arguments))
        if mode in self.fails:
            raise RuntimeError("no route to host\nand more")
        self.offline, self.url = mode in ("offline", "dryrun"), "https://wandb"
        self.id, self.dir = arguments["id"], f"{arguments['dir']}/wandb/offline-run-1/files"
        return self

    def log(self, record):
        if "log" in self.fails:
            raise BrokenPipeError("gone")
        self.logged.append(record)

    def finish(self, exit_code):
        if "finish" in self.fails:
            raise ConnectionResetError("gone")
        self.finished.append(exit_code)


@pytest.fixture
def fake(monkeypatch):
    def fake(*fails: str, api_key: str = "key") -> Fake:
        made = Fake(fails)
        monkeypatch.setitem(sys.modules, "wandb", None if "import" in fails else made)  # None: an ImportError
        monkeypatch.setenv("WANDB_API_KEY", api_key)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        return made

    return fake


def begun(folder, config: WandbConfig, broken: str = "", resume_step: int = 0) -> Metrics:
    run = Metrics(folder, 10, broken, resume_step)
    run.begin_wandb(config, {"a": 1})
    return run


@pytest.mark.parametrize(("resume_step", "same"), [(2, True), (1, False), (0, False)])  # 0: of the same name
def test_wandb_gets_every_record_and_a_resumed_run_goes_on_there_or_anew(fake, tmp_path, resume_step, same):
    wandb = fake()
    run = begun(tmp_path, WandbConfig())
    for step in (1, 2):
        log_step(run, step)
    run.close(3)
    begun(tmp_path, WandbConfig(), resume_step=resume_step)
    Metrics(tmp_path, 10)
    assert not (tmp_path / "wandb_id.txt").exists()
    (mode, first), (_, second) = wandb.inits
    assert mode == "online"
    assert (first["id"] == second["id"]) == same
    assert wandb.logged == [{"step": step, **STEP} for step in (1, 2)]
    assert wandb.finished == [3]


def test_a_broken_run_has_a_tag_for_each_failure(fake, tmp_path):
    wandb = fake()
    begun(tmp_path, WandbConfig(tags=["mine"]), broken="no_max+no_scale+gain_100")
    assert wandb.inits[0][1]["tags"] == ["mine", "broken:no_max", "broken:no_scale", "broken:gain_100"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "variables", "found"),
    [(".netrc", {}, True), ("_netrc", {}, True), ("other", {"NETRC": "~/other"}, True), ("other", {}, False)],
)
def test_wandb_itself_finds_the_key_and_its_variables_win(file, variables, found, start, tmp_path):
    (tmp_path / file).write_text(f"machine 127.0.0.1:9 login user password {'a' * 40}")
    variables |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    variables |= {"WANDB_NAME": "mine", "WANDB_RUN_ID": "id7", "WANDB_DIR": f"{tmp_path}/other_folder"}
    code = "import sys, pathlib, training.metrics as m; run = m.Metrics(pathlib.Path(sys.argv[1]), 10);"
    code += "run.begin_wandb(m.WandbConfig(), {}); print(run.wandb and [run.wandb.name, run.wandb.id]); run.close()"
    out, err = start("-c", code, str(tmp_path), **variables).communicate(timeout=HANGS)
    assert ("cannot begin online" in out, "no API key" in out) == (found, not found), out + err
    assert (f"wandb sync {tmp_path}/other_folder/" in out, "['mine', 'id7']" in out) == (found, found), out


@pytest.mark.parametrize(
    ("mode", "environment", "api_key", "begins"),
    [("auto", None, "key", ["online"]), ("auto", None, "", []), ("auto", "offline", "", ["offline"]),
     ("auto", "disabled", "key", []), ("offline", None, "", ["offline"]), ("disabled", "online", "key", []),
     ("online", None, "", ["offline"]), ("auto", "dryrun", "", ["dryrun"]), ("online", "offline", "key", ["online"])],
)  # fmt: skip
def test_the_mode_is_the_configurations_else_the_environments_else_by_the_key(
    fake, tmp_path, monkeypatch, capsys, mode, environment, api_key, begins
):
    wandb = fake(api_key=api_key)
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    begun(tmp_path, WandbConfig(mode))
    assert [mode for mode, _ in wandb.inits] == begins
    assert ("wandb login" in capsys.readouterr().out) == (not api_key and not environment and mode != "offline")


def test_where_it_cannot_begin_online_it_begins_offline_and_says_so_in_a_line(fake, tmp_path, capsys):
    wandb = fake("online")
    begun(tmp_path, WandbConfig())
    assert [mode for mode, _ in wandb.inits] == ["online", "offline"]
    assert wandb.teardown.call_count == 2
    why, later = capsys.readouterr().out.splitlines()
    assert "no route to host and more" in why
    assert f"wandb sync {tmp_path}/wandb/offline-run-" in later
    assert sum(int(value) for name, value in metrics.WANDB.items() if "TIMEOUT" in name) <= 12  # seconds


@pytest.mark.parametrize("fails", [("online", "offline"), ("log",), ("finish",), ("import",)])
def test_a_wandb_that_fails_costs_a_line_and_not_the_run(fake, tmp_path, capsys, fails):
    fake(*fails)
    run = begun(tmp_path, WandbConfig())
    for step in (1, 2):
        log_step(run, step)
    run.close()
    assert len(records(tmp_path)) == 2
    assert 1 <= sum("wandb:" in line for line in capsys.readouterr().out.splitlines()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("host", ["refuses", "is silent"])
def test_with_a_dead_host_a_run_waits_ten_seconds_at_most_and_is_kept_for_wandb_sync(host, start, small, tmp_path):
    """wandb waited ten seconds more for a silent host after the run had ended, twice, to send its own telemetry."""
    seconds = {}
    for mode in ("disabled", "online"):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # never accepts, and the kernel does
            address = f"http://127.0.0.1:{silent.getsockname()[1] if host == 'is silent' else 9}"
            environment = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address}
            typed = [*small, "steps=2", f"wandb.mode={mode}", f"runs={tmp_path}", f"name={mode}"]
            began = time.monotonic()
            process = start("train.py", *typed, **environment)
            out, err = process.communicate(timeout=HANGS)
            seconds[mode] = time.monotonic() - began
            assert process.returncode == 0, err
    assert seconds["online"] - seconds["disabled"] < 13  # importing wandb and starting its helper process take 3
    assert len(records(tmp_path / "online")) == 2
    assert "wandb sync" in out
    assert list(tmp_path.glob("online/wandb/offline-run-*/*.wandb"))
