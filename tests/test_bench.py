"""bench.py: its instrument is exact, memory grows as the theory says, and what is wrong is not weighed."""

import json
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, replace
from importlib.util import find_spec
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
from lab import entrants, race, settings
from lab import roofline as lab_roofline
from lab.entrants import PASSES, Case, attention_of
from lab.files import Results
from lab.meter import PeakBytes, ms_of, peak_bytes
from lab.race import attempt, forward_and_backward, inputs
from lab.traffic import predicted, redraw, words_of
from model import tiled
from model.attention import AttentionConfig, attention
from tests.runs import table_of
from tests.test_metrics import Terminal

CPU = torch.device("cpu")
SMALL = {"lengths": [64], "heads": [1], "head_sizes": [16], "block": 32, "device": "cpu"}
SMALL |= {"patience": 1e6}  # on a busy machine a case may take as long as it does: none is left out for that
ONE_SERIES = SMALL | {"causal": [True], "dropout_p": [0.0]}


@pytest.fixture(autouse=True, scope="module")
def timed_once():
    """Each action is timed once, and not for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "median_ms", lambda action, device: max(ms_of(action, device), 1e-3))
        yield


def peak(impl: str, T: int, block: int = 32, gradients: bool = True) -> int:
    case = Case(1, 1, T, 64, True, 0.0)
    x = inputs(case, CPU, torch.float32)
    f = attention_of(impl, case, block, CPU)
    with nullcontext() if gradients else torch.no_grad():
        return peak_bytes(lambda: forward_and_backward(f, x) if gradients else f(*x[:3]), CPU)


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
    """Of N=1024, D=64, tiles of 32 and float32 naive's forward has two tables, 8.25 MiB with the output, and tiled the
    output, lse and a tile or two: about 280 KiB."""
    naive, tiled = ([peak(impl, T, block=128) for T in (512, 1024, 2048)] for impl in ("naive", "tiled"))
    assert 3.8 < naive[1] / naive[0] < naive[2] / naive[1] <= 4
    assert tiled[1] / tiled[0] < tiled[2] / tiled[1] <= 2
    assert peak("naive", 1024, gradients=False) >= 8.25 * 2**20
    assert peak("tiled", 1024, gradients=False) == pytest.approx(280 * 1024, rel=0.1)


@pytest.mark.parametrize("impl", ["tiled", "triton"])
def test_what_is_kept_for_the_backward_grows_with_the_length_alone(impl):
    """q, k, v, o, lse, the seed: on tensors without memory, what autograd saves has its shapes all the same."""
    if impl == "triton" and find_spec("triton") is None:
        pytest.skip("triton is made for Linux")
    B, H, T, D, kept, seed = 1, 2, 2048, 64, [], torch.tensor(7)
    config = AttentionConfig(impl, 512, 512, dropout_p=0.1)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), lambda _: None),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        q = torch.empty(B, H, T, D, dtype=torch.bfloat16, requires_grad=True)
        attention(q, q, q, config, seed=seed)
    assert sorted(kept) == [seed.nbytes, B * H * T * 4, *[q.nbytes] * 4]


# --- the race -------------------------------------------------------------------------------------------------------


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
    out, lines = raced
    rows, last = table_of(out / "results.csv"), json.loads(lines[-1])
    assert list(rows[0]) == race.COLUMNS
    assert [(row["impl"], row["pass"]) for row in rows[:9]] == [*product(("naive", "tiled", "sdpa_flash"), PASSES)]
    cases = dict.fromkeys((row["dropout_p"], row["causal"], (row["T"], row["B"])) for row in rows)
    assert [*cases] == [*product(("0.0", "0.1"), ("True", "False"), (("64", "2"), ("128", "1")))]
    assert len(rows) == 4 * 9 + 4 * 6  # sdpa_flash has no dropout on a CPU
    assert all(float(row["ms"]) > 0 and row["commit"] for row in rows)
    assert all(bool(row["peak_mib"]) == (row["pass"] == "forward+backward") for row in rows)
    assert (Path(last["results"]), last["pictures"]) == (out / "results.csv", [str(out / "speed.png")])
    assert [row["pass"] for row in last["rows"]] == [row["pass"] for row in rows]
    for forward, backward, both in zip(last["rows"][::3], last["rows"][1::3], last["rows"][2::3], strict=True):
        assert both["ms"] == forward["ms"] + backward["ms"]
        case = Case(*(both[name] for name in ("B", "H", "T", "D", "causal", "dropout_p")))
        assert both["tflops"] == case.flops("forward+backward") / both["ms"] / 1e9


def test_the_table_has_a_line_for_each_implementation_and_a_reason_for_each_peer_that_is_left_out(raced):
    lines = raced[1]
    head = next(i for i, line in enumerate(lines) if line.strip().endswith("causal, dropout 0"))
    table = [line.split() for line in lines[head + 3 : head + 9]]
    assert [line[2] for line in table] == ["naive", "tiled", "sdpa_flash"] * 2
    assert all(len(line) <= 120 for line in lines[head : head + 9])
    rows = json.loads(lines[-1])["rows"][:18]
    assert [float(line[7]) for line in table] == pytest.approx([row["ms"] for row in rows[2::3]], rel=0.01, abs=0.005)
    assert sum(line.endswith(" -") for line in lines) == 4  # no dropout: two masks, two lengths
    reasons = [line for line in lines if line.startswith("sdpa_")]  # lines of the table begin with a length
    assert [line.split(":")[0] for line in reasons] == ["sdpa_cudnn", "sdpa_flash"]
    assert "dropout" in reasons[1]


def test_a_terminal_is_shown_the_files_and_no_line_of_all_rows(tmp_path):
    results = Results(tmp_path, "x.csv", ["ms"])
    results.append([{"ms": 1.0}])
    with redirect_stdout(Terminal()) as said:
        results.end(pictures=["x.png", "y.png"])
    assert said.getvalue() == f"results: {tmp_path / 'x.csv'}\npictures: x.png, y.png\n"


def test_a_second_race_appends_to_the_first_but_not_below_other_columns(raced, tmp_path):
    """Memory is drawn where the batch is the same at every length."""
    cfg = bench.Config(**ONE_SERIES | {"impls": ["naive"], "out": str(tmp_path)})
    bench.main(cfg)
    bench.main(cfg)
    pictures = {
        path.name for path in (*tmp_path.glob("*.png"), *raced[0].glob("*.png")) if path.stat().st_size > 10_000
    }
    assert (pictures, (raced[0] / "memory.png").exists()) == ({"speed.png", "memory.png"}, False)
    assert [row["pass"] for row in table_of(tmp_path / "results.csv")] == [*PASSES] * 2
    old = "commit,impl\nabc,naive\n"
    (tmp_path / "results.csv").write_text(old)
    with pytest.raises(ValueError, match="other columns"):
        bench.main(cfg)
    assert (tmp_path / "results.csv").read_text() == old


def test_flops_are_counted_as_the_field_counts_them():
    """FlashAttention's benchmark: 4 B H T T D forward, half of it if causal, 2.5 times that backward."""
    whole, causal = Case(2, 12, 16384, 64, False, 0.0), Case(2, 12, 16384, 64, True, 0.1)
    assert whole.flops("forward") == 4 * 2 * 12 * 16384**2 * 64
    assert whole.flops("backward") == 2.5 * whole.flops("forward")
    assert causal.flops("forward+backward") == 3.5 * whole.flops("forward") / 2


