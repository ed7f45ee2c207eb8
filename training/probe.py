"""Instruments for attention: how far a call is from overflow, its error, and the first tile that is not finite.

    calls = record(model, x, y, documents)     every attention call of a forward and, with y, of its backward
    gauges(calls[3])                           largest score, headroom, largest weight, smallest l, error, entropy
    find(calls)                                the first tile with a value that is not finite, in the order of computing
    search(model, batches, rng, ...)           find() over all the batches of a step that stopped a run

They work for any implementation, because they look at the inputs and outputs of a call. find() goes through the tiles
as tiled does, in tiles of attention.block_m x block_n, with the same break_it. Memory is O(T).

Shapes as in model/attention.py: q, o, do, dq (B, H, T, D), k, v, dk, dv (B, H_kv, T_k, D).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from conf.keys import check, key
from kernels.problem import Given, Problem
from model import gpt
from model.attention import AttentionConfig, attention, modified, problem_of
from model.break_it import BreakIt
from model.dropout import keep_mask, keep_scale
from model.mask import tiles, visible
from model.tiled import INF, Loops, backward_tiles, by_key_head, forward_tiles
from training.state import rng_state, set_rng_state

LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72: above it exp() overflows float32


@dataclass
class ProbeConfig:
    """Each look at attention takes the same single sequence and costs a few forwards of it. If the probe is on and a
    loss or gradient that is not finite stops the run, the probe searches that step for the first bad tile and keeps its
    batch (`python breakit.py replay=PATH`). With stop_on_nan=false no step stops the run, so none is searched."""

    every: int = key(0, "steps between two probes of attention", least=0, usual="0: never")
    film: int = key(
        0, "steps between two frames of film.png, every head's weights on a text", least=0, usual="0: never"
    )

    def __post_init__(self):
        check(self, "probe.")


@dataclass
class Call:
    """One attention call of a model: its inputs, its output, and the gradients of both."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    config: AttentionConfig  # of the layer
    break_it: BreakIt
    seed: Tensor | None
    documents: Tensor | None
    do: Tensor | None = None  # None if the call was recorded without a loss
    gradients: Sequence[Tensor] = ()  # dq, dk and dv; empty without a loss

    @property
    def loops(self) -> Loops:
        """The tiles in which find() goes through the call."""
        return Loops(self.config.block_m, self.config.block_n)

    def problem(self, break_it: BreakIt | None = None) -> Problem:
        """The call as the implementations of attention() take it. break_it: replaces the call's own."""
        T, T_k = self.q.shape[2], self.k.shape[2]
        documents_q = None if self.documents is None else self.documents[:, T_k - T :]
        broken = self.break_it if break_it is None else break_it
        return problem_of(
            self.q, self.k, self.config, Given(documents_q, self.documents, seed=self.seed), break_it=broken
        )


def record(model: gpt.GPT, x: Tensor, y: Tensor | None = None, documents: Tensor | None = None) -> list[Call]:
    """Every attention call of model(x), in order. With targets y also the gradients of the loss; the gradients of the
    parameters stay as they are. x, y: token ids int64 (B, T), documents: the loader's. In training mode the model draws
    dropout. A compiled model cannot be recorded, because it does not look up `attention` in model/gpt.py."""
    calls: list[Call] = []
    door, listening = gpt.attention, True

    def recording(q, k, v, config, **options):
        o = door(q, k, v, config, **options | {"qkv": None})  # or q, k and v would have no gradient
        if listening:  # activation checkpointing makes each call a second time, in the backward
            rest = (options[name] for name in ("break_it", "seed", "documents"))
            calls.append(Call(len(calls), q, k, v, o, config, *rest))
        return o

    gpt.attention = recording
    try:
        with torch.set_grad_enabled(y is not None):
            loss = model.hidden(x, documents) if y is None else model(x, y, documents)
        listening = False
        if y is not None:
            wanted = [getattr(call, name) for call in calls for name in ("o", "q", "k", "v")]
            grads = iter(torch.autograd.grad(loss, wanted))
            for call in calls:
                call.do, *call.gradients = islice(grads, 4)
    finally:
        gpt.attention = door
    for call in calls:
        call.q, call.k, call.v, call.o = (x.detach() for x in (call.q, call.k, call.v, call.o))
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# Gauges.


