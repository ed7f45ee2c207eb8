"""Tells whether a failure acts or sleeps. A failure sleeps while the line that it takes out would change nothing.

    found = effects(record(model, x, y, documents))     the errors of o and of the gradients, of each call
    acts(found, cfg.break_it)                           whether they are larger than rounding
    in_words(found, cfg, step, headroom)                the same in a sentence, and what wakes a failure that sleeps

Each call of a broken model is computed twice more from the same q, k, v, do and dropout mask: by the whole algorithm in
the run's implementation and dtype, and by tiled in float64. The first is off by rounding alone. The failure acts if the
broken call is farther off than rounding explains. Memory is O(T), except in a run with naive.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from model.attention import attention
from model.break_it import FAILURES, BreakIt
from training.probe import Call
from training.settings import Config

LOOKS = (10, 100, 1000)  # the steps after the first at which a broken run looks again
BEYOND_ROUNDING = 3.0  # an error this many times the whole algorithm's acts; another order of sums gives less
# What they take out does nothing in the first tile of a row.
PER_TILE = {"no_rescale", "no_rescale_sum", "no_rescale_output", "local_mask", "unguarded_mask"}
EXACT = torch.finfo(torch.float32).eps  # the least error to compare with: for a row of one key the whole one has none


class Effect(NamedTuple):
    """The error of a call's o, or of its dq, dk and dv together: |x - right| / |right|."""

    layer: int
    of: str  # o | gradients
    broken: float
    whole: float  # the error of the whole algorithm: rounding
    same: bool  # broken and whole agree in every bit

    @property
    def more_than_rounding(self) -> bool:
        """True also for NaN and infinity."""
        return not self.broken <= BEYOND_ROUNDING * max(self.whole, EXACT)


def effects(calls: Sequence[Call]) -> list[Effect]:
    """For each call, recorded with gradients: the effect on o, then that on the gradients. Leaves out what cannot be
    compared: a right answer that is not finite, and sdpa with dropout, because only PyTorch knows its mask."""
    return [effect for call in calls for effect in effects_of(call)]


def effects_of(call: Call) -> Iterator[Effect]:
    if call.config.impl == "sdpa" and call.seed is not None:
        return
    wide = torch.float32 if call.q.device.type == "mps" else torch.float64
    right, whole = computed(call, "tiled", wide), computed(call, call.config.impl, call.q.dtype)
    broken = [call.o, *call.gradients]
    for of, part in (("o", slice(0, 1)), ("gradients", slice(1, 4))):
        if all(x.isfinite().all() for x in right[part]):
            same = all(map(torch.equal, broken[part], whole[part]))
            yield Effect(call.layer, of, distance(broken[part], right[part]), distance(whole[part], right[part]), same)


def computed(call: Call, impl: str, dtype: torch.dtype) -> list[Tensor]:
    """o, dq, dk and dv of the call, computed by the whole algorithm."""
    assert call.do is not None, "a call with gradients is wanted"
    q, k, v = (x.to(dtype).requires_grad_() for x in (call.q.detach(), call.k.detach(), call.v.detach()))
    config, whole = replace(call.config, impl=impl), call.break_it.mended
    with torch.enable_grad():
        o = attention(q, k, v, config, seed=call.seed, documents=call.documents, break_it=whole)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), call.do.to(dtype))]


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """|found - right| / |right| over several tensors together."""
    off = sum(float((x.to(r.dtype) - r).square().sum()) for x, r in zip(found, right, strict=True))
    return math.sqrt(off / max(sum(float(r.square().sum()) for r in right), 1e-300))


def acts(found: Sequence[Effect], break_it: BreakIt) -> bool:
    """Whether the failure changes more than rounding does. bf16_ties changes the rounding, so there any bit of o
    counts."""
    narrow = "bf16_ties" in break_it.broken and any(e.of == "o" and not e.same for e in found)
    return narrow or any(e.more_than_rounding for e in found)


def record_of(found: Sequence[Effect]) -> dict[str, float]:
    """The largest error of any layer, for metrics.jsonl; NaN if nothing could be compared."""
    record: dict[str, float] = {}
    for name, of in (("o", "o"), ("gradient", "gradients")):
        worst = largest(found, of)
        record |= {f"{name}_error": worst.broken if worst else math.nan}
        record |= {f"whole_{name}_error": worst.whole if worst else math.nan}
    return record


def in_words(found: Sequence[Effect], cfg: Config, step: int, headroom: float, stopped: bool = False) -> str:
    """One line. If the failure acts: the largest error, its layer, and what a training shows. If it sleeps: what wakes
    it. cfg: train.Config. headroom: the least of all layers, in nats. stopped: the run has ended here, so that neither
    is left to come."""
    names = [name for name in cfg.break_it.label.split("+") if name in FAILURES]
    who = "+".join(names)
    if not found:
        return (
            f"{who}: nothing can be compared at step {step}: attention's inputs are not finite, or sdpa drops weights"
        )
    o, gradients = largest(found, "o"), largest(found, "gradients")
    assert o is not None, "a call is compared by its o first"
    o_is_right = f"o is right (error {o.broken:.1e}, whole {o.whole:.1e})"
    if acts(found, cfg.break_it):
        what = f"o is rounded differently (error {o.broken:.1e}, whole {o.whole:.1e})"
        if o.more_than_rounding:
            what = f"o is {off(o)}"
        elif gradients and gradients.more_than_rounding:
            what = f"{o_is_right}, but dq, dk and dv are {off(gradients)}"
        shows = "" if stopped else f". What a training shows: {'; '.join(FAILURES[name].seen for name in names)}"
        return f"{who} takes effect at step {step}: {what}{shows}"
    rise = f", scores may still rise by {headroom:.1f} nats before exp overflows"
    left = rise if "no_max" in cfg.break_it.broken else ""
    later = [look for look in LOOKS if step < look <= cfg.steps]
    way = "to see an effect: " + " or ".join(
        f"python train.py break_it={name} {FAILURES[name].wakes}" for name in names
    )
    if all(has(cfg, FAILURES[name].wakes) for name in names):
        way = "these arguments need more steps" + (f"; the next look is at step {later[0]}" if later else "")
        T = cfg.model.context_length
        if PER_TILE.intersection(names) and (cfg.attention.impl == "naive" or T <= cfg.attention.block_n):
            tiles = f"attention=tiled attention.block_m={max(1, T // 4)} attention.block_n={max(1, T // 4)}"
            way = f"to see an effect, cut the {T} tokens into tiles: {tiles}"
    return f"{who} has no effect yet at step {step}: {o_is_right}{left}" + ("" if stopped else f"; {way}")


def largest(found: Sequence[Effect], of: str) -> Effect | None:
    """The first effect that is not finite, or else the largest; None if there is none."""
    those = [e for e in found if e.of == of]
    return next((e for e in those if not math.isfinite(e.broken)), max(those, key=lambda e: e.broken, default=None))


def off(effect: Effect) -> str:
    """The error in words, with its layer and the whole algorithm's error."""
    far = f"off by {100 * effect.broken:.2g} %" if effect.broken < 1 else f"off by {100 * effect.broken:.0f} %"
    far = far if math.isfinite(effect.broken) else "not finite"
    return f"{far} in layer {effect.layer} (whole: {effect.whole:.1e})"


def has(cfg: Config, wakes: str) -> bool:
    """Whether the run has all of these arguments. A larger score_gain counts too."""
    for key, value in (argument.split("=") for argument in wakes.split()):
        got, wanted = attrgetter(key)(cfg), yaml.safe_load(value)
        if got != wanted and not (key == "break_it.score_gain" and got > wanted):
            return False
    return True
