"""Token files -> batches of windows, in an order that can be computed for any step without running the ones before.

B batch, T context_length, N tokens in a split. A window is T + 1 tokens: x is the first T, y the last T (each token's
next). The order is a pure function of (seed, sample number), so all there is to save is one number, the position.
A saved generator would have to be saved for each rank, and be wrong once the number of ranks or the batch size changes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch

from data.prepare import DTYPES, HEADER_INTS, SPLITS, read_manifest
from data.tokenizer import from_json, token_bytes


@dataclass
class Dataset:
    """A prepared folder, opened. The tokens stay on disk (memory-mapped): a file larger than memory is no trouble."""

    folder: Path
    manifest: dict[str, Any]
    encoding: tiktoken.Encoding
    token_bytes: np.ndarray  # int32 (n_vocab,): bytes of text a token stands for
    train: np.ndarray  # uint16 or uint32 (N,), read-only
    val: np.ndarray
    train_documents: np.ndarray  # int64 (documents,): where in the tokens each begins
    val_documents: np.ndarray


class Batch(NamedTuple):
    x: torch.Tensor  # int64 (B, T)
    y: torch.Tensor  # int64 (B, T): the tokens after x
    documents: torch.Tensor  # int32 (B, T): number, within the split, of the document that each token of x is in


def open_dataset(folder: Path) -> Dataset:
    """Open what prepare() made, and check every file of it against the manifest's SHA-256: about a second per GB.

    Raises ValueError for a file that is missing, cut short or edited. The way out is always to delete the folder: it is
    made again from the text.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    tokens = {name: read_tokens(folder / f"{name}.bin") for name in SPLITS}  # first: its messages say more
    for name, sha256 in manifest["sha256"].items():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise ValueError(f"{folder / name} is missing: delete {folder} and run again") from error
        if found != sha256:
            raise ValueError(f"{folder / name} was edited since it was made: delete {folder} and run again")
    encoding = from_json((folder / "tokenizer.json").read_text())
    starts = {name: np.load(folder / f"{name}_documents.npy", allow_pickle=False) for name in SPLITS}
    return Dataset(
        folder=folder,
        manifest=manifest,
        encoding=encoding,
        token_bytes=token_bytes(encoding),
        train=tokens["train"],
        val=tokens["val"],
        train_documents=starts["train"],
        val_documents=starts["val"],
    )


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a .bin file of ours, llm.c's or modded-nanogpt's: memory-mapped, uint16 or uint32 (N,)."""
    try:
        header = np.fromfile(path, "<i4", HEADER_INTS)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: delete {path.parent} and run again") from error
    magic = tuple(header[:2].tolist())
    if len(header) < HEADER_INTS or magic not in DTYPES:
        raise ValueError(f"{path} is no token file, its header begins {magic}: delete {path.parent} and run again")
    dtype = DTYPES[magic]
    tokens, odd_bytes = divmod(path.stat().st_size - header.nbytes, dtype.itemsize)
    if tokens != header[2] or odd_bytes:
        raise ValueError(f"{path} has {tokens} tokens, its header says {header[2]}: delete {path.parent} and run again")
    # The header is mapped too and then sliced off, because a map of no bytes at all is an error and no tokens are not.
    return np.memmap(path, dtype, mode="r")[header.nbytes // dtype.itemsize :]


class Loader:
    """Training batches for one rank, without end.

    An epoch cuts the text into windows, stride T, and gives each once, in a random order. The next epoch starts cutting
    elsewhere, in [0, T): otherwise the same token would open every window it is ever in, and would never be predicted
    from more than the few tokens before it. (Independent random windows, the usual shortcut, leave out 37 % of the
    text in what they call an epoch.) At most 2 T tokens at the ends of the text are left out, other ones each epoch.

    Ranks take turns by `batch_size` samples. Costs 8 bytes a window for the epoch's permutation.
    """

    def __init__(
        self,
        tokens: np.ndarray,  # (N,)
        documents: np.ndarray,  # int64 (documents,)
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_length(tokens, context_length, "training")
        self.tokens = tokens
        self.documents = documents
        self.batch_size = batch_size
        self.context_length = context_length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.dataset = fingerprint(tokens, documents)
        self.position = 0  # samples that all ranks together have taken
        # As many windows as fit from any start in [0, T): the same number each epoch, so that a sample's epoch is one
        # division. A text shorter than 2 T has no room from some starts: it gets one window, and the starts that do.
        self.windows = max(1, (len(tokens) - context_length) // context_length)
        self.offsets = min(context_length, len(tokens) - self.windows * context_length)
        self.epoch = -1  # which epoch the two below belong to: a cache, and no state
        self.offset = 0
        self.order = np.empty(0, np.int64)

    def next(self) -> Batch:
        """The next batch, on the CPU. Batches of all ranks together are consecutive samples, none of them twice."""
        first = self.position + self.rank * self.batch_size
        starts = np.array([self.start(sample) for sample in range(first, first + self.batch_size)])
        self.position += self.batch_size * self.world_size
        return make_batch(self.tokens, self.documents, starts, self.context_length)

    def start(self, sample: int) -> int:
        """Where in the tokens a sample's window begins."""
        epoch, i = divmod(sample, self.windows)
        if epoch != self.epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self.offset = int(generator.integers(self.offsets))
            self.order = generator.permutation(self.windows)
            self.epoch = epoch
        return self.offset + int(self.order[i]) * self.context_length

    def state_dict(self) -> dict[str, int | str]:
        """All that a run has to save to go on with the same samples: JSON, and the same on all ranks."""
        return {
            "position": self.position,
            "seed": self.seed,
            "context_length": self.context_length,
            "dataset": self.dataset,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on after `state`. Batch size and number of ranks may differ from then: no sample is repeated or missed.

        Raises ValueError for the state of a run over another text, or over windows cut or shuffled otherwise.
        """
        ours = self.state_dict()
        for key, way_out in {
            "dataset": "use the same data and tokenizer, or start a new run",
            "context_length": f"use model.context_length={state['context_length']}, or start a new run",
            "seed": f"use seed={state['seed']}, or start a new run",
        }.items():
            if state[key] != ours[key]:
                raise ValueError(
                    f"the checkpoint was trained with {key}={state[key]}, this run has {ours[key]}: {way_out}"
                )
        self.position = int(state["position"])


def validation_batches(
    tokens: np.ndarray, documents: np.ndarray, batch_size: int, context_length: int, max_tokens: int
) -> Iterator[Batch]:
    """About `max_tokens` tokens of validation text, evenly spread over it: the same windows each time and in each run.

    Fresh random windows would add their own noise to the curve, and then the best checkpoint is the one with the
    luckiest windows. The last batch may be smaller. Raises ValueError when the text is shorter than one window.
    """
    check_length(tokens, context_length, "validation")
    windows = (len(tokens) - 1) // context_length
    taken = min(windows, max(1, max_tokens // context_length))
    starts = np.arange(taken) * windows // taken * context_length
    # An expression and no yield: a text that is too short is to be refused at the call, not at the first evaluation.
    return (
        make_batch(tokens, documents, starts[i : i + batch_size], context_length) for i in range(0, taken, batch_size)
    )


def fingerprint(tokens: np.ndarray, documents: np.ndarray) -> str:
    """Tells texts apart by their length, their documents and a thousand tokens, without reading the whole file."""
    thousand = tokens[:: len(tokens) // 1000 + 1]
    return hashlib.sha256(f"{len(tokens)} ".encode() + documents.tobytes() + thousand.tobytes()).hexdigest()[:16]


def make_batch(tokens: np.ndarray, documents: np.ndarray, starts: np.ndarray, context_length: int) -> Batch:
    """The windows that begin at `starts`, int64 (B,)."""
    windows = np.stack([tokens[start : start + context_length + 1] for start in starts])  # (B, T + 1)
    positions = starts[:, None] + np.arange(context_length)  # (B, T)
    numbers = np.searchsorted(documents, positions, side="right") - 1  # (B, T): the last document to start by then
    return Batch(
        torch.from_numpy(windows[:, :-1].astype(np.int64)),
        torch.from_numpy(windows[:, 1:].astype(np.int64)),
        torch.from_numpy(numbers.astype(np.int32)),
    )


def check_length(tokens: np.ndarray, context_length: int, what: str) -> None:
    if len(tokens) < context_length + 1:
        raise ValueError(
            f"the {what} text has {len(tokens)} tokens, one window takes {context_length + 1}: "
            "use more text or a smaller model.context_length"
        )
