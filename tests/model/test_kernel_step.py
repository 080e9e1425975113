"""A decode step of the released widths through the kernels for Hopper, lowered and compiled without a GPU.

And a layer of small widths through the kernels for Hopper and for Blackwell, interpreted.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.kernel_choice import step_choices
from deepinfer_jax.kernels.attention import mosaic_sm90 as attention
from deepinfer_jax.kernels.attention import mosaic_sm100 as attention_sm100
from deepinfer_jax.kernels.experts import mosaic_sm90 as experts
from deepinfer_jax.kernels.experts import mosaic_sm100 as experts_sm100
from deepinfer_jax.kernels.experts.api import PackedMatrix
from deepinfer_jax.kernels.hyper import mosaic as hyper
from deepinfer_jax.kernels.indexer import mosaic_sm90 as indexer
from deepinfer_jax.kernels.indexer import mosaic_sm100 as indexer_sm100
from deepinfer_jax.kernels.indexer import topk
from deepinfer_jax.kernels.linear import mosaic_sm90 as linear
from deepinfer_jax.kernels.linear import mosaic_sm100 as linear_sm100
from deepinfer_jax.model.moe import needs_quantized_rows
from deepinfer_jax.model.variants import layer_weights
from deepinfer_jax.testing import assembly, rank_aot
from deepinfer_jax.testing.rank_model import StepLoad, rank_model
from deepinfer_jax.testing.step_bench import compare_logits, jitted_step

NAME = "mosaic_sm90"
# One layer of each role: window with an Engram table, ratio 2, candidate source, and one that chooses among candidates.
CASE = rank_aot.RankCase(target="h200", kernels=NAME, num_layers=4, num_rows=8, context=256, num_experts=48)
# Calls of each function in one layer, or in one layer that has it: three choose entries, one has a table, and one
# multiplies two weights of a compressor in bfloat16 beside its router. All blocks are candidates in so short a context.
PER_LAYER = {
    "attend": 4,
    "best_entries": 2 * 3,
    "expand": 4,
    "expand_and_mix": 2 * 4,
    "grouped_linear": 4,
    "linear_bf16": 4 + 2,
    "mix": 2 * 4,
    "routed_experts": 5 * 4,
}
# Of attention wq_a, wq_b, wkv and wo_b, three matrices of the shared expert; index queries; Engram.
LINEARS = 4 * (4 + 3) + 3 + 1
# Sums in another order move some values to the next FP8 code, 6 % away, in front of several products.
LOGITS_REL_L2 = 2e-2
ONE_EXPERT_BYTES = 5120 * 2304 // 2  # of one matrix; a layer's stack of it has 48 times as many


def test_a_kernel_is_lowered_once_for_all_layers():
    config, _ = rank_aot.step_of(CASE)
    arguments = rank_aot.abstract_arguments(CASE)
    assert isinstance(arguments[0].moe.experts.w2, PackedMatrix)
    text = jitted_step(config).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"call @(\w+?)(?:_\d+)?\(", text)
    assert {name: calls.count(name) for name in ("attend", "routed_experts", "linear")} == {
        "attend": 4,
        "routed_experts": 4,
        "linear": LINEARS,
    }
    # Attention of a window and over caches of either ratio, experts with their schedule and codes, linear layers of
    # eight shapes with their quantisers, the grouped one, those of router and compressor, index scores of either ratio
    # and those that candidate blocks could be made of, with the choice among each, three forms of mixes.
    assert text.count("custom_call @mosaic_gpu") == 3 + 5 + 2 * 8 + 1 + 2 + 2 * 3 + 5


@pytest.mark.parametrize("context, want", [pytest.param(256, 0, marks=pytest.mark.slow), (16384, 0), (32768, 1)])
def test_keys_of_candidates_are_copied_only_where_they_are_not_all(context, want):
    case = dataclasses.replace(CASE, context=context)
    config, _ = rank_aot.step_of(case)
    text = jitted_step(config).trace(*rank_aot.abstract_arguments(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"call @candidate_blocks(?:_\d+)?\(", text)) == want


@pytest.mark.parametrize("num_rows, kernels, want", [(8, NAME, False), (8192, NAME, False), (8, "reference", True)])
def test_rows_go_through_fp8_unless_the_kernels_of_all_experts_quantise_them(num_rows, kernels, want):
    config = dataclasses.replace(rank_aot.step_of(CASE)[0], kernels=kernels)
    found = []

    def look(moe):
        shared = layer_weights(moe.shared, 0, dtype=jnp.bfloat16, config=config)
        u = jnp.zeros((num_rows, config.model.hidden_size), jnp.bfloat16)
        found.append(needs_quantized_rows(moe, shared, u, config=config))

    jax.eval_shape(look, rank_aot.abstract_arguments(CASE)[0].moe)
    assert found == [want]


@pytest.mark.slow
@pytest.mark.skipif(assembly.why_not() is not None, reason=str(assembly.why_not()))
def test_a_step_holds_every_kernel_and_no_copy_of_weights():
    step = rank_aot.compile_apart(CASE)
    assert {name: count for name, count in step.calls.items() if name != "linear"} == PER_LAYER
    # Each has a kernel that quantises its rows, which wq_a and wkv share, and may w1 and w3 of the shared expert.
    assert 2 * LINEARS - 8 <= step.calls["linear"] <= 2 * LINEARS - 4
    # The largest array that is made is the router's gate in float32, so neither stacks nor caches are copied.
    assert step.largest_bytes < 2 * ONE_EXPERT_BYTES, step.largest
    assert step.kernels < 500


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels on two multiprocessors of the interpreter."""
    given = {"interpret": plgpu.InterpretGPUParams()}
    linears, routed = ("linear", "linear_bf16", "grouped_linear"), ("routed_experts",)
    persistent = {experts: routed, experts_sm100: routed, linear: linears, linear_sm100: linears}
    for module, names in persistent.items():
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), num_sms=2, **given))
    plain = {
        attention: ("attend",),
        attention_sm100: ("attend",),
        indexer: ("best_entries",),
        indexer_sm100: ("best_entries",),
        topk: ("candidate_blocks",),
        hyper: ("expand", "mix", "expand_and_mix"),
    }
    for module, names in plain.items():
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), **given))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [NAME, "mosaic_sm100"])
def test_a_layer_through_the_kernels_is_that_of_the_reference(interpreted, kernels):
    model = dataclasses.replace(
        rank_model(load_config(shipped_config(CASE.model)), num_layers=1),
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=768,
        head_dim=128,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=2,
        n_routed_experts=8,
        engram_compressed_vocab_size=500,
        image_token_id=500,
        dspark_noise_token_id=501,
    )
    config = RuntimeConfig(model=model, target="nvidia", is_invariant=False, kernels=kernels)
    choices = step_choices(config, num_rows=8)
    assert {choices[op] for op in ("attention", "experts", "grouped_linear", "hyper", "indexer", "linear")} == {kernels}
    case = StepLoad(num_rows=3, context=130, num_experts=8)
    assert compare_logits(config, case, (kernels, "reference")) < LOGITS_REL_L2
