"""Attention in four implementations, with the same arguments. The first three differ by rounding alone.

    naive     the definition: builds the T x T_k matrix of weights; below
    tiled     FlashAttention in plain PyTorch, one tile at a time: model/tiled.py
    triton    the same as GPU kernels: kernels/launch.py
    sdpa      PyTorch's own, with fewer options and, unlike these, a dropout mask of its own; below

B batch, T query length, T_k key length, H query heads, H_kv key/value heads (H is a multiple of H_kv), D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The steps have these numbers in naive, tiled and triton, and in docs/attention.md, which derives them. (naive divides by
l before step 4.) Skip `in broken` at first reading: there break_it takes a line out.

    forward (p is exp(s - m))                           backward (p is the weight, divided by l)
    1  s = q k^T * softmax_scale (softcap, alibi)        7  delta = rowsum(do * o) - dlse
    2  s = -inf where the mask hides the key             8  p = exp(s - lse), with s from steps 1 and 2 again
    3  online softmax: m, l, alpha, p                    9  dv = (Z p)^T do
    4  dropout: Z p, with Z = keep / (share kept)       10  dp = Z (do v^T)
    5  acc = alpha acc + (Z p) v                        11  ds = p (dp - delta)
    6  o = acc / l, lse = m + log l                     12  dq = ds k * softmax_scale, dk = ds^T q * softmax_scale

Sources: Press et al. 2022 (arXiv 2108.12409) for alibi; Gemma 2 (arXiv 2408.00118) for softcap.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.keys import check, key
from kernels.problem import Problem, runs_kernels
from model.break_it import FAILURES, UNBROKEN, BreakIt
from model.dropout import drop_threshold, keep_mask
from model.mask import positions, visible
from model.op import flash_attention, without_autocast

INF = math.inf
# On a Hopper GPU a training step is faster with triton than with sdpa from this context length on, by head size.
HOPPER_FROM = {64: 1024, 128: 4096}
NOT_SDPA = ("window", "windows", "documents", "block_mask", "softcap", "alibi")


@dataclass
class AttentionConfig:
    """What attention computes, and with which implementation. Raises ValueError for invalid options."""

    impl: str = key("auto", among="auto (chosen at start-up, by resolve()) | naive | tiled | triton | sdpa")
    block_m: int = key(96, "query rows per tile (tiled)", least=1, note="64 to 128 are usual")
    block_n: int = key(96, "key rows per tile (tiled)", least=1, note="64 to 128 are usual")
    softmax_scale: float | None = key(None, "multiplies q k^T", above=0, most=1e30, note="null: 1 / sqrt(head size)")
    softcap: float | None = key(None, "bounds the scores by softcap * tanh(score / softcap); null: off", least=1e-6)
    alibi: bool = key(False, "subtracts slope * distance from the scores; meant for model.position=none")
    window: int | None = key(None, "if causal, how many keys a query sees, its own included", least=1, note="null: all")
    windows: list[int | None] | None = key(None, "one window per layer, repeated: [128,128,128,null]", least=1)
    documents: bool = key(False, "a token sees only its own document (a sequence may hold several)")
    block_mask: list[str] | None = key(None, "which blocks to compute: rows of x (compute) and . (skip)")
    block_mask_size: int = key(64, "tokens along each side of a block of block_mask", least=1)
    dropout_p: float = key(0.0, "share of the attention weights dropped in training", least=0, below=1)

    def __post_init__(self):
        check(self, "attention.")
        drop_threshold(self.dropout_p)  # for its ValueError
        if self.windows is not None and (self.window is not None or not self.windows):
            raise ValueError(f"attention.windows={self.windows}: give at least one window, and no attention.window")
        rows = ["x"] if self.block_mask is None else self.block_mask
        if len({len(row) for row in rows}) != 1 or not rows[0] or set("".join(rows)) - {"x", "."}:
            raise ValueError(f"attention.block_mask={rows}: give rows of x and . of one length, as in [x..,xx.,.xx]")

    def layer(self, i: int) -> "AttentionConfig":
        """The configuration of layer i, with that layer's window."""
        return self if self.windows is None else replace(self, windows=None, window=self.windows[i % len(self.windows)])


