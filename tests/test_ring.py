"""Attention over keys that go round several processes is attention, and all processes do the same work."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.attention import AttentionConfig, attention
from model.recompute import store_attention
from parallel import ring
from parallel.part import Part
from parallel.ring import ring_attention
from tests.implementations import INTERPRETED

B, T, D = 2, 96, 16


@pytest.fixture
def on_ranks(monkeypatch):
    """on_ranks(N, compute): what compute(part) returns for each of N processes. They are threads that take turns:
    Triton's interpreter bears one at a time. One goes on when all have sent."""

    def on_ranks(N, compute):
        turn, all_here, sent, found = threading.Lock(), threading.Barrier(N, timeout=60), {}, {}

        def meet():
            turn.release()
            try:
                all_here.wait()
            finally:
                turn.acquire()

        def send(x, part):
            sent[part.rank] = x.clone()
            meet()
            arriving = sent[(part.rank - 1) % N]
            meet()
            return lambda: arriving

        def work(rank):
            with turn:
                try:
                    found[rank] = compute(Part(rank=rank, ranks=N, ring=True))
                except BaseException:
                    all_here.abort()
                    raise

        monkeypatch.setattr(ring, "send", send)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(N)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == N
        return [found[rank] for rank in range(N)]

    return on_ranks


def own(x, part):
    """The part's tokens of x (B, H, T, D)."""
    return part.cut(x.transpose(1, 2)).transpose(1, 2)


RINGS = [  # N, H, H_kv, options
    (2, 3, 3, {}),
    (3, 4, 2, {"softcap": 2.0, "softmax_scale": 0.5, "documents": True}),
    (3, 2, 1, {"window": 20, "alibi": True}),
    (4, 2, 1, {"window": 40}),  # wider than a process's keys and queries, narrower than the sequence
]


@pytest.mark.parametrize(
    ("impl", "N", "H", "H_kv", "more"),
    [(impl, *ring) for impl in ("naive", "tiled", "keys_outside") for ring in RINGS]
    + [pytest.param("triton", *ring, marks=[INTERPRETED] + [pytest.mark.slow] * (ring[3] != {})) for ring in RINGS],
)
def test_attention_over_keys_that_go_round_is_attention(impl, N, H, H_kv, more, on_ranks):
    """o and all gradients, of shapes and options that take every path; documents end inside of pieces."""
    dtype, near = (torch.float32, 2e-6) if impl == "triton" else (torch.float64, 4e-15)
    loops = {"impl": "tiled", "order": impl} if impl == "keys_outside" else {"impl": impl}
    config = AttentionConfig(**loops, **more, block_m=20, block_n=16)
    q, k, v = (torch.randn(B, heads, T, D, dtype=dtype, requires_grad=True) for heads in (H, H_kv, H_kv))
    do = torch.randn(B, H, T, D, dtype=dtype)
    documents = (torch.rand(B, T) < 0.05).cumsum(1) if config.documents else None

    def compute(part):
        mine = [own(x.detach(), part).requires_grad_() for x in (q, k, v)]
        o = ring_attention(part, *mine, config, documents)
        return o.detach(), *torch.autograd.grad(o, mine, own(do, part))

    o = attention(q, k, v, config, documents=documents)
    right = o.detach(), *torch.autograd.grad(o, (q, k, v), do)
    for rank, found in enumerate(on_ranks(N, compute)):
        part = Part(rank=rank, ranks=N, ring=True)
        for name, x, whole in zip(("o", "dq", "dk", "dv"), found, right, strict=True):
            torch.testing.assert_close(x, own(whole, part), rtol=near, atol=near, msg=f"{name} of rank {rank}")


def test_all_processes_compute_as_many_scores_before_each_exchange(on_ranks, monkeypatch):
    scores, whole = {}, ring.attend

    def attend(q, k, v, problem, *rest, **more):
        n, m, causal = q.shape[2], k.shape[2], problem.mask.at_most is not None
        scores.setdefault(threading.get_ident(), []).append(n * (n + 1) // 2 if causal else n * m)
        return whole(q, k, v, problem, *rest, **more)

    monkeypatch.setattr(ring, "attend", attend)
    x = torch.randn(B, 1, T, D)
    on_ranks(4, lambda part: ring_attention(part, *[own(x, part)] * 3, AttentionConfig("naive")))
    n = T // 4
    assert list(scores.values()) == [[n * (n + 1) // 2, *[n * n // 2] * 3]] * 4


def test_a_process_saves_its_own_tokens_alone(on_ranks):
    """Memory is O(T / N): q, k, v, o (B, H, n, D) and lse (B, H, n)."""
    x, saved = torch.randn(B, 1, T, D, requires_grad=True), {}

    def compute(part):
        sizes = saved.setdefault(part.rank, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            mine = own(x, part)
            sizes.clear()
            return ring_attention(part, mine, mine, mine, AttentionConfig("tiled"))

    on_ranks(4, compute)
    assert all(sorted(sizes) == [B * T // 4, *[B * T // 4 * D] * 4] for sizes in saved.values())


def test_a_selective_checkpoint_does_not_send_the_keys_again(on_ranks, monkeypatch):
    calls, whole = [], ring.forward
    monkeypatch.setattr(ring, "forward", lambda *inputs: calls.append(1) or whole(*inputs))
    x = torch.randn(B, 1, T, D)
    keep = partial(create_selective_checkpoint_contexts, store_attention)

    def compute(part):
        mine = own(x, part).requires_grad_()
        function = partial(ring_attention, part, config=AttentionConfig("tiled"))
        again = checkpoint(lambda x: function(2 * x, x, x), mine, use_reentrant=False, context_fn=keep)
        once = function(2 * mine, mine, mine)
        return torch.equal(*(torch.autograd.grad(o.sum(), mine)[0] for o in (again, once)))

    assert on_ranks(2, compute) == [True, True]
    assert len(calls) == 2 * 2


def test_keys_go_to_the_next_process_and_come_from_the_one_before(monkeypatch):
    """Two processes cannot tell: the next one is the one before."""
    x, given = torch.randn(2, 3), []
    exchange = lambda *inputs: given.append(inputs) or x.flatten()  # noqa: E731
    functions = SimpleNamespace(all_to_all_single=exchange, wait_tensor=lambda x: x)
    monkeypatch.setattr(torch.ops, "_c10d_functional", functions)
    assert torch.equal(ring.send(x, Part(rank=2, ranks=4, group="g", ring=True))(), x)
    assert torch.equal(given[0][0], x.flatten())
    assert given[0][1:] == ([0, 6, 0, 0], [0, 0, 0, 6], "g")  # from whom, to whom
    ring.send(x, Part(rank=3, ranks=4, group="g", ring=True))
    assert given[1][1:] == ([0, 0, 6, 0], [6, 0, 0, 0], "g")


def test_pieces_are_where_their_tokens_are():
    """And each token is of one process."""
    whole, seen = torch.arange(T)[None], []
    for rank in range(3):
        part = Part(rank=rank, ranks=3, ring=True)
        tokens = part.cut(whole)[0]
        assert torch.equal(whole[0, part.positions(T // 3, whole.device)], tokens)
        seen += tokens.tolist()
    assert sorted(seen) == whole[0].tolist()
