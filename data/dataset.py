"""Token files, opened: those that prepare.py makes of a text, and shards from elsewhere (data=bin, data=fineweb)."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from data.prepare import HEADER, MAGIC, DataConfig, files_of, prepare
from data.text import FIRST
from data.tokenizer import TokenizerConfig, build, from_json, token_bytes

FOR_VALIDATION = {"val", "valid", "validation", "dev", "test"}  # words in a shard's name


class Shards:
    """Several token arrays as one, for len() and slices. np.concatenate would copy all tokens into memory."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])  # (arrays,): index after each array's last token
        self.begins = np.concatenate([[0], self.ends[:-1]])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        parts = [self.arrays[i][max(0, start - self.begins[i]) : stop - self.begins[i]] for i in range(first, last + 1)]
        return parts[0] if len(parts) == 1 else np.concatenate([self.arrays[0][:0], *parts])

    def find(self, token: int) -> np.ndarray:
        where = (np.flatnonzero(array == token) for array in self.arrays)
        return np.concatenate([begin + found for begin, found in zip(self.begins, where, strict=True)])


@dataclass
class Dataset:
    """Opened token files. The tokens stay on disk (memory-mapped), so a file may be larger than memory."""

    folder: Path
    encoding: Encoding
    token_bytes: np.ndarray  # int32 (n_vocab,): number of bytes in each token's text
    train: np.ndarray | Shards  # uint16 or uint32 (N,), read-only
    val: np.ndarray | Shards
    train_documents: np.ndarray  # int64 (documents,): index of each document's first token
    val_documents: np.ndarray


def open_data(data: DataConfig, tokenizer: TokenizerConfig, kept=None, context_length=0, runs="") -> Dataset:
    """Opens the data that the configuration names; prepares or downloads it at first use, as prepare() does."""
    if data.source in ("bin", "fineweb"):
        files = files_of(data)
        beside = files[0].parent / "tokenizer.json"
        own = tokenizer.kind in ("kept", "bpe") and beside.exists()  # no bpe can be learned from tokens
        return open_shards(files, from_json(beside.read_bytes()) if own else build(tokenizer, [], kept))
    folder = prepare(data, tokenizer, kept, context_length, runs)
    encoding = from_json((folder / "tokenizer.json").read_bytes())
    return open_shards([folder / "train.bin", folder / "val.bin"], encoding)


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, memory-mapped: uint16 or uint32 (N,). ValueError if it is no token file, or only a part."""
    header = np.fromfile(path, "<i4", 3).tolist()
    if (magic := tuple(header[:2])) not in MAGIC:
        raise ValueError(f"{path} is no token file (it begins with {magic}): make it again")
    dtype = MAGIC[magic]
    # The header is mapped, too, because mapping a file without tokens would be an error.
    tokens = np.memmap(path, dtype, "r", shape=path.stat().st_size // dtype.itemsize)[HEADER // dtype.itemsize :]
    if sum(header[2:]) > len(tokens):  # it ends at 2**31 - 1, a file need not
        raise ValueError(f"{path} was cut short: it has {len(tokens):,} tokens of {header[2]:,}; copy it again")
    return tokens


def open_shards(files: list[Path], encoding: Encoding) -> Dataset:
    """Opens token files as one text, in the order given. Reads all tokens once (a second per GB), because on a GPU an
    id that the tokenizer lacks would kill the process without a clear message."""
    common = os.path.commonpath([file.parent for file in files])
    words = {file: re.findall("[a-z]+", str(file.relative_to(common)).lower()) for file in files}
    for_val = [file for file in files if not FOR_VALIDATION.isdisjoint(words[file])]
    for_train = [file for file in files if file not in for_val]
    if not for_val or not for_train:
        named = f"a file with {', '.join(sorted(FOR_VALIDATION))} as a word in its name is for validation"
        raise ValueError(f"{common} has {len(files)} files, {len(for_val)} of them for validation: {named}")
    tokens = {file: read_tokens(file) for file in files}
    for file in files:
        if (largest := int(tokens[file].max(initial=0))) >= encoding.n_vocab:
            way_out = "name the tokenizer that it was made with, or put its tokenizer.json beside it"
            raise ValueError(f"{file} has token {largest}, {encoding.name} has {encoding.n_vocab}: {way_out}")
    train, val = (Shards([tokens[file] for file in some]) for some in (for_train, for_val))
    if FIRST:
        print(f"data: {len(train):,} training and {len(val):,} validation tokens ({for_val[0].name})", file=sys.stderr)
    # A part may begin in the middle of a document. That document then has number 0.
    documents = (np.union1d([0], part.find(encoding.eot_token)) for part in (train, val))
    return Dataset(files[0].parent, encoding, token_bytes(encoding), train, val, *documents)
