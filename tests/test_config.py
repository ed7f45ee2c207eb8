"""training/config.py: what arrives at a script, and what a user who mistyped is told."""

import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, OmegaConf

import bench
import breakit
import sample
import train
from conf.keys import key
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
        if self.n_layer % 2:
            raise ValueError(f"n_layer={self.n_layer} is odd; take an even number")


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


def test_a_group_file_only_overrides_the_dataclass_defaults(launch):
    assert launch()[0] == Config(model=ModelConfig(n_layer=4), folder="runs/None")


def test_the_command_line_overrides_the_group_file(launch):
    assert launch("model=gpt2", "model.n_head=2")[0].model == ModelConfig(n_layer=12, n_head=2)


def test_an_experiment_overrides_groups_and_keys(launch):
    (got,) = launch("experiment=long")
    assert (got.model.n_layer, got.optimizer.lr, got.seed) == (12, 3e-4, 7)


def test_the_command_line_overrides_an_experiment(launch):
    (got,) = launch("experiment=long", "model=nano", "seed=8")
    assert (got.model.n_layer, got.optimizer.lr, got.seed) == (4, 3e-4, 8)


def test_nothing_of_omegaconf_is_left_in_what_the_script_gets(launch):
    (got,) = launch("optimizer.betas=[0.8,0.9]", "model.n_kv_head=2")
    assert is_dataclass(got.model)
    assert type(got.model) is ModelConfig
    assert type(got.optimizer.betas) is list
    assert got.optimizer.betas == [0.8, 0.9]
    assert got.model.n_kv_head == 2


def test_a_derived_default_follows_what_it_is_derived_from(launch):
    """OmegaConf reads defaults after __post_init__: model.n_head=8 kept the n_kv_head=6 of the default n_head."""
    assert launch("model.n_head=8")[0].model.n_kv_head == 8
    assert launch("model.n_head=8", "model.n_kv_head=2")[0].model.n_kv_head == 2


def test_null_clears_an_optional_number(launch):
    assert launch("limit=3")[0].limit == 3
    assert launch("limit=3", "limit=null")[0].limit is None


def test_a_whole_number_may_be_written_with_an_exponent(launch):
    """steps=1e3 was refused: YAML takes it for a float."""
    given = {"1e3": 1000, "2E+1": 20, "1.5e1": 15, "500e-2": 5, "-1e2": -100, "1e19": 10**19}
    kinds = [(f"n{i}", int) for i in range(len(given))] + [("limit", int | None), ("rows", list[int])]
    schema = make_dataclass("Numbers", [(key, kind, MISSING) for key, kind in kinds])
    texts = [f"n{i}={text}" for i, text in enumerate(given)]
    (got,) = launch(*texts, "limit=1e3", "rows=[1e3,7,2e0]", schema=schema, name="bare")
    assert got == schema(*given.values(), 1000, [1000, 7, 2])
    assert type(got.n0) is int
    assert [config.seed for config in launch("-m", "seed=1e3,2e3")] == [1000, 2000]


def test_an_exponent_stays_as_it_is_where_no_integer_is_wanted(launch):
    (got,) = launch("optimizer.lr=1e3", "prompt=1e3", "optimizer.betas=[1e1,1e-1]")
    assert (got.optimizer.lr, got.prompt, got.optimizer.betas) == (1000.0, "1e3", [10.0, 0.1])


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_the_prefixes_for_adding_a_key_set_one_that_exists(launch, prefix):
    assert launch(f"{prefix}seed=3", f"{prefix}model=gpt2")[0].seed == 3


def test_a_sweep_runs_every_combination_in_order(launch):
    got = launch("model=nano,gpt2", "-m", "seed=1,2")
    assert [(c.model.n_layer, c.seed) for c in got] == [(4, 1), (4, 2), (12, 1), (12, 2)]


