"""Several processes train one model as one process does: data parallel, FSDP2 and Ulysses; resumed, and stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from tests.runs import last, read_metrics, records
from training.checkpoint import load_checkpoint
from training.parallel import ParallelConfig, Ranks, join

ROOT = Path(__file__).resolve().parents[1]

# Gradients in float64: there another order of sums is far below what a wrong position, mask or sum makes.
LAYOUTS = {"one": (1, {}), "data2": (2, {}), "shard2": (2, {"shard": True}), "context2": (2, {"context": 2})}
LAYOUTS |= {"both4": (4, {"context": 2, "shard": True})}
MODELS = {
    "naive": ({}, {"impl": "naive"}),
    "gqa": (
        {"n_kv_head": 2, "position": "rope", "qk_norm": True, "bigram_rows": 40},
        {"impl": "tiled", "windows": [40, None]},
    ),
    "documents": ({"recompute": "selective", "bigram_rows": 40, "mix_x0": True}, {"impl": "tiled", "documents": True}),
}
# Runs of train.py: a step has two passes, an evaluation three batches. FSDP2 adds up the norm of the gradient in parts,
# so the runs are the same, bit for bit, without clipping.
STEPS = ["steps=4", "tokens_per_step=256", "eval_every=4", "eval_tokens=384", "checkpoint_every=2"]
STEPS += ["sample_every=4", "sample_tokens=8", "optimizer.grad_clip=0", "optimizer.kind=muon"]  # and AdamW for the rest
CLIP, SHARD, CONTEXT = "optimizer.grad_clip=1", "parallel.shard=true", "parallel.context=2"
DROPOUT = [CLIP, "model.dropout_p=0.1", "attention.dropout_p=0.1"]
RUNS = {
    "one": (1, []), "data2": (2, []), "shard2": (2, [SHARD]), "context2": (2, [CONTEXT]),
    "data2_on_one": (1, ["resume=RUNS/data2/checkpoints/step_000002"]),
    "shard2_on_one": (1, ["resume=RUNS/shard2/checkpoints/step_000002", "parallel.shard=false"]),
    "one_on_shard2": (2, ["resume=RUNS/one/checkpoints/step_000002", SHARD]),
    "data": (2, DROPOUT), "data_again": (2, ["resume=RUNS/data/checkpoints/step_000002", CLIP]),
    "shard": (2, [*DROPOUT, SHARD]), "shard_again": (2, ["resume=RUNS/shard/checkpoints/step_000002", CLIP]),
    "context": (2, [*DROPOUT, CONTEXT]), "context_again": (2, ["resume=RUNS/context/checkpoints/step_000002", CLIP]),
}  # fmt: skip


def run_all(jobs: list) -> None:
    """Runs the jobs of tests/ranks.py, which must succeed."""
    command = [sys.executable, "-m", "tests.ranks"]
    done = subprocess.run(command, input=json.dumps(jobs), cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr


def train_job(name: str, small: list[str], runs: Path, *more: str) -> list:
    ranks, options = RUNS[name]
    options = [option.replace("RUNS", str(runs)) for option in options]
    return [ranks, "train", [*small, *STEPS, f"runs={runs}", f"name={name}", *options, *more]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found[model, layout]: the gradients by name; loss, norm, held."""
    folder = tmp_path_factory.mktemp("gradients")
    files = {(model, layout): str(folder / f"{model}_{layout}") for model in MODELS for layout in LAYOUTS}
    sides = [(LAYOUTS[layout], MODELS[model], file) for (model, layout), file in files.items()]
    run_all([[ranks, "gradients", [file, parallel, *model]] for (ranks, parallel), model, file in sides])
    return {key: torch.load(file) for key, file in files.items()}


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """The folder of all RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    run_all([train_job(name, small, folder) for name in RUNS])
    return folder


def assert_close(ours: dict, right: dict) -> None:
    """Two orders of a sum over the 64 tokens of a sequence: every addition rounds by eps / 2 at most, in both."""
    for name in right.keys() - {"held"}:
        error = (ours[name] - right[name]).abs().max()
        assert error <= 64 * 2**-52 * right[name].abs().max(), f"{name}: {error}"


@pytest.mark.parametrize("layout", ["data2", "shard2"])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_with_a_pass_each_have_the_gradient_of_one_process_bit_for_bit(model, layout, found):
    right, ours = found[model, "one"], found[model, layout]
    if (model, layout) == ("documents", "shard2"):  # FSDP2's hooks add up the gradients of x0 in another order
        assert_close(ours, right)
    else:
        assert all(torch.equal(ours[name], right[name]) for name in right.keys() - {"norm", "held"})
    torch.testing.assert_close(ours["norm"], right["norm"], rtol=2**-50, atol=0)  # 4 eps: FSDP2 adds up two parts


@pytest.mark.parametrize("layout", ["context2", "both4"])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_that_share_sequences_have_the_gradient_of_one_process(model, layout, found):
    """naive and tiled, learned positions and rope, fewer key heads, windows, documents, blocks computed again."""
    assert_close(found[model, layout], found[model, "one"])


def test_each_rank_draws_its_own_dropout():
    model, drawn = GPT(GPTConfig(n_layer=1, n_embd=12, vocab_size=2), AttentionConfig("naive")), set()
    for rank in range(3):
        torch.manual_seed(0)
        Ranks(rank=rank, size=3).prepare(model, torch.device("cpu"))
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 3


def test_a_sharded_rank_holds_its_part_of_the_weights(found):
    one, two, four = (found["naive", layout]["held"] for layout in ("one", "shard2", "both4"))
    assert two < 0.51 * one
    assert four < 0.26 * one


@pytest.mark.slow
def test_compiled_blocks_that_share_sequences_have_the_gradient_of_one_process(found, tmp_path):
    file = str(tmp_path / "found")
    run_all([[2, "gradients", [file, {"context": 2}, *MODELS["gqa"], True]]])
    assert_close(torch.load(file), found["gqa", "one"])


# --- runs of train.py


def assert_same_checkpoint(run: Path, other: Path, random: bool = False) -> None:
    """The same weights and optimizer's state; and random states."""
    a, b = (load_checkpoint(last(folder)) for folder in (run, other))
    for x, y in ((a.weights, b.weights), (a.training, b.training)):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x if random or not name.startswith("rng."))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data2", "shard2"])
