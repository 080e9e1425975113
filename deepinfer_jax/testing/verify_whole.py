"""Whole-model comparison in the float32 modes: nothing is put in place of a computed value unless a row needs it."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deepinfer_jax.model.state import State
from deepinfer_jax.testing import runner as running
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check, Comparison, bad_share, canonical, check_all, movements
from deepinfer_jax.testing.fixtures import DecodeStep, Decoding, Recorded
from deepinfer_jax.testing.runner import Chunk, Runner

# Recorded for readers; no stage of the forward. The attention that follows shows which keys a row saw.
NO_STAGES = frozenset({"window_idxs"})
# Where attention ids may be forced in a decode step: recorded at every step.
_STEP_IDS = "topk_idxs"
# The streams that the tokens alone decide, Engram included: no selection and no cache lies in front of them.
_START = "layers.0.stream_in"

type Observed = Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """How a part is run: as it is, or with recorded ids and given first streams (and noise on them) in place."""

    captures_all: bool = False
    starts: Observed = ()  # what an earlier run observed: its first streams are put in place, and the recorded ids
    noise_seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A group of recordings that are run together: the recorded values and how to compute them."""

    name: str
    sequences: list[str]
    wants: list[dict[str, np.ndarray]]
    observe: Callable[[Variant], Observed]
    captures_all: bool = True  # whether a plain run captures every stage
    has_tied_steps: bool = False


def compare_whole(part: Part, *, candidate_block: int, tick: Callable[[str], None]) -> list[Check]:
    """The checks of a part, with a second look at rows beyond their tolerance.

    The second look puts the recorded ids in place, so that everything behind a tie can be compared, and runs the part
    again with float32 noise on the first layer's streams: a row that moves beyond its tolerance by that stands on a
    boundary, or behind one, and no implementation can be held to it. Neither helps a wrong formula, which fails on
    rows that do not move.
    """

    def compare(observed: Observed, moved: Sequence[Mapping[str, np.ndarray]]) -> list[Check]:
        checks: list[Check] = []
        for name, got, want, own in zip(part.sequences, observed, part.wants, moved, strict=True):
            comparison = Comparison(
                sequence=name, got=got, want=want, moved=own, has_tied_steps=part.has_tied_steps and bool(own)
            )
            checks += check_all(comparison, feeding="none", candidate_block=candidate_block)
        return checks

    tick(part.name)
    first = part.observe(Variant())
    checks = compare(first, [{} for _ in part.wants])
    if all(c.rows_bad + c.rows_forced == 0 for c in checks) or bad_share(checks) > tol.MAX_EXCUSED:
        return checks
    tick(f"{part.name}: with recorded ids")
    starts = first if part.captures_all else part.observe(Variant(captures_all=True))
    base = part.observe(Variant(captures_all=True, starts=starts))
    checks = compare(base, [{} for _ in part.wants])
    if all(c.rows_bad == 0 for c in checks) and not part.has_tied_steps:
        return checks
    tick(f"{part.name}: with noise")
    seeds = range(tol.NUM_TRIALS)
    trials = [part.observe(Variant(captures_all=True, starts=starts, noise_seed=seed)) for seed in seeds]
    moved = [movements(base[i], [trial[i] for trial in trials]) for i in range(len(base))]
    return compare(base, moved)


def prefill_part(name: str, runner: Runner, sequences: Sequence[Recorded], *, state: State) -> Part:
    """All sequences of a recording in one prefill step."""
    chunks = [Chunk(slot=i, start=0, tokens=s.tokens) for i, s in enumerate(sequences)]
    id_names = common_names(sequences, tol.SELECTION_LEAVES)

    def observe(variant: Variant) -> Observed:
        forced = [_forced(s.stages, id_names, variant, i, "") for i, s in enumerate(sequences)]
        return [canonical(s) for s in running.run(runner, state, chunks, forced=forced).stages]

    wants = [canonical(comparable(s.stages)) for s in sequences]
    return Part(name=name, sequences=[s.name for s in sequences], wants=wants, observe=observe)


