"""Files from the network: whole, checked, and under the name that we chose; or not there at all.

tinyshakespeare, and the shards of GPT-2 tokens of FineWeb that modded-nanogpt trains on. A download that breaks off
goes on where it stopped, in this run or the next: its bytes wait in NAME.part, which nothing else ever opens.
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

from data.shards import HEADER_INTS, read_tokens

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394

FINEWEB = "datasets/kjj0/fineweb10B-gpt2/resolve/main"  # under Hugging Face's address, or that of a mirror
FINEWEB_SHARDS = 103
FINEWEB_BYTES = 4 * HEADER_INTS + 2 * 100_000_000  # of a shard at most

TIMEOUT = (10, 30)  # seconds to connect, and between two packets
ATTEMPTS = 5  # in a row that bring nothing new
PAUSE = 1.0  # seconds after the first of them, then twice as long each time
REDIRECTS = 5
AT_ONCE = 4  # downloads; a few are faster than one, and many only get in each other's way
CHUNK = 1 << 14  # bytes: what is lost where a connection breaks off
UNKNOWN = -1  # length of a file

Check = Callable[[Path], object]  # raises ValueError for a file that is not what it should be


def shakespeare(cache: Path, url: str | None) -> Path:
    """tinyshakespeare, downloaded at first use."""
    folder = cache / "shakespeare"
    exactly = partial(check_sha256, sha256=SHAKESPEARE_SHA256)
    url = SHAKESPEARE_URL if url is None else url
    (file,) = download(url, folder, ["input.txt"], SHAKESPEARE_BYTES, exactly, sha256=SHAKESPEARE_SHA256)
    exactly(file)  # one put there by hand has passed no other check, and hashing 1 MB takes a millisecond
    return file


def fineweb(cache: Path, url: str | None, shards: int | None) -> list[Path]:
    """The validation shard of FineWeb-10B and the first `shards` of the training shards, downloaded at first use.

    url: the folder of the shards; None: Hugging Face, or the mirror that HF_ENDPOINT names, as it does for their
    own tools.
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
    """The files `names` of the folder `url` in the folder `folder`, those that are not there yet downloaded.

    at_most: bytes of one file, whatever the server says. check: of each whole file, before it gets its name.
    sha256: of the file, where it is known; else the one that the server announces, if it does (Hugging Face does).

    Any number of processes may call at once: one downloads and the others wait. Raises ValueError, one line with the
    way to do without, for whatever the network or the server does.
    """
    if not is_address(url):
        raise ValueError(f"data.url={url} is no address to download from: it must be like https://host/folder")
    files = [folder / name for name in names]
    if all(file.exists() for file in files):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"), progress_bar(quiet=False) as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        missing = [file for file in files if not file.exists()]  # still, after waiting for the lock
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
        finally:  # after an error or Ctrl-C the others stop too, at their next packet
            stopped.set()
            pool.shutdown(cancel_futures=True)
    return files


def is_address(url: str) -> bool:
    """Of a file on a web server. Others would only be found out after all attempts."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def complete(
    url: str, file: Path, at_most: int, check: Check, sha256: str | None, show: Callable, stopped: Event
) -> None:
    """Download `file` in as many attempts as it takes. Nothing under its name is ever less than whole and checked."""
    part = file.with_name(f"{file.name}.part")
    show(size_of(part))
    idle, most = 0, size_of(part)
    while not stopped.is_set():
        try:
            fetch(url, part, at_most, check, sha256, show, stopped)
            part.replace(file)
            return
        except requests.RequestException as error:  # what may be otherwise next time
            # Against the most there ever was: without ranges, or a hash to trust them by, each attempt begins anew.
            idle = idle + 1 if size_of(part) <= most else 0
            most = max(most, size_of(part))
            if idle == ATTEMPTS:
                own = type(error) in (requests.RequestException, requests.HTTPError)  # the others' texts are Python
                raise ValueError(by_hand(url, file, sha256, str(error) if own else type(error).__name__)) from error
        except ValueError as error:  # and what will not
            part.unlink(missing_ok=True)
            raise ValueError(by_hand(url, file, sha256, str(error))) from error
        stopped.wait(PAUSE * 2**idle)


def fetch(url: str, part: Path, at_most: int, check: Check, sha256: str | None, show: Callable, stopped: Event) -> None:
    """One attempt to complete `part`. Raises RequestException where another attempt may help, ValueError where not."""
    offset = size_of(part)
    response, announced = ask(url, offset)
    with response:
        etag = announced.get("X-Linked-Etag", "").strip('"')
        sha256 = sha256 or (etag if re.fullmatch("[0-9a-f]{64}", etag) else None)
        first, whole = span(response)
        whole = int(announced.get("X-Linked-Size", whole))
        if first not in (0, offset) or (first and not sha256):
            # The server has another idea of what is there; or nobody could tell, in the end, whether both parts are of
            # the same file.
            part.unlink(missing_ok=True)
            raise requests.RequestException("the server cannot go on where it stopped")
        if whole > at_most:
            raise ValueError(f"it is {whole:,} bytes long, and {at_most:,} is the most that can be right")
        offset = first  # 0 also where the server knows nothing of ranges and begins again
        with open(part, "ab" if first else "wb") as out:
            for chunk in response.iter_content(CHUNK) if response.status_code != 416 else ():
                offset += len(chunk)
                if offset > (at_most if whole == UNKNOWN else whole):
                    raise ValueError(f"it goes on after byte {at_most if whole == UNKNOWN else whole:,}, its last")
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
        part.unlink()  # put together of two, or perhaps cut short: a new one may be right
        raise requests.RequestException(str(error)) from error


def ask(url: str, offset: int) -> tuple[requests.Response, dict[str, str]]:
    """The answer to a request for the bytes from `offset` on, and what was announced about the file on the way.

    Redirects are followed by hand: Hugging Face announces hash and size with the first answer and sends the bytes from
    another host, and nothing may lead to anything but https.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    announced: dict[str, str] = {}
    for _ in range(REDIRECTS + 1):
        response = requests.get(url, headers=headers, stream=True, allow_redirects=False, timeout=TIMEOUT)
        for name in ("X-Linked-Etag", "X-Linked-Size"):
            if name in response.headers:
                announced.setdefault(name, response.headers[name])  # the first to say so is the one that was asked
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
            raise ValueError(f"the server answers {response.status_code} {response.reason}")
    raise ValueError(f"it is redirected more than {REDIRECTS} times")


def span(response: requests.Response) -> tuple[int, int]:
    """(offset of the first byte that comes, length of the whole file or UNKNOWN)."""
    if response.status_code == 200:
        return 0, int(response.headers.get("Content-Length", UNKNOWN))
    # "bytes 100-199/200" begins at 100; "bytes */200" says that there is nothing after 200
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
    first, whole = found.groups() if found else (None, "*")
    whole = UNKNOWN if whole == "*" else int(whole)
    return (whole if first is None else int(first)), whole


def check_sha256(file: Path, sha256: str) -> None:
    """ValueError where the file has another SHA-256 (hexadecimal)."""
    with open(file, "rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file} has SHA-256 {found}, not {sha256}: it is another file")


def by_hand(url: str, file: Path, sha256: str | None, reason: str) -> str:
    """The message about a download that failed: why, and how to do without it."""
    which = f" (SHA-256 {sha256})" if sha256 else ""
    return f"{url} cannot be downloaded: {reason}; run again, or put the file{which} at {file.resolve()} yourself"


def size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def progress_bar(quiet: bool) -> Progress:
    """A bar over bytes on a terminal (stderr, so that output can be piped), and nothing anywhere else."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
