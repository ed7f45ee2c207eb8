"""Token files, opened: those that prepare.py makes of a text, and shards from elsewhere (data=bin, data=fineweb)."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiktoken

from data import download, text
from data.prepare import HEADER, MAGIC, DataConfig, check_keys, prepare
from data.tokenizer import TokenizerConfig, build, from_json, to_json, token_bytes

FOR_VALIDATION = {"val", "valid", "validation", "dev", "test"}  # words in a shard's name


class Shards:
    """Several token arrays as one, for len() and slices. np.concatenate would copy all tokens into memory."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])  # (arrays,): index after each array's last token

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        parts = self.parts(start, stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, start: int, stop: int) -> list[np.ndarray]:
        """The tokens from start on and before stop as views, one per array; at least one."""
        first = min(int(np.searchsorted(self.ends, start, side="right")), len(self.arrays) - 1)
        last = max(first, int(np.searchsorted(self.ends, stop)))
        begins = self.ends - [len(array) for array in self.arrays]
        return [self.arrays[i][max(0, start - begins[i]) : stop - begins[i]] for i in range(first, last + 1)]


@dataclass
class Dataset:
    """Opened token files. The tokens stay on disk (memory-mapped), so a file may be larger than memory."""

    folder: Path
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
    runs: str | None = None,
) -> Dataset:
    """Opens the data that the configuration names; prepares or downloads it at first use. The arguments are those of
    prepare(), which may set data.path. ValueError for the user's mistakes."""
    check_keys(data)
    if data.source == "bin":
        path = Path(data.path or "").expanduser()
        files = text.find(str(path / "*.bin" if path.is_dir() else path))
        return open_shards(files, encoding_of(files[0].parent, tokenizer, kept), data.val_fraction)
    if data.source == "fineweb":
        if tokenizer.kind != "gpt2":
            raise ValueError(f"tokenizer={tokenizer.kind}: data=fineweb has GPT-2's tokens: use tokenizer=gpt2")
        return open_shards(download.fineweb(data.shards), build(tokenizer, []), data.val_fraction)
    folder = prepare(data, tokenizer, kept, context_length, runs)
    encoding = from_json((folder / "tokenizer.json").read_bytes())
    return open_shards([folder / "train.bin", folder / "val.bin"], encoding, data.val_fraction)


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
    """The tokenizer of shards: the tokenizer.json beside them or that of init_from= (kept), or a named one."""
    file = folder / "tokenizer.json"
    beside = from_json(file.read_bytes()) if file.exists() else None
    found = beside or kept if tokenizer.kind == "kept" else None if tokenizer.kind == "bpe" else build(tokenizer, [])
    if found is None:
        raise ValueError(f"data=bin with tokenizer={tokenizer.kind} and no {file}: use tokenizer=gpt2 or byte")
    if beside and to_json(beside) != to_json(found):
        raise ValueError(f"{file} is of tokenizer {beside.name}, not of {found.name}: use tokenizer=kept")
    return found


def open_shards(files: list[Path], encoding: tiktoken.Encoding, val_fraction: float) -> Dataset:
    """Opens token files as one text, in the order given. Files whose name has a word of FOR_VALIDATION are for
    validation; without one, the last `val_fraction` of the tokens, from the start of a document if there is one near.
    Reads all tokens once (a second per GB). ValueError for an id that the tokenizer lacks: on a GPU it would kill the
    process without a clear message."""
    common = os.path.commonpath([file.parent for file in files])
    words = {file: re.findall("[a-z]+", str(file.relative_to(common)).lower()) for file in files}
    for_val = [file for file in files if not FOR_VALIDATION.isdisjoint(words[file])]
    files = [file for file in files if file not in for_val] + for_val
    if len(for_val) == len(files):
        raise ValueError(f"{common} has no shards to train on, only {files[0].name} and the like: add or rename some")
    arrays = [read_tokens(file) for file in files]
    for file, tokens in zip(files, arrays, strict=True):
        if (largest := int(tokens.max(initial=0))) >= encoding.n_vocab:
            way_out = "name the tokenizer that it was made with, or put its tokenizer.json beside it"
            raise ValueError(f"{file} has token {largest}, {encoding.name} has {encoding.n_vocab}: {way_out}")
    whole = Shards(arrays)
    count, begins = len(whole), whole.ends - [len(tokens) for tokens in arrays]
    starts = [np.flatnonzero(tokens == encoding.eot_token) for tokens in arrays]
    documents = np.concatenate([begin + found for begin, found in zip(begins, starts, strict=True)])
    cut, what = int(count * (1 - val_fraction)), "the end, because no file is named val"
    if for_val:
        cut, what = int(begins[-len(for_val)]), f"{len(for_val)} of {len(files)} files, the first: {for_val[0].name}"
    elif len(later := documents[(documents >= cut) & (documents < (cut + count) / 2)]):
        cut = int(later[0])
    print(f"data: {cut:,} training tokens, {count - cut:,} for validation ({what})", file=sys.stderr)
    # A part may begin in the middle of a document. That document then has number 0.
    return Dataset(
        files[0].parent, encoding, Shards(whole.parts(0, cut)), Shards(whole.parts(cut, count)),
        np.union1d([0], documents[documents < cut]), np.union1d([0], documents[documents >= cut] - cut),
    )  # fmt: skip
