"""Downloads tinyshakespeare, and whatever lies on Hugging Face with huggingface_hub.

huggingface_hub keeps files in its own cache (HF_HOME), goes on where a connection broke, shows its progress, and knows
mirrors (HF_ENDPOINT), private files (HF_TOKEN) and machines without a network (HF_HUB_OFFLINE). A file that the user
has put into data/cache counts first.
"""

import hashlib
import http.client
import secrets
import sys
import urllib.request
from pathlib import Path
from typing import Any

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TIMEOUT = 30  # seconds to connect, and between two packets

FINEWEB = "kjj0/fineweb10B-gpt2"  # modded-nanogpt's shards of FineWeb as GPT-2 tokens, a dataset on Hugging Face
FINEWEB_SHARDS = 103


class NotThere(ValueError):
    """The repository does not have the file."""


def shakespeare(cache: Path, url: str | None) -> Path:
    """tinyshakespeare, downloaded at first use. ValueError, one line, if it cannot be had or is another text.

    url: the folder that has it as input.txt; None: char-rnn's on GitHub.
    """
    file, url = cache / "shakespeare" / "input.txt", SHAKESPEARE_URL if url is None else url
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"data.url={url} is no address to download from: it must be like https://host/folder")
    address, where = f"{url.rstrip('/')}/{file.name}", f"(SHA-256 {SHAKESPEARE_SHA256}) at {file.resolve()}"
    if not file.exists():
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT) as response:
                print(f"downloading {address}", file=sys.stderr)
                text = response.read(SHAKESPEARE_BYTES + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(f"{address} cannot be downloaded: {error}; run again, or put the file {where}") from error
        if (found := hashlib.sha256(text).hexdigest()) != SHAKESPEARE_SHA256:
            raise ValueError(f"{address} is another file or was cut (SHA-256 {found}); run again, or put it {where}")
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".tmp-{secrets.token_hex(4)}")  # another process may download it too
        temporary.write_bytes(text)
        temporary.replace(file)
    with open(file, "rb") as content:  # the user may have put it there
        if (found := hashlib.file_digest(content, "sha256").hexdigest()) != SHAKESPEARE_SHA256:
            raise ValueError(f"{file} is another file (SHA-256 {found}): delete it, or put the right one {where}")
    return file


def fineweb(cache: Path, shards: int | None) -> list[Path]:
    """The validation shard of FineWeb-10B and the first `shards` training shards, downloaded at first use."""
    shards = 1 if shards is None else shards
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise ValueError(f"data.shards={shards} is outside 1 to {FINEWEB_SHARDS}: each is 100 M tokens, 200 MB")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1))]
    return [from_hub(FINEWEB, name, cache / "fineweb10B", kind="dataset") for name in names]


def from_hub(repository: str, name: str, by_hand: Path, *, kind: str = "model", revision: str = "main") -> Path:
    """A file of a repository of Hugging Face: in the folder `by_hand`, or in Hugging Face's cache, downloaded at first
    use. A file that is there is not asked for again.

    kind: model or dataset. Raises NotThere, or another ValueError of one line with the way out.
    """
    if (by_hand / name).exists():
        return by_hand / name
    import huggingface_hub.constants  # here, because it takes half a second
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    file: dict[str, Any] = {"repo_id": repository, "filename": name, "repo_type": kind, "revision": revision}
    kept = huggingface_hub.try_to_load_from_cache(**file)
    if isinstance(kept, str):
        return Path(kept)
    try:
        # Without a network this fails at once. The download itself would be tried for half a minute.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**file))
        return Path(huggingface_hub.hf_hub_download(**file))
    except Exception as error:  # its own, httpx's, Xet's and the system's
        kind_of_error: type[ValueError] = ValueError
        if isinstance(error, RepositoryNotFoundError):
            why = "there is no such repository, or it is private and HF_TOKEN may not read it"
        elif isinstance(error, RemoteEntryNotFoundError):
            kind_of_error, why = NotThere, "the repository has no such file"
        else:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise kind_of_error(
            f"{name} of {repository} cannot be had from {huggingface_hub.constants.ENDPOINT} ({why}); run again, or "
            f"put the file into {by_hand.resolve()}"
        ) from error
