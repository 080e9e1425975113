"""The schema of the draft stages, and seeded random draft parameters (spec: dspark 2)."""

import dataclasses
import functools

import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import (
    DRAFT_PREFIX,
    LeafSpec,
    Params,
    Storage,
    build_params,
    leaf_at,
    random_part,
    schema,
)

# Parts of the backbone that a draft stage has too; nothing of it reads a compressed cache or an Engram table.
_BLOCK_PARTS = frozenset({"attn_norm", "ffn_norm", "attention", "hc_attn", "hc_ffn", "moe"})
# Axis -> field of the config that gives its size in a draft stage.
_DRAFT_SIZES = {"expert": "dspark_n_routed_experts", "router": "dspark_n_routed_experts"}


@functools.cache
def draft_schema(config: ModelConfig) -> tuple[LeafSpec, ...]:
    """Every leaf of `DraftParams`; none for a model without draft stages. `stack` counts stages."""
    if not config.num_nextn_predict_layers:
        return ()
    d, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank

    def one(name: str, storage: Storage, *shape: int, axes: tuple[str, ...]) -> LeafSpec:
        return LeafSpec(path=DRAFT_PREFIX + name, shape=shape, storage=storage, axes=axes)

    return (
        *(_stage_leaf(spec, config) for spec in schema(config) if spec.path.split(".")[0] in _BLOCK_PARTS),
        one("main_proj", "fp8", d, len(config.dspark_target_layer_ids) * d, axes=("hidden", "latent")),
        one("main_norm", "bf16", d, axes=("hidden",)),
        one("norm", "bf16", d, axes=("hidden",)),
        one("markov.embed", "bf16", vocab, rank, axes=("vocab", "latent")),
        one("markov.head", "bf16", vocab, rank, axes=("vocab", "latent")),
        one("confidence", "bf16", 1, d + rank, axes=("head", "hidden")),
    )


def param_schema(config: ModelConfig, *, with_draft: bool) -> tuple[LeafSpec, ...]:
    """Every leaf of `Params`, those of the draft stages last and only if wanted."""
    return (*schema(config), *(draft_schema(config) if with_draft else ()))


def with_random_draft(params: Params, config: ModelConfig, *, seed: int) -> Params:
    """The parameters with seeded random draft stages in the released storage formats, if the model has any."""
    own, first = draft_schema(config), len(schema(config))
    leaves = {spec.path: leaf_at(params, spec.path) for spec in schema(config)}
    for number, spec in enumerate(own, start=first):
        leaves[spec.path] = spec.leaf(functools.partial(random_part, np.random.default_rng([seed, number]), spec))
    return dataclasses.replace(build_params(leaves, config), vision=params.vision)


def _stage_leaf(spec: LeafSpec, config: ModelConfig) -> LeafSpec:
    """A leaf of the backbone's layers in the sizes of the draft stages."""
    stages = tuple(range(config.num_nextn_predict_layers))
    sizes = [
        getattr(config, _DRAFT_SIZES[axis]) if axis in _DRAFT_SIZES else size
        for axis, size in zip(spec.axes, spec.shape, strict=True)
    ]
    shape = (len(stages), *sizes[1:])
    return dataclasses.replace(spec, path=DRAFT_PREFIX + spec.path, shape=shape, stack=stages)
