"""Text as people keep it -> documents, a piece at a time: files, folders, globs, .jsonl, .gz, standard input.

No file is ever held whole, nor a list of documents: a corpus may be larger than memory. The price is that whoever wants
the text twice reads it twice.
"""

import codecs
import functools
import glob
import gzip
import json
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

# Text is encoded in pieces of about this many bytes. It bounds the memory, moves the progress bar within a single
# huge file, and keeps clear of the million spaces in a row at which the tokenizers' regular expressions give up.
PIECE = 1 << 18
LINE = 1 << 26  # bytes of the longest line of .jsonl: the one thing that has to fit in memory, several times over

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Prose and source. Data (.json, .csv) is text too, but seldom what a folder was named for; a glob takes it.
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".html", ".jsonl"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".swift", ".go", ".rs"),
    *(".js", ".ts", ".lua", ".rb", ".pl", ".r", ".jl", ".hs", ".ml", ".sh", ".sql"),
}
KINDS = {stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISCHR: "device", stat.S_ISBLK: "device"}


class NotText(ValueError):
    """A file that is not UTF-8. Raised before the file's one document has come to its end."""


File = str | BinaryIO  # a path, or the copy of standard input
Stream = BinaryIO | gzip.GzipFile


# ---- which files


def find(path: str, cache: Path) -> Sequence[File]:
    """The files that data.path means, in order: a file, a folder's files that look like text by their suffix, whatever
    a glob matches, or "-", which is standard input. `cache` is the folder for its copy.

    Raises ValueError where there is nothing to read.
    """
    if not path:
        raise ValueError("data.path= is empty: give a file, a folder or a glob")
    if path == "-":
        return [standard_input(cache)]
    named = Path(path).expanduser()
    if named.is_dir():
        files = [file for file in walk(str(named)) if suffix(file) in TEXT_SUFFIXES]
        if not files:
            raise ValueError(
                f"data.path={path} has no .txt, .md, .py or the like: name other files by a glob, {path}/*.log"
            )
    elif named.exists():
        for is_kind, kind in KINDS.items():
            if is_kind(named.stat().st_mode):
                way_out = "use data.path=- and pipe it in" if kind == "pipe" else "give a file, a folder or a glob"
                raise ValueError(f"data.path={path} is a {kind}, no file: {way_out}")
        files = [str(named)]
    else:
        files = list(expand(named))
        if not files:
            trouble = "matches no file" if any(c in path for c in "*?[") else "does not exist"
            raise ValueError(f"data.path={path} {trouble}, seen from {Path.cwd()}: give a file, a folder or a glob")
    return in_order(files)


def in_order(files: Iterable[str]) -> list[str]:
    """A folder's files together: by the names along the path, where "a-b" comes after "a/z"."""
    return sorted(files, key=lambda file: file.replace(os.sep, "\0"))


def expand(pattern: Path) -> set[str]:
    """The files that a glob matches. "**" is walked here, not by glob, which follows links to folders: two that lead
    back to where they are would take it 2**40 folders to notice."""
    parts = pattern.parts
    if "**" not in parts:
        return {match for match in glob.glob(str(pattern)) if os.path.isfile(match)}
    at = parts.index("**")
    tail = parts[at + 1 :] or ("*",)
    return {
        file
        for top in glob.glob(str(Path(*parts[:at])))
        for folder, _ in walk_folders(top)
        for file in expand(Path(glob.escape(folder), *tail))
    }


