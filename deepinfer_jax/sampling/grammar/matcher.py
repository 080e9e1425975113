"""One request's place in its grammar: which token may come next, and what came so far.

A matcher is in one of four phases. FREE: the trigger has not appeared and every token is allowed.
FORCED: the bound token ended freedom and the rest of the trigger is the only way. GRAMMAR: the
backend decides. FINISHED: the grammar accepted EOS and every token is allowed again.
"""

import copy
import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped, UInt32

from deepinfer_jax.sampling.grammar.errors import GrammarError
from deepinfer_jax.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance


class Phase(enum.Enum):
    """What decides about the next token."""

    FREE = "free"
    FORCED = "forced"
    GRAMMAR = "grammar"
    FINISHED = "finished"


class Matcher:
    """The state of one request; built by `Grammar.matcher`, not safe for use by two threads at once."""

    def __init__(
        self,
        *,
        backend: "llguidance.LLMatcher",
        vocabulary: Vocabulary,
        trigger: tuple[int, ...] = (),
        bound_id: int | None = None,
        make_backend: "Callable[[], llguidance.LLMatcher] | None" = None,
    ) -> None:
        """make_backend: for forks, where a mask may be slow and backends must share nothing; None: copies will do."""
        self._backend, self._make_backend = backend, make_backend
        self._consumed: list[int] = []  # by the backend: the tokens of phase GRAMMAR, EOS left out
        self._vocabulary = vocabulary
        self._trigger, self._bound_id = trigger, bound_id
        self._fallback = _fallback_table(trigger)
        self._phase, self._num_matched = (Phase.FREE if trigger else Phase.GRAMMAR), 0
        self._undo: list[tuple[Phase, int]] = []  # phase and matched length before each token

    @property
    def num_tokens(self) -> int:
        """Tokens that `advance` took and `rollback` did not take back."""
        return len(self._undo)

    @property
    def phase(self) -> Phase:
        """What decides about the next token."""
        return self._phase

    @property
    def needs_mask(self) -> bool:
        """False where every token is allowed, so that no mask has to be computed."""
        return self._phase in (Phase.FORCED, Phase.GRAMMAR)

    @property
    def may_be_slow(self) -> bool:
        """Whether the next mask may take longer than a step does."""
        return self._make_backend is not None and self._phase is Phase.GRAMMAR

    @property
    def is_finished(self) -> bool:
        """True after the grammar accepted EOS."""
        return self._phase is Phase.FINISHED

    def mask(self) -> UInt32[np.ndarray, " words"]:
        """ceil(V/32) words, bit `id % 32` of word `id // 32` set where the token is allowed next."""
        row = np.empty(self._vocabulary.mask_words, np.uint32)
        fill_mask(self, row)
        return row

    def advance(self, token_id: int) -> None:
        """Takes the next token; GrammarError when it is not allowed, and then nothing has changed."""
        before = self._phase, self._num_matched
        if not 0 <= token_id < self._vocabulary.vocab_size:
            raise GrammarError(
                f"token {token_id} is no id of the model (0..{self._vocabulary.vocab_size - 1}); "
                "advance with tokens that the mask allows"
            )
        if self._phase is Phase.FREE:
            self._advance_free(token_id)
        elif self._phase is Phase.FORCED:
            if token_id != self._trigger[self._num_matched]:
                raise self._forbidden(token_id, f"only {self._trigger[self._num_matched]}, part of the trigger, is")
            self._match_one_more()
        elif self._phase is Phase.GRAMMAR:
            self._advance_grammar(token_id)
        self._undo.append(before)

    def rollback(self, num_tokens: int) -> None:
        """Takes the last tokens back, however many there are."""
        if not 0 <= num_tokens <= len(self._undo):
            raise ValueError(
                f"cannot take back {num_tokens} tokens of {len(self._undo)}; give a number from 0 to {len(self._undo)}"
            )
        if num_tokens == 0:
            return
        undone = self._undo[-num_tokens:]
        states = [*undone, (self._phase, self._num_matched)]
        in_backend = sum(
            before is Phase.GRAMMAR and after is Phase.GRAMMAR
            for (before, _), (after, _) in zip(states, states[1:], strict=False)
        )
        if in_backend:
            if not self._backend.rollback(in_backend):
                raise GrammarError(f"the backend cannot take back {in_backend} tokens: {self._backend_error()}")
            del self._consumed[-in_backend:]
        del self._undo[-num_tokens:]
        self._phase, self._num_matched = undone[0]

    def fork(self) -> "Matcher":
        """An independent matcher in the same state, which can be rolled back as far as this one."""
        twin = copy.copy(self)
        twin._backend = self._backend.deep_copy() if self._make_backend is None else self._make_backend()
        twin._undo, twin._consumed = list(self._undo), list(self._consumed)
        if self._make_backend is not None and twin._backend.try_consume_tokens(self._consumed) < len(self._consumed):
            raise GrammarError(
                f"the grammar's matcher cannot be built again: {twin._backend_error()}; end this request"
            )
        return twin

    def replay(self, tokens: Iterable[int]) -> None:
        """Starts anew and takes the tokens; the state is that of a matcher that was advanced by them."""
        self.rollback(len(self._undo))
        for token_id in tokens:
            self.advance(token_id)

    def _advance_free(self, token_id: int) -> None:
        while self._num_matched and self._trigger[self._num_matched] != token_id:
            self._num_matched = self._fallback[self._num_matched - 1]
        if self._trigger[self._num_matched] == token_id:
            self._match_one_more()
        if self._phase is Phase.FREE and token_id == self._bound_id:
            self._phase = Phase.FORCED

    def _match_one_more(self) -> None:
        self._num_matched += 1
        if self._num_matched == len(self._trigger):
            self._phase = Phase.GRAMMAR

    def _advance_grammar(self, token_id: int) -> None:
        if token_id == self._vocabulary.eos_id:
            if not self._backend.is_accepting():
                raise self._forbidden(token_id, "the text is not complete, so EOS is not")
            self._phase = Phase.FINISHED
        elif token_id >= len(self._vocabulary.token_bytes) or not self._backend.try_consume_tokens([token_id]):
            if self._backend.is_error():
                raise GrammarError(f"the grammar's matcher failed: {self._backend_error()}; end this request")
            raise self._forbidden(token_id, "what the mask shows is")
        else:
            self._consumed.append(token_id)

    def _forbidden(self, token_id: int, allowed: str) -> GrammarError:
        return GrammarError(
            f"token {token_id} is not allowed at output position {len(self._undo)}: {allowed} allowed; "
            "advance with tokens that the mask allows"
        )

    def _backend_error(self) -> str:
        return self._backend.get_error().split("\n<state>")[0].strip()


