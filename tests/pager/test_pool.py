"""The pool's allocation and eviction order, by exact page ids."""

from __future__ import annotations

import pytest
from quire.pager import OutOfPages, PagerError
from quire.pager.pool import Content, PagePool


def content(name: str, group: int = 0) -> Content:
    return Content(name.encode(), b"root", 0, group, b"tokens of " + name.encode())


def test_fresh_pages_are_allocated_ascending() -> None:
    pool = PagePool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]


def test_freed_pages_come_after_fresh_ones_tail_of_the_sequence_first() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.release(pages)
    assert pool.allocate(6) == [3, 4, 5, 2, 1, 0]


def test_pages_freed_earlier_are_allocated_earlier() -> None:
    pool = PagePool(4)
    first = pool.allocate(2)
    second = pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_cached_pages_are_allocated_last_and_least_recently_released_first() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    for page in (0, 1, 2):
        pool.label(page, content(f"page {page}"))
    pool.release(pages[:2])  # cached: 1, 0
    pool.release(pages[2:])  # free: 3; cached: 1, 0, 2
    assert list(pool.free_pages()) == [4, 3]
    assert list(pool.cached_pages()) == [1, 0, 2]
    assert pool.allocate(5) == [4, 3, 1, 0, 2]


def test_only_an_evicted_page_loses_its_content() -> None:
    pool = PagePool(2)
    pool.allocate(2)
    pool.label(0, content("a"))
    pool.label(1, content("b"))
    pool.release([0])
    pool.release([1])
    assert pool.allocate(1) == [0]
    assert pool.find(b"a") is None
    assert pool.content(0) is None
    assert pool.find(b"b") == 1


def test_retaining_a_cached_page_saves_it_from_eviction() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    pool.label(0, content("a"))
    pool.label(1, content("b"))
    pool.release([1, 0])
    pool.retain([0])
    assert (pool.num_free, pool.num_cached, pool.num_owned) == (1, 1, 1)
    assert pool.allocate(2) == [2, 1]
    assert pool.find(b"a") == 0


def test_a_page_is_free_only_after_its_last_reference() -> None:
    pool = PagePool(1)
    pool.allocate(1)
    pool.retain([0])
    pool.release([0])
    assert (pool.num_free, pool.num_owned, pool.references(0)) == (0, 1, 1)
    pool.release([0])
    assert (pool.num_free, pool.num_owned, pool.references(0)) == (1, 0, 0)


def test_allocating_too_much_changes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available") as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert pool.allocate(2) == [1, 2]


def test_a_page_is_never_in_two_index_entries_nor_a_key_on_two_pages() -> None:
    pool = PagePool(2)
    pool.allocate(2)
    pool.label(0, content("a"))
    with pytest.raises(PagerError, match="already indexed"):
        pool.label(0, content("b"))
    with pytest.raises(PagerError, match="already indexed"):
        pool.label(1, content("a"))
    assert pool.indexed_pages() == {b"a": 0}


def test_a_page_is_private_while_unshared_and_without_content() -> None:
    pool = PagePool(2)
    pool.allocate(2)
    pool.retain([0])
    pool.label(1, content("a"))
    assert not pool.is_private(0)
    assert not pool.is_private(1)
    pool.release([0])
    assert pool.is_private(0)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        PagePool(0)
