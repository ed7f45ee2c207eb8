"""Writes the explorer, a page to click through attention tile by tile. `python breakit.py explorer=true`

The page loads no other file: it is docs/explorer.template.html with all stories as JSON. It has three views: the
forward of every input; and, for the worked example, the forward with dropout and the backward.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.files import DOCS, fill, plain
from lab.story import (
    ORDERS,
    STORY_FAILURES,
    THE_CAT,
    BackwardTile,
    Head,
    Tile,
    backward,
    backward_sentence,
    dropout_sentence,
    sentence,
    tell,
    worked_example,
)
from model.break_it import FAILURES, UNBROKEN, BreakIt
from training.metrics import printable

PAGE = DOCS / "explorer.html"
SIZES = [1, 2, 3, 4, 5]  # block_m and block_n in the worked example
DROPOUT: dict[str, Any] = {"dropout_p": 0.25, "seed": 6}  # drops a few weights of the worked example


class Input(NamedTuple):
    """One input of the page, and the choices for which it has stories."""

    name: str
    title: str
    about: str
    head: Head
    key_labels: list[str]
    causal: list[bool]
    sizes: list[int]  # block_m and block_n
    failures: list[str]
    row: int  # the row that the page follows first
    score_gain: float = 1.0
    dtype: str = "float64"

    def tell(self, causal: bool, size: int, failure: str = "none", **options):
        """As tell(), in tiles of size x size."""
        options |= {"causal": causal, "block_m": size, "block_n": size}
        return tell(self.head, failure, self.score_gain, self.dtype, **options)


def explorer(real: Path, out: Path = PAGE) -> None:
    """Writes the page. real: the file of a trained head's trace. Raises ValueError if it is not what trace() keeps."""
    sentences: dict[str, int] = {}  # each sentence is stored once, because many repeat; the value is its number
    found = {
        "fields": [*Tile._fields[:-1], "says"],
        "backward_fields": [*BackwardTile._fields[:-1], "says"],
        "inputs": [stories(entry, sentences) for entry in [*small_inputs(), real_input(real)]],
        "taken_out": {name: failure.drawn for name, failure in FAILURES.items() if failure.drawn},
        "dropout": dropout_stories(sentences),
        "backward": backward_stories(sentences),
        "sentences": list(sentences),
    }
    print(printable(f"{out}: {fill(out, 'explorer', found) / 2**20:.1f} MiB"))


def small_inputs() -> list[Input]:
    """The worked example, and three inputs that wake the failures for which its scores are too small."""
    head = worked_example()
    few = head._replace(k=head.k[2:], v=head.v[2:])
    rest: dict[str, Any] = {"causal": [False, True], "sizes": SIZES, "failures": list(STORY_FAILURES), "row": 3}
    return [
        Input("cat", "the cat sat on the mat", "Five tokens, D = 4, scores q k / 2.", head, head.labels, **rest),
        Input("large", "scores times 120", "The same five tokens, their scores times 120, in float32.", head,
              head.labels, score_gain=120.0, dtype="float32", **rest),
        Input("low", "scores times -300", "The same five tokens, their scores times -300, in float32.",
              head._replace(q=-head.q), head.labels, score_gain=300.0, dtype="float32", **rest | {"row": 2}),
        Input("few", "keys of sat, on, mat only", "All five queries, but the keys of sat, on and mat alone.", few,
              head.labels[2:], **rest | {"row": 0}),
    ]  # fmt: skip


