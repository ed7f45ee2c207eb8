"""Several processes train one model: the same run in every layout, resumed on another number, ended and begun again.

With parallel.shard=true each process has its part of the weights.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import bench
import sample
import train
from lab.ranks import CASES
from model import gpt as gpt_module
from model.attention import AttentionConfig, attention
from model.gpt import GPT, GPTConfig
from parallel import part as part_module
from parallel import processes
from parallel.part import Part
from parallel.processes import Ranks, bytes_sent, join
from parallel.shard import copy_of, gathered
from tests.implementations import INTERPRETED
from tests.processes import HANGS
from tests.runs import table_of
from training.memory import GIB, bytes_of
from training.metrics import read_metrics
from training.record import compiled

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ["model.n_head=4", "model.context_length=128", "batch_size=4", "tokens_per_step=1024"]
DROPOUT = ["model.dropout_p=0.1", "attention.dropout_p=0.1"]
# The windows of an evaluation are three batches, so one of two ranks has none at the end.
STEPS = ["steps=4", "eval_every=4", "checkpoint_every=2", "eval_tokens=1536", "ema_decay=0.9"]

UNCLIPPED = ["optimizer.grad_clip=0", "sample_every=4"]
BOTH = ["model.position=rope", "model.qk_norm=true", "attention.windows=[40,null]", "attention.documents=true"]
WIDE = [*BOTH, "model.chunk=32"]
RING = [*BOTH, "attention.dropout_p=0", "model.n_kv_head=1", "model.context_length=256", "batch_size=1"]
RING += ["tokens_per_step=512", "steps=20", "eval_every=20", "checkpoint_every=20"]
SHORT = ["length_warmup_steps=4", "length_warmup_from=64"]
SHARD, SELECTIVE = "parallel.shard=true", "model.activation_checkpointing=selective"
# name: (processes, whether in float64, arguments). A step has two passes of four sequences; in rings, of one.
LAYOUTS = {
    "one": (1, False, UNCLIPPED),
    "data2": (2, False, UNCLIPPED),  # a pass each
    "context2": (2, False, [*UNCLIPPED, "parallel.context=2"]),  # half of each sequence
    "shard2": (2, False, [*UNCLIPPED, SHARD]),  # a pass each, and half of the weights
    "wide_one": (1, True, WIDE),
    "wide_context2": (2, True, [*WIDE, "parallel.context=2"]),
    "wide_data4": (4, True, WIDE),  # a sequence of each pass
    "wide_context4": (4, True, [*WIDE, "parallel.context=4"]),
    "wide_both": (4, True, [*WIDE, "parallel.context=2"]),  # half of the sequences of one pass
    "wide_shard4": (4, True, [*WIDE, SHARD, SELECTIVE]),
    "wide_shard_both": (4, True, [*WIDE, SHARD, "parallel.context=2", "model.activation_checkpointing=true"]),
    "short_one": (1, True, SHORT),
    "short_data4": (4, True, SHORT),  # a sequence of each pass, cut in two
    "ring_one": (1, True, RING),
    "ring_2": (2, True, [*RING, "parallel.context=2"]),  # one key head: keys and values go round
    "ring_4": (4, True, [*RING, "parallel.context=4"]),
    "ring_both": (4, True, [*RING, "parallel.context=2", SHARD, SELECTIVE, "model.chunk=32"]),  # a pass for each two
    "wide_both_on_2": (2, True, ["resume=FROM/wide_both/checkpoints/step_000002", "parallel.context=1"]),
    "wide_shard4_on_1": (1, True, ["resume=FROM/wide_shard4/checkpoints/step_000002", "parallel.shard=false"]),
    "wide_shard4_on_2": (2, True, ["resume=FROM/wide_shard4/checkpoints/step_000002"]),
    "wide_shard4_again": (4, True, ["resume=FROM/wide_shard4/checkpoints/step_000002"]),
}
QUICK = ["one", "data2", "wide_one", "wide_context2"]
LATER = [name for name in LAYOUTS if name not in (*QUICK, "shard2", "context2", "short_one", "ring_one")]


def run_all(names: Iterable[str], small: list[str], runs: Path, layouts: dict = LAYOUTS) -> Path:
    """Runs those of the layouts into the folder `runs`. What each process has printed is in NAME.out.RANK there."""
    jobs = []
    for name in names:
        ranks, wide, more = layouts[name]
        arguments = [*small, *STEPS, *SHAPE, *DROPOUT, f"runs={runs}", f"name={name}"]
        arguments += [argument.replace("FROM", str(runs)) for argument in more]
        jobs.append({"ranks": ranks, "arguments": arguments, "float64": wide, "out": str(runs / f"{name}.out")})
    command, text = [sys.executable, "-m", "tests.ranks"], json.dumps(jobs)
    done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    for job, found in zip(jobs, codes, strict=True):
        assert found == [0] * job["ranks"], Path(f"{job['out']}.0").read_text() + done.stderr
    return runs


@pytest.fixture(scope="module")
def layouts(small, tmp_path_factory):
    return run_all(QUICK, small, tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def shard2(layouts, small):
    """Not together with the others: where ranks do not do the same, shared weights wait for ever."""
    return run_all(["shard2"], small, layouts)


@pytest.fixture(scope="module")
def wide_layouts(small, tmp_path_factory):
    return run_all(["wide_one", "ring_one", "short_one", *LATER], small, tmp_path_factory.mktemp("wide_layouts"))


def losses(run: Path, key: str = "loss") -> dict[int, float]:
    return {record["step"]: record[key] for record in read_metrics(run / "metrics.jsonl") if key in record}


def tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step_{last_step(run):06}"
    files = [folder / "model.safetensors", folder / "optimizer.safetensors"]
    return {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("name", ["data2", "shard2"])
def test_two_processes_with_a_pass_each_are_one_process_bit_for_bit(name, layouts, request):
    """A sum of two gradients has one order. Without clipping only the norm is summed in parts, of shared weights."""
    if name == "shard2":
        request.getfixturevalue("shard2")
    for key in ("loss", "bits_per_byte", "val_loss", "val_bits_per_byte"):
        assert losses(layouts / "one", key) == losses(layouts / name, key)
    norms = [[*losses(layouts / run, "grad_norm").values()] for run in ("one", name)]
    torch.testing.assert_close(*norms, rtol=0 if name == "data2" else 2**-21, atol=0)
    one, two = tensors(layouts / "one"), tensors(layouts / name)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert (layouts / name / "samples.txt").read_bytes() == (layouts / "one" / "samples.txt").read_bytes() != b""


def test_only_the_first_process_prints_and_writes(layouts):
    said = (layouts / "data2.out.0").read_text()
    assert "step     4/4" in said
    assert (layouts / "data2.out.1").read_text().strip().startswith('{"sent": [{')  # what tests/ranks.py adds
    assert [record["step"] for record in read_metrics(layouts / "data2" / "metrics.jsonl")] == [1, 2, 3, 4, 4]
    assert "ranks 2" in said
    half, whole = map(int, re.search(r"takes (\d+) of a step's (\d+) sequences", said).groups())
    assert whole == 2 * half
    assert "torchrun --nproc-per-node 2 train.py resume=auto name=data2" in said


def counted(out: Path) -> dict:
    """What tests/ranks.py adds to the text of a process."""
    return json.loads(out.read_text().splitlines()[-1])


SENT = ["data2", "wide_context2"]
SENT += [pytest.param(name, marks=pytest.mark.slow) for name in ("wide_context4", "wide_both", "ring_2", "ring_4")]


@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_what_the_formula_says(name, request):
    """All that is given to the collectives, counted in every process."""
    runs = request.getfixturevalue("layouts" if name in QUICK else "wide_layouts")
    size, wide, more = LAYOUTS[name]
    N, width = next((int(key[-1]) for key in more if key.startswith("parallel.context=")), 1), 8 if wide else 4
    ring = name.startswith("ring")
    with torch.device("meta"):
        position = "rope" if wide else "learned"
        config = GPTConfig(2, 4, 1 if ring else 4, 32, 128, 257, 64, position, qk_norm=wide)
        model = GPT(config, AttentionConfig("naive"))
    ranks = Ranks(size=size, part=Part(ranks=N, ring=ring))
    gradients, exchanged = bytes_sent(ranks, model, 512 if ring else 1024, width, 1)
    for rank in range(size):
        counts = counted(runs / f"{name}.out.{rank}")["sent"]
        assert counts[0].pop("allreduce") * 2 * (size - 1) // size == gradients * width // 4
        given = sum(counts[0].values())  # of which an exchange keeps a share, and a ring nothing
        assert (given if ring else given * (N - 1) // N) == exchanged
        assert all(count.pop("allreduce", 0) >= 0 and count == counts[0] for count in counts)


def test_a_step_of_shared_weights_sends_them_twice_and_the_gradients_once(layouts, shard2):
    """Two blocks and the rest of the model have a message each: the weights of one block are together at a time. And a
    process has its part of the weights and of the optimizer's state alone."""
    with torch.device("meta"):
        model = GPT(GPTConfig(2, 4, None, 32, 128, 257, 64), AttentionConfig("naive"))
    sent, _ = bytes_sent(Ranks(size=2, shards=2), model, 1024, 4, 1)
    whole = counted(layouts / "one.out.0")["held"]
    for rank in range(2):
        found = counted(layouts / f"shard2.out.{rank}")
        assert found["calls"] == {"allgather_base": 2 * 3, "reduce_scatter_base": 3, "allreduce": 2}
        for count in found["sent"]:
            assert (count["allgather_base"] + count["reduce_scatter_base"]) // 2 == sent
            assert count["allgather_base"] == 2 * count["reduce_scatter_base"]
            assert count["allreduce"] == 8  # loss and norm
        assert 0.5 * whole <= found["held"] < 0.51 * whole  # and the counts of steps


