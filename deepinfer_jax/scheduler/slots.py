"""Who runs next: fixed slots, first in first out.

A request keeps its slot, and the pages that belong to it, until it ends. Prompts go first, in order, in chunks; all
requests with a complete prompt decode together.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

from deepinfer_jax.scheduler.request import Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that one step computes."""

    request: Request
    start: int  # position of the first
    length: int

    @property
    def emits(self) -> bool:
        """Whether a token is drawn behind the last row: not in the middle of a prompt."""
        return self.start + self.length == self.request.num_tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step, all prefill or all decode."""

    chunks: tuple[Chunk, ...]
    is_prefill: bool

    @property
    def num_rows(self) -> int:
        """Rows of the step without padding."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def emitting(self) -> tuple[Chunk, ...]:
        """The chunks with a token to draw, in the order of the step's logit rows."""
        return tuple(chunk for chunk in self.chunks if chunk.emits)

    @property
    def context_len(self) -> int:
        """Tokens of the longest request of the step, its new rows included."""
        return max(chunk.start + chunk.length for chunk in self.chunks)


class SlotScheduler:
    """The queue and the slots.

    max_rows: rows of one step. max_emitting: prompts that may end in one prefill step. is_chunked: False keeps each
    prompt in one step.
    """

    def __init__(self, num_slots: int, *, max_rows: int, max_emitting: int, is_chunked: bool = True) -> None:
        self._num_slots, self._max_rows, self._max_emitting = num_slots, max_rows, max_emitting
        self._is_chunked = is_chunked
        self.clear()

    def clear(self) -> None:
        """Forgets every request."""
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of arrival
        self._free: deque[int] = deque(range(self._num_slots))

    def add(self, request: Request) -> None:
        """Puts a request behind the others."""
        self._waiting.append(request)

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._waiting) + len(self._running)

    def schedule(self) -> Plan | None:
        """The next step, None when nothing is left to do."""
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.popleft()
            self._running.append(request)
        chunks = tuple(self._prefill_chunks())
        if chunks:
            return Plan(chunks, is_prefill=True)
        decoding = tuple(Chunk(request, request.num_written, 1) for request in self._running)
        return Plan(decoding, is_prefill=False) if decoding else None

    def _prefill_chunks(self) -> Iterator[Chunk]:
        room, emitting = self._max_rows, self._max_emitting
        for request in self._running:
            if not request.is_in_prefill:
                continue
            left = len(request.prompt) - request.num_written
            length = min(left, room)
            if length == 0 or emitting == 0 or (length < left and not self._is_chunked):
                return
            yield Chunk(request, request.num_written, length)
            room -= length
            emitting -= length == left

    def commit(self, plan: Plan, tokens: Sequence[int]) -> None:
        """Takes in a step: its rows are written, and `tokens` were drawn for its emitting chunks."""
        emitting = plan.emitting  # before outputs grow
        for chunk in plan.chunks:
            chunk.request.num_written = chunk.start + chunk.length
        for chunk, token in zip(emitting, tokens, strict=True):
            chunk.request.output.append(token)
        for request in [request for request in self._running if request.finish_reason]:
            self._running.remove(request)
            self._free.append(request.slot)
            request.slot = -1
