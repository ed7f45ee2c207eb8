"""Instruments for attention: how far a call is from overflow, its error, and the first tile that is not finite.

    calls = record(model, idx, documents, targets)   the attention calls of a forward; with targets, of its backward too
    gauges(calls[3])                                 largest score, headroom, error, entropy
    find(calls)                                      the first tile with NaN or infinity, in the order of computing
    search(train_step, batch, rng)                   find() over all micro-batches of a step that stopped a run
    effects(calls)                                   how far a failure of break_it puts each call off

They look at the inputs and outputs of calls, so they serve any implementation. Memory is O(T). Shapes: model/tiled.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.keys import key
from data.loader import Batch
from kernels.problem import Problem
from model import tiled
from model.attention import AttentionConfig, attention, problem_of
from model.break_it import FAILURES, BreakIt
from model.gpt import GPT, place
from model.tiled import INF, LOG2E, by_key_head, tile
from training.machine import rng_state, set_rng_state
from training.step import TrainStep

LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72: above it exp() overflows float32
STEPS = (1, 10, 100, 1000)  # after which a broken run checks whether the failure acts
BEYOND_ROUNDING = 3.0  # an error this many times the whole algorithm's acts; another order of sums gives less
ROWS = 2048  # looked at in a longer sequence: a probe of 64k would take hours
WHAT = {"s": "scores are", "l": "l, the sum of weights, is", "acc": "acc is", "zp": "p, computed again, is",
        "ds": "ds is", "dv": "dv is", "dk": "dk is", "dq": "dq is"}  # fmt: skip
EXACT = torch.finfo(torch.float32).eps  # the least error to compare with: for a row of one key the whole one has none


@dataclass
class ProbeConfig:
    every: int = key(0, "steps between two probes of attention; a NaN's tile is then searched; 0: never", least=0)


@dataclass
class Call:
    """One attention call of a model: its inputs, its output, and the gradients of both."""

    q: Tensor
    k: Tensor
    v: Tensor
    config: AttentionConfig  # of the layer
    seed: Tensor | None
    spans: Tensor | None  # as attention() takes them
    break_it: BreakIt
    layer: int
    o: Tensor
    do: Tensor | None = None  # None if the call was recorded without a loss
    gradients: list[Tensor] = field(default_factory=list)  # dq, dk and dv; empty without a loss

    def problem(self, broken: tuple[str, ...] | None = None) -> Problem:
        """The call as the implementations of attention() take it. broken: replaces the call's own failures."""
        break_it = self.break_it if broken is None else replace(self.break_it, broken=broken)
        config = replace(self.config, impl="tiled")
        return problem_of(self.q, self.k, self.v, config, True, self.seed, self.spans, break_it)


class Recorder:
    """Stands where a KV cache would: model(idx, sequence=recorder) attends by it."""

    place = staticmethod(place)

    def __init__(self):
        self.calls = list[Call]()

    def attends(self, n_layer: int) -> list[Callable[..., Tensor]]:
        return [self.attend] * n_layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **others: Any) -> Tensor:
        o = attention(q, k, v, config, **others)
        self.calls.append(Call(q, k, v, config, **others, layer=len(self.calls), o=o))
        return o


def record(model: GPT, idx: Tensor, documents: Tensor | None = None, targets: Tensor | None = None) -> list[Call]:
    """Every attention call of model(idx), in order; with targets also the gradients. Blocks must run uncompiled."""
    recorder = Recorder()
    with torch.set_grad_enabled(targets is not None):
        loss = model.hidden(idx, documents, recorder) if targets is None else model(idx, targets, documents, recorder)
    calls = [*recorder.calls]  # with model.recompute the backward makes each call a second time
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
    error: float  # |o - right| / |right|, right: the whole algorithm in float64; NaN for sdpa with dropout
    entropy: Tensor  # (H,): of the weights in nats, the mean over rows; 0 for one key, log(n) for n equal weights


def wide(x: Tensor) -> torch.dtype:
    """The dtype to compare with: float64, which Apple's GPUs do not have."""
    return torch.float32 if x.device.type == "mps" else torch.float64


