"""Downloads tinyshakespeare, modded-nanogpt's shards of FineWeb as GPT-2 tokens, and models of Hugging Face.

A file gets its final name only when it is complete and checked. An interrupted download continues where it stopped, in
this run or the next: its bytes are kept in NAME.part, which nothing else opens.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from threading import Event
from urllib.parse import urljoin, urlsplit

import requests
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from data.shards import HEADER_INTS, read_tokens

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394

FINEWEB = "datasets/kjj0/fineweb10B-gpt2/resolve/main"  # path on Hugging Face or a mirror
FINEWEB_SHARDS = 103
FINEWEB_BYTES = 4 * HEADER_INTS + 2 * 100_000_000  # maximum size of a shard

TIMEOUT = (10, 30)  # seconds to connect, seconds between two packets
ATTEMPTS = 5  # give up after so many attempts in a row without a new byte
PAUSE = 1.0  # seconds to wait after the first of these attempts; then twice as long each time
REDIRECTS = 5
AT_ONCE = 4  # parallel downloads; a few are faster than one, many slow each other down
CHUNK = 1 << 14  # bytes per read; at most so much is lost when a connection breaks
NO_CONNECTION = (NewConnectionError, ConnectTimeoutError)
UNKNOWN = -1  # length of a file

Check = Callable[[Path], object]  # raises ValueError for a wrong file


class NotThere(ValueError):
    """The server does not have the file."""


def shakespeare(cache: Path, url: str | None) -> Path:
    """tinyshakespeare, downloaded at first use."""
    folder = cache / "shakespeare"
    exactly = partial(check_sha256, sha256=SHAKESPEARE_SHA256)
    url = SHAKESPEARE_URL if url is None else url
    (file,) = download(url, folder, ["input.txt"], SHAKESPEARE_BYTES, exactly, sha256=SHAKESPEARE_SHA256)
    exactly(file)  # the user may have put the file there, without a check; hashing 1 MB takes a millisecond
    return file


def fineweb(cache: Path, url: str | None, shards: int | None) -> list[Path]:
    """The validation shard of FineWeb-10B and the first `shards` training shards, downloaded at first use.

    url: the folder of the shards. None: Hugging Face, or the mirror in the environment variable HF_ENDPOINT, which
    Hugging Face's own tools read too.
    """
    shards = 1 if shards is None else shards
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise ValueError(f"data.shards={shards} is outside 1 to {FINEWEB_SHARDS}: each is 100 M tokens, 200 MB")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1))]
    check = partial(read_tokens, way_out="the server has something else under that name")
    url = f"{endpoint.rstrip('/')}/{FINEWEB}" if url is None else url
    return download(url, cache / "fineweb10B", names, FINEWEB_BYTES, check)


def download(
    url: str, folder: Path, names: list[str], at_most: int, check: Check, sha256: str | None = None
) -> list[Path]:
    """Downloads the missing ones of the files `names` from the address `url` into `folder`. Returns the paths of all.

    at_most: maximum size of a file in bytes. check: called with each complete file before it gets its final name.
    sha256: the expected hash; None: the hash that the server announces, if it does (Hugging Face does).

    Several processes may call this at once: one downloads and the others wait. If the network or the server fails,
    raises ValueError, one line that says how to do without the download.
    """
    if not is_address(url):
        raise ValueError(f"data.url={url} is no address to download from: it must be like https://host/folder")
    files = [folder / name for name in names]
    if all(file.exists() for file in files):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"), progress_bar(quiet=False) as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        missing = [file for file in files if not file.exists()]  # another process may have downloaded some meanwhile
        if missing:
            print(f"downloading {len(missing)} of {len(files)} files from {url} to {folder}", file=sys.stderr)
        task = progress.add_task("downloading", total=at_most * len(missing))
        show, stopped = partial(progress.advance, task), Event()
        jobs = [
            pool.submit(complete, f"{url.rstrip('/')}/{file.name}", file, at_most, check, sha256, show, stopped)
            for file in missing
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:  # after an error or Ctrl-C, the other downloads stop at their next packet
            stopped.set()
            pool.shutdown(cancel_futures=True)
    return files


def is_address(url: str) -> bool:
    """Whether url is an http(s) address. Without this check, a wrong one would fail only after all attempts."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or half an IPv6 address
        return False


def complete(
    url: str, file: Path, at_most: int, check: Check, sha256: str | None, show: Callable, stopped: Event
) -> None:
    """Download `file`, in several attempts if needed. It gets its name when it is complete and checked."""
    part = file.with_name(f"{file.name}.part")
    show(size_of(part))
    idle, most = 0, size_of(part)
    while not stopped.is_set():
        try:
            fetch(url, part, at_most, check, sha256, show, stopped)
            part.replace(file)
            return
        except requests.RequestException as error:  # another attempt may succeed
            # Compare with the most bytes of any attempt: some servers make every attempt begin at byte 0.
            idle = idle + 1 if size_of(part) <= most else 0
            most = max(most, size_of(part))
            unreached = isinstance(getattr((*error.args, None)[0], "reason", None), NO_CONNECTION)
            if idle == ATTEMPTS or (unreached and most == 0):  # there is no network, or no such host
                own = type(error) in (requests.RequestException, requests.HTTPError)  # other types have long texts
                raise ValueError(by_hand(url, file, sha256, str(error) if own else type(error).__name__)) from error
        except ValueError as error:  # another attempt would fail too
            part.unlink(missing_ok=True)
            kind = NotThere if isinstance(error, NotThere) else ValueError
            raise kind(by_hand(url, file, sha256, str(error))) from error
        stopped.wait(PAUSE * 2**idle)


