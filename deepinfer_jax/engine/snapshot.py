"""One request with everything it has on the device, as arrays on the host or a file (spec: interface 6.1).

A snapshot fits every engine with the same weights, numerics, modes and cache layout, whatever its slots, pages or
mesh. Its arrays are packed as the caches are; `RequestSnapshot.state` is a pytree.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import steps
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.shardings import HOST_MEMORY
from deepinfer_jax.model.state import PAGED_LEAVES, State, init_state
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.batching import RequestOptions
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.sequence import Limits, Sequence
from deepinfer_jax.text.images import ImagePlan, PreparedImage

FORMAT = "deepinfer_jax request 2"
_PATCHES = "image{}.patches"  # of an image, among the arrays of a file
_SAMPLES = 64  # values of each weight array that go into a fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSnapshot:
    """A request at one moment: `save_snapshot` and `load_snapshot` keep it in a file."""

    fingerprint: str  # of the engine that made it
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams  # with eos_id set
    seed: int
    tail_start: int
    window_start: int
    num_written: int  # positions that `state` holds
    state_end: int  # positions that its rings have seen
    state: State | None  # one slot, and pages for num_written tokens; None: the request had not run
    images: tuple[ImageSpan, ...] = ()  # needed where tokens have to be computed again


def take(sequence: Sequence, pipeline: Pipeline, *, fingerprint: str, page_tokens: int) -> RequestSnapshot:
    """The snapshot of an unfinished request none of whose steps is unread."""
    options: RequestOptions = sequence.options
    num_written = 0 if sequence.pending_copy is not None else sequence.num_written
    state = None
    is_scoring = sequence.scores_prompt and not sequence.output  # its scores so far are not kept: it starts anew
    if sequence.slot >= 0 and num_written > 0 and not is_scoring:
        pages = sequence.pages[: -(-num_written // page_tokens)]
        state = _trim(pipeline.read_request(sequence.slot, pages, rank=sequence.rank), len(pages))
    return RequestSnapshot(
        fingerprint=fingerprint,
        prompt=tuple(sequence.prompt),
        output=tuple(sequence.output),
        params=options.params,
        seed=options.seed,
        tail_start=sequence.tail_start,
        window_start=sequence.window_start,
        num_written=num_written if state is not None else 0,
        state_end=sequence.state_end if state is not None else 0,
        state=state,
        images=sequence.images,
    )


def sequence_of(saved: RequestSnapshot, request_id: str, limits: Limits) -> Sequence:
    """A sequence that goes on from a snapshot."""
    return Sequence(
        request_id=request_id,
        prompt=saved.prompt,
        limits=limits,
        tail_start=saved.tail_start,
        options=RequestOptions(saved.params, saved.seed),
        output=list(saved.output),
        scores_prompt=saved.params.prompt_logprobs and not saved.output,
        images=saved.images,
    )


def check(saved: RequestSnapshot, *, fingerprint: str) -> None:
    """Raises ValueError for a snapshot of another model, numerics, mode or cache layout."""
    if saved.fingerprint != fingerprint:
        raise ValueError(
            f"the snapshot belongs to {saved.fingerprint}, this engine is {fingerprint}; restore it in an engine with "
            "the same weights, numerics, replay mode and cache layout"
        )


def fingerprint(params: Params, runtime: RuntimeConfig) -> str:
    """A digest of the configuration and of samples of every weight array, the same on every mesh."""
    digest = hashlib.sha256()
    same = {"kernels": "auto", "target": "", "dp": 1, "cp": 1, "expert_axes": (), "engram_axes": ()}
    kept = dataclasses.replace(runtime, **same, counts_experts=False, engram_on_host=False)
    digest.update(repr(kept).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name == ".moe.replicas":
            continue
        shape = _own_shape(name, leaf.shape, runtime.model)
        size = math.prod(shape)
        places = np.linspace(0, max(size - 1, 0), _SAMPLES).astype(np.int64)
        index: Any = np.unravel_index(places, shape) if shape else ()
        if name.startswith(".moe.experts") and params.moe.replicas is not None:
            first_places = np.asarray(params.moe.replicas)[:, :, 0]
            index = (index[0], first_places[index[:2]], *index[2:])
        values = np.asarray(_samples_of(leaf, index)) if size else np.zeros(0)
        digest.update(f"{name} {shape} {leaf.dtype}".encode() + values.tobytes())
    return digest.hexdigest()[:32]


def _samples_of(leaf: jax.Array, index: Any) -> jax.Array | np.ndarray:
    if [device.platform for device in leaf.devices()] == ["cpu"]:
        return np.asarray(leaf)[index]  # a view: nothing is copied, or compiled
    if leaf.sharding.memory_kind != HOST_MEMORY:
        return leaf[index]
    return steps.samples_on_host(leaf, *(np.asarray(one, np.int32) for one in index))


def _own_shape(name: str, shape: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """The shape of a weight array without the rows that a mesh adds."""
    if ".experts." in name:
        count = model.dspark_n_routed_experts if name.startswith(".draft") else model.n_routed_experts
        return (shape[0], count, *shape[2:])
    if match := re.match(r"\.engram\.embed\[(\d+)\]", name):
        return (model.engram_num_embeddings[int(match[1])], *shape[1:])
    return shape


def save_snapshot(saved: RequestSnapshot, path: str | os.PathLike[str]) -> None:
    """Writes a safetensors file; it appears under its name only when it is whole."""
    from safetensors.numpy import save

    facts = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved) if field.name != "state"}
    facts["params"] = dataclasses.asdict(saved.params)
    facts["images"] = [_image_facts(image) for image in saved.images]
    arrays = {} if saved.state is None else _named(saved.state)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # safetensors writes views wrongly
    arrays |= {_PATCHES.format(i): image.content.patches for i, image in enumerate(saved.images)}
    data = save(arrays, metadata={"format": FORMAT, "request": json.dumps(facts)})
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_snapshot(path: str | os.PathLike[str], runtime: RuntimeConfig) -> RequestSnapshot:
    """Reads a file of `save_snapshot`; runtime: of the engine that will restore it (`LLMEngine.runtime`).

    Raises ValueError for a file that is no whole snapshot, or that has arrays of another layout.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a snapshot: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a snapshot of this format ({FORMAT}); write it with save_snapshot")
    facts: dict[str, Any] = json.loads(metadata["request"])
    facts["params"] = SamplingParams.from_dict(facts["params"])
    facts |= {name: tuple(facts[name]) for name in ("prompt", "output")}
    images = enumerate(facts["images"])
    facts["images"] = tuple(_image_of(image, arrays.pop(_PATCHES.format(index))) for index, image in images)
    return RequestSnapshot(**facts, state=_state_of(arrays, runtime, path) if arrays else None)


