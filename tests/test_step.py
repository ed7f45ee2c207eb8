"""training/step.py: how a step is run, what an update is, and what the guard leaves out."""

import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch

import training.step
from data.loader import Batch
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.conftest import ROOT
from tests.reference import assert_within_budget
from tests.runs import assert_same_run
from training.optimizer import OptimizerConfig, build_optimizers
from training.step import TrainStep, choose_mode

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("device", "impl", "model", "sharded", "mode"), [
    (CUDA, "triton", {}, False, "graph"), (CUDA, "sdpa", {"recompute": "true"}, False, "graph"),
    (CUDA, "sdpa", {"recompute": "true", "dropout_p": 0.1}, False, "compiled"),  # reads the random state in Python
    (CUDA, "sdpa dropping", {"recompute": "true"}, False, "compiled"),
    (CUDA, "triton dropping", {"recompute": "true"}, False, "graph"),  # its mask needs no random state
    (CUDA, "triton", {}, True, "compiled"), (CPU, "sdpa", {}, False, "eager"),
    (CUDA, "tiled", {}, False, "eager"),  # it chooses its tiles in Python
])  # fmt: skip
def test_auto_takes_the_fastest_mode_and_a_graph_of_what_cannot_be_recorded_is_refused(
    device, impl, model, sharded, mode
):
    config = AttentionConfig(impl.split()[0], dropout_p=0.1 if "dropping" in impl else 0.0)
    arguments = device, config, GPTConfig(**model), sharded
    assert choose_mode("auto", *arguments) == mode
    assert choose_mode("true", *arguments) == "compiled"
    assert choose_mode("false", *arguments) == "eager"
    if mode == "graph":
        assert choose_mode("graph", *arguments) == "graph"
    else:
        with pytest.raises(ValueError, match="compile=auto"):
            choose_mode("graph", *arguments)


class Trained:
    """A small model and its TrainStep."""

    def __init__(self, kind: str = "adamw", scale: float | None = None, mode: str = "eager", **options):
        torch.manual_seed(0)
        self.factor = 1.0  # of the loss's gradient, NaN: of the loss
        size = GPTConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=31)
        self.model = GPT(size, AttentionConfig("naive"))
        self.model.register_forward_hook(self.spoil)
        self.optimizers = build_optimizers(self.model, OptimizerConfig(kind=kind))
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        self.step = TrainStep(self.model, self.optimizers, scaler, nullcontext(), mode, **options)
        self.generator = torch.Generator().manual_seed(1)

    def spoil(self, model, inputs, loss):
        return loss * self.factor if math.isnan(self.factor) else loss.detach() + (loss - loss.detach()) * self.factor

    def batch(self, passes: int = 2, B: int = 4) -> Batch:
        x, y = torch.randint(31, (2, passes, B, 16), generator=self.generator)
        return Batch(x, y, None)

    def update(self, factor: float = 1.0):
        self.factor = factor
        return self.step(self.batch(), 1e-2).wait()

    def everything(self) -> dict[str, torch.Tensor]:
        """All that an update may change, copied."""
        names = {p: name for name, p in self.model.named_parameters()}
        states = {f"{names[p]}.{key}": x for o in self.optimizers for p, s in o.state.items() for key, x in s.items()}
        return deepcopy({name: p.detach() for p, name in names.items()} | states)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


HUGE = 1e38  # the gradient's norm is then infinite, and the loss what it was


