"""Engine arguments, and their merge with the environment into one frozen `EngineConfig`.

An explicit argument beats the environment, and that beats the default. What would turn on a feature
that is not in `environ.LANDED` is refused with NotImplementedError; unset is off until it is there.
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from deepinfer_jax.config import environ as variables
from deepinfer_jax.config.forms import Value, parse_value
from deepinfer_jax.config.resolved import DTYPES, EngineConfig, EngineType, show
from deepinfer_jax.config.runtime import RuntimeConfig

DEFAULT = "default"
ARGUMENT = "argument"
SIZES = "derived from the other sizes"
DEFAULT_MODEL_LEN = 4096  # tokens
LOAD_FORMATS = ("auto", "dummy")
_TABLE = variables.VARIABLES


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine (spec: interface 6); None means not given.

    Wrong types raise TypeError and values outside their range ValueError, naming the field.
    `model` None is the embedded model. `batch_invariant`, `device`, `host_ops`, `kernels`, `numerics`,
    `num_draft_tokens`, `spec_mode` and `varlen_verification` are the variables of the same meaning.
    The mesh is (data parallel, context parallel). Prompts of more than `ignore_len` tokens end as too
    long; `gpu_memory_utilization` is the share of the device's memory for weights and caches, and
    `num_kv_tokens` sets the capacity of the main KV instead.
    """

    model: str | os.PathLike[str] | None = None
    served_model_name: str = "deepinfer-model"
    tokenizer: str | os.PathLike[str] | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    data_parallel_size: int = 0
    context_parallel_size: int = 1
    expert_parallel_size: int | None = None
    engram_parallel_size: int = 0
    engine_rank: int = 0
    engine_group_rank: int = 0
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    disable_log_stats: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    stop_preempted_request: bool = True
    engine_type: EngineType = EngineType.NORMAL
    chunked_prefill: bool = True
    ignore_len: int = 128 * 2**20
    tokens_per_block: int = -1
    lookahead_tokens: int = 0
    offline_inference: bool = False
    mesh_shape: tuple[int, int] | None = None
    device: str | None = None
    num_kv_tokens: int | None = None
    dtype: str | None = None
    tensor_parallel_size: int = 1
    numerics: str | None = None
    kernels: str | None = None
    batch_invariant: bool | None = None
    num_draft_tokens: int | None = None
    spec_mode: str | None = None
    varlen_verification: bool | None = None
    host_ops: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, (kind, minimum) in _CHECKS.items():
            _check_field(name, getattr(self, name), kind, minimum)
        _check_values(self)


_OPTIONAL = frozenset(f.name for f in dataclasses.fields(EngineArgs) if f.default is None)
# Field -> (type, least value or None).
_CHECKS: dict[str, tuple[type, int | None]] = {
    **dict.fromkeys(("model", "served_model_name", "tokenizer", "load_format"), (str, None)),
    **dict.fromkeys(("revision", "tokenizer_revision", "dtype"), (str, None)),
    **dict.fromkeys(("device", "numerics", "kernels", "host_ops", "spec_mode"), (str, None)),
    **dict.fromkeys(("trust_remote_code", "disable_log_stats", "chunked_prefill"), (bool, None)),
    **dict.fromkeys(("stop_preempted_request", "offline_inference"), (bool, None)),
    **dict.fromkeys(("batch_invariant", "varlen_verification"), (bool, None)),
    "engine_type": (EngineType, None),
    "seed": (int, None),
    "tokens_per_block": (int, -1),
    **dict.fromkeys(("data_parallel_size", "engram_parallel_size"), (int, 0)),
    **dict.fromkeys(("engine_rank", "engine_group_rank", "lookahead_tokens", "num_draft_tokens"), (int, 0)),
    **dict.fromkeys(("context_parallel_size", "expert_parallel_size"), (int, 1)),
    **dict.fromkeys(("tensor_parallel_size", "max_model_len", "max_num_seqs"), (int, 1)),
    **dict.fromkeys(("max_num_batched_tokens", "ignore_len", "num_kv_tokens"), (int, 1)),
}


