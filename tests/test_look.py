"""The weights that look=true shows are those that attention multiplies v by; the page holds them."""

import base64
import json
import math
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import breakit
import train
from lab.files import write
from lab.look import LOST, STEPS, of_head
from model.attention import AttentionConfig, attention
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from tests.reference import assert_within_budget
from tests.runs import losses
from training.metrics import frames, read_metrics
from training.probe import Call, record
from training.weights import by_rows, places_of, read, visited

T = 70


def call_of(config: AttentionConfig, kv_heads: int = 4, broken: str = "none", gain: float = 3.0) -> Call:
    """The last attention call of a model with large weights, whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = GPTConfig(n_layer=2, n_head=4, n_kv_head=kv_heads, n_embd=32, context_length=T, vocab_size=20)
    model = GPT(sizes, config, BreakIt(broken)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(gain)
    documents = (torch.arange(T) // 30)[None] if config.documents else None
    return record(model, torch.randint(20, (1, T)), documents=documents)[-1]


def seen_by_v(call: Call, impl: str) -> torch.Tensor:
    """The weights (H, T, T), read off attention itself: its output is linear in v, here the columns of an identity."""
    config, D = replace(call.config, impl=impl), call.v.shape[-1]
    columns = torch.eye(T, -(-T // D) * D, dtype=call.v.dtype).split(D, dim=1)
    v = (c.expand(*call.v.shape[:2], T, D).contiguous() for c in columns)
    options = {"documents": call.documents, "break_it": call.break_it}
    return torch.cat([attention(call.q, call.k, x, config, **options) for x in v], -1)[0, ..., :T]


OPTIONS = [{}, {"window": 20}, {"softcap": 2.0}, {"alibi": True}, {"documents": True}, {"block_n": 9}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_weights_are_naives_to_rounding(options, kv_heads):
    call = call_of(AttentionConfig("tiled", **{"block_m": 16, "block_n": 24} | options), kv_heads)
    found, naive = torch.cat([p for _, p in by_rows(call)], 1), seen_by_v(call, "naive")
    call.q, call.k, call.v = call.q.double(), call.k.double(), call.v.double()
    assert_within_budget({"p": found}, {"p": naive}, {"p": seen_by_v(call, "naive")})


@pytest.mark.parametrize(
    "broken", ["no_rescale", "no_rescale_sum", "no_rescale_output", "local_mask", "no_scale", "no_max"]
)
def test_a_broken_call_shows_the_weights_that_it_computes_with(broken):
    call = call_of(AttentionConfig("tiled", block_m=16, block_n=24), broken=broken)
    found = torch.cat([p for _, p in by_rows(call)], 1)
    torch.testing.assert_close(found, seen_by_v(call, "tiled"), rtol=1e-5, atol=1e-6)
    whole = torch.cat([p for _, p in by_rows(replace(call, break_it=BreakIt()))], 1)
    torch.testing.assert_close(whole.sum(-1), torch.ones(4, T))
    assert (broken == "no_max") == torch.allclose(found, whole, atol=1e-4)


def test_a_reading_is_that_of_the_whole_matrix():
    call, tokens = call_of(AttentionConfig("tiled", block_m=16, block_n=24)), torch.arange(T) % 7
    p = seen_by_v(call, "naive")
    found = read(call, tokens, size=18)  # points of 4 x 4 tokens, the last ones of 2
    edges = list(range(0, T, 4))
    rows = torch.stack([p[:, i : i + 4].mean(1) for i in edges], 1)
    torch.testing.assert_close(found.maps, torch.stack([rows[..., j : j + 4].sum(-1) for j in edges], -1))
    torch.testing.assert_close(found.entropy, -torch.xlogy(p, p).sum(-1)[:, 1:].mean(-1))
    distances = (torch.arange(T) - p.argmax(-1))[:, 1:]
    for head, (distance, often) in enumerate(zip(found.distance, found.often, strict=True)):
        assert distance in distances[head]
        counts = distances[head].unique(return_counts=True)[1]
        assert counts.max() == (distances[head] == distance).sum() == round(float(often) * (T - 1))
    places = places_of(tokens, range(T))
    i, j = 20, [k for k in range(1, 20) if k % 7 == (20 + 1) % 7]  # what came after the token at 20, earlier
    assert places["induction"][i].nonzero().flatten().tolist() == j
    assert places["same"][i].nonzero().flatten().tolist() == [6, 13]
    for name, at in places.items():
        has = at.any(-1)
        torch.testing.assert_close(found.shares[name], (p * at).sum(-1)[:, has].mean(-1))


def reading_of(asked: list[torch.Tensor], tokens: torch.Tensor):
    """The reading of heads made by hand: k is the identity, and q asks for the keys that a head reads, (T, T)."""
    q, k = 50 * torch.stack(asked)[None].float(), torch.eye(32).expand(1, len(asked), 32, 32)
    config = AttentionConfig("tiled", softmax_scale=1.0)
    return read(Call(0, q, k, k, k, config, BreakIt(), None, None), tokens, 32)


def test_the_distance_is_that_of_most_rows():
    """One head reads three tokens back, one reads the first token, at another distance in each row."""
    i, j = torch.arange(32)[:, None], torch.arange(32)
    reading = reading_of([j == (i - 3).clamp(min=0), (j == 0).expand(32, 32)], j)
    assert reading.distance[0] == 3
    assert reading.often.tolist() == [pytest.approx(29 / 31), pytest.approx(1 / 31)]


def test_the_patterns_are_named():
    tokens = torch.tensor([5, 1, 2, 3, 4, 5, 6, 7] * 4)
    places = places_of(tokens, range(32))
    reading = reading_of([*places.values()], tokens)
    assert [reading.pattern(head) for head in range(5)] == list(places)


def test_the_tiles_that_are_skipped_are_those_that_nothing_sees():
    call = call_of(AttentionConfig("tiled", block_m=16, block_n=24, window=10))
    seen = {(i // 16, j // 24) for i in range(T) for j in range(max(0, i - 9), i + 1)}
    assert set(visited(call)) == seen


@pytest.fixture(scope="module")
def runs(small, call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"whole": [], "broken": ["break_it=no_rescale"], "window": ["attention.window=8"]}
    for name, options in kinds.items():
        shape = ["steps=2", "attention=tiled", "attention.block_n=8"]
        call(train, *small, f"runs={folder}", f"name={name}", *shape, *options).succeeded()
    return folder


def page_of(text: str) -> dict:
    return json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])


@pytest.fixture
def look(runs, call, tmp_path):
    """look(run, arguments): what the page of that run holds."""

    def look(run: str, *arguments: str) -> dict:
        call(breakit, "look=true", f"runs={runs}", f"run={run}", f"out={tmp_path}/{run}.html", *arguments).succeeded()
        return page_of((tmp_path / f"{run}.html").read_text())

    return look


def test_the_page_holds_the_weights_of_every_head(look):
    page = look("whole", "prompt=a bc </script>")
    assert page["tokens"][1:] == list("a bc </script>")
    [view] = page["views"]
    assert len(view["layers"]) == 2
    for layer in view["layers"]:
        for head in layer["heads"]:
            level = np.frombuffer(base64.b64decode(head["map"]), np.uint8)
            assert len(level) == 15 * 16 // 2
            assert (level <= STEPS).all()
            rows = np.split(head["scale"] * (level / STEPS) ** 2, np.cumsum(range(1, 15)))
            np.testing.assert_allclose([row.sum() for row in rows], 1, atol=0.05)  # a byte a weight


def test_a_broken_run_is_shown_as_it_is_and_beside_it_the_whole_algorithm(runs, call):
    assert "BROKEN" in call(breakit, "look=true", f"runs={runs}", "run=broken", "tokens=32").succeeded().out
    page = page_of(next(runs.glob("broken-*/look.html")).read_text())
    assert page["broken"]
    last = [[head["map"] for layer in view["layers"] for head in layer["heads"]] for view in page["views"]]
    assert len(last) == 2
    assert last[0] != last[1]


@pytest.mark.parametrize("given", ["prompt=it's a text", "tokens=20"])
def test_the_pages_command_traces_the_same_row_where_a_trace_can(given, look, call):
    page = look("whole", given)
    last = len(page["tokens"]) - 1
    done = call(breakit, *shlex.split(page["trace"])[2:], "layer=1", "head=1", f"row={last}").succeeded()
    assert f"row {last}, {page['tokens'][-1]!r}" in done.out
    assert look("window", given)["trace"] == ""


def test_weights_that_are_not_finite_are_marked():
    call = call_of(AttentionConfig("tiled"), broken="no_max", gain=30.0)
    head = of_head(read(call, torch.arange(T), T), 0)
    assert LOST in base64.b64decode(head["map"])
    assert math.isfinite(head["scale"])


@pytest.mark.parametrize("place", [Path.symlink_to, Path.hardlink_to])
def test_the_page_is_not_written_through_a_link_in_the_runs_folder(place, tmp_path):
    theirs, page = tmp_path / "theirs", tmp_path / "look.html"
    theirs.write_text("theirs")
    place(page, theirs)
    with suppress(ValueError):
        write(page, "a page")
    assert theirs.read_text() == "theirs"


def test_a_film_has_a_frame_for_each_step_asked_for_and_changes_no_loss(small, call, tmp_path):
    """After a resume its frames are those of the run without a stop."""
    run = [*small, f"runs={tmp_path}", "checkpoint_every=2", "model.dropout_p=0.1"]
    film = [*run, "probe.film=2"]
    for given in ([*run, "name=plain", "steps=6"], [*film, "name=film", "steps=6"], [*film, "name=cut", "steps=3"]):
        call(train, *given).succeeded()
    assert losses(tmp_path / "film") == losses(tmp_path / "plain")
    found = frames(tmp_path / "film", 6)
    assert list(found) == [2, 4, 6]
    image = imread(found[6])  # (2 layers of 32 points, 2 heads of 32 points)
    assert image.shape[:2] == (64, 64)
    assert (image[:32, :32][np.triu_indices(32, 1)] == 1).all()  # white where nothing is seen
    (tmp_path / "cut/film/step_000001.png").write_text("no picture")
    for foreign in ("step_.png", "step_abc.png"):
        (tmp_path / "cut/film" / foreign).touch()
    os.mkfifo(tmp_path / "cut/film/step_000000.png")
    call(train, *film, "name=cut", "resume=auto", "steps=6").succeeded()
    assert list(frames(tmp_path / "cut", 6)) == [1, 2, 3, 4, 6]  # 3: the end of the first part
    for step in (2, 4, 6):
        assert found[step].read_bytes() == frames(tmp_path / "cut", 6)[step].read_bytes()
    assert (tmp_path / "cut" / "film.png").stat().st_size > 0
    before = f"resume={tmp_path / 'film' / 'checkpoints' / 'step_000004'}"
    call(train, *run, "name=film", before, "steps=5", "probe.film=5").succeeded()
    assert list(frames(tmp_path / "film", 6)) == [2, 4, 5]
    logged = [r for r in read_metrics(tmp_path / "film" / "metrics.jsonl") if "film.induction" in r]
    assert [r["step"] for r in logged] == [2, 4, 5]
