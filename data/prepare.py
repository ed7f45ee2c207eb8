"""Text -> token files, made once and cached in a folder whose name has a hash of the text.

    data/cache/pystdlib-byte-1f0c2a9be7d4/
        train.bin, val.bin                        tokens, in the format of data/shards.py
        train_documents.npy, val_documents.npy    index of each document's first token, int64
        tokenizer.json                            the tokenizer, which turns the tokens back into text
        manifest.json                             counts, and the SHA-256 of every file above

The text is never held in memory. It is read up to three times: to hash every document, to train the tokenizer (bpe
only), and to encode it. Memory: 41 bytes per document and a few MB per thread.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from filelock import FileLock
from tqdm import tqdm

from data.download import shakespeare
from data.made import SHORTEST, Made
from data.shards import Writer
from data.text import LEFT_OUT, PIECE, File, NotText, counted, find, in_order, read, suffix, walk, writing_to
from data.tokenizer import BPE_SYMBOLS, TokenizerConfig, build, byte_encoding, encode, same, to_json

FORMAT = 2  # increase it if the same text gives other files; then every cached folder is made again
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
REPEATED = -1  # in place of a split's number: the document repeats another one and is left out

THREADS = os.cpu_count() or 1  # encoding threads; the result does not depend on their number
LEARN = 1 << 28  # bytes that bpe learns from; more text changes few merges and needs more memory for rustbpe's counts

# The keys that each source reads, besides val_fraction and cache. Other keys are refused, so none is ignored silently.
READS = {
    "pystdlib": (),
    "text": ("path", "field"),
    "bin": ("path",),
    "shakespeare": ("url",),
    "fineweb": ("shards",),
    "recall": (),
    "passkey": (),
}

ORIGINS = {
    "pystdlib": f"standard library of Python {platform.python_version()}",
    "shakespeare": "tinyshakespeare",
    "recall": "random strings, each repeated once",
    "passkey": "pass keys, each hidden in a filler text",
}
PREPARED = ("text", *ORIGINS)  # the sources of text; the others are token files
KEPT_TEXT = re.compile(r"text-(\w+)-[0-9a-f]{12}")  # name of a folder that prepare() made; the group is its tokenizer
TEMPORARY = re.compile(rf"({'|'.join(PREPARED)})-\w+-[0-9a-f]{{12}}\.tmp")


@dataclass
class DataConfig:
    """Which text, and how much of it is for validation. READS has the keys of each source."""

    # pystdlib | text | bin | shakespeare | fineweb | recall | passkey. data=NAME sets the related keys too.
    source: str = "pystdlib"
    path: str | None = None  # data=text or bin: a file, a folder or a glob; data=text also: - (standard input)
    field: str = "text"  # data=text: field of a .jsonl line that holds the text
    val_fraction: float = 0.05  # fraction of the text for validation; data=bin: only if no file is named *val*
    shards: int | None = None  # data=fineweb: number of training files, 1 to 103, of 100 M tokens each; None: 1
    url: str | None = None  # data=shakespeare: address of another folder to download input.txt from
    cache: str = "data/cache"  # folder for prepared tokens and downloads (Hugging Face's are in HF_HOME)


@dataclass
class Corpus:
    """The sizes and hashes of all documents, in order. The text itself is read again when it is needed."""

    files: list[File]
    sizes: np.ndarray  # int64 (documents,): bytes
    sha256: np.ndarray  # uint8 (documents, 32)
    order: np.ndarray  # int64 (documents,): documents sorted by hash: a random order that does not depend on file names
    split: np.ndarray  # int8 (documents,): number of the split, or REPEATED
    repeated: int  # number of documents that repeat an earlier one and are left out
    not_text: list[str]  # a line for each file that is left out because it is not UTF-8: why, and the way out
    field: str  # field of a .jsonl line that holds the text
    others: int  # number of files in the folder whose suffix is not one of text
    cut: tuple[int, int] | None = None  # (document, byte): this training document is for validation from this byte on


class Piece(NamedTuple):
    """A part of a document's text, in UTF-8. No character is cut."""

    split: str
    first: bool  # whether it is its document's first piece in this split
    text: bytes


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    kept: tiktoken.Encoding | None = None,
    context_length: int | None = None,
    *,
    quiet: bool = False,
) -> Path:
    """Returns the folder of token files for this text and tokenizer, and makes it if it is missing. data.path may be
    such a folder: a resumed run that had read standard input uses it. kept: the tokenizer for tokenizer=kept.
    context_length: the length of a document in tokens, for the sources that make their text (data/made.py).

    Every call reads and hashes the whole text, about a second per GB, to detect edited files. Several processes may
    call this at once: one does the work and the others wait. Raises ValueError, one line, for every mistake that the
    user can correct.
    """
    check(data)
    assert data.source in PREPARED, "token files are opened by open_data()"
    named = Path(os.path.expanduser(data.path or ""))
    if (made := KEPT_TEXT.fullmatch(named.name)) and (named / MANIFEST).is_file():
        if made[1] != (label := label_of(tokenizer, kept)):
            raise ValueError(f"{named} has tokens of tokenizer {made[1]}, not of {label}: use that one")
        if data.field != DataConfig.field:
            raise ValueError(f"{named} has tokens and no fields: leave out data.field={data.field}")
        return named
    started = time.perf_counter()
    corpus = scan(data, documents_of(data, tokenizer, kept, context_length))
    cache = Path(data.cache)
    folder = cache / folder_name(data, label_of(tokenizer, kept), corpus)
    if folder.exists():
        if not quiet and (corpus.not_text or corpus.others):
            print(f"data: {folder}{left_out(corpus, folder)}", file=sys.stderr)
        return folder

    cache.mkdir(parents=True, exist_ok=True)
    # The system releases the lock when its process ends, in whatever way. We do not use process ids in names: they are
    # reused, and mean nothing in another container that shares the folder.
    with FileLock(cache / ".lock"):
        if folder.exists():  # made by another process while this one waited
            return folder
        for stale in cache.glob("*.tmp"):  # their writer held the lock, so it has ended
            if TEMPORARY.fullmatch(stale.name) and stale.is_dir():  # the cache folder may have other files too
                shutil.rmtree(stale)

        temporary = cache / f"{folder.name}.tmp"
        try:
            with writing_to(cache):
                manifest = fill(temporary, corpus, data, tokenizer, kept, quiet)
                temporary.rename(folder)  # now the folder is complete, and other processes may open it
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it is still there only after an error

    if not quiet:
        train, val, seconds = manifest["train"], manifest["val"], time.perf_counter() - started
        print(
            f"data: {counted((corpus.split != REPEATED).sum(), 'document')}{left_out(corpus, folder)}, "
            f"{train['bytes'] + val['bytes']:,} bytes -> "
            f"{train['tokens']:,} training and {val['tokens']:,} validation tokens in {seconds:.1f} s: {folder}",
            file=sys.stderr,
        )
    return folder


