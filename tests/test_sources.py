"""Where text comes from: .jsonl, .gz, standard input, token shards; of any size, and all the way to a sample."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MODEL, RUN

import sample
import train
from data import download, prepare, shards
from data.dataset import open_data, open_dataset
from data.loader import Loader, fingerprint, validation_batches
from data.prepare import DataConfig
from data.shards import Shards, Writer, join
from data.text import PIECE, counted, find, read, standard_input
from data.tokenizer import TokenizerConfig, build, encode
from tests.test_data import BYTE, DOCUMENTS, UNICODE, jsonl, refusal, texts, write
from tests.test_download import honest, of_folder, serve  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]


def test_one_of_something_is_singular():
    assert [counted(n, "token") for n in (0, 1, 2, 1000)] == ["0 tokens", "1 token", "2 tokens", "1,000 tokens"]
    assert [counted(n, "pass", "passes") for n in (1, 2)] == ["1 pass", "2 passes"]


# ---- .jsonl


def test_a_bad_line_is_named_with_its_number_and_how_it_should_be(make, tmp_path):
    write(tmp_path, {"a.jsonl": b'{"text": "good"}\n' * 2 + b'{"text": "a"\n'})
    assert refusal(make, tmp_path / "a.jsonl") == (
        f"{tmp_path / 'a.jsonl'}:3: Expecting ',' delimiter at column 13; "
        'every line of .jsonl must be an object like {"text": "..."}: mend this one'
    )


def test_the_field_that_is_named_is_the_text(make, tmp_path):
    """Each field is a corpus of its own, and a text that is the same is not prepared again."""
    lines = [{"body": f"body {i}", "title": f"title {i}", "text": f"body {i}"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = {field: make(tmp_path / "a.jsonl", field=field) for field in ("text", "body", "title")}
    for field in ("title", "body"):
        found = texts(folders[field])
        assert sorted(found["train"] + found["val"]) == sorted(line[field] for line in lines)
    assert folders["body"] == folders["text"] != folders["title"]


def test_a_line_without_the_field_names_those_that_it_has(make, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "a", "titre": "b"}\n')
    assert ':1: no field "text" with a string (data.field= could be "body" or "titre"); ' in refusal(
        make, tmp_path / "a.jsonl"
    )
    said = refusal(make, tmp_path / "a.jsonl", field="id")
    assert ':1: no field "id" with a string (data.field= could be "body" or "titre"); ' in said
    assert 'like {"id": "..."}: mend this one' in said


def test_a_field_that_no_file_could_have_is_refused(make, tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 100)
    said = f"data.field=body: data.path={tmp_path / 'a.txt'} has no .jsonl to read it from; leave it out"
    assert said in refusal(make, tmp_path / "a.txt", field="body")
    assert "has tokens and no fields: leave out data.field=body" in refusal(
        make, make(tmp_path / "a.txt"), field="body"
    )


def test_a_line_that_does_not_fit_in_memory_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.LINE", 1 << 20)
    write(tmp_path, {"a.jsonl": jsonl("a" * (1 << 20))})
    assert "a.jsonl:1: it is over 1 MiB long" in refusal(make, tmp_path / "a.jsonl")


# ---- .gz


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt"])
def test_compressed_text_that_grows_is_said_with_the_files_name(tmp_path, monkeypatch, capsys, name):
    """12 MiB became 5 GB without a word. The size of other files is known."""
    monkeypatch.setattr("data.text.SAID", PIECE)
    content = b"a line\n" * (5 * PIECE // 14)  # 2.5 times as much
    if "jsonl" in name:
        content = json.dumps({"text": content.decode()}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert sum(len(piece) for _, piece in read(str(tmp_path / name))) > 2 * PIECE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (2 if name.endswith(".gz") else 0)
    assert all(str(tmp_path / name) in line for line in lines)


# ---- standard input


def test_standard_input_is_one_document_for_every_job_of_a_process(make, tmp_path):
    """As in a sweep. It is known by its content, wherever it came from."""
    write(tmp_path, {"a.txt": UNICODE})
    code = (
        "import sys; from data.prepare import *; from data.tokenizer import TokenizerConfig\n"
        "for config in (TokenizerConfig('byte'), TokenizerConfig('bpe', 270)):\n"
        "    print(prepare(DataConfig('text', '-', cache=sys.argv[1]), config))"
    )
    command = [sys.executable, "-c", code, tmp_path / "cache"]
    ended = subprocess.run(command, cwd=ROOT, input=UNICODE.encode(), capture_output=True)
    byte, bpe = map(Path, ended.stdout.decode().split())
    assert byte == make(tmp_path / "a.txt")
    assert bpe == make(tmp_path / "a.txt", TokenizerConfig("bpe", 270))
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {byte.name, bpe.name, ".lock"}
    ended = subprocess.run(command, cwd=ROOT, input=b"caf\xe9", capture_output=True)
    assert "standard input is not UTF-8 at byte offset 3" in ended.stderr.decode().splitlines()[-1]


def test_a_terminal_is_not_waited_for(tmp_path):
    _, terminal = os.openpty()
    code = f"from data.text import *; standard_input(Path({str(tmp_path)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdin=terminal, capture_output=True)
    assert b"data.path=- reads standard input, and nothing is piped into it: use data.path=- < FILE" in ended.stderr


# ---- paths


def test_a_glob_comes_back_from_links_that_lead_in_circles(make, tmp_path):
    """glob's own ** follows links: two of them in one folder took 2**40 folders."""
    folder = tmp_path / "corpus" / "deeper"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("a\n")
    for name in ("one", "two"):
        (folder / name).symlink_to(tmp_path / "corpus")
    assert texts(make(f"{tmp_path}/corpus/**/*.txt", val_fraction=0.01)) == {"train": ["a\n"], "val": []}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**", "abcd"), ("**/*.txt", "abc"), ("*/**/*.txt", "bc"), ("**/x/*", "bd"), ("**/**/y/**/*", "c"),
        ("?.*", "a"), ("x/[bd].*", "bd"), ("**/.h/*", "e"), ("**/.*", "f"),
    ],
)  # fmt: skip
def test_a_glob_matches_what_a_shell_would(make, tmp_path, pattern, names):
    files = ("a.txt", "x/b.txt", "x/y/c.txt", "x/d.log", ".h/e.txt", "x/.f")
    folder = write(tmp_path / "corpus", {name: Path(name).stem.strip(".") + "\n" for name in files})
    found = [file for file in find(f"{folder}/{pattern}", tmp_path) if isinstance(file, str)]
    assert sorted(Path(file).stem.strip(".") for file in found) == sorted(names)


