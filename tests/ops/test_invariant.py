"""A row's bits do not depend on how many rows there are, nor on its place among them.

Every product shape of the tiny and of the released configuration runs as the model runs it, in tiles of 8 rows, and
the first 8 rows are compared over M = 8..512; then the row sums, norms, softmaxes and mHC mixes between products.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.ops import hyper, invariant, moe
from deepinfer_jax.ops.invariant import map_rows, ordered_sum, repeat, round_to, row_product
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import fp8_roundtrip
from deepinfer_jax.testing import compare

ROOT = Path(__file__).parent.parent.parent
TILE = 8
SAMPLED_ROWS = (8, 16, 24, 64, 200, 512)
MANY_ROWS = (*range(8, 25), 32, 40, 63, 64, 65, 72, 100, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512)
# Output rows in the default run. The full head, 129,280 x 5,120 in float32, takes 2.6 GB; Engram's wkv is five
# projections of this height. The slow tests run both in full.
SAMPLED_OUTPUTS = {"head": 4096, "engram wkv": 5120}
# A float32 sum of up to 20,480 products in blocks: far below the 6e-4 of a bf16 accumulator.
PRODUCT_REL_L2 = 2e-6
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

exact_compile = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def product_shapes(c: ModelConfig) -> dict[str, tuple[int, int, np.dtype]]:
    """(N, K, dtype of the operands) of every dense product of the text network, as policy `q` runs it."""
    group_width = c.num_attention_heads // c.o_groups * c.head_dim
    return {
        "wq_a": (c.q_lora_rank, c.hidden_size, BF16),
        "wq_b": (c.num_attention_heads * c.head_dim, c.q_lora_rank, BF16),
        "wkv": (c.head_dim, c.hidden_size, BF16),
        "wo_a group": (c.o_lora_rank, group_width, BF16),
        "wo_b": (c.hidden_size, c.o_groups * c.o_lora_rank, BF16),
        "compressor r1": (c.head_dim, c.hidden_size, BF16),
        "compressor r2 pair": (2 * c.head_dim, c.hidden_size, F32),
        "indexer wq_b": (c.index_n_heads * c.index_head_dim, c.q_lora_rank, BF16),
        "indexer weights_proj": (c.index_n_heads, c.hidden_size, BF16),
        "indexer wk": (c.index_head_dim, c.head_dim, BF16),
        "router": (c.n_routed_experts, c.hidden_size, F32),
        "mHC": (c.hc_mult * (2 + c.hc_mult), c.hc_mult * c.hidden_size, F32),
        "expert w1, w3": (c.moe_intermediate_size, c.hidden_size, BF16),
        "expert w2": (c.hidden_size, c.moe_intermediate_size, BF16),
        "engram wkv": ((c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim, BF16),
        "head": (c.vocab_size, c.hidden_size, F32),
    }


FLASH = product_shapes(load_config(ROOT / "configs" / "model" / "deepseek-v4.1-flash.json"))
ALL_TINY = product_shapes(load_config(ROOT / "tests" / "data" / "tiny_a" / "config.json"))
# Many products of the tiny model have one shape; each shape is tested once, under its last name.
TINY = {name: shape for shape, name in {shape: name for name, shape in ALL_TINY.items()}.items()}


@exact_compile
def tiled_products(x: dict[str, jax.Array], w: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One product for each name."""
    return {name: map_rows(lambda rows, w=w[name]: row_product(rows, w), x[name], tile=TILE) for name in w}


