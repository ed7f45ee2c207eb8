"""Token files, opened: those that prepare.py makes of a text, and shards from elsewhere (data=bin, data=fineweb)."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from data import download, text
from data.prepare import HEADER, MAGIC, DataConfig, prepare
from data.tokenizer import TokenizerConfig, build, from_json, token_bytes

FOR_VALIDATION = {"val", "valid", "validation", "dev", "test"}  # words in a shard's name


class Shards:
    """Several token arrays as one, for len() and slices. np.concatenate would copy all tokens into memory."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        lengths = [len(array) for array in arrays]
        self.ends = np.cumsum(lengths)  # (arrays,): index after each array's last token
        self.begins = self.ends - lengths

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        parts = [self.arrays[i][max(0, start - self.begins[i]) : stop - self.begins[i]] for i in range(first, last + 1)]
        return parts[0] if len(parts) == 1 else np.concatenate([self.arrays[0][:0], *parts])

    def find(self, token: int) -> np.ndarray:
        """Where the token stands, int64."""
        where = (np.flatnonzero(array == token) for array in self.arrays)
        return np.concatenate([begin + found for begin, found in zip(self.begins, where, strict=True)])


@dataclass
class Dataset:
    """Opened token files. The tokens stay on disk (memory-mapped), so a file may be larger than memory."""

    folder: Path
    encoding: tiktoken.Encoding
    train: np.ndarray | Shards  # uint16 or uint32 (N,), read-only
    val: np.ndarray | Shards
    train_documents: np.ndarray  # int64 (documents,): index of each document's first token
    val_documents: np.ndarray
    token_bytes: np.ndarray  # int32 (n_vocab,): number of bytes in each token's text


def open_data(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    kept: tiktoken.Encoding | None = None,
    context_length: int | None = None,
    runs: str | None = None,
) -> Dataset:
    """Opens the data that the configuration names; prepares or downloads it at first use. The arguments are those of
    prepare(), which may set data.path. ValueError for the user's mistakes."""
    if data.source == "bin":
        path = Path(data.path or "").expanduser()
        files = text.find(str(path / "*.bin" if path.is_dir() else path))
        return open_shards(files, encoding_of(files[0].parent, tokenizer, kept))
    if data.source == "fineweb":
        if tokenizer.kind != "gpt2":
            raise ValueError(f"tokenizer={tokenizer.kind}: data=fineweb has GPT-2's tokens: use tokenizer=gpt2")
        return open_shards(download.fineweb(data.shards), build(tokenizer, []))
    folder = prepare(data, tokenizer, kept, context_length, runs)
    encoding = from_json((folder / "tokenizer.json").read_bytes())
    return open_shards([folder / "train.bin", folder / "val.bin"], encoding)


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, memory-mapped: uint16 or uint32 (N,). ValueError if it is cut or no token file."""
    header = np.fromfile(path, "<i4", HEADER // 4)
    dtype = MAGIC.get(tuple(header[:2].tolist()))
    if dtype is None or len(header) < HEADER // 4:
        raise ValueError(f"{path} is no token file (its header begins with {header[:2].tolist()}): make it again")
    # The header is mapped, too, because mapping a file without tokens would be an error.
    tokens = np.memmap(path, dtype, "r", shape=path.stat().st_size // dtype.itemsize)[HEADER // dtype.itemsize :]
    if len(tokens) < header[2]:
        raise ValueError(f"{path} has {len(tokens)} tokens, its header says {header[2]}: it was cut; make it again")
    return tokens


def encoding_of(folder: Path, tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None) -> tiktoken.Encoding:
    """The tokenizer of shards: the tokenizer.json beside them, that of init_from= (kept), or a named one."""
    file = folder / "tokenizer.json"
    if file.exists():
        return from_json(file.read_bytes())
    if tokenizer.kind == "kept" and kept:
        return kept
    if tokenizer.kind in ("kept", "bpe"):
        raise ValueError(f"data=bin with tokenizer={tokenizer.kind} and no {file}: use tokenizer=gpt2 or byte")
    return build(tokenizer, [])


def open_shards(files: list[Path], encoding: tiktoken.Encoding) -> Dataset:
    """Opens token files as one text, in the order given. Files whose name has a word of FOR_VALIDATION are for
    validation. Reads all tokens once (a second per GB). ValueError if there are none to train on or none to validate
    with, and for an id that the tokenizer lacks: on a GPU it would kill the process without a clear message."""
    common = os.path.commonpath([file.parent for file in files])
    words = {file: re.findall("[a-z]+", str(file.relative_to(common)).lower()) for file in files}
    for_val = [file for file in files if not FOR_VALIDATION.isdisjoint(words[file])]
    for_train = [file for file in files if file not in for_val]
    if not for_val or not for_train:
        named = f"a file with {', '.join(sorted(FOR_VALIDATION))} as a word in its name is for validation"
        raise ValueError(f"{common} has {len(files)} files, {len(for_val)} of them for validation: {named}")
    parts = []
    for some in (for_train, for_val):
        parts.append(Shards([read_tokens(file) for file in some]))
        for file, tokens in zip(some, parts[-1].arrays, strict=True):
            if (largest := int(tokens.max(initial=0))) >= encoding.n_vocab:
                way_out = "name the tokenizer that it was made with, or put its tokenizer.json beside it"
                raise ValueError(f"{file} has token {largest}, {encoding.name} has {encoding.n_vocab}: {way_out}")
    train, val = parts
    print(
        f"data: {len(train):,} training tokens, {len(val):,} for validation (from {for_val[0].name})", file=sys.stderr
    )
    # A part may begin in the middle of a document. That document then has number 0.
    documents = (np.union1d([0], part.find(encoding.eot_token)) for part in parts)
    return Dataset(files[0].parent, encoding, train, val, *documents)
