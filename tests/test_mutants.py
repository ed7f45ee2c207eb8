"""The faults of tests/mutants.py can be planted: their texts are in the code, and their tests are there."""

import re
from pathlib import Path

import pytest

from tests.mutants import FAULTS, ROOT, Fault, pattern, places


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_planted(fault: Fault):
    """A line that a commit had changed took its fault along: nobody saw that it was no longer tested."""
    assert len(places(fault, ROOT)) == 1
    for name in fault.tests.split():
        file, _, test = name.partition("::")
        text = Path(ROOT / f"tests/test_{file}.py").read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE)


@pytest.mark.parametrize("found", ["f(a, b) + c", "f(\n    a,\n    b,\n) + c", "f(a,\n  b) +\n c"])
def test_a_fault_is_found_however_its_line_is_broken(found):
    assert re.search(pattern("f(a, b) + c"), found)
    assert not re.search(pattern("f(a, b) + c"), found.replace("b", "d"))
