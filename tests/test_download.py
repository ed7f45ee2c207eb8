"""data/download.py against servers on this machine that break off, stall, lie and redirect: a file is whole or absent.

Every server here stands for one habit. `content` is what it should send; a habit is a function of the request and of
how many there were before it.
"""

import hashlib
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import download as module
from data.download import download
from tests.processes import HANGS

ROOT = Path(__file__).resolve().parents[1]
CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Request(BaseHTTPRequestHandler):
    """One request: `start` is the first byte asked for, `number` counts requests from 0."""

    def do_GET(self):
        self.start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.number = len(self.server.asked)
        self.server.asked.append((self.path, self.headers.get("Range")))
        self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that has heard enough
            self.server.habit(self)

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def log_message(self, *_):
        pass


def honest(request: Request, content: bytes = CONTENT, stop: int | None = None, **headers: object) -> None:
    """What a good server does; with `stop` it breaks off before that byte."""
    if request.start >= len(content):
        request.head(416, Content_Range=f"bytes */{len(content)}")
        return
    if request.start:
        headers["Content_Range"] = f"bytes {request.start}-{len(content) - 1}/{len(content)}"
    request.head(206 if request.start else 200, Content_Length=len(content) - request.start, **headers)
    request.wfile.write(content[request.start : stop])


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "TIMEOUT", (HANGS, HANGS))  # a server that is slow on a busy machine does not stall
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def serve():
    servers = []

    def serve(habit) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        server.habit, server.asked = habit, []
        server.url = f"http://127.0.0.1:{server.server_port}/folder"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "data"


def get(server, folder, sha256: str | None = SHA256, at_most: int = len(CONTENT), check=lambda file: None) -> bytes:
    (file,) = download(server.url, folder, ["a.bin"], at_most, check, sha256=sha256)
    assert file == folder / "a.bin"
    assert {path.name for path in folder.iterdir()} <= {"a.bin", ".lock"}, "no .part is left beside a whole file"
    return file.read_bytes()


def refusal(server, folder, **options) -> str:
    """The one line that a download which cannot succeed ends in; whatever is left is not under the final name."""
    with pytest.raises(ValueError, match="cannot be downloaded") as caught:
        get(server, folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{server.url}/a.bin" in message
    assert str(folder / "a.bin") in message
    assert not (folder / "a.bin").exists()
    assert {path.name for path in folder.parent.iterdir()} == {"data"}
    return message


# ---- what a download survives


def test_an_honest_server_is_asked_once_and_never_again(serve, folder):
    server = serve(honest)
    assert get(server, folder) == CONTENT
    assert get(server, folder) == CONTENT
    assert server.asked == [("/folder/a.bin", None)]


def test_a_download_that_breaks_off_goes_on_where_it_stopped(serve, folder):
    server = serve(lambda request: honest(request, stop=request.start + 70_000))
    assert get(server, folder) == CONTENT
    ranges = [wanted for _, wanted in server.asked]
    assert ranges[0] is None
    assert len(ranges) > 3
    assert ranges[1:] == sorted(ranges[1:], key=lambda wanted: int(wanted[6:-1])), "never back to an earlier byte"


def test_a_server_that_stalls_is_asked_again(serve, folder, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", (HANGS, 1.0))
    end_of_test, stalled = threading.Event(), []

    def habit(request):
        honest(request, stop=100_000 if request.number == 0 else None)
        if request.number == 0:
            stalled.append(end_of_test.wait(60))

    assert get(serve(habit), folder) == CONTENT
    assert stalled == []  # the first request still hangs
    end_of_test.set()


def test_a_server_without_ranges_begins_again(serve, folder):
    def habit(request):
        request.start = 0
        honest(request, stop=100_000 if request.number == 0 else None)

    assert get(serve(habit), folder) == CONTENT


def test_a_server_without_lengths_is_judged_by_the_hash(serve, folder):
    """Where no length is announced, breaking off looks like the end."""

    def habit(request):
        request.head(200)
        request.wfile.write(CONTENT[: 100_000 if request.number == 0 else None])

    assert get(serve(habit), folder) == CONTENT


def test_a_server_that_always_breaks_off_is_given_up_where_no_hash_lets_parts_be_joined(serve, folder):
    """It once went on for ever: every second attempt begins anew, and so seemed to bring something."""
    server = serve(lambda request: honest(request, stop=100_000 if request.start == 0 else request.start))
    refusal(server, folder, sha256=None)
    assert len(server.asked) < 20


def test_a_busy_server_is_asked_again(serve, folder):
    server = serve(lambda request: request.head(503) if request.number < 2 else honest(request))
    assert get(server, folder) == CONTENT


def test_a_server_that_once_announces_too_much_is_asked_again(serve, folder):
    def habit(request):
        if request.number:
            honest(request)
        else:
            request.head(200, Content_Length=len(CONTENT) + 1000)
            request.wfile.write(CONTENT)

    assert get(serve(habit), folder, at_most=10**6) == CONTENT


def test_less_than_was_announced_is_not_the_end(serve, folder):
    """Nothing else would tell, where no hash is known."""

    def habit(request):
        headers = {"X_Linked_Size": len(CONTENT)}
        honest(request, **headers) if request.number else honest(request, CONTENT[:1000], **headers)

    assert get(serve(habit), folder, sha256=None) == CONTENT


def test_a_redirect_on_the_same_host_is_followed_and_changes_no_name(serve, folder):
    def habit(request):
        if request.path == "/folder/a.bin":
            request.head(302, Location="/elsewhere/b.bin")
        else:
            honest(request, Content_Disposition='attachment; filename="../../evil"')

    assert get(serve(habit), folder) == CONTENT


def test_what_an_earlier_process_left_is_not_fetched_again(serve, folder):
    folder.mkdir()
    (folder / "a.bin.part").write_bytes(CONTENT[:200_000])
    server = serve(honest)
    assert get(server, folder) == CONTENT
    assert server.asked == [("/folder/a.bin", "bytes=200000-")]


def test_a_whole_part_needs_only_its_name(serve, folder):
    folder.mkdir()
    (folder / "a.bin.part").write_bytes(CONTENT)
    assert get(serve(honest), folder) == CONTENT


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * 400_000])
def test_a_part_of_something_else_is_thrown_away(serve, folder, left):
    folder.mkdir()
    (folder / "a.bin.part").write_bytes(left)
    assert get(serve(honest), folder) == CONTENT


