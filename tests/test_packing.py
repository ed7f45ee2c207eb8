"""pack=true: documents are whole where they fit, every token is there, and what is there twice is counted.

How packed windows become batches is in tests/test_data.py.
"""

import numpy as np
import pytest

import train
from data.packing import best_fit, pack
from tests.runs import losses

T = 16


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_one_window_and_no_document_is_cut_that_fits(seed):
    """Documents of 1 to 3 T tokens. What fills a window is there twice, and counted. A longer document is cut as seldom
    as can be."""
    sizes = np.random.default_rng(seed).integers(1, 3 * T, size=40)
    documents, tokens = np.cumsum([0, *sizes[:-1]]), int(sizes.sum())
    packing = pack(documents, tokens, T)
    windows = [packing.window(i) for i in range(len(packing))]
    assert {sum(n for _, n in spans) for spans in windows} == {T}
    spans = [span for window in windows for span in window]
    counts = np.zeros(tokens, int)
    for start, n in spans:
        counts[start : start + n] += 1
    assert counts[-1] == 0  # it is only a target
    assert counts[:-1].min() == 1
    assert (counts[:-1] - 1).sum() == packing.repeated == len(windows) * T - (tokens - 1)
    assert packing.repeated < T * len(windows) / 8
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


@pytest.mark.parametrize(
    ("documents", "tokens", "windows"),
    [
        ([0, 31], 36, [[(0, T)], [(16, 15), (0, 1)], [(31, 4), (0, 12)]]),  # 31 begins too late to fill a window
        ([0], T + 1, [[(0, T)]]),
        ([0, T], T + 1, [[(0, T)]]),  # the last document is only a target
    ],
)
def test_windows_of_short_texts(documents, tokens, windows):
    packing = pack(np.array(documents), tokens, T)
    assert [packing.window(i) for i in range(len(packing))] == windows


def test_a_run_packs_and_says_so(call, small, tmp_path):
    for name in ("true", "false"):
        ended = call(train, *small, f"runs={tmp_path}", "steps=2", f"name={name}", f"pack={name}").succeeded()
        assert ("packing: " in ended.out) == (name == "true")
    assert losses(tmp_path / "true") != losses(tmp_path / "false")
