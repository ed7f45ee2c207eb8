"""The tokenizers: nothing is lost on the way to ids and back, and whatever cannot work says so in one line."""

import threading

import numpy as np
import pytest
import tiktoken

from data import tokenizer
from data.tokenizer import TextStream, TokenizerConfig, build, encode, from_json, same, to_json

FILES_OF_GPT2 = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
TEXT = 'def f(x):\r\n\treturn "caf\u00e9 \u20ac \U0001f600" * x  # <|endoftext|> is text here\n' * 20


@pytest.fixture(params=["byte", "bpe", "gpt2"])
def encoding(request: pytest.FixtureRequest, gpt2: tiktoken.Encoding) -> tiktoken.Encoding:
    return build(TokenizerConfig(request.param, vocab_size=280 if request.param == "bpe" else None), [TEXT])


def test_text_survives_the_way_to_ids_and_back(encoding):
    """Also an end of text that is spelt out: ordinary text."""
    ids = encode(encoding, TEXT)
    assert (ids.dtype, ids.flags.writeable) == (np.uint32, True)
    assert encoding.decode(ids.tolist()) == TEXT
    assert encode(encoding, "").shape == (0,)
    assert encoding.eot_token == encoding.n_vocab - 1
    assert encoding.eot_token not in ids


def test_json_brings_back_the_same_tokenizer(encoding):
    again = from_json(to_json(encoding))
    assert again.name == encoding.name
    assert same(again, encoding)
    assert to_json(again) == to_json(encoding)
    assert encode(again, TEXT).tolist() == encode(encoding, TEXT).tolist()


def test_stream_replaces_what_is_never_completed_and_refuses_ids_outside_the_vocabulary():
    stream = TextStream(tokenizer.byte_encoding())
    assert [stream.feed(b) for b in "\u20ac".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"
    gap = tiktoken.Encoding("gap", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={"<|endoftext|>": 3})
    assert [TextStream(gap).feed(token) for token in range(4)] == ["a", "\ufffd", "\ufffd", "<|endoftext|>"]
    for token in (-1, 257, 1 << 40):
        with pytest.raises(ValueError, match=f"token {token} "):
            stream.feed(token)


def test_byte_tokens_are_the_bytes():
    encoding = tokenizer.byte_encoding()
    assert encode(encoding, TEXT).tolist() == list(TEXT.encode())
    assert encode(encoding, TEXT).tolist() == encoding.encode_ordinary(TEXT)  # the shortcut is what tiktoken would do


def test_bpe_has_the_vocabulary_asked_for_or_names_one_that_the_text_can_fill():
    """rustbpe stops early without a word."""
    for size in (257, 258):  # bytes alone, and a merge
        assert tokenizer.train_bpe(["ab"], size).n_vocab == size
    assert encode(tokenizer.train_bpe(["ab"], 257), TEXT).tolist() == list(TEXT.encode())
    with pytest.raises(ValueError, match=r"\A.*vocab_size=4096 .*tokenizer\.vocab_size=258 .*\Z"):
        tokenizer.train_bpe(["ab"], 4096)


def test_bpe_does_not_depend_on_the_order_of_texts():
    texts = [f"{word} {word[::-1]}\n" * i for i, word in enumerate(TEXT.split()[:20])]
    assert to_json(tokenizer.train_bpe(texts, 290)) == to_json(tokenizer.train_bpe(texts[::-1], 290))


def test_gpt2_without_a_network_says_where_its_files_belong(tmp_path, monkeypatch):
    """A real attempt, through a proxy where nobody listens."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    with pytest.raises(ValueError, match=r"\A.*ProxyError.*TIKTOKEN_CACHE_DIR.*tokenizer=bpe.*\Z") as caught:
        tokenizer.gpt2_encoding()
    monkeypatch.setattr("tiktoken.load.read_file", None)  # the only function of tiktoken's that reads from the network
    for url in tokenizer.GPT2_URLS:
        name = FILES_OF_GPT2[url.rpartition("/")[2]]
        assert f"{url} as {name}" in str(caught.value)
        (tmp_path / name).write_text(url)
        assert tiktoken.load.read_file_cached(url) == url.encode()


def test_gpt2_does_not_wait_for_a_download_that_hangs(monkeypatch):
    """tiktoken sets no time limit on its download: where packets are dropped it would sit there for minutes."""
    end_of_test = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: end_of_test.wait())
    monkeypatch.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"0\.05 s"):
        tokenizer.gpt2_encoding()
    end_of_test.set()
