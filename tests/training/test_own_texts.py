"""Own texts: prompts from the corpus, continuations as they were written, loops left out, blocks behind the prompts."""

import numpy as np
import pytest

from deepinfer_jax.training.numerics import training_config
from deepinfer_jax.training.optimise import Schedule
from deepinfer_jax.training.own_texts import is_own_step, own_batch_of_step, write_own_texts
from deepinfer_jax.training.runs import Plan

PROMPT_LEN, NUM_ROWS = 16, 4


@pytest.fixture
def plan(shape):
    config = training_config(shape, seq_len=2 * PROMPT_LEN, has_bf16_products=False)
    schedule = Schedule(num_steps=4, peak_rate=1e-3, final_rate=1e-5)
    return Plan(config=config, schedule=schedule, num_rows=NUM_ROWS)


def write(rows):
    """Every second row goes on with one token for ever, the others with tokens of their own."""
    texts = np.array(rows)
    texts[::2, PROMPT_LEN:] = 7
    texts[1::2, PROMPT_LEN:] = np.arange(PROMPT_LEN)
    return texts


def test_texts_in_a_loop_are_left_out(source, plan):
    texts = write_own_texts(source, plan, write, num_texts=10, prompt_len=PROMPT_LEN)
    assert texts.shape == (6, 2 * PROMPT_LEN)  # three calls of four rows, half of which go round in circles
    np.testing.assert_array_equal(texts[:, PROMPT_LEN:], np.broadcast_to(np.arange(PROMPT_LEN), (6, PROMPT_LEN)))
    assert len(np.unique(texts[:, :PROMPT_LEN], axis=0)) == 6  # other prompts in every call
    with pytest.raises(ValueError, match="none is free of loops"):
        write_own_texts(source, plan, np.zeros_like, num_texts=2, prompt_len=PROMPT_LEN)


def test_blocks_stand_behind_the_prompts_and_within_the_texts(source, plan, shape):
    texts = write_own_texts(source, plan, write, num_texts=10, prompt_len=PROMPT_LEN)
    rows, anchors = own_batch_of_step(texts, plan, 3, prompt_len=PROMPT_LEN)
    again, _ = own_batch_of_step(texts, plan, 3, prompt_len=PROMPT_LEN)
    np.testing.assert_array_equal(rows, again)
    assert rows.shape == (NUM_ROWS, 2 * PROMPT_LEN + 1)
    assert all(any(np.array_equal(row[:-1], text) for text in texts) for row in rows)
    assert anchors.min() >= PROMPT_LEN
    assert anchors.max() + shape.dspark_block_size < 2 * PROMPT_LEN  # the last token that a loss reads


@pytest.mark.parametrize("share, wanted", [(0.0, 0), (0.5, 50), (0.3, 30), (1.0, 100)])
def test_own_steps_are_spread(share, wanted):
    assert sum(is_own_step(step, share) for step in range(100)) == wanted
