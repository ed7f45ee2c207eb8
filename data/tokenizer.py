"""Text <-> token ids. There are three tokenizers. All are tiktoken Encodings, so other code treats them alike.

    byte   257 tokens: byte b is token b, and 256 is end of text. Nothing to train or download, and it encodes any text.
           The price: 3.5 times as many tokens as bpe, so a context covers 3.5 times less text.
    bpe    Byte-pair encoding learned from your own text (rustbpe; 12 MB take about a second), `vocab_size` tokens.
    gpt2   GPT-2's 50,257 tokens, which tiktoken downloads once.

Token files of your own (data=bin) may have a fourth, in a tokenizer.json beside them: tokenizer=kept. A run with
init_from= keeps the tokenizer of the weights.

A tokenizer is saved as JSON beside the token files and in each checkpoint. A pickle would take less code, but loading
one runs the code in it, and people share checkpoints. Hugging Face's tokenizer.json is another format:
from_huggingface() and to_huggingface() translate it.
"""

import base64
import codecs
import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import rustbpe
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

from conf.keys import check, key

END_OF_TEXT = "<|endoftext|>"
BPE_SYMBOLS = 4096  # vocabulary size of tokenizer=bpe if tokenizer.vocab_size is None
MOST_IDS = 1 << 24  # maximum size of a vocabulary; the largest in use are 64 times smaller
LONGEST = 1000  # bytes of a token in another program's file; GPT-2's longest has 128
LONGEST_TEXT = 1 << 16  # characters of a pattern; GPT-4o's has 463, and 10 million take 4 GB; and of a special token
DOWNLOAD_SECONDS = 30  # time limit for GPT-2's two files, 1.5 MB together
GPT2_URLS = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
]


@dataclass
class TokenizerConfig:
    """Which tokenizer. Raises ValueError if vocab_size is set for another kind than bpe."""

    kind: str = key(
        "byte", among="byte | bpe (learned from the text) | gpt2 | kept (that of init_from= or of data=bin)"
    )
    vocab_size: int | None = key(None, f"vocabulary size of bpe, with the end-of-text token; null: {BPE_SYMBOLS}")

    def __post_init__(self):
        check(self, "tokenizer.")
        if self.vocab_size is not None and self.kind != "bpe":
            raise ValueError(f"tokenizer.vocab_size={self.vocab_size}: tokenizer={self.kind} has its own; leave it out")


def build(config: TokenizerConfig, texts: Iterable[str]) -> tiktoken.Encoding:
    """The tokenizer that `config` names. Only bpe reads `texts`, once. Raises ValueError for kept."""
    match config.kind:
        case "byte":
            return byte_encoding()
        case "bpe":
            return train_bpe(texts, BPE_SYMBOLS if config.vocab_size is None else config.vocab_size)
        case "gpt2":
            return gpt2_encoding()
        case _:
            raise ValueError("tokenizer=kept is that of init_from= or of data=bin: choose tokenizer=byte, bpe or gpt2")


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
    wait for minutes if a network drops its packets. So we download in a thread of a ThreadPool. These are daemons, so
    the process can end even if the download never does.
    """
    try:
        with ThreadPool(1) as pool:
            return pool.apply_async(tiktoken.get_encoding, ("gpt2",)).get(DOWNLOAD_SECONDS)
    except multiprocessing.TimeoutError:
        reason = f"no answer in {DOWNLOAD_SECONDS} s"
    except (OSError, ValueError) as error:  # OSError: no connection; ValueError: a download with the wrong hash
        reason = type(error).__name__
    # tiktoken's cache names a file by the SHA-1 of its address, and checks the content.
    files = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in GPT2_URLS)
    raise ValueError(
        f"tokenizer=gpt2 has to download its vocabulary and could not ({reason}): put {files} into a folder "
        "and set TIKTOKEN_CACHE_DIR to it, or use tokenizer=bpe"
    )


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Token ids of ordinary text, uint32 (tokens,).

    The characters "<|endoftext|>" in a text are encoded like any others, not as the special token. Otherwise a file
    that only mentions it, like this one, would be split into two documents. ValueError for a text that a stranger's
    pattern cannot cut.
    """
    if encoding.name == "byte":
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
    with panic_as("the tokenizer's pattern {!r} cannot cut this text", encoding._pat_str[:100]):
        return encoding.encode_to_numpy(text, disallowed_special=()).copy()  # the copy: tiktoken's own is read-only


