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
from data.tokenizer import encode, from_json
from training import checkpoint, contents

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
    inner = header = header_of(path)
    *way, last = dotted.split(".")
    for key in way:
        inner = inner[key]
    inner[last] = value
    if value is ...:
        del inner[last]
    sign(path, header)


def forge_tensor(path, name, tensor, new):
    tensors = safetensors.torch.load_file(path / name)
    tensors.pop(tensor, None)
    if new is not None:
        tensors[tensor] = new
    (path / name).write_bytes(safetensors.torch.save(tensors))
    sign(path, header_of(path))


def refused(path, *words):
    """All that reads the whole checkpoint says so in one line, with the one before it."""
    with pytest.raises(ValueError, match=r"\A.*is damaged.*\Z") as error:  # a dot matches no line's end
        checkpoint.load(path).optimizer()
    assert all(word in str(error.value) for word in (str(path), "step_000001", *words)), error.value


CONFIG = "state.config."
SCALER, GROWN = torch.amp.GradScaler("cpu").state_dict(), {"_growth_tracker": 2**61}
STATES = {  # {a key of state.json: values of it that no run writes; ...: without the key}
    **dict.fromkeys(("step", "state"), (..., None, "x", [1], 1.5)),
    "alias": (..., None, "x", [1], 1.5, {"x": "y"}, {"head.weight": "norm.weight"}, {"head.weight": 3}, {}),
    **dict.fromkeys((f"{CONFIG}model", f"{CONFIG}attention", f"{CONFIG}break_it"), (..., None, 3, [], {"new": 1})),
    "state.config": [...],
    f"{CONFIG}model.n_layer": (100_000, 10**30, -1, 0, True, "2", 2.0, None, [2]),
    f"{CONFIG}model.n_embd": (10**9, 64, 33),
    f"{CONFIG}model.vocab_size": (None, 10**12, 0, -1, 100, ...),
    f"{CONFIG}model.context_length": (10**30, 2**31 - 1, 0, ...),
    f"{CONFIG}model.norm_eps": [float("nan")],
    f"{CONFIG}model.position": [["rope"]],
    f"{CONFIG}model.mlp": ["swiglu"],
    f"{CONFIG}model.yarn_factor": [10**400],
    f"{CONFIG}attention.windows": ["all"],
    f"{CONFIG}attention.softcap": [-(10**400), 1e-308],
    f"{CONFIG}attention.softmax_scale": [1e308],
    "state.broken": (..., "no_max", None),
    "state.val_loss": ("low", [1], {}, 10**400),
    "state.about.attention": [True],
    "state.loader": (..., None, [], {}),
    "state.loader.position": (-1, 10**30, "0", None, ...),
    "state.loader.dataset": (..., 3),
    "state.scaler": (3, {"scale": "high"}, {"scale": 2.0}, *(SCALER | x for x in ({"scale": 1e308}, GROWN))),
    "state.begin": (-1, 10**30, 1.5, None, [1], "x", 10**6),
    **dict.fromkeys(("state.place", "state.pace", "state.seconds"), (-1.0, float("nan"), float("inf"), "x")),
    "state.validation": [3],
    "state.about": [3],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in STATES.items() for value in values])
def test_a_state_that_no_run_writes_is_refused(path, key, value):
    """Whoever changes state.json can make its hashes fit. A missing key or another type ended in a traceback, and
    n_layer=100000 took 6 GB first."""
    forge(path, key, value)
    refused(path)


def test_a_context_whose_table_of_sines_would_fill_the_memory_is_refused():
    """Of rope no tensor in the file depends on it."""
    model = {"n_layer": 1, "n_head": 1, "n_embd": 32, "vocab_size": 9, "position": "rope", "context_length": 2**31 - 1}
    header = {"state": {"config": {"model": model}}}
    with pytest.raises(ValueError, match="2,147,483,647"):
        contents.refuse_too_large(header, {"x": ("F32", ())}, 10**6, "model.safetensors")


