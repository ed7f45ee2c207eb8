"""Attention in four implementations, with the same arguments and the same results.

    attention(q, k, v, config)      the entry point: chooses by config.impl
      naive                         the definition: builds the whole T x T_k matrix of weights; below
      tiled                         FlashAttention in plain PyTorch, one tile at a time: model/tiled.py
      triton                        the same as GPU kernels: kernels/op.py, launch.py, then flash.py or hopper/
      sdpa                          PyTorch's own, for comparison; below

Shapes: B batch, T query length, T_k key length, H query heads, H_kv key/value heads (H a multiple), D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The steps have these numbers in every implementation and in docs/attention.md, which derives them:

    forward                                             backward
    1  s = q k^T * softmax_scale (softcap, alibi)        7  delta = rowsum(do * o) - dlse
    2  s = -inf where the mask hides the key             8  p = exp(s - lse), with s from steps 1 and 2 again
    3  online softmax: m, l, alpha, p                    9  dv = (Z p)^T do
    4  dropout: Z p, with Z = keep / (share kept)       10  dp = Z (do v^T)
    5  acc = alpha acc + (Z p) v                        11  ds = p (dp - delta)
    6  o = acc / l, lse = m + log l                     12  dq = ds k * softmax_scale, dk = ds^T q * softmax_scale

Sources: Press et al. 2022 (arXiv 2108.12409) for alibi; Gemma 2 (arXiv 2408.00118) for softcap. model/tiled.py names
the papers of the algorithm.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.keys import check, key
from kernels.problem import NOTHING, Given, Problem
from model.abilities import check_switches, wanted, why_not
from model.break_it import UNBROKEN, BreakIt
from model.dropout import drop_threshold, keep_mask, keep_scale
from model.mask import distance, packed, visible
from model.tiled import INF, LOG2E, Loops, sum_dtype, tiled_attention

# A Tensor, or two of them with return_lse=True. Telling them apart for a type checker takes two more signatures each.
Output = Any
# What reads block_m and block_n: tiled, which auto may take, and the probe.
READS_TILES = "attention.impl=tiled attention.impl=auto probe.every probe.film"


@dataclass
class AttentionConfig:
    """What attention computes, and with which implementation. Raises ValueError for invalid options."""

    impl: str = key("auto", among="auto (chosen once, at start-up, by resolve()) | naive | tiled | triton | sdpa")
    # 96: the fastest for short contexts on a CPU (LOG.md)
    block_m: int = key(96, "query rows per tile (tiled)", needs=READS_TILES, least=1, usual="64 to 128 are usual")
    block_n: int = key(96, "key rows per tile (tiled)", needs=READS_TILES, least=1, usual="64 to 128 are usual")
    order: str = key(
        "queries_outside", "tiled", among="queries_outside (FlashAttention-2) | keys_outside (FlashAttention-1)"
    )
    softmax_scale: float | None = key(None, "multiplies q k^T", above=0, most=1e30, usual="null: 1 / sqrt(head size)")
    softcap: float | None = key(
        None, "limits the scores to (-softcap, softcap) by a tanh", least=1e-6, usual="null: off; Gemma 2 uses 50"
    )
    alibi: bool = key(False, "subtracts slope * distance from the scores; meant for model.position=none")
    window: int | None = key(None, "how many keys a query sees, its own included", least=1, usual="null: all past keys")
    windows: list[int | None] | None = key(
        None, "one window per layer, repeated over the layers: [128,128,128,null]", least=1
    )
    documents: bool = key(False, "a token sees only its own document (a sequence may hold several)")
    block_mask: list[str] | None = key(
        None, "which blocks of the score matrix to compute: rows of x (compute) and . (skip)"
    )
    block_mask_size: int = key(
        64,
        "tokens along each side of a block of block_mask",
        needs="attention.block_mask",
        least=1,
        usual="64 or 128 are usual",
    )
    dropout_p: float = key(0.0, "share of the attention weights dropped in training")
    autotune: bool = key(False, "triton: time several tile sizes at the first call, and use the fastest")
    kernel: str = key("auto", "of triton", among="hopper | portable | auto, the faster one")

    def __post_init__(self):
        check(self, "attention.")
        if self.windows is not None and (self.window is not None or not self.windows):
            raise ValueError(
                f"attention.windows={self.windows} attention.window={self.window}: give one window, "
                "or a list of at least one, by layer"
            )
        if self.block_mask is not None:
            widths = {len(row) for row in self.block_mask}
            if len(widths) != 1 or not "".join(self.block_mask) or set("".join(self.block_mask)) - {"x", "."}:
                raise ValueError(
                    f"attention.block_mask={self.block_mask} is no picture: give rows of one length, x for a block to "
                    "compute and . for one to leave out, as in [x..,xx.,.xx]"
                )
        drop_threshold(self.dropout_p)

    def layer(self, i: int) -> "AttentionConfig":
        """The configuration of layer i, with that layer's window."""
        return self if self.windows is None else replace(self, windows=None, window=self.windows[i % len(self.windows)])

    def check_length(self, T: int) -> None:
        """Raises ValueError if block_mask covers fewer than T tokens."""
        if self.block_mask is not None:
            covered = min(len(self.block_mask), len(self.block_mask[0])) * self.block_mask_size
            if covered < T:
                raise ValueError(
                    f"attention.block_mask covers {covered} tokens of {T}: draw more blocks, "
                    f"or use attention.block_mask_size={-(-T * self.block_mask_size // covered)}"
                )


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
    numbers: Tensor | None = None,
    slopes: Tensor | None = None,
    return_lse: bool = False,
    qkv: Tensor | None = None,
) -> Output:
    """o = dropout(softmax(q k^T * softmax_scale + mask)) v, by the implementation that config.impl names.

    q (B, H, T, D); k, v (B, H_kv, T_k, D) with H a multiple of H_kv; one float dtype, any strides.
    causal: row i sees key j if j <= i + T_k - T. So the last row is aligned with the last key, as in flash-attention.
    softmax_scale: None takes config.softmax_scale, and 1 / sqrt(D) if that is None too.
    seed: int64 scalar tensor on q's device. The weights are dropped with config.dropout_p by the mask of
    model/dropout.py. None: no dropout, as in evaluation. (sdpa draws PyTorch's own mask, whatever the seed.)
    documents: integers (B, T_k), the document of each token, as the loader gives them. A token then sees only its own
    document. The queries are the last T tokens. (config.documents says whether the model passes them.)
    numbers: integers (B * H,), each batch-head's number in the dropout mask, where these are some of a larger batch's;
    None: b*H + h. slopes: (H,), those of ALiBi where these are some of more heads; None: alibi_slopes(H).
    qkv: (B, T, (H + 2 H_kv) D), of which q, k and v are views, side by side. Triton then makes its gradient as a whole.
    Returns o (B, H, T, D) in q's dtype, and with return_lse also lse (B, H, T): natural logarithm, float32 (float64 for
    float64 inputs). A row that sees no key gives o = 0, lse = -inf and gradients 0.
    Raises ValueError for shapes, dtypes, devices or options that do not fit together.
    """
    if (v.shape, v.dtype, v.device) != (k.shape, k.dtype, k.device):
        check_inputs(q, k, v)  # else kind_of() checks q and k, which stand for v
    documents_q, documents_k = (None, None) if documents is None else of_documents(q, k, documents)
    given = Given(documents_q, documents_k, slopes=slopes, seed=seed, numbers=numbers)
    return attend(q, k, v, problem_of(q, k, config, given, causal, softmax_scale, break_it), config, return_lse, qkv)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    config: AttentionConfig,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Output:
    """attention() for sequences of different lengths laid end to end, with flash_attn_varlen_func's tensors.

    q (tokens_q, H, D); k, v (tokens_k, H_kv, D). cu_seqlens_q, cu_seqlens_k: integers (sequences + 1,), where each
    sequence begins and, last, the number of tokens. A sequence may be empty. Its last query is aligned with its last
    key. flash-attention also takes the longest lengths; they are not needed here. Dropout counts rows and columns over
    all tokens, so two sequences never share a mask. options: causal, softmax_scale, seed and break_it of attention().
    Returns o (tokens_q, H, D), and with return_lse also lse (H, tokens_q). The rest is as in attention().
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: want (tokens, heads, D) each")
    if config.block_mask is not None:
        raise ValueError(
            "attention.block_mask is a picture of one sequence, not of a pack: leave it out, or use windows"
        )
    given = packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])._replace(seed=options.pop("seed", None))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_inputs(q, k, v)
    found = attend(q, k, v, problem_of(q, k, config, given, **options), config, return_lse)
    o = (found[0] if return_lse else found)[0].transpose(0, 1)
    return (o, found[1][0]) if return_lse else o


def of_documents(q: Tensor, k: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents_q (B, T) and documents_k (B, T_k) of attention()'s documents. Raises ValueError."""
    check_inputs(q, k, k)
    T, T_k = q.shape[2], k.shape[2]
    if documents.shape != (k.shape[0], T_k) or documents.device != q.device or T > T_k:
        raise ValueError(
            f"documents {tuple(documents.shape)} on {documents.device} for T={T}, T_k={T_k} on {q.device}: "
            f"want (B, T_k) = {(k.shape[0], T_k)}, T at most T_k, and one device"
        )
    if documents.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"documents are {documents.dtype}: want integers, such as documents.long() gives")
    return documents[:, T_k - T :], documents


