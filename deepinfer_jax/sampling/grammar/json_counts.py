"""`minProperties` and `maxProperties` as a choice of objects that need not be counted, or that the backend counts.

The backend counts members only where every declared property is required. So each way to take and to leave out the
optional ones becomes an object of its own; as soon as the bounds are sure to hold, what is left of them is free.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from deepinfer_jax.sampling.grammar.json_keywords import child, schema_error

COUNTED = ("minProperties", "maxProperties")
ABOUT_PROPERTIES = ("properties", "patternProperties", "additionalProperties", "required", *COUNTED)
# Limits of one object: it compiles in about a second, and its choices fit side by side into the backend's parser.
MAX_CHOICES = 256
MAX_NAMES = 10_000  # declared names of all choices together

_Choice = tuple[bool | None, ...]  # for each optional property: taken, left out, or free


def without_counts(schema: dict[str, Any], pointer: str) -> list[dict[str, Any]]:
    """Schemas of which an object satisfies one exactly when it satisfies the given one.

    schema: keywords of `ABOUT_PROPERTIES`, one of `COUNTED` among them. Undeclared names may repeat, so they count once
    at most towards minProperties. Raises SchemaError for bounds that no object satisfies or that need too many schemas.
    """
    required, properties = schema.get("required", []), schema.get("properties", {})
    optional = [name for name, member in properties.items() if name not in required and member is not False]
    is_open = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    _check_bounds(schema, pointer, len(required), len(optional), is_open=is_open)
    low = schema.get("minProperties", 0) - len(required)
    high = schema["maxProperties"] - len(required) if "maxProperties" in schema else None
    limit = min(MAX_CHOICES, MAX_NAMES // max(1, len(properties)))
    found = list(itertools.islice(_choices(len(optional), low, high, is_open=is_open), limit + 1))
    if len(found) > limit:
        keyword = next(keyword for keyword in COUNTED if keyword in schema)
        closing = ", set additionalProperties to false" if is_open else ""
        raise schema_error(
            child(pointer, keyword),
            f"it divides the {len(optional)} properties that may be left out into more than {limit} cases, the limit "
            f"for {len(properties)} declared names; require more of them{closing}, or leave {keyword} out",
        )
    return [_branch(schema, dict(zip(optional, choice, strict=True)), low, is_open=is_open) for choice in found]


def _check_bounds(schema: dict[str, Any], pointer: str, num_required: int, num_optional: int, *, is_open: bool) -> None:
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    if high is not None and high < num_required:
        raise schema_error(
            child(pointer, "maxProperties"),
            f"maxProperties {high} is below the number of required names, {num_required}; raise it or require fewer",
        )
    most = num_required + num_optional + is_open
    if low > most:
        names = "the declared names and one more" if is_open else "the declared names"
        raise schema_error(
            child(pointer, "minProperties"),
            f"minProperties {low} is enforced up to {most} here ({names}); lower it or declare more names",
        )


def _choices(num_optional: int, low: int, high: int | None, *, is_open: bool) -> Iterator[_Choice]:
    """All ways to take low to high of the optional properties; where undeclared names may come, low - 1 will do."""
    begun: list[_Choice] = [()]
    while begun:
        chosen = begun.pop()
        count, num_left = sum(map(bool, chosen)), num_optional - len(chosen)
        if count + num_left + is_open < low or (high is not None and count > high):
            continue
        is_below = high is None or (not is_open and count + num_left <= high)
        if not num_left or (count >= low and is_below):
            yield chosen + (None,) * num_left
        else:
            begun += [(*chosen, False), (*chosen, True)]


def _branch(schema: dict[str, Any], choice: dict[str, bool | None], low: int, *, is_open: bool) -> dict[str, Any]:
    """The schema of one choice. What it counts still, the backend can: no property of it is optional then."""
    branch = {keyword: value for keyword, value in schema.items() if keyword not in COUNTED}
    taken = [name for name, is_taken in choice.items() if is_taken]
    branch["required"] = [*schema.get("required", []), *taken]
    branch["properties"] = {
        name: False if choice.get(name) is False else member for name, member in schema.get("properties", {}).items()
    }
    if len(taken) < low:
        branch["minProperties"] = schema["minProperties"]
    if is_open and "maxProperties" in schema:
        branch["maxProperties"] = schema["maxProperties"]
    return branch
