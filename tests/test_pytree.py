"""Frozen dataclasses as trees: keyed leaves, static fields, and placeholders in annotated places."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from deepinfer_jax.model.state import State
from deepinfer_jax.ops.hyper import Mix
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass, static_field
from deepinfer_jax.testing import compare


@pytree_dataclass
class Ring:
    """A ring as the style guide has it."""

    kv: Any
    end: Any
    window: int = static_field()
    name: str = static_field(default="ring")

    @property
    def num_slots(self) -> int:
        return self.kv.shape[0]


@pytree_dataclass
class Outer:
    """A tree with a tree inside."""

    ring: Ring
    pair: tuple[Any, Any]
    nothing: Any = None


def ring(window: int = 8) -> Ring:
    return Ring(kv=jnp.ones((2, 3)), end=jnp.zeros(2, jnp.int32), window=window)


def test_fields_are_keyword_only_and_frozen():
    with pytest.raises(TypeError, match="positional"):
        Ring(jnp.ones(1), jnp.ones(1), 8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ring().end = jnp.ones(2)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="window"):
        Ring(kv=1, end=2)  # pyright: ignore[reportCallIssue]


def test_replace_and_properties_work_as_on_any_dataclass():
    changed = dataclasses.replace(ring(), window=4)
    assert (changed.window, changed.name, changed.num_slots) == (4, "ring", 2)


def test_leaves_come_in_field_order_with_their_names():
    tree = Outer(ring=ring(), pair=(jnp.int32(1), jnp.int32(2)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == [".ring.kv", ".ring.end", ".pair[0]", ".pair[1]"]
    assert len(jax.tree.leaves(ring())) == 2


def test_round_trip_keeps_everything():
    leaves, structure = jax.tree.flatten(ring(window=5))
    made = jax.tree.unflatten(structure, leaves)
    assert type(made) is Ring and made.window == 5 and made.name == "ring"
    compare.assert_bitwise(made, ring(window=5))


def test_static_fields_belong_to_the_structure():
    assert jax.tree.structure(ring(8)) == jax.tree.structure(ring(8))
    assert hash(jax.tree.structure(ring(8))) == hash(jax.tree.structure(ring(8)))
    assert jax.tree.structure(ring(8)) != jax.tree.structure(ring(4))
    with pytest.raises(ValueError, match="different pytree metadata"):
        jax.tree.map(lambda a, b: a, ring(8), ring(4))


def test_jit_traces_again_for_another_static_value_only():
    traced: list[int] = []

    @jax.jit
    def position(r: Ring) -> jax.Array:
        traced.append(r.window)
        return r.end % r.window

    for window in (8, 8, 4, 8):
        position(ring(window))
    assert traced == [8, 4]


def test_trees_pass_through_transformations():
    stacked = jax.tree.map(lambda *a: jnp.stack(a), ring(), ring())
    assert stacked.kv.shape == (2, 2, 3) and stacked.window == 8
    doubled = jax.vmap(lambda r: dataclasses.replace(r, kv=r.kv * 2))(stacked)
    compare.assert_bitwise(doubled.kv, np.full((2, 2, 3), 2, np.float32))
    carried, _ = jax.lax.scan(lambda r, _: (dataclasses.replace(r, end=r.end + 1), None), ring(), length=3)
    compare.assert_bitwise(carried.end, np.full(2, 3, np.int32))
    gradient = jax.grad(lambda r: r.kv.sum(), allow_int=True)(ring())
    assert isinstance(gradient, Ring) and gradient.window == 8


@pytest.mark.parametrize("placeholder", [None, True, "spec", jax.ShapeDtypeStruct((1,), jnp.float32), object()])
def test_unflattening_takes_placeholders_where_arrays_are_annotated(placeholder: Any):
    """The annotated classes of the product are checked on construction, and not when JAX rebuilds them."""
    packed = ScaledArray(payload=jnp.zeros((1, 4), jnp.uint8), scale=jnp.zeros((1, 1), jnp.uint8), block=(1, 4))
    structure = jax.tree.structure(packed)
    made = jax.tree.unflatten(structure, [placeholder] * structure.num_leaves)
    assert type(made) is ScaledArray
    assert (made.payload, made.scale, made.block) == (placeholder, placeholder, (1, 4))


def test_construction_checks_annotations():
    with pytest.raises((TypeCheckError, TypeError)):
        ScaledArray(payload="bytes", scale=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeCheckError):  # one T for all fields of an instance
        Mix(pre=jnp.ones((2, 4)), post=jnp.ones((3, 4)), comb=jnp.ones((2, 4, 4)))


def test_shapes_and_specs_map_over_an_annotated_tree():
    def make() -> State:
        packed = ScaledArray(payload=jnp.zeros((1, 1, 1, 4)), scale=None)
        return State(
            window=packed,
            main_kv=(packed, packed),
            index_k=(packed, packed),
            tails=jnp.zeros((1, 1, 1, 2)),
            history=jnp.zeros((1, 1), jnp.int32),
        )

    shapes = jax.eval_shape(make)
    assert shapes.tails == jax.ShapeDtypeStruct((1, 1, 1, 2), jnp.float32)
    specs = jax.tree.map(lambda _: jax.P("dp"), shapes)
    assert specs.history == jax.P("dp") and specs.window.payload == jax.P("dp")
    assert jax.tree.structure(jax.tree.map(lambda _: 0, shapes)) == jax.tree.structure(make())


def test_wrong_number_of_leaves_is_an_error():
    structure = jax.tree.structure(ring())
    with pytest.raises(ValueError):
        jax.tree.unflatten(structure, [1])


@pytree_dataclass
class WithoutLeaves:
    """Only static fields."""

    size: int = static_field(default=1)


def test_class_without_leaves_is_an_empty_tree():
    assert jax.tree.leaves(WithoutLeaves(size=3)) == []
    assert jax.tree.unflatten(jax.tree.structure(WithoutLeaves(size=3)), []).size == 3
