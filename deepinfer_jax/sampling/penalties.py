"""Changes of single logits that depend on the tokens so far: penalties and biases (host side, no JAX)."""

import copy
from collections.abc import Sequence

import numpy as np

from deepinfer_jax.sampling.params import SamplingParams

EditArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # ids int32; up, down, add float32


class Penalties:
    """The edits of one request: for each token logit' = (logit > 0 ? logit * up : logit * down) + add.

    repetition_penalty r (tokens of prompt and output): up = 1/r, down = r.
    logit_bias b, presence p and frequency f (c times in the output): add = b - (p if c > 0) - f c.
    All are computed in float64 and rounded once to float32.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._presence, self._frequency = float(params.presence_penalty), float(params.frequency_penalty)
        self._repetition = float(params.repetition_penalty)
        self._bias = dict(params.bias_pairs)
        self._prompt = frozenset(prompt) if self._repetition != 1 else frozenset()
        # Slots of biased and prompt tokens stay; the others come and go with the output, the last one first.
        pinned = list(dict.fromkeys([*self._bias, *(prompt if self._prompt else ())]))
        self._slots = {token_id: slot for slot, token_id in enumerate(pinned)}
        self._num_pinned = len(pinned)
        self._counts = [0] * len(pinned)  # in the output
        self._ids, self._factors, self._add = _blank(max(len(pinned), 16))
        self._ids[: len(pinned)] = pinned
        for token_id in self._bias:
            self._write(token_id)
        self._factors[:, len(self._bias) : len(pinned)] = self._repeated  # only a repetition penalty pins more

    @property
    def depends_on_output(self) -> bool:
        """Whether a token of the output changes any logit."""
        return self._repetition != 1 or self._presence != 0 or self._frequency != 0

    @property
    def size(self) -> int:
        """Number of edited tokens."""
        return len(self._slots)

    def advance(self, token_id: int) -> None:
        """Takes one more output token."""
        if not self.depends_on_output:
            return
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._counts):
            self._counts.append(0)
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token_id
        self._counts[slot] += 1
        self._write(token_id)

    def take_back(self, token_id: int) -> None:
        """Undoes `advance` of the last output token."""
        if not self.depends_on_output:
            return
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] == 0 and slot >= self._num_pinned:
            del self._slots[token_id]
            self._counts.pop()
        else:
            self._write(token_id)

    def fork(self) -> "Penalties":
        """An independent copy."""
        twin = copy.copy(self)
        twin._slots, twin._counts = dict(self._slots), list(self._counts)
        twin._ids, twin._factors, twin._add = self._ids.copy(), self._factors.copy(), self._add.copy()
        return twin

    def arrays(self) -> EditArrays:
        """Ids (each once), up, down and add; views that hold until the next change."""
        size = self.size
        views = self._ids[:size], self._factors[0, :size], self._factors[1, :size], self._add[:size]
        for view in views:
            view.flags.writeable = False
        return views

    @property
    def _repeated(self) -> np.ndarray:
        """Factors of a repeated token, up then down."""
        return np.array([[1 / self._repetition], [self._repetition]], np.float32)

    def _write(self, token_id: int) -> None:
        slot = self._slots[token_id]
        count = self._counts[slot]
        is_repeated = self._repetition != 1 and (count > 0 or token_id in self._prompt)
        self._factors[:, slot] = (1 / self._repetition, self._repetition) if is_repeated else 1.0
        presence = self._presence if count else 0.0
        self._add[slot] = self._bias.get(token_id, 0.0) - presence - self._frequency * count

    def _grow(self) -> None:
        ids, factors, add = _blank(2 * len(self._ids))
        ids[: len(self._ids)], factors[:, : len(self._ids)], add[: len(self._ids)] = self._ids, self._factors, self._add
        self._ids, self._factors, self._add = ids, factors, add


def _blank(room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(room, np.int32), np.ones((2, room), np.float32), np.zeros(room, np.float32)
