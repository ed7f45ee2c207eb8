"""What can be taken out of attention on purpose: the switches, and in words what each removes and what is seen then.

A switch is read where the thing that it removes stands: in model/attention.py (naive), model/tiled.py, model/mask.py,
model/gpt.py (restore_seed) and kernels/. Each failure has a name, a file of conf/break_it: `break_it=no_max`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass
class BreakIt:
    """Takes a line out of the algorithm, to see what it was for. True is whole; every switch stands where it acts."""

    # Without the maximum the sum of exp(s) overflows at a log-sum-exp of 88.7, the log of the largest float32. Where n
    # keys score alike, that is a score of 88.7 - ln n, so long contexts with flat rows meet it first. Then l = inf, and
    # o is finite / inf = 0 without a word, or NaN where acc or a weight overflows too, as a weight does from 88.7 on.
    # Below that nothing happens at all, which is why the fault can sleep for weeks. naive, tiled, triton.
    subtract_max: bool = True  # false: exp(s) without the row's maximum taken off first
    # Without a low start, at 0, the running maximum never falls below 0. Right while each row has a score well above
    # -87, where exp(s) falls below the smallest normal float32. Near that exp(s) times v loses digits, the earlier the
    # smaller v is; below it o shrinks; from -104 down every exp(s) is 0, and o with it: the row sees nothing, and
    # learns nothing. tiled, triton (naive has no running maximum).
    start_low: bool = True  # false: the running maximum starts at 0, not at the lowest number
    # Without alpha the earlier tiles stay on the scale of an older, smaller maximum and weigh too much. Never NaN: the
    # output stays finite and wrong, the more the larger the scores, and a training makes the scores larger; right where
    # one tile holds all keys. tiled, triton.
    rescale_sum: bool = True  # false: the sum of earlier tiles stays on the scale of an older maximum
    rescale_output: bool = True  # false: the output of earlier tiles stays on the scale of an older maximum
    # Without 1 / sqrt(D) the scores of normal q and k have deviation sqrt(D), not 1: softmax picks one key and passes
    # on hardly a gradient. Nothing is NaN; the loss falls more slowly, which 100 steps show only under a gain. All
    # implementations.
    scale_scores: bool = True  # false: scores without 1 / sqrt(D), D the head size
    # Without the tile's place a causal mask compares row and column within their tile, in every tile: a row sees keys
    # of the future and misses keys of the past. Right in the first tile only, and so right where one tile holds all.
    # The training loss falls below what the text allows and samples are rubbish, the more rows lie as deep in their
    # tile as its keys reach (block_m above block_n). Gradients are those of the wrong mask. tiled, triton (naive has no
    # tiles).
    global_mask: bool = True  # false: row and column are compared within their tile, and the future leaks
    # Without guards a row that sees nothing has m = -inf, and exp(-inf - -inf) is NaN; in tiles so has one whose first
    # tile is hidden from it altogether, as under a window. Its NaN enters dk and dv of every key that was computed with
    # it. Harmless where each row sees a key of its first tile: causal with T = T_k and nothing else. All three.
    guard_empty_rows: bool = True  # false: a row that sees nothing computes exp(-inf - -inf), which is NaN
    # Without the same seed the backward drops other weights than the forward did: the first loss is right to the last
    # bit, its gradients are not, and training is slow or goes astray. tiled, triton (naive keeps its mask).
    same_seed: bool = True  # false: the backward drops other weights than the forward did
    # Without restoring it, activation checkpointing draws a new mask when it computes a block again (model/gpt.py): the
    # first loss is right, its gradients belong to another network than the one it came from. All implementations.
    restore_seed: bool = True  # false: a block that is computed again draws another dropout mask
    # Without wide sums each tile's p v is rounded to 16 bits before it is added. Weights that tie at the maximum are
    # exactly 1, sums of two, three, .. values of one sign lie halfway between two numbers, and the small rest always
    # pushes them the same way: o is off by a tenth of its last digit in the mean, delta carries it into dq and dk, and
    # what is biased adds up over thousands of steps (Qiu and Yao 2025, arXiv 2510.04212). Nothing in float32. tiled,
    # triton (naive rounds once, at the end).
    wide_output: bool = True  # false: each tile's p v is rounded to 16 bits before it is added
    score_gain: float = 1.0  # multiplies the scores, to bring a failure on; 1 leaves attention as it is

    def __post_init__(self):
        if not 0 < self.score_gain <= 1e30:
            raise ValueError(f"break_it.score_gain={self.score_gain} is outside (0, 1e30]; 1 changes nothing")
        # The switches that are off, for Problem.without. Here, because torch.compile need not follow the loop.
        self.without = tuple(switch for switch in FAULTS if not getattr(self, switch))

    @property
    def label(self) -> str:
        """Names what is broken, for banners, run names and tags; empty when nothing is."""
        parts = [FAULTS[switch] for switch in self.without]
        parts += [] if self.score_gain == 1.0 else [f"gain_{self.score_gain:g}"]
        return "+".join(parts).replace("no_rescale_sum+no_rescale_output", "no_rescale")


class Failure(NamedTuple):
    """A failure in words, for tables and pictures."""

    switches: tuple[str, ...]  # of BreakIt, that are off
    removed: str
    seen: str  # in the first 100 steps of the command below
    why: str
    wakes: str  # arguments of train.py that bring it on: python train.py break_it=NAME and these
    acts: str  # when it does anything at all
    not_in_naive: str | None = None  # why naive has nothing to remove


FAILURES = {
    "no_max": Failure(
        ("subtract_max",),
        "the maximum",
        "nothing for some 30 steps, while the scores grow; then NaN, and the run stops before the update. Rows of many "
        "keys alike become 0 before that, without a word",
        "the sum of exp(s) overflows float32 at 88.7 - ln(keys alike), and x / inf is 0; exp(s) itself does at 88.7, "
        "and inf / inf is NaN; tiled's and triton's fp16 weights do at 11.1",
        wakes="break_it.score_gain=100",
        acts="once the log-sum-exp of a row passes 88.7 (in fp16 also once a score passes 11.1)",
    ),
    "no_rescale": Failure(
        ("rescale_sum", "rescale_output"),
        "the rescaling",
        "the loss falls as usual for 40 steps, then rises, and the scores grow without end; never NaN",
        "earlier tiles stay on the scale of a smaller maximum and weigh too much; right where one tile holds all keys",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
    ),
    "no_rescale_sum": Failure(
        ("rescale_sum",),
        "the rescaling of the sum",
        "the loss falls as usual for 60 steps, then rises, and the scores grow without end; never NaN",
        "the sum that the output is divided by keeps the weights of a smaller maximum",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, it has one pass",
    ),
    "no_rescale_output": Failure(
        ("rescale_output",),
        "the rescaling of the output",
        "the loss falls as usual for 30 steps, then rises; o grows several times too large; never NaN",
        "the output keeps the weights of a smaller maximum, and the sum that it is divided by does not",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, it has one pass",
    ),
    "zero_init_max": Failure(
        ("start_low",),
        "the low start of the maximum",
        "rows of 0; the first gradients' norm is many times the whole run's, and the loss stays somewhat above",
        "the maximum starts at 0 and stays there: every exp(s) underflows float32, and fp16 weights do from -9.7 down",
        wakes="break_it.score_gain=1000 attention.window=1",
        acts="once all scores of a row are below -87 (in fp16 below -9.7)",
        not_in_naive="naive has no running maximum",
    ),
    "local_mask": Failure(
        ("global_mask",),
        "the tile's place in the mask",
        "after 50 steps a training and validation loss below what the text allows; samples that make no sense",
        "row and column are compared within their tile: every tile but the first shows the future",
        wakes="attention.block_m=128 attention.block_n=32",
        acts="where the rows or the keys take several tiles",
        not_in_naive="naive has no tiles",
    ),
    "no_scale": Failure(
        ("scale_scores",),
        "1 / sqrt(D)",
        "from step 50 on the loss is somewhat above the whole run's; never NaN",
        "scores are sqrt(D) times as large, so that softmax picks one key and hardly passes on a gradient",
        wakes="break_it.score_gain=10",
        acts="always, and the more the larger the head size D is",
    ),
    "unguarded_mask": Failure(
        ("guard_empty_rows",),
        "the guard of empty rows",
        "NaN at the first step, before the first update",
        "a tile that is hidden from a row altogether leaves it m = -inf, and exp(-inf - -inf) is NaN",
        wakes="attention.window=8",
        acts="where the first tile of keys computed for a row hides all its keys from it, as under a window",
    ),
    "stale_seed": Failure(
        ("same_seed",),
        "the dropout seed of the backward",
        "the first loss is right to the last bit; after 50 steps the loss rises, and the gradients' norm with it",
        "the backward drops other weights than the forward did",
        wakes="attention.dropout_p=0.5",
        acts="in the backward, with dropout",
        not_in_naive="naive keeps its dropout mask for the backward",
    ),
    "unrestored_seed": Failure(
        ("restore_seed",),
        "the dropout seed of a block computed again",
        "the first loss is right, and 100 steps hardly show it: look at the gradients' error, gradient_error",
        "the gradients belong to another network than the loss",
        wakes="attention.dropout_p=0.5 model.activation_checkpointing=true",
        acts="in the backward, with dropout and activation checkpointing",
    ),
    "bf16_ties": Failure(
        ("wide_output",),
        "sums of 32 bits",
        "no loss shows it for thousands of steps: look at the errors of o, python breakit.py failure=bf16_ties",
        "each tile's p v is rounded to 16 bits; where scores tie at the maximum all errors of o have one sign",
        wakes="dtype=bf16",
        acts="in 16 bits, where several scores of a row tie at the maximum",
        not_in_naive="naive rounds its one product once",
    ),
}

# The failure's name when a switch is off, in the order of BreakIt's fields. (no_rescale is two at once.)
FAULTS = {
    field.name: name
    for field in fields(BreakIt)
    for name, failure in FAILURES.items()
    if failure.switches == (field.name,)
}
# The switches that an implementation has nothing to remove for, and why.
LACKS: dict[str, Mapping[str, str]] = {
    "naive": {f.switches[0]: f.not_in_naive for f in FAILURES.values() if f.not_in_naive},
    "sdpa": dict.fromkeys(FAULTS.keys() - {"scale_scores", "restore_seed"}, "torch's sdpa cannot be broken"),
}
UNBROKEN = BreakIt()
