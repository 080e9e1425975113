"""Images of a prompt as the scheduler sees them: positions that one chunk takes as a whole."""

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageSpan:
    """The positions of one image. Its tokens are all the same id and tell nothing of what it shows."""

    start: int
    length: int  # rows, delimiters included
    digest: str  # hexadecimal, of the content: equal for images that give equal rows
    content: Any = None  # what the encoder reads: carried, never looked at

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + self.length

    @property
    def cache_token(self) -> int:
        """Stands for each of its tokens where prefixes are compared: negative, so that it is no token id."""
        return -1 - int(self.digest, 16)


def outside_images(images: Iterable[ImageSpan], position: int) -> int:
    """The position, or the beginning of the image that a cut there would split."""
    return next((image.start for image in images if image.start < position < image.end), position)
