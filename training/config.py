"""Command line + YAML -> one tree of plain dataclasses. No other file uses Hydra.

    @dataclass
    class Config:                                                    # in training/settings.py
        model: GPTConfig = field(default_factory=GPTConfig)          # the defaults are beside the code they configure
        seed: int = 1337

    if __name__ == "__main__":
        config.run(main, Config, "config")                           # conf/config.yaml and its groups override defaults

Two decisions shape this file:
- Hydra only composes the configuration, by hydra.compose(). It makes no output folder or logger for a run and does not
  wrap the script's errors. The price: no launcher plugins, and of Hydra's flags only FLAGS.
- We check the command line before Hydra sees it. Hydra does not suggest the nearest name, and its grammar for values
  refuses free text such as prompt="def f(x):".
"""

import atexit
import errno
import gc
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from decimal import Decimal
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from conf.keys import check_typed, one_line
from training.files import last_word
from training.help import RESUMED, did_you_mean, elsewhere, explain, help_text, nearest, unknown

T = TypeVar("T")

FLAGS = "-m for a sweep, --help, --help all and --cfg job"

# What torchrun gives each process, and is read before or while the processes join.
FROM_TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
FROM_TORCHRUN += ["TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"]

# A user's mistake is an error in all processes that torchrun has started. All but the first wait so many seconds before
# they print it. By then the first has ended, and torchrun has ended them.
FIRST_SPEAKS = 2.0

# Under a limit of memory or threads. Python's RuntimeError and ImportError have no other mark.
LIMITED = ("can't start new thread", "failed to map segment from shared object", os.strerror(errno.ENOMEM))

SCIENTIFIC = re.compile(r"(?<![\w.])\d+(\.\d*)?[eE][+-]?\d{1,2}(?![\w.])")  # 1e3, as people write a number of steps
QUOTED = re.compile(r"""(['"])(\\.|(?!\1)[^\\])*\1""", re.DOTALL)  # one string, quoted for Hydra by the user


def run(
    script: Callable[[Any], int | None],
    schema: type,
    config_name: str,
    conf: Path | None = None,
    *,
    resumed: Callable[[DictConfig], dict | None] = lambda cfg: None,
    check: Callable[[Any], None] = lambda cfg: None,
    jobs_of: Callable[[Callable, list], int] | None = None,
) -> None:
    """Compose the configuration from sys.argv and call script with it. This is the last line of every script.

    schema: the dataclass of the configuration. conf/<config_name>.yaml refers to it as <config_name>_schema.
    conf: the folder of YAML files; by default the folder conf beside the script.
    resumed: as in `compose`.
    check(configuration): raises ValueError if it cannot run. A sweep checks all jobs before the first one starts.
    jobs_of(script, jobs): runs the jobs of a sweep and returns the exit code. By default they run one after the other
        until one fails.

    Calls sys.exit with script's return value if that is not 0, with 2 after a ValueError or OSError, and with 130 on
    Ctrl-C, or 128 + the signal that a KeyboardInterrupt names. A ValueError is a user's mistake and prints one line on
    stderr; HYDRA_FULL_ERROR=1 prints the traceback. Any other exception is a bug and keeps its traceback.
    """
    atexit.register(gc.freeze)  # or Python goes through torch's objects once more before it ends, for about a second
    file = Path(inspect.getfile(script))
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell's >&- has closed it
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    try:
        check_start(schema, file.name)
        doc = inspect.getdoc(inspect.getmodule(script)) or ""
        jobs = compose(sys.argv[1:], schema, config_name, conf or file.parent / "conf", file.stem, resumed, doc)
        # The scripts set it during their imports. It lasts until here, because OmegaConf may lose a KeyboardInterrupt.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if len(jobs) > 1:
            same = set.intersection(*(set(overrides) for _, overrides in jobs))
            for number, (cfg, overrides) in enumerate(jobs, start=1):
                try:
                    check(cfg)
                except ValueError as error:
                    varied = " ".join(override for override in overrides if override not in same)
                    raise ValueError(f"job {number}/{len(jobs)}, {varied}: {error}") from error
        code = (jobs_of if jobs_of and len(jobs) > 1 else in_turn)(script, jobs)
        if code:
            sys.exit(code)
    except KeyboardInterrupt as error:  # Python's own has no number
        sys.exit(128 + next(iter(error.args), signal.SIGINT))  # as a shell reports it
    except BrokenPipeError:  # the program that read our output has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries to flush again and fails
        sys.exit(141)  # 128 + SIGPIPE
    except (ValueError, OSError, RuntimeError, ImportError) as error:  # OSError: a full disk, or a file, which it names
        a_bug = isinstance(error, RuntimeError | ImportError) and not str(error).endswith(LIMITED)
        if a_bug or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(FIRST_SPEAKS)
        last_word(f"{file.stem}: {one_line(in_words(error))}")
        sys.exit(2)


