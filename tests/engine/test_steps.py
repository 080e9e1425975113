"""A compiled step is the forward and the sampler, told by one array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import SamplingParams, init_state
from deepinfer_jax.engine import steps
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.scheduler.batching import pack_step
from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.scheduler.slots import Chunk, Plan
from deepinfer_jax.testing.tiny import MAX_MODEL_LEN, MAX_NUM_SEQS

NUM_ROWS = NUM_LOGITS = 8  # the size that engines of the tests compile


@pytest.fixture(scope="module")
def model(llm):
    return llm._pipeline._model


def empty_state(model):
    num_pages = MAX_NUM_SEQS * MAX_MODEL_LEN // model.runtime.page_tokens
    return init_state(model.runtime, num_slots=MAX_NUM_SEQS, num_pages=num_pages)


def page_table(model):
    width = MAX_MODEL_LEN // model.runtime.page_tokens
    return jnp.arange(MAX_NUM_SEQS * width, dtype=jnp.int32).reshape(MAX_NUM_SEQS, width)


def run(model, state, plan):
    packed = pack_step(plan, num_rows=NUM_ROWS, num_logits=NUM_LOGITS)
    return steps.run_step(
        model.params,
        state,
        page_table(model),
        packed,
        num_rows=NUM_ROWS,
        num_logits=NUM_LOGITS,
        config=model.runtime,
    )


def two_chunks() -> Plan:
    sampled = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
    first = Request(index=0, prompt=[0, 70, 71], params=sampled, seed=2**63 + 5, max_model_len=512, slot=2)
    second = Request(index=1, prompt=[9, 8], params=SamplingParams(), seed=3, max_model_len=512, slot=0)
    return Plan((Chunk(first, 0, 3), Chunk(second, 0, 2)), is_prefill=True)


def test_step_is_forward_and_sample(model):
    result, state = run(model, empty_state(model), two_chunks())

    @functools.partial(jax.jit, compiler_options=steps.COMPILER_OPTIONS)
    def by_hand(params, state, batch, rows):
        output, state = forward(params, state, batch, config=model.runtime)
        return sampling.sample(output.logits, rows), state

    batch = make_batch([[0, 70, 71], [9, 8]], [0, 0], [2, 0], page_table(model))
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
    want, want_state = by_hand(model.params, empty_state(model), batch, rows)
    drawn = np.asarray(result.drawn)
    np.testing.assert_array_equal(drawn[0, :2], want.token_ids)
    np.testing.assert_array_equal(drawn[1, :2], np.asarray(want.token_logprobs).view(np.int32))
    np.testing.assert_array_equal(result.logprobs[:2], want.logprobs)
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_padding_rows_leave_the_state_alone(model):
    _, state = run(model, empty_state(model), two_chunks())
    before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    _, state = run(model, state, None)
    for was, now in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(was, now)


def test_state_is_donated(model):
    state = empty_state(model)
    run(model, state, None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_best_tokens_pad_beyond_the_vocabulary():
    values, token_ids = steps.best_tokens(jnp.asarray([[-3.0, -1.0, -2.0]]), count=5)
    np.testing.assert_array_equal(token_ids, [[1, 2, 0, -1, -1]])
    np.testing.assert_array_equal(values, np.asarray([[-1, -2, -3, -9999, -9999]], np.float32))
