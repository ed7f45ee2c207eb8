"""train.py: a run does what its keys say, and says what it does."""

import json
import math
import re
import shlex
import time
import weakref
from unittest.mock import Mock

import pytest
import torch

import train
from data.dataset import open_data
from data.loader import Loader, validation_batches
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.runs import last, losses, records
from training.checkpoint import find_checkpoint, load_checkpoint
from training.config import to_type
from training.step import TrainStep


def test_the_smoke_recipe_runs_and_learns(call, text, tmp_path):
    ended = call(train, "experiment=smoke", "data=text", f"data.path={text}", f"data.cache={tmp_path}/cache",
                 f"runs={tmp_path}", "name=x")  # fmt: skip
    assert ended.code == 0, ended.err
    assert len(losses(tmp_path / "x")) == 20
    assert losses(tmp_path / "x")[-1] < losses(tmp_path / "x")[0] - 1
    files = {path.name for path in (tmp_path / "x").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.txt", "checkpoints"} <= files
    assert "resume=auto name=x" in ended.out


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="elsewhere kernels run in Triton's interpreter")
TILES = "attention=tiled attention.block_m=8 attention.block_n=8"


@pytest.mark.parametrize(
    ("option", "steps"),
    [(TILES, 5), (f"{TILES} model.recompute=selective", 5), ("attention=sdpa", 5),
     pytest.param("attention=triton", 1, marks=INTERPRETED)],
)  # fmt: skip
def test_every_attention_trains_on_one_curve(small_run, tmp_path, option, steps):
    small_run(f"steps={steps} eval_tokens=128 attention=naive name=naive")
    small_run(f"steps={steps} eval_tokens=128 {option} name=other")
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "naive"), abs=1e-4)


@pytest.mark.parametrize(
    "option", ["attention.window=4", "attention.windows=[4,null]", "attention.alibi=true", "attention.softcap=0.01",
               "attention.softmax_scale=2.0", "attention.documents=true"]
)  # fmt: skip
def test_an_option_of_attention_reaches_training_and_validation(small_run, tmp_path, option):
    same_weights = "steps=2 eval_every=2 optimizer.lr=1e-30"
    small_run(f"{same_weights} {option} name=with")
    small_run(f"{same_weights} name=without")
    a, b = (records(tmp_path / name) + records(tmp_path / name, "val_loss") for name in ("with", "without"))
    assert a[0]["loss"] != b[0]["loss"]
    assert a[-1]["val_loss"] != b[-1]["val_loss"]


def test_a_window_is_a_document_if_a_source_makes_them_for_the_context(small_run, monkeypatch):
    seen = []
    monkeypatch.setattr(Loader, "next", lambda loader, real=Loader.next: seen.append(real(loader)) or seen[-1])
    small_run("steps=9 data.source=recall data.path=null")
    assert all((batch.x[:, 0] == 256).all() for batch in seen)  # the end of the text before it


def test_the_validation_loss_and_its_bits_per_byte_are_those_of_the_saved_model(small_run, small, text, tmp_path):
    small_run("steps=2 eval_every=2 eval_tokens=100000 tokenizer=bpe tokenizer.vocab_size=300 model.dropout_p=0.5")
    kept = load_checkpoint(last(tmp_path / "x"))
    cache = next(argument.split("=")[1] for argument in small if argument.startswith("data.cache"))
    data = open_data(DataConfig("text", str(text), cache=cache), TokenizerConfig("bpe", 300))
    model = GPT(GPTConfig(**kept.state["config"]["model"]), AttentionConfig("naive")).eval()
    model.load_state_dict(kept.weights, strict=False)
    batches = validation_batches(data.val, None, 4, 32, 100000)
    nats = sum(model(x, y).item() * y.numel() for x, y, _ in batches)
    size = sum(int(data.token_bytes[y.numpy()].sum()) for _, y, _ in batches)
    (found,) = records(tmp_path / "x", "val_loss")
    assert found["val_loss"] == pytest.approx(nats / sum(y.numel() for _, y, _ in batches), rel=1e-4)
    assert found["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert kept.state["val_loss"] == found["val_loss"]


def test_a_sample_and_an_evaluation_change_no_bit_of_the_training(small_run, tmp_path):
    """Also where the vocabulary is padded, and the sample has tokens without text."""
    typed = "steps=6 attention.dropout_p=0.2 model.vocab_size=1000"
    small_run(f"{typed} sample_every=1 sample_tokens=5 eval_every=1 name=with")
    small_run(f"{typed} eval_every=100 name=without")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_with_stop_on_nan_false_a_run_goes_on_to_its_end(small_run, tmp_path):
    small_run("name=nan attention.softmax_scale=1e30 steps=3 stop_on_nan=false sample_every=3")
    said = small_run("break_it=no_max break_it.score_gain=1e6 steps=3 stop_on_nan=false sample_every=3").out
    assert len(losses(tmp_path / "x-BROKEN-no_max+gain_1e+06")) == 3
    assert "sample at step 3" in said


def test_a_broken_run_says_so_everywhere(small_run, tmp_path):
    said = small_run("break_it=no_rescale attention.block_n=8 steps=2 eval_every=2 sample_every=2 sample_tokens=3").out
    run = tmp_path / "x-BROKEN-no_rescale"
    assert "BROKEN[no_rescale]" in said.splitlines()[0]
    for line in (line for line in said.splitlines() if line.startswith("step") or "done" in line):
        assert line.startswith("BROKEN[no_rescale]")
    assert all(json.loads(line)["broken"] == "no_rescale" for line in (run / "metrics.jsonl").read_text().splitlines())
    assert "BROKEN[no_rescale]" in (run / "samples.txt").read_text()
    assert load_checkpoint(last(run)).state["broken"] == "no_rescale"
    again = small_run(f"resume=auto name={run.name} steps=3 runs={tmp_path}").out
    assert "BROKEN[no_rescale]" in again.splitlines()[0]
    assert load_checkpoint(last(run)).step == 3


def test_a_run_whose_minutes_are_over_evaluates_saves_and_ends_with_its_lowest_rate(small_run, tmp_path):
    rate = "optimizer.warmup_steps=3 optimizer.min_lr_ratio=0.5"
    said = small_run(f"steps=1000000 max_minutes=0.02 eval_every=1000000 {rate}").out
    rows = records(tmp_path / "x")
    assert rows[0]["eta_s"] is None  # there is no pace yet
    assert 0.5 < rows[1]["eta_s"] <= 1.2  # it was 0:00: what is left of the minutes, not of the steps
    rates = [row["lr"] for row in rows]
    assert rates[-1] == pytest.approx(5e-4, rel=0.2)
    assert max(rates) == pytest.approx(1e-3, rel=0.05)
    assert load_checkpoint(last(tmp_path / "x")).step == rows[-1]["step"] < 100000
    assert records(tmp_path / "x", "val_loss")[-1]["step"] == rows[-1]["step"]
    assert "max_minutes=0.04" in said


def test_the_rates_clock_begins_after_the_first_step_and_a_run_of_few_steps_says_so(small_run, tmp_path, monkeypatch):
    """The first step compiles. The second one had 98 % of the rate."""
    slow, enqueue = iter([2.0, 0.1, 0.1]), TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *step: time.sleep(next(slow, 0)) or enqueue(*step))
    said = small_run("steps=1000000 max_minutes=0.05 optimizer.warmup_steps=100000").out
    rates = [row["lr"] for row in records(tmp_path / "x")]
    assert rates[1] < 0.3 * max(rates)
    assert re.search(r"\d+ steps fit", said)


