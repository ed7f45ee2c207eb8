"""FlashAttention in plain PyTorch: naive's result without the T x T_k matrix of weights.

Shapes: B batch, T query length, T_k key length, H query heads, H_kv key/value heads, D head size; N = B * H_kv.
    q, o, do (B, H, T, D)    k, v (B, H_kv, T_k, D)    lse (B, H, T)
The G = H / H_kv query heads that share a key head are stacked as rows of one matrix, so k and v need no copies:
    q, do (N, G, T, D)    k, v (N, 1, T_k, D)    a tile of them (N, R, D), (N, S, D)    a tile of scores (N, R, S)

The steps have the numbers of model/attention.py; docs/attention.md derives them.

Tensors of length T count as slow memory. In the forward, load() brings a tile of them on chip and store() writes one
back. `python bench.py mode=traffic` counts the elements that they move.

s and m are in base 2: log2(e) goes into the scale, and 2**s is e**(q k^T softmax_scale). GPU kernels do so because the
hardware has exp2; here it saves a pass over the tile. lse is returned as a natural logarithm.

Sources: Dao et al. 2022 (arXiv 2205.14135) for order=keys_outside; Dao 2023 (arXiv 2307.08691) for
order=queries_outside and lse; Milakov & Gimelshein 2018 (arXiv 1805.02867) for the online softmax.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from kernels.problem import FIELDS, Problem, refuse_tangents
from model.dropout import keep_mask, keep_scale
from model.mask import PART, Tile, Tiling, distance, visible

INF = float("inf")
LOG2E = math.log2(math.e)
# Where the running maximum starts. The papers start at -inf. A row with a hidden first tile would then have
# exp(-inf - -inf), which is NaN. From the lowest float32 it has exp(-inf - LOWEST) = 0, and needs no special case.
LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny  # below the sum l of any row that sees a key: its largest weight is 1

# What is active in a checkpoint that keeps some results, in the forward and in the backward. torch has no public names.
KEEPS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

Tensors = tuple[Tensor, ...]
State = tuple[Tensor, Tensor, Tensor]  # m, l (N, R, 1) and acc (N, R, D) of a tile of rows
Watch = dict[str, Any] | None  # values of the last tile, by name (training/probe.py, lab/story.py)


class Loops(NamedTuple):
    """How tiles are cut and visited. Rows and columns of a tile, and queries_outside | keys_outside."""

    block_m: int
    block_n: int
    order: str = "queries_outside"


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, loops: Loops) -> tuple[Tensor, Tensor]:
    """o (B, H, T, D) in q's dtype and lse (B, H, T), float32 (float64 for float64 inputs); both have gradients."""
    # by_key_head() would copy if B > 1, so the copy is made here, before Tiled. Tiled has to save its own inputs. Only
    # then does autograd notice in-place changes, and find the path from a second gradient back to q, k and v.
    if q.shape[0] > 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # Not compiled: torch.compile would unroll the loops, and lose second derivatives silently.
    apply = torch.compiler.disable(Tiled.apply) if torch.compiler.is_compiling() else Tiled.apply
    return apply(q, k, v, problem, loops)


class Tiled(torch.autograd.Function):
    """Saves q, k, v, o, lse and the problem. The backward computes the weights again. Both take O(T) memory.

    The backward cannot be differentiated. With create_graph=True its gradients come from Once, which raises.
    """

    @staticmethod
    def forward(ctx, q, k, v, problem, loops):
        ctx.set_materialize_grads(False)
        ctx.description = problem, loops
        # A checkpoint that keeps attention's results knows them by their op. Elsewhere the op would only cost time.
        kept = isinstance(_get_current_dispatch_mode(), KEEPS)
        o, lse = forward_op(q, k, v, *problem.fields, *loops) if kept else forward(q, k, v, problem, loops)
        # The problem's tensors too, so that autograd notices if documents changed in place meanwhile.
        ctx.save_for_backward(q, k, v, o, lse, *problem.tensors)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        saved = ctx.saved_tensors  # read once: with activation checkpointing a second read fails
        refuse_tangents("tiled", do, dlse)
        if not torch.is_grad_enabled():
            return *gradients(saved, do, dlse, *ctx.description), None, None
        with torch.no_grad():
            found = gradients(saved, do, dlse, *ctx.description)
        return *Once.apply(*found, do, dlse, *saved[:3]), None, None


