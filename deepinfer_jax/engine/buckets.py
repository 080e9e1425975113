"""The sizes that steps are padded to: few, so that little is compiled, and close enough, so that little is wasted."""

import dataclasses
import itertools

TILE = 8  # sizes are multiples of it
PREFILL_LOGIT_ROWS = 8  # prompts that may end in one prefill step, where that is a size of its own
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
    num_tail: int | None = None  # room for the rows that run the decoder layers under compact replay; None: all rows

    @property
    def name(self) -> str:
        """The shape in one word, for statistics."""
        tail = "" if self.num_tail is None else f"-tail{self.num_tail}"
        return f"rows{self.num_rows}-logits{self.num_logits}-pages{self.num_pages}{tail}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The allowed sizes, each ascending.

    skips_padding: padding rows are not computed, so that one size serves prefill and decode steps alike.
    """

    prefill_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    pages: tuple[int, ...]
    skips_padding: bool

    @property
    def prefill_logits(self) -> int:
        """Logit rows of a prefill step."""
        return self.decode_rows[-1] if self.skips_padding else PREFILL_LOGIT_ROWS

    @property
    def first(self) -> StepShape:
        """The smallest decode step."""
        return self.shape_of(1, 1, is_prefill=False)

    def shape_of(
        self,
        num_rows: int,
        num_pages: int,
        *,
        is_prefill: bool,
        num_logits: int = 0,
        num_tail_rows: int | None = None,
    ) -> StepShape:
        """The smallest step with room for these rows, logit rows and pages, and for the tail where it is not all."""
        rows = _smallest(self.prefill_rows if is_prefill else self.decode_rows, num_rows)
        pages = _smallest(self.pages, num_pages)
        tail = None
        if num_tail_rows is not None and num_tail_rows < num_rows:
            tail = _smallest(self._tails(rows), num_tail_rows)
            tail = None if tail == rows and not self.skips_padding else tail
        logits = self._logits_of(rows, is_prefill=is_prefill)
        return StepShape(rows, logits if num_logits <= logits else rows, pages, tail)

    def computed_rows(self, shape: StepShape, num_rows: int) -> int:
        """Rows that a step computes for so many live ones."""
        return _round_up(num_rows, TILE) if self.skips_padding else shape.num_rows

    def all_shapes(self, *, is_compact: bool) -> list[StepShape]:
        """Every step that can occur, the most frequent first."""
        shapes: dict[StepShape, None] = {}
        for pages in self.pages:
            for is_prefill, sizes in ((False, self.decode_rows), (True, self.prefill_rows)):
                for rows in sizes:
                    logits = self._logits_of(rows, is_prefill=is_prefill)
                    shapes[StepShape(rows, logits, pages)] = None
                    for tail in self._tails(rows) if is_compact and is_prefill else ():
                        if tail < rows or self.skips_padding:
                            shapes[StepShape(rows, logits, pages, tail)] = None
        return list(shapes)

    def _logits_of(self, rows: int, *, is_prefill: bool) -> int:
        if self.skips_padding:
            return self.decode_rows[-1] if is_prefill else rows
        return PREFILL_LOGIT_ROWS if is_prefill else rows

    def _tails(self, rows: int) -> tuple[int, ...]:
        """Sizes of the tail in a step of so many rows."""
        return (0, rows) if self.skips_padding else (0, *(size for size in self.prefill_rows if size <= rows))


def make_buckets(
    *,
    max_prefill_rows: int,
    max_decode_rows: int,
    max_pages: int,
    skips_padding: bool,
    decode_interval: int | None = None,
) -> Buckets:
    """Sizes up to these limits, which need not be sizes themselves; decode_interval: every multiple of it."""
    pages = _ladder(FIRST_PAGES, max_pages, multiple=1)
    interval = None if decode_interval is None else -(-decode_interval // TILE) * TILE
    if interval is not None:
        decode_rows = tuple(range(interval, max_decode_rows + interval, interval))
    elif skips_padding:
        decode_rows = (_round_up(max(max_decode_rows, min(max_prefill_rows, FIRST_PREFILL_ROWS)), TILE),)
    else:
        decode_rows = _ladder(TILE, max_decode_rows, multiple=TILE)
    if skips_padding:
        prefill_rows = _ladder(decode_rows[-1], max(max_prefill_rows, decode_rows[-1]), multiple=TILE)
    else:
        prefill_rows = (TILE, *_ladder(FIRST_PREFILL_ROWS, max_prefill_rows, multiple=TILE))
    return Buckets(
        prefill_rows=tuple(sorted(set(prefill_rows))),
        decode_rows=decode_rows,
        pages=pages,
        skips_padding=skips_padding,
    )


def prefill_limit(max_num_batched_tokens: int, *, is_chunked: bool, target: str) -> int:
    """Rows of the largest prefill step."""
    if is_chunked and target == "cpu":
        return min(max_num_batched_tokens, MAX_CPU_CHUNK)
    return max_num_batched_tokens


def _ladder(first: int, limit: int, *, multiple: int) -> tuple[int, ...]:
    """first, first * 4, ... below `limit`, and `limit` rounded up."""
    last = _round_up(limit, multiple)
    below = itertools.takewhile(lambda size: size < last, (first * GROWTH**i for i in itertools.count()))
    return (*below, last)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _smallest(sizes: tuple[int, ...], needed: int) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise AssertionError(f"{needed} is above the largest size {sizes[-1]}")