@functools.cache
def stock(seed: int, dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(1_000_003, np.float32).astype(dtype)


def random(seed: int, rows: int, cols: int, dtype: Any) -> jax.Array:
    """Normal values, repeated from a stock whose size is a prime, so that no two rows are alike."""
    return jnp.asarray(np.resize(stock(seed, dtype), (rows, cols)))


def assert_first_rows_alike(shapes: dict[str, tuple[int, int, np.dtype]], row_counts: tuple[int, ...]) -> None:
    w = {name: random(1, width, depth, dtype) for name, (width, depth, dtype) in shapes.items()}
    x = {name: random(2, max(row_counts), depth, dtype) for name, (_, depth, dtype) in shapes.items()}
    first = rows_of(tiled_products(jax.tree.map(lambda a: a[:TILE], x), w), 0)
    for name in shapes:
        exact = np.asarray(x[name][:TILE]).astype(np.float64) @ np.asarray(w[name][:64]).astype(np.float64).T
        compare.assert_close(first[name][:, :64], exact, rel_l2=PRODUCT_REL_L2)
    for rows in row_counts:
        made = tiled_products({name: a[:rows] for name, a in x.items()}, w)
        compare.assert_bitwise(rows_of(made, 0), first)


def rows_of(results: Any, start: int) -> Any:
    return jax.tree.map(lambda a: np.asarray(a[start : start + TILE]), results)


@pytest.mark.parametrize("name", FLASH)
def test_flash_product_rows_do_not_depend_on_the_batch(name: str):
    width, depth, dtype = FLASH[name]
    assert_first_rows_alike({name: (SAMPLED_OUTPUTS.get(name, width), depth, dtype)}, SAMPLED_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLASH)
def test_flash_product_rows_do_not_depend_on_the_batch_at_more_sizes(name: str):
    row_counts = (8, 16, 512) if name in SAMPLED_OUTPUTS else MANY_ROWS
    assert_first_rows_alike({name: FLASH[name]}, row_counts)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_tiny_product_rows_do_not_depend_on_the_batch(dtype: np.dtype):
    """In both dtypes, since the fp32 policies run every product in float32."""
    assert_first_rows_alike({name: (*shape[:2], dtype) for name, shape in TINY.items()}, SAMPLED_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_tiny_product_rows_do_not_depend_on_the_batch_at_more_sizes(dtype: np.dtype):
    assert_first_rows_alike({name: (*shape[:2], dtype) for name, shape in TINY.items()}, MANY_ROWS)


def softmax(x: jax.Array) -> jax.Array:
    raised = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return raised / jnp.sum(raised, axis=-1, keepdims=True)


def mixed(x: jax.Array) -> Any:
    """mHC coefficients of rows as streams, then collapse and expansion with them."""
    streams = x.reshape(-1, 4, x.shape[1] // 4)
    fn = random(3, 24, x.shape[1], F32)
    mix = hyper.coefficients(streams, fn, jnp.ones(3), jnp.zeros(24), iterations=20, eps=1e-6)
    collapsed = hyper.collapse(streams.astype(BF16), mix.pre)
    return mix, collapsed, hyper.expand(collapsed, streams.astype(BF16), mix)


def projected(x: jax.Array) -> jax.Array:
    """A section as the model has them: norm, quantiser, product, rounding."""
    w = random(4, 96, x.shape[1], BF16)
    normed = rms_norm(x.astype(BF16), jnp.ones(x.shape[1], BF16), eps=1e-20)
    return round_to(row_product(fp8_roundtrip(normed), w), BF16)


def routed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores = moe.router_scores(x, random(5, 24, x.shape[1], F32))
    ids = moe.choose_experts(scores, jnp.zeros((1, 24)), count=6)
    return ids, moe.expert_weights(scores, ids, scaling=1.5)


SECTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "row sum": lambda x: jnp.sum(x, axis=-1),
    "mean square": lambda x: jnp.mean(x * x, axis=-1),
    "norm": lambda x: rms_norm(x, jnp.ones(x.shape[1]), eps=1e-20),
    "softmax": softmax,
    "mHC": mixed,
    "Sinkhorn": lambda x: hyper.sinkhorn(x[:, :16].reshape(-1, 4, 4), iterations=20, eps=1e-6),
    "norm, quantiser, product": projected,
    "router": routed,
}


@pytest.mark.parametrize("width", [64, 5120], ids=["tiny", "model"])
def test_section_rows_depend_on_neither_count_nor_place(width: int):
    """8 rows alone, at the head of two and three tiles, and at other places of the batch."""
    run = exact_compile(lambda x: {name: map_rows(section, x, tile=TILE) for name, section in SECTIONS.items()})
    x = random(6, 24, width, F32)
    alone = rows_of(run(x[:8]), 0)
    for rows in (9, 24):
        compare.assert_bitwise(rows_of(run(x[:rows]), 0), alone)
    for shift in (1, 3, 8, 13):
        compare.assert_bitwise(rows_of(run(jnp.roll(x, shift, axis=0)), shift), alone)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 23])
