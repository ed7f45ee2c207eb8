"""Where text comes from: .jsonl, .gz, standard input, token shards; of any size, and all the way to a sample."""

import gzip
import hashlib
import json
import os
import random
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
from data.text import PIECE, counted, read, standard_input
from data.tokenizer import TokenizerConfig, build, encode
from tests.test_download import honest, of_folder, serve  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[1]
BYTE = TokenizerConfig("byte")
# Every length of UTF-8, a joined emoji, and what no text editor leaves at the end: no line end.
UNICODE = (
    "caf\u00e9 \u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f4bb \u0928\u092e\u0938\u094d\u0924\u0947\n" * 40
    + "\u20ac"
)


def test_one_of_something_is_singular():
    assert [counted(n, "token") for n in (0, 1, 2, 1000)] == ["0 tokens", "1 token", "2 tokens", "1,000 tokens"]
    assert [counted(n, "pass", "passes") for n in (1, 2)] == ["1 pass", "2 passes"]


@pytest.fixture
def make(tmp_path):
    """make(path): the folder that `path` is prepared in."""

    def make(path: Path | str, tokenizer: TokenizerConfig = BYTE, **options: object) -> Path:
        data = DataConfig("text", str(path), cache=str(tmp_path / "cache"), **options)
        return prepare.prepare(data, tokenizer)

    return make


def refusal(function, *arguments, **options) -> str:
    """The message of the ValueError that this call raises: one line."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def texts(folder: Path) -> list[str]:
    """The documents of a prepared folder, training's first."""
    dataset = open_dataset(folder)
    end = dataset.encoding.eot_token
    found = []
    for tokens, starts in ((dataset.train, dataset.train_documents), (dataset.val, dataset.val_documents)):
        for part in np.split(tokens, starts)[1:]:
            assert part[0] == end
            found.append(dataset.encoding.decode_bytes(part[1:].tolist()).decode())
    return found


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(documents)))
    return path


# ---- .jsonl


DOCUMENTS = [f"document {i}\n\n{UNICODE}" for i in range(40)]


def test_each_line_of_jsonl_is_a_document(make, tmp_path):
    assert sorted(texts(make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))) == sorted(DOCUMENTS)


def test_jsonl_is_the_same_corpus_as_its_documents_in_files(make, tmp_path):
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / f"{i:02d}.txt").write_bytes(text.encode())
    folder = make(f"{tmp_path}/*.txt")
    assert make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)) == folder, "known by its content, it is not made again"


def test_a_folder_of_text_takes_jsonl_and_gz_too(make, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", DOCUMENTS[:20])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(tmp_path / "b", DOCUMENTS[20:]).read_bytes()))
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"text\n"))
    (folder / "d.tar.gz").write_bytes(b"not text")
    assert sorted(texts(make(folder))) == sorted([*DOCUMENTS, "text\n"])