def real_input(path: Path) -> Input:
    """The head of a trace that trace=true has kept. Raises ValueError if the file is not a trace."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"real={path} is no file; trace=true run=NAME out=PATH.json makes one")
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        head = Head(**{name: kept[name] for name in Head._fields})
    except OSError as error:
        raise ValueError(f"real={path}: {error.strerror}; trace=true run=NAME out={path} makes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"real={path} is no trace; trace=true run=NAME out=PATH.json makes one") from error
    if len(head.q) > 64:
        raise ValueError(
            f"real={path}: {len(head.q)} tokens are more than a page can show; keep a trace with tokens=64"
        )
    q, k, v = (np.array(x, np.float64) for x in (head.q, head.k, head.v))
    head = head._replace(q=q, k=k, v=v)
    sizes = sorted({-(-len(head.q) // 4), -(-len(head.q) // 2)})
    failures = ["none", "no_rescale", "local_mask", "no_scale"]
    about = f"{len(head.q)} tokens, D = {head.q.shape[1]}: {head.about}."
    return Input("head", "a trained model's head", about, head, head.labels, [True], sizes, failures, len(head.q) - 1)


def stories(entry: Input, sentences: dict[str, int]) -> dict:
    """The input as the page reads it. Its "stories" have the keys "causal/size/failure". "why_not" gives a reason for
    each missing failure."""
    ways = product(entry.causal, entry.sizes, entry.failures)
    told = {
        f"{causal:d}/{size}/{failure}": forward(entry, sentences, causal, size, failure)
        for causal, size, failure in ways
        if causal or failure != "local_mask"
    }
    kept, head = entry._asdict(), entry.head
    del kept["head"]
    kept |= {"q": head.q, "k": head.k, "v": head.v, "labels": head.labels, "scale": head.softmax_scale}
    kept |= {"causal": [int(causal) for causal in entry.causal]}
    return kept | {"stories": told, "why_not": why_not(entry)}


def forward(entry: Input, sentences: dict[str, int], causal: bool, size: int, failure: str = "none", **dropout) -> dict:
    """A story of the forward as the page reads it, in tiles of size x size."""
    by_order = [entry.tell(causal, size, failure, order=order, **dropout) for order in ORDERS]
    tiles, o, lse = by_order[0]
    offset, break_it = len(entry.head.k) - len(entry.head.q), BreakIt(failure, entry.score_gain)
    says = [
        [dropout_sentence(tile, row) + sentence(tile, row, offset, break_it) for row in tile.rows] for tile in tiles
    ]
    return in_both_orders([one[0] for one in by_order], says, sentences) | {"o": o, "lse": lse}


def in_both_orders(by_order: list[list], says: list[list[str]], sentences: dict[str, int]) -> dict:
    """The tiles with the numbers of their sentences; and for each of ORDERS the visits and the words moved so far."""
    tiles = by_order[0]
    number = {(tile.rows.start, tile.columns.start): i for i, tile in enumerate(tiles)}
    numbers = [[sentences.setdefault(words, len(sentences)) for words in row] for row in says]
    return {
        "tiles": [[*tile[:-1], said] for tile, said in zip(tiles, numbers, strict=True)],
        "visits": {
            order: [number[tile.rows.start, tile.columns.start] for tile in told]
            for order, told in zip(ORDERS, by_order, strict=True)
        },
        "words": {order: [t.words for t in told] for order, told in zip(ORDERS, by_order, strict=True)},
    }


def why_not(entry: Input) -> dict[str, str]:
    """The reason for each failure that an input leaves out."""

    def output(*way) -> list:
        """o in every digit that the page keeps."""
        return plain(entry.tell(*way)[1])

    reasons = {}
    for failure in [name for name in STORY_FAILURES if name not in entry.failures]:
        same = all(output(*way, failure) == output(*way) for way in product(entry.causal, entry.sizes))
        reasons[failure] = "changes nothing in this data" if same else "left out here to keep the page small"
    return reasons


def dropout_stories(sentences: dict[str, int]) -> dict:
    """The forward of the worked example with dropout. The stories have the keys "causal/size"."""
    entry = small_inputs()[0]
    ways = product(entry.causal, entry.sizes)
    told = {f"{causal:d}/{size}": forward(entry, sentences, causal, size, **DROPOUT) for causal, size in ways}
    return DROPOUT | {"stories": told}


def backward_stories(sentences: dict[str, int]) -> dict:
    """The backward of the worked example. The stories have the keys "causal/size/kind". kind: none (no dropout),
    dropout or stale_seed."""
    head, told = worked_example(), {}
    do = np.array(THE_CAT["do"], np.float64)
    stale = DROPOUT | {"break_it": BreakIt("stale_seed")}
    kinds: dict[str, dict[str, Any]] = {"none": {}, "dropout": DROPOUT, "stale_seed": stale}
    for causal, size, (kind, changed) in product([False, True], SIZES, kinds.items()):
        options = {"block_m": size, "block_n": size, "causal": causal, "softmax_scale": head.softmax_scale} | changed
        by_order = [backward(head.q, head.k, head.v, do, order=order, **options) for order in ORDERS]
        one = by_order[0]
        right = backward(head.q, head.k, head.v, do, **options | {"break_it": UNBROKEN}).tiles
        last = {row: tile.columns for tile in one.tiles for row in tile.rows}
        says = [
            [backward_sentence(tile, row, r, one.delta[row], last[row] == tile.columns) for row in tile.rows]
            for tile, r in zip(one.tiles, right, strict=True)
        ]
        found = in_both_orders([x.tiles for x in by_order], says, sentences)
        told[f"{causal:d}/{size}/{kind}"] = found | {name: getattr(one, name) for name in ("o", "lse", "delta")}
    return DROPOUT | {"do": do, "stories": told}
