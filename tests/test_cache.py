"""Sampling with a cache: the tokens and, up to rounding, the logits of running the whole text again for each token."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch

from kernels.problem import Problem
from model.attention import AttentionConfig, alibi_slopes, attention
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from model.tiled import LOG2E
from sampling.cache import PAGE, KVCache, decode, merge, refusal
from sampling.generate import Sampler, Session, generate, run_prompts, tokens_seen
from tests.reference import CASES, DTYPES, Case, case_name, error, largest, oracle, run, visible

CONTEXT = 24
SIZE = GPTConfig(n_layer=2, n_head=4, n_embd=32, context_length=CONTEXT, vocab_size=61)
NAIVE = AttentionConfig("naive")


def options(model=SIZE, attention=NAIVE, **changes):
    """GPTConfig and AttentionConfig with `changes`, each in the one that has such a field."""
    of_model = {name: value for name, value in changes.items() if hasattr(model, name)}
    return replace(model, **of_model), replace(attention, **{n: v for n, v in changes.items() if n not in of_model})


OPTIONS = {
    "learned": {},
    "rope": {"position": "rope", "rope_base": 50.0},
    "alibi": {"position": "none", "alibi": True},
    "none": {"position": "none", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    "softcap": {"softcap": 0.5},
    "softmax_scale": {"softmax_scale": 0.9},
    "window": {"window": 5, "position": "rope"},
    "window_of_one": {"window": 1},
    "wide_window": {"window": 100},
    "windows": {"windows": [3, None], "position": "rope"},
    "window_alibi": {"window": 7, "position": "none", "alibi": True},
    "windows_alibi_softcap": {"windows": [7, None], "position": "none", "alibi": True, "softcap": 0.5, "n_kv_head": 2},
    "local_rope": {"windows": [3, None], "position": "rope", "rope_base": 50.0, "rope_base_local": 7.0},
    "yarn": {"position": "rope", "yarn_factor": 3.0, "yarn_original": 8},
    "grouped": {"n_kv_head": 2, "position": "rope"},
    "one_key_head": {"n_kv_head": 1},
    "documents": {"documents": True},
    "own_head": {"tie_head": False, "vocab_multiple": 8},
    "dropout": {"dropout_p": 0.5},
}


def made(dtype=torch.float64, **changes) -> GPT:
    """A model whose weights are large enough that every token and position tells."""
    torch.manual_seed(0)
    break_it = changes.pop("break_it", BreakIt())
    model = GPT(*options(**changes), break_it).eval().to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1)
    return model


def texts(*lengths: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(SIZE.vocab_size, (length,)) for length in lengths]


@torch.no_grad()
def logits_of(model: GPT, prompts: list[torch.Tensor], follow: torch.Tensor, cache=None) -> torch.Tensor:
    """The logits (steps + 1, B, V) after the prompts and after each column of `follow` (B, steps); without a cache each
    text runs alone and whole."""
    found = [run_prompts(model, prompts, cache)]
    for i in range(follow.shape[1]):
        if cache is None:
            grown = [torch.cat((text, row[: i + 1])) for text, row in zip(prompts, follow, strict=True)]
            found.append(torch.cat([model.next_logits(text[None]) for text in grown]))
        else:
            found.append(model.next_logits(follow[:, i : i + 1], cache.advance()))
    return torch.stack(found)


def assert_same_logits(changes: dict, lengths=(3, 9, 6), steps=CONTEXT - 9, splits=1) -> None:
    """In float32: within twice the error of the uncached ones of naive in float32, both against float64."""
    prompts, follow = texts(*lengths), torch.stack(texts(*[steps] * len(lengths)))
    naive = {**changes, "impl": "naive"}
    right = logits_of(made(**naive), prompts, follow)
    uncached = logits_of(made(torch.float32, **naive), prompts, follow)
    model = made(torch.float32, **changes)
    found = logits_of(model, prompts, follow, KVCache(model, len(prompts), splits))
    budget = 2 * (error(uncached, right) + torch.finfo(torch.float32).eps * largest(right))
    assert error(found, right) <= budget


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9,), (9, 9), (3, 9, 6)], ids=str)
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_the_logits_are_those_of_the_whole_text(changes, lengths):
    """One sequence, two together, and three of different lengths; to the last position of the context."""
    assert_same_logits(changes, lengths)


@pytest.mark.parametrize("impl", ["tiled", "sdpa", "triton"])
@pytest.mark.parametrize("name", ["learned", "grouped", "windows_alibi_softcap"])
def test_every_implementation_fills_the_cache(impl, name):
    if impl == "triton":
        pytest.importorskip("triton")
    if impl == "sdpa" and name == "windows_alibi_softcap":
        name = "rope"  # sdpa has none of the three
    assert_same_logits({**OPTIONS[name], "impl": impl}, steps=3)


@pytest.mark.parametrize("splits", [2, 3, 24, 100])
@pytest.mark.parametrize("name", ["learned", "windows_alibi_softcap"])
def test_splits_change_the_logits_by_rounding(name, splits):
    assert_same_logits(OPTIONS[name], splits=splits)


@torch.no_grad()
def uncached(model: GPT, prompt: torch.Tensor, count: int, past_context: str) -> list[int]:
    """The likeliest tokens, `count` of them, each from the whole of what the model sees; written out. A prompt's tokens
    are seen as if they had come one by one."""
    text, start = prompt.tolist(), 0
    for length in range(1, len(prompt) + count):
        if length - start > CONTEXT:
            start = length - CONTEXT if past_context == "slide" else length - CONTEXT // 2 - 1
        if length < len(prompt):
            continue
        text.append(int(model(torch.tensor([text[start:]]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("past_context", ["slide", "half"])
@pytest.mark.parametrize("changes", [OPTIONS[name] for name in ("own_head", "windows", "alibi")], ids=str)
def test_the_likeliest_tokens_are_the_same_past_the_context(changes, past_context):
    """Prompts of 1, 20, a whole context and more; 60 tokens, so that the context fills up several times."""
    model, prompts = made(**changes), texts(1, 20, CONTEXT, CONTEXT + 9)
    found = torch.stack(list(generate(model, prompts, 60, Sampler(0), past_context=past_context))).T
    assert found.tolist() == [uncached(model, prompt, 60, past_context) for prompt in prompts]
    again = torch.stack(list(generate(model, prompts, 60, Sampler(0), past_context=past_context, cache=False))).T
    assert torch.equal(found, again)
    assert len(found.unique()) > 10


def test_stop_ends_where_the_first_sequence_has_filled_its_context():
    """The last token is chosen from a full context."""
    model = made()
    for lengths in ((5,), (5, 9)):
        found = list(generate(model, texts(*lengths), 100, Sampler(0), past_context="stop"))
        assert len(found) == CONTEXT - max(lengths) + 1
    assert len(list(generate(model, texts(5), 7, Sampler(0), past_context="stop"))) == 7
    assert list(generate(model, texts(CONTEXT + 1), 7, Sampler(0), past_context="stop"))


def test_what_the_model_sees_of_a_long_text():
    assert [tokens_seen(n, 6, "slide") for n in range(1, 15)] == [1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6]
    assert [tokens_seen(n, 6, "half") for n in range(1, 15)] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5]
    assert [tokens_seen(n, 1, "half") for n in range(1, 5)] == [1, 1, 1, 1]


def test_a_seed_draws_the_same_tokens_with_and_without_a_cache():
    draws = [
        torch.stack(list(generate(made(), texts(4, 7), 60, Sampler(), torch.Generator().manual_seed(5), cache=cache)))
        for cache in (True, False)
    ]
    assert torch.equal(*draws)


def watch(monkeypatch, model: GPT, seen) -> None:
    """Calls seen() with the shape (B, T) of all that generate() runs: prompts by the modules, and tokens."""
    run = model.next_logits
    monkeypatch.setattr(model, "next_logits", lambda idx, setting: seen(idx.shape) or run(idx, setting))


def test_each_token_runs_alone(monkeypatch):
    """After the prompts a call has one token of each sequence; with half, the context runs again only when it fills."""
    model, lengths = made(), []
    watch(monkeypatch, model, lambda shape: lengths.append(shape[1]))
    list(generate(model, torch.stack(texts(10, 10)), 30, Sampler(0), past_context="half"))
    assert lengths == [10, *[1] * 14, 13, *[1] * 11, 13, 1, 1]


def test_a_windows_buffer_is_as_long_as_the_window():
    model = made(windows=[3, None], n_kv_head=2)
    cache = KVCache(model, 5)
    run_prompts(model, texts(*[7] * 5), cache)
    assert [layer.k.shape for layer in cache.layers] == [(5 * 2, 3, 8), (5 * 2, CONTEXT, 8)]


def test_autocast_rounds_the_cache_and_not_the_sums():
    """As in training: the keys are bf16, and logits within the budget of the uncached ones."""
    (prompt,), right = texts(9), made()
    right = right.next_logits(prompt[None]).detach()
    model = made(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model.next_logits(prompt[None])
        cache = KVCache(model, 1)
        found = logits_of(model, [prompt[:6]], prompt[None, 6:], cache)[-1]
    assert cache.layers[0].k.dtype == torch.bfloat16
    assert error(found, right) <= 2 * (error(plain, right) + torch.finfo(torch.bfloat16).eps * largest(right))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_mask": ["x"]}, r"attention.block_mask=\['x'\]: the cache has no block masks"),
        ({"impl": "tiled", "break_it": BreakIt("no_max")}, "break_it=no_max: a cache would compute whole"),
        ({"impl": "tiled", "break_it": BreakIt(score_gain=2.0)}, "break_it=gain_2: a cache would compute whole"),
    ],
    ids=str,
)
def test_what_has_no_cache_is_sampled_without(changes, said):
    """A broken model writes what it writes without a cache: nothing is repaired."""
    model = made(**changes)
    with pytest.raises(ValueError, match=said):
        KVCache(model, 1)
    with_cache, without = (list(generate(model, texts(4), 12, Sampler(0), cache=cache)) for cache in (True, False))
    assert with_cache == without


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9,), (9, 9), (3, 9, 6)], ids=str)
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_pages_change_no_bit(changes, lengths):
    """Of 4 tokens. To the last position of the context; the keys in one part and in three."""
    prompts, follow = texts(*lengths), torch.stack(texts(*[CONTEXT - 9] * len(lengths)))
    model = made(torch.float32, **changes)
    for splits in (1, 3):
        buffers, pages = (
            logits_of(model, prompts, follow, KVCache(model, len(lengths), splits, page=page)) for page in (None, 4)
        )
        assert torch.equal(buffers, pages)


@pytest.mark.parametrize("past_context", ["slide", "half", "stop"])
@pytest.mark.parametrize("changes", [OPTIONS[name] for name in ("own_head", "windows", "alibi")], ids=str)
def test_pages_change_no_token_past_the_context(changes, past_context):
    """Different prompts, and one that all samples share. Pages come back and are given out again."""
    model = made(**changes)
    for prompts in (texts(1, 20, CONTEXT, CONTEXT - 9), texts(9)[0].expand(4, -1), texts(CONTEXT)[0].expand(4, -1)):
        found = [
            torch.stack(
                list(
                    generate(
                        model, prompts, 30, Sampler(2.0), one_generator(3), cache=KVCache(model, 4, page=page),
                        past_context=past_context,
                    )
                )
            )
            for page in (None, 8)
        ]  # fmt: skip
        assert torch.equal(*found)
        assert found[0].unique(dim=1).shape[1] == 4 or len(found[0]) == 1


def pages_in_use(pages) -> int:
    """How many pages have an owner, after a look at the whole account: each page is as often in `held` as it has
    owners, the free ones have none, and the device's table says the same."""
    counts = Counter(page for held in pages.held for page in held)
    assert [counts[page] for page in range(1, len(pages.owners))] == pages.owners[1:]
    assert counts[0] == 0
    assert sorted(pages.free) == [page for page, owners in enumerate(pages.owners) if owners == 0]
    for row, held in zip(pages.table.tolist(), pages.held, strict=True):
        assert row == held + [0] * (len(row) - len(held))
    return len(pages.owners) - 1 - len(pages.free)


