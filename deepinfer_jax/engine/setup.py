"""From a resolved configuration to a model that can run: device, compilation cache, weights, tokenizer."""

import dataclasses
import logging
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.checkpoint.load import TOKENIZER_NAME, LoadFormat, load_model, place_params
from deepinfer_jax.checkpoint.locate import locate_model
from deepinfer_jax.config.args import DEFAULT, EngineConfig
from deepinfer_jax.config.forms import token_ranges
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.places import cache_folder, writable_folder
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import ascend
from deepinfer_jax.engine.balancing import BalancePlan
from deepinfer_jax.engine.drafting import Speculation
from deepinfer_jax.engine.expert_loads import LoadWatch
from deepinfer_jax.engine.kernel_choice import check_kernels, log_choices
from deepinfer_jax.engine.steps import pack_experts
from deepinfer_jax.kernels.ascend import Bridge
from deepinfer_jax.kernels.ascend_coverage import host_ops
from deepinfer_jax.kernels.registry import ASCEND
from deepinfer_jax.model.kernel_weights import for_kernels
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.parts import check_params
from deepinfer_jax.parallel.mesh import make_mesh
from deepinfer_jax.sampling.logits import SampleSettings
from deepinfer_jax.text.tokenizer import Tokenizer, load_tokenizer

RELEASED_NUMERICS = "q"
_log = logging.getLogger(__name__)

