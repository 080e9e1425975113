"""Timed decode steps of one rank: the reduced model, the bytes that are counted, and what a profile is read as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.testing import compare, step_bench
from deepinfer_jax.testing.kernel_bench import Ceilings
from deepinfer_jax.testing.rank_model import StepLoad, rank_model, rank_params, rank_schema
from deepinfer_jax.testing.step_work import floor_us, step_bytes, step_flops

TINY = load_config(shipped_config("model/tiny.json"))
RELEASED = load_config(shipped_config("model/deepseek-v4.1-flash.json"))


def config_of(model, **options) -> RuntimeConfig:
    return RuntimeConfig(model=model, **{"target": "nvidia", "is_invariant": False, **options})


@pytest.mark.parametrize(
    "count, kept", [(1, [20]), (3, [2, 20, 24]), (6, [1, 2, 3, 20, 21, 24]), (40, list(range(40)))]
)
def test_few_layers_have_one_of_each_role_first(count, kept):
    names = [role.name for role in layer_roles(RELEASED)]
    reduced = rank_model(RELEASED, num_layers=count)
    assert [role.name for role in layer_roles(reduced)] == [names[i] for i in kept]
    assert reduced.num_nextn_predict_layers == 0 and sum(reduced.engram_num_embeddings) < 1 << 20


def test_more_layers_than_there_are_are_refused():
    with pytest.raises(ValueError, match="num_layers=41 must be from 1 to 40"):
        rank_model(RELEASED, num_layers=41)


def test_weights_have_the_released_forms_and_the_rank_its_experts():
    model = rank_model(TINY)
    params = jax.eval_shape(lambda: rank_params(model, num_experts=3))
    specs: dict[str, LeafSpec] = {spec.path: spec for spec in rank_schema(model, num_experts=3)}
    assert params.moe.experts.w1.payload.shape == specs["moe.experts.w1"].payload_shape
    assert params.moe.experts.w1.payload.shape[1] == 3
    assert params.moe.gate.shape[1] == TINY.n_routed_experts


def test_weights_keep_rows_of_order_one():
    params = rank_params(rank_model(TINY, num_layers=3), num_experts=4)
    own = params.attention
    for w in (own.wq_a, own.wo_b, params.moe.experts.w1, params.moe.experts.w2):
        assert isinstance(w, ScaledArray)
        values = np.asarray(dequantize(w, jnp.float32))
        row = np.sqrt((values**2).sum(axis=-1))  # what a row makes of inputs of order one
        assert 0.4 < np.median(row) < 2.5
    again = rank_params(rank_model(TINY, num_layers=3), num_experts=4)
    compare.assert_bitwise(params.attention.wq_b.payload, again.attention.wq_b.payload)


def test_bytes_are_those_of_the_released_rank():
    config, case = config_of(rank_model(RELEASED)), StepLoad(num_rows=128, context=8192, num_experts=48)
    params = jax.eval_shape(lambda: rank_params(config.model, num_experts=48))
    experts = 40 * 48 * 3 * 5120 * 2304 * 17 // 32  # every expert is hit
    caches = 128 * (40 * 128 * 528 + 38 * 512 * 288 + (3 * 4096 + 8192 + 4 * 8192) * 68)
    logits = 128 * 129280 * 4
    found = step_bytes(config, params, case)
    others = found - experts - caches - logits
    attention = 1280 * 5120 + 32768 * 1280 + 512 * 5120 + 8192 * 4096 + 5120 * 8192
    assert others == pytest.approx(40 * (attention + 3 * 5120 * 2304) + 2 * 129280 * 5120, rel=0.12)


def test_experts_that_no_row_chose_are_not_read():
    config = config_of(rank_model(RELEASED, num_layers=1))
    params = jax.eval_shape(lambda: rank_params(config.model, num_experts=48))
    one, two = (
        step_bytes(config, params, StepLoad(num_rows=1, context=context, num_experts=48)) for context in (4096, 8192)
    )
    assert two - one == 4096 * 68  # the candidate source scores so many entries more
    chosen = StepLoad(num_rows=1, context=4096, num_experts=48).experts(config)["layers.0.router_ids"]
    assert len(np.unique(np.asarray(chosen))) == 6
    assert one < 48 * 3 * 5120 * 2304 * 17 // 32 + 2 * 129280 * 5120


def test_products_are_those_of_the_released_rank():
    config, load = (
        config_of(rank_model(RELEASED)),
        StepLoad(num_rows=8192, rows_each=8192, context=8192, num_experts=48),
    )
    flops = step_flops(config, load)
    projections = 1280 * 5120 + 32768 * 1280 + 512 * 5120 + 5120 * 8192
    fp8 = 40 * (projections + 3 * 5120 * 2304) + 2 * 25600 * 6144 + 8 * 4096 * 1280
    scores = 2 * 32 * 128 * (3 * sum(t // 2 for t in range(1, 8193)) + 5 * sum(range(1, 8193)))
    assert flops["fp8"] == pytest.approx(2 * 8192 * fp8 + scores, rel=1e-9)
    experts, keys = 40 * 6 * 3 * 5120 * 2304, 38 * 640 + 2 * 128
    others = 40 * (8192 * 4096 + 384 * 5120 + 2 * 24 * 20480)
    assert flops["bf16"] == pytest.approx(8192 * (2 * (experts + others) + 4 * 64 * 512 * keys), rel=0.02)


def test_a_chunk_reads_caches_once_for_all_of_its_rows():
    config = config_of(rank_model(RELEASED, num_layers=1))
    params = jax.eval_shape(lambda: rank_params(config.model, num_experts=48))
    chunk = StepLoad(num_rows=64, rows_each=64, context=4096, num_experts=48)
    others = StepLoad(num_rows=64, context=4096, num_experts=48)
    logits = 63 * 129280 * 4
    caches = 64 * (128 * 528 + 512 * 288 + 4096 * 68) - (191 * 528 + 4096 * 288 + 4096 * 68)
    assert step_bytes(config, params, others) - step_bytes(config, params, chunk) == logits + caches
    batch = chunk.batch(config)
    assert batch.positions[0] == 4032 and batch.positions[-1] == 4095
    assert batch.logit_rows.tolist() == [63] and set(batch.slots.tolist()) == {0}


@pytest.mark.parametrize("rows_each, context", [(3, 8), (8, 4)])
def test_rows_that_do_not_go_into_requests_are_refused(rows_each, context):
    with pytest.raises(ValueError, match="do not go into requests"):
        StepLoad(num_rows=8, rows_each=rows_each, context=context, num_experts=4)


def test_the_floor_is_what_takes_longer():
    ceilings = Ceilings(bytes_per_s=1e12, flops_per_s={"fp8": 2e15, "bf16": 1e15})
    assert floor_us(10**6, {"fp8": 2e9, "bf16": 3e9}, ceilings) == (pytest.approx(4.0), "compute")
    assert floor_us(10**7, {"fp8": 2e9, "bf16": 3e9}, ceilings) == (pytest.approx(10.0), "bandwidth")


def test_a_profile_is_read_as_kernels_time_and_gaps():
    trace = step_bench.read_kernels([("b", 300.0, 100.0), ("a", 0.0, 200.0), ("a", 100.0, 100.0)])
    assert (trace.kernels, trace.busy_us, trace.idle) == (3, 0.3, 0.25)
    assert trace.by_name == {"a": (2, pytest.approx(0.3)), "b": (1, 0.1)}
    assert (trace.collective_us, trace.hidden_us) == (0.0, 0.0)


def test_a_profile_tells_what_of_the_collectives_is_hidden():
    kernels = [("a", 0.0, 500.0), ("ncclDevKernel_SendRecv", 400.0, 300.0), ("b", 600.0, 50.0), ("c", 900.0, 100.0)]
    trace = step_bench.read_kernels(kernels)
    assert (trace.busy_us, trace.collective_us) == (0.8, 0.3)
    assert trace.hidden_us == pytest.approx(0.15)


def test_steps_are_timed_by_the_difference_of_many_and_one(monkeypatch):
    clock = iter(np.cumsum([0.0, 9.0, 0.0, 0.05, 0.0, 0.13, 0.0, 0.06, 0.0, 0.14]))
    monkeypatch.setattr(step_bench.time, "perf_counter", lambda: float(next(clock)))
    runs = []

    def step(params, state, batch, experts):
        runs.append(state)
        return None, state + 1

    median_us, state = step_bench.time_step(step, None, 0, None, {}, turns=2)  # type: ignore[arg-type]
    assert median_us == pytest.approx(1e4)
    assert state == 2 + 2 * (1 + step_bench.RUNS) == len(runs)