@pytest.mark.parametrize("arguments", [[], ["-m", "seed=1,2"]])
def test_a_run_leaves_no_folder_no_file_and_no_other_working_directory(launch, tmp_path, arguments):
    where = []
    launch(*arguments, script=lambda config: where.append(os.getcwd()))
    assert set(where) == {str(tmp_path)}
    assert list(tmp_path.iterdir()) == []


def test_the_arguments_stay_as_they_were_typed(launch):
    """wandb and the commands that a run prints at its end read sys.argv."""
    launch("-m", "prompt=a b", script=lambda config: None)
    assert sys.argv == ["test_config.py", "-m", "prompt=a b"]


def test_hydra_can_still_show_the_configuration(launch, capsys):
    assert launch("model=gpt2", "--cfg", "job") == []
    assert yaml.safe_load(capsys.readouterr().out)["model"]["n_layer"] == 12


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_each_groups_options_and_marks_the_chosen(launch, capsys, flag):
    assert launch(flag, "experiment=long", "-m") == []
    options = re.findall(r"^([* ]) ([a-z]+=\w+)", capsys.readouterr().out, re.MULTILINE)
    assert [option for _, option in options[:5]] == [
        f"model={name}" for name in MODELS.removeprefix("only ").split(", ")
    ]
    assert [option for mark, option in options if mark == "*"] == ["model=gpt2", "optimizer=adamw", "experiment=long"]


def test_help_of_a_script_without_groups_lists_its_keys_alone(launch, capsys):
    """breakit.py --help listed train.py's groups, which it refuses."""
    assert launch("--help", schema=OptimizerConfig, name="bare") == []
    keys = capsys.readouterr().out.split("\n\n")[-1].split()
    assert keys == ["lr=0.001", "betas=[0.9,0.95]", "fused=true"]


def test_help_shows_what_is_composed_and_as_it_is_typed(launch, capsys):
    launch("--help", "experiment=long", "prompt=a b", "run=x")
    keys = capsys.readouterr().out.split("Keys, ")[1].splitlines()[1:]
    assert " ".join(" ".join(keys).split()) == (
        "seed=7 limit=null run=x prompt='a b' folder=runs/x "
        "model.n_layer=12 model.n_head=12 model.n_kv_head=null model.dropout=0.0 "
        "optimizer.lr=0.0003 optimizer.betas=[0.9,0.95] optimizer.fused=true"
    )


def test_a_keys_meaning_is_that_of_its_field(launch, capsys):
    said = [("one", int, key(1, "the first", usual="1: few")), ("kind", str, key("a", "which", among="a (old) | b"))]
    launch("--help", schema=make_dataclass("Said", [*said, ("nothing", int, 0)]), name="bare")
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "  one=1      the first; 1: few",
        "  kind=a     which: a (old) | b",
        "  nothing=0",
    ]


def test_the_short_help_of_a_run_fits_a_screen_and_says_how_to_see_the_rest(call):
    short, full = call(train, "--help").out, call(train, "--help", "all").out
    assert call(train, "--help=all").out == full
    assert len(short.splitlines()) <= 45
    assert "--help all" in short.splitlines()[-1]
    assert "break_it." in full
    assert "break_it" not in short
    shown = {line.split("=")[0].strip() for line in short.splitlines() if re.match(r"  \S+=\S", line)}
    assert shown == set(help.USUAL.split())


@pytest.mark.parametrize("script", [train, sample, breakit, bench], ids=lambda script: script.__name__)
def test_every_key_and_every_option_has_a_meaning_that_fits_on_its_line(call, script):
    ended = call(script, "--help", "all")
    assert ended.code == 0
    lines = [line[2:] for line in ended.out.splitlines() if re.match(r"[* ] \S+=", line)]
    keys = [key for key, hint in config.known_keys(script.Config).items() if not is_dataclass(hint)]
    assert {line.partition("=")[0] for line in lines} >= set(keys)
    for line in lines:
        assert re.fullmatch(r"\S+ {2,}\S.{3,}(?<!\.\.\.)", line), line
    assert max(map(len, ended.out.splitlines())) <= 120


