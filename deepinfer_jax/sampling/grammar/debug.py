"""What `DEEPINFER_XGRAMMAR_DEBUG` tells: each compiled grammar, and how long the masks of each request took."""

import dataclasses
import logging
import weakref

from deepinfer_jax.sampling.grammar.compile import Grammar

_log = logging.getLogger(__name__)


def tell_compiled(grammar: Grammar, seconds: float) -> None:
    """Logs what the backend was given."""
    _log.info("%s grammar, compiled in %.1f ms: %s", grammar.request.schema_type, 1e3 * seconds, grammar.text)


@dataclasses.dataclass
class _Times:
    name: str
    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0


class MaskLog:
    """Mask times of one request. They are logged when nobody holds the request any more: at its end."""

    def __init__(self, name: str) -> None:
        """name: of the request, for the log."""
        self._times = _Times(name)
        weakref.finalize(self, _tell, self._times).atexit = False

    def took(self, seconds: float) -> None:
        """Counts one mask."""
        times = self._times
        times.count, times.total_s, times.max_s = times.count + 1, times.total_s + seconds, max(times.max_s, seconds)

    def fork(self) -> "MaskLog":
        """An empty log for a fork of the request."""
        return MaskLog(f"a fork of {self._times.name}")


def _tell(times: _Times) -> None:
    mean_ms, max_ms = 1e3 * times.total_s / max(times.count, 1), 1e3 * times.max_s
    _log.info("grammar of %s: %d masks, mean %.3f ms, longest %.3f ms", times.name, times.count, mean_ms, max_ms)
