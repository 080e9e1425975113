"""Drafts: what another implementation recorded, bits that do not depend on the batch, and what a block may see."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import rows_at
from deepinfer_jax.model.draft import Block, attend_to_block, draft_block, write_context
from deepinfer_jax.model.draft_params import draft_schema, with_random_draft
from deepinfer_jax.model.params import Params, abstract_params, build_params, init_params, leaf_at, schema
from deepinfer_jax.model.state import DraftState, init_draft_state
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.testing import runner as running
from deepinfer_jax.testing.tolerances import LAYER_RELATIVE, LOGIT_ABSOLUTE
from tests.model.drafting import TINY_A, compiled_draft, compiled_write, drafts, recording, written
from tests.model.running import COMPILER_OPTIONS, assert_same_bits

FP32_MODES = ("fp32_noqdq", "fp32")
POLICIES = (*FP32_MODES, "bf16", "q")
# Float32 sums of a head's bf16 operands, in another order, where every rounding in front fell the same way.
SAME_ROUNDINGS_RELATIVE = 1e-6
# Drafts of 12 in which a rounding to bf16 turned and the quantisers behind it made more of it, each stage as much as
# a whole layer. In mode q it is the reciprocal square root, which XLA's CPU backend gives one ulp off for some inputs.
MAX_TURNED_DRAFTS = 2
# Attention of float32 rows against float64.
ATTENTION_RELATIVE = 1e-5


@pytest.fixture(scope="module")
def params() -> Params:
    weights = TINY_A / "weights_released.safetensors"
    return load_params(TINY_A, load_config(TINY_A), weights_file=weights, progress=False, with_draft=True)


def tiny(numerics: str) -> RuntimeConfig:
    return RuntimeConfig(model=load_config(TINY_A), numerics=numerics)


@pytest.mark.parametrize("mode", FP32_MODES)
def test_every_recorded_draft_in_float32(params: Params, mode: str):
    recorded, config = recording(mode), tiny(mode)
    assert recorded.num_drafts == 12
    state = written(params, recorded, config=config)
    got = drafts(params, state, recorded, list(range(12)), config=config)
    np.testing.assert_array_equal(got.ids, recorded.ids)
    np.testing.assert_allclose(got.logits, recorded.logits, rtol=0, atol=LOGIT_ABSOLUTE)
    np.testing.assert_allclose(got.confidence, recorded.confidence, rtol=0, atol=LOGIT_ABSOLUTE)


@pytest.mark.parametrize("mode", [pytest.param("bf16", marks=pytest.mark.slow), "q"])
def test_every_recorded_draft_with_roundings(params: Params, mode: str):
    """Equal ids, and logits equal but for the drafts in which a rounding turned; a wrong rule would move them all."""
    recorded, config = recording(mode), tiny(mode)
    state = written(params, recorded, config=config)
    got = drafts(params, state, recorded, list(range(recorded.num_drafts)), config=config)
    np.testing.assert_array_equal(got.ids, recorded.ids)
    errors = relative_errors(np.asarray(got.logits), recorded.logits)
    is_turned = errors > SAME_ROUNDINGS_RELATIVE
    assert is_turned.sum() <= MAX_TURNED_DRAFTS, errors
    assert errors.max() <= config.model.num_nextn_predict_layers * LAYER_RELATIVE, errors
    same = ~is_turned
    np.testing.assert_allclose(
        np.asarray(got.confidence)[same], recorded.confidence[same], rtol=0, atol=SAME_ROUNDINGS_RELATIVE
    )


@pytest.fixture
def exact_rsqrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reciprocal square root rounded correctly, as the recordings have it."""

    def rsqrt(x: jax.Array) -> jax.Array:
        rounded = lambda v: (1.0 / np.sqrt(np.asarray(v, np.float64))).astype(np.float32)  # noqa: E731
        return jax.pure_callback(rounded, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def forget() -> None:
        compiled_write.cache_clear()
        compiled_draft.cache_clear()

    forget()
    monkeypatch.setattr(jax.lax, "rsqrt", rsqrt)
    yield
    forget()


@pytest.mark.slow
def test_released_numerics_agree_in_every_rounding(params: Params, exact_rsqrt: None):
    recorded, config = recording("q"), tiny("q")
    state = written(params, recorded, config=config)
    got = drafts(params, state, recorded, list(range(recorded.num_drafts)), config=config)
    np.testing.assert_array_equal(got.ids, recorded.ids)
    assert relative_errors(np.asarray(got.logits), recorded.logits).max() <= SAME_ROUNDINGS_RELATIVE
    np.testing.assert_allclose(got.confidence, recorded.confidence, rtol=0, atol=SAME_ROUNDINGS_RELATIVE)


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    axes = tuple(range(1, got.ndim))
    return np.sqrt(np.sum((got - want) ** 2, axis=axes) / np.sum(want**2, axis=axes))


@pytest.mark.slow
@pytest.mark.parametrize("mode", FP32_MODES)
def test_context_of_the_networks_own_forward(params: Params, mode: str):
    """main_hidden from a prefill of prompt and decoded tokens, in place of the recorded one."""
    recorded, config = recording(mode), tiny(mode)
    tokens = tuple(recorded.tokens)
    runner = running.make_runner(params, config, num_rows=len(tokens), num_slots=1, max_len=len(tokens))
    chunk = running.Chunk(slot=0, start=0, tokens=tokens)
    ran = running.run(runner, running.empty_state(runner), [chunk], capture=("main_hidden",))
    own = dataclasses.replace(recorded, hidden=ran.stages[0]["main_hidden"])
    assert own.hidden.shape == recorded.hidden.shape
    state = written(params, own, config=config)
    got = drafts(params, state, own, list(range(own.num_drafts)), config=config)
    np.testing.assert_array_equal(got.ids, recorded.ids)
    np.testing.assert_allclose(got.logits, recorded.logits, rtol=0, atol=LOGIT_ABSOLUTE)
    np.testing.assert_allclose(got.confidence, recorded.confidence, rtol=0, atol=LOGIT_ABSOLUTE)


def parts_of(output, which=slice(None)) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(part)[which] for part in (output.ids, output.logits, output.confidence))


