"""Files that a stranger may have made, read with care: Hugging Face's folders and checkpoints.

Only regular files inside the folder are read: a FIFO waits for ever, /dev/zero never ends, a link may lead anywhere.
Sizes are checked before reading: of text against a limit, of tensors against the file's length.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from training.metrics import printable


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
    except (SafetensorError, OSError, MemoryError) as error:  # MemoryError: a length that no address space has
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
