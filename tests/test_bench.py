"""bench.py: its instrument is exact, memory grows as the theory says, and what is wrong is not weighed."""

import csv

import pytest
import torch

import bench
from bench import PeakBytes, weigh
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
    [({"dtype": "int8"}, "dtype=int8"), ({"lengths": [64, 0]}, r"lengths\[1\]=0"), ({"repeats": 0}, "repeats=0")],
)
def test_a_bench_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench.Config(**options)
