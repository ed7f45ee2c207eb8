"""Mistakes, each answered by one line that names what is wrong, and nothing new is left in the folders: rules between
keys, files that are damaged or another program's, and what cannot be resumed; one case a rule.

A value outside its key's limits is in tests/test_keys.py, what an implementation lacks in test_abilities.py, and a
command line that cannot be read in test_config.py, with all that makes one line of an error. So here what refuses is
called, for a command line takes a tenth of a second; what only a run finds out comes by one.

A table's line is what is typed, two spaces, and words of the answer. A line without them is a case for each word, which
the answer has to repeat.
{there} is a folder with runs/done (a run of 4 steps), cache (its data) and the files below.
"""

import gzip
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest
import yaml

import bench
import breakit
import sample
import train
from data.dataset import open_data
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from tests.conftest import MODEL, RATE, RUN
from tests.runs import below, flip
from training import checkpoint, config
from training.resume import MAY_DIFFER, refuse_another_model

TRAIN = [*MODEL, *RUN, *RATE, "steps=4", "wandb.mode=disabled", "device=cpu"]


def table(text: str) -> pytest.MarkDecorator:
    """The cases of `text` as (what is typed, words of the answer)."""
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in text.strip().splitlines()]
    rows = [(typed, *more) for line in lines for typed, *more in ([line] if line[1:] else zip(line[0].split()))]
    rows = [(typed, *(answer or [typed])) for typed, *answer in rows]
    return pytest.mark.parametrize(("typed", "answer"), rows, ids=[typed for typed, _ in rows])


def configured(schema: type, *typed: str):
    """The configuration of KEY=VALUE ..., without Hydra. What comes later counts."""
    given: dict = {}
    for argument in typed:
        key, _, value = argument.partition("=")
        *path, last = key.split(".")
        reduce(lambda node, name: node.setdefault(name, {}), path, given)[last] = (
            yaml.safe_load(value) if value else value
        )
    return config.from_dict(schema, given)


def refused_by(function: Callable, folder: Path, *words: str) -> None:
    """function() raises a ValueError of one line that has the words, and leaves `folder` as it is."""
    before = below(folder)
    with pytest.raises(ValueError, match=r"\A.*\Z") as error:  # a dot matches no line's end
        function()
    for answer in words:
        assert answer.replace("{there}", str(folder)) in str(error.value)
    assert below(folder) == before


# --- files ----------------------------------------------------------------------------------------------------------

LINES = b"a line of text\n" * 200
GZ = gzip.compress(LINES, mtime=0)
IDS = [256, *LINES]


def shard(ids: list[int], *, magic: int = 20240520, version: int = 1, count: int | None = None, rest: bytes = b""):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, "<u2").tobytes() + rest


