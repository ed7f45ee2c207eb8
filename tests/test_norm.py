"""Norms with the kernel's backward: what autograd makes of the plain forward. The kernel runs on a GPU, or in the
interpreter."""

import itertools
import math
import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from model import norm as norm_module
from model.attention import AttentionConfig
from model.gpt import GPTConfig
from model.norm import Added, LayerNorm, RMSNorm, add_and_norm, last_norm
from model.recompute import RecomputingGPT
from tests.implementations import CUDA, DEVICE, ON_GPU
from tests.reference import assert_within_budget
from training.record import compiled

pytestmark = ON_GPU
N = 5003 if CUDA else 61  # tokens: not a multiple of any block of rows, and several blocks for a program
MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "residual_dtype": "autocast"}


@pytest.fixture
def kernel(monkeypatch):
    """The path of a GPU."""
    pytest.importorskip("triton", reason="triton is made for Linux")
    monkeypatch.setattr(norm_module, "runs_kernels", lambda device: True)


def inputs(
    C: int, kind: str, stream: torch.dtype, next_dtype: torch.dtype, keep: bool, N: int = N, device: str = DEVICE
) -> tuple:
    """A norm, x, what is added to it, and the gradients of both results. next_dtype: of the layers around the norm."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(C, eps=1e-5) if kind == "rmsnorm" else LayerNorm(C, bias=kind == "layernorm")
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x, value, dres, dy = torch.randn(4, N, C, generator=generator).to(device).unbind()
    kept = torch.rand(N, C, generator=generator).to(device) > 0.25 if keep else None
    x, value = x.to(stream).requires_grad_(), value.to(next_dtype).requires_grad_()
    return norm.to(device), x, Added(value, kept, 0.25 if keep else 0.0), dres.to(stream), dy.to(next_dtype)


def results(norm, x, added, dres, dy) -> dict[str, torch.Tensor]:
    """What add_and_norm() computes, and its gradients."""
    with torch.autocast(x.device.type, dy.dtype, enabled=dy.dtype.itemsize == 2):
        new, y = add_and_norm(norm, x, added)
    y = y.to(dy.dtype)
    names = ["dx", "dadded", *(f"d{name}" for name, _ in norm.named_parameters())]
    found = torch.autograd.grad((new, y), (x, added.value, *norm.parameters()), (dres, dy))
    return {"new": new.detach(), "y": y.detach()} | dict(zip(names, found, strict=True))


def in_float64(norm, x, added, *gradients) -> tuple:
    x, value = (t.detach().double().requires_grad_() for t in (x, added.value))
    return norm.double(), x, added._replace(value=value), *(t.double() for t in gradients)


KINDS = ["layernorm", "layernorm without bias", "rmsnorm"]
DTYPES = [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
CASES = [(200, kind, DTYPES[(i + keep) % 4], keep) for i, kind in enumerate(KINDS) for keep in (False, True)]
CASES += [(200, kind, dtypes, bool(i % 2)) for i, (kind, dtypes) in enumerate(itertools.product(KINDS, DTYPES))]
# With a width of 1, x - mean is 0. A GPU divides with a rounding, which 1 / sqrt(eps) = 316 multiplies.
CASES += [(C, "layernorm", DTYPES[0], True) for C in (7 if CUDA else 1, 7, 768, 2049)]
WIDE = [70, 128, 384, 768, 1600, 2048, 4096, 8192] if CUDA else []
CASES += itertools.product(WIDE, KINDS, DTYPES, (False, True))


@pytest.mark.parametrize(("C", "kind", "dtypes", "keep"), dict.fromkeys(CASES))
def test_gradients_are_within_twice_autograds_error(C, kind, dtypes, keep, kernel, monkeypatch):
    given = inputs(C, kind, *(getattr(torch, name) for name in dtypes), keep)
    found = results(*given)
    monkeypatch.setattr(norm_module, "runs_kernels", lambda device: False)
    plain = results(*given)
    reference = {name: right.cpu() for name, right in results(*in_float64(*given)).items()}
    assert_within_budget(found, plain, reference)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain.items()}


@pytest.mark.parametrize(("C", "N", "programs"), [(384, N, None), (300, 2 * 8 * 33, 33)])
def test_every_row_and_every_row_of_the_table_of_sums_counts_once(C, N, programs, kernel, monkeypatch):
    """dbias is the sum of dy, exact for small integers. A GPU has more programs than sum_kernel reads at a time."""
    if programs:
        monkeypatch.setattr("kernels.norm.processors", lambda device: programs)
    norm, x, added, dres, _ = inputs(C, "layernorm", torch.float32, torch.float32, False, N=N)
    dy = torch.randint(-8, 8, x.shape, device=DEVICE).float()
    assert torch.equal(results(norm, x, added, dres, dy)["dbias"], dy.sum(0))


def test_no_tokens_have_no_gradient(kernel):
    norm, x, added, dres, dy = inputs(24, "layernorm", torch.float32, torch.float32, False)
    found = results(norm, x[:0], added._replace(value=added.value[:0]), dres[:0], dy[:0])
    assert not found["dweight"].any()
    assert not found["dbias"].any()


def test_what_dropout_took_away_has_no_gradient_even_of_infinity(kernel):
    norm, x, added, dres, dy = inputs(24, "layernorm", torch.float32, torch.float32, True)
    found = results(norm, x, added, torch.full_like(dres, math.inf), dy)["dadded"]
    assert torch.equal(found == 0, ~added.keep)


def of_model(backend: str | Callable | None = None, recomputed: bool = False, **fields) -> dict[str, torch.Tensor]:
    """The loss of a small GPT in bf16, and the gradients of its weights."""
    if CUDA:
        pytest.skip("embeddings add in any order on a GPU")
    torch._dynamo.reset()  # or a model of another size is compiled for any size
    torch.manual_seed(0)
    fields = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 64, "vocab_size": 50} | fields
    config = GPTConfig(activation_checkpointing=recomputed, **fields)
    model = RecomputingGPT(config, AttentionConfig("naive"))
    step = compiled(model, partial(torch.compile, backend=backend, fullgraph=True)) if backend else model
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(*torch.randint(50, (2, 2, 40)))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"recomputed": True}, {"dropout_p": 0.2, "n_layer": 2}),
        ({"backend": "aot_eager"}, {"dropout_p": 0.2}),
        ({"backend": "aot_eager", "recomputed": True}, MODERN),
    ],
    ids=["recomputed", "compiled", "both"],
)
def test_a_model_has_the_same_bits_compiled_and_computed_again(changes, fields, kernel):
    fields = {"n_layer": 1} | fields
    eager, found = of_model(**fields), of_model(**changes, **fields)
    assert not [name for name in eager if not torch.equal(found[name], eager[name])]


def test_the_gradient_along_the_stream_goes_from_kernel_to_kernel(kernel, monkeypatch):
    """No addition is between them. Behind the last norm there is no such gradient, and no zeros stand for it."""
    calls = []

    def recorded(dy, dres, *rest):
        found = by_kernel(dy, dres, *rest)
        calls.append((dres, found[0]))
        return found

    by_kernel = norm_module.by_kernel
    monkeypatch.setattr(norm_module, "by_kernel", recorded)
    of_model()
    assert len(calls) == 5
    assert calls[0][0] is None
    for (_, dx), (dres, _) in itertools.pairwise(calls):
        assert dres.data_ptr() == dx.data_ptr()


@pytest.mark.slow
def test_compiled_the_gradient_along_the_stream_goes_from_op_to_op(kernel):
    graphs = []

    def kept(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    of_model(aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=kept))
    ends, between = [], []
    for graph in graphs:
        calls = [node for node in graph.nodes if "norm_backward" in str(node.target)]
        if calls:  # in the graph of the embedding none
            (output,) = graph.find_nodes(op="output")
            ends.append((calls[0].args[1], calls[-1] in [dx.args[0] for dx in output.args[0] if dx is not None]))
            between += itertools.pairwise(calls)
    assert [(dres and dres.op, is_result) for dres, is_result in ends] == [(None, True), *[("placeholder", True)] * 2]
    assert len(between) == 2
    for before, call in between:
        dres = call.args[1]
        assert (dres.target, *dres.args) == (operator.getitem, before, 0)


@pytest.mark.parametrize("last", [False, True], ids=["stream", "last"])
def test_without_gradients_and_in_float64_the_forward_is_the_plain_one(last, kernel, monkeypatch):
    norm, x, added, *_ = inputs(24, "layernorm", torch.float32, torch.float32, True)
    monkeypatch.setattr(norm_module, "by_function", None)
    function = last_norm if last else add_and_norm
    with torch.no_grad():
        found = function(norm, x, added)
    new = x + torch.where(added.keep, added.value, 0.0) * (256 / 192)
    wanted = norm(new) if last else (new, norm(new))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)
    function(norm.double(), x.double(), added._replace(value=added.value.double()))
    assert not norm_module.runs_kernel(norm, x.repeat(1, 400))  # too wide for a program
