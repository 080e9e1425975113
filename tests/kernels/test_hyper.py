"""Residual streams around a sublayer, interpreted on the CPU with race detection."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels.hyper import cases, mosaic
from deepinfer_jax.ops import hyper
from deepinfer_jax.testing import compare

# Sums in another order and quotients by reciprocals; 20 iterations pull differences together.
COEFFICIENTS_REL_L2 = 1e-6
# A product and a sum in one operation, or a last bit of a coefficient, turn a bfloat16 rounding (2^-9) of few values.
ROWS_REL_L2 = 1e-3
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
WIDTH = 256


def make(num_rows):
    return cases.make_inputs(jax.random.key(num_rows), num_rows=num_rows, width=WIDTH)


SIZES = [5, 33, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 16, 128))]


def run(kernel, *inputs):
    """The kernel interpreted, until it is done: its threads call JAX, as operations of the reference do, and both could
    wait for each other."""
    return jax.block_until_ready(kernel(*inputs, interpret=INTERPRET))


def check(got, want):
    rel_l2 = COEFFICIENTS_REL_L2 if want.dtype == jnp.float32 else ROWS_REL_L2
    compare.assert_close(got, want, rel_l2=rel_l2)


@pytest.mark.parametrize("num_rows", SIZES)
def test_mix_matches_reference(num_rows, capfd):
    inputs = make(num_rows)
    jax.tree.map(check, run(cases.kernel_mix, *inputs), cases.reference_mix(*inputs))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("num_rows", SIZES)
def test_expanded_streams_match_reference_and_are_what_is_mixed(num_rows, capfd):
    out, streams, before, mixer = make(num_rows)
    new, *mixed = run(cases.kernel_both, out, streams, before, mixer)
    check(new, hyper.expand(out, streams, before))
    jax.tree.map(check, tuple(mixed), cases.reference_mix(out, new, before, mixer))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("num_rows", [1, 8])
def test_row_does_not_depend_on_other_rows(num_rows):
    """Tiles are of 8 rows in the one call and of 16 in the other."""
    inputs = make(16)
    whole = run(cases.kernel_both, *inputs)
    alone = run(cases.kernel_both, *cases.cut_rows(inputs, num_rows))
    jax.tree.map(lambda got, want: compare.assert_bitwise(got, want[:num_rows]), alone, whole)


def test_streams_of_both_forms_are_the_same():
    inputs = make(8)
    streams, mix, x = run(cases.kernel_both, *inputs)
    compare.assert_bitwise(run(cases.kernel_expand, *inputs), streams)
    _, _, before, mixer = inputs
    again = run(cases.kernel_mix, inputs[0], streams, before, mixer)
    jax.tree.map(compare.assert_bitwise, again, (mix, x))


@pytest.mark.parametrize("form", cases.FORMS)
def test_no_rows_give_nothing(form):
    reference, kernel, *_ = cases.FORMS[form]
    got, want = kernel(*make(0)), reference(*make(0))
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)


@pytest.mark.parametrize("iterations", [1, 20])
def test_large_logits_are_normalised_as_by_the_reference(iterations):
    logits = 8 * jax.random.normal(jax.random.key(iterations), (4, 4, 4), jnp.float32)
    want = hyper.sinkhorn(logits, iterations=iterations, eps=1e-6)
    lines = [[logits[:, i, j] for j in range(4)] for i in range(4)]
    got = jnp.asarray(mosaic._sinkhorn(lines, iterations, 1e-6)).transpose(2, 0, 1)
    compare.assert_close(got, want, rel_l2=COEFFICIENTS_REL_L2)


def test_other_shapes_and_types_are_refused():
    streams = jnp.zeros((2, 4, WIDTH), jnp.bfloat16)
    assert mosaic.refuses(streams, streams[:, 0]) is None
    assert mosaic.refuses(streams[:, :3]) == "there are 3 streams, not 4"
    assert mosaic.refuses(streams[..., :64]) == "streams of 64 channels are no multiple of 128"
    assert "float32" in str(mosaic.refuses(streams.astype(jnp.float32)))
