"""The numbers that decide who runs next, and those that tell what happened."""

import dataclasses
from typing import Literal

PrefixMode = Literal["off", "exact", "replay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policy. All sizes are those of one data-parallel rank.

    Raises ValueError for combinations with which a request could wait for ever, naming the fields.
    """

    num_kv_tokens: int  # main-KV capacity in tokens; whole pages of it are used
    page_tokens: int
    max_num_seqs: int  # requests that hold a state slot
    max_model_len: int  # tokens of prompt and output that the caches hold
    max_num_batched_tokens: int  # rows of one step
    num_ranks: int = 1
    state_slots_ratio: float = 1.2  # state slots for each of max_num_seqs; the surplus covers the quarantine
    max_prompts: int = 2**30  # prompts in one prefill step
    max_images: int = 2**30  # images in one prefill step
    max_decode_rows: int = 1  # rows of one request in a decode step: 1 and the drafts to verify
    rollback_tokens: int = 6  # positions that a state may be ahead of a fork that takes it over
    # chunk ends are multiples of it (context parallelism), except a prompt's last and those next to an image
    chunk_multiple: int = 1
    is_chunked: bool = True  # False keeps each prompt in one step
    prefill_interval: int = 70  # decode steps between prefills when all ranks have prompts
    prefill_any_interval: int = 100  # the same when only some have
    prefill_max_key_tokens: int = 2**30  # cap on the summed key lengths of one prefill; its first chunk is exempt
    stops_preempted: bool = False  # True ends a preempted request, False computes it again
    has_tails: bool = False  # bounded replay: known prefixes are taken over up to a request's tail start only
    prefix_mode: PrefixMode = "off"  # how known prefixes are taken over, see prefix.py
    num_snapshots: int = 0  # state slots behind those of the requests, for prefix_mode="exact"
    snapshot_interval: int = 512  # a prompt is cut and kept at multiples of it; whole pages
    replay_rows: int = 0  # prefix_mode="replay": known positions that are computed again to fill the rings

    def __post_init__(self) -> None:
        counts = (
            "page_tokens",
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "num_ranks",
            "max_prompts",
            "max_images",
            "max_decode_rows",
            "chunk_multiple",
            "prefill_interval",
            "prefill_any_interval",
            "prefill_max_key_tokens",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_kv_tokens < self.page_tokens:
            raise ValueError(
                f"num_kv_tokens={self.num_kv_tokens} is less than one page of {self.page_tokens} tokens; raise it"
            )
        if self.state_slots_ratio < 1:
            raise ValueError(f"state_slots_ratio={self.state_slots_ratio} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs * self.max_decode_rows:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs} * "
                f"max_decode_rows={self.max_decode_rows}: a decode step could not serve every request; raise it"
            )
        if self.max_num_batched_tokens < self.chunk_multiple:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below chunk_multiple="
                f"{self.chunk_multiple}: no chunk would fit; raise it"
            )
        if not self.is_chunked and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len={self.max_model_len}; "
                "raise it or allow chunks"
            )
        self._check_prefix()

    def _check_prefix(self) -> None:
        for name in ("num_snapshots", "replay_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.prefix_mode == "off":
            return
        if self.snapshot_interval < 1 or self.snapshot_interval % self.page_tokens:
            raise ValueError(
                f"snapshot_interval={self.snapshot_interval} must be a multiple of page_tokens={self.page_tokens}"
            )
        if self.prefix_mode == "exact" and self.num_snapshots == 0:
            raise ValueError(
                'prefix_mode="exact" keeps nothing with num_snapshots=0; raise it or set the mode to "off"'
            )

    @property
    def num_pages(self) -> int:
        """Pages of the paged caches."""
        return self.num_kv_tokens // self.page_tokens

    @property
    def num_slots(self) -> int:
        """State slots of requests."""
        return int(self.max_num_seqs * self.state_slots_ratio) + 1

    @property
    def num_slots_with_snapshots(self) -> int:
        """State slots of the device arrays: those of requests, then those of snapshots."""
        return self.num_slots + self.num_snapshots

    @property
    def checkpoint_interval(self) -> int:
        """Every prompt is cut at multiples of it; 0 if none is."""
        return 0 if self.prefix_mode == "off" else self.snapshot_interval

    @property
    def max_pages(self) -> int:
        """Columns of a page table."""
        return self.pages_of(self.max_model_len)

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a prompt of this many tokens can ever run."""
        return num_tokens <= self.max_model_len and self.pages_of(num_tokens) <= self.num_pages


@dataclasses.dataclass
class Counters:
    """What happened since the start, on all ranks."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_rows: int = 0  # without padding
    decode_rows: int = 0
    tokens_committed: int = 0
    results_dropped: int = 0  # chunks whose request had ended or was preempted
    preemptions: int = 0
    forks_copied: int = 0  # took over their parent's state
    forks_queued: int = 0  # have to compute their parent's tokens again
    adopted: int = 0  # took over a state that the caller writes
    adoptions_queued: int = 0  # have to compute those tokens again
    ended: int = 0
    prefix_lookups: int = 0  # requests that were admitted while prefixes are kept
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0  # positions that were not computed again
    snapshots_saved: int = 0
    snapshots_evicted: int = 0


@dataclasses.dataclass(frozen=True)
class Gauges:
    """How things stand now, on all ranks."""

    num_snapshots: int
    pages_cached: int  # held by the prefix cache only: as good as free
    pages_used: int  # held by requests
