"""The numbers on docs/attention.md and docs/exercises.md, computed again; and the code of the exercises, run."""

import csv
import importlib
import io
import json
import math
import re
import shlex
import statistics
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode  # as in lab/meter.py

import train
from kernels.problem import Problem
from kernels.sizes import MEASURED, shared_memory
from lab.meter import peak_bytes
from lab.panels import tied_errors
from lab.race import PASSES
from lab.story import keys_wrongly_seen
from lab.trace import tell, worked_example
from lab.traffic import words_of
from model import tiled
from model.attention import AttentionConfig, attention
from model.break_it import FAILURES, BreakIt
from model.dropout import drop_threshold, keep_mask
from model.mask import EMPTY, PART, WHOLE, Tiling, tiles
from model.tiled import LOG2E, TINY, nothing_seen, online_softmax
from parallel import processes
from parallel.processes import Ranks, divide
from sampling.cache import merge, one_split
from tests.reference import FLAT_ROWS
from tests.test_attention import Largest, cat
from tests.test_mask import looked
from tests.test_readme import SCRIPTS, undefined
from training import config
from training.probe import LIMIT

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CPU = torch.device("cpu")
PAGE = (DOCS / "attention.md").read_text(encoding="utf-8")
EXERCISES = (DOCS / "exercises.md").read_text(encoding="utf-8")
TRAINING, RESULTS = ((ROOT / f"docs/{name}").read_text(encoding="utf-8") for name in ("training.md", "results.md"))
PAGES = {"attention.md": PAGE, "exercises.md": EXERCISES, "training.md": TRAINING, "results.md": RESULTS}
BEFORE, GPU = PAGE.split("## On a GPU")
GPU = " ".join(GPU.split("\n## ")[0].split())
ATTENTION, TILED, FLASH, OP, LAUNCH = (
    (ROOT / file).read_text(encoding="utf-8")
    for file in ("model/attention.py", "model/tiled.py", "kernels/flash.py", "kernels/op.py", "kernels/launch.py")
)


def tables(first: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the page's table whose heading begins with `first`."""
    body = page.split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()[2:]]


def section(heading: str) -> str:
    """A section of attention.md, in one line."""
    return " ".join(PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].split())


def shown(values, places: int = 4) -> str:
    return " ".join(f"{float(x):.{places}f}" for x in values)


# --- docs/attention.md -----------------------------------------------------------------------------------------------


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


def test_the_splits_of_the_worked_row_and_their_merge():
    q, k, v = (x[0] for x in cat())
    q = q[:, 3:4]  # "on"
    *splits, merged = tables("split")
    problem = Problem.of(1, 5, scale=0.5)
    states = [one_split(q, *part, None, None, problem) for part in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True)]
    (m, _, _) = whole = merge(states)
    for row, state in zip([*splits, merged], [*states, whole], strict=True):
        assert row[2] == shown([state[0] / LOG2E], 1)
        assert row[3:6] == [shown([state[1]]), shown(state[2][0, 0]), shown([state[0] / LOG2E + state[1].log()])]
    for row, state, k_i in zip(splits, states, k.chunk(2, 1), strict=True):
        assert row[1] == shown((q @ k_i.mT * 0.5)[0, 0], 1)
        assert row[6] == shown([torch.exp2(state[0] - m)])
    assert " ".join(row[0] for row in splits) == " ".join(row[0] for row in tables("token"))


