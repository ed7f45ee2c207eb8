"""The instruments: gauges against their definitions, and planted faults found where they were planted."""

import math
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import breakit
import train
from model import gpt
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, GPTConfig
from model.recompute import RecomputingGPT
from tests.reference import FLAT_ROWS, Case, assert_float64_right, flat_row, oracle, visible
from tests.runs import little_room, records
from tests.test_contents import forge_tensor
from training import checkpoint
from training.probe import LIMIT, Call, find, first_bad, gauges, reading, record

SIZE = GPTConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, context_length=64, vocab_size=50, dropout_p=0.0)
TILED, NAIVE = AttentionConfig("tiled", 16, 16), AttentionConfig("naive", 16, 16)


def model_and_batch(config: AttentionConfig = TILED, **size):
    torch.manual_seed(0)
    idx = torch.randint(50, (2, 65))
    return RecomputingGPT(replace(SIZE, **size), config, UNBROKEN), idx[:, :-1], idx[:, 1:]


def call_of(inputs: dict, config: AttentionConfig = TILED, broken: str = "none", gradients: bool = False) -> Call:
    q, k, v = (inputs[name].requires_grad_(gradients) for name in "qkv")
    o, parts = attention(q, k, v, config, break_it=BreakIt(broken)), ()
    if gradients:
        parts = inputs["do"], torch.autograd.grad(o, (q, k, v), inputs["do"])
    return Call(0, *(x.detach() for x in (q, k, v, o)), config, BreakIt(broken), None, None, *parts)


# --- record and gauges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["false", "true"])
def test_a_recorded_forward_and_backward_are_those_of_the_model(again):
    """A block that is computed again is recorded once, and the parameters' gradients are left alone."""
    model, x, y = model_and_batch(activation_checkpointing=again)
    calls = record(model, x, y)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert all(torch.equal(call.o, attention(call.q, call.k, call.v, TILED)) for call in calls)
    q = calls[1].q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, calls[1].k, calls[1].v, TILED), q, calls[1].do)
    assert torch.equal(dq, calls[1].gradients[0])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("config", [TILED, NAIVE, replace(TILED, window=20, alibi=True, softcap=2.0)], ids=str)
def test_gauges_are_what_they_are_said_to_be(config):
    case = Case(70, 90, H=4, H_kv=2, window=config.window, alibi=config.alibi, softcap=config.softcap)
    inputs = case.inputs(torch.float32)
    q, k = inputs["q"].double(), inputs["k"].double().repeat_interleave(2, dim=1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if config.softcap:
        far = (torch.arange(70)[:, None] + 20 - torch.arange(90)).abs()
        s = config.softcap * torch.tanh(s / config.softcap)
        s = s - torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None] * far
    s = s.masked_fill(~visible(case)[:, None], -math.inf)
    p, call, right = s.softmax(-1), call_of(inputs, config), oracle(inputs, case)["o"]
    expected = {
        "max_score": s.max(),
        "headroom": LIMIT - (s.logsumexp(-1) + right.abs().amax(-1).clamp(min=1).log()).max(),
        "max_weight": p.max(),
        "min_l": (s - s.amax(-1, keepdim=True)).exp().sum(-1).min(),
        "error": (call.o.double() - right).norm() / right.norm(),
        "entropy": -torch.special.xlogy(p, p).sum(-1).mean((0, 2)),
    }
    in_tensors = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in gauges(call)._asdict().items()}
    assert_float64_right(in_tensors, expected, terms=90)


def test_the_headroom_of_fp16_ends_at_11():
    found = gauges(call_of(Case(20).inputs(torch.float16)))
    assert math.isclose(found.headroom + found.max_score, math.log(65504))


@pytest.mark.parametrize(("keys", "score", "v", "naive", "tiled"), FLAT_ROWS)
def test_the_headroom_ends_where_the_first_implementation_fails_without_the_maximum(keys, score, v, naive, tiled):
    """It was counted from the largest score, and ended only where one weight overflows."""
    inputs, configs = flat_row(keys, score, v), [replace(config, softmax_scale=1.0) for config in (NAIVE, TILED)]
    (headroom,) = {gauges(call_of(inputs, config, "no_max")).headroom for config in configs}
    assert (headroom > 0) == (naive == tiled == v)


def test_the_error_and_the_smallest_l_of_a_broken_call_are_those_of_what_is_broken():
    case = Case(64, sigma=3.0)
    inputs = case.inputs(torch.float32)
    call, right = call_of(inputs, TILED, "no_rescale_output"), oracle(inputs, case)["o"]
    expected = (call.o.double() - right).norm() / right.norm()
    found = torch.tensor(gauges(call).error, dtype=torch.float64)
    assert_float64_right({"error": found}, {"error": expected}, terms=64)
    assert expected > 0.1
    inputs["q"][..., 0], inputs["k"][..., 0] = 40.0, -40.0
    assert gauges(call_of(inputs)).min_l >= 1
    assert gauges(call_of(inputs, TILED, "zero_init_max")).min_l < 1e-100


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


