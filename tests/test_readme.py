"""What the pages say is there: commands parse, links and headings lead somewhere, named files and functions exist."""

import importlib
import re
import shlex
import subprocess
from collections import Counter
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from parallel import processes
from parallel.processes import Ranks, divide
from training import config

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
README, CONTRIBUTING = PAGES["README.md"], PAGES["CONTRIBUTING.md"]
SCRIPTS = {"train.py": "config", "sample.py": "sample", "bench.py": "bench", "breakit.py": "breakit"}
WITH_CONTENTS = [name for name, page in PAGES.items() if re.search(r"^- \[.+\]\(#", page, re.MULTILINE)]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> set[str]:
    """Every `python SCRIPT ...` of a page, in blocks, tables and text, continuation lines joined."""
    text, script = page.replace("\\\n", " "), r"python ((?:train|sample|bench|breakit)\.py[^`"
    in_blocks = rf"^\s*(?:[A-Z_]+=1 )?(?:\.venv/bin/)?{script}\n#|]*)"
    found = re.findall(in_blocks, "\n".join(blocks(text)), re.MULTILINE) + re.findall(f"`{script}]*)`", text)
    return {line.strip() for line in found}


COMMANDS = {command: name for name, page in reversed(PAGES.items()) for command in commands(page)}


def composed(script: str, typed: str) -> list:
    module = importlib.import_module(script.removesuffix(".py"))
    return config.compose(shlex.split(typed), module.Config, SCRIPTS[script], ROOT / "conf", module.__name__)


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] * COMMANDS[c].startswith("docs/")) for c in sorted(COMMANDS)],
)
def test_a_command_of_the_pages_is_one_that_runs(command):
    """Composed with the real configuration, so every key, group and type in it is right."""
    script, _, typed = command.partition(" ")
    assert composed(script, typed) or {"--help", "--cfg"} & set(typed.split())


def test_there_are_commands_to_check():
    assert Counter(COMMANDS.values())["README.md"] > 20
    assert {command.split()[0] for command in COMMANDS} == SCRIPTS.keys()


@pytest.mark.parametrize("line", re.findall(r"`torchrun ([^`]*train.py[^`]*)`", PAGES.get("docs/parallel.md", "")))
def test_a_launch_line_can_be_shared(line, monkeypatch):
    """Its keys are right, and its processes can divide the work."""
    flags, typed = line.split("train.py")
    size = int(re.search(r"--nproc-per-node (\d+)", flags)[1])
    ((cfg, _),) = composed("train.py", typed.replace("...", ""))
    mesh = SimpleNamespace(get_group=lambda name: SimpleNamespace(group_name=name))
    monkeypatch.setattr(processes, "init_device_mesh", lambda *_, **__: mesh)
    ranks, rows, passes = divide(Ranks(size=size), cfg, train.passes(cfg))
    assert size * rows * passes == cfg.parallel.context * cfg.batch_size * train.passes(cfg)
    assert (ranks.part.ranks > 1) == ("parallel.context" in typed)


def test_the_tour_is_the_tree():
    """Every file of code stands in the tour, with its folder, and nothing in the tour is missing from the tree."""
    tour = next(block for block in blocks(PAGES["docs/tree.md"]) if block.startswith("train.py"))
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
    assert {f.split("/")[0] + "/" for f in tracked if "/" in f and not f.startswith(".")} <= named


def anchors(page: str) -> list[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{2,} (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", PAGES[name]):
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), path
        assert not anchor or anchor in anchors(page.read_text(encoding="utf-8")), (path, anchor)


@pytest.mark.parametrize("name", ["README.md", *WITH_CONTENTS])
def test_the_contents_of_a_page_are_its_headings_in_order(name):
    page = PAGES[name]
    listed = re.findall(r"\[[^\]]+\]\(#([\w-]+)\)", page.split("\n## ", 1)[0])
    assert listed == [anchors(f"## {heading}")[0] for heading in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    assert max(Counter(anchors(page)).values()) == 1


def undefined(names: list[str], files: list[str]) -> list[str]:
    """The names that none of the files defines as a function, class, constant or field."""
    code = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    return [n for n in names if not re.search(rf"^ *(?:(?:def|class|const) )?{n}\b *[(:=]", code, re.MULTILINE)]


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


def test_runs_and_prepared_text_lie_in_the_folder_where_the_command_is_typed(call, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = [argument for argument in small if not argument.startswith("data.cache=")]
    assert call(train, *own, "steps=1", "name=x").code == 0
    assert (tmp_path / "runs/x/metrics.jsonl").is_file()
    assert list((tmp_path / "data/cache").glob("text-byte-*"))
