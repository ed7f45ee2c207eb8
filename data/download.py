"""Downloads: tinyshakespeare by HTTP; FineWeb's shards and any file of a dataset on Hugging Face by huggingface_hub,
which keeps them in its own cache (HF_HOME), resumes, and knows mirrors (HF_ENDPOINT) and private files (HF_TOKEN)."""

import sys
from pathlib import Path

import torch

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINEWEB = "kjj0/fineweb10B-gpt2"  # modded-nanogpt's shards of FineWeb as GPT-2 tokens


def shakespeare(cache: Path) -> Path:
    """tinyshakespeare, downloaded at first use; the user may have put it there. ValueError if it cannot be had."""
    file = cache / "shakespeare" / "input.txt"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    print("downloading", SHAKESPEARE_URL, file=sys.stderr)
    try:
        torch.hub.download_url_to_file(SHAKESPEARE_URL, str(file), SHAKESPEARE_SHA256, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: it has another hash
        raise ValueError(f"{SHAKESPEARE_URL} cannot be downloaded: {error}; put it at {file.resolve()}") from error
    return file


def fineweb(shards: int) -> list[Path]:
    """The validation shard of FineWeb-10B and the first `shards` training shards, downloaded at first use."""
    names = [f"train_{number:06d}" for number in range(1, shards + 1)]
    return [from_hub(FINEWEB, f"fineweb_{name}.bin") for name in ["val_000000", *names]]


def hub(path: str) -> Path:
    """OWNER/NAME/FILE of a dataset on Hugging Face."""
    owner, name, file = [*path.split("/", 2), "", ""][:3]
    if not file:
        raise ValueError(f"data.path={path}: data=hub reads a file of a dataset: data.path=OWNER/NAME/FILE")
    return from_hub(f"{owner}/{name}", file)


def from_hub(repository: str, name: str) -> Path:
    """A file of a dataset on Hugging Face, from its cache or downloaded. ValueError, one line, if it cannot be had."""
    import huggingface_hub  # here, because it takes half a second

    kept = huggingface_hub.try_to_load_from_cache(repository, name, repo_type="dataset")
    if isinstance(kept, str):
        return Path(kept)
    try:
        # Fails at once without a network; hf_hub_download() would try for half a minute.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repository, name, repo_type="dataset"))
        return Path(huggingface_hub.hf_hub_download(repository, name, repo_type="dataset"))
    except Exception as error:  # its own, httpx's, Xet's and the system's
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        way_out = "run again, or fetch it elsewhere and use data=text or data=bin with its data.path="
        raise ValueError(f"{name} of the dataset {repository} cannot be downloaded ({why}): {way_out}") from error
