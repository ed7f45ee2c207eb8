"""Four hundred mistakes: command lines, values, files, manifests, checkpoints. Each is answered by one line on stderr
that names what is wrong, with exit code 2, and leaves nothing new in the folders. Where a mistake is in a file, what
reads the file is called, for a command line takes a tenth of a second; a damage of each kind comes by a command line.

A table's line is what is typed after the script's name, two spaces, and words of the answer. {there} is a folder with
runs/done (a run of 4 steps), cache (its data) and the files of FILES.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import bench
import breakit
import sample
import train
from data.dataset import open_data
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from tests.conftest import MODEL, RATE, RUN
from training import checkpoint

TRAIN = [*MODEL, *RUN, *RATE, "steps=4", "wandb.mode=disabled", "device=cpu"]


def table(text: str) -> pytest.MarkDecorator:
    """Each line of `text` as (command line, words of the answer)."""
    rows = [re.split(r"  +", line.strip(), maxsplit=1) for line in text.strip().splitlines()]
    return pytest.mark.parametrize(("typed", "answer"), rows, ids=[typed for typed, _ in rows])


# --- files ----------------------------------------------------------------------------------------------------------

LINES = b"a line of text\n" * 200
GZ = gzip.compress(LINES, mtime=0)
IDS = [256, *LINES]


def shard(ids: list[int], *, magic: int = 20240520, version: int = 1, count: int | None = None, rest: bytes = b""):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, "<u2").tobytes() + rest


FILES = {
    "empty.txt": b"",
    "mark.txt": b"\xef\xbb\xbf",
    "zero.txt": b"text\0text\n",
    "utf16.txt": "text\n".encode("utf-16")[:-1],
    "latin1.txt": b"caf\xe9\n" * 100,
    "cut.txt": b"\xc3\xa9" * 500 + b"\xc3",
    "surrogate.txt": b"\xed\xa0\x80" * 20,
    "overlong.txt": b"text \xc0\xaf\n",
    "late.txt": LINES * 200 + b"\xff",
    "empty.txt.gz": b"",
    "plain.txt.gz": LINES,
    "cut.txt.gz": GZ[:-20],
    "sum.txt.gz": GZ[:-8] + b"\0" * 8,
    "tail.txt.gz": GZ + b"tail",
    "flipped.txt.gz": GZ[:14] + bytes([GZ[14] ^ 255]) + GZ[15:],
    "zero.txt.gz": gzip.compress(b"text\0"),
    "latin1.txt.gz": gzip.compress(b"caf\xe9"),
    "number.jsonl.gz": gzip.compress(b'{"text": 3}\n'),
    "blank.jsonl": b"\n \n",
    "prose.jsonl": b"text\n",
    "number.jsonl": b'{"text": "right"}\n{"text": 1}\n',
    "null.jsonl": b'{"text": null}\n',
    "field.jsonl": b'{"body": "a"}\n',
    "list.jsonl": b'["text"]\n',
    "json.json.jsonl": b'[\n{"text": "a"}\n]\n',
    "open.jsonl": b'{"text": "a"\n',
    "two.jsonl": b'{"text": "a"} {"text": "b"}\n',
    "half.jsonl": b'{"text": "\\ud800"}\n',
    "latin1.jsonl": b'{"text": "\xe9"}\n',
    "utf16.jsonl": '{"text": "a"}\n'.encode("utf-16"),
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "zero.jsonl": b"\0\n",
    "good.bin": shard(IDS),
    "empty.bin": b"",
    "header.bin": shard([])[:700],
    "magic.bin": shard(IDS, magic=1),
    "version.bin": shard(IDS, version=7),
    "more.bin": shard(IDS, count=5000),
    "negative.bin": shard(IDS, count=-1),
    "odd.bin": shard(IDS, rest=b"x"),
    "unknown.bin": shard([*IDS, 257]),
    "none.bin": shard([]),
    "short.bin": shard(IDS[:9]),
    "val/only_val.bin": shard(IDS),
    "folder/table.csv": b"1,2\n",
}


def below(folder: Path) -> dict[str, int | None]:
    """Everything in `folder` but the locks, and when a file was written."""
    found = {}
    for path, folders, files in os.walk(folder):
        found |= dict.fromkeys(f"{path}/{name}" for name in folders)
        found |= {f"{path}/{name}": os.stat(f"{path}/{name}").st_mtime_ns for name in files if name != ".lock"}
    return found


@pytest.fixture(scope="module")
def there(call, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "text").mkdir()
    (folder / "text/all.txt").write_text("".join(file.read_text() for file in sorted(text.iterdir())))
    given = [f"data.path={folder}/text", f"data.cache={folder}/cache", f"runs={folder}/runs"]
    assert call(train, "data=text", *given, *TRAIN, "checkpoint_every=2", "name=done").code == 0
    return folder


@pytest.fixture
def refused(call, monkeypatch):
    """refused(script, folder, arguments, *words): the script answers in one line that has the words, and leaves
    `folder` as it is."""

    def refused(script: ModuleType, folder: Path, arguments: list[str], *words: str) -> None:
        before = below(folder)
        ended = call(script, *arguments)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert ended.err.startswith(f"{Path(script.__file__).stem}: ")
        for answer in words:
            assert answer.replace("{there}", str(folder)) in ended.err
        assert below(folder) == before

    monkeypatch.delenv("WANDB_MODE", raising=False)
    return refused


def refused_by(function: Callable, folder: Path, *words: str) -> None:
    """function() raises a ValueError, of one line that has the words, and leaves `folder` as it is."""
    before = below(folder)
    with pytest.raises(ValueError, match=r"\A.*\Z") as error:  # a dot matches no line's end
        function()
    for answer in words:
        assert answer.replace("{there}", str(folder)) in str(error.value)
    assert below(folder) == before


@pytest.fixture
def refused_training(refused, there):
    def refused_training(typed: str, answer: str) -> None:
        given = ["data=text", f"data.path={there}/text", f"data.cache={there}/cache", f"runs={there}/runs", *TRAIN]
        typed = [argument.replace("{there}", str(there)) for argument in shlex.split(typed)]
        if any(argument.startswith("data=") for argument in typed):  # of another source, whose keys these may not be
            given = [argument for argument in given if not argument.startswith(("data=", "data.path="))]
        refused(train, there, [*given, *typed], answer)

    return refused_training


# --- what is typed --------------------------------------------------------------------------------------------------


@table(r"""
    --steps=3                   written key=value here, without dashes; did you mean steps=3?
    -steps=3                    -steps=3: options are written key=value here
    -x                          -x: options are written key=value here
    --cfg                       --cfg: write --cfg job
    --cfg all                   --cfg: write --cfg job
    --cfg=all                   --cfg=all: write --cfg job
    --help=al                   --help=al: options are written key=value here
    --config-name=nowhere       the flags are -m for a sweep, --help, --help all and --cfg job
    steps                       steps: options are written key=value; did you mean steps=VALUE?
    steps=three                 steps=three: the value must be of type
    steps=1.5                   steps=1.5: the value must be of type
    steps=null                  steps=None: the value must be of type
    steps=[1]                   steps=[1]: the value must be of type
    steps=$x                    steps=$x: the value must be of type
    steps=${nothing}            'nothing' not found
    steps=1,2                   steps=1,2: several values make a sweep and need -m: -m steps=1,2
    steps=(                     steps=(: Hydra cannot read the value
    step=3                      step=3: there is no key step; did you mean steps?
    =3                          =3: there is no key
    ''                          there is no key
    name=???                    name has no default and must be given: name=VALUE
    +new=3                      +new=3: there is no key new
    ~steps                      ~steps: keys cannot be removed; give it another value: steps=VALUE
    optimizer.lr.x=3            there is no key optimizer.lr.x; did you mean optimizer.lr?
    optimizer={rate:1}          optimizer.rate
    optimizer={lr:[1}           Hydra cannot read the value
    optimizer=sgd               optimizer=sgd: there is no such optimizer, only adamw, muon
    optimizer=null              optimizer=null: there is no such optimizer
    model=gpt3                  did you mean model=gpt2?
    model=nano=gpt2             model=nano=gpt2: there is no such model
    attention=flash             attention=flash: there is no such attention
    attention=Naive             did you mean attention=naive?
    attention=flash             it is attention=triton, FlashAttention's kernels, or attention=sdpa, torch's own
    block_size=64               there is no key block_size; here it is model.context_length
    attention=[naive,tiled]     one attention is used, not a list; write attention=NAME, or -m attention=NAME,NAME
    attention=[1]               one attention is used, not a list
    tokenizer=gtp2              did you mean tokenizer=gpt2?
    data=file.txt               did you mean data=text?
    data=web                    data=web: there is no such data, only bin, fineweb, passkey, pystdlib, recall,
    experiment=shakespear       did you mean experiment=shakespeare?
    wandb=online                wandb=online: wandb has keys of its own; did you mean wandb.mode=online?
    probe=1                     probe=1: probe has keys of its own; did you mean probe.every=1?
    wandb.tags=3                wandb.tags=3: the value must be of type
    hydra.nothing=3             hydra.nothing=3: of Hydra's own keys only
    hydra.mode=MULTIRUN         hydra.mode=MULTIRUN: of Hydra's own keys only
    hydra/launcher=joblib       hydra/launcher=joblib: of Hydra's own keys only
    hydra.run.dir=x             hydra.run.dir=x: of Hydra's own keys only
    ++hydra.job_logging._target_=os.system   ++hydra.job_logging._target_=os.system: of Hydra's own keys only
""")
def test_a_command_line_that_cannot_be_read(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    -m steps=0,1                                        steps=0 must be at least 1
    -m hydra.launcher._target_=os.system seed=1,2       hydra.launcher._target_=os.system: of Hydra's own keys only
    -m +hydra.sweeper.params={seed:1} seed=1,2          +hydra.sweeper.params={seed:1}: of Hydra's own keys only
    -m steps=choice(                                    steps=choice(: Hydra cannot read the value
    -m 'optimizer=glob(x*)'                             optimizer=glob(x*): no option matches
    -m steps=4,5 seed=1,-1                              seed=-1 is outside
    -m optimizer=adamw,mu                               optimizer=mu: there is no such optimizer
    -m optimizer=muon,adamw optimizer.momentum=0.9      optimizer.momentum=0.9 is Muon's
    -m experiment=smoke,smoky                           experiment=smoky: there is no such experiment
    -m seed=1,2 name=done                               runs/done exists already: use another name= for the sweep
    -m resume=nobody,done steps=8                       resume=nobody: no checkpoint
""")
def test_a_sweep_with_a_mistake_in_any_job_starts_none(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    steps=0                     steps=0 must be at least 1
    batch_size=1000000000       batch_size * model.context_length = 32000000000
    tokens_per_step=0           tokens_per_step=0 must be at least 1; null: one pass
    tokens_per_step=100         tokens_per_step=100 is no multiple
    seed=-1                     seed=-1 is outside [0, 2**63)
    length_warmup_steps=4                       length_warmup_from=128 does not double to model.context_length=32
    length_warmup_steps=4 length_warmup_from=0  length_warmup_from=0 does not double
    length_warmup_steps=4 length_warmup_from=24     use model.context_length divided by 2, 4, 8
    length_warmup_steps=1 length_warmup_from=8  length_warmup_steps=1 must be at least 2, the number of lengths that
    length_warmup_steps=4 length_warmup_by=1    length_warmup_by=1 must be at least 2; 2 doubles the sequences
    length_warmup_steps=4 length_warmup_from=8 length_warmup_by=3  length_warmup_from=8 does not grow 3-fold to model.c
    length_warmup_steps=4 length_warmup_from=8 length_warmup_by=3  use a length_warmup_by that divides it
    pack=true data=recall data.path=null        pack=true with data=recall: its documents fill windows already
    length_warmup_steps=4 length_warmup_from=16 data=recall data.path=null      with data=recall: its strings
    ema_decay=nan               ema_decay=nan is outside
    dtype=float64               dtype=float64 is not known; choose auto, float32, bf16 or fp16
    stop_on_nan=maybe           stop_on_nan=maybe: the value must be of type
    device=gpu                  device=gpu cannot be used here
    device=cuda:99              device=cuda:99 cannot be used here
    device=cpu:x                device=cpu:x cannot be used here
    device=meta                 device=meta cannot be used here
    name=                       name= is empty
    name=..                     name='..' cannot name a run
    name=../out                 name='../out' cannot name a run
    name=latest                 name='latest' cannot name a run
    name=a/b                    name='a/b' cannot name a run
    name=CON:                   name='CON:' cannot name a run
    name=a.                     name='a.' cannot name a run
    name=a*b                    name='a*b' cannot name a run
    name=a?                     name='a?' cannot name a run
    name='a"b'                  name='a"b' cannot name a run
    name=a<b                    name='a<b' cannot name a run
    name=a>b                    name='a>b' cannot name a run
    name=a|b                    name='a|b' cannot name a run
    name='a\b'                  name='a\\b' cannot name a run
    name=done                   runs/done exists already: continue it with resume=auto, or use another name=
    runs=                       runs= is empty
    runs={there}/empty.txt      {there}/empty.txt
""")
def test_a_value_of_the_run_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    model.n_head=3                          model.n_embd=32 is not divisible by model.n_head=3
    model.n_kv_head=3                       model.n_head=2 is not divisible by model.n_kv_head=3
    model.n_embd=33                         model.n_embd=33 is not divisible by model.n_head=2
    model.n_embd=1000000000000              model.n_embd=1000000000000
    model.n_embd=100000000000000000000000   model.n_embd=100000000000000000000000
    model.mlp_hidden=10000000000000         cannot be made here
    model.vocab_multiple=10000000000000     cannot be made here
    model.context_length=10000000           tokens_per_step=128 is no multiple
    model.context_length=10000000 batch_size=1 tokens_per_step=null     one window takes 10,000,001
    model.vocab_size=300                    model.vocab_size=300, the tokenizer has 257
    model.vocab_multiple=0                  model.vocab_multiple=0 must be at least 1
    model.position=rope model.n_embd=30     model.n_embd / model.n_head = 15 is odd
    model.bias=maybe                        model.bias=maybe: the value must be of type
    model.dropout_p=1                       model.dropout_p=1.0 is outside [0, 1)
    model.dropout_p=nan                     model.dropout_p=nan is outside
    model.dropout_p=0.001                   model.dropout_p=0.001 is finer than the mask's steps of 1/256
    model.rope_base=inf                     model.rope_base=inf must be finite and above 1
    model.yarn_original=16                  model.yarn_original=16 needs model.yarn_factor= above 1
    model.position=rope model.yarn_factor=2         extends weights that were trained with a shorter context; name their
    model.position=learned model.yarn_factor=2      trained with model.position=rope can be extended; leave it out
    model.position=rope model.yarn_factor=2 model.yarn_original=8       is 32: use model.yarn_factor=4
    model.rope_base_local=1e4               no layer has both a rotary embedding and a window; leave it out
    model.nlayer=3                          did you mean model.n_layer?
    modle.n_layer=3                         there is no key modle.n_layer; did you mean model.n_layer?
""")
def test_a_value_of_the_model_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    attention=tiled attention.autotune=true                 attention.autotune=true: tiled has nothing to tune
    attention=tiled attention.kernel=hopper                 attention.kernel=hopper: tiled has no such kernel; leave it
    attention=sdpa attention.kernel=portable                attention.kernel=portable: sdpa has no such kernel; leave it
    attention=naive attention.order=keys_outside            attention.order=keys_outside: naive has no such loops
    attention=sdpa attention.order=keys_outside             attention.order=keys_outside: sdpa has no such loops
    attention=sdpa attention.softcap=50                     attention.softcap=50.0: sdpa has nothing of the kind
    attention.windows=[]                                    attention.windows=[]
    attention.windows=[8,0]                                 attention.windows[1]=0 must be at least 1
    attention.windows=[8,x]                                 attention.windows[1]=x: the value must be of type
    attention.windows=8                                     attention.windows=8: the value must be of type
    attention.windows=[8] attention.window=4                attention.windows=[8] attention.window=4: give one
    attention=sdpa attention.windows=[8,null]               attention.windows=[8, None]: sdpa has nothing of the kind
    attention.documents=maybe                               attention.documents=maybe: the value must be of type
    attention=sdpa attention.documents=true                 attention.documents=True: sdpa has nothing of the kind
    attention.alibi=2.5                                     attention.alibi=2.5: the value must be of type
    attention=sdpa attention.alibi=true                     attention.alibi=True: sdpa has nothing of the kind
    attention.block_mask=[]                                 attention.block_mask=[] is no picture
    attention.block_mask=x                                  attention.block_mask=x: the value must be of type
    attention.block_mask=[x.,x]                             attention.block_mask=['x.', 'x'] is no picture
    attention.block_mask=[xo,xx]                            attention.block_mask=['xo', 'xx'] is no picture
    attention.block_mask=[x,.                               Hydra cannot read the value
    attention.block_mask=[x] attention.block_mask_size=8    attention.block_mask covers 8 tokens of 32
    attention.block_mask=[x] attention.block_mask_size=0    attention.block_mask_size=0 must be at least 1
    attention=sdpa attention.block_mask=[x]                 attention.block_mask=['x']: sdpa has nothing of the kind
    attention.dropout_p=1                                   dropout_p=1.0 is outside [0, 1)
    attention.dropout_p=nan                                 dropout_p=nan is outside
    attention.dropout_p=-0.1                                dropout_p=-0.1 is outside [0, 1)
    attention=sdpa attention.window=8                       attention.window=8: sdpa has nothing of the kind
    attention.dropout_p=0.0001                              dropout_p=0.0001 is finer than the mask's steps
    break_it.subtract_max=false                             here it is break_it=no_max for false
    break_it=no_mx                                          break_it=no_mx is not known; choose none, no_max
    attention=naive break_it=no_rescale                     break_it=no_rescale: naive rescales nothing
    attention=sdpa break_it=no_max                          break_it=no_max: torch's sdpa cannot be broken
    attention=naive break_it=zero_init_max                  break_it=zero_init_max: naive has no running maximum
    break_it=local_mask attention.windows=[8,null]          break_it=local_mask: only the causal mask can be broken
    break_it=no_scale attention.softmax_scale=1             break_it=no_scale: softmax_scale=1.0 is no 1 / sqrt(D)
    break_it=stale_seed                                     break_it=stale_seed: there is no dropout to draw
    break_it=unrestored_seed                                break_it=unrestored_seed: there is no dropout to draw
    break_it=unrestored_seed attention.dropout_p=0.1        break_it=unrestored_seed: no block is computed again
    model.activation_checkpointing=selective attention=naive  model.activation_checkpointing=selective: from o and lse
    model.chunk=100                                         model.chunk=100 must be a multiple of 32
    model.chunk=10000000000000000000000                     must be a multiple of 32 below 2**63; null for no pieces
""")
def test_a_value_of_attention_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    optimizer.decay_fraction=0.2                            optimizer.decay_fraction=0.2 is wsd's
    optimizer.momentum=0.9                                  optimizer.momentum=0.9 is Muon's
    optimizer.beta1=1                                       optimizer.beta1=1.0 is outside [0, 1)
    optimizer.beta2=nan                                     optimizer.beta2=nan is outside
""")
def test_a_value_of_the_optimizer_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


# --- data -----------------------------------------------------------------------------------------------------------


@table(r"""
    tokenizer.vocab_size=300                                    tokenizer.vocab_size=300: tokenizer=byte has its own
    tokenizer=gpt2 tokenizer.vocab_size=50257                   tokenizer=gpt2 has its own
    tokenizer=kept                                              tokenizer=kept is the tokenizer.json beside data=bin
    tokenizer=bpe tokenizer.vocab_size=256                      tokenizer.vocab_size=256 has no room
    tokenizer=bpe tokenizer.vocab_size=0                        tokenizer.vocab_size=0 has no room
    tokenizer=bpe tokenizer.vocab_size=1000000                  tokenizer.vocab_size=1000000 is more than this text
    tokenizer=bpe tokenizer.vocab_size=99999999999999999999     tokenizer.vocab_size=99999999999999999999 is more
    data.shards=2                                               data.shards=2 is read with data=fineweb only
    data.url=https://example.org                                data.url=https://example.org is read with
    data.cache=/dev/null                                        /dev/null
    data.cache={there}/empty.txt/cache                          {there}/empty.txt
    data=pystdlib data.path={there}/text                        data.path={there}/text is read with data=text
    data=shakespeare data.shards=1                              data.shards=1 is read with data=fineweb only
    data=shakespeare data.url=                                  data.url= is no address to download from
    data=shakespeare data.url=example                           data.url=example is no address to download from
    data=shakespeare data.url=ftp://example.org                 data.url=ftp://example.org is no address
    data=shakespeare data.url=file:///etc                       data.url=file:///etc is no address
    data=shakespeare data.url=http://                           http:/input.txt cannot be downloaded
    data=shakespeare data.url=http://[                          http://[/input.txt cannot be downloaded
    data=shakespeare data.url=http://localhost:x                http://localhost:x/input.txt cannot be downloaded
    data=fineweb data.shards=0                                  data.shards=0 is outside 1 to 103
    data=fineweb data.shards=104                                data.shards=104 is outside 1 to 103
    data=fineweb data.url=https://example.org                   data.url=https://example.org is read with
    data=fineweb tokenizer=bpe                                  tokenizer=bpe: data=fineweb has GPT-2's tokens
    data=fineweb tokenizer=byte                                 tokenizer=byte: data=fineweb has GPT-2's tokens
    data=text                                                   data=text has no text: say which with data.path=FILE
    data=text data.path=                                        data.path= is empty
    data=bin                                                    data=bin has no tokens: say which with data.path=FILE
    data=bin data.path={there}/text                             data.path={there}/text has no .bin files of tokens
    data=bin data.path={there}/no.bin                           data.path={there}/no.bin has no .bin files
    data=bin data.path={there}/good.bin                         tokenizer.json is missing
    data=bin data.path={there}/good.bin tokenizer=bpe           tokenizer=bpe learns from text
    data=bin data.path={there}/val tokenizer=byte               no shards to train on, only only_val.bin
    data=bin data.path={there}/*.bin tokenizer=byte             .bin
    data.path={there}/no.txt                                    data.path={there}/no.txt does not exist
    data.path={there}/*.log                                     data.path={there}/*.log matches no file
    data.path={there}/text/[                                    data.path={there}/text/[ matches no file
    data.path={there}/folder                                    data.path={there}/folder has no .txt, .md, .py
    data.path=/dev/null                                         data.path=/dev/null is a device, no file
    data.path=[a,b]                                             data.path=[a,b] matches no file
""")
def test_data_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


@table(r"""
    empty.txt           empty.txt holds no text, or only empty files
    mark.txt            mark.txt holds no text, or only empty files
    zero.txt            zero.txt has a zero byte at offset 4, so is binary or UTF-16
    utf16.txt           utf16.txt is not the UTF-16 that its first bytes say (truncated data)
    latin1.txt          latin1.txt is not UTF-8 at byte offset 3 (0xe9)
    cut.txt             cut.txt is not UTF-8 at byte offset 1000 (0xc3)
    surrogate.txt       surrogate.txt is not UTF-8 at byte offset 0 (0xed)
    overlong.txt        overlong.txt is not UTF-8 at byte offset 5 (0xc0)
    late.txt            late.txt is not UTF-8 at byte offset 600000 (0xff)
    empty.txt.gz        empty.txt.gz holds no text
    plain.txt.gz        plain.txt.gz cannot be decompressed
    cut.txt.gz          cut.txt.gz cannot be decompressed
    sum.txt.gz          sum.txt.gz cannot be decompressed
    tail.txt.gz         tail.txt.gz cannot be decompressed
    flipped.txt.gz      flipped.txt.gz cannot be decompressed
    zero.txt.gz         zero.txt.gz has a zero byte at offset 4
    latin1.txt.gz       latin1.txt.gz is not UTF-8 at byte offset 3
    number.jsonl.gz     number.jsonl.gz:1: no field "text" with a string
    blank.jsonl         blank.jsonl holds no text
    prose.jsonl         prose.jsonl:1: Expecting value at column 1
    number.jsonl        number.jsonl:2: no field "text" with a string
    null.jsonl          null.jsonl:1: no field "text" with a string
    field.jsonl         field.jsonl:1: no field "text" with a string
    list.jsonl          list.jsonl:1: no field "text" with a string
    json.json.jsonl     json.json.jsonl:1: Expecting value
    open.jsonl          open.jsonl:1: Expecting ',' delimiter
    two.jsonl           two.jsonl:1: Extra data at column 15
    half.jsonl          half.jsonl:1: 'utf-8' codec can't encode character '\ud800'
    latin1.jsonl        latin1.jsonl:1: 'utf-8' codec can't decode byte 0xe9
    utf16.jsonl         utf16.jsonl:1: 'utf-8' codec can't decode byte 0xff
    deep.jsonl          deep.jsonl:1: maximum recursion depth exceeded
    zero.jsonl          zero.jsonl:1: Expecting value
""")
def test_a_file_that_is_no_text(there, typed, answer):
    data = DataConfig("text", path=f"{there}/{typed}", cache=f"{there}/cache")
    refused_by(lambda: open_data(data, TokenizerConfig()), there, f"{{there}}/{answer}")


@table(r"""
    empty.bin       empty.bin is no token file, its header begins with ()
    header.bin      header.bin is no token file, its header begins with (20240520, 1)
    magic.bin       magic.bin is no token file, its header begins with (1, 1)
    version.bin     version.bin is no token file, its header begins with (20240520, 7)
    more.bin        more.bin has 3001 tokens, its header says 5000
    negative.bin    negative.bin has 3001 tokens, its header says -1
    odd.bin         odd.bin has 3001 tokens and 1 byte, its header says 3001
    unknown.bin     unknown.bin has token 257, tokenizer byte has 257
""")
def test_a_file_that_is_no_shard(there, typed, answer):
    data = DataConfig("bin", path=f"{there}/{typed}")
    refused_by(lambda: open_data(data, TokenizerConfig()), there, answer)


@table(r"""
    late.txt                            late.txt is not UTF-8 at byte offset 600000 (0xff)
    more.bin data=bin tokenizer=byte    more.bin has 3001 tokens, its header says 5000
    none.bin data=bin tokenizer=byte    the training text has 0 tokens, one window takes 33
    short.bin data=bin tokenizer=byte   the training text has 8 tokens, one window takes 33
""")
def test_a_file_that_cannot_be_trained_on(refused_training, typed, answer):
    refused_training(f"data.path={{there}}/{typed}", answer)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda content: "", "JSONDecodeError"),
        (lambda content: "{", "JSONDecodeError"),
        (lambda content: "\udcff\udcfe\0", "UnicodeDecodeError"),
        (lambda content: "[]", "TypeError"),
        (lambda content: "{}", "KeyError: 'ranks'"),
        (lambda content: content | {"ranks": {}}, "hold all 256 bytes"),
        (lambda content: content | {"ranks": []}, "AttributeError"),
        (lambda content: content | {"ranks": content["ranks"] | {"!!": 300}}, "base64"),
        (lambda content: content | {"ranks": content["ranks"] | {"AA==": 1}}, "must be distinct"),
        (lambda content: content | {"ranks": content["ranks"] | {"AA==": -1}}, "OverflowError"),
        (lambda content: content | {"ranks": content["ranks"] | {"AA==": 1.5}}, "TypeError"),
        (lambda content: content | {"ranks": content["ranks"] | {"AA==": "x"}}, "TypeError"),
        (lambda content: content | {"ranks": content["ranks"] | {"YWI=": 10**9}}, "ids must be distinct and below"),
        (lambda content: content | {"pattern": "("}, "Parsing error"),
        (lambda content: content | {"pattern": 3}, "TypeError"),
        (lambda content: content | {"special_tokens": {}}, "must hold <|endoftext|>"),
        (lambda content: content | {"special_tokens": {"<|endoftext|>": "x"}}, "TypeError"),
        (lambda content: content | {"special_tokens": {"<|endoftext|>": -1}}, "OverflowError"),
        (lambda content: content | {"special_tokens": {"<|endoftext|>": 3}}, "ids must be distinct"),
        (lambda content: content | {"special_tokens": {"<|endoftext|>": 2**31}}, "ids must be distinct and below"),
    ],
)
def test_a_tokenizer_that_is_none(there, tmp_path, change, answer):
    (kept,) = there.glob("cache/*/tokenizer.json")
    changed = change(json.loads(kept.read_text()))
    changed = changed if isinstance(changed, str) else json.dumps(changed)
    (tmp_path / "tokenizer.json").write_bytes(changed.encode(errors="surrogateescape"))
    (tmp_path / "a.bin").write_bytes(FILES["good.bin"])
    data = DataConfig("bin", path=f"{tmp_path}")
    unreadable = f"{tmp_path}: tokenizer.json cannot be read ("
    refused_by(lambda: open_data(data, TokenizerConfig("kept")), tmp_path, unreadable, answer)


