"""Compares each failure with the whole algorithm, on q, k, v and do of a model's own attention calls.

    rows, shown = measure(calls, failures, impls)    the rows of the table, and the trials that the pictures show

Each symptom is first predicted (lab/trials.py), then observed. The right result is that of the whole algorithm in
float64, on inputs rounded to the dtype of the trial. A row is wrong if its error exceeds a budget: twice the error of
the same implementation when whole, plus twice the rounding of the largest number.

Shapes as in model/attention.py: q, o, do, dq (B, H, T, D), k, v, dk, dv (B, H_kv, T_k, D).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lab import trials
from lab.trials import tile_of
from model.attention import attention
from model.break_it import FAILURES
from model.tiled import INF, LOG2E, forward_tiles
from training.awake import distance
from training.machine import DTYPES
from training.probe import Call, Gauges, first_bad, gauges, worst

RESULTS = ("o", "dq", "dk", "dv")
SHOWN = {"bf16_ties": "bf16"}  # failures with pictures in another dtype than float32


class Shown(NamedTuple):
    """The last trial of a failure, which its pictures show: tiled, in float32 or the dtype in SHOWN."""

    trial: trials.Trial
    about: str
    tried: list[Call]
    seen: list["Seen"]  # one for each call


def left_out(calls: list[Call], failures: list[str], impls: list[str]) -> list[str]:
    """Lines that say what measure() leaves out, and why."""
    wanted = (trial for trial in trials.TRIALS if trial.failure in failures)
    found = (trials.lacks(trial, impl, dtype, calls[0]) for trial, dtype, impl in product(wanted, DTYPES, impls))
    return list(dict.fromkeys(why for why in found if why))


def measure(
    calls: list[Call], failures: list[str], impls: list[str], say: Callable[[dict], None] = lambda row: None
) -> tuple[list[dict], dict[str, Shown]]:
    """Returns the rows of the table, in the order of TRIALS, and for each failure the trial that shows it.

    calls: of a whole model, with gradients, in float32, with a causal mask alone (record() in training/probe.py).
    impls: a list of naive, tiled and triton. say: called with each row as soon as it is measured.
    """
    rows, shown = [], {}
    last = {trial.failure: trial for trial in trials.TRIALS if trial.failure in FAILURES}
    for trial, dtype in product((trial for trial in trials.TRIALS if trial.failure in failures), DTYPES):
        able = [impl for impl in impls if not trials.lacks(trial, impl, dtype, calls[0])]
        if not able:
            continue
        gain = trials.gain_of(trial, dtype, calls)
        prepared = [trials.call_of(trial, dtype, gain, call) for call in calls]
        measured = [gauges(call) for call in prepared]
        right = None
        for impl in able:
            tried = [replace(call, config=trials.config_of(impl, call, trial)) for call in prepared]
            right = right or [right_for(call) for call in tried]
            guess = trials.predicted(trial, impl, tried, measured, right)
            seen = [seen_of(call, r) for call, r in zip(tried, right, strict=True)]
            about = {"failure": trial.failure, "where": trial.where, "impl": impl, "dtype": dtype, "gain": gain}
            rows.append(about | row_of(guess, tried, seen, measured))
            say(rows[-1])
            if trial is last.get(trial.failure) and (impl, dtype) == ("tiled", SHOWN.get(trial.failure, "float32")):
                scores = "" if gain == 1.0 else f", scores x {gain:.3g}"
                shown[trial.failure] = Shown(trial, trial.where + scores, tried, seen)
    return rows, shown


def row_of(guess: str, tried: list[Call], seen: list["Seen"], measured: list[Gauges]) -> dict:
    """The cells of a row after failure, where, impl, dtype and gain. verdict: harmless (within the budget), silent
    (wrong but finite) or loud (not finite)."""
    symptom = observed(tried, seen)
    row: dict[str, Any] = {"tiles": "" if tried[0].config.impl == "naive" else "{} x {}".format(*tile_of(tried[0]))}
    row |= {"predicted": guess, "observed": symptom, "agrees": guess == symptom}
    row |= first_place(tried, seen, symptom)
    row |= {name: max(getattr(g, name) for g in measured) for name in ("max_score", "max_weight")}
    row["headroom"] = min(g.headroom for g in measured)
    for name in RESULTS:
        row[f"error_{name}"] = worst(max, (distance([s.found[name]], [s.right[name]]) for s in seen))
    finite = all(bool(s.found[name].isfinite().all()) for s in seen for name in RESULTS)
    return row | {"verdict": "loud" if not finite else "harmless" if symptom == trials.NONE else "silent"}


# --- Measuring a trial -----------------------------------------------------------------------------------------------


def results_of(call: Call) -> dict[str, Tensor]:
    """o, dq, dk, dv and lse."""
    assert call.do is not None, "a call with gradients is wanted"
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    seeds = iter([call.seed, None if call.seed is None else call.seed + 1])

    def forward(q, k, v):
        return attention(q, k, v, call.config, seed=next(seeds), break_it=call.break_it, return_lse=True)

    if "unrestored_seed" not in call.break_it.broken:
        o, lse = forward(q, k, v)
    else:  # as redrawn() in model/recompute.py: the backward computes the call again and draws another seed
        o, lse = checkpoint(forward, q, k, v, use_reentrant=False, preserve_rng_state=False)
    found = o, *torch.autograd.grad(o, (q, k, v), call.do)
    return {name: x.detach() for name, x in zip(RESULTS, found, strict=True)} | {"lse": lse.detach()}


class Seen(NamedTuple):
    """Results of one layer, by the names in RESULTS."""

    found: dict[str, Tensor]
    usual: dict[str, Tensor]  # of the same implementation when whole
    right: dict[str, Tensor]  # float64
    allowed: dict[str, float]  # the largest difference that is allowed


def right_for(call: Call) -> dict[str, Tensor]:
    """The whole algorithm in float64, on the same rounded inputs."""
    wide = {name: getattr(call, name).double() for name in ("q", "k", "v", "do")}
    return results_of(replace(call, config=replace(call.config, impl="naive"), break_it=call.break_it.mended, **wide))


def seen_of(call: Call, right: dict[str, Tensor]) -> Seen:
    """The results of a call and their budgets, which come from the error of the same implementation when whole. On a
    trained model tiled's and triton's gradients can be off by more than twice naive's error (LOG.md)."""
    usual, eps = results_of(replace(call, break_it=call.break_it.mended)), torch.finfo(call.q.dtype).eps
    errors = {name: float(row_errors(usual[name], right[name]).max()) for name in RESULTS}
    allowed = {name: 2 * (errors[name] + eps * float(right[name].abs().max())) for name in RESULTS}
    return Seen(results_of(call), usual, right, allowed)


