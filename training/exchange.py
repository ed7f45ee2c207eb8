"""Weights in and out: GPT-2's and Llama's families in Hugging Face's format, and runs of our own.

    find(source, ...)       where the weights are: a folder, a run or checkpoint of ours, a name on Hugging Face
    describe(place)         their configuration, without reading the weights
    read(place)             them as a Checkpoint, which train.py begins from and sample.py samples
    export(trained, folder) writes what transformers' AutoModelForCausalLM and AutoTokenizer load

A folder in Hugging Face's format has config.json, model.safetensors (or several files and an index) and tokenizer.json
(or vocab.json and merges.txt). A stranger may have made it, so:
- only safetensors and JSON are read. They hold numbers and text. A pickle (.bin, .pt) would run code.
- files, links and index entries that lead out of the folder are refused.
- sizes are compared before memory is taken: those of JSON files with a limit, those of the tensors with the file's
  length and with config.json.

model/families.py has the names on both sides.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from data.download import NotThere, from_hub
from data.tokenizer import BYTE_LEVEL, END_OF_TEXT, from_huggingface, from_json, to_huggingface, to_json
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.families import Source, configuration, huggingface_config, layout
from model.gpt import GPTConfig
from training import checkpoint, config
from training.files import inside, open_file, read_json, read_text

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SETTINGS = "tokenizer_config.json"
OF_TOKENS = ("special_tokens_map.json", SETTINGS, "added_tokens.json")  # beside a tokenizer; each may be missing
DTYPES = ("F32", "BF16", "F16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_NAME = re.compile(r"[\w. -]{1,200}\.safetensors", re.ASCII)

SMALL, LARGE = 1 << 20, 1 << 27  # bytes of config.json and of other JSON; the largest tokenizer.json in use has 35 MB

NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # masks and tables in older files


# --- finding ---------------------------------------------------------------------------------------------------------


def find(source: str, runs: Path, cache: Path) -> Path:
    """The folder that init_from= names: a folder in Hugging Face's format, or a checkpoint of ours (of a run, the one
    with the lowest validation loss), or a name on Hugging Face, whose config.json is downloaded.

    cache: hub/NAME in it may have the whole model, put there by hand or by an earlier version.

    Raises ValueError, one line, if there is none."""
    folder = Path(os.path.expanduser(source))
    if (folder / CONFIG).exists():
        return folder
    own = [
        folder / checkpoint.FOLDER,
        folder / "state.json",
        *([] if folder.is_absolute() else [checkpoint.folder_of(runs / source)]),
    ]
    if any(path.exists() for path in own) or re.fullmatch(r"step_\d+", folder.name):
        return checkpoint.find(str(folder), runs, option="init_from", which="best")
    if folder.is_dir():
        refuse_pickles(folder)
        raise ValueError(
            f"{folder} has no {CONFIG}: give a folder that transformers' save_pretrained() wrote, or a run"
        )
    if folder.exists():
        raise ValueError(f"init_from={source} is a file: give its folder ({folder.parent}), or a run")
    if source in ("resume", "scratch"):  # nanoGPT's
        raise ValueError(f"init_from={source}: resume=auto goes on with a run; without init_from= a run begins anew")
    if not HUB_NAME.fullmatch(source) or ".." in source or "--" in source:
        raise ValueError(f"init_from={source}: there is no such folder, and no name on Hugging Face is like that")
    by_hand = cache / "hub" / source
    if (by_hand / CONFIG).exists() and any((by_hand / file).exists() for file in (WEIGHTS, INDEX)):
        return by_hand
    try:
        return from_hub(source, CONFIG, f"put the whole model into {by_hand.resolve()}").parent
    except ValueError as error:
        raise ValueError(f"init_from={source} is no run in {runs} and no folder, and {error}") from error


def fetch_the_rest(name: str, folder: Path) -> None:
    """Downloads the tokenizer and the weights of the model `name` beside its config.json in Hugging Face's cache."""

    def fetch(*files: str) -> None:
        for file in files:
            from_hub(name, file, "give a folder with the whole model as init_from=", revision=folder.name)

    try:
        fetch(TOKENIZER)
    except NotThere:
        fetch("vocab.json", "merges.txt")
    if not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():  # else all that there is was fetched before
        for name_of_file in OF_TOKENS:
            with suppress(NotThere):
                fetch(name_of_file)
    try:
        fetch(WEIGHTS)
        return
    except NotThere:
        pass
    try:
        fetch(INDEX)
    except NotThere as error:
        raise ValueError(f"{name} has no {WEIGHTS}, only pickles perhaps, which are not read: {error}") from error
    fetch(*shards(folder))


# --- reading ---------------------------------------------------------------------------------------------------------


