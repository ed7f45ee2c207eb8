"""Failures: lines that can be taken out of attention on purpose.

A failure has one name, from the command line to the line that it takes out: `break_it=no_max`, BreakIt.broken,
Problem.broken and `"no_max" in problem.broken`. Those lines are in model/attention.py (naive), model/tiled.py,
model/mask.py and kernels/. docs/break-it.md explains what each one shows.
"""

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from conf.keys import check, key


class Failure(NamedTuple):
    removed: str
    acts: str  # the condition under which it changes anything
    wakes: str  # arguments that wake it: python train.py break_it=NAME and these
    not_in_naive: str | None = None  # why naive has nothing to remove; None where it has


RESCALING = "once the maximum of a row grows after its first tile of keys", "attention.block_n=32"
ONE_PASS = "naive rescales nothing, because it has one pass"
FAILURES = {
    "no_max": Failure("the maximum", "once l or acc of a row passes exp(88.7) (in fp16 also once a score passes 11.1)",
        "break_it.score_gain=100"),
    "no_rescale": Failure("the rescaling", *RESCALING),
    "no_rescale_sum": Failure("the rescaling of the sum l", *RESCALING, ONE_PASS),
    "no_rescale_output": Failure("the rescaling of the output acc", *RESCALING, ONE_PASS),
    "zero_init_max": Failure("the low start of the running maximum",
        "once the log-sum-exp of a row is below -87.3 (in fp16 once all its scores are below -9.7)",
        "break_it.score_gain=1000 attention.window=1", "naive has no running maximum"),
    "local_mask": Failure("the tile's position in the mask", "where the rows or the keys need several tiles",
        "attention.block_m=128 attention.block_n=32", "naive has no tiles"),
    "no_scale": Failure("1 / sqrt(D)", "always; the effect grows with the head size D", "break_it.score_gain=10"),
    "unguarded_mask": Failure("the guard for rows that have seen no key",
        "where a row sees no key of the first tile that is computed for it, for example under a window",
        "attention.window=8"),
    "stale_seed": Failure("the dropout seed that the backward shares with the forward", "in the backward, with dropout",
        "attention.dropout_p=0.5", "naive keeps its dropout mask for the backward"),
}  # fmt: skip
PARTS = {"no_rescale": ("no_rescale_sum", "no_rescale_output")}  # a failure that is several others at once
# One of these is the mystery. All act with the keys of conf/break_it/mystery.yaml.
MYSTERIES = ["no_rescale", "no_rescale_sum", "no_rescale_output", "local_mask", "no_scale", "stale_seed"]


@dataclass
class BreakIt:
    """What is taken out of the algorithm, to show what it is for. With nothing broken the algorithm is whole."""

    broken: Any = key((), "the failures, by name: none, no_max, or several as [no_max,no_scale]; mystery: a hidden one")
    score_gain: float = key(1.0, "multiplies the scores, so that a failure shows sooner", above=0, most=1e30)
    seed: int = key(1, "chooses the failure of break_it=mystery", least=0)

    def __post_init__(self):
        check(self, "break_it.")
        names = list(self.broken) if isinstance(self.broken, list | tuple) else [self.broken]
        if unknown := set(names) - {"none", "mystery", *FAILURES}:
            raise ValueError(f"break_it={min(unknown)} is not known; choose none, mystery, {', '.join(FAILURES)}")
        parts = {part for name in names for part in PARTS.get(name, (name,))}
        self.broken = tuple(name for name in (*FAILURES, "mystery") if name in parts)

    @property
    def removed(self) -> tuple[str, ...]:
        """The failures as Problem.broken has them: `broken`, with the mystery's own name."""
        if "mystery" not in self.broken:
            return self.broken
        return BreakIt([*self.broken[:-1], Random(self.seed).choice(MYSTERIES)]).broken

    @property
    def label(self) -> str:
        """The name of what is broken, for banners, run names and tags; empty if nothing is."""
        parts = [*self.broken] if self.score_gain == 1.0 else [*self.broken, f"gain_{self.score_gain:g}"]
        return "+".join(parts).replace("no_rescale_sum+no_rescale_output", "no_rescale")


UNBROKEN = BreakIt()
