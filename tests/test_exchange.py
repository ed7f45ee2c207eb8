"""Weights in and out: transformers says the same with the same weights, and a stranger's folder runs no code.

The models have random weights, large enough that every part of them shows in the logits. Nothing is downloaded but from
a server on this machine. The one tolerance is 1e-4 for logits of about 10 in float32.
"""

import json
import os
import pickle
import random
import re
import shutil
import struct
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import safetensors.torch
import tiktoken
import torch
from safetensors import SafetensorError

import sample
import train
from data.dataset import open_data
from data.loader import Loader
from data.tokenizer import (
    END_OF_TEXT,
    LLAMA3,
    PATTERNS,
    RUSTBPE,
    byte_encoding,
    encode,
    from_huggingface,
    from_json,
    to_huggingface,
    to_json,
    train_bpe,
)
from lab.runs import model_of_run
from model.attention import AttentionConfig
from model.families import configuration, huggingface_config
from model.gpt import GPT, GPTConfig
from model.rope import rope_table, stretch
from tests.reference import assert_within_budget
from tests.test_download import of_folder, serve  # noqa: F401 (a fixture)
from training import checkpoint, config, context, exchange
from training.metrics import read_metrics

CHOICES = {f.name: f.metadata["key"].among for f in fields(GPTConfig) if f.metadata["key"].among}
V = 300  # tokens of the small tokenizer; the last one ends a text
TEXT = "def f(x):  # gr\u00fc\u00dfe \u4f60\u597d, \u0434\u0430 \u3042\n\n\treturn 12345 + '''y'all'''  \u00a0 z\r\n"
TEXT += "\U0001f600\U0001f469\u200d\U0001f467 e\u0301 'S \u0663\u00bd\u00b2  7 a1b22\n   \n"

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48}
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
LLAMA |= {"intermediate_size": 80, "max_position_embeddings": 48, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 12}
MODELS = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu",
                           "layer_norm_epsilon": 0.1},
    "llama": LLAMA | {"rms_norm_eps": 0.1, "bos_token_id": V - 2},
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": LLAMA | {"sliding_window": 7, "head_dim": 8},
    "llama-yarn": LLAMA | {"rope_parameters": YARN},
    "mistral-yarn": LLAMA | {"sliding_window": 7, "rope_parameters": YARN | {"beta_fast": 32}},
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([Path(train.__file__).read_text(), TEXT * 20], V)


@pytest.fixture(scope="module")
def theirs(transformers, bpe, tmp_path_factory):
    """theirs(name): (a model of transformers, the folder that it wrote, with a tokenizer)."""
    made = {}

    def theirs(name):
        if name not in made:
            family = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral"}[name.partition("-")[0]]
            ends = {"bos_token_id": V - 1, "eos_token_id": V - 1, "vocab_size": V, "initializer_range": 0.3}
            settings = getattr(transformers, f"{family}Config")(**ends | MODELS[name])
            torch.manual_seed(0)
            head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
            model = getattr(transformers, head)(settings).eval()
            for weight in model.parameters():
                if weight.dim() == 1:  # norms and biases, which begin as ones and zeros
                    torch.nn.init.normal_(weight.data, 1.0, 0.3)
            folder = tmp_path_factory.mktemp("theirs") / name
            model.save_pretrained(folder)
            (folder / "tokenizer.json").write_text(json.dumps(to_huggingface(bpe)))
            made[name] = model, folder
        return made[name]

    return theirs


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    """A copy of the smallest GPT-2's folder, to be spoilt."""
    return Path(shutil.copytree(theirs("gpt2")[1], tmp_path / "folder"))


def network(trained: checkpoint.Checkpoint) -> GPT:
    attention = config.from_dict(AttentionConfig, trained.state["config"]["attention"] | {"impl": "naive"})
    return trained.network(attention, torch.device("cpu")).eval()


@torch.no_grad()
def apart(model, trained: checkpoint.Checkpoint) -> float:
    """The largest difference of the logits."""
    idx = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = model(idx).logits
    assert 3 < logits.abs().max() < 30
    return float((logits - network(trained)(idx)).abs().max())


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_after_import_and_after_export(name, theirs, transformers, tmp_path):
    model, folder = theirs(name)
    trained = exchange.read(folder, str(folder))
    assert apart(model, trained) < 1e-4
    exchange.export(trained, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(back) is type(model)
    assert apart(back, trained) < 1e-4
    again = exchange.read(tmp_path / "out", "out")
    assert again.state == trained.state
    assert again.model.keys() == trained.model.keys()
    assert all(torch.equal(weight, trained.model[key]) for key, weight in again.model.items())


def same_weights(folder: Path, other: Path) -> bool:
    ours, theirs = exchange.read(folder, str(folder)), exchange.read(other, str(other))
    return ours.tokenizer == theirs.tokenizer and all(torch.equal(w, theirs.model[k]) for k, w in ours.model.items())


def test_weights_in_several_files_are_read(theirs, folder, tmp_path):
    theirs("gpt2")[0].save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    shutil.copy(folder / "tokenizer.json", tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert same_weights(tmp_path / "sharded", folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_are_read_as_float32(dtype, folder):
    whole = exchange.read(folder, "").model
    weights(lambda w: w.update({name: tensor.to(dtype) for name, tensor in w.items()}))(folder)
    for name, weight in exchange.read(folder, "").model.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole[name].to(dtype).float())


def test_the_older_layout_is_read(theirs, folder):
    """GPT-2's own file has names without `transformer.`, and masks among the weights; its tokenizer was two files."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    older = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    older["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    safetensors.torch.save_file(older, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert all(
        torch.equal(weight, exchange.read(theirs("gpt2")[1], "").model[key])
        for key, weight in exchange.read(folder, "").model.items()
    )
    one = exchange.read(folder, "").tokenizer
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"] | {END_OF_TEXT: V - 1}))
    lines = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
    assert exchange.read(folder, "").tokenizer == one


def test_rows_without_a_token_are_no_symbol_and_not_in_the_loss(theirs, transformers, bpe, tmp_path):
    """Models are often padded. The loss is that of the logits of the tokens, as is the sampling."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, vocab_size=320, eos_token_id=V - 1, initializer_range=0.3)
    ).eval()
    model.save_pretrained(tmp_path / "padded")
    (tmp_path / "padded" / "tokenizer.json").write_text(json.dumps(to_huggingface(bpe)))
    ours = network(exchange.read(tmp_path / "padded", ""))
    idx = torch.randint(V, (2, 40))
    with torch.no_grad():
        assert ours(idx).shape[-1] == V
        logits = model(idx).logits[:, :-1, :V]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())
        assert float(ours(idx[:, :-1], idx[:, 1:])) == pytest.approx(float(loss), abs=1e-5)


