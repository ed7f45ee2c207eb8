"""The page of a run's own attention: every layer's and head's weights on a text. `python breakit.py look=true`

The page loads no other file: it is docs/look.template.html with the weights as JSON. They are computed tile by tile
(training/weights.py), so a text may be long. Then a point of a picture is a block of tokens. The page of a broken run
has its weights as they are and, beside them, those of the whole algorithm with the same parameters.
"""

import base64
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import validation_batches
from data.tokenizer import from_json
from lab.files import fill
from lab.runs import beyond_causal, ids_of, text_of
from model.attention import AttentionConfig
from model.gpt import GPT
from training import checkpoint, config
from training.metrics import printable, stamp
from training.probe import Call, record
from training.weights import PATTERNS, Reading, read, visited

BYTES = 2_500_000  # of all pictures, each a triangle of one byte a point; as text they are a third larger
TOKENS = 256  # of the validation text, where no prompt is given
STEPS, LOST = 254, 255  # a weight is scale * (byte / STEPS)**2; LOST: not finite


def look(run: str, runs: Path, prompt: str | None, tokens: int | None, out: Path | None) -> None:
    """Writes the page of a run's best checkpoint.

    run: a name in `runs`, a folder, or latest. prompt: the text; None: the first `tokens` of the run's validation text.
    out: the file; None: look.html in the run's folder.
    ValueError for a run that does not exist, and for a text longer than the model's context.
    """
    found = checkpoint.load(checkpoint.find(run, runs, option="run", which="best"))
    attention = config.from_dict(AttentionConfig, found.state["config"]["attention"])
    attention = replace(attention, impl="tiled", kernel="auto", autotune=False)
    cpu, broken = torch.device("cpu"), found.state["broken"]
    nets = [found.network(attention, cpu).float().eval()]
    if broken:
        found.state["config"]["break_it"] = {}
        nets.append(found.network(attention, cpu).float().eval())
    context = nets[0].config.context_length
    idx, documents = text_to_read(found, prompt, tokens or min(TOKENS, context))
    if (T := idx.shape[1]) > context:
        raise ValueError(f"a text of {T} tokens: the model's context is {context}; use a shorter prompt= or tokens=")
    size = int(math.sqrt(2 * BYTES / sum(net.config.n_layer * net.config.n_head for net in nets)))
    name = f"{found.path.resolve().parents[1].name}, {found.path.name}"
    encoding = from_json(found.tokenizer)
    asked = shlex.join([f"run={found.path}", f"tokens={T}" if prompt is None else f"prompt={prompt}"])
    page = {
        "title": name,
        "text": "the beginning of its validation text" if prompt is None else "your text",
        "broken": broken,
        "tokens": [encoding.decode([token]) for token in idx[0].tolist()],
        # The tokens that begin a document, but for the first.
        "documents": [] if documents is None else ((documents[0].diff() != 0).nonzero().flatten() + 1).tolist(),
        "patterns": PATTERNS,
        "steps": STEPS,
        "point": -(-T // size),  # tokens along a side of a point of a picture
        "views": views(nets, idx, documents, broken, size),
        "trace": "" if beyond_causal(attention) else f"python breakit.py trace=true {asked}",
    }
    if out is None:
        out = (found.path.parent.parent if found.path.parent.name == checkpoint.FOLDER else Path()) / "look.html"
    length = fill(out, "look", page)
    print(printable(f"{stamp(broken)}{name}: {T} tokens, {out}: {length / 2**10:,.0f} KiB"))
    for layer in page["views"][0]["layers"]:
        for number, head in enumerate(layer["heads"]):
            if head["pattern"]:
                share = 100 * head["shares"][head["pattern"]]
                print(
                    f"layer {layer['layer']}, head {number} {PATTERNS[head['pattern']]} ({share:.0f} % of its weight)"
                )


def text_to_read(found: checkpoint.Checkpoint, prompt: str | None, tokens: int) -> tuple[Tensor, Tensor | None]:
    """What the model reads: the ids (1, T) of the prompt, or of the first tokens of the run's validation text with the
    numbers of their documents (1, T)."""
    if prompt is not None:
        encoding = from_json(found.tokenizer)
        return ids_of(encoding, found.state.get("begin", encoding.eot_token), prompt), None
    _, _, dataset = text_of(found)
    batch = next(validation_batches(dataset.val, dataset.val_documents, 1, tokens, tokens))
    return batch.x, batch.documents


def views(nets: list[GPT], idx: Tensor, documents: Tensor | None, broken: str, size: int) -> list[dict]:
    """The weights of each network: its own, and the whole algorithm's where it is broken."""
    names = [f"as trained: {broken}", "the whole algorithm"] if broken else ["as trained"]
    return [
        {"name": name, "layers": [of_layer(call, idx[0], size) for call in record(net, idx, None, documents)]}
        for name, net in zip(names, nets, strict=True)
    ]


def of_layer(call: Call, tokens: Tensor, size: int) -> dict[str, Any]:
    """A layer as the page reads it. tokens: ids (T,)."""
    reading = read(call, tokens, size)
    return {
        "layer": call.layer,
        "window": call.config.window,
        "block": [call.config.block_m, call.config.block_n],
        "tiles": visited(call),
        "heads": [of_head(reading, head) for head in range(len(reading.maps))],
    }


def of_head(reading: Reading, head: int) -> dict[str, Any]:
    """A head as the page reads it: its picture's lower triangle, row by row, as bytes in base64."""
    picture = reading.maps[head]
    finite = picture.isfinite()
    scale = max(1.0, float(picture[finite].abs().max())) if finite.any() else 1.0
    levels = (picture.abs() / scale).sqrt().mul(STEPS).round().nan_to_num(0.0, 0.0, 0.0)
    levels = torch.where(finite, levels, LOST).to(torch.uint8)
    rows, columns = torch.tril_indices(len(picture), len(picture))
    return {
        "map": base64.b64encode(levels[rows, columns].numpy().tobytes()).decode(),
        "scale": scale,
        "entropy": float(reading.entropy[head]),
        "distance": int(reading.distance[head]),
        "often": float(reading.often[head]),
        "shares": {name: float(share[head]) for name, share in reading.shares.items()},
        "pattern": reading.pattern(head),
    }
