"""Frozen dataclasses that JAX can flatten."""

import dataclasses
from typing import Any, dataclass_transform

import jax

_STATIC = "deepinfer_static"


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree structure and not a leaf; its value must be hashable."""
    return dataclasses.field(metadata={_STATIC: True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static_field,))
def pytree_dataclass[T](cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass and a pytree with named keys.

    Unflattening fills the instance directly instead of calling `__init__`, so a tree may hold placeholders
    (shape structs, partition specs, booleans) in fields whose annotations are checked on construction.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    leaf_names = tuple(f.name for f in fields if not f.metadata.get(_STATIC))
    static_names = tuple(f.name for f in fields if f.metadata.get(_STATIC))

    def flatten_with_keys(node: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values = node.__dict__
        keyed = [(jax.tree_util.GetAttrKey(name), values[name]) for name in leaf_names]
        return keyed, tuple(values[name] for name in static_names)

    def flatten(node: T) -> tuple[list[Any], tuple[Any, ...]]:
        values = node.__dict__
        return [values[name] for name in leaf_names], tuple(values[name] for name in static_names)

    def unflatten(static: tuple[Any, ...], leaves: Any) -> T:
        node = object.__new__(cls)
        node.__dict__.update(zip(leaf_names, leaves, strict=True))
        node.__dict__.update(zip(static_names, static, strict=True))
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
