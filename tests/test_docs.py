"""The code of the exercises prints what their answers say."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs/exercises.md").read_text(encoding="utf-8")
EXERCISES = {int(n): text for n, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}
CODE = {n: code for n, text in EXERCISES.items() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)}


@pytest.mark.parametrize("n", CODE)
def test_the_code_of_an_exercise_prints_what_its_answer_says(n):
    said = io.StringIO()
    with redirect_stdout(said), torch.random.fork_rng():
        exec(compile(CODE[n], f"exercise {n}", "exec"), {})
    assert said.getvalue() in re.findall(r"```text\n(.*?)```", EXERCISES[n], re.DOTALL)
