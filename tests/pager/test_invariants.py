"""The audit finds each kind of inconsistency."""

from __future__ import annotations

import pytest
from quire.pager import InvariantViolated, Pager, PageTable, check

from tests.pager.conftest import MakeHarness

PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31]


@pytest.fixture
def audited(make_harness: MakeHarness) -> tuple[Pager, PageTable]:
    """Six pages: 0, 1 and 2 owned (0 and 1 indexed), 3 cached, 4 and 5 free."""
    harness = make_harness(6)
    table, _ = harness.compute(PROMPT)
    harness.compute([1, 2, 3, 4])[0].release()
    return harness.pager, table


def test_a_consistent_pager_passes(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    assert (pager.pool.num_free, pager.pool.num_cached, pager.pool.num_owned) == (2, 1, 3)
    check(pager, [table])


def test_a_forgotten_table_is_found(audited: tuple[Pager, PageTable]) -> None:
    with pytest.raises(InvariantViolated, match="page 0 has 1 references, 0 are explained"):
        check(audited[0], [])


def test_a_missing_reference_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    with pytest.raises(InvariantViolated, match="page 0 has 1 references, 2 are explained"):
        check(pager, [table, table])


def test_a_lost_page_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    pager.pool._references[4] = 0
    pager.pool._unlink(4)
    with pytest.raises(InvariantViolated, match="lost or in two places"):
        check(pager, [table])


def test_a_wrong_counter_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    pager.pool.num_cached -= 1
    with pytest.raises(InvariantViolated, match="do not match the lists"):
        check(pager, [table])


def test_a_stale_index_entry_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    pager.pool._page_by_key[0][b"stale"] = 2
    with pytest.raises(InvariantViolated, match="index and contents disagree"):
        check(pager, [table])


def test_content_on_a_free_page_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    pager.pool._contents[4] = pager.pool._contents[3]
    with pytest.raises(InvariantViolated, match="free page still has content"):
        check(pager, [table])


def test_a_cached_page_without_content_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    pager.pool._forget(3)
    with pytest.raises(InvariantViolated, match="cached page has no content"):
        check(pager, [table])


def test_a_child_without_its_parent_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    table.keys.clear()
    pager.pool._forget(0)
    with pytest.raises(InvariantViolated, match="page 1 outlived the page before it"):
        check(pager, [table])


def test_a_committed_page_that_is_not_indexed_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    table.keys.append(b"another")
    with pytest.raises(InvariantViolated, match="committed pages it does not fill"):
        check(pager, [table])
    table.keys.pop()
    pager.pool._forget(1)
    with pytest.raises(InvariantViolated, match="committed page 1 is not indexed"):
        check(pager, [table])


def test_a_table_with_a_page_too_many_or_twice_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    table.num_tokens -= 1
    with pytest.raises(InvariantViolated, match="8 tokens in 3 pages"):
        check(pager, [table])
    table.num_tokens += 1
    table.pages[0][2] = 0
    with pytest.raises(InvariantViolated, match="lists a page twice"):
        check(pager, [table])


def test_a_page_released_too_early_or_out_of_order_is_found(make_harness: MakeHarness) -> None:
    harness = make_harness(6, windows=(8,))
    table, _ = harness.compute(PROMPT)
    table.pages[0][1] = -1
    with pytest.raises(InvariantViolated, match="a hole in a table"):
        check(harness.pager, [table])
    table.pages[0][0] = -1
    with pytest.raises(InvariantViolated, match="page 1 was released within its window of 8 tokens"):
        check(harness.pager, [table])


def test_a_reservation_without_a_table_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    table.reserve(2)
    table.reserved = 1
    with pytest.raises(InvariantViolated, match="2 pages are reserved, 1 are explained"):
        check(pager, [table])
    pager.pool.num_reserved = table.reserved = 4
    with pytest.raises(InvariantViolated, match="4 pages are reserved, only 3 are left"):
        check(pager, [table])


def test_a_shared_page_that_a_table_would_write_is_found(audited: tuple[Pager, PageTable]) -> None:
    pager, table = audited
    writable = table._writable
    twin = table.fork()
    table._writable = writable
    with pytest.raises(InvariantViolated, match="page 2 is writable, but shared or indexed"):
        check(pager, [table, twin])