class Once(torch.autograd.Function):
    """Passes dq, dk and dv through, and connects them to every tensor that they depend on. A second gradient has to
    pass here, and raises.

    PyTorch's once_differentiable does not connect them. A penalty on dq would then be lost silently in two cases: do
    needs no gradient, as with o.sum(), or torch.autograd.grad looks for a path back to q.
    """

    @staticmethod
    def forward(ctx, dq, dk, dv, *_):
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention=tiled has no second derivative (create_graph=True); use attention=naive")


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, loops: Loops) -> tuple[Tensor, Tensor]:
    """Steps 1 to 6: o and lse."""
    o, lse = like_heads(q.shape, q), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))
    for rows, tile, found in forward_tiles(q, k, v, problem, loops):
        if tile is None:
            store(o, rows, found[0])
            store(lse.unsqueeze(-1), rows, found[1])
        del found  # or it would lie beside the state of the next rows
    return o, lse


forward_op = torch.library.custom_op(
    "tilegpt::tiled_forward",
    lambda q, k, v, *fields: forward(q, k, v, Problem.from_fields(*fields[:-3]), Loops(*fields[-3:])),
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {FIELDS}, int block_m, int block_n, str order) -> (Tensor, Tensor)",
)


def forward_tiles(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, loops: Loops, watch: Watch = None
) -> Iterator[tuple[range, Tile | None, Tensors]]:
    """The loop of the forward. Yields after each tile its rows, the tile, and the State of the rows; and once for each
    tile of rows, when it has seen all its keys: the rows, None, o (N, R, D) and lse (N, R, 1), both in wide sums.

    watch: takes copies of a tile's scores, s (with hidden scores), p and z (None without dropout), all (N, R, S), and
    of alpha (N, R, 1), by which acc was multiplied.
    """
    (block_m, block_n, order), wide, broken = loops, sum_dtype(q.dtype), problem.broken
    tiling = Tiling(problem, block_m, block_n)
    qn, kn, vn = by_key_head(q, k, v)
    N, G, T, _ = qn.shape
    on_chip = q.new_empty(N * G * min(block_m, T) * min(block_n, k.shape[2]), dtype=wide)  # one tile, reused

    if order == "queries_outside":  # the rows' state stays on chip; k and v are loaded again for every tile of rows
        for rows, visits in tiling.by_rows():
            q_i = load(qn, rows)
            state = nothing_seen(q_i, wide, broken)
            for tile in visits:
                k_j, v_j = load(kn, tile.columns), load(vn, tile.columns)
                state = absorb(tile, q_i, k_j, v_j, state, problem, on_chip, watch)
                yield rows, tile, state
            yield rows, None, finish(state, broken)
    else:  # k and v are loaded once; the rows' state is in slow memory, moved in and out for every tile of keys
        slow = [x.view(N, G, T, x.shape[-1]) for x in nothing_seen(qn.flatten(1, 2), wide, broken)]
        for columns, visits in tiling.by_columns():
            k_j, v_j = load(kn, columns), load(vn, columns)
            for tile in visits:
                m, l, acc = (load(x, tile.rows).clone() for x in slow)  # load() may be a view; acc changes in place
                state = absorb(tile, load(qn, tile.rows), k_j, v_j, (m, l, acc), problem, on_chip, watch)
                for x, x_i in zip(slow, state, strict=True):
                    store(x, tile.rows, x_i)
                yield tile.rows, tile, state
        # The paper divides by l in every pass, so o is right after each. Dividing once at the end is the same.
        for rows in tiling.row_tiles:
            m, l, acc = (load(x, rows) for x in slow)
            yield rows, None, finish((m, l, acc), broken)


