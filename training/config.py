"""The configuration, by Hydra: structured configs here and beside the code they configure, YAML files in conf/."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from conf.keys import check, key
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model.attention import AttentionConfig, problem_of
from model.break_it import BreakIt
from model.gpt import GPTConfig
from training.checkpoint import Checkpoint
from training.machine import DTYPES
from training.metrics import WandbConfig
from training.optimizer import OptimizerConfig, base_rate
from training.parallel import ParallelConfig
from training.probe import ProbeConfig

CONF = Path(__file__).parents[1] / "conf"
ROWS = 131072  # of a bigram table

# What a resumed run may change of model and attention: neither the weights' shapes nor what is computed from them.
MAY_CHANGE = {"model.dropout_p", "model.recompute", "attention.impl", "attention.block_m",
              "attention.block_n", "attention.dropout_p"}  # fmt: skip
# What a user of nanoGPT types, and what it is here.
NANOGPT = {
    "block_size": "model.context_length", "max_iters": "steps", "learning_rate": "optimizer.lr", "start": "prompt",
    "out_dir": "name run", "dropout": "model.dropout_p", "eval_interval": "eval_every", "eval_iters": "eval_tokens",
    "warmup_iters": "optimizer.warmup_steps", "gradient_accumulation_steps": "tokens_per_step", "dataset": "data",
    "config/train_shakespeare_char.py": "experiment=shakespeare_gpu", "config/train_gpt2.py": "experiment=gpt2_124m",
    "config/finetune_shakespeare.py": "experiment=finetune_gpt2",
}  # fmt: skip


@dataclass
class Config:
    """train.py's keys. ValueError for a value that is not allowed."""

    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    break_it: BreakIt = field(default_factory=BreakIt)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    name: str | None = key(None, "name of the run and its folder; null: the date", least=1)
    runs: str = key("runs", "folder of all runs", least=1)
    resume: str | None = key(None, "go on with a run: auto (name= or the newest not BROKEN) | a name | a path", least=1)
    init_from: str | None = key(None, "begin with weights: a run's best, a path, or transformers' hf:NAME", least=1)
    seed: int = key(1337, "seed of the initial weights, the data's order, dropout and samples", least=0)

    steps: int = key(700, "number of training steps (updates of the weights)", least=1)
    max_minutes: float | None = key(None, "time limit; null: none, also where steps= is given alone", above=0)
    batch_size: int = key(16, "sequences per micro-batch; fewer need less memory", least=1)
    tokens_per_step: int | None = key(None, "tokens per update, accumulating gradients; null: one micro-batch", least=1)
    eval_every: int = key(100, "steps between evaluations", least=1)
    eval_tokens: int = key(65536, "about how many validation tokens an evaluation takes, always the same ones", least=1)
    sample_every: int = key(200, "steps between samples; 0: none", least=0)
    sample_tokens: int = key(200, "maximum tokens of a sample; it ends earlier at the document's end", least=1)
    checkpoint_every: int = key(100, "steps between checkpoints; each evaluation is followed by one, too", least=1)
    keep_last: int = key(2, "number of newest checkpoints to keep; the best one is kept too", least=1)
    log_every: int = key(1, "steps between log lines, and records of metrics.jsonl", least=1)

    device: str = key("auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    dtype: str = key("auto", among="auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16")
    compile: str = key("auto", among="auto (graph on a GPU) | false | true (torch.compile) | graph (one CUDA graph)")
    stop_on_nan: bool = key(True, "stop before an update with NaN or infinity; false: train on and see what happens")

    def __post_init__(self):
        self.compile = str(self.compile).lower()  # people type compile=True
        check(self)
        if self.name is not None and not re.fullmatch(r"(?!/|.*\.\.)[\w.+=/-]+", self.name):
            raise ValueError(f"name={self.name} names a folder: use letters, digits, - and _")

    def schedule_step(self, step: int, elapsed: float) -> float:
        """Where update number `step` is in the learning rate's schedule, from 0 to steps: at `step`. With max_minutes
        as far as the count or the clock, whichever is further; the warm-up takes a fifth of the time at most."""
        if not self.max_minutes:
            return step
        limit, warmup = 60 * self.max_minutes, self.optimizer.warmup_steps or 0
        risen = max(step / max(1, warmup), elapsed / (0.2 * limit))
        if risen < 1:
            return min(risen * warmup, self.steps)
        warm = min(0.2 * limit, elapsed * warmup / step)  # seconds of the warm-up, at the pace so far
        done = max((step - warmup) / max(1, self.steps - warmup), (elapsed - warm) / (limit - warm))
        return warmup + (self.steps - warmup) * min(1.0, done)


ConfigStore.instance().store(name="config_schema", node=Config)  # what conf/config.yaml begins with


def command(name: str, schema: type, run: Callable[[Any], None]) -> None:
    """`python NAME.py KEY=VALUE ...`, of every script but train.py: calls run() with an instance of the dataclass
    schema. Exits with 1 and one line for a mistake of the user's (ValueError, OSError)."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)
    def main(composed: DictConfig) -> None:
        try:
            run(OmegaConf.to_object(composed))
        except KeyboardInterrupt:
            sys.exit(130)
        except (ValueError, OSError, SafetensorError) as error:  # a program error keeps its traceback
            sys.exit(f"{name}: {error}")

    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    read_arguments(schema, name)
    main()


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every dotted key of a dataclass, and its field."""
    nested = [entry for entry in fields(config) if is_dataclass(entry.default_factory)]
    for entry in (entry for entry in fields(config) if entry not in nested):
        yield prefix + entry.name, entry
    for entry in nested:
        yield from leaves(entry.default_factory, f"{prefix}{entry.name}.")


def help_text(schema: type, cfg: DictConfig) -> str:
    """What --help prints. cfg: the composed configuration, with Hydra's own."""
    lines = [cfg.hydra.help.template]
    for group, chosen in cfg.hydra.runtime.choices.items():
        if (CONF / group).is_dir() and not group.startswith("hydra"):
            names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
            lines.append(f"  {group}= " + " ".join("*" * (name == chosen) + name for name in names))
    if len(lines) > 1:
        lines[1:1] = ["", "Groups: each option is a file in conf/ that sets several keys; * is in use.", ""]
    lines += ["", "Keys, each with its value for this command:", ""]
    for name, entry in leaves(schema):
        value = OmegaConf.select(cfg, name)
        lines.append(f"  {name}={'null' if value is None else value}".ljust(42) + f" {entry.metadata['meaning']}")
    return "\n".join(lines)


def read_arguments(schema: type, script: str) -> None:
    """Checks and quotes sys.argv for Hydra. Exits with the nearest right name for a key that does not exist, which
    Hydra's message does not have. Answers --help, for which Hydra would copy all keys once for each group: 0.8 s."""
    arguments = sys.argv[1:]
    groups = [name for name in ("experiment", *(entry.name for entry in fields(schema))) if (CONF / name).is_dir()]
    known = [*groups, *(name for name, _ in leaves(schema))]
    for argument in arguments:
        name, equals, value = argument.lstrip("-").partition("=")
        ends = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]  # lr: optimizer.lr
        ends = ends or [ours for ours in NANOGPT.get(name, "").split() if ours.partition("=")[0] in known]
        dashes = argument.startswith("-")
        flags = any(other.startswith("-") for other in arguments)  # such as --cfg job
        if argument.startswith(("+", "~", "hydra")) or (dashes and not ends) or (flags and not equals and not dashes):
            continue  # Hydra reads it
        if name in groups and re.fullmatch(r"[\w./-]+", value) and not (CONF / name / f"{value}.yaml").exists():
            options = ", ".join(sorted(path.stem for path in (CONF / name).glob("*.yaml")))
            sys.exit(f"{script}: {argument}: there is no such {name}; choose {options}")
        if dashes or not equals or name not in known:
            near = ends or get_close_matches(name, known, 1)
            near = [other if "=" in other else f"{other}={value}" for other in near]
            hint = f"did you mean {' or '.join(near)}?" if near else "--help shows every key"
            why = f"there is no key {name}" if equals and not dashes else "write options as key=value, without dashes"
            sys.exit(f"{script}: {argument}: {why}; {hint}")
    if not {"-m", "--multirun"} & {*arguments}:  # a sweep's values are lists
        texts = {name for name, entry in leaves(schema) if entry.type in (str, str | None)}
        sys.argv[1:] = arguments = [quoted(argument, texts) for argument in arguments]
    if {"--help", "-h"} & {*arguments}:
        typed = [argument for argument in arguments if not argument.startswith("-")]
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                cfg = compose("config" if script == "train" else script, typed, return_hydra_config=True)
        except HydraException as error:
            sys.exit(f"{script}: {error}")
        print(help_text(schema, cfg))
        sys.exit()


