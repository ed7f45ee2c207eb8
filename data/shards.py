"""Token files in the format of llm.c and modded-nanogpt: 256 int32 of header, then one uint16 (or uint32) a token.

Either side reads the other's. As in their shards, the end-of-text token stands BEFORE each document: it is what the
model is given to start from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

HEADER_INTS = 256
MAGIC_UINT16 = (20240520, 1)  # llm.c's GPT-2 shards
MAGIC_UINT32 = (20240801, 7)  # llm.c's Llama 3 shards
DTYPES: dict[tuple[int, ...], np.dtype] = {MAGIC_UINT16: np.dtype("<u2"), MAGIC_UINT32: np.dtype("<u4")}
MOST_TOKENS = 2**31 - 1  # of one file: its header counts in int32

BLOCK = 1 << 24  # tokens that are looked at at once


class Writer:
    """The tokens of one split on their way to NAME.bin and, whenever a file is full, on to NAME_001.bin and so on."""

    def __init__(self, folder: Path, name: str, n_vocab: int) -> None:
        self.folder = folder
        self.name = name
        self.magic = MAGIC_UINT16 if n_vocab <= 1 << 16 else MAGIC_UINT32
        self.dtype = DTYPES[self.magic]
        self.files = 0
        self.tokens = 0  # in all files
        self.open()

    def open(self) -> None:
        """Begin the next file, with room for the header that close() writes."""
        # "_" sorts after ".": NAME.bin stays the first of them in the order of names
        name = f"{self.name}_{self.files:03d}.bin" if self.files else f"{self.name}.bin"
        self.file = open(self.folder / name, "wb")  # noqa: SIM115
        self.file.write(bytes(4 * HEADER_INTS))
        self.files += 1
        self.here = 0  # tokens in this file

    def write(self, ids: np.ndarray) -> None:
        """Append tokens, self.dtype (n,), and go on in another file where this one is full."""
        while len(ids) > MOST_TOKENS - self.here:
            room = MOST_TOKENS - self.here
            self.append(ids[:room])
            self.close()
            self.open()
            ids = ids[room:]
        self.append(ids)

    def append(self, ids: np.ndarray) -> None:
        """Write tokens for which the open file has room."""
        self.file.write(ids.data)
        self.here += len(ids)
        self.tokens += len(ids)

    def close(self) -> None:
        """Write the header and close the file that is open."""
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = *self.magic, self.here  # the count is known only now, without holding the tokens in memory
        self.file.seek(0)
        self.file.write(header.data)
        self.file.close()


def read_tokens(path: Path, way_out: str) -> np.ndarray:
    """The tokens of one file, memory-mapped: uint16 or uint32 (N,). Raises ValueError, ending in `way_out`, for
    anything else."""
    try:
        header = np.fromfile(path, "<i4", HEADER_INTS)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {way_out}") from error
    magic = tuple(header[:2].tolist())
    if len(header) < HEADER_INTS or magic not in DTYPES:
        raise ValueError(f"{path} is no token file, its header begins {magic}: {way_out}")
    dtype = DTYPES[magic]
    tokens, odd_bytes = divmod(path.stat().st_size - header.nbytes, dtype.itemsize)
    if tokens != header[2] or odd_bytes:
        rest = f" and {odd_bytes} bytes" if odd_bytes else ""
        raise ValueError(f"{path} has {tokens} tokens{rest}, its header says {header[2]}: {way_out}")
    # The header is mapped too and then sliced off, because a map of no bytes at all is an error and no tokens are not.
    return np.memmap(path, dtype, mode="r")[header.nbytes // dtype.itemsize :]


class Shards:
    """Several token arrays as one: len() and slices without a step, which are copied where they cross a border.

    One real array would have to be copied to the disk or held in memory first.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])  # (arrays,): where each one's tokens end

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        parts = self.parts(index)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, index: slice) -> list[np.ndarray]:
        """The pieces of `index`, at least one and none copied."""
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


def join(arrays: Sequence[np.ndarray]) -> np.ndarray | Shards:
    """One token array of several; a single one stays what it is."""
    return arrays[0] if len(arrays) == 1 else Shards(arrays)


def inspect(tokens: np.ndarray, end_of_text: int) -> tuple[np.ndarray, int]:
    """(where the end-of-text tokens stand, int64; the largest id, -1 where there are none). Half a second per GB, and
    no more memory than a block's."""
    ends, largest = [np.empty(0, np.int64)], -1
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        ends.append(start + np.flatnonzero(block == end_of_text))
        largest = max(largest, int(block.max()))
    return np.concatenate(ends), largest
