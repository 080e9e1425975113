"""The model that is used when none is named: a tiny checkpoint in the released format, made on first use.

`embedded_model` is the only way to it. Its weights are random, from a fixed seed: it has the architecture, and
nothing sensible to say.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint import names, write
from deepinfer_jax.config.places import cache_folder, shipped_config, writable_folder
from deepinfer_jax.config.released import load_config
from deepinfer_jax.model import draft_params, leaves, params, vision_params
from deepinfer_jax.text import tiny_tokenizer

CONFIG_NAME = "model/tiny.json"
SEED = 41
# Behind the TinyByte ids: what the config names as image token and as the drafter's noise token.
EXTRA_TOKENS = ("<｜image｜>", "<｜draft｜>")
_DIGEST_LEN = 16  # hexadecimal digits


def embedded_model() -> Path:
    """The directory of the embedded model; under a second when it has to be made first.

    It is kept in the user's cache folder under a hash of all that determines its files. Where that folder takes no
    files, a temporary directory serves, for this process only.
    """
    folder = cache_folder() / "models"
    if (ready := folder / f"embedded-{_digest()}").is_dir():
        return ready
    if not writable_folder(folder):
        directory = Path(tempfile.mkdtemp(prefix="deepinfer-jax-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        write_tiny_byte_model(directory, seed=SEED)
        return directory
    # Complete before it gets its name, so that nobody ever sees half of it.
    draft = Path(tempfile.mkdtemp(prefix=".embedded-", dir=folder))
    try:
        write_tiny_byte_model(draft, seed=SEED)
        os.chmod(draft, 0o755)
        _move_into_place(draft, ready)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return ready


def write_tiny_byte_model(directory: str | Path, *, seed: int) -> None:
    """A complete checkpoint of `configs/model/tiny.json` with random weights, and the TinyByte tokenizer."""
    config = load_config(shipped_config(CONFIG_NAME))
    tiny_tokenizer.write_tiny_byte(directory, extra_tokens=EXTRA_TOKENS)
    write.write_released(params.init_params(config, seed=seed), config, directory, seed=seed)


def _move_into_place(draft: Path, ready: Path) -> None:
    try:
        draft.rename(ready)
    except OSError:
        if not ready.is_dir():  # otherwise another process was first, with the same files
            raise


def _digest() -> str:
    """Changes with everything that determines the files: the shape, the seed, and the code that writes them."""
    sources = (leaves, params, draft_params, vision_params, names, write, tiny_tokenizer)
    digest = hashlib.sha256(f"{SEED} {EXTRA_TOKENS} {np.__version__}".encode())
    for file in (shipped_config(CONFIG_NAME), *(Path(str(module.__file__)) for module in sources)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:_DIGEST_LEN]
