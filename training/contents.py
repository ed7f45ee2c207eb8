"""What a run writes into a checkpoint, and whether a checkpoint holds just that.

A stranger may have made a checkpoint: then its hashes match any content. So before a tensor is read, state.json is
compared with HEADER, and the tensors' names, types and shapes with those of the model that its configuration describes.
Keys of the state that HEADER does not name are tolerated: a newer version may have written them. "?" ends a key that
older versions did not write.
"""

import json
import math
from dataclasses import is_dataclass, replace
from functools import lru_cache
from typing import Any

import tiktoken

from data.tokenizer import from_json, panic_as
from model.attention import AttentionConfig
from model.break_it import BreakIt, of_older
from model.gpt import GPT, GPTConfig, without_values
from training import config
from training.files import LARGEST, printable
from training.machine import without_stderr

Described = dict[str, tuple[str, tuple[int, ...]]]  # {tensor: (dtype as safetensors calls it, shape)}

COUNT = range(1 << 62)  # a whole number that tensors can hold
SIZE = range(1, 1 << 31)  # of a model
SIZE_OR_ZERO = range(1 << 31)
LOADER = {"position": COUNT, "seed": int, "context_length": COUNT, "dataset": str, "packed?": COUNT}
SCALER = {"scale": (0.0, 1e30), "growth_factor": (1.0, 1e9), "backoff_factor": (0.0, 1.0), "growth_interval": COUNT}
FROM_ZERO = (0.0, math.inf)
ABOUT = {"attention": str, "device": str, "dtype": str}
STATE = {
    "config": {"model": GPTConfig, "attention": AttentionConfig, "break_it": BreakIt},
    "broken": str,
    "val_loss": float | None,
    "about?": ABOUT,
    "loader?": LOADER,
    "scaler?": dict,  # empty, or SCALER
    "validation?": str,
    "due?": bool,
    "place?": FROM_ZERO,
    "pace?": FROM_ZERO,
    "ended?": bool,
    "seconds?": FROM_ZERO,
}
HEADER = {"step": COUNT, "alias": dict[str, str], "state": STATE}

ADAMW, MUON = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}
RNG = {"rng.cpu": (5056,), "rng.cuda": (16,), "rng.mps": None}  # uint8; Apple does not say how many


def check(value: Any, expected: Any, key: str = "") -> None:
    """ValueError if `value` of state.json, found at `key`, is not as expected: a table, a dataclass, a range,
    two limits or a type."""
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            raise ValueError(f"state.json: {key or 'it'} is {shown(value)} and not an object")
        for name, inner in expected.items():
            full = f"{key}.{name.removesuffix('?')}".lstrip(".")
            if name.removesuffix("?") in value:
                check(value[name.removesuffix("?")], inner, full)
            elif not name.endswith("?"):
                raise ValueError(f"state.json lacks {full}")
    elif isinstance(expected, range):
        if type(value) is not int or value not in expected:
            raise ValueError(f"state.json: {key} is {shown(value)} and not a whole number in {expected}")
    elif isinstance(expected, tuple):
        if not config.fits(float, value) or not expected[0] <= value < expected[1]:
            raise ValueError(
                f"state.json: {key} is {shown(value)} and not a number from {expected[0]} to {expected[1]}"
            )
    elif isinstance(expected, type) and is_dataclass(expected):
        config.from_dict(expected, value, f"{key.removeprefix('state.config.')}.")
    elif not config.fits(expected, value) or (expected is str and type(value) is not str):  # a text may be typed as 3
        raise ValueError(f"state.json: {key} is {shown(value)} and not {getattr(expected, '__name__', expected)}")


def shown(value: Any) -> str:
    return printable(repr(value)[:60])


def rename_older(header: dict) -> None:
    """Writes the configuration of state.json as it is written today, if an older version wrote it."""
    match header:
        case {"state": {"config": {"break_it": kept} as configuration}}:
            configuration["break_it"] = of_older(kept)


def check_header(header: dict) -> None:
    """ValueError if state.json is not as a run writes it."""
    check(header, HEADER)
    state = header["state"]
    if bool(state["broken"]) != bool(config.from_dict(BreakIt, state["config"]["break_it"]).label):
        raise ValueError(f"state.json: broken is {shown(state['broken'])}, which contradicts state.config.break_it")
    check(state["config"]["model"], {"vocab_size": SIZE, "context_length": SIZE}, "state.config.model")
    check(state, {"begin?": range(state["config"]["model"]["vocab_size"])}, "state")  # no run writes it yet
    if state.get("scaler"):
        check(state["scaler"], SCALER | {"_growth_tracker": SIZE_OR_ZERO}, "state.scaler")
    if config.one_line(state["broken"]) != state["broken"]:
        raise ValueError(f"state.json: broken is {shown(state['broken'])}, which has control characters")
    for key, value in state["config"]["model"].items():
        if type(value) is int:
            check(value, SIZE, f"state.config.model.{key}")


def check_tensors(file: str, header: dict, found: Described, size: int) -> None:
    """ValueError if the tensors of this file, `size` bytes long, are not those that a run of this configuration
    writes."""
    if file == "optimizer.safetensors":
        check_optimizer(header, found, size)
        return
    refuse_too_large(header, found, size, "model.safetensors")
    tensors, _ = network(json.dumps(header["state"]["config"]))
    for name, first in header["alias"].items():
        if first not in found or name in found or tensors.get(name, 0) != tensors.get(first, 1):
            raise ValueError(f"state.json: alias has {shown(name)} for {shown(first)}, which are not one weight")
    there = found | {name: found[first] for name, first in header["alias"].items()}
    compare("model.safetensors", there, {name: what for name, (_, what) in tensors.items()})


