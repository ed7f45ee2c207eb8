"""What the pages say is there: commands compose, links and headings lead somewhere, named keys and files exist."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from model.attention import AttentionConfig
from training.config import CONF, leaves, quoted

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
CURRENT = {name: page for name, page in PAGES.items() if name != "docs/findings.md"}  # which tells of earlier commits
SCRIPTS = {"train": ("config", "Config"), "sample": ("sample", "Config"), "bench": ("bench", "Bench"),
           "breakit": ("breakit", "Lab")}  # fmt: skip


def schema(script: str) -> type:
    """The dataclass of a script's keys, registered with Hydra."""
    config, name = SCRIPTS[script]
    found = getattr(importlib.import_module(script), name)
    ConfigStore.instance().store(name=f"{config}_schema", node=found)
    return found


KEYS = {name for script in SCRIPTS for name, _ in leaves(schema(script))}
DOTTED = "|".join({name.split(".")[0] for name in KEYS if "." in name})
NAMES = KEYS | {path.name for path in CONF.iterdir()} | {*AttentionConfig.__dataclass_fields__, "return_lse"}


def spans(page: str) -> list[str]:
    """The code in a page's text and tables, and each line of its blocks."""
    fenced = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
    page = page.replace("\\\n", " ")
    lines = [line.strip() for block in fenced.findall(page) for line in block.splitlines()]
    return lines + re.findall(r"`([^`]+)`", fenced.sub("", page))


def commands(page: str) -> set[str]:
    """What follows python or torchrun, from the script's name on."""
    launch = r"(?:\S*python|torchrun\b.*?) ((?:train|sample|bench|breakit)\.py.*)"
    return {found[1] for span in spans(page) if (found := re.match(launch, span))}


COMMANDS = sorted({command for page in CURRENT.values() for command in commands(page)})
FIRST = commands(PAGES["README.md"]) | commands(PAGES["docs/training.md"])  # the others are tested as slow ones


@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FIRST)) for c in COMMANDS])
def test_a_command_of_the_pages_is_one_that_runs(command):
    """Composed with the real configuration, so every key, group and type in it is right. Of a sweep the first job."""
    name, *typed = shlex.split(command.replace("failure=NAME", "failure=no_max"), comments=True)
    script = name.removesuffix(".py")
    if script in ("sample", "breakit"):
        typed = [quoted(argument, {"prompt"}) for argument in typed]
    if "-m" in typed:
        typed = [re.sub(r"=([^\[,]*),.*", r"=\1", argument) for argument in typed]
    typed = [argument for argument in typed if argument not in ("-m", "--help", "--cfg", "job", "...")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        OmegaConf.to_object(compose(SCRIPTS[script][0], typed))


def test_the_pages_have_commands_of_every_script():
    assert {command.split(".")[0] for command in FIRST} == set(SCRIPTS)


def changed() -> dict[str, str]:
    """The files that README's example changes, in its order and then CONTRIBUTING's, as they are afterwards."""
    pages, found = PAGES["README.md"] + PAGES["CONTRIBUTING.md"], {}
    parts = "".join(re.findall(r"```diff\n(.*?)```", pages, re.DOTALL))
    for part in re.split(r"^  (?=\w)", parts, flags=re.M)[1:]:
        head, *lines = part.splitlines()
        name, (old, new) = head.split(",")[0], ("\n".join(x[2:] for x in lines if x[0] != sign) for sign in "+-")
        before, place, after = (ROOT / name).read_text(encoding="utf-8").partition(old)
        assert place, head
        assert old not in after, head
        found[name] = before + new + after
    return found


def test_what_the_example_takes_out_stands_in_the_files():
    assert len(changed()) == 6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux")
def test_readmes_example_passes_its_two_commands(tmp_path):
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "cache"))
    files = list(changed().items())
    first, second = (span for span in spans(PAGES["CONTRIBUTING.md"]) if "twice" in span)
    for part, command in ((files[:3], first), (files[3:], second)):
        for name, code in part:
            (tree / name).write_text(code, encoding="utf-8")
        ended = subprocess.run(command.replace("python", sys.executable), shell=True, cwd=tree, capture_output=True)
        assert ended.returncode == 0, ended.stdout.decode()[-2000:]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux")
def test_a_debugger_stops_in_a_kernel_where_the_page_says(tmp_path):
    for folder in ("conf", "kernels", "model"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before, mark, after = (file := tmp_path / "kernels" / "flash.py").read_text().partition("  # 3\n")
    assert "\ndef forward_tiles" in before
    file.write_text(f"{before}{mark}        breakpoint()\n{after}")
    (command,) = (span for span in spans(PAGES["CONTRIBUTING.md"]) if span.startswith("TRITON_INTERPRET=1 python -c"))
    command = command.replace("python", sys.executable)
    ended = subprocess.run(command, shell=True, cwd=tmp_path, input="p p\nq\n", capture_output=True, text=True)
    assert "forward_tiles()" in ended.stdout
    (weight,) = re.findall(r"\(Pdb\) array\(\[\[([\d.e+-]+)", ended.stdout)
    assert float(weight) == pytest.approx(1)  # the first row sees itself alone


@pytest.mark.parametrize("name", CURRENT)
def test_a_named_key_exists(name):
    """`key=value` and `group.key` in a page's text."""
    forms = rf"'?([a-z_]+(?:\.[a-z_]+)?)=\S*|((?:{DOTTED})\.(?!py\b|md\b|json\b)[a-z_]+)"
    found = (re.fullmatch(forms, span) for span in spans(PAGES[name]))
    assert {match[1] or match[2] for match in found if match} - NAMES == set()


@pytest.mark.parametrize("name", CURRENT)
def test_a_named_file_exists(name):
    form = r"[\w-]+/[\w./-]+\.(py|md|yaml|csv|html|png)"
    named = {span for span in spans(PAGES[name]) if re.fullmatch(form, span) and not re.search("NAME|MINE", span)}
    assert {file for file in named if not (ROOT / file).exists() and not (ROOT / "docs" / file).exists()} == set()


def test_the_tables_of_recipes_name_those_that_there_are():
    rows = re.findall(r"^\| (`[a-z_0-9`, ]+)", PAGES["docs/training.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    recipes = {path.stem for path in (CONF / "experiment").glob("*.yaml")} - {"none"}
    assert recipes <= named
    assert {name for name in named if name.startswith(("long", "gpu", "shakespeare"))} <= recipes


def anchors(page: str) -> list[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{2,} (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_picture_leads_somewhere(name):
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", PAGES[name])
    for path, anchor in links + [(picture, "") for picture in re.findall(r'<img src="([^"]+)"', PAGES[name])]:
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), path
        assert not anchor or anchor in anchors(page.read_text(encoding="utf-8")), (path, anchor)