def attend(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: AttentionConfig, return_lse: bool = False,
    qkv: Tensor | None = None,
) -> Output:  # fmt: skip
    """attention() of a problem."""
    if config.impl == "triton" and k.shape[2] > 0:
        from kernels.op import flash_attention  # triton is not installed everywhere

        found = flash_attention(q, k, v, problem, config.autotune, config.kernel, qkv)
        return found if return_lse else found[0]
    # Autocast would round the float32 running sums to bf16, and q, k and v have their dtype already.
    with torch.autocast(q.device.type, enabled=False):
        match config.impl:
            case "naive" | "tiled" | "triton" if k.shape[2] == 0:  # sums of nothing, with gradients 0
                s = q @ k[:, :1].mT  # (B, H, T, 0)
                o, lse = s @ v[:, :1], s.sum(-1, dtype=sum_dtype(q.dtype)) - INF
            case "naive":
                o, lse = naive(q, k, v, problem)
            case "tiled":
                o, lse = tiled_attention(q, k, v, problem, Loops(config.block_m, config.block_n, config.order))
            case "sdpa":
                documents = {} if problem.mask.documents_q is None else {"documents": "documents"}
                if why := why_not("sdpa", wanted(config) | documents | ({"lse": "return_lse"} if return_lse else {})):
                    raise ValueError(why)
                return sdpa(q, k, v, problem, 0.0 if problem.dropout.seed is None else config.dropout_p)
            case _:
                raise ValueError(f"attention.impl={config.impl} cannot run here; resolve() it at start-up")
    return (o, lse) if return_lse else o


