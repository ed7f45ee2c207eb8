"""Token files -> batches of windows, in an order that can be computed for any step without running the ones before.

B batch, T context_length, N tokens in a split. A window is T + 1 tokens: x is the first T, y the last T (each token's
next). The order is a pure function of (seed, sample number), so all there is to save is one number, the position.
A saved generator would have to be saved for each rank, and be wrong once the number of ranks or the batch size changes.
"""

import glob
import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch

from data.download import fineweb
from data.prepare import SPLITS, DataConfig, check, prepare, read_manifest
from data.shards import Shards, inspect, join, read_tokens
from data.text import expand, in_order
from data.tokenizer import TokenizerConfig, build, from_json, to_json, token_bytes


@dataclass
class Dataset:
    """Token files, opened. The tokens stay on disk (memory-mapped): a file larger than memory is no trouble."""

    folder: Path
    manifest: dict[str, Any]  # of a prepared folder; {} for shards that others made
    encoding: tiktoken.Encoding
    token_bytes: np.ndarray  # int32 (n_vocab,): bytes of text a token stands for
    train: np.ndarray | Shards  # uint16 or uint32 (N,), read-only
    val: np.ndarray | Shards
    train_documents: np.ndarray  # int64 (documents,): where in the tokens each begins
    val_documents: np.ndarray