def describe(place: Path) -> dict[str, dict]:
    """The configuration of the weights in `place`: {"model", "attention", "break_it"}, each as a dictionary. From
    config.json the vocabulary's size is not known: vocab_size is None, and vocab_multiple is 1."""
    if not (place / CONFIG).exists():
        theirs = checkpoint.load_state(place)["config"]
        return {key: theirs[key] for key in ("model", "attention", "break_it")}
    theirs = read_json(place, CONFIG, SMALL)
    with naming(place):
        model, attention = configuration(theirs)
    model.vocab_size = None
    return {"model": asdict(model), "attention": asdict(attention), "break_it": asdict(BreakIt())}


def read(place: Path, source: str) -> checkpoint.Checkpoint:
    """The weights in `place`, verified, as a Checkpoint; those of Hugging Face as float32, with step 0. source: what
    the user named, for a download. state["begin"] is the token that begins a text there. ValueError, one line, for
    whatever cannot be used."""
    if not (place / CONFIG).exists():
        return checkpoint.load(place)
    if place.parent.name == "snapshots" and not Path(os.path.expanduser(source)).exists():
        fetch_the_rest(source, place)
    theirs = read_json(place, CONFIG, SMALL)
    with naming(place):
        ours, attention = configuration(theirs)
        encoding = from_huggingface(*read_tokenizer(place), token(theirs, "eos_token_id"))
    rows = ours.vocab_size or 0
    if encoding.n_vocab > rows:
        raise ValueError(f"{place}: the tokenizer has {encoding.n_vocab} tokens, {CONFIG} has vocab_size={rows}")
    with ExitStack() as stack:
        found = headers(place, stack)
        wanted = compare(place, ours, found)
        model = {name: torch.cat([take(found, part) for part in parts]) for name, parts in wanted.items()}
    if ours.tie_head:
        model["head.weight"] = model["embedding.weight"]
    # Rows without a token stay, as padding: the files have them, and round sizes are faster. No loss counts them.
    ours.vocab_size, ours.vocab_multiple = encoding.n_vocab, 1 if encoding.n_vocab == rows else rows
    trained = {"model": asdict(ours), "attention": asdict(attention), "break_it": asdict(BreakIt())}
    begin = token(theirs, "bos_token_id")
    begin = begin if begin in encoding._special_tokens.values() else encoding.eot_token
    state = {"config": trained, "broken": "", "val_loss": None, "begin": begin}
    return checkpoint.Checkpoint(place, 0, model, state, to_json(encoding))


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Names the folder in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def token(theirs: dict, key: str) -> int | None:
    """A token's id in config.json; of a list the first."""
    value = theirs.get(key)
    first = value[0] if isinstance(value, list) and value else value
    return first if type(first) is int else None


def read_tokenizer(folder: Path) -> tuple[dict, dict]:
    """tokenizer.json, or GPT-2's older files in the same form, and what the other files say, as from_huggingface() has
    it."""
    told = (read_json(folder, name, SMALL) if (folder / name).exists() else {} for name in OF_TOKENS)
    special, settings, added = told
    given = {key: value for key, value in settings.items() if value is not None}
    beside = special | given | {"added_tokens": added}
    if (folder / TOKENIZER).exists():
        return read_json(folder, TOKENIZER, LARGE), beside
    if not (folder / "vocab.json").exists():
        raise ValueError(
            f"it has no {TOKENIZER}, nor vocab.json and merges.txt: put the model's own there; if that is byte "
            "or gpt2, `python sample.py run=NAME export=FOLDER` writes it, of a run that has that tokenizer"
        )
    vocab = read_json(folder, "vocab.json", LARGE)
    lines = read_text(folder, "merges.txt", 1 << 25).split("\n")
    merges = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"merges.txt has the line {' '.join(wrong)[:100]!r}, which is no pair of tokens")
    made = {"".join(merge) for merge in merges}
    listed = [{"content": text, "id": i} for text, i in vocab.items() if len(text) > 1 and text not in made]
    model = {"vocab": vocab, "merges": merges}
    cut = {"type": "ByteLevel", "add_prefix_space": False}
    return {"model": model, "added_tokens": listed, "pre_tokenizer": cut, "decoder": BYTE_LEVEL}, beside


def refuse_pickles(folder: Path) -> None:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} has {pickles[0]}, a pickle, which can run code and is not read; if you trust it, load it with "
            "transformers, whose save_pretrained() writes model.safetensors"
        )


