"""The break-it lab: each failure beside the whole algorithm, on the q, k, v and do of a model's own attention calls.

    rows, views = measure(calls, failures, ...)    the table's rows; and what the pictures show
    errors_figure, states_figure, losses_figure    a panel a failure; failure_figure: all three of one failure

What will be seen is predicted first, from the gauges of the calls (training/probe.py), the number of tiles and the case
alone; then it is looked at. Right is the whole algorithm in float64, on inputs rounded to the dtype in question. A row
is wrong when it is beyond the budget: twice what the same implementation errs by when it is whole, and twice the
rounding of the largest number.

Shapes as in model/attention.py: q, o, do, dq (B, H, T, D), k, v, dk, dv (B, H_kv, T_k, D).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attention import (
    INF,
    LACKS,
    LOG2E,
    UNBROKEN,
    AttentionConfig,
    BreakIt,
    absorb,
    attention,
    by_key_head,
    check_switches,
    load,
    nothing_seen,
    tiles,
    triton_refusal,
)
from model.failures import FAILURES
from training.probe import Call, Gauges, first_bad, gauges, worst

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What can be seen. overflow: the weights times v leave the dtype while their sum does not; leak: the past changes with
# the future.
NAN, OVERFLOW, SILENT, LEAK, GRADIENT, NONE = "NaN", "overflow", "silent", "leak", "gradient only", "none here"
VERDICTS = ("harmless", "silent", "loud")  # within its budget; wrong beyond it, and finite; not finite
SEED = 20240229  # of dropout; any
TILES_A_SIDE = 8  # of tiled's, over the tokens


class Case(NamedTuple):
    """Where a failure is looked at. gain: what the scores are multiplied by, in gain_of()'s words."""

    failure: str
    where: str
    gain: str = "real"  # real | raised | past | low
    one_tile: bool = False  # for tiled, which can be told: one tile of keys
    dropout_p: float = 0.0
    window: bool = False  # of half a tile
    cut: bool = False  # the keys of the first half tile are gone, and their rows see nothing


# Asleep and awake: of each failure the last one shows it, and is what the pictures are of.
CASES = [
    Case("none", "real scores"),
    Case("none", "dropout", dropout_p=0.2),
    Case("no_max", "real scores"),
    Case("no_max", "a score past the limit", "past"),
    *(
        case
        for name in ("no_rescale", "no_rescale_sum", "no_rescale_output")
        for case in (Case(name, "one tile of keys", "raised", one_tile=True), Case(name, "several tiles", "raised"))
    ),
    Case("zero_init_max", "real scores"),
    Case("zero_init_max", "a row below the limit", "low"),
    Case("local_mask", "one tile of keys and rows", one_tile=True),
    Case("local_mask", "several tiles"),
    Case("no_scale", "real scores", "raised"),
    Case("unguarded_mask", "causal alone"),
    Case("unguarded_mask", "rows without a key", cut=True),
    Case("unguarded_mask", "a window", window=True),
    Case("stale_seed", "dropout", dropout_p=0.2),
    Case("unrestored_seed", "dropout", dropout_p=0.2),
    Case("bf16_ties", "real scores"),
]


class View(NamedTuple):
    """What the pictures show of a failure where it is awake: tiled, in float32 or SHOWN."""

    failure: str
    about: str
    of: str  # o or, where o is right, dq
    errors: Tensor  # (L * H, query tiles), relative: the worst row of each tile
    heads: int  # H
    place: str  # whose row the states are of
    states: dict[str, list[tuple[int, float, float]]]  # whole, broken: key tile, m, l after each


def left_out(calls: list[Call], failures: list[str], impls: list[str]) -> list[str]:
    """What measure() leaves out, a line each, and why."""
    wanted = (case for case in CASES if case.failure in failures)
    found = (lacks(case, impl, dtype, calls[0]) for case, dtype, impl in product(wanted, DTYPES, impls))
    return list(dict.fromkeys(why for why in found if why))


