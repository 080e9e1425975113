"""Every operator of the Ascend bridge with inputs, its reference in `ops/` and a tolerance: for tests and the kit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels.ascend import Bridge, DeviceArray
from deepinfer_jax.kernels.attention import cann as attention
from deepinfer_jax.kernels.experts import cann as experts
from deepinfer_jax.kernels.indexer import cann as indexer
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.rope import cann as rope
from deepinfer_jax.kernels.router import cann as router
from deepinfer_jax.kernels.scatter_rows import cann as scatter_rows
from deepinfer_jax.kernels.swiglu import cann as swiglu
from deepinfer_jax.ops import attention as attention_ops
from deepinfer_jax.ops import indexer as indexer_ops
from deepinfer_jax.ops import linear as linear_ops
from deepinfer_jax.ops import moe, norm, paged, quant
from deepinfer_jax.ops import rope as rope_ops

# One bf16 rounding (2^-9 relative at worst) that a float32 sum in another order turns over now and then.
BF16_REL_L2 = 2e-3
# A float32 sum of a few hundred products against one in another order or in float64.
F32_REL_L2 = 1e-6
# Probabilities that the reference rounds to bf16 before the value product, and an operator need not.
ATTENTION_REL_L2 = 6e-3
LIMIT = 10.0
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """`call` and `reference` take the arrays of `make` and give an array; rel_l2 None asks for equal bits."""

    name: str
    target: str
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    call: Callable[..., Any]
    reference: Callable[..., Array]
    rel_l2: float | None


def run_staged(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """The function under jit on arrays of the host."""
    return jax.jit(function)(*arrays)


def run_resident(bridge: Bridge, function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """The function under jit on copies of the arrays in device memory; everything is freed afterwards.

    A device array that the function writes in place is freed through what the function returns.
    """
    placed = jax.tree.map(bridge.put, arrays)
    made = jax.jit(function)(*placed)
    fetched = jax.tree.map(bridge.get, made, is_leaf=_is_device_array)
    bridge.end_step(made)
    slots = {int(array.words[2]): array for array in jax.tree.leaves((placed, made), is_leaf=_is_device_array)}
    for slot in {int(array.words[2]) for array in jax.tree.leaves(placed, is_leaf=_is_device_array)}:
        bridge.release(slots[slot])
    return fetched


def _is_device_array(leaf: Any) -> bool:
    return isinstance(leaf, DeviceArray)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _norm_inputs(shape: tuple[int, ...], dtype: Any) -> Callable[[np.random.Generator], tuple[Array, Array]]:
    return lambda rng: (_normal(rng, shape, dtype), _normal(rng, shape[-1:], jnp.float32))


def _norm_case(name: str, shape: tuple[int, ...], dtype: Any, rel_l2: float) -> Case:
    return Case(
        name=name,
        target=rms_norm.TARGET,
        make=_norm_inputs(shape, dtype),
        call=lambda x, w: rms_norm.rms_norm(x, w, eps=EPS),
        reference=lambda x, w: norm.rms_norm(x, w, eps=EPS),
        rel_l2=rel_l2,
    )


def _linear_case(name: str, dtype: Any, rel_l2: float) -> Case:
    return Case(
        name=name,
        target=linear.LINEAR,
        make=lambda rng: (_normal(rng, (5, 96), dtype), _normal(rng, (7, 96), dtype)),
        call=linear.linear,
        reference=linear_ops.linear,
        rel_l2=rel_l2,
    )


def _rows_of_all_sizes(rng: np.random.Generator) -> tuple[Array]:
    """Rows from 2^-20 to 2^20, one of zeros, and one whose largest value stands exactly at a step of the scale."""
    x = _normal(rng, (7, 128)) * jnp.exp2(jnp.linspace(-20, 20, 7)).astype(jnp.bfloat16)[:, None]
    return (x.at[2].set(0).at[3, :32].set(448.0),)


def _quantised(rows: quant.ScaledArray) -> tuple[Array, Array]:
    assert rows.scale is not None
    return rows.payload, rows.scale.reshape(rows.scale.shape[0], -1, 2)


def _packed_linear_inputs(rng: np.random.Generator) -> tuple[Array, linear.MxWeight, Array, Array]:
    """Also the checkpoint's codes and scale, which the reference uses."""
    codes = quant.quantize_fp8(_normal(rng, (96, 128), jnp.float32)).payload
    scale = jnp.asarray(rng.integers(120, 130, (3, 4)), jnp.uint8)
    w = quant.ScaledArray(payload=codes, scale=scale, form="fp8", block=(32, 32))
    return _normal(rng, (3, 128)), linear.pack_weight(w), codes, scale


