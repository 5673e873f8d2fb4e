"""Layer groups: several tables per sequence from one pool.

Pages hold 4 tokens and tiles 8. With a window of 8, the row at position n needs tokens from max(0, n - 7) // 8 * 8 on.
"""

from __future__ import annotations

from typing import Any

import pytest
from quire.pager import OutOfPages, Pager, check

from tests.pager.conftest import MakeHarness, PagerHarness

HYBRID = (0, 8)
TOKENS = list(range(100, 140))

pytestmark = pytest.mark.usefixtures("small_tiles")


def pages(table: Any) -> list[list[int]]:
    return [list(each) for each in table.pages]


def grown(harness: PagerHarness, token_ids: list[int]) -> Any:
    """Return a table that decoded these tokens, one per step."""
    table = harness.pager.open(token_ids)
    cached = table.num_tokens
    for end in range(cached + 1, len(token_ids) + 1):
        harness.extend(table, token_ids[end - 1 : end])
        harness.pager.commit(table, token_ids[:end])
    return table


def test_each_group_has_a_table_and_all_grow_together(make_harness: MakeHarness) -> None:
    pager = make_harness(8, windows=HYBRID).pager
    table = pager.open([])
    table.append(5)
    assert pages(table) == [[0, 2], [1, 3]]
    assert table.pages_needed(4) == 2
    table.append(4)
    assert pages(table) == [[0, 2, 4], [1, 3, 5]]


def test_all_groups_grow_or_none(make_harness: MakeHarness) -> None:
    pager = make_harness(5, windows=HYBRID).pager
    table = pager.open([])
    table.append(3)
    assert table.max_append() == 5
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        table.append(6)
    assert (pages(table), pager.pool.num_free) == ([[0], [1]], 3)


@pytest.mark.parametrize(
    ("tokens", "released"),
    [(14, 0), (15, 2), (22, 2), (23, 4)],  # a row at 15 sees 8…15, one at 14 sees 7…14
)
def test_a_sliding_group_releases_whole_tiles_that_no_later_row_sees(
    make_harness: MakeHarness, tokens: int, released: int
) -> None:
    harness = make_harness(16, windows=HYBRID)
    table, _ = harness.compute(TOKENS[:tokens])
    full, sliding = pages(table)
    assert full.count(-1) == 0
    assert sliding[:released] == [-1] * released
    assert sliding.count(-1) == released
    assert harness.memory.read(table, 0) == TOKENS[:tokens]
    assert harness.memory.read(table, 1, 4 * released) == TOKENS[4 * released : tokens]
    check(harness.pager, [table])


