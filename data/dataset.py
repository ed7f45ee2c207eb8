"""Token files, opened: those that prepare.py makes of a text, and shards from elsewhere (data=bin, data=fineweb)."""

import glob
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.corpus import SPLITS
from data.download import fineweb
from data.prepare import FORMAT, MANIFEST, PREPARED, DataConfig, check, prepare
from data.shards import Shards, inspect, join, read_tokens
from data.text import expand, in_order
from data.tokenizer import TokenizerConfig, build, from_json, same, token_bytes

FILES = {"tokenizer.json", *(name for split in SPLITS for name in (f"{split}.bin", f"{split}_documents.npy"))}


@dataclass
class Dataset:
    """Opened token files. The tokens stay on disk (memory-mapped), so a file may be larger than memory."""

    folder: Path
    manifest: dict[str, Any]  # of a prepared folder; {} for shards from elsewhere
    encoding: tiktoken.Encoding
    train: np.ndarray | Shards  # uint16 or uint32 (N,), read-only
    val: np.ndarray | Shards
    train_documents: np.ndarray  # int64 (documents,): index of each document's first token
    val_documents: np.ndarray
    token_bytes: np.ndarray = field(init=False)  # int32 (n_vocab,): number of bytes in each token's text

    def __post_init__(self):
        self.token_bytes = token_bytes(self.encoding)


def open_data(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    kept: tiktoken.Encoding | None = None,
    context_length: int | None = None,
) -> Dataset:
    """Opens the data that the configuration names. Prepares or downloads it at first use. Raises ValueError, one line,
    for every mistake that the user can correct. kept, context_length: as in prepare()."""
    if data.source in PREPARED:
        return open_dataset(prepare(data, tokenizer, kept, context_length))
    check(data)
    if data.source == "bin":
        assert data.path is not None, "check() refuses that"
        return open_shards(find_shards(data.path), tokenizer, data.val_fraction)
    if tokenizer.kind != "gpt2":  # checked before hundreds of megabytes are downloaded
        raise ValueError(f"tokenizer={tokenizer.kind}: data=fineweb has GPT-2's tokens: use tokenizer=gpt2")
    way_out = "delete it and what it links to, and it will be downloaded again"
    return open_shards(fineweb(Path(data.cache), data.shards), tokenizer, data.val_fraction, way_out)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that prepare() wrote into `folder`. Raises ValueError if it cannot be read or has another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        here = {file.name for file in folder.glob("*.bin")}
        if not FILES | here <= set(manifest["sha256"]):  # a file without a hash would not be checked
            raise ValueError("not the files that belong here")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:  # the last two: JSON of another kind
        raise ValueError(f"{folder / MANIFEST} cannot be read: delete {folder} and run again") from error
    if version != FORMAT:
        raise ValueError(f"{folder} is of format {version}, this code reads {FORMAT}: delete it and run again")
    return manifest


def open_dataset(folder: Path) -> Dataset:
    """Opens a folder that prepare() made. Checks every file against the SHA-256 in the manifest: about a second per GB.

    Raises ValueError for a missing, cut or edited file. The way out is always to delete the folder: the next run makes
    it again from the text.
    """
    manifest = read_manifest(folder)
    way_out = f"delete {folder} and run again"
    names = sorted(name for name in manifest["sha256"] if name.endswith(".bin"))
    train, val = (  # before the hashes, because read_tokens() has better messages
        join([read_tokens(folder / name, way_out) for name in names if name.startswith(split)]) for split in SPLITS
    )
    for name, sha256 in manifest["sha256"].items():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise ValueError(f"{folder / name} is missing: {way_out}") from error
        if found != sha256:
            raise ValueError(f"{folder / name} was edited since it was made: {way_out}")
    encoding = from_json((folder / "tokenizer.json").read_bytes())
    starts = [np.load(folder / f"{name}_documents.npy", allow_pickle=False) for name in SPLITS]
    return Dataset(folder, manifest, encoding, train, val, *starts)


# ---- shards from elsewhere


