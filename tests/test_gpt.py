"""The model is GPT-2's, or Llama's, by its fields; causal, whatever the attention."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from lab.meter import PeakBytes
from model import recompute
from model.attention import AttentionConfig
from model.break_it import UNBROKEN
from model.dropout import keep_mask
from model.gpt import GPT, Block, Context, GPTConfig
from model.layers import LAYERS
from model.recompute import RecomputingGPT
from model.rope import rope_table, rotate
from tests.reference import error
from training.record import compiled

MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
FAMILIES = {"gpt2": {}, "modern": MODERN}


def gpt(impl: str = "naive", dropout_p: float = 0.0, stream_p: float = 0.0, **fields) -> GPT:
    """dropout_p: of attention; stream_p: of the residual stream."""
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": 64, "vocab_size": 50} | fields
    fields["dropout_p"] = stream_p
    return RecomputingGPT(GPTConfig(**fields), AttentionConfig(impl, 16, 16, dropout_p=dropout_p))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_nothing_before_itself(family):
    model = gpt("tiled", **FAMILIES[family]).eval()
    idx = torch.randint(50, (2, 40))
    changed = idx.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 50
    before, after = model(idx), model(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_chosen_changes_the_loss_by_rounding_only(family):
    idx, targets = torch.randint(50, (2, 2, 40))
    losses = [gpt(impl, **FAMILIES[family])(idx, targets).double() for impl in ("naive", "tiled", "sdpa")]
    eps = torch.finfo(torch.float32).eps
    assert max(losses) - min(losses) <= 40 * eps * max(losses)  # sums of up to 40 terms


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_on_random_tokens_is_the_logarithm_of_the_vocabulary(family):
    """Logits are sums of C products of a normed row (mean square 1) and a weight of deviation 0.02: their variance is
    C 0.02**2, which adds half of itself to ln V (the mean of a lognormal). Random targets know no repeats."""
    model = gpt(n_embd=128, vocab_size=512, **FAMILIES[family])
    idx, targets = torch.randint(512, (2, 32, 64))
    expected = math.log(512) + 0.5 * 128 * 0.02**2
    deviation = 0.02 * math.sqrt(128 / targets.numel())
    assert abs(float(model(idx, targets).detach()) - expected) < 5 * deviation


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("residual_dtype", "autocast", "stream"),
    [("float32", True, torch.float32), ("autocast", True, torch.bfloat16), ("autocast", False, torch.float32)],
)
def test_the_residual_stream_has_the_dtype_that_was_asked_for(family, residual_dtype, autocast, stream):
    model = gpt(residual_dtype=residual_dtype, **FAMILIES[family])
    seen: dict[str, set] = {"into": set(), "normed": set()}
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda _, x: seen["into"].add(x[0].dtype))
    for module in (model.norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm))):
        module.register_forward_hook(lambda _, x, y: seen["normed"].add(y.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(*torch.randint(50, (2, 2, 40)))
    assert seen == {"into": {stream}, "normed": {torch.float32}}  # a norm computes in its weights' dtype


def test_the_last_logits_are_the_whole_models_last():
    model = gpt(vocab_multiple=64).eval()
    idx = torch.randint(50, (3, 20))
    assert model(idx).shape == (3, 20, 50)  # the 14 padding rows stand for no token
    assert error(model.next_logits(idx), model(idx)[:, -1].detach().double()) <= 32 * torch.finfo(torch.float32).eps


def test_a_rotation_keeps_lengths_and_depends_on_the_distance_only():
    cos, sin = (x.double() for x in rope_table(64, 16, 10000.0, "cpu"))
    q, k = torch.randn(2, 16, dtype=torch.float64)

    def at(x, position):
        return rotate(x.float().view(1, 1, 1, 16), cos[position : position + 1], sin[position : position + 1]).double()

    eps = 16 * torch.finfo(torch.float32).eps
    assert abs(at(q, 63).norm() - q.norm()) <= eps * q.norm()
    near, far = float((at(q, 5) * at(k, 2)).sum()), float((at(q, 45) * at(k, 42)).sum())
    assert abs(near - far) <= eps * float(q.norm() * k.norm())


def test_positions_past_8192_stay_apart():
    """In bf16 the positions 8188 to 8191 all round to 8192: the table must be float32 whatever the model is."""
    cos, sin = rope_table(8193, 8, 10000.0, "cpu")
    assert cos.dtype == torch.float32
    assert len({(float(c), float(s)) for c, s in zip(cos[8186:, 0], sin[8186:, 0], strict=True)}) == 7


@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": True}], ids=str)
def test_windowed_layers_have_a_rope_base_of_their_own(fields):
    """Two local layers to one full. Without model.rope_base_local all have one base. YaRN stretches that one alone."""
    attention = AttentionConfig("naive", windows=[4, 4, None])
    size = {"n_layer": 4, "n_head": 2, "n_embd": 16, "context_length": 8, "vocab_size": 50, "rope_base": 1e6}
    yarn, given = (4.0, 2), {}
    for local, bases in ((7.0, (7.0, 7.0, 1e6, 7.0)), (None, (1e6,) * 4)):
        stretched = {"yarn_factor": yarn[0], "yarn_original": yarn[1]}
        model = RecomputingGPT(
            GPTConfig(**size, position="rope", rope_base_local=local, **stretched, **fields), attention
        )
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, inputs: given.update({block: inputs[2]}))
        model(torch.randint(50, (2, 8)))
        for block, base in zip(model.blocks, bases, strict=True):
            table = rope_table(8, 8, base, "cpu", yarn if base == 1e6 else None)
            assert all(torch.equal(a[0], b) for a, b in zip(given[block].rope, table, strict=True))


def test_a_local_base_that_no_layer_reads_is_refused():
    for position, window in (("rope", None), ("learned", 4)):
        config = GPTConfig(1, 2, None, 16, 8, 50, position=position, rope_base_local=7.0)
        with pytest.raises(ValueError, match=r"model\.rope_base_local=7\.0: no layer has both a rotary embedding and"):
            GPT(config, AttentionConfig("naive", window=window))


def test_autocast_does_not_round_the_angles():
    plain = rope_table(8193, 8, 10000.0, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, rope_table(8193, 8, 10000.0, "cpu"), strict=True))


@pytest.mark.parametrize("where", [{"dropout_p": 0.5}, {"stream_p": 0.5}], ids=str)
def test_dropout_is_drawn_anew_each_step_and_never_in_evaluation(where):
    model = gpt("tiled", **where)
    idx, targets = torch.randint(50, (2, 2, 40))
    assert model(idx, targets) != model(idx, targets)
    model.eval()
    assert torch.equal(model(idx, targets), model(idx, targets))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_stream_drops_what_the_definition_says(dropout_p):
    """Bit for bit. The embedding's mask is of the last seed; a block's seed has a mask for each of its two terms."""
    model, idx = gpt("tiled", dropout_p, stream_p=0.25), torch.randint(50, (3, 40))
    torch.manual_seed(3)
    found = model.hidden(idx)

    torch.manual_seed(3)
    seeds = torch.randint(2**63 - 1, (5 if dropout_p else 3,))
    of_attention, of_stream = (seeds[:2], seeds[2:]) if dropout_p else ([None, None], seeds)

    def factor(seed, n: int):
        """Z of the sequences n to n + 2. A quarter is 64 of 256."""
        return keep_mask(seed, n + 3, range(40), range(32), 0.25)[n:] * (256 / 192)

    x = (model.embedding(idx) + model.positions.weight[:40]) * factor(of_stream[2], 0)
    for block, seed, stream_seed in zip(model.blocks, of_attention, of_stream, strict=False):
        context = Context(None, seed, None, None)
        _, q, k, v, _ = block.before(x, None, context)
        x = x + block.attention.out(block.attend(q, k, v, context).flatten(2)) * factor(stream_seed, 0)
        _, y = LAYERS.read(block.mlp_norm, x, None, block.mlp.up, act="gelu_tanh")
        x = x + block.mlp.down(y) * factor(stream_seed, 3)
    assert torch.equal(found, model.norm(x))


FORMS = ("false", "true", "selective")


@pytest.mark.parametrize(
    ("impl", "backend"),
    [("naive", None), ("tiled", None), ("sdpa", None), ("naive", "aot_eager")],
    ids=["naive", "tiled", "sdpa", "compiled"],
)
def test_activation_checkpointing_changes_no_bit_with_dropout_in_attention_and_blocks(impl, backend):
    idx, targets = torch.randint(50, (2, 2, 40))
    found = []
    for form in FORMS[:2] if backend else FORMS:
        model = gpt(impl, 0.3, 0.1, n_layer=2, activation_checkpointing=form, **MODERN)
        step = compiled(model, partial(torch.compile, backend=backend)) if backend else model
        torch.manual_seed(7)
        losses = [step(idx, targets) for _ in range(2)]
        sum(losses).backward()
        found.append([*losses, *(p.grad for p in model.parameters())])
    assert all(same(found[0], again) for again in found[1:])


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients_of(
    form: str, attention: dict, dtype=torch.float32, T: int = 40, chunk: int | None = None, **fields
) -> list:
    """The loss and all gradients of a model with dropout. bfloat16 by autocast; float64 for the whole model."""
    low = dtype == torch.bfloat16
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": T, "vocab_size": 50, "dropout_p": 0.1} | fields
    if low:
        fields["residual_dtype"] = "autocast"
    config = GPTConfig(activation_checkpointing=form, chunk=chunk, **fields)
    model = RecomputingGPT(config, AttentionConfig(dropout_p=0.3, **attention))
    model = model.double() if dtype == torch.float64 else model
    idx, targets = torch.randint(50, (2, 2, T), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(T).expand(2, T) // 15
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(idx, targets, documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "attention",
    [
        {"window": 20, "documents": True},
        {"alibi": True, "softcap": 5.0},
        {"order": "keys_outside", "windows": [9, None]},
    ],
    ids=str,
)
def test_a_selective_checkpoint_changes_no_bit_with_any_option_of_attention(attention, dtype):
    plain, again = (
        gradients_of(form, {"impl": "tiled", "block_m": 16, "block_n": 16} | attention, dtype, n_kv_head=2)
        for form in FORMS[::2]
    )
    assert same(plain, again)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_give_the_gradients_of_the_whole_within_the_error_budget(form, dtype):
    """A weight's gradient adds up over 16 pieces. Dropout and positions are those of the whole sequence."""
    attention, T = {"impl": "naive"}, 512
    truth = gradients_of("false", attention, torch.float64, T, **MODERN)
    whole = gradients_of("false", attention, dtype, T, **MODERN)
    pieces = gradients_of(form, attention, dtype, T, chunk=32, **MODERN)
    eps = torch.finfo(dtype).eps
    for found, plain, true in zip(pieces, whole, truth, strict=True):
        assert error(found, true) <= 2 * (error(plain, true) + eps * float(true.abs().max()))


