"""What is logged about grammars on demand."""

import gc
import logging

import numpy as np
import pytest

from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import GrammarPool, MaskLog, debug, parse_so_args
from deepinfer_jax.sampling.params import SamplingParams


@pytest.fixture
def logged(caplog):
    """The lines so far."""
    caplog.set_level(logging.INFO, logger=debug.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == debug.__name__]


def test_times_are_told_once_at_the_end(logged):
    log = MaskLog("request a")
    for seconds in (0.001, 0.0005, 0.003):
        log.took(seconds)
    assert logged() == []
    del log
    assert logged() == ["grammar of request a: 3 masks, mean 1.500 ms, longest 3.000 ms"]


def test_without_masks_there_is_no_mean(logged):
    MaskLog("request a")
    assert logged() == ["grammar of request a: 0 masks, mean 0.000 ms, longest 0.000 ms"]


def test_a_state_and_its_fork_are_told_apart(tools, logged):
    matcher = tools.compile("regex", "[a-z]{3}").matcher()
    size = tools.vocabulary.vocab_size
    state = DrawState(
        SamplingParams(),
        prompt=[5],
        eos_id=tools.eos,
        vocab_size=size,
        matcher=matcher,
        mask_log=MaskLog("request a"),
    )
    row = np.empty(tools.vocabulary.mask_words, np.uint32)
    state.fill_mask(row)
    fork = state.fork()
    for _ in range(2):
        fork.fill_mask(row)
    del state
    gc.collect()
    [first] = logged()
    assert first.startswith("grammar of request a: 1 masks, ")
    del fork
    gc.collect()
    assert logged()[1].startswith("grammar of a fork of request a: 2 masks, ")


@pytest.mark.parametrize("is_verbose", [False, True])
def test_compiled_grammars_are_told_with_their_text(tools, logged, is_verbose):
    with GrammarPool(tools.vocabulary, cpus=1, is_verbose=is_verbose) as pool:
        for schema in ("ab", "ab", "c"):
            pool.submit(parse_so_args({"schema_type": "regex", "schema": schema})).result(60.0)
    texts = [line.split(" ms: ", 1)[1] for line in logged() if line.startswith("regex grammar, compiled in ")]
    assert len(texts) == len(logged()) == (2 if is_verbose else 0), "equal ones once"
    for text, letters in zip(texts, ("61", "63"), strict=False):
        assert letters in text
