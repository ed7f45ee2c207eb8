"""Sampling with a cache gives the tokens, and up to rounding the logits, of running the whole text for each token."""

import weakref

import pytest
import torch
from torch import Tensor

from model import tiled
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.cache import KVCache
from model.generate import Sampler, generate
from model.gpt import GPT, GPTConfig
from tests.implementations import CUDA, HAS_TRITON
from tests.reference import assert_within_budget

CONTEXT, V = 24, 61
PAIRS = {"bigram_rows": 40, "mix_x0": True}
OPTIONS: dict[str, tuple[dict, dict]] = {  # of the model and of attention
    "learned": ({}, {}),
    "rope": ({"position": "rope", "rope_base": 50.0, "norm": "rmsnorm", "mlp": "swiglu", "bias": False}, {}),
    "grouped": ({"n_kv_head": 2, "position": "rope", "qk_norm": True, **PAIRS}, {"softmax_scale": 0.9}),
    "alibi": ({"position": "none", "n_kv_head": 1}, {"alibi": True}),
    "window": ({"position": "rope"}, {"window": 5, "softcap": 0.5}),
    "windows": ({}, {"windows": [3, None]}),
    "documents": ({"tie_head": True}, {"documents": True, "dropout_p": 0.5}),
}
WAYS = [(name, impl) for name in OPTIONS for impl in ("naive", "tiled")]
WAYS += [(name, "sdpa") for name in ("learned", "rope", "grouped")]
WAYS += [(name, "triton") for name in ("grouped", "alibi", "window")] * (HAS_TRITON and not CUDA)


def made(impl: str, name: str = "learned", dtype=torch.float32, of_attention: dict | None = None, broken=()) -> GPT:
    """A model whose weights are large enough that every token and position counts."""
    torch.manual_seed(0)
    of_model, options = OPTIONS[name]
    size = {"n_layer": 2, "n_head": 4, "n_embd": 32, "context_length": CONTEXT, "vocab_size": V, "tie_head": False}
    options = {"impl": impl, "block_m": 16, "block_n": 16} | options | (of_attention or {})
    model = GPT(GPTConfig(**size | of_model), AttentionConfig(**options), BreakIt(broken)).eval().to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1) if weight.any() else weight.normal_(std=0.01)
    return model


def prompts(B: int, T: int) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def written(model: GPT, idx: Tensor, count: int, sampler: Sampler | None = None, **options) -> Tensor:
    """The tokens (B, count) of generate(), drawn with the same random numbers at every call."""
    generator = torch.Generator().manual_seed(5)
    return torch.cat(list(generate(model, idx, count, sampler or Sampler(0), generator, **options)), dim=1)


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "impl"), WAYS)
@torch.no_grad()
def test_a_token_has_the_logits_of_the_whole_text(name, impl):
    """A prompt, single tokens, several at once, to the last position of the context."""
    idx = prompts(2, CONTEXT)
    model, naive = made(impl, name), made("naive", name)(idx)
    cache, right = KVCache(model, 2), made("naive", name, torch.float64)(idx)
    for T in (6, 1, 5, 1, 1, 9, 1):
        last = cache.length + T - 1
        found = model(idx[:, cache.length : last + 1], sequence=cache)[:, -1]
        assert_within_budget({"logits": found}, {"logits": naive[:, last]}, {"logits": right[:, last]})
        cache.advance(T)
    assert cache.length == CONTEXT


@torch.no_grad()
def by_hand(model: GPT, text: Tensor, count: int) -> Tensor:
    """The likeliest tokens, each from all that the model sees. A text past the context goes on from its last half."""
    text, found = text[:, -CONTEXT:], []
    for _ in range(count):
        text = text if text.shape[1] <= CONTEXT else text[:, -CONTEXT // 2 :]
        found.append(model(text)[:, -1].argmax(-1, keepdim=True))
        text = torch.cat((text, found[-1]), dim=1)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("length", [1, 20, CONTEXT, CONTEXT + 9])
@pytest.mark.parametrize("name", ["learned", "windows", "alibi"])
def test_the_likeliest_tokens_are_those_of_a_loop_by_hand_past_the_context_too(name, length):
    """45 tokens, so that the context fills up several times."""
    model, idx = made("tiled", name, torch.float64), prompts(3, length)
    right = by_hand(model, idx, 45)
    assert torch.equal(written(model, idx, 45), right)
    assert torch.equal(written(model, idx, 45, cache=False), right)
    assert len(right.unique()) > 10


@torch.no_grad()
def test_under_autocast_the_cache_is_bf16_and_the_logits_are_within_the_budget():
    idx, model = prompts(1, 9), made("tiled")
    right = made("naive", dtype=torch.float64)(idx)[:, -1]
    with torch.autocast("cpu", torch.bfloat16):
        naive, cache = made("naive")(idx)[:, -1], KVCache(model, 1)
        for T in (6, 1, 1, 1):
            found = model(idx[:, cache.length : cache.length + T], sequence=cache)[:, -1]
            cache.advance(T)
    assert cache.layers[0][0].dtype == torch.bfloat16
    assert_within_budget({"logits": found}, {"logits": naive}, {"logits": right})


def test_a_cache_is_freed_at_once():
    cache = weakref.ref(KVCache(made("tiled"), 1))
    assert cache() is None  # not when Python looks for cycles: a GPU would hold the caches of several texts until then


def ran(model: GPT, monkeypatch) -> list[int]:
    """The number of tokens of each call of the model, from now on."""
    lengths, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, *more: lengths.append(idx.shape[1]) or hidden(idx, *more))
    return lengths


