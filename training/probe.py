"""Instruments for attention: how far a call is from overflow, its error, and the first tile that is not finite.

    calls = record(model, idx, documents, targets)   the attention calls of a forward; with targets, of its backward too
    gauges(calls[3])                                 largest score, headroom, largest weight, smallest l, error, entropy
    find(calls)                                      the first tile with NaN or infinity, in the order of computing
    search(model, batches, rng, ...)                 find() over all the batches of a step that stopped a run

They look at the inputs and outputs of calls, so they serve any implementation. find() goes through the tiles of
model/tiled.py, attention.block_m x block_n, with the same break_it. Memory is O(T).

Shapes as in model/attention.py; in tiles N = B * H_kv and R = rows of a tile * query heads of a key head.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.keys import check, key
from data.loader import Batch
from kernels.problem import Problem
from model import tiled
from model.attention import AttentionConfig, attention, problem_of
from model.break_it import BreakIt
from model.gpt import GPT
from model.tiled import INF, LOG2E, by_key_head, tile
from training.machine import rng_state, set_rng_state

LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72: above it exp() overflows float32


@dataclass
class ProbeConfig:
    every: int = key(0, "steps between two probes of attention; a NaN's tile is then searched; 0: never", least=0)

    def __post_init__(self):
        check(self, "probe.")


@dataclass
class Call:
    """One attention call of a model: its inputs, its output, and the gradients of both."""

    q: Tensor
    k: Tensor
    v: Tensor
    config: AttentionConfig  # of the layer
    seed: Tensor | None
    documents: Tensor | None
    break_it: BreakIt
    layer: int
    o: Tensor
    do: Tensor | None = None  # None if the call was recorded without a loss
    gradients: list[Tensor] = field(default_factory=list)  # dq, dk and dv; empty without a loss

    def problem(self, broken: tuple[str, ...] | None = None) -> Problem:
        """The call as the implementations of attention() take it. broken: replaces the call's own failures."""
        break_it = self.break_it if broken is None else replace(self.break_it, broken=broken)
        config = replace(self.config, impl="tiled")
        return problem_of(self.q, self.k, self.v, config, True, self.seed, self.documents, break_it)


class Recorder:
    """Stands where a KV cache would: model(idx, sequence=recorder) attends by it."""

    def __init__(self, model: GPT, device: torch.device):
        self.device, self.calls, self.listening = device, list[Call](), True
        self.layers = [self] * len(model.blocks)

    def positions(self, T: int) -> Tensor:
        return torch.arange(T, device=self.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **others: Any) -> Tensor:
        o = attention(q, k, v, config, **others)
        if self.listening:  # with model.recompute the backward makes each call a second time
            self.calls.append(Call(q, k, v, config, **others, layer=len(self.calls), o=o))
        return o


def record(model: GPT, idx: Tensor, documents: Tensor | None = None, targets: Tensor | None = None) -> list[Call]:
    """Every attention call of model(idx), in order; with targets also the gradients. The parameters' gradients stay as
    they are. idx, targets: int64 (B, T). In training mode the model draws dropout. Its blocks must run uncompiled."""
    recorder = Recorder(model, idx.device)
    calls = recorder.calls
    with torch.set_grad_enabled(targets is not None):
        loss = model.hidden(idx, documents, recorder) if targets is None else model(idx, targets, documents, recorder)
    recorder.listening = False
    if targets is not None:
        grads = iter(torch.autograd.grad(loss, [x for call in calls for x in (call.o, call.q, call.k, call.v)]))
        for call in calls:
            call.do, *call.gradients = islice(grads, 4)
    for call in calls:
        call.q, call.k, call.v, call.o = (x.detach() for x in (call.q, call.k, call.v, call.o))
    return calls


class Gauges(NamedTuple):
    max_score: float  # of the visible keys
    headroom: float  # nats that scores may rise until l, acc or a 16-bit weight overflows without the maximum
    max_weight: float
    min_l: float  # the smallest l, as the call computes it
    error: float  # |o - right| / |right|, right: the whole algorithm in float64; NaN for sdpa with dropout
    entropy: Tensor  # (H,): of the weights in nats, the mean over rows; 0 for one key, log(n) for n equal weights