def huge_score(q, k, v, do):
    """Without the maximum: key 21 of head 3 meets row 50 with a score of 100, and no other pair comes near."""
    q[1, 3, 50], k[1, 3, 21] = 0.0, 0.0
    q[1, 3, :, 0], k[1, 3, :, 0] = 0.0, 0.0
    q[1, 3, 50, 0], k[1, 3, 21, 0] = 10.0, 10.0 * 32**0.5


def score_beyond_float32(q, k, v, do):
    q[0, 1, 40], k[0, 1, 20] = 1e19, 1e19  # 32 products of 1e38


def infinite_value(q, k, v, do):
    """naive multiplies hidden weights of 0 by infinite values, of keys that no row sees and tiled never visits."""
    v[0, 1, 5] = math.inf


def nothing(q, k, v, do):
    """Rows that see no key, where nothing guards them: no tile of keys was computed."""


def ds_overflows(q, k, v, do):
    """do and v are finite, their product is not: in row 35 of head 1, for keys 16 to 31, which hardly weigh there."""
    q[0, 1, 35, 0], k[0, 1, :, 0], k[0, 1, 16:32, 0] = 20.0, 0.0, -28.0
    v[0, 1, 16:32], do[0, 1, 35] = 1e5, 1e35


def dv_overflows(q, k, v, do):
    """Every tile's part of dv is finite, and so are ds, dq and dk; key 5 of head 1 gets 1.5e38 from each tile of rows
    but the first, which gives it less."""
    v.zero_()
    groups = q.shape[1] // k.shape[1]  # query heads that share a key head: those of key head 1
    q[0, groups : 2 * groups, :, 0], k[0, 1, :, 0], k[0, 1, 5, 0] = 20.0, 0.0, 28.0
    do[0, groups : 2 * groups] = 1.5e38 / 16 / groups


def dq_overflows(q, k, v, do):
    """In row 40 of head 1: its ds is about 1e20, and so are the keys from 20 on."""
    q.zero_()
    k[0, 1, 20:, 0] = 1e20
    do.zero_()[0, 1, 40] = 1e20


SMALL = Case(64, B=1, H=2, H_kv=2)
L_IS, V_IS = "l, the sum of weights, is", "v (input values) are"
PLANTED = [  # what, the case, the configurations, what is broken, and the place: sequence, head, tile of rows, of keys
    (huge_score, Case(64, H=4, H_kv=4), [TILED, NAIVE], "no_max", (1, 3, 3, 1), L_IS),
    (score_beyond_float32, Case(64), [TILED, NAIVE], "none", (0, 1, 2, 1), "scores are"),
    (infinite_value, Case(16, 64, B=1, window=8), [replace(NAIVE, window=8)], "none", (0, 1, 0, None), V_IS),
    (nothing, Case(8, 4, B=1, H=1), [replace(TILED, block_m=2, block_n=2)], "unguarded_mask", (0, 0, 0, None), None),
    (nothing, Case(40, 24, B=1), [NAIVE], "unguarded_mask", (0, 0, 0, None), None),
    (ds_overflows, SMALL, [TILED, NAIVE], "none", (0, 1, 2, 1), "ds is"),
    (dv_overflows, SMALL, [TILED, NAIVE], "none", (0, 1, 2, 0), "dv is"),
    (dv_overflows, replace(SMALL, H=4), [TILED], "none", (0, 2, 2, 0), "dv is"),
    (dq_overflows, SMALL, [TILED, NAIVE], "none", (0, 1, 2, 1), "dq is"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "case", "config", "broken", "place", "what"),
    [(*row[:2], config, *row[3:]) for row in PLANTED for config in row[2]],
    ids=[f"{row[0].__name__}-{config.impl}" for row in PLANTED for config in row[2]],
)
def test_what_overflows_is_named_where_it_does(spoil, case, config, broken, place, what):
    inputs = case.inputs(torch.float32)
    spoil(*(inputs[name] for name in ("q", "k", "v", "do")))
    of_gradient = spoil.__name__.startswith("d")
    call = call_of(inputs, config, broken, gradients=of_gradient)
    found = find([call, replace(call, layer=1)])  # the backward comes to the last layer first
    assert (found.layer, found.batch, found.head, found.query_tile, found.key_tile) == (int(of_gradient), *place)
    assert what in (None, found.what)
    assert str(place[3]) in str(found) if found.columns else "no key tile" in str(found)


def test_a_sound_model_has_no_place_and_a_fault_above_attention_is_not_blamed_on_it():
    model, x, y = model_and_batch()
    calls = record(model, x, y)
    assert find(calls) is None
    assert all(first_bad(call) is None for call in calls)
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    assert find(record(model, x, y)) is None


# --- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_gauges_at_the_probes_steps(small_run, tmp_path):
    small_run("probe.every=2 steps=6")
    found = records(tmp_path / "x", "max_score")
    assert [r["step"] for r in found] == [2, 4, 6]
    assert all(set(found[0]) == set(r) for r in found)
    assert {f"entropy.{layer}.{head}" for layer in range(2) for head in range(2)} < set(found[0])


BAD = ["probe.every=100", "steps=3", "break_it=no_max", "break_it.score_gain=1e6", "name=bad"]


