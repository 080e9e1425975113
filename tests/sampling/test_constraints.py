import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling.bad_words import SequenceBan, bad_sequences_of
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import GrammarError, Vocabulary, compile_grammar, parse_so_args
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.text import tiny_tokenizer
from deepinfer_jax.text.tokenizer import Tokenizer, load_backend

EOS, VOCAB = 1, 37


def state_of(params: SamplingParams, prompt=(5, 6, 5), bad=(), **more) -> DrawState:
    return DrawState(params, prompt=list(prompt), eos_id=EOS, vocab_size=VOCAB, bad_sequences=bad, **more)


def allowed(state: DrawState, vocab_size: int = VOCAB) -> set[int]:
    row = np.full(-(-vocab_size // 32), 0xDEADBEEF, np.uint32)
    state.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


def edits(state: DrawState) -> dict[int, tuple[float, float, float]]:
    ids, up, down, add = state.edits()
    assert [a.dtype for a in (ids, up, down, add)] == [np.int32, np.float32, np.float32, np.float32]
    assert len(ids) == len(up) == len(down) == len(add) == state.num_edits == len(set(ids.tolist()))
    return {int(i): (float(u), float(d), float(a)) for i, u, d, a in zip(ids, up, down, add, strict=True)}


# The definitions, from all tokens at once.


def allowed_by_definition(params: SamplingParams, output: list[int], bad) -> set[int]:
    ids = set(params.allowed_token_ids or range(VOCAB))
    for sequence in bad:
        head = list(sequence[:-1])
        if not head or output[-len(head) :] == head:
            ids.discard(sequence[-1])
    if len(output) < params.min_tokens:
        ids -= {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    return ids


def edits_by_definition(params: SamplingParams, prompt, output) -> dict[int, tuple[float, float, float]]:
    r, counts, bias = params.repetition_penalty, Counter(output), dict(params.logit_bias or ())
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0
    named = set(bias) | (set(prompt) | set(output) if r != 1 else set()) | (set(output) if has_penalty else set())
    result = {}
    for token in named:
        is_repeated = r != 1 and (token in prompt or token in counts)
        add = bias.get(token, 0.0) - params.presence_penalty * (token in counts)
        add -= params.frequency_penalty * counts[token]
        up, down = (1 / r, r) if is_repeated else (1.0, 1.0)
        result[token] = tuple(float(np.float32(x)) for x in (up, down, add))
    return result


tokens = st.integers(0, 7)
some_options = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.9]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-3.3, 0.1, 40.0]), max_size=3),
        "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=6),
        "stop_token_ids": st.lists(tokens, max_size=2),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
    }
)
some_bad = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=4)


def check(state: DrawState, params, prompt, output, bad) -> None:
    assert state.num_output == len(output)
    assert allowed(state) == allowed_by_definition(params, output, bad)
    assert edits(state) == edits_by_definition(params, prompt, output)
    assert state.needs_mask or allowed(state) == set(range(VOCAB))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(some_options, st.lists(tokens, max_size=5), some_bad, st.data())
def test_step_by_step_is_the_same_as_from_scratch(options, prompt, bad, data):
    params = SamplingParams(**options)
    state, output = state_of(params, prompt, bad), []
    check(state, params, prompt, output, bad)
    for _ in range(data.draw(st.integers(0, 12))):
        if output and data.draw(st.integers(0, 3)) == 0:
            count = data.draw(st.integers(0, len(output)))
            state.rollback(count)
            output = output[: len(output) - count]
        else:
            output = [*output, data.draw(st.integers(0, 3))]
            state.advance(output[-1])
        check(state, params, prompt, output, bad)
    again = state_of(params, prompt, bad)
    again.replay(output)
    for mine, other in zip(state.edits(), again.edits(), strict=True):
        np.testing.assert_array_equal(mine, other)
    again.replay([3, *output])
    check(again, params, prompt, [3, *output], bad)
    fork = state.fork()
    state.advance(2)
    fork.advance(3)
    check(state, params, prompt, [*output, 2], bad)
    check(fork, params, prompt, [*output, 3], bad)
    fork.rollback(len(output) + 1)
    check(fork, params, prompt, [], bad)
    check(state, params, prompt, [*output, 2], bad)


