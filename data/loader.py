"""Token files -> batches, in an order that depends only on the seed and the sample's number. So a checkpoint saves one
number, the position, which stays right if the number of ranks or the batch size changes.

B batch size, T context_length, N tokens of the text. A sample is T tokens, x, with the next token of each, y.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from data.dataset import Shards


class Batch(NamedTuple):
    x: torch.Tensor  # int64 (B, T): input tokens
    y: torch.Tensor  # int64 (B, T): targets, the next token after each token of x
    documents: torch.Tensor | None  # int32 (B, T): number of the document of each token of x; None: not asked for

    def to(self, device: torch.device) -> "Batch":
        return self.each(lambda part: part.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return Batch(change(self.x), change(self.y), None if self.documents is None else change(self.documents))

    def micro_batches(self) -> Iterator["Batch"]:
        """The batch without its first axis, once for each index of it."""
        return (self.each(itemgetter(i)) for i in range(len(self.x)))

    def copy_(self, other: "Batch") -> None:
        """Overwrites the tensors with those of `other`. From pinned memory to a CUDA device it does not wait."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs, non_blocking=True)


def stacked(batches: Iterable[Batch]) -> Batch:
    """The micro-batches of a step, (micro-batches, B, T). No thread draws them ahead: it takes a millisecond."""
    x, y, documents = zip(*batches, strict=True)
    return Batch(torch.stack(x), torch.stack(y), None if documents[0] is None else torch.stack(documents))


@dataclass(eq=False)
class Loader:
    """Endless training batches for one rank.

    An epoch cuts the text into N // T windows and returns each once, in random order. The text is a ring: each epoch
    begins cutting at a random token, and the window that reaches the end goes on at the start. So every token is a
    target equally often. (Independent random windows miss 37 % of the text in an epoch.)"""

    tokens: np.ndarray | Shards  # (N,)
    documents: np.ndarray | None  # int64 (documents,): index of each one's first token; None: no numbers in a batch
    _: KW_ONLY
    batch_size: int
    context_length: int
    seed: int
    random_offset: bool = True  # False: cut from the first token on. Documents of T tokens are then windows
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        check_length(self.tokens, self.context_length, "training")
        # A hash of the text's length and a thousand of its tokens, to notice another text.
        few = range(0, len(self.tokens), len(self.tokens) // 1000 + 1)
        self.text = zlib.crc32(b"".join(self.tokens[i : i + 1].tobytes() for i in few), len(self.tokens))
        self.position = 0  # number of samples that all ranks together have taken
        self.windows = len(self.tokens) // self.context_length  # of an epoch
        self.epoch = -1  # of the next two
        self.offset, self.order = 0, np.empty(0, np.int64)

    def next(self) -> Batch:
        """The next batch, on the CPU. Together, the ranks' batches are consecutive samples without repetition."""
        first = self.position + self.rank * self.batch_size
        starts = [self.start(sample) for sample in range(first, first + self.batch_size)]
        self.position += self.batch_size * self.world_size
        return make_batch(self.tokens, self.documents, starts, self.context_length)

    def start(self, sample: int) -> int:
        """The index of a sample's first token."""
        epoch, i = divmod(sample, self.windows)
        if epoch != self.epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self.offset = int(generator.integers(len(self.tokens))) if self.random_offset else 0
            self.order = generator.permutation(self.windows)
            self.epoch = epoch
        return (self.offset + int(self.order[i]) * self.context_length) % len(self.tokens)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint saves to continue with the same samples. It is valid JSON and the same on all ranks."""
        return {name: getattr(self, name) for name in ("position", "seed", "context_length", "text")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after `state`. ValueError if it is of another text, context length or seed."""
        if state["text"] != self.text:
            way_out = "leave data= and tokenizer= out, give its tokens (data=bin data.path=), or use init_from="
            raise ValueError(f"the checkpoint was trained on another text, or on this one before an edit: {way_out}")
        for name in ("context_length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the checkpoint was trained with {name}={state[name]}, not {getattr(self, name)}")
        self.position = state["position"]


def validation_batches(
    tokens: np.ndarray | Shards, documents: np.ndarray | None, batch_size: int, T: int, max_tokens: int, stride: int = 0
) -> list[Batch]:
    """Windows with about `max_tokens` tokens of the validation text, evenly spread over it, always the same; fewer if
    the text is short. They begin at multiples of the stride (0: T, so that none overlap)."""
    check_length(tokens, T, "validation")
    windows = (len(tokens) - 1 - T) // (stride or T) + 1
    taken = min(windows, max(1, max_tokens // T))
    starts = np.arange(taken) * windows // taken * (stride or T)
    parts = np.split(starts, range(batch_size, taken, batch_size))
    return [make_batch(tokens, documents, part.tolist(), T) for part in parts]


def make_batch(tokens: np.ndarray | Shards, documents: np.ndarray | None, starts: list[int], T: int) -> Batch:
    """The windows of T tokens that begin at these indices; the text is a ring. With document numbers if `documents` is
    not None; after the end of the text they go on counting, so they never fall."""
    N, windows = len(tokens), []
    for start in starts:
        window = tokens[start : start + T + 1]
        windows.append(window if len(window) > T else np.concatenate([window, tokens[: T + 1 - len(window)]]))
    both = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, T + 1)
    x, y = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if documents is None:
        return Batch(x, y, None)
    rounds, places = np.divmod(np.array(starts)[:, None] + np.arange(T), N)  # (B, T)
    numbers = np.searchsorted(documents, places, side="right") - 1 + rounds * len(documents)
    return Batch(x, y, torch.from_numpy(numbers.astype(np.int32)))


def check_length(tokens: np.ndarray | Shards, context_length: int, what: str) -> None:
    if len(tokens) < context_length + 1:
        way_out = f"use model.context_length={max(1, len(tokens) - 1)} or less, or more text"
        raise ValueError(f"the {what} text has {len(tokens):,} tokens, a window takes {context_length + 1}: {way_out}")
