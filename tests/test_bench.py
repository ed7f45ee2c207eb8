"""bench.py: its instrument is exact, memory grows as the theory says, and what is wrong is not weighed."""

import csv
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import bench
from lab import race
from lab.meter import PeakBytes, peak_bytes
from lab.race import Case, attempt, attention_of, forward_and_backward, inputs
from lab.traffic import words_of
from model import tiled
from model.attention import AttentionConfig, attention

CPU = torch.device("cpu")
SMALL = {"lengths": [64], "heads": [1], "head_sizes": [16], "block": 32, "device": "cpu"}


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
    lines: list[str] = []
    impls = ["naive", "tiled", "sdpa_flash", "sdpa_cudnn"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "print", lambda line, flush=False: lines.append(line), raising=False)
        bench.main(bench.Config(**SMALL | {"lengths": [128, 64], "impls": impls, "tokens": 128, "out": str(out)}))
    return out, lines


def test_every_case_has_a_row_for_each_implementation_and_pass(raced):
    rows = read(raced[0] / "results.csv")
    assert list(rows[0]) == race.COLUMNS
    assert [(row["impl"], row["pass"]) for row in rows[:9]] == [
        (impl, which) for impl in ("naive", "tiled", "sdpa_flash") for which in race.PASSES
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


def test_the_table_has_a_column_an_implementation_and_a_line_a_pass(raced):
    head = raced[1].index(next(line for line in raced[1] if line.startswith("D 16, H 1, causal, dropout_p 0.1")))
    assert raced[1][head].split()[-3:] == ["naive", "tiled", "sdpa_flash"]
    table = [line for line in raced[1][head:] if line.startswith("T ")][:4]
    assert [line.split()[4] for line in table] == [*race.PASSES, "MiB"]
    assert all(line.split()[-1] == "-" for line in table)  # no dropout


def test_a_peer_that_cannot_do_a_case_is_left_out_of_it_and_the_reason_printed_once(raced):
    reasons = [line for line in raced[1] if line.startswith("sdpa_")]
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
    assert [row["pass"] for row in read(tmp_path / "results.csv")] == [*race.PASSES] * 2
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


def test_inputs_are_random_and_the_same_each_time():
    case = Case(2, 1, 8, 4, True, 0.0)
    x = inputs(case, CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(x, inputs(case, CPU, torch.float32), strict=True))
    assert all(t.unique().numel() == t.numel() for t in x)
    assert not any(torch.equal(a, b) for a, b in pairwise(x))


def test_an_implementation_that_gets_slow_stops_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    found = [{"pass": which, "ms": 100.0, "tflops": 1.0, "peak_mib": 1.0} for which in race.PASSES]
    asked = []

    def weigh(name, case, block, x):
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
    assert capsys.readouterr().out.count("slow") == 3 * 4  # three lengths, four lines each


def test_what_does_not_fit_is_a_row_without_numbers_and_ends_the_series(monkeypatch, tmp_path, capsys):
    right, lengths = race.weigh, []

    def weigh(name, case, block, x):
        if name == "naive" and case.T > 16:
            lengths.append(case.T)
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 9999999 bytes")
        return right(name, case, block, x)

    monkeypatch.setattr(race, "weigh", weigh)
    options = {"impls": ["naive", "tiled"], "lengths": [16, 32, 64], "causal": [True], "dropout_p": [0.0]}
    bench.main(bench.Config(**SMALL | options | {"out": str(tmp_path)}))
    rows = [
        row for row in read(tmp_path / "results.csv") if row["impl"] == "naive" and row["pass"] == "forward+backward"
    ]
    assert [(row["T"], bool(row["peak_mib"])) for row in rows] == [("16", True), ("32", False), ("64", False)]
    assert lengths == [32]


def test_a_race_that_is_cut_short_keeps_the_rows_it_has(monkeypatch, tmp_path):
    right = race.weigh

    def weigh(name, case, block, x):
        if case.T > 16:
            raise KeyboardInterrupt
        return right(name, case, block, x)

    monkeypatch.setattr(race, "weigh", weigh)
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.Config(**SMALL | {"impls": ["naive"], "lengths": [16, 32], "out": str(tmp_path)}))
    assert [(row["T"], row["pass"]) for row in read(tmp_path / "results.csv")] == [
        ("16", which) for which in race.PASSES
    ]


def test_an_error_of_ours_that_is_not_about_memory_is_not_swallowed():
    def broken(name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        attempt([], broken, "tiled")
    assert attempt([], broken, "flex") == "-"


def test_triton_without_a_gpu_is_left_out_unless_it_was_asked_for(capsys, monkeypatch):
    sizes = pytest.importorskip("kernels.sizes", reason="triton is made for Linux")
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    names = race.entrants(None, CPU)
    assert names == [name for name in race.IMPLS if name != "triton"]
    assert capsys.readouterr().out.startswith("triton: attention.impl=triton")
    with pytest.raises(ValueError, match=r"attention\.impl=triton"):
        race.entrants(["naive", "triton"], CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="both run on a GPU")
@pytest.mark.parametrize(("impl", "p"), [("flex", 0.0), ("sdpa_flash", 0.1)])
def test_a_race_without_anybody_says_why(impl, p, tmp_path):
    cfg = bench.Config(**SMALL | {"impls": [impl], "causal": [True], "dropout_p": [p], "out": str(tmp_path)})
    with pytest.raises(ValueError, match=f"none of them .*; {impl}: (FlexAttention|Both fused kernels) do"):
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


@pytest.mark.parametrize("name", race.SDPA)
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

    monkeypatch.setattr(race.F, "scaled_dot_product_attention", sdpa)
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


@pytest.mark.parametrize(
    "wrong", [lambda q, k, v, **_: 2 * (q + k + v), lambda q, k, v, **_: q * k * v * torch.nan], ids=["sum", "NaN"]
)
def test_a_wrong_peer_is_left_out_with_a_line(monkeypatch, capsys, wrong):
    monkeypatch.setattr(race.F, "scaled_dot_product_attention", wrong)
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
        ({"mode": "traffic", "head_sizes": [64, 128]}, "counts for one"),
        ({"mode": "speed"}, "mode=speed"),
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
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")


def test_a_chip_too_small_for_a_row_is_refused():
    with pytest.raises(ValueError, match=r"on_chip=255 .*use 256 or more"):
        bench.Config(mode="traffic", head_sizes=[64], on_chip=[255])


UNREAD = [{"mode": "traffic", "heads": [12]}, {"mode": "traffic", "impls": ["sdpa"]}, {"on_chip": [1]}]


@pytest.mark.parametrize("options", UNREAD)
def test_a_key_that_the_mode_does_not_read_is_refused(options):
    with pytest.raises(ValueError, match="does not read it"):
        bench.Config(**options)