def fetch(url: str, part: Path, at_most: int, check: Check, sha256: str | None, show: Callable, stopped: Event) -> None:
    """One attempt to complete `part`. Raises RequestException if another attempt may help, ValueError if not."""
    offset = size_of(part)
    response, announced = ask(url, offset)
    with response:
        etag = announced.get("X-Linked-Etag", "").strip('"')
        sha256 = sha256 or (etag if re.fullmatch("[0-9a-f]{64}", etag) else None)
        first, whole = span(response)
        whole = int(announced.get("X-Linked-Size", whole))
        if first not in (0, offset) or (first and not sha256):
            # Either the server starts at another byte, or there is no hash, and we could not check that both parts are
            # from the same file.
            part.unlink(missing_ok=True)
            raise requests.RequestException("the server cannot continue where the download stopped")
        if whole > at_most:
            raise ValueError(f"it is {whole:,} bytes long, but {at_most:,} is the maximum")
        offset = first  # 0 also if the server does not support ranges and sends the whole file
        with open(part, "ab" if first else "wb") as out:
            for chunk in response.iter_content(CHUNK) if response.status_code != 416 else ():
                offset += len(chunk)
                if offset > (at_most if whole == UNKNOWN else whole):
                    raise ValueError(f"it is longer than {at_most if whole == UNKNOWN else whole:,} bytes, its length")
                out.write(chunk)
                show(len(chunk))
                if stopped.is_set():
                    raise requests.RequestException("another download failed")
            out.flush()
            os.fsync(out.fileno())
    if offset < whole:
        raise requests.RequestException(f"it ends after {offset:,} of {whole:,} bytes")
    try:
        if sha256:
            check_sha256(part, sha256)
        check(part)
    except ValueError as error:
        if first == 0 and whole != UNKNOWN:
            raise
        part.unlink()  # made of two parts, or perhaps cut short: a new download may be right
        raise requests.RequestException(str(error)) from error


def ask(url: str, offset: int) -> tuple[requests.Response, dict[str, str]]:
    """Requests the bytes from `offset` on. Returns the response, and the headers with the file's hash and size.

    We follow redirects ourselves for two reasons. Hugging Face sends hash and size in its first response and the bytes
    from another host. And a redirect may only lead to https.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    announced: dict[str, str] = {}
    for _ in range(REDIRECTS + 1):
        response = requests.get(url, headers=headers, stream=True, allow_redirects=False, timeout=TIMEOUT)
        for name in ("X-Linked-Etag", "X-Linked-Size"):
            if name in response.headers:
                announced.setdefault(name, response.headers[name])  # the first server counts: it is the one in `url`
        if response.is_redirect:
            response.close()
            target = urljoin(url, response.headers["Location"])
            old, new = urlsplit(url), urlsplit(target)
            if new.scheme != "https" and not (old.hostname == "127.0.0.1" and new.netloc == old.netloc):
                raise ValueError(f"it is redirected to {target!r}, which is not https")
            url = target
        elif response.status_code in (200, 206, 416):
            return response, announced
        elif response.status_code in (408, 429) or response.status_code >= 500:
            raise requests.HTTPError(f"the server answers {response.status_code} {response.reason}")
        else:
            kind = NotThere if response.status_code == 404 else ValueError
            raise kind(f"the server answers {response.status_code} {response.reason}")
    raise ValueError(f"it is redirected more than {REDIRECTS} times")


def span(response: requests.Response) -> tuple[int, int]:
    """(offset of the response's first byte, length of the whole file or UNKNOWN)."""
    if response.status_code == 200:
        return 0, int(response.headers.get("Content-Length", UNKNOWN))
    # "bytes 100-199/200" begins at 100; "bytes */200" means that the file has only 200 bytes
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
    first, whole = found.groups() if found else (None, "*")
    whole = UNKNOWN if whole == "*" else int(whole)
    return (whole if first is None else int(first)), whole


def check_sha256(file: Path, sha256: str) -> None:
    """ValueError if the file's SHA-256 (hexadecimal) is another one."""
    with open(file, "rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file} has SHA-256 {found}, not {sha256}: it is another file")


def by_hand(url: str, file: Path, sha256: str | None, reason: str) -> str:
    """The message for a failed download: why it failed, and how to do without it."""
    which = f" (SHA-256 {sha256})" if sha256 else ""
    return f"{url} cannot be downloaded: {reason}; run again, or put the file{which} at {file.resolve()} yourself"


def size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def progress_bar(quiet: bool) -> Progress:
    """A progress bar over bytes, if stderr is a terminal. (Not stdout, which may be piped.)"""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