def test_the_scale_of_fp16_is_logged_and_the_loss_is_not_scaled(small_run, tmp_path):
    small_run("steps=3 dtype=fp16 attention=sdpa")
    rows = records(tmp_path / "x")
    assert rows[0]["loss_scale"] == 65536
    assert abs(rows[0]["loss"] - math.log(257)) < 0.5


def test_a_job_without_memory_says_the_way_out_and_leaves_its_own_to_the_next_one(small_run, monkeypatch):
    models, alive = [], []

    def full(self, batch, lr):
        models.append(weakref.ref(self.model))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainStep, "__call__", full)
    monkeypatch.setattr(train.machine, "about", lambda device, about=train.machine.about: alive.append(
        [model() for model in models]) or about(device))  # fmt: skip
    err = small_run("steps=2 name=a,b -m", code=1).err
    assert alive == [[], [None]]
    assert "batch_size=4 with tokens_per_step=128" in err
    assert "Traceback" not in err
    monkeypatch.setattr(TrainStep, "__call__", lambda *_: int("a program error"))
    assert "Traceback" in small_run("steps=1", code=1).err
    monkeypatch.setattr(train.machine, "about", Mock(side_effect=KeyboardInterrupt))
    small_run("seed=1,2 -m", code=130)  # ends the sweep, too


def test_the_last_line_goes_on_only_with_a_run_whose_loss_falls_and_the_best_is_saved(small_run, tmp_path):
    for lr, way in ("1e-3", "resume=auto"), ("3", "steps=5:"):  # at a rate of 3 the first loss is the lowest
        typed = f"steps=6 eval_every=4 optimizer.lr={lr} optimizer.min_lr_ratio=1 name=x{len(lr)}"
        assert way in small_run(typed).out.splitlines()[-1]
    assert find_checkpoint("x1", tmp_path, best=True).step == 4


def test_names_and_paths_may_hold_any_letter_and_a_command_that_is_printed_can_be_typed(
    small_run, text, tmp_path, monkeypatch
):
    """Folders with a space were not quoted; Hydra's grammar refused other letters, or read [1] as a pattern's."""
    file, runs = tmp_path / "naïve file (1) [2].txt", f"runs={tmp_path}/my runs"
    file.write_text("".join(path.read_text() for path in sorted(text.iterdir())))
    own = "name=é", f"data.path={file}", runs
    command = small_run("steps=1", *own).out.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(command) == ["python", train.__file__, "resume=auto", "name=é", runs, "steps=2"]
    assert small_run("resume=auto steps=2", *own).code == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [to_type(script).split()[0] for script in ("train.py", "breakit.py")] == ["torchrun", "python"]


@pytest.mark.slow
def test_a_run_on_a_cpu_imports_nothing_that_it_does_not_need(start, small, tmp_path):
    """It would take seconds of every start."""
    code = (
        "import sys, runpy; sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', run_name='__main__');"
        "print([name for name in ('torch._dynamo', 'triton', 'wandb', 'transformers') if name in sys.modules])"
    )
    out, err = start("-c", code, *small, f"runs={tmp_path}", "name=x", "steps=2").communicate()
    assert out.splitlines()[-1] == "[]", err
