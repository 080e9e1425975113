"""The vision encoder: what another implementation recorded, and bits that depend on nothing but the image."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import Params, init_params
from deepinfer_jax.model.parts import with_random_vision
from deepinfer_jax.model.vision import ImageOutput, encode_image, pixel_values
from deepinfer_jax.ops import image_grid as grids
from deepinfer_jax.ops.full_attention import KEY_BLOCK
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.fixtures import read_arrays
from deepinfer_jax.testing.random_config import random_config
from deepinfer_jax.testing.tolerances import STAGE_RELATIVE
from tests.model.running import COMPILER_OPTIONS

DATA = Path(__file__).parents[1] / "data"
TINY_A = DATA / "tiny_a"
MODES = ("fp32_noqdq", "fp32", "bf16", "q")
STAGES = ("vision.patch_embed.out", "vision.blocks.0.out", "vision.blocks.1.out", "vision.out", "aligner.out")
ROOM = 600  # patches that the encoder of the larger model is compiled for
# Features after other sums in another order, both float32.
SUM_ORDER_REL_L2 = 1e-5


@functools.cache
def compiled_encode(config: RuntimeConfig, capture: tuple[str, ...] = ()) -> Callable[..., ImageOutput]:
    return jax.jit(functools.partial(encode_image, config=config, capture=capture), compiler_options=COMPILER_OPTIONS)


@pytest.fixture(scope="module")
def params() -> Params:
    weights = TINY_A / "weights_released.safetensors"
    return load_params(TINY_A, load_config(TINY_A), weights_file=weights, progress=False, with_vision=True)


def recorded_image(mode: str) -> tuple[dict[str, np.ndarray], jax.Array, jax.Array]:
    recorded = read_arrays(DATA / "vision" / f"vision_{mode}.safetensors")
    patches = np.array(recorded["patches"])
    return recorded, jnp.asarray(patches.reshape(len(patches), -1)), jnp.asarray(recorded["grid_hw"][0], jnp.int32)


@pytest.mark.parametrize("mode", MODES)
def test_every_recorded_stage(params: Params, mode: str):
    """Bit-equal where values are rounded to bf16, and in float32 but for the order of sums."""
    recorded, patches, grid = recorded_image(mode)
    config = RuntimeConfig(model=load_config(TINY_A), numerics=mode)
    output = compiled_encode(config, ("*",))(params.vision, patches, grid)
    assert output.stages.keys() == set(STAGES)
    for name in STAGES:
        want = np.array(recorded[name])
        got = np.asarray(output.stages[name])[: len(want)]
        if config.policy.rounds_activations:
            compare.assert_bitwise(got, want)
        else:
            compare.assert_close(got, want, rel_l2=STAGE_RELATIVE)


def test_span_has_the_recorded_roles(params: Params):
    """Delimiters are the learned vectors, tokens the aligner's rows in order, and nothing stands behind the end."""
    recorded, patches, grid = recorded_image("q")
    config = RuntimeConfig(model=load_config(TINY_A), numerics="q")
    span = np.asarray(compiled_encode(config)(params.vision, patches, grid).span)
    start, types = int(recorded["span_start"][0]), recorded["token_types"][0]
    roles = types[start : start + 10]
    assert (types[:start] == -1).all() and (types[start + 10 :] == -1).all() and (roles >= 0).all()
    vision = params.vision
    assert vision is not None
    marks = {grids.START: vision.image_start, grids.NEWLINE: vision.image_newline, grids.END: vision.image_end}
    features = iter(np.array(recorded["aligner.out"]))
    for row, role in zip(span, roles, strict=False):
        compare.assert_bitwise(row, next(features) if role == grids.IMAGE else marks[int(role)])
    assert next(features, None) is None
    assert len(span) == config.model.vision.max_image_tokens and not span[10:].any()


def larger(numerics: str, **options) -> tuple[Params, RuntimeConfig]:
    """A random encoder, with room for images of several key blocks."""
    model = random_config(0)
    vision = dataclasses.replace(model.vision, max_image_tokens=90)
    model = dataclasses.replace(model, vision=vision)
    params = with_random_vision(init_params(model, seed=3), model, seed=3)
    return params, RuntimeConfig(model=model, numerics=numerics, **options)


