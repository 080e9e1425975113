"""The texts that a model is trained on: Python's own source files, pinned by their hashes."""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.training.dedupe import near_duplicates

HELD_OUT_SHARE = 0.04  # of the files that are left after near duplicates
MIN_BYTES, MAX_BYTES = 200, 400_000  # smaller files say nothing, larger ones are tables
MIN_WORDS_SHARE = 0.35  # of letters among a file's characters: tables of numbers have fewer
# Folders and files that hold tables, prose or deliberate nonsense instead of code.
LEFT_OUT = (
    "site-packages/",
    "encodings/",
    "pydoc_data/",
    "__phello__/",
    "test/encoded_modules/",
    "test/test_import/data/",
)
_NUM_NAMED = 5  # files that an error names


def read_sources(place: str | Path) -> dict[str, str]:
    """Path below the root -> text, of the Python files of a folder or a tar file, in the order of the paths.

    Files that are not UTF-8 are left out. Raises ValueError where there is no such folder or file.
    """
    place = Path(place)
    if place.is_dir():
        found = _from_folder(place)
    elif place.is_file() and tarfile.is_tarfile(place):
        found = _from_tar(place)
    else:
        raise ValueError(
            f"{place} is neither a folder nor a tar file; give the folder of Python's standard library "
            "(sysconfig.get_path('stdlib')) or a tar of it"
        )
    texts = {}
    for path, data in sorted(found):
        try:
            texts[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def make_manifest(texts: Mapping[str, str], *, version: str) -> dict[str, Any]:
    """The pinned list: which files train, which are held out, each with the SHA-256 of its UTF-8 bytes.

    Near duplicates are dropped before the split, so no held-out file repeats one that trains. The split follows the
    hash of a file's path.
    """
    usable = {path: text for path, text in texts.items() if _is_usable(path, text)}
    dropped = near_duplicates(usable)
    kept = {path: _digest(text) for path, text in usable.items() if path not in dropped}
    held_out = {path for path in kept if _draw(path) < HELD_OUT_SHARE}
    return {
        "python": version,
        "train": {path: digest for path, digest in kept.items() if path not in held_out},
        "held_out": {path: digest for path, digest in kept.items() if path in held_out},
    }


def pinned_texts(manifest: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The training texts and the held-out ones. Raises ValueError, naming files, where one is absent or differs."""
    wanted = {**manifest["train"], **manifest["held_out"]}
    absent = [path for path in wanted if path not in texts]
    other = [path for path, digest in wanted.items() if path in texts and _digest(texts[path]) != digest]
    for problem, paths in (("are absent", absent), ("differ from the pinned ones", other)):
        if paths:
            raise ValueError(
                f"{len(paths)} of {len(wanted)} source files {problem}: {', '.join(paths[:_NUM_NAMED])}"
                f"{' ...' if len(paths) > _NUM_NAMED else ''}; give the standard library of Python "
                f"{manifest['python']}, or carry a data file that was made with it"
            )
    return {path: texts[path] for path in manifest["train"]}, {path: texts[path] for path in manifest["held_out"]}


def read_manifest(file: str | Path) -> dict[str, Any]:
    """A pinned list that `make_manifest` made."""
    return json.loads(Path(file).read_text(encoding="utf-8"))


def _from_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in folder.rglob("*.py"):
        yield file.relative_to(folder).as_posix(), file.read_bytes()


def _from_tar(file: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name.removeprefix("./"), content.read()


def _is_usable(path: str, text: str) -> bool:
    if any(path.startswith(part) or f"/{part}" in path for part in LEFT_OUT):
        return False
    if not MIN_BYTES <= len(text.encode()) <= MAX_BYTES:
        return False
    return sum(map(str.isalpha, text)) >= MIN_WORDS_SHARE * len(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _draw(path: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
