"""A run's own files: replaced as a whole or appended to, and never through a link.

A folder from elsewhere may have a link, a pipe or a device in place of a file of the run. Following it would
overwrite another file of the user, or block. The folder of a run may be a link itself; what is in it may not.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LARGEST = 1 << 30  # bytes of a metrics.jsonl or samples.txt that are read
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def own(path: Path, *, folder: bool = False) -> bool:
    """Whether a run's own file, or its folder, is there. ValueError for a link, a pipe, a device and the like in its
    place."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        kinds = {stat.S_ISLNK: "link", stat.S_ISDIR: "folder", stat.S_ISREG: "file"}
        what = next((name for is_kind, name in kinds.items() if is_kind(mode)), "pipe or a device")
        wanted = "folder" if folder else "file"
        raise ValueError(f"{path} is a {what} and not a plain {wanted}, and a run writes its own there: move it away")
    return True


def remove(path: Path) -> None:
    """Removes a folder with all that is in it, or whatever lies in its place. shutil.rmtree() would open a pipe, and
    wait for ever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of `path` when it is complete and on the disk. ValueError as own() raises."""
    own(path)
    temp = path.with_name(f".tmp-{secrets.token_hex(4)}-{path.name}")
    try:
        with open(temp, "xb") as file:  # x follows no link
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def read(path: Path) -> str:
    """The text of a run's own file. A kill may have cut the last sample within a character. ValueError as own() raises,
    and for more than LARGEST bytes."""
    own(path)
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size:,} bytes; more than {LARGEST:,} are not read: move it away")
    return path.read_text(encoding="utf-8", errors="replace")


def appending(path: Path) -> IO[Any]:
    """The file, opened for reading and appending. ValueError as own() raises; of a folder open() says what it is."""
    if not path.is_dir() and own(path) and path.stat().st_nlink > 1:  # its other name may be outside
        with replacing(path) as file:
            file.write(path.read_bytes())
    return open(path, "ab+", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666))
