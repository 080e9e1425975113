"""Token sequences that may not appear in an output: which next tokens would complete one (host side, no JAX)."""

from collections import deque
from collections.abc import Iterable, Sequence

from deepinfer_jax.text.tokenizer import Tokenizer

ROOT = 0  # the state in which no sequence has begun


def bad_sequences_of(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words, each as given and with a space in front.

    A word that begins with a space is taken as given only. Other ways to cut a word into tokens are not found.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word,) if word.startswith(" ") else (word, " " + word):
            ids = tuple(tokenizer.encode_bare(text))
            if not ids:
                raise ValueError(f"bad_words has {word!r}, which has no tokens; leave it out")
            sequences[ids] = None
    return tuple(sequences)


class SequenceBan:
    """Finds, token by token, what would complete one of the sequences (Aho and Corasick 1975). Immutable.

    A state is a number: the longest proper prefix of a sequence that the tokens so far end with.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        completing: list[set[int]] = [set()]
        for sequence in sequences:
            if not sequence:
                raise ValueError("bad_sequences has an empty sequence; leave it out")
            state = ROOT
            for token_id in sequence[:-1]:
                if token_id not in self._next[state]:
                    self._next[state][token_id] = len(self._next)
                    self._next.append({})
                    completing.append(set())
                state = self._next[state][token_id]
            completing[state].add(sequence[-1])
        self._fallback = [ROOT] * len(self._next)  # state of the longest proper suffix
        waiting = deque(self._next[ROOT].values())
        while waiting:
            state = waiting.popleft()
            for token_id, longer in self._next[state].items():
                self._fallback[longer] = self.step(self._fallback[state], token_id)
                waiting.append(longer)
            completing[state] |= completing[self._fallback[state]]  # shorter, so already whole
        self.always = tuple(sorted(completing[ROOT]))  # sequences of one token
        self._completing = [tuple(sorted(ids - completing[ROOT])) for ids in completing]

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token; takes at most as many steps as a sequence is long."""
        while state != ROOT and token_id not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(token_id, ROOT)

    def completing(self, state: int) -> tuple[int, ...]:
        """The tokens that would complete a sequence of two tokens or more."""
        return self._completing[state]
