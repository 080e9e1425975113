import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling.grammar import GrammarError, fill_mask

A, B, C, BOUND = (3 + byte for byte in b"abc#")
TRIGGER = {"trigger_token_ids": [A, B, C], "bound_token_id": BOUND}
DIGIT_STARTS = {b"%d" % n for n in range(10)} | {b"%d" % n for n in range(10, 39)}

GRAMMARS = {
    "json": ("json", {"type": "object", "properties": {"k": {"type": "string", "maxLength": 5}}}, {}),
    "regex": ("regex", "(?:ab|a|é{2})+[0-9]{2}", {}),
    "ebnf": ("ebnf", 'root ::= "(" root ")" root | [0-9]{0,3}', {}),
    "trigger": ("regex", "[0-9]{3}", {"trigger_token_ids": [A, B, A, C], "bound_token_id": BOUND}),
}


def test_before_the_trigger_everything_is_allowed(tools):
    matcher = tools.force(tools.compile("regex", "[0-9]{3}", **TRIGGER), "xy")
    assert not matcher.needs_mask
    assert tools.allowed(matcher) == list(range(tools.vocabulary.vocab_size))


@pytest.mark.parametrize("free", ["#", "ab#", "xyab#", "aab#"])
def test_bound_token_forces_the_whole_trigger(tools, free):
    matcher = tools.force(tools.compile("regex", "[0-9]{3}", **TRIGGER), free)
    for token_id in (A, B, C):
        assert matcher.needs_mask and tools.allowed(matcher) == [token_id]
        matcher.advance(token_id)
    assert tools.texts(matcher) == DIGIT_STARTS
    for digit in "12":
        matcher.advance(*tools.ids(digit))
    assert tools.texts(matcher) == {b"%d" % n for n in range(10)}
    matcher.advance(*tools.ids("3"))
    assert tools.texts(matcher) == {b"EOS"}


def test_bound_token_inside_the_trigger_forces_the_rest(tools):
    grammar = tools.compile("regex", "x", trigger_token_ids=[A, B, C], bound_token_id=B)
    assert tools.allowed(tools.force(grammar, "ab")) == [C]
    assert tools.allowed(tools.force(grammar, "b")) == [A]
    assert tools.texts(tools.force(grammar, "abc")) == {b"x"}


def test_bound_token_after_the_trigger_is_a_token_like_others(tools):
    grammar = tools.compile("regex", "#[0-9]", **TRIGGER)
    matcher = tools.force(grammar, "zabc")
    assert tools.texts(matcher) == {b"#"}
    matcher.advance(BOUND)
    assert tools.texts(matcher) == {b"%d" % n for n in range(10)}


@pytest.mark.parametrize("text, is_free", [("abab", True), ("ababac", False), ("abaabac", False), ("abacab", False)])
def test_overlapping_partial_matches_count(tools, text, is_free):
    grammar = tools.compile("regex", "[ab]{0,9}", trigger_token_ids=[A, B, A, C])
    assert tools.force(grammar, text).needs_mask is not is_free


def test_eos_is_no_end_before_the_trigger(tools):
    matcher = tools.compile("regex", "x", **TRIGGER).matcher()
    matcher.advance(tools.eos)
    assert not matcher.is_finished and not matcher.needs_mask


def test_after_eos_everything_is_allowed(tools):
    matcher = tools.force(tools.compile("regex", "a?"), "")
    assert tools.texts(matcher) == {b"a", b"EOS"}
    matcher.advance(tools.eos)
    assert matcher.is_finished and not matcher.needs_mask
    matcher.advance(tools.vocabulary.vocab_size - 1)
    assert tools.allowed(matcher) == list(range(tools.vocabulary.vocab_size))
    matcher.rollback(2)
    assert tools.texts(matcher) == {b"a", b"EOS"}


def test_control_tokens_and_padding_are_never_in_a_grammar(tools):
    matcher = tools.compile("regex", r"(?s).*").matcher()
    allowed = tools.allowed(matcher)
    assert tools.eos in allowed and not {0, 2} & set(allowed)
    assert max(allowed) < len(tools.vocabulary.token_bytes)
    for token_id in (0, 2, len(tools.vocabulary.token_bytes)):
        with pytest.raises(GrammarError, match=f"token {token_id} is not allowed at output position 0"):
            matcher.advance(token_id)
    with pytest.raises(GrammarError, match="is no id of the model"):
        matcher.advance(tools.vocabulary.vocab_size)


def test_no_invalid_utf8(tools):
    matcher = tools.force(tools.compile("regex", ".{2}"), b"\xe2\x82")
    assert tools.texts(matcher) == {bytes([byte]) for byte in range(0x80, 0xC0)}
    assert not tools.accepts(tools.compile("regex", ".{2}"), b"a\xff")


