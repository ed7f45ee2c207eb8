"""Where text and tokens come from: files, folders, globs, .jsonl, .gz, standard input, shards; and what is left out."""

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from data import download
from data.dataset import open_data
from data.made import answer, documents, passkey, second_half
from data.prepare import READERS, SOURCES, DataConfig, files_of, prepare, split
from data.prepare import read as documents_of
from data.text import find, read, standard_input
from data.tokenizer import TokenizerConfig
from tests.test_data import DOCUMENTS, UNICODE, texts, write

BYTE = TokenizerConfig("byte")


def jsonl(*documents: str, field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "id": 1}, ensure_ascii=False) + "\n" for text in documents).encode()


def arrived(folder: Path) -> list[str]:
    found = texts(folder)
    return sorted(found["train"] + found["val"])


def refusal(function, *arguments, **options) -> str:
    """The message of the ValueError that this call raises: one line."""
    with pytest.raises(ValueError, match=r"\A.+\Z") as caught:
        function(*arguments, **options)
    return str(caught.value)


# ---- which files, and what is in them

NO_TEXT = {
    "empty.txt": b"", "binary.txt": b"a\0b", "latin1.txt": b"caf\xe9", "cut.txt.gz": b"\x1f\x8b",
    "damaged.gz": gzip.compress(b"a")[:10] + b"\xff", "list.jsonl": b"[1]\n", "broken.jsonl": b'{"text": "a"}\n{"te',
}  # fmt: skip
FORMS = {  # {form: (files, data.path)}, each with DOCUMENTS
    "folder": ({f"a/{i}/b.md": text for i, text in enumerate(DOCUMENTS)}, "."),
    "glob": ({f"{i}.log": text for i, text in enumerate(DOCUMENTS)} | {"other.txt": "no"}, "**/*.log"),
    "jsonl": ({"a.jsonl": b"\xef\xbb\xbf" + jsonl(*DOCUMENTS).replace(b"\n", b"\r\n\n") + jsonl("")}, "a.jsonl"),
    "gz": ({"a.jsonl.gz": gzip.compress(jsonl(*DOCUMENTS[1:])), "b.TXT.GZ": gzip.compress(DOCUMENTS[0].encode())}, "."),
    "a name like a pattern": ({f"a [1]/{i}": text for i, text in enumerate(DOCUMENTS)} | {"a 1/b": "no"}, "a [1]"),
    "in it a pattern": ({f"a [1]/{i}.cs": text for i, text in enumerate(DOCUMENTS)} | {"a 1/b.cs": "no"}, "a [1]/*.cs"),
    "byte order marks": ({f"{i}.txt": b"\xef\xbb\xbf" + text.encode() for i, text in enumerate(DOCUMENTS)}, "*"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_brings_the_same_documents(make, tmp_path, form):
    files, path = FORMS[form]
    assert arrived(make(write(tmp_path / "texts", files) / path)) == sorted(DOCUMENTS)


def test_the_field_that_is_named_is_the_text(make, tmp_path):
    write(tmp_path, {"a.jsonl": jsonl(*DOCUMENTS, field="body")})
    assert arrived(make(tmp_path / "a.jsonl", field="body")) == sorted(DOCUMENTS)
    for missing in ("text", "id"):
        assert f'a.jsonl:1: no string "{missing}" in ' in refusal(make, tmp_path / "a.jsonl", field=missing)


@pytest.mark.parametrize("path", [".", "**/*", "{here}", "{here}/**/*.txt"])
def test_runs_the_cache_and_hidden_files_are_never_text(tmp_path, monkeypatch, path):
    """The second run in a folder read the first one's samples, or was refused for its metrics.jsonl."""
    own = ["runs/a/samples.txt", "runs/a/metrics.jsonl", "data/cache/b/input.txt", ".git/x.txt", "a/.b.txt"]
    write(tmp_path, {"text.txt": "text", "a/data/cache.txt": "text"} | dict.fromkeys(own, "no text"))
    monkeypatch.chdir(tmp_path)
    found = find(path.format(here=tmp_path), ["data/cache", tmp_path / "runs"])
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a/data/cache.txt", "text.txt"]
    assert [file.name for file in find("runs/a", ["runs"])] == ["metrics.jsonl", "samples.txt"]  # asked for by name
    made = prepare(DataConfig("text", ".", cache="data/cache"), BYTE, runs="runs")
    assert (made / "about").read_text().startswith("1 document")


def test_of_a_folder_all_text_is_read_and_what_is_left_out_is_counted(make, tmp_path, capsys, monkeypatch):
    """A foreign .jsonl refused the whole folder. Files without a known suffix were left out uncounted."""
    foreign = {name: NO_TEXT[name] for name in ("list.jsonl", "latin1.txt", "cut.txt.gz", "damaged.gz", "binary.txt")}
    foreign |= {"deep binary": b"a" * 9999 + b"\0", "tar.GZ": gzip.compress(b"a\0"), "b.csv": b"1", "c.JSON": b"1"}
    names = ("{}.md", "README{}", "{}.cs", "{}.tsx")
    write(tmp_path / "texts", foreign | {names[i % 4].format(i): text for i, text in enumerate(DOCUMENTS)})
    write(tmp_path, {"elsewhere/a.txt": "no"})
    for name in ("elsewhere", "texts"):  # one of them is a circle
        (tmp_path / "texts" / f"link to {name}").symlink_to(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "texts", "~/texts"):  # also where the tokens are there already
        assert arrived(make(path)) == sorted(DOCUMENTS)
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "40 documents" in line]
        assert f"cannot be read: 5, the first: {tmp_path}/texts/cut.txt.gz" in said
        assert "left out: 6 " in said  # two are binary, two data, two links


@pytest.mark.parametrize("name", [*NO_TEXT, "pictures", "nowhere", "*.nothing"])
def test_what_is_no_text_is_one_line_with_its_place(make, tmp_path, name):
    write(tmp_path, NO_TEXT | {"pictures/a.png": b""})
    assert str(tmp_path / name) in refusal(make, tmp_path / name)


def test_standard_input_is_kept_for_a_resumed_run_and_for_each_job(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(UNICODE.encode())))
    jobs = [DataConfig("text", "-", cache=str(tmp_path / "cache")) for _ in range(2)]
    folders = [prepare(data, BYTE) for data in jobs]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"another text")))
    assert {prepare(data, BYTE) for data in jobs} == {*folders}
    assert read(Path(jobs[0].path)) == [UNICODE]
    standard_input.cache_clear()  # as in another process
    assert read(standard_input(tmp_path / "cache")) == ["another text"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"data\.path=-"):
        standard_input(tmp_path)