TEXTS = {  # a file that is no text, and what is said of it
    "empty.txt": (b"", "empty"),
    "mark.txt": (b"\xef\xbb\xbf", "empty"),
    "zero.txt": (b"text\0text\n", "offset 4"),
    "utf16.txt": ("text\n".encode("utf-16")[:-1], "UTF-16"),
    "cut.txt": (b"\xc3\xa9" * 500 + b"\xc3", "offset 1000 (0xc3)"),
    "surrogate.txt": (b"\xed\xa0\x80" * 20, "offset 0 (0xed)"),
    "late.txt": (LINES * 200 + b"\xff", "offset 600000 (0xff)"),
    "plain.txt.gz": (LINES, "decompressed"),
    "cut.txt.gz": (GZ[:-20], "decompressed"),
    "sum.txt.gz": (GZ[:-8] + b"\0" * 8, "decompressed"),
    "tail.txt.gz": (GZ + b"tail", "decompressed"),
    "latin1.txt.gz": (gzip.compress(b"caf\xe9"), "offset 3"),
    "number.jsonl.gz": (gzip.compress(b'{"text": 3}\n'), ':1: no field "text"'),
    "blank.jsonl": (b"\n \n", "no text"),
    "number.jsonl": (b'{"text": "right"}\n{"text": 1}\n', ':2: no field "text"'),
    "field.jsonl": (b'{"body": "a"}\n', ':1: no field "text"'),
    "list.jsonl": (b'["text"]\n', ':1: no field "text"'),
    "two.jsonl": (b'{"text": "a"} {"text": "b"}\n', ":1: Extra data at column 15"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', ":1: "),
    "latin1.jsonl": (b'{"text": "\xe9"}\n', "0xe9"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", ":1: "),
}
SHARDS = {  # the same of shards
    "header.bin": (shard([])[:700], "(20240520, 1)"),
    "magic.bin": (shard(IDS, magic=1), "(1, 1)"),
    "version.bin": (shard(IDS, version=7), "(20240520, 7)"),
    "more.bin": (shard(IDS, count=5000), "5000"),
    "negative.bin": (shard(IDS, count=-1), "-1"),
    "odd.bin": (shard(IDS, rest=b"x"), "1 byte"),
    "unknown.bin": (shard([*IDS, 257]), "257"),
}
FILES = {name: content for name, (content, _) in (TEXTS | SHARDS).items()}
FILES |= {"good.bin": shard(IDS), "short.bin": shard(IDS[:9]), "val/only_val.bin": shard(IDS), "folder/a.csv": b"1\n"}


@pytest.fixture(scope="module")
def there(call, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "text").mkdir()
    with open(folder / "terabyte", "wb") as file:
        file.truncate(1 << 40)
    (folder / "text/all.txt").write_text("".join(file.read_text() for file in sorted(text.iterdir())))
    given = [f"data.path={folder}/text", f"data.cache={folder}/cache", f"runs={folder}/runs"]
    assert call(train, "data=text", *given, *TRAIN, "checkpoint_every=2", "name=done").code == 0
    shutil.copytree(folder / "runs/done/checkpoints/step_000004", folder / "outside")  # in no run's folder
    return folder


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_text(there, name):
    data = DataConfig("text", path=f"{there}/{name}", cache=f"{there}/cache")
    refused_by(lambda: open_data(data, TokenizerConfig()), there, f"{{there}}/{name}", TEXTS[name][1])


@pytest.mark.parametrize("name", SHARDS)
def test_a_file_that_is_no_shard(there, name):
    data = DataConfig("bin", path=f"{there}/{name}")
    refused_by(lambda: open_data(data, TokenizerConfig()), there, name, SHARDS[name][1])


def ranks(**changes) -> Callable[[dict], dict]:
    """Changes ids of a tokenizer.json. AA== is byte 0."""
    return lambda content: content | {"ranks": content["ranks"] | changes}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "{",
        lambda content: "\udcff\udcfe\0",
        lambda content: [],
        lambda content: {},
        lambda content: content | {"ranks": {}},
        lambda content: content | {"ranks": []},
        *[ranks(**{"!!": 300}), ranks(**{"AA==": 1}), ranks(**{"AA==": -1}), ranks(**{"AA==": 1.5})],
        *[ranks(**{"AA==": "x"}), ranks(**{"YWI=": 10**9})],
        *[lambda content, p=pattern: content | {"pattern": p} for pattern in ("(", 3)],
        lambda content: content | {"special_tokens": {}},
        *[lambda content, i=i: content | {"special_tokens": {"<|endoftext|>": i}} for i in ("x", -1, 3, 2**31)],
    ],
)
def test_a_tokenizer_that_is_none(there, tmp_path, change):
    (kept,) = there.glob("cache/*/tokenizer.json")
    changed = change(json.loads(kept.read_text()))
    changed = changed if isinstance(changed, str) else json.dumps(changed)
    (tmp_path / "tokenizer.json").write_bytes(changed.encode(errors="surrogateescape"))
    (tmp_path / "a.bin").write_bytes(FILES["good.bin"])
    data = DataConfig("bin", path=f"{tmp_path}")
    refused_by(lambda: open_data(data, TokenizerConfig("kept")), tmp_path, f"{tmp_path}: tokenizer.json cannot be read")


