"""What a user is told about keys: the text of --help, and the answer to a mistake on the command line or in a file.

--help shows the options of every group, and every key with its value and its meaning. A key's meaning stands in its
field (conf/keys.py). An option's meaning is the first sentence of its file.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, ValidationError

from model.break_it import FAILURES, SWITCHES, BreakIt

# The keys of train.py that its short help shows; --help all shows every one.
USUAL = """name runs resume init_from seed steps max_minutes batch_size tokens_per_step eval_every sample_every
    checkpoint_every device dtype compile model.n_layer model.n_head model.context_length
    model.activation_checkpointing attention.window attention.dropout_p attention.documents data.path data.shards
    optimizer.lr parallel.context parallel.shard probe.every wandb.mode"""
LONG = 88  # maximum length of an option's meaning, in characters; so much fits on a line

RESUMED = "resumed"  # name under which a checkpoint's configuration is given to Hydra

# Key names of nanoGPT and other trainers -> ours. Each value begins with our key.
ELSEWHERE = {
    "block_size": "model.context_length",
    "seq_len": "model.context_length",
    "max_seq_len": "model.context_length",
    "dropout": "model.dropout_p, or attention.dropout_p for the attention weights",
    "d_model": "model.n_embd",
    "learning_rate": "optimizer.lr",
    "min_lr": "optimizer.min_lr_ratio, as a share of optimizer.lr",
    "decay_lr": "optimizer.min_lr_ratio: 1 keeps the rate constant",
    "lr_decay_iters": "steps: the learning rate falls until the last step",
    "warmup_iters": "optimizer.warmup_steps",
    "max_iters": "steps",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "steps, each of tokens_per_step tokens"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps"),
        "tokens_per_step: the tokens of one update, from which the number of passes follows",
    ),
    "eval_interval": "eval_every",
    "eval_iters": "eval_tokens, in tokens",
    "log_interval": "log_every",
    "always_save_checkpoint": "checkpoint_every, in steps; the best one is kept too",
    "out_dir": "runs, the folder of all runs; name= is the folder of one run",
    "dataset": "data: data=text data.path=FILE_OR_FOLDER is your own text",
    "wandb_log": "wandb.mode: online, offline or disabled",
    "wandb_project": "wandb.project",
    "wandb_run_name": "name",
    "start": "prompt",
    "attention=flash": "attention=triton, FlashAttention's kernels, or attention=sdpa, torch's own",
}
ELSEWHERE |= {switch: f"break_it={name} for false" for switch, name in SWITCHES.items()}  # the names of older versions


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
    if "break_it" in values:
        now = BreakIt(**values["break_it"]).label.split("+")
        stars = {name: "*" if name in now else " " for name in FAILURES}
        rows = [(f"{stars[name]} break_it={name}", f"without {f.removed}") for name, f in FAILURES.items()]
        lines += ["", "Failures. Each takes a line out of attention; several are written break_it=[NAME,NAME].", ""]
        lines += aligned([(f"{' ' if any(now) else '*'} break_it=none", "the whole algorithm"), *rows])
    lines += ["", "Keys, each with its value for this command. null means no value; lists are written [a,b]."]
    for rows in sections(schema, values):
        lines += ["", *aligned([(f"  {key}", meaning) for key, meaning in rows])]
    return "\n".join(lines)


def usual(schema: type, values: Mapping[str, Any], conf: Path, chosen: Mapping[str, str]) -> list[str]:
    """The lines of the short help: a group's options by name, and the usual keys."""
    lines = []
    for group, option in chosen.items():
        files = sorted(file.stem for file in (conf / group).glob("*.yaml"))
        names = " ".join(f"*{name}" if name == option else name for name in files)
        lines += textwrap.wrap(f"{group}= {names}", 118, initial_indent="  ", subsequent_indent="    ")
    rows = [row for section in sections(schema, values) for row in section if row[0].partition("=")[0] in USUAL.split()]
    lines += ["", *aligned([(f"  {key}", meaning) for key, meaning in rows]), ""]
    return [*lines, "--help all shows every key and explains the options of each group; * marks the option in use."]


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The rows as lines of aligned columns. right: the numbers of those that are aligned at their ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


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
    words = " ".join(line.lstrip("# ") for line in lines if "@package" not in line)
    whole = words.partition(". ")[0].removesuffix(".")
    return whole if len(whole) <= LONG else textwrap.shorten(re.split(r"[:;] ", whole)[0], LONG, placeholder=" ...")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three keys of `known` that are closest to a mistyped name. Keys are compared by their last part too, so lr
    finds optimizer.lr."""
    forms: dict[str, list[str]] = {}  # a key or its last part -> the keys
    for key in known:
        for form in {key, key.rpartition(".")[2]}:
            forms.setdefault(form, []).append(key)
    last = name.rpartition(".")[2]
    like = [last] if last in forms else get_close_matches(name, forms, 1) or get_close_matches(last, forms, 1)
    return forms[like[0]][:3] if like else []


def did_you_mean(names: list[str]) -> str:
    """The end of a message about a mistyped name."""
    return f"did you mean {' or '.join(names)}?" if names else "--help all explains every key"


def elsewhere(name: str, known: Iterable[str]) -> str:
    """Our name for another trainer's key, with or without its group; "" if there is none in this script."""
    ours = ELSEWHERE.get(name.rpartition(".")[2], "")
    return ours if re.split(r"[^\w.]", ours)[0] in known else ""