def test_a_run_of_two_processes_is_that_of_one(name, runs):
    """Losses, evaluations, samples and the checkpoint; written once."""
    for key in ("loss", "val_loss", "val_bits_per_byte"):
        right, ours = ([(row["step"], row[key]) for row in records(runs / run, key)] for run in ("one", name))
        assert ours == right
    assert (runs / name / "samples.txt").read_bytes() == (runs / "one" / "samples.txt").read_bytes() != b""
    assert_same_checkpoint(runs / "one", runs / name)


@pytest.mark.slow
def test_a_run_of_shared_sequences_is_that_of_one_but_for_rounding(runs):
    for key in ("loss", "val_loss", "val_bits_per_byte", "grad_norm"):
        right, ours = ([row[key] for row in records(runs / run, key)] for run in ("one", "context2"))
        assert ours == pytest.approx(right, rel=32 * 2**-23)  # eps for each of the 32 tokens of a sequence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "shard", "context"])
def test_a_resumed_run_of_two_processes_is_the_same_run(name, runs):
    """With dropout: each rank goes on with its own random state."""
    assert_same_checkpoint(runs / name, runs / f"{name}_again", random=True)
    first, second = load_checkpoint(last(runs / name)).training["rng.cpu"]
    assert not torch.equal(first, second)
    assert [row["loss"] for row in records(runs / f"{name}_again")] == [row["loss"] for row in records(runs / name)[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data2_on_one", "shard2_on_one", "one_on_shard2"])
def test_a_checkpoint_goes_on_with_another_number_of_processes(name, runs):
    assert_same_checkpoint(runs / "one", runs / name)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(small, tmp_path):
    """By torchrun itself, which kills the others when one ends with an error: the first one has to save before."""
    arguments = [*small, *STEPS, "steps=100000", "checkpoint_every=100000", "eval_every=100000", "sample_every=0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    command = [*torchrun, *arguments, f"runs={tmp_path}", "name=x"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "x" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        time.sleep(0.1)
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGTERM)
    said = run.communicate(timeout=200)[0]
    assert load_checkpoint(last(tmp_path / "x")).step == read_metrics(metrics)[-1]["step"], said
    assert said.count(" 1/100000 |") == 1, said  # only the first process prints


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_one(small, tmp_path):
    """In bf16, with recorded steps but for FSDP2. torch 2.11 compiled context2 without the gradient of q, k and v."""
    names = ["one", "data2", "shard2", "context2"]
    run_all([train_job(name, [*small[:-1], "device=cuda"], tmp_path, "steps=12") for name in names])
    right = records(tmp_path / "one")
    for name in names:
        found = records(tmp_path / name)
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in right], rel=2**-8)  # eps of bf16
        assert found[0]["grad_norm"] == pytest.approx(right[0]["grad_norm"], rel=2**-6)


# --- without other processes


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_each_batch_counts_on_one_rank_and_all_ranks_have_equally_many(count):
    batches = list(range(count))
    shares = [list(Ranks(data_rank=rank, data_size=3).shares(batches)) for rank in range(3)]
    assert sorted(batch for share in shares for batch, counts in share if counts) == batches
    assert {len(share) for share in shares} == {-(-count // 3)}


REFUSED = {  # ParallelConfig, GPTConfig, AttentionConfig
    "n_head": ({"context": 5}, {"n_head": 12, "context_length": 100}, {}),
    "n_kv_head": ({"context": 2}, {"n_kv_head": 1}, {}),
    "63 tokens": ({"context": 2}, {"context_length": 63}, {}),
    "alibi": ({"context": 2}, {}, {"alibi": True}),
    "fp16": ({"shard": True}, {}, {}),
    "break_it": ({"context": 2}, {}, {}),
    "probe.every": ({}, {}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ranks_cannot_share_is_refused(name):
    parallel, model, attention = REFUSED[name]
    model = GPTConfig(**model)
    keys = {"dtype": "fp16", "probe": SimpleNamespace(every=5), "break_it": BreakIt(["no_max"])}
    cfg = SimpleNamespace(model=model, **keys)
    with pytest.raises(ValueError, match=name):
        Ranks(size=2, config=ParallelConfig(**parallel)).check(cfg, AttentionConfig(**attention))


def test_a_sweep_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2"})
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2"])
    with pytest.raises(SystemExit, match="sweep"):
        join(ParallelConfig(), "cpu")


@pytest.mark.slow
def test_ranks_wait_longer_for_the_first_ones_preparation_than_for_a_collective():
    run_all([[2, "wait", []]])


@pytest.mark.parametrize("options", [{"shard": True}, {"context": 2}])
def test_one_process_cannot_share(options):
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        join(ParallelConfig(**options), "cpu")