# --- rules between keys ---------------------------------------------------------------------------------------------


@table("""
    tokens_per_step=100 device=gpu device=cuda:99 device=cpu:x device=meta compile=graph
    model.n_head=3 model.n_kv_head=3 model.n_embd=1000000000000 model.n_embd=100000000000000000000000
    model.dropout_p=0.001 model.yarn_original=16 model.rope_base_local=10000.0
    model.chunk=100 model.chunk=10000000000000000000000 attention.windows=[] attention.block_mask=[]
    optimizer.momentum=0.9 optimizer.decay_fraction=0.1
    batch_size=1000000000 tokens_per_step=128                               tokens_per_step=128
    length_warmup_steps=4 length_warmup_from=24                             length_warmup_from=24
    length_warmup_steps=4 length_warmup_from=0                              length_warmup_from=0
    length_warmup_steps=1 length_warmup_from=8                              length_warmup_steps=1
    length_warmup_steps=4 length_warmup_from=8 length_warmup_by=3           a length_warmup_by that
    length_warmup_steps=4 length_warmup_from=16 data.source=recall          length_warmup_steps=4 with data=recall
    pack=true data.source=recall                                            pack=true with data=recall
    eval_only=true                                                          resume=NAME
    context_every=1 model.context_length=16 batch_size=8                    model.context_length=16
    model.position=rope model.n_embd=30                                     15 is odd
    model.position=rope model.yarn_factor=2                                 model.yarn_factor=2
    model.position=learned model.yarn_factor=2                              model.yarn_factor=2
    model.position=rope model.yarn_factor=2 model.yarn_original=8           use model.yarn_factor=4
    model.activation_checkpointing=selective attention.impl=naive           activation_checkpointing=selective
    attention.windows=[8] attention.window=4                                attention.windows=[8] attention.window=4
    attention.block_mask=[x.,x]                                             attention.block_mask=['x.', 'x']
    attention.block_mask=[xo,xx]                                            attention.block_mask=['xo', 'xx']
    attention.block_mask=[x] attention.block_mask_size=8                    8 tokens of 32
    attention.dropout_p=0.0001                                              dropout_p=0.0001
    break_it.broken=[no_mx]                                                 no_mx
    break_it.broken=[local_mask] attention.windows=[8,null]                 break_it=local_mask
    break_it.broken=[no_scale] attention.softmax_scale=1.0                  break_it=no_scale
    break_it.broken=[stale_seed]                                            break_it=stale_seed
    break_it.broken=[unrestored_seed] attention.dropout_p=0.1               break_it=unrestored_seed
""")
def test_keys_of_a_run_that_exclude_each_other(tmp_path, typed, answer):
    def refuse():
        small = [*MODEL[1:], "batch_size=4", "device=cpu", "model.position=learned"]
        train.check(configured(train.Config, *small, *shlex.split(typed)))

    refused_by(refuse, tmp_path, answer)


@pytest.mark.parametrize(
    "name", ["..", "../out", "latest", "auto", "a/b", "a.", " a", "a\nb", *[f"a{c}b" for c in '\\:*?"<>|']]
)
def test_a_name_that_cannot_name_a_folder_everywhere(tmp_path, name):
    refused_by(lambda: train.Config(name=name), tmp_path, f"name={name!r}")


