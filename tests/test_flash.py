"""kernels/flash.py and what launches it: what the kernels read, which tiles they visit, and the op that autograd and
torch.compile see. On a GPU, or in Triton's interpreter: a few milliseconds a tile, whatever its size.
"""

from dataclasses import replace
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lab.meter import Operations
from model.attention import AttentionConfig, alibi_slopes, attention, blocks_of
from model.dropout import keep_mask
from model.mask import packed, visible
from model.recompute import store_attention
from tests import implementations
from tests.implementations import DEVICE, INTERPRETED, NAIVE, ON_GPU, TRITON, exact
from tests.reference import SEED, Case, assert_within_budget, run
from tests.test_attention import same_bits

triton = pytest.importorskip("triton", reason="triton is made for Linux")
from triton import language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from kernels import flash, hopper, launch, op, sizes  # noqa: E402
from kernels.launch import how, in_tiles  # noqa: E402
from kernels.problem import Dropout, Mask, Problem, Task  # noqa: E402
from kernels.sizes import visits_of  # noqa: E402

pytestmark = ON_GPU
sized = implementations.sized


@pytest.mark.parametrize("T", [224, 100], ids=["whole", "cut"])
def test_a_picture_of_tiles_that_are_whole_or_cut_by_the_first_query_is_right_in_bfloat16(sized, T):
    """Where they are whole, the kernel does not look at the blocks."""
    config = sized(TRITON, 32, 32)
    picture = ("xxxxxxx", "xxxx..x", "xxxxxxx", "x.xxxxx", "xxx.xxx", "xxxxx.x", "xx.xxxx")
    case = Case(T, 224, B=1, H=1, D=16, causal=False, blocks=picture)
    inputs = case.inputs(torch.bfloat16, DEVICE)
    assert_within_budget(run(inputs, case, config), run(inputs, case, NAIVE), exact(inputs, case))


@triton.jit
def bits_kernel(out, seed, n, row0, column0, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = flash.keep_mask(Dropout(seed, threshold, 0.0), n, row0, column0, i, j)
    tl.store(out + i * COLUMNS + j, mask)


@INTERPRETED
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_rows_and_columns_past_two_to_the_twenty_have_the_bits_of_the_definition(seed):
    seed = torch.tensor(seed)
    for n, row0, column0 in ((0, 0, 0), (3, 2**20 + 32, 64), (1, 96, 2**20 + 32), (700, 2**21, 2**30)):
        out = torch.empty(64, 128, dtype=torch.bool)
        bits_kernel[(1,)](out, seed, n, row0, column0, 77, 64, 128)
        right = keep_mask(seed, n + 1, range(row0, row0 + 64), range(column0, column0 + 128), 77 / 256)[n]
        assert torch.equal(out, right)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_an_interleaved_view_is_read_where_it_lies():
    """And so are rows with others before and after them, and with a gap between them."""
    q, k, v = torch.empty(2, 70, 3 * 2 * 24, dtype=torch.float16).unflatten(-1, (6, 24)).transpose(1, 2).split(2, dim=1)
    for x in (q, k, v, torch.empty(2, 2, 198, 32, dtype=torch.float16)[:, :, 64:-64, :24]):
        assert launch.aligned(x) is x


@INTERPRETED
@pytest.mark.parametrize("descriptors", [True, False])
def test_rows_that_begin_past_two_to_the_31_numbers_are_found(descriptors, monkeypatch):
    """A packed projection's row stride of 2,304 passes 32 bits at 932,067 tokens; here 2**25 does at 64.

    Pages are mapped as they are touched, so the 9 GB cost next to nothing; without MAP_NORESERVE a machine of less
    memory would refuse them. The rows begin 2**31 numbers into them: an offset that wraps then reads zeros, and fails
    the comparison instead of ending the process.
    """
    monkeypatch.setattr(sizes, "has_descriptors", lambda device: descriptors)
    noreserve = 0x4000  # mmap has its name from Python 3.13 on
    case = Case(70, B=1, H=1, D=16)
    inputs = case.inputs(torch.float16)
    far = dict(inputs)
    for name in ("q", "k", "v", "do"):
        held = mmap(-1, 2 * (2**31 + 70 * 2**25), MAP_PRIVATE | MAP_ANONYMOUS | noreserve)
        lazily = torch.frombuffer(held, dtype=torch.float16)
        far[name] = lazily.as_strided((1, 1, 70, 16), (16, 16, 2**25, 1), 2**31)
        far[name].copy_(inputs[name])
        assert launch.aligned(far[name]) is far[name]
    assert same_bits(run(far, case, TRITON), run(inputs, case, TRITON))


def test_a_picture_painted_over_is_read_again():
    q = Case(128, B=1, H=1, D=16).inputs(torch.float32, DEVICE)["q"]

    def seen_through(blocks: torch.Tensor) -> torch.Tensor:
        return op.flash_attention(q, q, q, Problem.of(128, 128, scale=0.25, blocks=blocks, block_size=64))[0]

    for inference in (False, True):
        with torch.inference_mode(inference):
            blocks = torch.eye(2, dtype=torch.bool, device=DEVICE)
            seen_through(blocks)
            blocks.fill_(True)
            assert torch.equal(seen_through(blocks), seen_through(blocks.clone()))


def test_a_picture_and_slopes_first_used_in_inference_mode_can_be_trained_with():
    config = AttentionConfig("triton", block_mask=["x.", "xx"], block_mask_size=37, alibi=True)
    q = torch.randn(1, 2, 50, 16, device=DEVICE, requires_grad=True)
    blocks_of.cache_clear(), alibi_slopes.cache_clear()
    with torch.inference_mode():
        attention(q, q, q, config)
    attention(q, q, q, config).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 3, 70, 64), (1, 1, 1, 24), (2, 2, 130, 256)], ids=str)
