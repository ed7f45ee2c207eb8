"""The instruments: gauges against their definitions, and planted faults found where they were planted."""

import math
import re
import resource
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import safetensors.torch
import torch

import breakit
import train
from model.attention import AttentionConfig, attention
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from tests.reference import FLAT_ROWS, Case, assert_flat_row, assert_float64_right, flat_row, oracle, sees
from tests.test_contents import forge_tensor
from training import checkpoint
from training.metrics import read_metrics
from training.probe import Call, find, first_bad, gauges, reading, record

SIZE = GPTConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, context_length=64, vocab_size=50, dropout_p=0.0)
TILED = AttentionConfig("tiled", 16, 16)
NAIVE = AttentionConfig("naive", 16, 16)
UNBROKEN = BreakIt()
LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72
TRITON_HERE = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="wants the interpreter; test_gpu.py has a GPU's"
)


def model_and_batch(config: AttentionConfig = TILED, break_it: BreakIt = UNBROKEN, **size):
    torch.manual_seed(0)
    idx = torch.randint(50, (2, 65))
    return RecomputingGPT(replace(SIZE, **size), config, break_it), idx[:, :-1], idx[:, 1:]


def call_of(inputs: dict, config: AttentionConfig = TILED, break_it: BreakIt = UNBROKEN) -> Call:
    q, k, v = (inputs[name] for name in "qkv")
    return Call(0, q, k, v, attention(q, k, v, config, break_it=break_it), config, break_it, None, None)


# --- record ----------------------------------------------------------------------------------------------------------


def test_a_recorded_forward_and_backward_are_those_of_the_model():
    model, x, y = model_and_batch()
    calls = record(model, x, y)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert all(torch.equal(call.o, attention(call.q, call.k, call.v, TILED)) for call in calls)
    q = calls[1].q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, calls[1].k, calls[1].v, TILED), q, calls[1].do)
    assert torch.equal(dq, calls[1].dq)


def test_recording_leaves_the_parameters_gradients_alone():
    model, x, y = model_and_batch()
    record(model, x, y)
    assert all(p.grad is None for p in model.parameters())


def test_a_block_that_is_computed_again_is_recorded_once():
    model, x, y = model_and_batch(activation_checkpointing=True)
    assert len(record(model, x, y)) == SIZE.n_layer


# --- gauges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TILED, NAIVE, replace(TILED, window=20, alibi=True, softcap=2.0)], ids=str)
def test_gauges_are_what_they_are_said_to_be(config):
    case = Case(70, 90, H=4, H_kv=2, window=config.window, alibi=config.alibi, softcap=config.softcap)
    inputs = case.inputs(torch.float32)
    found = gauges(call_of(inputs, config))
    double = {name: x.double() for name, x in inputs.items()}
    q, k = double["q"], double["k"].repeat_interleave(2, dim=1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if config.softcap:
        s = config.softcap * torch.tanh(s / config.softcap)
        far = (torch.arange(70)[:, None] + 20 - torch.arange(90)).abs()
        s = s - torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None] * far
    s = s.masked_fill(~torch.tensor([[sees(i, j, case) for j in range(90)] for i in range(70)]), -math.inf)
    p = s.softmax(-1)
    right = oracle(inputs, case)["o"]
    expected = {
        "max_score": s.max(),
        "headroom": LIMIT - (s.logsumexp(-1) + right.abs().amax(-1).clamp(min=1).log()).max(),
        "max_weight": p.max(),
        "min_l": (s - s.amax(-1, keepdim=True)).exp().sum(-1).min(),
        "error": (call_of(inputs, config).o.double() - right).norm() / right.norm(),
        "entropy": -torch.special.xlogy(p, p).sum(-1).mean((0, 2)),
    }
    in_tensors = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in found._asdict().items()}
    assert_float64_right(in_tensors, expected, terms=90)


def test_the_headroom_of_fp16_ends_at_11():
    call = call_of(Case(20).inputs(torch.float16))
    found = gauges(call)
    assert math.isclose(found.headroom + found.max_score, math.log(65504))


