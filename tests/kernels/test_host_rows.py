"""Rows of tables: the kernel's plain form, what it refuses, and the choice between it and the host's own way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.host_rows import api, cases, mosaic
from deepinfer_jax.kernels.registry import explain

TABLE = np.random.default_rng(0).integers(0, 256, (50, 8), dtype=np.uint8)
NUMBERS = np.array([[3, -1], [49, 3], [0, -7]], np.int32)
WANT = np.where((NUMBERS >= 0)[..., None], TABLE[np.maximum(NUMBERS, 0)], 0)


def test_the_host_gives_rows_of_its_table():
    table = jax.device_put(TABLE, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    found = jax.jit(lambda table, numbers: api.take_rows(table, numbers, backend=Backend()))(table, NUMBERS)
    np.testing.assert_array_equal(found, WANT)
    assert found.sharding.memory_kind == "device"


@pytest.mark.parametrize("count", [0, 1, 6])
def test_the_plain_form_gives_rows_and_zeros(count):
    numbers = NUMBERS.reshape(-1)[:count]
    found = mosaic.take_rows(
        jnp.asarray(TABLE), jnp.asarray(numbers), interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    np.testing.assert_array_equal(found, WANT.reshape(-1, 8)[:count])


def test_cases_hold_negative_numbers():
    table, numbers = cases.make_inputs(jax.random.key(0), num_rows=8, width=8)
    assert (numbers < 0).any() and (numbers < cases.TABLE_ROWS).all()
    found = cases.reference(table, numbers)
    np.testing.assert_array_equal(found[numbers < 0], 0)


@pytest.mark.parametrize(
    "table, told",
    [
        (TABLE, "mosaic"),
        (TABLE[:, :6], "reference (mosaic refuses: rows of 6 bytes are not whole words)"),
        (TABLE.astype(np.int32), "reference (mosaic refuses: the table is int32 of 2 axes, not uint8 of two)"),
    ],
)
@pytest.mark.parametrize("name", ["mosaic_sm90", "mosaic_sm100"])
def test_what_the_kernel_refuses(table, told, name):
    backend = Backend(target="nvidia", kernels=name)
    found = explain(api.OP, api.IMPLS, backend, jnp.asarray(table), jnp.asarray(NUMBERS))
    assert found == told.replace("mosaic", name)
