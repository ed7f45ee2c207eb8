"""bench.py: its instrument is exact, memory grows as the theory says, and what is wrong is not weighed."""

import csv
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import bench
from lab import charts, entrants, race
from lab import roofline as lab_roofline
from lab.entrants import PASSES, Case, attention_of
from lab.files import Results
from lab.meter import PeakBytes, peak_bytes
from lab.race import attempt, forward_and_backward, inputs
from lab.traffic import predicted, redraw, words_of
from model import tiled
from model.attention import AttentionConfig, attention

CPU = torch.device("cpu")
SMALL = {"lengths": [64], "heads": [1], "head_sizes": [16], "block": 32, "device": "cpu"}
SMALL |= {"patience": 1e6}  # on a busy machine a case may take as long as it does: none is left out for that


def peak(impl: str, T: int, D: int = 64, block: int = 32, gradients: bool = True) -> int:
    case = Case(1, 1, T, D, True, 0.0)
    x = inputs(case, CPU, torch.float32)
    f = attention_of(impl, case, block, CPU)
    if gradients:
        return peak_bytes(lambda: forward_and_backward(f, x), CPU)
    with torch.no_grad():
        return peak_bytes(lambda: f(*x[:3]), CPU)


def test_the_instrument_counts_what_is_alive_at_once():
    x = torch.zeros(1000)
    with PeakBytes() as counted:
        x += 1  # was there before
        a = x + 1  # 4,000 bytes
        b = a + 1  # 8,000
        del a
        c = b.view(10, 100)  # a view costs nothing
        d = c * 2  # 8,000 again
    assert counted.peak == 8000
    assert counted.alive == 8000
    del b, c, d
    assert counted.alive == 0


def test_twice_the_context_takes_tiled_twice_and_naive_four_times_the_memory():
    naive = [peak("naive", T) for T in (512, 1024, 2048)]
    tiled = [peak("tiled", T) for T in (512, 1024, 2048)]
    assert 3.8 < naive[1] / naive[0] < naive[2] / naive[1] <= 4
    assert tiled[1] / tiled[0] < tiled[2] / tiled[1] <= 2


def test_worked_example_of_memory():
    """N=1024, D=64, tiles of 32, float32. Scores, weights and output: 2 N N + N D numbers, 8.25 MiB; tiled needs the
    output, lse and a tile or two: about 280 KiB. Ours: naive holds two such tables and more, tiled within a tenth."""
    table = 2 * 1024 * 1024 * 4 + 1024 * 64 * 4
    assert table == 8.25 * 2**20
    assert peak("naive", 1024, gradients=False) >= table
    assert peak("tiled", 1024, gradients=False) == pytest.approx(280 * 1024, rel=0.1)


