"""training/config.py: what arrives at a script, and what a user who mistyped is told."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from omegaconf import MISSING, OmegaConf

import bench
import breakit
import sample
import train
from conf.keys import key
from tests.runs import full
from training import config, help

ROOT = Path(__file__).parent.parent


@dataclass
class ModelConfig:
    n_layer: int = 6
    n_head: int = 6
    n_kv_head: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")


@dataclass
class OptimizerConfig:
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    fused: bool = True


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 1337
    limit: int | None = None
    run: str | None = None
    prompt: str = "def "
    folder: str = "runs/${run}"


FILES = {
    "config": "defaults: [config_schema, _self_, model: nano, optimizer: adamw, experiment: null]",
    "bare": "defaults: [bare_schema]",
    "strange": "defaults: [strange_schema, _self_]\nprompts: a",
    "model/nano": "n_layer: 4",
    "model/gpt2": "n_layer: 12\nn_head: 12",
    "model/misspelt": "n_layers: 12",
    "model/mistyped": "n_layer: many",
    "model/unreadable": "n_layer: [1",
    "optimizer/adamw": "{}",
    "experiment/long": "# @package _global_\ndefaults: [override /model: gpt2]\noptimizer: {lr: 3e-4}\nseed: 7",
    "experiment/lost": "# @package _global_\ndefaults: [override /model: gpt3]",
}


MODELS = "gpt2, misspelt, mistyped, nano, unreadable"


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app") / "conf"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text + "\n")
    return folder


@pytest.fixture
def launch(conf, monkeypatch, tmp_path):
    """launch(arguments...) runs as `python test_config.py arguments...` would; returns what the script was handed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def launch(*arguments, script=lambda config: None, schema=Config, name="config"):
        seen = []

        def main(config):
            seen.append(config)
            return script(config)

        monkeypatch.setattr(sys, "argv", ["test_config.py", *arguments])
        config.run(main, schema, name, conf)
        return seen

    return launch


@pytest.fixture
def complaint(launch, capsys):
    """complaint(arguments...): the one line on stderr with which the script leaves, exit code 2."""

    def complaint(*arguments, **keywords):
        with pytest.raises(SystemExit) as exit:
            launch(*arguments, **keywords)
        assert exit.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith("test_config: ")
        assert printed.count("\n") == 1
        return printed.removeprefix("test_config: ").rstrip("\n")

    return complaint


# What arrives


@pytest.mark.parametrize(
    ("arguments", "n_layer", "n_head", "lr", "seed"),
    [
        ("", 4, 6, 1e-3, 1337),  # a group's file over the defaults
        ("model=gpt2 model.n_head=2", 12, 2, 1e-3, 1337),  # the command line over the file
        ("experiment=long", 12, 12, 3e-4, 7),  # an experiment over groups and keys
        ("experiment=long model=nano seed=8", 4, 6, 3e-4, 8),  # the command line over the experiment
        ("+seed=3 ++model=gpt2", 12, 12, 1e-3, 3),  # Hydra's prefixes for a key that is added
    ],
)
def test_the_command_line_goes_over_the_experiment_over_the_groups_files_over_the_defaults(
    launch, arguments, n_layer, n_head, lr, seed
):
    (got,) = launch(*arguments.split())
    assert got == Config(ModelConfig(n_layer, n_head), OptimizerConfig(lr), seed, folder="runs/None")


def test_what_a_script_gets_is_plain_python(launch):
    (got,) = launch("optimizer.betas=[0.8,0.9]", "model.n_kv_head=2", "limit=3", "run=my run")
    assert (type(got.model), type(got.optimizer.betas)) == (ModelConfig, list)
    assert (got.optimizer.betas, got.model.n_kv_head, got.limit, got.folder) == ([0.8, 0.9], 2, 3, "runs/my run")
    assert launch("limit=3", "limit=null")[0].limit is None


