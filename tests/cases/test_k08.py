"""K08: trigger and bound tokens."""

import pytest

from deepinfer_jax import SamplingParams
from tests.cases import forcing

TRIGGER = forcing.ids("abc")
[BOUND] = forcing.ids("#")
DIGITS = {"schema_type": "regex", "schema": "[0-9]{3}", "trigger_token_ids": TRIGGER, "bound_token_id": BOUND}
EVERYTHING = set(range(forcing.MODEL_VOCAB_SIZE))


def digits(longest: int) -> set[bytes]:
    """The tokens of digits that fit."""
    return {text for text in forcing.SPELLED.values() if text.isdigit() and len(text) <= longest}


def rows(llm, text: str, num_more: int, so_args: dict = DIGITS) -> list[set[bytes] | None]:
    """What may come at each place behind a forced text; None for everything."""
    [outputs] = forcing.run(llm, [forcing.forced(text, num_more, so_args=so_args)])
    behind = outputs[len(text) :]
    return [None if forcing.allowed(output) == EVERYTHING else forcing.texts(output) for output in behind]


def test_before_the_trigger_everything_is_allowed(llm):
    for text in ("xy", "", "a", "ab", "abab", "1"):
        [row] = rows(llm, text, num_more=1)
        assert row is None, text


def check_digits(outputs) -> None:
    """Three digits, then EOS."""
    num_left = 3
    for output in outputs[:-1]:
        assert forcing.texts(output) == digits(num_left)
        num_left -= len(forcing.SPELLED[output.token_id])
    assert num_left == 0
    assert forcing.texts(outputs[-1]) == {b"EOS"}
    assert (outputs[-1].token_id, outputs[-1].finish_reason) == (forcing.EOS, "stop")


@pytest.mark.parametrize(
    "text, missing",
    [("#", "abc"), ("a#", "abc"), ("ab#", "abc"), ("xya#", "abc"), ("abc", ""), ("ababc", ""), ("aabc", "")],
)
def test_the_bound_token_forces_the_trigger_and_the_trigger_the_grammar(llm, text, missing):
    [outputs] = forcing.run(llm, [forcing.forced(text, 10, so_args=DIGITS)])
    start = len(text)
    found = [forcing.texts(output) for output in outputs[start : start + len(missing)]]
    assert found == [{letter.encode()} for letter in missing]
    check_digits(outputs[start + len(missing) :])


def test_a_bound_token_inside_the_trigger_goes_on_with_it(llm):
    so_args = DIGITS | {"trigger_token_ids": forcing.ids("a#c")}
    assert rows(llm, "a#", 2, so_args) == [{b"c"}, digits(3)]


def test_a_bound_token_behind_the_trigger_has_no_effect(llm):
    so_args = DIGITS | {"schema": "#[0-9]{3}"}
    assert rows(llm, "abc", 1, so_args) == [{b"#"}]
    assert rows(llm, "abc#", 1, so_args) == [digits(3)]


BAD = {
    "bound without a trigger": ({"trigger_token_ids": None}, "bound_token_id.*needs a non-empty 'trigger_token_ids'"),
    "bound in a list": ({"bound_token_id": [35]}, r"bound_token_id'\]=\[35\]"),
    "bound below 0": ({"bound_token_id": -1}, r"bound_token_id'\]=-1"),
    "bound that is a bool": ({"bound_token_id": True}, r"bound_token_id'\]=True"),
    "trigger that is a text": ({"trigger_token_ids": "abc"}, r"trigger_token_ids'\]='abc'"),
    "trigger that is no integer": ({"trigger_token_ids": [1.0]}, r"trigger_token_ids'\]\[0\]=1.0"),
    "trigger beyond the vocabulary": ({"trigger_token_ids": [forcing.MODEL_VOCAB_SIZE]}, "holds 301.*0..300"),
    "bound_token_ids": ({"bound_token_ids": [35]}, "bound_token_ids.*bound_token_id'"),
    "serialized": ({"serialized": "x"}, "serialized.*not supported"),
    "unknown type": ({"schema_type": "xml"}, "schema_type.*'xml' is not one of"),
    "no schema": ({"schema": None}, r"so_args\['schema'\] is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_entries_are_refused_by_name(llm, name):
    change, text = BAD[name]
    so_args = {key: value for key, value in (DIGITS | change).items() if value is not None}
    with pytest.raises(ValueError, match=text):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(so_args=so_args)])
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="schema_type.*is missing"):
        llm.generate("a", SamplingParams(so_args={"schema": "a"}))
