"""The mixes of residual streams for SM90, interpreted on the CPU with race detection."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels.hyper import mosaic_sm90
from deepinfer_jax.ops import hyper
from deepinfer_jax.testing import compare

# float32 throughout; exponentials and divisions may differ in the last bits, and 20 iterations pull them together.
REL_L2 = 1e-6
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.mark.parametrize("num_rows", [1, 130], ids=["one row", "two blocks"])
def test_matches_reference(num_rows, capfd):
    logits = 3 * jax.random.normal(jax.random.key(num_rows), (num_rows, 4, 4), jnp.float32)
    got = mosaic_sm90.sinkhorn(logits, iterations=20, eps=1e-6, interpret=INTERPRET)
    compare.assert_close(got, hyper.sinkhorn(logits, iterations=20, eps=1e-6), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_one_iteration_is_a_softmax_and_one_division():
    logits = jnp.asarray(jax.random.normal(jax.random.key(0), (2, 4, 4)), jnp.float32)
    got = mosaic_sm90.sinkhorn(logits, iterations=1, eps=1e-6, interpret=INTERPRET)
    compare.assert_close(got, hyper.sinkhorn(logits, iterations=1, eps=1e-6), rel_l2=REL_L2)


def test_other_shapes_and_types_are_refused():
    assert mosaic_sm90.refuses(jnp.zeros((2, 4, 4), jnp.float32)) is None
    assert mosaic_sm90.refuses(jnp.zeros((2, 3, 3), jnp.float32)) == "there are 3 streams, not 4"
    assert mosaic_sm90.refuses(jnp.zeros((2, 4, 4), jnp.bfloat16)) == "logits are bfloat16, not float32"
