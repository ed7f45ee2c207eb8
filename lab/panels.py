"""Computes the panels of each failure's picture. lab/draw.py draws them.

    panels(shown, curves)     two or three panels of one failure

Most panels show the failure's last trial (lab/trials.py), on q, k, v and do of a model. Panels that need special rows,
such as flat rows or scores that tie, make them.

Shapes as in model/attention.py: q, o, do, dq (B, H, T, D), k, v, dk, dv (B, H_kv, T_k, D).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lab.measure import Shown, beyond, row_errors, walk
from lab.trainings import Curves
from lab.trials import tile_of
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.mask import Tiling, visible
from training.probe import LIMIT, Call
from training.weights import by_rows

TILED = AttentionConfig("tiled", 64, 64)
NAIVE = AttentionConfig("naive")


class Curve(NamedTuple):
    """Points in the order of drawing. A y that is not finite becomes a cross at the upper edge."""

    name: str  # is written at the end. The first word "unbroken" makes it black and dashed, "theory" grey and dotted
    x: Sequence[float]
    y: Sequence[float]


def curve(name: str, y: Sequence[float]) -> Curve:
    """A curve over 0, 1, 2, .."""
    return Curve(name, range(len(y)), y)


class Panel(NamedTuple):
    """Axes with curves, or with an image of rows and columns."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve] = ()
    log_x: bool = False
    log_y: bool = False
    bottom: float | None = None  # of the y axis
    ticks: list[str] | None = None  # at x = 0, 1, 2, ..
    image: Tensor | None = None  # (rows, columns) in [0, 1]: 1 is black
    marked: Tensor | None = None  # bool, like image: drawn in the failure's colour
    legend: str = ""  # written in the upper right corner of the image


RESCALE = ("no_rescale", "no_rescale_sum", "no_rescale_output")
PANELS: dict[str, Callable[[Shown], list[Panel]]] = {  # of a failure; of others the error of o in each tile
    "no_max": lambda shown: [flat_rows(), where_it_breaks()],
    **dict.fromkeys(RESCALE, lambda shown: [errors_by_tile(shown, "o"), states(shown)]),
    "zero_init_max": lambda shown: [low_rows(), low_gradients()],
    "local_mask": lambda shown: [weights_seen(shown), future_share(shown)],
    "no_scale": lambda shown: [score_spread(shown), entropies(shown)],
    "unguarded_mask": lambda shown: [hidden_rows(shown), nan_share(shown)],
    **dict.fromkeys(("stale_seed", "unrestored_seed"), lambda shown: [errors_by_tile(shown, "dq", "o"), angles(shown)]),
    "bf16_ties": lambda shown: [signed_errors(), bias_by_ties(), added_up()],
}


def panels(shown: Shown, curves: Curves | None) -> list[Panel]:
    """The panels of a failure. curves: its short training, or None if it has none."""
    own = PANELS.get(shown.trial.failure, lambda shown: [errors_by_tile(shown, "o")])
    return own(shown) + ([] if curves is None else [losses(shown.trial.failure, curves)])


# --- Panels that several failures share ------------------------------------------------------------------------------


def losses(failure: str, curves: Curves) -> Panel:
    """The loss of a short training, averaged over ten steps because batches differ in difficulty. If both runs reach
    their end, the panel starts at step 20: the steep fall before that is the same and would hide the difference."""
    found = {"unbroken": curves.whole, "broken": curves.broken[failure]}
    first = 20 if math.isfinite(found["broken"][-1]) and len(curves.whole) > 40 else 1
    lines = []
    for name, of in found.items():
        tens = [of[max(0, step - 10) : step] for step in range(first, len(of) + 1)]
        lines.append(Curve(name, range(first, len(of) + 1), [sum(ten) / len(ten) for ten in tens]))
    setting = (argument.rpartition("=") for argument in curves.setting.split())
    words = ", ".join(key.split(".")[-1] + f"={value}".replace("=true", "") for key, _, value in setting)
    return Panel("training", f"step ({words})", "loss (nats), mean of 10 steps", lines)