@pytest.mark.parametrize(("keys", "score", "v", "naive", "tiled"), FLAT_ROWS)
def test_the_headroom_ends_where_the_first_implementation_fails_without_the_maximum(keys, score, v, naive, tiled):
    """It was counted from the largest score, and ended only where one weight overflows."""
    inputs, headrooms = flat_row(keys, score, v), set()
    for config in (NAIVE, TILED):
        call = call_of(inputs, replace(config, softmax_scale=1.0), BreakIt("no_max"))
        headrooms.add(gauges(call).headroom)
    assert len(headrooms) == 1
    assert (headrooms.pop() > 0) == (naive == tiled == v)


@pytest.mark.parametrize("impl", ["naive", "tiled", pytest.param("triton", marks=TRITON_HERE)])
@pytest.mark.parametrize(("keys", "score", "v", "naive", "tiled"), FLAT_ROWS)
@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of Triton's interpreter
def test_without_the_maximum_a_flat_row_overflows_as_its_sums_do(impl, keys, score, v, naive, tiled):
    assert_flat_row(impl, keys, score, v, naive if impl == "naive" else tiled)


def test_the_error_of_a_broken_call_is_that_against_the_whole_algorithm():
    case = Case(64, sigma=3.0)
    call = call_of(case.inputs(torch.float32), TILED, BreakIt("no_rescale_output"))
    right = oracle(case.inputs(torch.float32), case)["o"]
    expected = (call.o.double() - right).norm() / right.norm()
    found = torch.tensor(gauges(call).error, dtype=torch.float64)
    assert_float64_right({"error": found}, {"error": expected}, terms=64)
    assert expected > 0.1


def test_the_smallest_l_of_a_maximum_that_starts_at_zero_underflows_with_the_scores():
    inputs = Case(30).inputs(torch.float32)
    inputs["q"][..., 0], inputs["k"][..., 0] = 40.0, -40.0
    assert gauges(call_of(inputs)).min_l >= 1
    assert gauges(call_of(inputs, TILED, BreakIt("zero_init_max"))).min_l < 1e-100


def test_a_layer_of_nan_is_not_hidden_by_the_sound_ones_before_it():
    model, x, _ = model_and_batch()
    plant(model, 2, 0, 0, 0, math.nan)
    found = reading(record(model, x))
    for name in ("max_score", "headroom", "max_weight", "min_l", "attention_error"):
        assert math.isnan(found[name]), name


# --- the search ------------------------------------------------------------------------------------------------------


def plant(model: GPT, layer: int, sequence: int, key_head: int, token: int, value: float) -> None:
    """One number of one key, as it comes out of the projection of q (32 wide), k (2 heads of 8) and v."""

    def spoil(module, inputs, out):
        out = out.clone()
        out[sequence, token, 32 + key_head * 8 + 3] = value
        return out

    model.blocks[layer].attention.qkv.register_forward_hook(spoil)


def test_rows_that_visit_no_key_are_named_without_a_key_tile():
    """Four keys for eight rows, without guards: the first rows have o = 0 / 0, and no tile of keys was computed."""
    q, k = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 4, 4)
    config, broken = AttentionConfig("tiled", 2, 2), BreakIt("unguarded_mask")
    call = Call(0, q, k, k, attention(q, k, k, config, break_it=broken), config, broken, None, None)
    found = find([call])
    assert (found.query_tile, found.key_tile, found.columns) == (0, None, None)
    assert "no key tile by itself" in str(found)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("config", [TILED, NAIVE, AttentionConfig("triton", 16, 16)], ids=lambda config: config.impl)
