"""Text to token files to batches: every byte arrives, and the order can be computed for any step."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Shards, open_data
from data.loader import Loader, validation_batches
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig

UNICODE = "caf\u00e9\u2028 \u4f60 \U0001f600\n" * 40 + "\u20ac"  # every length of UTF-8; a separator; no line end
DOCUMENTS = [f"document {i}\r\n\n{UNICODE}" for i in range(40)]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def texts(folder: Path) -> dict[str, list[str]]:
    """The documents of each part of a prepared folder, opened as data=bin would open it."""
    data = open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept"))
    found = {}
    for name, tokens, starts in ("train", data.train, data.train_documents), ("val", data.val, data.val_documents):
        assert (tokens[:][starts] == data.encoding.eot_token).all()
        found[name] = [data.encoding.decode(part[1:].tolist()) for part in np.split(tokens[:], starts)[1:]]
    return found


# ---- prepare


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_every_document_arrives_once_and_validation_has_its_share(make, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("data.prepare.PIECE", 100)
    files = {f"a/{i}.txt": text for i, text in enumerate(DOCUMENTS)}
    write(tmp_path, files | {"a/repeat.txt": DOCUMENTS[3], "a/empty.txt": ""})
    found = texts(make(tmp_path / "a", TokenizerConfig(kind, 300 if kind == "bpe" else None), val_fraction=0.1))
    assert Counter(found["train"] + found["val"]) == Counter(DOCUMENTS)
    assert len(found["val"]) in (3, 4)


def test_one_file_is_cut_at_the_start_of_a_line(make, tmp_path):
    text = "".join(f"line {i} \u20ac\n" for i in range(1000))
    (train,), (val,) = texts(make(write(tmp_path, {"a.txt": text}) / "a.txt", val_fraction=0.1)).values()
    assert train + val == text
    assert train.endswith("\n")
    assert 0.09 < len(val) / len(text) <= 0.1


def test_small_documents_beside_a_large_one_are_not_all_for_validation(make, tmp_path):
    """They would all fit."""
    small = [f"poem {i}\n" * 9 for i in range(40)]
    files = {"large.txt": "a long line\n" * 9000} | {f"{i}.txt": text for i, text in enumerate(small)}
    found = texts(make(write(tmp_path / "a", files)))
    assert 10 <= len({*small} & {*found["train"]}) < 40


def test_the_tokenizer_does_not_learn_from_validation_text(make, tmp_path):
    write(tmp_path, {"one.txt": "ab\n" * 100 + "xyxyxyxy\n" * 33})
    folder = make(tmp_path / "one.txt", TokenizerConfig("bpe", 258), val_fraction=0.45)
    encoding = open_data(DataConfig("bin", str(folder)), TokenizerConfig("kept")).encoding
    with pytest.raises(ValueError, match="byte has 257"):  # a typed tokenizer is not ignored
        open_data(DataConfig("bin", str(folder)), TokenizerConfig("byte"))
    assert encoding.encode("ab") != [*b"ab"]
    assert encoding.encode("xy") == [*b"xy"]


def test_a_folder_is_made_once_and_anew_if_the_text_its_tokenizer_or_fraction_changes(make, tmp_path, monkeypatch):
    file = write(tmp_path, {"a.txt": UNICODE * 9}) / "a.txt"
    folders = [make(file), make(file, TokenizerConfig("bpe", 260)), make(file, val_fraction=0.2)]
    with monkeypatch.context() as patch:
        patch.setattr("data.prepare.make", None)
        assert make(file) == folders[0]
    os.utime(file, (1, 1))
    assert len({make(file), *folders}) == 4


def test_what_was_cut_short_is_made_again(make, tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": UNICODE})
    with monkeypatch.context() as patch:
        patch.setattr("data.prepare.write_tokens", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space"):
            make(tmp_path / "a.txt")
    assert len(texts(make(tmp_path / "a.txt"))["train"]) == 1
    assert not [*(tmp_path / "cache").glob("*.tmp")]


def test_a_million_spaces_are_only_text(make, tmp_path):
    """The tokenizers' regular expressions give up at a million spaces before a letter; pieces keep clear of that."""
    text = "a" + " " * 1_100_000 + "a"
    found = texts(make(write(tmp_path, {"a.txt": text}) / "a.txt", TokenizerConfig("bpe", 257)))
    assert found["train"][0] + found["val"][0] == text


def test_token_files_are_those_of_llm_c(make, tmp_path):
    file = make(write(tmp_path, {"a.txt": UNICODE}) / "a.txt") / "train.bin"
    header, tokens = np.fromfile(file, "<i4", 256), np.fromfile(file, "<u2", offset=1024)
    assert header.tolist() == [20240520, 1, len(tokens), *[0] * 253]
    assert tokens[0] == 256


@pytest.mark.parametrize("lengths", [[0, 5, 0, 0, 7, 0], [12], [1] * 12])
def test_shards_read_like_one_array(lengths):
    parts = Shards(np.split(np.arange(12), np.cumsum(lengths)[:-1]))
    assert len(parts) == 12
    for start in range(13):
        for stop in range(start, 14):
            assert parts[start:stop].tolist() == [*range(12)][start:stop]
    assert [parts.find(token).tolist() for token in range(13)] == [[token] for token in range(12)] + [[]]


