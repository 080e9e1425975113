"""Regular expressions: the constructs that are enforced become a tree, all others are refused by position.

The dialect is the common ground of ECMA-262 and Python, so that either finds a match in what was
enforced: syntax that the two read differently is refused, and a class holds what it holds in both
(`\\d` and `\\w` are ASCII, `\\W` has no letters outside ASCII, `.` is no line terminator).
"""

import functools
import re
from collections.abc import Callable

from deepinfer_jax.sampling.grammar.nodes import (
    ANY_CHAR,
    EMPTY,
    MAX_CODE,
    Anchor,
    Chars,
    Concat,
    Either,
    Node,
    Ranges,
    Repeat,
    common,
    complement,
    concat,
    either,
    union,
)

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = union(_DIGITS, ((0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)))
_SPACE: Ranges = union(
    ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Characters of a class in both dialects.
_SURE_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_BOUNDS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_CATEGORY = re.compile(r"(?:C[cfno]?|L[lmotu]?|M[cen]?|N[dlo]?|P[cdefios]?|S[ckmo]?|Z[lps]?)\Z")
# Letters that simple case folding joins to a letter outside ASCII.
_FOLDED = {"k": 0x212A, "s": 0x017F}
MAX_REPEAT = 100_000
_MAX_DEPTH = 50

_GROUPS = (  # opening, what it is; the first match counts
    ("(?=", "lookahead"),
    ("(?!", "negative lookahead"),
    ("(?<=", "lookbehind"),
    ("(?<!", "negative lookbehind"),
    ("(?>", "an atomic group"),
    ("(?#", "a comment"),
    ("(?(", "a condition"),
    ("(?P=", "a backreference"),
    ("(?R", "a recursive pattern"),
    ("(*", "a backtracking verb"),
)


@functools.cache
def possible_class(letter: str) -> Ranges:
    """Characters of \\d, \\w or \\s in one dialect at least: in Python they reach beyond ASCII."""
    if letter == "s":
        return union(_SPACE, ((0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)))
    is_member = str.isdecimal if letter == "d" else str.isalnum
    spans: list[tuple[int, int]] = []
    for code in range(MAX_CODE + 1):
        if is_member(chr(code)):
            if spans and spans[-1][1] == code - 1:
                spans[-1] = (spans[-1][0], code)
            else:
                spans.append((code, code))
    return union(_SURE_CLASSES[letter], tuple(spans))


class RegexError(ValueError):
    """A regular expression that is wrong or that cannot be enforced; the text has the position."""


def parse_regex(pattern: str) -> Node:
    """The tree of a pattern, anchors included; RegexError names a construct and its position."""
    parser = _Parser(pattern)
    node = parser.alternatives(0)
    if parser.at < len(pattern):
        raise parser.error("')' closes no group; escape it as '\\)' or remove it")
    return node


def read_bounds(found: re.Match[str], error: Callable[[str], ValueError]) -> tuple[int, int | None]:
    """The least and the greatest count of a repetition, None for no greatest.

    found: `{n}`, `{n,}` or `{n,m}` with n, the comma and m as its groups. error: makes what is raised for bad counts.
    """
    low = int(found[1])
    high = None if found[2] and not found[3] else int(found[3] or low)
    if high is not None and high < low:
        raise error(f"the repetition {found[0]} has its bounds in the wrong order; swap them")
    if max(low, high or 0) > MAX_REPEAT:
        raise error(f"the repetition {found[0]} is above the limit of {MAX_REPEAT}; lower it")
    return low, high


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at = pattern, 0
        self.ignores_case = self.dot_is_all = False

    def error(self, problem: str, at: int | None = None) -> RegexError:
        at = self.at if at is None else at
        return RegexError(f"regex {_short(self.text)}, position {at}: {problem}")

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self.error(f"groups are nested deeper than {_MAX_DEPTH}; flatten the pattern")
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return either(options)

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.peek() and self.peek() not in "|)":
            start = self.at
            atom = self.atom(depth)
            if atom is not None:
                items.append(self.repeated(atom, start))
        return concat(items)

    def atom(self, depth: int) -> Node | None:
        start, char = self.at, self.peek()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return self.char_class()
        if char == "\\":
            return self.escape()
        if char in "*+?":
            raise self.error(f"{char!r} repeats nothing; escape it as '\\{char}' or put an expression before it")
        if char == "{":
            raise self.error("'{' is no repetition here; escape it as '\\{'")
        self.at += 1
        if char in "^$":
            return Anchor(char, start)
        if char == ".":
            return ANY_CHAR if self.dot_is_all else Chars(complement(_LINE_ENDS))
        return self.chars(((ord(char), ord(char)),), start)

    def chars(self, ranges: Ranges, start: int) -> Chars:
        """The set, with the other case of its letters under (?i)."""
        if any(low >= 0xD800 and high <= 0xDFFF for low, high in ranges):
            raise self.error("a lone surrogate is no character; remove it", start)
        return Chars(self.folded(ranges, start) if self.ignores_case else union(ranges))

    def folded(self, ranges: Ranges, start: int) -> Ranges:
        if any(high > 0x7F for _, high in ranges):
            raise self.error("(?i) is enforced for ASCII only; spell out both cases of this", start)
        upper, lower = ((0x41, 0x5A),), ((0x61, 0x7A),)
        to_lower = tuple((low + 32, high + 32) for low, high in common(ranges, upper))
        to_upper = tuple((low - 32, high - 32) for low, high in common(ranges, lower))
        return union(ranges, to_lower, to_upper)

    def group(self, depth: int) -> Node | None:
        start = self.at
        for opening, name in _GROUPS:
            if self.text.startswith(opening, start):
                raise self.error(f"{name} {opening!r} is not enforced; rewrite the pattern without it")
        before = self.ignores_case, self.dot_is_all
        named = re.compile(r"\(\?P?<[A-Za-z_]\w*>").match(self.text, start)
        flags = re.compile(r"\(\?([A-Za-z]*)(-?)([A-Za-z]*)([:)])").match(self.text, start)
        if named:
            self.at = named.end()
        elif flags:
            self.at = flags.end()
            if flags[2] or set(flags[1]) - set("is"):
                raise self.error(f"of the inline flags only 'i' and 's' are enforced, not {flags[0]!r}", start)
            self.ignores_case |= "i" in flags[1]
            self.dot_is_all |= "s" in flags[1]
            if flags[4] == ")":
                if start:
                    raise self.error("inline flags stand at the start of a pattern or are scoped as (?i:...)", start)
                return None
        elif self.peek(2) == "(?":
            raise self.error(f"the group {self.peek(4)!r} is unknown; use (?:...) or escape the '?'")
        else:
            self.at += 1
        node = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise self.error("this group is not closed; add ')' or escape the '('", start)
        self.at += 1
        self.ignores_case, self.dot_is_all = before
        return node

    def repeated(self, atom: Node, start: int) -> Node:
        bounds = self.quantifier()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            raise self.error("an anchor cannot be repeated; remove the repetition", start)
        if self.peek() == "+":
            raise self.error("a possessive repetition is not enforced; remove the '+'")
        if self.peek() == "?":  # lazy: the same texts
            self.at += 1
        after = self.at
        if self.quantifier() is not None:
            raise self.error("a repetition of a repetition; put the inner one in a group", after)
        return Repeat(atom, *bounds)

    def quantifier(self) -> tuple[int, int | None] | None:
        char = self.peek()
        if char and char in "*+?":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        found = _BOUNDS.match(self.text, self.at)
        if not found:
            raise self.error("'{' begins no {n}, {n,} or {n,m}; correct it or escape it as '\\{'")
        bounds = read_bounds(found, self.error)
        self.at = found.end()
        return bounds

    def escape(self) -> Node:
        start = self.at
        char = self.text[start + 1 : start + 2]
        if char and char in "bB":
            raise self.error(f"the word boundary '\\{char}' is not enforced; rewrite the pattern without it")
        if char and (char in "123456789k"):
            raise self.error(f"the backreference '\\{char}' is not enforced; rewrite the pattern without it")
        if char and char in "AZzG":
            raise self.error(f"the anchor '\\{char}' is not enforced; use '^' and '$'")
        member = self.class_escape()
        return member if isinstance(member, Chars) else self.chars(((member, member),), start)

    def class_escape(self, *, is_negated: bool = False) -> Chars | int:
        """A set for a class escape such as \\d, a code point for any other escape."""
        start = self.at
        char = self.text[start + 1 : start + 2]
        self.at += 2
        if not char:
            raise self.error("'\\' at the end escapes nothing; write '\\\\' for a backslash", start)
        if char.lower() in _SURE_CLASSES:
            if char.islower() == is_negated:  # the set is subtracted, so all that may belong to it counts
                ranges = possible_class(char.lower())
            else:
                ranges = _SURE_CLASSES[char.lower()]
            return Chars(ranges if char.islower() else complement(ranges))
        if char in "pP":
            return self.category(start, is_negated=char == "P")
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "0" and not self.peek().isdigit():
            return 0
        if char == "c" and re.match("[A-Za-z]", self.peek()):
            self.at += 1
            return ord(self.text[self.at - 1]) % 32
        if char in "xu":
            return self.code_point(start)
        if char.isalnum() or char == "_":
            raise self.error(f"the escape '\\{char}' is unknown; remove the backslash or write '\\\\'", start)
        return ord(char)

    def code_point(self, start: int) -> int:
        high = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, start)
        if high:
            self.at = high.end()
            return 0x10000 + ((int(high[1], 16) - 0xD800) << 10) + int(high[2], 16) - 0xDC00
        found = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})").match(self.text, start)
        if not found:
            raise self.error("the escape is no \\xHH, \\uHHHH or \\u{H...}; correct its digits", start)
        code = int(found[1] or found[2] or found[3], 16)
        if code > MAX_CODE or 0xD800 <= code <= 0xDFFF:
            raise self.error(f"U+{code:04X} is no character; remove it", start)
        self.at = found.end()
        return code

    def category(self, start: int, *, is_negated: bool) -> Chars:
        found = re.compile(r"\{([^}]*)\}|([A-Z])").match(self.text, self.at)
        name = (found[1] or found[2]) if found else ""
        if not found or not _CATEGORY.match(name):
            raise self.error(f"the property {name!r} is not enforced; general categories such as \\p{{Lu}} are", start)
        if self.ignores_case:
            raise self.error("a property under (?i) is not enforced; use it without (?i)", start)
        self.at = found.end()
        return Chars((), categories=("^" * is_negated + name,))

    def char_class(self) -> Chars:
        start = self.at
        self.at += 1
        is_negated = self.peek() == "^"
        self.at += is_negated
        if self.peek() == "]":
            raise self.error("this class is empty, or its ']' is not escaped; write '\\]' for the character", start)
        ranges: Ranges = ()
        sets: list[Ranges] = []
        categories: list[str] = []
        while self.peek() != "]":
            at = self.at
            low = self.class_member(start, is_negated=is_negated)
            if self.peek() == "-" and self.peek(2)[1:] not in ("]", ""):
                self.at += 1
                high = self.class_member(start, is_negated=is_negated)
                if isinstance(low, Chars) or isinstance(high, Chars):
                    raise self.error("a range needs two single characters; escape the '-'", at)
                if high < low:
                    raise self.error(f"the range {self.text[at : self.at]} is in the wrong order; swap its ends", at)
                ranges = union(ranges, ((low, high),))
            elif isinstance(low, Chars):
                sets.append(low.ranges)
                categories.extend(low.categories)
            else:
                ranges = union(ranges, ((low, low),))
        self.at += 1
        if self.ignores_case:
            ranges = self.folded(ranges, start)
            if is_negated:
                letters = (code for letter, code in _FOLDED.items() if common(ranges, ((ord(letter), ord(letter)),)))
                ranges = union(ranges, tuple((code, code) for code in letters))
        ranges = union(ranges, *sets)
        if categories:
            return Chars(ranges, categories=tuple(categories), is_negated=is_negated)
        return Chars(complement(ranges) if is_negated else ranges)

    def class_member(self, start: int, *, is_negated: bool) -> Chars | int:
        char = self.peek()
        if not char:
            raise self.error("this class is not closed; add ']' or escape the '['", start)
        if char == "\\":
            if self.peek(2) == "\\b":
                self.at += 2
                return 8
            return self.class_escape(is_negated=is_negated)
        if self.peek(2) in ("[:", "[.", "[="):
            raise self.error("POSIX classes are not enforced; spell out the characters")
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self.error("a lone surrogate is no character; remove it")
        self.at += 1
        return ord(char)


