"""Causal attention, three ways behind one door, with the same names, the same masks and the same answers.

    attention(q, k, v, config)      the door: chooses by config.impl
      naive                         the definition: builds the whole T x T_k matrix of weights
      tiled                         FlashAttention in plain PyTorch: never holds more than one tile of it
      sdpa                          torch's own, the yardstick

Shapes: B batch, T query length, T_k key length, H query heads, H_kv key/value heads (H a multiple), D head size.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)

The steps carry the same numbers in every implementation:

    forward                                             backward
    1  s = q k^T * softmax_scale                         7  delta = rowsum(do * o) - dlse
    2  s = -inf where the mask hides the key             8  p = exp(s - lse): the weights, computed again (1, 2)
    3  online softmax: m, l, alpha, p                    9  dv = (Z p)^T do
    4  dropout: Z p, with Z = keep / (share kept)       10  dp = Z (do v^T)
    5  acc = alpha acc + (Z p) v                        11  ds = p (dp - delta)
    6  o = acc / l, lse = m + log l                     12  dq = ds k * softmax_scale, dk = ds^T q * softmax_scale

Sources: Dao et al. 2022 (arXiv 2205.14135); Dao 2023 (arXiv 2307.08691), whose loop order (queries outside, keys
inside) and lse this follows; Milakov & Gimelshein 2018 (arXiv 1805.02867) for the online softmax.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.dropout import drop_threshold, keep_mask, keep_scale

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
    window: int | None = None  # keys a query sees, itself included; None: all of the past
    dropout_p: float = 0.0  # on the weights, while training

    def __post_init__(self):
        if self.impl not in ("auto", "naive", "tiled", "sdpa", "triton"):
            raise ValueError(f"attention.impl={self.impl} is not known; choose auto, naive, tiled, sdpa or triton")
        for name in ("block_m", "block_n"):
            if getattr(self, name) < 1:
                raise ValueError(f"attention.{name}={getattr(self, name)} must be at least 1; 64 or 128 are usual")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1 (a query sees itself); null for none")
        drop_threshold(self.dropout_p)


@dataclass
class BreakIt:
    """Takes a line out of the algorithm, to see what it was for. True is whole; every switch stands where it acts."""

    # Without the maximum exp(s) overflows once a score passes 88.7 (log of the largest float32): l = inf, and o is
    # inf / inf. Below that nothing happens at all, which is why the fault can sleep for weeks. naive, tiled.
    subtract_max: bool = True
    # Without alpha the earlier tiles stay on the scale of an older, smaller maximum and weigh too much. Never NaN: the
    # output stays finite and wrong, the more the larger the scores; right where one tile holds all keys. tiled.
    rescale_sum: bool = True
    rescale_output: bool = True
    score_gain: float = 1.0  # multiplies the scores, to bring a failure on; 1 leaves attention as it is

    def __post_init__(self):
        if not 0 < self.score_gain <= 1e30:
            raise ValueError(f"break_it.score_gain={self.score_gain} is outside (0, 1e30]; 1 changes nothing")

    @property
    def label(self) -> str:
        """Names what is broken, for banners, run names and tags; empty when nothing is."""
        rescale = {
            (True, True): "",
            (False, False): "no_rescale",
            (False, True): "no_rescale_sum",
            (True, False): "no_rescale_output",
        }
        parts = [
            "" if self.subtract_max else "no_max",
            rescale[self.rescale_sum, self.rescale_output],
            "" if self.score_gain == 1.0 else f"gain_{self.score_gain:g}",
        ]
        return "+".join(part for part in parts if part)


WHOLE = BreakIt()


def resolve(config: AttentionConfig, device: str, break_it: BreakIt = WHOLE) -> AttentionConfig:
    """Turns impl=auto into the implementation that will run, and refuses one that cannot, before any work is done.

    auto: torch's fused kernel on a GPU, tiled elsewhere, and tiled wherever sdpa lacks what is asked for (a window, our
    dropout mask, a switch of break_it).
    Raises ValueError naming the reason and the way out.
    """
    special = config.window is not None or config.dropout_p > 0 or not unbroken(break_it)
    if config.impl == "auto":
        config = replace(config, impl="sdpa" if device.startswith("cuda") and not special else "tiled")
    if config.impl == "triton":
        raise ValueError("attention.impl=triton is not built yet; use attention=tiled (any device) or attention=sdpa")
    if config.impl == "sdpa" and config.window is not None:
        raise ValueError(f"attention.window={config.window}: sdpa has no sliding window; use attention=tiled")
    check_switches(config.impl, break_it)
    return config


def unbroken(break_it: BreakIt) -> bool:
    return break_it.subtract_max and break_it.rescale_sum and break_it.rescale_output


def check_switches(impl: str, break_it: BreakIt) -> None:
    """A switch that an implementation has nothing to remove from is an error, never ignored."""
    rescales = break_it.rescale_sum and break_it.rescale_output
    if impl == "naive" and not rescales:
        raise ValueError(f"break_it={break_it.label}: naive rescales nothing, it has one pass; use attention=tiled")
    if impl == "sdpa" and not unbroken(break_it):
        raise ValueError(f"break_it={break_it.label}: torch's sdpa cannot be broken; use attention=tiled")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    seed: Tensor | None = None,
    break_it: BreakIt = WHOLE,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """o = dropout(softmax(q k^T * softmax_scale + mask)) v, by the implementation that config.impl names.

    q (B, H, T, D); k, v (B, H_kv, T_k, D) with H a multiple of H_kv; one float dtype, any strides.
    causal: row i sees key j where j <= i + T_k - T, the diagonal aligned at the end as flash-attention has it.
    softmax_scale: 1 / sqrt(D) when None.
    seed: int64 scalar tensor on q's device; given, the weights are dropped with config.dropout_p by the mask of
    model/dropout.py. None: no dropout, as in evaluation. (sdpa alone draws torch's own mask, whatever the seed.)
    Returns o (B, H, T, D) in q's dtype, and with return_lse also lse (B, H, T): natural logarithm, float32 (float64 for
    float64 inputs). A row with nothing to see gives o = 0, lse = -inf and gradients 0.
    Raises ValueError on shapes, dtypes, devices or options that do not go together.
    """
    check_inputs(q, k, v)
    check_switches(config.impl, break_it)
    dropout_p = 0.0 if seed is None else config.dropout_p
    scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * break_it.score_gain

    # Autocast would round the float32 running sums to bf16; the dtype of q, k and v has been chosen by now.
    with torch.autocast(q.device.type, enabled=False):
        match config.impl:
            case "naive":
                o, lse = naive(q, k, v, scale, causal, config.window, dropout_p, seed, break_it)
            case "tiled":
                tile = (config.block_m, config.block_n)
                o, lse = Tiled.apply(q, k, v, seed, scale, causal, config.window, dropout_p, tile, break_it)
            case "sdpa":
                if config.window is not None or return_lse:
                    raise ValueError("sdpa has neither a sliding window nor an lse to return; use impl=tiled")
                return sdpa(q, k, v, scale, causal, dropout_p)
            case _:
                raise ValueError(f"attention.impl={config.impl} cannot run here; resolve() it at start-up")
    return (o, lse) if return_lse else o


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape):
        raise ValueError(f"{shapes}: want q (B, H, T, D) and k, v both (B, H_kv, T_k, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: batch and head size must agree")
    if k.shape[2] == 0:
        raise ValueError(f"{shapes}: there are no keys to attend to")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}: H = {q.shape[1]} query heads are not a multiple of H_kv = {k.shape[1]}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: want one floating-point dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q on {q.device}, k on {k.device}, v on {v.device}: want one device")


def visible(rows: Tensor, columns: Tensor, offset: int, causal: bool, window: int | None) -> Tensor:
    """The mask: may query row i see key column j? offset = T_k - T, so that row i stands at key i + offset.

    rows (R,), columns (S,) integers; returns bool (R, S).
    """
    i, j = rows[:, None] + offset, columns[None, :]
    seen = j <= i if causal else torch.ones(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    if window is not None:
        seen &= (j > i - window) & (j < i + window)
    return seen


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and exponentials are held in: float32, or float64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# naive: the definition. Autograd keeps several (B, H, T, T_k) tensors for the backward; that is what tiling is against.


def naive(q, k, v, scale, causal, window, dropout_p, seed, break_it):
    T, T_k = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # (B, H, T_k, D)
    v = v.repeat_interleave(groups, dim=1)

    s = (q @ k.mT).to(sum_dtype(q.dtype)) * scale  # 1: (B, H, T, T_k)
    rows, columns = torch.arange(T, device=q.device), torch.arange(T_k, device=q.device)
    s = s.masked_fill(~visible(rows, columns, T_k - T, causal, window), -INF)  # 2
    # 3: the maximum cancels out of the fraction and of its gradient; it only keeps exp below infinity. A row with
    # nothing to see has m = -inf, and exp(-inf - -inf) would be NaN, so such a row is shifted by 0.
    m = s.detach().amax(-1, keepdim=True) if break_it.subtract_max else torch.zeros_like(s[..., :1])
    m = m.masked_fill(m == -INF, 0.0)
    p = torch.exp2((s - m) * LOG2E)  # exp(s - m); torch.exp takes 400 times as long for -inf, which hidden scores are
    l = p.sum(-1, keepdim=True)  # (B, H, T, 1)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    p = p / l
    if dropout_p > 0:  # 4
        keep = keep_mask(seed, p.shape[0] * p.shape[1], range(T), range(T_k), dropout_p)
        p = p * keep.view_as(p) * keep_scale(dropout_p)
    o = p.to(v.dtype) @ v  # 5
    lse = (m + l.log()).masked_fill(empty, -INF).squeeze(-1)  # 6
    return o, lse


# ---------------------------------------------------------------------------------------------------------------------
# tiled: the same answer without the matrix. Queries outside, keys inside; only o and lse outlive the loop.
#
# Inside, s and m are in base 2: log2(e) goes into the scale, and 2**s is e**(q k^T softmax_scale). GPU kernels do it
# because exp2 is the instruction they have; here it saves a pass over the tile. lse leaves as a natural logarithm.


def key_tiles(
    rows: range, T: int, T_k: int, causal: bool, window: int | None, block_n: int
) -> Iterator[tuple[int, range, bool]]:
    """The key tiles that a tile of query rows has to visit: number, columns, and whether the mask hides a part.

    Tiles wholly beyond the diagonal or outside the window are left out: half of the work of causal attention.
    """
    offset = T_k - T
    first, last = rows.start + offset, rows.stop - 1 + offset  # the rows' own positions among the keys
    start, stop = 0, T_k
    if causal:
        stop = min(stop, last + 1)
    if window is not None:
        start = max(start, first - window + 1)
        stop = min(stop, last + window)
    for j in range(start // block_n, -(-stop // block_n)):
        columns = range(j * block_n, min((j + 1) * block_n, T_k))
        in_the_past = not causal or columns[-1] <= first
        in_the_window = window is None or (last - columns[0] < window and columns[-1] - first < window)
        yield j, columns, not (in_the_past and in_the_window)


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
    grouped heads need no copies of k and v:  q (N, G, T, D), k and v (N, T_k, D), with N = B * H_kv, G = H / H_kv.
    """

    @staticmethod
    def forward(ctx, q, k, v, seed, scale, causal, window, dropout_p, tile, break_it):
        ctx.set_materialize_grads(False)
        B, H, T, _ = q.shape
        T_k = k.shape[2]
        ctx.options = (scale, causal, window, dropout_p, tile)
        ctx.k_shape = k.shape
        qn, kn, vn = by_key_head(q, k, v)
        o = like_heads(q.shape, q)
        lse = torch.empty(B, H, T, dtype=sum_dtype(q.dtype), device=q.device)

        k_tiles, v_tiles = kn.split(tile[1], dim=1), vn.split(tile[1], dim=1)  # views (N, block_n, D)
        on_chip = lse.new_empty(B * H * min(tile[0], T) * min(tile[1], T_k))  # one tile of scores, used again and again
        for rows in tiles(T, tile[0]):
            q_i = rows_of(qn, rows)  # (N, G*block_m, D)
            m = torch.full((*q_i.shape[:2], 1), LOWEST, dtype=lse.dtype, device=q.device)
            l = torch.zeros_like(m)
            acc = torch.zeros(q_i.shape, dtype=lse.dtype, device=q.device)
            for j, columns, masked in key_tiles(rows, T, T_k, causal, window, tile[1]):
                s = scores(q_i, k_tiles[j], scale * LOG2E, on_chip)  # 1: (N, G*block_m, block_n)
                if masked:
                    hide(s, rows, columns, T_k - T, causal, window)  # 2
                p, m, l, alpha = online_softmax(s, m, l, break_it)  # 3
                if dropout_p > 0:
                    p *= dropout_factor(seed, B * H, rows, columns, dropout_p, p)  # 4
                acc = add_product(acc.mul_(alpha), p.to(v.dtype), v_tiles[j])  # 5
            put_rows(o, rows, acc / l.clamp(min=TINY))  # 6: a row that saw nothing has 0 / TINY,
            lse[:, :, rows.start : rows.stop] = (m / LOG2E + l.log()).view(B, H, len(rows))  # and log 0 = -inf

        ctx.save_for_backward(qn, kn, vn, seed, o, lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, seed, o, lse = ctx.saved_tensors
        scale, causal, window, dropout_p, tile = ctx.options
        B, H = o.shape[:2]
        (N, G, T, D), T_k = q.shape, k.shape[1]
        do = torch.zeros_like(o) if do is None else do
        delta = (do.to(lse.dtype) * o).sum(-1, keepdim=True)  # 7: (B, H, T, 1)
        if dlse is not None:
            delta -= dlse.unsqueeze(-1)
        # A row that saw nothing has lse = -inf; with +inf in its place every weight of it comes out as 2**-inf = 0.
        lse2 = (lse * LOG2E).masked_fill(lse == -INF, INF).view(N, G, T, 1)
        delta, don = delta.view(N, G, T, 1), do.reshape(N, G, T, D)
        dq = like_heads(o.shape, o)
        k_tiles, v_tiles = k.split(tile[1], dim=1), v.split(tile[1], dim=1)
        dk, dv = (like_heads(ctx.k_shape, lse).zero_() for _ in "kv")
        on_chip = lse.new_empty(2, B * H * min(tile[0], T) * min(tile[1], T_k))  # one tile of s and one of dp

        for rows in tiles(T, tile[0]):
            q_i, do_i, lse_i, delta_i = (rows_of(x, rows) for x in (q, don, lse2, delta))
            dq_i = torch.zeros(q_i.shape, dtype=lse.dtype, device=q.device)
            for j, columns, masked in key_tiles(rows, T, T_k, causal, window, tile[1]):
                s = scores(q_i, k_tiles[j], scale * LOG2E, on_chip[0])
                if masked:
                    hide(s, rows, columns, T_k - T, causal, window)
                p = s.sub_(lse_i).exp2_()  # 8
                dp = scores(do_i, v_tiles[j], 1.0, on_chip[1])
                zp = p
                if dropout_p > 0:  # drawn again: the same bits as in the forward
                    z = dropout_factor(seed, B * H, rows, columns, dropout_p, p)
                    zp, dp = z * p, dp.mul_(z)  # 10
                put_rows(dv, columns, torch.bmm(zp.to(v.dtype).mT, do_i), add=1.0)  # 9
                ds = dp.sub_(delta_i).mul_(p).to(q.dtype)  # 11
                add_product(dq_i, ds, k_tiles[j], scale)  # 12
                put_rows(dk, columns, torch.bmm(ds.mT, q_i), add=scale)
            put_rows(dq, rows, dq_i)

        return dq, dk.to(k.dtype), dv.to(v.dtype), *[None] * 7


def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D) to (N, G, T, D); k and v (B, H_kv, T_k, D) to (N, T_k, D)."""
    B, H_kv, T_k, D = k.shape
    N = B * H_kv
    return q.reshape(N, q.shape[1] // H_kv, q.shape[2], D), k.reshape(N, T_k, D), v.reshape(N, T_k, D)


def tiles(length: int, block: int) -> list[range]:
    return [range(i, min(i + block, length)) for i in range(0, length, block)]


def rows_of(x: Tensor, rows: range) -> Tensor:
    return x[:, :, rows.start : rows.stop].flatten(1, 2)  # (N, G, T, ...) to (N, G*block_m, ...)


def like_heads(shape: torch.Size, x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D): what the projection after it reads without a copy."""
    B, H, T, D = shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def put_rows(x: Tensor, rows: range, values: Tensor, add: float | None = None) -> None:
    """Write the values of one tile, (N, G*block_m, D), to its rows of x (B, H, T, D); or add `add` times the values."""
    B, H, _, D = x.shape
    x, values = x[:, :, rows.start : rows.stop], values.view(B, H, len(rows), D)
    x.copy_(values) if add is None else x.add_(values, alpha=add)


