"""Every keyword of JSON Schema 2020-12: enforced on a good and a bad text, or refused by name.

The table in docs/structured_output.md is made from `KEYWORDS`; this file run as a program prints it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_specifications
import pytest

from deepinfer_jax.sampling.grammar import json_keywords as K
from deepinfer_jax.sampling.grammar.json_formats import FORMATS

DOC = Path(__file__).parents[3] / "docs" / "structured_output.md"
BEGIN, END = "<!-- keywords: begin -->", "<!-- keywords: end -->"


@dataclasses.dataclass(frozen=True)
class Enforced:
    """A schema, texts that it must allow, texts that it must not; `note` goes into the documentation."""

    schema: Any
    good: tuple[str, ...]
    bad: tuple[str, ...]
    note: str = ""
    stricter: tuple[str, ...] = ()  # valid by the standard, not allowed by us


@dataclasses.dataclass(frozen=True)
class Refused:
    """A schema that is refused with the keyword's JSON pointer."""

    schema: Any
    at: str


@dataclasses.dataclass(frozen=True)
class Ignored:
    """An annotation: it says nothing about which values are valid."""

    value: Any


OBJECT = {"type": "object"}
STRING = {"type": "string"}
TWO = {"properties": {"a": True, "b": True}}
REF = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}

KEYWORDS: dict[str, tuple[Enforced | Refused | Ignored, ...]] = {
    # core
    "$schema": (
        Enforced(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **STRING},
            ('"a"',),
            ("1",),
            "2020-12, 2019-09, draft-07 and draft-06; all are read as 2020-12",
        ),
        Refused({"$schema": "http://json-schema.org/draft-04/schema#"}, "/$schema"),
    ),
    "$id": (
        Enforced({"$id": "http://x.example/s", **STRING}, ('"a"',), ("1",), "at the top only"),
        Refused({"properties": {"a": {"$id": "http://x.example/a"}}}, "/properties/a/$id"),
    ),
    "$ref": (
        Enforced(
            REF,
            ("5",),
            ('"a"', "1.5"),
            "inside the schema (`#`, `#/pointer`, `#anchor`), with or without other keywords beside it",
        ),
        Enforced({**REF, "minimum": 3}, ("3",), ("2", '"a"')),
        Enforced({"type": ["array"], "items": {"$ref": "#"}}, ("[]", "[[],[[]]]"), ("[1]",)),
        Refused({"$ref": "http://x.example/other"}, "/$ref"),
        Refused({"$ref": "#/$defs/none"}, "/$ref"),
    ),
    "$anchor": (Enforced({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "integer"}}}, ("5",), ("1.5",)),),
    "$defs": (Enforced(REF, ("5",), ('"a"',), "checked where it is referenced"),),
    "definitions": (
        Enforced({"$ref": "#/definitions/n", "definitions": {"n": STRING}}, ('"a"',), ("5",), "as `$defs`"),
    ),
    "$dynamicRef": (Refused({"$dynamicRef": "#n"}, "/$dynamicRef"),),
    "$dynamicAnchor": (Refused({"items": {"$dynamicAnchor": "n"}}, "/items/$dynamicAnchor"),),
    "$vocabulary": (Refused({"$vocabulary": {}}, "/$vocabulary"),),
    "$comment": (Ignored("x"),),
    # any type
    "type": (
        Enforced({"type": ["integer", "null"]}, ("5", "null"), ("1.5", '"a"'), "a name or a list of names"),
        Enforced({"type": "integer"}, ("0", "-12"), ("01", "1.5"), stricter=("1.0", "1e2")),
        Refused({"type": "strnig"}, "/type"),
        Refused({"items": {"type": []}}, "/items/type"),
    ),
    "enum": (
        Enforced({"enum": [1, "a", {"x": [None]}]}, ("1", '"a"', '{"x": [null]}'), ("2", '"b"', "{}")),
        Refused({"enum": []}, "/enum"),
        Refused({"enum": [1, 2**53 + 1]}, "/enum/1"),
        Refused({"enum": ["\x01"]}, "/enum/0"),
    ),
    "const": (
        Enforced({"const": [1, {"b": True}]}, ('[1,{"b":true}]',), ('[1,{"b":false}]', "[1]")),
        Refused({"const": {"a": 1e300}}, "/const/a"),
    ),
    "allOf": (
        Enforced(
            {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
            ("3", "5"),
            ("2", "6", '"a"'),
            "as one schema with all keywords",
        ),
        Refused({"allOf": []}, "/allOf"),
    ),
    "anyOf": (Enforced({"anyOf": [{"type": "integer", "minimum": 3}, STRING]}, ("3", '"a"'), ("2", "null")),),
    "oneOf": (
        Enforced(
            {
                "oneOf": [
                    {**OBJECT, "properties": {"t": {"const": 1}}, "required": ["t"]},
                    {**OBJECT, "properties": {"t": {"const": 2}, "x": STRING}, "required": ["t", "x"]},
                ]
            },
            ('{"t": 1}', '{"t": 2, "x": ""}'),
            ('{"t": 2}', '{"t": 3, "x": ""}'),
            "only when the branches are seen to exclude each other: by type, range, `const`, `enum`, "
            "or by a required property that differs so",
        ),
        Refused({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
    ),
    "not": (Refused({"not": STRING}, "/not"),),
    "if": (Refused({"if": STRING, "then": {"minLength": 1}}, "/if"),),
    "then": (Refused({"then": {"minLength": 1}}, "/then"),),
    "else": (Refused({"else": {"minLength": 1}}, "/else"),),
    # numbers
    "minimum": (
        Enforced(
            {"type": "number", "minimum": -1.5},
            ("-1.5", "0", "7.25"),
            ("-1.51", "-2"),
            "numbers with a bound are written without exponent; bounds up to 2^53",
            stricter=("1e1",),
        ),
        Enforced({"type": "integer", "minimum": 10, "maximum": 12}, ("10", "12"), ("9", "13", "100")),
        Refused({"type": "integer", "minimum": 5, "maximum": 3}, "/minimum"),
        Refused({"minimum": "5"}, "/minimum"),
    ),
    "maximum": (Enforced({"type": "number", "maximum": 0.1}, ("0.1", "0.05", "-9"), ("0.11", "1")),),
    "exclusiveMinimum": (
        Enforced({"type": "integer", "exclusiveMinimum": 5}, ("6",), ("5", "4")),
        Refused({"minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum"),
    ),
    "exclusiveMaximum": (Enforced({"type": "number", "exclusiveMaximum": 2}, ("1.99",), ("2", "2.0", "3")),),
    "multipleOf": (
        Enforced({"type": "integer", "multipleOf": 3, "maximum": 20}, ("6", "-3", "0"), ("5", "21")),
        Enforced({"type": "number", "multipleOf": 0.5}, ("1.5", "2"), ("1.25",)),
        Refused({"multipleOf": 0}, "/multipleOf"),
    ),
    # strings
    "minLength": (
        Enforced(
            {**STRING, "minLength": 2},
            ('"ab"', '"é\\n"'),
            ('"a"', '"\\n"'),
            "characters, an escape is one; together with `pattern` and `format`",
        ),
        Refused({"minLength": 3, "maxLength": 2}, "/minLength"),
        Refused({"minLength": -1}, "/minLength"),
    ),
    "maxLength": (Enforced({**STRING, "pattern": "^[a-z]+$", "maxLength": 2}, ('"ab"',), ('"abc"', '"A"')),),
    "pattern": (
        Enforced(
            {**STRING, "pattern": "b[0-9]"},
            ('"ab1c"', '"b2"', '"\\nb1"'),
            ('"ab"', '"b"'),
            "found anywhere in the string, as the standard says; what a pattern may hold is in the next table",
        ),
        Enforced({**STRING, "pattern": "^a|b$"}, ('"ax"', '"xb"'), ('"xa"', '"bx"')),
        Refused({"properties": {"k": {"pattern": "(?=a)a"}}}, "/properties/k/pattern"),
        Refused({"pattern": "["}, "/pattern"),
    ),
    "format": (
        Enforced(
            {**STRING, "format": "date"},
            ('"2024-02-29"', '"2000-02-29"'),
            ('"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2024-13-01"', '"x"'),
            ", ".join(f"`{name}`" for name in sorted(FORMATS)),
        ),
        Refused({"format": "regex"}, "/format"),
    ),
    # arrays
    "items": (
        Enforced({"type": "array", "items": {"type": "integer"}}, ("[]", "[1, 2]"), ('["a"]', '[1,"a"]')),
        Refused({"items": [STRING]}, "/items"),
    ),
    "prefixItems": (
        Enforced(
            {"type": "array", "prefixItems": [STRING, {"type": "null"}], "items": False},
            ("[]", '["a"]', '["a",null]'),
            ("[1]", '["a",null,1]'),
        ),
    ),
    "minItems": (Enforced({"type": "array", "minItems": 2}, ("[1,2]", "[1,2,3]"), ("[]", "[1]")),),
    "maxItems": (Enforced({"type": "array", "maxItems": 2}, ("[]", "[1,2]"), ("[1,2,3]",)),),
    "uniqueItems": (
        Enforced({"type": "array", "uniqueItems": False}, ("[1,1]",), (), "`false` only"),
        Refused({"uniqueItems": True}, "/uniqueItems"),
    ),
    "contains": (Refused({"contains": STRING}, "/contains"),),
    "minContains": (Refused({"minContains": 1}, "/minContains"),),
    "maxContains": (Refused({"maxContains": 1}, "/maxContains"),),
    "unevaluatedItems": (Refused({"unevaluatedItems": False}, "/unevaluatedItems"),),
    # objects
    "properties": (
        Enforced(
            {**OBJECT, "properties": {"a": {"type": "integer"}, "b": STRING}},
            ("{}", '{"a":1}', '{"a":1,"b":""}', '{"b":"","z":0}'),
            ('{"a":""}', '{"z":0,"b":1}'),
            "in the order of the schema, declared names before others",
            stricter=('{"b":"","a":1}',),
        ),
        Enforced({"properties": {"a": {"type": "integer"}}}, ("5", '"x"', '{"a":1}'), ('{"a":""}',)),
        Refused({"properties": {"a": 5}}, "/properties/a"),
        Refused({"properties": {"\x01": True}}, "/properties/\x01"),
    ),
    "patternProperties": (
        Enforced(
            {**OBJECT, "patternProperties": {"^x": STRING}, "additionalProperties": False},
            ("{}", '{"x1":"a"}'),
            ('{"x1":1}', '{"a":"a"}'),
            "patterns that no name matches twice",
        ),
        Refused({"patternProperties": {"(a)\\1": True}}, "/patternProperties/(a)\\1"),
    ),
    "additionalProperties": (
        Enforced(
            {**OBJECT, "properties": {"a": True}, "additionalProperties": STRING},
            ('{"a":1,"b":"x"}', '{"b":"x"}'),
            ('{"b":1}',),
            "names that are not declared may repeat",
        ),
        Enforced({**OBJECT, "properties": {"a": True}, "additionalProperties": False}, ('{"a":1}',), ('{"b":1}',)),
    ),
    "required": (
        Enforced(
            {**OBJECT, "properties": {"a": STRING}, "required": ["z"]},
            ('{"z":1}', '{"a":"","z":1}'),
            ("{}", '{"a":""}'),
        ),
        Refused({"required": "a"}, "/required"),
    ),
    "minProperties": (
        Enforced(
            {**OBJECT, **TWO, "minProperties": 2},
            ('{"a":1,"b":1}', '{"a":1,"z":1}', '{"a":1,"b":1,"z":1}'),
            ("{}", '{"a":1}', '{"z":1}'),
            "up to one more than the declared names: the others count once at most",
            stricter=('{"y":1,"z":1}',),
        ),
        Enforced({**OBJECT, **TWO, "additionalProperties": False, "minProperties": 1}, ('{"a":1}', '{"b":1}'), ("{}",)),
        Enforced({**OBJECT, "required": ["a"], "minProperties": 2}, ('{"a":1,"b":1}',), ('{"a":1}',)),
        Refused({"minProperties": 2}, "/minProperties"),
        Refused({"properties": dict.fromkeys("abcdefghijkl", True), "minProperties": 6}, "/minProperties"),
    ),
    "maxProperties": (
        Enforced(
            {**OBJECT, **TWO, "maxProperties": 1},
            ("{}", '{"a":1}', '{"b":1}', '{"z":1}'),
            ('{"a":1,"b":1}', '{"a":1,"z":1}', '{"y":1,"z":1}'),
            "with many optional properties only within a bound, see below",
        ),
        Enforced(
            {**OBJECT, "required": ["a"], "maxProperties": 2}, ('{"a":1}', '{"a":1,"b":1}'), ('{"a":1,"b":1,"c":1}',)
        ),
        Refused({"required": ["a", "b"], "maxProperties": 1}, "/maxProperties"),
        Refused({"properties": dict.fromkeys("abcdefghi", True), "maxProperties": 9}, "/maxProperties"),
    ),
    "propertyNames": (Refused({"propertyNames": STRING}, "/propertyNames"),),
    "dependentRequired": (Refused({"dependentRequired": {}}, "/dependentRequired"),),
    "dependentSchemas": (Refused({"dependentSchemas": {}}, "/dependentSchemas"),),
    "unevaluatedProperties": (Refused({"unevaluatedProperties": False}, "/unevaluatedProperties"),),
    # content and annotations
    "contentEncoding": (Refused({"contentEncoding": "base64"}, "/contentEncoding"),),
    "contentMediaType": (Refused({"contentMediaType": "text/html"}, "/contentMediaType"),),
    "contentSchema": (Refused({"contentSchema": True}, "/contentSchema"),),
    "title": (Ignored("x"),),
    "description": (Ignored("x"),),
    "default": (Ignored(5),),
    "deprecated": (Ignored(True),),
    "readOnly": (Ignored(True),),
    "writeOnly": (Ignored(True),),
    "examples": (Ignored([5]),),
    # of older drafts and of others
    "additionalItems": (Refused({"additionalItems": False}, "/additionalItems"),),
    "dependencies": (Refused({"dependencies": {}}, "/dependencies"),),
    "$recursiveRef": (Refused({"$recursiveRef": "#"}, "/$recursiveRef"),),
    "$recursiveAnchor": (Refused({"$recursiveAnchor": True}, "/$recursiveAnchor"),),
    "id": (Refused({"id": "x"}, "/id"),),
    "nullable": (Refused({"type": "string", "nullable": True}, "/nullable"),),
    "x-guidance": (Refused({"x-guidance": {}}, "/x-guidance"),),
    "x-anything": (Ignored({"a": 1}),),
    "anything else": (Refused({"maxLenght": 5}, "/maxLenght"),),
}
CASES = [(keyword, case) for keyword, cases in KEYWORDS.items() for case in cases]


def table() -> str:
    """The documentation's table."""
    lines = ["| keyword | what happens | note |", "|---|---|---|"]
    for keyword, cases in KEYWORDS.items():
        notes = [case.note for case in cases if isinstance(case, Enforced) and case.note]
        if any(isinstance(case, Enforced) for case in cases):
            what = "enforced"
        elif any(isinstance(case, Ignored) for case in cases):
            what = "no effect, as the standard says"
        else:
            what = "refused"
            notes = [K.REFUSED.get(keyword, "correct its spelling or remove it")]
        name = keyword if keyword == "anything else" else f"`{keyword}`"
        lines.append(f"| {name} | {what} | {'; '.join(notes)} |")
    return "\n".join(lines)


def test_the_documentation_holds_this_table():
    text = DOC.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == table()


def test_every_keyword_of_the_standard_is_here():
    found = set()
    for uri in jsonschema_specifications.REGISTRY:
        if "2020-12/meta/" in uri:
            contents = jsonschema_specifications.REGISTRY[uri].contents
            assert isinstance(contents, dict)
            found |= contents["properties"].keys()
    assert len(found) > 50
    assert found <= KEYWORDS.keys()


def test_every_keyword_of_the_code_is_here():
    ours = {*K.ENFORCED, *K.REFUSED, *K.ANNOTATIONS}
    assert ours <= KEYWORDS.keys()
    assert not set(K.ENFORCED) & set(K.REFUSED)


@pytest.mark.parametrize("keyword, case", CASES, ids=[f"{keyword}-{rank}" for rank, (keyword, _) in enumerate(CASES)])
def test_keyword(tools, keyword, case):
    if isinstance(case, Refused):
        with pytest.raises(ValueError) as caught:
            tools.compile("json", case.schema)
        pointer = "".join("/" + part.replace("~", "~0") for part in case.at.split("/")[1:])
        assert f"#{pointer}" in str(caught.value)
        return
    if isinstance(case, Ignored):
        case = Enforced({"type": "string", keyword: case.value}, ('"a"',), ("1",))
    grammar = tools.compile("json", case.schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(case.schema, format_checker=checker)
    for text in case.good:
        assert tools.accepts(grammar, text), text
        assert validator.is_valid(json.loads(text)), text
    for text in case.bad:
        assert not tools.accepts(grammar, text), text
    for text in case.stricter:
        assert not tools.accepts(grammar, text), text
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "schema, text",
    [
        ("{not json", "the schema is no JSON text: .* line 1, column 2"),
        ("", "the schema is no JSON text"),
        ("[1]", "at #: a schema is an object, true or false"),
        ('{"minimum": NaN}', "NaN is no JSON value"),
        ('{"type": "string", "type": "integer"}', "the key 'type' stands twice"),
        ("false", "no finite JSON value"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "its recursion has no end"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "the types of its parts conflict.*#/allOf/0/type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "its recursion has no end"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "look at #/pattern, #/minLength"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "look at #/required"),
        ({"patternProperties": {"a": True, "b": True}}, "look at #/patternProperties"),
        ({"type": "string", "pattern": "^\\x01$"}, "at #/pattern: .*no JSON string matches"),
    ],
)
def test_refused_schemas(tools, schema, text):
    with pytest.raises(ValueError, match=text):
        tools.compile("json", schema)


if __name__ == "__main__":
    print(table())
