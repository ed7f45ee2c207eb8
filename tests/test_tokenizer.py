"""The tokenizers: nothing is lost on the way to ids and back."""

import pytest
import tiktoken

from data import tokenizer
from data.tokenizer import TokenizerConfig, build, encode, from_json, to_json, to_text

TEXT = 'def f(x):\r\n\treturn "caf\u00e9 \u20ac \U0001f600" * x  # <|endoftext|> is text here\n' * 20


@pytest.fixture(params=["byte", "bpe", "gpt2"])
def encoding(request: pytest.FixtureRequest, gpt2: tiktoken.Encoding) -> tiktoken.Encoding:
    return tokenizer.build(TokenizerConfig(request.param, vocab_size=280 if request.param == "bpe" else None), [TEXT])


def test_text_survives_the_way_to_ids_and_back(encoding):
    """Also an end of text that is spelt out: ordinary text."""
    ids = encode(encoding, TEXT)
    assert encoding.decode(ids.tolist()) == TEXT
    assert encoding.eot_token not in ids
    assert ids.tolist() == encoding.encode_ordinary(TEXT)
    assert encode(encoding, "").shape == (0,)


def test_token_bytes_add_up_to_the_text(encoding):
    """So bits per byte is exact."""
    lengths = tokenizer.token_bytes(encoding)
    assert lengths[encode(encoding, TEXT)].sum() == len(TEXT.encode())
    assert (len(lengths), lengths[encoding.eot_token]) == (encoding.n_vocab, 0)


def test_json_brings_back_the_same_tokenizer(encoding):
    again = from_json(to_json(encoding))
    assert to_json(again) == to_json(encoding)
    assert encode(again, TEXT).tolist() == encode(encoding, TEXT).tolist()


def test_a_character_is_shown_once_it_is_complete():
    encoding, cut = build(TokenizerConfig("byte"), []), "\u20aca\u20ac".encode()[:-1]
    assert [*to_text(encoding, cut)] == ["", "", "\u20ac", "a", "", "", "\ufffd"]
    assert [*to_text(encoding, [300, 97, 256, 98])] == ["\ufffd", "a", ""]  # 300: of a padded vocabulary


def test_bpe_of_a_small_text_has_as_many_tokens_as_there_are_pairs_unless_their_number_is_set(make, tmp_path, capsys):
    """A text of 5 KB was refused without tokenizer.vocab_size."""
    text, file = " ".join(f"word{i}" for i in range(600))[:5000], tmp_path / "a.txt"
    file.write_text(text)
    encoding = from_json((make(file, TokenizerConfig("bpe")) / "tokenizer.json").read_text())
    assert 257 < encoding.n_vocab < 4096
    assert f"({encoding.name})" == f"(bpe{encoding.n_vocab})" in capsys.readouterr().err
    assert encoding.decode(encode(encoding, text).tolist()) == text
    with pytest.raises(ValueError, match=rf"\A.*vocab_size=4096 .*vocab_size={encoding.n_vocab} .*\Z"):
        make(file, TokenizerConfig("bpe", 4096))


@pytest.mark.parametrize("options", [{"kind": "byte", "vocab_size": 300}, {"kind": "bpe", "vocab_size": 256}])
def test_a_vocabulary_size_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=r"vocab_size"):
        TokenizerConfig(**options)


def test_gpt2_without_a_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no\nnetwork")))
    with pytest.raises(ValueError, match=r"\A.*TIKTOKEN_CACHE_DIR.*tokenizer=bpe\Z"):
        tokenizer.gpt2_encoding()
