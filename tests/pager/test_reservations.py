"""Pages kept for one table: nobody else can allocate them, its own growth uses them up first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.pager import OutOfPages, check

World = Any


def test_reserved_pages_are_not_available_to_others(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    mine, _ = pager.open([])
    other, _ = pager.open([])
    pager.reserve(mine, 3)
    assert (pager.num_available, pager.num_reserved, pager.num_free) == (2, 3, 5)
    assert (other.room(), mine.room()) == (8, 20)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        pager.grow(other, 12)
    pager.grow(other, 8)
    assert (other.room(), mine.room()) == (0, 12)
    check(pager, [mine, other])


def test_growth_uses_up_the_reservation_before_anything_else(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    table, _ = pager.open([])
    pager.reserve(table, 2)
    pager.grow(table, 4)
    assert (table.reserved, pager.num_reserved, pager.num_available) == (1, 1, 3)
    pager.grow(table, 12)
    assert (table.reserved, pager.num_reserved, pager.num_available) == (0, 0, 1)
    check(pager, [table])


def test_a_copy_on_write_is_growth(make_world: Callable[..., World]) -> None:
    world = make_world(2)
    table, _ = world.pager.open([])
    world.extend(table, [1])
    twin = world.pager.fork(table)
    world.pager.reserve(twin, 1)
    assert table.would_overflow(1)
    world.extend(twin, [2])
    assert (twin.reserved, world.cells.read(twin)) == (0, [1, 2])
    check(world.pager, [table, twin])


def test_a_reservation_is_absolute_and_zero_clears_it(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    table, _ = pager.open([])
    for wanted in (4, 2, 5, 0):
        pager.reserve(table, wanted)
        assert (table.reserved, pager.num_available) == (wanted, 5 - wanted)
    with pytest.raises(ValueError, match="cannot reserve -1 pages"):
        pager.reserve(table, -1)


def test_reserving_too_much_changes_nothing(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    mine, _ = pager.open([])
    other, _ = pager.open([])
    pager.reserve(mine, 3)
    pager.reserve(other, 1)
    with pytest.raises(OutOfPages, match="needs 2 pages, 1 are available"):
        pager.reserve(other, 3)
    assert (mine.reserved, other.reserved, pager.num_reserved) == (3, 1, 4)


def test_release_drops_the_reservation_and_rollback_does_not_refill_it(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    table, _ = pager.open([])
    pager.reserve(table, 3)
    pager.grow(table, 8)
    pager.rollback(table, 0)
    assert (table.reserved, pager.num_available) == (1, 4)
    pager.release(table)
    assert (table.reserved, pager.num_reserved, pager.num_available) == (0, 0, 5)


def test_a_fork_reserves_nothing(make_world: Callable[..., World]) -> None:
    pager = make_world(5).pager
    table, _ = pager.open([])
    pager.reserve(table, 3)
    assert pager.fork(table).reserved == 0
    assert pager.num_reserved == 3


def test_opening_reserves_together_with_the_rest_or_not_at_all(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    table, _ = world.pager.open([1, 2, 3, 4, 5], spare_pages=2, reserve=4)  # the tokens' two pages are among the four
    assert (table.reserved, world.pager.num_available) == (4, 2)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        world.pager.open([6], spare_pages=2, reserve=1)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        world.pager.open([6], reserve=3)
    check(world.pager, [table])


def test_reserving_less_than_nothing_is_refused_before_anything_is_taken(make_world: Callable[..., World]) -> None:
    world = make_world(4, store_pages=2)
    spilled = world.pager.spill(world.compute([1, 2, 3, 4, 5])[0], 5)
    with pytest.raises(ValueError, match="cannot reserve -1 pages"):
        world.pager.open([1, 2, 3, 4, 5], reserve=-1)
    with pytest.raises(ValueError, match="cannot reserve -1 pages"):
        world.pager.restore(spilled, [1, 2, 3, 4, 5], reserve=-1)
    check(world.pager, [])


def test_cached_pages_that_are_reserved_cannot_be_taken_as_a_hit(make_world: Callable[..., World]) -> None:
    world = make_world(2)
    world.pager.release(world.compute([1, 2, 3, 4, 5])[0])
    table, _ = world.pager.open([])
    world.pager.reserve(table, 2)
    with pytest.raises(OutOfPages, match="needs 1 pages, 0 are available"):
        world.pager.open([1, 2, 3, 4, 5])
    assert (world.pager.prefix_queried_tokens, world.pager.num_cached) == (5, 1)
    check(world.pager, [table])
