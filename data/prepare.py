"""Text -> token files, made once and cached in a folder whose name has a hash of the text.

    data/cache/pystdlib-byte-1f0c2a9be7d4/
        train.bin, val.bin                        tokens, in the format of data/shards.py
        train_documents.npy, val_documents.npy    index of each document's first token, int64
        tokenizer.json                            the tokenizer, which turns the tokens back into text
        manifest.json                             counts, and the SHA-256 of every file above

data/corpus.py reads the text. Memory: what it needs, and a few MB per thread.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from filelock import FileLock

from conf import keys
from conf.keys import key
from data.corpus import REPEATED, SPLITS, Corpus, Piece, scan
from data.download import DOWNLOADS, shakespeare, tinystories
from data.made import Made
from data.shards import Writer
from data.text import LEFT_OUT, PIECE, File, counted, find, in_order, suffix, walk, writing_to
from data.tokenizer import BPE_SYMBOLS, TokenizerConfig, build, byte_encoding, encode, same, to_json

FORMAT = 2  # increase it if the same text gives other files; then every cached folder is made again
MANIFEST = "manifest.json"

THREADS = os.cpu_count() or 1  # encoding threads; the result does not depend on their number

# The keys that each source reads, besides val_fraction and cache. Other keys are refused, so none is ignored silently.
READS = {
    "pystdlib": (),
    "pypackages": (),
    "text": ("path", "field"),
    "bin": ("path",),
    "shakespeare": ("url",),
    "tinystories": ("megabytes",),
    "fineweb": ("shards",),
    "recall": (),
    "passkey": (),
}

ORIGINS = {
    "pystdlib": f"standard library of Python {platform.python_version()}",
    "pypackages": f"packages installed for Python {platform.python_version()}",
    "shakespeare": "tinyshakespeare",
    "tinystories": "TinyStories",
    "recall": "random strings, each repeated once",
    "passkey": "pass keys, each hidden in a filler text",
}
PREPARED = ("text", *ORIGINS)  # the sources of text; the others are token files
KEPT_TEXT = re.compile(r"text-(\w+)-[0-9a-f]{12}")  # name of a folder that prepare() made; the group is its tokenizer
TEMPORARY = re.compile(rf"({'|'.join(PREPARED)})-\w+-[0-9a-f]{{12}}\.tmp")


@dataclass
class DataConfig:
    """Which text, and how much of it is for validation. READS has the keys of each source."""

    # data=NAME sets the related keys too.
    source: str = key("pystdlib", among=" | ".join(READS))
    path: str | None = key(
        None, "data=text or bin: a file, a folder or a glob; data=text also: - (standard input)", least=1
    )
    field: str = key("text", "data=text: field of a .jsonl line that holds the text", least=1)
    val_fraction: float = key(
        0.05, "fraction of the text for validation; data=bin: only if no file is named *val*", above=0, most=0.5
    )
    shards: int | None = key(None, "data=fineweb: number of training files, 1 to 103, of 100 M tokens each; null: 1")
    megabytes: int | None = key(
        None, "data=tinystories: size of the beginning that is downloaded, of 2200 MB; null: 100", least=1, most=2200
    )
    url: str | None = key(None, "data=shakespeare: address of another folder to download input.txt from")
    cache: str = key("data/cache", "folder of prepared tokens and downloads (Hugging Face's: HF_HOME)", least=1)

    def __post_init__(self):
        keys.check(self, "data.")


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    kept: tiktoken.Encoding | None = None,
    context_length: int | None = None,
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
    kept = kept if tokenizer.kind == "kept" else None
    label = label_of(tokenizer, kept)
    named = Path(os.path.expanduser(data.path or ""))
    if (made := KEPT_TEXT.fullmatch(named.name)) and (named / MANIFEST).is_file():
        if made[1] != label:
            raise ValueError(f"{named} has tokens of tokenizer {made[1]}, not of {label}: use that one")
        if data.field != DataConfig.field:
            raise ValueError(f"{named} has tokens and no fields: leave out data.field={data.field}")
        if data.val_fraction not in (DataConfig.val_fraction, kept_fraction(named, data.val_fraction)):
            raise ValueError(f"{named} is split already: leave out data.val_fraction={data.val_fraction:g}")
        return named

    started = time.perf_counter()
    files = files_of(data, tokenizer, kept, context_length)
    corpus = scan(files, data.field, data.path or data.source)
    others = sum(1 for _ in walk(str(named))) - len(files) if data.path and named.is_dir() else 0
    folder = Path(data.cache) / folder_name(data, label, corpus)
    manifest = None if folder.exists() else make(folder, corpus, data, tokenizer, kept)
    without = left_out(corpus, others, folder)
    if manifest:
        train, val = manifest["train"], manifest["val"]
        print(
            f"data: {counted(len(corpus.sizes) - corpus.repeated, 'document')}{without}, "
            f"{train['bytes'] + val['bytes']:,} bytes -> {train['tokens']:,} training and {val['tokens']:,} validation "
            f"tokens in {time.perf_counter() - started:.1f} s: {keys.one_line(str(folder))}",
            file=sys.stderr,
        )
    elif corpus.not_text or others:
        print(f"data: {keys.one_line(str(folder))}{without}", file=sys.stderr)
    return folder


def cache_of(source: Any, theirs: str, ours: str) -> str:
    """The data.cache of a checkpoint, if that folder holds what a cache does, or this source reads none; else ours. The
    run may come from another machine, or from a stranger, who could have us write anywhere."""
    if source == "bin":
        return theirs
    with suppress(OSError, ValueError):  # no folder; one that may not be read; a name that no folder has
        if any(path.name in DOWNLOADS or (path / MANIFEST).is_file() for path in Path(theirs).iterdir()):
            return theirs
    return ours


def kept_fraction(folder: Path, default: float) -> float:
    """The val_fraction with which a folder was made, as a resumed run still has it. default: of a folder of an earlier
    version, and of a damaged one, which open_data() refuses."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("val_fraction", default)
    return default