def refuse_too_large(header: dict, found: Described, size: int, file: str) -> None:
    """ValueError if the configuration's model has more numbers or layers than the file. Making it takes time and memory
    for each layer, even without its numbers, so this comes first."""
    model = config.from_dict(GPTConfig, header["state"]["config"]["model"])
    rows, C = model.vocab_size or 0, model.n_embd
    rows += model.context_length if model.position == "learned" else 0
    if 4 * C * (rows + model.n_layer * 2 * (C + (model.mlp_hidden or C))) > size or model.n_layer > len(found):
        raise ValueError(f"its configuration describes a larger model than {file} has, {size:,} bytes")
    # The table of sines has a row for each position, whatever the file has.
    if model.position == "rope" and 4 * model.context_length * model.head_size > size + LARGEST // 4:
        raise ValueError(f"its configuration has a context of {model.context_length:,} tokens, more than can be used")


def check_optimizer(header: dict, found: Described, size: int) -> None:
    """ValueError if the tensors of optimizer.safetensors are not an optimizer's of that model, or a kept batch."""
    there = {name: shape for name, shape in RNG.items() if name in found or name == "rng.cpu"}
    expected: Described = {name: ("U8", shape or found[name][1]) for name, shape in there.items()}
    if "batch.x" in found:
        check(header["state"], {"about": ABOUT}, "state")
        kind, shape = found["batch.x"]
        length = header["state"]["config"]["model"]["context_length"]
        if kind != "I64" or len(shape) != 2 or 0 in shape or shape[1] > length:
            raise ValueError(f"optimizer.safetensors: batch.x is {kind} {shape} and not I64 (B, T)")
        expected |= dict.fromkeys(("batch.x", "batch.y"), (kind, shape))
        if "batch.documents" in found:
            expected["batch.documents"] = (found["batch.documents"][0], shape)
    else:
        check(header["state"], {"loader": LOADER}, "state")
        if found.keys() - RNG.keys():  # at step 0 there is no more
            refuse_too_large(header, found, size, "optimizer.safetensors")
            expected |= optimizers_of(header, found)
    compare("optimizer.safetensors", found, expected)


def optimizers_of(header: dict, found: Described) -> Described:
    """The tensors that AdamW and Muon keep of each parameter. Their names tell which of the two has it."""
    expected: Described = {}
    _, parameters = network(json.dumps(header["state"]["config"]))
    has = {name: {key for key in ADAMW | MUON if f"{name}.{key}" in found} for name in parameters}
    averaged = any(f"{name}.trained" in found for name in parameters)
    started = any(has.values()) and not header["state"].get("scaler")  # which may have left out an optimizer's steps
    for name, what in parameters.items():
        keys = MUON if has[name] & MUON else ADAMW if has[name] or started else set()
        for key in keys | {"trained"} if averaged else keys:
            expected[f"{name}.{key}"] = ("F32", ()) if key == "step" else what
    return expected


def check_tokenizer(header: dict, text: str) -> None:
    """ValueError if the tokenizer cannot cut a text, or has another number of tokens than the model."""
    encoding = from_json(text)
    size = header["state"]["config"]["model"]["vocab_size"]
    if not isinstance(encoding.name, str):
        raise ValueError(f"tokenizer.json: name is {shown(encoding.name)} and not text")
    if encoding.n_vocab != size:
        raise ValueError(f"tokenizer.json has {encoding.n_vocab} tokens, the model {size}")
    # tiktoken panics when a pattern matches the empty text. With a token for that it does not.
    ranks = {bytes([b]): b for b in range(256)} | {b"": 256}
    probe = tiktoken.Encoding("probe", pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens={})
    sample = "".join(map(chr, range(1, 0x250))) + " a  b\n\n 12 345's\u4e2d\U0001f600 "
    message, pattern = "tokenizer.json: the pattern {} does not cut a text into whole parts", shown(encoding._pat_str)
    with panic_as(message, pattern), without_stderr():  # where it searches for too long
        ids = probe.encode_ordinary(sample)
    if 256 in ids or bytes(ids) != sample.encode():
        raise ValueError(message.format(pattern))


@lru_cache(1)  # a resume asks three times, and GPT-2's takes a second
def network(trained: str) -> tuple[dict[str, tuple[int, tuple]], Described]:
    """The state dict, {name: (the same number for tied weights, what it is)}, and the parameters of the model that the
    checkpoint's configuration, as JSON, describes. Made without numbers."""
    groups = json.loads(trained)
    attention = replace(config.from_dict(AttentionConfig, groups["attention"]), impl="naive")
    model, break_it = config.from_dict(GPTConfig, groups["model"]), config.from_dict(BreakIt, groups["break_it"])
    with without_values():
        made = GPT(model, attention, break_it)
    saved = {name: (id(p), ("F32", tuple(p.shape))) for name, p in made.state_dict(keep_vars=True).items()}
    return saved, {name: ("F32", tuple(p.shape)) for name, p in made.named_parameters()}


def compare(file: str, found: Described, expected: Described) -> None:
    for name in sorted(found.keys() ^ expected.keys()):
        wrong = "has a tensor that no run of this configuration writes," if name in found else "lacks the tensor"
        raise ValueError(f"{file} {wrong} {shown(name)}")
    double = "F64" in {found[name][0] for name in expected if not name.endswith(".step")}
    for name, (kind, shape) in expected.items():
        # A float64 model has only float64 tensors, but for AdamW's step, which has torch's default dtype.
        either = kind == "F32" and name.endswith(".step")
        wanted = {"F32", "F64"} if either else {"F64" if double and kind == "F32" else kind}
        if found[name][0] not in wanted or found[name][1] != shape:
            raise ValueError(
                f"{file}: {name} is {found[name][0]} {found[name][1]}, its configuration says {kind} {shape}"
            )
