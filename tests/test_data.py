"""Text to token files to batches: every byte arrives, and the order can be computed for any step.

What is refused, and damage to token files, is in tests/test_bad_input.py.
"""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data import corpus as corpora
from data import prepare as prepare_module
from data.dataset import open_dataset, read_manifest
from data.loader import Loader, fingerprint, validation_batches
from data.prepare import MANIFEST, cache_of
from data.shards import Shards, Writer, join, read_tokens
from data.tokenizer import TokenizerConfig

ROOT = Path(__file__).resolve().parents[1]
BYTE = TokenizerConfig("byte")
END_OF_TEXT = 256
# Every length of UTF-8, a joined emoji, and what no text editor leaves at the end: no line end.
UNICODE = (
    "caf\u00e9 \u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f4bb \u0928\u092e\u0938\u094d\u0924\u0947\n" * 40
    + "\u20ac"
)
DOCUMENTS = [f"document {i}\n\n{UNICODE}" for i in range(40)]
FILES = {f"{i}.txt": f"Text {i}.\r\n" * (i % 7 + 1) + "caf\u00e9\n" for i in range(50)}
FILES |= {f"deeper/{i}.md": f"Text {i}.\n" * (i % 7 + 1) for i in range(50, 100)}
LARGE = [f"text {i} {'x' * i}\n" * (9010 // (8 + i)) for i in range(3)]  # the longest is the last
LINES = "".join(f"line {i} \u20ac\n" for i in range(1000))


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A hundred small files of text."""
    return write(tmp_path / "corpus", FILES)


def write_shard(path: Path, ids: Sequence[int], n_vocab: int = 50257) -> Path:
    path.parent.mkdir(exist_ok=True)
    writer = Writer(path.parent, path.stem, n_vocab)
    writer.write(np.array(ids, writer.dtype))
    writer.close()
    return path


def refusal(function, *arguments, **options) -> str:
    """The message of the ValueError that this call raises: one line."""
    with pytest.raises(ValueError, match=r"\A.+\Z") as caught:
        function(*arguments, **options)
    return str(caught.value)


def texts(folder: Path) -> dict[str, list[str]]:
    """The documents of each split of a prepared folder. The tokens, their starts and the manifest say the same."""
    dataset, found = open_dataset(folder), {}
    end = dataset.encoding.eot_token
    for name in ("train", "val"):
        tokens, starts = getattr(dataset, name)[:], getattr(dataset, f"{name}_documents")
        assert starts.tolist() == np.flatnonzero(tokens == end).tolist()
        found[name] = [dataset.encoding.decode_bytes(part[1:].tolist()) for part in np.split(tokens, starts)[1:]]
        size = sum(map(len, found[name]))
        assert dataset.token_bytes[tokens].sum() == size
        assert dataset.manifest[name] == {
            "tokens": len(tokens), "bytes": size, "documents": len(starts), "dtype": tokens.dtype.name
        }  # fmt: skip
    return {name: [text.decode() for text in documents] for name, documents in found.items()}


# ---- prepare


ALL = "."  # the folder
TWO = UNICODE.encode()[:700], UNICODE.encode()[700:]
# {case: (the files, which of them is data.path, the documents that arrive)}
CORPORA: dict[str, tuple[dict[str, str | bytes], str, list[str]]] = {
    "small files": (FILES, ALL, [*FILES.values()]),
    "repeats": ({"a.jsonl": jsonl(*(f"text {i // 2}" for i in range(800)))}, ALL, [f"text {i}" for i in range(400)]),
    "a file": ({"a.txt": LINES}, "a.txt", [LINES]),
    "a line": ({"a.txt": "\u20ac" * 100}, "a.txt", ["\u20ac" * 100]),
    "even lines": ({"a.txt": "nineteen characters\n" * 1000}, ALL, ["nineteen characters\n" * 1000]),
    "three files": ({f"{i}.txt": text for i, text in enumerate(LARGE)}, ALL, LARGE),
    "a mark": ({"a.txt": b"\xef\xbb\xbf" + b"hello\n\xef\xbb\xbf" * 9}, ALL, ["hello\n\ufeff" * 9]),
    "UTF-16": ({"a.txt": LINES.encode("utf-16")}, ALL, [LINES]),
    "UTF-32": ({"a.txt": LINES.encode("utf-32")}, ALL, [LINES]),
    ".gz": ({"a.TXT.GZ": b"".join(map(gzip.compress, TWO))}, "a.TXT.GZ", [UNICODE]),
    ".jsonl": ({"a.jsonl": jsonl(*DOCUMENTS)}, "a.jsonl", DOCUMENTS),
    ".jsonl.gz": ({"a.jsonl.gz": gzip.compress(jsonl(*DOCUMENTS))}, ALL, DOCUMENTS),
    "blank and empty lines": (
        {"a.jsonl": b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": ""}\n  \n{"text": "a", "id": 2}\n' + jsonl(*DOCUMENTS)},
        ALL, ["a", *DOCUMENTS],
    ),
    "other files": (
        {"a.jsonl": jsonl(*DOCUMENTS), "b.txt.gz": gzip.compress(b"text\n"), "c.tar.gz": b"\0", "d.bin": b"\0",
         ".e.txt": b"\0", ".f/g.txt": b"\0", "empty.txt": b""},
        ALL, [*DOCUMENTS, "text\n"],
    ),
    "a glob": ({**FILES, "a.log": "a log\n"}, "**/*.[lm][od]*", ["a log\n", *[*FILES.values()][50:]]),
}  # fmt: skip


@pytest.mark.parametrize("case", CORPORA)
@pytest.mark.parametrize(("kind", "piece"), [("byte", 1 << 18), ("bpe", 64)])
def test_every_document_arrives_once_and_validation_has_its_share(case, kind, piece, make, tmp_path, monkeypatch):
    """In whole documents. If they are few and long, the end of the longest too, from the start of a line or at least of
    a character on."""
    monkeypatch.setattr(prepare_module, "PIECE", piece)
    monkeypatch.setattr("data.text.PIECE", piece)
    files, path, documents = CORPORA[case]
    write(tmp_path / "corpus", files)
    found = texts(make(f"{tmp_path}/corpus/{path}", TokenizerConfig(kind, 259 if kind == "bpe" else None)))
    share = 0.05 * len("".join(documents).encode())
    if cut := [*(Counter(documents) - Counter(found["train"] + found["val"]))]:
        (whole,) = (text.encode() for text in cut)
        assert len(whole) == max(len(text.encode()) for text in documents)
        missing = int(share)  # nothing else was small enough
        at = len(whole) - missing
        line = whole.find(b"\n", at - 1, at - 1 + missing // 2) + 1
        end = whole[line or at :].decode(errors="ignore")
        assert found["val"] == [end]
        found["train"].remove(cut[0].removesuffix(end))
        assert Counter(found["train"] + cut) == Counter(documents)
    else:
        assert Counter(found["train"] + found["val"]) == Counter(documents)
        taken = len("".join(found["val"]).encode())
        assert share - min(len(text.encode()) for text in documents) < taken <= share


def test_small_documents_beside_a_large_one_stay_in_training(tmp_path, make, monkeypatch):
    """All of them would fit into the share of validation."""
    small = [f"poem {i}\n" * 9 for i in range(40)]
    found = texts(make(write(tmp_path, {"a.jsonl": jsonl("a long line\n" * 9000, *small)}) / "a.jsonl"))
    assert len({*small} & {*found["val"]}) == 20  # half of 41
    assert len(found["val"]) == 21  # and the end of the large one
    assert {*small} <= {*found["train"], *found["val"]}
    limited = make(tmp_path / "a.jsonl")
    monkeypatch.setattr(corpora.Corpus, "for_validation", lambda *_: ([], 9, False))
    assert make(tmp_path / "a.jsonl") != limited  # whose name earlier versions gave to another split


def test_small_documents_without_a_large_one_fill_the_share_of_validation(make, tmp_path):
    """No document is larger than the share, so half of all is no limit: training has most of the large ones."""
    documents = [f"poem {i:02}\n" for i in range(40)] + [f"{i} is long\n" * 40 for i in range(5)]
    found = texts(make(write(tmp_path, {"a.jsonl": jsonl(*documents)}) / "a.jsonl", val_fraction=0.5))
    assert {*documents[:40]} < {*found["val"]}
    assert len(found["val"]) == 42


def test_a_corpus_is_known_by_its_content_and_not_by_its_files(corpus, make, tmp_path, monkeypatch):
    write(tmp_path, {f"texts/{i:02}.txt": text for i, text in enumerate(DOCUMENTS)} | {"a.jsonl": jsonl(*DOCUMENTS)})
    write(tmp_path, {"a.txt": UNICODE, "a.txt.gz": gzip.compress(UNICODE.encode())})
    assert make(tmp_path / "texts") == make(tmp_path / "a.jsonl")
    assert make(tmp_path / "a.txt") == make(tmp_path / "a.txt.gz")

    folders = [make(corpus), make(corpus, TokenizerConfig("bpe", 260)), make(corpus, val_fraction=0.1)]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write", None)
        assert make(corpus) == folders[0]
    for i, file in enumerate(sorted(corpus.glob("*.txt"))):
        file.rename(file.with_name(f"renamed-{97 * i % 50}.txt"))
    assert sorted(texts(make(corpus, cache="another"))["val"]) == sorted(texts(folders[0])["val"])
    (corpus / "renamed-0.txt").write_text("changed\n")
    assert len({make(corpus), *folders}) == 4


def test_a_million_spaces_are_only_text(tmp_path, make):
    """The tokenizers' regular expressions give up at a million spaces before a letter; pieces keep clear of that."""
    (tmp_path / "spaces.txt").write_bytes(b"a" + b" " * 1_100_000 + b"a")
    assert read_manifest(make(tmp_path / "spaces.txt", TokenizerConfig("bpe", 257)))["train"]["bytes"] == 1_045_002


def test_the_tokenizer_does_not_learn_from_validation_text(tmp_path, make):
    (tmp_path / "one.txt").write_text("ab\n" * 1000 + "xyxy" * 30 + "\n")
    ranks = open_dataset(make(tmp_path / "one.txt", TokenizerConfig("bpe", 258))).encoding._mergeable_ranks
    assert b"ab" in ranks
    assert not any(b"x" in token for token in ranks if len(token) > 1)


def test_token_files_are_in_the_format_of_llm_c_and_large_vocabularies_in_that_of_llama_3(corpus, make, tmp_path):
    files = {make(corpus) / "train.bin": (20240520, 1, "<u2", END_OF_TEXT)}
    files[write_shard(tmp_path / "large.bin", [1 << 16, 1, 2], (1 << 16) + 1)] = (20240801, 7, "<u4", 1 << 16)
    for file, (magic, version, dtype, first) in files.items():
        header, tokens = np.fromfile(file, "<i4", 256), np.fromfile(file, dtype, offset=1024)
        assert header[:3].tolist() == [magic, version, len(tokens)]
        assert not header[3:].any()
        assert tokens[0] == first
        assert np.array_equal(read_tokens(file, ""), tokens)
    assert len(read_tokens(write_shard(tmp_path / "empty.bin", []), "")) == 0


def test_the_same_text_elsewhere_and_in_other_threads_has_the_same_bytes(corpus, make, tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.PIECE", 100)
    monkeypatch.setattr(prepare_module, "PIECE", 100)
    write(corpus, {"a.jsonl": jsonl(*DOCUMENTS)})
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(prepare_module, "THREADS", threads)
        corpus = corpus.rename(tmp_path / f"{threads}")
        folder = make(corpus, TokenizerConfig("bpe", 300), cache=f"cache{threads}")
        found.append({file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST})
    assert found[0] == found[1] == found[2]


def run(corpus: Path, cache: Path, before: str = "") -> subprocess.Popen:
    """Prepare in another process, which first executes `before`."""
    code = f"""
import os, sys
from data import prepare as m
from data.tokenizer import TokenizerConfig
{before}
print(m.prepare(m.DataConfig("text", {str(corpus)!r}, cache={str(cache)!r}), TokenizerConfig("byte")))
assert "torch" not in sys.modules
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)


def test_processes_at_once_make_one_folder_without_torch_and_one_that_died_leaves_nothing(corpus, tmp_path):
    cache = tmp_path / "cache"
    run(corpus, cache, before="m.sync_and_hash = lambda file: os._exit(9)").communicate()
    assert [path.suffix for path in cache.glob("text-*")] == [".tmp"]
    processes = [run(corpus, cache) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert outputs[0][0] == outputs[1][0]
    assert sum("training and" in errors for _, errors in outputs) == 1, "one does the work, the other waits"
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = cache.glob("text-*")
    assert outputs[0][0].strip() == str(folder)
    texts(folder)


def test_only_our_own_leftovers_are_removed_from_the_cache(corpus, make, tmp_path):
    """data.cache=$HOME deleted every folder called *.tmp in it."""
    for name in ("precious", *(f"{source}-byte-0123456789ab" for source in prepare_module.PREPARED)):
        (tmp_path / "cache" / f"{name}.tmp").mkdir(parents=True)
    make(corpus)
    assert [path.name for path in (tmp_path / "cache").glob("*.tmp")] == ["precious.tmp"]


@pytest.mark.parametrize("tokenizer", [BYTE, TokenizerConfig("bpe", 260)], ids=["byte", "bpe"])
def test_a_file_that_changes_meanwhile_is_noticed(corpus, make, monkeypatch, tokenizer):
    def scan_then_change(*arguments):
        found = corpora.scan(*arguments)
        with open(corpus / "0.txt", "a") as file:
            file.write("one more line\n")
        return found

    monkeypatch.setattr(prepare_module, "scan", scan_then_change)
    assert "0.txt changed" in refusal(make, corpus, tokenizer)


def test_one_line_says_what_was_made_and_a_terminal_is_shown_a_bar(corpus, make, capsys, monkeypatch):
    folder = make(corpus)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{read_manifest(folder)['train']['tokens']:,} training" in err
    assert str(folder) in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make(corpus, TokenizerConfig("bpe", 260))
    assert "learning the tokenizer: " in capsys.readouterr().err


def test_of_a_folder_what_is_not_text_is_left_out_and_counted(make, corpus, tmp_path, capsys):
    """One file that was not UTF-8 stopped the folder, one file an attempt; other files were left out without a word;
    repeats were counted as files that may not be UTF-8."""
    whole = make(corpus)
    late = b"line\n" * 200_000 + b"caf\xe9"
    write(corpus, {"repeat.txt": FILES["0.txt"], "latin1.txt": late, "latin\n2.txt": late, "picture.png": b""})
    assert make(corpus, cache="new").name == whole.name
    names = tmp_path / "new" / whole.name / "not_text.txt"
    said = f"2 not UTF-8 (listed in {names}), 1 repeating another, 1 with a suffix that is not read"
    assert said in capsys.readouterr().err
    make(corpus, cache="new")
    assert said in capsys.readouterr().err  # also where the tokens are there already
    assert [line.split(" is not")[0] for line in names.read_text().splitlines()] == [
        str(corpus / name) for name in (r"latin\n2.txt", "latin1.txt")
    ]


def test_what_fails_leaves_nothing_and_of_a_full_disk_the_folder_is_named(make, corpus, tmp_path, monkeypatch):
    """[Errno 28] came without a path, and the unfinished folder stayed and kept the disk full."""

    def full(self, ids):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert "vocab_size=50000" in refusal(make, corpus, TokenizerConfig("bpe", 50000))
    monkeypatch.setattr(Writer, "write", full)
    with pytest.raises(OSError, match=re.escape(f"{tmp_path / 'cache'} (No space left on device)")):
        make(corpus)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("files", [1, 2])
def test_a_file_of_tokens_that_is_cut_while_it_is_in_use_is_named(tmp_path, files):
    """Reading a mapping past the end of its file ends the process with SIGBUS, without a word."""
    paths = [write_shard(tmp_path / f"{number}.bin", range(8000)) for number in range(files)]
    tokens, documents = join([read_tokens(path, "way out") for path in paths]), np.zeros(1, np.int64)
    loader = Loader(tokens, documents, batch_size=2, context_length=16, seed=0)
    loader.next()
    os.truncate(paths[-1], 4096)
    validate = partial(validation_batches, tokens, documents, 2, 16, 64)
    for reads in (loader.next, lambda: [*validate()], partial(fingerprint, tokens, documents)):
        assert f"{paths[-1]} was cut" in refusal(reads)


# ---- batches: the tokens count up from 0, so that a token is its own position

T = 8
COUNT = np.arange(1003)
STARTS = np.array([0, 5, 6, 400, 1000])
KINDS = ["whole", "packed", "in shards"]


def loader(tokens: np.ndarray = COUNT, starts: np.ndarray = STARTS, **options: int) -> Loader:
    settings = {"batch_size": 5, "context_length": T, "seed": 1} | options
    return Loader(tokens, starts[starts < len(tokens)], **settings)


def of_many(kind: str, **options: int) -> Loader:
    """A loader of many documents of 1 to 3 T tokens."""
    sizes = np.random.default_rng(0).integers(1, 3 * T, size=40)
    tokens = np.arange(sizes.sum())
    tokens = Shards(np.split(tokens, [100, 103, 200])) if kind == "in shards" else tokens
    return loader(tokens, np.cumsum([0, *sizes[:-1]]), packed=kind == "packed", **options)


def first_tokens(loader: Loader, batches: int) -> list[int]:
    return [int(token) for _ in range(batches) for token in loader.next().x[:, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_target_is_the_next_token_and_each_window_is_there_once_an_epoch(kind):
    one = of_many(kind, batch_size=1)
    epochs = [[one.next() for _ in range(one.windows)] for _ in range(2)]
    for batch in epochs[0]:
        assert (batch.x.shape, batch.x.dtype, batch.y.dtype) == ((1, T), torch.int64, torch.int64)
        assert (batch.x.is_contiguous(), batch.y.is_contiguous()) == (True, True)
        assert torch.equal(batch.y, batch.x + 1)
        assert batch.documents.dtype == torch.int32
        texts = torch.from_numpy(np.searchsorted(one.documents, batch.x.numpy(), side="right"))
        begins = (batch.x.diff() != 1) | (texts.diff() != 0)  # of another document, or of a part of one
        assert torch.equal(batch.documents.diff(), begins.int())
    windows = [[tuple(batch.x[0].tolist()) for batch in epoch] for epoch in epochs]
    assert len({*windows[0]}) == one.windows
    assert windows[0] != windows[1]  # in another order
    assert kind != "packed" or {*windows[0]} == {*windows[1]}


def test_an_epoch_begins_anywhere_and_is_in_another_order():
    one = loader(batch_size=1)
    assert one.windows == (len(COUNT) - T) // T
    epochs = [first_tokens(one, one.windows) for _ in range(20)]
    for firsts in map(sorted, epochs):
        assert firsts == list(range(firsts[0], firsts[0] + one.windows * T, T))
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20
    assert 4 < len({min(epoch) for epoch in epochs}) <= T
    assert {first + i for epoch in epochs for first in epoch for i in range(T)} >= {*range(len(COUNT) - T)}
    assert first_tokens(loader(), 20) == first_tokens(loader(batch_size=1), 100) != first_tokens(loader(seed=2), 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "batch_size", "world_size"), [(0, 2, 5), (1, 4, 3), (24, 5, 1), (60, 1, 1)])
def test_a_resumed_loader_goes_on_where_it_stopped_with_any_batches_and_ranks(steps, batch_size, world_size, kind):
    straight = of_many(kind)
    first_tokens(straight, steps)
    state = json.loads(json.dumps(straight.state_dict()))
    ranks = [of_many(kind, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    found = [token for _ in range(100) for rank in ranks for token in first_tokens(rank, 1)]  # more than an epoch
    assert found == first_tokens(straight, len(found) // 5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_of_shorter_sequences_has_every_piece_once_and_few_neighbours(kind):
    one, whole, short = of_many(kind, batch_size=1), of_many(kind, batch_size=1), T // 2
    batches = [one.next(short) for _ in range(one.windows)]
    x, y = (torch.cat([getattr(batch, name) for batch in batches]).view(-1, short) for name in "xy")
    assert torch.equal(y, x + 1)
    windows = torch.cat([whole.next().x for _ in range(whole.windows)])
    assert sorted(x.tolist()) == sorted(windows.view(-1, short).tolist())
    assert (x[1:, 0] == y[:-1, -1]).sum() < len(x) / 4
    assert one.state_dict() == whole.state_dict()


OTHERS = [  # (of the run, of the checkpoint, what is said)
    ({}, {"seed": 2}, "seed=2"), ({}, {"context_length": 9}, "model.context_length=9"),
    ({}, {"tokens": COUNT[:-1]}, "another text"), ({}, {"tokens": COUNT[::-1]}, "another text"),
    ({}, {"packed": True}, "pack=true"), ({"packed": True}, {}, "pack=false"),
]  # fmt: skip


@pytest.mark.parametrize(("here", "there", "said"), OTHERS)
def test_a_state_of_another_run_is_refused(here, there, said):
    assert said in refusal(loader(**here).load_state_dict, loader(**there).state_dict())


@pytest.mark.parametrize("count", [T + 1, T + 2, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T])
def test_the_shortest_texts_work_and_shorter_ones_are_refused(count):
    one = loader(COUNT[:count])
    for _ in range(20):
        x, y, _ = one.next()
        assert torch.equal(y, x + 1)
    with_validation = partial(validation_batches, batch_size=4, context_length=T, max_tokens=100)
    for refused in (loader, with_validation):
        assert f"has {T} tokens, one window takes {T + 1}" in refusal(refused, COUNT[:T], STARTS)
    assert "data.val_fraction" in refusal(with_validation, COUNT[:T], STARTS)


def validation(*wanted: int, **options) -> torch.Tensor:
    """The windows' tokens."""
    return torch.cat([batch.x for batch in validation_batches(COUNT, STARTS, *wanted, **options)])


def test_validation_reads_the_same_windows_every_time_spread_evenly_over_the_text():
    assert [len(batch.x) for batch in validation_batches(COUNT, STARTS, 4, T, 10 * T)] == [4, 4, 2]
    x = validation(4, T, 10 * T)
    assert torch.equal(x, validation(4, T, 10 * T))
    gaps = x[:, 0].diff().tolist()
    assert x[0, 0] == 0
    assert max(gaps) - min(gaps) <= T
    assert x[-1, 0] + max(gaps) + T > 1000 - T
    of_a_short_text = list(range((len(COUNT) - 1) // T * T))
    assert validation(16, T, 10**9).flatten().tolist() == of_a_short_text, "each window once"


def test_validation_windows_may_overlap_if_the_text_is_short():
    """From its first token to its last, evenly, and each other one. A text that is long enough is read as without."""
    for wanted in 200, 10**9:
        firsts = validation(4, T, wanted * T, overlap=True)[:, 0]
        assert len(firsts) == min(wanted, len(COUNT) - T)
        assert (firsts[0], firsts[-1]) == (0, len(COUNT) - 1 - T)
        gaps = firsts.diff()
        assert 1 <= gaps.min() <= gaps.max() <= gaps.min() + 1
    assert torch.equal(*(validation(4, T, 10 * T, overlap=overlap) for overlap in (True, False)))


@pytest.mark.parametrize(("source", "theirs", "kept"), [
    ("text", "prepared", True), ("text", "downloads", True), ("bin", "nowhere", True),
    ("text", "nowhere", False), ("text", "empty", False), ("text", 300 * "x", False), ("text", "\0", False),
])  # fmt: skip
def test_a_checkpoints_cache_is_used_by_what_it_holds(tmp_path, monkeypatch, source, theirs, kept):
    monkeypatch.chdir(tmp_path)
    for folder in ("prepared/x", "downloads/tinystories", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "prepared/x/manifest.json").touch()
    assert cache_of(source, theirs, "ours") == (theirs if kept else "ours")
