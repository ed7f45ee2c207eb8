"""The chunked loss is cross-entropy, in value and gradient, without the table. The kernel runs on a GPU, or in the
interpreter."""

import pytest
import torch
import torch.nn.functional as F

from lab.meter import PeakBytes
from model import loss as loss_module
from model.loss import IGNORE, next_token_loss
from tests.implementations import CUDA, DEVICE, ON_GPU
from tests.reference import DTYPES, assert_float64_right, assert_within_budget

pytestmark = ON_GPU


def problem(n: int, dtype=torch.float64, V: int = 31, C: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, C, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for rows in (n, V))
    targets = torch.randint(V, (n,), generator=generator).to(DEVICE)
    return x.requires_grad_(), weight.requires_grad_(), targets


def of(loss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: float = 3.0) -> dict[str, torch.Tensor]:
    """The loss, and the gradients of scale * loss."""
    dx, dweight = torch.autograd.grad(loss * scale, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def by_the_formula(x, weight, targets, z_loss: float = 0.0) -> dict[str, torch.Tensor]:
    """The penalty is in the gradient only."""
    logits = x @ weight.T
    penalty = z_loss * logits.logsumexp(-1)[targets != IGNORE].square().mean()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    return of(loss + penalty, x, weight) | {"loss": loss.detach()}


@pytest.fixture
def kernel(monkeypatch):
    """The kernel itself, and the path of a GPU."""
    pytest.importorskip("triton", reason="triton is made for Linux")
    from kernels.loss import loss_in_place

    monkeypatch.setattr(loss_module, "has_loss_kernel", lambda x: True)
    return loss_in_place


@pytest.fixture(params=["torch", "kernel"])
def path(request, monkeypatch):
    """Both paths, one after the other."""
    if request.param == "kernel":
        request.getfixturevalue("kernel")
    else:
        monkeypatch.setattr(loss_module, "has_loss_kernel", lambda x: False)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(("n", "ignored"), [(1, 0), (16, 5), (40, 0), (40, 5)])
def test_is_cross_entropy_in_value_and_gradient(n, ignored, z_loss, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK", 16)  # one short chunk, one full, several and a rest
    x, weight, targets = problem(n)
    targets[:ignored] = IGNORE
    found = of(next_token_loss(x, weight, targets, z_loss), x, weight)
    assert_float64_right(found, by_the_formula(x, weight, targets, z_loss), terms=31)


def test_in_fp16_a_scaled_loss_keeps_a_gradient_that_the_mean_alone_would_round_away():
    """The gradient was divided by the number of tokens, in fp16, before the scale could come with the backward: of
    65,536 tokens' mean every entry is below 2e-5, and most of them became 0 or the nearest of a few steps of 6e-8. The
    scale, 65,536, was itself infinity in fp16."""
    x, weight, targets = problem(65536, torch.float16, V=64, C=8)
    found = of(next_token_loss(x, weight, targets), x, weight, 65536.0)
    naive = of(F.cross_entropy((x @ weight.T).float(), targets), x, weight, 65536.0)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    assert_within_budget(found, naive, of(F.cross_entropy(x64 @ weight64.T, targets), x64, weight64, 65536.0))


def test_in_fp16_the_heads_gradient_does_not_overflow_in_the_sum_over_a_chunk():
    """8,192 tokens that all want the same symbol, x of 30: their sum is 245,760, and fp16 ends at 65,504."""
    x = torch.full((8192, 4), 30.0, device=DEVICE).half()
    weight = torch.zeros(16, 4, device=DEVICE).half().requires_grad_()
    loss = next_token_loss(x, weight, torch.zeros(8192, dtype=torch.int64, device=DEVICE))
    (dweight,) = torch.autograd.grad(loss, weight)
    assert dweight[0].tolist() == [30.0 * (1 / 16 - 1)] * 4


def test_without_gradients_the_value_is_the_same(path):
    x, weight, targets = problem(20, torch.float32)
    with torch.no_grad():
        found = next_token_loss(x, weight, targets)
    assert torch.equal(found, next_token_loss(x, weight, targets).detach())


def test_rows_that_are_no_symbols_do_not_count_and_get_no_gradient(path, monkeypatch):
    """vocab_multiple adds rows to make products faster. The softmax took in their logits, so the loss was that of a
    larger vocabulary, 0.07 above after four steps. Their values, however large, are not in it."""
    monkeypatch.setattr(loss_module, "CHUNK", 16)
    x, weight, targets = problem(40, torch.float32)
    targets[3] = IGNORE
    padded = torch.cat((weight, 100 * torch.ones_like(weight[:17]))).detach().requires_grad_()

    def right(dtype):
        return by_the_formula(*(t.detach().to(dtype).requires_grad_() for t in (x, weight)), targets, 0.1)

    found = of(next_token_loss(x, padded, targets, 0.1, 31), x, padded)
    assert not found["dweight"][31:].any()
    found["dweight"] = found["dweight"][:31]
    assert_within_budget(found, right(torch.float32), right(torch.float64))
    each = [loss_module.loss_of_each(x.to(t), w.to(t), targets, 31)[0] for w, t in
            ((padded, torch.float32), (weight, torch.float32), (weight, torch.float64))]  # fmt: skip
    assert_within_budget(*({"loss": losses} for losses in each))


def test_without_a_token_that_counts_the_mean_is_nan(path):
    x, weight, _ = problem(3, torch.float32)
    assert next_token_loss(x, weight, torch.full((3,), IGNORE, device=DEVICE)).isnan()


def test_without_gradients_the_heads_gradient_is_not_computed():
    """needs_input_grad is True for a parameter under no_grad too: evaluation paid for a gradient that nobody read."""
    x, weight, targets = problem(4, torch.float32, V=512, C=64)
    with torch.no_grad(), PeakBytes() as counted:
        next_token_loss(x, weight, targets)
    assert counted.peak < weight.numel() * 4


def test_without_gradients_the_kernel_is_not_asked_for_one(kernel, monkeypatch):
    """Its second pass is half of its time."""
    asked = []

    def stand_in(logits, targets, ignore, z_loss, want_gradient):
        asked.append(want_gradient)
        return logits[:, 0].clone()

    monkeypatch.setattr("kernels.loss.loss_in_place", stand_in)
    next_token_loss(*problem(8))
    with torch.no_grad():
        next_token_loss(*problem(8))
    assert asked == [True, False]


def test_large_logits_do_not_overflow(path):
    x, weight, targets = problem(8, torch.float32)
    assert next_token_loss(x * 1e4, weight, targets).isfinite()


def test_under_autocast_products_are_bf16_and_the_sum_is_float32():
    x, weight, targets = problem(8, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = next_token_loss(x, weight, targets)
    rounded = next_token_loss(x.bfloat16(), weight.bfloat16(), targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, rounded)
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


def test_the_logits_of_one_chunk_are_freed_before_the_next_ones_are_made(path, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK", 16)
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 16)
    x, weight, targets = problem(64, torch.float32, V=2048, C=2)
    if loss_module.has_loss_kernel(x):  # the interpreter works on copies
        monkeypatch.setattr("kernels.loss.loss_in_place", lambda logits, *_: logits[:, 0].clone())
    with PeakBytes() as counted:
        next_token_loss(x, weight, targets)
    assert counted.peak < 2 * 16 * 2048 * 4


# --- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [31, 257, 8193, *([65, 4096, 50_257, 50_304] if CUDA else [])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_within_twice_torchs_error(dtype, V, kernel, monkeypatch):
    """Two chunks and a rest; a block that is cut, one that a vocabulary of a power of two and one fills, and two."""
    x, weight, targets = problem(10, dtype, V)
    targets[3], targets[4], targets[5] = IGNORE, 0, V - 1
    monkeypatch.setattr(loss_module, "KERNEL_CHUNK", 4)
    found = of(next_token_loss(x, weight, targets, 0.1), x, weight)
    monkeypatch.setattr(loss_module, "has_loss_kernel", lambda x: False)
    naive = of(next_token_loss(x, weight, targets, 0.1), x, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    assert_within_budget(found, naive, of(next_token_loss(*wide, targets, 0.1), *wide))


def of_logits(kernel, logits: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0) -> list[dict]:
    """Losses and gradients of the very same logits, by the kernel and by torch."""
    written, one = logits.clone(), torch.ones(1, 1).to(logits)
    losses = kernel(written, targets, IGNORE, z_loss, True)
    rows = [
        loss_module.by_torch(one, row[:, None], target.view(1, 1), z_loss, True, logits.shape[1])
        for row, target in zip(logits, targets, strict=True)
    ]
    of_torch = {"losses": torch.cat([loss[0] for loss, _ in rows]), "gradient": torch.cat([row for _, row in rows])}
    return [{"losses": losses, "gradient": written}, of_torch]


@pytest.mark.parametrize("largest", [6e4, 600.0])
def test_logits_at_the_end_of_fp16_are_within_twice_torchs_error(largest, kernel):
    logits = torch.linspace(-largest, largest, 5 * 100, device=DEVICE).half().view(5, 100)
    logits[:, 7] = logits.amax(1) - torch.arange(5, device=DEVICE)
    targets = torch.tensor([0, 99, 50, 7, 7], device=DEVICE)
    found, naive = of_logits(kernel, logits, targets, 0.1)
    assert_within_budget(found, naive, of_logits(kernel, logits.double(), targets, 0.1)[1])


def test_a_shift_of_all_logits_changes_no_bit(kernel):
    """lse of 60,000 is rounded to 1/256 in float32. A kernel that takes it from each logit is wrong by as much."""
    low = torch.randint(-1000, 1000, (5, 300), device=DEVICE) / 256
    high = low + 60_000  # exact
    losses = [kernel(logits, torch.arange(5, device=DEVICE), IGNORE, 0.0, True) for logits in (low, high)]
    assert torch.equal(*losses)
    assert torch.equal(low, high)  # the gradients by now


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of inf - inf
def test_logits_that_overflowed_give_the_infinities_that_torch_has(kernel):
    logits = torch.zeros(6, 100, device=DEVICE)
    logits[1, 3] = logits[2, 3] = torch.inf
    logits[3, 5] = logits[4, 5] = -torch.inf
    logits[5, 8] = torch.nan
    found, naive = of_logits(kernel, logits.half(), torch.tensor([3, 4, 3, 4, 5, 0], device=DEVICE))
    assert found["losses"].isposinf().tolist() == [False, True, False, False, True, False]
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found["losses"]), kind(naive["losses"]))
    rows = [gradient.isnan().any(1).tolist() for gradient in (found["gradient"], naive["gradient"])]
    assert rows[0] == rows[1] == [False, True, True, False, False, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("low", [-1.0, -6e4, -torch.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_lies_lower_than_the_other_weighs_less(first, low, kernel):
    """exp(-inf - m) is NaN while m is -inf as well; exp(m_old - m_new) overflows if m may fall."""
    logits = torch.zeros(1, 2 * 8192, device=DEVICE)
    logits[:, slice(8192) if first else slice(8192, None)] = low
    target = torch.tensor([8192 if first else 8191], device=DEVICE)
    found, naive = of_logits(kernel, logits, target)
    assert_within_budget(found, naive, of_logits(kernel, logits.double(), target)[1])


@pytest.mark.parametrize("target", [100, -7])
def test_a_target_that_is_no_row_gives_nan_and_does_not_read_another_tokens_logit(target, kernel):
    losses = kernel(torch.zeros(3, 100, device=DEVICE), torch.tensor([5, target, 5], device=DEVICE), IGNORE, 0.0, False)
    assert losses.isnan().tolist() == [False, True, False]


def test_without_a_gradient_the_kernel_leaves_the_logits_alone(kernel):
    logits = torch.randn(3, 100, device=DEVICE)
    before = logits.clone()
    kernel(logits, torch.tensor([1, 2, 3], device=DEVICE), IGNORE, 0.1, False)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("V", [1, 31, 257, 4096, 50_257, 50_304])
def test_a_thread_of_the_kernel_has_at_most_16_logits_of_a_block(V):
    pytest.importorskip("triton", reason="triton is made for Linux")
    from kernels.loss import tiles_for

    BLOCK, num_warps = tiles_for(V)
    assert 32 <= BLOCK <= 8192
    assert BLOCK <= 16 * 32 * num_warps


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False], ids=["training", "evaluation"])
def test_compiled_is_one_graph_and_gives_the_same_bits(path, wanted, monkeypatch):
    for name in ("CHUNK", "KERNEL_CHUNK"):
        monkeypatch.setattr(loss_module, name, 16)
    x, weight, targets = problem(20, torch.float32)
    targets %= 29
    targets[3] = IGNORE

    def loss_of(x, weight):
        with torch.autocast(DEVICE, torch.bfloat16), torch.set_grad_enabled(wanted):
            return next_token_loss(x, weight, targets, 0.1, 29)  # the last two rows are no symbols

    torch.compiler.reset()
    losses = loss_of(x, weight), torch.compile(loss_of, fullgraph=True, backend="aot_eager")(x, weight)
    assert torch.equal(*losses)
    if wanted:
        plain, compiled = (torch.autograd.grad(loss, (x, weight)) for loss in losses)
        assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_a_compiler_gets_no_scatter(monkeypatch):
    """scatter_add_ is a kernel of its own, with a pass over the chunk on either side."""
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setattr(loss_module, "has_loss_kernel", lambda x: False)
    names = []

    def note(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    x, weight, targets = problem(20, torch.float32)
    torch.compile(next_token_loss, fullgraph=True, backend=aot_autograd(fw_compiler=note))(x, weight, targets)
    assert "aten.exp.default" in names
    assert not [name for name in names if "scatter_add" in name]
