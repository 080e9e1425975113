"""Encoded images on the device: a table with a fixed number of places, shared by all requests.

An image is encoded when a step first needs it, or ahead, and found by the digest of its content from then on; the least
recently used one makes room. Nothing here waits for the device: an image is encoded behind the steps that were launched
before, or beside them, and written to the table behind those that read it.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import steps
from deepinfer_jax.model.vision_params import NUM_CHANNELS, VisionParams
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.text.images import PreparedImage, max_patches

_FIRST_PATCHES = 512  # of the smallest encoder, where one takes as long as its padding is


@dataclasses.dataclass
class ImageCounters:
    """What became of images; an image that is used again was found in the table."""

    images_used: int = 0  # by steps
    images_encoded: int = 0
    images_found: int = 0  # of those used: encoded for an earlier use
    images_evicted: int = 0


@dataclasses.dataclass
class _Place:
    """Where an encoded image is."""

    number: int
    was_used: bool = False  # by a step; False: it was encoded ahead


class ImageTable:
    """The table and what is in it. Its memory is taken at the first image.

    shared: makes an array where every device that runs steps reads it. Several processes encode every image each, in
    the same order, and keep a table each on their devices.
    """

    def __init__(
        self, vision: VisionParams, *, config: RuntimeConfig, num_places: int, shared: Callable[[Any], Any]
    ) -> None:
        self._vision, self._config, self._num_places, self._shared = vision, config, num_places, shared
        self._span_len = config.model.vision.max_image_tokens
        self._places: OrderedDict[str, _Place] = OrderedDict()  # by digest, least recently used first
        self._features: Float[Array, "table D"] | None = None
        self._sizes = patch_sizes(max_patches(config.model.vision), skips_padding=config.is_invariant)
        self.counters = ImageCounters()

    @property
    def features(self) -> Float[Array, "table D"]:
        """The rows of all places; the next image that is encoded gives the array away."""
        if self._features is None:
            rows = self._num_places * self._span_len
            shape, dtype = (rows, self._config.model.hidden_size), self._config.activation_dtype
            table = self._features = self._shared(lambda: jnp.zeros(shape, dtype))
            return table
        return self._features

    def reset(self) -> None:
        """Forgets every image, whatever became of the table."""
        self._places.clear()
        self._features = None

    def warm_up(self, compiled: Callable[[str, float], None]) -> None:
        """Compiles the encoder in its sizes, by images of one patch."""
        pixels = NUM_CHANNELS * self._config.model.vision.patch_size**2
        for size in self._sizes:
            start = time.perf_counter()
            span = self._encode(np.zeros((1, pixels), np.uint8), (1, 1), size)
            # Written to the first place, which holds nothing yet.
            self._features = steps.place_span(self.features, span, np.int32(0))
            compiled(f"image-patches{size}", time.perf_counter() - start)

    def knows(self, image: ImageSpan) -> bool:
        """Whether an image need not be encoded."""
        return image.digest in self._places

    def use(self, images: Iterable[ImageSpan]) -> tuple[dict[str, int], dict[str, Exception]]:
        """The first row of each image of a step, by digest; and why some of them could not be encoded.

        The rows of those are not theirs. There are as many places as a step may have images.
        """
        wanted = {image.digest: image for image in images}
        for digest in wanted:  # in this order, which is the same in every process
            if digest in self._places:
                self._places.move_to_end(digest)  # so that none of them makes room
        rows: dict[str, int] = {}
        errors: dict[str, Exception] = {}
        for digest, image in wanted.items():
            self.counters.images_used += 1
            if digest not in self._places:
                error = self._add(image)
                if error is not None:
                    rows[digest], errors[digest] = 0, error
                    continue
            place = self._places[digest]
            self.counters.images_found += place.was_used
            place.was_used = True
            rows[digest] = place.number * self._span_len
        return rows, errors

    def encode_ahead(self, image: ImageSpan) -> None:
        """Encodes an image for a coming step. If that fails, the step will tell."""
        self._add(image)

    def _add(self, image: ImageSpan) -> Exception | None:
        """Encodes an image and gives it a place; the error if that failed, and nothing changed then."""
        prepared: PreparedImage = image.content
        size = next(size for size in self._sizes if size >= len(prepared.patches))
        try:
            span = self._encode(prepared.patches, prepared.grid, size)
        except Exception as error:  # noqa: BLE001 - whatever the device reports ends the requests with this image
            return error
        if len(self._places) < self._num_places:
            number = len(self._places)
        else:
            number = self._places.popitem(last=False)[1].number
            self.counters.images_evicted += 1
        self._features = steps.place_span(self.features, span, np.int32(number * self._span_len))
        self._places[image.digest] = _Place(number)
        self.counters.images_encoded += 1
        return None

    def _encode(self, patches: np.ndarray, grid: tuple[int, int], size: int) -> jax.Array:
        padded = np.zeros((size, patches.shape[1]), np.uint8)
        padded[: len(patches)] = patches
        return steps.encode_span(self._vision, padded, np.asarray(grid, np.int32), config=self._config)


def patch_sizes(most: int, *, skips_padding: bool) -> tuple[int, ...]:
    """The compiled numbers of patches: one where padding costs nothing, else each twice as large as the last one."""
    sizes = [most]
    while not skips_padding and sizes[0] > _FIRST_PATCHES:
        sizes.insert(0, -(-sizes[0] // 2))
    return tuple(sizes)


def table_bytes(config: RuntimeConfig, num_places: int) -> int:
    """Bytes of a table of so many places."""
    model = config.model
    return num_places * model.vision.max_image_tokens * model.hidden_size * config.activation_dtype.itemsize