def check_start(schema: type, script: str) -> None:
    """ValueError for a Python that Hydra cannot run on, and for processes that torchrun has not started or that the
    script does not divide its work among."""
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise ValueError(f"Python {sys.version.split()[0]} cannot run this (Hydra 1.3); use 3.11, 3.12 or 3.13")
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and (missing := [name for name in FROM_TORCHRUN if not os.environ.get(name, "").isdecimal()]):
        raise ValueError(
            f"TORCHELASTIC_RUN_ID is set, as torchrun does, and {missing[0]} is not a number: start it with "
            "torchrun, or unset TORCHELASTIC_RUN_ID"
        )
    started = os.environ["WORLD_SIZE"] if by_torchrun else "1"
    if started != "1" and "parallel" not in known_keys(schema):
        raise ValueError(f"it is one process, and torchrun has started {started}: use python {script}")


def in_words(error: Exception) -> str:
    """The error's line. Python's own about a file, as in "[Errno 36] File name too long: 'x'", about a full disk and
    about a thread that cannot start have no way out."""
    if str(error).endswith(LIMITED):
        return f"{error}: the memory (ulimit -v) or the number of threads (ulimit -u) has a limit here; raise it"
    if isinstance(error, OSError) and error.strerror == os.strerror(errno.ENOSPC) and error.filename is None:
        return f"{error.strerror}: make room there, or send what is printed elsewhere (> FILE, 2> FILE)"
    if not isinstance(error, OSError) or error.errno is None or not isinstance(error.filename, str | bytes):
        return str(error)
    path = Path(os.fsdecode(error.filename))
    wants_folder = isinstance(error, NotADirectoryError | FileExistsError)
    if wants_folder and (file := next((part for part in (path, *path.parents) if part.is_file()), None)):
        return f"{file} is a file, and a folder is wanted: name another one, or move the file away"
    return f"{path} cannot be read or written ({error.strerror}): name another one, or put this one right"


def in_turn(script: Callable[[Any], int | None], jobs: list[tuple[Any, list[str]]]) -> int:
    """Runs the jobs one after the other until one fails, and returns its exit code; 0 if none fails."""
    for number, (config, overrides) in enumerate(jobs, start=1):
        if len(jobs) > 1:
            print(one_line(f"job {number}/{len(jobs)}: {' '.join(overrides)}"), flush=True)
        if code := script(config):
            return code
    return 0


