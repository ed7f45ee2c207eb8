"""Weights in and out, by transformers: models of GPT-2's form, and of Llama's, Mistral's and Qwen 3's.

transformers reads and writes the files. Its logits and ours are compared on random tokens, so a model that we would
compute in another way is refused, whatever its config.json says.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import tiktoken
import torch
from huggingface_hub.errors import StrictDataclassError
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]
from torch import Tensor

from data.tokenizer import END_OF_TEXT, beginning, from_json, to_json
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training.checkpoint import Checkpoint, find_checkpoint, take_weights

# Names, ours: theirs. First the configurations', then the modules', in a block or in the model.
SIZES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size", "vocab_size":
         "vocab_size", "context_length": "max_position_embeddings", "tie_head": "tie_word_embeddings"}  # fmt: skip
GPT2_KEYS = SIZES | {"mlp_hidden": "n_inner", "norm_eps": "layer_norm_epsilon", "n_kv_head": "num_attention_heads"}
LLAMA_KEYS = SIZES | {"mlp_hidden": "intermediate_size", "norm_eps": "rms_norm_eps", "n_kv_head": "num_key_value_heads"}
LLAMA_IS: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
GPT2 = {"embedding": "wte", "positions": "wpe", "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "norm":
        "ln_f", "attention.out": "attn.c_proj", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj"}  # fmt: skip
LLAMA = {"embedding": "embed_tokens", "attention_norm": "input_layernorm", "attention.out": "self_attn.o_proj",
         "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp_norm": "post_attention_layernorm",
         "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm", "mlp.up": "mlp.up_proj",
         "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj", "norm": "norm"}  # fmt: skip
# Keys of ours that do not change a trained model's logits.
FREE = {"dropout_p", "recompute", "residual_dtype", "impl", "block_m", "block_n", "block_mask_size", "documents"}
# What tokenizers cut in different ways: begin and end, spaces, case, digits, line ends, letters in two parts, scripts.
TEXT = "The cat's DON'T  we'LL   7 12345 a1b22\n\n\tx  \r\n   \ny='' --- \u00a0z \u0663\u00bd\u00b2 e\u0301 aaaaaaa"
TEXT += " \u0434\u0430\u3042\u4f60\u597d\uff0c \u0e44\u0e17\u0e22 \u0939\u093f \U0001f600\U0001f469\u200d\U0001f467  "


def library() -> ModuleType:
    try:
        import transformers  # here, because it is an optional dependency and takes seconds to load
    except ImportError as error:
        raise ValueError("models of Hugging Face need transformers: pip install 'transformers>=5'") from error
    transformers.utils.logging.set_verbosity_error()
    return transformers


def find_weights(named: str, runs: Path) -> Checkpoint:
    """The weights that init_from= or checkpoint= names: hf:NAME of the hub, a folder that transformers wrote, a run's
    best checkpoint, or a checkpoint of ours. ValueError, one line, if they cannot be used."""
    if named.startswith("hf:") or (Path(named) / "config.json").exists():
        return load(named.removeprefix("hf:"))
    return find_checkpoint(named, runs, best=True)


def load(name: str) -> Checkpoint:
    """A folder or a name of the hub, as float32 Checkpoint of step 0. state["begin"]: the tokens that begin a text."""
    transformers, no_code = library(), {"trust_remote_code": False}  # neither runs what a folder brings nor asks
    try:
        config = transformers.AutoConfig.from_pretrained(name, **no_code)
        model, attention = configuration(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **no_code)
        encoding = to_tiktoken(tokenizer)
        if encoding.n_vocab > (model.vocab_size or 0):
            raise ValueError(f"its tokenizer has {encoding.n_vocab} tokens, the model {model.vocab_size}")
        config.sliding_window = getattr(config, "sliding_window", None) and 8  # so that compare()'s text goes beyond it
        options = no_code | {"config": config, "dtype": torch.float32, "output_loading_info": True}
        options |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # older files are pickles, which run code
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
        if wrong := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):  # which would be random
            raise ValueError(f"its weights do not fit its config.json: {', '.join(wrong)[:200]}")
        ours = GPT(model, replace(attention, impl="tiled", window=attention.window and 8))
        weights = {name: weight.detach() for name, weight in ours.named_parameters()}
        copy(weights, theirs, to_ours=True)
        compare(ours, theirs)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{name} cannot be used: {' '.join(str(error).split())}") from error
    begin = tokenizer("").input_ids or [encoding.eot_token]
    groups = {"model": asdict(model), "attention": asdict(attention), "break_it": asdict(BreakIt())}
    state = {"config": groups, "broken": "", "val_loss": None, "begin": begin}
    return Checkpoint(Path(name), 0, weights, {}, state, to_json(encoding))


def export(trained: Checkpoint, folder: Path) -> str:
    """Writes weights, configuration and tokenizer into a new folder. Returns the name of transformers' class.
    ValueError, one line, for a model that transformers does not have, and if the folder exists."""
    encoding = from_json(trained.tokenizer)
    if folder.exists():
        raise ValueError(f"export={folder} exists already: name a new folder")
    if trained.state["broken"]:
        raise ValueError(f"{trained.path} is broken ({trained.state['broken']}), and in transformers it would be whole")
    model, attention = trained.options("model", GPTConfig), trained.options("attention", AttentionConfig)
    ours = GPT(model, replace(attention, impl="tiled"))
    weights: dict[str, Tensor] = dict(ours.named_parameters())
    model.mlp_hidden = len(weights["blocks.0.mlp.up.weight"])
    begin = trained.state.get("begin") or beginning(encoding)
    wanted = their_config(model, attention, bos_token_id=begin[-1], eos_token_id=encoding.eot_token)
    take_weights(trained, ours)
    theirs = library().AutoModelForCausalLM.from_config(wanted, dtype=torch.float32)
    copy(weights, theirs, to_ours=False)
    theirs.save_pretrained(folder)
    to_transformers(encoding, begin, model.context_length).save_pretrained(folder)
    return type(theirs).__name__


def configuration(theirs: Any) -> tuple[GPTConfig, AttentionConfig]:
    """A configuration of transformers as ours. What has no name here is left to compare()."""
    kind = theirs.model_type
    if kind not in ("gpt2", "llama", "mistral", "qwen3"):
        raise ValueError(f"model_type={kind} has no counterpart here; gpt2, llama, mistral and qwen3 have")
    found = {ours: getattr(theirs, name) for ours, name in (GPT2_KEYS if kind == "gpt2" else LLAMA_KEYS).items()}
    if kind == "gpt2":
        gelu = "gelu" if theirs.activation_function == "gelu" else "gelu_tanh"
        return GPTConfig(mlp=gelu, **found), AttentionConfig()
    rope, kinds = theirs.rope_parameters, {*(getattr(theirs, "layer_types", None) or [])}
    if rope["rope_type"] != "default" or len(kinds) > 1:  # they may act only on longer texts than compare() takes
        raise ValueError(f"rope_type={rope['rope_type']}, layer_types={sorted(kinds)} have no counterpart here")
    model = GPTConfig(**found, **LLAMA_IS, rope_base=rope["rope_theta"], qk_norm=kind == "qwen3")
    if theirs.head_dim not in (None, model.head_size):
        raise ValueError(f"head_dim={theirs.head_dim} has no counterpart here; {model.head_size} has")
    sliding = kind == "mistral" or kinds == {"sliding_attention"}  # elsewhere transformers leaves sliding_window unread
    return model, AttentionConfig(window=theirs.sliding_window if sliding else None)


def their_config(model: GPTConfig, attention: AttentionConfig, **tokens: int) -> Any:
    """The configuration in transformers. ValueError, with the key, for an option that it lacks."""
    gpt2 = model.norm == "layernorm"
    model = replace(model, n_kv_head=model.kv_heads, bias=model.bias or gpt2)  # biases that we lack are zeros there
    kind = "gpt2" if gpt2 else "qwen3" if model.qk_norm else "mistral" if attention.window else "llama"
    more = {"activation_function": "gelu" if model.mlp == "gelu" else "gelu_new", "attn_pdrop": attention.dropout_p,
            "embd_pdrop": model.dropout_p, "resid_pdrop": model.dropout_p} if gpt2 else {
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base}, "head_dim": model.head_size,
            "sliding_window": attention.window}  # fmt: skip
    sizes = {name: getattr(model, ours) for ours, name in (GPT2_KEYS if gpt2 else LLAMA_KEYS).items()}
    made = library().AutoConfig.for_model(kind, **sizes, **more, **tokens)
    differ = [
        f"{group}.{name}={value} (it has {getattr(back, name)})"
        for group, mine, back in zip(("model", "attention"), (model, attention), configuration(made), strict=True)
        for name, value in vars(mine).items()
        if value != getattr(back, name) and name not in FREE
    ]
    if differ:
        raise ValueError(f"transformers' {kind} lacks {', '.join(differ)}; train a model with what it has")
    return made


@torch.no_grad()
def copy(ours: dict[str, Tensor], theirs: Any, to_ours: bool) -> None:
    """Copies all weights of their model to ours, or ours to theirs."""
    gpt2, there = theirs.config.model_type == "gpt2", dict(theirs.named_parameters())
    names, blocks = (GPT2, "transformer.h.") if gpt2 else (LLAMA, "model.layers.")
    for name, weight in ours.items():
        block, module, kind = re.fullmatch(r"(?:blocks\.(\d+\.))?(.*)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
        start = blocks + block if block else blocks.split(".")[0] + "."
        found = ["lm_head"] if module == "head" else [start + n for n in names[module].split()]
        rows = [there[f"{n}.{kind}"] for n in found]  # q, k and v are one matrix of ours
        rows = [p.T for p in rows] if gpt2 and block and weight.ndim == 2 else rows  # GPT-2's are transposed
        for mine, other in zip(weight.split([len(p) for p in rows]), rows, strict=True):
            mine.copy_(other) if to_ours else other.copy_(mine)


@torch.no_grad()
def compare(ours: GPT, theirs: Any) -> None:
    """ValueError if the logits of random tokens differ by more than float32 rounds."""
    T, V = min(256, ours.config.context_length), theirs.config.vocab_size
    idx = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    expected = theirs.eval()(idx).logits
    difference, spread = float((ours.eval()(idx) - expected).abs().max()), float(expected.std())
    if not difference <= 1e-3 * spread:  # nor NaN
        usual = type(theirs.config)().to_dict()
        other = {k: v for k, v in theirs.config.to_dict().items() if type(v) in (bool, str) and v != usual.get(k)}
        raise ValueError(f"its logits differ by {difference:.2g} from ours (their deviation is {spread:.2g}): {other}")


def to_tiktoken(theirs: Any) -> tiktoken.Encoding:
    """A byte-level BPE tokenizer as an Encoding. The token that ends a text is END_OF_TEXT, whatever they call it; its
    name there is in the Encoding's name. ValueError if the two cut TEXT or random tokens in different ways."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special, end = {str(token): i for i, token in theirs.added_tokens_decoder.items()}, theirs.eos_token
    ordinary = {token: i for token, i in theirs.get_vocab().items() if token not in special}
    byte = {letter: b for b, letter in bytes_to_unicode().items()}
    if not (theirs.is_fast and byte.keys() <= ordinary.keys() and set("".join(ordinary)) <= byte.keys()):
        raise ValueError("its tokenizer is no byte-level BPE, as those of GPT-2 and Llama 3 are")
    if end not in special:
        raise ValueError("its tokenizer has no special token that ends a text")
    steps = json.loads(theirs.backend_tokenizer.to_str())
    if steps["normalizer"]:
        raise ValueError(f"its tokenizer changes texts before it cuts them: {json.dumps(steps['normalizer'])[:200]}")
    if words := [str(token) for token in theirs.added_tokens_decoder.values() if not token.special]:
        raise ValueError(f"its tokenizer looks for {', '.join(words)[:200]} in texts, and none here does")
    cut = steps["pre_tokenizer"] or {}
    patterns = [s["pattern"].get("Regex") for s in cut.get("pretokenizers", [cut]) if s.get("type") == "Split"]
    pattern = next(filter(None, patterns), r50k_pat_str)
    special = {{END_OF_TEXT: end, end: END_OF_TEXT}.get(token, token): i for token, i in special.items()}
    ranks = {bytes(byte[letter] for letter in token): i for token, i in ordinary.items()}
    found = tiktoken.Encoding(f"bpe {end}", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    drawn = torch.randint(len(ranks), (3000,), generator=torch.Generator().manual_seed(0))
    text = TEXT + theirs.decode(torch.tensor(sorted(ranks.values()))[drawn]) + Path(__file__).read_text("utf-8") + TEXT
    if theirs(text, add_special_tokens=False).input_ids != found.encode(text, disallowed_special=()):
        raise ValueError(f"its tokenizer cuts texts as none here does: {json.dumps(cut)[:200]}")
    return found


def to_transformers(encoding: tiktoken.Encoding, begin: list[int], context_length: int) -> Any:
    """The tokenizer for transformers. It begins every text with the tokens `begin`, as sample.py does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter, ranks = bytes_to_unicode(), encoding._mergeable_ranks
    words = {token: "".join(letter[b] for b in token) for token in sorted(ranks, key=ranks.__getitem__)}
    pairs = [(token[:i], token[i:]) for token in words for i in range(1, len(token))]
    merges = [(words[a], words[b]) for a, b in pairs if a in words and b in words]
    end = encoding.name.partition(" ")[2] or END_OF_TEXT  # as to_tiktoken() found it
    special = {{END_OF_TEXT: end, end: END_OF_TEXT}.get(t, t): i for t, i in encoding._special_tokens.items()}
    ids = {word: ranks[token] for token, word in words.items()} | special
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=True))  # a word that is a token is it, as in tiktoken
    pattern = encoding._pat_str.replace("(?s:.)", r"[\s\S]")  # tokenizer=byte's, as both regular expressions have it
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special])
    first = [(made.id_to_token(token), token) for token in begin]
    template = [*(word for word, _ in first), "$A"]
    made.post_processor = processors.TemplateProcessing(template, special_tokens=first)
    around = {"bos_token": first[-1][0], "eos_token": end, "model_max_length": context_length}
    return library().PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **around)
