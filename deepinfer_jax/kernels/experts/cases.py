"""Sizes at which the routed experts are tested and timed: one rank of eight, the released widths, decode steps."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.experts import mosaic_sm90, mosaic_sm100
from deepinfer_jax.kernels.experts.packed import PackedExperts, pack_experts, unpacked
from deepinfer_jax.kernels.mosaic import GROUP
from deepinfer_jax.ops import moe
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_fp8

WIDTH, INNER, NUM_EXPERTS = 5120, 2304, 48
LIMIT = 10.0
PAIRS_PER_ROW = 6  # a rank of eight has the pairs of as many rows as its own, on average
DECODE_ROWS, PREFILL_ROWS = (128, 16, 1, 512), (4096, 8192)
TARGET_PAIRS = tuple(rows * PAIRS_PER_ROW for rows in (128, *PREFILL_ROWS))
SKEW = 0.5  # standard deviation of the logarithm of an expert's popularity
REFERENCE_TILE = 16
# E2M1 with a scale byte for each 32 weights.
WEIGHT_BYTES = 17 / 32
# Sums in another order move a few hidden values to the next E4M3 code, which is 6 % away.
TOLERANCE = 1e-2
FAMILIES = {
    "mosaic_sm90": ("wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e5m2", "cp.async.bulk.tensor"),
    "mosaic_sm100": (
        "tcgen05.mma.cta_group::1.kind::f8f6f4",
        "tcgen05.st.sync.aligned.32x32b",
        "tcgen05.ld",
        "tcgen05.commit",
        "cp.async.bulk.tensor",
    ),
}


def pair_experts(num_pairs: int) -> np.ndarray:
    """The expert of each pair, of fixed unequal popularity."""
    rng = np.random.default_rng(num_pairs)
    popularity = np.exp(SKEW * rng.standard_normal(NUM_EXPERTS))
    return rng.choice(NUM_EXPERTS, size=(num_pairs, 1), p=popularity / popularity.sum()).astype(np.int32)


def random_experts(key: Array, num_rows: int, width: int, *, num_experts: int) -> ScaledArray:
    """Packed weights of any bits, with scales of a few neighbouring powers of two and products of about one."""
    payload_key, scale_key = jax.random.split(key)
    middle = 127 - 2 - int(np.log2(width)) // 2  # |e2m1| is about 2.6 in the root mean square
    shape = (num_experts, num_rows, width // GROUP)
    return ScaledArray(
        payload=jax.random.bits(payload_key, (num_experts, num_rows, width // 2), jnp.uint8),
        scale=jax.random.randint(scale_key, shape, middle - 2, middle + 2, jnp.int32).astype(jnp.uint8),
        form="fp4",
        block=(1, GROUP),
    )


def make_inputs(key: Array, ids: np.ndarray, *, width: int, inner: int, num_experts: int) -> tuple[Any, ...]:
    """Operands of `routed_experts` for given ids [T, A], with weights in the kernel's form."""
    keys = jax.random.split(key, 5)
    packed = quantize_fp8(jax.random.normal(keys[0], (ids.shape[0], width), jnp.bfloat16))
    # Behind a barrier: a compiler that may keep excess precision would drop the way through FP8.
    return (
        dequantize(jax.lax.optimization_barrier(packed), jnp.bfloat16),
        jnp.asarray(ids),
        jax.random.uniform(keys[1], ids.shape, jnp.float32, 0.1, 0.5),
        jnp.ones(ids.shape[0], jnp.bool_),
        pack_experts(random_experts(keys[2], inner, width, num_experts=num_experts)),
        pack_experts(random_experts(keys[3], width, inner, num_experts=num_experts)),
        pack_experts(random_experts(keys[4], inner, width, num_experts=num_experts)),
    )


def reference(
    u: Array,
    expert_ids: Array,
    weights: Array,
    is_live: Array,
    w1: PackedExperts,
    w2: PackedExperts,
    w3: PackedExperts,
    *,
    tile: int = REFERENCE_TILE,
) -> Array:
    """What the model computes without a kernel: weights unpacked one expert at a time."""

    def apply(expert: Array, x: Array, weight: Array) -> Array:
        own = [unpacked(jax.tree.map(lambda a: a[expert], w)) for w in (w1, w2, w3)]
        return moe.expert(x, own[0], own[1], own[2], weight, limit=LIMIT, quantizes=True)

    num_experts = w1.payload.shape[0]
    is_here = is_live[:, None] & (expert_ids >= 0)
    out = moe.routed_experts(
        u, jnp.where(is_here, expert_ids, num_experts), weights, is_live, apply, num_experts=num_experts, tile=tile
    )
    return jnp.where(is_here[:, :, None], out, 0)


def keep_rows(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    """The first `count` rows are live."""
    u, ids, weights, is_live, *matrices = inputs
    return (u, ids, weights, is_live & (jnp.arange(is_live.shape[0], dtype=jnp.int32) < count), *matrices)


def _grouped_mm(torch: Any, copies: int, *, ids: np.ndarray) -> list[Callable[[], Any]]:
    """The two products of bfloat16 weights by PyTorch, without activation and quantisation between them."""
    sizes = np.bincount(ids[:, 0], minlength=NUM_EXPERTS)
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")

    def call() -> Callable[[], Any]:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        rows, hidden = make(len(ids), WIDTH), make(len(ids), INNER)
        up, down = make(NUM_EXPERTS, 2 * INNER, WIDTH), make(NUM_EXPERTS, WIDTH, INNER)

        def run() -> None:
            torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
            torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends)

        return run

    return [call() for _ in range(copies)]


def _case(name: str, num_pairs: int, *, rate: Literal["bf16", "fp8"]) -> Case:
    ids = pair_experts(num_pairs)
    num_used = len(np.unique(ids))
    return Case(
        op="experts",
        name=name,
        make=functools.partial(make_inputs, ids=ids, width=WIDTH, inner=INNER, num_experts=NUM_EXPERTS),
        implementations={
            REFERENCE: reference,
            "mosaic_sm90": functools.partial(mosaic_sm90.routed_experts, limit=LIMIT),
            "mosaic_sm100": functools.partial(mosaic_sm100.routed_experts, limit=LIMIT),
        },
        num_bytes=int(num_used * 3 * WIDTH * INNER * WEIGHT_BYTES) + 2 * num_pairs * WIDTH * 2,
        flops=num_pairs * 2 * 3 * WIDTH * INNER,
        rate=rate,
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        num_rows=num_pairs,
        has_target=num_pairs in TARGET_PAIRS,
        reference_calls=1,
        families=FAMILIES,
        peers={"torch_grouped_mm_bf16": functools.partial(_grouped_mm, ids=ids)},
    )


CASES = (
    *(_case(f"decode_{rows}_rows", PAIRS_PER_ROW * rows, rate="fp8") for rows in DECODE_ROWS),
    # Two E5M2 codes of each value of x, at the FP8 rate, are as fast as bfloat16.
    *(_case(f"prefill_{rows}_rows", PAIRS_PER_ROW * rows, rate="bf16") for rows in PREFILL_ROWS),
)
