"""The blocked softmax against recorded outputs and an exact softmax, and its missing keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops.attention import KEY_BLOCK, attend_blocks
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.testing import compare

# Float32 scores, exponentials and sums in another order.
F32_REL_L2 = 5e-7
# The recording is rounded to bf16: 2^-9 relative at worst, about 1.7e-3 in norm for even mantissas.
BF16_OUTPUT_REL_L2 = 2e-3
# Exponentials and sums one ulp off turn over about 80 of 65,536 bf16 values, which is 9e-5 in norm.
BF16_ULP_REL_L2 = 3e-4
# Probabilities rounded to bf16 (2^-9 relative each) and one rounding of the output (spec: backbone U19).
BF16_REL_L2 = 2.0**-8


def attend_list(q: jax.Array, kv: jax.Array, idxs: jax.Array, sink: jax.Array, *, fixed: bool = False) -> jax.Array:
    """Rows of q over the rows of kv that idxs lists, 64 at a time; -1 is no key."""
    num_blocks = -(-idxs.shape[1] // KEY_BLOCK)
    idxs = jnp.pad(idxs, ((0, 0), (0, num_blocks * KEY_BLOCK - idxs.shape[1])), constant_values=-1)

    def load(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = jax.lax.dynamic_slice_in_dim(idxs, block * KEY_BLOCK, KEY_BLOCK, axis=1)
        exists = here >= 0
        return jnp.where(exists[..., None], kv[jnp.maximum(here, 0)], jnp.zeros((), kv.dtype)), exists

    return attend_blocks(q, [(load, num_blocks)] if num_blocks else [], sink, has_fixed_trips=fixed)


def plain_softmax(q: np.ndarray, kv: np.ndarray, idxs: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """In float64, with the sink in the denominator."""
    q64, kv64 = q.astype(np.float64), kv.astype(np.float64)
    out = np.zeros(q.shape)
    for row in range(len(q)):
        keys = kv64[idxs[row][idxs[row] >= 0]]
        if len(keys):
            scores = q64[row] @ keys.T * q.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            total = weights.sum(axis=-1) + np.exp(sink - scores.max(axis=-1))
            out[row] = weights @ keys / total[:, None]
    return out


@pytest.fixture
def run(exact_jit) -> Callable[..., np.ndarray]:
    compiled = exact_jit(attend_list, static_argnames="fixed")
    return lambda *args, **kwargs: np.asarray(compiled(*args, **kwargs))


@pytest.mark.parametrize("request_index", [0, 1])
def test_recorded_bf16_attention_is_bit_equal(component, run, request_index: int):
    fixture = component("sparse_attn")
    made = run(*(fixture[name][request_index] for name in ("q", "kv", "idxs")), fixture["sink"])
    compare.assert_bitwise(made, fixture["out_bf16"][request_index])


@pytest.mark.parametrize("request_index", [0, 1])
def test_recorded_float32_attention_is_met(component, run, request_index: int):
    fixture = component("sparse_attn")
    q, kv = (fixture[name][request_index].astype(np.float32) for name in ("q", "kv"))
    made = run(q, kv, fixture["idxs"][request_index], fixture["sink"])
    compare.assert_close(made, fixture["out_fp32"][request_index], rel_l2=F32_REL_L2)


def test_recorded_attention_of_the_released_size_is_met(component, run):
    fixture = component("sparse_attn_real")
    q, kv, idxs, sink = fixture["q"][0], fixture["kv"][0], fixture["idxs"][0], fixture["sink"]
    compare.assert_close(run(q, kv, idxs, sink), fixture["out_bf16"][0], rel_l2=BF16_ULP_REL_L2)
    wide = run(q.astype(np.float32), kv.astype(np.float32), idxs, sink)
    compare.assert_close(wide, fixture["out_fp32"][0], rel_l2=BF16_OUTPUT_REL_L2)
    compare.assert_close(wide, plain_softmax(q, kv, idxs, sink), rel_l2=F32_REL_L2)


def arrays(rows: int, keys: int, listed: int, *, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, 4, 32), np.float32) * 2
    kv = rng.standard_normal((keys, 32), np.float32)
    idxs = np.stack([rng.permutation(keys)[:listed] for _ in range(rows)] or [np.zeros(listed)]).astype(np.int32)
    return q, kv, idxs[:rows], rng.standard_normal(4).astype(np.float32)


@pytest.mark.parametrize("dtype, rel_l2", [(np.float32, F32_REL_L2), (ml_dtypes.bfloat16, BF16_REL_L2)])
@pytest.mark.parametrize("listed", [1, 63, 64, 65, 200])
def test_equals_an_exact_softmax(run, listed: int, dtype, rel_l2: float):
    q, kv, idxs, sink = arrays(5, 300, listed)
    q, kv = q.astype(dtype), kv.astype(dtype)
    idxs[1, ::2] = -1
    compare.assert_close(run(q, kv, idxs, sink), plain_softmax(q, kv, idxs, sink), rel_l2=rel_l2)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_row_without_keys_is_zero_whatever_its_neighbours_do(run, dtype):
    q, kv, idxs, sink = arrays(3, 100, 80)
    idxs[1] = -1
    made = run(q.astype(dtype), kv.astype(dtype), idxs, sink)
    compare.assert_bitwise(made[1], np.zeros((4, 32), dtype))
    assert np.all(np.any(made[[0, 2]] != 0, axis=-1))


def test_missing_keys_change_no_bit(run):
    """Trailing -1 entries, up to whole blocks of them, are as if the list ended before."""
    q, kv, idxs, sink = arrays(3, 100, 70)
    short = run(q, kv, idxs, sink)
    for extra in (1, 58, 200):
        longer = np.pad(idxs, ((0, 0), (0, extra)), constant_values=-1)
        compare.assert_bitwise(run(q, kv, longer, sink), short)


def test_leading_block_without_keys_changes_no_bit(run):
    """The running maximum starts at -1e30: a first block of nothing leaves no trace."""
    q, kv, idxs, sink = arrays(3, 100, 70)
    later = np.pad(idxs, ((0, 0), (KEY_BLOCK, 0)), constant_values=-1)
    compare.assert_bitwise(run(q, kv, later, sink), run(q, kv, idxs, sink))


def test_sink_is_unscaled_and_takes_its_share_of_the_denominator(run):
    q, kv = np.zeros((1, 2, 32), np.float32), np.ones((1, 32), np.float32)
    made = run(q, kv, np.zeros((1, 1), np.int32), np.float32([0.0, np.log(3.0)]))
    want = np.broadcast_to(np.float32([[[0.5], [0.25]]]), made.shape)
    compare.assert_close(made, want, rel_l2=F32_REL_L2)


def test_equal_keys_may_be_listed_twice(run):
    """A recent token counts as window key and as selected entry: both weigh."""
    q, kv, _, sink = arrays(2, 4, 1)
    twice = np.asarray([[1, 2, 1], [0, 0, 0]], np.int32)
    compare.assert_close(run(q, kv, twice, sink), plain_softmax(q, kv, twice, sink), rel_l2=F32_REL_L2)


def test_segments_continue_one_softmax(exact_jit):
    """Two segments of one and two blocks give the bits of one segment of three."""
    q, kv, idxs, sink = (jnp.asarray(a) for a in arrays(3, 300, 3 * KEY_BLOCK))

    def load_from(first: int):
        def load(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            here = jax.lax.dynamic_slice_in_dim(idxs, (first + block) * KEY_BLOCK, KEY_BLOCK, axis=1)
            return kv[here], here >= 0

        return load

    whole = exact_jit(lambda q: attend_blocks(q, [(load_from(0), 3)], sink))(q)
    parts = exact_jit(lambda q: attend_blocks(q, [(load_from(0), 1), (load_from(1), 2)], sink))(q)
    compare.assert_bitwise(parts, whole)


def test_fixed_trips_give_the_same_values_and_a_gradient(run):
    q, kv, idxs, sink = (jnp.asarray(a) for a in arrays(2, 200, 130))
    compare.assert_close(run(q, kv, idxs, sink, fixed=True), run(q, kv, idxs, sink), rel_l2=F32_REL_L2)
    gradient = jax.jit(jax.grad(lambda q: attend_list(q, kv, idxs, sink, fixed=True).sum()))(q)
    assert np.all(np.isfinite(gradient)) and np.any(np.asarray(gradient) != 0)


def test_bits_of_a_row_do_not_depend_on_its_place(exact_jit):
    """Under fixed tiles of 8 rows, as the model runs it."""
    q, kv, idxs, sink = (jnp.asarray(a) for a in arrays(40, 300, 140))
    tiled = exact_jit(lambda q, idxs: map_rows(lambda q, i: attend_list(q, kv, i, sink), q, idxs, tile=8))
    first = np.asarray(tiled(q[:8], idxs[:8]))
    order = np.random.default_rng(1).permutation(40)
    moved = np.asarray(tiled(q[order], idxs[order]))[np.argsort(order)]
    compare.assert_bitwise(moved[:8], first)


def test_no_rows_and_no_keys_have_empty_results(run):
    q, kv, idxs, sink = arrays(0, 10, 5)
    assert run(q, kv, idxs, sink).shape == (0, 4, 32)
    q, kv, idxs, sink = arrays(2, 10, 5)
    compare.assert_bitwise(run(q, kv, idxs[:, :0], sink), np.zeros((2, 4, 32), np.float32))
