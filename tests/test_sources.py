"""Where text comes from: .jsonl, .gz, standard input, token shards; of any size, and all the way to a sample."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import MODEL, RUN

import sample
import train
from data import download, prepare, shards
from data.dataset import open_data, open_dataset
from data.loader import fingerprint
from data.prepare import READS, DataConfig, files_of
from data.shards import Shards, join
from data.text import PIECE, counted, find, read, standard_input
from data.tokenizer import TokenizerConfig, build, encode
from tests.test_data import BYTE, DOCUMENTS, ROOT, UNICODE, jsonl, refusal, texts, write, write_shard
from tests.test_download import STORIES, honest, of_folder, serve  # noqa: F401 (a fixture)
from tests.test_readme import composed


def test_one_of_something_is_singular():
    assert [counted(n, "token") for n in (0, 1, 2, 1000)] == ["0 tokens", "1 token", "2 tokens", "1,000 tokens"]
    assert [counted(n, "pass", "passes") for n in (1, 2)] == ["1 pass", "2 passes"]


# ---- text


def test_the_field_that_is_named_is_the_text(make, tmp_path):
    """Each field is a corpus of its own, and a text that is the same is not prepared again."""
    lines = [{"body": f"body {i}", "title": f"title {i}", "text": f"body {i}"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = {field: make(tmp_path / "a.jsonl", field=field) for field in ("text", "body", "title")}
    for field in ("title", "body"):
        found = texts(folders[field])
        assert sorted(found["train"] + found["val"]) == sorted(line[field] for line in lines)
    assert folders["body"] == folders["text"] != folders["title"]


NO_TEXT = [  # (data.path, what is there, data.field, what is said); the others are in tests/test_bad_input.py
    ("a.jsonl", b'{"id": 1, "body": "a", "titre": "b"}\n', "id", '"id" with a string (data.field= could be "body" or'),
    ("a.jsonl", jsonl("a" * (1 << 20)), "text", "a.jsonl:1: "),  # it does not fit in memory, as it is here
    ("a.txt", b"text\n" * 100, "body", "data.field=body"),
    ("fifo", os.mkfifo, "text", "is a pipe"),
    ("socket", lambda _: socket.socket(socket.AF_UNIX).bind("socket"), "text", "is a socket"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "field", "said"), NO_TEXT)
def test_what_is_no_text_is_refused_with_its_place(make, tmp_path, monkeypatch, name, content, field, said):
    monkeypatch.setattr("data.text.LINE", 1 << 20)
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    content(tmp_path / name) if callable(content) else write(tmp_path, {name: content})
    assert said in refusal(make, name, field=field)


@pytest.mark.parametrize("source", READS)
def test_a_key_that_the_source_would_not_read_is_refused(tmp_path, source):
    for key in {"path", "field", "url", "shards", "megabytes"} - {*READS[source]}:
        data = DataConfig(source, path="a" if "path" in READS[source] else None, cache=str(tmp_path))
        assert f"data.{key}=1" in refusal(open_data, replace(data, **{key: "1"}), BYTE)


@pytest.mark.parametrize(("name", "lines"), [("\x1b.txt.gz", 2), ("a.jsonl.gz", 2), ("a.txt", 0)])
def test_compressed_text_that_grows_is_said_with_the_files_name(tmp_path, monkeypatch, capsys, name, lines):
    """12 MiB became 5 GB without a word. The size of other files is known."""
    monkeypatch.setattr("data.text.SAID", PIECE)
    text = "a line\n" * (5 * PIECE // 14)  # 2.5 times as much
    content = jsonl(text) if "jsonl" in name else text.encode()
    write(tmp_path, {name: gzip.compress(content) if name.endswith(".gz") else content})
    assert sum(len(piece) for _, piece in read(str(tmp_path / name))) > 2 * PIECE
    assert capsys.readouterr().err.count(f"{tmp_path / name}: ".replace("\x1b", r"\x1b")) == lines


def test_standard_input_is_one_document_for_every_job_of_a_process(make, tmp_path, monkeypatch):
    """As in a sweep. It is known by its content, wherever it came from. A terminal is not waited for."""
    file = write(tmp_path, {"a.txt": UNICODE}) / "a.txt"
    with open(file, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for tokenizer in (BYTE, TokenizerConfig("bpe", 270)):
            assert make("-", tokenizer) == make(file, tokenizer)
    assert len([*(tmp_path / "cache").iterdir()]) == 3  # and the lock
    standard_input.cache_clear()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "data.path=-" in refusal(make, "-")


def test_a_glob_comes_back_from_links_that_lead_in_circles(make, tmp_path):
    """glob's own ** follows links: two of them in one folder took 2**40 folders."""
    folder = write(tmp_path / "corpus", {"deeper/a.txt": "a\n"})
    for name in ("one", "two"):
        (folder / "deeper" / name).symlink_to(folder)
    assert texts(make(f"{folder}/**/*.txt", val_fraction=0.01)) == {"train": ["a\n"], "val": []}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**", "abcd"), ("**/*.txt", "abc"), ("*/**/*.txt", "bc"), ("**/x/*", "bd"), ("**/**/y/**/*", "c"),
        ("?.*", "a"), ("x/[bd].*", "bd"), ("**/.h/*", "e"), ("**/.*", "f"),
    ],
)  # fmt: skip
def test_a_glob_matches_what_a_shell_would(tmp_path, pattern, names):
    files = ("a.txt", "x/b.txt", "x/y/c.txt", "x/d.log", ".h/e.txt", "x/.f")
    folder = write(tmp_path / "corpus", {name: Path(name).stem.strip(".") + "\n" for name in files})
    found = [file for file in find(f"{folder}/{pattern}", tmp_path) if isinstance(file, str)]
    assert sorted(Path(file).stem.strip(".") for file in found) == sorted(names)


