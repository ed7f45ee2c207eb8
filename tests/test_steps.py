"""bench.py mode=train and mode=length: the plain GPT-2 computes what ours does, sides take turns, each millisecond has
a name."""

import copy
import itertools
import json
import re
import sys
import time
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench
from data.loader import Batch
from lab import meter, peer, steps
from lab.files import Results
from lab.peer import PlainGPT
from lab.steps import Case, Side
from model.attention import AttentionConfig
from model.dropout import dropped
from model.gpt import GPT, GPTConfig
from tests.reference import assert_float64_right
from tests.runs import table_of
from tests.test_bench import CPU
from tests.test_readme import ROOT, composed

# No padding: nanoGPT counts the rows of its padding in the loss, and ours does not
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "context_length": 24, "vocab_size": 31}
TINY = Case(GPTConfig(**SIZES), 2)
FULL = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


def both(**changes) -> tuple[GPT, PlainGPT]:
    """Ours and the plain one in float64 with the same random weights, biases and norms."""
    torch.manual_seed(0)
    settings = GPTConfig(**SIZES | changes)
    own, plain = GPT(settings, AttentionConfig("naive")).double(), PlainGPT(settings, 0.0).double()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    plain.load_state_dict({re.sub(r"(attention|mlp)\.", "", name): x for name, x in own.state_dict().items()})
    return own, plain


def batch() -> Batch:
    return steps.some_batches(TINY, CPU)[0]


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"mlp": "gelu"}, {"dropout_p": 0.5}], ids=str)
def test_the_plain_gpt_computes_what_ours_does(changes, monkeypatch):
    """It drops at the same places: ours hands its masks over, in their order."""
    own, plain = both(**changes)
    masks: list[torch.Tensor | None] = []
    for place in ("model.gpt.dropped", "model.norm.dropped"):
        monkeypatch.setattr(place, lambda x, keep, p: masks.append(keep) or dropped(x, keep, p))
    for module in (plain, *plain.blocks) if plain.dropout.p else ():
        monkeypatch.setattr(module.dropout, "forward", lambda x: dropped(x, masks.pop(0), plain.dropout.p))
    x, y, _ = batch()
    found, reference = {}, {}
    for model, results in ((own, reference), (plain, found)):
        loss = model(x, y)
        loss = loss[1] if model is plain else loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results |= dict(zip(dict(own.named_parameters()), gradients, strict=True)) | {"loss": loss.detach()}
    assert not any(mask is not None for mask in masks)
    assert all(float(result.abs().max()) > 0 for result in reference.values())
    # Sums of at most 64 products, one behind the other through two blocks and back.
    assert_float64_right(found, reference, terms=64 * 2 * 8)


def test_both_sides_make_the_same_update(monkeypatch):
    """Rate, decay, clipping and moments alike: after three steps the weights are the same. Without biases, because the
    gradient of a key's bias is 0, and AdamW divides its rounding error by 1e-8."""
    own, plain = both(bias=False)
    monkeypatch.setattr(steps, "RecomputingGPT", lambda *_: own)
    before = copy.deepcopy(own)
    for step, how in (peer.plain(plain, nullcontext(), CPU), steps.ours(TINY, "naive", nullcontext(), CPU)):
        assert how.startswith("eager")
        for given in steps.some_batches(TINY, CPU)[:3]:
            step(given)
    names = [name for name, _ in own.named_parameters()]
    pairs = list(zip(names, before.parameters(), plain.parameters(), own.parameters(), strict=True))
    assert all(float((a - b).detach().abs().max()) > peer.LR for _, a, b, _ in pairs)
    found, reference = ({row[0]: row[i].detach() for row in pairs} for i in (2, 3))
    assert_float64_right(found, reference, terms=64 * 2 * 8)


def test_the_plain_loop_reads_every_tenth_loss(monkeypatch):
    reads = []
    monkeypatch.setattr(peer, "float", reads.append, raising=False)
    step, _ = peer.plain(PlainGPT(TINY.model, 0.0), nullcontext(), CPU)
    read_after = [step(batch()) or len(reads) for _ in range(25)]
    assert read_after == [0] * 9 + [1] * 10 + [2] * 6


