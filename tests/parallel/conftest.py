"""Running a function on every device of a small mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.mesh import CP, DP, make_mesh
from tests.conftest import ROOT

DEVICES = P((DP, CP))


@functools.cache
def config_of(dp: int, cp: int, **options: Any) -> RuntimeConfig:
    """The static configuration of a small model on this mesh."""
    return RuntimeConfig(model=load_config(ROOT / "tests" / "data" / "tiny_a"), dp=dp, cp=cp, **options)


@pytest.fixture
def on_devices() -> Callable[..., Any]:
    """Runs `body` on each device of dp x cp; arrays have a leading axis of devices, which the body does not see."""

    def run(body: Callable[..., Any], dp: int, cp: int, *arrays: Any) -> Any:
        def one(*parts: Any) -> Any:
            made = body(*jax.tree.map(lambda leaf: leaf[0], parts))
            return jax.tree.map(lambda leaf: leaf[None], made)

        mapped = jax.shard_map(
            one, mesh=make_mesh(dp, cp), in_specs=(DEVICES,) * len(arrays), out_specs=DEVICES, check_vma=False
        )
        return jax.jit(mapped)(*arrays)

    return run
