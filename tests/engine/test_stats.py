import numpy as np
import pytest

from deepinfer_jax.engine import stats as stats_module
from deepinfer_jax.engine.stats import EngineStats

STEP = {"rows": 3, "padded_rows": 4, "is_prefill": False, "bucket": "decode-4", "idle_s": 0.0, "copies": 0}


class Clock:
    """Time that moves only when a test says so; the steps are powers of two, so that sums are exact."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def wait(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stats(clock):
    return EngineStats(clock)


def run_one(stats, clock, request_id="a", reason="length"):
    """A prompt of 5 in 2 s of prefill, then 3 tokens after 0.5 s and 1 token after 1 s."""
    stats.added(request_id, 5)
    stats.launched(**STEP | {"rows": 5, "padded_rows": 8, "is_prefill": True, "bucket": "prefill-8", "idle_s": 0.25})
    clock.wait(2.0)
    stats.emitted({request_id: 1})
    stats.launched(**STEP | {"copies": 2})
    clock.wait(0.75)
    stats.emitted({request_id: 3})
    stats.launched(**STEP)
    clock.wait(1.25)
    stats.emitted({request_id: 1})
    stats.ended(request_id, reason)


def test_report_of_one_request_has_every_documented_field_with_its_value(stats, clock):
    clock.wait(4.0)  # without work
    run_one(stats, clock)
    clock.wait(8.0)
    report = stats.report({})
    itl = np.percentile([0.25, 0.25, 0.25, 1.25], [50, 90, 99])
    assert report == {
        "elapsed_s": 16.0,
        "work_s": 4.0,
        "steps": 3,
        "prefill_steps": 1,
        "decode_steps": 2,
        "steps_per_s": 0.75,
        "tokens_per_s": 1.25,
        "prompt_tokens_per_s": 1.25,
        "requests": 1,
        "prompt_tokens": 5,
        "output_tokens": 5,
        "prompt_len_mean": 5.0,
        "output_len_mean": 5.0,
        **dict.fromkeys(("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_max_s"), 2.0),
        "itl_mean_s": 0.5,
        **dict(zip(("itl_p50_s", "itl_p90_s", "itl_p99_s"), itl, strict=True)),
        "itl_max_s": 1.25,
        "rows": 11,
        "padded_rows": 16,
        "padding_share": 0.3125,
        "copies": 2,
        "buckets": {"prefill-8": 1, "decode-4": 2},
        "compilations": 0,
        "recompilations": 0,
        "recompiled": {},
        "compile_s": 0.0,
        "idle_s": 0.25,
        "idle_share": 0.0625,
        "finished": {"length": 1},
        "aborted": 0,
    }


def test_every_field_is_in_the_table(stats):
    stats.verified([0.0], 1, 1)
    rows = [line.split("|")[1].strip() for line in stats_module.__doc__.splitlines() if line.startswith("| ")]
    named = set()
    for row in rows[1:]:
        first, *others = row.split(", ")
        stem = first.removesuffix("_mean_s")
        named |= {first} | {stem + other if other.startswith("_") else other for other in others}
    assert named == set(stats.report({}))


def test_report_before_anything_happened_has_no_rates_and_no_latencies(stats):
    report = stats.report({})
    empty = {name for name, value in report.items() if value is None}
    latencies = {name for name in report if name.startswith(("ttft_", "itl_"))}
    rates = {"steps_per_s", "tokens_per_s", "prompt_tokens_per_s", "padding_share", "idle_share"}
    assert empty == latencies | rates | {"prompt_len_mean", "output_len_mean"}


def test_interval_has_what_came_since_the_last_and_leaves_the_report_alone(stats, clock):
    run_one(stats, clock, "a", "length")
    first = stats.interval()
    assert first == stats.report({})
    clock.wait(16.0)
    stats.added("b", 3)
    clock.wait(1.0)
    stats.emitted({"b": 1})
    stats.launched(**STEP)
    stats.ended("b", "abort")
    second, whole = stats.interval(), stats.report({})
    expected = {
        "elapsed_s": 17.0,
        "work_s": 1.0,
        "steps": 1,
        "prefill_steps": 0,
        "requests": 1,
        "prompt_tokens": 3,
        "output_tokens": 1,
        "ttft_mean_s": 1.0,
        "ttft_p99_s": 1.0,
        "ttft_max_s": 1.0,
        "itl_p50_s": None,
        "itl_max_s": None,
        "buckets": {"decode-4": 1},
        "idle_s": 0.0,
        "finished": {"abort": 1},
        "aborted": 1,
    }
    assert {name: second[name] for name in expected} == expected
    assert (whole["steps"], whole["ttft_mean_s"], whole["ttft_max_s"]) == (4, 1.5, 2.0)
    assert whole["finished"] == {"length": 1, "abort": 1}
    assert stats.interval()["steps"] == 0


def test_request_over_the_border_of_two_intervals_counts_in_both(stats, clock):
    stats.added("a", 1)
    clock.wait(1.0)
    stats.emitted({"a": 1})
    assert stats.interval()["work_s"] == 1.0
    clock.wait(0.5)
    stats.emitted({"a": 1})
    second = stats.interval()
    assert (second["work_s"], second["itl_p50_s"], second["ttft_p50_s"]) == (0.5, 0.5, None)


def test_work_is_the_time_with_an_unfinished_request_however_many(stats, clock):
    clock.wait(1.0)
    stats.added("a", 1)
    clock.wait(2.0)
    stats.added("b", 1)
    clock.wait(4.0)
    stats.ended("a", "stop")
    clock.wait(8.0)
    stats.ended("b", "stop")
    clock.wait(16.0)
    assert (stats.report({})["work_s"], stats.report({})["elapsed_s"]) == (14.0, 31.0)


def test_latencies_are_those_of_each_request(stats, clock):
    for request_id in "ab":
        stats.added(request_id, 1)
    for request_id, seconds in (("a", 1.0), ("b", 1.0), ("a", 4.0), ("b", 1.0)):
        clock.wait(seconds)
        stats.emitted({request_id: 1})
    report = stats.report({})
    assert (report["ttft_p50_s"], report["ttft_max_s"]) == (1.5, 2.0)
    assert (report["itl_p50_s"], report["itl_max_s"]) == (5.0, 5.0)


def test_percentiles_are_those_of_the_last_samples_and_mean_and_maximum_those_of_all(stats, clock, monkeypatch):
    monkeypatch.setattr(stats_module, "SAMPLES", 4)
    for index, seconds in enumerate((32.0, 1.0, 2.0, 3.0, 4.0)):
        stats.added(str(index), 1)
        clock.wait(seconds)
        stats.emitted({str(index): 1})
        stats.ended(str(index), "stop")
        if index == 3:
            stats.interval()
    report = stats.report({})
    assert (report["ttft_p50_s"], report["ttft_max_s"], report["ttft_mean_s"]) == (2.5, 32.0, 8.4)
    assert stats.interval()["ttft_p50_s"] == 4.0


def test_memory_is_bounded_by_unfinished_requests(stats, clock):
    for index in range(200):
        request_id = str(index)
        stats.added(request_id, 1)
        if index % 4:  # the others end before their first token
            stats.emitted({request_id: index})
        stats.ended(request_id, ("stop", "abort", "length", "prompt_length_exceeded")[index % 4])
    assert stats.num_live == 0
    stats.emitted({"late": 1})
    stats.ended("refused", "prompt_length_exceeded")
    assert stats.num_live == 0
    report = stats.report({})
    assert report["finished"] == {"stop": 50, "abort": 50, "length": 50, "prompt_length_exceeded": 51}
    assert report["aborted"] == 50


def test_id_can_be_used_again_after_its_end_and_not_before(stats):
    stats.added("a", 1)
    with pytest.raises(ValueError, match="request 'a' has not ended; give every unfinished request its own id"):
        stats.added("a", 1)
    stats.ended("a", "stop")
    stats.added("a", 1)
    assert (stats.num_live, stats.report({})["requests"]) == (1, 2)


def test_step_that_gave_a_request_nothing_changes_no_latency(stats, clock):
    stats.added("a", 1)
    clock.wait(1.0)
    stats.emitted({"a": 0})
    clock.wait(1.0)
    stats.emitted({"a": 1})
    assert (stats.report({})["ttft_max_s"], stats.report({})["output_tokens"]) == (2.0, 1)


def test_compilation_after_the_warm_up_is_a_recompilation(stats):
    stats.compiled("decode-4", 2.0)
    stats.compiled("decode-8", 1.0)
    stats.warm_up_done()
    assert stats.interval()["compilations"] == 2
    stats.compiled("decode-8", 0.5)
    since, report = stats.interval(), stats.report({})
    assert (since["compilations"], since["recompilations"], since["compile_s"]) == (1, 1, 0.5)
    assert (report["compilations"], report["recompilations"], report["compile_s"]) == (3, 1, 3.5)
    assert report["recompiled"] == {"decode-8": 1}


def test_gauges_are_in_the_report_and_may_not_hide_a_figure(stats):
    gauges = {"running": 2, "waiting": 1, "prefix_hit_tokens": 640}
    assert stats.report(gauges).items() >= gauges.items()
    assert stats.interval(gauges).items() >= gauges.items()
    with pytest.raises(ValueError, match="gauges rows, steps have names of figures that are counted here; rename them"):
        stats.report({"steps": 1, "rows": 2, "running": 3})


def test_report_is_a_copy(stats):
    stats.launched(**STEP)
    stats.report({})["buckets"].clear()
    stats.interval()["buckets"].clear()
    assert stats.report({})["buckets"] == {"decode-4": 1}


def test_log_line_is_one_line_with_the_figures(stats, clock):
    run_one(stats, clock)
    gauges = {"running": 2, "waiting": 1, "preemptions": 0, "kv_used": 30, "kv_total": 120}
    assert EngineStats.log_line(stats.interval(gauges)) == (
        "steps 3 (1 prefill, 2 decode); steps/s 0.8; tokens/s 1.2 out, 1.2 prompt; running 2; waiting 1; "
        "preemptions 0; kv 30/120 (25%); ttft ms mean / p50 / p90 / p99 / max: 2000.0 / 2000.0 / 2000.0 / 2000.0 / "
        "2000.0; itl ms p50 / p90 / p99: 250.0 / 950.0 / 1220.0; finished 1 (1 length); padding 31.2 %; idle 6.2 %; "
        "recompilations 0"
    )


def test_log_line_of_an_empty_interval_shows_what_has_no_value(stats):
    line = stats.log_line(stats.interval())
    assert "tokens/s - out, - prompt; ttft ms mean / p50 / p90 / p99 / max: - / - / - / - / -;" in line
    assert "finished 0; padding - %; idle - %; recompilations 0" in line
    assert "\n" not in line
