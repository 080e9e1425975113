"""The routed experts of decode steps for SM90 and SM100, interpreted on the CPU with race detection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.kernels import fp4_codes
from deepinfer_jax.kernels.experts import cases, left_sm100, mosaic_sm90, mosaic_sm100, packed
from deepinfer_jax.kernels.experts.mosaic_sm90 import KernelTiling, Tiling
from deepinfer_jax.kernels.experts.rows import column_order, folded_rows, natural_order
from deepinfer_jax.kernels.experts.schedule import make_schedule
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_fp8
from deepinfer_jax.parallel.mesh import make_mesh
from deepinfer_jax.testing import compare

# Sums over groups of 32 columns in another order, rounded to bfloat16 once; no hidden value of these cases lies so near
# to the middle of two E4M3 codes that it takes the other one.
REL_L2 = 1e-3
WIDTH, INNER, NUM_EXPERTS = 256, 256, 3
ONE = KernelTiling(warpgroups=4, registers=112, at_once=1, most_stages=2)  # so that the ring goes round
TILING = Tiling(row_tile=16, up=ONE, down=ONE)
TILING_SM100 = mosaic_sm100.Tiling(row_tile=16, most_stages=2, most_lefts=2)
KERNELS = {
    "sm90": functools.partial(mosaic_sm90.routed_experts, tiling=TILING),
    "sm100": functools.partial(mosaic_sm100.routed_experts, tiling=TILING_SM100),
}

IDS = {
    "mixed": ([[0, 2], [2, -1], [0, 1], [2, 0]], [1, 1, 0, 1]),
    "one row": ([[1, 0]], [1]),
    "one expert has all": ([[1]] * 19, [1] * 19),
    "whole tiles": ([[0]] * 16 + [[2]] * 8, [1] * 24),
    "nobody": ([[-1, 0]], [0]),
}

on_both = pytest.mark.parametrize("name", KERNELS)


@functools.cache
def kernel(name: str = "sm90", num_sms: int = 1) -> jax.stages.Wrapped:
    run = functools.partial(
        KERNELS[name],
        limit=cases.LIMIT,
        num_sms=num_sms,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def make(ids: list[list[int]], is_live: list[int], seed: int = 0) -> list:
    array = np.asarray(ids, np.int32)
    inputs = cases.make_inputs(jax.random.key(seed), array, width=WIDTH, inner=INNER, num_experts=NUM_EXPERTS)
    return [*inputs[:3], jnp.asarray(is_live, jnp.bool_), *inputs[4:]]


@on_both
@pytest.mark.parametrize(
    "ids", ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in IDS if name != "mixed")]
)
def test_matches_reference(name, ids, capfd):
    inputs = make(*IDS[ids])
    # Threads of the interpreter call JAX, which may wait for ever while operations of the reference are dispatched too.
    got = jax.block_until_ready(kernel(name)(*inputs))
    want = cases.reference(*inputs, tile=8)
    if ids == "nobody":
        compare.assert_bitwise(got, want)
    else:
        compare.assert_close(got, want, rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name, num_sms", [("sm90", 2), ("sm100", 1), pytest.param("sm100", 2, marks=pytest.mark.slow)])
def test_row_does_not_depend_on_others(name, num_sms):
    ids, is_live = IDS["mixed"]
    inputs = make(ids, is_live)
    both = kernel(name, num_sms)(*inputs)
    alone = kernel(name)(*inputs[:3], jnp.asarray([0, 0, 0, 1], jnp.bool_), *inputs[4:])
    compare.assert_bitwise(alone[3], both[3])
    assert not np.asarray(alone[:3]).any()


@on_both
@pytest.mark.slow
def test_row_does_not_depend_on_how_many_share_its_expert(name):
    ids, is_live = IDS["one expert has all"]
    inputs = make(ids, is_live)
    together = kernel(name)(*inputs)
    alone = kernel(name)(*inputs[:3], jnp.arange(len(ids)) == 5, *inputs[4:])
    compare.assert_bitwise(alone[5], together[5])


@on_both
@pytest.mark.slow
def test_layer_of_a_stack_is_read_in_place(name):
    ids, is_live = IDS["mixed"]
    first, second = make(ids, is_live), make(ids, is_live, seed=1)
    stacked = [jax.tree.map(lambda a, b: jnp.stack([a, b]), *pair) for pair in zip(first[4:], second[4:], strict=True)]
    got = kernel(name)(*second[:4], *stacked, layer=jnp.int32(1))
    compare.assert_bitwise(got, kernel(name)(*second))


@on_both
@pytest.mark.slow
def test_weights_are_packed_in_a_call_that_is_given_others(name):
    ids, is_live = IDS["mixed"]
    inputs = make(ids, is_live)
    plain = [packed.unpacked(w) for w in inputs[4:]]
    compare.assert_bitwise(kernel(name)(*inputs[:4], *plain), kernel(name)(*inputs))


def test_a_mesh_packs_its_pieces_where_they_are():
    w = cases.random_experts(jax.random.key(3), 32, 512, num_experts=16)
    w = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), w)  # of two layers
    want = packed.pack_experts(w)
    pieces = NamedSharding(make_mesh(4, 2), P(None, ("dp", "cp")))
    found = jax.jit(packed.pack_experts, donate_argnums=0)(jax.device_put(w, pieces))
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert {shard.data.shape[:2] for shard in leaf.addressable_shards} == {(2, 2)}
        np.testing.assert_array_equal(leaf, wanted)


def test_packed_weights_are_unpacked_exactly():
    w = cases.random_experts(jax.random.key(0), 64, 512, num_experts=2)
    layers = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), w)
    for given in (w, layers):
        arranged = packed.pack_experts(given)
        assert not np.array_equal(arranged.payload, given.payload)
        found = packed.unpacked(arranged)
        compare.assert_bitwise(found.payload, given.payload)
        compare.assert_bitwise(found.scale, given.scale)


@pytest.mark.parametrize("span", [27, 40])
def test_codes_of_weights_times_row_scales_are_the_weights(span):
    """Of 27 neighbouring scales exactly; smaller ones are raised to the least of these."""
    w = cases.random_experts(jax.random.key(1), 64, 256, num_experts=1)
    exponents = 140 - np.arange(64 * 8).reshape(1, 64, 8) % span
    exponents[:, :, 0] = 140
    w = dataclasses.replace(w, scale=jnp.asarray(exponents, jnp.uint8))
    arranged = packed.pack_experts(w)
    found = packed.decode_chunk(arranged.payload[0], arranged.steps[0, :, 0].reshape(64, 8))
    found = found.astype(jnp.float8_e5m2).astype(jnp.float32) * arranged.row_scales[0][:, None]
    raised = dataclasses.replace(w, scale=jnp.maximum(w.scale, 140 - 26))
    compare.assert_bitwise(found, dequantize(raised, jnp.float32)[0])


def test_table_of_codes_holds_the_magnitudes():
    for step in (0, fp4_codes.TOP_STEP):
        low = np.uint32(fp4_codes.CODES_LOW + step * 0x01010100)
        high = np.uint32(fp4_codes.CODES_HIGH + step * 0x01010101)
        codes = np.asarray([low, high], "<u4").view(jnp.float8_e5m2)
        least = 2.0**-13 * 2.0 ** (step / 4)
        np.testing.assert_array_equal(codes.astype(np.float32), least * np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6]))


def test_words_of_threads_meet_their_columns():
    """What the emitted decoder does, in numpy, with the places of an instruction's left operand among threads."""
    arranged = packed.pack_experts(cases.random_experts(jax.random.key(5), 32, 256, num_experts=1))
    words = np.asarray(arranged.payload[0]).view("<u4").reshape(32, 4, 2, 4)  # row, q, j, i
    steps = np.asarray(arranged.steps[0, :, 0]).reshape(32, 4, 2).astype(np.uint32)
    low = (fp4_codes.CODES_LOW + steps * 0x01010100)[..., None]
    high = (fp4_codes.CODES_HIGH + steps * 0x01010101)[..., None]
    table = np.stack(np.broadcast_arrays(low, high), axis=-1).astype("<u4").view(np.uint8)[..., 0, :]

    def chosen(selector):
        nibbles = np.stack([selector >> 4 * t & 7 for t in range(4)], axis=-1)
        return np.take_along_axis(np.broadcast_to(table[..., None, :], (*selector.shape, 8)), nibbles, axis=-1)

    signs = np.stack([words << 4, words], axis=-1) & 0x80808080
    fours = np.stack([chosen(words & 0xFFFF), chosen(words >> 16)], axis=-2)  # row, q, j, i, h, t
    codes = fours | signs.astype("<u4").view(np.uint8).reshape(fours.shape)
    # Thread q of a row holds bytes 4 q to 4 q + 3 of both halves of an instruction's 32 columns.
    places = codes.transpose(0, 2, 3, 4, 1, 5).reshape(32, 256)
    found = natural_order(jnp.asarray(places).view(jnp.float8_e5m2).astype(jnp.float32))
    expected = packed.decode_chunk(arranged.payload[0], arranged.steps[0, :, 0].reshape(32, 8))
    compare.assert_bitwise(found, expected)


