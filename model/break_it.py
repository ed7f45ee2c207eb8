"""Switches that take lines out of attention on purpose, and words for what each removes and what you then see.

Each switch is read at the line that it removes: in model/attention.py (naive), model/tiled.py, model/mask.py,
model/gpt.py (restore_seed) and kernels/. Each failure has a name and a file in conf/break_it: `break_it=no_max`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from conf.keys import check, key


@dataclass
class BreakIt:
    """Takes a line out of the algorithm, to show what it is for. With every switch True the algorithm is whole."""

    # Without the maximum l, the sum of exp(s), overflows once the log-sum-exp of a row passes 88.7, the log of the
    # largest float32. If n keys have equal scores, this happens at a score of 88.7 - ln n. So long rows of equal scores
    # fail first. Then l = inf and o = finite / inf = 0, without an error. If acc or a weight overflows too, o is NaN. A
    # weight overflows at a score of 88.7. If |v| is above 1, acc may overflow while l does not, and o is infinite.
    # Below the limits nothing changes, so the failure can sleep for weeks. In naive (which has no acc), tiled and
    # triton.
    subtract_max: bool = key(True, "false: exp(s) without subtracting the row's maximum")
    # The running maximum starts at 0 and never falls below it. The result is right while each row has a score well
    # above -87. Near -87 exp(s) passes the smallest normal float32, and exp(s) v loses digits, earlier for a smaller v.
    # Once l is below this number, tiled's o shrinks, because step 6 divides by no less. From -104 down every exp(s) is
    # 0, so o is 0 and the row learns nothing; triton on a GPU takes exp(s) as 0 from -87 down. In tiled and triton
    # (naive has no running maximum).
    start_low: bool = key(True, "false: the running maximum starts at 0, not at the lowest number")
    # Without alpha the earlier tiles keep the scale of an older, smaller maximum and weigh too much. The output is
    # finite but wrong. The error grows with the scores, and training makes the scores larger. The output is right if
    # one tile holds all keys. In tiled and triton.
    rescale_sum: bool = key(True, "false: the sum of earlier tiles keeps the scale of an older maximum")
    rescale_output: bool = key(True, "false: the output of earlier tiles keeps the scale of an older maximum")
    # Without 1 / sqrt(D) the scores of normally distributed q and k have a standard deviation of sqrt(D), not 1.
    # Softmax then puts nearly all weight of most rows on one key, and passes on hardly any gradient there. In the other
    # rows dq and dk are too large, because the factor is missing in the backward too. Nothing is NaN. The loss falls
    # more slowly; in 100 steps you see that only with a larger score_gain. In all implementations.
    scale_scores: bool = key(True, "false: scores without 1 / sqrt(D), D the head size")
    # Without the tile's position the causal mask compares row and column numbers within each tile. A row then sees keys
    # of the future and misses keys of the past. Only the first tile is right, so all is right if one tile holds
    # everything. The training loss falls below what the text allows, and samples are rubbish. With block_m above
    # block_n more rows see the future. The gradients belong to the wrong mask. In tiled and triton (naive has no
    # tiles).
    global_mask: bool = key(True, "false: row and column are compared within their tile, and the future leaks")
    # Without the guards a row that sees no key has m = -inf, and exp(-inf - -inf) is NaN. With tiles this also happens
    # to a row that sees no key of its first tile, as under a window. The NaN spreads to dk and dv of every key in that
    # row's tiles. Harmless if each row sees a key of its first tile, as with a causal mask alone and T = T_k. In
    # naive, tiled and triton.
    guard_empty_rows: bool = key(True, "false: a row that sees nothing computes exp(-inf - -inf), which is NaN")
    # Without the same seed the backward drops other weights than the forward did. The first loss is right to the last
    # bit, but its gradients are wrong. Training is slow or diverges. In tiled and triton (naive keeps its
    # mask).
    same_seed: bool = key(True, "false: the backward drops other weights than the forward did")
    # With activation checkpointing the backward computes each block again (model/gpt.py). If the old seed is
    # not restored, the block draws a new dropout mask. The first loss is right, but its gradients belong to another
    # network. In all implementations.
    restore_seed: bool = key(True, "false: a block that is computed again draws another dropout mask")
    # Without wide sums each tile's p v is rounded to 16 bits before it is added. Keys that tie at the maximum have a
    # weight of exactly 1. If their values have one sign, the sum of two or more often lies halfway between two 16-bit
    # numbers, and the small weights of the other keys always push the rounding the same way. With three ties o is off
    # by 0.16 of its last digit on average. delta carries the error into dq and dk, and over thousands of steps the bias
    # adds up (Qiu and Yao 2025, arXiv 2510.04212). No effect in float32. In tiled and triton (naive rounds once, at
    # the end).
    wide_output: bool = key(True, "false: each tile's p v is rounded to 16 bits before it is added")
    score_gain: float = key(
        1.0, "multiplies the scores, so that a failure shows sooner", above=0, most=1e30, usual="1: as it is"
    )

    def __post_init__(self):
        check(self, "break_it.")
        # The switches that are off, for Problem.without. Computed here, so that torch.compile does not trace the loop.
        self.without = tuple(switch for switch in FAULTS if not getattr(self, switch))

    @property
    def label(self) -> str:
        """The name of what is broken, for banners, run names and tags; empty if nothing is."""
        parts = [FAULTS[switch] for switch in self.without]
        parts += [] if self.score_gain == 1.0 else [f"gain_{self.score_gain:g}"]
        return "+".join(parts).replace("no_rescale_sum+no_rescale_output", "no_rescale")


class Failure(NamedTuple):
    """A failure in words, for tables and pictures."""

    switches: tuple[str, ...]  # the fields of BreakIt that are off
    removed: str
    seen: str  # what the first 100 steps show, run with `wakes`
    why: str
    wakes: str  # arguments that wake it: python train.py break_it=NAME and these
    acts: str  # the condition under which it changes anything
    not_in_naive: str | None = None  # why naive has nothing to remove; None where it has


FAILURES = {
    "no_max": Failure(
        ("subtract_max",),
        "the maximum",
        "nothing for some 30 steps, while the scores grow; then NaN, and the run stops before the update. If a row has "
        "many equal scores, its o becomes 0 earlier, without an error",
        "a weight is now exp(s), and the largest float32 is exp(88.7). Suppose that n keys have the same score s. "
        "Their weights add up to l = n exp(s), which overflows when s passes 88.7 - ln n. If v is small, acc is still "
        "finite, and o = acc / l is 0. If acc overflows too, o is infinity divided by infinity, which is NaN. If v is "
        "large, acc overflows before l, and o is infinite. When s passes 88.7, each weight overflows, and o is NaN for "
        "any v. lse is then infinite, so the backward's weights exp(s - lse) are 0, and dv is wrong but finite. For "
        "fp16 inputs the weights of tiled and triton are fp16 numbers, which end at exp(11.1)",
        wakes="break_it.score_gain=100",
        acts="once l or acc of a row passes exp(88.7) (in fp16 also once a score passes 11.1)",
    ),
    "no_rescale": Failure(
        ("rescale_sum", "rescale_output"),
        "the rescaling",
        "the loss falls as usual for 50 steps, then rises; the scores keep growing; never NaN",
        "earlier tiles computed their weights with a smaller maximum. Without the rescaling these weights stay too "
        "large. With one tile of keys there is no earlier tile, and o is right",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
    ),
    "no_rescale_sum": Failure(
        ("rescale_sum",),
        "the rescaling of the sum l",
        "the loss falls as usual for 60 steps, then rises; the scores keep growing; never NaN",
        "l is the sum of the weights. Without the rescaling, the weights of earlier tiles enter l too large. So l is "
        "too large, and o = acc / l is too small",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, because it has one pass",
    ),
    "no_rescale_output": Failure(
        ("rescale_output",),
        "the rescaling of the output acc",
        "the loss falls as usual for 30 steps, then rises; o becomes several times too large; never NaN",
        "acc is the sum of the weights times v. Without the rescaling, the weights of earlier tiles enter acc too "
        "large. l is right. So o = acc / l is too large",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, because it has one pass",
    ),
    "zero_init_max": Failure(
        ("start_low",),
        "the low start of the running maximum",
        "rows of o are 0; at first the gradient norm is many times larger than in the unbroken run; the loss stays "
        "somewhat higher",
        "the running maximum m starts at 0 and can only grow. If all scores of a row are far below 0, m stays 0, "
        "and the weights exp(s) and their sum l are tiny. At the end tiled divides acc by max(l, exp(-87.3)), because "
        "a row without a key has l = 0. (exp(-87.3) is the smallest normal float32.) So a row with a smaller l is "
        "divided by too much, and its o is too small. If all scores of a row are below -104, all its weights are 0, "
        "and so is o. In fp16 the weights lose digits below a score of -9.7.\n\n"
        "The gradients are wrong, too. delta is the row sum of do * o. If o is too small, delta is too near 0. Then "
        "ds = p (dp - delta) is wrong, and so are dq and dk. If all weights are 0, the row has no gradient.\n\n"
        "In float32 a row with one score above -87.3 is right. So the command sets attention.window=1, which leaves "
        "each row a single score. The right ds of such a row is 0, so any other ds is an error",
        wakes="break_it.score_gain=1000 attention.window=1",
        acts="once the log-sum-exp of a row is below -87.3 (in fp16 once all its scores are below -9.7)",
        not_in_naive="naive has no running maximum",
    ),
    "local_mask": Failure(
        ("global_mask",),
        "the tile's position in the mask",
        "from step 50 on the training and the validation loss are far lower than in the unbroken run, because tokens "
        "see the future; the samples make no sense",
        "each tile counts its rows and columns from 0, and the causal mask compares these numbers. So rows see keys of "
        "the future",
        wakes="attention.block_m=128 attention.block_n=32",
        acts="where the rows or the keys need several tiles",
        not_in_naive="naive has no tiles",
    ),
    "no_scale": Failure(
        ("scale_scores",),
        "1 / sqrt(D)",
        "from step 50 on the loss is somewhat higher than in the unbroken run; never NaN",
        "the scores are sqrt(D) times too large. So softmax puts most of a row's weight on few keys, and with large "
        "scores nearly all on one. Then ds = p (dp - delta) is nearly 0, and the row hardly learns to look at another "
        "key. In rows whose weight is still spread over several keys, dq and dk are too large, because the factor "
        "1 / sqrt(D) is missing in them, too",
        wakes="break_it.score_gain=10",
        acts="always; the effect grows with the head size D",
    ),
    "unguarded_mask": Failure(
        ("guard_empty_rows",),
        "the guard for rows that have seen no key",
        "NaN at the first step, before the first update",
        "without the guard m starts at -inf. As long as a row has seen no key, its m stays -inf, and exp(-inf - -inf) "
        "is NaN. With the guard, tiled and triton start m at the lowest finite float32, and naive replaces an m of "
        "-inf by 0. (In zero_init_max m starts at 0: that is finite, but not low)",
        wakes="attention.window=8",
        acts="where a row sees no key of the first tile that is computed for it, for example under a window",
    ),
    "stale_seed": Failure(
        ("same_seed",),
        "the dropout seed that the backward shares with the forward",
        "the first loss is right to the last bit; after 50 steps the loss and the gradient norm rise",
        "with another seed the backward drops other weights than the forward did",
        wakes="attention.dropout_p=0.5",
        acts="in the backward, with dropout",
        not_in_naive="naive keeps its dropout mask for the backward",
    ),
    "unrestored_seed": Failure(
        ("restore_seed",),
        "the reset of the dropout seed before a block is computed again",
        "the first loss is right, and for 50 steps the loss hardly differs from that of the unbroken run; at step 100 "
        "it is about 0.1 nats higher. dq, dk and dv are wrong from the first step on: metrics.jsonl records their "
        "error, as gradient_error",
        "with activation checkpointing the backward computes each block a second time. Without the reset, dropout then "
        "draws another mask. So the loss is that of one dropout mask, and the gradients are those of another",
        wakes="attention.dropout_p=0.5 model.activation_checkpointing=true",
        acts="in the backward, with dropout and activation checkpointing",
    ),
    "bf16_ties": Failure(
        ("wide_output",),
        "float32 for each tile's product p v",
        "nothing: over 100 steps the loss differs from that of the unbroken run by no more than noise. python "
        "breakit.py failure=bf16_ties shows the errors of o",
        "each tile's product p v is rounded to 16 bits before it is added. Keys whose scores are equal to the maximum "
        "have a weight of exactly 1, and their values are 16-bit numbers. The sum of two such values often needs one "
        "bit more than fits. Then it lies exactly halfway between two 16-bit numbers, and the other keys decide how it "
        "is rounded. If all values have the same sign, these keys move the sum a little further from 0, so it is "
        "rounded away from 0, every time. Over thousands of steps this bias may add up (Qiu and Yao 2025, arXiv "
        "2510.04212)",
        wakes="dtype=bf16",
        acts="in 16 bits, where several scores of a row are equal to its maximum",
        not_in_naive="naive has one product and rounds it once",
    ),
}

# The name of the failure for each switch, in the order of BreakIt's fields. (no_rescale turns off two.)
FAULTS = {
    field.name: name
    for field in fields(BreakIt)
    for name, failure in FAILURES.items()
    if failure.switches == (field.name,)
}
# The switches that an implementation does not have, and why.
LACKS: dict[str, Mapping[str, str]] = {
    "naive": {f.switches[0]: f.not_in_naive for f in FAILURES.values() if f.not_in_naive},
    "sdpa": dict.fromkeys(FAULTS.keys() - {"scale_scores", "restore_seed"}, "torch's sdpa cannot be broken"),
}
UNBROKEN = BreakIt()
