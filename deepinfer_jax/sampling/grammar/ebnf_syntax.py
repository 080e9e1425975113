"""Grammars in EBNF (`root ::= ...`): the text becomes one tree for each rule.

Rules are `name ::= body`; a body has "literals", [classes], `.` (any character), rule names, groups,
`|`, `*`, `+`, `?`, `{n}`, `{n,}`, `{n,m}` and comments after `#`. Line ends are white space: a rule ends where
the next begins.
"""

import dataclasses
import re

from deepinfer_jax.sampling.grammar.nodes import (
    ANY_CHAR,
    MAX_CODE,
    Chars,
    Node,
    Ranges,
    Repeat,
    Rule,
    complement,
    concat,
    either,
    union,
)
from deepinfer_jax.sampling.grammar.regex_syntax import read_bounds

START = "root"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_DEFINES = re.compile(r"(?:\s|#[^\n]*)*::=")
_BOUNDS = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_ESCAPES = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "b": 8, "a": 7}
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8}))")
_MAX_DEPTH = 50


class EbnfError(ValueError):
    """A grammar that is wrong or that cannot be enforced; the text has line and rule."""


@dataclasses.dataclass(frozen=True)
class EbnfGrammar:
    """The rules in their order; every name that is used is defined."""

    rules: dict[str, Node]
    lines: dict[str, int]  # where each rule begins


def parse_ebnf(text: str) -> EbnfGrammar:
    """The rules of a grammar; EbnfError names line and rule of what is wrong."""
    parser = _Parser(text)
    rules, lines = parser.rules()
    if START not in rules:
        defined = f"the rules are {', '.join(list(rules)[:8])}" if rules else "the text has no rule"
        raise EbnfError(f"EBNF: there is no rule {START!r}, where a grammar starts ({defined}); add '{START} ::= ...'")
    for name, rule, line in parser.uses:
        if name not in rules:
            raise EbnfError(f"EBNF line {line}, rule {rule!r}: the rule {name!r} is not defined; add '{name} ::= ...'")
    return EbnfGrammar(rules, lines)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.rule = text, 0, ""
        self.uses: list[tuple[str, str, int]] = []  # name, rule in which it stands, line

    def error(self, problem: str, at: int | None = None) -> EbnfError:
        rule = f", rule {self.rule!r}" if self.rule else ""
        return EbnfError(f"EBNF line {self.line(at)}{rule}: {problem}")

    def line(self, at: int | None = None) -> int:
        return self.text.count("\n", 0, self.at if at is None else at) + 1

    def blank(self) -> str:
        """Skips white space and comments; the next character."""
        found = _BLANK.match(self.text, self.at)
        assert found is not None, "the pattern matches the empty text"
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def rules(self) -> tuple[dict[str, Node], dict[str, int]]:
        rules: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while self.blank():
            found = _NAME.match(self.text, self.at)
            defines = _DEFINES.match(self.text, found.end()) if found else None
            if not found or not defines:
                raise self.error(f"{self.text[self.at : self.at + 20]!r} begins no rule; write 'name ::= ...'")
            self.rule = found[0]
            if self.rule in rules:
                raise self.error(f"the rule is already defined in line {lines[self.rule]}; join the two with '|'")
            lines[self.rule] = self.line()
            self.at = defines.end()
            rules[self.rule] = self.alternatives(0)
            if self.blank() == ")":
                raise self.error("')' closes no group; write '\")\"' for the character")
        self.rule = ""
        return rules, lines

    def alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self.error(f"groups are nested deeper than {_MAX_DEPTH}; give the inner ones rules of their own")
        options = [self.sequence(depth)]
        while self.blank() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return either(options)

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (char := self.blank()) and char not in "|)":
            found = _NAME.match(self.text, self.at)
            if found and _DEFINES.match(self.text, found.end()):
                break  # the next rule
            items.append(self.repeated(self.atom(char, found, depth)))
        return concat(items)

    def atom(self, char: str, name: re.Match[str] | None, depth: int) -> Node:
        start = self.at
        if name:
            self.uses.append((name[0], self.rule, self.line()))
            self.at = name.end()
            return Rule(name[0])
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        self.at += 1
        if char == ".":
            return ANY_CHAR
        if char == "(":
            if self.text[self.at : self.at + 1] == "=":
                raise self.error("the lookahead '(=' is not enforced; rewrite the rule without it", start)
            node = self.alternatives(depth + 1)
            if self.blank() != ")":
                raise self.error("this group is not closed; add ')'", start)
            self.at += 1
            return node
        if char in "*+?{":
            raise self.error(f"{char!r} repeats nothing; put an expression before it", start)
        raise self.error(f"{char!r} is unknown here; put literal text in double quotes", start)

    def repeated(self, node: Node) -> Node:
        while True:
            char = self.blank()
            if char and char in "*+?":
                self.at += 1
                node = Repeat(node, *{"*": (0, None), "+": (1, None), "?": (0, 1)}[char])
            elif char == "{":
                node = Repeat(node, *self.bounds())
            else:
                return node

    def bounds(self) -> tuple[int, int | None]:
        found = _BOUNDS.match(self.text, self.at)
        if not found:
            raise self.error("'{' begins no {n}, {n,} or {n,m}; correct it")
        bounds = read_bounds(found, self.error)
        self.at = found.end()
        return bounds

    def literal(self) -> Node:
        start = self.at
        self.at += 1
        codes: list[int] = []
        while (char := self.text[self.at : self.at + 1]) != '"':
            if char in ("", "\n"):
                raise self.error("this literal is not closed; add '\"', and write '\\n' for a line end", start)
            codes.append(self.character())
        self.at += 1
        return concat([Chars(((code, code),)) for code in codes])

    def char_class(self) -> Node:
        start = self.at
        self.at += 1
        is_negated = self.text[self.at : self.at + 1] == "^"
        self.at += is_negated
        ranges: Ranges = ()
        while (char := self.text[self.at : self.at + 1]) != "]":
            if char in ("", "\n"):
                raise self.error("this class is not closed; add ']', and write '\\n' for a line end", start)
            at = self.at
            low = high = self.character()
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.character()
            if high < low:
                raise self.error(f"the range {self.text[at : self.at]} is in the wrong order; swap its ends", at)
            ranges = union(ranges, ((low, high),))
        self.at += 1
        if not ranges:
            raise self.error("this class is empty; write '\\]' for the character", start)
        return Chars(complement(ranges) if is_negated else ranges)

    def character(self) -> int:
        """The code point of a character or escape of a literal or class."""
        start, char = self.at, self.text[self.at]
        code = ord(char)
        self.at += 1
        if char == "\\":
            letter = self.text[self.at : self.at + 1]
            found = _CODE.match(self.text, start)
            if found:
                self.at = found.end()
                code = int(next(digits for digits in found.groups() if digits), 16)
            elif letter in _ESCAPES:
                self.at += 1
                code = _ESCAPES[letter]
            elif not letter or letter.isalnum() or letter.isspace():
                raise self.error(f"the escape '\\{letter}' is unknown; write '\\\\' for a backslash", start)
            else:
                self.at += 1
                code = ord(letter)
        if code > MAX_CODE or 0xD800 <= code <= 0xDFFF:
            raise self.error(f"U+{code:04X} is no character; remove it", start)
        return code
