"""Models of the released widths that fit a device: fewer layers and experts, random weights made on the devices."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, build_params, schema
from deepinfer_jax.model.shardings import part_sharding, placed_spec
from deepinfer_jax.parallel.mesh import AnyMesh, Rules

FEWEST_LAYERS = 6
ENGRAM_VOCAB = 2000  # hash values of each column of an Engram table, in place of 16 million
_PRIMES_FROM = 1.25  # the primes above them lie below this many times as much
_CODE_SIZE = {"fp8": 1.0, "fp4": 2.6}  # root mean square of random codes
_FP8_WITHOUT_LARGE = 0xB7  # no exponent bit of 2^8: neither NaN nor huge


def short_model(model: ModelConfig, *, num_layers: int, num_experts: int) -> ModelConfig:
    """The model with fewer layers, of which each kind is there, fewer experts and small Engram tables; no drafter.

    One layer sees the window alone, a third of the others have ratio 2; the last third of those with ratio 1 choose
    entries among the candidates. Raises ValueError below six layers.
    """
    if num_layers < FEWEST_LAYERS:
        raise ValueError(f"num_layers={num_layers} is too few for one of each kind; give {FEWEST_LAYERS} or more")
    num_pairs = (num_layers - 1) // 3
    ratios = (0, *(2,) * num_pairs, *(1,) * (num_layers - 1 - num_pairs))
    source = 1 + num_pairs
    reindex = num_layers - (num_layers - source) // 3
    engram_rows = round(_PRIMES_FROM * ENGRAM_VOCAB * model.engram_columns)
    return dataclasses.replace(
        model,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts,
        compress_ratios=ratios,
        kv_source_layer_ids=(1, source),
        index_source_layer_ids=(1, source, reindex),
        candidate_source_layer_id=source,
        engram_layer_ids=(1, source),
        engram_vocab_size=ENGRAM_VOCAB,
        engram_num_embeddings=(engram_rows, engram_rows),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(num_layers - 1,),
    )


def random_params(
    model: ModelConfig, *, seed: int = 0, mesh: AnyMesh | None = None, rules: Rules | None = None
) -> Params:
    """Parameters of any bits in the released storage formats, each piece made on the device that holds it.

    Unlike `init_params`, which a host makes, bits depend on the mesh; scales keep activations of order one.
    """
    leaves: dict[str, Any] = {}
    for number, spec in enumerate(placed_spec(spec, mesh, rules) for spec in schema(model)):
        key = jax.random.fold_in(jax.random.key(seed), number)
        if spec.path == "engram.token_map":
            folded = np.arange(model.vocab_size, dtype=np.int32) % model.engram_compressed_vocab_size
            leaves[spec.path] = jax.device_put(folded, part_sharding(spec, "payload", folded.shape, mesh, rules))
        else:
            leaves[spec.path] = spec.leaf(functools.partial(_random_part, key, spec, mesh, rules))
    return build_params(leaves, model)


def _random_part(
    key: Array,
    spec: LeafSpec,
    mesh: AnyMesh | None,
    rules: Rules | None,
    part: str,
    shape: Sequence[int],
    dtype: np.dtype,
) -> Array:
    shape = tuple(shape)
    sharding = part_sharding(spec, part, shape, mesh, rules)
    make = functools.partial(_values, storage=spec.storage, name=spec.path.rsplit(".", 1)[-1], part=part)
    return jax.jit(functools.partial(make, shape=shape, dtype=dtype), out_shardings=sharding)(key)


def _values(key: Array, *, storage: str, name: str, part: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    width = shape[-1]
    if part == "scale":
        columns = width * 32
        size = 1.0 if storage == "fp8_rows" else _CODE_SIZE[storage] * np.sqrt(columns)
        return jnp.full(shape, 127 - round(np.log2(size)), dtype)
    if dtype == np.uint8:
        bits = jax.random.bits(key, shape, jnp.uint8)
        return bits if storage == "fp4" else bits & jnp.uint8(_FP8_WITHOUT_LARGE)
    values = jax.random.normal(key, shape, jnp.float32)
    if "norm" in name or name in ("q_weight", "k_weight"):
        values = 1.0 + 0.1 * values
    elif name == "scale":
        values = 0.5 + 0.1 * values
    elif name in ("base", "bias", "bias_vl"):
        values = 0.1 * values
    elif name not in ("embed", "attn_sink"):
        values = values * np.float32(width**-0.5)
    return values.astype(dtype)