def measure(
    calls: list[Call], failures: list[str], impls: list[str], say: Callable[[dict], None] = lambda row: None
) -> tuple[list[dict], dict[str, View]]:
    """The rows of the table, in the order of CASES, and for each failure its View.

    calls: of a whole model, with gradients, float32, causal and with no other mask (record() in training/probe.py).
    impls: of naive, tiled, triton. say: is handed each row as it comes.
    """
    rows, views = [], {}
    awake = {case.failure: case for case in CASES if case.failure in FAILURES}
    for case, dtype in product((case for case in CASES if case.failure in failures), DTYPES):
        gain = gain_of(case, dtype, calls)
        made = [call_of(case, dtype, gain, call) for call in calls]
        measured = [gauges(problem) for problem in made]
        right = None
        for impl in impls:
            if lacks(case, impl, dtype, calls[0]):
                continue
            problems = [replace(problem, config=config_of(impl, problem, case)) for problem in made]
            guess = predicted(case, impl, problems, measured)
            right = right or [right_for(problem) for problem in made]
            seen = [Seen(run(p), r, allowed_for(p, r)) for p, r in zip(problems, right, strict=True)]
            symptom = observed(problems, seen)
            row = {"failure": case.failure, "where": case.where, "impl": impl, "dtype": dtype, "gain": gain}
            row["tiles"] = "" if impl == "naive" else "{} x {}".format(*tile_of(problems[0]))
            row |= {"predicted": guess, "observed": symptom, "agrees": guess == symptom}
            row |= first_place(problems, seen, symptom)
            row["max_score"], row["max_weight"] = (max(getattr(g, x) for g in measured) for x in GAUGED)
            row["headroom"] = min(g.headroom for g in measured)
            row |= {
                f"error_{name}": worst(max, (distance(s.found[name], s.right[name]) for s in seen)) for name in RESULTS
            }
            finite = all(bool(s.found[name].isfinite().all()) for s in seen for name in RESULTS)
            row["verdict"] = "loud" if not finite else "harmless" if symptom == NONE else "silent"
            rows.append(row)
            say(row)
            if case is awake.get(case.failure) and (impl, dtype) == ("tiled", SHOWN.get(case.failure, "float32")):
                views[case.failure] = view(case, gain, problems, seen)
    return rows, views


MENDED = False  # Triton's interpreter gets bf16 and exp2's smallest numbers wrong; tests/interpreter.py mends it
SHOWN = {"bf16_ties": "bf16"}  # what the pictures are of, where it is not float32
GAUGED = ("max_score", "max_weight")
COLUMNS = ["failure", "where", "impl", "dtype", "gain", "tiles", "predicted", "observed", "agrees", "layer", "head"]
COLUMNS += ["query_tile", "key_tile", "max_score", "headroom", "max_weight"]
COLUMNS += ["error_o", "error_dq", "error_dk", "error_dv", "verdict"]


# ---------------------------------------------------------------------------------------------------------------------
# A case made: its gain, its inputs, its prediction.


def broken(failure: str, gain: float) -> BreakIt:
    off = FAILURES[failure].switches if failure in FAILURES else ()
    return BreakIt(score_gain=gain, **dict.fromkeys(off, False))


def lacks(case: Case, impl: str, dtype: str, call: Call) -> str | None:
    """Why this row is left out, or None."""
    if impl == "triton" and dtype == "bf16" and call.q.device.type != "cuda" and not MENDED:
        return "triton: its interpreter computes bf16 otherwise than a GPU does; left out"
    if impl == "triton" and case.one_tile:
        return "triton: chooses its tiles itself, one of all keys cannot be asked for; left out"
    if impl == "naive" and case.one_tile:
        return lacks(case._replace(one_tile=False), impl, dtype, call)
    config = AttentionConfig(impl, softmax_scale=call.config.softmax_scale, dropout_p=case.dropout_p)
    for switch in broken(case.failure, 1.0).without.split("+"):
        if switch in LACKS.get(impl, ()):
            return f"{case.failure}: {LACKS[impl][switch]}; left out"
    try:
        check_switches(config, broken(case.failure, 1.0))
    except ValueError as error:  # a run with a scale of its own has no 1 / sqrt(D) to leave out
        return f"{error}; left out"
    return None