def test_a_long_output_grows_the_arrays_and_shrinks_back():
    params, state = SamplingParams(frequency_penalty=0.5, logit_bias={3: 1.0}), None
    state = DrawState(params, prompt=[1], eos_id=EOS, vocab_size=5000)
    output = [(7 * i) % 4000 for i in range(3000)]
    state.replay(output)
    assert edits(state) == edits_by_definition(params, [1], output)
    state.rollback(2999)
    assert edits(state) == edits_by_definition(params, [1], output[:1])


@pytest.mark.parametrize(
    "options, needs",
    [
        ({}, False),
        ({"stop": "a", "stop_token_ids": [4], "min_p": 0.1, "n": 2, "top_k": 3}, False),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_the_host_is_needed_for(options, needs):
    state = state_of(SamplingParams(**options))
    assert state.needs_host is needs
    assert state.needs_mask is ("allowed_token_ids" in options)
    state.advance(4)
    assert state.needs_host is needs


def test_the_host_is_needed_until_the_least_length_is_reached():
    state = state_of(SamplingParams(min_tokens=2, stop_token_ids=[9]))
    for _ in range(2):
        assert state.needs_host and state.needs_mask
        assert allowed(state) == set(range(VOCAB)) - {EOS, 9}
        state.advance(4)
    assert not state.needs_host and not state.needs_mask
    assert allowed(state) == set(range(VOCAB))
    state.rollback(1)
    assert state.needs_host


def test_eos_is_a_token_like_others_when_it_ends_nothing():
    assert EOS in allowed(state_of(SamplingParams(min_tokens=2, ignore_eos=True)))
    assert not state_of(SamplingParams(min_tokens=2, ignore_eos=True)).needs_host


def test_bad_sequences_are_those_of_the_output_and_may_overlap():
    bad = [(2, 3, 2, 4), (3, 2, 5), (2, 6), (7,)]
    state = state_of(SamplingParams(bad_words=["x"]), prompt=[2, 3], bad=bad)
    assert state.needs_host
    everything = set(range(VOCAB)) - {7}
    for token, forbidden in ((2, set()), (3, {6}), (2, set()), (2, {4, 5, 6}), (0, {6})):
        assert allowed(state) == everything - forbidden
        state.advance(token)
    assert allowed(state) == everything


def test_bad_words_must_come_with_their_sequences():
    with pytest.raises(ValueError, match="bad_sequences_of"):
        state_of(SamplingParams(bad_words=["x"]))
    with pytest.raises(ValueError, match="empty sequence"):
        SequenceBan([()])


def test_ids_outside_the_vocabulary_and_wrong_rows_are_refused():
    with pytest.raises(ValueError, match=r"outside the vocabulary 0\.\.36"):
        state_of(SamplingParams(allowed_token_ids=[37]))
    state = state_of(SamplingParams())
    for row in (np.zeros(1, np.uint32), np.zeros(2, np.uint64), np.zeros(4, np.uint32)[::2]):
        with pytest.raises(ValueError, match="one contiguous row of 2 32-bit words"):
            state.fill_mask(row)
    with pytest.raises(ValueError, match="cannot take back 1 tokens of 0"):
        state.rollback(1)


def test_edit_views_are_read_only():
    for array in state_of(SamplingParams(logit_bias={1: 2.0})).edits():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_extreme_options_stay_finite():
    options = {"repetition_penalty": 1e-30, "frequency_penalty": -2, "presence_penalty": -2}
    state = state_of(SamplingParams(logit_bias={3: 3.4e38, 4: -3.4e38}, **options))
    state.replay([3, 4, 3])
    assert all(np.isfinite(array).all() for array in state.edits())
    assert math.isclose(edits(state)[5][1], 1e-30, rel_tol=1e-6)


GRAMMAR_VOCAB = tiny_tokenizer.VOCAB_SIZE + 10
VOCABULARY = Vocabulary(
    token_bytes=(b"<bos>", b"<eos>", b"<pad>", *(bytes([byte]) for byte in range(256)), *tiny_tokenizer.MERGED_TOKENS),
    blocked_ids=frozenset({0, EOS, 2}),
    eos_id=EOS,
    vocab_size=GRAMMAR_VOCAB,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tiny_tokenizer.write_tiny_byte(tmp_path_factory.mktemp("tiny"))
    return Tokenizer(
        path=path,
        compatibility="native",
        vocab_size=tiny_tokenizer.VOCAB_SIZE,
        bos_id=0,
        eos_id=EOS,
        pad_id=2,
        image_id=None,
        backend=load_backend(path),
    )


def test_bad_words_are_encoded_with_and_without_a_space_and_without_bos(tokenizer):
    b = tiny_tokenizer.byte_ids
    assert bad_sequences_of(["ab", " c", "ab"], tokenizer) == (tuple(b(b"ab")), tuple(b(b" ab")), tuple(b(b" c")))
    quote = tokenizer.encode_bare(' "')
    assert len(quote) == 1
    assert bad_sequences_of(['"'], tokenizer) == (tuple(b(b'"')), tuple(quote))


def test_a_grammar_is_one_of_the_constraints():
    grammar = compile_grammar(parse_so_args({"schema_type": "regex", "schema": "[0-9]{1,2}[ab]"}), VOCABULARY)
    digits = tiny_tokenizer.byte_ids(b"0123456789")
    a, b = tiny_tokenizer.byte_ids(b"ab")
    params = SamplingParams(allowed_token_ids=[*digits[:5], a, b, EOS], min_tokens=4, presence_penalty=0.5)

    def fresh() -> DrawState:
        return DrawState(
            params,
            prompt=[5],
            eos_id=EOS,
            vocab_size=GRAMMAR_VOCAB,
            matcher=grammar.matcher(),
            bad_sequences=[(digits[0], digits[1]), (b,)],
        )

    def now(state: DrawState) -> set[int]:
        return allowed(state, GRAMMAR_VOCAB)

    state = fresh()
    assert now(state) == set(digits[:5])
    state.advance(digits[0])
    assert now(state) == {digits[0], *digits[2:5], a}
    with pytest.raises(GrammarError):
        state.advance(EOS)
    assert state.num_output == 1 and now(state) == {digits[0], *digits[2:5], a}
    fork = state.fork()
    state.advance(a)
    assert now(state) == set()  # the grammar wants EOS, min_tokens does not
    assert now(fork) == {digits[0], *digits[2:5], a}
    state.rollback(2)
    assert now(state) == set(digits[:5])
    state.replay([digits[0], a, EOS])
    assert now(state) == {*digits[:5], a}
    again = fresh()
    again.replay([digits[0], a, EOS])
    assert now(again) == now(state)


def test_a_finished_grammar_needs_the_host_no_more():
    matcher = compile_grammar(parse_so_args({"schema_type": "regex", "schema": "a"}), VOCABULARY).matcher()
    state = DrawState(SamplingParams(), prompt=[5], eos_id=EOS, vocab_size=GRAMMAR_VOCAB, matcher=matcher)
    for token in (*tiny_tokenizer.byte_ids(b"a"), EOS):
        assert state.needs_host and state.needs_mask
        state.advance(token)
    assert not state.needs_host and not state.needs_mask


def test_the_options_that_may_forbid_tokens_are_named():
    matcher = compile_grammar(parse_so_args({"schema_type": "regex", "schema": "a*"}), VOCABULARY).matcher()
    params = SamplingParams(allowed_token_ids=[5, *tiny_tokenizer.byte_ids(b"a")], min_tokens=1)
    state = DrawState(params, prompt=[5], eos_id=EOS, vocab_size=GRAMMAR_VOCAB, matcher=matcher, bad_sequences=[(5, 5)])
    assert state.has_grammar
    assert state.restrictions == ("so_args", "allowed_token_ids", "bad_words", "min_tokens")
    state.advance(*tiny_tokenizer.byte_ids(b"a"))
    assert state.restrictions == ("so_args", "allowed_token_ids", "bad_words"), "as many as min_tokens are out"
    free = state_of(SamplingParams(presence_penalty=1.0, logit_bias={3: 1.0}))
    assert not free.has_grammar and free.restrictions == ()