def test_the_result_of_every_row_of_the_worked_example():
    q, k, v = cat()
    o, lse = attention(q, k, v, AttentionConfig("tiled", 2, 2), causal=False, return_lse=True)
    m = (q @ k.mT * 0.5).amax(-1)[0, 0]
    for i, (_, m_i, l_i, lse_i, o_i) in enumerate(tables("row")):
        assert float(m_i) == m[i]
        assert l_i == shown([math.exp(lse[0, 0, i] - m[i])])
        assert lse_i == shown([lse[0, 0, i]])
        assert o_i == shown(o[0, 0, i])


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, 2 for each multiplication. (PyTorch's FlopCounterMode does not count
    baddbmm_.)"""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            self.flops += 2 * result.numel() * args[-2].shape[-1]
        return result


def products(impl: str) -> list[float]:
    """How many products of 2 N N D FLOPs a forward and a backward compute."""
    N, D = 128, 32
    x = [torch.randn(1, 1, N, D).requires_grad_() for _ in "qkv"]
    with Products() as forward:
        o = attention(*x, AttentionConfig(impl, 32, 32), causal=False)
    with Products() as backward:
        o.sum().backward()
    return [counted.flops / (2 * N * N * D) for counted in (forward, backward)]


def test_the_products_of_both_passes():
    (naive, naive_backward), (same, tiled_backward) = products("naive"), products("tiled")
    assert naive == same
    said = section("What gets cheaper, and what does not")
    assert f"forward has {naive:g} such products in naive and in tiled" in said
    assert f"backward has {naive_backward:g} in naive and {tiled_backward:g} in tiled" in said
    table = tables("product")
    assert [sum(row[column] == "x" for row in table) for column in (2, 3)] == [naive_backward, tiled_backward]
    said = section("The backward")
    assert f"{tiled_backward:g} products. With a stored P it has {naive_backward:g}" in said


def measured(impl: str, T: int, which: str) -> dict[str, str]:
    """A row of docs/results.csv: 12 heads of 64, one causal sequence, no dropout."""
    wanted = {"impl": impl, "T": str(T), "pass": which, "B": "1", "H": "12", "D": "64", "causal": "True"}
    with open(DOCS / "results.csv", newline="", encoding="utf-8") as file:
        return next(row for row in csv.DictReader(file) if wanted.items() <= row.items() and row["dropout_p"] == "0.0")


def test_the_times_are_those_of_the_results():
    said = section("What gets cheaper, and what does not")
    naive, triton = (float(measured(impl, 16_384, "backward")["ms"]) for impl in ("naive", "triton"))
    assert f"naive takes {naive:.1f} ms for the {products('naive')[1]:g} products of its backward" in said
    assert f"take {triton:.1f} ms for {sum(kernel_products())}" in said
    assert f"That is {naive / triton:.0f} times as fast" in said


def test_the_memory_of_naive_is_that_of_the_results_and_of_six_tables():
    T, H, said = 16_384, 12, section("Memory")
    table = H * table_of_scores(T) * 4 / 2**30
    peak = float(measured("naive", T, "forward+backward")["peak_mib"]) / 2**10
    assert f"a table in float32 has {table:.0f} GiB" in said
    assert f"peaks at {peak:.0f} GiB, which is six such tables" in said
    assert round(peak / table) == 6


def table_of_scores(T: int) -> int:
    """How many elements naive's largest tensor has, for one head of T tokens; counted on tensors without storage."""
    with FakeTensorMode(), Largest() as seen:
        q = torch.empty(1, 1, T, 64)
        attention(q, q, q, AttentionConfig("naive"))
    return seen.elements


def test_the_bytes_of_a_table_of_scores():
    assert f"{table_of_scores(8192) * 4:,} bytes" in section("Memory")


def test_the_steps_as_the_first_paper_writes_them_give_the_same_sums():
    """The tile's own maximum, alpha and beta, and O divided after every tile."""
    torch.manual_seed(0)
    s, v = 3 * torch.randn(1, 5, 12, dtype=torch.float64), torch.randn(1, 12, 4, dtype=torch.float64)
    m, l = torch.full((1, 5, 1), -torch.inf, dtype=torch.float64), torch.zeros(1, 5, 1, dtype=torch.float64)
    ours, o = (m * LOG2E, l), torch.zeros(1, 5, 4, dtype=torch.float64)
    acc = o
    for s_j, v_j in zip(s.split(3, 2), v.split(3, 1), strict=True):
        own = s_j.amax(-1, keepdim=True)
        m_new = torch.maximum(m, own)
        alpha, beta, p = torch.exp(m - m_new), torch.exp(own - m_new), torch.exp(s_j - own)
        l_new = alpha * l + beta * p.sum(-1, keepdim=True)
        o = (l * alpha * o + beta * p @ v_j) / l_new
        m, l = m_new, l_new
        p, *ours, our_alpha = online_softmax(s_j * LOG2E, *ours)
        acc = our_alpha * acc + p @ v_j
        torch.testing.assert_close((ours[0] / LOG2E, ours[1], acc / ours[1]), (m, l, o))


def test_the_numbers_of_tiles():
    n, block = 16, 64
    T = n * block
    for window, number in ((None, 136), (2, 31), (block + 1, 31)):
        assert sum(found != EMPTY for found in looked(Problem.of(T, T, window=window), block, block).values()) == number
        assert str(number) in section("Masks, and the tiles they empty")
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


