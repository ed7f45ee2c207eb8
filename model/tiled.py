"""FlashAttention in plain PyTorch: naive's answer without the T x T_k matrix of weights.

Shapes: B batch, T query length, T_k key length, H query heads, H_kv key/value heads, D head size; N = B * H_kv.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)
Inside, the G = H / H_kv query heads that share a key head lie one below the other as more rows of the same matrix, so
that grouped heads need no copies of k and v:
    q, do (N, G, T, D)    k, v (N, 1, T_k, D)    a tile of them (N, R, D), (N, S, D)    a tile of scores (N, R, S)

The steps have the numbers of model/attention.py; docs/attention.md derives them.

Slow memory is what has length T. In the forward, after by_key_head(), a tile of it comes on chip by load() and goes
back by store(): that is the traffic that `python bench.py mode=traffic` counts.

Inside, s and m are in base 2: log2(e) goes into the scale, and 2**s is e**(q k^T softmax_scale). GPU kernels do it
because exp2 is the instruction they have; here it saves a pass over the tile. lse leaves as a natural logarithm.

Sources: Dao et al. 2022 (arXiv 2205.14135), order=keys_outside; Dao 2023 (arXiv 2307.08691), order=queries_outside and
lse; Milakov & Gimelshein 2018 (arXiv 1805.02867), the online softmax.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.problem import Problem, refuse_tangents
from model.dropout import keep_mask, keep_scale
from model.mask import PART, Tile, Tiling, distance, visible

INF = float("inf")
LOG2E = math.log2(math.e)
# Where the running maximum starts. -inf in the papers; but a row whose first tile is hidden altogether would then have
# exp(-inf - -inf), which is NaN. From the lowest float32 it has exp(-inf - LOWEST) = 0, and needs no guard.
LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny  # below any sum that holds a weight: the largest weight of a row is 1

State = tuple[Tensor, Tensor, Tensor]  # m, l (N, R, 1) and acc (N, R, D) of a tile of rows


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, block_m: int, block_n: int, order: str = "queries_outside"
) -> tuple[Tensor, Tensor]:
    """o (B, H, T, D) in q's dtype and lse (B, H, T), float32 or q's float64; both have gradients.

    block_m, block_n: rows and columns of a tile. order: queries_outside | keys_outside, of the loops.
    """
    # by_key_head() copies where there are several sequences. Here and not inside, because what Tiled saves are its
    # inputs: so autograd sees them change in place, and finds the way from a second gradient back to them.
    if q.shape[0] > 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # torch.compile leaves it as it is. It would unroll the loops, and lose second derivatives without a word.
    apply = torch.compiler.disable(Tiled.apply) if torch.compiler.is_compiling() else Tiled.apply
    return apply(q, k, v, problem, block_m, block_n, order)


class Tiled(torch.autograd.Function):
    """Saves q, k, v, o, lse and the problem, and computes the weights again in the backward: O(T) memory in both.

    The backward cannot be differentiated: where it was asked to be (create_graph=True), its gradients come from Once.
    """

    @staticmethod
    def forward(ctx, q, k, v, problem, block_m, block_n, order):
        ctx.set_materialize_grads(False)
        B, H, T, _ = q.shape
        wide = sum_dtype(q.dtype)
        without = problem.without
        tiling = Tiling(problem, block_m, block_n)
        ctx.description = problem, (block_m, block_n), order
        qn, kn, vn = by_key_head(q, k, v)
        o = like_heads(q.shape, q)
        lse = q.new_empty(B, H, T, dtype=wide)
        on_chip = q.new_empty(B * H * min(block_m, T) * min(block_n, k.shape[2]), dtype=wide)  # one tile, for all

        if order == "queries_outside":  # a row's state stays on chip; k and v come by again for every tile of rows
            for rows, visits in tiling.by_rows():
                q_i = load(qn, rows)
                state = nothing_seen(q_i, wide, without)
                for tile in visits:
                    k_j, v_j = load(kn, tile.columns), load(vn, tile.columns)
                    state = absorb(tile, q_i, k_j, v_j, state, problem, on_chip)
                finish(o, lse, rows, state, without)
        else:  # k and v come by once; the rows' state lies in slow memory, and moves in and out for every tile of keys
            slow = [x.view(*qn.shape[:3], x.shape[-1]) for x in nothing_seen(qn.flatten(1, 2), wide, without)]
            for columns, visits in tiling.by_columns():
                k_j, v_j = load(kn, columns), load(vn, columns)
                for tile in visits:
                    m, l, acc = (load(x, tile.rows).clone() for x in slow)  # a load may be a view, and acc is worked on
                    state = absorb(tile, load(qn, tile.rows), k_j, v_j, (m, l, acc), problem, on_chip)
                    for x, x_i in zip(slow, state, strict=True):
                        store(x, tile.rows, x_i)
            # The paper divides by l in every pass, so that o is right after each; dividing once is the same at the end.
            for rows in tiling.row_tiles:
                m, l, acc = (load(x, rows) for x in slow)
                finish(o, lse, rows, (m, l, acc), without)

        # The problem's tensors as well, so that autograd notices documents that have changed meanwhile.
        ctx.save_for_backward(q, k, v, o, lse, *(x if isinstance(x, Tensor) else None for x in problem))
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out no second time
        refuse_tangents("tiled", do, dlse)
        if not torch.is_grad_enabled():
            return *gradients(saved, do, dlse, *ctx.description), None, None, None, None
        with torch.no_grad():
            found = gradients(saved, do, dlse, *ctx.description)
        return *Once.apply(*found, do, dlse, *saved[:3]), None, None, None, None


class Once(torch.autograd.Function):
    """dq, dk and dv as they are, with an edge to each tensor that they depend on. A second gradient has to pass here.

    PyTorch's once_differentiable leaves such edges out: a penalty on dq would then be lost without a word wherever do
    needs no gradient, as of o.sum(), or where torch.autograd.grad looks for a way back to q.
    """

    @staticmethod
    def forward(ctx, dq, dk, dv, *_):
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention=tiled has no second derivative (create_graph=True); use attention=naive")


def gradients(
    saved: tuple[Tensor, ...],
    do: Tensor | None,
    dlse: Tensor | None,
    problem: Problem,
    tile_size: tuple[int, int],
    order: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 7 to 12: dq, dk, dv like q, k, v. saved: as Tiled has it. do or dlse is None where no loss asks for it."""
    q, k, v, o, lse, *tensors = saved
    fields: list[Any] = [x if tensor is None else tensor for x, tensor in zip(problem, tensors, strict=True)]
    problem = Problem(*fields)
    without = problem.without
    if problem.seed is not None and "same_seed" in without:
        problem = problem._replace(seed=problem.seed + 1)
    dk, dv = (like_heads(k.shape, lse) for _ in "kv")
    q, k, v = by_key_head(q, k, v)
    (N, G, T, D), T_k, scale, wide = q.shape, k.shape[2], problem.scale, lse.dtype
    tiling = Tiling(problem, *tile_size)
    do = torch.zeros_like(o) if do is None else do
    delta = (do.to(wide) * o).sum(-1, keepdim=True)  # 7: (B, H, T, 1)
    if dlse is not None:
        delta -= dlse.unsqueeze(-1)
    # A row that saw nothing has lse = -inf; with +inf in its place every weight of it comes out as 2**-inf = 0.
    lse2 = lse * LOG2E
    if "guard_empty_rows" not in without:
        lse2 = lse2.masked_fill(lse == -INF, INF)
    by_rows = (q, do.reshape(N, G, T, D), lse2.view(N, G, T, 1), delta.view(N, G, T, 1))
    size = N * G * min(tile_size[0], T) * min(tile_size[1], T_k)
    on_chip = lse.new_empty(2 if problem.softcap is None else 3, size)  # a tile of s, of dp, and of softcap's gradient

    if order == "queries_outside":
        dq = like_heads(o.shape, o)
        dk.zero_(), dv.zero_()
        for rows, visits in tiling.by_rows():
            q_i, do_i, lse_i, delta_i = (load(x, rows) for x in by_rows)
            dq_i = torch.zeros(q_i.shape, dtype=wide, device=q.device)
            for tile in visits:
                k_j, v_j = load(k, tile.columns), load(v, tile.columns)
                zp, ds = weights_again(tile, q_i, k_j, v_j, do_i, lse_i, delta_i, problem, on_chip)
                store(dv, tile.columns, torch.bmm(zp.mT, do_i), add=1.0)  # 9
                add_product(dq_i, ds, k_j, scale)  # 12
                store(dk, tile.columns, torch.bmm(ds.mT, q_i), add=scale)
            store(dq, rows, dq_i)
    else:
        dq = like_heads(o.shape, lse).zero_()
        for columns, visits in tiling.by_columns():
            k_j, v_j = load(k, columns), load(v, columns)
            dk_j, dv_j = (torch.zeros(k_j.shape, dtype=wide, device=q.device) for _ in "kv")
            for tile in visits:
                q_i, do_i, lse_i, delta_i = (load(x, tile.rows) for x in by_rows)
                zp, ds = weights_again(tile, q_i, k_j, v_j, do_i, lse_i, delta_i, problem, on_chip)
                add_product(dv_j, zp.mT, do_i)  # 9
                store(dq, tile.rows, torch.bmm(ds, k_j), add=scale)  # 12
                add_product(dk_j, ds.mT, q_i, scale)
            store(dk, columns, dk_j)
            store(dv, columns, dv_j)

    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def nothing_seen(q_i: Tensor, dtype: torch.dtype, without: tuple[str, ...] = ()) -> State:
    """m, l (N, R, 1) and acc (N, R, D) before the first tile."""
    start = 0.0 if "start_low" in without else -INF if "guard_empty_rows" in without else LOWEST
    m = torch.full((*q_i.shape[:2], 1), start, dtype=dtype, device=q_i.device)
    return m, torch.zeros_like(m), torch.zeros(q_i.shape, dtype=dtype, device=q_i.device)


