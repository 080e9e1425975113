"""Compares the product's forward with every recorded stage of a fixture directory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.runtime import NUMERICS, RuntimeConfig
from deepinfer_jax.testing import runner as running
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check, Comparison, check_all
from deepinfer_jax.testing.fixtures import (
    KINDS,
    OTHER_KINDS,
    Decoding,
    Fixtures,
    Recorded,
    decodings,
    file_name,
    open_fixtures,
    prefill_sequences,
)
from deepinfer_jax.testing.report import Line, Report, lines_of
from deepinfer_jax.testing.runner import Runner, make_runner
from deepinfer_jax.testing.verify_fed import verify_fed
from deepinfer_jax.testing.verify_whole import NO_STAGES, compare_whole, decode_part, full_prefill, prefill_part

# What has no recorded inputs, so that nothing can be demanded of it where roundings decide between branches.
_NO_INPUTS = {
    "prefill_light": "prefill_light: layers behind the first one without recorded streams",
    "decode": "decode: steps without a complete capture (but for hashes), full_prefill_logits, and final_cache of "
    "layers after the first: no recorded inputs; see the remarks",
    "edge": "edge: only logits are recorded; see the remarks",
}

type Progress = Callable[[str], None]


def verify(
    fixture_dir: str | Path, mode: str, *, parts: tuple[str, ...] = KINDS, progress: Progress = lambda _: None
) -> Report:
    """Every recorded stage of a directory against the product's own forward.

    fp32_noqdq and fp32 run the whole model; bf16 and q run each sublayer from its recorded inputs.
    parts: the kinds of recordings to look at. progress: called with the name of each piece of work as it begins.
    Raises ValueError for a directory, mode or part that cannot be compared.
    """
    fixtures = open_fixtures(Path(fixture_dir), mode)
    kinds = _chosen_kinds(fixtures, parts)
    prefills = {kind: prefill_sequences(fixtures, kind) for kind in kinds if kind.startswith("prefill")}
    decodes = {kind: decodings(fixtures, kind) for kind in kinds if not kind.startswith("prefill")}
    progress("loading weights")
    runner = _make_runner(fixtures, prefills, decodes)
    lines = _token_map_lines(fixtures, runner)
    if NUMERICS[mode].rounds_activations:
        more, remarks = verify_fed(runner, prefills, decodes, progress=progress)
        lines += more
    else:
        more, remarks = _verify_whole(runner, prefills, decodes, progress=progress)
        lines += more
    return Report(
        directory=str(fixture_dir),
        mode=mode,
        lines=tuple(lines),
        remarks=tuple(remarks),
        not_covered=tuple(_not_covered(fixtures, kinds)),
    )


def _chosen_kinds(fixtures: Fixtures, parts: tuple[str, ...]) -> list[str]:
    unknown = [part for part in parts if part not in KINDS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r} is unknown; choose among {', '.join(KINDS)}")
    kinds = [kind for kind in KINDS if kind in parts and kind in fixtures.files]
    if not kinds:
        raise ValueError(f"{fixtures.directory} has none of {', '.join(parts)} in mode {fixtures.mode!r}")
    return kinds


def _make_runner(fixtures: Fixtures, prefills: dict[str, list[Recorded]], decodes: dict[str, list[Decoding]]) -> Runner:
    """One set of sizes that every recording fits in."""
    groups = [[len(s.tokens) for s in group] for group in prefills.values()]
    groups += [[len(d.prompt.tokens) for d in group] for group in decodes.values()]
    ends = [len(d.prompt.tokens) + len(d.greedy) for group in decodes.values() for d in group]
    fulls = [0 if d.full_logits is None else len(d.full_logits) for group in decodes.values() for d in group]
    params = load_params(fixtures.directory, fixtures.config, weights_file=fixtures.weights_file, progress=False)
    config = RuntimeConfig(model=fixtures.config, numerics=fixtures.mode)  # pyright: ignore[reportArgumentType]
    return make_runner(
        params,
        config,
        num_rows=max([sum(group) for group in groups] + [sum(fulls)]),
        num_slots=max(len(group) for group in groups),
        max_len=max([length for group in groups for length in group] + ends),
    )


def _verify_whole(
    runner: Runner,
    prefills: dict[str, list[Recorded]],
    decodes: dict[str, list[Decoding]],
    *,
    progress: Progress,
) -> tuple[list[Line], list[str]]:
    block, state = runner.config.model.candidate_block_size, running.empty_state(runner)
    parts = [prefill_part(kind, runner, sequences, state=state) for kind, sequences in prefills.items()]
    for kind, items in decodes.items():
        # Where logits are all that was recorded, the program without captured stages is compared: the one that serves.
        has_stages = any(step.stages for item in items for step in item.steps)
        capture = running.ALL_STAGES if has_stages else ()
        parts.append(decode_part(kind, runner, items, state=state, capture=capture))
        if fulls := [recorded for item in items if (recorded := full_prefill(item))]:
            parts.append(prefill_part(f"{kind}: one prefill", runner, fulls, state=state))
    lines: list[Line] = []
    remarks: list[str] = []
    for part in parts:
        checks, more = compare_whole(part, candidate_block=block, tick=progress)
        lines += lines_of(part.name, checks)
        remarks += more
    return lines, remarks


def _token_map_lines(fixtures: Fixtures, runner: Runner) -> list[Line]:
    """The map from tokens to the ids that Engram hashes, built from the tokenizer beside the weights."""
    if fixtures.token_map is None or not fixtures.config.engram_layer_ids:
        return []
    got = {"token_map": np.asarray(runner.params.engram.token_map)}
    comparison = Comparison(sequence="tokenizer", got=got, want={"token_map": fixtures.token_map})
    checks: list[Check] = check_all(comparison, feeding="none", candidate_block=1)
    return lines_of("prompts", checks)


def _not_covered(fixtures: Fixtures, kinds: list[str]) -> list[str]:
    """What the directory holds, or should hold, that was not compared."""
    found = [f"{file_name(kind, fixtures.mode)}: absent or not asked for" for kind in KINDS if kind not in kinds]
    for kind in OTHER_KINDS:
        if (fixtures.directory / file_name(kind, fixtures.mode)).exists():
            found.append(f"{file_name(kind, fixtures.mode)}: the {kind} part of the model is not compared yet")
    if NUMERICS[fixtures.mode].rounds_activations:
        found += [text for kind, text in _NO_INPUTS.items() if kind in kinds]
    recorded = {tol.leaf_of(name) for kind in kinds for name in fixtures.files[kind]}
    found += [f"{leaf}: not a stage of the forward; attention shows it" for leaf in sorted(recorded & NO_STAGES)]
    if "literal_reference_logits" in recorded:
        found.append("literal_reference_logits: the release's stale index keys in decode, not to be matched")
    return found
