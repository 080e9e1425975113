"""Accepted drafts as training counts them: by rounds, and the same as an engine has on the same texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import SamplingParams, load_model
from deepinfer_jax.testing import tiny
from deepinfer_jax.testing.agreeing import write_agreeing_model
from deepinfer_jax.training.acceptance import record_acceptance, round_starts
from deepinfer_jax.training.numerics import training_config
from deepinfer_jax.training.weights import plain_params

PROMPT_LEN, NUM_TOKENS = 24, 40
# The raw confidences of two programs over the same quantised rows: float32 sums in another order.
CONFIDENCE_ATOL = 1e-3


def test_rounds_start_behind_what_the_round_in_front_gave():
    accepted = np.array([[0, 4, 3, 2, 1, 0, 0], [5, 5, 4, 3, 2, 1, 0]])
    starts = round_starts(accepted)
    assert [row.nonzero()[0].tolist() for row in starts] == [[0, 1, 6], [0, 6]]
    assert accepted[starts].mean() < accepted.mean()  # rounds count a predictable place once


@pytest.mark.slow
def test_an_engine_accepts_what_training_records_on_the_same_texts(tmp_path):
    model = write_agreeing_model(tmp_path, seed=1)
    engine = tiny.tiny_engine(model, numerics="fp32", num_draft_tokens=5, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts, rounds = [], []
    for seed in range(3):
        text = np.random.default_rng(seed).integers(3, 259, PROMPT_LEN).tolist()
        num_before, position = len(engine.draft_records()[1]), PROMPT_LEN
        engine.add_request("user", "one", params, text)
        while engine.has_unfinished_requests():
            text = text + [output.token_id for output in engine.step()]
        for confidence, verified, accepted in zip(*(a[num_before:] for a in engine.draft_records()), strict=True):
            if verified == len(confidence):  # a round at the end of a text verifies fewer
                rounds.append((seed, position - PROMPT_LEN, accepted, confidence))
            position += 1 + accepted
        texts.append(text)
    loaded, shape = load_model(model, with_draft=True, progress=False)
    config = training_config(shape, seq_len=PROMPT_LEN + NUM_TOKENS, has_bf16_products=False)
    last = PROMPT_LEN + NUM_TOKENS - shape.dspark_block_size - 1
    anchors = np.broadcast_to(np.arange(PROMPT_LEN, last + 1, dtype=np.int32), (len(texts), last + 1 - PROMPT_LEN))
    record = jax.jit(functools.partial(record_acceptance, config=config))
    plain = plain_params(loaded, shape, dtype=jnp.float32, with_draft=True)
    records = record(plain, jnp.asarray(texts, jnp.int32), jnp.asarray(anchors))
    wanted = np.asarray(records.accepted).reshape(anchors.shape)
    logits = np.asarray(records.confidence).reshape(*anchors.shape, -1)
    seen = [each for each in rounds if each[1] < anchors.shape[1]]
    assert len(seen) > 20 and len({int(accepted) for *_, accepted, _ in seen}) > 2
    for text, place, accepted, confidence in seen:
        assert accepted == wanted[text, place]
        assert np.allclose(confidence, logits[text, place], atol=CONFIDENCE_ATOL)
    starts = round_starts(wanted)[:, :-1]  # one more round may have had room for fewer drafts
    found = {(text, place) for text, place, *_ in seen if place < starts.shape[1]}
    assert found == set(zip(*map(np.ndarray.tolist, starts.nonzero()), strict=True))
