"""Sampling with a cache: the tokens and, up to rounding, the logits of running the whole text again for each token."""

from collections import Counter
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from kernels.problem import Problem
from model.attention import AttentionConfig, alibi_slopes
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from sampling.cache import PAGE, KVCache, decode, refusal
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
    "qk_norm": {"qk_norm": True, "norm_eps": 0.1, "n_kv_head": 2, "position": "rope", "mlp": "relu2"},
    "grouped": {"n_kv_head": 2, "position": "rope"},
    "one_key_head": {"n_kv_head": 1},
    "documents": {"documents": True},
    "own_head": {"tie_head": False, "vocab_multiple": 8},
    "dropout": {"dropout_p": 0.5},
}
PAST = [OPTIONS[name] for name in ("own_head", "windows", "alibi")]  # for what happens past the context


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


def drawing(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def written(*arguments, **options) -> torch.Tensor:
    """The tokens (B, n) of generate()."""
    return torch.stack(list(generate(*arguments, **options)), dim=1)


@torch.no_grad()
def logits_of(model: GPT, prompts: list[torch.Tensor], follow: torch.Tensor, cache=None) -> torch.Tensor:
    """The logits (steps + 1, B, V) after the prompts and after each column of `follow` (B, steps); without a cache each
    text runs alone and whole."""
    if cache is None:
        pairs = zip(prompts, follow, strict=True)
        return torch.stack([model(torch.cat(pair)[None])[0, len(pair[0]) - 1 :] for pair in pairs], dim=1)
    found = [run_prompts(model, prompts, cache)]
    for i in range(follow.shape[1]):
        found.append(model.next_logits(follow[:, i : i + 1], cache.advance()))
    return torch.stack(found)


def assert_close(found: torch.Tensor, naive: torch.Tensor, right: torch.Tensor) -> None:
    """Within twice the error of naive in the same dtype without a cache, both against float64."""
    assert error(found, right) <= 2 * (error(naive, right) + torch.finfo(naive.dtype).eps * largest(right))


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


# --- the model ------------------------------------------------------------------------------------------------------

SPLITS = cycle([1, 2, 3, 24, 100])


@pytest.mark.parametrize(
    ("changes", "lengths", "splits"),
    [
        pytest.param(changes, lengths, next(SPLITS), id=f"{name}-{len(lengths)}")
        for name, changes in OPTIONS.items()
        for lengths in ((9, 9), (3, 9, 6))
    ],
)
def test_a_token_has_the_logits_of_the_whole_text_and_in_pages_the_same_bits(changes, lengths, splits):
    """Sequences of the same length, and of different ones; to the last position of the context. Pages of 4 tokens."""
    prompts, follow = texts(*lengths), torch.stack(texts(*[CONTEXT - 9] * len(lengths)))
    right, naive = (logits_of(made(dtype, **changes), prompts, follow) for dtype in (torch.float64, torch.float32))
    model = made(torch.float32, **changes)
    caches = [KVCache(model, len(prompts), splits, page=page) for page in (None, 4)]
    found, in_pages = (logits_of(model, prompts, follow, cache) for cache in caches)
    assert_close(found, naive, right)
    assert torch.equal(found, in_pages)


WAYS = [(name, "naive") for name in OPTIONS]
WAYS += [(name, impl) for impl in ("tiled", "sdpa", "triton") for name in ("grouped", "windows_alibi_softcap")]
WAYS.remove(("windows_alibi_softcap", "sdpa"))  # which has none of the three


@pytest.mark.parametrize(("name", "impl"), WAYS)
@torch.no_grad()
def test_several_tokens_after_a_prompt_see_what_the_cache_holds(name, impl):
    """Then single ones, and what follows a cut. The two texts begin with 6 tokens, in pages that they share."""
    if impl == "triton":
        pytest.importorskip("triton")
    changes = OPTIONS[name]
    idx = torch.stack(texts(CONTEXT, CONTEXT))
    idx[1, :6] = idx[0, :6]
    right, naive = (made(dtype, **changes)(idx) for dtype in (torch.float64, torch.float32))
    model = made(torch.float32, **changes | {"impl": impl})
    P = 64 if impl == "triton" else 4  # its tiles are no longer than a page
    caches = [KVCache(model, 2), KVCache(model, 2, page=P)]
    for cache in caches:
        run_prompts(model, [*idx[:, :6]], cache)
    for T, extends in ((1, False), (5, True), (1, True), (1, False), (8, True), (1, False)):
        if caches[0].lengths[0] == 13:
            assert len({cache.cut(9) for cache in caches}) == 1  # cut or not: a window may have lost keys
        at, found = caches[0].lengths[0], []
        for cache in caches:
            setting = cache.extend(T) if extends else cache.advance()
            found.append(model.next_logits(idx[:, at : at + T], setting))
            assert_close(found[-1], naive[:, at + T - 1], right[:, at + T - 1])
        assert torch.equal(*found)
        assert pages_in_use(caches[1].pages) == 6 // P + 2 * (-(-(at + T) // P) - 6 // P)
    assert caches[1].cut(0)
    assert pages_in_use(caches[1].pages) == 0


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
@pytest.mark.parametrize("changes", PAST, ids=str)
def test_the_likeliest_tokens_are_the_same_past_the_context(changes, past_context):
    """Prompts of 1, 20, a whole context and more; 45 tokens, so that the context fills up several times."""
    model, prompts = made(**changes), texts(1, 20, CONTEXT, CONTEXT + 9)
    found = written(model, prompts, 45, Sampler(0), past_context=past_context)
    assert found.tolist() == [uncached(model, prompt, 45, past_context) for prompt in prompts]
    assert len(found.unique()) > 10


DRAWN = [("slide", PAST[0]), ("half", PAST[1]), ("stop", PAST[2]), ("half", PAST[0]), ("slide", PAST[2])]


@pytest.mark.parametrize(("past_context", "changes"), DRAWN, ids=str)
def test_neither_cache_nor_pages_change_a_token_that_is_drawn(past_context, changes):
    """Different prompts, and one that all samples share. Pages come back and are given out again."""
    model = made(**changes)
    for prompts in (texts(1, 20, CONTEXT, CONTEXT - 9), texts(9)[0].expand(4, -1), texts(CONTEXT)[0].expand(4, -1)):
        caches = [False, KVCache(model, 4), KVCache(model, 4, page=8)]
        one, *others = (
            written(model, prompts, 30, Sampler(2.0), drawing(3), cache=cache, past_context=past_context)
            for cache in caches
        )
        assert all(torch.equal(one, other) for other in others)
        assert one.unique(dim=0).shape[0] == 4 or one.shape[1] == 1


def test_half_of_an_odd_context_is_rounded_up():
    assert [tokens_seen(n, 5, "half") for n in range(4, 12)] == [4, 5, 3, 4, 5, 3, 4, 5]


def test_stop_ends_where_the_first_sequence_has_filled_its_context():
    """The last token is chosen from a full context. Of a prompt past the context the model sees the end."""
    model = made()
    for lengths in ((5,), (5, 9), *((n,) for n in range(CONTEXT + 1, CONTEXT + 9))):
        found = written(model, texts(*lengths), 100, Sampler(0), past_context="stop")
        assert found.shape[1] == max(CONTEXT - max(lengths), 0) + 1
        assert torch.equal(found, written(model, texts(*lengths), found.shape[1], Sampler(0), past_context="slide"))
    assert written(model, texts(5), 7, Sampler(0), past_context="stop").shape[1] == 7


def test_each_token_runs_alone_and_a_prompt_that_rows_share_once(monkeypatch):
    """After the prompts a call has one token of each sequence; with half, the context runs again only when it fills."""
    model, ran = made(), []
    run = model.next_logits
    monkeypatch.setattr(model, "next_logits", lambda idx, setting: ran.append(tuple(idx.shape)) or run(idx, setting))
    list(generate(model, texts(10, 10), 30, Sampler(2.0), drawing(0), past_context="half"))
    assert ran == [(2, T) for T in (10, *[1] * 14, 13, *[1] * 11, 13, 1, 1)]
    ran.clear()
    list(generate(model, texts(9)[0].expand(3, -1), 4, Sampler(), drawing(0)))
    assert ran == [(1, 9), (3, 1), (3, 1), (3, 1)]


def test_autocast_rounds_the_cache_and_not_the_sums():
    """As in training: the keys are bf16, and logits within the budget of the uncached ones."""
    (prompt,), model = texts(9), made(torch.float32)
    right = made().next_logits(prompt[None]).detach()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model.next_logits(prompt[None])
        cache = KVCache(model, 1)
        found = logits_of(model, [prompt[:6]], prompt[None, 6:], cache)[-1]
    assert cache.layers[0].k.dtype == torch.bfloat16
    assert error(found, right) <= 2 * (error(plain, right) + torch.finfo(torch.bfloat16).eps * largest(right))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_mask": ["x"]}, r"block_mask=\['x'\]"),
        ({"impl": "tiled", "break_it": BreakIt("no_max")}, "no_max"),
        ({"impl": "tiled", "break_it": BreakIt(score_gain=2.0)}, "gain_2"),
    ],
    ids=str,
)
def test_what_has_no_cache_is_sampled_without(changes, named):
    """A broken model writes what it writes without a cache: nothing is repaired."""
    model = made(**changes)
    with pytest.raises(ValueError, match=named):
        KVCache(model, 1)
    assert torch.equal(*(written(model, texts(4), 12, Sampler(0), cache=cache) for cache in (True, False)))


