"""The microscope sees nothing where nothing differs, and names layer, stage and element where something does."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import init_params
from deepinfer_jax.testing import compare, microscope
from deepinfer_jax.testing.microscope import Situation
from deepinfer_jax.testing.random_config import random_config
from tests.testing import faults

FEW_LAYERS = 38  # seed of a random shape with five layers: each is compiled apart
FAULTY_LAYER = 2
BEHIND = Situation(name="behind 3", chunk=32, before=3)
STEPS_OF_32 = Situation(name="in steps of 32", chunk=32)


@pytest.fixture(scope="module")
def config() -> RuntimeConfig:
    return RuntimeConfig(model=random_config(FEW_LAYERS))


@pytest.fixture(scope="module")
def params(config):
    return init_params(config.model, seed=1)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(3, 96, 40)


@pytest.fixture
def fault(monkeypatch):
    yield from faults.plant(monkeypatch, faulty_layer=FAULTY_LAYER)


@pytest.mark.slow
def test_invariant_rows_are_the_same_in_every_situation(params, config, tokens):
    assert microscope.look(params, tokens, config=config, situations=[BEHIND], reference=STEPS_OF_32) is None


@pytest.mark.slow
def test_a_planted_fault_is_found_in_its_layer_and_stage(params, config, tokens, fault):
    finding = microscope.look(params, tokens, config=config, situations=[BEHIND], reference=STEPS_OF_32)
    assert finding is not None
    assert (finding.layer, finding.stage) == (FAULTY_LAYER, f"layers.{FAULTY_LAYER}.ffn_out")
    assert finding.position < BEHIND.chunk and finding.ulps is not None and finding.ulps >= 1
    assert f"layer {FAULTY_LAYER}, layers.{FAULTY_LAYER}.ffn_out[" in str(finding)


@pytest.mark.slow
def test_captured_rows_are_those_of_the_request_in_order(params, config, tokens):
    alone = microscope.capture_rows(params, tokens, STEPS_OF_32, config=config)
    beside = microscope.capture_rows(params, tokens, BEHIND, config=config)
    compare.assert_bitwise(beside, alone)
    embedding = np.asarray(params.embed)[tokens].astype(ml_dtypes.bfloat16)
    compare.assert_bitwise(alone["embed"], embedding)
    assert sorted(alone, key=microscope.stage_order)[0] == "embed"
    leaves = {name.split(".")[2] for name in alone if name.startswith("layers.")}
    assert leaves == set(microscope.IN_LAYER)


def stages_of(**changes: float) -> dict[str, np.ndarray]:
    """Three rows of some stages; a change adds one ulp to the second element of the second row."""
    names = ("logits", "layers.10.attn_in", "layers.9.ffn_out", "layers.9.attn_in", "embed")
    stages = {name: np.ones((3, 2), ml_dtypes.bfloat16) for name in names}
    for name, row in changes.items():
        stages[name.replace("__", ".")][int(row), 1] = 1 + 2**-7
    return stages


@pytest.mark.parametrize(
    "changes, position, stage",
    [
        ({"logits": 1, "layers__10__attn_in": 1}, 101, "layers.10.attn_in"),
        ({"layers__9__ffn_out": 1, "layers__10__attn_in": 1}, 101, "layers.9.ffn_out"),
        ({"layers__9__ffn_out": 1, "layers__9__attn_in": 1}, 101, "layers.9.attn_in"),
        ({"layers__9__attn_in": 2, "logits": 0}, 100, "logits"),
    ],
    ids=["logits-last", "layers-in-order", "stages-in-order", "position-first"],
)
def test_the_first_difference_is_the_first_computed(changes, position, stage):
    finding = microscope.first_difference(stages_of(**changes), stages_of(), situation="s", first_position=100)
    assert finding is not None
    assert (finding.position, finding.stage, finding.element) == (position, stage, (1,))
    assert (finding.ulps, finding.num_different, finding.num_values) == (1, 1, 2)


def test_ids_have_no_distance_in_ulps():
    want = {"layers.0.router_ids": np.asarray([[1, 2]], np.int32)}
    got = {"layers.0.router_ids": np.asarray([[1, 3]], np.int32)}
    finding = microscope.first_difference(got, want, situation="s")
    assert finding is not None and finding.ulps is None and (finding.got, finding.want) == (3.0, 2.0)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="on one side only"):
        microscope.first_difference({}, stages_of(), situation="s")
    with pytest.raises(ValueError, match="cannot be compared"):
        microscope.first_difference({"embed": np.zeros(2)}, {"embed": np.zeros(3)}, situation="s")
    with pytest.raises(ValueError, match="is no stage of a forward"):
        microscope.stage_order("layers.0.nonsense")
    with pytest.raises(ValueError, match="chunk=5 must divide 64"):
        Situation(name="s", chunk=5)


def test_no_tokens_are_refused(params, config):
    with pytest.raises(ValueError, match="not the tokens of one request"):
        microscope.capture_rows(params, [], config=config)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_distances_count_values_between(dtype):
    info = jnp.finfo(dtype)
    one, up = dtype(1), dtype(1) + dtype(info.eps)
    values = np.asarray([one, one, one, dtype(0), info.smallest_subnormal, -one], dtype)
    others = np.asarray([one, up, -one, dtype(-0.0), -info.smallest_subnormal, dtype(-1) - dtype(info.eps)], dtype)
    steps = compare.ulp_distances(values, others).tolist()
    assert steps[:2] == [0, 1] and steps[3:] == [0, 2, 1] and steps[2] > 2**14
    with pytest.raises(ValueError, match="one float of 32 bits or less"):
        compare.ulp_distances(values, others.astype(np.float64))


def test_a_finding_outside_of_layers_says_so():
    finding = microscope.first_difference(stages_of(embed=0), stages_of(), situation="s")
    assert finding is not None and finding.layer is None and "no layer, embed[1]" in str(finding)
    assert dataclasses.replace(finding, stage="layers.7.ffn_in").layer == 7
