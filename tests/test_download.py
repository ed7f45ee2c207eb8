"""data/download.py against servers on this machine that break off, lie or are not there: a file is whole or absent.

A server answers as Hugging Face does, with its habit: a function of the request and of how many there were before it.
"""

import hashlib
import json
import random
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from data import download
from data.download import STORIES_FILE, NotThere, from_hub, hellaswag, shakespeare, tinystories

CONTENT = random.Random(0).randbytes(300_000)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Request(BaseHTTPRequestHandler):
    """One request: `start` is the first byte asked for, `number` counts the requests for bytes from 0."""

    def do_GET(self):
        if self.path.startswith("/api/"):  # what huggingface_hub likes to know, and does without
            self.head(404)
            return
        wanted = self.headers.get("Range", "bytes=0-")
        self.start = int(re.match(r"bytes=(\d+)", wanted)[1])
        self.number = len(self.server.asked)
        if self.command == "GET":
            self.server.asked.append((self.path, self.headers.get("Range")))
        self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that has read enough
            self.server.habit(self)

    do_HEAD = do_GET

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def log_message(self, *_):
        pass


def honest(request: Request, content: bytes = CONTENT, stop: int | None = None, **headers: object) -> None:
    """What a good server does; with `stop` it breaks off before that byte."""
    headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": COMMIT}
    if request.start:
        headers["Content_Range"] = f"bytes {request.start}-{len(content) - 1}/{len(content)}"
    request.head(206 if request.start else 200, Content_Length=len(content) - request.start, **headers)
    if request.command == "GET":
        request.wfile.write(content[request.start : stop])


def absent(request: Request, code: str = "EntryNotFound") -> None:
    request.head(404, X_Error_Code=code, X_Error_Message="not found", X_Repo_Commit=COMMIT)


