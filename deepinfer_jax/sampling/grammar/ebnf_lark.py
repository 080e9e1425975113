"""Grammars in EBNF as grammars of the backend (Lark syntax), without a change of the language.

The backend splits text into lexemes and always takes the longest, so a literal translation loses
sentences (`("ab" | "abc") "cd"` would not match "abcd"). Here a grammar without recursion becomes one
regular expression; in a recursive one a stretch of text is a lexeme only where the longest match is
proven to be the right one, and single characters otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

from deepinfer_jax.sampling.grammar.ebnf_lexemes import split_lexemes
from deepinfer_jax.sampling.grammar.ebnf_syntax import START, EbnfError, EbnfGrammar, parse_ebnf
from deepinfer_jax.sampling.grammar.emit import emit_regex
from deepinfer_jax.sampling.grammar.nodes import (
    EMPTY,
    NOTHING,
    Concat,
    Either,
    Lexeme,
    Node,
    Repeat,
    Rule,
    concat,
    either,
    prune,
)

_MAX_NODES = 200_000
_MAX_OPTIONS = 64


class LarkGrammar(NamedTuple):
    """A grammar in the syntax of the backend."""

    text: str
    is_recursive: bool  # False: the text is one regular expression


def translate(text: str) -> LarkGrammar:
    """The Lark grammar that matches exactly the sentences of the EBNF text's `root`."""
    grammar = parse_ebnf(text)
    rules = _finite_rules(grammar)
    rules = {name: _unroll(name, body) for name, body in rules.items()}
    recursive = _recursive_names(rules)
    _check_size(rules, recursive, grammar)
    bodies = _inline(rules, recursive)
    if not recursive:
        return LarkGrammar(f"start: /{emit_regex(bodies[START])}/", is_recursive=False)
    return LarkGrammar(_write(split_lexemes(bodies, START)), is_recursive=True)


def _finite_rules(grammar: EbnfGrammar) -> dict[str, Node]:
    """The rules that `root` reaches, without what can never end."""
    finite: set[str] = set()
    while True:
        found = {name for name, body in grammar.rules.items() if prune(_without(body, finite)) != NOTHING}
        if found == finite:
            break
        finite = found
    if START not in finite:
        raise EbnfError(
            f"EBNF line {grammar.lines[START]}, rule {START!r}: no finite text matches, every way leads back into the "
            "recursion; add an option that ends"
        )
    rules = {name: prune(_without(body, finite)) for name, body in grammar.rules.items() if name in finite}
    reached, stack = {START}, [START]
    while stack:
        fresh = _names(rules[stack.pop()]) - reached
        reached |= fresh
        stack.extend(fresh)
    return {name: body for name, body in rules.items() if name in reached}


def _without(node: Node, kept: set[str]) -> Node:
    """The node with references to other rules than the kept ones made impossible."""
    return _replace(node, lambda name: Rule(name) if name in kept else NOTHING)


def _replace(node: Node, target: Callable[[str], Node]) -> Node:
    """The node with each rule name replaced."""
    if isinstance(node, Rule):
        return target(node.name)
    if isinstance(node, Concat):
        return concat([_replace(item, target) for item in node.items])
    if isinstance(node, Either):
        return either([_replace(item, target) for item in node.options])
    if isinstance(node, Repeat):
        return Repeat(_replace(node.item, target), node.low, node.high)
    return node


def _names(node: Node) -> set[str]:
    """Rules that a node refers to."""
    if isinstance(node, Rule):
        return {node.name}
    if isinstance(node, Repeat):
        return _names(node.item)
    members = node.items if isinstance(node, Concat) else node.options if isinstance(node, Either) else ()
    return set().union(*map(_names, members))


def _unroll(name: str, body: Node) -> Node:
    """A rule that refers to itself only at one end of its options, as a repetition; others unchanged."""
    options = [option for option in _options(name, body) if option != Rule(name)]
    ends = [option for option in options if name not in _names(option)]
    loops = [option.items for option in options if name in _names(option) and isinstance(option, Concat)]
    if len(ends) + len(loops) < len(options) or not loops:
        return either(options) if options else body
    if all(items[-1] == Rule(name) and name not in _names(Concat(items[:-1])) for items in loops):
        return concat([Repeat(either([concat(list(items[:-1])) for items in loops]), 0, None), either(ends)])
    if all(items[0] == Rule(name) and name not in _names(Concat(items[1:])) for items in loops):
        return concat([either(ends), Repeat(either([concat(list(items[1:])) for items in loops]), 0, None)])
    return body