@table("""
    tokenizer.vocab_size=300 data.shards=2 data.field=body data.path=/dev/null
    data.path={there}/no.txt data.path={there}/*.log data.path={there}/text/[ data.path={there}/folder
    tokenizer.kind=kept                                                 tokenizer=kept
    tokenizer.kind=bpe tokenizer.vocab_size=256                         tokenizer.vocab_size=256
    tokenizer.kind=bpe tokenizer.vocab_size=99999999999999999999        tokenizer.vocab_size=99999999999999999999
    data.source=text                                                    data.path=FILE
    data.source=pystdlib data.path=x                                    data.path=x
    data.source=shakespeare data.url=                                   data.url=
    data.source=shakespeare data.url=ftp://example.org                  data.url=ftp://example.org
    data.source=shakespeare data.url=http://[                           http://[/input.txt
    data.source=fineweb data.shards=104                                 tokenizer=gpt2
    data.source=fineweb tokenizer.kind=gpt2 data.shards=104             data.shards=104
    data.source=fineweb tokenizer.kind=gpt2 data.val_fraction=0.2       data.val_fraction=0.2
    data.source=bin                                                     data.path=FILE
    data.source=bin data.path={there}/text                              data.path={there}/text
    data.source=bin data.path={there}/good.bin tokenizer.kind=kept      tokenizer.json
    data.source=bin data.path={there}/good.bin tokenizer.kind=bpe       tokenizer=bpe
    data.source=bin data.path={there}/val                               only_val.bin
    data.source=recall model.context_length=33                          model.context_length=33
    data.source=passkey model.context_length=64                         128
    data.source=recall tokenizer.kind=bpe                               tokenizer=bpe
    data.source=passkey model.context_length=128 data.val_fraction=0.0001    data.val_fraction=0.0001
    data.source=recall data.path=x                                      data.path=x
""")
def test_keys_of_the_data_that_exclude_each_other(there, typed, answer):
    def refuse():
        given = [f"data.cache={there}/cache", "model.context_length=32"]
        given += [] if "data.source" in typed else ["data.source=text", f"data.path={there}/text"]
        cfg = configured(train.Config, *given, *typed.replace("{there}", str(there)).split())
        open_data(cfg.data, cfg.tokenizer, None, cfg.model.context_length)

    refused_by(refuse, there, answer)


@table("""
    bench impls=[flash]                                         impls=['flash']
    bench impls=[]                                              impls=[]
    bench heads=[1,2]                                           heads=[1, 2]
    bench heads=[3] kv_heads=2                                  kv_heads=2
    bench block_mask=[xo]                                       block_mask=['xo']
    bench on_chip=[4096]                                        on_chip=[4096]
    bench mode=traffic on_chip=[1]                              on_chip=1
    bench mode=traffic head_sizes=[8,16]                        head_sizes=[8, 16]
    bench mode=traffic head_sizes=[64] on_chip=[255]            on_chip=255
    bench mode=length impls=[flex]                              impls=['flex']
    bench mode=roofline heads=[2,4] head_sizes=[32,64]          head_sizes=[32, 64]
    bench lengths=[]                                            lengths=[]
    breakit failure=no_luck                                     failure=no_luck
    breakit layer=1                                             layer=1
    breakit runs=x                                              runs=x
    breakit out=                                                out=
    breakit out={there}/empty.txt                               out={there}/empty.txt
    breakit trace=true explorer=true                            trace=true explorer=true
    breakit trace=true failure=stale_seed                       failure=stale_seed
    breakit trace=true out=x                                    out=x
    sample init_from=x run=y                                    init_from=x
""")
def test_keys_of_another_script_that_exclude_each_other(there, typed, answer):
    script, *typed = typed.replace("{there}", str(there)).split()
    schema = {"bench": bench, "breakit": breakit, "sample": sample}[script].Config
    refused_by(lambda: configured(schema, *typed), there, answer)


