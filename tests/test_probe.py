"""The instruments: gauges against their definitions, and planted faults found where they were planted."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import training.step
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, GPTConfig
from tests.reference import Case, assert_float64_right, oracle, visible
from tests.runs import assert_same_run, records
from training import probe
from training.probe import LIMIT, Call, find, first_bad, gauges, reading, record
from training.step import TrainStep

SIZE = GPTConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, context_length=64, vocab_size=50, dropout_p=0.0)
TILED, NAIVE = AttentionConfig("tiled", 16, 16), AttentionConfig("naive", 16, 16)


def model_and_batch(config: AttentionConfig = TILED, **size):
    torch.manual_seed(0)
    idx = torch.randint(50, (2, 65))
    return GPT(replace(SIZE, **size), config, UNBROKEN), idx[:, :-1], idx[:, 1:]


def call_of(inputs: dict, config: AttentionConfig = TILED, broken: str = "none", gradients: bool = False) -> Call:
    q, k, v = (inputs[name].requires_grad_(gradients) for name in "qkv")
    o = attention(q, k, v, config, break_it=BreakIt(broken))
    parts = (inputs["do"], list(torch.autograd.grad(o, (q, k, v), inputs["do"]))) if gradients else ()
    q, k, v, o = (x.detach() for x in (q, k, v, o))
    return Call(q, k, v, config, None, None, BreakIt(broken), 0, o, *parts)


# --- record and gauges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["false", "true", "selective"])
def test_a_recorded_forward_and_backward_are_those_of_the_model(recompute):
    """A block that is computed again is recorded once, and the parameters' gradients are left alone."""
    model, x, y = model_and_batch(recompute=recompute)
    calls = record(model, x, targets=y)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert all(torch.equal(call.o, attention(call.q, call.k, call.v, TILED)) for call in calls)
    q = calls[1].q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, calls[1].k, calls[1].v, TILED), q, calls[1].do)
    assert torch.equal(dq, calls[1].gradients[0])
    assert all(p.grad is None for p in model.parameters())
    assert not any(call.gradients for call in record(model, x))


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
        "error": (call.o.double() - right).norm() / right.norm(),
        "entropy": -torch.special.xlogy(p, p).sum(-1).mean((0, 2)),
    }
    in_tensors = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in gauges(call)._asdict().items()}
    assert_float64_right(in_tensors, expected, terms=90)


def test_of_a_long_sequence_some_2048_rows_are_looked_at_evenly_spread(monkeypatch):
    """All scores are equal, so the entropy of row i is log(i + 1)."""
    T, rows, looked = 20_000, [], probe.weights
    inputs = Case(T, B=1, H=1, D=8).inputs(torch.float32) | {"q": torch.zeros(1, 1, T, 8)}
    monkeypatch.setattr(probe, "weights", lambda *args: rows.extend(args[2]) or looked(*args))
    q, k, v = (inputs[name] for name in "qkv")
    o = v.cumsum(2, dtype=torch.float64) / torch.arange(1, T + 1)[:, None]
    found = gauges(Call(q, k, v, TILED, None, None, UNBROKEN, 0, o.float()))
    assert len(set(rows)) == len(rows) <= probe.ROWS
    assert min(rows) < 0.03 * T < 0.97 * T < max(rows)
    assert float(found.entropy) == pytest.approx(sum(math.log(i + 1) for i in rows) / len(rows))
    assert 0 < found.error < torch.finfo(torch.float32).eps


def test_the_effect_in_a_long_sequence_is_that_on_its_first_rows(monkeypatch):
    """Which see none of the others, so their o and dq are those of the whole."""
    call = call_of(Case(200, B=1, H=1).inputs(torch.float32), broken="no_rescale", gradients=True)
    monkeypatch.setattr(probe, "ROWS", 60)
    right = attention(*(x.double() for x in (call.q, call.k, call.v)), NAIVE)[:, :, :60]
    found = probe.worst(probe.effects([call]))
    assert found["o"].error == pytest.approx(float((call.o[:, :, :60] - right).norm() / right.norm()), rel=1e-3)
    assert found["gradient"].more_than_rounding
    for two, spans in enumerate(([[0, 199]] * 200, [[0, 29]] * 30 + [[30, 199]] * 170)):  # one document, and two
        given = replace(call, config=replace(TILED, documents=True), spans=torch.tensor([spans]).int())
        assert (probe.worst(probe.effects([given])) != found) == two