def quoted(argument: str, texts: Container[str]) -> str:
    """KEY=TEXT in quotes, for Hydra, which would read most texts by its own grammar. A text in quotes stays as it is,
    but a prompt's quotes are its own. texts: the keys whose values are strings."""
    name, _, text = argument.partition("=")
    if name not in texts or (name != "prompt" and re.match(r"""["']|[a-zA-Z_./-][\w./:@+-]*\Z""", text, re.ASCII)):
        return argument
    return f"{name}='" + re.sub(r"(\\*)('|\Z)", r"\1\1\2", as_text(text)).replace("'", r"\'") + "'"


def as_text(x: Any) -> Any:
    """A string, or all those in a dict or list, as OmegaConf takes it for itself: ${...} is no interpolation."""
    if isinstance(x, dict):
        return {name: as_text(value) for name, value in x.items()}
    if isinstance(x, list):
        return [as_text(value) for value in x]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", x) if isinstance(x, str) else x


def to_type(script: str, *arguments: str) -> str:
    """A command for the reader to type, in the folder in which this one was typed."""
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun sets it
    launch = ["torchrun", "--nproc-per-node", processes] if processes and script == "train.py" else ["python"]
    return shlex.join([*launch, str(Path(sys.argv[0]).with_name(script)), *arguments])


