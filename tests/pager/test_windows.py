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
    table = world.pager.open(token_ids)
    cached = table.num_tokens
    for end in range(cached + 1, len(token_ids) + 1):
        world.extend(table, token_ids[end - 1 : end])
        world.pager.commit(table, token_ids[:end])
    return table


def test_each_group_has_a_table_and_all_grow_together(make_world: Callable[..., World]) -> None:
    pager = make_world(8, windows=HYBRID).pager
    table = pager.open([])
    table.append(5)
    assert pages(table) == [[0, 2], [1, 3]]
    assert table.pages_needed(4) == 2
    table.append(4)
    assert pages(table) == [[0, 2, 4], [1, 3, 5]]


def test_groups_grow_all_or_not_at_all(make_world: Callable[..., World]) -> None:
    pager = make_world(5, windows=HYBRID).pager
    table = pager.open([])
    table.append(3)
    assert table.max_append() == 5
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        table.append(6)
    assert (pages(table), pager.pool.num_free) == ([[0], [1]], 3)


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
    table = pager.open([])
    most = 0
    for length in range(1, 41):
        table.append(1)
        most = max(most, pager.pool.num_owned)
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
    assert (world.pager.pool.num_owned, world.pager.pool.num_free, table.num_committed) == (2, 10, 0)
    check(world.pager, [table])


def test_a_hit_needs_of_a_sliding_group_only_what_the_next_row_sees(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    first = grown(world, TOKENS[:24])
    assert pages(first)[1][:4] == [-1] * 4
    world.pager.open([7] * 40).release()
    taken = world.pager.open([])
    taken.append(4 * ((world.pager.pool.num_free + 4) // 2))  # evicts the four pages that left the window
    assert world.pager.pool.num_cached == 0
    second = world.pager.open([*TOKENS[:24], 7])
    cached = second.num_tokens
    assert (cached, pages(second)) == (24, pages(first))
    assert world.pager.open([*TOKENS[:20], 7]).num_tokens == 0  # the row at 20 needs tile 8 … 15
    check(world.pager, [first, taken, second])


def test_a_hit_ends_where_a_full_group_ends(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    first = grown(world, TOKENS[:14])
    table = world.pager.open([*TOKENS[:8], 7, 7, 7, 7, 7])
    cached = table.num_tokens
    assert (cached, pages(table)) == (8, [[0, 2], [1, 3]])
    check(world.pager, [first, table])


def test_a_hit_is_the_longest_whose_window_is_whole(make_world: Callable[..., World]) -> None:
    world = make_world(16, windows=(8,))
    grown(world, TOKENS[:24]).release()
    pool = world.pager.pool
    assert world.pager.prefix.match(world.pager.open([]).root, TOKENS, 6).pages == [[-1, -1, -1, -1, 4, 5]]
    pool.retain([4])
    pool._forget(4)  # as if evicted: 5 alone is no window, and neither is 3 without 4
    pool.release([4])
    table = world.pager.open([*TOKENS[:24], 7])
    cached = table.num_tokens
    assert (cached, pages(table)) == (16, [[-1, -1, 2, 3]])
    check(world.pager, [table])


def test_a_window_without_full_groups_hits_behind_evicted_pages(make_world: Callable[..., World]) -> None:
    world = make_world(10, windows=(8,))
    first = grown(world, TOKENS[:24])
    blocker = world.pager.open([])
    blocker.append(32)
    second = world.pager.open([*TOKENS[:24], 7])
    cached = second.num_tokens
    assert (cached, pages(second)) == (24, [[-1, -1, -1, -1, 4, 5]])
    check(world.pager, [first, blocker, second])


def test_a_fork_with_holes_copies_the_partial_page_of_every_group(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:18])
    twin = table.fork()
    assert pages(twin) == pages(table)
    assert twin.pages_needed(1) == 2
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
    assert [table.can_roll_back(to) for to in (0, 14, 15, 18, 19)] == [False, False, True, True, False]
    with pytest.raises(ValueError, match="cannot roll back to 14 tokens, earlier pages left their window"):
        table.rollback(14)
    assert table.num_tokens == 18
    table.rollback(15)
    world.extend(table, TOKENS[15:18])
    assert world.cells.read(table, 1, 8) == TOKENS[8:18]
    check(pager, [table])


def test_drafts_may_be_rolled_back_before_committing(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:14])
    world.extend(table, TOKENS[14:24])
    assert table.can_roll_back(14)
    table.rollback(15)
    world.pager.commit(table, TOKENS[:15])
    assert pages(table)[1][:2] == [-1, -1]
    check(world.pager, [table])


def test_a_fork_cannot_roll_back_further_than_its_original(make_world: Callable[..., World]) -> None:
    world = make_world(24, windows=HYBRID)
    table, _ = world.compute(TOKENS[:18])
    assert not table.fork().can_roll_back(14)
    hit = world.pager.open(TOKENS[:17])
    assert [hit.can_roll_back(to) for to in (14, 15, 16)] == [False, True, True]


def test_opening_counts_what_the_windows_will_hold(make_world: Callable[..., World]) -> None:
    pager = make_world(9, windows=(8,)).pager
    assert pager.pages_for(1000) == 4
    assert pager.open(TOKENS, spare_pages=5).num_tokens == 0
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
    with pytest.raises(ValueError, match="every layer group needs a window"):
        Pager(4, 4, windows=windows)
