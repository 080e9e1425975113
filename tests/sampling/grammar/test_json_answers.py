"""Whole answers: random walks through a schema end in JSON that an independent validator accepts."""

import json
import random
import re

import jsonschema
import pytest

NUM_SEEDS = 200
BOUNDED = {
    "type": "object",
    "properties": {"k": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}},
    "required": ["k"],
    "additionalProperties": False,
}
UNBOUNDED = {**BOUNDED, "properties": {"k": {"type": "string", "pattern": "^[a-z]+$"}}}
LETTERS = {b"%c" % byte for byte in range(ord("a"), ord("z") + 1)}
SPACES = {b" ", b"\t", b"\n", b"\r", b"  ", b" " * 4, b" " * 8, b" " * 16, b' "'}


@pytest.mark.parametrize("schema", [BOUNDED, UNBOUNDED], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("whitespace", [0, 3, 8])
def test_finished_answers_validate_and_have_no_long_white_space(tools, schema, whitespace):
    grammar = tools.compile("json", schema, whitespace=whitespace)
    validator = jsonschema.Draft202012Validator(schema)
    finished = 0
    for seed in range(NUM_SEEDS if whitespace == 8 else 20):
        answer = tools.walk(grammar, random.Random(seed), max_tokens=80)
        if answer is not None:
            finished += 1
            validator.validate(json.loads(answer))
            assert not re.search(rb"\s{%d}" % (whitespace + 1), answer)
    assert finished > 10


def test_lengths_beside_a_pattern(tools):
    grammar = tools.compile("json", BOUNDED)
    assert tools.texts(tools.force(grammar, '{"k": "abc')) == {b'"'}
    assert tools.texts(tools.force(grammar, '{"k": "a')) == LETTERS
    assert tools.texts(tools.force(grammar, '{"k": "ab')) == LETTERS | {b'"'}


def test_white_space_ends_at_the_bound(tools):
    grammar = tools.compile("json", UNBOUNDED)
    for run in (" " * 8, "\n\t\r " * 2):
        assert tools.texts(tools.force(grammar, "{" + run)) == {b'"'}
        assert tools.texts(tools.force(grammar, '{"k"' + run)) == {b":"}
    nearly = tools.texts(tools.force(grammar, "{" + " " * 6))
    assert nearly & SPACES == SPACES - {b" " * 4, b" " * 8, b" " * 16}
    assert not tools.texts(tools.force(tools.compile("json", UNBOUNDED, whitespace=0), "{")) & SPACES


def test_no_white_space_around_the_answer(tools):
    grammar = tools.compile("json", UNBOUNDED)
    assert tools.texts(grammar.matcher()) == {b"{", b'{"'}
    assert tools.texts(tools.force(grammar, '{"k":"ab"}')) == {b"EOS"}


def test_negative_white_space_is_refused(tools):
    with pytest.raises(ValueError, match="whitespace=-1 must be 0 or more"):
        tools.compile("json", "{}", whitespace=-1)


NESTED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["leaf", "é\n", 3]},
                "size": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 40},
                "when": {"type": "string", "format": "date"},
                "next": {"$ref": "#/$defs/node"},
                "list": {"type": "array", "items": {"type": ["integer", "null"]}, "maxItems": 3, "minItems": 1},
            },
            "required": ["kind"],
            "additionalProperties": {"type": "boolean"},
        }
    },
}
CHOICE = {
    "oneOf": [
        {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t", "x"]},
        {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"], "additionalProperties": False},
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False},
    ]
}
MERGED = {
    "type": "object",
    "allOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"a": {"minimum": 3}, "b": {"type": "string", "maxLength": 2}}, "additionalProperties": False},
    ],
}


@pytest.mark.parametrize("schema", [NESTED, CHOICE, MERGED], ids=["nested", "choice", "merged"])
def test_larger_schemas(tools, schema):
    grammar = tools.compile("json", schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    answers = [tools.walk(grammar, random.Random(seed), max_tokens=150) for seed in range(60)]
    finished = [answer for answer in answers if answer is not None]
    assert len(finished) > 5
    for answer in finished:
        validator.validate(json.loads(answer))


def test_a_property_has_one_spelling(tools):
    """An escaped name would pass a declared property off as an undeclared one."""
    grammar = tools.compile("json", {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert tools.accepts(grammar, '{"a":1,"b":"x"}')
    for text in ('{"\\u0061":"x"}', '{"b":1,"a":"x"}', '{"a":1,"a":2}'):
        assert not tools.accepts(grammar, text)


def test_lone_surrogates_are_not_spelled(tools):
    grammar = tools.compile("json", {"type": "string"})
    assert not tools.accepts(grammar, '"\\ud800"') and not tools.accepts(grammar, b'"\xed\xa0\x80"')
    assert tools.accepts(grammar, '"\U0001f600\\n\\\\\\""')


def test_branches_without_an_end_are_closed(tools):
    """A value that could only go on for ever is not begun."""
    loop = {"type": "object", "properties": {"n": {"$ref": "#/$defs/loop"}}, "required": ["n"]}
    schema = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/loop"}], "$defs": {"loop": loop}}
    assert b"{" not in tools.texts(tools.compile("json", schema).matcher())
    optional = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/loop"}},
        "$defs": {"loop": loop},
        "additionalProperties": False,
    }
    assert tools.texts(tools.force(tools.compile("json", optional, whitespace=0), "{")) == {b"}"}
