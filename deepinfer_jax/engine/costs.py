"""Bytes and arithmetic of one request and one step, from the shape alone (spec: backbone 7.3, 9, 10)."""

import dataclasses
import functools
import math
from typing import Any

import jax

from deepinfer_jax.checkpoint.names import DERIVED_LEAVES
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import LayerRole, layer_roles, replay_boundary
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import LeafSpec, schema
from deepinfer_jax.model.state import State, init_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """Bytes that requests occupy, in the storage of the configured numerics."""

    window_row_bytes: int
    main_kv_row_bytes: int
    index_k_row_bytes: int
    bytes_per_token: float  # main KV and index K of all sources
    ring_len: int  # rows of a window ring
    ring_bytes: int  # of one request, all layers
    window_bytes: int  # the same with as many rows as the window has
    tail_bytes: int  # of one request
    history_bytes: int  # of one request
    bytes_per_request: int  # rings, tails and history: what a request occupies at any length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """One token at a context of `context` tokens: FLOPs, and bytes of caches."""

    context: int
    linear: int
    attention: int
    dense_scan: int
    candidate_scan: int
    total: int
    kv_bytes_read: int  # rings and selected main KV
    index_bytes_read: int
    bytes_written: float
    bytes_held: float  # main KV and index K


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCost:
    """FLOPs for each token of a prompt, averaged over the prompt; bounded: the decoder runs on the last window."""

    prompt_len: int
    bounded: float
    full: float
    encoder_scan: float
    encoder_attention: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightReads:
    """Bytes of weights that one decode step of `batch` requests reads; the expected number of distinct experts."""

    batch: int
    experts_per_layer: float
    backbone_bytes: int
    engram_bytes: int


def cache_figures(runtime: RuntimeConfig) -> CacheFigures:
    """Cache sizes from the state that the network itself makes."""
    state: State = jax.eval_shape(functools.partial(init_state, runtime, num_slots=1, num_pages=1))

    def num_bytes(tree: Any) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    def row_bytes(tree: Any) -> int:
        return sum(a.shape[-1] * a.dtype.itemsize for a in jax.tree.leaves(tree))

    ring_bytes = num_bytes(state.window)
    return CacheFigures(
        window_row_bytes=row_bytes(state.window),
        main_kv_row_bytes=row_bytes(state.main_kv[0]),
        index_k_row_bytes=row_bytes(state.index_k[0]),
        bytes_per_token=num_bytes((state.main_kv, state.index_k)) / runtime.page_tokens,
        ring_len=runtime.ring_len,
        ring_bytes=ring_bytes,
        window_bytes=ring_bytes // runtime.ring_len * runtime.model.sliding_window,
        tail_bytes=num_bytes(state.tails),
        history_bytes=num_bytes(state.history),
        bytes_per_request=num_bytes((state.window, state.tails, state.history)),
    )


def active_parameters(config: ModelConfig, layers: range) -> int:
    """Multiply-accumulates of one token in the matrices of these layers; embedding look-up and head not counted."""
    return sum(_active(spec, config) * _share(spec, layers) for spec in schema(config))


def _active(spec: LeafSpec, config: ModelConfig) -> int:
    """Multiply-accumulates of one token in one layer of a leaf, 0 for what is no matrix product."""
    inner = spec.shape[1:] if spec.stack is not None else spec.shape
    if spec.stack is None or len(inner) < 2 or "stream" in spec.axes:
        return 0
    if "expert" in spec.axes:
        return config.num_experts_per_tok * math.prod(inner[1:])
    return math.prod(inner)


def _share(spec: LeafSpec, layers: range) -> int:
    return sum(layer in layers for layer in spec.stack or ())


def _boundary_parameters(config: ModelConfig) -> int:
    """What the first decoder layer computes for a row that the decoder skips: mix, window KV, main KV, index key."""
    boundary = replay_boundary(config)
    kept = ("hc_attn.fn", "attention.wkv", "compressor.wkv", "indexer.wk")
    here = range(boundary, boundary + 1)
    return sum(_active(spec, config) * _share(spec, here) for spec in schema(config) if spec.path in kept)


def _attention_flops(config: ModelConfig, keys: int) -> int:
    """Scores and values of one query over `keys` keys in all heads."""
    return 4 * config.num_attention_heads * config.head_dim * keys


def _scan_flops(config: ModelConfig, entries: int) -> int:
    """Index scores of one query over `entries` entries: dot products, then relu, weight and sum of each head."""
    return (2 * config.index_n_heads * config.index_head_dim + 3 * config.index_n_heads) * entries


