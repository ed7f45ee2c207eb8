"""Causal attention, four ways behind one door, with the same names, the same masks and the same answers.

    attention(q, k, v, config)      the door: chooses by config.impl
      naive                         the definition: builds the whole T x T_k matrix of weights
      tiled                         FlashAttention in plain PyTorch: never holds more than one tile of it
      triton                        the same as GPU kernels, in kernels/flash.py
      sdpa                          torch's own, the yardstick

Shapes: B batch, T query length, T_k key length, H query heads, H_kv key/value heads (H a multiple), D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The steps carry the same numbers in every implementation, and in docs/attention.md, which derives them:

    forward                                             backward
    1  s = q k^T * softmax_scale (softcap, alibi)        7  delta = rowsum(do * o) - dlse
    2  s = -inf where the mask hides the key             8  p = exp(s - lse): the weights, computed again (1, 2)
    3  online softmax: m, l, alpha, p                    9  dv = (Z p)^T do
    4  dropout: Z p, with Z = keep / (share kept)       10  dp = Z (do v^T)
    5  acc = alpha acc + (Z p) v                        11  ds = p (dp - delta)
    6  o = acc / l, lse = m + log l                     12  dq = ds k * softmax_scale, dk = ds^T q * softmax_scale

Sources: Dao et al. 2022 (arXiv 2205.14135), order=keys_outside; Dao 2023 (arXiv 2307.08691), order=queries_outside and
lse; Milakov & Gimelshein 2018 (arXiv 1805.02867), the online softmax; Press et al. 2022 (arXiv 2108.12409), alibi;
Gemma 2 (arXiv 2408.00118), softcap.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.dropout import drop_threshold, keep_mask, keep_scale
from model.mask import PART, Mask, packed

INF = float("inf")
LOG2E = math.log2(math.e)
# Where the running maximum starts. -inf in the books; but a row whose first tile is hidden altogether would then have
# exp(-inf - -inf), which is NaN. From the lowest float32 it has exp(-inf - LOWEST) = 0, and needs no guard.
LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny  # below any sum that holds a weight: the largest weight of a row is 1


@dataclass
class AttentionConfig:
    impl: str = "auto"  # naive | tiled | sdpa | triton; auto is resolved once, at start-up, by resolve()
    block_m: int = 96  # query rows of a tile (tiled); 96: the fastest for short contexts on a CPU (LOG.md)
    block_n: int = 96  # key rows of a tile (tiled)
    order: str = "queries_outside"  # of tiled's loops: queries_outside (FlashAttention-2) | keys_outside (the first)
    softmax_scale: float | None = None  # None: 1 / sqrt(D)
    softcap: float | None = None  # bends the scores into (-softcap, softcap); Gemma 2 has 50
    alibi: bool = False  # takes slope * distance off the scores, a slope a head; meant for model.position=none
    window: int | None = None  # keys a query sees, itself included; None: all of the past
    windows: list[int | None] | None = None  # the same by layer, over and over: [128,128,128,null]
    documents: bool = False  # a token sees its own document only (text is packed: a sequence may hold several)
    block_mask: list[str] | None = None  # blocks to leave out: a picture of the scores, rows of x (in) and . (out)
    block_mask_size: int = 64  # tokens a block of that picture is wide and high
    dropout_p: float = 0.0  # on the weights, while training
    autotune: bool = False  # triton: time some tile sizes at the first call, instead of taking those of its table

    def __post_init__(self):
        if self.impl not in ("auto", "naive", "tiled", "sdpa", "triton"):
            raise ValueError(f"attention.impl={self.impl} is not known; choose auto, naive, tiled, sdpa or triton")
        if self.order not in ("queries_outside", "keys_outside"):
            raise ValueError(f"attention.order={self.order} is not known; choose queries_outside or keys_outside")
        for name in ("block_m", "block_n", "block_mask_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"attention.{name}={getattr(self, name)} must be at least 1; 64 or 128 are usual")
        for name in ("softmax_scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < INF:
                raise ValueError(f"attention.{name}={value} must be above 0 and finite; null for the usual")
        if self.windows is not None and (self.window is not None or not self.windows):
            raise ValueError(
                f"attention.windows={self.windows} attention.window={self.window}: give one window, "
                "or a list of at least one, by layer"
            )
        for window in self.windows or [self.window]:
            if window is not None and window < 1:
                raise ValueError(f"attention.window={window} must be at least 1 (a query sees itself); null for none")
        if self.block_mask is not None:
            widths = {len(row) for row in self.block_mask}
            if len(widths) != 1 or not "".join(self.block_mask) or set("".join(self.block_mask)) - {"x", "."}:
                raise ValueError(
                    f"attention.block_mask={self.block_mask} is no picture: give rows of one length, x for a block to "
                    "compute and . for one to leave out, as in [x..,xx.,.xx]"
                )
        drop_threshold(self.dropout_p)

    def layer(self, i: int) -> "AttentionConfig":
        """The configuration of layer i: the one that has its window."""
        return self if self.windows is None else replace(self, windows=None, window=self.windows[i % len(self.windows)])

    def check_length(self, T: int) -> None:
        """ValueError when block_mask is a picture of fewer than T tokens."""
        if self.block_mask is not None:
            covered = min(len(self.block_mask), len(self.block_mask[0])) * self.block_mask_size
            if covered < T:
                raise ValueError(
                    f"attention.block_mask covers {covered} tokens of {T}: draw more blocks, "
                    f"or use attention.block_mask_size={-(-T * self.block_mask_size // covered)}"
                )


@dataclass
class BreakIt:
    """Takes a line out of the algorithm, to see what it was for. True is whole; every switch stands where it acts."""

    # Without the maximum exp(s) overflows once a score passes 88.7 (log of the largest float32): l = inf, and o is
    # inf / inf. Below that nothing happens at all, which is why the fault can sleep for weeks. naive, tiled, triton.
    subtract_max: bool = True
    # Without a low start, at 0, the running maximum never falls below 0. Right while each row has a score above -87;
    # below that its sum is under the smallest normal float32 and o shrinks, and under -104 every exp(s) is 0, and o
    # with it: the row sees nothing, and learns nothing. tiled, triton (naive has no running maximum).
    start_low: bool = True
    # Without alpha the earlier tiles stay on the scale of an older, smaller maximum and weigh too much. Never NaN: the
    # output stays finite and wrong, the more the larger the scores; right where one tile holds all keys. tiled, triton.
    rescale_sum: bool = True
    rescale_output: bool = True
    # Without 1 / sqrt(D) the scores of normal q and k have deviation sqrt(D), not 1: softmax picks one key and passes
    # on hardly a gradient. Nothing is NaN or wrong; the loss falls more slowly. All implementations.
    scale_scores: bool = True
    # Without the tile's place a causal mask compares row and column within their tile, in every tile: a row sees keys
    # of the future and misses keys of the past. Right in the first tile only, and so right where one tile holds all.
    # The training loss falls below what the text allows and samples are rubbish, the more rows lie as deep in their
    # tile as its keys reach (block_m above block_n). Gradients are those of the wrong mask. tiled, triton (naive has no
    # tiles).
    global_mask: bool = True
    # Without guards a row that sees nothing has m = -inf, and exp(-inf - -inf) is NaN; in tiles so has one whose first
    # tile is hidden from it altogether, as under a window. Its NaN enters dk and dv of every key that was computed with
    # it. Harmless where each row sees a key of its first tile: causal with T = T_k and nothing else. All three.
    guard_empty_rows: bool = True
    # Without the same seed the backward drops other weights than the forward did: the first loss is right to the last
    # bit, its gradients are not, and training is slow or goes astray. tiled, triton (naive keeps its mask).
    same_seed: bool = True
    # Without restoring it, activation checkpointing draws a new mask when it computes a block again (model/gpt.py): the
    # first loss is right, its gradients belong to another network than the one it came from. All implementations.
    restore_seed: bool = True
    # Without wide sums each tile's p v is rounded to 16 bits before it is added. Weights that tie at the maximum are
    # exactly 1, sums of two, three, .. values of one sign lie halfway between two numbers, and the small rest always
    # pushes them the same way: o is off by a tenth of its last digit in the mean, delta carries it into dq and dk, and
    # what is biased adds up over thousands of steps (Qiu and Yao 2025, arXiv 2510.04212). Nothing in float32. tiled,
    # triton (naive rounds once, at the end).
    wide_output: bool = True
    score_gain: float = 1.0  # multiplies the scores, to bring a failure on; 1 leaves attention as it is

    def __post_init__(self):
        if not 0 < self.score_gain <= 1e30:
            raise ValueError(f"break_it.score_gain={self.score_gain} is outside (0, 1e30]; 1 changes nothing")
        # The switches that are off, as kernels/ takes them. Here, because torch.compile need not follow the loop.
        self.without = "+".join(switch for switch in FAULTS if not getattr(self, switch))

    @property
    def label(self) -> str:
        """Names what is broken, for banners, run names and tags; empty when nothing is."""
        parts = [name for switch, name in FAULTS.items() if not getattr(self, switch)]
        parts += [] if self.score_gain == 1.0 else [f"gain_{self.score_gain:g}"]
        return "+".join(parts).replace("no_rescale_sum+no_rescale_output", "no_rescale")


# The name of what is wrong when a switch is off, in the order of BreakIt's fields; model/failures.py has the words.
FAULTS = {
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
LACKS = {  # the switches that an implementation has nothing to remove for, and why
    "naive": {
        "start_low": "naive has no running maximum",
        "rescale_sum": "naive rescales nothing, it has one pass",
        "rescale_output": "naive rescales nothing, it has one pass",
        "global_mask": "naive has no tiles",
        "same_seed": "naive keeps its dropout mask for the backward",
        "wide_output": "naive rounds its one product once",
    },
    "sdpa": dict.fromkeys(FAULTS.keys() - {"scale_scores", "restore_seed"}, "torch's sdpa cannot be broken"),
}
UNBROKEN = BreakIt()


def resolve(config: AttentionConfig, device: str, break_it: BreakIt = UNBROKEN) -> AttentionConfig:
    """Turns impl=auto into the implementation that will run, and refuses one that cannot, before any work is done.

    auto: on a GPU torch's fused kernel, and triton for what that lacks (a window, our dropout mask, a switch of
    break_it); tiled elsewhere, and where triton cannot run. (Heads above 256 and float64, which triton lacks, it learns
    of at the first call only.)
    Raises ValueError naming the reason and the way out.
    """
    if config.impl == "auto":
        special = beyond_sdpa(config) or config.dropout_p > 0 or break_it.without
        if not device.startswith("cuda") or config.order != "queries_outside":
            config = replace(config, impl="tiled")
        elif special:
            config = replace(config, impl="tiled" if triton_refusal(device) else "triton")
        else:
            config = replace(config, impl="sdpa")
    if config.impl == "triton" and (refused := triton_refusal(device)):
        raise ValueError(refused)
    if config.impl == "sdpa" and beyond_sdpa(config):
        raise ValueError(
            f"{beyond_sdpa(config)}: sdpa has nothing of the kind; use attention=tiled or attention=triton"
        )
    if config.impl != "tiled" and config.order != "queries_outside":
        raise ValueError(f"attention.order={config.order}: {config.impl} has no such loops; use attention=tiled")
    if config.impl != "triton" and config.autotune:
        raise ValueError(
            f"attention.autotune=true: {config.impl} has nothing to tune; leave it out or use attention=triton"
        )
    check_switches(config, break_it)
    return config


def triton_refusal(device: str) -> str | None:
    """Why triton cannot run on this device, or None; a head size or dtype that it lacks shows at the first call."""
    try:
        from kernels.flash import refusal
    except ModuleNotFoundError as error:  # triton is made for Linux alone
        return f"attention.impl=triton: {error}; pip install triton (Linux), or use attention=tiled or attention=sdpa"
    return refusal(torch.float32, 64, torch.device(device))


def beyond_sdpa(config: AttentionConfig) -> str:
    """What of the configuration torch's function has no argument for, as key=value; empty when nothing is."""
    names = ("window", "windows", "documents", "block_mask", "softcap", "alibi")
    return ", ".join(f"attention.{name}={getattr(config, name)}" for name in names if getattr(config, name))