def test_a_derived_default_follows_what_it_is_derived_from(launch):
    """OmegaConf reads defaults after __post_init__: model.n_head=8 kept the n_kv_head=6 of the default n_head."""
    assert launch("model.n_head=8")[0].model.n_kv_head == 8
    assert launch("model.n_head=8", "model.n_kv_head=2")[0].model.n_kv_head == 2


def test_a_whole_number_may_be_written_with_an_exponent(launch):
    """steps=1e3 was refused: YAML takes it for a float."""
    given = {"1e3": 1000, "2E+1": 20, "1.5e1": 15, "500e-2": 5, "-1e2": -100, "1e19": 10**19}
    kinds = [(f"n{i}", int) for i in range(len(given))] + [("limit", int | None), ("rows", list[int])]
    kinds += [("rate", float), ("text", str)]  # where it stays as it is
    schema = make_dataclass("Numbers", [(key, kind, MISSING) for key, kind in kinds])
    texts = [f"n{i}={text}" for i, text in enumerate(given)]
    (got,) = launch(*texts, "limit=1e3", "rows=[1e3,7,2e0]", "rate=1e3", "text=1e3", schema=schema, name="bare")
    assert got == schema(*given.values(), 1000, [1000, 7, 2], 1000.0, "1e3")
    assert (type(got.n0), type(got.rate)) == (int, float)
    assert [config.seed for config in launch("-m", "seed=1e3,2e3")] == [1000, 2000]


def test_a_sweep_runs_every_combination_in_order_and_ends_with_the_first_that_fails(launch):
    got = launch("model=nano,gpt2", "-m", "seed=1,2")
    assert [(c.model.n_layer, c.seed) for c in got] == [(4, 1), (4, 2), (12, 1), (12, 2)]
    started = []
    with pytest.raises(SystemExit) as exit:
        launch("-m", "seed=1,2,3", script=lambda config: started.append(config.seed) or 130 * (config.seed == 2))
    assert (exit.value.code, started) == (130, [1, 2])


@pytest.mark.parametrize("arguments", [["prompt=a b"], ["-m", "prompt=a,b"]])
def test_a_run_leaves_no_folder_no_file_no_other_working_directory_and_its_arguments(launch, tmp_path, arguments):
    """wandb and the commands that a run prints at its end read sys.argv."""
    where = []
    launch(*arguments, script=lambda config: where.append(os.getcwd()))
    assert set(where) == {str(tmp_path)}
    assert list(tmp_path.iterdir()) == []
    assert sys.argv == ["test_config.py", *arguments]


# --help and --cfg


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_each_groups_options_marks_the_chosen_and_shows_keys_as_they_are_typed(launch, capsys, flag):
    assert launch(flag, "experiment=long", "prompt=a b", "run=x", "-m") == []
    said = capsys.readouterr().out
    options = re.findall(r"^([* ]) ((?:model|optimizer|experiment)=\w+)", said, re.MULTILINE)
    files = [name.replace("/", "=") for name in FILES if "/" in name]
    assert [option for _, option in options] == [f"model={name}" for name in MODELS.split(", ")] + files[5:]
    assert [option for mark, option in options if mark == "*"] == ["model=gpt2", "optimizer=adamw", "experiment=long"]
    assert " ".join(" ".join(said.split("Keys, ")[1].splitlines()[1:]).split()) == (
        "seed=7 limit=null run=x prompt='a b' folder=runs/x "
        "model.n_layer=12 model.n_head=12 model.n_kv_head=null model.dropout=0.0 "
        "optimizer.lr=0.0003 optimizer.betas=[0.9,0.95] optimizer.fused=true"
    )
    assert launch("model=gpt2", "--cfg", "job") == []
    assert yaml.safe_load(capsys.readouterr().out)["model"]["n_layer"] == 12