@pytest.mark.parametrize("factor", [math.nan, HUGE], ids=["loss", "gradient"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_bad_update_and_those_after_it_change_no_weight_and_no_momentum(kind, factor):
    """Those after it were sent before the host had heard of it."""
    trained = Trained(kind)
    trained.update()
    first = trained.everything()
    assert not trained.update().stopped
    before = trained.everything()
    assert not [name for name in first if torch.equal(first[name], before[name])]  # a good one changes all of them
    for number, later in enumerate((factor, 1.0)):
        numbers = trained.update(later)
        assert numbers.stopped
        assert math.isfinite(numbers.loss) == (later in (HUGE, 1.0))
        assert math.isfinite(numbers.grad_norm) == (number == 1)
        assert same(trained.everything(), before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_with_a_scale_left_an_infinite_gradient_leaves_out_one_update_and_halves_the_scale(kind):
    """With no scale left to blame it stops the run, and so does a loss of NaN at once."""
    trained = Trained(kind, scale=4.0)
    trained.update()
    before = trained.everything()
    numbers = trained.update(HUGE)
    assert (numbers.stopped, numbers.loss_scale) == (False, 4.0)
    assert same(trained.everything(), before)
    numbers = trained.update()
    assert (numbers.stopped, numbers.loss_scale) == (False, 2.0)
    assert not same(trained.everything(), before)
    assert trained.update(math.nan).stopped
    assert Trained(kind, scale=1.0).update(HUGE).stopped


@pytest.mark.parametrize(("kind", "scale"), [("adamw", None), ("adamw", 1024.0), ("muon", 1024.0)])
def test_the_norm_is_the_gradients_before_clipping_and_without_the_scale(kind, scale):
    """Bit for bit: the scale is a power of two."""
    trained, found = Trained(kind, scale, grad_clip=0.125), []
    batch = trained.batch(passes=1)
    right = torch.autograd.grad(trained.model(batch.x[0], batch.y[0]), list(trained.model.parameters()))
    norm = torch.nn.utils.get_total_norm(right)
    trained.optimizers[0].register_step_pre_hook(lambda *_: found.extend(p.grad for p in trained.model.parameters()))
    assert trained.step(batch, 1e-2).wait().grad_norm == float(norm) > 0.125
    assert all(torch.equal(p, g * (0.125 / (norm + 1e-6))) for p, g in zip(found, right, strict=True))


def test_a_run_that_hears_late_writes_what_one_that_hears_at_once_writes(small_run, tmp_path, monkeypatch):
    """On a CPU a report is there at once. With AHEAD it is read two steps later, as on a GPU."""
    typed = "steps=12 eval_every=5 checkpoint_every=5 attention.dropout_p=0.1 probe.every=4"
    small_run(f"{typed} name=at-once")
    monkeypatch.setitem(training.step.AHEAD, "cpu", 2)
    small_run(f"{typed} name=late")
    assert_same_run(tmp_path / "late", tmp_path / "at-once")


@pytest.mark.slow
def test_a_compiled_step_is_the_eager_one():
    wide, eager, compiled = (Trained(mode=mode) for mode in ("eager", "eager", "compiled"))
    wide.model.double()
    for _ in range(3):
        assert_within_budget(*({"numbers": torch.tensor(run.update())} for run in (compiled, eager, wide)))


ONE_UPDATE = """from contextlib import nullcontext; import torch; from data.loader import Batch
from model.attention import AttentionConfig; from model.gpt import GPT, GPTConfig
from training.optimizer import OptimizerConfig, build_optimizers; from training.step import TrainStep
torch.manual_seed(0)
model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, context_length=16, vocab_size=31), AttentionConfig("tiled"))
scaler = torch.amp.GradScaler("cpu", enabled=False)
step = TrainStep(model, build_optimizers(model, OptimizerConfig()), scaler, nullcontext(), "compiled")
print(step(Batch(*torch.randint(31, (2, 1, 2, 16)), None), 1e-3).wait().grad_norm)"""


@pytest.mark.slow
def test_an_edited_gradient_of_attention_is_not_that_of_a_compiled_graph_kept_from_before(tmp_path):
    """torch finds kept graphs by the ops' names, so it would run the old one."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "cache")
    tree, norms = shutil.copytree(ROOT, tmp_path / "tree", ignore=left_out), []
    for do in ("do", "0 * do"):
        file = tree / "model" / "op.py"
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("lse2, do, dlse, *options), q", f"lse2, {do}, dlse, *options), q"))
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", ONE_UPDATE]
        norms.append(float(subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, check=True).stdout))
    assert norms[0] != norms[1]