@contextmanager
def panic_as(message: str, *values: Any) -> Iterator[None]:
    """Raises ValueError(message with these values) in place of a panic of Rust's, which is no Exception."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise ValueError(message.format(*values)) from panic


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

    stop: the text ends before the first of these strings to be complete. What may become one of them is kept too.
    """

    def __init__(self, encoding: tiktoken.Encoding, stop: Sequence[str] = ()) -> None:
        self.encoding, self.stop = encoding, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.kept = ""  # the beginning of a stop string
        self.stopped = False  # whether a stop string was complete; the text has ended

    def feed(self, token: int) -> str:
        """The text that `token` completes, often "". A replacement character for an id that no token has. Raises
        ValueError for one outside the vocabulary."""
        try:
            text = self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError) as error:
            if not 0 <= token < self.encoding.n_vocab:
                raise ValueError(f"token {token} is not in the vocabulary of tokenizer {self.encoding.name}") from error
            text = "\ufffd".encode()
        return self.before_stop(self.decoder.decode(text))

    def flush(self) -> str:
        """The rest of the text: what was kept, and a replacement character if the last character is incomplete."""
        rest = self.before_stop(self.decoder.decode(b"", final=True)) + self.kept
        self.kept = ""
        return rest

    def before_stop(self, text: str) -> str:
        """What can be shown of self.kept + text."""
        if self.stopped:
            return ""
        kept = self.kept + text
        complete = [(at + len(string), at) for string in self.stop if (at := kept.find(string)) >= 0]
        begun = (i for i in range(len(kept)) if any(string.startswith(kept[i:]) for string in self.stop))
        at = min(complete)[1] if complete else next(begun, len(kept))
        self.kept, self.stopped = "" if complete else kept[at:], bool(complete)
        return kept[:at]


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
        return checked(content["name"], content["pattern"], ranks, content["special_tokens"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"tokenizer.json cannot be read ({type(error).__name__}: {error}): make it again") from error


def checked(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    """The Encoding. ValueError if tiktoken or we cannot work with it."""
    # tiktoken panics on these two with a Rust stack trace, and `except Exception` does not catch a panic.
    if len(set(ranks.values())) < len(ranks) or not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError("ranks must be distinct and hold all 256 bytes")
    if END_OF_TEXT not in special:  # another program's file may lack it, and we need it
        raise ValueError(f"special_tokens must hold {END_OF_TEXT}")
    if (longest := max(map(len, [pattern, *special]))) > LONGEST_TEXT:
        raise ValueError(f"the pattern or a special token has {longest:,} characters, more than {LONGEST_TEXT:,}")
    ids = [*ranks.values(), *special.values()]
    if len(set(ids)) < len(ids) or max(ids) >= MOST_IDS:  # a huge id would fill the memory: we make a table of all
        raise ValueError(f"ids must be distinct and below {MOST_IDS}")
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def same(a: tiktoken.Encoding, b: tiktoken.Encoding) -> bool:
    """Whether both give the same ids for every text. Their names may differ."""
    return (a._pat_str, a._mergeable_ranks, a._special_tokens) == (b._pat_str, b._mergeable_ranks, b._special_tokens)


# ---- Hugging Face's tokenizer.json, for byte-level BPE

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NOT_HERE = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")  # a model's options
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # tokens that these files name are special
NO_PATTERN = BYTE_LEVEL | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RUSTBPE = (  # tokenizer=bpe's
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> dict[str, Any]:
    """A pre_tokenizer that cuts the text where `pattern` does."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, NO_PATTERN]}


# {our pattern: the pre_tokenizer that cuts a text at the same places}. Other patterns are refused: the two libraries
# have different regular expressions, and a stranger's could take for ever.
PATTERNS = {
    r50k_pat_str: BYTE_LEVEL,  # GPT-2's
    RUSTBPE: split_by(RUSTBPE),
    LLAMA3: split_by(LLAMA3),
    # SmolLM's: GPT-2's pattern between digits, each of which stands alone
    r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?=\p{N})|\s+(?!\S)|\s": {
        "type": "Sequence",
        "pretokenizers": [DIGITS, BYTE_LEVEL],
    },
    "(?s:.)": NO_PATTERN,  # byte's: without merges, it does not matter where a text is cut
}


# {letter: byte}: how a byte-level vocabulary writes bytes. Visible ones are themselves, the rest begin at 256.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {chr(byte): byte for byte in VISIBLE}
LETTERS |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}


def bytes_of(letters: str) -> bytes:
    return bytes(LETTERS[letter] for letter in letters)


def halves(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """What byte-pair encoding makes of `token` with the merges of lower rank: the two parts that its own merge joins.

    It is one part for a byte. It is three or more if no merge reaches the token: then it is found as a whole only.
    """
    parts = [bytes([byte]) for byte in token]
    while True:
        joined = [(ranks.get(a + b, MOST_IDS), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(joined, default=(MOST_IDS, 0))
        if rank >= ranks[token]:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def from_huggingface(content: Any, beside: dict[str, Any], end: int | None) -> tiktoken.Encoding:
    """A tokenizer.json, parsed, as an Encoding that gives the same ids for every text.

    beside: the settings of special_tokens_map.json and tokenizer_config.json, which count too, and as added_tokens the
    content of added_tokens.json. end: id of the token that ends a text. If no token is named END_OF_TEXT, this one gets
    the name. Special tokens are not looked for in a text, as everywhere here. Raises ValueError, one line, for any
    other kind of tokenizer.
    """
    try:
        model = content["model"]
        kind = model.get("type", "BPE")
        if kind != "BPE" or model.get("byte_fallback") or content.get("normalizer"):
            what = repr(kind) if kind != "BPE" else "BPE with byte_fallback or a normalizer, as of sentencepiece"
            raise ValueError(f"it is {what}, and only byte-level BPE as of GPT-2 or Llama 3 can be used")
        for key in NOT_HERE:
            if model.get(key):
                raise ValueError(f"{key}={model[key]!r} has no counterpart here")
        of_class = str(beside.get("tokenizer_class")).removesuffix("Fast")
        if beside.get("add_prefix_space") and of_class not in ("PreTrainedTokenizer", "TokenizersBackend"):
            raise ValueError("tokenizer_config.json has add_prefix_space=true, a space before each text; here is none")
        if beside.get("fast_tokenizer_files", ["tokenizer.json"]) != ["tokenizer.json"]:
            raise ValueError("tokenizer_config.json has fast_tokenizer_files, and only tokenizer.json is read")
        if (decoder := content.get("decoder") or {}).get("type") != "ByteLevel":
            raise ValueError(f"its decoder is {json.dumps(decoder)[:200]}, and only ByteLevel can be used")
        told = beside.get("added_tokens_decoder") or {}
        named = [beside.get(f"{name}_token") for name in NAMED]
        special = {token["content"] for token in told.values() if token.get("special") is True}
        special |= {token["content"] if isinstance(token, dict) else token for token in named}
        added = content.get("added_tokens", [])
        unlike = [token["content"] for token in added if token.get("special", True) is not True]
        unlike += [token["content"] for token in told.values() if token.get("special") is not True]
        special |= {token["content"] for token in added}
        unlike += [text for text in beside.get("added_tokens", {}) if text not in special]
        if unlike:
            what = f"its added token {unlike[0][:100]!r} is not special"
            raise ValueError(f"{what}, so it is looked for in each text, and here none is")
        ids = {token["content"]: token["id"] for token in added}
        if END_OF_TEXT not in ids:
            ids = {END_OF_TEXT if token == end else name: token for name, token in ids.items()}
        own = set(ids.values())
        ranks = {bytes_of(token): rank for token, rank in model["vocab"].items() if rank not in own}
        if not all(type(rank) is int and 0 <= rank < MOST_IDS for rank in [*ranks.values(), *own]):
            raise ValueError(f"an id is no number from 0 on and below {MOST_IDS}")
        if max(map(len, ranks), default=0) > LONGEST:
            raise ValueError(f"a token is longer than {LONGEST} bytes")
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        check_merges(ranks, [(bytes_of(a), bytes_of(b)) for a, b in merges], bool(model.get("ignore_merges")))
        pattern = pattern_of(content.get("pre_tokenizer"), max(map(len, ranks)) > 1)
        encoding = checked(f"bpe{len(ranks) + len(ids)}", pattern, ranks, ids)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}" if type(error) is not ValueError else error
        raise ValueError(f"its tokenizer cannot be used ({why})") from error
    byte = byte_encoding()  # encode() knows it by its name
    return byte if same(encoding, byte) else encoding


def check_merges(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], whole_first: bool) -> None:
    """ValueError if tiktoken, which merges by the ids alone, would merge in another way than these merges say.

    whole_first: a piece of text that is a token is that token, whatever the merges are; in tiktoken it always is.
    """
    ids = [ranks[a + b] for a, b in merges]
    if ids != sorted(ids):
        raise ValueError("its merges are not in the order of their ids")
    known = set(merges)
    for token in ranks:
        parts = halves(ranks, token)
        if len(parts) > 1 and tuple(parts) not in known and not (whole_first and len(parts) > 2):
            raise ValueError(f"no merge makes its token {ranks[token]}")


def pattern_of(pre_tokenizer: Any, longer: bool) -> str:
    """Our pattern for a pre_tokenizer of tokenizer.json. ValueError if we have none.

    longer: a token is longer than a byte. If none is, it does not matter where a text is cut."""

    def plain(node: dict[str, Any]) -> dict[str, Any]:  # with what older files leave out; offsets change no id
        defaults = BYTE_LEVEL | {"add_prefix_space": True}
        return defaults | node | {"trim_offsets": True} if node.get("type") == "ByteLevel" else node

    written = json.dumps(pre_tokenizer)
    found = json.loads(written, object_hook=plain)
    for pattern, theirs in PATTERNS.items():
        if found == theirs and not (longer and theirs == NO_PATTERN):
            return pattern if longer else "(?s:.)"
    raise ValueError(f"its pre_tokenizer {written[:200]} is none of those known here")


def to_huggingface(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the same ids as `encoding`. ValueError for an unknown pattern."""
    if encoding._pat_str not in PATTERNS:
        raise ValueError(
            f"the tokenizer {encoding.name} cuts a text by the pattern {encoding._pat_str!r}, which cannot be "
            "exported: train with tokenizer=byte, bpe or gpt2"
        )
    ranks = encoding._mergeable_ranks
    letter = {byte: letter for letter, byte in LETTERS.items()}
    written = {token: "".join(letter[byte] for byte in token) for token in sorted(ranks, key=ranks.__getitem__)}
    merges: list[list[str]] = []
    for token in written:
        parts = halves(ranks, token)
        splits = [(token[:i], token[i:]) for i in range(1, len(token))] if len(parts) > 2 else [tuple(parts)]
        merges += [[written[a], written[b]] for a, b in filter(lambda s: len(s) == 2, splits) if {a, b} <= ranks.keys()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": name, **flags} for name, token in special],
        "normalizer": None,
        "pre_tokenizer": PATTERNS[encoding._pat_str],
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            **dict.fromkeys(NOT_HERE),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken does: a piece of text that is a token is that token
            # With the special ones: the tokenizers library numbers those that are missing here from len(vocab) on.
            "vocab": {text: ranks[token] for token, text in written.items()} | dict(special),
            "merges": merges,
        },
    }
