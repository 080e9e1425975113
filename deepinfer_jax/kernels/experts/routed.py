"""The call of the routed experts around their two products: where pairs go, codes of rows, and the way back.

Nothing here is for one architecture; `mosaic_sm90` and `mosaic_sm100` bring the products.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int

from deepinfer_jax.kernels.experts import packed
from deepinfer_jax.kernels.experts.packed import PackedExperts, pack_experts
from deepinfer_jax.kernels.experts.rows import folded_rows
from deepinfer_jax.kernels.experts.schedule import MAX_ROW_TILE, ROW_BLOCK, make_schedule
from deepinfer_jax.kernels.experts.unit_product import UnitProduct
from deepinfer_jax.ops.quant import ScaledArray

Weights = ScaledArray | PackedExperts


def check_row_tile(row_tile: int) -> None:
    """Raises ValueError for a number of pairs that no unit can have."""
    if row_tile % ROW_BLOCK or not ROW_BLOCK <= row_tile <= MAX_ROW_TILE:
        raise ValueError(f"row_tile={row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to {MAX_ROW_TILE}")


def refuses(
    u: Array, expert_ids: Array, w1: Weights | Array, w2: Weights | Array, *, width_step: int, inner_step: int
) -> str | None:
    """Why these operands cannot be multiplied, None if they can. The steps are what both widths are multiples of."""
    if u.dtype != jnp.bfloat16:
        return f"rows are {u.dtype}, not bfloat16"
    reason = packed.refuses(w1) or packed.refuses(w2)
    if reason is not None:
        return reason
    assert isinstance(w1, Weights) and isinstance(w2, Weights)
    if type(w1) is not type(w2):
        return "some of the weights are in the kernel's own form and some are not"
    width, inner = w2.payload.shape[-2], w1.payload.shape[-2]
    for name, size, step in (("hidden", width, width_step), ("inner", inner, inner_step)):
        if size % step:
            return f"{name} width {size} is not a multiple of {step}"
    return None


def run(
    up: UnitProduct,
    down: UnitProduct,
    u: BFloat16[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    shares: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    w1: Weights,
    w2: Weights,
    w3: Weights,
    *,
    layer: int | Int[Array, ""],
) -> BFloat16[Array, "T A D"]:
    """Outputs of the chosen experts by these products, times their shares; zeros for pairs that have no expert here.

    Operands are such that `refuses` accepts them; w1, w2, w3 and layer are those of `mosaic_sm90.routed_experts`.
    """
    num_experts, interpret = w1.payload.shape[-3], up.interpret
    if not expert_ids.size:
        return jnp.zeros((*expert_ids.shape, u.shape[1]), u.dtype)
    gate, other, back = (_packed(w, layer) for w in (w1, w3, w2))
    layer = layer if isinstance(w1, PackedExperts) else 0
    schedule = make_schedule(
        expert_ids,
        is_live,
        num_experts=num_experts,
        row_tile=up.row_tile,
        first_expert=layer * num_experts,
        interpret=interpret,
    )
    # Pairs without an expert here have the first place behind those of the products, which all of them write.
    codes, factors = folded_rows(
        u, schedule.places, shares.reshape(-1), num_places=schedule.num_places + ROW_BLOCK, interpret=interpret
    )
    hidden = up(schedule, codes, factors, gate, other)
    codes, factors = folded_rows(hidden, num_places=schedule.num_places, interpret=interpret)
    out = down(schedule, codes, factors, back, back)
    # A gather that clips and a select are one operation to a compiler, with whatever reads them; one that fills is two.
    is_here = (schedule.places < schedule.num_places)[:, None]
    out = jnp.where(is_here, out.at[schedule.places].get(mode="clip"), jnp.zeros((), out.dtype))
    return out.reshape(*expert_ids.shape, u.shape[1])


def weighted_swiglu(
    gate: Float32[Array, "M N"], up: Float32[Array, "M N"], share: Float32[Array, "M N"], *, limit: float
) -> Float32[Array, "M N"]:
    """As `ops.moe.swiglu` of bfloat16 products."""
    gate, up = lax.min(_rounded(gate), jnp.float32(limit)), jnp.clip(_rounded(up), -limit, limit)
    return jax.nn.silu(gate) * up * share


def _rounded(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _packed(w: Weights, layer: int | Int[Array, ""]) -> PackedExperts:
    if isinstance(w, PackedExperts):
        return w
    return pack_experts(jax.tree.map(lambda a: a if a.ndim == 3 else a[layer], w))