@pytest.mark.parametrize("name", ["wide_context2", *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
def test_every_layout_makes_the_same_run(name, request):
    """With dropout, windows, documents, an average and clipping. In float64, where another order of sums is far below
    what a wrong mask, position or sum would make. A loss is recorded in float32, from a sum of shares. N processes that
    share the weights round N times (once in all for their shares, and N - 1 sums), one process twice, for 2 passes."""
    runs = request.getfixturevalue("layouts" if name in QUICK else "wide_layouts")
    one, shares = f"{name.partition('_')[0]}_one", "wide_shard" in name
    for key in ("loss", "val_loss")[: 1 if shares else 2]:
        right, found = losses(runs / one, key), losses(runs / name, key)
        assert [*found] == [step for step in right if step > 2 or not name.endswith(("_1", "on_2", "again"))]
        roundings = LAYOUTS[name][0] + 2 if shares else 2
        torch.testing.assert_close([*found.values()], [right[step] for step in found], rtol=roundings * 2**-24, atol=0)
    right, found = tensors(runs / one), tensors(runs / name)
    assert right.keys() == found.keys()
    for weight, x in right.items():
        if shares:  # within 512 units in the last place of the largest number
            assert (found[weight].double() - x.double()).abs().max() <= 512 * 2**-52 * x.abs().max(), weight
        else:
            torch.testing.assert_close(found[weight], x, rtol=1e-9, atol=1e-12, msg=f"{name}: {weight}")


@pytest.mark.slow
def test_a_resumed_run_of_shared_weights_is_the_same_run_bit_for_bit(wide_layouts):
    right, found = (tensors(wide_layouts / name) for name in ("wide_shard4", "wide_shard4_again"))
    assert all(torch.equal(found[name], right[name]) for name in right)
    whole = counted(wide_layouts / "wide_one.out.0")["held"]
    assert all(counted(wide_layouts / f"wide_shard4_again.out.{rank}")["held"] < 0.26 * whole for rank in range(4))


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_parts_are_put_together_on_the_first_rank(rows, monkeypatch):
    """Of five rows, four ranks have 2, 2, 1 and none."""
    whole, sent, has = torch.randn(rows, 3), {}, {}
    parts = [*whole.chunk(4), *[whole[:0]] * 4][:4]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: has["rank"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "send", lambda x, to, group: sent.update({(has["rank"], to): x}))
    monkeypatch.setattr(torch.distributed, "recv", lambda x, rank, group: x.copy_(sent.pop((rank, 0))))
    for rank in (3, 2, 1, 0):
        has["rank"] = rank
        found = gathered(parts[rank], whole.shape, "threads")
    assert torch.equal(found, whole)
    assert not sent


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_has_the_weights_and_draws_no_random_numbers(tied):
    model = GPT(GPTConfig(1, 2, n_embd=16, context_length=8, vocab_size=11, tie_head=tied), AttentionConfig("naive"))
    before = torch.get_rng_state()
    copy = copy_of(model, torch.float64)
    assert torch.equal(before, torch.get_rng_state())
    assert (copy.head.weight is copy.embedding.weight) == tied
    idx = torch.arange(8)[None]
    assert torch.equal(copy(idx), model.double()(idx))
    assert {p.data_ptr() for p in copy.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_shared_weights_take_a_part_of_the_memory():
    """gpt2-xl: 1.56 G parameters of 16 bytes, and what is together for a while."""
    xl = GPTConfig(48, 25, n_embd=1600, context_length=1024, vocab_size=50304, activation_checkpointing="true")
    one, two, eight = (bytes_of(xl, AttentionConfig("sdpa"), 1, "bf16", False, shards=n) / GIB for n in (1, 2, 8))
    assert 10 < one - two < 12
    assert 8 < two - eight < 9


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are wanted")
def test_two_gpus_are_one(small, tmp_path):
    """Recorded steps, in bf16. The first loss is that of one GPU, bit for bit if each has a pass. A GPU adds up the
    gradient of the embedding in no fixed order, so that two runs on one differ later, too."""
    names = ("one", "data2", "context2", "shard2")
    layouts = {name: (*LAYOUTS[name][:2], [*LAYOUTS[name][2], "steps=12"]) for name in names}
    runs = run_all(layouts, [*small[:-1], "device=cuda"], tmp_path, layouts)
    assert "step: recorded" in (runs / "data2.out.0").read_text()
    assert "step: compiled (parallel.shard=true" in (runs / "shard2.out.0").read_text()
    right = losses(runs / "one")
    assert right[1] == losses(runs / "data2")[1]
    for name in layouts:
        torch.testing.assert_close([*losses(runs / name).values()], [*right.values()], rtol=2**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are wanted")
def test_keys_that_go_round_two_gpus_are_those_of_one(small, tmp_path):
    """With windows, documents and the stream's dropout, in float32."""
    layouts = {"one": (1, False, RING), "ring": (2, False, [*RING, "parallel.context=2"])}
    runs = run_all(layouts, [*small[:-1], "device=cuda", "dtype=float32"], tmp_path, layouts)
    assert "attention: triton" in (runs / "ring.out.0").read_text()
    for key in ("loss", "val_loss", "grad_norm"):
        right, found = losses(runs / "one", key), losses(runs / "ring", key)
        torch.testing.assert_close([*found.values()], [*right.values()], rtol=2**-14, atol=0)


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "tiled", pytest.param("triton", marks=INTERPRETED)])
def test_attention_of_a_part_is_that_part_of_attention(impl):
    """Some sequences, or some heads, with the dropout and the slopes that they have in the whole batch."""
    q, k, v = torch.randn(3, 4, 4, 40, 16).unbind()
    config, seed = AttentionConfig(impl, alibi=True, dropout_p=0.3), torch.tensor(7)
    whole = attention(q, k, v, config, seed=seed)
    rows, heads = slice(2, 4), slice(2, 4)
    numbers = Part(share=1, shares=2).numbers(2, 4, q.device)
    some = attention(q[rows], k[rows], v[rows], config, seed=seed, numbers=numbers)
    assert torch.equal(some, whole[rows])
    q, k, v = (x[:, heads] for x in (q, k, v))
    part = Part(rank=1, ranks=2)
    given = {"numbers": part.numbers(4, 2, q.device), "slopes": part.slopes(2, q.device)}
    some = attention(q, k, v, config, seed=seed, **given)
    assert torch.equal(some, whole[:, heads])


# --- mistakes -------------------------------------------------------------------------------------------------------


THREE = "parallel.context=3"
REFUSED = [  # processes, arguments, what the line names
    (3, "", "batch_size=4"),
    (3, "tokens_per_step=256", "batch_size=4"),
    (1, "parallel.context=2", "parallel.context=2"),
    (3, "parallel.context=2", "parallel.context=2"),
    (2, "parallel.context=2", "into 2 parts"),
    (3, THREE, "into 6 parts"),
    (3, f"{THREE} attention=sdpa", "attention=sdpa"),
    (3, f"{THREE} attention.dropout_p=0.1", "attention.dropout_p=0.1"),
    (3, f"{THREE} attention.block_mask=[x.,xx]", "attention.block_mask="),
    (2, "parallel.context=2 model.context_length=64 length_warmup_steps=1 length_warmup_from=32", "_from=32"),
    (1, SHARD, SHARD),
    (2, f"{SHARD} optimizer=muon", "Muon"),
    (2, f"{SHARD} dtype=fp16", "dtype=fp16"),
    (2, f"{SHARD} context_every=1", "context_every=1"),
    (2, "probe.every=1", "probe.every=1"),
    (2, "break_it=no_max", "break_it=no_max"),
    (2, "attention=sdpa attention.dropout_p=0.1", "attention=sdpa"),
    (2, "device=cuda:1", "device=cuda:1"),
    (2, "-m seed=1,2", "-m"),
    (2, "data=text data.path=-", "data.path=-"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "typed", "named"), REFUSED)
def test_what_processes_cannot_share_is_refused_in_one_line(size, typed, named, call, small, tmp_path, monkeypatch):
    if size > 1:
        launch(monkeypatch, size)
    ended = call(train, *small, "tokens_per_step=null", f"runs={tmp_path}", "steps=1", *typed.split())
    assert ended.code == 2
    assert named in ended.err
    assert ended.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def launch(monkeypatch, size: int) -> None:
    """As if torchrun had started this process as the first of `size`. It joins no others."""
    environment = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": 0, "LOCAL_RANK": 0}
    environment |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RESTART_COUNT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "name_this_start", lambda *_: "")
    monkeypatch.setattr(processes.dist, "rendezvous", lambda url: iter([(None, 0, size)]))
    for name in ("PrefixStore", "init_process_group", "destroy_process_group"):
        monkeypatch.setattr(processes.dist, name, lambda *_, **__: None)


def test_a_run_that_torchrun_may_start_again_needs_a_name(call, small, tmp_path, monkeypatch):
    launch(monkeypatch, 1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    ended = call(train, *small, f"runs={tmp_path}", "steps=1")
    assert ended.err.startswith("train: torchrun --max-restarts")


def test_a_restart_goes_on_with_its_own_run_only(call, small, tmp_path, monkeypatch):
    """The first start refuses a name that another run has. The next must not resume that run instead."""
    arguments = [*small, "name=other", f"runs={tmp_path / 'runs'}", "checkpoint_every=1"]
    assert call(train, *arguments, "steps=1").code == 0
    launch(monkeypatch, 1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for start in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"attempt_{start}" / "0" / "error.json"))
        assert "exists already" in call(train, *arguments, "steps=2", "optimizer.lr=0.1").err
    assert call(train, *arguments, "steps=2", "resume=auto").code == 0
    assert call(train, *arguments, "steps=3").code == 0  # as torchrun starts this one again


@pytest.mark.parametrize("script", [sample, bench])
def test_other_scripts_are_one_process(script, call, monkeypatch):
    launch(monkeypatch, 2)
    ended = call(script)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"python {script.__name__}.py" in ended.err


def test_ranks_agree_on_any_signal_the_most_time_and_the_sum_of_their_texts(monkeypatch):
    def all_gather(every, mine):
        every[0].copy_(mine)
        every[1].copy_(torch.tensor([15.0, 3.0, 20.0, 1.5]))

    monkeypatch.setattr(processes.dist, "all_gather", all_gather)
    assert Ranks(size=2).agree([], 5.0, 10, 0.5) == ([15], 5.0, 30, 1.5)


def test_a_rank_that_loses_another_says_so_in_one_line(monkeypatch):
    """gloo raises a plain RuntimeError. One of the step's own keeps its traceback."""
    launch(monkeypatch, 2)
    with pytest.raises(ValueError, match="rank 0"), join(train.Config()):
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match="a bug"), join(train.Config()):
        raise RuntimeError("a bug")


