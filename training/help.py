"""The text of --help: the options of every group, and every key with its value and its meaning.

A key's meaning stands in its field (conf/keys.py). An option's meaning is the first sentence of its file.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

# The keys of train.py that its short help shows; --help all shows every one.
USUAL = """name runs resume init_from seed steps max_minutes batch_size tokens_per_step eval_every sample_every
    checkpoint_every device dtype compile model.n_layer model.n_head model.context_length
    model.activation_checkpointing attention.window attention.dropout_p attention.documents data.path data.shards
    optimizer.lr parallel.context parallel.shard probe.every wandb.mode"""
LONG = 88  # maximum length of an option's meaning, in characters; so much fits on a line


def help_text(
    script: str, doc: str, schema: type, values: Mapping[str, Any], conf: Path, chosen: Mapping[str, str], full: bool
) -> str:
    """The text. doc: the script's docstring. full: every key of train.py, not the usual ones only.
    values: the composed configuration as a dictionary. chosen: {group: the option in use}. The
    options of a group are the files in conf/GROUP."""
    lines = [doc.partition("\n")[0], f"python {script}.py KEY=VALUE ..."]
    if script == "train" and not full:
        return "\n".join([*lines, "", *usual(schema, values, conf, chosen)])
    if chosen:
        lines += ["", "Groups. Each option is a file in conf/ that sets several keys; * marks the option in use."]
    for group, option in chosen.items():
        files = sorted((conf / group).glob("*.yaml"), key=lambda file: file.stem)
        rows = [(f"{'*' if file.stem == option else ' '} {group}={file.stem}", said_in(file)) for file in files]
        lines += ["", *aligned(rows)]
    lines += ["", "Keys, each with its value for this command. null means no value; lists are written [a,b]."]
    for rows in sections(schema, values):
        lines += ["", *aligned([(f"  {key}", meaning) for key, meaning in rows])]
    return "\n".join(lines)


def usual(schema: type, values: Mapping[str, Any], conf: Path, chosen: Mapping[str, str]) -> list[str]:
    """The lines of the short help: a group's options by name, and the usual keys."""
    lines = []
    for group, option in chosen.items():
        if group == "break_it":
            continue
        files = sorted(file.stem for file in (conf / group).glob("*.yaml"))
        names = " ".join(f"*{name}" if name == option else name for name in files)
        lines += textwrap.wrap(f"{group}= {names}", 118, initial_indent="  ", subsequent_indent="    ")
    rows = [row for section in sections(schema, values) for row in section if row[0].partition("=")[0] in USUAL.split()]
    lines += ["", *aligned([(f"  {key}", meaning) for key, meaning in rows]), ""]
    return [*lines, "--help all shows every key and explains the options of each group; * marks the option in use."]


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    """The rows as lines of two aligned columns."""
    width = max(len(left) for left, _ in rows)
    return [f"{left:{width}}  {right}".rstrip() for left, right in rows]


def sections(schema: type, values: Mapping[str, Any], prefix: str = "") -> list[list[tuple[str, str]]]:
    """One list of (key=value, meaning) for the schema's own keys, then one for each nested dataclass."""
    own, nested = [], []
    for field in fields(schema):
        factory: Any = field.default_factory
        if isinstance(factory, type) and is_dataclass(factory):
            nested += sections(factory, values[field.name], f"{prefix}{field.name}.")
        else:
            meaning = field.metadata["key"].meaning if "key" in field.metadata else ""
            own.append((f"{prefix}{field.name}={typed(values[field.name])}", meaning))
    return [own, *nested] if own else nested


def typed(value: Any) -> str:
    """A configuration's value as it is typed in a shell."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    return shlex.quote(value) if isinstance(value, str) else json.dumps(value, default=str)


def said_in(file: Path) -> str:
    """The first sentence of a YAML file's opening comment. If it is too long, its part before a colon or semicolon."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    whole = sentence([line.lstrip("# ") for line in lines if "@package" not in line])
    return whole if len(whole) <= LONG else textwrap.shorten(re.split(r"[:;] ", whole)[0], LONG, placeholder=" ...")


def sentence(lines: list[str]) -> str:
    """The first sentence, without its full stop."""
    return " ".join(lines).partition(". ")[0].removesuffix(".")
