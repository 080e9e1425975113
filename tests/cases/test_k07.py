"""K07: length bounds beside a pattern; white space between the tokens of a JSON text."""

import json
import re

import jsonschema
import pytest

from deepinfer_jax import SamplingParams
from tests.cases import forcing

MAX_WHITESPACE = 8
# All 200 seeds, most of them with --all only.
SEEDS = [pytest.param(range(30), id="seeds"), pytest.param(range(30, 200), id="more-seeds", marks=pytest.mark.slow)]


def schema_of(**bounds: int) -> dict:
    return {
        "type": "object",
        "properties": {"k": {"type": "string", "pattern": "^[a-z]+$", **bounds}},
        "required": ["k"],
        "additionalProperties": False,
    }


BOUNDED, FREE = schema_of(minLength=2, maxLength=3), schema_of()
SCHEMAS = {"bounded": BOUNDED, "free": FREE}


def so_args(schema: dict) -> dict:
    return {"schema_type": "json", "schema": json.dumps(schema)}


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_that_stop_are_valid_and_white_space_comes_in_short_runs(llm, name, seeds):
    schema = SCHEMAS[name]
    params = [SamplingParams(temperature=1.0, seq_seed=seed, max_tokens=80, so_args=so_args(schema)) for seed in seeds]
    results = forcing.run(llm, params)
    texts = [forcing.text_of(outputs) for outputs in results]
    reasons = [outputs[-1].finish_reason for outputs in results]
    assert set(reasons) <= {"stop", "length"}
    stopped = [text for text, reason in zip(texts, reasons, strict=True) if reason == "stop"]
    assert len(set(stopped)) > len(seeds) // 4, "answers are diverse, and many end"
    for text in stopped:
        jsonschema.validate(json.loads(text), schema)
    if schema is BOUNDED:
        assert {len(json.loads(text)["k"]) for text in stopped} == {2, 3}
    longest = [max(map(len, re.findall(r"\s+", text)), default=0) for text in texts]
    assert 1 < max(longest) <= MAX_WHITESPACE


def test_a_string_ends_within_its_bounds(llm):
    grammar = {"so_args": so_args(BOUNDED)}
    assert forcing.texts(forcing.next_row(llm, '{"k": "abc', **grammar)) == {b'"'}
    short = forcing.texts(forcing.next_row(llm, '{"k": "a', **grammar))
    assert short == {bytes([letter]) for letter in range(ord("a"), ord("z") + 1)}
    assert b'"' in forcing.texts(forcing.next_row(llm, '{"k": "ab', **grammar))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_full_run_of_white_space_is_not_continued(llm, schema):
    grammar = {"so_args": so_args(SCHEMAS[schema])}
    assert forcing.texts(forcing.next_row(llm, "{" + " " * MAX_WHITESPACE, **grammar)) == {b'"'}
    one_less = forcing.texts(forcing.next_row(llm, "{" + " " * (MAX_WHITESPACE - 1), **grammar))
    assert one_less == {b'"', b" ", b"\n", b"\t", b"\r", b' "'}
