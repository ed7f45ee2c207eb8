"""FlashAttention-2 in plain PyTorch: naive's result, one tile of scores at a time. Both passes have rows in the outer
loop and columns in the inner one; the paper's backward has columns outside, for the sake of a GPU.

B batch, T queries, T_k keys, H query heads, H_kv key/value heads, D head size. The G = H / H_kv query heads of a key
head are rows of one matrix, so keys are not copied. With N = B * H_kv, R rows and S columns of a tile:
    q, o, do (B, H, T, D), a tile (N, G R, D)    k, v (B, H_kv, T_k, D), a tile (N, S, D)    scores (N, G R, S)
The steps have the numbers of model/attention.py. Scores, m and lse2 are in base 2, because hardware has exp2: log2(e)
goes into the scale. lse is a natural logarithm. Products and sums are in float32 (float64 for float64 inputs); for
the products Z p and ds are rounded to the inputs' dtype, as a GPU kernel has to.

Sources: Dao 2023 (arXiv 2307.08691); Milakov and Gimelshein 2018 (arXiv 1805.02867) for the online softmax.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.problem import LOWEST, Problem, empty_heads, tile_table
from model.dropout import keep_mask
from model.mask import positions, visible

INF = math.inf
LOG2E = math.log2(math.e)
TINY = torch.finfo(torch.float32).tiny  # l is 1 or more in a row that sees a key, so the clamp changes only l = 0

Watch = Callable[..., None] | None  # watch(rows, columns, s=, p=, ...), after each tile: for the trace and the probe


def tiles_of(problem: Problem, block_m: int, block_n: int, device: torch.device) -> Iterator[tuple[range, list]]:
    """For each tile of rows, the tiles of columns to visit, each with whether the mask cuts it: (range, bool)."""
    visited, whole = tile_table(problem, block_m, block_n, device)  # any or all scores seen: (1 or B, tiles, tiles)
    visit, cut = visited.any(0).tolist(), (~whole).any(0).tolist()  # of any sequence of the batch
    columns = [range(j, min(j + block_n, problem.T_k)) for j in range(0, problem.T_k, block_n)]
    for t, i in enumerate(range(0, problem.T, block_m)):
        tiles = [(c, cut[t][u]) for u, c in enumerate(columns) if visit[t][u]]
        yield range(i, min(i + block_m, problem.T)), tiles


def by_key_head(H_kv: int, *tensors: Tensor) -> list[Tensor]:
    """(B, H or H_kv, T, D) to (N, G or 1, T, D), in the dtype of sums."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.to(wide).reshape(x.shape[0] * H_kv, x.shape[1] // H_kv, *x.shape[2:]) for x in tensors]


def tile(x: Tensor, part: range) -> Tensor:
    """Rows of x (N, G, T, D) as one matrix, (N, G * len(part), D). A view where G is 1."""
    return x[:, :, part.start : part.stop].flatten(1, 2)


def forward(q, k, v, problem: Problem, block_m: int, block_n: int, watch: Watch = None) -> tuple[Tensor, ...]:
    """Steps 1 to 6: o like q; lse (B, H, T) in the dtype of sums; lse in base 2 for the backward."""
    (B, H, T, D), dtype, broken = q.shape, q.dtype, problem.broken
    o = empty_heads(q)  # (B, H, T, D), which lies in memory as (B, T, H, D)
    q, k, v = by_key_head(k.shape[1], q, k, v)
    lse, lse2 = q.new_empty(B, H, T), q.new_empty(B, H, T)
    # LOWEST, not the papers' -inf: in a hidden first tile exp(-inf - -inf) is NaN.
    start = 0.0 if "zero_init_max" in broken else -INF if "unguarded_mask" in broken else LOWEST
    for rows, tiles in tiles_of(problem, block_m, block_n, q.device):
        q_i = tile(q, rows)
        m = q.new_full((*q_i.shape[:2], 1), start)
        l, acc = torch.zeros_like(m), torch.zeros_like(q_i)
        for columns, cut in tiles:
            s, _ = scores(q_i, tile(k, columns), rows, columns, cut, problem)  # 1, 2
            p, m, l, alpha = online_softmax(s if watch is None else s.clone(), m, l, broken)  # 3: p overwrites s
            z = dropout_factor(p, rows, columns, problem)  # 4
            zp = (p if z is None else z * p).to(dtype).to(p.dtype)
            acc = alpha * acc + zp @ tile(v, columns)  # 5
            if watch is not None:
                watch(rows, columns, s=s, p=p, z=z, alpha=alpha, m=m, l=l, acc=acc)
        acc = acc / (l if "unguarded_mask" in broken else l.clamp(min=TINY))  # 6
        o[:, :, rows.start : rows.stop] = acc.view(B, H, len(rows), D)
        lse[:, :, rows.start : rows.stop] = (m / LOG2E + l.log()).view(B, H, len(rows))
        lse2[:, :, rows.start : rows.stop] = (m + l.log2()).view(B, H, len(rows))
    return o, lse, lse2


