"""trace: one row of attention, tile by tile."""

import re
from pathlib import Path

import pytest
import torch

import breakit
from lab.trace import Head, tell, trace, worked_example
from model.break_it import FAILURES, BreakIt

PAGE = (Path(__file__).parents[1] / "docs/attention.md").read_text(encoding="utf-8")
ENDS = re.findall(r"^\| \w+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d. ]+) \|$", PAGE, re.MULTILINE)  # m, l, lse, o
CAT = worked_example()
RANDOM = Head(["x"] * 7, *torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)))


def lines(head: Head = CAT, row: int = 3, M: int = 2, N: int = 2, causal: bool = False, **options):
    return list(trace(head, row, M, N, causal, **options))


def numbers(line: str) -> list[float]:
    """m, l and alpha of a line, and the first four numbers of o."""
    return [float(x) for x in re.findall(r"-?\d+\.\d{4}|nan|inf", line)][:7]


@pytest.mark.parametrize("N", [1, 2, 3, 5])
def test_every_row_ends_at_the_published_numbers_with_every_tile_size(N):
    for row, published in zip(range(5), ENDS, strict=True):
        said, (m, l, lse, *o) = lines(row=row, N=N), map(float, " ".join(published).split())
        assert len(said) == 3 + -(-5 // N) + 1
        assert numbers(said[-1]) == pytest.approx([*o, lse], abs=6e-5)
        assert numbers(said[-2])[:2] == pytest.approx([m, l], abs=6e-5)
        assert numbers(said[-2])[3:] == pytest.approx(o, abs=6e-5)  # acc / l after the last tile


def test_a_line_has_the_state_after_its_tile_and_the_sentence_says_what_changed():
    first, second, third = lines()[3:6]
    assert numbers(first)[:3] == [0.5, 2.0, 0.0]
    assert numbers(second)[:3] == [1.0, 2.5809, 0.6065]
    assert "nothing yet to rescale" in first
    assert "m grows from 0.5 to 1, so l and acc are multiplied by alpha = 0.6065" in second
    assert "alpha is 1" in third


@pytest.mark.parametrize("failure", [name for name in FAILURES if "seed" not in name])
def test_the_last_lines_compare_with_the_whole_algorithm(failure):
    gain = 400.0 if failure == "no_max" else 1.0
    said = lines(RANDOM, row=4, causal=True, failure=failure, score_gain=gain)
    broken, right = (numbers(next(x for x in said if words in x))[:4] for words in ("o, and lse", "whole algorithm"))
    told = tell(RANDOM, 4, 2, 2, True, BreakIt(failure, gain))
    assert broken == pytest.approx(told[1].tolist(), abs=6e-5, nan_ok=True)
    changes = broken != right
    assert ("changes nothing in this row" in said[-1]) == (not changes)
    assert changes == (failure not in ("zero_init_max", "unguarded_mask"))


def test_it_counts_keys_of_the_future_and_keys_that_are_missed():
    """Exercise 10: row 0 sees two keys of the future, and row 4 misses two."""
    of = [" ".join(lines(row=row, causal=True, failure="local_mask")) for row in range(5)]
    leaks = [sum(map(int, re.findall(r"Sees (\d)", text))) for text in of]
    misses = [sum(map(int, re.findall(r"Misses (\d)", text))) for text in of]
    assert (leaks, misses) == ([2, 3, 1, 1, 0], [0, 0, 1, 0, 2])


def test_a_row_without_keys_is_nan_without_the_guard():
    head = CAT._replace(k=CAT.k[2:], v=CAT.v[2:])
    assert "nan" in lines(head, 0, 5, 3, True, failure="unguarded_mask")[-2]
    assert "It sees no key of this tile: nothing changes." in lines(head, 0, 5, 3, True)[3]


def test_the_script_traces_and_refuses_a_row_that_is_not_there(call):
    said = call(breakit, "trace=true", "failure=no_rescale")
    assert said.code == 0
    assert "17.8 % away" in said.out
    refused = call(breakit, "trace=true", "row=5")
    assert refused.code == 1
    assert "there are 5 rows" in refused.err