def test_map_rows_gives_every_row_once_and_no_filling(rows: int):
    tree = {"a": jnp.arange(rows * 3, dtype=jnp.float32).reshape(rows, 3), "b": jnp.arange(rows, dtype=jnp.int32)}
    made = map_rows(lambda t: (t["a"] * 2, t["b"] + 1), tree, tile=TILE)
    compare.assert_bitwise(made, (np.asarray(tree["a"]) * 2, np.asarray(tree["b"]) + 1))


def test_map_rows_fills_the_last_tile_with_zeros():
    def count(x: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.full(8, jnp.sum(x) + jnp.sum(b, dtype=jnp.float32))

    seen = map_rows(count, jnp.ones(9), jnp.ones(9, bool), tile=8)
    compare.assert_bitwise(seen, np.float32([16] * 8 + [2]))


def test_map_rows_without_a_tile_is_one_call():
    compare.assert_bitwise(
        map_rows(lambda x: x.shape[0] + x, jnp.arange(5), tile=None), np.arange(5, 10, dtype=np.int32)
    )


@pytest.mark.parametrize("has_fixed_trips", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_repeat_counts_from_zero(count: int, has_fixed_trips: bool):
    made = repeat(count, lambda i, c: c * 10 + i + 1, jnp.int32(0), has_fixed_trips=has_fixed_trips)
    assert int(made) == int("0" + "12345"[:count])


def test_repeat_takes_a_count_that_is_known_on_the_device_only():
    run = jax.jit(lambda count: repeat(count, lambda i, c: c + i, jnp.int32(0)))
    assert [int(run(jnp.int32(n))) for n in (0, 1, 4)] == [0, 0, 6]


def test_tiles_are_differentiable_with_fixed_trips():
    grad = jax.grad(lambda x: map_rows(lambda rows: rows**2, x, tile=TILE, has_fixed_trips=True).sum())(jnp.arange(9.0))
    compare.assert_bitwise(grad, 2 * np.arange(9, dtype=np.float32))


def test_ordered_sum_adds_left_to_right():
    terms = [jnp.float32(v) for v in (1e8, 1.0, -1e8, 1.0)]
    assert float(ordered_sum(terms)) == 1.0


def test_rounding_survives_a_compiler_that_keeps_excess_precision():
    x = jnp.asarray([1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9, 1e-3], jnp.float32)
    loose = jax.jit(
        lambda x: invariant.round_to(x, BF16).astype(F32), compiler_options={"xla_allow_excess_precision": True}
    )
    compare.assert_bitwise(loose(x), np.asarray(x.astype(BF16)).astype(np.float32))
    compare.assert_bitwise(round_to(x, F32), x)


def test_the_function_of_a_tile_is_traced_once():
    calls = []

    def doubled(rows: jax.Array) -> jax.Array:
        calls.append(rows.shape)
        return rows * scale

    x = jnp.arange(40.0).reshape(20, 2)
    scale = jnp.float32(2)  # closed over, as weights are
    np.testing.assert_array_equal(map_rows(doubled, x, tile=TILE), 2 * x)
    jax.jit(lambda x: map_rows(doubled, x, tile=TILE)).lower(x)
    assert calls == [(TILE, 2)] * 2  # once in each program


@pytest.mark.parametrize("rows", [1, 5, TILE, TILE + 1, 3 * TILE])
def test_a_single_tile_may_stand_without_a_loop(rows):
    x = jax.random.normal(jax.random.key(rows), (rows, 16), jnp.float32)

    def run(x: jax.Array, *, loops_one: bool) -> jax.Array:
        def fn(part: jax.Array) -> jax.Array:
            assert part.shape[0] == TILE
            return row_product(part, jnp.ones((4, 16), jnp.float32))

        return map_rows(fn, x, tile=TILE, num_live=jnp.int32(rows), loops_one=loops_one)

    alone, looped = (jax.jit(functools.partial(run, loops_one=loops_one)) for loops_one in (False, True))
    np.testing.assert_array_equal(alone(x), looped(x))
    text = alone.lower(x).as_text()
    assert ("stablehlo.while" in text) == (rows > TILE)
    assert text.count("stablehlo.optimization_barrier") == 2 + (rows > TILE)  # and the loop's count