def of_folder(folder: Path, repository: str) -> Callable[[Request], None]:
    """Serves the files of a folder as those of a repository, a dataset's with datasets/ in front."""

    def habit(request: Request) -> None:
        revision, name = request.path.removeprefix(f"/{repository}/resolve/").split("/")
        assert revision in ("main", COMMIT), request.path
        honest(request, (folder / name).read_bytes()) if (folder / name).is_file() else absent(request)

    return habit


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """serve(habit): a server in the place of Hugging Face, with an empty cache."""
    servers = []
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))

    def serve(habit: Callable[[Request], None]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        server.habit, server.asked = habit, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        addresses = server.url + "/{repo_id}/resolve/{revision}/{filename}"  # made of HF_ENDPOINT at the import
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def get() -> bytes:
    return from_hub("some/model", "a.bin", "do without").read_bytes()


def refusal(kind: type[ValueError] = ValueError) -> str:
    """The one line that names the file, and says why it cannot be had and the way out."""
    with pytest.raises(kind, match=r"\Aa\.bin of some/model .*do without\Z") as caught:  # a dot matches no line's end
        get()
    return str(caught.value)


# ---- Hugging Face


def test_a_download_that_breaks_off_goes_on_where_it_stopped_and_is_made_once(serve, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what may be lost is 10 MB
    server = serve(lambda request: honest(request, stop=200_000 if request.number == 0 else None))
    assert get() == CONTENT
    starts = [int(wanted[6:].split("-")[0]) for _, wanted in server.asked if wanted]
    assert len(server.asked) == 2
    assert 0 < starts[-1] <= 200_000
    server.server_close()
    assert get() == CONTENT


def half(request: Request) -> None:
    """Announces 300,000 bytes and sends half of them, whatever it is asked for."""
    if request.command == "HEAD":
        honest(request)
    else:
        request.head(200, Content_Length=len(CONTENT) // 2)
        request.wfile.write(CONTENT[: len(CONTENT) // 2])


HABITS = {
    "half": half, "no file": absent, "no repository": lambda request: absent(request, "RepoNotFound"),
    "503": lambda request: request.head(503),
}  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
def test_what_cannot_be_had_is_refused_and_never_kept_and_what_is_not_there_is_told_apart(serve, tmp_path, habit):
    serve(HABITS[habit])
    refusal(NotThere if habit == "no file" else ValueError)
    assert (habit == "no file") == ("has no such file" in refusal())
    kept = (tmp_path / "huggingface").rglob("*")
    assert not [path for path in kept if path.is_file() and path.stat().st_size > 1000]


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_there_is_a_line_at_once(offline, serve, monkeypatch):
    serve(honest).server_close()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **_: pytest.fail("tries for half a minute"))
    refusal()


# ---- tinyshakespeare, HellaSwag and TinyStories


TALES = [f"There was a bird\u2026\n\nIt had {i} nests, and was{' very' * (i % 9)} kind." for i in range(25_000)]
STORIES = "\n<|endoftext|>\n".join(TALES).encode()


@pytest.fixture
def ask(monkeypatch, serve, tmp_path):
    """ask(file, habit): the file is asked for, and the server; the text of the first two is CONTENT here."""
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(download, "SHAKESPEARE_BYTES", len(CONTENT))

    def ask(file: str, habit: Callable[..., None]) -> tuple[Callable[[], Path], ThreadingHTTPServer]:
        server = serve(habit)
        monkeypatch.setattr(download, "HELLASWAG_URL", f"{server.url}/questions.jsonl")
        kinds = {"input.txt": lambda: shakespeare(tmp_path, server.url), "questions.jsonl": lambda: hellaswag(tmp_path)}
        return (kinds | {STORIES_FILE: lambda: tinystories(tmp_path, 1)})[file], server

    return ask


@pytest.mark.parametrize("file", ["input.txt", "questions.jsonl"])
def test_a_text_is_downloaded_once(ask, file):
    asked, server = ask(file, honest)
    for _ in range(2):
        assert asked().read_bytes() == CONTENT
    assert [path for path, _ in server.asked] == [f"/{file}"]
    assert [*asked().parent.iterdir()] == [asked()]


def test_a_shakespeare_that_was_put_there_by_hand_is_checked(ask, tmp_path):
    asked, _ = ask("input.txt", honest)
    asked().write_bytes(b"another")
    with pytest.raises(ValueError, match=f"{tmp_path}/shakespeare/input.txt"):
        asked()


FILES = {"input.txt": CONTENT, "questions.jsonl": CONTENT, STORIES_FILE: STORIES}
NOT_WHOLE = [
    (file, habit)
    for file, text in FILES.items()
    for habit in (partial(honest, content=text, stop=len(text) // 3), absent)
]
NOT_WHOLE += [("input.txt", partial(honest, content=text)) for text in (CONTENT[:-1] + b"x", CONTENT + b"more")]


@pytest.mark.parametrize(("file", "habit"), NOT_WHOLE)
def test_what_is_absent_cut_or_another_text_is_refused_in_one_line_and_never_kept(file, habit, ask, tmp_path):
    """The line names the address and the place for a file that the user has."""
    asked, server = ask(file, habit)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\A{server.url}/[^\n]*{file} [^\n]*put [^\n]*{tmp_path}[^\n]*\Z"):
            asked()
        assert not [found for found in tmp_path.rglob("*") if found.is_file()]


def stories_in(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def test_of_tinystories_the_whole_stories_of_the_first_megabytes_are_downloaded_once(serve, tmp_path):
    server = serve(lambda request: honest(request, STORIES))  # which sends all that it has, as some servers do
    files = [tinystories(tmp_path, 1) for _ in range(2)]
    assert stories_in(files[0]) == TALES[: STORIES[: 10**6].count(b"<|endoftext|>")]
    path = f"/datasets/roneneldan/TinyStories/resolve/main/{STORIES_FILE}"
    assert server.asked == [(path, "bytes=0-999999")]
    assert stories_in(tinystories(tmp_path, 9)) == TALES  # more than there is
    assert tinystories(tmp_path, None).name == "100MB.jsonl"


def test_without_a_network_the_users_own_tinystories_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        tinystories(tmp_path, 1)
    (tmp_path / "tinystories").mkdir(exist_ok=True)
    (tmp_path / "tinystories" / STORIES_FILE).write_bytes(STORIES)
    assert stories_in(tinystories(tmp_path, 1))[-1] in TALES
