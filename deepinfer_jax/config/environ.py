"""Every `DEEPINFER_*` variable in one table, and the only reader of the process environment.

`VARIABLES` holds names, types and defaults (spec: interface 10, 10b); `args.resolve` applies it.
`envs` reads single variables under DeepInfer's names and keeps each value. There an unset variable
has its documented default even while its feature is missing; what is in force is in the config.
"""

import difflib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepinfer_jax.config import forms
from deepinfer_jax.config.forms import BOOL, COUNT, GIB, STEPS, TEXT, Form, Value, choice
from deepinfer_jax.config.runtime import NumericsName

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of Linux, of Linux under Windows
# Features that work. Adding a name here unlocks its variables and arguments; nothing else does.
# Names in use beside these: processes, transport.
LANDED: frozenset[str] = frozenset(
    {
        "model",
        "replay",
        "kernels",
        "engine",
        "sampling",
        "speculation",
        "vision",
        "sharding",
        "balancing",
        "routing studies",
        "host tables",
        "Ascend",
    }
)

PREFIX = "DEEPINFER_"
PROCESS_ENVIRON: Mapping[str, str] = os.environ
DEVICES = ("auto", "cpu", "nvidia", "ascend")


@dataclass(frozen=True)
class Variable:
    """One variable. `kind`: K is ours, A is accelerator-specific, N has no effect, - is refused.

    `field` is its name in the resolved config, by default the variable's own in lower case.
    `off` lists the values that need no feature, the default alone when it is empty; the first is in
    force until `lands_with` is in `LANDED`. `derive` is another variable and the function that
    computes the value in force from (own value, other value).
    """

    name: str
    form: Form
    default: Value | Callable[[], Value]
    lands_with: str
    doc: str
    field: str = ""
    kind: Literal["K", "A", "N", "-"] = "K"
    off: tuple[Value, ...] = ()
    derive: tuple[str, Callable[[Any, Any], Value]] | None = None

    def __post_init__(self) -> None:
        if not self.field:
            stem = self.name.removeprefix(PREFIX).removeprefix("JAX_").lower()
            object.__setattr__(self, "field", stem)

    @property
    def default_value(self) -> Value:
        """What an unset variable means once its feature has landed."""
        return self.default() if callable(self.default) else self.default

    @property
    def off_values(self) -> tuple[Value, ...]:
        """The values that are accepted before the feature lands."""
        return self.off or (self.default_value,)

    @property
    def status(self) -> str:
        """What setting the variable does now."""
        if self.kind in ("N", "-"):
            return "accepted, no effect" if self.kind == "N" else "refused"
        if self.lands_with in LANDED:
            return "works"
        works = ", ".join(str(value) for value in self.off)
        return f"lands with {self.lands_with}" + (f" (now: {works})" if works else "")


def read_variable(variable: Variable, environ: Mapping[str, str]) -> Value:
    """The value that `environ` gives, or the documented default."""
    text = environ.get(variable.name)
    if text is None:
        return variable.default_value
    value = forms.parse_value(variable.name, variable.form, text)
    return variable.default_value if value is None else value