def test_a_reader_of_the_help_may_leave_before_its_end(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [config_schema]\n")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "script.py", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


# What a job starts from instead of the defaults


@pytest.fixture
def composed(conf):
    """composed(base, arguments...): the jobs, where `base` answers for whatever has a `run`."""

    def composed(base, *arguments):
        def resumed(cfg):
            return base if cfg.run else None

        return [job for job, _ in config.compose([*arguments], Config, "config", conf, "test_config", resumed)]

    return composed


BASE = {"model": {"n_layer": 8, "n_head": 2, "n_kv_head": 1}, "optimizer": {"lr": 0.5, "betas": [0.1, 0.2]}, "seed": 3}


def test_what_is_not_typed_comes_from_the_base_and_no_group_goes_over_it(composed):
    (got,) = composed(BASE, "run=x")
    model = ModelConfig(n_layer=8, n_head=2, n_kv_head=1)
    assert got == Config(
        model=model, optimizer=OptimizerConfig(lr=0.5, betas=[0.1, 0.2]), seed=3, run="x", folder="runs/x"
    )


def test_what_is_typed_goes_over_the_base_also_where_it_is_the_default(composed):
    (got,) = composed(BASE, "run=x", "seed=1337", "model.n_kv_head=null", "experiment=long")
    assert got.seed == 1337
    assert got.optimizer == OptimizerConfig(lr=3e-4, betas=[0.1, 0.2])
    assert got.model == ModelConfig(n_layer=12, n_head=12)  # the experiment's model=gpt2


def test_a_key_may_be_right_only_beside_the_base(composed):
    """n_kv_head=5 of n_head=6 is refused, unless the base has other heads: nothing may be checked before it came."""
    (got,) = composed({"model": {"n_head": 10}}, "run=x", "model.n_kv_head=5")
    assert got.model == ModelConfig(n_layer=6, n_head=10, n_kv_head=5)


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
    with pytest.raises(ValueError, match=r"^the checkpoint's configuration: .*there is no key sed; did you mean seed"):
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


def test_quoting_survives_hydra_and_omegaconf_for_any_text():
    """Every string over the characters that either grammar treats specially, in a random order."""
    draw, parser = random.Random(0), OverridesParser.create()
    for _ in range(3000):
        text = "".join(draw.choices(["\\", "$", "{", "}", "${", "'", '"', " ", "\n", ",", "a"], k=draw.randrange(9)))
        value = parser.parse_override(f"prompt={config.quote(text)}").value()
        assert OmegaConf.create({"prompt": value}).prompt == text


def test_null_is_none_only_where_none_is_allowed(launch):
    assert launch("run=null")[0].run is None
    assert launch("prompt=null")[0].prompt == "null"


@pytest.mark.parametrize("value", ['"a b"', "'a b'"])
def test_a_value_quoted_for_hydra_loses_its_quotes(launch, value):
    assert launch(f"prompt={value}")[0].prompt == "a b"


def test_text_keeps_hydras_meaning_in_a_sweep(launch):
    assert [c.prompt for c in launch("-m", "prompt=a,'b c'")] == ["a", "b c"]


def test_yaml_can_refer_to_text_given_on_the_command_line(launch):
    assert launch("run=my run")[0].folder == "runs/my run"


# Mistakes


@pytest.mark.parametrize(
    ("argument", "way_out"),
    [
        ("--lr=1", "did you mean optimizer.lr=1?"),
        ("-lr=1", "did you mean optimizer.lr=1?"),
        ("--n-layer=3", "did you mean model.n_layer=3?"),
        ("--optimizer.lr", "did you mean optimizer.lr=1?"),  # the value that follows
        ("--run=mine", "did you mean run=mine?"),
        ("-model=gpt2", "did you mean model=gpt2?"),
        ("--mod=gpt2", "did you mean model=gpt2?"),
        ("--experiment=long", "did you mean experiment=long?"),
        ("--xyzzy", "the flags are -m for a sweep, --help, --help all and --cfg job"),
    ],
)
def test_dashes_are_answered_with_hydras_way(complaint, argument, way_out):
    assert complaint(argument, "1") == f"{argument}: options are written key=value here, without dashes; {way_out}"


@pytest.mark.parametrize("name", help.ELSEWHERE)
def test_a_name_of_another_project_is_answered_with_ours(name):
    """block_size was answered with attention.block_mask_size, learning_rate and max_iters with nothing."""
    ours = help.ELSEWHERE[name]
    known = config.known_keys(sample.Config if name == "start" else train.Config)
    first = re.split(r"[^\w.]", ours)[0]
    assert first in known
    assert name not in known
    assert help.unknown(name, known) == f"there is no key {name}; here it is {ours}"
    assert "here it is" not in help.unknown(name, known.keys() - {first})  # of a script without that key


def test_a_name_of_another_project_with_dashes_or_a_group_is_answered_with_ours():
    known = config.known_keys(train.Config)
    for argument, way_out in {
        "--block-size=64": "did you mean model.context_length=64?",
        "--max_iters": "did you mean steps=VALUE?",
        "--min_lr=1e-4": "min_lr is optimizer.min_lr_ratio, as a share of optimizer.lr",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"without dashes; {way_out}") + "$"):
            config.split_arguments([argument], known)
    assert help.unknown("model.block_size", known).endswith("here it is model.context_length")


