"""bench.py: its instruments are exact, memory grows as the theory says, and what is wrong is not timed."""

import csv
import math
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
from lab import peers, race, step
from lab.meter import PeakBytes, ms_of, peak_bytes
from lab.peers import PASSES, Case, attention_of
from lab.race import attempt, forward_and_backward, inputs
from lab.traffic import count, predicted
from model import tiled
from model.attention import AttentionConfig, attention
from model.gpt import GPTConfig

CPU = torch.device("cpu")
SMALL = {"lengths": [128, 64], "heads": [1], "head_sizes": [16], "device": "cpu", "dtype": "float32"}
SMALL |= {"impls": ["naive", "tiled", "sdpa_flash", "sdpa_cudnn"], "tokens": 128, "patience": 1e6}


def table_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    """Each action is timed once, and not for a tenth of a second. What a peer lacks is said again in each test."""
    monkeypatch.setattr(race, "median_ms", lambda f, device, prepare=tuple: ms_of(lambda: f(*prepare()), device))
    race.say.cache_clear()


def test_the_instrument_counts_what_is_alive_at_once():
    x = torch.zeros(1000)
    with PeakBytes() as counted:
        x += 1  # was there before
        a = x + 1  # 4,000 bytes
        b = a + 1  # 8,000
        del a
        c = b.view(10, 100)  # a view costs nothing
        d = c * 2  # 8,000 again
    assert counted.peak == counted.alive == 8000
    del b, c, d
    assert counted.alive == 0


def test_twice_the_context_takes_tiled_twice_and_naive_four_times_the_memory():
    def peak(impl: str, T: int) -> int:
        case = Case(1, 1, T, 64, True, 0.0)
        f, x = attention_of(impl, case, CPU), inputs(case, CPU, torch.float32)
        return peak_bytes(lambda: forward_and_backward(f, x), CPU)

    naive, by_tiles = ([peak(impl, T) for T in (512, 1024, 2048)] for impl in ("naive", "tiled"))
    assert 3.7 < naive[1] / naive[0] < naive[2] / naive[1] <= 4
    assert by_tiles[1] / by_tiles[0] < by_tiles[2] / by_tiles[1] <= 2


def test_what_is_kept_for_the_backward_grows_with_the_length_alone():
    """q, k, v, o, lse, the seed: on tensors without memory, what autograd saves has its shapes all the same."""
    B, H, T, D, kept, seed = 1, 2, 2048, 64, [], torch.tensor(7)
    config = AttentionConfig("tiled", 512, 512, dropout_p=0.1)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda _: None),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        q = torch.empty(B, H, T, D, dtype=torch.bfloat16, requires_grad=True)
        attention(q, q, q, config, seed=seed)
    assert sorted(kept) == [seed.nbytes, B * H * T * 4, *[q.nbytes] * 4]


# --- the race


def test_every_case_has_a_row_for_each_implementation_and_pass_and_a_line(tmp_path, capsys):
    """Beside a peer that has no dropout on a CPU, and one that does not run there. An earlier race's rows stay."""
    race.append([{"impl": "earlier"}], tmp_path / "results.csv")
    bench.bench(bench.Bench(**SMALL | {"causal": [True, False], "out": str(tmp_path)}))
    (earlier, *rows), lines = table_of(tmp_path / "results.csv"), capsys.readouterr().out.splitlines()
    assert earlier["impl"] == "earlier"
    assert [(row["impl"], row["pass"]) for row in rows[:9]] == [*product(("naive", "tiled", "sdpa_flash"), PASSES)]
    cases = dict.fromkeys((row["dropout_p"], row["causal"], (row["T"], row["B"])) for row in rows)
    assert [*cases] == [*product(("0", "0.1"), ("True", "False"), (("64", "2"), ("128", "1")))]
    assert len(rows) == 4 * 9 + 4 * 6
    assert all(float(row["ms"]) > 0 for row in rows)
    assert all(bool(row["peak_mib"]) == (row["pass"] == "forward+backward") for row in rows)
    table = [line.split() for line in lines if line.split()[:1] in (["64"], ["128"])]
    assert [line[2] for line in table] == ["naive", "tiled", "sdpa_flash"] * 8
    assert [line[3:] == ["-"] for line in table] == [False] * 12 + [False, False, True] * 4
    assert [line.split(":")[0] for line in lines if line.startswith("sdpa_")] == ["sdpa_cudnn", "sdpa_flash"]
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
        those = [attention_of(name, case, CPU) for name in ("naive", "tiled", "flex")]
    naive, by_tiles, flex = (f(q, k, v) for f in those)
    assert max(float((found - naive).abs().max()) for found in (flex, by_tiles)) < 1e-12


