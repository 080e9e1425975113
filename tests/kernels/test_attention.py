"""The kernels of sparse attention, interpreted, against the reference; full sizes run in the benchmark."""

import dataclasses
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.attention import api, block, mosaic_sm90, mosaic_sm100, packed_keys, row_kernel
from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.ops.quant import ScaledArray, quantize_fp8, quantize_main_kv
from deepinfer_jax.testing import compare

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
HEADS, WIDTH, WINDOW, ENTRIES, PAGE = 64, 128, 64, 128, 8
RING, NUM_SLOTS, PAGES_PER_SLOT = WINDOW + 6, 4, 24
LAYERS, SOURCES = 2, 2
KERNELS = {"sm90": mosaic_sm90, "sm100": mosaic_sm100}
# A probability that lies between two bfloat16 values may take the other one after a float32 sum in another order.
BF16_REL_L2 = 1e-3

# Slot, position, first row and first position of the request in this step, first visible position, entries.
ROWS = {
    "padding": (-1, 0, 0, 0, 0, 0),
    "one key": (0, 0, 1, 0, 0, 0),
    "window of one block": (1, 180, 2, 180, 0, 0),
    "no window": (2, 190, 3, 190, 191, 128),
    "entries fill a part of a block": (3, 100, 4, 98, 0, 70),
    "second row of a step": (3, 101, 4, 98, 0, 100),
    "window begins at the floor": (2, 150, 6, 150, 140, 1),
    "everything": (1, 185, 7, 185, 0, 128),
}


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def make_sources(rng: np.random.Generator, num_rows: int) -> KeySources:
    num_pages = NUM_SLOTS * PAGES_PER_SLOT + 3
    table = rng.permutation(num_pages)[: NUM_SLOTS * PAGES_PER_SLOT].reshape(NUM_SLOTS, PAGES_PER_SLOT)
    return KeySources(
        new=quantize_fp8(normal(rng, num_rows, WIDTH)),
        ring=quantize_fp8(normal(rng, LAYERS, NUM_SLOTS, RING, WIDTH)),
        layer=1,
        cache=quantize_main_kv(normal(rng, SOURCES, num_pages, PAGE, WIDTH)),
        source=1,
        page_table=jnp.asarray(table, jnp.int32),
        window=WINDOW,
        ring_len=RING,
        page_entries=PAGE,
    )


def make_rows(rng: np.random.Generator, num_entries: int = ENTRIES) -> tuple[jax.Array, RowPlaces, jax.Array]:
    """Queries, places and entries of all ROWS; some entries before the last one are missing too."""
    columns = [jnp.asarray(column, jnp.int32) for column in zip(*ROWS.values(), strict=True)]
    slots, positions, first_row, first_position, floor, counts = columns
    entries = np.full((len(ROWS), num_entries), -1, np.int32)
    for row, (position, count) in enumerate(zip(positions.tolist(), counts.tolist(), strict=True)):
        listed = np.sort(rng.permutation(position + 1)[: min(count, num_entries)])
        entries[row, : len(listed)] = listed
    entries[4, 3:4] = -1
    places = RowPlaces(
        slots=slots, positions=positions, first_row=first_row, first_position=first_position, floor=floor
    )
    return 2 * normal(rng, len(ROWS), HEADS, WIDTH), places, jnp.asarray(entries)


def run_kernel(
    name: str, q: jax.Array, sources: KeySources, places: RowPlaces, entries: jax.Array, sink: jax.Array
) -> jax.Array:
    out = KERNELS[name].attend(
        q, sources, places, entries, sink, jnp.int32(len(q)), tile=8, has_fixed_trips=False, interpret=INTERPRET
    )
    jax.block_until_ready(out)
    assert not gpu_callbacks.get_races().races_found
    return out


def run_reference(
    q: jax.Array, sources: KeySources, places: RowPlaces, entries: jax.Array, sink: jax.Array
) -> jax.Array:
    backend = Backend(kernels="reference")
    return api.attend(
        q, sources, places, entries, sink, jnp.int32(len(q)), tile=8, has_fixed_trips=False, backend=backend
    )


@pytest.fixture(scope="module")
def step() -> tuple:
    rng = np.random.default_rng(5)
    q, places, entries = make_rows(rng)
    return q, make_sources(rng, len(ROWS)), places, entries, jnp.asarray(rng.standard_normal(HEADS), jnp.float32)


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def result(kernel: str, step: tuple) -> jax.Array:
    return run_kernel(kernel, *step)


@pytest.fixture(scope="module")
def wanted(step: tuple) -> jax.Array:
    return run_reference(*step)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=list(ROWS))
