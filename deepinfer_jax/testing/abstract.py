"""The full-size step without its arrays: traced and lowered from shapes and a mesh description."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.shardings import placed_params, state_shardings
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.parallel.mesh import AnyMesh

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
_PLATFORMS = {"cpu": "cpu", "nvidia": "cuda"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of the state and of one batch."""

    num_slots: int
    num_pages: int
    pages_per_slot: int  # width of the page table
    num_rows: int
    num_logit_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractStep:
    """A lowered step. bytes_by_pieces: number of pieces -> bytes of all arguments cut into that many, whole."""

    lowered: jax.stages.Lowered
    device_bytes: int  # arguments of one device
    bytes_by_pieces: dict[int, int]


def lower_abstract(
    config: RuntimeConfig, mesh: AnyMesh | None, sizes: StepSizes, *, platform: str | None = None
) -> AbstractStep:
    """`forward` lowered from shapes; nothing is allocated, and no device of the target or mesh is needed.

    Parameters and state lie as the rules table says (decode layout), the batch is replicated, the state is donated.
    mesh None: one attached device. platform: JAX's name of what to lower for, that of `config.target` if None.
    """
    arguments = abstract_arguments(config, mesh, sizes)
    step = jax.jit(functools.partial(forward, config=config), donate_argnums=(1,), compiler_options=COMPILER_OPTIONS)
    lowered = step.trace(*arguments).lower(lowering_platforms=(platform or _PLATFORMS[config.target],))
    device_bytes, by_pieces = 0, dict[int, int]()
    for leaf in jax.tree.leaves(arguments):
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        device_bytes += shard
        by_pieces[whole // shard] = by_pieces.get(whole // shard, 0) + whole
    return AbstractStep(lowered=lowered, device_bytes=device_bytes, bytes_by_pieces=by_pieces)


def abstract_arguments(
    config: RuntimeConfig, mesh: AnyMesh | None, sizes: StepSizes
) -> tuple[Params, State, StepBatch]:
    """Shape structs with shardings in place of the arguments of `forward`."""

    def place(array: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    state = jax.eval_shape(functools.partial(init_state, config, num_slots=sizes.num_slots, num_pages=sizes.num_pages))
    state = jax.tree.map(place, state, state_shardings(state, mesh))
    if mesh is None:
        everywhere = SingleDeviceSharding(jax.local_devices()[0])
    else:
        everywhere = NamedSharding(mesh, PartitionSpec())
    batch = jax.eval_shape(functools.partial(_blank_batch, sizes))
    batch = jax.tree.map(lambda array: place(array, everywhere), batch)
    return placed_params(config.model, mesh), state, batch


def _blank_batch(sizes: StepSizes) -> StepBatch:
    rows = jnp.zeros(sizes.num_rows, jnp.int32)
    return StepBatch(
        tokens=rows,
        positions=rows,
        slots=rows,
        page_table=jnp.zeros((sizes.num_slots, sizes.pages_per_slot), jnp.int32),
        logit_rows=jnp.zeros(sizes.num_logit_rows, jnp.int32),
    )
