"""Bytes of the caches by the specification's formula, worked out from the numbers of a shape (spec: backbone 9)."""

from deepinfer_jax.config.runtime import RuntimeConfig


def cache_bytes(config: RuntimeConfig, *, num_pages: int, num_slots: int) -> tuple[int, int]:
    """Bytes of so many pages, main KV and index K, and of so many state slots: rings, compressor tails, history.

    FP4 rows have a scale byte for every 16 (main KV) and 32 (index K) channels, FP8 window rows one for every 32.
    """
    model = config.model
    row = model.head_dim // 2 + model.head_dim // 16 + model.index_head_dim // 2 + model.index_head_dim // 32
    ratios = [model.compress_ratios[layer] for layer in model.kv_source_layer_ids]
    paged = sum(num_pages * config.page_tokens // ratio * row for ratio in ratios)
    window = model.num_hidden_layers * config.ring_len * (model.head_dim + model.head_dim // 32)
    tails = ratios.count(2) * config.tail_len * 2 * model.head_dim * 4
    return paged, num_slots * (window + tails + config.history_len * 4)
