"""Pinned sources, near duplicates, the tokenizer, and rows of tokens."""

import dataclasses
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.text.tokenizer import load_tokenizer
from deepinfer_jax.training import corpus, data, dedupe, tokenizer

ROOT = Path(__file__).parents[2]
WORDS = [f"word{i}" for i in range(400)]


def text(seed: int, count: int = 300) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def test_near_duplicates_name_the_first():
    first = text(1)
    changed = " ".join(w if i % 97 else "other" for i, w in enumerate(first.split()))
    part = " ".join(first.split()[:200])
    texts = {"a": first, "b": text(2), "c": changed, "d": part, "e": first.replace(" ", "\n\t")}
    assert dedupe.near_duplicates(texts) == {"c": "a", "d": "a", "e": "a"}


def test_share_is_estimated():
    first, second = text(1, 2000), text(2, 2000)
    half = f"{second} {first[: len(first) // 2]}"
    hashes = [dedupe.shingle_hashes(t) for t in (first, second, half)]
    assert dedupe.shared_share(hashes[0], hashes[0]) == 1.0
    assert dedupe.shared_share(hashes[0], hashes[1]) == 0.0
    assert dedupe.shared_share(hashes[0], hashes[2]) == pytest.approx(0.5, abs=0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name, content in (("a.py", text(1)), ("b/c.py", text(2)), ("b/copy.py", text(2)), ("tiny.py", "x")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "latin.py").write_bytes(b"# caf\xe9")
    (root / "data.txt").write_text("no code")
    return root


def test_sources_come_from_a_folder_or_a_tar(folder: Path, tmp_path: Path):
    from_folder = corpus.read_sources(folder)
    assert list(from_folder) == ["a.py", "b/c.py", "b/copy.py", "tiny.py"]
    with tarfile.open(tmp_path / "lib.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=".")
    assert corpus.read_sources(tmp_path / "lib.tar.gz") == from_folder
    with pytest.raises(ValueError, match="neither a folder nor a tar file; give the folder of Python's standard"):
        corpus.read_sources(tmp_path / "absent")


def test_a_manifest_pins_what_is_kept(folder: Path):
    texts = corpus.read_sources(folder)
    manifest = corpus.make_manifest(texts, version="3.12.1")
    assert {*manifest["train"], *manifest["held_out"]} == {"a.py", "b/c.py"}
    train, held_out = corpus.pinned_texts(manifest, texts)
    assert train | held_out == {"a.py": texts["a.py"], "b/c.py": texts["b/c.py"]}


@pytest.mark.parametrize("change", ["are absent", "differ from the pinned ones"])
def test_other_sources_are_refused_by_name(folder: Path, change: str):
    manifest = corpus.make_manifest(corpus.read_sources(folder), version="3.12.1")
    if change == "are absent":
        (folder / "b/c.py").unlink()
    else:
        (folder / "b/c.py").write_text(text(3))
    with pytest.raises(ValueError, match=rf"1 of 2 source files {change}: b/c.py; give the .* of Python 3.12.1"):
        corpus.pinned_texts(manifest, corpus.read_sources(folder))


def test_the_shipped_list_is_complete_and_split():
    manifest = json.loads((ROOT / "scripts" / "train_tiny_files.json").read_text())
    assert not set(manifest["train"]) & set(manifest["held_out"])
    assert len(manifest["train"]) > 1000 and len(manifest["held_out"]) > 30
    assert all(len(digest) == 64 for digest in manifest["train"].values())


def test_tokenizer_has_the_released_spellings(source, shape, tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    file.write_text(source.tokenizer, encoding="utf-8")
    loaded = load_tokenizer(file, config=shape)
    assert loaded.vocab_size == shape.vocab_size
    assert loaded.token_text(shape.dspark_noise_token_id) == "<｜System｜>"
    assert loaded.token_text(shape.image_token_id) == "<｜deepseek_image｜>"
    assert loaded.encode("<｜User｜>x")[1] == shape.vocab_size - 12 + tokenizer.LAST_TOKENS.index("<｜User｜>")
    sample = "def f(x):\n    return 'é😀' + <｜User｜>\n\tx  # 12345\n"
    assert loaded.decode(tokenizer.encode_files(file, [sample])[0]) == sample
    assert max(tokenizer.encode_files(file, [sample])[0]) < shape.vocab_size - 12, "a special token came out of a text"


def test_special_ids_of_a_config_are_checked(shape):
    tokenizer.check_special_tokens(shape)
    with pytest.raises(ValueError, match="config dspark_noise_token_id=5 must be 308"):
        tokenizer.check_special_tokens(dataclasses.replace(shape, dspark_noise_token_id=5))


def test_a_vocabulary_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="vocab_size=200 is below 271"):
        tokenizer.train_tokenizer(["abc"], vocab_size=200)
    with pytest.raises(ValueError, match="the texts give 261 tokens, fewer than 988"):
        tokenizer.train_tokenizer(["abc"], vocab_size=1000)


def test_data_survives_a_file(source, tmp_path: Path):
    data.save_data(source, tmp_path / "data.npz")
    loaded = data.load_data(tmp_path / "data.npz")
    assert np.array_equal(loaded.train, source.train) and np.array_equal(loaded.held_out, source.held_out)
    assert (loaded.tokenizer, loaded.held_out_bytes) == (source.tokenizer, source.held_out_bytes)
    with pytest.raises(ValueError, match="absent.npz does not exist; make it with"):
        data.load_data(tmp_path / "absent.npz")


def test_rows_depend_on_seed_and_step_alone():
    stream = np.arange(1000, dtype=np.uint16)
    draw = lambda step, seed=0: data.draw_rows(stream, step=step, seed=seed, num_rows=5, row_len=9, bos_id=7)  # noqa: E731
    assert np.array_equal(draw(3), draw(3))
    assert not np.array_equal(draw(3), draw(4)) and not np.array_equal(draw(3), draw(3, seed=1))
    assert np.array_equal(np.diff(draw(3)[:, 1:], axis=1), np.ones((5, 8))) and np.all(draw(3)[:, 0] == 7)
    with pytest.raises(ValueError, match="the stream has 1000 tokens, fewer than a row of 1001"):
        data.draw_rows(stream, step=0, seed=0, num_rows=1, row_len=1001, bos_id=0)


def test_whole_rows_hold_every_token_once():
    stream = np.arange(100, 123, dtype=np.uint16)
    rows, counts = data.whole_rows(stream, row_len=10, bos_id=0, eos_id=1)
    assert rows.shape == (3, 11) and counts.tolist() == [10, 10, 3]
    assert [t for row, count in zip(rows, counts, strict=True) for t in row[1 : count + 1]] == stream.tolist()
    assert rows[2, 4:].tolist() == [1] * 7


def test_xz_packs_repeated_text():
    assert data.xz_bits_per_byte({"a": "abc" * 10_000}) < 0.1
