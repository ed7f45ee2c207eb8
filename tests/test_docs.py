"""The worked example and the tables of the pages in docs, computed again; and the code of the exercises, run."""

import io
import json
import math
import re
from contextlib import redirect_stdout
from statistics import mean

import pytest
import torch
from PIL import Image

from kernels.problem import Problem
from lab import draw, learn, page, race, roofline, steps
from lab.race import short
from lab.story import keys_wrongly_seen, tell, worked_example
from lab.traffic import words_of
from model.attention import AttentionConfig, attention
from model.break_it import FAILURES, BreakIt
from model.mask import tiles
from model.tiled import LOG2E, TINY, nothing_seen, online_softmax
from sampling.cache import merge, one_split
from tests.reference import FLAT_ROWS
from tests.runs import table_of
from tests.test_attention import cat
from tests.test_bench import tiled_words
from tests.test_readme import PAGES, ROOT, composed, undefined
from training.probe import LIMIT

PAGE, EXERCISES = PAGES["docs/attention.md"], PAGES["docs/exercises.md"]
NUMBERED = {
    int(n): text for n, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", EXERCISES, re.MULTILINE | re.DOTALL)
}
CODE = {n: re.search(r"```python\n(.*?)```", text, re.DOTALL) for n, text in NUMBERED.items()}
CODE = {n: found[1] for n, found in CODE.items() if found}


def tables(first: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the page's table whose heading begins with `first`."""
    body = page.split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()[2:]]


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


def test_the_words_moved():
    N, D = 4096, 64
    # naive's count is a N N + b N, so two small N give it at 4,096 without a second's wait and a GB
    half, whole = (words_of(AttentionConfig("naive"), n, D) for n in (256, 512))
    square = (whole - 2 * half) // (512**2 - 2 * 256**2)
    naive = square * N * N + (half - square * 256**2) // 256 * N
    for name, *cells in tables("N = 4,096, D = 64"):
        found = []
        for M in (16384, 32768):
            words = naive if name == "naive" else tiled_words(name, N, D, M)
            found += [f"{words:,}", f"{words / (N * N * D * D / M):.2f}"]
        assert cells == found


@pytest.mark.parametrize("row", tables("keys, score, v"), ids=lambda row: row[0])
def test_what_overflows_without_the_maximum(row):
    """The three logarithms, bold above the limit. The outputs are those of FLAT_ROWS (test_breakit.py)."""
    keys, score, v = (float(x.replace(",", "")) for x in re.findall(r"[\d.,]*\d", row[0]))
    logs = score, score + math.log(keys), score + math.log(keys * v)
    assert row[1:4] == [f"**{x:.2f}**" if x > LIMIT else f"{x:.2f}" for x in logs]
    naive, tiled = next((found[3], found[4]) for found in FLAT_ROWS if found[:3] == (keys, score, v))
    assert row[4:] == ["right" if o == v else str(o).replace("nan", "NaN").replace("0.0", "0") for o in (naive, tiled)]


def test_what_the_tables_name_is_in_the_code():
    """Functions in the file of their column or in one that their row links to; the twelve steps in both files."""
    where = tables("step | | naive, in `model/attention.py`")
    assert len(where) >= 10
    for row in where:
        for cell, file in zip(row[-3:], ("model/attention.py", "model/tiled.py", "kernels/flash.py"), strict=True):
            linked = re.findall(r"\]\(\.\./([\w/.]+)\)", " ".join(row))
            assert undefined(re.findall(r"`(\w+)(?:\.\w+)?`", cell), [file, *linked]) == []
            assert [n for n in re.findall(r"`# (\d+)`", cell) if f"# {n}" not in (ROOT / file).read_text()] == []
    for row in tables("| forward | its derivative, if that is not 1"):  # of a score modifier
        assert undefined(re.findall(r"`(\w+)`", " ".join(row[1:])), [re.search(r"\[([\w/.]+)\]", row[0])[1]]) == []
    for row in tables("kernel"):
        assert undefined(re.findall(r"`(\w+)`", " ".join(row)), ["kernels/flash.py"]) == []
    for file in ("model/tiled.py", "kernels/flash.py"):
        assert {int(n) for n in re.findall(r"# (\d+)\b", (ROOT / file).read_text())} >= set(range(1, 13))