def test_halves_are_put_together_only_where_a_hash_will_tell(serve, folder):
    folder.mkdir()
    (folder / "a.bin.part").write_bytes(b"x" * 1000)
    assert get(serve(honest), folder, sha256=None) == CONTENT


def test_a_process_that_was_killed_left_nothing_under_the_final_name(serve, folder):
    server = serve(honest)
    code = f"""
import os
from pathlib import Path
from data import download as m
m.Progress.advance = lambda self, task, n: n and os._exit(9)
m.download({server.url!r}, Path({str(folder)!r}), ["a.bin"], 10**6, lambda file: None, {SHA256!r})
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 9
    assert {path.name for path in folder.iterdir()} == {"a.bin.part", ".lock"}
    assert get(server, folder) == CONTENT


def test_two_processes_at_once_download_once(serve, folder):
    server = serve(honest)
    code = f"""
from pathlib import Path
from data.download import download
print(*download({server.url!r}, Path({str(folder)!r}), ["a.bin", "b.bin"], 10**6, lambda file: None, {SHA256!r}))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate()[0].split() for process in processes]
    assert outputs[0] == outputs[1] == [str(folder / "a.bin"), str(folder / "b.bin")]
    assert sorted(server.asked) == [("/folder/a.bin", None), ("/folder/b.bin", None)]
    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes() == CONTENT


# ---- what it does not


def test_no_server_at_all_is_one_line_with_the_way_to_do_without(folder):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: the port is nobody else's meanwhile
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/folder"
        message = refusal(SimpleNamespace(url=url), folder)
    assert f"ConnectionError; run again, or put the file (SHA-256 {SHA256}) at {folder / 'a.bin'} yourself" in message


def test_a_host_that_cannot_be_reached_is_asked_once_unless_a_part_is_there(folder, monkeypatch):
    """Without a network a mistyped init_from= took 50 s: five attempts, with pauses of up to 16 s between them."""
    asked = []

    def resolve(*_):
        asked.append(1)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("urllib3.util.connection.socket.getaddrinfo", resolve)
    server = SimpleNamespace(url="http://nowhere.invalid/folder")
    assert "ConnectionError; run again" in refusal(server, folder)
    assert len(asked) == 1
    (folder / "a.bin.part").write_bytes(b"begun")  # the network was there, and may come back
    refusal(server, folder)
    assert len(asked) == 1 + module.ATTEMPTS