def errors_by_tile(shown: Shown, name: str, exact: str | None = None) -> Panel:
    """The error of the worst row of each query tile, over all layers and heads. exact: a right result, shown too."""

    def worst(which: str, name: str) -> list[float]:
        found = torch.zeros(1)
        for call, s in zip(shown.tried, shown.seen, strict=True):
            errors = row_errors(getattr(s, which)[name], s.right[name]) / float(s.right[name].abs().max())
            tiles = errors.amax((0, 1)).split(tile_of(call)[0])
            found = torch.maximum(found, torch.stack([tile.max() for tile in tiles]))
        return found.tolist()

    results = {f"unbroken {name}": ("usual", name), f"broken {name}": ("found", name)}
    results |= {f"broken {exact}": ("found", exact)} if exact else {}
    curves = [curve(label, worst(which, of)) for label, (which, of) in results.items()]
    return Panel(f"error of {name}, {shown.about}", "query tile", "relative error, worst row", curves, log_y=True)


def states(shown: Shown) -> Panel:
    """l and |acc| of the worst row after each tile of keys, divided by those of the unbroken algorithm."""
    call, b, h, row = worst_place(shown)
    found, usual = (list(walk(of, b, h, row)) for of in (call, replace(call, break_it=call.break_it.mended)))
    tiles = [tile for tile, *_ in found]
    ratios = [
        (l / usual_l, l * float(o.norm()) / (usual_l * float(usual_o.norm())))
        for (_, _, l, o), (_, _, usual_l, usual_o) in zip(found, usual, strict=True)
    ]
    of_l, of_acc = zip(*ratios, strict=True)
    curves = [Curve("unbroken", tiles, [1.0] * len(tiles)), Curve("l", tiles, of_l), Curve("acc", tiles, of_acc)]
    place = f"key tile (layer {call.layer}, head {h}, row {row})"
    return Panel("sum l and size of acc", place, "times the unbroken one", curves, log_y=True)


def worst_place(shown: Shown) -> tuple[Call, int, int, int]:
    """The call, sequence, head and row of the largest error of o, in the first layer with a wrong o. The last row, if
    several are equally bad."""
    for call, s in zip(shown.tried, shown.seen, strict=True):
        if beyond(s, "o").any():
            errors = row_errors(s.found["o"], s.right["o"])
            b, h, row = max((errors == errors.max()).nonzero().tolist(), key=lambda place: place[2])
            return call, b, h, row
    return shown.tried[0], 0, 0, shown.tried[0].q.shape[2] - 1


def unbroken_and_broken(shown: Shown) -> dict[str, list[Call]]:
    """The calls with the unbroken algorithm, and as they were tried."""
    return {"unbroken": [replace(call, break_it=call.break_it.mended) for call in shown.tried], "broken": shown.tried}


def heads_of(shown: Shown) -> list[str]:
    """Every head as layer.head."""
    return [f"{call.layer}.{h}" for call in shown.tried for h in range(call.q.shape[1])]


# --- no_max and zero_init_max: rows of equal scores ------------------------------------------------------------------


def flat(scores: Tensor, keys: int, v: float, break_it: BreakIt, dtype: torch.dtype = torch.float32) -> list[float]:
    """o / v in tiled, for one row per score. All keys of a row have that score and the value v."""
    q, k = torch.zeros(2, len(scores), 1, keys, 2)
    q[..., 0], k[..., 0] = 1.0, scores[:, None, None]
    value = torch.full_like(k, v)
    q, k, value = (x.to(dtype) for x in (q[:, :, :1], k, value))
    o = attention(q, k, value, TILED, softmax_scale=1.0, causal=False, break_it=break_it)
    return (o[:, 0, 0, 0].double() / float(value[0, 0, 0, 0])).tolist()