# What of a configuration a Problem depends on, but for block_mask, which is a list.
OPTIONS = attrgetter("impl", "softmax_scale", "softcap", "alibi", "window", "documents", "block_mask_size", "dropout_p")
KINDS: dict[tuple, Problem] = {}  # what kind_of() has found, by all that it depends on
MANY = 4096  # KINDS is emptied at this size, which only a loop over lengths reaches


def problem_of(
    q: Tensor,
    k: Tensor,
    config: AttentionConfig,
    given: Given = NOTHING,
    causal: bool = True,
    softmax_scale: float | None = None,
    break_it: BreakIt = UNBROKEN,
) -> Problem:
    """The arguments of attention() as one Problem. given: all of its tensors but blocks; slopes None for the usual
    ones, and a seed that dropout may leave unused. Calls with the same shapes, dtypes, device and options are of one
    kind: what they share is checked and made once. Raises ValueError."""
    if torch.compiler.is_compiling():
        kind = kind_of(q, k, config, given, causal, softmax_scale, break_it)
    else:
        key = (
            OPTIONS(config), config.block_mask and tuple(config.block_mask), q.shape, k.shape, q.dtype, k.dtype,
            q.device, k.device, given.documents_q is None, given.positions is None, given.seed is None,
            causal, softmax_scale, break_it.broken, break_it.score_gain,
        )  # fmt: skip
        if key not in KINDS:
            if len(KINDS) >= MANY:
                KINDS.clear()
            KINDS[key] = kind_of(q, k, config, given, causal, softmax_scale, break_it)._replace(cache={})
        kind = KINDS[key]
    tokens, slopes = [None if x is None else x.contiguous() for x in given[:3]], None
    blocks = None if config.block_mask is None else blocks_of(tuple(config.block_mask), q.device)
    if config.alibi:
        slopes = alibi_slopes(q.shape[1], q.device) if given.slopes is None else given.slopes
        slopes = slopes.to(sum_dtype(q.dtype))
    seed, dropped = given.seed, given.seed is not None and config.dropout_p > 0
    if seed is not None and not (isinstance(seed, Tensor) and (seed.dtype, seed.ndim) == (torch.int64, 0)):
        raise ValueError(f"seed={seed}: want a scalar int64 tensor, as torch.randint gives it")
    return kind.having((*tokens, blocks, slopes, *((seed, given.numbers) if dropped else (None, None))))


