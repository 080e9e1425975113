"""Languages as trees: what regular expressions and grammar rules are parsed into.

A set of characters is a tuple of inclusive code point ranges, sorted and apart, without surrogates.
"""

import dataclasses

Ranges = tuple[tuple[int, int], ...]

MAX_CODE = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclasses.dataclass(frozen=True)
class Chars:
    """One character out of a set: `ranges`, together with Unicode general categories."""

    ranges: Ranges
    categories: tuple[str, ...] = ()  # "L" for a category, "^L" for its complement
    is_negated: bool = False  # of the whole; only with categories
    outside: Ranges = ()  # characters taken away at the end; only with categories


@dataclasses.dataclass(frozen=True)
class Concat:
    """The items one after the other; without items, the empty text."""

    items: tuple["Node", ...] = ()


@dataclasses.dataclass(frozen=True)
class Either:
    """One of the options; without options, no text at all."""

    options: tuple["Node", ...] = ()


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The item `low` to `high` times; None is without bound."""

    item: "Node"
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The start ("^") or the end ("$") of the text; `at` is its place in the source."""

    kind: str
    at: int


@dataclasses.dataclass(frozen=True)
class Rule:
    """A reference to a named rule of a grammar."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Lexeme:
    """A stretch of a rule that a lexer reads as a whole; each is equal only to itself."""

    node: "Node"


Node = Chars | Concat | Either | Repeat | Anchor | Rule | Lexeme

EMPTY = Concat()
NOTHING = Either()


def union(*sets: Ranges) -> Ranges:
    """All characters of all sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(span for ranges in sets for span in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return _without_surrogates(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in the set."""
    spans, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            spans.append((start, low - 1))
        start = max(start, high + 1)
    if start <= MAX_CODE:
        spans.append((start, MAX_CODE))
    return _without_surrogates(spans)


def common(first: Ranges, second: Ranges) -> Ranges:
    """The characters that are in both sets."""
    return complement(union(complement(first), complement(second)))


def _without_surrogates(spans: list[tuple[int, int]]) -> Ranges:
    kept = []
    for low, high in spans:
        if low < _SURROGATES[0]:
            kept.append((low, min(high, _SURROGATES[0] - 1)))
        if high > _SURROGATES[1]:
            kept.append((max(low, _SURROGATES[1] + 1), high))
    return tuple(kept)


ANY_CHAR = Chars(complement(()))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


def concat(items: list[Node]) -> Node:
    """The items in a row, flattened."""
    flat = [part for item in items for part in (item.items if isinstance(item, Concat) else (item,))]
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def either(options: list[Node]) -> Node:
    """One of the options, flattened and without doubles."""
    flat = [part for item in options for part in (item.options if isinstance(item, Either) else (item,))]
    unique = tuple(dict.fromkeys(flat))
    return unique[0] if len(unique) == 1 else Either(unique)


def restrict(node: Node, allowed: Ranges) -> Node:
    """The node with every character outside `allowed` taken out."""
    if isinstance(node, Chars):
        if node.categories:
            return dataclasses.replace(node, outside=union(node.outside, complement(allowed)))
        return Chars(common(node.ranges, allowed))
    if isinstance(node, Concat):
        return Concat(tuple(restrict(item, allowed) for item in node.items))
    if isinstance(node, Either):
        return Either(tuple(restrict(item, allowed) for item in node.options))
    if isinstance(node, Repeat):
        return dataclasses.replace(node, item=restrict(node.item, allowed))
    return node


def prune(node: Node) -> Node:
    """The same language without branches that hold no text; `NOTHING` when none is left.

    Exact for nodes without rules; a set with Unicode categories counts as filled.
    """
    if isinstance(node, Chars):
        return node if node.ranges or node.categories else NOTHING
    if isinstance(node, Concat):
        items = [prune(item) for item in node.items]
        return NOTHING if NOTHING in items else concat(items)
    if isinstance(node, Either):
        return either([pruned for item in node.options if (pruned := prune(item)) != NOTHING])
    if isinstance(node, Repeat):
        item = prune(node.item)
        if item == NOTHING:
            return EMPTY if node.low == 0 else NOTHING
        return EMPTY if node.high == 0 else dataclasses.replace(node, item=item)
    return node