# --- what was made before -------------------------------------------------------------------------------------------


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def write(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def edit(**changes) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = [os.unlink, cut_short, flip, write("")]
NO_JSON = [write(text) for text in ("{", "[]", "null", "\0", '{"version": 2}', "[" * 5000)]
DATA = ("train.bin", "val.bin", "tokenizer.json", "train_documents.npy", "val_documents.npy")
OF_MANIFEST = [{"version": 1}, {"version": "2"}, {"sha256": {}}, {"sha256": None}, {"sha256": {"train.bin": "0"}}]
OF_STATE = [{"step": 9}, {"state": {}}, {"sha256": {}}, {"alias": 3}]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, damage) for damage in DAMAGES for name in DATA],
        *[("manifest.json", damage) for damage in (os.unlink, cut_short, *NO_JSON)],
        *[("manifest.json", edit(**change)) for change in OF_MANIFEST],
    ],
)
def test_damaged_data_is_named_with_the_folder_to_delete(there, tmp_path, name, damage):
    shutil.copytree(there / "cache", tmp_path / "cache")
    (file,) = tmp_path.glob(f"cache/*/{name}")
    damage(file)
    data = DataConfig("text", path=f"{there}/text", cache=f"{tmp_path}/cache")
    refused_by(lambda: open_data(data, TokenizerConfig()), tmp_path, str(file.parent), "delete")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(f"{name}.{end}", damage) for damage in DAMAGES
          for name, end in (("model", "safetensors"), ("optimizer", "safetensors"), ("tokenizer", "json"))],
        *[("state.json", damage) for damage in (*DAMAGES, *NO_JSON, *(edit(**change) for change in OF_STATE))],
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(there, tmp_path, name, damage):
    """The optimizer's state only where training goes on: a sample needs none."""
    shutil.copytree(there / "runs", tmp_path / "runs")
    path = tmp_path / "runs/done/checkpoints/step_000004"
    damage(path / name)
    said = f"checkpoint {path} is damaged (", f"use the one before it, {path.parent}/step_000002"
    if name == "optimizer.safetensors":
        refused_by(checkpoint.load(path).optimizer, tmp_path, *said, name)
        return
    refused_by(lambda: checkpoint.load(path), tmp_path, *said, name)
    if name == "state.json":
        refused_by(lambda: checkpoint.load_state(path), tmp_path, *said)


def test_what_would_make_another_model_is_not_resumed_and_all_else_may_change(there):
    """Of each key of the model, its tokenizer, its optimizer and its attention."""
    resumed = checkpoint.load(there / "runs/done/checkpoints/step_000004")
    for group in ("model", "tokenizer", "attention"):
        for key, value in resumed.state["config"][group].items():
            cfg = config.from_dict(train.Config, resumed.state["config"])
            setattr(getattr(cfg, group), key, "another" if isinstance(value, str) else 2 * (value or 4) + 1)
            refuse = partial(refuse_another_model, resumed, cfg)
            if f"{group}.{key}" in MAY_DIFFER:
                refuse()
            else:
                refused_by(refuse, there, f"{group}.{key}", "without resume=")
    cfg = config.from_dict(train.Config, resumed.state["config"])
    cfg.optimizer.weight_decay = 0.5
    refuse_another_model(resumed, cfg)
    cfg.optimizer.kind = "muon"
    refused_by(lambda: refuse_another_model(resumed, cfg), there, "optimizer.kind=adamw", "muon")


# --- by a command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def refused(call, there, monkeypatch):
    """refused(typed, words): SCRIPT KEY=VALUE ... answers in one line that has the words, and changes nothing there."""

    def refused(typed: str, answer: str, *given: str) -> None:
        name, *arguments = (part.replace("{there}", str(there)) for part in shlex.split(typed))
        script, before = {"train": train, "sample": sample, "bench": bench, "breakit": breakit}[name], below(there)
        ended = call(script, *given, *arguments)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert ended.err.startswith(f"{name}: ")
        assert answer.replace("{there}", str(there)) in ended.err
        assert "[Errno" not in ended.err
        assert below(there) == before

    monkeypatch.delenv("WANDB_MODE", raising=False)
    return refused


