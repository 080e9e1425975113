"""A10: experts spread over simulated devices through HCCL give what one device with all experts gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from deepinfer_jax.kernels.experts import cann
from deepinfer_jax.kernels.experts.cann_parallel import experts_of_all
from deepinfer_jax.ops import moe, quant
from deepinfer_jax.testing import compare

WIDTH, INNER, EXPERTS, ROWS, CHOICES, LIMIT = 64, 256, 8, 8, 2, 10.0
# Two products with bf16 results and a quantiser between them, which moves a whole code where a rounding turns over.
EXPERT_REL_L2 = 1e-2


def weights(rng: np.random.Generator, rows: int, cols: int) -> quant.ScaledArray:
    payload = jnp.asarray(rng.integers(0, 256, (EXPERTS, rows, cols // 2)), jnp.uint8)
    scale = jnp.asarray(rng.integers(122, 126, (EXPERTS, rows, cols // 32)), jnp.uint8)
    return quant.ScaledArray(payload=payload, scale=scale, form="fp4", block=(1, 32))


@pytest.fixture
def case(seed_from_name):
    """Rows with their choices, the last one padding, and the three matrices of all experts."""
    rng = np.random.default_rng(seed_from_name)
    u = quant.fp8_roundtrip(jnp.asarray(rng.standard_normal((ROWS, WIDTH), np.float32), jnp.bfloat16))
    ids = jnp.asarray(np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(ROWS)]), jnp.int32)
    shares = jnp.asarray(rng.random((ROWS, CHOICES), np.float32))
    is_live = jnp.arange(ROWS) < ROWS - 1
    matrices = (weights(rng, INNER, WIDTH), weights(rng, WIDTH, INNER), weights(rng, INNER, WIDTH))
    return (u, ids, shares, is_live), matrices


def stacked(matrices) -> cann.PackedExperts:
    return jax.tree.map(lambda a: a[None], cann.pack_routed(*matrices))


def one_device(rows, matrices) -> np.ndarray:
    run = functools.partial(cann.routed_experts, num_experts=EXPERTS, limit=LIMIT)
    return np.asarray(jax.jit(run)(*rows, stacked(matrices), 0))


def many_devices(bridge, rows, matrices, num_devices: int) -> np.ndarray:
    mesh = jax.make_mesh((num_devices,), ("ep",), axis_types=(AxisType.Auto,))
    groups = bridge.make_groups([range(num_devices)])

    def part(rows, experts):
        rank = jax.lax.axis_index("ep")
        return experts_of_all(
            *rows, experts, 0, groups=groups, rank=rank, num_local=EXPERTS // num_devices, limit=LIMIT
        )

    specs = (PartitionSpec("ep"), PartitionSpec(None, "ep"))
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("ep"), check_vma=False)
    return np.asarray(jax.jit(run)(rows, stacked(matrices)))


@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_give_the_bits_of_one(bridge, case, num_devices):
    rows, matrices = case
    compare.assert_bitwise(many_devices(bridge, rows, matrices, num_devices), one_device(rows, matrices))


def test_one_device_gives_the_reference(bridge, case):
    (u, ids, shares, is_live), (w1, w2, w3) = case

    def apply(expert, x, weight):
        own = [jax.tree.map(lambda a: a[expert], w) for w in (w1, w2, w3)]
        return moe.expert(x, *own, weight, limit=LIMIT, quantizes=True)

    want = moe.routed_experts(u, ids, shares, is_live, apply, num_experts=EXPERTS, tile=8)
    compare.assert_close(one_device(*case), np.asarray(want), rel_l2=EXPERT_REL_L2)
    assert not one_device(*case)[-1].any()