def kind_of(
    q: Tensor, k: Tensor, config: AttentionConfig, given: Given, causal: bool, softmax_scale: float | None,
    break_it: BreakIt,
) -> Problem:  # fmt: skip
    """problem_of() without its tensors."""
    check_inputs(q, k, k)
    tokens = given.documents_q is not None or given.positions is not None
    check_switches(config, break_it, causal, tokens, softmax_scale)
    config.check_length(max(q.shape[2], k.shape[2]))
    assert config.windows is None, "a layer's own configuration is wanted: config.layer(i)"
    usual = q.shape[-1] ** -0.5 if "no_scale" not in break_it.broken else 1.0
    usual = usual if config.softmax_scale is None else config.softmax_scale
    scale = usual if softmax_scale is None else softmax_scale
    if not 0 < scale < INF:
        raise ValueError(f"softmax_scale={scale} must be above 0 and finite; None for the usual")
    return Problem.of(
        q.shape[2],
        k.shape[2],
        scale=scale * break_it.score_gain,
        causal=causal,
        window=config.window,
        softcap=config.softcap,
        block_size=config.block_mask_size,
        blocks=blocks_of(tuple(config.block_mask), q.device) if config.block_mask else None,
        drop_threshold=0 if given.seed is None else drop_threshold(config.dropout_p),
        positions=given.positions,
        broken=break_it.broken,
    ).having()


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q, k and v have the shapes of attention(), one floating-point dtype and one device."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape):
        raise ValueError(f"{shapes}: want q (B, H, T, D) and k, v both (B, H_kv, T_k, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: batch and head size must agree")
    if k.shape[3] == 0:
        raise ValueError(f"{shapes}: the head size is 0; give at least one channel")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}: H = {q.shape[1]} query heads are not a multiple of H_kv = {k.shape[1]}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: want one floating-point dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q on {q.device}, k on {k.device}, v on {v.device}: want one device")


# Always made outside inference mode, because they are cached: autograd cannot save a tensor made inside.
@cache
@torch.inference_mode(False)
def blocks_of(picture: tuple[str, ...], device: torch.device) -> Tensor:
    """attention.block_mask as bool (rows, columns): which blocks are computed."""
    return torch.tensor([[block == "x" for block in row] for row in picture], device=device)


@cache
@torch.inference_mode(False)
def alibi_slopes(H: int, device: torch.device) -> Tensor:
    """float32 (H,): r, r**2, r**3, ... with r = 2**(-8 / H) if H is a power of two. Otherwise the slopes of the next
    lower power of two, and then every other slope of the next higher one."""
    n = 1 << H.bit_length() - 1
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)] + [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:H], dtype=torch.float32, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# naive: the definition. Autograd keeps several (B, H, T, T_k) tensors for the backward. Tiling avoids them.


