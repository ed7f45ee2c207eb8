"""The kernels of one new token, in Triton's interpreter: attention of one row (sampling/decode.py), linear layers of a
few rows (sampling/linear.py), the choice from the logits (sampling/choose.py), and the token that is made of them
(sampling/token.py)."""

from copy import deepcopy
from dataclasses import fields
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="triton is made for Linux")

import bench
from kernels.problem import Problem
from lab import decode as race
from model.attention import AttentionConfig, alibi_slopes
from model.gpt import GPTConfig
from model.layers import LAYERS
from sampling import linear as of_linear
from sampling.cache import KVCache
from sampling.choose import choose
from sampling.decode import DecodeTiles, decode
from sampling.generate import Sampler, run_prompts
from sampling.linear import FUSED, linear
from sampling.token import NextToken
from tests.reference import DTYPES, Case, assert_within_budget, case_name, error, largest, oracle, run
from tests.runs import table_of
from tests.test_cache import OPTIONS, SIZE, logits_of, made, texts

CHOICES = {f.name: f.metadata["key"].among for f in fields(GPTConfig) if f.metadata["key"].among}
NAIVE = AttentionConfig("naive")


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter takes as long for a small tile as for a large one."""
    monkeypatch.setattr(of_linear, "PROGRAMS", 2)
    monkeypatch.setattr(of_linear, "MOST", 3)  # so that some have several groups of outputs
    monkeypatch.setattr(of_linear, "WIDE", 32)  # so that some norms need several steps
    of_linear.tile_for.cache_clear()
    yield
    of_linear.tile_for.cache_clear()


def decoded(inputs: dict, case: Case, splits: int | None = None) -> torch.Tensor:
    """o of the case's last token through the kernel. The buffers have 40 more slots, with NaN in them, and the new
    token's slot is empty."""
    q, k, v = (inputs[name] for name in "qkv")
    B, H_kv, T_k, D = k.shape
    keys, values = (F.pad(x[:, :, :-1], (0, 0, 0, 41), value=float("nan")).flatten(0, 1) for x in (k, v))
    slopes = alibi_slopes(case.H, q.device) if case.alibi else None
    scale = D**-0.5 if case.softmax_scale is None else case.softmax_scale
    problem = Problem.of(1, T_k, scale, softcap=case.softcap, slopes=slopes)
    position = torch.full((B,), T_k - 1, device=q.device)
    tickets = torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)  # the kernel ahead writes no position
    o = decode(q, k[:, :, -1:], v[:, :, -1:], keys, values, position, problem, tickets, splits)
    assert o.dtype == q.dtype
    assert not tickets.any()
    assert torch.equal(keys.view(B, H_kv, -1, D)[:, :, :T_k], k)
    assert torch.equal(values.view(B, H_kv, -1, D)[:, :, :T_k], v)
    assert keys[:, T_k:].isnan().all()
    assert torch.equal(decoded_in_pages(128 if T_k % 2 else 64, q, k, v, T_k + 40, problem, splits), o)
    return o