@pytest.mark.parametrize(
    "target",
    ["http://example.com/a.bin", "http://127.0.0.1:9/a.bin", "file:///etc/passwd", "ftp://example.com/a", "//[bad/"],
)
def test_a_redirect_outside_is_refused(serve, folder, target):
    server = serve(lambda request: request.head(302, Location=target))
    message = refusal(server, folder)
    assert "which is not https" in message or "Invalid IPv6" in message
    assert len(server.asked) == 1


def test_redirects_without_end_are_refused(serve, folder):
    assert "redirected more than 5 times" in refusal(serve(lambda r: r.head(302, Location=r.path)), folder)


def test_a_missing_file_is_asked_for_once(serve, folder):
    server = serve(lambda request: request.head(404))
    assert "the server answers 404" in refusal(server, folder)
    assert len(server.asked) == 1


def test_a_server_that_stays_busy_is_given_up(serve, folder):
    server = serve(lambda request: request.head(503))
    assert "the server answers 503" in refusal(server, folder)
    assert len(server.asked) == module.ATTEMPTS


def test_other_content_is_refused_and_not_fetched_twice(serve, folder):
    server = serve(partial(honest, content=CONTENT[::-1]))
    assert f"not {SHA256}: it is another file" in refusal(server, folder)
    assert len(server.asked) == 1
    assert {path.name for path in folder.iterdir()} == {".lock"}


def test_the_hash_that_hugging_face_announces_is_checked(serve, folder):
    def habit(request):
        if request.path == "/folder/a.bin":
            request.head(302, Location="/bytes", X_Linked_Etag=f'"{SHA256}"', X_Linked_Size=len(CONTENT))
        else:
            honest(request, content=CONTENT[::-1])

    assert f"not {SHA256}" in refusal(serve(habit), folder, sha256=None)


def test_what_fails_its_check_is_refused(serve, folder):
    def check(file):
        raise ValueError("no token file")

    assert "no token file" in refusal(serve(honest), folder, sha256=None, check=check)


def test_more_than_can_be_right_is_refused_before_it_comes(serve, folder):
    message = refusal(serve(honest), folder, at_most=1000)
    assert "it is 300,000 bytes long, but 1,000 is the maximum" in message


def test_a_stream_without_end_is_cut_off(serve, folder):
    def habit(request):
        request.head(200)
        while True:
            request.wfile.write(CONTENT)

    assert "it is longer than 300,000 bytes, its length" in refusal(serve(habit), folder)
    assert {path.name for path in folder.iterdir()} == {".lock"}


def test_more_than_was_announced_is_refused(serve, folder):
    server = serve(partial(honest, X_Linked_Size=1000))
    assert "it is longer than 1,000 bytes, its length" in refusal(server, folder)


def test_less_than_is_announced_every_time_is_given_up(serve, folder):
    def habit(request):
        request.head(206 if request.start else 200, Content_Length=10, X_Linked_Size=len(CONTENT),
                     Content_Range=f"bytes {request.start}-{request.start + 9}/{len(CONTENT)}")  # fmt: skip
        request.wfile.write(b"" if request.start else CONTENT[:10])

    assert "cannot be downloaded" in refusal(serve(habit), folder)


def test_a_length_below_the_true_one_is_caught_by_the_hash(serve, folder):
    def habit(request):
        request.head(200, Content_Length=1000)
        request.wfile.write(CONTENT)

    assert f"not {SHA256}" in refusal(serve(habit), folder)


@pytest.mark.parametrize("url", ["ftp://example.com", "/etc", "file:///etc"])
def test_an_address_that_is_none_is_refused(folder, url):
    with pytest.raises(ValueError, match=f"data.url={url} is no address to download from"):
        download(url, folder, ["a.bin"], 1, lambda file: None)


def test_the_first_error_stops_the_other_downloads(serve, folder):
    """They run side by side: one that cannot succeed does not wait for gigabytes of the rest."""

    def habit(request):
        if request.path.endswith("/a.bin"):
            request.head(404)
        else:
            request.head(200, Content_Length=10**9)
            while True:
                request.wfile.write(CONTENT[:1000])

    server = serve(habit)
    with pytest.raises(ValueError, match=r"a\.bin cannot be downloaded: the server answers 404"):
        download(server.url, folder, ["a.bin", "b.bin", "c.bin"], 10**9, lambda file: None)
    assert not {"a.bin", "b.bin", "c.bin"} & set(os.listdir(folder))
