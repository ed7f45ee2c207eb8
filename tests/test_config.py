"""What is typed becomes a configuration, or one line that says why not."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

import sample
import train
from model.gpt import GPTConfig
from tests.runs import composed
from training.config import CONF, NANOGPT, Config, fill_in, leaves

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and not folder.name.startswith("_") and folder.name != "experiment"
}


def test_what_is_typed_goes_over_the_experiment_and_that_over_the_groups():
    cfg = composed("experiment=shakespeare", "model.n_layer=3")
    assert (cfg.model.n_layer, cfg.model.context_length, cfg.model.n_head) == (3, 64, 4)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_recipe_composes_and_only_the_timed_ones_have_a_time_limit(experiment):
    cfg = composed(f"experiment={experiment}")
    timed = {"none": 2.5, "gpu_minute": 1, "gpu_ten_minutes": 10}
    assert cfg.max_minutes == timed.get(experiment)


@pytest.mark.parametrize("i", range(max(map(len, GROUPS.values()))))
def test_every_option_of_every_group_composes(i):
    typed = [f"{group}={options[i % len(options)]}" for group, options in GROUPS.items()]
    composed(*typed, *["data.path=FILE"] * (not {"data=bin", "data=hub", "data=text"}.isdisjoint(typed)))


def test_what_is_said_to_users_of_nanogpt_is_there():
    ours = {word for words in NANOGPT.values() for word in words.split()}
    known = {name for schema in (Config, sample.Config) for name, _ in leaves(schema)} | GROUPS.keys()
    assert ours <= known | {f"experiment={name}" for name in EXPERIMENTS}


def test_ones_own_text_gets_the_default_recipe():
    default, text = composed(), composed("data=text", "data.path=FILE")
    assert replace(text, data=default.data) == default


MISTAKES = {  # what is typed, and what the error names
    "lr=1e-3": "optimizer.lr=1e-3", "max_iters=100": "steps=100",  # nanoGPT's
    "--block_size=64": "model.context_length=64", "config/train_gpt2.py": "experiment=gpt2_124m",
    "resume=": "resume=", "init_from=": "init_from=",
    "--lr=1e-3": "key=value", "stpes=100": "steps=100", "notes.txt": "key=value", "--steps 5": "steps=",
    "data=notes.txt": "pystdlib", "steps=abc": "abc", "steps=1.5": "1.5", "model=gpt3": "nano",
    "break_it=nothing": "no_max", "optimizer.lr=-1": "above 0", "steps=0": "at least 1",
    "optimizer.kind=sgd": "adamw, muon", "model.n_head=5": "n_embd", "data.path=/nowhere": "/nowhere",
    "tokens_per_step=100": "multiple of 128", "name=a:b": "name=a:b", "name=../a": "name=../a",
    "model.recompute=selective attention=naive": "model.recompute=true", "attention=triton model.n_embd=1024": "tiled",
    "attention=sdpa attention.windows=[null,8]": "sdpa", "attention=sdpa attention.documents=true": "sdpa",
    "break_it=local_mask attention=tiled attention.windows=[null,8]": "causal mask",
    "break_it=local_mask attention=tiled attention.documents=true": "causal mask",
    "break_it=stale_seed": "attention.dropout_p", "compile=graph": "compile=auto", "resume=nobody": "nobody",
    "init_from=nobody": "nobody", "device=cuda:77": "device=cuda:77",
    "model.context_length=1000000": "model.context_length", "experiment=long_extend": "init_from=",
}  # fmt: skip


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_said_with_the_way_out_and_makes_no_folder(small_run, tmp_path, typed):
    err = small_run(typed, code=1).err
    assert MISTAKES[typed] in err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line and not line.startswith("data: ")]
    assert len(lines) == 1 or typed in ("steps=abc", "steps=1.5")  # a wrong type has Hydra's own lines
    assert not list(tmp_path.iterdir())


def test_steps_alone_switch_the_time_limit_off(call, small, tmp_path):
    typed = [argument for argument in small if not argument.startswith("max_minutes")]
    call(train, *typed, f"runs={tmp_path}", "name=x", "steps=1")
    call(train, *typed, f"runs={tmp_path}", "name=y", "steps=1", "max_minutes=1")
    assert "max_minutes: null" in (tmp_path / "x/config.yaml").read_text()
    assert "max_minutes: 1.0" in (tmp_path / "y/config.yaml").read_text()


def test_help_has_every_group_and_every_key_with_its_value_for_this_command_and_its_meaning(call):
    said = call(train, "steps=123", "--help").out
    assert "steps=123" in said
    for name, entry in leaves(Config):
        assert f"  {name}=" in said
        assert entry.metadata["meaning"]
        assert entry.metadata["meaning"][:60] in said
    for group, options in GROUPS.items():
        (line,) = (line for line in said.splitlines() if line.startswith(f"  {group}= "))
        assert line.replace("*", "").split()[1:] == options


def test_a_sweep_runs_every_combination_each_in_its_folder_and_a_refused_job_does_not_stop_it(call, small, tmp_path):
    typed = ["steps=2", "optimizer.lr=1e-3,2e-3", "batch_size=4,3", f"runs={tmp_path}", "-m"]
    ended = call(train, *small, *typed)
    configs = [path.read_text() for path in tmp_path.glob("sweep-*/*/config.yaml")]
    assert sorted(text.split("  lr: ")[1][:5] for text in configs) == ["0.001", "0.002"]
    assert all("batch_size: 4" in text for text in configs)
    assert ended.code == 1
    assert "tokens_per_step" in ended.err


@pytest.mark.parametrize(("step", "elapsed"), [(5, 0), (10, 0), (55, 20), (100, 60)])
def test_without_pressure_of_time_the_schedules_place_is_the_count(step, elapsed):
    assert composed("steps=100", "optimizer.warmup_steps=10", "max_minutes=10").schedule_step(step, elapsed) == step


def test_the_place_follows_the_clock_where_that_is_further_and_is_at_the_end_when_the_time_is():
    cfg = composed("steps=100000", "optimizer.warmup_steps=100", "max_minutes=1")
    places = [cfg.schedule_step(i + 1, 0.2 * i) for i in range(301)]  # 300 steps fit
    assert places == sorted(places)
    assert places[30] == pytest.approx(50, abs=2)  # half of a fifth of the time: half of the warm-up
    assert places[60] == pytest.approx(100, rel=0.02)  # no jump after the warm-up
    assert places[62] < 2000
    assert places[-1] == 100000
    short = composed("steps=50", "optimizer.warmup_steps=100", "max_minutes=10")
    assert short.schedule_step(40, 110) == 50  # in a warm-up longer than the run


def test_a_warm_up_by_count_does_not_shorten_the_decay():
    """50 of 300 steps warm up, before a fifth of the time is over; the decay begins then, at the peak."""
    cfg = composed("steps=100000", "optimizer.warmup_steps=50", "max_minutes=1")
    places = [cfg.schedule_step(i, 0.2 * i) for i in range(1, 301)]
    assert places[49] == pytest.approx(50)
    assert places[50] == pytest.approx(50 + 99950 / 250, rel=0.01)
    assert places[-1] == 100000


def test_the_limits_of_every_group_of_the_configuration_are_checked():
    for entry in fields(Config):
        if is_dataclass(entry.default_factory):
            for leaf in fields(entry.default_factory):
                if "least" in leaf.metadata.get("limits", {}) and leaf.metadata["limits"]["least"] == 1:
                    wrong = {leaf.name: 0 if "int" in str(leaf.type) else ""}
                    with pytest.raises(ValueError, match=f"{entry.name}.{leaf.name}="):
                        Config(**{entry.name: entry.default_factory(**wrong)})


@pytest.mark.slow
@pytest.mark.parametrize(("script", "typed"), [("train", "resume=nobody"), ("sample", "run=nobody")])
def test_what_a_library_logs_is_printed_once(start, script, typed, tmp_path):
    """Hydra printed it a second time: the Hub's retries, for example."""
    code = (
        "import runpy, sys, training.checkpoint as c; from huggingface_hub.utils import logging;"
        "log, find = logging.get_logger('huggingface_hub.x'), c.find_checkpoint;"
        "c.find_checkpoint = lambda *a, **b: log.warning('Retrying') or find(*a, **b);"
        f"sys.argv = ['{script}.py', *sys.argv[1:]]; runpy.run_path('{script}.py', run_name='__main__')"
    )
    assert "".join(start("-c", code, typed, f"runs={tmp_path}").communicate()).count("Retrying") == 1


@pytest.mark.parametrize(("tokens", "rows", "steps", "warmup"), [(2621439, 0, 499, 99), (2621440, 131072, 600, 100)])
def test_a_small_text_gets_no_table_of_bigrams_and_a_short_run_a_short_warm_up(tokens, rows, steps, warmup):
    cfg = train.Config(steps=steps, model=GPTConfig(bigram_rows=None))
    fill_in(cfg, 50, tokens, 1, torch.device("cpu"))
    assert (cfg.model.bigram_rows, cfg.optimizer.warmup_steps) == (rows, warmup)
