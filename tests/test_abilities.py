"""model/abilities.py: what its table says is lacking is refused with a reason, and all else runs."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from model.abilities import ABILITIES, HOPPER_FROM, IMPLEMENTATIONS, OF_MASK, OF_SCORE, resolve, wanted, why_not
from model.attention import KINDS, AttentionConfig, attention, sdpa_kernel
from model.break_it import FAILURES, BreakIt
from model.gpt import GPTConfig
from tests.implementations import INTERPRETED
from tests.test_readme import README

# An option of every kind, as AttentionConfig has it. block_mask: with block_mask_size=8.
OPTIONS = {
    "window": 5,
    "windows": [5, None],
    "documents": True,
    "block_mask": ["x.", "xx"],
    "softcap": 2.0,
    "alibi": True,
    "dropout_p": 0.5,
    "order": "keys_outside",
    "autotune": True,
    "kernel": "portable",
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "impl", [pytest.param(impl, marks=[INTERPRETED] * (impl == "triton")) for impl in IMPLEMENTATIONS]
)
def test_an_option_runs_or_is_refused_with_its_value_and_a_way_out_that_is_one(impl, option):
    config = AttentionConfig(impl, block_mask_size=8, **{option: OPTIONS[option]})
    assert option in wanted(config)
    if option not in ABILITIES[impl].lacks:
        q = torch.randn(1, 2, 16, 16)
        more = {"documents": torch.zeros(1, 16, dtype=torch.int64)} if option == "documents" else {}
        o = attention(q, q, q, resolve(config, "cpu").layer(0), seed=torch.tensor(1), **more)
        assert o.isfinite().all()
        return
    with pytest.raises(ValueError, match=rf"^attention\.{option}=.*; (leave it out|use attention=)") as refused:
        resolve(config, "cpu")
    assert "\n" not in str(refused.value)
    if impl == "sdpa" and option in (*OF_MASK, *OF_SCORE) and option not in ("windows", "documents"):
        with pytest.raises(ValueError, match=option):  # by a call without resolve(), too
            attention(*torch.zeros(3, 1, 1, 8, 4), config)
    for other in IMPLEMENTATIONS:
        if f"use attention={other}" in str(refused.value):
            assert resolve(replace(config, impl=other), "cpu").impl == other


@pytest.mark.parametrize("name", FAILURES)
def test_where_there_is_no_gpu_none_is_advised_for_a_failure(name):
    assert "attention=triton" not in why_not("sdpa", {name: f"break_it={name}"}, "cpu")


@pytest.mark.parametrize("thing", sorted(set(ABILITIES) - set(IMPLEMENTATIONS)))
def test_whatever_else_lacks_something_says_it_in_one_line_with_the_value(thing):
    for option in ABILITIES[thing].lacks:
        why = why_not(thing, {option: f"{option}=7"})
        assert why
        assert "\n" not in why
        assert not ABILITIES[thing].lacks[option].count("{}") or f"{option}=7" in why or why_not(thing, {})


@pytest.fixture
def gpu(monkeypatch):
    """gpu(9, 0): as if a GPU of this capability were here."""
    hopper = pytest.importorskip("kernels.hopper", reason="triton is made for Linux")
    monkeypatch.setattr(hopper, "lacks_here", hopper.lacks_here.__wrapped__)  # not the cache, which other tests read

    def gpu(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")

    return gpu


@pytest.mark.parametrize(
    ("options", "more", "on_hopper", "on_turing"),
    [
        ({}, {}, "sdpa", "sdpa"),
        ({}, {"lse": True}, "triton", "tiled"),
        ({}, {"break_it": BreakIt("no_max")}, "triton", "tiled"),
        ({"order": "keys_outside"}, {}, "tiled", "tiled"),
        *(({name: value}, {}, "triton", "tiled") for name, value in OPTIONS.items()
          if name not in ("order", "autotune", "kernel")),
        ({"autotune": True}, {}, "triton", "sdpa"),
        ({"kernel": "portable"}, {}, "triton", "sdpa"),
    ],
    ids=str,
)  # fmt: skip
def test_auto_is_resolved_once_and_never_to_what_lacks_something(gpu, options, more, on_hopper, on_turing):
    auto = AttentionConfig("auto", **options)
    for capability, chosen in (((9, 0), on_hopper), ((7, 5), on_turing)):
        gpu(*capability)
        if why_not(chosen, wanted(replace(auto, impl=chosen)), "cuda"):  # nothing there can do it
            with pytest.raises(ValueError, match=r"attention\."):
                resolve(auto, "cuda", **more)
        else:
            assert resolve(auto, "cuda", **more).impl == chosen
    if not why_not("tiled", wanted(replace(auto, impl="tiled"))):
        assert resolve(auto, "cpu", **more).impl == "tiled"


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({}, "triton"),
        ({"context_length": min(HOPPER_FROM.values()) // 2}, "sdpa"),
        ({"n_head": 1, "n_kv_head": 1}, "triton"),
        ({"n_head": 1, "n_kv_head": 1, "context_length": 4096}, "sdpa"),
        ({"n_head": 4, "n_kv_head": 4}, "sdpa"),  # a head size that these kernels lack
        ({"dtype": torch.float32}, "sdpa"),
        ({"capability": (8, 0)}, "sdpa"),
    ],
    ids=str,
)
def test_auto_takes_hoppers_kernels_where_they_were_measured_to_be_faster(changed, chosen, gpu):
    given = {"context_length": 65_536, "n_head": 2, "n_kv_head": 2, "dtype": torch.bfloat16, "capability": (9, 0)}
    given |= changed
    gpu(*given.pop("capability"))
    dtype = given.pop("dtype")
    assert resolve(AttentionConfig("auto"), "cuda", model=GPTConfig(n_embd=128, **given), dtype=dtype).impl == chosen


def test_triton_where_it_cannot_run_is_refused(monkeypatch, gpu):
    from kernels import sizes

    triton = AttentionConfig("triton")

    def refused(value: str, call) -> None:
        with pytest.raises(ValueError, match=rf"^attention\.impl=triton: .*{value}.*use attention=tiled") as error:
            call()
        assert "\n" not in str(error.value)

    KINDS.clear()  # a kind is checked once
    for shape, dtype, value in (((1, 1, 8, 16), torch.float64, "float64"), ((1, 1, 8, 257), torch.float32, "257")):
        q = torch.zeros(shape, dtype=dtype)
        refused(value, lambda q=q: attention(q, q, q, triton))
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    refused("cpu", lambda: resolve(triton, "cpu"))
    refused("cpu", lambda: attention(*torch.zeros(3, 1, 1, 8, 16), triton))
    gpu(7, 5)
    with pytest.raises(ValueError, match=r"attention\.impl=triton: .*Tesla T4"):
        resolve(triton, "cuda")
    monkeypatch.setitem(sys.modules, "kernels.op", None)
    refused("kernels.op", lambda: resolve(triton, "cuda"))


def test_auto_without_resolve_and_lse_of_sdpa_are_refused():
    for impl, options, value in (("auto", {}, r"attention\.impl=auto"), ("sdpa", {"return_lse": True}, "return_lse")):
        with pytest.raises(ValueError, match=value):
            attention(*torch.zeros(3, 1, 1, 8, 4), AttentionConfig(impl), **options)


@pytest.mark.parametrize(("dropout_p", "kernel"), [(0.0, "flash"), (0.1, "math")])
def test_the_kernel_that_torch_picks_has_a_name(dropout_p, kernel):
    model = GPTConfig(n_head=4, n_kv_head=2, n_embd=128, context_length=64)
    assert sdpa_kernel(model, torch.float32, torch.device("cpu"), dropout_p) == kernel


def test_readmes_tables_are_those_of_the_table():
    implementations, options = (
        README.split(start)[1].split("\n\n")[0] for start in ("| `attention=` |", "| option | keys |")
    )
    assert re.findall(r"^\| `(\w+)`", implementations, re.M) == [*IMPLEMENTATIONS, "auto"]
    rows = [set(re.findall(r"attention\.(\w+)=", row)) for row in options.splitlines()[2:]]
    assert "sdpa has only the last two" in README
    assert set.union(*rows[:-2]) == {*OF_MASK, *OF_SCORE}
    for impl in IMPLEMENTATIONS:
        lacking = set(ABILITIES[impl].lacks) & set.union(*rows)
        assert lacking == (set.union(*rows[:-2]) if impl == "sdpa" else set())
