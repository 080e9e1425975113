"""The role of every layer, literally as the tables of backbone 1.2 and of the fixtures have it."""

import dataclasses
from pathlib import Path

import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import layer_roles, replay_boundary, sources_of_ratio

ROOT = Path(__file__).parent.parent.parent
FLASH = load_config(ROOT / "configs" / "model" / "deepseek-v4.1-flash.json")
TINY = load_config(ROOT / "tests" / "data" / "tiny_a" / "config.json")

# layers: (mode, layer whose caches are read, layer whose selection is used); None: no such layer.
FLASH_ROLES = {
    range(0, 2): ("window", None, None),
    range(2, 3): ("full r2", 2, 2),
    range(3, 8): ("reuse r2", 2, 2),
    range(8, 9): ("full r2", 8, 8),
    range(9, 14): ("reuse r2", 8, 8),
    range(14, 15): ("full r2", 14, 14),
    range(15, 20): ("reuse r2", 14, 14),
    range(20, 21): ("full r1", 20, 20),
    range(21, 24): ("reuse r1", 20, 20),
    range(24, 25): ("reindex r1", 20, 24),
    range(25, 28): ("reuse r1", 20, 24),
    range(28, 29): ("reindex r1", 20, 28),
    range(29, 32): ("reuse r1", 20, 28),
    range(32, 33): ("reindex r1", 20, 32),
    range(33, 36): ("reuse r1", 20, 32),
    range(36, 37): ("reindex r1", 20, 36),
    range(37, 40): ("reuse r1", 20, 36),
}
TINY_ROLES = {
    range(0, 1): ("window", None, None),
    range(1, 2): ("full r2", 1, 1),
    range(2, 3): ("reuse r2", 1, 1),
    range(3, 4): ("full r2", 3, 3),
    range(4, 5): ("full r1", 4, 4),
    range(5, 6): ("reuse r1", 4, 4),
    range(6, 7): ("reindex r1", 4, 6),
    range(7, 8): ("reuse r1", 4, 6),
}
BOTH = pytest.mark.parametrize("config, table", [(FLASH, FLASH_ROLES), (TINY, TINY_ROLES)], ids=["flash", "tiny_a"])
EITHER = pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny_a"])


@BOTH
def test_modes_and_sources_are_those_of_the_table(config: ModelConfig, table: dict):
    roles = layer_roles(config)
    rows = [row for layers, row in table.items() for _ in layers]
    assert [role.name for role in roles] == [mode for mode, _, _ in rows]
    assert [role.layer for role in roles] == list(range(config.num_hidden_layers))
    owners = [config.kv_source_layer_ids[r.kv_ordinal] if r.kv_ordinal >= 0 else None for r in roles]
    assert owners == [owner for _, owner, _ in rows]
    assert [r.owns_kv for r in roles] == [owner == layer for layer, (_, owner, _) in enumerate(rows)]


@BOTH
def test_selection_of_a_layer_comes_from_the_last_index_source(config: ModelConfig, table: dict):
    rows = [row for layers, row in table.items() for _ in layers]
    current = None
    for role, (_, _, want) in zip(layer_roles(config), rows, strict=True):
        if role.index_ordinal >= 0:
            current = config.index_source_layer_ids[role.index_ordinal]
        assert (current if role.ratio else None) == want
        assert (role.index_ordinal >= 0) == (want == role.layer)


@EITHER
def test_cache_ordinals_count_the_sources_of_one_ratio(config: ModelConfig):
    for role in layer_roles(config):
        if role.ratio == 0:
            assert role.cache_ordinal == role.kv_ordinal == -1
        else:
            owner = config.kv_source_layer_ids[role.kv_ordinal]
            assert sources_of_ratio(config, role.ratio)[role.cache_ordinal] == owner
    found = sources_of_ratio(config, 2) + sources_of_ratio(config, 1)
    assert found == config.kv_source_layer_ids


@pytest.mark.parametrize(
    "config, source, consumers, engram, boundary",
    [(FLASH, 20, [24, 28, 32, 36], {1: 0, 14: 1}, 20), (TINY, 4, [6], {0: 0, 3: 1}, 4)],
    ids=["flash", "tiny_a"],
)
def test_candidates_engram_and_the_decoder_are_where_the_config_says(
    config: ModelConfig, source: int, consumers: list[int], engram: dict[int, int], boundary: int
):
    roles = layer_roles(config)
    assert [r.layer for r in roles if r.is_candidate_source] == [source]
    assert [r.layer for r in roles if r.uses_candidates] == consumers
    assert {r.layer: r.engram_ordinal for r in roles if r.engram_ordinal >= 0} == engram
    assert replay_boundary(config) == boundary
    assert [r.layer for r in roles if r.is_decoder] == list(range(boundary, config.num_hidden_layers))


def test_counts_of_the_released_model():
    """4 Full, 4 Reindex, 30 Reuse and 2 window-only layers."""
    modes = [role.name.split()[0] for role in layer_roles(FLASH)]
    assert {mode: modes.count(mode) for mode in set(modes)} == {"full": 4, "reindex": 4, "reuse": 30, "window": 2}


def test_draft_entries_of_the_ratios_do_not_matter():
    short = dataclasses.replace(FLASH, compress_ratios=FLASH.compress_ratios[:40])
    assert layer_roles(short) == layer_roles(FLASH)