@contextmanager
def seeds_of_attention():
    """The seeds with which the model calls attention, where it drops."""
    seeds = []

    def heard(*given, **options):
        seeds.extend([] if options["seed"] is None else [int(options["seed"])])
        return attention(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "attention", heard)
        yield seeds


@pytest.fixture(scope="module")
def met_nan(call, small, tmp_path_factory):
    """How a run with dropout ended that met NaN, what it kept, and the seeds of its two layers."""
    runs = tmp_path_factory.mktemp("runs")
    with seeds_of_attention() as seeds:
        ended = call(train, *small, *BAD, "attention.dropout_p=0.2", f"runs={runs}")
    (kept,) = runs.glob("*/faults/step_*")
    assert seeds[-2:] == seeds[:2]  # of the search, and of the step
    return ended, kept, seeds[:2]


def test_a_run_that_meets_nan_names_the_tile_and_keeps_the_batch_to_replay_it(met_nan, call, small_run):
    ended, kept, seeds = met_nan
    assert ended.code == 1
    place = ended.out.split("probe: ")[1].splitlines()[0]
    assert place.startswith("layer 0, head 0, query tile 0")
    assert f"replay={kept}" in ended.out
    assert checkpoint.load(kept).optimizer()["batch.x"].shape == (4, 32)
    with seeds_of_attention() as of_replay:
        again = call(breakit, f"replay={kept}", "device=cpu")
    assert (again.code, of_replay) == (0, seeds)
    assert f"first: {place}" in again.out.splitlines()
    heads, *layers = (line.split() for line in again.out.splitlines()[2:5])
    assert heads[-4:] == ["o", "dq", "dk", "dv"]
    assert [line[0] for line in layers] == ["0", "1"]
    assert {word for line in layers for word in line[-4:]} == {"NaN"}
    ended = small_run(f"resume={kept}", code=2)  # it is no checkpoint
    assert ended.err.count("\n") == 1
    assert f"python breakit.py replay={kept}" in ended.err


def test_the_first_fault_of_a_run_outlives_those_of_its_resumptions(small_run, tmp_path):
    """Kept like checkpoints, it went when one came at an earlier step, and when its own step failed again."""
    small_run("probe.every=100 steps=4 checkpoint_every=1 keep_last=4")
    run, of_first = tmp_path / "x", []
    saved = shutil.copytree(run / "checkpoints", tmp_path / "saved")
    for start, lr in ((4, 1e37), (1, 1e37), (4, 1e36)):  # NaN in the second step from there
        shutil.copytree(saved, run / "checkpoints", dirs_exist_ok=True)  # going back to step 1 deletes the later ones
        resume = f"resume={run}/checkpoints/step_{start:06d} optimizer.lr={lr}"
        small_run(f"{resume} probe.every=100 steps=9 checkpoint_every=100 keep_last=2", code=1)
        of_first.append((run / "faults/step_000006/model.safetensors").read_bytes())
    assert set(of_first) == {of_first[0]}
    assert [path.name for path in checkpoint.all_checkpoints(run / "faults")] == ["step_000006"]
    assert [path.name for path in checkpoint.all_checkpoints(run / "faults/later")] == ["step_000003", "step_000006"]


def test_a_fault_that_a_full_disk_refuses_is_named_and_said_to_be_lost(small_run, tmp_path):
    with little_room():
        ended = small_run(" ".join(BAD), code=1)
    place, lost, _ = ended.out.splitlines()[-3:]
    assert "probe: layer 0, head 0, query tile 0" in place
    (faults,) = tmp_path.glob("*/faults")
    assert f"{faults} cannot be written (File too large)" in lost
    assert list(faults.iterdir()) == []


@pytest.mark.parametrize(("name", "token"), [("batch.x", 2**40), ("batch.x", -1), ("batch.y", 2**40), ("batch.y", -2)])
def test_a_batch_of_what_is_no_token_is_refused(call, met_nan, tmp_path, name, token):
    kept = shutil.copytree(met_nan[1], tmp_path / met_nan[1].name)
    batch = safetensors.torch.load_file(kept / "optimizer.safetensors")[name]
    forge_tensor(kept, "optimizer.safetensors", name, torch.full_like(batch, token))
    ended = call(breakit, f"replay={kept}", "device=cpu")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert name in ended.err


def test_after_nan_a_few_lines_say_where_and_what_to_do(small_run, tmp_path):
    bad = "optimizer.lr=1e38 optimizer.warmup_steps=0 dtype=bf16"
    ended = small_run(f"{bad} steps=30 probe.every=100 checkpoint_every=1", code=1)
    lines = [line.replace(str(tmp_path), "runs") for line in ended.out.splitlines()]
    said = lines[max(i for i, line in enumerate(lines) if " | " in line) + 1 :]
    assert len(said) <= 4
    assert max(map(len, said)) <= 160
    step = int(re.search(r"step (\d+): loss nan", "\n".join(said))[1])
    kept = f"step_{step - 1:06d}", f"/faults/step_{step:06d}"
    for part in (*kept, "optimizer.lr", "layer 0, head ", "query tile "):
        assert part in "\n".join(said)
