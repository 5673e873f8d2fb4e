"""Pins: pinned pages are evicted last, until the pin expires. Pages hold 4 tokens."""

from __future__ import annotations

import pytest
from quire.pager import InvariantViolated, check
from quire.pager.pool import Content, PagePool

from tests.pager.conftest import MakeHarness, PagerHarness

A, B, C = [list(range(start, start + 8)) for start in (10, 20, 30)]


def cache(harness: PagerHarness, *prompts: list[int]) -> None:
    """Compute and release prompts of two pages: pages 0 and 1 are cached, then 2 and 3, and so on."""
    tables = [harness.compute(prompt)[0] for prompt in prompts]
    for table in tables:
        table.release()


def test_pinned_pages_are_evicted_after_all_others(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A, B, C)
    assert harness.pager.pin(A, b"", until=10) == 8
    assert (harness.pager.pool.num_pinned, harness.pager.pool.num_cached, harness.pager.pool.num_available) == (2, 6, 6)
    assert list(harness.pager.pool.cached_pages()) == [3, 2, 5, 4, 1, 0]
    check(harness.pager, [])
    table = harness.pager.open([])
    table.append(4 * 5)
    assert list(table.pages[0]) == [3, 2, 5, 4, 1]
    assert harness.pager.pool.num_pinned == 1
    check(harness.pager, [table])


def test_a_pin_survives_its_pages_being_used(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    harness.pager.pin(A, b"", until=10)
    cache(harness, A, B)
    assert list(harness.pager.pool.cached_pages()) == [4, 3, 1, 0]
    check(harness.pager, [])


def test_pages_may_be_pinned_while_they_are_owned(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    table, _ = harness.compute([*A, 1])
    assert harness.pager.pin([*A, 1], b"", until=10) == 8
    assert (harness.pager.pool.num_pinned, harness.pager.pool.num_owned) == (2, 3)
    table.release()
    cache(harness, B)
    assert list(harness.pager.pool.pinned_pages()) == [1, 0]
    check(harness.pager, [])


def test_an_expired_pin_counts_as_released_when_it_expires(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A, B)
    harness.pager.pin(A, b"", until=10)
    harness.now = 9.9
    assert list(harness.pager.pool.cached_pages()) == [3, 2, 1, 0]
    harness.now = 10
    cache(harness, C)
    assert harness.pager.pool.num_pinned == 0
    assert list(harness.pager.pool.cached_pages()) == [3, 2, 5, 4, 1, 0]
    check(harness.pager, [])


def test_a_pin_that_expires_while_its_page_is_owned_is_dropped(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    table, _ = harness.compute(A)
    harness.pager.pin(A, b"", until=10)
    harness.now = 11
    assert harness.pager.pool.num_pinned == 0
    table.release()
    assert list(harness.pager.pool.pinned_pages()) == []


def test_a_second_pin_can_lengthen_the_first_but_not_shorten_it(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    for until in (10, 20, 5):
        harness.pager.pin(A, b"", until)
    assert harness.pager.pool.pins() == {0: 20, 1: 20}
    harness.now = 19
    assert harness.pager.pool.num_pinned == 2


def test_a_longer_prefix_pinned_later_is_evicted_leaf_first(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    harness.pager.pin(A[:4], b"", until=10)
    harness.pager.pin(A, b"", until=10)
    assert list(harness.pager.pool.pinned_pages()) == [1, 0]
    harness.now = 10
    assert list(harness.pager.pool.cached_pages()) == [1, 0]
    check(harness.pager, [])


def test_only_indexed_pages_of_the_tenant_are_pinned(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    assert harness.pager.pin([*A[:4], 9, 9, 9, 9], b"", until=10) == 4
    assert harness.pager.pin(A, b"other", until=10) == 0
    assert harness.pager.pool.num_pinned == 1


def test_without_a_prefix_cache_nothing_is_pinned(make_harness: MakeHarness) -> None:
    harness = make_harness(6, enable_prefix_caching=False)
    cache(harness, A)
    assert harness.pager.pin(A, b"", until=10) == 0


@pytest.mark.usefixtures("small_tiles")
def test_a_sliding_group_pins_only_what_the_next_row_sees(make_harness: MakeHarness) -> None:
    harness = make_harness(20, windows=(0, 8))
    tokens = list(range(24))
    harness.compute(tokens)[0].release()
    assert harness.pager.pin(tokens, b"", until=10) == 24
    assert harness.pager.pool.num_pinned == 6 + 2
    table = harness.pager.open([])
    table.append(24)
    assert harness.pager.open([*tokens, 7]).num_tokens == 24


def test_pinning_the_same_pages_repeatedly_keeps_the_heap_small() -> None:
    pool = PagePool(4, clock=lambda: 0.0)
    for page in pool.allocate(4):
        pool.label(page, Content(bytes([page]), b"root", 0, 0, b""))
    for until in range(1, 1000):
        pool.pin([0, 1, 2, 3], until)
    assert len(pool._expiries) <= 8


def test_a_page_in_the_wrong_list_is_found(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    harness.pager.pin(A, b"", until=10)
    harness.pager.pool._pins.pop(1)
    with pytest.raises(InvariantViolated, match="not in the pinned list, or the reverse"):
        check(harness.pager, [])


def test_a_page_that_would_be_evicted_too_early_is_found(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    cache(harness, A)
    pool = harness.pager.pool
    pool.retain([1])
    pool.release([1])
    with pytest.raises(InvariantViolated, match="page 0 would be evicted before page 1"):
        check(harness.pager, [])


def test_pinned_pages_are_counted_by_tenant(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    for salt in (b"a", b"b"):
        harness.compute(A, salt)[0].release()
    assert harness.pager.pages_to_pin([*A, 1], b"a") == (2, 0)
    harness.pager.pin(A, b"a", until=10)
    harness.pager.pin(A, b"a", until=12)
    assert harness.pager.pages_to_pin(A, b"a") == (0, 2)
    assert harness.pager.pages_to_pin([*A[:4], *B], b"a") == (2, 2), "its first page is pinned"
    assert harness.pager.pages_to_pin(A, b"b") == (2, 0)
    harness.pager.pin(A[:4], b"b", until=20)
    harness.now = 12
    assert [harness.pager.pages_to_pin(A, salt)[1] for salt in (b"a", b"b")] == [0, 1]


def test_evicted_pages_are_pinned_no_more(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    cache(harness, A)
    harness.pager.pin(A, b"", until=10)
    table = harness.pager.open([])
    table.append(4 * 3)
    assert harness.pager.pages_to_pin(A, b"") == (1, 1)
    table.append(4)
    assert harness.pager.pages_to_pin(A, b"") == (2, 0)


def test_pages_to_pin_leave_out_those_that_left_a_window(make_harness: MakeHarness) -> None:
    harness = make_harness(60, windows=(0, 8))
    prompt = list(range(100))
    harness.compute(prompt)[0].release()
    num_pages, _ = harness.pager.pages_to_pin(prompt, b"")
    harness.pager.pin(prompt, b"", until=10)
    assert harness.pager.pool.num_pinned == num_pages == 25 + 9