def test_a_descriptor_that_goes_around_the_checks_is_one_as_triton_makes_it(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    found, width = in_tiles(x, 64), max(16, 1 << (shape[3] - 1).bit_length())
    strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:3], shape[:3], strict=True)]
    assert type(found) is TensorDescriptor
    assert vars(found) == vars(TensorDescriptor(x, list(shape), [*strides, 1], [1, 1, 64, width]))


# --- autograd, torch.compile -----------------------------------------------------------------------------------------


def test_a_second_derivative_through_the_op_is_refused():
    q = torch.randn(1, 1, 8, 16, device=DEVICE, requires_grad=True)
    with FlopCounterMode(display=False):
        (dq,) = torch.autograd.grad(attention(q, q, q, TRITON).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="attention=triton has no second derivative"):
            torch.autograd.grad(dq.sum(), q)


def test_the_op_is_registered_as_torch_wants_it():
    """Its schema, its fake (shapes and strides), and both traced with symbolic shapes."""
    q, k, v = (Case(8, B=1, H=1, D=16).inputs(torch.float32, DEVICE)[name] for name in "qkv")
    seed, row = torch.tensor(SEED, device=DEVICE), q.new_zeros(1, 1, 8)
    description = *Problem.of(8, 8, scale=0.25, window=21, seed=seed, drop_threshold=77).fields, False, "auto"
    torch.library.opcheck(torch.ops.tilegpt.flash_forward.default, ([q, k, v], [1, 1], *description))
    for inputs in ([q, k, v], [torch.randn(1, 8, 3 * 16, device=DEVICE)]):
        given = inputs, [1, 1], q, row, q, row, *description
        torch.library.opcheck(torch.ops.tilegpt.flash_backward.default, given)


def side_by_side(D: int, whole: bool, through=lambda f: f) -> tuple[torch.Tensor, torch.Tensor]:
    """o of q, k and v that are views of one tensor, with grouped heads, and that tensor's gradient. through: wraps the
    function."""
    generator = torch.Generator(DEVICE).manual_seed(0)  # .to(DEVICE) would be counted as a copy
    qkv = torch.randn(2, 40, 4 * D, generator=generator, device=DEVICE, requires_grad=True)
    config, seed = replace(TRITON, window=30, dropout_p=0.2), torch.tensor(SEED, device=DEVICE)

    def attend(qkv):
        q, k, v = op.heads_of([qkv], (2, 1))
        return attention(q, k, v, config, seed=seed, qkv=qkv if whole else None)

    o = through(attend)(qkv)
    return o.detach(), *torch.autograd.grad(o.sin().sum(), qkv)


