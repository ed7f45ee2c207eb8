"""The float64 oracle, and the only tolerances there are.

An oracle that shared code with what it judges would share its mistakes, so nothing of model/attention.py is used here:
the gradients are the formulas, written out, and the mask and the dropout bits are computed element by element in Python
integers.

A budget is computed, never chosen: an implementation may be twice as far from the oracle as naive is in the same dtype,
plus twice the rounding of the largest result: error <= 2 * (error of naive + eps * max |reference|).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from model.attention import AttentionConfig, attention
from model.break_it import BreakIt

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
    documents: tuple[int, ...] | None = None  # their lengths, T_k together; every other sequence has them backwards
    blocks: tuple[str, ...] | None = None  # attention.block_mask, in blocks of BLOCK
    alibi: bool = False
    softcap: float | None = None
    sigma: float = 1.0  # of q and k: the scores' standard deviation is its square

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """q, k, v, do, dlse: normal numbers, rounded to dtype once, so that every implementation gets the same."""
        generator = torch.Generator().manual_seed(seed)
        T_k, H_kv = self.T if self.T_k is None else self.T_k, self.H_kv or self.H
        shapes = {
            "q": (self.B, self.H, self.T, self.D),
            "k": (self.B, H_kv, T_k, self.D),
            "v": (self.B, H_kv, T_k, self.D),
            "do": (self.B, self.H, self.T, self.D),
            "dlse": (self.B, self.H, self.T),
        }
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        made["q"] *= self.sigma
        made["k"] *= self.sigma
        wide = torch.promote_types(dtype, torch.float32)
        return {name: x.to(wide if name == "dlse" else dtype).to(device) for name, x in made.items()}

    def document(self, b: int, j: int) -> int:
        """The number of the document that token j of sequence b is in, from 3 on, in steps of 2."""
        ends = itertools.accumulate(self.documents[:: -1 if b % 2 else 1])
        return 3 + 2 * sum(end <= j for end in ends)


BLOCK = 32
# Neither square nor regular; one column of blocks that nothing sees, and a row of them that sees nothing.
PICTURE = ("x......", ".......", "x.x.x..", "xx.x...", "..x.x..", "x....x.", "xxxx.xx")

# Odd on purpose: one row, a prime, more keys than queries and the other way round (rows that see nothing), no tile size
# that divides, head sizes that are no power of two.
CASES = [
    Case(2),
    Case(97),
    Case(128, D=64),
    Case(113, 203),
    Case(203, 113),
    Case(127, 513, D=16, B=1),
    Case(97, causal=False),
    Case(113, 203, causal=False, D=24),
    Case(130, window=2),
    Case(130, window=37),
    Case(203, 113, window=20),
    Case(113, 203, causal=False, window=40),
    Case(96, H=6, H_kv=2),
    Case(97, H=4, H_kv=1, window=50, D=40),
    Case(130, dropout_p=0.1),
    Case(113, 203, B=1, H=4, H_kv=2, window=64, dropout_p=0.5),
    Case(97, softmax_scale=0.3),
    Case(150, sigma=4.0),
    Case(130, documents=(1, 40, 0, 57, 32)),
    Case(97, documents=(20, 77), causal=False),
    Case(60, 130, documents=(33, 64, 33), H=4, H_kv=2),
    Case(130, blocks=PICTURE),
    Case(113, 203, blocks=PICTURE, causal=False, H=2, H_kv=1),
    Case(203, 113, blocks=PICTURE, D=24),
    Case(113, alibi=True, H=8, D=16, B=1),
    Case(97, 150, alibi=True, H=6, H_kv=2, D=16, B=1),
    Case(97, alibi=True, H=1, causal=False),
    Case(130, softcap=2.0, sigma=2.0),
    Case(113, 203, softcap=0.7, softmax_scale=0.5, dropout_p=0.2),
    # all of it at once, as issue trackers of other kernels are full of pairs that break
    Case(131, documents=(17, 50, 64), window=40, B=1, H=6, H_kv=2, D=24, dropout_p=0.25, alibi=True),
    Case(77, 131, documents=(17, 50, 64), window=33, H=4, H_kv=2, D=40, dropout_p=0.1, alibi=True, softcap=3.0,
         blocks=PICTURE),
]  # fmt: skip
# What torch's own function can do as well.
FOR_SDPA = [c for c in CASES if not (c.window or c.dropout_p or c.documents or c.blocks or c.alibi or c.softcap)]


def case_name(case: Case) -> str:
    default = Case(0)
    return "-".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(default, k)).replace(
        "causal=False", "full"
    )


SEED = 0x1234_5678_9ABC


def sees(i: int, j: int, case: Case, b: int = 0) -> bool:
    """May query row i of sequence b see key j? Diagonal aligned at the end."""
    position = i + (case.T_k or case.T) - case.T
    if case.causal and j > position:
        return False
    if case.documents is not None and case.document(b, position) != case.document(b, j):
        return False
    if case.blocks is not None and case.blocks[max(position, 0) // BLOCK][j // BLOCK] != "x":
        return False
    return case.window is None or abs(position - j) < case.window


def slopes(H: int) -> list[float]:
    """As the paper tells it (arXiv 2108.12409): a geometric sequence from 2**(-8/H) whose ratio is that same value; for
    other numbers of heads, the sequence of the power of two below, then every second of the one above."""
    if H & (H - 1) == 0:
        return [(2 ** (-8 / H)) ** (i + 1) for i in range(H)]
    below = 2 ** int(math.log2(H))
    return slopes(below) + slopes(2 * below)[0::2][: H - below]


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> list[int]:
    """Philox 4x32 in Python's own integers, which cannot wrap unnoticed."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def keep(seed: int, n: int, row: int, column: int, dropout_p: float) -> bool:
    """The decision for one element, straight from the definition at the head of model/dropout.py."""
    without = [(x >> 5) << 3 | (x & 7) for x in (row, column)]
    words = philox((without[0], without[1], n, 0), (seed % (1 << 32), (seed >> 32) % (1 << 32)), rounds=7)
    byte = words[(row >> 3) & 3] >> 8 * ((column >> 3) & 3) & 255
    return byte >= round(256 * dropout_p)