def test_help_of_a_script_without_groups_lists_its_keys_alone_each_with_its_meaning(launch, capsys):
    """breakit.py --help listed train.py's groups, which it refuses."""
    said = [("one", int, key(1, "the first", usual="1: few")), ("kind", str, key("a", "which", among="a (old) | b"))]
    launch("--help", schema=make_dataclass("Said", [*said, ("nothing", int, 0)]), name="bare")
    assert capsys.readouterr().out.split("\n\n")[-1].splitlines() == [
        "  one=1      the first; 1: few",
        "  kind=a     which: a (old) | b",
        "  nothing=0",
    ]


def test_the_short_help_of_a_run_fits_a_screen_and_says_how_to_see_the_rest(call):
    short = call(train, "--help").out
    assert len(short.splitlines()) <= 45
    assert "--help all" in short.splitlines()[-1]
    shown = {line.split("=")[0].strip() for line in short.splitlines() if re.match(r"  \S+=\S", line)}
    assert shown == set(help.USUAL.split())


@pytest.mark.parametrize("script", [train, sample, breakit, bench], ids=lambda script: script.__name__)
def test_every_key_and_every_option_has_a_meaning_that_fits_on_its_line(call, script):
    ended = call(script, "--help=all") if script is train else call(script, "--help", "all")
    assert ended.code == 0
    lines = [line[2:] for line in ended.out.splitlines() if re.match(r"[* ] \S+=", line)]
    keys = [key for key, hint in config.known_keys(script.Config).items() if not is_dataclass(hint)]
    assert {line.partition("=")[0] for line in lines} >= set(keys)
    for line in lines:
        assert re.fullmatch(r"\S+ {2,}\S.{3,}(?<!\.\.\.)", line), line
    assert max(map(len, ended.out.splitlines())) <= 120


# What a job starts from instead of the defaults


@pytest.fixture
def composed(conf):
    """composed(base, arguments...): the jobs, where `base` answers for whatever has a `run`."""

    def composed(base, *arguments):
        def resumed(cfg):
            return base if cfg.run else None

        return [job for job, _ in config.compose([*arguments], Config, "config", conf, "test_config", resumed)]

    return composed


BASE = {"model": {"n_layer": 8, "n_head": 10, "n_kv_head": 1}, "optimizer": {"lr": 0.5, "betas": [0.1, 0.2]}, "seed": 3}


@pytest.mark.parametrize(
    ("arguments", "model", "lr", "seed"),
    [
        ("", (8, 10, 1), 0.5, 3),  # no group's file goes over the base
        ("seed=1337 model.n_kv_head=null experiment=long", (12, 12), 3e-4, 1337),  # what is typed does
        ("model.n_kv_head=5", (8, 10, 5), 0.5, 3),  # and is right beside the base only: the default has 6 heads
    ],
)
def test_what_is_typed_goes_over_the_base_and_the_base_over_the_defaults(composed, arguments, model, lr, seed):
    (got,) = composed(BASE, "run=x", *arguments.split())
    assert got == Config(ModelConfig(*model), OptimizerConfig(lr, [0.1, 0.2]), seed, run="x", folder="runs/x")


def test_each_job_of_a_sweep_has_its_own_base(composed):
    got = composed(BASE, "-m", "run=null,x", "seed=1,2")
    assert [(job.run, job.seed, job.model.n_layer) for job in got] == [
        *[(None, 1, 4), (None, 2, 4)],
        *[("x", 1, 8), ("x", 2, 8)],
    ]


@pytest.mark.parametrize("text", ["${run}", "a\\${b}", "it's, [1]", "null", ""])
def test_text_of_the_base_arrives_as_it_was(composed, text):
    assert composed({"prompt": text}, "run=x")[0].prompt == text


def test_a_key_of_the_base_that_is_gone_is_named(composed):
    with pytest.raises(ValueError, match=r"^the checkpoint's configuration: .*\bsed\b.*\bseed\b"):
        composed({"sed": 1}, "run=x")


# Free text