def _packed_linear(x: Array, packed: linear.MxWeight, codes: Array, scale: Array) -> Array:
    w = quant.ScaledArray(payload=codes, scale=scale, form="fp8", block=(32, 32))
    return linear_ops.linear(quant.fp8_roundtrip(x), w)


def _rotation(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    cos, sin = rope_ops.angles(jnp.arange(4) * 1000, rope_ops.frequencies(16, 10000.0, None))
    return (_normal(rng, (4, 3, 24)), *rope.expand_angles(cos, sin, inverse=bool(rng.integers(2))))


def _gate_up(rng: np.random.Generator) -> tuple[Array, Array]:
    return _normal(rng, (3, 1024)) * 8, _normal(rng, (3,), jnp.float32)


def _scattered(dtype: Any) -> Callable[[np.random.Generator], tuple[Array, Array, Array]]:
    def make(rng: np.random.Generator) -> tuple[Array, Array, Array]:
        cache, rows = rng.integers(0, 200, (9, 16)), rng.integers(0, 200, (3, 16))
        return jnp.asarray(cache, dtype), jnp.asarray([8, 0, 4], jnp.int32), jnp.asarray(rows, dtype)

    return make


def _scatter_case(name: str, dtype: Any) -> Case:
    return Case(
        name=name,
        target=scatter_rows.TARGET,
        make=_scattered(dtype),
        call=scatter_rows.scatter_rows,
        reference=lambda cache, index, rows: paged.put_array(cache[None], rows, 0, index)[0],
        rel_l2=None,
    )


def _routing(rng: np.random.Generator) -> tuple[Array, Array]:
    return _normal(rng, (5, 12), jnp.float32) * 4, _normal(rng, (12,), jnp.float32)


def _chosen(logits: Array, bias: Array) -> Array:
    return moe.choose_experts(jnp.sqrt(jax.nn.softplus(logits)), bias[None], count=3)


def _expert_inputs(rng: np.random.Generator) -> tuple[Any, ...]:
    """Groups of 3, 0 and 2 rows, and one row behind them; last the plain rows and weights for the reference."""
    payload = jnp.asarray(rng.integers(0, 256, (3, 48, 64)), jnp.uint8)
    scale = jnp.asarray(rng.integers(120, 130, (3, 48, 4)), jnp.uint8)
    weights = quant.ScaledArray(payload=payload, scale=scale, form="fp4", block=(1, 32))
    rows = quant.quantize_fp8(_normal(rng, (6, 128)))
    plain, dense = quant.dequantize(rows, jnp.float32), quant.dequantize(weights, jnp.float32)
    counts = experts.count_words(jnp.asarray([3, 0, 2], jnp.int32))
    return *_quantised(rows), experts.pack_experts(weights), counts, plain, dense


def _expert_reference(codes: Array, scale: Array, packed: Any, counts: Array, plain: Array, dense: Array) -> Array:
    products = [plain[i] @ dense[e].T for i, e in enumerate((0, 0, 0, 2, 2))]
    return jnp.stack([*products, jnp.zeros_like(products[0])]).astype(jnp.bfloat16)


def _index_inputs(rng: np.random.Generator) -> tuple[Any, ...]:
    """Rows with 20, 3 and no keys."""
    queries, keys = (quant.quantize_index(_normal(rng, (3, n, 128), jnp.float32)) for n in (4, 20))
    weights, lengths = _normal(rng, (3, 4), jnp.float32), jnp.asarray([20, 3, 0], jnp.int32)
    return indexer.pack_rows(queries), weights, indexer.pack_rows(keys), lengths


def _index_best(queries: Any, weights: Array, keys: Any, lengths: Array) -> tuple[Array, Array]:
    """The five best places and their scores, best first."""
    rows, dense = (
        quant.dequantize(
            quant.ScaledArray(payload=p, scale=s.reshape(3, -1, 4), form="fp4", block=(1, 32)), jnp.float32
        )
        for p, s in (queries, keys)
    )
    scores = indexer_ops.score_block(rows, weights, dense)
    is_there = jnp.arange(scores.shape[1])[None] < lengths[:, None]
    best, places = jax.lax.top_k(jnp.where(is_there, scores, -jnp.inf), 5)
    return jnp.where(jnp.isinf(best), -1, places), best


def _index_case(name: str, which: int, rel_l2: float | None) -> Case:
    return Case(
        name=name,
        target=indexer.TARGET,
        make=_index_inputs,
        call=lambda q, w, k, n: indexer.best_keys(q, w, k, n, count=5)[which],
        reference=lambda q, w, k, n: _index_best(q, w, k, n)[which],
        rel_l2=rel_l2,
    )


def _attention_inputs(num_selected: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        q, keys = _normal(rng, (3, 4, 512)), _normal(rng, (3, 6, 512))
        window = (q, keys, jnp.asarray([6, 1, 4], jnp.int32), _normal(rng, (4,), jnp.float32))
        chosen = (_normal(rng, (3, num_selected, 512)), jnp.asarray([0, 5, 2], jnp.int32))
        return (*window, chosen) if num_selected else window

    return make


def _attention_reference(
    q: Array, keys: Array, lengths: Array, sink: Array, selected: tuple[Array, Array] | None = None
) -> Array:
    segments = [(keys, lengths), *([selected] if selected else [])]
    blocks = [(lambda _, k=k, n=n: (k, jnp.arange(k.shape[1])[None] < n[:, None]), 1) for k, n in segments]
    return attention_ops.attend_blocks(q, blocks, sink)


def _attention_case(name: str, num_selected: int) -> Case:
    return Case(
        name=name,
        target=attention.TARGET,
        make=_attention_inputs(num_selected),
        call=attention.attend,
        reference=_attention_reference,
        rel_l2=ATTENTION_REL_L2,
    )


CASES: tuple[Case, ...] = (
    _norm_case("rms_norm-bf16", (3, 5, 72), jnp.bfloat16, BF16_REL_L2),
    _norm_case("rms_norm-f32", (3, 72), jnp.float32, F32_REL_L2),
    _norm_case("rms_norm-one_row", (1, 128), jnp.bfloat16, BF16_REL_L2),
    _norm_case("rms_norm-no_row", (0, 64), jnp.bfloat16, BF16_REL_L2),
    _linear_case("linear-bf16", jnp.bfloat16, BF16_REL_L2),
    _linear_case("linear-f32", jnp.float32, F32_REL_L2),
    Case(
        name="quantize_fp8-codes",
        target=linear.QUANTIZE_MXFP8,
        make=_rows_of_all_sizes,
        call=lambda x: linear.quantize_fp8(x)[0],
        reference=lambda x: _quantised(quant.quantize_fp8(x))[0],
        rel_l2=None,
    ),
    Case(
        name="quantize_fp8-scales",
        target=linear.QUANTIZE_MXFP8,
        make=_rows_of_all_sizes,
        call=lambda x: linear.quantize_fp8(x)[1],
        reference=lambda x: _quantised(quant.quantize_fp8(x))[1],
        rel_l2=None,
    ),
    Case(
        name="linear-packed",
        target=linear.LINEAR_MXFP8,
        make=_packed_linear_inputs,
        call=lambda x, packed, codes, scale: linear.linear(x, packed),
        reference=_packed_linear,
        rel_l2=BF16_REL_L2,
    ),
    Case(
        name="rotate",
        target=rope.TARGET,
        make=_rotation,
        call=rope.rotate,
        reference=lambda x, cos, sin: rope_ops.rotate(x, cos[:, ::2], sin[:, ::2]),
        rel_l2=BF16_REL_L2,
    ),
    Case(
        name="swiglu",
        target=swiglu.TARGET,
        make=_gate_up,
        call=lambda x, w: swiglu.swiglu(x, w, limit=LIMIT)[2],
        reference=lambda x, w: moe.swiglu(x[:, :512], x[:, 512:], w, limit=LIMIT),
        rel_l2=BF16_REL_L2,
    ),
    Case(
        name="router-ids",
        target=router.TARGET,
        make=_routing,
        call=lambda logits, bias: router.choose_experts(logits, bias, count=3, scaling=1.5)[1],
        reference=_chosen,
        rel_l2=None,
    ),
    Case(
        name="router-weights",
        target=router.TARGET,
        make=_routing,
        call=lambda logits, bias: router.choose_experts(logits, bias, count=3, scaling=1.5)[0],
        reference=lambda logits, bias: moe.expert_weights(
            jnp.sqrt(jax.nn.softplus(logits)), _chosen(logits, bias), scaling=1.5
        ),
        rel_l2=F32_REL_L2,
    ),
    _scatter_case("scatter_rows-bytes", jnp.uint8),
    _scatter_case("scatter_rows-bf16", jnp.bfloat16),
    Case(
        name="expert_products",
        target=experts.TARGET,
        make=_expert_inputs,
        call=lambda codes, scale, packed, counts, plain, dense: experts.expert_products(codes, scale, packed, counts),
        reference=_expert_reference,
        rel_l2=BF16_REL_L2,
    ),
    _index_case("best_keys-places", 0, None),
    _index_case("best_keys-scores", 1, BF16_REL_L2),
    _attention_case("attend-window", 0),
    _attention_case("attend-selected", 5),
)