def table(rows: int, columns: int, value) -> Tensor:
    return torch.tensor([[value(i, j) for j in range(columns)] for i in range(rows)])


@cache
def visible(case: Case) -> Tensor:
    """bool (B, T, T_k): sees(), of every pair."""
    rows, columns = case.T, case.T_k or case.T
    return torch.stack([table(rows, columns, lambda i, j, b=b: sees(i, j, case, b)) for b in range(case.B)])


@cache
def dropout_factors(case: Case) -> Tensor:
    """Z, float64 (B, H, T, T_k): keep(), of every element, over the share kept."""
    rows, columns, kept = case.T, case.T_k or case.T, 1 - round(256 * case.dropout_p) / 256
    heads = range(case.B * case.H)
    z = [table(rows, columns, lambda i, j, n=n: keep(SEED, n, i, j, case.dropout_p)) for n in heads]
    return torch.stack(z).double().view(case.B, case.H, rows, columns) / kept


def oracle(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv in float64 for the gradients do and dlse, from the formulas."""
    q, k, v, do, dlse = (inputs[name].cpu().double() for name in ("q", "k", "v", "do", "dlse"))
    H, T, D = q.shape[1:]
    H_kv, T_k = k.shape[1:3]
    head = torch.arange(H) // (H // H_kv)  # the key head of each query head
    k, v = k[:, head], v[:, head]
    scale = D**-0.5 if case.softmax_scale is None else case.softmax_scale

    s = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    bend = torch.ones_like(s)
    if case.softcap is not None:
        bend = 1 - torch.tanh(s / case.softcap) ** 2
        s = case.softcap * torch.tanh(s / case.softcap)
    if case.alibi:
        far = table(T, T_k, lambda i, j: abs(i + T_k - T - j)).double()
        s = s - torch.tensor(slopes(H), dtype=torch.float64)[:, None, None] * far
    s = s.masked_fill(~visible(case)[:, None], -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)  # rows that see nothing: exp(-inf - -inf)
    z = dropout_factors(case) if case.dropout_p else torch.ones_like(p)
    o = torch.einsum("bhij,bhjd->bhid", z * p, v)

    dv = torch.einsum("bhij,bhid->bhjd", z * p, do)
    dp = z * torch.einsum("bhid,bhjd->bhij", do, v)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None]) * bend
    dq = torch.einsum("bhij,bhjd->bhid", ds, k) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, q) * scale
    group = torch.nn.functional.one_hot(head, H_kv).double()  # gradients of a shared key head add up
    dk, dv = (torch.einsum("bhjd,hg->bgjd", x, group) for x in (dk, dv))
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run(inputs: dict[str, Tensor], case: Case, config: AttentionConfig, **options) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv of one of ours, through the door."""
    q, k, v = (inputs[name].detach().requires_grad_() for name in ("q", "k", "v"))
    o, lse = run_forward(q, k, v, case, config, **options)
    # lse = -inf has no gradient worth the name: where a row sees nothing it gets 0
    dlse = inputs["dlse"].masked_fill(lse == -torch.inf, 0.0)
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (inputs["do"], dlse))
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def configured(config: AttentionConfig, case: Case) -> AttentionConfig:
    """The options of a case."""
    of_case = {name: getattr(case, name) for name in ("window", "dropout_p", "alibi", "softcap")}
    blocks = None if case.blocks is None else list(case.blocks)
    return replace(config, **of_case, block_mask=blocks, block_mask_size=BLOCK)