def flat_rows() -> Panel:
    """Without the maximum: o over the score, which is the same for all keys of a row."""
    scores = torch.linspace(78, 92, 57)
    off = BreakIt("no_max")
    curves = [Curve("unbroken", scores.tolist(), flat(scores, 1024, 1e-3, UNBROKEN))]
    curves += [Curve(f"{n} keys", scores.tolist(), flat(scores, n, 1e-3, off)) for n in (1024, 32, 2)]
    return Panel("o of a row of equal scores", "score", "o / right   (x: NaN)", curves)


def where_it_breaks() -> Panel:
    """Without the maximum: the lowest score at which o is 0, and at which it is NaN, over the number of keys."""
    scores, off = torch.arange(79, 90, 0.05), BreakIt("no_max")
    lengths = [4**i for i in range(7)]
    found = [flat(scores, n, 1e-3, off) for n in lengths]

    def first(of: list[float], wrong) -> float:
        return next(s for s, x in zip(scores.tolist(), of, strict=True) if wrong(x))

    curves = [
        Curve("theory", lengths, [LIMIT - math.log(n) for n in lengths]),
        Curve("o = 0", lengths, [first(of, lambda x: x == 0 or math.isnan(x)) for of in found]),
        Curve("NaN", lengths, [first(of, math.isnan) for of in found]),
    ]
    return Panel("where it breaks; theory: 88.7 - ln n", "keys, n", "lowest score with this o", curves, log_x=True)


def low_rows() -> Panel:
    """With a maximum that starts at 0: o over the score of a row's only key."""
    scores, off = torch.arange(-112.0, 0.1, 2), BreakIt("zero_init_max")
    curves = [Curve("unbroken", scores.tolist(), flat(scores, 1, 1.0, UNBROKEN))]
    for name, dtype in (("float32", torch.float32), ("fp16", torch.float16)):
        curves.append(Curve(name, scores.tolist(), flat(scores, 1, 1.0, off, dtype)))
    return Panel("o of a row that sees one key", "score", "o / right", curves)


def low_gradients() -> Panel:
    """With a maximum that starts at 0: the norm of the gradients over the log-sum-exp of a row."""
    draw, lse, keys = torch.Generator().manual_seed(0), torch.arange(-112.0, -77.9, 1), 64
    q, k, v, do = (torch.randn(n, 16, generator=draw) for n in (1, keys, keys, 1))
    q[:, 0], k[:, 0] = 1.0, 0.0
    k = k.repeat(len(lse), 1, 1, 1)
    k[..., 0] = (lse - (q @ k[0, 0].mT).logsumexp(-1))[:, None, None]  # adds the same to all scores of a row
    q, v, do = (x.repeat(len(lse), 1, 1, 1) for x in (q, v, do))

    def gradients(config: AttentionConfig, break_it: BreakIt, dtype: torch.dtype) -> list[Tensor]:
        q1, k1, v1 = (x.to(dtype).requires_grad_() for x in (q, k, v))
        o = attention(q1, k1, v1, config, softmax_scale=1.0, causal=False, break_it=break_it)
        return [x.double().flatten(1).norm(dim=1) for x in torch.autograd.grad(o, (q1, k1, v1), do.to(dtype))]

    right = gradients(NAIVE, UNBROKEN, torch.float64)
    unbroken, broken = (gradients(TILED, off, torch.float32) for off in (UNBROKEN, BreakIt("zero_init_max")))
    pairs = {"unbroken": (unbroken[0], right[0]), "dq": (broken[0], right[0]), "dv": (broken[2], right[2])}
    curves = [Curve(name, lse.tolist(), (found / of).tolist()) for name, (found, of) in pairs.items()]
    return Panel("gradients of a low row, float32", "log-sum-exp of its scores", "size / right", curves)


# --- The mask --------------------------------------------------------------------------------------------------------


def weights_of(call: Call) -> Tensor:
    """The weights (B, H, T, T_k) of a call in tiled."""
    each = (replace(call, q=q[None], k=k[None], v=v[None]) for q, k, v in zip(call.q, call.k, call.v, strict=True))
    return torch.stack([torch.cat([p for _, p in by_rows(one)], 1) for one in each])


