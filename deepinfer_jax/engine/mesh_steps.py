"""The compiled steps on a mesh: each device runs the step of `engine/steps.py` on its rank's part, in one `shard_map`.

What every rank has of its own gets a leading rank axis: packed arrays, copies, masks, results. State and newest tokens
are cut along their slots and pages. Every collective is in `parallel/`; here, where a step is run by several processes,
what the host reads is gathered over dp.
"""

import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import steps
from deepinfer_jax.engine.steps import Carried, step_function
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.shardings import STATE_SPECS, spread, step_specs
from deepinfer_jax.model.state import State
from deepinfer_jax.parallel import replicas
from deepinfer_jax.parallel.mesh import CP, DP

_RANKS = P(DP)
_DEVICES = P((DP, CP))
_CARRIED = unchecked(Carried, {"state": STATE_SPECS, "newest": _RANKS})
_COUNTED = P()
_STATIC = ("shape", "config", "settings", "speculation")


class MeshSteps:
    """The functions of `engine/steps.py` that an engine runs, for one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.shape[DP]

    def place(self, by_rank: Any) -> Any:
        """Host arrays of each rank, on the devices of that rank."""
        sharding = NamedSharding(self.mesh, _RANKS)
        return jax.tree.map(lambda *parts: _place(np.stack(parts), sharding), *by_rank)

    def blank(self, make: Any) -> Carried:
        """What `make()` makes for all ranks together, each device making its own part only."""
        specs = spread(_CARRIED, jax.eval_shape(make))
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        return jax.jit(make, out_shardings=shardings)()

    def shared(self, make: Any) -> Any:
        """The array that `make()` makes, whole on every device."""
        return jax.jit(make, out_shardings=NamedSharding(self.mesh, P()))()

    def run_step(self, params: Any, carried: Any, packed: Any, images: Any = None, **static: Any) -> Any:
        """See `steps.run_step`."""
        return _run_step(params, carried, packed, images, mesh=self.mesh, **static)

    def compile_step(self, params: Any, carried: Any, packed: Any, images: Any = None, **static: Any) -> None:
        """Leaves what `run_step` needs in JAX's cache of compiled programs, and runs nothing."""
        _run_step.lower(params, carried, packed, images, mesh=self.mesh, **static).compile()

    def run_forward(self, params: Any, carried: Any, packed: Any, images: Any = None, **static: Any) -> Any:
        """See `steps.run_forward`; features have a leading axis of devices."""
        return _run_forward(params, carried, packed, images, mesh=self.mesh, **static)

    def run_sampling(
        self, params: Any, carried: Any, logits: Any, features: Any, packed: Any, masks: Any, **static: Any
    ) -> Any:
        """See `steps.run_sampling`."""
        return _run_sampling(params, carried, logits, features, packed, masks, mesh=self.mesh, **static)

    def copy_states(self, carried: Carried, copies: Int32[Array, "dp C F"]) -> Carried:
        """See `steps.copy_states`."""
        return _copy_states(carried, copies, mesh=self.mesh)

    def move_experts(self, params: Params, layer: int, sources: Any, *, config: RuntimeConfig) -> Params:
        """The parameters with experts of one layer in new places (`parallel/replicas.py`); their table is as it was."""
        moved = _move_experts(params.moe.experts, np.int32(layer), sources, config=config, mesh=self.mesh)
        return dataclasses.replace(params, moe=dataclasses.replace(params.moe, experts=moved))

    def with_table(self, params: Params, table: Int32[np.ndarray, "N E K"]) -> Params:
        """The parameters with another replica table, on every device."""
        placed = _place(table, NamedSharding(self.mesh, P()))
        return dataclasses.replace(params, moe=dataclasses.replace(params.moe, replicas=placed))

    def best_tokens(self, logprobs: Any, *, count: int) -> Any:
        """See `steps.best_tokens`."""
        return _best_tokens(logprobs, count=count, mesh=self.mesh)

    def by_rank(self, told: Any) -> Any:
        """Results that were fetched to the host, with a leading axis of ranks: they have it."""
        return told

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where arrays that a step takes are made: anywhere, `place` says where they belong."""
        return contextlib.nullcontext()

    def read_request(self, state: State, slot: int, pages: Any, rank: int) -> State:
        """See `steps.read_request`; on the host. Waits for all launched steps."""
        found = _read_request(state, np.int32(slot), pages, mesh=self.mesh)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rank], found)

    def write_request(self, carried: Carried, request: State, slot: int, pages: Any, rank: int) -> Carried:
        """See `steps.write_request`."""
        return _write_request(carried, request, np.int32(slot), pages, np.int32(rank), mesh=self.mesh)


def num_compiled() -> int:
    """How many versions of these step functions this process has compiled so far."""
    functions: tuple[Any, ...] = (_copy_states, _best_tokens, _move_experts)
    configured = (_run_step, _run_forward, _run_sampling)
    return sum(f.num_compiled() for f in configured) + sum(f._cache_size() for f in functions)


@step_function(static_argnames=(*_STATIC, "mesh"), donate_argnames=("carried",))
def _run_step(params: Any, carried: Any, packed: Any, images: Any, *, mesh: Mesh, **static: Any) -> Any:
    def body(params: Any, carried: Any, packed: Any, images: Any) -> Any:
        result, computed, carried = _plain(steps.run_step)(params, carried, packed[0], images, **static)
        return _told(result), _counted(computed), carried

    inputs = (step_specs(params, static["config"]), _CARRIED, _RANKS, P())
    return _on(mesh, body, inputs, (_result_specs(), _COUNTED, _CARRIED))(params, carried, packed, images)


@step_function(static_argnames=("shape", "config", "speculation", "mesh"), donate_argnames=("carried",))
def _run_forward(params: Any, carried: Any, packed: Any, images: Any, *, mesh: Mesh, **static: Any) -> Any:
    def body(params: Any, carried: Any, packed: Any, images: Any) -> Any:
        logits, features, computed, carried = _plain(steps.run_forward)(params, carried, packed[0], images, **static)
        return logits[None], _lead(features), _counted(computed), carried

    inputs = (step_specs(params, static["config"]), _CARRIED, _RANKS, P())
    outputs = (_RANKS, _DEVICES, _COUNTED, _CARRIED)
    return _on(mesh, body, inputs, outputs)(params, carried, packed, images)


@step_function(static_argnames=(*_STATIC, "mesh"), donate_argnames=("carried",))
def _run_sampling(
    params: Any, carried: Any, logits: Any, features: Any, packed: Any, masks: Any, *, mesh: Mesh, **static: Any
) -> Any:
    def body(params: Any, carried: Any, logits: Any, features: Any, packed: Any, masks: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], (logits, features, packed, masks))
        result, carried = _plain(steps.run_sampling)(params, carried, *own, **static)
        return _told(result), carried

    inputs = (step_specs(params, static["config"]), _CARRIED, _RANKS, _DEVICES, _RANKS, _RANKS)
    outputs = (_result_specs(), _CARRIED)
    return _on(mesh, body, inputs, outputs)(params, carried, logits, features, packed, masks)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("carried",))
def _copy_states(carried: Any, copies: Any, *, mesh: Mesh) -> Any:
    def body(carried: Any, copies: Any) -> Any:
        return _plain(steps.copy_states)(carried, copies[0])

    return _on(mesh, body, (_CARRIED, _RANKS), _CARRIED)(carried, copies)


@functools.partial(jax.jit, static_argnames=("count", "mesh"))
def _best_tokens(logprobs: Any, *, count: int, mesh: Mesh) -> Any:
    def body(logprobs: Any) -> Any:
        best = _plain(steps.best_tokens)(logprobs[0], count=count)
        return jax.tree.map(_shared, _lead(best))

    return _on(mesh, body, (_RANKS,), _shared_spec())(logprobs)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _read_request(state: Any, slot: Any, pages: Any, *, mesh: Mesh) -> Any:
    """Of every rank, what this slot and these pages of its own hold."""

    def body(state: Any, slot: Any, pages: Any) -> Any:
        return jax.tree.map(_shared, _lead(_plain(steps.read_request)(state, slot, pages)))

    return _on(mesh, body, (_CARRIED.state, P(), P()), _shared_spec())(state, slot, pages)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("carried",))
def _write_request(carried: Any, request: Any, slot: Any, pages: Any, rank: Any, *, mesh: Mesh) -> Any:
    def body(carried: Any, request: Any, slot: Any, pages: Any, rank: Any) -> Any:
        is_own = lax.axis_index(DP) == rank
        own = jnp.where(is_own, slot, -1), jnp.where(is_own, pages, -1)
        return _plain(steps.write_request)(carried, request, *own)

    return _on(mesh, body, (_CARRIED, P(), P(), P(), P()), _CARRIED)(carried, request, slot, pages, rank)


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("experts",))
def _move_experts(experts: Any, layer: Any, sources: Any, *, config: RuntimeConfig, mesh: Mesh) -> Any:
    spec = P(None, config.expert_axes)
    body = functools.partial(replicas.move_layer, config=config)
    return _on(mesh, body, (spec, P(), P()), spec)(experts, layer, sources)


def _on(mesh: Mesh, body: Any, inputs: Any, outputs: Any) -> Any:
    # What lies on all devices of a rank is computed by all of them alike; the checker cannot know that.
    return jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _plain(function: Any) -> Any:
    """A step function without its own `jax.jit`."""
    return inspect.unwrap(function)


def _lead(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _told(result: steps.StepResult) -> steps.StepResult:
    """What a rank's step gives, the small part of it where every process can read it."""
    led = _lead(result)
    told = {"drawn": _shared(led.drawn), "chunks": _shared(led.chunks), "logprobs": led.logprobs}
    return unchecked(steps.StepResult, told)


def _counted(computed: steps.Computed) -> steps.Computed:
    """The counts of all devices together: rows of a rank are computed by its cp devices, but counted once."""
    rows = lax.psum(computed.rows, DP)
    return steps.Computed(rows=rows, loads=None if computed.loads is None else lax.psum(computed.loads, (DP, CP)))


def _shared(by_rank: Array) -> Array:
    return lax.all_gather(by_rank, DP, tiled=True) if _is_shared() else by_rank


def _shared_spec() -> P:
    return P() if _is_shared() else _RANKS


def _result_specs() -> Any:
    return unchecked(steps.StepResult, {"drawn": _shared_spec(), "chunks": _shared_spec(), "logprobs": _RANKS})


def _is_shared() -> bool:
    """Whether one process cannot read the results of all ranks."""
    return jax.process_count() > 1


def _place(whole: np.ndarray, sharding: NamedSharding) -> Array:
    if not _is_shared():
        return jax.device_put(whole, sharding)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
