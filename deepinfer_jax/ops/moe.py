"""Router and experts (spec: backbone 6)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.ops.invariant import ordered_sum, repeat, round_to
from deepinfer_jax.ops.linear import linear, linear_f32
from deepinfer_jax.ops.quant import ScaledArray, fp8_roundtrip
from deepinfer_jax.ops.scatter import put_where

ROUTER_EPS = 1e-20


def router_scores(u: Float[Array, "T D"], weight: ScaledArray | Array) -> Float32[Array, "T E"]:
    """Unbiased score of every expert, all in float32."""
    return scores_of(linear_f32(u, weight))


def scores_of(logits: Float32[Array, "T E"]) -> Float32[Array, "T E"]:
    """sqrt(softplus(logit))."""
    return jnp.sqrt(jax.nn.softplus(logits))


def choose_experts(scores: Float32[Array, "T E"], bias: Float32[Array, "*T E"], *, count: int) -> Int[Array, "T A"]:
    """Ids of the `count` experts with the largest biased score, best first; the lower id wins a tie."""
    return lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), count)[1].astype(jnp.int32)


def expert_weights(
    scores: Float32[Array, "T E"], expert_ids: Int[Array, "T A"], *, scaling: float
) -> Float32[Array, "T A"]:
    """Unbiased scores of the chosen experts, normalised to a sum of `scaling`."""
    chosen = jnp.take_along_axis(scores, expert_ids, axis=1)
    total = ordered_sum([chosen[:, i] for i in range(chosen.shape[1])])
    return chosen / (total[:, None] + ROUTER_EPS) * scaling


def forced_experts(
    num_rows: int, *, num_experts: int, count: int, num_shards: int, imbalance: float
) -> Int[Array, "T A"]:
    """Expert ids for benchmarks: the first shard gets `imbalance` times the mean share, the others equal ones.

    Shards hold equally many adjacent experts. Within a shard the experts take turns, so that those of a row differ.
    Raises ValueError for an imbalance above the number of shards, or one for which a row needs more experts of the
    first shard than it has.
    """
    of_shard, share = num_experts // num_shards, imbalance / num_shards
    if share > 1 or math.ceil(count * share) > of_shard:
        raise ValueError(
            f"an imbalance of {imbalance} over {num_shards} shards of {of_shard} experts, {count} chosen by a row, is "
            f"impossible; give at most {min(num_shards, num_shards * of_shard // count)}"
        )
    pairs = np.arange(num_rows * count)
    before = np.floor(pairs * share).astype(np.int64)  # pairs of the first shard so far
    is_first = np.floor((pairs + 1) * share).astype(np.int64) > before
    others = pairs - before
    shard = np.where(is_first, 0, 1 + others % max(1, num_shards - 1))
    turn = np.where(is_first, before, others // max(1, num_shards - 1))
    return jnp.asarray((shard * of_shard + turn % of_shard).reshape(num_rows, count), jnp.int32)


def swiglu(
    gate: Float[Array, "T N"], up: Float[Array, "T N"], weight: Float32[Array, " T"] | None, *, limit: float
) -> Float[Array, "T N"]:
    """silu(min(gate, limit)) * clip(up, +-limit) in float32, times the routing weight, rounded to gate.dtype."""
    a = jnp.minimum(gate.astype(jnp.float32), limit)
    b = jnp.clip(up.astype(jnp.float32), -limit, limit)
    value = jax.nn.silu(a) * b
    if weight is not None:
        value = value * weight[:, None]
    return round_to(value, gate.dtype)


def expert(
    u: Float[Array, "T D"],
    w1: ScaledArray | Array,
    w2: ScaledArray | Array,
    w3: ScaledArray | Array,
    weight: Float32[Array, " T"] | None,
    *,
    limit: float,
    quantizes: bool,
) -> Float[Array, "T D"]:
    """One expert on rows u (already quantised if `quantizes`); the routing weight is applied before w2."""
    inner = swiglu(linear(u, w1), linear(u, w3), weight, limit=limit)
    return linear(fp8_roundtrip(inner) if quantizes else inner, w2)


def routed_experts(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    weights: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    apply: Callable[[Int[Array, ""], Float[Array, "B D"], Float32[Array, " B"]], Float[Array, "B D"]],
    *,
    num_experts: int,
    tile: int,
    has_fixed_trips: bool = False,
) -> Float[Array, "T A D"]:
    """Expert outputs for each row and choice; rows that are not live give zeros and cost nothing.

    `apply(expert, rows, weights)` computes one tile of rows with one expert. Pairs (row, choice) are grouped by
    expert and every group is padded to whole tiles, so the bits of a pair never depend on the other pairs; only
    as many tiles run as there are.
    """
    rows, per_row = expert_ids.shape
    num_pairs = rows * per_row
    if not num_pairs:
        return jnp.zeros((rows, per_row, u.shape[1]), u.dtype)
    num_tiles = min(num_pairs, num_pairs // tile + min(num_experts, num_pairs))
    pair_expert = jnp.where(is_live[:, None], expert_ids, num_experts).reshape(-1)
    counts = jnp.sum(pair_expert[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    tiles_of = -(-counts // tile)
    tile_ends = jnp.cumsum(tiles_of, dtype=jnp.int32)
    order = jnp.argsort(pair_expert, stable=True)
    group_starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    # Where each pair goes: the first tile of its expert, then its rank among the expert's pairs.
    sorted_expert = jnp.minimum(pair_expert[order], num_experts - 1)
    rank = jnp.arange(num_pairs, dtype=jnp.int32) - group_starts[sorted_expert]
    place = (tile_ends - tiles_of)[sorted_expert] * tile + rank
    is_kept = pair_expert[order] < num_experts
    place = jnp.where(is_kept, place, num_tiles * tile)
    places = put_where(jnp.zeros(num_pairs, jnp.int32), (order,), place)
    pair_at = put_where(jnp.full(num_tiles * tile, num_pairs, jnp.int32), (place,), order, is_kept)
    tile_expert = jnp.searchsorted(tile_ends, jnp.arange(num_tiles, dtype=jnp.int32), side="right")

    flat_weights = weights.reshape(-1)

    def one_tile(index: Array) -> Float[Array, "B D"]:
        pairs = lax.dynamic_slice_in_dim(pair_at, index * tile, tile)
        x = u.at[pairs // per_row].get(mode="fill", fill_value=0)
        w = flat_weights.at[pairs].get(mode="fill", fill_value=0)
        return apply(jnp.minimum(tile_expert[index], num_experts - 1).astype(jnp.int32), x, w)

    def step(index: Array, outputs: Float[Array, "N B D"]) -> Float[Array, "N B D"]:
        return lax.dynamic_update_index_in_dim(outputs, one_tile(index), index, 0)

    blank = jnp.zeros((num_tiles, tile, u.shape[1]), u.dtype)
    if has_fixed_trips:
        outputs = lax.map(lambda i: lax.cond(i < tile_ends[-1], one_tile, lambda _: blank[0], i), jnp.arange(num_tiles))
    else:
        outputs = repeat(tile_ends[-1], step, blank)
    outputs = outputs.reshape(num_tiles * tile, u.shape[1])
    return outputs.at[places].get(mode="fill", fill_value=0).reshape(rows, per_row, u.shape[1])


def every_expert(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    weights: Float32[Array, "T A"],
    w1: Float[Array, "E N D"],
    w2: Float[Array, "E D N"],
    w3: Float[Array, "E N D"],
    *,
    limit: float,
    quantizes: bool,
) -> Float[Array, "T D"]:
    """Sum of the chosen experts of each row, computed by all experts on all rows: for training small models.

    One product for each matrix of all experts together; an expert that a row did not choose has weight 0. The sum over
    experts happens inside the last product, in float32, and is rounded once. Differentiable, also in the weights.
    """
    experts, inner, width = w1.shape
    ids = jnp.arange(experts, dtype=jnp.int32)[None, :]
    shares = [jnp.where(expert_ids[:, a, None] == ids, weights[:, a, None], 0.0) for a in range(expert_ids.shape[1])]
    per_expert = ordered_sum(shares).reshape(-1)
    gate, up = (linear(u, w.reshape(experts * inner, width)).reshape(-1, inner) for w in (w1, w3))
    hidden = swiglu(gate, up, per_expert, limit=limit)
    hidden = (fp8_roundtrip(hidden) if quantizes else hidden).reshape(u.shape[0], experts * inner)
    return linear(hidden, w2.transpose(1, 0, 2).reshape(width, experts * inner))


def combine(routed: Float[Array, "T A D"], shared: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """The routed outputs added in slot order and the shared output last, in float32, rounded once."""
    terms = [routed[:, a].astype(jnp.float32) for a in range(routed.shape[1])]
    return round_to(ordered_sum([*terms, shared.astype(jnp.float32)]), shared.dtype)
