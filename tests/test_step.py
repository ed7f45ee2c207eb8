"""training/step.py: what an update leaves out, what the host learns late, and where the batches come from."""

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import breakit
import train
import training.record
import training.step
from data.loader import Batch, Loader, Prefetch
from model.attention import AttentionConfig
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, GPTConfig
from parallel.processes import ParallelConfig, sends_from_python
from tests.reference import assert_float64_right
from tests.runs import TIMES, assert_same_run, full, losses, records
from training import checkpoint
from training.metrics import Metrics, read_metrics
from training.optimizer import Muon, OptimizerConfig, build_optimizers
from training.record import Graphs, Report
from training.settings import Config
from training.state import optimizer_tensors
from training.step import TrainStep, choose_way

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# --- how a step is run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "impl", "recomputed", "more", "way"),
    [
        (CUDA, "triton", "false", {}, "recorded"),
        (CUDA, "triton", "true", {}, "recorded"),
        (CUDA, "sdpa", "false", {}, "recorded"),
        (CUDA, "sdpa", "selective", {}, "recorded"),
        (CUDA, "naive", "false", {}, "recorded"),
        (CUDA, "tiled", "false", {}, "eager"),  # it chooses its tiles in Python
        (CUDA, "sdpa", "true", {}, "compiled"),  # it reads the random state in Python
        (CPU, "tiled", "false", {}, "eager"),
        (CPU, "sdpa", "false", {}, "eager"),
        (CUDA, "triton", "true", {"break_it": BreakIt("unrestored_seed")}, "compiled"),
        (CUDA, "triton", "false", {"parallel": ParallelConfig(context=2)}, "recorded"),
        # which does not divide the heads
        (CUDA, "triton", "false", {"parallel": ParallelConfig(context=3)}, "compiled"),
        (CUDA, "triton", "false", {"parallel": ParallelConfig(shard=True)}, "compiled"),
    ],
)
def test_a_step_is_run_in_the_fastest_way_there_is_and_a_graph_of_what_cannot_be_recorded_is_refused(
    device, impl, recomputed, more, way
):
    model = GPTConfig(n_head=4, activation_checkpointing=recomputed)
    sends = sends_from_python(train.Config(model=model, parallel=more.get("parallel", ParallelConfig())))
    asked = device, AttentionConfig(impl, dropout_p=0.1), model, more.get("break_it", UNBROKEN), sends
    found, why = choose_way("auto", *asked)
    assert found == way
    assert bool(why) == (way != "recorded")
    assert choose_way("true", *asked)[0] == "compiled"
    assert choose_way("false", *asked)[0] == "eager"
    if why:
        with pytest.raises(ValueError, match=f"^compile=graph: {re.escape(why)}; use compile=auto$"):
            choose_way("graph", *asked)
    else:
        assert choose_way("graph", *asked) == ("recorded", "")


def test_a_run_says_how_its_steps_are_made_and_which_of_sdpas_kernels_runs(small_run):
    said = "attention: sdpa, PyTorch's flash kernel (asked for: sdpa) | step: eager (CUDA graphs need"
    assert said in small_run("steps=1 attention=sdpa").out
    assert "| step: eager (compile=false)" in small_run("steps=1 compile=false name=y").out


def test_a_step_that_cannot_be_recorded_is_one_line(monkeypatch):
    """After the first steps, which are compiled ones."""

    refusal = RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock(side_effect=refusal))
    trained = Trained("adamw")
    trained.step.way = "recorded"
    for _ in range(training.step.WARM_UP):
        trained.update()
    before = trained.everything()
    with pytest.raises(ValueError, match=r"as a CUDA graph \(operation .* is capturing\); use compile=true$"):
        trained.update()
    assert same(trained.everything(), before)


