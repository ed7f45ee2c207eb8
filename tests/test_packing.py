"""pack=true: documents are whole where they fit, every token is there, and what is there twice is counted."""

import json

import numpy as np
import pytest

import train
from data.loader import Loader
from data.packing import best_fit, pack
from tests.test_metrics import read_metrics

T = 16


def some(seed: int) -> tuple[np.ndarray, int]:
    """Documents of 1 to 3 T tokens: (index of each one's first token, tokens of the text)."""
    sizes = np.random.default_rng(seed).integers(1, 3 * T, size=40)
    return np.cumsum([0, *sizes[:-1]]), int(sizes.sum())


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_one_window_but_for_those_that_are_counted(seed):
    documents, tokens = some(seed)
    packing = pack(documents, tokens, T)
    windows = [packing.window(i) for i in range(len(packing))]
    assert {sum(n for _, n in spans) for spans in windows} == {T}
    counts = np.zeros(tokens, int)
    for start, n in (span for spans in windows for span in spans):
        counts[start : start + n] += 1
    assert counts[-1] == 0  # it is only a target
    assert counts[:-1].min() == 1
    assert (counts[:-1] - 1).sum() == packing.repeated == len(windows) * T - (tokens - 1)
    assert packing.repeated < T * len(windows) / 8


@pytest.mark.parametrize("seed", range(5))
def test_no_document_that_fits_is_cut_and_a_longer_one_as_seldom_as_can_be(seed):
    documents, tokens = some(seed)
    packing = pack(documents, tokens, T)
    spans = {span for i in range(len(packing)) for span in packing.window(i)}
    for start, size in zip(documents.tolist(), np.diff(documents, append=tokens - 1).tolist(), strict=True):
        for first in range(start, start + size, T):
            assert (first, min(T, start + size - first)) in spans


def test_a_document_goes_where_the_least_room_is_left():
    sizes = np.array([2, 9, 6, 3, 4, 8, 10])
    windows = best_fit(sizes, 10)
    assert [[int(sizes[i]) for i in window] for window in windows] == [[10], [9], [8, 2], [6, 4], [3]]


def test_what_a_token_sees_of_its_document():
    """Documents of 4, 12 and 16 tokens and a target. Cut after every 16, the second one would stay whole by luck."""
    packing = pack(np.array([0, 4, 16]), 33, T)
    assert packing.seen == packing.seen_cut == pytest.approx((4 * 5 + 12 * 13 + 16 * 17) / 2 / 32)
    assert packing.repeated == 0
    packing = pack(np.array([0, 12, 28]), 33, T)
    assert packing.seen == pytest.approx((12 * 13 + 16 * 17 + 4 * 5) / 2 / 32)
    assert packing.seen_cut == pytest.approx((12 * 13 + 4 * 5 + 12 * 13 + 4 * 5) / 2 / 32)


def test_what_fills_a_window_is_within_the_text():
    packing = pack(np.array([0, 31]), 36, T)
    windows = [packing.window(i) for i in range(len(packing))]
    assert windows == [[(0, T)], [(16, 15), (0, 1)], [(31, 4), (0, 12)]]  # 31 begins too late


def test_a_text_of_one_window():
    assert pack(np.array([0]), T + 1, T).window(0) == [(0, T)]
    packing = pack(np.array([0, T]), T + 1, T)  # the last document is only a target
    assert [packing.window(i) for i in range(len(packing))] == [[(0, T)]]


def loader(**options) -> Loader:
    documents, tokens = some(0)
    settings = {"batch_size": 3, "context_length": T, "seed": 1, "packed": True}
    return Loader(np.arange(tokens, dtype=np.uint16), documents, **settings | options)


def test_an_epoch_has_every_window_once_with_the_next_token_as_target():
    one = loader(batch_size=1)
    epochs = [[one.next() for _ in range(one.windows)] for _ in range(2)]
    windows = [[tuple(batch.x[0].tolist()) for batch in epoch] for epoch in epochs]
    assert len(set(windows[0])) == one.windows
    assert set(windows[0]) == set(windows[1])
    assert windows[0] != windows[1]  # in another order
    documents, _ = some(0)
    for batch in epochs[0]:
        assert (batch.y == batch.x + 1).all()  # token i is i here
        numbers, texts = batch.documents[0].numpy(), np.searchsorted(documents, batch.x[0].numpy(), side="right")
        begins = np.flatnonzero((np.diff(batch.x[0].numpy()) != 1) | (np.diff(texts) != 0))
        assert np.diff(numbers).tolist() == [int(i in begins) for i in range(T - 1)]


def test_shorter_sequences_are_pieces_of_packed_windows():
    one, whole = loader(batch_size=1), loader(batch_size=1)
    pieces = sorted(tuple(row) for _ in range(one.windows) for row in one.next(T // 4).x.view(-1, T // 4).tolist())
    windows = [row for _ in range(whole.windows) for row in whole.next().x.view(-1, T // 4).tolist()]
    assert pieces == sorted(map(tuple, windows))


def test_a_packed_loader_goes_on_where_it_stopped_and_no_other_one_does():
    straight, resumed = loader(), loader()
    straight.next()
    state = json.loads(json.dumps(straight.state_dict()))
    resumed.load_state_dict(state)
    assert (straight.next().x == resumed.next().x).all()
    with pytest.raises(ValueError, match="trained with pack=true, this run has false: use pack=true, or"):
        loader(packed=False).load_state_dict(state)
    with pytest.raises(ValueError, match="trained with pack=false, this run has true: use pack=false, or"):
        loader().load_state_dict(loader(packed=False).state_dict())
    assert "packed" not in loader(packed=False).state_dict()  # as in older checkpoints


def test_a_run_packs_and_says_so(call, small, tmp_path):
    own = [*small, f"runs={tmp_path}", "steps=2"]
    packed, plain = (call(train, *own, f"name={name}", f"pack={name}") for name in ("true", "false"))
    assert packed.code == plain.code == 0, packed.err
    assert "packing: " in packed.out
    assert "packing: " not in plain.out
    losses = []
    for name in ("true", "false"):
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        losses.append([record["loss"] for record in records if "loss" in record])
    assert losses[0] != losses[1]
