"""Images to patches: sizes as the release plans them, pixels as Pillow makes them, and clear words for all the rest."""

import base64
import dataclasses
import io
import math
import random
import urllib.parse
import warnings
from pathlib import Path

import deepseek_recipe
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.testing.fixtures import read_arrays
from deepinfer_jax.text import images
from deepinfer_jax.text.images import cut_patches, fit_image, load_image, plan_image, prepare_image

DATA = Path(__file__).parents[1] / "data"
NUM_SIZES = 20_000
# spec: vision 3
TOKENS = {
    (1, 1): 184,
    (14, 14): 184,
    (100, 100): 184,
    (544, 544): 184,
    (800, 600): 317,
    (1288, 1288): 994,
    (1344, 1344): 994,
    (3000, 2000): 977,
    (50, 4000): 350,
    (4000, 40): 264,
}


@pytest.fixture(scope="module")
def flash() -> VisionConfig:
    return load_config(shipped_config("model/deepseek-v4.1-flash.json")).vision


@pytest.fixture(scope="module")
def tiny() -> VisionConfig:
    return load_config(DATA / "tiny_a").vision


@pytest.fixture
def picture(seed_from_name: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed_from_name).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str, **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def random_sizes(largest: int = 11_585, count: int = NUM_SIZES) -> list[tuple[int, int]]:
    rng = random.Random(3)
    return [(draw_size(rng, largest), draw_size(rng, largest)) for _ in range(count)]


def draw_size(rng: random.Random, largest: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(largest))))


def recipe_tokens(width: int, height: int) -> int:
    info = deepseek_recipe.ImageInfo(b"", width, height)
    return deepseek_recipe.MultiModalData([info]).image_token_adjustment() + 1


# --- sizes


@pytest.mark.parametrize("size", TOKENS, ids=str)
def test_token_counts_of_the_specification(flash, size):
    assert plan_image(*size, flash).num_tokens == TOKENS[size]


def test_plans_of_the_recorded_sizes(flash):
    recorded = read_arrays(DATA / "vision" / "image_grid.safetensors")
    assert len(recorded["width_height"]) == 40
    for (width, height), want in zip(recorded["width_height"], recorded["llmh_llmw_pxh_pxw"], strict=True):
        plan = plan_image(int(width), int(height), flash)
        assert (plan.token_rows, plan.token_columns, plan.height, plan.width) == tuple(want), (width, height)


def test_counts_are_those_of_the_recipe(flash):
    """The one exception: where rounding down left the canvas below min_pixels, the recipe enlarges it a little."""
    num_exceptions = 0
    for width, height in random_sizes():
        plan, want = plan_image(width, height, flash), recipe_tokens(width, height)
        if plan.width * plan.height >= flash.min_pixels:
            assert plan.num_tokens == want, (width, height)
            continue
        num_exceptions += 1
        is_strip = max(width, height) > 70 * min(width, height)
        assert 0 <= want - plan.num_tokens <= (0.08 * want if is_strip else 5), (width, height)
    assert 0 < num_exceptions < NUM_SIZES * 0.04


