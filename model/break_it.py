"""Failures: lines that can be taken out of attention on purpose, each with its name and its words.

A failure has one name, from the command line to the line that it takes out: `break_it=no_max`, BreakIt.broken,
Problem.broken and `"no_max" in problem.broken`. Those lines are in model/attention.py (naive), model/tiled.py,
model/mask.py, model/gpt.py (unrestored_seed) and kernels/.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from conf.keys import check, key


class Failure(NamedTuple):
    """A failure in words, for --help, tables and pictures."""

    removed: str
    seen: str  # what the first 100 steps show, run with `wakes`
    why: str
    wakes: str  # arguments that wake it: python train.py break_it=NAME and these
    acts: str  # the condition under which it changes anything
    not_in_naive: str | None = None  # why naive has nothing to remove; None where it has
    drawn: tuple[str, str] | None = None  # its button on docs/explorer.html, and what it does; None: it has no story


FAILURES = {
    "no_max": Failure(
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
        drawn=("maximum", "m stays 0, and the weights are exp(s)."),
    ),
    "no_rescale": Failure(
        "the rescaling",
        "the loss falls as usual for 50 steps, then rises; the scores keep growing; never NaN",
        "earlier tiles computed their weights with a smaller maximum. Without the rescaling these weights stay too "
        "large. With one tile of keys there is no earlier tile, and o is right",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        drawn=("rescaling", "When m grows, l and acc are not multiplied by alpha."),
    ),
    "no_rescale_sum": Failure(
        "the rescaling of the sum l",
        "the loss falls as usual for 60 steps, then rises; the scores keep growing; never NaN",
        "l is the sum of the weights. Without the rescaling, the weights of earlier tiles enter l too large. So l is "
        "too large, and o = acc / l is too small",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, because it has one pass",
        drawn=("rescaling of l", "When m grows, l is not multiplied by alpha."),
    ),
    "no_rescale_output": Failure(
        "the rescaling of the output acc",
        "the loss falls as usual for 30 steps, then rises; o becomes several times too large; never NaN",
        "acc is the sum of the weights times v. Without the rescaling, the weights of earlier tiles enter acc too "
        "large. l is right. So o = acc / l is too large",
        wakes="attention.block_n=32",
        acts="once the maximum of a row grows after its first tile of keys",
        not_in_naive="naive rescales nothing, because it has one pass",
        drawn=("rescaling of acc", "When m grows, acc is not multiplied by alpha."),
    ),
    "zero_init_max": Failure(
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
        drawn=("low start of m", "m starts at 0 instead of \u2212\u221e."),
    ),
    "local_mask": Failure(
        "the tile's position in the mask",
        "from step 50 on the training and the validation loss are far lower than in the unbroken run, because tokens "
        "see the future; the samples make no sense",
        "each tile counts its rows and columns from 0, and the causal mask compares these numbers. So rows see keys of "
        "the future",
        wakes="attention.block_m=128 attention.block_n=32",
        acts="where the rows or the keys need several tiles",
        not_in_naive="naive has no tiles",
        drawn=(
            "tile's position",
            "The causal mask counts rows and keys from the corner of their tile, not from the start of the text.",
        ),
    ),
    "no_scale": Failure(
        "1 / sqrt(D)",
        "from step 50 on the loss is somewhat higher than in the unbroken run; never NaN",
        "the scores are sqrt(D) times too large. So softmax puts most of a row's weight on few keys, and with large "
        "scores nearly all on one. Then ds = p (dp - delta) is nearly 0, and the row hardly learns to look at another "
        "key. In rows whose weight is still spread over several keys, dq and dk are too large, because the factor "
        "1 / sqrt(D) is missing in them, too",
        wakes="break_it.score_gain=10",
        acts="always; the effect grows with the head size D",
        drawn=("scale", "The scores are bare products q k."),
    ),
    "unguarded_mask": Failure(
        "the guard for rows that have seen no key",
        "NaN at the first step, before the first update",
        "without the guard m starts at -inf. As long as a row has seen no key, its m stays -inf, and exp(-inf - -inf) "
        "is NaN. With the guard, tiled and triton start m at the lowest finite float32, and naive replaces an m of "
        "-inf by 0. (In zero_init_max m starts at 0: that is finite, but not low)",
        wakes="attention.window=8",
        acts="where a row sees no key of the first tile that is computed for it, for example under a window",
        drawn=(
            "guard for rows without keys",
            "A row that has seen no key has m = \u2212\u221e, and exp(\u2212\u221e \u2212 \u2212\u221e) is NaN.",
        ),
    ),
    "stale_seed": Failure(
        "the dropout seed that the backward shares with the forward",
        "the first loss is right to the last bit; after 50 steps the loss and the gradient norm rise",
        "with another seed the backward drops other weights than the forward did",
        wakes="attention.dropout_p=0.5",
        acts="in the backward, with dropout",
        not_in_naive="naive keeps its dropout mask for the backward",
    ),
    "unrestored_seed": Failure(
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
PARTS = {"no_rescale": ("no_rescale_sum", "no_rescale_output")}  # a failure that is several others at once
# What older versions had: a switch for each failure, false where it was taken out.
SWITCHES = {
    "subtract_max": "no_max",
    "start_low": "zero_init_max",
    "rescale_sum": "no_rescale_sum",
    "rescale_output": "no_rescale_output",
    "scale_scores": "no_scale",
    "global_mask": "local_mask",
    "guard_empty_rows": "unguarded_mask",
    "same_seed": "stale_seed",
    "restore_seed": "unrestored_seed",
    "wide_output": "bf16_ties",
}


@dataclass
class BreakIt:
    """What is taken out of the algorithm, to show what it is for. With nothing broken the algorithm is whole."""

    broken: Any = key((), "the failures, by name: none, no_max, or several as [no_max,no_scale]")
    score_gain: float = key(
        1.0, "multiplies the scores, so that a failure shows sooner", above=0, most=1e30, usual="1: as it is"
    )

    def __post_init__(self):
        check(self, "break_it.")
        names = list(self.broken) if isinstance(self.broken, list | tuple) else [self.broken]
        known = ["none", *FAILURES]
        for name in names:
            if name not in known:
                nearest = "".join(f"; did you mean {like}?" for like in get_close_matches(str(name), known, 1))
                raise ValueError(f"break_it={name} is not known; choose {', '.join(known)}{nearest}")
        parts = {part for name in names for part in PARTS.get(name, (name,))}
        self.broken = tuple(name for name in FAILURES if name in parts)  # as Problem.broken has them

    @property
    def label(self) -> str:
        """The name of what is broken, for banners, run names and tags; empty if nothing is."""
        parts = [*self.broken] if self.score_gain == 1.0 else [*self.broken, f"gain_{self.score_gain:g}"]
        return "+".join(parts).replace("no_rescale_sum+no_rescale_output", "no_rescale")

    @property
    def mended(self) -> "BreakIt":
        """The whole algorithm, with the same score_gain."""
        return BreakIt(score_gain=self.score_gain)


def of_older(kept: Any) -> Any:
    """The break_it of a configuration as it is written today, if an older version wrote it; else kept itself."""
    if not isinstance(kept, dict) or not any(kept.get(switch) in (True, False) for switch in SWITCHES):
        return kept
    rest = {key: value for key, value in kept.items() if type(value) is not bool or key not in SWITCHES}
    return rest | {"broken": [name for switch, name in SWITCHES.items() if kept.get(switch) is False]}


UNBROKEN = BreakIt()
