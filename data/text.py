"""Files, folders, globs, .jsonl, .gz or standard input -> documents, read piece by piece.

No file and no list of documents is held in memory as a whole, so a corpus may be larger than memory. The price: to use
the text twice, it has to be read twice.
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

from conf.keys import one_line
from data.made import Made

# Text is encoded in pieces of about this many bytes. This limits the memory, and moves the progress bar within a huge
# file. It also avoids a limit of the tokenizers' regular expressions: they fail at a million spaces in a row.
PIECE = 1 << 18
LINE = 1 << 26  # maximum length of a .jsonl line in bytes; a line has to fit in memory several times

SAID = 1 << 30  # bytes of text out of a .gz between two lines of progress

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Prose and source code. Data files (.json, .csv) are text too, but are seldom what people want from a folder. A glob
# reads them.
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".html", ".jsonl"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".swift", ".go", ".rs"),
    *(".js", ".ts", ".lua", ".rb", ".pl", ".r", ".jl", ".hs", ".ml", ".sh", ".sql"),
}
KINDS = {stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket", stat.S_ISCHR: "device", stat.S_ISBLK: "device"}


MARKS = {  # UTF-32's begins with UTF-16's, so it comes first
    codecs.BOM_UTF8: "utf-8",
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}


class NotText(ValueError):
    """A file that is not UTF-8. Raised before its (only) document ends."""


File = str | BinaryIO | Made  # a path, the copy of standard input, or documents that are made
Stream = BinaryIO | gzip.GzipFile


def counted(n: int, what: str, many: str = "") -> str:
    """n of something in words: 1 document, 2 documents. many: a plural that is not made with an s."""
    return f"{n:,} {what if n == 1 else many or f'{what}s'}"


# ---- which files


def find(path: str, cache: Path) -> Sequence[File]:
    """The files that data.path names, in order: a file, the files with a text suffix in a folder, all files that a glob
    matches, or "-" for standard input. cache: the folder for the copy of standard input.

    Raises ValueError if there is nothing to read.
    """
    if not path:
        raise ValueError("data.path= is empty: give a file, a folder or a glob")
    if path == "-":
        return [standard_input(cache)]
    named = Path(os.path.expanduser(path))
    if named.is_dir():
        files = [file for file in walk(str(named)) if suffix(file) in TEXT_SUFFIXES]
        trouble = f"has no .txt, .md, .py or the like: name other files by a glob, {path}/*.log"
    elif named.exists():
        files = [str(named)]
        if kind := next((kind for is_kind, kind in KINDS.items() if is_kind(named.stat().st_mode)), None):
            way_out = "use data.path=- and pipe it in" if kind == "pipe" else "give a file, a folder or a glob"
            raise ValueError(f"data.path={path} is a {kind}, no file: {way_out}")
    else:
        files = list(expand(named))
        trouble = "matches no file" if any(c in path for c in "*?[") else "does not exist"
        trouble += f", seen from {Path.cwd()}: give a file, a folder or a glob"
    if not files:
        raise ValueError(f"data.path={path} {trouble}")
    return in_order(files)


def in_order(files: Iterable[str]) -> list[str]:
    """Sorts paths folder by folder, so that a folder's files stay together: "a-b" comes after "a/z"."""
    return sorted(files, key=lambda file: file.replace(os.sep, "\0"))


