"""One rank of the real model for benchmarks: fewer layers and experts, small tables, weights made on the device.

Widths, roles of layers, storage forms and caches are the model's own. Only what no step reads more of is left out.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int, UInt32

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import sources_of_ratio
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, build_params, random_part, schema
from deepinfer_jax.model.shardings import part_sharding, placed_spec
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.text.engram_vocab import engram_constants

ENGRAM_BASE = 20_000  # rows of one hash column, about; the released tables have 16 million
_E4M3_ONE = 0x30  # codes from here to 0x3F are 0.5 to 1.875


def rank_model(model: ModelConfig, *, num_layers: int | None = None, engram_base: int = ENGRAM_BASE) -> ModelConfig:
    """The model with so many of its layers, all if None, small Engram tables, and no draft stages.

    Few layers are one of each role first: the candidate source, a layer that chooses among candidates, a ratio-2
    source, a window layer with an Engram table, layers that reuse a selection; then the others. Raises ValueError for
    more layers than there are.
    """
    kept = _kept_layers(model, model.num_hidden_layers if num_layers is None else num_layers)
    number = {layer: i for i, layer in enumerate(kept)}
    ids = lambda layers: tuple(number[i] for i in layers if i in number)  # noqa: E731
    engram_ids = ids(model.engram_layer_ids)
    constants = engram_constants(
        layer_ids=engram_ids,
        max_ngram=model.engram_max_ngram_size,
        num_heads=model.engram_n_heads,
        vocab_base=min(engram_base, model.engram_vocab_size),
        compressed_vocab_size=model.engram_compressed_vocab_size,
    )
    return dataclasses.replace(
        model,
        num_hidden_layers=len(kept),
        compress_ratios=tuple(model.compress_ratios[i] for i in kept),
        kv_source_layer_ids=ids(model.kv_source_layer_ids),
        index_source_layer_ids=ids(model.index_source_layer_ids),
        candidate_source_layer_id=number[model.candidate_source_layer_id],
        engram_layer_ids=engram_ids,
        engram_vocab_size=min(engram_base, model.engram_vocab_size),
        engram_num_embeddings=constants.num_rows,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=ids(model.dspark_target_layer_ids),
    )


def _kept_layers(model: ModelConfig, count: int) -> list[int]:
    everything = range(model.num_hidden_layers)
    if not 1 <= count <= len(everything):
        raise ValueError(f"num_layers={count} must be from 1 to {len(everything)}, the layers of the model")
    candidate = model.candidate_source_layer_id
    choosing = [i for i in model.index_source_layer_ids if i > candidate]
    pairs = sources_of_ratio(model, 2)[:1]
    first = [candidate, *choosing[:1], *pairs, *model.engram_layer_ids[:1]]
    first += [i + 1 for i in (candidate, *pairs) if i + 1 in everything]
    return sorted(list(dict.fromkeys([*first, *everything]))[:count])


def rank_params(model: ModelConfig, *, num_experts: int, seed: int = 0, mesh: Mesh | None = None) -> Params:
    """Random weights in the released forms, with `num_experts` of each layer's routed experts, made on the device.

    Activations stay of order one, as with `init_params`; equal seeds give equal bits. On a mesh `num_experts` are those
    of all devices, and each device makes its own.
    """
    specs = tuple(placed_spec(spec, mesh) for spec in rank_schema(model, num_experts=num_experts))

    def make() -> Params:
        leaves = {}
        for number, spec in enumerate(specs):
            make_part = functools.partial(_part, seed * len(specs) + number, spec, model)
            leaves[spec.path] = spec.leaf(make_part)
        return build_params(leaves, model)

    if mesh is None:
        return jax.jit(make)()
    places = {
        spec.path: spec.leaf(lambda part, shape, _, spec=spec: part_sharding(spec, part, shape, mesh)) for spec in specs
    }
    return jax.jit(make, out_shardings=build_params(places, model))()


def rank_schema(model: ModelConfig, *, num_experts: int) -> tuple[LeafSpec, ...]:
    """The schema with so many routed experts."""

    def own(spec: LeafSpec) -> LeafSpec:
        if not spec.path.startswith("moe.experts."):
            return spec
        return dataclasses.replace(spec, shape=(spec.shape[0], num_experts, *spec.shape[2:]))

    return tuple(own(spec) for spec in schema(model))


def _part(seed: int, spec: LeafSpec, model: ModelConfig, part: str, shape: tuple[int, ...], dtype: Any) -> Array:
    if part == "scale":
        return random_part(np.random.default_rng(0), spec, part, shape, dtype)
    if spec.path == "engram.token_map":
        return jnp.arange(shape[0], dtype=jnp.int32) % model.engram_compressed_vocab_size
    bits = _hashed(seed, shape)
    if spec.storage == "fp4":
        return (bits >> 24).astype(jnp.uint8)
    if spec.storage in ("fp8", "fp8_rows"):
        code = bits >> 24
        return ((code & 0x80) | _E4M3_ONE | (code & 0x0F)).astype(jnp.uint8)
    mean, deviation = _moments(spec)
    return (mean + deviation * _unit(bits)).astype(dtype)


def _hashed(seed: int, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 mixed bits for each place: element by element, so that a large array needs nothing beside itself."""
    word = jnp.full(shape, np.uint32((seed * 0x9E3779B1 + 0x7F4A7C15) % 2**32))
    for axis in range(len(shape)):
        word = (word ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * np.uint32(0x85EBCA6B)
        word = word ^ (word >> 15)
    word = word * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _unit(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Evenly spread values of mean 0 and variance 1."""
    return ((bits >> 8).astype(jnp.float32) * np.float32(2.0**-23) - 1.0) * np.float32(np.sqrt(3.0))


def _moments(spec: LeafSpec) -> tuple[np.float32, np.float32]:
    """Mean and standard deviation of unpacked values."""
    name = spec.path.rsplit(".", 1)[-1]
    fan_in = spec.shape[-1] ** -0.5
    if "norm" in name or name in ("q_weight", "k_weight"):
        return np.float32(1.0), np.float32(0.1)
    if name == "scale":
        return np.float32(0.5), np.float32(0.1)
    deviations = {"base": 0.1, "bias": 0.1, "bias_vl": 0.1, "embed": 1.0, "attn_sink": 1.0, "head": 2.0 * fan_in}
    return np.float32(0.0), np.float32(deviations.get(name, fan_in))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLoad:
    """One step: so many requests with equally many rows each, which are the newest of so many tokens."""

    num_rows: int
    context: int  # tokens of each request, this step's rows included
    num_experts: int  # routed experts of this rank
    rows_each: int = 1  # of a request: more than one for a chunk of a prompt

    def __post_init__(self) -> None:
        if self.num_rows % self.rows_each or not 1 <= self.rows_each <= self.context:
            raise ValueError(
                f"{self.num_rows} rows, {self.rows_each} of each request, do not go into requests of {self.context} "
                "tokens; give a multiple, and a context that holds the rows"
            )

    @property
    def name(self) -> str:
        """The load in a result line."""
        count = self.num_requests
        prompts = "" if self.rows_each == 1 else " of one prompt" if count == 1 else f" of {count} prompts"
        return f"{self.num_rows} rows{prompts}, context {self.context}"

    @property
    def num_requests(self) -> int:
        """Requests that have rows."""
        return self.num_rows // self.rows_each

    def num_pages(self, config: RuntimeConfig) -> int:
        """Pages of one request."""
        return -(-self.context // config.page_tokens)

    def positions(self) -> Int[np.ndarray, " T"]:
        """Of the rows, request after request."""
        first = self.context - self.rows_each
        return np.tile(np.arange(first, self.context, dtype=np.int32), self.num_requests)

    def batch(self, config: RuntimeConfig) -> StepBatch:
        """Rows of distinct slots, each with pages of its own that are not neighbours; logits of the newest rows."""
        slots, pages = self.num_requests, self.num_pages(config)
        order = np.random.default_rng(0).permutation(slots * pages).astype(np.int32)
        tokens = np.random.default_rng(1).integers(3, config.model.vocab_size, self.num_rows)
        return StepBatch(
            tokens=jnp.asarray(tokens, jnp.int32),
            positions=jnp.asarray(self.positions()),
            slots=jnp.asarray(np.repeat(np.arange(slots, dtype=np.int32), self.rows_each)),
            page_table=jnp.asarray(order.reshape(slots, pages)),
            logit_rows=jnp.arange(self.rows_each - 1, self.num_rows, self.rows_each, dtype=jnp.int32),
        )

    def experts(self, config: RuntimeConfig) -> dict[str, Int[Array, "T A"]]:
        """For each layer different experts of this rank for each row, in place of the router's choice.

        A rank of eight gets as many pairs from all ranks' rows as its own rows have, if all ranks have equally many.
        """
        model, rng = config.model, np.random.default_rng(2)
        count = min(model.num_experts_per_tok, self.num_experts)

        def of_layer() -> Int[Array, "T A"]:
            order = np.argsort(rng.random((self.num_rows, self.num_experts)), axis=1)[:, :count]
            filled = np.full((self.num_rows, model.num_experts_per_tok), self.num_experts)
            filled[:, :count] = order
            return jnp.asarray(filled, jnp.int32)

        return {f"layers.{layer}.router_ids": of_layer() for layer in range(model.num_hidden_layers)}

    def state(self, config: RuntimeConfig) -> State:
        """Caches with random entries in every place."""
        slots, pages = self.num_requests, self.num_requests * self.num_pages(config)

        def make() -> State:
            state = init_state(config, num_slots=slots, num_pages=pages)
            leaves, structure = jax.tree.flatten_with_path(state)
            filled = [_cache_part(i, jax.tree_util.keystr(path), leaf) for i, (path, leaf) in enumerate(leaves)]
            return jax.tree.unflatten(structure, filled)

        return jax.jit(make)()


def _cache_part(seed: int, path: str, blank: Array) -> Array:
    bits = _hashed(seed, blank.shape)
    if path == ".history":
        return (bits % 64).astype(blank.dtype)
    if blank.dtype == jnp.float32:
        return _unit(bits)
    if path.endswith(".scale"):
        # E4M3 scales of main KV are 0.25 to 0.47 so that values are of order one; the others are powers of two.
        is_e4m3 = ".main_kv" in path
        return (0x28 + (bits >> 29) if is_e4m3 else jnp.full(blank.shape, 126, jnp.uint32)).astype(jnp.uint8)
    code = bits >> 24
    is_fp8 = ".window" in path
    return (((code & 0x80) | _E4M3_ONE | (code & 0x0F)) if is_fp8 else code).astype(jnp.uint8)
