"""Images in the network: recorded streams, logits and decode, and rows that do not care what else a step holds."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import StepOutput, embed_tokens, forward
from deepinfer_jax.model.batch import StepBatch, make_batch, pad_rows, with_images
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.model.vision import encode_image
from deepinfer_jax.ops.engram import DEAD
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.fixtures import read_arrays
from deepinfer_jax.testing.tolerances import LAYER_RELATIVE, LOGIT_ABSOLUTE, STAGE_RELATIVE
from tests.model.running import COMPILER_OPTIONS, compiled_forward, new_state, padded

DATA = Path(__file__).parents[1] / "data"
TINY_A = DATA / "tiny_a"
SPAN_LEN = 10
# Sizes of the one step with images that is compiled for each policy.
ROWS = 56
TABLE_LEN = 3 * SPAN_LEN
# Light captures of the recording that a forward has under the same name.
EQUAL = ("router_ids", "topk_idxs", "candidate_mask")
CAPTURE = tuple(f"layers.*.{name}" for name in ("stream_out", "engram_rows", "router_*", *EQUAL[1:]))
# Logits from the recorded last hidden state: a float32 product of bf16 operands.
HEAD_RELATIVE = 1e-6

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def params() -> Params:
    weights = TINY_A / "weights_released.safetensors"
    return load_params(TINY_A, load_config(TINY_A), weights_file=weights, progress=False, with_vision=True)


def tiny(numerics: str, **options: Any) -> RuntimeConfig:
    return RuntimeConfig(model=load_config(TINY_A), numerics=numerics, **options)


@functools.cache
def recording(mode: str) -> Arrays:
    return read_arrays(DATA / "vision" / f"vision_{mode}.safetensors")


@functools.cache
def compiled_encode(config: RuntimeConfig):
    return jax.jit(functools.partial(encode_image, config=config), compiler_options=COMPILER_OPTIONS)


@functools.cache
def compiled_step(config: RuntimeConfig, capture: tuple[str, ...]):
    return jax.jit(functools.partial(forward, config=config, capture=capture), compiler_options=COMPILER_OPTIONS)


def recorded_span(params: Params, mode: str) -> jax.Array:
    patches = np.array(recording(mode)["patches"])
    grid = jnp.asarray(recording(mode)["grid_hw"][0], jnp.int32)
    encode = compiled_encode(tiny(mode))
    return encode(params.vision, jnp.asarray(patches.reshape(len(patches), -1)), grid).span[:SPAN_LEN]


def relative(got: Any, want: np.ndarray) -> float:
    got64, want64 = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got64 - want64) / np.linalg.norm(want64))


def with_spans(batch: StepBatch, spans: list[jax.Array], first_rows: list[int]) -> StepBatch:
    """The batch with these spans, in a table of the compiled size."""
    images = with_images(batch, spans, first_rows).images
    assert images is not None
    features = jnp.pad(images.features, ((0, TABLE_LEN - images.features.shape[0]), (0, 0)))
    return dataclasses.replace(batch, images=dataclasses.replace(images, features=features))


def recorded_batch(params: Params, mode: str) -> StepBatch:
    """The recorded prompt with its image."""
    recorded, pages = recording(mode), new_state(tiny(mode))[1]
    batch = padded(make_batch([recorded["input_ids"][0].tolist()], [0], [1], pages, logits="all"), multiple=ROWS)
    return with_spans(batch, [recorded_span(params, mode)], [int(recorded["span_start"][0])])


def captured(params: Params, mode: str, capture: tuple[str, ...], forced: Arrays | None = None) -> StepOutput:
    """The recorded prompt with these stages captured, and with others forced."""
    state, _ = new_state(tiny(mode))
    rows = {
        name: jnp.pad(jnp.asarray(v), [(0, ROWS - 25)] + [(0, 0)] * (v.ndim - 1)) for name, v in (forced or {}).items()
    }
    step = compiled_step(tiny(mode), capture)
    return step(params, state, recorded_batch(params, mode), forced_selection=rows)[0]


@pytest.mark.parametrize("mode", ["fp32_noqdq", "fp32", "bf16", "q"])
def test_recorded_merged_streams(params: Params, mode: str):
    recorded, config = recording(mode), tiny(mode)
    batch = recorded_batch(params, mode)
    embed = jax.jit(functools.partial(embed_tokens, config=config, stages=Stages((), {})))
    merged = np.asarray(embed(params, batch.tokens, batch.images)[0])[:25]
    want = np.array(recorded["merged_stream_in"][0])
    if config.policy.rounds_activations:
        compare.assert_bitwise(merged, want)
    else:
        compare.assert_close(merged, want, rel_l2=STAGE_RELATIVE)
    assert (merged == merged[:, :1]).all(), "all streams begin equal"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32_noqdq", "fp32"])
def test_recorded_logits_and_decode_in_float32(params: Params, mode: str):
    """The decode steps run in the program of the prefill: a step with room for images may hold none."""
    recorded, step = recording(mode), compiled_forward(tiny(mode))
    batch, tokens = recorded_batch(params, mode), recorded["decode_tokens"][0]
    state, pages = new_state(tiny(mode))
    logits, state = step(params, state, batch)
    np.testing.assert_allclose(logits[:25], recorded["logits"][0], rtol=0, atol=LOGIT_ABSOLUTE)
    last = np.asarray(logits[24])
    only_row_0 = jnp.where(jnp.arange(ROWS, dtype=jnp.int32) == 0, 0, -1)
    assert batch.images is not None
    no_images = dataclasses.replace(batch.images, index=jnp.full(ROWS, -1, jnp.int32))
    for index in range(4):
        assert last.argmax() == tokens[index]
        one = make_batch([[int(tokens[index])]], [25 + index], [1], pages, logits="all")
        one = dataclasses.replace(padded(one, multiple=ROWS), logit_rows=only_row_0)
        logits, state = step(params, state, dataclasses.replace(one, images=no_images))
        last = np.asarray(logits[0])
        np.testing.assert_allclose(last, recorded["decode_logits"][0, index], rtol=0, atol=LOGIT_ABSOLUTE)


def test_visual_bias_moves_image_rows_and_what_follows(params: Params):
    """Expert 5 gets the largest bias of image rows; no row in front of the image may notice."""
    config, batch = tiny("fp32"), recorded_batch(params, "fp32")
    start = int(recording("fp32")["span_start"][0])
    own, moved = (
        np.asarray(compiled_forward(config)(p, new_state(config)[0], batch)[0])
        for p in (params, with_visual_bias(params, 5, 100.0))
    )
    compare.assert_bitwise(moved[:start], own[:start])
    assert (moved[start : start + SPAN_LEN] != own[start : start + SPAN_LEN]).any(axis=1).all()


def with_visual_bias(params: Params, expert: int | slice, bias: float) -> Params:
    favoured = params.moe.bias_vl.at[:, expert].set(bias)
    return dataclasses.replace(params, moe=dataclasses.replace(params.moe, bias_vl=favoured))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32_noqdq", "fp32"])
def test_recorded_stages_in_float32(params: Params, mode: str):
    recorded, config = recording(mode), tiny(mode)
    stages = {name: np.asarray(value)[:25] for name, value in captured(params, mode, CAPTURE).stages.items()}
    for ordinal, layer in enumerate(config.model.engram_layer_ids):
        got = stages[f"layers.{layer}.engram_rows"]
        np.testing.assert_array_equal(got, recorded["engram_hash_ids"][0, :, ordinal])
    for name, value in stages.items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "stream_out":
            compare.assert_close(value, recorded[name][0], rel_l2=STAGE_RELATIVE)
        elif leaf in EQUAL and name in recorded:
            want = recorded[name].reshape(25, -1)
            np.testing.assert_array_equal(value[:, : want.shape[1]], want, err_msg=name)
    moved = captured(with_visual_bias(params, 5, 100.0), mode, CAPTURE).stages
    ids, scores, weights = (np.asarray(moved[f"layers.0.router_{n}"])[:25] for n in ("ids", "scores", "weights"))
    is_image = recorded["token_types"][0] >= 0
    np.testing.assert_array_equal(ids[~is_image], recorded["layers.0.router_ids"][~is_image])
    assert (ids[is_image, 0] == 5).all()
    chosen = np.take_along_axis(scores.astype(np.float64), ids, axis=1)
    want = chosen / chosen.sum(axis=1, keepdims=True) * config.model.routed_scaling_factor
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", "q"])
def test_recorded_layers_with_roundings(params: Params, mode: str):
    """Every layer from the recorded streams and choices in front of it."""
    recorded, config = recording(mode), tiny(mode)
    forced: Arrays = {"final_hidden": recorded["final_hidden"][0]}
    for layer in range(config.model.num_hidden_layers):
        forced[f"layers.{layer}.stream_out"] = recorded[f"layers.{layer}.stream_out"][0]
        forced[f"layers.{layer}.router_ids"] = recorded[f"layers.{layer}.router_ids"]
        if (name := f"layers.{layer}.topk_idxs") in recorded:
            forced[name] = recorded[name][0].astype(np.int32)
        if (name := f"layers.{layer}.candidate_mask") in recorded:
            missing = 4 * config.page_tokens - recorded[name].shape[-1]
            forced[name] = np.pad(recorded[name][0].astype(bool), ((0, 0), (0, missing)))
    output = captured(params, mode, ("layers.*.stream_out", "layers.*.router_ids"), forced)
    for layer in range(config.model.num_hidden_layers):
        name = f"layers.{layer}.stream_out"
        assert relative(output.stages[name][:25], recorded[name][0]) <= LAYER_RELATIVE, name
        ids = np.asarray(output.stages[f"layers.{layer}.router_ids"])[:25]
        assert (ids == recorded[f"layers.{layer}.router_ids"]).mean() >= 0.97, layer
    assert relative(output.logits[:25], recorded["logits"][0]) <= HEAD_RELATIVE


# --- invariance: three requests, two of them with images


PROMPTS: dict[str, list[int]] = {
    "cat": [0, 40, 41, *[3] * SPAN_LEN, 50, 51, 52],
    "dog": [0, *[3] * SPAN_LEN, 60, 61, *[3] * SPAN_LEN, 62],
    "text": [0, 70, 71, 72, 73, 3, 74, 75, 76],
}
IMAGES: dict[str, list[tuple[int, str]]] = {"cat": [(3, "a")], "dog": [(1, "b"), (13, "a")], "text": []}
SLOTS = {"cat": 1, "dog": 2, "text": 0}


def spans(params: Params, config: RuntimeConfig) -> dict[str, jax.Array]:
    encode = compiled_encode(config)
    made = {}
    for name, seed in (("a", 1), ("b", 2)):
        patches = jnp.asarray(np.random.default_rng(seed).standard_normal((35, 48)), jnp.float32)
        made[name] = encode(params.vision, patches, jnp.asarray([5, 7], jnp.int32)).span[:SPAN_LEN]
    return made


def step_of(made: dict[str, jax.Array], parts: list[tuple[str, int, int]], pages: np.ndarray) -> StepBatch:
    """Rows start..end-1 of requests, in this order, padded to the one compiled size."""
    tokens = [PROMPTS[name][start:end] for name, start, end in parts]
    batch = make_batch(tokens, [p[1] for p in parts], [SLOTS[p[0]] for p in parts], pages, logits="all")
    firsts = np.cumsum([0, *(len(t) for t in tokens)])
    placed: list[tuple[jax.Array, int]] = []
    for (name, start, end), first in zip(parts, firsts, strict=False):
        for position, image in IMAGES[name]:
            begin, stop = max(position, start), min(position + SPAN_LEN, end)
            if begin < stop:
                placed.append((made[image][begin - position : stop - position], int(first) + begin - start))
    batch = padded(batch, multiple=ROWS)
    return with_spans(batch, [span for span, _ in placed], [row for _, row in placed]) if placed else batch


def run_steps(
    params: Params, config: RuntimeConfig, steps: list[list[tuple[str, int, int]]]
) -> tuple[dict[str, np.ndarray], State]:
    """Logits of every row of each request, and the last state."""
    state, pages = new_state(config)
    made, rows = spans(params, config), {name: [] for name in PROMPTS}
    for parts in steps:
        logits, state = compiled_forward(config)(params, state, step_of(made, parts, pages))
        first = 0
        for name, start, end in parts:
            rows[name].append(np.asarray(logits)[first : first + end - start])
            first += end - start
    return {name: np.concatenate(own) for name, own in rows.items() if own}, state


def whole(*names: str) -> list[tuple[str, int, int]]:
    return [(name, 0, len(PROMPTS[name])) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["fp32", "q"])
def test_rows_do_not_depend_on_other_images(params: Params, numerics: str):
    """Alone, together, in another order, and cut around and inside the images: the same bits of logits and state."""
    config = tiny(numerics)
    together, state = run_steps(params, config, [whole("cat", "dog", "text")])
    swapped, swapped_state = run_steps(params, config, [whole("text", "dog", "cat")])
    compare.assert_bitwise(swapped, together)
    compare.assert_bitwise(swapped_state, state)
    cut = [[("dog", 0, 1), ("cat", 0, 14)], [("dog", 1, 17), ("text", 0, 7)], [("dog", 17, 24), ("cat", 14, 16)]]
    chunked, chunked_state = run_steps(params, config, [*cut, [("text", 7, 9)]])
    compare.assert_bitwise(chunked, together)
    compare.assert_bitwise(chunked_state, state)
    for name in PROMPTS:
        alone, _ = run_steps(params, config, [whole(name)])
        compare.assert_bitwise(alone[name], together[name])
    token_by_token, _ = run_steps(params, config, [[("cat", 0, 13)], *([("cat", p, p + 1)] for p in (13, 14, 15))])
    compare.assert_bitwise(token_by_token["cat"], together["cat"])


def test_history_holds_dead_tokens(params: Params):
    config = tiny("fp32")
    _, state = run_steps(params, config, [whole("cat", "text")])
    history, tokens = np.asarray(state.history), np.asarray(params.engram.token_map)
    kept = [(p, DEAD if 3 <= p < 13 else tokens[t]) for p, t in enumerate(PROMPTS["cat"])][-config.history_len :]
    np.testing.assert_array_equal(
        [history[SLOTS["cat"], p % config.history_len] for p, _ in kept], [c for _, c in kept]
    )
    assert (history[SLOTS["text"]] != DEAD).all()


def test_text_steps_read_nothing_of_images(params: Params):
    """The program of a step without images has no use for the visual bias: it may hold anything."""
    config = tiny("fp32")
    want, state = run_steps(params, config, [whole("text")])
    got, got_state = run_steps(with_visual_bias(params, slice(None), jnp.nan), config, [whole("text")])
    compare.assert_bitwise(got, want)
    compare.assert_bitwise(got_state, state)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["q", "fp32"])
def test_compact_replay_knows_the_images_of_its_tail(params: Params, numerics: str):
    """An image inside the tail: only the tail's rows in the decoder layers, or all rows with masked windows."""
    base = tiny(numerics)
    keep = base.model.sliding_window + base.rollback_tokens
    tokens, start = [*range(40, 60), *[3] * SPAN_LEN, 60, 61], 20
    tail = len(tokens) - keep
    assert tail < start
    got = {}
    for mode in ("mask", "compact"):
        config = dataclasses.replace(base, replay_mode=mode, replay_keep_tokens=keep)
        state, pages = new_state(config)
        batch = padded(make_batch([tokens], [0], [1], pages, logits="all"), multiple=32)
        batch = with_images(batch, [spans(params, config)["a"]], [start])
        tails = jnp.full(32, tail, jnp.int32)
        rows = jnp.arange(tail, 32, dtype=jnp.int32) if mode == "compact" else None
        batch = dataclasses.replace(batch, tail_starts=tails, tail_rows=rows)
        got[mode] = np.asarray(compiled_forward(config)(params, state, batch)[0])[tail:]
    compare.assert_bitwise(got["compact"], got["mask"])


# --- putting spans into a batch


def test_spans_must_have_rows_of_their_own():
    batch = make_batch([[1] * 8], [0], [0], np.array([[0]]))
    span = jnp.zeros((3, 4))
    for firsts in ([6], [-1], [1, 3]):
        with pytest.raises(ValueError, match="a span of 3 rows at row .* overlaps another one or leaves the 8 rows"):
            with_images(batch, [span] * len(firsts), firsts)
    with pytest.raises(ValueError, match="2 spans and 1 first rows"):
        with_images(batch, [span, span], [0])
    placed = pad_rows(with_images(batch, [span, span + 1], [5, 0]), multiple=5).images
    assert placed is not None
    np.testing.assert_array_equal(placed.index, [3, 4, 5, -1, -1, 0, 1, 2, -1, -1])
    np.testing.assert_array_equal(placed.features[:, 0], [0, 0, 0, 1, 1, 1])