def test_blank_lines_empty_texts_and_repeats_are_no_documents(make, tmp_path):
    lines = ['{"text": "a"}', "", '{"text": ""}', "  ", '{"text": "a", "id": 2}', '{"text": "b"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert sorted(texts(make(tmp_path / "a.jsonl", val_fraction=0.5))) == ["a", "b"]


def test_a_document_longer_than_a_piece_is_whole(make, tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.PIECE", 64)
    assert sorted(texts(make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))) == sorted(DOCUMENTS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "Expecting ',' delimiter at column 13"),
        (b"plain text", "Expecting value at column 1"),
        (b'["text"]', 'no field "text" with a string'),
        (b'{"content": "a"}', 'no field "text" with a string'),
        (b'{"text": null}', 'no field "text" with a string'),
        (b'{"text": "\xe9"}', "can't decode byte 0xe9"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
        (b'{"a": ' + b"[" * 100_000, "recursion"),
        (b'{"text": ' + b"9" * 5000 + b"}", "4300"),
        ('{"text": "a"}'.encode("utf-16"), "can't decode byte 0xff"),
    ],
)
def test_a_bad_line_is_named_with_its_number(make, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' * 2 + line + b"\n")
    found = refusal(make, tmp_path / "a.jsonl")
    assert f"{tmp_path / 'a.jsonl'}:3: " in found
    assert message in found
    assert 'every line of .jsonl must be an object like {"text": "..."}: mend this one' in found


def test_the_field_that_is_named_is_the_text(make, tmp_path):
    """Each field is a corpus of its own, and a text that is the same is not prepared again."""
    lines = [{"body": f"body {i}", "title": f"title {i}", "text": f"body {i}"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = {field: make(tmp_path / "a.jsonl", field=field) for field in ("text", "body", "title")}
    assert sorted(texts(folders["title"])) == sorted(line["title"] for line in lines)
    assert sorted(texts(folders["body"])) == sorted(line["body"] for line in lines)
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
    write_jsonl(tmp_path / "a.jsonl", ["a" * (1 << 20)])
    assert "a.jsonl:1: it is over 1 MiB long" in refusal(make, tmp_path / "a.jsonl")


# ---- .gz


def test_compressed_text_is_the_same_corpus(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(UNICODE.encode())
    (tmp_path / "b.TXT.GZ").write_bytes(gzip.compress(UNICODE.encode()[:700]) + gzip.compress(UNICODE.encode()[700:]))
    assert make(tmp_path / "b.TXT.GZ") == make(tmp_path / "a.txt")


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


@pytest.mark.parametrize("damage", ["cut", "flipped", "none at all"])
def test_a_damaged_gz_is_refused(make, tmp_path, damage):
    whole = bytearray(gzip.compress(random.Random(0).randbytes(1000).hex().encode()))
    if damage == "flipped":
        whole[len(whole) // 2] ^= 255
    content = {"cut": whole[:-100], "flipped": whole, "none at all": b"text"}[damage]
    (tmp_path / "a.txt.gz").write_bytes(content)
    assert f"{tmp_path / 'a.txt.gz'} cannot be decompressed" in refusal(make, tmp_path / "a.txt.gz")


# ---- standard input


def pipe(content: bytes, cache: Path, *more: str) -> subprocess.CompletedProcess:
    """Prepare what is piped in, twice, as a sweep would, in a process of its own."""
    code = (
        "import sys; from data.prepare import *; from data.tokenizer import TokenizerConfig\n"
        "for kind in ('byte', 'bpe'):\n"
        "    config = TokenizerConfig(kind, 270 if kind == 'bpe' else None)\n"
        "    print(prepare(DataConfig('text', '-', cache=sys.argv[1]), config))"
    )
    return subprocess.run([sys.executable, "-c", code, cache], cwd=ROOT, input=content, capture_output=True)


def test_standard_input_is_one_document_for_every_job_of_a_process(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(UNICODE.encode())
    ended = pipe(UNICODE.encode(), tmp_path / "cache")
    byte, bpe = map(Path, ended.stdout.decode().split())
    assert byte == make(tmp_path / "a.txt"), "known by its content, wherever it came from"
    assert bpe == make(tmp_path / "a.txt", TokenizerConfig("bpe", 270))
    assert "".join(texts(bpe)) == UNICODE
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {byte.name, bpe.name, ".lock"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "- holds no text"),
        (b"caf\xe9", "standard input is not UTF-8 at byte offset 3"),
        (b"\0", "has a zero byte"),
    ],
)
def test_what_is_piped_in_is_checked_like_a_file(tmp_path, content, message):
    assert message in pipe(content, tmp_path / "cache").stderr.decode().splitlines()[-1]


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
    assert texts(make(f"{tmp_path}/corpus/**/*.txt", val_fraction=0.01)) == ["a\n"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**", "abcd"), ("**/*.txt", "abc"), ("*/**/*.txt", "bc"), ("**/x/*", "bd"), ("**/**/y/**/*", "c"),
        ("?.*", "a"), ("x/[bd].*", "bd"), ("**/.h/*", "e"), ("**/.*", "f"),
    ],
)  # fmt: skip
def test_a_glob_matches_what_a_shell_would(make, tmp_path, pattern, names):
    for name in ("a.txt", "x/b.txt", "x/y/c.txt", "x/d.log", ".h/e.txt", "x/.f"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem.strip(".") + "\n")
    found = "".join(texts(make(f"{tmp_path}/corpus/{pattern}")))
    assert sorted(found.replace("\n", "")) == sorted(names)


def test_a_pipe_a_socket_and_a_device_are_called_what_they_are(make, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    assert f"data.path={tmp_path / 'fifo'} is a pipe, no file: use data.path=- and" in refusal(make, tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert "data.path=socket is a socket, no file: give a file" in refusal(make, "socket")
    assert "data.path=/dev/zero is a device, no file: give a file" in refusal(make, "/dev/zero")


@pytest.mark.parametrize(
    ("key", "source"),
    [("url", "text"), ("shards", "shakespeare"), ("path", "fineweb"), ("field", "pystdlib"), ("field", "bin")],
)
def test_a_key_that_the_source_would_not_read_is_refused(tmp_path, key, source):
    data = DataConfig(source, cache=str(tmp_path), **({"path": "a"} if source == "text" else {}) | {key: "1"})
    assert f"data.{key}=1 is read with data=" in refusal(open_data, data, BYTE)


# ---- any size


def test_the_number_of_threads_changes_nothing(make, tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.PIECE", 100)
    monkeypatch.setattr(prepare, "PIECE", 100)
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(prepare, "THREADS", threads)
        data = DataConfig("text", str(tmp_path / "a.jsonl"), cache=str(tmp_path / f"{threads}"))
        folder = prepare.prepare(data, TokenizerConfig("bpe", 300))
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert found[0] == found[1] == found[2]


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
    documents = [f"{'ab' if i % 2 else 'xy'} {i}" for i in range(1000)]
    write_jsonl(tmp_path / "a.jsonl", documents)
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
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    whole = open_dataset(make(tmp_path / "a.jsonl"))
    monkeypatch.setattr(shards, "MOST_TOKENS", 1000)
    data = DataConfig("text", str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache2"))
    folder = prepare.prepare(data, BYTE)
    parts = open_dataset(folder)
    assert len(list(folder.glob("train*.bin"))) == -(-len(whole.train) // 1000) > 10
    assert np.array_equal(parts.train[:], whole.train)
    assert np.array_equal(parts.train_documents, whole.train_documents)
    assert fingerprint(parts.train, parts.train_documents) == fingerprint(whole.train, whole.train_documents)
    again = open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept"))
    assert np.array_equal(again.train[:], whole.train), "in the order of their names, too"


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


def test_a_prepared_folder_is_a_folder_of_shards(make, tmp_path):
    folder = make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), TokenizerConfig("bpe", 300))
    ours, theirs = open_dataset(folder), open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept"))
    for name in ("train", "val", "train_documents", "val_documents", "token_bytes"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


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


def test_a_shard_in_32_bits_is_read(tmp_path):
    ids = [70_000, 1, 2, 70_000]
    path = write_shard(tmp_path / "bin" / "a.bin", ids, 70_001)
    assert np.fromfile(path, "<i4", 3).tolist() == [20240801, 7, 4]
    assert shards.read_tokens(path, "").tolist() == ids
    assert "a.bin has token 70000, tokenizer byte has 257" in refusal(
        open_data, DataConfig("bin", str(tmp_path / "bin")), BYTE
    )


def test_shards_of_another_tokenizer_are_refused(make, tmp_path, gpt2):
    folder = make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    data = DataConfig("bin", str(folder))
    assert "tokenizer.json is of tokenizer byte, not of gpt2: use tokenizer=kept" in refusal(
        open_data, data, TokenizerConfig("gpt2")
    )
    assert "tokenizer=bpe learns from text" in refusal(open_data, data, TokenizerConfig("bpe"))
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing: name the tokenizer" in refusal(open_data, data, TokenizerConfig("kept"))


def test_no_shards_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "no.bin", "-"):
        assert f"data.path={path} has no .bin files" in refusal(open_data, DataConfig("bin", str(path)), BYTE)
    write_shard(tmp_path / "bin" / "val.bin", [1, 2], 257)
    assert "only val.bin: take in the others too" in refusal(open_data, DataConfig("bin", str(tmp_path / "bin")), BYTE)


def test_a_shard_cut_short_is_refused_and_nobody_is_told_to_delete_the_folder(tmp_path):
    path = write_shard(tmp_path / "bin" / "a.bin", range(100), 257)
    os.truncate(path, 1024 + 99)
    message = refusal(open_data, DataConfig("bin", str(tmp_path / "bin")), BYTE)
    assert message == f"{path} has 49 tokens and 1 byte, its header says 100: make or download it again"


def test_a_kept_tokenizer_is_for_shards_only(make, tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    assert "tokenizer=kept is the tokenizer.json beside data=bin" in refusal(
        make, tmp_path / "a.txt", TokenizerConfig("kept")
    )


def test_too_short_a_validation_text_names_the_share():
    message = refusal(validation_batches, np.arange(8), np.array([0]), 4, 8, 100)
    assert "use a larger data.val_fraction, more text or a smaller model.context_length" in message


# ---- bytes are counted exactly


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_bytes_of_a_split_are_those_of_its_text(make, tmp_path, gpt2, kind):
    """What makes bits per byte comparable: the same splits of the same text have as many bytes in every tokenizer,
    whatever pieces of characters its tokens are."""
    config = TokenizerConfig(kind, 300 if kind == "bpe" else None)
    dataset = open_dataset(make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), config))
    byte = open_dataset(make(tmp_path / "a.jsonl"))
    for split in ("train", "val"):
        tokens = getattr(dataset, split)
        length = int(dataset.token_bytes[tokens].sum())
        assert length == byte.manifest[split]["bytes"] == len(dataset.encoding.decode_bytes(
            [int(token) for token in tokens if token != dataset.encoding.eot_token]))  # fmt: skip
        assert length == (getattr(byte, split) != 256).sum()


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


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.md.gz", "a.jsonl", "a.jsonl.gz"])
def test_text_of_every_kind_trains_and_samples(train_and_sample, tmp_path, name):
    if ".jsonl" in name:
        content = write_jsonl(tmp_path / "plain", DOCUMENTS).read_bytes()
    else:
        content = "".join(DOCUMENTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    train_and_sample("data=text", f"data.path={tmp_path / name}", "tokenizer=bpe", "tokenizer.vocab_size=300")


def test_standard_input_trains_and_samples(train_and_sample, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
    with open(tmp_path / "a.txt", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        train_and_sample("data=text", "data.path=-")


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
    folder = make(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
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


def test_fineweb_has_so_many_shards_and_no_more(tmp_path):
    for number in (0, 104):
        data = DataConfig("fineweb", shards=number, cache=str(tmp_path))
        assert f"data.shards={number} is outside 1 to 103" in refusal(open_data, data, TokenizerConfig("gpt2"))


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
    train_text, val_text = texts(prepare.prepare(data, BYTE))
    assert train_text + val_text == VERSES
    theirs = int(0.9 * len(VERSES))
    assert 0 <= len(train_text) - theirs <= VERSES[theirs:].index("\n") + 1
    assert train_text.endswith("\n")
