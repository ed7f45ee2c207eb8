"""A file, a folder, a glob, .jsonl, .gz or standard input -> documents, as strings in memory."""

import functools
import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

FIRST = os.environ.get("RANK", "0") == "0"  # of torchrun's processes: it alone says what there is
# Text too, but seldom what people want from a folder; a glob reads it.
DATA_SUFFIXES = {".csv", ".tsv", ".json", ".xml", ".svg", ".lock", ".log", ".map", ".ipynb", ".pdf"}


def find(path: str, never: Iterable[str | Path] = ()) -> list[Path]:
    """The files that data.path names, sorted: a file, all that is in a folder, or the files that a glob matches. What
    exists is a path, also with a [ in its name; the rest is a pattern. Leaves out hidden files and folders, and the
    folders `never` (runs= and data.cache=) unless `path` names something inside them. ValueError if nothing is left."""
    named = Path(path).expanduser()
    if named.is_file():
        return [named]
    there = next(folder for folder in (named, *named.parents) if folder.is_dir())
    root = there.resolve()
    skipped = {other.resolve() for other in map(Path, never)} - {*root.parents}
    matches = walk(root) if there == named else filter(Path.is_file, root.glob(str(named.relative_to(there))))
    shown = (file for file in matches if not any(part.startswith(".") for part in file.relative_to(root).parts))
    found = sorted(file for file in shown if skipped.isdisjoint(file.parents))
    if not found:
        why = f"seen from {Path.cwd()}; hidden files, runs= and data.cache= do not count"
        raise ValueError(f"data.path={path} names no file ({why}): name a file, a folder or a glob; - reads a pipe")
    return found


def walk(root: Path, left_out: Container[str] = ()) -> Iterator[Path]:
    """All below `root` but hidden files. Does not enter hidden folders, links and those whose name is left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder, name) for name in names + links if not name.startswith("."))


def suffix(file: Path) -> str:
    """In lower case and without .gz: ".jsonl" for x.JSONL and for x.jsonl.gz."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def is_text(file: Path) -> bool:
    """Whether to read this file of a folder: no data file, and no zero byte in its first KiB."""
    with suppress(OSError, EOFError, zlib.error):  # read() says so
        return suffix(file) not in DATA_SUFFIXES and file.is_file() and b"\0" not in content_of(file, 1024)
    return True


def content_of(file: Path, size: int = -1) -> bytes:
    with gzip.open(file) if file.name.lower().endswith(".gz") else open(file, "rb") as stream:
        return stream.read(size)


def read(file: Path, field: str = "text") -> list[str]:
    """The file's documents: the whole text, or the string in `field` of each line of a .jsonl. Line ends stay as they
    are; a byte order mark goes. ValueError, with the place, for what is not UTF-8 text or lacks the field."""
    try:
        content = content_of(file)
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
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("data.path=- is for one process, and torchrun has several: name a file")
    data = sys.stdin.buffer.read()
    file = cache / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}.txt"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return file
