"""Models by hub id, hf://owner/name or hf://owner/name@revision: fetched only when asked for."""

import re
from pathlib import Path

PREFIX = "hf://"
# Weights as safetensors, and what describes them: no pickles, no code.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "README.md"]


def is_id(name: str) -> bool:
    """Whether a name asks for the hub."""
    return name.startswith(PREFIX)


def repository(name: str) -> str:
    """owner/name of a hub id, as others write it; other names as they are."""
    return name.removeprefix(PREFIX).partition("@")[0] if is_id(name) else name


def fetch(name: str) -> Path:
    """The local folder of a hub id, downloaded on first use into the hub library's own cache.

    Raises:
      ValueError: it is no id.
      RuntimeError: huggingface_hub is not installed, or the download failed.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise ValueError(
            f"{name!r} is no hub id: write hf://owner/name or hf://owner/name@revision"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise RuntimeError(
            f"{name} needs the huggingface_hub package: pip install 'dspark-jax[hub]', "
            "or download the folder yourself and give its path"
        ) from None
    repository, revision = found.groups()
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_FILES
        )
    except Exception as error:  # the library raises many kinds, of httpx too
        raise RuntimeError(f"{name} could not be fetched: {error}") from error
    return Path(folder)
