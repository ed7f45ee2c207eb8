"""The failures of model/break_it.py in the lab: predicted exactly, and found."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.problem import runs_kernels
from lab.prediction import FLOAT32, INF, Inputs, Prediction, Results, attend, scored, usual
from model import break_it
from model.break_it import BreakIt
from training.machine import DTYPES

HEAD = """| inputs | | o: predicted | o: found | dq, dk, dv: predicted | dq, dk, dv: found | difference |
|---|---|---|---|---|---|---|"""
EVERY, LAST = slice(None), slice(-1, None)


class Entry(NamedTuple):
    """The inputs, by what they are, on which a failure acts and on which it sleeps."""

    acts: dict[str, Inputs]
    sleeps: dict[str, Inputs]


USUAL, SEVERAL, SHORT = {"usual scores": usual()}, {"several tiles": usual()}, {"one tile": usual(T=16)}
UNSEEING = {"rows without a key": usual(T_k=248), "a window": usual(window=8)}
OVERFLOWS = {
    "one score of 106: its weight overflows": scored(8.0, 53.0, LAST, slice(40, 41)),
    "equal scores of 86: l overflows": scored(8.0, 43.0, EVERY, EVERY, v=2.0**-10),
    "one score of 88, values of 64: acc overflows": scored(8.0, 44.0, LAST, slice(40, 41), v=64.0),
}
FAILURES = {
    "no_max": Entry(OVERFLOWS, USUAL),
    **dict.fromkeys(("no_rescale", "no_rescale_sum", "no_rescale_output", "local_mask"), Entry(SEVERAL, SHORT)),
    "zero_init_max": Entry({"two keys with scores of -89": scored(8.0, -44.5, EVERY, EVERY, window=2)}, USUAL),
    "no_scale": Entry({"head size 16": usual()}, {"head size 1": usual(D=1)}),
    "unguarded_mask": Entry(UNSEEING, {"causal alone": usual()}),
    "stale_seed": Entry({"dropout": usual(seed=7, dropout_p=0.2)}, {"evaluation": usual(dropout_p=0.2)}),
}


class Line(NamedTuple):
    """A failure on one input: the errors |x - right| / |right| of o, and of dq, dk and dv together, each predicted and
    found; NaN: not finite. difference: between found and predicted, in units of what rounding allows, so at most 1."""

    failure: str
    inputs: str
    impl: str
    dtype: str
    o: list[float]
    gradients: list[float]
    difference: float

    def __str__(self) -> str:
        cells = [self.inputs, f"{self.impl}, {self.dtype}", *map(percent, self.o + self.gradients)]
        return f"| {' | '.join(cells)} | {self.difference:.2f} |"


def percent(x: float) -> str:
    return "NaN" if math.isnan(x) else "0" if x < 1e-12 else f"{x:.1e}" if x < 1e-3 else f"{100 * x:.1f} %"


def compare(failure: str, impl: str, dtype: str) -> Iterator[Line]:
    """Lines for all inputs of a failure. ValueError where the implementation has nothing to remove."""
    entry = FAILURES[failure]
    for name, inputs in (entry.acts | entry.sleeps).items():
        predicted, found, right, allowed = tried(failure, inputs, impl, dtype)
        difference = max(distance(found[x], predicted[x]) / allowed[x] for x in predicted)
        o, gradients = ([error(x, right, *names) for x in (predicted, found)] for names in (["o"], ["dq", "dk", "dv"]))
        yield Line(failure, name, impl, dtype, o, gradients, difference)


def table(names: list[str], dtype: str) -> list[Line]:
    """Prints and returns the lines of these failures, in every implementation that runs here."""
    on_gpu = torch.cuda.is_available() and runs_kernels(torch.device("cuda"))
    impls, lines = ["naive", "tiled"] + ["triton"] * on_gpu, list[Line]()
    for name in names:
        print(f"\n{name}: without {break_it.FAILURES[name].removed}\n\n{HEAD}")
        for impl in impls:
            try:
                for line in compare(name, impl, dtype):
                    lines.append(line)
                    print(line, flush=True)
            except ValueError as error:
                print(f"| {error} |")
    wrong = sum(not line.difference <= 1 for line in lines)
    print(f"\n{len(lines)} lines: {wrong} not as predicted (a difference above 1 is more than rounding)")
    return lines


def tried(failure: str, inputs: Inputs, impl: str, dtype: str) -> tuple[Results, Results, Results, dict]:
    """predicted, found, right; and by how much found may differ, as a share of the largest number predicted: twice the
    whole algorithm's error on the same inputs, plus twice the rounding of that number and of its score."""
    number = DTYPES[dtype]
    found = attend(inputs, impl, number, BreakIt(failure))
    prediction = Prediction(inputs, impl, number, BreakIt(failure).broken)
    right, whole = Prediction(inputs, impl, number).results(), attend(inputs, impl, number)
    rounding = torch.finfo(number).eps + float(prediction.s[prediction.s.isfinite()].abs().max()) * FLOAT32.eps
    allowed = {name: 2 * (distance(whole[name], right[name]) + rounding) for name in right}
    return prediction.results(), found, right, allowed


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest |found - wanted| / the largest |wanted|. Infinite if they are NaN or infinite in different places."""
    odd = [x.masked_fill(x.isfinite(), 0.0).nan_to_num(nan=0.5) for x in (found, wanted)]
    if not torch.equal(*odd):
        return INF
    off, size = ((x.nan_to_num(0.0, 0.0, 0.0).abs().max().item()) for x in (found - wanted, wanted))
    return off / max(size, FLOAT32.tiny)


def error(found: Results, right: Results, *names: str) -> float:
    """|found - right| / |right| of several results together; NaN if it is not finite."""
    if not all(name in found for name in names):
        return math.nan
    x, y = (torch.cat([some[name].flatten() for name in names]) for some in (found, right))
    off = float((x - y).norm() / y.norm())
    return off if off < INF else math.nan