class Batch(NamedTuple):
    """B windows, and for each token the one that comes after it."""

    x: torch.Tensor  # int64 (B, T)
    y: torch.Tensor  # int64 (B, T): the tokens after x
    documents: torch.Tensor | None  # int32 (B, T): number, within the split, of the document that each token of x is
    # in; None where they were not asked for

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`. The copy to a CUDA device runs beside the computation, from pinned memory."""
        if device.type == "cuda":
            return self.each(lambda part: part.pin_memory().to(device, non_blocking=True))
        return self.each(lambda part: part.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with change() applied to its tensors."""
        return Batch(change(self.x), change(self.y), None if self.documents is None else change(self.documents))


def open_data(data: DataConfig, tokenizer: TokenizerConfig) -> Dataset:
    """The data that the configuration names, prepared or downloaded at first use. Raises ValueError, one line, for
    everything that the user can put right."""
    match data.source:
        case "bin":
            check(data)
            assert data.path is not None, "check() refuses that"
            return open_shards(find_shards(data.path), tokenizer, data.val_fraction)
        case "fineweb":
            check(data)
            if tokenizer.kind != "gpt2":  # now, and not once hundreds of megabytes are here
                raise ValueError(f"tokenizer={tokenizer.kind}: data=fineweb has GPT-2's tokens: use tokenizer=gpt2")
            files = fineweb(Path(data.cache), data.url, data.shards)
            return open_shards(files, tokenizer, data.val_fraction, "delete it, and it will be downloaded again")
        case _:
            return open_dataset(prepare(data, tokenizer))


def open_dataset(folder: Path) -> Dataset:
    """Open what prepare() made, and check every file of it against the manifest's SHA-256: about a second per GB.

    Raises ValueError for a file that is missing, cut short or edited. The way out is always to delete the folder: it is
    made again from the text.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    way_out = f"delete {folder} and run again"
    tokens = {}
    for name in SPLITS:  # first: its messages say more
        files = sorted(file for file in manifest["sha256"] if file.startswith(name) and file.endswith(".bin"))
        tokens[name] = join([read_tokens(folder / file, way_out) for file in files])
    for name, sha256 in manifest["sha256"].items():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise ValueError(f"{folder / name} is missing: {way_out}") from error
        if found != sha256:
            raise ValueError(f"{folder / name} was edited since it was made: {way_out}")
    encoding = from_json((folder / "tokenizer.json").read_text(encoding="utf-8"))
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


def find_shards(path: str) -> list[Path]:
    """The token files that data.path means: a file, the .bin files of a folder, or what a glob matches."""
    named = Path(path).expanduser()
    found = expand(Path(glob.escape(str(named))) / "*.bin" if named.is_dir() else named)
    if not found:
        raise ValueError(f"data.path={path} has no .bin files of tokens: give a folder or a glob of some, or data=text")
    return [Path(file) for file in in_order(found)]


def is_validation(file: Path) -> bool:
    """fineweb_val_000000.bin, val.bin; not retrieval_000.bin."""
    return re.search(r"(^|[^a-z])val([^a-z]|$)", file.stem.lower()) is not None


def open_shards(
    files: list[Path], tokenizer: TokenizerConfig, val_fraction: float, way_out: str = "make or download it again"
) -> Dataset:
    """Token files as they are, in the order given, as one text. What is called val is for validation; where
    nothing has, the last `val_fraction` of the tokens is, from where a document begins if one does.

    All tokens are read once, a second per 2 GB and core, to see where documents begin and that the tokenizer knows
    every id: one that it does not would be an unknown row of the embedding, which on a GPU ends the process without a
    word. Raises ValueError for files and tokenizers that do not fit.
    """
    encoding = kept_or_named(files[0].with_name("tokenizer.json"), tokenizer)
    files = sorted(files, key=is_validation)  # stable: training's first, else as they were
    arrays = [read_tokens(file, way_out) for file in files]
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(partial(inspect, end_of_text=encoding.eot_token), arrays)]
    for file, (_, largest) in zip(files, found, strict=True):
        if largest >= encoding.n_vocab:
            raise ValueError(
                f"{file} has token {largest}, tokenizer {encoding.name} has {encoding.n_vocab}: "
                "name the tokenizer that it was made with, or put its tokenizer.json beside it"
            )
    tokens = Shards(arrays)
    begins = tokens.ends - [len(array) for array in arrays]  # (files,)
    starts = np.concatenate([begin + ends for begin, (ends, _) in zip(begins, found, strict=True)])

    names = [file.name for file in files if is_validation(file)]
    if len(names) == len(files):
        raise ValueError(
            f"{files[0].parent} has no shards to train on, only {', '.join(names)}: take in the others too"
        )
    cut = int(begins[-len(names)]) if names else int(len(tokens) * (1 - val_fraction))
    if not names:
        later = starts[(starts >= cut) & (starts < (cut + len(tokens)) / 2)]
        cut = int(later[0]) if len(later) else cut
    return Dataset(
        folder=files[0].parent,
        manifest={},
        encoding=encoding,
        token_bytes=token_bytes(encoding),
        train=join(tokens.parts(slice(0, cut))),
        val=join(tokens.parts(slice(cut, None))),
        # A split may begin in the middle of a document, which is then its number 0.
        train_documents=np.union1d([0], starts[starts < cut]),
        val_documents=np.union1d([0], starts[starts >= cut] - cut),
    )


def kept_or_named(kept: Path, tokenizer: TokenizerConfig) -> tiktoken.Encoding:
    """The tokenizer of shards: tokenizer=kept is the file beside them, any other has to agree with it if there is one.
    Raises ValueError for what cannot be right."""
    try:
        beside = from_json(kept.read_bytes()) if kept.exists() else None
    except ValueError as error:
        raise ValueError(f"{kept.parent}: {error}") from error
    if tokenizer.kind == "kept":
        if beside is None:
            raise ValueError(f"{kept} is missing: name the tokenizer of the tokens, as in tokenizer=gpt2")
        return beside
    if tokenizer.kind == "bpe":
        raise ValueError("tokenizer=bpe learns from text, and data=bin has none: use tokenizer=kept, gpt2 or byte")
    named = build(tokenizer, [])
    if beside and to_json(beside) != to_json(named):
        raise ValueError(f"{kept} is of tokenizer {beside.name}, not of {named.name}: use tokenizer=kept")
    return named


class Loader:
    """Training batches for one rank, without end.

    An epoch cuts the text into windows, stride T, and gives each once, in a random order. The next epoch starts cutting
    elsewhere, in [0, T): otherwise the same token would open every window it is ever in, and would never be predicted
    from more than the few tokens before it. (Independent random windows, the usual shortcut, leave out 37 % of the
    text in what they call an epoch.) At most 2 T tokens at the ends of the text are left out, other ones each epoch.

    Ranks take turns by `batch_size` samples. Costs 8 bytes a window for the epoch's permutation.

    with_documents: number the documents of each batch. That takes about half of next(), so a run whose attention does
    not look at documents leaves it out.
    """

    def __init__(
        self,
        tokens: np.ndarray | Shards,  # (N,)
        documents: np.ndarray,  # int64 (documents,)
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        with_documents: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_length(tokens, context_length, "training")
        self.tokens = tokens
        self.documents = documents if with_documents else None
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
        if state["dataset"] != ours["dataset"]:
            raise ValueError(
                "the checkpoint was trained on another text, or on this one before it was edited: "
                "use the same data and tokenizer, or start a new run"
            )
        for key, way_out in {
            "context_length": f"use model.context_length={state['context_length']}, or start a new run",
            "seed": f"use seed={state['seed']}, or start a new run",
        }.items():
            if state[key] != ours[key]:
                raise ValueError(
                    f"the checkpoint was trained with {key}={state[key]}, this run has {ours[key]}: {way_out}"
                )
        self.position = int(state["position"])


def validation_batches(
    tokens: np.ndarray | Shards,
    documents: np.ndarray,
    batch_size: int,
    context_length: int,
    max_tokens: int,
    with_documents: bool = True,
) -> Iterator[Batch]:
    """About `max_tokens` tokens of validation text, evenly spread over it: the same windows each time and in each run.

    Fresh random windows would add their own noise to the curve, and then the best checkpoint is the one with the
    luckiest windows. The last batch may be smaller. with_documents: as in Loader. Raises ValueError when the text is
    shorter than one window.
    """
    check_length(tokens, context_length, "validation")
    numbered = documents if with_documents else None
    windows = (len(tokens) - 1) // context_length
    taken = min(windows, max(1, max_tokens // context_length))
    starts = np.arange(taken) * windows // taken * context_length
    # An expression and no yield: a text that is too short is to be refused at the call, not at the first evaluation.
    return (
        make_batch(tokens, numbered, starts[i : i + batch_size], context_length) for i in range(0, taken, batch_size)
    )


def fingerprint(tokens: np.ndarray | Shards, documents: np.ndarray) -> str:
    """Tells texts apart by their length, their documents and a thousand tokens, without reading the whole file."""
    step = len(tokens) // 1000 + 1
    thousand = b"".join(tokens[i : i + 1].tobytes() for i in range(0, len(tokens), step))
    return hashlib.sha256(f"{len(tokens)} ".encode() + documents.tobytes() + thousand).hexdigest()[:16]


def make_batch(
    tokens: np.ndarray | Shards, documents: np.ndarray | None, starts: np.ndarray, context_length: int
) -> Batch:
    """The windows that begin at `starts`, int64 (B,), with the numbers of their documents if `documents` are given."""
    windows = np.stack([tokens[start : start + context_length + 1] for start in starts])  # (B, T + 1)
    numbers = None
    if documents is not None:
        positions = starts[:, None] + np.arange(context_length)  # (B, T)
        # The document of a position is the last one that starts there or before.
        numbers = torch.from_numpy((np.searchsorted(documents, positions, side="right") - 1).astype(np.int32))
    x, y = (torch.from_numpy(part.astype(np.int64)) for part in (windows[:, :-1], windows[:, 1:]))
    return Batch(x, y, numbers)


def check_length(tokens: np.ndarray | Shards, context_length: int, what: str) -> None:
    """ValueError for a text shorter than one window. what: "training" or "validation"."""
    if len(tokens) < context_length + 1:
        fraction = "a larger data.val_fraction, " if what == "validation" else ""
        raise ValueError(
            f"the {what} text has {len(tokens)} tokens, one window takes {context_length + 1}: "
            f"use {fraction}more text or a smaller model.context_length"
        )