def _check_field(name: str, value: object, kind: type, minimum: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; give one of type {kind.__name__}")
    if kind is str and not value:
        raise ValueError(f"{name} is an empty string; give a value or leave {name} out")
    if isinstance(value, int) and minimum is not None and value < minimum:
        raise ValueError(f"{name}={value} is below {minimum}; raise {name}")


def _check_values(args: EngineArgs) -> None:
    share = args.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"gpu_memory_utilization={share!r} is not a number; give a share of memory")
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization={share} is outside (0, 1]; give a share")
    shape = args.mesh_shape
    if shape is not None and not (
        isinstance(shape, tuple) and len(shape) == 2 and all(type(size) is int and size >= 1 for size in shape)
    ):
        raise ValueError(f"mesh_shape={shape!r} is not a pair of sizes >= 1; give (dp, cp)")
    _check_choice("load_format", args.load_format, LOAD_FORMATS)
    _check_choice("dtype", args.dtype, tuple(DTYPES))
    for name, variable in _SHARED.items():
        text = getattr(args, name)
        if isinstance(text, str) and name != "model":
            object.__setattr__(args, name, parse_value(name, variable.form, text))
    if args.trust_remote_code:
        raise ValueError(
            "trust_remote_code=True is refused: code from a model directory is never executed; "
            "leave trust_remote_code out"
        )
    if args.tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={args.tensor_parallel_size} is refused: attention is data "
            "parallel and experts are expert parallel; leave tensor_parallel_size out"
        )
    page_tokens = RuntimeConfig.page_tokens
    if args.tokens_per_block not in (-1, page_tokens):
        raise ValueError(
            f"tokens_per_block={args.tokens_per_block} is not the page size of {page_tokens} tokens; "
            "leave tokens_per_block out"
        )
    if args.lookahead_tokens != 0:
        raise ValueError(
            f"lookahead_tokens={args.lookahead_tokens} is refused: drafts reserve their own room; leave "
            "lookahead_tokens out, and set DEEPINFER_USE_NEXTN_DECODE for the number of drafts"
        )


def _check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


# Arguments that are variables too: field -> the variable that an explicit argument beats.
_SHARED = {v.field: v for v in _TABLE.values() if v.field in EngineArgs.__dataclass_fields__}
# Field -> (feature, values that do not need it).
_NEEDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "data_parallel_size": ("sharding", (0, 1)),
    "context_parallel_size": ("sharding", (1,)),
    "expert_parallel_size": ("sharding", (None, 1)),
    "engram_parallel_size": ("sharding", (0, 1)),
    "engine_rank": ("processes", (0,)),
    "engine_group_rank": ("processes", (0,)),
    "engine_type": ("transport", (EngineType.NORMAL,)),
    "mesh_shape": ("sharding", (None, (1, 1))),
    **{v.field: (v.lands_with, (None, *v.off_values)) for v in _SHARED.values()},
}
# Feature -> what to do without it, where that is not plain.
_WITHOUT = {
    "transport": "prefill/decode separation has no transport yet: use NORMAL and the snapshot calls of LLMEngine",
}


def resolve(args: EngineArgs, environ: Mapping[str, str] = variables.PROCESS_ENVIRON) -> EngineConfig:
    """The configuration of `args` under `environ`, every value with its source.

    Raises ValueError for a malformed variable or contradictory values, NotImplementedError for what
    needs a missing feature. Warns once about each unknown or ineffective variable.
    """
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    for name, (feature, accepted) in _NEEDS.items():
        _require(name, given[name], feature, accepted)
    beaten = {name for name in _SHARED if given[name] is not None}
    found = _resolve_variables(environ, beaten)
    values: dict[str, Any] = {_TABLE[name].field: value for name, (value, _) in found.items()}
    sources = {_TABLE[name].field: source for name, (_, source) in found.items()}
    for field in dataclasses.fields(args):
        if field.name in _SHARED and field.name not in beaten:
            continue
        values[field.name] = given[field.name]
        sources[field.name] = DEFAULT if given[field.name] == field.default else ARGUMENT
    _derive(values, sources)
    names = [f.name for f in dataclasses.fields(EngineConfig) if f.name in values]
    others = [name for name in found if _TABLE[name].field not in names]
    return EngineConfig(
        **{name: values[name] for name in names},
        others=tuple((name, found[name][0]) for name in others),
        sources=(
            *((name, sources[name]) for name in names),
            *((name, found[name][1]) for name in others),
        ),
    )


