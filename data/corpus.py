"""The documents of a source: their sizes and hashes, which of them are for validation, and their text, piece by piece.

The text is never held in memory. It is read up to three times: to hash every document, to train the tokenizer (bpe
only), and to encode it. Memory: 41 bytes per document.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.text import File, NotText, boundary, read

TRAIN, VAL, REPEATED = 0, 1, -1  # what a document is for; repeated: it repeats another one and is left out
SPLITS = ("train", "val")
CHANGED = "{} changed while it was being prepared: run again once it is finished"
LEARN = 1 << 28  # bytes that bpe learns from; more text changes few merges and needs more memory for rustbpe's counts


class Piece(NamedTuple):
    """A part of a document's text, in UTF-8. No character is cut."""

    split: str
    first: bool  # whether it is its document's first piece in this split
    text: bytes


@dataclass
class Corpus:
    """All documents of some files, in order. split() says which are for validation."""

    files: list[File]
    field: str  # field of a .jsonl line that holds the text
    sizes: np.ndarray  # int64 (documents,): bytes
    sha256: np.ndarray  # uint8 (documents, 32)
    order: np.ndarray  # int64 (documents,): documents sorted by hash: a random order that does not depend on file names
    split_of: np.ndarray  # int8 (documents,): TRAIN, VAL or REPEATED
    not_text: list[str]  # a line for each file that is left out because it is not UTF-8: why, and the way out
    cut: tuple[int, int] = (-1, 0)  # (document, byte): this training document is for validation from this byte on

    @property
    def repeated(self) -> int:
        """The number of documents that are left out because they repeat another one."""
        return int((self.split_of == REPEATED).sum())

    def for_validation(self, val_fraction: float) -> tuple[list[int], int, bool]:
        """Goes through the documents in the order of their hashes and takes each one that still fits. This choice is
        random, does not depend on the names or the order of files, and never takes more than val_fraction of the bytes,
        the share. If a document is larger than the share, at most half of the documents are taken, and one at least:
        all small ones could fit, and training would have none of them.

        Returns the documents, how many bytes are missing if they fill less than half of the share, else 0, and whether
        others would fit, and are not taken because half of all documents are."""
        rest = self.order[self.split_of[self.order] != REPEATED]
        share = val_fraction * int(self.sizes[rest].sum())
        most = max(1, len(rest) // 2) if self.sizes[rest].max(initial=0) > share else len(rest)
        found: list[int] = []
        left, limited = share, False
        for i, size in zip(memoryview(rest), memoryview(self.sizes[rest]), strict=True):  # whose numbers are Python's
            if size <= left:
                if limited := len(found) == most:
                    break
                found.append(i)
                left -= size
        return found, int(left) if int(left) > share / 2 else 0, limited

    def split(self, val_fraction: float) -> None:
        """Takes about val_fraction of the bytes for validation: documents, and what is missing (the corpus is one or a
        few big files) from the end of the largest other document."""
        documents, missing, _ = self.for_validation(val_fraction)
        self.split_of[documents] = VAL
        if missing:
            # The largest document that is left is larger than `missing`, so a part of it stays for training.
            largest = int(np.argmax(np.where(self.split_of == TRAIN, self.sizes, -1)))
            self.cut = largest, self.line_start(largest, int(self.sizes[largest]) - missing, reach=missing // 2)

    def line_start(self, document: int, at: int, reach: int) -> int:
        """boundary() in a document, whose pieces are read again: the first line from `at` on, or the next character."""
        character = at
        for number, start, piece in self.reread():
            if number == document:
                if start <= at < start + len(piece):
                    character = start + boundary(piece, at - start, reach=0)
                line = piece.find(b"\n", max(0, at - 1 - start), max(0, at - 1 + reach - start))
                if line >= 0:
                    return start + line + 1
                if start + len(piece) >= at + reach:
                    break
        return character

    def reread(self) -> Iterator[tuple[int, int, bytes]]:
        """(number of the document, offset in it, a piece of it) for the whole corpus.

        Raises ValueError if a document has changed since it was hashed: the folder's name would be wrong. The error
        comes after the document's pieces, which are not kept in memory. The caller must then delete what it made of
        them.
        """
        number, start = 0, 0
        for where, piece, sha256 in chain.from_iterable(read_and_hash(file, self.field) for file in self.files):
            if number == len(self.sizes) or (sha256 and sha256 != self.sha256[number].tobytes()):
                raise ValueError(CHANGED.format(where))
            if sha256:
                number, start = number + 1, 0
            else:
                yield number, start, piece
                start += len(piece)
        if number < len(self.sizes):
            raise ValueError(CHANGED.format(self.files[-1]))

    def pieces(self, what: str) -> Iterator[Piece]:
        """All text for training and validation, in the order of reading. Moves a progress bar named `what`, if stderr
        is a terminal.

        A cut between pieces costs at most one token: now and then, bpe and gpt2 would have merged across it.
        """
        cut_document, cut = self.cut
        total = int(self.sizes.sum())
        with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            for number, start, text in self.reread():
                bar.update(len(text))
                if number == cut_document:
                    at = min(max(cut - start, 0), len(text))
                    parts = Piece("train", start == 0, text[:at]), Piece("val", start + at == cut, text[at:])
                    yield from (part for part in parts if part.text)
                elif self.split_of[number] != REPEATED:
                    yield Piece(SPLITS[self.split_of[number]], start == 0, text)

    def training_text(self) -> Iterator[str]:
        """The training text for the tokenizer to learn from. Of more than LEARN bytes: LEARN bytes, evenly spread."""
        total, taken, seen = int(self.sizes[self.split_of == TRAIN].sum()), 0, 0
        for piece in self.pieces("learning the tokenizer"):
            if piece.split == "train":
                if taken * total <= LEARN * seen:
                    taken += len(piece.text)
                    yield piece.text.decode()
                seen += len(piece.text)


def scan(found: Sequence[File], field: str, source: str) -> Corpus:
    """Reads and hashes all documents of these files. source: their name in an error.

    Leaves out a document that repeats another one: if one were for training and one for validation, validation would
    measure memory. Leaves out empty documents, and files that are not UTF-8. ValueError if no file is UTF-8.
    """
    files, not_text = [], []
    hashes, sizes = bytearray(), array("q")  # small: a list would take a hundred bytes per document
    for file in found:
        size = 0
        try:
            for _, piece, sha256 in read_and_hash(file, field):
                size += len(piece)
                if sha256:
                    hashes += sha256
                    sizes.append(size)
                    size = 0
            files.append(file)
        except NotText as error:  # raised before its only document was counted
            not_text.append(str(error))
            if len(not_text) == len(found):
                raise
    if not sizes:
        raise ValueError(f"{source} holds no text, or only empty files: use data=text data.path=FILE with text")
    words = np.frombuffer(hashes, ">u8").reshape(-1, 4)  # (documents, 4)
    order = np.lexsort(words.T[::-1])  # lexsort's last key is the first to compare; equal hashes keep their order
    split = np.full(len(sizes), TRAIN, np.int8)
    split[order[1:][(words[order[1:]] == words[order[:-1]]).all(axis=1)]] = REPEATED
    return Corpus(files, field, np.array(sizes), words.view(np.uint8), order, split, not_text)


def read_and_hash(file: File, field: str) -> Iterator[tuple[str, bytes, bytes]]:
    """(place, piece, b"") for each piece of each document; after a document's last one (place, b"", its SHA-256)."""
    for where, pieces in groupby(read(file, field), key=itemgetter(0)):
        sha256 = hashlib.sha256()
        for _, piece in pieces:
            sha256.update(piece)
            yield where, piece, b""
        yield where, b"", sha256.digest()
