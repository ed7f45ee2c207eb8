"""The explorer: one page that shows the stories of several inputs, to click through. `python breakit.py explorer=true`

The page loads nothing: it is docs/explorer.template.html with all stories in it as JSON.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.files import plain, write
from lab.story import ORDERS, STORY_FAILURES, Tile, sentence, switches
from lab.trace import Head, tell, worked_example

TEMPLATE = Path(__file__).parents[1] / "docs" / "explorer.template.html"
PAGE = TEMPLATE.parent / "explorer.html"
STORIES = "{{stories}}"  # where the template wants them


class Input(NamedTuple):
    """One entry of the page's list of data, and which stories of it there are."""

    name: str
    title: str
    about: str
    head: Head
    key_labels: list[str]
    causal: list[bool]
    sizes: list[int]  # block_m and block_n
    failures: list[str]
    row: int  # to follow
    score_gain: float = 1.0
    dtype: str = "float64"


def explorer(real: Path, out: Path = PAGE) -> None:
    """Writes the page. real: a trace of a trained head, which trace() has kept; ValueError where it is none."""
    sentences: dict[str, int] = {}  # each is kept once: the same words come back all over the stories
    told = [stories(entry, sentences) for entry in [*small_inputs(), real_input(real)]]
    found = {"fields": [*Tile._fields, "says"], "inputs": told, "sentences": list(sentences)}
    text = json.dumps(plain(found), separators=(",", ":")).replace("</", "<\\/")  # no </script> of the data's
    page = TEMPLATE.read_text(encoding="utf-8").replace(STORIES, text)
    write(out, page)
    print(f"{out}: {len(page) / 2**20:.1f} MiB")


def small_inputs() -> list[Input]:
    """The worked example, and three inputs that bring on the failures for which its scores are too small."""
    head = worked_example()
    few = head._replace(k=head.k[2:], v=head.v[2:])
    rest: dict[str, Any] = {
        "causal": [False, True],
        "sizes": [1, 2, 3, 4, 5],
        "failures": list(STORY_FAILURES),
        "row": 3,
    }
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
    """The head of a trace that trace=true has kept; ValueError where it is none."""
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
    """entry as the page reads it; every story under "causal/size/failure", its tiles once, and two orders of them."""
    head, told = entry.head, {}
    offset = len(head.k) - len(head.q)
    for causal, size, failure in product(entry.causal, entry.sizes, entry.failures):
        if failure == "local_mask" and not causal:
            continue
        options = {"causal": causal, "block_m": size, "block_n": size}
        break_it = switches(failure, entry.score_gain)
        by_order = [tell(head, failure, entry.score_gain, entry.dtype, order=order, **options) for order in ORDERS]
        tiles, o, lse = by_order[0]
        number = {(tile.rows.start, tile.columns.start): i for i, tile in enumerate(tiles)}
        visits = [[number[tile.rows.start, tile.columns.start] for tile in order[0]] for order in by_order]
        said = [[sentence(tile, row, offset, break_it) for row in tile.rows] for tile in tiles]
        says = [[sentences.setdefault(words, len(sentences)) for words in row] for row in said]
        told[f"{causal:d}/{size}/{failure}"] = {
            "tiles": [[*tile, numbers] for tile, numbers in zip(tiles, says, strict=True)],
            "visits": dict(zip(ORDERS, visits, strict=True)),
            "o": o,
            "lse": lse,
        }
    shown = {"causal": [int(causal) for causal in entry.causal], "labels": head.labels, "stories": told}
    qkv = {name: getattr(head, name) for name in "qkv"}
    scale = {"scale": head.softmax_scale, "score_gain": entry.score_gain, "dtype": entry.dtype}
    own = {name: getattr(entry, name) for name in ("name", "title", "about", "key_labels", "sizes", "failures", "row")}
    return own | qkv | scale | shown
