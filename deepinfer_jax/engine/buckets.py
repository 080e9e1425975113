"""The sizes that steps are padded to: few, so that little is compiled, and close enough, so that little is wasted."""

import dataclasses
import itertools
from collections.abc import Iterator

TILE = 8  # sizes are multiples of it
PREFILL_REQUESTS = 8  # prompts in one prefill step, where that is a size of its own
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
    num_chunks: int  # requests that have rows
    num_tail: int | None = None  # room for the rows that run the decoder layers under compact replay; None: all rows
    has_images: bool = False  # whether rows may be those of images

    @property
    def name(self) -> str:
        """The shape in one word, for statistics."""
        tail = "" if self.num_tail is None else f"-tail{self.num_tail}"
        images = "-images" if self.has_images else ""
        sizes = f"rows{self.num_rows}-logits{self.num_logits}-pages{self.num_pages}-requests{self.num_chunks}"
        return f"{sizes}{tail}{images}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The allowed sizes, each ascending.

    decode: requests and rows of a decode step, by requests and then by rows.
    skips_padding: padding rows are not computed, so that one size serves prefill and decode steps alike.
    """

    prefill_rows: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    skips_padding: bool

    @property
    def decode_rows(self) -> tuple[int, ...]:
        """Rows of decode steps."""
        return tuple(sorted({rows for _, rows in self.decode}))

    @property
    def prefill_requests(self) -> int:
        """Requests of a prefill step."""
        return self.decode[-1][0] if self.skips_padding else PREFILL_REQUESTS

    @property
    def first(self) -> StepShape:
        """The smallest decode step."""
        return self.shape_of(1, 1, num_chunks=1, is_prefill=False)

    def shape_of(
        self,
        num_rows: int,
        num_pages: int,
        *,
        num_chunks: int,
        is_prefill: bool,
        num_logits: int = 0,
        num_tail_rows: int | None = None,
        has_images: bool = False,
    ) -> StepShape:
        """The smallest step with room for these rows, requests, logit rows and pages, and for the tail if not all."""
        if is_prefill:
            chunks, rows = self.prefill_requests, _smallest(self.prefill_rows, num_rows)
        else:
            chunks, rows = next(size for size in self.decode if size[0] >= num_chunks and size[1] >= num_rows)
        pages = _smallest(self.pages, num_pages)
        tail = None
        if num_tail_rows is not None and num_tail_rows < num_rows:
            tail = _smallest(self._tails(rows), num_tail_rows)
            tail = None if tail == rows and not self.skips_padding else tail
        logits = self._logits_of(rows, is_prefill=is_prefill)
        return StepShape(rows, logits if num_logits <= logits else rows, pages, chunks, tail, has_images)

    def computed_rows(self, shape: StepShape, num_rows: int) -> int:
        """Rows that a step computes for so many live ones."""
        return _round_up(num_rows, TILE) if self.skips_padding else shape.num_rows

    def all_shapes(self, *, is_compact: bool) -> list[StepShape]:
        """Every step of text that can occur, the most frequent first."""
        shapes: dict[StepShape, None] = {}
        for pages in self.pages:
            for chunks, rows in self.decode:
                shapes[StepShape(rows, self._logits_of(rows, is_prefill=False), pages, chunks)] = None
            shapes |= dict.fromkeys(self._prefill_shapes(pages, is_compact=is_compact))
        return list(shapes)

    def image_shapes(self, *, is_compact: bool) -> list[StepShape]:
        """Every step with images that can occur: image rows are those of prompts."""
        shapes = (shape for pages in self.pages for shape in self._prefill_shapes(pages, is_compact=is_compact))
        return [dataclasses.replace(shape, has_images=True) for shape in shapes]

    def _prefill_shapes(self, pages: int, *, is_compact: bool) -> Iterator[StepShape]:
        for rows in self.prefill_rows:
            logits, chunks = self._logits_of(rows, is_prefill=True), self.prefill_requests
            yield StepShape(rows, logits, pages, chunks)
            for tail in self._tails(rows) if is_compact else ():
                if tail < rows or self.skips_padding:
                    yield StepShape(rows, logits, pages, chunks, tail)

    def _logits_of(self, rows: int, *, is_prefill: bool) -> int:
        if self.skips_padding:
            return self.decode_rows[-1] if is_prefill else rows
        return PREFILL_REQUESTS if is_prefill else rows

    def _tails(self, rows: int) -> tuple[int, ...]:
        """Sizes of the tail in a step of so many rows."""
        return (0, rows) if self.skips_padding else (0, *(size for size in self.prefill_rows if size <= rows))


def make_buckets(
    *,
    max_prefill_rows: int,
    max_requests: int,
    max_pages: int,
    skips_padding: bool,
    rows_per_request: tuple[int, ...] = (1,),
    decode_interval: int | None = None,
) -> Buckets:
    """Sizes up to these limits, which need not be sizes themselves.

    rows_per_request: rows of a decode step, as multiples of its requests. decode_interval: every multiple of it is a
    number of requests.
    """
    pages = _ladder(FIRST_PAGES, max_pages, multiple=1)
    interval = None if decode_interval is None else _round_up(decode_interval, TILE)
    if interval is not None:
        requests = tuple(range(interval, max_requests + interval, interval))
    else:
        requests = (_round_up(max_requests, TILE),) if skips_padding else _ladder(TILE, max_requests, multiple=TILE)
    if skips_padding:
        least = 0 if interval is not None else min(max_prefill_rows, FIRST_PREFILL_ROWS)
        decode = tuple((size, _round_up(max(size * rows_per_request[-1], least), TILE)) for size in requests)
        last = decode[-1][1]
        prefill_rows = _ladder(last, max(max_prefill_rows, last), multiple=TILE)
    else:
        decode = tuple((size, size * rows) for size in requests for rows in rows_per_request)
        prefill_rows = (TILE, *_ladder(FIRST_PREFILL_ROWS, max_prefill_rows, multiple=TILE))
    return Buckets(
        prefill_rows=tuple(sorted(set(prefill_rows))), decode=decode, pages=pages, skips_padding=skips_padding
    )


def prefill_limit(max_num_batched_tokens: int, *, is_chunked: bool, target: str) -> int:
    """Rows of the largest prefill step."""
    if is_chunked and target in ("cpu", "ascend"):  # the host runs the steps of an Ascend device
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
