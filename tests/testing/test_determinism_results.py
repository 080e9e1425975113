"""What the matrix compares: tokens, bits, states by position; and the report that a later run goes on from."""

import dataclasses
import json
import os

import numpy as np
import pytest

from deepinfer_jax.testing.determinism import report as reporting
from deepinfer_jax.testing.determinism.report import Report, Row, read_report, write_report
from deepinfer_jax.testing.determinism.results import (
    Difference,
    Result,
    Rows,
    compare_results,
    load_results,
    num_states,
    save_results,
)

ALL_EQUAL = {"tokens": True, "log-probabilities": True, "state": True}


def result(num_tokens: int = 4, **changes) -> Result:
    ids = np.arange(10, 10 + num_tokens)
    state = {".window[0]": Rows(first=2, values=np.arange(12, dtype=np.uint8).reshape(4, 3))}
    plain = Result(
        token_ids=ids,
        logprobs=-np.ones((num_tokens, 2), np.float32),
        top_ids=ids[:, None],
        finish_reason="length",
        state=state,
    )
    return dataclasses.replace(plain, **changes)


def one_ulp(row: int, column: int) -> np.ndarray:
    logprobs = -np.ones((4, 2), np.float32)
    logprobs[row, column] = np.nextafter(np.float32(-1), np.float32(0))
    return logprobs


def changed_state(first: int, row: int) -> dict[str, Rows]:
    """Rows of positions `first` and following, the same at the same positions but for one row."""
    values = np.arange(24, dtype=np.uint8).reshape(8, 3)[first - 2 :]
    values = values.copy()
    values[row, 1] ^= 1
    return {".window[0]": Rows(first=first, values=values)}


def test_equal_results_are_equal():
    assert compare_results({"a": result(), "more": result()}, {"a": result()}) == (None, ALL_EQUAL)


@pytest.mark.parametrize(
    "other, column, position, detail",
    [
        (result(token_ids=np.asarray([10, 99, 12, 13])), "tokens", 1, "token 99; expected is 11"),
        (result(finish_reason="stop"), "tokens", 4, r"ends after 4 tokens \(stop\); expected is 4 \(length\)"),
        (result(3), "tokens", 3, "ends after 3 tokens"),
        (result(0, top_ids=np.zeros((0, 0), np.int64)), "tokens", 0, "ends after 0 tokens"),
        (result(logprobs=one_ulp(2, 0)), "log-probabilities", 2, "of the token: -0x1.f"),
        (result(logprobs=one_ulp(0, 1)), "log-probabilities", 0, "of alternative 1"),
        (result(top_ids=np.asarray([[10], [11], [12], [7]])), "log-probabilities", 3, "expected is"),
        (result(state=changed_state(2, 3)), "state", 5, r"\.window\[0\]: 1 rows differ"),
    ],
    ids=["token", "reason", "shorter", "nothing", "logprob", "alternative", "alternative-id", "state"],
)
def test_each_difference_is_placed(other, column, position, detail):
    difference, equal = compare_results({"a": other}, {"a": result()})
    assert difference is not None and (difference.request, difference.column) == ("a", column)
    assert difference.position == position
    with pytest.raises(AssertionError, match=detail):
        raise AssertionError(difference.detail)
    assert equal == ALL_EQUAL | {column: False}


def test_states_are_compared_at_the_positions_that_both_hold():
    want = {"a": result()}  # positions 2..5
    beyond = {"a": result(state=changed_state(4, 2))}  # 4..9, another byte at 6
    assert compare_results(beyond, want) == (None, ALL_EQUAL)
    within, _ = compare_results({"a": result(state=changed_state(4, 1))}, want)
    assert within is not None and within.position == 5
    apart = {".window[0]": Rows(first=90, values=np.zeros((2, 3), np.uint8))}
    assert compare_results({"a": result(state=apart)}, want) == (None, ALL_EQUAL)
    assert num_states({"a": result(state=None)}, want) == 0 and num_states(want, want) == 1


