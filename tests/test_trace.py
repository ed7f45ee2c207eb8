"""python breakit.py trace=true: a row's story in lines, of the worked example or of a run."""

import json
import re

import numpy as np
import pytest
import torch

import breakit
import train
from lab.story import ORDERS, THE_CAT
from lab.trace import head_of_run, tell
from model import gpt
from model.attention import AttentionConfig, attention
from tests.reference import assert_within_budget
from tests.test_attention import CAT_OUTPUT
from tests.test_docs import tables
from training import checkpoint


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`, whose three layers of heads share key heads."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.n_layer=3", "model.n_head=4", "model.n_kv_head=2", "model.position=rope"]
    ended = call(train, *small, *model, "steps=20", f"runs={folder}", "name=taught")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def told(call):
    """told(arguments): the lines; the table's begin with the fourth."""

    def told(*arguments: str) -> list[str]:
        ended = call(breakit, "trace=true", *arguments)
        assert ended.code == 0, ended.err
        return ended.out.splitlines()

    return told


def numbers(line: str) -> list[str]:
    """Of a line's columns; what numbers the words after them have come last."""
    return re.findall(r"-?\d+\.\d{4}|nan|inf", line)


def test_the_worked_row_has_the_numbers_of_the_documentation(told):
    lines = told()[3:]
    for line, (_, _, m, alpha, _, l, _) in zip(lines[:3], tables("tile"), strict=True):
        assert numbers(line)[:3] == [f"{float(m):.4f}", l, alpha]
    assert [float(x) for x in numbers(lines[3])[:4]] == CAT_OUTPUT[3]
    assert len(lines) == 4


def test_every_line_of_a_table_has_its_columns_below_each_other(told):
    lines = told("failure=no_rescale")[2:]
    begins = lines[0].index("what changed")
    assert all(line[begins - 2 : begins] == "  " and line[begins] != " " for line in lines)


def test_a_broken_row_is_shown_beside_the_right_one(told):
    *_, broken, right = told("failure=no_rescale")
    assert [float(x) for x in numbers(right)[:4]] == CAT_OUTPUT[3]
    found, wanted = (np.array([float(x) for x in numbers(line)[:4]]) for line in (broken, right))
    off = 100 * np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert abs(float(re.search(r"is ([\d.]+) % away", right)[1]) - off) < 0.1


def test_without_the_maximum_the_line_of_the_overflow_is_nan(told):
    lines = told("failure=no_max", "score_gain=120", "dtype=float32")[3:]
    assert ["nan" in numbers(line) for line in lines] == [False, True, True, True, False]


def test_the_order_of_the_loops_decides_which_tiles_are_a_rows(told):
    by_order = [[line.split()[0] for line in told(f"order={order}")[3:6]] for order in ORDERS]
    assert by_order == [["4", "5", "6"], ["2", "5", "8"]]


def test_the_file_has_what_was_told(told, tmp_path):
    lines = told(f"out={tmp_path}/sub/trace.json", "block_n=3")
    kept = json.loads((tmp_path / "sub/trace.json").read_text())
    assert {name: kept[name] for name in "qkv"} == {name: THE_CAT[name] for name in "qkv"}
    assert (kept["block_m"], kept["block_n"], kept["causal"]) == (2, 3, False)
    assert [(tile["rows"], tile["columns"]) for tile in kept["tiles"][:3]] == [
        ([0, 2], [0, 3]),
        ([0, 2], [3, 5]),
        ([2, 4], [0, 3]),
    ]
    last = [tile for tile in kept["tiles"] if tile["rows"] == [2, 4]][-1]
    assert [f"{x:.4f}" for x in last["o"][1]] == numbers(lines[-1])[:4]


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1), (2, 3)])
def test_a_runs_head_gives_what_the_model_computes_there(runs, layer, head):
    """What goes into the model's last projection is the output of the story of the q, k and v that were taken."""
    taken = head_of_run("taught", runs, layer, head, 20)
    found = checkpoint.load(checkpoint.last(runs / "taught" / checkpoint.FOLDER))
    net = gpt.GPT(gpt.GPTConfig(**found.state["config"]["model"]), AttentionConfig("naive")).eval()
    net.load_state_dict(found.model)
    outputs = []
    net.blocks[layer].attention.out.register_forward_hook(lambda _, inputs, __: outputs.append(inputs[0]))
    tokens = [256 if label == "<|endoftext|>" else ord(label) for label in taken.labels]
    with torch.no_grad():
        net(torch.tensor([tokens]))
    o = outputs[0][0].unflatten(-1, (4, -1))[:, head]  # (T, D)

    options = {"causal": True, "block_m": 8, "block_n": 8, "order": "queries_outside"}
    reference = torch.from_numpy(tell(taken, "none", 1.0, "float64", **options)[1])
    q, k, v = (torch.from_numpy(x)[None, None].float() for x in (taken.q, taken.k, taken.v))
    naive = attention(q, k, v, AttentionConfig("naive"), softmax_scale=taken.softmax_scale)[0, 0]
    assert_within_budget({"o": o}, {"o": naive}, {"o": reference})


def test_taking_the_heads_changes_nothing_at_the_door(runs, told):
    told("run=latest", f"runs={runs}")
    assert gpt.attention is attention


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["trace=true", "failure=no_luck"], "failure=no_luck is not known; choose none, no_max, no_rescale"),
        (
            ["trace=true", "failure=stale_seed"],
            "failure=stale_seed: no trace of it; python breakit.py failure=stale_seed has it",
        ),
        (["trace=true", "steps=3"], "steps=3: trace=true does not read it; it is for the lab"),
        (["trace=true", "failure=local_mask"], "local_mask breaks the causal mask, and there is none: use causal=true"),
        (["trace=true", "row=5"], "row=5: there are 5 rows, counted from 0"),
        (["trace=true", "layer=1"], "layer=1: the worked example has no such choice; add run=NAME"),
        (["trace=true", "out=trace.txt"], "out=trace.txt: name a file that ends in .json"),
        (["trace=true", "run=taught", "layer=3"], "layer=3: .*step_.* has 3, counted from 0"),
        (["trace=true", "run=taught", "head=4"], "head=4: .*step_.* has 4, counted from 0"),
        (["trace=true", "run=taught", "tokens=33"], "tokens=33: the model's context is 32"),
        (["trace=true", "run=untaught"], "run=untaught: no checkpoint .*taught"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_in_one_line(call, runs, typed, answer):
    of_run = [f"runs={runs}"] if any(word.startswith("run=") for word in typed) else []
    ended = call(breakit, *typed, *of_run)
    assert ended.code == 2
    assert re.fullmatch(f"breakit: .*{answer}.*\n", ended.err)


def test_a_run_with_a_window_is_refused_for_the_story_has_none(call, small, tmp_path):
    assert call(train, *small, "attention.window=8", "steps=1", f"runs={tmp_path}", "name=near").code == 0
    ended = call(breakit, "trace=true", "run=near", f"runs={tmp_path}")
    assert "attention.window=8: breakit.py knows the causal mask alone" in ended.err