def run_forward(q: Tensor, k: Tensor, v: Tensor, case: Case, config: AttentionConfig, **options) -> tuple:
    """o and lse."""
    config = configured(config, case)
    documents = options.pop("documents", None)
    if case.documents is not None:
        documents = table(case.B, k.shape[2], case.document).to(q.device)
    options |= {"causal": case.causal, "softmax_scale": case.softmax_scale, "documents": documents}
    return attention(q, k, v, config, seed=torch.tensor(SEED, device=q.device), return_lse=True, **options)


def drawn(
    config: AttentionConfig, T: int, dropout_p: float, D: int | None = None, dtype=torch.float32, device="cpu"
) -> dict[str, Tensor]:
    """The keep-masks, bool (2, T, T), as the forward, dv and dq had them, drawn with SEED for two heads.

    Scores are all 0, so every weight is 1 / T. With D columns of the identity for v (do), o (dv) shows D columns (rows)
    of Z p. With ones for v do^T and the identity for k, dq shows ds = p (Z - delta), where delta, the mean of Z over
    the row, lies between 0 and what Z is for a kept weight: what was dropped is below 0.
    """
    D = D or T
    identity = torch.eye(T, dtype=dtype, device=device)
    zero = torch.zeros(1, 2, T, D, dtype=dtype, device=device)
    one = torch.nn.functional.pad(zero[..., 1:], (1, 0), value=1.0)  # v do^T is 1 for every pair
    config = replace(config, dropout_p=dropout_p)
    found = {"o": [], "dv": [], "dq": []}
    for start in range(0, T, D):
        part = identity[:, start : start + D]
        part = torch.nn.functional.pad(part, (0, D - part.shape[1])).expand(1, 2, T, D)
        q, k, v = (x.clone().requires_grad_() for x in (zero, zero, part))
        options = {"causal": False, "softmax_scale": 1.0, "seed": torch.tensor(SEED, device=device)}
        o = attention(q, k, v, config, **options)
        (dv,) = torch.autograd.grad(o, v, part)
        (dq,) = torch.autograd.grad(attention(q, part, one, config, **options), q, one)
        for name, mask in (("o", o != 0), ("dv", dv != 0), ("dq", dq >= 0)):
            found[name].append(mask[0, :, :, : T - start])
    found = {name: torch.cat(parts, -1) for name, parts in found.items()}
    return found | {"dv": found["dv"].mT}  # dv = (Z p)^T


