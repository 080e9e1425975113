"""Steps, copies and restored requests update the donated state in place: read from the compiled programs."""

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineArgs
from deepinfer_jax.config.args import resolve
from deepinfer_jax.engine import steps
from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.engine.drafting import blank_newest
from deepinfer_jax.engine.setup import load_engine_model
from deepinfer_jax.model.state import init_state, take_request
from deepinfer_jax.sampling.logits import SampleSettings
from deepinfer_jax.scheduler.batching import packed_len
from deepinfer_jax.testing import hlo

NUM_SLOTS, NUM_PAGES = 5, 23  # numbers that no other axis has


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_engine_model(resolve(EngineArgs(model=tiny_model), {}))


@pytest.fixture(scope="module")
def carried(model):
    def make():
        state = init_state(model.runtime, num_slots=NUM_SLOTS, num_pages=NUM_PAGES, with_draft=True)
        vocab_size = model.runtime.model.vocab_size
        return steps.Carried(
            state=state, newest=blank_newest(model.speculation, num_slots=NUM_SLOTS, vocab_size=vocab_size)
        )

    return jax.eval_shape(make)


def spec(*shape, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def check_in_place(compiled, carried):
    shapes = {leaf.shape for leaf in jax.tree.leaves(carried.state)}
    assert [i.text for i in hlo.whole_copies(compiled.as_text(), shapes)] == []
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carried))
    assert compiled.memory_analysis().alias_size_in_bytes == donated


def test_step_updates_its_state_in_place(model, carried):
    shape = StepShape(num_rows=16, num_logits=16, num_pages=3, num_chunks=8)
    length = packed_len(
        num_chunks=8, num_tokens=16, num_slots=NUM_SLOTS, num_pages=3, max_drafts=model.speculation.max_drafts
    )
    static = {"shape": shape, "config": model.runtime, "settings": SampleSettings(), "speculation": model.speculation}
    lowered = steps.run_step.lower(model.params, carried, spec(length), **static)
    check_in_place(lowered.compile(), carried)


def test_copies_update_the_state_in_place(carried):
    check_in_place(steps.copy_states.lower(carried, spec(8, 4)).compile(), carried)


def test_a_restored_request_is_written_in_place(carried):
    request = jax.eval_shape(take_request, carried.state, spec(), spec(2))
    check_in_place(steps.write_request.lower(carried, request, spec(), spec(2)).compile(), carried)


def test_all_copies_read_before_any_writes(model):
    state = init_state(model.runtime, num_slots=NUM_SLOTS, num_pages=NUM_PAGES, with_draft=True)
    marked = jax.tree.map(
        lambda a: jax.numpy.asarray(np.random.default_rng(a.size).integers(0, 99, a.shape), a.dtype), state
    )
    before = jax.tree.map(np.array, marked)
    copies = np.full((8, 4), -1, np.int32)
    copies[:3] = [(0, 1, 7, 8), (1, 0, 8, 7), (1, 4, -1, -1)]
    newest = blank_newest(model.speculation, num_slots=NUM_SLOTS, vocab_size=model.runtime.model.vocab_size)
    after = steps.copy_states(steps.Carried(state=marked, newest=newest), copies)
    rings, had_rings = after.state.draft.window.payload, before.draft.window.payload
    np.testing.assert_array_equal(rings[:, [0, 1, 2, 3, 4]], had_rings[:, [1, 0, 2, 3, 1]])
    window, was = after.state.window.payload, before.window.payload
    np.testing.assert_array_equal(window[:, [0, 1, 2, 3, 4]], was[:, [1, 0, 2, 3, 1]])
    np.testing.assert_array_equal(after.state.history, before.history[[1, 0, 2, 3, 1]])
    pages, had = after.state.main_kv[0].payload, before.main_kv[0].payload
    order = np.arange(NUM_PAGES)
    order[[7, 8]] = [8, 7]
    np.testing.assert_array_equal(pages, had[:, order])
