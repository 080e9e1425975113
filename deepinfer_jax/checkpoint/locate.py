"""Which directory a model name means: a local path, or a Hugging Face id through its cache."""

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json",)
_WEIGHT_FILES = ("*.json", "*.safetensors")


def locate_model(path_or_id: str | Path, *, revision: str | None = None, needs_weights: bool = True) -> Path:
    """The local directory (or config file) of a model; downloads what the Hugging Face cache lacks.

    A local path wins over an id of the same spelling. Without a network, or with HF_HUB_OFFLINE=1, the cached
    snapshot is used. Raises ValueError, saying what to do, when there is neither.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    name = str(path_or_id)
    if not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"model {name!r} is no existing directory or config file, and no Hugging Face id (owner/name); "
            "check the path"
        )
    return _snapshot(name, revision, _WEIGHT_FILES if needs_weights else _SMALL_FILES)


def _snapshot(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except OSError as error:  # every network, permission and cache failure of the hub is one
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model {name!r} is no local path, and Hugging Face gave no snapshot of it"
            f"{f' at revision {revision!r}' if revision else ''}: {reason} "
            "Check the name and the network (HF_TOKEN for a private model); offline, point HF_HOME at a cache that "
            "holds it, or give a local directory"
        ) from error
    return Path(folder)
