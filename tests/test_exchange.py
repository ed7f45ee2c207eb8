"""Weights in and out: transformers says the same with the same weights, and a stranger's folder runs no code.

The models have random weights, large enough that every part of them shows in the logits. Nothing is downloaded but from
a server on this machine. The tolerance for logits of about 10 is 1e-4 in float32; GPT-2's are compared in float64 too.
"""

import json
import os
import pickle
import random
import re
import shutil
import struct
from copy import deepcopy
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import safetensors.torch
import tiktoken
import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy

import sample
import train
from data.dataset import open_data
from data.loader import Loader
from data.tokenizer import (
    END_OF_TEXT,
    PATTERNS,
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
from tests.runs import last
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
    "gpt2-padded": GPT2 | {"vocab_size": V + 20},
    "llama": LLAMA | {"rms_norm_eps": 0.1, "bos_token_id": V - 2},
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": LLAMA | {"sliding_window": 7, "head_dim": 8},
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
            ends = {"bos_token_id": V - 1, "eos_token_id": V - 1, "vocab_size": V, "initializer_range": 0.3}
            settings = transformers.AutoConfig.for_model(name.partition("-")[0], **ends | MODELS[name])
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(settings).eval()
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
def copy(theirs, tmp_path):
    """copy(name): a copy of a model's folder, to be spoilt."""
    return lambda name: Path(shutil.copytree(theirs(name)[1], tmp_path / "folder"))


@pytest.fixture
def folder(copy) -> Path:
    return copy("gpt2")


def network(trained: checkpoint.Checkpoint) -> GPT:
    attention = config.from_dict(AttentionConfig, trained.state["config"]["attention"] | {"impl": "naive"})
    return trained.network(attention, torch.device("cpu")).eval()


@torch.no_grad()
def apart(model, trained: checkpoint.Checkpoint, vocabulary: int = V) -> float:
    """The largest difference of the logits."""
    idx = torch.randint(vocabulary, (2, 32), generator=torch.Generator().manual_seed(1))
    logits = model(idx).logits[..., :vocabulary]
    return float((logits - network(trained)(idx)).abs().max())


def same(a: checkpoint.Checkpoint, b: checkpoint.Checkpoint, dtype=torch.float32) -> bool:
    """Are a's weights those of b in `dtype`?"""
    assert a.model.keys() == b.model.keys()
    assert all(weight.dtype == torch.float32 for weight in a.model.values())
    rounded = {name: weight.to(dtype).float() for name, weight in b.model.items()}
    return a.tokenizer == b.tokenizer and all(torch.equal(weight, rounded[name]) for name, weight in a.model.items())


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


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_after_import_and_after_export(name, theirs, transformers, tmp_path):
    """Models are often padded. Rows without a token are no symbol, and neither in the loss nor in the export."""
    model, folder = theirs(name)
    trained = exchange.read(folder, str(folder))
    assert apart(model, trained) < 1e-4
    idx, targets = torch.randint(V, (2, 2, 32))
    if name.startswith("gpt2"):  # both can run in float64: two layers of sums of some hundred terms
        with torch.no_grad():
            expected = deepcopy(model).double()(idx).logits[..., :V]
            allowed = 1000 * torch.finfo(torch.float64).eps * float(expected.abs().max())
            assert float((network(trained).double()(idx) - expected).abs().max()) <= allowed
    loss = cross_entropy(model(idx).logits[..., :V].flatten(0, 1), targets.flatten()).item()
    assert 2 < loss < 30
    assert network(trained)(idx, targets).item() == pytest.approx(loss, abs=1e-5)
    exchange.export(trained, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(back) is type(model)
    assert back.config.vocab_size == V
    assert apart(back, trained) < 1e-4
    again = exchange.read(tmp_path / "out", "out")
    assert again.state["config"]["model"] == trained.state["config"]["model"] | {"vocab_multiple": 1}
    assert again.state | {"config": trained.state["config"]} == trained.state
    assert name == "gpt2-padded" or same(again, trained)


def as_gpt2s_own_files(folder: Path) -> None:
    """The names lack `transformer.`, masks are among the weights, and the tokenizer is two files."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    older = {name.removeprefix("transformer."): weight for name, weight in tensors.items()}
    safetensors.torch.save_file(older | {"h.0.attn.bias": torch.ones(1, 1, 48, 48)}, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["vocab"] | {END_OF_TEXT: V - 1}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, tokenizer["merges"]), ""]))


def in_bfloat16(folder: Path) -> None:
    weights(lambda w: w.update({name: x.bfloat16() for name, x in w.items()}))(folder)


@pytest.mark.parametrize(
    ("change", "dtype"), [(as_gpt2s_own_files, torch.float32), (in_bfloat16, torch.bfloat16)], ids=["older", "bfloat16"]
)
def test_weights_of_other_forms_are_read_as_float32(change, dtype, folder, tmp_path):
    if change is as_gpt2s_own_files:  # whose texts are cut as GPT-2's
        edit("tokenizer.json", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False})(folder)
    right = exchange.read(folder, "")
    change(folder)
    assert same(exchange.read(folder, ""), right, dtype)


@pytest.mark.parametrize("beside", [
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True},  # which transformers does not read then
    {"added_tokens_decoder": {"999": {"content": "<|pad|>", "special": True}}},
    {"pad_token": {"content": "<|pad|>"}},
])  # fmt: skip
@pytest.mark.parametrize("files", ["tokenizer.json", "older"])
def test_settings_beside_a_tokenizer_that_change_no_id_are_taken(beside, files, folder):
    edit("tokenizer.json", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False})(folder)
    if files == "older":
        as_gpt2s_own_files(folder)
    right = exchange.read(folder, "").tokenizer
    if "<|pad|>" in json.dumps(beside):
        (folder / "added_tokens.json").write_text('{"<|pad|>": 999}')
    name = "special_tokens_map.json" if "pad_token" in beside else "tokenizer_config.json"
    (folder / "tokenizer_config.json").write_text('{"pad_token": null}')
    (folder / name).write_text(json.dumps(beside))
    assert exchange.read(folder, "").tokenizer == right


@pytest.mark.parametrize(
    ("head_size", "base", "factor", "original"), [(64, 5e5, 2.5, 8192), (64, 100.0, 4.0, 32), (8, 1e4, 8.0, 1024)]
)
def test_yarn_is_transformers_yarn(head_size, base, factor, original, transformers):
    """To 1e-6 of each frequency. Over 40 positions the angles are 40 times as far apart."""
    rope = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": original}
    theirs = transformers.LlamaConfig(hidden_size=2 * head_size, num_attention_heads=2, rope_parameters=rope,
                         max_position_embeddings=int(factor * original))  # fmt: skip
    frequency, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    plain = base ** -(torch.arange(0, head_size, 2) / head_size)
    torch.testing.assert_close(plain * stretch(head_size, base, factor, original, "cpu"), frequency, rtol=1e-6, atol=0)
    angle = torch.outer(torch.arange(40.0), frequency)
    found = torch.stack(rope_table(40, head_size, base, "cpu", (factor, original)))
    torch.testing.assert_close(found, scale * torch.stack((angle.cos(), angle.sin())), rtol=0, atol=40 * 2e-6)


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
def test_an_option_is_exported_or_refused_by_its_name(name, without):
    """Each on its own. One that was forgotten would be lost without a word, and the model be another.

    Without those that GPT-2 does not read: missing biases are exported as zeros, and it has no rope."""
    modern = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "mlp_hidden": 64}
    modern |= {"yarn_factor": 4.0, "yarn_original": 24}
    model = GPTConfig(2, 4, None, 32, 48, 100, **(modern if name == "llama" else {}))
    sides = model, AttentionConfig()
    assert configuration(huggingface_config(*sides, 0, 1)) == sides
    for side, options in enumerate(sides):
        for field in {field.name for field in fields(options)} - NOT_EXPORTED - without:
            changed, refused = [*sides], ""
            try:  # the model itself may be refused: YaRN needs rope
                changed[side] = another(options, field)
                assert changed[side] != options
                exported = huggingface_config(*changed, 0, 1)
            except ValueError as error:
                refused = str(error)
            if refused:
                assert field.split("_")[-1] in refused  # n_head by n_kv_head
            else:
                assert [*configuration(exported)] == changed, field


def test_an_export_is_whole_or_absent(call, folder, tmp_path, monkeypatch):
    """It overwrites nothing, takes no key of sampling, writes no model that is broken, and leaves no part of a file."""
    trained = exchange.read(folder, "")
    trained.state["broken"] = "no max"
    with pytest.raises(ValueError, match="no max"):
        exchange.export(trained, tmp_path / "out")
    trained.state["broken"] = ""
    trained.model["positions.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        exchange.export(trained, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error:\nNo space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    for where, more, named in [(folder, [], folder), (tmp_path / "out", ["prompt=x"], "prompt="),
                               (tmp_path / "out", [], "No space left")]:  # fmt: skip
        ended = call(sample, f"init_from={folder}", f"export={where}", *more)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert str(named) in ended.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_with_padding_and_without_biases_is_exported(call, small, transformers, tmp_path, monkeypatch):
    """And its folder writes the run's text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    where = [f"runs={tmp_path}", "name=own", "steps=2", "model.bias=false", "model.vocab_multiple=64"]
    call(train, *small, *where).succeeded()
    ended = call(sample, f"runs={tmp_path}", "run=own", "export=~/out")
    assert (ended.code, ended.out) == (0, "")
    assert "GPT2LMHeadModel" in ended.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.vocab_size == 257
    assert apart(model, checkpoint.load(last(tmp_path / "own")), 257) < 1e-4
    assert model.generation_config.eos_token_id == 256
    one, other = (
        call(sample, *source, "prompt=ab", "max_new_tokens=30", "device=cpu", "impl=naive").out
        for source in ([f"runs={tmp_path}", "run=own"], [f"init_from={tmp_path / 'out'}"])
    )
    assert one == other
    assert one.startswith("ab")


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def end_first(bpe):
    """A tokenizer whose id 0 ends a text, as SmolLM's."""
    ranks = {token: rank + 1 for token, rank in bpe._mergeable_ranks.items()}
    return tiktoken.Encoding("end-first", pat_str=bpe._pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 0})


@pytest.mark.parametrize("kind", ["byte", "bpe", pytest.param("gpt2", marks=pytest.mark.slow), "end_first"])
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
    again = encoding if kind == "byte" else from_huggingface(to_huggingface(encoding), {}, None)
    assert exchange.read(tmp_path / "out", "").tokenizer == to_json(again)


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_a_text_is_cut_where_the_tokenizers_library_cuts_it(number, bpe, transformers):
    """Random text of the characters at which the patterns differ."""
    from tokenizers import Tokenizer

    content = to_huggingface(bpe) | {"pre_tokenizer": [*PATTERNS.values()][number]}
    if [*PATTERNS][number] == "(?s:.)":  # byte's, which has no merges
        content["model"] |= {"merges": [], "vocab": {k: v for k, v in content["model"]["vocab"].items() if v < 256}}
    ours, theirs = from_huggingface(content, {}, V - 1), Tokenizer.from_str(json.dumps(content))
    draw, letters = random.Random(0), " \n\r\t'sSlLab\u00e9\u4f60\U0001f60012\u00b2\u0663.,-\u00a0\u0301"
    for text in [TEXT, *("".join(draw.choices(letters, k=25)) for _ in range(300))]:
        assert theirs.encode(text, add_special_tokens=False).ids == encode(ours, text).tolist(), repr(text)


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


BYTE = to_huggingface(byte_encoding())
OTHER_TOKENIZERS = [  # changes of tokenizer.json
    *[{"model": change} for change in (
        {"byte_fallback": True}, {"type": "Unigram"}, {"dropout": 0.1}, {"merges": []},
        *({"vocab": {"a": number}} for number in ("x", 0, 1 << 40)))],
    # tiktoken merges in the order of the ids, so it would give other ids for the same text
    {"model": lambda model: model | {"merges": model["merges"][::-1]}},
    {"normalizer": {"type": "NFC"}},
    *[{"decoder": decoder} for decoder in (None, 3, {"type": "Fuse"}, {"type": "Sequence", "decoders": []})],
    # add_prefix_space=true by default
    *[{"pre_tokenizer": cut} for cut in (
        {"type": "Whitespace"}, {"type": "ByteLevel"}, nested(900), {"type": "ByteLevel", "more": nested(300)})],
    *[{"added_tokens": tokens} for tokens in (
        3, [{"content": END_OF_TEXT, "id": 1 << 40}], [{"content": "def", "id": V, "special": False}])],
    # Without merges: add_prefix_space adds a byte, Whitespace takes some away, a long token is found in a piece only.
    *[BYTE | {"pre_tokenizer": cut, "model": BYTE["model"] | {"vocab": BYTE["model"]["vocab"] | more}}
      for cut in ({"type": "ByteLevel"}, {"type": "Whitespace"}, None) for more in ({}, {"abc": 257})],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OTHER_TOKENIZERS)))
