"""What attention kernels share: the sizes of their tiles, what a block works on, and what its products are."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from jaxtyping import Array

from deepinfer_jax.ops.attention import KEY_BLOCK
from deepinfer_jax.ops.quant import FP8_GROUP, MAIN_KV_GROUP, Form

HEADS = 64  # of a row: the rows of a tile of products
NO_KEY = -1
KEY_SCALE = 2.0**-9  # of every key in shared memory
# How keys are packed: those of this step, of the ring and of the pages.
FORMS: tuple[tuple[Form, int], ...] = (("fp8", FP8_GROUP), ("fp8", FP8_GROUP), ("fp4_e4m3", MAIN_KV_GROUP))
PIECE_KEYS = KEY_BLOCK // 2
STAGES = 2  # tiles of keys in shared memory


class Products(abc.ABC):
    """The products of one architecture, which a warpgroup starts and waits for."""

    consumer_registers: int  # of a thread of warpgroups 0 and 1
    producer_registers: int  # of a thread of warpgroup 2
    line: int  # channels of a line of keys in shared memory: 128 or 64 bytes, which a swizzle spans

    @abc.abstractmethod
    def scratch_types(self, width: int) -> dict[str, Any]:
        """Memory and barriers of its own, for heads of such a width."""

    @abc.abstractmethod
    def no_sums(self, half: int) -> Sequence[Array]:
        """What a warpgroup has in registers for the sums of values of so many channels: zeros, or nothing."""

    @abc.abstractmethod
    def scores(self, block: "Block", stage: Array) -> Array:
        """q . k for the keys of a tile, [64, 64] in float32."""

    @abc.abstractmethod
    def add_values(
        self, block: "Block", sums: Sequence[Array], shrink: Array, tile: Array, half: int
    ) -> Sequence[Array]:
        """The sums times `shrink` [64], with the weighted values of one more tile added."""

    @abc.abstractmethod
    def results(self, block: "Block", sums: Sequence[Array], half: int) -> Iterator[Array]:
        """The sums of a half of the channels when all tiles are added, in pieces of neighbouring channels."""


@dataclasses.dataclass(frozen=True)
class Block:
    """What the warpgroups of one block work on: arrays in device memory, shared memory and barriers."""

    row: Array
    q: Any
    packed: tuple[Any, ...]  # payload and scales of this step's rows, of the ring, of the pages
    index: Any
    bases: Any
    sink: Any
    out: Any
    smem: SimpleNamespace
    num_window: int
    products: "Products"
    interpret: bool

    @property
    def half(self) -> int:
        """Channels whose values one warpgroup adds."""
        return self.q.shape[-1] // 2

    @property
    def num_tiles(self) -> int:
        """Tiles of keys."""
        return self.index.shape[1]
