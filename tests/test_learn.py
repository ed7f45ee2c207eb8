"""bench.py mode=learn: the recipes have the same text and the same time, and a row is what train.py has recorded."""

import json
import math
import shlex
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import train
from lab import learn
from lab.peer import PlainGPT
from tests.runs import table_of
from tests.test_bench import CPU
from tests.test_readme import composed
from tests.test_steps import nanogpt  # noqa: F401 (a fixture)
from training.optimizer import OptimizerConfig, learning_rate

NAMES = ["nanoGPT", "default", "laptop"]
TINY = "model.n_layer=1 model.n_head=2 model.n_embd=16 model.context_length=32 batch_size=2 eval_tokens=256"


@pytest.fixture
def also(small, monkeypatch) -> str:
    """Arguments of a run on the tests' text, of a tiny model, which evaluates often. The text is too small for the
    recipe's vocabulary."""
    monkeypatch.setitem(learn.RECIPES["laptop"], False, [*learn.RECIPES["laptop"][False], "tokenizer.vocab_size=300"])
    data = [argument for argument in small if argument.startswith("data")]
    return shlex.join([*data, *shlex.split(TINY), "eval_every=20", "optimizer.warmup_steps=5"])


@pytest.fixture
def clock(monkeypatch):
    """Each step of the peer's takes an eighth of a second."""
    now, forward = [0.0], PlainGPT.forward

    def counted(self, *given):
        now[0] += 0.125 if self.training else 0.0
        return forward(self, *given)

    monkeypatch.setattr(PlainGPT, "forward", counted)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])


def raced(out, also: str, **changes) -> list[dict]:
    bench.main(bench.Config(mode="learn", device="cpu", out=str(out), also=also, seconds=6, **changes))
    return table_of(out / "learn.csv")


@pytest.fixture
def in_process(call, monkeypatch) -> list[list[str]]:
    """train.py runs in this process. The arguments of its runs."""
    typed = []

    def run(command, **_):
        typed.append(command[2:])
        ended = call(train, *command[2:])
        return SimpleNamespace(returncode=ended.code, stderr=ended.err)

    monkeypatch.setattr(learn, "subprocess", SimpleNamespace(run=run))
    return typed


@pytest.mark.parametrize(("seconds", "name"), [(60, "gpu_minute"), (299, "gpu_minute"), (300, "gpu_ten_minutes")])
def test_a_gpu_trains_the_recipe_that_is_made_for_the_time(seconds, name):
    assert list(learn.recipes(True, seconds)) == ["nanoGPT", name]


def test_each_recipe_is_trained_with_each_seed_on_the_same_text_for_the_same_time(also, tmp_path, capsys, monkeypatch):
    """Its rows are what metrics.jsonl has of its evaluations."""
    runs = []

    def run(command, **_):
        runs.append(set(command[2:]))
        (folder := Path(next(word for word in command if word.startswith("runs="))[5:]) / "x").mkdir()
        steps = [{"step": 20, "loss": 2.0}, {"step": 20, "val_loss": 2.0, "val_bits_per_byte": 3.0, "seconds": 2.5}]
        steps.append({"step": 48, "val_loss": 1.0, "val_bits_per_byte": 1.5 + len(runs) / 10, "seconds": 6.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(learn, "subprocess", SimpleNamespace(run=run))
    rows = raced(tmp_path, also, seeds=[3, 4])
    found = [tuple(row[key] for key in ("name", "seed", "step", "seconds", "bits_per_byte")) for row in rows]
    assert found[::2] == [(name, seed, "20", "2.5", "3.0") for seed in "34" for name in NAMES]
    ends = [(name, seed, 1.5 + (i + 1) / 10) for i, (seed, name) in enumerate(product("34", NAMES))]
    assert found[1::2] == [(name, seed, "48", "6.0", str(bits)) for name, seed, bits in ends]
    assert {(row["text"], row["budget"]) for row in rows} == {("text", "6")}
    assert [row["tokenizer"] for row in rows[1::2]] == ["byte", "byte", "bpe"] * 2
    assert {row["how"] for row in rows[:2]} == {"its recipe in train.py"}
    assert ["experiment=shakespeare" in typed for typed in runs] == [True, False, False] * 2
    assert all({"max_minutes=0.1", "device=cpu", *shlex.split(also)} <= typed for typed in runs)
    assert "nanoGPT    seed 4: 1.9000 bits per byte after 6.0 s, 48 steps" in capsys.readouterr().out
    assert (tmp_path / "learn.png").stat().st_size > 0


def test_nanogpts_own_model_learns_by_its_recipe(also, clock, nanogpt, tmp_path, monkeypatch):  # noqa: F811
    """At the end its rate is a tenth, as the recipe has it, after a warm-up by steps."""
    monkeypatch.setattr(learn, "RECIPES", {"nanoGPT": learn.RECIPES["nanoGPT"]})
    rates, step_of = [], learn.plain

    def spied(model, autocast, device, settings):
        assert (settings.lr, settings.beta2, settings.weight_decay) == (1e-3, 0.99, 0.1)
        step, how = step_of(model, autocast, device, settings)
        return lambda batch, lr: rates.append(lr) or step(batch, lr), how

    monkeypatch.setattr(learn, "plain", spied)
    own = raced(tmp_path, also, seeds=[3], peer=nanogpt)
    assert {(row["name"], row["how"]) for row in own} == {("nanoGPT", "model.py in a plain loop")}
    assert [int(row["step"]) for row in own[:2]] == [20, 40]
    assert (float(own[-1]["seconds"]), int(own[-1]["step"]), len(rates)) == (6.0, 48, 48)
    by_steps = OptimizerConfig(lr=1e-3, warmup_steps=5)
    assert rates == pytest.approx([learning_rate(step, 48, by_steps) for step in range(1, 49)])
    first, last = (float(own[i]["bits_per_byte"]) for i in (0, -1))
    assert last < first < 8.1


def test_the_bits_per_byte_of_a_model_that_knows_nothing_are_those_of_its_vocabulary(small):
    ((cfg, _),) = composed("train.py", shlex.join([*small, "eval_tokens=256"]))
    dataset, _ = learn.data_of(cfg, None, None, learn.ALONE, 2)
    V = dataset.encoding.n_vocab

    def knows_nothing(x, y):
        assert x.shape == y.shape
        return None, torch.tensor(math.log(V))

    windows = list(learn.validation(cfg, dataset))
    tokens, size = (sum(n) for n in zip(*[(b.y.numel(), int(dataset.token_bytes[b.y.numpy()].sum())) for b in windows],
                                        strict=True))  # fmt: skip
    assert tokens > size  # an end of text has no byte
    found = learn.bits_per_byte(knows_nothing, cfg, dataset, CPU)
    assert found == pytest.approx(tokens * math.log2(V) / size)


def test_a_mistake_is_one_line_before_any_training(in_process, also, tmp_path):
    with pytest.raises(ValueError, match=r"\A[^\n]*n_layers[^\n]*\Z"):
        raced(tmp_path, "model.n_layers=3")
    assert in_process == []
    with pytest.raises(ValueError, match=r"\A[^\n]*failed: [^\n]*\Z"):
        raced(tmp_path, f"{also} data.path=/nowhere")


@pytest.mark.slow
def test_runs_are_processes_of_their_own(also, tmp_path):
    rows = raced(tmp_path, also, seeds=[3])
    assert {row["name"] for row in rows} == set(NAMES)
    assert all(float(row["seconds"]) < 20 for row in rows)