def weights_seen(shown: Shown) -> Panel:
    """The weights of the first 3 x 3 tiles, averaged over heads. Square roots, so that small ones are visible."""
    M, N = tile_of(shown.tried[0])
    weights = torch.cat([weights_of(call)[0] for call in shown.tried]).mean(0)[: 3 * M, : 3 * N].float()
    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    image = (weights / weights.max()).sqrt()
    return Panel("weights, mean of heads; red: the future", "key", "query row", image=image, marked=future)


def future_share(shown: Shown) -> Panel:
    """The weight that each row puts on keys of the future, averaged over heads and layers."""
    curves = []
    for name, calls in unbroken_and_broken(shown).items():
        share = torch.stack([weights_of(call).triu(1).sum(-1).mean((0, 1)) for call in calls]).mean(0)
        curves.append(curve(name, (100 * share).tolist()))
    return Panel("weight on keys of the future", "query row", "% of a row's weight", curves)


def hidden_rows(shown: Shown) -> Panel:
    """The first 3 x 3 tiles: keys that are visible, keys that are computed but hidden, and where NaN begins."""
    call, s = shown.tried[0], shown.seen[0]
    (M, N), problem = tile_of(call), call.problem()
    image = torch.zeros(3 * M, 3 * N)
    marked = torch.zeros_like(image, dtype=torch.bool)
    nan = s.found["o"][0].isnan().any(-1).any(0).cpu()  # (T,)
    for rows, visits in list(Tiling(problem, M, N).by_rows())[:3]:
        for number, tile in enumerate(visits):
            seen = visible(problem, rows, tile.columns, call.q.device)[0].cpu()
            place = slice(rows.start, rows.stop), slice(tile.columns.start, tile.columns.stop)
            image[place] = torch.where(seen, 1.0, 0.2)
            lost = nan[rows.start : rows.stop, None] & ~seen.any(-1, keepdim=True)
            marked[place] = lost & (number == 0)
    image[marked] = 1.0
    legend = "black: seen\ngrey: hidden\nred: rows that see\nno key of their\nfirst tile"
    return Panel("where NaN begins", "key", "query row", image=image, marked=marked, legend=legend)


def nan_share(shown: Shown) -> Panel:
    """The share of rows that are NaN, by tile, averaged over heads and layers."""
    M = tile_of(shown.tried[0])[0]
    curves = []
    for name in ("o", "dv"):
        lost = torch.stack([s.found[name].isnan().any(-1).double().mean((0, 1)) for s in shown.seen]).mean(0)
        curves.append(curve(name, [100 * float(part.mean()) for part in lost.split(M)]))
    curves.insert(0, curve("unbroken", [0.0] * len(curves[0].y)))
    return Panel("rows that are NaN", "tile of rows", "% of the rows of a tile", curves, bottom=0)


# --- no_scale --------------------------------------------------------------------------------------------------------


def scores_of(call: Call) -> Tensor:
    """The scores of a causal call, (B, H, T, T), -inf where hidden."""
    groups = call.q.shape[1] // call.k.shape[1]
    s = call.q.double() @ call.k.double().repeat_interleave(groups, dim=1).mT * call.problem().score.scale
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)


def score_spread(shown: Shown) -> Panel:
    """The distribution of the scores, each minus the mean of its row."""
    found = {}
    for name, calls in unbroken_and_broken(shown).items():
        scores = [s.masked_fill(s == -math.inf, math.nan) for s in map(scores_of, calls)]
        apart = torch.cat([(s - s.nanmean(-1, keepdim=True)).flatten() for s in scores])
        found[name] = apart[apart.isfinite()].float()
    edge = 3 * float(found["broken"].std())
    return histogram("how far the scores of a row lie apart", "score - mean of its row", found, edge)


def histogram(title: str, x: str, found: dict[str, Tensor], edge: float, bins: int = 41) -> Panel:
    """The share of values in each of the bins from -edge to edge."""
    middles = ((torch.arange(bins) + 0.5) * 2 * edge / bins - edge).tolist()
    curves = []
    for name, values in found.items():
        share = torch.histc(values.float().cpu(), bins, -edge, edge) / values.numel() * 100
        curves.append(Curve(name, middles, share.tolist()))
    return Panel(title, x, "% of all", curves, bottom=0)


