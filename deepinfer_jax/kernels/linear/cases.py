"""Sizes at which linear layers are tested and timed: the released widths, rows of decode steps and of a chunk."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.linear import mosaic_sm90, mosaic_sm100, packed_sm90, packed_sm100
from deepinfer_jax.kernels.mosaic import GROUP
from deepinfer_jax.ops.linear import grouped_linear, linear
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_fp8

# name: columns, rows of the weights
SCALED_SHAPES = {"wq_a_wkv": (5120, 1792), "wq_b": (1280, 32768), "wo_b": (8192, 5120), "shared_w2": (2304, 5120)}
# name: groups, columns and rows of the weights of one group
BF16_SHAPES = {"wo_a": (8, 4096, 1024), "router": (1, 5120, 384), "head": (1, 5120, 129280)}
ROWS = (128, 16, 1, 512, 64)
PREFILL_ROWS = 8192
TARGET_ROWS = (128, PREFILL_ROWS)
# One bfloat16 rounding of sums in another order; an FP8 instruction drops what lies 2^-13 below its largest product.
TOLERANCE = 3e-3
FAMILIES_SM100 = ("tcgen05.commit", "tcgen05.ld", "cp.async.bulk.tensor")


def make_inputs(key: Array, *, num_rows: int, num_outputs: int, width: int) -> tuple[Any, ...]:
    """Rows on the grid of `quantize_fp8`, and packed weights with scales of a few neighbouring powers of two."""
    keys = jax.random.split(key, 3)
    packed = quantize_fp8(jax.random.normal(keys[0], (num_rows, width), jnp.bfloat16))
    weights = jax.random.normal(keys[1], (num_outputs, width), jnp.float32) * 16.0
    blocks = (num_outputs // GROUP, width // GROUP)
    w = ScaledArray(
        payload=jax.lax.bitcast_convert_type(weights.astype(jnp.float8_e4m3fn), jnp.uint8),
        scale=jax.random.randint(keys[2], blocks, 114, 118, jnp.int32).astype(jnp.uint8),
        form="fp8",
        block=(GROUP, GROUP),
    )
    # Behind a barrier: a compiler that may keep excess precision would drop the way through FP8.
    return dequantize(jax.lax.optimization_barrier(packed), jnp.bfloat16), w


def make_packed(key: Array, *, num_rows: int, num_outputs: int, width: int) -> tuple[Any, ...]:
    """`make_inputs`, and the weights once more as each kernel's `pack` leaves them when they are loaded."""
    x, w = make_inputs(key, num_rows=num_rows, num_outputs=num_outputs, width=width)
    return x, w, packed_sm90.pack(w), packed_sm100.pack(w)


