"""A request as the scheduler sees it: its tokens, when it ends, what it holds, and how far its rows are.

Rows run ahead of tokens. A step is planned before the tokens of the step in front of it are known, so a request has
rows that are launched but unread. `num_written` counts what has been read, `num_scheduled` assumes that every row of
an unread step will be kept; a commit corrects it.
"""

import dataclasses
import functools
import math
from collections import abc
from typing import Any

from deepinfer_jax.scheduler import images as spans
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.policy import SchedulerConfig


@dataclasses.dataclass(frozen=True)
class Copy:
    """A state slot taken over, and the page that the next row shares with rows of whoever wrote it.

    A fork takes them from its parent, a prefix hit from a snapshot, and a snapshot (whose slot is behind those of the
    requests) takes the state of a request. All copies of a step read before any of them writes, and all write before
    the rows of the step.
    """

    source_slot: int
    target_slot: int
    source_page: int = -1  # -1: the next row opens a page
    target_page: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When a request ends by itself."""

    max_tokens: int  # output tokens
    eos_id: int
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()  # more tokens that end it, whatever ignore_eos says

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends it."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | {self.eos_id}


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """One request. The caller fills the first part; the scheduler changes the rest."""

    request_id: str
    prompt: abc.Sequence[int]
    limits: Limits
    tail_start: int = 0  # bounded replay: fixed by the original prompt, the same after preemption and in a fork
    scores_prompt: bool = False  # every prompt row has a logit row, so no known prefix is taken over
    options: Any = None  # sampling parameters, seed: carried, never looked at
    checkpoints: frozenset[int] = frozenset()  # where its prompt is cut, and kept for others with the same beginning
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order; a checkpoint inside of one moves to its beginning

    output: list[int] = dataclasses.field(default_factory=list)  # tokens that were read, those of a fork's parent first
    finish_reason: str = ""  # spec: interface 5.6
    error: BaseException | None = None  # what broke the step that ended it
    is_held: bool = False  # set by the caller: no step takes it in until that is over
    arrival: int = -1  # place in the order of arrival over all ranks
    rank: int = -1  # data-parallel rank

    slot: int = -1  # state slot, -1 while it waits
    pages: list[int] = dataclasses.field(default_factory=list)  # page i holds tokens i * page_tokens and following
    pending_copy: Copy | None = None  # of a fork or a prefix hit: what the next step copies before its rows
    window_start: int = 0  # rows look at window positions from here on; the ring does not hold those in front
    branch_point: int = 0  # one more checkpoint: where its known pages end although no state is known there
    prefill_len: int = 0  # rows below this position belong to prefill steps
    num_written: int = 0  # positions whose rows were read and kept
    rows_in_flight: int = 0  # rows of unread steps
    draws_in_flight: int = 0  # unread steps that draw at least one token
    has_drafts: bool = False  # whether drafts will stand behind its newest token in the slot
    proposal: Any = None  # what the last step that was read proposed behind its newest token: the caller's own
    estimates: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (step, survival of its drafts) of the last steps read
    seen_end: int = 0  # positions that the slot's rings have seen in steps that were read; rejected rows count
    last_step: int = -1  # last step that uses the slot
    epoch: int = 0  # grows when the slot is given back: results planned before that are dropped

    def __post_init__(self) -> None:
        self.checkpoints = frozenset(self.outside_images(position) for position in self.checkpoints)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, as far as the host knows them."""
        return len(self.prompt) + len(self.output)

    @property
    def num_scheduled(self) -> int:
        """Positions with a row once every launched step is read, if all its rows are kept."""
        return self.num_written + self.rows_in_flight

    @property
    def state_end(self) -> int:
        """Positions that the slot's rings have seen once every launched step is done; rejected rows count."""
        return max(self.seen_end, self.num_scheduled)

    @property
    def is_in_prefill(self) -> bool:
        """Whether a row of the prompt, or of the output that a preemption has to recompute, is not launched yet."""
        return self.num_scheduled < self.prefill_len

    def tokens_from(self, start: int, count: int) -> abc.Sequence[int]:
        """The known tokens among the `count` from position `start` on."""
        num_prompt = len(self.prompt)
        if start + count <= num_prompt:
            return self.prompt[start : start + count]
        from_prompt = list(self.prompt[start:])
        return from_prompt + self.output[max(0, start - num_prompt) : start + count - num_prompt]

    def cache_tokens(self, count: int) -> abc.Sequence[int]:
        """The first `count` known tokens, as prefixes are told apart: those of an image tell what it shows."""
        num_output = count - len(self.prompt)
        if num_output <= 0:
            return self._cache_prompt[:count]
        return [*self._cache_prompt, *self.output[:num_output]]

    @functools.cached_property
    def _cache_prompt(self) -> abc.Sequence[int]:
        if not self.images:
            return self.prompt
        tokens = list(self.prompt)
        for image in self.images:
            tokens[image.start : image.end] = [image.cache_token] * image.length
        return tokens

    def outside_images(self, position: int) -> int:
        """The position, or the beginning of the image that a cut there would split."""
        return spans.outside_images(self.images, position)

    def branch(self, request_id: str, num_tokens: int | None, *, limits: Limits | None, options: Any) -> "Sequence":
        """A new request with the first `num_tokens` known tokens of this one, its whole prompt at least; None: all."""
        least, most = len(self.prompt), self.num_tokens
        num_tokens = most if num_tokens is None else num_tokens
        if not least <= num_tokens <= most:
            raise ValueError(f"num_tokens={num_tokens} must be from {least} (the prompt) to {most} (what is known now)")
        return Sequence(
            request_id=request_id,
            prompt=self.prompt,
            limits=limits or self.limits,
            tail_start=self.tail_start,
            options=self.options if options is None else options,
            checkpoints=self.checkpoints,
            images=self.images,
            output=self.output[: num_tokens - len(self.prompt)],
        )

    def stop_reason(self, max_model_len: int) -> str:
        """Why the request ends with its last token, "" if it does not."""
        if self.output and self.output[-1] in self.limits.end_ids:
            return "stop"
        if len(self.output) >= self.limits.max_tokens or self.num_tokens > max_model_len:
            return "length"
        return ""

    def may_decode(self, max_model_len: int) -> bool:
        """Whether a decode step may take it in: another token could follow when each unread step draws only one.

        Else a row would be wasted.
        """
        num_drawn = len(self.output) + self.draws_in_flight
        has_place = len(self.prompt) + num_drawn <= max_model_len and self.num_scheduled < max_model_len
        return has_place and num_drawn < self.limits.max_tokens and not self.is_held

    def num_drafts(self, most: int) -> int:
        """Drafts worth verifying: those that exist, and no more than could still be emitted."""
        if not self.has_drafts or not most:
            return 0
        num_left = self.limits.max_tokens - len(self.output) - self.draws_in_flight
        return max(0, min(most, num_left - 1))

    def cut(self, tokens: abc.Sequence[int], max_model_len: int) -> int:
        """How many of the next tokens it would take: up to the one that ends it."""
        if len(tokens) < 2:
            return len(tokens)
        room = min(self.limits.max_tokens - len(self.output), max_model_len + 1 - self.num_tokens)
        end_ids = self.limits.end_ids
        for count, token in enumerate(tokens, start=1):
            if count >= room or token in end_ids:
                return count
        return len(tokens)

    def take_tokens(self, tokens: abc.Sequence[int], max_model_len: int) -> tuple[tuple[int, ...], str]:
        """Appends tokens up to the one that ends the request; returns those taken and the reason."""
        taken = tuple(tokens[: self.cut(tokens, max_model_len)])
        self.output.extend(taken)
        return taken, self.stop_reason(max_model_len) if taken else ""

    def is_checkpoint(self, position: int, *, interval: int) -> bool:
        """Whether the tokens in front of a position are to be kept; interval 0: there are no regular checkpoints."""
        is_regular = interval > 0 and self.outside_images(-(-position // interval) * interval) == position
        return is_regular or position in self.checkpoints or position == self.branch_point

    def next_cut(self, start: int, *, interval: int, multiple: int) -> int:
        """The first checkpoint behind `start` that is a multiple; the end of its prompt if that comes first."""
        cuts = [cut for cut in (*self.checkpoints, self.branch_point) if cut > start and cut % multiple == 0]
        if interval:
            common = math.lcm(interval, multiple)
            regular = start - start % common + common
            while self.outside_images(regular) <= start:
                regular += common
            cuts.append(self.outside_images(regular))
        return min((self.prefill_len, *cuts))

    def chunk_len(self, start: int, max_rows: int, config: SchedulerConfig, *, max_images: int) -> int:
        """Rows of a prompt's chunk at `start`, 0 if none fits. The one place that decides where a prompt is cut.

        An image is never cut, not even where the multiple asks for it.
        """
        end = start + max_rows
        ahead = [image for image in self.images if image.start >= start]
        if len(ahead) > max_images:
            end = min(end, ahead[max_images].start)
        if not config.is_chunked:
            return self.prefill_len - start if self.prefill_len <= end else 0
        cut = self.next_cut(start, interval=config.checkpoint_interval, multiple=config.chunk_multiple)
        if cut <= end:
            return cut - start
        cut = self.outside_images(end - end % config.chunk_multiple)
        if cut <= start:  # no multiple is in reach that is outside of images
            cut = max((bound for image in ahead for bound in (image.start, image.end) if bound <= end), default=start)
        return max(0, cut - start)

    def launch_rows(self, count: int, *, step: int, draws: bool, proposes: bool = True) -> None:
        """Notes rows that a step computes, and whether it draws a token for this request and drafts behind it."""
        self.rows_in_flight += count
        self.last_step = step
        if draws:
            self.draws_in_flight += 1
            self.has_drafts = proposes

    def read_rows(self, count: int, num_kept: int) -> None:
        """Notes that the oldest unread rows have been read, and how many of them stay."""
        self.seen_end = max(self.seen_end, self.num_written + count)
        self.rows_in_flight -= count
        self.num_written += num_kept

    def forget_rows(self) -> None:
        """Back to the start: everything known has to be computed again, and results under way are void."""
        self.slot, self.pages, self.pending_copy = -1, [], None
        self.num_written = self.rows_in_flight = self.draws_in_flight = self.seen_end = 0
        self.window_start = self.branch_point = 0
        self.last_step = -1
        self.has_drafts, self.proposal, self.estimates = False, None, ()
        self.prefill_len = self.num_tokens
        self.epoch += 1