def naive(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """o (B, H, T, D) in q's dtype and lse (B, H, T), float32 (float64 for float64 inputs), by the formulas."""
    mask, dropout, broken = problem.mask, problem.dropout, problem.broken
    rows, columns = range(mask.T), range(mask.T_k)
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # (B, H, T_k, D)
    v = v.repeat_interleave(groups, dim=1)

    scale = problem.score.scale
    if q.dtype == torch.float16:
        # q is scaled before the product, because q k^T exceeds fp16's 65,504 long before the scores do. A power of two
        # rounds nothing but elements of q below 5e-4, to steps of 6e-8.
        first = min(1.0, 2.0 ** math.floor(math.log2(scale)))
        q, scale = q * first, scale / first
    s = (q @ k.mT).to(sum_dtype(q.dtype)) * scale  # 1: (B, H, T, T_k)
    s = modified(s, problem, rows, columns)
    s = s.masked_fill(~visible(problem, rows, columns, q.device).unsqueeze(1), -INF)  # 2
    # 3: m cancels out of p and its gradient; it only keeps exp from overflowing. A row that sees no key has m = -inf,
    # and exp(-inf - -inf) would be NaN, so its m is set to 0.
    m = torch.zeros_like(s[..., :1]) if "no_max" in broken else s.detach().amax(-1, keepdim=True)
    guard = "unguarded_mask" not in broken
    m = m.masked_fill(m == -INF, 0.0) if guard else m
    p = torch.exp2((s - m) * LOG2E)  # exp(s - m). torch.exp takes 400 times as long for -inf, a hidden score
    l = p.sum(-1, keepdim=True)  # (B, H, T, 1)
    empty = l == 0
    l = l.masked_fill(empty, 1.0) if guard else l
    p = p / l
    if dropout.seed is not None:  # 4
        batch_heads = p.shape[0] * p.shape[1] if dropout.numbers is None else dropout.numbers
        keep = keep_mask(dropout.seed, batch_heads, rows, columns, problem.dropout_p)
        p = p * keep.view_as(p) * keep_scale(problem.dropout_p)
    o = p.to(v.dtype) @ v  # 5
    lse = (m + l.log()).masked_fill(empty, -INF).squeeze(-1)  # 6
    return o, lse


def modified(s: Tensor, problem: Problem, rows: range, columns: range) -> Tensor:
    """The rest of step 1: softcap and alibi of s = q k^T * softmax_scale, (B, H, R, S)."""
    cap, slopes = problem.score.softcap, problem.score.slopes
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    return s if slopes is None else s - slopes[:, None, None] * distance(problem, rows, columns, s.device)


# ---------------------------------------------------------------------------------------------------------------------
# sdpa: PyTorch's scaled_dot_product_attention, with the fused kernel that PyTorch picks.


def sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem, dropout_p: float) -> Tensor:
    """o (B, H, T, D). Dropout is PyTorch's own: it draws another mask, and does not round dropout_p to 1/256."""
    bias: Tensor | None = None
    T, T_k, causal = problem.mask.T, problem.mask.T_k, problem.mask.at_most is not None
    aligned = T == T_k  # is_causal aligns the first row and key, not the last ones
    if causal and T < T_k:  # this bias takes no T x T_k memory if a kernel knows it
        from torch.nn.attention.bias import causal_lower_right  # imported here: torch._dynamo takes 2 s

        bias = causal_lower_right(T, T_k)
    elif causal and not aligned:  # some rows see no key, and that bias gives them NaN
        bias = visible(problem, range(T), range(T_k), q.device)[0]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        bias,
        dropout_p,
        is_causal=causal and aligned,
        scale=problem.score.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def sdpa_kernel(model: Any, dtype: torch.dtype, device: torch.device, dropout_p: float) -> str:
    """The kernel that PyTorch picks in training: cudnn, flash, efficient, or math, which takes O(T^2) memory.

    model: GPTConfig; dtype: of q, k and v.
    """
    from torch.nn.attention import SDPBackend  # imported here, as only the banner of a run needs it

    q, k = (
        torch.empty(1, heads, model.context_length, model.head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.n_head, model.n_kv_head)
    )
    chosen = torch._fused_sdp_choice(q, k, k, None, dropout_p, True, enable_gqa=model.n_head != model.n_kv_head)
    return SDPBackend(chosen).name.lower().removesuffix("_attention")
