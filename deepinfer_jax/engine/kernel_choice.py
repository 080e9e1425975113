"""Kernels that an engine was asked for by name: whether the device has them, and which op runs through what."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.resolved import EngineConfig
from deepinfer_jax.config.runtime import Backend, RuntimeConfig
from deepinfer_jax.kernels.attention import api as attention
from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.experts import api as experts
from deepinfer_jax.kernels.host_rows import api as host_rows
from deepinfer_jax.kernels.hyper import api as hyper
from deepinfer_jax.kernels.indexer import api as indexer
from deepinfer_jax.kernels.indexer.keys import EntryKeys
from deepinfer_jax.kernels.linear import api as linear
from deepinfer_jax.kernels.registry import AUTO, REFERENCE, Impl, asked, check_choice, explain
from deepinfer_jax.kernels.router import api as router
from deepinfer_jax.model.params import ExpertParams, Params, abstract_params
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.model.variants import layer_weights
from deepinfer_jax.ops.hyper import Mix, Mixer

_log = logging.getLogger(__name__)


def check_kernels(config: EngineConfig, device: Any, *, target: str) -> None:
    """Raises ValueError for a name that no op has on the target, or whose kernels are for another GPU."""
    backend = Backend(target=target, kernels=config.kernels)
    check_choice(OPS, backend)
    named = [impl for impls in OPS.values() for impl in impls if impl.name == config.kernels]
    wanted = {impl.compute_capability for impl in named if impl.serves(target)} - {""}
    found = getattr(device, "compute_capability", None)
    if wanted and found not in wanted:
        raise ValueError(
            f"kernels={config.kernels} is for GPUs of compute capability {', '.join(sorted(wanted))}, and "
            f"{device.device_kind} has {found}; set kernels (DEEPINFER_JAX_KERNELS) to {AUTO} or {REFERENCE}"
        )


def log_choices(runtime: RuntimeConfig, *, decode_rows: int, prefill_rows: int) -> None:
    """Tells which op runs through what in steps of these sizes, where kernels were asked for by name.

    A warning where one refuses, so that it is seen without any setting.
    """
    if runtime.kernels in (AUTO, REFERENCE):
        return
    for what, rows in (("decode", decode_rows), ("prefill", prefill_rows)):
        choices = step_choices(runtime, num_rows=rows)
        told = "; ".join(f"{op}: {choice}" for op, choice in choices.items())
        is_refused = any("refuses" in choice for choice in choices.values())
        _log.log(
            logging.WARNING if is_refused else logging.INFO, "kernels of a %s step of %d rows: %s", what, rows, told
        )


def step_choices(runtime: RuntimeConfig, *, num_rows: int) -> dict[str, str]:
    """For each op what it runs through in a step of so many rows, and why not what was asked for; by shapes alone."""
    told: dict[str, dict[str, list[str]]] = {op: {} for op in OPS}

    def tell(op: str, impls: Sequence[Impl], what: str, *args: Any, **given: Any) -> None:
        text = explain(op, impls, runtime.backend, *args, **given)
        told[op].setdefault(text, []).append(what)

    def look(params: Params, state: State) -> None:
        _tell_products(tell, params, runtime, num_rows)
        _tell_experts(tell, params, runtime, num_rows)
        _tell_attention(tell, state, runtime, num_rows)
        _tell_choice(tell, state, runtime, num_rows)
        _tell_tables(tell, runtime, num_rows)
        u = _rows(runtime, num_rows, runtime.model.hidden_size)
        tell(router.OP, router.IMPLS, "", u, params.moe.gate[0], params.moe.bias[0])
        _tell_mixes(tell, params, runtime, num_rows)

    state = jax.eval_shape(lambda: init_state(runtime, num_slots=1, num_pages=1))
    jax.eval_shape(look, abstract_params(runtime.model), state)
    for op, impls in OPS.items():
        if not told[op]:  # has no kernel under this name, or one that refuses nothing, so no operands are needed
            tell(op, asked(impls, op, runtime.backend)[:1], "")
    return {op: _joined(texts) for op, texts in sorted(told.items())}


def _joined(texts: dict[str, list[str]]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    return ", ".join(f"{text} for {' and '.join(names)}" for text, names in texts.items())


def _rows(runtime: RuntimeConfig, *shape: int) -> Float[Array, "..."]:
    return jnp.zeros(shape, runtime.activation_dtype)


def _tell_products(tell: Any, params: Params, runtime: RuntimeConfig, num_rows: int) -> None:
    own = layer_weights(params.attention, 0, dtype=runtime.activation_dtype, config=runtime)
    queries = layer_weights(params.indexer.wq_b, 0, dtype=runtime.activation_dtype, config=runtime)
    weights = {"wq_a": own.wq_a, "wq_b": own.wq_b, "wkv": own.wkv, "wo_b": own.wo_b, "index queries": queries}
    for name, w in weights.items():
        width = w.shape[-1] if isinstance(w, Array) else w.payload.shape[-1]
        tell(linear.OP, linear.IMPLS, name, _rows(runtime, num_rows, width), w)
    model = runtime.model
    group = model.num_attention_heads // model.o_groups * model.head_dim
    tell(linear.GROUPED_OP, linear.GROUPED_IMPLS, "wo_a", _rows(runtime, num_rows, model.o_groups, group), own.wo_a)


def _tell_tables(tell: Any, runtime: RuntimeConfig, num_rows: int) -> None:
    """Of tables that are in the memory of the host."""
    numbers: Int[Array, "T N"] = jnp.zeros((num_rows, runtime.model.engram_columns), jnp.int32)
    width = runtime.model.engram_head_dim
    for name, row_bytes in (("codes", width), ("scales", width // 32)):
        tell(host_rows.OP, host_rows.IMPLS, name, jnp.zeros((1, row_bytes), jnp.uint8), numbers)


def _tell_experts(tell: Any, params: Params, runtime: RuntimeConfig, num_rows: int) -> None:
    model, quantizes = runtime.model, runtime.policy.quantizes_activations
    u = _rows(runtime, num_rows, model.hidden_size)
    ids: Int[Array, "T A"] = jnp.zeros((num_rows, model.num_experts_per_tok), jnp.int32)
    is_live: Bool[Array, " T"] = jnp.ones(num_rows, jnp.bool_)
    given = {"limit": model.swiglu_limit, "quantizes": quantizes}
    arrays = (u, ids, ids.astype(jnp.float32), is_live, params.moe.experts, 0)
    tell(experts.OP, experts.IMPLS, "", *arrays, num_experts=model.n_routed_experts, **given)
    shared: ExpertParams = layer_weights(params.moe.shared, 0, dtype=u.dtype, config=runtime)
    tell(experts.SHARED_OP, experts.SHARED_IMPLS, "", u, shared, **given)


def _tell_attention(tell: Any, state: State, runtime: RuntimeConfig, num_rows: int) -> None:
    model, zeros = runtime.model, jnp.zeros(num_rows, jnp.int32)
    places = RowPlaces(slots=zeros, positions=zeros, first_row=zeros, first_position=zeros, floor=zeros)
    sources = KeySources(
        new=jax.tree.map(lambda a: a[0, :, 0], state.window),
        ring=state.window,
        layer=0,
        cache=state.main_kv[1],
        source=0,
        page_table=jnp.zeros((1, 1), jnp.int32),
        window=model.sliding_window,
        ring_len=runtime.ring_len,
        page_entries=runtime.page_tokens,
    )
    q = _rows(runtime, num_rows, model.num_attention_heads, model.head_dim)
    entries, sink = jnp.zeros((num_rows, model.index_topk), jnp.int32), jnp.zeros(q.shape[1], jnp.float32)
    given = {"tile": runtime.row_tile, "has_fixed_trips": runtime.has_fixed_trips}
    tell(attention.OP, attention.IMPLS, "", q, sources, places, entries, sink, jnp.int32(0), **given)


def _tell_mixes(tell: Any, params: Params, runtime: RuntimeConfig, num_rows: int) -> None:
    model, own = runtime.model, params.hc_ffn
    mixer = Mixer(fn=own.fn[0], scale=own.scale[0], base=own.base[0], norm=params.ffn_norm[0])
    pre = jnp.zeros((num_rows, model.hc_mult), jnp.float32)
    before = Mix(pre=pre, post=pre, comb=jnp.zeros((*pre.shape, model.hc_mult), jnp.float32))
    out, streams = (_rows(runtime, num_rows, *shape, model.hidden_size) for shape in ((), (model.hc_mult,)))
    given = {"iterations": model.hc_sinkhorn_iters, "eps": model.hc_eps, "norm_eps": model.rms_norm_eps}
    tell(hyper.OP, hyper.IMPLS, "", out, streams, before, mixer, **given)


def _tell_choice(tell: Any, state: State, runtime: RuntimeConfig, num_rows: int) -> None:
    model, zeros = runtime.model, jnp.zeros(num_rows, jnp.int32)
    queries = _rows(runtime, num_rows, model.index_n_heads, model.index_head_dim)
    for cache, ratio in zip(state.index_k, (2, 1), strict=True):
        keys = EntryKeys(
            cache=cache,
            source=0,
            pages=jnp.zeros((num_rows, 1), jnp.int32),
            page_entries=runtime.page_tokens // ratio,
        )
        tell(indexer.OP, indexer.IMPLS, f"ratio {ratio}", queries, queries[:, :, 0], None, zeros, keys, count=1)