def test_a_model_is_measured_by_one_process(monkeypatch):
    launch(monkeypatch, 2)
    with pytest.raises(ValueError, match="eval_only=true"):
        train.main(train.Config(eval_only=True, resume="a run"))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_with_other_data_are_refused_by_all(rank, monkeypatch):
    """The first one says so, and ends the others before they do."""
    texts = [{"text": text} for text in ("a1", "a1", "b2")]

    def all_gather_object(every, mine):
        assert mine == texts[rank]
        every[:] = texts

    monkeypatch.setattr(processes.dist, "all_gather_object", all_gather_object)
    with pytest.raises(ValueError, match="rank 2 has text b2, rank 0 has a1"):
        Ranks(rank, 3).refuse_difference(**texts[rank])


# --- torchrun -------------------------------------------------------------------------------------------------------


TWO = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]


def torchrun(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def workers(agent: subprocess.Popen) -> list[int]:
    """The processes that torchrun has started, by rank."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def last_step(run: Path) -> int:
    """The last one that was saved."""
    return max(int(folder.name[-6:]) for folder in (run / "checkpoints").glob("step_*"))


def wait_for(path: Path, agent: subprocess.Popen) -> None:
    until = time.monotonic() + HANGS
    while not path.exists():
        assert agent.poll() is None, agent.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_steps_of_two_processes_are_timed_beside_those_of_one(tmp_path):
    cases = {"laptop": 512, "laptop-context": 256, "laptop-ring": 512}  # tokens of a step
    said = torchrun(*TWO, "-m", "lab.ranks", *cases, f"--out={tmp_path}").communicate(timeout=HANGS)[0]
    assert (tmp_path / "ranks.csv").exists(), said
    rows = table_of(tmp_path / "ranks.csv")
    layouts = [tuple(int(row[key]) for key in ("ranks", "context", "passes")) for row in rows]
    assert layouts == [(2, 1, 1), (1, 1, 2), (1, 1, 1), *[(2, 2, 1), (1, 1, 1)] * 2]
    for both, one in ((rows[0], rows[1]), (rows[3], rows[4]), (rows[5], rows[6])):
        for row in (both, one):
            assert int(row["tokens_per_s"]) == pytest.approx(cases[row["case"]] / float(row["ms"]) * 1e3, rel=1e-3)
        assert float(both["linear"]) == pytest.approx(float(one["ms"]) / 2 / float(both["ms"]), abs=1e-3)
    assert float(rows[0]["own"]) == pytest.approx(float(rows[2]["ms"]) / float(rows[0]["ms"]), abs=1e-3)
    with torch.device("meta"):
        model = GPT(CASES["laptop-ring"].model, AttentionConfig("naive"))
    sent = bytes_sent(Ranks(size=2, part=Part(ranks=2, ring=True)), model, 512, 4, 1)
    assert float(rows[5]["sent_mb"]) == pytest.approx(sum(sent) / 1e6, abs=1e-3)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_goes_on(small, tmp_path):
    """kill -9 in the middle. torchrun starts all again, and they resume: the losses are those of a run without."""
    arguments = [*small, *SHAPE, *DROPOUT, "steps=40", "eval_every=40", "checkpoint_every=5", f"runs={tmp_path}", SHARD]
    agent = torchrun(*TWO, "--max-restarts=1", "train.py", *arguments, "name=killed")
    wait_for(tmp_path / "killed" / "checkpoints" / "step_000005", agent)
    os.kill(workers(agent)[1], signal.SIGKILL)
    said, _ = agent.communicate(timeout=HANGS)
    assert agent.returncode == 0, said
    assert "exitcode: -9) local_rank: 1" in said
    assert len(re.findall("resumed from .*step_0000", said)) == 1
    assert torchrun(*TWO, "train.py", *arguments, "name=whole").wait(HANGS) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    right, found = tensors(tmp_path / "whole"), tensors(tmp_path / "killed")
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.slow
def test_two_agents_are_two_machines(small, tmp_path):
    """The launch line of docs/parallel.md for several machines, on one. A process is killed: the other machine's start
    again too. Then both get a signal, and save at one step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*small, *SHAPE, "steps=100000", "checkpoint_every=20", f"runs={tmp_path}", "name=two"]
    agents = [
        torchrun(
            "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--rdzv-backend=c10d", "--rdzv-id=7",
            f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--max-restarts=1", "train.py", *arguments,
        )
        for node in range(2)
    ]  # fmt: skip
    wait_for(tmp_path / "two" / "checkpoints" / "step_000020", agents[0])
    os.kill(workers(agents[1])[0], signal.SIGKILL)
    wait_for(tmp_path / "two" / "checkpoints" / f"step_{last_step(tmp_path / 'two') + 40:06}", agents[0])
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    said = [agent.communicate(timeout=HANGS)[0] for agent in agents]
    last = max(losses(tmp_path / "two"))
    assert any("resumed from" in one and f"stopped at step {last}, saved" in one for one in said), said
    assert (tmp_path / "two" / "checkpoints" / f"step_{last:06}").is_dir()


