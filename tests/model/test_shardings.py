"""Parameters and state lie on the mesh as the rules table says."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config.released import load_config
from deepinfer_jax.model.params import abstract_params, leaf_at, schema
from deepinfer_jax.model.shardings import _STATE_AXES, param_shardings, placed_params, state_shardings
from deepinfer_jax.model.state import DraftState, State
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.parallel.mesh import CP, DP, make_mesh

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs" / "model" / "deepseek-v4.1-flash.json"


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "tests" / "data" / "tiny_a")


def test_experts_and_engram_rows_span_the_mesh(config):
    shardings = param_shardings(config, make_mesh(2, 4))
    assert shardings.moe.experts.w2.scale.spec == P(None, (DP, CP), None, None)
    assert shardings.engram.embed[1].payload.spec == P((DP, CP), None)
    replicated = [s for s in schema(config) if not {"expert", "engram_row"} & set(s.axes)]
    for spec in replicated:
        for sharding in jax.tree.leaves(leaf_at(shardings, spec.path)):
            assert sharding.is_fully_replicated, spec.path


def test_without_a_mesh_all_is_on_one_device(config):
    shardings = jax.tree.leaves(param_shardings(config, None))
    assert set(shardings) == {SingleDeviceSharding(jax.devices()[0])}
    assert jax.tree.structure(param_shardings(config, None)) == jax.tree.structure(abstract_params(config))


def test_released_shape_on_a_mesh_description_needs_an_eighth_of_what_is_sharded():
    config = load_config(FLASH)
    mesh = AbstractMesh((8, 1), (DP, CP), axis_types=(AxisType.Auto, AxisType.Auto))
    device_bytes = 0
    for leaf in jax.tree.leaves(placed_params(config, mesh)):
        shard = leaf.sharding.shard_shape(leaf.shape)
        device_bytes += math.prod(shard) * leaf.dtype.itemsize
    sharded = [s for s in schema(config) if {"expert", "engram_row"} & set(s.axes)]
    sharded_bytes = sum(s.num_bytes for s in sharded)
    rest_bytes = sum(s.num_bytes for s in schema(config)) - sharded_bytes
    # Each table may grow by up to 7 rows of 264 bytes.
    assert abs(device_bytes - (sharded_bytes / 8 + rest_bytes)) <= 2 * 264


def small_state(num_slots, num_pages):
    """A state of the right ranks; its widths do not matter here."""

    def rows(*lead):
        return ScaledArray(payload=jnp.zeros((*lead, 4), jnp.uint8), scale=jnp.ones((*lead, 1), jnp.uint8))

    pages = rows(2, num_pages, 3)
    state = object.__new__(State)
    state.__dict__.update(
        window=rows(2, num_slots, 5),
        main_kv=(pages, pages),
        index_k=(pages, pages),
        tails=jnp.zeros((2, num_slots, 3, 4)),
        history=jnp.zeros((num_slots, 3), jnp.int32),
        draft=DraftState(window=rows(2, num_slots, 5)),
    )
    return state


def test_every_field_of_the_state_has_axes(config):
    assert jax.tree.structure(state_shardings(small_state(4, 6), make_mesh(2, 4))) == (
        jax.tree.structure(small_state(4, 6))
    )
    assert set(_STATE_AXES) == {f.name for f in dataclasses.fields(State)}


def test_slots_and_pages_lie_along_dp():
    state = small_state(4, 6)
    shardings = state_shardings(state, make_mesh(2, 4))
    assert shardings.window.payload.spec == P(None, (DP,), None, None)
    assert shardings.main_kv[1].scale.spec == P(None, (DP,), None, None)
    assert shardings.tails.spec == P(None, (DP,), None, None)
    assert shardings.history.spec == P((DP,), None)
    assert shardings.draft.window.scale.spec == P(None, (DP,), None, None)
    placed = jax.device_put(state, shardings)
    assert placed.index_k[0].payload.addressable_shards[0].data.shape[1] == 3
    single = jax.tree.leaves(state_shardings(state, None))
    assert set(single) == {SingleDeviceSharding(jax.devices()[0])}


def test_slots_that_dp_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="state.window.payload: axis 'slot' of size 3"):
        state_shardings(small_state(3, 6), make_mesh(2, 1))
