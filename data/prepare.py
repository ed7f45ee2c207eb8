"""Any text -> token files, made once and kept under a name computed from the text itself.

    data/cache/pystdlib-byte-1f0c2a9be7d4/
        train.bin, val.bin                        tokens: 256 int32 of header, then one uint16 (or uint32) a token
        train_documents.npy, val_documents.npy    where in the tokens each document starts, int64
        tokenizer.json                            what turns these tokens back into text
        manifest.json                             counts, and the SHA-256 of every file above

The .bin files are in the format of llm.c and modded-nanogpt, so either side reads the other's. As in their shards, the
end-of-text token stands BEFORE each document: it is what the model is given to start from.
"""

import codecs
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from data.tokenizer import TokenizerConfig, build, encode, to_json

FORMAT = 1  # raise it when the files' contents change for the same text: every cached folder is then made again
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
FILES = {"tokenizer.json", *(name for split in SPLITS for name in (f"{split}.bin", f"{split}_documents.npy"))}
TEMPORARY = re.compile(r"(pystdlib|text)-\w+-[0-9a-f]{12}\.tmp")

HEADER_INTS = 256
MAGIC_UINT16 = (20240520, 1)  # llm.c's GPT-2 shards
MAGIC_UINT32 = (20240801, 7)  # llm.c's Llama 3 shards
DTYPES = {MAGIC_UINT16: np.dtype("<u2"), MAGIC_UINT32: np.dtype("<u4")}

# Text is encoded in pieces of about this many bytes. It bounds the memory, moves the progress bar within a single
# huge file, and keeps clear of the million spaces in a row at which the tokenizers' regular expressions give up.
PIECE = 1 << 18

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Prose and source. Data (.json, .csv) is text too, but seldom what a folder was named for; a glob takes it.
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".html"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".swift", ".go", ".rs"),
    *(".js", ".ts", ".lua", ".rb", ".pl", ".r", ".jl", ".hs", ".ml", ".sh", ".sql"),
}


@dataclass
class DataConfig:
    source: str = "pystdlib"  # pystdlib | text
    path: str | None = None  # text only: a file, a folder or a glob
    val_fraction: float = 0.05  # of the bytes
    cache: str = "data/cache"


@dataclass(frozen=True)
class Document:
    """One file of the corpus, known by its content; the text itself is read when it is needed."""

    name: str  # relative to the corpus, so that moving the corpus changes nothing
    path: Path
    size: int  # bytes, without a byte order mark
    sha256: str


class Part(NamedTuple):
    """The bytes start .. end of a document that go to one split: nearly always all of them."""

    document: Document
    start: int
    end: int


