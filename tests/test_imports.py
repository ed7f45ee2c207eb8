"""Imports between files go one way: scripts, lab, training, model, kernels; data and conf import none of them."""

import ast
from graphlib import TopologicalSorter

from tests.conftest import ROOT

ROOMS = ("lab", "training", "model", "kernels")
PATHS = [*ROOT.glob("*.py"), *(path for room in (*ROOMS, "data", "conf") for path in (ROOT / room).rglob("*.py"))]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}


def imported(path) -> set[str]:
    """The files of the project that a file imports, also inside functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def test_no_file_imports_a_room_above_its_own_and_none_imports_itself_by_others():
    graph = {name: imported(path) for name, path in FILES.items()}
    assert [*TopologicalSorter(graph).static_order()]  # CycleError names the files of a circle
    for name, others in graph.items():
        room = name.split(".")[0]
        above = {"data": ROOMS, "conf": (*ROOMS, "data")}.get(room, ROOMS[: ROOMS.index(room)] if room in ROOMS else ())
        assert not {other for other in others if other.split(".")[0] in above}, name
