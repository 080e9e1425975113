"""What ties a request's next token to its tokens so far: grammars, lists of tokens, penalties.

Such rows need the host between forward and sampling (`masking.py`). Grammars are compiled on threads of their own.
"""

import contextlib
import dataclasses
from collections import abc
from collections.abc import Iterable

import jax

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
    MaskLog,
    check_ids,
    parse_so_args,
    vocabulary_of,
)
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.tokenizer import Tokenizer

GRAMMAR_FAILED = "xgrammar runtime errors or timeout"  # the finish reason's name in the interface (5.6)


class Constraints:
    """Builds the `DrawState` of requests of one engine."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._pool: GrammarPool | None = None  # made at the first grammar: it reads the whole vocabulary

    def compile(self, params: SamplingParams) -> GrammarTicket | None:
        """Starts to compile the grammar of a request, None for one without.

        Raises ValueError for so_args with bad entries or with ids beyond the vocabulary, and for options about texts
        where there is no tokenizer.
        """
        for field in ("stop", "bad_words"):
            if getattr(params, field):
                self._require_tokenizer(field)
        if params.so_args is None:
            return None
        request = parse_so_args(params.so_args)
        check_ids(request, self._model.vocab_size)
        if self._pool is None:
            tokenizer, config = self._require_tokenizer("so_args"), self._config
            self._pool = GrammarPool(
                vocabulary_of(tokenizer, vocab_size=self._model.vocab_size),
                cpus=config.so_builder_cpus,
                timeout_s=float(config.xgrammar_timeout),
                cache_bytes=None if config.xgrammar_disable_cache else config.grammar_cache_bytes,
                whitespace=config.grammar_whitespace,
                is_verbose=config.xgrammar_debug,
            )
        return self._pool.submit(request)

    def behind(self, params: SamplingParams, prompt: abc.Sequence[int], output: abc.Sequence[int]) -> DrawState | None:
        """The state of a request that goes on behind known tokens; waits for its grammar.

        Raises ValueError for tokens that the grammar does not allow.
        """
        ticket = self.compile(params)
        try:
            return self.build(params, prompt, ticket.result() if ticket else None, output)
        except GrammarError as error:
            raise ValueError(f"the tokens so far do not fit so_args: {error}; change so_args or num_tokens") from error

    def build(
        self,
        params: SamplingParams,
        prompt: abc.Sequence[int],
        grammar: Grammar | None,
        output: Iterable[int] = (),
        *,
        name: str = "a fork or a restored request",
    ) -> DrawState | None:
        """The state behind these output tokens; None for a request whose draws need nothing from the host.

        name: of the request, in logs about its grammar.
        """
        words = params.bad_words or ()
        state = DrawState(
            params,
            prompt=prompt,
            eos_id=self._model.eos_token_id,
            vocab_size=self._model.vocab_size,
            matcher=None if grammar is None else grammar.matcher(),
            bad_sequences=bad_sequences_of(words, self._require_tokenizer("bad_words")) if words else (),
            mask_log=MaskLog(name) if grammar is not None and self._config.xgrammar_debug else None,
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

    def require_started(self, request_id: str, sequence: Sequence | None, what: str) -> Sequence:
        """The sequence that the scheduler has for a request. Raises ValueError if it has none.

        what: is to be done with it, "forked" or "saved".
        """
        if request_id in self._pending:
            raise ValueError(
                f"request {request_id!r} waits for its grammar, so there is nothing yet that could be {what}; "
                "call step() until the grammar is ready (get_num_pendings), then try again"
            )
        if sequence is None:
            raise ValueError(f"request {request_id!r} is not unfinished; only a waiting or running one can be {what}")
        return sequence

    def take_ready(self, *, wait_s: float) -> list[Sequence]:
        """The requests that need not wait any longer; those that failed have `error` set.

        wait_s: how long to wait for the first of them if none is ready. Several processes wait for every one: they
        must not differ in which are ready.
        """
        if jax.process_count() > 1:
            for _, ticket in self._pending.values():
                with contextlib.suppress(Exception):  # it is told below
                    ticket.result()
        elif self._pending and not any(ticket.done() for _, ticket in self._pending.values()):
            with contextlib.suppress(Exception):  # it is told below
                next(iter(self._pending.values()))[1].result(wait_s)
        ready = [sequence for sequence, ticket in self._pending.values() if ticket.done()]
        for sequence in ready:
            ticket = self._pending.pop(sequence.request_id)[1]
            try:
                params, name = sequence.options.params, f"request {sequence.request_id}"
                state = self._constraints.build(params, sequence.prompt, ticket.result(), name=name)
                sequence.options = dataclasses.replace(sequence.options, constraint=state)
            except (ValueError, GrammarError, GrammarTimeout) as error:
                sequence.error = error
        return ready
