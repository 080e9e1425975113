"""minProperties and maxProperties beside properties that may be left out: every combination, against a validator."""

import itertools
import json
import random

import jsonschema
import pytest

from deepinfer_jax.sampling.grammar.json_counts import MAX_CHOICES, MAX_NAMES, without_counts

OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}
NAMES = ("a", "b", "c", "d", "r", "x1", "z")  # the first four may be declared, r required only, x1 fits a pattern


def random_schema(rng: random.Random) -> dict:
    """Any combination of the keywords about properties, with at least one bound."""
    declared = {name: rng.choice([True, INTEGER, INTEGER, INTEGER, False]) for name in rng.sample(NAMES[:4], 3)}
    schema = {
        "type": rng.choice(["object", ["object", "null"], None]),
        "properties": declared,
        "required": rng.sample([*declared, "r"], rng.choice([0, 0, 1, 2])),
        "additionalProperties": rng.choice([None, True, False, False, INTEGER]),
        "patternProperties": rng.choice([None, None, {"^x": INTEGER}]),
        "minProperties": rng.choice([None, 0, 1, 2, 3, 4]),
        "maxProperties": rng.choice([None, 0, 1, 2, 3, 5]),
    }
    kept = {keyword: value for keyword, value in schema.items() if value is not None}
    return kept if kept.keys() & {"minProperties", "maxProperties"} else random_schema(rng)


def answers(schema: dict) -> list[dict]:
    """Objects with every set of names, in the order in which they are written."""
    order = [*schema["properties"], *(name for name in schema["required"] if name not in schema["properties"])]
    order += [name for name in NAMES if name not in order]
    sets = itertools.chain.from_iterable(itertools.combinations(order, count) for count in range(len(order) + 1))
    return [dict.fromkeys(names, 1) for names in sets]


def is_allowed(schema: dict, answer: dict) -> bool:
    """Valid, and also where all names that are neither declared nor required count once at most."""
    sure = sum(name in schema["properties"] or name in schema["required"] for name in answer)
    counted = min(len(answer), sure + 1)
    return counted >= schema.get("minProperties", 0) and jsonschema.Draft202012Validator(schema).is_valid(answer)


def test_any_combination_is_enforced_or_has_no_answer(tools):
    rng = random.Random(8)
    num_refused = num_several = 0
    for _ in range(70):
        schema = random_schema(rng)
        allowed = [is_allowed(schema, answer) for answer in answers(schema)]
        try:
            grammar = tools.compile("json", schema, whitespace=0)
        except ValueError as error:
            assert not any(allowed), (schema, error)
            num_refused += 1
            continue
        num_several += sum(allowed) > 1
        for answer, is_good in zip(answers(schema), allowed, strict=True):
            assert tools.accepts(grammar, json.dumps(answer, separators=(",", ":"))) is is_good, (schema, answer)
        others = [tools.accepts(grammar, "null"), tools.accepts(grammar, "[1]")]
        assert others == [schema.get("type") != "object", "type" not in schema], schema
    assert num_refused > 10 and num_several > 20


def test_bounds_inside_other_schemas(tools):
    """In a part that is referenced, needs itself, and is joined with another one."""
    node = {
        **OBJECT,
        "properties": {"n": {"$ref": "#/$defs/node"}, "v": INTEGER, "w": INTEGER},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    }
    schema = {"type": "array", "items": {"$ref": "#/$defs/node", "required": ["v"]}, "$defs": {"node": node}}
    grammar, validator = tools.compile("json", schema, whitespace=0), jsonschema.Draft202012Validator(schema)
    for text, is_good in {
        '[{"v":1}]': True,
        '[{"n":{"n":{"w":1}},"v":1}]': True,
        '[{"n":{},"v":1}]': False,
        '[{"n":{"n":{"v":1},"v":1,"w":1},"v":1}]': False,
        '[{"n":{"w":1}}]': False,
        '[{"n":{"w":1},"v":1,"w":1}]': False,
        '[{"n":{"w":1,"z":1},"v":1}]': False,
    }.items():
        assert tools.accepts(grammar, text) is is_good, text
        assert validator.is_valid(json.loads(text)) is is_good, text


