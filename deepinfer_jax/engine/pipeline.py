"""The owner of parameters and device state: a plan goes in, the drawn tokens come out."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from deepinfer_jax.engine.buckets import Buckets, StepShape
from deepinfer_jax.engine.outputs import Drawn
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.steps import StepResult, best_tokens, run_step
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.scheduler.batching import pack_step, tail_rows
from deepinfer_jax.scheduler.slots import Chunk, Plan

_TOP_COUNTS = (20, 1000)  # compiled numbers of alternatives


class Pipeline:
    """Runs one step at a time and waits for it.

    Slot s owns the pages s * max_pages and following for good, so the page tables, one for each width, never change.
    """

    def __init__(self, model: LoadedModel, buckets: Buckets, *, num_slots: int) -> None:
        self._model, self._buckets, self._num_slots = model, buckets, num_slots
        # The mode of replay is in the batch: steps of all modes share their programs.
        self._step_config = dataclasses.replace(model.runtime, replay_mode="off", replay_keep_tokens=0)
        self.num_encoder_rows = self.num_decoder_rows = 0  # computed so far, padding included
        pages = np.arange(num_slots * buckets.pages[-1], dtype=np.int32).reshape(num_slots, -1)
        with jax.default_device(model.device):
            self._page_tables = {width: jax.numpy.asarray(pages[:, :width]) for width in buckets.pages}
        self._state = self._empty_state()

    def reset(self) -> None:
        """Replaces the state, whatever became of it."""
        self._state = self._empty_state()

    def warm_up(self) -> None:
        """Compiles the smallest step, which every request ends up in, by a run of padding rows."""
        jax.block_until_ready(self._launch(None, self._buckets.first))

    def run(self, plan: Plan) -> list[Drawn]:
        """The tokens that a step draws, one for each emitting chunk of the plan."""
        page_tokens = self._model.runtime.page_tokens
        num_pages = -(-plan.context_len // page_tokens)
        is_compact = plan.is_prefill and self._model.runtime.replay_mode == "compact"
        num_tail_rows = len(tail_rows(plan)) if is_compact else None
        shape = self._buckets.shape_of(
            plan.num_rows, num_pages, is_prefill=plan.is_prefill, num_tail_rows=num_tail_rows
        )
        self.num_encoder_rows += shape.num_rows
        self.num_decoder_rows += shape.num_rows if shape.num_tail is None else shape.num_tail
        result = self._launch(plan, shape)
        token_ids, bits = np.asarray(result.drawn)
        logprobs = bits.view(np.float32)
        emitting = plan.emitting
        broken = np.flatnonzero(np.isnan(logprobs[: len(emitting)]))
        if broken.size:
            request = emitting[int(broken[0])].request
            raise RuntimeError(
                f"the logits of request {request.index} at position {request.num_tokens} are not finite; "
                "the weights or the device are at fault"
            )
        tops = self._best(result, emitting)
        return [Drawn(int(token_ids[i]), float(logprobs[i]), top) for i, top in enumerate(tops)]

    def _launch(self, plan: Plan | None, shape: StepShape) -> StepResult:
        packed = pack_step(plan, num_rows=shape.num_rows, num_logits=shape.num_logits, num_tail=shape.num_tail or 0)
        with jax.default_device(self._model.device):
            result, self._state = run_step(
                self._model.params,
                self._state,
                self._page_tables[shape.num_pages],
                packed,
                num_rows=shape.num_rows,
                num_logits=shape.num_logits,
                is_compact=shape.num_tail is not None,
                config=self._step_config,
            )
        return result

    def _best(self, result: StepResult, emitting: Sequence[Chunk]) -> list[tuple[tuple[float, int], ...]]:
        """The alternatives that each request asked for, best first."""
        counts = [chunk.request.params.top_logprobs for chunk in emitting]
        if not any(counts):
            return [()] * len(counts)
        count = next(size for size in _TOP_COUNTS if size >= max(counts))
        values, token_ids = jax.device_get(best_tokens(result.logprobs, count=count))
        return [
            tuple(zip(values[i, :wanted].tolist(), token_ids[i, :wanted].tolist(), strict=True))
            for i, wanted in enumerate(counts)
        ]

    def _empty_state(self) -> State:
        num_pages = self._num_slots * self._buckets.pages[-1]
        with jax.default_device(self._model.device):
            return init_state(self._model.runtime, num_slots=self._num_slots, num_pages=num_pages)