@pytest.mark.parametrize(
    ("argument", "way_out"),
    [
        ("optimzer.lr=1", "there is no key optimzer.lr; did you mean optimizer.lr?"),
        ("lr=1", "there is no key lr; did you mean optimizer.lr?"),
        ("+lr=1", "there is no key lr; did you mean optimizer.lr?"),
        ("++model.lr=1", "there is no key model.lr; did you mean optimizer.lr?"),
        ("model.n_heads=3", "there is no key model.n_heads; did you mean model.n_head?"),
        ("modle=gpt2", "there is no key modle; did you mean model?"),
        ("experimnt=long", "there is no key experimnt; did you mean experiment?"),
        ("seed.x=1", "there is no key seed.x; did you mean seed?"),
        ("xyzzy=1", "there is no key xyzzy; --help all explains every key"),
        ("seed", "options are written key=value; did you mean seed=VALUE?"),
        ("~seed", "keys cannot be removed; give it another value: seed=VALUE"),
        ("~model=nano", "keys cannot be removed; give it another value: model=VALUE"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(complaint, argument, way_out):
    assert complaint(argument) == f"{argument}: {way_out}"


MODELS = "only gpt2, misspelt, mistyped, nano, unreadable"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["model=nanno"], f"model=nanno: there is no such model, {MODELS}; did you mean model=nano?"),
        (["model=xyz"], f"model=xyz: there is no such model, {MODELS}"),
        (["-m", "model=nano,nanno"], f"model=nanno: there is no such model, {MODELS}; did you mean model=nano?"),
        (["experiment=lost"], f"model=gpt3: there is no such model, {MODELS}; did you mean model=gpt2?"),
        (["model=3"], f"model=3: there is no such model, {MODELS}"),
        (["model=null"], f"model=null: there is no such model, {MODELS}"),
        (["model="], f"model=: there is no such model, {MODELS}"),
        (["model={n_layr: 2}"], "there is no key model.n_layr; did you mean model.n_layer?"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: the value must be of type float"),
        (["model.n_layer=1.5"], "model.n_layer=1.5: the value must be of type int"),
        (["seed=1.5e0"], "seed=1.5: the value must be of type int"),
        (["seed=1e-3"], "seed=0.001: the value must be of type int"),
        (["seed=1e999999999"], "seed=inf: the value must be of type int"),
        (["model.n_kv_head=x"], "model.n_kv_head=x: the value must be of type int | None"),
        (["optimizer.betas=[a]"], "optimizer.betas[0]=a: the value must be of type list[float]"),
        (["optimizer.fused=maybe"], "optimizer.fused=maybe: the value must be of type bool"),
        (["seed=null"], "seed=None: the value must be of type int"),
        (["-m", "seed=1,x"], "seed=x: the value must be of type int"),
        (["model=misspelt"], "conf/model/misspelt.yaml: there is no key model.n_layers; did you mean model.n_layer?"),
        (["model=mistyped"], "conf/model/mistyped.yaml: model.n_layer=many: the value must be of type int"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_wanted(complaint, arguments, answer):
    assert complaint(*arguments) == answer


def test_an_unknown_key_in_the_primary_file_names_the_file(complaint):
    assert complaint(name="strange") == "conf/strange.yaml: there is no key prompts; did you mean prompt?"


def test_a_value_that_must_be_given_is_asked_for(complaint):
    schema = make_dataclass("Must", [("run", str, MISSING)])
    assert complaint(schema=schema, name="bare") == "run has no default and must be given: run=VALUE"


def test_yaml_that_cannot_be_read_names_file_and_line(complaint):
    answer = complaint("model=unreadable")
    assert "conf/model/unreadable.yaml" in answer
    assert "line 1" in answer


def test_a_value_that_hydra_cannot_read_is_named(complaint):
    assert complaint("optimizer.betas=[1").startswith("optimizer.betas=[1: Hydra cannot read the value (")


def test_several_values_without_a_sweep_are_pointed_to_one(complaint):
    assert complaint("seed=1,2") == "seed=1,2: several values make a sweep and need -m: -m seed=1,2"


def test_a_validation_error_of_a_dataclass_is_a_users_mistake(complaint):
    assert complaint("model.n_layer=3") == "n_layer=3 is odd; take an even number"


def test_a_sweep_with_one_impossible_job_does_not_start(launch):
    started = []
    with pytest.raises(SystemExit) as exit:
        launch("-m", "model.n_layer=2,3", script=started.append)
    assert exit.value.code == 2
    assert started == []


def test_python_outside_the_range_is_refused_in_words(complaint, monkeypatch):
    """Hydra 1.3.8 on Python 3.14 dies inside argparse with a traceback about a help string."""
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    monkeypatch.setattr(sys, "version", "3.14.0 (main)")
    assert complaint() == "Python 3.14.0 cannot run this (Hydra 1.3); use 3.11, 3.12 or 3.13"


# How a script ends


def raiser(error):
    def script(config):
        raise error

    return script


def test_a_value_error_of_the_script_is_one_line(complaint):
    assert complaint(script=raiser(ValueError("data/x.txt is empty"))) == "data/x.txt is empty"


def test_a_thread_that_cannot_start_is_one_line_with_a_way_out(complaint):
    """Under a limit of memory."""
    assert "ulimit" in complaint(script=raiser(RuntimeError("can't start new thread")))


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "2"}, dict.fromkeys(config.FROM_TORCHRUN, "x")])
def test_half_of_what_torchrun_sets_is_one_line_with_a_way_out(complaint, monkeypatch, given):
    for name in config.FROM_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **given}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config, "FIRST_SPEAKS", 0)
    assert complaint().endswith("start it with torchrun, or unset TORCHELASTIC_RUN_ID")


