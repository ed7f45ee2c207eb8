"""Attention of a sequence that several processes share, where they do not divide the heads: keys and values go round.

Shapes: B batch, T sequence length, N processes, n = T / N tokens of each, H query heads, H_kv key/value heads, D head
size.    q, o, do (B, H, n, D)    k, v (B, H_kv, n, D)    lse (B, H, n)

Every process keeps its queries, and passes keys and values on to the next one, N - 1 times. It computes attention of
its queries with each part of the keys that comes by. An o and its lse are a state of the online softmax, so merge() of
model/tiled.py puts the N results together: step 3 of model/attention.py once more, with a part of the keys in the
place of a tile (Liu et al. 2023, arXiv 2310.01889).

The backward sends the keys and values round again. With lse and o of the whole row, steps 7 to 12 give a part's share
of dq, dk and dv. Those of k and v travel behind them, and the last process sends them home. So a process holds n
tokens, those of the part that it computes and of the one that comes in: O(T / N) memory.

The causal mask would give the last process 2 N - 1 times the work of the first. So the sequence is cut into 2 N pieces,
and process r has pieces r and 2 N - 1 - r (Part.cut). What it then sees of process s is half of the part's scores, and
needs no mask:

    s = r    both pieces see both, causally: the two lie in order
    s < r    both of its pieces see the early piece of s, and neither sees the late one
    s > r    its late piece sees both pieces of s, and the early one sees neither

Windows and ALiBi count distances. With them the two pieces of the keys are computed one after the other, and each query
gets its position among them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kernels.problem import NOTHING, Given, Problem
from model.attention import AttentionConfig, attend, problem_of
from model.tiled import KEEPS, LOG2E, LOWEST, Loops, merge, sum_dtype
from model.tiled import gradients as tiled_gradients
from parallel.part import Part


def ring_attention(
    part: Part, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, documents: Tensor | None = None, **_: Any
) -> Tensor:
    """o of the part's queries over the whole sequence, causal. All processes of part.group have to call it.

    config: resolved, and without what the ring lacks (model/abilities.py). documents: integers (B, T), of the whole
    sequences. The other options of attention() are those of whole attention without dropout.
    """
    # Not compiled: the processes wait for each other, part by part, in Python.
    apply = torch.compiler.disable(Ring.apply) if torch.compiler.is_compiling() else Ring.apply
    return apply(q, k, v, documents, config, part)


class Ring(torch.autograd.Function):
    """Saves q, k, v, documents, o and lse; all but documents of the part's own tokens."""

    @staticmethod
    def forward(ctx, q, k, v, documents, config, part):
        if isinstance(_get_current_dispatch_mode(), KEEPS):  # a checkpoint knows what to keep by its op
            o, lse = forward_op(q, k, v, documents, json.dumps(asdict(config)), json.dumps(part))
        else:
            o, lse = forward(q, k, v, documents, config, part)
        ctx.save_for_backward(q, k, v, documents, o, lse)
        ctx.description = config, part
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return *gradients(ctx.saved_tensors, do, *ctx.description), None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, config: AttentionConfig, part: Part
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse, both of all keys."""
    kv = torch.stack((k, v))
    acc = torch.zeros_like(q, dtype=sum_dtype(q.dtype))
    l = torch.zeros_like(acc[..., :1])
    m = torch.full_like(l, LOWEST)
    for i in range(part.ranks):
        arriving = send(kv, part) if i + 1 < part.ranks else None
        for rows, columns, causal, given in visits(q, i, config, part, documents):
            k_i, v_i = kv[:, :, :, columns]
            q_i = q[:, :, rows]
            problem = problem_of(q_i, k_i, config, given, causal)
            o_i, lse_i = attend(q_i, k_i, v_i, problem, config, return_lse=True)
            m_i = lse_i.unsqueeze(-1) * LOG2E
            before = m[:, :, rows], l[:, :, rows], acc[:, :, rows]
            both = merge([before, (m_i, torch.ones_like(m_i), o_i.to(acc.dtype))])
            for x, merged in zip(before, both, strict=True):
                x.copy_(merged)
        kv = kv if arriving is None else arriving()
    return (acc / l).to(q.dtype), (m / LOG2E + l.log()).squeeze(-1)


@torch.library.custom_op("tilegpt::ring_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, config: str, part: str
) -> tuple[Tensor, Tensor]:
    """forward() with arguments that an op can take: the configuration and the part as JSON."""
    return forward(q, k, v, documents, AttentionConfig(**json.loads(config)), Part(*json.loads(part)))


def gradients(saved: Any, do: Tensor, config: AttentionConfig, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv like q, k and v. Sums over the parts are in float32 (float64 for float64 inputs). saved: as in
    Ring."""
    q, k, v, documents, o, lse = saved
    kv = torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=lse.dtype)
    returning: Callable[[], Tensor] | None = None
    for i in range(part.ranks):
        arriving = send(kv, part) if i + 1 < part.ranks else None
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        for rows, columns, causal, given in visits(q, i, config, part, documents):
            q_i, o_i, do_i, lse_i = (x[:, :, rows] for x in (q, o, do, lse))
            k_i, v_i = kv[:, :, :, columns]
            problem = problem_of(q_i, k_i, config, given, causal)
            dq_i, dk_i, dv_i = part_gradients(q_i, k_i, v_i, o_i, lse_i.contiguous(), do_i, config, problem)
            dq[:, :, rows] += dq_i
            dkv[:, :, :, columns] += torch.stack((dk_i, dv_i))
        if i == 0:
            own = dkv
        else:
            dkv = dkv if returning is None else dkv + returning()
            returning = send(dkv, part)
        kv = kv if arriving is None else arriving()
    assert returning is not None, "a ring has two processes or more"
    dk, dv = own + returning()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def part_gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, config: AttentionConfig, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's share of dq, and its dk and dv, by the implementation's own backward. o and lse: of all keys."""
    if config.impl == "triton":
        from kernels.launch import gradients as triton_gradients  # triton is not installed everywhere

        dq, dk, dv = triton_gradients(q, k, v, o, lse * LOG2E, do, None, problem, config.autotune, config.kernel)
        return dq, dk, dv
    saved: Any = (q, k, v, o, lse, *problem.tensors)
    # naive has no backward of its own. One tile that holds all scores is the same formulas.
    tile_size = (problem.mask.T, problem.mask.T_k) if config.impl == "naive" else (config.block_m, config.block_n)
    return tiled_gradients(saved, do, None, problem, Loops(*tile_size, config.order))


def visits(
    q: Tensor, i: int, config: AttentionConfig, part: Part, documents: Tensor | None
) -> Iterator[tuple[slice, slice, bool, Given]]:
    """Which of the part's queries see which of the keys that have come i processes far: rows, columns, whether
    causally, and the tensors of a Problem that say where they are."""
    n = q.shape[2]
    source = part._replace(rank=(part.rank - i) % part.ranks)
    both, early, late = slice(0, n), slice(0, n // 2), slice(n // 2, n)
    rows = late if source.rank > part.rank else both
    found = [(rows, early if source.rank < part.rank else both)]
    in_pieces = config.alibi or config.window is not None  # which count distances; between two pieces of keys is a gap
    if in_pieces:
        found = [(rows, early)] + [(late, late)] * (source.rank >= part.rank)
    for rows, columns in found:
        given = NOTHING
        if documents is not None:
            given = Given(part.cut(documents)[:, rows], source.cut(documents)[:, columns])
        if in_pieces:
            places = torch.arange(part.ranks * n, device=q.device)[None]
            given = given._replace(positions=part.cut(places)[0, rows] - source.cut(places)[0, columns.start])
        yield rows, columns, i == 0, given


def send(x: Tensor, part: Part) -> Callable[[], Tensor]:
    """Begins to send x to the next process. Returns a function that waits for what the one before has sent, like x."""
    shape, sent, received = x.shape, [0] * part.ranks, [0] * part.ranks
    sent[(part.rank + 1) % part.ranks] = received[part.rank - 1] = x.numel()
    op = torch.ops._c10d_functional
    arriving = op.all_to_all_single(x.flatten(), received, sent, part.group)
    return lambda: op.wait_tensor(arriving).view(shape)