def error(found: Tensor, reference: Tensor) -> float:
    """Largest absolute difference; infinities must stand in the same places, and NaN never passes."""
    found, reference = found.detach().cpu().double(), reference.cpu()
    if found.shape != reference.shape or not torch.equal(found.isinf(), reference.isinf()):
        return float("inf")
    difference = largest((found - reference).masked_fill(reference.isinf(), 0.0))
    return difference if difference == difference else float("inf")


def largest(reference: Tensor) -> float:
    return float(reference.masked_fill(reference.isinf(), 0.0).abs().max()) if reference.numel() else 0.0


def assert_within_budget(found: dict[str, Tensor], naive: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Each result within 2 * (naive's error + eps * max |reference|), eps of the result's own dtype."""
    for name, right in reference.items():
        eps = torch.finfo(found[name].dtype).eps
        budget = 2 * (error(naive[name], right) + eps * largest(right))
        assert error(found[name], right) <= budget, f"{name}: error {error(found[name], right):.3g} > {budget:.3g}"


def assert_float64_right(found: dict[str, Tensor], reference: dict[str, Tensor], terms: int) -> None:
    """Two float64 evaluations of sums of `terms` products differ by rounding only: terms * eps * max |reference|."""
    for name, right in reference.items():
        budget = 2 * terms * torch.finfo(torch.float64).eps * max(1.0, largest(right))
        assert error(found[name], right) <= budget, f"{name}: error {error(found[name], right):.3g} > {budget:.3g}"


# The keys that dominate in dominated(): in one tile or two, the later ones in earlier tiles, and in two pairs.
PLACES = [[70], [70, 71], [5, 300], [300, 70], [5, 140, 300, 301]]


def dominated(
    D: int, dtype: torch.dtype, above: float, apart: float, places: list[int], same_values: bool, T: int, device="cpu",
    B: int = 1, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Inputs whose keys at `places` have scores about `above` nats higher than the others; they differ by `apart`."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (torch.randn(B, 2, T, D, device=device, generator=generator) for _ in range(4))
    q, k = q * 0.05, k * 0.05
    q[..., 0], k[..., 0] = 1, 0
    for number, place in enumerate(places):
        k[..., place, 0] = above + apart * number
        if same_values:
            v[..., place, :] = v[..., places[0], :]
    made = {"q": q, "k": k, "v": v, "do": do}
    return {name: x.to(dtype) for name, x in made.items()} | {"dlse": torch.zeros(B, 2, T, device=device)}


# Without the maximum, of keys that are all alike: what o is, in naive and in tiled and triton, where a sum overflows.
FLAT_ROWS = [  # keys, score, v, naive's o, tiled's and triton's
    (1024, 83.0, 1e-3, 0.0, 0.0),  # each weight is finite, their sum is not
    (1024, 81.0, 1e-3, 1e-3, 1e-3),
    (4, 88.0, 1.0, 0.0, math.nan),  # acc overflows as well
    (1, 88.0, 3.0, 3.0, math.inf),  # acc alone does
    (1, 88.0, 1.0, 1.0, 1.0),
    (1, 89.0, 1.0, math.nan, math.nan),  # the weight itself
]


def flat_row(keys: int, score: float, v: float, device: str = "cpu") -> dict[str, Tensor]:
    """q, k and v of one row that has the same score at every key, with softmax_scale=1."""
    rows = {"q": (1, 1.0), "k": (keys, score / 16), "v": (keys, v)}
    return {name: torch.full((1, 1, length, 16), x, device=device) for name, (length, x) in rows.items()}


def assert_flat_row(impl: str, keys: int, score: float, v: float, expected: float, device: str = "cpu") -> None:
    inputs = flat_row(keys, score, v, device)
    o = attention(**inputs, config=AttentionConfig(impl, softmax_scale=1.0), break_it=BreakIt("no_max"))
    rounding = 2 * keys * torch.finfo(torch.float32).eps  # of acc and of l, sums of so many terms
    torch.testing.assert_close(o, torch.full_like(o, expected), equal_nan=True, rtol=rounding, atol=0.0)
