import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.stop import StopWatch


def watch(*stops: str, keep: bool = False) -> StopWatch:
    return StopWatch(SamplingParams(stop=list(stops), include_stop_str_in_output=keep))


def run(stops: tuple[str, ...], pieces: list[str], keep: bool) -> tuple[str, bool, str | None]:
    """Emitted text, whether there was a hit, and the string; nothing may come after a hit."""
    watched, text = watch(*stops, keep=keep), ""
    for piece in pieces:
        emitted, hit = watched.push(piece)
        text += emitted
        if hit:
            assert watched.push("more") == ("", True)
            assert watched.flush() == ""
            return text, True, watched.found
    return text + watched.flush(), False, watched.found


def by_definition(stops: tuple[str, ...], text: str, keep: bool) -> tuple[str, bool, str | None]:
    """The prefix that ends first with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], True, longest
    return text, False, None


def splits(text: str):
    """Every way to cut a text into pieces."""
    for cuts in itertools.product((False, True), repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for place, is_cut in enumerate(cuts, 1):
            if is_cut:
                pieces.append(text[start:place])
                start = place
        yield [*pieces, text[start:]]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "stops, text",
    [
        (("END",), "o ENEND t"),
        (("aab",), "aaaab rest"),
        (("abcd", "bc"), "xabcdx"),
        (("ab", "b"), "xxab"),
        (("abab", "ba"), "aabab"),
        (("\n\n",), "a\nb\n\nc"),
        (("é€",), "caf é€ ok"),
        (("zzz",), "zz z zz"),
        (("a",), ""),
    ],
)
def test_every_split_of_a_text_gives_the_same(stops, text, keep):
    expected = by_definition(stops, text, keep)
    for pieces in splits(text):
        assert run(stops, pieces, keep) == expected, pieces


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.booleans(),
)
def test_random_texts_and_splits_follow_the_definition(stops, pieces, keep):
    assert run(tuple(stops), pieces, keep) == by_definition(tuple(stops), "".join(pieces), keep)


def test_only_a_possible_beginning_is_held_back():
    watched = watch("STOP")
    assert watched.push("text S") == ("text ", False)
    assert watched.push("TO") == ("", False)
    assert watched.push("N S") == ("STON ", False)
    assert watched.flush() == "S"
    assert watched.flush() == ""


def test_without_stop_strings_all_text_passes():
    watched = StopWatch(SamplingParams())
    assert watched.push("any") == ("any", False)
    assert watched.flush() == "" and watched.found is None


def test_text_before_the_least_length_passes_unread():
    watched = watch("ab")
    assert watched.push("xa") == ("x", False)
    assert watched.push("b", may_stop=False) == ("ab", False)
    assert watched.push("ab") == ("", True)


def test_a_fork_goes_its_own_way():
    first = watch("ab")
    first.push("a")
    second = first.fork()
    assert first.push("b") == ("", True)
    assert second.push("c") == ("ac", False)