@pytest.mark.parametrize(("layer", "sequence", "key_head", "token"), [(1, 0, 1, 40), (0, 1, 0, 0), (2, 1, 1, 63)])
def test_one_nan_in_one_key_is_named(config, layer, sequence, key_head, token):
    if config.impl == "triton":
        pytest.importorskip("triton")
    model, x, _ = model_and_batch(config)
    plant(model, layer, sequence, key_head, token, math.nan)
    found = find(record(model, x))
    assert (found.layer, found.batch, found.head) == (layer, sequence, 2 * key_head)
    assert (found.query_tile, found.key_tile) == (token // 16, token // 16)
    assert found.what == "k (input values) are"


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_one_huge_score_is_named(impl):
    """Without the maximum: key 21 of head 3 meets row 50 with a score of 100, and no other pair comes near."""
    inputs = Case(64, H=4, H_kv=4).inputs(torch.float32)
    q, k = inputs["q"], inputs["k"]
    q[1, 3, 50], k[1, 3, 21] = 0.0, 0.0
    q[1, 3, :, 0], k[1, 3, :, 0] = 0.0, 0.0
    q[1, 3, 50, 0], k[1, 3, 21, 0] = 10.0, 10.0 * 32**0.5
    found = find([call_of(inputs, AttentionConfig(impl, 16, 16), BreakIt("no_max"))])
    assert (found.batch, found.head, found.query_tile, found.key_tile) == (1, 3, 3, 1)
    assert found.what == "l, the sum of weights, is"


def test_a_score_beyond_float32_is_named_in_attention_as_it_should_be():
    inputs = Case(64, H=2, H_kv=2).inputs(torch.bfloat16)
    inputs["q"][0, 1, 40], inputs["k"][0, 1, 20] = 1e19, 1e19  # 32 products of 1e38
    found = find([call_of(inputs)])
    assert (found.batch, found.head, found.query_tile, found.key_tile) == (0, 1, 2, 1)
    assert found.what == "scores are"


def test_a_fault_that_tiled_would_not_have_is_placed_by_its_row():
    """naive multiplies hidden weights of 0 by infinite values, of keys that no row sees and tiled never visits."""
    inputs = Case(16, 64, B=1, H=2, H_kv=2, window=8).inputs(torch.float32)
    inputs["v"][0, 1, 5] = math.inf
    found = find([call_of(inputs, replace(NAIVE, window=8))])
    assert (found.head, found.query_tile, found.key_tile, found.what) == (1, 0, None, "v (input values) are")
    assert "no key tile by itself" in str(found)


def test_a_row_that_saw_nothing_is_named_where_nothing_guards_it():
    call = call_of(Case(40, 24, B=1).inputs(torch.float32), NAIVE, BreakIt("unguarded_mask"))
    assert (find([call]).query_tile, find([call]).head) == (0, 0)


def with_gradients(inputs: dict, config: AttentionConfig = TILED) -> Call:
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    o = attention(q, k, v, config)
    call = call_of({name: x.detach() for name, x in inputs.items()}, config)
    call.do, (call.dq, call.dk, call.dv) = inputs["do"], torch.autograd.grad(o, (q, k, v), inputs["do"])
    return call


def test_a_gradient_that_overflows_is_named():
    """do and v are finite, their product is not: in row 35 of head 1, for keys 16 to 31, which hardly weigh there."""
    inputs = Case(64, B=1, H=2, H_kv=2).inputs(torch.float32)
    inputs["q"][0, 1, 35, 0], inputs["k"][0, 1, :, 0], inputs["k"][0, 1, 16:32, 0] = 20.0, 0.0, -28.0
    inputs["v"][0, 1, 16:32], inputs["do"][0, 1, 35] = 1e5, 1e35
    found = find([with_gradients(inputs)])
    assert (found.head, found.query_tile, found.key_tile, found.what) == (1, 2, 1, "ds is")


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_a_sum_of_gradients_that_overflows_is_named_where_it_does(impl):
    """Every tile's part of dv is finite, and so are ds, dq and dk; key 5 of head 1 gets 1.5e38 from each tile of rows
    but the first, which gives it less."""
    inputs = Case(64, B=1, H=2, H_kv=2).inputs(torch.float32)
    inputs["v"].zero_()
    inputs["q"][0, 1, :, 0], inputs["k"][0, 1, :, 0], inputs["k"][0, 1, 5, 0] = 20.0, 0.0, 28.0
    inputs["do"][0, 1] = 1.5e38 / 16
    found = find([with_gradients(inputs, AttentionConfig(impl, 16, 16))])
    assert (found.head, found.query_tile, found.key_tile, found.what) == (1, 2, 0, "dv is")


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_the_gradient_of_queries_that_overflows_is_named(impl):
    """In row 40 of head 1: its ds is about 1e20, and so are the keys from 20 on."""
    inputs = Case(64, B=1, H=2, H_kv=2).inputs(torch.float32)
    inputs["q"].zero_()
    inputs["k"][0, 1, 20:, 0] = 1e20
    inputs["do"].zero_()[0, 1, 40] = 1e20
    found = find([with_gradients(inputs, AttentionConfig(impl, 16, 16))])
    assert (found.head, found.query_tile, found.key_tile, found.what) == (1, 2, 1, "dq is")


def test_a_sound_model_has_no_place():
    model, x, y = model_and_batch()
    calls = record(model, x, y)
    assert find(calls) is None
    assert all(first_bad(call) is None for call in calls)


def test_a_fault_above_attention_is_not_blamed_on_it():
    model, x, y = model_and_batch()
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    assert find(record(model, x, y)) is None


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed(call, small, tmp_path_factory):
    """The records of the same run, with dropout, without probing and with it."""
    runs = tmp_path_factory.mktemp("runs")
    for name, every in (("plain", 0), ("probed", 2)):
        words = [f"name={name}", f"runs={runs}", f"probe.every={every}", "steps=6", "attention.dropout_p=0.2"]
        assert call(train, *small, "model.dropout_p=0.1", *words).code == 0
    return [read_metrics(runs / name / "metrics.jsonl") for name in ("plain", "probed")]


def test_probing_changes_no_bit_of_the_run(probed):
    plain, watched = ([r["loss"] for r in records if "loss" in r] for records in probed)
    assert plain == watched


def test_the_gauges_are_in_the_metrics_of_every_second_step(probed):
    found = [r for r in probed[1] if "max_score" in r]
    assert [r["step"] for r in found] == [2, 4, 6]
    assert all(set(found[0]) == set(r) for r in found)
    assert {f"entropy.{layer}.{head}" for layer in range(2) for head in range(2)} < set(found[0])
    assert not any("max_score" in r for r in probed[0])


BAD = ["probe.every=100", "steps=3", "break_it=no_max", "break_it.score_gain=1e6", "name=bad"]


@pytest.fixture(scope="module")
def met_nan(call, small, tmp_path_factory):
    """How a run ended that met NaN, and what it kept."""
    runs = tmp_path_factory.mktemp("runs")
    ended = call(train, *small, *BAD, f"runs={runs}")
    (kept,) = runs.glob("*/faults/step_*")
    return ended, kept


def test_a_run_that_meets_nan_names_the_tile_and_keeps_the_batch(met_nan):
    ended, kept = met_nan
    assert ended.code == 1
    assert "probe: layer 0, head 0, query tile 0" in ended.out
    assert f"replay={kept}" in ended.out
    assert checkpoint.load(kept).optimizer()["batch.x"].shape == (4, 32)


@pytest.mark.parametrize(
    "why",
    [
        ["break_it=no_max", "break_it.score_gain=500", "optimizer.lr=1e-2", "attention=tiled"],
        ["optimizer.lr=1e38", "optimizer.warmup_steps=0", "dtype=bf16"],
    ],
)
def test_after_nan_at_most_four_lines_of_160_characters_say_where_and_what_to_do(call, small, tmp_path, why):
    ended = call(train, *small, *why, "probe.every=100", "steps=30", "checkpoint_every=1", f"runs={tmp_path}")
    assert ended.code == 1
    lines = [line.replace(str(tmp_path), "runs") for line in ended.out.splitlines()]
    said = lines[max(i for i, line in enumerate(lines) if " | " in line) + 1 :]
    assert len(said) <= 4
    assert max(map(len, said)) <= 160
    step = int(re.search(r"step (\d+): loss nan", "\n".join(said))[1])
    for part in (f"step_{step - 1:06d}", "try", "layer 0, head ", "query tile ", f"/faults/step_{step:06d}"):
        assert part in "\n".join(said)
    assert "python breakit.py replay=runs/" in said[-1]


def test_a_fault_that_was_kept_is_no_checkpoint_to_resume(met_nan, call, small, tmp_path):
    _, kept = met_nan
    ended = call(train, *small, f"runs={tmp_path}", f"resume={kept}")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        f"train: {kept} was saved at a NaN or infinity, without the state that training needs: look into it with "
        f"python breakit.py replay={kept}, or resume a checkpoint"
    ]