def test_codes_of_rows_are_the_quantised_rows():
    spread = jnp.exp2(jax.random.randint(jax.random.key(3), (5, 512), -9, 9).astype(jnp.float32))
    x = (jax.random.normal(jax.random.key(2), (5, 512)) * spread).astype(jnp.bfloat16)
    places, shares = jnp.asarray([3, 1, 0, 7, 8, 2, 8, 4, 5, 6], jnp.int32), jnp.arange(10, dtype=jnp.float32)
    codes, factors = folded_rows(x, places, shares, num_places=9, interpret=plgpu.InterpretGPUParams())
    terms = codes.reshape(9, 2, 512).view(jnp.float8_e5m2).astype(jnp.float32)
    found = natural_order(terms[:, 0] + terms[:, 1]) * factors[0][:, None]
    expected = dequantize(quantize_fp8(x), jnp.float32)
    is_read = np.asarray(places) < 8
    # A zero is the sum of zeros of either sign.
    compare.assert_bitwise(found[places[is_read]], expected[np.flatnonzero(is_read) // 2] + 0.0)
    compare.assert_bitwise(factors[1][places[is_read]], shares[is_read])


@pytest.mark.slow
def test_tiles_of_prompts_give_the_bits_of_those_of_decode_steps(capfd):
    ids = np.random.default_rng(4).integers(0, NUM_EXPERTS, (150, 2)).tolist()
    assert mosaic_sm90.tiling_for(300, NUM_EXPERTS) is mosaic_sm90.PREFILL_TILING
    inputs = make(ids, [1] * 149 + [0])
    given = {"limit": cases.LIMIT, "num_sms": 1, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    run = jax.jit(functools.partial(mosaic_sm90.routed_experts, **given))
    compare.assert_bitwise(jax.block_until_ready(run(*inputs)), jax.block_until_ready(kernel()(*inputs)))
    assert "RACE" not in "".join(capfd.readouterr())


@on_both
def test_no_pairs_give_no_rows(name):
    inputs = make([[0, 1]], [1])
    out = kernel(name)(inputs[0][:0], inputs[1][:0], inputs[2][:0], inputs[3][:0], *inputs[4:])
    assert out.shape == (0, 2, WIDTH)


@pytest.mark.parametrize("num_pairs, row_tile", [(1, 8), (57, 16), (768, 40), (5000, 64)])
def test_schedule_groups_pairs_by_expert(num_pairs, row_tile):
    rng = np.random.default_rng(num_pairs)
    ids = rng.integers(-1, 6, (num_pairs, 1)).astype(np.int32)
    is_live = rng.random(num_pairs) < 0.8
    schedule = make_schedule(
        jnp.asarray(ids),
        jnp.asarray(is_live),
        num_experts=5,
        row_tile=row_tile,
        interpret=plgpu.InterpretGPUParams(),
    )
    places, tiles, num_places = np.asarray(schedule.places), np.asarray(schedule.tiles), schedule.num_places
    num_tiles = int(schedule.num_tiles[0])
    expert = np.where(is_live & (ids[:, 0] < 5), ids[:, 0], -1)
    assert (places[expert < 0] == num_places).all()
    pair_at = np.full(num_places, num_pairs)
    pair_at[places[expert >= 0]] = np.flatnonzero(expert >= 0)
    found = []
    for owner, start, size in tiles[:num_tiles]:
        assert 0 < size <= row_tile and start % 8 == 0 and start + 64 <= num_places
        pairs = pair_at[start : start + size]
        assert (expert[pairs] == owner).all()
        assert (pair_at[start + size : start + -(-size // 8) * 8] == num_pairs).all()
        found += list(pairs)
    assert found == sorted(found, key=lambda pair: (expert[pair], pair))
    assert sorted(found) == list(np.flatnonzero(expert >= 0))


def test_refusals_say_why():
    inputs = make([[0]], [1])
    u, ids, w1, w2 = inputs[0], inputs[1], inputs[4], inputs[5]
    refuses = functools.partial(mosaic_sm90.refuses, tiling=TILING)
    assert refuses(u, ids, w1, w2) is None
    assert "float32" in refuses(u.astype(jnp.float32), ids, w1, w2)
    assert refuses(u, jnp.zeros((5000, 1), jnp.int32), w1, w2) is None
    assert "E2M1" in refuses(u, ids, w1.payload, w2)
    assert "own form" in refuses(u, ids, packed.unpacked(w1), w2)
    five = KernelTiling(warpgroups=5, registers=88)
    assert "multiple of 1280" in mosaic_sm90.refuses(u, ids, w1, w2, tiling=Tiling(up=ONE, down=five))
    with pytest.raises(NotImplementedError, match="use the reference"):
        plain = ScaledArray(payload=w1.payload, scale=w1.scale)
        mosaic_sm90.routed_experts(u, ids, inputs[2], inputs[3], plain, w2, w1, limit=1.0)
    with pytest.raises(NotImplementedError, match="on SM100: weights are not packed E2M1"):
        mosaic_sm100.routed_experts(u, ids, inputs[2], inputs[3], plain, w2, w1, limit=1.0)
    narrow = packed.pack_experts(cases.random_experts(jax.random.key(0), 128, 256, num_experts=1))
    assert mosaic_sm100.refuses(u, ids, w1, w2) is None
    assert "inner width 128 is not a multiple of 256" in mosaic_sm100.refuses(u, ids, narrow, w2)


@pytest.mark.parametrize(
    "make_tiling, text",
    [
        (lambda: Tiling(row_tile=12), "row_tile=12"),
        (lambda: mosaic_sm100.Tiling(row_tile=12), "row_tile=12"),
        (lambda: mosaic_sm100.Tiling(row_tile=64), "no tensor memory"),
        (lambda: KernelTiling(warpgroups=4, registers=120), "120, 120, 120, 120, 24"),
    ],
)
def test_bad_tilings_are_errors(make_tiling, text):
    with pytest.raises(ValueError, match=text):
        make_tiling()


def test_words_of_halves_lie_as_rows_of_x():
    columns = np.arange(256).reshape(4, 2, 4, 2, 4)  # q, half, i, h, t
    places = np.empty((2, 32, 4), np.int64)
    for q, half, i, h in np.ndindex(4, 2, 4, 2):
        places[half, left_sm100.word_place(q, i, h)] = columns[q, half, i, h]
    np.testing.assert_array_equal(places.reshape(-1), column_order(jnp.arange(256)))
