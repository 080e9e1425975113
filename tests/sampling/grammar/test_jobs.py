"""Masks made beside a step loop: slow ones keep nobody waiting, late and dropped ones harm nobody."""

import itertools
import string
import threading
import time

import numpy as np
import pytest

from deepinfer_jax.sampling import constraints
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import (
    GrammarError,
    MaskJobs,
    Vocabulary,
    compile_grammar,
    fill_mask,
    parse_so_args,
)
from deepinfer_jax.sampling.params import SamplingParams

WAIT_S = 60.0
WORDS = 9
BLANK = 0x55555555
AMBIGUOUS = 'root ::= [a-z]+ root [a-z]+ | "x"'


class Source:
    """A mask of a number, which waits until it is released."""

    def __init__(self, number: int, *, is_released: bool = False, error: BaseException | None = None) -> None:
        self.number, self.error = number, error
        self.begun, self.released = threading.Event(), threading.Event()
        self.num_masks = 0
        if is_released:
            self.released.set()

    def fill_mask(self, row: np.ndarray) -> None:
        self.num_masks += 1
        row[: WORDS // 2] = self.number
        self.begun.set()
        assert self.released.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        row[WORDS // 2 :] = self.number


@pytest.fixture
def slow():
    """Sources that are released at the end at the latest."""
    sources = [Source(100 + rank) for rank in range(4)]
    yield sources
    for source in sources:
        source.released.set()


@pytest.fixture
def make_jobs():
    made = []

    def make(**options) -> MaskJobs:
        made.append(MaskJobs(**options))
        return made[-1]

    yield make
    for jobs in made:
        jobs.close()


def rows(count: int) -> np.ndarray:
    return np.full((count, WORDS), BLANK, np.uint32)


class Threads:
    """The threads that have begun since this was made."""

    def __init__(self) -> None:
        self.before = set(threading.enumerate())

    def count(self) -> int:
        return len(set(threading.enumerate()) - self.before)

    def come_down_to(self, number: int) -> bool:
        deadline = time.monotonic() + WAIT_S
        while self.count() > number and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.count() == number


def test_each_mask_goes_to_its_own_row(make_jobs):
    jobs, masks = make_jobs(), rows(40)
    started = [jobs.start(Source(rank, is_released=True), row) for rank, row in enumerate(masks)]
    assert all(job.wait(WAIT_S) for job in started)
    np.testing.assert_array_equal(masks, np.arange(40)[:, None].repeat(WORDS, axis=1))


def test_slow_masks_keep_no_other_row_waiting(make_jobs, slow):
    jobs, masks = make_jobs(num_threads=1), rows(5)
    late = [jobs.start(source, row) for source, row in zip(slow, masks, strict=False)]
    assert jobs.start(Source(7, is_released=True), masks[4]).wait(WAIT_S)
    assert (masks[4] == 7).all() and (masks[:4] == BLANK).all()
    assert [job.wait(0.0) for job in late] == [False] * 4
    for source in slow:
        source.released.set()
    assert all(job.wait(WAIT_S) for job in late)
    assert masks[:4, -1].tolist() == [100, 101, 102, 103]


def test_threads_of_slow_masks_end_with_them(make_jobs, slow):
    threads, jobs = Threads(), make_jobs(num_threads=1)
    late = [jobs.start(source, row) for source, row in zip(slow, rows(4), strict=True)]
    assert jobs.start(Source(1, is_released=True), rows(1)[0]).wait(WAIT_S)
    assert threads.count() == 5
    for source in slow:
        source.released.set()
    assert all(job.wait(WAIT_S) for job in late)
    assert threads.come_down_to(1), "one thread waits for the next mask"
    jobs.close()
    assert threads.come_down_to(0)


def test_waiting_says_false_in_time_and_leaves_the_row(make_jobs, slow):
    [row] = rows(1)
    job = make_jobs().start(slow[0], row)
    assert slow[0].begun.wait(WAIT_S)
    start = time.monotonic()
    assert not job.wait(0.1) and not job.is_done
    assert 0.1 <= time.monotonic() - start < WAIT_S / 2
    assert (row == BLANK).all(), "half a mask"
    slow[0].released.set()
    assert job.wait(WAIT_S) and job.is_done and (row == 100).all()
    row[:] = 1
    assert job.wait(0.0) and (row == 100).all(), "asked again, it is written again"


def test_a_mask_that_takes_too_long_fails_and_what_it_makes_is_dropped(make_jobs, slow):
    jobs, [row] = make_jobs(num_threads=1, timeout_s=0.1), rows(1)
    job = jobs.start(slow[0], row)
    for _ in range(2):
        with pytest.raises(GrammarError, match="not ready within 0.1 s.*raise DEEPINFER_XGRAMMAR_TIMEOUT"):
            job.wait(WAIT_S)
        slow[0].released.set()
        assert jobs.start(Source(5, is_released=True), rows(1)[0]).wait(WAIT_S)
    assert (row == BLANK).all()


@pytest.mark.parametrize("error", [GrammarError("out of fuel"), ValueError("a wrong row"), SystemExit("interrupted")])
def test_what_making_a_mask_raises_reaches_whoever_waits(make_jobs, error):
    jobs, [row, other] = make_jobs(num_threads=1), rows(2)
    job = jobs.start(Source(3, is_released=True, error=error), row)
    with pytest.raises(type(error), match=str(error)) as caught:
        job.wait(WAIT_S)
    assert caught.value is error and (row == BLANK).all()
    assert jobs.start(Source(4, is_released=True), other).wait(WAIT_S), "the thread goes on"


def test_a_cancelled_mask_that_has_begun_is_dropped(make_jobs, slow):
    jobs, [row] = make_jobs(num_threads=1), rows(1)
    job = jobs.start(slow[0], row)
    assert slow[0].begun.wait(WAIT_S)
    job.cancel()
    slow[0].released.set()
    assert jobs.start(Source(5, is_released=True), rows(1)[0]).wait(WAIT_S)
    with pytest.raises(GrammarError, match="was cancelled"):
        job.wait(WAIT_S)
    assert (row == BLANK).all()


def test_a_cancelled_mask_that_waits_for_a_thread_never_begins(make_jobs, slow):
    jobs = make_jobs(num_threads=1)
    first = jobs.start(slow[0], rows(1)[0])
    waiting = jobs.start(slow[1], rows(1)[0])
    waiting.cancel()
    slow[0].released.set()
    assert first.wait(WAIT_S)
    assert jobs.start(Source(5, is_released=True), rows(1)[0]).wait(WAIT_S)
    assert slow[1].num_masks == 0


def test_a_cancelled_mask_that_is_ready_stays_as_it_is(make_jobs):
    [row] = rows(1)
    job = make_jobs().start(Source(5, is_released=True), row)
    assert job.wait(WAIT_S)
    job.cancel()
    assert job.wait(0.0) and (row == 5).all()


def test_no_threads_before_the_first_mask_and_none_after_the_end(make_jobs):
    threads, jobs = Threads(), make_jobs(num_threads=2)
    assert threads.count() == 0
    job = jobs.start(Source(5, is_released=True), rows(1)[0])
    jobs.close()
    jobs.close()
    assert job.wait(WAIT_S), "what was started is made"
    with pytest.raises(RuntimeError, match="these mask jobs are closed; make new ones"):
        jobs.start(Source(5), rows(1)[0])
    assert threads.come_down_to(0)


def test_no_more_threads_than_cores_or_wanted(make_jobs):
    assert make_jobs(num_threads=1).num_threads == 1
    assert 1 <= make_jobs(num_threads=1000).num_threads < 1000


@pytest.mark.parametrize(
    "options, text",
    [({"num_threads": 0}, "num_threads=0 must be 1 or more"), ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0")],
)
def test_refused_options(options, text):
    with pytest.raises(ValueError, match=text):
        MaskJobs(**options)


# Draw states as sources.


def state_of(tools, text: str = "", **options) -> DrawState:
    grammar = tools.compile(*options.pop("grammar", ("ebnf", AMBIGUOUS)))
    state = DrawState(
        SamplingParams(**options),
        prompt=[5],
        eos_id=tools.eos,
        vocab_size=tools.vocabulary.vocab_size,
        matcher=grammar.matcher(),
    )
    state.replay(tools.ids(text))
    return state


def mask_of(state: DrawState, tools) -> np.ndarray:
    row = np.empty(tools.vocabulary.mask_words, np.uint32)
    state.fill_mask(row)
    return row


def test_a_job_makes_the_mask_that_the_state_makes(tools, make_jobs):
    jobs = make_jobs()
    for dtype in (np.uint32, np.int32):
        row = np.zeros(tools.vocabulary.mask_words, dtype)
        assert jobs.start(state_of(tools, "ab", min_tokens=3), row).wait(WAIT_S)
        np.testing.assert_array_equal(row.view(np.uint32), mask_of(state_of(tools, "ab", min_tokens=3), tools))
    with pytest.raises(ValueError, match="give one contiguous row"):
        jobs.start(state_of(tools), np.zeros(3, np.uint32)).wait(WAIT_S)


@pytest.mark.parametrize("grammar", [("ebnf", AMBIGUOUS), ("regex", "[a-z]{3,9}")], ids=["own", "shared"])
def test_whoever_uses_a_state_waits_for_its_mask(tools, make_jobs, monkeypatch, grammar):
    state = state_of(tools, "ab", grammar=grammar)
    want = {text: mask_of(state_of(tools, text, grammar=grammar), tools) for text in ("a", "ab", "abc")}
    begun, released, forks = threading.Event(), threading.Event(), []

    def held(matcher, row: np.ndarray) -> None:
        begun.set()
        assert released.wait(WAIT_S)
        fill_mask(matcher, row)

    def use() -> None:
        forks.append(state.fork())
        state.advance(*tools.ids("c"))

    monkeypatch.setattr(constraints, "fill_grammar_mask", held)
    row = np.zeros(tools.vocabulary.mask_words, np.uint32)
    job, user = make_jobs().start(state, row), threading.Thread(target=use)
    assert begun.wait(WAIT_S)
    user.start()
    user.join(0.05)
    assert user.is_alive() and not forks
    released.set()
    user.join(WAIT_S)
    assert job.wait(WAIT_S)
    np.testing.assert_array_equal(row, want["ab"])
    np.testing.assert_array_equal(mask_of(state, tools), want["abc"])
    forks[0].rollback(1)
    np.testing.assert_array_equal(mask_of(forks[0], tools), want["a"])


class Walk:
    """A source that goes on with its state and comes back, as a row of drafts is checked."""

    def __init__(self, state: DrawState, token_id: int) -> None:
        self.state, self.token_id = state, token_id
        self.begun, self.released = threading.Event(), threading.Event()

    def fill_mask(self, row: np.ndarray) -> None:
        with self.state.alone():
            self.state.advance(self.token_id)
            self.begun.set()
            assert self.released.wait(WAIT_S)
            self.state.fill_mask(row)
            self.state.rollback(1)


def test_nobody_sees_a_state_in_the_middle_of_a_walk(tools, make_jobs):
    state, forks = state_of(tools, "ab"), []
    walk, row = Walk(state, *tools.ids("c")), np.zeros(tools.vocabulary.mask_words, np.uint32)
    job = make_jobs().start(walk, row)
    assert walk.begun.wait(WAIT_S)
    user = threading.Thread(target=lambda: forks.append(state.fork()))
    user.start()
    user.join(0.05)
    assert user.is_alive()
    walk.released.set()
    user.join(WAIT_S)
    assert job.wait(WAIT_S)
    assert [forks[0].num_output, state.num_output] == [2, 2]
    np.testing.assert_array_equal(row, mask_of(state_of(tools, "abc"), tools))


def test_only_grammars_with_recursion_may_be_slow(tools):
    assert state_of(tools).may_be_slow
    assert not state_of(tools, grammar=("ebnf", 'root ::= ("a" | "b")* "x"')).may_be_slow
    assert not state_of(tools, grammar=("regex", "(a|b)*")).may_be_slow
    assert not state_of(tools, grammar=("json", {"type": "object"})).may_be_slow
    ended_state = state_of(tools, "x")
    ended_state.advance(tools.eos)
    assert not ended_state.may_be_slow


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    """So many tokens that a mask of an ambiguous grammar takes long: all words of three letters."""
    words = ("".join(letters).encode() for letters in itertools.product(string.ascii_lowercase, repeat=3))
    tokens = (b"<bos>", b"<eos>", b"<pad>", *(bytes([byte]) for byte in range(256)), *words)
    return Vocabulary(token_bytes=tokens, blocked_ids=frozenset({0, 1, 2}), eos_id=1, vocab_size=len(tokens))


@pytest.mark.parametrize("other", ["new", "fork"])
def test_a_slow_mask_holds_up_no_request_of_the_same_grammar(tools, words, other):
    """Copies of one matcher of the backend would wait for each other, with the interpreter lock held."""
    grammar = compile_grammar(parse_so_args({"schema_type": "ebnf", "schema": AMBIGUOUS}), words)
    slow = tools.force(grammar, "a" * 120)
    beside = grammar.matcher() if other == "new" else slow.fork()
    thread, times = threading.Thread(target=slow.mask), [time.perf_counter()]
    thread.start()
    time.sleep(0.05)  # let it begin
    beside.advance(*tools.ids("b"))
    beside.rollback(1)
    times.append(time.perf_counter())
    thread.join()
    times.append(time.perf_counter())
    assert times[1] - times[0] < times[2] - times[1], "they do not wait for the mask"
