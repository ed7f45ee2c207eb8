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
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import bench
import train
from data.loader import Batch
from lab import meter, peer, race, steps
from lab.files import Results
from lab.peer import PlainGPT
from lab.steps import Case, Side
from model.attention import AttentionConfig
from model.dropout import dropped
from model.gpt import GPT, GPTConfig
from tests.reference import assert_float64_right
from tests.test_bench import CPU, read
from training import config

ROOT = Path(__file__).parents[1]
# No padding: nanoGPT counts the rows of its padding in the loss, and ours does not
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "context_length": 24, "vocab_size": 31}
VARIANTS = [{}, {"bias": False}, {"mlp": "gelu"}, {"dropout_p": 0.5}]
TINY = Case(GPTConfig(**SIZES), 2)


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


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
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
    sides = [peer.plain(plain, nullcontext(), CPU), steps.ours(TINY, "naive", nullcontext(), CPU)]
    for step, how in sides:
        assert how.startswith("eager")
        for given in steps.some_batches(TINY, CPU)[:3]:
            step(given)
    names = [name for name, _ in own.named_parameters()]
    pairs = list(zip(names, before.parameters(), plain.parameters(), own.parameters(), strict=True))
    assert all(float((a - b).detach().abs().max()) > peer.LR for _, a, b, _ in pairs)
    found, reference = ({row[0]: row[i].detach() for row in pairs} for i in (2, 3))
    assert_float64_right(found, reference, terms=64 * 2 * 8)