TEXTS = [
    *["", " ", "  a  ", "def f(x):", "a, b", "a,b", "a=b", "a:b", "[1, 2]", "{a: b}", "{", "]", "(", "~a", "+a", "-a"],
    *["null ", "true", "1", "1e-3", "0x10", "a#b", "%", "..", "~", "!x", "*", "|", "@", "???x", "choice(1,2)"],
    *["a\nb", "\ttab\t", "\r\n", "\0", "gr\u00fc\u00dfe \u4f60\u597d \U0001f600", "glob(*)", "range(3)", "str(1)"],
    *["'", '"', "''x", "'a", 'a"', "it's", '"a" + "b"', "'a' == 'b'"],
    *["\\", "\\\\", "a\\", "\\n", "\\'", '\\"', "C:\\x\\", "x='${y}'\\"],
    *["$", "${", "${}", "${run}", "\\${run}", "\\\\${run}", "a\\\\\\${run}\\", "$${run}}", "${a${b}}"],
    *["'${run}", "${run}'", "${oc.env:HOME}"],
]


@pytest.mark.parametrize("kind", [str, str | None])
def test_free_text_arrives_as_the_shell_gave_it(launch, kind):
    keys = [f"text{i}" for i in range(len(TEXTS))]
    schema = make_dataclass("Texts", [(key, kind, "default") for key in keys])
    (got,) = launch(*[f"{key}={text}" for key, text in zip(keys, TEXTS, strict=True)], schema=schema, name="bare")
    assert [getattr(got, key) for key in keys] == TEXTS


def test_text_may_be_quoted_for_hydra_and_null_is_none_only_where_none_is_allowed(launch):
    (got,) = launch("run=null", "prompt=null")
    assert (got.run, got.prompt) == (None, "null")
    assert [launch(f"prompt={quoted}")[0].prompt for quoted in ('"a b"', "'a b'")] == ["a b", "a b"]
    assert [c.prompt for c in launch("-m", "prompt=a,'b c'")] == ["a", "b c"]


# Mistakes

MISTAKES = {  # what the answer must have beside what is typed: the nearest name, the type, the file; and what is typed
    "did you mean optimizer.lr=1?": ["--lr=1", "-lr=1", "--optimizer.lr 1"],
    "did you mean model.n_layer=3?": ["--n-layer=3"],
    "did you mean model=gpt2?": ["--mod=gpt2"],
    "model=gpt3: there is no such model": ["experiment=lost"],
    "did you mean experiment=long?": ["--experiment=long"],
    "--cfg job": ["-x", "--cfg all", "--help=al"],
    "did you mean optimizer.lr?": ["optimzer.lr=1", "lr=1", "++model.lr=1"],
    "did you mean model.n_head?": ["model.n_heads=3"],
    "did you mean model?": ["modle=gpt2"],
    "did you mean seed?": ["seed.x=1"],
    "--help all": ["xyzzy=1", "=3"],
    "seed=VALUE": ["seed", "~seed"],
    "leave it out": ["hydra.mode=MULTIRUN", "hydra/launcher=joblib", "-m +hydra.sweeper.params={seed:1} seed=1,2"],
    "did you mean model=nano?": ["model=nanno", "-m model=nano,nanno"],
    f"only {MODELS}": ["model=xyz", "model=null", "model="],
    "-m model=NAME,NAME": ["model=[nano,gpt2]"],
    "-m seed=1,2": ["seed=1,2"],
    "no option matches": ["-m model=glob(x*)"],
    "type float": ["optimizer.lr=abc"],
    "type int": ["model.n_layer=1.5", "seed=1.5e0", "seed=1e999999999", "seed=null", "-m seed=1,x"],
    "type int | None": ["model.n_kv_head=x", "limit=$x"],
    "type list[float]": ["optimizer.betas=[a]"],
    "did you mean optimizer.betas=[3]?": ["optimizer.betas=3"],  # it said list[float], a word of Python's
    "type bool": ["optimizer.fused=maybe"],
    "quote it": ["optimizer.betas=[1", "seed=("],
    "'nothing'": ["seed=${nothing}"],
    "prompt=VALUE": ["prompt=???"],
    "n_head=6": ["model.n_kv_head=5", "-m model.n_kv_head=2,5"],  # a dataclass's own rule
    "conf/model/misspelt.yaml: there is no key model.n_layers; did you mean model.n_layer?": ["model=misspelt"],
    "conf/model/mistyped.yaml: model.n_layer=many: the value must be of type int": ["model=mistyped"],
    "line 1": ["model=unreadable"],
}


