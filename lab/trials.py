"""The trials of each failure: their inputs, and the symptom that theory predicts.

Shapes as in model/attention.py: q, do (B, H, T, D), k, v (B, H_kv, T_k, D), lse (B, H, T).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from model.abilities import ABILITIES, check_switches, why_not
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from training.machine import DTYPES
from training.probe import LIMIT, Call, Gauges, gauges

# The symptoms. overflow: acc, the sum of weights times v, overflows, but l does not. leak: the past depends on the
# future.
NAN, OVERFLOW, SILENT, LEAK, GRADIENT, NONE = "NaN", "overflow", "silent", "leak", "gradient only", "none here"
SEED = 20240229  # of dropout; any number will do
TILES_A_SIDE = 8  # tiles of tiled along the tokens


class Trial(NamedTuple):
    """One input on which a failure is tried. gain: the name of the factor on the scores, as gain_of() has it."""

    failure: str
    where: str
    gain: str = "real"  # real | raised | past | near | low
    one_tile: bool = False  # tiled takes one tile of keys
    dropout_p: float = 0.0
    window: bool = False  # a window of half a tile
    cut: bool = False  # the first half tile of keys is cut off, so its rows see no key
    flat: bool = False  # rows of nearly equal scores, and a small v


# The last trial of a failure shows it, and its pictures show that trial. The trials before it show where it is harmless
# or acts otherwise.
TRIALS = [
    Trial("none", "the model's own scores"),
    Trial("none", "dropout", dropout_p=0.2),
    Trial("no_max", "the model's own scores"),
    Trial("no_max", "equal scores: l overflows", "near", flat=True),
    Trial("no_max", "one weight overflows", "past"),
    *(
        trial
        for name in ("no_rescale", "no_rescale_sum", "no_rescale_output")
        for trial in (Trial(name, "one tile of keys", "raised", one_tile=True), Trial(name, "several tiles", "raised"))
    ),
    Trial("zero_init_max", "the model's own scores"),
    Trial("zero_init_max", "a row whose weights are all 0", "low"),
    Trial("local_mask", "one tile of keys and rows", one_tile=True),
    Trial("local_mask", "several tiles"),
    Trial("no_scale", "the model's own scores", "raised"),
    Trial("unguarded_mask", "causal alone"),
    Trial("unguarded_mask", "rows without a key", cut=True),
    Trial("unguarded_mask", "a window", window=True),
    Trial("stale_seed", "dropout", dropout_p=0.2),
    Trial("unrestored_seed", "dropout", dropout_p=0.2),
    Trial("bf16_ties", "the model's own scores"),
]


def available(device: torch.device) -> list[str]:
    """The implementations that can be broken on this device."""
    return ["naive", "tiled"] + ([] if why_not("triton", {}, device) else ["triton"])


def lacks(trial: Trial, impl: str, dtype: str, call: Call) -> str | None:
    """The reason why this row is left out, or None."""
    if impl == "triton" and (dtype == "bf16" or trial.failure == "zero_init_max") and not as_a_gpu(call.q.device):
        return "triton: its interpreter does not compute bf16 and subnormal numbers as a GPU does; left out"
    if impl == "triton" and trial.one_tile:
        return "triton: it chooses its own tiles, so it cannot take all keys in one; left out"
    config = AttentionConfig(impl, softmax_scale=call.config.softmax_scale, dropout_p=trial.dropout_p)
    for name in BreakIt(trial.failure).broken:
        if why := ABILITIES[impl].lacks.get(name):
            return f"{trial.failure}: {why}; left out"
    try:
        check_switches(config, BreakIt(trial.failure))
    except ValueError as error:  # for example a run with its own softmax_scale, which has no 1 / sqrt(D) to leave out
        return f"{error}; left out"
    return None


def as_a_gpu(device: torch.device) -> bool:
    """Whether triton computes bf16 and subnormal numbers as a GPU does. Triton's interpreter multiplies the bits of
    bf16 as integers and truncates instead of rounding, so this computes a mean that lies halfway between two bf16
    numbers. Its exp2 returns subnormal numbers, where a GPU's returns 0; what mends one (tests/interpreter.py) mends
    both, so bf16 alone is asked."""
    if device.type == "cuda":
        return True
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16)
    v = 1 + torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16) / 128
    o = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), AttentionConfig("triton"))
    return bool((o.float() == 1 + 2 / 128).all())  # 1 + 1.5 / 128, rounded to even


def call_of(trial: Trial, dtype: str, gain: float, call: Call) -> Call:
    """The call with the inputs of the trial, rounded to dtype. For `low`, q is negated if that gives lower scores."""
    assert call.do is not None, "a call with gradients is wanted"
    block = max(1, call.q.shape[2] // TILES_A_SIDE)
    q, k, v = call.q, call.k, call.v
    if trial.gain == "low" and lowest(replace(call, q=-q)) < lowest(call):
        q = -q
    if trial.flat:
        q, k, v = flattened(call)
    if trial.cut:
        k, v = (x[:, :, block // 2 :] for x in (k, v))
    # Scaled like fp16's gradient scaler does: gradients of a mean over tokens are too small for fp16.
    scale = 2.0 ** -math.floor(math.log2(float(call.do.abs().max()) or 1.0))
    q, k, v, do = (x.to(DTYPES[dtype]) for x in (q, k, v, call.do * scale))
    config = AttentionConfig(
        "naive",
        softmax_scale=call.config.softmax_scale,
        window=max(1, block // 2) if trial.window else None,
        dropout_p=trial.dropout_p,
    )
    seed = torch.tensor(SEED + call.layer, device=q.device) if trial.dropout_p else None
    return Call(call.layer, q, k, v, q, config, BreakIt(trial.failure, gain), seed, None, do)


def config_of(impl: str, call: Call, trial: Trial) -> AttentionConfig:
    """The call's configuration with the implementation and its tiles. For naive, places are given in tiled's tiles."""
    T = call.q.shape[2]
    block = max(1, T // TILES_A_SIDE)
    tile = (T, T) if trial.one_tile else (block, block)
    if impl == "triton":
        from kernels.sizes import tiles_for

        found = tiles_for("forward", call.q, trial.dropout_p > 0)
        tile = found.BLOCK_M, found.BLOCK_N
    return replace(call.config, impl=impl, block_m=tile[0], block_n=tile[1])


def flattened(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with flat rows. Every query is the first query of its key head, and every key is nearly the same
    vector, so all scores are above 0. v is small, so that l overflows long before acc."""
    groups = call.q.shape[1] // call.k.shape[1]
    first = call.q[:, ::groups, :1]
    q = first.repeat_interleave(groups, dim=1).expand_as(call.q)
    return q, first + call.k / 1024, call.v / 1024