def fill(
    temporary: Path,
    corpus: Corpus,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    kept: tiktoken.Encoding | None,
    quiet: bool,
) -> dict[str, Any]:
    """Makes the folder `temporary` with all its files, flushed to the disk. Returns its manifest."""
    split(corpus, data.val_fraction)
    # Only training text: a tokenizer that has seen the validation text would make its bits per byte too low.
    encoding = kept if kept and tokenizer.kind == "kept" else build(tokenizer, training_text(corpus, quiet))
    temporary.mkdir()
    counts = write(temporary, corpus, encoding, quiet)
    manifest: dict[str, Any] = {
        "version": FORMAT,
        "source": data.path or ORIGINS[data.source],
        "left_out": corpus.repeated + len(corpus.not_text),
        "tokenizer": {"name": encoding.name, "vocab_size": encoding.n_vocab},
        **counts,
    }
    (temporary / "tokenizer.json").write_text(to_json(encoding), encoding="utf-8")
    manifest["sha256"] = {file.name: sync_and_hash(file) for file in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync_and_hash(temporary / MANIFEST)
    return manifest


def check(data: DataConfig) -> None:
    """ValueError for an unknown source, for a key that this source does not read, and for a wrong value."""
    if data.source not in READS:
        raise ValueError(f"data.source={data.source} is unknown: choose data={', '.join(READS)}")
    for key in ("path", "field", "url", "shards"):
        value = getattr(data, key)
        if value != getattr(DataConfig, key) and key not in READS[data.source]:
            readers = " or ".join(f"data={source}" for source, keys in READS.items() if key in keys)
            raise ValueError(f"data.{key}={value} is read with {readers} only: choose that, or leave it out")
    if not data.field:
        raise ValueError("data.field= is empty: give the name of a field, or leave it out")
    if not data.cache:
        raise ValueError("data.cache= is empty: give a folder, or leave it out")
    if data.source == "fineweb" and data.val_fraction != DataConfig.val_fraction:
        raise ValueError(f"data.val_fraction={data.val_fraction}: data=fineweb has a validation shard; leave it out")
    if not 0 < data.val_fraction <= 0.5:
        raise ValueError(f"data.val_fraction={data.val_fraction} is outside (0, 0.5]: 0.05 is a usual choice")
    if data.path is None and "path" in READS[data.source]:
        what = "text" if data.source == "text" else "tokens"
        raise ValueError(f"data={data.source} has no {what}: say which with data.path=FILE, a folder or a glob")


# ---- which text


def documents_of(
    data: DataConfig, tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None, context_length: int | None
) -> Made | None:
    """The documents of a source that makes its text; None for another source. ValueError for another tokenizer than
    byte, and for too little text for validation."""
    if data.source not in SHORTEST:
        return None
    if tokenizer.kind != "byte" and not (tokenizer.kind == "kept" and kept and same(kept, byte_encoding())):
        raise ValueError(
            f"tokenizer={tokenizer.kind}: data={data.source} counts in bytes: use tokenizer=byte, or leave it out"
        )
    assert context_length is not None, "train.py gives it"
    documents = Made(data.source, context_length)
    if documents.count * data.val_fraction < 2:  # the last window needs the first token of another document
        raise ValueError(
            f"data.val_fraction={data.val_fraction} of {counted(documents.count, 'document')} leaves fewer than two "
            f"for validation: use data.val_fraction={min(0.5, 2 / documents.count):g} or more, or a shorter context"
        )
    return documents


def scan(data: DataConfig, made: Made | None = None) -> Corpus:
    """Reads all documents and hashes them. made: those of a source that makes its text.

    Leaves out a document that repeats another one: if one were for training and one for validation, validation would
    measure memory. Leaves out empty documents. Leaves out files that are not UTF-8; ValueError if no file is UTF-8.
    """
    found: Sequence[File]
    match data.source:
        case "pystdlib":
            root = sysconfig.get_path("stdlib")
            found = in_order(file for file in walk(root, LEFT_OUT) if file.endswith(".py"))
        case "text":
            assert data.path is not None, "check() refuses None"
            found = find(data.path, Path(data.cache))
            if data.field != DataConfig.field and not any(suffix(str(file)) == ".jsonl" for file in found):
                raise ValueError(
                    f"data.field={data.field}: data.path={data.path} has no .jsonl to read it from; leave it out"
                )
        case "shakespeare":
            found = [str(shakespeare(Path(data.cache), data.url))]
        case "recall" | "passkey":
            assert made is not None
            found = [made]

    named = Path(os.path.expanduser(data.path or ""))
    others = sum(1 for _ in walk(str(named))) - len(found) if data.path and named.is_dir() else 0

    files: list[File] = []
    not_text: list[str] = []
    hashes, sizes = bytearray(), array("q")  # small: a list would take a hundred bytes per document
    for file in found:
        try:
            for _, pieces in groupby(read(file, data.field), key=itemgetter(0)):
                digest, size = hashlib.sha256(), 0
                for _, piece in pieces:
                    digest.update(piece)
                    size += len(piece)
                hashes += digest.digest()
                sizes.append(size)
            files.append(file)
        except NotText as error:  # raised before its only document was counted
            not_text.append(str(error))
            if len(not_text) == len(found):
                raise
    if not sizes:
        raise ValueError(
            f"{data.path or data.source} holds no text, or only empty files: use data=text data.path=FILE with text"
        )

    sha256 = np.frombuffer(hashes, np.uint8).reshape(-1, 32)  # (documents, 32)
    words = sha256.view(">u8")  # (documents, 4)
    order = np.lexsort(words.T[::-1])  # lexsort's last key is the first to compare; equal hashes keep their order
    split = np.zeros(len(sizes), np.int8)
    split[order[1:][(words[order[1:]] == words[order[:-1]]).all(axis=1)]] = REPEATED
    repeated = int((split == REPEATED).sum())
    return Corpus(files, np.array(sizes, np.int64), sha256, order, split, repeated, not_text, data.field, others)


def left_out(corpus: Corpus, folder: Path) -> str:
    """Part of prepare()'s message: what was left out, with a space in front; "" if nothing was. Lists the files that
    are not UTF-8 in not_text.txt of the prepared data's folder."""
    names = folder / "not_text.txt"
    if corpus.not_text:
        with suppress(OSError):  # a finished cache may be read-only
            names.write_text("".join(f"{line}\n" for line in corpus.not_text), encoding="utf-8", errors="replace")
    counts = {
        f"not UTF-8 (listed in {names})": len(corpus.not_text),
        "repeating another": corpus.repeated,
        "with a suffix that is not read": corpus.others,
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return f" (left out: {', '.join(parts)})" if parts else ""


def label_of(tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None) -> str:
    """The tokenizer in a folder's name: byte, gpt2, bpe4096; for kept a part of its hash."""
    if kept and tokenizer.kind == "kept":
        return f"kept_{hashlib.sha256(to_json(kept).encode()).hexdigest()[:8]}"
    return f"bpe{tokenizer.vocab_size or BPE_SYMBOLS}" if tokenizer.kind == "bpe" else tokenizer.kind


def folder_name(data: DataConfig, label: str, corpus: Corpus) -> str:
    """A name that is the same if and only if the token files are the same. So cached folders never become outdated."""
    digest = hashlib.sha256(json.dumps([FORMAT, label, data.val_fraction]).encode())
    digest.update(corpus.sha256[corpus.split != REPEATED].tobytes())
    return f"{data.source}-{label}-{digest.hexdigest()[:12]}"


# ---- which of it is for validation


def split(corpus: Corpus, val_fraction: float) -> None:
    """Split the corpus: about val_fraction of the bytes are for validation.

    Goes through the documents in the order of their hashes and takes each one that still fits. This choice is random,
    does not depend on the names or the order of files, and never takes more than val_fraction. If less than half of
    that was taken (the corpus is one or a few big files), the end of the largest document is for validation too.
    """
    share = val_fraction * int(corpus.sizes[corpus.split != REPEATED].sum())
    taken = 0
    for i, size in zip(corpus.order, corpus.sizes[corpus.order], strict=True):
        if corpus.split[i] != REPEATED and taken + size <= share:
            taken += int(size)
            corpus.split[i] = SPLITS.index("val")
    missing = int(share - taken)
    if missing > share / 2:
        # Every document that is left is larger than `missing`, so a part of it stays for training.
        largest = int(np.argmax(np.where(corpus.split == SPLITS.index("train"), corpus.sizes, -1)))
        at = int(corpus.sizes[largest]) - missing
        pieces = (piece for number, piece in reread(corpus) if number == largest)
        corpus.cut = largest, line_start(pieces, at, reach=missing // 2)


def line_start(pieces: Iterable[bytes], at: int, reach: int) -> int:
    """The byte at which the first line starts that begins at `at` or less than `reach` after it. If there is none, the
    start of the next character."""
    character = at
    start = 0  # offset of the piece
    for piece in pieces:
        if start <= at < start + len(piece):  # a byte 10xxxxxx continues a character; pieces end between characters
            character += next(i for i, byte in enumerate(piece[at - start :] + b" ") if byte & 0xC0 != 0x80)
        line = piece.find(b"\n", max(0, at - 1 - start), max(0, at - 1 + reach - start))
        if line >= 0:
            return start + line + 1
        start += len(piece)
        if start >= at + reach:
            break
    return character


# ---- reading it, and writing tokens


def reread(corpus: Corpus) -> Iterator[tuple[int, bytes]]:
    """(number of the document, a piece of it) for the whole corpus.

    Raises ValueError if a document has changed since it was hashed: the folder's name would be wrong. The error comes
    after the document's pieces, which are not kept in memory. The caller must then delete what it made of them.
    """
    number = -1
    for file in corpus.files:
        for where, pieces in groupby(read(file, corpus.field), key=itemgetter(0)):
            number += 1
            sha256 = hashlib.sha256()
            for _, piece in pieces:
                if number < len(corpus.sizes):
                    yield number, piece
                sha256.update(piece)
            if number >= len(corpus.sizes) or sha256.digest() != corpus.sha256[number].tobytes():
                raise ValueError(f"{where} changed while it was being prepared: run again once it is finished")
    if number + 1 < len(corpus.sizes):
        raise ValueError(f"{corpus.files[-1]} changed while it was being prepared: run again once it is finished")


def read_pieces(corpus: Corpus, quiet: bool, what: str) -> Iterator[Piece]:
    """All text for training and validation, in the order of reading. Moves a progress bar named `what`, if stderr is a
    terminal.

    A cut between pieces costs at most one token: now and then, bpe and gpt2 would have merged across it.
    """
    cut_document, cut = corpus.cut or (-1, 0)
    document, end = -1, 0
    total = int(corpus.sizes.sum())
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, disable=True if quiet else None) as bar:
        for number, text in reread(corpus):
            start = end if number == document else 0  # offset of the piece in its document
            document, end = number, start + len(text)
            bar.update(len(text))
            if number == cut_document:
                middle = min(max(cut - start, 0), len(text))
                if middle:
                    yield Piece("train", start == 0, text[:middle])
                if middle < len(text):
                    yield Piece("val", start + middle == cut, text[middle:])
            elif corpus.split[number] != REPEATED:
                yield Piece(SPLITS[corpus.split[number]], start == 0, text)


def training_text(corpus: Corpus, quiet: bool) -> Iterator[str]:
    """The training text for the tokenizer to learn from. Of more than LEARN bytes: LEARN bytes, evenly spread."""
    total = int(corpus.sizes[corpus.split == SPLITS.index("train")].sum())
    taken = seen = 0
    for piece in read_pieces(corpus, quiet, "learning the tokenizer"):
        if piece.split == "train":
            if taken * total <= LEARN * seen:
                taken += len(piece.text)
                yield piece.text.decode()
            seen += len(piece.text)


def write(folder: Path, corpus: Corpus, encoding: tiktoken.Encoding, quiet: bool) -> dict[str, dict[str, Any]]:
    """Write the token files and document starts of all splits. Return their entries for the manifest."""
    writers = {name: Writer(folder, name, encoding.n_vocab) for name in SPLITS}
    starts = {name: array("q") for name in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    dtype = writers["train"].dtype
    end_of_text = np.array([encoding.eot_token], dtype)
    for piece, ids in encode_pieces(read_pieces(corpus, quiet, "encoding"), encoding, dtype):
        writer = writers[piece.split]
        if piece.first:
            starts[piece.split].append(writer.tokens)
            writer.write(end_of_text)
        writer.write(ids)
        sizes[piece.split] += len(piece.text)
    for name, writer in writers.items():
        writer.close()
        np.save(folder / f"{name}_documents.npy", np.array(starts[name], np.int64), allow_pickle=False)
    return {
        name: {"tokens": writer.tokens, "bytes": sizes[name], "documents": len(starts[name]), "dtype": dtype.name}
        for name, writer in writers.items()
    }


def encode_pieces(
    pieces: Iterator[Piece], encoding: tiktoken.Encoding, dtype: np.dtype
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its tokens, in order. Encodes in THREADS threads; tiktoken releases the GIL.

    Small documents are encoded in batches, because giving one to a thread costs as much as encoding a hundred bytes. We
    do not use tiktoken's encode_ordinary_batch: it wants all texts in one list and returns Python integers, 36 bytes
    per token.
    """

    def work(batch: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        return [(piece, encode(encoding, piece.text.decode()).astype(dtype)) for piece in batch]

    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[Future[list[tuple[Piece, np.ndarray]]]] = deque()
        for batch in batches(pieces):
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 2 * THREADS:  # enough to keep the threads busy; more would only take memory
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces; each list has PIECE bytes or a little more."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def sync_and_hash(path: Path) -> str:
    """Flushes a file to the disk and returns its SHA-256."""
    with open(path, "rb+") as file:  # +: Windows flushes only files that are open for writing
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