TENSORS = {  # {(file, tensor): what no run writes there; None: without the tensor}
    ("model", "norm.weight"): (None, torch.zeros(3), torch.zeros(32).double()),
    ("model", "surplus"): [torch.zeros(1)],
    ("optimizer", "rng.cpu"): (None, torch.zeros(7).byte(), torch.zeros(5056)),
    ("optimizer", "norm.weight.exp_avg"): (None, torch.zeros(3)),
    ("optimizer", "norm.weight.step"): (None, torch.zeros(32), torch.tensor(2)),
    **{("optimizer", name): [torch.zeros(32)] for name in ("x", "norm.weight.trained", "norm.weight.y")},
    ("optimizer", "batch.x"): [torch.zeros(4, 32)],
}


@pytest.mark.parametrize(("where", "new"), [(where, new) for where, values in TENSORS.items() for new in values])
def test_tensors_that_no_run_writes_are_refused(path, where, new):
    name = f"{where[0]}.safetensors"
    forge_tensor(path, name, where[1], new)
    refused(path, name)


BACKTRACKS = r"(?:(?:[a-z ]|[a-z ])*\x00(?=c))|[\s\S]"


@pytest.mark.parametrize("pattern", ["", "^", "a*", "(?=x)", "(", "a", BACKTRACKS, 3, "(?s:.)|" + (1 << 16) * "x"])
def test_a_pattern_that_cuts_no_text_is_refused(path, pattern, capfd):
    """tiktoken panics when a pattern matches the empty text or searches for too long, and that is no Exception."""
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content | {"pattern": pattern}))
    sign(path, header_of(path))
    refused(path, "tokenizer.json")
    assert capfd.readouterr().err == ""


def test_a_pattern_that_cannot_cut_one_text_is_refused_with_that_text(path):
    """It matches the empty text, but only before a letter that no check tries."""
    content = json.loads((path / "tokenizer.json").read_text())
    encoding = from_json(json.dumps(content | {"name": "strange", "pattern": "(?=\u0436)|(?s:.)"}))
    assert encode(encoding, "abc").size
    with pytest.raises(ValueError, match=r"\(\?=\u0436\)"):
        encode(encoding, "\u0436abc")


def test_what_a_state_says_stays_on_its_line(path, call):
    for key in ("state.about.attention", "state.config.data.path"):
        forge(path, key, "two\nlines")
    listed = call(sample, "list_runs=true", f"runs={path.parents[2]}")
    assert listed.out.count("\n") == 2, listed.err
    assert listed.out.count(r"two\nlines") == 2
    assert r"the run had two\nlines" in call(sample, f"checkpoint={path}", "max_new_tokens=1", "device=cpu").err


@pytest.mark.parametrize("data", ["x", {"cache": 3}, {"cache": None}, {"cache": ["a"]}])
def test_strange_data_is_refused_when_a_run_is_resumed(path, call, data):
    forge(path, "state.config.data", data)
    ended = call(train, f"resume={path}", "steps=9")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err


NO_TENSORS = (b"", b"x" * 100, (2**60).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0{}" + b"x")


@pytest.mark.parametrize("name", ["state.json", *checkpoint.FILES])
@pytest.mark.parametrize("kind", ["fifo", "folder", "huge", "/dev/zero", "circle", "elsewhere", *NO_TENSORS])
def test_what_is_no_file_of_the_checkpoint_is_refused_at_once(path, runs, name, kind):
    """A FIFO waited for ever, and /dev/zero filled the memory. Of no tensors' file the hash fits."""
    file, header = path / name, header_of(path)
    file.unlink()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case bytes():
            file.write_bytes(kind)
        case "huge":
            file.touch()
            os.truncate(file, 1 << 40)
        case _:
            file.symlink_to({"elsewhere": runs / STEP / name, "circle": file}.get(kind, kind))
    if isinstance(kind, bytes) and name != "state.json":
        sign(path, header)
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


OF_HYDRA = {
    "hydra": {"callbacks": {"x": {"_target_": "pathlib.Path.touch", "self": "touched"}}}, "defaults": ["_self_"],
    "zz": nested(300), "data": {"path": nested(300)}, "optimizer": {"lr": 10**400}, "steps": "many",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OF_HYDRA.items(), ids=OF_HYDRA)
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