@pytest.mark.parametrize("mode", [pytest.param("fp32", marks=pytest.mark.slow), "q"])
def test_draft_does_not_depend_on_batch(params: Params, mode: str):
    """Twelve requests together, in another order, with padding between them, and each of three alone."""
    recorded, config = recording(mode), tiny(mode)
    state = written(params, recorded, config=config)
    whole = drafts(params, state, recorded, list(range(12)), config=config)
    order = np.random.default_rng(0).permutation(12)
    permuted = drafts(params, state, recorded, order.tolist(), config=config)
    assert_same_bits(parts_of(permuted), parts_of(whole, order))
    sparse = [-1, 3, -1, -1, 7, 0, -1, -1, -1, -1, -1, -1]
    got = drafts(params, state, recorded, sparse, config=config)
    assert_same_bits(parts_of(got, [1, 4, 5]), parts_of(whole, [3, 7, 0]))
    for alone in (0, 5, 11):
        got = drafts(params, state, recorded, [alone], config=config)
        assert_same_bits(parts_of(got), parts_of(whole, [alone]))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", POLICIES)
def test_larger_drafts_do_not_depend_on_batch(numerics: str):
    """Five drafts, a window of 128 that has gone round, and random weights; alone against between two others."""
    model = load_config(shipped_config("model/tiny.json"))
    params = with_random_draft(init_params(model, seed=1), model, seed=1)
    config = RuntimeConfig(model=model, numerics=numerics)
    rng, lengths = np.random.default_rng(2), (200, 7, 131)
    positions = jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in lengths])
    slots = jnp.asarray(np.repeat([2, 0, 1], lengths), jnp.int32)
    hidden = jnp.asarray(rng.standard_normal((sum(lengths), 3 * model.hidden_size)), jnp.float32)
    state = compiled_write(config)(params, init_draft_state(config, num_slots=3), hidden, positions, slots)
    requests = [jnp.asarray(row, jnp.int32) for row in ([9, 8, 7], lengths, [2, 0, 1])]
    whole = compiled_draft(config)(params, state, *requests)
    assert np.isfinite(np.asarray(whole.logits)).all()
    assert len(np.unique(np.asarray(whole.ids))) > 5
    for r in range(3):
        got = compiled_draft(config)(params, state, *(row[r : r + 1] for row in requests))
        assert_same_bits(parts_of(got), parts_of(whole, [r]))