def fill_mask(matcher: Matcher, out_row: Shaped[np.ndarray, "..."]) -> None:
    """Writes the matcher's mask into a caller's row of 32-bit words, without an array of its own.

    The row is contiguous, uint32 or int32, of `Vocabulary.mask_words` words. Where the matcher needs no
    mask, all ids of the model are set.
    """
    vocabulary = matcher._vocabulary
    if out_row.shape != (vocabulary.mask_words,) or out_row.dtype.itemsize != 4 or not out_row.flags.c_contiguous:
        raise ValueError(
            f"out_row is {out_row.dtype}{list(out_row.shape)}; "
            f"give one contiguous row of {vocabulary.mask_words} 32-bit words"
        )
    row = out_row.view(np.uint32)
    if not matcher.needs_mask:
        row.fill(0xFFFFFFFF)
        if vocabulary.vocab_size % 32:
            row[-1] = (1 << vocabulary.vocab_size % 32) - 1
        return
    if matcher.phase is Phase.FORCED:
        row.fill(0)
        token_id = matcher._trigger[matcher._num_matched]
        row[token_id // 32] = 1 << token_id % 32
        return
    words = -(-len(vocabulary.token_bytes) // 32)
    row[words:] = 0
    matcher._backend.unsafe_compute_mask_ptr(row.ctypes.data, 4 * words)
    if matcher._backend.is_error():
        raise GrammarError(f"the grammar's matcher failed: {matcher._backend_error()}; end this request")


def _fallback_table(trigger: tuple[int, ...]) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth-Morris-Pratt)."""
    table = [0] * len(trigger)
    length = 0
    for index in range(1, len(trigger)):
        while length and trigger[index] != trigger[length]:
            length = table[length - 1]
        length += trigger[index] == trigger[length]
        table[index] = length
    return tuple(table)