# ---- batches: the tokens count up from 0, so that a token is its own position

T = 8
N = 1003
STARTS = np.array([0, 5, 6, 400, 1000])


def loader(tokens: np.ndarray | None = None, **options) -> Loader:
    settings = {"documents": STARTS, "batch_size": 5, "context_length": T, "seed": 1} | options
    return Loader(np.arange(N) if tokens is None else tokens, **settings)


def first_tokens(loader: Loader, batches: int) -> list[int]:
    return [int(token) for _ in range(batches) for token in loader.next().x[:, 0]]


def test_an_epoch_is_the_text_cut_into_windows_each_once_in_random_order():
    one = loader(batch_size=1)
    epochs = [first_tokens(one, one.windows) for _ in range(20)]
    for epoch in epochs:
        offset = next(first for first in epoch if (first - T) % N not in epoch)
        assert sorted((first - offset) % N for first in epoch) == [*range(0, N - T, T)]
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20
    assert first_tokens(loader(), 20) == first_tokens(loader(batch_size=1), 100) != first_tokens(loader(seed=2), 20)


@pytest.mark.parametrize("count", [T + 1, 2 * T - 1, 2 * T, 3 * T - 3, 5 * T])
def test_every_token_is_a_target_about_equally_often(count):
    """The last (N - T) mod T tokens of a text were in no window of any epoch."""
    one, seen = loader(np.arange(count), batch_size=1, documents=None), np.zeros(count)
    for _ in range(2000 * one.windows):
        np.add.at(seen, one.next().y[0].numpy(), 1)
    assert 0.9 * seen.mean() < seen.min() <= seen.max() < 1.1 * seen.mean()


def test_a_target_is_the_next_token_and_documents_are_counted_across_the_end_of_the_text():
    one = loader()
    for _ in range(300):
        batch = one.next()
        assert torch.equal(batch.y, (batch.x + 1) % N)
        begins = torch.isin(batch.x[:, 1:], torch.from_numpy(STARTS))
        assert torch.equal(batch.documents.diff(), begins.int())
        assert (batch.x.dtype, batch.documents.dtype, batch.x.is_contiguous()) == (torch.int64, torch.int32, True)


def test_without_an_offset_documents_of_T_tokens_are_windows():
    one = loader(np.arange(10 * T), random_offset=False, batch_size=10)
    assert sorted(first_tokens(one, 1)) == [*range(0, 10 * T, T)]


@pytest.mark.parametrize(("steps", "batch_size", "world_size"), [(0, 2, 5), (1, 4, 3), (24, 5, 1), (60, 1, 1)])
def test_a_resumed_loader_goes_on_where_it_stopped_with_any_batches_and_ranks(steps, batch_size, world_size):
    straight = loader()
    first_tokens(straight, steps)
    state = json.loads(json.dumps(straight.state_dict()))
    ranks = [loader(batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    found = [token for _ in range(100) for rank in ranks for token in first_tokens(rank, 1)]  # more than an epoch
    assert found == first_tokens(straight, len(found) // 5)


@pytest.mark.parametrize("there", [{"seed": 2}, {"context_length": 9}, {"tokens": np.arange(N)[::-1]}])
def test_a_state_of_another_run_is_refused(there):
    with pytest.raises(ValueError, match="trained"):
        loader().load_state_dict(loader(**there).state_dict())


def test_a_text_that_is_shorter_than_a_window_is_refused():
    for refused in (lambda tokens: loader(tokens), lambda tokens: validation_batches(tokens, STARTS, 4, T, 100)):
        refused(np.arange(T + 1))
        with pytest.raises(ValueError, match=f"has {T} tokens.*context_length={T - 1} or less"):
            refused(np.arange(T))


def validation(*wanted: int, **options) -> torch.Tensor:
    return torch.cat([batch.x for batch in validation_batches(np.arange(N), STARTS, *wanted, **options)])


def test_validation_reads_the_same_windows_every_time_spread_evenly_over_the_text():
    x = validation(4, T, 10 * T)
    assert [len(batch.x) for batch in validation_batches(np.arange(N), STARTS, 4, T, 10 * T)] == [4, 4, 2]
    assert torch.equal(x, validation(4, T, 10 * T))
    gaps = x[:, 0].diff()
    assert x[0, 0] == 0
    assert gaps.max() - gaps.min() <= T
    assert N - x[-1, -1] <= gaps.max() + T
    assert validation(16, T, 10**9).flatten().tolist() == [*range((N - 1) // T * T)], "each window once"


def test_validation_windows_begin_at_multiples_of_a_stride_so_their_last_tokens_come_once():
    """They began at any token, so that a short text was measured several times."""
    for wanted, stride in (200, 4), (10**9, 4), (10**9, 3), (10**9, 1):
        x = validation(4, T, wanted * T, stride=stride)
        assert len(x) == min(wanted, (N - 1 - T) // stride + 1)
        assert (x[:, 0] % stride == 0).all()
        assert len(x[:, -stride:].unique()) == len(x) * stride
        assert N - 1 - T - x[-1, 0] < 2 * stride
    assert torch.equal(validation(4, T, 10 * T, stride=T), validation(4, T, 10 * T))