def check_switches(
    config: AttentionConfig,
    break_it: BreakIt,
    causal: bool = True,
    documents: bool = False,
    softmax_scale: float | None = None,
) -> None:
    """A switch that has nothing to remove, from an implementation or from a problem, is an error, never ignored."""
    if not break_it.without:
        return
    scale = config.softmax_scale if softmax_scale is None else softmax_scale
    elsewhere = config.window or config.windows or config.documents or config.block_mask or documents
    dry = config.dropout_p == 0 and "there is no dropout to draw; use attention.dropout_p=0.1"
    idle = {
        "scale_scores": scale is not None and f"softmax_scale={scale} is no 1 / sqrt(D); leave it out",
        "global_mask": (not causal and "there is no causal mask to break; use causal=True")
        or (elsewhere and "only the causal mask can be broken; leave out window, windows, documents and block_mask"),
        "same_seed": dry,
        "restore_seed": dry,
    }
    for switch in (switch for switch in FAULTS if not getattr(break_it, switch)):
        why = idle.get(switch)
        if switch in LACKS.get(config.impl, ()):
            able = [f"attention={impl}" for impl in ("tiled", "triton") if switch not in LACKS.get(impl, ())]
            why = f"{LACKS[config.impl][switch]}; use {' or '.join(able)}"
        if why:
            raise ValueError(f"break_it={break_it.label}: {why}")