@torch.no_grad()
def gauges(call: Call) -> Gauges:
    """The gauges, computed from q, k and v in float64 (float32 on mps), some rows at a time."""
    wide = torch.float32 if call.q.device.type == "mps" else torch.float64
    (B, H, T, _), columns, broken = call.q.shape, range(call.k.shape[2]), call.break_it.broken
    whole = call.problem(broken=())
    own = whole._replace(scale=call.problem().scale)  # no_scale changes it
    q, k, v, o = by_key_head(call.k.shape[1], *(x.to(wide) for x in (call.q, call.k, call.v, call.o)))
    k, v = tile(k, columns), tile(v, columns)
    parts, entropy, size = [], q.new_zeros(H), max(1, 2**22 // (B * H * len(columns)))
    with torch.autocast(q.device.type, enabled=False):
        for rows in (range(i, min(i + size, T)) for i in range(0, T, size)):
            s, lse, p = weights(tile(q, rows), k, rows, columns, own)
            entropy += torch.special.entr(p).view(B, H, -1).sum((0, 2)) / (B * T)
            right = p if own.scale == whole.scale else weights(tile(q, rows), k, rows, columns, whole)[2]
            z = tiled.dropout_factor(right, rows, columns, whole)
            right = (right if z is None else z * right) @ v
            m = s.amax(-1, keepdim=True)
            start = torch.zeros_like(m) if "no_max" in broken else m.clamp(min=0.0) if "zero_init_max" in broken else m
            l = torch.exp(lse - start).masked_fill(lse == -INF, INF)
            # The log of the larger of l and |acc|, as they would be without the maximum.
            sums = lse + right.abs().amax(-1, keepdim=True).clamp(min=1.0).log()
            off = (tile(o, rows) - right).square().sum()
            parts.append(torch.stack((m.max(), sums.max(), p.max(), l.min(), off, right.square().sum())))
    found = torch.stack(parts)
    max_score, max_sum, max_weight = found[:, :3].amax(0).tolist()
    off, size_of_right = found[:, 4:].sum(0).tolist()
    headroom = worst(min, (LIMIT - max_sum, math.log(torch.finfo(call.q.dtype).max) - max_score))
    drawn_by_torch = call.config.impl == "sdpa" and whole.seed is not None  # its mask cannot be repeated
    error = math.nan if drawn_by_torch else math.sqrt(off / max(size_of_right, 1e-300))
    return Gauges(max_score, headroom, max_weight, float(found[:, 3].amin()), error, entropy)


def weights(q_i: Tensor, k: Tensor, rows: range, columns: range, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Scores s, their log-sum-exp (N, R, 1) and weights p (N, R, T_k) of some rows."""
    s = tiled.scores(q_i, k, rows, columns, True, problem)[0] / LOG2E
    lse = s.logsumexp(-1, keepdim=True)
    return s, lse, torch.exp(s - lse.masked_fill(lse == -INF, 0.0))


def reading(calls: list[Call]) -> dict[str, float]:
    """The gauges of all layers as one record: the worst of each gauge, and the entropy of every head (layer.head)."""
    *columns, entropies = zip(*(gauges(call) for call in calls), strict=True)
    names = ("max_score", "headroom", "max_weight", "min_l", "attention_error")
    found = {
        name: worst(choose, of) for name, choose, of in zip(names, (max, min, max, min, max), columns, strict=True)
    }
    return found | {f"entropy.{i}.{h}": e for i, x in enumerate(entropies) for h, e in enumerate(x.tolist())}


def worst(choose: Callable, numbers: Iterable[float]) -> float:
    """The largest (choose=max) or smallest (choose=min) number. NaN if any is NaN, which max and min may miss."""
    found = list(numbers)
    return math.nan if any(map(math.isnan, found)) else choose(found)


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


class Found(Exception):
    """Ends a pass over the tiles: its argument is a Place."""


def search(
    model: GPT, batches: list[Batch], rng: dict[str, Tensor], device: torch.device, autocast: AbstractContextManager
) -> tuple[Place, dict[str, Tensor]] | None:
    """Runs the batches of a step again, from the random state before it, to the first with a tile that is not finite.
    Returns the tile and what replays it: "batch.x", "batch.y", "batch.documents" (if the batch has them) and the random
    state before the batch. None if the NaN does not begin in attention."""
    set_rng_state(rng)  # so the dropout is that of the step
    for batch in batches:
        before = rng_state()
        x, y, documents = batch.to(device)
        with autocast:
            place = find(record(model, x, documents, y))
        if place:
            return place, {f"batch.{name}": x for name, x in batch._asdict().items() if x is not None} | before
    return None


def find(calls: list[Call]) -> Place | None:
    """The first tile with a value that is not finite: forward from the first layer to the last, then backward. None if
    it did not begin in attention: all values are finite, or the gradient that reaches attention is not."""
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
    """The first row of o that is not finite where no tile is to blame: it sees no key, or naive has multiplied a hidden
    value (0 * inf is NaN)."""
    batch, head, row = (~call.o.isfinite().all(-1)).nonzero()[0].tolist()
    i, M = row // call.config.block_m, call.config.block_m
    return Place(call.layer, batch, head, i, None, range(i * M, min(i * M + M, call.q.shape[2])), None, "o is")


@torch.no_grad()
def first_bad(call: Call) -> Place | None:
    """The first tile in which the forward or, with gradients, the backward makes a value that is not finite."""
    problem, tiles = call.problem(), (call.config.block_m, call.config.block_n)

    def watch_forward(rows, columns, s, l, acc, **others):
        bad_scores = ~(s < INF)  # NaN or infinity; a hidden score is -inf
        bad_l, bad_acc = ~l.isfinite()[..., 0], ~acc.isfinite().all(-1)
        if (bad_l | bad_acc).any():
            what = "scores are" if bad_scores.any() else "l, the sum of weights, is" if bad_l.any() else "acc is"
            raise Found(place(call, bad_l | bad_acc, rows, columns, what))

    def watch_backward(rows, columns, zp, ds, dq, dk, dv, **others):
        sums = {"dv is": dv, "dk is": dk, "dq is": dq}
        sums = {what: x.to(call.q.dtype) for what, x in sums.items()}  # the result's dtype, which may overflow
        for what, x in {"p, computed again, is": zp, "ds is": ds, **sums}.items():
            bad = ~x.isfinite().all(-1)
            if what in ("dv is", "dk is"):  # sums over all rows and heads that share a key, so all of them count
                bad = bad.any(-1, keepdim=True).expand(len(bad), dq.shape[1])
            if bad.any():
                raise Found(place(call, bad, rows, columns, what))

    with torch.autocast(call.q.device.type, enabled=False):
        try:
            o, _, lse2 = tiled.forward(call.q, call.k, call.v, problem, *tiles, watch_forward)
            if call.do is not None:
                tiled.backward(call.q, call.k, call.v, o, lse2, call.do, None, problem, *tiles, watch_backward)
        except Found as found:
            return found.args[0]
    return None


def place(call: Call, bad: Tensor, rows: range, columns: range, what: str) -> Place:
    """The first bad row of a tile. bad: bool (N, R)."""
    q, k, v = by_key_head(call.k.shape[1], call.q, call.k, call.v)
    n, g = (bad.view(*q.shape[:2], len(rows)).any(-1).nonzero()[0]).tolist()
    batch, key_head = divmod(n, call.k.shape[1])
    keys = slice(columns.start, columns.stop)
    inputs = {"q": q[n, g, rows.start : rows.stop], "k": k[n, 0, keys], "v": v[n, 0, keys]}
    spoilt = [name for name, x in inputs.items() if not x.isfinite().all()]
    what = f"{' and '.join(spoilt)} (input values) are" if spoilt else what
    query_tile, key_tile = rows.start // call.config.block_m, columns.start // call.config.block_n
    return Place(call.layer, batch, key_head * q.shape[1] + g, query_tile, key_tile, rows, columns, what)