def test_the_first_difference_is_the_earliest_token_of_any_request():
    got = {
        "a": result(state=changed_state(2, 0)),
        "b": result(logprobs=one_ulp(2, 0)),
        "c": result(logprobs=one_ulp(1, 0)),
    }
    difference, equal = compare_results(got, dict.fromkeys("abc", result()))
    assert difference is not None and (difference.request, difference.position) == ("c", 1)
    assert equal == {"tokens": True, "log-probabilities": False, "state": False}
    missing, _ = compare_results({}, {"a": result()})
    assert missing is not None and missing.detail == "the request gave nothing"


def test_results_survive_a_file_and_a_second_part(tmp_path):
    results = {"a": result(), "b": result(2, state=None)}
    save_results(results, tmp_path / "results.npz")
    loaded = load_results(tmp_path / "results.npz")
    assert compare_results(loaded, results) == (None, ALL_EQUAL) and loaded["b"].state is None
    assert loaded["a"].fingerprint == result().fingerprint != result(2).fingerprint
    first = dataclasses.replace(result(2, state=None), finish_reason="abort")
    rest = dataclasses.replace(result(), **{n: getattr(result(), n)[2:] for n in ("token_ids", "logprobs", "top_ids")})
    assert compare_results({"a": first.followed_by(rest)}, {"a": result()}) == (None, ALL_EQUAL)


def row(name: str = "alone", **changes) -> Row:
    plain = Row(
        name=name, axis="axis", equal=ALL_EQUAL, requests=8, states=7, notes={"rows": 15, "forks": 2}, seconds=1.5
    )
    return dataclasses.replace(plain, **changes)


DIFFERENT = row(
    "forked",
    equal=ALL_EQUAL | {"log-probabilities": False},
    difference=Difference(request="long", column="log-probabilities", position=5, detail="one ulp"),
    microscope="layer 3",
)
FACTS = {"model": "m", "tokens": 24}


def test_the_table_shows_what_differs_and_what_did_not_happen():
    report = Report(facts=FACTS, fingerprints={}, rows=(row(), DIFFERENT, row("few pages", missing="preemptions 0")))
    text = report.to_text()
    assert "equal (7/8)" in text and "15" in text and "forks 2" in text
    assert "forked: long: log-probabilities at 5: one ulp" in text and "forked: microscope: layer 3" in text
    assert "few pages: did not happen: preemptions 0" in text and "2 of 3 rows FAILED" in text
    assert not report.is_ok and Report(facts=FACTS, fingerprints={}, rows=(row(),)).is_ok


def test_no_row_is_no_proof():
    report = Report(facts=FACTS, fingerprints={}, left_out={"mesh": "needs 8 devices"})
    assert not report.is_ok
    assert "no row was run: FAILED" in report.to_text() and "left out: mesh: needs 8 devices" in report.to_text()


def test_a_report_is_read_back_where_the_facts_are_the_same(tmp_path):
    path = tmp_path / "report.json"
    report = Report(facts=FACTS, fingerprints={"a": "0f"}, rows=(row(), DIFFERENT), left_out={"mesh": "none"})
    assert read_report(path, FACTS) is None
    write_report(report, path)
    assert read_report(path, FACTS) == report
    with pytest.raises(ValueError, match="holds a run with tokens 24, unlike this one"):
        read_report(path, FACTS | {"tokens": 512})
    assert os.listdir(tmp_path) == ["report.json"] and json.loads(path.read_text())["format"] == reporting.FORMAT


@pytest.mark.parametrize(
    "text, message", [("{", "is no JSON"), ("[]", "is no determinism report"), ("{}", "is no det")]
)
def test_a_foreign_file_is_refused_and_kept(tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_report(path, FACTS)
    assert path.read_text() == text


def test_a_write_that_breaks_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_report(Report(facts=FACTS, fingerprints={}), path)

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_report(Report(facts=FACTS, fingerprints={}, rows=(row(),)), path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["report.json"] and read_report(path, FACTS) == Report(facts=FACTS, fingerprints={})