@dataclass
class Problem:
    """What is to be computed from q, k and v, whoever computes it."""

    scale: float
    softcap: float | None
    slopes: Tensor | None  # (H,): of alibi, in the dtype of sums
    mask: Mask
    dropout_p: float
    seed: Tensor | None
    break_it: BreakIt


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    seed: Tensor | None = None,
    documents: Tensor | None = None,
    break_it: BreakIt = UNBROKEN,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = dropout(softmax(q k^T * softmax_scale + mask)) v, by the implementation that config.impl names.

    q (B, H, T, D); k, v (B, H_kv, T_k, D) with H a multiple of H_kv; one float dtype, any strides.
    causal: row i sees key j where j <= i + T_k - T, the diagonal aligned at the end as flash-attention has it.
    softmax_scale: config's when None, and 1 / sqrt(D) when that is None too.
    seed: int64 scalar tensor on q's device; given, the weights are dropped with config.dropout_p by the mask of
    model/dropout.py. None: no dropout, as in evaluation. (sdpa alone draws torch's own mask, whatever the seed.)
    documents: integers (B, T_k), the document that each token is in, as the loader gives them; a token then sees its
    own only. The queries are the last T of the tokens. (config.documents says whether the model hands them in.)
    Returns o (B, H, T, D) in q's dtype, and with return_lse also lse (B, H, T): natural logarithm, float32 (float64 for
    float64 inputs). A row with nothing to see gives o = 0, lse = -inf and gradients 0.
    Raises ValueError on shapes, dtypes, devices or options that do not go together.
    """
    check_inputs(q, k, v)
    T, T_k = q.shape[2], k.shape[2]
    if documents is not None:
        if documents.shape != (k.shape[0], T_k) or documents.device != q.device or T > T_k:
            raise ValueError(
                f"documents {tuple(documents.shape)} on {documents.device} for T={T}, T_k={T_k} on {q.device}: "
                f"want (B, T_k) = {(k.shape[0], T_k)}, T at most T_k, and one device"
            )
        if documents.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise ValueError(f"documents are {documents.dtype}: want integers, such as documents.long() gives")
        documents = (documents[:, T_k - T :], documents)
    return attend(q, k, v, config, {"documents": documents}, causal, softmax_scale, seed, break_it, return_lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: AttentionConfig,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    seed: Tensor | None = None,
    break_it: BreakIt = UNBROKEN,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() for sequences of several lengths laid end to end, with flash_attn_varlen_func's tensors.

    q (tokens_q, H, D); k, v (tokens_k, H_kv, D). cu_seqlens_q, cu_seqlens_k: integers (sequences + 1,), where each
    sequence begins and, last, the number of tokens; a sequence may be empty, and its last query stands at its last key.
    (The longest lengths that flash-attention asks for as well are not needed.) Dropout counts rows and columns through
    the whole pack, so two sequences never share a mask.
    Returns o (tokens_q, H, D), and with return_lse also lse (H, tokens_q). The rest is as in attention().
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: want (tokens, heads, D) each")
    if config.block_mask is not None:
        raise ValueError(
            "attention.block_mask is a picture of one sequence, not of a pack: leave it out, or use windows"
        )
    documents = packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_inputs(q, k, v)
    found = attend(q, k, v, config, documents, causal, softmax_scale, seed, break_it, return_lse)
    o, lse = found if return_lse else (found, None)
    o = o[0].transpose(0, 1)
    return (o, lse[0]) if return_lse else o


def attend(q, k, v, config, documents, causal, softmax_scale, seed, break_it, return_lse):
    """What both doors come to. documents: the fields of Mask that say which tokens belong together."""
    check_switches(config, break_it, causal, documents["documents"] is not None, softmax_scale)
    config.check_length(max(q.shape[2], k.shape[2]))
    assert config.windows is None, "a layer's own configuration is wanted: config.layer(i)"
    problem = problem_of(q, k, config, documents, causal, softmax_scale, seed, break_it)
    # Autocast would round the float32 running sums to bf16; the dtype of q, k and v has been chosen by now. (Kernels it
    # does not reach, and to switch it off takes 20 us, a tenth of what their call takes.)
    with nullcontext() if config.impl == "triton" else torch.autocast(q.device.type, enabled=False):
        match config.impl:
            case "naive":
                o, lse = naive(q, k, v, problem)
            case "tiled":
                o, lse = Tiled.apply(q, k, v, problem, (config.block_m, config.block_n), config.order)
            case "triton":
                from kernels.flash import flash_attention  # here, because not everyone who is here has triton

                mask = problem.mask
                o, lse = flash_attention(
                    q,
                    k,
                    v,
                    softmax_scale=problem.scale,
                    at_least=None if mask.window is None else 1 - mask.window,
                    at_most=0 if causal else mask.window and mask.window - 1,
                    softcap=problem.softcap,
                    slopes=problem.slopes,
                    documents=mask.documents,
                    positions=mask.positions,
                    blocks=mask.blocks,
                    block_size=mask.block_size,
                    seed=seed if problem.dropout_p > 0 else None,
                    drop_threshold=drop_threshold(problem.dropout_p),
                    without=break_it.without,
                    autotune=config.autotune,
                )
            case "sdpa":
                if beyond_sdpa(config) or documents["documents"] is not None or return_lse:
                    raise ValueError("sdpa has no windows, documents and the like, and no lse; use impl=tiled")
                return sdpa(q, k, v, problem)
            case _:
                raise ValueError(f"attention.impl={config.impl} cannot run here; resolve() it at start-up")
    return (o, lse) if return_lse else o


def problem_of(q, k, config, documents, causal, softmax_scale, seed, break_it) -> Problem:
    T, T_k, H = q.shape[2], k.shape[2], q.shape[1]
    blocks = None if config.block_mask is None else blocks_of(tuple(config.block_mask), q.device)
    usual = q.shape[-1] ** -0.5 if break_it.scale_scores else 1.0
    usual = usual if config.softmax_scale is None else config.softmax_scale
    scale = usual if softmax_scale is None else softmax_scale
    if not 0 < scale < INF:
        raise ValueError(f"softmax_scale={scale} must be above 0 and finite; None for the usual")
    if seed is not None and not (isinstance(seed, Tensor) and (seed.dtype, seed.ndim) == (torch.int64, 0)):
        raise ValueError(f"seed={seed}: want a scalar int64 tensor, as torch.randint gives it")
    return Problem(
        scale * break_it.score_gain,
        config.softcap,
        alibi_slopes(H, q.device).to(sum_dtype(q.dtype)) if config.alibi else None,
        Mask(
            T,
            T_k,
            causal and break_it.global_mask,
            config.window,
            local=causal and not break_it.global_mask,
            blocks=blocks,
            block_size=config.block_mask_size,
            **documents,
        ),
        0.0 if seed is None else config.dropout_p,
        seed,
        break_it,
    )


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape):
        raise ValueError(f"{shapes}: want q (B, H, T, D) and k, v both (B, H_kv, T_k, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: batch and head size must agree")
    if k.shape[2] == 0 or k.shape[3] == 0:
        raise ValueError(f"{shapes}: there are no keys to attend to")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}: H = {q.shape[1]} query heads are not a multiple of H_kv = {k.shape[1]}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: want one floating-point dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q on {q.device}, k on {k.device}, v on {v.device}: want one device")


# Made outside inference mode, whoever asks first: autograd refuses to save a tensor that was made inside.
@cache
@torch.inference_mode(False)
def blocks_of(picture: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([[block == "x" for block in row] for row in picture], device=device)


@cache
@torch.inference_mode(False)
def alibi_slopes(H: int, device: torch.device) -> Tensor:
    """float32 (H,): 2**(-8 / H), its square, its cube... where H is a power of two; else those of the next lower power,
    and then every other one of the next higher."""
    n = 1 << H.bit_length() - 1
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)] + [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:H], device=device)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and exponentials are held in: float32, or float64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# naive: the definition. Autograd keeps several (B, H, T, T_k) tensors for the backward; that is what tiling is against.


def naive(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    mask, dropout_p = problem.mask, problem.dropout_p
    rows, columns = range(q.shape[2]), range(k.shape[2])
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # (B, H, T_k, D)
    v = v.repeat_interleave(groups, dim=1)

    s = (q @ k.mT).to(sum_dtype(q.dtype)) * problem.scale  # 1: (B, H, T, T_k)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if problem.slopes is not None:
        s = s - problem.slopes[:, None, None] * mask.distance(rows, columns, q.device)
    s = s.masked_fill(~mask.visible(rows, columns, q.device).unsqueeze(1), -INF)  # 2
    # 3: the maximum cancels out of the fraction and of its gradient; it only keeps exp below infinity. A row with
    # nothing to see has m = -inf, and exp(-inf - -inf) would be NaN, so such a row is shifted by 0.
    m = s.detach().amax(-1, keepdim=True) if problem.break_it.subtract_max else torch.zeros_like(s[..., :1])
    guard = problem.break_it.guard_empty_rows
    m = m.masked_fill(m == -INF, 0.0) if guard else m
    p = torch.exp2((s - m) * LOG2E)  # exp(s - m); torch.exp takes 400 times as long for -inf, which hidden scores are
    l = p.sum(-1, keepdim=True)  # (B, H, T, 1)
    empty = l == 0
    l = l.masked_fill(empty, 1.0) if guard else l
    p = p / l
    if dropout_p > 0:  # 4
        keep = keep_mask(problem.seed, p.shape[0] * p.shape[1], rows, columns, dropout_p)
        p = p * keep.view_as(p) * keep_scale(dropout_p)
    o = p.to(v.dtype) @ v  # 5
    lse = (m + l.log()).masked_fill(empty, -INF).squeeze(-1)  # 6
    return o, lse


# ---------------------------------------------------------------------------------------------------------------------
# tiled: the same answer without the matrix. Only o and lse outlive the loops.
#
# Slow memory is what has length T; a tile of it comes on chip by load() and goes back by store(), and nothing else
# touches it, so that these two are the traffic that `python bench.py mode=traffic` counts.
#
# Inside, s and m are in base 2: log2(e) goes into the scale, and 2**s is e**(q k^T softmax_scale). GPU kernels do it
# because exp2 is the instruction they have; here it saves a pass over the tile. lse leaves as a natural logarithm.


def online_softmax(s: Tensor, m: Tensor, l: Tensor, break_it: BreakIt) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 3 for one more tile of scores: returns p (in s's memory), and the new m, l and alpha.

    s (N, R, block_n); m, l, alpha (N, R, 1), where m and l are of the tiles seen so far: LOWEST and 0 before the first.
    """
    m_new = torch.maximum(m, s.amax(-1, keepdim=True)) if break_it.subtract_max else torch.zeros_like(m)
    p = s.sub_(m_new).exp2_()
    alpha = torch.exp2(m - m_new)  # what the earlier tiles' scale has shrunk by
    l = (alpha * l if break_it.rescale_sum else l) + p.sum(-1, keepdim=True)
    return p, m_new, l, alpha if break_it.rescale_output else torch.ones_like(alpha)


