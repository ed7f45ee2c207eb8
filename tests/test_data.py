"""Text to token files to batches: every byte arrives, the order can be computed for any step, and damage is noticed."""

import errno
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from data import corpus as corpora
from data import prepare as prepare_module
from data import text as text_module
from data.dataset import open_dataset, read_manifest
from data.loader import Loader, fingerprint, make_batch, validation_batches
from data.prepare import MANIFEST, DataConfig, prepare
from data.shards import Writer, join, read_tokens
from data.tokenizer import TokenizerConfig, byte_encoding
from tests.processes import shown_on_a_terminal

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
BYTE = TokenizerConfig("byte")
END_OF_TEXT = 256


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A hundred small files of text."""
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    for i in range(100):
        name = f"deeper/{i}.md" if i % 2 else f"{i}.txt"
        (folder / name).write_bytes(f"Text {i}.\r\n".encode() * (i % 7 + 1) + "caf\u00e9\n".encode())
    return folder


@pytest.fixture
def make(tmp_path: Path):
    """Prepare `path` with a cache of the test's own."""

    def make(path: Path | str, tokenizer: TokenizerConfig = BYTE, **options: object) -> Path:
        data = DataConfig("text", str(path), cache=str(tmp_path / "cache"), **options)
        return prepare(data, tokenizer)

    return make


def refusal(function, *arguments, **options) -> str:
    """The message of the ValueError that this call raises: one line."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents_of(tokens: np.ndarray) -> list[bytes]:
    """The documents in byte tokens."""
    ends = [*np.flatnonzero(tokens == END_OF_TEXT), len(tokens)]
    return [tokens[a + 1 : b].astype(np.uint8).tobytes() for a, b in pairwise(ends)]


# ---- prepare


def test_every_byte_of_every_document_arrives_once(corpus, make):
    dataset = open_dataset(make(corpus))
    found = documents_of(dataset.train) + documents_of(dataset.val)
    assert sorted(found) == sorted(file.read_bytes() for file in corpus.rglob("*.*"))


def test_documents_begin_with_end_of_text_where_their_starts_say(corpus, make):
    dataset = open_dataset(make(corpus))
    for tokens, starts in ((dataset.train, dataset.train_documents), (dataset.val, dataset.val_documents)):
        assert starts.tolist() == np.flatnonzero(tokens == END_OF_TEXT).tolist()


@pytest.mark.parametrize("tokenizer", [BYTE, TokenizerConfig("bpe", 270)])
def test_bytes_of_the_tokens_are_exactly_the_bytes_of_the_text(corpus, make, tokenizer):
    dataset = open_dataset(make(corpus, tokenizer))
    for name, tokens in (("train", dataset.train), ("val", dataset.val)):
        assert dataset.token_bytes[tokens].sum() == dataset.manifest[name]["bytes"]


def test_manifest_counts_what_is_there(corpus, make):
    dataset = open_dataset(make(corpus))
    for name, tokens in (("train", dataset.train), ("val", dataset.val)):
        documents = documents_of(tokens)
        assert dataset.manifest[name] == {
            "tokens": len(tokens),
            "bytes": sum(map(len, documents)),
            "documents": len(documents),
            "dtype": "uint16",
        }


def test_validation_takes_its_share_in_whole_documents(corpus, make):
    dataset = open_dataset(make(corpus, val_fraction=0.1))
    texts = {file.read_bytes() for file in corpus.rglob("*.*")}
    share = 0.1 * sum(map(len, texts))
    assert set(documents_of(dataset.val)) <= texts
    assert share - min(map(len, texts)) < dataset.manifest["val"]["bytes"] <= share


def test_split_depends_on_content_and_not_on_names(corpus, make):
    before = documents_of(open_dataset(make(corpus)).val)
    for i, file in enumerate(sorted(corpus.glob("*.txt"))):
        file.rename(file.with_name(f"renamed-{97 * i % 50}.txt"))
    assert sorted(documents_of(open_dataset(make(corpus)).val)) == sorted(before)


def test_a_single_document_gives_its_last_lines_to_validation(tmp_path, make):
    lines = [b"line %d \xe2\x82\xac\n" % i for i in range(1000)]
    (tmp_path / "one.txt").write_bytes(b"".join(lines))
    dataset = open_dataset(make(tmp_path / "one.txt"))
    train, val = documents_of(dataset.train) + documents_of(dataset.val)
    assert train + val == b"".join(lines)
    assert val.startswith(b"line ")
    assert 0.05 * 1000 - 1 <= val.count(b"\n") <= 0.05 * 1000 + 1


def test_a_single_line_is_cut_between_characters(tmp_path, make):
    (tmp_path / "line.txt").write_bytes("\u20ac".encode() * 100)
    dataset = open_dataset(make(tmp_path / "line.txt"))
    assert [text.decode() for text in documents_of(dataset.val)] == ["\u20ac" * 5]


def test_a_few_large_documents_still_leave_the_share_to_validation(tmp_path, make):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i}\n" * 1000)
    manifest = read_manifest(make(tmp_path))
    assert (manifest["train"]["bytes"], manifest["val"]["bytes"]) == (5700, 300)


def test_repeated_documents_are_on_one_side_only(tmp_path, make):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i // 2}\n")
    dataset = open_dataset(make(tmp_path, val_fraction=0.5))
    found = documents_of(dataset.train) + documents_of(dataset.val)
    assert sorted(found) == [b"text %d\n" % i for i in range(10)]
    assert dataset.manifest["left_out"] == 10


def test_a_byte_order_mark_is_no_text(tmp_path, make):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello\n" * 2)
    dataset = open_dataset(make(tmp_path / "bom.txt", val_fraction=0.01))
    assert documents_of(dataset.train) == [b"hello\n\xef\xbb\xbfhello\n"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_longer_than_a_piece_is_whole(tmp_path, make, monkeypatch, encoding):
    monkeypatch.setattr(prepare_module, "PIECE", 64)
    monkeypatch.setattr(text_module, "PIECE", 64)
    text = ("\u20ac" * 200 + "\nshort\n") * 50
    (tmp_path / "long.txt").write_bytes(text.encode(encoding))
    dataset = open_dataset(make(tmp_path / "long.txt", TokenizerConfig("bpe", 260)))
    tokens = [*dataset.train[1:].tolist(), *dataset.val[1:].tolist()]
    assert dataset.encoding.decode(tokens) == text


def test_a_million_spaces_are_only_text(tmp_path, make):
    """The tokenizers' regular expressions give up at a million spaces before a letter; pieces keep clear of that."""
    (tmp_path / "spaces.txt").write_bytes(b"a" + b" " * 1_100_000 + b"a")
    assert read_manifest(make(tmp_path / "spaces.txt", TokenizerConfig("bpe", 257)))["train"]["bytes"] == 1_045_002


