"""The loss in chunks is cross-entropy, in value and gradient, without the N x V table; with the kernel, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.meter import PeakBytes
from model import loss as loss_module
from model.loss import IGNORE, next_token_loss
from tests.implementations import CUDA, DEVICE, HAS_TRITON, ON_GPU
from tests.reference import DTYPES, assert_float64_right, assert_within_budget

pytestmark = ON_GPU
KERNEL = pytest.param("kernel", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is made for Linux only"))


def problem(n: int, dtype=torch.float64, V: int = 31, C: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, C), weight (V, C), targets (n,)."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, C, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for rows in (n, V))
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(V, (n,), generator=generator).to(DEVICE)


def of(loss: Tensor, x: Tensor, weight: Tensor, scale: float = 3.0) -> dict[str, Tensor]:
    """The loss, and the gradients of scale * loss."""
    dx, dweight = torch.autograd.grad(loss * scale, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def by_the_formula(x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, scale: float = 3.0) -> dict:
    """torch's cross-entropy of logits in dtype."""
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    logits = (x @ weight.T).to(torch.promote_types(dtype, torch.float32))
    return of(F.cross_entropy(logits, targets, ignore_index=IGNORE), x, weight, scale)


@pytest.fixture(params=["torch", KERNEL])
def path(request, monkeypatch) -> str:
    """Both paths, one after the other, in chunks of 16 tokens."""
    monkeypatch.setattr(loss_module, "runs_kernels", lambda device: request.param == "kernel")
    monkeypatch.setattr(loss_module, "CHUNK", 16)
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 16)
    return request.param


@pytest.mark.parametrize(("n", "ignored"), [(1, 0), (16, 5), (40, 0), (40, 5)])
def test_it_is_cross_entropy_in_value_and_gradient(n, ignored, path):
    """One short chunk, one full, several and a rest."""
    x, weight, targets = problem(n)
    targets[:ignored] = IGNORE
    found, right = of(next_token_loss(x, weight, targets), x, weight), by_the_formula(x, weight, targets, torch.float64)
    assert_float64_right(found, right, terms=31)


@pytest.mark.parametrize("V", [31, 257, 8193, 50_304, *([4096, 50_257] if CUDA else [])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_within_twice_torchs_error(dtype, V, path):
    """Vocabularies that fill a block of the kernel, cut one, and need two, of which the last has some maxima."""
    x, weight, targets = problem(20, dtype, V)
    weight.data[-1] *= 8
    targets[3], targets[4], targets[5] = IGNORE, 0, V - 1
    naive, right = (by_the_formula(x, weight, targets, of_logits) for of_logits in (dtype, torch.float64))
    assert_within_budget(of(next_token_loss(x, weight, targets), x, weight), naive, right)


def test_in_fp16_a_scaled_loss_keeps_a_gradient_that_the_mean_alone_would_round_away():
    """Each entry of the mean's gradient over 65,536 tokens is below 2e-5, and fp16 has steps of 6e-8 there. The scale,
    65,536, is infinity in fp16."""
    x, weight, targets = problem(65536, torch.float16, V=64, C=8)
    found = of(next_token_loss(x, weight, targets), x, weight, 65536.0)
    naive, right = (by_the_formula(x, weight, targets, dtype, 65536.0) for dtype in (torch.float16, torch.float64))
    assert_within_budget(found, naive, right)


def test_in_fp16_the_heads_gradient_does_not_overflow_in_the_sum_over_tokens():
    """The sum is 12 million, in the unit of NextTokenLoss 96,000, and fp16 ends at 65,504."""
    x = torch.full((65536, 4), 200.0, device=DEVICE).half()
    weight = torch.zeros(16, 4, device=DEVICE).half().requires_grad_()
    loss = next_token_loss(x, weight, torch.zeros(65536, dtype=torch.int64, device=DEVICE))
    (dweight,) = torch.autograd.grad(loss, weight)
    assert dweight[0].tolist() == [200.0 * (1 / 16 - 1)] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's in the interpreter
def test_large_logits_do_not_overflow(path):
    x, weight, targets = problem(8, torch.float32)
    assert next_token_loss(x * 1e4, weight, targets).isfinite()


def test_without_a_token_that_counts_the_mean_is_nan(path):
    x, weight, _ = problem(3, torch.float32)
    assert next_token_loss(x, weight, torch.full((3,), IGNORE, device=DEVICE)).isnan()


def test_without_gradients_the_value_is_the_same_and_no_gradient_is_computed(path):
    """A parameter needs a gradient under no_grad too, so evaluation might pay for one that nobody reads."""
    x, weight, targets = problem(20, torch.float32, V=512, C=64)
    with torch.no_grad(), PeakBytes() as counted:
        found = next_token_loss(x, weight, targets)
    assert torch.equal(found, next_token_loss(x, weight, targets).detach())
    assert path == "kernel" or counted.peak < weight.numel() * 4


def test_the_logits_of_one_chunk_are_freed_before_the_next_ones_are_made(path, monkeypatch):
    x, weight, targets = problem(64, torch.float32, V=2048, C=2)
    if path == "kernel" and not CUDA:  # the interpreter works on copies
        monkeypatch.setattr("kernels.loss.loss_in_place", lambda logits, *_: logits[:, 0].clone())
    with PeakBytes() as counted:
        next_token_loss(x, weight, targets)
    assert 1 <= counted.peak / (16 * 2048 * 4) - (path == "torch") < 2  # log_softmax has a result of its own


def test_under_autocast_products_are_bf16_and_the_sum_is_float32():
    x, weight, targets = problem(8, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = next_token_loss(x, weight, targets)
    rounded = x.bfloat16(), weight.bfloat16(), targets
    assert loss.dtype == torch.float32
    assert torch.equal(loss, next_token_loss(*rounded))
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


def test_a_second_derivative_is_refused():
    x, weight, targets = problem(8)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(next_token_loss(x, weight, targets), x, create_graph=True)
