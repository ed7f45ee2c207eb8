"""Text <-> token ids. There are three tokenizers, all of them tiktoken Encodings: nothing downstream knows which.

    byte   257 symbols: byte b is token b, and 256 is end of text. Nothing to train or download, and any text fits; the
           price is 3.5 times as many tokens as bpe makes of the same text, and so that much less text in a context.
    bpe    byte pairs merged on your own corpus (rustbpe; 12 MB take about a second), `vocab_size` symbols in all.
    gpt2   GPT-2's 50257 symbols, which tiktoken downloads once.

Ready token files (data=bin) may bring a fourth, in a tokenizer.json beside them: tokenizer=kept.

A tokenizer is kept as JSON beside the token files and inside each checkpoint. A pickle would be shorter to write, but
opening one runs whatever code it holds, and weights are files that people pass around.
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
BPE_SYMBOLS = 4096  # tokenizer=bpe's, unless tokenizer.vocab_size says otherwise
MOST_IDS = 1 << 24  # of a vocabulary; the largest in use are 64 times smaller
DOWNLOAD_SECONDS = 30  # for GPT-2's two files, 1.5 MB together
GPT2_URLS = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
]


@dataclass
class TokenizerConfig:
    """Which tokenizer. Raises ValueError for a vocabulary size that it cannot have."""

    kind: str = "byte"  # byte | bpe (learnt from the text) | gpt2 | kept (the one that lies beside data=bin)
    vocab_size: int | None = None  # symbols of bpe, the end-of-text token included; None: 4096

    def __post_init__(self):
        if self.vocab_size is not None and self.kind != "bpe":
            raise ValueError(f"tokenizer.vocab_size={self.vocab_size}: tokenizer={self.kind} has its own; leave it out")


def build(config: TokenizerConfig, texts: Iterable[str]) -> tiktoken.Encoding:
    """The tokenizer that `config` names. `texts` is read by bpe alone, once. Raises ValueError for an unknown kind."""
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
    """257 symbols: byte b is token b, and 256 is the end of a text."""
    ranks = {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding("byte", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


def train_bpe(texts: Iterable[str], vocab_size: int) -> tiktoken.Encoding:
    """Byte-pair encoding learnt from `texts`: 256 bytes, `vocab_size` - 257 merges, and end of text as the last id.

    The same texts give the same merges, whatever their order and the number of threads. Raises ValueError when
    vocab_size leaves no room for the bytes, or when the texts run out of pairs before there are that many merges.
    """
    if vocab_size < 257:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} has no room for 256 bytes and end of text: use 257 or more"
        )
    trainer = rustbpe.Tokenizer()
    # rustbpe copies buffer_size texts before it counts them; its default, 8192, could be gigabytes of long texts.
    # rustbpe counts in 32 bits; no text has that many pairs, which is what is said below
    trainer.train_from_iterator(iter(texts), min(vocab_size, 2**31) - 1, buffer_size=256)
    # A short corpus is no error to rustbpe: it stops early. A vocabulary smaller than the one asked for is one to us,
    # since the model's size and every figure quoted with it would silently be another.
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

    Raises ValueError when it cannot be had within DOWNLOAD_SECONDS. tiktoken downloads without a time limit and
    offers no way to set one; a network that swallows packets would hold it for minutes. Hence the thread: a daemon,
    so that a download which never ends does not keep the process from ending.
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
    # tiktoken keeps a file under the SHA-1 of its address, and checks what is in it.
    files = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in GPT2_URLS)
    raise ValueError(
        f"tokenizer=gpt2 has to download its vocabulary and could not ({reason}): put {files} into a folder "
        "and set TIKTOKEN_CACHE_DIR to it, or use tokenizer=bpe"
    )


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Token ids of ordinary text, uint32 (tokens,).

    "<|endoftext|>" spelt out in the text is encoded like any other characters. Were it to become the special token, a
    file that merely mentions it (this one does) would break into two documents.
    """
    if encoding.name == "byte":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    return encoding.encode_to_numpy(text, disallowed_special=()).copy()  # the copy: tiktoken's own array is read-only


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each token stands for, int32 (n_vocab,); 0 for special tokens and for ids not in use.

    Its sum over the tokens of any text is that text's exact length in bytes. So bits per byte is exact for any batch,
    and losses under different tokenizers can be compared.
    """
    lengths = np.zeros(encoding.n_vocab, np.int32)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


class TextStream:
    """Token ids in, text out, for printing while generating.

    A character of several bytes may be spread over tokens. Decoding each token for itself would print a replacement
    mark for every fragment; here the fragments wait until the character is complete.
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
        """What is left at the end: "" or a replacement mark for a character that was never completed."""
        return self.decoder.decode(b"", final=True)


def to_json(encoding: tiktoken.Encoding) -> str:
    """The whole tokenizer as JSON, one token a line in order of rank; base64, since a token may be half a character."""
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
        # Checked here because tiktoken panics on these two, past every `except Exception`, with a Rust stack trace.
        if len(set(ranks.values())) < len(ranks) or not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("ranks must be distinct and hold all 256 bytes")
        if END_OF_TEXT not in content["special_tokens"]:  # a file of someone else's: nothing works without it
            raise ValueError(f"special_tokens must hold {END_OF_TEXT}")
        ids = [*ranks.values(), *content["special_tokens"].values()]
        if len(set(ids)) < len(ids) or max(ids) >= MOST_IDS:  # a table of all ids is made: a wrong one fills the memory
            raise ValueError(f"ids must be distinct and below {MOST_IDS}")
        return tiktoken.Encoding(
            content["name"],
            pat_str=content["pattern"],
            mergeable_ranks=ranks,
            special_tokens=content["special_tokens"],
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"tokenizer.json cannot be read ({type(error).__name__}: {error}): make it again") from error