# Rows of a tile in batch-invariant mode: a GPU's loops are slow to turn, and its products want more rows.
ROW_TILES = {"cpu": 8, ASCEND: 8, "nvidia": 128}
MAX_DEVICE_TABLE_BYTES = 1 << 30  # Engram tables that are larger stay on the host, if nobody says where
MIN_ROLLBACK_TOKENS = 6  # the rings' size in every engine, so that drafts need no other layout
_PLATFORMS = {"cpu": "cpu", "nvidia": "gpu", ASCEND: "cpu"}
_TARGETS = {"cpu": "cpu", "gpu": "nvidia"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What an engine runs."""

    params: Params
    runtime: RuntimeConfig
    tokenizer: Tokenizer | None
    max_model_len: int  # tokens of prompt and output
    device: Any  # of JAX; the first one of the mesh
    mesh: Mesh | None = None  # None: one device
    speculation: Speculation = Speculation()
    balance: BalancePlan | None = None  # None: experts stay where they are
    watch: LoadWatch | None = None  # None: no statistics of the experts


def load_engine_model(config: EngineConfig, own_params: Params | None = None) -> LoadedModel:
    """The model, tokenizer and device of a configuration. Raises ValueError for whatever does not fit.

    own_params: in place of those of the model's files; see `LLMEngine`.
    """
    device, target = choose_device(config.device)
    mesh = make_engine_mesh(config, device)
    _check_processes(config)
    if target != ASCEND:
        check_kernels(config, device, target=target)
    keep_compiled_programs(config.jit_cache_dir)
    location = locate_configured(config)
    bridge = open_ascend(config, load_config(location)) if target == ASCEND else None
    load_format: LoadFormat = "dummy" if config.load_format == "dummy" else "auto"
    on_host = tables_on_host(config, load_config(location), target=target)
    spare_experts = config.num_extra_experts if mesh is not None else 0
    with jax.default_device(device):
        if own_params is None:
            params, model = load_model(
                location,
                mesh=mesh,
                load_format=load_format,
                seed=config.seed or 0,
                with_draft=config.num_draft_tokens > 0,
                with_vision=bridge is None,
                spare_experts=spare_experts,
                engram_on_host=on_host,
            )
        else:
            model = load_config(location)
            check_params(own_params, model, with_draft=config.num_draft_tokens > 0)
            own_params = own_params if bridge is None else dataclasses.replace(own_params, vision=None)
            params = place_params(own_params, model, mesh=mesh, spare_experts=spare_experts, engram_on_host=on_host)
    if config.source("engram_pad_token") != DEFAULT:
        model = dataclasses.replace(model, engram_pad_token_id=config.engram_pad_token)
    speculation, balance = make_speculation(config, model), make_balance_plan(config, params)
    runtime = make_runtime(config, model, target=target, max_drafts=speculation.max_drafts)
    if runtime.is_repeatable:
        _log.warning(
            "batch-invariant mode on %s is experimental: run deepinfer-jax determinism to see whether it holds there",
            device.device_kind,
        )
    if bridge is not None:
        params = ascend.place_params(params, runtime, bridge, mode=config.ascend_mode)
    else:
        decode_rows = config.max_num_seqs * (1 + speculation.max_drafts)
        log_choices(runtime, decode_rows=decode_rows, prefill_rows=config.max_num_batched_tokens)
        params = for_kernels(params, config=runtime, pack=pack_experts)
    return LoadedModel(
        params=params,
        runtime=dataclasses.replace(runtime, engram_on_host=on_host),
        tokenizer=find_tokenizer(config, location, model),
        max_model_len=context_limit(config, model),
        device=device,
        mesh=mesh,
        speculation=speculation,
        balance=balance,
        watch=make_watch(config),
    )


def open_ascend(config: EngineConfig, model: ModelConfig) -> Bridge:
    """The bridge to an Ascend device, once it is known that the model can run there; see `engine/ascend.py`."""
    speculation = make_speculation(config, model)
    ascend.check_step(config, make_runtime(config, model, target=ASCEND), speculation)
    bridge = ascend.join_bridge(config)
    ascend.check_invariance(config, bridge)
    return bridge


def _check_processes(config: EngineConfig) -> None:
    """Raises ValueError for what several processes cannot agree on."""
    count = jax.process_count()
    if count == 1:
        return
    if config.seed is None:
        raise ValueError(f"{count} processes need one seed for requests without their own; give seed")
    if config.mesh_shape[0] * config.mesh_shape[1] < jax.device_count():
        raise ValueError(
            f"mesh_shape={config.mesh_shape} leaves some of the {jax.device_count()} devices of {count} processes "
            "out; give a mesh that has them all"
        )


def make_balance_plan(config: EngineConfig, params: Params) -> BalancePlan | None:
    """When and over what experts are balanced. Raises ValueError where there is one device, or a bad window."""
    num_shards = config.mesh_shape[0] * config.mesh_shape[1]
    if not config.eplb_interval_steps:
        return None
    if num_shards == 1:
        raise ValueError(
            f"DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL={config.eplb_interval_steps} needs several devices: one has "
            "all experts; set mesh_shape, or leave the interval at 0"
        )
    return BalancePlan(
        interval=config.eplb_interval_steps,
        window=config.eplb_window_steps,
        num_shards=num_shards,
        places_per_shard=params.moe.experts.w1.payload.shape[1] // num_shards,
        counts_prefill=config.eplb_after_prefill,
    )


def tables_on_host(config: EngineConfig, model: ModelConfig, *, target: str) -> bool:
    """Whether Engram tables are in the memory of the hosts: where asked for, else large ones beside a GPU."""
    if config.source("engram_on_device") != DEFAULT:
        return not config.engram_on_device and bool(model.engram_layer_ids)
    row_bytes = model.engram_head_dim * 33 // 32  # FP8 and a scale for 32 channels
    return target == "nvidia" and sum(model.engram_num_embeddings) * row_bytes > MAX_DEVICE_TABLE_BYTES


def make_engine_mesh(config: EngineConfig, device: Any) -> Mesh | None:
    """The mesh of a configuration on the devices of one kind; None for one device. Raises ValueError for too few."""
    dp, cp = config.mesh_shape
    return None if dp * cp == 1 else make_mesh(dp, cp, devices=jax.devices(device.platform))


def choose_device(name: str) -> tuple[Any, str]:
    """The device that a configuration names, and the target that steps are built for; auto is JAX's first."""
    if name == "auto":
        device = jax.local_devices()[0]
        return device, _TARGETS.get(str(device.platform), str(device.platform))
    platform = _PLATFORMS.get(name, name)  # the host runs the steps of an Ascend device
    try:
        return jax.local_devices(backend=platform)[0], name
    except RuntimeError as error:
        raise ValueError(
            f"device={name!r} is not attached: {error}; choose another device, or install JAX for this one"
        ) from error


def keep_compiled_programs(directory: str | None) -> None:
    """Lets JAX keep compiled programs in `directory`, else where JAX was told to, else in the user's cache folder."""
    if directory is None and jax.config.jax_compilation_cache_dir:
        return
    folder = Path(directory) if directory else cache_folder() / "compiled"
    if not writable_folder(folder):
        if directory:
            raise ValueError(f"DEEPINFER_JIT_CACHE_DIR={directory} takes no files; give a folder that does")
        warnings.warn(
            f"{folder} takes no files: programs are compiled anew in every process; "
            "set DEEPINFER_JIT_CACHE_DIR to a folder that does",
            stacklevel=2,
        )
        return
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX looks for its folder once; a program compiled before this call would have ended the search.
    compilation_cache.reset_cache()


def locate_configured(config: EngineConfig) -> Path:
    """The directory or config file of the configured model, the embedded one when none is named."""
    _check_revision("revision", config.revision, config.model)
    if config.model is None:
        return embedded_model()
    return locate_model(config.model, revision=config.revision, needs_weights=config.load_format != "dummy")


def find_tokenizer(config: EngineConfig, location: Path, model: ModelConfig) -> Tokenizer | None:
    """The named tokenizer, else the model's own; None for a shape without one (random weights)."""
    revision = config.tokenizer_revision
    _check_revision("tokenizer_revision", revision, config.tokenizer)
    if config.tokenizer is not None and (revision is not None or config.tokenizer != config.model):
        named = locate_model(config.tokenizer, revision=revision, needs_weights=False)
        return load_tokenizer(named, config=model)
    is_shape_only = location.is_file() or config.load_format == "dummy"
    if is_shape_only and (location.is_file() or not (location / TOKENIZER_NAME).exists()):
        return None
    return load_tokenizer(location, config=model)


def _check_revision(field: str, revision: str | None, path_or_id: str | None) -> None:
    if revision is not None and (path_or_id is None or Path(path_or_id).expanduser().exists()):
        what = "the embedded model" if path_or_id is None else f"{path_or_id}, a local path,"
        raise ValueError(f"{field}={revision!r} is of no use: {what} has no revisions; leave {field} out")


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest request; a default limit gives way to the model's own, a chosen one must fit."""
    limit = model.max_position_embeddings
    if config.max_model_len > limit and config.source("max_model_len") != DEFAULT:
        raise ValueError(
            f"max_model_len={config.max_model_len} is above max_position_embeddings={limit} of the model; lower it"
        )
    return min(config.max_model_len, limit)


def make_runtime(config: EngineConfig, model: ModelConfig, *, target: str, max_drafts: int = 0) -> RuntimeConfig:
    """The static configuration of every step. Raises NotImplementedError for a promise that the target cannot keep."""
    if config.batch_invariant and target not in ROW_TILES:
        raise NotImplementedError(
            f"batch-invariant mode (DEEPINFER_BATCH_INVARIANT) cannot be promised on {target} in this version: nobody "
            "has compared bits there; unset it, or run on the cpu"
        )
    if config.host_ops and target != ASCEND:
        raise ValueError(
            f"host_ops={config.host_ops!r} says what the host computes for an Ascend device, and the target is "
            f"{target}; leave it out"
        )
    # A state that is kept for later turns may be taken up so many tokens before its end.
    extra = config.store_extra_tokens if config.store_extra_state else 0
    is_invariant = target == "cpu" if config.batch_invariant is None else config.batch_invariant
    return RuntimeConfig(
        model=model,
        numerics=config.numerics or RELEASED_NUMERICS,  # type: ignore[arg-type]
        rollback_tokens=max(MIN_ROLLBACK_TOKENS, config.max_backtracking_tokens, max_drafts + 1, extra),
        is_invariant=is_invariant,
        row_tile=ROW_TILES[target if is_invariant else "cpu"],
        replay_mode=config.replay_mode,  # type: ignore[arg-type]
        replay_keep_tokens=config.replay_keep_tokens,
        kernels=config.kernels,
        target=target,
        host_ops=host_ops(config.host_ops),
        forced_imbalance=forced_imbalance(config),
        counts_experts=make_watch(config) is not None,
        dp=config.mesh_shape[0],
        cp=config.mesh_shape[1],
    )


def forced_imbalance(config: EngineConfig) -> float:
    """How uneven the choice of experts is made for a benchmark; 0: the router chooses. ValueError for two answers."""
    if config.force_load_balance and config.force_imbalance_ratio > 1:
        raise ValueError(
            f"DEEPINFER_FORCE_LOAD_BALANCE=1 contradicts DEEPINFER_FORCE_IMBALANCE_RATIO="
            f"{config.force_imbalance_ratio}; leave one of them out"
        )
    return 1.0 if config.force_load_balance else config.force_imbalance_ratio


def make_watch(config: EngineConfig) -> LoadWatch | None:
    """How the experts' balance is told; None where nobody asked: it costs a count in every layer."""
    is_wanted = config.show_eplb_detail or config.source("moe_balance_interval_steps") != DEFAULT
    if not is_wanted and not config.eplb_interval_steps:
        return None
    return LoadWatch(
        interval=config.moe_balance_interval_steps,
        num_shards=config.mesh_shape[0] * config.mesh_shape[1],
        logs_table=config.show_eplb_detail,
    )


def make_speculation(config: EngineConfig, model: ModelConfig) -> Speculation:
    """How an engine drafts: as many tokens as the checkpoint's block has, unless fewer are wanted.

    Raises ValueError for more, and for temperatures that are neither one nor one for each draft.
    """
    most, wanted = model.dspark_block_size if model.num_nextn_predict_layers else 0, config.num_draft_tokens
    if config.source("num_draft_tokens") != DEFAULT and wanted > most:
        has = f"blocks of {most} drafts" if most else "no draft stages"
        raise ValueError(
            f"DEEPINFER_USE_NEXTN_DECODE={wanted} is above {most}: the model has {has}; lower it, or leave it out"
        )
    count, given = min(most, wanted), config.confidence_temperatures
    temperatures = given if isinstance(given, tuple) else (given,) * count
    if count and len(temperatures) < count:
        raise ValueError(
            f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE has {len(temperatures)} values for {count} drafts; give one "
            "value, or one for each draft"
        )
    return Speculation(
        max_drafts=count,
        rule=config.spec_mode,  # type: ignore[arg-type]
        is_scheduled=config.varlen_verification and count > 0,
        temperatures=temperatures[:count],
    )


def sample_settings(config: EngineConfig, vocab_size: int) -> SampleSettings:
    """What the environment says of every draw. Raises ValueError for a blacklist beyond the vocabulary."""
    blacklist = tuple((ids[0], ids[-1]) for ids in token_ranges(config.token_blacklist))
    if blacklist and blacklist[-1][1] >= vocab_size:
        raise ValueError(
            f"DEEPINFER_DECODE_TOKEN_BLACKLIST names token {blacklist[-1][1]}, and the vocabulary is "
            f"0..{vocab_size - 1}; correct it"
        )
    return SampleSettings(
        blacklist=blacklist, force_top_k=config.sampler_force_topk, computes_smaller=config.sum_smaller_probs
    )
