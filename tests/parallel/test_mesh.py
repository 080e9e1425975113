"""The rules table decides where an array lies; what a mesh cannot hold is refused by name."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from deepinfer_jax.parallel.mesh import (
    CP,
    DP,
    RULES,
    make_mesh,
    merged_rules,
    padded_shape,
    shard_count,
    sharding_for,
)


@pytest.mark.parametrize("dp, cp", [(1, 1), (2, 2), (8, 1), (1, 8), (3, 2)])
def test_mesh_has_two_automatic_axes(dp, cp):
    mesh = make_mesh(dp, cp)
    assert dict(mesh.shape) == {DP: dp, CP: cp}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_mesh_takes_the_given_devices():
    devices = jax.devices()[4:6]
    assert set(make_mesh(2, 1, devices=devices).devices.flat) == set(devices)


@pytest.mark.parametrize("dp, cp, message", [(0, 1, "at least 1"), (3, 3, "needs 9 devices, 8")])
def test_impossible_mesh_is_refused(dp, cp, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(dp, cp)


@pytest.mark.parametrize(
    "axes, shape, spec",
    [
        (("layer", "expert", "inner", "hidden"), (3, 8, 4, 4), P(None, (DP, CP), None, None)),
        (("engram_row", "engram_width"), (16, 4), P((DP, CP), None)),
        (("layer", "slot", "ring", "latent"), (3, 4, 5, 6), P(None, (DP,), None, None)),
        (("source", "page", "entry", "latent"), (1, 6, 5, 6), P(None, (DP,), None, None)),
        (("token", "hidden"), (4, 3), P((CP,), None)),
        (("vocab", "hidden"), (5, 3), P(None, None)),
    ],
)
def test_sharding_follows_the_rules(axes, shape, spec):
    mesh = make_mesh(2, 4)
    sharding = sharding_for(mesh, axes, shape)
    assert sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), len(shape))
    pieces = [shard_count(axis, mesh) for axis in axes]
    array = jax.device_put(jnp.zeros(shape), sharding)
    want = tuple(size // n for size, n in zip(shape, pieces, strict=True))
    assert array.addressable_shards[0].data.shape == want


def test_abstract_mesh_gives_the_same_layout():
    mesh = AbstractMesh((2, 4), (DP, CP), axis_types=(AxisType.Auto, AxisType.Auto))
    assert sharding_for(mesh, ("expert",), (16,)).shard_shape((16,)) == (2,)


def test_caller_overrides_rules():
    mesh = make_mesh(2, 4)
    rules = {"expert": CP, "hidden": DP}
    assert sharding_for(mesh, ("expert", "hidden"), (8, 8), rules=rules).shard_shape((8, 8)) == (2, 4)
    assert shard_count("expert", mesh, rules) == 4
    assert merged_rules(rules)["slot"] == RULES["slot"]
    assert RULES["expert"] == (DP, CP)


@pytest.mark.parametrize("rows, want", [(307, 312), (312, 312), (1, 8)])
def test_engram_rows_and_experts_are_padded(rows, want):
    mesh = make_mesh(8, 1)
    assert padded_shape((rows, 3), ("engram_row", "engram_width"), mesh) == (want, 3)
    assert padded_shape((rows, 3), ("expert", "hidden"), mesh) == (want, 3)
    assert padded_shape((rows, 3), ("vocab", "hidden"), mesh) == (rows, 3)
    assert padded_shape((rows, 3), ("engram_row", "engram_width"), None) == (rows, 3)
    assert padded_shape((rows,), ("engram_row",), mesh, {"engram_row": None}) == (rows,)


@pytest.mark.parametrize(
    "axes, shape, rules, message",
    [
        (("expert",), (6,), None, r"w: axis 'expert' of size 6 .* 4 equal pieces .*'dp': 2"),
        (("expert", "hidden"), (8, 8), {"hidden": CP}, "w: two of its axes"),
        (("latent", "latent"), (8, 8), {"latent": DP}, "w: two of its axes"),
        (("expert",), (8, 8), None, "w has shape .* but 1 axis names"),
        (("experts",), (8,), None, "logical axis 'experts' has no rule"),
        (("expert",), (8,), {"expret": DP}, "unknown logical axes .'expret'."),
        (("expert",), (8,), {"expert": "tp"}, "names mesh axes .'tp'."),
    ],
    ids=["divide", "claimed", "repeated", "rank", "axis", "rule", "mesh-axis"],
)
def test_impossible_sharding_is_refused(axes, shape, rules, message):
    with pytest.raises(ValueError, match=message):
        sharding_for(make_mesh(2, 2), axes, shape, rules=rules, name="w")