def find_shards(path: str) -> list[Path]:
    """The token files that data.path names: a file, the .bin files in a folder, or the files that a glob matches."""
    named = Path(os.path.expanduser(path))
    found = expand(Path(glob.escape(str(named))) / "*.bin" if named.is_dir() else named)
    if not found:
        raise ValueError(f"data.path={path} has no .bin files of tokens: give a folder or a glob of some, or data=text")
    return [Path(file) for file in in_order(found)]


def is_validation(file: Path) -> bool:
    """Whether the name says that the file is for validation: fineweb_val_000000.bin, val.bin; not retrieval_000.bin."""
    return re.search(r"(^|[^a-z])val([^a-z]|$)", file.stem.lower()) is not None


def open_shards(
    files: list[Path], tokenizer: TokenizerConfig, val_fraction: float, way_out: str = "make or download it again"
) -> Dataset:
    """Opens token files as one text, in the order given. Files with val in their names are for validation. If there are
    none, the last `val_fraction` of the tokens is, from the start of a document if possible.

    Reads all tokens once (a second per 2 GB and core) to find the start of each document, and to check that the
    tokenizer has every id. An unknown id would index past the embedding, which kills the process on a GPU without a
    clear message. Raises ValueError for files that do not fit the tokenizer.
    """
    encoding = kept_or_named(files[0].with_name("tokenizer.json"), tokenizer)
    files = sorted(files, key=is_validation)  # training files first; a stable sort keeps the order otherwise
    arrays = [read_tokens(file, way_out) for file in files]
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(partial(inspect, end_of_text=encoding.eot_token), arrays)]
    for file, (_, largest) in zip(files, found, strict=True):
        if largest >= encoding.n_vocab:
            raise ValueError(
                f"{file} has token {largest}, tokenizer {encoding.name} has {encoding.n_vocab}: "
                "name the tokenizer that it was made with, or put its tokenizer.json beside it"
            )
    tokens = Shards(arrays)
    begins = tokens.ends - [len(array) for array in arrays]  # (files,)
    starts = np.concatenate([begin + ends for begin, (ends, _) in zip(begins, found, strict=True)])

    if names := [file.name for file in files if is_validation(file)]:
        if len(names) == len(files):
            raise ValueError(
                f"{files[0].parent} has no shards to train on, only {', '.join(names)}: take in the others too"
            )
        cut = int(begins[-len(names)])
    else:
        cut = int(len(tokens) * (1 - val_fraction))
        later = starts[(starts >= cut) & (starts < (cut + len(tokens)) / 2)]
        cut = int(later[0]) if len(later) else cut
    return Dataset(
        files[0].parent,
        {},
        encoding,
        train=join(tokens.parts(slice(0, cut))),
        val=join(tokens.parts(slice(cut, None))),
        # A split may begin in the middle of a document. That document then has number 0.
        train_documents=np.union1d([0], starts[starts < cut]),
        val_documents=np.union1d([0], starts[starts >= cut] - cut),
    )


def kept_or_named(kept: Path, tokenizer: TokenizerConfig) -> tiktoken.Encoding:
    """The tokenizer of the shards. `kept` is the tokenizer.json beside them. Any other tokenizer must be equal to that
    file, if there is one. Raises ValueError if it cannot be right."""
    try:
        beside = from_json(kept.read_bytes()) if kept.exists() else None
    except ValueError as error:
        raise ValueError(f"{kept.parent}: {error}") from error
    if tokenizer.kind == "kept":
        if beside is None:
            raise ValueError(f"{kept} is missing: name the tokenizer of the tokens, as in tokenizer=gpt2")
        return beside
    if tokenizer.kind == "bpe":
        raise ValueError("tokenizer=bpe learns from text, and data=bin has none: use tokenizer=kept, gpt2 or byte")
    named = build(tokenizer, [])
    if beside and not same(beside, named):
        raise ValueError(f"{kept} is of tokenizer {beside.name}, not of {named.name}: use tokenizer=kept")
    return named
