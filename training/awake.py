"""Tells whether a failure acts or sleeps. A failure sleeps while the line that it takes out would change nothing.

Each call of a broken model is computed twice more from the same q, k, v, do and dropout mask: by the whole algorithm in
the run's implementation and dtype, and by tiled in float64. The first is off by rounding alone. The failure acts if the
broken call is farther off than rounding explains. Memory is O(T), except in a run with naive.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention import attention
from model.break_it import FAILURES
from training.config import Config
from training.probe import Call, wide

STEPS = (1, 10, 100, 1000)  # after which a broken run checks whether the failure acts
BEYOND_ROUNDING = 3.0  # an error this many times the whole algorithm's acts; another order of sums gives less
EXACT = torch.finfo(torch.float32).eps  # the least error to compare with: for a row of one key the whole one has none


class Effect(NamedTuple):
    """The error of a call's o, or of its dq, dk and dv together: |x - right| / |right|."""

    layer: int
    of: str  # o | gradient
    broken: float
    whole: float  # the error of the whole algorithm: rounding

    @property
    def more_than_rounding(self) -> bool:
        """True also for NaN and infinity."""
        return not self.broken <= BEYOND_ROUNDING * max(self.whole, EXACT)


def effects(calls: Sequence[Call]) -> list[Effect]:
    """For each call, recorded with gradients: the effect on o, then that on the gradients. Leaves out what cannot be
    compared: a right answer that is not finite, and sdpa with dropout, because only PyTorch knows its mask."""
    found = []
    for call in (call for call in calls if call.config.impl != "sdpa" or call.seed is None):
        right, whole = computed(call, "tiled", wide(call.q)), computed(call, call.config.impl, call.q.dtype)
        broken = [call.o, *call.gradients]
        for of, part in (("o", slice(0, 1)), ("gradient", slice(1, 4))):
            if all(x.isfinite().all() for x in right[part]):
                errors = (distance(x[part], right[part]) for x in (broken, whole))
                found.append(Effect(call.layer, of, *errors))
    return found


def computed(call: Call, impl: str, dtype: torch.dtype) -> list[Tensor]:
    """o, dq, dk and dv of the call, computed by the whole algorithm."""
    assert call.do is not None, "a call with gradients is wanted"
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (call.q, call.k, call.v))
    config, whole = replace(call.config, impl=impl), replace(call.break_it, broken=())
    with torch.enable_grad():
        o = attention(q, k, v, config, seed=call.seed, documents=call.documents, break_it=whole)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), call.do.to(dtype))]


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """|found - right| / |right| over several tensors together."""
    off = sum(float((x.to(r.dtype) - r).square().sum()) for x, r in zip(found, right, strict=True))
    return math.sqrt(off / max(sum(float(r.square().sum()) for r in right), 1e-300))


def worst(found: Sequence[Effect]) -> dict[str, Effect]:
    """The largest error of any layer, by what it is of; NaN is the largest."""
    return {e.of: e for e in sorted(found, key=lambda e: e.broken if math.isfinite(e.broken) else math.inf)}


def in_words(found: Sequence[Effect], cfg: Config, step: int) -> str:
    """One line. If the failure acts: the largest error and its layer. If it sleeps: when it acts and what wakes it."""
    failures = {name: FAILURES[name] for name in cfg.break_it.label.split("+") if name in FAILURES}
    who = f"{'+'.join(failures)} at step {step}"
    if not found:
        return f"{who}: cannot be compared: attention's inputs are not finite, or sdpa drops weights"
    shown = worst(found).values()
    errors = ", ".join(f"{e.of} off by {e.broken:.1e} in layer {e.layer} (whole: {e.whole:.1e})" for e in shown)
    if any(e.more_than_rounding for e in found):
        return f"{who} acts: {errors}"
    wakes = (f"it acts {x.acts}: python train.py break_it={name} {x.wakes}" for name, x in failures.items())
    return f"{who} sleeps: {errors}; {'; '.join(wakes)}"
