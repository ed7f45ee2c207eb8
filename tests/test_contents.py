"""training/contents.py and files.py: a checkpoint counts as a stranger's until it holds what a run writes."""

import json
import os
import shutil
from hashlib import sha256

import pytest
import safetensors.torch
import torch

import breakit
import sample
import train
from training import checkpoint

STEP = "run/checkpoints/step_000002"


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    ended = call(train, *small, f"runs={folder}", "name=run", "steps=2", "checkpoint_every=1", "eval_every=1")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def path(runs, tmp_path):
    """The newer of a run's two checkpoints."""
    shutil.copytree(runs / "run", tmp_path / "run")
    return tmp_path / STEP


def sign(path, header):
    """Writes state.json with hashes that fit."""
    header.pop("sha256", None)
    hashes = {name: sha256((path / name).read_bytes()).hexdigest() for name in checkpoint.FILES}
    own = sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    (path / "state.json").write_text(json.dumps(header | {"sha256": hashes | {"state.json": own}}))


def header_of(path):
    return json.loads((path / "state.json").read_text())


def forge(path, dotted, value):
    """state.json with another value at a dotted key, or without it (...), and hashes that fit."""
    header = header_of(path)
    *way, last = dotted.split(".")
    inner = header
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    sign(path, header)


def forge_tensor(path, name, tensor, new):
    tensors = safetensors.torch.load_file(path / name)
    tensors.pop(tensor, None)
    if new is not None:
        tensors[tensor] = new
    (path / name).write_bytes(safetensors.torch.save(tensors))
    sign(path, header_of(path))


def refused(path, *words):
    """All that reads the whole checkpoint says so in one line."""
    with pytest.raises(ValueError, match="is damaged") as error:
        checkpoint.load(path).optimizer()
    line = str(error.value)
    assert "\n" not in line
    assert all(word in line for word in (str(path), "step_000001", *words)), line


GROUPS = ("model", "attention", "break_it")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in ("step", "alias", "state") for value in (..., None, "x", [1], 1.5)],
        *[("state." + key, ...) for key in ("config", "broken", "loader")],
        *[(f"state.config.{group}", value) for group in GROUPS for value in (..., None, 3, [], {"new": 1})],
        *[("state.config.model.n_layer", value) for value in (100_000, 10**30, -1, 0, True, "2", 2.0, None, [2])],
        *[("state.config.model.n_embd", value) for value in (10**9, 64, 33)],
        *[("state.config.model.vocab_size", value) for value in (None, 10**12, 0, -1, 100, ...)],
        *[("state.config.model.context_length", value) for value in (10**30, 2**31 - 1, 0)],
        ("state.config.model.norm_eps", float("nan")),
        ("state.config.model.position", ["rope"]),
        ("state.config.model.mlp", "swiglu"),
        ("state.config.attention.windows", "all"),
        ("state.broken", "no_max"),
        ("state.broken", None),
        *[("state.val_loss", value) for value in ("low", [1], {}, 10**400)],
        ("state.config.model.yarn_factor", 10**400),
        ("state.config.attention.softcap", -(10**400)),
        *[("state.loader", value) for value in (None, [], {})],
        *[("state.loader.position", value) for value in (-1, 10**30, "0", None, ...)],
        *[("state.loader.dataset", value) for value in (..., 3)],
        *[("state.scaler", value) for value in (3, {"scale": "high"})],
        ("state.validation", 3),
        ("state.about", 3),
        *[("alias", value) for value in ({"x": "y"}, {"head.weight": "norm.weight"}, {"head.weight": 3}, {})],
    ],
)
def test_a_state_that_no_run_writes_is_refused(path, key, value):
    """Whoever changes state.json can make its hashes fit. A missing key or another type ended in a traceback, and
    n_layer=100000 took 6 GB first."""
    forge(path, key, value)
    refused(path)