def test_matches_reference(result, wanted, row):
    compare.assert_close(result[row], wanted[row], rel_l2=BF16_REL_L2)


def test_row_without_keys_gives_zeros(result):
    assert not result[list(ROWS).index("padding")].any()


def test_row_does_not_depend_on_others(kernel, step, result):
    q, sources, places, entries, sink = step
    kept = slice(3, 6)
    others = run_kernel(kernel, q[kept], sources, jax.tree.map(lambda a: a[kept], places), entries[kept], sink)
    compare.assert_bitwise(others, result[kept])


@pytest.mark.parametrize("num_entries", [0, 40], ids=["window only", "entries that do not fill a block"])
def test_other_numbers_of_entries(kernel, num_entries):
    rng = np.random.default_rng(num_entries)
    q, places, entries = make_rows(rng, num_entries)
    sources = make_sources(rng, len(ROWS))
    if not num_entries:
        sources = dataclasses.replace(sources, cache=None)
    step = (q, sources, places, entries, jnp.zeros(HEADS, jnp.float32))
    compare.assert_close(run_kernel(kernel, *step), run_reference(*step), rel_l2=BF16_REL_L2)


def test_key_index_names_each_source(step):
    _, sources, places, entries, _ = step
    index = np.asarray(row_kernel.key_index(sources, places, entries))
    second = index[list(ROWS).index("second row of a step")]
    # Positions 98 to 101 are rows 4 to 7 of this step; older ones are in the ring of slot 3.
    assert second[WINDOW - 4 : WINDOW].tolist() == [-6, -7, -8, -9]
    assert second[WINDOW - 5] == 3 * RING + 97 % RING
    first_entry = int(entries[5, 0])
    page = int(sources.page_table[3, first_entry // PAGE])
    assert second[WINDOW] == page * PAGE + first_entry % PAGE
    assert (index[0] == block.NO_KEY).all()


def refusal(step: tuple, **changes) -> str | None:
    q, sources, places, entries, sink = step
    q = changes.pop("q", q)
    return row_kernel.refuses(
        q, dataclasses.replace(sources, **changes), places, entries, sink, jnp.int32(1), tile=8, has_fixed_trips=False
    )


def test_accepts_the_model_s_arrays(step):
    assert refusal(step) is None
    assert refusal(step, cache=None) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": jnp.zeros((1, HEADS, WIDTH), jnp.float32)}, "queries are float32, not bfloat16"),
        ({"q": jnp.zeros((1, 8, 64), jnp.bfloat16)}, "queries have 8 heads of 64, not 64 of 128, 256, 512"),
        ({"window": 8}, "the window of 8 is no multiple of 64"),
        ({"window": 64 * 256}, "a window of 16384 and 128 entries are above 16384 keys"),
        (
            {"ring": ScaledArray(payload=jnp.zeros((1, 1, 1, WIDTH), jnp.float32), scale=None)},
            "keys are packed as fp8 in",
        ),
        ({"cache": quantize_fp8(jnp.zeros((1, 1, 1, WIDTH), jnp.bfloat16))}, "packed as fp8 in blocks of (1, 32)"),
    ],
    ids=["dtype", "heads", "window", "keys", "plain ring", "FP8 pages"],
)
def test_refusal_says_why(step, changes, reason):
    assert reason in refusal(step, **changes)


@pytest.mark.parametrize("line", [64, 32], ids=["lines of 128 bytes", "lines of 64 bytes"])
def test_chunks_of_a_key_lie_where_the_swizzle_has_them(monkeypatch, line):
    """What is emitted for 64 channels of eight keys, in integers."""
    for name in ("iadd", "imul", "iand", "shr"):
        operation = {"iadd": operator.add, "imul": operator.mul, "iand": operator.and_, "shr": operator.rshift}[name]
        monkeypatch.setattr(packed_keys, name, operation)
    monkeypatch.setattr(packed_keys, "arith", SimpleNamespace(xori=operator.xor))
    for key, chunk in np.ndindex(8, 8):
        tile, within = divmod(chunk, line // 8)
        plain = tile * 8 * 2 * line + key * 2 * line + within * 16
        exchanged = (plain >> 7) & (7 if line == 64 else 3)
        # The other chunks of a pair or four are found by exclusive or with their number among these.
        for step in (j for j in range(4) if chunk & j == j):
            row, first = packed_keys._first_chunk(key * 2 * line, chunk - step, SimpleNamespace(key=key), line)
            assert row + (first ^ step) * 16 == plain ^ exchanged << 4