@pytest.mark.parametrize("ratio", [None, 4.0], ids=["any_ratio", "ratio_4"])
@pytest.mark.parametrize("name", ["flash", "tiny", "few_tokens"])
def test_every_plan_fits(flash, tiny, name: str, ratio: float | None):
    vision = {"flash": flash, "tiny": tiny, "few_tokens": dataclasses.replace(tiny, max_image_tokens=4)}[name]
    vision = dataclasses.replace(vision, max_wh_ratio=ratio)
    for width, height in [*random_sizes(count=1000), (100_000, 1), (1, 100_000)]:
        plan = plan_image(width, height, vision)
        patch, factor = vision.patch_size, vision.downsample_ratio
        assert (plan.width, plan.height) == (plan.patch_columns * patch, plan.patch_rows * patch)
        assert (plan.token_rows, plan.token_columns) == (
            -(-plan.patch_rows // factor),
            -(-plan.patch_columns // factor),
        )
        assert plan.num_tokens <= vision.max_image_tokens
        assert 1 <= plan.num_patches <= images.max_patches(vision)
        assert 1 <= plan.content_width <= plan.width and 1 <= plan.content_height <= plan.height


def test_an_image_wider_than_the_ratio_is_stretched(flash):
    vision = dataclasses.replace(flash, max_wh_ratio=2.0)
    wide = plan_image(3000, 1000, vision)
    assert (wide.width, wide.height) == plan_size(2000, 1000, flash) == (wide.content_width, wide.content_height)
    assert plan_image(1500, 1000, vision) == plan_image(1500, 1000, flash)
    assert plan_image(1000, 3000, vision) == plan_image(1000, 3000, flash)


def plan_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    plan = plan_image(width, height, vision)
    return plan.width, plan.height


def test_an_empty_image_has_no_plan(flash):
    with pytest.raises(ValueError, match="0 x 5 pixels is empty"):
        plan_image(0, 5, flash)


# --- pixels


def test_patches_of_the_recorded_picture(tiny):
    recorded = read_arrays(DATA / "vision" / "image_patches.safetensors")
    prepared = prepare_image(recorded["png"].tobytes(), tiny, prompt=0)
    plan = prepared.plan
    assert (*prepared.grid, plan.token_rows, plan.token_columns) == tuple(recorded["grid"])
    values = (prepared.patches.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    want = recorded["patches"]
    np.testing.assert_array_equal(values.astype(want.dtype), want.reshape(len(want), -1))


@pytest.mark.parametrize("size", [(40, 30), (33, 90), (7, 200), (2000, 9), (1, 1), (301, 299)], ids=str)
def test_picture_stands_in_the_middle_as_pillow_pads_it(tiny, seed_from_name: int, size):
    pixels = np.random.default_rng(seed_from_name).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    picture, plan = Image.fromarray(pixels), plan_image(*size, tiny)
    want = ImageOps.pad(picture, (plan.width, plan.height), Image.Resampling.BICUBIC, color=(127, 127, 127))
    np.testing.assert_array_equal(np.asarray(fit_image(picture, plan)), np.asarray(want))


def test_a_strip_keeps_a_line_of_pixels(flash):
    """One that Pillow's own padding would shrink to nothing."""
    picture = Image.new("RGB", (100_000, 1), (200, 10, 10))
    prepared = prepare_image(picture, flash, prompt=0)
    assert prepared.plan.content_height == 1
    assert (prepared.patches == 200).any() and (prepared.patches == 127).any()


def test_patches_are_cut_in_reading_order():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    patches = cut_patches(pixels, patch_size=2)
    assert patches.shape == (6, 12)
    want = [pixels[r : r + 2, c : c + 2, k].ravel() for r in (0, 2) for c in (0, 2, 4) for k in range(3)]
    np.testing.assert_array_equal(patches, np.concatenate(want).reshape(6, 12))


# --- kinds of input


def test_every_kind_of_input_gives_the_same_image(tiny, picture, tmp_path):
    data = encoded(picture, "PNG")
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    body = base64.b64encode(data).decode()
    kinds = [
        picture,
        np.asarray(picture),
        jnp.asarray(np.asarray(picture)),
        np.asarray(picture)[:, ::-1][:, ::-1],
        data,
        bytearray(data),
        memoryview(data),
        file,
        str(file),
        f"data:image/png;base64,{body}",
        f"DATA:;BASE64,{urllib.parse.quote(body, safe='')}",
        f"data:image/png,{urllib.parse.quote_from_bytes(data)}",
    ]
    want = prepare_image(picture, tiny, prompt=0)
    for kind in kinds:
        got = prepare_image(kind, tiny, prompt=0)
        np.testing.assert_array_equal(got.patches, want.patches)
        assert (got.digest, got.plan) == (want.digest, want.plan)
    assert picture.getpixel((0, 0)) is not None, "the caller's image was closed"


def test_digest_tells_images_apart(tiny):
    grey = np.full((24, 24, 3), 127, np.uint8)
    spotted = grey.copy()
    spotted[3, 4, 1] += 1
    plain, other, turned = (prepare_image(a, tiny, prompt=0) for a in (grey, spotted, grey.repeat(2, axis=1)))
    assert len({plain.digest, other.digest, turned.digest}) == 3
    upright = prepare_image(grey.repeat(2, axis=0), tiny, prompt=0)
    np.testing.assert_array_equal(upright.patches, turned.patches)  # equal bytes in another grid
    assert upright.digest != turned.digest


FORMS = [("PNG", "RGB"), ("JPEG", "L"), ("WEBP", "RGB"), ("GIF", "P"), ("BMP", "RGB"), ("PPM", "RGB"), ("PNG", "1")]


@pytest.mark.parametrize("form, mode", [*FORMS, ("PNG", "LA"), ("JPEG", "CMYK"), ("JPEG", "YCbCr")])
def test_formats_and_modes_are_what_pillow_makes_of_them(picture, form: str, mode: str):
    data = encoded(picture.convert(mode), form)
    want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(load_image(data)), want)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_alpha_is_dropped_and_not_composited(picture, form: str):
    transparent = picture.copy()
    transparent.putalpha(0)
    data = encoded(transparent, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
    np.testing.assert_array_equal(np.asarray(load_image(data)), np.asarray(picture))
    np.testing.assert_array_equal(np.asarray(load_image(np.asarray(transparent))), np.asarray(picture))


@pytest.mark.parametrize("transparency", [bytes([0, 200, 255]), 1], ids=["bytes", "index"])
def test_palette_with_transparency_gives_its_colours(picture, transparency):
    palette = picture.quantize(8)
    data = encoded(palette, "PNG", transparency=transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = load_image(data)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(palette.convert("RGB")))


def test_sixteen_bits_are_cut_to_the_high_byte():
    values = (np.arange(64 * 64, dtype=np.uint32) * 16).astype(np.uint16).reshape(64, 64)
    grey = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    picture = Image.fromarray(values)
    assert picture.mode == "I;16"
    for source in (values, values[..., None], picture, encoded(picture, "PNG"), values.astype(">u2")):
        np.testing.assert_array_equal(np.asarray(load_image(source)), grey)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(picture, form: str):
    frames = [picture.quantize(16).convert("RGB"), ImageOps.invert(picture)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 2
    np.testing.assert_array_equal(np.asarray(load_image(data)), np.asarray(frames[0]))


def test_exif_turns_an_image_only_when_asked_to(picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    data = encoded(picture, "PNG", exif=exif)
    np.testing.assert_array_equal(np.asarray(load_image(data)), np.asarray(picture))
    turned = load_image(data, applies_exif=True)
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(picture.transpose(Image.Transpose.ROTATE_270)))


# --- what is refused


def bomb() -> bytes:
    """A file of a few bytes that would be an image of 10^10 pixels."""
    data = bytearray(encoded(Image.new("RGB", (1, 1)), "BMP"))
    data[18:26] = np.asarray([100_000, 100_000], "<i4").tobytes()
    return bytes(data)


REFUSED = {
    "text": (b"no image at all", "no image of the formats PNG, JPEG"),
    "nothing": (b"", "no image of the formats"),
    "tiff": (encoded(Image.new("RGB", (4, 4)), "TIFF"), "no image of the formats"),
    "truncated": (encoded(Image.new("RGB", (64, 64)), "PNG")[:60], "is damaged: .*give a complete file"),
    "bomb": (bomb(), "at most 89478485 pixels"),
    "no_file": ("/nowhere/picture.png", "/nowhere/picture.png cannot be read: No such file"),
    "web": ("https://example.com/a.png", "nothing is downloaded; give the bytes"),
    "no_comma": ("data:image/png;base64", "has no comma"),
    "bad_base64": ("data:image/png;base64,a?b", "no valid base64"),
    "floats": (np.zeros((4, 4, 3), np.float32), "dtype float32 is no image; give .* uint8 or uint16"),
    "channels_first": (np.zeros((3, 8, 8), np.uint8), r"shape \[3, 8, 8\]"),
    "empty_array": (np.zeros((0, 8, 3), np.uint8), r"shape \[0, 8, 3\]"),
    "large_array": (np.broadcast_to(np.uint8(0), (10_000, 10_000)), "10000 x 10000 pixels is too large"),
    "no_range": (Image.new("F", (4, 4)), "'F' .32 bits a channel. has no agreed range"),
    "number": (7, "a int is no image; give a Pillow image, an array, a path"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_prompt_and_say_what_to_do(tiny, name: str):
    source, text = REFUSED[name]
    with pytest.raises(ValueError, match=f"^image 2 of prompt 5: .*{text}"):
        prepare_image(source, tiny, prompt=5, image=2)


def test_header_alone_decides_what_is_too_large(monkeypatch, picture):
    monkeypatch.setattr(images, "MAX_PIXELS", 30 * 40 - 1)
    monkeypatch.setattr(images, "_as_rgb", lambda image: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="40 x 30 pixels is too large; at most 1199"):
        load_image(encoded(picture, "PNG"))


@pytest.mark.parametrize("form, mode", [*FORMS, ("JPEG", "CMYK"), ("WEBP", "RGBA")])
def test_damaged_files_are_images_or_value_errors(picture, seed_from_name: int, form: str, mode: str):
    rng = random.Random(seed_from_name)
    whole = encoded(picture.convert(mode), form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            data = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
            for _ in range(rng.randrange(1, 6)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                assert load_image(bytes(data)).mode == "RGB"
            except ValueError as error:
                assert str(error)