def resolve_anchors(node: Node, pattern: str, *, filler: Node) -> Node:
    """The tree without anchors: `filler` stands wherever the text's edge is not anchored.

    With the empty text as filler the whole text must match, with `ANY_TEXT` a part of it (search).
    """
    return _resolve(node, pattern, filler, is_left=True, is_right=True)


def _resolve(node: Node, pattern: str, filler: Node, *, is_left: bool, is_right: bool) -> Node:
    if isinstance(node, Anchor):
        if not (is_left if node.kind == "^" else is_right):
            raise RegexError(
                f"regex {_short(pattern)}, position {node.at}: the anchor {node.kind!r} is enforced only at the edge "
                "of the pattern or of an option; move it there"
            )
        return filler if is_left and is_right else EMPTY
    if isinstance(node, Either):
        return either([_resolve(o, pattern, filler, is_left=is_left, is_right=is_right) for o in node.options])
    if isinstance(node, Repeat):
        item = _resolve(node.item, pattern, filler, is_left=False, is_right=False)
        node = Repeat(item, node.low, node.high)
    if not isinstance(node, Concat):
        return concat([*([filler] if is_left else []), node, *([filler] if is_right else [])])
    items = list(node.items)
    fills_left, fills_right = is_left, is_right
    while is_left and items and isinstance(items[0], Anchor) and items[0].kind == "^":
        fills_left = False
        del items[0]
    while is_right and items and isinstance(items[-1], Anchor) and items[-1].kind == "$":
        fills_right = False
        del items[-1]
    if not items:
        return filler if fills_left or fills_right else EMPTY
    last = len(items) - 1
    parts = [
        _resolve(item, pattern, filler, is_left=fills_left and i == 0, is_right=fills_right and i == last)
        for i, item in enumerate(items)
    ]
    return concat(parts)


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