@torch.no_grad()
def gauges(call: Call) -> Gauges:
    """The gauges, computed from q, k and v in float64, some rows at a time; of a long sequence from some ROWS rows,
    evenly spread. NaN in any of their inputs is NaN in the gauge."""
    (B, H, T, _), columns = call.q.shape, range(call.k.shape[2])
    whole = call.problem(broken=())
    own = whole._replace(scale=call.problem().scale)  # no_scale changes it
    q, k, v, o = by_key_head(call.k.shape[1], *(x.to(wide(x)) for x in (call.q, call.k, call.v, call.o)))
    k, v = tile(k, columns), tile(v, columns)
    parts, entropies, size = [], [], min(64, max(1, 2**22 // (B * H * len(columns))))
    step = -(-size * max(T, ROWS) // ROWS)  # from one group of rows to the next
    with torch.autocast(q.device.type, enabled=False):
        for rows in (range(i, min(i + size, T)) for i in range((step - size) // 2, T, step)):
            s, lse, p = weights(tile(q, rows), k, rows, columns, own)
            entropies.append(torch.special.entr(p).sum(-1).view(B, H, -1))
            right = p if own.scale == whole.scale else weights(tile(q, rows), k, rows, columns, whole)[2]
            z = tiled.dropout_factor(right, rows, columns, whole)
            right = (right if z is None else z * right) @ v
            # The log of the larger of l and |acc|, as they would be without the maximum.
            sums = lse + right.abs().amax(-1, keepdim=True).clamp(min=1.0).log()
            off = (tile(o, rows) - right).square().sum()
            parts.append(torch.stack((s.max(), sums.max(), off, right.square().sum())))
    found = torch.stack(parts)
    (max_score, max_sum), (off, size_of_right) = found[:, :2].amax(0), found[:, 2:].sum(0)
    headroom = torch.minimum(LIMIT - max_sum, math.log(torch.finfo(call.q.dtype).max) - max_score)
    drawn_by_torch = call.config.impl == "sdpa" and whole.seed is not None  # its mask cannot be repeated
    error = math.nan if drawn_by_torch else float((off / size_of_right.clamp(min=1e-300)).sqrt())
    return Gauges(float(max_score), float(headroom), error, torch.cat(entropies, -1).mean((0, 2)))


def weights(q_i: Tensor, k: Tensor, rows: range, columns: range, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Scores s, their log-sum-exp (N, R, 1) and weights p (N, R, T_k) of some rows."""
    s = tiled.scores(q_i, k, rows, columns, True, problem)[0] / LOG2E
    lse = s.logsumexp(-1, keepdim=True)
    return s, lse, torch.exp(s - lse.masked_fill(lse == -INF, 0.0))


def reading(calls: list[Call]) -> dict[str, float]:
    """The gauges of all layers as one record: the worst of each gauge, and the entropy of every head (layer.head)."""
    *columns, entropies = zip(*(gauges(call) for call in calls), strict=True)
    max_score, headroom, error = torch.tensor(columns, dtype=torch.float64)  # whose max() and min() keep NaN
    found = {"max_score": max_score.max(), "headroom": headroom.min(), "attention_error": error.max()}
    found |= {f"entropy.{i}.{h}": e for i, x in enumerate(entropies) for h, e in enumerate(x)}
    return {name: float(x) for name, x in found.items()}


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
        if self.columns:
            keys = f"key tile {self.key_tile} (keys {self.columns[0]} to {self.columns[-1]})"
        rows = f"query tile {self.query_tile} (rows {self.rows[0]} to {self.rows[-1]})"
        return f"layer {self.layer}, head {self.head}, {rows}, {keys} of sequence {self.batch}: {self.what} not finite"


def search(step: TrainStep, batch: Batch, rng: dict[str, Tensor]) -> tuple[Place, dict[str, Tensor]] | None:
    """Runs a step's micro-batches again, from the random state before it, to the first with a tile that is not finite.
    Returns the tile and what replays it: batch.x, batch.y, ..., and the random state before the pass; else None."""
    set_rng_state(rng)  # so the dropout is that of the step, but not model.dropout_p's where blocks are compiled
    for part in batch.micro_batches():
        before = rng_state()
        x, y, documents = part.to(step.device)
        with step.autocast, step.uncompiled():
            place = find(record(step.model, x, documents, y))
        if place:
            return place, {f"batch.{name}": x for name, x in part._asdict().items() if x is not None} | before
    return None


def find(calls: list[Call]) -> Place | None:
    """The first tile with a value that is not finite: forward from the first layer to the last, then backward. None if
    all values are finite, or the gradient that reaches attention is not."""
    for call in calls:
        bad = ~call.o.isfinite().all(-1)
        if bad.any():  # without a bad tile: a row that sees no key, or naive's product with a hidden value (0 * inf)
            batch, head, row = bad.nonzero()[0].tolist()
            where = call.layer, batch, head, row // call.config.block_m, None, range(row, row + 1), None
            return first_bad(call) or Place(*where, "o is")
    for call in reversed(calls):
        if call.do is None or not call.do.isfinite().all():
            return None
        if not all(x.isfinite().all() for x in call.gradients):
            return first_bad(call)
    return None


@torch.no_grad()
def first_bad(call: Call) -> Place | None:
    """The first tile in which the forward or, with gradients, the backward makes a value that is not finite."""
    found: list[Place] = []

    def watch(rows: range, columns: range, **values: Any) -> None:
        for name in WHAT:
            if found or name not in values:
                continue
            x = values[name]
            if name in ("dv", "dk", "dq"):
                x = x.to(call.q.dtype)  # the result's dtype, which may overflow
            bad = ~(x < INF if name == "s" else x.isfinite()).all(-1)  # a hidden score is -inf
            if name in ("dv", "dk"):  # sums over all rows and heads that share a key, so all of them count
                bad = bad.any(-1, keepdim=True).expand(len(bad), values["dq"].shape[1])
            if bad.any():
                found.append(place_of(call, bad, rows, columns, WHAT[name]))

    arguments = call.problem(), call.config.block_m, call.config.block_n, watch
    with torch.autocast(call.q.device.type, enabled=False):
        o, _, lse2 = tiled.forward(call.q, call.k, call.v, *arguments)
        if call.do is not None:
            tiled.backward(call.q, call.k, call.v, o, lse2, call.do, None, *arguments)
    return found[0] if found else None


def place_of(call: Call, bad: Tensor, rows: range, columns: range, what: str) -> Place:
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


# --- does a failure act? It sleeps while the line that it takes out would change nothing.
# The first ROWS tokens of each call of a broken model, which see no others, are computed again with the same dropout
# mask: as they were, by tiled in float64, and by the whole algorithm in the run's implementation and dtype, which is
# off by rounding alone. The failure acts if the broken call is farther off than that.
class Effect(NamedTuple):
    """The error of a call's o, or of its dq, dk and dv together: |x - right| / |right|."""

    layer: int
    of: str  # o | gradient
    error: float
    of_whole: float  # that of the whole algorithm: rounding

    @property
    def more_than_rounding(self) -> bool:
        """True also for NaN and infinity."""
        return not self.error <= BEYOND_ROUNDING * max(self.of_whole, EXACT)


def effects(calls: list[Call]) -> list[Effect]:
    """For each call, recorded with gradients: the effect on o and that on the gradients. Leaves out a right answer that
    is not finite, and sdpa with dropout, because only PyTorch knows its mask."""
    found = []
    for call in (call for call in calls if call.config.impl != "sdpa" or call.seed is None):
        cut = {name: getattr(call, name)[:, :, :ROWS] for name in ("q", "k", "v", "do")}
        call = replace(call, **cut, spans=None if call.spans is None else call.spans[:, :ROWS])
        impl, dtype = call.config.impl, call.q.dtype
        right, whole = computed(call, "tiled", wide(call.q)), computed(call, impl, dtype)
        broken = computed(call, impl, dtype, call.break_it.broken)
        for of, part in (("o", slice(0, 1)), ("gradient", slice(1, 4))):
            if all(x.isfinite().all() for x in right[part]):
                errors = (distance(x[part], right[part]) for x in (broken, whole))
                found.append(Effect(call.layer, of, *errors))
    return found


def computed(call: Call, impl: str, dtype: torch.dtype, broken: tuple[str, ...] = ()) -> list[Tensor]:
    """o, dq, dk and dv of the call, computed by the whole algorithm, or with what is broken."""
    assert call.do is not None, "a call with gradients is wanted"
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (call.q, call.k, call.v))
    config, break_it = replace(call.config, impl=impl), replace(call.break_it, broken=broken)
    with torch.enable_grad():
        o = attention(q, k, v, config, seed=call.seed, spans=call.spans, break_it=break_it)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), call.do.to(dtype))]


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """|found - right| / |right| over several tensors together."""
    off = sum(float((x.to(r.dtype) - r).square().sum()) for x, r in zip(found, right, strict=True))
    return math.sqrt(off / max(sum(float(r.square().sum()) for r in right), 1e-300))


def worst(found: list[Effect]) -> dict[str, Effect]:
    """The largest error of any layer, by what it is of; NaN is the largest."""
    return {e.of: e for e in sorted(found, key=lambda e: e.error if math.isfinite(e.error) else math.inf)}


def in_words(found: list[Effect], break_it: BreakIt, step: int) -> str:
    """One line. If the failure acts: the largest error and its layer. If it sleeps: when it acts and what wakes it."""
    failures = {name: FAILURES[name] for name in break_it.label.split("+") if name in FAILURES}
    who = f"{break_it.label.partition('+gain_')[0]} at step {step}"
    if not found:
        return f"{who}: cannot be compared: attention's inputs are not finite, or sdpa drops weights"
    shown = worst(found).values()
    errors = ", ".join(f"{e.of} off by {e.error:.1e} in layer {e.layer} (whole: {e.of_whole:.1e})" for e in shown)
    if any(e.more_than_rounding for e in found):
        return f"{who} acts: {errors}"
    wakes = (f"it acts {x.acts}: python train.py break_it={name} {x.wakes}" for name, x in failures.items())
    return "; ".join([f"{who} sleeps: {errors}", *wakes])
