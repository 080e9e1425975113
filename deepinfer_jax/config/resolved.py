"""The one resolved configuration of an engine; `args.resolve` makes it."""

import dataclasses
import enum
from typing import Any

from deepinfer_jax.config.forms import Value

# Width of the streams under each numerics policy; `dtype` may only repeat it.
DTYPES = {"float32": ("fp32_noqdq", "fp32"), "bfloat16": ("bf16", "q")}


class EngineType(enum.Enum):
    """What an engine does: everything, prompts only, or completions only."""

    NORMAL = "NORMAL"
    PROMPT = "PROMPT"
    COMPLETION = "COMPLETION"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The one resolved configuration; configs with equal values are equal, whatever the sources.

    None is resolved later: `model` is the embedded one, `numerics` is the checkpoint's, `dtype` is
    that of `numerics`, `batch_invariant` is on for cpu and off elsewhere, `seed` differs for each
    request, `num_kv_tokens` is what memory allows.
    """

    model: str | None
    served_model_name: str
    tokenizer: str | None
    trust_remote_code: bool
    load_format: str
    seed: int | None
    max_model_len: int
    data_parallel_size: int
    context_parallel_size: int
    expert_parallel_size: int
    engram_parallel_size: int
    engine_rank: int
    engine_group_rank: int
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    disable_log_stats: bool
    revision: str | None
    tokenizer_revision: str | None
    stop_preempted_request: bool
    engine_type: EngineType
    chunked_prefill: bool
    ignore_len: int
    tokens_per_block: int
    lookahead_tokens: int
    offline_inference: bool
    mesh_shape: tuple[int, int]
    device: str
    num_kv_tokens: int | None
    dtype: str | None
    tensor_parallel_size: int
    numerics: str | None
    kernels: str
    host_ops: str  # names with commas between them
    ascend_mode: str
    batch_invariant: bool | None
    jit_cache_dir: str | None
    engram_pad_token: int
    engram_on_device: bool
    enforce_eager: bool
    num_draft_tokens: int
    spec_mode: str
    varlen_verification: bool
    confidence_temperatures: float | tuple[float, ...]  # one, or one for each draft
    decode_cost_cache_dir: str | None
    decode_cost_cache_ttl_s: int
    draft_enforce_eager: bool
    draft_bucket_interval: int  # requests
    max_backtracking_tokens: int
    replay_mode: str
    replay_keep_tokens: int
    prefix_cache: str
    prefill_max_key_tokens: int  # summed over the requests of one step
    index_attn_memory_limit: int  # bytes
    decode_bucket_interval: int  # rows
    state_slots_ratio: float  # slots for each of max_num_seqs
    store_extra_state: bool
    store_extra_tokens: int
    prefill_attempt_interval: int  # decode steps, as in the next line
    prefill_any_attempt_interval: int
    async_scheduling: bool
    logging_interval_steps: int
    gc_interval_step: int
    sync_guard_disabled: bool
    profile_http_enable: bool
    profile_http_port_base: int
    trace_dir: str
    memory_profile_path: str | None
    memory_tracing: bool
    sum_smaller_probs: bool
    sampler_force_topk: int
    token_blacklist: str
    xgrammar_debug: bool
    xgrammar_timeout: int  # seconds
    xgrammar_disable_cache: bool
    grammar_cache_bytes: int
    so_builder_cpus: int
    grammar_whitespace: int  # characters
    multi_modal_buffer_size: int  # encoded images
    image_worker_timeout_s: float
    num_extra_experts: int  # of each layer
    eplb_window_steps: int
    eplb_interval_steps: int
    eplb_after_prefill: bool
    moe_balance_interval_steps: int
    force_imbalance_ratio: float
    force_load_balance: bool
    show_eplb_detail: bool
    # (variable, value) of those variables that have no field of their own yet.
    others: tuple[tuple[str, Value], ...]
    # (field or variable, source) in the order of `describe`.
    sources: tuple[tuple[str, str], ...] = dataclasses.field(compare=False, repr=False)

    def __post_init__(self) -> None:
        cp, dp = self.context_parallel_size, self.data_parallel_size
        if self.mesh_shape != (dp, cp):
            raise ValueError(
                f"mesh_shape={self.mesh_shape} contradicts data_parallel_size={dp} and "
                f"context_parallel_size={cp}; give one of the two"
            )
        if self.expert_parallel_size != dp * cp:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} is not "
                f"data_parallel_size * context_parallel_size = {dp * cp}; leave it out"
            )
        if self.engram_parallel_size != dp * cp:
            raise ValueError(
                f"engram_parallel_size={self.engram_parallel_size} is not "
                f"data_parallel_size * context_parallel_size = {dp * cp}; leave it out"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_model_len={self.max_model_len}; raise it or set chunked_prefill=True"
            )
        if self.dtype and self.numerics and self.numerics not in DTYPES[self.dtype]:
            raise ValueError(
                f"dtype={self.dtype!r} contradicts numerics={self.numerics!r}; leave dtype out or "
                f"choose numerics from {', '.join(DTYPES[self.dtype])}"
            )
        if self.replay_mode != "off" and self.replay_keep_tokens == 0:
            raise ValueError(
                f"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE={self.replay_mode} needs a tail length; "
                "set DEEPINFER_YOCO_PREFILL_KEEP_TOKENS (140 is the usual value) or set the mode to off"
            )
        if self.engine_type is EngineType.COMPLETION and not self.stop_preempted_request:
            raise ValueError(
                "engine_type=COMPLETION contradicts stop_preempted_request=False: a completion engine cannot compute "
                "a prompt again; set stop_preempted_request=True"
            )
        if self.engine_type is EngineType.COMPLETION and cp > 1:
            raise ValueError(
                f"engine_type=COMPLETION contradicts context_parallel_size={cp}: context parallelism splits prompts; "
                "leave context_parallel_size out"
            )

    def value(self, name: str) -> Any:
        """The value of a field, or of a `DEEPINFER_*` variable that has none."""
        return dict(self.others)[name] if name in dict(self.others) else getattr(self, name)

    def source(self, name: str) -> str:
        """Where the value of a field or variable came from."""
        return dict(self.sources)[name]

    def describe(self) -> str:
        """A table of every field and variable: name, value, source."""
        rows = [(name, show(self.value(name)), source) for name, source in self.sources]
        rows.insert(0, ("field", "value", "source"))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{n:<{widths[0]}}  {v:<{widths[1]}}  {s}" for n, v, s in rows)


def show(value: object) -> str:
    """A value as tables and messages show it."""
    if isinstance(value, enum.Enum):
        return value.name
    return "unset" if value is None else "(empty)" if value == "" else str(value)
