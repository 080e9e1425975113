"""What an engine has done: counts, rates and latencies, in bounded memory (spec: interface 9, metrics line).

| field | meaning |
|---|---|
| elapsed_s, work_s | seconds since the start; those of them in which at least one request was unfinished |
| steps, prefill_steps, decode_steps | launched steps |
| steps_per_s, tokens_per_s, prompt_tokens_per_s | steps, output tokens and rows of prefill steps, each over work_s |
| requests, prompt_tokens, output_tokens | added requests and the sum of their prompts; tokens given out |
| prompt_len_mean, output_len_mean | tokens of an added request's prompt, and of an ended request's output |
| ttft_mean_s, _p50_s, _p90_s, _p99_s, _max_s | from `added` to a request's first token |
| itl_mean_s, _p50_s, _p90_s, _p99_s, _max_s | from a token of a request to its next; those of one step share a gap |
| rows, padded_rows, padding_share | rows with a token; rows computed; 1 - rows / padded_rows |
| copies | copies of pages and state slots that steps made |
| buckets | name of a compiled shape -> steps that used it |
| compilations, compile_s | compiled shapes and the seconds they took |
| recompilations, recompiled | those after the warm-up; name of the shape -> how often |
| idle_s, idle_share | seconds in which the device waited for a launch; idle_s / work_s |
| finished, aborted | reason -> ended requests; how many of them with the reason "abort" |
| drafts | where drafts were verified: what became of them (`draft_stats.py`) |

Mean and maximum are those of every sample; a percentile is that of the last `SAMPLES`. None: no sample, no time. Rows
of prefill steps hold a prompt that is computed again once more, and no part of a prompt that a cache gave.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.engine.draft_stats import DraftStats
from deepinfer_jax.scheduler.scheduler import Scheduler

SAMPLES = 10_000  # kept for percentiles: 80 kB for each latency
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
ABORT = "abort"
_COUNTS = ("prefill_steps", "decode_steps", "requests", "prompt_tokens", "output_tokens", "rows", "padded_rows")
_COUNTS += ("copies", "compilations")


class _Samples:
    """Mean and maximum of every value and percentiles of the last `SAMPLES`, of all time and since `restart`."""

    def __init__(self) -> None:
        self._ring = np.zeros(SAMPLES)  # value i is in row i % SAMPLES
        self._count, self._total, self._largest = 0, 0.0, 0.0
        self.restart()

    def restart(self) -> None:
        self._old_count, self._old_total, self._new_largest = self._count, self._total, 0.0

    def add(self, value: float, repeats: int = 1) -> None:
        for index in range(self._count, self._count + repeats):
            self._ring[index % SAMPLES] = value
        self._count += repeats
        self._total += value * repeats
        if value > self._new_largest:
            self._new_largest = value
            self._largest = max(self._largest, value)

    def result(self, name: str, *, is_interval: bool) -> dict[str, float | None]:
        """Mean, percentiles (linear between neighbours) and maximum, each None without a value."""
        count, total, largest = self._count, self._total, self._largest
        if is_interval:
            count, total, largest = count - self._old_count, total - self._old_total, self._new_largest
        if not count:
            return dict.fromkeys(f"{name}_{each}_s" for each in ("mean", *PERCENTILES, "max"))
        kept = np.arange(self._count - min(count, SAMPLES), self._count) % SAMPLES
        found = np.percentile(self._ring[kept], list(PERCENTILES.values()))
        return {
            f"{name}_mean_s": total / count,
            **{f"{name}_{each}_s": float(value) for each, value in zip(PERCENTILES, found, strict=True)},
            f"{name}_max_s": largest,
        }


@dataclass(slots=True)
class _Live:
    """An unfinished request."""

    added_s: float
    last_s: float = 0.0  # time of its last token
    num_tokens: int = 0


@dataclass
class _Sums:
    """What only grows; an interval is the difference of two of these."""

    numbers: Counter[str] = field(default_factory=Counter)
    buckets: Counter[str] = field(default_factory=Counter)
    recompiled: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)  # (verified, accepted) drafts
    work_s: float = 0.0
    idle_s: float = 0.0
    compile_s: float = 0.0

    def minus(self, other: "_Sums") -> "_Sums":
        return _Sums(**{name: value - getattr(other, name) for name, value in vars(self).items()})


class EngineStats:
    """Takes in what an engine does. One thread feeds it; `clock` gives seconds that never go back.

    A request is known from `added` to `ended`; tokens and ends of others are counted without latencies.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_s = self._line_s = self._now_s = clock()
        self._is_warm = False
        self._live: dict[str, _Live] = {}
        self._sums, self._line_sums = _Sums(), _Sums()
        self._ttft, self._itl = _Samples(), _Samples()
        self.drafts = DraftStats()

    @property
    def num_live(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._live)

    def added(self, request_id: str, prompt_len: int, *, at: float | None = None) -> None:
        """A request has come, of a user or by a fork; `at`: when it came, if not now, on this clock.

        Raises ValueError for an id that is still in use.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} has not ended; give every unfinished request its own id")
        now_s = self._tick()
        self._live[request_id] = _Live(now_s if at is None else at)
        self._sums.numbers["requests"] += 1
        self._sums.numbers["prompt_tokens"] += prompt_len

    def launched(
        self, *, rows: int, padded_rows: int, is_prefill: bool, bucket: str, idle_s: float, copies: int
    ) -> None:
        """A step has been launched, for which the device had waited `idle_s`."""
        self._tick()
        kind = {"prefill_steps": 1, "prefill_rows": rows} if is_prefill else {"decode_steps": 1}
        self._sums.numbers.update(kind, rows=rows, padded_rows=padded_rows, copies=copies)
        self._sums.idle_s += idle_s
        self._sums.buckets[bucket] += 1

    def emitted(self, counts: Mapping[str, int]) -> None:
        """A step gave so many tokens to each of these requests."""
        now_s = self._tick()
        self._sums.numbers["output_tokens"] += sum(counts.values())
        for request_id, count in counts.items():
            live = self._live.get(request_id)
            if live is None or not count:
                continue
            if live.num_tokens:
                self._itl.add((now_s - live.last_s) / count, count)
            else:
                self._ttft.add(now_s - live.added_s)
            live.last_s, live.num_tokens = now_s, live.num_tokens + count

    def verified(self, confidence: Sequence[float], verified: int, accepted: int) -> None:
        """A step verified drafts of a request; confidence: of all that were proposed."""
        self._sums.rounds[verified, accepted] += 1
        self.drafts.add(confidence, verified, accepted)

    def ended(self, request_id: str, reason: str) -> None:
        """A request has its finish reason, whether or not it ever ran."""
        self._tick()
        if live := self._live.pop(request_id, None):
            self._sums.numbers["ended_tokens"] += live.num_tokens
        self._sums.finished[reason] += 1

    def compiled(self, bucket: str, seconds: float, *, is_expected: bool = False) -> None:
        """A shape was compiled; after `warm_up_done` that is a recompilation, unless it is the first of its kind."""
        self._tick()
        self._sums.numbers["compilations"] += 1
        self._sums.compile_s += seconds
        if self._is_warm and not is_expected:
            self._sums.recompiled[bucket] += 1

    def warm_up_done(self) -> None:
        """From here on no compilation is expected."""
        self._is_warm = True

    def report(self, gauges: Mapping[str, Any]) -> dict[str, Any]:
        """Everything since the start, and the engine's own `gauges` (queue lengths, pages, preemptions ...)."""
        now_s = self._tick()
        return self._result(self._sums, now_s - self._start_s, gauges, is_interval=False)

    def interval(self, gauges: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same fields since the last call of this method, which `report` does not notice."""
        now_s = self._tick()
        sums = self._sums.minus(self._line_sums)
        result = self._result(sums, now_s - self._line_s, gauges or {}, is_interval=True)
        self._line_s, self._line_sums = now_s, copy.deepcopy(self._sums)
        self._ttft.restart()
        self._itl.restart()
        return result

    @staticmethod
    def log_line(report: Mapping[str, Any]) -> str:
        """One line of a `report` or `interval`: what has no value is shown as -, a gauge not given is left out."""
        r, kv_used = report, report.get("kv_used", 0)
        parts = [
            f"steps {r['steps']} ({r['prefill_steps']} prefill, {r['decode_steps']} decode)",
            f"steps/s {_show(r['steps_per_s'])}",
            f"tokens/s {_show(r['tokens_per_s'])} out, {_show(r['prompt_tokens_per_s'])} prompt",
            *(f"{name} {r[name]}" for name in ("running", "waiting", "preemptions") if name in r),
        ]
        if r.get("kv_total"):
            parts.append(f"kv {kv_used}/{r['kv_total']} ({kv_used / r['kv_total']:.0%})")
        for name, keys in (("ttft", ("mean", "p50", "p90", "p99", "max")), ("itl", ("p50", "p90", "p99"))):
            values = (_show(r[f"{name}_{key}_s"], scale=1000.0) for key in keys)
            parts.append(f"{name} ms {' / '.join(keys)}: {' / '.join(values)}")
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(r["finished"].items()))
        parts.append(f"finished {sum(r['finished'].values())}" + (f" ({reasons})" if reasons else ""))
        if "drafts" in r:
            parts.append(f"tokens/round {_show(r['drafts']['accepted_len_mean'])}")
        shares = (f"{name} {_show(r[f'{name}_share'], scale=100.0)} %" for name in ("padding", "idle"))
        return "; ".join((*parts, *shares, f"recompilations {r['recompilations']}"))

    def _tick(self) -> float:
        """The time now, in seconds, after the time since the last event is taken in as work or not."""
        now_s = self._clock()
        if self._live:
            self._sums.work_s += now_s - self._now_s
        self._now_s = now_s
        return now_s

    def _result(self, sums: _Sums, elapsed_s: float, gauges: Mapping[str, Any], *, is_interval: bool) -> dict[str, Any]:
        n, work_s = sums.numbers, sums.work_s
        steps, num_ended = n["prefill_steps"] + n["decode_steps"], sums.finished.total()
        figures: dict[str, Any] = {
            "elapsed_s": elapsed_s,
            "steps": steps,
            **{name: n[name] for name in _COUNTS},
            "steps_per_s": _ratio(steps, work_s),
            "tokens_per_s": _ratio(n["output_tokens"], work_s),
            "prompt_tokens_per_s": _ratio(n["prefill_rows"], work_s),
            "prompt_len_mean": _ratio(n["prompt_tokens"], n["requests"]),
            "output_len_mean": _ratio(n["ended_tokens"], num_ended),
            **self._ttft.result("ttft", is_interval=is_interval),
            **self._itl.result("itl", is_interval=is_interval),
            "padding_share": _ratio(n["padded_rows"] - n["rows"], n["padded_rows"]),
            "buckets": dict(sums.buckets),
            "recompilations": sums.recompiled.total(),
            "recompiled": dict(sums.recompiled),
            **{name: getattr(sums, name) for name in ("work_s", "idle_s", "compile_s")},
            "idle_share": _ratio(sums.idle_s, work_s),
            "finished": dict(sums.finished),
            "aborted": sums.finished[ABORT],
            **({"drafts": self.drafts.report(sums.rounds)} if sums.rounds else {}),
        }
        if clash := sorted(gauges.keys() & figures.keys()):
            raise ValueError(f"gauges {', '.join(clash)} have names of figures that are counted here; rename them")
        return {**gauges, **figures}


def scheduler_gauges(scheduler: Scheduler) -> dict[str, int]:
    """How a scheduler stands: queues, main KV in tokens, the prefix cache."""
    counters, gauges, config = scheduler.counters, scheduler.gauges, scheduler.config
    return {
        "running": sum(len(rank.running) for rank in scheduler.ranks),
        "waiting": sum(len(rank.waiting) for rank in scheduler.ranks),
        "kv_used": gauges.pages_used * config.page_tokens,
        "kv_total": len(scheduler.ranks) * config.num_pages * config.page_tokens,
        "kv_cached": gauges.pages_cached * config.page_tokens,
        "preemptions": counters.preemptions,
        "prefix_lookups": counters.prefix_lookups,
        "prefix_hits": counters.prefix_hits,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
        "snapshots": gauges.num_snapshots,
        "snapshots_evicted": counters.snapshots_evicted,
    }


def _ratio(part: int | float, whole: int | float) -> float | None:
    return part / whole if whole else None


def _show(value: float | None, *, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.1f}"
