"""The parameter tree, its schema, and seeded random parameters of any shape."""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import sources_of_ratio
from deepinfer_jax.model.leaves import LeafSpec, Storage, node_of
from deepinfer_jax.model.vision_params import VISION_PREFIX, VisionParams, build_vision
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

DRAFT_PREFIX = "draft."  # of the schema paths of the draft stages


@pytree_dataclass
class AttentionParams:
    """Query, window KV and output projections; leading axis: layers."""

    wq_a: ScaledArray
    q_norm: Float[Array, "N Q"]
    wq_b: ScaledArray
    wkv: ScaledArray
    kv_norm: Float[Array, "N L"]
    attn_sink: Float[Array, "N H"]
    wo_a: ScaledArray
    wo_b: ScaledArray


@pytree_dataclass
class CompressorParams:
    """Main KV compressors; leading axis: KV sources (wgate: ratio-2 sources only)."""

    wkv: Float[Array, "N L D"]
    wgate: Float[Array, "M L D"]
    norm: Float[Array, "N L"]


@pytree_dataclass
class IndexerParams:
    """Index queries (leading axis: index sources) and index keys (leading axis: KV sources)."""

    wq_b: ScaledArray
    weights_proj: Float[Array, "N I D"]
    wk: Float[Array, "M K L"]
    k_norm: Float[Array, "M K"]


@pytree_dataclass
class HyperParams:
    """mHC projections of one kind of sublayer; leading axis: layers."""

    fn: Float[Array, "N M CD"]
    scale: Float[Array, "N three"]
    base: Float[Array, "N M"]


@pytree_dataclass
class ExpertParams:
    """The three matrices of experts; leading axes: layers, and experts for the routed ones."""

    w1: ScaledArray
    w2: ScaledArray
    w3: ScaledArray


@pytree_dataclass
class MoeParams:
    """Router, routed and shared experts; leading axis: layers.

    replicas: where the experts of each layer are among all places of `experts`, K places each, filled up by
    repetition; None: expert e is in place e. Places beyond them are spare.
    """

    gate: Float[Array, "N E D"]
    bias: Float[Array, "N E"]
    bias_vl: Float[Array, "N E"]
    experts: ExpertParams
    shared: ExpertParams
    replicas: Int[Array, "N E K"] | None = None


@pytree_dataclass
class EngramParams:
    """Tables (one for each Engram layer, unequal lengths) and projections (leading axis: Engram layers)."""

    embed: tuple[ScaledArray, ...]
    wkv: ScaledArray
    q_weight: Float[Array, "N C D"]
    k_weight: Float[Array, "N C D"]
    token_map: Int[Array, " V"]  # compressed id of each token id; built from the tokenizer, not from the checkpoint


@pytree_dataclass
class MarkovParams:
    """What the token before adds to a draft's logits, head @ embed[token]; R: the Markov rank."""

    embed: Float[Array, "V R"]
    head: Float[Array, "V R"]


@pytree_dataclass
class DraftParams:
    """Blocks of the draft stages, in the backbone's form, and what is around them; leading axis: stages."""

    attn_norm: Float[Array, "N D"]
    ffn_norm: Float[Array, "N D"]
    attention: AttentionParams
    hc_attn: HyperParams
    hc_ffn: HyperParams
    moe: MoeParams
    main_proj: ScaledArray  # [D, target layers * D]
    main_norm: Float[Array, " D"]
    norm: Float[Array, " D"]
    markov: MarkovParams
    confidence: Float[Array, "one DR"]


