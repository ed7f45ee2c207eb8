"""The numbers on docs/attention.md, computed again."""

import math
import re
from pathlib import Path

import pytest
import torch

from kernels.problem import Problem
from lab.traffic import words_of
from model.attention import AttentionConfig, attention
from model.break_it import FAILURES
from model.mask import EMPTY, PART, Tiling, tiles
from model.tiled import LOG2E, TINY, nothing_seen, online_softmax
from tests.test_attention import cat
from tests.test_mask import looked

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
BEFORE, GPU = PAGE.split("## On a GPU")
GPU = " ".join(GPU.split("\n## ")[0].split())
ATTENTION, TILED, FLASH, OP = (
    (ROOT / file).read_text(encoding="utf-8")
    for file in ("model/attention.py", "model/tiled.py", "kernels/flash.py", "kernels/op.py")
)


def tables(first: str) -> list[list[str]]:
    """The rows of the table whose heading begins with `first`."""
    body = PAGE.split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()[2:]]


def shown(values, places: int = 4) -> str:
    return " ".join(f"{float(x):.{places}f}" for x in values)


def test_the_state_of_the_worked_row_after_each_tile():
    q, k, v = (x[0] for x in cat())
    q = q[:, 3:4]  # "on"
    m, l, acc = nothing_seen(q, torch.float64)
    for row, columns in zip(tables("tile"), tiles(5, 2), strict=True):
        s = q @ k[:, columns.start : columns.stop].mT * 0.5
        p, m, l, alpha = online_softmax(s * LOG2E, m, l)
        acc = alpha * acc + p @ v[:, columns.start : columns.stop]
        assert row[1:] == [
            shown(s[0, 0], 1), shown([m / LOG2E], 1), shown([alpha]), shown(p[0, 0]), shown([l]), shown(acc[0, 0])
        ]  # fmt: skip
    assert l > TINY


def test_the_result_of_every_row_of_the_worked_example():
    q, k, v = cat()
    o, lse = attention(q, k, v, AttentionConfig("tiled", 2, 2), causal=False, return_lse=True)
    m = (q @ k.mT * 0.5).amax(-1)[0, 0]
    for i, (_, m_i, l_i, lse_i, o_i) in enumerate(tables("row")):
        assert float(m_i) == m[i]
        assert l_i == shown([math.exp(lse[0, 0, i] - m[i])])
        assert lse_i == shown([lse[0, 0, i]])
        assert o_i == shown(o[0, 0, i])


def test_the_numbers_of_tiles():
    n, block = 16, 64
    T = n * block
    for window, number in ((None, 136), (block + 1, 31)):
        assert sum(found != EMPTY for found in looked(Problem(T, T, window=window), block, block).values()) == number
        assert str(number) in PAGE.split("## Masks")[1].split("## Memory")[0]
    assert "2 n - 1" in PAGE


def naive_words(N: int, D: int) -> int:
    half, whole = (words_of(AttentionConfig("naive"), n, D) for n in (256, 512))
    square = (whole - 2 * half) // (512**2 - 2 * 256**2)
    return square * N * N + (half - square * 256**2) // 256 * N


@pytest.mark.parametrize("row", tables("N = 4,096, D = 64"), ids=lambda row: row[0])
def test_the_words_moved(row):
    N, D = 4096, 64
    name, *cells = row
    for M, words, quotient in ((16384, *cells[:2]), (32768, *cells[2:])):
        block = M // (4 * D)
        impl = AttentionConfig("naive") if name == "naive" else AttentionConfig("tiled", min(block, D), block, name)
        # naive's count is a N N + b N, so two small N give it at 4,096 without a second's wait and a GB
        found = words_of(impl, N, D) if name != "naive" else naive_words(N, D)
        assert words == f"{found:,}"
        assert quotient == f"{found / (N * N * D * D / M):.2f}"


@pytest.mark.parametrize("code", [TILED, FLASH], ids=["tiled.py", "flash.py"])
def test_the_steps_are_in_the_code_under_their_numbers(code):
    steps = {int(number) for number in re.findall(r"# (\d+)\b", code)}
    assert steps >= set(range(1, 13))


@pytest.mark.parametrize("name", re.findall(r"`(\w+)` \|", BEFORE))
def test_a_function_named_on_the_page_is_in_the_code(name):
    assert re.search(rf"\b{name}\b", ATTENTION + TILED)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+)`", GPU))))
def test_a_function_named_under_on_a_gpu_is_in_the_kernels(name):
    assert f"\ndef {name}(" in FLASH + OP


def test_the_products_that_the_backward_of_a_tile_takes():
    bodies = (FLASH.split(f"\ndef {name}(")[1].split("\n@")[0] for name in ("dq_tiles", "dkdv_tiles"))
    dq, dkdv = (body.count("tl.dot(") for body in bodies)
    assert f"{dq + dkdv} products instead of 5 ({dq} in `dq_tiles`, {dkdv} in `dkdv_tiles`)" in GPU


def test_the_tiles_that_a_causal_mask_leaves_whole():
    T = 16_384
    tiling = Tiling(Problem(T, T), 128, 64)
    seen = [tiling.look(range(i, i + 128), range(j, j + 64)) for i in range(0, T, 128) for j in range(0, T, 64)]
    assert f"{seen.count(PART)} of the {len(seen) - seen.count(EMPTY):,} tiles visited need the mask" in GPU


def test_what_the_triton_forward_keeps_for_its_backward():
    """On tensors without memory: what autograd saves has its shapes all the same."""
    pytest.importorskip("triton")
    import kernels.op  # noqa: F401  (makes torch know the op)

    q = torch.empty(1, 12, 65_536, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    problem = Problem(65_536, 65_536, scale=0.125, seed=seed, drop_threshold=26)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda _: None):
        torch.ops.tilegpt.flash_forward(q, q, q, *problem, False)
    assert sorted(kept) == [seed.nbytes, 3 * 2**20, *[96 * 2**20] * 4]
    assert "96 MiB for each of the four, which are there anyway, and 3 MiB for lse" in GPU


def test_the_last_table_has_a_line_for_each_failure():
    assert sorted(row[1] for row in tables("taken out")) == sorted(f"`break_it={name}`" for name in FAILURES)


def test_every_link_within_the_page_leads_somewhere():
    headings = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) == headings
    for path in re.findall(r"\]\(([\w./]+)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
