"""Attention in float64 by its formulas, step by step; and what implementations compute on the same inputs.

The gradients are those of sum(o * do). With `broken` it predicts those failures of model/break_it.py. Some failures are
overflows, so weights, l and acc are held in float32, and the weights that multiply v in the inputs' dtype.

    q, do, o, dq (B, H, T, D)    k, v, dk, dv (B, H_kv, T_k, D)    lse (B, H, T)    scores, weights (B, H, T, T_k)
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import INF, AttentionConfig, attention, problem_of
from model.break_it import UNBROKEN, BreakIt
from model.dropout import drop_threshold, keep_mask

FLOAT32 = torch.finfo(torch.float32)
TILE = 32  # query rows and key rows of a tile in tiled
Results = dict[str, Tensor]  # o, lse, dq, dk, dv


@dataclass
class Inputs:
    """Numbers before they are rounded to a dtype, float64. options: of AttentionConfig."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def rounded(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [x.to(device, dtype) for x in (self.q, self.k, self.v, self.do)]


def usual(T: int = 256, T_k: int | None = None, D: int = 16, seed: int | None = None, **options: Any) -> Inputs:
    """Normal numbers: scores of about 1. Two query heads share a key head."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 2, T, D), (1, 1, T_k or T, D), (1, 1, T_k or T, D), (1, 2, T, D)]
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return Inputs(q, k, v, do, options, seed)


def scored(q: float, k: float, rows: slice, keys: slice, v: float = 1.0, **options: Any) -> Inputs:
    """As usual(), but the scores of rows x keys are exactly q k / sqrt(D), and those of these rows with other keys 0.
    v: multiplies the values and divides do."""
    made = usual(**options)
    made.k[:, :, keys] *= 8  # what these keys have in common cancels out of dq, and should not be large beside the rest
    made.q[..., 0], made.k[..., 0] = 0.0, 0.0
    made.q[:, :, rows] = 0.0
    made.q[:, :, rows, 0], made.k[:, :, keys, 0] = q, k
    made.v, made.do = made.v * v, made.do / v
    return made


def held(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x as a number of that dtype: it may overflow to infinity, or round to 0."""
    return x.to(dtype).double()


