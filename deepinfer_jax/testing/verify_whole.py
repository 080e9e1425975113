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
    settle: Callable[[Observed], "Part | None"] = lambda _: None  # another part to compare with, after a plain run
    remarks: tuple[str, ...] = ()


def compare_whole(
    part: Part, *, candidate_block: int, tick: Callable[[str], None]
) -> tuple[list[Check], tuple[str, ...]]:
    """The checks of a part and remarks on them, with a second look at rows beyond their tolerance.

    The second look puts the recorded ids in place, so that everything behind a tie can be compared, and runs the part
    again with float32 noise on the first layer's streams: a row that moves beyond its tolerance by that stands on a
    boundary, or behind one, and no implementation can be held to it. Neither helps a wrong formula, which fails on
    rows that do not move.
    """

    tick(part.name)
    first = part.observe(Variant())
    part = part.settle(first) or part

    def compare(observed: Observed, moved: Sequence[Mapping[str, np.ndarray]]) -> list[Check]:
        checks: list[Check] = []
        for name, got, want, own in zip(part.sequences, observed, part.wants, moved, strict=True):
            comparison = Comparison(
                sequence=name, got=got, want=want, moved=own, has_tied_steps=part.has_tied_steps and bool(own)
            )
            checks += check_all(comparison, feeding="none", candidate_block=candidate_block)
        return checks

    checks = compare(first, [{} for _ in part.wants])
    if all(c.rows_bad + c.rows_forced == 0 for c in checks) or bad_share(checks) > tol.MAX_EXCUSED:
        return checks, part.remarks
    tick(f"{part.name}: with recorded ids")
    starts = first if part.captures_all else part.observe(Variant(captures_all=True))
    base = part.observe(Variant(captures_all=True, starts=starts))
    checks = compare(base, [{} for _ in part.wants])
    if all(c.rows_bad == 0 for c in checks) and not part.has_tied_steps:
        return checks, part.remarks
    tick(f"{part.name}: with noise")
    seeds = range(tol.NUM_TRIALS)
    trials = [part.observe(Variant(captures_all=True, starts=starts, noise_seed=seed)) for seed in seeds]
    moved = [movements(base[i], [trial[i] for trial in trials]) for i in range(len(base))]
    return compare(base, moved), part.remarks


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
    name: str,
    runner: Runner,
    items: Sequence[Decoding],
    *,
    state: State,
    capture: tuple[str, ...],
    branches: Mapping[int, int] | None = None,
) -> Part:
    """Prefill and all greedy steps of several sequences, with the recorded tokens fed in.

    branches: sequence -> the first of its logits from which on it is compared with the recorded prefill of the same
    tokens instead of the recorded steps.
    """
    own = branches or {}
    has_ids = all(any(tol.leaf_of(n) == _STEP_IDS for n in step.stages) for item in items for step in item.steps)

    def observe(variant: Variant) -> Observed:
        wanted = running.ALL_STAGES if variant.captures_all else capture
        return _observe_decode(runner, items, variant, state=state, capture=wanted, branches=own)

    def settle(first: Observed) -> Part | None:
        taken = {i: row for i, item in enumerate(items) if (row := _branch_of(item, first[i])) is not None}
        return decode_part(name, runner, items, state=state, capture=capture, branches=taken) if taken else None

    return Part(
        name=name,
        sequences=[item.prompt.name for item in items],
        wants=[decode_wants(runner, item, other_from=own.get(i)) for i, item in enumerate(items)],
        observe=observe,
        captures_all=capture == running.ALL_STAGES,
        has_tied_steps=not has_ids,
        settle=settle,
        remarks=tuple(
            f"{name}: {items[i].prompt.name} is compared with full_prefill_logits from logits {row} on, where the "
            "recorded steps and the recorded prefill of the same tokens part: the product has the prefill's values"
            for i, row in own.items()
        ),
    )


def _branch_of(item: Decoding, observed: Mapping[str, np.ndarray]) -> int | None:
    """Where the recordings part, if the product then has the values of the recorded prefill and not of the step."""
    row = parting_row(item)
    if not row or item.full_logits is None:
        return None
    got = observed[f"{step_prefix(row - 1)}.logits"][0]
    other = item.full_logits[len(item.prompt.tokens) - 1 + row]
    is_other = np.max(np.abs(got - other)) <= tol.LOGIT_ABSOLUTE < np.max(np.abs(got - item.logits[row]))
    return row if is_other else None


def decode_wants(runner: Runner, item: Decoding, *, other_from: int | None = None) -> dict[str, np.ndarray]:
    """Everything recorded of a decoding under the names that `_observe_decode` uses.

    From the logits `other_from` on, the recorded prefill takes the place of the steps, and of the final caches only
    what was written before is left.
    """
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
        logits, tokens = item.logits[i + 1 : i + 2], greedy[i + 1 : i + 2]
        if other_from is not None and i + 1 >= other_from and item.full_logits is not None:
            stages = {k: v for k, v in stages.items() if tol.leaf_of(k) in tol.TOKEN_LEAVES}
            logits = item.full_logits[length - 1 : length]
            tokens = np.argmax(logits, axis=1)
        wants |= {f"{prefix}.{k}": live_rows(v, k, length) for k, v in stages.items()}
        if len(logits):
            wants[f"{prefix}.logits"], wants[f"{prefix}.greedy_tokens"] = logits, tokens
    length = len(item.prompt.tokens) + len(item.steps)
    parting = length if other_from is None else len(item.prompt.tokens) - 1 + other_from
    for name, value in item.final_cache.items():
        rows = live_rows(value, name, length)
        if parting < length and tol.leaf_of(name) in running.ENTRY_STAGES:
            rows = rows[: parting // running.ratio_of(runner, name)]
        elif parting < length:
            rows = rows[: max(0, len(rows) - (length - parting))]
        wants[f"final_cache.{name}"] = rows
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
    runner: Runner,
    items: Sequence[Decoding],
    variant: Variant,
    *,
    state: State,
    capture: tuple[str, ...],
    branches: Mapping[int, int],
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
        for own, i in zip(forced, active, strict=True):
            if own and index + 1 >= branches.get(i, len(items[i].greedy)):
                own |= {n: variant.starts[i][f"{prefix}.{n}"] for n in names}  # recorded ids are of the other branch
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
