"""bench.py: its instruments are exact, memory grows as the theory says, and what is wrong is not timed."""

import csv
import math
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import bench
from lab import peers, race, step
from lab.meter import PeakBytes, peak_bytes
from lab.peers import PASSES, Case, attention_of
from lab.race import attempt, forward_and_backward, inputs
from lab.traffic import count, predicted
from model import tiled
from model.attention import AttentionConfig, attention
from model.gpt import GPTConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"lengths": [128, 64], "heads": [1], "head_sizes": [16], "device": "cpu", "dtype": "float32", "tokens": 128,
         "impls": ["naive", "tiled", "sdpa_flash", "sdpa_cudnn"]}  # fmt: skip


def race_of(out: Path, **options) -> None:
    bench.bench(bench.Bench(**SMALL | options | {"out": str(out)}))


def table_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(race, "SECONDS", 0)


def test_the_instrument_counts_what_is_alive_at_once():
    x = torch.zeros(1000)
    with PeakBytes() as counted:
        x += 1  # was there before
        a = x + 1  # 4,000 bytes
        b = a + 1  # 8,000
        del a
        b.view(10, 100) * 2  # a view costs nothing: 8,000 again
    assert counted.peak == 8000


def test_twice_the_context_takes_tiled_twice_and_naive_four_times_the_memory():
    def peak(impl: str, T: int) -> int:
        case = Case(1, 1, T, 64, True, 0.1)
        f, x = attention_of(impl, case, CPU), inputs(case, CPU, torch.float32)
        return peak_bytes(lambda: forward_and_backward(f, x), CPU)

    naive, by_tiles = ([peak(impl, T) for T in (512, 1024, 2048)] for impl in ("naive", "tiled"))
    assert 3.7 < naive[1] / naive[0] < naive[2] / naive[1] <= 4
    assert by_tiles[1] / by_tiles[0] < by_tiles[2] / by_tiles[1] <= 2


def test_what_is_kept_for_the_backward_is_q_k_v_o_lse_and_the_seed():
    q, seed, kept = torch.zeros(1, 2, 256, 64, requires_grad=True), torch.tensor(7), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda _: None):
        attention(q, q, q, AttentionConfig("tiled", dropout_p=0.1), seed=seed)
    assert sorted(kept) == [seed.nbytes, q.nbytes // 64, *[q.nbytes] * 4]


def test_every_case_has_a_row_for_each_implementation_and_pass_and_a_line(tmp_path, capsys, monkeypatch):
    """Beside a peer that has no dropout on a CPU, and one that does not run there: a line says why."""
    monkeypatch.setattr(race, "peak_bytes", lambda *_: 3 * 2**20)
    race_of(tmp_path, causal=[True, False])
    rows, lines = table_of(tmp_path / "results.csv"), capsys.readouterr().out.splitlines()
    assert [(row["impl"], row["pass"]) for row in rows[:9]] == [*product(("naive", "tiled", "sdpa_flash"), PASSES)]
    cases = dict.fromkeys((row["dropout_p"], row["causal"], (row["T"], row["B"])) for row in rows)
    assert [*cases] == [*product(("0", "0.1"), ("True", "False"), (("64", "2"), ("128", "1")))]
    assert len(rows) == 4 * 9 + 4 * 6
    assert all(row["ms"] and row["peak_mib"] == "3" * (row["pass"] == "forward+backward") for row in rows)
    table = [line.split()[2:] for line in lines if line.split()[:1] in (["64"], ["128"])]
    numbers = [all(cell[0].isdigit() for cell in line[1:]) for line in table]
    assert numbers == [True] * 12 + [True, True, False] * 4
    assert all("dropout" in " ".join(line) for line, runs in zip(table, numbers, strict=True) if not runs)
    assert len([line for line in lines if line.startswith("check sdpa_cudnn     left out: ")]) == 1
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("speed.png", "memory.png"))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 7), (False, 7), (True, 60), (False, 60)])
def test_flops_are_those_of_the_pairs_that_a_window_shows_and_flex_has_the_same_mask(monkeypatch, causal, window):
    """Counted here element by element. Flex uncompiled and forward alone, which is what it can do on a CPU."""
    T = 50
    case = Case(2, 4, T, 16, causal, 0.0, H_kv=2, window=window)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = int((((j <= i) | (not causal)) & ((i - j).abs() < (window or T))).sum()) if window else T * T / 2
    assert case.flops("forward") == pytest.approx(4 * 2 * 4 * 16 * seen)
    assert case.flops("backward") == 2.5 * case.flops("forward")
    q, k, v, _ = (x.detach() for x in inputs(case, CPU, torch.float64))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, dynamic: f)
        those = attention_of("naive", case, CPU), attention_of("tiled", case, CPU), peers.flex(case, CPU)
    naive, by_tiles, flex = (f(q, k, v) for f in those)
    assert max(float((found - naive).abs().max()) for found in (flex, by_tiles)) < 1e-12