# ---- sources


def test_a_key_that_the_source_would_ignore_is_refused():
    """data.path=FILE without data=text trained on Python's standard library."""
    for source in SOURCES:
        assert "data.path=" in refusal(DataConfig, source, None if source in READERS else "a")


def test_python_code_is_read_without_its_tests_and_packages_are_not_cut(tmp_path, monkeypatch):
    """purelib and platlib may be one folder."""
    for room in ("stdlib", "purelib"):
        write(tmp_path / room, dict.fromkeys(("x.py", "deep/y.py", "z.so", "test/z.py", "tests/z.py"), room))
    (tmp_path / "platlib").symlink_to(tmp_path / "purelib")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    assert [len(files_of(DataConfig(source))) for source in ("pystdlib", "pypackages")] == [2, 2]
    assert documents_of(std := DataConfig("pystdlib"), files_of(std), None)[0] == {"stdlib": "stdlib"}
    write(tmp_path / "purelib", {f"p{i}/{j}.py": f"{i} {j}" * 9 for i in range(10, 30) for j in range(5)})
    _, val = split(documents_of(data := DataConfig("pypackages"), files_of(data), None)[0], 0.17)
    assert {sum(text[:2] == each[:2] for text in val) for each in val if each != "purelib"} == {5}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_of_the_hub_is_split_at_lines_of_end_of_text(tmp_path, monkeypatch, name):
    """Code lost the indent of its first line, and was cut where it mentions the token."""
    documents = [f"    {i} = '<|endoftext|>'  # {text}  " for i, text in enumerate(DOCUMENTS)]
    if name == "a.txt":
        file = write(tmp_path, {name: "\n\n<|endoftext|>\r\n".join(["", *documents, "\n"])}) / name
    else:
        documents.append("\n<|endoftext|>\n")
        file = write(tmp_path, {name: jsonl(*documents)}) / name
    monkeypatch.setattr(download, "from_hub", lambda *named: {("owner/name", f"b/{name}"): file}[named])
    data = DataConfig("hub", f"owner/name/b/{name}", cache=str(tmp_path / "cache"))
    assert arrived(prepare(data, BYTE)) == sorted(documents)