def expand(pattern: Path) -> set[str]:
    """The files that a glob matches. We expand "**" ourselves: Python's glob follows links to folders, and two links to
    their own folder would make it visit 2**40 folders."""
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
    """All files below `root`, without hidden files and without folders whose name is in `left_out`."""
    for folder, names in walk_folders(root, left_out):
        files = (os.path.join(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if os.path.isfile(file))


def walk_folders(root: str, left_out: Iterable[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """(folder, names in it) for `root` and the folders below it. Does not enter hidden folders or links to folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        yield folder, names


def suffix(file: str) -> str:
    """The suffix of a file in lower case and without .gz: ".jsonl" for x.JSONL and for x.jsonl.gz."""
    return os.path.splitext(file.lower().removesuffix(".gz"))[1]


@functools.cache
def standard_input(cache: Path) -> BinaryIO:
    """Copies standard input to a file without a name in `cache`. The system deletes it when the process ends.

    Cached, so that every job of a sweep gets the same text.
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
    """Adds the folder and the way out to an OSError that names no file (a write to a full disk)."""
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
    """(place, piece) for each piece of each document. A piece is UTF-8 text without a byte order mark. It ends at a
    line end if one is near, and never within a character. An empty document has no pieces.

    A text file is one document, and its place is the file's name. In .jsonl each line is a document: the string in
    `field`. Its place is file:line.
    Raises ValueError with the place if something is not text.
    """
    if isinstance(file, Made):
        yield from file.documents()
        return
    name = file if isinstance(file, str) else "standard input"
    try:
        with open_bytes(file) as stream:
            size, lines = 0, suffix(name) == ".jsonl"
            for where, piece in read_lines(stream, name, field) if lines else read_text(stream, name):
                size += len(piece)
                if size // SAID > (size - len(piece)) // SAID and isinstance(stream, gzip.GzipFile):
                    print(f"{one_line(name)}: {size / SAID:.0f} GiB of text so far", file=sys.stderr, flush=True)
                yield where, piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be decompressed ({reason}): fetch it again or leave it out") from error


def open_bytes(file: str | BinaryIO) -> AbstractContextManager[Stream]:
    """Opens the file at its beginning, and decompresses it if its name ends in .gz. The context closes the file, except
    for the copy of standard input, which is read several times."""
    if not isinstance(file, str):
        file.seek(0)
        return nullcontext(file)
    return gzip.open(file) if file.lower().endswith(".gz") else open(file, "rb")


def read_text(stream: Stream, name: str) -> Iterator[tuple[str, bytes]]:
    """The whole stream as one document, with its line ends. UTF-16 and UTF-32 are known by their byte order mark.

    Removes the mark. It is not part of the text, and the model would learn to begin documents with it.
    """
    chunk = stream.read(4)
    mark, encoding = next((found for found in MARKS.items() if chunk.startswith(found[0])), (b"", "utf-8"))
    recode = encoding != "utf-8"
    stream.seek(0 if recode else len(mark))  # the decoders of the others read the mark themselves
    decoder, text = codecs.getincrementaldecoder(encoding)(), b""
    while chunk or text:
        while chunk and len(text) < 2 * PIECE:
            chunk = stream.read(PIECE)
            if b"\0" in chunk and not recode:
                at = stream.tell() - len(chunk) + chunk.index(0)
                raise NotText(
                    f"{name} has a zero byte at offset {at}, so is binary or UTF-16: save it as UTF-8 or leave it out"
                )
            try:
                decoded = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                if recode:
                    why = f"the {encoding.upper()} that its first bytes say ({error.reason})"
                    raise NotText(f"{name} is not {why}: save it as UTF-8 or leave it out") from error
                at = stream.tell() - len(error.object) + error.start
                raise NotText(
                    f"{name} is not UTF-8 at byte offset {at} (0x{error.object[error.start]:02x}): "
                    "convert it (iconv -f latin1 -t utf-8) or leave it out"
                ) from error
            text += decoded.encode() if recode else chunk
        if recode and b"\0" in text:
            raise NotText(f"{name} has a zero character, so is binary: leave it out")
        if text:
            yield name, text[: (end := boundary(text, PIECE, PIECE // 4))]
            text = text[end:]


def read_lines(stream: Stream, name: str, field: str) -> Iterator[tuple[str, bytes]]:
    """Each line's `field` is a document. Skips blank lines: many programs write one at the end."""
    for number, line in enumerate(iter(lambda: stream.readline(LINE), b""), start=1):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        try:
            if len(line) == LINE:
                raise ValueError(f"it is over {LINE >> 20} MiB long")
            record = json.loads(line.decode("utf-8-sig").rstrip())
            text = text_of(record, field).encode()
        except (ValueError, RecursionError) as error:  # from JSON, from UTF-8 (half a surrogate pair), or our own
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(
                f"{where}: {reason}; every line of .jsonl must be an object like "
                f'{{{quoted(field)}: "..."}}: mend this one'
            ) from error
        start = 0
        while start < len(text):
            end = boundary(text, start + PIECE, PIECE // 4)
            yield where, text[start:end]
            start = end


def text_of(record: object, field: str) -> str:
    """The string in the line's `field`. If there is none, ValueError that names the fields with a string."""
    found = record if isinstance(record, dict) else {}
    if isinstance(text := found.get(field), str):
        return text
    others = [quoted(key) for key, value in found.items() if isinstance(value, str)]
    hint = f" (data.field= could be {' or '.join(others[:8])})" if others else ""
    raise ValueError(f"no field {quoted(field)} with a string{hint}")


def quoted(text: str) -> str:
    """text as a JSON string; letters of all languages stay as they are."""
    return json.dumps(text, ensure_ascii=False)


def boundary(text: bytes, at: int, reach: int) -> int:
    """The start of the first line that begins at `at` or at most `reach` after it. If there is none, the start of the
    next character."""
    line = text.find(b"\n", at - 1, at - 1 + reach) + 1
    if line:
        return line
    while at < len(text) and text[at] & 0xC0 == 0x80:  # 10xxxxxx continues a character of several bytes
        at += 1
    return min(at, len(text))
