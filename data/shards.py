"""Token files in the format of llm.c and modded-nanogpt: a header of 256 int32, then a uint16 (or uint32) per token.

They can read our files and we can read theirs. As in their shards, the end-of-text token stands BEFORE each document.
Generation starts from this token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.text import counted

HEADER_INTS = 256
MAGIC_UINT16 = (20240520, 1)  # llm.c's GPT-2 shards
MAGIC_UINT32 = (20240801, 7)  # llm.c's Llama 3 shards
DTYPES: dict[tuple[int, ...], np.dtype] = {MAGIC_UINT16: np.dtype("<u2"), MAGIC_UINT32: np.dtype("<u4")}
MOST_TOKENS = 2**31 - 1  # maximum per file: the header has the count as int32

BLOCK = 1 << 24  # tokens that inspect() reads at a time


class Writer:
    """Writes the tokens of one split to NAME.bin, and when that is full, to NAME_001.bin and so on."""

    def __init__(self, folder: Path, name: str, n_vocab: int) -> None:
        self.folder = folder
        self.name = name
        self.magic = MAGIC_UINT16 if n_vocab <= 1 << 16 else MAGIC_UINT32
        self.dtype = DTYPES[self.magic]
        self.files = 0
        self.tokens = 0  # in all files
        self.open()

    def open(self) -> None:
        """Begin the next file. Leaves room for the header, which close() writes."""
        # "_" sorts after ".", so NAME.bin comes first when the names are sorted
        name = f"{self.name}_{self.files:03d}.bin" if self.files else f"{self.name}.bin"
        self.file = open(self.folder / name, "wb")  # noqa: SIM115
        self.file.write(bytes(4 * HEADER_INTS))
        self.files += 1
        self.here = 0  # tokens in this file

    def write(self, ids: np.ndarray) -> None:
        """Append tokens, self.dtype (n,). When the file is full, continue in the next one."""
        while len(ids):
            if self.here == MOST_TOKENS:
                self.close()
                self.open()
            part = ids[: MOST_TOKENS - self.here]
            self.file.write(part.data)
            self.here += len(part)
            self.tokens += len(part)
            ids = ids[len(part) :]

    def close(self) -> None:
        """Write the header and close the open file."""
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = *self.magic, self.here  # the number of tokens is known only now
        self.file.seek(0)
        self.file.write(header.data)
        self.file.close()


def read_tokens(path: Path, way_out: str) -> np.ndarray:
    """The tokens of one file, memory-mapped: uint16 or uint32 (N,). Raises ValueError if it is missing or not a valid
    token file; the message ends with `way_out`."""
    try:
        header = np.fromfile(path, "<i4", HEADER_INTS)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {way_out}") from error
    magic = tuple(header[:2].tolist())
    if len(header) < HEADER_INTS or magic not in DTYPES:
        raise ValueError(f"{path} is no token file, its header begins with {magic}: {way_out}")
    dtype = DTYPES[magic]
    tokens, odd_bytes = divmod(path.stat().st_size - header.nbytes, dtype.itemsize)
    if tokens != header[2] or odd_bytes:
        rest = f" and {counted(odd_bytes, 'byte')}" if odd_bytes else ""
        raise ValueError(f"{path} has {tokens} tokens{rest}, its header says {header[2]}: {way_out}")
    # We map the header too and slice it off. A file without tokens is valid, but mapping zero bytes is an error.
    return np.memmap(path, dtype, mode="r")[header.nbytes // dtype.itemsize :]


class Shards:
    """Several token arrays as one. Supports len() and slices without a step.

    A slice is copied only if it crosses from one array into the next. np.concatenate would copy all tokens into memory.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])  # (arrays,): index after each array's last token

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        parts = self.parts(index)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, index: slice) -> list[np.ndarray]:
        """The slice as a list of views, one per array; at least one."""
        start, stop, step = index.indices(len(self))
        assert step == 1
        number = min(int(np.searchsorted(self.ends, start, side="right")), len(self.arrays) - 1)
        parts: list[np.ndarray] = []
        while not parts or start < stop:
            array = self.arrays[number]
            begin = len(array) - (int(self.ends[number]) - start)
            parts.append(array[begin : max(begin, begin + stop - start)])
            start += len(parts[-1])
            number += 1
        return parts


def refuse_cut(tokens: np.ndarray | Shards) -> None:
    """ValueError if a file of these tokens has become shorter than its mapping: reading past its end would kill the
    process with SIGBUS, without a word. Takes about 1 us per file."""
    for array in tokens.arrays if isinstance(tokens, Shards) else [tokens]:
        mapped = getattr(array, "_mmap", None)  # None: not from a file
        if mapped is not None and mapped.size() < len(mapped):
            raise ValueError(
                f"{getattr(array, 'filename', 'a token file')} was cut while it was in use, from {len(mapped):,} to "
                f"{mapped.size():,} bytes: make or download it again, and run again or resume"
            )


def join(arrays: Sequence[np.ndarray]) -> np.ndarray | Shards:
    """Several token arrays as one. A single array is returned unchanged."""
    return arrays[0] if len(arrays) == 1 else Shards(arrays)


def inspect(tokens: np.ndarray, end_of_text: int) -> tuple[np.ndarray, int]:
    """(positions of the end-of-text tokens, int64; the largest id, or -1 without tokens). Takes half a second per GB,
    and memory for one block."""
    ends, largest = [np.empty(0, np.int64)], -1
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        ends.append(start + np.flatnonzero(block == end_of_text))
        largest = max(largest, int(block.max()))
    return np.concatenate(ends), largest