def configuration(cfg: DictConfig, resumed: Checkpoint | None, parent: Checkpoint | None) -> Config:
    """The configuration of a run. The first of these that has a key counts:

        typed keys; files of typed groups; resumed: its checkpoint | parent: model, attention, break_it, data; defaults

    ValueError for a value that is not allowed or contradicts a resumed run."""
    typed = [override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task]
    source, chosen, usual_steps = resumed or parent, HydraConfig.get().runtime.choices, cfg.steps
    if resumed and (needless := {"experiment", "init_from"} & {*typed}):
        raise ValueError(f"a resumed run has its weights and its experiment's values: leave {min(needless)}= out")
    if source:
        theirs = as_text(source.state["config"])
        if parent:
            data = {"data"} & theirs.keys() - {*typed} if chosen["data"] == "pystdlib" else set()  # no other is chosen
            theirs = {x: theirs[x] for x in ("model", "attention", "break_it", *data)} | {"tokenizer": {"kind": "kept"}}
        base = OmegaConf.structured(Config) if resumed else cfg
        try:
            merged = OmegaConf.merge(base, theirs, *(file_of(name, chosen[name]) for name in typed if name in chosen))
        except OmegaConfBaseException as error:
            why, commit = str(error).splitlines()[0], source.state.get("about", {}).get("commit", "its own")
            raise ValueError(f"{source.path} is of another version ({why}): use it at commit {commit}") from error
        for name in ("name", "runs", "resume", *typed):
            if name not in chosen:
                OmegaConf.update(merged, name, as_text(OmegaConf.select(cfg, name)), merge=False)
        cfg = cast(DictConfig, merged)
    if "steps" in typed and "max_minutes" not in typed:  # who wants so many steps gets them
        cfg.max_minutes = None
    elif resumed and "max_minutes" in typed and "steps" not in typed:  # and who wants more minutes
        cfg.steps = max(cfg.steps, usual_steps)
    found = cast(Config, OmegaConf.to_object(cfg))
    old = parent.state["config"].get("data", {}) if parent else {}
    same_text = (old.get("source"), old.get("path")) == (found.data.source, found.data.path)
    if same_text and found.data.val_fraction != old["val_fraction"]:  # it has learned from some of the validation text
        raise ValueError(f"init_from= was trained with data.val_fraction={old['val_fraction']:g}: use that")
    if resumed:
        refuse_changes(found, resumed)
    return found