@pytest.mark.parametrize(("name", "lacks"), [("sdpa_cudnn", "window"), ("flash4", "window"), ("flex", "dropout_p")])
def test_a_peer_does_not_race_with_what_it_lacks(name, lacks):
    with pytest.raises(ValueError, match=lacks):
        attention_of(name, Case(1, 2, 50, 16, True, **{"dropout_p": 0.0, lacks: 0.5}), CUDA)


@pytest.mark.parametrize("H_kv", [None, 2])
def test_a_peer_of_torchs_runs_its_own_backend_and_no_other_and_is_told_of_grouped_heads(monkeypatch, H_kv):
    def asked(*_, enable_gqa, **__):
        names = "flash", "cudnn", "mem_efficient", "math"
        return [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()], enable_gqa

    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", asked)
    case = Case(1, 4, 8, 4, True, 0.0, H_kv=H_kv)
    q, k, v, _ = inputs(case, CPU, torch.float32)
    for name, backend in (("flash", "flash"), ("cudnn", "cudnn"), ("efficient", "mem_efficient")):
        assert attention_of(f"sdpa_{name}", case, CUDA)(q, k, v) == ([backend], bool(H_kv))


def test_who_finds_no_memory_ends_its_series_and_the_others_go_on(monkeypatch, tmp_path):
    """tiled has no memory at 64. What a race has when it is cut short it keeps."""

    def attempt(name, case, *_):
        if case.T > 128:
            raise KeyboardInterrupt
        return race.MEMORY if name == "tiled" and case.T == 64 else (attention_of(name, case, CPU), 1)

    names = ["naive", "tiled"]
    monkeypatch.setattr(race, "check", lambda *_: names)
    monkeypatch.setattr(race, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        race_of(tmp_path, lengths=[16, 32, 64, 128, 256], tokens=1, dropout_p=[0.0], window=7, heads=[2], kv_heads=1)
    assert {(row["H"], row["H_kv"], row["window"]) for row in table_of(tmp_path / "results.csv")} == {("2", "1", "7")}
    rows = [row for row in table_of(tmp_path / "results.csv") if row["pass"] == "forward"]
    lengths = {name: [(int(row["T"]), bool(row["ms"])) for row in rows if row["impl"] == name] for name in names}
    assert lengths["tiled"] == [(16, True), (32, True), (64, False), (128, False)]
    assert lengths["naive"] == [(16, True), (32, True), (64, True), (128, True)]


def test_all_take_turns_and_the_first_third_of_the_rounds_does_not_count(monkeypatch):
    """Four rounds, each of a forward and a backward of the two entrants. With the first round the median is another."""
    case, order = Case(1, 1, 8, 4, True, 0.0), []
    ms = iter([of_round * of_call for of_round in (10.0, 1.0, 3.0, 5.0) for of_call in (1, 2, 3, 4)])
    monkeypatch.setattr(race, "ms_of", lambda action, device: (action(), next(ms))[1])
    entrants = {name: (lambda q, k, v, name=name: order.append(name) or q * k * v, 2**20) for name in ("a", "b")}
    found = race.take_turns(case, entrants, CPU, torch.float32)
    assert order == ["a", "a", "b", "b"] * 4
    assert [[row["ms"] for row in found[name]] for name in "ab"] == [[3, 6, 9], [9, 12, 21]]
    assert found["b"][-1]["peak_mib"] == 1


def test_an_error_of_ours_that_is_not_about_memory_is_not_swallowed():
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def absent(*_):
        raise ImportError("No module named 'triton'")

    few, many = Case(1, 1, 8, 4, True, 0.0), Case(1, 2**14, 2**20, 64, True, 0.0)
    with pytest.raises(RuntimeError, match="illegal"):
        attempt("tiled", few, CPU, torch.float32, broken)
    assert attempt("sdpa_flash", few, CPU, torch.float32, broken).startswith("CUDA error")
    assert attempt("tiled", many, CPU, torch.float32, broken) == race.MEMORY
    assert attempt("triton", few, CPU, torch.float32, absent) == "No module named 'triton'"


def test_a_wrong_implementation_of_ours_ends_the_race(monkeypatch, tmp_path):
    monkeypatch.setattr(tiled, "LOG2E", 1.44)  # log2(e) is 1.4427
    with pytest.raises(RuntimeError, match=r"^tiled is wrong"):
        race_of(tmp_path)
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("wrong", [lambda q, k, v, **_: 2 * (q + k + v), lambda q, k, v, **_: q * k * v * math.nan])
def test_a_wrong_peer_is_left_out(monkeypatch, wrong):
    case, both = Case(1, 2, 333, 16, True, 0.0), ["naive", "sdpa_flash"]
    assert race.check(both, [case], CPU, torch.float32) == both
    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", wrong)
    assert race.check(both, [case], CPU, torch.float32) == ["naive"]


@pytest.mark.parametrize("mistake", [{"impls": ["flash5"]}, {"mode": "step"}, {"heads": [1, 2]}, {"dropout_p": [1.0]}])
def test_a_mistake_is_refused_with_its_value(mistake):
    with pytest.raises(ValueError, match=str(next(iter(mistake)))):
        bench.bench(bench.Bench(**{"heads": [2], "head_sizes": [16]} | mistake))


@pytest.mark.parametrize(("N", "D", "M"), [(256, 16, 2048), (512, 32, 8192)])
def test_tiled_moves_the_loads_and_stores_of_the_paper_word_for_word(N, D, M):
    rows = min(M // (4 * D), D)  # of a tile that fills a chip of M words
    # q once, k and v for every tile of rows, o and lse once
    forward = N * D + N // rows * 2 * N * D + N * (D + 1)
    # q, do, lse, delta in and dq out once; for every tile of rows k, v, dk, dv in and dk, dv out
    backward = N * (3 * D + 2) + N // rows * 6 * N * D
    assert count("tiled", N, D, M, False) == (forward, backward)


@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_the_causal_traffic_is_predicted(impl):
    """To an eighth. Without the mask's share tiled would be off by a factor of nearly two."""
    assert count(impl, 2048, 32, 8192, True) == pytest.approx(predicted(impl, 2048, 32, 8192, True), rel=1 / 8)


def test_the_command_prints_a_line_for_each_length_chip_and_implementation(call):
    said = call(bench, "mode=traffic", "lengths=[64,128]", "on_chip=[1024]").out
    lines = [line.split()[:3] for line in said.splitlines()[3:]]
    assert lines == [[N, "1024", impl] for N in ("64", "128") for impl in ("naive", "tiled")]


LIKE_NANOGPTS = """
from torch import nn, optim
GPTConfig, asked = dict, []

class GPT(nn.Embedding):
    def __init__(self, sizes):
        asked.append(sizes)
        super().__init__(31, 31)
    def forward(self, idx, targets):
        return None, nn.functional.cross_entropy(super().forward(idx).mT, targets)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
"""


def test_nanogpts_model_is_given_our_sizes_and_is_timed_in_turn_with_ours(monkeypatch, tmp_path, capsys):
    (tmp_path / "model.py").write_text(LIKE_NANOGPTS)
    clock = iter([1.0, 3.0, 2.0, 4.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0] * 2)

    def ms(action, device):
        action()
        return step.STEPS * next(clock)

    monkeypatch.setattr(step, "NANO", GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=31, bias=False))
    monkeypatch.setattr(step, "ms_of", ms)
    bench.bench(bench.Bench(mode="step", lengths=[24, 8], peer=str(tmp_path / "model.py"), device="cpu"))
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 31, "bias": False, "dropout": 0.0}
    assert sys.modules["peer_model"].asked == [sizes | {"block_size": T} for T in (8, 24)]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line[:5] for line in lines] == [[T, "float32", "1.0", "2.0", "2.000"] for T in ("8", "24")]