@table("""
    steps=0
    batch_size=${nothing}                               nothing
    model.vocab_size=300
    model.mlp_hidden=10000000000000                     this machine has
    model.mlp_hidden=4611686018427387904                a model of
    batch_size=100000000 tokens_per_step=null           batch_size=50000000 tokens_per_step=
    batch_size=4 tokens_per_step=1280000000000          this machine has
    model.context_length=10000000 batch_size=1 tokens_per_step=null     10,000,001
    data.path={there}/late.txt                          offset 600000 (0xff)
    data.path={there}/short.bin data=bin tokenizer=byte  8 tokens
    data.path={there}/text/none                         data.path={there}/text/none
    name=done                                           runs/done
    runs={there}/empty.txt                              {there}/empty.txt is a file
    runs={there}/empty.txt/in                           {there}/empty.txt is a file
    runs={there} name=empty.txt                         {there}/empty.txt is a file
    data.cache={there}/empty.txt                        {there}/empty.txt is a file
    resume=auto                                         step 4 of steps=4
    resume=nobody                                       runs that have one: done
    resume=auto name=nobody                             {there}/runs/nobody
    resume={there}/runs/done/config.yaml
    resume=done steps=8 seed=2                          seed=1337
    resume=done steps=8 model=nano                      model.
    resume=done steps=8 tokenizer=bpe                   tokenizer.kind
    resume=done steps=8 optimizer=muon                  use optimizer=adamw
    resume=done steps=8 attention.window=4              attention.window=None
    resume=done steps=8 attention.documents=true        attention.documents=False
    resume=done steps=8 break_it=no_max                 break_it: none
    resume=done steps=8 ema_decay=2                     ema_decay=2.0
    eval_only=true resume=nobody                        resume=nobody
    eval_only=true resume=done name=other               name=other
    -m eval_only=true resume=done,done                  -m
    eval_only=true resume={there}/outside               {there}/outside
    eval_only=true resume=done model.context_length=64  model.context_length=32
    wandb=online                                        wandb.mode=online?
    attention=flash                                     attention=triton
    break_it.subtract_max=false                         break_it=no_max
""")
def test_a_run_that_cannot_be(refused, there, typed, answer):
    given = ["data=text", f"data.path={there}/text", f"data.cache={there}/cache", f"runs={there}/runs"]
    given += [] if "eval_only" in typed else TRAIN  # it reads no key of a training
    given = [argument for argument in given if "data=" not in typed or not argument.startswith(("data=", "data.path="))]
    refused(f"train {typed}", answer, *given)


@table("""
    sample run=/dev/null                                run=/dev/null
    sample runs={there}/runs checkpoint=worst           worst
    sample checkpoint={there}/runs/done                 {there}/runs/done
    bench device=gpu lengths=[64] out={there}/bench     device=gpu
    bench out=/dev/null impls=[naive] lengths=[64]      /dev/null
    breakit device=tpu                                  device=tpu
    breakit out={there}/empty.txt/in                    {there}/empty.txt
    breakit run=none runs={there}/runs out={there}/lab  runs that have one: done
    breakit replay=nowhere                              nowhere
    breakit replay={there}/runs/done/checkpoints/step_000004    step_000004
    breakit trace=true row=5                            row=5
    breakit trace=true layer=1                          layer=1
    breakit trace=true failure=local_mask               failure=local_mask
    breakit trace=true run=none runs={there}/runs       run=none
    breakit trace=true run=done runs={there}/runs layer=3    layer=3
    breakit trace=true run=done runs={there}/runs head=4     head=4
    breakit trace=true run=done runs={there}/runs tokens=33  tokens=33
    breakit look=true run=none runs={there}/runs        run=none
    breakit look=true run=done runs={there}/runs tokens=33   33
    breakit look=true run=done runs={there}/runs prompt=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx   41 tokens
    breakit look=true prompt=a tokens=3                 tokens=3
    breakit explorer=true out=x.json                    out=x.json
    breakit explorer=true real=nowhere.json             real=nowhere.json
    breakit explorer=true real={there}/empty.txt        real={there}/empty.txt
    breakit explorer=true real=/dev/zero                real=/dev/zero
    sample run=nobody runs={there}/runs                 runs that have one: done
    sample checkpoint=step_000009 runs={there}/runs     {there}/runs/done/checkpoints/step_000009
    sample checkpoint={there}/runs/done/checkpoints/step_000009    step_000009
    sample runs={there}/none                            run=latest
    sample stop= runs={there}/runs                      stop=
    sample 'stop=["a", 1]' runs={there}/runs            stop=["a", 1]: 1
    sample 'stop=["a", ""]' runs={there}/runs           stop=["a", ""]
    sample 'stop=["a]' runs={there}/runs                stop=["a]
    sample interactive=true num_samples=2               num_samples=2
    sample interactive=true prompt_file=-               prompt_file=-
    sample num_samples=1000000000                       num_samples=1000000000
    sample prompt_file={there}/none runs={there}/runs   prompt_file={there}/none
    sample prompt_file={there}/text runs={there}/runs   prompt_file={there}/text
    sample prompt_file={there}/surrogate.txt runs={there}/runs    offset 0
    sample prompt_file=/dev/zero runs={there}/runs      prompt_file=/dev/zero
    sample prompt_file={there}/terabyte runs={there}/runs    1,099,511,627,776 bytes
    sample prompt=a prompt_file=b                       prompt_file=b
    sample cache=true runs={there}/runs                 contiguous, paged or false
    sample device=cuda:99 runs={there}/runs             device=cpu
    sample list_runs=true prompt=a                      prompt
    sample list_runs=true export=there                  export
    sample list_runs=true runs=nowhere                  runs
""")
def test_another_script_that_cannot_be(refused, typed, answer):
    refused(typed, answer)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "optimizer.safetensors", "cache"])