def _resolve_variables(environ: Mapping[str, str], beaten: Collection[str]) -> dict[str, tuple[Value, str]]:
    """(value, source) by variable; those of a `beaten` field may name a missing feature."""
    for name in environ:
        if name.startswith(variables.PREFIX) and name not in _TABLE:
            _warn_once(f"{name} is not a variable of deepinfer_jax{variables.closest_name(name)}")
    found = {
        variable.name: _resolve_variable(variable, environ, variable.field in beaten) for variable in _TABLE.values()
    }
    for variable in _TABLE.values():
        if variable.derive is not None:
            other, function = variable.derive
            own, source = found[variable.name]
            value = function(own, found[other][0])
            found[variable.name] = value, source if value == own else f"derived from {other}"
    return found


def _resolve_variable(variable: variables.Variable, environ: Mapping[str, str], is_beaten: bool) -> tuple[Value, str]:
    name, default = variable.name, variable.default_value
    has_feature = variable.kind in ("N", "-")
    if name not in environ:
        if has_feature or variable.lands_with in variables.LANDED or default in variable.off_values:
            return default, DEFAULT
        return variable.off_values[0], f"derived: {variable.lands_with} has not landed"
    value = variables.read_variable(variable, environ)
    if variable.kind == "N" and value != default:
        _warn_once(f"{name}={value} is accepted and has no effect in deepinfer_jax")
    if variable.kind == "-" and value != default:
        raise ValueError(f"{name}={value} is read only by DeepInfer's own kernel tests; unset it")
    if not has_feature and not is_beaten:
        _require(name, value, variable.lands_with, variable.off_values)
    return value, f"environment variable {name}"


def _require(label: str, value: object, feature: str, accepted: tuple[object, ...]) -> None:
    if feature in variables.LANDED or value in accepted:
        return
    allowed = ", ".join(show(each) for each in accepted)
    advice = f"; {_WITHOUT[feature]}" if feature in _WITHOUT else ""
    raise NotImplementedError(
        f"{label}={show(value)} needs {feature}, which has not landed in this version; "
        f"allowed now: {allowed}; change or unset {label}{advice}"
    )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def _derive(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Fills in what None and 0 stand for (spec: interface 6)."""

    def fill(name: str, value: object, source: str) -> None:
        values[name], sources[name] = value, source

    if values["tokenizer"] is None and values["model"] is not None:
        fill("tokenizer", values["model"], "derived from model")
    model_len = values["max_model_len"] or DEFAULT_MODEL_LEN
    if values["max_model_len"] is None:
        fill("max_model_len", model_len, DEFAULT)
    if values["max_num_batched_tokens"] is None:
        rows = values["max_num_seqs"] * (1 + values["num_draft_tokens"])
        tokens = max(model_len, DEFAULT_MODEL_LEN, rows)
        fill("max_num_batched_tokens", tokens, "derived from max_model_len and max_num_seqs")
    shape, cp = values["mesh_shape"], values["context_parallel_size"]
    if shape is not None and sources["context_parallel_size"] == DEFAULT:
        cp = shape[1]
        fill("context_parallel_size", cp, "derived from mesh_shape")
    if values["data_parallel_size"] == 0:
        dp = shape[0] if shape is not None else max(1, (values["expert_parallel_size"] or 1) // cp)
        fill("data_parallel_size", dp, SIZES)
    ranks = values["data_parallel_size"] * cp
    if shape is None:
        fill("mesh_shape", (values["data_parallel_size"], cp), SIZES)
    if values["expert_parallel_size"] is None:
        fill("expert_parallel_size", ranks, SIZES)
    if values["engram_parallel_size"] == 0:
        fill("engram_parallel_size", ranks, SIZES)
    if values["dtype"] == "float32" and values["numerics"] is None:
        fill("numerics", "fp32", "derived from dtype")
    if values["tokens_per_block"] == -1:
        fill("tokens_per_block", RuntimeConfig.page_tokens, "derived: the page size")
    if sources["async_scheduling"] == DEFAULT:
        is_async = values["engine_type"] in (EngineType.NORMAL, EngineType.COMPLETION)
        fill("async_scheduling", is_async, "derived from engine_type")
