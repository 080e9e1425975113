"""A compiled step is the forward and the sampler, told by one array."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import SamplingParams, init_state
from deepinfer_jax.engine import steps
from deepinfer_jax.engine.drafting import Speculation, blank_newest
from deepinfer_jax.engine.steps import Carried
from deepinfer_jax.model import backbone
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.scheduler.batching import RequestOptions, pack_copies, pack_step, without_images
from deepinfer_jax.scheduler.plan import Chunk, RankPlan
from deepinfer_jax.scheduler.sequence import Copy, Limits, Sequence

DRAWN = [40, 41, 42, 43, 44]  # the last tokens of the first slots


@pytest.fixture(scope="module")
def engine(llm):
    return llm.engine


@pytest.fixture(scope="module")
def shape(engine):
    return engine.sizes.buckets.first


def carried(engine) -> Carried:
    """An empty state of the engine's sizes, so that its compiled step serves."""
    num_slots = engine.sizes.num_state_slots
    state = init_state(engine.runtime, num_slots=num_slots, num_pages=engine.sizes.scheduler.num_pages)
    newest = blank_newest(Speculation(), num_slots=num_slots, vocab_size=engine.model.vocab_size)
    tokens = newest.tokens.at[: len(DRAWN), 0].set(jnp.asarray(DRAWN))
    return Carried(state=state, newest=dataclasses.replace(newest, tokens=tokens))


def page_table(engine) -> np.ndarray:
    table = engine.scheduler.ranks[0].page_table
    num_pages = engine.sizes.scheduler.num_pages
    return (np.arange(table.size, dtype=np.int32) % num_pages).reshape(table.shape)


def packed(engine, shape, plan: RankPlan) -> np.ndarray:
    sizes = {"num_chunks": shape.num_chunks, "num_tokens": shape.num_rows, "num_pages": shape.num_pages}
    return pack_step(plan, page_table(engine), **sizes, max_drafts=0)


def run(engine, shape, before: Carried, plan: RankPlan):
    told = packed(engine, shape, plan)
    result, computed, after = steps.run_step(engine.params, before, told, shape=shape, **engine.pipeline._static)
    return result, np.asarray(computed.rows).tolist(), after


def chunk(slot: int, prompt: list[int], params: SamplingParams, seed: int, *, follows: bool = False) -> Chunk:
    sequence = Sequence(
        request_id=str(slot),
        prompt=prompt,
        limits=Limits(max_tokens=9, eos_id=1),
        options=RequestOptions(params, seed),
        slot=slot,
    )
    end = len(prompt)
    return Chunk(
        sequence=sequence,
        start=end if follows else 0,
        length=1 if follows else end,
        draws=True,
        draw_position=end + follows,
        first_unknown=end + follows,
        epoch=0,
        follows=follows,
    )


def two_chunks() -> RankPlan:
    sampled = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
    first = chunk(2, [0, 70, 71], sampled, 2**63 + 5)
    return RankPlan(chunks=(first, chunk(0, [9, 8], SamplingParams(), 3)))


def leaves(state) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def test_step_is_forward_and_sample(engine, shape):
    result, computed, after = run(engine, shape, carried(engine), two_chunks())
    config = engine.pipeline._static["config"]

    @functools.partial(jax.jit, compiler_options=steps.COMPILER_OPTIONS)
    def by_hand(params, state, batch, rows):
        output, state = forward(params, state, batch, config=config)
        return sampling.sample(output.logits, rows), state

    batch = make_batch([[0, 70, 71], [9, 8]], [0, 0], [2, 0], page_table(engine))
    rows = sampling.SampleRows(
        seed_lo=jnp.asarray([5, 3], jnp.uint32),
        seed_hi=jnp.asarray([2**31, 0], jnp.uint32),
        positions=jnp.asarray([3, 2], jnp.int32),
        inverse_temperature=jnp.asarray([1 / 0.7, 1], jnp.float32),
        top_p=jnp.asarray([0.9, 1], jnp.float32),
        top_k=jnp.asarray([50, -1], jnp.int32),
        is_greedy=jnp.asarray([False, False]),
        suppressed_ids=jnp.asarray([-1, -1], jnp.int32),
        forced_ids=jnp.asarray([-1, -1], jnp.int32),
    )
    want, want_state = by_hand(engine.params, carried(engine).state, batch, rows)
    drawn = np.asarray(result.drawn)
    np.testing.assert_array_equal(drawn[0, :2], want.token_ids)
    np.testing.assert_array_equal(drawn[1, :2], np.asarray(want.token_logprobs).view(np.int32))
    np.testing.assert_array_equal(result.logprobs[:2], want.logprobs)
    for got, expected in zip(leaves(after.state), leaves(want_state), strict=True):
        np.testing.assert_array_equal(got, expected)
    first, second = np.asarray(want.token_ids).tolist()
    assert np.asarray(after.newest.tokens)[: len(DRAWN), 0].tolist() == [second, 41, first, 43, 44]
    assert np.asarray(after.newest.positions)[:4].tolist() == [2, 0, 3, 0]
    assert np.asarray(result.chunks)[:, :3].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert computed == [8, 8]


