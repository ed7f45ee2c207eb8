"""The memory of a step that training/memory.py counts is the memory that a step takes; auto picks by it."""

from dataclasses import replace

import pytest
import torch

from lab.meter import PeakBytes
from model.attention import AttentionConfig
from model.gpt import GPTConfig
from model.recompute import RecomputingGPT
from training.memory import COMPILED, FITS, PIECE, bytes_of, fastest, settle, step_on_cpu

GPT2 = GPTConfig(n_embd=48, n_layer=3, n_head=3, vocab_size=16, context_length=2048, position="none")
FAMILIES = {
    "gpt2": GPT2,
    "gpt2-dropout": replace(GPT2, dropout_p=0.1),
    "modern": replace(GPT2, position="rope", norm="rmsnorm", mlp="swiglu", bias=False),
    "qk_norm": replace(GPT2, position="rope", norm="rmsnorm", mlp="relu2", qk_norm=True),
}
FORMS = [("false", None), ("true", None), ("selective", None), ("selective", 256), ("true", 256), ("false", 256)]


def cases() -> list:
    """Of form, family and dtype every two are in some case together; each form is in one that is not slow."""
    found = []
    for i, form in enumerate(FORMS):
        for at, family in enumerate(FAMILIES):
            marks = [pytest.mark.slow] * (at != (i + i // 2) % 4)
            found.append(pytest.param(*form, family, (i + at) % 2 == 1, marks=marks))
    return found


def measured(model: GPTConfig, impl: str, low: bool) -> int:
    """The peak of a forward and backward, with the weights and AdamW's state, in bytes."""
    network = RecomputingGPT(model, AttentionConfig(impl))
    idx = torch.randint(16, (2, 1, model.context_length))
    with PeakBytes() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = network(*idx)
        loss.backward()
    return counted.peak + 12 * network.parameter_count()


def counted(model: GPTConfig, impl: str, low: bool) -> int:
    return bytes_of(model, AttentionConfig(impl), 1, "bf16" if low else "float32", ema=False, norm_kernel=False)


@pytest.mark.parametrize(("form", "chunk", "family", "low"), cases())
def test_the_memory_counted_is_that_of_a_step_within_15_percent(form, chunk, family, low):
    """Of sdpa with as many key heads as heads: on a CPU it would repeat the key heads."""
    model = replace(FAMILIES[family], activation_checkpointing=form, chunk=chunk)
    model = replace(model, residual_dtype="autocast") if low else model
    assert counted(model, "sdpa", low) == pytest.approx(measured(model, "sdpa", low), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "chunk"), FORMS)
def test_a_layer_more_takes_what_is_counted_for_it(form, chunk):
    """Within 12 %. At the peak some gradients of the weights are not there yet."""
    model = replace(FAMILIES["modern"], activation_checkpointing=form, chunk=chunk, context_length=4096)
    of_2, of_4 = replace(model, n_layer=2), replace(model, n_layer=4)
    found = counted(of_4, "sdpa", True) - counted(of_2, "sdpa", True)
    assert found == pytest.approx(measured(of_4, "sdpa", True) - measured(of_2, "sdpa", True), rel=0.12)


@pytest.mark.parametrize("form", ["false", "true"])
def test_the_memory_counted_of_naive_attention_is_that_of_a_step_within_20_percent(form):
    model = replace(GPT2, context_length=512, activation_checkpointing=form)
    assert counted(model, "naive", True) == pytest.approx(measured(model, "naive", True), rel=0.2)


# --- auto -----------------------------------------------------------------------------------------------------------

LONG = GPTConfig(context_length=2**20, vocab_size=50257, position="rope", residual_dtype="autocast")


def size_of(form: str, chunk: int | None, impl: str = "triton", model: GPTConfig = LONG) -> float:
    """GiB of a step."""
    model = replace(model, activation_checkpointing=form, chunk=chunk)
    return bytes_of(model, AttentionConfig(impl), 1, "bf16", ema=False) / 2**30


def chosen(free_gib: float, impl: str = "triton", model: GPTConfig = LONG) -> tuple[str, int | None, str]:
    """What auto makes of a model, GPT-2 at 1,048,576 tokens, on a GPU with so much free memory."""
    model, why = fastest(int(free_gib * 2**30), model, AttentionConfig(impl), batch_size=1, dtype="bf16", ema=False)
    return model.activation_checkpointing, model.chunk, why


def test_auto_picks_the_fastest_that_fits_and_says_why():
    forms = [("false", None), ("selective", None), ("selective", PIECE), ("true", PIECE)]
    sizes = [size_of(*form) for form in forms]
    assert sorted(sizes, reverse=True) == sizes
    for i, (form, size) in enumerate(zip(forms, sizes, strict=True)):
        size_at_most = size * (COMPILED if i else 1.0)
        *found, why = chosen(size_at_most / FITS * 1.001)
        assert tuple(found) == form
        assert f"{size:.1f} GiB" in why
        assert "may not fit" not in why
        assert i == 0 or f"{sizes[i - 1]:.1f}" in why  # what the faster one takes
        assert i == 3 or chosen(size_at_most)[:2] != form  # too close: nothing is left
    *smallest, why = chosen(0.1)
    assert tuple(smallest) == forms[-1]
    assert "may not fit" in why


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


def test_without_a_gpu_auto_computes_nothing_again_and_what_is_no_auto_stays(small_run, tmp_path):
    asked = replace(GPT2, activation_checkpointing="selective")
    assert settle(asked, AttentionConfig("tiled"), 1, "float32", torch.device("cpu"), ema=False) == (asked, "")
    assert "\nactivation checkpointing: false (auto" in small_run("steps=1 model.activation_checkpointing=auto").out
    assert "activation_checkpointing: auto" in (tmp_path / "x/config.yaml").read_text(encoding="utf-8")


def test_a_step_on_cpus_counts_its_batches_and_all_ranks_of_the_machine(monkeypatch):
    size = GPTConfig(n_layer=1, n_head=1, n_embd=32, context_length=64, vocab_size=9, activation_checkpointing="auto")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, three = (step_on_cpu(size, AttentionConfig("tiled"), 2, passes, "float32", False, 1) for passes in (1, 3))
    assert three - one == 2 * 16 * 2 * 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert step_on_cpu(size, AttentionConfig("tiled"), 2, 1, "float32", False, 1) == 2 * one