def test_the_table_of_failures_has_a_line_for_each():
    rows, names = [row[1] for row in tables("taken out")], [f"`break_it={name}`" for name in FAILURES]
    assert [name for name in names if rows.count(name) != 1] == [], "docs/attention.md needs one row for each"
    assert [row for row in rows if row not in names] == [], "docs/attention.md has rows for no failure"


# --- docs/break-it.md ------------------------------------------------------------------------------------------------

BROKEN = PAGES["docs/break-it.md"]
KEPT = json.loads((ROOT / "docs/break/table.json").read_text())


def test_the_page_is_what_the_lab_writes_of_its_figures_and_of_the_words_of_today():
    """It fails when words change: lab/page.py says how to write the page again without another run."""
    assert page.page(KEPT) == BROKEN
    assert list(KEPT["pictures"]) == list(FAILURES)
    assert all(row["agrees"] for row in KEPT["rows"])
    kinds = {"unguarded_mask": "loud (NaN)", "local_mask": "leak", "stale_seed": "gradient only"}
    kinds |= {"bf16_ties": "silent, but tiny", "no_max": "silent, loud (infinity), loud (NaN)"}
    assert {name: page.kind(KEPT, name) for name in kinds} == kinds


@pytest.mark.parametrize("name", FAILURES)
def test_the_page_has_a_command_that_breaks_and_a_small_picture_for_each_failure(name):
    assert f"\n## {name}\n" in BROKEN, "docs/break-it.md lacks it: python breakit.py out=docs writes the page"
    section = BROKEN.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"](break/{name}.png)" in section
    (typed,) = re.findall(r"^python train.py (.*)$", section, re.M)
    ((cfg, _),) = composed("train.py", typed)
    assert cfg.break_it.broken == BreakIt(name).broken
    path = ROOT / f"docs/break/{name}.png"
    assert path.stat().st_size < 120_000
    with Image.open(path) as image:
        assert image.size == (draw.WIDTH, draw.HEIGHT)


def test_the_limits_in_the_words_are_those_of_the_dtypes():
    """Of l and acc without the maximum, of a weight in fp16, and of l and a weight in fp16 with a maximum from 0."""
    wide, fp16 = torch.finfo(torch.float32), torch.finfo(torch.float16)
    for name, limits in {"no_max": (wide.max, fp16.max), "zero_init_max": (wide.tiny, fp16.tiny)}.items():
        for limit in limits:
            assert re.search(rf"(?<![\d.]){math.log(limit):.1f}\b", FAILURES[name].acts)


# --- docs/exercises.md -----------------------------------------------------------------------------------------------


def test_each_exercise_has_a_question_and_one_answer():
    assert sorted(NUMBERED) == list(range(1, len(NUMBERED) + 1))
    for text in NUMBERED.values():
        question, answer = text.split("<details><summary>Answer</summary>")
        assert question.strip()
        assert answer.split("</details>")[0].strip()


@pytest.mark.parametrize("n", CODE)
def test_the_code_of_an_exercise_prints_what_its_answer_says(n):
    said = io.StringIO()
    with redirect_stdout(said), torch.random.fork_rng():
        exec(compile(CODE[n], f"exercise {n}", "exec"), {})
    (printed,) = re.findall(r"```text\n(.*?)```", NUMBERED[n], re.DOTALL)
    assert said.getvalue() == printed


def test_the_keys_wrongly_seen_of_exercise_10():
    options = {"causal": True, "block_m": 2, "block_n": 2, "order": "queries_outside"}
    told, wrong = tell(worked_example(), "local_mask", 1.0, "float64", **options)[0], []
    for row in range(5):
        found = [keys_wrongly_seen(tile, row - tile.rows.start, 0) for tile in told if row in tile.rows]
        wrong.append([str(row), *(str(sum(counts)) for counts in zip(*found, strict=True))])
    assert tables("row", NUMBERED[10]) == wrong


