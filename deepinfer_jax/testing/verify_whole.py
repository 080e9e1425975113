"""Whole-model comparison in the float32 modes: nothing is put in place of a computed value unless a row needs it."""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from deepinfer_jax.model.state import State
from deepinfer_jax.testing import runner as running
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.boundary import Turn, quantized_caches, turn_check, turns_of
from deepinfer_jax.testing.checks import Check, Comparison, bad_share, canonical, check_all, movements
from deepinfer_jax.testing.fixtures import DecodeStep, Decoding, Recorded
from deepinfer_jax.testing.runner import Chunk, Runner

# Recorded for readers; no stage of the forward. The attention that follows shows which keys a row saw.
NO_STAGES = frozenset({"window_idxs"})
# Where attention ids may be forced in a decode step: recorded at every step.
_STEP_IDS = "topk_idxs"
# The streams that the tokens alone decide, Engram included: no selection and no cache lies in front of them.
_START = "layers.0.stream_in"

_STEP = re.compile(r"step(\d+)")

type Observed = Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """How a part is run: as it is, or with recorded ids and given first streams (and noise on them) in place."""

    captures_all: bool = False
    starts: Observed = ()  # what an earlier run observed: its first streams are put in place, and the recorded ids
    noise_seed: int | None = None
    turns: tuple[Turn, ...] = ()  # cached values that are rounded to the other side
    seen: Observed = ()  # what an earlier run observed, where there are turns: the inputs of the other sequences


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A group of recordings that are run together: the recorded values and how to compute them."""

    name: str
    sequences: list[str]
    wants: list[dict[str, np.ndarray]]
    observe: Callable[[Variant], Observed]
    captures_all: bool = True  # whether a plain run captures every stage
    has_tied_steps: bool = False
    # What could be turned in the first steps of a sequence, given a run with all stages and the turns that it had.
    near: Callable[[Observed, int, int, tuple[Turn, ...]], Iterable[Turn]] | None = None


def compare_whole(
    part: Part, *, candidate_block: int, tick: Callable[[str], None]
) -> tuple[list[Check], tuple[str, ...]]:
    """The checks of a part and remarks on them, with a second look at rows beyond their tolerance.

    The second look turns cached values that stand on a rounding boundary, if everything up to a later step then
    agrees; it puts the recorded ids in place, so that everything behind a tie can be compared, and runs the part
    again with float32 noise on the first layer's streams: a row that moves beyond its tolerance by that stands on a
    boundary, or behind one, and no implementation can be held to it. None of it helps a wrong formula, which fails on
    rows that do not move.
    """
    tick(part.name)
    first = part.observe(Variant())

    def compare(observed: Observed, moved: Sequence[Mapping[str, np.ndarray]] = ()) -> list[list[Check]]:
        checks: list[list[Check]] = []
        for i, name in enumerate(part.sequences):
            comparison = Comparison(
                sequence=name,
                got=observed[i],
                want=part.wants[i],
                moved=moved[i] if moved else {},
                has_tied_steps=part.has_tied_steps and bool(moved),
            )
            checks.append(check_all(comparison, feeding="none", candidate_block=candidate_block))
        return checks

    checks = compare(first)
    if _agrees(checks):
        return _flat(checks), ()
    plain, remarks = Variant(captures_all=True), list[str]()
    if part.near is not None:
        plain, checks, remarks = _turn_values(part, first, compare, tick)
    named = [turn_check(turn, part.sequences[turn.sequence]) for turn in plain.turns]
    if _agrees(checks) or bad_share(_flat(checks)) > tol.MAX_EXCUSED:
        return _flat(checks) + named, tuple(remarks)
    tick(f"{part.name}: with recorded ids")
    starts = first if part.captures_all else part.observe(Variant(captures_all=True))
    fed = dataclasses.replace(plain, starts=starts)
    base = part.observe(fed)
    checks = compare(base)
    if all(c.rows_bad == 0 for c in _flat(checks)) and not part.has_tied_steps:
        return _flat(checks) + named, tuple(remarks)
    tick(f"{part.name}: with noise")
    trials = [part.observe(dataclasses.replace(fed, noise_seed=seed)) for seed in range(tol.NUM_TRIALS)]
    moved = [movements(base[i], [trial[i] for trial in trials]) for i in range(len(base))]
    return _flat(compare(base, moved)) + named, tuple(remarks)


def _turn_values(
    part: Part, first: Observed, compare: Callable[[Observed], list[list[Check]]], tick: Callable[[str], None]
) -> tuple[Variant, list[list[Check]], list[str]]:
    """The run with the cached values turned whose turning makes steps agree that did not; at most a few.

    A turn is kept if its sequence then agrees up to a later step than before, and no other sequence agrees less far.
    """
    seen = first if part.captures_all else part.observe(Variant(captures_all=True))
    variant, checks, remarks = Variant(captures_all=True), compare(seen), list[str]()

    def candidates() -> Iterable[Turn]:
        assert part.near is not None
        for sequence, own in enumerate(checks):
            if not _agrees([own]):
                yield from part.near(seen, sequence, agreeing_steps(own) + 1, variant.turns)

    def is_further(new: list[list[Check]], turn: Turn) -> bool:
        gains = [agreeing_steps(n) - agreeing_steps(old) for n, old in zip(new, checks, strict=True)]
        return gains[turn.sequence] > 0 and min(gains) >= 0

    while len(variant.turns) < tol.MAX_BOUNDARY_VALUES:
        for turn in sorted(candidates(), key=lambda turn: abs(turn.near.move)):
            name = part.sequences[turn.sequence]
            tick(f"{part.name}: {name} with {turn.stage} turned at position {turn.position}")
            trial = dataclasses.replace(variant, turns=(*variant.turns, turn), seen=seen)
            observed = part.observe(trial)
            at = f"{step_prefix(turn.step)}.{turn.stage}"
            before, after = (o[turn.sequence][at][-1] for o in (seen, observed))  # the row that the step wrote
            if np.any(before != after) and is_further(new := compare(observed), turn):
                codes = float(before[turn.near.channel]), float(after[turn.near.channel])
                remarks.append(turn.describe(f"{part.name}: {name} {step_prefix(turn.step)}", *codes))
                variant, seen, checks = trial, observed, new
                break
        else:
            break
    return variant, checks, remarks


def agreeing_steps(checks: Sequence[Check]) -> int:
    """How many decode steps of a sequence agree before the first that does not; -1 if its prompt does not."""
    bad = [c.name.split(".", 1)[0] for c in checks if c.rows_bad + c.rows_forced]
    if "prompt" in bad:
        return -1
    return min((int(match[1]) for name in bad if (match := _STEP.fullmatch(name))), default=len(checks))


def _agrees(checks: Sequence[Sequence[Check]]) -> bool:
    return all(c.rows_bad + c.rows_forced == 0 for c in _flat(checks))


def _flat(checks: Sequence[Sequence[Check]]) -> list[Check]:
    return [check for own in checks for check in own]


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
    """The one prefill over prompt and greedy tokens, as far as the recording agrees with its own decode steps."""
    if decoding.full_logits is None:
        return None
    parting = parting_row(decoding)
    limit = len(decoding.full_logits) if parting is None else len(decoding.prompt.tokens) - 1 + parting
    tokens = (*decoding.prompt.tokens, *decoding.greedy)[:limit]
    return Recorded(name=decoding.prompt.name, tokens=tokens, stages={"logits": decoding.full_logits[:limit]})


def parting_row(decoding: Decoding) -> int | None:
    """The first of the decoding's logits that the recorded prefill of the same tokens does not have as well.

    Both compute the same rows. Where they part, one of the two recorded runs crossed a quantisation boundary: from
    there on there is no single value to compare with, but two.
    """
    if decoding.full_logits is None:
        return None
    other = decoding.full_logits[len(decoding.prompt.tokens) - 1 :]
    both = min(len(other), len(decoding.logits))
    beyond = np.flatnonzero(np.max(np.abs(other[:both] - decoding.logits[:both]), axis=1) > tol.LOGIT_ABSOLUTE)
    return int(beyond[0]) if len(beyond) else None


def decode_part(
    name: str, runner: Runner, items: Sequence[Decoding], *, state: State, capture: tuple[str, ...]
) -> Part:
    """Prefill and all greedy steps of several sequences, with the recorded tokens fed in."""
    has_ids = all(any(tol.leaf_of(n) == _STEP_IDS for n in step.stages) for item in items for step in item.steps)

    def observe(variant: Variant) -> Observed:
        wanted = running.ALL_STAGES if variant.captures_all else capture
        return _observe_decode(runner, items, variant, state=state, capture=wanted)

    def near(seen: Observed, sequence: int, num_steps: int, taken: tuple[Turn, ...]) -> Iterable[Turn]:
        item, steps = items[sequence], list[dict[str, np.ndarray]]()
        for index in range(min(num_steps, len(item.steps))):
            prefix = f"{step_prefix(index)}."
            steps.append({k.removeprefix(prefix): v for k, v in seen[sequence].items() if k.startswith(prefix)})
        caches = quantized_caches(runner.params, runner.config)
        return turns_of(caches, steps, sequence=sequence, first_position=len(item.prompt.tokens), taken=taken)

    return Part(
        name=name,
        sequences=[item.prompt.name for item in items],
        wants=[decode_wants(item) for item in items],
        observe=observe,
        captures_all=capture == running.ALL_STAGES,
        has_tied_steps=not has_ids,
        near=near,
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
        if len(item.logits) > i + 1:
            wants[f"{prefix}.logits"], wants[f"{prefix}.greedy_tokens"] = (
                item.logits[i + 1 : i + 2],
                greedy[i + 1 : i + 2],
            )
    length = len(item.prompt.tokens) + len(item.steps)
    return wants | {f"final_cache.{n}": live_rows(v, n, length) for n, v in item.final_cache.items()}


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
    runner: Runner,
    items: Sequence[Decoding],
    variant: Variant,
    *,
    state: State,
    capture: tuple[str, ...],
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
        for turn in variant.turns:
            if turn.step == index:
                for own, i in zip(forced, active, strict=True):
                    seen = variant.seen[i][f"{prefix}.{turn.source}"]
                    own[turn.source] = turn.row if i == turn.sequence else own.get(turn.source, seen)
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