def test_another_kind_of_tokenizer_is_refused_in_one_line(number, bpe):
    content, changes = to_huggingface(bpe), OTHER_TOKENIZERS[number]
    model = changes.get("model", {})
    model = model(content["model"]) if callable(model) else content["model"] | model
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        from_huggingface(content | changes | {"model": model}, {}, 256 if "version" in changes else V - 1)


# --- a run from weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def begin(call, small, tmp_path):
    """begin(arguments): a run with no model of its own."""
    kept = [argument for argument in small if not argument.startswith("model")]

    def begin(*arguments: str, code: int = 0):
        ended = call(train, *kept, "tokens_per_step=null", f"runs={tmp_path / 'runs'}", *arguments)
        assert ended.code == code, ended.err
        return ended

    return begin


def saved(run: Path, step: int = 1) -> checkpoint.Checkpoint:
    return checkpoint.load(run / f"checkpoints/step_{step:06}")


@pytest.mark.parametrize(("name", "recipe"), [("gpt2", ["experiment=finetune_gpt2"]), ("llama", [])])
def test_a_run_begins_at_the_loss_that_transformers_has(name, recipe, begin, theirs, tmp_path):
    model, folder = theirs(name)
    ended = begin(*recipe, f"init_from={folder}", "steps=1", "name=child", "model.context_length=32")
    run = tmp_path / "runs/child"
    kept = saved(run)
    cfg = config.from_dict(train.Config, kept.state["config"])
    dataset = open_data(cfg.data, cfg.tokenizer, from_json(kept.tokenizer))
    options = {"batch_size": 4, "context_length": 32, "seed": cfg.seed, "with_documents": False}
    batch = Loader(dataset.train, dataset.train_documents, **options).next()
    loss = cross_entropy(model(batch.x).logits.flatten(0, 1), batch.y.flatten())
    assert read_metrics(run / "metrics.jsonl")[0]["loss"] == pytest.approx(float(loss), abs=1e-4)
    assert str(folder) in ended.out
    assert kept.state["config"]["init_from"] == str(folder)
    assert f"init_from: {folder}\n" in (run / "config.yaml").read_text()