def test_the_models_that_are_timed_are_those_that_train_makes():
    for name, typed in {"gpt2-1k": "model=gpt2", "shakespeare": "experiment=shakespeare_gpu"}.items():
        ((cfg, _),), case = composed("train.py", typed), steps.CASES[name]
        assert case.model == replace(cfg.model, vocab_size=case.model.vocab_size)
        assert (case.attention_p, case.B) == (cfg.attention.dropout_p, 64 if name == "gpt2-1k" else cfg.batch_size)
    for name, timed in steps.LONG.items():
        ((cfg, _),) = composed("train.py", f"experiment={name}")
        no_slower = {"activation_checkpointing": "false", "rope_base": 1e4, "rope_base_local": None}
        assert replace(timed, context_length=1) == replace(cfg.model, context_length=1, vocab_size=257, **no_slower)
    cases = [case for name, case in steps.CASES.items() if name.startswith("gpt2")]
    assert [case.model.context_length for case in cases] == [1024, 8192, 32_768, 65_536]
    assert {case.tokens for case in cases} == {65_536}


def test_batches_are_random_windows_and_their_next_tokens():
    batches = steps.some_batches(TINY, CPU)
    assert len({tuple(b.x.flatten().tolist()) for b in batches}) == len(batches)
    for x, y, documents in batches:
        assert x.shape == y.shape == (2, 24)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert documents is None
    assert set(torch.cat([b.x.flatten() for b in batches]).tolist()) == set(range(31))


# --- the measurement -------------------------------------------------------------------------------------------------


def test_sides_take_turns_that_are_as_long_as_asked_for_the_slower_one(monkeypatch):
    now, taken = 0.0, []

    def side(name: str, seconds: float) -> Side:
        def step():
            nonlocal now
            now += seconds
            taken.append(name)

        return Side(name, "", step, 0.0)

    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    for turn, number in ((0.0, 2), (0.5, 10)):
        now, taken = 0.0, []
        monkeypatch.setattr(steps, "TURN", turn)
        times = steps.in_turn([side("A", 0.05), side("B", 0.01)], CPU)
        # the first turns, of two steps, only say how long the others shall be
        assert "".join(taken) == "AABB" + ("A" * number + "B" * number) * steps.ROUNDS
        assert times == [pytest.approx([ms] * steps.ROUNDS) for ms in (50.0, 10.0)]


def test_the_peak_of_a_side_is_its_own_from_the_time_before_it_is_made():
    before = torch.zeros(1_000_000)

    def make():
        weights = torch.zeros(1000)

        def step(given):
            for _ in range(3):
                weights.add_(weights + before[:1000] + 1)  # two tensors of 4,000 bytes at once

        return step, "eager"

    assert steps.enter("a", make, itertools.repeat(batch()), CPU).peak == 3 * 4000


