"""`so_args` of a request, checked and frozen (spec: interface 3)."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

SchemaType = Literal["json", "regex", "ebnf"]

_REFUSED_KEYS = {
    "serialized": "compiled grammars are not accepted; give the text of the grammar as 'schema'",
    "bound_token_ids": "give one id as 'bound_token_id'",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarRequest:
    """A grammar and the point of the output from which it applies."""

    schema_type: SchemaType
    schema: str  # text as given; a dict schema as compact JSON with its key order kept
    trigger_token_ids: tuple[int, ...] = ()  # empty: the grammar applies from the first output token
    bound_token_id: int | None = None


def parse_so_args(so_args: object) -> GrammarRequest:
    """The request that a `so_args` dict describes; ValueError says which entry is wrong and why.

    Only the entries are checked; whether the schema can be enforced is decided by `compile_grammar`.
    """
    if not isinstance(so_args, Mapping):
        raise ValueError(f"so_args={so_args!r} must be a dict with the keys {_allowed_keys()}, or None")
    for key in so_args:
        if key in _REFUSED_KEYS:
            raise ValueError(f"so_args[{key!r}] is not supported; {_REFUSED_KEYS[key]}")
        if key not in _FIELDS:
            raise ValueError(f"so_args[{key!r}] is unknown; the keys are {_allowed_keys()}: remove it")
    schema_type = so_args.get("schema_type")
    if not isinstance(schema_type, str) or schema_type not in get_args(SchemaType):
        allowed = ", ".join(map(repr, get_args(SchemaType)))
        given = f"{schema_type!r} is not one of" if "schema_type" in so_args else "is missing; give one of"
        raise ValueError(f"so_args['schema_type'] {given} {allowed}")
    trigger = _parse_trigger(so_args.get("trigger_token_ids"))
    return GrammarRequest(
        schema_type=cast(SchemaType, schema_type),
        schema=_parse_schema(schema_type, so_args),
        trigger_token_ids=trigger,
        bound_token_id=_parse_bound(so_args.get("bound_token_id"), trigger),
    )


def _parse_schema(schema_type: str, so_args: Mapping[str, Any]) -> str:
    if so_args.get("schema") is None:
        raise ValueError(f"so_args['schema'] is missing; give the text of the {schema_type} grammar")
    schema = so_args["schema"]
    if schema_type == "json" and isinstance(schema, Mapping | bool):
        try:
            return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"so_args['schema'] is a dict that is no JSON value: {error}; correct it") from error
    if not isinstance(schema, str):
        also = " or, for 'json', a dict" if schema_type == "json" else ""
        raise ValueError(
            f"so_args['schema'] is a {type(schema).__name__} and must be a string{also}; give the grammar's text"
        )
    return schema


def _parse_trigger(trigger: object) -> tuple[int, ...]:
    if trigger is None:
        return ()
    advice = "give one list of non-negative ints, or leave it out"
    if not isinstance(trigger, list | tuple):
        raise ValueError(f"so_args['trigger_token_ids']={trigger!r} is no list of token ids; {advice}")
    for index, token_id in enumerate(trigger):
        if not _is_token_id(token_id):
            raise ValueError(
                f"so_args['trigger_token_ids'][{index}]={token_id!r} is no token id (an int of 0 or more); {advice}"
            )
    return tuple(trigger)


def _parse_bound(bound: object, trigger: tuple[int, ...]) -> int | None:
    if bound is None:
        return None
    if not _is_token_id(bound):
        raise ValueError(
            f"so_args['bound_token_id']={bound!r} is no token id (one int of 0 or more); "
            "give one non-negative int, or leave it out"
        )
    if not trigger:
        raise ValueError(
            f"so_args['bound_token_id']={bound!r} needs a non-empty 'trigger_token_ids', which it would force; "
            "give the trigger or leave the bound out"
        )
    return cast(int, bound)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_FIELDS = tuple(field.name for field in dataclasses.fields(GrammarRequest))


def _allowed_keys() -> str:
    return ", ".join(_FIELDS)
