"""Which stretches of a recursive grammar may be lexemes of a lexer that takes the longest match.

A lexeme X is safe beside Y, which may begin at the same place, when no text of X followed by a character
that may follow X begins a text of Y. Where that is not proven both are taken apart, down to
single characters, which are always safe.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from deepinfer_jax.sampling.grammar.nodes import (
    EMPTY,
    MAX_CODE,
    NOTHING,
    Chars,
    Concat,
    Either,
    Lexeme,
    Node,
    Ranges,
    Repeat,
    Rule,
    common,
    complement,
    concat,
    either,
    union,
)

_MAX_PAIRS = 3_000  # states of two lexemes read together, beyond which safety counts as not proven

_Checked = dict[tuple[Node, Node, Ranges], bool]  # answers of `_overlap`


def split_lexemes(bodies: dict[str, Node], start: str) -> dict[str, Node]:
    """The bodies with every character inside a lexeme, the lexemes as long as is proven to be safe."""
    parts = {name: _join(body) for name, body in bodies.items()}
    checked: _Checked = {}
    while True:
        unsafe = {lexeme for lexeme in _unsafe(parts, start, checked) if not isinstance(lexeme.node, Chars)}
        if not unsafe:
            return parts
        parts = {name: _split(part, unsafe) for name, part in parts.items()}


def _has_rule(node: Node) -> bool:
    if isinstance(node, Concat | Either):
        return any(map(_has_rule, node.items if isinstance(node, Concat) else node.options))
    return _has_rule(node.item) if isinstance(node, Repeat) else isinstance(node, Rule)


def _join(node: Node) -> Node:
    """The tree with each longest stretch without rules as one lexeme."""
    if not _has_rule(node):
        return Lexeme(node) if node != EMPTY else EMPTY
    if isinstance(node, Repeat):
        return Repeat(_join(node.item), node.low, node.high)
    if isinstance(node, Concat):
        items: list[Node] = []
        for has_rule, run in itertools.groupby(node.items, _has_rule):
            members = list(run)
            items += map(_join, members) if has_rule else [_join(concat(members))]
        return Concat(tuple(items))
    if isinstance(node, Either):
        plain = [option for option in node.options if not _has_rule(option)]
        options = [_join(option) for option in node.options if _has_rule(option)]
        if plain:
            options.append(_join(either(plain)))
        return Either(tuple(options))
    return node


def _split(part: Node, unsafe: set[Lexeme]) -> Node:
    """The tree with the unsafe lexemes taken apart by one level."""
    if isinstance(part, Lexeme):
        if part not in unsafe:
            return part
        node = part.node
        if isinstance(node, Repeat):
            return Repeat(_leaf(node.item), node.low, node.high)
        if isinstance(node, Concat):
            return Concat(tuple(map(_leaf, node.items)))
        assert isinstance(node, Either), "a single character is safe"
        return Either(tuple(map(_leaf, node.options)))
    if isinstance(part, Repeat):
        return dataclasses.replace(part, item=_split(part.item, unsafe))
    if isinstance(part, Concat):
        return Concat(tuple(_split(item, unsafe) for item in part.items))
    if isinstance(part, Either):
        return Either(tuple(_split(item, unsafe) for item in part.options))
    return part


def _leaf(node: Node) -> Node:
    return Lexeme(node) if node != EMPTY else EMPTY


@dataclasses.dataclass(frozen=True)
class _Edges:
    """Whether a part may be empty, and the lexemes with which its texts can begin and end."""

    is_nullable: bool = False
    first: frozenset[Lexeme] = frozenset()
    last: frozenset[Lexeme] = frozenset()


def _unsafe(parts: dict[str, Node], start: str, checked: _Checked) -> set[Lexeme]:
    """Lexemes that the longest match could read wrongly."""
    known = dict.fromkeys(parts, _Edges())
    while True:
        found = {name: _edges(part, known, None) for name, part in parts.items()}
        if found == known:
            break
        known = found
    follow: dict[Lexeme, set[Lexeme]] = {}

    def link(before: Iterable[Lexeme], after: Iterable[Lexeme]) -> None:
        for lexeme in before:
            follow.setdefault(lexeme, set()).update(after)

    for part in parts.values():
        _edges(part, known, link)
    unsafe: set[Lexeme] = set()
    for together in {known[start].first, *map(frozenset, follow.values())}:
        by_heads: dict[Ranges, list[Lexeme]] = {}
        for one in together:
            heads = _widen(union(*(_first_chars(after.node) for after in follow.get(one, ()))))
            by_heads.setdefault(heads, []).append(one)
        for heads, ones in by_heads.items():
            if heads:
                unsafe |= _clashing(ones, list(together), heads, checked)
    return unsafe


def _clashing(ones: list[Lexeme], others: list[Lexeme], heads: Ranges, checked: _Checked) -> set[Lexeme]:
    """Lexemes of both lists that overlap with one of the other list; whole lists are tried before single pairs."""
    key = either([lexeme.node for lexeme in ones]), either([lexeme.node for lexeme in others]), heads
    if key not in checked:
        checked[key] = _overlap(*key)
    if not checked[key]:
        return set()
    if len(ones) == len(others) == 1:
        return {*ones, *others}
    if len(ones) >= len(others):
        half = len(ones) // 2
        return _clashing(ones[:half], others, heads, checked) | _clashing(ones[half:], others, heads, checked)
    half = len(others) // 2
    return _clashing(ones, others[:half], heads, checked) | _clashing(ones, others[half:], heads, checked)


def _edges(part: Node, known: dict[str, _Edges], link: Callable | None) -> _Edges:
    """The edges of a part; `link` is told which lexemes may stand beside each other inside."""
    if isinstance(part, Lexeme):
        return _Edges(_is_nullable(part.node), frozenset((part,)), frozenset((part,)))
    if isinstance(part, Rule):
        return known[part.name]
    if isinstance(part, Either):
        all_edges = [_edges(option, known, link) for option in part.options]
        return _Edges(
            any(edges.is_nullable for edges in all_edges),
            frozenset().union(*(edges.first for edges in all_edges)),
            frozenset().union(*(edges.last for edges in all_edges)),
        )
    if isinstance(part, Repeat):
        inner = _edges(part.item, known, link)
        if link and part.high != 1:
            link(inner.last, inner.first)
        return dataclasses.replace(inner, is_nullable=inner.is_nullable or part.low == 0)
    assert isinstance(part, Concat), "all characters stand in lexemes"
    whole = _Edges(is_nullable=True)
    for item in part.items:
        edges = _edges(item, known, link)
        if link:
            link(whole.last, edges.first)
        whole = _Edges(
            whole.is_nullable and edges.is_nullable,
            whole.first | edges.first if whole.is_nullable else whole.first,
            whole.last | edges.last if edges.is_nullable else edges.last,
        )
    return whole


def _is_nullable(node: Node) -> bool:
    if isinstance(node, Concat):
        return all(map(_is_nullable, node.items))
    if isinstance(node, Either):
        return any(map(_is_nullable, node.options))
    return isinstance(node, Repeat) and (node.low == 0 or _is_nullable(node.item))


def _first_chars(node: Node) -> Ranges:
    """Characters with which a text of the node can begin."""
    if isinstance(node, Chars):
        return node.ranges
    if isinstance(node, Repeat):
        return _first_chars(node.item)
    if isinstance(node, Either):
        return union(*map(_first_chars, node.options))
    assert isinstance(node, Concat), "lexemes hold no rules"
    found: Ranges = ()
    for item in node.items:
        found = union(found, _first_chars(item))
        if not _is_nullable(item):
            break
    return found


def _widen(ranges: Ranges) -> Ranges:
    """All characters whose UTF-8 form begins with the same byte: the lexer decides byte by byte."""
    wide = []
    for low, high in ranges:
        for floor, ceiling, block in ((0, 0x7F, 1), (0x80, 0x7FF, 0x40), (0x800, 0xFFFF, 0x1000)):
            if low <= ceiling and high >= floor:
                first, last = max(low, floor) // block * block, min(high, ceiling) // block * block + block - 1
                wide.append((max(first, floor), last))
        if high > 0xFFFF:
            first, last = max(low, 0x10000) // 0x40000 * 0x40000, high // 0x40000 * 0x40000 + 0x3FFFF
            wide.append((max(first, 0x10000), min(last, MAX_CODE)))
    return union(tuple(wide))


def _overlap(one: Node, other: Node, heads: Ranges) -> bool:
    """True unless no non-empty text of `one` followed by a head begins a text of `other`."""
    letters = _letters(one, other)
    seen = {(one, other)}
    stack = [(one, other, True)]
    while stack:
        left, right, is_start = stack.pop()
        if not is_start and _is_nullable(left) and common(_first_chars(right), heads):
            return True
        for letter in letters:
            after = _derive(left, letter), _derive(right, letter)
            if NOTHING not in after and after not in seen:
                if len(seen) > _MAX_PAIRS:
                    return True
                seen.add(after)
                stack.append((*after, False))
    return False


def _letters(*nodes: Node) -> list[int]:
    """One character out of each class that the sets of the nodes tell apart."""
    cuts = {0}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, Chars):
            cuts.update(edge for low, high in node.ranges for edge in (low, high + 1))
        elif isinstance(node, Repeat):
            stack.append(node.item)
        elif isinstance(node, Concat | Either):
            stack.extend(node.items if isinstance(node, Concat) else node.options)
    allowed = complement(())
    return [cut for cut in sorted(cuts) if common(((cut, cut),), allowed)]


def _derive(node: Node, letter: int) -> Node:
    """What may follow the letter in a text of the node; NOTHING when no text begins with it."""
    if isinstance(node, Chars):
        return EMPTY if any(low <= letter <= high for low, high in node.ranges) else NOTHING
    if isinstance(node, Either):
        return either([after for option in node.options if (after := _derive(option, letter)) != NOTHING])
    if isinstance(node, Repeat):
        after = _derive(node.item, letter)
        if after == NOTHING or node.high == 0:
            return NOTHING
        high = None if node.high is None else node.high - 1
        rest = EMPTY if high == 0 else Repeat(node.item, max(node.low - 1, 0), high)
        return concat([after, rest])
    assert isinstance(node, Concat), "lexemes hold no rules"
    options: list[Node] = []
    for index, item in enumerate(node.items):
        after = _derive(item, letter)
        if after != NOTHING:
            options.append(concat([after, *node.items[index + 1 :]]))
        if not _is_nullable(item):
            break
    return either(options)