def test_the_first_fault_of_a_run_outlives_those_of_its_resumptions(call, small, tmp_path, monkeypatch):
    """Kept like checkpoints, it went when one came at an earlier step, and when its own step failed again."""
    here = [*small, "probe.every=100", f"runs={tmp_path}"]
    assert call(train, *here, "name=bad", "steps=4", "checkpoint_every=1", "keep_last=4").code == 0
    run, of_first = tmp_path / "bad", []
    for start, lr in ((4, 1e37), (1, 1e37), (4, 1e36), (2, 1e37), (3, 1e37)):  # NaN in the second step from there
        resume = [f"resume={run}/checkpoints/step_{start:06d}", "steps=9", "checkpoint_every=100", "keep_last=2"]
        assert call(train, *here, *resume, f"optimizer.lr={lr}").code == 1
        of_first.append((run / "faults/step_000006/model.safetensors").read_bytes())
    assert set(of_first) == {of_first[0]}
    assert [path.name for path in checkpoint.all_checkpoints(run / "faults")] == ["step_000006"]
    assert [path.name for path in checkpoint.all_checkpoints(run / "faults/later")] == ["step_000004", "step_000005"]


def test_a_fault_that_a_full_disk_refuses_is_named_and_said_to_be_lost(call, small, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the write past it fails as on a full disk
    try:
        ended = call(train, *small, *BAD, f"runs={tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ended.code == 1
    place, lost, _ = ended.out.splitlines()[-3:]
    assert "probe: layer 0, head 0, query tile 0" in place
    (faults,) = tmp_path.glob("*/faults")
    assert lost == (
        f"  batch not kept: {faults} cannot be written (File too large); "
        "make room and run it again: it stops here again"
    )
    assert list(faults.iterdir()) == []


@pytest.fixture(scope="module")
def fault(call, small, tmp_path_factory):
    """What a run with dropout said of the fault that ended it, and where it kept it."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["probe.every=100", "steps=3", "break_it=no_max", "break_it.score_gain=1e6", "attention.dropout_p=0.2"]
    ended = call(train, *small, *words, f"runs={runs}", "name=bad", "checkpoint_every=1")
    (kept,) = runs.glob("*/faults/step_*")
    return ended.out, kept


def test_a_replay_names_the_place_that_the_run_did(call, fault):
    said, kept = fault
    again = call(breakit, f"replay={kept}", "device=cpu")
    assert again.code == 0
    place = said.split("probe: ")[1].splitlines()[0]
    assert f"first: {place}" in again.out.splitlines()
    assert [line.split()[0] for line in again.out.splitlines()[2:4]] == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay=nowhere"], "there is no checkpoint nowhere"),
        (["replay=nowhere", "trace=true"], "choose one of them"),
        (["replay=nowhere", "steps=3"], "replay=PATH does not read it"),
    ],
)
def test_a_replay_of_nothing_is_refused_in_one_line(call, words, message):
    ended = call(breakit, *words)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert message in ended.err


@pytest.mark.parametrize(("name", "token"), [("batch.x", 2**40), ("batch.x", -1), ("batch.y", 2**40), ("batch.y", -2)])
def test_a_batch_of_what_is_no_token_is_refused(call, fault, tmp_path, name, token):
    kept = shutil.copytree(fault[1], tmp_path / fault[1].name)
    batch = safetensors.torch.load_file(kept / "optimizer.safetensors")[name]
    forge_tensor(kept, "optimizer.safetensors", name, torch.full_like(batch, token))
    ended = call(breakit, f"replay={kept}", "device=cpu")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert name in ended.err


def test_a_usual_checkpoint_is_no_fault(call, small, tmp_path):
    assert call(train, *small, "steps=1", f"runs={tmp_path}", "name=good").code == 0
    ended = call(breakit, f"replay={tmp_path}/good/checkpoints/step_000001")
    assert ended.code == 2
    assert "holds no batch: name a folder under runs/NAME/faults" in ended.err
    assert len(ended.err.splitlines()) == 1
