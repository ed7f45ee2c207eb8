"""Text -> token files, made once and cached. data.cache has a folder for each text, tokenizer and val_fraction:

    data/cache/pystdlib-byte-1f0c2a9be7d4/
        train.bin, val.bin                        tokens, as in llm.c and modded-nanogpt: a header of 256 int32, then a
                                                  uint16 (or uint32) each; end of text stands BEFORE each document
        tokenizer.json                            turns the tokens back into text
        about                                     a line: how many documents there are, and what was left out

The last part of its name is a hash of the files' paths, sizes and times of change, so an edited text gets a new folder.
A folder is written aside and renamed when it is complete; a start only opens it. The text is read into memory.
"""

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from filelock import FileLock
from tiktoken import Encoding

from conf.keys import check, key
from data import download, made, text
from data.tokenizer import TokenizerConfig, build, encode_all, to_json

FORMAT = 6  # increase it if the same text gives other files
LEARN = 1 << 28  # characters that bpe learns from; more change few merges, and rustbpe's counts need memory
NOT_READ = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # of Python's folders
SOURCES = ("pystdlib", "pypackages", "text", "hub", "shakespeare", "bin", "fineweb", "recall", "passkey")
READERS = ("text", "bin", "hub")  # sources that read data.path
HEADER = 1024  # bytes
# The first two numbers of llm.c's shards for GPT-2 and for Llama 3.
MAGIC: dict[tuple[int, ...], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
PIECE = 1 << 18  # characters that are encoded at a time: the tokenizers' patterns give up at a million spaces in a row


@dataclass
class DataConfig:
    """Which text, and how much of it is for validation. (data=NAME sets the related keys too.)"""

    source: str = key("pystdlib", among=" | ".join(SOURCES))
    path: str | None = key(None, "text: file, folder, glob or -; bin: folder, glob; hub: OWNER/NAME/FILE", least=1)
    field: str = key("text", "field of a .jsonl line that holds the text", least=1)
    val_fraction: float = key(0.05, "share of the text for validation; not of token files", above=0, most=0.5)
    shards: int = key(1, "data=fineweb: number of training files of 100 M tokens", least=1, most=103)
    cache: str = key("data/cache", "folder of prepared tokens and downloads (Hugging Face's: HF_HOME)", least=1)

    def __post_init__(self):
        check(self, "data.")
        if (self.path is None) == (self.source in READERS):
            needs = "needs data.path=: a folder or a glob; text also a file; hub: OWNER/NAME/FILE"
            why = needs if self.path is None else f"does not read data.path={self.path}; use data=text"
            raise ValueError(f"data={self.source} {why}")


def prepare(data: DataConfig, tokenizer: TokenizerConfig, kept=None, context_length=0, runs="") -> Path:
    """The folder of token files for this text and tokenizer; made if it is missing. ValueError for the user's mistakes.

    kept: the tokenizer for tokenizer=kept. context_length: tokens of a document of recall and passkey. runs: the folder
    of all runs, whose files are no text. data.path=- becomes the path of a copy of standard input."""
    kept = kept if tokenizer.kind == "kept" else None
    length = context_length if data.source in made.MADE else None
    if length and (kept.name if kept else tokenizer.kind) != "byte":
        raise ValueError(f"tokenizer={tokenizer.kind}: data={data.source} counts in bytes: use tokenizer=byte")
    every = files_of(data, runs)
    of_folder = data.source == "text" and Path(data.path or "").expanduser().is_dir()
    files = [file for file in every if text.is_text(file)] if of_folder else every
    label = f"{tokenizer.kind}{tokenizer.vocab_size or ''}"  # byte, bpe, bpe4096
    states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    named = [to_json(kept) if kept else label, data.source, data.field, data.val_fraction, length]
    digest = hashlib.sha256(json.dumps([FORMAT, states, *named]).encode()).hexdigest()
    folder = Path(data.cache) / f"{data.source}-{label}-{digest[:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):  # one process makes the folder, the others wait
            if not folder.exists():
                make(folder, *read(data, files, length), data.val_fraction, kept or tokenizer)
    note = f"; left out: {len(every) - len(files):,} (binary files, data files like .csv, links to folders)"
    if text.FIRST:
        print(f"data: {(folder / 'about').read_text(encoding='utf-8')}{note * (files != every)}", file=sys.stderr)
    return folder


def files_of(data: DataConfig, runs: str = "") -> list[Path]:
    """The files of a source; none for a made text."""
    cache, path = Path(data.cache), data.path or ""
    match data.source:
        case "pystdlib" | "pypackages":
            return sorted(file for root in roots(data) for file in text.walk(root, NOT_READ) if file.suffix == ".py")
        case "text":
            if path == "-":
                path = data.path = str(text.standard_input(cache.absolute()))
            return text.find(path, [cache, *([runs] if runs else [])])
        case "shakespeare":
            return [download.shakespeare(cache)]
        case "hub":
            return [download.hub(path)]
        case "fineweb":
            return download.fineweb(data.shards)
        case "bin":
            return text.find(f"{path}/*.bin" if Path(path).expanduser().is_dir() else path)
    return []


def roots(data: DataConfig) -> set[Path]:
    names = {"pystdlib": ("stdlib",), "pypackages": ("purelib", "platlib")}.get(data.source, ())
    return {Path(sysconfig.get_path(name)).resolve() for name in names}  # lib64 may be a link to lib


def read(data: DataConfig, files: list[Path], length: int | None) -> tuple[dict[str, str], str]:
    """({document: its package (pypackages) or itself}, a note of unread files). Exact repeats would test memory."""
    if length:
        return {document: document for document in made.documents(data.source, length)}, ""
    texts, refused = dict[str, str](), list[str]()
    packages = roots(data) if data.source == "pypackages" else set[Path]()
    for file in files:
        package = next((file.relative_to(root).parts[0] for root in packages if root in file.parents), None)
        try:
            for document in text.read(file, data.field):
                texts.setdefault(document, package or document)
        except ValueError as error:
            refused.append(str(error))
    if data.source == "hub" and text.suffix(files[0]) != ".jsonl":  # TinyStories and others separate documents so
        line = r"(?m)^<\|endoftext\|>\r?$"
        texts = {part: part for whole in texts for part in (p.strip("\r\n") for p in re.split(line, whole))}
    texts.pop("", None)
    if not texts:
        raise ValueError(refused[0] if refused else f"data.path={data.path} has no text: name files, or FOLDER/*.csv")
    note = f"; files that cannot be read: {len(refused)}, the first: {refused[0]}" if refused else ""
    return texts, note


def split(texts: dict[str, str], val_fraction: float) -> tuple[list[str], list[str]]:
    """(training, validation) documents; validation has about val_fraction of the bytes. texts: as of read().

    Goes through the packages, or documents, in the order of their hashes, which is random and stays the same when files
    are renamed or added. Takes each one that still fits, half of the documents at most. If they fill less than half of
    the share (the text is big files), the rest is the end of the largest other document, from the start of a line."""
    sizes = {document: len(document.encode()) for document in texts}
    share = left = val_fraction * sum(sizes.values())
    packages = [list(group) for _, group in groupby(texts, texts.__getitem__)]
    for package in sorted(packages, key=lambda package: hashlib.sha256(texts[package[0]].encode()).digest()):
        if sum(map(sizes.__getitem__, package)) <= left and 2 * (len(sizes) - len(package)) >= len(texts):
            left -= sum(map(sizes.pop, package))
    train, val = [*sizes], [document for document in texts if document not in sizes]
    if left > share / 2:
        largest = max(train, key=sizes.__getitem__)
        missing = min(len(largest) // 2, int(left * len(largest) / sizes[largest]))
        at = line_start(largest, len(largest) - missing, reach=missing // 2)
        train[train.index(largest)] = largest[:at]
        val.append(largest[at:])
    return train, val


def make(folder: Path, texts: dict, note: str, val_fraction: float, tokenizer: TokenizerConfig | Encoding) -> None:
    """Makes the folder with all its files. note: for the file about, after the counts."""
    print(f"data: making {folder}", file=sys.stderr)
    train, val = split(texts, val_fraction)
    aside = folder.with_suffix(".tmp")
    aside.mkdir(exist_ok=True)  # a process that was killed may have left it
    # Training text only: a tokenizer that knows the validation text makes its bits per byte too low.
    every = 1 + sum(map(len, train)) // LEARN
    learned = islice((piece for document in train for piece in pieces(document)), 0, None, every)
    encoding = build(tokenizer, learned) if isinstance(tokenizer, TokenizerConfig) else tokenizer
    (aside / "tokenizer.json").write_text(to_json(encoding), encoding="utf-8")
    write_tokens(aside / "train.bin", train, encoding)
    write_tokens(aside / "val.bin", val, encoding)
    about = f"{len(texts):,} document{'s' * (len(texts) != 1)} ({encoding.name}){note}"
    (aside / "about").write_text(about, encoding="utf-8", errors="replace")
    aside.rename(folder)


def write_tokens(path: Path, documents: list[str], encoding: Encoding) -> None:
    magic, dtype = next(item for item in MAGIC.items() if encoding.n_vocab <= 1 << 8 * item[1].itemsize)
    begin = np.array(encoding.eot_token, dtype).tobytes()
    parts = ((b"" if i else begin, piece) for document in documents for i, piece in enumerate(pieces(document)))
    with open(path, "wb") as file:
        file.write(bytes(HEADER))
        while batch := list(islice(parts, 64)):  # some 100 MB of Python's integers at a time
            for (first, _), ids in zip(batch, encode_all(encoding, [piece for _, piece in batch]), strict=True):
                file.write(first + np.asarray(ids, dtype).tobytes())
        count = (file.tell() - HEADER) // dtype.itemsize
        file.seek(0)
        file.write(np.array([*magic, min(count, 2**31 - 1)], "<i4").tobytes())  # read_tokens() reads the file's size


def pieces(document: str) -> Iterator[str]:
    """The document in parts of about PIECE characters, cut at line starts. A merge that it prevents costs a token."""
    start = 0
    while start < len(document):
        end = line_start(document, start + PIECE, PIECE // 4)
        yield document[start:end]
        start = end


def line_start(document: str, at: int, reach: int) -> int:
    """The start of the first line from `at` on, if it is less than `reach` after it; else `at`."""
    return document.find("\n", at - 1, at - 1 + reach) + 1 or at
