"""Where files live that nobody named: shipped configs and models, and the user's cache folder."""

from collections.abc import Mapping
from pathlib import Path

from deepinfer_jax.config.environ import PROCESS_ENVIRON

_PACKAGE = Path(__file__).parent.parent


def shipped_config(name: str) -> Path:
    """A file of `configs/`, such as "model/tiny.json": beside the package if installed, else in the repository."""
    installed = _PACKAGE / "configs" / name
    return installed if installed.exists() else _PACKAGE.parent / "configs" / name


def shipped_model(name: str) -> Path:
    """A directory of the package's own `models/`, in the released format, such as "tiny-code"."""
    return _PACKAGE / "models" / name


def cache_folder(environ: Mapping[str, str] = PROCESS_ENVIRON) -> Path:
    """This package's part of the user's cache folder; it need not exist."""
    root = environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "deepinfer_jax"


def writable_folder(folder: Path) -> bool:
    """Whether the folder exists, or was made just now, and takes files."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True