GROWTH = """
import re, sys
from data import prepare
from data.tokenizer import TokenizerConfig
prepare.THREADS = 2
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
prepare.prepare(prepare.DataConfig("text", sys.argv[1], cache=sys.argv[2]), TokenizerConfig("byte"))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="getrusage counts the parent's memory too")
@pytest.mark.parametrize("name", ["one.txt", "many.jsonl"])
def test_memory_is_less_than_the_text_takes(tmp_path, name):
    """A whole file was held twice over, and a kilobyte of objects for each document."""
    with open(tmp_path / name, "w", encoding="utf-8") as file:
        for i in range(1 << 17):
            text = f"{i:>8} {'hello ' * 60}"
            file.write(json.dumps({"text": text}) + "\n" if name == "many.jsonl" else text * 3 + "\n")
    command = [sys.executable, "-c", GROWTH, tmp_path / name, tmp_path / "cache"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert int(ended.stdout) < (tmp_path / name).stat().st_size


def test_a_tokenizer_learns_from_an_even_share_of_a_large_corpus(make, tmp_path, monkeypatch):
    write(tmp_path, {"a.jsonl": jsonl(*(f"{'ab' if i % 2 else 'xy'} {i}" for i in range(1000)))})
    learnt = []
    monkeypatch.setattr(prepare, "build", lambda config, texts: learnt.extend(texts) or build(BYTE, ()))
    monkeypatch.setattr("data.corpus.LEARN", 1000)
    make(tmp_path / "a.jsonl", TokenizerConfig("bpe", 258))
    assert abs(sum(map(len, learnt)) - 1000) < 10
    numbers = [int(text.split()[1]) for text in learnt]
    assert max(np.diff(numbers)) < 20
    assert numbers[-1] > 980


# ---- token shards


def test_a_full_token_file_is_followed_by_another(make, tmp_path, monkeypatch):
    """Its header counts to 2**31 - 1; a corpus larger than memory has more."""
    write(tmp_path, {"a.jsonl": jsonl(*DOCUMENTS)})
    whole = open_dataset(make(tmp_path / "a.jsonl"))
    monkeypatch.setattr(shards, "MOST_TOKENS", 1000)
    folder = make(tmp_path / "a.jsonl", cache="another")
    parts = open_dataset(folder)
    assert len(list(folder.glob("train*.bin"))) == -(-len(whole.train) // 1000) > 10
    assert fingerprint(parts.train, parts.train_documents) == fingerprint(whole.train, whole.train_documents)
    by_name = open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept"))  # a folder of shards
    for name in ("train", "val", "train_documents", "val_documents", "token_bytes"):
        for found in (parts, by_name):
            assert np.array_equal(getattr(whole, name)[:], getattr(found, name)[:]), name


def test_documents_begin_at_the_same_tokens_however_large_a_block_is_read(monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 3)
    ends, largest = shards.inspect(np.array([7, 9, 1, 9, 9, 3, 12, 9]), 9)
    assert (ends.tolist(), largest) == ([1, 3, 4, 7], 12)


@pytest.mark.parametrize("lengths", [[5, 3, 4], [0, 5, 0, 0, 7, 0], [12], [1] * 12])
def test_shards_read_like_one_array(lengths):
    whole = np.arange(12, dtype=np.uint16)
    parts = Shards(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(parts) == 12
    for part in [slice(start, stop) for start in range(13) for stop in range(13)] + [slice(-3, None), slice(3, 99)]:
        for found in (parts[part], join(parts.parts(part))[:]):
            assert (found.tolist(), found.dtype) == (whole[part].tolist(), np.uint16)


LAST = [256, 5, 6, 256, *range(15)]
SPLITS = {  # (files, data.path, val_fraction, tokens to train on and to validate with, their documents)
    # from the first document that begins in the last 20 of 101 tokens
    "the last documents": (
        {"a": [256, *range(59)], "b": [1, 2, 256, *range(19), *LAST]}, "*.bin", 0.2,
        [256, *range(59), 1, 2, 256, *range(19)], LAST, [0, 62], [0, 3],
    ),
    "files named val, wherever they stand": (
        {"b_train": [256, 1, 2], "a_val": [3, 256, 4], "c_train": [5, 6], "d_val": [256, 7]}, "**/*.bin", 0.2,
        [256, 1, 2, 5, 6], [3, 256, 4, 256, 7], [0], [0, 1, 3],
    ),
    "the end of one long document": (
        {"a": [*range(100)]}, "a.bin", 0.1, [*range(90)], [*range(90, 100)], [0], [0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
def test_shards_are_split_where_they_lie(tmp_path, case):
    files, path, val_fraction, *expected = SPLITS[case]
    for name, ids in files.items():
        write_shard(tmp_path / "bin" / f"{name}.bin", ids, 257)
    found = open_data(DataConfig("bin", f"{tmp_path}/bin/{path}", val_fraction=val_fraction), BYTE)
    parts = (found.train, found.val, found.train_documents, found.val_documents)
    assert [part[:].tolist() for part in parts] == expected
    assert len(files) > 1 or isinstance(found.train.base, np.memmap)
    assert len([*tmp_path.rglob("*")]) == 1 + len(files)


def test_shards_of_another_tokenizer_are_refused(make, tmp_path, gpt2):
    write_shard(tmp_path / "bin" / "a.bin", [70_000, 1, 2, 70_000], 70_001)
    assert "a.bin has token 70000" in refusal(open_data, DataConfig("bin", str(tmp_path / "bin")), BYTE)
    folder = make(write(tmp_path, {"a.txt": UNICODE}) / "a.txt")
    said = refusal(open_data, DataConfig("bin", str(folder)), TokenizerConfig("gpt2"))
    assert "tokenizer.json is of tokenizer byte" in said
    assert "data.field=body" in refusal(make, folder, field="body")
    assert "data.val_fraction=0.5" in refusal(make, folder, val_fraction=0.5)


# ---- every source, from the command line to a sample

VERSES = "".join(
    f"Speaker {i}:\n{'So long lives this, ' * (i % 7)}and this gives life to thee.\n\n" for i in range(900)
)


@pytest.fixture
def shakespeare(serve, monkeypatch) -> str:  # noqa: F811
    """The address of another text in the place of tinyshakespeare, which has to be downloaded."""
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", hashlib.sha256(VERSES.encode()).hexdigest())
    return serve(lambda request: honest(request, VERSES.encode())).url


@pytest.fixture
def fineweb(serve, gpt2, tmp_path):  # noqa: F811
    """The server of three shards for training and one for validation."""
    encoding = build(TokenizerConfig("gpt2"), ())
    for name in ("val_000000", "train_000001", "train_000002", "train_000003"):
        ids = [encoding.eot_token, *encode(encoding, name + UNICODE).tolist()]
        write_shard(tmp_path / "served" / f"fineweb_{name}.bin", ids)
    return serve(of_folder(tmp_path / "served", "datasets/kjj0/fineweb10B-gpt2"))


@pytest.fixture
def tinystories(serve):  # noqa: F811
    return serve(lambda request: honest(request, STORIES))


def test_of_fineweb_the_shards_asked_for_are_downloaded(fineweb, serve, gpt2, tmp_path, monkeypatch):  # noqa: F811
    """A page instead of a shard is refused."""
    data, tokenizer = DataConfig("fineweb", shards=2, cache=str(tmp_path / "cache")), TokenizerConfig("gpt2")
    found = open_data(data, tokenizer)
    asked = [path.rpartition("/")[2] for path, _ in fineweb.asked]
    assert sorted(asked) == ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    for tokens, names in ((found.train, ["train_000001", "train_000002"]), (found.val, ["val_000000"])):
        assert found.encoding.decode(tokens[:].tolist()) == "".join(f"<|endoftext|>{name}{UNICODE}" for name in names)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    serve(lambda request: honest(request, b"<html>" * 1000))
    assert "is no token file" in refusal(open_data, data, tokenizer)


def test_of_shakespeare_as_much_is_for_validation_as_of_nanogpts():
    """At which line a text is split: test_every_document_arrives_once_and_validation_has_its_share of test_data.py."""
    ((cfg, _),) = composed("train.py", "data=shakespeare")
    assert cfg.data.val_fraction == 0.1


DOWNLOADED = ("bin", "fineweb", "shakespeare", "tinystories")


@pytest.mark.parametrize("source", ["text", *(pytest.param(name, marks=pytest.mark.slow) for name in DOWNLOADED)])
def test_every_source_trains_and_samples(call, make, request, tmp_path, source):
    data, runs = [f"data={source}", f"data.cache={tmp_path / 'cache'}"], f"runs={tmp_path / 'runs'}"
    if source in ("text", "bin"):
        write(tmp_path, {"a.jsonl.gz": gzip.compress(jsonl(*DOCUMENTS))})
        data.append(f"data.path={make(tmp_path / 'a.jsonl.gz') if source == 'bin' else tmp_path / 'a.jsonl.gz'}")
        data += ["tokenizer=bpe", "tokenizer.vocab_size=300"] * (source == "text")
    elif (served := request.getfixturevalue(source)) and source == "shakespeare":
        data.append(f"data.url={served}")
    run = [*MODEL, *RUN, "device=cpu", "steps=20", "wandb.mode=disabled", "name=x", runs]
    call(train, *data, *run).succeeded()
    call(sample, runs, "run=x", "max_new_tokens=20", "device=cpu").succeeded()


def test_a_run_from_standard_input_goes_on_without_it(call, small, tmp_path, monkeypatch):
    """resume=auto said "- holds no text", though the tokens lie in the cache."""
    own = [argument for argument in small if not argument.startswith("data.")]
    there = [f"data.cache={tmp_path}/cache", f"runs={tmp_path}/runs", "steps=2"]
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
    with open(tmp_path / "a.txt", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        call(train, *own, *there, "data.path=-", "name=x", "data.val_fraction=0.2").succeeded()
    monkeypatch.setattr(sys, "stdin", None)
    standard_input.cache_clear()  # another process has not kept it
    ended = call(train, f"runs={tmp_path}/runs", "resume=auto", "steps=3").succeeded()
    (folder,) = (tmp_path / "cache").glob("text-byte-*")
    assert f"data: {folder}, " in ended.out
    ended = call(train, *own, *there, f"data.path={folder}", "tokenizer=bpe")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"{folder} has tokens of tokenizer byte" in ended.err


def test_a_validation_text_that_has_changed_is_said_on_resume_and_by_eval_only(call, small, tmp_path):
    own = [argument for argument in small if not argument.startswith("data")]
    folder, runs = tmp_path / "tokens", f"runs={tmp_path}/runs"
    write_shard(folder / "train.bin", [i % 200 for i in range(5000)])
    write_shard(folder / "val.bin", [i % 200 for i in range(1000)])
    there = [*own, "data=bin", f"data.path={folder}", "tokenizer=byte", runs, "name=x"]
    call(train, *there, "steps=2").succeeded()
    said = "the validation text has changed"
    measured = ["eval_only=true", "resume=x", runs]
    assert said not in call(train, "resume=auto", "steps=3", runs).out + call(train, *measured).out
    write_shard(folder / "val.bin", [i % 200 for i in range(1100)])
    assert said in call(train, *measured).out
    assert said in call(train, "resume=auto", "steps=4", runs).out
    assert said not in call(train, "resume=auto", "steps=5", runs).out


@pytest.mark.parametrize(("source", "rooms"), [("pystdlib", ["stdlib"]), ("pypackages", ["platlib", "purelib"])])
def test_python_code_is_read_without_its_tests_from_where_python_has_it(tmp_path, monkeypatch, source, rooms):
    """purelib and platlib may be one folder, and may be two."""
    of = {"stdlib": "a", "purelib": "b", "platlib": "c"}
    for room in of.values():
        write(tmp_path, {f"{room}/x.py": room, f"{room}/deep/y.py": room, f"{room}/z.so": ""})
        write(tmp_path / room, {f"{name}/z.py": "" for name in ("test", "tests", "idle_test", "site-packages")})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / of[name]))
    data = DataConfig(source)
    right = sorted(str(tmp_path / of[room] / name) for room in rooms for name in ("x.py", "deep/y.py"))
    assert sorted(files_of(data, BYTE, None, None)) == right
    (tmp_path / "d").symlink_to(tmp_path / "b")
    for same in ("b", "d"):
        monkeypatch.setitem(of, "platlib", same)
        assert len(files_of(data, BYTE, None, None)) == 2
