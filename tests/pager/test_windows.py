"""Layer groups: several tables per sequence from one pool. Pages hold 4 tokens, tiles 8; a window of 8 keeps, for a
row at position n, tokens from max(0, n - 7) // 8 * 8 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.pager import OutOfPages, Pager, check

World = Any
HYBRID = (0, 8)
TOKENS = list(range(100, 140))

pytestmark = pytest.mark.usefixtures("small_tiles")


def pages(table: Any) -> list[list[int]]:
    return [list(each) for each in table.pages]


def grown(world: World, token_ids: list[int]) -> Any:
    """A table that decoded these tokens, one a step."""
    table, cached = world.pager.open(token_ids)
    for end in range(cached + 1, len(token_ids) + 1):
        world.extend(table, token_ids[end - 1 : end])
        world.pager.commit(table, token_ids[:end])
    return table


def test_each_group_has_a_table_and_all_grow_together(make_world: Callable[..., World]) -> None:
    pager = make_world(8, windows=HYBRID).pager
    table, _ = pager.open([])
    pager.grow(table, 5)
    assert pages(table) == [[0, 2], [1, 3]]
    assert pager.pages_needed(table, 4) == 2
    pager.grow(table, 4)
    assert pages(table) == [[0, 2, 4], [1, 3, 5]]


def test_groups_grow_all_or_not_at_all(make_world: Callable[..., World]) -> None:
    pager = make_world(5, windows=HYBRID).pager
    table, _ = pager.open([])
    pager.grow(table, 3)
    assert (table.room(), table.would_overflow(5), table.would_overflow(6)) == (5, False, True)
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        pager.grow(table, 6)
    assert (pages(table), pager.num_free) == ([[0], [1]], 3)


@pytest.mark.parametrize(
    ("tokens", "given_back"),
    [(14, 0), (15, 2), (22, 2), (23, 4)],  # a row at 15 sees 8…15, one at 14 sees 7…14
)
def test_a_sliding_group_gives_back_whole_tiles_that_no_row_to_come_sees(
    make_world: Callable[..., World], tokens: int, given_back: int
) -> None:
    world = make_world(16, windows=HYBRID)
    table, _ = world.compute(TOKENS[:tokens])
    full, sliding = pages(table)
    assert full.count(-1) == 0
    assert sliding[:given_back] == [-1] * given_back
    assert sliding.count(-1) == given_back
    assert world.cells.read(table, 0) == TOKENS[:tokens]
    assert world.cells.read(table, 1, 4 * given_back) == TOKENS[4 * given_back : tokens]
    check(world.pager, [table])


@pytest.mark.parametrize("windows", [(0,), (8,), (1,), (0, 8), (0, 8, 8), (3, 21)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_decoding_never_holds_more_pages_than_predicted(
    make_world: Callable[..., World], windows: tuple[int, ...], enable_prefix_caching: bool
) -> None:
    pager = make_world(64, windows=windows, enable_prefix_caching=enable_prefix_caching).pager
    table, _ = pager.open([])
    most = 0
    for length in range(1, 41):
        pager.grow(table, 1)
        most = max(most, pager.num_owned)
        assert most <= pager.pages_for(length)
        pager.commit(table, TOKENS[:length])
        check(pager, [table])
    if len(set(windows)) == 1:
        assert most == pager.pages_for(40)


def test_pages_given_back_are_cached_and_the_oldest_is_evicted_first(make_world: Callable[..., World]) -> None:
    world = make_world(12, windows=(8,))
    table, _ = world.compute(TOKENS[:23])
    assert pages(table) == [[-1, -1, -1, -1, 4, 5]]
    assert list(world.pager.pool.cached_pages()) == [0, 1, 2, 3]


def test_committing_gives_back_even_without_a_prefix_cache(make_world: Callable[..., World]) -> None:
    world = make_world(12, windows=(8,), enable_prefix_caching=False)
    table, _ = world.compute(TOKENS[:23])
    assert (world.pager.num_owned, world.pager.num_free, table.num_committed) == (2, 10, 0)
    check(world.pager, [table])


def test_a_hit_needs_of_a_sliding_group_only_what_the_next_row_sees(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    first = grown(world, TOKENS[:24])
    assert pages(first)[1][:4] == [-1] * 4
    world.pager.release(world.pager.open([7] * 40)[0])
    taken, _ = world.pager.open([])
    world.pager.grow(taken, 4 * ((world.pager.num_free + 4) // 2))  # evicts the four pages that left the window
    assert world.pager.num_cached == 0
    second, cached = world.pager.open([*TOKENS[:24], 7])
    assert (cached, pages(second)) == (24, pages(first))
    assert world.pager.open([*TOKENS[:20], 7])[1] == 0  # a row at 20 sees 13 … 20, its tile begins at 8: not there
    check(world.pager, [first, taken, second])


def test_a_hit_ends_where_a_full_group_ends(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    first = grown(world, TOKENS[:14])
    table, cached = world.pager.open([*TOKENS[:8], 7, 7, 7, 7, 7])
    assert (cached, pages(table)) == (8, [[0, 2], [1, 3]])
    check(world.pager, [first, table])


def test_a_hit_is_the_longest_whose_window_is_whole(make_world: Callable[..., World]) -> None:
    world = make_world(16, windows=(8,))
    world.pager.release(grown(world, TOKENS[:24]))
    pool = world.pager.pool
    assert world.pager.prefix.match(world.pager.open([])[0].root, TOKENS, 6).pages == [[-1, -1, -1, -1, 4, 5]]
    pool.retain([4])
    pool._forget(4)  # as if evicted: 5 alone is no window, and neither is 3 without 4
    pool.release([4])
    table, cached = world.pager.open([*TOKENS[:24], 7])
    assert (cached, pages(table)) == (16, [[-1, -1, 2, 3]])
    check(world.pager, [table])


def test_a_window_without_full_groups_hits_behind_evicted_pages(make_world: Callable[..., World]) -> None:
    world = make_world(10, windows=(8,))
    first = grown(world, TOKENS[:24])
    blocker, _ = world.pager.open([])
    world.pager.grow(blocker, 32)
    second, cached = world.pager.open([*TOKENS[:24], 7])
    assert (cached, pages(second)) == (24, [[-1, -1, -1, -1, 4, 5]])
    check(world.pager, [first, blocker, second])


def test_a_fork_with_holes_copies_the_partial_page_of_every_group(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:18])
    twin = world.pager.fork(table)
    assert pages(twin) == pages(table)
    assert world.pager.pages_needed(twin, 1) == 2
    world.extend(twin, [7])
    assert len(world.cells.copies) == 2
    world.extend(table, [8])
    assert len(world.cells.copies) == 2
    for group in (0, 1):
        assert world.cells.read(twin, group, 8) == [*TOKENS[8:18], 7]
        assert world.cells.read(table, group, 8) == [*TOKENS[8:18], 8]
    check(world.pager, [table, twin])


def test_rolling_back_behind_what_was_given_back_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:18])
    pager = world.pager
    assert [pager.can_roll_back(table, to) for to in (0, 14, 15, 18, 19)] == [False, False, True, True, False]
    with pytest.raises(ValueError, match="cannot roll back to 14 tokens, pages before them left their window"):
        pager.rollback(table, 14)
    assert table.num_tokens == 18
    pager.rollback(table, 15)
    world.extend(table, TOKENS[15:18])
    assert world.cells.read(table, 1, 8) == TOKENS[8:18]
    check(pager, [table])


def test_drafts_may_be_rolled_back_before_committing(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:14])
    world.extend(table, TOKENS[14:24])
    assert world.pager.can_roll_back(table, 14)
    world.pager.rollback(table, 15)
    world.pager.commit(table, TOKENS[:15])
    assert pages(table)[1][:2] == [-1, -1]
    check(world.pager, [table])


def test_a_fork_cannot_roll_back_further_than_its_original(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:18])
    assert not world.pager.can_roll_back(world.pager.fork(table), 14)
    hit, _ = world.pager.open(TOKENS[:17])
    assert [world.pager.can_roll_back(hit, to) for to in (14, 15, 16)] == [False, True, True]


def test_opening_counts_what_the_windows_will_hold(make_world: Callable[..., World]) -> None:
    pager = make_world(9, windows=(8,)).pager
    assert pager.pages_for(1000) == 4
    assert pager.open(TOKENS, spare_pages=5)[1] == 0
    with pytest.raises(OutOfPages, match="needs 10 pages, 9 are available"):
        pager.open(TOKENS, spare_pages=6)


def test_shared_pages_that_leave_the_window_do_not_lower_what_is_needed(make_world: Callable[..., World]) -> None:
    world = make_world(6, windows=(8,))
    owner, _ = world.compute(TOKENS[:9])  # owns three pages, and keeps them
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        world.pager.open(TOKENS[:32], spare_pages=0)
    check(world.pager, [owner])


@pytest.mark.parametrize("windows", [(), (0, -1)])
def test_a_window_of_less_than_nothing_is_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every layer group has a window"):
        Pager(4, 4, windows=windows)