# --- memory ----------------------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_share_its_full_pages():
    """Eight samples of 1,000 tokens take the 15 full pages once, and one or two pages each for what they write."""
    model = made(torch.float32, context_length=2048, n_kv_head=1, n_layer=1)
    cache, (prompt,) = KVCache(model, 8, page=PAGE), texts(1000)
    in_use = [0]
    for _ in generate(model, prompt.expand(8, -1), 42, Sampler(), drawing(0), cache=cache):
        if (now := pages_in_use(cache.pages)) != in_use[-1]:
            in_use.append(now)
    assert in_use == [0, 16, 15 + 8, 15 + 16]  # the prompt; the first token after it; from position 1,024 on
    (layer,) = cache.layers
    assert in_use[-1] < len(layer.k) < 1.5 * in_use[-1] + 2
    buffers = KVCache(model, 8)
    run_prompts(model, list(prompt.expand(8, -1)), buffers)
    assert layer.k.nbytes * 5 < buffers.layers[0].k.nbytes


def test_memory_follows_the_lengths():
    """And a window's buffer is as long as the window, in pages too: it is small already."""
    model = made(windows=[3, None], n_kv_head=2)
    cache, buffers = KVCache(model, 3, page=4), KVCache(model, 3)
    for one in (cache, buffers):
        run_prompts(model, texts(3, 9, 16), one)
    assert [layer.k.shape for layer in buffers.layers] == [(3 * 2, 3, 8), (3 * 2, CONTEXT, 8)]
    assert cache.layers[0].k.shape == (3 * 2, 3, 8)
    assert pages_in_use(cache.pages) == 1 + 3 + 4
    for _ in range(2):
        cache.advance()
    assert pages_in_use(cache.pages) == 2 + 3 + 5
    cache.begin(4, slice(1, 2))
    assert pages_in_use(cache.pages) == 2 + 1 + 5


