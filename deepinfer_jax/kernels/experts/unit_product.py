"""What products of routed experts share: units of work, and the walk of each block through them in a fixed order.

A kernel has one block for each multiprocessor. A unit is pairs of one expert times two tiles of rows of its weights:
gate and up of the same channels, or two neighbouring ranges of down.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, UInt8

from deepinfer_jax.kernels.experts.packed import CHUNK, PackedExperts
from deepinfer_jax.kernels.experts.schedule import MAX_ROW_TILE, ROW_BLOCK, Schedule
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.pytree import pytree_dataclass

SLOTS = 2  # units whose row scales and factors are in shared memory
COPIES_OF_UNIT = 3  # the row scales of two tiles of weights, the factors of x
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment


@pytree_dataclass
class Inputs:
    """Operands of a kernel, in device memory."""

    tiles: Any
    num_tiles: Any
    x: Any
    factors: Any
    weights: tuple[Any, Any]  # of the first and of the second tile of a unit, [experts, rows, bytes]
    steps: tuple[Any, Any]  # [experts, blocks, chunks, 256]
    row_scales: tuple[Any, Any]  # [experts, rows]


@pytree_dataclass
class Unit:
    """One piece of work."""

    index: Array  # among those of the block
    expert: Array
    start: Array  # place of the first pair
    num_pairs: Array
    column: Array  # which rows of the weights

    @property
    def first_place(self) -> Array:
        """`start`, as what a compiler sees to be a multiple of 8."""
        return lax.div(self.start, jnp.int32(ROW_BLOCK)) * ROW_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitProduct(abc.ABC):
    """A kernel: gate and up with SwiGLU where there is a limit, else down."""

    num_rows: int  # of the weights
    width: int  # columns of the weights
    row_tile: int  # pairs of a unit at most
    limit: float | None
    num_sms: int
    interpret: Interpret

    @property
    @abc.abstractmethod
    def tile_rows(self) -> int:
        """Rows of a tile of weights."""

    @property
    @abc.abstractmethod
    def num_warpgroups(self) -> int:
        """Of a block."""

    @abc.abstractmethod
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of a block, among them those of `scale_types`."""

    @abc.abstractmethod
    def run(self, inputs: Inputs, out: Any, **scratch: Any) -> None:
        """The program of one block."""

    @property
    def unit_rows(self) -> int:
        """Of the result: those of gate and of up make the same ones."""
        return self.tile_rows * (2 if self.limit is None else 1)

    @property
    def units_of_tile(self) -> int:
        """Units that share their pairs."""
        return self.num_rows // self.unit_rows

    @property
    def num_chunks(self) -> int:
        """Pieces of 256 columns, that packed weights are read in."""
        return self.width // CHUNK

    @property
    def num_factors(self) -> int:
        """Of a pair: the scale of its row and, of gate and up, its share."""
        return 1 if self.limit is None else 2

    @property
    def scale_bytes(self) -> int:
        """Shared memory of `scale_types`."""
        return SLOTS * 4 * (2 * self.tile_rows + self.num_factors * MAX_ROW_TILE)

    def __call__(
        self,
        schedule: Schedule,
        x: UInt8[Array, "codes K"],
        factors: Float32[Array, "factors P"],
        first: PackedExperts,
        second: PackedExperts,
    ) -> BFloat16[Array, "places N"]:
        """Results at all places that tiles name."""

        def of_experts(one: Array, other: Array) -> tuple[Array, Array]:
            """Layers and experts become one axis."""
            shape = (-1, *one.shape[first.payload.ndim - 2 :])
            return one.reshape(shape), other.reshape(shape)

        inputs = Inputs(
            tiles=schedule.tiles,
            num_tiles=schedule.num_tiles,
            x=self.operand(x),
            factors=factors,
            weights=of_experts(first.payload, second.payload),
            steps=of_experts(first.steps, second.steps),
            row_scales=of_experts(first.row_scales, second.row_scales),
        )
        leaves, structure = jax.tree.flatten(inputs)

        def body(*refs: Any, **scratch: Any) -> None:
            self.run(jax.tree.unflatten(structure, refs[:-1]), refs[-1], **scratch)

        kernel = plgpu.kernel(
            body,
            kernel_name="experts_down" if self.limit is None else "experts_gate_and_up",
            out_type=jax.ShapeDtypeStruct((schedule.num_places, self.num_rows), jnp.bfloat16),
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=self.num_warpgroups,
            thread_name="warpgroup",
            interpret=False if self.interpret is None else self.interpret,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            scratch_types=self.scratch_types(),
        )
        return kernel(*leaves)

    def operand(self, x: UInt8[Array, "codes K"]) -> Array:
        """Codes of rows in the form that the kernel is given."""
        return x

    def scale_types(self, *, num_readers: int) -> dict[str, Any]:
        """Row scales and factors of units, and their barriers; that many warpgroups read them."""
        return {
            "row_scales": plgpu.SMEM((SLOTS, 2, self.tile_rows), jnp.float32),
            # So wide that each copy begins at a multiple of 128 bytes.
            "factors": plgpu.SMEM((SLOTS, self.num_factors, MAX_ROW_TILE), jnp.float32),
            "unit_full": plgpu.Barrier(num_arrivals=COPIES_OF_UNIT, num_barriers=SLOTS),
            "unit_free": plgpu.Barrier(num_arrivals=num_readers, num_barriers=SLOTS),
        }

    def num_own(self, inputs: Inputs) -> Array:
        """Units of this block."""
        num_units = inputs.num_tiles[0] * self.units_of_tile
        return lax.max(num_units - lax.axis_index("sm") + self.num_sms - 1, jnp.int32(0)) // self.num_sms

    def for_units(self, inputs: Inputs, num_own: Array, run: Callable[[Unit], None]) -> None:
        """run(unit) for all `num_own` units of this block."""
        sm = lax.axis_index("sm")

        def unit_at(index: Array) -> Unit:
            tile, column = jnp.divmod(sm + index * self.num_sms, self.units_of_tile)
            tile = lax.min(tile, inputs.tiles.shape[0] - 1)
            expert, start, size = (inputs.tiles[tile, i] for i in range(3))
            return Unit(index=index, expert=expert, start=start, num_pairs=size, column=column)

        def step(index: Array, unit: Unit) -> Unit:
            following = unit_at(index + 1)  # read early: device memory is far
            run(unit)
            return following

        lax.fori_loop(0, num_own, step, unit_at(jnp.int32(0)))

    def for_blocks(self, unit: Unit, run: Callable[[int], None]) -> None:
        """run(rows) for the padded number of rows, which is then a constant."""
        num_blocks = (unit.num_pairs + ROW_BLOCK - 1) // ROW_BLOCK
        for blocks in range(1, self.row_tile // ROW_BLOCK + 1):
            pl.when(num_blocks == blocks)(lambda blocks=blocks: run(blocks * ROW_BLOCK))

    def first_rows(self, unit: Unit) -> tuple[Array, Array]:
        """Where both tiles of a unit begin among the rows of their weights."""
        first = unit.column * self.unit_rows
        return first, first + self.tile_rows if self.limit is None else first

    def copy_scales(self, unit: Unit, inputs: Inputs, shared: Any) -> None:
        """Starts the copies of a unit's row scales and factors to its slot; shared: has what `scale_types` names."""
        slot = unit.index % SLOTS

        @pl.when(unit.index >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(shared.unit_free.at[slot])

        for tile, first in enumerate(self.first_rows(unit)):
            source = inputs.row_scales[tile].at[unit.expert, pl.ds(first, self.tile_rows)]
            plgpu.copy_gmem_to_smem(source, shared.row_scales.at[slot, tile], shared.unit_full.at[slot])
        source = inputs.factors.at[:, pl.ds(unit.first_place, MAX_ROW_TILE)]
        plgpu.copy_gmem_to_smem(source, shared.factors.at[slot], shared.unit_full.at[slot])