def test_a_run_with_padding_and_without_biases_is_exported(call, small, transformers, tmp_path):
    where = [f"runs={tmp_path}", "name=own"]
    assert call(train, *small, *where, "steps=2", "model.bias=false", "model.vocab_multiple=64").code == 0
    ended = call(sample, f"runs={tmp_path}", "run=own", f"export={tmp_path / 'out'}")
    assert (ended.code, ended.out) == (0, "")
    assert "as GPT2LMHeadModel" in ended.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.vocab_size == 257
    trained = checkpoint.load(checkpoint.last(tmp_path / "own" / "checkpoints"))
    idx = torch.randint(257, (2, 32))
    with torch.no_grad():
        assert float((model(idx).logits - network(trained)(idx)).abs().max()) < 1e-4
    assert model.generation_config.eos_token_id == 256


@pytest.mark.parametrize(
    ("group", "key", "value", "said"),
    [
        ("model", "position", "rope", "model.position=rope with model.norm=layernorm has no counterpart"),
        ("model", "n_kv_head", 1, "model.n_kv_head=1 with"),
        ("model", "mlp", "swiglu", "model.mlp=swiglu with"),
        ("model", "norm", "rmsnorm", "model.position=learned with model.norm=rmsnorm has no counterpart: Llama has"),
        ("model", "rope_base_local", 7.0, "model.rope_base_local=7.0 has no counterpart in GPT-2"),
        ("attention", "softcap", 50.0, "attention.softcap=50.0 has no counterpart in GPT-2"),
        ("attention", "alibi", True, "attention.alibi=True"),
        ("attention", "window", 8, "attention.window=8"),
        ("attention", "windows", [8, None], "attention.windows="),
        ("attention", "softmax_scale", 0.5, "attention.softmax_scale=0.5"),
        ("attention", "block_mask", ["x"], "attention.block_mask="),
        (None, "broken", "no max", "is broken on purpose (no max)"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_not_exported(group, key, value, said, folder, tmp_path):
    trained = exchange.read(folder, "")
    (trained.state["config"][group] if group else trained.state)[key] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        exchange.export(trained, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("head_size", [8, 64])
@pytest.mark.parametrize(("base", "factor", "original"), [(1e4, 8.0, 1024), (5e5, 2.5, 8192), (100.0, 4.0, 32)])
def test_yarn_is_transformers_yarn(base, factor, original, head_size, transformers):
    """To 1e-6 of each frequency. Over 40 positions the angles are 40 times as far apart."""
    rope = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": original}
    theirs = transformers.LlamaConfig(hidden_size=2 * head_size, num_attention_heads=2, rope_parameters=rope,
                         max_position_embeddings=int(factor * original))  # fmt: skip
    frequency, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    plain = base ** -(torch.arange(0, head_size, 2) / head_size)
    torch.testing.assert_close(plain * stretch(head_size, base, factor, original, "cpu"), frequency, rtol=1e-6, atol=0)
    angle = torch.outer(torch.arange(40.0), frequency)
    cos, sin = rope_table(40, head_size, base, "cpu", (factor, original))
    torch.testing.assert_close(torch.stack((cos, sin)), scale * torch.stack((angle.cos(), angle.sin())),
                               rtol=0, atol=40 * 2e-6)  # fmt: skip


def another(config, name: str):
    """config with another value of a field."""
    value = getattr(config, name)
    if name in CHOICES:
        value = next(choice for choice in CHOICES[name] if choice != value)
    elif isinstance(value, bool):
        value = not value
    else:
        value = {"n_kv_head": 2, "softcap": 5.0, "windows": [3, None], "block_mask": ["x"]}.get(name, 2 * (value or 4))
    return replace(config, **{name: value})


# What is not in a model of transformers: how a run trains, and how attention is computed.
NOT_EXPORTED = {"vocab_multiple", "residual_dtype", "activation_checkpointing", "chunk", "dropout_p"}
NOT_EXPORTED |= {"impl", "block_m", "block_n", "order", "autotune", "kernel", "documents", "block_mask_size"}


@pytest.mark.parametrize(("name", "without"), [("gpt2", {"bias", "rope_base"}), ("llama", set())])
def test_an_option_is_exported_or_refused(name, without):
    """Each on its own. One that was forgotten would be lost without a word, and the model be another.

    Without those that GPT-2 does not read: missing biases are exported as zeros, and it has no rope."""
    modern = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "mlp_hidden": 64}
    modern |= {"yarn_factor": 4.0, "yarn_original": 24}
    model = GPTConfig(2, 4, None, 32, 48, 100, **(modern if name == "llama" else {}))
    sides = model, AttentionConfig()
    assert configuration(huggingface_config(*sides, 0, 1)) == sides
    for side, options in enumerate(sides):
        for field in {field.name for field in fields(options)} - NOT_EXPORTED - without:
            changed = [*sides]
            try:  # the model itself may be refused: YaRN needs rope
                changed[side] = another(options, field)
                assert changed[side] != options
                exported = huggingface_config(*changed, 0, 1)
            except ValueError:
                continue
            assert [*configuration(exported)] == changed, field


def test_an_export_overwrites_nothing_and_takes_no_key_of_sampling(call, folder, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    ended = call(sample, f"init_from={folder}", f"export={folder}")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "exists already" in ended.err
    ended = call(sample, f"init_from={folder}", f"export={tmp_path / 'out'}", "prompt=x")
    assert ended.err == f"sample: export={tmp_path / 'out'} writes no text: leave out prompt=\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_export_onto_a_full_disk_is_one_line_and_leaves_nothing(call, folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error:\nNo space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    ended = call(sample, f"init_from={folder}", f"export={tmp_path / 'new' / 'out'}")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "out cannot be written (Error while serializing: I/O error: No space left on device): name a" in ended.err
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(("name", "said"), [("gpt2", ""), ("llama", "without model.dropout_p=0.25, which it does not")])
def test_an_export_says_what_the_family_does_not_have(name, said, theirs, tmp_path):
    trained = exchange.read(theirs(name)[1], "")
    trained.state["config"]["model"]["dropout_p"] = 0.25
    ended = exchange.export(trained, tmp_path / "out")
    assert ("0.25" in ended, said in ended) == (bool(said), True)


def test_an_export_goes_home(call, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert call(sample, f"init_from={folder}", "export=~/out").code == 0
    assert (tmp_path / "out" / "config.json").exists()


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def end_first(bpe):
    """A tokenizer whose id 0 ends a text, as SmolLM's."""
    ranks = {token: rank + 1 for token, rank in bpe._mergeable_ranks.items()}
    return tiktoken.Encoding("end-first", pat_str=bpe._pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 0})


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2", "end_first"])
def test_the_exported_tokenizer_gives_the_same_ids(kind, request, transformers, folder, tmp_path):
    encoding = byte_encoding() if kind == "byte" else request.getfixturevalue(kind)
    trained = exchange.read(folder, "")
    size = GPTConfig(**trained.state["config"]["model"] | {"vocab_size": encoding.n_vocab})
    trained.state["config"]["model"], trained.state["begin"] = asdict(size), encoding.eot_token
    trained.model, trained.tokenizer = GPT(size, AttentionConfig("naive")).state_dict(), to_json(encoding)
    exchange.export(trained, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == encode(encoding, TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == encoding.eot_token
    assert len(tokenizer) == encoding.n_vocab
    assert exchange.read(tmp_path / "out", "").tokenizer == to_json(
        encoding if kind == "byte" else from_huggingface(to_huggingface(encoding), None)
    )


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_a_text_is_cut_where_the_tokenizers_library_cuts_it(number, bpe, transformers):
    """Random text of the characters at which the patterns differ."""
    from tokenizers import Tokenizer

    content = to_huggingface(bpe) | {"pre_tokenizer": [*PATTERNS.values()][number]}
    if [*PATTERNS][number] == "(?s:.)":  # byte's, which has no merges
        content["model"] |= {"merges": [], "vocab": {k: v for k, v in content["model"]["vocab"].items() if v < 256}}
    ours, theirs = from_huggingface(content, V - 1), Tokenizer.from_str(json.dumps(content))
    draw = random.Random(0)
    texts = [
        "".join(draw.choices(" \n\r\t'sSlLab\u00e9\u4f60\U0001f60012\u00b2\u0663.,-\u00a0\u0301", k=25))
        for _ in range(300)
    ]
    for text in [TEXT, *texts]:
        assert theirs.encode(text, add_special_tokens=False).ids == encode(ours, text).tolist(), repr(text)


def test_the_patterns_are_those_in_use(bpe, gpt2):
    assert bpe._pat_str == RUSTBPE
    assert gpt2._pat_str in PATTERNS
    assert LLAMA3 in PATTERNS


def test_the_token_that_ends_a_text_may_have_another_name(bpe):
    """Llama 3's is <|end_of_text|>. Ours has one name everywhere."""
    content = to_huggingface(bpe)
    content["added_tokens"] = [{"content": "<|begin|>", "id": V}, {"content": "<|end|>", "id": V - 1}]
    assert from_huggingface(content, V - 1)._special_tokens == {"<|begin|>": V, END_OF_TEXT: V - 1}
    with pytest.raises(ValueError, match="special_tokens must hold"):
        from_huggingface(content, None)


def nested(depth: int) -> list:
    lists: list = []
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"byte_fallback": True}}, "only byte-level BPE as of GPT-2 or Llama 3 can be used"),
        ({"model": {"type": "Unigram"}}, "it is 'Unigram', and only byte-level BPE"),
        ({"normalizer": {"type": "NFC"}}, "only byte-level BPE"),
        ({"model": {"dropout": 0.1}}, "dropout=0.1 has no counterpart"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, '{"type": "Whitespace"} is none of those known'),
        ({"pre_tokenizer": nested(900)}, "its tokenizer cannot be used"),
        ({"pre_tokenizer": {"type": "ByteLevel", "more": nested(300)}}, "is none of those known"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "is none of those known"),  # add_prefix_space=true by default
        ({"model": {"vocab": {"a": "x"}}}, "an id is no number"),
        ({"model": {"vocab": {"a": 0}}}, "KeyError"),
        ({"model": {"merges": []}}, "no merge makes its token 256"),
        ({"added_tokens": [{"content": END_OF_TEXT, "id": 1 << 40}]}, "below 16777216"),
        ({"added_tokens": 3}, "TypeError"),
        (
            {"added_tokens": [{"content": "def", "id": V, "special": False}]},
            "'def' is not special",
        ),
        ({"model": None}, "AttributeError"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(change, said, bpe):
    content = to_huggingface(bpe)
    for key, value in change.items():
        content[key] = content[key] | value if isinstance(value, dict) and key == "model" else value
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        from_huggingface(content, V - 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("pre_tokenizer", [{"type": "ByteLevel"}, {"type": "Whitespace"}, None])
@pytest.mark.parametrize("longest", [None, "abc"])
def test_without_merges_the_pre_tokenizer_counts_too(pre_tokenizer, longest):
    """add_prefix_space=true adds a byte, Whitespace takes some away, and a long token is found in a piece only."""
    content = to_huggingface(byte_encoding())
    assert from_huggingface(content, 256).name == "byte"
    content["model"]["vocab"] |= {longest: 257} if longest else {}
    with pytest.raises(ValueError, match="is none of those known here"):
        from_huggingface(content | {"pre_tokenizer": pre_tokenizer}, 256)


def test_merges_in_another_order_are_refused(bpe):
    """tiktoken merges in the order of the ids, so it would give other ids for the same text."""
    content = to_huggingface(bpe)
    content["model"]["merges"].reverse()
    with pytest.raises(ValueError, match="not in the order of their ids"):
        from_huggingface(content, V - 1)


# --- a run from weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def begin(call, small, tmp_path):
    """begin(arguments): a run with no model of its own."""
    kept = [argument for argument in small if not argument.startswith("model")]

    def begin(*arguments: str):
        return call(train, *kept, "tokens_per_step=null", f"runs={tmp_path / 'runs'}", *arguments)

    return begin


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_begins_at_the_loss_that_transformers_has(name, begin, theirs, tmp_path):
    model, folder = theirs(name)
    ended = begin(f"init_from={folder}", "steps=1", "name=child", "model.context_length=32")
    assert ended.code == 0, ended.err
    run = tmp_path / "runs/child"
    kept = checkpoint.load(checkpoint.last(run / "checkpoints"))
    cfg = config.from_dict(train.Config, kept.state["config"])
    dataset = open_data(cfg.data, cfg.tokenizer, from_json(kept.tokenizer))
    loader = Loader(
        dataset.train, dataset.train_documents, batch_size=4, context_length=32, seed=cfg.seed, with_documents=False
    )
    batch = loader.next()
    with torch.no_grad():
        logits = model(batch.x).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.y.flatten())
    assert losses(run) == [pytest.approx(float(loss), abs=1e-4)]
    assert f"\nbegun with the weights of {folder}\n" in ended.out
    assert kept.state["config"]["init_from"] == str(folder)
    assert f"init_from: {folder}\n" in (run / "config.yaml").read_text()


def test_a_child_of_a_run_has_its_weights_options_and_tokenizer(call, begin, small, tmp_path):
    own = ["model.norm_eps=1e-2", "tokenizer=bpe", "tokenizer.vocab_size=280", "attention.window=20", "steps=3"]
    assert call(train, *small, *own, f"runs={tmp_path / 'runs'}", "name=mother", "eval_every=3").code == 0
    ended = begin("init_from=mother", "steps=1", "name=child", "optimizer.lr=1e-30", "model.dropout_p=0.1")
    assert ended.code == 0, ended.err
    mother, child = (checkpoint.load(tmp_path / f"runs/{name}") for name in
                     ("mother/checkpoints/step_000003", "child/checkpoints/step_000001"))  # fmt: skip
    assert child.tokenizer == mother.tokenizer
    assert child.state["config"]["model"] == mother.state["config"]["model"] | {"dropout_p": 0.1}
    assert child.state["config"]["attention"] == mother.state["config"]["attention"]
    assert child.state["val_loss"] == mother.state["val_loss"]  # so small a rate moves no bit
    assert child.state["config"]["init_from"] == str(mother.path)
    assert f"begun with the weights of {mother.path}" in ended.out
    cut = begin(f"init_from={mother.path}", "steps=1", "name=cut", "optimizer.lr=1e-30", "model.context_length=16")
    assert cut.code == 0, cut.err
    positions = checkpoint.load(tmp_path / "runs/cut/checkpoints/step_000001").model["positions.weight"]
    assert torch.equal(positions, mother.model["positions.weight"][:16])


def test_a_run_is_extended_to_a_longer_context(call, begin, small, tmp_path, monkeypatch):
    """By YaRN from the length that it was trained with, by a larger base, or by neither. Each measures its context
    before it trains. YaRN begins at the old context, whatever the new one is."""
    own = [f"runs={tmp_path / 'runs'}", "name=mother", "model.position=rope", "steps=3", "eval_every=3"]
    assert call(train, *small, *own).code == 0
    mother = checkpoint.load(tmp_path / "runs/mother/checkpoints/step_000003")
    shared = ["init_from=mother", "model.context_length=128", "steps=1", "optimizer.lr=1e-30", "context_every=1"]
    first, drawn = {}, []
    draw = context.draw
    monkeypatch.setattr(context, "draw", lambda *given: drawn.append((given[0], given[-1])) or draw(*given))
    for name, changes in {
        "plain": [], "base": ["model.rope_base=1e6"], "yarn": ["model.yarn_factor=8"],
    }.items():  # fmt: skip
        ended = begin(*shared, *changes, f"name={name}")
        assert ended.code == 0, ended.err
        said = "".join(
            f", {change.replace('=8', ' 1.0 -> 8.0').replace('=1e6', ' 10000.0 -> 1000000.0')}" for change in changes
        )
        assert f"\nchanged since these weights: model.context_length 32 -> 128{said}" in ended.out
        measured = [row for row in read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") if "context_gain" in row]
        assert [row["step"] for row in measured] == [0, 1]
        first[name] = measured[0]
    assert "model.yarn_original None -> 32" in ended.out  # and not 128 / 8
    assert len({row["loss_at_0065_0128"] for row in first.values()}) == 3
    before = [before and {key: x for key, x in before.items() if key != "step"} for _, before in drawn]
    assert before == [None, drawn[0][0], None, drawn[2][0], None, drawn[4][0]]
    again = begin("resume=auto", "name=yarn", "steps=2")
    assert again.code == 0, again.err
    assert (
        checkpoint.load(tmp_path / "runs/yarn/checkpoints/step_000001").state["config"]["model"]["yarn_original"] == 32
    )
    cut = begin("init_from=yarn", "model.context_length=64", "steps=1", "name=cut")
    assert cut.code == 0, cut.err
    kept = checkpoint.load(tmp_path / "runs/cut/checkpoints/step_000001").state["config"]["model"]
    assert (kept["yarn_factor"], kept["yarn_original"]) == (8.0, 32)
    assert mother.state["config"]["model"]["yarn_original"] is None


def test_extension_has_a_recipe(call, begin, small, tmp_path):
    own = [f"runs={tmp_path / 'runs'}", "name=mother", "model.position=rope", "steps=1"]
    assert call(train, *small, *own).code == 0
    arguments = ["experiment=long_extend", "init_from=mother", "model.context_length=256", "steps=1", "name=child"]
    ended = begin(*arguments, "batch_size=1", "tokens_per_step=256", "eval_tokens=256")
    assert ended.code == 0, ended.err
    assert "model.yarn_factor 1.0 -> 8.0, model.yarn_original None -> 32" in ended.out


def test_a_child_is_resumed_bit_for_bit_without_its_parent(begin, folder, tmp_path):
    more = ["steps=4", "checkpoint_every=2", "model.dropout_p=0.1"]
    assert begin(f"init_from={folder}", *more, "name=whole", "keep_last=5").code == 0
    shutil.rmtree(folder)
    half = tmp_path / "runs/whole/checkpoints/step_000002"
    ended = begin(f"resume={half}", "name=again")
    assert ended.code == 0, ended.err
    whole, again = (checkpoint.load(tmp_path / f"runs/{name}/checkpoints/step_000004") for name in ("whole", "again"))
    assert all(torch.equal(weight, again.model[key]) for key, weight in whole.model.items())
    assert again.state["config"]["init_from"] == str(folder)


def test_breakit_can_train_on_the_text_of_a_child(begin, folder, tmp_path):
    """Its short trainings have no parent, so they take the prepared text, with the tokenizer beside it."""
    assert begin(f"init_from={folder}", "steps=1", "name=child").code == 0
    model = model_of_run("child", tmp_path / "runs", torch.device("cpu"))
    again = open_data(model.data, model.tokenizer)
    assert again.val[:].tolist() == model.dataset.val[:].tolist()
    assert again.encoding.n_vocab == V


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resume=auto"], "begins a new run, and resume=auto goes on with one: leave one out"),
        (["model.n_layer=3"], "model.n_layer=3 contradicts the weights of FOLDER, which have 2: leave it out"),
        (["model.vocab_multiple=64"], "model.vocab_multiple=64 contradicts"),
        (["model.yarn_factor=2"], "YaRN stretches rope, and only a model trained with model.position=rope can be"),
        (["attention.window=8"], "attention.window=8 contradicts the weights of FOLDER, which have None"),
        (["model.context_length=64"], "FOLDER has learned 48 positions, and none for later tokens; only"),
        (["tokenizer=bpe"], "tokenizer=bpe learns another tokenizer than that of FOLDER: leave it out"),
        (["tokenizer=byte"], "is another tokenizer than that of FOLDER: leave tokenizer= out"),
        (["-m", "seed=1,2", "model.n_head=4"], "job 1/2, seed=1: model.n_head=4 contradicts"),
    ],
)
def test_a_key_that_contradicts_the_weights_is_refused(arguments, said, begin, folder, tmp_path):
    ended = begin(f"init_from={folder}", "name=child", *arguments)
    assert ended.code == 2
    assert said.replace("FOLDER", str(folder)) in ended.err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_the_child_of_a_broken_run_is_broken_or_says_that_its_parent_was(call, begin, small, tmp_path):
    assert call(train, *small, "break_it=no_scale", "steps=1", f"runs={tmp_path / 'runs'}", "name=mother").code == 0
    (mother,) = (tmp_path / "runs").iterdir()
    assert begin(f"init_from={mother}", "steps=1", "name=child").code == 0
    (child,) = (tmp_path / "runs").glob("*child*")
    assert checkpoint.load(checkpoint.last(child / "checkpoints")).state["broken"]
    ended = begin(f"init_from={mother}", "steps=1", "name=mended", "break_it=none")
    assert ended.code == 0
    assert "these weights were trained with attention broken on purpose" in ended.out
    assert (tmp_path / "runs/mended").is_dir()


def test_finetuning_has_a_recipe(begin, folder):
    arguments = ["experiment=finetune_gpt2", f"init_from={folder}", "model.context_length=32", "steps=2", "name=child"]
    ended = begin(*arguments, "batch_size=1", "tokens_per_step=64")
    assert ended.code == 0, ended.err
    assert f"begun with the weights of {folder}" in ended.out


# --- sampling --------------------------------------------------------------------------------------------------------


def test_a_folder_is_sampled_as_the_run_that_was_exported(call, small, tmp_path):
    assert call(train, *small, "steps=3", f"runs={tmp_path}", "name=own").code == 0
    assert call(sample, f"runs={tmp_path}", "run=own", f"export={tmp_path / 'out'}").code == 0
    said = [
        call(sample, *source, "prompt=ab", "max_new_tokens=30", "device=cpu", "impl=naive").out
        for source in ([f"runs={tmp_path}", "run=own"], [f"init_from={tmp_path / 'out'}"])
    ]
    assert said[0] == said[1]
    assert said[0].startswith("ab")
    ended = call(sample, f"init_from={tmp_path / 'out'}", "run=own")
    assert ended.err == f"sample: init_from={tmp_path / 'out'} and run= or checkpoint= are both given; leave one out\n"


def test_a_text_begins_with_the_token_that_the_weights_know(theirs, call, transformers, tmp_path, monkeypatch):
    """Llama's texts begin with one token and end with another."""
    folder = Path(shutil.copytree(theirs("llama")[1], tmp_path / "folder"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (last,) = (text for text, token in tokenizer["model"]["vocab"].items() if token == V - 2)
    del tokenizer["model"]["vocab"][last], tokenizer["model"]["merges"][-1]
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"content": "<|begin|>", "id": V - 2})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    seen = []
    monkeypatch.setattr(sample, "generate", lambda model, idx, *_, **__: seen.append(idx.tolist()) or [])
    assert call(sample, f"init_from={folder}", "device=cpu", "impl=naive").code == 0
    assert seen == [[[V - 2]]]
    assert call(sample, f"init_from={folder}", f"export={tmp_path / 'out'}").code == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").bos_token == "<|begin|>"


# --- strangers -------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def edit(file: str, **values):
    """Changes keys of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return change


def weights(change):
    """Changes the tensors."""

    def rewrite(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors")

    return rewrite


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def pickle_in_disguise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def terabyte(folder: Path) -> None:
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def escape_sequence(folder: Path) -> None:
    text = json.dumps({"x": {"dtype": "\x1b[31mF32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def huge(name: str):
    def change(folder: Path) -> None:
        with open(folder / name, "wb") as file:
            file.truncate(1 << 30)  # takes no room on the disk

    return change


def vocabulary(rank: int):
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"]["a"] = rank
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


def index(entry: str):
    def change(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder.parent / "x.safetensors")
        content = {"weight_map": {"transformer.wte.weight": entry.replace("PARENT", str(folder.parent))}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def linked(name: str):
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return change


STRANGERS = {
    "a pickle": (only_pickles, "has pytorch_model.bin, a pickle, which can run code and is not read"),
    "an id of a trillion": (vocabulary(1 << 40), "an id is no number from 0 on"),
    "a pickle in disguise": (pickle_in_disguise, "model.safetensors cannot be read"),
    "cut": (truncated, "model.safetensors cannot be read"),
    "a terabyte": (terabyte, "model.safetensors cannot be read"),
    "an escape sequence": (escape_sequence, "unknown variant `\ufffd[31mF32`"),
    "a header of a terabyte": (long_header, "model.safetensors cannot be read"),
    "a huge tokenizer": (huge("tokenizer.json"), "has 1,073,741,824 bytes; more than 134,217,728 are not read"),
    "a huge configuration": (huge("config.json"), "has 1,073,741,824 bytes; more than 1,048,576 are not read"),
    "an index that leads out": (index("../x.safetensors"), "names '../x.safetensors': only .safetensors in the same"),
    "an absolute index": (index("PARENT/x.safetensors"), "only .safetensors in the same folder are read"),
    "an index of a pickle": (index("x.bin"), "names 'x.bin'"),
    "an index of a zero byte": (index("\0.safetensors"), "names '\\x00.safetensors': only .safetensors in the same"),
    "an index of a long name": (index("x" * 5000 + ".safetensors"), "x': only .safetensors in the same folder"),
    "an index of nothing": (index("y.safetensors"), "has no file 'y.safetensors'"),
    "linked weights": (linked("model.safetensors"), "model.safetensors leads out of the folder, which is refused"),
    "a linked configuration": (linked("config.json"), "config.json leads out of the folder"),
    "a linked tokenizer": (linked("tokenizer.json"), "tokenizer.json leads out of the folder"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json, nor vocab.json"),
    "another head": (weights(lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1})),
                     "lm_head.weight differs from the embedding, and config.json has them tied"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "JSON without end": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "config.json is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is JSON of another kind"),
    "no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "is not UTF-8 at byte offset 0"),
    "another shape": (weights(lambda w: w.update({"transformer.wpe.weight": torch.ones(47, 32)})),
                      "the tensor wpe.weight is (47, 32), config.json says (48, 32)"),
    "integers": (weights(lambda w: w.update({"transformer.wpe.weight": torch.ones(48, 32, dtype=torch.int32)})),
                 "is I32; only F32, BF16, F16 can be used"),
    "a name of two lines": (weights(lambda w: w.update({"x\ny": torch.ones(1)})), "the tensor 'x\\ny' has no place"),
    "a family of two lines": (edit("config.json", model_type="a\nb"), 'model_type="a\\nb"; only'),
    "a tensor too few": (weights(lambda w: w.pop("transformer.ln_f.bias")), "lacks the tensor ln_f.bias"),
    "a tensor too many": (weights(lambda w: w.update(x=torch.ones(1))), "the tensor 'x' has no place in the model"),
    "the same name twice": (weights(lambda w: w.update({"wpe.weight": torch.ones(48, 32)})), "a second time"),
    "NaN": (weights(lambda w: w["transformer.wpe.weight"][3].fill_(torch.nan)), "has NaN or infinity"),
    "more layers than fit": (edit("config.json", n_layer=10**9), "n_layer=1000000000, which is outside 1 to 1,000"),
    "layers of many digits": (edit("config.json", n_layer=10**4000), "which is outside 1 to 1,000"),
    "a width beyond all": (edit("config.json", n_embd=2**31, n_head=1), "cannot be made"),
    "a width that is wrong": (edit("config.json", n_embd=64), "config.json says"),
    "a width of text": (edit("config.json", n_embd="32"), 'n_embd="32", where a number must be'),
    "no width": (edit("config.json", n_embd=None), "n_embd=null, where a number must be"),
    "few symbols": (edit("config.json", vocab_size=200), "the tokenizer has 300 tokens, config.json has vocab_size=2"),
    "another family": (edit("config.json", model_type="bert"), 'model_type="bert"; only gpt2, llama and mistral'),
    "code of its own": (edit("config.json", model_type="mine", auto_map={"AutoModel": "m.M"}), 'model_type="mine"'),
    "another activation": (edit("config.json", activation_function="relu"), 'activation_function="relu"; only gelu'),
    "scores by layer": (edit("config.json", scale_attn_by_inverse_layer_idx=True),
                        "scale_attn_by_inverse_layer_idx=true, which has no counterpart"),
    "upcast": (edit("config.json", reorder_and_upcast_attn=True), "reorder_and_upcast_attn=true"),
    "cross attention": (edit("config.json", add_cross_attention=True), "add_cross_attention=true"),
    "quantized": (edit("config.json", quantization_config={"bits": 4}), 'quantization_config={"bits": 4}'),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_folder_is_refused_in_one_line(stranger, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, said = STRANGERS[stranger]
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        exchange.read(exchange.find(str(folder), tmp_path / "runs", tmp_path / "cache"), str(folder))
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", str(refused.value))  # one line, and nothing for a terminal to obey
    assert len(str(refused.value)) < 500 + 3 * len(str(folder))
    assert sorted(tmp_path.rglob("*")) == before  # nothing was run, nothing written


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}, 'rope_parameters={"rope_type": "llama3"'),
        ("rope_parameters", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "only rope_type=default"),
        (
            "rope_parameters",
            YARN | {"beta_slow": 2},
            "only rope_type=default can be used, and yarn as it was",
        ),
        ("rope_parameters", YARN | {"attention_factor": 1.0}, "only rope_type=default can be used, and yarn as it was"),
        (
            "rope_parameters",
            YARN | {"factor": 2.0},
            "factor=2 stretches model.yarn_original=12 tokens to 24, and",
        ),
        ("rope_parameters", YARN | {"factor": "4"}, 'factor="4", where a number must be'),
        ("rope_parameters", "yarn", 'rope_parameters="yarn"'),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, 'rope_scaling={"type": "linear", "factor": 2.0}'),
        ("attention_bias", True, "attention_bias=true, which has no counterpart"),
        ("mlp_bias", True, "mlp_bias=true"),
        ("hidden_act", "gelu", 'hidden_act="gelu"'),
        ("head_dim", 16, "head_dim=16, which has no counterpart here; only 8 has"),
    ],
)
def test_what_llamas_family_cannot_be_here_is_refused(key, value, said, theirs):
    content = json.loads((theirs("llama")[1] / "config.json").read_text())
    with pytest.raises(ValueError, match=re.escape(said)):
        configuration(content | {key: value})


def rope(*, beside: bool = False, older: bool = False, **values) -> dict:
    """Keys of config.json. beside: rope_theta is in it, too. older: where transformers 4 had them."""
    names = ("rope_scaling", "rope_parameters") if older else ("rope_parameters", "rope_scaling")
    return {names[0]: values or None, names[1]: None} | ({"rope_theta": 5e5} if beside else {})


PLAIN, LONG = {"rope_type": "default"}, {key: YARN[key] for key in YARN if key != "rope_theta"}
# {family: changes of config.json}. Of each, ours has transformers' logits or a refusal.
CHANGES = {
    "gpt2": [
        *[{"activation_function": name} for name in ("gelu", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu")],
        *[{other: n} for other in ("num_attention_heads", "n_head") for n in (1, 4)],
        {"num_hidden_layers": 1}, {"n_layer": 1}, {"hidden_size": 64}, {"max_position_embeddings": 24},
        {"layer_norm_epsilon": 0.1}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True},
        {"is_causal": False}, {"per_layer_config": {"0": {"layer_norm_epsilon": 0.5}}}, {"head_dim": 8},
        {"scale_attn_weights": None}, {"activation_function": ["gelu"]}, {"layer_norm_epsilon": 10**400},
        {"transformers_weights": "other.safetensors"},
    ],
    "llama": [
        *[rope(beside=beside, older=older, **values) for beside in (False, True) for older in (False, True)
          for values in ({}, PLAIN, PLAIN | {"rope_theta": 1e5}, LONG, YARN)],
        *[rope(**YARN) | {key: value} for key, value in
          ((name, n) for name in ("original_max_position_embeddings", "partial_rotary_factor")
           for n in (0.5, 6))],
        *[rope(**YARN | {key: value}) for key, value in (("truncate", False), ("beta_fast", 8), ("mscale", 2.0))],
        rope(rope_type="linear", factor=2.0), rope(rope_type="dynamic", factor=2.0),
        {"partial_rotary_factor": 0.5}, {"sliding_window": 5}, {"attention_bias": True}, {"head_dim": 16},
        {"num_attention_heads": 8}, {"num_key_value_heads": 4}, {"hidden_act": "gelu"}, {"hidden_act": "swish"},
        {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"is_causal": False}, {"is_causal": None},
        {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, {"pretraining_tp": 2}, {"attention_dropout": 0.5},
        {"attribute_map": {"rms_norm_eps": "initializer_range"}}, {"tie_word_embeddings": 1}, {"rms_norm_eps": 10**400},
    ],
    "mistral": [
        *[{"sliding_window": window} for window in (5, 100, None)],
        *[{"layer_types": [f"{kind}_attention" for kind in kinds]} for kinds in
          (("full", "full"), ("sliding", "sliding"), ("sliding", "full"))],
        {"layer_types": None}, {"is_causal": False}, {"per_layer_config": {"1": {"sliding_window": 2}}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family, changes in CHANGES.items() for change in changes], ids=str
)
def test_a_changed_configuration_gives_transformers_logits_or_is_refused(
    family, change, theirs, transformers, tmp_path
):
    """Bases beside rope_parameters, layers without a window and other names of a key were read as what they are not."""
    folder = Path(shutil.copytree(theirs(family)[1], tmp_path / "folder"))
    edit("config.json", **change)(folder)
    said = ""
    try:
        ours = network(exchange.read(folder, ""))
    except ValueError as refused:
        said = str(refused)
    assert "\n" not in said
    if said:
        return
    idx = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(1))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        theirs32, theirs64 = (load(folder, dtype=dtype).eval()(idx).logits for dtype in (torch.float32, torch.float64))
        assert_within_budget({"logits": ours(idx)}, {"logits": theirs32}, {"logits": theirs64})


def test_a_value_however_deeply_nested_is_refused_in_one_line(theirs, tmp_path):
    """json reads some that it cannot write, which made the message a RecursionError."""
    folder = Path(shutil.copytree(theirs("llama")[1], tmp_path / "folder"))
    file = folder / "config.json"
    before, _, after = file.read_text().partition('"hidden_act": "silu"')
    for depth in range(600, 1000):
        file.write_text(f'{before}"hidden_act": {"[" * depth}{"]" * depth}{after}')
        with pytest.raises(ValueError, match=r"config\.json") as refused:
            exchange.describe(folder)
        assert "\n" not in str(refused.value)


def test_an_older_llamas_configuration_has_its_base_beside_it(theirs):
    content = json.loads((theirs("llama")[1] / "config.json").read_text())
    del content["rope_parameters"]
    older = content | {"rope_theta": 5e5, "rope_scaling": None, "head_dim": None, "num_key_value_heads": None}
    model, _ = configuration(older)
    assert (model.rope_base, model.n_kv_head) == (5e5, 4)
    model, _ = configuration(older | {"rope_scaling": {key: YARN[key] for key in YARN if key != "rope_theta"}})
    assert (model.rope_base, model.yarn_factor, model.yarn_original) == (5e5, 4.0, 12)
    for scaling in ("yarn", {"rope_type": "dynamic", "factor": 2.0}):
        with pytest.raises(ValueError, match=r"config\.json has rope_scaling="):
            configuration(older | {"rope_scaling": scaling})


def test_a_flipped_bit_in_the_header_is_refused_or_changes_nothing(folder):
    """Every name, shape, dtype and offset is compared. What may change is the format's own note."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    whole, draw = exchange.read(folder, ""), random.Random(0)
    header = 8 + struct.unpack("<Q", data[:8])[0]
    read, refused = 0, 0
    for _ in range(60):
        spoilt = bytearray(data)
        spoilt[draw.randrange(header)] ^= 1 << draw.randrange(8)
        file.write_bytes(spoilt)
        try:
            found = exchange.read(folder, "")
        except ValueError as error:
            refused += len(str(error).splitlines()) == 1
        else:
            assert all(torch.equal(weight, whole.model[key]) for key, weight in found.model.items())
            read += 1
    assert read + refused == 60
    assert refused > 40


def test_the_hugging_face_cache_is_read_where_it_lies(theirs, tmp_path):
    """There a model's files are links into a folder beside it."""
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/0a1b"
    shutil.copytree(theirs("gpt2")[1], blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert same_weights(snapshot, theirs("gpt2")[1])


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_is_downloaded_once(sharded, serve, theirs, folder, call, tmp_path, monkeypatch):  # noqa: F811
    if sharded:
        (folder / "model.safetensors").unlink()
        theirs("gpt2")[0].save_pretrained(folder, max_shard_size="60KB")
    server = serve(of_folder(folder, "some/model"))
    monkeypatch.chdir(tmp_path)
    arguments = ["init_from=some/model", "device=cpu", "impl=naive", "max_new_tokens=5"]
    first = call(sample, *arguments)
    assert first.code == 0, first.err
    assert same_weights(exchange.find("some/model", tmp_path, tmp_path), folder)
    asked = len(server.asked)
    assert call(sample, *arguments).out == first.out
    assert len(server.asked) == asked


def test_a_model_that_was_put_there_by_hand_is_used_first(serve, folder, call, tmp_path, monkeypatch):  # noqa: F811
    """Earlier versions downloaded into this folder, too, and may have left config.json alone there."""
    server = serve(of_folder(folder, "some/model"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "data/cache/hub/some/model")
    assert call(sample, "init_from=some/model", "device=cpu", "impl=naive", "max_new_tokens=5").code == 0
    assert server.asked == []
    (tmp_path / "data/cache/hub/some/model/model.safetensors").unlink()
    assert call(sample, "init_from=some/model", "device=cpu", "impl=naive", "max_new_tokens=5").code == 0
    assert len(server.asked) == 3


def test_a_name_without_safetensors_is_refused(serve, folder, call, tmp_path, monkeypatch):  # noqa: F811
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    serve(of_folder(folder, "some/model"))
    monkeypatch.chdir(tmp_path)
    ended = call(sample, "init_from=some/model", "device=cpu")
    assert ended.code == 2
    assert "some/model has no model.safetensors, only pickles perhaps, which are not read" in ended.err.splitlines()[-1]


@pytest.mark.parametrize("there", [True, False])
def test_a_name_that_cannot_be_had_is_one_line_that_says_where_the_file_belongs(
    there,
    serve,  # noqa: F811
    folder,
    call,
    tmp_path,
    monkeypatch,
):
    (folder / "config.json").unlink()
    server = serve(of_folder(folder, "some/model"))
    if not there:
        server.server_close()
    monkeypatch.chdir(tmp_path)
    ended = call(sample, "init_from=some/model", "device=cpu")
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert line.startswith("sample: init_from=some/model is no run in runs and no folder, and config.json of ")
    assert line.endswith(f"put the whole model into {tmp_path}/data/cache/hub/some/model")
    assert server.asked == []


@pytest.mark.parametrize("name", ["../x", "a/../b", "a--b", "/nowhere", "a b", "a/b/c", "resume"])
def test_what_is_no_name_is_never_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # elsewhere there may be a folder of that name
    with pytest.raises(ValueError, match=f"init_from={re.escape(name)}: "):
        exchange.find(name, tmp_path / "runs", tmp_path)
    assert list(tmp_path.iterdir()) == []