# --- several samples of one prompt; a text that grows by turns -------------------------------------------------------


@pytest.mark.parametrize("length", [10, CONTEXT + 6])
def test_a_talk_is_penalized_as_one_prompt_with_its_text(length):
    """Also for tokens that the model does not see any more, and in a later answer for those of an earlier one. An
    answer that was taken back counts no more."""
    model, sampler = made(), Sampler(0, repetition_penalty=1e9)
    session, text = Session(model, sampler, drawing(0)), texts(length)[0].tolist()
    list(session.answer(text, 5))
    for count in (4, 3):
        answer = list(session.answer(text, count))
        for cache in (True, False):
            assert answer == written(model, torch.tensor([text]), count, sampler, cache=cache)[0].tolist()
        assert not set(answer) & set(text)
        text += answer


TALKS = [*((*drawn, False) for drawn in DRAWN), *((*drawn, True) for drawn in DRAWN if drawn[0] != "stop")]
TALKS += [("slide", {"block_mask": ["x"]}, False), ("half", {"block_mask": ["x"]}, True)]


@pytest.mark.parametrize(("past_context", "changes", "ahead"), TALKS, ids=str)
def test_a_session_answers_as_the_whole_text_does(past_context, changes, ahead, monkeypatch):
    """Turns of several lengths, left half-way and with the end taken back, to beyond the context. In pages, if there is
    a cache. ahead: as on a GPU, where the model runs on a token before it is read."""
    go_on = Session.go_on

    def a_token_late(*arguments):
        made = go_on(*arguments)
        last = next(made)
        for token in made:
            yield last
            last = token
        yield last

    if ahead:
        monkeypatch.setattr(Session, "go_on", a_token_late)
    model, text, found, sampler = made(**changes), [7], set(), Sampler(0 if ahead else 2.0)
    cache = KVCache(model, 1, page=4) if refusal(model) is None else True
    session = Session(model, sampler, drawing(0), cache=cache, past_context=past_context)
    how = {"cache": False, "past_context": past_context}

    def expected(count: int, draws: torch.Generator) -> list[int]:
        if past_context == "stop" and len(text) > CONTEXT:
            return []
        seen = torch.tensor([text[-tokens_seen(len(text), CONTEXT, past_context) :]])
        return list(generate(model, seen, count, sampler, draws, **how))

    draws = drawing(0)
    turns = [(0, 3, 3), (4, 4, 2), (1, 1, 1), (3, 6, 4), (0, 2, 2), (9, 8, 8), (2, 20, 20), (5, 3, 3)]
    for typed, count, kept in turns:
        text += texts(10)[0].tolist()[:typed]
        answer = list(islice(session.answer(text, count + 9 * ahead), count))
        assert answer == expected(count, draws)
        text += answer[:kept]
        found |= set(answer)
    assert len(found) > 3
    # Texts that are the same two tokens on: if the place of what the cache holds were wrong by one, it would fit.
    for token in range(20 * ahead):
        text = [token, token + 20] * CONTEXT
        for _ in range(2):
            assert list(islice(session.answer(text, 20), 1)) == expected(1, draws)


