"""What README and CONTRIBUTING say is so: commands parse, the tour is the tree, files, functions and links exist."""

import importlib
import re
import shlex
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

import train
from training import config
from training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = (ROOT / "docs/tree.md").read_text(encoding="utf-8")
STEPS = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SCRIPTS = {"train.py": "config", "sample.py": "sample", "bench.py": "bench", "breakit.py": "breakit"}


def blocks(text: str = README) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every `python SCRIPT ...` in README and CONTRIBUTING, in blocks, tables and text, continuation lines joined."""
    text = (README + CONTRIBUTING).replace("\\\n", " ")
    found = re.findall(
        r"^\s*(?:[A-Z_]+=1 )?(?:\.venv/bin/)?python (\w+\.py[^\n#`|]*)",
        "\n".join(blocks()).replace("\\\n", " "),
        re.MULTILINE,
    )
    return sorted({line.strip() for line in found + re.findall(r"`python (\w+\.py[^`]*)`", text)})


def test_there_are_commands_to_check():
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_a_command_of_readmes_is_one_that_runs(command):
    """Composed with the real configuration, so every key, group and type in it is right."""
    script, *arguments = shlex.split(command)
    module = importlib.import_module(script.removesuffix(".py"))
    jobs = config.compose(arguments, module.Config, SCRIPTS[script], ROOT / "conf", module.__name__)
    assert jobs or "--help" in arguments


def test_the_tour_is_the_tree():
    """Every file of code stands in the tour, with its folder, and nothing in the tour is missing from the tree."""
    tour = next(block for block in blocks(TREE) if block.startswith("train.py"))
    folder, named = "", set()
    for line in tour.splitlines():
        first, *rest = line.split()
        folder = "" if not line.startswith(" ") else folder
        if first.endswith("/"):
            folder = first
            named.add(first)
        else:
            named |= {folder + name for name in (first, *takewhile(lambda word: word.endswith(".py"), rest))}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {f for f in tracked if f.endswith(".py") and not f.startswith("tests/") and not f.endswith("__init__.py")}
    assert code == {name for name in named if name.endswith(".py")}
    assert all((ROOT / name).exists() for name in named)
    folders = {f.split("/")[0] + "/" for f in tracked if "/" in f and not f.startswith(".")}
    assert folders <= named


def undefined(names: list[str], files: list[str]) -> list[str]:
    """The names that none of the files defines as a function, class, constant or field."""
    code = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    return [n for n in names if not re.search(rf"^ *(?:(?:def|class|const) )?{n}\b *[(:=]", code, re.MULTILINE)]


@pytest.mark.parametrize(
    ("column", "file"), [(3, "model/attention.py"), (4, "model/tiled.py"), (5, "kernels/flash.py")]
)
def test_a_step_of_the_algorithm_is_found_where_the_table_says(column, file):
    """In the column's file, or in one that the table's row links to."""
    table = STEPS.split("## Where to find a line", 1)[1].split("\n\n", 3)[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        cell = row.split("|")[column]
        names = re.findall(r"`(\w+)(?:\.\w+)?`", cell)
        assert undefined(names, [file, *re.findall(r"\]\(\.\./([\w/.]+)\)", row)]) == []
        assert [n for n in re.findall(r"`# (\d+)`", cell) if f"# {n}" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize(
    "item", re.findall(r"^\d\. .*(?:\n   .*)*", CONTRIBUTING.split("## How to add")[1], re.MULTILINE)
)
def test_what_contributing_names_is_there(item):
    """Its files; and its functions, classes and constants, in one of the files that the same item names."""
    spans = re.findall(r"`([^`]+)`", item)
    files = [span for span in spans if re.fullmatch(r"[\w/.]+\.(?:py|md|yaml|csv|html)", span)]
    assert [file for file in files if not (ROOT / file.replace("NAME", "none")).parent.is_dir()] == []
    files = [file for file in files if "NAME" not in file]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert undefined([span for span in spans if re.fullmatch(r"\w+", span)], files) == []


def test_readme_is_short_and_its_contents_are_its_headings_in_order():
    assert len(README.split()) <= 2000
    listed = re.findall(r"\[([^\]]+)\]\(#([\w-]+)\)", README.split("## ", 1)[0])
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert [anchor for _, anchor in listed] == [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_a_link_of_readmes_leads_somewhere(link):
    assert (ROOT / link).exists()


WORDS = " ".join(README.split())


def test_what_readme_says_to_do_out_of_memory_keeps_the_training(call, small, tmp_path):
    """It said to lower batch_size and keep tokens_per_step, which is null by default: that halved a step's tokens."""
    advice = "halve `batch_size`, and pass `tokens_per_step=N` with the N that the failed run printed"
    assert f"**Out of memory**: {advice}." in WORDS
    own = [*small, "steps=2", f"runs={tmp_path}"]
    said = call(train, *own, "tokens_per_step=null", "name=a").out
    tokens = re.search(r"([\d,]+) tokens a step in 1 pass,", said)[1].replace(",", "")
    assert call(train, *own, "batch_size=2", f"tokens_per_step={tokens}", "name=b").code == 0
    whole, halves = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in "ab"
    )
    assert len(whole) == 2
    assert halves == pytest.approx(whole, rel=1e-5)


def test_runs_and_prepared_text_lie_where_readme_says(call, small, tmp_path, monkeypatch):
    """They land in the working directory, and README did not say so."""
    assert "in `runs/NAME`, in the folder where the command is typed" in WORDS
    training = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert "`runs` and `data/cache` lie in the folder where the command is typed" in " ".join(training.split())
    monkeypatch.chdir(tmp_path)
    own = [argument for argument in small if not argument.startswith("data.cache=")]
    assert call(train, *own, "steps=1", "name=x").code == 0
    assert (tmp_path / "runs/x/metrics.jsonl").is_file()
    assert list((tmp_path / "data/cache").glob("text-byte-*"))