KEEP = partial(create_selective_checkpoint_contexts, store_attention)
THROUGH = {
    "eager": lambda f: f,
    "compiled": partial(torch.compile, fullgraph=True, backend="aot_eager"),
    "again": lambda f: partial(checkpoint, f, use_reentrant=False),
    "selective": lambda f: partial(checkpoint, f, use_reentrant=False, context_fn=KEEP),
}


@pytest.mark.parametrize(("through", "D"), [(way, 16) for way in THROUGH] + [("eager", 18)])
def test_gradients_side_by_side_have_the_bits_of_those_put_together(through, D):
    """However it is called: compiled, or computed again in a checkpoint, where the same mask has to be drawn."""
    for found, right in zip(side_by_side(D, True, THROUGH[through]), side_by_side(D, False), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("through", THROUGH)
def test_the_kernels_are_chosen_by_the_same_problem(through, monkeypatch):
    """An op turns tuples into lists, and then a compiled step had the portable backward where eager had Hopper's."""
    reasons = []
    decide = hopper.why_not
    monkeypatch.setattr(hopper, "why_not", lambda *args: reasons.append(decide(*args)) or reasons[-1])
    # the head size is all that it lacks
    q = torch.randn(1, 1, 8, 80, device=DEVICE, dtype=torch.float16, requires_grad=True)
    THROUGH[through](lambda q: attention(q, q, q, AttentionConfig("triton")))(q).sum().backward()
    assert len(set(reasons)) == 1
    assert reasons[0]
    assert len(reasons) >= 2


def test_nothing_puts_gradients_together_that_lie_side_by_side():
    """The kernels write into the one tensor that the projection reads. A head size of 18 has no such rows."""
    counts = []
    for D, whole in ((16, True), (16, False), (18, True)):
        names = []
        with Operations(lambda op, *_, names=names: names.append(str(op))):
            side_by_side(D, whole)
        words = ("cat", "copy", "clone", "slice_backward", "add")
        counts.append(sum(any(word in name for word in words) for name in names))
    assert counts[0] == 0 < min(counts[1:])


def test_a_selective_checkpoint_runs_the_kernels_once():
    with patch.object(launch, "forward", wraps=launch.forward) as forwards:
        side_by_side(16, True, THROUGH["selective"])
    assert forwards.call_count == 1


# --- which tiles are visited -----------------------------------------------------------------------------------------


def seen_pairs(mask: Mask) -> torch.Tensor:
    """Which pairs a mask lets see each other, bool (B, T, T_k)."""
    problem = Problem.of(mask.T, mask.T_k)._replace(mask=mask)
    return visible(problem, range(mask.T), range(mask.T_k), torch.device("cpu"))


@triton.jit
def tiles_kernel(out, task, n_mine, TRANSPOSED: tl.constexpr, how: tl.constexpr):
    b, tile = tl.program_id(0) // n_mine, tl.program_id(0) % n_mine
    found = flash.query_tiles(task, b, tile, how) if TRANSPOSED else flash.key_tiles(task, b, tile, how)
    for i in tl.static_range(5):
        tl.store(out + tl.program_id(0) * 5 + i, found[i])


def answers(mask: Mask, M: int, N: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the kernels: which tiles are visited, which of them are called whole. bool (B, row tiles, key tiles)."""
    B = 1 if mask.documents_q is None else len(mask.documents_q)
    mine, others = -(-mask.T // M), -(-mask.T_k // N)
    mine, others = (others, mine) if transposed else (mine, others)
    visits, out = visits_of(mask, M, N, transposed), torch.empty(B, mine, 5, dtype=torch.int64)
    task, kind = Task(mask, None, None, visits, 1.0, 1, 1), how(M, N, 16, "ieee", (), False)
    tiles_kernel[(B * mine,)](out, task, mine, transposed, kind)
    visited, whole = (torch.zeros(B, mine, others, dtype=torch.bool) for _ in range(2))
    for at in torch.cartesian_prod(torch.arange(B), torch.arange(mine)).tolist():
        start, whole_start, whole_stop, stop, first = out[tuple(at)].tolist()
        order = torch.arange(others) if visits.tiles is None else visits.tiles.flatten()[first : first + others].long()
        visited[(*at, order[start:stop])] = True
        whole[(*at, order[whole_start:whole_stop])] = True
    return (visited.mT, whole.mT) if transposed else (visited, whole)


def tiles_of(seen: torch.Tensor, M: int, N: int, beyond: bool) -> torch.Tensor:
    """bool (B, T, T_k) to (B, row tiles, key tiles, M, N), `beyond` where a tile reaches past the end."""
    T, T_k = seen.shape[1:]
    padded = torch.nn.functional.pad(seen, (0, -T_k % N, 0, -T % M), value=beyond)
    return padded.unflatten(1, (-1, M)).unflatten(3, (-1, N)).transpose(2, 3)


def random_mask(draw: torch.Generator, kind: str) -> Mask:
    T, T_k = torch.randint(40, 300, (2,), generator=draw).tolist()
    if kind == "sorted documents" and torch.rand((), generator=draw) < 0.5:
        T_k = T
    window = int(torch.randint(1, 150, (), generator=draw))
    rules = [{}, {"window": window}, {"window": window, "causal": False}, {"causal": False}]
    found = dict(rules[int(torch.randint(4, (), generator=draw))])
    if "documents" in kind:
        numbers = torch.randint(6, (2, max(T, T_k)), generator=draw)
        numbers = numbers.sort(-1).values if "sorted" in kind else numbers
        found |= {"documents_q": numbers[:, -T:], "documents_k": numbers[:, -T_k:]}
    if kind == "pack":
        cu_q, cu_k = (torch.randint(n + 1, (3,), generator=draw).sort().values.tolist() for n in (T, T_k))
        found |= packed(torch.tensor([0, *cu_q, T]), torch.tensor([0, *cu_k, T_k]), T, T_k)._asdict()
    if "blocks" in kind:
        found |= {"blocks": torch.rand(12, 12, generator=draw) < 0.4, "block_size": 32}
    return Problem.of(T, T_k, **found).mask


KINDS = ["no data", "sorted documents", "unsorted documents", "pack", "blocks", "blocks and documents"]


@INTERPRETED
@pytest.mark.parametrize("transposed", [False, True], ids=["of queries", "of keys"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_pair_is_missed_and_no_tile_called_whole_that_hides_one(kind, transposed):
    """Nor is a tile visited for nothing where documents are in order and there is no window: where one meets the
    documents' edges, a tile may hold a pair for each and none for both."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask, (M, N) = random_mask(draw, kind), 2 ** torch.randint(4, 8, (2,), generator=draw)
        visited, whole = answers(mask, int(M), int(N), transposed)
        seen = seen_pairs(mask)
        wanted = tiles_of(seen, M, N, False).any(-1).any(-1)
        assert not (wanted & ~visited).any()
        assert kind != "sorted documents" or mask.at_least is not None or torch.equal(visited, wanted)
        # Columns past the last must be hidden one by one; rows past the last weigh nothing, and need not be.
        real = tiles_of(torch.ones_like(seen), M, N, False).any(3, keepdim=True)
        hides = ~tiles_of(seen, M, N, True) & real if transposed else ~(tiles_of(seen, M, N, True))
        assert not (hides.any(-1).any(-1) & whole).any()


@INTERPRETED
@pytest.mark.parametrize("document", [3, 550])
def test_a_document_is_found_among_more_tiles_than_are_looked_at_at_once(document):
    numbers = torch.arange(600).repeat_interleave(16)[None]
    mask = Problem.of(16, 9600, causal=False, documents_q=torch.full((1, 16), document), documents_k=numbers).mask
    assert answers(mask, 16, 16, False)[0].flatten().nonzero().tolist() == [[document]]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["rising", "unsorted"])
def test_documents_of_the_largest_numbers_are_those_of_small_ones(order, sized):
    """Ids that are hashes: the difference of two wrapped in 64 bits, and the tiles of both were passed over."""
    config = sized(TRITON, 32, 32)
    q, k, v = (Case(100, B=1, H=1, D=16).inputs(torch.float32, DEVICE)[name] for name in "qkv")
    small = torch.tensor(order).repeat_interleave(torch.tensor([20, 50, 30]))[None]
    large = torch.tensor([-(2**63), 5, 2**63 - 1])[small]
    found, expected = (attention(q, k, v, config, documents=x.to(DEVICE)) for x in (large, small))
    assert torch.equal(found, expected)