def test_a_side_without_memory_is_left_out_and_another_error_is_not_hidden(tiny, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError(error)

    monkeypatch.setattr(steps, "plain", fails)
    error = FULL
    rows = list(steps.pair(TINY, "naive", None, nullcontext(), CPU))
    assert capsys.readouterr().out.splitlines()[0].split() == ["plain", "out", "of", "memory"]
    assert {row["name"] for row in rows} == {"ours"}
    assert rows[0]["ms"] > 0
    assert "speed" not in rows[0]
    error = "an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        list(steps.pair(TINY, "naive", None, nullcontext(), CPU))


KERNELS = {  # names as the profiler has them
    "attention": ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "void cudnn::fusion::compute_dot_do_o",
                  "void pytorch_flash::flash_fwd_kernel", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"],
    "products": ["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "void cutlass::Kernel2<...>", "aten::mm", "aten::addmm"],
    "loss": ["loss_kernel", "triton_red_fused__log_softmax__to_copy_nll_loss_forward_0", "aten::exp_",
             "triton_poi_fused__to_copy_eq_exp_mul_sub_where_9"],
    "clip and optimizer": ["void multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float>>", "aten::_fused_adamw_",
                           "triton_red_fused_linalg_vector_norm_3"],
    "norm": ["triton_per_fused__to_copy_add_native_layer_norm_backward_12", "norm_kernel", "aten::native_layer_norm"],
    "activation": ["triton_poi_fused__to_copy_gelu_backward_5", "aten::gelu"],
    "copies and casts": ["Memcpy HtoD (Pinned -> Device)", "triton_poi_fused_cat_7", "aten::copy_"],
    "rest": ["triton_poi_fused_embedding_dense_backward_2", "aten::expand", "aten::add_"],
}  # fmt: skip


def test_a_kernel_counts_where_its_name_says_and_the_parts_are_the_whole_step():
    named = [(part, name) for part, names in KERNELS.items() for name in names]
    for file in ("flash", "hopper/forward", "hopper/backward"):
        text = (ROOT / f"kernels/{file}.py").read_text(encoding="utf-8")
        found = re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)
        assert found
        named += [("attention", name) for name in found]
    for part, name in named:
        found = meter.where([(name, 3.0)], 10.0)
        assert {key: ms for key, ms in found.items() if ms} == {part: 3.0, "idle": 7.0}, name
    spent = [("aten::mm", 2.0), ("aten::addmm", 1.5), ("loss_kernel", 0.25), ("strange", 0.5)]
    found = meter.where(spent, 5.0)
    assert found == dict.fromkeys(KERNELS, 0.0) | {"products": 3.5, "loss": 0.25, "rest": 0.5, "idle": 0.75}
    assert meter.where(spent, 4.0)["idle"] == 0.0  # kernels at the same time


def test_a_profile_has_the_ms_of_the_ops_of_one_call():
    x, calls = torch.randn(256, 256), []

    def action():
        calls.append(1)
        return (x @ x).softmax(-1)

    started = time.perf_counter()
    spent = dict(meter.profiled(action, 100, CPU))
    wall = (time.perf_counter() - started) * 1e3
    assert len(calls) == 100
    assert {"aten::mm", "aten::_softmax"} <= set(spent)
    assert all("::" in name for name in spent)
    assert wall / 10_000 < 100 * sum(spent.values()) < wall


def test_of_a_gpus_profile_the_kernels_count_and_not_launches_or_ranges(monkeypatch):
    """The same time stands there up to three times: as a kernel, as its launch, and in a range that torch has named."""
    event = namedtuple("event", "key device_type is_user_annotation self_device_time_total self_cpu_time_total")
    cuda, cpu = meter.DeviceType.CUDA, meter.DeviceType.CPU
    events = [
        event("loss_kernel", cuda, False, 6000.0, 0.0),
        event("Optimizer.step#AdamW.step", cuda, True, 9000.0, 0.0),
        event("cudaLaunchKernel", cpu, False, 0.0, 5000.0),
    ]
    seen = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(meter, "profile", lambda activities: nullcontext(seen))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert meter.profiled(lambda: None, 3, torch.device("cuda")) == [("loss_kernel", 2.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_pair_is_compiled_and_its_parts_are_the_step(tiny, tmp_path):
    bench.main(bench.Config(mode="train", device="cuda", impl="sdpa", cases=["laptop"], out=str(tmp_path)))
    other, own, *parts = table_of(tmp_path / "steps.csv")
    assert (other["how"], own["how"]) == ("compiled, sdpa", "recorded, sdpa")
    assert min(float(row["peak_gib"]) for row in (other, own)) > 0
    spent = {row["part"]: float(row["ms"]) for row in parts}
    assert min(spent["attention"], spent["products"], spent["clip and optimizer"]) > 0
    assert spent["rest"] < 0.5 * float(own["ms"])
    assert sum(spent.values()) >= 0.99 * float(own["ms"])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(steps.CASES, "laptop", TINY)
    monkeypatch.setitem(steps.LONG, "long_laptop", TINY.model)
    monkeypatch.setattr(steps, "TURN", 0.0)


def test_a_pair_has_its_rows_and_its_lines_and_a_second_one_is_appended(tiny, tmp_path, call):
    given = ["mode=train", "device=cpu", f"out={tmp_path}"]
    *lines, last = call(bench, *given).out.splitlines()
    rows, parts = table_of(tmp_path / "steps.csv"), ["step", *KERNELS, "idle"]
    assert list(rows[0]) == steps.COLUMNS
    assert [(row["name"], row["part"]) for row in rows] == [("plain", "step"), *(("ours", part) for part in parts)]
    shapes = {(row["case"], row["T"], row["B"], row["bias"], row["dtype"]) for row in rows}
    assert shapes == {("laptop", "24", "2", "True", "float32")}
    assert all(row["commit"] and row["device"] and row["torch"] for row in rows)
    for row in rows[:2]:
        assert float(row["tokens_per_s"]) == pytest.approx(48 / float(row["ms"]) * 1e3, rel=1e-2)
    assert (rows[0]["speed"], [row["peak_gib"] for row in rows[2:]]) == ("", [""] * 9)
    assert [row["part"] for row in json.loads(last)["rows"]] == [row["part"] for row in rows]
    assert all(len(line) <= 120 for line in lines)
    (ours,) = [line for line in lines if line.startswith("  ours ") and "tok/s" in line]
    assert f"{float(rows[1]['speed']):.3f} (" in ours
    call(bench, *given, "bias=false", "impl=sdpa", "cases=[laptop]")
    again = {(row["bias"], row["how"]) for row in table_of(tmp_path / "steps.csv")[len(rows) :]}
    assert again == {("False", "eager, sdpa")}


def test_a_part_of_no_time_has_a_0_in_its_row(tmp_path):
    Results(tmp_path, "steps.csv", steps.COLUMNS).append([{"part": "loss", "ms": 0.0}])
    assert table_of(tmp_path / "steps.csv")[0]["ms"] == "0"


def test_the_speed_is_that_of_turns_side_by_side(tiny, monkeypatch):
    monkeypatch.setattr(steps, "in_turn", lambda *_: [[2.0, 8.0, 3.0], [1.0, 10.0, 2.0]])
    other, own = itertools.islice(steps.pair(TINY, "naive", None, nullcontext(), CPU), 2)
    assert (other["ms"], own["ms"]) == (3.0, 2.0)
    assert (own["slowest"], own["speed"], own["fastest"]) == (0.8, 1.5, 2.0)
    assert own["tokens_per_s"] == 24_000


NANOGPT = """
from lab.peer import PlainGPT
from model.gpt import GPTConfig as Ours

class GPTConfig:
    def __init__(self, **sizes):
        self.sizes = sizes

class GPT(PlainGPT):
    def __init__(self, config):
        self.asked = config.sizes
        names = {"block_size": "context_length", "dropout": "dropout_p"}
        super().__init__(Ours(**{names.get(name, name): size for name, size in config.sizes.items()}), 0.0)
        print("number of parameters")
"""


@pytest.fixture
def nanogpt(tmp_path, monkeypatch) -> str:
    """The path of a model.py like nanoGPT's."""
    monkeypatch.delitem(sys.modules, "peer_model", raising=False)
    (tmp_path / "model.py").write_text(NANOGPT)
    return str(tmp_path / "model.py")


def test_nanogpts_model_is_given_the_same_sizes_and_timed_in_place_of_the_plain_one(tiny, nanogpt, tmp_path, capsys):
    bench.main(bench.Config(mode="train", device="cpu", out=str(tmp_path), peer=nanogpt))
    assert [row["name"] for row in table_of(tmp_path / "steps.csv")[:2]] == ["nanoGPT", "ours"]
    assert "number of parameters" not in capsys.readouterr().out
    settings = GPTConfig(**SIZES | {"bias": False, "dropout_p": 0.25, "vocab_multiple": 4})
    asked = {name: SIZES[name] for name in ("n_layer", "n_head", "n_embd")} | {"bias": False, "dropout": 0.25}
    asked |= {"block_size": 24, "vocab_size": 32}  # rows of the embedding
    assert peer.theirs(sys.modules["peer_model"], settings).asked == asked


@pytest.mark.parametrize("text", [None, "x = 1", "def", "import nothing_of_the_kind"])
def test_a_peer_that_is_not_nanogpts_is_refused(tiny, tmp_path, text):
    if text is not None:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(ValueError, match=r"\Apeer=[^\n]*model\.py [^\n]*\Z"):
        bench.main(bench.Config(mode="train", device="cpu", out=str(tmp_path), peer=str(tmp_path / "model.py")))
    assert not (tmp_path / "steps.csv").exists()


@pytest.mark.slow
def test_every_length_is_timed_with_every_attention(tiny, monkeypatch, tmp_path, call):
    """A step has as many tokens at each length, but for a length that is longer. Without memory a row has no time."""
    made = []

    def ours(case, impl, *rest, make=steps.ours):
        made.append(case)
        if impl == "naive" and case.model.context_length == 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(case, impl, *rest)

    monkeypatch.setattr(steps, "ours", ours)
    given = ["mode=length", "device=cpu", f"out={tmp_path}", "lengths=[128,32]", "tokens=64", "impls=[naive,sdpa]"]
    *lines, last = call(bench, *given).out.splitlines()
    rows = table_of(tmp_path / "lengths.csv")
    assert list(rows[0]) == steps.OF_LENGTHS
    how = [("32", "2", "eager, naive"), ("32", "2", "eager, sdpa"), ("128", "1", "out of memory")]
    assert [(row["T"], row["B"], row["how"]) for row in rows] == [*how, ("128", "1", "eager, sdpa")]
    assert [case.model.context_length for case in made] == [32, 32, 128, 128]
    assert rows[2]["ms"] == rows[2]["peak_gib"] == rows[2]["tokens_per_s"] == ""
    for row, tokens in ((rows[1], 64), (rows[3], 128)):
        assert float(row["tokens_per_s"]) == pytest.approx(tokens / float(row["ms"]) * 1e3, rel=1e-2)
        assert row["peak_gib"]
    assert json.loads(last)["rows"][3]["T"] == 128
    assert sum(line.startswith("  T=") for line in lines) == 3