@pytest.mark.parametrize("order", ["keys_outside", "queries_outside"])
def test_the_words_that_a_tile_moves_in_the_backward(order, monkeypatch):
    """The difference between 16 and 8 tiles a side. What is added to a tile in slow memory moves in and out."""
    N, D, moved = 512, 64, [0]
    load, store = tiled.load, tiled.store

    def counting_load(x, tile):
        moved[0] += x[:, :, tile.start : tile.stop].numel()
        return load(x, tile)

    def counting_store(x, tile, values, add=None):
        moved[0] += values.numel() * (1 if add is None else 2)
        store(x, tile, values, add)

    monkeypatch.setattr(tiled, "load", counting_load)
    monkeypatch.setattr(tiled, "store", counting_store)
    words = []
    for block in (N // 8, N // 16):
        x = [torch.randn(1, 1, N, D).requires_grad_() for _ in "qkv"]
        o = attention(*x, AttentionConfig("tiled", block, block, order), causal=False)
        moved[0] = 0
        o.sum().backward()
        words.append(moved[0])
    factor = round((words[1] - words[0]) / (8 * N * D))
    outside, of = order.split("_")[0], {"keys_outside": "keys", "queries_outside": "queries"}[order]
    assert re.search(rf"- {outside} outside: [^-]*, {factor} N D words for each tile of {of}\.", section("Traffic"))


@pytest.mark.parametrize("code", [TILED, FLASH], ids=["tiled.py", "flash.py"])
def test_the_steps_are_in_the_code_under_their_numbers(code):
    steps = {int(number) for number in re.findall(r"# (\d+)\b", code)}
    assert steps >= set(range(1, 13))


@pytest.mark.parametrize("name", re.findall(r"`(\w+)` \|", BEFORE))
def test_a_function_named_on_the_page_is_in_the_code(name):
    assert re.search(rf"\b{name}\b", ATTENTION + TILED)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+)`", GPU))))
def test_a_function_named_under_on_a_gpu_is_in_the_kernels(name):
    assert f"\ndef {name}(" in FLASH + OP + LAUNCH


def kernel_products() -> tuple[int, int]:
    """How many products a tile takes in dq_tiles and in dkdv_tiles."""
    dq, dkdv = (kernel(name).count("tl.dot(") for name in ("dq_tiles", "dkdv_tiles"))
    return dq, dkdv


def kernel(name: str) -> str:
    """The text of a function of kernels/flash.py."""
    return FLASH.split(f"\ndef {name}(")[1].split("\n@")[0]


def test_the_products_that_the_backward_of_a_tile_takes():
    dq, dkdv = kernel_products()
    assert f"{dq + dkdv} products instead of 5 ({dq} in `dq_tiles`, {dkdv} in `dkdv_tiles`)" in GPU


def test_the_tiles_that_the_backward_of_a_tile_loads():
    loaded = [re.findall(r"(\w+)_[ij] = load\(", kernel(name)) for name in ("dq_tiles", "dkdv_tiles")]
    assert loaded == [["k", "v"], ["q", "do"]]
    (k, v), (q, do) = loaded
    said = f"one loads {k} and {v} for each tile of queries, the other loads {q} and {do} for each tile of keys"
    assert said in " ".join(section("Traffic").split())


def test_the_tiles_that_a_causal_mask_leaves_whole():
    T = 16_384
    tiling = Tiling(Problem.of(T, T), 128, 64)
    seen = [tiling.look(range(i, i + 128), range(j, j + 64)) for i in range(0, T, 128) for j in range(0, T, 64)]
    visited = f"of the {len(seen) - seen.count(EMPTY):,} tiles visited"
    assert f"{seen.count(PART)} {visited} need the mask" in GPU


def test_the_tiles_of_keys_that_a_tile_of_queries_visits():
    tiling = Tiling(Problem.of(512, 512), 128, 64)
    seen = [tiling.look(range(256, 384), range(j, j + 64)) for j in range(0, 512, 64)]
    whole, cut = seen.count(WHOLE), seen.count(PART)
    assert seen == [WHOLE] * whole + [PART] * cut + [EMPTY] * (8 - whole - cut)
    said = f"The range begins at 0 and ends before {whole + cut}. The tiles without a mask begin at 0 and end before"
    assert f"{said} {whole}." in " ".join(GPU.split())


@pytest.mark.parametrize("row", tables("keys, score, v"), ids=lambda row: row[0])
def test_what_overflows_without_the_maximum(row):
    """The three logarithms, bold above the limit. The outputs are those of FLAT_ROWS, which other tests compute."""
    keys, score, v = (float(x.replace(",", "")) for x in re.findall(r"[\d.,]*\d", row[0]))
    logs = score, score + math.log(keys), score + math.log(keys * v)
    assert row[1:4] == [f"**{x:.2f}**" if x > LIMIT else f"{x:.2f}" for x in logs]
    naive, tiled = next((found[3], found[4]) for found in FLAT_ROWS if found[:3] == (keys, score, v))
    words = ["right" if o == v else str(o).replace("nan", "NaN").replace("0.0", "0") for o in (naive, tiled)]
    assert row[4:] == words


def test_what_the_triton_forward_keeps_for_its_backward():
    """On tensors without memory: what autograd saves has its shapes all the same."""
    op, kept = pytest.importorskip("kernels.op"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda _: None), FakeTensorMode():
        q = torch.empty(1, 12, 65_536, 64, dtype=torch.bfloat16, requires_grad=True)
        seed = torch.empty((), dtype=torch.int64)
        op.flash_attention(q, q, q, Problem.of(65_536, 65_536, scale=0.125, seed=seed, drop_threshold=26))
    assert sorted(kept) == [seed.nbytes, 3 * 2**20, *[96 * 2**20] * 4]
    assert "each of these four takes 96 MiB, and lse takes 3 MiB" in GPU


@pytest.mark.parametrize("row", tables("| forward | its derivative, if that is not 1"), ids=lambda row: row[0])
def test_a_score_modifier_goes_where_the_page_says(row):
    file = re.search(r"\[([\w/.]+)\]", row[0])[1]
    names = re.findall(r"`(\w+)`", " ".join(row[1:]))
    assert names
    assert undefined(names, [file]) == []


def test_the_bias_of_sums_of_16_bits():
    bias = tied_errors(3, BreakIt("bf16_ties")).mean().abs()
    assert f"with three such scores, o is off on average by {bias:.2f} of the distance between" in PAGE
    assert f"{drop_threshold(0.1)} of 256, {drop_threshold(0.1) / 2.56:.1f} %" in section("Dropout")
    assert f"Z is then 256 / {256 - drop_threshold(0.1)}" in section("Dropout")


def test_the_last_table_has_a_line_for_each_failure():
    assert sorted(row[1] for row in tables("taken out")) == sorted(f"`break_it={name}`" for name in FAILURES)


# --- docs/results.md -------------------------------------------------------------------------------------------------


def test_the_versions_and_the_flops_on_the_results_page():
    said = " ".join(RESULTS.split())
    names = ("results.csv", "steps.csv", "decode.csv")
    assert f"All rows of {names[0]}, {names[1]} and {names[2]} are from torch 2.11 and triton 3.6 on an H200" in said
    for name in names:
        with open(DOCS / name, newline="", encoding="utf-8") as file:
            found = {(row["device"], row["torch"][:4], row["triton"][:3]) for row in csv.DictReader(file)}
        assert found == {("NVIDIA H200", "2.11", "3.6")}
    forward, backward = (2 * PASSES[which] for which in ("forward", "backward"))
    assert f"those of {forward:g} matrix products in a forward and {backward:g} in a backward," in said


def test_the_speeds_with_and_without_kept_memory_are_medians_of_the_logs():
    log = " ".join((ROOT / "LOG.md").read_text(encoding="utf-8").split("**Keeping freed memory**")[1].split())
    runs = [[float(x) for x in found.split()] for found in re.findall(r"(?:sdpa|tiled) ((?:1?\.\d+ ?){13})", log)[:4]]
    assert [len(found) for found in runs] == [13] * 4
    sdpa, own, kept, own_kept = (f"{statistics.median(found):.2f}" for found in runs)
    said = " ".join(RESULTS.split())
    assert f"speed of sdpa was {sdpa} times nanoGPT's, and that of tiled {own}." in said
    assert f"kept its memory too, they were {kept} and {own_kept}." in said


# --- docs/exercises.md -----------------------------------------------------------------------------------------------

NUMBERED = {
    int(n): text for n, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", EXERCISES, re.MULTILINE | re.DOTALL)
}
CODE = {n: re.search(r"```python\n(.*?)```", text, re.DOTALL) for n, text in NUMBERED.items()}
CODE = {n: found[1] for n, found in CODE.items() if found}


def answer(n: int) -> str:
    """The answer of an exercise, in one line."""
    return " ".join(NUMBERED[n].split("<details><summary>Answer</summary>")[1].split("</details>")[0].split())


def test_each_exercise_has_a_question_and_one_answer():
    assert sorted(NUMBERED) == list(range(1, len(NUMBERED) + 1))
    assert all(text.count("<details>") == text.count("</details>") == 1 for text in NUMBERED.values())
    assert all(answer(n) for n in NUMBERED)


@pytest.mark.parametrize("n", CODE)
def test_the_code_of_an_exercise_prints_what_its_answer_says(n):
    said = io.StringIO()
    with redirect_stdout(said), torch.random.fork_rng():
        exec(compile(CODE[n], f"exercise {n}", "exec"), {})
    (printed,) = re.findall(r"```text\n(.*?)```", NUMBERED[n], re.DOTALL)
    assert said.getvalue() == printed


def steps_of(*scores: list[float]) -> list[tuple[float, float, float, float]]:
    """m, l, alpha and the sum of the weights of each tile, of a row whose tiles have these scores."""
    m, l, _ = nothing_seen(torch.zeros(1, 1, 1), torch.float64)
    found = []
    for s in scores:
        p, m, l, alpha = online_softmax(torch.tensor([[s]], dtype=torch.float64) * LOG2E, m, l)
        found.append((m.item() / LOG2E, l.item(), alpha.item(), p.sum().item()))
    return found


def test_exercise_1():
    (m_1, l_1, _, _), (m_2, l_2, alpha, own) = steps_of([0.8, 0.3, -0.1, 0.5], [1.2, -0.4, 0.6, 0.1])
    assert f"m = {m_1:.1f} and l = {l_1:.3f}" in answer(1)
    assert f"m = {m_2:.1f}, so alpha = e^{m_1 - m_2:.1f} = {alpha:.3f}" in answer(1)
    assert f"l = {alpha:.3f} x {l_1:.3f} + {own:.3f} = {l_2:.3f}" in answer(1)


def test_exercise_2():
    first, second = [3.01, 0.09], [2.48, 1.95]
    q, k = torch.zeros(2, 1, 1, 4, 4)
    q[..., 0], k[0, 0, :, 0] = 1.0, torch.tensor(first + second)
    # with the identity for v the output is the weights
    weights = attention(q, k, torch.eye(4).view(1, 1, 4, 4), AttentionConfig("tiled", 2, 2), causal=False,
                        softmax_scale=1.0)  # fmt: skip
    (_, (m, l, alpha, _)), ((m_1, _, _, _), (_, turned, other, _)) = steps_of(first, second), steps_of(second, first)
    assert f"1 / {l:.3f} = {weights[0, 0, 0, 0]:.4f}" in answer(2)
    assert f"second tile has alpha = {alpha:g}" in answer(2)
    assert f"m is {m_1:.2f} after the first tile visited and grows to {m:.2f}" in answer(2)
    assert f"alpha = e^{m_1 - m:.2f} = {other:.3f}" in answer(2)
    assert math.isclose(l, turned)


def test_exercise_3():
    N, D = 16_384, 128
    table = table_of_scores(N) * torch.float16.itemsize
    m, l, _ = nothing_seen(torch.empty(1, N, D, dtype=torch.float16, device="meta"), tiled.sum_dtype(torch.float16))
    assert f"{N:,} x {N:,} x 2 bytes = {table / 2**30:g} GiB" in answer(3)
    both = m.nbytes + l.nbytes
    assert f"bytes = {both / 2**10:g} KiB, which is {table / both:,.0f} times" in answer(3)
    assert f"one number per row, {m.nbytes / 2**10:g} KiB" in answer(3)


def test_exercise_4():
    naive, other = products("naive"), products("tiled")
    assert [row[1:] for row in tables("products of 2 N N D FLOPs", NUMBERED[4])] == [
        [f"{a:g}", f"{b:g}"] for a, b in zip(naive, other, strict=True)
    ]
    assert f"{sum(other):g} products where naive has {sum(naive):g}" in answer(4)


def test_exercise_5():
    space, D, size = shared_memory(CPU), 64, torch.bfloat16.itemsize
    longest = max(T for T in range(1, 1000) if 4 * T * D * size + T * T * 4 <= space)
    assert f"{space:,} bytes" in NUMBERED[5]
    assert f"up to T = {longest}." in answer(5)
    tile = MEASURED["forward", D, False]
    assert f"tiles of {tile.BLOCK_M} queries and {tile.BLOCK_N} keys" in NUMBERED[5]
    assert tile.num_stages == 2
    q, pair = tile.BLOCK_M * D * size // 2**10, 2 * tile.BLOCK_N * D * size // 2**10
    assert f"= {q} KiB and each pair {pair} KiB, so {q + tile.num_stages * pair} KiB" in answer(5)


def test_exercise_6():
    T, block, window = 65_536, 128, 4096
    by_row = [
        [sum(1 for _ in visits) for _, visits in Tiling(Problem.of(T, T, window=w), block, block).by_rows()]
        for w in (None, window)
    ]
    causal, near = map(sum, by_row)
    most = max(by_row[1])
    assert f"n = {T // block} tiles on a side" in answer(6)
    assert f"{causal:,} of them" in answer(6)
    assert f"reaches over {most} tiles of keys" in answer(6)
    assert f"Only the first {sum(n < most for n in by_row[1])} tiles of queries have fewer" in answer(6)
    assert f"makes {near:,}, an eighth of the {causal:,}" in answer(6)
    assert round(causal / near) == 8


def cats_story(failure: str = "none", block: int = 2, causal: bool = False):
    options = {"causal": causal, "block_m": block, "block_n": block, "order": "queries_outside"}
    return tell(worked_example(), failure, 1.0, "float64", **options)


def test_exercise_7():
    (told, o, _), (small, same, _) = cats_story(), cats_story(block=1)
    grown = [sum(int(((tile.m > tile.m_old) & (tile.l_old > 0)).sum()) for tile in run) for run in (told, small)]
    assert f"{len(small)} tiles instead of {len(told)}, and the same o" in answer(7)
    np.testing.assert_allclose(o, same)
    assert f"rescaled {grown[1]} times instead of {grown[0]}" in answer(7)


def test_exercise_8():
    (told, right, _), (_, broken, _) = cats_story(), cats_story("no_rescale")
    assert shown(told[0].scores[1], 1) + " " + shown(told[1].scores[1], 1) == "1.5 0.0 1.0 0.5"
    assert {f"{tile.m[1]:g}" for tile in told[:3]} == {"1.5"}
    assert {tile.alpha[1] for tile in told[1:3]} == {1.0}
    off = 100 * np.linalg.norm(broken - right, axis=1) / np.linalg.norm(right, axis=1)
    assert f"its error is {off[1]:.1f} %" in answer(8)
    assert f"the error of its o is {off[3]:.1f} %" in answer(8)


def test_exercise_9():
    """What the code prints is tested above; where it happens is the logarithm of the largest float32."""
    assert f"e^{LIMIT:.2f}" in NUMBERED[9]
    assert f"{LIMIT:.2f} - ln 1,024 = {LIMIT - math.log(1024):.2f}" in answer(9)


def test_exercise_10():
    wrong = []
    for row in range(5):
        of_tiles = [(tile, row - tile.rows.start) for tile in cats_story("local_mask", causal=True)[0]]
        found = [keys_wrongly_seen(tile, r, 0) for tile, r in of_tiles if row in tile.rows]
        wrong.append([str(row), *(str(sum(counts)) for counts in zip(*found, strict=True))])
    assert tables("row", NUMBERED[10]) == wrong
    np.testing.assert_array_equal(*(cats_story(failure, 5, True)[1] for failure in ("none", "local_mask")))


def test_exercise_11():
    N, D = 512, 16
    rows = [["naive", *[f"{words_of(AttentionConfig('naive'), N, D):,}"] * 2]]
    for order in ("keys_outside", "queries_outside"):
        blocks = [M // (4 * D) for M in (2048, 4096)]
        words = [words_of(AttentionConfig("tiled", min(block, D), block, order), N, D) for block in blocks]
        rows.append([order.replace("_", " "), *(f"{count:,}" for count in words)])
    assert tables("words moved, N = 512, D = 16", NUMBERED[11]) == rows


def peak(impl: str, T: int) -> int:
    """Bytes of a forward and backward of 2 heads of size 32, the sizes that bench.py has where none are given."""
    x = [torch.randn(1, 2, T, 32).requires_grad_() for _ in "qkv"]
    do = torch.randn(1, 2, T, 32)
    block = AttentionConfig(impl, 128, 128)
    return peak_bytes(lambda: torch.autograd.grad(attention(*x, block, causal=False), x, do), CPU)


def test_exercise_12():
    (n_1, n_2), (t_1, t_2) = ([peak(impl, T) for T in (1024, 2048)] for impl in ("naive", "tiled"))
    assert f"grows to {n_2 / n_1:.0f} times" in answer(12)
    assert f"{n_2 / 2**20:.0f} MiB, which is {n_2 / (2 * 4 * table_of_scores(2048)):.0f} tables" in answer(12)
    assert "for each of the 2 heads" in answer(12)
    assert round(t_2 / t_1) == 2
    assert f"about twice ({t_2 / 2**20:.1f} MiB at" in answer(12)
    least = int(re.search(r"all lengths but 16; the border is at T = (\d+)\.", answer(12))[1])
    assert [peak("tiled", T) < peak("naive", T) for T in (least - 1, least)] == [False, True]

    lengths = [1024, 2048, 4096, 8192, 16_384]
    ms = {
        impl: [float(measured(impl, T, "forward+backward")["ms"]) for T in lengths]
        for impl in ("naive", "tiled", "triton")
    }
    assert all(slow > fast for slow, fast in zip(ms["tiled"], ms["naive"], strict=True))
    assert all(slow > fast for slow, fast in zip(ms["naive"], ms["triton"], strict=True))
    assert f"slower up to {lengths[-1]:,} tokens ({ms['tiled'][-1]:.0f} against {ms['naive'][-1]:.0f} ms)" in answer(12)
    assert not measured("naive", 32_768, "forward")["ms"]
    assert measured("tiled", 32_768, "forward")["ms"]


def test_exercise_13():
    seed, T = torch.tensor(7), 16_384
    part = keep_mask(seed, 12, range(64), range(64), 0.1)
    assert f"would take {part.nbytes * (T / 64) ** 2 / 2**30:g} GiB" in answer(13)
    assert f"seed takes {seed.nbytes} bytes" in answer(13)


# --- all -------------------------------------------------------------------------------------------------------------


def anchors(page: str) -> list[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{2,} (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", PAGES[name]):
        page = DOCS / (path or name)
        assert page.exists(), path
        assert not anchor or anchor in anchors(page.read_text(encoding="utf-8")), (path, anchor)


@pytest.mark.parametrize("name", PAGES)
def test_the_contents_of_a_page_are_its_headings_in_order(name):
    headings = re.findall(r"^## (.+)$", PAGES[name], re.MULTILINE)
    listed = re.findall(r"^- \[(.+)\]\(#([\w-]+)\)$", PAGES[name], re.MULTILINE)
    assert listed == [(heading, anchors(f"## {heading}")[0]) for heading in headings]
    assert max(Counter(anchors(PAGES[name])).values()) == 1


COMMANDS = re.findall(
    r"^python (.+)$|`python (\w+\.py [^`]+)`", "".join(PAGES.values()).replace("\\\n", ""), re.MULTILINE
)


@pytest.mark.parametrize("command", sorted({"".join(found) for found in COMMANDS}))
def test_a_command_of_the_pages_is_one_that_runs(command):
    """Composed with the real configuration, so every key, group and type in it is right."""
    script, *arguments = shlex.split(command)
    module = importlib.import_module(script.removesuffix(".py"))
    jobs = config.compose(arguments, module.Config, SCRIPTS[script], ROOT / "conf", module.__name__)
    assert jobs or "--cfg" in arguments or "--help" in arguments


def test_the_page_has_the_tokens_that_were_measured():
    """The tables of docs/results.md under "Sampling", from docs/decode.csv."""
    with open(DOCS / "decode.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cases: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["name"]] = row
    lines = []
    for sides in cases.values():
        any_side = next(iter(sides.values()))
        B, H, H_kv, D, T_k = (int(any_side[key]) for key in ("B", "H", "H_kv", "D", "T_k"))
        if "copy" in sides:
            heads = f"{H} heads" if H == H_kv else f"{H} query and {H_kv} key heads"
            names = ("kernel", "paged", "sdpa", "plain")
            shares = [f"{float(sides[name]['of_copy']):.0%}"[:-1] + " %" for name in names]
            copy = f"{float(sides['copy']['gb_per_s']):,.0f}"
            lines.append([f"{B} x {T_k // 1024}k, {heads}, head size {D}", copy, *shares])
        else:
            ways = (f"{int(sides[way]['tokens_per_s']):,}" for way in ("recorded", "paged", "eager"))
            lines.append([f"{T_k // 1024}k", *ways])
    section = PAGES["results.md"].split("## Sampling", 1)[1].split("\n## ", 1)[0]
    assert len(lines) == 6
    assert [line for line in lines if f"| {' | '.join(line)} |" not in section] == []


def test_the_times_of_naives_operations_are_those_of_the_roofline():
    with open(ROOT / "docs/roofline.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["T"] == "4096"]
    whole = {row["name"]: row for row in rows if row["part"] in ("limit", "whole")}
    operations = [row for row in rows if row["part"] not in ("limit", "whole")]
    ms, mb = (sum(float(row[key]) for row in operations) for key in ("ms", "mb"))
    copied, multiplied = float(whole["copy"]["gb_per_s"]) / 1e3, float(whole["product"]["tflop_per_s"])
    products = [row for row in operations if row["name"] == "bmm"]
    of_products, gflop, moved = (sum(float(row[key]) for row in products) for key in ("ms", "gflop", "mb"))
    naive, triton = (float(whole[name]["ms"]) for name in ("naive", "triton"))
    text = " ".join(section("Traffic").split())
    for figure in (
        f"a copy moved {copied:.2f} TB/s", f"did {multiplied:.0f} TFLOP/s",
        f"is {round(multiplied) / round(copied, 2):.0f} FLOPs per byte", f"move {mb / 1e3:.1f} GB",
        f"A copy of {mb / 1e3:.1f} GB takes {mb / 1e3 / copied:.1f} ms", f"add up to {ms:.1f} ms",
        f"{24 * 4096**2 * (16 * 4 + 4 * 2) / 1e9:.1f} GB of this are 20 reads or writes of an N x N table",
        f"takes {naive:.1f} ms",
        f"take {of_products:.2f} ms of it, {of_products / ms:.0%}".replace("%", " %"),
        f"do {1e3 * gflop / moved:.0f} FLOPs per byte", f"takes {triton:.2f} ms for the same {gflop:.0f} GFLOP",
        f"{naive / triton:.0f} times as fast", f"{float(whole['triton']['mb']):.0f} MB",
    ):  # fmt: skip
        assert figure in text


def test_what_long_contexts_are_worth_is_what_was_measured():
    with open(ROOT / "docs/context.jsonl", encoding="utf-8") as file:
        found = {(row["run"], row["step"]): row for row in map(json.loads, file)}
    page = " ".join((ROOT / "docs/training.md").read_text(encoding="utf-8").split())
    recipe = (ROOT / "conf/experiment/long_16k.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
    for text, run in {"standard library": "long_16k", "torch's Python files": "long_16k on torch's source"}.items():
        long, short = found[run, 900], found[f"{run} at 1,024", 900]
        assert long["context_same_tokens"] == short["context_same_tokens"]
        given = [short["bpb_given_01024"], *(long[f"bpb_given_{n:05}"] for n in (1024, 4096, 16384))]
        assert f"| {text} | {' | '.join(f'{x:.3f}' for x in given)} |" in page
        assert f"{1 - given[3] / given[0]:.0%} on".replace("%", " %") in page
        assert abs(given[1] / given[0] - 1) < 0.02
        assert 1 - given[3] / given[2] < 0.02
    long, short, plain = (found[f"long_16k{form}", 900] for form in ("", " at 1,024", " without windows"))
    assert f"model gets {plain['bpb_given_16384']:.3f} bits a byte on the standard library" in page
    assert f"bits a byte rise to {short['bpb_given_02048']:.3f}" in page
    of = [
        f"{x['loss_given_' + n]:.3f}" for x, n in ((long, "16384"), (long, "01024"), (plain, "16384"), (short, "01024"))
    ]
    assert "{} given 16,384, and {} given 1,024. Without windows it is {} given 16,384.".format(*of) in recipe
    assert f"for as many tokens gets {of[3]}, given 1,024" in recipe
    assert f"{found['recall at 16,384, window of 32', 300]['recall_accuracy']:.1%}".replace("%", " %") in page
    told: dict[bool | None, list[float]] = {}  # told up to 3,072 tokens back: True; 4,096: False; further: None
    for key, share in found["passkey", 3000].items():
        if cell := re.fullmatch(r"passkey_(\d+)_depth_(\d+)", key):
            back = int(cell[1]) * (100 - int(cell[2])) // 100
            told.setdefault(back <= 3072 if back <= 4096 else None, []).append(share)
    near, at, beyond = (sum(told[where]) / len(told[where]) for where in (True, False, None))
    assert f"{near:.0%} of the numbers that were told up to 3,072 tokens back".replace("%", " %") in page
    assert f"{at:.0%} of those 4,096 back".replace("%", " %") in page
    assert beyond == 0
    recipe = (ROOT / "conf/experiment/long_extend.yaml").read_text(encoding="utf-8")
    for name, label in (("long_extend", "YaRN"), ("long_extend with rope_base=1e6", "model.rope_base=1e6")):
        before, after = found[name, 0], found[name, 100]
        row = [x[f"loss_given_{n}"] for n in (1024, 8192) for x in (before, after)]
        assert re.search(rf"#   {label} +" + " +".join(f"{x:.3f}" for x in row), recipe)


# --- docs/parallel.md ------------------------------------------------------------------------------------------------


def test_the_speeds_of_two_gpus_are_those_of_the_csv():
    with open(DOCS / "ranks.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["device"], row["torch"][:4], row["dtype"]) for row in rows} == {("NVIDIA H200", "2.11", "bf16")}
    said = (DOCS / "parallel.md").read_text(encoding="utf-8")
    two = {row["case"]: row for row in rows if row["ranks"] == "2"}
    for case, both in two.items():
        one = next((row for row in rows if row["case"] == case and row["ranks"] == "1"), None)
        ms, gib = f"{float(both['ms']):,.0f} ms", f"{float(both['peak_gib']):.1f}"
        if one is None:
            assert f"| - | {ms} | - | - | {gib} |" in said
        else:
            alone = f"| {float(one['ms']):,.0f} ms | {ms} | {100 * float(both['linear']):.1f} % |"
            assert f"{alone} {float(one['peak_gib']):.1f} | {gib} |" in said
            assert float(both["linear"]) == pytest.approx(float(one["ms"]) / 2 / float(both["ms"]), abs=1e-3)
    one = next(row for row in rows if row["case"] == "gpt2-1k" and row["ranks"] == "1" and row["passes"] == "1")
    assert f"take {float(two['gpt2-1k']['ms']) - float(one['ms']):.1f} ms of the 118." in said


@pytest.mark.parametrize(
    "line", re.findall(r"`torchrun ([^`]*train.py[^`]*)`", (DOCS / "parallel.md").read_text(encoding="utf-8"))
)
def test_a_launch_line_of_parallel_md_can_be_shared(line, monkeypatch):
    """Its keys are right, and its processes can divide the work."""
    flags, arguments = line.split("train.py")
    size = int(re.search(r"--nproc-per-node (\d+)", flags)[1])
    ((cfg, _),) = config.compose(
        shlex.split(arguments.replace("...", "")), train.Config, "config", ROOT / "conf", "train"
    )
    mesh = SimpleNamespace(get_group=lambda name: SimpleNamespace(group_name=name))
    monkeypatch.setattr(processes, "init_device_mesh", lambda *_, **__: mesh)
    ranks, rows, passes = divide(Ranks(size=size), cfg, train.passes(cfg))
    assert size * rows * passes == cfg.parallel.context * cfg.batch_size * train.passes(cfg)
    assert (ranks.part.ranks > 1) == ("parallel.context" in arguments)
