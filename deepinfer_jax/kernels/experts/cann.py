"""Products of rows with the FP4 weights of their experts by aclnnGroupedMatmulWeightNz.

The operator takes weights in CANN's fractal form. `pack_experts` makes it by our reading: blocks of 16 rows and 64
columns, block columns outermost. No hardware has confirmed that reading.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, on_host, result
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.kernels.linear.cann import MxWeight
from deepinfer_jax.kernels.swiglu import cann as swiglu
from deepinfer_jax.ops.quant import INDEX_GROUP, ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

TARGET = "deepinfer.cann.expert_products.v2"
FRACTAL_ROWS = 16
FRACTAL_COLS = 64


@pytree_dataclass
class ExpertWeights:
    """Weights [E, N, K] of all experts: uint8 [E, K / 64, N / 16, 16, 32] (E2M1, even column in the low half) with
    scales uint8 [E, N, K / 64, 2] (E8M0). Several layers have a leading axis, see `linear.cann.MxWeight`.
    """

    fractals: Operand
    scale: Operand


def pack_experts(w: ScaledArray) -> ExpertWeights:
    """The checkpoint's FP4 weights [E, N, K] in fractals; ValueError for another form or other sizes."""
    if w.form != "fp4" or w.scale is None or w.block != (1, INDEX_GROUP):
        raise ValueError(f"the weights have form {w.form} in blocks of {w.block}; CANN takes fp4 in blocks of (1, 32)")
    experts, rows, cols = w.payload.shape[0], w.payload.shape[1], w.payload.shape[2] * 2
    if rows % FRACTAL_ROWS or cols % FRACTAL_COLS:
        raise ValueError(f"N={rows} and K={cols} must be multiples of {FRACTAL_ROWS} and {FRACTAL_COLS}")
    blocks = w.payload.reshape(experts, rows // FRACTAL_ROWS, FRACTAL_ROWS, cols // FRACTAL_COLS, FRACTAL_COLS // 2)
    return ExpertWeights(
        fractals=blocks.transpose(0, 3, 1, 2, 4), scale=w.scale.reshape(experts, rows, cols // FRACTAL_COLS, 2)
    )


def count_words(counts: Int32[Array, " E"]) -> Int32[Array, "E two"]:
    """Rows of each expert as the 64-bit integers that CANN reads: low word, high word."""
    return jnp.stack([counts, jnp.zeros_like(counts)], axis=1)


def expert_products(codes: Operand, scale: Operand, weights: ExpertWeights, counts: Operand) -> Operand:
    """bfloat16 [M, N]: row m times the transposed weight of its expert.

    codes [M, K] and scale [M, K / 64, 2] are rows as `linear.cann.quantize_fp8` makes them, sorted by expert; counts
    [E, 2] are the words of `count_words`. Rows behind the last group give zeros.
    """
    shape = result((codes.shape[0], weights.scale.shape[1]), jnp.bfloat16)
    return ascend_call(TARGET, (codes, scale, weights.fractals, weights.scale, counts), [shape])[0]


@pytree_dataclass
class PackedExperts:
    """The routed experts' weights: gate and up in one, gate first, and down."""

    gate_up: ExpertWeights
    down: ExpertWeights


@pytree_dataclass
class PackedShared:
    """A shared expert's weights: gate and up in one, gate first, and down."""

    gate_up: MxWeight
    down: MxWeight


def pack_routed(w1: ScaledArray, w2: ScaledArray, w3: ScaledArray) -> PackedExperts:
    """Routed experts of one layer; ValueError for what `pack_experts` refuses."""
    return PackedExperts(gate_up=pack_experts(_one_above_other(w1, w3)), down=pack_experts(w2))


def pack_shared(w1: ScaledArray, w2: ScaledArray, w3: ScaledArray) -> PackedShared:
    """The shared expert of one layer; ValueError for what `linear.cann.pack_weight` refuses."""
    return PackedShared(gate_up=linear.pack_weight(_one_above_other(w1, w3)), down=linear.pack_weight(w2))


def _one_above_other(a: ScaledArray, b: ScaledArray) -> ScaledArray:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=-2), a, b)


def routed_experts(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    shares: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    experts: PackedExperts,
    layer: int | Int[Array, ""],
    *,
    num_experts: int,
    limit: float,
    **_: Any,
) -> Float[Array, "T A D"]:
    """Output of every chosen expert; the host sorts the pairs of row and choice by expert, and puts outputs back."""
    own: PackedExperts = jax.tree.map(lambda a: a[layer], experts)
    rows, per_row = expert_ids.shape
    pair_expert = jnp.where(is_live[:, None], expert_ids, num_experts).reshape(-1)
    order = jnp.argsort(pair_expert, stable=True)
    all_ids = jnp.arange(num_experts, dtype=jnp.int32)
    counts = count_words(jnp.sum(pair_expert[:, None] == all_ids[None, :], axis=0, dtype=jnp.int32))
    codes, scale = linear.quantize_fp8(u[order // per_row])
    gate_up = expert_products(codes, scale, own.gate_up, counts)
    codes, scale, _value = swiglu.swiglu(gate_up, shares.reshape(-1)[order], limit=limit)
    outputs = on_host(expert_products(codes, scale, own.down, counts))
    return jnp.zeros_like(outputs).at[order].set(outputs).reshape(rows, per_row, u.shape[1])


def shared_expert(u: Float[Array, "T D"], expert: PackedShared, *, limit: float, **_: Any) -> Float[Array, "T D"]:
    """Output of one expert on all rows; the second product quantises the activation again, which is exact."""
    gate_up = linear.linear(u, expert.gate_up)
    _codes, _scale, value = swiglu.swiglu(gate_up, jnp.ones(u.shape[0], jnp.float32), limit=limit)
    return on_host(linear.linear(value, expert.down))


def refuses_routed(u: Array, *arrays: Any, quantizes: bool, **_: Any) -> str | None:
    """Why the operators cannot take these arguments, None if they can."""
    return _refuses(u, arrays[3], PackedExperts, quantizes)


def refuses_shared(u: Array, expert: Any, *, quantizes: bool, **_: Any) -> str | None:
    """Why the operators cannot take these arguments, None if they can."""
    return _refuses(u, expert, PackedShared, quantizes)


def _refuses(u: Array, weights: Any, form: type, quantizes: bool) -> str | None:
    if not isinstance(weights, form):
        return f"the weights are {type(weights).__name__}; the operators take {form.__name__}"
    if not quantizes or u.dtype != jnp.bfloat16:
        return f"rows are {u.dtype}, quantised: {quantizes}; the operators take bfloat16 on FP8's grid (numerics q)"
    return None
