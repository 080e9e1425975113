"""Recordings of another implementation, read from a directory (layout: the fixtures README of the oracle)."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.shards import read_file
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import NUMERICS

KINDS = ("prefill_full", "prefill_light", "decode", "edge")  # files that `verify` reads, as {kind}_{mode}
OTHER_KINDS = ("vision", "dspark")  # recorded parts of the model that the text network does not have
WEIGHT_FILES = ("weights_released.safetensors", "weights_bf16.safetensors")  # one weight set, the first one preferred
PROMPTS_FILE = "prompts.safetensors"
INPUT_IDS = "input_ids"
# Recorded as [b * s, ...]; every other stage is [b, s, ...].
_FLAT_STAGES = frozenset({"router_ids", "router_weights", "shared_expert_out"})
# Facts about a prompt that are no stages of a forward.
_NO_STAGES = frozenset({INPUT_IDS, "greedy_tokens", "step_min_margin", "literal_reference_logits"})
_STEP = re.compile(r"step(\d+)\.(.+)")
_CACHE = "final_cache."


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """One sequence and what was recorded of it, by the stage names of `forward`.

    Arrays lead with the sequence's rows, or with entries (compress_latent, compress_kv, index_k).
    """

    name: str
    tokens: tuple[int, ...]
    stages: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeStep:
    """One step after a prompt. In a complete capture, window_kv is the ring (slot = position % window) and
    compress_kv and index_k hold every entry so far, both after the step.
    """

    stages: Mapping[str, np.ndarray]
    margin: float  # smallest selection margin of the whole step


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoding:
    """Greedy decoding of one sequence. Step i consumes greedy[i]; logits[0] comes from the prefill."""

    prompt: Recorded
    greedy: tuple[int, ...]
    logits: np.ndarray
    steps: tuple[DecodeStep, ...]
    full_logits: np.ndarray | None  # of one prefill over prompt and greedy tokens
    final_cache: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fixtures:
    """A directory of recordings in one mode."""

    directory: Path
    mode: str
    config: ModelConfig
    weights_file: Path
    files: Mapping[str, Mapping[str, np.ndarray]]  # kind -> tensors; only the kinds that are there
    prompts: Mapping[str, np.ndarray]
    token_map: np.ndarray | None


def open_fixtures(directory: Path, mode: str) -> Fixtures:
    """The recordings of one mode. Raises ValueError, naming the file, for what is absent or malformed."""
    if mode not in NUMERICS:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(NUMERICS)}")
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    config = load_config(directory)
    weights = next((directory / name for name in WEIGHT_FILES if (directory / name).exists()), None)
    if weights is None:
        raise ValueError(f"{directory} holds neither {' nor '.join(WEIGHT_FILES)}")
    files = {kind: read_arrays(directory / file_name(kind, mode)) for kind in recorded_kinds(directory, mode)}
    if not files:
        modes = [m for m in NUMERICS if recorded_kinds(directory, m)]
        raise ValueError(
            f"{directory} has no recordings of mode {mode!r}; recorded modes: {', '.join(modes) or 'none'}"
        )
    prompts = dict(read_arrays(directory / PROMPTS_FILE)) if (directory / PROMPTS_FILE).exists() else {}
    token_map = prompts.pop("token_map", None)
    return Fixtures(
        directory=directory,
        mode=mode,
        config=config,
        weights_file=weights,
        files=files,
        prompts=prompts,
        token_map=token_map,
    )


def file_name(kind: str, mode: str) -> str:
    """Name of the file of one kind of recording."""
    return f"{kind}_{mode}.safetensors"


def recorded_kinds(directory: Path, mode: str) -> list[str]:
    """The kinds of recordings that a directory holds in a mode."""
    return [kind for kind in KINDS if (directory / file_name(kind, mode)).exists()]


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file by name."""
    return {tensor.name: tensor.data for tensor in read_file(file)}


def prefill_sequences(fixtures: Fixtures, kind: str) -> list[Recorded]:
    """The sequences of a prefill recording; those of one prompt, and in it of one batch, are adjacent."""
    arrays = fixtures.files[kind]
    found: list[Recorded] = []
    for prefix, name in _prompts_of(fixtures, arrays):
        stages = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        found += _split(name, arrays[prefix + INPUT_IDS], stages, fixtures)
    return found