def _image_facts(image: ImageSpan) -> dict[str, Any]:
    """What a file says of an image beside its patches."""
    plan = dataclasses.asdict(image.content.plan)
    return {"start": image.start, "length": image.length, "digest": image.digest, "plan": plan}


def _image_of(facts: dict[str, Any], patches: np.ndarray) -> ImageSpan:
    content = PreparedImage(plan=ImagePlan(**facts.pop("plan")), patches=patches, digest=facts["digest"])
    return ImageSpan(**facts, content=content)


def _state_of(arrays: dict[str, np.ndarray], runtime: RuntimeConfig, path: Any) -> State:
    num_pages = max(array.shape[1] for name, array in arrays.items() if name.startswith(PAGED_LEAVES))
    with_draft = any(name.startswith(".draft") for name in arrays)
    like = jax.eval_shape(lambda: init_state(runtime, num_slots=1, num_pages=num_pages, with_draft=with_draft))
    wanted = _named(like)
    for name, leaf in wanted.items():
        found = arrays.get(name)
        if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype:
            shown = "is missing" if found is None else f"has shape {found.shape} and dtype {found.dtype}"
            raise ValueError(f"{path}: {name} {shown}; this engine's caches need {leaf.shape} {leaf.dtype}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _named(state: State) -> dict[str, Any]:
    """The leaves by name, in the order of the tree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _trim(state: State, num_pages: int) -> State:
    """The state without the pages that only fill up a compiled size."""

    def trim(path: Any, leaf: np.ndarray) -> np.ndarray:
        return leaf[:, :num_pages] if jax.tree_util.keystr(path).startswith(PAGED_LEAVES) else leaf

    return jax.tree_util.tree_map_with_path(trim, state)
