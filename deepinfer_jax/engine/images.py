"""Images of prompts: from what a caller gives to spans of positions (spec: interface 5.2, vision 4).

Every image is decoded before anything of its call is queued, on threads of its own, since Pillow works outside of
Python's lock. What was decoded stays on the host as long as a request may need it: it is encoded again when the table
of encoded images (`image_table.py`) has lost it and a preempted request comes back.
"""

import concurrent.futures
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.text.images import PreparedImage, plan_image, prepare_image

IMAGE_FAILED = "ve_error"  # the finish reason's name in the interface (5.6)
MAX_THREADS = 4
_KEYS = ("images", "image_bytes", "image_sizes")

type ImageData = Mapping[str, Any] | None  # of one prompt


class ImageReader:
    """Decodes the images of an engine's requests. Equal images of unfinished requests share their patches.

    timeout_s: how long one image may take.
    """

    def __init__(self, vision: VisionConfig, *, timeout_s: float) -> None:
        self._vision, self._timeout_s = vision, timeout_s
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._known: weakref.WeakValueDictionary[str, PreparedImage] = weakref.WeakValueDictionary()

    def read(self, data: Sequence[ImageData]) -> list[list[PreparedImage]]:
        """The images of each prompt, in the order of its placeholders.

        Raises ValueError or TypeError that names prompt and image for whatever is no image, or not as large as
        `image_sizes` says, and RuntimeError for one that takes too long.
        """
        sources = [_sources_of(entry, prompt) for prompt, entry in enumerate(data)]
        futures: dict[int, concurrent.futures.Future[PreparedImage]] = {}
        found: list[list[PreparedImage]] = []
        try:
            for prompt, own in enumerate(sources):
                for image, source in enumerate(own):
                    if id(source) not in futures:  # Pillow must not load one object in two threads
                        futures[id(source)] = self._submit(source, prompt, image)
            for prompt, own in enumerate(sources):
                images = [self._result(futures[id(source)], prompt, image) for image, source in enumerate(own)]
                _check_sizes(data[prompt], images, prompt, self._vision)
                found.append(images)
        finally:
            for future in futures.values():
                future.cancel()
        return found

    def close(self) -> None:
        """Lets the threads end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, source: object, prompt: int, image: int) -> concurrent.futures.Future[PreparedImage]:
        if self._pool is None:
            num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
            self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="images")
        return self._pool.submit(prepare_image, source, self._vision, prompt=prompt, image=image)

    def _result(self, future: concurrent.futures.Future[PreparedImage], prompt: int, image: int) -> PreparedImage:
        try:
            prepared = future.result(self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(
                f"image {image} of prompt {prompt} is not decoded after {self._timeout_s} s; give a smaller image, or "
                "raise DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT"
            ) from error
        return self._known.setdefault(prepared.digest, prepared)


def place_images(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token_id: int
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """A prompt with as many image tokens for each placeholder as its image takes, and where they stand."""
    tokens: list[int] = []
    spans: list[ImageSpan] = []
    left = iter(images)
    for token in token_ids:
        if token != image_token_id:
            tokens.append(token)
            continue
        image = next(left)
        length = image.plan.num_tokens
        spans.append(ImageSpan(start=len(tokens), length=length, digest=image.digest, content=image))
        tokens += [image_token_id] * length
    return tuple(tokens), tuple(spans)


def moved_position(position: int, token_ids: Sequence[int], spans: Sequence[ImageSpan], image_token_id: int) -> int:
    """Where a position of a prompt with placeholders is once `place_images` has placed its images."""
    num_images = sum(token == image_token_id for token in token_ids[:position])
    return position + sum(span.length - 1 for span in spans[:num_images])


def given_images(multi_modal_data: Any, num_prompts: int, *, is_single: bool) -> Sequence[Any]:
    """One entry for each prompt, unchecked. is_single: a prompt was given that is in no list, and so is its data."""
    if multi_modal_data is None:
        return [None] * num_prompts
    given = [multi_modal_data] if is_single else multi_modal_data
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"multi_modal_data is of type {type(given).__name__}; give a list with one entry for each prompt, None "
            "for a prompt without images"
        )
    if len(given) != num_prompts:
        raise ValueError(
            f"{num_prompts} prompts and {len(given)} entries of multi_modal_data were given; give one entry for each "
            "prompt, None for a prompt without images"
        )
    return given


def count_images(entry: Any, prompt: int) -> int:
    """How many images a prompt has. Raises ValueError or TypeError for an entry that is none."""
    return len(_sources_of(entry, prompt))


def _sources_of(entry: Any, prompt: int) -> Sequence[object]:
    if entry is None:
        return ()
    where = f"multi_modal_data of prompt {prompt}"
    if not isinstance(entry, Mapping):
        raise TypeError(f'{where} is of type {type(entry).__name__}; give a dict, {{"images": [...]}}, or None')
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}; its keys are {', '.join(_KEYS)}")
    if ("images" in entry) == ("image_bytes" in entry):
        raise ValueError(f"{where} needs either images or image_bytes, which mean the same; give one of the two")
    sources = entry["images"] if "images" in entry else entry["image_bytes"]
    if not isinstance(sources, list | tuple):
        raise TypeError(f"the images of prompt {prompt} are of type {type(sources).__name__}; give a list of images")
    return sources


def _check_sizes(entry: ImageData, images: Sequence[PreparedImage], prompt: int, vision: VisionConfig) -> None:
    """Raises ValueError for sizes (width, height) under which an image would take other patches than it does."""
    sizes = None if entry is None else entry.get("image_sizes")
    if sizes is None:
        return
    if len(sizes) != len(images):
        raise ValueError(
            f"prompt {prompt} has {len(images)} images and {len(sizes)} image_sizes; give (width, height) for each, or "
            "leave image_sizes out"
        )
    for index, (size, image) in enumerate(zip(sizes, images, strict=True)):
        where = f"image_sizes[{index}]={size!r} of prompt {prompt}"
        try:
            width, height = size
            plan = plan_image(width, height, vision)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} is no size; give (width, height), pixels of that image") from error
        if plan != image.plan:
            raise ValueError(
                f"{where} is not the size (width, height) of that image; correct it, or leave image_sizes out"
            )
