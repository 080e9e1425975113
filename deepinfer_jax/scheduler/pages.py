"""Which pages of the paged caches are free, and how many requests hold each of the others."""

from collections import deque
from collections.abc import Sequence, Set

import numpy as np
from jaxtyping import Int32


class PageAllocator:
    """Pages 0 to num_pages - 1, handed out in the order in which they became free.

    A page may have several holders: it becomes free when the last one releases it. No page is reserved: padding is
    -1 in every index array and writes nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self.peak_used = 0  # most pages in use at one time, those of the prefix cache included
        self._free = deque(range(num_pages))
        self.holders: Int32[np.ndarray, " P"] = np.zeros(num_pages, np.int32)  # how many times each page is held

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
        return int(self.holders[page])

    def allocate(self, count: int, *, avoid: Set[int] = frozenset()) -> list[int]:
        """`count` free pages outside `avoid`, each with one holder.

        Raises ValueError, and takes none, if there are not so many.
        """
        kept = [page for page in avoid if self.holders[page] == 0]
        if not 0 <= count <= len(self._free) - len(kept):
            num_free = len(self._free) - len(kept)
            raise ValueError(f"{count} pages were asked for and {num_free} of {self.num_pages} are free")
        for page in kept:
            self._free.remove(page)
        pages = [self._free.popleft() for _ in range(count)]
        self._free.extendleft(reversed(kept))
        self.holders[pages] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages, which must have one already."""
        self._check_held(pages)
        self.holders[list(pages)] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each of these pages; those that lose the last one are free."""
        self._check_held(pages)
        self.holders[list(pages)] -= 1
        self._free.extend(page for page in pages if self.holders[page] == 0)

    def _check_held(self, pages: Sequence[int]) -> None:
        """Raises before anything changed."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages {list(pages)} name a page twice; a request holds a page once")
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} does not exist; pages are 0 to {self.num_pages - 1}")
            if self.holders[page] == 0:
                raise ValueError(f"page {page} is free; only a held page can be shared or released")
