"""Everything at once, at random: whatever happens around a request, it gives what it gives alone."""

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny
from tests.engine.driving import Facts, add, check_free, collect, drain, facts_of, params_of, prompt_of, reasons

SYSTEM = prompt_of(100)
# Shared beginnings, prompts of one token and of several chunks, results of unlike lengths.
TASKS: list[tuple[list[int], SamplingParams]] = [
    ([*SYSTEM, *prompt_of(40)], params_of(1, 60)),
    ([*SYSTEM, *prompt_of(40, seed=1)], params_of(2, 25, temperature=0.6, top_p=0.9)),
    ([*SYSTEM[:70], *prompt_of(9)], params_of(3, 80)),
    ([7], params_of(4, 90)),
    (prompt_of(200), params_of(5, 30, temperature=0.0)),
    (prompt_of(30), params_of(6, 4)),
]


@pytest.fixture(scope="module")
def alone(tiny_model) -> list[Facts]:
    results = []
    engine = tiny.tiny_engine(tiny_model)
    for prompt, params in TASKS:
        engine.scheduler.clear_prefix_cache()
        add(engine, "a", prompt, params)
        results.append(facts_of(drain(engine)["a"]))
    return results


class Walk:
    """A random life of an engine; knows of each request its task, and the outputs it began with."""

    def __init__(self, engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.rng, self.found = engine, np.random.default_rng(seed), {}
        self.tasks: dict[str, tuple[int, int]] = {}
        self.saved: list = []
        self.counts = dict.fromkeys(("add", "abort", "fork", "save", "restore", "fail", "forget"), 0)
        launch = engine.pipeline.launch
        self.is_failing = False

        def maybe_fail(plan, **kwargs):
            if self.is_failing:
                self.is_failing = False
                raise RuntimeError("the device caught fire")
            return launch(plan, **kwargs)

        monkeypatch.setattr(engine.pipeline, "launch", maybe_fail)

    def live(self) -> list[str]:
        return [name for name in self.tasks if self.engine.scheduler.get(name) is not None]

    def act(self) -> None:
        """One thing that is possible now, other than a step."""
        live = self.live()
        what = self.rng.choice(["add"] * 6 + ["abort", "fork", "fork", "save", "restore", "restore", "fail", "forget"])
        new = f"{what} {len(self.tasks)}"
        if what == "add":
            task = int(self.rng.integers(len(TASKS)))
            add(self.engine, new, *TASKS[task])
            self.tasks[new] = task, 0
        elif what == "fail" and live and self.rng.random() < 0.3:
            self.is_failing = True
        elif what == "forget":
            self.engine.scheduler.clear_prefix_cache()
        elif what == "restore" and self.saved:
            task, saved = self.saved[int(self.rng.integers(len(self.saved)))]
            self.engine.restore_request(saved, new)
            self.tasks[new] = task, len(saved.output)
        elif what in ("abort", "fork", "save") and live:
            self.change(what, str(self.rng.choice(live)), new)
        else:
            return
        self.counts[what] += 1

    def change(self, what: str, name: str, new: str) -> None:
        """Aborts, forks or saves a request."""
        if what == "abort":
            self.engine.abort_request(name)
        elif what == "fork":
            parent = self.engine.scheduler.get(name)
            num_kept = int(self.rng.integers(0, len(parent.output) + 1)) if self.rng.random() < 0.3 else None
            num_tokens = None if num_kept is None else len(parent.prompt) + num_kept
            forked = self.engine.fork_request(name, new, num_tokens=num_tokens)
            self.tasks[new] = self.tasks[name][0], len(forked.output)
        else:
            try:
                self.saved.append((self.tasks[name][0], self.engine.save_request(name)))
            except ValueError as error:  # the step that was in flight ended it
                assert "is not unfinished" in str(error)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_a_result_depends_on_its_request_only(tiny_model, alone, monkeypatch, seed):
    environ = {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0" if seed % 5 == 0 else "1"}
    environ |= {"DEEPINFER_PREFILL_ATTEMPT_INTERVAL": "4", "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "4"}
    engine = tiny.tiny_engine(tiny_model, environ, **tiny.SCARCE)
    walk = Walk(engine, seed, monkeypatch)
    for _ in range(80):
        if len(walk.live()) < 14:
            walk.act()
        for _ in range(int(walk.rng.integers(0, 6))):
            collect(walk.found, engine.step())
    for name, outputs in drain(engine).items():
        walk.found.setdefault(name, []).extend(outputs)
    ends = reasons(walk.found)
    assert sorted(walk.found) == sorted(walk.tasks)
    for name, (task, num_given) in walk.tasks.items():
        outputs, want = facts_of(walk.found[name]), alone[task][num_given:]
        if ends[name] == "length":
            assert outputs == want or (not want and outputs == [(-1, 0.0)]), name
        else:
            assert ends[name] in ("abort", "insufficient_system_resource"), name
            assert outputs[:-1] == want[: len(outputs) - 1] and outputs[-1] == (-1, 0.0), name
    assert "insufficient_system_resource" not in ends.values()
    assert walk.counts["add"] > 10 and walk.counts["fork"] > 0
    check_free(engine)
