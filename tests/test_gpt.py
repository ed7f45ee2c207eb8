"""The model is GPT-2's, or Llama's, by its fields. It is causal whatever the attention, and computing blocks again or
compiling them changes no bit."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model import tiled
from model.attention import AttentionConfig
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, MLP, Attention, GPTConfig, rope_table, rotate
from tests.reference import assert_float64_right, assert_within_budget, error

MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2, "qk_norm": True}
MODERN |= {"bigram_rows": 40, "mix_x0": True}
FAMILIES = {"gpt2": {}, "modern": MODERN}
families = pytest.mark.parametrize("family", FAMILIES)


def gpt(impl: str = "naive", of_attention: dict | None = None, break_it: BreakIt = UNBROKEN, **fields) -> GPT:
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": 64, "vocab_size": 50} | fields
    of_attention = {"impl": impl, "block_m": 16, "block_n": 16} | (of_attention or {})
    model = GPT(GPTConfig(**fields), AttentionConfig(**of_attention), break_it)
    if model.bigrams is not None:  # from zero it would hide a wrong row
        torch.nn.init.normal_(model.bigrams.table.weight)
    return model


# --- what a token sees -----------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("documents", [False, True])
def test_a_token_changes_nothing_before_itself_and_outside_its_document(family, documents):
    """Document numbers count only if attention.documents is on."""
    model = gpt("tiled", {"documents": documents}, **FAMILIES[family]).eval()
    idx = torch.randint(50, (2, 40))
    numbers = torch.tensor([[7] * 15 + [8] * 25, [0] * 30 + [1] * 10])
    changed = idx.clone()
    changed[:, [3, 14]] += 1
    changed %= 50
    same = (model.hidden(idx, numbers) == model.hidden(changed, numbers)).all(-1)
    assert same[:, :3].all()
    assert not same[:, 3:15].any()
    assert (same[0, 15:] == documents).all()
    assert not same[1, 15:30].any()
    assert (same[1, 30:] == documents).all()


def test_each_block_has_its_own_window():
    """A token is seen 3 tokens on after the first block, 4 after the second, and so on."""
    model = gpt("tiled", {"windows": [4, 2]}, n_layer=3).eval()
    idx = torch.randint(50, (1, 40))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, x: streams.append(x))
    model.hidden(idx), model.hidden(changed)
    for before, after, last in zip(streams[:3], streams[3:], (13, 14, 17), strict=True):
        differ = (before != after).any(-1)[0].nonzero().flatten().tolist()
        assert differ == list(range(10, last + 1))


# --- its parts -------------------------------------------------------------------------------------------------------


@families
def test_the_first_weights_are_normal_of_002_and_smaller_where_a_matrix_adds_to_the_stream(family):
    """The standard error of n numbers is sigma / sqrt(2 n) in their deviation and sigma / sqrt(n) in their mean."""
    fields = FAMILIES[family] | {"bigram_rows": 0, "mix_x0": False, "tie_head": family == "gpt2"}
    for name, p in gpt(n_embd=64, vocab_size=300, **fields).named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float("norm.weight" in name))), name
            continue
        sigma = 0.02 / math.sqrt(2 * 2) if name.endswith((".out.weight", ".down.weight")) else 0.02
        assert abs(float(p.detach().std()) / sigma - 1) < 5 / math.sqrt(2 * p.numel()), name
        assert abs(float(p.detach().mean())) < 5 * sigma / math.sqrt(p.numel()), name


def test_x0_is_the_embedding_to_which_a_new_table_of_bigrams_adds_nothing():
    size = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": 64, "vocab_size": 50, "position": "none"}
    model, idx = GPT(GPTConfig(**size, bigram_rows=40, mix_x0=True), AttentionConfig("naive")), torch.arange(9)[None]
    model.blocks[1].mix.data = torch.tensor([0.0, 1.0])
    model.blocks[1].attention_norm.register_forward_hook(lambda _, x, y: torch.testing.assert_close(x[0], x0))
    x0 = model.embedding(idx)
    model.hidden(idx)


@families
def test_the_loss_is_the_cross_entropy_of_the_logits_and_begins_near_ln_v(family):
    model, (idx, targets) = gpt(**FAMILIES[family]).double(), torch.randint(50, (2, 4, 64))
    loss, logits = model(idx, targets), model(idx)
    assert_float64_right({"loss": loss}, {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}, terms=50)
    # Logits have a deviation of about 0.02 sqrt(32). It adds half its square; and five standard errors of 256 targets.
    sigma = 0.02 * math.sqrt(32)
    assert abs(float(loss) - math.log(50)) < sigma**2 / 2 + 5 * sigma / math.sqrt(256)


def test_rope_turns_a_position_by_powers_of_the_base():
    """In complex numbers. The budget is that of NumPy's float32."""
    angles = {}
    for dtype in (np.float32, np.float64):
        powers = dtype(500.0) ** (-np.arange(0, 16, 2, dtype=dtype) / dtype(16))
        angles[dtype] = torch.tensor(np.outer(np.arange(64, dtype=dtype), powers))
    rope, x = rope_table(torch.arange(64), 16, 500.0), torch.randn(1, 1, 64, 16)
    turned = {}
    for dtype, angle in angles.items():
        a, b = x.to(angle.dtype).chunk(2, dim=-1)
        z = torch.complex(a, b) * torch.exp(1j * angle)
        turned[dtype] = {"x": torch.cat((z.real, z.imag), -1)}
    assert_within_budget({"x": rotate(x, rope)}, turned[np.float32], turned[np.float64])


