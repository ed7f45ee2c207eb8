"""The float64 oracle, and the only tolerances there are.

The oracle shares no code with model/attention.py, model/tiled.py, model/mask.py and the kernels: it would share their
mistakes. Its gradients are the formulas, written out, and its mask is computed one pair at a
time. Only the dropout mask is model/dropout.py's, which tests/test_dropout.py compares with keep() below.

A budget is computed, never chosen. An implementation may have twice the error of naive in the same dtype, plus twice
the rounding of the largest result: error <= 2 (error of naive + eps max |reference|). The bits of a product depend on
its shapes, layouts and processor, so tests compare bits only where all three are the same.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model.attention import AttentionConfig, attention
from model.dropout import keep_mask
from model.mask import spans_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = 0x1234_5678_9ABC
BLOCK = 32
# Neither square nor regular. No row sees one of the columns of blocks, and one of the rows sees nothing.
PICTURE = ("x......", ".......", "x.x.x..", "xx.x...", "..x.x..", "x....x.", "xxxx.xx")


@dataclass(frozen=True)
class Case:
    """One attention problem. T query rows, T_k key rows (None: as many), H_kv key heads (None: H)."""

    T: int
    T_k: int | None = None
    B: int = 2
    H: int = 2
    H_kv: int | None = None
    D: int = 32
    causal: bool = True
    window: int | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    documents: tuple[int, ...] | str | None = None  # their lengths, T_k together; "shuffled": numbers come again
    blocks: tuple[str, ...] | None = None  # attention.block_mask, in blocks of BLOCK
    alibi: bool = False
    softcap: float | None = None
    sigma: float = 1.0  # standard deviation of q and k; that of the scores is its square

    @property
    def keys(self) -> int:
        return self.T if self.T_k is None else self.T_k

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """q, k, v, do, dlse: normal numbers, rounded to dtype once, so that all implementations get the same."""
        generator = torch.Generator().manual_seed(seed)
        of_q, of_k = (self.B, self.H, self.T, self.D), (self.B, self.H_kv or self.H, self.keys, self.D)
        shapes = {"q": of_q, "k": of_k, "v": of_k, "do": of_q, "dlse": of_q[:3]}
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        made["q"] *= self.sigma
        made["k"] *= self.sigma
        wide = torch.promote_types(dtype, torch.float32)
        return {name: x.to(wide if name == "dlse" else dtype).to(device) for name, x in made.items()}

    def document_numbers(self) -> Tensor | None:
        """int64 (B, T_k): 3, 5, 7, ... Every other sequence has the lengths in reverse order."""
        if self.documents is None:
            return None
        if self.documents == "shuffled":
            numbers = torch.randint(3, (self.B, -(-self.keys // 13)), generator=torch.Generator().manual_seed(2))
            return numbers.repeat_interleave(13, dim=1)[:, : self.keys]
        numbers = 3 + 2 * torch.arange(len(self.documents))
        lengths = [torch.tensor(self.documents[:: -1 if b % 2 else 1]) for b in range(self.B)]
        return torch.stack([numbers.repeat_interleave(of_one) for of_one in lengths])

    def spans(self, device: torch.device | str) -> Tensor | None:
        """The documents as attention() takes them, spans_of()."""
        numbers = self.document_numbers()
        return None if numbers is None else spans_of(numbers.to(device))

    def configure(self, config: AttentionConfig) -> AttentionConfig:
        """config with the options of this case."""
        names = ("window", "dropout_p", "alibi", "softcap", "softmax_scale")
        given = {name: getattr(self, name) for name in names}
        return replace(config, **given, block_mask=self.blocks and list(self.blocks), block_mask_size=BLOCK)


# Odd on purpose: one row, primes, more keys than queries and the other way round (rows that see nothing), no tile size
# that divides, head sizes that are no power of two.
CASES = [
    Case(2), Case(97), Case(128, D=64), Case(113, 203), Case(203, 113), Case(1, 97), Case(97, causal=False),
    Case(113, 203, causal=False, D=24), Case(130, window=2), Case(130, window=37), Case(203, 113, window=20),
    Case(113, 203, causal=False, window=40), Case(203, 113, causal=False, window=15), Case(96, H=6, H_kv=2),
    Case(97, H=4, H_kv=1, window=50, D=40), Case(130, dropout_p=0.1),
    Case(113, 203, B=1, H=4, H_kv=2, window=64, dropout_p=0.5), Case(97, softmax_scale=0.3), Case(150, sigma=4.0),
    Case(130, documents=(1, 40, 0, 87, 2)), Case(97, documents=(20, 77), causal=False),
    Case(60, 130, documents=(33, 64, 33), H=4, H_kv=2), Case(130, documents="shuffled"),
    Case(130, documents="shuffled", causal=False), Case(130, blocks=PICTURE),
    Case(113, 203, blocks=PICTURE, causal=False, H=2, H_kv=1), Case(203, 113, blocks=PICTURE, D=24, causal=False),
    Case(113, alibi=True, H=8, D=16, B=1), Case(97, 150, alibi=True, H=6, H_kv=2, D=16, B=1),
    Case(97, alibi=True, H=1, causal=False), Case(130, softcap=2.0, sigma=2.0),
    Case(113, 203, softcap=0.7, softmax_scale=0.5, dropout_p=0.2), Case(5, 97, window=20),
    # All of it at once. Other kernels' issue trackers are full of pairs that break.
    Case(131, documents=(17, 50, 64), window=40, B=1, H=6, H_kv=2, D=24, dropout_p=0.25, alibi=True),
    Case(77, 131, documents=(17, 50, 64), window=33, H=4, H_kv=2, D=40, dropout_p=0.1, alibi=True, softcap=3.0,
         blocks=PICTURE),
]  # fmt: skip
# What torch's own function can do as well. (Of scores of 30 and more each of the two rounds more somewhere.)
OWN = ("window", "dropout_p", "documents", "blocks", "alibi", "softcap")
FOR_SDPA = [c for c in CASES if c.sigma == 1 and not any(getattr(c, name) for name in OWN)]


def case_name(case: Case) -> str:
    return "-".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(Case(0), k))


def sees(i: int, j: int, case: Case, documents: list[int] | None) -> bool:
    """Whether query row i sees key j. documents: of the keys, in runs; the last row is at the last key."""
    position = i + case.keys - case.T
    if case.causal and j > position:
        return False
    if documents is not None and len(set(documents[min(position, j) : max(position, j) + 1])) > 1:
        return False
    if case.blocks is not None and case.blocks[max(position, 0) // BLOCK][j // BLOCK] != "x":
        return False
    return case.window is None or abs(position - j) < case.window


@cache
def visible(case: Case) -> Tensor:
    """bool (B, T, T_k): sees(), of every pair."""
    numbers = case.document_numbers()
    found = []
    for b in range(case.B):
        documents = None if numbers is None else numbers[b].tolist()
        found.append([[sees(i, j, case, documents) for j in range(case.keys)] for i in range(case.T)])
    return torch.tensor(found).view(case.B, case.T, case.keys)


def slopes(H: int) -> list[float]:
    """As the paper has them (arXiv 2108.12409): a geometric sequence from 2**(-8/H) with this ratio. For other numbers
    of heads, the sequence of the next lower power of two, then every other one of the next higher."""
    if H & (H - 1) == 0:
        return [(2 ** (-8 / H)) ** (i + 1) for i in range(H)]
    below = 1 << H.bit_length() - 1
    return slopes(below) + slopes(2 * below)[0::2][: H - below]


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> list[int]:
    """Philox 4x32 in Python's own integers, which do not overflow."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def keep(seed: int, n: int, row: int, column: int, dropout_p: float) -> bool:
    """Whether one weight is kept, by the definition at the head of model/dropout.py."""
    without = [(x >> 5) << 3 | (x & 7) for x in (row, column)]
    words = philox((without[0], without[1], n, 0), (seed % (1 << 32), (seed >> 32) % (1 << 32)), rounds=7)
    return words[(row >> 3) & 3] >> 8 * ((column >> 3) & 3) & 255 >= round(256 * dropout_p)