def walk(root: str, left_out: Iterable[str] = ()) -> Iterator[str]:
    """All files below `root` but for hidden ones and folders named in `left_out`."""
    for folder, names in walk_folders(root, left_out):
        files = (os.path.join(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if os.path.isfile(file))


def walk_folders(root: str, left_out: Iterable[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """`root` and the folders below it with the names in them. Hidden folders and links to folders are not entered."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        yield folder, names


def suffix(file: str) -> str:
    """What kind of text a file holds: ".jsonl" for x.JSONL and for x.jsonl.gz."""
    return os.path.splitext(file.lower().removesuffix(".gz"))[1]


@functools.cache
def standard_input(cache: Path) -> BinaryIO:
    """All of standard input, in a file without a name in `cache`: it goes when the process does, however that ends.

    Once a process, so that every job of a sweep gets the same text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("data.path=- reads standard input, and nothing is piped into it: use data.path=- < FILE")
    cache.mkdir(parents=True, exist_ok=True)
    copy = tempfile.TemporaryFile(dir=cache)  # noqa: SIM115
    with writing_to(cache):
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return copy


@contextmanager
def writing_to(cache: Path) -> Iterator[None]:
    """Gives an OSError that names no file (of a write: the disk is full) the folder and the way out."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        why = (
            f"the text could not be written to {cache} ({error.strerror}): free some space, or use another data.cache="
        )
        raise OSError(error.errno, why) from error


# ---- what is in them


def read(file: File, field: str = "text") -> Iterator[tuple[str, bytes]]:
    """(where the document stands, a piece of it) for each piece of each document: UTF-8 text without a byte order mark,
    cut at line ends where there are any nearby, and never within a character. An empty document has no pieces.

    Text is one document a file and "where" is the file. .jsonl is one a line, the string of that `field`, and "where"
    is file:line.
    Raises ValueError for what is not text, with the place.
    """
    name = file if isinstance(file, str) else "standard input"
    try:
        with open_bytes(file) as stream:
            yield from read_lines(stream, name, field) if suffix(name) == ".jsonl" else read_text(stream, name)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be decompressed ({reason}): fetch it again or leave it out") from error


def open_bytes(file: File) -> AbstractContextManager[Stream]:
    """The file from its beginning, unpacked if its name ends in .gz. Leaving the context closes it, but for standard
    input's copy, which is read again."""
    if not isinstance(file, str):
        file.seek(0)
        return nullcontext(file)
    return gzip.open(file) if file.lower().endswith(".gz") else open(file, "rb")


def read_text(stream: Stream, name: str) -> Iterator[tuple[str, bytes]]:
    """The whole stream as one document, line ends included.

    A byte order mark tells a reader how the file is encoded and is no part of the text; left in, the model would learn
    to begin documents with it.
    """
    offset, text = 0, stream.read(2 * PIECE)
    if text.startswith(codecs.BOM_UTF8):
        offset, text = len(codecs.BOM_UTF8), text.removeprefix(codecs.BOM_UTF8)
    while text:
        piece = text[: boundary(text, PIECE)]
        if b"\0" in piece:
            raise NotText(
                f"{name} has a zero byte at offset {offset + piece.index(0)}, so is binary or UTF-16: "
                "save it as UTF-8 or leave it out"
            )
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            raise NotText(
                f"{name} is not UTF-8 at byte offset {offset + error.start} (0x{piece[error.start]:02x}): "
                "convert it (iconv -f latin1 -t utf-8) or leave it out"
            ) from error
        yield name, piece
        offset += len(piece)
        text = text[len(piece) :] + stream.read(len(piece))


def read_lines(stream: Stream, name: str, field: str) -> Iterator[tuple[str, bytes]]:
    """Each line's field a document. Lines of nothing but blanks are passed over: many writers leave one at the end."""
    for number, line in enumerate(iter(lambda: stream.readline(LINE), b""), start=1):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        try:
            if len(line) == LINE:
                raise ValueError(f"it is over {LINE >> 20} MiB long")
            record = json.loads(line.decode("utf-8-sig").rstrip())
            text = text_of(record, field).encode()
        except (ValueError, RecursionError) as error:  # of JSON, of UTF-8 and back (half a surrogate pair), or ours
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(
                f"{where}: {reason}; every line of .jsonl must be an object like "
                f'{{{quoted(field)}: "..."}}: mend this one'
            ) from error
        start = 0
        while start < len(text):
            end = boundary(text, start + PIECE)
            yield where, text[start:end]
            start = end


def text_of(record: object, field: str) -> str:
    """The string in that field of a line's object. ValueError, with the fields that have one, where there is none."""
    found = record if isinstance(record, dict) else {}
    if isinstance(text := found.get(field), str):
        return text
    others = [quoted(key) for key, value in found.items() if isinstance(value, str)]
    hint = f" (data.field= could be {' or '.join(others[:8])})" if others else ""
    raise ValueError(f"no field {quoted(field)} with a string{hint}")


def quoted(text: str) -> str:
    """text as JSON, readable in any language."""
    return json.dumps(text, ensure_ascii=False)


def boundary(text: bytes, at: int) -> int:
    """Where the next line starts, at `at` or a little beyond; failing that, where the next character does."""
    line = text.find(b"\n", at - 1, at - 1 + PIECE // 4) + 1
    if line:
        return line
    while at < len(text) and text[at] & 0xC0 == 0x80:  # 10xxxxxx continues a character of several bytes
        at += 1
    return min(at, len(text))