@pytest.mark.parametrize("count", range(1, 6))
def test_a_second_text_does_not_see_the_first(count):
    """Also where the cache holds as many tokens as the model will have seen of the second prompt: one less."""
    model, first, second = made(), texts(5)[:1], [texts(8)[0].flip(0)]  # that begin otherwise
    session = Session(model, Sampler(0), drawing(0))
    list(session.generate(first, count))
    assert [int(token) for token in session.generate(second, 5)] == list(
        generate(model, second, 5, Sampler(0), cache=False)
    )
    both = [session.generate(text, n) for text, n in ((first, count), (second, 5))]  # before either is read
    assert [list(text) for text in both][1] == list(generate(model, second, 5, Sampler(0), cache=False))


def test_a_text_that_fills_the_context_is_answered_by_one_token():
    session = Session(made(), Sampler(0), None, past_context="stop")
    assert [len(list(session.answer(texts(n)[0].tolist(), 5))) for n in (CONTEXT, CONTEXT + 1)] == [1, 0]


def test_a_turn_runs_only_what_is_new(monkeypatch):
    model, ran = made(), []
    run = model.through_blocks
    monkeypatch.setattr(model, "through_blocks", lambda idx, *rest: ran.append(idx.shape[1]) or run(idx, *rest))
    session = Session(model, Sampler(0), drawing(0), past_context="half")
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
    session = Session(model, Sampler(0), drawing(0), past_context="stop")
    text = [*text[:6], *session.answer(text[:6], CONTEXT)]
    assert len(text) == CONTEXT + 1
    ran.clear()
    list(session.answer(text[: CONTEXT - 2], 1))  # the end of a full context is taken back
    assert ran == [1]
    session = Session(model, Sampler(0), drawing(0))
    list(session.answer(text[:5], 5))
    list(session.generate([torch.tensor(text[8:16])], 3))  # after which the cache holds as many tokens
    ran.clear()
    list(session.answer(text[:5], 1))
    assert ran == [4, 1]


# --- decode() and merge() -------------------------------------------------------------------------------------------

ONE_ROW = [
    replace(case, T=1, T_k=case.T_k or case.T, B=16)  # as many rows as the budget needs to be no luck
    for case in CASES
    if case.causal and not (case.dropout_p or case.blocks)
] + [Case(1, 1, B=16), Case(1, 64, B=16, documents=(16, 48), H=6, H_kv=2, sigma=4.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ONE_ROW, ids=case_name)
def test_one_row_is_the_oracles_however_the_keys_are_split(case, dtype):
    inputs = case.inputs(dtype)
    q, k, v = (inputs[name] for name in "qkv")
    scale = case.D**-0.5 if case.softmax_scale is None else case.softmax_scale
    slopes = alibi_slopes(case.H, q.device) if case.alibi else None
    problem = Problem.of(1, case.T_k, scale, softcap=case.softcap, slopes=slopes)
    back = torch.arange(case.T_k - 1, -1, -1)[None]
    hidden = ~visible(case)[:, 0]
    right, naive = oracle(inputs, case)["o"], run(inputs, case, NAIVE)["o"]
    # Not more splits: torch adds up products of few keys one by one, with a larger error than naive's products have.
    for splits in (1, 2, 7, 12):
        o = decode(q, k.flatten(0, 1), v.flatten(0, 1), problem, back, hidden if hidden.any() else None, splits)
        assert o.dtype == dtype
        assert_close(o, naive, right)


def test_autocast_changes_no_bit():
    q, k, v = torch.randn(2, 1, 8), *torch.randn(2, 2, 50, 8)
    plain = decode(q[None], k, v, Problem.of(1, 50))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain, decode(q[None], k, v, Problem.of(1, 50)))