def test_positions_past_8192_stay_apart_under_autocast_too():
    """In bf16 the positions 8188 to 8191 all round to 8192."""
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rope_table(torch.arange(8193), 8, 10000.0)
    assert cos.dtype == torch.float32
    assert len({(float(c), float(s)) for c, s in zip(cos[8186:, 0], sin[8186:, 0], strict=True)}) == 7


def test_q_and_k_are_normed_head_by_head_before_they_are_turned():
    """Under GQA. Attention by the formulas, in float64."""
    torch.manual_seed(0)
    config = GPTConfig(n_embd=24, n_head=3, n_kv_head=1, position="rope", qk_norm=True, norm_eps=0.01)
    layer = Attention(config, AttentionConfig("naive"), UNBROKEN).double()
    layer.q_norm.weight.data.normal_(), layer.k_norm.weight.data.normal_()
    x, rope = torch.randn(2, 5, 24, dtype=torch.float64), rope_table(torch.arange(5), 8, 100.0)
    q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in layer.qkv(x).split([24, 8, 8], dim=-1))
    q, k = (
        y / (y.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight
        for y, weight in ((q, layer.q_norm.weight), (k, layer.k_norm.weight))
    )
    q, k = (
        torch.cat((a * rope[0] - b * rope[1], b * rope[0] + a * rope[1]), -1)
        for a, b in (q.chunk(2, -1), k.chunk(2, -1))
    )
    s = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    right = layer.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
    # rotate() rounds q and k to float32, and a result is a sum of 24 products.
    assert error(layer(x, rope), right) <= 24 * torch.finfo(torch.float32).eps * float(right.abs().max())


ACTIVATIONS = {
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_mlp_is_its_formula(kind):
    torch.manual_seed(0)
    mlp, x = MLP(GPTConfig(n_embd=24, n_head=2, mlp=kind)).double(), torch.randn(5, 24, dtype=torch.float64)
    up, gated = x @ mlp.up.weight.T + mlp.up.bias, kind == "swiglu"
    hidden = ACTIVATIONS[kind](x @ mlp.gate.weight.T + mlp.gate.bias) * up if gated else ACTIVATIONS[kind](up)
    right = hidden @ mlp.down.weight.T + mlp.down.bias
    assert up.shape[1] == (64 if gated else 96)  # 8/3 of the width, up to a multiple of 64; 4 times the width
    assert_float64_right({"y": mlp(x)}, {"y": right}, terms=96)


@families
@pytest.mark.parametrize(
    ("residual_dtype", "autocast", "stream"),
    [("float32", True, torch.float32), ("autocast", True, torch.bfloat16), ("autocast", False, torch.float32)],
)
def test_the_residual_stream_has_the_dtype_that_was_asked_for(family, residual_dtype, autocast, stream):
    model, seen = gpt(residual_dtype=residual_dtype, **FAMILIES[family]), set()
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(*torch.randint(50, (2, 2, 40)))
    assert seen == {stream}


@pytest.mark.parametrize("of", ["stream", "attention"])
def test_dropout_acts_in_training_only_and_by_torchs_random_state(of):
    model = gpt("tiled", {"dropout_p": 0.5 * (of == "attention")}, dropout_p=0.5 * (of == "stream"))
    idx, found = torch.randint(50, (2, 40)), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.hidden(idx))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    model.eval()
    assert torch.equal(model.hidden(idx), model.hidden(idx))


# --- computed again, compiled ----------------------------------------------------------------------------------------


def gradients(recompute: str, attention: dict, low: bool = False, through=lambda model: None, **fields) -> list[Tensor]:
    """The loss and all gradients of a step with dropout. low: under autocast, with a bf16 stream."""
    fields |= {"recompute": recompute, "residual_dtype": "autocast" if low else "float32"}
    model = gpt(of_attention={"dropout_p": 0.3} | attention, **{"dropout_p": 0.1} | fields)
    through(model)
    idx, targets = torch.randint(50, (2, 2, 40), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(40).expand(2, 40) // 15
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(idx, targets, documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


AGAIN = [  # recompute, bf16, attention, model
    ("true", False, {"impl": "naive"}, MODERN),
    ("true", True, {"impl": "sdpa"}, MODERN),
    ("selective", False, {"impl": "sdpa"}, MODERN),
    ("true", False, {"impl": "sdpa"}, {"dropout_p": 0.0}),
    ("true", True, {"impl": "tiled"}, MODERN),
    ("selective", True, {"impl": "tiled", "window": 20, "documents": True}, {"n_kv_head": 2}),
    ("selective", False, {"impl": "tiled", "alibi": True, "softcap": 5.0, "windows": [9, None]}, {}),
]


@pytest.mark.parametrize(("form", "low", "attention", "fields"), AGAIN, ids=str)
def test_recomputed_blocks_have_the_same_bits(form, low, attention, fields):
    """With dropout in attention and in the stream."""
    plain, again = (gradients(one, attention, low, **fields) for one in ("false", form))
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


@pytest.mark.parametrize(("form", "times"), [("false", 1), ("selective", 1), ("true", 2)])
def test_selective_does_not_compute_attention_again(form, times, monkeypatch):
    calls, forward = [], tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *given: calls.append(1) or forward(*given))
    gradients(form, {"impl": "tiled"})
    assert len(calls) == 2 * times


@pytest.mark.parametrize("form", ["false", "selective"])
def test_compiled_blocks_give_the_same_loss_and_gradients(form):
    """By aot_eager, which traces the backward as inductor does but keeps torch's own operations."""

    def by_block(model: GPT) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)

    torch.compiler.reset()
    impl = {"impl": "tiled", "window": 20, "dropout_p": 0.0}
    fields = MODERN | {"mix_x0": False}  # the gradients of x0 are added up in another order
    plain, compiled = (gradients(form, impl, through=way, **fields) for way in (lambda model: None, by_block))
    assert all(torch.equal(x, y) for x, y in zip(plain, compiled, strict=True))


# --- sizes -----------------------------------------------------------------------------------------------------------


@families
def test_flops_count_each_multiplying_weight_and_the_keys_seen(family):
    """Against torch's own counter."""
    T, model = 64, gpt("naive", **FAMILIES[family])
    idx = torch.randint(50, (1, T))
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    # naive multiplies the hidden half of the scores too: 6 L C T a token more. Norms and biases are no products.
    naive_extra, no_products = 6 * 2 * 32 * T, 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() / T == model.flops_per_token(T) + naive_extra - no_products


def test_flops_of_a_window_count_the_keys_in_it():
    """Layer by layer, against the keys counted one by one; a row's own key counts half, as in PaLM's T / 2."""
    T, w = 64, 16
    keys = sum((min(i, w) + min(i + 1, w)) / 2 for i in range(T)) / T
    windowed = gpt(of_attention={"windows": [w, None]})
    assert windowed.flops_per_token(T) == gpt().flops_per_token(T) - 12 * 32 * (T / 2 - keys)


def test_parameter_counts_of_the_presets():
    sizes = {}
    for path in sorted((Path(__file__).parents[1] / "conf/model").glob("*.yaml")):
        config = GPTConfig(**yaml.safe_load(path.read_text()), vocab_size=257 if "nano" in path.stem else 50257)
        with torch.device("meta"):
            sizes[path.stem] = GPT(config, AttentionConfig("naive")).parameter_count()
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-xl": 1_557_611_200}
    assert {name: sizes[name] for name in published} == published
    assert 100e6 < sizes["modern-124m"] < 130e6


@pytest.mark.parametrize(("fields", "named"), [
    ({"n_head": 5}, "n_head=5"), ({"n_kv_head": 3}, "n_kv_head=3"), ({"n_head": 32, "position": "rope"}, "is odd"),
    ({"mlp": "relu"}, "relu"), ({"context_length": 63}, "64 tokens"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        gpt("naive", **fields)(torch.zeros(1, 64, dtype=torch.int64))