@pytest.mark.parametrize(("name", "lacks"), [("sdpa_cudnn", "window"), ("flash4", "window"), ("flex", "dropout_p")])
def test_a_peer_does_not_race_with_what_it_lacks(name, lacks):
    case = Case(1, 2, 50, 16, True, 0.0, window=7) if lacks == "window" else Case(1, 2, 50, 16, True, 0.1)
    with pytest.raises(ValueError, match=lacks):
        attention_of(name, case, CPU)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_a_peer_of_torchs_runs_its_own_backend_and_no_other_and_is_told_of_grouped_heads(monkeypatch, name):
    asked = []

    def sdpa(*args, **kwargs):
        names = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "mem_efficient", "math": "math"}
        on = [key for key, of in names.items() if getattr(torch.backends.cuda, f"{of}_sdp_enabled")()]
        asked.append((on, kwargs["enable_gqa"]))

    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", sdpa)
    for H_kv in (None, 2):
        case = Case(1, 4, 8, 4, True, 0.0, H_kv=H_kv)
        attention_of(name, case, CPU)(*inputs(case, CPU, torch.float32)[:3])
    assert asked == [([name], False), ([name], True)]


def test_who_gets_slow_or_finds_no_memory_ends_its_series_and_the_others_go_on(monkeypatch, tmp_path):
    """naive takes 100 ms for a pass. tiled has no memory at 64. What a race has when it is cut short it keeps."""

    def weigh(name, case, *_):
        if name == "tiled" and case.T == 64:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        if case.T > 128:
            raise KeyboardInterrupt
        return dict.fromkeys(PASSES, 100.0 if name == "naive" else 1.0), 1.0

    names = ["naive", "tiled", "sdpa_flash"]
    monkeypatch.setattr(race, "check", lambda *_: names)
    monkeypatch.setattr(race, "weigh", weigh)
    options = {"impls": names, "lengths": [16, 32, 64, 128, 256], "tokens": 1, "dropout_p": [0.0], "patience": 0.3}
    with pytest.raises(KeyboardInterrupt):
        bench.bench(bench.Bench(**SMALL | options | {"out": str(tmp_path)}))
    rows = [row for row in table_of(tmp_path / "results.csv") if row["pass"] == "forward"]
    lengths = {name: [(int(row["T"]), bool(row["ms"])) for row in rows if row["impl"] == name] for name in names}
    assert lengths["naive"] == [(16, True)]  # 0.1 s at 16 promises 0.4 s at 32
    assert lengths["tiled"] == [(16, True), (32, True), (64, False), (128, False)]
    assert lengths["sdpa_flash"] == [(16, True), (32, True), (64, True), (128, True)]


def test_an_error_of_ours_that_is_not_about_memory_is_not_swallowed():
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        attempt("tiled", broken)
    assert attempt("flex", broken) == "-"
    many = Case(1, 2**14, 2**20, 64, True, 0.0)
    assert attempt("inputs", inputs, many, CPU, torch.float32) == "memory"


def test_a_wrong_implementation_of_ours_ends_the_race(monkeypatch, tmp_path):
    def wrong(s, m, l, broken, right=tiled.online_softmax):
        p, m, l, alpha = right(s, m, l, broken)
        return p, m, l, torch.ones_like(alpha)

    monkeypatch.setattr(tiled, "online_softmax", wrong)
    with pytest.raises(RuntimeError, match=r"^tiled is wrong"):
        bench.bench(bench.Bench(**SMALL | {"out": str(tmp_path)}))
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("wrong", [lambda q, k, v, **_: 2 * (q + k + v), lambda q, k, v, **_: q * k * v * math.nan])
def test_a_wrong_peer_is_left_out(monkeypatch, wrong):
    case, both = Case(1, 2, 333, 16, True, 0.0), ["naive", "sdpa_flash"]
    assert race.check(both, [case], CPU, torch.float32) == both
    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", wrong)
    assert race.check(both, [case], CPU, torch.float32) == ["naive"]