def test_a_pipe_a_socket_and_a_device_are_called_what_they_are(make, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    assert f"data.path={tmp_path / 'fifo'} is a pipe, no file: use data.path=- and" in refusal(make, tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert "data.path=socket is a socket, no file: give a file" in refusal(make, "socket")
    assert "data.path=/dev/zero is a device, no file: give a file" in refusal(make, "/dev/zero")


@pytest.mark.parametrize(
    ("key", "source"), [("url", "text"), ("path", "fineweb"), ("field", "pystdlib"), ("field", "bin")]
)
def test_a_key_that_the_source_would_not_read_is_refused(tmp_path, key, source):
    data = DataConfig(source, cache=str(tmp_path), **({"path": "a"} if source == "text" else {}) | {key: "1"})
    assert f"data.{key}=1 is read with data=" in refusal(open_data, data, BYTE)


# ---- any size


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="getrusage counts the parent's memory too")
@pytest.mark.parametrize("name", ["one.txt", "many.jsonl"])
def test_memory_is_less_than_the_text_takes(tmp_path, name):
    """A whole file was held twice over, and a kilobyte of objects for each document."""
    with open(tmp_path / name, "w", encoding="utf-8") as file:
        for i in range(1 << 17):
            text = f"{i:>8} {'hello ' * 60}"
            file.write(json.dumps({"text": text}) + "\n" if name == "many.jsonl" else text * 3 + "\n")
    ended = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path / name, tmp_path / "cache"], cwd=ROOT, capture_output=True, text=True
    )
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


