"""Engram tables in the memory of the host: the same bits, and nothing of a table on the device."""

import jax
import numpy as np
import pytest

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.snapshot import fingerprint
from deepinfer_jax.testing import tiny
from tests.engine import driving

ON_HOST = {"DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": "0"}
EAGER = {"DEEPINFER_ENFORCE_EAGER": "1"}


def run(engine: LLMEngine) -> dict[str, driving.Facts]:
    driving.add_many(engine, lengths=(37, 70, 9))
    return driving.facts(driving.drain(engine))


def kinds(engine: LLMEngine) -> set[str]:
    return {str(leaf.sharding.memory_kind) for leaf in jax.tree.leaves(engine.params.engram.embed)}


@pytest.mark.slow
def test_tables_on_the_host_give_the_same(tiny_model):
    host, device = (tiny.tiny_engine(tiny_model, {**EAGER, **where}) for where in (ON_HOST, {}))
    assert kinds(host) == {"pinned_host"}
    assert kinds(device) == {"device"}, "a CPU has no reason to tell the two apart"
    assert run(host) == run(device)
    assert fingerprint(host.params, host.runtime) == fingerprint(device.params, device.runtime)


@pytest.mark.slow
def test_random_tables_go_to_the_host_too(tiny_model):
    engine = tiny.tiny_engine(tiny_model, {**EAGER, **ON_HOST}, load_format="dummy")
    assert kinds(engine) == {"pinned_host"}
    assert all(token >= 0 and np.isfinite(logprob) for facts in run(engine).values() for token, logprob in facts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_tables_on_the_hosts_of_a_mesh_give_the_same(tiny_model, mesh):
    engine = tiny.tiny_engine(tiny_model, {**EAGER, **ON_HOST}, mesh_shape=mesh)
    leaves = jax.tree.leaves(engine.params.engram.embed)
    assert kinds(engine) == {"pinned_host"}
    for leaf in leaves:
        assert {shard.data.shape[0] * mesh[0] * mesh[1] for shard in leaf.addressable_shards} == {leaf.shape[0]}
    alone = tiny.tiny_engine(tiny_model, EAGER)
    assert run(engine) == run(alone)
    assert fingerprint(engine.params, engine.runtime) == fingerprint(alone.params, alone.runtime)
