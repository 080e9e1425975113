import random
import re

import pytest

from deepinfer_jax.sampling.grammar.regex_syntax import MAX_REPEAT, RegexError, possible_class


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        ("[0-9]{3}", ["123"], ["12", "1234", "a12"]),
        ("", [""], ["a"]),
        ("a|", ["", "a"], ["b"]),
        ("^ab$", ["ab"], ["xab", "ab\n"]),
        ("(^a|b)c", ["ac", "bc"], ["c"]),
        ("a+?b*?", ["aab", "a"], ["b"]),
        ("(?<n>a)(?P<m>b)(?:c)", ["abc"], ["ab"]),
        ("(?i)ab[c-e]", ["aBD", "ABc"], ["abf"]),
        ("(?i:a)b", ["Ab"], ["AB"]),
        ("(?i)[^k]", ["x", "é"], ["k", "K", "\u212a"]),
        ("(?s).", ["\n"], [""]),
        (".", ["é", " "], ["\n", "\r", "\u2028"]),
        (r"\d\w\s", ["1_ ", "0a\u00a0"], ["\u0663a ", "1é "]),
        (r"\D\W\S", ["a-é", "\n a"], ["1-a", "aéa", "a- "]),
        (r"[^\d\s]", ["é"], ["1", " ", "\ufeff", "\u0663"]),
        (r"[\D]", ["a"], ["1"]),
        (r"\p{Lu}\P{L}\pN", ["É-٣"], ["é-1", "Éa1"]),
        (r"[^\p{L}\d]", ["-"], ["a", "1"]),
        (r"\u00e9\u{1F600}\ud83d\ude00\x41\cJ\0\t\.", ["é😀😀A\n\0\t."], ["é"]),
        (r"[\]\-a\b^]", ["]", "-", "a", "\b", "^"], ["b", "\\"]),
        ("[a-]]", ["a]", "-]"], ["b]"]),
        ("(?:a{2}){2,3}", ["aaaa", "aaaaaa"], ["aaa", "aa"]),
        ("é€", ["é€"], ["é"]),
        ("//", ["//"], ["/"]),
    ],
)
def test_enforced(tools, pattern, good, bad):
    grammar = tools.compile("regex", pattern)
    assert [text for text in good if not tools.accepts(grammar, text)] == []
    assert [text for text in bad if tools.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "pattern, position, text",
    [
        ("(?=a)a", 0, "lookahead"),
        ("x(?!a)b", 1, "negative lookahead"),
        ("(?<=a)b", 0, "lookbehind"),
        ("(?<!a)b", 0, "negative lookbehind"),
        ("(a|b)\\1", 5, "backreference"),
        ("(?P<n>a)(?P=n)", 8, "backreference"),
        ("\\bab\\b", 0, "word boundary"),
        ("a\\B", 1, "word boundary"),
        ("\\Aa", 0, "anchor"),
        ("a{2,1}", 1, "wrong order"),
        ("[", 0, "not closed"),
        ("[]", 0, "empty"),
        ("(a", 0, "not closed"),
        ("a)", 1, "closes no group"),
        ("*a", 0, "repeats nothing"),
        ("a**", 2, "repetition of a repetition"),
        ("a++", 2, "possessive"),
        ("(?>a)", 0, "atomic"),
        ("a{,3}", 1, "begins no"),
        ("{", 0, "no repetition"),
        (f"a{{{MAX_REPEAT + 1}}}", 1, "above the limit"),
        ("^*", 0, "anchor cannot be repeated"),
        ("a^b", 1, "only at the edge"),
        ("(?:a$|b)c", 4, "only at the edge"),
        ("(?m)a", 0, "inline flags"),
        ("a(?i)b", 1, "inline flags"),
        ("(?i)é", 4, "ASCII only"),
        ("(?z)a", 0, "inline flags"),
        ("[z-a]", 1, "wrong order"),
        ("[a-\\d]", 1, "single characters"),
        ("[[:alpha:]]", 1, "POSIX"),
        ("\\q", 0, "unknown"),
        ("\\u12", 0, "correct its digits"),
        ("\\ud800", 0, "no character"),
        ("\\p{Greek}", 0, "property"),
        ("a\\", 1, "escapes nothing"),
        ("(?#x)", 0, "comment"),
        ("(" * 60 + ")" * 60, 51, "nested deeper than 50"),
    ],
)
def test_refused_with_position(tools, pattern, position, text):
    with pytest.raises(RegexError, match=rf"position {position}: .*{text}"):
        tools.compile("regex", pattern)


@pytest.mark.parametrize("pattern", ["[^\\s\\S]", "a(?:b[^\\s\\S]c)+"])
def test_no_text_matches(tools, pattern):
    with pytest.raises(ValueError, match="no text matches"):
        tools.compile("regex", pattern)


def test_dead_branches_are_closed(tools):
    assert tools.texts(tools.compile("regex", "a[^\\s\\S]|b").matcher()) == {b"b"}


def test_too_large(tools):
    with pytest.raises(ValueError, match="too large: .* 1000000 characters, and 100000 are the limit"):
        tools.compile("regex", "(a{1000}){1000}")


def test_classes_are_sound_in_both_dialects():
    for letter, code in (("d", 0x0663), ("w", 0xE9), ("s", 0xFEFF), ("s", 0x85)):
        assert any(low <= code <= high for low, high in possible_class(letter))


ATOMS = ["a", "B", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", "1", "é", " ", r"\n", "(?:a|)"]


def random_pattern(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(ATOMS)
    first, second = random_pattern(rng, depth - 1), random_pattern(rng, depth - 1)
    repeated = f"(?:{first})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "*?"])
    edges = [f"^{first}", f"{first}$", f"(^{first}|{second})B"]
    return rng.choice([first + second, first + second, f"({first}|{second})", repeated, *edges])


@pytest.mark.parametrize("is_search", [False, True], ids=["regex", "pattern"])
def test_random_patterns_agree_with_an_independent_matcher(tools, is_search):
    rng = random.Random(5 + is_search)
    compared = 0
    for _ in range(250):
        pattern = random_pattern(rng, 3)
        try:
            grammar = tools.compile(
                *(("json", {"type": "string", "pattern": pattern}) if is_search else ("regex", pattern))
            )
        except RegexError as error:
            assert "only at the edge" in str(error)
            continue
        except ValueError as error:
            assert is_search and "only at the edge" in str(error)
            continue
        # Python's "$" also matches before a last line end, and its "." more than ECMA-262's.
        python = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
        for _ in range(10):
            text = "".join(rng.choice("aAbB1 é_k\n" if is_search else "aAbB1 é_k") for _ in range(rng.randrange(6)))
            want = bool(python.search(text) if is_search else python.fullmatch(text))
            spelled = '"' + text.replace("\n", "\\n") + '"' if is_search else text
            assert tools.accepts(grammar, spelled) is want, (pattern, text)
            compared += 1
    assert compared > 1000