MASKS = {
    "window": {"window": 7},
    "wide window": {"window": 100},
    "documents": {"documents": 9},
    "picture": {"block_mask": ("x..", "xx.", ".xx")},
    "all": {"window": 20, "documents": 25, "block_mask": ("x..x", "xx..", ".xxx", "x.xx")},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_flops_are_those_of_the_pairs_that_the_mask_shows_and_flex_is_given_that_mask(rules, causal):
    """Counted here with a second definition of the mask, element by element. Flex with grouped heads too, uncompiled
    and forward alone, which is what it can do on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    T = 50  # no multiple of 3 or 4 blocks
    case = Case(2, 4, T, 16, causal, 0.0, H_kv=2, **rules)
    i, j, documents = torch.arange(T)[:, None], torch.arange(T), entrants.documents_of(case)
    seen = (j <= i).expand(2, T, T) if causal else torch.ones(2, T, T, dtype=torch.bool)
    seen = seen & ((i - j).abs() < case.window) if case.window else seen
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    if case.block_mask:
        side = -(-T // len(case.block_mask))
        seen = seen & torch.tensor([[case.block_mask[a // side][b // side] == "x" for b in range(T)] for a in range(T)])
    assert 0 < case.share < 1 or rules == {"window": 100}
    assert case.flops("forward") == pytest.approx(4 * 4 * 16 * int(seen.sum()))

    q, k, v, _ = (x.detach() for x in inputs(case, CPU, torch.float64))
    right, tiled = (attention_of(name, case, 16, CPU)(q, k, v) for name in ("naive", "tiled"))
    found = flex_attention(q, k, v, block_mask=entrants.flex_mask(case, documents, CPU), enable_gqa=True)
    rows = seen.any(-1)[:, None].expand(2, 4, T)  # flex has other words for a row of nothing
    assert float((found - right)[rows].abs().max()) < 1e-12
    assert float((tiled - right).abs().max()) < 1e-12


@pytest.mark.parametrize("name", [*entrants.SDPA, "flash4"])
@pytest.mark.parametrize("rule", [{"window": 7}, {"documents": 9}, {"block_mask": ("x.", "xx")}])
def test_a_peer_without_such_a_mask_is_not_raced_with_it(name, rule):
    with pytest.raises(ValueError, match=next(iter(rule))):
        attention_of(name, Case(1, 2, 50, 16, True, 0.0, **rule), 16, CPU)


def test_a_masks_rules_are_short_enough_to_hide_keys_in_the_check():
    rules = {"window": 1024, "documents": 2048, "block_mask": ("x.", ".x")}
    (small,) = race.checked([[Case(8, 12, 4096, 64, True, 0.0, H_kv=4, **rules), Case(2, 12, 16384, 64, True, 0.0)]])
    assert small == Case(2, 2, 333, 64, True, 0.0, H_kv=1, **rules | {"window": 111, "documents": 111})
    for key in rules:
        assert replace(small, **dict.fromkeys(rules) | {key: getattr(small, key)}).share < 0.45, key


def test_pictures_find_the_rows_of_their_cases_the_last_of_each_and_of_the_last_device(tmp_path, monkeypatch):
    rules = {"window": 9, "documents": 20, "block_mask": ("xx", "xx"), "H_kv": 1}
    plain, masked = (race.cells_of(Case(1, 2, 64, 16, True, 0.0, **more)) for more in ({}, rules))
    row = dict.fromkeys(race.COLUMNS, "") | {"device": "A", "impl": "naive", "dtype": "float32", "pass": "forward"}
    rows = [row | masked | {"ms": 1}, row | masked | {"device": "B", "ms": 3}, row | masked | {"ms": 2}]
    rows = [*rows, row | plain | {"ms": 4}, row | masked | {"impl": "tiled", "ms": 5}]
    Results(tmp_path, "results.csv", race.COLUMNS).append([r | dict.fromkeys(("tflops", "peak_mib")) for r in rows])
    drawn = []
    monkeypatch.setattr(race, "draw", lambda rows, out: drawn.extend(rows))
    case = {"lengths": [64], "heads": [2], "head_sizes": [16], "causal": [True], "dropout_p": [0.0]}
    case |= {"window": 9, "documents": 20, "block_mask": ["xx", "xx"], "kv_heads": 1, "out": str(tmp_path)}
    bench.main(bench.Config(mode="pictures", **case))
    assert [(row["device"], row["impl"], row["ms"]) for row in drawn] == [("A", "naive", 2.0), ("A", "tiled", 5.0)]
    for other in ({"lengths": [32]}, {"out": str(tmp_path / "elsewhere")}):
        with pytest.raises(ValueError, match=r"results\.csv"):
            bench.main(bench.Config(mode="pictures", **case | other))


FULL = "[enforce fail] DefaultCPUAllocator: you tried to allocate 9999999 bytes"


def test_who_gets_slow_or_finds_no_memory_ends_its_series_and_the_others_go_on(monkeypatch, tmp_path):
    """naive takes 100 ms for a pass, and tiled has no memory in its third turn at 64. Of three turns each pass has its
    median. What a race has when it is cut short it keeps."""
    asked, turns = [], {"forward": (3.0, 1.0, 2.0), "backward": (5.0, 4.0, 9.0), "forward+backward": (8.0, 5.0, 11.0)}

    def weigh(name, case, *_):
        asked.append((name, case.T))
        if asked[-1] == ("tiled", 64) and asked.count(asked[-1]) == 3:
            raise RuntimeError(FULL)
        if case.T > 128:
            raise KeyboardInterrupt
        turn = asked.count(asked[-1]) - 1
        ms = {which: 100.0 if name == "naive" else turns[which][turn] for which in PASSES}
        return [{"pass": which, "ms": ms[which], "tflops": 1.0, "peak_mib": 1.0} for which in PASSES]

    monkeypatch.setattr(race, "check", lambda names, *_: names)
    monkeypatch.setattr(race, "weigh", weigh)
    monkeypatch.setitem(race.TURNS, "cpu", 3)
    names, options = ["naive", "tiled", "sdpa_flash"], {"lengths": [16, 32, 64, 128, 256], "patience": 0.3}
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.Config(**ONE_SERIES | options | {"impls": names, "out": str(tmp_path)}))
    rows = [row for row in table_of(tmp_path / "results.csv") if row["pass"] == "forward"]
    lengths = {name: [(int(row["T"]), bool(row["ms"])) for row in rows if row["impl"] == name] for name in names}
    # 0.1 s at 16 promise 0.4 s at 32. After a row of a length without memory, greater ones have none.
    assert lengths["naive"] == [(16, True)]
    assert lengths["tiled"] == [(16, True), (32, True), (64, True), (128, False)]
    assert lengths["sdpa_flash"] == [(16, True), (32, True), (64, True), (128, True)]
    assert [T for name, T in asked if name == "tiled"] == [16] * 3 + [32] * 3 + [64] * 3
    timed = [row for row in table_of(tmp_path / "results.csv") if row["ms"]]
    medians = {row["pass"]: float(row["ms"]) for row in timed if row["impl"] != "naive"}
    assert medians == {"forward": 2.0, "backward": 5.0, "forward+backward": 8.0}


def test_inputs_that_do_not_fit_are_one_line(tmp_path):
    cfg = bench.Config(**SMALL | {"impls": ["naive"], "tokens": 2**30, "heads": [2**14], "out": str(tmp_path)})
    with pytest.raises(ValueError, match=r"^nothing could be timed: out of memory .*tokens=[^\n]*$"):
        bench.main(cfg)
    cfg = bench.Config(mode="roofline", lengths=[2**30], heads=[2**20], device="cpu", out=str(tmp_path))
    with pytest.raises(ValueError, match=r"^out of memory with 1 sequence of 1073741824 tokens[^\n]*lengths="):
        bench.main(cfg)


def test_an_error_of_ours_that_is_not_about_memory_is_not_swallowed():
    def broken(name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        attempt([], broken, "tiled")
    assert attempt([], broken, "flex") == "-"


def test_triton_without_a_gpu_is_left_out_unless_it_was_asked_for(capsys, monkeypatch):
    sizes = pytest.importorskip("kernels.sizes", reason="triton is made for Linux")
    monkeypatch.setattr(sizes, "INTERPRETED", False)
    assert entrants.entrants(None, CPU) == [name for name in entrants.IMPLS if name != "triton"]
    assert capsys.readouterr().out.startswith("triton: ")
    with pytest.raises(ValueError, match=r"attention\.impl=triton"):
        entrants.entrants(["naive", "triton"], CPU)


@pytest.mark.parametrize("name", entrants.SDPA)
def test_a_peer_of_torchs_runs_its_own_backend_and_no_other_and_is_told_of_grouped_heads(monkeypatch, name):
    asked = []

    def sdpa(*args, **kwargs):
        names = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "mem_efficient", "math": "math"}
        on = [key for key, of in names.items() if getattr(torch.backends.cuda, f"{of}_sdp_enabled")()]
        asked.append((on, kwargs["enable_gqa"]))

    monkeypatch.setattr(entrants.F, "scaled_dot_product_attention", sdpa)
    for H_kv in (None, 2):
        case = Case(1, 4, 8, 4, True, 0.0, H_kv=H_kv)
        attention_of(name, case, 4, CPU)(*inputs(case, CPU, torch.float32)[:3])
    assert asked == [([name], False), ([name], True)]


def test_a_wrong_implementation_of_ours_ends_the_bench(monkeypatch, tmp_path):
    def wrong(s, m, l, without, right=tiled.online_softmax):
        p, m, l, alpha = right(s, m, l, without)
        return p, m, l, torch.ones_like(alpha)

    monkeypatch.setattr(tiled, "online_softmax", wrong)
    with pytest.raises(RuntimeError, match=r"^tiled is "):
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
    case = Case(1, 2, 333, 16, True, 0.0)
    both = ["naive", "sdpa_flash"]
    assert race.check(both, [case], 32, CPU, torch.float32, []) == both
    monkeypatch.setattr(entrants.F, "scaled_dot_product_attention", wrong)
    capsys.readouterr()
    assert race.check(both, [case], 32, CPU, torch.float32, []) == ["naive"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["check", "sdpa_flash"]


OTHER = {int: 7, float: 7.5, bool: True, str: "x"}  # than every default


@pytest.mark.parametrize("schema", [settings.Bench, settings.BreakIt])
def test_every_key_is_refused_by_every_mode_that_does_not_read_it(schema):
    modes: dict[str, dict] = {name: {name: True} for name in ("trace", "look", "explorer")}
    modes |= {"replay": {"replay": "x"}, "lab": {}}
    if schema is settings.Bench:
        modes = {mode: {"mode": mode} for mode in settings.MODES.split()}
    tried = 0
    for entry in fields(schema):
        kind = str(entry.type)
        value = next(value for of, value in OTHER.items() if of.__name__ in kind)
        if names := entry.metadata["key"].among:
            value = names[-1]
        for mode, given in modes.items():
            if mode in entry.metadata["modes"] or entry.name in ("mode", *modes):
                continue
            with pytest.raises(ValueError, match=f"^{entry.name}="):
                schema(**given | {entry.name: [value] if "list" in kind else value})
            tried += 1
    assert tried > 30


# --- traffic ---------------------------------------------------------------------------------------------------------


def tiled_words(order: str, N: int, D: int, M: int, backward: bool = False) -> int:
    """The loads and stores of the paper, word for word, in tiles that fill a chip of M words."""
    block = M // (4 * D)
    rows, passes = min(block, D), N // block
    if order == "keys_outside" and backward:
        # k, v in and dk, dv out once; for every tile of keys q, do, lse, delta and dq in, dq out
        return 4 * N * D + passes * N * (4 * D + 2)
    if backward:  # q, do, lse, delta in and dq out once; for every tile of rows k, v, dk, dv in and dk, dv out
        return N * (3 * D + 2) + N // rows * 6 * N * D
    if order == "keys_outside":
        # k, v once; for every tile of keys q, o, m, l in and o, m, l out; at the end o, m, l in and o, lse out
        return 2 * N * D + passes * N * (3 * D + 4) + N * (2 * D + 3)
    return N * D + N // rows * 2 * N * D + N * (D + 1)  # q once, k and v each time, o and lse once


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("order", ["keys_outside", "queries_outside"])
@pytest.mark.parametrize(("N", "D", "M"), [(256, 16, 2048), (512, 32, 8192), (256, 32, 4096), (256, 64, 4096)])
def test_counted_traffic_is_the_loads_and_stores_of_the_paper_word_for_word(N, D, M, order, backward):
    block = M // (4 * D)
    words = words_of(AttentionConfig("tiled", min(block, D), block, order), N, D, backward=backward)
    assert words == tiled_words(order, N, D, M, backward)
    if (order, backward) == ("keys_outside", False):
        # 12 N N D D / M words: 3 N D for each of 4 N D / M tiles of keys. m and l add 4 N to each, that is 16 / D to
        # the 12, and what is moved once (4 D + 3) M / N D D.
        assert 12 < words / (N * N * D * D / M) <= 12 + 16 / D + (4 * D + 3) * M / (N * D * D)


MASKED = [  # pairwise: each way with each mask, each mask in each pass
    (name, *mask, (i + j) % 2 == 1)
    for i, name in enumerate(("naive", "keys_outside", "queries_outside"))
    for j, mask in enumerate([(True, None), (True, 64), (False, 64)])
]


@pytest.mark.parametrize(("name", "causal", "window", "backward"), MASKED)
def test_a_masks_traffic_is_predicted(name, causal, window, backward):
    """To a sixth, beside what each order moves once: m, l and the tiles on the diagonal count at this length. Without
    the mask's share each of ours would be off by a factor of nearly two or more."""
    N, D, M = 1024, 32, 8192
    config = AttentionConfig("tiled", 32, 64, "keys_outside" if name == "naive" else name, window=window)
    config = replace(config, impl="naive") if name == "naive" else config
    words = words_of(config, N, D, causal, backward)
    once = {"naive": 0, "keys_outside": 4 * D + (0 if backward else 3)}
    once["queries_outside"] = 2 * D + 1 + backward * (D + 1)
    found = words - N * once[name]
    assert found == pytest.approx(predicted(name, N, D, M, causal, window, backward), rel=1 / 6)
    assert name == "naive" or words < 0.65 * tiled_words(name, N, D, M, backward)


def test_traffic_writes_a_table_and_a_picture(tmp_path):
    bench.main(bench.Config(mode="traffic", lengths=[64, 128], head_sizes=[16], on_chip=[1024], out=str(tmp_path)))
    rows = table_of(tmp_path / "traffic.csv")
    assert [row["order"] for row in rows] == ["naive", "keys_outside", "queries_outside"] * 2
    assert {(row["pass"], row["causal"]) for row in rows} == {("forward", "False")}
    drawn = (tmp_path / "traffic.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "traffic.png").unlink()
    assert redraw(tmp_path).read_bytes() == drawn


# --- roofline --------------------------------------------------------------------------------------------------------


def test_naives_operations_have_the_flops_and_move_the_tables_of_the_whole(tmp_path, monkeypatch):
    """Of N = 256, D = 16, two heads; nothing is timed."""
    monkeypatch.setattr(lab_roofline, "median_ms", lambda action, device: 1.0)
    bench.main(bench.Config(mode="roofline", lengths=[256], head_sizes=[16], device="cpu", out=str(tmp_path)))
    rows = table_of(tmp_path / "roofline.csv")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    operations = [row for row in rows if row["part"] not in ("limit", "whole")]
    naive, copy = (next(row for row in rows if row["name"] == name) for name in ("naive", "copy"))
    assert float(copy["mb"]) == pytest.approx(2 * 4 * 2**22 / 1e6)  # read and written
    for what in ("mb", "gflop"):
        assert sum(float(row[what]) for row in operations) == pytest.approx(float(naive[what]), rel=1e-3)
    assert float(naive["gflop"]) == pytest.approx(4 * 2 * 256**2 * 16 / 1e9, rel=1e-4)
    # 16 of the 20 tables that mode=traffic counts are float32, one a head; 4 are the mask's, of bytes, for all heads.
    assert 0 <= 1e6 * float(naive["mb"]) - (16 * 4 * 2 + 4) * 256**2 < 16 * 4 * 2 * 256 * 16