def test_gradients_of_pieces_add_up_in_float32():
    """300 pieces of 32 tokens, each with a gradient of 1. In bfloat16 the sum would stay at 8,192."""
    config = GPTConfig(n_layer=1, n_head=1, n_embd=4, context_length=9600, vocab_size=50, chunk=32)
    block = Block(config, AttentionConfig("sdpa"), UNBROKEN)
    with torch.autocast("cpu", torch.bfloat16):
        context = Context(None, None, None, None)
        recompute.in_less_memory(block, torch.randn(1, 9600, 4), context, "false", 32).sum().backward()
    assert block.mlp.down.bias.grad.tolist() == [9600] * 4


class Calls(TorchDispatchMode):
    """Counts the calls of an op."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() == self.name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize(
    ("impl", "op", "times"),
    # tiled calls its op only in a selective checkpoint
    [
        ("sdpa", "aten::_scaled_dot_product_flash_attention_for_cpu", (2, 1)),
        ("tiled", "tilegpt::tiled_forward", (0, 1)),
    ],
)
def test_a_selective_checkpoint_computes_attention_once(impl, op, times, chunk):
    for form, each in zip(("true", "selective"), times, strict=True):
        model = gpt(impl, n_layer=3, activation_checkpointing=form, chunk=chunk)
        with Calls(op) as calls:
            model(*torch.randint(50, (2, 2, 64))).backward()
        assert calls.count == 3 * each


@pytest.mark.parametrize(
    ("windows", "graphs"), [(None, 4), ([*range(10, 20), None, None], 13)], ids=["alike", "eleven kinds"]
)
def test_blocks_that_are_alike_are_compiled_once_and_none_is_left_out(windows, graphs):
    """Four graphs: the embedding, the first block, which has no addition to make, another block, and the loss."""
    found, idx = [], torch.randint(50, (2, 2, 40))
    torch._dynamo.reset()

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    torch.manual_seed(0)
    config = GPTConfig(n_layer=12, n_head=2, n_embd=16, context_length=40, vocab_size=50)
    model = GPT(config, AttentionConfig("naive", windows=windows))
    loss = compiled(model, partial(torch.compile, backend=keep, fullgraph=True))(*idx)
    assert len(found) == graphs
    assert torch.equal(loss, model(*idx))


def test_a_compiled_selective_checkpoint_computes_attention_once_and_changes_no_bit():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    found, idx = [], torch.randint(50, (2, 2, 64))
    for by_dynamo in (False, True):
        model = gpt("sdpa", 0.0, 0.1, n_layer=1, activation_checkpointing="selective", chunk=32, **MODERN)
        torch.manual_seed(7)
        loss = (torch.compile(model, backend=backend) if by_dynamo else model)(*idx)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    forwards = [sum(name == "aten._scaled_dot_product_flash_attention_for_cpu.default" for name in g) for g in graphs]
    assert forwards == [1, 0]
    assert same(*found)


def kept_by_a_layer(form: str, T: int = 40, **fields) -> int:
    """The bytes that stay after a forward, of a layer more: B = 2, C = 32, H = 4."""
    kept = []
    for n_layer in (2, 3):
        model = gpt("tiled", n_layer=n_layer, dropout_p=0.3, stream_p=0.1, activation_checkpointing=form, **fields)
        with PeakBytes() as counted:
            loss = model(*torch.randint(50, (2, 2, T)))
        kept.append(counted.alive)
        del loss
    return kept[1] - kept[0]


def test_activation_checkpointing_keeps_little_more_than_the_input_of_each_block():
    """(B, T, C) and the two seeds, which two layers' share of one tensor each; selective also o, and lse (B, H, T)."""
    stream, lse, seeds = 2 * 40 * 32 * 4, 2 * 4 * 40 * 4, 16
    assert kept_by_a_layer("true") <= stream + seeds
    assert kept_by_a_layer("selective") <= 2 * stream + lse + seeds
    assert kept_by_a_layer("selective", chunk=32) <= 2 * stream + lse + seeds