def make(
    folder: Path, corpus: Corpus, data: DataConfig, tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None
) -> dict[str, Any] | None:
    """Makes the folder with all its files, flushed to the disk: it is complete or absent. Returns its manifest, or None
    if another process has made it, for which this one waits."""
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    # The system releases the lock when its process ends, in whatever way. We do not use process ids in names: they are
    # reused, and mean nothing in another container that shares the folder.
    with FileLock(cache / ".lock"):
        if folder.exists():
            return None
        for stale in cache.glob("*.tmp"):  # their writer held the lock, so it has ended
            if TEMPORARY.fullmatch(stale.name) and stale.is_dir():  # the cache folder may have other files too
                shutil.rmtree(stale)
        temporary = cache / f"{folder.name}.tmp"
        corpus.split(data.val_fraction)
        try:
            with writing_to(cache):
                # Training text only: a tokenizer that knows the validation text makes its bits per byte too low.
                encoding = kept or build(tokenizer, corpus.training_text())
                temporary.mkdir()
                manifest: dict[str, Any] = {
                    "version": FORMAT,
                    "val_fraction": data.val_fraction,
                    "source": data.path or ORIGINS[data.source],
                    "left_out": corpus.repeated + len(corpus.not_text),
                    "tokenizer": {"name": encoding.name, "vocab_size": encoding.n_vocab},
                    **write(temporary, corpus, encoding),
                }
                (temporary / "tokenizer.json").write_text(to_json(encoding), encoding="utf-8")
                manifest["sha256"] = {file.name: sync_and_hash(file) for file in sorted(temporary.iterdir())}
                (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
                sync_and_hash(temporary / MANIFEST)
                temporary.rename(folder)  # now the folder is complete, and other processes may open it
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it is still there only after an error
    return manifest


def check(data: DataConfig) -> None:
    """ValueError for a key that this source does not read, and for a key that it needs."""
    for name in ("path", "field", "url", "shards", "megabytes"):
        value = getattr(data, name)
        if value != getattr(DataConfig, name) and name not in READS[data.source]:
            readers = " or ".join(f"data={source}" for source, read in READS.items() if name in read)
            raise ValueError(f"data.{name}={value} is read with {readers} only: choose that, or leave it out")
    if data.source == "fineweb" and data.val_fraction != DataConfig.val_fraction:
        raise ValueError(f"data.val_fraction={data.val_fraction}: data=fineweb has a validation shard; leave it out")
    if data.path is None and "path" in READS[data.source]:
        what = "text" if data.source == "text" else "tokens"
        raise ValueError(f"data={data.source} has no {what}: say which with data.path=FILE, a folder or a glob")


# ---- which text


def files_of(
    data: DataConfig, tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None, context_length: int | None
) -> Sequence[File]:
    """The files of a source, in order. ValueError if there is nothing to read; for a source that makes its text also
    for another tokenizer than byte, and for too little text for validation."""
    match data.source:
        case "pystdlib" | "pypackages":
            names = ("stdlib",) if data.source == "pystdlib" else ("purelib", "platlib")
            roots = {os.path.realpath(sysconfig.get_path(name)) for name in names}  # lib64 may be a link to lib
            return in_order(file for root in roots for file in walk(root, LEFT_OUT) if file.endswith(".py"))
        case "text":
            assert data.path is not None, "check() refuses None"
            found = find(data.path, Path(data.cache))
            if data.field != DataConfig.field and not any(suffix(str(file)) == ".jsonl" for file in found):
                raise ValueError(
                    f"data.field={data.field}: data.path={data.path} has no .jsonl to read it from; leave it out"
                )
            return found
        case "shakespeare":
            return [str(shakespeare(Path(data.cache), data.url))]
        case "tinystories":
            return [str(tinystories(Path(data.cache), data.megabytes))]
    if tokenizer.kind != "byte" and not (kept and same(kept, byte_encoding())):
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
    return [documents]


def left_out(corpus: Corpus, others: int, folder: Path) -> str:
    """Part of prepare()'s message: what was left out, with a space in front; "" if nothing was. Lists the files that
    are not UTF-8 in not_text.txt of the prepared data's folder."""
    names = folder / "not_text.txt"
    if corpus.not_text:
        with suppress(OSError):  # a finished cache may be read-only
            lines = [f"{keys.one_line(line)}\n" for line in corpus.not_text]
            names.write_text("".join(lines), encoding="utf-8", errors="replace")
    counts = {
        f"not UTF-8 (listed in {names})": len(corpus.not_text),
        "repeating another": corpus.repeated,
        "with a suffix that is not read": others,
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return f" (left out: {', '.join(parts)})" if parts else ""


def label_of(tokenizer: TokenizerConfig, kept: tiktoken.Encoding | None) -> str:
    """The tokenizer in a folder's name: byte, gpt2, bpe4096; for kept a part of its hash."""
    if kept:
        return f"kept_{hashlib.sha256(to_json(kept).encode()).hexdigest()[:8]}"
    return f"bpe{tokenizer.vocab_size or BPE_SYMBOLS}" if tokenizer.kind == "bpe" else tokenizer.kind


def folder_name(data: DataConfig, label: str, corpus: Corpus) -> str:
    """A name that is the same if and only if the token files are the same. So cached folders never become outdated."""
    digest = hashlib.sha256(json.dumps([FORMAT, label, data.val_fraction]).encode())
    digest.update(corpus.sha256[corpus.split_of != REPEATED].tobytes())
    _, _, limited = corpus.for_validation(data.val_fraction)
    if limited:
        digest.update(b"at most half of the documents")  # folders of earlier versions have more
    return f"{data.source}-{label}-{digest.hexdigest()[:12]}"


# ---- writing tokens


def write(folder: Path, corpus: Corpus, encoding: tiktoken.Encoding) -> dict[str, dict[str, Any]]:
    """Write the token files and document starts of all splits. Return their entries for the manifest."""
    writers = {name: Writer(folder, name, encoding.n_vocab) for name in SPLITS}
    starts = {name: array("q") for name in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    dtype = writers["train"].dtype
    end_of_text = np.array([encoding.eot_token], dtype)
    for piece, ids in encode_pieces(corpus.pieces("encoding"), encoding, dtype):
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

    waiting: deque[Future[list[tuple[Piece, np.ndarray]]]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
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