@pytest.mark.parametrize("numerics", ["fp32_noqdq", "q"])
def test_ring_does_not_depend_on_how_rows_came(params: Params, numerics: str):
    """Two requests in one step, in chunks and row by row; rows that were not accepted leave no trace."""
    recorded, config = recording("fp32"), tiny(numerics)
    write, length = compiled_write(config), len(recorded.hidden)
    hidden = {0: recorded.hidden, 2: recorded.hidden[::-1].copy()}

    def step(state: DraftState, chunks: list[tuple[int, int, int]], num_rows: int, rejected: int = 0) -> DraftState:
        rows, positions, slots = [], [], []
        for slot, start, end in chunks:
            rows.append(hidden[slot][start:end])
            positions += range(start, end)
            slots += [slot] * (end - start - rejected) + [-1] * rejected
        pad = num_rows - len(positions)
        arrays = np.pad(np.concatenate(rows), ((0, pad), (0, 0)))
        places = (np.pad(positions, (0, pad)), np.pad(slots, (0, pad), constant_values=-1))
        return write(params, state, jnp.asarray(arrays), *(jnp.asarray(p, jnp.int32) for p in places))

    blank = functools.partial(init_draft_state, config, num_slots=3)
    whole = step(blank(), [(2, 0, length), (0, 0, length)], 2 * length)
    for leaf in jax.tree.leaves(whole):
        assert np.asarray(leaf)[:, [0, 2]].any() and not np.asarray(leaf)[:, 1].any()
    for size in (1, 5):
        state = blank()
        for start in range(0, length, size):
            end = min(start + size, length)
            state = step(state, [(0, start, end), (2, start, end)], 16)
        assert_same_bits(state, whole)
    state = blank()
    for start in range(0, length, 3):  # five rows are offered, three are taken
        end = min(start + 3, length)
        for slot in hidden:
            extra = min(end + 2, length) - end
            state = step(state, [(slot, start, end + extra)], 16, rejected=extra)
    assert_same_bits(state, whole)


def rings(rng: np.random.Generator, config: RuntimeConfig) -> DraftState:
    blank = init_draft_state(config, num_slots=2).window.payload
    return DraftState(
        window=ScaledArray(payload=jnp.asarray(rng.standard_normal(blank.shape), jnp.float32), scale=None)
    )


def test_block_sees_its_window_and_all_of_itself(seed_from_name: int):
    """One softmax in float64 over the very positions that the specification names."""
    model = load_config(shipped_config("model/tiny.json"))
    config = RuntimeConfig(model=model, numerics="fp32_noqdq")
    rng = np.random.default_rng(seed_from_name)
    size, window = model.dspark_block_size, model.sliding_window
    heads, width = model.num_attention_heads, model.head_dim
    state, last, first = rings(rng, config), [300, 5, 140], [0, 0, 80]
    slots = [1, 0, 1]
    num_rows = len(last) * size
    q = rng.standard_normal((num_rows, heads, width)).astype(np.float32)
    new_kv = rng.standard_normal((num_rows, width)).astype(np.float32)
    sink = rng.standard_normal(heads).astype(np.float32)
    place = np.tile(np.arange(size), len(last))
    block = Block(
        first_row=jnp.asarray(np.arange(num_rows) - place, jnp.int32),
        last_context=jnp.asarray(np.repeat(last, size), jnp.int32),
        context_start=jnp.asarray(np.repeat(first, size), jnp.int32),
    )
    positions = jnp.asarray(np.repeat(last, size) + 1 + place, jnp.int32)
    zeros = jnp.zeros_like(positions)
    row_slots = jnp.asarray(np.repeat(slots, size), jnp.int32)
    rows = rows_at(positions, row_slots, zeros, zeros, jnp.zeros((1, 1), jnp.int32))
    fresh = ScaledArray(payload=jnp.asarray(new_kv), scale=None)
    attend = jax.jit(functools.partial(attend_to_block, config=config, stage=1))
    got = np.asarray(attend(jnp.asarray(q), fresh, state, jnp.asarray(sink), rows, block))
    ring = np.asarray(state.window.payload)[1]
    for row in range(num_rows):
        r = row // size
        seen = np.arange(max(0, last[r] - (window - 1), first[r]), last[r] + 1)
        keys = np.concatenate([ring[slots[r], seen % config.ring_len], new_kv[r * size : (r + 1) * size]])
        scores = (q[row].astype(np.float64) @ keys.T.astype(np.float64)) * width**-0.5
        weights = np.exp(scores)
        total = weights.sum(axis=1) + np.exp(sink.astype(np.float64))
        want = weights @ keys / total[:, None]
        assert np.linalg.norm(got[row] - want) <= ATTENTION_RELATIVE * np.linalg.norm(want)


