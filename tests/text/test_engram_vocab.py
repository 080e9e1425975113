import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from deepinfer_jax.config.released import load_config
from deepinfer_jax.text import engram_vocab, tiny_tokenizer

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny_a"

# The released constants (spec: engram 2.2), literal so that a change of NumPy's streams is noticed.
RELEASE_VC = 99_092
RELEASE_PRIMES = tuple(
    tuple(tuple(16_000_000 + tail for tail in heads) for heads in layer)
    for layer in (
        (
            (57, 79, 81, 97, 121, 129, 133, 183),
            (189, 207, 211, 253, 277, 289, 307, 321),
            (339, 381, 393, 399, 403, 409, 447, 463),
        ),
        (
            (477, 487, 499, 507, 511, 573, 609, 627),
            (667, 669, 693, 697, 711, 729, 759, 769),
            (781, 799, 813, 819, 841, 877, 879, 889),
        ),
    )
)
RELEASE_MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
RELEASE_ROWS = (384_006_168, 384_016_682)

# Golden rows (spec: engram 2.5): compressed ids of BOS, User, "Hello, the World", Assistant, and
# </think>.
GOLDEN_IDS = [0, 98615, 15844, 14, 237, 1751, 98616, 98634]
GOLDEN_COLUMNS = [0, 1, 7, 8, 15, 16, 23]
GOLDEN_ROWS = {
    (0, 0): (5702652, 24393184, 121476532, 131476717, 247482304, 257520185, 380066193),
    (0, 1): (14361964, 29977809, 120604547, 132225184, 252505246, 261362261, 372375971),
    (1, 0): (3695168, 27059552, 121420525, 138321737, 253286687, 267086655, 371393845),
    (1, 1): (5519679, 29666556, 115457008, 132034959, 246079605, 270734617, 383764017),
    (7, 0): (6145177, 29200083, 115133545, 143026135, 247283925, 260053901, 371785330),
    (7, 1): (13564020, 18908159, 124159213, 134613999, 253016575, 266113810, 378556025),
}
GOLDEN_SHA = "e4707a6fbea1827025938614a27bbe637eb23568e83958cbdd9d9f7f685c83a7"


@pytest.fixture(scope="module")
def release() -> engram_vocab.EngramConstants:
    return engram_vocab.engram_constants(
        layer_ids=(1, 14),
        max_ngram=4,
        num_heads=8,
        vocab_base=16_000_000,
        compressed_vocab_size=RELEASE_VC,
    )


def compressed_rows(ids, dead=None, *, constants):
    """Rows of ids that are compressed already, with the released pad class 2."""
    dead_mask = None if dead is None else np.asarray(dead, bool)
    return engram_vocab.hash_rows(
        np.asarray(ids), np.arange(RELEASE_VC), dead_mask, constants=constants, pad_token_id=2
    )


def test_token_map_equals_the_recorded_one():
    want = load_file(TINY / "prompts.safetensors")["token_map"]
    got = engram_vocab.token_map(TINY / "tokenizer.json", compressed_vocab_size=257)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    assert got.max() + 1 == 257


def test_directory_and_file_give_the_same_map():
    by_file = engram_vocab.build_token_map(TINY / "tokenizer.json")
    np.testing.assert_array_equal(engram_vocab.build_token_map(TINY), by_file)


def test_wrong_compressed_size_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"257 compressed ids.*engram_compressed_vocab_size=258"):
        engram_vocab.token_map(TINY, compressed_vocab_size=258)


def test_ids_without_a_token_share_one_class(tmp_path):
    path = tiny_tokenizer.write_tiny_byte(tmp_path)
    known = engram_vocab.build_token_map(path)
    got = engram_vocab.build_token_map(path, vocab_size=320)
    np.testing.assert_array_equal(got[: len(known)], known)
    assert set(got[len(known) :].tolist()) == {int(known.max()) + 1}


def test_model_vocabulary_below_the_tokenizer_is_refused():
    with pytest.raises(ValueError, match="320 ids, vocab_size=319"):
        engram_vocab.build_token_map(TINY, vocab_size=319)


def test_whitespace_case_and_partial_characters(tmp_path):
    path = tiny_tokenizer.write_tiny_byte(tmp_path)
    got = engram_vocab.build_token_map(path)

    def classes(*bytes_: int) -> set[int]:
        return {int(got[tiny_tokenizer.FIRST_BYTE_ID + b]) for b in bytes_}

    assert len(classes(*b"\t\n\r ")) == 1
    assert classes(*b"A") == classes(*b"a")
    assert len(classes(*range(0x80, 0x100))) == 128  # keyed by their vocabulary string
    accented = tiny_tokenizer.FIRST_MERGED_ID + tiny_tokenizer.MERGED_TOKENS.index("é".encode())
    assert {int(got[accented])} == classes(*b"e")