@pytest.mark.parametrize("form", FORMS)
def test_in_pieces_only_a_piece_of_the_hidden_layer_is_in_memory(form):
    """Of 8,192 wide, at T = 512: 16 MiB, and two to three of them in the backward."""
    peaks = []
    for chunk in (None, 32):
        model = gpt("sdpa", context_length=512, mlp_hidden=8192, activation_checkpointing=form, chunk=chunk)
        with PeakBytes() as counted:
            model(*torch.randint(50, (2, 1, 512))).backward()
        weights = sum(p.numel() for p in model.parameters()) * 4
        peaks.append(counted.peak - weights)  # their gradients
    assert peaks[0] > 32 * 2**20
    assert peaks[1] < peaks[0] / 4


def test_one_seed_gives_naive_and_tiled_the_same_dropout():
    losses = []
    idx, targets = torch.randint(50, (2, 2, 40), generator=torch.Generator().manual_seed(1))
    for impl in ("naive", "tiled"):
        model = gpt(impl, dropout_p=0.5, n_layer=3)
        torch.manual_seed(7)
        losses.append(float(model(idx, targets)))
    assert abs(losses[0] - losses[1]) <= 40 * torch.finfo(torch.float32).eps * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_count_each_multiplying_weight_and_the_keys_seen(family):
    """Against torch's own counter, which counts the operations that run."""
    from torch.utils.flop_counter import FlopCounterMode

    T = 64
    model = gpt("naive", **FAMILIES[family])
    idx = torch.randint(50, (1, T))
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    # naive multiplies the hidden half of the scores too: 6 L C T / 2 more a token than is counted; and norms, biases
    # and the embedding's look-up are no products.
    naive_extra = 6 * 2 * 32 * T
    not_products = 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() / T == model.flops_per_token(T) + naive_extra - not_products