def unknown(name: str, known: Iterable[str]) -> str:
    """The message about an unknown key, with the nearest known key."""
    ours = elsewhere(name, known)
    return f"there is no key {name}; {f'here it is {ours}' if ours else did_you_mean(nearest(name, known))}"


def explain(error: Exception, known: Mapping[str, Any], conf: Path) -> str:
    """An error of Hydra, OmegaConf or the YAML parser as one line: where, what, and the way out."""
    cause = error.__cause__ or error.__context__ or error  # OmegaConf's error; Hydra wraps it in its own
    key = getattr(cause, "full_key", None) or ""
    place = re.match(r"In '(.+?)': ", str(error))
    where = f"{conf.name}/{place[1]}.yaml: " if place else ""
    if place and place[1] == RESUMED:
        where = "the checkpoint's configuration: "
    match error, cause:
        case MissingConfigException(options=[_, *_] as options), _:
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            best = nearest(name, options)
            hint = f"; {did_you_mean([f'{group}={best[0]}'])}" if best else ""
            hint = f"; it is {ours}" if (ours := elsewhere(f"{group}={name}", known)) else hint
            hint = "; for a sweep over several, use -m" if "," in name else hint
            return f"{group}={name}: there is no such {group}, only {', '.join(options)}{hint}"
        case OverrideParseException(), _:
            reason = error.message.splitlines()[0]
            return f"{error.override}: Hydra cannot read the value ({reason}); quote it: key='\"...\"'"
        case _, ConfigKeyError():
            return where + unknown(key, known)
        case _, ValidationError() if is_dataclass(section := known.get(key)):
            meant = f"{key}.{fields(section)[0].name}={cause.value or 'VALUE'}"
            return f"{where}{key}={cause.value}: {key} has keys of its own; {did_you_mean([meant])}"
        case _, ValidationError() if "list[" in str(known.get(key)):
            return f"{where}{key}={cause.value}: a list is written [a,b]; did you mean {key}=[{cause.value}]?"
        case _, ValidationError() if kind := known.get(re.sub(r"\[\d+\]$", "", key)):
            wanted = kind.__name__ if isinstance(kind, type) else str(kind)
            return f"{where}{key}={cause.value}: the value must be of type {wanted}"
        case _, MissingMandatoryValue():
            return f"{key} has no default and must be given: {key}=VALUE"
    if several := re.match(r"Ambiguous value for argument '(.+)'$", str(error), re.MULTILINE):
        return f"{several[1]}: several values make a sweep and need -m: -m {several[1]}"
    return " ".join(str(error).split())
