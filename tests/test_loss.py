"""The chunked loss is cross-entropy, in value and gradient, without the table."""

import pytest
import torch
import torch.nn.functional as F

from model import loss as loss_module
from model.loss import IGNORE, next_token_loss
from tests.reference import assert_float64_right


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


def test_without_gradients_the_value_is_the_same():
    x, weight, targets = problem(20)
    with torch.no_grad():
        assert torch.equal(next_token_loss(x, weight, targets), next_token_loss(*problem(20)).detach())


def test_without_gradients_the_heads_gradient_is_not_computed():
    """needs_input_grad is True for a parameter under no_grad too: evaluation paid for a gradient that nobody read."""
    from bench import PeakBytes

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