@pytest.mark.parametrize("windows", [(0,), (8,), (1,), (0, 8), (0, 8, 8), (3, 21)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_decoding_never_holds_more_pages_than_predicted(
    make_harness: MakeHarness, windows: tuple[int, ...], enable_prefix_caching: bool
) -> None:
    pager = make_harness(64, windows=windows, enable_prefix_caching=enable_prefix_caching).pager
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


def test_pages_that_left_a_window_are_cached_and_the_oldest_is_evicted_first(make_harness: MakeHarness) -> None:
    harness = make_harness(12, windows=(8,))
    table, _ = harness.compute(TOKENS[:23])
    assert pages(table) == [[-1, -1, -1, -1, 4, 5]]
    assert list(harness.pager.pool.cached_pages()) == [0, 1, 2, 3]


def test_commit_releases_pages_without_a_prefix_cache_too(make_harness: MakeHarness) -> None:
    harness = make_harness(12, windows=(8,), enable_prefix_caching=False)
    table, _ = harness.compute(TOKENS[:23])
    assert (harness.pager.pool.num_owned, harness.pager.pool.num_free, table.num_committed) == (2, 10, 0)
    check(harness.pager, [table])


def test_a_hit_needs_only_the_pages_in_the_window_of_a_sliding_group(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    first = grown(harness, TOKENS[:24])
    assert pages(first)[1][:4] == [-1] * 4
    harness.pager.open([7] * 40).release()
    taken = harness.pager.open([])
    taken.append(4 * ((harness.pager.pool.num_free + 4) // 2))  # evicts the four pages that left the window
    assert harness.pager.pool.num_cached == 0
    second = harness.pager.open([*TOKENS[:24], 7])
    cached = second.num_tokens
    assert (cached, pages(second)) == (24, pages(first))
    assert harness.pager.open([*TOKENS[:20], 7]).num_tokens == 0  # the row at 20 needs tile 8 … 15
    check(harness.pager, [first, taken, second])


def test_a_hit_ends_where_a_full_group_ends(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    first = grown(harness, TOKENS[:14])
    table = harness.pager.open([*TOKENS[:8], 7, 7, 7, 7, 7])
    cached = table.num_tokens
    assert (cached, pages(table)) == (8, [[0, 2], [1, 3]])
    check(harness.pager, [first, table])


def test_a_hit_is_the_longest_with_a_complete_window(make_harness: MakeHarness) -> None:
    harness = make_harness(16, windows=(8,))
    grown(harness, TOKENS[:24]).release()
    pool = harness.pager.pool
    assert harness.pager.prefix.match(harness.pager.open([]).root, TOKENS, 6).pages == [[-1, -1, -1, -1, 4, 5]]
    pool.retain([4])
    pool._forget(4)  # an eviction: neither 5 alone nor 3 alone is a complete window
    pool.release([4])
    table = harness.pager.open([*TOKENS[:24], 7])
    cached = table.num_tokens
    assert (cached, pages(table)) == (16, [[-1, -1, 2, 3]])
    check(harness.pager, [table])


def test_without_full_groups_a_hit_can_follow_evicted_pages(make_harness: MakeHarness) -> None:
    harness = make_harness(10, windows=(8,))
    first = grown(harness, TOKENS[:24])
    blocker = harness.pager.open([])
    blocker.append(32)
    second = harness.pager.open([*TOKENS[:24], 7])
    cached = second.num_tokens
    assert (cached, pages(second)) == (24, [[-1, -1, -1, -1, 4, 5]])
    check(harness.pager, [first, blocker, second])


def test_a_fork_with_holes_copies_the_partial_page_of_every_group(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    table, _ = harness.compute(TOKENS[:18])
    twin = table.fork()
    assert pages(twin) == pages(table)
    assert twin.pages_needed(1) == 2
    harness.extend(twin, [7])
    assert len(harness.memory.copies) == 2
    harness.extend(table, [8])
    assert len(harness.memory.copies) == 2
    for group in (0, 1):
        assert harness.memory.read(twin, group, 8) == [*TOKENS[8:18], 7]
        assert harness.memory.read(table, group, 8) == [*TOKENS[8:18], 8]
    check(harness.pager, [table, twin])


def test_rolling_back_before_released_pages_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    table, _ = harness.compute(TOKENS[:18])
    pager = harness.pager
    assert [table.can_roll_back(to) for to in (0, 14, 15, 18, 19)] == [False, False, True, True, False]
    with pytest.raises(ValueError, match="cannot roll back to 14 tokens, earlier pages left their window"):
        table.rollback(14)
    assert table.num_tokens == 18
    table.rollback(15)
    harness.extend(table, TOKENS[15:18])
    assert harness.memory.read(table, 1, 8) == TOKENS[8:18]
    check(pager, [table])


def test_drafts_may_be_rolled_back_before_committing(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    table, _ = harness.compute(TOKENS[:14])
    harness.extend(table, TOKENS[14:24])
    assert table.can_roll_back(14)
    table.rollback(15)
    harness.pager.commit(table, TOKENS[:15])
    assert pages(table)[1][:2] == [-1, -1]
    check(harness.pager, [table])


def test_a_fork_cannot_roll_back_further_than_its_original(make_harness: MakeHarness) -> None:
    harness = make_harness(24, windows=HYBRID)
    table, _ = harness.compute(TOKENS[:18])
    assert not table.fork().can_roll_back(14)
    hit = harness.pager.open(TOKENS[:17])
    assert [hit.can_roll_back(to) for to in (14, 15, 16)] == [False, True, True]


def test_a_fork_and_its_original_slide_independently(make_harness: MakeHarness) -> None:
    harness = make_harness(16, windows=(8,))
    table, _ = harness.compute(TOKENS[:14])
    fork = table.fork()
    for each in (table, fork):
        harness.extend(each, TOKENS[14:15])
        harness.pager.commit(each, TOKENS[:15])
    assert [pages(each)[0].count(-1) for each in (table, fork)] == [2, 2]
    assert [each.num_pages for each in (table, fork)] == [2, 2]
    check(harness.pager, [table, fork])


def test_open_counts_the_pages_that_the_windows_will_hold(make_harness: MakeHarness) -> None:
    pager = make_harness(9, windows=(8,)).pager
    assert pager.pages_for(1000) == 4
    assert pager.open(TOKENS, spare_pages=5).num_tokens == 0
    with pytest.raises(OutOfPages, match="needs 10 pages, 9 are available"):
        pager.open(TOKENS, spare_pages=6)


def test_shared_pages_that_leave_the_window_do_not_lower_what_is_needed(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(6, windows=(8,))
    owner, _ = harness.compute(TOKENS[:9])  # owns three pages
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        harness.pager.open(TOKENS[:32], spare_pages=0)
    check(harness.pager, [owner])


@pytest.mark.parametrize("windows", [(), (0, -1)])
def test_a_negative_window_is_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every layer group needs a window"):
        Pager(4, 4, windows=windows)