def keep_rows(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    """Rows behind the first `count` are zeros."""
    x, *weights = inputs
    is_kept = jnp.arange(x.shape[0], dtype=jnp.int32) < count
    return jnp.where(jnp.expand_dims(is_kept, range(1, x.ndim)), x, 0), *weights


def cut_rows(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The first `count` rows."""
    x, *weights = inputs
    return x[:count], *weights


def _reference(
    x: Array, w: ScaledArray, for_sm90: packed_sm90.PackedLinear, for_sm100: packed_sm100.PackedLinear
) -> Array:
    del for_sm90, for_sm100
    return linear(x, w)


def _kernel_sm90(
    x: Array, w: ScaledArray, for_sm90: packed_sm90.PackedLinear, for_sm100: packed_sm100.PackedLinear
) -> Array:
    del w, for_sm100
    return mosaic_sm90.linear(x, for_sm90)


def _kernel_sm100(
    x: Array, w: ScaledArray, for_sm90: packed_sm90.PackedLinear, for_sm100: packed_sm100.PackedLinear
) -> Array:
    del w, for_sm90
    return mosaic_sm100.linear(x, for_sm100)


def _torch_products(
    torch: Any, copies: int, *, num_rows: int, groups: int, width: int, num_outputs: int
) -> list[Callable[[], Any]]:
    """The product by PyTorch, of weights in bfloat16: one, or one for each group at once."""

    def call() -> Callable[[], Any]:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        if groups == 1:
            rows, weights = make(num_rows, width), make(num_outputs, width)
            return lambda: rows @ weights.T
        rows, weights = make(num_rows, groups, width), make(groups, num_outputs, width)
        return lambda: torch.bmm(rows.transpose(0, 1), weights.mT)

    return [call() for _ in range(copies)]


def _scaled_case(name: str, num_rows: int) -> Case:
    width, num_outputs = SCALED_SHAPES[name]
    return Case(
        op="linear",
        name=f"{name}_{num_rows}_rows",
        make=functools.partial(make_packed, num_rows=num_rows, num_outputs=num_outputs, width=width),
        implementations={REFERENCE: _reference, "mosaic_sm90": _kernel_sm90, "mosaic_sm100": _kernel_sm100},
        num_bytes=num_outputs * width + 4 * num_outputs * width // GROUP**2 + 2 * num_rows * (num_outputs + width),
        flops=2 * num_rows * num_outputs * width,
        rate="fp8",
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        cut_rows=cut_rows if num_rows >= TARGET_ROWS[0] else None,
        num_rows=num_rows,
        has_target=num_rows in TARGET_ROWS,
        families={
            "mosaic_sm90": ("wgmma.mma_async.sync.aligned", "k32.f32.e4m3.e4m3", "cp.async.bulk.tensor"),
            "mosaic_sm100": (
                "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X",
                "tcgen05.cp.cta_group::1.32x128b.warpx4",
                *FAMILIES_SM100,
            ),
        },
        peers={
            "torch_matmul_bf16": functools.partial(
                _torch_products, num_rows=num_rows, groups=1, width=width, num_outputs=num_outputs
            )
        },
    )


def make_bf16_inputs(key: Array, *, num_rows: int, groups: int, width: int, num_outputs: int) -> tuple[Array, Array]:
    """Rows [T, groups, width] and weights [groups * num_outputs, width] of products of about one."""
    keys = jax.random.split(key, 2)
    x = jax.random.normal(keys[0], (num_rows, groups, width), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (groups * num_outputs, width), jnp.bfloat16) * width**-0.5


def _bf16_case(name: str, num_rows: int) -> Case:
    groups, width, num_outputs = BF16_SHAPES[name]
    size = {"num_rows": num_rows, "groups": groups, "width": width, "num_outputs": num_outputs}
    return Case(
        op="linear",
        name=f"{name}_{num_rows}_rows",
        make=functools.partial(make_bf16_inputs, **size),
        implementations={
            REFERENCE: grouped_linear,
            "mosaic_sm90": mosaic_sm90.grouped_linear,
            "mosaic_sm100": mosaic_sm100.grouped_linear,
        },
        num_bytes=2 * groups * (num_outputs * width + num_rows * (num_outputs + width)),
        flops=2 * num_rows * groups * num_outputs * width,
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        cut_rows=cut_rows if num_rows >= TARGET_ROWS[0] else None,
        num_rows=num_rows,
        has_target=num_rows in TARGET_ROWS,
        families={
            "mosaic_sm90": ("wgmma.mma_async.sync.aligned", "k16.f32.bf16.bf16", "cp.async.bulk.tensor"),
            "mosaic_sm100": ("tcgen05.mma.cta_group::1.kind::f16", *FAMILIES_SM100),
        },
        peers={"torch_bmm_bf16" if groups > 1 else "torch_matmul_bf16": functools.partial(_torch_products, **size)},
    )


CASES = (
    *(_scaled_case(name, num_rows) for name in SCALED_SHAPES for num_rows in (*ROWS, PREFILL_ROWS)),
    *(_bf16_case(name, num_rows) for name in BF16_SHAPES for num_rows in ROWS),
    _bf16_case("wo_a", PREFILL_ROWS),
)