def full_prefill(decoding: Decoding) -> Recorded | None:
    """The one prefill over prompt and greedy tokens, as far as the recording agrees with its own decode steps.

    Both compute the same rows. From the first row on where they differ, one of the two recorded runs crossed a
    quantisation boundary, and there is no single value to compare with.
    """
    if decoding.full_logits is None:
        return None
    first = len(decoding.prompt.tokens) - 1
    both = min(len(decoding.full_logits) - first, len(decoding.logits))
    differs = np.max(np.abs(decoding.full_logits[first : first + both] - decoding.logits[:both]), axis=1)
    beyond = np.flatnonzero(differs > tol.LOGIT_ABSOLUTE)
    limit = first + int(beyond[0]) if len(beyond) else len(decoding.full_logits)
    tokens = (*decoding.prompt.tokens, *decoding.greedy)[:limit]
    return Recorded(name=decoding.prompt.name, tokens=tokens, stages={"logits": decoding.full_logits[:limit]})


def decode_part(
    name: str, runner: Runner, items: Sequence[Decoding], *, state: State, capture: tuple[str, ...]
) -> Part:
    """Prefill and all greedy steps of several sequences, with the recorded tokens fed in."""
    has_ids = all(any(tol.leaf_of(n) == _STEP_IDS for n in step.stages) for item in items for step in item.steps)

    def observe(variant: Variant) -> Observed:
        wanted = running.ALL_STAGES if variant.captures_all else capture
        return _observe_decode(runner, items, variant, state=state, capture=wanted)

    return Part(
        name=name,
        sequences=[item.prompt.name for item in items],
        wants=[decode_wants(item) for item in items],
        observe=observe,
        captures_all=capture == running.ALL_STAGES,
        has_tied_steps=not has_ids,
    )


def decode_wants(item: Decoding) -> dict[str, np.ndarray]:
    """Everything recorded of a decoding under the names that `_observe_decode` uses."""
    greedy = np.asarray(item.greedy)
    wants: dict[str, np.ndarray] = {}
    if "logits" in item.prompt.stages:
        wants["prompt.prefill_logits"] = item.prompt.stages["logits"]
    wants["prompt.logits"], wants["prompt.greedy_tokens"] = item.logits[:1], greedy[:1]
    for i, step in enumerate(item.steps):
        prefix = step_prefix(i)
        wants[f"{prefix}.step_margin"] = np.asarray([step.margin])
        length = len(item.prompt.tokens) + i + 1
        stages = canonical(comparable(step.stages))
        wants |= {f"{prefix}.{k}": live_rows(v, k, length) for k, v in stages.items()}
        wants[f"{prefix}.logits"] = item.logits[i + 1 : i + 2]
        wants[f"{prefix}.greedy_tokens"] = greedy[i + 1 : i + 2]
    length = len(item.prompt.tokens) + len(item.steps)
    wants |= {f"final_cache.{k}": live_rows(v, k, length) for k, v in item.final_cache.items()}
    return wants


def step_prefix(index: int) -> str:
    """What stands in front of the stages of a decode step."""
    return f"step{index:02d}"