def test_the_tokenizer_does_not_learn_from_validation_text(tmp_path, make):
    (tmp_path / "one.txt").write_text("ab\n" * 1000 + "xyxy" * 30 + "\n")
    ranks = open_dataset(make(tmp_path / "one.txt", TokenizerConfig("bpe", 258))).encoding._mergeable_ranks
    assert b"ab" in ranks
    assert not any(b"x" in token for token in ranks if len(token) > 1)


def test_token_files_are_in_the_format_of_llm_c(corpus, make):
    raw = (make(corpus) / "train.bin").read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:3].tolist() == [20240520, 1, (len(raw) - 1024) // 2]
    assert not header[3:].any()
    assert np.frombuffer(raw[1024:], "<u2")[0] == END_OF_TEXT


def test_large_vocabularies_are_written_in_32_bits(corpus, make, monkeypatch):
    ranks = {bytes([b]): b for b in range(256)} | {b"%d " % i: i for i in range(256, 1 << 16)}
    special = {"<|endoftext|>": 1 << 16}
    large = tiktoken.Encoding("large", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(prepare_module, "build", lambda config, texts: large)
    folder = make(corpus)
    header = np.fromfile(folder / "train.bin", "<i4", 3)
    assert header.tolist() == [20240801, 7, read_manifest(folder)["train"]["tokens"]]
    tokens = open_dataset(folder).train
    assert (tokens.dtype, tokens[0]) == (np.uint32, 1 << 16)


def test_hidden_files_and_other_suffixes_are_no_part_of_a_folder(corpus, make):
    before = make(corpus)
    (corpus / ".hidden").mkdir()
    for name in (".secret.txt", ".hidden/a.txt", "weights.bin"):
        (corpus / name).write_bytes(b"\0no text")
    assert make(corpus) == before


def test_empty_files_in_a_folder_are_passed_over(corpus, make):
    before = make(corpus)
    (corpus / "empty.txt").touch()
    assert make(corpus) == before


def test_a_glob_takes_what_it_matches(corpus, make):
    (corpus / "a.log").write_text("a log\n")
    manifest = read_manifest(make(f"{corpus}/**/*.[lm][od]*"))
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 1 + 50
    assert read_manifest(make(f"{corpus}/*.log"))["train"]["bytes"] == 6


def test_prepared_text_is_not_prepared_again(corpus, make, monkeypatch):
    before = make(corpus)
    monkeypatch.setattr(prepare_module, "write", None)
    assert make(corpus) == before


def test_a_changed_text_has_a_folder_of_its_own(corpus, make):
    before = make(corpus)
    (corpus / "0.txt").write_text("changed\n")
    assert make(corpus) != before


@pytest.mark.parametrize("options", [{"tokenizer": TokenizerConfig("bpe", 260)}, {"val_fraction": 0.1}])
def test_other_options_have_a_folder_of_their_own(corpus, make, options):
    assert make(corpus, **options) != make(corpus)


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_a_vocabulary_size_for_a_tokenizer_that_has_its_own_is_refused(kind):
    with pytest.raises(ValueError, match=f"tokenizer.vocab_size=300: tokenizer={kind} has its own"):
        TokenizerConfig(kind, vocab_size=300)


def test_the_same_text_elsewhere_has_the_same_bytes(corpus, make, tmp_path):
    files = {file.name: file.read_bytes() for file in make(corpus, TokenizerConfig("bpe", 270)).iterdir()}
    corpus.rename(tmp_path / "elsewhere")
    again = prepare(
        DataConfig("text", str(tmp_path / "elsewhere"), cache=str(tmp_path / "cache2")),
        TokenizerConfig("bpe", 270),
    )
    assert {name for name, content in files.items() if (again / name).read_bytes() != content} == {MANIFEST}


def run(corpus: Path, cache: Path, before: str = "") -> subprocess.Popen:
    """Prepare in another process, which first executes `before`."""
    code = f"""
import os
from data import prepare as m
from data.tokenizer import TokenizerConfig
{before}
print(m.prepare(m.DataConfig("text", {str(corpus)!r}, cache={str(cache)!r}), TokenizerConfig("byte")))
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_at_once_make_one_folder(corpus, tmp_path):
    processes = [run(corpus, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert outputs[0][0] == outputs[1][0]
    assert sum("training and" in errors for _, errors in outputs) == 1, "one does the work, the other waits"
    open_dataset(Path(outputs[0][0].strip()))


def test_a_process_that_died_leaves_nothing_that_matters(corpus, make, tmp_path):
    cache = tmp_path / "cache"
    run(corpus, cache, before="m.sync_and_hash = lambda file: os._exit(9)").communicate()
    assert [path.suffix for path in cache.glob("text-*")] == [".tmp"]
    open_dataset(make(corpus))
    assert [path.suffix for path in cache.glob("text-*")] == [""]


def test_a_file_that_changes_meanwhile_is_noticed(corpus, make, monkeypatch):
    def scan_then_change(*arguments):
        found = corpora.scan(*arguments)
        with open(corpus / "0.txt", "a") as file:
            file.write("one more line\n")
        return found

    monkeypatch.setattr(prepare_module, "scan", scan_then_change)
    assert "0.txt changed while it was being prepared: run again" in refusal(make, corpus)
    assert "0.txt changed while it was being prepared" in refusal(make, corpus, TokenizerConfig("bpe", 260))


def test_one_line_says_what_was_made(corpus, tmp_path, capsys):
    folder = prepare(DataConfig("text", str(corpus), cache=str(tmp_path / "cache")), BYTE)
    out, err = capsys.readouterr()
    manifest = read_manifest(folder)
    assert (out, err.count("\n")) == ("", 1)
    assert f"{manifest['train']['tokens']:,} training" in err
    assert str(folder) in err


def test_a_terminal_is_shown_a_bar(corpus, tmp_path):
    code = (
        "from data.prepare import *; "
        f"prepare(DataConfig('text', {str(corpus)!r}, cache={str(tmp_path / 'cache')!r}), TokenizerConfig('bpe', 260))"
    )
    shown = shown_on_a_terminal([sys.executable, "-c", code], "stderr", columns=100)
    assert "learning the tokenizer" in shown
    assert "encoding" in shown


def test_the_standard_library_is_prepared_without_its_tests(tmp_path):
    folder = prepare(DataConfig(cache=str(tmp_path / "cache")), BYTE)
    dataset = open_dataset(folder)
    documents = documents_of(dataset.train) + documents_of(dataset.val)
    assert Path(os.__file__).read_bytes() in documents
    assert not any(b"import unittest\n" in text and b"\nclass Test" in text for text in documents)
    assert sum(map(len, documents)) > 5_000_000


def test_preparing_needs_no_torch():
    code = "import sys, data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_tinyshakespeare_splits_at_a_line():
    if not SHAKESPEARE.exists():
        pytest.skip(f"{SHAKESPEARE} is not there")
    corpus = corpora.scan([str(SHAKESPEARE)], "text", "")
    corpus.split(0.05)
    assert corpus.cut == (0, 1_059_636)
    assert SHAKESPEARE.read_bytes()[1_059_635:1_059_636] == b"\n"


# ---- what prepare refuses


def test_text_without_a_path_is_refused(tmp_path):
    assert "data.path=FILE" in refusal(prepare, DataConfig("text", cache=str(tmp_path)), BYTE)


def test_a_path_that_would_be_ignored_is_refused(tmp_path):
    message = refusal(prepare, DataConfig("pystdlib", "my.txt", cache=str(tmp_path)), BYTE)
    assert "data.path=my.txt is read with data=text or data=bin only: choose that, or leave it out" in message


def test_a_path_that_leads_nowhere_is_refused(make):
    assert "data.path=no/such/file.txt does not exist" in refusal(make, "no/such/file.txt")


def test_a_glob_that_matches_nothing_is_refused(make, tmp_path):
    assert f"data.path={tmp_path}/*.nothing matches no file" in refusal(make, f"{tmp_path}/*.nothing")


def test_a_folder_without_text_is_refused(make, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    assert f"data.path={tmp_path} has no .txt, .md, .py" in refusal(make, tmp_path)


def test_an_empty_file_is_refused(make, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert f"{tmp_path / 'empty.txt'} holds no text" in refusal(make, tmp_path / "empty.txt")
    assert f"{tmp_path} holds no text" in refusal(make, tmp_path)


def test_a_binary_file_is_refused(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text\0")
    assert f"{tmp_path / 'a.txt'} has a zero byte at offset 4" in refusal(make, tmp_path / "a.txt")


def test_text_that_is_not_utf8_is_refused_with_the_place(make, corpus):
    (corpus / "latin.txt").write_bytes("caf\u00e9 au lait".encode("latin1"))
    assert f"{corpus / 'latin.txt'} is not UTF-8 at byte offset 3 (0xe9)" in refusal(make, corpus / "latin.txt")


def test_of_a_folder_what_is_not_text_is_left_out_and_counted(make, corpus, tmp_path, capsys):
    """One file that was not UTF-8 stopped the folder, one file an attempt; other files were left out without a word;
    repeats were counted as files that may not be UTF-8."""
    whole = make(corpus)
    (corpus / "repeat.txt").write_bytes((corpus / "0.txt").read_bytes())
    for name in ("latin1.txt", "latin2.txt"):
        (corpus / name).write_bytes(b"line\n" * 200_000 + b"caf\xe9")  # noticed late
    (corpus / "picture.png").touch()
    assert prepare(DataConfig("text", str(corpus), cache=str(tmp_path / "new")), TokenizerConfig()).name == whole.name
    names = tmp_path / "new" / whole.name / "not_text.txt"
    said = f"(left out: 2 not UTF-8 (listed in {names}), 1 repeating another, 1 with a suffix that is not read)"
    assert said in capsys.readouterr().err
    prepare(DataConfig("text", str(corpus), cache=str(tmp_path / "new")), TokenizerConfig())
    assert said in capsys.readouterr().err  # also where the tokens are there already
    assert [line.split(" is not")[0] for line in names.read_text().splitlines()] == [
        str(corpus / name) for name in ("latin1.txt", "latin2.txt")
    ]
    for file in filter(Path.is_file, corpus.rglob("*")):
        file.unlink()
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    assert "latin.txt is not UTF-8" in refusal(make, corpus)


def test_a_full_disk_is_named_and_nothing_is_left_on_it(make, corpus, tmp_path, monkeypatch):
    """[Errno 28] came without a path, and the unfinished folder stayed and kept the disk full."""

    def full(self, ids):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "write", full)
    with pytest.raises(OSError, match=r"could not be written to .*cache \(No space left on device\): free some space"):
        make(corpus)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_offsets_are_those_in_the_file_however_long_it_is(make, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"line\n" * 200_000 + b"\xe9")
    assert "is not UTF-8 at byte offset 1000003 (0xe9)" in refusal(make, tmp_path / "a.txt")


def test_a_refused_tokenizer_leaves_no_folder(make, corpus, tmp_path):
    assert "vocab_size=50000" in refusal(make, corpus, TokenizerConfig("bpe", 50000))
    assert list((tmp_path / "cache").glob("text-*")) == []


# ---- what open_dataset refuses


def test_a_token_file_cut_short_is_refused(corpus, make):
    folder = make(corpus)
    count = read_manifest(folder)["train"]["tokens"]
    os.truncate(folder / "train.bin", 1024 + 2 * (count - 3))
    message = refusal(open_dataset, folder)
    assert f"train.bin has {count - 3} tokens, its header says {count}: delete {folder} and run again" in message


def test_a_token_file_with_half_a_token_is_refused(corpus, make):
    folder = make(corpus)
    with open(folder / "val.bin", "ab") as file:
        file.write(b"x")
    assert "its header says" in refusal(open_dataset, folder)


@pytest.mark.parametrize("content", [b"", b"not tokens", bytes(4096)])
def test_a_file_that_holds_no_tokens_is_refused(corpus, make, content):
    folder = make(corpus)
    (folder / "train.bin").write_bytes(content)
    assert "train.bin is no token file" in refusal(open_dataset, folder)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train_documents.npy", "val_documents.npy", "tokenizer.json"])
def test_an_edited_file_is_refused(corpus, make, name):
    folder = make(corpus)
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)
    assert f"{folder / name} was edited since it was made: delete {folder}" in refusal(open_dataset, folder)


@pytest.mark.parametrize("name", ["train.bin", "val_documents.npy", "tokenizer.json", MANIFEST])
def test_a_missing_file_is_refused(corpus, make, name):
    folder = make(corpus)
    (folder / name).unlink()
    assert f"delete {folder} and run again" in refusal(open_dataset, folder)


@pytest.mark.parametrize("content", ["", "{", '{"version": 0}'])
def test_a_manifest_of_another_kind_is_refused(corpus, make, content):
    folder = make(corpus)
    (folder / MANIFEST).write_text(content)
    assert "run again" in refusal(open_dataset, folder)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("draw", ["train", "validate", "hash"])
def test_a_file_of_tokens_that_is_cut_while_it_is_in_use_is_named(tmp_path, files, draw):
    """Reading a mapping past the end of its file ends the process with SIGBUS, without a word."""
    paths = [tmp_path / f"{number}.bin" for number in range(files)]
    for path in paths:
        writer = Writer(tmp_path, path.stem, 257)
        writer.write(np.arange(8000, dtype=np.uint16))
        writer.close()
    tokens, documents = join([read_tokens(path, "way out") for path in paths]), np.zeros(1, np.int64)
    loader = Loader(tokens, documents, batch_size=2, context_length=16, seed=0)
    loader.next()
    os.truncate(paths[-1], 4096)
    reads = {
        "train": loader.next,
        "validate": lambda: [*validation_batches(tokens, documents, 2, 16, 64)],
        "hash": lambda: fingerprint(tokens, documents),
    }
    with pytest.raises(ValueError, match=rf"^{paths[-1]} was cut .* from 17,024 to 4,096 bytes: ") as error:
        reads[draw]()
    assert "\n" not in str(error.value)


def test_shards_of_llm_c_can_be_read(tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 4
    (tmp_path / "shard.bin").write_bytes(header.tobytes() + np.array([50256, 1, 2, 3], np.uint16).tobytes())
    assert read_tokens(tmp_path / "shard.bin", "").tolist() == [50256, 1, 2, 3]


def test_a_file_of_no_tokens_can_be_read(tmp_path):
    header = np.zeros(256, np.int32)
    header[:2] = 20240520, 1
    (tmp_path / "empty.bin").write_bytes(header.tobytes())
    assert read_tokens(tmp_path / "empty.bin", "").shape == (0,)


# ---- batches: the tokens count up from 0, so that a token is its own position

T = 8
COUNT = np.arange(1003)
STARTS = np.array([0, 5, 6, 400, 1000])


def loader(tokens: np.ndarray = COUNT, **options: int) -> Loader:
    settings = {"batch_size": 5, "context_length": T, "seed": 1} | options
    return Loader(tokens, STARTS[STARTS < len(tokens)], **settings)


def first_tokens(loader: Loader, batches: int) -> list[int]:
    return [int(token) for _ in range(batches) for token in loader.next().x[:, 0]]


def test_y_holds_the_token_after_each_of_x():
    x, y, _ = loader().next()
    assert (x.shape, x.dtype, y.dtype) == ((5, T), torch.int64, torch.int64)
    assert torch.equal(y, x + 1)
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_documents_say_where_each_token_of_x_is_from():
    batch = make_batch(COUNT, STARTS, [[(start, T)] for start in (0, 396, 994)])
    assert batch.documents.dtype == torch.int32
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1, 2, 2], [2, 2, 2, 2, 3, 3, 3, 3], [3, 3, 3, 3, 3, 3, 4, 4]]


def test_documents_of_real_text_change_at_end_of_text(corpus, make):
    dataset = open_dataset(make(corpus))
    x, _, documents = Loader(dataset.train, dataset.train_documents, batch_size=4, context_length=64, seed=0).next()
    assert torch.equal(documents.diff(dim=1), (x[:, 1:] == END_OF_TEXT).int())


def test_an_epoch_gives_each_window_once():
    one = loader(batch_size=1)
    firsts = sorted(first_tokens(one, one.windows))
    assert one.windows == (len(COUNT) - T) // T
    assert firsts == list(range(firsts[0], firsts[0] + one.windows * T, T))


def test_epochs_differ_in_order_and_in_where_they_cut():
    one = loader(batch_size=1)
    epochs = [first_tokens(one, one.windows) for _ in range(20)]
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20
    assert len({min(epoch) for epoch in epochs}) > 4
    assert max(min(epoch) for epoch in epochs) < T


def test_every_token_is_seen_within_a_few_epochs():
    one = loader(batch_size=1)
    seen = {token for _ in range(30 * one.windows) for token in one.next().x.flatten().tolist()}
    assert seen >= set(range(len(COUNT) - T))


def test_order_is_decided_by_the_seed():
    assert first_tokens(loader(), 60) == first_tokens(loader(), 60)
    assert first_tokens(loader(), 60) != first_tokens(loader(seed=2), 60)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_out_what_one_rank_would_read(world_size):
    ranks = [loader(batch_size=4, rank=rank, world_size=world_size) for rank in range(world_size)]
    one = loader(batch_size=4 * world_size)
    for _ in range(50):  # more than an epoch
        assert torch.equal(torch.cat([rank.next().x for rank in ranks]), one.next().x)


@pytest.mark.parametrize("steps", [0, 1, 24, 25, 60])
def test_a_resumed_loader_goes_on_where_it_stopped(steps):
    straight = loader()
    first_tokens(straight, steps)
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert first_tokens(resumed, 40) == first_tokens(straight, 40)


def test_an_epoch_of_shorter_sequences_has_every_token_once_and_few_neighbours():
    one = loader(batch_size=1, with_documents=False)
    short, whole = T // 2, loader(batch_size=1)
    batches = [one.next(short) for _ in range(one.windows)]
    x, y = (torch.cat([getattr(batch, name) for batch in batches]).view(-1, short) for name in "xy")
    assert (x[:, 1:] == y[:, :-1]).all()
    assert (y == x + 1).all()  # token i is i here
    tokens = torch.cat([whole.next().x for _ in range(whole.windows)])
    assert x.flatten().sort()[0].equal(tokens.flatten().sort()[0])
    neighbours = (x[1:, 0] == y[:-1, -1]).sum()
    assert neighbours < len(x) / 4
    assert one.state_dict() == whole.state_dict()


def test_a_resumed_loader_may_have_other_batches_and_ranks():
    straight = loader(batch_size=1)
    expected = first_tokens(straight, 200)
    before = loader(batch_size=10)
    found = first_tokens(before, 4)
    ranks = [loader(batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(before.state_dict())
    found += [token for _ in range(20) for rank in ranks for token in first_tokens(rank, 1)]
    assert found == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 2}, "trained with seed=2, this run has 1: use seed=2"),
        ({"context_length": 9}, "trained with model.context_length=9, this run has 8: use model.context_length=9"),
        ({"tokens": COUNT[:-1]}, "the same data and tokenizer"),
        ({"tokens": COUNT[::-1]}, "the same data and tokenizer"),
    ],
)
def test_a_state_of_another_run_is_refused(other, message):
    assert message in refusal(loader().load_state_dict, loader(**other).state_dict())


@pytest.mark.parametrize("count", [T + 1, T + 2, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T])
def test_the_shortest_texts_work(count):
    one = loader(COUNT[:count])
    for _ in range(20):
        x, y, _ = one.next()
        assert torch.equal(y, x + 1)


def test_text_shorter_than_a_window_is_refused():
    message = refusal(loader, COUNT[:T])
    assert f"the training text has {T} tokens, one window takes {T + 1}" in message
    assert "model.context_length" in message
    # At the call, before any batch is asked for.
    assert "the validation text has 8 tokens" in refusal(validation_batches, COUNT[:T], STARTS, 4, T, 100)


def test_validation_reads_the_same_windows_every_time():
    first, second = ([*validation_batches(COUNT, STARTS, 4, T, 200)] for _ in range(2))
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, second, strict=True))


def test_validation_is_spread_evenly_over_the_text():
    firsts = torch.cat([batch.x[:, 0] for batch in validation_batches(COUNT, STARTS, 4, T, 10 * T)])
    gaps = firsts.diff().tolist()
    assert (len(firsts), firsts[0].item()) == (10, 0)
    assert max(gaps) - min(gaps) <= T
    assert firsts[-1].item() + max(gaps) + T > 1000 - T


def test_validation_may_end_with_a_smaller_batch():
    assert [len(batch.x) for batch in validation_batches(COUNT, STARTS, 4, T, 10 * T)] == [4, 4, 2]


def test_validation_of_a_short_text_reads_each_window_once():
    batches = [*validation_batches(COUNT, STARTS, 16, T, 10**9)]
    tokens = torch.cat([batch.x.flatten() for batch in batches])
    assert tokens.tolist() == list(range((len(COUNT) - 1) // T * T))


def test_validation_windows_may_overlap_if_the_text_is_short():
    """From its first token to its last, evenly, and each other one. A text that is long enough is read as without."""
    for wanted in 200, 10**9:
        firsts = torch.cat(
            [batch.x[:, 0] for batch in validation_batches(COUNT, STARTS, 4, T, wanted * T, overlap=True)]
        )
        assert len(firsts) == min(wanted, len(COUNT) - T)
        assert (firsts[0], firsts[-1]) == (0, len(COUNT) - 1 - T)
        gaps = firsts.diff()
        assert 1 <= gaps.min() <= gaps.max() <= gaps.min() + 1
    apart, whole = ([*validation_batches(COUNT, STARTS, 4, T, 10 * T, overlap=overlap)] for overlap in (True, False))
    assert all(torch.equal(a.x, b.x) for a, b in zip(apart, whole, strict=True))


def test_ten_million_windows_cost_only_their_permutation():
    many = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (10_000_000 * 16 + 16,), (0,))
    one = Loader(many, np.zeros(1, np.int64), batch_size=2, context_length=16, seed=0)
    one.next()
    assert one.order.nbytes == 8 * 10_000_000


def test_byte_batches_decode_to_the_text(corpus, make):
    dataset = open_dataset(make(corpus))
    row = next(validation_batches(dataset.val, dataset.val_documents, 1, 32, 32)).x[0]
    text = byte_encoding().decode(row[1:].tolist())
    assert row[0] == END_OF_TEXT
    assert text.startswith("Text ")


def test_only_our_own_leftovers_are_removed_from_the_cache(corpus, tmp_path):
    """data.cache=$HOME deleted every folder called *.tmp in it."""
    (tmp_path / "cache" / "precious.tmp").mkdir(parents=True)
    for source in prepare_module.PREPARED:
        (tmp_path / "cache" / f"{source}-byte-0123456789ab.tmp").mkdir()
    prepare(DataConfig("text", str(corpus), cache=str(tmp_path / "cache")), TokenizerConfig())
    assert [path.name for path in (tmp_path / "cache").glob("*.tmp")] == ["precious.tmp"]


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"version": 1}', '{"version": 1, "sha256": {}}', "x"])
def test_an_edited_manifest_is_one_line(corpus, make, text):
    folder = make(corpus)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json cannot be read: delete .* and run again"):
        open_dataset(folder)