@pytest.mark.parametrize(("typed", "wanted"), [(typed, wanted) for wanted, all in MISTAKES.items() for typed in all])
def test_a_mistake_is_one_line_with_what_was_typed_and_what_is_wanted(complaint, typed, wanted):
    started = []
    answer = complaint(*typed.split(), script=started.append)
    assert wanted in answer
    assert re.split(r"[= ]", typed.removeprefix("-m ").lstrip("+~"))[0].rpartition(".")[2] in answer or "lost" in typed
    assert started == []


def test_an_unknown_key_in_the_primary_file_names_the_file(complaint):
    assert complaint(name="strange") == "conf/strange.yaml: there is no key prompts; did you mean prompt?"


@pytest.mark.parametrize("name", help.ELSEWHERE)
def test_a_name_of_another_project_is_answered_with_ours(name):
    """block_size was answered with attention.block_mask_size, learning_rate and max_iters with nothing."""
    ours = help.ELSEWHERE[name]
    known = config.known_keys(sample.Config if name == "start" else train.Config)
    first = re.split(r"[^\w.]", ours)[0]
    assert first in known
    assert name not in known
    assert ours in help.unknown(name, known)
    assert ours in help.unknown(f"model.{name}", known)
    assert "here it is" not in help.unknown(name, known.keys() - {first})  # of a script without that key
    with pytest.raises(ValueError, match=re.escape(first)):
        config.split_arguments([f"--{name.replace('_', '-')}"], known)


def test_python_outside_the_range_is_refused_in_words(complaint, monkeypatch):
    """Hydra 1.3.8 on Python 3.14 dies inside argparse with a traceback about a help string."""
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    monkeypatch.setattr(sys, "version", "3.14.0 (main)")
    assert "3.13" in complaint()


# How a script ends


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("data/x.txt is empty"), 2, "test_config: data/x.txt is empty\n"),
        (ValueError("\x1b[31mx\ny"), 2, "test_config: \\x1b[31mx\\ny\n"),  # it would command the terminal
        (RuntimeError("can't start new thread"), 2, "ulimit"),  # under a limit of memory
        (ImportError("x.so: failed to map segment from shared object"), 2, "ulimit"),
        (NotADirectoryError(20, "Not a directory", __file__), 2, "a folder is wanted"),
        (OSError(36, "File name too long", "n" * 300), 2, "name another one"),
        (KeyboardInterrupt(), 130, ""),
        (KeyboardInterrupt(signal.SIGINT), 130, ""),
        (KeyboardInterrupt(signal.SIGTERM), 143, ""),
    ],
    ids=repr,
)
def test_a_mistake_ends_a_script_with_one_line_and_a_signal_quietly(launch, capsys, error, code, said):
    with pytest.raises(SystemExit) as exit:
        launch(script=Mock(side_effect=error))
    assert exit.value.code == code
    printed = capsys.readouterr().err
    assert printed == said if said.endswith("\n") or not said else said in printed
    assert printed.count("\n") == bool(said)


def test_a_bug_keeps_its_traceback_and_a_mistake_has_one_for_who_asks(launch, monkeypatch):
    bug = RuntimeError("a bug")
    with pytest.raises(RuntimeError) as raised:
        launch(script=Mock(side_effect=bug))
    assert raised.value is bug
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="deep inside"):
        launch(script=Mock(side_effect=ValueError("deep inside")))


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "2"}, dict.fromkeys(config.FROM_TORCHRUN, "x")])
def test_half_of_what_torchrun_sets_is_one_line_with_a_way_out(complaint, monkeypatch, given):
    for name in config.FROM_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **given}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config, "FIRST_SPEAKS", 0)
    assert complaint().endswith("start it with torchrun, or unset TORCHELASTIC_RUN_ID")


