"""A JSON schema checked keyword by keyword and rewritten to the part that the backend enforces.

`rewrite_schema` refuses what would not be enforced and returns a schema that holds only what is: local
references collected under `$defs`, patterns as exact expressions, `oneOf` as `anyOf` of proven
disjoint branches, branches that can never end taken out.
"""

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from deepinfer_jax.sampling.grammar import json_keywords as K
from deepinfer_jax.sampling.grammar.json_counts import ABOUT_PROPERTIES, COUNTED, without_counts
from deepinfer_jax.sampling.grammar.json_formats import FORMATS
from deepinfer_jax.sampling.grammar.json_keywords import SchemaError, child, schema_error
from deepinfer_jax.sampling.grammar.json_logic import are_disjoint, finite_part

Schema = bool | dict[str, Any]

_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewrittenSchema:
    """What the backend gets, and where each part came from."""

    schema: dict[str, Any]
    places: dict[str, tuple[str, ...]]  # keyword -> JSON pointers at which it is used
    definitions: dict[str, str]  # name under the new $defs -> JSON pointer in the given schema


def rewrite_schema(text: str) -> RewrittenSchema:
    """The enforced form of a JSON schema; SchemaError names keyword and JSON pointer of what is refused."""
    root = _parse(text)
    walker = _Walker(root)
    schema = walker.walk(root, "")
    definitions: dict[str, Schema] = {}
    while len(definitions) < len(walker.names):
        pointer, name = list(walker.names.items())[len(definitions)]
        definitions[name] = walker.walk(walker.targets[pointer], pointer)
    for pointer, branches in walker.one_ofs:
        _check_one_of(pointer, branches, definitions)
    finite, finite_definitions = finite_part(schema, definitions)
    if finite is False:
        raise schema_error(
            "",
            "no finite JSON value satisfies it: the types of its parts conflict, a required part is not allowed, "
            f"or its recursion has no end; {walker.suspects()}",
        )
    top = {} if finite is True else dict(finite)
    if finite_definitions:
        top["$defs"] = finite_definitions
    return RewrittenSchema(
        schema=top,
        places={keyword: tuple(pointers) for keyword, pointers in walker.places.items()},
        definitions={name: pointer for pointer, name in walker.names.items()},
    )


def _parse(text: str) -> Schema:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise SchemaError(f"JSON schema: the key {key!r} stands twice in one object; remove one")
            members[key] = value
        return members

    def refuse_constant(name: str) -> None:
        raise SchemaError(f"JSON schema: {name} is no JSON value; give a number")

    try:
        root = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"the schema is no JSON text: {error.msg} at line {error.lineno}, column {error.colno}; correct it"
        ) from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"the schema cannot be read as JSON: {error}; make it simpler") from error
    if not isinstance(root, dict | bool):
        raise schema_error("", f"a schema is an object, true or false, not {root!r}")
    return root


def _check_one_of(pointer: str, branches: list[Schema], definitions: dict[str, Schema]) -> None:
    for second in range(len(branches)):
        for first in range(second):
            if not are_disjoint(branches[first], branches[second], definitions):
                raise schema_error(
                    child(pointer, "oneOf"),
                    f"oneOf is enforced only when its branches exclude each other, and {first} and {second} are not "
                    "seen to; use anyOf, or give each branch a required property with a const of its own",
                )


