"""Pins: content kept for a time, unless nothing else is left to evict. Pages hold 4 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.pager import InvariantViolated, check
from quire.pager.pool import Content, PagePool

World = Any
A, B, C = [list(range(start, start + 8)) for start in (10, 20, 30)]


def forgotten(world: World, *prompts: list[int]) -> None:
    """Two full pages cached for each: 0 and 1, then 2 and 3, …"""
    tables = [world.compute(prompt)[0] for prompt in prompts]
    for table in tables:
        table.release()


def test_pinned_pages_are_evicted_after_all_others(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A, B, C)
    assert world.pager.pin(A, b"", until=10) == 8
    assert (world.pager.pool.num_pinned, world.pager.pool.num_cached, world.pager.pool.num_available) == (2, 6, 6)
    assert list(world.pager.pool.cached_pages()) == [3, 2, 5, 4, 1, 0]
    check(world.pager, [])
    table = world.pager.open([])
    table.append(4 * 5)
    assert list(table.pages[0]) == [3, 2, 5, 4, 1]
    assert world.pager.pool.num_pinned == 1
    check(world.pager, [table])


def test_a_pin_survives_its_pages_being_used(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    world.pager.pin(A, b"", until=10)
    forgotten(world, A, B)
    assert list(world.pager.pool.cached_pages()) == [4, 3, 1, 0]
    check(world.pager, [])


def test_pages_may_be_pinned_while_they_are_owned(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    table, _ = world.compute([*A, 1])
    assert world.pager.pin([*A, 1], b"", until=10) == 8
    assert (world.pager.pool.num_pinned, world.pager.pool.num_owned) == (2, 3)
    table.release()
    forgotten(world, B)
    assert list(world.pager.pool.pinned_pages()) == [1, 0]
    check(world.pager, [])


def test_an_expired_pin_counts_as_released_just_then(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A, B)
    world.pager.pin(A, b"", until=10)
    world.now = 9.9
    assert list(world.pager.pool.cached_pages()) == [3, 2, 1, 0]
    world.now = 10
    forgotten(world, C)
    assert world.pager.pool.num_pinned == 0
    assert list(world.pager.pool.cached_pages()) == [3, 2, 5, 4, 1, 0]
    check(world.pager, [])


def test_a_pin_that_expires_while_its_page_is_owned_is_just_gone(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    table, _ = world.compute(A)
    world.pager.pin(A, b"", until=10)
    world.now = 11
    assert world.pager.pool.num_pinned == 0
    table.release()
    assert list(world.pager.pool.pinned_pages()) == []


def test_a_second_pin_may_lengthen_the_first_but_not_shorten_it(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    for until in (10, 20, 5):
        world.pager.pin(A, b"", until)
    assert world.pager.pool.pins() == {0: 20, 1: 20}
    world.now = 19
    assert world.pager.pool.num_pinned == 2


def test_a_longer_prefix_pinned_later_still_loses_its_leaf_first(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    world.pager.pin(A[:4], b"", until=10)
    world.pager.pin(A, b"", until=10)
    assert list(world.pager.pool.pinned_pages()) == [1, 0]
    world.now = 10
    assert list(world.pager.pool.cached_pages()) == [1, 0]
    check(world.pager, [])


def test_only_what_is_indexed_is_pinned_and_only_for_its_tenant(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    assert world.pager.pin([*A[:4], 9, 9, 9, 9], b"", until=10) == 4
    assert world.pager.pin(A, b"other", until=10) == 0
    assert world.pager.pool.num_pinned == 1


def test_without_a_prefix_cache_nothing_is_pinned(make_world: Callable[..., World]) -> None:
    world = make_world(6, enable_prefix_caching=False)
    forgotten(world, A)
    assert world.pager.pin(A, b"", until=10) == 0


@pytest.mark.usefixtures("small_tiles")
def test_of_a_sliding_group_only_what_the_next_row_sees_is_pinned(make_world: Callable[..., World]) -> None:
    world = make_world(20, windows=(0, 8))
    tokens = list(range(24))
    world.compute(tokens)[0].release()
    assert world.pager.pin(tokens, b"", until=10) == 24
    assert world.pager.pool.num_pinned == 6 + 2
    table = world.pager.open([])
    table.append(24)
    assert world.pager.open([*tokens, 7]).num_tokens == 24


def test_pinning_the_same_again_and_again_keeps_the_books_small() -> None:
    pool = PagePool(4, clock=lambda: 0.0)
    for page in pool.allocate(4):
        pool.label(page, Content(bytes([page]), b"root", 0, 0, b""))
    for until in range(1, 1000):
        pool.pin([0, 1, 2, 3], until)
    assert len(pool._expiries) <= 8


def test_a_page_in_the_wrong_list_is_found(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    world.pager.pin(A, b"", until=10)
    world.pager.pool._pins.pop(1)
    with pytest.raises(InvariantViolated, match="not in the pinned list, or the reverse"):
        check(world.pager, [])


def test_a_page_that_would_be_evicted_too_early_is_found(make_world: Callable[..., World]) -> None:
    world = make_world(6)
    forgotten(world, A)
    pool = world.pager.pool
    pool.retain([1])
    pool.release([1])
    with pytest.raises(InvariantViolated, match="page 0 would be evicted before page 1"):
        check(world.pager, [])