def prepare(data: DataConfig, tokenizer: TokenizerConfig, *, quiet: bool = False) -> Path:
    """The folder of token files for this text and tokenizer; made when it is not there yet.

    Every call reads and hashes the whole text, about a second per GB: that is how an edited file is noticed. Any
    number of processes may call at once: one does the work and the others wait for it. Raises ValueError, one line,
    for everything that the user can put right.
    """
    if not 0 < data.val_fraction <= 0.5:
        raise ValueError(f"data.val_fraction={data.val_fraction} is outside (0, 0.5]: 0.05 is a usual choice")
    started = time.perf_counter()
    documents, left_out = scan(data)
    cache = Path(data.cache)
    folder = cache / folder_name(data, tokenizer, documents)
    if folder.exists():
        return folder

    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        # The system lets go of the lock when its holder dies, however it dies. Names with process ids were
        # considered: they are reused, and mean nothing in another container that shares the folder.
        fcntl.flock(lock, fcntl.LOCK_EX)  # Linux and macOS
        if folder.exists():  # made by another process while this one waited
            return folder
        for stale in cache.glob("*.tmp"):  # whoever was writing these held the lock, so is dead
            if TEMPORARY.fullmatch(stale.name) and stale.is_dir():  # the cache may be a folder with other things in it
                shutil.rmtree(stale)

        parts = split(documents, data.val_fraction)
        with progress_bar(quiet) as progress:
            # A tokenizer that had seen the validation text would flatter the bits per byte measured on it.
            training_text = read_pieces(parts["train"], progress, "learning the tokenizer")
            encoding = build(tokenizer, (piece.decode() for _, piece in training_text))
            temporary = cache / f"{folder.name}.tmp"
            temporary.mkdir()
            manifest = {
                "version": FORMAT,
                "source": data.path or f"standard library of Python {platform.python_version()}",
                "left_out": left_out,
                "tokenizer": {"name": encoding.name, "vocab_size": encoding.n_vocab},
            }
            for name in SPLITS:
                pieces = read_pieces(parts[name], progress, f"encoding {name}")
                manifest[name] = write_split(temporary, name, pieces, encoding)
        (temporary / "tokenizer.json").write_text(to_json(encoding))
        manifest["sha256"] = {file.name: sync_and_hash(file) for file in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        sync_and_hash(temporary / MANIFEST)
        temporary.rename(folder)  # complete or absent: nothing opens a folder that is still being written

    if not quiet:
        train, val, seconds = manifest["train"], manifest["val"], time.perf_counter() - started
        note = f" ({left_out} files that are not UTF-8 or repeat another left out)" if left_out else ""
        print(
            f"data: {len(documents)} documents{note}, {train['bytes'] + val['bytes']:,} bytes -> "
            f"{train['tokens']:,} training and {val['tokens']:,} validation tokens in {seconds:.1f} s: {folder}",
            file=sys.stderr,
        )
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """What prepare() wrote about `folder`. Raises ValueError where there is nothing readable of this format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version = manifest["version"]
        if set(manifest["sha256"]) != FILES:  # with a file left out of it, that file would go unchecked
            raise ValueError("not the files that belong here")
    except (OSError, ValueError, KeyError, TypeError) as error:  # the last two: JSON, but not ours
        raise ValueError(f"{folder / MANIFEST} cannot be read: delete {folder} and run again") from error
    if version != FORMAT:
        raise ValueError(f"{folder} is of format {version}, this code reads {FORMAT}: delete it and run again")
    return manifest


# ---- which text


def scan(data: DataConfig) -> tuple[list[Document], int]:
    """The corpus in order of names, and how many files were left out of it.

    A file that repeats another is left out: on both sides of the split it would make validation a test of memory. Empty
    files are passed over. What is not UTF-8 is left out of the standard library, but an error in the user's own text,
    where it would otherwise go missing unnoticed.
    """
    match data.source:
        case "pystdlib":
            if data.path is not None:
                raise ValueError(f"data.path={data.path} is read with data=text only: add data=text, or leave it out")
            root = Path(sysconfig.get_path("stdlib"))
            files = [file for file in walk(root, LEFT_OUT) if file.suffix == ".py"]
        case "text":
            if data.path is None:
                raise ValueError("data=text has no text: say which with data.path=FILE, a folder or a glob")
            root, files = find(data.path)
        case _:
            raise ValueError(f"data.source={data.source} is unknown: choose data=pystdlib or data=text")

    documents: dict[str, Document] = {}  # by content
    left_out = 0
    for file in sorted(files):
        try:
            text = read_text(file)
        except ValueError:
            if data.source == "text":
                raise
            left_out += 1
            continue
        sha256 = hashlib.sha256(text).hexdigest()
        if sha256 in documents:
            left_out += 1
        elif text:
            documents[sha256] = Document(file.relative_to(root).as_posix(), file, len(text), sha256)
    if not documents:
        raise ValueError(
            f"{data.path or root} holds no text, or only empty files: use data=text data.path=FILE with text"
        )
    return list(documents.values()), left_out


def find(path: str) -> tuple[Path, list[Path]]:
    """The files that data.path means, and the folder that their names are relative to.

    A folder gives the files in it that look like text by their suffix; a file or a glob gives whatever it names.
    """
    if not path:
        raise ValueError("data.path= is empty: give a file, a folder or a glob")
    named = Path(path).expanduser()
    if named.is_file():
        return named.parent, [named]
    if named.is_dir():
        files = [file for file in walk(named) if file.suffix.lower() in TEXT_SUFFIXES]
        if not files:
            raise ValueError(
                f"data.path={path} has no .txt, .md, .py or the like: name other files by a glob, {path}/*.log"
            )
        return named, files
    files = [Path(match) for match in glob.glob(str(named), recursive=True) if os.path.isfile(match)]
    if not files:
        trouble = "matches no file" if any(c in path for c in "*?[") else "does not exist"
        raise ValueError(f"data.path={path} {trouble}, seen from {Path.cwd()}: give a file, a folder or a glob")
    return Path(os.path.commonpath([file.parent for file in files])), files


def walk(root: Path, left_out: Iterable[str] = ()) -> Iterator[Path]:
    """All files below `root` but for hidden ones and folders named in `left_out`. Links to folders are not followed."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def read_text(path: Path) -> bytes:
    """UTF-8 text as it is on disk, line ends included; only a byte order mark is taken off.

    The mark tells a reader of the file how it is encoded and is no part of the text; left in, the model would learn to
    begin documents with it. Raises ValueError with the offset for what is not text.
    """
    raw = path.read_bytes()
    if b"\0" in raw:
        raise ValueError(
            f"{path} has a zero byte at offset {raw.index(0)}, so is binary or UTF-16: save it as UTF-8 or leave it out"
        )
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte offset {error.start} (0x{raw[error.start]:02x}): "
            f"convert it (iconv -f latin1 -t utf-8) or leave it out"
        ) from error
    return raw.removeprefix(codecs.BOM_UTF8)