def test_a_child_of_a_run_has_its_weights_options_and_tokenizer(call, begin, small, tmp_path):
    own = ["model.norm_eps=1e-2", "tokenizer=bpe", "tokenizer.vocab_size=280", "attention.window=20", "steps=3"]
    call(train, *small, *own, f"runs={tmp_path / 'runs'}", "name=mother", "eval_every=3").succeeded()
    ended = begin("init_from=mother", "steps=1", "name=child", "optimizer.lr=1e-30", "model.dropout_p=0.1")
    mother, child = saved(tmp_path / "runs/mother", 3), saved(tmp_path / "runs/child")
    assert child.tokenizer == mother.tokenizer
    assert child.state["config"]["model"] == mother.state["config"]["model"] | {"dropout_p": 0.1}
    assert child.state["config"]["attention"] == mother.state["config"]["attention"]
    assert child.state["val_loss"] == mother.state["val_loss"]  # so small a rate moves no bit
    assert child.state["config"]["init_from"] == str(mother.path)
    assert str(mother.path) in ended.out
    begin(f"init_from={mother.path}", "steps=1", "name=cut", "optimizer.lr=1e-30", "model.context_length=16")
    cut, whole = saved(tmp_path / "runs/cut").model, mother.model
    assert torch.equal(cut["positions.weight"], whole["positions.weight"][:16])