class _Walker:
    """Checks and rewrites one schema after another, collecting the references on the way."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.names: dict[str, str] = {}  # pointer of a referenced schema -> its new name
        self.targets: dict[str, Schema] = {}
        self.places: dict[str, list[str]] = {}
        self.one_ofs: list[tuple[str, list[Schema]]] = []
        self.anchors = dict(_anchors(root, ""))

    def walk(self, schema: Any, pointer: str, depth: int = 0) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise schema_error(pointer, f"a schema is an object, true or false, not {schema!r}")
        if depth > _MAX_DEPTH:
            raise schema_error(pointer, f"schemas are nested deeper than {_MAX_DEPTH}; use $defs with $ref")
        out: dict[str, Any] = {}
        both: list[Schema] = []  # further schemas that must hold as well
        for keyword, value in schema.items():
            place = child(pointer, keyword)
            if keyword in K.ANNOTATIONS or (keyword.startswith("x-") and keyword not in K.REFUSED):
                continue
            if keyword in K.REFUSED:
                raise schema_error(place, f"the keyword {keyword!r} is not enforced; {K.REFUSED[keyword]}")
            if keyword not in K.ENFORCED:
                raise schema_error(place, f"the keyword {keyword!r} is unknown; correct its spelling or remove it")
            self.places.setdefault(keyword, []).append(place)
            _HANDLERS[keyword](self, out, both, value, place, depth + 1)
        self.check_together(schema, pointer)
        if any(keyword in out for keyword in COUNTED):
            both.extend(self.count_members(schema, out, pointer))
        if both:
            out["allOf"] = [*out.get("allOf", []), *both]
        return out

    def check_together(self, schema: dict[str, Any], pointer: str) -> None:
        """Rules between the keywords of one object."""
        for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
            if schema.get(low, 0) > schema.get(high, K.MAX_COUNT):
                raise schema_error(
                    child(pointer, low), f"{low} {schema[low]} is above {high} {schema[high]}; swap or correct them"
                )
        if "minimum" in schema and "maximum" in schema and schema["minimum"] > schema["maximum"]:
            given = f"minimum {schema['minimum']} is above maximum {schema['maximum']}"
            raise schema_error(child(pointer, "minimum"), f"{given}; swap or correct them")

    def count_members(self, schema: dict[str, Any], out: dict[str, Any], pointer: str) -> list[Schema]:
        """Takes the keywords about properties out of a rewritten schema; what must hold in their place."""
        types = _names_of(out.get("type", [name for name in K.TYPES if name != "integer"]))
        if "object" not in types:
            return []
        parts = {keyword: out.pop(keyword) for keyword in ABOUT_PROPERTIES if keyword in out}
        if "properties" in parts:  # they are in every branch
            at = child(pointer, "properties")
            parts["properties"] = {
                name: self.shared(member, schema["properties"][name], child(at, name))
                for name, member in parts["properties"].items()
            }
        branches = without_counts(parts, pointer)
        if len(branches) == 1:
            out.update(branches[0])
            return []
        others = [{"type": name} for name in types if name != "object"]
        return [{"anyOf": [*({"type": "object", **branch} for branch in branches), *others]}]

    def shared(self, rewritten: Schema, schema: Schema, pointer: str) -> Schema:
        """A schema that will stand in several places, as a reference."""
        return rewritten if isinstance(rewritten, bool) else {"$ref": self.reference_to(schema, pointer)}

    def suspects(self) -> str:
        """Where to look when the parts are fine and the whole is not."""
        keywords = ("required", "type", "allOf", "anyOf", "$ref", "minItems", "prefixItems", "additionalProperties")
        places = [f"#{place}" for keyword in keywords for place in self.places.get(keyword, [])]
        return f"look at {', '.join(places[:8])}" if places else "give a schema that something satisfies"

    def members(self, value: Any, place: str, depth: int) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise schema_error(place, f"{value!r} must be a list with at least one schema")
        return [self.walk(member, child(place, index), depth) for index, member in enumerate(value)]

    def mapping(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise schema_error(place, f"{value!r} must be an object of schemas")
        return value

    def reference(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise schema_error(place, f"{value!r} is no reference inside this schema; begin it with '#'")
        pointer = urllib.parse.unquote(value[1:])
        if pointer and not pointer.startswith("/"):
            if pointer not in self.anchors:
                raise schema_error(place, f"no schema has the $anchor {pointer!r}; correct the reference")
            pointer = self.anchors[pointer]
        target: Any = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and re.fullmatch("0|[1-9][0-9]*", key) and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise schema_error(place, f"{value!r} points to nothing (there is no {key!r}); correct the reference")
        return self.reference_to(target, pointer)

    def reference_to(self, schema: Any, pointer: str) -> str:
        """The new reference to the schema that stands at a pointer."""
        if pointer not in self.names:
            self.names[pointer] = f"d{len(self.names)}"
            self.targets[pointer] = schema
        return f"#/$defs/{self.names[pointer]}"


_Handler = Callable[[_Walker, dict[str, Any], list[Schema], Any, str, int], None]


def _type(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    names = _names_of(value)
    for name in names:
        if not isinstance(name, str) or name not in K.TYPES:
            raise schema_error(place, f"the type {name!r} is unknown; the types are {', '.join(K.TYPES)}")
    if not names or len(set(names)) < len(names):
        raise schema_error(place, f"{value!r} must name at least one type, and none twice")
    if "number" in names:  # holds integers too
        names = [name for name in names if name != "integer"]
    out["type"] = names if len(names) > 1 else names[0]


def _names_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _enum(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if not isinstance(value, list) or not value:
        raise schema_error(place, f"{value!r} must be a list with at least one value")
    K.check_value(value, place)
    out["enum"] = value


def _const(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    K.check_value(value, place)
    out["const"] = value


def _number(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    keyword = place.rsplit("/", 1)[1]
    out[keyword] = K.check_number(value, place)
    if keyword == "multipleOf" and out[keyword] <= 0:
        raise schema_error(place, f"{value!r} must be above 0")


def _count(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    out[place.rsplit("/", 1)[1]] = K.check_count(value, place)


def _pattern(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    out["pattern"] = K.search_regex(value, place)


def _format(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if not isinstance(value, str) or value not in FORMATS:
        raise schema_error(
            place, f"the format {value!r} is not enforced; use pattern, or one of {', '.join(sorted(FORMATS))}"
        )
    both.append({"pattern": K.search_regex(f"^(?:{FORMATS[value]})$", place)})


def _one(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if isinstance(value, list):
        raise schema_error(place, "a list of schemas here is of an older draft; name it prefixItems")
    out[place.rsplit("/", 1)[1]] = walker.walk(value, place, depth)


def _list(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    keyword = place.rsplit("/", 1)[1]
    branches = walker.members(value, place, depth)
    if keyword == "oneOf":
        walker.one_ofs.append((place.rsplit("/", 1)[0], branches))
        both.append({"anyOf": branches})
    else:
        out[keyword] = branches


def _unique(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if value is not False:
        raise schema_error(place, "the keyword 'uniqueItems' is not enforced; use enum with the allowed arrays")


def _properties(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    for name in walker.mapping(value, place):
        K.check_text(name, child(place, name))
    out["properties"] = {name: walker.walk(member, child(place, name), depth) for name, member in value.items()}


def _patterns(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    rewritten: dict[str, Schema] = {}
    for pattern, member in walker.mapping(value, place).items():
        rewritten[K.search_regex(pattern, child(place, pattern))] = walker.walk(member, child(place, pattern), depth)
    if len(rewritten) < len(value):
        raise schema_error(place, "two patterns match the same names; merge them")
    out["patternProperties"] = rewritten


def _required(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise schema_error(place, f"{value!r} must be a list of names")
    if len(set(value)) < len(value):
        raise schema_error(place, f"{value!r} has a name twice; remove one")
    for index, name in enumerate(value):
        K.check_text(name, child(place, index))
    out["required"] = value


def _ref(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    out["$ref"] = walker.reference(value, place)


def _draft(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if not isinstance(value, str) or not any(name in value for name in K.DRAFTS):
        raise schema_error(place, f"the dialect {value!r} is unknown; use 2020-12 or leave it out")


def _id(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    if place != "/$id":
        raise schema_error(place, "the keyword '$id' is enforced at the top only; use $defs with $ref")


def _nothing(walker: _Walker, out: dict[str, Any], both: list[Schema], value: Any, place: str, depth: int) -> None:
    """Holds or names schemas that are checked where they are referenced."""


_HANDLERS: dict[str, _Handler] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "pattern": _pattern,
    "format": _format,
    "uniqueItems": _unique,
    "properties": _properties,
    "patternProperties": _patterns,
    "required": _required,
    "$ref": _ref,
    "$schema": _draft,
    "$id": _id,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("items", "additionalProperties"), _one),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _list),
    **dict.fromkeys(("$anchor", "$defs", "definitions"), _nothing),
}


def _anchors(node: Any, pointer: str) -> list[tuple[str, str]]:
    """Each $anchor with the pointer of its schema."""
    found: list[tuple[str, str]] = []
    stack = [(node, pointer)]
    while stack:
        here, at = stack.pop()
        if isinstance(here, dict):
            if isinstance(here.get("$anchor"), str):
                found.append((here["$anchor"], at))
            stack.extend((member, child(at, key)) for key, member in here.items() if key not in ("const", "enum"))
        elif isinstance(here, list):
            stack.extend((member, child(at, index)) for index, member in enumerate(here))
    return found