def test_samples_of_one_prompt_share_its_full_pages():
    """Eight samples of 1,000 tokens take the 15 full pages once, and one or two pages each for what they write."""
    model = made(torch.float32, context_length=2048, n_kv_head=1, n_layer=1)
    cache, (prompt,) = KVCache(model, 8, page=PAGE), texts(1000)
    in_use = [0]
    for _ in generate(model, prompt.expand(8, -1), 42, Sampler(), one_generator(0), cache=cache):
        if (now := pages_in_use(cache.pages)) != in_use[-1]:
            in_use.append(now)
    assert in_use == [0, 16, 15 + 8, 15 + 16]  # the prompt; the first token after it; from position 1,024 on
    (layer,) = cache.layers
    assert in_use[-1] < len(layer.k) < 1.5 * in_use[-1] + 2
    buffers = KVCache(model, 8)
    run_prompts(model, list(prompt.expand(8, -1)), buffers)
    assert layer.k.nbytes * 5 < buffers.layers[0].k.nbytes


def test_memory_follows_the_lengths():
    model = made(windows=[3, None])
    cache = KVCache(model, 3, page=4)
    run_prompts(model, texts(3, 9, 16), cache)
    assert pages_in_use(cache.pages) == 1 + 3 + 4
    assert [layer.pages is None for layer in cache.layers] == [True, False]  # a window's buffer is small already
    for _ in range(2):
        cache.advance()
    assert pages_in_use(cache.pages) == 2 + 3 + 5
    cache.begin(4, slice(1, 2))
    assert pages_in_use(cache.pages) == 2 + 1 + 5


