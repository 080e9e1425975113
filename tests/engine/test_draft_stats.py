"""Counts of rounds, by hand."""

from collections import Counter

import numpy as np
import pytest

from deepinfer_jax.engine.draft_stats import DraftStats
from deepinfer_jax.engine.stats import EngineStats


def test_figures_of_a_few_rounds():
    rounds = Counter({(3, 0): 2, (3, 3): 1, (1, 1): 3})
    report = DraftStats().report(rounds)
    assert (report["rounds"], report["drafts_verified"], report["drafts_accepted"], report["wasted_rows"]) == (
        6,
        12,
        6,
        6,
    )
    assert report["acceptance"] == [4 / 6, 1 / 3, 1 / 3]
    assert report["accepted_len_mean"] == 2.0
    assert report["verified_lens"] == {1: 3, 3: 3}


def test_calibration_is_that_of_the_prefix():
    stats = EngineStats()
    certain = 40.0  # a chance of 1
    for accepted in (2, 2, 1, 0):
        stats.verified([certain, certain, certain], 2, accepted)
    drafts = stats.report({})["drafts"]
    assert drafts["confidence_ece"] == pytest.approx([1 / 4, 1 / 2])
    confidence, verified, accepted = stats.drafts.records()
    np.testing.assert_array_equal(confidence, np.full((4, 3), certain))
    np.testing.assert_array_equal(verified, [2, 2, 2, 2])
    np.testing.assert_array_equal(accepted, [2, 2, 1, 0])


def test_an_interval_counts_its_own_rounds():
    stats = EngineStats()
    stats.verified([0.0], 1, 1)
    assert stats.interval()["drafts"]["rounds"] == 1
    stats.verified([0.0], 1, 0)
    stats.verified([0.0], 1, 0)
    assert stats.interval()["drafts"]["acceptance"] == [0.0]
    assert stats.report({})["drafts"]["rounds"] == 3
    assert "drafts" not in EngineStats().report({})
