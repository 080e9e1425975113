"""Who runs next (spec: interface 7).

A step is all prefill or all decode. Prompts start in order of arrival; every running request is in every decode step.
When pages run out the newest running request gives way, so that the oldest always finishes. The caller launches each
plan in order, and may have one unread plan when it asks for the next: every token then reaches its next row on the
device.

    plan = scheduler.schedule()           # None: commit what is unread, or there is nothing to do
    launch(plan)                          # its copies, then its rows
    scheduler.commit(plan, tokens)        # or scheduler.fail(plan, error)
    for sequence in scheduler.take_ended(): ...
"""

import dataclasses
from collections import abc, deque
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_jax.scheduler.plan import Chunk, Plan, RankPlan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.rank import Rank
from deepinfer_jax.scheduler.sequence import Limits, Sequence

_MAX_UNREAD = 1  # plans that may be unread when the next one is made


@dataclasses.dataclass
class Counters:
    """What happened since the start."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_rows: int = 0  # of all ranks, without padding
    decode_rows: int = 0
    tokens_committed: int = 0
    results_dropped: int = 0  # chunks whose request had ended or was preempted
    preemptions: int = 0
    forks_copied: int = 0  # took over their parent's state
    forks_queued: int = 0  # have to compute their parent's tokens again
    ended: int = 0


class Scheduler:
    """The queues of all ranks, the plans under way, and the policy between them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ranks = tuple(Rank(config) for _ in range(config.num_ranks))
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}  # unfinished
        self._ended: list[Sequence] = []
        self._unread: deque[Plan] = deque()
        self._num_steps = 0
        self._num_arrived = 0
        self._decodes_since_prefill = config.prefill_interval

    # Requests come and go.

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._sequences)

    @property
    def num_unread(self) -> int:
        """Plans that were made and not yet committed."""
        return len(self._unread)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished request of this id."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence, *, rank: int | None = None) -> None:
        """Takes in a request, on the rank with the fewest unless one is named. It may end at once: `take_ended`."""
        if not sequence.prompt:
            raise ValueError("prompt must not be empty")
        if rank is None:
            rank = min(range(len(self.ranks)), key=lambda index: self.ranks[index].num_unfinished)
        elif not 0 <= rank < len(self.ranks):
            raise ValueError(f"rank={rank} does not exist; there are {len(self.ranks)}")
        self._register(sequence, rank)
        num_tokens = sequence.num_tokens
        if num_tokens > self.config.max_model_len or self.config.pages_of(num_tokens) > self.config.num_pages:
            self._end(sequence, "prompt_length_exceeded")

    def fork(
        self,
        request_id: str,
        new_id: str,
        *,
        num_tokens: int | None = None,
        limits: Limits | None = None,
        options: Any = None,
    ) -> Sequence:
        """A new request that continues from the first `num_tokens` known tokens of another one; None takes all.

        The whole prompt is kept, and its tail start. Limits and options are the parent's unless given. It shares the
        parent's full pages and copies its state; where that is impossible, or would push in front of requests that
        wait, it queues up and computes the tokens again: the result is the same.
        """
        parent = self._sequences.get(request_id)
        if parent is None:
            raise ValueError(f"request {request_id!r} is not unfinished; only a waiting or running one can be forked")
        num_prompt = len(parent.prompt)
        kept = parent.num_tokens if num_tokens is None else num_tokens
        if not num_prompt <= kept <= parent.num_tokens:
            raise ValueError(
                f"num_tokens={kept} must be from {num_prompt} (the prompt) to {parent.num_tokens} (what is known now)"
            )
        sequence = Sequence(
            request_id=new_id,
            prompt=parent.prompt,
            limits=limits or parent.limits,
            tail_start=parent.tail_start,
            options=parent.options if options is None else options,
            output=parent.output[: kept - num_prompt],
        )
        self._register(sequence, parent.rank, parent=parent)
        if sequence.slot >= 0:
            self.counters.forks_copied += 1
        else:
            self.counters.forks_queued += 1
        if reason := sequence.stop_reason(self.config.max_model_len):
            self._end(sequence, reason)
        return sequence

    def abort(self, request_id: str) -> bool:
        """Ends a request whatever it does at the moment; False if it is not unfinished."""
        return self.end(request_id, "abort")

    def end(self, request_id: str, reason: str, *, error: BaseException | None = None) -> bool:
        """Ends a request for a reason that was found outside; False if it is not unfinished."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        sequence.error = error
        self._end(sequence, reason)
        return True

    def take_ended(self) -> list[Sequence]:
        """The requests that ended since the last call, each exactly once, `finish_reason` set."""
        ended, self._ended = self._ended, []
        return ended

    def _register(self, sequence: Sequence, rank: int, *, parent: Sequence | None = None) -> None:
        if sequence.request_id in self._sequences:
            raise ValueError(f"request {sequence.request_id!r} is unfinished; a new one needs an id of its own")
        if sequence.arrival >= 0:
            raise ValueError(f"request {sequence.request_id!r} was added before; make a new Sequence")
        sequence.arrival, sequence.rank = self._num_arrived, rank
        sequence.prefill_len = sequence.num_tokens
        self._num_arrived += 1
        self._sequences[sequence.request_id] = sequence
        if parent is None or not self.ranks[rank].admit_fork(sequence, parent):
            self.ranks[rank].enqueue(sequence)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self.ranks[sequence.rank].remove(sequence)
        del self._sequences[sequence.request_id]
        sequence.finish_reason = reason
        self._ended.append(sequence)
        self.counters.ended += 1

    # Planning.

    def schedule(self) -> Plan | None:
        """The next step. None if nothing can be done before an unread plan is committed, or at all."""
        if len(self._unread) > _MAX_UNREAD:
            raise ValueError(f"{len(self._unread)} plans are unread; commit plan {self._unread[0].step} first")
        if self._prefers_prefill() and (plan := self._plan(is_prefill=True)):
            return plan
        # A decode step that is empty may have ended a request, and so made room for a prompt.
        return self._plan(is_prefill=False) or self._plan(is_prefill=True)

    def _prefers_prefill(self) -> bool:
        """Whether prompts go first. They are tried in any case when nothing can decode.

        Behind a prefill comes one decode step, so that a long prompt holds up the others by one chunk at a time, then
        prefill again; when that finds nothing, the intervals count.
        """
        have_prompts = [rank.has_prompts for rank in self.ranks]
        if not any(have_prompts):
            return False
        interval = self.config.prefill_interval if all(have_prompts) else self.config.prefill_any_interval
        return self._decodes_since_prefill == 1 or self._decodes_since_prefill >= interval

    def _plan(self, *, is_prefill: bool) -> Plan | None:
        chunks_of = self._prefill_chunks if is_prefill else self._decode_chunks
        chunks = [tuple(chunks_of(rank)) for rank in self.ranks]
        if not any(chunks):
            return None
        ranks = tuple(
            RankPlan(chunks=own, copies=rank.take_copies(self._num_steps))
            for own, rank in zip(chunks, self.ranks, strict=True)
        )
        plan = Plan(step=self._num_steps, is_prefill=is_prefill, ranks=ranks)
        num_rows = sum(rank.num_rows for rank in ranks)
        if is_prefill:
            self._decodes_since_prefill = 0
            self.counters.prefill_steps += 1
            self.counters.prefill_rows += num_rows
        else:
            self._decodes_since_prefill += 1
            self.counters.decode_steps += 1
            self.counters.decode_rows += num_rows
        self._num_steps += 1
        self._unread.append(plan)
        return plan

    def _prefill_chunks(self, rank: Rank) -> Iterator[Chunk]:
        """Prompts that were begun, then those that wait, in order of arrival, while there is room."""
        begun = deque(sequence for sequence in rank.running if sequence.is_in_prefill)
        rows, keys, ends = self.config.max_num_batched_tokens, 0, 0
        while sequence := begun.popleft() if begun else self._first_waiting(rank):
            length = self._chunk_len(sequence, rows)
            end = sequence.num_scheduled + length
            draws = end == sequence.prefill_len
            has_keys = keys == 0 or keys + end <= self.config.prefill_max_key_tokens
            if length == 0 or not has_keys or ends + draws > self.config.max_prompts_ended:
                return
            if sequence.slot < 0 and not rank.admit(sequence):
                return
            yield self._launch(sequence, length, draw_index=ends if draws else -1, draw_position=end)
            rows, keys, ends = rows - length, keys + end, ends + draws

    def _first_waiting(self, rank: Rank) -> Sequence | None:
        """Ends requests that outgrew the memory while they shared pages with others."""
        while rank.waiting:
            sequence = rank.waiting[0]
            if self.config.pages_of(sequence.prefill_len) <= self.config.num_pages:
                return sequence
            self._end(sequence, "insufficient_system_resource")
        return None

    def _chunk_len(self, sequence: Sequence, max_rows: int) -> int:
        """Rows of the next chunk of a prompt, 0 if none fits. The one place that decides where a prompt is cut."""
        start = sequence.num_scheduled
        left = sequence.prefill_len - start
        if left <= max_rows:
            return left
        if not self.config.is_chunked:
            return 0
        end = start + max_rows
        return max(0, end - end % self.config.chunk_multiple - start)

    def _decode_chunks(self, rank: Rank) -> Iterator[Chunk]:
        """The next rows of every running request whose prompt is done, oldest first."""
        max_model_len, num_drawing = self.config.max_model_len, 0
        for sequence in tuple(rank.running):
            has_left = sequence.slot < 0  # it gave way to an older one
            if has_left or sequence.is_in_prefill or not sequence.may_draw(max_model_len):
                continue
            start = sequence.num_scheduled
            length = min(self.config.max_decode_rows, max_model_len - start)
            # Without room for a row an unread step may still reject some of its rows: the request waits for that.
            if length > 0 and self._make_room(rank, sequence, start + length):
                yield self._launch(sequence, length, draw_index=num_drawing, draw_position=start + 1)
                num_drawing += 1

    def _make_room(self, rank: Rank, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a request the pages of `num_tokens` tokens. The newest ones give way, which may be the request."""
        missing = self.config.pages_of(num_tokens) - len(sequence.pages)
        while missing > rank.pages.num_free:
            newest = rank.running[-1]
            if len(rank.running) == 1:  # it has all there is
                self._end(newest, "insufficient_system_resource")
            else:
                self._preempt(newest)
            if newest is sequence:
                return False
        rank.add_pages(sequence, max(0, missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        if self.config.stops_preempted:
            self._end(sequence, "insufficient_system_resource")
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Frees everything; the known tokens are computed again, in the place that its arrival gives it."""
        rank = self.ranks[sequence.rank]
        rank.remove(sequence)
        rank.enqueue(sequence)

    def _launch(self, sequence: Sequence, length: int, *, draw_index: int, draw_position: int) -> Chunk:
        """The next rows of a request, which is noted there."""
        chunk = Chunk(
            sequence=sequence,
            start=sequence.num_scheduled,
            length=length,
            draws=draw_index >= 0,
            draw_position=draw_position,
            draw_source=sequence.draw_index if sequence.draws_in_flight else -1,
            epoch=sequence.epoch,
        )
        sequence.launch_rows(length, step=self._num_steps, draw_index=draw_index)
        return chunk

    # Results.

    def commit(self, plan: Plan, tokens: Mapping[str, abc.Sequence[int]]) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Takes in the results of the oldest unread plan; returns each request with the tokens that it keeps.

        tokens: for each drawing chunk, by request id, the tokens that the step kept: 1, or up to the rows of a decode
        chunk. What follows the token that ends a request is cut off. Results of requests that ended or were preempted
        since are dropped, and may be left out.
        """
        live = [chunk for chunk in plan.chunks if not chunk.is_stale]
        self._check_tokens(plan, live, tokens)
        self._close(plan)
        kept: list[tuple[Sequence, tuple[int, ...]]] = []
        for chunk in live:
            sequence = chunk.sequence
            sequence.rows_in_flight -= chunk.length
            drawn = tokens[sequence.request_id] if chunk.draws else ()
            sequence.num_written += chunk.length if plan.is_prefill else len(drawn)
            if not chunk.draws:
                continue
            sequence.draws_in_flight -= 1
            taken, reason = sequence.take_tokens(drawn, self.config.max_model_len)
            self.counters.tokens_committed += len(taken)
            kept.append((sequence, taken))
            if reason:
                self._end(sequence, reason)
        self.counters.results_dropped += len(plan.chunks) - len(live)
        return kept

    def fail(self, plan: Plan, error: BaseException, *, state_is_lost: bool = False) -> None:
        """Ends the requests of the oldest unread plan, which broke: reason "abort", `error` set. The others go on.

        state_is_lost: the caches are empty now, so every other request is computed again, and the results of later
        plans are dropped when they are committed. A plan with copies counts as lost: forks may build on them.
        """
        live = [chunk for chunk in plan.chunks if not chunk.is_stale]
        self._close(plan)
        self.counters.results_dropped += len(plan.chunks) - len(live)
        for chunk in live:
            chunk.sequence.error = error
            self._end(chunk.sequence, "abort")
        if state_is_lost or plan.num_copies:
            for rank in self.ranks:
                for sequence in tuple(rank.running):
                    self.counters.preemptions += 1
                    self._requeue(sequence)

    def _check_tokens(self, plan: Plan, live: list[Chunk], tokens: Mapping[str, abc.Sequence[int]]) -> None:
        for chunk in live:
            if chunk.draws:
                most = 1 if plan.is_prefill else chunk.length
                count = len(tokens.get(chunk.sequence.request_id, ()))
                if not 1 <= count <= most:
                    raise ValueError(
                        f"step {plan.step} gave {count} tokens for request {chunk.sequence.request_id!r}; "
                        f"it must give 1 to {most}"
                    )

    def _close(self, plan: Plan) -> None:
        """Marks the oldest unread plan as read."""
        if not self._unread or plan is not self._unread[0]:
            oldest = self._unread[0].step if self._unread else "none"
            raise ValueError(f"step {plan.step} is not the oldest unread one ({oldest}); plans are committed in order")
        self._unread.popleft()
        for rank in self.ranks:
            rank.states.mark_read(plan.step)
