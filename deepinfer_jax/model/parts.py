"""The parts of the parameter tree that a run may do without: draft stages, and the vision encoder."""

import dataclasses
import functools
from typing import Any

import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.draft_params import draft_schema, param_schema
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, random_part, schema
from deepinfer_jax.model.vision_params import build_vision, vision_schema


def wanted_schema(config: ModelConfig, *, with_draft: bool, with_vision: bool) -> tuple[LeafSpec, ...]:
    """Every leaf of `Params`: the text backbone, then the optional parts that are wanted."""
    return (*param_schema(config, with_draft=with_draft), *(vision_schema(config) if with_vision else ()))


def schema_of(params: Params, config: ModelConfig) -> tuple[LeafSpec, ...]:
    """Every leaf that this tree holds."""
    return wanted_schema(config, with_draft=params.draft is not None, with_vision=params.vision is not None)


def with_random_vision(params: Params, config: ModelConfig, *, seed: int) -> Params:
    """The parameters with a seeded random vision encoder; equal seeds give equal bits, with and without a draft."""
    leaves: dict[str, Any] = {}
    first = len(schema(config)) + len(draft_schema(config))
    for number, spec in enumerate(vision_schema(config), start=first):
        leaves[spec.path] = spec.leaf(functools.partial(random_part, np.random.default_rng([seed, number]), spec))
    return dataclasses.replace(params, vision=build_vision(leaves))
