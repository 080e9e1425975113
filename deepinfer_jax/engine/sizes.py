"""How large an engine is: rows of a step, slots, pages, and the memory that they take."""

import dataclasses
import os
from typing import Any

from deepinfer_jax.config.args import DEFAULT, EngineConfig
from deepinfer_jax.engine.buckets import Buckets, make_buckets, prefill_limit
from deepinfer_jax.engine.costs import CacheFigures, cache_figures
from deepinfer_jax.engine.drafting import Speculation
from deepinfer_jax.engine.image_table import table_bytes
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.parallel.processes import Agreement
from deepinfer_jax.scheduler.policy import SchedulerConfig

MAX_SNAPSHOTS = 64  # state slots that the prefix cache may hold
SNAPSHOT_INTERVAL = 512  # tokens between the regular snapshots of a prompt, or a prefill step where that has more
MAX_LEN_SHARE = 0.8  # of the main-KV capacity that one request may need (spec: interface 6)
IMAGE_TABLE_BYTES = 2**28  # that encoded images may take, unless one alone takes more
STEP_SHARE = 0.25  # of the free memory that is left to the steps themselves


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Sizes that follow from a configuration and a model; bytes are those of the caches."""

    scheduler: SchedulerConfig
    buckets: Buckets
    cache: CacheFigures
    num_image_places: int  # encoded images that are kept; 0 for a model without vision weights

    @property
    def num_state_slots(self) -> int:
        """Slots of requests and of snapshots."""
        return self.scheduler.num_slots + self.scheduler.num_snapshots

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages: main KV and index K."""
        return round(self.scheduler.num_pages * self.scheduler.page_tokens * self.cache.bytes_per_token)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all state slots: rings, compressor tails and history."""
        return self.num_state_slots * self.cache.bytes_per_request


def engine_sizes(config: EngineConfig, model: LoadedModel) -> EngineSizes:
    """The sizes of an engine. Raises ValueError for a model length, or a workspace, that does not fit."""
    runtime, max_model_len = model.runtime, model.max_model_len
    cache = cache_figures(runtime)
    _check_index_workspace(config, model)
    max_rows = prefill_limit(config.max_num_batched_tokens, is_chunked=config.chunked_prefill, target=runtime.target)
    num_image_places = _num_image_places(config, model)
    if num_image_places:  # an image is never cut
        max_rows = max(max_rows, min(runtime.model.vision.max_image_tokens, config.max_num_batched_tokens))
    max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    is_exact = config.prefix_cache == "exact"
    num_snapshots = min(MAX_SNAPSHOTS, 4 * max_num_seqs) if is_exact else 0
    num_slots = int(max_num_seqs * config.state_slots_ratio) + 1 + num_snapshots
    buckets = make_buckets(
        max_prefill_rows=max_rows,
        max_requests=max_num_seqs,
        max_pages=-(-max_model_len // runtime.page_tokens),
        skips_padding=runtime.is_invariant,
        rows_per_request=_rows_per_request(model.speculation, skips_padding=runtime.is_invariant),
        decode_interval=_decode_interval(config, model.speculation),
    )
    max_decode_rows = 1 + model.speculation.max_drafts
    scheduler = SchedulerConfig(
        num_ranks=runtime.dp,
        num_kv_tokens=_num_kv_tokens(config, model, cache, num_slots=num_slots, max_num_seqs=max_num_seqs),
        page_tokens=runtime.page_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(max_rows, max_num_seqs * max_decode_rows),
        max_decode_rows=max_decode_rows,
        state_slots_ratio=config.state_slots_ratio,
        max_prompts=buckets.prefill_requests,
        max_images=max(1, num_image_places // runtime.dp),
        rollback_tokens=runtime.rollback_tokens,
        is_chunked=config.chunked_prefill,
        prefill_interval=config.prefill_attempt_interval,
        prefill_any_interval=config.prefill_any_attempt_interval,
        prefill_max_key_tokens=config.prefill_max_key_tokens,
        stops_preempted=config.stop_preempted_request,
        prefix_mode=config.prefix_cache,  # type: ignore[arg-type]
        num_snapshots=num_snapshots,
        snapshot_interval=_round_up(max(SNAPSHOT_INTERVAL, max_rows), runtime.page_tokens),
        replay_rows=runtime.model.sliding_window,
        has_tails=runtime.has_replay,
    )
    return EngineSizes(scheduler=scheduler, buckets=buckets, cache=cache, num_image_places=num_image_places)


def _num_image_places(config: EngineConfig, model: LoadedModel) -> int:
    """As many as are wanted, and as memory for them allows, but one at least for each rank: ranks share the table."""
    if model.params.vision is None:
        return 0
    affordable = IMAGE_TABLE_BYTES // table_bytes(model.runtime, 1)
    return max(model.runtime.dp, min(config.multi_modal_buffer_size, affordable))


def _decode_interval(config: EngineConfig, speculation: Speculation) -> int | None:
    """The spacing that was asked for, the larger one where drafts have another; None for few sizes."""
    names = ["decode_bucket_interval", *(["draft_bucket_interval"] if speculation.max_drafts else [])]
    return max((getattr(config, name) for name in names if config.source(name) != DEFAULT), default=None)


def _rows_per_request(speculation: Speculation, *, skips_padding: bool) -> tuple[int, ...]:
    """Rows of a decode step for each of its requests: all drafts, or also fewer where a budget saves padding."""
    most = 1 + speculation.max_drafts
    if skips_padding or not speculation.is_scheduled:
        return (most,)
    return tuple(sorted({1, (most + 1) // 2, most}))


def _num_kv_tokens(
    config: EngineConfig, model: LoadedModel, cache: CacheFigures, *, num_slots: int, max_num_seqs: int
) -> int:
    """The chosen capacity, else what all requests at once can use, as far as memory allows."""
    page, max_model_len = model.runtime.page_tokens, model.max_model_len
    needed = _round_up(int(max_model_len / MAX_LEN_SHARE) + 1, page)
    if config.num_kv_tokens is not None:
        capacity, advice = config.num_kv_tokens, "raise num_kv_tokens"
    else:
        wanted = max(needed, max_num_seqs * _round_up(max_model_len, page))
        free = Agreement("memory").least(_free_bytes(model.device)) * config.gpu_memory_utilization * (1 - STEP_SHARE)
        free -= table_bytes(model.runtime, _num_image_places(config, model))
        room = int((free - num_slots * cache.bytes_per_request) / cache.bytes_per_token)
        capacity, advice = min(wanted, room // page * page), "raise gpu_memory_utilization, lower max_num_seqs"
        if capacity < page:
            raise ValueError(f"there is no memory for one page of {page} tokens beside the model; {advice}")
    if max_model_len > MAX_LEN_SHARE * capacity:
        raise ValueError(
            f"max_model_len={max_model_len} is above {MAX_LEN_SHARE:.0%} of the main-KV capacity of {capacity} tokens; "
            f"{advice}, or lower max_model_len to {int(MAX_LEN_SHARE * capacity)}"
        )
    return capacity


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _free_bytes(device: Any) -> int:
    """Memory that a device has left: its own count, else what the operating system has free."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _check_index_workspace(config: EngineConfig, model: LoadedModel) -> None:
    """Index scores of one tile of rows over the longest context: float32, once in all and once padded."""
    needed = 2 * 4 * model.runtime.row_tile * model.max_model_len
    if needed > config.index_attn_memory_limit:
        raise ValueError(
            f"DEEPINFER_INDEX_ATTN_MEMORY_LIMIT={config.index_attn_memory_limit} bytes is below {needed}, the index "
            f"scores of {model.runtime.row_tile} rows over max_model_len={model.max_model_len} tokens; raise it, or "
            "lower max_model_len"
        )
