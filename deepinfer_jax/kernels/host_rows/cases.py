"""Sizes at which rows of Engram tables are taken.

Tables lie on the device here, so `fraction` is that of the device's memory; `scripts/bench_steps.py --tables host`
times a step whose tables are on the host.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.host_rows import mosaic

TABLE_ROWS = 1 << 20
WANTED = 24  # rows of a table for one row of a step
WIDTHS = {"codes": 256, "scales": 8}


def make_inputs(key: Array, *, num_rows: int, width: int) -> tuple[UInt8[Array, "R W"], Int[Array, " N"]]:
    """A table of any bytes, and numbers of rows, some negative."""
    keys = jax.random.split(key, 2)
    table = jax.random.bits(keys[0], (TABLE_ROWS, width), jnp.uint8)
    return table, jax.random.randint(keys[1], (num_rows * WANTED,), -(TABLE_ROWS // 16), TABLE_ROWS, jnp.int32)


def reference(table: UInt8[Array, "R W"], numbers: Int[Array, " N"]) -> UInt8[Array, "N W"]:
    """What JAX makes of an index."""
    return jnp.where((numbers >= 0)[:, None], table[jnp.maximum(numbers, 0)], jnp.uint8(0))


def _case(name: str, num_rows: int) -> Case:
    width = WIDTHS[name]
    load = "ld.global.v4.b32" if width % 16 == 0 else "ld.global.v2.b32"
    return Case(
        op="host_rows",
        name=f"{name}_{num_rows}_rows",
        make=functools.partial(make_inputs, num_rows=num_rows, width=width),
        implementations={REFERENCE: reference, "mosaic_sm90": mosaic.take_rows, "mosaic_sm100": mosaic.take_rows},
        num_bytes=num_rows * WANTED * (2 * width + 4),
        flops=0,
        families={"mosaic_sm90": (load,), "mosaic_sm100": (load,)},
    )


CASES = tuple(_case(name, num_rows) for name in WIDTHS for num_rows in (128, 1))
