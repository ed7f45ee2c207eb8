"""bench.py: its instrument is exact, memory grows as the theory says, and what is wrong is not weighed."""

import csv

import pytest
import torch

import bench
from bench import PeakBytes, traffic, weigh
from model import attention
from model.attention import AttentionConfig


def peak(impl: str, T: int, D: int = 64, block: int = 32, gradients: bool = True) -> int:
    x = [torch.randn(1, 1, T, D, requires_grad=True) for _ in range(4)]
    config = AttentionConfig(impl, block, block)
    if gradients:
        return weigh(x, config, repeats=1)[1]
    with torch.no_grad(), PeakBytes() as counted:
        attention.attention(*x[:3], config)
    return counted.peak


def test_the_instrument_counts_what_is_alive_at_once():
    x = torch.zeros(1000)
    with PeakBytes() as counted:
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


def test_a_run_writes_rows_and_a_picture(tmp_path, capsys):
    bench.main(bench.Config(lengths=[64, 128], heads=1, head_size=16, repeats=1, device="cpu", out=str(tmp_path)))
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["impl"], int(row["T"])) for row in rows] == [
        ("naive", 64), ("tiled", 64), ("naive", 128), ("tiled", 128)
    ]  # fmt: skip
    assert all(float(row["ms"]) > 0 and float(row["peak_mib"]) > 0 and row["commit"] for row in rows)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"results"')


def test_a_wrong_implementation_is_not_weighed(monkeypatch, tmp_path):
    right = attention.online_softmax

    def wrong(s, m, l, break_it):
        p, m, l, alpha = right(s, m, l, break_it)
        return p, m, l, torch.ones_like(alpha)

    monkeypatch.setattr(attention, "online_softmax", wrong)
    with pytest.raises(RuntimeError, match="tiled is further from float64"):
        bench.main(bench.Config(lengths=[64], heads=1, device="cpu", out=str(tmp_path)))
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype=int8"),
        ({"lengths": [64, 0]}, r"lengths\[1\]=0"),
        ({"repeats": 0}, "repeats=0"),
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
    keys_outside = traffic(AttentionConfig("tiled", rows, block, "keys_outside"), N, D)
    # k, v once; for every tile of keys q, o, m, l in and o, m, l out; at the end o, m, l in and o, lse out
    assert keys_outside == 2 * N * D + passes * N * (3 * D + 4) + N * (2 * D + 3)
    queries_outside = traffic(AttentionConfig("tiled", rows, block, "queries_outside"), N, D)
    assert queries_outside == N * D + N // rows * 2 * N * D + N * (D + 1)  # q once, k and v each time, o and lse once


@pytest.mark.parametrize(("N", "D", "M"), [(512, 64, 4096), (1024, 64, 4096), (1024, 64, 8192), (2048, 32, 4096)])
def test_traffic_of_keys_outside_fits_n_n_d_d_over_m(N, D, M):
    """12 N N D D / M words: 3 N D for each of 4 N D / M tiles of keys. m and l add 4 N to each, that is 16 / D to the
    12, and what is moved once (4 D + 3) M / N D D."""
    block = M // (4 * D)
    words = traffic(AttentionConfig("tiled", min(block, D), block, "keys_outside"), N, D)
    assert 12 < words / (N * N * D * D / M) <= 12 + 16 / D + (4 * D + 3) * M / (N * D * D) < 13.2


def test_naive_moves_twenty_tables_of_scores():
    N, D = 512, 16
    assert 0 <= traffic(AttentionConfig("naive"), N, D) - 20 * N * N < 16 * N * D


def test_traffic_writes_a_table_and_a_picture(tmp_path, capsys):
    cfg = bench.Config(mode="traffic", lengths=[64, 128], head_size=16, on_chip=[1024], out=str(tmp_path))
    bench.main(cfg)
    with open(tmp_path / "traffic.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["order"] for row in rows] == ["naive", "keys_outside", "queries_outside"] * 2
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")
    assert attention.load.__module__ == "model.attention"  # the counters have gone


def test_a_chip_too_small_for_a_row_is_refused():
    with pytest.raises(ValueError, match=r"on_chip=255 .*use 256 or more"):
        bench.Config(mode="traffic", head_size=64, on_chip=[255])


UNREAD = [{"mode": "traffic", "heads": 12}, {"mode": "traffic", "impls": ["sdpa"]}, {"on_chip": [1]}]


@pytest.mark.parametrize("options", UNREAD)
def test_a_key_that_the_mode_does_not_read_is_refused(options):
    with pytest.raises(ValueError, match="does not read it"):
        bench.Config(**options)