def observed(tried: list[Call], seen: list[Seen]) -> str:
    """The symptom that the results show. It does not look at which failure it is."""
    if not all(bool(s.found["o"].isfinite().all()) for s in seen):
        # With lse +inf or NaN, the sum of the weights failed first. (A row that sees nothing has lse = -inf, rightly.)
        sums = torch.stack([((s.found["lse"] == INF) | s.found["lse"].isnan()).any() for s in seen])
        return trials.NAN if bool(sums.any()) else trials.OVERFLOW
    wrong = {name: any(bool(beyond(s, name).any()) for s in seen) for name in RESULTS}
    if wrong["o"]:
        return trials.LEAK if any(leaks(call) for call in tried) else trials.SILENT
    return trials.GRADIENT if any(wrong.values()) else trials.NONE


def beyond(seen: Seen, name: str) -> Tensor:
    """Which rows exceed the budget, bool (B, H or H_kv, rows)."""
    return row_errors(seen.found[name], seen.right[name]) > seen.allowed[name]


@torch.no_grad()
def leaks(call: Call) -> bool:
    """Whether a change of the second half of v changes the first half of o."""
    half = call.q.shape[2] // 2
    v = call.v.clone()
    v[:, :, half:] += 1
    first, second = (
        attention(call.q, call.k, x, call.config, seed=call.seed, break_it=call.break_it) for x in (call.v, v)
    )
    return not torch.equal(first[:, :, :half], second[:, :, :half])


def row_errors(found: Tensor, right: Tensor) -> Tensor:
    """The largest |found - right| of each row, float64 (B, H, T); inf where it is NaN. found, right: (B, H, T, D)."""
    return (found.double() - right).abs().amax(-1).nan_to_num(nan=INF)


def first_place(tried: list[Call], seen: list[Seen], symptom: str) -> dict:
    """The first wrong place in the order of computing: layer, head, query tile and, in the forward, key tile."""
    names = ("layer", "head", "query_tile", "key_tile")
    for call, s in zip(tried, seen, strict=True):
        if symptom in (trials.NAN, trials.OVERFLOW):
            if (place := first_bad(call)) is not None:
                return {name: getattr(place, name) for name in names}
            continue
        bad = beyond(s, "dq" if symptom == trials.GRADIENT else "o")
        if not bad.any():
            continue
        M = tile_of(call)[0]
        query_tile = int(bad.any(0).any(0).nonzero()[0]) // M
        b, h, row = bad[:, :, query_tile * M : (query_tile + 1) * M].nonzero()[0].tolist()
        key_tile = None if symptom == trials.GRADIENT else first_key_tile(call, s, b, h, query_tile * M + row)
        return dict(zip(names, (call.layer, h, query_tile, key_tile), strict=True))
    return dict.fromkeys(names)


def first_key_tile(call: Call, seen: Seen, b: int, h: int, row: int) -> int | None:
    """The first tile of keys after which acc / l of a row exceeds its budget; None if it never does."""
    whole = replace(call, break_it=call.break_it.mended)
    right, allowed = None, seen.allowed["o"]
    by_tile = {tile: o for tile, _, _, o in walk(whole, b, h, row)}
    for tile, _, _, o in walk(call, b, h, row):
        right = by_tile.get(tile, right)
        if right is None or not bool((o - right).abs().max() <= allowed):
            return tile
    return None


@torch.no_grad()
def walk(call: Call, b: int, h: int, row: int) -> Iterator[tuple[int, float, float, Tensor]]:
    """After each tile of a row: the number of the key tile, m (natural logarithm), l and acc / l (D,), as in tiled."""
    H, H_kv = call.q.shape[1], call.k.shape[1]
    key_head, g = divmod(h, H // H_kv)
    for rows, tile, state in forward_tiles(call.q, call.k, call.v, call.problem(), call.loops):
        if row in rows and tile is not None:
            m, l, acc = (x[b * H_kv + key_head, g * len(rows) + row - rows.start] for x in state)
            yield tile.columns.start // call.loops.block_n, float(m) / LOG2E, float(l), acc.double() / l.double()
