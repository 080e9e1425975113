"""Adding requests to an engine and running them, in tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.scheduler.sequence import Sequence as Sequence_

type Facts = list[tuple[int, float]]  # token id and log-probability of each output: what "the same" means

# Prompts on both sides of a chunk (64), of a page (64) and of the window (128); more than there are slots.
LENGTHS = (37, 1, 150, 64, 70, 9)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 299, length).tolist()


def params_of(seed: int, max_tokens: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(**({"seq_seed": seed, "max_tokens": max_tokens, "ignore_eos": True} | options))


def add(engine: LLMEngine, name: str, prompt: Sequence[int], params: SamplingParams | None = None, **options: Any):
    return engine.add_request("user", name, params or params_of(11), prompt, **options)


def add_many(engine: LLMEngine, lengths: Sequence[int] = LENGTHS, max_tokens: int = 8) -> None:
    """Requests "0", "1", ... with prompts of these lengths and unlike sampling."""
    for index, length in enumerate(lengths):
        temperature = (1.0, 0.0, 0.7)[index % 3]
        add(engine, str(index), prompt_of(length), params_of(index, max_tokens + index, temperature=temperature))


def drain(engine: LLMEngine, max_steps: int = 5000) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; the outputs of each request that had some."""
    found: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return found
        collect(found, engine.step())
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests are unfinished after {max_steps} steps")


def collect(found: dict[str, list[RequestOutput]], outputs: Sequence[RequestOutput]) -> None:
    """Adds outputs to those of their requests."""
    for output in outputs:
        found.setdefault(output.request_id, []).append(output)


def run_steps(engine: LLMEngine, count: int) -> dict[str, list[RequestOutput]]:
    """The outputs of so many steps."""
    found: dict[str, list[RequestOutput]] = {}
    for _ in range(count):
        collect(found, engine.step())
    return found


def facts_of(outputs: Sequence[RequestOutput]) -> Facts:
    return [(output.token_id, output.token_logprobs) for output in outputs]


def facts(found: dict[str, list[RequestOutput]]) -> dict[str, Facts]:
    return {name: facts_of(outputs) for name, outputs in found.items()}


def reasons(found: dict[str, list[RequestOutput]]) -> dict[str, str]:
    """How each request ended; fails where an output that is not the last one ends it, or none does."""
    for outputs in found.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True], outputs
        assert [bool(output.finish_reason) for output in outputs] == [output.finished for output in outputs]
    return {name: outputs[-1].finish_reason for name, outputs in found.items()}


def check_free(engine: LLMEngine) -> None:
    """Nothing is queued, launched or held, but by the prefix cache, which is emptied."""
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.num_unfinished == engine.scheduler.num_unread == 0
    assert engine._stats.num_live == len(engine._answers._emitters) == 0
    engine.scheduler.clear_prefix_cache()
    [rank] = engine.scheduler.ranks
    assert rank.pages.num_used == rank.states.num_used == 0
    assert rank.states.num_free == rank.states.num_slots
    assert (rank.page_table == -1).all()


class Recorder:
    """Hooks that keep what they are told."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.outputs: list[RequestOutput] = []
        self.ended: list[Sequence_] = []

    def post_schedule(self, plan: Plan) -> None:
        self.plans.append(plan)

    def process_output(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs += outputs

    def finalize_seq(self, sequence: Sequence_) -> None:
        self.ended.append(sequence)