def test_the_plain_gpt_starts_as_ours():
    wide = GPTConfig(**SIZES | {"n_embd": 64})
    torch.manual_seed(0)
    for a, b in zip(PlainGPT(wide, 0.0).parameters(), GPT(wide, AttentionConfig("naive")).parameters(), strict=True):
        if a.dim() == 2:  # 1,500 numbers or more
            assert a.detach().std().item() == pytest.approx(b.detach().std().item(), rel=0.1)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(("dropout_p", "attention_p"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_the_plain_gpt_drops_what_it_is_told_and_only_in_training(dropout_p, attention_p):
    plain = PlainGPT(GPTConfig(**SIZES | {"dropout_p": dropout_p}), attention_p)
    x, y, _ = batch()
    drawn = len({plain(x, y)[1].item() for _ in range(3)})
    assert drawn == (3 if dropout_p or attention_p else 1)
    plain.eval()
    assert len({plain(x, y)[1].item() for _ in range(3)}) == 1


def test_the_plain_loop_reads_every_tenth_loss(monkeypatch):
    reads = []
    monkeypatch.setattr(peer, "float", reads.append, raising=False)
    step, _ = peer.plain(PlainGPT(TINY.model, 0.0), nullcontext(), CPU)
    read_after = []
    for _ in range(25):
        step(batch())
        read_after.append(len(reads))
    assert read_after == [0] * 9 + [1] * 10 + [2] * 6


@pytest.mark.parametrize(
    ("name", "typed"), [("gpt2-1k", ["model=gpt2"]), ("shakespeare", ["experiment=shakespeare_gpu"])]
)
def test_a_case_is_the_model_that_train_makes(name, typed):
    ((cfg, _),) = config.compose(typed, train.Config, "config", ROOT / "conf", "train")
    case = steps.CASES[name]
    cfg.model.vocab_size = case.model.vocab_size
    assert case.model == cfg.model
    assert case.attention_p == cfg.attention.dropout_p
    assert name != "shakespeare" or case.B == cfg.batch_size


def test_gpt2_has_as_many_tokens_at_every_length():
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


def test_nanogpts_model_is_given_the_same_sizes():
    module = ModuleType("nanogpt")
    module.GPT, module.GPTConfig = lambda given: given, lambda **given: given
    config = GPTConfig(**SIZES | {"bias": False, "dropout_p": 0.25, "vocab_multiple": 4})
    same = {name: SIZES[name] for name in ("n_layer", "n_head", "n_embd")}
    assert peer.theirs(module, config) == same | {
        "block_size": 24,
        "vocab_size": 32,  # rows of the embedding
        "bias": False,
        "dropout": 0.25,
    }


# --- the measurement -------------------------------------------------------------------------------------------------


def test_sides_take_turns_of_the_same_number_of_steps(monkeypatch):
    monkeypatch.setattr(steps, "TURN", 0.0)
    taken = []
    sides = [Side(name, "", lambda name=name: taken.append(name), 0.0) for name in "AB"]
    times = steps.in_turn(sides, CPU)
    assert "".join(taken) == "AABB" * (1 + steps.ROUNDS)  # the first turns only say how long the others shall be
    assert [len(ms) for ms in times] == [steps.ROUNDS] * 2


def test_a_turn_is_as_long_as_asked_for_the_slower_side(monkeypatch):
    now = 0.0

    def slow():
        nonlocal now
        now += 0.05

    def fast():
        nonlocal now
        now += 0.01

    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    monkeypatch.setattr(steps, "TURN", 0.5)
    times = steps.in_turn([Side("A", "", slow, 0.0), Side("B", "", fast, 0.0)], CPU)
    assert times[0] == pytest.approx([50.0] * steps.ROUNDS)
    assert times[1] == pytest.approx([10.0] * steps.ROUNDS)
    assert now == pytest.approx(2 * 0.06 + steps.ROUNDS * 10 * 0.06)


def test_the_peak_of_a_side_is_its_own_from_the_time_before_it_is_made():
    before = torch.zeros(1_000_000)

    def make():
        weights = torch.zeros(1000)

        def step(given):
            for _ in range(3):
                weights.add_(weights + before[:1000] + 1)  # two tensors of 4,000 bytes at once

        return step, "eager"

    side = steps.enter("a", make, itertools.repeat(batch()), CPU)
    assert side.peak == 3 * 4000


def test_a_side_without_memory_is_left_out_and_another_error_is_not_hidden(monkeypatch, capsys):
    def without_memory(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(steps, "plain", without_memory)
    rows = list(steps.pair(TINY, "naive", None, nullcontext(), CPU))
    assert capsys.readouterr().out.splitlines()[0].split() == ["plain", "out", "of", "memory"]
    assert {row["name"] for row in rows} == {"ours"}
    assert rows[0]["ms"] > 0
    assert "speed" not in rows[0]

    def wrong(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(steps, "plain", wrong)
    with pytest.raises(RuntimeError, match="illegal"):
        list(steps.pair(TINY, "naive", None, nullcontext(), CPU))


KERNELS = {  # names as the profiler has them
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, int>(...)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(...)",
        "dkdv_kernel",
        "aten::baddbmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "products": ["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "void cutlass::Kernel2<...>", "aten::mm", "aten::addmm"],
    "loss": [
        "loss_kernel",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_0",
        "triton_poi_fused__to_copy_eq_exp_mul_sub_where_9",
        "aten::exp_",
    ],
    "clip and optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float>>",
        "triton_red_fused_linalg_vector_norm_3",
        "aten::_fused_adamw_",
    ],
    "norm": [
        "triton_per_fused__to_copy_add_native_layer_norm_backward_12",
        "norm_kernel",
        "sum_kernel",
        "aten::native_layer_norm",
    ],
    "activation": ["triton_poi_fused__to_copy_gelu_backward_5", "aten::gelu"],
    "copies and casts": [
        "Memcpy HtoD (Pinned -> Device)",
        "triton_poi_fused__to_copy_1",
        "triton_poi_fused_cat_7",
        "aten::copy_",
    ],
    "rest": ["triton_poi_fused_embedding_dense_backward_2", "aten::expand", "aten::add_"],
}


def test_a_kernel_counts_where_its_name_says():
    for part, names in KERNELS.items():
        for name in names:
            found = meter.where([(name, 3.0)], 10.0)
            assert {key: ms for key, ms in found.items() if ms} == {part: 3.0, "idle": 7.0}, name


@pytest.mark.parametrize("name", ["flash", "hopper/forward", "hopper/backward"])
def test_every_kernel_of_attention_counts_as_attention(name):
    text = (ROOT / f"kernels/{name}.py").read_text(encoding="utf-8")
    kernels = re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)
    assert kernels
    assert all(meter.where([(kernel, 3.0)], 3.0)["attention"] == 3.0 for kernel in kernels)


def test_the_parts_are_the_whole_step():
    spent = [("aten::mm", 2.0), ("aten::addmm", 1.5), ("loss_kernel", 0.25), ("strange", 0.5)]
    found = meter.where(spent, 5.0)
    assert found == dict.fromkeys(KERNELS, 0.0) | {"products": 3.5, "loss": 0.25, "rest": 0.5, "idle": 0.75}
    assert sum(found.values()) == 5.0
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


def test_on_a_gpu_time_is_that_of_its_own_clock(monkeypatch):
    """From before the first step to the end of the last one, though the host has enqueued them long before."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append(self)

        def elapsed_time(self, other):
            assert [type(x) for x in told] == [str, Event, int, int, int, Event, str]
            assert (told[1], told[-2]) == (self, other)
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: told.append("idle"))
    assert meter.ms_of(lambda: told.extend([0] * 3), torch.device("cuda")) == 12.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_pair_is_compiled_and_its_parts_are_the_step(tiny, tmp_path):
    bench.main(bench.Config(mode="train", device="cuda", impl="sdpa", cases=["laptop"], out=str(tmp_path)))
    other, own, *parts = read(tmp_path / "steps.csv")
    assert (other["how"], own["how"]) == ("compiled, sdpa", "recorded, sdpa")
    assert min(float(row["peak_gib"]) for row in (other, own)) > 0
    spent = {row["part"]: float(row["ms"]) for row in parts}
    assert min(spent["attention"], spent["products"], spent["clip and optimizer"]) > 0
    assert spent["rest"] < 0.5 * float(own["ms"])
    assert sum(spent.values()) >= 0.99 * float(own["ms"])


# --- the command -----------------------------------------------------------------------------------------------------

NANOGPT = """
from dataclasses import dataclass
import torch
from lab.peer import PlainGPT
from model.gpt import GPTConfig as Ours

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(PlainGPT):
    def __init__(self, config):
        sizes = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
        super().__init__(Ours(context_length=config.block_size, vocab_size=config.vocab_size, **sizes), config.dropout)
        print("number of parameters")
"""


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(steps.CASES, "laptop", TINY)
    monkeypatch.setattr(steps, "TURN", 0.0)


def test_a_pair_has_its_rows_and_its_lines(tiny, tmp_path, call):
    given = ["mode=train", "device=cpu", f"out={tmp_path}"]
    *lines, last = call(bench, *given).out.splitlines()
    rows = read(tmp_path / "steps.csv")
    assert list(rows[0]) == steps.COLUMNS
    assert [(row["name"], row["part"]) for row in rows] == [
        ("plain", "step"),
        *(("ours", part) for part in ["step", *KERNELS, "idle"]),
    ]
    assert {(row["case"], row["T"], row["B"], row["bias"], row["dtype"]) for row in rows} == {
        ("laptop", "24", "2", "True", "float32")
    }
    assert all(row["commit"] and row["device"] and row["torch"] for row in rows)
    for row in rows[:2]:
        assert float(row["tokens_per_s"]) == pytest.approx(48 / float(row["ms"]) * 1e3, rel=1e-2)
    assert [row["peak_gib"] for row in rows[2:]] == [""] * 9
    assert rows[0]["speed"] == ""
    assert float(rows[1]["slowest"]) <= float(rows[1]["speed"]) <= float(rows[1]["fastest"])
    assert [row["part"] for row in json.loads(last)["rows"]] == [row["part"] for row in rows]
    assert all(len(line) <= 120 for line in lines)
    told = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert f"{float(rows[1]['speed']):.3f} (" in told["ours"]
    assert "eager, sdpa" in told["plain"]
    assert "eager, tiled" in told["ours"]
    assert list(told)[2:] == [part.split()[0] for part in [*KERNELS, "idle"]]

    call(bench, *given, "bias=false", "impl=sdpa", "cases=[laptop]")  # a second one is appended
    again = read(tmp_path / "steps.csv")[len(rows) :]
    assert len(again) == len(rows)
    assert {row["bias"] for row in again} == {"False"}
    assert {row["how"] for row in again} == {"eager, sdpa"}


def test_a_part_of_no_time_has_a_0_in_its_row(tmp_path):
    Results(tmp_path, "steps.csv", steps.COLUMNS).append([{"part": "loss", "ms": 0.0}])
    assert read(tmp_path / "steps.csv")[0]["ms"] == "0"


def test_the_speed_is_that_of_turns_side_by_side(tiny, monkeypatch):
    monkeypatch.setattr(steps, "in_turn", lambda *_: [[2.0, 8.0, 3.0], [1.0, 10.0, 2.0]])
    other, own = itertools.islice(steps.pair(TINY, "naive", None, nullcontext(), CPU), 2)
    assert (other["ms"], own["ms"]) == (3.0, 2.0)
    assert (own["slowest"], own["speed"], own["fastest"]) == (0.8, 1.5, 2.0)
    assert own["tokens_per_s"] == 24_000


def test_nanogpts_model_is_timed_in_place_of_the_plain_one(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "peer_model", raising=False)
    (tmp_path / "model.py").write_text(NANOGPT)
    bench.main(bench.Config(mode="train", device="cpu", out=str(tmp_path), peer=str(tmp_path / "model.py")))
    rows = read(tmp_path / "steps.csv")
    assert [row["name"] for row in rows[:2]] == ["nanoGPT", "ours"]
    assert "number of parameters" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no Python file"),
        ("x = 1", "has no GPT and GPTConfig"),
        ("def", "cannot be loaded: invalid syntax"),
        ("import nothing_of_the_kind", "cannot be loaded: No module"),
    ],
)
def test_a_peer_that_is_not_nanogpts_is_refused(tiny, tmp_path, text, message):
    if text is not None:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(ValueError, match=rf"^peer=.*model\.py {message}"):
        bench.main(bench.Config(mode="train", device="cpu", out=str(tmp_path), peer=str(tmp_path / "model.py")))
    assert not (tmp_path / "steps.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["gpt3"]}, r"cases\[0\]=gpt3 is not known; choose laptop, nano"),
        ({"cases": []}, r"cases=\[\]"),
        ({"impl": "flash"}, "^impl=flash is not known"),
        ({"lengths": [64]}, "mode=train does not read it"),
        ({"mode": "race", "peer": "model.py"}, "mode=race does not read it"),
        ({"mode": "traffic", "cases": ["nano"]}, "mode=traffic does not read it"),
        ({"mode": "length", "heads": [4]}, "mode=length does not read it"),
        ({"mode": "length", "impls": ["flex"]}, "flex is not known; choose naive, tiled, sdpa, triton"),
    ],
)
def test_a_training_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench.Config(**{"mode": "train"} | options)


def test_an_attention_that_cannot_run_is_refused_before_anything_is_made(tiny, tmp_path, monkeypatch, capsys):
    sizes = pytest.importorskip("kernels.sizes", reason="triton is made for Linux")
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"^attention\.impl=triton"):
        bench.main(bench.Config(mode="train", device="cpu", impl="triton", out=str(tmp_path)))
    assert capsys.readouterr().out == ""


# --- mode=length -----------------------------------------------------------------------------------------------------


def test_every_length_is_timed_with_every_attention(monkeypatch, tmp_path, call):
    """A step has as many tokens at each length, but for a length that is longer. Without memory a row has no time."""
    monkeypatch.setitem(steps.LONG, "long_laptop", TINY.model)
    monkeypatch.setattr(steps, "TURN", 0.0)
    made = []

    def ours(case, impl, *rest, make=steps.ours):
        made.append(case)
        if impl == "naive" and case.model.context_length == 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(case, impl, *rest)

    monkeypatch.setattr(steps, "ours", ours)
    given = ["mode=length", "device=cpu", f"out={tmp_path}", "lengths=[128,32]", "tokens=64", "impls=[naive,sdpa]"]
    *lines, last = call(bench, *given).out.splitlines()
    rows = read(tmp_path / "lengths.csv")
    assert list(rows[0]) == steps.OF_LENGTHS
    assert [(row["T"], row["B"], row["name"], row["how"]) for row in rows] == [
        ("32", "2", "naive", "eager, naive"),
        ("32", "2", "sdpa", "eager, sdpa"),
        ("128", "1", "naive", "out of memory"),
        ("128", "1", "sdpa", "eager, sdpa"),
    ]
    assert [case.model.context_length for case in made] == [32, 32, 128, 128]
    assert rows[2]["ms"] == rows[2]["peak_gib"] == rows[2]["tokens_per_s"] == ""
    for row, tokens in ((rows[1], 64), (rows[3], 128)):
        assert float(row["tokens_per_s"]) == pytest.approx(tokens / float(row["ms"]) * 1e3, rel=1e-2)
        assert row["peak_gib"]
    assert json.loads(last)["rows"][3]["T"] == 128
    assert sum(line.startswith("  T=") for line in lines) == 3


@pytest.mark.parametrize("name", steps.LONG)
def test_the_models_of_the_lengths_are_those_of_the_recipes(name):
    ((cfg, _),) = config.compose([f"experiment={name}"], train.Config, "config", ROOT / "conf", "train")
    recipe = replace(cfg.model, context_length=1, vocab_size=257, activation_checkpointing="false")
    recipe = replace(recipe, rope_base=1e4, rope_base_local=None)  # no step takes longer for these
    assert replace(steps.LONG[name], context_length=1) == recipe


def test_lengths_that_fit_no_memory_are_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(steps, "some_batches", full)
    cfg = bench.Config(mode="length", lengths=[512], tokens=2048, device="cpu", out=str(tmp_path))
    with pytest.raises(ValueError, match="out of memory with steps of 2048 tokens; use shorter lengths="):
        bench.main(cfg)


# --- docs/results.md -------------------------------------------------------------------------------------------------


def cells(table: str, page: str = "results.md") -> list[list[str]]:
    """The rows of a table of a page in docs, found by its first heading; [] if it is not there."""
    page = (ROOT / "docs" / page).read_text(encoding="utf-8")
    if f"\n| {table} |" not in page:
        return []
    body = page.split(f"\n| {table} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()[2:]]


def test_the_page_has_the_steps_that_were_measured():
    """Of docs/steps.csv the last run of each case, other side and attention of ours, and the last parts of each case
    and attention. The page says that the models have no biases; a case with biases would say so in its name. To fill
    the tables, paste the lines that this test prints below their headings:

        | case | other side | its ms per step | its GiB | our attention | our ms per step | our GiB | our speed |
        | parts, ms | our attention | attention | products | loss | clip and optimizer | norm | ... | idle |
    """
    path = ROOT / "docs/steps.csv"
    whole: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    for row in read(path) if path.exists() else []:
        case = row["case"] + ", biases" * (row["bias"] == "True")
        key = case, row["how"].split(", ")[1]
        if row["name"] != "ours":
            other = row
        elif row["part"] == "step":
            theirs, own = ([race.short(float(x["ms"])), f"{float(x['peak_gib']):.1f}"] for x in (other, row))
            speed, *turns = (f"{float(row[name]):.2f}" for name in ("speed", "slowest", "fastest"))
            turned = f"{speed} ({' to '.join(turns)})"
            whole[*key, other["name"]] = [case, other["name"], *theirs, key[1], *own, turned]
            parts[key] = [*key]
        else:
            parts[key].append(race.short(float(row["ms"])))
    cases = list(dict.fromkeys(case for case, *_ in whole))
    for table, found in {"case": whole, "parts, ms": parts}.items():
        rows = [found[key] for key in sorted(found, key=lambda key: cases.index(key[0]))]  # the same case side by side
        assert cells(table) == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_has_the_lengths_that_were_measured():
    """docs/training.md, from lengths.csv and context.jsonl. To fill the table, paste what this test prints."""
    lengths = read(ROOT / "docs/lengths.csv")
    measured = {(row["case"], row["commit"], int(row["T"]), row["name"]): row for row in lengths}
    with open(ROOT / "docs/context.jsonl", encoding="utf-8") as file:
        trained = {record["run"]: record for record in map(json.loads, file)}  # the last one of each run
    rows = []
    for case, commit, T in dict.fromkeys(key[:3] for key in measured):
        device, run, usual = ("CPU", "long_laptop", "tiled") if case == "long_laptop" else ("H200", "long_16k", "sdpa")
        first = commit == lengths[0]["commit"]
        line = [device if first else f"{device}, later", f"{T:,}"]
        for name in ("naive", "tiled", "sdpa", "triton"):
            row = measured.get((case, commit, T, name))
            if row is None:
                line.append("-")
            else:
                line.append(f"{float(row['ms']):,.0f} / {float(row['peak_gib']):.1f}" if row["ms"] else "no memory")
        chosen = measured.get((case, commit, T, usual))
        line.append("-" if chosen is None else f"{int(chosen['tokens_per_s']):,}")
        bits = [x for key, x in trained[run].items() if re.fullmatch(rf"bpb_given_0*{T}", key)]
        rows.append([*line, (f"{bits[0]:.3f}" if bits else "-") if first else "-"])
    found = cells("device | tokens of context", "training.md")
    assert found == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)