def attention(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, *, causal: bool = True, seed: Tensor | None = None,
    spans: Tensor | None = None, break_it: BreakIt = UNBROKEN, return_lse: bool = False,
) -> Any:  # fmt: skip
    """o = dropout(softmax(q k^T * softmax_scale + mask)) v, by the implementation that config.impl names.

    q (B, H, T, D); k, v (B, H_kv, T_k, D); one float dtype, any strides.
    causal: row i sees key j if j <= i + T_k - T, so the last row is aligned with the last key, as in flash-attention.
    seed: int64 scalar tensor on q's device, for the mask of model/dropout.py. None: no dropout, as in evaluation.
    spans: int32 (B, T_k, 2), the first and the last place of each token's document: spans_of() of model/mask.py. The
    queries are the last T tokens. (The model makes spans if config.documents is set; attention() does not.)
    Returns o (B, H, T, D), and with return_lse also lse (B, H, T): natural logarithm, float32 (float64 for float64
    inputs). A row that sees no key gives o = 0, lse = -inf and gradients 0. Raises ValueError for what does not fit.
    tiled and triton have no second derivatives (a gradient penalty) and no forward mode: their jvp is 0."""
    problem = problem_of(q, k, v, config, causal, seed, spans, break_it)  # kernels/problem.py: all but q, k and v
    match config.impl:
        case "naive":
            with without_autocast(q):
                o, lse = naive(q, k, v, problem)
        case "tiled" | "triton":
            o, lse, _ = flash_attention(q, k, v, config.impl, config.block_m, config.block_n, *problem)  # its fields
        case "sdpa":
            if return_lse:
                raise ValueError("sdpa returns no lse; use tiled or triton")
            with without_autocast(q):
                return sdpa(q, k, v, problem)
        case _:
            raise ValueError(f"attention.impl={config.impl} cannot run; resolve() it at start-up")
    return (o, lse) if return_lse else o


def naive(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """o (B, H, T, D) and lse (B, H, T), by the formulas. Autograd keeps some T x T_k matrices, which tiling avoids."""
    rows, columns, broken = range(problem.T), range(problem.T_k), problem.broken
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (B, H, T_k, D)
    scale = problem.scale
    if q.dtype == torch.float16:  # q k^T may overflow where s does not: q takes the power of two in the scale
        part = min(1.0, 2.0 ** math.floor(math.log2(scale)))
        q, scale = q * part, scale / part
    s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale  # 1: (B, H, T, T_k)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if problem.slopes is not None:
        i, j = positions(problem, rows, columns, q.device)
        s = s - problem.slopes.to(s.dtype)[:, None, None] * (i - j).abs()
    s = s.masked_fill(~visible(problem, rows, columns, q.device)[:, None], -INF)  # 2
    # 3: m cancels out of p and its gradient. A row that sees no key has m = -inf, and exp(-inf - -inf) would be NaN.
    m = torch.zeros_like(s[..., :1]) if "no_max" in broken else s.detach().amax(-1, keepdim=True)
    guarded = "unguarded_mask" not in broken
    m = m.masked_fill(m == -INF, 0.0) if guarded else m
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    empty = l == 0
    l = l.masked_fill(empty, 1.0) if guarded else l
    p = p / l  # 6, before the product with v
    if problem.seed is not None:  # 4
        keep = keep_mask(problem.seed, p.shape[0] * p.shape[1], rows, columns, problem.dropout_p)
        p = p * keep.view_as(p) * problem.keep_scale
    o = p.to(v.dtype) @ v  # 5
    return o, (m + l.log()).masked_fill(empty, -INF)[..., 0]  # 6: lse


def sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """PyTorch's scaled_dot_product_attention. Dropout is PyTorch's own: another mask, and dropout_p is not rounded."""
    T, T_k, causal, bias = problem.T, problem.T_k, problem.causal, None
    if causal and T != T_k:  # is_causal aligns the first row and key, not the last ones. A single query sees all keys
        causal, bias = False, (visible(problem, range(T), range(T_k), q.device)[0] if T > 1 else None)
    return F.scaled_dot_product_attention(
        q, k, v, bias, problem.dropout_p, is_causal=causal, scale=problem.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


# --- What is refused, and what runs where -----------------------------------------------------------------------------
def problem_of(q, k, v, config: AttentionConfig, causal=True, seed=None, spans=None, break_it=UNBROKEN) -> Problem:
    """The arguments of attention(), checked, as one Problem. Raises ValueError."""
    fit = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fit or 0 in (*q.shape, *k.shape) or q.shape[1] % k.shape[1]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}: want q (B, H, T, D) and k, v both (B, H_kv, T_k, D), with H a multiple of H_kv")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.is_floating_point()):
        raise ValueError(f"q {q.dtype} {q.device}, k {k.dtype} {k.device}, v {v.dtype} {v.device}: want one of each")
    (_, H, T, D), T_k = q.shape, k.shape[2]
    assert config.windows is None, "a layer's own configuration is wanted: config.layer(i)"
    if spans is not None and (spans.shape != (k.shape[0], T_k, 2) or T > T_k or spans.dtype != torch.int32):
        raise ValueError(f"spans {spans.dtype} {tuple(spans.shape)}: want spans_of() (B, T_k, 2), T={T} <= T_k={T_k}")
    scalar = isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.ndim == 0 and seed.device == q.device
    if seed is not None and not scalar:
        raise ValueError(f"seed={seed!r}: want an int64 scalar on {q.device}, as torch.tensor(5) on a CPU")
    blocks = None if config.block_mask is None else blocks_of(tuple(config.block_mask), q.device)
    if blocks is not None and (covered := min(blocks.shape) * config.block_mask_size) < max(T, T_k):
        raise ValueError(f"attention.block_mask covers {covered} tokens of {max(T, T_k)}: draw more blocks")
    if config.impl == "sdpa" and (spans is not None or any(getattr(config, name) for name in NOT_SDPA)):
        raise ValueError(f"sdpa has no {', '.join(NOT_SDPA)}; use tiled or triton")
    scale = config.softmax_scale or (1.0 if "no_scale" in break_it.removed else D**-0.5)
    if break_it.broken:
        check_failures(config, break_it, causal, spans)
    window = config.window if config.window and config.window < max(T, T_k) else None  # a wider one hides nothing
    dropping = seed is not None and config.dropout_p > 0
    return Problem(
        T=T, T_k=T_k, causal=causal, window=window, spans=spans, blocks=blocks,
        block_size=config.block_mask_size, scale=scale * break_it.score_gain, softcap=config.softcap,
        slopes=alibi_slopes(H, q.device) if config.alibi else None, seed=seed if dropping else None,
        dropout_p=config.dropout_p if dropping else 0.0, broken=break_it.removed,  # .broken; a mystery by its name
    )  # fmt: skip


# Both tensors are cached, because a CUDA graph cannot contain a copy from the host. They are made outside inference
# mode, because autograd cannot save a tensor that was made inside.
@cache
@torch.inference_mode(False)
def blocks_of(picture: tuple[str, ...], device: torch.device) -> Tensor:
    """attention.block_mask as bool (rows, columns)."""
    return torch.tensor([[block == "x" for block in row] for row in picture], device=device)


@cache
@torch.inference_mode(False)
def alibi_slopes(H: int, device: torch.device) -> Tensor:
    """float32 (H,): r, r**2, r**3, ... with r = 2**(-8 / H) if H is a power of two. Otherwise the slopes of the next
    lower power of two, and then every other slope of the next higher one."""
    n = 1 << (H.bit_length() - 1)  # the largest power of two up to H
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)] + [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:H], dtype=torch.float32, device=device)


