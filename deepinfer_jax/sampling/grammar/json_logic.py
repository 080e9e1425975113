"""Two questions about rewritten schemas: do two exclude each other, and can a value of one ever end."""

from collections.abc import Iterator
from typing import Any

Schema = bool | dict[str, Any]
Definitions = dict[str, Schema]

_ALL_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_COMPOUND = frozenset(("array", "object"))
_DEPTH = 6
_MAX_COMPARISONS = 2_000  # of two schemas, for one pair of branches
_PREFIX = "#/$defs/"


def are_disjoint(
    first: Schema, second: Schema, definitions: Definitions, depth: int = _DEPTH, budget: list[int] | None = None
) -> bool:
    """True when it is proven, with bounded work, that no value satisfies both schemas."""
    if first is False or second is False:
        return True
    budget = [_MAX_COMPARISONS] if budget is None else budget
    budget[0] -= 1
    if depth == 0 or budget[0] < 0 or first is True or second is True:
        return False
    for one, other in ((first, second), (second, first)):
        for part in _parts(one, definitions):
            branches = part.get("anyOf")
            if branches and all(are_disjoint(branch, other, definitions, depth - 1, budget) for branch in branches):
                return True
    mine, others = list(_parts(first, definitions)), list(_parts(second, definitions))
    if any(_exclude(one, other) for one in mine for other in others):
        return True
    shared = _types_of(mine) & _types_of(others)
    if not shared:
        return True
    if shared != {"object"}:
        return False
    required = {name for part in (*mine, *others) for name in part.get("required", [])}
    return any(
        are_disjoint(left, right, definitions, depth - 1, budget)
        for name in required
        for left in _properties(mine, name)
        for right in _properties(others, name)
    )


def finite_part(schema: Schema, definitions: Definitions) -> tuple[Schema, Definitions]:
    """The same schemas with everything that has no finite value replaced by False."""
    finite = _Finite(definitions)
    kept = {name: finite.prune(member) for name, member in definitions.items()}
    return finite.prune(schema), kept


def _parts(schema: Schema, definitions: Definitions, seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """All plain schemas that must hold for this one to hold, each referenced one once."""
    seen = set() if seen is None else seen
    if isinstance(schema, bool):
        if schema is False:
            yield {"enum": []}
        return
    yield schema
    for member in schema.get("allOf", []):
        yield from _parts(member, definitions, seen)
    name = schema.get("$ref", "").removeprefix(_PREFIX)
    if name and name not in seen:
        seen.add(name)
        yield from _parts(definitions[name], definitions, seen)


def _values(part: dict[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part.get("enum")


def _types(part: dict[str, Any]) -> frozenset[str]:
    """Types a value may have; an integer is a number."""
    types = _ALL_TYPES
    if "type" in part:
        names = part["type"] if isinstance(part["type"], list) else [part["type"]]
        types = frozenset("number" if name == "integer" else name for name in names)
    values = _values(part)
    return types if values is None else types & {_type_of(value) for value in values}


def _types_of(parts: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset.intersection(_ALL_TYPES, *map(_types, parts))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _same(first: Any, second: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and true is not 1."""
    if _type_of(first) != _type_of(second):
        return False
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return first == second


def _exclude(one: dict[str, Any], other: dict[str, Any]) -> bool:
    left, right = _values(one), _values(other)
    if left is not None and right is not None:
        return not any(_same(a, b) for a in left for b in right)
    both_numbers = _types(one) == _types(other) == {"number"}
    if not both_numbers:
        return False
    return _is_below(one, other) or _is_below(other, one)


def _is_below(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True when every number of the first is below every number of the second."""
    for high, low, is_strict in (
        ("maximum", "minimum", True),
        ("exclusiveMaximum", "minimum", False),
        ("maximum", "exclusiveMinimum", False),
        ("exclusiveMaximum", "exclusiveMinimum", False),
    ):
        if high in one and low in other:
            gap = other[low] - one[high]
            if gap > 0 or (gap == 0 and not is_strict):
                return True
    return False


def _properties(parts: list[dict[str, Any]], name: str) -> list[Schema]:
    """Schemas that the value of a name must satisfy, False where the name is not allowed."""
    found: list[Schema] = []
    for part in parts:
        if name in part.get("properties", {}):
            found.append(part["properties"][name])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            found.append(False)
    return found


class _Finite:
    """Which schemas have a finite value: the least fixed point over references and allowed types."""

    def __init__(self, definitions: Definitions) -> None:
        self.definitions = definitions
        self.known: dict[tuple[str, frozenset[str]], bool] = {}
        self.settled = 0  # entries of `known` that were asked for in the last round

    def has_value(self, schema: Schema) -> bool:
        while True:
            before = dict(self.known)
            answer = self.check(schema, _ALL_TYPES)
            for (name, types), value in list(self.known.items()):
                if not value:
                    self.known[name, types] = self.check(self.definitions[name], types)
            if self.known == before:
                return answer

    def check(self, schema: Schema, types: frozenset[str]) -> bool:
        if isinstance(schema, bool):
            return schema
        types = types & _types_of(list(_parts(schema, self.definitions)))
        if not types:
            return False
        if "$ref" in schema and not self.known.setdefault((schema["$ref"].removeprefix(_PREFIX), types), False):
            return False
        if not all(self.check(member, types) for member in schema.get("allOf", [])):
            return False
        if "anyOf" in schema and not any(self.check(member, types) for member in schema["anyOf"]):
            return False
        if types - _COMPOUND or _values(schema) is not None:
            return True
        return ("array" in types and self.check_array(schema)) or ("object" in types and self.check_object(schema))

    def check_array(self, schema: dict[str, Any]) -> bool:
        prefix = schema.get("prefixItems", [])
        count = schema.get("minItems", 0)
        needed = [*prefix[:count], *([schema.get("items", True)] if count > len(prefix) else [])]
        return all(self.check(member, _ALL_TYPES) for member in needed)

    def check_object(self, schema: dict[str, Any]) -> bool:
        properties = schema.get("properties", {})
        rest = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        needed = [properties.get(name, rest) for name in schema.get("required", [])]
        return all(self.check(member, _ALL_TYPES) for member in needed)

    def prune(self, schema: Schema) -> Schema:
        if not self.has_value(schema):
            return False
        if isinstance(schema, bool):
            return schema
        out = dict(schema)
        for keyword in ("items", "additionalProperties"):
            if keyword in out:
                out[keyword] = self.prune(out[keyword])
        for keyword in ("properties", "patternProperties"):
            if keyword in out:
                out[keyword] = {name: self.prune(member) for name, member in out[keyword].items()}
        for keyword in ("prefixItems", "allOf", "anyOf"):
            if keyword in out:
                out[keyword] = [self.prune(member) for member in out[keyword]]
        return out
