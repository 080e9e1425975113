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

from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.plan import Chunk, Plan, RankPlan
from deepinfer_jax.scheduler.policy import Counters, Gauges, SchedulerConfig
from deepinfer_jax.scheduler.rank import Rank
from deepinfer_jax.scheduler.sequence import Limits, Sequence
from deepinfer_jax.scheduler.verification import VerificationPolicy, budget_of

_MAX_UNREAD = 1  # plans that may be unread when the next one is made


class Scheduler:
    """The queues of all ranks, the plans under way, and the policy between them."""

    def __init__(self, config: SchedulerConfig, verification: VerificationPolicy | None = None) -> None:
        self.config, self.verification = config, verification
        self.counters = Counters()
        self.ranks = tuple(Rank(config, self.counters) for _ in range(config.num_ranks))
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

    @property
    def gauges(self) -> Gauges:
        """What is held now."""
        num_snapshots = sum(len(rank.prefix.snapshots) for rank in self.ranks)
        num_cached = sum(rank.prefix.num_pages_cached for rank in self.ranks)
        return Gauges(num_snapshots, num_cached, sum(rank.num_pages_used for rank in self.ranks))

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished request of this id."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence, *, rank: int | None = None) -> None:
        """Takes in a request, on the rank with the fewest unless one is named. It may end at once: `take_ended`."""
        self._register(sequence, self._rank_of(sequence, rank))
        if not self.config.can_hold(sequence.num_tokens):
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
        sequence = parent.branch(new_id, num_tokens, limits=limits, options=options)
        self._register(sequence, parent.rank, lambda on: on.admit_fork(sequence, parent))
        if sequence.slot >= 0:
            self.counters.forks_copied += 1
        else:
            self.counters.forks_queued += 1
        if reason := sequence.stop_reason(self.config.max_model_len):
            self._end(sequence, reason)
        return sequence

    def adopt(
        self, sequence: Sequence, num_written: int, *, state_end: int | None = None, rank: int | None = None
    ) -> bool:
        """Takes in a request, whose prompt and output are known, with the state behind its first tokens.

        True: it runs, and before the caller launches another plan it writes the first `num_written` positions to the
        pages in `sequence.pages`, and the state to `sequence.slot`. False: it waits, or has ended (`take_ended`);
        nothing is to be written, and what is known is computed again.

        state_end: positions that the rings of that state have seen, if they have gone further.
        """
        seen, most_ahead = num_written if state_end is None else state_end, self.config.rollback_tokens
        if not 0 < num_written < sequence.num_tokens:
            raise ValueError(f"num_written={num_written} must be from 1 to {sequence.num_tokens - 1}, all but one")
        if not 0 <= seen - num_written <= most_ahead:
            raise ValueError(f"state_end={seen} must be from {num_written} to {num_written + most_ahead}")
        reason = sequence.stop_reason(self.config.max_model_len)
        if not self.config.can_hold(len(sequence.prompt)):
            reason = "prompt_length_exceeded"
        self._register(
            sequence, self._rank_of(sequence, rank), lambda on: not reason and on.adopt(sequence, num_written, seen)
        )
        if reason:
            self._end(sequence, reason)
        elif sequence.slot >= 0:
            self.counters.adopted += 1
        else:
            self.counters.adoptions_queued += 1
        return sequence.slot >= 0

    def abort(self, request_id: str) -> bool:
        """Ends a request whatever it does at the moment; False if it is not unfinished."""
        return self.end(request_id, "abort")

    def end(self, request_id: str, reason: str, *, error: BaseException | None = None) -> bool:
        """Ends a request for a reason that was found outside; False if it is not unfinished."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        sequence.error = error
        self._finish(sequence, reason)
        return True

    def take_ended(self) -> list[Sequence]:
        """The requests that ended since the last call, each exactly once, `finish_reason` set."""
        ended, self._ended = self._ended, []
        return ended

    def next_image(self, is_known: Callable[[ImageSpan], bool]) -> ImageSpan | None:
        """The first image that a coming prefill step needs, as far as that can be told, and that is not known."""
        found = (rank.next_image(is_known) for rank in self.ranks)
        return next((image for image in found if image is not None), None)

    def clear_prefix_cache(self) -> None:
        """Forgets every known prefix. Requests keep what they have taken over."""
        for rank in self.ranks:
            rank.prefix.clear()

    def _rank_of(self, sequence: Sequence, rank: int | None) -> int:
        """Where a new request goes: to the rank with the fewest unless one is named."""
        if not sequence.prompt:
            raise ValueError("prompt must not be empty")
        if rank is None:
            return min(range(len(self.ranks)), key=lambda index: self.ranks[index].num_unfinished)
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"rank={rank} does not exist; there are {len(self.ranks)}")
        return rank

    def _register(self, sequence: Sequence, rank: int, admit: Callable[[Rank], bool] = lambda _: False) -> None:
        if sequence.request_id in self._sequences:
            raise ValueError(f"request {sequence.request_id!r} is unfinished; a new one needs an id of its own")
        if sequence.arrival >= 0:
            raise ValueError(f"request {sequence.request_id!r} was added before; make a new Sequence")
        sequence.arrival, sequence.rank = self._num_arrived, rank
        sequence.prefill_len = sequence.num_tokens
        self._num_arrived += 1
        self._sequences[sequence.request_id] = sequence
        if not admit(self.ranks[rank]):
            self.ranks[rank].enqueue(sequence)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a request that may have been read; what it leaves is kept for the next turn if it came to its end."""
        if reason in ("stop", "length"):
            self.ranks[sequence.rank].keep(sequence, min(sequence.num_written, sequence.num_tokens))
        self._end(sequence, reason)

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
            RankPlan(
                chunks=own,
                copies=rank.take_copies(self._num_steps),
                budget=budget_of(own, self.verification, step=self._num_steps),
            )
            for own, rank in zip(chunks, self.ranks, strict=True)
        )
        plan = Plan(step=self._num_steps, is_prefill=is_prefill, ranks=ranks)
        for rank, part in zip(self.ranks, ranks, strict=True):
            rank.keep_chunks(part, is_prefill=is_prefill, step=plan.step)
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
        """Prompts that were begun and those that wait, in order of arrival, while there is room."""
        begun = deque(one for one in rank.running if one.is_in_prefill and not one.is_held)
        rows, images, keys, count, admits = self.config.max_num_batched_tokens, self.config.max_images, 0, 0, True
        while sequence := self._next_prompt(rank, begun, admits=admits):
            hit = rank.find_prefix(sequence) if sequence.slot < 0 else None
            start = hit.position if hit else sequence.num_scheduled
            length = sequence.chunk_len(start, rows, self.config, max_images=images)
            end = start + length
            has_keys = keys == 0 or keys + end <= self.config.prefill_max_key_tokens
            if length == 0 or not has_keys or count == self.config.max_prompts:
                return
            if sequence.slot < 0 and not rank.admit(sequence, hit):
                admits = False  # those that run go on: they may hold the memory that it lacks
                continue
            chunk = self._launch(sequence, length, draws=end == sequence.prefill_len)
            yield chunk
            rows, images, keys, count = rows - length, images - len(chunk.images), keys + end, count + 1

    def _next_prompt(self, rank: Rank, begun: deque[Sequence], *, admits: bool) -> Sequence | None:
        """The first that was begun (an adopted one may be newer than one that waits), or that waits if it `admits`.

        Ends requests that outgrew the memory while they shared pages with others.
        """
        while admits and rank.waiting and (not begun or rank.waiting[0].arrival < begun[0].arrival):
            sequence = rank.waiting[0]
            if self.config.pages_of(sequence.prefill_len) <= self.config.num_pages:
                return sequence
            self._end(sequence, "insufficient_system_resource")
        return begun.popleft() if begun else None

    def _decode_chunks(self, rank: Rank) -> Iterator[Chunk]:
        """The next rows of every running request whose prompt is done, oldest first."""
        max_model_len, most = self.config.max_model_len, self.config.max_decode_rows - 1
        decoding = [one for one in rank.running if not one.is_in_prefill and one.may_decode(max_model_len)]
        limits = self.verification.lengths(decoding, most) if self.verification else None
        proposes = self.verification is None or self.verification.proposes(decoding, most, self._num_steps)
        for index, sequence in enumerate(decoding):
            if sequence.slot < 0:  # it gave way to an older one
                continue
            start = sequence.num_scheduled
            num_drafts = sequence.num_drafts(most if limits is None else limits[index])
            length = min(1 + num_drafts, max_model_len - start)
            # Without room for a row an unread step may still reject some of its rows: the request waits for that.
            if self._make_room(rank, sequence, start + length):
                yield self._launch(sequence, length, num_drafts=length - 1, draws=True, proposes=proposes)

    def _make_room(self, rank: Rank, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a request the pages of `num_tokens` tokens. The newest ones give way, which may be the request."""
        missing = self.config.pages_of(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while not rank.has_room(missing):
            newest = rank.running[-1]
            if len(rank.running) == 1:  # it has all there is
                self._end(newest, "insufficient_system_resource")
            else:
                self._preempt(newest)
            if newest is sequence:
                return False
        rank.add_pages(sequence, missing)
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

    def _launch(
        self, sequence: Sequence, length: int, *, draws: bool, num_drafts: int = 0, proposes: bool = True
    ) -> Chunk:
        """The next rows of a request, which is noted there."""
        start, num_unread = sequence.num_scheduled, sequence.draws_in_flight
        chunk = Chunk(
            sequence=sequence,
            start=start,
            length=length,
            num_drafts=num_drafts,
            draws=draws,
            proposes=proposes,
            draw_position=start + length - num_drafts,
            first_unknown=sequence.num_tokens + num_unread,
            follows=num_unread > 0,
            epoch=sequence.epoch,
            scores=sequence.scores_prompt and not sequence.output,
        )
        sequence.launch_rows(length, step=self._num_steps, draws=draws, proposes=proposes)
        return chunk

    # Results.

    def commit(self, plan: Plan, tokens: Mapping[str, abc.Sequence[int]]) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Takes in the results of the oldest unread plan; returns each request with the tokens that it keeps.

        tokens: for each drawing chunk, by request id, the tokens that the step kept: at least one, and none for a
        request that is held, which comes again. What follows the token that ends a request is cut off. Results of
        requests that ended or were preempted since are dropped, and may be left out.
        """
        live = [chunk for chunk in plan.chunks if not chunk.is_stale]
        plan.check_tokens(tokens)
        self._close(plan)
        kept: list[tuple[Sequence, tuple[int, ...]]] = []
        for chunk in live:
            sequence = chunk.sequence
            if not chunk.draws:
                sequence.read_rows(chunk.length, chunk.length)
                continue
            drawn = tokens[sequence.request_id]
            # The row in front of each token stays, and what stands before the first of these.
            sequence.read_rows(chunk.length, chunk.draw_row + len(drawn))
            sequence.draws_in_flight -= 1
            if not drawn:
                continue
            taken, reason = sequence.take_tokens(drawn, self.config.max_model_len)
            self.counters.tokens_committed += len(taken)
            kept.append((sequence, taken))
            if reason:
                self._finish(sequence, reason)
        self.counters.results_dropped += len(plan.chunks) - len(live)
        return kept

    def fail(self, plan: Plan, error: BaseException, *, state_is_lost: bool = False) -> None:
        """Ends the requests of the oldest unread plan, which broke: reason "abort", `error` set. The others go on.

        state_is_lost: the caches are empty now, so every other request is computed again, and the results of later
        plans are dropped when they are committed. A plan with copies counts as lost: forks and prefix hits may build
        on them. No known prefix outlives a broken step.
        """
        live = [chunk for chunk in plan.chunks if not chunk.is_stale]
        self._close(plan)
        self.counters.results_dropped += len(plan.chunks) - len(live)
        for chunk in live:
            chunk.sequence.error = error
            self._end(chunk.sequence, "abort")
        self.clear_prefix_cache()
        if state_is_lost or plan.num_copies:
            for rank in self.ranks:
                for sequence in tuple(rank.running):
                    self.counters.preemptions += 1
                    self._requeue(sequence)

    def _close(self, plan: Plan) -> None:
        """Marks the oldest unread plan as read."""
        if not self._unread or plan is not self._unread[0]:
            oldest = self._unread[0].step if self._unread else "none"
            raise ValueError(f"step {plan.step} is not the oldest unread one ({oldest}); plans are committed in order")
        self._unread.popleft()
        for rank in self.ranks:
            rank.states.mark_read(plan.step)
