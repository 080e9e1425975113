"""A step updates its donated state in place and unpacks no more than it needs: read from the compiled program."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import layer as layer_module
from deepinfer_jax.model.params import abstract_params, layer_slice, schema
from deepinfer_jax.model.state import init_state
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.parallel.mesh import DP, make_mesh
from deepinfer_jax.testing import hlo
from deepinfer_jax.testing.abstract import StepSizes, lower_abstract

TINY_A = Path(__file__).parents[1] / "data" / "tiny_a"
# Slots and pages in numbers that no other axis of the model has.
SIZES = StepSizes(num_slots=5, num_pages=23, pages_per_slot=4, num_rows=8, num_logit_rows=5)


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    """A window layer and three sources, two of them in one cache; so many experts that a copy of them would show."""
    return dataclasses.replace(
        load_config(TINY_A),
        num_hidden_layers=4,
        compress_ratios=(0, 2, 2, 1),
        kv_source_layer_ids=(1, 2, 3),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=3,
        engram_layer_ids=(0,),
        engram_num_embeddings=(304,),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(3,),
        n_routed_experts=256,
    )


def compiled_step(config: RuntimeConfig) -> jax.stages.Compiled:
    return lower_abstract(config, None, SIZES, platform="cpu").lowered.compile()


def state_of(config: RuntimeConfig):
    make = functools.partial(init_state, config, num_slots=SIZES.num_slots, num_pages=SIZES.num_pages)
    return jax.eval_shape(make)


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("nvidia", marks=pytest.mark.slow)], ids=["looped", "unrolled"]
)
def step(request, model) -> tuple[RuntimeConfig, jax.stages.Compiled]:
    config = RuntimeConfig(model=model, target=request.param)
    return config, compiled_step(config)


def dequantised_stack_bytes(config: RuntimeConfig) -> int:
    """Bytes of one layer's routed experts as activations are held."""
    stacks = [spec for spec in schema(config.model) if "expert" in spec.axes]
    return sum(math.prod(spec.shape[1:]) for spec in stacks) * config.activation_dtype.itemsize


def test_donated_state_is_updated_in_place(step):
    config, compiled = step
    state = state_of(config)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert [i.text for i in hlo.whole_copies(compiled.as_text(), shapes)] == []
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes(state)


def test_step_holds_no_dequantised_expert_stack(step):
    config, compiled = step
    assert compiled.memory_analysis().temp_size_in_bytes < dequantised_stack_bytes(config)
    whole = {leaf.shape for leaf in jax.tree.leaves(abstract_params(config.model).moe.experts)}
    assert [i.text for i in hlo.whole_copies(compiled.as_text(), whole)] == []


def test_dequantising_a_whole_stack_would_be_seen(model, monkeypatch):
    right = layer_module.run_experts

    def dense_experts(experts, routed, is_live, *, layer, config):
        own = layer_slice(experts, layer)
        packed = lambda node: isinstance(node, ScaledArray)  # noqa: E731
        dense = jax.tree.map(lambda w: dequantize(w, config.activation_dtype)[None], own, is_leaf=packed)
        return right(dense, routed, is_live, layer=0, config=config)

    monkeypatch.setattr(layer_module, "run_experts", dense_experts)
    config = RuntimeConfig(model=model)
    temporary = compiled_step(config).memory_analysis().temp_size_in_bytes
    assert temporary > dequantised_stack_bytes(config)


@pytest.mark.parametrize("fault", ["kept for a read", "not donated"])
def test_copy_of_a_cache_would_be_seen(fault):
    def write(cache, rows, at):
        written = cache.at[at].set(rows)
        return (written, cache[at] * 2) if fault == "kept for a read" else (written, rows)

    donated = (0,) if fault == "kept for a read" else ()
    cache, rows, at = jnp.zeros((23, 7, 5)), jnp.ones((3, 7, 5)), jnp.array([1, 5, 9])
    compiled = jax.jit(write, donate_argnums=donated).lower(cache, rows, at).compile()
    assert hlo.whole_copies(compiled.as_text(), {cache.shape})


def test_collectives_of_a_sharded_program_are_counted():
    mesh = make_mesh(4, 2)
    sharding = NamedSharding(mesh, PartitionSpec(DP))
    body = jax.shard_map(lambda x: lax.psum(x, DP), mesh=mesh, in_specs=PartitionSpec(DP), out_specs=PartitionSpec())
    text = jax.jit(body).lower(jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)).compile().as_text()
    assert hlo.collectives(text) == {"all-reduce": 1}
    alone = jax.jit(jnp.sin).lower(jnp.zeros(3)).compile().as_text()
    assert hlo.collectives(alone) == {}