def use_cpu_without_gpu() -> None:
    """Tells JAX, before it starts, that there is no GPU: an installed CUDA plugin would complain about libraries."""
    if not any(os.path.exists(device) for device in GPU_DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def closest_name(name: str) -> str:
    """A hint with the known variable nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def markdown_table() -> str:
    """The table of variables for the documentation."""
    lines = ["| Variable | Type | Default | Meaning | Status |", "|---|---|---|---|---|"]
    for v in VARIABLES.values():
        shown = int(v.default) if isinstance(v.default, bool) else v.default
        default = "unset" if shown is None or shown == "" or callable(shown) else f"`{shown}`"
        lines.append(f"| `{v.name}` | {v.form.kind} | {default} | {v.doc} | {v.status} |")
    return "\n".join(lines) + "\n"


# fmt: off
_TABLE = (
    Variable("DEEPINFER_ACCELERATOR", choice(*DEVICES), "auto", "Ascend",
             "device that runs the model", field="device", off=("auto", "cpu", "nvidia")),
    Variable("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", BOOL, False, "sampling",
             "also return the mass of less likely tokens", field="sum_smaller_probs"),
    Variable("DEEPINFER_JIT_CACHE_DIR", TEXT, None, "model", "root of the compilation cache"),
    Variable("DEEPINFER_NCCL_NUM_SMS", COUNT, 32, "", "SMs for NCCL", kind="N"),
    Variable("DEEPINFER_USERBUFFER_COMM_SMS", COUNT, 0, "", "SMs for DeepEP", kind="N"),
    Variable("DEEPINFER_GLOO_TIMEOUT", STEPS, 14400, "processes",
             "seconds for a CPU collective", field="gloo_timeout_s"),
    Variable("DEEPINFER_REARRANGE_P2P_GROUPS", STEPS, 1, "", "batches of expert moves", kind="N"),
    Variable("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS", COUNT, 0, "balancing",
             "minimum number of spare expert slots", field="num_extra_experts"),
    Variable("DEEPINFER_EXPERT_COUNT_WINDOW_SIZE", STEPS, 100, "balancing",
             "steps of expert statistics", field="eplb_window_steps"),
    Variable("DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL", COUNT, 0, "balancing",
             "steps between expert rearrangements, 0 is off", field="eplb_interval_steps"),
    Variable("DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", BOOL, False, "balancing",
             "rearrange on the step after a prefill", field="eplb_after_prefill"),
    Variable("DEEPINFER_MOE_LB_STAT_INTERVAL", STEPS, 128, "routing studies",
             "steps per balance statistic", field="moe_balance_interval_steps"),
    Variable("DEEPINFER_FORCE_IMBALANCE_RATIO", forms.IMBALANCE, 0.0, "routing studies",
             "benchmark: unbalanced routing, at least 1 when on"),
    Variable("DEEPINFER_FORCE_LOAD_BALANCE", BOOL, False, "routing studies", "benchmark: even routing"),
    Variable("DEEPINFER_SHOW_EPLB_DETAIL", BOOL, False, "routing studies", "table of expert loads"),
    Variable("DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K", STEPS, 2**30, "engine",
             "cap on the summed key lengths of one prefill", field="prefill_max_key_tokens"),
    Variable("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", forms.BYTES, 10 * GIB, "engine",
             "workspace of index attention, sets its chunk size"),
    Variable("DEEPINFER_USE_NEXTN_DECODE", COUNT, 5, "speculation",
             "maximum draft length, 0 is off", field="num_draft_tokens", off=(0,)),
    Variable("DEEPINFER_ENABLE_MTP_VARLEN", BOOL, False, "speculation",
             "confidence-scheduled verification", field="varlen_verification"),
    Variable("DEEPINFER_MAX_BACKTRACKING_TOKENS", COUNT, 0, "speculation",
             "history kept for going back, at least drafts + 1",
             derive=("DEEPINFER_USE_NEXTN_DECODE", lambda value, drafts: max(value, drafts + 1))),
    Variable("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", forms.TEMPERATURES, 1.0, "speculation",
             "temperature of the confidence head, one or one per draft position",
             field="confidence_temperatures"),
    Variable("DEEPINFER_ENGRAM_PAD_TOKEN", COUNT, 2, "model", "pad id for n-gram windows"),
    Variable("DEEPINFER_ENGRAM_FORCE_GPU_STORAGE", BOOL, False, "host tables",
             "Engram tables on the device, not the host; unset: large ones beside a GPU are on the host",
             field="engram_on_device"),
    Variable("DEEPINFER_SAMPLER_FORCE_TOPK", COUNT, 0, "sampling", "sample among the k best only"),
    Variable("DEEPINFER_DECODE_TOKEN_BLACKLIST", forms.RANGES, "", "sampling",
             "ids never emitted, as in `0..3,7,10..12`, strictly rising", field="token_blacklist"),
    Variable("DEEPINFER_ENFORCE_EAGER", BOOL, False, "model", "no decode buckets compiled ahead"),
    Variable("DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL", STEPS, 8, "engine",
             "spacing of decode buckets", field="decode_bucket_interval"),
    Variable("DEEPINFER_DFLASH_ENFORCE_EAGER", BOOL, False, "speculation",
             "where tokens are drafted, no steps compiled ahead", field="draft_enforce_eager"),
    Variable("DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL", STEPS, 8, "speculation",
             "where tokens are drafted, spacing of decode buckets", field="draft_bucket_interval"),
    Variable("DEEPINFER_DECODE_PERF_CACHE_DIR", TEXT, None, "speculation",
             "cache for the decode performance curve", field="decode_cost_cache_dir"),
    Variable("DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", COUNT, 3600, "speculation",
             "seconds for which a cached curve is valid", field="decode_cost_cache_ttl_s"),
    Variable("DEEPINFER_NUM_STATE_SLOTS_RATIO", forms.RATIO, 1.2, "engine",
             "state slots per sequence slot", field="state_slots_ratio"),
    Variable("DEEPINFER_PREFILL_STORE_EXTRA_STATE", BOOL, False, "engine",
             "keep window state for later turns", field="store_extra_state"),
    Variable("DEEPINFER_PREFILL_STORE_EXTRA_SIZE", STEPS, 128, "engine",
             "tokens of extra window state", field="store_extra_tokens"),
    Variable("DEEPINFER_XGRAMMAR_DEBUG", BOOL, False, "sampling", "verbose grammar matcher"),
    Variable("DEEPINFER_XGRAMMAR_TIMEOUT", STEPS, 20, "sampling", "seconds to compile a grammar"),
    Variable("DEEPINFER_XGRAMMAR_DISABLE_CACHE", BOOL, False, "sampling", "no grammar cache"),
    Variable("DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES", forms.ANY_INT, 10 * GIB, "sampling",
             "cap of the grammar cache, 0 or less is unlimited", field="grammar_cache_bytes"),
    Variable("DEEPINFER_SO_BUILDER_CPUS", STEPS, 4, "sampling", "CPUs for grammar builders"),
    Variable("DEEPINFER_PREFILL_ATTEMPT_INTERVAL", STEPS, 70, "engine",
             "decode steps between prefills when all ranks have work"),
    Variable("DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL", STEPS, 100, "engine",
             "decode steps between prefills when any rank has work"),
    Variable("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", BOOL, False, "engine",
             "launch a step before the last one is read; NORMAL and COMPLETION engines turn it on unless it is set",
             field="async_scheduling"),
    Variable("DEEPINFER_LOGGING_INTERVAL_STEP", STEPS, 100, "engine",
             "steps between lines of statistics", field="logging_interval_steps"),
    Variable("DEEPINFER_NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", STEPS, 1000, "",
             "steps between NCCL memory samples", field="nccl_memory_interval_steps", kind="N"),
    Variable("DEEPINFER_RINGBUFFER_WARNING_INTERVAL", COUNT, 60, "",
             "seconds before a shared-memory broadcast warning", kind="N"),
    Variable("DEEPINFER_GC_INTERVAL_STEP", STEPS, 1000, "engine", "steps between Python GCs"),
    Variable("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", choice("off", "mask", "compact"), "off",
             "replay", "bounded replay of the decoder half in prefill", field="replay_mode"),
    Variable("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", COUNT, 0, "replay",
             "last prompt tokens that bounded replay keeps", field="replay_keep_tokens"),
    Variable("DEEPINFER_BATCH_INVARIANT", BOOL, None, "model",
             "tokens do not depend on the batch; unset: on for cpu, off elsewhere"),
    Variable("DEEPINFER_DISABLE_SYNC_GUARD", BOOL, False, "engine",
             "allow device synchronisation during launch", field="sync_guard_disabled"),
    Variable("DEEPINFER_PROFILE_TORCH_CUDA_MEMORY", TEXT, None, "engine",
             "memory profile output", field="memory_profile_path", kind="A"),
    Variable("DEEPINFER_ENABLE_MEMORY_TRACING", BOOL, False, "engine",
             "memory trace on rank 0", field="memory_tracing", kind="A"),
    Variable("DEEPINFER_PROFILE_HTTP_ENABLE", BOOL, False, "engine", "profiling endpoint"),
    Variable("DEEPINFER_PROFILE_HTTP_PORT_BASE", forms.PORT, 6070, "engine",
             "port of the profiling endpoint, plus the device id"),
    Variable("DEEPINFER_TORCH_PROFILER_DIR", TEXT, tempfile.gettempdir, "engine",
             "trace output; unset: the system temp directory", field="trace_dir", kind="A"),
    Variable("DEEPINFER_USE_MULTIMODAL_POOL", BOOL, False, "", "pinned image pool", kind="N"),
    Variable("DEEPINFER_MULTIMODAL_POOL_SIZE_GB", COUNT, 8, "",
             "size of the image pool per rank", field="multimodal_pool_gb", kind="N"),
    Variable("DEEPINFER_MULTI_MODAL_BUFFER_SIZE", STEPS, 512, "vision",
             "encoded images that the device keeps, if 256 MiB hold as many"),
    Variable("DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT", forms.SECONDS, 1800.0, "vision",
             "seconds before an image that is being decoded counts as hung", field="image_worker_timeout_s"),
    Variable("DEEPINFER_HF_MODEL_DIR", TEXT, None, "model",
             "checkpoint to use when no model is given", field="model"),
    Variable("DEEPINFER_CPP_LOG_LEVEL", TEXT, None, "", "C++ log level", kind="N"),
    Variable("DEEPINFER_FUSED_SAMPLE_STRESS_TEST", forms.ANY_INT, 1, "", "a DeepInfer test", kind="-"),
    Variable("DEEPINFER_FUSED_SAMPLE_DETAIL_LOG", TEXT, None, "", "a DeepInfer test", kind="-"),
    Variable("DEEPINFER_JAX_KERNELS", forms.KERNELS, "auto", "kernels",
             "reference, auto, or one implementation for all ops", off=("auto", "reference")),
    Variable("DEEPINFER_JAX_NUMERICS", choice(*get_args(NumericsName)), None, "model",
             "arithmetic; unset: from the checkpoint"),
    Variable("DEEPINFER_JAX_PREFIX_CACHE", choice("off", "exact", "replay"), "exact", "engine",
             "reuse of computed prompt prefixes: off, exact, or replay (approximate)"),
    Variable("DEEPINFER_JAX_SPEC_MODE", choice("match", "rejection", "block"), "match",
             "speculation", "rule that accepts a draft"),
    Variable("DEEPINFER_JAX_GRAMMAR_WHITESPACE", COUNT, 8, "sampling",
             "longest whitespace run that a grammar allows"),
    Variable("DEEPINFER_JAX_ASCEND_SIM", BOOL, False, "Ascend", "use the Ascend simulator"),
    Variable("DEEPINFER_JAX_ASCEND_MODE", choice("staged", "resident"), "resident", "Ascend",
             "weights of an Ascend device: copied for each call, or kept there"),
    Variable("DEEPINFER_JAX_ASCEND_HOST_OPS", TEXT, "", "Ascend",
             "ops that the host may compute for an Ascend device, with commas; `missing`: all without an operator",
             field="host_ops"),
    Variable("DEEPINFER_JAX_ASCEND_ARENA", forms.BYTES, 64 * 2**20, "Ascend",
             "memory of an Ascend device for workspaces and temporaries of a step", field="ascend_arena_bytes"),
    Variable("DEEPINFER_JAX_ASCEND_LIBDIR", TEXT, None, "Ascend", "CANN's library folder"),
    Variable("DEEPINFER_JAX_ASCEND_ACCEPT_VERSION", TEXT, None, "Ascend",
             "CANN version to accept outside the tested range"),
    Variable("DEEPINFER_JAX_ASCEND_SYNC_TIMEOUT_MS", STEPS, 600000, "Ascend",
             "milliseconds for a stream synchronisation"),
    Variable("DEEPINFER_JAX_ASCEND_BLOCKING", BOOL, False, "Ascend", "wait after each operator"),
    Variable("DEEPINFER_JAX_ASCEND_DETERMINISM", forms.LEVEL, None, "Ascend",
             "determinism level of CANN; unset: CANN's own"),
    Variable("DEEPINFER_JAX_SIM_FAULTS", TEXT, None, "Ascend", "fault plan of the simulator, JSON"),
)
# fmt: on
VARIABLES: dict[str, Variable] = {variable.name: variable for variable in _TABLE}


class Envs:
    """Values by variable name (`envs.DEEPINFER_BATCH_INVARIANT`), fixed from use to `rearm`."""

    __slots__ = ("_environ", "_values")

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[str, Value] = {}

    def __getattr__(self, name: str) -> Any:
        variable = VARIABLES.get(name)
        if variable is None:
            raise AttributeError(f"envs has no variable {name}{closest_name(name)}")
        if name not in self._values:
            value = read_variable(variable, self._environ)
            if variable.derive is not None:
                other, function = variable.derive
                value = function(value, getattr(self, other))
            self._values[name] = value
        return self._values[name]

    def __dir__(self) -> list[str]:
        return [*VARIABLES, "rearm", "rearm_all"]

    def rearm(self, name: str) -> None:
        """Forgets the value of one variable, so that its next use reads the environment."""
        if name not in VARIABLES:
            raise ValueError(f"{name} is not a variable{closest_name(name)}")
        self._values.pop(name, None)

    def rearm_all(self) -> None:
        """Forgets every value."""
        self._values.clear()


envs = Envs(PROCESS_ENVIRON)
