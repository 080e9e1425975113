"""Every figure of `describe` follows from the shape: the released one gives the specification's numbers."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer_jax import cli
from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import costs
from deepinfer_jax.engine.describe import describe, parse_mesh, to_json, to_text
from deepinfer_jax.model.params import schema

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs" / "model" / "deepseek-v4.1-flash.json"

# spec: backbone 10. GFLOP for one decoded token, and bytes, by context.
DECODE = {
    4096: {"attention": 3.22, "dense_scan": 0.085, "candidate_scan": 0.136, "total": 35.70},
    65536: {"attention": 3.22, "dense_scan": 1.36, "candidate_scan": 0.54, "total": 37.38},
    1048576: {"attention": 3.22, "dense_scan": 21.73, "candidate_scan": 0.54, "total": 57.75},
}
INDEX_BYTES = {4096: 1.81e6, 65536: 15.6e6, 1048576: 182.7e6}
# GFLOP for one prompt token, by prompt length.
PREFILL = {
    4096: {"bounded": 17.7, "full": 34.0, "encoder_scan": 0.03, "encoder_attention": 1.39},
    65536: {"bounded": 17.8, "full": 35.3, "encoder_scan": 0.41, "encoder_attention": 1.53},
    1048576: {"bounded": 23.9, "full": 45.6, "encoder_scan": 6.52, "encoder_attention": 1.54},
}
# spec: checkpoint 2.
DISK_BYTES = {
    "routed experts": 288_777_830_400,
    "Engram": 203_073_076_240,
    "mtp": 7_932_874_632,
    "attention": 5_069_721_600,
    "shared experts": 1_416_960_000,
    "embed and head": 2_647_654_400,
    "router": 157_409_280,
    "mHC": 157_295_040,
    "compressor": 36_704_256,
    "indexer": 45_130_752,
    "vision": 823_685_120,
    "aligner": 146_821_120,
    "image span": 30_720,
    "norms": 829_440,
    "derived tables": 0,
}
DTYPE_BYTES = {
    "BF16": 3_952_883_712,
    "F32": 169_229_128,
    "F8_E4M3": 204_015_223_296,
    "F8_E8M0": 23_563_015_184,
    "I8": 278_585_671_680,
}


@pytest.fixture(scope="module")
def flash():
    return load_config(FLASH)


@pytest.fixture(scope="module")
def figures(flash):
    return describe(flash, mesh=(8, 1))


def same_to_the_printed_digits(value, printed):
    """Whether a value rounds to a number of the specification's tables."""
    digits = len(f"{printed}".partition(".")[2])
    return round(value, digits) == printed


def test_released_shape_has_the_specified_parameters_and_bytes(figures):
    assert round(figures.backbone_parameters / 1e9, 2) == 551.57
    assert round(figures.total_parameters / 1e9, 1) == 763.2
    assert {g.name: g.disk_bytes for g in figures.groups} == DISK_BYTES
    assert figures.disk_bytes == 510_286_023_000
    assert figures.disk_bytes_by_dtype == DTYPE_BYTES
    assert sum(g.num_tensors for g in figures.groups) == 96_085


def test_released_shape_has_the_specified_cache_bytes(flash, figures):
    cache = figures.cache
    assert cache.bytes_per_token == 890
    assert (cache.window_row_bytes, cache.main_kv_row_bytes, cache.index_k_row_bytes) == (528, 288, 68)
    assert cache.window_bytes == 2_703_360
    assert (cache.ring_len, cache.ring_bytes) == (134, 2_830_080)
    longer = costs.cache_figures(RuntimeConfig(model=flash, rollback_tokens=12))
    assert longer.ring_bytes == 2_956_800
    assert longer.tail_bytes == 3 * 14 * 4096
    assert longer.history_bytes == 4 * 16
    assert longer.bytes_per_request == longer.ring_bytes + longer.tail_bytes + longer.history_bytes


def test_caches_without_quantisation_are_float32(flash):
    cache = costs.cache_figures(RuntimeConfig(model=flash, numerics="fp32_noqdq"))
    assert (cache.window_row_bytes, cache.main_kv_row_bytes, cache.index_k_row_bytes) == (2048, 2048, 512)
    assert cache.bytes_per_token == 2.5 * (2048 + 512)


@pytest.mark.parametrize("context", DECODE)
def test_decode_costs_what_the_specification_says(flash, figures, context):
    cost = costs.decode_cost(flash, context, cache=figures.cache)
    assert same_to_the_printed_digits(cost.linear / 1e9, 32.26)
    for name, printed in DECODE[context].items():
        assert same_to_the_printed_digits(getattr(cost, name) / 1e9, printed), name
    assert same_to_the_printed_digits(cost.kv_bytes_read / 1e6, 8.31)
    assert cost.index_bytes_read == pytest.approx(INDEX_BYTES[context], rel=3e-3)
    assert cost.bytes_written == 21_120 + 890
    assert cost.bytes_held == 890 * context


@pytest.mark.parametrize("prompt_len", PREFILL)
def test_prefill_costs_what_the_specification_says(flash, prompt_len):
    cost = costs.prefill_cost(flash, prompt_len)
    for name, printed in PREFILL[prompt_len].items():
        assert same_to_the_printed_digits(getattr(cost, name) / 1e9, printed), name


def test_prompt_within_the_window_costs_the_same_bounded_or_full(flash):
    cost = costs.prefill_cost(flash, 100)
    assert cost.bounded == cost.full