def shards(folder: Path) -> list[str]:
    """The names of the weights' files."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if not (folder / INDEX).exists():
        refuse_pickles(folder)
        raise ValueError(f"{folder} has no {WEIGHTS}: give a folder with weights")
    files = read_json(folder, INDEX, LARGE).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map: the file is damaged")
    for file in files.values():
        if not FILE_NAME.fullmatch(file):
            raise ValueError(f"{folder / INDEX} names {file[:100]!r}: only .safetensors in the same folder are read")
    return sorted(set(files.values()))


def headers(place: Path, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """{name: (the opened file that has this tensor, its full name)}. The stack closes the files."""
    found: dict[str, tuple[Any, str]] = {}
    for file in [inside(place, name) for name in shards(place)]:
        opened = stack.enter_context(open_file(file))
        for full in opened.keys():  # noqa: SIM118 (it is no dictionary)
            if strip(full) in found:
                raise ValueError(f"{file} has the tensor {full!r} a second time: the folder is damaged")
            found[strip(full)] = (opened, full)
    return found


def strip(name: str) -> str:
    """A tensor's name without the first part that GPT-2's own file, and others of a bare model, lack."""
    return re.sub(r"^(transformer|model)\.", "", name)


def compare(place: Path, theirs: GPTConfig, found: dict[str, tuple[Any, str]]) -> dict[str, list[Source]]:
    """layout(theirs). ValueError if the files' tensors are not those, with these shapes. Reads no tensor
    but a tied head, which may differ from the embedding."""
    wanted = layout(theirs)
    names = {strip(part.name): part for parts in wanted.values() for part in parts}
    for name, part in names.items():
        opened, full = found.get(name, (None, ""))
        if opened is None or full not in (name, part.name):
            raise ValueError(f"{place} lacks the tensor {name}: {CONFIG} is of another model, or a file is missing")
        shape = part.shape
        there = opened.get_slice(full)
        if tuple(there.get_shape()) != shape:
            raise ValueError(f"{place}: the tensor {name} is {tuple(there.get_shape())}, {CONFIG} says {shape}")
        if there.get_dtype() not in DTYPES:
            raise ValueError(f"{place}: the tensor {name} is {there.get_dtype()}; only {', '.join(DTYPES)} can be used")
    for name in sorted(found.keys() - names.keys()):
        if name == "lm_head.weight" and theirs.tie_head:
            both = (Source(name, (), False), *wanted["embedding.weight"])
            if not torch.equal(*(take(found, part) for part in both)):
                raise ValueError(f"{place}: {name} differs from the embedding, and {CONFIG} has them tied")
        elif not NO_WEIGHTS.search(name):
            raise ValueError(f"{place}: the tensor {name!r} has no place in the model that {CONFIG} describes")
    return wanted


def take(found: dict[str, tuple[Any, str]], part: Source) -> Tensor:
    """One tensor as float32, as ours. ValueError if it is not finite: a flipped bit in an exponent shows here."""
    opened, full = found[strip(part.name)]
    weight = opened.get_tensor(full).float()
    if not weight.isfinite().all():
        raise ValueError(f"the tensor {full} has NaN or infinity: the file is damaged; download or copy it again")
    return weight.T if part.transposed else weight


# --- writing ---------------------------------------------------------------------------------------------------------


def export(trained: checkpoint.Checkpoint, folder: Path) -> str:
    """Writes the weights as float32 in Hugging Face's format, completely or not at all. Returns the architecture,
    and what it lacks.

    The rows that vocab_multiple added are cut. Biases that the model lacks are written as zeros, if GPT-2 has them.
    ValueError, one line, if `folder` is there or cannot be written, or if an option has no counterpart there.
    """
    if os.path.lexists(folder):
        raise ValueError(f"export={folder} exists already: give the name of a new folder")
    if trained.state["broken"]:
        raise ValueError(
            f"{trained.path} is broken on purpose ({trained.state['broken']}): elsewhere it is another model"
        )
    if not all(weight.isfinite().all() for weight in trained.model.values()):
        raise ValueError(f"{trained.path} has NaN or infinity in its weights: export another checkpoint of the run")
    ours = config.from_dict(GPTConfig, trained.state["config"]["model"])
    attention = config.from_dict(AttentionConfig, trained.state["config"]["attention"])
    encoding = from_json(trained.tokenizer)
    ours.vocab_size, ours.vocab_multiple = encoding.n_vocab, 1
    end = encoding.eot_token
    description = huggingface_config(ours, attention, trained.state.get("begin", end), end)
    tokenizer = to_huggingface(encoding)

    weights = {}
    full = replace(ours, bias=ours.bias or ours.norm == "layernorm")
    for name, parts in layout(full).items():
        sizes = [part.shape[-1 if part.transposed else 0] for part in parts]
        weight = trained.model.get(name, torch.zeros(sum(sizes)))[: sum(sizes)].float()
        for part, rows in zip(parts, weight.split(sizes), strict=True):
            weights[part.name] = (rows.T if part.transposed else rows).contiguous().clone()
    around = {"bos_token_id": description["bos_token_id"], "eos_token_id": end}
    names = {"bos_token": encoding.decode([around["bos_token_id"]]), "eos_token": END_OF_TEXT}
    files = {
        CONFIG: description,
        "generation_config.json": around,
        TOKENIZER: tokenizer,
        # The general class takes tokenizer.json as it is. A model's own class would cut the text in its own way.
        SETTINGS: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": ours.context_length,
            "clean_up_tokenization_spaces": False,
            **names,
        },
    }
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        safetensors.torch.save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"export={folder} cannot be written ({why}): name a folder where there is room") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is still there only after an error
    (architecture,) = description["architectures"]
    if ours.norm == "rmsnorm" and ours.dropout_p:
        architecture += f", without model.dropout_p={ours.dropout_p}, which it does not have"
    return architecture