def scores(q_i: Tensor, k_j: Tensor, scale: float, memory: Tensor) -> Tensor:
    """scale q_i k_j^T, (N, R, D) and (N, block_n, D) to (N, R, block_n): a view of memory, which has the wide dtype."""
    N, R, C = q_i.shape[0], q_i.shape[1], k_j.shape[1]
    s = memory[: N * R * C].view(N, R, C)
    if s.dtype == q_i.dtype:  # baddbmm's alpha scales inside the product, which saves a pass over the tile
        return torch.baddbmm(s, q_i, k_j.mT, beta=0, alpha=scale, out=s)
    return s.copy_(torch.bmm(q_i, k_j.mT)).mul_(scale)  # in 16 bits alpha would cost a second rounding


def add_product(acc: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """acc += scale a b in place. Where acc is wider than the factors, the product is rounded to their dtype first."""
    return acc.baddbmm_(a, b, alpha=scale) if acc.dtype == a.dtype else acc.add_(torch.bmm(a, b), alpha=scale)


def hide(s: Tensor, rows: range, columns: range, offset: int, causal: bool, window: int | None) -> None:
    i, j = (torch.arange(x.start, x.stop, device=s.device) for x in (rows, columns))
    limit = torch.where(visible(i, j, offset, causal, window), INF, -INF)
    # The smaller of score and limit: on a CPU masked_fill_ with a broadcast mask takes longer than the exponentials.
    # The price: a NaN score stays NaN where it is hidden, so a NaN key shows in the earlier rows of its own tile too.
    s.unflatten(1, (-1, len(rows))).clamp_(max=limit)  # the same for each of the G heads


def dropout_factor(seed: Tensor, n: int, rows: range, columns: range, dropout_p: float, p: Tensor) -> Tensor:
    """Z of one tile, in the shape and dtype of its weights p: 0 where dropped, 1 / (share kept) elsewhere."""
    return keep_mask(seed, n, rows, columns, dropout_p).to(p.dtype).mul_(keep_scale(dropout_p)).view_as(p)


# ---------------------------------------------------------------------------------------------------------------------
# sdpa: whatever fused kernel torch picks.


def sdpa(q, k, v, scale, causal, dropout_p):
    T, T_k = q.shape[2], k.shape[2]
    mask = None
    if causal and T_k != T:  # is_causal aligns the diagonal at the start; ours is at the end
        rows, columns = torch.arange(T, device=q.device), torch.arange(T_k, device=q.device)
        mask = visible(rows, columns, T_k - T, True, None)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
