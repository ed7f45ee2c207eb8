"""Token files -> batches of windows, in an order that depends only on the seed and the sample's number.

B batch size, T context_length, N tokens in a split. A window has T + 1 tokens: x is the first T, y the last T (the next
token for each of x). A sample is a window with its number in the order. The order is computed from (seed, sample
number), so a checkpoint saves one number, the position. A random generator would have to be saved for every rank, and
would be wrong if the number of ranks or the batch size changes.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from data.packing import pack
from data.shards import Shards, refuse_cut
from data.text import counted

State = dict[str, int | str]


class Batch(NamedTuple):
    """B windows: input tokens and their targets."""

    x: torch.Tensor  # int64 (B, T): input tokens
    y: torch.Tensor  # int64 (B, T): targets, the next token after each token of x
    documents: torch.Tensor | None  # int32 (B, T): number of the document of each token of x, in the split (in packed
    # windows: in the window). None if the numbers were not asked for

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`. The copy to a CUDA device is asynchronous, from pinned memory."""
        if device.type == "cuda":
            return self.each(lambda part: part.pin_memory().to(device, non_blocking=True))
        return self.each(lambda part: part.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with change() applied to each tensor."""
        return Batch(change(self.x), change(self.y), None if self.documents is None else change(self.documents))

    def parts(self) -> Iterator["Batch"]:
        """The batch without its first axis, once for each index of it."""
        return (self.each(itemgetter(i)) for i in range(len(self.x)))

    def copy_(self, other: "Batch") -> None:
        """Overwrites the tensors with those of `other`. From pinned memory to a CUDA device it does not wait."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs, non_blocking=True)


@dataclass(eq=False)
class Loader:
    """Endless training batches for one rank.

    An epoch cuts the text into windows at a stride of T and returns each once, in random order. Each epoch begins
    cutting at a random offset in [0, T). With a fixed offset, a token at the start of a window would be there in every
    epoch and would always be predicted from few tokens. At most 2 T tokens at the ends of the text are left out, others
    in each epoch. (Independent random windows, the usual shortcut, miss 37 % of the text in an epoch.)

    A shorter sequence (length= of next()) is a piece of a window. The pieces of one sample are from anywhere in the
    text: 16 pieces of the same window are so alike that a model learned from four such windows only half as fast.

    Ranks take turns: each takes `batch_size` samples. The epoch's permutation needs 8 bytes per window, or per piece.
    """

    tokens: np.ndarray | Shards  # (N,)
    documents: np.ndarray  # int64 (documents,): index of each document's first token
    _: KW_ONLY
    batch_size: int
    context_length: int
    seed: int
    with_documents: bool = True  # compute the document numbers of each batch; takes about half the time of next()
    random_offset: bool = True  # False: cut from the first token on. Documents of T tokens are then windows
    packed: bool = False  # windows of data/packing.py, the same in each epoch: no document is cut that fits into one
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        check_length(self.tokens, self.context_length, "training")
        T = self.context_length
        self.dataset = fingerprint(self.tokens, self.documents)
        self.position = 0  # number of samples that all ranks together have taken
        # The number of windows that fit at every offset in [0, T). It is the same in each epoch, so a division gives a
        # sample's epoch. A text shorter than 2 T has one window, and only the offsets at which it fits.
        self.windows = max(1, (len(self.tokens) - T) // T)
        self.offsets = min(T, len(self.tokens) - self.windows * T) if self.random_offset else 1
        self.packing = pack(self.documents, len(self.tokens), T) if self.packed else None
        if self.packing:
            self.windows = len(self.packing)
        self.cached = (-1, 0)  # (epoch, length of a piece) of the two fields below, which are not saved
        self.offset = 0
        self.order = np.empty(0, np.int64)

    def next(self, length: int | None = None) -> Batch:
        """The next batch, on the CPU. Together, the ranks' batches are consecutive samples without repetition.

        length: a divisor of context_length, if each sample is to be made of pieces of so many tokens, one after the
        other. A text is read once in an epoch as long as the length does not change.
        """
        first = self.position + self.rank * self.batch_size
        samples = range(first, first + self.batch_size)
        windows = [self.sample(sample, length or self.context_length) for sample in samples]
        self.position += self.batch_size * self.world_size
        return make_batch(self.tokens, self.documents if self.with_documents else None, windows)

    def sample(self, sample: int, length: int) -> list[tuple[int, int]]:
        """The spans of a sample, context_length tokens: (index of the first token, number of tokens)."""
        epoch, i = divmod(sample, self.windows)
        pieces = self.context_length // length
        if (epoch, length) != self.cached:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self.offset = int(generator.integers(self.offsets))
            self.order = generator.permutation(self.windows * pieces)
            self.cached = (epoch, length)
        numbers = self.order[i * pieces : (i + 1) * pieces].tolist()
        return [span for number in numbers for span in self.piece(number, length)]

    def piece(self, number: int, length: int) -> list[tuple[int, int]]:
        """The spans of a piece of a window."""
        window, first = divmod(number * length, self.context_length)
        if not self.packing:
            return [(self.offset + window * self.context_length + first, length)]
        spans, last = [], first + length
        for start, n in self.packing.window(window):
            low, high = max(0, first), min(n, last)
            if low < high:
                spans.append((start + low, high - low))
            first, last = first - n, last - n
        return spans

    def state_dict(self) -> State:
        """What a checkpoint saves to continue with the same samples. It is valid JSON and the same on all ranks."""
        state = {key: getattr(self, key) for key in ("position", "seed", "context_length", "dataset")}
        return state | {"packed": 1} if self.packed else state

    def load_state_dict(self, state: State) -> None:
        """Continue after `state`. Batch size and number of ranks may change: no sample is repeated or missed.

        Raises ValueError if `state` is from another text, context length, seed or packing.
        """
        if state["dataset"] != self.dataset:
            raise ValueError(
                "the checkpoint was trained on another text, or on this one before it was edited, and a resumed run "
                "keeps its text: leave out data= and tokenizer=, or begin a new run with its weights by init_from="
            )
        for key, theirs, ours in (
            ("model.context_length", state["context_length"], self.context_length),
            ("seed", state["seed"], self.seed),
            ("pack", str("packed" in state).lower(), str(self.packed).lower()),
        ):
            if theirs != ours:
                raise ValueError(
                    f"the checkpoint was trained with {key}={theirs}, this run has {ours}: "
                    f"use {key}={theirs}, or start a new run"
                )
        self.position = int(state["position"])


@dataclass(eq=False)
class Prefetch:
    """The batches of the next steps, drawn ahead by a thread into memory that is made once.

        step = prefetch.next()       the batches of one step
        prefetch.give_back(step)     its memory may be overwritten

    A step's batches are one Batch with an axis in front: x (passes, B, T). For a GPU the memory is pinned, so that a
    copy to the device needs no wait. Making it is slow, which is why it is made once.
    """

    loader: Loader
    passes: int
    slots: int  # the number of steps that there is memory for: those drawn ahead and those not yet given back
    pinned: bool
    length_at: Callable[[int], int] | None = None  # the tokens of a sequence in a step; None: context_length
    step: int = 0  # the last step that was drawn or is being drawn

    def __post_init__(self):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.coming: deque[Future[tuple[Batch, State]]] = deque()
        self.state = self.loader.state_dict()  # after the steps that next() has returned, whatever is drawn ahead
        self.free: list[Batch] | None = None  # slots that are neither drawn ahead nor taken; None: none is made yet

    def next(self) -> Batch:
        """The batches of the next step. At least one slot must have been given back or never taken.

        Raises what drawing them raised. The first call makes the memory, and raises torch's error if there is too
        little.
        """
        if self.free is None:
            self.free = [self.slot() for _ in range(self.slots)]
        while self.free:
            self.step += 1
            length = self.length_at(self.step) if self.length_at else None
            self.coming.append(self.thread.submit(self.draw, self.free.pop(), length))
        step, self.state = self.coming.popleft().result()
        return step

    def slot(self) -> Batch:
        """Memory for the batches of a step, uninitialised."""
        shape = (self.passes, self.loader.batch_size, self.loader.context_length)
        if math.prod(shape) >= 2**60:
            raise MemoryError("a step's batches take 2**63 bytes or more")  # torch would call it by other names
        x, y = (torch.empty(shape, dtype=torch.int64, pin_memory=self.pinned) for _ in range(2))
        numbered = self.loader.with_documents
        return Batch(x, y, torch.empty(shape, dtype=torch.int32, pin_memory=self.pinned) if numbered else None)

    def draw(self, slot: Batch, length: int | None) -> tuple[Batch, State]:
        """Fills the slot, in the thread. Returns it with the loader's state after it."""
        for part in slot.parts():
            part.copy_(self.loader.next(length))
        return slot, self.loader.state_dict()

    def give_back(self, step: Batch) -> None:
        """Frees the memory of a step that next() returned. Its windows may have been cut into equal pieces."""
        assert self.free is not None, "next() makes the memory"
        self.free.append(step.each(lambda part: part.view(self.passes, -1, self.loader.context_length)))

    def close(self) -> None:
        """Ends the thread."""
        self.thread.shutdown(cancel_futures=True)


def validation_batches(
    tokens: np.ndarray | Shards,
    documents: np.ndarray,
    batch_size: int,
    context_length: int,
    max_tokens: int,
    with_documents: bool = True,
    overlap: bool = False,
) -> Iterator[Batch]:
    """Windows with about `max_tokens` tokens of the validation text, evenly spread over it. They are always the same.

    New random windows each time would add noise to the loss, and the best checkpoint would be the one with the easiest
    windows. The last batch may be smaller. with_documents: as in Loader. overlap: windows overlap if the text has fewer
    than max_tokens; false: there are fewer windows then. Raises ValueError if the text is shorter than one window.
    """
    check_length(tokens, context_length, "validation")
    numbered = documents if with_documents else None
    windows = (len(tokens) - 1) // context_length
    wanted = max(1, max_tokens // context_length)
    taken = min(wanted, len(tokens) - context_length if overlap else windows)
    starts = np.arange(taken) * windows // taken * context_length
    if taken > windows:
        starts = np.arange(taken) * (len(tokens) - 1 - context_length) // (taken - 1)
    spans = [[(start, context_length)] for start in starts.tolist()]
    # We return a generator instead of using yield, so that the check above runs now and not at the first batch.
    return (make_batch(tokens, numbered, spans[i : i + batch_size]) for i in range(0, taken, batch_size))


def fingerprint(tokens: np.ndarray | Shards, documents: np.ndarray) -> str:
    """A hash of the text's length, its document starts and a thousand of its tokens. Does not read the whole file."""
    refuse_cut(tokens)
    step = len(tokens) // 1000 + 1
    thousand = b"".join(tokens[i : i + 1].tobytes() for i in range(0, len(tokens), step))
    return hashlib.sha256(f"{len(tokens)} ".encode() + documents.tobytes() + thousand).hexdigest()[:16]


def make_batch(
    tokens: np.ndarray | Shards, documents: np.ndarray | None, windows: list[list[tuple[int, int]]]
) -> Batch:
    """The windows, each of spans (index of the first token, number of tokens). A target is the next token of the text,
    also at the end of a span. With document numbers if `documents` is not None."""
    refuse_cut(tokens)
    texts = [[tokens[start : start + n + 1] for start, n in spans] for spans in windows]
    numbers = None
    if documents is not None:
        numbers = torch.from_numpy(np.stack([numbers_of(documents, spans) for spans in windows]))
    x, y = (
        torch.from_numpy(np.stack([np.concatenate([text[part] for text in spans]) for spans in texts]).astype(np.int64))
        for part in (slice(None, -1), slice(1, None))
    )
    return Batch(x, y, numbers)


def numbers_of(documents: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """The document numbers of a window, int32 (T,), in ascending order: from the second span on they are counted on.
    Attention skips most tiles that way, and the start of a document that fills a window does not see the document."""
    parts: list[np.ndarray] = []
    for start, n in spans:
        # A position belongs to the last document that starts at or before it.
        part = np.searchsorted(documents, np.arange(start, start + n), side="right") - 1
        parts.append(part + (parts[-1][-1] + 1 - part[0] if parts else 0))
    return np.concatenate(parts).astype(np.int32)


def check_length(tokens: np.ndarray | Shards, context_length: int, what: str) -> None:
    """ValueError if the text is shorter than one window. what: "training" or "validation"."""
    if len(tokens) < context_length + 1:
        fraction = "a larger data.val_fraction, " if what == "validation" else ""
        raise ValueError(
            f"the {what} text has {counted(len(tokens), 'token')}, one window takes {context_length + 1:,}: "
            f"use {fraction}more text or a smaller model.context_length"
        )