def folder_name(data: DataConfig, tokenizer: TokenizerConfig, documents: list[Document]) -> str:
    """Equal for equal results and different for different ones: the cache needs no dates and no invalidation."""
    label = f"bpe{tokenizer.vocab_size}" if tokenizer.kind == "bpe" else tokenizer.kind
    content = [FORMAT, label, data.val_fraction, [(document.name, document.sha256) for document in documents]]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return f"{data.source}-{label}-{digest[:12]}"


# ---- which of it is for validation


def split(documents: list[Document], val_fraction: float) -> dict[str, list[Part]]:
    """Each byte goes to "train" or to "val", and val_fraction of the bytes, or close to it, to "val".

    Whole documents in the order of their hashes, each that still fits: a choice at random that does not depend on names
    or on the order of files, and never takes more than its share. Where that leaves over half of the share open (one
    big file, or a few), the end of the largest document fills it.
    """
    share = val_fraction * sum(document.size for document in documents)
    taken = 0
    chosen = set()
    for document in sorted(documents, key=lambda document: document.sha256):
        if taken + document.size <= share:
            taken += document.size
            chosen.add(document)
    whole = [Part(document, 0, document.size) for document in documents]
    parts = {
        "train": [part for part in whole if part.document not in chosen],
        "val": [part for part in whole if part.document in chosen],
    }
    missing = int(share - taken)
    if missing > share / 2:
        i, part = max(enumerate(parts["train"]), key=lambda item: item[1].end)
        # Every document left is larger than what is missing, or it would have been taken: both sides get something.
        cut = boundary(load(part.document), part.end - missing, reach=missing // 2)
        parts["train"][i] = part._replace(end=cut)
        if cut < part.end:
            parts["val"].append(part._replace(start=cut))
    return parts


def boundary(text: bytes, at: int, reach: int) -> int:
    """Where the next line starts, at `at` or less than `reach` beyond; failing that, where the next character does."""
    line = text.find(b"\n", at - 1, at - 1 + reach) + 1
    if line:
        return line
    while at < len(text) and text[at] & 0xC0 == 0x80:  # 10xxxxxx continues a character of several bytes
        at += 1
    return min(at, len(text))


# ---- reading it, and writing tokens


def load(document: Document) -> bytes:
    """The text of a document. It was hashed before: what has changed since would be kept under a wrong name."""
    text = read_text(document.path)
    if hashlib.sha256(text).hexdigest() != document.sha256:
        raise ValueError(f"{document.path} changed while it was being prepared: run again once it is finished")
    return text


def read_pieces(parts: list[Part], progress: Progress, what: str) -> Iterator[tuple[Part, bytes]]:
    """All the text of `parts`, in pieces of whole characters, moving a progress bar named `what`.

    Holds one document at a time. A cut costs at most a token: bpe and gpt2 would merge across it now and then.
    """
    task = progress.add_task(what, total=sum(part.end - part.start for part in parts))
    for part in parts:
        text = load(part.document)[part.start : part.end]
        start = 0
        while start < len(text):
            end = boundary(text, start + PIECE, reach=PIECE // 4)
            yield part, text[start:end]
            progress.advance(task, end - start)
            start = end


def write_split(
    folder: Path, name: str, pieces: Iterator[tuple[Part, bytes]], encoding: tiktoken.Encoding
) -> dict[str, Any]:
    """Write NAME.bin and NAME_documents.npy; return the manifest's entry. Raises ValueError past 2**31 - 1 tokens."""
    magic = MAGIC_UINT16 if encoding.n_vocab <= 1 << 16 else MAGIC_UINT32
    header = np.zeros(HEADER_INTS, "<i4")
    header[:2] = magic
    starts: list[int] = []
    tokens = size = 0
    current = None
    with open(folder / f"{name}.bin", "wb") as file:
        file.write(header.tobytes())
        for part, piece in pieces:
            ids = encode(encoding, piece.decode())
            if part is not current:
                current = part
                starts.append(tokens)
                ids = np.concatenate([[encoding.eot_token], ids])
            file.write(ids.astype(DTYPES[magic]).tobytes())
            tokens += len(ids)
            size += len(piece)
            if tokens >= 1 << 31:
                raise ValueError(
                    f"{name} has over {tokens:,} tokens, and the format's header counts to 2**31 - 1: "
                    "use less text or a tokenizer with a larger vocabulary"
                )
        header[2] = tokens  # known only now, without holding the tokens in memory
        file.seek(0)
        file.write(header.tobytes())
    np.save(folder / f"{name}_documents.npy", np.array(starts, np.int64), allow_pickle=False)
    return {"tokens": tokens, "bytes": size, "documents": len(starts), "dtype": DTYPES[magic].name}


def sync_and_hash(path: Path) -> str:
    """SHA-256 of a file that is on the disk by then and not only in memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def progress_bar(quiet: bool) -> Progress:
    """A bar over bytes on a terminal (stderr, so that output can be piped), and nothing anywhere else."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
