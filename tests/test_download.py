"""data/download.py against a server on this machine: a file is whole or absent, and what cannot be had is one line."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from data import download
from data.download import fineweb, from_hub, hub, shakespeare

CONTENT = b"Before we proceed any further, hear me speak.\n" * 1000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Request(BaseHTTPRequestHandler):
    """Answers as Hugging Face does: every file whose name does not have "absent" in it is CONTENT."""

    def do_GET(self):
        there = "absent" not in self.path and not self.path.startswith("/api/")
        self.send_response(200 if there else 404)
        tag = hashlib.sha256(self.path.encode()).hexdigest()
        headers = {"Content-Length": len(CONTENT) if there else 0, "ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        for name, value in (headers if there else {**headers, "X-Error-Code": "EntryNotFound"}).items():
            self.send_header(name, str(value))
        self.end_headers()
        if there and self.command == "GET":
            self.server.asked.append(self.path)
            self.wfile.write(CONTENT[: self.server.stop])

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server in the place of Hugging Face and GitHub, with empty caches. stop: it breaks off before that byte."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    server.asked, server.stop, url = [], None, f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))
    addresses = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(download, "SHAKESPEARE_URL", f"{url}/input.txt")
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def names(server: ThreadingHTTPServer) -> list[str]:
    return [path.rpartition("/")[2] for path in server.asked]


def test_a_file_is_downloaded_once(server, tmp_path):
    for _ in range(2):
        assert hub("owner/name/folder/a.txt").read_bytes() == shakespeare(tmp_path).read_bytes() == CONTENT
    assert sorted(names(server)) == ["a.txt", "input.txt"]
    assert [*(tmp_path / "shakespeare").iterdir()] == [tmp_path / "shakespeare" / "input.txt"]


def test_of_fineweb_the_shards_asked_for_are_downloaded(server):
    assert [file.name for file in fineweb(2)] == names(server)
    assert names(server) == [f"fineweb_{part}.bin" for part in ("val_000000", "train_000001", "train_000002")]


def test_what_breaks_off_or_is_another_text_is_refused_and_not_kept(server, tmp_path, monkeypatch):
    for stop, sha256 in ((100, download.SHAKESPEARE_SHA256), (None, "0" * 64)):
        server.stop = stop
        monkeypatch.setattr(download, "SHAKESPEARE_SHA256", sha256)
        with pytest.raises(ValueError, match=rf"\A.*{tmp_path}/shakespeare/input.txt\Z"):
            shakespeare(tmp_path)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_not_there_is_one_line(server):
    for path in ("owner/name/absent.txt", "owner/name"):
        with pytest.raises(ValueError, match=rf"\A.*{Path(path).name}.*\Z"):
            hub(path)


def test_without_a_network_there_is_a_line_at_once(server, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("tries for half a minute"))
    with pytest.raises(ValueError, match=r"\A.*a.txt.*run again.*\Z"):
        from_hub("owner/name", "a.txt")