@pytree_dataclass
class Params:
    """Everything the text network reads; the draft stages and the vision tower only where they are wanted."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    norm: Float[Array, " D"]
    attn_norm: Float[Array, "N D"]
    ffn_norm: Float[Array, "N D"]
    attention: AttentionParams
    compressor: CompressorParams
    indexer: IndexerParams
    hc_attn: HyperParams
    hc_ffn: HyperParams
    moe: MoeParams
    engram: EngramParams
    draft: DraftParams | None = None
    vision: VisionParams | None = None


@functools.cache
def schema(config: ModelConfig) -> tuple[LeafSpec, ...]:
    """Every leaf of `Params` for this shape (spec: backbone 1.3)."""
    c = config
    layers = tuple(range(c.num_hidden_layers))
    kv, index, pairs = c.kv_source_layer_ids, c.index_source_layer_ids, sources_of_ratio(c, 2)
    d, inner, heads, width = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads, c.head_dim
    streams, mixes = c.hc_mult, c.hc_mult * (2 + c.hc_mult)
    out_rank, group = c.o_groups * c.o_lora_rank, heads // c.o_groups * width

    def one(path: str, storage: Storage, *shape: int, axes: tuple[str, ...]) -> LeafSpec:
        return LeafSpec(path=path, shape=shape, storage=storage, axes=axes)

    def stacked(path: str, storage: Storage, ids: tuple[int, ...], *shape: int, axes: tuple[str, ...]) -> LeafSpec:
        return LeafSpec(path=path, shape=(len(ids), *shape), storage=storage, axes=("layer", *axes), stack=ids)

    def mlp(path: str, storage: Storage, *lead: int, axes: tuple[str, ...]) -> list[LeafSpec]:
        up, down = (*lead, inner, d), (*lead, d, inner)
        return [
            stacked(f"{path}.w1", storage, layers, *up, axes=(*axes, "inner", "hidden")),
            stacked(f"{path}.w2", storage, layers, *down, axes=(*axes, "hidden", "inner")),
            stacked(f"{path}.w3", storage, layers, *up, axes=(*axes, "inner", "hidden")),
        ]

    tables = [
        one(f"engram.embed.{i}", "fp8_rows", rows, c.engram_head_dim, axes=("engram_row", "engram_width"))
        for i, rows in enumerate(c.engram_num_embeddings)
    ]
    return (
        one("embed", "bf16", c.vocab_size, d, axes=("vocab", "hidden")),
        one("head", "bf16", c.vocab_size, d, axes=("vocab", "hidden")),
        one("norm", "bf16", d, axes=("hidden",)),
        stacked("attn_norm", "bf16", layers, d, axes=("hidden",)),
        stacked("ffn_norm", "bf16", layers, d, axes=("hidden",)),
        stacked("attention.wq_a", "fp8", layers, c.q_lora_rank, d, axes=("latent", "hidden")),
        stacked("attention.q_norm", "bf16", layers, c.q_lora_rank, axes=("latent",)),
        stacked("attention.wq_b", "fp8", layers, heads * width, c.q_lora_rank, axes=("head", "latent")),
        stacked("attention.wkv", "fp8", layers, width, d, axes=("latent", "hidden")),
        stacked("attention.kv_norm", "bf16", layers, width, axes=("latent",)),
        stacked("attention.attn_sink", "f32", layers, heads, axes=("head",)),
        stacked("attention.wo_a", "fp8", layers, out_rank, group, axes=("latent", "head")),
        stacked("attention.wo_b", "fp8", layers, d, out_rank, axes=("hidden", "latent")),
        stacked("compressor.wkv", "bf16", kv, width, d, axes=("latent", "hidden")),
        stacked("compressor.wgate", "bf16", pairs, width, d, axes=("latent", "hidden")),
        stacked("compressor.norm", "bf16", kv, width, axes=("latent",)),
        stacked(
            "indexer.wq_b", "fp8", index, c.index_n_heads * c.index_head_dim, c.q_lora_rank, axes=("head", "latent")
        ),
        stacked("indexer.weights_proj", "bf16", index, c.index_n_heads, d, axes=("head", "hidden")),
        stacked("indexer.wk", "bf16", kv, c.index_head_dim, width, axes=("latent", "latent")),
        stacked("indexer.k_norm", "bf16", kv, c.index_head_dim, axes=("latent",)),
        *(
            stacked(f"{kind}.{name}", "f32", layers, *shape, axes=axes)
            for kind in ("hc_attn", "hc_ffn")
            for name, shape, axes in (
                ("fn", (mixes, streams * d), ("mix", "hidden")),
                ("scale", (3,), ("mix",)),
                ("base", (mixes,), ("mix",)),
            )
        ),
        stacked("moe.gate", "bf16", layers, c.n_routed_experts, d, axes=("router", "hidden")),
        stacked("moe.bias", "f32", layers, c.n_routed_experts, axes=("router",)),
        stacked("moe.bias_vl", "f32", layers, c.n_routed_experts, axes=("router",)),
        *mlp("moe.experts", "fp4", c.n_routed_experts, axes=("expert",)),
        *mlp("moe.shared", "fp8", axes=()),
        *tables,
        stacked(
            "engram.wkv",
            "fp8",
            c.engram_layer_ids,
            (streams + 1) * d,
            c.engram_columns * c.engram_head_dim,
            axes=("hidden", "engram_width"),
        ),
        stacked("engram.q_weight", "bf16", c.engram_layer_ids, streams, d, axes=("stream", "hidden")),
        stacked("engram.k_weight", "bf16", c.engram_layer_ids, streams, d, axes=("stream", "hidden")),
        one("engram.token_map", "int32", c.vocab_size, axes=("vocab",)),
    )


def build_params(leaves: Mapping[str, Any], config: ModelConfig) -> Params:
    """The tree from one value for each path of the schema (arrays, shape structs, shardings).

    Draft stages and the vision tower are part of it where values for the paths of their schemas are among them.
    """

    part = functools.partial(node_of, leaves)

    def blocks[C](cls: type[C], prefix: str, **given: Any) -> C:
        return part(
            cls,
            prefix,
            attention=part(AttentionParams, f"{prefix}attention."),
            hc_attn=part(HyperParams, f"{prefix}hc_attn."),
            hc_ffn=part(HyperParams, f"{prefix}hc_ffn."),
            moe=part(
                MoeParams,
                f"{prefix}moe.",
                experts=part(ExpertParams, f"{prefix}moe.experts."),
                shared=part(ExpertParams, f"{prefix}moe.shared."),
                replicas=None,
            ),
            **given,
        )

    draft = None
    if any(path.startswith(DRAFT_PREFIX) for path in leaves):
        draft = blocks(DraftParams, DRAFT_PREFIX, markov=part(MarkovParams, f"{DRAFT_PREFIX}markov."))
    return blocks(
        Params,
        "",
        draft=draft,
        vision=build_vision(leaves) if any(path.startswith(VISION_PREFIX) for path in leaves) else None,
        compressor=part(CompressorParams, "compressor."),
        indexer=part(IndexerParams, "indexer."),
        engram=part(
            EngramParams,
            "engram.",
            embed=tuple(leaves[f"engram.embed.{i}"] for i in range(len(config.engram_layer_ids))),
        ),
    )


def leaf_at(params: Params, path: str) -> Any:
    """The leaf that a schema path names."""

    def step(node: Any, name: str) -> Any:
        return node[int(name)] if name.isdigit() else getattr(node, name)

    return functools.reduce(step, path.split("."), params)


def abstract_params(config: ModelConfig) -> Params:
    """The tree with shape structs for arrays: nothing is allocated."""
    leaves = {s.path: s.leaf(lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype)) for s in schema(config)}
    return build_params(leaves, config)


def layer_slice[T](tree: T, ordinal: int | Int[Array, ""]) -> T:
    """One layer of stacked parameters, by a Python or a traced index."""
    return jax.tree.map(operator.itemgetter(ordinal), tree)


def init_params(config: ModelConfig, *, seed: int) -> Params:
    """Seeded random parameters in the released storage formats; equal seeds give equal bits on every machine.

    Scales follow the input width of each matrix, so that activations stay of order one in any shape. The Engram
    token map folds ids onto the compressed vocabulary, since no tokenizer is involved.
    """
    leaves: dict[str, Any] = {}
    for number, spec in enumerate(schema(config)):
        rng = np.random.default_rng([seed, number])
        if spec.path == "engram.token_map":
            leaves[spec.path] = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_compressed_vocab_size
        else:
            leaves[spec.path] = spec.leaf(functools.partial(random_part, rng, spec))
    return build_params(leaves, config)


def random_part(rng: np.random.Generator, spec: LeafSpec, part: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Random values for one array of a leaf in its storage format."""
    if part == "scale":
        # A power of two that brings codes of order one to a standard deviation near 1 / sqrt(input width).
        fan_in = spec.shape[-1]
        code_size = {"fp8": 1.0, "fp4": 2.5, "fp8_rows": 1.0 / np.sqrt(fan_in)}[spec.storage]
        exponent = int(np.round(np.log2(1.0 / (np.sqrt(fan_in) * code_size))))
        return jnp.full(shape, 127 + exponent, dtype)
    if spec.storage == "fp4":
        return jnp.asarray(rng.integers(0, 256, shape, dtype=np.uint8))
    name = spec.path.rsplit(".", 1)[-1]
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name or name in ("q_weight", "k_weight"):
        values = 1.0 + 0.1 * values
    elif name == "scale":
        values = 0.5 + 0.1 * values
    elif name in ("base", "bias", "bias_vl"):
        values = 0.1 * values
    elif name == "embed" or spec.storage in ("fp8", "fp8_rows"):
        pass
    elif name == "head":
        values = values * np.float32(2.0 / np.sqrt(shape[-1]))
    elif name != "attn_sink":
        values = values / np.float32(np.sqrt(shape[-1]))
    if spec.storage in ("fp8", "fp8_rows"):
        return jnp.asarray(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    return jnp.asarray(values.astype(dtype))