def comparable(stages: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The recorded stages that a forward has."""
    return {name: value for name, value in stages.items() if tol.leaf_of(name) not in NO_STAGES}


def common_names(sequences: Sequence[Recorded], leaves: frozenset[str]) -> list[str]:
    """Names of stages of these kinds that every sequence has a recording of."""
    sets = [{n for n in s.stages if tol.leaf_of(n) in leaves} for s in sequences]
    return sorted(set.intersection(*sets)) if sets else []


def live_rows(recorded: np.ndarray, name: str, length: int) -> np.ndarray:
    """The rows of a recorded ring or compressor state that a request of `length` tokens has, oldest first."""
    leaf = tol.leaf_of(name)
    size = len(recorded)
    if leaf == "window_kv":
        return recorded[np.arange(max(0, length - size), length) % size]
    if leaf in ("kv_state", "score_state"):
        return recorded[np.arange(length - length % size, length) % size]
    return recorded


def state_rows(runner: Runner, state: State, name: str, slot: int, length: int) -> np.ndarray:
    """What the state holds under a recorded cache name such as "layers.3.window_kv", in the order of `live_rows`."""
    leaf, layer = tol.leaf_of(name), int(name.split(".")[1])
    if leaf == "window_kv":
        return running.window_rows(runner, state, layer, slot, length)
    if leaf in ("kv_state", "score_state"):
        return running.tail_rows(runner, state, leaf, layer, slot, length)
    return running.cache_entries(runner, state, leaf, layer, slot, length)


def step_stages(
    runner: Runner, step: DecodeStep, computed: Mapping[str, np.ndarray], state: State, *, slot: int, length: int
) -> dict[str, np.ndarray]:
    """The computed counterpart of a decode step's recordings: stages, and caches read back from the state."""
    got = dict(computed)
    for name in step.stages:
        if tol.leaf_of(name) in tol.CODE_LEAVES:
            got[name] = state_rows(runner, state, name, slot, length)
    return canonical(got)


def _observe_decode(
    runner: Runner, items: Sequence[Decoding], variant: Variant, *, state: State, capture: tuple[str, ...]
) -> Observed:
    prompts = [Chunk(slot=i, start=0, tokens=item.prompt.tokens) for i, item in enumerate(items)]
    forced = [_forced({}, [], variant, i, "prompt.") for i in range(len(items))]
    ran = running.run(runner, state, prompts, forced=forced, capture=capture)
    got: list[dict[str, np.ndarray]] = []
    for stages in ran.stages:
        logits = stages["logits"]
        kept = {f"prompt.{name}": stages[name] for name in [_START] if name in stages}
        got.append({**kept, "prompt.prefill_logits": logits, **_with_greedy("prompt", {"logits": logits[-1:]})})
    num_rows = running.decode_rows(len(items))
    for index in range(max(len(item.steps) for item in items)):
        active = [i for i, item in enumerate(items) if index < len(item.steps)]
        chunks = [
            Chunk(slot=i, start=len(items[i].prompt.tokens) + index, tokens=(items[i].greedy[index],)) for i in active
        ]
        steps = [items[i].steps[index] for i in active]
        names = [n for n in steps[0].stages if tol.leaf_of(n) == _STEP_IDS]
        prefix = step_prefix(index)
        forced = [_forced(s.stages, names, variant, i, f"{prefix}.") for i, s in zip(active, steps, strict=True)]
        ran = running.run(runner, ran.state, chunks, forced=forced, capture=capture, num_rows=num_rows)
        for i, chunk, step, stages in zip(active, chunks, steps, ran.stages, strict=True):
            own = step_stages(runner, step, stages, ran.state, slot=i, length=chunk.positions.stop)
            got[i] |= _with_greedy(prefix, own)
    for i, item in enumerate(items):
        length = len(item.prompt.tokens) + len(item.steps)
        for name in item.final_cache:
            got[i][f"final_cache.{name}"] = state_rows(runner, ran.state, name, i, length)
    return got


def _with_greedy(prefix: str, stages: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    named = {f"{prefix}.{name}": value for name, value in stages.items()}
    return {**named, f"{prefix}.greedy_tokens": np.argmax(stages["logits"], axis=-1)}


def _forced(
    stages: Mapping[str, np.ndarray], names: Sequence[str], variant: Variant, sequence: int, prefix: str
) -> dict[str, np.ndarray]:
    """The recorded ids and the first streams of one chunk, with float32 noise on these where the variant says so."""
    if not variant.starts:
        return {}
    streams = variant.starts[sequence][prefix + _START]
    if variant.noise_seed is not None:
        # A seed of its own for every chunk: crc32 is the same in every process.
        rng = np.random.default_rng((variant.noise_seed, sequence, zlib.crc32(prefix.encode())))
        noise = tol.NOISE_RELATIVE * rng.standard_normal(streams.shape)
        streams = (streams * (1 + noise)).astype(streams.dtype)
    return {**{name: stages[name] for name in names}, _START: streams}