def compose(
    argv: list[str],
    schema: type,
    config_name: str,
    conf: Path,
    name: str,
    resumed: Callable[[DictConfig], dict | None] = lambda cfg: None,
    doc: str = "",
) -> list[tuple[Any, list[str]]]:
    """Every job of the command line, as (configuration, its overrides): one; several with -m; none with --help, which
    prints the help text (training/help.py).

    All jobs are composed before the first one starts, so a typing error in the last job of a sweep shows at once.
    ValueError: one line with what is wrong, where, and the nearest right name.

    resumed(composed): returns a checkpoint's configuration as a dictionary, or None for a new run. With a dictionary,
    the job is composed a second time: the dictionary replaces the defaults, and the groups and keys on the command line
    override the dictionary. Only resume= is taken from the dictionary.
    """
    groups = groups_of(conf / f"{config_name}.yaml")
    known = dict.fromkeys(groups) | known_keys(schema)
    flags, overrides = split_arguments(argv, known)
    overrides = [check_override(override, known, groups, "-m" in flags) for override in overrides]
    store = ConfigStore.instance()
    store.store(name=f"{config_name}_schema", node=declared(schema))
    # Without its defaults: a dozen groups that only @hydra.main reads, and half of the time of composing.
    store.store(group="hydra", name="config", node=HydraConf(defaults=[]), provider="hydra")
    try:
        jobs: list[tuple[Any, list[str]]] = []
        for typed in expand(overrides, conf) if "-m" in flags else [overrides]:
            cfg, chosen = hydra_job(config_name, conf, typed)
            base = resumed(cfg)
            if base is not None:
                defaults = [f"{config_name}_schema", "_self_", *({group: None} for group in groups)]
                if "break_it=none" in typed:  # without the checkpoint's score_gain, too
                    base.pop("break_it", None)
                try:
                    check_keys(schema, base)  # `defaults` or `hydra`, for example, would be commands to Hydra
                except ValueError as error:
                    raise ValueError(f"the checkpoint's configuration: {error}") from error
                store.store(name=RESUMED, node={**escaped(base), "defaults": defaults})
                cfg, chosen = hydra_job(RESUMED, conf, [item for item in typed if not item.startswith("resume=")])
            if "--help" in flags:
                values: Any = OmegaConf.to_container(cfg, resolve=True)
                options = {group: str(chosen.get(group)) for group in groups}
                print(help_text(name, doc, schema, values, conf, options, "all" in flags), flush=True)
                return []
            if "--cfg" in flags:
                print(OmegaConf.to_yaml(cfg), end="", flush=True)
                return []
            jobs.append((cfg, typed))
        plain: list[tuple[Any, list[str]]] = [(OmegaConf.to_object(cfg), typed) for cfg, typed in jobs]
    except OverflowError as error:
        raise ValueError("a number of the command line is larger than any float: give a smaller one") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(explain(error, known, conf)) from error
    check_typed([(cfg, typed_keys(typed)) for cfg, typed in plain])
    # Without the schema in its defaults list, Hydra would have checked no key and no type.
    assert all(isinstance(config, schema) for config, _ in plain), f"{config_name}.yaml lacks - {config_name}_schema"
    return plain


def typed_keys(overrides: list[str]) -> dict[str, str]:
    """{key or group: value} as the user typed them, without Hydra's own. attention={impl:tiled} is attention.impl."""
    found = {}
    for override in (override for override in overrides if "hydra." not in override):
        key, _, value = override.partition("=")
        found[key] = value.strip("'")
        if value.startswith("{"):
            table: Any = OverridesParser.create().parse_override(override).value()
            found |= {f"{key}.{name}": str(inner) for name, inner in table.items()}
    return found


def hydra_job(config_name: str, conf: Path, overrides: list[str]) -> tuple[DictConfig, Mapping[str, Any]]:
    """Composes one job with Hydra: its configuration, and the option of each group."""
    # A failure is chosen as the option of a group is, but it is a value.
    overrides = [re.sub("^break_it=(?!{)", "break_it.broken=", override) for override in overrides]
    with hydra.initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        cfg = hydra.compose(config_name, overrides, return_hydra_config=True)
    chosen = cfg.hydra.runtime.choices
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, chosen


