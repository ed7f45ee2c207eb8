"""GPT-2's and Llama's families as Hugging Face writes them: config.json, and the names and shapes of the tensors.

configuration() reads config.json, huggingface_config() is the inverse, and layout() says where each of our weights is
in their files. offer_to_transformers() lets a model of transformers run on our attention.

What has no counterpart is refused with its key and its value, never ignored. training/exchange.py reads and writes the
files.

Their rotary embedding turns the pairs (i, i + D/2), as ours. GPT-2's matrices in a block are stored as (in, out),
Llama's as ours, (out, in).
"""

import json
import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.abilities import OF_SCORE
from model.attention import AttentionConfig, attention, problem_of
from model.gpt import GPT, GPTConfig, without_values
from model.mask import visible

# {our module: theirs}. Theirs in a block begin with transformer.h.3. or model.layers.3.
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
# The numbers that config.json and GPTConfig both have: their name, ours, and transformers' default if it has one.
GPT2_NUMBERS: list[tuple] = [
    ("n_layer", "n_layer"),
    ("n_head", "n_head"),
    ("n_embd", "n_embd"),
    ("n_positions", "context_length"),
    ("vocab_size", "vocab_size"),
    ("layer_norm_epsilon", "norm_eps", 1e-5),
]
LLAMA_NUMBERS: list[tuple] = [
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "context_length"),
    ("vocab_size", "vocab_size"),
    ("intermediate_size", "mlp_hidden"),
    ("rms_norm_eps", "norm_eps", 1e-6),
]
# What of GPTConfig a family says nothing about, because it is always so.
GPT2_OPTIONS: dict[str, Any] = {"position": "learned"}
LLAMA_OPTIONS: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
LAYERS = 1000  # the most of them: even without memory for weights, each takes some for its modules
ORIGINAL = "original_max_position_embeddings"
SIZES = {"rope_theta": 0, "factor": 0, ORIGINAL: 0}  # whatever they are
YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}
GPT2_ALIASES = {  # transformers' other names of these keys
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
PLAIN_ROPE = ({"rope_theta": 0}, {"rope_theta": 0, "rope_type": "default"})  # whatever the base is
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # theirs: ours


class Source(NamedTuple):
    """A Hugging Face tensor, and the rows of our weight that it fills."""

    name: str
    shape: tuple[int, ...]  # theirs
    transposed: bool


def layout(config: GPTConfig) -> dict[str, list[Source]]:
    """{our weight: its parts, in order along the first axis}, without the head if it is tied.

    config.vocab_size is the number of the embedding's rows. Takes no memory. ValueError for impossible sizes.
    """
    gpt2 = config.norm == "layernorm"
    theirs = GPT2 if gpt2 else LLAMA
    try:
        with without_values():
            weights = GPT(config, AttentionConfig("naive")).state_dict()
    except (RuntimeError, TypeError) as error:  # a product of sizes above 2**63
        raise ValueError(f"config.json is of a model that cannot be made ({str(error).splitlines()[0]})") from error
    kv = (config.n_kv_head or config.n_head) * config.head_size
    found = {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if module == "head" and config.tie_head:
            continue
        block = re.match(r"blocks\.(\d+)\.", module)
        start = f"{theirs['blocks']}.{block[1]}." if block else ""
        names = theirs[module.removeprefix(block[0]) if block else module].split()
        transposed = gpt2 and block is not None and weight.dim() == 2
        rows = [weight.shape[0]] if len(names) == 1 else [config.n_embd, kv, kv]
        shapes = [(n, *weight.shape[1:])[:: -1 if transposed else 1] for n in rows]
        found[name] = [Source(f"{start}{n}.{kind}", shape, transposed) for n, shape in zip(names, shapes, strict=True)]
    return found


def said(value: Any) -> str:
    """A stranger's value in a message: one short line, as config.json has it."""
    try:
        return json.dumps(value)[:100]
    except RecursionError:  # it was read a few frames higher up
        return "nested lists"


def number(theirs: dict, key: str, default: Any = None, kind: type = int, most: int = 2**31) -> Any:
    """A number of config.json. ValueError if it is missing, of another type, or an absurd size."""
    value: Any = default if theirs.get(key) is None else theirs[key]
    if type(value) not in (int, kind):
        raise ValueError(f"config.json has {key}={said(value)}, where a number must be")
    if kind is int and not 1 <= value <= most:
        raise ValueError(f"config.json has {key}={said(value)}, which is outside 1 to {most:,}")
    try:
        return kind(value)
    except OverflowError as error:  # an int that no float can be
        raise ValueError(f"config.json has {key}={said(value)}, which is too large") from error


def refuse(theirs: dict, **usual: Any) -> None:
    """ValueError for a key whose value is not the usual one. null stands for the usual one."""
    for key, value in usual.items():
        if theirs.get(key) not in (None, value):
            raise ValueError(
                f"config.json has {key}={said(theirs[key])}, which has no counterpart here; only {said(value)} has"
            )


def configuration(theirs: dict) -> tuple[GPTConfig, AttentionConfig]:
    """config.json as our configuration, with vocab_size the embedding's rows. Keys that it lacks have transformers'
    defaults. ValueError, with key and value, for what we cannot compute."""
    family = theirs.get("model_type")
    if family not in ("gpt2", "llama", "mistral"):
        raise ValueError(f"config.json has model_type={said(family)}; only gpt2, llama and mistral can be used")
    refuse(theirs, quantization_config=None, is_encoder_decoder=False, add_cross_attention=False, per_layer_config=None)
    # Other keys, and other files in place of these.
    refuse(theirs, attribute_map=None, transformers_weights=None, configuration_files=None)
    for key in ("is_causal", "scale_attn_weights"):
        if theirs.get(key, True) is not True:  # transformers reads null as false
            raise ValueError(f"config.json has {key}={said(theirs[key])}; only true can be used")
    if not isinstance(tied := theirs.get("tie_word_embeddings"), bool | None):
        raise ValueError(f"config.json has tie_word_embeddings={said(tied)}, which is neither true nor false")
    if family == "gpt2":
        return gpt2_configuration(theirs), AttentionConfig()
    window = None
    if family == "mistral" and theirs.get("sliding_window", 4096) is not None:
        window = number(theirs, "sliding_window", 4096)
    model = llama_configuration(theirs)
    refuse(theirs, layer_types=[f"{'full' if window is None else 'sliding'}_attention"] * model.n_layer)
    return model, AttentionConfig(window=window)


def numbers(theirs: dict, keys: list[tuple]) -> dict[str, Any]:
    """The fields of GPTConfig that `keys` names: rows of GPT2_NUMBERS or LLAMA_NUMBERS."""
    found = {}
    for name, key, *usual in keys:
        default, kind = (usual[0], float) if usual else (None, int)
        found[key] = number(theirs, name, default, kind, LAYERS if key == "n_layer" else 2**31)
    return found


def gpt2_configuration(theirs: dict) -> GPTConfig:
    """GPT-2's config.json as our configuration."""
    for other, key in GPT2_ALIASES.items():
        refuse(theirs, **{other: theirs.get(key)})
    refuse(theirs, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False)
    activation = theirs.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in GELU:
        raise ValueError(f"config.json has activation_function={said(activation)}; only {', '.join(GELU)} can be used")
    if theirs.get("n_positions") is None:
        theirs = theirs | {"n_positions": theirs.get("n_ctx")}
    found = numbers(theirs, GPT2_NUMBERS)
    usual = theirs.get("n_inner") in (None, 4 * found["n_embd"])
    tied = theirs.get("tie_word_embeddings", True) is True
    hidden = None if usual else number(theirs, "n_inner")
    return GPTConfig(mlp=GELU[activation], mlp_hidden=hidden, tie_head=tied, **found)


def llama_configuration(theirs: dict) -> GPTConfig:
    """Llama's and Mistral's config.json as our configuration."""
    refuse(theirs, hidden_act="silu", attention_bias=False, mlp_bias=False)
    rope = rope_of(theirs)
    yarn = rope.get("rope_type") == "yarn"
    found = numbers(theirs, LLAMA_NUMBERS)
    refuse(theirs, head_dim=found["n_embd"] // found["n_head"])
    return GPTConfig(
        **LLAMA_OPTIONS,
        **found,
        n_kv_head=number(theirs, "num_key_value_heads", found["n_head"]),
        tie_head=theirs.get("tie_word_embeddings", False) is True,
        rope_base=number(rope, "rope_theta", 10000.0, float),
        yarn_factor=number(rope, "factor", kind=float) if yarn else 1.0,
        yarn_original=number(rope, ORIGINAL) if yarn else None,
    )


def rope_of(theirs: dict) -> dict:
    """What config.json says of the rotary embedding: the base and, with YaRN, the factor and the original length.
    ValueError for another embedding."""
    key, rope = "rope_parameters", theirs.get("rope_parameters")
    if rope is None:  # as transformers wrote it before version 5
        key, rope = "rope_scaling", {} if theirs.get("rope_scaling") is None else theirs["rope_scaling"]
    else:
        refuse(theirs, rope_scaling=None)
    refuse(theirs, partial_rotary_factor=1)
    if not isinstance(rope, dict):
        raise ValueError(f"config.json has {key}={said(rope)}, which has no counterpart here")
    refuse(theirs, **{ORIGINAL: rope.get(ORIGINAL)})
    beside = number(theirs, "rope_theta", 10000.0, float)
    rope = {**rope, "rope_theta": number(rope, "rope_theta", beside, float)}
    if {**rope, "rope_theta": 0} not in PLAIN_ROPE and {**YARN, **rope, **SIZES} != {**YARN, **SIZES}:
        raise ValueError(
            f"config.json has {key}={said(rope)}; only rope_type=default can be used, and yarn as it was published"
        )
    return rope


def huggingface_config(model: GPTConfig, attention: AttentionConfig, begin: int, end: int) -> dict[str, Any]:
    """config.json of a model, with vocab_size the tokenizer's. begin, end: ids of the tokens around a text.

    ValueError, with the key, for an option that neither family has.
    """
    gpt2 = model.norm == "layernorm"
    refuse_without_counterpart(model, attention, gpt2)
    common = {name: getattr(model, ours) for name, ours, *_ in (GPT2_NUMBERS if gpt2 else LLAMA_NUMBERS)}
    common |= {"tie_word_embeddings": model.tie_head, "bos_token_id": begin, "eos_token_id": end, "dtype": "float32"}
    if gpt2:
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_inner": model.mlp_hidden,
            "activation_function": {ours: key for key, ours in GELU.items() if key != "gelu_pytorch_tanh"}[model.mlp],
            **{f"{place}_pdrop": model.dropout_p for place in ("embd", "resid")},
            "attn_pdrop": attention.dropout_p,
        }
    family: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if attention.window is not None:  # Mistral is Llama with a window
        family = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": attention.window}
    yarn = {"rope_type": "yarn", "factor": model.yarn_factor, ORIGINAL: model.yarn_original}
    return common | {
        **family,
        "num_key_value_heads": model.n_kv_head,
        "head_dim": model.head_size,
        "intermediate_size": layout(model)["blocks.0.mlp.up.weight"][0].shape[0],
        "hidden_act": "silu",
        "rope_theta": model.rope_base,
        **({"rope_scaling": yarn} if model.yarn_factor > 1 else {}),
        "attention_dropout": attention.dropout_p,
    }


def refuse_without_counterpart(model: GPTConfig, attention: AttentionConfig, gpt2: bool) -> None:
    """ValueError, with the key, for an option that the family cannot write."""
    name = "GPT-2" if gpt2 else "Llama"
    activation = model.mlp if model.mlp in GELU.values() else "gelu_tanh"
    options = GPT2_OPTIONS | {"n_kv_head": model.n_head, "mlp": activation} if gpt2 else LLAMA_OPTIONS
    for key, value in options.items():
        if getattr(model, key) != value:
            raise ValueError(
                f"model.{key}={getattr(model, key)} with model.norm={model.norm} has no counterpart: {name} has {value}"
            )
    never = {"model.rope_base_local": model.rope_base_local, "model.qk_norm": model.qk_norm or None}
    for key in ("softmax_scale", *OF_SCORE, "windows", "block_mask", *(["window"] if gpt2 else [])):
        never[f"attention.{key}"] = getattr(attention, key) or None
    for key, value in never.items():
        if value is not None:
            raise ValueError(f"{key}={value} has no counterpart in {name}: it cannot be exported")


def offer_to_transformers(config: AttentionConfig, name: str = "tilegpt") -> None:
    """Registers our attention with transformers. model.set_attn_implementation(name) then makes a model run on it.

    config: a resolved AttentionConfig. Its window and softcap hold in layers that have none of their own. The model
    itself has a scale and a dropout. Dropout's mask is drawn from a seed, which torch draws.
    Raises ValueError if config has softmax_scale, dropout_p or documents. The model's forward raises ValueError, one
    line, for what our attention cannot compute: padding, packed texts and any other mask than a causal one with a
    window. If transformers builds a mask, each layer compares it, (B, T, T_k). Of packed texts see docs/training.md.
    """
    for option, usual in (("softmax_scale", None), ("dropout_p", 0), ("documents", False)):
        if (value := getattr(config, option)) != usual:
            raise ValueError(f"attention.{option}={value} would be ignored: the model decides that; leave it out")
    from transformers import AttentionInterface, AttentionMaskInterface  # imported here: only the tests need them
    from transformers.masking_utils import sdpa_mask

    def ours(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """q (B, H, T, D), k and v (B, H_kv, T_k, D) to o (B, T, H, D), and None for the weights."""
        T, T_k, own = query.shape[2], key.shape[2], config.layer(getattr(module, "layer_idx", 0))
        own = replace(own, window=sliding_window or own.window, softcap=softcap or own.softcap, dropout_p=dropout)
        causal = getattr(module, "is_causal", True) and rest.get("is_causal") is not False
        if attention_mask is None:
            plain = T in (1, T_k)  # else the keys are a cache of fixed size, whose end is not filled yet
        else:
            problem = problem_of(query, key, own, softmax_scale=scaling)
            seen = visible(problem, range(T), range(T_k), query.device)[:, None]  # (1, 1, T, T_k)
            plain = attention_mask.dtype == torch.bool and torch.equal(attention_mask, seen.expand_as(attention_mask))
        if not (causal and plain) or s_aux is not None:
            raise ValueError(
                f"attention of {T} tokens over {T_k}: the model wants padding, packed texts, a cache of fixed size, "
                "sinks or another mask than a causal one with a window; leave that out, or use attn_implementation=sdpa"
            )
        seed = torch.randint(2**63 - 1, (), device=query.device) if dropout > 0 else None
        o = attention(query, key, value, own, softmax_scale=scaling, seed=seed)
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, ours)
    AttentionMaskInterface.register(name, sdpa_mask)
