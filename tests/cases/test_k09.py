"""K09: what cannot be enforced is refused."""

import time

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny
from tests.cases import forcing

TIME_LIMIT_S = 20  # the default of DEEPINFER_XGRAMMAR_TIMEOUT
FAILED = "xgrammar runtime errors or timeout"

# (type, schema) -> what the refusal says: the construct, and where it is.
REFUSED = {
    ("regex", "(?=a)a"): r"position 0: lookahead '\(\?='",
    ("regex", "(?!a)b"): r"position 0: negative lookahead '\(\?!'",
    ("regex", r"(a|b)\1"): r"position 5: the backreference '\\1'",
    ("regex", r"\bab\b"): r"position 0: the word boundary '\\b'",
    ("regex", "a{2,1}"): r"position 1: the repetition \{2,1\}",
    ("regex", "["): "position 0: this class is not closed",
    ("ebnf", "root ::= foo"): "line 1, rule 'root': the rule 'foo' is not defined",
    ("ebnf", 'start ::= "a"'): "no rule 'root'.*the rules are start",
    ("ebnf", 'root ::= "a" root'): "line 1, rule 'root': no finite text",
    ("ebnf", ""): "no rule 'root'.*the text has no rule",
    ("json", "{not json"): "line 1, column 2",
    ("json", '{"type":"strnig"}'): "at #/type: the type 'strnig'",
    ("json", '{"enum":[]}'): "at #/enum:",
    ("json", '{"type":"integer","minimum":5,"maximum":3}'): "at #/minimum: minimum 5 is above maximum 3",
}
# (type, schema) -> a text that it allows, and one whose last letter is the first that it does not.
ENFORCED = {
    ("regex", r"\p{L}+"): ("Éa", "a1"),
    ("regex", "(?i)ab"): ("aB", "Ac"),
    ("ebnf", 'root ::= root "a" | "b"'): ("baa", "bb"),
}


def grammar(key: tuple[str, str]) -> dict:
    return {"so_args": {"schema_type": key[0], "schema": key[1]}}


def check_usable(llm) -> None:
    assert not llm.engine.has_unfinished_requests()
    [outputs] = forcing.run(llm, [SamplingParams(max_tokens=2, ignore_eos=True)])
    assert len(outputs) == 2


@pytest.mark.parametrize("key", REFUSED, ids=" ".join)
def test_a_refusal_names_the_construct(llm, key):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"prompt 1: so_args: .*{REFUSED[key]}"):
        forcing.run(llm, [SamplingParams(), SamplingParams(**grammar(key))])
    assert time.perf_counter() - start < TIME_LIMIT_S
    check_usable(llm)


def test_a_refused_grammar_ends_its_request_where_that_is_asked_for(llm):
    keys = list(REFUSED)
    plain = SamplingParams(max_tokens=3, ignore_eos=True, seq_seed=4)
    params = [plain, *(SamplingParams(max_tokens=3, **grammar(key)) for key in keys)]
    first, *others = forcing.run(llm, params, on_error="finish")
    assert [o.token_id for o in first] == [o.token_id for o in forcing.run(llm, [plain])[0]]
    for key, outputs in zip(keys, others, strict=True):
        assert [(o.token_id, o.finish_reason, o.text) for o in outputs] == [(-1, FAILED, "")], key
    check_usable(llm)


def test_an_engine_request_with_a_refused_grammar_ends(model):
    engine = tiny.tiny_engine(model)
    sequences = {
        str(place): engine.add_request("user", str(place), SamplingParams(**grammar(key)), [5])
        for place, key in enumerate(REFUSED)
    }
    found: dict[str, list] = {}
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        assert time.perf_counter() - start < TIME_LIMIT_S
    assert found.keys() == sequences.keys()
    for name, [output] in found.items():
        assert (output.token_id, output.finish_reason, output.finished, output.text) == (-1, FAILED, True, "")
        assert isinstance(sequences[name].error, ValueError)
    assert engine.scheduler.counters.prefill_steps == 0, "nothing of them runs"


@pytest.mark.parametrize("key", ENFORCED, ids=" ".join)
def test_a_regular_construct_is_enforced(llm, key):
    good, bad = ENFORCED[key]
    assert forcing.EOS in forcing.allowed(forcing.next_row(llm, good, **grammar(key)))
    assert forcing.ids(bad)[-1] not in forcing.allowed(forcing.next_row(llm, bad[:-1], **grammar(key)))
    [outputs] = forcing.run(llm, [forcing.forced(bad, **grammar(key))])
    assert [o.token_id for o in outputs] == forcing.ids(bad)[:-1], "a forced text that does not fit ends the request"
    assert outputs[-1].finish_reason == FAILED
    check_usable(llm)


def test_left_recursion_begins_with_what_does_not_recur(llm):
    key = ("ebnf", 'root ::= root "a" | "b"')
    assert forcing.texts(forcing.next_row(llm, "", **grammar(key))) == {b"b"}
    assert forcing.texts(forcing.next_row(llm, "b", **grammar(key))) == {b"a", b"EOS"}