def random_patches(seed: int, num_patches: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_patches, 48)).astype(np.float32)


@pytest.mark.parametrize("numerics", ["fp32", pytest.param("q", marks=pytest.mark.slow)])
def test_bits_depend_on_the_image_alone(numerics: str):
    """Not on the room behind its patches, not on what stands there, not on the images encoded before."""
    params, config = larger(numerics)
    encode = compiled_encode(config)
    assert KEY_BLOCK < 26 * 22
    images = {
        "one": ((1, 1), 1),
        "small": ((5, 7), 35),
        "two_key_blocks": ((26, 22), 2 * ROOM),
        "column": ((40, 1), ROOM),
    }
    for number, (shape, other_room) in enumerate(images.values()):
        grid, num_patches = jnp.asarray(shape, jnp.int32), shape[0] * shape[1]
        own = random_patches(number, num_patches)
        spans = []
        for room, filler in ((ROOM, 0.0), (ROOM, np.nan), (other_room, 3.0)):
            padded = np.full((room, 48), filler, np.float32)
            padded[:num_patches] = own
            spans.append(encode(params.vision, jnp.asarray(padded), grid).span)
        assert np.isfinite(np.asarray(spans[0], np.float32)).all()
        compare.assert_bitwise(spans[1], spans[0])
        compare.assert_bitwise(spans[2], spans[0])


def test_captured_stages_change_no_bit(params: Params):
    """Blocks under names are unrolled, and otherwise share one body."""
    _, patches, grid = recorded_image("q")
    config = RuntimeConfig(model=load_config(TINY_A), numerics="q")
    plain = compiled_encode(config)(params.vision, patches, grid)
    compare.assert_bitwise(compiled_encode(config, ("*",))(params.vision, patches, grid).span, plain.span)
    assert plain.stages == {}


def test_each_patch_reaches_every_token():
    """Attention is over the whole image, and positions tell patches apart: two exchanged patches change all tokens."""
    params, config = larger("fp32")
    patches, grid = random_patches(8, ROOM), jnp.asarray([6, 6], jnp.int32)
    span = compiled_encode(config)(params.vision, jnp.asarray(patches), grid).span
    patches[[0, 35]] = patches[[35, 0]]
    changed = compiled_encode(config)(params.vision, jnp.asarray(patches), grid).span
    differs = (np.asarray(span) != np.asarray(changed)).any(axis=1)
    np.testing.assert_array_equal(differs[:8], [False, True, True, False, True, True, False, False])


@pytest.mark.slow
def test_gradients_exist_without_invariance():
    """All rows at once give the same features up to the order of sums, and can be differentiated."""
    params, config = larger("fp32")
    free = dataclasses.replace(config, is_invariant=False)
    patches, grid = jnp.asarray(random_patches(9, 35)), jnp.asarray([5, 7], jnp.int32)
    span = compiled_encode(config)(params.vision, patches, grid).span

    def loss(patches: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = encode_image(params.vision, patches, grid, config=free).span
        return jnp.sum(made * span), made

    (_, made), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(patches)
    compare.assert_close(made, span, rel_l2=SUM_ORDER_REL_L2)
    assert np.isfinite(np.asarray(slope)).all() and (np.asarray(slope) != 0).any(axis=1).all()


def test_unknown_stage_is_refused(params: Params):
    config = RuntimeConfig(model=load_config(TINY_A))
    _, patches, grid = recorded_image("q")
    with pytest.raises(ValueError, match=r"\['vision.blocks.2.out'\] match no stage; .*vision.blocks.1.out"):
        compiled_encode(config, ("vision.blocks.2.out",))(params.vision, patches, grid)


def test_pixel_values_are_exact():
    codes = np.arange(256, dtype=np.uint8)[None, :]
    want = (codes.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    compare.assert_bitwise(jax.jit(pixel_values)(jnp.asarray(codes)), want)