def test_flops_of_a_window_count_the_keys_in_it():
    """Layer by layer, against the keys counted one by one, a row's own key at half as PaLM's T / 2 has it."""
    T, w = 64, 16
    full = gpt()
    windowed = GPT(full.config, AttentionConfig("naive", windows=[w, None]))
    keys = sum((min(i, w) + min(i + 1, w)) / 2 for i in range(T)) / T
    assert windowed.flops_per_token(T) == full.flops_per_token(T) - 12 * 32 * (T / 2 - keys)


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_with_documents_a_token_changes_nothing_outside_its_own(position):
    model = GPT(
        GPTConfig(n_layer=2, n_head=4, n_embd=32, context_length=64, vocab_size=50, position=position),
        AttentionConfig("tiled", 16, 16, documents=True),
    ).eval()
    idx = torch.randint(50, (2, 40))
    documents = torch.tensor([[7] * 15 + [8] * 25, [0] * 30 + [1] * 10])
    changed = idx.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 50
    before, after = (model.hidden(x, documents) for x in (idx, changed))
    assert torch.equal(before[0, 15:], after[0, 15:])
    assert torch.equal(before[1, 30:], after[1, 30:])
    assert not torch.equal(before[1, 15:30], after[1, 15:30])


def test_documents_are_left_aside_where_the_configuration_does_not_ask_for_them():
    idx = torch.randint(50, (1, 40))
    documents = torch.tensor([[0] * 20 + [1] * 20])
    model = gpt("tiled").eval()
    assert torch.equal(model.hidden(idx, documents), model.hidden(idx))