def test_a_run_is_extended_to_a_longer_context(call, begin, small, tmp_path, monkeypatch):
    """It measures its context before it trains. YaRN begins at the old context, whatever the new one is."""
    own = [f"runs={tmp_path / 'runs'}", "name=mother", "model.position=rope", "steps=3", "eval_every=3"]
    call(train, *small, *own).succeeded()
    first, drawn, draw = [], [], context.draw
    monkeypatch.setattr(context, "draw", lambda *given: drawn.append((given[0], given[-1])) or draw(*given))
    for name, changes in {"base": ["model.rope_base=1e6"], "yarn": ["experiment=long_extend"]}.items():
        shared = ["init_from=mother", "model.context_length=128", "steps=1", "optimizer.lr=1e-30", "context_every=1"]
        said = begin(*shared, *changes, f"name={name}").out
        assert "model.context_length 32 -> 128" in said
        assert ("yarn_original None -> 32" in said) == (name == "yarn")  # and not 128 / 8
        measured = [row for row in read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") if "context_gain" in row]
        assert [row["step"] for row in measured] == [0, 1]
        first.append(measured[0]["loss_at_0065_0128"])
    assert len(set(first)) == 2
    before = [before and {key: x for key, x in before.items() if key != "step"} for _, before in drawn]
    assert before == [None, drawn[0][0], None, drawn[2][0]]
    begin("init_from=yarn", "model.context_length=64", "steps=1", "name=cut")
    for name, stretched in {"yarn": (8.0, 32), "cut": (8.0, 32), "mother": (1.0, None)}.items():
        kept = saved(tmp_path / "runs" / name, 3 if name == "mother" else 1).state["config"]["model"]
        assert (kept["yarn_factor"], kept["yarn_original"]) == stretched


def test_a_child_is_resumed_bit_for_bit_without_its_parent(begin, folder, tmp_path):
    """And breakit.py trains on its text without the parent, with the tokenizer beside the prepared text."""
    more = ["steps=4", "checkpoint_every=2", "model.dropout_p=0.1", "keep_last=5"]
    begin(f"init_from={folder}", *more, "name=whole")
    shutil.rmtree(folder)
    begin(f"resume={tmp_path / 'runs/whole/checkpoints/step_000002'}", "name=again")
    whole, again = (saved(tmp_path / "runs" / name, 4) for name in ("whole", "again"))
    assert same(whole, again)
    assert again.state["config"]["init_from"] == str(folder)
    model = model_of_run("again", tmp_path / "runs", torch.device("cpu"))
    opened = open_data(model.data, model.tokenizer)
    assert opened.val[:].tolist() == model.dataset.val[:].tolist()
    assert opened.encoding.n_vocab == V


CONTRADICTIONS = ["resume=auto", "model.n_layer=3", "model.vocab_multiple=64", "model.yarn_factor=2", "tokenizer=bpe"]
CONTRADICTIONS += ["attention.window=8", "model.context_length=64", "tokenizer=byte", "model.n_head=4 -m seed=1,2"]


@pytest.mark.parametrize("typed", CONTRADICTIONS)
def test_a_key_that_contradicts_the_weights_is_refused(typed, begin, folder, tmp_path):
    """The weights have learned 48 positions, and no rotary ones that YaRN could stretch."""
    ended = begin(f"init_from={folder}", "name=child", *typed.split(), code=2)
    named = {"model.context_length=64": "48", "model.yarn_factor=2": "YaRN"}.get(typed, typed.split()[0])
    assert named in ended.err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_the_child_of_a_broken_run_is_broken_or_says_that_its_parent_was(call, begin, small, tmp_path):
    call(train, *small, "break_it=no_scale", "steps=1", f"runs={tmp_path / 'runs'}", "name=mother").succeeded()
    (mother,) = (tmp_path / "runs").iterdir()
    begin(f"init_from={mother}", "steps=1", "name=child")
    (child,) = (tmp_path / "runs").glob("*child*")
    assert saved(child).state["broken"]
    ended = begin(f"init_from={mother}", "steps=1", "name=mended", "break_it=none")
    assert "broken on purpose" in ended.out
    assert (tmp_path / "runs/mended").is_dir()


def test_a_text_begins_with_the_token_that_the_weights_know(copy, call, transformers, tmp_path, monkeypatch):
    """Llama's texts begin with one token and end with another, whose name in Llama 3 is <|end_of_text|>. Ours has one
    name everywhere."""
    folder = copy("llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (last,) = (text for text, token in tokenizer["model"]["vocab"].items() if token == V - 2)
    del tokenizer["model"]["vocab"][last], tokenizer["model"]["merges"][-1]
    (end,) = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [end | {"content": "<|begin|>", "id": V - 2}, end | {"content": "<|end_of_text|>"}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    seen = []
    monkeypatch.setattr(sample, "generate", lambda model, idx, *_, **__: seen.append(idx.tolist()) or [])
    call(sample, f"init_from={folder}", "device=cpu", "impl=naive").succeeded()
    assert seen == [[[V - 2]]]
    call(sample, f"init_from={folder}", f"export={tmp_path / 'out'}").succeeded()
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (exported.bos_token, exported.eos_token) == ("<|begin|>", END_OF_TEXT)


# --- strangers -------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def without(name: str, *others):
    """Removes a file, and then does what the others do."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        for other in others:
            other(folder)

    return change


def header(content: dict):
    text = json.dumps(content).encode()
    return write("model.safetensors", struct.pack("<Q", len(text)) + text + bytes(4))


def resized(name: str, size: int):
    """A file of so many bytes. Beyond the old ones they take no room on the disk."""
    return lambda folder: os.truncate(folder / name, size)


def sparse(folder: Path) -> None:
    """A tensor of a terabyte that is there."""
    header({WPE: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}})(folder)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4 + (1 << 40))


def index(entry: str):
    def change(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder.parent / "x.safetensors")
        content = json.dumps({"weight_map": {"transformer.wte.weight": entry}})
        (folder / "model.safetensors.index.json").write_text(content)

    return change


def linked(name: str):
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return change


def older(name: str, content: str):
    """GPT-2's older files in the place of tokenizer.json."""
    files = {"vocab.json": "{}", "merges.txt": "", name: content}
    return without("tokenizer.json", *(write(file, text.encode()) for file, text in files.items()))


WPE = "transformer.wpe.weight"
STRANGERS = {  # what: (change, what the message must hold)
    "a pickle": (without("model.safetensors", write("pytorch_model.bin", pickle.dumps(Bomb()))), "pytorch_model.bin"),
    "a pickle in disguise": (write("model.safetensors", pickle.dumps(Bomb())), "model.safetensors"),
    "cut": (resized("model.safetensors", 9000), "model.safetensors"),
    "a terabyte": (header({WPE: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}), "safetensors"),
    "a terabyte that is there": (sparse, "model.safetensors"),
    "an escape sequence": (header({"x": {"dtype": "\x1b[31mF32", "shape": [1], "data_offsets": [0, 4]}}),
                           "\ufffd[31mF32"),
    "a huge tokenizer": (resized("tokenizer.json", 1 << 30), "1,073,741,824"),
    "a huge configuration": (resized("config.json", 1 << 30), "1,073,741,824"),
    "an index that leads out": (index("../x.safetensors"), "'../x.safetensors'"),
    "an index of a pickle": (index("x.bin"), "'x.bin'"),
    "an index of a zero byte": (index("\0.safetensors"), "'\\x00.safetensors'"),
    "an index of a long name": (index("x" * 5000 + ".safetensors"), "xx'"),
    "an index of nothing": (index("y.safetensors"), "'y.safetensors'"),
    "linked weights": (linked("model.safetensors"), ": model.safetensors "),
    "a linked configuration": (linked("config.json"), ": config.json "),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json"),
    "no weights": (without("model.safetensors"), "model.safetensors"),
    "no configuration": (without("config.json"), "config.json"),
    "no JSON": (write("config.json", b"{"), "config.json"),
    "JSON without end": (write("config.json", b"[" * 10**5), "config.json"),
    "a list": (write("config.json", b"[]"), "config.json"),
    "no text": (write("config.json", b"\xff"), "offset 0"),
    "another head": (weights(lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1})), "lm_head"),
    "another shape": (weights(lambda w: w.update({WPE: torch.ones(47, 32)})), "(47, 32)"),
    "integers": (weights(lambda w: w.update({WPE: torch.ones(48, 32, dtype=torch.int32)})), "I32"),
    "a name of two lines": (weights(lambda w: w.update({"x\ny": torch.ones(1)})), "'x\\ny'"),
    "a tensor too few": (weights(lambda w: w.pop("transformer.ln_f.bias")), "ln_f.bias"),
    "another family's prefix": (weights(lambda w: w.update({"model.wpe.weight": w.pop(WPE)})), "wpe.weight"),
    "a space before each text": (write("tokenizer_config.json", b'{"add_prefix_space": true}'), "add_prefix_space"),
    "a token found in texts": (write("tokenizer_config.json",
        b'{"added_tokens_decoder": {"9": {"content": "def", "special": false}}}'), "'def'"),
    "a token that may be found in texts": (write("tokenizer_config.json",
        b'{"added_tokens_decoder": {"9": {"content": "def"}}}'), "'def'"),
    "a token beside tokenizer.json": (write("added_tokens.json", b'{"MYTOK": 9}'), "'MYTOK'"),
    "a space of another class": (write("tokenizer_config.json",
        b'{"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": true}'), "add_prefix_space"),
    "another tokenizer.json": (write("tokenizer_config.json",
        b'{"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}'), "fast_tokenizer_files"),
    "settings of another kind": (write("tokenizer_config.json", b'{"added_tokens_decoder": 3}'), "tokenizer"),
    "a token beside the older files": (older("added_tokens.json", '{"MYTOK": 9}'), "'MYTOK'"),
    "a merge of three": (older("merges.txt", "a b c\n"), "'a b c'"),
    "a tensor too many": (weights(lambda w: w.update(x=torch.ones(1))), "'x'"),
    "the same name twice": (weights(lambda w: w.update({"wpe.weight": torch.ones(48, 32)})), "wpe.weight"),
    "NaN": (weights(lambda w: w[WPE][3].fill_(torch.nan)), "NaN"),
    "few symbols": (edit("config.json", vocab_size=200), "300"),
}  # fmt: skip


def assert_one_line(said: str, folder: Path) -> None:
    """And nothing for a terminal to obey."""
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", said)
    assert len(said) < 500 + 3 * len(str(folder))


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_folder_is_refused_in_one_line(stranger, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, said = STRANGERS[stranger]
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        exchange.read(exchange.find(str(folder), tmp_path / "runs", tmp_path / "cache"), str(folder))
    assert_one_line(str(refused.value), folder)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was run, nothing written


def rope(*, beside: bool = False, older: bool = False, **values) -> dict:
    """Keys of config.json. beside: rope_theta is in it, too. older: where transformers 4 had them."""
    names = ("rope_scaling", "rope_parameters") if older else ("rope_parameters", "rope_scaling")
    return {names[0]: values or None, names[1]: None} | ({"rope_theta": 5e5} if beside else {})


PLAIN, LONG = {"rope_type": "default"}, {key: YARN[key] for key in YARN if key != "rope_theta"}
NO_NUMBERS = (0, None, "32", 10**4000)  # of a size
# {family: changes of config.json}. Of each, ours has transformers' logits or a refusal; the latter alone after REFUSED.
REFUSED = "refused"
CHANGES = {
    "gpt2": [
        *[{"activation_function": name} for name in ("gelu", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu")],
        *[{other: n} for other in ("num_attention_heads", "n_head") for n in (1, 4)],
        {"num_hidden_layers": 1}, {"n_layer": 1}, {"hidden_size": 64}, {"max_position_embeddings": 24},
        {"layer_norm_epsilon": 0.1}, {"head_dim": 8},
        REFUSED, {"scale_attn_weights": False}, {"scale_attn_weights": None}, {"scale_attn_by_inverse_layer_idx": True},
        {"is_causal": False}, {"per_layer_config": {"0": {"layer_norm_epsilon": 0.5}}},
        {"activation_function": ["gelu"]}, {"layer_norm_epsilon": 10**400}, {"reorder_and_upcast_attn": True},
        {"transformers_weights": "other.safetensors"}, {"add_cross_attention": True}, {"n_embd": 64},
        {"configuration_files": ["config.4.0.0.json"]},
        {"quantization_config": {"bits": 4}}, {"n_embd": 2**31, "n_head": 1}, {"n_layer": 10**9},
        {"model_type": "bert"}, {"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, {"model_type": "a\nb"},
        *[{key: value} for key, value in zip(("n_layer", "n_head", "n_embd", "n_positions"), NO_NUMBERS, strict=True)],
    ],
    "llama": [
        *[rope(beside=beside, older=older, **values) for beside, older in ((False, False), (True, False), (True, True))
          for values in ({}, PLAIN, PLAIN | {"rope_theta": 1e5}, LONG, YARN)],
        *[rope(**YARN | {key: value}) for key, value in (("truncate", False), ("mscale", 2.0))],
        {"partial_rotary_factor": 0.5}, {"sliding_window": 5}, {"num_attention_heads": 8}, {"num_key_value_heads": 4},
        {"hidden_act": "swish"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"pretraining_tp": 2},
        {"attention_dropout": 0.5},
        REFUSED, *[rope(rope_type=kind, factor=2.0) for kind in ("linear", "dynamic", "llama3")],
        rope(older=True, type="linear", factor=2.0), {"rope_parameters": "yarn"}, {"rope_scaling": "yarn"},
        *[rope(**YARN) | {key: n} for key in ("original_max_position_embeddings", "partial_rotary_factor")
          for n in (0.5, 6)],
        *[rope(**YARN | {key: value}) for key, value in
          (("beta_slow", 2), ("beta_fast", 8), ("attention_factor", 1.0), ("factor", 2.0), ("factor", "4"))],
        {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}, {"hidden_act": "gelu"}, {"is_causal": False},
        {"is_causal": None}, {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, {"tie_word_embeddings": 1},
        {"attribute_map": {"rms_norm_eps": "initializer_range"}}, {"rms_norm_eps": 10**400},
        {"num_key_value_heads": None},
    ],
    "mistral": [
        *[{"sliding_window": window} for window in (5, 100, None)],
        *[{"layer_types": [f"{kind}_attention" for kind in kinds]} for kinds in (("full", "full"), ("sliding",) * 2)],
        {"layer_types": None},
        REFUSED, {"layer_types": ["sliding_attention", "full_attention"]}, {"is_causal": False},
        {"per_layer_config": {"1": {"sliding_window": 2}}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "must_be_refused"),
    [
        pytest.param(family, change, at > changes.index(REFUSED), id=f"{family} {str(change)[:80]}")
        for family, changes in CHANGES.items()
        for at, change in enumerate(changes)
        if change is not REFUSED
    ],
)
def test_a_changed_configuration_gives_transformers_logits_or_is_refused(
    family, change, must_be_refused, copy, transformers
):
    """Bases beside rope_parameters, layers without a window and other names of a key were read as what they are not."""
    folder = copy(family)
    edit("config.json", **change)(folder)
    refused = ""
    try:
        ours = network(exchange.read(folder, ""))
    except ValueError as error:
        refused = str(error)
    if refused:
        assert_one_line(refused, folder)
        assert "config.json" in refused or "yarn" in refused  # the model's own check names model.yarn_original
        return
    assert not must_be_refused
    idx = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(1))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        theirs32, theirs64 = (load(folder, dtype=dtype).eval()(idx).logits for dtype in (torch.float32, torch.float64))
        assert_within_budget({"logits": ours(idx)}, {"logits": theirs32}, {"logits": theirs64})


def test_a_mistral_that_says_nothing_of_a_window_has_transformers_default(copy, transformers):
    read = json.loads((copy("mistral") / "config.json").read_text())
    del read["sliding_window"]
    assert configuration(read)[1].window == transformers.MistralConfig().sliding_window == 4096


def test_a_value_however_deeply_nested_is_refused_in_one_line(copy):
    """json reads some that it cannot write, which made the message a RecursionError."""
    folder = copy("llama")
    file = folder / "config.json"
    before, _, after = file.read_text().partition('"hidden_act": "silu"')
    for depth in range(600, 1000):
        file.write_text(f'{before}"hidden_act": {"[" * depth}{"]" * depth}{after}')
        with pytest.raises(ValueError, match=r"config\.json") as refused:
            exchange.describe(folder)
        assert "\n" not in str(refused.value)


# --- the hub ---------------------------------------------------------------------------------------------------------

ASK = ["init_from=some/model", "device=cpu", "impl=naive", "max_new_tokens=5"]
BY_HAND = "data/cache/hub/some/model"


@pytest.fixture
def hub(serve, folder, tmp_path, monkeypatch):  # noqa: F811
    """hub(): a server with the folder as some/model. The working directory is empty."""
    monkeypatch.chdir(tmp_path)
    return lambda: serve(of_folder(folder, "some/model"))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_is_downloaded_once(sharded, hub, theirs, folder, call, tmp_path):
    if sharded:
        (folder / "model.safetensors").unlink()
        theirs("gpt2")[0].save_pretrained(folder, max_shard_size="30KB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    server = hub()
    first = call(sample, *ASK).succeeded()
    where = exchange.find("some/model", tmp_path, tmp_path)
    assert same(exchange.read(where, str(where)), exchange.read(folder, ""))
    asked = len(server.asked)
    assert call(sample, *ASK).out == first.out
    assert len(server.asked) == asked


def test_a_model_that_was_put_there_by_hand_is_used_first(hub, folder, call):
    """Earlier versions downloaded into this folder, too, and may have left config.json alone there."""
    server, weights = hub(), Path(shutil.copytree(folder, BY_HAND)) / "model.safetensors"
    for asked in (0, 3):
        call(sample, *ASK).succeeded()
        assert len(server.asked) == asked
        weights.unlink(missing_ok=True)


@pytest.mark.parametrize(("lacks", "there"), [("config.json", 1), ("config.json", 0), ("model.safetensors", 1)])
def test_a_name_that_cannot_be_had_is_one_line(lacks, there, hub, folder, call, tmp_path):
    """That says where the whole model belongs, or that pickles are not read."""
    (folder / lacks).rename(folder / "pytorch_model.bin")
    server = hub()
    if not there:
        server.server_close()
    ended = call(sample, *ASK)
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert "some/model" in line
    assert (f"{tmp_path}/{BY_HAND}" if lacks == "config.json" else lacks) in line


@pytest.mark.parametrize("name", ["../x", "a/../b", "a--b", "/nowhere", "a b", "a/b/c", "resume"])
def test_what_is_no_name_is_never_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # elsewhere there may be a folder of that name
    with pytest.raises(ValueError, match=f"init_from={re.escape(name)}: "):
        exchange.find(name, tmp_path / "runs", tmp_path)
    assert list(tmp_path.iterdir()) == []
