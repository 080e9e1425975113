"""What happens to each keyword of JSON Schema (2020-12, and older ones that are still met)."""

import math
from typing import Any

from deepinfer_jax.sampling.grammar.emit import emit_regex
from deepinfer_jax.sampling.grammar.nodes import ANY_TEXT, NOTHING, Ranges, complement, prune, restrict
from deepinfer_jax.sampling.grammar.regex_syntax import RegexError, parse_regex, resolve_anchors

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
ENFORCED = (
    *("type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "$anchor", "$defs", "definitions", "$schema", "$id"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
)
# Keyword -> what to do instead.
REFUSED: dict[str, str] = {
    "not": "describe what is allowed instead",
    "if": "use anyOf with one complete schema for each case",
    "then": "use anyOf with one complete schema for each case",
    "else": "use anyOf with one complete schema for each case",
    "contains": "describe every item with items or prefixItems",
    "minContains": "describe every item with items or prefixItems",
    "maxContains": "describe every item with items or prefixItems",
    "additionalItems": "use prefixItems with items",
    "unevaluatedItems": "use items: false",
    "unevaluatedProperties": "use additionalProperties: false",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "dependentRequired": "use anyOf with one complete schema for each case",
    "dependentSchemas": "use anyOf with one complete schema for each case",
    "dependencies": "use anyOf with one complete schema for each case",
    "contentEncoding": "use pattern",
    "contentMediaType": "use pattern",
    "contentSchema": "write the inner schema as part of this one",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $anchor with $ref",
    "$recursiveRef": 'use $ref: "#"',
    "$recursiveAnchor": 'use $ref: "#"',
    "$vocabulary": "leave it out",
    "id": "leave it out",
    "nullable": 'add "null" to type',
    "x-guidance": "leave it out; the options of the backend are fixed",
}
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
MAX_NUMBER = 2**53  # beyond it the backend rounds or refuses
MAX_COUNT = 100_000
# Written only as \uXXXX, an escape that is switched off: a name could be spelled in two ways with it.
_UNWRITABLE: Ranges = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))
WRITABLE: Ranges = complement(_UNWRITABLE)


class SchemaError(ValueError):
    """A JSON schema that is wrong or that cannot be enforced; the text has keyword and JSON pointer."""


def schema_error(pointer: str, problem: str) -> SchemaError:
    """The error for a place in the schema; the pointer of the whole schema is written as "#"."""
    return SchemaError(f"JSON schema, at #{pointer}: {problem}")


def child(pointer: str, *keys: str | int) -> str:
    """The JSON pointer of a member (RFC 6901 escapes)."""
    return pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def check_text(text: str, pointer: str) -> None:
    """Refuses text that a JSON string of the answer could not hold."""
    for char in text:
        if 0xD800 <= ord(char) <= 0xDFFF or any(low <= ord(char) <= high for low, high in _UNWRITABLE):
            raise schema_error(
                pointer,
                f"the text {text!r} holds U+{ord(char):04X}, which can be written only as an escape that is "
                "switched off; remove the character",
            )


def check_value(value: Any, pointer: str) -> None:
    """Refuses a value of const or enum that the backend could not write exactly."""
    if isinstance(value, str):
        check_text(value, pointer)
    elif isinstance(value, dict):
        for key, member in value.items():
            check_text(key, child(pointer, key))
            check_value(member, child(pointer, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            check_value(member, child(pointer, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(value, pointer)


def check_number(value: Any, pointer: str) -> int | float:
    """A number of a schema, whole floats as int; refused when the backend would round it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise schema_error(pointer, f"{value!r} must be a number")
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise schema_error(pointer, f"{value!r} is beyond 2^53, where numbers are not enforced exactly; use a string")
    if 0 < abs(value) < 1e-9:
        raise schema_error(pointer, f"{value!r} is closer to 0 than 1e-9, which is not enforced exactly; use 0")
    return int(value) if value == int(value) else value


def check_count(value: Any, pointer: str) -> int:
    """A length or a number of members."""
    number = check_number(value, pointer)
    if not isinstance(number, int) or number < 0:
        raise schema_error(pointer, f"{value!r} must be a whole number of 0 or more")
    if number > MAX_COUNT:
        raise schema_error(pointer, f"{value!r} is above the limit of {MAX_COUNT}; lower it or leave it out")
    return number


def search_regex(pattern: Any, pointer: str) -> str:
    """The backend's expression for strings in which the pattern is found somewhere."""
    if not isinstance(pattern, str):
        raise schema_error(pointer, f"{pattern!r} must be a string")
    try:
        node = resolve_anchors(parse_regex(pattern), pattern, filler=ANY_TEXT)
        node = prune(restrict(node, WRITABLE))
        if node == NOTHING:
            raise RegexError(f"no JSON string matches {pattern!r}; correct the pattern")
        return f"^(?:{emit_regex(node)})$"
    except ValueError as error:
        raise schema_error(pointer, str(error)) from error
