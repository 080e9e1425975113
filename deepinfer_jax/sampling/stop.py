"""Stop strings in a text that comes in pieces."""

import copy

from deepinfer_jax.sampling.params import SamplingParams


class StopWatch:
    """Finds the first stop string of one answer and lets out the text before it.

    First is the string that ends first; of several that end there, the longest. So neither the text nor the end
    depends on how the text is cut into pieces. What may be the beginning of a stop string is held back.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop_strings
        self._longest = max(map(len, self._stops), default=0)
        self._keeps_stop = params.include_stop_str_in_output
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the answer."""
        return self._found

    def push(self, text_delta: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the text to emit now, and whether a stop string has ended the answer.

        may_stop=False (before min_tokens) lets the piece pass unread; stop strings begin after it.
        """
        if self._found is not None:
            return "", True
        text = self._held + text_delta
        if not may_stop:
            self._held = ""
            return text, False
        hit = self._first(text, len(self._held))
        if hit is not None:
            start, self._found = hit
            self._held = ""
            return text[: start + len(self._found)] if self._keeps_stop else text[:start], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Returns the text still held back, when the answer ends in another way."""
        text, self._held = self._held, ""
        return text

    def fork(self) -> "StopWatch":
        """An independent copy."""
        return copy.copy(self)

    def _first(self, text: str, num_read: int) -> tuple[int, str] | None:
        """Start and string of the first hit that ends after the `num_read` characters already searched."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(num_read - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = start + len(stop), start, stop
        return None if best is None else best[1:]

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
