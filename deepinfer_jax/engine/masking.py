"""Masks and edits of a step whose draws depend on tokens so far, made while its forward runs.

A draft is checked as if it had been drawn: the constraint goes along the drafts that the last step proposed, one mask
for each, and back. A mask that is not ready in time lets its request sit out the step: nothing is drawn for it, and
the others go on (`StepMasks.late`).
"""

import math
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int32, UInt32

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.engine.outputs import Proposal
from deepinfer_jax.engine.steps import Masks
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar.jobs import MaskJob, MaskJobs
from deepinfer_jax.sampling.logits import Edits
from deepinfer_jax.sampling.penalties import EditArrays
from deepinfer_jax.scheduler.plan import Chunk, RankPlan

MASK_WAIT_S = 0.005  # how long a step waits for masks beyond those that are quick; processes must not differ in that
_EDIT_SIZES = (64, 1024, 16384)  # compiled numbers of edited tokens in a row; beyond them the whole vocabulary
_ALL = 0xFFFFFFFF


def needs_host(chunk: Chunk) -> bool:
    """Whether a chunk draws a token for which masks or edits may be needed."""
    constraint: DrawState | None = chunk.sequence.options.constraint
    return chunk.draws and constraint is not None and constraint.needs_host


def make_mask_maker(config: EngineConfig, vocab_size: int, max_drafts: int) -> "MaskMaker":
    """For an engine of this configuration."""
    jobs = MaskJobs(num_threads=config.so_builder_cpus, timeout_s=float(config.xgrammar_timeout))
    return MaskMaker(jobs, num_rows=1 + max_drafts, vocab_size=vocab_size)


