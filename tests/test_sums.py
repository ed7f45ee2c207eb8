"""training/sums.py: what is sent when. tests/test_parallel.py compares whole runs."""

from types import SimpleNamespace

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training import sums
from training.parallel import Ranks
from training.sums import Sums


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    torch.manual_seed(0)
    sizes = GPTConfig(n_layer=3, n_head=2, n_embd=16, context_length=8, vocab_size=11, tie_head=request.param)
    return GPT(sizes, AttentionConfig("naive"))


@pytest.fixture
def sent(model, monkeypatch):
    """The messages to another rank, which has the same numbers: their elements, which blocks had gradients when they
    were sent, and what has arrived. A message changes when it is waited for."""
    messages = []

    def begin_sum(tensors):
        have = [all(p.grad is not None for p in block.parameters()) for block in model.blocks]
        messages.append(SimpleNamespace(elements=sum(x.numel() for x in tensors), have=have))
        return SimpleNamespace(wait=lambda: [x.mul_(2) for x in tensors])

    monkeypatch.setattr(sums, "begin_sum", begin_sum)
    return messages


def step(model: GPT, ranks: Ranks, passes: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses and of every gradient, over so many passes with tokens of their own."""
    loss, added, idx = torch.zeros(()), Sums(ranks, model), torch.arange(9 * passes).view(passes, 1, 9) % 11
    model.zero_grad()
    for i, tokens in enumerate(idx, start=1):
        share = model(tokens[:, :-1], tokens[:, 1:])
        added.backward(share, last=i == passes)
        loss += share.detach()
    return added.finish(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_sums_of_two_ranks_are_those_of_one_twice(model, sent):
    loss, right = step(model, Ranks(), 2)
    assert not sent
    total, found = step(model, Ranks(size=2), 2)
    assert torch.equal(total, 2 * loss)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], 2 * right[name]) for name in right)


def test_a_block_is_sent_while_the_blocks_before_it_are_computed(model, sent):
    step(model, Ranks(size=2), 1)
    assert [message.have for message in sent] == [
        [False, False, True],
        [False, True, True],
        [True, True, True],
        [True, True, True],
    ]
    assert sum(message.elements for message in sent) == model.parameter_count() + 1  # and the loss


def test_nothing_is_sent_before_the_last_pass(model, sent):
    step(model, Ranks(size=2), 3)
    step(model, Ranks(), 1)  # what the last step has left on the weights sends nothing
    assert len(sent) == len(model.blocks) + 1


def test_sharded_gradients_are_sums_already(model, sent):
    step(model, Ranks(size=2, shards=2), 2)
    assert [message.elements for message in sent] == [1]
