"""The chunked loss is cross-entropy, in value and gradient, without the table."""

import pytest
import torch
import torch.nn.functional as F

from model import loss as loss_module
from model.loss import IGNORE, next_token_loss
from tests.reference import assert_float64_right, assert_within_budget


def problem(n: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 12, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(31, 12, generator=generator, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(31, (n,), generator=generator)


@pytest.mark.parametrize("ignored", [0, 5])
@pytest.mark.parametrize("n", [1, 16, 40])
def test_is_cross_entropy_in_value_and_gradient(n, ignored, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK", 16)  # one short chunk, one full, several and a rest
    x, weight, targets = problem(n)
    targets[: min(ignored, n - 1)] = IGNORE
    ours = next_token_loss(x, weight, targets)
    theirs = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE)
    found, reference = (
        dict(
            zip(("loss", "dx", "dweight"), (loss.detach(), *torch.autograd.grad(loss * 3.0, (x, weight))), strict=True)
        )
        for loss in (ours, theirs)
    )
    assert_float64_right(found, reference, terms=31)


def test_the_gradient_is_the_derivative():
    x, weight, targets = problem(6)
    assert torch.autograd.gradcheck(lambda x, weight: next_token_loss(x, weight, targets), (x, weight))


@pytest.mark.parametrize("ignored", [0, 5])
@pytest.mark.parametrize("n", [1, 40])
def test_with_z_loss_the_gradient_has_the_penalty_and_the_value_has_not(n, ignored, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK", 16)
    x, weight, targets = problem(n)
    targets[: min(ignored, n - 1)] = IGNORE
    ours = next_token_loss(x, weight, targets, z_loss=0.1)
    assert torch.equal(ours, next_token_loss(x, weight, targets))

    logits = x @ weight.T
    penalty = 0.1 * logits.logsumexp(-1)[targets != IGNORE].square().mean()
    theirs = F.cross_entropy(logits, targets, ignore_index=IGNORE) + penalty
    found, reference = (
        dict(zip(("dx", "dweight"), torch.autograd.grad(loss * 3.0, (x, weight)), strict=True))
        for loss in (ours, theirs)
    )
    assert_float64_right(found, reference, terms=31)


def test_in_fp16_a_scaled_loss_keeps_a_gradient_that_the_mean_alone_would_round_away():
    """The gradient was divided by the number of tokens, in fp16, before the scale could come with the backward: of
    65,536 tokens' mean every entry is below 2e-5, and most of them became 0 or the nearest of a few steps of 6e-8. The
    scale, 65,536, was itself infinity in fp16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65536, 8, generator=generator).half().requires_grad_()
    weight = torch.randn(512, 8, generator=generator).half().requires_grad_()
    targets = torch.randint(512, (65536,), generator=generator)

    def gradients(loss, *of):
        return dict(zip(("dx", "dweight"), torch.autograd.grad(loss * 65536.0, of), strict=True))

    found = gradients(next_token_loss(x, weight, targets), x, weight)
    naive = gradients(F.cross_entropy((x @ weight.T).float(), targets), x, weight)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    assert_within_budget(found, naive, gradients(F.cross_entropy(x64 @ weight64.T, targets), x64, weight64))


def test_in_fp16_the_heads_gradient_does_not_overflow_in_the_sum_over_a_chunk():
    """8,192 tokens that all want the same symbol, x of 30: their sum is 245,760, and fp16 ends at 65,504."""
    x = torch.full((8192, 4), 30.0).half()
    weight = torch.zeros(16, 4).half().requires_grad_()
    loss = next_token_loss(x, weight, torch.zeros(8192, dtype=torch.int64))
    (dweight,) = torch.autograd.grad(loss, weight)
    assert dweight[0].tolist() == [30.0 * (1 / 16 - 1)] * 4


def test_without_gradients_the_value_is_the_same():
    x, weight, targets = problem(20)
    with torch.no_grad():
        assert torch.equal(next_token_loss(x, weight, targets), next_token_loss(*problem(20)).detach())


def test_without_gradients_the_heads_gradient_is_not_computed():
    """needs_input_grad is True for a parameter under no_grad too: evaluation paid for a gradient that nobody read."""
    from lab.meter import PeakBytes

    x, weight = torch.randn(4, 64), torch.randn(512, 64, requires_grad=True)
    with torch.no_grad(), PeakBytes() as counted:
        next_token_loss(x, weight, torch.randint(512, (4,)))
    assert counted.peak < weight.numel() * 4


def test_large_logits_do_not_overflow():
    x, weight, targets = problem(8, torch.float32)
    assert next_token_loss(x * 1e4, weight, targets).isfinite()


def test_under_autocast_products_are_bf16_and_the_sum_is_float32():
    x, weight, targets = problem(8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(x, weight, targets)
    rounded = next_token_loss(x.bfloat16(), weight.bfloat16(), targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, rounded)
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


def test_no_table_of_all_tokens_and_all_words_is_made(monkeypatch):
    from tests.test_attention import Largest

    monkeypatch.setattr(loss_module, "CHUNK", 64)
    x, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    with Largest() as seen:
        next_token_loss(x, weight, torch.randint(512, (4096,))).backward()
    assert seen.elements <= 64 * 512
