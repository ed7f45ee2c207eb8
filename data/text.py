"""A file, a folder, a glob, .jsonl, .gz or standard input -> documents, as strings in memory."""

import functools
import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Container, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

# Prose and source code. Data files (.json, .csv) are text too, but are seldom what people want from a folder; a glob
# reads them.
TEXT_SUFFIXES = {
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".html", ".jsonl"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".swift", ".go", ".rs"),
    *(".js", ".ts", ".lua", ".rb", ".pl", ".r", ".jl", ".hs", ".ml", ".sh", ".sql"),
}


def find(path: str, never: Iterable[str | Path] = ()) -> list[Path]:
    """The files that data.path names, sorted: a file, a folder's texts, or all files that a glob matches. Leaves out
    hidden files and folders, and the folders `never` (runs= and data.cache=) unless `path` names something inside
    them. ValueError if nothing is left."""
    named = Path(path).expanduser()
    if named.is_file():
        return [named]
    parts = [*takewhile(lambda part: not set(part) & set("*?["), named.parts)]
    root, folder = Path(*parts).resolve(), len(parts) == len(named.parts)
    if not root.is_dir():
        raise ValueError(f"data.path={path} is no file or folder (seen from {Path.cwd()}); data.path=- reads a pipe")
    skipped = {other.resolve() for other in map(Path, never)} - {*root.parents}
    matches = walk(root) if folder else root.glob(str(Path(*named.parts[len(parts) :])))
    shown = (file for file in matches if not any(part.startswith(".") for part in file.relative_to(root).parts))
    files = (file for file in shown if file.is_file() and skipped.isdisjoint(file.parents))
    found = sorted(file for file in files if not folder or suffix(file) in TEXT_SUFFIXES)
    if not found:
        why = "hidden files, runs= and data.cache= do not count" + (", nor data files like .csv" if folder else "")
        what = "has no text" if folder else "matches no file"
        raise ValueError(f"data.path={path} {what} ({why}): name a file, or files by a glob like FOLDER/*.csv")
    return found


def walk(root: Path, left_out: Container[str] = ()) -> Iterator[Path]:
    """All files below `root` but hidden ones. Does not enter hidden folders, links and those whose name is left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def suffix(file: Path) -> str:
    """In lower case and without .gz: ".jsonl" for x.JSONL and for x.jsonl.gz."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def read(file: Path, field: str = "text") -> list[str]:
    """The file's documents: the whole text, or the string in `field` of each line of a .jsonl. Line ends stay as they
    are; a byte order mark goes. ValueError, with the place, for what is not UTF-8 text or lacks the field."""
    try:
        content = file.read_bytes()
        if file.name.lower().endswith(".gz"):
            content = gzip.decompress(content)
        if b"\0" in content:
            raise ValueError(f"{file} has a zero byte, so it is binary: leave it out")
        whole = content.decode("utf-8-sig")
        if suffix(file) != ".jsonl":
            return [whole]
        lines = enumerate(whole.split("\n"), start=1)
        return [text_of(line, field, f"{file}:{number}") for number, line in lines if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read ({error}): fetch it again or leave it out") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: convert it (iconv -f latin1 -t utf-8) or leave it out") from error


def text_of(line: str, field: str, where: str) -> str:
    """The string in `field` of a line of .jsonl. ValueError shows how the line begins."""
    try:
        text = json.loads(line)[field]
        return text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f'{where}: no string "{field}" in {line[:80]!r}: data.field= names another') from error


@functools.cache  # each job of a sweep gets the same text
def standard_input(cache: Path) -> Path:
    """Copies standard input to a file in `cache`, so that a resumed run finds it. Its name has a hash of the text."""
    data = sys.stdin.buffer.read()
    file = cache / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}.txt"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return file
