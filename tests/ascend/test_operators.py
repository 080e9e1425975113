"""A5: each operator against the reference of `ops/`, staged and resident."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import ffi
from deepinfer_jax.kernels.attention import cann as attention
from deepinfer_jax.kernels.experts import cann as experts
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.kernels.rope import cann as rope
from deepinfer_jax.kernels.swiglu import cann as swiglu
from deepinfer_jax.ops import quant
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.ascend_cases import CASES, Case, run_resident, run_staged


@pytest.fixture
def rng(seed_from_name: int) -> np.random.Generator:
    return np.random.default_rng(seed_from_name)


def compared(got: Any, want: Any, rel_l2: float | None) -> None:
    if rel_l2 is None:
        compare.assert_bitwise(np.asarray(got), np.asarray(want))
    else:
        compare.assert_close(np.asarray(got), np.asarray(want), rel_l2=rel_l2)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_arrays_give_the_reference(bridge, rng, case: Case):
    arrays = case.make(rng)
    compared(run_staged(case.call, arrays), case.reference(*arrays), case.rel_l2)
    assert bridge.usage() == (0, 0)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_device_arrays_give_the_bits_of_arrays(bridge, rng, case: Case):
    arrays = case.make(rng)
    got = run_resident(bridge, case.call, arrays)
    compare.assert_bitwise(np.asarray(got), np.asarray(run_staged(case.call, arrays)))
    assert bridge.usage() == (0, 0)


def test_every_target_with_an_operator_has_a_case(native):
    targets = {entry["name"] for entry in ffi.target_table(ffi.load_bridge()) if entry["operators"]}
    assert targets == {case.target for case in CASES}


def test_swiglu_quantises_what_it_shows(bridge, rng):
    gate_up = jnp.asarray(rng.standard_normal((3, 1024), np.float32), jnp.bfloat16)
    codes, scale, value = swiglu.swiglu(gate_up, jnp.ones(3), limit=10.0)
    compare.assert_bitwise(linear.unpack_rows(codes, scale), quant.quantize_fp8(value))


def test_channels_in_front_of_the_rotated_ones_stay(bridge, rng):
    x = jnp.asarray(rng.standard_normal((2, 1, 24), np.float32), jnp.bfloat16)
    made = rope.rotate(x, jnp.zeros((2, 16)), jnp.ones((2, 16)))
    compare.assert_bitwise(made[..., :8], x[..., :8])


def test_a_row_without_keys_gives_zeros(bridge, rng):
    keys = jnp.asarray(rng.standard_normal((1, 3, 512), np.float32), jnp.bfloat16)
    made = attention.attend(keys[:, :2], keys, jnp.zeros(1, jnp.int32), jnp.zeros(2))
    compare.assert_bitwise(made, jnp.zeros((1, 2, 512), jnp.bfloat16))


def test_weights_of_another_form_are_refused():
    w = quant.ScaledArray(payload=jnp.zeros((32, 32), jnp.uint8), scale=jnp.zeros((1, 1), jnp.uint8), block=(32, 32))
    with pytest.raises(ValueError, match="K=32 is not a multiple of 64"):
        linear.pack_weight(w)
    with pytest.raises(ValueError, match="form fp8 in blocks of .*; CANN takes fp4"):
        experts.pack_experts(w)
    small = quant.ScaledArray(
        payload=jnp.zeros((1, 8, 32), jnp.uint8), scale=jnp.zeros((1, 8, 2), jnp.uint8), form="fp4", block=(1, 32)
    )
    with pytest.raises(ValueError, match="N=8 and K=64 must be multiples of 16 and 64"):
        experts.pack_experts(small)
    with pytest.raises(ValueError, match="form fp4 in blocks of .*; CANN takes fp8"):
        linear.pack_weight(small)