@pytest.mark.parametrize("ratio, cap", [(1, 4), (2, 4), (2, 100), (1, 1)])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 40])
def test_capped_sums_are_exact(ratio, cap, count):
    assert costs._capped_sum(count, ratio=ratio, cap=cap) == sum(min(n // ratio, cap) for n in range(1, count + 1))


def test_prefill_adds_up_the_decode_steps(flash, figures):
    """Full prefill is decode at every position, but for the head, which runs once."""
    prompt_len, head = 150, 2 * flash.vocab_size * flash.hidden_size
    steps = sum(costs.decode_cost(flash, n, cache=figures.cache).total - head for n in range(1, prompt_len + 1))
    assert costs.prefill_cost(flash, prompt_len).full * prompt_len == pytest.approx(steps + head, rel=1e-12)


def test_decode_step_reads_the_weights_that_the_specification_says(figures):
    by_batch = {r.batch: r for r in figures.weight_reads}
    assert same_to_the_printed_digits(by_batch[1].backbone_bytes / 1e9, 12.72)
    assert by_batch[1].experts_per_layer == pytest.approx(6)
    assert by_batch[64].experts_per_layer == pytest.approx(384 * (1 - (378 / 384) ** 64))
    every = next(g for g in figures.groups if g.name == "routed experts").disk_bytes
    assert by_batch[256].backbone_bytes < 12_720_041_408 + every


def test_devices_hold_what_the_schema_says(flash, figures):
    assert figures.device_bytes == pytest.approx(sum(s.num_bytes for s in schema(flash)), abs=2 * 7 * 264)
    experts = next(g for g in figures.groups if g.name == "routed experts")
    assert experts.bytes_per_device * 8 == experts.device_bytes == experts.disk_bytes
    whole = describe(flash)
    assert whole.bytes_per_device == whole.device_bytes == sum(s.num_bytes for s in schema(flash))
    assert whole.mesh is None


@pytest.mark.parametrize(
    "changes, moved",
    [
        ({"n_routed_experts": 192}, {"groups", "parameters", "decode", "prefill", "reads"}),
        ({"hidden_size": 4096}, {"groups", "parameters", "decode", "prefill", "reads"}),
        ({"index_topk": 1024}, {"decode", "prefill"}),
        ({"sliding_window": 256}, {"cache", "decode", "prefill"}),
        ({"candidate_topk_blocks": 256}, {"decode", "prefill"}),
        ({"num_experts_per_tok": 8}, {"decode", "prefill", "reads"}),
        ({"index_head_dim": 192}, {"groups", "parameters", "cache", "decode", "prefill", "reads"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_changing_a_number_changes_the_figures_that_depend_on_it(flash, figures, changes, moved):
    before, after = figures, describe(dataclasses.replace(flash, **changes), mesh=(8, 1))
    parts = {
        "groups": lambda d: d.groups,
        "parameters": lambda d: (d.backbone_parameters, d.total_parameters),
        "cache": lambda d: d.cache,
        "decode": lambda d: d.decode,
        "prefill": lambda d: d.prefill,
        "reads": lambda d: d.weight_reads,
    }
    assert {name for name, part in parts.items() if part(before) != part(after)} == moved


def test_json_holds_every_figure_and_the_effective_configuration(flash):
    engine = resolve(EngineArgs(model="somewhere", seed=3), environ={})
    figures = describe(flash, engine=engine)
    read = json.loads(to_json(figures))
    assert read["backbone_parameters"] == figures.backbone_parameters
    assert read["cache"]["bytes_per_token"] == 890
    settings = {row["name"]: (row["value"], row["source"]) for row in read["effective_config"]}
    assert settings["seed"] == (3, "argument")
    assert settings["engine_type"] == ("NORMAL", "default")
    assert settings["mesh_shape"][0] == [1, 1]
    assert set(settings) == {name for name, _ in engine.sources}


def test_text_shows_the_figures(flash):
    text = to_text(describe(flash, mesh=(8, 1), engine=resolve(EngineArgs(seed=3), environ={})))
    for shown in ("551.57 B", "763.21 B", "510,286,023,000", "2,830,080", "35.702", "57.751", "of 8 devices, each"):
        assert shown in text
    assert "\nseed" in text and "argument" in text
    assert "of 8 devices" not in to_text(describe(flash))


def test_command_describes_a_config_file_and_a_directory(capsys, tmp_path):
    assert cli.main(["describe", str(FLASH), "--json", "--mesh", "4x2"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["mesh"] == [4, 2]
    assert read["bytes_per_device"] == 71_289_248_776
    (tmp_path / "config.json").write_text(FLASH.read_text().replace('"n_routed_experts": 384', '"n_routed_experts": 8'))
    assert cli.main(["describe", str(tmp_path)]) == 0
    assert "551.57 B" not in capsys.readouterr().out


def test_command_refuses_what_is_no_model(capsys, tmp_path):
    assert cli.main(["describe", str(tmp_path)]) == cli.EXIT_REFUSED
    assert "cannot read the model config" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["8", "0x1", "8x", "8x1x1", "ax1"])
def test_malformed_mesh_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give DPxCP"):
        parse_mesh(text)


def test_mesh_that_does_not_divide_the_experts_has_spare_places(flash):
    def experts(mesh):
        return next(group for group in describe(flash, mesh=mesh).groups if group.name == "routed experts")

    assert experts((7, 1)).bytes_per_device == experts(None).device_bytes // 384 * 55