def test_a_full_token_file_is_followed_by_another(make, tmp_path, monkeypatch):
    """Its header counts to 2**31 - 1; a corpus larger than memory has more."""
    write(tmp_path, {"a.jsonl": jsonl(*DOCUMENTS)})
    whole = open_dataset(make(tmp_path / "a.jsonl"))
    monkeypatch.setattr(shards, "MOST_TOKENS", 1000)
    folder = make(tmp_path / "a.jsonl", cache="another")
    parts = open_dataset(folder)
    assert len(list(folder.glob("train*.bin"))) == -(-len(whole.train) // 1000) > 10
    assert np.array_equal(parts.train[:], whole.train)
    assert np.array_equal(parts.train_documents, whole.train_documents)
    assert fingerprint(parts.train, parts.train_documents) == fingerprint(whole.train, whole.train_documents)
    again = open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept"))  # a folder of shards, by their names
    for name in ("train", "val", "train_documents", "val_documents", "token_bytes"):
        assert np.array_equal(getattr(whole, name)[:], getattr(again, name)[:]), name


# ---- token shards


@pytest.mark.parametrize("lengths", [[5, 3, 4], [0, 5, 0, 0, 7, 0], [12], [1] * 12])
def test_shards_read_like_one_array(lengths):
    whole = np.arange(12, dtype=np.uint16)
    ends = np.cumsum(lengths)
    parts = Shards([whole[end - length : end] for end, length in zip(ends, lengths, strict=True)])
    assert len(parts) == 12
    for start in range(13):
        for stop in range(13):
            assert parts[start:stop].tolist() == whole[start:stop].tolist()
            assert join(parts.parts(slice(start, stop)))[:].tolist() == whole[start:stop].tolist()
    assert parts[-3:].tolist() == [9, 10, 11]
    assert parts[3:99].dtype == np.uint16


def write_shard(path: Path, ids: list[int], n_vocab: int = 50257) -> Path:
    path.parent.mkdir(exist_ok=True)
    writer = Writer(path.parent, path.stem, n_vocab)
    writer.write(np.array(ids, writer.dtype))
    writer.close()
    return path


def test_windows_across_the_border_of_two_shards_are_right(tmp_path):
    paths = [write_shard(tmp_path / f"{i}.bin", [*range(100 * i, 100 * i + 100)]) for i in range(3)]
    tokens = join([shards.read_tokens(path, "") for path in paths])
    loader = Loader(tokens, np.array([0]), batch_size=28, context_length=10, seed=0)
    x, y, _ = loader.next()  # an epoch: windows from all over the 300 tokens, which count up from 0
    assert loader.windows == 29
    assert (x.diff(dim=1) == 1).all()
    assert (y == x + 1).all()
    firsts, lasts = x[:, 0] // 100, y[:, -1] // 100
    assert (firsts != lasts).any(), "or no window crossed a border"


def test_shards_are_used_where_they_lie(tmp_path):
    write_shard(tmp_path / "bin" / "a.bin", [256, 1, 2] * 50, 257)
    dataset = open_data(DataConfig("bin", str(tmp_path / "bin")), BYTE)
    assert isinstance(dataset.train.base, np.memmap)
    assert [path.name for path in tmp_path.rglob("*")] == ["bin", "a.bin"]


def test_without_a_val_file_the_last_documents_are_for_validation(tmp_path):
    write_shard(tmp_path / "bin" / "a.bin", [256, *range(59)], 257)
    last = [256, 5, 6, 256, *range(15)]
    write_shard(tmp_path / "bin" / "b.bin", [1, 2, 256, *range(19), *last], 257)
    dataset = open_data(DataConfig("bin", str(tmp_path / "bin"), val_fraction=0.2), BYTE)
    assert (len(dataset.train), dataset.val[:].tolist()) == (82, last), (
        "from the first that begins in the last 20 of 101"
    )
    assert dataset.train_documents.tolist() == [0, 62]
    assert dataset.val_documents.tolist() == [0, 3]


def test_files_named_val_are_for_validation_wherever_they_stand(tmp_path):
    for name, ids in {"b_train": [256, 1, 2], "a_val": [3, 256, 4], "c_train": [5, 6], "d_val": [256, 7]}.items():
        write_shard(tmp_path / "bin" / f"{name}.bin", ids, 257)
    dataset = open_data(DataConfig("bin", f"{tmp_path}/**/*.bin"), BYTE)
    assert (dataset.train[:].tolist(), dataset.val[:].tolist()) == ([256, 1, 2, 5, 6], [3, 256, 4, 256, 7])
    assert (dataset.train_documents.tolist(), dataset.val_documents.tolist()) == ([0], [0, 1, 3])


def test_one_long_document_is_cut_at_the_share(tmp_path):
    write_shard(tmp_path / "bin" / "a.bin", range(100), 257)
    dataset = open_data(DataConfig("bin", str(tmp_path / "bin" / "a.bin"), val_fraction=0.1), BYTE)
    assert (len(dataset.train), dataset.val.tolist()) == (90, [*range(90, 100)])
    assert dataset.train_documents.tolist() == dataset.val_documents.tolist() == [0]


def test_shards_of_another_tokenizer_are_refused(make, tmp_path, gpt2):
    ids = [70_000, 1, 2, 70_000]
    path = write_shard(tmp_path / "bin" / "a.bin", ids, 70_001)
    assert shards.read_tokens(path, "").tolist() == ids
    said = "a.bin has token 70000, tokenizer byte has 257"
    assert said in refusal(open_data, DataConfig("bin", str(tmp_path / "bin")), BYTE)
    folder = make(write(tmp_path, {"a.txt": UNICODE}) / "a.txt")
    said = "tokenizer.json is of tokenizer byte, not of gpt2: use tokenizer=kept"
    assert said in refusal(open_data, DataConfig("bin", str(folder)), TokenizerConfig("gpt2"))


def test_too_short_a_validation_text_names_the_share():
    message = refusal(validation_batches, np.arange(8), np.array([0]), 4, 8, 100)
    assert "use a larger data.val_fraction, more text or a smaller model.context_length" in message


# ---- every source, from the command line to a sample


@pytest.fixture
def train_and_sample(call, tmp_path):
    """Train 20 steps, sample 20 tokens; returns what both printed."""

    def train_and_sample(*data: str) -> str:
        runs = f"runs={tmp_path / 'runs'}"
        trained = call(
            train, *data, f"data.cache={tmp_path / 'cache'}", *MODEL, *RUN, "steps=20", "eval_every=20",
            "checkpoint_every=20", "wandb.mode=disabled", "device=cpu", "name=x", runs,
        )  # fmt: skip
        assert trained.code == 0, trained.err
        assert "20/20" in trained.out
        sampled = call(sample, runs, "run=x", "max_new_tokens=20", "device=cpu")
        assert sampled.code == 0, sampled.err
        return trained.out + sampled.out

    return train_and_sample


@pytest.mark.parametrize("name", ["a.py", "a.md.gz", "a.jsonl"])
def test_text_of_every_kind_trains_and_samples(train_and_sample, tmp_path, name):
    content = jsonl(*DOCUMENTS) if ".jsonl" in name else "".join(DOCUMENTS).encode()
    write(tmp_path, {name: gzip.compress(content) if name.endswith(".gz") else content})
    train_and_sample("data=text", f"data.path={tmp_path / name}", "tokenizer=bpe", "tokenizer.vocab_size=300")


def test_a_run_from_standard_input_goes_on_without_it(call, small, tmp_path, monkeypatch):
    """resume=auto said "- holds no text", though the tokens lie in the cache."""
    own = [argument for argument in small if not argument.startswith("data.")]
    there = [f"data.cache={tmp_path}/cache", f"runs={tmp_path}/runs", "steps=2"]
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
    with open(tmp_path / "a.txt", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert call(train, *own, *there, "data.path=-", "name=x").code == 0
    monkeypatch.setattr(sys, "stdin", None)
    standard_input.cache_clear()  # another process has not kept it
    ended = call(train, f"runs={tmp_path}/runs", "resume=auto", "steps=3")
    assert ended.code == 0, ended.err
    (folder,) = (tmp_path / "cache").glob("text-byte-*")
    assert f"data: {folder}, " in ended.out
    ended = call(train, *own, *there, f"data.path={folder}", "tokenizer=bpe")
    assert ended.err == f"train: {folder} has tokens of tokenizer byte, not of bpe4096: use that one\n"


def test_a_validation_text_that_has_changed_is_said_on_resume(call, small, tmp_path):
    own = [argument for argument in small if not argument.startswith("data")]
    folder, runs = tmp_path / "tokens", f"runs={tmp_path}/runs"
    write_shard(folder / "train.bin", [i % 200 for i in range(5000)])
    write_shard(folder / "val.bin", [i % 200 for i in range(1000)])
    there = [*own, "data=bin", f"data.path={folder}", "tokenizer=byte", runs, "name=x"]
    assert call(train, *there, "steps=2").code == 0
    said = "the validation text has changed since the checkpoint"
    assert said not in call(train, "resume=auto", "steps=3", runs).out
    write_shard(folder / "val.bin", [i % 200 for i in range(1100)])
    assert said in call(train, "resume=auto", "steps=4", runs).out
    assert said not in call(train, "resume=auto", "steps=5", runs).out


def test_shards_train_and_sample(train_and_sample, make, tmp_path):
    folder = make(write(tmp_path, {"a.jsonl": jsonl(*DOCUMENTS)}) / "a.jsonl")
    train_and_sample("data=bin", f"data.path={folder}")


def test_fineweb_trains_and_samples(train_and_sample, serve, gpt2, tmp_path):  # noqa: F811
    folder = tmp_path / "served"
    encoding = build(TokenizerConfig("gpt2"), ())
    for name in ("val_000000", "train_000001", "train_000002", "train_000003"):
        ids = [encoding.eot_token, *encode(encoding, name + UNICODE).tolist()]
        write_shard(folder / f"fineweb_{name}.bin", ids)
    server = serve(of_folder(folder, "datasets/kjj0/fineweb10B-gpt2"))
    train_and_sample("data=fineweb", "data.shards=2")
    asked = [path.rpartition("/")[2] for path, _ in server.asked]
    assert sorted(asked) == ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]


def test_a_page_instead_of_a_shard_is_refused(serve, gpt2, tmp_path):  # noqa: F811
    serve(lambda request: honest(request, b"<html>" * 1000))
    assert "is no token file" in refusal(open_data, DataConfig("fineweb", cache=str(tmp_path)), TokenizerConfig("gpt2"))


VERSES = "".join(
    f"Speaker {i}:\n{'So long lives this, ' * (i % 7)}and this gives life to thee.\n\n" for i in range(900)
)


@pytest.fixture
def shakespeare(serve, monkeypatch) -> str:  # noqa: F811
    """The address of another text in the place of tinyshakespeare, which has to be downloaded."""
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", hashlib.sha256(VERSES.encode()).hexdigest())
    return serve(lambda request: honest(request, VERSES.encode())).url


def test_shakespeare_trains_and_samples(train_and_sample, shakespeare):
    train_and_sample("data=shakespeare", f"data.url={shakespeare}")


def test_shakespeare_is_split_as_nanogpt_does_to_the_nearest_line(shakespeare, tmp_path, call):
    assert "val_fraction: 0.1" in (ROOT / "conf/data/shakespeare.yaml").read_text(encoding="utf-8")
    data = DataConfig("shakespeare", url=shakespeare, val_fraction=0.1, cache=str(tmp_path / "cache"))
    (train_text,), (val_text,) = texts(prepare.prepare(data, BYTE)).values()
    assert train_text + val_text == VERSES
    theirs = int(0.9 * len(VERSES))
    assert 0 <= len(train_text) - theirs <= VERSES[theirs:].index("\n") + 1
    assert train_text.endswith("\n")
