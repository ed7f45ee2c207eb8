"""data/download.py: a file is whole or absent, is downloaded once, and what cannot be had is one line."""

import hashlib
from pathlib import Path

import huggingface_hub
import pytest

from data import download
from data.download import fineweb, hub, shakespeare

CONTENT = b"Before we proceed any further, hear me speak.\n" * 1000


@pytest.fixture
def url(tmp_path, monkeypatch) -> Path:
    """The file in the place of tinyshakespeare's address."""
    there = tmp_path / "there.txt"
    there.write_bytes(CONTENT)
    monkeypatch.setattr(download, "SHAKESPEARE_URL", there.as_uri())
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return there


def test_tinyshakespeare_is_downloaded_once(url, tmp_path):
    assert shakespeare(tmp_path / "cache").read_bytes() == CONTENT
    url.unlink()
    assert shakespeare(tmp_path / "cache").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.glob("cache/*/*")] == ["input.txt"]


def test_what_is_another_text_or_not_there_is_refused_and_not_kept(url, tmp_path):
    for change in (lambda: url.write_bytes(CONTENT[:-1]), url.unlink):
        change()
        with pytest.raises(ValueError, match=rf"\A.*{tmp_path}/cache/shakespeare/input.txt\Z"):
            shakespeare(tmp_path / "cache")
        assert not [*tmp_path.glob("cache/*/*")]


@pytest.fixture
def asked(tmp_path, monkeypatch) -> list[tuple[str, str]]:
    """What Hugging Face was asked for. Instead of it, any file but "absent.txt" is there; tmp_path is the cache."""
    asked = []

    def load(repository: str, name: str, repo_type: str) -> str | None:
        file = tmp_path / name.replace("/", "-")
        return str(file) if file.exists() else None

    def get(repository: str, name: str, repo_type: str) -> str:
        asked.append((repository, name))
        (tmp_path / name.replace("/", "-")).write_bytes(CONTENT)
        return load(repository, name, repo_type)

    def look(url: str) -> None:
        if "absent" in url:
            raise OSError("no such\nfile")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", load)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", look)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", get)
    return asked


def test_of_the_hub_the_files_asked_for_are_downloaded_once(asked):
    for _ in range(2):
        assert hub("owner/name/folder/a.txt").read_bytes() == CONTENT
        fineweb(2)
    shards = [f"fineweb_{part}.bin" for part in ("val_000000", "train_000001", "train_000002")]
    assert asked == [("owner/name", "folder/a.txt"), *((download.FINEWEB, name) for name in shards)]


@pytest.mark.parametrize("path", ["owner/name/absent.txt", "owner/name"])
def test_what_the_hub_does_not_have_is_one_line_without_a_wait_for_a_download(asked, path):
    with pytest.raises(ValueError, match=rf"\A.*{Path(path).name}.*\Z"):
        hub(path)
    assert asked == []