@pytest.fixture
def alone_with_a_part(monkeypatch):
    """A model, and tokens of the second half of a sequence. Nothing is exchanged with the process of the first half."""
    for exchange in ("to_heads", "to_tokens"):
        monkeypatch.setattr(part_module, exchange, lambda x, part: x)
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, context_length=8, vocab_size=16, position="learned")
    net, idx = GPT(config, AttentionConfig("naive")), torch.randint(16, (1, 4))
    return net, idx, Ranks(size=2, part=Part(rank=1, ranks=2)).setting(idx)


def test_heads_that_were_exchanged_do_not_come_with_those_before(alone_with_a_part, monkeypatch):
    """From qkv attention() would compute the heads of before."""
    net, idx, setting = alone_with_a_part
    seen, whole = [], gpt_module.attention

    def attention(*inputs, qkv, **options):
        seen.append(qkv)
        return whole(*inputs, qkv=qkv, **options)

    for module in (gpt_module, part_module):
        monkeypatch.setattr(module, "attention", attention)
    net.hidden(idx)
    net.hidden(idx, setting=setting)
    assert [qkv is None for qkv in seen] == [False, True]


def test_a_model_in_parts_counts_the_tokens_of_a_part_as_the_whole_model_does(alone_with_a_part):
    net, idx, setting = alone_with_a_part
    in_parts = compiled(net, lambda function: function)
    assert in_parts(idx, idx, setting=setting) == net(idx, idx, setting=setting) != net(idx, idx)