def test_a_token_that_the_host_has_not_read_is_the_newest_one_of_its_slot(engine, shape):
    known, _, _ = run(engine, shape, carried(engine), RankPlan(chunks=(chunk(3, [9, 43], SamplingParams(), 5),)))
    _, _, before = run(engine, shape, carried(engine), RankPlan(chunks=(chunk(3, [9], SamplingParams(), 5),)))
    tokens = before.newest.tokens.at[3, 0].set(43)
    before = dataclasses.replace(before, newest=dataclasses.replace(before.newest, tokens=tokens))
    got, _, after = run(engine, shape, before, RankPlan(chunks=(chunk(3, [9], SamplingParams(), 5, follows=True),)))
    np.testing.assert_array_equal(got.drawn[:, 0], known.drawn[:, 0])
    assert np.asarray(after.newest.positions)[3] == 2


def test_padding_rows_leave_everything_alone(engine, shape):
    _, _, after = run(engine, shape, carried(engine), two_chunks())
    before = leaves(after)
    _, computed, after = run(engine, shape, after, RankPlan())
    for was, now in zip(before, leaves(after), strict=True):
        np.testing.assert_array_equal(was, now)
    assert computed == [0, 0]


def test_what_is_carried_is_donated(engine, shape):
    before = carried(engine)
    run(engine, shape, before, RankPlan())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_masks_allow_what_they_name_and_the_two_halves_are_one_step(engine, shape):
    whole, _, _ = run(engine, shape, carried(engine), two_chunks())
    told, static, forward = packed(engine, shape, two_chunks()), engine.pipeline._static, engine.pipeline._forward
    num_words = -(-engine.model.vocab_size // 32)
    words = np.full((shape.num_chunks, num_words), 2**32 - 1, np.uint32)

    def halves(late=()):
        logits, features, _, after = steps.run_forward(engine.params, carried(engine), told, shape=shape, **forward)
        is_late = jnp.asarray(np.isin(np.arange(shape.num_chunks), late))
        masks = steps.Masks(words=jnp.asarray(words), late=is_late, edits=None)
        return steps.run_sampling(engine.params, after, logits, features, told, masks, shape=shape, **static)

    free, _ = halves()
    np.testing.assert_array_equal(free.drawn[:, :2], whole.drawn[:, :2])
    np.testing.assert_array_equal(free.logprobs[:2], whole.logprobs[:2])
    words[0], words[0, 77 // 32] = 0, 1 << (77 % 32)
    forced, after = halves()
    assert np.asarray(forced.drawn)[0, 0] == np.asarray(after.newest.tokens)[2, 0] == 77
    assert np.asarray(forced.drawn)[1, 0].view(np.float32) == 0.0
    np.testing.assert_array_equal(forced.drawn[:, 1], whole.drawn[:, 1])
    late, after = halves(late=[0])
    assert np.asarray(late.chunks)[0, :2].tolist() == [0, 1]
    assert np.asarray(after.newest.tokens)[2, 0] == 42, "nothing was drawn there"


def test_every_write_says_that_its_places_differ(engine, shape):
    """Else a GPU's repeatable program sorts them and takes a place beyond a row's end for the start of the next."""
    told, static, options = packed(engine, shape, two_chunks()), engine.pipeline._static, engine.pipeline._forward
    before, num_words = carried(engine), -(-engine.model.vocab_size // 32)
    edits = sampling.Edits(
        token_ids=jnp.full((shape.num_chunks, 64), -1, jnp.int32),
        **{name: jnp.ones((shape.num_chunks, 64), jnp.float32) for name in ("up", "down", "add")},
    )
    masks = steps.Masks(
        words=jnp.full((shape.num_chunks, num_words), 2**32 - 1, jnp.uint32),
        late=jnp.zeros(shape.num_chunks, bool),
        edits=edits,
    )
    logits = jnp.zeros((shape.num_logits, engine.model.vocab_size), jnp.float32)
    forward = steps.run_forward.lower(engine.params, before, told, shape=shape, **options)
    draws = steps.run_sampling.lower(engine.params, before, logits, None, told, masks, shape=shape, **static)
    for lowered, at_least in ((forward, 5), (draws, 3)):
        text = lowered.as_text()
        assert text.count("unique_indices = true") >= at_least
        assert "unique_indices = false" not in text


def test_only_a_gpu_is_asked_for_what_a_gpu_does(engine):
    config = engine.pipeline._static["config"]
    assert steps.compiler_options(config) == {"xla_allow_excess_precision": False}
    fast, repeatable = (
        steps.compiler_options(dataclasses.replace(config, target="nvidia", is_invariant=is_on))
        for is_on in (False, True)
    )
    assert not fast["xla_allow_excess_precision"] and "WHILE" in fast["xla_gpu_enable_command_buffer"].split(",")
    assert "xla_gpu_deterministic_ops" not in fast
    in_order = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
    assert repeatable == fast | {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0} | in_order
    for dp, cp, is_recorded in ((1, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)):
        on_mesh = steps.compiler_options(dataclasses.replace(config, target="nvidia", dp=dp, cp=cp))
        assert ("COLLECTIVES" in on_mesh["xla_gpu_enable_command_buffer"].split(",")) == is_recorded


def test_copies_all_read_before_any_writes(engine, shape):
    _, _, before = run(engine, shape, carried(engine), two_chunks())
    window, pages = np.array(before.state.window.payload), np.array(before.state.main_kv[1].payload)
    swap = [Copy(2, 0, 1, 5), Copy(0, 2, 5, 1)]
    after = steps.copy_states(before, pack_copies(swap, num_copies=8))
    np.testing.assert_array_equal(np.asarray(after.state.window.payload)[:, [0, 2]], window[:, [2, 0]])
    np.testing.assert_array_equal(np.asarray(after.state.window.payload)[:, [1, 3]], window[:, [1, 3]])
    np.testing.assert_array_equal(np.asarray(after.state.main_kv[1].payload)[:, [1, 5]], pages[:, [5, 1]])


def test_best_tokens_pad_beyond_the_vocabulary():
    values, token_ids = steps.best_tokens(jnp.asarray([[-3.0, -1.0, -2.0]]), count=5)
    np.testing.assert_array_equal(token_ids, [[1, 2, 0, -1, -1]])
    np.testing.assert_array_equal(values, np.asarray([[-1, -2, -3, -9999, -9999]], np.float32))


def test_steps_of_one_size_trace_the_forward_once(engine, shape, monkeypatch):
    calls, embed = [], backbone.embed_tokens
    monkeypatch.setattr(backbone, "embed_tokens", lambda *args, **kwargs: calls.append(1) or embed(*args, **kwargs))
    given = engine.pipeline._static
    config = dataclasses.replace(given["config"], kernels="reference")  # which nobody else has traced
    options = {"shape": shape, "config": config, "speculation": given["speculation"]}
    args = engine.params, carried(engine), packed(engine, shape, two_chunks())
    for settings in (given["settings"], dataclasses.replace(given["settings"], force_top_k=3)):
        steps.run_step.lower(*args, settings=settings, **options)
    steps.run_forward.lower(*args, **options)
    assert calls == [1]


def test_draws_are_told_nothing_of_images(engine, shape):
    sizes = {"num_chunks": shape.num_chunks, "num_tokens": shape.num_rows, "max_drafts": 2}
    every = {**sizes, "num_pages": shape.num_pages}
    with_images = pack_step(two_chunks(), page_table(engine), image_rows={}, **every)
    assert with_images.size == pack_step(two_chunks(), page_table(engine), **every).size + shape.num_rows
    np.testing.assert_array_equal(
        without_images(with_images, **sizes), pack_step(two_chunks(), page_table(engine), **every)
    )


def test_no_garbage_is_collected_while_a_step_is_launched(engine):
    was_enabled, config = [], engine.pipeline._static["config"]

    @steps.step_function(static_argnames=("config",))
    def function(x, *, config):
        was_enabled.append(gc.isenabled())
        return x

    function(1, config=config)
    assert was_enabled == [False] and gc.isenabled()
    gc.disable()
    try:
        function(1.0, config=config)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("kernels", ["auto", "reference", "mosaic_sm90"])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_no_loops_side_by_side_in_the_graphs_of_the_mode(engine, kernels, is_invariant):
    """Steps with both, and sections between barriers, did not end on an H200 (docs/determinism.md)."""
    config = dataclasses.replace(engine.runtime, target="nvidia", kernels=kernels, is_invariant=is_invariant)
    options = steps.compiler_options(config)
    recorded = options["xla_gpu_enable_command_buffer"].split(",")
    is_concurrent = options["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    assert "FUSION" in recorded
    assert is_concurrent or "WHILE" in recorded  # one of them is always given: neither would be slow for nothing
    if is_invariant:
        assert not (is_concurrent and {"WHILE", "CONDITIONAL"} & set(recorded))
    else:
        assert is_concurrent and "WHILE" in recorded
