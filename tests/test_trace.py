"""python breakit.py trace=true: a row's story in lines, of the worked example or of a run."""

import json
import re

import numpy as np
import pytest
import torch

import breakit
import train
from lab.story import ORDERS, THE_CAT, story
from lab.trace import head_of_run, tell
from model import gpt
from model.attention import AttentionConfig, attention
from tests.reference import assert_within_budget
from tests.runs import last
from tests.test_attention import CAT_OUTPUT
from tests.test_story import the_cat
from training import checkpoint


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`, whose three layers of heads share key heads."""
    folder = tmp_path_factory.mktemp("runs")
    model = ["model.n_layer=3", "model.n_head=4", "model.n_kv_head=2", "model.position=rope"]
    call(train, *small, *model, "steps=20", f"runs={folder}", "name=taught").succeeded()
    return folder


@pytest.fixture
def told(call):
    """told(arguments): the lines; the table's begin with the fourth."""

    def told(*arguments: str) -> list[str]:
        ended = call(breakit, "trace=true", *arguments).succeeded()
        return ended.out.splitlines()

    return told


def numbers(line: str) -> list[str]:
    """Of a line's columns; what numbers the words after them have come last."""
    return re.findall(r"-?\d+\.\d{4}|nan|inf", line)


def test_the_worked_row_has_the_numbers_of_its_story(told):
    lines = told()[3:]
    tiles = [tile for tile in story(*the_cat(), block_m=2, block_n=2, causal=False)[0] if 3 in tile.rows]
    for line, tile in zip(lines[:3], tiles, strict=True):
        assert numbers(line)[:3] == [f"{x[1]:.4f}" for x in (tile.m, tile.l, tile.alpha)]
    assert [float(x) for x in numbers(lines[3])[:4]] == CAT_OUTPUT[3]
    assert len(lines) == 4
    assert [float(x) for x in numbers(told("row=0")[-1])[:4]] == CAT_OUTPUT[0]


def test_a_broken_row_is_shown_beside_the_right_one(told):
    """In columns that are below each other."""
    lines = told("failure=no_rescale")
    found, wanted = (np.array([float(x) for x in numbers(line)[:4]]) for line in lines[-2:])
    assert wanted.tolist() == CAT_OUTPUT[3]
    off = 100 * np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert abs(float(re.search(r"is ([\d.]+) % away", lines[-1])[1]) - off) < 0.1
    begins = lines[2].index("what changed")
    assert all(line[begins - 2 : begins] == "  " and line[begins] != " " for line in lines[2:])


def test_without_the_maximum_the_line_of_the_overflow_is_nan(told):
    lines = told("failure=no_max", "score_gain=120", "dtype=float32")[3:]
    assert ["nan" in numbers(line) for line in lines] == [False, True, True, True, False]


def test_the_order_of_the_loops_decides_which_tiles_are_a_rows(told):
    by_order = [[line.split()[0] for line in told(f"order={order}")[3:6]] for order in ORDERS]
    assert by_order == [["4", "5", "6"], ["2", "5", "8"]]
    assert [float(x) for x in numbers(told("row=0")[-1])[:4]] == CAT_OUTPUT[0]


def test_the_file_has_what_was_told(told, tmp_path):
    lines = told(f"out={tmp_path}/sub/trace.json", "block_n=3")
    kept = json.loads((tmp_path / "sub/trace.json").read_text())
    assert {name: kept[name] for name in "qkv"} == {name: THE_CAT[name] for name in "qkv"}
    assert (kept["block_m"], kept["block_n"], kept["causal"]) == (2, 3, False)
    places = [([0, 2], [0, 3]), ([0, 2], [3, 5]), ([2, 4], [0, 3])]
    assert [(tile["rows"], tile["columns"]) for tile in kept["tiles"][:3]] == places
    last = [tile for tile in kept["tiles"] if tile["rows"] == [2, 4]][-1]
    assert [f"{x:.4f}" for x in last["o"][1]] == numbers(lines[-1])[:4]


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1), (2, 3)])
def test_a_runs_head_gives_what_the_model_computes_there(runs, layer, head):
    """What goes into the model's last projection is the output of the story of the q, k and v that were taken."""
    taken = head_of_run("taught", runs, layer, head, 20)
    assert gpt.attention is attention  # as before the recording
    net = checkpoint.load(last(runs / "taught")).network(AttentionConfig("naive"), torch.device("cpu")).eval()
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


def test_a_run_with_a_window_has_no_story(call, small, tmp_path):
    call(train, *small, "attention.window=8", "steps=1", f"runs={tmp_path}", "name=near").succeeded()
    ended = call(breakit, "trace=true", "run=near", f"runs={tmp_path}")
    assert ended.code == 2
    assert re.fullmatch("breakit: .*run=near.*\n", ended.err)
