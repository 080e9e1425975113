"""Engram in a step: constants that fit the tables, look-back over chunks."""

import dataclasses

import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.engram import constants_of
from deepinfer_jax.model.params import Params


def test_table_shorter_than_its_primes_is_refused(tiny_a: tuple[Params, RuntimeConfig]):
    model = tiny_a[1].model
    assert constants_of(model).num_rows == (304, 462)
    short = dataclasses.replace(model, engram_num_embeddings=(307, 461))
    with pytest.raises(ValueError, match="461 of layer 3 is below 462"):
        constants_of(short)