def test_the_words_of_exercise_11():
    N, D = 512, 16
    rows = [["naive", *[f"{words_of(AttentionConfig('naive'), N, D):,}"] * 2]]
    for order in ("keys_outside", "queries_outside"):
        rows.append([order.replace("_", " "), *(f"{tiled_words(order, N, D, M):,}" for M in (2048, 4096))])
    assert tables("words moved, N = 512, D = 16", NUMBERED[11]) == rows


# --- tables of what was measured -------------------------------------------------------------------------------------


def lines(rows: list[list[str]]) -> str:
    """What to paste below a table's heading, if its rows are others."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_files_have_the_columns_that_the_benches_write():
    columns = {"results": race.COLUMNS, "steps": steps.COLUMNS, "lengths": steps.OF_LENGTHS}
    columns |= {"roofline": roofline.COLUMNS} | dict.fromkeys(("learn", "learn_gpu", "learn_ten"), learn.COLUMNS)
    assert {name: list(table_of(ROOT / "docs" / f"{name}.csv")[0]) for name in columns} == columns


def test_the_page_has_the_steps_that_were_measured():
    """Of docs/steps.csv the last run of each case, other side and attention of ours, and the last parts of each case
    and attention. The page says that the models have no biases; a case with biases would say so in its name."""
    whole: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    for row in table_of(ROOT / "docs" / "steps.csv"):
        case = row["case"] + ", biases" * (row["bias"] == "True")
        key = case, row["how"].split(", ")[1]
        if row["name"] != "ours":
            other = row
        elif row["part"] == "step":
            theirs, own = ([short(float(x["ms"])), f"{float(x['peak_gib']):.1f}"] for x in (other, row))
            speed, *turns = (f"{float(row[name]):.2f}" for name in ("speed", "slowest", "fastest"))
            whole[*key, other["name"]] = [case, other["name"], *theirs, key[1], *own, f"{speed} ({' to '.join(turns)})"]
            parts[key] = [*key]
        else:
            parts[key].append(short(float(row["ms"])))
    cases = list(dict.fromkeys(case for case, *_ in whole))
    for table, found in {"case": whole, "parts, ms": parts}.items():
        rows = [found[key] for key in sorted(found, key=lambda key: cases.index(key[0]))]  # the same case side by side
        assert tables(table, PAGES["docs/results.md"]) == rows, lines(rows)


@pytest.mark.parametrize(("file", "budget"), [("learn", 150), ("learn_gpu", 60), ("learn_ten", 600)])
def test_the_page_has_what_was_learned(file, budget):
    """Of each recipe the last rows of its seeds: steps, bits per byte, and their mean."""
    ends: dict[str, dict[str, dict[str, str]]] = {}
    for row in table_of(ROOT / "docs" / f"{file}.csv"):
        if float(row["budget"]) == budget:
            ends.setdefault(row["name"], {})[row["seed"]] = row
    for runs in ends.values():
        bits = [float(row["bits_per_byte"]) for row in runs.values()]
        steps_made, ended = (
            ", ".join(found) for found in ([r["step"] for r in runs.values()], [f"{x:.3f}" for x in bits])
        )
        row = lines([[steps_made, ended, f"{mean(bits):.3f}"]])
        assert row[1:] in PAGES["docs/results.md"], row


def test_the_pages_have_the_lengths_and_contexts_that_were_measured():
    """docs/training.md, from lengths.csv and context.jsonl, of which the last record of each run counts."""
    lengths, page = table_of(ROOT / "docs" / "lengths.csv"), PAGES["docs/training.md"]
    found = {(row["case"], row["commit"], int(row["T"]), row["name"]): row for row in lengths}
    with open(ROOT / "docs/context.jsonl", encoding="utf-8") as file:
        trained = {record["run"]: record for record in map(json.loads, file)}
    rows = []
    for case, commit, T in dict.fromkeys(key[:3] for key in found):
        device, run, usual = ("CPU", "long_laptop", "tiled") if case == "long_laptop" else ("H200", "long_16k", "sdpa")
        first = commit == lengths[0]["commit"]
        cells = [device if first else f"{device}, later", f"{T:,}"]
        for name in ("naive", "tiled", "sdpa", "triton"):
            row = found.get((case, commit, T, name))
            of_row = "no memory" if row is None or not row["ms"] else f"{float(row['ms']):,.0f}"
            cells.append("-" if row is None else of_row + f" / {float(row['peak_gib']):.1f}" * bool(row["ms"]))
        chosen = found.get((case, commit, T, usual))
        bits = [x for key, x in trained[run].items() if re.fullmatch(rf"bpb_given_0*{T}", key)] if first else []
        cells += ["-" if chosen is None else f"{int(chosen['tokens_per_s']):,}", f"{bits[0]:.3f}" if bits else "-"]
        rows.append(cells)
    assert tables("device | tokens of context", page) == rows, lines(rows)
    rows = []
    for text, run in {"standard library": "long_16k", "torch's Python files": "long_16k on torch's source"}.items():
        short_run, long = trained[f"{run} at 1,024"], trained[run]
        given = [short_run["bpb_given_01024"], *(long[f"bpb_given_{n:05}"] for n in (1024, 4096, 16384))]
        rows.append([text, *(f"{x:.3f}" for x in given)])
    assert tables("text | trained with 1,024, given 1,024", page) == rows, lines(rows)


def test_the_page_has_the_tokens_that_were_measured():
    cases: dict[str, dict[str, dict[str, str]]] = {}
    for row in table_of(ROOT / "docs" / "decode.csv"):
        cases.setdefault(row["case"], {})[row["name"]] = row
    rows: dict[str, list[list[str]]] = {"sequences x keys": [], "context | recorded, tokens/s": []}
    for sides in cases.values():
        B, H, H_kv, D, T_k = (int(next(iter(sides.values()))[key]) for key in ("B", "H", "H_kv", "D", "T_k"))
        if "copy" in sides:
            heads = f"{H} heads" if H == H_kv else f"{H} query and {H_kv} key heads"
            shares = [f"{100 * float(sides[x]['of_copy']):.0f} %" for x in ("kernel", "paged", "sdpa", "plain")]
            copy = f"{float(sides['copy']['gb_per_s']):,.0f}"
            rows["sequences x keys"].append([f"{B} x {T_k // 1024}k, {heads}, head size {D}", copy, *shares])
        else:
            ways = (f"{int(sides[way]['tokens_per_s']):,}" for way in ("recorded", "paged", "eager"))
            rows["context | recorded, tokens/s"].append([f"{T_k // 1024}k", *ways])
    for table, found in rows.items():
        assert tables(table, PAGES["docs/results.md"]) == found, lines(found)


def test_the_page_has_the_speeds_of_several_processes_that_were_measured():
    rows = table_of(ROOT / "docs" / "ranks.csv")
    for both in (row for row in rows if row["ranks"] == "2"):
        one = next((row for row in rows if row["case"] == both["case"] and row["ranks"] == "1"), None)
        ms, gib = f"{float(both['ms']):,.0f} ms", f"{float(both['peak_gib']):.1f}"
        cells = f"| - | {ms} | - | - | {gib} |"
        if one is not None:
            alone = f"| {float(one['ms']):,.0f} ms | {ms} | {100 * float(both['linear']):.1f} % |"
            cells = f"{alone} {float(one['peak_gib']):.1f} | {gib} |"
            assert float(both["linear"]) == pytest.approx(float(one["ms"]) / 2 / float(both["ms"]), abs=1e-3)
        assert cells in PAGES["docs/parallel.md"]