def lowest(call: Call) -> float:
    """The lowest log-sum-exp of any row, or 0 if none is below 0."""
    least = gauges(replace(call, break_it=BreakIt("zero_init_max"))).min_l
    return min(0.0, math.log(max(least, 1e-300)))


def gain_of(trial: Trial, dtype: str, calls: list[Call]) -> float:
    """The factor on the scores of the trial.

    real: 1.
    raised: makes the largest score 10; 1 if it is larger already.
    past: makes the largest score 1.2 times the logarithm of the dtype's largest number.
    near: makes the largest score the logarithm of float32's largest number, less half that of the number of keys.
    low: makes the lowest log-sum-exp of a row 1.2 times that at which all its weights round to 0.
    """
    if trial.gain == "real":
        return 1.0
    number = torch.finfo(DTYPES[dtype])
    if trial.gain == "low":
        low = min(lowest(replace(call, q=q)) for call in calls for q in (call.q, -call.q))
        smallest = number.smallest_normal * number.eps / 2 if dtype == "fp16" else 2.0**-150
        return 1.2 * math.log(smallest) / min(low, -1e-6)
    if trial.flat:
        flat = [flattened(call) for call in calls]
        calls = [replace(call, q=q, k=k, v=v) for call, (q, k, v) in zip(calls, flat, strict=True)]
    top = max(gauges(replace(call, break_it=UNBROKEN)).max_score for call in calls)
    if trial.gain == "near":
        return (LIMIT - math.log(calls[0].k.shape[2]) / 2) / top
    return max(1.0, 10 / top) if trial.gain == "raised" else 1.2 * math.log(number.max) / top


def predicted(
    trial: Trial, impl: str, tried: list[Call], measured: list[Gauges], right: list[dict[str, Tensor]]
) -> str:
    """The symptom that theory predicts from the inputs of the calls and from their tiles, before any broken call has
    run. measured: the gauges of each call. right: o and lse of the whole algorithm in float64, of each call."""
    top, least = max(g.max_score for g in measured), min(g.min_l for g in measured)
    (M, N), T, T_k = tile_of(tried[0]), tried[0].q.shape[2], tried[0].k.shape[2]
    # naive divides the weights in float32 before it rounds them; the others round exp(s) itself
    held = torch.finfo(torch.float32 if impl == "naive" else tried[0].q.dtype)
    several = impl != "naive" and N < T_k
    match trial.failure:
        case "no_max":
            return without_max(impl, top, least, held, right)
        case "zero_init_max":
            return SILENT if least < held.smallest_normal else NONE
        case "no_rescale" | "no_rescale_sum" | "no_rescale_output":
            return SILENT if several else NONE
        case "local_mask":
            return LEAK if several else SILENT if M < T else NONE
        case "no_scale":
            return SILENT
        case "unguarded_mask":
            window = tried[0].config.window
            return NAN if T > T_k or (window and impl != "naive" and hidden_first_tile(T, M, N, window)) else NONE
        case "stale_seed" | "unrestored_seed":
            return GRADIENT if trial.dropout_p else NONE
    return NONE  # for "none"; and for bf16_ties, because one more rounding in each tile is within the budget


def without_max(impl: str, top: float, least: float, held: torch.finfo, right: list[dict[str, Tensor]]) -> str:
    """The symptom of weights exp(s). A weight may overflow; or their sum l (o = finite / inf = 0, silently); or acc (o
    is inf, or NaN if l is inf too). naive has no acc, because it divides the weights by l first. top: the largest
    score. least: the smallest l, which may underflow. held: the limits of the dtype that weights are rounded to."""
    sums = any(bool((r["lse"] > LIMIT).any()) for r in right)
    acc = any(bool((r["lse"].unsqueeze(-1) + r["o"].abs().log() > LIMIT).any()) for r in right) and impl != "naive"
    if top > LIMIT:
        return NAN
    if acc or top > math.log(held.max):
        return NAN if sums else OVERFLOW
    return SILENT if sums or least < held.smallest_normal else NONE


def with_a_trial(failures: list[str]) -> list[str]:
    """The failures. ValueError for one of them that has no trial."""
    if missing := sorted({*failures} - {trial.failure for trial in TRIALS}):
        raise ValueError(f"failure={missing[0]} has no trial: add one to TRIALS of lab/trials.py (CONTRIBUTING.md)")
    return failures


def hidden_first_tile(T: int, M: int, N: int, window: int) -> bool:
    """Whether the window of some row begins after the first tile of keys that its row tile visits."""
    return any(i - window + 1 > max(0, (i // M * M) - window + 1) // N * N + N - 1 for i in range(T))


def tile_of(call: Call) -> tuple[int, int]:
    """block_m and block_n of a call."""
    return call.config.block_m, call.config.block_n
