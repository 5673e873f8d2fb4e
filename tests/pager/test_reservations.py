"""Reservations: reserved pages are for one table only, and its growth uses them up first."""

from __future__ import annotations

import pytest
from quire.pager import OutOfPages, check

from tests.pager.conftest import MakeHarness


def test_reserved_pages_are_not_available_to_others(make_harness: MakeHarness) -> None:
    pager = make_harness(5).pager
    mine = pager.open([])
    other = pager.open([])
    mine.reserve(3)
    assert (pager.pool.num_available, pager.pool.num_reserved, pager.pool.num_free) == (2, 3, 5)
    assert (other.max_append(), mine.max_append()) == (8, 20)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        other.append(12)
    other.append(8)
    assert (other.max_append(), mine.max_append()) == (0, 12)
    check(pager, [mine, other])


def test_growth_uses_up_the_reservation_before_anything_else(make_harness: MakeHarness) -> None:
    pager = make_harness(5).pager
    table = pager.open([])
    table.reserve(2)
    table.append(4)
    assert (table.reserved, pager.pool.num_reserved, pager.pool.num_available) == (1, 1, 3)
    table.append(12)
    assert (table.reserved, pager.pool.num_reserved, pager.pool.num_available) == (0, 0, 1)
    check(pager, [table])


def test_a_copy_on_write_is_growth(make_harness: MakeHarness) -> None:
    harness = make_harness(2)
    table = harness.pager.open([])
    harness.extend(table, [1])
    twin = table.fork()
    twin.reserve(1)
    assert table.max_append() == 0
    harness.extend(twin, [2])
    assert (twin.reserved, harness.memory.read(twin)) == (0, [1, 2])
    check(harness.pager, [table, twin])


def test_a_reservation_replaces_the_previous_one_and_0_clears_it(make_harness: MakeHarness) -> None:
    pager = make_harness(5).pager
    table = pager.open([])
    for wanted in (4, 2, 5, 0):
        table.reserve(wanted)
        assert (table.reserved, pager.pool.num_available) == (wanted, 5 - wanted)
    with pytest.raises(ValueError, match="cannot reserve -1 pages"):
        table.reserve(-1)


def test_reserving_too_much_changes_nothing(make_harness: MakeHarness) -> None:
    pager = make_harness(5).pager
    mine = pager.open([])
    other = pager.open([])
    mine.reserve(3)
    other.reserve(1)
    with pytest.raises(OutOfPages, match="needs 2 pages, 1 are available"):
        other.reserve(3)
    assert (mine.reserved, other.reserved, pager.pool.num_reserved) == (3, 1, 4)


def test_release_drops_the_reservation_and_rollback_does_not_refill_it(
    make_harness: MakeHarness,
) -> None:
    pager = make_harness(5).pager
    table = pager.open([])
    table.reserve(3)
    table.append(8)
    table.rollback(0)
    assert (table.reserved, pager.pool.num_available) == (1, 4)
    table.release()
    assert (table.reserved, pager.pool.num_reserved, pager.pool.num_available) == (0, 0, 5)


def test_a_fork_reserves_nothing(make_harness: MakeHarness) -> None:
    pager = make_harness(5).pager
    table = pager.open([])
    table.reserve(3)
    assert table.fork().reserved == 0
    assert pager.pool.num_reserved == 3


def test_open_with_spare_pages_does_not_count_reserved_ones(make_harness: MakeHarness) -> None:
    harness = make_harness(6)
    table = harness.pager.open([])
    table.reserve(4)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        harness.pager.open([6], spare_pages=2)
    harness.pager.open([6], spare_pages=1)
    check(harness.pager, [table])


def test_cached_pages_that_are_reserved_cannot_be_taken_as_a_hit(make_harness: MakeHarness) -> None:
    harness = make_harness(2)
    harness.compute([1, 2, 3, 4, 5])[0].release()
    table = harness.pager.open([])
    table.reserve(2)
    with pytest.raises(OutOfPages, match="needs 1 pages, 0 are available"):
        harness.pager.open([1, 2, 3, 4, 5])
    assert (harness.pager.prefix_queried_tokens, harness.pager.pool.num_cached) == (5, 1)
    check(harness.pager, [table])
