"""The sizes that steps are padded to: few, so that little is compiled, and close enough, so that little is wasted."""

import dataclasses
import itertools

LOGIT_ROWS = 8  # prompts that may end in one prefill step
FIRST_PAGES = 16  # page table columns of the narrowest step
GROWTH = 4  # from one size to the next
FIRST_PREFILL_ROWS = 64
# A CPU computes rows in tiles one after the other, so that more rows in a step only wait longer.
MAX_CPU_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The sizes of one compiled step."""

    num_rows: int
    num_logits: int
    num_pages: int  # columns of the page table
    num_tail: int | None = None  # rows that run the decoder layers under compact replay, None where all do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The allowed sizes, each ascending. A prefill step of the first size is a decode step of the first size."""

    prefill_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]  # logit rows are as many
    pages: tuple[int, ...]

    @property
    def first(self) -> StepShape:
        """The smallest step."""
        return StepShape(self.decode_rows[0], self.decode_rows[0], self.pages[0])

    def shape_of(
        self, num_rows: int, num_pages: int, *, is_prefill: bool, num_tail_rows: int | None = None
    ) -> StepShape:
        """The smallest step with room for these rows and pages, and for the tail rows where fewer than all run."""
        rows = _smallest(self.prefill_rows if is_prefill else self.decode_rows, num_rows)
        tail = None if num_tail_rows is None else _smallest((0, *self.prefill_rows), num_tail_rows)
        logits = LOGIT_ROWS if is_prefill else rows
        return StepShape(rows, logits, _smallest(self.pages, num_pages), None if tail == rows else tail)


def make_buckets(*, max_prefill_rows: int, num_slots: int, max_pages: int) -> Buckets:
    """Sizes up to these limits, which need not be sizes themselves."""
    return Buckets(
        prefill_rows=(LOGIT_ROWS, *_ladder(FIRST_PREFILL_ROWS, max_prefill_rows, multiple=LOGIT_ROWS))
        if max_prefill_rows > LOGIT_ROWS
        else (LOGIT_ROWS,),
        decode_rows=_ladder(LOGIT_ROWS, num_slots, multiple=LOGIT_ROWS),
        pages=_ladder(FIRST_PAGES, max_pages, multiple=1),
    )


def prefill_limit(max_num_batched_tokens: int, *, is_chunked: bool, target: str) -> int:
    """Rows of the largest prefill step."""
    if is_chunked and target == "cpu":
        return min(max_num_batched_tokens, MAX_CPU_CHUNK)
    return max_num_batched_tokens


def _ladder(first: int, limit: int, *, multiple: int) -> tuple[int, ...]:
    """first, first * 4, ... below `limit`, and `limit` rounded up."""
    last = -(-limit // multiple) * multiple
    below = itertools.takewhile(lambda size: size < last, (first * GROWTH**i for i in itertools.count()))
    return (*below, last)


def _smallest(sizes: tuple[int, ...], needed: int) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise AssertionError(f"{needed} is above the largest size {sizes[-1]}")