class Tiled(torch.autograd.Function):
    """Saves q, k, v, o, lse and the seed, and computes the weights again in the backward: O(T) memory in both.

    Inside, the query heads that share a key head lie one below the other as more rows of the same matrix, so that
    grouped heads need no copies of k and v:  q (N, G, T, D), k and v (N, 1, T_k, D), with N = B * H_kv, G = H / H_kv.
    """

    @staticmethod
    def forward(ctx, q, k, v, problem, tile, order):
        ctx.set_materialize_grads(False)
        B, H, T, _ = q.shape
        wide = sum_dtype(q.dtype)
        ctx.problem, ctx.tile, ctx.order, ctx.k_shape = problem, tile, order, k.shape
        mask = problem.mask
        row_tiles, column_tiles = tiles(T, tile[0]), tiles(k.shape[2], tile[1])
        mask.read_edges(row_tiles, column_tiles)
        qn, kn, vn = by_key_head(q, k, v)
        o = like_heads(q.shape, q)
        lse = q.new_empty(B, H, T, dtype=wide)
        on_chip = q.new_empty(B * H * min(tile[0], T) * min(tile[1], k.shape[2]), dtype=wide)  # one tile, for all

        if order == "queries_outside":  # a row's state stays on chip; k and v come by again for every tile of rows
            for rows in row_tiles:
                q_i = load(qn, rows)  # (N, G*block_m, D)
                state = nothing_seen(q_i, wide, problem.break_it)
                for columns, seen in mask.columns_for(rows, column_tiles):
                    kv_j = load(kn, columns), load(vn, columns)  # (N, block_n, D)
                    state = absorb(q_i, *kv_j, *state, rows, columns, seen, problem, on_chip)
                finish(o, lse, rows, *state, problem.break_it)
        else:  # k and v come by once; the rows' state lies in slow memory, and moves in and out for every tile of keys
            slow = [x.view(*qn.shape[:3], x.shape[-1]) for x in nothing_seen(qn.flatten(1, 2), wide, problem.break_it)]
            for columns in column_tiles:
                kv_j = load(kn, columns), load(vn, columns)
                for rows, seen in mask.rows_for(columns, row_tiles):
                    state = (load(x, rows).clone() for x in slow)  # a load may be a view, and acc is worked on
                    state = absorb(load(qn, rows), *kv_j, *state, rows, columns, seen, problem, on_chip)
                    for x, x_i in zip(slow, state, strict=True):
                        store(x, rows, x_i)
            # The paper divides by l in every pass, so that o is right after each; dividing once is the same at the end.
            for rows in row_tiles:
                finish(o, lse, rows, *(load(x, rows) for x in slow), problem.break_it)

        ctx.save_for_backward(qn, kn, vn, o, lse, problem.seed)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse, seed = ctx.saved_tensors
        if seed is not None and not ctx.problem.break_it.same_seed:
            seed = seed + 1
        problem, tile, mask = replace(ctx.problem, seed=seed), ctx.tile, ctx.problem.mask
        (N, G, T, D), T_k, scale, wide = q.shape, k.shape[2], ctx.problem.scale, lse.dtype
        row_tiles, column_tiles = tiles(T, tile[0]), tiles(T_k, tile[1])
        do = torch.zeros_like(o) if do is None else do
        delta = (do.to(wide) * o).sum(-1, keepdim=True)  # 7: (B, H, T, 1)
        if dlse is not None:
            delta -= dlse.unsqueeze(-1)
        # A row that saw nothing has lse = -inf; with +inf in its place every weight of it comes out as 2**-inf = 0.
        lse2 = lse * LOG2E
        if problem.break_it.guard_empty_rows:
            lse2 = lse2.masked_fill(lse == -INF, INF)
        by_rows = (q, do.reshape(N, G, T, D), lse2.view(N, G, T, 1), delta.view(N, G, T, 1))
        dk, dv = (like_heads(ctx.k_shape, lse) for _ in "kv")
        size = N * G * min(tile[0], T) * min(tile[1], T_k)
        on_chip = lse.new_empty(2 if problem.softcap is None else 3, size)  # a tile of s, of dp, and of softcap's slope

        if ctx.order == "queries_outside":
            dq = like_heads(o.shape, o)
            dk.zero_(), dv.zero_()
            for rows in row_tiles:
                q_i, do_i, lse_i, delta_i = (load(x, rows) for x in by_rows)
                dq_i = torch.zeros(q_i.shape, dtype=wide, device=q.device)
                for columns, seen in mask.columns_for(rows, column_tiles):
                    k_j, v_j = load(k, columns), load(v, columns)
                    of_tile = (q_i, k_j, v_j, do_i, lse_i, delta_i, rows, columns, seen)
                    zp, ds = weights_again(*of_tile, problem, on_chip)
                    store(dv, columns, torch.bmm(zp.mT, do_i), add=1.0)  # 9
                    add_product(dq_i, ds, k_j, scale)  # 12
                    store(dk, columns, torch.bmm(ds.mT, q_i), add=scale)
                store(dq, rows, dq_i)
        else:
            dq = like_heads(o.shape, lse).zero_()
            for columns in column_tiles:
                k_j, v_j = load(k, columns), load(v, columns)
                dk_j, dv_j = (torch.zeros(k_j.shape, dtype=wide, device=q.device) for _ in "kv")
                for rows, seen in mask.rows_for(columns, row_tiles):
                    q_i, do_i, lse_i, delta_i = (load(x, rows) for x in by_rows)
                    of_tile = (q_i, k_j, v_j, do_i, lse_i, delta_i, rows, columns, seen)
                    zp, ds = weights_again(*of_tile, problem, on_chip)
                    add_product(dv_j, zp.mT, do_i)  # 9
                    store(dq, rows, torch.bmm(ds, k_j), add=scale)  # 12
                    add_product(dk_j, ds.mT, q_i, scale)
                store(dk, columns, dk_j)
                store(dv, columns, dv_j)

        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def nothing_seen(q_i: Tensor, dtype: torch.dtype, break_it: BreakIt = UNBROKEN) -> tuple[Tensor, Tensor, Tensor]:
    """m, l (N, R, 1) and acc (N, R, D) before the first tile."""
    start = 0.0 if not break_it.start_low else LOWEST if break_it.guard_empty_rows else -INF
    m = torch.full((*q_i.shape[:2], 1), start, dtype=dtype, device=q_i.device)
    return m, torch.zeros_like(m), torch.zeros(q_i.shape, dtype=dtype, device=q_i.device)


