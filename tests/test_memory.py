"""The memory of a step that training/memory.py counts is the memory that a step takes; auto picks by it."""

from dataclasses import replace

import pytest
import torch

import train
from lab.meter import PeakBytes
from model.attention import AttentionConfig
from model.gpt import GPTConfig
from model.recompute import RecomputingGPT
from training.memory import COMPILED, FITS, PIECE, bytes_of, fastest, settle

GPT2 = GPTConfig(n_embd=48, n_layer=3, n_head=3, vocab_size=16, context_length=4096, position="none")
FAMILIES = {
    "gpt2": GPT2,
    "gpt2-dropout": replace(GPT2, dropout_p=0.1),
    "modern": replace(GPT2, position="rope", norm="rmsnorm", mlp="swiglu", bias=False),
}


def measured(model: GPTConfig, impl: str, batch_size: int, low: bool) -> int:
    """The peak of a forward and backward, with the weights and AdamW's state, in bytes."""
    torch.manual_seed(0)
    network = RecomputingGPT(model, AttentionConfig(impl))
    idx = torch.randint(16, (2, batch_size, model.context_length))
    with PeakBytes() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = network(*idx)
        loss.backward()
    return counted.peak + 12 * network.parameter_count()


def counted(model: GPTConfig, impl: str, low: bool) -> int:
    return bytes_of(model, AttentionConfig(impl), 1, "bf16" if low else "float32", ema=False, norm_kernel=False)


CASES = [("false", None), ("true", None), ("selective", None), ("selective", 256), ("true", 256), ("false", 256)]


@pytest.mark.parametrize(("form", "chunk"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
def test_the_memory_counted_is_that_of_a_step_within_15_percent(family, form, chunk, low):
    """Of sdpa with as many key heads as heads: on a CPU it would repeat the key heads."""
    model = replace(FAMILIES[family], activation_checkpointing=form, chunk=chunk)
    if low:
        model = replace(model, residual_dtype="autocast")
    assert counted(model, "sdpa", low) == pytest.approx(measured(model, "sdpa", 1, low), rel=0.15)


@pytest.mark.parametrize(("form", "chunk"), CASES)
def test_a_layer_more_takes_what_is_counted_for_it(form, chunk):
    """Within 12 %. At the peak some gradients of the weights are not there yet."""
    found = []
    for n_layer in (2, 4):
        model = replace(FAMILIES["modern"], n_layer=n_layer, activation_checkpointing=form, chunk=chunk)
        found.append((counted(model, "sdpa", True), measured(model, "sdpa", 1, True)))
    (a, measured_a), (b, measured_b) = found
    assert b - a == pytest.approx(measured_b - measured_a, rel=0.12)


@pytest.mark.parametrize("form", ["false", "true"])
def test_the_memory_counted_of_naive_attention_is_that_of_a_step_within_20_percent(form):
    model = replace(GPT2, context_length=512, activation_checkpointing=form)
    assert counted(model, "naive", True) == pytest.approx(measured(model, "naive", 1, True), rel=0.2)


LONG = GPTConfig(context_length=2**20, vocab_size=50257, position="rope", residual_dtype="autocast")


def size_of(form: str, chunk: int | None, impl: str = "triton", model: GPTConfig = LONG) -> float:
    """GiB of a step."""
    model = replace(model, activation_checkpointing=form, chunk=chunk)
    return bytes_of(model, AttentionConfig(impl), 1, "bf16", ema=False) / 2**30


def chosen(free_gib: float, impl: str = "triton", model: GPTConfig = LONG) -> tuple[str, int | None, str]:
    """What auto makes of a model, GPT-2 at 1,048,576 tokens, on a GPU with so much free memory."""
    model, why = fastest(int(free_gib * 2**30), model, AttentionConfig(impl), 1, "bf16", ema=False)
    return model.activation_checkpointing, model.chunk, why


def more(form: str) -> float:
    return 1.0 if form == "false" else COMPILED


def test_auto_picks_the_fastest_that_fits_and_says_why():
    forms = [("false", None), ("selective", None), ("selective", PIECE), ("true", PIECE)]
    sizes = {form: size_of(*form) for form in forms}
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    for (form, chunk), size in sizes.items():
        found = chosen(size * more(form) / FITS * 1.001)
        assert found[:2] == (form, chunk)
        assert f"{form}{f' with model.chunk={chunk}' if chunk else ''} (auto: about {size:.1f} GiB of " in found[2]
        assert "may not fit" not in found[2]
        assert chosen(size * more(form))[:2] != (form, chunk) or (form, chunk) == (
            "true",
            PIECE,
        )  # too close: nothing is left
    assert "; false takes" in chosen(sizes["selective", None] * COMPILED / FITS * 1.001)[2]
    smallest = chosen(0.1)
    assert smallest[:2] == ("true", PIECE)
    assert "of 0.1 free, which may not fit; selective takes" in smallest[2]


def test_the_backward_for_hopper_holds_sums_of_dq():
    """In float32: all of them, 512 MiB, or those of the heads that share a key head."""
    pytest.importorskip("triton", reason="triton is made for Linux")
    for T, H_kv, sums in ((2**16, 12, 4 * 12 * 2**16 * 64), (2**20, 12, 2**29), (2**20, 2, 6 * 2**28)):
        model = replace(LONG, vocab_size=257, context_length=T, n_kv_head=H_kv, activation_checkpointing="selective")
        without, held = (bytes_of(model, AttentionConfig("triton"), 1, "bf16", False, hopper=x) for x in (False, True))
        assert held - without == sums


def test_auto_never_picks_what_an_attention_does_not_have_and_keeps_a_chunk_that_was_given():
    short = replace(LONG, context_length=4096)
    fits = size_of("selective", None, "naive", short) / FITS * 1.001
    assert [chosen(free, "naive", short)[0] for free in (0.1, fits, 1e4)] == ["true", "true", "false"]
    assert chosen(1e4, model=replace(LONG, chunk=4096))[:2] == ("false", 4096)
    assert chosen(0.1, model=replace(LONG, chunk=4096))[:2] == ("true", 4096)


def test_without_a_gpu_auto_computes_nothing_again_and_what_is_no_auto_stays():
    attention, cpu = AttentionConfig("tiled"), torch.device("cpu")
    found, why = settle(replace(GPT2, activation_checkpointing="auto"), attention, 1, "float32", cpu, ema=False)
    assert found == GPT2
    assert why.startswith("activation checkpointing: false (auto counts the memory of a CUDA GPU")
    asked = replace(GPT2, activation_checkpointing="selective")
    assert settle(asked, attention, 1, "float32", cpu, ema=False) == (asked, "")


def test_a_run_says_what_auto_chose_and_keeps_auto_in_its_configuration(call, small, tmp_path):
    ended = call(train, *small, "steps=1", f"runs={tmp_path}", "name=a", "model.activation_checkpointing=auto")
    assert "\nactivation checkpointing: false (auto counts" in ended.out
    assert "activation_checkpointing: auto" in (tmp_path / "a/config.yaml").read_text(encoding="utf-8")
