"""What can be taken out of attention by one name, a file of conf/break_it, in words: for breakit.py and the gallery."""

from typing import NamedTuple


class Failure(NamedTuple):
    switches: tuple[str, ...]  # of BreakIt, that are off
    removed: str
    seen: str
    why: str


FAILURES = {
    "no_max": Failure(
        ("subtract_max",),
        "the maximum",
        "nothing at all while scores are small; then NaN, and the run stops before the update",
        "exp(s) overflows float32 once s > 88.7, and inf / inf is NaN; tiled's and triton's fp16 weights do at 11.1",
    ),
    "no_rescale": Failure(
        ("rescale_sum", "rescale_output"),
        "the rescaling",
        "a loss that looks like one, and a model that is wrong",
        "earlier tiles stay on the scale of a smaller maximum and weigh too much; right where one tile holds all keys",
    ),
    "no_rescale_sum": Failure(
        ("rescale_sum",),
        "the rescaling of the sum",
        "no NaN, and an output that is too small; a young model learns around it",
        "the sum that the output is divided by keeps the weights of a smaller maximum",
    ),
    "no_rescale_output": Failure(
        ("rescale_output",),
        "the rescaling of the output",
        "no NaN, and an output that is several times too large; learns less",
        "the output keeps the weights of a smaller maximum, and the sum that it is divided by does not",
    ),
    "zero_init_max": Failure(
        ("start_low",),
        "the low start of the maximum",
        "nothing, while every row has a score above -87; from -104 down the row is 0 and learns nothing",
        "the maximum starts at 0 and stays there: every exp(s) underflows float32, and fp16 weights do from -9.7 down",
    ),
    "local_mask": Failure(
        ("global_mask",),
        "the tile's place in the mask",
        "a training and validation loss below what the text allows, and samples that make no sense",
        "row and column are compared within their tile: every tile but the first shows the future",
    ),
    "no_scale": Failure(
        ("scale_scores",),
        "1 / sqrt(D)",
        "no NaN; learns more slowly, which the first steps hardly show",
        "scores are sqrt(D) times as large, so that softmax picks one key and hardly passes on a gradient",
    ),
    "unguarded_mask": Failure(
        ("guard_empty_rows",),
        "the guard of empty rows",
        "NaN at the first step under a window; nothing in a causal mask alone",
        "a tile that is hidden from a row altogether leaves it m = -inf, and exp(-inf - -inf) is NaN",
    ),
    "stale_seed": Failure(
        ("same_seed",),
        "the dropout seed of the backward",
        "the first loss is right to the last bit; then the gradients' norm grows, and the loss with it",
        "the backward drops other weights than the forward did",
    ),
    "unrestored_seed": Failure(
        ("restore_seed",),
        "the dropout seed of a block computed again",
        "the first loss is right; learns less, which the first steps hardly show",
        "the gradients belong to another network than the loss",
    ),
    "bf16_ties": Failure(
        ("wide_output",),
        "sums of 32 bits",
        "nothing in float32, and nothing in one step of bf16; what is biased adds up over thousands of steps",
        "each tile's p v is rounded to 16 bits; where scores tie at the maximum all errors of o have one sign",
    ),
}