def absorb(q_i, k_j, v_j, m, l, acc, rows, columns, seen, problem, on_chip):
    """Steps 1 to 5: what one tile of keys changes in the state m, l, acc of a tile of rows."""
    s = scores(q_i, k_j, rows, columns, problem, on_chip)  # 1: (N, G*block_m, block_n)
    if seen == PART:
        hide(s, rows, columns, problem.mask)  # 2
    p, m, l, alpha = online_softmax(s, m, l, problem.break_it)  # 3
    if problem.dropout_p > 0:
        p *= dropout_factor(p, rows, columns, problem)  # 4
    p = p.to(v_j.dtype)
    if problem.break_it.wide_output:  # factors of 16 bits, their product and its sum of 32
        p, v_j = p.to(acc.dtype), v_j.to(acc.dtype)
    return m, l, add_product(acc.mul_(alpha), p, v_j)  # 5


def finish(o: Tensor, lse: Tensor, rows: range, m: Tensor, l: Tensor, acc: Tensor, break_it: BreakIt) -> None:
    """Step 6. A row that saw nothing has 0 / TINY = 0, and log 0 = -inf."""
    store(o, rows, acc / (l.clamp(min=TINY) if break_it.guard_empty_rows else l))
    store(lse.unsqueeze(-1), rows, m / LOG2E + l.log())