def resolve(config: AttentionConfig, device: str, head_size: int, T=None, break_it=UNBROKEN) -> AttentionConfig:
    """Turns impl=auto into the implementation that will run. T: the context length of a training; None: sampling.

    Without a CUDA GPU: tiled, so that the code to read is the code that runs. On a GPU with our kernels: triton for
    sampling, for a training that is faster with it, and for what sdpa lacks (dropout's mask, failures, options); else
    sdpa. On a GPU without them: sdpa, and tiled for what it lacks."""
    if config.impl != "auto":
        return config
    if not device.startswith("cuda"):
        return replace(config, impl="tiled")
    kernels = runs_kernels(torch.device(device)) and head_size <= 256
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    faster = kernels and (T is None or (hopper and T >= HOPPER_FROM.get(head_size, INF)))
    if faster or config.dropout_p > 0 or break_it.broken or any(getattr(config, name) for name in NOT_SDPA):
        return replace(config, impl="triton" if kernels else "tiled")
    return replace(config, impl="sdpa")


def check_failures(config: AttentionConfig, break_it: BreakIt, causal: bool, spans: Tensor | None) -> None:
    """Raises ValueError for a failure that has nothing to remove, or that the implementation lacks."""
    masked = spans is not None or config.window or config.block_mask
    nothing_to_remove = {
        "no_scale": config.softmax_scale and "softmax_scale replaces 1 / sqrt(D); leave it out",
        "local_mask": (not causal or masked) and "only the causal mask alone can be broken",
        "stale_seed": config.dropout_p == 0 and "there is no dropout; use attention.dropout_p=0.5",
    }
    for name in break_it.removed:
        why = nothing_to_remove.get(name) or (config.impl == "naive" and FAILURES[name].not_in_naive)
        if config.impl == "sdpa" and name != "no_scale":
            why = "torch's sdpa cannot be broken; use tiled"
        if why:
            raise ValueError(f"break_it={break_it.label}: {why}")
