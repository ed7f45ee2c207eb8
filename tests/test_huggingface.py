"""Weights in and out: transformers says the same with the same weights, and what we would compute otherwise is refused.

The models are transformers' own, small, with random weights so large that every part of them shows in the logits.
"""

import base64
import json
import random
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import tiktoken
import torch
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import AddedToken, processors

import sample
import train
from data.tokenizer import END_OF_TEXT, TokenizerConfig, build, encode, train_bpe
from model import generate
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.reference import assert_within_budget
from tests.runs import last
from tests.test_sample import gpt, keep
from training import huggingface
from training.checkpoint import load_checkpoint
from training.huggingface import to_tiktoken, to_transformers

V = 300  # tokens; the last one ends a text
TEXT = "def f(x):  # gr\u00fc\u00dfe \u4f60\u597d, \u0434\u0430 \u3042\n\n\treturn 12345 + '''y'all'''  \u00a0 z\r\n"
TEXT += "\U0001f600\U0001f469\u200d\U0001f467 e\u0301 'S \u0663\u00bd\u00b2  7 a1b22\n   \naaaaabab <|endoftext|>"
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 48,
        "vocab_size": V, "initializer_range": 0.4, "bos_token_id": V - 1, "eos_token_id": V - 1}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA = SIZE | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 80, "rope_parameters": ROPE}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"  # of Mistral's Tekken
TEKKEN = r"[^\r\n\p{L}\p{N}]?%s|[^\r\n\p{L}\p{N}]?%s|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN %= WORD % ("*", "+"), WORD % ("+", "*")
MODELS = {
    "gpt2": SIZE,
    "gpt2 untied": SIZE | {"tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu",
                           "layer_norm_epsilon": 0.1},
    "gpt2 padded": SIZE | {"vocab_size": V + 20},
    "llama": LLAMA | {"rms_norm_eps": 0.1},
    "llama tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": LLAMA | {"sliding_window": 7},
    "qwen3": LLAMA,
    "qwen3 without its window": LLAMA | {"use_sliding_window": True, "sliding_window": 7,
                                         "layer_types": ["full_attention"] * 2},
    "llama without its window": LLAMA | {"sliding_window": 7},
}  # fmt: skip


@pytest.fixture(scope="module")
def bpe() -> tiktoken.Encoding:
    return train_bpe([TEXT * 2], V)


@pytest.fixture(scope="module")
def begins(bpe) -> tiktoken.Encoding:
    """A tokenizer with another token that begins a text."""
    special = {END_OF_TEXT: V - 1, "<|begin|>": V}
    return tiktoken.Encoding("x", pat_str=LLAMA3, mergeable_ranks=bpe._mergeable_ranks, special_tokens=special)


@pytest.fixture(scope="module")
def transformers():
    return huggingface.library()