class Prediction:
    """Attention, whole or broken, on inputs rounded to dtype. M x N: the tiles; naive has one of T x T_k."""

    def __init__(self, inputs: Inputs, impl: str = "naive", dtype=torch.float32, broken: tuple[str, ...] = ()):
        self.impl, self.dtype, self.options, self.broken = impl, dtype, inputs.options, broken
        self.q, self.k, self.v, self.do = (x.double() for x in inputs.rounded(dtype, "cpu"))
        self.H_kv = self.k.shape[1]
        self.k, self.v = (x.repeat_interleave(self.q.shape[1] // self.H_kv, 1) for x in (self.k, self.v))
        self.T, self.T_k = self.q.shape[2], self.k.shape[2]
        self.scale = 1.0 if "no_scale" in broken else self.q.shape[3] ** -0.5
        self.seed = inputs.seed
        self.M, self.N = (self.T, self.T_k) if impl == "naive" else tiles(impl, inputs, dtype)

    def seen(self) -> Tensor:
        """Whether a row sees a key: bool (T, T_k)."""
        i, j = torch.arange(self.T)[:, None] + self.T_k - self.T, torch.arange(self.T_k)
        if "local_mask" in self.broken:
            return j % self.N <= i % self.M
        return (j <= i) & (j > i - self.options.get("window", self.T_k))

    @cached_property
    def s(self) -> Tensor:
        """Steps 1 and 2."""
        return (self.q @ self.k.mT * self.scale).masked_fill(~self.seen(), -INF)

    def m(self) -> Tensor:
        """The maximum of each row after its last tile, (B, H, T, 1); 0 for a row that sees no key."""
        m = self.s.amax(-1, keepdim=True)
        m = m.masked_fill(m == -INF, 0.0)
        if "unguarded_mask" in self.broken:  # exp(-inf - -inf) in a visited tile of a row that has seen no key yet
            visited = torch.zeros(self.T, self.T_k, dtype=torch.bool)
            for i, j in product(range(0, self.T, self.M), range(0, self.T_k, self.N)):
                visited[i : i + self.M, j : j + self.N] = self.seen()[i : i + self.M, j : j + self.N].any()
            m = m.masked_fill((visited & (self.running_maximum() == -INF)).any(-1, keepdim=True), math.nan)
        m = m.clamp(min=0.0) if "zero_init_max" in self.broken else m
        return torch.zeros_like(m) if "no_max" in self.broken else m

    def running_maximum(self) -> Tensor:
        """The maximum of each row after the tile of each key, tiles going from left to right: (B, H, T, T_k)."""
        tiled = F.pad(self.s, (0, -self.T_k % self.N), value=-INF).unflatten(-1, (-1, self.N))
        return tiled.amax(-1).cummax(-1).values.repeat_interleave(self.N, -1)[..., : self.T_k]

    def Z(self, stale: bool = False) -> Tensor | float:
        """Step 4: 0 where a weight is dropped, 1 / (share kept) elsewhere. stale: by another seed."""
        if self.seed is None:
            return 1.0
        p, seed = self.options.get("dropout_p", 0.0), torch.tensor(self.seed + 1 if stale else self.seed)
        keep = keep_mask(seed, self.q.shape[1], range(self.T), range(self.T_k), p)[None]
        return keep * (256 / (256 - drop_threshold(p)))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Steps 3 to 6: o, lse (B, H, T, 1), and the weights of the backward, step 8."""
        rescaling = "no_rescale_sum", "no_rescale_output"  # without, a weight keeps the maximum it began with
        maxima = (self.running_maximum() if name in self.broken else self.m() for name in rescaling)
        of_l, of_acc = (held(torch.exp(self.s - m)) for m in maxima)
        if self.impl == "triton":  # the GPU's exp2 gives 0 for what is below the smallest normal number
            of_l, of_acc = (x.masked_fill(x < FLOAT32.tiny, 0.0) for x in (of_l, of_acc))
        l = held(of_l.sum(-1, keepdim=True))
        lse = self.m() + l.log()
        divisor = l.masked_fill(l == 0, 1.0) if self.impl == "triton" else l.clamp(min=FLOAT32.tiny)
        if self.impl == "naive":  # divides the weights and then rounds them
            p = of_acc / divisor
            return held(self.Z() * p, self.dtype) @ self.v, lse, p
        acc = held(held(self.Z() * of_acc, self.dtype) @ self.v)
        return acc / divisor, lse, torch.exp(self.s - lse.masked_fill(lse == -INF, INF))

    def results(self) -> Results:
        """The gradients are left out where o is not finite: the training has stopped by then."""
        o, lse, p = self.forward()
        found = {"o": o, "lse": lse[..., 0]}
        return found | self.gradients(o, p) if o.isfinite().all() else found

    def gradients(self, o: Tensor, p: Tensor) -> Results:
        """Steps 7 and 9 to 12. The heads that share a key head add up in dk and dv."""
        delta = (self.do * o).sum(-1, keepdim=True)
        Z = self.Z("stale_seed" in self.broken)
        dv = (Z * p).mT @ self.do
        ds = p * (Z * (self.do @ self.v.mT) - delta) * self.scale
        dk, dv = (x.unflatten(1, (self.H_kv, -1)).sum(2) for x in (ds.mT @ self.q, dv))
        return {"dq": ds @ self.k, "dk": dk, "dv": dv}


def tiles(impl: str, inputs: Inputs, dtype: torch.dtype) -> tuple[int, int]:
    """The tile of the forward, M x N. triton chooses its own."""
    if impl != "triton":
        return TILE, TILE
    from kernels.launch import tiles_for

    q, k, *_ = inputs.rounded(dtype, device_of(impl))
    seed = None if inputs.seed is None else torch.tensor(inputs.seed, device=q.device)
    config = AttentionConfig("triton", **inputs.options)
    return tiles_for("forward", q, problem_of(q, k, k, config, seed=seed))[:2]


def device_of(impl: str) -> str:
    """triton: the GPU, or Triton's interpreter on the CPU."""
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


def attend(inputs: Inputs, impl: str, dtype: torch.dtype, broken: BreakIt = UNBROKEN) -> Results:
    """o, lse, dq, dk and dv of attention(), as float64 on the CPU."""
    device, config = device_of(impl), AttentionConfig(impl, TILE, TILE, **inputs.options)
    q, k, v, do = inputs.rounded(dtype, device)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seed = None if inputs.seed is None else torch.tensor(inputs.seed, device=device)
    o, lse = attention(q, k, v, config, seed=seed, break_it=broken, return_lse=True)
    o.backward(do)
    found = {"o": o, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.detach().cpu().double() for name, x in found.items()}