class Gauges(NamedTuple):
    """What gauges() measures of a call."""

    max_score: float  # of the visible keys
    headroom: float  # nats that scores may rise until l, acc or a 16-bit weight overflows without the maximum
    max_weight: float
    min_l: float  # the smallest l, as the call computes it
    error: float  # |o - right| / |right|, right: the whole algorithm in float64; NaN for sdpa with dropout
    entropy: Tensor  # (H,): of the weights in nats, the mean over rows; 0 for one key, log(n) for n equal weights


@torch.no_grad()
def gauges(call: Call) -> Gauges:
    """The gauges, computed from q, k and v in float64 (float32 on mps). Takes some rows at a time, in about a dozen
    tensors of 32 MiB, or of one row of every head if that is larger. A short sequence is enough."""
    wide = torch.float32 if call.q.device.type == "mps" else torch.float64
    broken, columns = call.break_it.broken, range(call.k.shape[2])
    problem = call.problem(call.break_it.mended)
    q, groups = call.q.to(wide), call.q.shape[1] // call.k.shape[1]
    k, v = (x.to(wide).repeat_interleave(groups, dim=1) for x in (call.k, call.v))
    B, H, T, _ = q.shape
    parts, entropy = [], q.new_zeros(H)
    with torch.autocast(q.device.type, enabled=False):
        for rows in tiles(T, max(1, 2**22 // (B * H * len(columns)))):
            qk, hidden = q[:, :, rows.start : rows.stop] @ k.mT, ~visible(problem, rows, columns, q.device)[:, None]
            s = modified(qk * problem.score.scale, problem, rows, columns).masked_fill(hidden, -INF)  # (B, H, R, T_k)
            lse = s.logsumexp(-1, keepdim=True)  # (B, H, R, 1)
            nothing = lse == -INF
            p = torch.exp(s - lse.masked_fill(nothing, 0.0))
            entropy += (p * (lse - s)).masked_fill(hidden, 0.0).sum((0, 2, 3)) / (B * T)
            zp = p
            if problem.dropout.seed is not None:
                keep = keep_mask(problem.dropout.seed, B * H, rows, columns, problem.dropout_p).view_as(p)
                zp = p * keep * keep_scale(problem.dropout_p)
            right = zp @ v
            if "no_scale" in broken:  # l as the call computes it, which is not that of the whole algorithm
                s = modified(qk * call.problem().score.scale, problem, rows, columns).masked_fill(hidden, -INF)
                lse = s.logsumexp(-1, keepdim=True)
            m = s.amax(-1, keepdim=True)
            start = torch.zeros_like(m) if "no_max" in broken else m.clamp(min=0.0) if "zero_init_max" in broken else m
            l = torch.exp(lse - start).masked_fill(nothing, INF)
            wrong = call.o[:, :, rows.start : rows.stop].to(wide) - right
            # The log of the larger of l and |acc|, as they would be without the maximum.
            sums = lse + right.abs().amax(-1, keepdim=True).clamp(min=1.0).log()
            parts.append(
                torch.stack((m.max(), sums.max(), p.max(), l.min(), wrong.square().sum(), right.square().sum()))
            )
        found = torch.stack(parts)
        largest, least, total = found.amax(0), found.amin(0), found.sum(0)
        # All numbers in one transfer, because each transfer waits for the device.
        max_score, max_sum, max_weight, min_l, *squares = torch.stack((*largest[:3], least[3], *total[4:])).tolist()
    headroom = worst(min, (LIMIT - max_sum, math.log(torch.finfo(call.q.dtype).max) - max_score))
    error = math.sqrt(squares[0] / max(squares[1], 1e-300))
    if call.config.impl == "sdpa" and problem.dropout.seed is not None:
        error = math.nan  # torch drew its own mask, which cannot be repeated
    return Gauges(max_score, headroom, max_weight, min_l, error, entropy)


def reading(calls: list[Call]) -> dict[str, float]:
    """The gauges of all layers as one record: the worst of each gauge, and the entropy of every head (layer.head)."""
    of_layers = [gauges(call) for call in calls]
    return {
        "max_score": worst(max, (g.max_score for g in of_layers)),
        "headroom": worst(min, (g.headroom for g in of_layers)),
        "max_weight": worst(max, (g.max_weight for g in of_layers)),
        "min_l": worst(min, (g.min_l for g in of_layers)),
        "attention_error": worst(max, (g.error for g in of_layers)),
        **{f"entropy.{i}.{h}": e for i, g in enumerate(of_layers) for h, e in enumerate(g.entropy.tolist())},
    }


def worst(choose, numbers) -> float:
    """The largest (choose=max) or smallest (choose=min) number. NaN if any is NaN, which max and min may miss."""
    found = list(numbers)
    return math.nan if any(map(math.isnan, found)) else choose(found)


# ---------------------------------------------------------------------------------------------------------------------
# The search.


class Place(NamedTuple):
    """A tile with a value that is not finite."""

    layer: int
    batch: int
    head: int  # query head
    query_tile: int
    key_tile: int | None  # None: no single tile of keys is to blame
    rows: range
    columns: range | None
    what: str  # what is not finite, with its verb: "l is"

    def __str__(self) -> str:
        keys = "no key tile by itself"
        if self.columns is not None:
            keys = f"key tile {self.key_tile} (keys {self.columns[0]} to {self.columns[-1]})"
        return (
            f"layer {self.layer}, head {self.head}, query tile {self.query_tile} (rows {self.rows[0]} to "
            f"{self.rows[-1]}), {keys} of sequence {self.batch}: {self.what} not finite"
        )


def search(
    model: gpt.GPT, batches: list, rng: dict[str, Tensor], device: torch.device, autocast: AbstractContextManager
) -> tuple[Place, dict[str, Tensor]] | None:
    """Runs the batches of one step again, uncompiled, and stops at the first batch with a tile that is not finite.

    batches: from data.loader, in the order of the step. rng: rng_state() from before the step.
    Returns the tile and the tensors that replay it: "batch.x", "batch.y", "batch.documents" (if the batch has them) and
    the random state from before the batch. None if find() finds no such tile. The gradients of the parameters stay as
    they are.
    """
    set_rng_state(rng)  # so the dropout is that of the step
    for batch in batches:
        before = rng_state()
        batch = batch.to(device)
        with autocast:
            place = find(record(model, *batch))
        if place:
            return place, {f"batch.{k}": part for k, part in batch._asdict().items() if part is not None} | before
    return None


def find(calls: list[Call]) -> Place | None:
    """The first tile with a value that is not finite. Searches the forward from the first layer to the last, then the
    backward from the last to the first. None if it did not begin in attention: either all values are finite, or the
    gradient that reaches attention is not."""
    for call in calls:
        if not call.o.isfinite().all():
            return first_bad(call) or first_row(call)
    for call in reversed(calls):
        if call.do is None or not call.do.isfinite().all():
            return None
        if not all(x.isfinite().all() for x in call.gradients):
            return first_bad(call)
    return None


def first_row(call: Call) -> Place:
    """The first row of a call's o that is not finite, for a call in which tiled has no such row. naive can: it also
    multiplies hidden values, and 0 * inf is NaN."""
    batch, head, row = (~call.o.isfinite().all(-1)).nonzero()[0].tolist()
    key_head, tile = head * call.k.shape[1] // call.q.shape[1], row // call.config.block_m
    rows = tiles(call.q.shape[2], call.config.block_m)[tile]
    inputs = {"q": call.q[batch, head], "k": call.k[batch, key_head], "v": call.v[batch, key_head]}
    spoilt = [name for name, x in inputs.items() if not x.isfinite().all()]
    what = f"{' and '.join(spoilt)} (input values) are" if spoilt else "o is"
    return Place(call.layer, batch, head, tile, None, rows, None, what)


@torch.no_grad()
def first_bad(call: Call) -> Place | None:
    """The first tile of a call in which the forward or, with gradients, the backward makes a value that is not finite.
    Queries are the outer loop. A NaN in k shows in the first query tile that visits it, even if that key is hidden:
    tiled masks scores by a minimum with -inf, which keeps NaN."""
    with torch.autocast(call.q.device.type, enabled=False):
        found = first_bad_forward(call)
        return found if found or call.do is None else first_bad_backward(call)


def first_bad_forward(call: Call) -> Place | None:
    """The first l, acc or o of tiled's forward that is not finite."""
    columns, watch = None, dict[str, Tensor]()
    for rows, tile, found in forward_tiles(call.q, call.k, call.v, call.problem(), call.loops, watch):
        if tile is None:
            if not (sound := found[0].isfinite().all(-1)).all():
                return place(call, ~sound, rows, columns, "o = acc / l of rows that saw nothing is")
            columns = None
            continue
        _, l, acc = found
        columns, sound_l, sound_acc = tile.columns, l.isfinite().squeeze(-1), acc.isfinite().all(-1)
        if not (sound_l & sound_acc).all():
            what = "l, the sum of weights, is" if watch["scores"].isfinite().all() else "scores are"
            return place(call, ~(sound_l & sound_acc), rows, columns, "o is" if sound_l.all() else what)
    return None


def first_bad_backward(call: Call) -> Place | None:
    """The first weight or gradient of tiled's backward that is not finite."""
    assert call.do is not None
    config = replace(call.config, impl="tiled", autotune=False, kernel="auto", order="queries_outside")
    o, lse = attention(call.q, call.k, call.v, config, seed=call.seed, documents=call.documents,
                       break_it=call.break_it, return_lse=True)  # fmt: skip
    saved, watch = (call.q, call.k, call.v, o, lse), dict[str, Tensor]()
    for tile, so_far in backward_tiles(saved, call.do, None, call.problem(), call.loops, watch):
        if tile is None:
            continue
        rows, columns, _ = tile
        dq, *of_keys = so_far
        dk, dv = (x[:, :, columns.start : columns.stop].flatten(0, 1) for x in of_keys)  # (N, S, D)
        values = {"p, computed again, is": watch["zp"], "ds is": watch["ds"]}
        # dv, dk and dq so far, in the dtype of the result
        values |= {what: x.to(call.q.dtype) for what, x in (("dv is", dv), ("dk is", dk), ("dq is", dq))}
        for what, x in values.items():
            bad = ~x.isfinite().all(-1)
            if bad.any():
                if what in ("dv is", "dk is"):  # sums over all rows and heads that share a key, so all of them count
                    bad = bad.any(-1, keepdim=True).expand(len(bad), dq.shape[1])
                return place(call, bad, rows, columns, what)
    return None


def place(call: Call, bad: Tensor, rows: range, columns: range | None, what: str) -> Place:
    """The first bad row as a Place. bad: bool (N, G * R), N = B * H_kv, for one tile. columns: None if the rows visited
    no tile of keys."""
    q, k, v = by_key_head(call.q, call.k, call.v)
    N, G = q.shape[:2]
    n, g = (bad.view(N, G, len(rows)).any(-1).nonzero()[0]).tolist()
    batch, key_head = divmod(n, call.k.shape[1])
    inputs, key_tile = {"q": q[n, g, rows.start : rows.stop]}, None
    if columns is not None:
        keys, key_tile = slice(columns.start, columns.stop), columns.start // call.config.block_n
        inputs |= {"k": k[n, 0, keys], "v": v[n, 0, keys]}
    spoilt = [name for name, x in inputs.items() if not x.isfinite().all()]
    what = f"{' and '.join(spoilt)} (input values) are" if spoilt else what
    query_tile = rows.start // call.config.block_m
    return Place(call.layer, batch, key_head * G + g, query_tile, key_tile, rows, columns, what)