def decoded_in_pages(P: int, q, k, v, S: int, problem, splits) -> torch.Tensor:
    """The same with keys and values in pages of P tokens, in any order. What lies past the keys is NaN."""
    (B, H_kv, T_k, D), at = k.shape, torch.full((k.shape[0],), k.shape[2] - 1, device=q.device)
    width = -(-S // P)
    table = torch.randperm(B * width + 3)[: B * width].view(B, width).to(q.device, torch.int32)
    pages = q.new_full((2, B * width + 3, H_kv, P, D), float("nan"))
    past = torch.arange(T_k - 1, device=q.device)
    for kept, x in zip(pages, (k, v), strict=True):
        kept[table[:, past // P], :, past % P] = x[:, :, :-1].transpose(1, 2)
    tickets = torch.zeros(B * H_kv, dtype=torch.int32, device=q.device)
    o = decode(q, k[:, :, -1:], v[:, :, -1:], *pages, at, problem, tickets, splits, table=(table, S))
    assert torch.equal(pages[1, table[:, (T_k - 1) // P], :, (T_k - 1) % P], v[:, :, -1])
    assert pages.isnan().sum() == 2 * (B * width * P + 3 * P - B * T_k) * H_kv * D
    return o


# Odd on purpose, as in tests/reference.py. One sequence has few keys, so that most splits have none.
DECODED = [
    Case(1, 1, B=16),
    Case(1, 2, B=16),
    Case(1, 97, B=4),
    Case(1, 203, D=64, B=1, H=8),
    Case(1, 130, B=1, H=20, H_kv=1, D=16),
    Case(1, 97, H=6, H_kv=2, D=24),
    Case(1, 150, H=6, H_kv=2, D=16, alibi=True),
    Case(1, 113, softcap=0.7, softmax_scale=0.5, D=40, H_kv=1),
    Case(1, 150, sigma=4.0, B=4),
]
EACH = [(torch.float32, 7), (torch.bfloat16, 7), (torch.float16, 1), (torch.float32, 1), (torch.bfloat16, 1)]


@pytest.mark.parametrize(
    ("case", "dtype", "splits"),
    [
        pytest.param(case, *EACH[i % 5], marks=[pytest.mark.slow] * (i % 2))
        for at, case in enumerate(DECODED)
        for i in (2 * at, 2 * at + 1)
    ],
    ids=lambda part: case_name(part) if isinstance(part, Case) else str(part),
)
def test_one_row_is_within_twice_naives_error_however_the_keys_are_split(case, dtype, splits):
    """In bf16 tiles of 64 keys and in float32 of 16, so that a split has several tiles or none."""
    inputs = case.inputs(dtype)
    naive, right = run(inputs, case, NAIVE), oracle(inputs, case)
    assert_within_budget({"o": decoded(inputs, case, splits)}, {"o": naive["o"]}, {"o": right["o"]})


def test_each_sequence_has_its_own_position_and_its_own_place_in_a_window():
    """Buffers of 40 slots, as with a window of 40: before they are full, exactly full, and long after."""
    torch.manual_seed(0)
    S, positions = 40, [3, 39, 40, 1017]
    q, k, v = torch.randn(3, len(positions), 2, 1, 32)
    keys, values = torch.randn(2, len(positions) * 2, S, 32)
    problem = Problem.of(1, S, 0.2, slopes=torch.tensor([0.3, 0.01]))
    tickets = torch.zeros(len(positions) * 2, dtype=torch.int32)
    o = decode(q, k, v, keys, values, torch.tensor(positions), problem, tickets, 3)
    for b, at in enumerate(positions):
        past = range(max(0, at + 1 - S), at + 1)
        k_b, v_b = (x.unflatten(0, (-1, 2))[b, :, [p % S for p in past]].double() for x in (keys, values))
        assert torch.equal(k_b[:, -1], k[b, :, 0].double())
        far = at - torch.tensor(past)
        s = (k_b @ q[b].double().mT)[..., 0] * 0.2 - problem.score.slopes[:, None] * far
        right = (s.softmax(-1)[:, None] @ v_b).float()
        torch.testing.assert_close(o[b], right)


# --- linear layers ----------------------------------------------------------------------------------------------------


LINEAR = [  # K, N, norm, activation, whether with a gate, a residual and a bias
    (40, 70, nn.LayerNorm(40), "none", False, False, True),
    (40, 33, nn.LayerNorm(40, bias=False), "gelu_tanh", False, False, False),
    (130, 50, nn.RMSNorm(130, eps=1e-5), "silu", True, False, False),
    (300, 9, None, "none", False, True, True),
    (64, 300, nn.RMSNorm(64, eps=1e-5), "gelu", False, False, True),
    (300, 70, nn.LayerNorm(300), "none", False, False, True),
    (64, 40, nn.RMSNorm(64, eps=1e-5), "relu2", False, False, False),
]
ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def by_modules(x, layer, norm, gate, activation, add):
    """The same by torch's modules."""
    h = x if norm is None else norm(x.to(norm.weight.dtype))
    h = h.to(layer.weight.dtype)
    y = ACTIVATIONS[activation](layer(h)) if gate is None else ACTIVATIONS[activation](gate(h)) * layer(h)
    return y if add is None else y + add


@pytest.mark.parametrize(("B", "turn"), [(1, 0), (3, 1), (16, 2)])
@pytest.mark.parametrize("number", range(len(LINEAR)))
@pytest.mark.usefixtures("few_programs")
def test_a_linear_layer_is_within_twice_the_modules_error(number, B, turn):
    """Each with 1, 3 and 16 rows, in three dtypes."""
    dtype = DTYPES[(number + turn) % 3]
    K, N, norm, activation, gate, add, bias = LINEAR[number]
    given = {"layer": nn.Linear(K, N, bias=bias), "gate": nn.Linear(K, N, bias=bias) if gate else None}
    given["norm"] = deepcopy(norm)
    for module in filter(None, given.values()):
        for weight in module.to(dtype).parameters():
            nn.init.normal_(weight, std=0.3)
    x = torch.randn(B, K) + 0.5
    x = x.to(dtype) if norm is None else x
    residual = torch.randn(B, N) if add else None
    found = linear(x, **given, activation=activation, add=residual)
    assert found.dtype == dtype
    modules = by_modules(x, **given, activation=activation, add=residual).to(dtype)
    wide = {name: module and deepcopy(module).double() for name, module in given.items()}
    right = by_modules(x.double(), **wide, activation=activation, add=residual)
    assert_within_budget({"y": found}, {"y": modules.detach()}, {"y": right.detach()})


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [50, 2500])
@pytest.mark.parametrize("temperature", [0, 1e-300, 0.8, 3.0])
def test_the_kernel_chooses_as_plain_pytorch(temperature, V):
    """From one part of a vocabulary and from three; a tiny temperature takes the likeliest token."""
    logits = torch.randn(4, V) * 4
    logits[1, 10:] = -torch.inf
    for seed in range(3):
        one, other = (torch.Generator().manual_seed(seed) for _ in "ab")
        draws = torch.empty_like(logits).exponential_(generator=one)
        expected = Sampler(temperature).choose(logits, other)
        assert torch.equal(choose(logits, draws if temperature else None, temperature), F.pad(expected, (0, 1)))


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_the_kernel_finds_logits_without_a_choice(number, drawn):
    """Where Sampler finds them. The next token runs before the host knows, so it has to be one of the vocabulary."""
    for where in (slice(None), slice(1200, 1201), slice(1499, 1500)):
        logits = torch.randn(3, 1500)
        logits[1, where] = number
        expected = Sampler(float(drawn)).choose_unseen(logits)[-1]
        found = choose(logits, torch.rand_like(logits) if drawn else None, 1.0)
        assert found[-1] == expected
        assert (found >= 0).all()
        assert (found < 1500).all()


@pytest.mark.parametrize("runs", [True, False])
def test_the_kernel_chooses_where_kernels_run(runs, monkeypatch):
    """Not on AMD, and not on NVIDIA GPUs before Ampere."""
    monkeypatch.setattr("sampling.generate.runs_kernels", lambda device: runs)
    monkeypatch.setattr("sampling.choose.choose", lambda *_: "the kernel's")
    assert (Sampler().choose_unseen(torch.randn(2, 5)) == "the kernel's") is runs


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 5}, {"repetition_penalty": 1.3}], ids=str)
def test_a_choice_with_numbers_drawn_ahead_is_the_one_that_draws_its_own(options, alone, monkeypatch):
    """Each generator draws as often, and only the place in memory is another. alone: each row has its own generator."""
    monkeypatch.setattr("sampling.generate.runs_kernels", lambda device: True)
    logits, sampler, found = torch.randn(3, 50), Sampler(**options), []
    for ahead in (False, True):
        each = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
        generator = each if alone else each[0]
        used = sampler.tokens_used([torch.arange(9)] * 3, 50)
        made = torch.zeros(4, dtype=torch.int64)
        draws = sampler.draw_ahead(torch.empty(3, 50), generator, used) if ahead else None
        chosen = sampler.choose_unseen(logits, generator, used, draws, made if ahead else None)
        assert chosen is made or not ahead
        found.append((chosen.tolist(), [one.get_state().tolist() for one in each]))
    assert found[0] == found[1]


# --- the model --------------------------------------------------------------------------------------------------------


TOKENS = {name: OPTIONS[name] for name in ("windows_alibi_softcap", "own_head", "qk_norm")} | {
    "modern": OPTIONS["grouped"] | {"rope_base": 50.0, "mlp": "swiglu", "norm": "rmsnorm", "bias": False},
    "local_rope": OPTIONS["local_rope"] | OPTIONS["yarn"],
    "gelu_window": {"mlp": "gelu", "mlp_hidden": 40, "norm_eps": 0.5, "window": 3, "softmax_scale": 0.9},
}
# What changes no logits of a model in eval mode and without autocast; and what has no cache.
NOT_IN_A_TOKEN = {"dropout_p", "residual_dtype", "activation_checkpointing", "chunk"}
NOT_IN_A_TOKEN |= {"impl", "block_m", "block_n", "order", "autotune", "kernel"}
NOT_IN_A_TOKEN |= {"documents", "block_mask", "block_mask_size"}


def test_the_cases_of_a_token_have_every_option():
    """The layers of sampling/linear.py have to know what those of model/gpt.py know."""
    known = {field.name for field in (*fields(GPTConfig), *fields(AttentionConfig))}
    sizes = {"n_layer", "n_head", "n_embd", "context_length", "vocab_size"}
    assert known - NOT_IN_A_TOKEN - sizes == {name for changes in TOKENS.values() for name in changes}
    for name in CHOICES.keys() - NOT_IN_A_TOKEN:
        assert {changes.get(name, getattr(SIZE, name)) for changes in TOKENS.values()} == set(CHOICES[name])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (i % 2 == turn))
        for i, name in enumerate(TOKENS)
        for turn, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_a_token_has_the_logits_of_the_whole_text(name, dtype):
    """Past the end of a window of 3; within twice the error of naive without a cache in the same dtype."""
    changes, lengths = TOKENS[name] | {"n_layer": 2 if "windows" in TOKENS[name] else 1}, (3, 6)
    prompts, follow = texts(*lengths), torch.stack(texts(*[2] * len(lengths)))
    right, naive = (logits_of(made(kind, **changes), prompts, follow)[1:] for kind in (torch.float64, dtype))
    model = made(dtype, **{**changes, "impl": "triton"})
    cache = KVCache(model, len(prompts))
    cache.move = partial(cache.move, FUSED)
    found = logits_of(model, prompts, follow, cache)[1:]
    assert found.dtype == torch.float32
    assert error(found, right) <= 2 * (error(naive, right) + torch.finfo(dtype).eps * largest(right))


@torch.no_grad()
def test_a_token_is_recorded_again_when_the_memory_of_its_pages_moves(monkeypatch):
    """With a recording that replays from Python: the host's part, lengths and pages, comes before each token. The first
    page of 16 is full at the fifth token, and then the only recording has a wrong address."""
    monkeypatch.setattr("sampling.decode.FLOAT32", {128: DecodeTiles(16, 8, 2)})  # no longer than a page of 16
    (prompt,), model, recordings = texts(12), made(torch.float32, impl="triton", n_layer=1), []

    class Graph:
        replay = None

    def record(self):
        self.graph, self.moved = Graph(), self.cache.moved
        self.graph.replay = self.run
        recordings.append((self.cache.lengths[0] - 1, self.cache.layers[0].k))

    monkeypatch.setattr(NextToken, "record", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("sampling.token.layers_for", lambda token: LAYERS)
    found = []
    for page in (None, 16):
        cache = KVCache(model, 1, page=page)
        next_token = NextToken(model, cache, Sampler(0).choose_unseen, None)
        token = Sampler(0).choose(run_prompts(model, [prompt], cache))
        for _ in range(7):
            token = next_token(token)[:1]
            found.append(int(token))
        assert recordings[-1][1] is cache.layers[0].k
    assert found[:7] == found[7:]
    assert [at for at, _ in recordings] == [14, 14, 16]


# --- the bench --------------------------------------------------------------------------------------------------------


def test_the_bench_of_a_token_writes_its_rows(tmp_path, monkeypatch, capsys):
    """As many bytes are copied as keys and values have, so its share is 1."""
    monkeypatch.setattr(race, "SMALL", {"small": (2, 50, 4, 2, 16)})
    monkeypatch.setattr(race, "median_ms", lambda action, device: action().numel() and 2e-4)
    bench.main(bench.Config(mode="decode", device="cpu", out=str(tmp_path)))
    rows = table_of(tmp_path / "decode.csv")
    assert [row["name"] for row in rows] == ["copy", "sdpa", "plain"]
    assert {(row["case"], row["T_k"], row["of_copy"]) for row in rows} == {("small", "50", "1.0")}
    assert float(rows[0]["gb_per_s"]) == round(2 * (2 * 2 * 50 * 16) * 4 / 2e-7 / 1e9, 1)
    assert "plain" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_is_not_timed():
    right = torch.randn(4, dtype=torch.float64)
    race.check(right.float(), right.float(), right)
    with pytest.raises(RuntimeError, match="further from float64"):
        race.check(right.float() + 1e-3, right.float(), right)
