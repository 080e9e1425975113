"""Images of chat messages: taken out for the recipe, which knows data URLs only, and put in order again."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PREFIX = "data:image/png;base64,"
# What the recipe makes of "low" is not specified; the others do not change the image.
_DETAILS = (None, "auto", "high", "original")


class StandIns:
    """Names that the images of a conversation go by while the recipe has it."""

    def __init__(self) -> None:
        self._sources: dict[str, object] = {}

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a data URL of no content for each image. Raises ValueError for an image that is none."""
        return [self._hide_message(message, place) for place, message in enumerate(messages)]

    def in_order(self, urls: Iterable[str]) -> tuple[object, ...]:
        """The images that these data URLs stand for."""
        return tuple(self._sources[url] for url in urls)

    def _hide_message(self, message: Mapping[str, Any], place: int) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return dict(message)
        return {**message, "content": [self._hide_part(part, place) for part in content]}

    def _hide_part(self, part: Any, place: int) -> Any:
        image = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
        if not isinstance(image, Mapping) or "url" not in image:
            return part  # no image, or one in a form that the recipe refuses
        source, detail = image["url"], image.get("detail")
        if isinstance(source, str) and not source[:5].lower() == "data:":
            raise ValueError(
                f"message {place} has an image at {source[:80]!r}; nothing is downloaded, and texts name no files: "
                "give a data URL, a pathlib.Path, bytes, an array or a Pillow image"
            )
        if detail not in _DETAILS:
            allowed = ", ".join(str(each) for each in _DETAILS[1:])
            raise ValueError(f"message {place} has an image of detail {detail!r}; leave detail out, or give {allowed}")
        name = _PREFIX + base64.b64encode(len(self._sources).to_bytes(3, "big")).decode()
        self._sources[name] = source
        return {**part, "image_url": {**image, "url": name}}
