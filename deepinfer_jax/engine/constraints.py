"""What ties a request's next token to its tokens so far: grammars, lists of tokens, penalties.

Such rows need the host between forward and sampling. Grammars are compiled on threads of their own.
"""

import contextlib
import dataclasses
from collections import abc
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import UInt32

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.sampling.bad_words import bad_sequences_of
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import (
    Grammar,
    GrammarError,
    GrammarPool,
    GrammarTicket,
    GrammarTimeout,
    parse_so_args,
    vocabulary_of,
)
from deepinfer_jax.sampling.logits import Edits
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.plan import Chunk, RankPlan
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.tokenizer import Tokenizer

GRAMMAR_FAILED = "xgrammar runtime errors or timeout"  # the finish reason's name in the interface (5.6)
_EDIT_SIZES = (64, 1024, 16384)  # compiled numbers of edited tokens in a row; beyond them the whole vocabulary


class Constraints:
    """Builds the `DrawState` of requests of one engine."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._pool: GrammarPool | None = None  # made at the first grammar: it reads the whole vocabulary

    def compile(self, params: SamplingParams) -> GrammarTicket | None:
        """Starts to compile the grammar of a request, None for one without.

        Raises ValueError for bad so_args, and for options about texts where there is no tokenizer.
        """
        for field in ("stop", "bad_words"):
            if getattr(params, field):
                self._require_tokenizer(field)
        if params.so_args is None:
            return None
        request = parse_so_args(params.so_args)
        if self._pool is None:
            tokenizer, config = self._require_tokenizer("so_args"), self._config
            self._pool = GrammarPool(
                vocabulary_of(tokenizer, vocab_size=self._model.vocab_size),
                cpus=config.so_builder_cpus,
                timeout_s=float(config.xgrammar_timeout),
                cache_bytes=None if config.xgrammar_disable_cache else config.grammar_cache_bytes,
                whitespace=config.grammar_whitespace,
            )
        return self._pool.submit(request)

    def build(
        self, params: SamplingParams, prompt: abc.Sequence[int], grammar: Grammar | None, output: Iterable[int] = ()
    ) -> DrawState | None:
        """The state behind these output tokens; None for a request whose draws need nothing from the host."""
        words = params.bad_words or ()
        state = DrawState(
            params,
            prompt=prompt,
            eos_id=self._model.eos_token_id,
            vocab_size=self._model.vocab_size,
            matcher=None if grammar is None else grammar.matcher(),
            bad_sequences=bad_sequences_of(words, self._require_tokenizer("bad_words")) if words else (),
        )
        if not state.needs_host:
            return None
        state.replay(output)
        return state

    def close(self) -> None:
        """Lets the compiling threads end."""
        if self._pool is not None:
            self._pool.close()

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError(f"{field} needs a tokenizer, and this model has none; give tokenizer=, or leave it out")
        return self._tokenizer


class PendingGrammars:
    """Requests whose grammar is being compiled."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._pending: dict[str, tuple[Sequence, GrammarTicket]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, sequence: Sequence, ticket: GrammarTicket) -> None:
        """Lets a request wait for its grammar."""
        self._pending[sequence.request_id] = (sequence, ticket)

    def remove(self, request_id: str) -> Sequence | None:
        """The request, which waits no longer; None if it does not wait here."""
        found = self._pending.pop(request_id, None)
        return None if found is None else found[0]

    def take_ready(self, *, wait_s: float) -> list[Sequence]:
        """The requests that need not wait any longer; those that failed have `error` set.

        wait_s: how long to wait for the first of them if none is ready.
        """
        if self._pending and not any(ticket.done() for _, ticket in self._pending.values()):
            with contextlib.suppress(Exception):  # it is told below
                next(iter(self._pending.values()))[1].result(wait_s)
        ready = [sequence for sequence, ticket in self._pending.values() if ticket.done()]
        for sequence in ready:
            ticket = self._pending.pop(sequence.request_id)[1]
            try:
                state = self._constraints.build(sequence.options.params, sequence.prompt, ticket.result())
                sequence.options = dataclasses.replace(sequence.options, constraint=state)
            except (ValueError, GrammarError, GrammarTimeout) as error:
                sequence.error = error
        return ready


def needs_host(chunk: Chunk) -> bool:
    """Whether a chunk draws a token for which masks or edits may be needed."""
    constraint: DrawState | None = chunk.sequence.options.constraint
    return chunk.draws and constraint is not None and constraint.needs_host


class MaskedRows:
    """The masks and edits of one step."""

    def __init__(self, plan: RankPlan, *, num_logits: int, vocab_size: int) -> None:
        self.masks: UInt32[np.ndarray, "N W"] = np.full((num_logits, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        self.rows = [(chunk, first + chunk.num_logits - 1) for chunk, first in plan.logit_chunks if needs_host(chunk)]
        self._vocab_size = vocab_size

    def fill(self, chunk: Chunk, row: int) -> None:
        """Writes the mask of one row. Raises GrammarError if its matcher fails."""
        chunk.sequence.options.constraint.fill_mask(self.masks[row])

    def edits(self) -> Edits | None:
        """The edits of all rows that were not dropped meanwhile."""
        found = [(row, chunk.sequence.options.constraint) for chunk, row in self.rows if not chunk.is_stale]
        most = max((state.num_edits for _, state in found), default=0)
        if not most:
            return None
        room = next((size for size in _EDIT_SIZES if size >= most), self._vocab_size)
        shape = (len(self.masks), room)
        token_ids, up = np.full(shape, -1, np.int32), np.ones(shape, np.float32)
        down, add = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        for row, state in found:
            for whole, own in zip((token_ids, up, down, add), state.edits(), strict=True):
                whole[row, : len(own)] = own
        token_ids, up, down, add = jax.device_put((token_ids, up, down, add))
        return Edits(token_ids=token_ids, up=up, down=down, add=add)
