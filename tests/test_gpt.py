"""The model is GPT-2's, or Llama's, by its fields; causal, whatever the attention."""

import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func

from lab.meter import Operations
from model import recompute
from model.attention import AttentionConfig
from model.break_it import UNBROKEN
from model.dropout import keep_mask
from model.gpt import GPT, Block, Context, GPTConfig
from model.layers import LAYERS
from model.recompute import RecomputingGPT
from model.rope import rope_table
from tests.reference import error
from training.record import compiled

MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2, "qk_norm": True}
FAMILIES = {"gpt2": {}, "modern": MODERN}


def gpt(impl: str = "naive", dropout_p: float = 0.0, stream_p: float = 0.0, of_attention=None, **fields) -> GPT:
    """dropout_p: of attention; stream_p: of the residual stream."""
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": 64, "vocab_size": 50} | fields
    fields["dropout_p"] = stream_p
    of_attention = {"impl": impl, "block_m": 16, "block_n": 16, "dropout_p": dropout_p} | (of_attention or {})
    return RecomputingGPT(GPTConfig(**fields), AttentionConfig(**of_attention))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("documents", [False, True])
def test_a_token_changes_nothing_before_itself_and_outside_its_document(family, documents):
    """Where the configuration does not ask for documents they are left aside."""
    model = gpt("tiled", of_attention={"documents": documents}, **FAMILIES[family]).eval()
    idx = torch.randint(50, (2, 40))
    numbers = torch.tensor([[7] * 15 + [8] * 25, [0] * 30 + [1] * 10])
    changed = idx.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 50
    before, after = (model.hidden(x, numbers) for x in (idx, changed))
    assert documents or torch.equal(before, model.hidden(idx))
    same = (before == after).all(-1)
    assert same[:, :3].all()
    assert not same[:, 3:15].any()
    assert (same[0, 15:] == documents).all()
    assert not same[1, 15:30].any()
    assert (same[1, 30:] == documents).all()


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


def test_positions_past_8192_stay_apart_under_autocast_too():
    """In bf16 the positions 8188 to 8191 all round to 8192: the table must be float32 whatever the model is."""
    plain = rope_table(8193, 8, 10000.0, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rope_table(8193, 8, 10000.0, "cpu")
    assert torch.equal(torch.stack(plain), torch.stack((cos, sin)))
    assert cos.dtype == torch.float32
    assert len({(float(c), float(s)) for c, s in zip(cos[8186:, 0], sin[8186:, 0], strict=True)}) == 7


def test_windowed_layers_have_a_rope_base_of_their_own():
    """Two local layers to one full. Without model.rope_base_local all have one base. YaRN stretches that one alone."""
    size = {"n_layer": 4, "n_head": 2, "n_embd": 16, "context_length": 8, "rope_base": 1e6, "position": "rope"}
    yarn, given = (4.0, 2), {}
    for local, bases in ((7.0, (7.0, 7.0, 1e6, 7.0)), (None, (1e6,) * 4)):
        model = gpt(of_attention={"windows": [4, 4, None]}, rope_base_local=local, yarn_factor=yarn[0],
                    yarn_original=yarn[1], activation_checkpointing="true", **size)  # fmt: skip
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, inputs: given.update({block: inputs[2]}))
        model(torch.randint(50, (2, 8)))
        for block, base in zip(model.blocks, bases, strict=True):
            table = rope_table(8, 8, base, "cpu", yarn if base == 1e6 else None)
            assert all(torch.equal(a[0], b) for a, b in zip(given[block].rope, table, strict=True))


