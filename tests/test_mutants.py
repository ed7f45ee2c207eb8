"""The faults of tests/mutants.py can be planted: their texts are in the code, and their tests are there."""

import re

import pytest

from tests.mutants import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault):
    """A line that an edit had changed took its fault along: nobody saw that it was no longer tested."""
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    for name in fault.tests.removesuffix("slow").split():
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test or 'test_'}", (ROOT / f"tests/test_{file}.py").read_text(), re.MULTILINE)