def weights_again(q_i, k_j, v_j, do_i, lse_i, delta_i, rows, columns, seen, problem, on_chip):
    """Steps 8, 10 and 11: the weights of a tile with their dropout, Z p, and ds, both (N, G*block_m, block_n)."""
    slope = None if problem.softcap is None else view_of(on_chip[2], q_i, k_j)
    s = scores(q_i, k_j, rows, columns, problem, on_chip[0], slope)
    if seen == PART:
        hide(s, rows, columns, problem.mask)
    p = s.sub_(lse_i).exp2_()  # 8
    dp = product(do_i, v_j, 1.0, on_chip[1])
    zp = p
    if problem.dropout_p > 0:  # drawn again: the same bits as in the forward
        z = dropout_factor(p, rows, columns, problem)
        zp, dp = z * p, dp.mul_(z)  # 10
    ds = dp.sub_(delta_i).mul_(p)  # 11
    if slope is not None:
        ds.mul_(slope)
    return zp.to(v_j.dtype), ds.to(q_i.dtype)


def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D) to (N, G, T, D); k and v (B, H_kv, T_k, D) to (N, 1, T_k, D)."""
    B, H_kv, T_k, D = k.shape
    N = B * H_kv
    return q.reshape(N, q.shape[1] // H_kv, q.shape[2], D), k.reshape(N, 1, T_k, D), v.reshape(N, 1, T_k, D)


def tiles(length: int, block: int) -> list[range]:
    return [range(i, min(i + block, length)) for i in range(0, length, block)]


def like_heads(shape: torch.Size, x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D): what the projection after it reads without a copy."""
    B, H, T, D = shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def load(x: Tensor, tile: range) -> Tensor:
    """One tile from slow memory: x (N, G, T, D) to (N, G*R, D), the heads of a group one below the other."""
    return x[:, :, tile.start : tile.stop].flatten(1, 2)