def test_a_forbidden_token_changes_nothing(tools):
    matcher = tools.force(tools.compile("regex", "[0-9]{3}"), "1")
    before = matcher.mask()
    for token_id in (*tools.ids("x"), tools.eos):
        with pytest.raises(GrammarError, match=f"token {token_id} is not allowed at output position 1"):
            matcher.advance(token_id)
    np.testing.assert_array_equal(matcher.mask(), before)
    assert matcher.num_tokens == 1


def test_a_forced_trigger_refuses_other_tokens(tools):
    matcher = tools.force(tools.compile("regex", "x", **TRIGGER), "#")
    with pytest.raises(GrammarError, match=f"only {A}, part of the trigger"):
        matcher.advance(B)


def test_rollback_beyond_the_start(tools):
    matcher = tools.force(tools.compile("regex", "[0-9]{3}"), "12")
    with pytest.raises(ValueError, match="cannot take back 3 tokens of 2"):
        matcher.rollback(3)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("text", ["", "#", "abc1"])
def test_fill_mask_writes_the_callers_row_and_nothing_else(tools, dtype, text):
    matcher = tools.force(tools.compile("regex", "[0-9]{3}", **TRIGGER), text)
    rows = np.full((3, tools.vocabulary.mask_words), 0x55555555, dtype)
    fill_mask(matcher, rows[1])
    np.testing.assert_array_equal(rows[1].view(np.uint32), matcher.mask())
    assert (rows[[0, 2]] == 0x55555555).all()


def test_fill_mask_refuses_a_wrong_row(tools):
    matcher = tools.compile("regex", "a").matcher()
    words = tools.vocabulary.mask_words
    for row in (np.zeros(words + 1, np.uint32), np.zeros(words, np.uint64), np.zeros((words, 2), np.uint32)[:, 0]):
        with pytest.raises(ValueError, match=f"give one contiguous row of {words} 32-bit words"):
            fill_mask(matcher, row)


def test_matchers_of_one_grammar_are_independent(tools):
    grammar = tools.compile("regex", "a|b[0-9]")
    first, second = tools.force(grammar, "b"), grammar.matcher()
    assert tools.texts(second) == {b"a", b"b"}
    assert first.num_tokens == 1


@pytest.fixture(scope="module")
def compiled(tools):
    return {name: tools.compile(kind, schema, **more) for name, (kind, schema, more) in GRAMMARS.items()}


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 2**32), moves=st.lists(st.integers(-6, 6), max_size=12)
)
def test_rollback_fork_and_replay_restore_every_mask(tools, compiled, name, seed, moves):
    """Positive moves advance, negative ones roll back, zero forks; every mask is what it was at that position."""
    rng = random.Random(seed)
    matcher = compiled[name].matcher()
    tokens: list[int] = []
    masks = [matcher.mask()]
    for move in moves:
        if move == 0:
            original, matcher = matcher, matcher.fork()
            for _ in range(min(2, len(tokens))):
                original.rollback(1)
        elif move < 0:
            count = min(-move, len(tokens))
            matcher.rollback(count)
            del tokens[len(tokens) - count :], masks[len(masks) - count :]
        for _ in range(max(move, 0)):
            hints = [i for i in (A, B, C, BOUND, tools.eos) if i in tools.allowed(matcher)]
            token_id = rng.choice(hints if hints and rng.random() < 0.5 else tools.allowed(matcher))
            matcher.advance(token_id)
            tokens.append(token_id)
            masks.append(matcher.mask())
        np.testing.assert_array_equal(matcher.mask(), masks[-1])
        assert matcher.num_tokens == len(tokens)
    state = matcher.phase, matcher.is_finished, matcher.needs_mask
    twin = matcher.fork()
    twin.rollback(len(tokens))
    np.testing.assert_array_equal(twin.mask(), masks[0])
    for other in (compiled[name].matcher(), matcher):
        other.replay(tokens)
        np.testing.assert_array_equal(other.mask(), masks[-1])
        assert (other.phase, other.is_finished, other.needs_mask) == state
    for mask in reversed(masks[:-1]):
        matcher.rollback(1)
        np.testing.assert_array_equal(matcher.mask(), mask)


def test_a_fork_does_not_move_its_original(tools):
    matcher = tools.force(tools.compile("regex", "[0-9]{4}"), "12")
    before = matcher.mask()
    twin = matcher.fork()
    twin.advance(*tools.ids("3"))
    twin.rollback(3)
    np.testing.assert_array_equal(matcher.mask(), before)
    matcher.rollback(1)
    twin.replay(tools.ids("1234"))
    assert tools.texts(twin) == {b"EOS"} and matcher.num_tokens == 1


def test_another_requests_trigger_on_the_same_grammar(tools):
    grammar = tools.compile("regex", "x")
    other = grammar.for_request(dataclasses.replace(grammar.request, trigger_token_ids=(A,)))
    assert tools.texts(grammar.matcher()) == {b"x"}
    assert not other.matcher().needs_mask
    assert tools.texts(tools.force(other, "a")) == {b"x"}