def test_batches_of_another_shape_are_recorded_anew(monkeypatch):
    """After as many compiled steps. The old recording has the old batches' addresses."""
    done, trained = [], Trained("adamw")
    trained.step.way = "recorded"

    def record(self, what, run):
        done.append("record")
        return SimpleNamespace(replay=lambda: done.append("replay"))

    monkeypatch.setattr(Graphs, "capture", record)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(TrainStep, "update", lambda self, batches: done.append(batches.x.shape[-1]))
    for length in (8, 16):
        for _ in range(5):
            trained.step(Batch(*torch.zeros(2, 2, 64 // length, length, dtype=torch.int64), None), 1e-2, 0.1)
    assert done == [8, 8, 8, "record", "replay", "replay", "reset", 16, 16, 16, "record", "replay", "replay"]


def test_validation_losses_are_recorded_once_for_each_shape_and_each_is_its_own_batchs(monkeypatch):
    """A replay reads where the recorded batch lies, and writes where the last loss was."""
    recorded, trained = [], Trained("adamw", averaged=True)
    trained.update()

    def record(self, what, run):
        recorded.append(run)
        return SimpleNamespace(replay=run)

    monkeypatch.setattr(Graphs, "capture", record)
    trained.step.graphs.step = SimpleNamespace()
    found, right = [], []
    for B in (4, 4, 2, 4, 2):
        batch = Batch(*torch.randint(31, (2, B, 16)), None)
        right.append(trained.average(batch.x, batch.y))
        found.append(trained.step.loss_of_windows(batch))
    assert torch.equal(torch.stack(found), torch.stack(right))
    assert len(recorded) == 2
    trained.step(Batch(*torch.zeros(2, 1, 8, 8, dtype=torch.int64), None), 1e-2, 0.1)
    assert trained.step.graphs.step is None
    assert not trained.step.graphs.losses  # they were in the old graph's memory


# --- an update that is left out --------------------------------------------------------------------------------------


class Trained:
    """A model of 30 thousand weights with its step. update(factor) makes an update from the same random batches as
    another Trained; the gradient is multiplied by `factor`, and so is the loss if it is NaN. An optimizer that is not
    fused ignores found_inf, as on Apple's GPUs."""

    def __init__(self, kind: str, *, averaged=False, stop_on_nan=True, scale: float | None = None, fused=True):
        torch.manual_seed(0)
        size = GPTConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=31)
        self.model = GPT(size, AttentionConfig("naive"))
        self.average = deepcopy(self.model) if averaged else self.model
        self.optimizers = build_optimizers(self.model, OptimizerConfig(kind=kind))
        for optimizer in self.optimizers if not fused else ():
            optimizer.found_inf = None
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        self.step = TrainStep(
            self.model, self.average, self.optimizers, scaler, nullcontext(), "eager", Config(stop_on_nan=stop_on_nan)
        )
        self.generator = torch.Generator().manual_seed(1)

    def update(self, factor: float = 1.0):
        x, y = torch.randint(31, (2, 2, 4, 16), generator=self.generator)  # (x and y, passes, B, T)

        def loss_of(*arguments, **options):
            loss = self.model(*arguments, **options)
            return loss * factor if math.isnan(factor) else loss.detach() + (loss - loss.detach()) * factor

        self.step.loss_of = loss_of
        return self.step(Batch(x, y, None), 1e-2, 0.1).numbers()

    def everything(self) -> dict[str, torch.Tensor]:
        """All that an update may change, copied."""
        names = [(f"model.{name}", p) for name, p in self.model.named_parameters()]
        found = dict(names) | {f"average.{name}": p for name, p in self.average.named_parameters()}
        return deepcopy(found | optimizer_tensors(self.optimizers, names))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


HUGE = 1e38  # the gradient's norm is then infinite, and the loss what it was


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("factor", [math.nan, HUGE], ids=["loss", "gradient"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_bad_update_and_those_after_it_change_no_weight_no_momentum_and_no_average(kind, factor, fused, monkeypatch):
    """Those after it were sent before the host had heard of it. On Apple's GPUs the fused AdamW ignores found_inf, so
    every bad update was made, and every overflow in fp16."""
    assert "mps" not in training.step.READS_FOUND_INF
    if not fused:
        monkeypatch.setattr(training.step, "READS_FOUND_INF", ())
    trained = Trained(kind, averaged=True, fused=fused)
    trained.update()
    first = trained.everything()
    assert not trained.update().stopped
    before = trained.everything()
    assert not [name for name in first if torch.equal(first[name], before[name])]  # a good one changes all of them
    for number, later in enumerate((factor, 1.0)):
        numbers = trained.update(later)
        assert numbers.stopped
        assert math.isfinite(numbers.loss) == (later in (HUGE, 1.0))
        assert math.isfinite(numbers.norm) == (number == 1)
        assert same(trained.everything(), before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_the_guard_a_bad_update_is_made(kind):
    trained = Trained(kind, stop_on_nan=False)
    trained.update()
    assert not trained.update(math.nan).stopped
    assert all(p.isnan().any() for p in trained.model.blocks.parameters())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_with_a_scale_left_an_infinite_gradient_leaves_out_one_update_and_halves_the_scale(kind, fused, monkeypatch):
    """With no scale left to blame it stops the run, and so does a loss of NaN at once."""
    if not fused:
        monkeypatch.setattr(training.step, "READS_FOUND_INF", ())
    trained = Trained(kind, averaged=True, scale=4.0, fused=fused)
    trained.update()
    before = trained.everything()
    numbers = trained.update(HUGE)
    assert (numbers.stopped, numbers.scale) == (False, 4.0)
    assert same(trained.everything(), before)
    numbers = trained.update()
    assert (numbers.stopped, numbers.scale) == (False, 2.0)
    assert not same(trained.everything(), before)
    assert trained.update(math.nan).stopped
    assert Trained(kind, scale=1.0).update(HUGE).stopped


# --- Muon -----------------------------------------------------------------------------------------------------------


SHAPES = [(48, 16), (16, 64), (16, 16)]


def after_steps(made: list[torch.optim.Optimizer], shape: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    """Weights and momentum of each optimizer, which has two matrices, after three steps with the same gradients."""
    generator = torch.Generator().manual_seed(2)
    first, *gradients = torch.randn(4, 2, *shape, generator=generator, dtype=torch.float64)
    found = []
    for optimizer in made:
        ps = optimizer.param_groups[0]["params"]
        for p, x in zip(ps, first, strict=True):
            p.data = x.to(p.dtype, copy=True)
        for gradient in gradients:
            for p, g in zip(ps, gradient, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"] for p in ps]
        found.append({"weights": torch.stack(list(ps)).detach(), "momenta": torch.stack(momenta)})
    return found


def two(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("together", [1, 2**24])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_is_torchs_bit_for_bit(shape, together, monkeypatch):
    """But for bfloat16, which is left out on a CPU."""
    monkeypatch.setattr("training.optimizer.TOGETHER", together)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    torchs = torch.optim.Muon(two(shape), lr=0.01, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    assert same(*after_steps([torchs, Muon(two(shape), 0.01, 0.3, 0.9)], shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_takes_its_rate_from_the_device_too(shape):
    p, q, rate = two(shape, torch.float64), two(shape, torch.float64), torch.tensor(0.01, dtype=torch.float64)
    number, tensor = after_steps([Muon(p, 0.01, 0.3, 0.9), Muon(q, rate, 0.3, 0.9)], shape)
    assert_float64_right(tensor, number, terms=10)


# --- what the host learns late ----------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch):
    """On a CPU a report is there at once. Now each comes as late as it may, as on a GPU that is far behind."""
    monkeypatch.setitem(training.step.AHEAD, "cpu", 3)
    monkeypatch.setattr(Report, "arrived", lambda self: False)


def plant(monkeypatch, at: int) -> None:
    """The loss of update number `at` is NaN."""
    update = TrainStep.update

    def planted(self, batches):
        model = self.loss_of
        if self.steps + 1 == at:
            self.loss_of = lambda *arguments, **options: model(*arguments, **options) * math.nan
        update(self, batches)
        self.loss_of = model

    monkeypatch.setattr(TrainStep, "update", planted)


WHOLE = "steps=12 eval_every=5 checkpoint_every=5 keep_last=9 sample_every=5 sample_tokens=5 ema_decay=0.5"


def test_a_run_that_hears_late_writes_what_one_that_hears_at_once_writes(small_run, tmp_path, late, monkeypatch):
    for name in ("late", "at-once"):
        small_run(f"{WHOLE} attention.dropout_p=0.1 probe.every=4 name={name}")
        monkeypatch.undo()
    assert_same_run(tmp_path / "late", tmp_path / "at-once")
    for step in ("step_000005", "step_000010"):
        a, b = (tmp_path / name / checkpoint.FOLDER / step for name in ("late", "at-once"))
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (a / file).read_bytes() == (b / file).read_bytes()
        assert checkpoint.load_state(a)["loader"] == checkpoint.load_state(b)["loader"]


def test_a_run_that_hears_late_of_nan_ends_as_if_it_had_heard_at_once(small_run, tmp_path, late, monkeypatch):
    """It names the step, logs none after it, has the weights of the step before, and searches that step's batches."""
    typed = "eval_every=6 checkpoint_every=6 attention.dropout_p=0.1"
    small_run(f"{typed} name=whole steps=6")
    plant(monkeypatch, at=7)
    caught, find = [], train.find_the_fault
    monkeypatch.setattr(train, "find_the_fault", lambda run, *rest: caught.append((run, *rest)) or find(run, *rest))
    ended = small_run(f"{typed} steps=12 optimizer.min_lr_ratio=1 probe.every=100", code=1)
    assert "step 7: loss nan, gradient norm nan: stopped before the update" in ended.out
    assert [row["step"] for row in records(tmp_path / "x")] == list(range(1, 8))
    ((run, batches, _),) = caught
    assert same(dict(run.model.state_dict()), checkpoint.load(tmp_path / "x/checkpoints/step_000006").model)
    assert losses(tmp_path / "x")[:6] == losses(tmp_path / "whole")
    again = deepcopy(run.batches.loader)
    again.position = 6 * again.batch_size * len(batches)
    assert all(torch.equal(batch.x, again.next().x) for batch in batches)


def test_a_broken_run_that_hears_late_of_nan_looks_at_what_one_that_hears_at_once_looks_at(
    small_run, tmp_path, late, monkeypatch
):
    """Its dropout was the one after the updates that had been sent meanwhile, as many as the device was behind."""
    for name in ("late", "at-once"):
        plant(monkeypatch, at=7)
        small_run(f"steps=12 break_it=no_max attention.dropout_p=0.1 name={name}", code=1)
        monkeypatch.undo()
    late_rows, rows = (
        [{key: x for key, x in row.items() if key not in TIMES} for row in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path / "late-BROKEN-no_max", tmp_path / "at-once-BROKEN-no_max")
    )
    assert late_rows[-1]["step"] == 7
    assert "o_error" in late_rows[-1]
    assert str(late_rows) == str(rows)  # nan is not nan


def test_a_run_that_hears_late_keeps_a_fault_that_shows_again(call, small_run, tmp_path, late):
    """A rate so large that the second step's attention is not finite; the batch that is kept is that step's."""
    small_run("optimizer.lr=1e38 optimizer.warmup_steps=0 probe.every=100 steps=30", code=1)
    (kept,) = (tmp_path / "x/faults").iterdir()
    assert kept.name == "step_000002"
    assert "not finite" in call(breakit, f"replay={kept}", "device=cpu").out


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_steps_time_is_all_that_passes_from_one_to_the_next_but_evaluations(small_run, tmp_path, monkeypatch):
    """It was the time of the update alone; writing the log is the run's pace too."""
    clock = [0.0]

    def look() -> float:
        clock[0] += 0.5  # a step takes this
        return clock[0]

    monkeypatch.setattr(training.record, "time", SimpleNamespace(perf_counter=look))
    slow = {"log": (Metrics.log, 1.0), "picture": (Metrics.picture, 100.0)}
    for name, (method, seconds) in slow.items():

        def slowly(*arguments, method=method, seconds=seconds):
            clock[0] += seconds
            return method(*arguments)

        monkeypatch.setattr(Metrics, name, slowly)
    small_run("steps=4 eval_every=2 checkpoint_every=100")
    assert [row["ms"] for row in records(tmp_path / "x")] == [500.0, 1500.0, 500.0, 1500.0]


def test_the_time_left_does_not_remember_a_compilation(small_run, tmp_path, monkeypatch):
    """A first step of 5 s made 5,000 steps of 5 ms look like 7 hours, and like minutes after 30 of them."""
    now, make = [0.0], TrainStep.__call__

    def made(self, *given):
        now[0] += 1.0 if now[0] else 100.0
        return make(self, *given)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(TrainStep, "__call__", made)
    small_run("steps=4")
    assert [row["eta_s"] for row in records(tmp_path / "x")] == [300.0, 2.0, 1.0, 0.0]


# --- batches from a thread --------------------------------------------------------------------------------------------


@pytest.fixture
def loader():
    tokens, documents = np.arange(1000, dtype=np.uint16), np.array([0, 300, 700])
    return Loader(tokens, documents, batch_size=2, context_length=8, seed=3)


@pytest.fixture
def prefetch(loader) -> Iterator[Prefetch]:
    made = Prefetch(deepcopy(loader), passes=3, slots=4, pinned=False)
    yield made
    made.close()


def test_the_threads_batches_are_the_loaders_in_its_order(loader, prefetch):
    for _ in range(10):
        step = prefetch.next()
        for batch in step.parts():
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(batch, loader.next(), strict=True))
        prefetch.give_back(step)


def test_the_state_is_that_of_the_step_that_was_taken_whatever_has_been_drawn(loader, prefetch):
    assert prefetch.state == loader.state_dict()
    for _ in range(3):
        prefetch.give_back(prefetch.next())
        for _ in range(3):
            loader.next()
        assert prefetch.state == loader.state_dict()
        [coming.result() for coming in prefetch.coming]  # all that is ahead has been drawn
        assert prefetch.loader.position > loader.position


def test_the_memory_is_made_once_and_a_step_that_is_kept_is_not_overwritten(prefetch):
    kept = prefetch.next()
    as_it_was, found = kept.x.clone(), {kept.x.data_ptr()}
    for _ in range(10):
        step = prefetch.next()
        found.add(step.x.data_ptr())
        prefetch.give_back(step)
    assert len(found) == 4
    assert torch.equal(kept.x, as_it_was)


def test_an_error_in_the_thread_is_raised_where_its_batch_is_wanted(prefetch, monkeypatch):
    monkeypatch.setattr(prefetch.loader, "next", full)
    with pytest.raises(OSError, match="No space left"):
        prefetch.next()


def test_a_run_leaves_no_thread(small_run, monkeypatch):
    kept = []  # what nothing refers to any more would be closed by itself, sooner or later

    def keep(*arguments, **options) -> Prefetch:
        kept.append(Prefetch(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(train, "Prefetch", keep)
    small_run("steps=2")
    assert len(kept) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