class DraftPath:
    """A request's constraint at its newest token and behind each draft, as far as the drafts are allowed."""

    def __init__(self, state: DrawState, drafts: Sequence[int]) -> None:
        self._state, self._drafts = state, drafts
        self.edits: list[EditArrays] = []

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes which tokens may come next: one row for the next token, one behind each draft."""
        state, num_walked = self._state, 0
        row[:] = _ALL
        with state.alone():  # whoever forks or saves the request meanwhile must not see it half-way
            try:
                for place in range(1 + len(self._drafts)):
                    state.fill_mask(row[place])
                    self.edits.append(tuple(np.copy(part) for part in state.edits()))  # type: ignore[arg-type]
                    if place == len(self._drafts) or not _allows(row[place], self._drafts[place]):
                        break
                    state.advance(self._drafts[place])
                    num_walked += 1
            finally:
                state.rollback(num_walked)


def _allows(words: UInt32[np.ndarray, " W"], token_id: int) -> bool:
    return bool(words[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


class MaskMaker:
    """Makes the masks of steps; slow ones on threads, over several steps if need be."""

    def __init__(self, jobs: MaskJobs, *, num_rows: int, vocab_size: int) -> None:
        """num_rows: masks of one request, for its next token and behind each draft."""
        self._jobs, self._num_rows, self._vocab_size = jobs, num_rows, vocab_size
        self._under_way: dict[str, tuple[DraftPath, MaskJob, np.ndarray]] = {}  # of requests that sit out

    def make(self, plan: RankPlan, *, num_chunks: int) -> "StepMasks":
        """The masks of a step. What failed is in `errors`, and its rows allow everything."""
        step = StepMasks(num_chunks, self._num_rows, self._vocab_size)
        waiting: list[tuple[int, Chunk]] = []
        for index, chunk in enumerate(plan.chunks):
            if chunk.is_stale or not needs_host(chunk):
                continue
            state: DrawState = chunk.sequence.options.constraint
            drafts = _proposed(chunk)[: chunk.num_drafts]
            if state.may_be_slow:
                self._start(chunk, state)
                waiting.append((index, chunk))
                continue
            path, rows = DraftPath(state, drafts), step.rows_of(index)[: 1 + len(drafts)]
            try:
                path.fill_mask(rows)
                step.edits[index] = path.edits
            except Exception as error:  # noqa: BLE001 - ends this request, not the step
                step.errors.append((chunk, error))
        end = time.monotonic() + (math.inf if jax.process_count() > 1 else MASK_WAIT_S)
        for index, chunk in waiting:
            self._collect(step, index, chunk, timeout_s=max(0.0, end - time.monotonic()))
        return step

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requests whose masks are under way."""
        return tuple(self._under_way)

    def is_ready(self, request_id: str, *, wait_s: float = 0.0) -> bool:
        """Whether a request that sat out can take part again, or has failed to; waits for that at most so long."""
        try:
            return self._under_way[request_id][1].wait(wait_s)
        except Exception:  # noqa: BLE001 - told when its step is made
            return True

    def forget(self, request_id: str) -> None:
        """Throws away what is under way for a request that has ended."""
        self._under_way.pop(request_id)[1].cancel()

    def close(self) -> None:
        """Ends the threads."""
        self._jobs.close()

    def _start(self, chunk: Chunk, state: DrawState) -> None:
        if chunk.sequence.request_id not in self._under_way:
            # All that were proposed: when the request comes back, the step may have room for more of them.
            drafts = _proposed(chunk)
            path = DraftPath(state, drafts)
            rows = np.empty((1 + len(drafts), -(-self._vocab_size // 32)), np.uint32)
            self._under_way[chunk.sequence.request_id] = path, self._jobs.start(path, rows), rows

    def _collect(self, step: "StepMasks", index: int, chunk: Chunk, *, timeout_s: float) -> None:
        path, job, rows = self._under_way[chunk.sequence.request_id]
        try:
            is_ready = job.wait(timeout_s)
        except Exception as error:  # noqa: BLE001 - ends this request, not the step
            step.errors.append((chunk, error))
            is_ready, rows = True, np.full_like(rows, _ALL)
        if not is_ready:
            step.late[index] = True
            return
        del self._under_way[chunk.sequence.request_id]
        step.rows_of(index)[: len(rows)] = rows
        step.edits[index] = path.edits


class StepMasks:
    """The masks and edits of one step: those of chunk c, behind j drafts, are in row c * num_rows + j."""

    def __init__(self, num_chunks: int, num_rows: int, vocab_size: int) -> None:
        self.words: UInt32[np.ndarray, "M W"] = np.full((num_chunks * num_rows, -(-vocab_size // 32)), _ALL, np.uint32)
        self.late: Bool[np.ndarray, " C"] = np.zeros(num_chunks, bool)
        self.edits: dict[int, list[EditArrays]] = {}
        self.errors: list[tuple[Chunk, Exception]] = []
        self._num_rows, self.vocab_size = num_rows, vocab_size

    def rows_of(self, chunk: int) -> UInt32[np.ndarray, "N W"]:
        """The masks of one chunk."""
        return self.words[chunk * self._num_rows : (chunk + 1) * self._num_rows]

    @property
    def most_edits(self) -> int:
        """Edited tokens of the row that has most of them."""
        return max((len(edits[0]) for path in self.edits.values() for edits in path), default=0)

    def arrays(self, edit_room: int) -> Masks:
        """The form that a step takes, with so many edits in each row."""
        edits = self._edit_arrays(edit_room) if edit_room else None
        return unchecked(Masks, {"words": self.words, "late": self.late, "edits": edits})

    def _edit_arrays(self, room: int) -> Edits:
        found = [
            (chunk * self._num_rows + place, edits)
            for chunk, path in self.edits.items()
            for place, edits in enumerate(path)
        ]
        shape = (len(self.words), room)
        token_ids: Int32[np.ndarray, "M K"] = np.full(shape, -1, np.int32)
        up, down, add = np.ones(shape, np.float32), np.ones(shape, np.float32), np.zeros(shape, np.float32)
        for row, edits in found:
            for whole, own in zip((token_ids, up, down, add), edits, strict=True):
                whole[row, : len(own)] = own
        return unchecked(Edits, {"token_ids": token_ids, "up": up, "down": down, "add": add})


def arrays_of(masks: Sequence[StepMasks]) -> list[Masks]:
    """The masks of all ranks in one form: with equally many edits in every row, a compiled number of them."""
    most = max(step.most_edits for step in masks)
    room = next((size for size in _EDIT_SIZES if size >= most), masks[0].vocab_size) if most else 0
    return [step.arrays(room) for step in masks]


def _proposed(chunk: Chunk) -> Sequence[int]:
    """The drafts behind a request's newest token; all steps in front have been read."""
    proposal: Proposal | None = chunk.sequence.proposal
    return () if proposal is None else proposal.token_ids
