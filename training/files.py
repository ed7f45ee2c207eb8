"""Files, read and written with care: a run's own, and those that a stranger may have made.

A run's own files are replaced as a whole or appended to, and never through a link: a folder from elsewhere may have a
link, a pipe or a device in place of a file of the run. Following it would overwrite another file of the user, or block.
The folder of a run may be a link itself; what is in it may not.

Of strangers' folders, Hugging Face's and checkpoints, only regular files inside the folder are read: a FIFO waits for
ever, /dev/zero never ends, a link may lead anywhere. Sizes are checked before reading: of text against a limit, of
tensors against the file's length.
"""

import json
import os
import secrets
import shutil
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

# Everything that a run writes into its folder.
FILES = (
    "config.yaml",
    "metrics.jsonl",
    "samples.txt",
    "loss.png",
    "context.png",
    "passkey.png",
    "film.png",
    "look.html",
    "wandb_id.txt",
)
FOLDERS = ("checkpoints", "faults", "film", "wandb")
LOCK = ".lock"  # beside them
LARGEST = 1 << 30  # bytes of a metrics.jsonl or samples.txt that are read
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # change the direction of what follows
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


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    if os.name == "nt":  # Windows cannot open a folder; its renames are journalled
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, errors: str = "replace") -> str:
    """The text of a run's own file. A kill may have cut the last sample within a character. errors: what becomes of
    what is no UTF-8. ValueError as own() raises, and for more than LARGEST bytes."""
    own(path)
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size:,} bytes; more than {LARGEST:,} are not read: move it away")
    return path.read_text(encoding="utf-8", errors=errors)


def appending(path: Path) -> IO[Any]:
    """The file, opened for reading and appending. ValueError as own() raises; of a folder open() says what it is."""
    if not path.is_dir() and own(path) and path.stat().st_nlink > 1:  # its other name may be outside
        with replacing(path) as file:
            file.write(path.read_bytes())
    return open(path, "ab+", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666))


def lock(run: Path) -> ExitStack:
    """Locks the folder `run`, which is made if it is missing, until the returned object is closed. Two processes in one
    run would delete each other's checkpoints and mix their metrics. The system releases the lock when the process ends,
    in whatever way. ValueError if another process holds the lock, or if something else is in its file's place.
    """
    run.mkdir(parents=True, exist_ok=True)
    own(run / LOCK)
    held = ExitStack()
    try:
        held.enter_context(FileLock(run / LOCK, timeout=0))
    except Timeout as error:
        raise ValueError(f"the run {run} is being trained by another process; use another name=") from error
    return held


# --- a stranger's files -----------------------------------------------------------------------------------------------


def inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. ValueError if it leads out of it: as "../x", as an absolute path or by a link."""
    file = folder / name
    # Hugging Face's own cache has snapshots/HASH/config.json, a link to ../../blobs/HASH.
    root = folder.absolute().parents[1] if folder.absolute().parent.name == "snapshots" else folder
    try:
        leads_out = Path(name).name != name or not file.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError) as error:  # a link to itself
        raise ValueError(f"{file} is a link in a circle: put the file itself there") from error
    if leads_out:
        raise ValueError(f"{folder}: {name} leads out of the folder, which is refused; put the file itself there")
    if not file.is_file():
        other = ", but something else of that name" if file.exists() else ""
        raise ValueError(f"{folder} has no file {name!r}{other}: it is not complete")
    return file


def read_bytes(folder: Path, name: str, limit: int) -> bytes:
    file = inside(folder, name)
    if (size := file.stat().st_size) > limit:
        raise ValueError(f"{file} has {size:,} bytes; more than {limit:,} are not read")
    return file.read_bytes()


def read_text(folder: Path, name: str, limit: int) -> str:
    try:
        return read_bytes(folder, name, limit).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / name} is not UTF-8 at byte offset {error.start}: the file is damaged") from error


def read_json(folder: Path, name: str, limit: int) -> dict:
    text = read_text(folder, name, limit)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name} is not JSON ({error}): the file is damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name} is JSON of another kind: the file is damaged")
    return content


def open_file(file: Path) -> Any:
    """An opened file of safetensors, to be closed. This reads the header only, and fails if the tensors are not exactly
    as long as the file. ValueError for a damaged file."""
    try:
        return safe_open(file, "pt")
    # MemoryError and RuntimeError: a length that no address space has, or not this one.
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        why = printable(" ".join(str(error).split())[:200])  # it may have a name in it, which may have anything
        raise ValueError(
            f"{file} cannot be read ({why}): it is damaged; delete it and what it links to, and download or copy it "
            "again"
        ) from error


def described(folder: Path, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor: (dtype as safetensors calls it, shape)} of a file of safetensors. Reads no tensor."""
    with open_file(inside(folder, name)) as opened:
        slices = {tensor: opened.get_slice(tensor) for tensor in opened.keys()}  # noqa: SIM118 (it is no dictionary)
        return {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}


def last_word(line: str) -> None:
    """Prints a script's last line on stderr, or on stdout if that cannot be written, as to a file on a full disk."""
    for stream in (sys.stderr, sys.stdout):
        with suppress(OSError):
            print(line, file=stream, flush=True)
            return


def printable(text: str) -> str:
    """harmless(text), with "?" for characters that the terminal's encoding lacks; print() would raise an error."""
    encoding = sys.stdout.encoding or "utf-8"
    return harmless(text).encode(encoding, "replace").decode(encoding)


def harmless(text: str) -> str:
    """text without control characters: a byte model may write escape sequences, and the terminal would execute them."""
    # str.isprintable() would also remove joiners and wide spaces, which Persian and emoji need.
    drop = {c for c in set(text) if c in TURNING or (unicodedata.category(c) == "Cc" and c not in "\n\t")}
    return "".join("\ufffd" if c in drop else c for c in text)
