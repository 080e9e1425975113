"""Comparison in the bf16 modes: every sublayer from its recorded inputs, since roundings decide between branches.

Two faithful implementations differ by several percent in logits here when nothing is fed: one turned rounding changes
a selected entry. So each recorded input is put in place of the computed one, and what follows it is compared.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.state import State
from deepinfer_jax.testing import runner as running
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check, Comparison, canonical, check_all
from deepinfer_jax.testing.fixtures import Decoding, Recorded
from deepinfer_jax.testing.report import Line, lines_of
from deepinfer_jax.testing.runner import Chunk, Runner
from deepinfer_jax.testing.verify_whole import comparable, live_rows, state_rows, step_prefix, step_stages

# Results that nothing in the forward reads as a stage: forcing them would change nothing.
_ONLY_RESULTS = (
    tol.CODE_LEAVES
    | tol.MARGIN_LEAVES
    | tol.SCORE_LEAVES
    | tol.LOGIT_LEAVES
    | tol.STREAM_MEAN_LEAVES
    | tol.TOKEN_LEAVES
    | {"shared_expert_out"}
)
_LAYER_INPUTS = tol.SELECTION_LEAVES | {"stream_out", "router_ids", "final_hidden"}
# A step is a complete capture when the input of its first sublayer is there.
_COMPLETE = "attn_in"

type Stages = Mapping[str, np.ndarray]
type Template = Mapping[str, np.ndarray]
type Tick = Callable[[str], None]


def verify_fed(
    runner: Runner,
    prefills: Mapping[str, list[Recorded]],
    decodes: Mapping[str, list[Decoding]],
    *,
    progress: Tick,
) -> tuple[list[Line], list[str]]:
    """Lines of everything that recorded inputs exist for, and remarks on the rest."""
    lines: list[Line] = []
    remarks: list[str] = []
    complete = prefills.get("prefill_full", [])
    if complete:
        progress("prefill_full")
        lines += lines_of("prefill_full", _sublayers(runner, complete))
    if light := prefills.get("prefill_light"):
        progress("prefill_light")
        lines += lines_of("prefill_light", _layers(runner, light))
    for kind, items in decodes.items():
        if any(_is_complete(step.stages) for item in items for step in item.steps):
            progress(kind)
            lines += lines_of(kind, _decode_steps(runner, items, complete))
        progress(f"{kind}: nothing fed")
        checks, more = _unfed(runner, items)
        lines += lines_of(f"{kind}: nothing fed", checks)
        remarks += [f"{kind}: {text}" for text in more]
    return lines, remarks


def _sublayers(runner: Runner, sequences: Sequence[Recorded]) -> list[Check]:
    """A complete capture of a prefill, every sublayer from its recorded inputs."""
    ran = _fed_prefill(runner, [s.tokens for s in sequences], [s.stages for s in sequences])
    checks: list[Check] = []
    for recorded, got in zip(sequences, ran.stages, strict=True):
        wants = canonical(comparable(recorded.stages))
        checks += _check(runner, recorded.name, canonical(got), wants, "sublayer")
    return checks


def _fed_prefill(runner: Runner, tokens: Sequence[tuple[int, ...]], stages: Sequence[Stages]) -> running.Ran:
    """A prefill with every recorded input in place; a sequence without recordings gets zeros, and computes nothing
    of use but its token history.
    """
    chunks = [Chunk(slot=i, start=0, tokens=t) for i, t in enumerate(tokens)]
    forced = [_inputs(s) for s in stages]
    return running.run(runner, running.empty_state(runner), chunks, forced=forced)


def _layers(runner: Runner, sequences: Sequence[Recorded]) -> list[Check]:
    """A light capture: whole layers from their recorded streams, with the recorded choices in place.

    A layer can be compared when the streams in front of it and in front of every layer before it are recorded: the
    pre-mix that it consumes comes from the layer before, and compressed entries from their source layer.
    """
    chunks = [Chunk(slot=i, start=0, tokens=s.tokens) for i, s in enumerate(sequences)]
    forced = [{n: v for n, v in s.stages.items() if tol.leaf_of(n) in _LAYER_INPUTS} for s in sequences]
    ran = running.run(runner, running.empty_state(runner), chunks, forced=forced)
    checks: list[Check] = []
    for recorded, got in zip(sequences, ran.stages, strict=True):
        wants = canonical(_fed_stages(recorded.stages, runner.config.model))
        checks += _check(runner, recorded.name, canonical(got), wants, "layer")
    return checks


def _fed_stages(stages: Stages, model: ModelConfig) -> dict[str, np.ndarray]:
    """What a light capture has recorded inputs for."""
    has_streams = [f"layers.{layer}.stream_out" in stages for layer in range(model.num_hidden_layers)]
    num_fed = has_streams.index(False) + 1 if False in has_streams else model.num_hidden_layers
    kept: dict[str, np.ndarray] = {}
    for name, value in comparable(stages).items():
        leaf = tol.leaf_of(name)
        if leaf in tol.TOKEN_LEAVES or (leaf in tol.LOGIT_LEAVES and "final_hidden" in stages):
            kept[name] = value
        elif name.startswith("layers."):
            if int(name.split(".")[1]) < num_fed:
                kept[name] = value
        elif all(has_streams):
            kept[name] = value
    return kept


def _decode_steps(runner: Runner, items: Sequence[Decoding], complete: Sequence[Recorded]) -> list[Check]:
    """Decode steps from recorded inputs, as long as complete captures follow a complete prefill; hashes of all steps.

    Hashes depend on tokens alone; the other stages of a step without recorded inputs are computed from zeros, by the
    same program, and not looked at.
    """
    by_tokens = {s.tokens: s.stages for s in complete}
    prompts = [by_tokens.get(item.prompt.tokens, {}) for item in items]
    template = _template([step.stages for item in items for step in item.steps if _is_complete(step.stages)])
    state = _fed_prefill(runner, [item.prompt.tokens for item in items], prompts).state
    is_fed = [bool(stages) for stages in prompts]
    checks: list[Check] = []
    num_rows = running.decode_rows(len(items))
    for index in range(max(len(item.steps) for item in items)):
        active = [i for i, item in enumerate(items) if index < len(item.steps)]
        chunks = [
            Chunk(slot=i, start=len(items[i].prompt.tokens) + index, tokens=(items[i].greedy[index],)) for i in active
        ]
        forced: list[Stages] = []
        for i in active:
            stages = items[i].steps[index].stages
            is_fed[i] = is_fed[i] and _is_complete(stages)
            forced.append({**template, **_inputs(stages)} if is_fed[i] else template)
        ran = running.run(runner, state, chunks, forced=forced, num_rows=num_rows)
        state = ran.state
        for i, chunk, got in zip(active, chunks, ran.stages, strict=True):
            checks += _check_step(runner, items[i], index, got, state, chunk, is_fed=is_fed[i])
    return checks


def _check_step(
    runner: Runner,
    item: Decoding,
    index: int,
    computed: Stages,
    state: State,
    chunk: Chunk,
    *,
    is_fed: bool,
) -> list[Check]:
    step = item.steps[index]
    length = chunk.positions.stop
    wants = canonical(comparable(step.stages))
    if not is_fed:
        wants = {name: value for name, value in wants.items() if tol.leaf_of(name) in tol.TOKEN_LEAVES}
        got = dict(computed)
    else:
        wants = {name: live_rows(value, name, length) for name, value in wants.items()}
        wants["logits"] = item.logits[index + 1 : index + 2]
        got = step_stages(runner, step, computed, state, slot=chunk.slot, length=length)
    prefix = step_prefix(index)
    named_wants = {f"{prefix}.{name}": value for name, value in wants.items()}
    named_got = {f"{prefix}.{name}": value for name, value in got.items()}
    return _check(runner, item.prompt.name, named_got, named_wants, "sublayer")


def _unfed(runner: Runner, items: Sequence[Decoding]) -> tuple[list[Check], list[str]]:
    """Prompts and all steps with nothing fed, by the program that serves.

    Compared is what rounding cannot have changed: the first layer's window, which the tokens alone decide. The rest
    becomes remarks.
    """
    chunks = [Chunk(slot=i, start=0, tokens=item.prompt.tokens) for i, item in enumerate(items)]
    ran = running.run(runner, running.empty_state(runner), chunks, capture=())
    logits = [[stages["logits"][-1]] for stages in ran.stages]
    num_rows = running.decode_rows(len(items))
    for index in range(max(len(item.steps) for item in items)):
        active = [i for i, item in enumerate(items) if index < len(item.steps)]
        chunks = [
            Chunk(slot=i, start=len(items[i].prompt.tokens) + index, tokens=(items[i].greedy[index],)) for i in active
        ]
        ran = running.run(runner, ran.state, chunks, capture=(), num_rows=num_rows)
        for i, stages in zip(active, ran.stages, strict=True):
            logits[i].append(stages["logits"][0])
    checks: list[Check] = []
    for i, item in enumerate(items):
        length = len(item.prompt.tokens) + len(item.steps)
        name = "final_cache.layers.0.window_kv"
        if (recorded := item.final_cache.get("layers.0.window_kv")) is not None:
            want = live_rows(recorded, name, length)
            got = state_rows(runner, ran.state, "layers.0.window_kv", i, length)
            checks += _check(runner, item.prompt.name, {name: got}, {name: want}, "sublayer")
    return checks, [_agreement(item, np.asarray(own)) for item, own in zip(items, logits, strict=True)]


def _agreement(item: Decoding, logits: np.ndarray) -> str:
    errors = np.linalg.norm(logits - item.logits, axis=1) / np.linalg.norm(item.logits, axis=1)
    num_equal = int(np.sum(np.argmax(logits, axis=1) == np.asarray(item.greedy)))
    return (
        f"{item.prompt.name} with nothing fed: relative error of logits {np.median(errors):.2g} (median) to "
        f"{errors.max():.2g}, {num_equal} of {len(item.greedy)} greedy tokens equal; no tolerance applies"
    )


def _check(runner: Runner, sequence: str, got: Stages, want: Stages, feeding: tol.Feeding) -> list[Check]:
    comparison = Comparison(sequence=sequence, got=got, want=want)
    return check_all(comparison, feeding=feeding, candidate_block=runner.config.model.candidate_block_size)


def _inputs(stages: Stages) -> dict[str, np.ndarray]:
    return {n: v for n, v in comparable(stages).items() if tol.leaf_of(n) not in _ONLY_RESULTS}


def _template(captures: Sequence[Stages]) -> dict[str, np.ndarray]:
    """Every input that some capture has, as an array without rows: gives all steps one set of forced stages."""
    return {name: value[:0] for capture in captures for name, value in _inputs(capture).items()}


def _is_complete(stages: Stages) -> bool:
    return any(tol.leaf_of(name) == _COMPLETE for name in stages)
