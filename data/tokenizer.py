"""Text <-> token ids. There are three tokenizers. All are tiktoken Encodings, so other code treats them alike.

    byte   257 tokens: byte b is token b, and 256 is end of text. Nothing to train or download, and it encodes any text.
           The price: 3.5 times as many tokens as bpe, so a context covers 3.5 times less text.
    bpe    Byte-pair encoding learned from your own text (rustbpe; 12 MB take about a second), `vocab_size` tokens.
    gpt2   GPT-2's 50,257 tokens, which tiktoken downloads once.

Token files of your own (data=bin) may have a fourth, in a tokenizer.json beside them: tokenizer=kept.

A tokenizer is saved as JSON beside the token files and in each checkpoint. A pickle would take less code, but loading
one runs the code in it, and people share checkpoints.
"""

import base64
import codecs
import hashlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import rustbpe
import tiktoken

END_OF_TEXT = "<|endoftext|>"
BPE_SYMBOLS = 4096  # vocabulary size of tokenizer=bpe if tokenizer.vocab_size is None
MOST_IDS = 1 << 24  # maximum size of a vocabulary; the largest in use are 64 times smaller
DOWNLOAD_SECONDS = 30  # time limit for GPT-2's two files, 1.5 MB together
GPT2_URLS = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
]


@dataclass
class TokenizerConfig:
    """Which tokenizer. Raises ValueError if vocab_size is set for another kind than bpe."""

    kind: str = "byte"  # byte | bpe (learned from the text) | gpt2 | kept (the tokenizer.json beside data=bin)
    vocab_size: int | None = None  # vocabulary size of bpe, with the end-of-text token; None: 4096

    def __post_init__(self):
        if self.vocab_size is not None and self.kind != "bpe":
            raise ValueError(f"tokenizer.vocab_size={self.vocab_size}: tokenizer={self.kind} has its own; leave it out")


def build(config: TokenizerConfig, texts: Iterable[str]) -> tiktoken.Encoding:
    """The tokenizer that `config` names. Only bpe reads `texts`, once. Raises ValueError for an unknown kind."""
    match config.kind:
        case "byte":
            return byte_encoding()
        case "bpe":
            return train_bpe(texts, BPE_SYMBOLS if config.vocab_size is None else config.vocab_size)
        case "gpt2":
            return gpt2_encoding()
        case "kept":
            raise ValueError("tokenizer=kept is the tokenizer.json beside data=bin: choose tokenizer=byte, bpe or gpt2")
        case _:
            raise ValueError(f"tokenizer.kind={config.kind} is unknown: choose tokenizer=byte, bpe or gpt2")