def store(x: Tensor, tile: range, values: Tensor, add: float | None = None) -> None:
    """One tile, (N, G*R, D), to its rows of x, (B, H, T, D) or (N, G, T, D); or added to them, `add` times."""
    x = x[:, :, tile.start : tile.stop]
    x.copy_(values.view(x.shape)) if add is None else x.add_(values.view(x.shape), alpha=add)


def view_of(memory: Tensor, q_i: Tensor, k_j: Tensor) -> Tensor:
    """A matrix (N, R, S) for the scores of q_i (N, R, D) and k_j (N, S, D), in a tile's memory."""
    N, R, S = q_i.shape[0], q_i.shape[1], k_j.shape[1]
    return memory[: N * R * S].view(N, R, S)


def product(a: Tensor, b: Tensor, scale: float, memory: Tensor) -> Tensor:
    """scale a b^T, (N, R, D) and (N, S, D) to (N, R, S): a view of memory, which has the wide dtype."""
    s = view_of(memory, a, b)
    if s.dtype == a.dtype:  # baddbmm's alpha scales inside the product, which saves a pass over the tile
        return torch.baddbmm(s, a, b.mT, beta=0, alpha=scale, out=s)
    return s.copy_(torch.bmm(a, b.mT)).mul_(scale)  # in 16 bits alpha would cost a second rounding