def online_softmax(s: Tensor, m: Tensor, l: Tensor, broken: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Step 3 for one tile: p (in s's memory), the new m and l, and alpha, which multiplies the earlier tiles' sums.
    s (N, G R, S); m, l, alpha (N, G R, 1). Before the first tile m is LOWEST and l is 0."""
    m_new = torch.zeros_like(m) if "no_max" in broken else torch.maximum(m, s.amax(-1, keepdim=True))
    p, alpha = s.sub_(m_new).exp2_(), torch.exp2(m - m_new)
    l = (l if "no_rescale_sum" in broken else alpha * l) + p.sum(-1, keepdim=True)
    return p, m_new, l, torch.ones_like(alpha) if "no_rescale_output" in broken else alpha


def backward(q, k, v, o, lse2, do, dlse, problem: Problem, block_m: int, block_n: int, watch: Watch = None):
    """Steps 7 to 12: dq, dk, dv like q, k, v. The weights are computed again from lse2. dlse: None, or like lse."""
    if problem.seed is not None and "stale_seed" in problem.broken:
        problem = problem._replace(seed=problem.seed + 1)
    shapes, dtype = (q.shape, k.shape, v.shape), q.dtype
    delta = (do.to(lse2.dtype) * o).sum(-1, keepdim=True)  # 7: (B, H, T, 1)
    delta = delta if dlse is None else delta - dlse[..., None]
    # A row that sees no key has lse2 = -inf. With inf its weights are 2**-inf = 0.
    lse2 = lse2 if "unguarded_mask" in problem.broken else lse2.masked_fill(lse2 == -INF, INF)
    q, k, v, do, delta, lse2 = by_key_head(k.shape[1], q, k, v, do, delta, lse2[..., None])
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)  # contiguous, as the op's fake says
    for rows, tiles in tiles_of(problem, block_m, block_n, q.device):
        q_i = tile(q, rows)
        do_i, delta_i, lse2_i = tile(do, rows), tile(delta, rows), tile(lse2, rows)
        dq_i = torch.zeros_like(q_i)
        for columns, cut in tiles:
            k_j, v_j, dk_j, dv_j = (tile(x, columns) for x in (k, v, dk, dv))  # views, so += below adds to dk and dv
            s, softcap_grad = scores(q_i, k_j, rows, columns, cut, problem)
            # In place: a new tensor for each result took a third longer.
            p = (s if watch is None else s.clone()).sub_(lse2_i).exp2_()  # 8
            z = dropout_factor(p, rows, columns, problem)  # the same bits as in the forward
            zp = (p if z is None else z * p).to(dtype).to(p.dtype)
            dv_j += zp.mT @ do_i  # 9 (baddbmm_ into a slice would run one head at a time)
            dp = do_i @ v_j.mT  # 10
            dp = dp if z is None else z * dp
            ds = dp.sub_(delta_i).mul_(p)  # 11
            ds = (ds if softcap_grad is None else ds * softcap_grad).to(dtype).to(p.dtype)
            dq_i += ds @ k_j  # 12
            dk_j += ds.mT @ q_i
            if watch is not None:
                watch(rows, columns, delta=delta_i, s=s, p=p, z=z, zp=zp, ds=ds, dq=dq_i, dk=dk_j, dv=dv_j)
        dq[:, :, rows.start : rows.stop] = dq_i.view(*q.shape[:2], len(rows), -1)
    dq *= problem.scale  # here and not in every tile; no log2(e), because ds is for natural scores
    dk *= problem.scale
    return [x.view(shape).to(dtype) for x, shape in zip((dq, dk, dv), shapes, strict=True)]


def scores(q_i: Tensor, k_j: Tensor, rows: range, columns: range, cut: bool, problem: Problem):
    """Steps 1 and 2, in base 2: (N, G R, S), and under softcap d score / d (q k^T scale)."""
    s, softcap_grad = q_i @ k_j.mT, None
    s *= problem.scale * LOG2E
    if problem.softcap is not None:
        t = torch.tanh(s / (problem.softcap * LOG2E))
        s, softcap_grad = t * (problem.softcap * LOG2E), 1 - t * t
    if problem.slopes is not None:
        i, j = positions(problem, rows, columns, s.device)
        bias = (problem.slopes.to(s.dtype) * LOG2E)[:, None, None] * (i - j).abs()  # (H, R, S)
        s = (s.view(-1, *bias.shape) - bias).view_as(s)  # s (N, G R, S) is read as (B, H, R, S)
    if cut:
        seen = visible(problem, rows, columns, s.device)[:, None]  # (1 or B, 1, R, S): the same for all heads
        # s is read as (1, B H, R, S) or (B, H, R, S). Added, because masked_fill is slow on a CPU.
        s.view(len(seen), -1, *seen.shape[2:]).add_(torch.where(seen, 0.0, -INF))
    return s, softcap_grad


def dropout_factor(p: Tensor, rows: range, columns: range, problem: Problem) -> Tensor | None:
    """Z, like p: 0 where dropped, 1 / (share kept) elsewhere. None without dropout."""
    if problem.seed is None:
        return None
    heads = p.shape[0] * p.shape[1] // len(rows)
    keep = keep_mask(problem.seed, heads, rows, columns, problem.dropout_p)
    return keep.view_as(p).to(p.dtype) * problem.keep_scale
