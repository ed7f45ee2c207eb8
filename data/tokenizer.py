"""Text <-> token ids. Each tokenizer is a tiktoken Encoding, so other code treats them alike.

    byte   257 tokens: byte b is token b, and 256 is end of text. 3.5 times as many tokens as bpe.
    bpe    Byte-pair encoding learned from the training text (rustbpe; 12 MB take about a second).
    gpt2   GPT-2's 50,257 tokens, which tiktoken downloads once.
    kept   The tokenizer.json beside token files (data=bin), or the tokenizer of init_from= or of a resumed run.

Token files and checkpoints have their tokenizer beside them as JSON: loading a stranger's pickle would run code.
"""

import base64
import codecs
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import rustbpe
import tiktoken

from conf.keys import check, key

END_OF_TEXT = "<|endoftext|>"


@dataclass
class TokenizerConfig:
    """Which tokenizer. ValueError if vocab_size is set for another kind than bpe."""

    kind: str = key("byte", among="byte | bpe (learned from the text) | gpt2 | kept (of init_from= or data=bin)")
    vocab_size: int | None = key(None, "tokens of bpe; null: 4096, fewer if the text is small", least=257)

    def __post_init__(self):
        check(self, "tokenizer.")
        if self.vocab_size is not None and self.kind != "bpe":
            raise ValueError(f"tokenizer.vocab_size={self.vocab_size}: tokenizer={self.kind} has its own; leave it out")


def build(config: TokenizerConfig, texts: Iterable[str], kept: tiktoken.Encoding | None = None) -> tiktoken.Encoding:
    """The tokenizer that `config` names. Only bpe reads `texts`. ValueError if it is to be `kept`, and that is None."""
    if config.kind == "kept":
        if kept is None:
            raise ValueError("tokenizer=kept needs init_from= or the tokens' tokenizer.json: use tokenizer=gpt2 or bpe")
        return kept
    if config.kind == "bpe":
        return train_bpe(texts, config.vocab_size)
    if config.kind == "gpt2":
        return gpt2_encoding()
    ranks = {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding("byte", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


def train_bpe(texts: Iterable[str], vocab_size: int | None = None) -> tiktoken.Encoding:
    """Byte-pair encoding learned from `texts`: 256 bytes, the merges, and end of text as the last id; `vocab_size`
    tokens in all. None: 4096, or as many as the texts have pairs for. ValueError if vocab_size is more than that."""
    trainer = rustbpe.Tokenizer()
    # buffer_size: how many texts rustbpe copies before it counts them. Its default, 8192, could be gigabytes.
    trainer.train_from_iterator(iter(texts), (vocab_size or 4096) - 1, buffer_size=256)
    size = trainer.vocab_size + 1  # rustbpe stops without an error when no pairs are left
    if vocab_size and size < vocab_size:
        way_out = f"use tokenizer.vocab_size={size} or less, tokenizer=byte, or more text"
        raise ValueError(f"tokenizer.vocab_size={vocab_size} is more than this text has pairs for: {way_out}")
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    name, pattern, special = f"bpe{size}", trainer.get_pattern(), {END_OF_TEXT: size - 1}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's tokenizer, from tiktoken's cache or, the first time, from the network. ValueError if neither has it."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # OSError: no connection; ValueError: a download with the wrong hash
        way_out = "set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has kept it elsewhere, or use tokenizer=bpe"
        raise ValueError(f"tokenizer=gpt2 could not be downloaded ({type(error).__name__}): {way_out}") from error


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Token ids of ordinary text, uint32 (tokens,). "<|endoftext|>" in it is ordinary text, too: a file that only
    mentions it, like this one, must not become two documents."""
    if encoding.name == "byte":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    return encoding.encode_to_numpy(text, disallowed_special=()).copy()  # the copy: tiktoken's own is read-only


def beginning(encoding: tiktoken.Encoding) -> list[int]:
    """What a text to write begins after: a line end and the end-of-text token. A model has seldom seen the latter as
    the first token of all, because in training the end of another document stands before it."""
    return [*encode(encoding, "\n").tolist(), encoding.eot_token]


def encode_all(encoding: tiktoken.Encoding, texts: list[str]) -> list:
    """Token ids of each text, as encode() gives them. tiktoken uses all cores."""
    if encoding.name == "byte":
        return [encode(encoding, text) for text in texts]
    return encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """The number of bytes in each token's text, int32 (n_vocab,); 0 for special tokens and unused ids. Their sum over a
    text's tokens is the text's length in bytes, so bits per byte is exact, and comparable between tokenizers."""
    lengths = np.zeros(encoding.n_vocab, np.int32)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def to_text(encoding: tiktoken.Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens up to the first end of text: for each the part that it completes, often "", and at last a
    replacement character if the last one is incomplete. A character may have its bytes in several tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in takewhile(lambda token: token != encoding.eot_token, tokens):
        try:
            yield decoder.decode(encoding.decode_single_token_bytes(token))
        except KeyError:  # a padded vocabulary has ids without tokens
            yield "\ufffd"
    yield decoder.decode(b"", final=True)


def to_json(encoding: tiktoken.Encoding) -> str:
    """The whole tokenizer as JSON, a token per line, by rank. Tokens are in base64: one may be half a character."""
    # The names with an underscore are those that tiktoken's README uses to extend an Encoding.
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {"name": encoding.name, "pattern": encoding._pat_str, "special_tokens": encoding._special_tokens}
    return json.dumps(content | {"ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks}}, indent=0)


def from_json(text: str | bytes) -> tiktoken.Encoding:
    content = json.loads(text)
    ranks = {base64.b64decode(token): rank for token, rank in content["ranks"].items()}
    name, pattern, special = content["name"], content["pattern"], content["special_tokens"]
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