def scores(q_i, k_j, rows, columns, problem: Problem, memory: Tensor, slope: Tensor | None = None) -> Tensor:
    """Step 1, in base 2. slope: memory that takes d score / d (q k^T scale) where softcap bends it: 1 - tanh^2."""
    cap = problem.softcap
    s = product(q_i, k_j, problem.scale * LOG2E if cap is None else problem.scale / cap, memory)
    if cap is not None:
        s.tanh_()
        if slope is not None:
            torch.mul(s, s, out=slope).neg_().add_(1.0)
        s.mul_(cap * LOG2E)
    if problem.slopes is not None:
        H = len(problem.slopes)
        distance = problem.mask.distance(rows, columns, s.device).to(s.dtype)
        s.view(-1, H, *distance.shape).addcmul_(problem.slopes[:, None, None], distance, value=-LOG2E)
    return s


def add_product(acc: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """acc += scale a b in place. Where acc is wider than the factors, the product is rounded to their dtype first."""
    return acc.baddbmm_(a, b, alpha=scale) if acc.dtype == a.dtype else acc.add_(torch.bmm(a, b), alpha=scale)


def hide(s: Tensor, rows: range, columns: range, mask: Mask) -> None:
    """Step 2: hidden scores to -inf, in place."""
    limit = torch.where(mask.visible(rows, columns, s.device), INF, -INF)  # (1 or B, R, S)
    # The smaller of score and limit: on a CPU masked_fill_ with a broadcast mask takes longer than the exponentials.
    # The price: a NaN score stays NaN where it is hidden, so a NaN key shows in the earlier rows of its own tile too.
    s.view(len(limit), -1, *limit.shape[1:]).clamp_(max=limit.unsqueeze(1))  # the same for all heads of a sequence


def dropout_factor(p: Tensor, rows: range, columns: range, problem: Problem) -> Tensor:
    """Z of one tile, in the shape and dtype of its weights p: 0 where dropped, 1 / (share kept) elsewhere."""
    batch_heads = p.shape[0] * p.shape[1] // len(rows)
    keep = keep_mask(problem.seed, batch_heads, rows, columns, problem.dropout_p)
    return keep.to(p.dtype).mul_(keep_scale(problem.dropout_p)).view_as(p)


# ---------------------------------------------------------------------------------------------------------------------
# sdpa: whatever fused kernel torch picks.


def sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    causal, mask = problem.mask.causal, None
    if causal and k.shape[2] != q.shape[2]:  # is_causal aligns the diagonal at the start; ours is at the end
        mask = problem.mask.visible(range(q.shape[2]), range(k.shape[2]), q.device)[0]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        problem.dropout_p,
        is_causal=causal and mask is None,
        scale=problem.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