def test_closed_outputs_lose_what_is_printed_and_nothing_else(launch, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    launch(script=lambda config: print(sys.stdout.encoding, sys.stderr.isatty(), flush=True))
    with pytest.raises(SystemExit) as exit:
        launch(script=Mock(side_effect=ValueError("unseen")))
    assert exit.value.code == 2


def test_on_a_full_disk_the_error_is_said_where_there_is_room(launch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Mock(write=full))
    with pytest.raises(SystemExit) as exit:
        launch(script=lambda config: print("a note", file=sys.stderr))
    assert exit.value.code == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_a_list_that_was_kept_is_not_taken_for_a_command():
    """A stranger's checkpoint had environment variables read into wandb's tags."""
    kept = {"tags": ["${oc.env:HOME}", "a\\${b}"], "of": {"x": "${y}"}}
    assert OmegaConf.to_container(OmegaConf.create(config.escaped(kept)), resolve=True) == kept
    with pytest.raises(ValueError, match=r"text='\?\?\?'"):
        config.check_keys(make_dataclass("Texts", [("text", str)]), {"text": "???"})


SCRIPT = """
import os, sys
from dataclasses import dataclass
from training import config, help

class Cycle:
    def __del__(self):
        print("looked at once more")

KEPT = Cycle()
KEPT.me = KEPT

@dataclass
class Config:
    text: str = "a"

def main(c):
    print(os.getcwd(), c.text, "torch" in sys.modules)
    if c.text == "bug":
        raise KeyError("a bug")

if __name__ == "__main__":
    config.run(main, Config, "config")
"""


@pytest.fixture
def script(tmp_path):
    """script(arguments...): how python ../app/script.py ended, a real process in another folder."""
    (tmp_path / "app/conf").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "app/script.py").write_text(SCRIPT)
    (tmp_path / "app/conf/config.yaml").write_text("defaults: [config_schema]\n")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def script(*arguments, **options):
        command = [sys.executable, "../app/script.py", *arguments]
        options = {"stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": path}} | options
        return subprocess.run(command, cwd=tmp_path / "elsewhere", stderr=subprocess.PIPE, text=True, **options)

    return script


def test_a_real_script_finds_its_own_conf_from_anywhere_and_a_bug_keeps_its_traceback(script, tmp_path):
    """With nothing of Hydra in it. And a script ends without a last look at every object, which took a second."""
    done = script("text=bug")
    assert done.stdout == f"{tmp_path / 'elsewhere'} bug False\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("KeyError: 'a bug'\n")
    assert "hydra" not in done.stderr.lower()
    assert done.returncode == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_reader_of_the_help_may_leave_before_its_end(script):
    read, write = os.pipe()
    os.close(read)
    done = script("--help", stdout=write)
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 141)


# Writing down and reading back


def test_yaml_and_dictionary_give_back_the_same_configuration():
    for text in TEXTS:
        before = Config(prompt=text, model=ModelConfig(n_kv_head=2, dropout=1e-5), optimizer=OptimizerConfig(lr=3e-4))
        assert config.from_dict(Config, yaml.safe_load(config.to_yaml(before))) == before
        assert config.from_dict(Config, asdict(before)) == before


def test_a_stored_key_that_is_lacking_takes_its_default_and_one_that_is_unknown_is_refused():
    assert config.from_dict(Config, {"model": {"n_layer": 2}}) == Config(model=ModelConfig(n_layer=2))
    for stored, named in {"sed": "seed", "model": "model.n_layer"}.items():
        with pytest.raises(ValueError, match=rf"^{stored}\b.*\b{named}\?$"):
            config.from_dict(Config, {stored: {"n_layers": 2} if stored == "model" else 1})