def test_each_draft_follows_the_one_before(params: Params):
    """Bias of the logits and confidence come from the token drawn before; those of the first from the anchor."""
    recorded, config = recording("fp32_noqdq"), tiny("fp32_noqdq")
    state = written(params, recorded, config=config)

    def step(params, state, anchors, positions, slots, forced):
        def draw(place, logits):
            assert logits.shape == (2, config.model.vocab_size)
            return forced[:, place], {"place": jnp.broadcast_to(place, (2,))}

        return draft_block(params, state, anchors, positions, slots, config=config, draw=draw)

    forced = np.random.default_rng(4).integers(3, 300, (2, config.model.dspark_block_size))
    rows = (recorded.anchors[:2], recorded.starts[:2] + 1, [0, 1], forced)
    compiled = jax.jit(step, compiler_options=COMPILER_OPTIONS)
    got = compiled(params, state, *(jnp.asarray(row, jnp.int32) for row in rows))
    np.testing.assert_array_equal(got.ids, forced)
    np.testing.assert_array_equal(got.extras["place"], [range(config.model.dspark_block_size)] * 2)
    assert params.draft is not None
    markov = params.draft.markov
    embed, head, weights = (np.asarray(m, np.float64) for m in (markov.embed, markov.head, params.draft.confidence))
    before = np.concatenate([recorded.anchors[:2, None], forced[:, :-1]], axis=1)
    recorded_before = np.concatenate([recorded.anchors[:2, None], recorded.ids[:2, :-1]], axis=1)
    change = embed[before] - embed[recorded_before]
    np.testing.assert_allclose(got.logits, recorded.logits[:2] + change @ head.T, rtol=0, atol=LOGIT_ABSOLUTE)
    rank = config.model.dspark_markov_rank
    expected = recorded.confidence[:2] + change @ weights[0, -rank:]
    np.testing.assert_allclose(got.confidence, expected, rtol=0, atol=LOGIT_ABSOLUTE)


CAPTURE = ("mtp.*.router_ids", "mtp.1.window_kv", "mtp.final_hidden")


def test_stages_have_names(params: Params):
    config = tiny("q")
    model, state, row = config.model, init_draft_state(config, num_slots=2), jnp.zeros(2, jnp.int32)
    step = functools.partial(draft_block, config=config, capture=CAPTURE)
    stages = jax.eval_shape(step, params, state, row, row, row).stages
    num_rows = 2 * model.dspark_block_size
    assert {name: value.shape for name, value in stages.items()} == {
        "mtp.0.router_ids": (num_rows, model.dspark_num_experts_per_tok),
        "mtp.1.router_ids": (num_rows, model.dspark_num_experts_per_tok),
        "mtp.1.window_kv": (num_rows, model.head_dim),
        "mtp.final_hidden": (num_rows, model.hidden_size),
    }
    with pytest.raises(ValueError, match="match no stage"):
        jax.eval_shape(functools.partial(step, capture=("mtp.2.ffn_in",)), params, state, row, row, row)


@pytest.mark.slow
def test_looking_inside_changes_no_bits(params: Params):
    """Which also says that unrolled stages give the bits of stages that share one body."""
    recorded, config = recording("q"), tiny("q")
    state = written(params, recorded, config=config)
    arguments = [jnp.asarray(row, jnp.int32) for row in (recorded.anchors[:1], recorded.starts[:1] + 1, [0])]
    plain = compiled_draft(config)(params, state, *arguments)
    seen = compiled_draft(config, CAPTURE)(params, state, *arguments)
    assert_same_bits(parts_of(seen), parts_of(plain))
    for stage in range(config.model.num_nextn_predict_layers):
        ids = np.asarray(seen.stages[f"mtp.{stage}.router_ids"])
        assert ids.min() >= 0 and ids.max() < config.model.dspark_n_routed_experts


def test_released_shape_needs_no_arrays_to_be_traced():
    """Shapes of the full-size drafter; gamma 5, three stages, rings of window and rollback."""
    model = load_config(shipped_config("model/deepseek-v4.1-flash.json"))
    config = RuntimeConfig(model=model)
    backbone = abstract_params(model)
    leaves = {spec.path: leaf_at(backbone, spec.path) for spec in schema(model)}
    leaves |= {s.path: s.leaf(lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype)) for s in draft_schema(model)}
    params = build_params(leaves, model)
    state = jax.eval_shape(functools.partial(init_draft_state, config, num_slots=4))
    assert state.window.payload.shape == (3, 4, 134, 512)
    assert state.window.scale is not None and state.window.scale.shape == (3, 4, 134, 16)
    row = jax.ShapeDtypeStruct((4,), jnp.int32)
    output = jax.eval_shape(functools.partial(draft_block, config=config), params, state, row, row, row)
    assert output.ids.shape == output.confidence.shape == (4, 5)
    assert output.logits.shape == (4, 5, 129280)
    hidden = jax.ShapeDtypeStruct((4, 15360), jnp.bfloat16)
    after = jax.eval_shape(functools.partial(write_context, config=config), params, state, hidden, row, row)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)


def test_parameters_without_a_drafter_are_refused(params: Params):
    config = tiny("q")
    state, row = init_draft_state(config, num_slots=1), jnp.zeros(1, jnp.int32)
    bare = dataclasses.replace(params, draft=None)
    with pytest.raises(ValueError, match="with_draft=True"):
        draft_block(bare, state, row, row, row, config=config)
    with pytest.raises(ValueError, match="with_draft=True"):
        write_context(bare, state, jnp.zeros((1, 192)), row, row, config=config)
    with pytest.raises(ValueError, match="num_slots=0"):
        init_draft_state(config, num_slots=0)