@torch.no_grad()
def test_pages_of_a_text_that_is_cut_and_goes_on():
    model, (text,) = made(torch.float32), texts(CONTEXT)
    found = []
    for page in (None, 4):
        cache = KVCache(model, 2, page=page)
        run_prompts(model, [text[:6], text[:6]], cache)  # shared
        for T in (5, 1, 9):
            setting, past = cache.extend(T), cache.lengths[0] - T
            found.append(model.next_logits(torch.stack((text[past:][:T], text[:T])), setting))
            assert page is None or pages_in_use(cache.pages) == 1 + 2 * (-(-cache.lengths[0] // 4) - 1)
            if T == 1:
                assert cache.cut(7)
        cache.cut(0)
        assert page is None or pages_in_use(cache.pages) == 0
    assert all(torch.equal(x, y) for x, y in zip(found[:3], found[3:], strict=True))


def test_a_page_has_a_power_of_two_tokens():
    with pytest.raises(AssertionError, match="pages of 12 tokens"):
        KVCache(made(), 1, page=12)


# --- several samples of one prompt; a text that grows by turns -------------------------------------------------------


def one_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("past_context", ["slide", "half", "stop"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_row_writes_what_it_writes_alone(cache, past_context):
    """Past the context too. The prompt is one row, seen from each."""
    model, (prompt,), count = made(), texts(9), 50
    options = {"cache": cache, "past_context": past_context}
    rows = generate(model, prompt.expand(3, -1), count, Sampler(1.0), [*map(one_generator, (5, 6, 7))], **options)
    rows = torch.stack(list(rows)).T
    assert len({*map(tuple, rows.tolist())}) == 3
    for row, seed in zip(rows, (5, 6, 7), strict=True):
        alone = generate(model, prompt[None], count, Sampler(1.0), one_generator(seed), **options)
        assert row.tolist() == [int(token) for token in alone]


def test_a_prompt_that_rows_share_runs_once(monkeypatch):
    model, shapes = made(), []
    watch(monkeypatch, model, lambda shape: shapes.append(tuple(shape)))
    list(generate(model, texts(9)[0].expand(3, -1), 4, Sampler(), one_generator(0)))
    assert shapes == [(1, 9), (3, 1), (3, 1), (3, 1)]


def test_the_penalty_counts_the_prompt_and_the_new_tokens():
    """So large that no token comes a second time."""
    (prompt,) = texts(20)
    with_cache, without = (
        torch.stack(list(generate(made(), prompt[None], 30, Sampler(0, repetition_penalty=1e9), cache=cache)))
        for cache in (True, False)
    )
    whole = [*prompt.unique().tolist(), *with_cache[:, 0].tolist()]
    assert len(set(whole)) == len(whole)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("length", [10, CONTEXT + 6])
def test_a_talk_is_penalized_as_one_prompt_with_its_text(length):
    """Also for tokens that the model does not see any more, and in a later answer for those of an earlier one. An
    answer that was taken back counts no more."""
    model, sampler = made(), Sampler(0, repetition_penalty=1e9)
    session, text = Session(model, sampler, one_generator(0)), texts(length)[0].tolist()
    list(session.answer(text, 5))
    for count in (4, 3):
        answer = list(session.answer(text, count))
        assert answer == [int(token) for token in generate(model, torch.tensor([text]), count, sampler)]
        assert not set(answer) & set(text)
        text += answer


@torch.no_grad()
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_several_tokens_after_a_prompt_see_what_the_cache_holds(changes):
    """Chunks of one, several and as many tokens as fill the context, then single ones; within the budget."""
    idx = torch.stack(texts(CONTEXT, CONTEXT))
    right = made(**changes | {"impl": "naive"})
    naive = made(torch.float32, **changes | {"impl": "naive"})
    model = made(torch.float32, **changes)
    cache, at = KVCache(model, 2), 0
    for T in (4, 6, 1, 8):
        found = model.next_logits(idx[:, at : at + T], cache.extend(T))
        at += T
        expected = right.next_logits(idx[:, :at])
        budget = 2 * (
            error(naive.next_logits(idx[:, :at]), expected) + torch.finfo(torch.float32).eps * largest(expected)
        )
        assert error(found, expected) <= budget
        if at == 10:  # a token alone, as after a prompt
            found = model.next_logits(idx[:, at : at + 1], cache.advance())
            assert error(found, right.next_logits(idx[:, : at + 1])) <= budget
            at += 1


@torch.no_grad()
@pytest.mark.parametrize("impl", ["tiled", "sdpa", "triton"])
def test_every_implementation_extends_the_cache(impl):
    """And a token alone follows; after a cut too."""
    if impl == "triton":
        pytest.importorskip("triton")
    text, model = texts(17)[0], made(torch.float32, impl=impl, n_kv_head=2, position="rope")
    cache, at = KVCache(model, 1), 0
    for T in (6, 9, 1, 1):
        if (T, at) == (1, 15):
            at = 13
            assert cache.cut(at)
        setting = cache.extend(T) if T > 1 else cache.advance()
        found, at = model.next_logits(text[None, at : at + T], setting), at + T
        torch.testing.assert_close(found, model.next_logits(text[None, :at]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cut_forgets_the_end_and_refuses_where_a_window_has_lost_keys():
    (text, other), model = texts(12, 5), made(windows=[8, None])
    for length, possible in ((7, True), (12, False)):
        cache = KVCache(model, 1)
        model.next_logits(text[None, :length], cache.extend(length))
        assert cache.cut(5) == possible
        if possible:
            expected = model.next_logits(torch.cat((text[:5], other))[None])
            torch.testing.assert_close(model.next_logits(other[None], cache.extend(5)), expected)
        assert cache.cut(0)
        assert cache.lengths == [0]


TALKS = [OPTIONS[name] for name in ("own_head", "windows", "alibi")] + [{"block_mask": ["x"]}]


@pytest.mark.parametrize("past_context", ["slide", "half", "stop"])
@pytest.mark.parametrize("changes", TALKS, ids=str)
def test_a_session_answers_as_the_whole_text_does(changes, past_context):
    """Turns of several lengths, one cut short and one whose end is taken back, to beyond the context. In pages, if
    there is a cache."""
    model, text, found, sampler = made(**changes), [7], set(), Sampler(2.0)
    cache = KVCache(model, 1, page=4) if refusal(model) is None else True
    session = Session(model, sampler, one_generator(0), cache=cache, past_context=past_context)
    draws = one_generator(0)
    turns = [(0, 3, 3), (4, 4, 2), (1, 1, 1), (3, 6, 4), (0, 2, 2), (9, 8, 8), (2, 20, 20), (5, 3, 3)]
    for typed, count, kept in turns:
        text += texts(10)[0].tolist()[:typed]
        answer = list(session.answer(text, count))
        seen = torch.tensor([text[-tokens_seen(len(text), CONTEXT, past_context) :]])
        too_long = past_context == "stop" and len(text) > CONTEXT
        options = {"cache": False, "past_context": past_context}
        expected = [] if too_long else list(generate(model, seen, count, sampler, draws, **options))
        assert answer == expected
        text += answer[:kept]
        found |= set(answer)
    assert len(found) > 5


@pytest.mark.parametrize("past_context", ["slide", "half"])
def test_a_session_may_be_a_token_ahead(past_context, monkeypatch):
    """As on a GPU, where the model runs on a token before it is read. Answers are left after each length."""
    go_on = Session.go_on

    def ahead(*arguments):
        made = go_on(*arguments)
        last = next(made)
        for token in made:
            yield last
            last = token
        yield last

    monkeypatch.setattr(Session, "go_on", ahead)
    model, text, sampler = made(), [7], Sampler(0)
    session = Session(model, sampler, one_generator(0), past_context=past_context)
    for count in (1, 3, 2, 5, 8, 1, 9, 4):
        text += texts(3)[0].tolist()
        seen = torch.tensor([text[-tokens_seen(len(text), CONTEXT, past_context) :]])
        expected = list(generate(model, seen, count, sampler, cache=False, past_context=past_context))
        answer = list(islice(session.answer(text, 20), count))
        assert answer == expected
        text += answer
    # Texts that are the same two tokens on: if the place of what the cache holds were wrong by one, it would fit.
    for token in range(20):
        text = [token, token + 20] * CONTEXT
        expected = list(generate(model, torch.tensor([text]), 1, sampler, cache=False))
        for _ in range(2):
            assert list(islice(session.answer(text, 20), 1)) == expected


def test_a_turn_runs_only_what_is_new(monkeypatch):
    model, ran = made(), []
    run = model.through_blocks
    monkeypatch.setattr(model, "through_blocks", lambda idx, *rest: ran.append(idx.shape[1]) or run(idx, *rest))
    session = Session(model, Sampler(0), one_generator(0), past_context="half")
    text = texts(6)[0].tolist()
    text += session.answer(text, 3)
    assert ran == [5, 1, 1, 1]
    text += [1, 2, 3]
    text += session.answer(text, 2)
    assert ran[4:] == [3, 1, 1]  # the last token of the answer, and two that are new; then one by one
    list(session.answer([*text[:-2], 4], 1))  # another end
    assert ran[7:] == [1]
    list(session.answer([9, *text], 1))  # another beginning
    assert ran[8:] == [len(text), 1]


# --- decode() and merge() -------------------------------------------------------------------------------------------

ONE_ROW = [
    replace(case, T=1, T_k=case.T_k or case.T, B=16)  # as many rows as the budget needs to be no luck
    for case in CASES
    if case.causal and not (case.dropout_p or case.blocks)
] + [Case(1, 1, B=16), Case(1, 64, B=16, documents=(16, 48), H=6, H_kv=2, sigma=4.0)]


# Not more splits: torch adds up products of few keys one by one, with a larger error than naive's products have.
@pytest.mark.parametrize("splits", [1, 2, 7, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ONE_ROW, ids=case_name)
def test_one_row_is_the_oracles_however_the_keys_are_split(case, dtype, splits):
    inputs = case.inputs(dtype)
    q, k, v = (inputs[name] for name in "qkv")
    scale = case.D**-0.5 if case.softmax_scale is None else case.softmax_scale
    slopes = alibi_slopes(case.H, q.device) if case.alibi else None
    problem = Problem.of(1, case.T_k, scale, softcap=case.softcap, slopes=slopes)
    back = torch.arange(case.T_k - 1, -1, -1)[None]
    hidden = ~visible(case)[:, 0]
    o = decode(q, k.flatten(0, 1), v.flatten(0, 1), problem, back, hidden if hidden.any() else None, splits)
    right, naive = oracle(inputs, case)["o"], run(inputs, case, NAIVE)["o"]
    assert o.dtype == dtype
    assert error(o, right) <= 2 * (error(naive, right) + torch.finfo(dtype).eps * largest(right))


def test_autocast_changes_no_bit():
    q, k, v = torch.randn(2, 1, 8), *torch.randn(2, 2, 50, 8)
    plain = decode(q[None], k, v, Problem.of(1, 50))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, decode(q[None], k, v, Problem.of(1, 50)))


def test_parts_that_attention_computed_merge_by_lse():
    """Each part's o and lse, as attention() returns them, are a state with m = lse and l = 1."""
    q, k, v = torch.randn(3, 2, 3, 50, 8, dtype=torch.float64)
    compute = partial(attention, q, config=NAIVE, causal=False, return_lse=True)
    parts = [compute(k[:, :, start:stop], v[:, :, start:stop]) for start, stop in ((0, 7), (7, 30), (30, 50))]
    m, l, acc = merge([(lse[..., None] * LOG2E, torch.ones_like(lse[..., None]), o) for o, lse in parts])
    o, lse = compute(k, v)
    torch.testing.assert_close(acc / l, o)
    torch.testing.assert_close((m / LOG2E + l.log())[..., 0], lse)
