"""What the heads of a trained model read on a text, as an HTML page; and the batch again that ended a run.

The page loads no other file: it is look.html of this folder with the weights as JSON.

B = 1 sequence, T tokens, H query heads, D head size.
"""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import encode, from_json
from kernels.problem import runs_kernels
from model.attention import attention
from training.checkpoint import find_checkpoint, load_checkpoint, network
from training.machine import autocast, pick_device, set_precision, set_rng_state
from training.probe import Call, find, gauges, record

TEMPLATE = Path(__file__).with_name("look.html")
STEPS, LOST = 254, 255  # a weight is scale * (byte / STEPS)**2; LOST: not finite
PATTERNS = {
    "previous": "reads the token before",
    "itself": "reads the token itself",
    "first": "reads the first token",
    "induction": "copies: reads what came after this token earlier",
    "same": "reads this token where it stood earlier",
}
NAMED, FEWEST = 0.4, 8  # the least mean weight, and the fewest rows, for which a pattern is named


def look(run: str | None, runs: Path, prompt: str, out: Path | None) -> None:
    """Writes the page of a run's best checkpoint on the text `prompt`. out: None for look.html in the run's folder."""
    trained, cpu = find_checkpoint(run or "auto", runs, best=True), torch.device("cpu")
    broken, title = trained.state["broken"], f"{trained.path.parents[1].name}, {trained.path.name}"
    model, encoding = network(trained, "tiled", cpu), from_json(trained.tokenizer)
    # As in training, a document begins after an end-of-text token.
    idx = torch.tensor([[encoding.eot_token, *encode(encoding, prompt).tolist()]])
    page = {
        "title": title,
        "broken": broken,
        "tokens": [encoding.decode([token]) for token in idx[0].tolist()],
        "patterns": PATTERNS,
        "steps": STEPS,
        "layers": [of_layer(call, idx[0]) for call in record(model, idx)],
    }
    data = json.dumps(page, separators=(",", ":")).replace("</", "<\\/")  # no </script> inside the data
    out = out or trained.path.parents[1] / "look.html"
    out.write_text(TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data), encoding="utf-8")
    stamp = f"BROKEN[{broken}] " if broken else ""
    print(f"{stamp}{title}: {idx.shape[1]} tokens, {out}: {out.stat().st_size / 2**10:,.0f} KiB")


def weights_of(call: Call) -> Tensor:
    """What each value is multiplied by, (H, T, T), also in a broken call: the output for values of 1 for one key."""
    T, D = call.k.shape[2:]
    config, parts = replace(call.config, impl="tiled"), []
    for one in torch.eye(T, -(-T // D) * D).split(D, dim=1):  # (T, D): the values for D keys
        v = one.expand_as(call.v)
        parts.append(attention(call.q, call.k, v, config, spans=call.spans, break_it=call.break_it)[0])
    return torch.cat(parts, -1)[..., :T]


def keys_of(tokens: Tensor) -> dict[str, Tensor]:
    """{pattern: bool (T, T)}: the keys on which a row with that pattern has its weight. tokens: ids (T,)."""
    i, j = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
    return {
        "previous": j == i - 1,
        "itself": j == i,
        "first": (j == 0) & (i > 1),  # row 1 would count twice
        "induction": (tokens.roll(1) == tokens[:, None]) & (j > 0) & (j < i),
        "same": (tokens == tokens[:, None]) & (j < i),
    }


@torch.no_grad()
def of_layer(call: Call, tokens: Tensor) -> dict[str, Any]:
    """A layer as the page reads it. tokens: ids (T,)."""
    p, keys = weights_of(call), keys_of(tokens)
    entropy = torch.special.entr(p).sum(-1)[:, 1:].mean(-1)  # row 0 sees itself alone
    shares = {name: (p * x).sum(-1)[:, x.any(-1)].mean(-1) for name, x in keys.items() if x.any(-1).sum() >= FEWEST}
    heads = []
    for h in range(len(p)):
        mine = {name: float(share[h]) for name, share in shares.items()}
        best = max(mine, key=lambda name: mine[name], default="")
        pattern = best if best and mine[best] >= NAMED else ""
        heads.append(of_picture(p[h]) | {"entropy": float(entropy[h]), "shares": mine, "pattern": pattern})
    return {"window": call.config.window, "heads": heads}


def of_picture(p: Tensor) -> dict[str, Any]:
    """The lower triangle of the weights p (T, T), row by row, as bytes in base64: 2 T**2 / 3 characters."""
    finite = p.isfinite()
    scale = max([1.0, *p[finite].abs().flatten().tolist()])
    levels = (p.abs() / scale).sqrt().mul(STEPS).round().nan_to_num(0.0, 0.0, 0.0)
    levels = torch.where(finite, levels, LOST).to(torch.uint8)
    rows, columns = torch.tril_indices(len(p), len(p))
    return {"map": base64.b64encode(levels[rows, columns].numpy().tobytes()).decode(), "scale": scale}


def replay(path: Path) -> None:
    """Runs a kept batch again. Prints the gauges of every attention call, and the first tile that is not finite."""
    kept, device = load_checkpoint(path), pick_device("auto")
    if "batch.x" not in kept.training:
        raise ValueError(f"replay={path} holds no batch: name a folder in runs/NAME/faults, of a run with probe.every=")
    about, broken = kept.state["about"], kept.state["broken"]
    impl = about["attention"] if about["attention"] != "triton" or runs_kernels(device) else "tiled"
    net = network(kept, impl, device).train()
    set_rng_state(kept.training)  # for the same dropout
    batch = {name: x.to(device) for name, x in kept.training.items() if name.startswith("batch.")}
    set_precision(about["dtype"])
    with autocast(about["dtype"], device):
        calls = record(net, batch["batch.x"], batch.get("batch.documents"), batch["batch.y"])
    stamp = f"BROKEN[{broken}] " if broken else ""
    print(f"{stamp}{path}: {len(batch['batch.x'])} sequences, {impl}, {about['dtype']}, on {device}")
    print("score: the largest; headroom: nats until exp overflows; error: |o - right| / |right|")
    print("layer     score  headroom     error   not finite")
    for call in calls:
        g = gauges(call)
        results = dict(zip(("o", "dq", "dk", "dv"), (call.o, *call.gradients), strict=True))
        lost = " ".join(name for name, x in results.items() if not x.isfinite().all())
        numbers = f"{g.max_score:10.2f}{g.headroom:10.2f}{g.error:10.1e}"
        print(f"{call.layer:5}{numbers}   {lost}".rstrip())
    print(f"first: {place}" if (place := find(calls)) else "in this batch it does not begin in attention")