def absorb(tile: Tile, q_i: Tensor, k_j: Tensor, v_j: Tensor, state: State, problem: Problem, on_chip: Tensor) -> State:
    """Steps 1 to 5: what one tile of keys changes in the state of a tile of rows."""
    m, l, acc = state
    s = scores(tile, q_i, k_j, problem, on_chip)  # 1: (N, R, S)
    if tile.seen == PART:
        hide(s, tile, problem)  # 2
    p, m, l, alpha = online_softmax(s, m, l, problem.without)  # 3
    if problem.seed is not None:
        p *= dropout_factor(p, tile, problem)  # 4
    p = p.to(v_j.dtype)
    acc.mul_(alpha)  # 5
    if "wide_output" in problem.without:
        return m, l, acc.add_(torch.bmm(p, v_j))
    return m, l, add_product(acc, p, v_j)


def online_softmax(
    s: Tensor, m: Tensor, l: Tensor, without: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 3 for one more tile of scores: returns p (in s's memory), and the new m, l and alpha.

    s (N, R, S); m, l, alpha (N, R, 1), where m and l are of the tiles seen so far: LOWEST and 0 before the first.
    """
    m_new = torch.zeros_like(m) if "subtract_max" in without else torch.maximum(m, s.amax(-1, keepdim=True))
    p = s.sub_(m_new).exp2_()
    alpha = torch.exp2(m - m_new)  # what the earlier tiles' scale has shrunk by
    l = (l if "rescale_sum" in without else alpha * l) + p.sum(-1, keepdim=True)
    return p, m_new, l, torch.ones_like(alpha) if "rescale_output" in without else alpha


def finish(o: Tensor, lse: Tensor, rows: range, state: State, without: tuple[str, ...] = ()) -> None:
    """Step 6, written to the rows of o and lse. A row that saw nothing has 0 / TINY = 0, and log 0 = -inf."""
    m, l, acc = state  # 6
    store(o, rows, acc / (l if "guard_empty_rows" in without else l.clamp(min=TINY)))
    store(lse.unsqueeze(-1), rows, m / LOG2E + l.log())


def weights_again(
    tile: Tile,
    q_i: Tensor,
    k_j: Tensor,
    v_j: Tensor,
    do_i: Tensor,
    lse_i: Tensor,
    delta_i: Tensor,
    problem: Problem,
    on_chip: Tensor,
) -> tuple[Tensor, Tensor]:
    """Steps 8, 10 and 11: the weights of a tile with their dropout, Z p, and ds, both (N, R, S).

    lse_i (N, R, 1) in base 2, +inf for a row that saw nothing; delta_i (N, R, 1).
    """
    cap_gradient = None if problem.softcap is None else view_of(on_chip[2], q_i, k_j)
    s = scores(tile, q_i, k_j, problem, on_chip[0], cap_gradient)
    if tile.seen == PART:
        hide(s, tile, problem)
    p = s.sub_(lse_i).exp2_()  # 8
    dp = product(do_i, v_j, 1.0, on_chip[1])  # 10, but for Z
    zp = p
    if problem.seed is not None:  # drawn again: the same bits as in the forward
        z = dropout_factor(p, tile, problem)
        zp, dp = z * p, dp.mul_(z)
    ds = dp.sub_(delta_i).mul_(p)  # 11
    if cap_gradient is not None:
        ds.mul_(cap_gradient)
    return zp.to(v_j.dtype), ds.to(q_i.dtype)


def scores(
    tile: Tile, q_i: Tensor, k_j: Tensor, problem: Problem, memory: Tensor, cap_gradient: Tensor | None = None
) -> Tensor:
    """Step 1, in base 2. cap_gradient: memory for d score / d (q k^T scale) where softcap bends it: 1 - tanh^2."""
    cap = problem.softcap
    s = product(q_i, k_j, problem.scale * LOG2E if cap is None else problem.scale / cap, memory)
    if cap is not None:
        s.tanh_()
        if cap_gradient is not None:
            torch.mul(s, s, out=cap_gradient).neg_().add_(1.0)
        s.mul_(cap * LOG2E)
    if problem.slopes is not None:
        H = len(problem.slopes)
        far = distance(problem, tile.rows, tile.columns, s.device).to(s.dtype)
        s.view(-1, H, *far.shape).addcmul_(problem.slopes[:, None, None], far, value=-LOG2E)
    return s


def hide(s: Tensor, tile: Tile, problem: Problem) -> None:
    """Step 2: hidden scores to -inf, in place."""
    limit = torch.where(visible(problem, tile.rows, tile.columns, s.device), INF, -INF)  # (1 or B, R / G, S)
    # The smaller of score and limit: on a CPU masked_fill_ with a broadcast mask takes longer than the exponentials.
    # The price: a NaN score stays NaN where it is hidden, so a NaN key shows in the earlier rows of its own tile too.
    s.view(len(limit), -1, *limit.shape[1:]).clamp_(max=limit.unsqueeze(1))  # the same for all heads of a sequence


def dropout_factor(p: Tensor, tile: Tile, problem: Problem) -> Tensor:
    """Z of one tile, in the shape and dtype of its weights p: 0 where dropped, 1 / (share kept) elsewhere."""
    assert problem.seed is not None
    batch_heads = p.shape[0] * p.shape[1] // len(tile.rows)
    keep = keep_mask(problem.seed, batch_heads, tile.rows, tile.columns, problem.dropout_p)
    return keep.to(p.dtype).mul_(keep_scale(problem.dropout_p)).view_as(p)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and exponentials are held in: float32, or float64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)


def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D) to (N, G, T, D); k and v (B, H_kv, T_k, D) to (N, 1, T_k, D)."""
    B, H_kv, T_k, D = k.shape
    N = B * H_kv
    return q.reshape(N, q.shape[1] // H_kv, q.shape[2], D), k.reshape(N, 1, T_k, D), v.reshape(N, 1, T_k, D)


def like_heads(shape: torch.Size, x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D): what the projection after it reads without a copy."""
    B, H, T, D = shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def load(x: Tensor, tile: range) -> Tensor:
    """One tile from slow memory: x (N, G, T, D) to (N, R, D), the heads of a group one below the other: R = G*len."""
    return x[:, :, tile.start : tile.stop].flatten(1, 2)


def store(x: Tensor, tile: range, values: Tensor, add: float | None = None) -> None:
    """One tile, (N, R, D), to its rows of x, (B, H, T, D) or (N, G, T, D); or added to them, `add` times."""
    x = x[:, :, tile.start : tile.stop]
    x.copy_(values.view(x.shape)) if add is None else x.add_(values.view(x.shape), alpha=add)


def view_of(memory: Tensor, q_i: Tensor, k_j: Tensor) -> Tensor:
    """A matrix (N, R, S) for the scores of q_i (N, R, D) and k_j (N, S, D), in a tile's memory."""
    N, R, S = q_i.shape[0], q_i.shape[1], k_j.shape[1]
    return memory[: N * R * S].view(N, R, S)


def product(a: Tensor, b: Tensor, scale: float, memory: Tensor) -> Tensor:
    """scale a b^T, (N, R, D) and (N, S, D) to (N, R, S): a view of memory, which has the wide dtype."""
    # Rounded to 16 bits, q k^T would overflow fp16 before the scale is applied, and dp - delta would be lost where the
    # two are nearly alike.
    return add_product(view_of(memory, a, b), a, b.mT, scale, beta=0.0)


def add_product(acc: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, beta: float = 1.0) -> Tensor:
    """acc = beta acc + scale a b in place. The product of 16-bit factors and its sum have acc's dtype: a GPU multiplies
    so, and elsewhere the factors are widened first."""
    if a.dtype == acc.dtype:
        return torch.baddbmm(acc, a, b, beta=beta, alpha=scale, out=acc)
    if a.is_cuda:
        return torch.baddbmm(acc, a, b, acc.dtype, beta=beta, alpha=scale, out=acc)
    return torch.baddbmm(acc, a.to(acc.dtype), b.to(acc.dtype), beta=beta, alpha=scale, out=acc)
