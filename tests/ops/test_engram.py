"""Engram hash and gate against recorded ones, and the device hash against the host's on arbitrary ids."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_jax.ops import engram
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.quant import FP8_GROUP, ScaledArray, dequantize
from deepinfer_jax.testing import compare
from deepinfer_jax.text import engram_vocab
from deepinfer_jax.text.engram_vocab import EngramConstants, engram_constants

# A float32 projection, three sums over 64 channels and a sigmoid of a root.
GATE_REL_L2 = 3e-7
# One bf16 rounding of a float32 result in another order: 2^-9 relative in the rare values that it turns over.
BF16_REL_L2 = 2e-4
PAD = 2
SHAPES = {
    "release": {"layer_ids": (1, 14), "num_heads": 8, "vocab_base": 16_000_000, "compressed_vocab_size": 99_092},
    "tiny": {"layer_ids": (0, 3), "num_heads": 2, "vocab_base": 40, "compressed_vocab_size": 257},
}
CONSTANTS = {name: engram_constants(max_ngram=4, **shape) for name, shape in SHAPES.items()}
LENGTH = 40  # as the recorded sequences, so that one compilation serves all


def context_of(compressed: np.ndarray, is_text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `hash_rows` reads for every row of one sequence: the ids 0..3 places back, and which exist."""
    ids = np.where(is_text, compressed, engram.DEAD).astype(np.int32)
    place = np.arange(len(ids))[:, None] - np.arange(4)[None, :]
    return ids[np.maximum(place, 0)], place >= 0


def device_rows(constants: EngramConstants, layer: int, context: np.ndarray, exists: np.ndarray) -> jax.Array:
    return engram.hash_rows(
        jnp.asarray(context),
        jnp.asarray(exists),
        multipliers=constants.multipliers[layer],
        primes=constants.primes[layer],
        pad=jnp.asarray(PAD, jnp.int32),
    )


HASH = jax.jit(
    lambda context, exists, *, name: jnp.stack([device_rows(CONSTANTS[name], i, context, exists) for i in range(2)], 1),
    static_argnames="name",
)


def test_recorded_constants_are_met(component):
    fixture, constants = component("engram_hash_real"), CONSTANTS["release"]
    compare.assert_bitwise(np.asarray(constants.primes), fixture["primes"])
    compare.assert_bitwise(np.asarray(constants.multipliers), fixture["multipliers"])
    compare.assert_bitwise(np.asarray(constants.offsets), fixture["offsets"])


@pytest.mark.parametrize("name, is_masked", [("hash_ids", False), ("hash_ids_masked", True)])
def test_recorded_rows_are_met(component, name: str, is_masked: bool):
    fixture = component("engram_hash_real")
    for sequence in range(3):
        ids, mask = fixture["compressed_ids"][sequence], fixture["mask"][sequence].astype(bool)
        made = HASH(*context_of(ids, mask | (not is_masked)), name="release")
        compare.assert_bitwise(np.asarray(made).astype(np.int64), fixture[name][sequence])


@pytest.mark.parametrize("name", SHAPES)
@given(seed=st.integers(0, 2**32 - 1), share_of_text=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_device_equals_host(name: str, seed: int, share_of_text: float):
    rng = np.random.default_rng(seed)
    size = SHAPES[name]["compressed_vocab_size"]
    ids = rng.integers(0, size, LENGTH)
    is_text = rng.random(LENGTH) < share_of_text
    want = engram_vocab.hash_rows(ids, np.arange(size), ~is_text, constants=CONSTANTS[name], pad_token_id=PAD)
    made = np.asarray(HASH(*context_of(ids, is_text), name=name))
    compare.assert_bitwise(made.astype(np.int64), want)


@pytest.mark.parametrize("name", SHAPES)
def test_device_equals_host_at_the_largest_ids(name: str):
    size = SHAPES[name]["compressed_vocab_size"]
    ids = np.asarray([size - 1] * 12 + [0] * 12 + [size - 1, 0] * 8)
    want = engram_vocab.hash_rows(ids, np.arange(size), constants=CONSTANTS[name], pad_token_id=PAD)
    compare.assert_bitwise(np.asarray(HASH(*context_of(ids, np.ones(LENGTH, bool)), name=name)).astype(np.int64), want)


def test_product_and_remainder_are_exact_at_the_edges_of_the_words():
    tokens = np.asarray([0, 1, 2, 0xFFFF, 0x10000, 99_091, 2**31 - 1, 2**32 - 1], np.uint32)
    for multiplier in (1, 3, 0xFFFF, 2**32 - 1, 2**32 + 1, 76_632_096_046_245, 2**62 + 12345):
        high, low = jax.jit(engram._multiply, static_argnums=1)(tokens, multiplier)
        made = (np.asarray(high).astype(object) << 32) + np.asarray(low).astype(object)
        assert list(made) == [int(t) * multiplier % 2**64 for t in tokens]
        for prime in (2, 41, 16_000_889, 16_777_213):
            rest = jax.jit(engram._remainder, static_argnums=1)((high, low), prime)
            assert list(np.asarray(rest)) == [int(v) % prime for v in made]


@pytest.mark.parametrize("name, is_masked", [("out", False), ("out_masked", True)])
def test_recorded_gate_is_met(component, exact_jit, name: str, is_masked: bool):
    """Look-up, projection, gate; image rows and a stream of zeros included."""
    fixture = component("engram_gate")
    table = ScaledArray(
        payload=jnp.asarray(fixture["table_codes"].view(np.uint8)),
        scale=jnp.asarray(fixture["table_scale"].view(np.uint8)),
        form="fp8",
        block=(1, FP8_GROUP),
    )

    def mix(table, hashed, streams, wkv, q_weight, k_weight, is_text):
        memory = dequantize(table, jnp.float32)[hashed].reshape(hashed.shape[0], -1)
        projected = linear(memory, wkv)
        keys = projected[:, : streams.shape[1] * streams.shape[2]].reshape(streams.shape)
        value = projected[:, streams.shape[1] * streams.shape[2] :]
        return engram.gate(streams, keys, value, q_weight, k_weight, is_text)

    is_text = fixture["token_mask"][0].astype(bool) | (not is_masked)
    made = exact_jit(mix)(
        table,
        fixture["hash_ids"][0].astype(np.int32),
        fixture["x"][0],
        fixture["wkv"],
        fixture["q_weight"],
        fixture["k_weight"],
        is_text,
    )
    compare.assert_close(made, fixture[name][0], rel_l2=GATE_REL_L2)
    compare.assert_bitwise(np.asarray(made)[~is_text], fixture["x"][0][~is_text])


def test_gate_rounds_once_to_the_dtype_of_the_streams(exact_jit):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s, np.float32) for s in ((7, 4, 32), (7, 4, 32), (7, 32), (4, 32), (4, 32))]
    rounded = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    is_text = np.ones(7, bool)
    made = np.asarray(exact_jit(engram.gate)(*rounded, is_text))
    wide = np.asarray(exact_jit(engram.gate)(*[a.astype(np.float32) for a in rounded], is_text))
    compare.assert_close(made, wide.astype(ml_dtypes.bfloat16), rel_l2=BF16_REL_L2)


def test_no_rows_give_no_rows():
    made = device_rows(CONSTANTS["tiny"], 0, np.zeros((0, 4), np.int32), np.zeros((0, 4), bool))
    assert made.shape == (0, 6)
    streams = jnp.zeros((0, 4, 8))
    weight = jnp.zeros((4, 8))
    assert engram.gate(streams, streams, jnp.zeros((0, 8)), weight, weight, jnp.zeros(0, bool)).shape == (0, 4, 8)