def _capped_sum(count: int, *, ratio: int, cap: int) -> int:
    """Sum over n = 1..count of min(n // ratio, cap)."""
    free = min(count, ratio * cap - 1)  # numbers before the cap holds
    whole = free // ratio
    return ratio * whole * (whole - 1) // 2 + whole * (free - whole * ratio + 1) + cap * (count - free)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """Keys and entries that the queries of some layers read, added over the positions of a span."""

    window: int
    selected: int
    dense: int
    candidates: int


def _keys(config: ModelConfig, roles: tuple[LayerRole, ...], first: int, last: int) -> _Keys:
    """Sums over contexts of first..last tokens."""

    def span(ratio: int, cap: int) -> int:
        return _capped_sum(last, ratio=ratio, cap=cap) - _capped_sum(first - 1, ratio=ratio, cap=cap)

    pool = config.candidate_topk_blocks * config.candidate_block_size
    scans = [r for r in roles if r.index_ordinal >= 0]
    return _Keys(
        window=len(roles) * span(1, config.sliding_window),
        selected=sum(span(r.ratio, config.index_topk) for r in roles if r.ratio),
        dense=sum(span(r.ratio, last) for r in scans if not r.uses_candidates),
        candidates=sum(span(r.ratio, pool) for r in scans if r.uses_candidates),
    )


def decode_cost(config: ModelConfig, context: int, *, cache: CacheFigures) -> DecodeCost:
    """What one decoded token costs when its request has `context` tokens."""
    keys = _keys(config, layer_roles(config), context, context)
    head = config.vocab_size * config.hidden_size
    linear = 2 * (active_parameters(config, range(config.num_hidden_layers)) + head)
    attention = _attention_flops(config, keys.window + keys.selected)
    dense, candidates = _scan_flops(config, keys.dense), _scan_flops(config, keys.candidates)
    return DecodeCost(
        context=context,
        linear=linear,
        attention=attention,
        dense_scan=dense,
        candidate_scan=candidates,
        total=linear + attention + dense + candidates,
        kv_bytes_read=keys.window * cache.window_row_bytes + keys.selected * cache.main_kv_row_bytes,
        index_bytes_read=(keys.dense + keys.candidates) * cache.index_k_row_bytes,
        bytes_written=config.num_hidden_layers * cache.window_row_bytes + cache.bytes_per_token,
        bytes_held=cache.bytes_per_token * context,
    )


def prefill_cost(config: ModelConfig, prompt_len: int) -> PrefillCost:
    """What one token of a prompt of this length costs on average; the head runs on the last row only."""
    roles = layer_roles(config)
    encoder = tuple(r for r in roles if not r.is_decoder)
    decoder, boundary = roles[len(encoder) :], len(encoder)
    keys = _keys(config, encoder, 1, prompt_len)
    scan = _scan_flops(config, keys.dense + keys.candidates)
    attention = _attention_flops(config, keys.window + keys.selected)
    encoder_flops = 2 * active_parameters(config, range(boundary)) * prompt_len + scan + attention
    decoder_linear = 2 * active_parameters(config, range(boundary, config.num_hidden_layers))
    head = 2 * config.vocab_size * config.hidden_size

    def decoder_flops(rows: int) -> int:
        """The decoder on the last `rows` rows."""
        keys = _keys(config, decoder, prompt_len - rows + 1, prompt_len)
        attention = _attention_flops(config, keys.window + keys.selected)
        return decoder_linear * rows + attention + _scan_flops(config, keys.dense + keys.candidates)

    tail = min(config.sliding_window, prompt_len)
    skipped = 2 * _boundary_parameters(config) * (prompt_len - tail)
    return PrefillCost(
        prompt_len=prompt_len,
        bounded=(encoder_flops + skipped + decoder_flops(tail) + head) / prompt_len,
        full=(encoder_flops + decoder_flops(prompt_len) + head) / prompt_len,
        encoder_scan=scan / prompt_len,
        encoder_attention=attention / prompt_len,
    )


def weight_reads(config: ModelConfig, batch: int) -> WeightReads:
    """Weight bytes of a decode step whose `batch` tokens choose their experts independently and evenly."""
    num_experts = config.n_routed_experts
    distinct = num_experts * (1 - (1 - config.num_experts_per_tok / num_experts) ** batch)
    backbone = engram = 0.0
    for spec in schema(config):
        if spec.path == "embed" or "engram_row" in spec.axes:  # a few rows for each token
            rows = 1 if spec.path == "embed" else config.engram_columns
            read = spec.num_bytes / spec.shape[0] * rows * batch
        else:
            read = spec.num_bytes * (distinct / num_experts if "expert" in spec.axes else 1)
        if spec.path.startswith("engram."):
            engram += 0 if spec.path in DERIVED_LEAVES else read
        else:
            backbone += read
    return WeightReads(
        batch=batch, experts_per_layer=distinct, backbone_bytes=round(backbone), engram_bytes=round(engram)
    )