# --- the race -------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A small race of naive and tiled beside a peer that has no dropout here, and one that is not here: its folder and
    what it printed."""
    out = tmp_path_factory.mktemp("bench")
    impls = ["naive", "tiled", "sdpa_flash", "sdpa_cudnn"]
    with redirect_stdout(StringIO()) as said:
        bench.main(bench.Config(**SMALL | {"lengths": [128, 64], "impls": impls, "tokens": 128, "out": str(out)}))
    return out, said.getvalue().splitlines()


def test_every_case_has_a_row_for_each_implementation_and_pass(raced):
    rows = read(raced[0] / "results.csv")
    assert list(rows[0]) == race.COLUMNS
    assert [(row["impl"], row["pass"]) for row in rows[:9]] == [
        (impl, which) for impl in ("naive", "tiled", "sdpa_flash") for which in PASSES
    ]
    shapes = [("64", "2"), ("128", "1")]
    cases = dict.fromkeys((row["dropout_p"], row["causal"], row["T"], row["B"]) for row in rows)
    assert list(cases) == [
        (p, causal, *shape) for p in ("0.0", "0.1") for causal in ("True", "False") for shape in shapes
    ]
    assert len(rows) == 4 * 9 + 4 * 6  # sdpa_flash has no dropout on a CPU
    assert all(float(row["ms"]) > 0 and row["commit"] for row in rows)
    assert all(bool(row["peak_mib"]) == (row["pass"] == "forward+backward") for row in rows)


def test_the_last_line_is_json_of_the_rows(raced):
    out, lines = raced
    last = json.loads(lines[-1])
    assert [row["pass"] for row in last["rows"]] == [row["pass"] for row in read(Path(last["results"]))]
    assert Path(last["results"]).parent == out


def test_the_table_has_a_line_for_each_implementation_and_fits_the_screen(raced):
    head = next(i for i, line in enumerate(raced[1]) if line.strip().endswith("causal, dropout 0"))
    assert raced[1][head].strip() == "head size 16, 1 head, causal, dropout 0"
    assert raced[1][head + 2].split() == ["T", "B", *["ms", "GFLOP/s"] * 3, "x", "fastest", "MiB"]
    table = raced[1][head + 3 : head + 9]
    assert [line.split()[2] for line in table] == ["naive", "tiled", "sdpa_flash"] * 2
    assert all(len(line) <= 120 for line in table)
    rows = {(row["T"], row["impl"], row["pass"]): row for row in json.loads(raced[1][-1])["rows"][:18]}
    for line in table:
        T, _, impl, *figures = line.split()
        passes = [rows[int(T), impl, which] for which in PASSES]
        told = [x for passed in passes for x in (passed["ms"], 1e3 * passed["tflops"])]
        fastest = min(rows[int(T), name, "forward+backward"]["ms"] for name in ("naive", "tiled", "sdpa_flash"))
        told += [told[4] / fastest, passes[-1]["peak_mib"]]
        assert [float(x) for x in figures] == pytest.approx(told, rel=0.01, abs=0.005)
    assert sum(line.endswith(" -") for line in raced[1]) == 4  # no dropout: two masks, two lengths


def test_on_a_gpu_the_table_says_the_share_of_the_peak_and_fits_the_screen(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(race, "print", lambda line, flush=False: lines.append(line), raising=False)
    found = [
        {"pass": which, "ms": 12345.6, "tflops": tflops, "peak_mib": 73728.0}
        for which, tflops in zip(PASSES, (98.9, 494.5, 989.0), strict=True)
    ]
    race.show_head(Case(1, 12, 65536, 64, True, 0.0), torch.device("cuda"), 989e12)
    race.show(Case(1, 12, 65536, 64, True, 0.0), {"sdpa_efficient": found}, torch.device("cuda"), 989e12)
    assert lines[-1].split()[3:] == [
        *("12346", "98.9", "10%", "12346", "494", "50%", "12346", "989", "100%"),
        *("1.00", "73728"),
    ]
    assert [len(line) for line in lines[-2:]] == [120, 120]


def test_a_peer_that_cannot_do_a_case_is_left_out_of_it_and_the_reason_printed_once(raced):
    reasons = [line for line in raced[1] if line.startswith("sdpa_")]  # lines of the table begin with a length
    assert [line.split(":")[0] for line in reasons] == ["sdpa_cudnn", "sdpa_flash"]
    assert "dropout" in reasons[1]


def test_speed_is_drawn_and_memory_only_where_the_batch_is_the_same_at_every_length(raced, tmp_path, capsys):
    assert json.loads(raced[1][-1])["pictures"] == [str(raced[0] / "speed.png")]
    assert not (raced[0] / "memory.png").exists()
    bench.main(bench.Config(**SMALL | {"impls": ["tiled"], "dropout_p": [0.0], "out": str(tmp_path)}))
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["pictures"]) == 2
    for path in (raced[0] / "speed.png", tmp_path / "speed.png", tmp_path / "memory.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_second_race_appends_to_the_first_but_not_below_other_columns(tmp_path, capsys):
    cfg = bench.Config(**SMALL | {"impls": ["naive"], "causal": [True], "dropout_p": [0.0], "out": str(tmp_path)})
    bench.main(cfg)
    bench.main(cfg)
    assert [row["pass"] for row in read(tmp_path / "results.csv")] == [*PASSES] * 2
    old = "commit,impl\nabc,naive\n"
    (tmp_path / "results.csv").write_text(old)
    with pytest.raises(ValueError, match="other columns"):
        bench.main(cfg)
    assert (tmp_path / "results.csv").read_text() == old


def test_published_results_have_the_columns_of_this_bench():
    assert list(read(Path(bench.__file__).parent / "docs/results.csv")[0]) == race.COLUMNS


def test_flops_are_counted_as_the_field_counts_them():
    """FlashAttention's benchmark: 4 B H T T D forward, half of it if causal, 2.5 times that backward."""
    whole = Case(2, 12, 16384, 64, False, 0.0)
    assert whole.flops("forward") == 4 * 2 * 12 * 16384**2 * 64
    assert whole.flops("backward") == 2.5 * whole.flops("forward")
    causal = Case(2, 12, 16384, 64, True, 0.1)
    assert causal.flops("forward+backward") == 3.5 * whole.flops("forward") / 2