def _options(name: str, node: Node) -> list[Node]:
    """Options of a body, with a choice at an end that holds the name multiplied out."""
    if isinstance(node, Either):
        return [option for member in node.options for option in _options(name, member)]
    if isinstance(node, Repeat) and (node.low, node.high) == (0, 1) and name in _names(node):
        return [EMPTY, *_options(name, node.item)]
    if isinstance(node, Concat) and node.items:
        for index in (-1, 0):
            choices = _options(name, node.items[index])
            if 1 < len(choices) <= _MAX_OPTIONS and name in _names(node.items[index]):
                rest = list(node.items[:-1] if index else node.items[1:])
                rows = ([*rest, choice] if index else [choice, *rest] for choice in choices)
                return [option for row in rows for option in _options(name, concat(row))]
    return [node]


def _recursive_names(rules: dict[str, Node]) -> set[str]:
    """Rules that are reached from themselves."""
    direct = {name: _names(body) for name, body in rules.items()}
    recursive = set()
    for name in rules:
        reached, stack = set(), list(direct[name])
        while stack:
            here = stack.pop()
            if here not in reached:
                reached.add(here)
                stack.extend(direct[here])
        if name in reached:
            recursive.add(name)
    return recursive


def _check_size(rules: dict[str, Node], recursive: set[str], grammar: EbnfGrammar) -> None:
    sizes: dict[str, int] = {}

    def size(node: Node) -> int:
        if isinstance(node, Rule):
            if node.name in recursive:
                return 1
            if node.name not in sizes:
                sizes[node.name] = size(rules[node.name])
            return sizes[node.name]
        if isinstance(node, Repeat):
            return 1 + size(node.item)
        members = node.items if isinstance(node, Concat) else node.options if isinstance(node, Either) else ()
        return 1 + sum(map(size, members))

    for name, body in rules.items():
        if size(body) > _MAX_NODES:
            raise EbnfError(
                f"EBNF line {grammar.lines[name]}, rule {name!r}: it expands to more than {_MAX_NODES} parts; "
                "refer to fewer or smaller rules"
            )


def _inline(rules: dict[str, Node], recursive: set[str]) -> dict[str, Node]:
    """Bodies of `root` and the recursive rules, with all other rules put in place."""
    done: dict[str, Node] = {}

    def target(name: str) -> Node:
        if name in recursive:
            return Rule(name)
        if name not in done:
            done[name] = _replace(rules[name], target)
        return done[name]

    return {name: _replace(body, target) for name, body in rules.items() if name in recursive or name == START}


def _write(bodies: dict[str, Node]) -> str:
    """The Lark text of bodies whose characters all stand in lexemes."""
    rule_names = {name: f"r{rank}" for rank, name in enumerate(bodies)}
    terminals: dict[Node, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Lexeme):
            return terminals.setdefault(node.node, f"T{len(terminals)}")
        if isinstance(node, Rule):
            return rule_names[node.name]
        if isinstance(node, Concat):
            return "(" + " ".join(map(write, node.items)) + ")" if node.items else '""'
        if isinstance(node, Either):
            return "(" + " | ".join(map(write, node.options)) + ")"
        assert isinstance(node, Repeat), "all characters stand in lexemes"
        item = write(node.item)
        return (f"({item})" if isinstance(node.item, Repeat) else item) + _bounds(node)

    lines = [f"start: {rule_names[START]}"]
    lines += [f"{rule_names[name]}: {write(body)}" for name, body in bodies.items()]
    lines += [f"{name}: /{emit_regex(node)}/" for node, name in terminals.items()]
    return "\n".join(lines)


def _bounds(node: Repeat) -> str:
    if node.high is None:
        return {0: "*", 1: "+"}.get(node.low, f"{{{node.low},}}")
    return "?" if (node.low, node.high) == (0, 1) else f"{{{node.low},{node.high}}}"
