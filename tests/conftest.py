"""The scripts as the tests run them: in this process where they can be, on one small text and one small model."""

import os

# Models and tiles so small are slower on two threads than on one, ten times so when another process wants a core, and
# bits may depend on how many there are. Libraries read it when they are loaded, and processes that tests start inherit.
os.environ["OMP_NUM_THREADS"] = "1"

import random
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import tiktoken
import torch
from tiktoken_ext.openai_public import r50k_pat_str

import train
from data.prepare import DataConfig, prepare
from data.tokenizer import END_OF_TEXT, TokenizerConfig
from training.metrics import Metrics

# A kernel is for the interpreter or for a GPU from the moment kernels/ is imported, so it is said before anything does.
# Where there is a GPU, the kernels themselves run.
if find_spec("triton") and not torch.cuda.is_available():
    import tests.interpreter  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

# 35 thousand weights: a step is a few milliseconds, all of it overhead.
MODEL = ["model=gpt2", "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.context_length=32"]
RUN = ["batch_size=4", "tokens_per_step=128", "eval_tokens=512", "sample_every=0", "max_minutes=null"]
RATE = ["optimizer=adamw", "optimizer.lr=1e-3", "optimizer.warmup_steps=10"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What a test finds must not depend on which others ran before it on the same core. They leave random numbers and,
    as train.py does, a precision of float32 products."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of 150 documents, 40 kB: made, not copied from this repository, so that no edit changes a result.

    No symbol in it is rare, end of text included: one that is makes the gradient spike when it comes, and a spike blows
    rounding up to tenths of a nat.
    """
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 8))) for _ in range(200)]
    for i in range(150):
        lines = [" ".join(draw.choices(words, k=10)) + "\n" for _ in range(5)]
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def small(text, tmp_path_factory) -> list[str]:
    """The arguments of a small run; runs= and name= are each test's own."""
    cache = tmp_path_factory.mktemp("cache")
    data = ["data=text", f"data.path={text}", f"data.cache={cache}", "tokenizer=byte"]
    return [*data, *MODEL, *RUN, *RATE, "wandb.mode=disabled", "device=cpu"]


@pytest.fixture
def make(tmp_path: Path):
    """make(path): the folder in which `path` is prepared, in a cache of the test's own."""

    def make(path: Path | str, tokenizer: TokenizerConfig | None = None, cache: str = "cache", **options) -> Path:
        data = DataConfig("text", str(path), cache=str(tmp_path / cache), **options)
        return prepare(data, tokenizer or TokenizerConfig("byte"))

    return make


@pytest.fixture
def gpt2(monkeypatch) -> tiktoken.Encoding:
    """Stands in for GPT-2's tokenizer, which has to be downloaded: its pattern and number of symbols, other merges."""
    ranks = {bytes([b]): b for b in range(256)} | {bytes(divmod(i, 256)): 256 + i for i in range(50_000)}
    special = {END_OF_TEXT: 50_256}
    made = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.__getitem__)
    return made


@pytest.fixture(scope="session")
def call():
    """call(train, "steps=3") is `python train.py steps=3` without the seconds that a process takes to start, and
    without the picture of the loss. The script is loaded anew: it has no state of an earlier call."""

    def call(script: ModuleType, *arguments: str) -> Ended:
        out, err, code = StringIO(), StringIO(), 0
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
                patch.setattr(sys, "argv", [script.__file__, *arguments])
                patch.delenv("HYDRA_FULL_ERROR", raising=False)
                patch.setattr(Metrics, "draw", lambda *_, **__: None)
                runpy.run_path(script.__file__, run_name="__main__")
        except SystemExit as left:
            if isinstance(left.code, str):
                err.write(left.code)
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Ended(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def small_run(call, small, tmp_path):
    """small_run("steps=3 name=y"): how a small run ended, with these arguments over its own. Its folder is tmp_path/x,
    unless it is named or broken. more: arguments with spaces. code: the exit code that it must have."""

    def small_run(typed: str, *more: str, code: int = 0) -> Ended:
        ended = call(train, *small, f"runs={tmp_path}", "name=x", *typed.split(), *more)
        assert ended.code == code, ended.err
        return ended

    return small_run


@pytest.fixture(scope="session")
def start():
    """start("train.py", "steps=3") begins a real process. variables: of its environment."""

    def start(*command: str, **variables: str) -> subprocess.Popen:
        environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"} | variables
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)

    return start