def test_an_answer_that_is_exactly_zero_is_right():
    """dq of rows that see one key: the error was divided by that of naive, 0."""
    cases = [Case(1, 2, 64, 16, True, 0.0, window=1)]
    assert race.check(["naive", "tiled"], cases, CPU, torch.float32) == ["naive", "tiled"]


@pytest.mark.parametrize(
    "mistake", [{"impls": ["flash5"]}, {"mode": "train"}, {"heads": [1, 2]}, {"kv_heads": 3}, {"dropout_p": [1.0]}]
)
def test_a_mistake_is_refused_with_its_value(mistake):
    with pytest.raises(ValueError, match=str(next(iter(mistake)))):
        bench.Bench(**{"heads": [2], "head_sizes": [16]} | mistake)


# --- traffic


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("N", "D", "M"), [(256, 16, 2048), (512, 32, 8192)])
def test_tiled_moves_the_loads_and_stores_of_the_paper_word_for_word(N, D, M, backward):
    rows = min(M // (4 * D), D)  # of a tile that fills a chip of M words
    if backward:  # q, do, lse, delta in and dq out once; for every tile of rows k, v, dk, dv in and dk, dv out
        expected = N * (3 * D + 2) + N // rows * 6 * N * D
    else:  # q once, k and v for every tile of rows, o and lse once
        expected = N * D + N // rows * 2 * N * D + N * (D + 1)
    assert count("tiled", N, D, M, False, backward) == expected


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_the_causal_traffic_is_predicted(impl, backward):
    """To an eighth, beside what moves once. Without the mask's share tiled would be off by a factor of nearly two."""
    N, D, M = 1024, 32, 8192
    once = 0 if impl == "naive" else N * ((3 * D + 2) if backward else (2 * D + 1))
    found = count(impl, N, D, M, True, backward) - once
    assert found == pytest.approx(predicted(impl, N, D, M, True, backward), rel=1 / 8)
    assert impl == "naive" or found < 0.65 * predicted(impl, N, D, M, False, backward)


def test_the_command_prints_a_line_for_each_length_chip_and_implementation(call):
    said = call(bench, "mode=traffic", "lengths=[64,128]", "head_sizes=[16]", "on_chip=[1024]").out
    lines = [line.split()[:3] for line in said.splitlines() if " 1024 " in line]
    assert lines == [[N, "1024", impl] for N, impl in product(("64", "128"), ("naive", "tiled"))]


# --- a step beside nanoGPT's

LIKE_NANOGPTS = """
import torch

asked = []

class GPTConfig:
    def __init__(self, **sizes):
        asked.append(sizes)

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(31, 4), torch.nn.Linear(4, 31)

    def forward(self, idx, targets):
        logits = self.head(self.embedding(idx))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
"""


def test_nanogpts_model_is_given_our_sizes_and_is_timed_in_turn_with_ours(monkeypatch, tmp_path, capsys):
    (tmp_path / "model.py").write_text(LIKE_NANOGPTS)
    tiny = GPTConfig(n_layer=1, n_head=2, n_embd=16, context_length=8, vocab_size=31, bias=False)
    clock = iter([1.0, 3.0, 2.0, 4.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0] * 2)

    def ms(action, device):
        action()
        return step.STEPS * next(clock)

    monkeypatch.setattr(step, "NANO", tiny)
    monkeypatch.setattr(step, "ms_of", ms)
    monkeypatch.setitem(step.TOKENS, "cpu", 48)
    bench.bench(bench.Bench(mode="step", lengths=[24, 8], peer=str(tmp_path / "model.py"), device="cpu"))
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 31, "bias": False, "dropout": 0.0}
    assert sys.modules["peer_model"].asked == [sizes | {"block_size": T} for T in (8, 24)]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line[:5] for line in lines] == [[T, "float32", "1.0", "2.0", "2.000"] for T in ("8", "24")]
    with pytest.raises(ValueError, match=r"^peer=[^\n]*"):
        bench.bench(bench.Bench(mode="step", device="cpu", peer=str(tmp_path / "nothing.py")))