def oracle(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv in float64 for the gradients do and dlse, from the formulas."""
    q, k, v, do, dlse = (inputs[name].cpu().double() for name in ("q", "k", "v", "do", "dlse"))
    (B, H, T, D), (_, H_kv, T_k, _) = q.shape, k.shape
    head = torch.arange(H) // (H // H_kv)  # the key head of each query head
    k, v = k[:, head], v[:, head]
    scale = D**-0.5 if case.softmax_scale is None else case.softmax_scale
    s, bend = torch.einsum("bhid,bhjd->bhij", q, k) * scale, torch.ones(())
    if case.softcap is not None:
        bend = 1 - torch.tanh(s / case.softcap) ** 2
        s = case.softcap * torch.tanh(s / case.softcap)
    if case.alibi:
        distance = (torch.arange(T)[:, None] + T_k - T - torch.arange(T_k)).abs()
        s = s - torch.tensor(slopes(H), dtype=torch.float64)[:, None, None] * distance
    s = s.masked_fill(~visible(case)[:, None], -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)  # rows that see nothing: exp(-inf - -inf)
    z = torch.ones(())
    if case.dropout_p:
        kept = keep_mask(torch.tensor(SEED), B * H, range(T), range(T_k), case.dropout_p)
        z = kept.view(p.shape).double() / (1 - round(256 * case.dropout_p) / 256)
    o = torch.einsum("bhij,bhjd->bhid", z * p, v)

    dv = torch.einsum("bhij,bhid->bhjd", z * p, do)
    dp = z * torch.einsum("bhid,bhjd->bhij", do, v)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None]) * bend
    dq = torch.einsum("bhij,bhjd->bhid", ds, k) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, q) * scale
    group = torch.nn.functional.one_hot(head, H_kv).double()  # the gradients of a shared key head add up
    dk, dv = (torch.einsum("bhjd,hg->bgjd", x, group) for x in (dk, dv))
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run(inputs: dict[str, Tensor], case: Case, config: AttentionConfig, **options) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv by attention(). sdpa has no lse."""
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
    has_lse = config.impl != "sdpa"
    options = {"causal": case.causal, "seed": torch.tensor(SEED, device=q.device)} | options
    options["spans"] = case.spans(q.device)
    found = attention(q, k, v, case.configure(config), return_lse=has_lse, **options)
    o, lse = found if has_lse else (found, None)
    outputs, gradients = [o], [inputs["do"]]
    if lse is not None:  # where a row sees nothing, lse = -inf has no gradient
        outputs, gradients = [o, lse], [inputs["do"], inputs["dlse"].masked_fill(lse == -torch.inf, 0.0)]
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), gradients)
    results = {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
    return results if lse is None else results | {"lse": lse.detach()}


def error(found: Tensor, reference: Tensor) -> float:
    """The largest absolute difference. Infinite if infinities stand elsewhere, or for NaN."""
    found, reference = found.detach().cpu().double(), reference.cpu().double()
    if found.shape != reference.shape or not torch.equal(found.isinf(), reference.isinf()):
        return float("inf")
    difference = largest((found - reference).masked_fill(reference.isinf(), 0.0))
    return difference if difference == difference else float("inf")


def largest(reference: Tensor) -> float:
    return float(reference.masked_fill(reference.isinf(), 0.0).abs().max()) if reference.numel() else 0.0


def assert_within_budget(found: Any, naive: Any, reference: Any) -> None:
    """Each result of found within 2 (naive's error + eps max |reference|), eps of the result's own dtype. All three are
    dicts, or lists of dicts, of several draws of the inputs: then the largest errors are compared."""
    found, naive, reference = ([x] if isinstance(x, dict) else x for x in (found, naive, reference))
    for name in found[0]:
        off, of_naive = (max(error(x[name], r[name]) for x, r in zip(some, reference, strict=True))
                         for some in (found, naive))  # fmt: skip
        rounding = torch.finfo(found[0][name].dtype).eps * max(largest(right[name]) for right in reference)
        assert off <= 2 * (of_naive + rounding), f"{name}: error {off:.3g} > {2 * (of_naive + rounding):.3g}"


def assert_float64_right(found: dict[str, Tensor], reference: dict[str, Tensor], terms: int) -> None:
    """Two evaluations of sums of `terms` products differ by their rounding: terms eps max |reference|."""
    for name, right in reference.items():
        budget = 2 * terms * torch.finfo(found[name].dtype).eps * max(1.0, largest(right))
        assert error(found[name], right) <= budget, f"{name}: error {error(found[name], right):.3g} > {budget:.3g}"