def test_without_positions_only_alibi_tells_the_order_of_the_past():
    """The last row of a single layer without positions sums over a set: swap two earlier tokens and it stays, but for
    rounding; with alibi it does not."""
    change = {}
    for alibi in (False, True):
        torch.manual_seed(0)
        config = GPTConfig(n_layer=1, n_head=4, n_embd=32, context_length=64, vocab_size=50, position="none")
        model = GPT(config, AttentionConfig("tiled", 16, 16, alibi=alibi)).eval()
        idx = torch.arange(40)[None]
        swapped = idx.clone()
        swapped[0, [3, 30]] = swapped[0, [30, 3]]
        change[alibi] = error(model.hidden(idx)[0, -1], model.hidden(swapped)[0, -1].detach().double())
    assert change[False] <= 40 * torch.finfo(torch.float32).eps
    assert change[True] > 1000 * torch.finfo(torch.float32).eps


def test_parameter_counts_of_the_presets():
    sizes = {}
    for path in sorted((Path(__file__).parents[1] / "conf/model").glob("*.yaml")):
        vocab_size = 257 if "nano" in path.stem else 50257
        with torch.device("meta"):
            model = GPT(GPTConfig(**yaml.safe_load(path.read_text()), vocab_size=vocab_size), AttentionConfig("naive"))
        sizes[path.stem] = model.parameter_count()
    assert sizes["gpt2"] == 124_439_808 + 47 * 768  # GPT-2's published size, and 47 rows to a round number
    assert sizes["gpt2-medium"] == 354_823_168 + 47 * 1024
    assert sizes["gpt2-xl"] == 1_557_611_200 + 47 * 1600
    assert sizes["nano-gpt2"] == 859_008
    assert 0.7e6 < sizes["nano"] < 0.9e6
    assert 100e6 < sizes["modern-124m"] < 130e6
    assert sizes["gpt2-d128"] == sizes["gpt2"]
    assert sizes["modern-d128"] == sizes["modern-124m"]


