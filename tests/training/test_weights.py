"""Released forms of masters, against numpy, and what training leaves alone."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops.quant import dequantize
from deepinfer_jax.testing import compare
from deepinfer_jax.training.init import initial_masters
from deepinfer_jax.training.optimise import Schedule, learning_rate, quantiser_strength
from deepinfer_jax.training.weights import (
    decays,
    packed_params,
    plain_params,
    quantize_weight,
    trained_specs,
    training_params,
)

# Adding and taking away a float32 master may leave one rounding.
ONE_ULP = 1e-7


def fp8_of_blocks(values: np.ndarray) -> np.ndarray:
    """E4M3 with a power-of-two scale for each 32 x 32 block, in float64."""
    out = np.empty_like(values)
    for row in range(0, values.shape[0], 32):
        for col in range(0, values.shape[1], 32):
            block = values[row : row + 32, col : col + 32].astype(np.float64)
            scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
            codes = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            out[row : row + 32, col : col + 32] = codes * scale
    return out


@pytest.mark.parametrize("rows", [32, 64, 40], ids=["one block", "two", "a short last block"])
def test_weights_round_in_square_blocks(rows: int):
    values = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
    values[:32] *= 100
    packed = quantize_weight(jnp.asarray(values))
    assert packed.scale is not None and packed.scale.shape == (-(-rows // 32), 2)
    compare.assert_bitwise(dequantize(packed, jnp.dtype(jnp.float32)), fp8_of_blocks(values))


def test_what_a_step_computes_with_is_what_is_exported(shape, start):
    """At full strength, every leaf holds the values of its released form."""
    masters, fixed = start
    stepped = training_params(masters, fixed, shape, strength=jnp.float32(1.0))
    exported = plain_params(packed_params(masters, fixed, shape), shape, dtype=jnp.float32)
    for name in ("attention", "moe", "engram", "indexer", "compressor", "hc_ffn", "norm"):
        got, want = getattr(stepped, name), getattr(exported, name)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            compare.assert_close(a, b, rel_l2=ONE_ULP)


def test_weight_decay_spares_norms_mixes_and_embeddings(shape):
    decayed = {spec.path for spec in trained_specs(shape) if decays(spec)}
    assert {"attention.wq_a", "moe.experts.w1", "compressor.wkv", "head", "engram.embed.0"} <= decayed
    assert not {"embed", "attn_norm", "norm", "hc_attn.fn", "hc_ffn.base", "attention.attn_sink"} & decayed
    assert not {"engram.q_weight", "engram.k_weight"} & decayed


def test_masters_depend_on_the_seed_alone(shape):
    compare.assert_bitwise(initial_masters(shape, seed=4), initial_masters(shape, seed=4))
    assert not np.array_equal(initial_masters(shape, seed=4)["embed"], initial_masters(shape, seed=5)["embed"])
    assert set(initial_masters(shape, seed=4)) == {spec.path for spec in trained_specs(shape)}


def test_schedule_rises_stays_and_falls():
    schedule = Schedule(num_steps=100, peak_rate=1.0, final_rate=0.0, warmup_share=0.1, decay_share=0.5)
    rates = [float(learning_rate(jnp.int32(step), schedule)) for step in (0, 9, 49, 75, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])
    strengths = [float(quantiser_strength(jnp.int32(step), schedule)) for step in (0, 49, 50)]
    assert strengths == [0.0, 0.0, 1.0]


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        Schedule(num_steps=0)
    with pytest.raises(ValueError, match="must be shares of one run"):
        Schedule(num_steps=5, warmup_share=0.7, decay_share=0.7)
