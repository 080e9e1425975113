"""Images of a prompt to patches: decoding, sizes, resizing, and how many tokens an image takes (spec: vision 3).

The pixels are those of Pillow: bicubic, rounded after each of its two passes.
"""

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import io
import math
import os
import struct
import urllib.parse
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from deepinfer_jax.config.model import VisionConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
MAX_PIXELS = 89_478_485  # of one decoded image, 256 MiB of RGB: what Pillow itself takes without a warning
BORDER = (127, 127, 127)
# What decoders raise for damaged files, beside ValueError.
_DAMAGE = (OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """How an image is cut: pixels of the canvas, patches and tokens of it, and pixels of the picture on the canvas."""

    width: int  # pixels, a multiple of the patch size
    height: int
    content_width: int  # the picture without its grey borders
    content_height: int
    patch_rows: int
    patch_columns: int
    token_rows: int
    token_columns: int

    @property
    def num_patches(self) -> int:
        """Patches of the canvas."""
        return self.patch_rows * self.patch_columns

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the image: its span, delimiters included."""
        return _span_len(self.token_rows, self.token_columns)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """An image as the encoder reads it (`model/vision.py`)."""

    plan: ImagePlan
    patches: np.ndarray  # uint8 [patches, 3 * patch_size^2]: reading order; channel, row and column inside a patch
    digest: str  # of plan and patches: equal for images that give equal embeddings

    @property
    def grid(self) -> tuple[int, int]:
        """Patch rows and columns."""
        return self.plan.patch_rows, self.plan.patch_columns


def prepare_image(
    source: object, vision: VisionConfig, *, prompt: int, image: int = 0, applies_exif: bool = False
) -> PreparedImage:
    """The patches of one image of a prompt, and how many tokens it takes.

    source, applies_exif: see `load_image`. prompt, image: indices for error texts.
    Raises ValueError that names both indices for whatever cannot be decoded.
    """
    try:
        pixels = load_image(source, applies_exif=applies_exif)
    except ValueError as error:
        raise ValueError(f"image {image} of prompt {prompt}: {error}") from error
    plan = plan_image(*pixels.size, vision)
    patches = cut_patches(np.asarray(fit_image(pixels, plan)), patch_size=vision.patch_size)
    digest = hashlib.sha256(f"{plan.patch_rows} {plan.patch_columns} ".encode() + patches.tobytes()).hexdigest()
    return PreparedImage(plan=plan, patches=patches, digest=digest)


def load_image(source: object, *, applies_exif: bool = False) -> Image.Image:
    """The decoded image as 8-bit RGB: alpha dropped, 16 bits cut to the high byte, the first frame of several.

    source: a Pillow image (its current frame), bytes of a file, a path, a data URL, or an array: [height, width] or
    [height, width, channels] with 1 to 4 channels, uint8 or uint16. applies_exif: turn the image as its EXIF data says;
    the model's own preprocessing does not.
    Raises ValueError for what is no image, is damaged, is too large, or has no agreed range of values.
    """
    try:
        with _opened(source) as image:
            _check_size(*image.size)
            upright = ImageOps.exif_transpose(image) if applies_exif else image
            return _as_rgb(upright)
    except _BOMBS as error:
        raise ValueError(f"{error}; at most {MAX_PIXELS} pixels are decoded, give a smaller image") from error
    except Image.UnidentifiedImageError as error:
        raise ValueError(
            f"the data is no image of the formats {', '.join(FORMATS)}; give one of them, or decode it yourself and "
            "give a Pillow image or an array"
        ) from error
    except _DAMAGE as error:
        raise ValueError(f"the image is damaged: {str(error) or type(error).__name__}; give a complete file") from error


def plan_image(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    """The plan of an image of so many pixels. Raises ValueError for an empty one."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels is empty; give one of 1 x 1 at least")
    patch, limit = vision.patch_size, vision.max_image_tokens
    ratio = vision.max_wh_ratio
    w = width if ratio is None or width <= height * ratio else height * ratio
    h = height
    if w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    canvas = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch
    if _span_len(*_token_grid(canvas, vision)) > limit:
        canvas = _shrunk(w, h, vision)
    rows, columns = _token_grid(canvas, vision)
    content = canvas if ratio is not None and width >= ratio * height else _content_size(width, height, canvas)
    return ImagePlan(
        width=canvas[0],
        height=canvas[1],
        content_width=content[0],
        content_height=content[1],
        patch_rows=canvas[1] // patch,
        patch_columns=canvas[0] // patch,
        token_rows=rows,
        token_columns=columns,
    )


def max_patches(vision: VisionConfig) -> int:
    """Patches of the largest canvas that a plan can have: one row of tokens, each of them full."""
    return vision.downsample_ratio**2 * (vision.max_image_tokens - 3)


