"""Structured output: grammars that decide which token may come next (spec: interface 3)."""

from deepinfer_jax.sampling.grammar.compile import DEFAULT_WHITESPACE, Grammar, check_ids, compile_grammar
from deepinfer_jax.sampling.grammar.debug import MaskLog
from deepinfer_jax.sampling.grammar.errors import GrammarError, GrammarTimeout
from deepinfer_jax.sampling.grammar.jobs import MaskJob, MaskJobs
from deepinfer_jax.sampling.grammar.matcher import Matcher, fill_mask
from deepinfer_jax.sampling.grammar.pool import GrammarPool, GrammarTicket
from deepinfer_jax.sampling.grammar.request import GrammarRequest, parse_so_args
from deepinfer_jax.sampling.grammar.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "DEFAULT_WHITESPACE",
    "Grammar",
    "GrammarError",
    "GrammarPool",
    "GrammarRequest",
    "GrammarTicket",
    "GrammarTimeout",
    "MaskJob",
    "MaskJobs",
    "MaskLog",
    "Matcher",
    "Vocabulary",
    "check_ids",
    "compile_grammar",
    "fill_mask",
    "parse_so_args",
    "vocabulary_of",
]