def test_after_the_prompt_each_token_runs_alone_and_half_of_the_context_when_it_is_full(monkeypatch):
    model = made("tiled")
    lengths = ran(model, monkeypatch)
    written(model, prompts(2, 20), 19)
    assert lengths == [20, 1, 1, 1, 1, 12, *[1] * 12, 12]


@pytest.mark.parametrize("options", [{"broken": "no_max"}, {"of_attention": {"block_mask": ["x"]}}], ids=str)
def test_a_broken_model_and_one_with_a_block_mask_are_sampled_without_a_cache(options, monkeypatch):
    model, logits = made("tiled", **options), []
    model.head.register_forward_hook(lambda head, inputs, output: logits.append(output.shape[1]))
    lengths = ran(model, monkeypatch)
    written(model, prompts(1, 4), 3)
    assert (lengths, logits) == ([4, 5, 6], [1, 1, 1])  # logits of the last token alone: a long text's need GiB


def test_a_changed_softmax_samples_the_same_text_with_and_without_the_cache(monkeypatch):
    """A user's own attention is what samples too: one is added to the sum of the weights."""
    model, idx = made("tiled", dtype=torch.float64), prompts(2, 9)
    whole, softmax = written(model, idx, 40), tiled.online_softmax

    def with_one_more(s: Tensor, m: Tensor, l: Tensor, broken: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
        first = m == tiled.LOWEST  # every row sees a key of the first tile
        p, m, l, alpha = softmax(s, m, l, broken)
        return p, m, torch.where(first, l + torch.exp2(-m), l), alpha

    monkeypatch.setattr(tiled, "online_softmax", with_one_more)
    changed = [written(model, idx, 40, cache=cache) for cache in (True, False)]
    assert torch.equal(*changed)
    assert not torch.equal(changed[0], whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_refused_when_they_come(temperature):
    """Not drawn from, which would be token 0 for ever."""
    model, idx = made("tiled"), prompts(1, 4)
    with torch.no_grad():
        model.positions.weight[6] = torch.nan
    tokens = generate(model, idx, 9, Sampler(temperature))
    assert len([next(tokens) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match="NaN"):
        next(tokens)
    model.break_it = BreakIt("no_max")  # a broken model may show it
    assert len([*generate(model, idx, 9, Sampler(temperature))]) == 9


def test_a_model_in_training_and_a_temperature_without_end_are_refused():
    with pytest.raises(AssertionError):
        written(made("tiled").train(), prompts(1, 4), 1)
    with pytest.raises(ValueError, match="temperature=inf"):  # 1 / inf makes NaN of what top_k forbids
        Sampler(float("inf"), top_k=2)


# --- the choice ------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def drawn(sampler: Sampler, logits: Tensor = LOGITS, count: int = 400) -> set[int]:
    return set(sampler.choose(logits.expand(count, -1), torch.Generator().manual_seed(0)).flatten().tolist())


@pytest.mark.parametrize(
    ("sampler", "tokens"),
    [
        (Sampler(1e-40), {0}),
        (Sampler(1.0, top_k=100), {0, 1, 2, 3}),
        (Sampler(1e30, top_k=2), {0, 1}),
        (Sampler(1.0, top_p=0.81), {0, 1, 2}),
        (Sampler(1.0, top_k=3, top_p=0.6), {0, 1}),
        (Sampler(0.5, top_p=0.65), {0}),  # of the shares at that temperature
    ],
    ids=str,
)
def test_only_the_tokens_that_are_allowed_are_drawn(sampler, tokens):
    assert drawn(sampler) == tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature):
    """Within five standard errors, whatever is added to all logits."""
    n, p = 40_000, (LOGITS[0] / temperature).softmax(-1)
    tokens = Sampler(temperature).choose(LOGITS.expand(n, -1) + 500, torch.Generator().manual_seed(0))
    share = torch.bincount(tokens.flatten(), minlength=4) / n
    assert ((share - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


@pytest.mark.parametrize("impl", ["tiled", "triton"])
def test_a_cleared_cache_begins_at_position_0_again(impl):
    cache = KVCache(made(impl), 1, 5)
    assert cache.layers[0][0].shape[2] == 5
    cache.advance(5)
    place = lambda *ids: [x.flatten().tolist() for x in cache.place(torch.tensor([ids]))]  # noqa: E731
    assert [place(3, 4), place(8)] == [[[5, 6], [0, 3]], [[5], [4]]]
    cache.advance(-cache.length)
    assert place(3, 4) == [[0, 1], [-1, 3]]