def fit_image(image: Image.Image, plan: ImagePlan) -> Image.Image:
    """The image resized to its place on a grey canvas, in the middle."""
    content, canvas = (plan.content_width, plan.content_height), (plan.width, plan.height)
    resized = image.resize(content, Image.Resampling.BICUBIC)
    if content == canvas:
        return resized
    padded = Image.new(image.mode, canvas, BORDER)
    padded.paste(resized, (round((canvas[0] - content[0]) / 2), round((canvas[1] - content[1]) / 2)))
    return padded


def cut_patches(pixels: np.ndarray, *, patch_size: int) -> np.ndarray:
    """Patches of [height, width, 3] pixels in reading order, [patches, 3 * patch_size^2]: channel, row, column."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    split = pixels.reshape(rows, patch_size, columns, patch_size, 3)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, -1)


def _opened(source: object) -> contextlib.AbstractContextManager[Image.Image]:
    """The image with its header read; what the caller opened stays open."""
    if isinstance(source, Image.Image):
        return contextlib.nullcontext(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Image.open(io.BytesIO(source), formats=FORMATS)
    if isinstance(source, (str, os.PathLike)):
        return Image.open(io.BytesIO(_named_data(source)), formats=FORMATS)
    if hasattr(source, "__array__"):
        return _from_array(np.asarray(source))
    raise ValueError(
        f"a {type(source).__name__} is no image; give a Pillow image, an array, a path, bytes, or a data URL"
    )


def _named_data(name: str | os.PathLike[str]) -> bytes:
    """The bytes of a data URL or a file."""
    text = os.fspath(name)
    start = text[:8].lower()
    if start.startswith("data:"):
        return _data_of(text)
    if start.startswith(("http://", "https://")):
        raise ValueError(f"{text} is an address in the web, and nothing is downloaded; give the bytes of the image")
    try:
        return Path(text).read_bytes()
    except OSError as error:
        raise ValueError(f"the image file {text[:200]} cannot be read: {error.strerror}; correct the path") from error


def _data_of(url: str) -> bytes:
    """The bytes of a data URL."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"the data URL {head[:40]!r} has no comma; it must be data:image/png;base64,... or alike")
    data = urllib.parse.unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URL {head!r} holds no valid base64: {error}; encode the file again") from error


def _from_array(array: np.ndarray) -> Image.Image:
    is_shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 2, 3, 4))
    if not is_shaped or 0 in array.shape or array.dtype.kind != "u" or array.itemsize > 2:
        raise ValueError(
            f"an array of shape {list(array.shape)} and dtype {array.dtype} is no image; give [height, width] or "
            "[height, width, channels] with 1 to 4 channels, of uint8 or uint16"
        )
    _check_size(array.shape[1], array.shape[0])
    channels = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(_high_byte(channels)))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"an image of {width} x {height} pixels is too large; at most {MAX_PIXELS} pixels are decoded, give a "
            "smaller image"
        )


def _as_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. Pillow itself would cut 16-bit grey at 255, which leaves a white picture."""
    if "transparency" in image.info:  # of no use here, and Pillow would warn that it is lost
        image = image.copy()
        del image.info["transparency"]
    if image.mode.startswith("I;16"):
        image = Image.fromarray(_high_byte(np.asarray(image)))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"an image of mode {image.mode!r} (32 bits a channel) has no agreed range; convert it to 8 or 16 bits"
        )
    return image.convert("RGB")


def _high_byte(values: np.ndarray) -> np.ndarray:
    return values if values.dtype == np.uint8 else (values >> 8).astype(np.uint8)


def _token_grid(canvas: tuple[int, int], vision: VisionConfig) -> tuple[int, int]:
    """Token rows and columns of a canvas of (width, height) pixels."""
    size = vision.patch_size
    rows, columns = (-(-(pixels // size) // vision.downsample_ratio) for pixels in canvas[::-1])
    return rows, columns


def _span_len(token_rows: int, token_columns: int) -> int:
    """Start, each row with its newline, end."""
    return token_rows * (token_columns + 1) + 2


def _shrunk(w: int | float, h: int | float, vision: VisionConfig) -> tuple[int, int]:
    """The canvas (width, height) of an image that would take too many tokens; the order of operations is specified."""
    patch, limit = vision.patch_size, vision.max_image_tokens
    token = patch * vision.downsample_ratio  # pixels
    ratio = h / w
    max_columns = math.sqrt((limit - 2) / ratio + 0.25) - 0.5
    max_rows = max_columns * ratio
    if max_columns < 1:
        return token, (limit - 2) // 2 * token
    if max_rows < 1:
        return (limit - 3) * token, token
    scale = min(math.floor(max_columns) * token / w, math.floor(max_rows) * token / h)
    return math.floor(w * scale / patch) * patch, math.floor(h * scale / patch) * patch


def _content_size(width: int, height: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the image's own shape that the canvas has room for, a pixel wide and high at least."""
    if width / height > canvas[0] / canvas[1]:
        return canvas[0], max(round(height / width * canvas[0]), 1)
    if width / height < canvas[0] / canvas[1]:
        return max(round(width / height * canvas[1]), 1), canvas[1]
    return canvas