@pytest.mark.parametrize(
    ("name", "tensor", "new"),
    [
        *[("model.safetensors", "norm.weight", new) for new in (None, torch.zeros(3), torch.zeros(32).double())],
        ("model.safetensors", "surplus", torch.zeros(1)),
        *[("optimizer.safetensors", "rng.cpu", new) for new in (None, torch.zeros(7).byte(), torch.zeros(5056))],
        *[("optimizer.safetensors", "norm.weight.exp_avg", new) for new in (None, torch.zeros(3))],
        *[("optimizer.safetensors", "norm.weight.step", new) for new in (None, torch.zeros(32), torch.tensor(2))],
        *[("optimizer.safetensors", name, torch.zeros(32)) for name in ("x", "norm.weight.trained", "norm.weight.y")],
        ("optimizer.safetensors", "batch.x", torch.zeros(4, 32)),
    ],
)
def test_tensors_that_no_run_writes_are_refused(path, name, tensor, new):
    forge_tensor(path, name, tensor, new)
    refused(path, name)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("content", [b"", b"x" * 100, (2**60).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0{}" + b"x"])
def test_a_file_that_is_no_safetensors_is_refused_though_its_hash_fits(path, name, content):
    (path / name).write_bytes(content)
    sign(path, header_of(path))
    refused(path, name)


@pytest.mark.parametrize("pattern", ["", "^", "a*", "(?=x)", "(", "a", 3])
def test_a_pattern_that_cuts_no_text_is_refused(path, pattern):
    """tiktoken panics when a pattern matches the empty text, and no `except` catches that."""
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content | {"pattern": pattern}))
    sign(path, header_of(path))
    refused(path, "tokenizer.json")


@pytest.mark.parametrize("name", ["state.json", *checkpoint.FILES])
@pytest.mark.parametrize("kind", ["fifo", "device", "elsewhere", "circle", "folder", "huge"])
def test_what_is_no_file_of_the_checkpoint_is_refused_at_once(path, runs, name, kind):
    """A FIFO waited for ever, and /dev/zero filled the memory."""
    file = path / name
    file.unlink()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "huge":
            with open(file, "wb") as opened:
                opened.truncate(1 << 40)
        case _:
            to = {"device": "/dev/zero", "elsewhere": runs / STEP / name, "circle": file}
            file.symlink_to(to[kind])
    refused(path)


def test_keys_and_tables_of_other_versions_are_read(path):
    """A newer version may write more; an older one had no validation, and bools where text is now."""
    header = header_of(path)
    header["state"]["due"] = True
    for key in ("validation", "scaler", "about"):
        del header["state"][key]
    for key in ("chunk", "norm_eps", "rope_base_local"):
        del header["state"]["config"]["model"][key]
    header["state"]["config"]["model"]["activation_checkpointing"] = False
    sign(path, header)
    assert checkpoint.load(path).optimizer()


def nested(depth, value=0):
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hydra", {"callbacks": {"x": {"_target_": "pathlib.Path.touch", "self": "touched"}}}),
        ("defaults", ["_self_"]),
        ("zz", nested(300)),
        ("data", {"path": nested(300)}),
        ("optimizer", {"lr": 10**400}),
        ("steps", "many"),
    ],
)
def test_only_train_pys_keys_of_a_checkpoint_reach_hydra(call, path, tmp_path, monkeypatch, key, value):
    """Hydra would have called a function that the checkpoint named."""
    monkeypatch.chdir(tmp_path)
    forge(path, f"state.config.{key}", value)
    ended = call(train, "resume=auto", "name=run", f"runs={tmp_path}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert key in ended.err
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("group", ["data", "tokenizer"])
def test_a_trace_of_a_checkpoint_without_a_group_has_the_defaults(call, path, tmp_path, monkeypatch, group):
    """It was a KeyError. An older version may lack a group."""
    monkeypatch.chdir(tmp_path)
    forge(path, f"state.config.{group}", ...)
    ended = call(breakit, "trace=true", "run=run", f"runs={tmp_path}", "device=cpu", "tokens=8")
    assert ended.code == 0 or (ended.code, ended.err.count("\n")) == (2, 1), ended.err


def test_a_forged_checkpoint_is_one_line_for_a_user(call, path, tmp_path):
    forge(path, "state.config.model.n_layer", 100_000)
    ended = call(sample, f"runs={tmp_path}", f"checkpoint={path}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