# --- against Hugging Face's models -----------------------------------------------------------------------------------


def load_from_gpt2(model: GPT, theirs) -> None:
    """Hugging Face's GPT-2 keeps its linear layers transposed (Conv1D); otherwise the names map one to one."""
    weights = {
        "embedding.weight": theirs.wte.weight,
        "positions.weight": theirs.wpe.weight,
        "head.weight": theirs.wte.weight,
    }
    parts = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i, block in enumerate(theirs.h):
        for ours, name in parts.items():
            part = block.get_submodule(name)
            weights[f"blocks.{i}.{ours}.weight"] = part.weight.T if part.weight.dim() == 2 else part.weight
            weights[f"blocks.{i}.{ours}.bias"] = part.bias
    weights |= {"norm.weight": theirs.ln_f.weight, "norm.bias": theirs.ln_f.bias}
    model.load_state_dict(weights)


def load_from_llama(model: GPT, theirs) -> None:
    weights = {"embedding.weight": theirs.embed_tokens.weight, "norm.weight": theirs.norm.weight}
    parts = {
        "attention_norm": "input_layernorm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.up_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
    }
    for i, layer in enumerate(theirs.layers):
        for ours, name in parts.items():
            weights[f"blocks.{i}.{ours}.weight"] = layer.get_submodule(name).weight
        qkv = [layer.get_submodule(f"self_attn.{x}_proj").weight for x in "qkv"]
        weights[f"blocks.{i}.attention.qkv.weight"] = torch.cat(qkv)
    weights["head.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)


def assert_same_logits(ours: GPT, theirs: torch.nn.Module) -> None:
    """Both in float64: what remains is rounding, 2 layers of sums of some hundred terms."""
    idx = torch.randint(50, (2, 64))
    with torch.no_grad():
        expected = theirs(idx).logits
        assert error(ours(idx), expected) <= 1000 * torch.finfo(torch.float64).eps * float(expected.abs().max())


def test_the_gpt2_family_is_gpt2():
    import transformers  # here, because it takes two seconds

    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    ).double().eval()  # fmt: skip
    ours = gpt().double().eval()
    load_from_gpt2(ours, theirs.transformer)
    assert_same_logits(ours, theirs)


def test_the_modern_family_is_llama():
    import transformers

    ours = gpt(**MODERN, norm_eps=1e-6).eval()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=ours.blocks[0].mlp.up.out_features, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    load_from_llama(ours, theirs.model)
    idx = torch.randint(50, (2, 64))
    with torch.no_grad():
        expected = theirs(idx).logits
        # float32, as both compute the rotation in it: sums of some hundred terms
        assert error(ours(idx), expected.double()) <= 1000 * torch.finfo(torch.float32).eps * float(
            expected.abs().max()
        )


def test_a_model_without_numbers_takes_neither_memory_nor_torch_dynamo():
    """Whose import took a second of every start."""
    code = """
import sys
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig, without_numbers
with without_numbers():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=2**20, vocab_size=2**30), AttentionConfig("naive"))
assert {p.device.type for p in model.parameters()} == {"meta"}
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