def file_of(group: str, name: str) -> DictConfig:
    """What conf/group/name.yaml sets, without its defaults."""
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    content = cast(DictConfig, OmegaConf.create(text))
    content.pop("defaults", None)
    return content if "@package _global_" in text else OmegaConf.create({group: content})


def refuse_changes(cfg: Config, resumed: Checkpoint) -> None:
    """ValueError for a value that does not fit the resumed weights and optimizer state."""
    theirs, ours = resumed.state["config"], json.loads(json.dumps(asdict(cfg)))  # JSON's lists for tuples
    fixed = {f"{group}.{name}" for group in ("model", "attention", "break_it", "tokenizer") for name in ours[group]}
    for dotted in sorted(fixed - MAY_CHANGE | {"optimizer.kind"}):
        group, name = dotted.split(".")
        mine, other = ours[group][name], theirs[group][name]
        if mine != other:
            raise ValueError(f"{dotted}={mine}, but {resumed.path} has {other}: leave it out")


def name_of(cfg: Config, resumed: Checkpoint | None) -> str:
    """name=, else that of the resumed run, in a sweep the job's (sweep-DATE/NUMBER), else the date."""
    name = cfg.name or time.strftime("%Y%m%d-%H%M%S")
    if cfg.name is None and resumed:
        name = os.path.relpath(resumed.path.parents[1], cfg.runs)
    elif cfg.name is None and HydraConfig.get().mode == RunMode.MULTIRUN:
        name = os.path.relpath(HydraConfig.get().runtime.output_dir, cfg.runs)
    broken = f"-BROKEN-{cfg.break_it.label}"
    return name + broken if cfg.break_it.label and broken not in name else name


def refuse_attention(cfg: Config, attention: AttentionConfig, dtype: str, device: torch.device) -> None:
    """ValueError for an attention that cannot run in one of the layers."""
    T, D = cfg.model.context_length, cfg.model.head_size
    if cfg.model.recompute == "selective" and attention.impl == "naive":
        raise ValueError("model.recompute=selective keeps o and lse, not naive's weights; use model.recompute=true")
    if attention.impl == "triton":
        if not find_spec("triton"):
            raise ValueError("attention=triton: Triton, which is made for Linux, is not installed; use attention=tiled")
        from kernels.launch import check_supported

        check_supported(DTYPES[dtype], D, device)
    q, k = (torch.zeros(1).expand(1, heads, T, D) for heads in (cfg.model.n_head, cfg.model.kv_heads))
    spans = torch.zeros(1, dtype=torch.int32).expand(1, T, 2) if attention.documents else None
    for i in range(cfg.model.n_layer):
        problem_of(q, k, k, attention.layer(i), spans=spans, break_it=cfg.break_it)


def fill_in(cfg: Config, n_vocab: int, n_tokens: int, data_size: int, device: torch.device) -> int:
    """Sets what is null and depends on data and machine; returns tokens_per_step. data_size: as in Ranks."""
    if cfg.model.bigram_rows is None:  # of a smaller text the rows would be learned by heart (docs/findings.md, 45)
        cfg.model.bigram_rows = ROWS if n_tokens >= 20 * ROWS else 0
    rounded = -(-n_vocab // 64) * 64 if device.type == "cuda" else n_vocab  # matrix products like round sizes
    cfg.model.vocab_size = cfg.model.vocab_size or rounded
    if cfg.model.vocab_size < n_vocab:
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size}: tokenizer= has {n_vocab} tokens; leave one out")
    cfg.optimizer.lr = cfg.optimizer.lr or base_rate(cfg.model.n_embd, cfg.optimizer.kind)
    if cfg.optimizer.warmup_steps is None:
        cfg.optimizer.warmup_steps = min(100, cfg.steps // 5)  # or a short run would not reach its rate
    micro_batch = cfg.batch_size * cfg.model.context_length * data_size
    cfg.tokens_per_step = cfg.tokens_per_step or micro_batch
    if cfg.tokens_per_step % micro_batch:
        product = "batch_size * model.context_length" + (f" * {data_size} processes" if data_size > 1 else "")
        wrong = f"tokens_per_step={cfg.tokens_per_step} is no multiple of {micro_batch}, which is {product}"
        raise ValueError(f"{wrong}: use a smaller batch_size or another tokens_per_step")
    return cfg.tokens_per_step
