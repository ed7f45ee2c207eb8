"""What the pages say is there: commands compose, links and headings lead somewhere, named keys and files exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from model.attention import AttentionConfig
from sample import quoted
from training.config import CONF, leaves

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
CURRENT = {name: page for name, page in PAGES.items() if name != "docs/findings.md"}  # which tells of earlier commits
SCRIPTS = {"train": ("config", "Config"), "sample": ("sample", "Config"), "bench": ("bench", "Bench"),
           "breakit": ("breakit", "Lab")}  # fmt: skip


def schema(script: str) -> type:
    return getattr(importlib.import_module(script), SCRIPTS[script][1])


KEYS = {name for script in SCRIPTS for name, _ in leaves(schema(script))}
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}
IN_PYTHON = {*AttentionConfig.__dataclass_fields__, "return_lse"}  # arguments of attention()


def blocks(page: str) -> list[str]:
    return re.findall(r"^ *```\w*\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)


def spans(page: str) -> list[str]:
    """The code in a page's text and tables, and each line of its blocks."""
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text) + [line.strip() for block in blocks(page) for line in block.splitlines()]


def commands(page: str) -> set[str]:
    """What follows python or torchrun, from the script's name on."""
    found = (
        re.match(r"(?:\S*python|torchrun\b.*?) ((?:train|sample|bench|breakit)\.py.*)", span) for span in spans(page)
    )
    return {match[1] for match in found if match}


COMMANDS = sorted({command for page in CURRENT.values() for command in commands(page)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_is_one_that_runs(command):
    """Composed with the real configuration, so every key, group and type in it is right. Of a sweep the first job."""
    name, *typed = shlex.split(command, comments=True)
    script = name.removesuffix(".py")
    if script == "sample":
        typed = list(map(quoted, typed))
    if "-m" in typed:
        typed = [re.sub(r"=([^\[,]*),.*", r"=\1", argument) for argument in typed if argument != "-m"]
    typed = [x for x in typed if x not in ("--help", "--cfg", "job", "...")]
    schema(script)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        OmegaConf.to_object(compose(SCRIPTS[script][0], typed))


def test_the_pages_have_commands_of_every_script():
    assert {command.split(".")[0] for command in COMMANDS} == set(SCRIPTS)
    assert len(commands(PAGES["README.md"])) > 8


@pytest.mark.parametrize("name", CURRENT)
def test_a_named_key_exists(name):
    """`key=value` and `group.key` in a page's text."""
    named = {match[1] for span in spans(PAGES[name]) if (match := re.fullmatch(r"'?([a-z_]+(?:\.[a-z_]+)?)=\S*", span))}
    groups = {key.split(".")[0] for key in KEYS if "." in key}
    named |= {
        span for span in spans(PAGES[name]) if re.fullmatch(rf"({'|'.join(groups)})\.(?!py|md|json)[a-z_]+", span)
    }
    assert named - KEYS - GROUPS - IN_PYTHON == set()


@pytest.mark.parametrize("name", CURRENT)
def test_a_named_file_exists(name):
    named = {span for span in spans(PAGES[name]) if re.fullmatch(r"[\w/-]+/[\w./-]+\.(py|md|yaml|csv|html|png)", span)}
    assert {f for f in named if "NAME" not in f and not any((p / f).exists() for p in (ROOT, ROOT / "docs"))} == set()


def anchors(page: str) -> list[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{2,} (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_picture_leads_somewhere(name):
    targets = re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", PAGES[name])
    for path, anchor in targets + [(source, "") for source in re.findall(r'<img src="([^"]+)"', PAGES[name])]:
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), path
        assert not anchor or anchor in anchors(page.read_text(encoding="utf-8")), (path, anchor)
