"""The parts of the parameter tree that a run may do without: draft stages, and the vision encoder."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.draft_params import draft_schema, param_schema
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, leaf_at, random_part, schema
from deepinfer_jax.model.vision_params import build_vision, vision_schema


def wanted_schema(config: ModelConfig, *, with_draft: bool, with_vision: bool) -> tuple[LeafSpec, ...]:
    """Every leaf of `Params`: the text backbone, then the optional parts that are wanted."""
    return (*param_schema(config, with_draft=with_draft), *(vision_schema(config) if with_vision else ()))


def schema_of(params: Params, config: ModelConfig) -> tuple[LeafSpec, ...]:
    """Every leaf that this tree holds."""
    return wanted_schema(config, with_draft=params.draft is not None, with_vision=params.vision is not None)


def check_params(params: Params, config: ModelConfig, *, with_draft: bool) -> None:
    """Raises ValueError, naming leaf and shapes, for parameters that are not in the released forms of this config."""
    if with_draft and params.draft is None:
        raise ValueError("the parameters have no draft stages and drafts are asked for; set num_draft_tokens=0")
    for spec in schema_of(params, config):
        wanted: Any = spec.leaf(lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype))
        for name, want in jax.tree.leaves_with_path(wanted):
            found: Any = leaf_at(params, spec.path)
            for key in name:
                found = getattr(found, key.name, None)
            if found is None or (found.shape, found.dtype) != (want.shape, want.dtype):
                shown = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise ValueError(
                    f"{spec.path}{jax.tree_util.keystr(name)} is {shown} where the config wants {want.dtype} "
                    f"{want.shape}; give the config that these parameters belong to"
                )


def with_random_vision(params: Params, config: ModelConfig, *, seed: int) -> Params:
    """The parameters with a seeded random vision encoder; equal seeds give equal bits, with and without a draft."""
    leaves: dict[str, Any] = {}
    first = len(schema(config)) + len(draft_schema(config))
    for number, spec in enumerate(vision_schema(config), start=first):
        leaves[spec.path] = spec.leaf(functools.partial(random_part, np.random.default_rng([seed, number]), spec))
    return dataclasses.replace(params, vision=build_vision(leaves))
