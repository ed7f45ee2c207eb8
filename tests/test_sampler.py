"""How the next token is chosen: which tokens can be drawn, how often, and as transformers does."""

from itertools import product

import pytest
import torch

from sampling.generate import NotFinite, Sampler


def random_logits(seed: int) -> torch.Tensor:
    """Logits (5, 50) as a model might have them, the rows from nearly even to nearly decided."""
    spread = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0])[:, None]
    return torch.randn(5, 50, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, *({"temperature": t} for t in (1e-3, 1e-40, 1e-300))]
)
def test_the_likeliest_token_is_chosen_where_no_other_can_be(options):
    """Logits over 1e-40 are infinite, and their softmax was NaN."""
    logits = torch.stack([torch.randperm(30) for _ in range(20)]).float()  # nowhere closer than 1
    assert torch.equal(Sampler(**options).choose(logits), logits.argmax(-1))


@pytest.mark.parametrize(("top_k", "top_p"), [*product((None, 1, 5, 49, 50, 51), (1.0, 0.1, 0.7, 0.99))])
def test_probabilities_are_transformers(top_k, top_p, monkeypatch):
    """All of its processors in the order of its generate(), over texts that use some tokens several times."""
    from transformers.generation import logits_process as theirs

    texts, logits = torch.randint(50, (5, 12)), random_logits(3)
    for temperature, min_p, penalty in ((0.6, 0.0, 1.0), (1.5, 0.1, 1.3), (1.0, 0.6, 0.7), (0.6, 1.0, 1.3)):
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(texts, logits.clone())
        expected = theirs.TemperatureLogitsWarper(temperature)(texts, expected)
        if top_k is not None:
            expected = theirs.TopKLogitsWarper(top_k)(texts, expected)
        if top_p < 1:
            expected = theirs.TopPLogitsWarper(top_p)(texts, expected)
        expected = theirs.MinPLogitsWarper(min_p)(texts, expected).softmax(-1)
        drawn = []
        monkeypatch.setattr(
            "sampling.generate.waiting_times", lambda p, _, to=drawn: to.append(p) or torch.ones_like(p)
        )
        sampler = Sampler(temperature, top_k, top_p, min_p, penalty)
        sampler.choose(logits, None, sampler.tokens_used(list(texts), 50))
        torch.testing.assert_close(drawn[0], expected, rtol=1e-5, atol=1e-7)


def test_new_tokens_are_penalized_too():
    """Greedy over the same logits: 3, then 2.4 (for 3 is 2 now), then 2.1, then 3 / 1.5 again."""
    sampler = Sampler(0, repetition_penalty=1.5)
    logits = torch.tensor([[3.0, 2.4, 2.1, -1.0]])
    used = sampler.tokens_used([torch.tensor([3])], 4)
    assert [int(sampler.choose(logits, None, used)) for _ in range(4)] == [0, 1, 2, 0]


def test_draws_are_torch_multinomials():
    """So a sample of a commit before has the same text."""
    p = random_logits(0).softmax(-1)
    for seed in range(50):
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        found = Sampler(1.0).choose(p.log(), one)
        assert torch.equal(found, torch.multinomial(p.log().softmax(-1), 1, generator=other)[:, 0])


def test_a_row_with_its_own_generator_draws_what_it_draws_alone():
    logits = random_logits(1)
    together, alone = ([torch.Generator().manual_seed(seed) for seed in range(7, 12)] for _ in range(2))
    for _ in range(20):
        expected = [Sampler().choose(logits[i : i + 1], one) for i, one in enumerate(alone)]
        assert torch.equal(Sampler().choose(logits, together), torch.cat(expected))


@pytest.mark.parametrize("sampler", [{}, {"top_k": 1}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0}], ids=str)
def test_what_is_not_finite_is_no_choice(sampler):
    """A row without probabilities once drew its first token. On a GPU the host is told one token later."""
    rows = [[0.0, torch.nan, 1.0], [torch.inf, 1.0, torch.inf], [-torch.inf] * 3]
    for row in rows[:1] if sampler == {"temperature": 0} else rows:
        logits = torch.tensor([[0.0, 1.0, 2.0], row])
        with pytest.raises(NotFinite):
            Sampler(**sampler).choose(logits)
        assert Sampler(**sampler).choose_unseen(logits)[-1] == 1
    assert Sampler(**sampler).choose_unseen(torch.tensor([[0.0, 1.0, -torch.inf]]))[-1] == 0
