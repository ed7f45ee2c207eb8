"""Documents -> windows in which no document is cut that fits. train.py pack=true

T tokens of a window. A document of more than T tokens is cut: every T of them are a window, and the rest is packed like
a document. The longest documents come first, and each goes where the least room is left (best fit, as in Ding et al.
2024, arXiv 2404.10830). They pad what stays free. Here it is filled from the start of another document, so these tokens
are in two windows of an epoch. They are counted.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass
class Packing:
    """Windows as lists of spans. A span is (index of its first token, number of tokens)."""

    starts: np.ndarray  # int64 (spans,)
    lengths: np.ndarray  # int64 (spans,)
    first: np.ndarray  # int64 (windows + 1,): each window's first span; the last entry is the number of spans
    repeated: int  # tokens that are in two windows
    # How many tokens of its document, itself included, a token sees on average: in these windows (without the repeated
    # tokens), and if the text were cut after every T tokens.
    seen: float
    seen_cut: float

    def __len__(self) -> int:
        return len(self.first) - 1

    def window(self, i: int) -> list[tuple[int, int]]:
        """The spans of window i, together T tokens."""
        spans = slice(self.first[i], self.first[i + 1])
        return list(zip(self.starts[spans].tolist(), self.lengths[spans].tolist(), strict=True))


def pack(documents: np.ndarray, tokens: int, T: int) -> Packing:
    """The windows of a text, at least one.

    documents: int64 (documents,), index of each document's first token, beginning with 0. tokens: of the text, at least
    T + 1. Its last token is only a target. Takes ten seconds for a million documents.
    """
    starts, lengths = cut(documents, tokens, T)
    anywhere = np.diff(np.union1d(documents, np.arange(0, tokens - 1, T)), append=tokens - 1)
    seen, seen_cut = ((sizes * (sizes + 1) / 2).sum() / sizes.sum() for sizes in (lengths, anywhere))
    windows = best_fit(lengths, T)
    free = [T - int(lengths[window].sum()) for window in windows]
    fillers = documents[documents <= tokens - 1 - T]  # from each on there are T tokens and one more
    more = [i for i, room in enumerate(free) if room]
    for number, i in enumerate(more):
        windows[i].append(len(lengths) + number)
    starts = np.concatenate([starts, fillers[np.arange(len(more)) * len(fillers) // max(1, len(more))]])
    lengths = np.concatenate([lengths, np.array([free[i] for i in more], np.int64)])
    order = np.concatenate([np.array(window) for window in windows])
    first = np.cumsum([0, *map(len, windows)])
    return Packing(starts[order], lengths[order], first, sum(free), float(seen), float(seen_cut))


def cut(documents: np.ndarray, tokens: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the documents, those of more than T tokens cut after every T."""
    sizes = np.diff(documents, append=tokens - 1)
    documents, sizes = documents[sizes > 0], sizes[sizes > 0]  # the last document may be the last token alone
    pieces = -(-sizes // T)  # of each document
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
    return np.repeat(documents, pieces) + number * T, np.minimum(T, np.repeat(sizes, pieces) - number * T)


def best_fit(lengths: np.ndarray, T: int) -> list[list[int]]:
    """Windows of at most T tokens, each a list of indices of `lengths`."""
    windows: list[list[int]] = []
    room: list[int] = []  # the numbers of free tokens for which there is a window, sorted
    with_room: dict[int, list[int]] = {}  # free tokens -> windows
    for i in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[i])
        at = bisect_left(room, size)
        if at < len(room):
            free = room[at]
            window = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], room[at]
        else:
            free, window = T, len(windows)
            windows.append([])
        windows[window].append(i)
        if left := free - size:
            if left not in with_room:
                insort(room, left)
                with_room[left] = []
            with_room[left].append(window)
    return windows