def expand(overrides: list[str], conf: Path) -> list[list[str]]:
    """The overrides of each job of a sweep: seed=1,2 makes two jobs."""
    with hydra.initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        values = [
            [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
            if parsed.is_discrete_sweep()
            else [override]
            for override, parsed in zip(overrides, parser.parse_overrides(overrides), strict=True)
        ]
    if [] in values:
        raise ValueError(f"{overrides[values.index([])]}: no option matches")
    return [list(job) for job in product(*values)]


def groups_of(primary: Path) -> list[str]:
    """The groups in the defaults list of the script's YAML file, in order. conf/ may have other groups too."""
    listed = yaml.safe_load(primary.read_text(encoding="utf-8")) if primary.exists() else {}
    return [group for item in (listed or {}).get("defaults", []) if isinstance(item, dict) for group in item]


def split_arguments(argv: list[str], known: Iterable[str]) -> tuple[set[str], list[str]]:
    """Splits argv into flags and overrides. ValueError for a flag that is none of FLAGS."""
    flags, overrides = set(), []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        following = value if equals else rest[0] if rest else ""
        if argument in ("-m", "--multirun"):
            flags.add("-m")
        elif flag in ("-h", "--help") and (not equals or value == "all"):
            flags |= {"--help", following} & {"--help", "all"}
            rest = rest[following == "all" and not equals :]
        elif flag in ("-c", "--cfg"):
            if following != "job":
                raise ValueError(f"{argument}: write --cfg job, which prints the job's configuration")
            flags.add("--cfg")
            rest = rest[not equals :]
        elif argument.startswith("-"):
            name = flag.strip("-").replace("-", "_")
            value = value or ("" if following.startswith("-") or "=" in following else following)
            ours = elsewhere(name, known)
            names = [ours] if ours in known else nearest(name, known)[:1]
            hint = did_you_mean([f"{name}={value or 'VALUE'}" for name in names]) if names else f"the flags are {FLAGS}"
            hint = f"{name} is {ours}" if ours and ours not in known else hint
            raise ValueError(f"{argument}: options are written key=value here, without dashes; {hint}")
        else:
            overrides.append(argument)
    return flags, overrides


def check_override(override: str, known: Mapping[str, Any], groups: list[str], sweep: bool) -> str:
    """Rewrites one key=value of the command line for Hydra. ValueError for an unknown key.

    Quotes the value if the key is a str or a group, so that Hydra does not parse it. Does not quote a value that the
    user has quoted for Hydra, null where None is allowed, or the values of a sweep (commas separate them). Writes 1e3
    as 1000 for an int. (??? keeps OmegaConf's meaning: "must be given".)
    """
    key, equals, value = override.partition("=")
    if (hydras := key.lstrip("+~")).startswith(("hydra.", "hydra/")):
        if hydras != "hydra.searchpath":  # the rest is for jobs, folders and plugins
            raise ValueError(f"{override}: of Hydra's own keys only hydra.searchpath is taken here; leave it out")
        return override
    if key.startswith("~"):
        raise ValueError(f"{override}: keys cannot be removed; give it another value: {key[1:]}=VALUE")
    key = key.lstrip("+")  # Hydra's "add this key". The schema has every key, so it can only mean "set".
    if key not in known:
        raise ValueError(f"{override}: {unknown(key, known)}")
    if not equals:
        raise ValueError(f"{override}: options are written key=value; {did_you_mean([f'{key}=VALUE'])}")
    if key in groups and value.startswith("["):  # Hydra would merge the files; the last one would win
        raise ValueError(f"{override}: one {key} is used, not a list; write {key}=NAME, or -m {key}=NAME,NAME for each")
    types = get_args(known[key]) if isinstance(known[key], UnionType) else (known[key],)
    if types[0] in (int, list[int], list[int | None]):
        value = SCIENTIFIC.sub(whole, value)
    text = str in types or (key in groups and not value.startswith("{"))
    if text and not sweep and not QUOTED.fullmatch(value) and (value != "null" or type(None) not in types):
        value = quote(value)
    return f"{key}={value}"


def whole(number: re.Match) -> str:
    """1e3 as 1000, because Hydra takes only the latter for an integer. Leaves 1.5e0 as it is."""
    value = Decimal(number[0])
    return str(int(value)) if value == value.to_integral_value() else number[0]


def quote(text: str) -> str:
    """text, quoted so that Hydra's grammar and OmegaConf's interpolation give back exactly text."""
    return QuotedString(escaped(text), Quote.single).with_quotes()


def escaped(value: Any) -> Any:
    """value with every string in it escaped, so that OmegaConf's interpolation gives back exactly value."""
    if isinstance(value, Mapping):
        return {key: escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner) for inner in value]
    # OmegaConf writes ${ as \${, and needs the backslashes before it doubled
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def known_keys(schema: Any) -> dict[str, Any]:
    """Every dotted key of the schema and its type: {"seed": int, "model": GPTConfig, "model.n_layer": int, ...}"""
    found = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        found[field.name] = kind = hints[field.name]
        if is_dataclass(kind):
            found |= {f"{field.name}.{key}": hint for key, hint in known_keys(kind).items()}
    return found


