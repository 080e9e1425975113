"""What `deepinfer-jax describe` says of a step on a mesh, and the counting that it rests on."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from deepinfer_jax import cli
from deepinfer_jax.config.released import load_config
from deepinfer_jax.testing import hlo
from deepinfer_jax.testing.aot import collective_bytes

TRIPS = 5


@pytest.fixture(scope="module")
def looped_text() -> str:
    """One sum of 6 x 4 floats over two devices in front of a loop, and one of 4 x 4 in each of its trips."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def body(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        def trip(_: jax.Array, carry: jax.Array) -> jax.Array:
            return jnp.tanh(lax.psum(carry, "x")) @ carry

        return lax.psum(a, "x"), lax.fori_loop(0, TRIPS, trip, b)

    spec = PartitionSpec("x")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    text = run.lower(jnp.ones((12, 4)), jnp.ones((8, 4))).compile().as_text()
    assert text is not None
    return text


def test_what_is_in_a_loop_counts_once_for_each_trip(looped_text: str):
    assert hlo.collectives(looped_text) == {"all-reduce": 2}
    assert collective_bytes(looped_text) == {
        "all-reduce": {"count": 1 + TRIPS, "bytes": 4 * (6 * 4 + TRIPS * 4 * 4)},
    }


def test_a_step_is_described_with_what_travels(tiny_model, capsys):
    arguments = ["describe", str(tiny_model), "--mesh", "2x1", "--json"]
    assert cli.main([*arguments, "--step", "decode"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert (step["dp"], step["cp"], step["num_rows"], step["target"]) == (2, 1, 128, "cpu")
    assert set(step["collectives"]) == {"all-to-all"}
    config, found = load_config(tiny_model), step["collectives"]["all-to-all"]
    assert found["count"] >= 2 * config.num_hidden_layers  # there and back
    # Room for every pair from each of two devices, in bfloat16.
    returned = 2 * 128 * config.num_experts_per_tok * config.hidden_size * 2 * config.num_hidden_layers
    assert found["bytes"] > returned
    assert step["donated_bytes"] < step["argument_bytes"]
    assert math.isclose(step["device_bytes"], step["argument_bytes"] + step["temporary_bytes"])


def test_a_step_needs_a_mesh(tiny_model, capsys):
    assert cli.main(["describe", str(tiny_model), "--step", "decode"]) == cli.EXIT_REFUSED
    assert "give --mesh DPxCP" in capsys.readouterr().err