def test_the_headroom_of_fp16_ends_at_11():
    found = gauges(call_of(Case(20).inputs(torch.float16)))
    assert math.isclose(found.headroom + found.max_score, math.log(65504))


def test_a_call_without_its_scale_is_compared_with_the_right_one():
    inputs = Case(64).inputs(torch.float32)
    whole, without = gauges(call_of(inputs)), gauges(call_of(inputs, TILED, "no_scale"))
    assert whole.error < 1e-6 < 0.01 < without.error
    assert without.max_score == pytest.approx(whole.max_score * inputs["q"].shape[-1] ** 0.5)


def test_a_layer_of_nan_is_not_hidden_by_the_sound_ones_before_it():
    model, x, _ = model_and_batch()
    plant(model, 2, 0, 0, 0, math.nan)
    found = reading(record(model, x))
    for name in ("max_score", "headroom", "attention_error"):
        assert math.isnan(found[name]), name


# --- the search ------------------------------------------------------------------------------------------------------


def plant(model: GPT, layer: int, sequence: int, key_head: int, token: int, value: float) -> None:
    """One number of one key, as it comes out of the projection of q (32 wide), k (2 heads of 8) and v."""

    def spoil(module, inputs, out):
        out = out.clone()
        out[sequence, token, 32 + key_head * 8 + 3] = value
        return out

    model.blocks[layer].attention.qkv.register_forward_hook(spoil)


@pytest.mark.parametrize("config", [TILED, NAIVE], ids=lambda config: config.impl)
@pytest.mark.parametrize(("layer", "sequence", "key_head", "token"), [(1, 0, 1, 40), (0, 1, 0, 0), (2, 1, 1, 63)])
def test_one_nan_in_one_key_is_named(config, layer, sequence, key_head, token):
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
L_IS = "l, the sum of weights, is"
PLANTED = [  # what, the case, the configurations, what is broken, and the place: sequence, head, tile of rows, of keys
    (huge_score, Case(64, H=4, H_kv=4), [TILED, NAIVE], "no_max", (1, 3, 3, 1), L_IS),
    (score_beyond_float32, Case(64), [TILED, NAIVE], "none", (0, 1, 2, 1), "scores are"),
    (infinite_value, Case(16, 64, B=1, window=8), [replace(NAIVE, window=8)], "none", (0, 1, 0, None), "o is"),
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
    calls = record(model, x, targets=y)
    assert find(calls) is None
    assert all(first_bad(call) is None for call in calls)
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    assert find(record(model, x, targets=y)) is None


# --- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_gauges_at_the_probes_steps_and_they_change_no_bit_of_it(small_run, tmp_path):
    small_run("steps=6 attention.dropout_p=0.1 name=without")
    small_run("steps=6 attention.dropout_p=0.1 probe.every=2")
    x = tmp_path / "x"
    found = records(x, "max_score")
    assert [r["step"] for r in found] == [2, 4, 6]
    assert {f"entropy.{layer}.{head}" for layer in range(2) for head in range(2)} < set(found[0])
    lines = (x / "metrics.jsonl").read_text().splitlines(keepends=True)
    (x / "metrics.jsonl").write_text("".join(line for line in lines if "max_score" not in line))
    assert_same_run(x, tmp_path / "without")


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_that_meets_nan_names_the_tile_and_keeps_its_batch_with_all_before_it(
    ahead, small_run, tmp_path, monkeypatch
):
    """The weights, and the random state: else the search would draw other dropout than the step. A run that hears of it
    late logs no step after it."""
    monkeypatch.setitem(training.step.AHEAD, "cpu", ahead)
    before, call = [], TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *step: before.append(torch.get_rng_state()) or call(*step))
    rate = "optimizer.lr=1e30 optimizer.warmup_steps=0"
    said = small_run(f"{rate} probe.every=100 steps=9 attention.dropout_p=0.1", code=1).out
    folder = tmp_path / "x"
    assert "probe: layer 0, head" in said
    assert "key tile 0" in said
    assert [record["step"] for record in records(folder)] == [1, 2]
    (fault,) = (folder / "faults").iterdir()
    assert fault.name == "step_000002"
    assert f"replay={fault}" in said
    kept = load_file(fault / "training.safetensors")
    assert kept["batch.x"].shape == kept["batch.y"].shape == (4, 32)
    assert torch.equal(kept["rng.cpu"], before[1])