def decodings(fixtures: Fixtures, kind: str) -> list[Decoding]:
    """The decodings of a `decode` or `edge` recording, one for each sequence."""
    arrays = fixtures.files[kind]
    found: list[Decoding] = []
    for prefix, name in _prompts_of(fixtures, arrays):
        own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        found += _decodings_of(name, own, fixtures)
    return found


def _decodings_of(name: str, arrays: Mapping[str, np.ndarray], fixtures: Fixtures) -> Iterator[Decoding]:
    """The decodings of one prompt."""
    greedy, logits = arrays["greedy_tokens"], arrays["logits"]
    num_steps = greedy.shape[1] - 1
    per_step: list[dict[str, np.ndarray]] = [{} for _ in range(num_steps)]
    for key, value in arrays.items():
        if match := _STEP.fullmatch(key):
            per_step[int(match[1])][match[2]] = value
    # The margins of an edge recording begin with the prefill's.
    margins = arrays.get("step_min_margin", np.full(num_steps, np.inf))[-num_steps:]
    prompt_stages = {"logits": arrays["prefill_logits"]} if "prefill_logits" in arrays else {}
    prompts = _split(name, arrays[INPUT_IDS], prompt_stages, fixtures)
    steps = [_split(name, greedy[:, i : i + 1], stages, fixtures) for i, stages in enumerate(per_step)]
    cache = {k.removeprefix(_CACHE): v for k, v in arrays.items() if k.startswith(_CACHE)}
    full = arrays.get("full_prefill_logits")
    for i, prompt in enumerate(prompts):
        yield Decoding(
            prompt=prompt,
            greedy=tuple(int(t) for t in greedy[i]),
            logits=logits[i],
            steps=tuple(
                DecodeStep(stages=step[i].stages, margin=float(m)) for step, m in zip(steps, margins, strict=True)
            ),
            full_logits=None if full is None else full[i],
            final_cache={k: v[i] for k, v in cache.items()},
        )


def _prompts_of(fixtures: Fixtures, arrays: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    """Prefix of the keys and name of every prompt in a file; a file of one prompt may have no prefix."""
    prefixes = [key.removesuffix(INPUT_IDS) for key in arrays if key == INPUT_IDS or key.endswith("." + INPUT_IDS)]
    if not prefixes:
        raise ValueError(f"a recording of {fixtures.directory} in mode {fixtures.mode!r} has no {INPUT_IDS}")
    return [(p, p[:-1] or _name_of(fixtures, arrays[INPUT_IDS])) for p in sorted(prefixes)]


def _name_of(fixtures: Fixtures, ids: np.ndarray) -> str:
    return next((name for name, tokens in fixtures.prompts.items() if np.array_equal(tokens, ids)), "prompt")


def _split(name: str, ids: np.ndarray, arrays: Mapping[str, np.ndarray], fixtures: Fixtures) -> list[Recorded]:
    """The sequences of one batch of equally long prompts, with their own part of every stage."""
    batch, length = ids.shape
    stages: dict[str, np.ndarray] = {}
    for key, value in arrays.items():
        leaf = key.rsplit(".", 1)[-1]
        if leaf in _NO_STAGES or _STEP.fullmatch(key) or key.startswith(_CACHE):
            continue
        if leaf == "engram_hash_ids":
            for ordinal, layer in enumerate(fixtures.config.engram_layer_ids):
                stages[f"layers.{layer}.engram_rows"] = value[:, :, ordinal]
            continue
        whole = value.reshape(batch, length, *value.shape[1:]) if leaf in _FLAT_STAGES else value
        if whole.shape[0] != batch:
            raise ValueError(
                f"{key} of prompt {name} has shape {list(value.shape)}; it must lead with {batch} sequences"
            )
        stages[key] = whole
    return [
        Recorded(
            name=name if batch == 1 else f"{name}[{i}]",
            tokens=tuple(int(t) for t in ids[i]),
            stages={key: value[i] for key, value in stages.items()},
        )
        for i in range(batch)
    ]
