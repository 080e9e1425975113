"""Cached values that stand on a rounding boundary: which they are, and an input within float32 noise that turns one.

Where a quantiser rounds the other way than the recorded run did, everything behind that row differs, and no tolerance
helps. Such a value is found by the product's own quantisers: it is near a boundary if moving it by a few float32 ulp
changes what the quantiser returns. It is turned by moving one number of its sublayer's input by no more than float32
noise, so that the product itself rounds the other way, and everything behind it can be compared again.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.variants import all_layers, compressed_frequencies, layer_weights, rope_tables
from deepinfer_jax.ops import rope
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_fp8, quantize_index, quantize_main_kv
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check

_F32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheInput:
    """A quantised cache of one layer and the stage that its rows are made of."""

    stage: str  # the cache's rows, such as "layers.2.window_kv"
    source: str  # a stage that the forward goes on from
    values: Callable[[Array, Array], Array]  # source rows and their positions -> float32 rows for the quantiser
    quantize: Callable[[Array], ScaledArray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Near:
    """One value near a boundary. move: by how many float32 ulp, away from zero, it is rounded otherwise."""

    row: int
    channel: int
    value: float
    move: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """A value near a boundary and the source row that has it rounded the other way."""

    sequence: int
    step: int
    position: int
    stage: str
    source: str
    near: Near
    row: np.ndarray
    relative_move: float  # of the source row, as a share of its norm

    def describe(self, name: str, before: float, after: float) -> str:
        """One line for people: the value, its margin, and what was done."""
        return (
            f"{name}, position {self.position}: {self.stage} channel {self.near.channel} is {self.near.value:.9g}, "
            f"{abs(self.near.move)} ulp (allowed {tol.BOUNDARY_ULPS}) from being rounded to {after:.6g} instead of "
            f"{before:.6g}; it was turned by moving {self.source} by {self.relative_move:.1g} of its norm, and every "
            "later step is compared with the recorded one"
        )


def quantized_caches(params: Params, config: RuntimeConfig) -> list[CacheInput]:
    """Every cache that quantises its rows, in the order in which a step writes them."""
    if not config.policy.quantizes_caches:
        return []
    found: list[CacheInput] = []
    for role in layer_roles(config.model):
        head = f"layers.{role.layer}"
        found.append(
            CacheInput(
                stage=f"{head}.window_kv",
                source=f"{head}.attn_in",
                values=_window_values(params, config, role.layer),
                quantize=quantize_fp8,
            )
        )
        if role.owns_kv:
            main, index = _entry_values(params, config, role.kv_ordinal, role.ratio)
            source = f"{head}.compress_latent"
            found += [
                CacheInput(stage=f"{head}.compress_kv", source=source, values=main, quantize=quantize_main_kv),
                CacheInput(stage=f"{head}.index_k", source=source, values=index, quantize=quantize_index),
            ]
    return found


def near_values(values: np.ndarray, quantize: Callable[[Array], ScaledArray]) -> list[Near]:
    """The values of [rows, channels] that `tol.BOUNDARY_ULPS` or fewer float32 ulp put under other codes or scales."""
    num_rows, width = values.shape

    def rounded(rows: np.ndarray) -> np.ndarray:
        return np.asarray(dequantize(quantize(jnp.asarray(rows)), _F32))

    still, found = rounded(values), np.zeros(values.shape, np.int32)
    for distance in range(1, tol.BOUNDARY_ULPS + 1):
        for move in (distance, -distance):
            moved = np.where(values == 0, values, (values.view(np.int32) + move).view(np.float32))
            one_moved = np.where(np.eye(width, dtype=np.bool_), moved[:, None], values[:, None])
            turned = rounded(one_moved.reshape(-1, width)).reshape(num_rows, width, width)
            differs = np.any(turned != still[:, None], axis=2)
            found = np.where(differs & (found == 0), move, found)
    return [
        Near(row=int(r), channel=int(c), value=float(values[r, c]), move=int(found[r, c]))
        for r, c in np.argwhere(found)
    ]


def turns_of(
    caches: Sequence[CacheInput],
    steps: Sequence[Mapping[str, np.ndarray]],
    *,
    sequence: int,
    first_position: int,
    taken: Sequence[Turn],
) -> Iterator[Turn]:
    """What could be turned in the given decode steps of one sequence, the first of them at `first_position`.

    steps: each step's captured stages. taken: turns that those steps ran with already.
    """
    for cache in caches:
        mine = {t.step: t.row for t in taken if (t.sequence, t.source) == (sequence, cache.source)}
        sources = {i: mine.get(i, s[cache.source]) for i, s in enumerate(steps) if len(s.get(cache.source, ()))}
        if not sources:
            continue
        indices = list(sources)
        rows = jnp.asarray(np.concatenate([sources[i] for i in indices]))
        positions = jnp.asarray(indices, jnp.int32) + first_position
        for near in near_values(np.asarray(cache.values(rows, positions)), cache.quantize):
            at = slice(near.row, near.row + 1)
            beyond = near.move + int(np.sign(near.move)) * tol.BOUNDARY_ULPS
            # The forward may have it on the other side than these ops, which are compiled otherwise: both ways.
            for ulps in (beyond, -beyond):
                row = moved_source(cache, rows[at], positions[at], near, ulps=ulps)
                share = float(np.linalg.norm(row - np.asarray(rows[at])) / np.linalg.norm(rows[at]))
                if share > tol.NOISE_RELATIVE:
                    continue
                yield Turn(
                    sequence=sequence,
                    step=indices[near.row],
                    position=first_position + indices[near.row],
                    stage=cache.stage,
                    source=cache.source,
                    near=near,
                    row=row,
                    relative_move=share,
                )


def moved_source(cache: CacheInput, row: Array, position: Array, near: Near, *, ulps: int) -> np.ndarray:
    """The source row [1, width] with one number moved, so that the value moves by `ulps`, away from zero.

    The number is the one that the value depends on most.
    """

    def value(row: Array) -> Array:
        return cache.values(row, position)[0, near.channel]

    slope = np.asarray(jax.grad(value)(row))[0].astype(np.float64)
    strongest = int(np.argmax(np.abs(slope)))
    change = ulps * float(np.spacing(np.float32(near.value)))  # spacing has the sign of the value
    moved = np.array(row)
    moved[0, strongest] += change / slope[strongest]
    return moved


def turn_check(turn: Turn, sequence: str) -> Check:
    """The line of a report that counts a turned value among the forced rows; its error is the distance in ulp."""
    return Check(
        name="boundary",
        sequence=sequence,
        rule=tol.Rule(measure="boundary", tolerance=float(tol.BOUNDARY_ULPS)),
        num_values=1,
        num_different=1,
        num_rows=1,
        rows_bad=0,
        rows_forced=1,
        rows_turned=0,
        rows_excused=0,
        max_error=float(abs(turn.near.move)),
        first_bad_row=-1,
    )


def _window_values(params: Params, config: RuntimeConfig, layer: int) -> Callable[[Array, Array], Array]:
    own, model = layer_weights(params.attention, layer, dtype=_F32), config.model

    def values(x: Array, positions: Array) -> Array:
        kv = rms_norm(linear(x, own.wkv), own.kv_norm, eps=model.rms_norm_eps)
        tables = rope_tables(positions, all_layers(model)[layer], config=model)
        return rope.rotate(kv, tables.cos, tables.sin)

    return values


def _entry_values(
    params: Params, config: RuntimeConfig, ordinal: int, ratio: int
) -> tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]]:
    """Main KV and index keys of latents that are closed at the given positions."""
    wk, k_norm, model = params.indexer.wk[ordinal], params.indexer.k_norm[ordinal], config.model

    def rotated(rows: Array, positions: Array) -> Array:
        cos, sin = rope.angles(positions - (ratio - 1), compressed_frequencies(model))
        return rope.rotate(rows, cos, sin)

    def keys(latent: Array, positions: Array) -> Array:
        return rotated(rms_norm(linear(latent, wk), k_norm, eps=model.rms_norm_eps), positions)

    return rotated, keys