def test_a_local_base_that_no_layer_reads_is_refused():
    for position, window in (("rope", None), ("learned", 4)):
        config = GPTConfig(1, 2, None, 16, 8, 50, position=position, rope_base_local=7.0)
        with pytest.raises(ValueError, match=r"model\.rope_base_local=7\.0"):
            GPT(config, AttentionConfig("naive", window=window))


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


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients_of(form: str, attention: dict, dtype=torch.float32, T: int = 40, steps: int = 2, **fields) -> list:
    """The losses and all gradients of a model with dropout. bfloat16 by autocast; float64 for the whole model."""
    low = dtype == torch.bfloat16
    fields |= {"context_length": T, "activation_checkpointing": form} | ({"residual_dtype": "autocast"} if low else {})
    model = gpt(dropout_p=0.3, stream_p=0.1, of_attention=attention, **fields)
    model = model.double() if dtype == torch.float64 else model
    idx, targets = torch.randint(50, (2, 2, T), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(T).expand(2, T) // 15
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            losses.append(model(idx, targets, documents))
    sum(losses).backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


AGAIN = [  # form, dtype, attention, what of the model
    ("true", torch.float32, {"impl": "naive"}, MODERN),
    ("selective", torch.bfloat16, {"impl": "naive"}, MODERN),
    ("true", torch.bfloat16, {"impl": "sdpa"}, MODERN),
    ("selective", torch.float32, {"impl": "sdpa"}, MODERN),
    ("true", torch.bfloat16, {"impl": "tiled"}, MODERN),
    ("selective", torch.bfloat16, {"impl": "tiled", "window": 20, "documents": True}, {"n_kv_head": 2}),
    ("selective", torch.float32, {"impl": "tiled", "alibi": True, "softcap": 5.0}, {"n_kv_head": 2}),
    ("selective", torch.float32, {"impl": "tiled", "order": "keys_outside", "windows": [9, None]}, MODERN),
]


@pytest.mark.parametrize(("form", "dtype", "attention", "fields"), AGAIN, ids=str)
def test_activation_checkpointing_changes_no_bit(form, dtype, attention, fields):
    """With dropout in attention and blocks, in two steps."""
    plain, again = (gradients_of(one, attention, dtype, **fields) for one in ("false", form))
    assert same(plain, again)


@cache
def of_whole(dtype: torch.dtype) -> list:
    return gradients_of("false", {"impl": "naive"}, dtype, 512, 1, **MODERN)


PIECES = [("false", torch.bfloat16), ("true", torch.bfloat16), ("selective", torch.float32)]


@pytest.mark.parametrize(("form", "dtype"), PIECES, ids=str)
def test_pieces_give_the_gradients_of_the_whole_within_the_error_budget(form, dtype):
    """A weight's gradient adds up over 16 pieces. Dropout and positions are those of the whole sequence."""
    pieces = gradients_of(form, {"impl": "naive"}, dtype, 512, 1, chunk=32, **MODERN)
    eps = torch.finfo(dtype).eps
    for found, plain, true in zip(pieces, of_whole(dtype), of_whole(torch.float64), strict=True):
        assert error(found, true) <= 2 * (error(plain, true) + eps * float(true.abs().max()))


def test_gradients_of_pieces_add_up_in_float32():
    """20 pieces of 33 tokens, each with a gradient of 1. In bfloat16 the sum of nine pieces, 297, would be rounded."""
    config = GPTConfig(n_layer=1, n_head=1, n_embd=4, context_length=660, vocab_size=50, chunk=32)
    block = Block(config, AttentionConfig("sdpa"), UNBROKEN)
    with torch.autocast("cpu", torch.bfloat16):
        context = Context(None, None, None, None)
        recompute.in_less_memory(block, torch.randn(1, 660, 4), context, "false", 33).sum().backward()
    assert block.mlp.down.bias.grad.tolist() == [660] * 4


@pytest.mark.parametrize(
    ("impl", "op", "times", "chunk"),
    [
        ("sdpa", "aten::_scaled_dot_product_flash_attention_for_cpu", (2, 1), None),
        ("tiled", "tilegpt::tiled_forward", (0, 1), 32),  # tiled calls its op only in a selective checkpoint
    ],
)
def test_a_selective_checkpoint_computes_attention_once(impl, op, times, chunk):
    for form, each in zip(("true", "selective"), times, strict=True):
        model = gpt(impl, n_layer=3, activation_checkpointing=form, chunk=chunk)
        names = []
        with Operations(lambda op, *_, names=names: names.append(op.name())):
            model(*torch.randint(50, (2, 2, 64))).backward()
        assert names.count(op) == 3 * each


@pytest.mark.parametrize(
    ("windows", "graphs"), [(None, 4), pytest.param([*range(10, 19), None], 12, marks=pytest.mark.slow)]
)
def test_blocks_that_are_alike_are_compiled_once_and_none_is_left_out(windows, graphs):
    """Four graphs: the embedding, the first block, which has no addition to make, another block, and the loss."""
    found, idx = [], torch.randint(50, (2, 2, 40))
    torch._dynamo.reset()

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    model = gpt(n_layer=10, n_embd=16, context_length=40, of_attention={"windows": windows})
    loss = compiled(model, partial(torch.compile, backend=keep, fullgraph=True))(*idx)
    assert len(found) == graphs
    assert torch.equal(loss, model(*idx))


@pytest.mark.slow
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


@pytest.mark.slow
def test_pieces_are_compiled_for_a_length_that_changes():
    """torch.compile makes the second length a symbol, and could not trace what was asked of it."""
    model = gpt("tiled", n_layer=1, context_length=96, activation_checkpointing="selective", chunk=32)
    step = torch.compile(model, backend="eager")
    for T in (96, 64):
        idx = torch.randint(50, (2, 2, T))
        torch.testing.assert_close(step(*idx), model(*idx))


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


def test_without_positions_only_alibi_tells_the_order_of_the_past():
    """The last row of a single layer without positions sums over a set: swap two earlier tokens and it stays, but for
    rounding; with alibi it does not."""
    change = {}
    for alibi in (False, True):
        model = gpt("tiled", of_attention={"alibi": alibi}, n_layer=1, position="none").eval()
        idx = torch.arange(40)[None]
        swapped = idx.clone()
        swapped[0, [3, 30]] = swapped[0, [30, 3]]
        change[alibi] = error(model.hidden(idx)[0, -1], model.hidden(swapped)[0, -1].detach().double())
    assert change[False] <= 40 * torch.finfo(torch.float32).eps
    assert change[True] > 1000 * torch.finfo(torch.float32).eps


def test_parameter_counts_of_the_presets():
    sizes = {}
    for path in sorted((Path(__file__).parents[1] / "conf/model").glob("*.yaml")):
        config = GPTConfig(**yaml.safe_load(path.read_text()), vocab_size=257 if "nano" in path.stem else 50257)
        with torch.device("meta"):
            sizes[path.stem] = GPT(config, AttentionConfig("naive")).parameter_count()
    assert sizes["gpt2"] == 124_439_808 + 47 * 768  # GPT-2's published size, and 47 rows to a round number
    assert sizes["gpt2-medium"] == 354_823_168 + 47 * 1024
    assert sizes["gpt2-xl"] == 1_557_611_200 + 47 * 1600
    assert sizes["nano-gpt2"] == 859_008
    assert 0.7e6 < sizes["nano"] < 0.9e6
    assert 100e6 < sizes["modern-124m"] < 130e6
    assert sizes["gpt2-d128"] == sizes["gpt2"]
    assert sizes["modern-d128"] == sizes["modern-124m"]


@pytest.mark.slow
def test_a_model_without_numbers_takes_neither_memory_nor_torch_dynamo():
    """Whose import took a second of every start."""
    code = """
import sys
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig, without_values
with without_values():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=2**20, vocab_size=2**30), AttentionConfig("naive"))
assert {p.device.type for p in model.parameters()} == {"meta"}
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