def byte_encoding() -> tiktoken.Encoding:
    """257 tokens: byte b is token b, and 256 is end of text."""
    ranks = {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding("byte", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


def train_bpe(texts: Iterable[str], vocab_size: int) -> tiktoken.Encoding:
    """Byte-pair encoding learned from `texts`: 256 bytes, `vocab_size` - 257 merges, and end of text as the last id.

    The same texts always give the same merges; their order and the number of threads do not matter. Raises ValueError
    if vocab_size is below 257, or if the texts have too few pairs for so many merges.
    """
    if vocab_size < 257:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} has no room for 256 bytes and end of text: use 257 or more"
        )
    trainer = rustbpe.Tokenizer()
    # buffer_size: rustbpe copies so many texts before it counts them. Its default, 8192, could be gigabytes.
    # min(): rustbpe counts in 32 bits. No text has so many pairs, so a larger vocab_size ends in the error below.
    trainer.train_from_iterator(iter(texts), min(vocab_size, 2**31) - 1, buffer_size=256)
    # For a short text rustbpe stops early, without an error. We raise one, because with a smaller vocabulary the model
    # would silently have another size than asked for.
    if trainer.vocab_size < vocab_size - 1:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} is more than this text has pairs for: "
            f"use tokenizer.vocab_size={trainer.vocab_size + 1} or less, tokenizer=byte, or more text"
        )
    return tiktoken.Encoding(
        f"bpe{vocab_size}",
        pat_str=trainer.get_pattern(),
        mergeable_ranks={bytes(token): rank for token, rank in trainer.get_mergeable_ranks()},
        special_tokens={END_OF_TEXT: vocab_size - 1},
    )


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's tokenizer, from tiktoken's cache or, the first time, from the network.

    Raises ValueError if that takes longer than DOWNLOAD_SECONDS. tiktoken has no time limit for downloads, and would
    wait for minutes if a network drops its packets. So we download in a thread. It is a daemon thread, so that the
    process can end even if the download never does.
    """
    outcome: list[tiktoken.Encoding | Exception] = []

    def download() -> None:
        try:
            outcome.append(tiktoken.get_encoding("gpt2"))
        except (OSError, ValueError) as error:  # OSError: no connection; ValueError: a download with the wrong hash
            outcome.append(error)

    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if outcome and isinstance(outcome[0], tiktoken.Encoding):
        return outcome[0]
    reason = type(outcome[0]).__name__ if outcome else f"no answer in {DOWNLOAD_SECONDS} s"
    # tiktoken's cache names a file by the SHA-1 of its address, and checks the content.
    files = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in GPT2_URLS)
    raise ValueError(
        f"tokenizer=gpt2 has to download its vocabulary and could not ({reason}): put {files} into a folder "
        "and set TIKTOKEN_CACHE_DIR to it, or use tokenizer=bpe"
    )


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Token ids of ordinary text, uint32 (tokens,).

    The characters "<|endoftext|>" in a text are encoded like any others, not as the special token. Otherwise a file
    that only mentions it, like this one, would be split into two documents.
    """
    if encoding.name == "byte":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    return encoding.encode_to_numpy(text, disallowed_special=()).copy()  # the copy: tiktoken's own array is read-only


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """The number of bytes in each token's text, int32 (n_vocab,); 0 for special tokens and unused ids.

    The sum over the tokens of a text is exactly the text's length in bytes. So bits per byte is exact for every batch,
    and losses of different tokenizers can be compared.
    """
    lengths = np.zeros(encoding.n_vocab, np.int32)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


class TextStream:
    """Turns token ids into text, one by one, for printing while generating.

    A character of several bytes may be split over several tokens. Decoding each token alone would print a replacement
    character for every part. This class keeps the parts until the character is complete.
    """

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes, often "". Raises ValueError for an id outside the vocabulary."""
        try:
            return self.decoder.decode(self.encoding.decode_single_token_bytes(token))
        except (KeyError, OverflowError) as error:
            raise ValueError(f"token {token} is not in the vocabulary of tokenizer {self.encoding.name}") from error

    def flush(self) -> str:
        """The rest of the text: "", or a replacement character if the last character is incomplete."""
        return self.decoder.decode(b"", final=True)


def to_json(encoding: tiktoken.Encoding) -> str:
    """The whole tokenizer as JSON, one token per line, by rank. Tokens are in base64: one may be half a character."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
    }
    return json.dumps(content, indent=0)


def from_json(text: str | bytes) -> tiktoken.Encoding:
    """The inverse of to_json. Raises ValueError for anything that to_json did not write."""
    try:
        content = json.loads(text)
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in content["ranks"].items()}
        # tiktoken panics on these two with a Rust stack trace, and `except Exception` does not catch a panic.
        if len(set(ranks.values())) < len(ranks) or not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("ranks must be distinct and hold all 256 bytes")
        if END_OF_TEXT not in content["special_tokens"]:  # another program's file may lack it, and we need it
            raise ValueError(f"special_tokens must hold {END_OF_TEXT}")
        ids = [*ranks.values(), *content["special_tokens"].values()]
        if len(set(ids)) < len(ids) or max(ids) >= MOST_IDS:  # a huge id would fill the memory: we make a table of all
            raise ValueError(f"ids must be distinct and below {MOST_IDS}")
        return tiktoken.Encoding(
            content["name"],
            pat_str=content["pattern"],
            mergeable_ranks=ranks,
            special_tokens=content["special_tokens"],
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"tokenizer.json cannot be read ({type(error).__name__}: {error}): make it again") from error