def test_both_passes_together_are_their_sum(raced):
    last = json.loads(raced[1][-1])["rows"]
    for forward, backward, both in zip(last[::3], last[1::3], last[2::3], strict=True):
        assert both["ms"] == forward["ms"] + backward["ms"]
        case = Case(*(both[name] for name in ("B", "H", "T", "D", "causal", "dropout_p")))
        assert both["tflops"] == case.flops("forward+backward") / both["ms"] / 1e9


MASKS = {
    "window": {"window": 7},
    "wide window": {"window": 100},
    "documents": {"documents": 9},
    "picture": {"block_mask": ("x..", "xx.", ".xx")},
    "all": {"window": 20, "documents": 25, "block_mask": ("x..x", "xx..", ".xxx", "x.xx")},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_flops_are_those_of_the_pairs_that_the_mask_shows(rules, causal):
    """Counted here with a second definition of the mask, element by element."""
    T = 50  # no multiple of 3 or 4 blocks
    case = Case(2, 2, T, 8, causal, 0.0, **rules)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= i).expand(2, T, T) if causal else torch.ones(2, T, T, dtype=torch.bool)
    seen = seen & ((i - j).abs() < case.window) if case.window else seen
    if case.documents:
        documents = entrants.documents_of(case)
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    if case.block_mask:
        side = -(-T // len(case.block_mask))
        shown = [[case.block_mask[a // side][b // side] == "x" for b in range(T)] for a in range(T)]
        seen = seen & torch.tensor(shown)
    assert 0 < case.share < 1 or rules == {"window": 100}
    assert case.flops("forward") == pytest.approx(4 * 2 * 8 * int(seen.sum()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_flex_is_given_the_mask_that_ours_have(rules, causal):
    """Grouped heads too. Uncompiled and forward alone, which is what it can do on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    case = Case(2, 4, 50, 16, causal, 0.0, H_kv=2, **rules)
    q, k, v, _ = (x.detach() for x in inputs(case, CPU, torch.float64))
    assert k.shape == v.shape == (2, 2, 50, 16)
    mask = entrants.flex_mask(case, entrants.documents_of(case), CPU)
    right, tiled = (attention_of(name, case, 16, CPU)(q, k, v) for name in ("naive", "tiled"))
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    seen = entrants.visible(case.problem(), range(50), range(50), CPU).any(
        -1
    )  # flex has other words for a row of nothing
    assert float((found - right)[seen[:, None].expand(2, 4, 50)].abs().max()) < 1e-12
    assert float((tiled - right).abs().max()) < 1e-12


def test_documents_are_as_long_in_the_mean_as_asked_and_not_all_alike():
    documents = entrants.documents_of(Case(8, 1, 4096, 8, True, 0.0, documents=64))
    lengths = torch.cat([row.unique_consecutive(return_counts=True)[1] for row in documents])
    assert 60 < float(lengths.float().mean()) < 68
    assert lengths.unique().numel() > 100


@pytest.mark.parametrize("name", [*entrants.SDPA, "flash4"])
@pytest.mark.parametrize("rule", [{"window": 7}, {"documents": 9}, {"block_mask": ("x.", "xx")}])
def test_a_peer_without_such_a_mask_is_not_raced_with_it(name, rule):
    with pytest.raises(ValueError, match=next(iter(rule))):
        attention_of(name, Case(1, 2, 50, 16, True, 0.0, **rule), 16, CPU)


def test_torchs_kernels_are_told_of_grouped_heads():
    case = Case(1, 4, 50, 16, True, 0.0, H_kv=2)
    assert race.check(["naive", "sdpa_flash"], [case], 16, CPU, torch.float32, []) == ["naive", "sdpa_flash"]


def test_a_masks_rules_are_short_enough_to_hide_keys_in_the_check():
    rules = {"window": 1024, "documents": 2048, "block_mask": ("x.", ".x")}
    (small,) = race.checked([[Case(8, 12, 4096, 64, True, 0.0, H_kv=4, **rules), Case(2, 12, 16384, 64, True, 0.0)]])
    assert small == Case(2, 2, 333, 64, True, 0.0, H_kv=1, **rules | {"window": 111, "documents": 111})
    for key, value in rules.items():
        assert replace(small, **dict.fromkeys(rules) | {key: getattr(small, key)}).share < 0.45, (key, value)


def test_rows_say_what_mask_they_had_and_pictures_find_them_again(tmp_path, capsys):
    masked = SMALL | {"impls": ["naive"], "causal": [True], "dropout_p": [0.0], "heads": [2], "out": str(tmp_path)}
    rules = {"window": 9, "documents": 20, "block_mask": ["xx", "xx"], "kv_heads": 1}
    bench.main(bench.Config(**masked))
    bench.main(bench.Config(**masked | rules))
    plain, ruled = (read(tmp_path / "results.csv")[i] for i in (0, 3))
    keys = ["H_kv", "window", "documents", "block_mask", "share"]
    assert [plain[key] for key in keys] == ["", "", "", "", "0.5"]
    assert [ruled[key] for key in keys[:4]] == ["1", "9", "20", "xx/xx"]
    assert 0 < float(ruled["share"]) < 9 / 64
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "draw", lambda rows, out: drawn.append(rows))
        for keys in ({}, rules):
            asked = {key: value for key, value in masked.items() if key not in ("block", "device", "patience")}
            bench.main(bench.Config(mode="pictures", **asked | keys))
    last = [json.loads(line)["rows"] for line in capsys.readouterr().out.splitlines() if '"rows"' in line]
    for found, raced in zip(drawn, last, strict=True):
        assert [row["window"] for row in found] == [row["window"] for row in raced]
        assert [row["ms"] for row in found] == pytest.approx([row["ms"] for row in raced], rel=1e-3)


def test_a_later_row_of_a_case_takes_the_earlier_ones_place(tmp_path, monkeypatch):
    row = dict.fromkeys(race.COLUMNS, "") | race.cells_of(Case(1, 1, 64, 16, True, 0.0))
    rows = [row | {"device": "A", "impl": "naive", "dtype": "float32", "pass": "forward", "ms": ms} for ms in (1, 2)]
    rows = [rows[0] | {"device": "B"}, rows[0], rows[1] | {"impl": "tiled"}, rows[1]]
    Results(tmp_path, "results.csv", race.COLUMNS).append([r | dict.fromkeys(("tflops", "peak_mib")) for r in rows])
    drawn = []
    monkeypatch.setattr(race, "draw", lambda rows, out: drawn.extend(rows))
    case = {"lengths": [64], "heads": [1], "head_sizes": [16], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(mode="pictures", **case, out=str(tmp_path)))
    assert [(row["device"], row["impl"], row["ms"]) for row in drawn] == [("A", "tiled", 2.0), ("A", "naive", 2.0)]
    with pytest.raises(ValueError, match="no row of these cases"):
        bench.main(bench.Config(mode="pictures", **case | {"lengths": [32]}, out=str(tmp_path)))
    with pytest.raises(ValueError, match="race first"):
        bench.main(bench.Config(mode="pictures", **case, out=str(tmp_path / "elsewhere")))


def test_every_implementation_has_a_look_of_its_own_that_can_be_read_on_white():
    assert list(charts.LOOKS) == list(entrants.IMPLS)
    colours, markers, _ = zip(*charts.LOOKS.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(entrants.IMPLS)
    for colour in colours:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        assert 1.05 / (luminance + 0.05) >= 4.5, colour  # WCAG's contrast


def test_inputs_are_random_and_the_same_each_time():
    case = Case(2, 1, 8, 4, True, 0.0)
    x = inputs(case, CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(x, inputs(case, CPU, torch.float32), strict=True))
    assert all(t.unique().numel() == t.numel() for t in x)
    assert not any(torch.equal(a, b) for a, b in pairwise(x))


def test_of_several_turns_each_pass_has_its_median():
    turns = [[{"pass": "forward", "ms": f}, {"pass": "backward", "ms": b}] for f, b in ((3, 5), (1, 4), (2, 9))]
    assert race.middle(turns) == [{"pass": "forward", "ms": 2}, {"pass": "backward", "ms": 5}]


def test_an_implementation_that_gets_slow_stops_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    found = [{"pass": which, "ms": 100.0, "tflops": 1.0, "peak_mib": 1.0} for which in PASSES]
    asked = []

    def weigh(name, case, block, x, made):
        asked.append((name, case.T))
        return [n | {"ms": n["ms"] if name == "naive" else 1.0} for n in found]

    monkeypatch.setattr(race, "weigh", weigh)
    options = {"impls": ["naive", "tiled"], "lengths": [16, 32, 64, 128], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(**SMALL | options | {"patience": 0.5, "out": str(tmp_path)}))
    # 0.1 s at 16 promise 0.4 s at 32, and the 0.1 s that it takes there 0.4 s at 64, and so on: nobody is slow
    assert asked == [(name, T) for T in (16, 32, 64, 128) for name in ("naive", "tiled")]
    asked.clear()
    bench.main(bench.Config(**SMALL | options | {"patience": 0.3, "out": str(tmp_path)}))
    assert asked == [("naive", 16), *(("tiled", T) for T in (16, 32, 64, 128))]
    assert capsys.readouterr().out.count("slow") == 3  # lengths


def test_what_does_not_fit_is_a_row_without_numbers_and_ends_the_series(monkeypatch, tmp_path, capsys):
    right, lengths = race.weigh, []

    def weigh(name, case, block, x, made):
        if name == "naive" and case.T > 16:
            lengths.append(case.T)
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 9999999 bytes")
        return right(name, case, block, x, made)

    monkeypatch.setattr(race, "weigh", weigh)
    options = {"impls": ["naive", "tiled"], "lengths": [16, 32, 64], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(**SMALL | options | {"out": str(tmp_path)}))
    rows = [
        row for row in read(tmp_path / "results.csv") if row["impl"] == "naive" and row["pass"] == "forward+backward"
    ]
    assert [(row["T"], bool(row["peak_mib"])) for row in rows] == [("16", True), ("32", False), ("64", False)]
    assert lengths == [32]


def test_what_runs_out_of_memory_in_a_later_turn_keeps_its_turns_and_ends_the_series(monkeypatch, tmp_path):
    right, calls = race.weigh, []

    def weigh(name, case, block, x, made):
        calls.append(case.T)
        if len(calls) == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 9999999 bytes")
        return right(name, case, block, x, made)

    monkeypatch.setattr(race, "weigh", weigh)
    monkeypatch.setitem(race.TURNS, "cpu", 3)
    options = {"impls": ["naive"], "lengths": [16, 32], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(**SMALL | options | {"out": str(tmp_path)}))
    rows = [row for row in read(tmp_path / "results.csv") if row["pass"] == "forward"]
    assert [(row["T"], bool(row["ms"])) for row in rows] == [("16", True), ("32", False)]
    assert calls == [16, 16, 16]


def test_an_attention_is_made_once_for_the_turns_of_a_case(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(race, "check", lambda names, *_: names)
    monkeypatch.setattr(race, "attention_of", lambda *args: made.append(args[:2]) or attention_of(*args))
    monkeypatch.setitem(race.TURNS, "cpu", 3)
    options = {"impls": ["naive"], "lengths": [16, 32], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(**SMALL | options | {"out": str(tmp_path)}))
    assert [case.T for _, case in made] == [16, 32]


def test_inputs_that_do_not_fit_are_a_line_and_the_race_goes_on(monkeypatch, tmp_path, capsys):
    right = race.inputs

    def inputs(case, device, dtype):
        if case.T > 16 and case.D == 8:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 9999999 bytes")
        return right(case, device, dtype)

    options = {"impls": ["naive"], "lengths": [16, 32], "head_sizes": [8, 16], "causal": [True], "dropout_p": [0.0]}
    cfg = bench.Config(**SMALL | options | {"out": str(tmp_path)})
    monkeypatch.setattr(race, "check", lambda names, *_: names)
    monkeypatch.setattr(race, "inputs", inputs)
    bench.main(cfg)
    line = "out of memory with q, k, v and do of 1 sequence of 32 tokens; use fewer tokens= or shorter lengths="
    assert line in capsys.readouterr().out.splitlines()
    assert {(row["D"], row["T"]) for row in read(tmp_path / "results.csv")} == {("8", "16"), ("16", "16"), ("16", "32")}


def test_a_race_whose_inputs_never_fit_ends_in_one_line(tmp_path):
    cfg = bench.Config(**SMALL | {"impls": ["naive"], "tokens": 2**30, "heads": [2**14], "out": str(tmp_path)})
    with pytest.raises(ValueError, match=r"^nothing could be timed: out of memory .* of \d+ tokens; use fewer tokens="):
        bench.main(cfg)


def test_a_race_that_is_cut_short_keeps_the_rows_it_has(monkeypatch, tmp_path):
    right = race.weigh

    def weigh(name, case, block, x, made):
        if case.T > 16:
            raise KeyboardInterrupt
        return right(name, case, block, x, made)

    monkeypatch.setattr(race, "weigh", weigh)
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.Config(**SMALL | {"impls": ["naive"], "lengths": [16, 32], "out": str(tmp_path)}))
    assert [(row["T"], row["pass"]) for row in read(tmp_path / "results.csv")] == [("16", which) for which in PASSES]


def test_an_error_of_ours_that_is_not_about_memory_is_not_swallowed():
    def broken(name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        attempt([], broken, "tiled")
    assert attempt([], broken, "flex") == "-"


def test_triton_without_a_gpu_is_left_out_unless_it_was_asked_for(capsys, monkeypatch):
    sizes = pytest.importorskip("kernels.sizes", reason="triton is made for Linux")
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    names = entrants.entrants(None, CPU)
    assert names == [name for name in entrants.IMPLS if name != "triton"]
    assert capsys.readouterr().out.startswith("triton: attention.impl=triton")
    with pytest.raises(ValueError, match=r"attention\.impl=triton"):
        entrants.entrants(["naive", "triton"], CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="both run on a GPU")
@pytest.mark.parametrize(("impl", "p"), [("flex", 0.0), ("sdpa_flash", 0.1)])
def test_a_race_without_anybody_says_why(impl, p, tmp_path):
    cfg = bench.Config(**SMALL | {"impls": [impl], "causal": [True], "dropout_p": [p], "out": str(tmp_path)})
    why = "(FlexAttention|Both fused kernels) do"
    with pytest.raises(ValueError, match=f"(none of them|nothing could) .*[;:] {impl}: {why}"):
        bench.main(cfg)


def test_flash4_is_given_its_own_layout(monkeypatch):
    """A stand-in: the package needs a GPU. It takes (B, T, H, D), and hands out lse as well."""
    package = ModuleType("flash_attn.cute")

    def flash_attn_func(q, k, v, causal):
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)), AttentionConfig("naive"), causal=causal)
        return o.transpose(1, 2), None

    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    case = Case(2, 3, 8, 4, True, 0.0)
    x = inputs(case, CPU, torch.float32)[:3]
    found, right = (attention_of(name, case, 4, CPU)(*x) for name in ("flash4", "naive"))
    assert torch.equal(found, right)
    with pytest.raises(ValueError, match="no dropout"):
        attention_of("flash4", Case(2, 3, 8, 4, True, 0.1), 4, CPU)


@pytest.mark.parametrize("name", entrants.SDPA)
def test_a_peer_of_torchs_runs_its_own_backend_and_no_other(monkeypatch, name):
    asked = []

    def sdpa(*args, **kwargs):
        cuda = torch.backends.cuda
        flags = {
            "sdpa_flash": cuda.flash_sdp_enabled(),
            "sdpa_cudnn": cuda.cudnn_sdp_enabled(),
            "sdpa_efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        }
        asked.append([key for key, on in flags.items() if on])

    monkeypatch.setattr(entrants.F, "scaled_dot_product_attention", sdpa)
    case = Case(1, 1, 8, 4, True, 0.0)
    attention_of(name, case, 4, CPU)(*inputs(case, CPU, torch.float32)[:3])
    assert asked == [[name]]


def test_a_wrong_implementation_of_ours_ends_the_bench(monkeypatch, tmp_path):
    right = tiled.online_softmax

    def wrong(s, m, l, without):
        p, m, l, alpha = right(s, m, l, without)
        return p, m, l, torch.ones_like(alpha)

    monkeypatch.setattr(tiled, "online_softmax", wrong)
    with pytest.raises(RuntimeError, match="tiled is further from float64"):
        bench.main(bench.Config(**SMALL | {"out": str(tmp_path)}))
    assert not (tmp_path / "results.csv").exists()


def test_an_answer_that_is_exactly_zero_is_right():
    """dq of rows that see one key, and everything of rows that see none: the error was divided by that of naive, 0."""
    cases = [Case(1, 2, 64, 16, True, 0.0, window=1), Case(1, 2, 64, 16, False, 0.0, block_mask=("..", ".."))]
    assert race.check(["naive", "tiled"], cases, 32, CPU, torch.float32, []) == ["naive", "tiled"]


@pytest.mark.parametrize(
    "wrong", [lambda q, k, v, **_: 2 * (q + k + v), lambda q, k, v, **_: q * k * v * torch.nan], ids=["sum", "NaN"]
)
def test_a_wrong_peer_is_left_out_with_a_line(monkeypatch, capsys, wrong):
    monkeypatch.setattr(entrants.F, "scaled_dot_product_attention", wrong)
    case = Case(1, 2, 333, 16, True, 0.0)
    assert race.check(["naive", "sdpa_flash"], [case], 32, CPU, torch.float32, []) == ["naive"]
    said = capsys.readouterr().out
    assert "sdpa_flash is further from float64" in said
    assert "left out" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype=int8"),
        ({"lengths": [64, 0]}, r"lengths\[1\]=0"),
        ({"heads": [1, 2, 3], "head_sizes": [64, 128]}, r"heads=\[1, 2, 3\] for head_sizes=\[64, 128\]"),
        ({"impls": ["flash5"]}, "flash5 is not known"),
        ({"mode": "traffic", "head_sizes": [64, 128]}, "measures one"),
        ({"mode": "speed"}, "mode=speed"),
        ({"mode": "roofline", "heads": [2, 4], "head_sizes": [32, 64]}, r"head_sizes=\[32, 64\].*measures one"),
        ({"mode": "roofline", "window": 4}, "window=4: mode=roofline"),
        ({"mode": "roofline", "lengths": [2**31]}, r"lengths\[0\]=2147483648 is outside \[1, 2\*\*31\)"),
        ({"window": 0}, "^window=0 must"),
        ({"documents": 0}, "^documents=0 is outside"),
        ({"block_mask": ["x.", "x"]}, "^block_mask=.*no picture"),
        ({"heads": [4, 6], "head_sizes": [8, 16], "kv_heads": 4}, "kv_heads=4: heads=6"),
    ],
)
def test_a_bench_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench.Config(**options)


# --- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("N", "D", "M"), [(256, 16, 2048), (512, 16, 4096), (512, 32, 8192), (512, 32, 4096)])
def test_counted_traffic_is_the_loads_and_stores_of_the_paper_word_for_word(N, D, M):
    block = M // (4 * D)
    rows, passes = min(block, D), N // block
    keys_outside = words_of(AttentionConfig("tiled", rows, block, "keys_outside"), N, D)
    # k, v once; for every tile of keys q, o, m, l in and o, m, l out; at the end o, m, l in and o, lse out
    assert keys_outside == 2 * N * D + passes * N * (3 * D + 4) + N * (2 * D + 3)
    queries_outside = words_of(AttentionConfig("tiled", rows, block, "queries_outside"), N, D)
    assert queries_outside == N * D + N // rows * 2 * N * D + N * (D + 1)  # q once, k and v each time, o and lse once


@pytest.mark.parametrize(("N", "D", "M"), [(256, 16, 2048), (512, 32, 4096)])
def test_counted_traffic_of_the_backward_is_its_loads_and_stores_word_for_word(N, D, M):
    block = M // (4 * D)
    rows, passes = min(block, D), N // block
    keys_outside = words_of(AttentionConfig("tiled", rows, block, "keys_outside"), N, D, backward=True)
    # k, v in and dk, dv out once; for every tile of keys q, do, lse, delta and dq in, dq out
    assert keys_outside == 4 * N * D + passes * N * (4 * D + 2)
    queries_outside = words_of(AttentionConfig("tiled", rows, block, "queries_outside"), N, D, backward=True)
    # q, do, lse, delta in and dq out once; for every tile of rows k, v, dk, dv in and dk, dv out
    assert queries_outside == N * (3 * D + 2) + N // rows * 6 * N * D


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 64), (False, 64)])
@pytest.mark.parametrize("name", ["naive", "keys_outside", "queries_outside"])
def test_a_masks_traffic_is_predicted(name, causal, window, backward):
    """To a sixth, beside what each order moves once: m, l and the tiles on the diagonal count at this length. Without
    the mask's share each of ours would be off by a factor of nearly two or more."""
    N, D, M = 1024, 32, 8192
    config = AttentionConfig("tiled", 32, 64, "keys_outside" if name == "naive" else name, window=window)
    config = replace(config, impl="naive") if name == "naive" else config
    words = words_of(config, N, D, causal, backward)
    once = {
        "naive": 0,
        "keys_outside": 4 * D + (0 if backward else 3),
        "queries_outside": 2 * D + 1 + backward * (D + 1),
    }
    found = words - N * once[name]
    assert found == pytest.approx(predicted(name, N, D, M, causal, window, backward), rel=1 / 6)
    assert name == "naive" or words < 0.65 * words_of(replace(config, window=None), N, D, False, backward)


@pytest.mark.parametrize(("N", "D", "M"), [(512, 64, 4096), (1024, 64, 4096), (1024, 64, 8192), (2048, 32, 4096)])
def test_traffic_of_keys_outside_fits_n_n_d_d_over_m(N, D, M):
    """12 N N D D / M words: 3 N D for each of 4 N D / M tiles of keys. m and l add 4 N to each, that is 16 / D to the
    12, and what is moved once (4 D + 3) M / N D D."""
    block = M // (4 * D)
    words = words_of(AttentionConfig("tiled", min(block, D), block, "keys_outside"), N, D)
    assert 12 < words / (N * N * D * D / M) <= 12 + 16 / D + (4 * D + 3) * M / (N * D * D) < 13.2


def test_naive_moves_twenty_tables_of_scores():
    N, D = 512, 16
    assert 0 <= words_of(AttentionConfig("naive"), N, D) - 20 * N * N < 16 * N * D


def test_traffic_writes_a_table_and_a_picture(tmp_path, capsys):
    cfg = bench.Config(mode="traffic", lengths=[64, 128], head_sizes=[16], on_chip=[1024], out=str(tmp_path))
    bench.main(cfg)
    with open(tmp_path / "traffic.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["order"] for row in rows] == ["naive", "keys_outside", "queries_outside"] * 2
    assert {row["pass"] for row in rows} == {"forward"}
    assert {row["causal"] for row in rows} == {"False"}
    drawn = (tmp_path / "traffic.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "traffic.png").unlink()
    assert redraw(tmp_path).read_bytes() == drawn


def test_a_chip_too_small_for_a_row_is_refused():
    with pytest.raises(ValueError, match=r"on_chip=255 .*use 256 or more"):
        bench.Config(mode="traffic", head_sizes=[64], on_chip=[255])


UNREAD = [
    {"mode": "traffic", "heads": [12]},
    {"mode": "pictures", "patience": 2.0},
    {"mode": "traffic", "impls": ["sdpa"]},
    {"on_chip": [1]},
]


@pytest.mark.parametrize("options", UNREAD)
def test_a_key_that_the_mode_does_not_read_is_refused(options):
    with pytest.raises(ValueError, match="does not read it"):
        bench.Config(**options)


# --- roofline --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roofline_rows(tmp_path_factory):
    """Of N = 256, D = 16, two heads; nothing is timed."""
    out = tmp_path_factory.mktemp("roofline")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(lab_roofline, "median_ms", lambda action, device: 1.0)
    bench.main(bench.Config(mode="roofline", lengths=[256], head_sizes=[16], device="cpu", out=str(out)))
    monkeypatch.undo()
    assert (out / "roofline.png").stat().st_size > 10_000
    with open(out / "roofline.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_roofline_without_enough_memory_is_one_line(tmp_path):
    """It was a traceback."""
    cfg = bench.Config(mode="roofline", lengths=[2**30], heads=[2**20], device="cpu", out=str(tmp_path))
    with pytest.raises(ValueError, match="out of memory with 1 sequence of 1073741824 tokens; use shorter lengths="):
        bench.main(cfg)


def test_naives_operations_move_their_tables(roofline_rows):
    operations = [float(row["mb"]) for row in roofline_rows if row["part"] not in ("limit", "whole")]
    (whole,) = [float(row["mb"]) for row in roofline_rows if row["name"] == "naive"]
    assert sum(operations) == pytest.approx(whole, rel=1e-3)
    # 16 of the 20 tables that mode=traffic counts are float32, one a head; 4 are the mask's, of bytes, for all heads.
    assert 0 <= 1e6 * whole - (16 * 4 * 2 + 4) * 256**2 < 16 * 4 * 2 * 256 * 16


def test_the_operations_flops_are_those_of_the_whole(roofline_rows):
    operations = [float(row["gflop"]) for row in roofline_rows if row["part"] not in ("limit", "whole")]
    (whole,) = [float(row["gflop"]) for row in roofline_rows if row["name"] == "naive"]
    assert sum(operations) == pytest.approx(whole, rel=1e-4)
    assert whole == pytest.approx(4 * 2 * 256**2 * 16 / 1e9, rel=1e-4)
