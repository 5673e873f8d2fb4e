"""Growing, forking, rolling back and releasing one sequence's pages. Pages hold 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from quire.pager import OutOfPages, check

from tests.pager.conftest import MakeHarness


def test_a_table_grows_by_whole_pages(make_harness: MakeHarness) -> None:
    pager = make_harness(4).pager
    table = pager.open([])
    table.append(1)
    assert list(table.pages[0]) == [0]
    table.append(3)
    assert list(table.pages[0]) == [0]
    table.append(5)
    assert (list(table.pages[0]), table.num_tokens) == ([0, 1, 2], 9)


def test_page_ids_are_read_without_a_copy(make_harness: MakeHarness) -> None:
    pager = make_harness(4).pager
    table = pager.open([])
    table.append(9)
    view = np.frombuffer(table.pages[0], np.int32)
    table.pages[0][0] = 3
    assert view.tolist() == [3, 1, 2]


def test_growing_beyond_the_pool_changes_nothing(make_harness: MakeHarness) -> None:
    pager = make_harness(3).pager
    table = pager.open([])
    table.append(6)
    assert table.max_append() == 6
    with pytest.raises(OutOfPages):
        table.append(7)
    assert (list(table.pages[0]), table.num_tokens, pager.pool.num_free) == ([0, 1], 6, 1)
    table.append(6)
    assert (list(table.pages[0]), table.max_append()) == ([0, 1, 2], 0)


def test_growing_by_nothing_copies_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table = harness.pager.open([])
    harness.extend(table, [1, 2])
    twin = table.fork()
    assert twin.pages_needed(0) == 0
    twin.append(0)
    assert (list(twin.pages[0]), harness.memory.copies) == ([0], [])


def test_a_negative_growth_is_refused(make_harness: MakeHarness) -> None:
    pager = make_harness(1).pager
    table = pager.open([])
    with pytest.raises(ValueError, match="rollback removes tokens"):
        table.append(-1)


def test_a_fork_shares_every_page_until_one_of_the_two_writes(make_harness: MakeHarness) -> None:
    harness = make_harness(5)
    table = harness.pager.open([])
    harness.extend(table, [1, 2, 3, 4, 5, 6])
    twin = table.fork()
    assert (list(twin.pages[0]), harness.pager.pool.num_owned) == ([0, 1], 2)
    assert twin.pages_needed(1) == 1

    harness.extend(twin, [70])  # copies the partial page
    assert (list(table.pages[0]), list(twin.pages[0])) == ([0, 1], [0, 2])
    assert harness.memory.copies == [(1, 2)]
    assert table.pages_needed(1) == 0

    harness.extend(table, [7])  # is alone on its page again
    assert harness.memory.copies == [(1, 2)]
    assert harness.memory.read(table) == [1, 2, 3, 4, 5, 6, 7]
    assert harness.memory.read(twin) == [1, 2, 3, 4, 5, 6, 70]
    check(harness.pager, [table, twin])


def test_a_fork_at_a_page_border_copies_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table = harness.pager.open([])
    harness.extend(table, [1, 2, 3, 4])
    twin = table.fork()
    harness.extend(table, [5])
    harness.extend(twin, [50])
    assert (list(table.pages[0]), list(twin.pages[0]), harness.memory.copies) == ([0, 1], [0, 2], [])


def test_a_copy_and_new_pages_are_allocated_together_or_not_at_all(make_harness: MakeHarness) -> None:
    harness = make_harness(3)
    table = harness.pager.open([])
    harness.extend(table, [1, 2])
    twin = table.fork()
    assert twin.max_append() == 6  # two pages: one for the copy
    with pytest.raises(OutOfPages):
        twin.append(7)
    assert (list(twin.pages[0]), harness.memory.copies) == ([0], [])
    twin.append(6)
    assert list(twin.pages[0]) == [1, 2]
    assert table.max_append() == 2


def test_a_shared_partial_page_cannot_grow_without_a_page_for_its_copy(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(1)
    table = harness.pager.open([])
    harness.extend(table, [1, 2])
    twin = table.fork()
    assert twin.max_append() == 0
    table.release()
    assert twin.max_append() == 2


def test_rollback_releases_pages_that_held_only_later_tokens(make_harness: MakeHarness) -> None:
    pager = make_harness(6).pager
    table = pager.open([])
    table.append(15)
    table.rollback(5)
    assert (list(table.pages[0]), table.num_tokens) == ([0, 1], 5)
    assert list(pager.pool.free_pages()) == [4, 5, 3, 2]
    table.rollback(4)
    assert list(table.pages[0]) == [0]
    table.rollback(0)
    assert list(table.pages[0]) == []
    check(pager, [table])


def test_rollback_to_more_tokens_is_refused(make_harness: MakeHarness) -> None:
    pager = make_harness(2).pager
    table = pager.open([])
    table.append(3)
    with pytest.raises(ValueError, match="cannot roll back to 4 tokens, the table holds 3"):
        table.rollback(4)
    assert table.num_tokens == 3


def test_rolling_back_into_a_shared_page_copies_it_before_the_next_write(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(4)
    table = harness.pager.open([])
    harness.extend(table, [1, 2, 3, 4])
    twin = table.fork()
    twin.rollback(2)
    harness.extend(twin, [30])
    assert (harness.memory.read(table), harness.memory.read(twin)) == ([1, 2, 3, 4], [1, 2, 30])


def test_rolling_back_into_an_indexed_page_keeps_the_indexed_content(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table, _ = harness.compute([1, 2, 3, 4, 5, 6])
    table.rollback(3)
    harness.extend(table, [40])
    assert (list(table.pages[0]), harness.memory.copies) == ([2], [(0, 2)])
    other = harness.pager.open([1, 2, 3, 4, 5])
    cached = other.num_tokens
    assert (cached, harness.memory.read(other)) == (4, [1, 2, 3, 4])
    check(harness.pager, [table, other])


def test_a_page_filled_again_after_a_rollback_is_indexed_again(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table, _ = harness.compute([1, 2, 3, 4, 5, 6, 7, 8, 9])
    table.rollback(4)
    assert table.num_committed == 1
    harness.extend(table, [50, 60, 70, 80])
    harness.pager.commit(table, [1, 2, 3, 4, 50, 60, 70, 80])
    assert table.num_committed == 2
    check(harness.pager, [table])


def test_releasing_twice_releases_once(make_harness: MakeHarness) -> None:
    pager = make_harness(3).pager
    table = pager.open([])
    table.append(7)
    pager.commit(table, [1, 2, 3, 4, 5, 6, 7])
    table.release()
    table.release()
    assert (table.num_tokens, table.num_committed, list(table.pages[0])) == (0, 0, [])
    assert (pager.pool.num_free, pager.pool.num_cached) == (2, 1)
    check(pager, [])


def test_a_view_that_outlives_the_release_still_reads_the_old_ids(make_harness: MakeHarness) -> None:
    pager = make_harness(3).pager
    table = pager.open([])
    table.append(8)
    view = np.frombuffer(table.pages[0], np.int32)
    table.release()
    assert view.tolist() == [0, 1]