@cache  # it takes a fifth of the time of compose(); Hydra copies what it is given, so we can share it
def declared(schema: Any) -> DictConfig:
    """The schema with the defaults that its classes declare.

    OmegaConf takes the defaults of a nested dataclass from an instance, that is, after __post_init__ has changed them.
    Example: __post_init__ sets n_kv_head=None to n_head, 6. The default of n_kv_head would then be 6, and would stay 6
    with model.n_head=8.
    """
    node = OmegaConf.structured(schema)
    for field in fields(schema):
        factory: Any = field.default_factory
        if isinstance(factory, type) and is_dataclass(factory):
            node[field.name] = declared(factory)
    return node


def to_yaml(config: Any) -> str:
    """The whole configuration, with defaults, as YAML. Does not use OmegaConf, which would interpret "${" in text."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def from_dict(schema: type[T], mapping: Mapping[str, Any], prefix: str = "") -> T:
    """Rebuild the dataclass tree from the dictionary of dataclasses.asdict, for example a checkpoint's.

    A missing key takes its default: older checkpoints lack newer keys. Raises ValueError as check_keys() does, and what
    __post_init__ raises. prefix is for the recursion.
    """
    check_keys(schema, mapping, prefix)
    hints = get_type_hints(schema)
    return schema(**{
        key: from_dict(hints[key], value, f"{prefix}{key}.") if is_dataclass(hints[key])
        else str(value).lower() if type(value) is bool and fits(hints[key], "") else value
        for key, value in mapping.items()
    })  # fmt: skip


def check_keys(schema: type, mapping: Mapping[str, Any], prefix: str = "") -> None:
    """ValueError for a key that the dataclass tree does not have, or a value of another type than its field's."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{prefix.rstrip('.')} is {mapping!r:.60} and not a group of keys")
    hints = get_type_hints(schema)
    for key, value in mapping.items():
        if key not in hints:
            raise ValueError(f"{prefix}{key}: {unknown(prefix + key, [prefix + name for name in hints])}")
        if is_dataclass(hints[key]):
            check_keys(hints[key], value, f"{prefix}{key}.")
        elif not fits(hints[key], value):
            raise ValueError(f"{prefix}{key}={value!r:.60} is not {getattr(hints[key], '__name__', hints[key])}")


def fits(hint: Any, value: Any) -> bool:
    """Whether `value`, out of JSON or Hydra, is of the type that a field has. An older version had bools where a string
    is."""
    if value == "???":  # OmegaConf's word for a value that is missing
        return False
    if isinstance(hint, UnionType):
        return any(fits(member, value) for member in get_args(hint))
    inner = get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list | ListConfig) and all(fits(inner[0], x) for x in value)
    if get_origin(hint) is dict:
        return isinstance(value, Mapping) and all(fits(inner[0], k) and fits(inner[1], x) for k, x in value.items())
    if hint in (int, float, str, bool, NoneType):
        too_large = hint is float and type(value) is int and abs(value) > sys.float_info.max
        return type(value) in {float: (int, float), str: (str, bool)}.get(hint, (hint,)) and not too_large
    return True