def test_what_is_damaged_is_refused_by_each_script_that_reads_it(refused, there, tmp_path, name):
    shutil.copytree(there / "runs", tmp_path / "runs")
    shutil.copytree(there / "cache", tmp_path / "cache")
    path = tmp_path / "runs/done/checkpoints/step_000004"
    (file,) = tmp_path.glob("cache/*/val.bin") if name == "cache" else [path / name]
    flip(file)
    answer = str(file if name == "cache" else path)
    refused(f"train resume={path} runs={tmp_path}/runs data.cache={tmp_path}/cache steps=8", answer)
    if name in ("model.safetensors", "state.json"):
        refused(f"sample checkpoint={path}", answer)


@pytest.mark.parametrize("key", ["runs={0}", "name={1}", "data.path={0}", "data.cache={0}", "resume={0}"])
@pytest.mark.parametrize("name", ["link", "n" * 300])
def test_a_path_that_cannot_be_is_named_with_the_way_out(refused, there, tmp_path, key, name):
    """Python's line was [Errno 36] File name too long, or a traceback of RuntimeError: Symlink loop."""
    path = tmp_path / name
    if name == "link":
        path.symlink_to(path)
    given = ["data=text", f"data.path={there}/text", f"data.cache={there}/cache", f"runs={tmp_path}", *TRAIN]
    refused(f"train {key.format(path, name)}", str(path), *given)


def test_lines_of_metrics_that_are_none_are_left_out_with_a_word(call, there, tmp_path):
    """What is in metrics.jsonl is only looked at, and a run is worth more: this one goes on."""
    lines = ["text", "{", "[]", "null", "3", '"step"', "{}", "\0", "\ud800", "[" * 9999]
    lines += ['{"step": "1"}', '{"step": 1.5}']
    lines += ['{"step": 3, "loss": "low"}', '{"step": 3, "loss": [1]}', '{"step": 3, "loss": null}', '{"loss": 1}']
    shutil.copytree(there / "runs", tmp_path / "runs")
    metrics = tmp_path / "runs/done/metrics.jsonl"
    metrics.write_bytes("\n".join(lines).encode(errors="surrogatepass") + b"\n" + metrics.read_bytes())
    ended = call(train, "resume=done", f"runs={tmp_path}/runs", "steps=5")
    assert ended.code == 0
    assert ended.err == f"{metrics}: left out {len(lines)} lines without a record\n"