# --- what was made before -------------------------------------------------------------------------------------------


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def write(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def edit(**changes) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = [os.unlink, cut_short, flip, empty]
NO_JSON = [write(text) for text in ("{", "[]", "null", '{"version": 2}', "[" * 5000)]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, damage) for damage in DAMAGES for name in ("train.bin", "val.bin", "tokenizer.json")],
        *[(name, damage) for damage in DAMAGES for name in ("train_documents.npy", "val_documents.npy")],
        *[("manifest.json", damage) for damage in (os.unlink, cut_short, empty, *NO_JSON)],
        *[("manifest.json", edit(**change)) for change in ({"version": 1}, {"version": "2"}, {"sha256": {}})],
        *[("manifest.json", edit(**change)) for change in ({"sha256": None}, {"sha256": {"train.bin": "0"}})],
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
        *[(name, damage) for damage in DAMAGES for name in ("model.safetensors", "tokenizer.json", "state.json")],
        *[("state.json", damage) for damage in NO_JSON],
        *[("state.json", edit(**change)) for change in ({"step": 9}, {"state": {}}, {"sha256": {}}, {"alias": 3})],
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(there, tmp_path, name, damage):
    shutil.copytree(there / "runs", tmp_path / "runs")
    path = tmp_path / "runs/done/checkpoints/step_000004"
    damage(path / name)
    answer, way_out = f"checkpoint {path} is damaged (", f"use the one before it, {path.parent}/step_000002"
    refused_by(lambda: checkpoint.load(path), tmp_path, answer, way_out)
    if name == "state.json":
        refused_by(lambda: checkpoint.load_state(path), tmp_path, answer, way_out)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_optimizer_is_named_when_training_goes_on(there, tmp_path, damage):
    shutil.copytree(there / "runs", tmp_path / "runs")
    path = tmp_path / "runs/done/checkpoints/step_000004"
    damage(path / "optimizer.safetensors")
    found = checkpoint.load(path)
    refused_by(found.optimizer, tmp_path, f"checkpoint {path} is damaged (", "optimizer.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "optimizer.safetensors", "cache"])
def test_what_is_damaged_is_refused_by_each_script_that_reads_it(refused, there, tmp_path, name):
    shutil.copytree(there / "runs", tmp_path / "runs")
    shutil.copytree(there / "cache", tmp_path / "cache")
    path = tmp_path / "runs/done/checkpoints/step_000004"
    (file,) = tmp_path.glob("cache/*/val.bin") if name == "cache" else [path / name]
    flip(file)
    given = [f"resume={path}", f"runs={tmp_path}/runs", f"data.cache={tmp_path}/cache", "steps=8"]
    answer = f"{file} was edited" if name == "cache" else f"checkpoint {path} is damaged ("
    refused(train, tmp_path, given, answer)
    if name in ("model.safetensors", "state.json"):
        refused(sample, tmp_path, [f"checkpoint={path}"], answer)


@pytest.mark.parametrize("typed", ["runs={0}", "runs={0}/in", "runs={there} name=empty.txt", "data.cache={0}"])
def test_a_file_in_the_place_of_a_folder_is_named(refused, there, typed):
    """Python's line was [Errno 20] Not a directory, or [Errno 17] File exists."""
    file = there / "empty.txt"
    given = ["data=text", f"data.path={there}/text", *TRAIN, *typed.format(file, there=there).split()]
    given += [] if "cache" in typed else [f"data.cache={there}/cache"]
    answer = f"train: {file} is a file, and a folder is wanted: name another one, or move the file away\n"
    refused(train, there, given, answer)


@pytest.mark.parametrize(
    "key", ["runs={0}", "runs={0} resume={there} steps=5", "name={1}", "data.path={0}", "data.cache={0}", "resume={0}"]
)
@pytest.mark.parametrize("name", ["link", "n" * 300])
def test_a_path_that_cannot_be_is_named_with_the_way_out(call, there, tmp_path, key, name):
    """Python's line was [Errno 36] File name too long, or a traceback of RuntimeError: Symlink loop."""
    path = tmp_path / name
    if name == "link":
        path.symlink_to(path)
    given = ["data=text", f"data.path={there}/text", f"data.cache={there}/cache", f"runs={tmp_path}", *TRAIN]
    ended = call(train, *given, *key.format(path, name, there=there / "runs/done").split())
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert str(path) in ended.err
    assert "[Errno" not in ended.err


def test_lines_of_metrics_that_are_none_are_left_out_with_a_word(call, there, tmp_path):
    """What is in metrics.jsonl is only looked at, and a run is worth more: this one goes on."""
    lines = [
        "text",
        "{",
        "[]",
        "null",
        "3",
        '"step"',
        "{}",
        '{"step": "1"}',
        '{"step": 1.5}',
        "\0",
        "\ud800",
        "[" * 9999,
    ]
    lines += ['{"step": 3, "loss": "low"}', '{"step": 3, "loss": [1]}', '{"step": 3, "loss": null}']
    shutil.copytree(there / "runs", tmp_path / "runs")
    metrics = tmp_path / "runs/done/metrics.jsonl"
    metrics.write_bytes("\n".join(lines).encode(errors="surrogatepass") + b"\n" + metrics.read_bytes())
    ended = call(train, "resume=done", f"runs={tmp_path}/runs", "steps=5")
    assert ended.code == 0
    assert ended.err == f"{metrics}: left out {len(lines)} lines without a record\n"


@table(r"""
    resume=                                             resume=: no checkpoint
    resume=auto                                         step_000004 is at step 4 of steps=4; give a larger steps=
    resume=auto steps=2                                 step_000004 is at step 4 of steps=2; give a larger steps=
    resume=done steps=8 model.n_layer=3                 model.n_layer is 2 there and 3 here; use model.n_layer=2, or
    resume=done steps=8 model.rope_base_local=1e4       here; use model.rope_base_local=null, or start
    resume=done steps=8 model.mlp=swiglu                model.mlp is gelu_tanh there and swiglu here
    resume=auto name=nobody                             no checkpoint in {there}/runs/nobody; runs that have one: done
    resume=nobody                                       resume=nobody: no checkpoint
    resume={there}/runs/done/config.yaml                resume={there}/runs/done/config.yaml: no checkpoint
    resume={there}/runs/done/checkpoints/step_000009    step_000009: no checkpoint
    resume=done steps=8 optimizer=muon                  has the state of optimizer.kind=adamw, this run has muon
    resume=done steps=8 seed=2                          trained with seed=1337, this run has 2
    resume=done steps=8 model=nano                      is of another model: model.position is learned there
    resume=done steps=8 model.context_length=16         model.context_length is 32 there and 16 here
    resume=done steps=8 tokenizer=bpe                   tokenizer.kind is byte there and bpe here
    resume=done steps=8 data.path={there}/late.txt      late.txt is not UTF-8
    resume=done steps=8 break_it=no_max                 trained with break_it: none, this run has no_max
    resume=done steps=8 attention.window=4              trained with attention.window=None, this run has 4
    resume=done steps=8 attention.windows=[4,8]         trained with attention.windows=None, this run has [4, 8]
    resume=done steps=8 attention.softcap=3             trained with attention.softcap=None, this run has 3.0
    resume=done steps=8 attention.alibi=true            trained with attention.alibi=False, this run has True
    resume=done steps=8 attention.block_mask=[x]        trained with attention.block_mask=None, this run has ['x']
    resume=done steps=8 ema_decay=2                     ema_decay=2.0 is outside [0, 1)
""")
def test_a_resume_that_cannot_be(refused_training, typed, answer):
    refused_training(typed, answer)


# --- the other scripts ----------------------------------------------------------------------------------------------


@table(r"""
    run=nobody                              run=nobody: no checkpoint in {there}/runs/nobody; runs that have one: done
    run=                                    run=: no checkpoint
    run=/dev/null                           run=/dev/null: no checkpoint
    runs={there}/nothing                    no checkpoint in {there}/nothing
    checkpoint=                             there is no checkpoint .: give the path of a step_... folder
    checkpoint=worst                        there is no checkpoint worst
    checkpoint={there}/runs/done            there is no checkpoint {there}/runs/done
    checkpoint={there}/empty.txt            there is no checkpoint {there}/empty.txt
    temperature=-1                          temperature=-1.0 is outside [0, inf]
    -m temperature=0,-1                     temperature=-1.0 is outside [0, inf]
    top_p=0                                 top_p=0.0 is outside (0, 1]
    seed=-1                                 seed=-1 is outside [0, 2**63)
    device=gpu                              device=gpu cannot be used here
    temprature=1                            there is no key temprature; did you mean temperature?
    --prompt=a                              did you mean prompt=a?
    prompt                                  did you mean prompt=VALUE?
""")
def test_a_sample_that_cannot_be(refused, there, typed, answer):
    typed = typed.replace("{there}", str(there)).split()
    refused(sample, there, [f"runs={there}/runs", "device=cpu", *typed], answer)


@table(r"""
    mode=speed              mode=speed is not known; choose race, pictures, traffic, train, length, decode
    impls=[]                        impls=[]: nothing to measure
    impls=[flash]                   flash is not known; choose naive, tiled, triton, sdpa_flash
    impls=naive                     impls=naive: the value must be of type
    lengths=[]                      lengths=[]
    lengths=[0]                     lengths[0]=0 is outside [1, 2**31)
    lengths=[64,-5]                 lengths[1]=-5 is outside [1, 2**31)
    lengths=[x]                     lengths[0]=x: the value must be of type
    heads=[0]                       heads[0]=0 is outside [1, 2**31)
    heads=4                         heads=4: the value must be of type
    heads=[1,2]                     give one for each head size, or one for all
    head_sizes=[]                   head_sizes=[]
    head_sizes=[0]                  head_sizes[0]=0 is outside [1, 2**31)
    tokens=0                        tokens=0 is outside [1, 2**31)
    causal=[]                       causal=[]
    causal=[maybe]                  causal[0]=maybe: the value must be of type
    dropout_p=[]                    dropout_p=[]
    dropout_p=[1]                   dropout_p=1.0 is outside [0, 1)
    patience=0                      patience=0.0 is outside (0, inf]
    patience=nan                    patience=nan is outside (0, inf]
    repeats=3                       there is no key repeats
    dtype=float64                   dtype=float64 is not known; choose float32, bf16 or fp16
    device=gpu                      device=gpu cannot be used here
    on_chip=[4096]                  mode=race does not read it
    mode=traffic on_chip=[]         on_chip=[]
    mode=traffic on_chip=[1]        on_chip=1 holds no row of q, k, v and o
    mode=traffic lengths=[0]        lengths[0]=0 is outside [1, 2**31)
    mode=traffic head_sizes=[8,16]  mode=traffic measures one
    mode=traffic patience=2         mode=traffic does not read it
    mode=traffic out=/dev/null      /dev/null
    out=                            out= is empty
    out=/dev/null impls=[naive]     /dev/null
    out={there}/empty.txt impls=[naive]    {there}/empty.txt
    --lengths=[3]                   did you mean lengths=[3]?
    -m heads=[1],[0]                heads[0]=0 is outside [1, 2**31)
""")
def test_a_bench_that_cannot_be(refused, there, typed, answer):
    typed = typed.replace("{there}", str(there)).split()
    small = ["lengths=[64]", "head_sizes=[8]"]
    small += [] if "mode=traffic" in typed else ["heads=[1]", "device=cpu"]  # which that mode refuses
    refused(bench, there, [*small, f"out={there}/bench", *typed], answer)


@table("""
    failure=no_luck                    failure=no_luck is not known; choose no_max, no_rescale, no_rescale_sum
    failure=none                       failure=none is not known; choose no_max
    failure=                           failure= is not known; choose no_max
    failure=3                          failure=3 is not known; choose no_max
    failures=no_max                    there is no key failures; did you mean failure?
    steps=0                            steps=0 must be at least 1
    steps=-1                           steps=-1 must be at least 1
    steps=many                         steps=many: the value must be of type int
    seed=-1                            seed=-1 is outside [0, 2**63)
    device=tpu                         device=tpu cannot be used here
    score_gain=9                       score_gain=9.0: the lab does not read it; it is for trace=true
    dtype=float32                      dtype=float32: the lab does not read it
    dtype=bf16                         dtype=bf16 is not known; choose float64 or float32
    block_n=8                          block_n=8: the lab does not read it
    layer=1                            layer=1: the lab does not read it
    tokens=9                           tokens=9: the lab does not read it
    real=x.json                        real=x.json: the lab does not read it; it is for explorer=true
    runs={there}/runs                  the lab trains its own model; add run=NAME
    out=                               out=: the lab wants a folder for its pictures
    out={there}/empty.txt              out={there}/empty.txt: the lab wants a folder for its pictures
    out={there}/empty.txt/in           empty.txt is a file, and a folder is wanted
    trace=true explorer=true           choose one of them, or none for the lab
""")
def test_a_lab_that_cannot_be(refused, there, typed, answer):
    refused(breakit, there, typed.replace("{there}", str(there)).split(), answer)


@table("""
    run=none                           run=none: no checkpoint in {there}/runs/none; runs that have one: done
    run=                               run=: no checkpoint
    run={there}/text                   run={there}/text: no checkpoint
""")
def test_a_lab_without_its_run(refused, there, tmp_path, typed, answer):
    given = [f"runs={there}/runs", f"out={tmp_path}", *typed.replace("{there}", str(there)).split()]
    refused(breakit, there, given, answer)


def test_an_error_is_one_line_that_cannot_command_the_terminal():
    command = [sys.executable, "train.py", "steps=\x1b[31mx\ny"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert said.count("\n") == 1
    assert "\x1b" not in said