@pytest.fixture
def make(transformers, bpe, tmp_path):
    """make("gpt2", SIZE): transformers' model, and the folder that it and the tokenizer are saved in."""

    def make(kind: str, config: dict, encoding: tiktoken.Encoding = bpe, begin: int = V - 1):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:  # norms and biases, which are ones and zeros
                    weight.add_(0.3 * torch.randn_like(weight))
        model.eval().save_pretrained(tmp_path / "theirs")
        to_transformers(encoding, [begin], 48).save_pretrained(tmp_path / "theirs")
        return model, tmp_path / "theirs"

    return make


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_weights_that_came_in_give_transformers_logits_and_go_out_unchanged(name, make, transformers, tmp_path):
    theirs, folder = make(name.split()[0], MODELS[name])
    found = huggingface.load(str(folder))
    config = found.state["config"]
    attention = AttentionConfig(**config["attention"] | {"impl": "naive"})
    ours = GPT(GPTConfig(**config["model"]), attention).eval()
    ours.load_state_dict(found.weights, strict=False)
    draws, double = [torch.randint(V, (2, 48)) for _ in range(4)], deepcopy(theirs).double()
    found_logits, logits, right = ([{"logits": f(idx)} for idx in draws] for f in (
        ours, lambda idx: theirs(idx).logits, lambda idx: double(idx).logits))  # fmt: skip
    assert_within_budget(found_logits, logits, right)
    huggingface.export(found, tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is type(theirs)
    assert torch.equal(again.eval()(draws[0]).logits, logits[0]["logits"])


STRANGE = {  # a configuration, and what the error must name
    "inverse layers": ("gpt2", SIZE | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "relu": ("gpt2", SIZE | {"activation_function": "relu"}, "activation_function"),
    "gated gelu": ("llama", LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
    "biases": ("llama", LLAMA | {"attention_bias": True}, "attention_bias"),
    "wide heads": ("llama", LLAMA | {"head_dim": 16}, "head_dim"),
    "rope scaling": ("llama", LLAMA | {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    "mixed layers": ("qwen3", LLAMA | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
                     "layer_types"),
    "another family": ("gpt_neox", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                                    "intermediate_size": 32, "vocab_size": V}, "gpt_neox"),
    "few rows": ("gpt2", SIZE | {"vocab_size": V - 1, "bos_token_id": 0, "eos_token_id": 0}, str(V)),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_model_that_we_would_compute_otherwise_is_refused(name, make):
    kind, config, named = STRANGE[name]
    _, folder = make(kind, config)
    with pytest.raises(ValueError, match=named) as error:
        huggingface.load(str(folder))
    assert len(str(error.value).splitlines()) == 1


def test_logits_are_compared_on_texts_that_go_beyond_the_window(make, monkeypatch):
    """A window of 999 changes no text that compare() can afford."""
    _, folder = make("qwen3", MODELS["qwen3 without its window"] | {"layer_types": ["sliding_attention"] * 2})
    assert huggingface.load(str(folder)).state["config"]["attention"]["window"] == 7
    _, folder = make("mistral", LLAMA | {"sliding_window": 999})
    found = huggingface.configuration
    monkeypatch.setattr(huggingface, "configuration", lambda theirs: (found(theirs)[0], AttentionConfig()))
    with pytest.raises(ValueError, match="logits differ"):
        huggingface.load(str(folder))


@pytest.mark.parametrize(("file", "change", "named"), [
    ("config.json", {"num_hidden_layers": 3}, r"layers\.2\.mlp"),  # whose weights would be random
    ("config.json", {"intermediate_size": 81}, "down_proj"),
    ("config.json", {"num_attention_heads": 3}, "heads"),
    ("config.json", {"model_type": "x", "auto_map": {"AutoConfig": "code.X"}}, "code"),
    ("tokenizer_config.json", {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": [None, "code.X"]}}, "code"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_one_line_and_code_beside_it_is_not_run(file, change, named, make, monkeypatch):
    _, folder = make("llama", LLAMA)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    (folder / "code.py").write_text("raise SystemExit('it runs')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks
    with pytest.raises(ValueError, match=named) as error:
        huggingface.load(str(folder))
    assert len(str(error.value).splitlines()) == 1


def test_pickles_are_not_read(make):
    model, folder = make("gpt2", SIZE)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        huggingface.load(str(folder))


NOT_THERE = {"model.mlp": {"mlp": "relu2"}, "model.position": {"position": "rope"}, "model.n_head": {"n_kv_head": 1},
             "model.bigram_rows": {"bigram_rows": 9}, "attention.softcap": {"softcap": 9.0},
             "attention.alibi": {"alibi": True}, "attention.window": {"window": 999},
             "attention.windows": {"windows": [None, 999]}}  # fmt: skip


@pytest.mark.parametrize("key", NOT_THERE)
def test_an_option_that_transformers_lacks_is_refused_by_its_name(key, tmp_path):
    kept = load_checkpoint(keep(tmp_path / "run", gpt()))
    kept.state["config"][key.split(".")[0]] |= NOT_THERE[key]
    with pytest.raises(ValueError, match=key):
        huggingface.export(kept, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_model_and_a_folder_that_exists_are_refused(tmp_path):
    broken = load_checkpoint(keep(tmp_path / "run", gpt(), broken="no_scale"))
    for folder, why in (("out", "no_scale"), ("run", "exists")):
        with pytest.raises(ValueError, match=why):
            huggingface.export(broken, tmp_path / folder)


@pytest.mark.parametrize("typed", ["export=out", "checkpoint=hf:gpt2"])
def test_without_transformers_there_is_one_line(typed, call, tmp_path, monkeypatch):
    keep(tmp_path / "runs" / "x", gpt())
    monkeypatch.setitem(sys.modules, "transformers", None)
    ended = call(sample, f"runs={tmp_path / 'runs'}", typed.replace("out", str(tmp_path / "out")))
    assert ended.code == 1
    assert "pip install" in ended.err.splitlines()[-1]


# --- text ------------------------------------------------------------------------------------------------------------

MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 1, "tie_head": False}


@pytest.mark.parametrize("options", [{}, {"bias": False, "tie_head": False}, MODERN])
def test_an_exported_model_writes_what_sample_py_writes(options, call, transformers, tmp_path):
    """It began without the end-of-text token once, so its text was another one."""
    keep(tmp_path / "runs" / "x", gpt(64, **options))
    theirs = tmp_path / "theirs"
    assert call(sample, f"runs={tmp_path / 'runs'}", f"export={theirs}").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    for prompt in ("", "caf\u00e9 au"):
        made = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=30)
        expected = tokenizer.decode(made[0], skip_special_tokens=True).removeprefix("\n") + "\n"
        for source in (f"runs={tmp_path / 'runs'}", f"checkpoint={theirs}"):
            ended = call(sample, source, f"prompt={prompt}", "temperature=0", "max_new_tokens=30", "device=cpu")
            assert ended.out == expected, ended.err


def test_a_text_begins_with_the_token_that_the_weights_know(make, begins, call, tmp_path, monkeypatch):
    """Llama 3's texts begin with another token than the one that ends them."""
    _, folder = make("llama", LLAMA | {"vocab_size": V + 1, "bos_token_id": V}, begins, begin=V)
    seen = []
    monkeypatch.setattr(generate, "generate", lambda model, idx, *_: seen.append(idx[0].tolist()) or iter(()))
    assert call(sample, f"checkpoint={folder}", f"export={tmp_path / 'again'}").code == 0
    for place in (folder, tmp_path / "again"):
        assert call(sample, f"checkpoint={place}").code == 0
    assert seen == [[V], [V]]


def test_a_run_begins_with_the_weights_and_the_tokenizer(make, call, text, tmp_path):
    _, folder = make("llama", LLAMA)
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "wandb.mode=disabled", "device=cpu"]
    run = ["steps=1", "batch_size=2", "tokens_per_step=null", "eval_tokens=96", "sample_every=0", "optimizer=adamw"]
    ended = call(train, *data, *run, f"init_from={folder}", f"runs={tmp_path}", "name=x", "optimizer.lr=1e-30")
    assert ended.code == 0, ended.err
    found, parent = load_checkpoint(last(tmp_path / "x")), huggingface.load(str(folder))
    assert found.weights.keys() == parent.weights.keys()
    assert all(torch.equal(weight, parent.weights[name]) for name, weight in found.weights.items())
    assert found.tokenizer == parent.tokenizer


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2", "end first"])
def test_a_tokenizer_gives_the_same_ids_there_and_back(kind, bpe, transformers, tmp_path):
    ranks, end = bpe._mergeable_ranks, {END_OF_TEXT: V - 1}
    later = {token: i + 1 for token, i in ranks.items()}
    whole = ranks | {b" unreached": V}  # no merge makes it, but it is taken where the text has it
    encoding = {
        "byte": build(TokenizerConfig("byte"), []),
        "bpe": bpe,
        "gpt2": tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=whole, special_tokens=end),
        "end first": tiktoken.Encoding("x", pat_str=LLAMA3, mergeable_ranks=later, special_tokens={END_OF_TEXT: 0}),
    }[kind]
    to_transformers(encoding, [encoding.eot_token], 48).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    back, draw = to_tiktoken(theirs), random.Random(0)
    ordinary = [i for i in range(encoding.n_vocab) if i != encoding.eot_token]
    for text in [TEXT + " unreached", *(encoding.decode(draw.choices(ordinary, k=60)) for _ in range(100))]:
        ids = encode(encoding, text).tolist()
        assert encode(back, text).tolist() == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == encoding.decode(ids)
        text = text.replace(END_OF_TEXT, "")  # which transformers looks for in each text
        assert theirs(text).input_ids == [encoding.eot_token, *encode(encoding, text).tolist()]
    assert (theirs.eos_token_id, back.eot_token) == (encoding.eot_token, encoding.eot_token)
    assert theirs.model_max_length == 48


def own_tokenizer(family: str, bpe: tiktoken.Encoding, folder: Path):
    """Of the class that a family's models name, with the words of bpe."""
    transformers, ranks = huggingface.library(), bpe._mergeable_ranks.items()
    (folder / "ranks").write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in ranks))
    begin, end, cuts = ("<|begin|>", "<|end|>", LLAMA3) if family == "Llama 3" else ("<s>", "</s>", TEKKEN)
    converter = transformers.convert_slow_tokenizer.TikTokenConverter(str(folder / "ranks"), cuts, False, [begin, end])
    words = converter.extract_vocab_merges_from_model(converter.vocab_file)
    if family == "Llama 2":
        return transformers.LlamaTokenizerFast()
    if family.startswith("GPT-2"):
        return transformers.GPT2TokenizerFast(*words, add_prefix_space="prefix" in family)
    if family.startswith("Qwen 3"):  # <|endoftext|> is there, but another token ends a text
        theirs = transformers.Qwen2TokenizerFast(*words, eos_token="<|im_end|>")
        theirs.add_tokens([AddedToken("<think>", special=False)] * ("thinks" in family))
        theirs.backend_tokenizer.normalizer = None if "no NFC" in family else theirs.backend_tokenizer.normalizer
        return theirs
    made = converter.converted()
    made.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, V - 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=begin, eos_token=end)


@pytest.mark.parametrize(("family", "refused"), [
    ("GPT-2", ""), ("GPT-2, prefix", "cuts"), ("Llama 2", "byte-level"), ("Llama 3", ""), ("Mistral", ""),
    ("Qwen 3", "NFC"), ("Qwen 3, no NFC, thinks", "<think>"), ("Qwen 3, no NFC", ""),
])  # fmt: skip
def test_a_familys_own_tokenizer_comes_in_and_goes_out_or_is_refused(family, refused, bpe, tmp_path, monkeypatch):
    theirs, text, drawn = own_tokenizer(family, bpe, tmp_path), TEXT.replace(END_OF_TEXT, ""), []
    monkeypatch.setattr(theirs, "decode", lambda ids: drawn.append(ids.tolist()) or "   ")  # luck does not find it
    if refused:
        with pytest.raises(ValueError, match=refused):
            to_tiktoken(theirs)
        return
    ours, _ = to_tiktoken(theirs), to_tiktoken(theirs)
    assert drawn[0] == drawn[1]  # the vocabulary's order is another one each time
    ids, begin = theirs(text, add_special_tokens=False).input_ids, theirs("").input_ids or [theirs.eos_token_id]
    assert (encode(ours, text).tolist(), ours.eot_token) == (ids, theirs.eos_token_id)
    again = to_transformers(ours, begin, 48)
    assert again(text).input_ids == begin + ids
    assert (again.eos_token, again.added_tokens_encoder) == (theirs.eos_token, theirs.added_tokens_encoder)


@pytest.mark.parametrize("kind", ["letters", "unigram", "endless"])
def test_another_kind_of_tokenizer_is_refused(kind, bpe, transformers, make):
    _, folder = make("gpt2", SIZE)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if kind == "letters":  # its words are letters, not bytes
        content["model"]["vocab"]["\u4f60"] = content["model"]["vocab"].pop("a")
        content["model"]["merges"] = []
    if kind == "unigram":
        vocab = [[word, -1.0] for word in content["model"]["vocab"]]
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    if kind == "endless":
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer"):
        huggingface.load(str(folder))


def test_a_name_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot be used") as error:
        huggingface.find_weights("hf:nobody/nothing", Path(tmp_path))
    assert len(str(error.value).splitlines()) == 1
