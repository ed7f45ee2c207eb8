"""Downloads tinyshakespeare, HellaSwag and the beginning of TinyStories by HTTP, other files with huggingface_hub.

huggingface_hub keeps files in its own cache (HF_HOME), resumes a download whose connection broke, shows its progress,
and knows mirrors (HF_ENDPOINT), private files (HF_TOKEN) and machines without a network (HF_HUB_OFFLINE). A file that
the user has put into data/cache is used first.
"""

import hashlib
import http.client
import json
import secrets
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"  # 12 MB
HELLASWAG_QUESTIONS = 10_042
TIMEOUT = 30  # seconds to connect, and between two packets

FINEWEB = "kjj0/fineweb10B-gpt2"  # modded-nanogpt's shards of FineWeb as GPT-2 tokens, a dataset on Hugging Face
FINEWEB_SHARDS = 103
DOWNLOADS = ("fineweb10B", "tinystories", "shakespeare", "hellaswag", "hub")  # in a cache; the user may put them there

STORIES, STORIES_FILE = "roneneldan/TinyStories", "TinyStoriesV2-GPT4-train.txt"  # 2.2 GB
END_OF_STORY = b"<|endoftext|>"
PIECE = 1 << 20  # bytes read at a time


class NotThere(ValueError):
    """The repository does not have the file."""


def shakespeare(cache: Path, url: str | None) -> Path:
    """tinyshakespeare, downloaded at first use. ValueError, one line, if it cannot be had or is another text.

    url: the folder that has it as input.txt; None: char-rnn's on GitHub.
    """
    file, url = cache / "shakespeare" / "input.txt", SHAKESPEARE_URL if url is None else url
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"data.url={url} is no address to download from: it must be like https://host/folder")
    put = f"put the file (SHA-256 {SHAKESPEARE_SHA256}) at {file.resolve()}"
    if there := file.exists():  # the user may have put it there
        source, text = str(file), file.read_bytes()
    else:
        source = f"{url.rstrip('/')}/{file.name}"
        with response_of(source, put) as response:
            text = response.read(SHAKESPEARE_BYTES + 1)
    if (found := hashlib.sha256(text).hexdigest()) != SHAKESPEARE_SHA256:
        way_out = "delete it" if there else "run again"
        raise ValueError(f"{source} is another file or was cut (SHA-256 {found}): {way_out}, or {put}")
    if not there:
        with whole(file) as temporary:
            temporary.write_bytes(text)
    return file


def hellaswag(cache: Path) -> Path:
    """HellaSwag's validation questions, downloaded at first use. ValueError, one line, if they cannot be had."""
    file = cache / "hellaswag" / HELLASWAG_URL.rsplit("/", 1)[1]
    if not file.exists():
        with response_of(HELLASWAG_URL, f"put the file at {file.resolve()}") as response:
            text = response.read()  # less than the server announced is refused
        with whole(file) as temporary:
            temporary.write_bytes(text)
    return file


@contextmanager
def response_of(source: str, put: str, size: int | None = None) -> Iterator[Any]:
    """What a server sends of an address, to be read: its first `size` bytes; None: all. ValueError, one line, if that
    or what is done with it fails. put: the user's other way, for the message."""
    headers = {} if size is None else {"Range": f"bytes=0-{size - 1}"}
    try:
        asked = urllib.request.Request(source, headers=headers)  # refuses what is no address
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as response:
            print("downloading" if size is None else f"taking {size // 10**6} MB of", source, file=sys.stderr)
            yield response
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{source} cannot be downloaded: {error}; run again, or {put}") from error


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path to write to, which becomes `file` at the end: the file is complete or absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".tmp-{secrets.token_hex(4)}")  # another process may download it too
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def tinystories(cache: Path, megabytes: int | None) -> Path:
    """The whole stories in the first `megabytes` MB (None: 100) of TinyStories, as .jsonl with a story in each line.
    Downloads only these, at first use. ValueError, one line, if they cannot be had."""
    from huggingface_hub import constants, hf_hub_url  # here, because it takes half a second

    size = 10**6 * (100 if megabytes is None else megabytes)
    folder = cache / "tinystories"
    file, there = folder / f"{size // 10**6}MB.jsonl", folder / STORIES_FILE  # the user may have put it there
    if file.exists():
        return file
    source = there.absolute().as_uri() if there.exists() else hf_hub_url(STORIES, STORIES_FILE, repo_type="dataset")
    put = f"put {STORIES_FILE} into {folder.resolve()}"
    if constants.HF_HUB_OFFLINE and not there.exists():
        raise ValueError(f"{source} cannot be downloaded: HF_HUB_OFFLINE is set; unset it, or {put}")
    with (
        response_of(source, put, size) as response,
        whole(file) as temporary,
        temporary.open("w", encoding="utf-8") as lines,
    ):
        for story in stories_of(response, size):
            lines.write(json.dumps({"text": story}, ensure_ascii=False) + "\n")
    return file


def stories_of(response: Any, size: int) -> Iterator[str]:
    """The whole stories in the first `size` bytes of a response. OSError if it breaks off before."""
    left = expected = min(size, int(response.headers.get("Content-Length", size)))
    rest = b""
    while left and (piece := response.read(min(left, PIECE))):
        left -= len(piece)
        *whole_ones, rest = (rest + piece).split(END_OF_STORY)
        for story in chain(whole_ones, [] if left or expected == size else [rest]):  # the last one may have been cut
            if story := story.decode(errors="replace").strip():
                yield story
    if left:
        raise OSError(f"the connection broke off {left:,} bytes before the end")


def fineweb(cache: Path, shards: int | None) -> list[Path]:
    """The validation shard of FineWeb-10B and the first `shards` training shards, downloaded at first use."""
    shards = 1 if shards is None else shards
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise ValueError(f"data.shards={shards} is outside 1 to {FINEWEB_SHARDS}: each is 100 M tokens, 200 MB")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1))]
    folder = cache / "fineweb10B"
    way_out = f"put the file into {folder.resolve()}"

    def shard(name: str) -> Path:
        return file if (file := folder / name).exists() else from_hub(FINEWEB, name, way_out, kind="dataset")

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(shard, names))


def from_hub(repository: str, name: str, way_out: str, *, kind: str = "model", revision: str = "main") -> Path:
    """A file of a repository of Hugging Face, in Hugging Face's cache, downloaded at first use. Does not look whether
    there is a newer version of a file in the cache.

    kind: model or dataset. Raises NotThere, or another ValueError: one line, at whose end is way_out.
    """
    import huggingface_hub.constants  # here, because it takes half a second
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    file: dict[str, Any] = {"repo_id": repository, "filename": name, "repo_type": kind, "revision": revision}
    try:
        if isinstance(kept := huggingface_hub.try_to_load_from_cache(**file), str):
            return Path(kept)
        # Fails at once without a network. hf_hub_download() would try for half a minute.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**file))
        return Path(huggingface_hub.hf_hub_download(**file))
    except Exception as error:  # its own, httpx's, Xet's and the system's
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(error, RepositoryNotFoundError):
            why = "there is no such repository, or it is private and HF_TOKEN may not read it"
        if absent := isinstance(error, RemoteEntryNotFoundError):
            why = "the repository has no such file"
        endpoint = huggingface_hub.constants.ENDPOINT
        raise (NotThere if absent else ValueError)(
            f"{name} of {repository} cannot be had from {endpoint} ({why}); run again, or {way_out}"
        ) from error
