import dataclasses
import threading
import time

import pytest

from deepinfer_jax.sampling.grammar import GrammarPool, GrammarTimeout, compile_grammar, parse_so_args

WAIT_S = 60.0


def regex(pattern: str, **more):
    return parse_so_args({"schema_type": "regex", "schema": pattern, **more})


def make_pool(tools, **options):
    return GrammarPool(tools.vocabulary, **options)


class Gate:
    """A compiler that waits for the event of its schema, if there is one, and counts its calls."""

    def __init__(self, *schemas: str) -> None:
        self.events = {schema: threading.Event() for schema in schemas}
        self.calls: list[str] = []

    def __call__(self, request, vocabulary, *, whitespace):
        self.calls.append(request.schema)
        if request.schema in self.events:
            self.events[request.schema].wait(WAIT_S)
        return compile_grammar(request, vocabulary, whitespace=whitespace)


def test_compiles_beside_the_caller(tools):
    gate = Gate("a")
    with make_pool(tools, compiler=gate) as pool:
        ticket = pool.submit(regex("a"))
        assert not ticket.done()
        with pytest.raises(TimeoutError, match="not ready after 0.01 s"):
            ticket.result(0.01)
        gate.events["a"].set()
        assert tools.texts(ticket.result(WAIT_S).matcher()) == {b"a"}
        assert ticket.done()


def test_a_refusal_reaches_the_caller(tools):
    with make_pool(tools) as pool:
        ticket = pool.submit(regex("a{2,1}"))
        with pytest.raises(ValueError, match="wrong order"):
            ticket.result(WAIT_S)
        assert tools.texts(pool.submit(regex("a")).result(WAIT_S).matcher()) == {b"a"}


def test_late_compilations_fail_and_others_go_on(tools):
    gate = Gate("slow", "slower")
    with make_pool(tools, cpus=1, timeout_s=0.2, compiler=gate) as pool:
        tickets = [pool.submit(regex(pattern)) for pattern in ("slow", "slower", "a")]
        for ticket in tickets[:2]:
            with pytest.raises(
                GrammarTimeout, match="within 0.2 s; make it simpler or raise DEEPINFER_XGRAMMAR_TIMEOUT"
            ):
                ticket.result(WAIT_S)
        assert tools.texts(tickets[2].result(WAIT_S).matcher()) == {b"a"}
        assert pool.num_abandoned == 2
        for event in gate.events.values():
            event.set()  # the abandoned threads end, and what they made changes nothing
        with pytest.raises(GrammarTimeout):
            tickets[0].result(WAIT_S)


def test_no_more_threads_than_cores_or_wanted(tools):
    with make_pool(tools, cpus=1) as one, make_pool(tools, cpus=1000) as many:
        assert one.num_threads == 1
        assert 1 <= many.num_threads < 1000


def test_the_cache_serves_equal_schemas(tools):
    gate = Gate()
    with make_pool(tools, compiler=gate) as pool:
        first = pool.submit(regex("a")).result(WAIT_S)
        ticket = pool.submit(regex("a", trigger_token_ids=[5]))
        assert ticket.done()
        assert not ticket.result().matcher().needs_mask and first.matcher().needs_mask
        assert gate.calls == ["a"]
        with pytest.raises(ValueError, match="holds 9999"):
            pool.submit(regex("a", trigger_token_ids=[9999])).result(WAIT_S)


def test_the_cache_drops_what_was_used_least_recently(tools):
    gate = Gate()
    sizes = [compile_grammar(regex(pattern), tools.vocabulary).size_bytes for pattern in "abc"]
    with make_pool(tools, cpus=1, compiler=gate, cache_bytes=sizes[0] + sizes[1]) as pool:
        for pattern in "abacab":
            pool.submit(regex(pattern)).result(WAIT_S)
        assert gate.calls == ["a", "b", "c", "b"]


@pytest.mark.parametrize("cache_bytes, calls", [(None, 2), (1, 2), (0, 1), (-1, 1)])
def test_cache_sizes(tools, cache_bytes, calls):
    gate = Gate()
    with make_pool(tools, compiler=gate, cache_bytes=cache_bytes) as pool:
        for _ in range(2):
            pool.submit(regex("a")).result(WAIT_S)
    assert len(gate.calls) == calls


def test_many_requests_from_several_threads(tools):
    with make_pool(tools, cpus=3) as pool:
        tickets = []

        def submit(start: int) -> None:
            tickets.extend((n, pool.submit(regex(f"x{n}"))) for n in range(start, start + 20))

        threads = [threading.Thread(target=submit, args=(10 * k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, ticket in tickets:
            assert tools.accepts(ticket.result(WAIT_S), f"x{number}")


def test_a_closed_pool_ends_its_threads(tools):
    before = threading.active_count()
    pool = make_pool(tools, cpus=2)
    ticket = pool.submit(regex("a"))
    pool.close()
    pool.close()
    ticket.result(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(regex("b"))
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "options, text",
    [({"cpus": 0}, "cpus=0 must be 1 or more"), ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0")],
)
def test_refused_options(tools, options, text):
    with pytest.raises(ValueError, match=text):
        make_pool(tools, **options)


def test_white_space_of_the_pool(tools):
    request = parse_so_args({"schema_type": "json", "schema": {"type": "object"}})
    with make_pool(tools, whitespace=2) as pool:
        assert tools.texts(tools.force(pool.submit(request).result(WAIT_S), "{  ")) == {b'"', b'":', b"}"}


def test_hard_patterns_end_within_the_limit(tools):
    hard = ["(x+x+)+y", "(a?){500}a{500}", "(a|b)*a(a|b){18}", "(" * 40 + "a" + ")*" * 40]
    with make_pool(tools, timeout_s=20.0) as pool:
        for ticket in [pool.submit(regex(pattern)) for pattern in hard]:
            ticket.result(WAIT_S).matcher().mask()
        assert pool.num_abandoned == 0


def test_requests_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        regex("a").schema = "b"  # pyright: ignore[reportAttributeAccessIssue]
