"""An Ascend device under an engine: what may run there, the bridge, and weights in the forms that CANN takes.

Experimental: never run on Ascend hardware by this project. JAX runs the step on the host and hands single operators to
the device. In the mode "staged" everything is copied for each call; in "resident" the weights stay on the device.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.resolved import EngineConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.drafting import Speculation
from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.ascend import AscendUnsupportedError, Bridge
from deepinfer_jax.kernels.ascend_coverage import check_host_ops, check_model
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.experts.cann import pack_routed, pack_shared
from deepinfer_jax.kernels.linear.cann import pack_weight
from deepinfer_jax.kernels.registry import REFERENCE, check_choice
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.params import Params, layer_slice
from deepinfer_jax.ops.quant import ScaledArray, dequantize

RESIDENT = "resident"
_PROJECTIONS = ("wq_a", "wq_b", "wkv", "wo_b")  # of attention that take FP8 rows
_log = logging.getLogger(__name__)
# Gives a stack of arrays its place; the axis of layers leads, or as many axes as the second argument says.
Place = Callable[..., Any]


def check_step(config: EngineConfig, runtime: RuntimeConfig, speculation: Speculation) -> None:
    """Raises AscendUnsupportedError or ValueError for what cannot run on an Ascend device, before anything does."""
    if config.mesh_shape != (1, 1):
        raise AscendUnsupportedError(
            f"mesh_shape={config.mesh_shape}: the model runs on one Ascend device; leave it out"
        )
    if speculation.max_drafts:
        raise AscendUnsupportedError(
            f"{speculation.max_drafts} drafts: the draft stages do not run on an Ascend device; set num_draft_tokens=0 "
            "(DEEPINFER_USE_NEXTN_DECODE=0)"
        )
    if config.kernels == REFERENCE:
        raise ValueError("kernels=reference would leave the Ascend device idle; choose auto, or device=cpu")
    check_choice(OPS, runtime.backend)
    check_host_ops(runtime.backend)
    check_model(runtime)


def join_bridge(config: EngineConfig) -> Bridge:
    """The open bridge of the process, opened as the configuration says if there is none.

    Raises ValueError where the open one is of the other kind, the simulator or a device's.
    """
    options = ascend.options_from_config(config)
    bridge = ascend.current_bridge()
    if bridge is None:
        return ascend.open_bridge(options)
    if bridge.is_simulator != options.use_simulator:
        raise ValueError(
            f"the process has a bridge to {bridge.soc} open, and DEEPINFER_JAX_ASCEND_SIM={int(options.use_simulator)} "
            "asks for another; close() it first"
        )
    return bridge


def check_invariance(config: EngineConfig, bridge: Bridge) -> None:
    """Raises NotImplementedError for a promise about bits that only the simulator keeps."""
    if config.batch_invariant and not bridge.is_simulator:
        raise NotImplementedError(
            f"batch-invariant mode (DEEPINFER_BATCH_INVARIANT) cannot be promised on {bridge.soc}: CANN does not say "
            "how its operators order sums; unset it"
        )


def place_params(params: Params, runtime: RuntimeConfig, bridge: Bridge, *, mode: str) -> Params:
    """The parameters with the weights of CANN's operators packed for them, in the mode "resident" on the device.

    Weights of ops in `runtime.host_ops`, vectors and whatever no operator reads stay as they are.
    """
    placed = pack_params(params, runtime, bridge if mode == RESIDENT else None)
    told = f"{bridge.soc}, weights {mode}; the host computes {', '.join(runtime.host_ops)}"
    _log.info("the model runs on %s", told)
    return placed


def pack_params(params: Params, runtime: RuntimeConfig, bridge: Bridge | None) -> Params:
    """The parameters with stacked weights in the forms of `kernels/*/cann.py`: on the device, or arrays if None."""

    def place(array: np.ndarray, num_lead: int = 1) -> Any:
        return jnp.asarray(array) if bridge is None else bridge.put_stack(array, num_lead=num_lead)

    on_host = runtime.host_ops
    attention, indexer, moe = params.attention, params.indexer, params.moe
    if "linear" not in on_host:
        packed = {name: _packed(place, pack_weight, getattr(attention, name)) for name in _PROJECTIONS}
        attention = _with(attention, **packed)
        proj, wk = np.asarray(indexer.weights_proj), np.asarray(indexer.wk)
        wq_b = _packed(place, pack_weight, indexer.wq_b)
        indexer = _with(indexer, wq_b=wq_b, weights_proj=place(proj), wk=place(wk))
    if "grouped_linear" not in on_host:
        wo_a = _groups_of(attention.wo_a, num_groups=runtime.model.o_groups)
        attention = _with(attention, wo_a=place(wo_a, 2))
    if "router" not in on_host:
        moe = _with(moe, gate=place(np.asarray(moe.gate).astype(np.float32)))
    if "shared_expert" not in on_host:
        moe = _with(moe, shared=_packed(place, pack_shared, moe.shared.w1, moe.shared.w2, moe.shared.w3))
    if "experts" not in on_host:
        moe = _with(moe, experts=_packed(place, pack_routed, moe.experts.w1, moe.experts.w2, moe.experts.w3))
    return _with(params, attention=attention, indexer=indexer, moe=moe)


def _packed(place: Place, pack: Callable[..., Any], *weights: Any) -> Any:
    """`pack` of each layer's weights, stacked and placed."""
    num_layers = weights[0].payload.shape[0]
    layers = [pack(*(layer_slice(w, layer) for w in weights)) for layer in range(num_layers)]
    return jax.tree.map(lambda *parts: place(np.stack([np.asarray(part) for part in parts])), *layers)


def _groups_of(w: ScaledArray, *, num_groups: int) -> np.ndarray:
    """The weights [L, O * R, M] as bfloat16 values [L, O, R, M]."""
    layers = range(w.payload.shape[0])
    plain = np.stack([np.asarray(dequantize(layer_slice(w, layer), jnp.bfloat16)) for layer in layers])
    return plain.reshape(plain.shape[0], num_groups, -1, plain.shape[-1])


def _with[T](node: T, **values: Any) -> T:
    """The node with other values, whose types its own annotations need not name."""
    return unchecked(type(node), {**node.__dict__, **values})