def entropies(shown: Shown) -> Panel:
    """The entropy of each head's weights, averaged over rows."""
    curves, names = [], heads_of(shown)
    for name, calls in unbroken_and_broken(shown).items():
        entropy = torch.cat([torch.special.entr(scores_of(call).softmax(-1)).sum(-1).mean((0, 2)) for call in calls])
        curves.append(curve(name, entropy.tolist()))
    return Panel("entropy of the weights: 0 is one key", "layer.head", "nats", curves, bottom=0, ticks=names)


# --- The two seeds of dropout, and sums of 16 bits -------------------------------------------------------------------


def angles(shown: Shown) -> Panel:
    """The cosine between each head's gradient and the right one."""
    names = heads_of(shown)
    curves = [curve("unbroken", [1.0] * len(names))]
    for name in ("dq", "dk", "dv"):
        found: list[float] = []
        for s in shown.seen:
            ours, right = (x[name].double().transpose(0, 1).flatten(1) for x in (s.found, s.right))
            found += torch.cosine_similarity(ours, right, dim=1).tolist()
        group = len(names) // len(found)  # query heads that share a key head, whose point is in their middle
        curves.append(Curve(name, [i * group + (group - 1) / 2 for i in range(len(found))], found))
    return Panel("the gradients point elsewhere", "layer.head", "cosine with the right gradient", curves, ticks=names)


def tied_errors(ties: int, break_it: BreakIt, config: AttentionConfig = TILED, heads: int = 400) -> Tensor:
    """The signed error of o in bf16, in units of its last digit: float64 (outputs,). In each row of 64 scores `ties`
    are equal at the maximum, the others about 12 below. All values have one sign."""
    draw, rows, D = torch.Generator().manual_seed(0), 8, 16
    q, k = torch.zeros(heads, 1, rows, D), torch.zeros(heads, 1, 64, D)
    q[..., 0], k[..., 0] = 4.0, -12.0 + torch.randn(heads, 1, 64, generator=draw)
    k[:, :, :ties, 0] = 0.0
    v = -4 + 2 * torch.rand(heads, 1, 64, D, generator=draw)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    o = attention(q, k, v, config, causal=False, softmax_scale=0.25, break_it=break_it).double()
    right = attention(q.double(), k.double(), v.double(), NAIVE, causal=False, softmax_scale=0.25)
    last_digit = torch.finfo(torch.bfloat16).eps * 2.0 ** right.abs().log2().floor()
    return ((o - right) / last_digit).flatten()


def unbroken_and_tied(ties: int) -> dict[str, Tensor]:
    """tied_errors() of the unbroken algorithm, and with sums of 16 bits."""
    return {"unbroken": tied_errors(ties, UNBROKEN), "broken": tied_errors(ties, BreakIt("bf16_ties"))}


def signed_errors() -> Panel:
    """The distribution of the errors of o when three scores tie."""
    return histogram("error of o, three scores tie (bf16)", "o - right, in last digits", unbroken_and_tied(3), 7 / 6, 7)


def bias_by_ties() -> Panel:
    """The mean error of o over the number of keys that tie at the maximum."""
    numbers = range(1, 9)
    found = [unbroken_and_tied(ties) for ties in numbers]
    curves = [Curve(name, numbers, [float(of[name].mean()) for of in found]) for name in ("unbroken", "broken")]
    return Panel("its mean: the bias", "scores that tie at the maximum", "mean of o - right, last digits", curves)


def added_up() -> Panel:
    """The running sum of the errors of o. Unbiased errors wander around 0, biased ones grow in one direction."""
    curves = []
    for name, errors in unbroken_and_tied(3).items():
        every = len(errors) // 24
        sums = errors.cumsum(0)[every - 1 :: every].tolist()
        curves.append(Curve(name, [every * (i + 1) for i in range(len(sums))], sums))
    return Panel("errors added up, three scores tie", "outputs", "sum of o - right, last digits", curves)