@pytest.mark.parametrize(("source", "T"), [("recall", 32), ("passkey", 256)])
def test_a_made_document_fills_a_context_and_its_answer_is_where_it_is_said_to_be(tmp_path, source, T):
    made = DataConfig(source, cache=str(tmp_path))
    data = open_data(made, BYTE, context_length=T)
    assert (np.diff(data.train_documents) == T).all()
    targets = bytes(data.train[1:T].tolist())
    if source == "recall":
        assert targets[: T // 2 - 1] == targets[second_half(T)]
    else:
        text = passkey(T, 0.3, np.random.default_rng(0))
        assert (len(text), text.count(text[answer(T)]), len(targets)) == (T - 1, 3, T - 1)
        made_of_it = documents(source, 4096)
        asked = [text.count("What is") for text in made_of_it]
        assert 0.45 < asked.count(1) / len(asked) < 0.6 < max(asked)
        assert sum(text.startswith("The pass") for text in made_of_it) > 0.05 * len(asked)
    assert "tokenizer=gpt2" in refusal(open_data, made, TokenizerConfig("gpt2"), context_length=T)
    assert "model.context_length=7" in refusal(open_data, made, BYTE, context_length=7)


# ---- token shards


def shard(path: Path, ids: list[int], magic=(20240520, 1), dtype="<u2") -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    header = np.array([*magic, min(len(ids), 3), *[0] * 253], "<i4")
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def test_shards_are_for_training_or_for_validation(tmp_path, capsys):
    files = {"b_train": [256, 1, 2], "a_val": [3, 256, 4], "c_train": [5, 6], "d_val": [256, 7]}
    for name, ids in files.items():
        shard(tmp_path / "run[1]" / f"{name}.bin", ids)
    shard(tmp_path / "run1" / "e_val.bin", [7])
    found = open_data(DataConfig("bin", str(tmp_path / "run[1]")), BYTE)
    parts = (found.train, found.val, found.train_documents, found.val_documents)
    assert [part[:].tolist() for part in parts] == [[256, 1, 2, 5, 6], [3, 256, 4, 256, 7], [0], [0, 1, 3]]
    assert "5 training and 5 validation tokens" in capsys.readouterr().err


def test_the_words_of_a_name_say_what_is_for_validation(tmp_path):
    """validation_000000.bin was trained on."""
    val = ("val0", "valid", "validation_000000", "fineweb_validation_000000", "dev.2", "c4-test", "VAL", "val/000")
    train = ("retrieval_000", "train_000", "evaluation", "latest")
    for name in (*train, *val):
        shard(tmp_path / f"{name}.bin", [int(name in val)])
    found = open_data(DataConfig("bin", f"{tmp_path}/**/*.bin"), BYTE)
    assert (found.train[:].tolist(), found.val[:].tolist()) == ([0] * len(train), [1] * len(val))


def test_shards_of_another_tokenizer_and_what_is_no_shard_are_refused(tmp_path, gpt2):
    data = DataConfig("bin", f"{tmp_path}/*.bin")
    shard(tmp_path / "val.bin", [1])
    shard(tmp_path / "a.bin", [70_000, 1, 2, 0], (20240801, 7), "<u4")
    assert "a.bin has token 70000" in refusal(open_data, data, BYTE)
    assert "tokenizer=gpt2" in refusal(open_data, data, TokenizerConfig("kept"))
    assert "bpe257 has 257" in refusal(open_data, data, TokenizerConfig("bpe"))
    for content in (b"text" * 300, b""):
        write(tmp_path, {"a.bin": content})
        assert "a.bin is no token file" in refusal(open_data, data, BYTE)
    whole = shard(tmp_path / "a.bin", [1, 2, 3]).read_bytes()
    for size in (12, 1024, 1028, 1029):
        write(tmp_path, {"a.bin": whole[:size]})
        assert f"has {max(0, size - 1024) // 2} tokens of 3" in refusal(open_data, data, BYTE)
    assert "1 of them" in refusal(open_data, DataConfig("bin", str(tmp_path / "val.bin")), BYTE)
