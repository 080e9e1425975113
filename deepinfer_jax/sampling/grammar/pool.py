"""Grammars compiled beside the engine: a few threads, a time limit for each, and a cache of the results.

The backend gives the interpreter lock back while it compiles, but a call into it cannot be
interrupted. A compilation that exceeds its limit is therefore abandoned: its ticket fails at once, a
new thread takes the place of its thread, and that thread ends when the call returns.
"""

import collections
import os
import queue
import threading
import time
from collections.abc import Callable

from deepinfer_jax.sampling.grammar.compile import DEFAULT_WHITESPACE, Grammar, check_ids, compile_grammar
from deepinfer_jax.sampling.grammar.debug import tell_compiled
from deepinfer_jax.sampling.grammar.errors import GrammarTimeout
from deepinfer_jax.sampling.grammar.request import GrammarRequest
from deepinfer_jax.sampling.grammar.vocabulary import Vocabulary

_CacheKey = tuple[str, str, int]  # schema type, schema, whitespace


class GrammarTicket:
    """A grammar that is being compiled."""

    def __init__(self, request: GrammarRequest) -> None:
        self.request = request
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._grammar: Grammar | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True when `result` returns or raises at once."""
        return self._ready.is_set()

    def result(self, timeout_s: float | None = None) -> Grammar:
        """The grammar; raises what the compilation raised, or GrammarTimeout.

        Waits until the compilation ends, or at most `timeout_s`, after which TimeoutError is raised and
        the compilation goes on.
        """
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"the grammar is not ready after {timeout_s} s; ask again later")
        if self._error is not None:
            raise self._error
        assert self._grammar is not None, "a ticket ends with a grammar or an error"
        return self._grammar

    def settle(self, grammar: Grammar | None, error: BaseException | None = None) -> bool:
        """Ends the ticket; False when it had ended before, which then stands."""
        with self._lock:
            if self._ready.is_set():
                return False
            self._grammar, self._error = grammar, error
            self._ready.set()
            return True


class GrammarPool:
    """Compiles grammars on threads of its own and remembers them.

    cpus: threads wanted; there are never more than the cores of this process.
    timeout_s: limit of one compilation, counted from its start.
    cache_bytes: memory of the cache; 0 or less is unlimited, None is no cache.
    is_verbose: whether each compiled grammar is logged.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cpus: int = 4,
        timeout_s: float = 20.0,
        cache_bytes: int | None = 10 * 2**30,
        whitespace: int = DEFAULT_WHITESPACE,
        is_verbose: bool = False,
        compiler: Callable[..., Grammar] = compile_grammar,
    ) -> None:
        if cpus < 1:
            raise ValueError(f"cpus={cpus} must be 1 or more; correct DEEPINFER_SO_BUILDER_CPUS")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0; correct DEEPINFER_XGRAMMAR_TIMEOUT")
        self.num_threads = min(cpus, len(os.sched_getaffinity(0)))
        self.num_abandoned = 0  # threads that were given up since the start
        _ = vocabulary.backend  # built here once, not in the time of the first requests
        self._vocabulary, self._whitespace, self._compiler = vocabulary, whitespace, compiler
        self._timeout_s, self._is_verbose = timeout_s, is_verbose
        self._cache = None if cache_bytes is None else _Cache(cache_bytes)
        self._queue: queue.SimpleQueue[GrammarTicket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        for _ in range(self.num_threads):
            self._start_thread()

    def submit(self, request: GrammarRequest) -> GrammarTicket:
        """Starts the compilation of a request's grammar, or takes it from the cache."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the grammar pool is closed; make a new one")
        ticket = GrammarTicket(request)
        found = self._cache.get(self._key(request)) if self._cache else None
        if found is None:
            self._queue.put(ticket)
        else:
            _settle_with(ticket, lambda: found.for_request(request))
        return ticket

    def close(self) -> None:
        """Lets the threads end after what is queued; later submissions are refused."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self.num_threads):
                    self._queue.put(None)

    def __enter__(self) -> "GrammarPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, request: GrammarRequest) -> _CacheKey:
        return request.schema_type, request.schema, self._whitespace

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="grammar-builder", daemon=True).start()

    def _work(self) -> None:
        while (ticket := self._queue.get()) is not None:
            timer = threading.Timer(self._timeout_s, self._abandon, [ticket])
            timer.daemon = True
            timer.start()
            is_mine = _settle_with(ticket, lambda ticket=ticket: self._compile(ticket.request))
            timer.cancel()
            if not is_mine:
                return  # another thread has this one's place

    def _compile(self, request: GrammarRequest) -> Grammar:
        check_ids(request, self._vocabulary.vocab_size)
        found = self._cache.get(self._key(request)) if self._cache else None
        if found is not None:
            return found.for_request(request)
        start = time.perf_counter()
        grammar = self._compiler(request, self._vocabulary, whitespace=self._whitespace)
        if self._is_verbose:
            tell_compiled(grammar, time.perf_counter() - start)
        if self._cache:
            self._cache.put(self._key(request), grammar)
        return grammar

    def _abandon(self, ticket: GrammarTicket) -> None:
        error = GrammarTimeout(
            f"the grammar was not compiled within {self._timeout_s:g} s; "
            "make it simpler or raise DEEPINFER_XGRAMMAR_TIMEOUT"
        )
        if ticket.settle(None, error):
            with self._lock:
                self.num_abandoned += 1
            self._start_thread()


def _settle_with(ticket: GrammarTicket, build: Callable[[], Grammar]) -> bool:
    """Ends a ticket with what `build` returns or raises; False when it had ended before."""
    try:
        grammar = build()
    except BaseException as error:  # noqa: BLE001 (handed to whoever asks for the result)
        return ticket.settle(None, error)
    return ticket.settle(grammar)


class _Cache:
    """Grammars in the order of their last use, oldest out first; safe for several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._grammars: collections.OrderedDict[_CacheKey, Grammar] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._grammars)

    def __bool__(self) -> bool:
        return True

    def get(self, key: _CacheKey) -> Grammar | None:
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
            return found

    def put(self, key: _CacheKey, grammar: Grammar) -> None:
        with self._lock:
            replaced = self._grammars.pop(key, None)
            self._num_bytes += grammar.size_bytes - (replaced.size_bytes if replaced else 0)
            self._grammars[key] = grammar
            while self._limit_bytes > 0 and self._num_bytes > self._limit_bytes and self._grammars:
                self._num_bytes -= self._grammars.popitem(last=False)[1].size_bytes
