import itertools
import random

import pytest

from deepinfer_jax.sampling.grammar import ebnf_lark
from deepinfer_jax.sampling.grammar.ebnf_syntax import EbnfError, parse_ebnf
from deepinfer_jax.sampling.grammar.nodes import Chars, Concat, Either, Node, Repeat, Rule

JSON = r"""
# a value with white space behind it
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = 'root ::= sum\nsum ::= sum "+" term | term\nterm ::= "(" sum ")" | [0-9]+'


@pytest.mark.parametrize(
    "text, good, bad",
    [
        ('root ::= root "a" | "b"', ["b", "baaa"], ["", "a", "ab"]),
        ('root ::= "a" root | "b"', ["b", "aab"], ["a", "ba"]),
        ('root ::= "a" root?', ["a", "aa"], ["", "b"]),
        ('root ::= ("ab" | "abc") "cd"', ["abcd", "abccd"], ["abd"]),
        ('root ::= [a]+ "ab"', ["aab", "aaaab"], ["ab", "aa"]),
        ('root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", ")("]),
        ('root ::= "a" root "a" | "a" root "b" | ""', ["aaab", "ab", "aa"], ["a", "ba"]),
        ('root ::= x x\nx ::= "a" x "b" | ("ab" | "abc")', ["ababc", "aabbabc", "abcab"], ["ab", "abab c"]),
        (SUMS, ["1", "12+(3+4)+5"], ["", "1+", "(1"]),
        (JSON, ['{"a": [1, -2.5e3, {"b": null}], "c": "x\\n"}', "[]", '"é"'], ['{"a": [01]}', "{", '{"a"}', "nul"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"\\\\"', ['Aé😀\t"\\'], ["A"]),
        ("root ::= [^a-c\\]é]", ["d", "ë", "\n"], ["a", "]", "é"]),
        ("root ::= [a-] .", ["a\n", "-é"], ["b-", "a"]),
        ('root ::= ("x"{2}){1,2} | "y"{2,} | ("z"?)+', ["xx", "xxxx", "yyy", "", "zz"], ["x", "xxx", "y"]),
        ('root\n  ::= a-b\n  | "c" # either\n\na-b ::=\n "d" "e"', ["de", "c"], ["d", "e"]),
        ('root ::= "b" | endless\nendless ::= "a" endless', ["b"], ["a", "aa"]),
    ],
)
def test_enforced(tools, text, good, bad):
    grammar = tools.compile("ebnf", text)
    assert [word for word in good if not tools.accepts(grammar, word)] == []
    assert [word for word in bad if tools.accepts(grammar, word)] == []


def test_left_recursion_begins_with_its_end(tools):
    assert tools.texts(tools.compile("ebnf", 'root ::= root "a" | "b"').matcher()) == {b"b"}


def test_what_cannot_end_is_not_begun(tools):
    grammar = tools.compile("ebnf", 'root ::= "b" | endless\nendless ::= "a" endless')
    assert tools.texts(grammar.matcher()) == {b"b"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("root ::= foo", "line 1, rule 'root': the rule 'foo' is not defined"),
        ('root ::= "a"\n\nx ::= "b" y', "line 3, rule 'x': the rule 'y' is not defined"),
        ('start ::= "a"', r"there is no rule 'root', .*\(the rules are start\)"),
        ("", r"there is no rule 'root', .*\(the text has no rule\)"),
        ("# nothing", "there is no rule 'root'"),
        ('root ::= "a" root', "line 1, rule 'root': no finite text matches"),
        ('x ::= "a"\nroot ::= y\ny ::= x y', "line 2, rule 'root': no finite text matches"),
        ("root ::= root", "no finite text matches"),
        ('root ::= "a', "line 1, rule 'root': this literal is not closed"),
        ("root ::= [a", "this class is not closed"),
        ("root ::= []", "this class is empty"),
        ("root ::= [b-a]", "the range b-a is in the wrong order"),
        ('root ::= ("a"', "this group is not closed"),
        ('root ::= "a")', "closes no group"),
        ('root ::= * "a"', "repeats nothing"),
        ('root ::= "a"{3,1}', "wrong order"),
        ('root ::= "a"{x}', "begins no {n}"),
        ('root ::= "a"{200000}', "above the limit"),
        ('root ::= "\\q"', "the escape '.q' is unknown"),
        ('root ::= "\\ud800"', "U.D800 is no character"),
        ("root ::= 'a'", "unknown here; put literal text in double quotes"),
        ('root ::= (="a") "b"', "lookahead"),
        ('root ::= "a"\nroot ::= "b"', "line 2, rule 'root': the rule is already defined in line 1"),
        ('"a" ::= root', "line 1: .* begins no rule"),
        (
            "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nroot ::= r0\nr40 ::= "a"',
            "expands to more than",
        ),
    ],
)
def test_refused(tools, text, message):
    with pytest.raises(EbnfError, match=message):
        tools.compile("ebnf", text)


def test_lexemes_stay_long_where_that_is_safe():
    """Speed: a number or a string is one lexeme, not a row of characters."""
    lark = ebnf_lark.translate(SUMS).text
    assert "T1: /(?:[\\x{30}-\\x{39}])+/" in lark or "/(?:[\\x{30}-\\x{39}])+/" in lark
    assert len(ebnf_lark.translate(JSON).text.splitlines()) < 20


def contains(rules: dict[str, Node], text: str) -> bool:
    """Membership by its definition: the ends that each rule reaches from each place, to a fixed point."""
    ends: dict[tuple[str, int], set[int]] = {}

    def reach(node: Node, starts: set[int]) -> set[int]:
        if isinstance(node, Chars):
            return {
                at + 1
                for at in starts
                if at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
            }
        if isinstance(node, Concat):
            for item in node.items:
                starts = reach(item, starts)
            return starts
        if isinstance(node, Either):
            return set().union(*(reach(option, starts) for option in node.options))
        if isinstance(node, Rule):
            return set().union(*(ends.setdefault((node.name, at), set()) for at in starts))
        assert isinstance(node, Repeat)
        for _ in range(node.low):
            starts = reach(node.item, starts)
        found, count = set(starts), node.low
        while starts and (node.high is None or count < node.high):
            starts = reach(node.item, starts)
            if starts <= found:
                break
            found |= starts
            count += 1
        return found

    while True:
        before = {key: set(value) for key, value in ends.items()}
        is_member = len(text) in reach(Rule("root"), {0})
        for name, at in list(ends):
            ends[name, at] |= reach(rules[name], {at})
        if ends == before:
            return is_member


LEAVES = ['"a"', '"b"', '"ab"', '"aab"', '"ba"', "[ab]", "[^a]", '"c"', '""', '"é"', "[bc]+", '"ë"']


def random_body(rng: random.Random, depth: int) -> str:
    draw = rng.random()
    if depth == 0 or draw < 0.3:
        return rng.choice(LEAVES)
    if draw < 0.5:
        return rng.choice(["root", "x", "y"])
    first, second = random_body(rng, depth - 1), random_body(rng, depth - 1)
    if draw < 0.7:
        return f"{first} {second}"
    if draw < 0.85:
        return f"({first} | {second})"
    return f"({first})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,2}"])


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(4)])
def test_random_grammars_agree_with_an_independent_matcher(tools, seed):
    """The translation neither loses a sentence nor adds one, whatever the lexer takes for the longest match."""
    rng = random.Random(seed)
    words = ["".join(word) for length in range(5) for word in itertools.product("abc", repeat=length)]
    odd = ["é", "aé", "éa", "ë", "éë", "aë"]
    recursive = 0
    for _ in range(80):
        text = "\n".join(f"{name} ::= {random_body(rng, 3)} | {random_body(rng, 2)}" for name in ("root", "x", "y"))
        rules = parse_ebnf(text).rules
        sample = [*rng.sample(words, 15), *odd]
        try:
            grammar = tools.compile("ebnf", text)
        except EbnfError as error:
            assert "no finite text" in str(error)
            assert not any(contains(rules, word) for word in sample)
            continue
        recursive += ebnf_lark.translate(text).is_recursive
        for word in sample:
            assert tools.accepts(grammar, word) is contains(rules, word), (text, word)
    assert recursive > 5


def test_deep_nesting_is_refused(tools):
    rules = "\n".join(f'r{n} ::= ("a" | r{n + 1})?' for n in range(2000))
    with pytest.raises(ValueError, match="nested too deeply"):
        tools.compile("ebnf", f'root ::= r0\n{rules}\nr2000 ::= "b"')
