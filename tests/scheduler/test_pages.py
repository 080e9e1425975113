"""Pages: first freed first given, free when the last holder lets go."""

import pytest

from deepinfer_jax.scheduler.pages import PageAllocator


def test_pages_are_given_in_the_order_in_which_they_became_free():
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    pages.release([1])
    pages.release([0])
    assert pages.allocate(3) == [3, 1, 0]


def test_shared_page_is_free_when_its_last_holder_lets_go():
    pages = PageAllocator(3)
    held = pages.allocate(2)
    pages.share(held[:1])
    assert [pages.num_holders(page) for page in range(3)] == [2, 1, 0]
    pages.release(held)
    assert (pages.num_free, pages.num_used) == (2, 1)
    pages.release(held[:1])
    assert (pages.num_free, pages.num_used) == (3, 0)


def test_nothing_is_taken_when_there_is_not_enough():
    pages = PageAllocator(3)
    pages.allocate(2)
    with pytest.raises(ValueError, match="2 pages were asked for and 1 of 3 are free"):
        pages.allocate(2)
    assert pages.num_free == 1
    assert pages.allocate(0) == []


@pytest.mark.parametrize("change", ["share", "release"])
@pytest.mark.parametrize(
    "wanted, message",
    [
        ([0, 2], "page 2 is free"),
        ([0, 7], "page 7 does not exist; pages are 0 to 2"),
        ([0, -1], "page -1 does not exist"),
        ([0, 1, 0], "name a page twice"),
    ],
    ids=["free", "beyond", "padding", "twice"],
)
def test_wrong_pages_are_refused_before_anything_changes(change, wanted, message):
    pages = PageAllocator(3)
    pages.allocate(2)
    with pytest.raises(ValueError, match=message):
        getattr(pages, change)(wanted)
    assert [pages.num_holders(page) for page in range(3)] == [1, 1, 0]
    assert pages.num_free == 1


def test_peak_counts_a_shared_page_once():
    pages = PageAllocator(5)
    held = pages.allocate(3)
    pages.share(held)
    pages.release(held)
    pages.release(held)
    pages.allocate(1)
    assert pages.peak_used == 3


def test_no_pages_at_all_is_refused():
    with pytest.raises(ValueError, match="num_pages=0 must be at least 1"):
        PageAllocator(0)


def test_pages_to_avoid_stay_where_they_are():
    pages = PageAllocator(5)
    assert pages.allocate(2, avoid={1, 3}) == [0, 2]
    with pytest.raises(ValueError, match="2 pages were asked for and 1 of 5 are free"):
        pages.allocate(2, avoid={0, 1, 3})
    assert pages.allocate(3) == [1, 3, 4]
