"""What one step does, for every data-parallel rank: copies of states and pages, then rows at positions of slots.

All ranks run the same kind of step in the same compiled shape, so a shape is chosen by the largest rank.
"""

import dataclasses
import functools
from collections import abc
from collections.abc import Mapping
from typing import NamedTuple

from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.sequence import Copy, Sequence


class Chunk(NamedTuple):
    """Consecutive rows of one request: part of its prompt, or its next token and what may follow it.

    start is exact in a prefill step and where follows is False. Otherwise the step in front is unread, and start
    assumes that it keeps all its rows: the device subtracts those it rejects.
    """

    sequence: Sequence
    start: int  # position of the first row
    length: int
    draws: bool  # False in the middle of a prompt
    draw_position: int  # of the first token drawn: behind a prompt's last row, or behind a decode chunk's first row
    first_unknown: int  # position of the first token that the host does not know and that this may draw
    epoch: int  # of the sequence; results are dropped once it has moved on
    num_drafts: int = 0  # rows at the end that hold drafts; the others hold known tokens, or the newest one
    follows: bool = False  # the first row is the newest token of the slot, which the host has not read
    proposes: bool = True  # drafts are made behind its draw, where the engine drafts at all
    scores: bool = False  # every row has a logit row: those in front of a known prompt token tell its probability

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + self.length

    @property
    def is_stale(self) -> bool:
        """Whether the request ended or was preempted after this was planned."""
        return self.epoch != self.sequence.epoch

    @property
    def known_tokens(self) -> abc.Sequence[int]:
        """The tokens of its rows that the host knows: all but drafts, and but a first one that is unread."""
        if self.follows:
            return ()
        return self.sequence.tokens_from(self.start, self.length - self.num_drafts)

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images among its rows, each of them whole."""
        return tuple(image for image in self.sequence.images if self.start <= image.start < self.end)

    @property
    def draw_row(self) -> int:
        """Its first row that draws a token, where one does."""
        return self.length - self.num_drafts - 1

    @property
    def num_logits(self) -> int:
        """Its logit rows, the last ones; all drafts included."""
        return self.length if self.scores else int(self.draws) + self.num_drafts

    @property
    def output_index(self) -> int:
        """Place in the output of the token at `draw_position`."""
        return self.draw_position - len(self.sequence.prompt)

    @property
    def num_tail_rows(self) -> int:
        """Rows that run the decoder layers under bounded replay."""
        return max(0, self.end - max(self.start, self.sequence.tail_start))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The part of one rank; empty where it has nothing to do in a step of this kind."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[Copy, ...] = ()
    budget: int | None = None  # drafts that the device may verify in all; None: every one

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images among its rows."""
        return tuple(image for chunk in self.chunks for image in chunk.images)

    @functools.cached_property
    def num_drafts(self) -> int:
        """Drafts that could be verified."""
        return sum(chunk.num_drafts for chunk in self.chunks)

    @property
    def num_logits(self) -> int:
        """Logit rows without padding."""
        return sum(chunk.num_logits for chunk in self.chunks) - self._num_left_out

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows without padding."""
        return sum(chunk.length for chunk in self.chunks) - self._num_left_out

    @property
    def _num_left_out(self) -> int:
        """Drafts beyond the budget."""
        return 0 if self.budget is None else max(0, self.num_drafts - self.budget)

    @property
    def num_tail_rows(self) -> int:
        """Rows that run the decoder layers under bounded replay."""
        return sum(chunk.num_tail_rows for chunk in self.chunks)

    @property
    def context_len(self) -> int:
        """Tokens of the longest request, its new rows included."""
        return max((chunk.end for chunk in self.chunks), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One step, all prefill or all decode."""

    step: int  # plans are numbered without a gap, and committed in this order
    is_prefill: bool
    ranks: tuple[RankPlan, ...]

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all ranks, in the order of the ranks."""
        return tuple(chunk for rank in self.ranks for chunk in rank.chunks)

    @property
    def has_images(self) -> bool:
        """Whether a row belongs to an image."""
        return self.is_prefill and any(rank.images for rank in self.ranks)

    def check_tokens(self, tokens: Mapping[str, abc.Sequence[int]]) -> None:
        """Raises ValueError unless there are as many tokens for each request as its chunk can have drawn.

        None for a request that sat the step out.
        """
        for chunk in self.chunks:
            if chunk.draws and not chunk.is_stale:
                sequence = chunk.sequence
                most, least = chunk.num_drafts + 1, 0 if sequence.is_held else 1
                count = len(tokens.get(sequence.request_id, ()))
                if not least <= count <= most:
                    raise ValueError(
                        f"step {self.step} gave {count} tokens for request {sequence.request_id!r}; "
                        f"it must give {least} to {most}"
                    )

    @property
    def num_chunks(self) -> int:
        """Chunks of the largest rank."""
        return max(len(rank.chunks) for rank in self.ranks)

    @property
    def num_rows(self) -> int:
        """Rows of the largest rank."""
        return max(rank.num_rows for rank in self.ranks)

    @property
    def num_logits(self) -> int:
        """Logit rows of the largest rank."""
        return max(rank.num_logits for rank in self.ranks)

    @property
    def num_tail_rows(self) -> int:
        """Rows of the largest rank that run the decoder layers under bounded replay."""
        return max(rank.num_tail_rows for rank in self.ranks)

    @property
    def num_copies(self) -> int:
        """Copies of the largest rank."""
        return max(len(rank.copies) for rank in self.ranks)

    @property
    def context_len(self) -> int:
        """Tokens of the longest request."""
        return max(rank.context_len for rank in self.ranks)