def call_of(case: Case, dtype: str, gain: float, call: Call) -> Call:
    """The call as the case has it: inputs rounded to dtype and, for `low`, q turned round where that goes lower."""
    block = max(1, call.q.shape[2] // TILES_A_SIDE)
    q, k, v = call.q, call.k, call.v
    if case.gain == "low" and turned(call):
        q = -q
    if case.cut:
        k, v = (x[:, :, block // 2 :] for x in (k, v))
    # As fp16's gradient scaler would: gradients of a mean over tokens are too small for it as they are.
    scale = 2.0 ** -math.floor(math.log2(float(call.do.abs().max()) or 1.0))
    q, k, v, do = (x.to(DTYPES[dtype]) for x in (q, k, v, call.do * scale))
    config = AttentionConfig(
        "naive",
        softmax_scale=call.config.softmax_scale,
        window=max(1, block // 2) if case.window else None,
        dropout_p=case.dropout_p,
    )
    seed = torch.tensor(SEED + call.layer, device=q.device) if case.dropout_p else None
    return Call(call.layer, q, k, v, q, config, broken(case.failure, gain), seed, None, do)


def config_of(impl: str, problem: Call, case: Case) -> AttentionConfig:
    """The problem's, with the implementation and its tiles; naive's are those that places are told in."""
    T = problem.q.shape[2]
    block = max(1, T // TILES_A_SIDE)
    tile = (T, T) if case.one_tile else (block, block)
    if impl == "triton":
        from kernels.flash import tiles_for

        found = tiles_for("forward", problem.q, case.dropout_p > 0)
        tile = found.BLOCK_M, found.BLOCK_N
    return replace(problem.config, impl=impl, block_m=tile[0], block_n=tile[1])


def turned(call: Call) -> bool:
    return lowest(replace(call, q=-call.q)) < lowest(call)


def lowest(call: Call) -> float:
    """The lowest log-sum-exp of any row, or 0 where none is below."""
    least = gauges(replace(call, break_it=BreakIt(start_low=False))).min_l
    return min(0.0, math.log(max(least, 1e-300)))


def gain_of(case: Case, dtype: str, calls: list[Call]) -> float:
    """real: 1. raised: until the largest score is 10, where it is less. past: until it is a fifth past the log of the
    dtype's largest number. low: until a row's scores are a fifth below where its weights all round to 0."""
    if case.gain == "real":
        return 1.0
    number = torch.finfo(DTYPES[dtype])
    if case.gain == "low":
        low = min(lowest(replace(call, q=-call.q) if turned(call) else call) for call in calls)
        smallest = number.smallest_normal * number.eps / 2 if dtype == "fp16" else 2.0**-150
        return 1.2 * math.log(smallest) / min(low, -1e-6)
    top = max(gauges(replace(call, break_it=UNBROKEN)).max_score for call in calls)
    return max(1.0, 10 / top) if case.gain == "raised" else 1.2 * math.log(number.max) / top


def predicted(case: Case, impl: str, problems: list[Call], measured: list[Gauges]) -> str:
    """What theory says will be seen, from the gauges of what goes in and the tiles; nothing broken has been run."""
    top, least = max(g.max_score for g in measured), min(g.min_l for g in measured)
    (M, N), T = tile_of(problems[0]), problems[0].q.shape[2]
    T_k = problems[0].k.shape[2]
    # naive divides in float32 before it rounds its weights; the others round exp(s) itself
    held = torch.finfo(torch.float32 if impl == "naive" else problems[0].q.dtype)
    several = impl != "naive" and N < T_k
    match case.failure:
        case "no_max" if top > math.log(torch.finfo(torch.float32).max):
            return NAN
        case "no_max" if top > math.log(held.max):
            return OVERFLOW
        case "zero_init_max" if impl == "triton" and subnormal_sums(problems):
            return OVERFLOW
        case "no_max" | "zero_init_max":
            return SILENT if least < held.smallest_normal else NONE
        case "no_rescale" | "no_rescale_sum" | "no_rescale_output":
            return SILENT if several else NONE
        case "local_mask":
            return LEAK if several else SILENT if M < T else NONE
        case "no_scale":
            return SILENT
        case "unguarded_mask":
            window = problems[0].config.window
            return NAN if T > T_k or (window and impl != "naive" and hidden_first_tile(T, M, N, window)) else NONE
        case "stale_seed" | "unrestored_seed":
            return GRADIENT if case.dropout_p else NONE
    return NONE  # none; and bf16_ties, a rounding more in each tile, which is below the budget


def subnormal_sums(problems: list[Call]) -> bool:
    """Whether a row's sum of weights from a maximum of 0 is above 0, and so small that 1 / l is infinite: triton
    multiplies by that. A GPU's exp2 makes 0 of such weights, and the mended interpreter's; NumPy does not."""
    low, high = -150 * math.log(2), -math.log(torch.finfo(torch.float32).max)
    if problems[0].q.device.type == "cuda" or MENDED:
        return False
    return any(bool(((lse > low) & (lse < high)).any()) for lse in (right_for(p)["lse"] for p in problems))


def hidden_first_tile(T: int, M: int, N: int, window: int) -> bool:
    """Whether a row's window begins after the first tile of keys that its tile of rows visits."""
    return any(i - window + 1 > max(0, (i // M * M) - window + 1) // N * N + N - 1 for i in range(T))


def tile_of(problem: Call) -> tuple[int, int]:
    return problem.config.block_m, problem.config.block_n


# ---------------------------------------------------------------------------------------------------------------------
# A case looked at.

RESULTS = ("o", "dq", "dk", "dv")


def run(problem: Call, wide: bool = False) -> dict[str, Tensor]:
    """o, dq, dk, dv and lse, in float64 if wide."""
    q, k, v, do = (x.double() if wide else x for x in (problem.q, problem.k, problem.v, problem.do))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    config, seed = problem.config, problem.seed

    seeds = iter([seed, None if seed is None else seed + 1])

    def forward(q, k, v):
        options = {"seed": next(seeds), "break_it": problem.break_it, "return_lse": True}
        return attention(q, k, v, config, **options)

    # Without restore_seed as draw_and_run in model/gpt.py: computed again, the call draws another seed.
    again = not problem.break_it.restore_seed
    call = (lambda *x: checkpoint(forward, *x, use_reentrant=False, preserve_rng_state=False)) if again else forward
    o, lse = call(q, k, v)
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    return {name: x.detach() for name, x in zip(RESULTS, found, strict=True)} | {"lse": lse.detach()}


class Seen(NamedTuple):
    """Of one layer."""

    found: dict[str, Tensor]
    right: dict[str, Tensor]  # float64
    allowed: dict[str, float]  # largest difference


def right_for(problem: Call) -> dict[str, Tensor]:
    """The whole algorithm in float64, on the same rounded inputs."""
    return run(replace(problem, config=replace(problem.config, impl="naive"), break_it=unbroken(problem)), wide=True)


def allowed_for(problem: Call, right: dict[str, Tensor]) -> dict[str, float]:
    """How far from right a result may be. By what the implementation itself errs when it is whole, and not by naive's
    errors as bench.py has it: on a trained model's q, k and v the gradients of tiled and triton, which compute weights
    again, can be further off than twice naive's (LOG.md)."""
    usual, eps = run(replace(problem, break_it=unbroken(problem))), torch.finfo(problem.q.dtype).eps
    errors = {name: float(row_errors(usual[name], right[name]).max()) for name in RESULTS}
    return {name: 2 * (errors[name] + eps * float(right[name].abs().max())) for name in RESULTS}


def unbroken(problem: Call) -> BreakIt:
    return BreakIt(score_gain=problem.break_it.score_gain)


def observed(problems: list[Call], seen: list[Seen]) -> str:
    """What is to be seen in the results, whatever was taken out."""
    if not all(bool(s.found["o"].isfinite().all()) for s in seen):
        # +inf and NaN: the sum of the weights went first. (A row that sees nothing has lse = -inf by right.)
        sums = torch.stack([((s.found["lse"] == INF) | s.found["lse"].isnan()).any() for s in seen])
        return NAN if bool(sums.any()) else OVERFLOW
    wrong = {name: any(bool(beyond(s, name).any()) for s in seen) for name in RESULTS}
    if wrong["o"]:
        return LEAK if any(leaks(problem) for problem in problems) else SILENT
    return GRADIENT if any(wrong.values()) else NONE


def beyond(seen: Seen, name: str) -> Tensor:
    """Rows that are wrong, bool (B, H or H_kv, rows)."""
    return row_errors(seen.found[name], seen.right[name]) > seen.allowed[name]


@torch.no_grad()
def leaks(problem: Call) -> bool:
    """Whether the first half of the rows changes when the second half of the values does."""
    half = problem.q.shape[2] // 2
    v = problem.v.clone()
    v[:, :, half:] += 1
    options = {"seed": problem.seed, "break_it": problem.break_it}
    first, second = (attention(problem.q, problem.k, x, problem.config, **options)[:, :, :half] for x in (problem.v, v))
    return not torch.equal(first, second)


def row_errors(found: Tensor, right: Tensor) -> Tensor:
    return (found.double() - right).abs().amax(-1).nan_to_num(nan=INF)


def distance(found: Tensor, right: Tensor) -> float:
    """|found - right| / |right|."""
    return float((found.double() - right).norm() / right.norm())


def first_place(problems: list[Call], seen: list[Seen], symptom: str) -> dict:
    """Where it goes wrong first, in the order of computing: layer, head, query tile and, in the forward, key tile."""
    names = ("layer", "head", "query_tile", "key_tile")
    for problem, s in zip(problems, seen, strict=True):
        if symptom in (NAN, OVERFLOW):
            if (place := first_bad(problem)) is not None:
                return {name: getattr(place, name) for name in names}
            continue
        bad = beyond(s, "dq" if symptom == GRADIENT else "o")
        if not bad.any():
            continue
        M = tile_of(problem)[0]
        query_tile = int(bad.any(0).any(0).nonzero()[0]) // M
        b, h, row = bad[:, :, query_tile * M : (query_tile + 1) * M].nonzero()[0].tolist()
        key_tile = None if symptom == GRADIENT else first_key_tile(problem, s, b, h, query_tile * M + row)
        return dict(zip(names, (problem.layer, h, query_tile, key_tile), strict=True))
    return dict.fromkeys(names)


def first_key_tile(problem: Call, seen: Seen, b: int, h: int, row: int) -> int | None:
    """The first tile of keys after which acc / l of a row is beyond its budget; None where it is at no tile."""
    whole = replace(problem, break_it=unbroken(problem))
    right, allowed = None, seen.allowed["o"]
    by_tile = {tile: o for tile, _, _, o in walk(whole, b, h, row)}
    for tile, _, _, o in walk(problem, b, h, row):
        right = by_tile.get(tile, right)
        if right is None or not bool((o - right).abs().max() <= allowed):
            return tile
    return None


@torch.no_grad()
def walk(problem: Call, b: int, h: int, row: int) -> Iterator[tuple[int, float, float, Tensor]]:
    """A row's key tile, m (natural), l and acc / l (D,) after each tile, as tiled computes them."""
    T_k = problem.k.shape[2]
    M, N = tile_of(problem)
    q, k, v = by_key_head(problem.q, problem.k, problem.v)
    _, G, T, _ = q.shape
    key_head, g = divmod(h, G)
    n, posed = b * problem.k.shape[1] + key_head, problem.problem()
    rows = range(row // M * M, min(T, row // M * M + M))
    column_tiles = tiles(T_k, N)
    on_chip = q.new_empty(q.shape[0] * G * len(rows) * min(N, T_k), dtype=torch.float32)
    q_i = load(q, rows)
    m, l, acc = nothing_seen(q_i, torch.float32, posed.break_it)
    r = g * len(rows) + row - rows.start
    posed.mask.read_edges([rows], column_tiles)
    for columns, seen in posed.mask.columns_for(rows, column_tiles):
        m, l, acc = absorb(q_i, load(k, columns), load(v, columns), m, l, acc, rows, columns, seen, posed, on_chip)
        yield columns.start // N, float(m[n, r]) / LOG2E, float(l[n, r]), acc[n, r].double() / l[n, r].double()


def view(case: Case, gain: float, problems: list[Call], seen: list[Seen]) -> View:
    of = "dq" if case.failure in ("stale_seed", "unrestored_seed") else "o"
    M = tile_of(problems[0])[0]
    maps, worst_row = [], None
    for problem, s in zip(problems, seen, strict=True):
        errors = row_errors(s.found[of], s.right[of])
        relative = errors.amax(0) / float(s.right[of].abs().max())  # (H, T)
        maps += [torch.stack([part.amax(-1) for part in relative.split(M, dim=-1)], -1)]
        if worst_row is None and beyond(s, "o").any():  # of the first layer that is wrong; of equals the last
            b, h, row = max((errors == errors.max()).nonzero().tolist(), key=lambda place: place[2])
            worst_row = problem, b, h, row
    problem, b, h, row = worst_row or (problems[0], 0, 0, problems[0].q.shape[2] - 1)
    whole = replace(problem, break_it=unbroken(problem))
    states = {
        name: [(tile, m, l) for tile, m, l, _ in walk(call, b, h, row)]
        for name, call in (("whole", whole), ("broken", problem))
    }
    scores = "" if gain == 1.0 else f", scores x {gain:.3g}"
    scores += f", {SHOWN[case.failure]}" if case.failure in SHOWN else ""
    place = f"layer {problem.layer}, head {h}, row {row}"
    place += ": m and l are right" if states["whole"] == states["broken"] else ""
    return View(case.failure, case.where + scores, of, torch.cat(maps), problem.q.shape[1], place, states)


def available(device: torch.device) -> list[str]:
    return ["naive", "tiled"] + ([] if triton_refusal(device.type) else ["triton"])


# ---------------------------------------------------------------------------------------------------------------------
# Pictures. Each failure has one colour in all of them; the whole algorithm is black and dashed.


class Curves(NamedTuple):
    """Short trainings in one setting: the loss of each step, in nats a token."""

    setting: str
    whole: list[float]
    broken: dict[str, list[float]]  # failure -> until it is not finite, that step included


def colour(failure: str):
    from matplotlib import colormaps

    return (*colormaps["tab10"].colors, "darkgoldenrod")[list(FAILURES).index(failure)]


def errors_figure(views: dict[str, View]):
    """The relative error of o over query tiles and heads, a panel a failure."""
    figure, panels = grid(
        len(views), "error of attention's output per query tile and head, whole algorithm in float64 = 0"
    )
    for axes, shown in zip(panels, views.values(), strict=False):
        image = draw_errors(axes, shown)
        axes.set_title(f"{shown.failure}: error of {shown.of}\n{shown.about}", color=colour(shown.failure), fontsize=9)
    with_scale(figure, image, panels)
    return figure


def states_figure(views: dict[str, View]):
    """The running maximum m and the running sum l of one row over the tiles of keys, whole beside broken; of those
    failures that change them, if any does."""
    from matplotlib.figure import Figure

    views = {name: shown for name, shown in views.items() if shown.states["whole"] != shown.states["broken"]} or views
    columns = min(4, len(views))
    lines = -(-len(views) // columns)
    figure = Figure(figsize=(max(5, 3.2 * columns), 4.0 * lines + 0.5), layout="constrained")
    figure.suptitle("m and l of the worst row, tile by tile", fontsize=11)
    axes = figure.subplots(2 * lines, columns, squeeze=False)
    for i in range(lines * columns):
        pair = axes[i // columns * 2 : i // columns * 2 + 2, i % columns]
        if i < len(views):
            shown = list(views.values())[i]
            draw_states(pair, shown)
            pair[0].set_title(f"{shown.failure}\n{shown.about}\n{shown.place}", color=colour(shown.failure), fontsize=8)
        else:
            [one.remove() for one in pair]
    return figure


def losses_figure(settings: list[Curves]):
    """The loss of short trainings, a panel for those that share their setting and their whole run."""
    figure, panels = grid(len(settings), "loss of short trainings from one seed; x: not finite from here on", 3, 3.2)
    for axes, curves in zip(panels, settings, strict=True):
        draw_losses(axes, curves)
        axes.set_title(curves.setting, fontsize=9)
    return figure


def failure_figure(shown: View, curves: Curves):
    """All three of one failure, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.3), layout="constrained")
    title = f"{shown.failure}: without {FAILURES[shown.failure].removed}"
    figure.suptitle(title, color=colour(shown.failure), fontsize=12)
    cells = figure.add_gridspec(2, 3, width_ratios=[1.2, 1, 1.1])
    axes = figure.add_subplot(cells[:, 0])
    with_scale(figure, draw_errors(axes, shown), [axes])
    axes.set_title(f"error of {shown.of}: {shown.about}", fontsize=9)
    pair = [figure.add_subplot(cells[i, 1]) for i in range(2)]
    draw_states(pair, shown)
    pair[0].set_title(shown.place, fontsize=8)
    axes = figure.add_subplot(cells[:, 2])
    draw_losses(axes, curves._replace(broken={shown.failure: curves.broken[shown.failure]}))
    axes.set_title(f"training, {curves.setting}", fontsize=9)
    return figure


def save(figure, path: Path) -> None:
    """As PNG of 256 colours, which are enough, and half of the bytes."""
    from PIL import Image

    figure.savefig(memory := BytesIO(), dpi=80)
    image = Image.open(memory).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def grid(panels: int, title: str, columns: int = 4, height: float = 2.6):
    """A figure with so many axes, the rest of its last row empty."""
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(max(6.5, 3.4 * columns), height * lines + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    found = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for axes in found[panels:]:
        axes.remove()
    return figure, found[:panels]


def draw_errors(axes, shown: View):
    """A heat map, from rounding to all of it; what is not finite has a colour of its own."""
    from matplotlib import colormaps

    colours = colormaps["magma_r"].with_extremes(bad="deepskyblue")
    errors = shown.errors.cpu().double().clamp(min=1e-9).log10()
    errors[~errors.isfinite()] = math.nan
    image = axes.imshow(errors.numpy(), cmap=colours, vmin=-7, vmax=1, aspect="auto", interpolation="nearest")
    names = [f"{i // shown.heads}.{i % shown.heads}" for i in range(len(errors))]
    every = -(-len(names) // 12)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.set(xlabel="query tile", ylabel="layer.head")
    return image


def with_scale(figure, image, panels) -> None:
    bar = figure.colorbar(image, ax=panels, ticks=range(-7, 2, 2), extend="both")
    bar.ax.set_yticklabels(["1e-7", "1e-5", "0.1 %", "10 %", "1000 %"], fontsize=8)
    bar.set_label("error of the worst row / largest |right|\nblue: not finite", fontsize=8)


def draw_states(pair, shown: View) -> None:
    """m on the first axes, l on the second; a cross where a number is not finite."""
    looks = {
        "broken": {"color": colour(shown.failure), "marker": "o", "ms": 5, "lw": 2.5, "alpha": 0.8},
        "whole": {"color": "black", "ls": "--", "lw": 1, "marker": ".", "ms": 4},
    }
    for which, (axes, symbol) in enumerate(zip(pair, "ml", strict=True), start=1):
        values = []
        for name, style in looks.items():
            # The lowest float32 stands for a row that has seen no key yet, and so does l = 0.
            points = [(s[0], s[which]) for s in shown.states[name] if math.isfinite(s[which]) and s[1] > -1e30]
            values += [value for _, value in points if value > 0]
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
            lost = [s[0] for s in shown.states[name] if not math.isfinite(s[which])]
            above = axes.get_xaxis_transform()  # x in tiles, y in parts of the frame
            axes.plot(lost, [0.9] * len(lost), "x", color=style["color"], transform=above, ms=8, mew=2)
        if symbol == "l" and values and max(values) > 100 * min(values):
            axes.set_yscale("log")
        axes.set_ylabel("m, running max" if symbol == "m" else "l, running sum", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlim(-0.5, TILES_A_SIDE - 0.5)
        axes.grid(alpha=0.3)
    pair[1].set_xlabel("tile of keys; x: not finite", fontsize=9)
    pair[0].legend(fontsize=7)


def draw_losses(axes, curves: Curves) -> None:
    """Means of five steps, as one step's batch is easier than another's; single steps are faint."""
    looks = {name: {"color": colour(name), "lw": 1.8} for name in curves.broken}
    looks["whole"] = {"color": "black", "ls": "--", "lw": 1.2}
    for name, losses in (curves.broken | {"whole": curves.whole}).items():
        sound = [x for x in losses if math.isfinite(x)]
        means = [sum(sound[max(0, i - 4) : i + 1]) / len(sound[max(0, i - 4) : i + 1]) for i in range(len(sound))]
        axes.plot(range(1, len(sound) + 1), means, label=name, **looks[name])
        axes.plot(range(1, len(sound) + 1), sound, color=looks[name]["color"], lw=0.5, alpha=0.25)
        if len(sound) < len(losses):
            last = means[-1] if means else curves.whole[0]
            axes.plot(len(sound) + 1, last, "x", color=looks[name]["color"], ms=11, mew=3, zorder=5)
    axes.set(xlabel="step", ylabel="loss (nats), mean of 5 steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