def test_whole_answers_keep_the_bounds(tools):
    schema = {
        **OBJECT,
        "properties": {name: {"enum": [1, 2]} for name in "abcdef"},
        "minProperties": 3,
        "maxProperties": 4,
        "additionalProperties": False,
    }
    grammar = tools.compile("json", schema, whitespace=0)
    sizes = {len(json.loads(tools.walk(grammar, random.Random(seed), max_tokens=200) or "{}")) for seed in range(20)}
    assert sizes == {3, 4}


def test_oneof_sees_through_the_choices(tools):
    """Branches that differ in a required property exclude each other still."""
    first = {**OBJECT, "properties": {"t": {"const": 1}, "a": True, "b": True}, "required": ["t"], "minProperties": 2}
    second = {**first, "properties": {**first["properties"], "t": {"const": 2}}, "maxProperties": 2}
    grammar = tools.compile("json", {"oneOf": [first, second]}, whitespace=0)
    texts = ('{"t":1}', '{"t":1,"a":1,"b":1}', '{"t":2,"a":1}', '{"t":2,"a":1,"b":1}')
    assert [tools.accepts(grammar, text) for text in texts] == [False, True, True, False]


@pytest.mark.parametrize(
    "num_names, bounds, num_choices",
    [
        (4, {"minProperties": 0}, 1),
        (4, {"minProperties": 1}, 5),  # the fifth: none of them, and another name
        (4, {"minProperties": 1, "additionalProperties": False}, 4),
        (4, {"maxProperties": 9, "additionalProperties": False}, 1),
        (4, {"maxProperties": 3, "additionalProperties": False}, 4),
        (4, {"minProperties": 2, "maxProperties": 2, "additionalProperties": False}, 6),
        (8, {"maxProperties": 8}, 256),
        (99, {"minProperties": 1, "additionalProperties": False}, 99),
    ],
)
def test_choices_are_as_few_as_the_bounds_need(num_names, bounds, num_choices):
    schema = {"properties": dict.fromkeys(map(str, range(num_names)), True), **bounds}
    assert len(without_counts(schema, "")) == num_choices <= MAX_CHOICES


@pytest.mark.parametrize(
    "num_names, bounds, text",
    [
        (9, {"maxProperties": 9}, f"#/maxProperties: .*the 9 prop.* more than {MAX_CHOICES} cases, the limit for 9 "),
        (
            9,
            {"maxProperties": 9},
            "require more of them, set additionalProperties to false, or leave maxProperties out",
        ),
        (12, {"minProperties": 6, "additionalProperties": False}, "require more of them, or leave minProperties out"),
        (200, {"minProperties": 1}, f"more than {MAX_NAMES // 200} cases, the limit for 200 declared names"),
        (
            3,
            {"minProperties": 5},
            "#/minProperties: minProperties 5 is enforced up to 4 here .the declared names and one",
        ),
        (3, {"minProperties": 4, "additionalProperties": False}, "up to 3 here .the declared names.; lower it or"),
        (3, {"required": ["0", "1"], "maxProperties": 1}, "#/maxProperties: .* below the number of required names, 2"),
    ],
)
def test_refused(tools, num_names, bounds, text):
    schema = {**OBJECT, "properties": dict.fromkeys(map(str, range(num_names)), INTEGER), **bounds}
    with pytest.raises(ValueError, match=text):
        tools.compile("json", schema)


def test_bounds_of_what_is_no_object_have_no_effect(tools):
    schema = {"type": "integer", "properties": {"a": True}, "minProperties": 9}
    assert tools.accepts(tools.compile("json", schema), "5")