def test_hydra_full_error_gives_a_value_error_its_traceback(launch, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="deep inside"):
        launch(script=raiser(ValueError("deep inside")))


def test_another_exception_passes_untouched(launch):
    bug = RuntimeError("a bug")
    with pytest.raises(RuntimeError) as raised:
        launch(script=raiser(bug))
    assert raised.value is bug


@pytest.mark.parametrize(("numbers", "code"), [((), 130), ((signal.SIGINT,), 130), ((signal.SIGTERM,), 143)])
def test_a_signal_leaves_quietly(launch, capsys, numbers, code):
    with pytest.raises(SystemExit) as exit:
        launch(script=raiser(KeyboardInterrupt(*numbers)))
    assert exit.value.code == code
    assert capsys.readouterr().err == ""


def test_control_c_ends_the_process_until_the_configuration_is_read(launch, monkeypatch):
    """OmegaConf may lose a KeyboardInterrupt."""
    seen, compose = [], config.compose

    def look(*arguments):
        seen.append(signal.getsignal(signal.SIGINT))
        return compose(*arguments)

    monkeypatch.setattr(config, "compose", look)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        launch(script=lambda config: seen.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL, signal.default_int_handler]


def test_closed_outputs_lose_what_is_printed_and_nothing_else(launch, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    launch(script=lambda config: print(sys.stdout.encoding, sys.stderr.isatty(), flush=True))
    with pytest.raises(SystemExit) as exit:
        launch(script=raiser(ValueError("unseen")))
    assert exit.value.code == 2


def test_the_scripts_return_value_is_the_exit_code(launch):
    with pytest.raises(SystemExit) as exit:
        launch(script=lambda config: 3)
    assert exit.value.code == 3


def test_a_sweep_ends_with_the_first_job_that_fails(launch):
    started = []

    def script(config):
        started.append(config.seed)
        return 130 if config.seed == 2 else 0

    with pytest.raises(SystemExit) as exit:
        launch("-m", "seed=1,2,3", script=script)
    assert exit.value.code == 130
    assert started == [1, 2]


SCRIPT = """
import os, sys
from dataclasses import dataclass
from training import config, help

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


def test_a_real_script_finds_its_own_conf_from_anywhere(tmp_path):
    """And a bug in it keeps its traceback, with nothing of Hydra in between."""
    (tmp_path / "app" / "conf").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "app" / "script.py").write_text(SCRIPT)
    (tmp_path / "app" / "conf" / "config.yaml").write_text("defaults: [config_schema]\n")
    command = [sys.executable, "../app/script.py", "text=bug"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'elsewhere'} bug False\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("KeyError: 'a bug'\n")
    assert "hydra" not in done.stderr.lower()
    assert done.returncode == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


CYCLE = """
class Cycle:
    def __del__(self):
        print("looked at once more")

KEPT = Cycle()
KEPT.me = KEPT
"""


def test_a_script_ends_without_a_last_look_at_every_object(tmp_path):
    """With torch imported that took a second."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [config_schema]\n")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = []
    for script in (CYCLE, CYCLE + SCRIPT):
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, str(tmp_path / "script.py")]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0
        found.append("looked at once more" in done.stdout)
    assert found == [True, False]


# Writing down and reading back


def test_yaml_and_dictionary_give_back_the_same_configuration():
    for text in TEXTS:
        before = Config(prompt=text, model=ModelConfig(n_kv_head=2, dropout=1e-5), optimizer=OptimizerConfig(lr=3e-4))
        assert config.from_dict(Config, yaml.safe_load(config.to_yaml(before))) == before
        assert config.from_dict(Config, asdict(before)) == before


def test_a_key_that_an_older_checkpoint_lacks_takes_its_default():
    assert config.from_dict(Config, {"model": {"n_layer": 2}}) == Config(model=ModelConfig(n_layer=2))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"sed": 1}, r"^sed: there is no key sed; did you mean seed\?$"),
        ({"model": {"n_layers": 2}}, r"^model.n_layers: there is no key model.n_layers; did you mean model.n_layer\?$"),
    ],
)
def test_a_stored_key_that_is_unknown_is_refused(stored, message):
    with pytest.raises(ValueError, match=message):
        config.from_dict(Config, stored)
