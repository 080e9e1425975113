"""What the tokens so far say about the next one: masks and edits of one request (host side, no JAX)."""

import copy
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from deepinfer_jax.sampling.bad_words import ROOT, SequenceBan
from deepinfer_jax.sampling.grammar.debug import MaskLog
from deepinfer_jax.sampling.grammar.matcher import Matcher
from deepinfer_jax.sampling.grammar.matcher import fill_mask as fill_grammar_mask
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.penalties import EditArrays, Penalties


class DrawState:
    """One request's place in its constraints.

    `advance` costs as much as one token does, however long the output is. While one thread makes a mask (`MaskJobs`),
    another one that advances, takes back, forks or asks for a mask waits for it.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        eos_id: int,
        vocab_size: int,
        matcher: Matcher | None = None,
        bad_sequences: Iterable[Sequence[int]] = (),
        mask_log: MaskLog | None = None,
    ) -> None:
        """matcher: of so_args, before its first token. bad_sequences: `bad_sequences_of` the bad_words.

        mask_log: is told how long each mask took.
        """
        self._lock = threading.RLock()
        self._matcher, self._mask_log = matcher, mask_log
        self._min_tokens = params.min_tokens
        # With ignore_eos, EOS ends nothing and is a token like others.
        self._ends = (() if params.ignore_eos else (eos_id,)) + tuple(params.stop_token_ids or ())
        sequences = tuple(bad_sequences)
        if params.bad_words and not sequences:
            raise ValueError(
                "params has bad_words, and bad_sequences is empty; give bad_sequences_of(words, tokenizer)"
            )
        self._ban = SequenceBan(sequences) if sequences else None
        self._ban_states = [ROOT]  # before each output token, and now
        self._output: list[int] = []
        self._penalties = Penalties(params, prompt)
        self._restricts = params.allowed_token_ids is not None or self._ban is not None
        given = {"so_args": matcher, "allowed_token_ids": params.allowed_token_ids, "bad_words": self._ban}
        self._restrictions = tuple(name for name, value in given.items() if value is not None)
        self._has_edits = self._penalties.depends_on_output or bool(params.logit_bias)
        named = (*self._ends, *(params.allowed_token_ids or ()), *(i for sequence in sequences for i in sequence))
        if any(not 0 <= token_id < vocab_size for token_id in named):
            raise ValueError(f"a constraint names a token id outside the vocabulary 0..{vocab_size - 1}; correct it")
        self._base = _base_mask(params.allowed_token_ids, self._ban.always if self._ban else (), vocab_size)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self._output)

    @property
    def has_grammar(self) -> bool:
        """Whether so_args decide about the tokens, from the first or from a trigger on."""
        return self._matcher is not None

    @property
    def restrictions(self) -> tuple[str, ...]:
        """Names of the options that may forbid tokens here."""
        return (*self._restrictions, "min_tokens") if self._is_too_early else self._restrictions

    @property
    def may_be_slow(self) -> bool:
        """Whether the next `fill_mask` may take longer than a step does."""
        return self._matcher is not None and self._matcher.may_be_slow

    @property
    def needs_host(self) -> bool:
        """Whether the next token, or one after it, may need a mask or edits. False lasts until a `rollback`."""
        in_grammar = self._matcher is not None and not self._matcher.is_finished
        return in_grammar or self._restricts or self._is_too_early or self._has_edits

    @property
    def needs_mask(self) -> bool:
        """False where `fill_mask` would allow every token."""
        in_grammar = self._matcher is not None and self._matcher.needs_mask
        return in_grammar or self._restricts or self._is_too_early

    @property
    def num_edits(self) -> int:
        """Number of tokens that `edits` names."""
        return self._penalties.size

    def alone(self) -> AbstractContextManager[Any]:
        """Keeps other threads from this state for several calls."""
        return self._lock

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes which tokens may come next: bit `id % 32` of word `id // 32`, 1 where allowed.

        row: contiguous uint32 or int32 of ceil(vocab_size / 32) words. It may come out empty: then no token may.
        """
        if row.shape != self._base.shape or row.dtype.itemsize != 4 or not row.flags.c_contiguous:
            raise ValueError(
                f"row is {row.dtype}{list(row.shape)}; give one contiguous row of {len(self._base)} 32-bit words"
            )
        words = row.view(np.uint32)
        with self._lock:
            start = time.perf_counter()
            if self._matcher is not None and self._matcher.needs_mask:
                fill_grammar_mask(self._matcher, words)
                words &= self._base
            else:
                words[:] = self._base
            if self._ban is not None:
                _forbid(words, self._ban.completing(self._ban_states[-1]))
            if self._is_too_early:
                _forbid(words, self._ends)
            if self._mask_log is not None:
                self._mask_log.took(time.perf_counter() - start)

    def edits(self) -> EditArrays:
        """Token ids (int32, each once), up, down and add (float32): (logit > 0 ? logit up : logit down) + add.

        Read-only views that hold until the next `advance`, `rollback` or `replay`.
        """
        return self._penalties.arrays()

    def advance(self, token_id: int) -> None:
        """Takes the next output token. GrammarError when the matcher refuses it; then nothing has changed."""
        with self._lock:
            if self._matcher is not None:
                self._matcher.advance(token_id)
            self._output.append(token_id)
            self._penalties.advance(token_id)
            if self._ban is not None:
                self._ban_states.append(self._ban.step(self._ban_states[-1], token_id))

    def rollback(self, num_tokens: int) -> None:
        """Takes the last output tokens back."""
        if not 0 <= num_tokens <= len(self._output):
            raise ValueError(
                f"cannot take back {num_tokens} tokens of {len(self._output)}; "
                f"give a number from 0 to {len(self._output)}"
            )
        with self._lock:
            if self._matcher is not None:
                self._matcher.rollback(num_tokens)
            for _ in range(num_tokens):
                self._penalties.take_back(self._output.pop())
                if self._ban is not None:
                    self._ban_states.pop()

    def fork(self) -> "DrawState":
        """An independent state at the same place, which can be rolled back as far as this one."""
        with self._lock:
            twin = copy.copy(self)
            twin._matcher = None if self._matcher is None else self._matcher.fork()
            twin._penalties = self._penalties.fork()
            twin._output, twin._ban_states = list(self._output), list(self._ban_states)
        twin._lock = threading.RLock()
        twin._mask_log = None if self._mask_log is None else self._mask_log.fork()
        return twin

    def replay(self, tokens: Iterable[int]) -> None:
        """Starts anew after the prompt and takes the tokens."""
        with self._lock:
            self.rollback(len(self._output))
            for token_id in tokens:
                self.advance(token_id)

    @property
    def _is_too_early(self) -> bool:
        return len(self._output) < self._min_tokens and bool(self._ends)


def _base_mask(allowed: Sequence[int] | None, forbidden: Sequence[int], vocab_size: int) -> np.ndarray:
    """The part of the mask that no output token changes."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[slice(vocab_size) if allowed is None else list(allowed)] = 1
    bits[list(forbidden)] = 0
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _forbid(words: np.ndarray, ids: Sequence[int]) -> None:
    for token_id in ids:
        words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