def gradients(
    saved: Tensors, do: Tensor | None, dlse: Tensor | None, problem: Problem, loops: Loops
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 7 to 12: dq, dk, dv like q, k, v. saved: as in Tiled. do or dlse is None if the loss does not use it."""
    q, k, v, o, lse, *tensors = saved
    problem = problem.having(tuple(tensors))
    do = torch.zeros_like(o) if do is None else do
    _, (dq, dk, dv) = deque(backward_tiles((q, k, v, o, lse), do, dlse, problem, loops), maxlen=1).pop()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def backward_tiles(
    saved: Tensors, do: Tensor, dlse: Tensor | None, problem: Problem, loops: Loops, watch: Watch = None
) -> Iterator[tuple[Tile | None, Tensors]]:
    """The loop of the backward. Yields after each tile the tile, and dq, dk and dv so far: dq_i (N, R, D), dk, dv; with
    keys_outside dq, dk_j, dv_j (N, S, D). Yields None when a sum has been stored, and in the end None with dq, dk and
    dv, in lse's dtype where tiles were added.

    saved: q, k, v, o, lse. watch: takes copies of delta, and of a tile's s, p, z, dp, zp and ds.
    """
    (q, k, v, o, lse), (block_m, block_n, order), broken = saved, loops, problem.broken
    dk, dv = (like_heads(k.shape, lse) for _ in "kv")
    problem = problem.in_backward()
    q, k, v = by_key_head(q, k, v)
    (N, G, T, D), T_k, scale, wide = q.shape, k.shape[2], problem.score.scale, lse.dtype
    tiling = Tiling(problem, block_m, block_n)
    delta = (do.to(wide) * o).sum(-1, keepdim=True)  # 7: (B, H, T, 1)
    if dlse is not None:
        delta -= dlse.unsqueeze(-1)
    note(watch, delta=delta)
    # A row that sees no key has lse = -inf. inf in its place makes all its weights 2**-inf = 0.
    lse2 = lse * LOG2E
    if "unguarded_mask" not in broken:
        lse2 = lse2.masked_fill(lse == -INF, INF)
    factors = q.dtype if q.is_cuda else wide  # of products. Without a GPU a tile is converted once, when it is loaded
    terms = ((x.view(N, G, T, 1), wide) for x in (lse2, delta))
    by_rows = [(q, factors), (do.reshape(N, G, T, D), factors), *terms]
    size = N * G * min(block_m, T) * min(block_n, T_k)
    on_chip = lse.new_empty(2 if problem.score.softcap is None else 3, size)  # a tile each: s, dp, softcap's gradient

    if order == "queries_outside":
        dq = like_heads(o.shape, o)
        dk.zero_(), dv.zero_()
        for rows, visits in tiling.by_rows():
            q_i, do_i, _, _ = of_rows = [load(x, rows).to(to) for x, to in by_rows]
            dq_i = torch.zeros(q_i.shape, dtype=wide, device=q.device)
            for tile in visits:
                k_j, v_j = load(k, tile.columns).to(factors), load(v, tile.columns).to(factors)
                zp, ds = weights_again(tile, of_rows, k_j, v_j, problem, on_chip, watch)
                store(dv, tile.columns, wide_product(zp.mT, do_i, wide), add=1.0)  # 9
                add_product(dq_i, ds, k_j, scale)  # 12
                store(dk, tile.columns, wide_product(ds.mT, q_i, wide), add=scale)
                yield tile, (dq_i, dk, dv)
            store(dq, rows, dq_i)
            yield None, ()
    else:
        dq = like_heads(o.shape, lse).zero_()
        for columns, visits in tiling.by_columns():
            k_j, v_j = load(k, columns).to(factors), load(v, columns).to(factors)
            dk_j, dv_j = (torch.zeros(k_j.shape, dtype=wide, device=q.device) for _ in "kv")
            for tile in visits:
                q_i, do_i, _, _ = of_rows = [load(x, tile.rows).to(to) for x, to in by_rows]
                zp, ds = weights_again(tile, of_rows, k_j, v_j, problem, on_chip, watch)
                add_product(dv_j, zp.mT, do_i)  # 9
                store(dq, tile.rows, wide_product(ds, k_j, wide), add=scale)  # 12
                add_product(dk_j, ds.mT, q_i, scale)
                yield tile, (dq, dk_j, dv_j)
            store(dk, columns, dk_j)
            store(dv, columns, dv_j)
            yield None, ()
    yield None, (dq, dk, dv)


def nothing_seen(q_i: Tensor, dtype: torch.dtype, broken: tuple[str, ...] = ()) -> State:
    """The state before the first tile: m, l (N, R, 1) and acc (N, R, D)."""
    start = 0.0 if "zero_init_max" in broken else -INF if "unguarded_mask" in broken else LOWEST
    m = torch.full((*q_i.shape[:2], 1), start, dtype=dtype, device=q_i.device)
    return m, torch.zeros_like(m), torch.zeros(q_i.shape, dtype=dtype, device=q_i.device)


def absorb(
    tile: Tile, q_i: Tensor, k_j: Tensor, v_j: Tensor, state: State, problem: Problem, on_chip: Tensor, watch: Watch
) -> State:
    """Steps 1 to 5: updates the state of a tile of rows with one tile of keys."""
    m, l, acc = state
    s = scores(tile, q_i, k_j, problem, on_chip)  # 1: (N, R, S)
    note(watch, scores=s)
    if tile.seen == PART:
        hide(s, tile, problem)  # 2
    note(watch, s=s)
    p, m, l, alpha = online_softmax(s, m, l, problem.broken)  # 3
    z = None if problem.dropout.seed is None else dropout_factor(p, tile, problem)  # 4
    note(watch, p=p, z=z, alpha=alpha)
    p = (p if z is None else p.mul_(z)).to(v_j.dtype)
    acc.mul_(alpha)  # 5
    if "bf16_ties" in problem.broken and v_j.dtype != acc.dtype:
        return m, l, acc.add_(torch.bmm(p, v_j))
    return m, l, add_product(acc, p, v_j)


def online_softmax(
    s: Tensor, m: Tensor, l: Tensor, broken: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 3 for one tile of scores: returns p (in s's memory), and the new m, l and alpha.

    s (N, R, S); m, l, alpha (N, R, 1). m and l are those of the tiles so far, LOWEST and 0 before the first.
    """
    m_new = torch.zeros_like(m) if "no_max" in broken else torch.maximum(m, s.amax(-1, keepdim=True))
    p = s.sub_(m_new).exp2_()
    alpha = torch.exp2(m - m_new)  # rescales what the earlier tiles gave
    l = (l if "no_rescale_sum" in broken else alpha * l) + p.sum(-1, keepdim=True)
    return p, m_new, l, torch.ones_like(alpha) if "no_rescale_output" in broken else alpha


def finish(state: State, broken: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    """Step 6: o (N, R, D), in acc's memory, and lse (N, R, 1). A row that sees no key has o = 0 / TINY = 0, and
    lse = log 0 = -inf."""
    m, l, acc = state  # 6
    return acc.div_(l if "unguarded_mask" in broken else l.clamp(min=TINY)), m / LOG2E + l.log()


def weights_again(
    tile: Tile, of_rows: list[Tensor], k_j: Tensor, v_j: Tensor, problem: Problem, on_chip: Tensor, watch: Watch
) -> tuple[Tensor, Tensor]:
    """Steps 8, 10 and 11: the weights of a tile after dropout, Z p, and ds, both (N, R, S).

    of_rows: q, do (N, R, D), lse in base 2, inf for a row that sees no key, and delta (N, R, 1).
    """
    q_i, do_i, lse_i, delta_i = of_rows
    cap_gradient = None if problem.score.softcap is None else view_of(on_chip[2], q_i, k_j)
    s = scores(tile, q_i, k_j, problem, on_chip[0], cap_gradient)
    if tile.seen == PART:
        hide(s, tile, problem)
    note(watch, s=s)
    p = s.sub_(lse_i).exp2_()  # 8
    dp = product(do_i, v_j, 1.0, on_chip[1])  # 10, without Z
    # drawn again: the same bits as in the forward
    z = None if problem.dropout.seed is None else dropout_factor(p, tile, problem)
    zp, dp = (p, dp) if z is None else (z * p, dp.mul_(z))
    note(watch, p=p, z=z, dp=dp)
    ds = dp.sub_(delta_i).mul_(p)  # 11
    if cap_gradient is not None:
        ds.mul_(cap_gradient)
    zp, ds = zp.to(v_j.dtype), ds.to(q_i.dtype)
    note(watch, zp=zp, ds=ds)
    return zp, ds


def note(watch: Watch, **values: Tensor | None) -> None:
    """Copies values for whoever watches, because the steps compute in place."""
    if watch is not None:
        watch |= {name: None if x is None else x.clone() for name, x in values.items()}


def scores(
    tile: Tile, q_i: Tensor, k_j: Tensor, problem: Problem, memory: Tensor, cap_gradient: Tensor | None = None
) -> Tensor:
    """Step 1, in base 2. cap_gradient: memory for d score / d (q k^T scale) under softcap, which is 1 - tanh^2."""
    scale, _, cap, slopes = problem.score
    s = product(q_i, k_j, scale * LOG2E if cap is None else scale / cap, memory)
    if cap is not None:
        s.tanh_()
        if cap_gradient is not None:
            torch.mul(s, s, out=cap_gradient).neg_().add_(1.0)
        s.mul_(cap * LOG2E)
    if slopes is not None:
        far = distance(problem, tile.rows, tile.columns, s.device).to(s.dtype)
        s.view(-1, len(slopes), *far.shape).addcmul_(slopes[:, None, None], far, value=-LOG2E)
    return s


def hide(s: Tensor, tile: Tile, problem: Problem) -> None:
    """Step 2: sets hidden scores to -inf, in place."""
    limit = torch.where(visible(problem, tile.rows, tile.columns, s.device), INF, -INF)  # (1 or B, R / G, S)
    # min(score, limit), because on a CPU masked_fill_ with a broadcast mask takes longer than the exponentials. The
    # cost: a hidden NaN score stays NaN, so a NaN key also shows in the earlier rows of its tile.
    s.view(len(limit), -1, *limit.shape[1:]).clamp_(max=limit.unsqueeze(1))  # the same for all heads of a sequence


def dropout_factor(p: Tensor, tile: Tile, problem: Problem) -> Tensor:
    """Z of one tile, in the shape and dtype of its weights p: 0 where dropped, 1 / (share kept) elsewhere."""
    dropout = problem.dropout
    assert dropout.seed is not None
    batch_heads = p.shape[0] * p.shape[1] // len(tile.rows) if dropout.numbers is None else dropout.numbers
    keep = keep_mask(dropout.seed, batch_heads, tile.rows, tile.columns, problem.dropout_p)
    return keep.to(p.dtype).mul_(keep_scale(problem.dropout_p)).view_as(p)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and exponentials: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D) to (N, G, T, D); k and v (B, H_kv, T_k, D) to (N, 1, T_k, D)."""
    B, H_kv, T_k, D = k.shape
    N = B * H_kv
    return q.reshape(N, q.shape[1] // H_kv, q.shape[2], D), k.reshape(N, 1, T_k, D), v.reshape(N, 1, T_k, D)


def like_heads(shape: torch.Size, x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D), so that the projection after it needs no copy."""
    B, H, T, D = shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def load(x: Tensor, tile: range) -> Tensor:
    """Loads one tile from slow memory: x (N, G, T, D) to (N, R, D), a group's heads stacked: R = G * len(tile)."""
    return x[:, :, tile.start : tile.stop].flatten(1, 2)


def store(x: Tensor, tile: range, values: Tensor, add: float | None = None) -> None:
    """Writes values (N, R, D) to a tile of x, (B, H, T, D) or (N, G, T, D). With `add`: adds add * values."""
    x = x[:, :, tile.start : tile.stop]
    x.copy_(values.view(x.shape)) if add is None else x.add_(values.view(x.shape), alpha=add)


def view_of(memory: Tensor, q_i: Tensor, k_j: Tensor) -> Tensor:
    """A tile's memory as a matrix (N, R, S), for the scores of q_i (N, R, D) and k_j (N, S, D)."""
    N, R, S = q_i.shape[0], q_i.shape[1], k_j.shape[1]
    return memory[: N * R * S].view(N, R, S)


def product(a: Tensor, b: Tensor, scale: float, memory: Tensor) -> Tensor:
    """scale * a b^T, (N, R, D) and (N, S, D) to (N, R, S), written to memory, which has the wide dtype."""
    # Not rounded to 16 bits: in fp16 q k^T would overflow before it is scaled, and dp - delta would lose its digits
    # where the two are nearly equal.
    return add_product(view_of(memory, a, b), a, b.mT, scale, beta=0.0)


def add_product(acc: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, beta: float = 1.0) -> Tensor:
    """acc = beta * acc + scale * a b, in place. 16-bit factors are multiplied and summed in acc's dtype. A GPU can do
    that itself; elsewhere the factors are converted first."""
    if a.dtype == acc.dtype:
        return torch.baddbmm(acc, a, b, beta=beta, alpha=scale, out=acc)
    if a.is_cuda:
        return torch.baddbmm(acc, a, b, acc.dtype, beta=beta, alpha=scale, out=acc)
    return torch.baddbmm(acc, a.to(acc.dtype), b.to(acc.dtype), beta=beta, alpha=scale, out=acc)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in the dtype of sums. If each tile's product were rounded to 16 bits, the errors would add up."""
    return torch.bmm(a, b) if a.dtype == dtype else torch.bmm(a, b, dtype)


def merge(states: list[State]) -> State:
    """The state over all keys from the states over parts of them: step 3 once more, for all parts at a time.

    A part's o and lse are a state too: m = lse (in base 2), l = 1, acc = o.
    """
    m_i, l_i, acc_i = map(torch.stack, zip(*states, strict=True))
    m = m_i.amax(0)
    alpha = torch.exp2(m_i - m)
    return m, (alpha * l_i).sum(0), (alpha * acc_i).sum(0)