def test_release_primes_offsets_and_multipliers(release):
    assert release.primes == RELEASE_PRIMES
    assert release.multipliers == RELEASE_MULTIPLIERS
    assert release.num_rows == RELEASE_ROWS
    for offsets, primes in zip(release.offsets, RELEASE_PRIMES, strict=True):
        flat = np.asarray(primes).reshape(-1)
        np.testing.assert_array_equal(offsets, np.cumsum(flat) - flat)


def test_products_stay_below_the_sign_bit():
    largest = max(max(layer) for layer in RELEASE_MULTIPLIERS)
    bound = max(1, (2**63 - 1) // RELEASE_VC // 2)
    assert largest <= 2 * (bound - 1) + 1
    assert (2 * (bound - 1) + 1) * (RELEASE_VC - 1) < 2**63


def test_release_constants_equal_the_recorded_ones(release):
    want = load_file(DATA / "components" / "engram_hash_real.safetensors")
    np.testing.assert_array_equal(release.primes, want["primes"])
    np.testing.assert_array_equal(release.offsets, want["offsets"])
    np.testing.assert_array_equal(release.multipliers, want["multipliers"])


@pytest.mark.parametrize("is_masked", [False, True], ids=["text", "with-dead-tokens"])
def test_rows_equal_the_recorded_release_rows(release, is_masked):
    want = load_file(DATA / "components" / "engram_hash_real.safetensors")
    dead = want["mask"] == 0 if is_masked else None
    got = compressed_rows(want["compressed_ids"], dead, constants=release)
    np.testing.assert_array_equal(got, want["hash_ids_masked" if is_masked else "hash_ids"])


@pytest.mark.parametrize("prompt", ["p05", "p08", "p33", "b2"])
def test_rows_equal_the_recorded_tiny_rows(prompt):
    config = load_config(TINY)
    constants = engram_vocab.engram_constants(
        layer_ids=config.engram_layer_ids,
        max_ngram=config.engram_max_ngram_size,
        num_heads=config.engram_n_heads,
        vocab_base=config.engram_vocab_size,
        compressed_vocab_size=config.engram_compressed_vocab_size,
    )
    assert constants.num_rows == (304, 462)
    token_map = engram_vocab.token_map(TINY, compressed_vocab_size=config.engram_compressed_vocab_size)
    recorded = load_file(TINY / "prefill_light_fp32_noqdq.safetensors")
    got = engram_vocab.hash_rows(
        recorded[f"{prompt}.input_ids"],
        token_map,
        constants=constants,
        pad_token_id=config.engram_pad_token_id,
    )
    np.testing.assert_array_equal(got, recorded[f"{prompt}.engram_hash_ids"])


def test_golden_rows(release):
    got = compressed_rows(GOLDEN_IDS, constants=release)
    assert got.shape == (8, 2, 24)
    for (position, layer), want in GOLDEN_ROWS.items():
        assert tuple(got[position, layer, GOLDEN_COLUMNS].tolist()) == want
    assert hashlib.sha256(got.astype("<i8").tobytes()).hexdigest() == GOLDEN_SHA


def test_golden_rows_around_an_image(release):
    got = compressed_rows([15844, 7, 7, 5, 6], [0, 1, 1, 0, 0], constants=release)
    want = [
        (4951095, 128558709, 267666008),
        (4299726, 129401291, 264341430),
        (4299726, 129401291, 264341430),
        (5412672, 143494632, 256353435),
        (2726396, 129759508, 257685586),
    ]
    assert [tuple(row) for row in got[:, 0, [0, 8, 16]].tolist()] == want


def test_rows_after_an_image_equal_a_fresh_start(release, seed_from_name):
    rng = np.random.default_rng(seed_from_name)
    before, after = rng.integers(0, RELEASE_VC, 9), rng.integers(0, RELEASE_VC, 12)
    ids = np.concatenate([before, [7, 7, 7], after])
    dead = np.isin(np.arange(len(ids)), [9, 10, 11])
    got = compressed_rows(ids, dead, constants=release)
    np.testing.assert_array_equal(got[12:], compressed_rows(after, constants=release))
    np.testing.assert_array_equal(got[:9], compressed_rows(before, constants=release))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 9])
def test_rows_do_not_depend_on_later_tokens_or_the_batch(release, length, seed_from_name):
    ids = np.random.default_rng(seed_from_name).integers(0, RELEASE_VC, (3, 9))
    whole = compressed_rows(ids, constants=release)
    for row in range(3):
        got = compressed_rows(ids[row, :length], constants=release)
        np.testing.assert_array_equal(got, whole[row, :length])


def test_every_row_lies_in_the_range_of_its_column(release, seed_from_name):
    ids = np.random.default_rng(seed_from_name).integers(0, RELEASE_VC, (2000,))
    rows = compressed_rows(ids, constants=release)
    low = np.asarray(release.offsets)
    high = low + np.asarray(release.primes).reshape(2, 24)
    assert (rows >= low).all()
    assert (rows < high).all()


def test_constants_are_frozen(release):
    with pytest.raises(dataclasses.FrozenInstanceError):
        release.primes = ()
