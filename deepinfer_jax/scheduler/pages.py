"""Which pages of the paged caches are free, and how many requests hold each of the others."""

from collections import deque
from collections.abc import Sequence


class PageAllocator:
    """Pages 0 to num_pages - 1, handed out in the order in which they became free.

    A page may have several holders: it becomes free when the last one releases it. No page is reserved: padding is
    -1 in every index array and writes nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self.peak_used = 0  # most pages in use at one time
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that someone holds; a shared page counts once."""
        return self.num_pages - len(self._free)

    def num_holders(self, page: int) -> int:
        """How many times a page is held."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one holder. Raises ValueError, and takes none, if there are not so many."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} pages were asked for and {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages, which must have one already."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each of these pages; those that lose the last one are free."""
        self._check_held(pages)
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def _check_held(self, pages: Sequence[int]) -> None:
        """Raises before anything changed."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages {list(pages)} name a page twice; a request holds a page once")
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} does not exist; pages are 0 to {self.num_pages - 1}")
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free; only a held page can be shared or released")
